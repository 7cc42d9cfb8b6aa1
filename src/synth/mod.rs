//! Voices: what turns an utterance into PCM on one device.
//!
//! [`Synthesizer`] is the one open seam of the gateway. An implementation owns a loaded model on one device
//! and computes bounded steps; it never decides what to run next and never sees a call.
//! [`crate::sched`] decides; [`device`] is the thread on which both live.

pub mod cosyvoice;
pub mod device;
pub mod espeak;
pub mod identity;
mod precedence;
pub mod tone;

use std::sync::Arc;

pub use self::cosyvoice::bistream::Order as TextOrder;
pub use self::identity::Identity;
pub use self::precedence::Precedence;
pub use crate::sched::{EngineLimits, Need, Outcome, PerStage, Seeds, Slot, Stage, Stages, Step};
use crate::turn::{Saying, Utterance, UtteranceId};

/// What one step did for one slot: what the scheduler follows, and the audio, which it never sees.
#[derive(Debug)]
pub struct Progress {
    /// For whom, and what came of it.
    pub outcome: Outcome,
    /// New PCM in playing order, mono at 24 kHz; empty if none. A whole number of 20 ms frames except at the end.
    pub pcm: Vec<f32>,
}

impl Progress {
    /// `outcome`, which has as many samples as `pcm`.
    pub fn new(outcome: Outcome, pcm: Vec<f32>) -> Self {
        Self { outcome: Outcome { samples: pcm.len() as u64, ..outcome }, pcm }
    }
}

/// What a loaded voice can do.
#[derive(Clone, Debug)]
pub struct Caps {
    /// Engine name for logs and metrics: `cosyvoice3`, `espeak`, `tone`.
    pub name: &'static str,
    /// Where it runs: `cuda:0`, `cpu`.
    pub device: String,
    /// Slots, widths and rounds, for the scheduler.
    pub limits: EngineLimits,
}

/// Device memory, as admission sees it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Memory {
    /// Bytes that utterances may take in all.
    pub total: u64,
    /// Bytes that open utterances hold now.
    pub used: u64,
}

/// A voice that can be asked for by name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VoiceInfo {
    /// Its name.
    pub name: String,
    /// BCP 47 tags it speaks well, when known.
    pub languages: Vec<String>,
    /// Text ids after which a text sounds that is still being written ([`Synthesizer::open_streamed`]), among
    /// other work and without holding it up while it waits. `None`: it speaks whole texts only.
    pub starts_after: Option<u32>,
}

/// One loaded model on one device. All calls come from one thread.
pub trait Synthesizer: Send {
    /// Fixed for the lifetime of the model.
    fn caps(&self) -> &Caps;

    /// What can be asked for in [`Utterance::voice`]. The first is the default.
    fn voices(&self) -> Vec<VoiceInfo>;

    /// What decides how it sounds, besides the utterance: where it is known, what was spoken once may be kept and given
    /// again. Asked for when the voice is loaded and after each [`Self::refresh_voices`]. `None`: nothing of it is kept.
    fn identity(&self) -> Option<Identity> {
        None
    }

    /// Prepares `slot` for `utterance` and returns what it can run first. Cheap: device work belongs into steps.
    ///
    /// # Errors
    /// Bad text, an unknown voice, or no memory: this utterance fails, the others are untouched.
    fn open(&mut self, slot: Slot, utterance: &Utterance) -> Result<Stages, SynthError>;

    /// As [`Self::open`] for a text that is still being written: `utterance.text` is what there is of it, the rest
    /// comes by [`Self::append`]. While the slot has nothing to run and is not done, it waits for text.
    ///
    /// # Errors
    /// As [`Self::open`]; or this voice speaks whole texts only.
    fn open_streamed(&mut self, _slot: Slot, _utterance: &Utterance, _order: TextOrder) -> Result<Stages, SynthError> {
        Err(SynthError::Input("this voice speaks whole texts only".into()))
    }

    /// Goes on with the text of a slot opened by [`Self::open_streamed`]; after `last` none follows. Returns what the
    /// slot can run now. Cheap, and of no effect on a launched step.
    ///
    /// # Errors
    /// The slot is not streamed, or its text has ended.
    fn append(&mut self, _slot: Slot, _said: &Saying, _last: bool) -> Result<Stages, SynthError> {
        Err(SynthError::Input("the slot speaks a whole text".into()))
    }

    /// Runs `step` to its end and appends one [`Progress`] per slot of the step to `out`.
    ///
    /// # Errors
    /// Only what ends the whole device ([`SynthError::Device`]); what ends one utterance is its outcome's `failed`.
    fn run(&mut self, step: &Step, out: &mut Vec<Progress>) -> Result<(), SynthError>;

    /// Launches `step` and does not wait for it, see [`Self::complete`]. Until then steps of other slots may run; they
    /// go before it wherever the device has room, but one of the same stage waits for it. `false`: it was not launched,
    /// and nothing is to be completed.
    ///
    /// # Errors
    /// As [`Self::run`].
    fn launch(&mut self, _step: &Step) -> Result<bool, SynthError> {
        Ok(false)
    }

    /// Whether the launched step has ended, so that [`Self::complete`] will not wait.
    ///
    /// # Errors
    /// As [`Self::run`].
    fn poll(&mut self) -> Result<bool, SynthError> {
        Ok(true)
    }

