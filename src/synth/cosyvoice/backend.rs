//! The stage executor that [`super::CosyVoice`] drives: the network on one device, over slots.
//!
//! Owns every tensor: weights, noise tables, voice prefixes and the state of each slot. It decides nothing: what
//! runs, in which order and how far ahead is the caller's. All calls come from one thread.
//!
//! A slot lives through `open`, `prefill`, any number of `decode`, `flow_push` + `flow` and `vocode` calls in any
//! order that has its inputs ready, and `close`. Each call takes the slots of one step, whose rows may be of any
//! lengths, and appends one result per slot in the order given. A failure of one row is in its result; an `Err`
//! ends the device.
//!
//! # Exactness
//! - Tokens of a slot do not depend on which other slots are in the step, nor on how rounds are cut. Its frames and
//!   samples depend on that up to rounding only: a device may sum in another order at another width.
//! - Frames of complete blocks equal those of one call over the whole utterance (section 10 of the reference's
//!   description): K,V per (Euler step, layer, guidance row), both position-convolution histories per step, the
//!   pre-lookahead history and the vocoder's histories are carried.
//! - A slot that was left alone between two calls, or parked, continues with identical results.

use std::path::PathBuf;
use std::sync::Arc;

use super::gpu::whisper::Seat;
use crate::synth::{EngineLimits, Precedence, Slot, SynthError};

/// A voice as the flow needs it, and what makes the language model speak like it.
#[derive(Clone, Debug, PartialEq)]
pub struct FlowPrompt {
    /// Speech tokens of the recording.
    pub tokens: Vec<u32>,
    /// Mel of the recording, row-major `[frames, mel]`. In streaming use `frames` is two a token.
    pub mel: Vec<f32>,
    /// Raw speaker vector.
    pub speaker: Vec<f32>,
}

/// A voice known to a backend.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct VoiceHandle(pub u32);

/// One position of a language model input.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Embed {
    /// A row of the text table.
    Text(u32),
    /// A row of the speech table; control ids live there.
    Speech(u32),
}

/// What is masked before `min_len` tokens are out (section 5, the minimum-length quirk).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum MinLength {
    /// Every id past the codebook is masked: the length holds.
    #[default]
    Intended,
    /// Only the first control id is, as shipped: an end token can come early.
    Reference,
}

/// How one slot's tokens are sampled.
#[derive(Clone, Debug, PartialEq)]
pub struct Sampling {
    /// Key of the counter-based generator; see [`super::sample::key`].
    pub key: [u32; 2],
    /// Tokens before which the end is masked.
    pub min_len: u32,
    /// Tokens after which decoding simply ends.
    pub max_len: u32,
    /// What is masked before `min_len`.
    pub min_length: MinLength,
    /// Tokens to emit instead of what was sampled (sampling still happens, so that the work is the same); decoding
    /// ends after the last. For measuring with random weights and for teacher forcing.
    pub forced: Option<Arc<[u32]>>,
}

/// What a slot is opened with.
#[derive(Clone, Debug, PartialEq)]
pub struct SlotRequest {
    /// Whose flow prompt; the slot holds the voice alive.
    pub voice: VoiceHandle,
    /// The language model's input: sos, text, task, prompt speech. Empty: no language model runs for this slot
    /// (voice conversion), tokens only come by [`Backend::flow_push`].
    pub prefix: Vec<Embed>,
    /// How tokens are sampled.
    pub sampling: Sampling,
    /// Speaking rate, 1.0 as made. At any other the mel is stretched as it comes; see [`super::respeed`].
    pub speed: f32,
}

/// Which control ids a [`Stretch`] may sample.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Controls {
    /// This one.
    Only(u32),
    /// All but the first, as shipped.
    AllButFirst,
    /// All.
    All,
}

