//! Voice enrolment: recordings decoded or refused, voices made of them, and the reference numbers.

mod decode;
mod enrol;
#[path = "../fuzz/smoke.rs"]
mod fuzz_smoke;
mod golden;
