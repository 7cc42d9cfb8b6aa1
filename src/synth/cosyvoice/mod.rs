//! CosyVoice3.

pub mod backend;
pub mod checkpoint;
pub mod config;
pub mod cpu;
pub mod gpu;
pub mod noise;
pub mod pickle;
pub mod probe;
pub mod sample;
pub mod schedule;
pub mod selftest;
pub mod text;
pub mod yaml;
