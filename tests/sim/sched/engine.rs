//! A fake engine with recorded step costs. It has the stages and the state of the real one and no arithmetic;
//! its "audio" is a running number per utterance, so that lost, doubled or reordered audio shows.

use std::collections::{BTreeMap, HashMap};
use std::time::Duration;

use antiphon::sched::{Config, EngineLimits, Need, Outcome, PerStage, Scheduler, Seeds, Slot, Stage, Stages, Step};
use serde::Deserialize;

use super::rng::Rng;

/// One speech token is 40 ms.
pub(super) const TOKEN: u64 = 960;
const EULER: u32 = 10;
/// Chunks of a round up to which blocks of one utterance flow side by side, each a step behind the one before it.
const PAYS: usize = 32;
/// Tokens that flow together, and tokens whose frames the vocoder takes at once.
const BLOCK: u32 = 25;
const PASS: u32 = 32;
/// Bytes one token's state holds.
pub(super) const TOKEN_BYTES: u64 = 1_000;

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Costs {
    pub(super) slots: u32,
    pub(super) width: [u32; 4],
    pub(super) rounds: [u32; 4],
    pub(super) launch: f64,
    /// Milliseconds from the end of one step to the begin of the next: always, and for each open utterance.
    #[serde(default)]
    pub(super) host: (f64, f64),
    #[serde(default)]
    pub(super) prefill: Vec<(f64, f64)>,
    #[serde(default)]
    pub(super) decode: Vec<(f64, f64)>,
    #[serde(default)]
    pub(super) flow: Vec<(f64, f64)>,
    pub(super) vocode: Vec<(f64, f64)>,
    pub(super) tokens: Hop,
    /// Utterances of an odd number of tokens are of another voice, which begins with so many.
    pub(super) other_first: Option<u32>,
    /// Bytes for utterances; 0 is without limit.
    #[serde(default)]
    pub(super) memory: u64,
    /// Memory is taken as utterances flow, and told by each outcome; else all at once.
    #[serde(default)]
    pub(super) grows: bool,
    #[serde(default)]
    pub(super) parks: bool,
    /// What a step takes while another is in flight, as a multiple of what it takes alone, and by what share of that
    /// time the one in flight gets on; without it the engine runs one at a time.
    pub(super) concurrent: Option<(f64, f64)>,
}

#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Hop {
    pub(super) first: u32,
    pub(super) hop: u32,
    /// Hops double up to this; 0: they do not.
    #[serde(default)]
    most: u32,
    /// Tokens beyond a chunk that its flow looks at.
    #[serde(default)]
    ahead: u32,
}

impl Costs {
    pub(super) fn named(name: &str) -> Self {
        let all: BTreeMap<String, Costs> = toml::from_str(include_str!("costs.toml")).expect("costs.toml");
        all.get(name).unwrap_or_else(|| panic!("no engine `{name}` in costs.toml")).clone()
    }

    fn table(&self, stage: Stage) -> &[(f64, f64)] {
        match stage {
            Stage::Prefill => &self.prefill,
            Stage::Decode => &self.decode,
            Stage::Flow => &self.flow,
            Stage::Vocode => &self.vocode,
        }
    }

    pub(super) fn step(&self, stage: Stage, width: usize, rounds: u32) -> Duration {
        Duration::from_secs_f64((self.launch + self.round(stage, width) * f64::from(rounds)) / 1e3)
    }

    /// Milliseconds of one round.
    fn round(&self, stage: Stage, width: usize) -> f64 {
        let table = self.table(stage);
        let width = width as f64;
        let after = table.iter().position(|(w, _)| *w >= width).unwrap_or(table.len() - 1);
        let (w1, c1) = table[after];
        let (w0, c0) = if after == 0 { (0.0, c1) } else { table[after - 1] };
        c0 + (c1 - c0) * ((width - w0) / (w1 - w0)).clamp(0.0, 1.0)
    }

    pub(super) fn limits(&self) -> EngineLimits {
        EngineLimits {
            slots: self.slots,
            width: PerStage::new(self.width),
            rounds: PerStage::new(self.rounds),
            parks: self.parks,
            launches: self.concurrent.is_some(),
            grows: self.grows,
        }
    }

