//! Simulations in virtual time: calls with real machines, codecs and packets on a fake engine, and the
//! scheduler on a device of recorded costs. No socket and no clock.

mod answering;
mod barge_in;
#[allow(dead_code, reason = "the gateway's tests use the rest")]
#[path = "../gateway/counted.rs"]
mod counted;
mod exchanges;
mod keys;
mod limits;
mod pacing;
mod sched;
mod speculation;
mod turns;
mod world;
