//! The command line.

mod attack;
mod dictate;
mod ladder;
mod report;
mod run;
mod signals;
mod target;
mod watch;

use std::process::ExitCode;

use antiphon_loadgen::clock;
use antiphon_loadgen::prepare::About;
use antiphon_loadgen::process::Host;
use antiphon_loadgen::report::{FORMAT, Report};
use clap::{Parser, Subcommand};

/// Exit codes, as all programs of this project: usage is 2 by clap itself.
pub(crate) const FAILED: u8 = 1;
pub(crate) const BAD_CONFIGURATION: u8 = 64;
pub(crate) const UNAVAILABLE: u8 = 69;

/// Synthetic callers that listen: SIP/RTP and WebRTC endpoints that place calls, have turns spoken to them, and
/// measure what they hear.
#[derive(Parser)]
#[command(name = "antiphon-loadgen", version, about)]
pub(crate) struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Measure one level of load after the other and find the knee.
    Ladder(Box<ladder::Ladder>),
    /// Run a scenario: arrivals, turns, interruptions, a bad network.
    Run(run::Run),
    /// Say sentences on calls, and compare the words that the gateway's recogniser hears.
    Dictate(dictate::Dictate),
    /// Attack a gateway that is started for it, beside calls that speak, and tell what must hold.
    Attack(attack::Attack),
    /// Draw the page of a report.
    Report(report::Page),
    /// How many gateways for how many users.
    Size(report::Size),
}

/// A report on what was prepared, before anything was measured.
fn begun(about: About) -> Report {
    Report {
        format: FORMAT,
        when: clock::wall().as_secs(),
        command: std::env::args().collect::<Vec<_>>().join(" "),
        targets: about.targets,
        host: Host::here(),
        devices: about.devices,
        notes: about.notes,
        ..Report::default()
    }
}

/// Why a command did not do what it should.
pub(crate) struct Failure {
    pub(crate) code: u8,
    pub(crate) message: String,
}

impl Failure {
    pub(crate) fn new(code: u8, message: impl Into<String>) -> Failure {
        Failure { code, message: message.into() }
    }
}

pub(crate) async fn run(arguments: Arguments) -> ExitCode {
    let result = match arguments.command {
        Command::Ladder(ladder) => ladder.run().await,
        Command::Run(run) => run.run().await,
        Command::Dictate(dictate) => dictate.run().await,
        Command::Attack(attack) => attack.run().await,
        Command::Report(page) => page.run(),
        Command::Size(size) => size.run(),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            eprintln!("antiphon-loadgen: {}", failure.message);
            ExitCode::from(failure.code)
        }
    }
}
