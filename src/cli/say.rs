//! `antiphon say`: a text to a file or to standard output.

use std::fs::File;
use std::io::{IsTerminal, Read, Seek, Write};
use std::path::{Path, PathBuf};

use clap::ValueEnum;
use indicatif::{ProgressBar, ProgressStyle};

use super::Failure;
use crate::app::engines;
use crate::audio_file::{AudioWriter, Format};
use crate::call::segment::{Script, SegmentConfig};
use crate::config::EngineKind;
use crate::gateway::speaker::{Manner, Speaker};
use crate::synth::cosyvoice::backend::LanguageModel;
use crate::synth::device::{Engine, Loader, Phase};
use crate::synth::{Slot, Stage, Step, TextOrder};
use crate::text::Normalise;
use crate::turn::{
    Class, Markup, SPEEDS, StageTimes, StreamId, TurnToken, Utterance, UtteranceId, WordTimes, checked_speed,
};

#[derive(clap::Args)]
pub(super) struct Args {
    /// What to say; `-` reads standard input.
    text: String,
    /// Where to; `-` or nothing is standard output. The ending names the format: wav, flac, opus (or ogg), pcm.
    #[arg(short, long, value_name = "FILE")]
    out: Option<PathBuf>,
    /// Voice by name.
    #[arg(long)]
    voice: Option<String>,
    /// Language of the text as a BCP 47 tag; by default what it shows.
    #[arg(long, value_name = "TAG", value_parser = super::language)]
    lang: Option<String>,
    /// How numbers and signs become words: on, reference (by the voice's own rules), off.
    #[arg(long, default_value = "on", value_name = "HOW")]
    normalise: Normalise,
    /// Which engine speaks.
    #[arg(long)]
    engine: Option<EngineKind>,
    /// Checkpoint directory of CosyVoice3.
    #[arg(long, value_name = "DIR")]
    model: Option<PathBuf>,
    /// Where CosyVoice3 computes: auto, cpu, cuda:N.
    #[arg(long)]
    device: Option<String>,
    /// Same text, voice and seed: same audio.
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// Manner of speaking, for voices that can.
    #[arg(long)]
    instructions: Option<String>,
    /// Speaking rate, from 0.25 to 4.
    #[arg(long, default_value_t = 1.0, value_parser = speed)]
    speed: f32,
    /// Inline tags of the voice in the text, such as [breath], are tags and not words.
    #[arg(long)]
    tags: bool,
    /// The text is SSML: a subset of it, and tags in square brackets.
    #[arg(long, conflicts_with = "tags")]
    ssml: bool,
    /// Which of the checkpoint's language models: llm, or llm.rl.
    #[arg(long)]
    llm: Option<LanguageModel>,
    /// How text becomes utterances: sentence by sentence, or into the running language model as it is written
    /// (CosyVoice3 only; standard input is spoken while it comes).
    #[arg(long, value_enum, default_value = "segments")]
    text_streaming: TextStreaming,
    /// With bistream: the order that the model is fed in, as it should be or with the quirks of the original code.
    #[arg(long, value_enum, default_value = "fixed")]
    text_order: Order,
    /// Format on standard output.
    #[arg(long, default_value = "wav")]
    format: String,
    /// Configuration file.
    #[arg(short, long, value_name = "FILE")]
    config: Option<PathBuf>,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum TextStreaming {
    /// Each sentence is an utterance of its own.
    Segments,
    /// The whole text is one utterance, spoken while it is written.
    Bistream,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Order {
    /// No position is fed twice, no text is spoken early.
    Fixed,
    /// As the original code.
    Reference,
}

impl From<Order> for TextOrder {
    fn from(order: Order) -> Self {
        match order {
            Order::Fixed => TextOrder::Fixed,
            Order::Reference => TextOrder::Reference,
        }
    }
}

fn speed(text: &str) -> Result<f32, String> {
    let number = || format!("expected a number from {} to {}, for example 1.2", SPEEDS.start(), SPEEDS.end());
    checked_speed(text.parse().map_err(|_| number())?)
}

/// Speaks, streaming: the first audio is written as soon as it is made.
pub(super) fn run(args: Args) -> Result<(), Failure> {
    let mut config = super::load(args.config.as_deref())?;
    if let Some(kind) = args.engine {
        config.engine.kind = kind;
    }
    if args.model.is_some() {
        config.engine.model = args.model;
    }
    if let Some(device) = args.device {
        config.engine.device = device;
    }
    if let Some(llm) = args.llm {
        config.engine.llm = llm.to_string();
    }
    super::checked(&config)?;
    let streamed = args.text_streaming == TextStreaming::Bistream;
    let text = if streamed {
        String::new()
    } else if args.text == "-" {
        let mut text = String::new();
        std::io::stdin().read_to_string(&mut text).map_err(Failure::failed)?;
        text
    } else {
        args.text.clone()
    };
    let markup = match (args.tags, args.ssml) {
        (_, true) if streamed => {
            return Err(Failure::failed(
                "--ssml and --text-streaming bistream do not go together: leave one out, for example `antiphon say --ssml TEXT`",
            ));
        }
        (_, true) => Markup::Ssml,
        (true, false) => Markup::Tags,
        (false, false) => Markup::None,
    };
    let parts = Script::whole(&text, SegmentConfig::default(), markup).map_err(Failure::failed)?;
    if parts.is_empty() && !streamed {
        return Err(Failure::failed(
            "the text contains nothing to speak: give it words, for example `antiphon say \"Hello.\" -o a.wav`",
        ));
    }
    let to_stdout = args.out.as_ref().is_none_or(|path| path.as_os_str() == "-");
    let ending = args.out.as_ref().and_then(|path| path.extension()).and_then(|e| e.to_str()).unwrap_or("wav");
    let name = if to_stdout { args.format.as_str() } else { ending };
    let name = if name == "ogg" { "opus" } else { name };
    let format = Format::named(name).ok_or_else(|| {
        Failure::failed(format!(
            "format `{name}` is not known: wav, flac, opus and pcm are, for example `-o speech.flac`"
        ))
    })?;
    let mut out = match &args.out {
        Some(path) if !to_stdout => {
            let draft = Draft::create(path).map_err(|e| Failure::to_make(path, &e))?;
            Out::File(draft, path.clone())
        }
        _ if std::io::stdout().is_terminal() => {
            return Err(Failure::failed(
                "standard output is a terminal: name a file (`-o speech.wav`) or send it on (`| aplay`)",
            ));
        }
        _ => Out::Stream(std::io::stdout()),
    };
    let manner = Manner {
        voice: args.voice,
        language: args.lang,
        normalise: args.normalise,
        instructions: args.instructions,
        seed: args.seed,
        speed: args.speed,
        markup,
        volume: 1.0,
        lexicon: config.lexicon.said.clone(),
        tenant: "".into(),
    };
    let choice = engines::choose(&config.engine).map_err(Failure::unavailable)?;
    for reason in &choice.reasons {
        eprintln!("{reason}");
    }
    if streamed {
        let source: Box<dyn Read> =
            if args.text == "-" { Box::new(std::io::stdin()) } else { Box::new(std::io::Cursor::new(args.text)) };
        let loader = choice.loaders.into_iter().next().ok_or_else(|| {
            Failure::unavailable("there is no device to speak on: `antiphon doctor` says what this machine lacks")
        })?;
        let began = crate::clock::now();
        let samples = speak_as_it_comes(loader, manner, args.text_order.into(), source, format, &mut out)?;
        out.report(samples, crate::clock::now() - began);
        return Ok(());
    }
    let engine = Engine::start(choice.loaders, config.scheduler).map_err(Failure::failed)?;
    let outcome = super::block_on(async {
        engine.ready().await;
        for device in engine.status() {
            if let Phase::Failed(reason) = device.phase {
                return Err(Failure::unavailable(reason));
            }
        }
        let bar = progress();
        let began = crate::clock::now();
        let mut writer = AudioWriter::new(format, crate::audio::RATE).map_err(Failure::failed)?;
        let mut speaker = Speaker::new(engine.clone(), manner);
        speaker.add(parts);
        let mut samples = 0;
        while let Some(pcm) = speaker.next().await.map_err(Failure::failed)? {
            samples += pcm.len();
            out.write(&writer.push(&pcm).map_err(Failure::failed)?)?;
            let (seconds, took) = (seconds(samples), (crate::clock::now() - began).as_secs_f64());
            bar.set_message(format!(
                "{seconds:.1} s of speech, {:.1} times as fast as it is heard",
                seconds / took.max(1e-3)
            ));
            bar.set_position((1e3 * speaker.share()) as u64);
        }
        finish(writer, format, samples, &mut out)?;
        bar.finish_and_clear();
        out.report(samples, crate::clock::now() - began);
        Ok(())
    });
    // A device thread that still computes while the process ends would have its driver taken away under it.
    engine.shutdown();
    outcome
}

/// One utterance whose text is read while it is spoken. Nothing else runs on the device, so whatever the slot can run
/// is run, and text is read when there is nothing: what is not read yet waits in its pipe.
fn speak_as_it_comes(
    loader: Loader,
    manner: Manner,
    order: TextOrder,
    mut source: Box<dyn Read>,
    format: Format,
    out: &mut Out,
) -> Result<usize, Failure> {
    let mut voice = loader().map_err(Failure::unavailable)?;
    let utterance = Utterance {
        id: UtteranceId::next(),
        stream: StreamId::next(),
        class: Class::Live,
        token: TurnToken::forever(),
        text: String::new(),
        streamed: true,
        voice: manner.voice,
        language: manner.language,
        instructions: manner.instructions,
        seed: manner.seed,
        speed: manner.speed,
        markup: manner.markup.of_voice(),
        sounds: Vec::new(),
        words: WordTimes::default(),
        stages: StageTimes::default(),
        tenant: manner.tenant,
    };
    let slot = Slot(0);
    let mut ready = voice.open_streamed(slot, &utterance, order).map_err(Failure::failed)?;
    let mut writer = AudioWriter::new(format, crate::audio::RATE).map_err(Failure::failed)?;
    let (mut unread, mut samples, mut progress) = (Vec::new(), 0, Vec::new());
    loop {
        let Some(stage) = Stage::ALL.into_iter().rev().find(|&stage| ready.has(stage)) else {
            let mut piece = [0; 1024];
            let count = source.read(&mut piece).map_err(Failure::failed)?;
            unread.extend_from_slice(&piece[..count]);
            let text = take_text(&mut unread, count == 0);
            ready = voice.append(slot, &text.as_str().into(), count == 0).map_err(Failure::failed)?;
            if count == 0 && ready.is_empty() {
                return Err(Failure::failed("the text ended and nothing is left to run"));
            }
            continue;
        };
        let rounds = voice.caps().limits.rounds[stage];
        voice.run(&Step { stage, slots: vec![slot], rounds }, &mut progress).map_err(Failure::failed)?;
        let Some(result) = progress.pop() else { return Err(Failure::failed("the voice gave no result")) };
        if let Some(reason) = result.outcome.failed {
            return Err(Failure::failed(reason));
        }
        samples += result.pcm.len();
        out.write(&writer.push(&result.pcm).map_err(Failure::failed)?)?;
        if result.outcome.done {
            break;
        }
        ready = result.outcome.ready;
    }
    if samples == 0 {
        return Err(Failure::failed("the text contains nothing to speak"));
    }
    finish(writer, format, samples, out)?;
    Ok(samples)
}

/// What of `bytes` is whole characters; at the end, all of it.
fn take_text(bytes: &mut Vec<u8>, end: bool) -> String {
    let whole = match std::str::from_utf8(bytes) {
        Ok(_) => bytes.len(),
        // A character cut in two is completed by the next bytes; anything else is replaced.
        Err(error) if error.error_len().is_none() && !end => error.valid_up_to(),
        Err(_) => bytes.len(),
    };
    let rest = bytes.split_off(whole);
    let text = String::from_utf8_lossy(bytes).into_owned();
    *bytes = rest;
    text
}

/// Writes what the encoder still holds and, where it can be gone back to, the length.
fn finish(writer: AudioWriter, format: Format, samples: usize, out: &mut Out) -> Result<(), Failure> {
    out.write(&writer.finish().map_err(Failure::failed)?)?;
    if format == Format::Wav {
        let header = AudioWriter::with_length(format, crate::audio::RATE, samples as u64)
            .and_then(|mut writer| writer.push(&[]))
            .map_err(Failure::failed)?;
        out.rewrite_start(&header).map_err(Failure::failed)?;
    }
    out.complete().map_err(Failure::failed)
}

/// A file that takes its name when it is complete: what was there before stays until then, whatever happens.
struct Draft {
    file: File,
    /// Where it is written, and its name; `None`: it was no plain file, and is written to itself.
    names: Option<(PathBuf, PathBuf)>,
}

impl Draft {
    fn create(path: &Path) -> std::io::Result<Self> {
        // A link stays a link to what is written; a device or a pipe cannot be replaced.
        let path = std::fs::canonicalize(path).unwrap_or_else(|_| path.to_owned());
        let there = std::fs::metadata(&path).ok();
        if there.as_ref().is_some_and(|there| !there.is_file()) {
            return Ok(Self { file: File::options().write(true).open(&path)?, names: None });
        }
        let mut name = std::ffi::OsString::from(".");
        name.push(path.file_name().unwrap_or_default());
        name.push(format!(".{}.part", std::process::id()));
        let draft = path.with_file_name(name);
        let file = File::create(&draft)?;
        let draft = Self { file, names: Some((draft, path)) };
        if let Some(there) = there {
            draft.file.set_permissions(there.permissions())?;
        }
        Ok(draft)
    }

    fn complete(&mut self) -> std::io::Result<()> {
        match self.names.take() {
            Some((draft, path)) => std::fs::rename(draft, path),
            None => Ok(()),
        }
    }
}

impl Drop for Draft {
    fn drop(&mut self) {
        if let Some((draft, _)) = &self.names {
            let _ = std::fs::remove_file(draft);
        }
    }
}

enum Out {
    /// And its name as it was given.
    File(Draft, PathBuf),
    Stream(std::io::Stdout),
}

impl Out {
    fn write(&mut self, bytes: &[u8]) -> Result<(), Failure> {
        let written = match self {
            Out::File(draft, _) => draft.file.write_all(bytes),
            // Flushed at once: somebody may be listening to the pipe.
            Out::Stream(stdout) => stdout.write_all(bytes).and_then(|()| stdout.flush()),
        };
        written.map_err(|error| Failure::to_write(&error))
    }

    /// Now that the length is known, a file's header gets it; a stream has gone by.
    fn rewrite_start(&mut self, header: &[u8]) -> std::io::Result<()> {
        let Out::File(Draft { file, names: Some(_) }, _) = self else { return Ok(()) };
        file.rewind()?;
        file.write_all(header)
    }

    /// Everything was written.
    fn complete(&mut self) -> std::io::Result<()> {
        match self {
            Out::File(draft, _) => draft.complete(),
            Out::Stream(_) => Ok(()),
        }
    }

    /// The last line: which file, how much speech, how fast it was made. Who reads a stream wants nothing but sound.
    fn report(&self, samples: usize, took: std::time::Duration) {
        let Out::File(_, path) = self else { return };
        let (seconds, took) = (seconds(samples), took.as_secs_f64());
        let speed = seconds / took.max(1e-3);
        eprintln!(
            "{}: {seconds:.1} s of speech in {took:.1} s, {speed:.1} times as fast as it is heard",
            path.display()
        );
    }
}

fn seconds(samples: usize) -> f64 {
    samples as f64 / f64::from(crate::audio::RATE)
}

/// Shown on a terminal only: share by the text, rate, and how long it will take.
fn progress() -> ProgressBar {
    let bar = ProgressBar::new(1_000);
    if let Ok(style) = ProgressStyle::with_template("{bar:30} {percent} %, {msg}, {eta} left") {
        bar.set_style(style);
    }
    bar
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_replaced_when_it_is_complete_and_left_alone_otherwise() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("a.wav");
        std::fs::write(&path, b"before").expect("written");
        let mut draft = Draft::create(&path).expect("beside it");
        draft.file.write_all(b"half").expect("written");
        drop(draft);
        assert_eq!(std::fs::read(&path).expect("there"), b"before");
        let mut draft = Draft::create(&path).expect("beside it");
        draft.file.write_all(b"whole").expect("written");
        draft.complete().expect("renamed");
        drop(draft);
        assert_eq!(std::fs::read(&path).expect("there"), b"whole");
        assert_eq!(std::fs::read_dir(folder.path()).expect("readable").count(), 1, "nothing is left behind");
        // What is no plain file is written to, and stays what it is.
        let mut null = Draft::create(Path::new("/dev/null")).expect("open");
        null.file.write_all(b"x").expect("written");
        null.complete().expect("nothing to do");
        assert!(!std::fs::metadata("/dev/null").expect("there").is_file());
    }
}
