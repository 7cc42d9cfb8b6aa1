//! Files that are there whole or not at all: written beside their name, then renamed.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};

/// Puts `bytes` at `path`. Who reads meanwhile gets the old content or the new; after a fault the old one is there. After a loss
/// of power either may be: nothing is forced to disk.
///
/// # Errors
/// The folder is not there or not writable, or the disk is full.
pub fn replace(path: &Path, bytes: &[u8]) -> io::Result<()> {
    write(path, bytes, false)
}

/// As [`replace`], of what nobody else may read and no loss of power may take.
///
/// # Errors
/// As there.
pub fn replace_secret(path: &Path, bytes: &[u8]) -> io::Result<()> {
    write(path, bytes, true)?;
    path.parent().map_or(Ok(()), |folder| File::open(folder)?.sync_all())
}

fn write(path: &Path, bytes: &[u8], secret: bool) -> io::Result<()> {
    let draft = draft(path);
    // Of a process of this number that was killed; nothing is wrong where there is none.
    let _ = fs::remove_file(&draft);
    let mut options = OpenOptions::new();
    options.write(true).create_new(true);
    if secret {
        options.mode(0o600);
    }
    let written = options.open(&draft).and_then(|mut file| {
        file.write_all(bytes)?;
        if secret { file.sync_all() } else { Ok(()) }
    });
    written.and_then(|()| fs::rename(&draft, path)).inspect_err(|_| {
        // What cannot be removed either takes room and does no other harm.
        let _ = fs::remove_file(&draft);
    })
}

/// Of its own for each process: some share a folder.
fn draft(path: &Path) -> PathBuf {
    let mut name = path.file_name().unwrap_or_default().to_owned();
    name.push(format!(".{}.part", std::process::id()));
    path.with_file_name(name)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    #[test]
    fn a_file_is_replaced_whole_and_a_failure_leaves_what_was() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("a.json");
        fs::write(draft(&path), "left behind").expect("written");
        replace(&path, b"one").expect("replaced");
        replace_secret(&path, b"two").expect("replaced");
        assert_eq!(fs::read(&path).expect("there"), b"two");
        assert_eq!(fs::metadata(&path).expect("there").permissions().mode() & 0o777, 0o600);
        // A folder of that name cannot be replaced.
        let taken = folder.path().join("b");
        fs::create_dir(&taken).expect("made");
        assert!(replace(&taken, b"three").is_err() && replace(&folder.path().join("no/c"), b"x").is_err());
        let left: Vec<_> = fs::read_dir(folder.path()).expect("readable").flatten().map(|e| e.file_name()).collect();
        assert_eq!(left.len(), 2, "no drafts: {left:?}");
    }
}
