//! Voices heard and made: enrolment (recordings decoded or refused, voices made of them, the reference numbers), and who
//! answered a call.

mod answer;
mod decode;
mod enrol;
#[path = "../fuzz/smoke.rs"]
mod fuzz_smoke;
mod golden;
