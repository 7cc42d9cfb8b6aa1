#![no_main]

#[path = "../targets.rs"]
mod targets;

libfuzzer_sys::fuzz_target!(init: targets::begin(), |bytes: &[u8]| targets::run("dialogs", bytes));
