//! The default voice: the `espeak-ng` program as a child process. It is GPL, so it is run, never linked.
//!
//! Owns the children and what their pipes carry. One child speaks one utterance: text to its stdin, WAV from
//! its stdout, resampled to 24 kHz in whole frames. No shell is involved and the text is never an argument.
//!
//! # Why
//! - **A child's stdout is one end of a socket pair**, so that reading it can be non-blocking without a
//!   thread or a runtime: the kernel's socket buffer (a few seconds of speech) is the bound, and a child that
//!   is ahead of its listener simply blocks on its own write. That is also all that parking needs.
//! - **Children are started before they are needed**: one that waits on stdin has loaded its voice, so the
//!   first audio is a few milliseconds after the text. Those for the default voice are kept ready; the last
//!   other voices used get one each, up to [`Config::warm`] in all.
//! - **What a child computes is taken at once, up to a minute of it**: it ends and its memory is free long before its
//!   listener has heard it out. A process for every listener at his lead limit was what bounded the number of calls.
//! - **Children give way to the gateway's own threads** ([`Share`]): each computes its utterance as fast as it can, so
//!   200 calls start bursts of them. At the same priority a thread that has a packet to send may wait for a slice of
//!   every child that is ahead of it.
//! - **A child is started by the path of its program** ([`confined`]), which copies nothing of the gateway. By its name it was a fork:
//!   while that copies page tables no thread of the gateway gets memory, and afterwards each of them faults at every page that it
//!   writes. On 16 hardware threads, 200 calls that speak, packets were 14 ms late at the 99th percentile and are 1.7 now.
//! - **The device thread waits only when there is nothing else**: a step reads what is there and, only if no
//!   slot of it had anything, waits [`WAIT`] for the first.

mod child;
mod form;
mod pinyin;
mod voices;
mod words;

use std::collections::{HashMap, VecDeque};
use std::path::PathBuf;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use self::child::{Child, Length, Share};
use self::voices::Catalogue;
use self::words::{Aligner, Task};
use super::{
    Caps, EngineLimits, Identity, PerStage, Progress, Seeds, Slot, Stage, Stages, Step, SynthError, Synthesizer,
    VoiceInfo,
};
use crate::clock;
use crate::turn::{Class, Utterance, checked_speed};
use crate::voice::loudness::{self, Leveller};

/// The engine's name in [`Caps`].
pub const NAME: &str = "espeak";
/// Words a minute at speed 1.0: the program's own default.
const WORDS_PER_MINUTE: f32 = 175.0;
/// What the program accepts on `-s`.
const RATE_LIMITS: (f32, f32) = (80.0, 450.0);
/// Bytes of text for one child. It fits the pipe (64 KiB on Linux), so that handing it over never blocks.
pub const MAX_TEXT: usize = 48 << 10;
/// What a voice is measured by: numbers, which every one of them says in its own language.
const NUMBERS: &str = "1, 2, 3, 4, 5, 6, 7, 8, 9, 10.";

