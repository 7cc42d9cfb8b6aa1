//! Batch jobs across restarts and kills of the process that works on them.

mod kill;
mod shared;
