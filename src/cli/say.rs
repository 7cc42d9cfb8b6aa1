//! `antiphon say`: a text to a file or to standard output.

use std::fs::File;
use std::io::{IsTerminal, Read, Seek, Write};
use std::path::PathBuf;

use indicatif::{ProgressBar, ProgressStyle};

use super::Failure;
use crate::app::engines;
use crate::audio_file::{AudioWriter, Format};
use crate::call::segment::{SegmentConfig, Segmenter};
use crate::config::EngineKind;
use crate::server::speech::{Manner, Speaker};
use crate::synth::device::{Engine, Phase};

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
    /// Speaking rate.
    #[arg(long, default_value_t = 1.0)]
    speed: f32,
    /// Format on standard output.
    #[arg(long, default_value = "wav")]
    format: String,
    /// Configuration file.
    #[arg(short, long, value_name = "FILE")]
    config: Option<PathBuf>,
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
    let text = if args.text == "-" {
        let mut text = String::new();
        std::io::stdin().read_to_string(&mut text).map_err(Failure::failed)?;
        text
    } else {
        args.text
    };
    let mut parts = Vec::new();
    Segmenter::new(SegmentConfig::default()).whole(&text, &mut parts);
    if parts.is_empty() {
        return Err(Failure::failed("the text contains nothing to speak"));
    }
    let to_stdout = args.out.as_ref().is_none_or(|path| path.as_os_str() == "-");
    let ending = args.out.as_ref().and_then(|path| path.extension()).and_then(|e| e.to_str()).unwrap_or("wav");
    let name = if to_stdout { args.format.as_str() } else { ending };
    let name = if name == "ogg" { "opus" } else { name };
    let format = Format::named(name)
        .ok_or_else(|| Failure::failed(format!("format `{name}` is not known; use wav, flac, opus or pcm")))?;
    let mut out = match &args.out {
        Some(path) if !to_stdout => {
            Out::File(File::create(path).map_err(|e| Failure::failed(format!("{}: {e}", path.display())))?)
        }
        _ if std::io::stdout().is_terminal() => {
            return Err(Failure::failed("standard output is a terminal; name a file with -o or redirect"));
        }
        _ => Out::Stream(std::io::stdout()),
    };
    let manner = Manner {
        voice: args.voice,
        language: None,
        instructions: args.instructions,
        seed: args.seed,
        speed: args.speed,
        tenant: "".into(),
    };
    let choice = engines::choose(&config.engine).map_err(Failure::unavailable)?;
    for reason in &choice.reasons {
        eprintln!("{reason}");
    }
    let engine = Engine::start(choice.loaders, config.scheduler).map_err(Failure::failed)?;
    let outcome = super::block_on(async {
        engine.ready().await;
        for device in engine.status() {
            if let Phase::Failed(reason) = device.phase {
                return Err(Failure::unavailable(reason));
            }
        }
        let bar = progress(text.chars().count());
        let mut writer = AudioWriter::new(format, crate::audio::RATE).map_err(Failure::failed)?;
        let mut speaker = Speaker::new(engine.clone(), manner);
        speaker.add(parts);
        let mut samples = 0;
        while let Some(pcm) = speaker.next().await.map_err(Failure::failed)? {
            samples += pcm.len();
            out.write(&writer.push(&pcm).map_err(Failure::failed)?).map_err(Failure::failed)?;
            bar.set_message(format!("{:.1} s", samples as f64 / f64::from(crate::audio::RATE)));
            bar.tick();
        }
        out.write(&writer.finish().map_err(Failure::failed)?).map_err(Failure::failed)?;
        if format == Format::Wav {
            let header = AudioWriter::with_length(format, crate::audio::RATE, samples as u64)
                .and_then(|mut writer| writer.push(&[]))
                .map_err(Failure::failed)?;
            out.rewrite_start(&header).map_err(Failure::failed)?;
        }
        bar.finish();
        Ok(())
    });
    // A device thread that still computes while the process ends would have its driver taken away under it.
    engine.shutdown();
    outcome
}

enum Out {
    File(File),
    Stream(std::io::Stdout),
}

impl Out {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<()> {
        match self {
            Out::File(file) => file.write_all(bytes),
            // Flushed at once: somebody may be listening to the pipe.
            Out::Stream(stdout) => stdout.write_all(bytes).and_then(|()| stdout.flush()),
        }
    }

    /// Now that the length is known, a file's header gets it; a stream has gone by.
    fn rewrite_start(&mut self, header: &[u8]) -> std::io::Result<()> {
        let Out::File(file) = self else { return Ok(()) };
        file.rewind()?;
        file.write_all(header)
    }
}

/// Shown on a terminal only; the length of the audio is not known beforehand.
fn progress(characters: usize) -> ProgressBar {
    let bar = ProgressBar::new_spinner();
    if let Ok(style) = ProgressStyle::with_template("{spinner} {msg} of speech, {elapsed} elapsed, {prefix}") {
        bar.set_style(style);
    }
    bar.set_prefix(format!("{characters} characters"));
    bar
}