/// What a voice of a language is measured by: sentences as they are said on a telephone, where there are some. Numbers are
/// up to two units softer or louder than these, in each language by another amount.
fn reference(voice: &str) -> &'static str {
    match voice.split(['-', '_', '+']).next().unwrap_or_default() {
        "en" => {
            "Good morning, how can I help you today? I will look for your order, and call you back before noon. The number \
             is 7 4 2. We are open from Monday to Friday. Please stay on the line. The technician rings the \
             bell twice. Thank you, and goodbye."
        }
        "de" => {
            "Guten Morgen, wie kann ich Ihnen heute helfen? Ich suche Ihre Bestellung und rufe Sie bis Mittag zurück. Die \
             Nummer ist 7 4 2. Wir haben von Montag bis Freitag geöffnet. Bitte bleiben Sie am Apparat. Der \
             Techniker klingelt zweimal. Vielen Dank und auf Wiederhören."
        }
        "fr" => {
            "Bonjour, comment puis-je vous aider? Je cherche votre commande et je vous rappelle avant midi. Le numéro est \
             7 4 2. Nous sommes ouverts du lundi au vendredi. Veuillez rester en ligne. Le technicien sonne \
             deux fois. Merci et au revoir."
        }
        "es" => {
            "Buenos días, ¿en qué puedo ayudarle hoy? Voy a buscar su pedido y le llamo antes del mediodía. El número es \
             7 4 2. Abrimos de lunes a viernes. Por favor, no cuelgue. El técnico llama dos veces a la puerta. \
             Muchas gracias y hasta luego."
        }
        "it" => {
            "Buongiorno, come posso aiutarla oggi? Cerco il suo ordine e la richiamo prima di mezzogiorno. Siamo aperti dal \
             lunedì al venerdì. Resti in linea, per favore."
        }
        "pt" => {
            "Bom dia, como posso ajudar hoje? Vou procurar o seu pedido e ligo de volta antes do meio-dia. Estamos abertos \
             de segunda a sexta."
        }
        "nl" => {
            "Goedemorgen, hoe kan ik u vandaag helpen? Ik zoek uw bestelling op en bel u voor de middag terug. Blijf aan \
             de lijn."
        }
        "ru" => "Доброе утро, чем я могу вам помочь? Я найду ваш заказ и перезвоню вам до полудня.",
        "cmn" => "早上好，请问有什么可以帮您？我去查一下您的订单，中午以前给您回电话。",
        _ => NUMBERS,
    }
}
/// How long a step waits for the first byte when no slot has any.
const WAIT: Duration = Duration::from_millis(2);
/// A child that gives nothing for so long is taken for dead.
const STALLED: Duration = Duration::from_secs(5);
/// The same for one that gives way to everything else: on a busy machine it may have got nothing to compute with.
const STARVED: Duration = Duration::from_secs(300);

/// Utterances that one core computes as fast as they are heard: 63 calls were seen to take a quarter of one.
const SLOTS_PER_CORE: u32 = 200;
/// As many on any machine. What the scheduler admits (`[scheduler] max_live`) is fewer on a large one.
const LEAST_SLOTS: u32 = 64;

/// How to run the program.
#[derive(Clone, Debug)]
pub struct Config {
    /// The program: a name looked up in `PATH`, or a path.
    pub program: PathBuf,
    /// Voice of utterances that name none.
    pub voice: String,
    /// Utterances that are open at once. A child ends when it has computed its utterance, so there are fewer of those.
    pub slots: u32,
    /// Children that wait for text.
    pub warm: usize,
    /// How loud all voices are to be, in LUFS; `None`: as they are.
    pub loudness: Option<f32>,
}

impl Default for Config {
    fn default() -> Self {
        Self { program: "espeak-ng".into(), voice: "en-us".into(), slots: slots(), warm: 4, loudness: None }
    }
}

/// As many slots as the cores could speak in, with room for the rest of the gateway.
fn slots() -> u32 {
    let cores = std::thread::available_parallelism().map_or(1, |cores| cores.get() as u32);
    (cores * SLOTS_PER_CORE).max(LEAST_SLOTS)
}

/// What a child is started with.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Manner {
    voice: String,
    words_per_minute: u32,
}

/// The `espeak-ng` voice.
pub struct Espeak {
    config: Config,
    caps: Caps,
    catalogue: Catalogue,
    open: HashMap<Slot, Child>,
    /// Waiting children, the most recently wanted manner last.
    warm: VecDeque<(Manner, Child)>,
    /// Killed, not yet reaped.
    dead: Vec<Child>,
    /// Finds out when words sound.
    aligner: Aligner,
    /// What brings each voice to the loudness of the others, and what does so to each utterance.
    factors: HashMap<String, f32>,
    levels: HashMap<Slot, Leveller>,
}

impl Espeak {
    /// Finds the program and asks it for its voices.
    ///
    /// # Errors
    /// [`SynthError::Device`] when the program is missing (the message names the package to install) or does
    /// not work; [`SynthError::UnknownVoice`] when it has no voice `config.voice`.
    pub fn new(config: Config) -> Result<Self, SynthError> {
        let catalogue = Catalogue::load(&config.program)?;
        catalogue.resolve(&config.voice)?;
        let slots = config.slots.max(1);
        let limits = EngineLimits::of_one_stage(slots, slots.min(32));
        let caps = Caps { name: NAME, device: "cpu".into(), limits };
        let aligner = Aligner::new(config.program.clone());
        let (open, warm, dead) = (HashMap::new(), VecDeque::new(), Vec::new());
        let (factors, levels) = (HashMap::new(), HashMap::new());
        let mut espeak = Self { config, caps, catalogue, open, warm, dead, aligner, factors, levels };
        let default = espeak.manner(None, None, 1.0)?;
        espeak.keep_warm(&default)?;
        espeak.factor(&default);
        Ok(espeak)
    }

