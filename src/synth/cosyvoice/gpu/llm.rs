//! The language model on the device: fixed slots of cache, prefill of many prefixes at once, and decode rounds that
//! need the host only for their result.
//!
//! A decode round is one graph for its width. Between the rounds of a call nothing leaves the device: the sampled id
//! becomes the next input there. The last position of a prefix goes through the network with the others and gives the first token:
//! by itself it would take a round, in which all weights are read for one row.
//!
//! [`load`] makes the model, [`network`] runs its layers and chooses how they multiply, [`checks`] compares sampling with its
//! specification.
//!
//! # Why
//! A pass over one prefix is a graph as well, for its rows in steps of 32: 185 positions take 0.94 ms, and 1.00 where its 170
//! kernels are launched one by one. Rows that are over are of no slot.
//!
//! RMSNorm costs no pass of its own: its weights are folded into the GEMM that follows, and its scale is a
//! factor per row that the GEMM finds out while it reads the row. A warpgroup GEMM gets its sum of squares from the
//! GEMM that made the row.

pub mod checks;
pub(super) mod load;
mod network;

use std::collections::BTreeMap;
use std::sync::Arc;

use self::network::{Args, Network};
use super::device::{Buf, Device, GpuError, Graph, Staging, start};
use super::gemm::SKINNY;
use super::mirror::{Layout, mirrored};
use crate::synth::cosyvoice::backend::{Controls, Embed, MinLength, Sampling, Stretch};
use crate::synth::cosyvoice::config::LlmConfig;

/// Widths that a decode graph is recorded for.
pub(super) const WIDTHS: [usize; 11] = [1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256];
/// Most rounds of one call.
pub(super) const ROUNDS: usize = 32;
/// Positions of one prefill pass.
const PASS: usize = 4096;
/// Prefixes that may end in one.
const ENDS: usize = WIDTHS[WIDTHS.len() - 1];
/// Passes of up to so many rows that end one prefix or none are recorded, in steps of [`APART`]. Not those whose rows go through
/// skinny GEMMs, which cost the less the fewer there are.
const RECORDED: usize = 512;
const APART: usize = 32;
/// Words of a pass's staging before its sequences: ids, slots and positions of its rows, and which of them are ends.
const SEQS: usize = 3 * PASS + ENDS;
/// Warps of an attention block, each with buffers of sixteen keys and values: two, or four where there are few rows.
const ATTEND_WARPS: usize = 8;
/// Scores of a row that can be sampled from, as in sample.cu.
const SAMPLED: usize = 8192;
const SPEECH_BIT: u32 = 0x8000_0000;
/// What llm.cu gives in place of a token: nothing, as the row has ended; scores that are no numbers; the first of the
/// control ids, below which the others follow.
const NONE: i32 = -1;
const BAD: i32 = -2;
const END: i32 = -3;
const RECENT: usize = 16;

/// `Seq` of llm.cu.
#[derive(Clone, Copy, Default)]
#[repr(C)]
struct Seq {
    pos: i32,
    input: u32,
    decoded: i32,
    done: i32,
    key: [u32; 2],
    min_len: i32,
    max_len: i32,
    mask_to: i32,
    spared: i32,
    forced: i32,
    recent: [i32; RECENT],
}

mirrored!(Seq as "Seq" { pos, input, decoded, done, key, min_len, max_len, mask_to, spared, forced, recent });

/// `Sampler` of sample.cu.
#[derive(Clone, Copy)]
#[repr(C)]
struct Sampler {
    top_p: f32,
    tau_count: f32,
    top_k: i32,
    window: i32,
    speech_tokens: i32,
}

impl Sampler {
    fn new(config: &LlmConfig) -> Self {
        let ras = &config.sampling;
        Self {
            top_p: ras.top_p,
            tau_count: ras.window as f32 * ras.tau,
            top_k: ras.top_k as i32,
            window: ras.window as i32,
            speech_tokens: config.speech_tokens as i32,
        }
    }
}

mirrored!(Sampler as "Sampler" { top_p, tau_count, top_k, window, speech_tokens });

