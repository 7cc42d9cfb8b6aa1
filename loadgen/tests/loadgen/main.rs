//! The synthetic callers against each other and against a test gateway, and the program itself.

#![allow(clippy::unwrap_used, reason = "a test ends where something is not as it should be")]

mod cli;
mod ladder;
mod rtc;
mod sip;
mod support;
