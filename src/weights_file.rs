//! Bytes of a file of weights, read where they are asked for.
//!
//! # Why
//! The files are not mapped: a map of a file that somebody cuts short kills the process (SIGBUS) at the next byte that is read
//! behind its end, and one that is written over gives other numbers from one row to the next. Reading says so instead.
//!
//! *Large parts are read by several threads.* What the system has in memory already is copied by one core at 1 to 2 GB a second,
//! page faults of the new memory included: of the 3.4 GB of a checkpoint that is most of a start.

use std::borrow::Cow;
use std::fs::{File, Metadata};
use std::io;
use std::num::NonZero;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::thread;
use std::time::SystemTime;

/// Least that is worth a thread of its own, bytes: it is copied in ten times what the thread takes to start. The matrices of a
/// layer have 3 to 17 MB.
const SHARE: usize = 512 << 10;

/// Threads that read one part at most: more are bound by memory.
const READERS: usize = 8;

/// Bytes that are there as a whole, or in a file.
pub trait Source {
    /// How many there are.
    fn size(&self) -> usize;

    /// Those of `range`; `None`: they are not all there, or cannot be read.
    fn part(&self, range: Range<usize>) -> Option<Cow<'_, [u8]>>;
}

impl Source for [u8] {
    fn size(&self) -> usize {
        self.len()
    }

    fn part(&self, range: Range<usize>) -> Option<Cow<'_, [u8]>> {
        self.get(range).map(Cow::Borrowed)
    }
}

impl Source for Vec<u8> {
    fn size(&self) -> usize {
        self.len()
    }

    fn part(&self, range: Range<usize>) -> Option<Cow<'_, [u8]>> {
        self.as_slice().part(range)
    }
}

/// A file as it was when it was opened.
#[derive(Debug)]
pub struct WeightsFile {
    file: File,
    was: Stamp,
}

/// What tells a file that was written to: its length, and when it was last written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Stamp {
    length: u64,
    written: Option<SystemTime>,
}

impl Stamp {
    fn of(metadata: &Metadata) -> Self {
        // Not when its entry was changed, which a file that is replaced by another sees, too.
        Self { length: metadata.len(), written: metadata.modified().ok() }
    }
}

impl WeightsFile {
    /// Opens it.
    ///
    /// # Errors
    /// It cannot be opened.
    pub fn open(path: &Path) -> io::Result<Self> {
        let file = File::open(path)?;
        let was = Stamp::of(&file.metadata()?);
        Ok(Self { file, was })
    }

    /// Fills `bytes` with what stands at `start`.
    ///
    /// # Errors
    /// It cannot be read, or was written to since it was opened.
    pub fn read(&self, bytes: &mut [u8], start: usize) -> io::Result<()> {
        // How many cores there are is read from files: not for a row of a table.
        let readers = || thread::available_parallelism().map_or(1, NonZero::get).min(READERS);
        let share = if bytes.len() <= SHARE { SHARE } else { bytes.len().div_ceil(readers()).max(SHARE) };
        let one = |(n, part): (usize, &mut [u8])| self.file.read_exact_at(part, (start + n * share) as u64);
        let result = if bytes.len() <= share {
            one((0, bytes))
        } else {
            thread::scope(|scope| {
                let parts = bytes.chunks_mut(share).enumerate();
                let readers: Vec<_> = parts.map(|part| scope.spawn(move || one(part))).collect();
                let mut ended = readers.into_iter().map(|reader| reader.join());
                ended.try_for_each(|end| end.unwrap_or_else(|_| Err(io::Error::other("a reader panicked"))))
            })
        };
        // Behind the reading, so that nothing of another file counts; a file that was cut short tells what became of it.
        if Stamp::of(&self.file.metadata()?) != self.was {
            return Err(io::Error::other(
                "it was written to while it was in use; put other files into a folder of their own, or rename them into place",
            ));
        }
        result
    }
}

impl Source for WeightsFile {
    fn size(&self) -> usize {
        usize::try_from(self.was.length).unwrap_or(usize::MAX)
    }

    fn part(&self, range: Range<usize>) -> Option<Cow<'_, [u8]>> {
        if range.start > range.end || range.end > self.size() {
            return None;
        }
        let mut bytes = vec![0; range.len()];
        self.read(&mut bytes, range.start).ok()?;
        Some(Cow::Owned(bytes))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_of_any_length_are_what_stands_there() {
        let dir = tempfile::tempdir().expect("a folder");
        let path = dir.path().join("weights");
        let all: Vec<u8> = (0..5 * SHARE + 7).map(|n| (n % 251) as u8).collect();
        std::fs::write(&path, &all).expect("written");
        let file = WeightsFile::open(&path).expect("there");
        for range in [0..0, 3..9, 1..SHARE, 0..SHARE + 1, 5..all.len(), SHARE - 1..4 * SHARE + 2] {
            assert!(file.part(range.clone()).expect("there")[..] == all[range.clone()], "{range:?}");
        }
        assert!(file.part(1..all.len() + 1).is_none());
        std::fs::write(&path, &all[..2 * SHARE]).expect("written");
        assert!(file.part(0..3 * SHARE).is_none(), "it was cut short");
    }
}
