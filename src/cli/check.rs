//! `antiphon check`: is this configuration usable?

use std::path::PathBuf;

use super::Failure;
use crate::config;

#[derive(clap::Args)]
pub(super) struct Args {
    /// Configuration file; none: built-in defaults and the environment.
    #[arg(short, long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Print the JSON schema of the configuration, for editors and generators, and check nothing.
    #[arg(long, conflicts_with = "config")]
    schema: bool,
}

/// Loads and validates; starts nothing.
pub(super) fn run(args: &Args) -> Result<(), Failure> {
    if args.schema {
        print!("{}", config::SCHEMA);
        return Ok(());
    }
    super::load(args.config.as_deref())?.check_exposure()?;
    match &args.config {
        Some(file) => println!("{}: valid", file.display()),
        None => println!("defaults and environment: valid"),
    }
    Ok(())
}
