//! The CosyVoice3 engine on the CPU: its checkpoint files, its numbers, and what a caller of it relies on.

mod checkpoint;
mod engine;
mod exact;
mod failing;
mod full;
mod golden;
mod live;
mod pull;
mod rows;
mod streaming;
