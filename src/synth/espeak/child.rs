//! One `espeak-ng` process: start, text in, PCM at 24 kHz out, end.

use std::io::{self, ErrorKind, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{self, ChildStdin, Command, Stdio};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use rlimit::Resource;
use rubato::audioadapter_buffers::direct::InterleavedSlice;
use rubato::{Fft, FixedSync, Resampler, WindowFunction};
use rustix::process::{Pid, getpriority_process, setpriority_process};

use super::voices::missing;
use super::{Manner, STALLED, STARVED};
use crate::audio::{FRAME_SAMPLES, RATE, from_i16};
use crate::clock;
use crate::synth::{Outcome, Progress, Slot, Stage, Stages, SynthError};

/// Most bytes that one step converts for one child: a second of speech, so that the step stays bounded.
const STEP: usize = 44_100;
/// Most bytes that are kept of what a child computed ahead of its listener: a minute of speech.
const AHEAD: usize = 60 * STEP;
/// A WAV header is 44 bytes; one that does not reach its data by here is something else.
const HEADER_LIMIT: usize = 4096;

/// How a child shares the processor with everything else on the machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Share {
    /// Somebody waits for it, but less than for a packet that is due.
    Live,
    /// It is not waited for.
    Batch,
}

impl Share {
    /// By how much its niceness is above the gateway's.
    fn niceness(self) -> i32 {
        match self {
            Share::Live => 5,
            Share::Batch => 19,
        }
    }

    /// How long it may give nothing before it is taken for dead.
    fn patience(self) -> Duration {
        if self == Share::Batch { STARVED } else { STALLED }
    }

    /// Lowers the priority of `process`. Where that cannot be done (a container that forbids it) it speaks at the gateway's own.
    fn lower(self, process: &process::Child) {
        // Without a number it would be this process.
        let Some(id) = i32::try_from(process.id()).ok().and_then(Pid::from_raw) else { return };
        // What is out of range is taken as the lowest priority there is.
        let lowered = getpriority_process(None).and_then(|own| setpriority_process(Some(id), own + self.niceness()));
        if let Err(error) = lowered {
            tracing::warn!(%error, "espeak-ng runs at the gateway's priority");
        }
    }
}

/// What it gets of the gateway's environment, which holds secrets.
const KEPT: [&str; 7] = ["PATH", "HOME", "LANG", "LC_ALL", "LC_CTYPE", "LD_LIBRARY_PATH", "ESPEAK_DATA_PATH"];

/// What starts `program`: by its path, with the environment that it needs and no more.
///
/// # Why
/// A program that is still to be looked for is started by `fork` where it gets an environment of its own, and that copies the
/// gateway's page tables each time: the standard library has `posix_spawn` do it only where its path is known.
pub(super) fn confined(program: &Path) -> Command {
    let mut command = Command::new(located(program));
    command.env_clear().envs(std::env::vars_os().filter(|(name, _)| KEPT.iter().any(|kept| name == kept)));
    command
}

/// Where a program that is named without a folder lies, by `PATH`; `program` itself where it is in none.
fn located(program: &Path) -> PathBuf {
    let is_program =
        |path: &PathBuf| path.metadata().is_ok_and(|file| file.is_file() && file.permissions().mode() & 0o111 != 0);
    let found = || {
        let folders = std::env::var_os("PATH")?;
        std::env::split_paths(&folders).map(|folder| folder.join(program)).find(is_program)
    };
    let named = program.components().count() == 1 && !program.is_absolute();
    named.then(found).flatten().unwrap_or_else(|| program.to_path_buf())
}

/// What it may take at most, by far more than it needs: seconds of one core, bytes of address space, open files, bytes of a
/// file, and of its memory that it leaves behind when it dies. It writes no file, but a library for sound that it is linked
/// to makes one of 64 MiB in memory before it is known that nothing will be played.
const LIMITS: [(Resource, u64); 5] = [
    (Resource::CPU, 300),
    (Resource::AS, 512 << 20),
    (Resource::NOFILE, 64),
    (Resource::FSIZE, 128 << 20),
    (Resource::CORE, 0),
];

