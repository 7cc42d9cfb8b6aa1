//! What a kit's makers chose and wrote down nowhere: recovered from the kit's own tensors.
//!
//! Each function searches what is consistent with shapes and contents and takes the first that is, the choice of
//! the known kit first. Nothing found: the known kit's choice, which then fails by its numbers.

use super::kit::Kit;
use super::llm::{recent, settle};
use crate::synth::SynthError;
use crate::synth::cosyvoice::backend::{FlowPrompt, MinLength};
use crate::synth::cosyvoice::bistream::{Action, Bistream, Order, Prompt};
use crate::synth::cosyvoice::config::{EOS, F0_AHEAD, HOP, LlmConfig};
use crate::synth::cosyvoice::probe::{Probe, Values};
use crate::synth::cosyvoice::schedule::{Chunk, FirstHop, HopPlan, Hops};

/// Ids that the known kit's sampler looks back to.
pub(super) const KIT_WINDOW: usize = 10;
/// Whole solves that the search for the mismatched prompt may take.
const SOLVES: usize = 300;

/// Largest absolute difference; infinite where lengths differ.
pub(super) fn apart(a: &[f32], b: &[f32]) -> f32 {
    if a.len() != b.len() {
        return f32::INFINITY;
    }
    a.iter().zip(b).fold(0.0, |max, (a, b)| if (a - b).is_nan() { f32::INFINITY } else { max.max((a - b).abs()) })
}

/// How many recent ids the kit's sampler may exclude: the known kit's number, the configured one, then all others.
pub(super) fn windows(configured: usize) -> Vec<usize> {
    const MOST: usize = 64;
    let known = [KIT_WINDOW, configured];
    let first = if configured == KIT_WINDOW { &known[..1] } else { &known };
    first.iter().copied().chain((0..MOST).filter(|w| !known.contains(w))).collect()
}

/// Whether with that window every token is the best that is allowed.
pub(super) fn explains(window: usize, rows: &[Vec<f32>], limit: usize, tokens: &[u32]) -> bool {
    tokens
        .iter()
        .zip(rows)
        .enumerate()
        .all(|(at, (&want, scores))| settle(scores, limit, recent(&tokens[..at], window), Some(want)) == want)
}

/// Rows of (new positions, positions in all) of the passes that fed so many.
pub(super) fn table(fed: &[usize]) -> Values {
    let mut total = 0;
    let rows = fed.iter().flat_map(|&new| {
        total += new;
        [new as f32, total as f32]
    });
    let data: Vec<f32> = rows.collect();
    Values { shape: vec![data.len() / 2, 2], data }
}

/// How many text ids the kit fed at a time: with the right number the machine, given the expected tokens, feeds the
/// model in the expected steps.
pub(super) fn pieces(
    llm: &LlmConfig,
    prompt: &Prompt<'_>,
    text: &[u32],
    tokens: &[u32],
    steps: Option<&Values>,
) -> usize {
    const KNOWN: [usize; 2] = [3, 4];
    // With prompt speech the known kit fed three, without it four.
    let known = KNOWN[usize::from(prompt.speech.is_empty())];
    let Some(steps) = steps else { return known };
    let passes = steps.data.len() / 2;
    let fits = |count: &usize| {
        replay(llm, prompt, text, tokens, *count, passes).is_some_and(|fed| table(&fed).data == steps.data)
    };
    [known].into_iter().chain(1..=text.len()).find(fits).unwrap_or(known)
}

/// The passes of a stream whose samples are `tokens`; `None` if they are more than `most`.
fn replay(
    llm: &LlmConfig,
    prompt: &Prompt<'_>,
    text: &[u32],
    tokens: &[u32],
    pieces: usize,
    most: usize,
) -> Option<Vec<usize>> {
    let mut stream = Bistream::new(llm, Order::Reference, prompt);
    let mut left = text.chunks(pieces);
    let (mut fed, mut spoken, mut finishing) = (Vec::new(), 0, false);
    loop {
        match stream.poll() {
            Action::Done => return Some(fed),
            Action::Wait => match left.next() {
                Some(ids) => stream.arrive(ids),
                None => {
                    finishing = true;
                    stream.finish();
                }
            },
            Action::Feed(ids) => {
                fed.push(ids.len());
                if fed.len() > most {
                    return None;
                }
                let next = tokens.get(spoken).copied();
                let choice = if finishing { next.unwrap_or(llm.control(EOS)) } else { next.unwrap_or_default() };
                let token = stream.decide(&mut [], MinLength::Reference, |_, _| Some(choice)).ok()?;
                spoken += usize::from(token.is_some());
            }
        }
    }
}

/// Frames that the original's vocoder withholds: what its two networks look ahead, one behind the other, and one.
pub(super) fn reference_hold(kit: &Kit) -> u32 {
    (F0_AHEAD + kit.config.hift.look_right + 1) as u32
}

/// The chunks that the original cuts with hops of `hop` up to `max`, and where they end.
pub(super) fn chunks(kit: &Kit, plan: HopPlan, prompt: usize, tokens: usize) -> Vec<Chunk> {
    let mut hops = Hops::as_written(plan, &kit.config, prompt as u32);
    std::iter::from_fn(|| hops.next_chunk(tokens as u32, true)).collect()
}

