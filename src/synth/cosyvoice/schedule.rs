//! The hop plan: after how many tokens which chunk is pushed into the flow. Data, no state of the model.
//!
//! # Why
//! In the original the hop is a field of the shared model that only grows, so one caller's long sentence delays
//! the next caller's first audio. Here every utterance has its own [`Hops`], which is a value.

use super::config::{Config, HOP};

/// When chunks are cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct HopPlan {
    /// What the first hop is.
    pub first: FirstHop,
    /// Tokens of the second hop at least; a multiple of the block.
    pub hop: u32,
    /// Tokens of a hop at most; a multiple of the block.
    pub max: u32,
    /// Factor from one hop to the next.
    pub growth: u32,
}

/// How many tokens the first hop takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum FirstHop {
    /// As the original: a full hop and the padding that completes the prompt's last block.
    Full,
    /// Only the padding, when it yields enough audio to start with (at least this many tokens), else a full hop
    /// on top. The mel is the same; a voice whose prompt has `P mod block = block - k` tokens starts after `k`.
    Aligned {
        /// Fewest tokens worth starting with: the vocoder withholds some frames.
        least: u32,
    },
}

impl HopPlan {
    /// The plan of the original.
    pub fn reference() -> Self {
        Self { first: FirstHop::Full, hop: HOP.0, max: HOP.1, growth: HOP.2 }
    }

    /// Starts as early as block alignment allows.
    pub fn early() -> Self {
        Self { first: FirstHop::Aligned { least: 8 }, ..Self::reference() }
    }
}

/// Where one utterance stands in its plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hops {
    plan: HopPlan,
    lookahead: u32,
    block: u32,
    ratio: u32,
    /// Tokens that complete the prompt's last block.
    pad: u32,
    next: u32,
    grown: u32,
    pushed: u32,
    finished: bool,
}

/// A chunk to push.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Chunk {
    /// Tokens pushed before it.
    pub from: u32,
    /// Tokens pushed with it.
    pub to: u32,
    /// Mel frames it completes.
    pub frames: u32,
    /// Nothing follows.
    pub last: bool,
}

impl Hops {
    /// The start of an utterance behind a prompt of `prompt` tokens.
    pub fn new(plan: HopPlan, config: &Config, prompt: u32) -> Self {
        Self::on_grid(plan, config, prompt, (config.block_tokens() as u32).max(1))
    }

    /// As the original, which takes its hop as it is: where it is no multiple of the static block, chunks end inside
    /// a block.
    pub fn as_written(plan: HopPlan, config: &Config, prompt: u32) -> Self {
        Self::on_grid(plan, config, prompt, 1)
    }

    fn on_grid(plan: HopPlan, config: &Config, prompt: u32, block: u32) -> Self {
        let whole = |tokens: u32| tokens.div_ceil(block).max(1) * block;
        let hop = whole(plan.hop);
        // The original pads to its current hop, which is the block unless somebody grew it.
        let grid = if plan.first == FirstHop::Full { hop } else { block };
        let pad = (grid - prompt % grid) % grid;
        let next = match plan.first {
            FirstHop::Full => hop + pad,
            FirstHop::Aligned { least } => {
                let short = least.saturating_sub(pad);
                pad + short.div_ceil(block) * block
            }
        };
        let grown = match plan.first {
            FirstHop::Full => (hop * plan.growth.max(1)).min(whole(plan.max)),
            // The growing hops start behind the early one.
            FirstHop::Aligned { .. } => hop,
        };
        let plan = HopPlan { hop, max: whole(plan.max), ..plan };
        Self {
            plan,
            lookahead: config.flow.lookahead as u32,
            block,
            ratio: config.token_mel_ratio as u32,
            pad,
            next,
            grown,
            pushed: 0,
            finished: false,
        }
    }