/// Bounds what a process may take. It has got no text yet, so it has done nothing but start.
///
/// One that cannot be bounded (a container that forbids it) still speaks: its text is bounded, and so is its patience.
pub(super) fn limit(process: &process::Child) {
    let Ok(id) = i32::try_from(process.id()) else { return };
    for (resource, most) in LIMITS {
        let (mut soft, mut hard) = (0, 0);
        let found = rlimit::prlimit(id, resource, None, Some((&mut soft, &mut hard)));
        // A limit may not be raised.
        let most = most.min(hard);
        if let Err(error) = found.and_then(|()| rlimit::prlimit(id, resource, Some((most, most)), None)) {
            tracing::warn!(%error, limit = %resource.as_name(), "espeak-ng runs without this limit");
        }
    }
}

pub(super) struct Child {
    process: process::Child,
    stdin: Option<ChildStdin>,
    stdout: UnixStream,
    /// What was read and not yet converted; before `wav` is known, the header.
    bytes: Vec<u8>,
    wav: Option<Converter>,
    ended: bool,
    /// Since when reads have brought nothing.
    silent_since: Option<Instant>,
    share: Share,
    /// Who wants to know how many samples all of its speech has.
    length: Option<Length>,
}

/// How many samples an utterance has, once that is known.
pub(super) type Length = Arc<OnceLock<u64>>;

impl Child {
    /// Starts a process that loads its voice and then waits for text.
    pub(super) fn start(program: &Path, manner: &Manner, share: Share) -> Result<Self, SynthError> {
        let broken = |e: io::Error| SynthError::Utterance(format!("espeak-ng: {e}"));
        let (ours, theirs) = UnixStream::pair().map_err(broken)?;
        ours.set_nonblocking(true).map_err(broken)?;
        let mut process = confined(program)
            .args(["--stdout", "--stdin", "-b", "1", "-s"])
            .arg(manner.words_per_minute.to_string())
            .arg("-v")
            .arg(&manner.voice)
            .stdin(Stdio::piped())
            .stdout(OwnedFd::from(theirs))
            .stderr(Stdio::null())
            .spawn()
            .map_err(|e| missing(program, &e))?;
        limit(&process);
        share.lower(&process);
        let stdin = process.stdin.take();
        Ok(Self {
            process,
            stdin,
            stdout: ours,
            bytes: Vec::new(),
            wav: None,
            ended: false,
            silent_since: None,
            share,
            length: None,
        })
    }

    /// Hands over the text. It fits the pipe, so this does not block.
    pub(super) fn say(&mut self, text: &str) -> io::Result<()> {
        let mut stdin = self.stdin.take().ok_or(ErrorKind::BrokenPipe)?;
        // The program reads to the end of its input: dropping the pipe is what starts it.
        stdin.write_all(text.as_bytes())
    }

    /// Takes what is there; waits up to `wait` for the first byte.
    pub(super) fn read(&mut self, slot: Slot, now: Instant, wait: Option<Duration>) -> Progress {
        let result = self.fill(now, wait).and_then(|()| self.convert());
        let (pcm, failed) = match result {
            Ok(pcm) => (pcm, None),
            Err(reason) => (Vec::new(), Some(format!("synthesis failed: espeak-ng: {reason}"))),
        };
        let done = self.ended && failed.is_none() && self.bytes.is_empty();
        let ready = if done || failed.is_some() { Stages::NONE } else { Stages::NONE.with(Stage::Vocode) };
        let decoded = self.wav.as_ref().map_or(0, |wav| wav.given);
        Progress::new(Outcome { decoded, done, failed, ..Outcome::ready(slot, ready) }, pcm)
    }

    /// Has `to` told how long the speech is, once all of it has been computed.
    pub(super) fn tell_length(&mut self, to: Length) {
        self.length = Some(to);
    }

    fn note_length(&mut self) {
        let Some(wav) = self.wav.as_ref().filter(|_| self.ended) else { return };
        if let Some(length) = self.length.take() {
            let samples = wav.taken + (wav.input.len() + self.bytes.len() / 2) as u64;
            // Nobody else tells it.
            let _ = length.set((samples * u64::from(RATE)).div_ceil(u64::from(wav.rate)));
        }
    }

    fn fill(&mut self, now: Instant, wait: Option<Duration>) -> Result<(), String> {
        if self.ended {
            return Ok(());
        }
        let before = self.bytes.len();
        if wait.is_some() {
            self.stdout
                .set_nonblocking(false)
                .and_then(|()| self.stdout.set_read_timeout(wait))
                .map_err(|e| e.to_string())?;
        }
        // A read that waits does so once, for the first bytes; the rest is for the next step.
        self.take(wait.is_some())?;
        if wait.is_some() {
            self.stdout.set_nonblocking(true).map_err(|e| e.to_string())?;
        }
        let left = self.wav.is_some() && self.bytes.len() >= 2;
        if self.bytes.len() > before || left || self.ended {
            self.silent_since = None;
            return Ok(());
        }
        let since = *self.silent_since.get_or_insert(now);
        if now.saturating_duration_since(since) > self.share.patience() {
            return Err(format!("gave no audio for {:?}", self.share.patience()));
        }
        Ok(())
    }