    fn manner(&self, voice: Option<&str>, language: Option<&str>, speed: f32) -> Result<Manner, SynthError> {
        let voice = match (voice, language) {
            (Some(voice), _) => self.catalogue.resolve(voice)?,
            (None, Some(language)) => self.catalogue.for_language(language, &self.config.voice)?,
            (None, None) => self.catalogue.resolve(&self.config.voice)?,
        };
        checked_speed(speed).map_err(SynthError::Input)?;
        let (slowest, fastest) = RATE_LIMITS;
        let words_per_minute = (WORDS_PER_MINUTE * speed).clamp(slowest, fastest).round() as u32;
        Ok(Manner { voice, words_per_minute })
    }

    /// Starts children until the default manner has half of the warm children and `wanted` one.
    fn keep_warm(&mut self, wanted: &Manner) -> Result<(), SynthError> {
        let default = self.manner(None, None, 1.0)?;
        let warm = self.config.warm;
        let for_default = warm.div_ceil(2);
        let count =
            |warm: &VecDeque<(Manner, Child)>, manner: &Manner| warm.iter().filter(|(m, _)| m == manner).count();
        while count(&self.warm, &default) < for_default {
            self.warm.push_front((default.clone(), self.start(&default)?));
        }
        if *wanted != default && warm > for_default && count(&self.warm, wanted) == 0 {
            self.warm.push_back((wanted.clone(), self.start(wanted)?));
        }
        while self.warm.len() > warm {
            // The manner wanted longest ago goes first; those of the default stand before all others.
            let Some(at) = self.warm.iter().position(|(m, _)| *m != default) else { break };
            if let Some((_, child)) = self.warm.remove(at) {
                self.bury(child);
            }
        }
        Ok(())
    }

    /// What brings a voice to the loudness of the others. Measured when the voice is first used: some 100 ms.
    fn factor(&mut self, manner: &Manner) -> f32 {
        let Some(wanted) = self.config.loudness else { return 1.0 };
        if let Some(factor) = self.factors.get(&manner.voice) {
            return *factor;
        }
        let manner = Manner { words_per_minute: WORDS_PER_MINUTE as u32, ..manner.clone() };
        let spoken =
            words::speak(&self.config.program, &manner, reference(&manner.voice), Share::Live, &AtomicBool::new(false));
        let measured = spoken.and_then(|pcm| loudness::measure(&pcm, crate::audio::RATE));
        let factor = measured.map_or(1.0, |measured| loudness::factor(wanted, measured));
        self.factors.insert(manner.voice, factor);
        factor
    }

    fn take(&mut self, manner: &Manner) -> Result<Child, SynthError> {
        while let Some(at) = self.warm.iter().position(|(m, _)| m == manner) {
            let Some((_, mut child)) = self.warm.remove(at) else { break };
            if child.is_alive() {
                return Ok(child);
            }
            self.dead.push(child);
        }
        self.start(manner)
    }

    /// A child for live work.
    fn start(&self, manner: &Manner) -> Result<Child, SynthError> {
        Child::start(&self.config.program, manner, Share::Live)
    }

    fn bury(&mut self, mut child: Child) {
        child.kill();
        self.dead.push(child);
        self.dead.retain_mut(Child::is_alive);
    }
}

impl Synthesizer for Espeak {
    fn caps(&self) -> &Caps {
        &self.caps
    }

    fn voices(&self) -> Vec<VoiceInfo> {
        self.catalogue.infos(&self.config.voice)
    }

    fn identity(&self) -> Option<Identity> {
        let version = voices::list(&self.config.program, "--version").ok()?;
        let Config { program, voice, loudness, .. } = &self.config;
        Some(Identity::of_program(format!("espeak {} {version} {voice} {loudness:?}", program.display())))
    }

