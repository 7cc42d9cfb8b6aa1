//! Who supplies the text: agents over WebSocket or data channel, and built-in ones.

pub mod config;
pub mod frames;
