//! Voices as files, and their enrolment from a recording.
//!
//! Owns the way from a recording to a voice file, and the folder the files lie in. Never synthesises, never touches
//! a call. In the order of that way: [`decode`], [`quality`], [`prompt`], [`resample`], [`features`]; the two
//! networks [`campplus`] and [`speech_tokenizer`] over [`onnx`]; [`enrol`], which is all of it; [`file`](mod@file)
//! and [`store`]. [`cli`] and [`api`] are its two doors; [`selftest`], [`random`] and [`bench`] are for checking and
//! measuring.

pub mod api;
#[cfg(feature = "bench")]
pub mod bench;
pub mod campplus;
pub mod cli;
pub mod copies;
pub mod decode;
pub mod enrol;
pub mod features;
pub mod file;
pub mod loudness;
pub mod onnx;
pub mod prompt;
pub mod quality;
pub mod random;
pub mod resample;
pub mod selftest;
pub mod speech_tokenizer;
pub mod store;
