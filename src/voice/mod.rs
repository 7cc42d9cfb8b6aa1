//! Voices as files, and their enrolment from a recording.
//!
//! Owns the way from a recording to a voice file and the folder the files lie in. Never synthesises, never touches
//! a call. In the order of that way: `decode`, `resample`, `features`, then `onnx` with the two networks
//! `campplus` and `speech_tokenizer`.

pub mod campplus;
pub mod decode;
pub mod features;
pub mod file;
pub mod onnx;
pub mod prompt;
pub mod quality;
pub mod resample;
pub mod selftest;
pub mod speech_tokenizer;