    /// Takes what the child has computed, so that it gets on and ends although its listener is not that far.
    pub(super) fn take_ahead(&mut self) {
        if !self.ended {
            // What is broken shows in the next step.
            let _ = self.take(false);
            self.note_length();
        }
    }

    fn take(&mut self, once: bool) -> Result<(), String> {
        let mut chunk = [0; 16 << 10];
        while self.bytes.len() < AHEAD {
            match self.stdout.read(&mut chunk) {
                Ok(0) => {
                    self.ended = true;
                    break;
                }
                Ok(n) => self.bytes.extend_from_slice(&chunk[..n]),
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                Err(e) if matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => break,
                Err(e) => return Err(e.to_string()),
            }
            if once {
                break;
            }
        }
        Ok(())
    }

    fn convert(&mut self) -> Result<Vec<f32>, String> {
        if self.wav.is_none() {
            match parse_header(&self.bytes)? {
                Some((rate, data)) => {
                    self.bytes.drain(..data);
                    self.wav = Some(Converter::new(rate)?);
                }
                None if self.ended => {
                    // Nothing to say (punctuation only) is no audio at all; a killed program is a failure.
                    reap(&mut self.process, self.share)?;
                    self.bytes.clear();
                    return Ok(Vec::new());
                }
                None => return Ok(Vec::new()),
            }
        }
        self.note_length();
        let Some(wav) = &mut self.wav else { return Ok(Vec::new()) };
        let whole = self.bytes.len().min(STEP) / 2 * 2;
        wav.input.extend(self.bytes[..whole].chunks_exact(2).map(|b| from_i16(i16::from_le_bytes([b[0], b[1]]))));
        self.bytes.drain(..whole);
        let last = self.ended && self.bytes.len() < 2;
        if last {
            self.bytes.clear();
            reap(&mut self.process, self.share)?;
        }
        wav.take(last)
    }

    pub(super) fn kill(&mut self) {
        self.stdin = None;
        // An error means that it has ended already.
        let _ = self.process.kill();
    }

    #[cfg(test)]
    pub(super) fn id(&self) -> u32 {
        self.process.id()
    }

    /// Whether the process still runs; reaps it when not.
    pub(super) fn is_alive(&mut self) -> bool {
        matches!(self.process.try_wait(), Ok(None))
    }

    pub(super) fn wait(&mut self) {
        let _ = self.process.wait();
    }
}

/// Waits for a process that has given all it has.
fn reap(process: &mut process::Child, share: Share) -> Result<(), String> {
    if share == Share::Batch
        && let Some(used) = cpu_time(process.id())
    {
        metrics::histogram!("antiphon_background_cpu_seconds").record(used.as_secs_f64());
    }
    let status = process.wait().map_err(|e| e.to_string())?;
    if status.success() { Ok(()) } else { Err(format!("ended with {status}")) }
}

/// What a process that has not been reaped has computed; it has one thread.
fn cpu_time(process: u32) -> Option<Duration> {
    clock::cpu_of(Path::new(&format!("/proc/{process}")))
}

/// Sample rate and offset of the data, once they are there.
fn parse_header(bytes: &[u8]) -> Result<Option<(u32, usize)>, String> {
    let le32 = |at: usize| bytes.get(at..at + 4).map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]]));
    let le16 = |at: usize| bytes.get(at..at + 2).map(|b| u16::from_le_bytes([b[0], b[1]]));
    if bytes.len() < 12 {
        return Ok(None);
    }
    if &bytes[..4] != b"RIFF" || &bytes[8..12] != b"WAVE" {
        return Err("its output is not a WAV stream".into());
    }
    let (mut at, mut rate) = (12, None);
    while at < HEADER_LIMIT {
        let (Some(id), Some(size)) = (bytes.get(at..at + 4), le32(at + 4)) else { return Ok(None) };
        match (id, rate) {
            (b"data", Some(rate)) => return Ok(Some((rate, at + 8))),
            (b"data", None) => return Err("its WAV stream has data before a format".into()),
            (b"fmt ", _) => {
                let (Some(format), Some(channels), Some(hertz), Some(bits)) =
                    (le16(at + 8), le16(at + 10), le32(at + 12), le16(at + 22))
                else {
                    return Ok(None);
                };
                if (format, channels, bits) != (1, 1, 16) || !(8_000..=48_000).contains(&hertz) {
                    return Err(format!(
                        "its WAV format {format} with {channels} channels of {bits} bits at {hertz} Hz is not supported"
                    ));
                }
                rate = Some(hertz);
            }
            _ => {}
        }
        // Chunks are padded to even lengths; `size` is 32 bits, so this does not overflow.
        at += 8 + size as usize + (size & 1) as usize;
    }
    Err("its WAV stream has no data".into())
}

