//! `antiphon-loadgen`: synthetic callers that listen.

mod cli;

use std::process::ExitCode;

use clap::Parser as _;

fn main() -> ExitCode {
    let arguments = cli::Arguments::parse();
    // Callers share few threads: one that is awake for another call takes the packet of this one along, and most of the
    // cores of the machine are left to the gateway, if it runs here.
    let threads = std::thread::available_parallelism().map_or(1, usize::from).div_ceil(4);
    let runtime = match tokio::runtime::Builder::new_multi_thread().worker_threads(threads).enable_all().build() {
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
