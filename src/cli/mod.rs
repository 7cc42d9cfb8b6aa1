//! The command line: arguments, exit codes, signals.
//!
//! Exit codes: 0 done, 1 ran and failed, 2 usage, 64 bad configuration, 69 a needed service is not there.

#[cfg(feature = "bench")]
mod bench;
mod check;
#[cfg(feature = "demo")]
mod demo;
#[cfg(feature = "bench")]
mod doctor;
mod model;
mod notify;
mod recording;
mod say;
mod serve;
mod shell;
mod text;
mod top;
mod worker;

use std::future::Future;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::{CommandFactory, Parser, Subcommand};

use crate::config::{self, Config, ConfigError};

/// It ran and failed.
const FAILED: u8 = 1;
/// The configuration is wrong.
const BAD_CONFIG: u8 = 64;
/// A needed service, program or device is not there.
const UNAVAILABLE: u8 = 69;

#[derive(Parser)]
#[command(version, about = "A real-time media gateway that gives text agents a voice on live phone and browser calls")]
struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Run the gateway.
    Serve(ServeArgs),
    /// Place one SIP and one WebRTC call to a gateway of its own, have both hear speech, and report.
    #[cfg(feature = "demo")]
    Demo(demo::Args),
    /// Speak a text to a file or to standard output.
    Say(say::Args),
    /// Print how a text will be said: numbers, dates and signs in words.
    Text(text::Args),
    /// Read and validate a configuration.
    Check(check::Args),
    /// Fetch, check, invent and test checkpoints.
    #[command(subcommand)]
    Model(model::Command),
    /// Enrol, list and remove voices.
    #[command(subcommand)]
    Voice(crate::voice::cli::Command),
    /// Decrypt recordings.
    #[command(subcommand)]
    Recording(recording::Command),
    /// Speak for gateways on other machines.
    Worker(worker::Args),
    /// Say what this machine has for the voices, what is missing, and about how many calls it carries.
    #[cfg(feature = "bench")]
    Doctor(doctor::Args),
    /// Watch a running gateway: calls, devices, queue, latency.
    Top(top::Args),
    /// Measure the engine, egress pacing, codecs or enrolment.
    #[cfg(feature = "bench")]
    Bench(bench::Args),
    /// Print the completions of a shell.
    Completions(shell::Completions),
    /// Print the manual page, or write those of all commands.
    Man(shell::Man),
}

#[derive(clap::Args)]
struct ConfigFile {
    /// Configuration file; none: built-in defaults, loopback only.
    #[arg(short, long, value_name = "FILE")]
    config: Option<PathBuf>,
}

#[derive(clap::Args)]
struct ServeArgs {
    #[command(flatten)]
    file: ConfigFile,
    /// Take the place of the gateway that runs with the same state directory: its sockets and all new calls. It keeps the calls
    /// that it has and ends with the last of them. Where none runs, this is a start as any other.
    #[arg(long)]
    takeover: bool,
}

/// How a command ended when it did not succeed.
pub(crate) struct Failure {
    code: u8,
    message: String,
}

impl Failure {
    /// Exit code 1.
    pub(crate) fn failed(error: impl std::fmt::Display) -> Self {
        Self { code: FAILED, message: error.to_string() }
    }

    /// What came of writing to a file or a pipe. A reader that closes the pipe has had enough: nothing is said, and exit code 0.
    pub(crate) fn to_write(error: &std::io::Error) -> Self {
        match error.kind() {
            std::io::ErrorKind::BrokenPipe => Self { code: 0, message: String::new() },
            _ => Self::failed(error),
        }
    }

    /// What came of making the file or folder `path`, and what helps.
    pub(crate) fn to_make(path: &Path, error: &std::io::Error) -> Self {
        let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty() && !folder.exists());
        let help = match folder {
            Some(folder) => format!("make its folder first, for example `mkdir -p {}`", folder.display()),
            None => "name another place, for example one in `/tmp`".to_owned(),
        };
        Self::failed(format!("{}: {error}; {help}", path.display()))
    }

    /// The exit code of a command that has already said what was wrong.
    pub(crate) fn from_code(code: u8) -> Result<(), Self> {
        if code == 0 { Ok(()) } else { Err(Self { code, message: String::new() }) }
    }

    /// Exit code 69.
    pub(crate) fn unavailable(error: impl std::fmt::Display) -> Self {
        Self { code: UNAVAILABLE, message: error.to_string() }
    }
}

