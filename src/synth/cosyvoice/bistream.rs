//! Text streaming: speech tokens while the text is still being written (section 5 of the reference, "bistream").
//!
//! [`Bistream`] is a machine without I/O: text ids go in as they arrive, [`Bistream::poll`] says what to feed the
//! language model, [`Bistream::decide`] takes the scores and gives out a speech token as soon as it exists. It holds
//! no tensor and needs nothing but a cached sequence to feed, see [`speak`]; [`super::CosyVoice`] drives it with flow
//! and vocoder when an utterance is opened with its text still to come.
//!
//! # Why
//! Text and speech alternate 5 to 15, so the voice prompt is a prefix and first audio needs five text ids. The
//! original's order is kept as [`Order::Reference`]; [`Order::Fixed`] does not feed the last token of a pause twice,
//! waits for text when there is no prompt speech, keeps prompt speech that the text was too short for, and hides control
//! ids that would end the utterance with an error.

use std::collections::VecDeque;

use super::backend::{Controls, Embed, End, MinLength, Stretch};
use super::config::{EOS, FILL, LlmConfig, SOS, TASK};
use super::probe::{Choose, Probe};
use super::sample;
use crate::synth::SynthError;

/// Which of the original's quirks are kept.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Order {
    /// None.
    #[default]
    Fixed,
    /// All, to the step.
    Reference,
}

/// What to do next.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action {
    /// Append these positions to the sequence and call [`Bistream::decide`] with the scores after the last.
    Feed(Vec<Embed>),
    /// Wait for [`Bistream::arrive`] or [`Bistream::finish`].
    Wait,
    /// The end was sampled.
    Done,
}

/// The prompt of a streamed utterance.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Prompt<'a> {
    /// Text ids up to and including the end of the prompt's instructions.
    pub system: &'a [u32],
    /// Text ids after them: the transcript of the prompt speech.
    pub transcript: &'a [u32],
    /// Prompt speech tokens.
    pub speech: &'a [u32],
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// Nothing to feed until text arrives.
    Waiting,
    /// `input` is to be fed; text may follow.
    Decoding,
    /// `input` is to be fed; no text will follow.
    Finishing,
    Done,
}

/// One streamed utterance.
#[derive(Clone, Debug)]
pub struct Bistream {
    order: Order,
    codebook: u32,
    mix: [usize; 2],
    state: State,
    /// Not fed yet; in the reference's order also what was fed last before a pause.
    input: Vec<Embed>,
    text: VecDeque<u32>,
    speech: VecDeque<u32>,
    /// Everything decoded, fill ids included.
    items: Vec<u32>,
    next_fill: usize,
    finished: bool,
    /// Text ids that were prepared to be fed, those of the prompt's transcript among them.
    given: usize,
}

impl Bistream {
    /// The start of an utterance.
    pub fn new(config: &LlmConfig, order: Order, prompt: &Prompt<'_>) -> Self {
        let mix = config.mix_ratio;
        let mut input = vec![Embed::Speech(config.control(SOS))];
        input.extend(prompt.system.iter().copied().map(Embed::Text));
        let count = prompt.speech.len();
        Self {
            order,
            codebook: config.speech_tokens as u32,
            mix,
            state: State::Waiting,
            input,
            text: prompt.transcript.iter().copied().collect(),
            speech: prompt.speech.iter().copied().collect(),
            items: Vec::new(),
            next_fill: (count / mix[1] + 1) * mix[1] - count,
            finished: false,
            given: 0,
        }
    }

    /// Text ids so far that the model has or is fed next, those of the prompt's transcript first: no speech token that was
    /// drawn before an id was among them can say it.
    pub fn given(&self) -> usize {
        self.given
    }

    /// Takes text ids. In the reference's order at most one round of speech follows each call; else all that the
    /// text allows.
    pub fn arrive(&mut self, ids: &[u32]) {
        self.text.extend(ids);
        if self.state == State::Waiting {
            self.advance();
        }
    }

    /// No more text: the rest is spoken to its end.
    pub fn finish(&mut self) {
        self.finished = true;
        if self.state == State::Waiting {
            self.close();
        }
    }

    /// Whether it waits for [`Self::arrive`] or [`Self::finish`].
    pub fn is_waiting(&self) -> bool {
        self.state == State::Waiting
    }

