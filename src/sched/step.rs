//! The vocabulary of device work: what the scheduler plans and a voice runs.

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

    /// Whether `stage` is in the set.
    pub fn has(self, stage: Stage) -> bool {
        self.0 & 1 << stage as u8 != 0
    }

    /// Whether the set is empty.
    pub fn is_empty(self) -> bool {
        self.0 == 0
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
