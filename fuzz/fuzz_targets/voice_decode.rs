//! Recordings of strangers; the body is `antiphon::voice::decode::fuzz`.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| antiphon::voice::decode::fuzz(bytes));
