//! The load generator's command line.
fn main() {}