    /// The chunk that `tokens` decoded tokens allow, if any. `ended`: no more will come. Call until `None`; each
    /// call that returns a chunk counts it as pushed.
    pub fn next_chunk(&mut self, tokens: u32, ended: bool) -> Option<Chunk> {
        if self.finished {
            return None;
        }
        let from = self.pushed;
        let done = from.saturating_sub(self.lookahead);
        let to = done.saturating_add(self.next + self.lookahead);
        if tokens >= to {
            let frames = self.next * self.ratio;
            self.pushed = to;
            self.next = self.grown;
            self.grown = (self.grown * self.plan.growth.max(1)).min(self.plan.max);
            return Some(Chunk { from, to, frames, last: false });
        }
        if !ended {
            return None;
        }
        self.finished = true;
        self.pushed = tokens;
        Some(Chunk { from, to: tokens, frames: tokens.saturating_sub(done) * self.ratio, last: true })
    }

    /// The part of the first chunk that completes the prompt's last block, where a whole block follows it in that chunk and
    /// `tokens` decoded tokens allow it. To be asked before [`Self::next_chunk`]; a call that returns it counts it as pushed.
    pub fn padding(&mut self, tokens: u32) -> Option<Chunk> {
        let to = self.pad + self.lookahead;
        if self.pushed > 0 || self.finished || self.next <= self.pad || tokens < to {
            return None;
        }
        self.pushed = to;
        self.next -= self.pad;
        Some(Chunk { from: 0, to, frames: self.pad * self.ratio, last: false })
    }

    /// Tokens that must have been decoded before the next chunk can go.
    pub fn wanted(&self) -> u32 {
        self.pushed.saturating_sub(self.lookahead).saturating_add(self.next + self.lookahead)
    }

    /// Tokens pushed so far.
    pub fn pushed(&self) -> u32 {
        self.pushed
    }

    /// Tokens of a static block.
    pub fn block(&self) -> u32 {
        self.block
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::synth::cosyvoice::random;

    /// Blocks of 25 tokens, three ahead, behind a prompt that lacks `pad` of a block; starts as early as it can.
    fn hops(pad: u32) -> Hops {
        let dir = tempfile::tempdir().expect("temp dir");
        random::write_texts(dir.path(), random::Size::Full).expect("written");
        let config = Config::load(dir.path()).expect("sizes");
        Hops::new(HopPlan::early(), &config, 100 - pad)
    }

    #[test]
    fn a_first_chunk_of_two_blocks_goes_in_two_parts_or_in_one() {
        for pad in [0, 5] {
            let (mut whole, mut parts) = (hops(pad), hops(pad));
            let wanted = whole.wanted();
            assert_eq!(wanted, pad + 25 + 3);
            assert_eq!(parts.padding(pad + 2), None, "its look-ahead is not there");
            let first = Chunk { from: 0, to: pad + 3, frames: 2 * pad, last: false };
            assert_eq!(parts.padding(pad + 3), Some(first));
            assert_eq!(parts.padding(pad + 3), None, "it goes once");
            assert_eq!((parts.wanted(), parts.next_chunk(wanted - 1, false)), (wanted, None));
            let (whole, rest) = (whole.next_chunk(wanted, false), parts.next_chunk(wanted, false));
            assert_eq!(whole, Some(Chunk { from: 0, to: wanted, frames: 2 * (pad + 25), last: false }));
            assert_eq!(rest, Some(Chunk { from: pad + 3, to: wanted, frames: 50, last: false }));
        }
    }

    #[test]
    fn a_first_chunk_of_one_block_goes_in_one_part() {
        assert_eq!(hops(10).padding(13), None);
        assert_eq!(hops(10).next_chunk(13, false), Some(Chunk { from: 0, to: 13, frames: 20, last: false }));
    }

    #[test]
    fn an_utterance_that_ends_behind_its_first_part_ends_there() {
        let mut hops = hops(0);
        assert!(hops.padding(3).is_some());
        assert_eq!(hops.next_chunk(3, true), Some(Chunk { from: 3, to: 3, frames: 6, last: true }));
        assert_eq!((hops.padding(40), hops.next_chunk(40, true)), (None, None));
    }
}
