//! What an utterance can run next, and what of its tokens goes on to the flow.

use super::super::backend::{Backend, End};
use super::super::config::Config;
use super::super::schedule::Hops;
use super::super::text::Thinner;
use super::{Job, Run, Settings};
use crate::synth::{Slot, Stage, Stages, SynthError};

impl Run {
    pub(super) fn new(settings: &Settings, config: &Config, prompt: u32) -> Self {
        Self {
            prefilled: false,
            decoded: false,
            thinner: Thinner::default(),
            tokens: Vec::new(),
            hops: Hops::new(settings.hops, config, prompt),
            pending: 0,
            ahead: false,
            last_pushed: false,
            frames: 0,
            vocoded: 0,
            finished: false,
        }
    }
}

impl Job {
    /// What the job can run now.
    pub(super) fn ready(&self, hold_back: u32) -> Stages {
        let run = &self.now;
        if run.finished {
            // Only an utterance with nothing to say gets here with work left: to report that it is done.
            return Stages::NONE;
        }
        let mut stages = Stages::NONE;
        // A text that is still being written is prefilled in pieces, between which it sounds.
        let next = match &self.text {
            Some(text) => text.next_stage(),
            None if !run.prefilled => return stages.with(Stage::Prefill),
            None => Some(Stage::Decode),
        };
        if let Some(next) = next.filter(|_| !run.decoded) {
            stages = stages.with(next);
        }
        if run.pending > 0 {
            stages = stages.with(Stage::Flow);
        }
        let complete = run.last_pushed && run.pending == 0;
        // The vocoder withholds frames of what is played, which at another speed are more or fewer than were made.
        let played = (f64::from(run.frames) / f64::from(self.speed)) as u32;
        if complete || (run.frames > run.vocoded && played > hold_back) {
            stages = stages.with(Stage::Vocode);
        }
        stages
    }

    /// Samples that the current segment's tokens stand for.
    pub(super) fn samples(&self, config: &Config) -> u64 {
        let per_token = config.token_mel_ratio * config.hift.frame_samples();
        (self.now.tokens.len() as f64 * per_token as f64 / f64::from(self.speed)) as u64
    }
}

/// Takes what was sampled for a slot, and pushes every chunk that it allows.
pub(super) fn take<B: Backend>(
    backend: &mut B,
    slot: Slot,
    run: &mut Run,
    tokens: &[u32],
    ended: Option<End>,
) -> Result<(), SynthError> {
    run.tokens.extend(tokens.iter().copied().filter(|&t| run.thinner.keeps(t)));
    run.decoded |= ended.is_some();
    push(backend, slot, run)
}

/// Pushes every chunk that the tokens so far allow; where flow runs beside decoding, the part of the first chunk that completes the
/// prompt's last block before the rest of it.
pub(super) fn push<B: Backend>(backend: &mut B, slot: Slot, run: &mut Run) -> Result<(), SynthError> {
    if backend.overlaps()
        && let Some(chunk) = run.hops.padding(run.tokens.len() as u32)
    {
        let tokens = run.tokens.get(..chunk.to as usize).unwrap_or_default();
        backend.flow_push(slot, tokens, false)?;
        run.ahead = true;
    }
    while let Some(chunk) = run.hops.next_chunk(run.tokens.len() as u32, run.decoded) {
        let tokens = run.tokens.get(chunk.from as usize..chunk.to as usize).unwrap_or_default();
        backend.flow_push(slot, tokens, chunk.last)?;
        run.last_pushed |= chunk.last;
        // How many steps these are is the backend's to say; that there are some is certain.
        run.pending += 1;
        run.ahead = false;
    }
    Ok(())
}
