//! Batch jobs and records across restarts and kills of the processes that work on them, and of their database.

mod kill;
mod records;
mod shared;
