//! HTTP and WebSocket.

pub mod auth;
pub mod error;
pub mod whip;