/// What a slot whose text is still being written runs up to its next pause.
#[derive(Clone, Debug, PartialEq)]
pub struct Stretch {
    /// What is fed before it, behind what was sampled and is not fed yet. Not empty.
    pub input: Vec<Embed>,
    /// Everything sampled so far, control ids included: their number is the index of the next sample, and repetitions are
    /// told by the newest.
    pub items: Vec<u32>,
    /// Samples at most; [`End::Length`] behind the last.
    pub most: u32,
    /// What may be sampled besides speech tokens. Ends the stretch with [`End::Control`].
    pub controls: Controls,
}

/// Limits of a backend, fixed for its lifetime.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BackendCaps {
    /// `cpu`, `cuda:0`.
    pub device: String,
    /// Slots, widths and rounds. Parking frees device memory, where the backend parks.
    pub limits: EngineLimits,
    /// Longest language model sequence of a slot, positions.
    pub positions: u32,
}

/// How a slot's decoding ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum End {
    /// A control id was sampled.
    Eos,
    /// This control id was sampled, in a [`Stretch`].
    Control(u32),
    /// `max_len` tokens are out, or the forced tokens are used up.
    Length,
}

/// What `prefill` did for a slot.
#[derive(Debug)]
pub struct Prefilled {
    /// For whom.
    pub slot: Slot,
    /// The first speech tokens, where the backend samples any from the prefix itself; `decode` gives those behind them.
    pub tokens: Vec<u32>,
    /// Nothing will be decoded.
    pub ended: Option<End>,
    /// This slot cannot go on.
    pub failed: Option<SynthError>,
}

/// What `decode` did for a slot.
#[derive(Debug)]
pub struct Decoded {
    /// For whom.
    pub slot: Slot,
    /// New speech tokens, in order; never a control id.
    pub tokens: Vec<u32>,
    /// Nothing more will be decoded.
    pub ended: Option<End>,
    /// This slot cannot go on.
    pub failed: Option<SynthError>,
}

/// What `flow` did for a slot.
#[derive(Debug)]
pub struct Flowed {
    /// For whom.
    pub slot: Slot,
    /// New mel frames that `vocode` can use.
    pub frames: u32,
    /// Euler steps of single windows that ran: several a round where windows ran a step apart.
    pub windows: u32,
    /// Rounds still to be run for the tokens pushed so far; 0: everything is out.
    pub pending: u32,
    /// This slot cannot go on.
    pub failed: Option<SynthError>,
}

/// What `vocode` did for a slot.
#[derive(Debug)]
pub struct Vocoded {
    /// For whom.
    pub slot: Slot,
    /// New samples. Unless there is [`Self::more`], everything up to frame `n - hold` ([`Backend::hold_back`]) is out
    /// after frame `n` of a mel that goes on.
    pub pcm: Vec<f32>,
    /// The last frame's samples are out.
    pub done: bool,
    /// There are frames left that the next call takes.
    pub more: bool,
    /// This slot cannot go on.
    pub failed: Option<SynthError>,
}

/// How much memory a slot will need, for admission.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// Language model positions at the end.
    pub positions: u32,
    /// Mel frames at the end, the prompt's not counted.
    pub frames: u32,
}

/// The network on one device. See the module's contract.
pub trait Backend: Send {
    /// Fixed limits.
    fn caps(&self) -> &BackendCaps;

    /// The product that it computes on: another one may round otherwise.
    fn product(&self) -> String {
        self.caps().device.clone()
    }

    /// Mel frames withheld by [`Self::vocode`] until the mel goes on or ends.
    fn hold_back(&self) -> u32;

    /// Takes a voice. Cheap; device work is [`Self::prepare_voice`]'s.
    ///
    /// # Errors
    /// Sizes that do not fit the model.
    fn add_voice(&mut self, prompt: Arc<FlowPrompt>) -> Result<VoiceHandle, SynthError>;

    /// Computes what every utterance of a voice shares: the flow state of the prompt's complete blocks whose
    /// look-ahead lies in the prompt too, `floor((P - lookahead) / block)` blocks. Does nothing the second time.
    ///
    /// # Errors
    /// No memory, or the device failed.
    fn prepare_voice(&mut self, voice: VoiceHandle) -> Result<(), SynthError>;