    /// What steps take at warm-up: as of a GPU, at every power of two.
    pub(super) fn seeds(&self) -> Seeds {
        let mut seeds = Seeds::default();
        for stage in Stage::ALL {
            let most = self.width[stage as usize] as usize;
            let widths = (0..).map(|octave| 1 << octave).take_while(|width| *width <= most);
            widths.for_each(|width| seeds.add(stage, width, self.step(stage, width, 1)));
        }
        seeds
    }

    /// A scheduler for this engine.
    pub(super) fn scheduler(&self, config: Config) -> Scheduler {
        Scheduler::new(config, self.limits(), self.memory, &self.seeds())
    }

    fn has(&self, stage: Stage) -> bool {
        self.width[stage as usize] > 0
    }

    /// What the engine says that a text will need which becomes so many tokens. It knows the text only: usually that is
    /// more than two thirds too much, and three times as much is possible.
    pub(super) fn need(&self, tokens: u32) -> Need {
        if !self.grows {
            return Need::exactly(self.bytes(tokens));
        }
        Need { expected: self.bytes(tokens * 5 / 3), most: self.bytes(tokens * 10 / 3) }
    }

    pub(super) fn bytes(&self, tokens: u32) -> u64 {
        if self.memory == 0 { 0 } else { u64::from(tokens) * TOKEN_BYTES }
    }
}

struct State {
    tokens: u32,
    /// Tokens that the text which is there becomes: the rest is still being written.
    written: u32,
    prefilled: bool,
    decoded: u32,
    /// Tokens that have become mel.
    flowed: u32,
    /// Tokens in the chunk that flows, and the Euler steps so far of each of its blocks that has begun.
    chunk: Option<(u32, Vec<u32>)>,
    /// A chunk of mel that waits for the vocoder, in tokens.
    mel: u32,
    /// Tokens that have become audio.
    voiced: u32,
    parked: bool,
}

pub(super) struct Engine {
    pub(super) costs: Costs,
    open: HashMap<Slot, State>,
    rng: Rng,
    pub(super) busy: Duration,
    pub(super) resumed: u64,
}

impl Engine {
    pub(super) fn new(costs: Costs, seed: u64) -> Self {
        Self { costs, open: HashMap::new(), rng: Rng::new(seed), busy: Duration::ZERO, resumed: 0 }
    }

    /// `written`: tokens that the text so far becomes, of an utterance of `tokens`.
    pub(super) fn open(&mut self, slot: Slot, tokens: u32, written: u32) -> Stages {
        let simple = !self.costs.has(Stage::Prefill);
        let state = State {
            tokens: tokens.max(1),
            written: written.min(tokens.max(1)),
            prefilled: simple,
            decoded: if simple { tokens.max(1) } else { 0 },
            flowed: if simple { tokens.max(1) } else { 0 },
            chunk: None,
            mel: 0,
            voiced: 0,
            parked: false,
        };
        let ready = ready(&self.costs, &state);
        assert!(self.open.insert(slot, state).is_none(), "{slot:?} was open");
        self.check_memory();
        ready
    }

    /// There is more of its text.
    pub(super) fn feed(&mut self, slot: Slot, written: u32) -> Stages {
        let state = self.open.get_mut(&slot).expect("open");
        state.written = written.min(state.tokens);
        ready(&self.costs, state)
    }

    /// How long the host takes to plan a step.
    pub(super) fn host(&self) -> Duration {
        let (always, each) = self.costs.host;
        Duration::from_secs_f64((always + each * self.open.len() as f64) / 1e3)
    }

    /// What `slot` can run now.
    pub(super) fn ready(&self, slot: Slot) -> Stages {
        ready(&self.costs, &self.open[&slot])
    }

    pub(super) fn close(&mut self, slot: Slot) {
        assert!(self.open.remove(&slot).is_some(), "{slot:?} was not open");
    }

    pub(super) fn park(&mut self, slot: Slot) {
        assert!(self.costs.parks);
        self.open.get_mut(&slot).expect("open").parked = true;
    }

    /// What utterances hold: what has flowed and flows now, or all of it from the start.
    pub(super) fn memory(&self) -> u64 {
        let flowing = |s: &State| s.flowed + s.chunk.as_ref().map_or(0, |(tokens, _)| *tokens);
        let held = |s: &State| self.costs.bytes(if self.costs.grows { flowing(s) } else { s.tokens });
        self.open.values().filter(|s| !s.parked).map(held).sum()
    }

