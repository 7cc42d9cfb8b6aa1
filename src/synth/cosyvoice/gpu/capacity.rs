//! How many calls a card carries: from the measured cost of its steps, or from its published bandwidth and arithmetic.
//!
//! A call that talks takes turns of [`TURN`] seconds with [`PAUSE`] seconds between them. A turn costs the device its first
//! audio, which goes through narrow steps, and the rest of its speech in wide ones; the narrow part is what bounds
//! conversation (tests/gpu/LOG.md). Where many talk, new turns begin together and share those steps, [`TOGETHER`] at a time as
//! the scheduler has it: counted as if each were alone, an H200 was told 135 calls, where 200 and 300 were heard without a fault.

use serde::Serialize;

use super::bench::{Cost, Effort, random_source};
use super::{GpuBackend, GpuError, Precision, SLOTS};
use crate::synth::cosyvoice::backend::{Backend, Extent, Hardware, Options};
use crate::synth::cosyvoice::config::{Config, EULER_STEPS};

/// Seconds of speech of a turn, and of silence before the next.
const TURN: f64 = 3.0;
const PAUSE: f64 = 0.3;
/// Speech tokens of a first chunk with the shortest first hop, and the three that it looks ahead.
const FIRST_TOKENS: f64 = 13.0;
/// New turns that begin together on a busy device.
const TOGETHER: usize = 8;
/// Seconds of sound of a first chunk.
const FIRST_AUDIO: f64 = 0.4;
/// Speech tokens a second.
const TOKENS: f64 = 25.0;
/// Share of the device's time that turns may take: beyond it they wait for each other.
const BUSY: f64 = 0.9;
/// Seconds of speech of the utterances that are counted against memory.
const UTTERANCE: f64 = 8.0;

/// What a device carries.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Capacity {
    /// First audio of one call alone, seconds.
    pub alone: f64,
    /// Seconds of speech made per second when many speak.
    pub sustained: f64,
    /// Utterances of eight seconds that memory has room for at once.
    pub resident: u64,
    /// Calls that talk, as said above.
    pub calls: u64,
}

impl Capacity {
    /// From what first audio takes alone, what it takes of the device for each of those that begin together, what is
    /// sustained, and what memory has room for.
    fn of(alone: f64, together: f64, sustained: f64, resident: u64) -> Self {
        let turn = together + (TURN - FIRST_AUDIO) / sustained;
        let by_turns = BUSY * (TURN + PAUSE) / turn;
        // An utterance holds its memory while it is generated, somewhat ahead of its listener: at worst the whole turn.
        let calls = by_turns.min(resident as f64 * (TURN + PAUSE) / TURN * UTTERANCE / TURN);
        Self { alone, sustained, resident, calls: calls as u64 }
    }

    /// From the costs of steps, of which there are those of one row and of 32 or more, `euler` of them in the flow. Those of
    /// [`TOGETHER`] rows are taken where there are any; else, for want of memory, each turn begins by itself.
    ///
    /// # Errors
    /// The name of a step that was not measured.
    fn from_costs(costs: &[Cost], resident: u64, euler: usize) -> Result<Self, &'static str> {
        let first = |width: usize| -> Result<f64, &'static str> {
            let of = |stage: &'static str| {
                let cost = costs.iter().find(|c| c.stage == stage && c.width == width);
                cost.map(|c| c.seconds / width as f64).ok_or(stage)
            };
            Ok(of("prefill")? + FIRST_TOKENS * of("decode")? + euler as f64 * of("flow step")? + of("vocode 12")?)
        };
        // Of one row in the widest step that was measured.
        let wide = |stage: &'static str| {
            let widest = costs.iter().filter(|c| c.stage == stage).max_by_key(|c| c.width);
            widest.map(|c| c.seconds / c.width as f64).ok_or(stage)
        };
        let alone = first(1)?;
        let together = first(TOGETHER).map_or(alone, |each| each.min(alone));
        // A chunk of the flow and of the vocoder is a second.
        let second = TOKENS * wide("decode")? + euler as f64 * wide("flow step")? + wide("vocode")?;
        Ok(Self::of(alone, together, 1.0 / second, resident))
    }
}

/// Measures device `ordinal` with random weights in the sizes of `config`; some ten seconds.
///
/// # Errors
/// The device cannot be used or failed.
pub fn measure(config: Config, ordinal: u32, hardware: &Hardware) -> Result<Capacity, GpuError> {
    let euler = config.flow.steps;
    let frames = (UTTERANCE * config.frame_rate() as f64) as u32;
    let options = Options { hardware: hardware.clone(), ..Options::default() };
    let mut backend = GpuBackend::new(config, &random_source(1), ordinal, options, Precision::default())?;
    let each = backend.memory_needed(Extent { positions: 0, frames }).max(1);
    let resident = (backend.memory().total / each).min(u64::from(backend.caps().limits.slots));
    let effort = Effort { repeats: 3, widths: vec![1, TOGETHER, 32], ..Effort::default() };
    let costs = backend.stage_costs(&effort)?;
    Capacity::from_costs(&costs, resident, euler)
        .map_err(|stage| GpuError::Model(format!("there is no memory to measure `{stage}`")))
}