    fn open(&mut self, slot: Slot, utterance: &Utterance) -> Result<Stages, SynthError> {
        if utterance.text.len() > MAX_TEXT {
            return Err(SynthError::Input(format!(
                "text of {} bytes is longer than one utterance may be ({MAX_TEXT}): split it into sentences",
                utterance.text.len()
            )));
        }
        let manner = self.manner(utterance.voice.as_deref(), utterance.language.as_deref(), utterance.speed)?;
        let tokens = form::tokens(utterance);
        let text = form::joined(&tokens, |_| String::new());
        let mut child = match utterance.class {
            Class::Live => self.take(&manner)?,
            // A child computes as soon as it has its text, whatever steps are run: batch must give way by itself.
            Class::Batch => Child::start(&self.config.program, &manner, Share::Batch)?,
        };
        if child.say(&text).is_err() {
            // It died between the check and now: one new one, and if that fails too the program is broken.
            self.bury(child);
            child = self.start(&manner)?;
            child.say(&text).map_err(|e| SynthError::Utterance(format!("espeak-ng: {e}")))?;
        }
        if utterance.words.is_kept() || (utterance.class == Class::Live && utterance.words.is_wanted()) {
            let (words, token, length) = (utterance.words.clone(), utterance.token.clone(), Length::default());
            child.tell_length(length.clone());
            self.aligner.ask(Task { manner: manner.clone(), tokens, length, words, token });
        }
        let level = Leveller::new(self.factor(&manner));
        self.levels.insert(slot, level);
        if let Some(old) = self.open.insert(slot, child) {
            self.bury(old);
        }
        // The next one starts while this one speaks. That it could not be is no fault of this utterance.
        if utterance.class == Class::Live
            && let Err(error) = self.keep_warm(&manner)
        {
            tracing::warn!(%error, "no espeak-ng process could be kept ready");
        }
        Ok(Stages::NONE.with(Stage::Vocode))
    }

    fn run(&mut self, step: &Step, out: &mut Vec<Progress>) -> Result<(), SynthError> {
        let now = clock::now();
        let first = out.len();
        let mut idle = true;
        for &slot in &step.slots {
            let Some(child) = self.open.get_mut(&slot) else { continue };
            let mut progress = child.read(slot, now, None);
            if let Some(level) = self.levels.get_mut(&slot) {
                level.process(&mut progress.pcm);
            }
            idle &= progress.pcm.is_empty() && !progress.outcome.done && progress.outcome.failed.is_none();
            out.push(progress);
        }
        if idle
            && let Some(progress) = out.get_mut(first)
            && let Some(child) = self.open.get_mut(&progress.outcome.slot)
        {
            *progress = child.read(progress.outcome.slot, now, Some(WAIT));
            if let Some(level) = self.levels.get_mut(&progress.outcome.slot) {
                level.process(&mut progress.pcm);
            }
        }
        // Children whose listeners are far behind them get on as well, and end.
        self.open.values_mut().for_each(Child::take_ahead);
        Ok(())
    }

    fn close(&mut self, slot: Slot) {
        self.levels.remove(&slot);
        if let Some(child) = self.open.remove(&slot) {
            self.bury(child);
        }
    }

    fn warm_up(&mut self) -> Result<Seeds, SynthError> {
        let manner = self.manner(None, None, 1.0)?;
        let mut child = self.take(&manner)?;
        child.say("ready").map_err(|e| SynthError::Device(format!("espeak-ng: {e}")))?;
        let start = clock::now();
        let mut heard = false;
        // Bounded: a read that waits either brings something or counts against `STALLED`.
        loop {
            let progress = child.read(Slot(0), clock::now(), Some(WAIT));
            heard |= !progress.pcm.is_empty();
            if let Some(reason) = progress.outcome.failed {
                return Err(SynthError::Device(reason));
            }
            if progress.outcome.done {
                break;
            }
        }
        if !heard {
            return Err(SynthError::Device("`espeak-ng` gave no audio for a test word".into()));
        }
        let took = clock::now() - start;
        self.bury(child);
        self.keep_warm(&manner)?;
        Ok(PerStage::new([Duration::ZERO, Duration::ZERO, Duration::ZERO, took]).into())
    }
}

impl Drop for Espeak {
    fn drop(&mut self) {
        let open = self.open.drain().map(|(_, child)| child);
        let warm = self.warm.drain(..).map(|(_, child)| child);
        for mut child in open.chain(warm).chain(self.dead.drain(..)) {
            child.kill();
            child.wait();
        }
    }
}

#[cfg(test)]
pub(crate) mod tests;
