//! CosyVoice3.

pub mod gpu;