/// A card as its maker publishes it.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Card {
    /// Its name.
    pub name: &'static str,
    /// Bytes of memory.
    pub memory: f64,
    /// Bytes a second from memory.
    pub bandwidth: f64,
    /// Operations a second in half precision, dense, sums in single precision.
    pub arithmetic: f64,
    /// Whether it runs Hopper's own kernels; others run the general ones.
    pub hopper: bool,
}

const fn card(name: &'static str, gb: f64, terabytes: f64, teraflops: f64, hopper: bool) -> Card {
    Card { name, memory: gb * 1e9, bandwidth: terabytes * 1e12, arithmetic: teraflops * 1e12, hopper }
}

/// Cards by NVIDIA's data sheets (A10G: of the A10, at its lower clock). Consumer cards run half-precision GEMMs with
/// sums in single precision at half rate.
pub const CARDS: [Card; 9] = [
    card("L4", 24.0, 0.300, 121.0, false),
    card("A10G", 24.0, 0.600, 70.0, false),
    card("RTX 4090", 24.0, 1.008, 165.0, false),
    card("L40S", 48.0, 0.864, 362.0, false),
    card("RTX 5090", 32.0, 1.792, 210.0, false),
    card("A100 80 GB", 80.0, 2.039, 312.0, false),
    card("H100 SXM", 80.0, 3.35, 989.0, true),
    card("H200 SXM", 141.0, 4.8, 989.0, true),
    card("B200", 180.0, 8.0, 2250.0, false),
];

/// Operations of a second of speech: the flow after 350 visible frames, nineteen rows of twenty, and the vocoder.
const FLOW_FLOPS: f64 = 390e9;
const VOCODER_FLOPS: f64 = 34e9;
/// Bytes of a second of speech: the flow's weights in steps of 32 chunks and its keys and values; those of decoding in rounds
/// of 64 rows.
const FLOW_BYTES: f64 = 0.93e9;
const DECODE_BYTES: f64 = 0.36e9;
/// Bytes of the weights of one decode round and of one Euler step.
const ROUND_BYTES: f64 = 0.73e9;
const STEP_BYTES: f64 = 0.38e9;
/// Operations of a first chunk of one utterance: of its prefix and of an Euler step.
const PREFIX_FLOPS: f64 = 0.14e12;
const STEP_FLOPS: f64 = 30e9;
/// Bytes of weights, work space and context before the first utterance, and of one of eight seconds.
const FIXED_MEMORY: f64 = 4.6e9;
const UTTERANCE_MEMORY: f64 = 0.83e9;

/// What kernels reach on an H200: seconds of speech a second, and of a first audio the seconds that it takes alone and what it
/// takes of the device where [`TOGETHER`] begin.
struct Reached {
    sustained: f64,
    alone: f64,
    together: f64,
}

/// Hopper's own kernels, `antiphon doctor` of 2026-11-24 (tests/gpu/LOG.md): 531 seconds of speech a second, 13 ms alone, and 355 calls,
/// which are 3.45 ms for each of those that begin together.
const HOPPER: Reached = Reached { sustained: 531.0, alone: 0.013, together: 3.45e-3 };
/// The general ones: 0.69 and 0.76 of Hopper's own when both were last measured side by side, as those made 500 seconds of speech a
/// second and a first audio alone in 17 ms, of which one of several took a fifth. What was gained since was measured on Hopper only.
const GENERAL: Reached = Reached { sustained: 0.69 * 500.0, alone: 0.017 / 0.76, together: 0.2 * 0.017 / 0.76 };

/// What a card's bandwidth and arithmetic allow, and what is expected if it reaches the part of it that an H200 does.
/// Computed, never measured.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Roofline {
    /// Which.
    pub card: Card,
    /// Seconds of speech a second that its roofline allows.
    pub limit_sustained: f64,
    /// First audio that it allows, seconds.
    pub limit_alone: f64,
    /// What is expected.
    pub expected: Capacity,
}

