//! The vocabulary of device work: what an engine can do, what the scheduler plans, and what came of it.

use std::ops::{Index, IndexMut};

/// A place on the device that holds the state of one utterance. Numbers are the scheduler's, `0..slots`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Slot(pub u32);

/// A kind of device work. A voice uses those it has: a simple one only [`Stage::Vocode`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Stage {
    /// The text and voice prompt through the language model.
    Prefill,
    /// Speech tokens, one a round.
    Decode,
    /// Mel frames, one Euler step of one chunk a round.
    Flow,
    /// Mel to PCM, one chunk a round.
    Vocode,
}

impl Stage {
    /// Every stage, in the order an utterance meets them.
    pub const ALL: [Stage; 4] = [Stage::Prefill, Stage::Decode, Stage::Flow, Stage::Vocode];

    /// The metric label.
    pub fn label(self) -> &'static str {
        match self {
            Stage::Prefill => "prefill",
            Stage::Decode => "decode",
            Stage::Flow => "flow",
            Stage::Vocode => "vocode",
        }
    }

    /// Whether its steps are launched and not waited for, where a device can do that.
    pub(super) fn is_launched(self) -> bool {
        matches!(self, Stage::Flow | Stage::Vocode)
    }
}

/// A value for each stage.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PerStage<T>([T; 4]);

impl<T> PerStage<T> {
    /// The values in the order of [`Stage::ALL`].
    pub const fn new(values: [T; 4]) -> Self {
        Self(values)
    }

    /// The value that `of` gives for each stage.
    pub fn from_fn(of: impl FnMut(Stage) -> T) -> Self {
        Self(Stage::ALL.map(of))
    }

    /// `of` each value.
    pub fn map<U>(self, of: impl FnMut(T) -> U) -> PerStage<U> {
        PerStage(self.0.map(of))
    }

    /// Each stage with its value, in order.
    pub fn iter(&self) -> impl Iterator<Item = (Stage, &T)> {
        Stage::ALL.into_iter().zip(&self.0)
    }
}

impl<T: Copy> PerStage<T> {
    /// The same value for every stage.
    pub const fn splat(value: T) -> Self {
        Self([value; 4])
    }
}

impl<T> Index<Stage> for PerStage<T> {
    type Output = T;

    fn index(&self, stage: Stage) -> &T {
        &self.0[stage as usize]
    }
}

impl<T> IndexMut<Stage> for PerStage<T> {
    fn index_mut(&mut self, stage: Stage) -> &mut T {
        &mut self.0[stage as usize]
    }
}

/// A set of stages: what a slot could run now. An utterance whose tokens suffice for a chunk can both decode
/// ahead and flow; the scheduler chooses.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Stages(u8);

impl Stages {
    /// No stage.
    pub const NONE: Stages = Stages(0);

    /// This set and `stage`.
    #[must_use]
    pub fn with(self, stage: Stage) -> Stages {
        Stages(self.0 | 1 << stage as u8)
    }

    /// This set without `stage`.
    #[must_use]
    pub(super) fn without(self, stage: Stage) -> Stages {
        Stages(self.0 & !(1 << stage as u8))
    }

    /// Whether `stage` is in the set.
    pub fn has(self, stage: Stage) -> bool {
        self.0 & 1 << stage as u8 != 0
    }

    /// Whether the set is empty.
    pub fn is_empty(self) -> bool {
        self.0 == 0
    }

    /// The furthest stage of the set: the nearest to sound.
    pub(super) fn last(self) -> Option<Stage> {
        Stage::ALL.into_iter().rev().find(|stage| self.has(*stage))
    }
}

/// What an engine can do, fixed for the lifetime of its model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EngineLimits {
    /// Utterances open at once: slots `0..slots`.
    pub slots: u32,
    /// Most slots in one step; 0: the engine has no such stage.
    pub width: PerStage<u32>,
    /// Most rounds of one step.
    pub rounds: PerStage<u32>,
    /// Whether parking a slot frees its device memory and resumes exactly.
    pub parks: bool,
    /// Whether flow and vocoder steps can be launched and completed later.
    pub launches: bool,
    /// Whether an utterance takes memory as its flow gets on, as each [`Outcome::memory`] tells; else all of it when it
    /// is opened.
    pub grows: bool,
}

impl EngineLimits {
    /// An engine of one stage, [`Stage::Vocode`], of so many slots and so wide, that can park for nothing.
    pub fn of_one_stage(slots: u32, width: u32) -> Self {
        Self {
            slots,
            width: PerStage::new([0, 0, 0, width]),
            rounds: PerStage::new([0, 0, 0, 1]),
            parks: true,
            launches: false,
            grows: false,
        }
    }
}

/// One bounded device call: `rounds` rounds of a stage over some slots. Nothing is preempted inside it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Step {
    /// What kind of work.
    pub stage: Stage,
    /// For whom; at most the voice's width of the stage, no slot twice, each with the stage in its ready set.
    pub slots: Vec<Slot>,
    /// How many rounds at most (tokens of decode, Euler steps of flow; 1 for the others). A voice may run fewer, and should once
    /// no slot of the step needs more for its next chunk.
    pub rounds: u32,
}

/// What a step did for one slot.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Outcome {
    /// For whom.
    pub slot: Slot,
    /// What the slot can run next; empty when done or failed.
    pub ready: Stages,
    /// New audio, in samples: mono at 24 kHz, a whole number of 20 ms frames except at the end.
    pub samples: u64,
    /// What the tokens decoded so far stand for, in samples, produced or not: the lead that decoding further ahead
    /// would add to. Equals the samples produced for voices without tokens.
    pub decoded: u64,
    /// Of a step of flow: Euler steps of single chunks, which are more than its rounds where chunks of one slot ran beside each
    /// other. `None` of engines that do not count them: one chunk a round.
    pub chunk_rounds: Option<u32>,
    /// Bytes that the slot will hold once all that was pushed to its flow has been run. Of engines that
    /// [`grow`](EngineLimits::grows); 0 of others.
    pub memory: u64,
    /// Nothing more will come.
    pub done: bool,
    /// Why this utterance cannot go on; the others can.
    pub failed: Option<String>,
}

impl Outcome {
    /// Of a slot that can run `ready` next; nothing was made.
    pub fn ready(slot: Slot, ready: Stages) -> Self {
        Self { slot, ready, samples: 0, decoded: 0, chunk_rounds: None, memory: 0, done: false, failed: None }
    }

    /// Of a slot that cannot go on.
    pub fn failed(slot: Slot, reason: impl Into<String>) -> Self {
        Self { failed: Some(reason.into()), ..Self::ready(slot, Stages::NONE) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_set_gives_its_furthest_stage() {
        assert_eq!(Stages::NONE.last(), None);
        assert_eq!(Stages::NONE.with(Stage::Flow).with(Stage::Decode).last(), Some(Stage::Flow));
    }

    #[test]
    fn values_are_found_by_their_stage() {
        let mut values = PerStage::from_fn(|stage| stage as u32);
        values[Stage::Flow] += 10;
        assert_eq!(values, PerStage::new([0, 1, 12, 3]));
        assert_eq!(values.iter().map(|(_, value)| *value).max(), Some(12));
    }
}