/// Any rate to 24 kHz, in whole frames, without the resampler's delay.
struct Converter {
    input: Vec<f32>,
    output: Vec<f32>,
    resampler: Option<Fft<f32>>,
    rate: u32,
    /// Samples that went in, at `rate`.
    taken: u64,
    /// Samples of delay still to be cut from the front.
    delay: usize,
    /// Samples that came out of the resampler after the cut.
    made: u64,
    /// Samples given away.
    given: u64,
}

impl Converter {
    fn new(rate: u32) -> Result<Self, String> {
        let resampler = if rate == RATE {
            None
        } else {
            let block = rate as usize / 50;
            let window = WindowFunction::BlackmanHarris2;
            let fft = Fft::new_custom(rate as usize, RATE as usize, block, 1, 1, window, FixedSync::Both);
            Some(fft.map_err(|e| e.to_string())?)
        };
        let delay = resampler.as_ref().map_or(0, |r| r.output_delay());
        Ok(Self { input: Vec::new(), output: Vec::new(), resampler, rate, taken: 0, delay, made: 0, given: 0 })
    }

    fn take(&mut self, last: bool) -> Result<Vec<f32>, String> {
        let Some(resampler) = &mut self.resampler else {
            self.taken += self.input.len() as u64;
            self.output.append(&mut self.input);
            return Ok(self.give(last));
        };
        let block = resampler.input_frames_next();
        let mut made = vec![0.0; resampler.output_frames_max()];
        let mut used = 0;
        loop {
            let real = (self.input.len() - used).min(block);
            let wanted = (self.taken * u64::from(RATE)).div_ceil(u64::from(self.rate));
            // At the end silence is pushed until all that went in has come out.
            if real < block && !(last && (real > 0 || self.made < wanted)) {
                break;
            }
            let mut padded = self.input[used..used + real].to_vec();
            padded.resize(block, 0.0);
            let frames = made.len();
            let from = InterleavedSlice::new(&padded, 1, block).map_err(|e| e.to_string())?;
            let mut to = InterleavedSlice::new_mut(&mut made, 1, frames).map_err(|e| e.to_string())?;
            let (_, count) = resampler.process_into_buffer(&from, &mut to, None).map_err(|e| e.to_string())?;
            used += real;
            self.taken += real as u64;
            let cut = self.delay.min(count);
            self.delay -= cut;
            self.output.extend_from_slice(&made[cut..count]);
            self.made += (count - cut) as u64;
        }
        self.input.drain(..used);
        if last {
            let wanted = (self.taken * u64::from(RATE)).div_ceil(u64::from(self.rate));
            let surplus = self.made.saturating_sub(wanted) as usize;
            self.output.truncate(self.output.len().saturating_sub(surplus));
        }
        Ok(self.give(last))
    }

