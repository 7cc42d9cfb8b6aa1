//! The warm-up: every stage is run at several widths before the first caller comes.
//!
//! What is used for the first time is slower, whatever the reason: a kernel that is loaded, memory that is touched, a product
//! whose kernel is chosen. And what steps take then is what the scheduler goes by until it has seen them ([`Seeds`]).

use std::time::Duration;

use super::CosyVoice;
use crate::clock;
use crate::synth::cosyvoice::backend::Backend;
use crate::synth::cosyvoice::probe::Probe;
use crate::synth::{EngineLimits, PerStage, Seeds, Slot, Stage, Stages, Step, SynthError, Synthesizer};
use crate::turn::{Class, StreamId, Utterance};

/// Tokens of an utterance: two hops at least.
const WARM_UP_TOKENS: u32 = 60;
/// A device that has taken so long is not tried with wider steps: it is not one for many callers.
const WARM_UP: Duration = Duration::from_secs(2);

impl<B: Backend + Probe> CosyVoice<B> {
    /// Speaks in one slot, in two, in four, up to the widest step there is, and gives what one round of each step took.
    pub(super) fn speak_at_every_width(&mut self) -> Result<Seeds, SynthError> {
        let mut seeds = Seeds::default();
        if self.voices.is_empty() {
            return Ok(seeds);
        }
        let before = self.forced.replace(WARM_UP_TOKENS);
        let result = self.speak_wider_and_wider(&mut seeds);
        self.forced = before;
        result.map(|()| seeds)
    }

    fn speak_wider_and_wider(&mut self, seeds: &mut Seeds) -> Result<(), SynthError> {
        let EngineLimits { slots, width, .. } = self.caps.limits;
        let widest = width.iter().map(|(_, width)| *width).max().unwrap_or(1).min(slots);
        let began = clock::now();
        for octave in 0.. {
            let together: Vec<Slot> = (0..1 << octave).map(Slot).collect();
            if octave > 0 && (together.len() > widest as usize || clock::now() - began > WARM_UP) {
                break;
            }
            let spoken = self.speak_together(&together, seeds);
            together.iter().for_each(|&slot| self.close(slot));
            match spoken {
                // One speaks, so many have no room: then so many never speak together.
                Err(SynthError::Memory { .. } | SynthError::Utterance(_)) if octave > 0 => break,
                spoken => spoken?,
            }
        }
        Ok(())
    }

    /// Runs an utterance in each of `slots` through every stage that takes so many at once, and adds what one round of
    /// each took: of its longest chunk, since the vocoder takes half as long for the first as for later ones. Of each chunk the shortest round counts.
    fn speak_together(&mut self, slots: &[Slot], seeds: &mut Seeds) -> Result<(), SynthError> {
        let mut ready = Stages::NONE;
        for &slot in slots {
            let utterance = Utterance::plain(StreamId::next(), Class::Batch, "One two three four five.");
            ready = self.open(slot, &utterance)?;
        }
        let mut out = Vec::new();
        let mut chunks: Vec<PerStage<Option<Duration>>> = Vec::new();
        let mut sounded = 0;
        // All have the same text and so many tokens: what one can run next, all can.
        while let Some(stage) = Stage::ALL.into_iter().rev().find(|&stage| ready.has(stage)) {
            let most = self.caps.limits.width[stage].max(1) as usize;
            // Prefixes may come one after the other; wider steps of other stages do not exist.
            if slots.len() > most && stage != Stage::Prefill {
                break;
            }
            for part in slots.chunks(most) {
                let started = clock::now();
                out.clear();
                self.run(&Step { stage, slots: part.to_vec(), rounds: 1 }, &mut out)?;
                self.backend.sync()?;
                if part.len() == slots.len() {
                    chunks.resize(sounded + 1, PerStage::default());
                    let took = clock::now() - started;
                    let shortest = &mut chunks[sounded][stage];
                    *shortest = Some(shortest.map_or(took, |shortest| shortest.min(took)));
                }
                if let Some(reason) = out.iter_mut().find_map(|progress| progress.outcome.failed.take()) {
                    return Err(SynthError::Utterance(reason));
                }
                ready = out.last().map_or(Stages::NONE, |progress| progress.outcome.ready);
            }
            sounded += usize::from(stage == Stage::Vocode);
        }
        for stage in Stage::ALL {
            if let Some(longest) = chunks.iter().filter_map(|chunk| chunk[stage]).max() {
                seeds.add(stage, slots.len(), longest);
            }
        }
        Ok(())
    }
}
