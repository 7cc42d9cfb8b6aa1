//! Files that are there whole or not at all: written beside their name, then renamed. And files of bounded length.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read as _, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

/// What a loss of power may do to a file, and who may read it.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Care {
    /// It may take it; what is lost is made again.
    Little,
    /// It may not.
    Durable,
    /// Nor may anybody else read it.
    Secret,
}

/// Longest text that a configuration may name a file for, bytes.
pub const MAX_NAMED: usize = 16 << 20;

/// The bytes of `path`.
///
/// # Errors
/// It cannot be read, or has more than `most` bytes: a device may have no end.
pub fn read_at_most(path: &Path, most: usize) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    let limit = u64::try_from(most).unwrap_or(u64::MAX).saturating_add(1);
    File::open(path)?.take(limit).read_to_end(&mut bytes)?;
    if bytes.len() > most {
        return Err(io::Error::new(io::ErrorKind::FileTooLarge, format!("it has more than {most} bytes")));
    }
    Ok(bytes)
}

/// Puts `bytes` at `path`. Who reads meanwhile gets the old content or the new; after a fault the old one is there. After a loss
/// of power either may be: nothing is forced to disk.
///
/// # Errors
/// The folder is not there or not writable, or the disk is full.
pub fn replace(path: &Path, bytes: &[u8]) -> io::Result<()> {
    write(&draft(path), path, bytes, Care::Little)
}

/// Puts `bytes` at `path` unless something is there: of several processes that do so at once one wins, and the others are told.
/// A reader meanwhile gets nothing or all of it.
///
/// # Errors
/// As [`replace`]; [`io::ErrorKind::AlreadyExists`]: something is there.
pub fn create(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let draft = draft(path);
    let written = OpenOptions::new().write(true).create_new(true).open(&draft).and_then(|mut f| f.write_all(bytes));
    // A link, unlike a renamed file, takes no other's place.
    let linked = written.and_then(|()| fs::hard_link(&draft, path));
    // What cannot be removed takes room and does no other harm.
    let _ = fs::remove_file(&draft);
    linked
}

/// As [`replace`], of what no loss of power may take. It is written as `draft` first, in the same folder: no other process may
/// write there meanwhile, and what a process that was killed left there is written over.
///
/// # Errors
/// As there.
pub fn replace_durably(draft: &Path, path: &Path, bytes: &[u8]) -> io::Result<()> {
    write(draft, path, bytes, Care::Durable)
}

/// As [`replace`], of what other users may not read and no loss of power may take.
///
/// # Errors
/// As there.
pub fn replace_secret(path: &Path, bytes: &[u8]) -> io::Result<()> {
    write(&draft(path), path, bytes, Care::Secret)
}

fn write(draft: &Path, path: &Path, bytes: &[u8], care: Care) -> io::Result<()> {
    let mut options = OpenOptions::new();
    options.write(true);
    match care {
        // A file that is there already may be open to others.
        Care::Secret => options.create_new(true).mode(0o600),
        Care::Little | Care::Durable => options.create(true).truncate(true),
    };
    let written = options.open(draft).and_then(|mut file| {
        file.write_all(bytes)?;
        if care == Care::Little { Ok(()) } else { file.sync_all() }
    });
    written.and_then(|()| fs::rename(draft, path)).inspect_err(|_| {
        // A full disk must not be kept full by what did not fit. What cannot be removed takes room and does no other harm.
        let _ = fs::remove_file(draft);
    })?;
    match path.parent() {
        // The new name is on disk once its folder is.
        Some(folder) if care != Care::Little => File::open(folder)?.sync_all(),
        _ => Ok(()),
    }
}

/// Of its own for each process, some of which share a folder, and for each file that one of its threads writes.
fn draft(path: &Path) -> PathBuf {
    static COUNT: AtomicU32 = AtomicU32::new(0);
    let number = COUNT.fetch_add(1, Relaxed);
    let mut name = path.file_name().unwrap_or_default().to_owned();
    name.push(format!(".{}.{number}.part", std::process::id()));
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

    #[test]
    fn of_those_that_create_a_file_at_once_one_does() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("a");
        let created: Vec<u8> = std::thread::scope(|scope| {
            let path = &path;
            let one = |byte: u8| {
                scope.spawn(move || match create(path, &[byte; 10_000]) {
                    Ok(()) => Some(byte),
                    Err(error) => {
                        assert_eq!(error.kind(), io::ErrorKind::AlreadyExists);
                        None
                    }
                })
            };
            let all: Vec<_> = (0..8u8).map(one).collect();
            all.into_iter().filter_map(|thread| thread.join().expect("no panic")).collect()
        });
        assert_eq!(created.len(), 1, "{created:?}");
        assert_eq!(fs::read(&path).expect("there"), [created[0]; 10_000]);
        assert_eq!(fs::read_dir(folder.path()).expect("readable").count(), 1, "no drafts");
        assert!(create(&folder.path().join("no/b"), b"x").is_err());
    }

    #[test]
    fn threads_that_replace_the_same_file_leave_one_of_their_own_whole() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("a");
        std::thread::scope(|scope| {
            for byte in 0..4u8 {
                let path = &path;
                scope.spawn(move || {
                    for _ in 0..50 {
                        replace(path, &[byte; 10_000]).expect("replaced");
                        let read = fs::read(path).expect("there");
                        assert!(read.len() == 10_000 && read.iter().all(|b| *b == read[0]), "{} bytes", read.len());
                    }
                });
            }
        });
        assert_eq!(fs::read_dir(folder.path()).expect("readable").count(), 1, "no drafts");
    }

    #[test]
    fn a_file_is_read_up_to_its_limit_and_one_without_end_is_refused() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("a");
        fs::write(&path, "12345").expect("written");
        assert_eq!(read_at_most(&path, 5).expect("fits"), b"12345");
        assert!(read_at_most(&path, 4).expect_err("too long").to_string().contains("more than 4 bytes"));
        assert!(read_at_most(Path::new("/dev/zero"), 1 << 16).is_err());
        assert!(read_at_most(&folder.path().join("b"), 5).is_err());
    }

    #[test]
    fn what_a_killed_process_left_half_written_is_written_over() {
        let folder = tempfile::tempdir().expect("a folder");
        let (draft, path) = (folder.path().join("a.partial"), folder.path().join("a"));
        fs::write(&draft, "longer than what comes").expect("written");
        replace_durably(&draft, &path, b"one").expect("replaced");
        assert_eq!((fs::read(&path).expect("there"), draft.exists()), (b"one".to_vec(), false));
        let full = Path::new("/dev/full");
        if full.exists() {
            std::os::unix::fs::symlink(full, &draft).expect("linked");
            let error = replace_durably(&draft, &path, b"two").expect_err("no room");
            assert_eq!(error.kind(), io::ErrorKind::StorageFull);
            assert_eq!((fs::read(&path).expect("there"), draft.is_symlink()), (b"one".to_vec(), false));
        }
    }
}