    fn give(&mut self, last: bool) -> Vec<f32> {
        let whole = if last { self.output.len() } else { self.output.len() / FRAME_SAMPLES * FRAME_SAMPLES };
        self.given += whole as u64;
        self.output.drain(..whole).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_gets_no_secret_of_the_gateway() {
        let shown = confined(Path::new("env")).output().expect("a program of every system").stdout;
        let shown = String::from_utf8_lossy(&shown);
        let names: Vec<_> = shown.lines().filter_map(|line| Some(line.split_once('=')?.0)).collect();
        assert!(!names.is_empty() && names.iter().all(|name| KEPT.contains(name)), "{names:?}");
    }

    #[test]
    fn a_program_is_started_by_its_path() {
        let shell = confined(Path::new("sh"));
        // What is named without a folder the standard library looks for in a forked process.
        let shell = Path::new(shell.get_program());
        assert!(shell.is_absolute() && shell.ends_with("sh"), "{}", shell.display());
        for same in ["/bin/sh", "./sh", "no-such-program-at-all"] {
            assert_eq!(located(Path::new(same)), Path::new(same));
        }
    }

    #[test]
    fn what_a_process_computes_is_known_until_it_is_reaped() {
        let mut command = confined(Path::new("sh"));
        command.args(["-c", "i=0; while [ $i -lt 20000 ]; do i=$((i+1)); done"]);
        let mut process = command.stdout(Stdio::piped()).spawn().expect("a program of every system");
        // Its output ends with it.
        let ended = process.stdout.take().map(|mut output| output.read_to_end(&mut Vec::new()));
        assert!(ended.is_some_and(|read| read.is_ok()));
        let used = cpu_time(process.id());
        process.wait().expect("it has ended");
        match used {
            Some(used) => assert!(used > Duration::from_millis(1), "{used:?}"),
            None => antiphon_skip::skip("schedstat", "the kernel keeps no account of a process's time"),
        }
        assert_eq!(cpu_time(process.id()), None, "reaped");
    }

    #[test]
    fn a_process_is_bounded_in_what_it_may_take() {
        let mut process = Command::new("sleep").arg("60").spawn().expect("a program of every system");
        limit(&process);
        let limits = std::fs::read_to_string(format!("/proc/{}/limits", process.id())).expect("it runs");
        process.kill().and_then(|()| process.wait()).expect("it ran");
        let of = |name: &str| limits.lines().find(|line| line.starts_with(name)).expect("known to the system");
        for (name, most) in [
            ("Max cpu time", "300"),
            ("Max address space", "536870912"),
            ("Max open files", "64"),
            ("Max file size", "134217728"),
            ("Max core file size", "0"),
        ] {
            let line = of(name).strip_prefix(name).expect("its beginning");
            let values: Vec<_> = line.split_whitespace().take(2).collect();
            assert_eq!(values, [most, most], "{line}");
        }
    }

    #[test]
    fn resampling_keeps_length_and_a_sine() {
        let mut converter = Converter::new(22_050).expect("builds");
        let phase = |n: usize, rate: f64| (n as f64 * 440.0 / rate).fract() * std::f64::consts::TAU;
        let mut out = Vec::new();
        for chunk in (0..22_050).collect::<Vec<_>>().chunks(777) {
            converter.input.extend(chunk.iter().map(|&n| phase(n, 22_050.0).sin() as f32));
            let frames = converter.take(false).expect("converts");
            assert_eq!(frames.len() % FRAME_SAMPLES, 0);
            out.extend(frames);
        }
        out.extend(converter.take(true).expect("converts"));
        assert_eq!(out.len(), 24_000);
        // The filter's delay is not a whole number of samples: fit the phase, then nothing else may be left.
        let middle = 1_200..22_800;
        let project = |wave: fn(f64) -> f64| {
            2.0 * middle.clone().map(|n| f64::from(out[n]) * wave(phase(n, 24_000.0))).sum::<f64>()
                / middle.len() as f64
        };
        let (sine, cosine) = (project(f64::sin), project(f64::cos));
        assert!((sine.hypot(cosine) - 1.0).abs() < 1e-3, "gain {}", sine.hypot(cosine));
        assert!(cosine.abs() < 0.1, "more than a sample late: {cosine}");
        let fitted = |n: usize| sine * phase(n, 24_000.0).sin() + cosine * phase(n, 24_000.0).cos();
        let error = middle.clone().map(|n| (f64::from(out[n]) - fitted(n)).abs()).fold(0.0, f64::max);
        assert!(error < 1e-3, "{error}");
    }

    #[test]
    fn a_header_is_found_byte_by_byte_and_nonsense_refused() {
        let mut wav = b"RIFF\0\0\0\0WAVEfmt \x10\0\0\0\x01\0\x01\0".to_vec();
        wav.extend(22_050u32.to_le_bytes());
        wav.extend(44_100u32.to_le_bytes());
        wav.extend(b"\x02\0\x10\0LIST\x03\0\0\0abc\0data\xff\xff\xff\x7f");
        for len in 0..wav.len() {
            assert_eq!(parse_header(&wav[..len]), Ok(None), "{len} bytes");
        }
        assert_eq!(parse_header(&wav), Ok(Some((22_050, wav.len()))));
        assert!(parse_header(b"not a wave file at all").is_err());
    }
}