impl From<ConfigError> for Failure {
    fn from(error: ConfigError) -> Self {
        Self { code: BAD_CONFIG, message: error.to_string() }
    }
}

/// A tag as BCP 47 (RFC 5646) forms them: letters first, then parts of letters and digits.
fn language(text: &str) -> Result<String, String> {
    let part = |part: &str| (1..=8).contains(&part.len()) && part.bytes().all(|b| b.is_ascii_alphanumeric());
    let first = text.split('-').next().unwrap_or_default();
    let letters = (2..=8).contains(&first.len()) && first.bytes().all(|b| b.is_ascii_alphabetic());
    match letters && text.split('-').all(part) {
        true => Ok(text.to_owned()),
        false => Err("expected a BCP 47 tag, for example de or en-GB".to_owned()),
    }
}

/// Runs the program.
pub fn main() -> ExitCode {
    let args = Args::parse();
    if !matches!(args.command, Command::Serve(_)) {
        end_with_the_reader();
    }
    // The TLS stack wants one provider for the process; a second call only says that it is there.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let outcome = match args.command {
        Command::Serve(args) => serve::run(args.file.config.as_deref(), args.takeover),
        #[cfg(feature = "demo")]
        Command::Demo(args) => demo::run(args),
        Command::Say(args) => say::run(args),
        Command::Text(args) => text::run(args),
        Command::Check(args) => check::run(&args),
        Command::Model(command) => model::run(command),
        Command::Voice(command) => voice(&command),
        Command::Recording(command) => recording::run(command),
        Command::Worker(args) => worker::run(&args),
        #[cfg(feature = "bench")]
        Command::Doctor(args) => doctor::run(&args),
        Command::Top(args) => top::run(&args),
        #[cfg(feature = "bench")]
        Command::Bench(args) => bench::run(args),
        Command::Completions(args) => shell::completions(&args, Args::command()),
        Command::Man(args) => shell::man(&args, Args::command()),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            if !failure.message.is_empty() {
                eprintln!("antiphon: {}", failure.message);
            }
            ExitCode::from(failure.code)
        }
    }
}

/// Nothing more to do where the reader of our output has gone; other errors are failures.
fn unless_closed(written: std::io::Result<()>) -> Result<(), Failure> {
    match written {
        Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => Ok(()),
        written => written.map_err(Failure::failed),
    }
}

/// `antiphon ... | head` ends in silence: the reader has read enough. The standard library ignores SIGPIPE and
/// `println!` panics instead; the signal's default could only be had back by `unsafe`.
fn end_with_the_reader() {
    let usual = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |info| {
        let message = info.payload().downcast_ref::<String>().map_or("", String::as_str);
        if message.starts_with("failed printing to stdout") && message.contains("Broken pipe") {
            std::process::exit(0);
        }
        usual(info);
    }));
}

fn voice(command: &crate::voice::cli::Command) -> Result<(), Failure> {
    let defaults = model::voice_defaults(&load(None)?);
    let code = crate::voice::cli::run(command, &defaults, &mut std::io::stdout(), &mut std::io::stderr());
    Failure::from_code(code)
}

fn load(file: Option<&Path>) -> Result<Config, ConfigError> {
    Config::load(file, config::variables())?.with_state_dir(config::variables())
}

/// Whether `config` still makes sense with what the command line changed of it.
fn checked(config: &Config) -> Result<(), Failure> {
    config.validate().map_err(|message| Failure { code: BAD_CONFIG, message })
}

/// Runs `future` on the control runtime: two workers, because nothing on it computes.
fn block_on<T>(future: impl Future<Output = Result<T, Failure>>) -> Result<T, Failure> {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .thread_name("control")
        .enable_all()
        .build()
        .map_err(Failure::failed)?;
    runtime.block_on(future)
}