    /// Gives up the caller's hold on a voice; its memory is freed when the last slot that uses it closes.
    fn release_voice(&mut self, voice: VoiceHandle);

    /// Prepares a slot. Cheap.
    ///
    /// # Errors
    /// An id out of range, a prefix longer than [`BackendCaps::positions`], or no memory.
    fn open(&mut self, slot: Slot, request: SlotRequest) -> Result<(), SynthError>;

    /// Runs the whole prefix of each slot through the language model, which may give the first tokens.
    ///
    /// # Errors
    /// The device failed.
    fn prefill(&mut self, slots: &[Slot], out: &mut Vec<Prefilled>) -> Result<(), SynthError>;

    /// Decodes up to `rounds` tokens for each slot.
    ///
    /// # Errors
    /// The device failed.
    fn decode(&mut self, slots: &[Slot], rounds: u32, out: &mut Vec<Decoded>) -> Result<(), SynthError>;

    /// Whether [`Self::extend`] works here.
    fn extends(&self) -> bool {
        false
    }

    /// Gives a slot that was opened with an empty prefix more to run: [`Self::prefill`] feeds its input behind what is in
    /// the slot's cache already, then [`Self::decode`] samples until it ends. Slots between two stretches hold their cache
    /// and take part in nothing.
    ///
    /// # Errors
    /// An id out of range, more than [`BackendCaps::positions`], a slot that is not open; this device feeds whole
    /// prefixes only.
    fn extend(&mut self, _slot: Slot, _stretch: Stretch) -> Result<(), SynthError> {
        Err(SynthError::Input("this device speaks whole texts only".into()))
    }

    /// Appends generated tokens to the slot's flow input. Without `last`, prompt plus all pushed tokens less the
    /// look-ahead must be whole blocks, and the newest `lookahead` tokens produce no frames yet. With `last`
    /// everything is produced (`tokens` may be empty) and no push may follow.
    ///
    /// # Errors
    /// A token out of range, no whole block, a push after the last, an utterance past the noise table, no memory.
    fn flow_push(&mut self, slot: Slot, tokens: &[u32], last: bool) -> Result<(), SynthError>;

    /// Runs up to `rounds` Euler steps for each slot. A window is one or more whole blocks, or the rest at the end;
    /// which, and whether a slot's windows follow one another or run a step apart, is the backend's choice.
    ///
    /// # Errors
    /// The device failed.
    fn flow(&mut self, slots: &[Slot], rounds: u32, out: &mut Vec<Flowed>) -> Result<(), SynthError>;

    /// Whether decoding and flow run beside each other here, and the frames of a block are the same whether it is pushed with the
    /// next one or before it: then [`Self::decode_beside_flow`] is worth while.
    fn overlaps(&self) -> bool {
        false
    }

    /// As [`Self::decode`] for one slot, beside one round of [`Self::flow`] for it. Not while a launched call is under way.
    ///
    /// # Errors
    /// The device failed.
    fn decode_beside_flow(
        &mut self,
        slot: Slot,
        rounds: u32,
        out: &mut Vec<Decoded>,
        flowed: &mut Vec<Flowed>,
    ) -> Result<(), SynthError> {
        self.flow(&[slot], 1, flowed)?;
        self.decode(&[slot], rounds, out)
    }

    /// Rounds of [`Self::flow`] after which nothing that was pushed is left to do for `slot`, if it is not slowed
    /// down by others: more are of no use. At most so many; not known: `u32::MAX`.
    fn flow_rounds(&self, _slot: Slot) -> u32 {
        u32::MAX
    }

    /// Turns new mel frames of each slot into samples, as far as exactness allows; all of them, or as many as one call
    /// takes, see [`Vocoded::more`].
    ///
    /// # Errors
    /// The device failed.
    fn vocode(&mut self, slots: &[Slot], out: &mut Vec<Vocoded>) -> Result<(), SynthError>;

