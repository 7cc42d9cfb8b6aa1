//! HTTP and WebSocket.

pub mod auth;
pub mod error;
