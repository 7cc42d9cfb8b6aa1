//! `antiphon-loadgen`: synthetic callers that listen.

mod cli;

use std::process::ExitCode;

use clap::Parser as _;

fn main() -> ExitCode {
    let arguments = cli::Arguments::parse();
    let runtime = match tokio::runtime::Builder::new_multi_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => {
            eprintln!("antiphon-loadgen: no runtime: {error}");
            return ExitCode::from(1);
        }
    };
    let code = runtime.block_on(cli::run(arguments));
    // What is still winding down (closing connections) is given a moment, not forever.
    runtime.shutdown_timeout(std::time::Duration::from_secs(2));
    code
}