    /// Whether no text is to come and what is left is being spoken.
    pub fn is_finishing(&self) -> bool {
        self.state == State::Finishing
    }

    /// What to do next.
    pub fn poll(&self) -> Action {
        match self.state {
            State::Waiting => Action::Wait,
            State::Done => Action::Done,
            State::Decoding | State::Finishing => Action::Feed(self.input.clone()),
        }
    }

    /// Takes the scores after what was fed. `choose` gets them, masked as [`MinLength`] says, and everything decoded
    /// so far. Returns the speech token, if this step made one.
    ///
    /// # Errors
    /// A control id was sampled where only speech may follow.
    pub fn decide(
        &mut self,
        scores: &mut [f32],
        min_length: MinLength,
        choose: impl FnOnce(&[f32], &[u32]) -> Option<u32>,
    ) -> Result<Option<u32>, SynthError> {
        let fill = self.codebook + FILL;
        let finishing = self.state == State::Finishing;
        let id = if !finishing && self.items.len() == self.next_fill {
            fill
        } else {
            match (finishing, self.order) {
                (false, _) => self.hide_end(scores, min_length),
                (true, Order::Fixed) => self.hide_all_but_end(scores),
                // The original hides nothing and fails on what may not be there.
                (true, Order::Reference) => {}
            }
            choose(scores, &self.items)
                .ok_or_else(|| SynthError::Utterance("the language model's scores are not numbers".into()))?
        };
        self.take(id)
    }

    /// What a device runs by itself up to the next pause, or `limit` samples of it; `None` while there is nothing to run.
    /// What comes of it belongs into [`Bistream::absorb`].
    pub fn stretch(&self, min_length: MinLength, limit: u32) -> Option<Stretch> {
        let (most, controls) = match (self.state, self.order) {
            (State::Waiting | State::Done, _) => return None,
            // Behind this many the fill is certain, and is not sampled.
            (State::Decoding, _) => {
                let most = self.next_fill.saturating_sub(self.items.len()) as u32;
                let fill = Controls::Only(self.codebook + FILL);
                (most, if min_length == MinLength::Intended { fill } else { Controls::AllButFirst })
            }
            (State::Finishing, Order::Fixed) => (limit, Controls::Only(self.codebook + EOS)),
            (State::Finishing, Order::Reference) => (limit, Controls::All),
        };
        Some(Stretch { input: self.input.clone(), items: self.items.clone(), most: most.min(limit), controls })
    }

    /// Takes what a device drew of a stretch, in order, and how the stretch ended, if it did.
    ///
    /// # Errors
    /// A control id was sampled where only speech may follow.
    pub fn absorb(&mut self, tokens: &[u32], ended: Option<End>) -> Result<(), SynthError> {
        for &token in tokens {
            self.take(token)?;
        }
        match ended {
            Some(End::Control(id)) => self.take(id).map(|_| ()),
            Some(_) if self.state == State::Decoding && self.items.len() == self.next_fill => {
                self.take(self.codebook + FILL).map(|_| ())
            }
            _ => Ok(()),
        }
    }

    /// Takes the next id, wherever it was sampled. Returns it where it is a speech token.
    fn take(&mut self, id: u32) -> Result<Option<u32>, SynthError> {
        let (fill, eos) = (self.codebook + FILL, self.codebook + EOS);
        let finishing = self.state == State::Finishing;
        if id == fill {
            self.next_fill = self.items.len() + self.mix[1] + 1;
        }
        self.items.push(id);
        if id < self.codebook {
            self.input = vec![Embed::Speech(id)];
            return Ok(Some(id));
        }
        match (finishing, id) {
            (true, id) if id == eos => self.state = State::Done,
            (false, id) if id == fill => self.pause(),
            _ => return Err(SynthError::Utterance(format!("control id {id} was sampled inside speech"))),
        }
        Ok(None)
    }

    /// Everything decoded so far, fill ids included.
    pub fn items(&self) -> &[u32] {
        &self.items
    }

