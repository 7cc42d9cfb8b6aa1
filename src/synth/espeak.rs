//! espeak
