//! What waits on disk while the database is away: a file of JSON lines, written to its end and read from its start.
//!
//! # Why
//! A line that reached the database may be sent again, after a crash between that and the emptying of the file: the
//! database tells what it has already. So the file needs no second one that says how far it was read.

use std::fs::File;
use std::io::{self, BufRead, BufReader, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::ledger::Entry;
use super::usage::Counted;

/// What is more is dropped: weeks of calls.
const MAX_BYTES: u64 = 1 << 30;

/// One line.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) enum Line {
    /// A record.
    Record(Box<Entry>),
    /// Speech that was counted.
    Speech(Counted),
}

/// The file. No other process writes to it while a gateway runs.
#[derive(Debug)]
pub(super) struct Spool {
    path: PathBuf,
    file: Option<File>,
    /// Bytes of whole lines in it.
    bytes: u64,
    /// Bytes that the database has.
    read: u64,
}

impl Spool {
    /// The file of an earlier process, or none yet.
    ///
    /// # Errors
    /// It is there and cannot be used.
    pub(super) fn open(path: &Path) -> io::Result<Self> {
        let mut spool = Self { path: path.to_owned(), file: None, bytes: 0, read: 0 };
        if path.exists() {
            let mut file = File::options().read(true).write(true).open(path)?;
            // The last line may be half written: its process ended before it was told that it is safe.
            let mut line = Vec::new();
            let mut lines = BufReader::new(&mut file);
            while lines.read_until(b'\n', &mut line)? > 0 && line.ends_with(b"\n") {
                spool.bytes += line.len() as u64;
                line.clear();
            }
            file.set_len(spool.bytes)?;
            spool.file = Some(file);
        }
        Ok(spool)
    }

    /// Whether nothing waits.
    pub(super) fn is_empty(&self) -> bool {
        self.read >= self.bytes
    }

    /// Bytes that wait.
    pub(super) fn waiting(&self) -> u64 {
        self.bytes.saturating_sub(self.read)
    }

    /// Puts lines at its end; they are on disk when this returns. How many there was no room for.
    ///
    /// # Errors
    /// The disk; then none of them is in it.
    pub(super) fn push(&mut self, lines: &[Line]) -> io::Result<usize> {
        let (mut text, mut dropped) = (Vec::new(), 0);
        for line in lines {
            if self.bytes + text.len() as u64 >= MAX_BYTES {
                dropped += 1;
                continue;
            }
            serde_json::to_writer(&mut text, line).map_err(io::Error::other)?;
            text.push(b'\n');
        }
        let file = match &mut self.file {
            Some(file) => file,
            none => {
                if let Some(folder) = self.path.parent() {
                    std::fs::create_dir_all(folder)?;
                }
                none.insert(File::options().create(true).truncate(false).read(true).write(true).open(&self.path)?)
            }
        };
        file.seek(SeekFrom::Start(self.bytes))?;
        let written = file.write_all(&text).and_then(|()| file.sync_data());
        if let Err(error) = written {
            // What was written of it is written over by the next.
            let _ = file.set_len(self.bytes);
            return Err(error);
        }
        self.bytes += text.len() as u64;
        Ok(dropped)
    }

    /// The next lines, at most `limit`, and how many bytes they are; a line that says nothing is left out.
    ///
    /// # Errors
    /// The disk.
    pub(super) fn next(&mut self, limit: usize) -> io::Result<(Vec<Line>, u64)> {
        let (mut lines, mut length) = (Vec::new(), 0);
        if self.is_empty() {
            return Ok((lines, 0));
        }
        let Some(file) = &mut self.file else { return Ok((lines, 0)) };
        file.seek(SeekFrom::Start(self.read))?;
        let (mut reader, mut line) = (BufReader::new(file), Vec::new());
        while lines.len() < limit && reader.read_until(b'\n', &mut line)? > 0 {
            length += line.len() as u64;
            match serde_json::from_slice(&line) {
                Ok(read) => lines.push(read),
                Err(error) => tracing::error!(%error, "a spooled record cannot be read and is left out"),
            }
            line.clear();
        }
        Ok((lines, length))
    }

    /// The database has these bytes; where it has all, the file is emptied.
    ///
    /// # Errors
    /// The disk; then they are sent again after the next start.
    pub(super) fn sent(&mut self, length: u64) -> io::Result<()> {
        self.read = (self.read + length).min(self.bytes);
        if self.is_empty()
            && let Some(file) = &mut self.file
        {
            file.set_len(0)?;
            (self.read, self.bytes) = (0, 0);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(id: &str) -> Line {
        Line::Record(Box::new(Entry {
            id: id.into(),
            started_ms: 1,
            answered_ms: None,
            ended_ms: Some(2),
            written_ms: 2,
            direction: "inbound".into(),
            tenant: String::new(),
            agent: "demo".into(),
            caller: "a".into(),
            called: "b".into(),
            cause: Some("remote".into()),
            body: "{\"id\":\"line\\nbreak\"}".into(),
        }))
    }

    #[test]
    fn lines_come_back_in_order_also_after_a_crash_in_the_middle_of_one() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("below").join("records.spool");
        let mut spool = Spool::open(&path).expect("none yet");
        assert!(spool.is_empty() && !path.exists());
        assert_eq!(spool.push(&[line("1"), line("2")]).expect("written"), 0);
        assert_eq!(spool.push(&[line("3")]).expect("written"), 0);
        drop(spool);
        let mut file = File::options().append(true).open(&path).expect("there");
        file.write_all(b"{\"record\":{\"id\":\"ha").expect("written");
        let mut spool = Spool::open(&path).expect("there");
        let (first, length) = spool.next(2).expect("read");
        assert_eq!(first, [line("1"), line("2")]);
        assert_eq!(spool.next(2).expect("read").0, first, "not sent yet");
        spool.sent(length).expect("noted");
        spool.push(&[line("4")]).expect("written");
        let (rest, length) = spool.next(9).expect("read");
        assert_eq!(rest, [line("3"), line("4")]);
        spool.sent(length).expect("emptied");
        assert!(spool.is_empty());
        assert_eq!(std::fs::metadata(&path).expect("there").len(), 0);
        spool.push(&[line("5")]).expect("written");
        assert_eq!(spool.next(9).expect("read").0, [line("5")]);
    }

    #[test]
    fn a_line_that_says_nothing_is_left_out() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("records.spool");
        std::fs::write(&path, "nonsense\n").expect("written");
        let mut spool = Spool::open(&path).expect("there");
        spool.push(&[line("1")]).expect("written");
        let (lines, length) = spool.next(9).expect("read");
        assert_eq!(lines, [line("1")]);
        spool.sent(length).expect("emptied");
        assert!(spool.is_empty());
    }
}