    /// While text is to come the end must not be sampled; a fill may.
    fn hide_end(&self, scores: &mut [f32], min_length: MinLength) {
        let fill = (self.codebook + FILL) as usize;
        let start = self.codebook as usize;
        for (id, score) in scores.iter_mut().enumerate().skip(start) {
            if min_length == MinLength::Intended && id != fill || id == start {
                *score = f32::NEG_INFINITY;
            }
        }
    }

    /// Once no text is to come, the end is the only control id that means something.
    fn hide_all_but_end(&self, scores: &mut [f32]) {
        let end = (self.codebook + EOS) as usize;
        for (id, score) in scores.iter_mut().enumerate().skip(self.codebook as usize) {
            if id != end {
                *score = f32::NEG_INFINITY;
            }
        }
    }

    fn pause(&mut self) {
        self.state = State::Waiting;
        if self.order == Order::Fixed {
            self.input.clear();
            self.advance();
        }
        if self.finished && self.state == State::Waiting {
            self.close();
        }
    }

    /// Prepares the next input from the text that is there, if it suffices.
    fn advance(&mut self) {
        let [text, speech] = self.mix;
        while !self.speech.is_empty() && self.text.len() >= text {
            self.give(text);
            let count = speech.min(self.speech.len());
            self.input.extend(self.speech.drain(..count).map(Embed::Speech));
        }
        if !self.speech.is_empty() {
            return;
        }
        let paused = self.items.last() == Some(&(self.codebook + FILL));
        // Without prompt speech the original means to wait too, but its test never holds.
        let empty = self.order == Order::Fixed && self.items.is_empty() && !self.has_speech();
        if paused || empty {
            if self.text.len() < text {
                return;
            }
            if paused {
                self.input.clear();
            }
            self.give(text);
        }
        self.state = State::Decoding;
    }

    fn give(&mut self, ids: usize) {
        self.input.extend(self.text.drain(..ids).map(Embed::Text));
        self.given += ids;
    }

    fn has_speech(&self) -> bool {
        self.input.iter().skip(1).any(|e| matches!(e, Embed::Speech(_)))
    }

    fn close(&mut self) {
        self.give(self.text.len());
        self.input.push(Embed::Speech(self.codebook + TASK));
        if self.order == Order::Fixed {
            self.input.extend(self.speech.drain(..).map(Embed::Speech));
        }
        self.state = State::Finishing;
    }
}

/// How a streamed utterance is sampled.
pub struct Sampler<'a> {
    /// See [`MinLength`].
    pub min_length: MinLength,
    /// The choice from masked scores and everything decoded so far.
    pub choose: Choose<'a>,
}

/// Runs a streamed utterance on a backend: `text` gives the next ids, empty at the end, and is asked only when the
/// model waits; `emit` gets each speech token at once. Returns the positions fed by each pass.
///
/// # Errors
/// The device failed, or a control id was sampled inside speech.
pub fn speak<B: Probe + ?Sized>(
    backend: &mut B,
    stream: &mut Bistream,
    sampler: &mut Sampler<'_>,
    text: &mut dyn FnMut() -> Vec<u32>,
    emit: &mut dyn FnMut(u32),
) -> Result<Vec<usize>, SynthError> {
    let mut fed = Vec::new();
    let mut failure = None;
    backend.llm_feed(&mut |scores| {
        if let Some(scores) = scores {
            let mut scores = scores.to_vec();
            match stream.decide(&mut scores, sampler.min_length, |s, items| (sampler.choose)(s, items)) {
                Ok(Some(token)) => emit(token),
                Ok(None) => {}
                Err(error) => {
                    failure = Some(error);
                    return None;
                }
            }
        }
        loop {
            match stream.poll() {
                Action::Feed(ids) => {
                    fed.push(ids.len());
                    return Some(ids);
                }
                Action::Done => return None,
                Action::Wait => {
                    let ids = text();
                    if ids.is_empty() { stream.finish() } else { stream.arrive(&ids) }
                }
            }
        }
    })?;
    failure.map_or(Ok(fed), Err)
}

/// A choice by repetition-aware sampling, for [`Sampler::choose`].
pub fn sampled(config: &LlmConfig, key: [u32; 2]) -> impl FnMut(&[f32], &[u32]) -> Option<u32> {
    let ras = config.sampling;
    move |scores, items| sample::next_id(scores, items, &ras, key, items.len() as u32)
}
