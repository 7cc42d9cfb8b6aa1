//! The warm-up: every stage is run at several widths before the first caller comes.
//!
//! What is used for the first time is slower, whatever the reason: a kernel that is loaded, memory that is touched, a product
//! whose kernel is chosen. And what steps take then is what the scheduler goes by until it has seen them ([`Seeds`]).

use std::collections::BTreeMap;
use std::time::Duration;

use super::CosyVoice;
use crate::clock;
use crate::synth::cosyvoice::backend::Backend;
use crate::synth::cosyvoice::probe::Probe;
use crate::synth::{EngineLimits, Outcome, Seeds, Slot, Stage, Stages, Step, SynthError, Synthesizer};
use crate::turn::{Class, StreamId, Utterance};

/// Tokens of an utterance: two hops at least.
const WARM_UP_TOKENS: u32 = 60;
/// Rounds of flow of one width that say what such a round takes: an utterance's first runs half of its rows, where those without
/// guidance are known beforehand, and its last may be of those that had no room in the others.
const ROUNDS: usize = 3;
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
    /// each took: the median of a chunk's rounds, of its longest chunk, since the vocoder takes half as long for the first as for
    /// later ones. A round of flow is as wide as the chunks that ran in it.
    fn speak_together(&mut self, slots: &[Slot], seeds: &mut Seeds) -> Result<(), SynthError> {
        let mut ready = Stages::NONE;
        for &slot in slots {
            let utterance = Utterance::plain(StreamId::next(), Class::Batch, "One two three four five.");
            ready = self.open(slot, &utterance)?;
        }
        let mut out = Vec::new();
        let mut rounds = Rounds::new();
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
                let took = clock::now() - started;
                let width = out.iter().map(|progress| chunks_of(&progress.outcome)).sum();
                if part.len() == slots.len() && width > 0 {
                    rounds.entry((stage, width, sounded)).or_default().push(took);
                }
                if let Some(reason) = out.iter_mut().find_map(|progress| progress.outcome.failed.take()) {
                    return Err(SynthError::Utterance(reason));
                }
                ready = out.last().map_or(Stages::NONE, |progress| progress.outcome.ready);
            }
            sounded += usize::from(stage == Stage::Vocode);
        }
        shown_by(rounds).into_iter().for_each(|((stage, width), took)| seeds.add(stage, width, took));
        Ok(())
    }
}

/// How many chunks of a slot ran in a round.
fn chunks_of(outcome: &Outcome) -> usize {
    outcome.chunk_rounds.unwrap_or(1) as usize
}

/// What single rounds took, by stage, width and how many chunks had sounded before.
type Rounds = BTreeMap<(Stage, usize, usize), Vec<Duration>>;

/// What a round takes by these: the median of a chunk's, of the longest chunk.
fn shown_by(rounds: Rounds) -> BTreeMap<(Stage, usize), Duration> {
    let mut longest = BTreeMap::<_, Duration>::new();
    for ((stage, width, _), mut took) in rounds {
        if stage == Stage::Flow && took.len() < ROUNDS {
            continue;
        }
        took.sort();
        let known = longest.entry((stage, width)).or_default();
        *known = took[took.len() / 2].max(*known);
    }
    longest
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As one H200 runs 64 utterances of two chunks: in the first round half of all rows, then all but one utterance, which
    /// has its rounds behind the others.
    #[test]
    fn flow_costs_what_its_whole_rounds_take() {
        let us = Duration::from_micros;
        let mut rounds = Rounds::new();
        for sounded in 0..2 {
            rounds.insert((Stage::Flow, 64, sounded), vec![us(3_200)]);
            rounds.insert((Stage::Flow, 63, sounded), (0..9).map(|n| us(6_300 + n)).collect());
            rounds.insert((Stage::Flow, 1, sounded), vec![us(540)]);
            rounds.insert((Stage::Decode, 64, sounded), vec![us(750), us(12_000), us(752)]);
            rounds.insert((Stage::Vocode, 32, sounded), vec![us(3_000 + 2_500 * sounded as u64)]);
        }
        rounds.insert((Stage::Flow, 32, 0), [us(1_900)].into_iter().chain((0..9).map(|n| us(3_500 + n))).collect());
        let shown: Vec<_> = shown_by(rounds).into_iter().map(|((stage, width), took)| (stage, width, took)).collect();
        let flow = [(Stage::Flow, 32, us(3_504)), (Stage::Flow, 63, us(6_304))];
        let others = [(Stage::Decode, 64, us(752)), (Stage::Vocode, 32, us(5_500))];
        assert_eq!(shown, [&others[..1], &flow, &others[1..]].concat());
    }
}
