//! Files of SQLite that cannot be used: which of them are damaged, and where such a one goes.

use std::io;
use std::path::{Path, PathBuf};

use crate::clock;

/// Whether the file is no database, or not a whole one. Everything else (locked, full, forbidden) passes.
pub fn is_damaged(error: &rusqlite::Error) -> bool {
    use rusqlite::ErrorCode::{DatabaseCorrupt, NotADatabase};
    matches!(error.sqlite_error_code(), Some(DatabaseCorrupt | NotADatabase))
}

/// Gives the database and the files that belong to it another name, which is returned: somebody can look at it, and a new one is
/// made in its place.
///
/// # Errors
/// It cannot be renamed.
pub fn put_aside(database: &Path) -> io::Result<PathBuf> {
    let with = |ending: &str| {
        let mut name = database.as_os_str().to_owned();
        name.push(ending);
        PathBuf::from(name)
    };
    let mark = format!(".damaged-{}", clock::wall().as_secs());
    for ending in ["-wal", "-shm", ""] {
        match std::fs::rename(with(ending), with(&format!("{mark}{ending}"))) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
    }
    Ok(with(&mark))
}
