//! Voices as files, and their enrolment from a recording.

pub mod file;