fn hops_of(hop: u32, max: u32) -> HopPlan {
    HopPlan { first: FirstHop::Full, hop, max, growth: HOP.2 }
}

/// The kit's hops: the original's constant, else the static block, else whatever gives the first of `fits`.
pub(super) fn hop_plan(kit: &Kit, fits: impl Fn(HopPlan) -> bool) -> HopPlan {
    let block = kit.config.block_tokens() as u32;
    let known = hops_of(HOP.0, HOP.1);
    let longest = 4 * block.max(HOP.0);
    let all = (1..=longest).flat_map(|hop| [4, 1, 2, 8].map(|times| hops_of(hop, times * hop)));
    [known, hops_of(block, 4 * block), hops_of(block, HOP.1)].into_iter().chain(all).find(|p| fits(*p)).unwrap_or(known)
}

/// What hops have grown to after a request of so many chunks: the original keeps them for the next.
pub(super) fn grown(plan: HopPlan, chunks: &[Chunk]) -> HopPlan {
    let times = chunks.iter().filter(|c| !c.last).count() as u32;
    let hop = plan.hop.saturating_mul(plan.growth.saturating_pow(times)).min(plan.max);
    HopPlan { hop, ..plan }
}

/// `chunk_schedule` of the chunks.
pub(super) fn schedule_table(kit: &Kit, chunks: &[Chunk]) -> Values {
    let data: Vec<f32> = chunks
        .iter()
        .flat_map(|c| {
            let offset = c.from.saturating_sub(kit.config.flow.lookahead as u32);
            [offset, c.to, c.frames, u32::from(c.last)].map(|v| v as f32)
        })
        .collect();
    Values { shape: vec![chunks.len(), 4], data }
}

/// Samples the original gives out for each chunk.
pub(super) fn released(kit: &Kit, chunks: &[Chunk]) -> Values {
    let frame = kit.config.hift.frame_samples() as u32;
    let hold = reference_hold(kit);
    let (mut frames, mut out) = (0, 0);
    super::whole(chunks.iter().map(|chunk| {
        frames += chunk.frames;
        let all = if chunk.last { frames } else { frames.saturating_sub(hold) } * frame;
        let new = all.saturating_sub(out);
        out = all;
        new
    }))
}

/// Whether every chunk but the last ends with a static block, as pushes of a slot must.
pub(super) fn is_aligned(kit: &Kit, prompt: usize, chunks: &[Chunk]) -> bool {
    let (block, ahead) = (kit.config.block_tokens(), kit.config.flow.lookahead);
    chunks.iter().all(|c| c.last || (prompt + c.to as usize).saturating_sub(ahead).is_multiple_of(block.max(1)))
}

/// A prompt whose mel is not as long as its tokens say, and the tokens behind it.
pub(super) struct OddPrompt {
    pub(super) prompt: FlowPrompt,
    pub(super) tokens: usize,
    /// The mel that comes of it, `[mel, frames]`.
    pub(super) mel: Values,
}

/// The beginning of the kit's prompt and tokens that gives `expected` `[.., mel, frames]`.
///
/// Frames are `ratio * (prompt tokens + tokens) - prompt frames`, so that for each surplus of prompt frames over
/// prompt tokens the number of tokens follows, and only that of prompt tokens is free. Surpluses are tried from one
/// frame on, the known kit's eleven prompt tokens before all others.
///
/// # Errors
/// The device failed.
pub(super) fn odd_prompt<B: Probe + ?Sized>(
    kit: &Kit,
    backend: &mut B,
    prompt: &FlowPrompt,
    tokens: &[u32],
    expected: &Values,
    tolerance: f32,
) -> Result<Option<OddPrompt>, SynthError> {
    const KNOWN: usize = 11;
    let (ratio, width) = (kit.config.token_mel_ratio as i64, kit.config.flow.mel);
    let frames = expected.shape.last().copied().unwrap_or_default() as i64;
    let mut closest: Option<(f32, OddPrompt)> = None;
    let mut solves = 0;
    for surplus in (1..=2 * ratio).flat_map(|s| [s, -s]) {
        if (frames + surplus) % ratio != 0 {
            continue;
        }
        let Ok(count) = usize::try_from((frames + surplus) / ratio) else { continue };
        let Some(spoken) = tokens.get(..count).filter(|t| !t.is_empty()) else { continue };
        for known in [KNOWN].into_iter().chain((1..=prompt.tokens.len()).filter(|&n| n != KNOWN)) {
            let mel = usize::try_from(known as i64 * ratio + surplus).ok().and_then(|n| prompt.mel.get(..n * width));
            let (Some(head), Some(mel)) = (prompt.tokens.get(..known), mel.filter(|m| !m.is_empty())) else { continue };
            let odd = FlowPrompt { tokens: head.to_vec(), mel: mel.to_vec(), speaker: prompt.speaker.clone() };
            let made = backend.mel(&odd, spoken, false)?.transposed();
            let off = apart(&made.data, &expected.data);
            if closest.as_ref().is_none_or(|(least, _)| off < *least) {
                closest = Some((off, OddPrompt { prompt: odd, tokens: count, mel: made }));
            }
            solves += 1;
            if off <= tolerance || solves >= SOLVES {
                return Ok(closest.map(|(_, odd)| odd));
            }
        }
    }
    Ok(closest.map(|(_, odd)| odd))
}
