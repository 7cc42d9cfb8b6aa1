//! Calls in virtual time: real machines, codecs and packets, a fake engine, no socket and no clock. And the
//! scheduler alone, against recorded step costs.

mod barge_in;
mod keys;
mod limits;
mod pacing;
mod sched;
mod turns;
mod world;