    /// Launches a flow call and does not wait for it. Until [`Self::complete_flow`] its slots may be
    /// named by no call but [`Self::close`]; calls for others go before it wherever the device has room. One such call
    /// is under way at a time. `false`: nothing was launched, it is [`Self::flow`] that has to be called.
    ///
    /// # Errors
    /// The device failed.
    fn launch_flow(&mut self, _slots: &[Slot], _rounds: u32) -> Result<bool, SynthError> {
        Ok(false)
    }

    /// The same of a vocoder call, until [`Self::complete_vocode`].
    ///
    /// # Errors
    /// The device failed.
    fn launch_vocode(&mut self, _slots: &[Slot]) -> Result<bool, SynthError> {
        Ok(false)
    }

    /// Whether the launched call has ended.
    ///
    /// # Errors
    /// The device failed.
    fn poll(&mut self) -> Result<bool, SynthError> {
        Ok(true)
    }

    /// Waits for the launched flow call and says what it did.
    ///
    /// # Errors
    /// The device failed.
    fn complete_flow(&mut self, _out: &mut Vec<Flowed>) -> Result<(), SynthError> {
        Ok(())
    }

    /// Waits for the launched vocoder call and says what it did.
    ///
    /// # Errors
    /// The device failed.
    fn complete_vocode(&mut self, _out: &mut Vec<Vocoded>) -> Result<(), SynthError> {
        Ok(())
    }

    /// Frees a slot; nothing happens if it is not open.
    fn close(&mut self, slot: Slot);

    /// Moves a slot's state out of device memory; the next call that names it brings it back. Called only where
    /// [`EngineLimits::parks`] says so. A slot that is merely not named by calls for a while needs nothing: its state
    /// stays, and it goes on with identical results.
    fn park(&mut self, _slot: Slot) {}

    /// Bytes that slots may hold in all, voices' own taken off, and what they hold.
    fn memory(&self) -> crate::synth::Memory;

    /// Everything that the device's memory is used for, by part; empty where that is not known.
    fn memory_parts(&self) -> Vec<(&'static str, u64)> {
        Vec::new()
    }

    /// What a slot that reached that extent holds at most, the prompt's part that is not shared included.
    fn memory_needed(&self, extent: Extent) -> u64;

    /// What an open slot holds once all that was pushed has flowed, where that is known better than by
    /// [`Self::memory_needed`].
    fn memory_when_flowed(&self, _slot: Slot) -> Option<u64> {
        None
    }

    /// Waits for the device and says whether it still works.
    ///
    /// # Errors
    /// It does not.
    fn sync(&mut self) -> Result<(), SynthError> {
        Ok(())
    }

    /// See [`crate::synth::Synthesizer::precedence`].
    fn precedence(&self) -> Option<Arc<Precedence>> {
        None
    }

    /// As [`crate::synth::Synthesizer::rehearse`], for what a prefill needs; nothing is under way.
    ///
    /// # Errors
    /// The device failed.
    fn rehearse(&mut self) -> Result<(), SynthError> {
        Ok(())
    }
}

/// How the frames after the last whole block are computed (section 8, the end).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum FinalChunk {
    /// With the chunk-causal mask, from the carried state.
    #[default]
    Causal,
    /// With full attention over the whole utterance, solved anew, as the Python class does.
    Reference,
}

/// The excitation noise of the vocoder, values in `[0, 1)` by sample and harmonic.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum SineNoise {
    /// The reference's own table.
    #[default]
    Native,
    /// The closed formula that golden kits use in its place, with a constant of the kit's.
    Formula(u32),
}

/// Which of a checkpoint's language models speaks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum LanguageModel {
    /// `llm.pt`.
    #[default]
    Plain,
    /// `llm.rl.pt`: the same network, tuned by reinforcement.
    Reinforced,
}

impl LanguageModel {
    /// The name of its file without the ending.
    pub fn stem(self) -> &'static str {
        match self {
            LanguageModel::Plain => "llm",
            LanguageModel::Reinforced => "llm.rl",
        }
    }
}

