//! HTTP and WebSocket.

pub mod auth;
pub mod config;
pub mod error;
