//! One call with its turns: what is spoken, whether it passed, and the figures of it.

pub mod corpus;
pub mod exchange;
pub mod judge;
pub mod sentences;
pub mod stats;
pub mod words;
