//! The gateway under test, and the agent server that it dials.

pub mod agent;
pub mod dispatch;
pub mod gateway;
pub mod process;
pub mod recognizer;
pub mod stages;
