//! The audio of jobs: one file of 16-bit samples a finished utterance, `AUDIO_DIR/JOB/ITEM-PART.pcm`; where several
//! gateways work on a job, `ITEM-PART.FENCE.pcm`, so that none writes over the file of another. In an object store
//! ([`objects`]) the same names are keys.

mod objects;

use std::collections::VecDeque;
use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};

use bytes::Bytes;

use self::objects::Objects;
pub use self::objects::S3;
pub(super) use self::objects::{Answer, Stored};
use super::store::{Made, Marked, PartId, Sqlite, Store};
use super::{BatchError, Config, io};
use crate::audio::{RATE, from_i16};
use crate::audio_file::{AudioWriter, Format};
use crate::clock;
use crate::file::replace_durably;

/// Samples read at once.
const CHUNK: usize = 24_000;
const PARTIAL: &str = "partial";
/// Objects that are fetched ahead of the one that is read: the network is waited for once.
const AHEAD: usize = 4;
/// What says which place this is, to gateways that share it.
const MARK: &str = ".antiphon-batch";

/// Where the audio of jobs lies. Clones mean the same.
#[derive(Clone)]
pub(super) enum Place {
    /// On a disk, which may be one that several machines see.
    Folder(PathBuf),
    /// In an object store.
    Objects(Objects),
}

/// What became of writing an utterance.
pub(super) enum Written {
    /// It is there, or is not.
    Now(io::Result<()>),
    /// It is told by the number that was given.
    Later,
}

impl Place {
    /// Where `config` says. Asks no server yet.
    pub(super) fn of(config: &Config) -> Result<Self, BatchError> {
        if config.audio.is_empty() {
            fs::create_dir_all(&config.audio_dir).map_err(io(&config.audio_dir))?;
            return Ok(Place::Folder(config.audio_dir.clone()));
        }
        Ok(Place::Objects(Objects::new(&config.audio, &config.s3).map_err(BatchError::Input)?))
    }

    /// For messages.
    pub(super) fn name(&self) -> String {
        match self {
            Place::Folder(folder) => folder.display().to_string(),
            Place::Objects(objects) => objects.name(),
        }
    }

    /// Writes the audio of one utterance so that it is there as a whole or not at all, whatever happens. An object store
    /// takes its time: `answer` tells later, by `number`.
    pub(super) fn write(
        &self,
        job: &str,
        id: &PartId,
        fence: i64,
        pcm: &[i16],
        number: u64,
        answer: &Answer,
    ) -> Written {
        match self {
            Place::Folder(folder) => Written::Now(write(folder, job, id, fence, pcm)),
            Place::Objects(objects) => {
                objects.put_later(key(job, id, fence), bytes_of(pcm), number, answer.clone());
                Written::Later
            }
        }
    }

    /// Drops the audio of one utterance, which does not count after all.
    pub(super) fn discard(&self, job: &str, id: &PartId, fence: i64) -> Result<(), BatchError> {
        match self {
            Place::Folder(folder) => discard(folder, job, id, fence),
            Place::Objects(objects) => objects.delete(key(job, id, fence)).map_err(BatchError::Objects),
        }
    }

    /// Drops what earlier holders of an utterance wrote and did not live to record; `fence` is of the one that counts.
    pub(super) fn discard_earlier(&self, job: &str, id: &PartId, fence: i64) -> Result<(), BatchError> {
        match self {
            // In a file of one gateway every fence is 0; the first lease of another database has 1.
            _ if fence < 2 => Ok(()),
            Place::Folder(_) => (1..fence).try_for_each(|earlier| self.discard(job, id, earlier)),
            Place::Objects(objects) => {
                let prefix = format!("{job}/{}-{}.", id.item, id.part);
                let counts = key(job, id, fence);
                let found = objects.list(prefix).map_err(BatchError::Objects)?;
                let mut earlier = found.into_iter().map(|(key, _)| key).filter(|key| *key != counts);
                earlier.try_for_each(|key| objects.delete(key)).map_err(BatchError::Objects)
            }
        }
    }

    /// Drops the audio of a job.
    pub(super) fn remove(&self, job: &str) -> Result<(), BatchError> {
        match self {
            Place::Folder(folder) => remove(folder, job),
            Place::Objects(objects) => objects.delete_all(format!("{job}/")).map_err(BatchError::Objects),
        }
    }

