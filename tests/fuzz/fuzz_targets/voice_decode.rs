//! Recordings of strangers; the body is `antiphon::voice::decode::fuzz`.
//!
//! With a nightly toolchain, guided by coverage: `cargo +nightly fuzz run --fuzz-dir tests/fuzz voice_decode`. With any
//! toolchain, without coverage: `cargo test --test voice for_long -- --ignored --nocapture`.
#![no_main]

// The fuzzer's own hook aborts on every panic, also on those that `decode` catches and turns into errors.
libfuzzer_sys::fuzz_target!(
    init: std::panic::set_hook(Box::new(|_| {})),
    |bytes: &[u8]| antiphon::voice::decode::fuzz(bytes)
);
