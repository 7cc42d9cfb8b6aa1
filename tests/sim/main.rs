//! Simulations in virtual time.

mod sched;