/// What llm.cu and sample.cu declare, too.
pub(super) const LAYOUTS: [Layout; 3] = [Seq::LAYOUT, Args::LAYOUT, Sampler::LAYOUT];

/// Bytes of dynamic shared memory of sampling: every score, and the order of those that may be among the best.
fn sample_shared(scores: usize) -> u32 {
    ((scores * 4).next_multiple_of(16) + scores * 8) as u32
}

/// What one decode call gave for one row.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Sampled {
    pub(super) tokens: Vec<u32>,
    /// The control id that ended it.
    pub(super) end: Option<u32>,
    pub(super) bad: bool,
}

/// What a prefill pass feeds to one slot.
pub(super) struct Feeding<'a> {
    slot: usize,
    /// Positions that its cache has already.
    from: usize,
    /// Not empty, and in range.
    ids: &'a [Embed],
    seq: Seq,
    forced: Option<&'a [u32]>,
    /// All of them go through the network, and the first token is sampled; else the last is the first input of decoding.
    samples: bool,
}

/// The model and its slots.
pub(super) struct Llm {
    device: Arc<Device>,
    network: Network,
    sampler: Sampler,
    /// Slot of each row, then how many results each row has.
    rows: Staging,
    results: Staging,
    /// Inputs, slots and positions of a prefill pass, which of its rows are the last of a prefix, and sequences of its slots.
    prefix: Staging,
    graphs: BTreeMap<usize, Graph>,
    /// Of passes, by rows and how many prefixes end.
    passes: BTreeMap<(usize, usize), Graph>,
    slots: usize,
    #[expect(dead_code, reason = "buffers that are used by address")]
    owned: Vec<Buf>,
}

impl Llm {
    /// Clears a slot whose values became no numbers, so that its next utterance does not read them.
    pub(super) fn scrub(&self, slot: usize) -> Result<(), GpuError> {
        let (at, bytes) = self.slot_range(slot);
        self.device.fill_zero(at, bytes)
    }

    /// Bytes of one slot's cache.
    fn slot_bytes(&self) -> usize {
        self.network.args.slot_stride as usize * self.network.gemm.elt.size()
    }

    /// Where a slot's cache lies, and its bytes.
    pub(super) fn slot_range(&self, slot: usize) -> (u64, usize) {
        let bytes = self.slot_bytes();
        (self.network.args.cache + (slot * bytes) as u64, bytes)
    }

    /// A whole prefix for a slot, and the first token.
    pub(super) fn whole<'a>(&self, slot: usize, prefix: &'a [Embed], sampling: &'a Sampling) -> Feeding<'a> {
        let seq = self.sequence(prefix, sampling);
        Feeding { slot, from: 0, ids: prefix, seq, forced: sampling.forced.as_deref(), samples: true }
    }