impl std::str::FromStr for LanguageModel {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        [LanguageModel::Plain, LanguageModel::Reinforced]
            .into_iter()
            .find(|llm| llm.stem() == name)
            .ok_or_else(|| format!("language model `{name}`: expected llm or llm.rl"))
    }
}

impl std::fmt::Display for LanguageModel {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.stem())
    }
}

/// What a GPU is taken for instead of itself: on one card, what another would run.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TakenFor {
    /// Architecture that kernels are compiled for, such as `compute_80`; `None`: the device's own.
    pub arch: Option<String>,
    /// Shared memory that a block may have, in KiB; `None`: what the device has.
    pub shared_kib: Option<u32>,
}

/// The GPU that a backend runs on, and what is remembered of it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Hardware {
    /// See [`TakenFor`].
    pub taken_for: TakenFor,
    /// Folder where compiled kernels and what was found fastest are kept; `None`: found out at every load.
    pub cache: Option<PathBuf>,
    /// How much of its memory is used; `None`: all that is free.
    pub memory: Option<MemoryLimit>,
    /// Whether results have the same bits whatever else is in a step, at the price of slower steps.
    pub invariant: bool,
    /// Whether the flow keeps keys and values in 8 bits, a scale for each frame and head: half the memory of an utterance. The CPU
    /// rounds them alike.
    pub int8_keys: bool,
    /// What the flow's layers multiply.
    pub products: Products,
}

/// What the flow's layers multiply: weights, and what comes in. The CPU, which computes in single precision, rounds what a GPU
/// multiplies in fewer bits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Products {
    /// Numbers as they are.
    #[default]
    Full,
    /// On a GPU, in steps of so many rows that arithmetic takes the time and not memory: numbers of 8 bits (E4M3). Less time, and
    /// a mel that differs.
    Fp8,
    /// The same in every step: for comparing with the reference.
    Fp8Always,
}

impl Products {
    /// Whether any step multiplies numbers of 8 bits.
    pub fn fp8(self) -> bool {
        self != Self::Full
    }
}

/// How much of a device's memory an engine uses, its weights and what the driver takes for it included.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MemoryLimit {
    /// So many bytes.
    Bytes(u64),
    /// So many hundredths of what the device has.
    Percent(u32),
}

impl MemoryLimit {
    /// In bytes, on a device of `total`.
    pub fn of(self, total: u64) -> u64 {
        match self {
            MemoryLimit::Bytes(bytes) => bytes.min(total),
            MemoryLimit::Percent(part) => (u128::from(total) * u128::from(part.min(100)) / 100) as u64,
        }
    }
}

impl std::str::FromStr for MemoryLimit {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || format!("`{text}` is no amount of memory: say \"24GB\", \"24000MB\" or \"80%\"");
        let number = |digits: &str| digits.trim().parse::<u32>().ok().filter(|n| *n > 0).ok_or_else(wrong);
        if let Some(percent) = text.strip_suffix('%') {
            return number(percent).and_then(|n| if n <= 100 { Ok(Self::Percent(n)) } else { Err(wrong()) });
        }
        for (unit, bytes) in [("GB", 1_000_000_000), ("MB", 1_000_000)] {
            if let Some(amount) = text.strip_suffix(unit) {
                return number(amount).map(|n| Self::Bytes(u64::from(n) * bytes));
            }
        }
        Err(wrong())
    }
}

/// How a backend is built, besides its checkpoint.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Options {
    /// See [`LanguageModel`].
    pub llm: LanguageModel,
    /// See [`FinalChunk`].
    pub final_chunk: FinalChunk,
    /// See [`SineNoise`].
    pub sine_noise: SineNoise,
    /// Slots; `None`: what the device can take.
    pub slots: Option<u32>,
    /// Bytes for slots and voices; `None`: what the device can spare.
    pub memory: Option<u64>,
    /// See [`Hardware`].
    pub hardware: Hardware,
    /// A recogniser that is loaded beside the voice, onto the GPU.
    pub seat: Option<Seat>,
}
