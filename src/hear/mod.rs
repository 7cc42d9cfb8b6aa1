//! What the caller says, as words: recognisers and turn taking.

pub mod whisper;