    /// Waits for the launched step and appends one [`Progress`] per slot of it to `out`.
    ///
    /// # Errors
    /// As [`Self::run`].
    fn complete(&mut self, _out: &mut Vec<Progress>) -> Result<(), SynthError> {
        Ok(())
    }

    /// Rounds that the last [`Self::run`] or [`Self::complete`] really ran, for voices that may run fewer than asked:
    /// what steps cost is learned from it. `None`: as many as asked.
    fn rounds_run(&self) -> Option<u32> {
        None
    }

    /// Frees `slot`. Never fails; work for it stops at once.
    fn close(&mut self, slot: Slot);

    /// Moves the state of `slot` out of device memory so that others can use it; the next step that names the
    /// slot brings it back with identical results. Voices that cannot do so do nothing and say so in [`EngineLimits::parks`].
    /// A slot that no step names for a while needs no such call: its state stays, on the device, between any two
    /// steps.
    fn park(&mut self, _slot: Slot) {}

    /// Device memory for utterances. `total == 0`: does not apply.
    fn memory(&self) -> Memory {
        Memory::default()
    }

    /// Everything that the device's memory is used for, by part, metric labels; they add up to what the driver
    /// reports. Empty: not known.
    fn memory_parts(&self) -> Vec<(&'static str, u64)> {
        Vec::new()
    }

    /// An utterance is on its way to a device that had nothing to do: has what it needs up to its first step come into the
    /// processor's caches meanwhile. It changes nothing.
    ///
    /// # Errors
    /// As [`Self::run`].
    fn rehearse(&mut self) -> Result<(), SynthError> {
        Ok(())
    }

    /// Looks at an utterance that was accepted and is to be opened later: the memory it will need. A voice may keep what
    /// it makes of the text until then; every utterance that was prepared is [`Self::forget`]ed.
    ///
    /// # Errors
    /// It can never be opened: bad text or an unknown voice.
    fn prepare(&mut self, _utterance: &Utterance) -> Result<Need, SynthError> {
        Ok(Need::default())
    }

    /// The utterance is over.
    fn forget(&mut self, _utterance: UtteranceId) {}

    /// Runs every stage at several widths once, so that the first caller pays for nothing. Returns what one round of each
    /// took, to seed the cost model. Asked again, it need not do so again.
    ///
    /// # Errors
    /// The device does not work.
    fn warm_up(&mut self) -> Result<Seeds, SynthError>;

    /// Looks for voices added to or removed from the voices folder since the last call.
    fn refresh_voices(&mut self) {}

    /// Who else computes on the device: is told when its work has to give way.
    fn precedence(&self) -> Option<Arc<Precedence>> {
        None
    }
}

/// Voices that are all named where one is not found; of more, the nearest.
const FEW: usize = 8;

/// What of `known`, names with commas between and perhaps a hint behind a semicolon, the writer of `name` may have meant.
fn nearest(name: &str, known: &str) -> String {
    let (names, hint) = known.split_once("; ").unwrap_or((known, ""));
    let all: Vec<&str> = names.split(", ").collect();
    if all.len() <= FEW {
        return format!("known voices: {known}");
    }
    let alike = |other: &&&str| (1e6 * strsim::jaro_winkler(&name.to_lowercase(), &other.to_lowercase())) as u32;
    let best = all.iter().max_by_key(alike).unwrap_or(&"");
    let hint = if hint.is_empty() { String::new() } else { format!("; {hint}") };
    format!("did you mean `{best}`? {} voices are known: `antiphon voice list`, GET /v1/voices{hint}", all.len())
}

/// Why speech could not be made.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SynthError {
    /// The text or its settings cannot be spoken; the message says what to change.
    #[error("{0}")]
    Input(String),
    /// No voice of that name.
    #[error("unknown voice `{name}`; {}", nearest(.name, .known))]
    UnknownVoice {
        /// What was asked for.
        name: String,
        /// What there is, comma-separated.
        known: String,
    },
    /// Not enough device memory for this utterance now.
    #[error("not enough device memory: {needed} bytes needed, {free} free")]
    Memory {
        /// Bytes the utterance needs.
        needed: u64,
        /// Bytes free.
        free: u64,
    },
    /// The state of this utterance became unusable (a NaN, a killed child process).
    #[error("synthesis failed: {0}")]
    Utterance(String),
    /// The device or the model as a whole does not work.
    #[error("device failed: {0}")]
    Device(String),
    /// The device cannot run this voice, now or later: it is not tried again. The text says what would help.
    #[error("{0}")]
    Unusable(String),
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_many_voices_only_the_nearest_is_named() {
        let unknown = |known: &str| SynthError::UnknownVoice { name: "En-Uss".into(), known: known.into() }.to_string();
        assert_eq!(unknown("anna, ben"), "unknown voice `En-Uss`; known voices: anna, ben");
        let many = "a, b, c, d, e, f, g, en-gb, en-us, zz; add `+f3`";
        let said = unknown(many);
        assert!(said.starts_with("unknown voice `En-Uss`; did you mean `en-us`? 10 voices are known"), "{said}");
        assert!(said.ends_with("; add `+f3`"), "{said}");
    }
}