    /// After a crash; of objects none is dropped, as another gateway's look the same as those that no job knows.
    pub(super) fn recover(&self, store: &mut Sqlite) -> Result<(), BatchError> {
        let objects = match self {
            Place::Folder(folder) => return recover(store, folder),
            Place::Objects(objects) => objects,
        };
        for (job, waiting) in store.unfinished_parts()? {
            let made = objects.list(format!("{job}/")).map_err(BatchError::Objects)?;
            for id in waiting {
                if let Some((_, bytes)) = made.iter().find(|(found, _)| *found == key(&job, &id, 0)) {
                    store.finish(&id, 0, Ok(bytes / 2), clock::wall())?;
                }
            }
        }
        Ok(())
    }

    /// The audio of these utterances, in this order.
    pub(super) fn open(&self, job: &str, format: Format, made: &[Made]) -> Result<JobAudio, BatchError> {
        let samples = made.iter().map(|made| made.samples).sum();
        let source = match self {
            Place::Folder(folder) => {
                let files = made.iter().rev().map(|made| file(folder, job, &made.id, made.fence)).collect();
                Source::Files { files, open: None }
            }
            Place::Objects(objects) => {
                let keys = made.iter().map(|made| (key(job, &made.id, made.fence), 2 * made.samples)).collect();
                Source::Objects { objects: objects.clone(), keys, asked: VecDeque::new(), open: Bytes::new() }
            }
        };
        let writer = AudioWriter::with_length(format, RATE, samples)?;
        Ok(JobAudio { format, source, writer: Some(writer) })
    }
}

impl Marked for Place {
    fn mark(&self) -> Result<(String, bool), BatchError> {
        let own = uuid::Uuid::new_v4().simple().to_string();
        let found = match self {
            Place::Folder(folder) => {
                let path = folder.join(MARK);
                match fs::read_to_string(&path) {
                    Err(error) if error.kind() == io::ErrorKind::NotFound => mark(folder, &path, &own),
                    found => found.map(|mark| mark.trim().to_owned()),
                }
                .map_err(io(&path))?
            }
            Place::Objects(objects) => {
                objects.put_new(MARK.to_owned(), own.clone().into()).map_err(BatchError::Objects)?;
                let mark = objects.get(MARK.to_owned()).map_err(BatchError::Objects)?;
                String::from_utf8_lossy(&mark).trim().to_owned()
            }
        };
        // An answer may have been lost, so what is there decides.
        let is_new = found == own;
        Ok((found, is_new))
    }

    fn unmark(&self) {
        // What is left over says nothing to anybody.
        let _ = match self {
            Place::Folder(folder) => fs::remove_file(folder.join(MARK)).map_err(|error| error.to_string()),
            Place::Objects(objects) => objects.delete(MARK.to_owned()),
        };
    }

    fn is_another(&self) -> String {
        let name = self.name();
        match self {
            Place::Folder(_) => format!(
                "[batch] audio_dir {name} is not the folder that the other gateways of this database use: mount it there; \
                 where that folder is lost for good, DELETE FROM antiphon.batch_setting"
            ),
            Place::Objects(_) => format!(
                "[batch] audio {name} is not where the other gateways of this database keep audio: give all the same; where \
                 that is lost for good, DELETE FROM antiphon.batch_setting"
            ),
        }
    }
}

fn name(id: &PartId, fence: i64) -> String {
    match fence {
        0 => format!("{}-{}.pcm", id.item, id.part),
        fence => format!("{}-{}.{fence}.pcm", id.item, id.part),
    }
}

fn file(folder: &Path, job: &str, id: &PartId, fence: i64) -> PathBuf {
    folder.join(job).join(name(id, fence))
}

fn key(job: &str, id: &PartId, fence: i64) -> String {
    format!("{job}/{}", name(id, fence))
}

fn bytes_of(pcm: &[i16]) -> Vec<u8> {
    pcm.iter().flat_map(|sample| sample.to_le_bytes()).collect()
}

