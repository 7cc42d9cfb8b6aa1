//! Voice enrolment: recordings decoded or refused, voices made of them, and the reference numbers.

mod decode;
mod enrol;
mod golden;
