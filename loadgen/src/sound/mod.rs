//! What arrived and when, what that means to a listener, and recordings.

pub mod correlate;
pub mod ear;
pub mod heard;
pub mod listen;
pub mod synthetic;
pub mod wav;