/// Marks a folder, as a whole or not at all, and never over the mark of another gateway; the mark that it has then.
fn mark(folder: &Path, path: &Path, mark: &str) -> io::Result<String> {
    let written = folder.join(format!("{MARK}.{mark}"));
    let mut file = File::create_new(&written)?;
    writeln!(file, "{mark}")?;
    file.sync_all()?;
    let linked = fs::hard_link(&written, path);
    // What is left over says nothing to anybody.
    let _ = fs::remove_file(&written);
    match linked {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => Err(error),
        _ => Ok(fs::read_to_string(path)?.trim().to_owned()),
    }
}

/// Writes the audio of one utterance so that it is there as a whole or not at all, whatever happens.
fn write(folder: &Path, job: &str, id: &PartId, fence: i64, pcm: &[i16]) -> io::Result<()> {
    let path = file(folder, job, id, fence);
    fs::create_dir_all(folder.join(job))?;
    replace_durably(&path.with_extension(PARTIAL), &path, &bytes_of(pcm))
}

/// Drops the audio of one utterance, which does not count after all.
fn discard(folder: &Path, job: &str, id: &PartId, fence: i64) -> Result<(), BatchError> {
    let path = file(folder, job, id, fence);
    match fs::remove_file(&path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(io(path)(error)),
        _ => Ok(()),
    }
}

/// Drops the audio of a job.
fn remove(folder: &Path, job: &str) -> Result<(), BatchError> {
    let path = folder.join(job);
    match fs::remove_dir_all(&path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(io(path)(error)),
        _ => Ok(()),
    }
}

/// After a crash: takes over files whose rows were not written any more, drops unfinished files and those of jobs
/// that are not known.
fn recover(store: &mut Sqlite, folder: &Path) -> Result<(), BatchError> {
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
    source: Source,
    writer: Option<AudioWriter>,
}

/// What is still to be read.
enum Source {
    Files {
        /// The next one last.
        files: Vec<PathBuf>,
        open: Option<(PathBuf, File)>,
    },
    Objects {
        objects: Objects,
        /// Not asked for yet, and how long each must be.
        keys: VecDeque<(String, u64)>,
        asked: VecDeque<objects::Asked>,
        open: Bytes,
    },
}

impl Source {
    /// The next bytes, a whole number of samples; `None` at the end.
    fn read(&mut self) -> Result<Option<Bytes>, BatchError> {
        match self {
            Source::Files { files, open } => loop {
                if let Some((path, mut file)) = open.take() {
                    let mut bytes = Vec::with_capacity(2 * CHUNK);
                    let read =
                        Read::by_ref(&mut file).take(2 * CHUNK as u64).read_to_end(&mut bytes).map_err(io(&path))?;
                    if read == 0 {
                        continue;
                    }
                    *open = Some((path, file));
                    return Ok(Some(bytes.into()));
                }
                let Some(path) = files.pop() else { return Ok(None) };
                let file = File::open(&path).map_err(io(&path))?;
                *open = Some((path, file));
            },
            Source::Objects { objects, keys, asked, open } => loop {
                if !open.is_empty() {
                    return Ok(Some(open.split_to(open.len().min(2 * CHUNK))));
                }
                while asked.len() < AHEAD
                    && let Some((key, bytes)) = keys.pop_front()
                {
                    asked.push_back(objects.ask(key, bytes));
                }
                let Some(next) = asked.pop_front() else { return Ok(None) };
                *open = next.wait().map_err(BatchError::Objects)?;
            },
        }
    }
}

impl JobAudio {
    /// What it is encoded in.
    pub fn format(&self) -> Format {
        self.format
    }

    /// The next bytes; `None` at the end.
    fn advance(&mut self) -> Result<Option<Vec<u8>>, BatchError> {
        loop {
            let Some(writer) = &mut self.writer else { return Ok(None) };
            let Some(bytes) = self.source.read()? else {
                return Ok(self.writer.take().map(AudioWriter::finish).transpose()?);
            };
            let pcm: Vec<f32> = bytes.chunks_exact(2).map(|b| from_i16(i16::from_le_bytes([b[0], b[1]]))).collect();
            let encoded = writer.push(&pcm)?;
            if !encoded.is_empty() {
                return Ok(Some(encoded));
            }
        }
    }
}

impl Iterator for JobAudio {
    type Item = Result<Vec<u8>, BatchError>;

    fn next(&mut self) -> Option<Self::Item> {
        let result = self.advance();
        if result.is_err() {
            self.writer = None;
        }
        result.transpose()
    }
}
