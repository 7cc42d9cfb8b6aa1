//! `antiphon recording`: what gateways have recorded.

use std::fs::File;
use std::io::{BufReader, ErrorKind, Read as _, Write as _};
use std::path::{Path, PathBuf};

use clap::Subcommand;

use super::{Failure, load};
use crate::recording::{Key, Opener, SEALED, complete};
use crate::secret::Secret;

#[derive(Subcommand)]
pub(super) enum Command {
    /// Make a file that players read of an encrypted recording.
    Decrypt(Decrypt),
}

#[derive(clap::Args)]
pub(super) struct Decrypt {
    /// The recording, as the gateway has stored it.
    file: PathBuf,
    /// Where the sound goes; none: beside it, without `.enc`.
    #[arg(short, long, value_name = "FILE")]
    out: Option<PathBuf>,
    /// File with the key; none: that of `[recording] key`.
    #[arg(long, value_name = "FILE")]
    key_file: Option<PathBuf>,
    /// Configuration that names the key.
    #[arg(short, long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Take what is there of a recording whose end is missing.
    #[arg(long)]
    partial: bool,
}

pub(super) fn run(command: Command) -> Result<(), Failure> {
    let Command::Decrypt(args) = command;
    let key = match &args.key_file {
        Some(file) => Key::parse(&Secret::from_file(file).map_err(Failure::failed)?).map_err(Failure::failed)?,
        None => load(args.config.as_deref())?.recording.sealing().map_err(Failure::failed)?.ok_or_else(|| {
            Failure::failed("no key: name a file that holds it, for example `--key-file recording.key`, or by -c a configuration with [recording] key")
        })?,
    };
    let out = match args.out {
        Some(out) => out,
        None => beside(&args.file).ok_or_else(|| {
            Failure::failed(format!("{}: say where the sound goes, for example `--out call.wav`", args.file.display()))
        })?,
    };
    decrypt(&args.file, &out, &key, args.partial).map_err(|error| {
        let hint = if error.kind() == ErrorKind::UnexpectedEof { "; --partial takes what is there" } else { "" };
        Failure::failed(format!("{}: {error}{hint}", args.file.display()))
    })?;
    println!("{}", out.display());
    Ok(())
}

/// The same name without what marks it as encrypted.
fn beside(file: &Path) -> Option<PathBuf> {
    Some(file.with_file_name(file.file_name()?.to_str()?.strip_suffix(SEALED)?))
}

fn decrypt(file: &Path, out: &Path, key: &Key, partial: bool) -> std::io::Result<()> {
    let mut sound = Opener::new(BufReader::new(File::open(file)?), key, partial)?;
    let mut plain = Vec::new();
    // As much as a recording of a long call has.
    sound.read_to_end(&mut plain)?;
    // A WAV file's length was not known when its head was encrypted.
    complete(&mut plain);
    let mut out = File::options().write(true).create_new(true).open(out)?;
    out.write_all(&plain)?;
    out.sync_all()
}
