//! Who holds the device's memory.
//!
//! Every allocation is booked under a [`Part`] when it is made and taken off when it is freed. What the driver takes
//! by itself (its context, code, recorded graphs, rounding) cannot be seen from outside: it is measured, once, as
//! what the driver says is used less what is booked. So the parts add up to the driver's figure as long as nothing
//! is allocated without the ledger, which is what the comparison at full load shows.

use std::fmt;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// What the driver takes for a context, about (driver 580: 0.5 GB); more is other programs'.
const CONTEXT: u64 = 600_000_000;

/// What memory is for. Closed: also a metric label.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[non_exhaustive]
pub enum Part {
    /// The driver's context, and what other programs held when the device was opened.
    Context,
    /// Weights and tables of all networks.
    Weights,
    /// Keys and values of the language model, and its sequences: one of each a slot.
    LlmSlots,
    /// Slabs that utterances and voices hold.
    SlabsUsed,
    /// Slabs that no utterance holds.
    SlabsFree,
    /// Histories of the flow's position convolutions, one a slot.
    FlowSlots,
    /// Histories of the vocoder, one a slot.
    VocoderSlots,
    /// Prompts of voices. (Their solved blocks lie in slabs.)
    Voices,
    /// Activations, scores, staging, cuBLASLt's workspace.
    Workspace,
    /// All of a recogniser that is loaded beside the voice.
    Recogniser,
    /// Code of the kernels, and what the driver adds by rounding.
    Code,
    /// Recorded graphs and what the libraries took while they were recorded.
    Graphs,
}

impl Part {
    /// Every part, in the order of a table.
    pub const ALL: [Part; 12] = [
        Part::Context,
        Part::Code,
        Part::Graphs,
        Part::Weights,
        Part::Workspace,
        Part::Recogniser,
        Part::LlmSlots,
        Part::FlowSlots,
        Part::VocoderSlots,
        Part::Voices,
        Part::SlabsUsed,
        Part::SlabsFree,
    ];

    /// The metric label.
    pub fn label(self) -> &'static str {
        match self {
            Part::Context => "context",
            Part::Weights => "weights",
            Part::LlmSlots => "llm_slots",
            Part::SlabsUsed => "slabs_used",
            Part::SlabsFree => "slabs_free",
            Part::FlowSlots => "flow_slots",
            Part::VocoderSlots => "vocoder_slots",
            Part::Voices => "voices",
            Part::Workspace => "workspace",
            Part::Recogniser => "recogniser",
            Part::Code => "code",
            Part::Graphs => "graphs",
        }
    }

    /// What an allocation of that name is for. Names that are not listed are passing or scratch.
    pub(super) fn of(what: &str) -> Self {
        match what {
            "language model slots" | "sequences" | "forced tokens" => Part::LlmSlots,
            "flow slabs" => Part::SlabsFree,
            "flow histories" => Part::FlowSlots,
            "vocoder slots" => Part::VocoderSlots,
            "a voice" => Part::Voices,
            "weights" | "a weight" | "a bias" | "a scale" | "modulation" | "noise" | "rotary angles" | "tokens"
            | "window" | "basis" | "times" => Part::Weights,
            _ => Part::Workspace,
        }
    }
}

impl fmt::Display for Part {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.label())
    }
}

/// Bytes by part.
#[derive(Default)]
pub(super) struct Ledger(Mutex<[u64; Part::ALL.len()]>);

impl Ledger {
    fn bytes(&self) -> MutexGuard<'_, [u64; Part::ALL.len()]> {
        // Plain numbers: consistent after any panic.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn add(&self, part: Part, bytes: u64) {
        self.bytes()[part as usize] += bytes;
    }

    pub(super) fn sub(&self, part: Part, bytes: u64) {
        let held = &mut self.bytes()[part as usize];
        *held = held.saturating_sub(bytes);
    }

    /// Books what the driver uses beyond everything booked so far, `used` bytes in all, under `part`.
    pub(super) fn settle(&self, part: Part, used: u64) {
        let mut bytes = self.bytes();
        let booked: u64 = bytes.iter().sum();
        bytes[part as usize] += used.saturating_sub(booked);
    }

    /// What the engine holds: everything booked but what was there when the device was opened, in whose place comes what
    /// a context takes by itself.
    pub(super) fn own(&self) -> u64 {
        let bytes = self.bytes();
        bytes.iter().sum::<u64>() - bytes[Part::Context as usize] + bytes[Part::Context as usize].min(CONTEXT)
    }

    /// What is booked under `part`.
    pub(super) fn of(&self, part: Part) -> u64 {
        self.bytes()[part as usize]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_driver_adds_is_booked_once_and_allocations_come_and_go() {
        let ledger = Ledger::default();
        ledger.settle(Part::Context, 500);
        ledger.add(Part::of("weights"), 1000);
        ledger.add(Part::of("activations"), 70);
        ledger.settle(Part::Code, 1600);
        assert_eq!((ledger.of(Part::Context), ledger.of(Part::Code)), (500, 30));
        ledger.sub(Part::of("activations"), 70);
        ledger.settle(Part::Graphs, 1530);
        assert_eq!((ledger.of(Part::Workspace), ledger.of(Part::Graphs)), (0, 0));
        assert_eq!(ledger.own(), 1530);
        ledger.settle(Part::Context, 9_000_000_000);
        assert_eq!(ledger.own(), CONTEXT + 1030, "what others hold is not the engine's");
        // A driver that gave memory back in between makes no negative part.
        ledger.settle(Part::Graphs, 900);
        assert_eq!(ledger.of(Part::Graphs), 0);
    }

    #[test]
    fn every_part_has_its_own_label_and_place() {
        let labels: std::collections::BTreeSet<&str> = Part::ALL.iter().map(|p| p.label()).collect();
        let places: std::collections::BTreeSet<usize> = Part::ALL.iter().map(|&p| p as usize).collect();
        assert_eq!((labels.len(), places.len()), (Part::ALL.len(), Part::ALL.len()));
    }
}