/// Sustained speech and first audio alone by the roofline.
fn limits(card: &Card) -> (f64, f64) {
    let either = |flops: f64, bytes: f64| (flops / card.arithmetic).max(bytes / card.bandwidth);
    let second = either(FLOW_FLOPS, FLOW_BYTES) + either(0.0, DECODE_BYTES) + either(VOCODER_FLOPS, 0.0);
    let alone = either(PREFIX_FLOPS, ROUND_BYTES)
        + FIRST_TOKENS * either(0.0, ROUND_BYTES)
        + EULER_STEPS as f64 * either(STEP_FLOPS, STEP_BYTES)
        + either(VOCODER_FLOPS * FIRST_AUDIO, 0.0);
    (1.0 / second, alone)
}

/// The roofline of every card.
pub fn rooflines() -> Vec<Roofline> {
    let h200 = CARDS.iter().find(|card| card.name.starts_with("H200")).copied().unwrap_or(CARDS[0]);
    let (sustained, alone) = limits(&h200);
    let line = |card: Card| {
        let (limit_sustained, limit_alone) = limits(&card);
        let reached = if card.hopper { &HOPPER } else { &GENERAL };
        let resident = ((card.memory - FIXED_MEMORY).max(0.0) * 0.94 / UTTERANCE_MEMORY) as u64;
        let (alone, together) = (limit_alone * reached.alone / alone, limit_alone * reached.together / alone);
        let sustained = limit_sustained * reached.sustained / sustained;
        let expected = Capacity::of(alone, together, sustained, resident.min(*SLOTS.end()));
        Roofline { card, limit_sustained, limit_alone, expected }
    };
    CARDS.map(line).to_vec()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cost(stage: &'static str, width: usize, ms: f64) -> Cost {
        Cost { stage, width, seconds: ms * 1e-3, flops: 0.0, bytes: 0.0 }
    }

    /// Costs of an H200 from the log.
    fn h200() -> Vec<Cost> {
        vec![
            cost("prefill", 1, 1.2),
            cost("prefill", 8, 4.8),
            cost("decode", 1, 0.422),
            cost("decode", 8, 0.484),
            cost("decode", 32, 0.688),
            cost("flow step", 1, 0.883),
            cost("flow step", 8, 1.517),
            cost("flow step", 32, 4.205),
            cost("vocode 12", 1, 0.531),
            cost("vocode 12", 8, 1.0),
            cost("vocode", 32, 5.62),
        ]
    }

    #[test]
    fn the_costs_of_an_h200_give_about_what_was_measured_on_it() {
        let found = Capacity::from_costs(&h200(), 150, EULER_STEPS).expect("complete");
        // 17 ms alone, 500 sustained; whole calls: 300 at 86 ms without a fault, 18 of 830 turns refused at 400.
        assert!((0.014..0.019).contains(&found.alone), "{found:?}");
        assert!((420.0..560.0).contains(&found.sustained), "{found:?}");
        assert!((300..400).contains(&found.calls), "{found:?}");
        // Where there was no memory to measure eight rows, each turn is taken to begin by itself.
        let narrow: Vec<Cost> = h200().into_iter().filter(|c| c.width != TOGETHER).collect();
        let alone = Capacity::from_costs(&narrow, 150, EULER_STEPS).expect("complete");
        assert!((120..150).contains(&alone.calls), "{alone:?}");
    }

    #[test]
    fn a_step_that_is_not_there_is_named_and_little_memory_bounds_calls() {
        let without: Vec<Cost> = h200().into_iter().filter(|c| c.stage != "vocode").collect();
        assert_eq!(Capacity::from_costs(&without, 150, EULER_STEPS), Err("vocode"));
        let small = Capacity::from_costs(&h200(), 10, EULER_STEPS).expect("complete");
        assert!(small.calls < 40, "{small:?}");
    }

    #[test]
    fn rooflines_order_cards_by_what_bounds_them() {
        let all = rooflines();
        let of = |name: &str| all.iter().find(|r| r.card.name.starts_with(name)).expect("there");
        let h200 = of("H200");
        assert!((h200.expected.sustained - 531.0).abs() < 1.0 && (h200.expected.alone - 0.013).abs() < 1e-4);
        // As many calls as a card that was measured was told; and not far from what an H100 did (467 a second, 13.7 ms).
        assert_eq!(h200.expected.calls, 355);
        let h100 = of("H100");
        assert!((h100.expected.sustained / 467.0 - 1.0).abs() < 0.1, "{h100:?}");
        assert!((0.0137..0.0137 * 1.5).contains(&h100.expected.alone), "{h100:?}");
        assert!(h200.limit_sustained > 1_000.0 && h200.limit_alone < 0.006, "{h200:?}");
        assert!(of("L4").expected.calls < of("L40S").expected.calls);
        assert!(of("A10G").expected.calls < of("A100").expected.calls);
        assert!(of("A100").expected.calls < of("H100").expected.calls);
    }
}