    /// What a slot will hold once all that can flow has flowed.
    fn told(costs: &Costs, state: &State) -> u64 {
        let flows = ready(costs, state).has(Stage::Flow);
        let next = if flows {
            state.chunk.as_ref().map_or_else(|| next_chunk(costs, state, state.flowed), |(tokens, _)| *tokens)
        } else {
            0
        };
        if costs.grows { costs.bytes(state.flowed + next) } else { 0 }
    }

    fn check_memory(&self) {
        assert!(self.costs.memory == 0 || self.memory() <= self.costs.memory, "memory overcommitted");
    }

    /// How long the step takes and what it does.
    pub(super) fn run(&mut self, step: &Step) -> (Duration, Vec<Outcome>) {
        let stage = step.stage;
        assert!(
            !step.slots.is_empty() && step.slots.len() <= self.costs.width[stage as usize] as usize,
            "width of {step:?}"
        );
        assert!(step.rounds >= 1 && step.rounds <= self.costs.rounds[stage as usize], "rounds of {step:?}");
        for slot in &step.slots {
            let state = self.open.get_mut(slot).unwrap_or_else(|| panic!("{slot:?} of {step:?} is not open"));
            self.resumed += u64::from(state.parked);
            state.parked = false;
            assert!(ready(&self.costs, state).has(stage), "{slot:?} cannot {stage:?}");
        }
        let (flow, chunks) = if stage == Stage::Flow { self.flow(step) } else { Default::default() };
        let mut outcomes = Vec::new();
        let mut rounds = 0;
        for (n, &slot) in step.slots.iter().enumerate() {
            let state = self.open.get_mut(&slot).expect("open");
            let (used, samples) = advance(&self.costs, state, stage, step.rounds);
            rounds = rounds.max(used);
            let done = state.voiced == state.tokens;
            let decoded = u64::from(state.decoded) * TOKEN;
            let memory = Self::told(&self.costs, state);
            outcomes.push(Outcome {
                samples,
                decoded,
                chunk_rounds: chunks.get(n).copied(),
                memory,
                done,
                ..Outcome::ready(slot, ready(&self.costs, state))
            });
        }
        self.check_memory();
        // A few percent of noise, as devices have.
        let took = if stage == Stage::Flow { flow } else { self.costs.step(stage, step.slots.len(), rounds) };
        let took = took.mul_f64(0.97 + 0.06 * self.rng.unit());
        self.busy += took;
        (took, outcomes)
    }

    /// What is run of `step`: decoding ends with the tokens of the first chunk of a slot of which nothing was heard yet; else a step
    /// ends when no slot needs more for its next chunk.
    pub(super) fn useful(&self, step: &Step) -> Step {
        let need = |state: &&State| needed(&self.costs, state, step.stage);
        let states = step.slots.iter().filter_map(|slot| self.open.get(slot));
        let mute =
            |state: &&State| step.stage == Stage::Decode && state.voiced == 0 && state.mel == 0 && state.flowed == 0;
        let first = states.clone().filter(mute).map(|state| need(&state)).min();
        let useful = first.or_else(|| states.map(|state| need(&state)).max());
        Step { rounds: step.rounds.min(useful.unwrap_or(step.rounds)), ..step.clone() }
    }

    /// Runs a step of flow: how long it takes, and the Euler steps of single blocks of each slot.
    fn flow(&mut self, step: &Step) -> (Duration, Vec<u32>) {
        let mut ms = self.costs.launch;
        let mut steps = vec![0; step.slots.len()];
        for _ in 0..step.rounds {
            let mut spare = PAYS.saturating_sub(step.slots.len());
            let mut together = 0;
            for (slot, steps) in step.slots.iter().zip(&mut steps) {
                let blocks = flow_round(&self.costs, self.open.get_mut(slot).expect("open"), 1 + spare);
                spare -= blocks.saturating_sub(1);
                together += blocks;
                *steps += blocks as u32;
            }
            if together == 0 {
                break;
            }
            ms += self.costs.round(Stage::Flow, together);
        }
        (Duration::from_secs_f64(ms / 1e3), steps)
    }
}

