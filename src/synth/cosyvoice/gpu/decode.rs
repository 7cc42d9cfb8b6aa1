//! Decode rounds of open slots, and what they mean to their utterances.

use super::flight::Acoustic;
use super::llm::Llm;
use super::not_open;
use crate::synth::cosyvoice::backend::{Decoded, Flowed};
use crate::synth::{Slot, SynthError};

/// [`super::Backend::decode`]; with `flowed` also one round of flow for `slots`, on the stream of lower priority, whose results
/// `flowed` gets. No launched call may be under way then.
pub(super) fn decode_rounds(
    llm: &mut Llm,
    acoustic: &mut Acoustic,
    slots: &[Slot],
    rounds: u32,
    out: &mut Vec<Decoded>,
    flowed: Option<&mut Vec<Flowed>>,
) -> Result<(), SynthError> {
    let first = out.len();
    let mut rows = Vec::with_capacity(slots.len());
    for (n, &slot) in slots.iter().enumerate() {
        let state = acoustic.slots.get(&slot);
        let failed = match state {
            Some(state) if !state.prefilled => Some(SynthError::Utterance("decoded before its prefill".into())),
            Some(_) => None,
            None => Some(not_open()),
        };
        let ended = state.and_then(|s| s.ended);
        if failed.is_none() && ended.is_none() {
            rows.push((n, slot));
        }
        out.push(Decoded { slot, tokens: Vec::new(), ended, failed });
    }
    if rows.is_empty() {
        return Ok(());
    }
    let numbers: Vec<usize> = rows.iter().map(|(_, s)| s.0 as usize).collect();
    let mut launched = Ok(());
    let sampled = llm.decode(&numbers, rounds as usize, || {
        if flowed.is_some() {
            launched = acoustic.start_flight(slots, 1);
        }
    })?;
    launched?;
    if let Some(flowed) = flowed {
        acoustic.land_flow(flowed)?;
    }
    for ((n, slot), sampled) in rows.into_iter().zip(sampled) {
        let Some(state) = acoustic.slots.get_mut(&slot) else { continue };
        let result = &mut out[first + n];
        (result.ended, result.failed) = state.sampled(&sampled);
        result.tokens = sampled.tokens;
    }
    Ok(())
}