    /// `ids` after what is in a slot's cache, and what is sampled after them: as a [`Stretch`] says, whose `input` counts
    /// for nothing here.
    pub(super) fn appended<'a>(
        &self,
        slot: usize,
        from: usize,
        ids: &'a [Embed],
        key: [u32; 2],
        s: &Stretch,
    ) -> Feeding<'a> {
        let control = self.network.config.speech_tokens;
        // How far the mask goes, and what it spares.
        let (mask_to, spared) = match s.controls {
            Controls::Only(id) => (self.network.config.speech_rows(), id as i32),
            Controls::AllButFirst => (control + 1, -1),
            Controls::All => (control, -1),
        };
        let sampled = s.items.len();
        let mut recent = [0; RECENT];
        for (at, id) in s.items.iter().enumerate().skip(sampled.saturating_sub(RECENT)) {
            recent[at % RECENT] = *id as i32;
        }
        let seq = Seq {
            pos: (from + ids.len()).saturating_sub(1) as i32,
            input: first_input(ids),
            decoded: sampled as i32,
            done: 0,
            key,
            // The mask holds for all that is sampled.
            min_len: i32::MAX,
            max_len: clamped(u32::try_from(sampled).unwrap_or(u32::MAX).saturating_add(s.most)),
            mask_to: mask_to as i32,
            spared,
            forced: 0,
            recent,
        };
        Feeding { slot, from, ids, seq, forced: None, samples: false }
    }

    /// Runs whole prefixes, of which the last position is left to decoding.
    pub(super) fn prefill(&mut self, rows: &[(usize, &[Embed], &Sampling)]) -> Result<(), GpuError> {
        let rows: Vec<Feeding<'_>> = rows
            .iter()
            .map(|(slot, ids, sampling)| Feeding { samples: false, ..self.whole(*slot, ids, sampling) })
            .collect();
        self.feed(&rows, || Ok(())).map(drop)
    }

    /// Feeds ids to slots, each after what its cache has: as many launches as a pass has kernels (seven a layer), whatever
    /// the number of slots, or one, and a copy a slot. Gives what was sampled of each, `None` where nothing was to be. What `meanwhile`
    /// starts comes behind the first pass, and is started while the device works on that.
    pub(super) fn feed(
        &mut self,
        rows: &[Feeding<'_>],
        meanwhile: impl FnOnce() -> Result<(), GpuError>,
    ) -> Result<Vec<Option<Sampled>>, GpuError> {
        for (n, Feeding { slot, seq, forced, .. }) in rows.iter().enumerate() {
            let words = size_of::<Seq>() / 4;
            // SAFETY: `Seq` is plain 32-bit words without padding.
            let bits = unsafe { std::slice::from_raw_parts(std::ptr::from_ref(seq).cast::<u32>(), words) };
            self.prefix.as_mut::<u32>()[SEQS + n * words..][..words].copy_from_slice(bits);
            if let Some(forced) = forced {
                let to = self.network.args.forced + (*slot * self.network.args.positions as usize * 4) as u64;
                let count = forced.len().min(self.network.args.positions as usize);
                self.device.write(to, &forced[..count])?;
            }
        }
        let mut sampled = vec![None; rows.len()];
        let (mut at, mut ends, mut meanwhile) = (0, Vec::new(), Some(meanwhile));
        for (n, Feeding { slot, from, ids, samples, .. }) in rows.iter().enumerate() {
            let count = ids.len().saturating_sub(usize::from(!samples));
            for (pos, e) in ids[..count].iter().enumerate() {
                let words = self.prefix.as_mut::<u32>();
                words[at] = input(e);
                words[PASS + at] = *slot as u32;
                words[2 * PASS + at] = (from + pos) as u32;
                if *samples && pos + 1 == count {
                    words[3 * PASS + ends.len()] = at as u32;
                    ends.push(n);
                }
                at += 1;
                if at == PASS || ends.len() == ENDS {
                    self.pass(at, rows, &mut meanwhile, &ends, &mut sampled)?;
                    at = 0;
                    ends.clear();
                }
            }
        }
        if at > 0 || meanwhile.is_some() {
            self.pass(at, rows, &mut meanwhile, &ends, &mut sampled)?;
        }
        Ok(sampled)
    }

    fn sequence(&self, prefix: &[Embed], s: &Sampling) -> Seq {
        let mask_to = match s.min_length {
            MinLength::Intended => self.network.config.speech_rows(),
            MinLength::Reference => self.network.config.speech_tokens + 1,
        };
        Seq {
            pos: prefix.len().saturating_sub(1) as i32,
            input: first_input(prefix),
            key: s.key,
            min_len: clamped(s.min_len),
            max_len: clamped(s.max_len),
            mask_to: mask_to as i32,
            spared: -1,
            forced: s.forced.as_ref().map_or(0, |f| f.len() as i32),
            ..Seq::default()
        }
    }

    /// Puts a slot at the end of `sequence`, of which all but the last position is in its cache.
    pub(super) fn rewind(&mut self, slot: usize, sequence: &[Embed], sampling: &Sampling) -> Result<(), GpuError> {
        let seq = self.sequence(sequence, sampling);
        self.device.write(self.network.args.seq + (slot * size_of::<Seq>()) as u64, &[seq])
    }

    /// One pass over `count` positions, which waits for it: of `rows`, those at `ends` end with it, and what is sampled of them goes to
    /// `sampled`. The first, which has `meanwhile`, puts the sequences of all into place.
    fn pass(
        &mut self,
        count: usize,
        rows: &[Feeding<'_>],
        meanwhile: &mut Option<impl FnOnce() -> Result<(), GpuError>>,
        ends: &[usize],
        sampled: &mut [Option<Sampled>],
    ) -> Result<(), GpuError> {
        let recorded = Some((count.next_multiple_of(APART), ends.len()))
            .filter(|key| count > SKINNY && self.passes.contains_key(key) && !self.device.traced());
        if let Some((rows, _)) = recorded {
            self.idle(count..rows);
        }
        self.prefix.send(self.prefix.dev.bytes)?;
        if meanwhile.is_some() {
            for (n, Feeding { slot, .. }) in rows.iter().enumerate() {
                let (from, size) = (self.prefix.dev.ptr + (SEQS * 4) as u64, size_of::<Seq>());
                self.device.copy(self.network.args.seq + (slot * size) as u64, from + (n * size) as u64, size)?;
            }
        }
        if !ends.is_empty() {
            self.take(ends.iter().map(|&n| rows[n].slot))?;
        }
        match recorded.and_then(|key| self.passes.get(&key)) {
            Some(graph) => graph.launch()?,
            None if count > 0 => self.start_pass(count, ends.len())?,
            None => {}
        }
        if !ends.is_empty() {
            self.results.fetch(ends.len() * ROUNDS * 4)?;
        }
        meanwhile.take().map_or(Ok(()), |work| work())?;
        // The staging memory is written again.
        self.device.sync()?;
        for (row, &n) in ends.iter().enumerate() {
            sampled[n] = Some(self.sampled(row, 1));
        }
        Ok(())
    }

    /// Copies rows that are of no slot, as a pass copies its own. Where the processor did other things meanwhile, what the driver
    /// does for a pass before its launch takes 0.13 ms, and 0.07 behind this.
    pub(super) fn rehearse(&mut self) -> Result<(), GpuError> {
        self.blank();
        self.rows.send(self.rows.dev.bytes)?;
        self.prefix.send(self.prefix.dev.bytes)?;
        self.device.sync()
    }

    /// Marks rows of a pass as idle: they are of no slot.
    fn idle(&mut self, rows: std::ops::Range<usize>) {
        let words = self.prefix.as_mut::<u32>();
        words[rows.clone()].fill(0);
        words[PASS + rows.start..PASS + rows.end].fill(u32::MAX);
        words[2 * PASS + rows.start..2 * PASS + rows.end].fill(0);
    }

    /// Starts a pass over `count` rows, and samples after those that are ends.
    fn start_pass(&self, count: usize, ends: usize) -> Result<(), GpuError> {
        self.network.pass(count, ends)?;
        if ends > 0 { self.sample(ends) } else { Ok(()) }
    }

    /// One round of `width` rows.
    fn round(&self, width: usize) -> Result<(), GpuError> {
        self.network.round(width)?;
        self.sample(width)
    }

    /// Samples the next id of each of `rows` rows from its scores.
    fn sample(&self, rows: usize) -> Result<(), GpuError> {
        let scores = self.network.config.speech_rows();
        let counts = self.rows.dev.ptr + 4 * WIDTHS[WIDTHS.len() - 1] as u64;
        let shared = sample_shared(scores);
        start!(self.device, self.network.kernels.sample, (rows as u32, 1, 1), 1024, shared;
            self.network.args, self.sampler, self.network.scratch.logits.ptr, scores as i32, self.network.head.n as i32, self.results.dev.ptr, counts, ROUNDS as i32)
    }

    /// Times the tile configurations of warpgroup GEMMs and records the rounds of every width, and passes. Each graph is launched
    /// once, over idle rows: the first launch takes 0.15 ms more.
    pub(super) fn warm_up(&mut self, most: usize) -> Result<(), GpuError> {
        self.network.tune_all()?;
        for width in WIDTHS.into_iter().filter(|&w| w < most * 2) {
            self.blank();
            self.rows.send(self.rows.dev.bytes)?;
            self.round(width)?;
            self.device.sync()?;
            let graph = self.device.capture(|| self.round(width))?;
            graph.launch()?;
            self.graphs.insert(width, graph);
        }
        self.idle(0..RECORDED);
        self.prefix.send(self.prefix.dev.bytes)?;
        for rows in (APART..=RECORDED).step_by(APART) {
            self.start_pass(rows, 1)?;
            for ends in [0, 1] {
                let graph = self.device.capture(|| self.start_pass(rows, ends))?;
                graph.launch()?;
                self.passes.insert((rows, ends), graph);
            }
        }
        self.device.sync()
    }

    /// Says which slots the rows of a round are, of which there were no results yet.
    fn take(&mut self, slots: impl Iterator<Item = usize>) -> Result<(), GpuError> {
        self.blank();
        for (row, slot) in slots.enumerate() {
            debug_assert!(slot < self.slots);
            self.rows.as_mut::<i32>()[row] = slot as i32;
        }
        self.rows.send(self.rows.dev.bytes)
    }

    fn blank(&mut self) {
        let words = self.rows.as_mut::<i32>();
        let most = WIDTHS[WIDTHS.len() - 1];
        words[..most].fill(-1);
        words[most..].fill(0);
    }

    /// `rounds` rounds for `slots`, one result each. `meanwhile` is called once they are started, before they are waited for.
    pub(super) fn decode(
        &mut self,
        slots: &[usize],
        rounds: usize,
        meanwhile: impl FnOnce(),
    ) -> Result<Vec<Sampled>, GpuError> {
        let rounds = rounds.min(ROUNDS);
        let Some(width) = WIDTHS.into_iter().find(|&w| w >= slots.len()) else {
            return Err(GpuError::Model(format!("{} rows are more than a decode step takes", slots.len())));
        };
        self.take(slots.iter().copied())?;
        for _ in 0..rounds {
            match self.graphs.get(&width).filter(|_| !self.device.traced()) {
                Some(graph) => graph.launch()?,
                None => self.round(width)?,
            }
        }
        self.results.fetch(slots.len() * ROUNDS * 4)?;
        meanwhile();
        self.device.sync()?;
        Ok((0..slots.len()).map(|row| self.sampled(row, rounds)).collect())
    }

    /// What `rounds` rounds gave for row `row`, which the host has.
    fn sampled(&mut self, row: usize, rounds: usize) -> Sampled {
        let speech_tokens = self.network.config.speech_tokens as u32;
        let mut sampled = Sampled::default();
        for &t in &self.results.as_mut::<i32>()[row * ROUNDS..][..rounds] {
            match t {
                NONE => {}
                BAD => sampled.bad = true,
                id if id <= END => sampled.end = Some(speech_tokens + (END - id) as u32),
                id => sampled.tokens.push(id as u32),
            }
        }
        sampled
    }

    /// The scores of the last round: row `row`.
    pub(super) fn scores(&self, row: usize) -> Result<Vec<f32>, GpuError> {
        let mut out = vec![0f32; self.network.config.speech_rows()];
        self.device.read(self.network.scratch.logits.ptr + (row * self.network.head.n * 4) as u64, &mut out)?;
        Ok(out)
    }
}

/// An id as the kernels take it.
fn input(id: &Embed) -> u32 {
    match *id {
        Embed::Text(id) => id,
        Embed::Speech(id) => id | SPEECH_BIT,
    }
}

/// The first input of decoding after `ids`.
fn first_input(ids: &[Embed]) -> u32 {
    ids.last().map_or(SPEECH_BIT, input)
}

fn clamped(n: u32) -> i32 {
    i32::try_from(n).unwrap_or(i32::MAX)
}

/// The macros of llm.cu.
pub(super) fn defines(config: &LlmConfig) -> Vec<(&'static str, i64)> {
    let group = config.heads / config.kv_heads;
    vec![("HD", config.head_dim as i64), ("GROUP", group as i64), ("KVH", config.kv_heads as i64)]
}
