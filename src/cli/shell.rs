//! `antiphon completions` and `antiphon man`: what a package installs for shells and `man`.

use std::io::{self, Write};
use std::path::PathBuf;

use clap::Command;
use clap_complete::Shell;

use super::Failure;

#[derive(clap::Args)]
pub(super) struct Completions {
    /// Which shell; `antiphon completions bash > /etc/bash_completion.d/antiphon`.
    shell: Shell,
}

#[derive(clap::Args)]
pub(super) struct Man {
    /// A folder for one page a command; none: the program's own page on standard output.
    #[arg(long, value_name = "DIR")]
    dir: Option<PathBuf>,
}

/// Prints the script of a shell.
pub(super) fn completions(args: &Completions, mut command: Command) -> Result<(), Failure> {
    // In memory first: the generator panics where its output is closed.
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut command, "antiphon", &mut script);
    print(&script)
}

/// Prints the page of the program, or writes those of all commands.
pub(super) fn man(args: &Man, command: Command) -> Result<(), Failure> {
    match &args.dir {
        None => {
            let mut page = Vec::new();
            clap_mangen::Man::new(command).render(&mut page).map_err(Failure::failed)?;
            print(&page)
        }
        Some(dir) => {
            let told = |error: io::Error| Failure::failed(format!("{}: {error}", dir.display()));
            std::fs::create_dir_all(dir).map_err(told)?;
            clap_mangen::generate_to(command, dir).map_err(told)
        }
    }
}

fn print(bytes: &[u8]) -> Result<(), Failure> {
    super::unless_closed(io::stdout().lock().write_all(bytes))
}
