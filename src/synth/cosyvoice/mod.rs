//! CosyVoice3.

pub mod backend;
pub mod checkpoint;
pub mod config;
pub mod gpu;
pub mod noise;
pub mod pickle;
pub mod sample;
pub mod schedule;
pub mod yaml;
