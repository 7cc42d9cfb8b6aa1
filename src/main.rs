//! The `antiphon` program.

use std::process::ExitCode;

fn main() -> ExitCode {
    antiphon::cli::main()
}
