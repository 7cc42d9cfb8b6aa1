//! The audio of jobs on disk: one file of 16-bit samples a finished utterance, `AUDIO_DIR/JOB/ITEM-PART.pcm`; where
//! several gateways work on a job, `ITEM-PART.FENCE.pcm`, so that none writes over the file of another.

use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};

use super::store::{Made, PartId, Sqlite, Store};
use super::{BatchError, io};
use crate::audio::{RATE, from_i16};
use crate::audio_file::{AudioWriter, Format};
use crate::clock;

/// Samples read at once.
const CHUNK: usize = 24_000;
const PARTIAL: &str = "partial";

fn file(folder: &Path, job: &str, id: &PartId, fence: i64) -> PathBuf {
    folder.join(job).join(match fence {
        0 => format!("{}-{}.pcm", id.item, id.part),
        fence => format!("{}-{}.{fence}.pcm", id.item, id.part),
    })
}

/// Writes the audio of one utterance so that it is there as a whole or not at all, whatever happens.
pub(super) fn write(folder: &Path, job: &str, id: &PartId, fence: i64, pcm: &[i16]) -> io::Result<()> {
    let path = file(folder, job, id, fence);
    let partial = path.with_extension(PARTIAL);
    fs::create_dir_all(folder.join(job))?;
    let bytes: Vec<u8> = pcm.iter().flat_map(|sample| sample.to_le_bytes()).collect();
    let result = File::create(&partial).and_then(|mut out| {
        out.write_all(&bytes)?;
        out.sync_all()
    });
    if let Err(error) = result {
        // A full disk must not be kept full by what did not fit.
        let _ = fs::remove_file(&partial);
        return Err(error);
    }
    fs::rename(&partial, &path)?;
    // The new name is on disk once its folder is.
    File::open(folder.join(job))?.sync_all()
}

/// Drops the audio of one utterance, which does not count after all.
pub(super) fn discard(folder: &Path, job: &str, id: &PartId, fence: i64) -> Result<(), BatchError> {
    let path = file(folder, job, id, fence);
    match fs::remove_file(&path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(io(path)(error)),
        _ => Ok(()),
    }
}

/// Drops the audio of a job.
pub(super) fn remove(folder: &Path, job: &str) -> Result<(), BatchError> {
    let path = folder.join(job);
    match fs::remove_dir_all(&path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(io(path)(error)),
        _ => Ok(()),
    }
}

/// After a crash: takes over files whose rows were not written any more, drops unfinished files and those of jobs
/// that are not known.
pub(super) fn recover(store: &mut Sqlite, folder: &Path) -> Result<(), BatchError> {
    for (job, waiting) in store.unfinished_parts()? {
        for id in waiting {
            // Only whole files have this name.
            if let Ok(data) = fs::metadata(file(folder, &job, &id, 0)) {
                store.finish(&id, 0, Ok(data.len() / 2), clock::wall())?;
            }
        }
    }
    for entry in fs::read_dir(folder).map_err(io(folder))? {
        let path = entry.map_err(io(folder))?.path();
        let Some(job) = path.file_name().and_then(|name| name.to_str()) else { continue };
        // Only what looks like ours is touched: somebody may have pointed at a folder with other things in it.
        // Behind the name of the gateway, where there are several.
        let random = job.rsplit('.').next().unwrap_or_default();
        let ours = path.is_dir() && random.len() == 32 && random.bytes().all(|b| b.is_ascii_hexdigit());
        if !ours {
            continue;
        }
        if !store.keeps_audio(job)? {
            remove(folder, job)?;
            continue;
        }
        for part in fs::read_dir(&path).map_err(io(&path))? {
            let part = part.map_err(io(&path))?.path();
            if part.extension().is_some_and(|extension| extension == PARTIAL) {
                fs::remove_file(&part).map_err(io(&part))?;
            }
        }
    }
    Ok(())
}

/// The audio of a job or an item, encoded while it is read: an iterator over its bytes.
pub struct JobAudio {
    format: Format,
    /// Still to be read, the next one last.
    files: Vec<PathBuf>,
    open: Option<(PathBuf, File)>,
    writer: Option<AudioWriter>,
}

impl JobAudio {
    pub(super) fn open(folder: &Path, job: &str, format: Format, made: &[Made]) -> Result<Self, BatchError> {
        let samples = made.iter().map(|made| made.samples).sum();
        let files = made.iter().rev().map(|made| file(folder, job, &made.id, made.fence)).collect();
        let writer = AudioWriter::with_length(format, RATE, samples)?;
        Ok(Self { format, files, open: None, writer: Some(writer) })
    }

    /// What it is encoded in.
    pub fn format(&self) -> Format {
        self.format
    }

    /// The next bytes; `None` at the end.
    fn advance(&mut self) -> Result<Option<Vec<u8>>, BatchError> {
        loop {
            if let Some((path, mut file)) = self.open.take() {
                let mut bytes = Vec::with_capacity(2 * CHUNK);
                let read = Read::by_ref(&mut file).take(2 * CHUNK as u64).read_to_end(&mut bytes).map_err(io(&path))?;
                if read == 0 {
                    continue;
                }
                self.open = Some((path, file));
                let pcm: Vec<f32> = bytes.chunks_exact(2).map(|b| from_i16(i16::from_le_bytes([b[0], b[1]]))).collect();
                let Some(writer) = &mut self.writer else { return Ok(None) };
                let encoded = writer.push(&pcm)?;
                if encoded.is_empty() {
                    continue;
                }
                return Ok(Some(encoded));
            }
            if let Some(path) = self.files.pop() {
                let file = File::open(&path).map_err(io(&path))?;
                self.open = Some((path, file));
                continue;
            }
            let Some(writer) = self.writer.take() else { return Ok(None) };
            return Ok(Some(writer.finish()?));
        }
    }
}

impl Iterator for JobAudio {
    type Item = Result<Vec<u8>, BatchError>;

    fn next(&mut self) -> Option<Self::Item> {
        let result = self.advance();
        if result.is_err() {
            self.writer = None;
            self.files.clear();
            self.open = None;
        }
        result.transpose()
    }
}
