//! Calls in virtual time: real machines, codecs and packets, a fake engine, no socket and no clock.

mod barge_in;
mod keys;
mod limits;
mod pacing;
mod turns;
mod world;
