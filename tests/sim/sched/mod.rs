//! The scheduler against recorded step costs: policies side by side, and properties over random scenarios.
//!
//! Everything is a function of a seed. To replay one: `cargo test --test sim -- --nocapture`, with the seed that a
//! failure prints put into `tests/sim/sched/replay.txt` as `property SEED` (traced step by step).

mod capacity;
mod engine;
mod fleet;
mod load;
mod policy;
mod predicted;
mod property;
mod rate;
mod rng;
mod tenants;
mod typed;
mod world;
