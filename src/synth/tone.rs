//! tone
