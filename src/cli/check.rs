//! `antiphon check`: is this configuration usable?

use std::path::Path;

use super::Failure;

/// Loads and validates; starts nothing.
pub(super) fn run(file: Option<&Path>) -> Result<(), Failure> {
    super::load(file)?;
    match file {
        Some(file) => println!("{}: valid", file.display()),
        None => println!("defaults and environment: valid"),
    }
    Ok(())
}
