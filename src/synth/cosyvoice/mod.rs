//! CosyVoice3.

pub mod archive;
pub mod backend;
pub mod checkpoint;
pub mod config;
pub mod cpu;
pub mod gpu;
pub mod layout;
pub mod noise;
pub mod pickle;
pub mod probe;
pub mod random;
pub mod sample;
pub mod schedule;
pub mod selftest;
pub mod text;
pub mod verify;
pub mod yaml;
