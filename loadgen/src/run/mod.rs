//! Many calls: from the words of a scenario to load, levels and the report.

pub mod dictation;
pub mod ladder;
pub mod load;
pub mod prepare;
pub mod report;
pub mod scenario;
pub mod snapshot;