fn next_chunk(costs: &Costs, state: &State, from: u32) -> u32 {
    let Hop { first, hop, most, .. } = costs.tokens;
    let first = costs.other_first.filter(|_| state.tokens % 2 == 1).unwrap_or(first);
    let mut next = if from == 0 { first } else { hop };
    let mut end = first;
    while from > end && next < most {
        end += next;
        next = (2 * next).min(most);
    }
    next.min(state.tokens - from)
}

fn ready(costs: &Costs, state: &State) -> Stages {
    let mut ready = Stages::NONE;
    if !state.prefilled {
        return if state.written > 0 { ready.with(Stage::Prefill) } else { ready };
    }
    if state.decoded < state.written {
        ready = ready.with(Stage::Decode);
    }
    let chunk = next_chunk(costs, state, state.flowed);
    let flows = state.chunk.is_some() || chunk > 0 && state.decoded >= decoded_for(costs, state, chunk);
    if flows && state.mel == 0 {
        ready = ready.with(Stage::Flow);
    }
    let simple = !costs.has(Stage::Flow);
    if state.mel > 0 || simple && state.voiced < state.tokens {
        ready = ready.with(Stage::Vocode);
    }
    ready
}

/// Tokens that are decoded before a chunk of `next` flows: those that it looks ahead at as well, unless the text ends before.
fn decoded_for(costs: &Costs, state: &State, next: u32) -> u32 {
    (state.flowed + next + costs.tokens.ahead).min(state.tokens)
}

/// Rounds of `stage` until the next chunk of `state` has what it takes, one at least.
fn needed(costs: &Costs, state: &State, stage: Stage) -> u32 {
    let next = next_chunk(costs, state, state.flowed);
    match stage {
        Stage::Decode => decoded_for(costs, state, next).min(state.written).saturating_sub(state.decoded).max(1),
        Stage::Flow => {
            let (tokens, blocks) = state.chunk.as_ref().map_or((next, &[][..]), |(tokens, blocks)| (*tokens, blocks));
            let rest = tokens.div_ceil(BLOCK) - blocks.len() as u32;
            let last = blocks.last().map_or(0, |steps| EULER - steps);
            // Each block begins a step after the one before it.
            if rest > 0 { EULER.max(last + 1) + rest - 1 } else { last }
        }
        Stage::Prefill | Stage::Vocode => 1,
    }
}

/// One Euler step of at most `most` blocks of the chunk that flows: how many there were.
fn flow_round(costs: &Costs, state: &mut State, most: usize) -> usize {
    // Its chunk has ended within this step.
    if state.mel > 0 {
        return 0;
    }
    let next = next_chunk(costs, state, state.flowed);
    let (tokens, blocks) = state.chunk.get_or_insert_with(|| (next, Vec::new()));
    let all = tokens.div_ceil(BLOCK) as usize;
    let begins = blocks.len() < all && blocks.last().is_none_or(|&steps| steps > 0);
    if begins && blocks.iter().filter(|&&steps| steps < EULER).count() < most {
        blocks.push(0);
    }
    let (mut ran, mut ahead) = (0, EULER);
    for steps in blocks.iter_mut() {
        let had = *steps;
        if had < ahead && ran < most {
            *steps += 1;
            ran += 1;
        }
        ahead = had;
    }
    if blocks.len() == all && blocks.iter().all(|&steps| steps == EULER) {
        (state.flowed, state.mel) = (state.flowed + *tokens, *tokens);
        state.chunk = None;
    }
    ran
}

/// Rounds used and samples made.
fn advance(costs: &Costs, state: &mut State, stage: Stage, rounds: u32) -> (u32, u64) {
    match stage {
        Stage::Prefill => {
            state.prefilled = true;
            (1, 0)
        }
        Stage::Decode => {
            let used = rounds.min(state.written - state.decoded);
            state.decoded += used;
            (used, 0)
        }
        // Its rounds have run: all slots of a step share them.
        Stage::Flow => (rounds, 0),
        Stage::Vocode => {
            let tokens = if costs.has(Stage::Flow) {
                // A pass at a time.
                let pass = state.mel.min(PASS);
                state.mel -= pass;
                pass
            } else {
                next_chunk(costs, state, state.voiced)
            };
            state.voiced += tokens;
            (1, u64::from(tokens) * TOKEN)
        }
    }
}
