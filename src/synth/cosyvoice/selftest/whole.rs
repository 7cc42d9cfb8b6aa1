//! A kit from text ids to samples.

use std::sync::Arc;

use super::Tolerance::{Abs, AbsOrRms, Exact};
use super::derive;
use super::kit::{Kit, KitError};
use super::llm::{prefix, recent, settle};
use super::{Report, Testable, check, whole};
use crate::synth::cosyvoice::backend::{FinalChunk, FlowPrompt, MinLength, Sampling, SlotRequest};
use crate::synth::cosyvoice::probe::Values;
use crate::synth::cosyvoice::schedule::Chunk;
use crate::synth::cosyvoice::text::Thinner;
use crate::synth::{Slot, SynthError};

/// What waveforms may be off: they magnify differences of F0.
const WAVE: super::Tolerance = AbsOrRms(5e-3, 1e-3);

/// From text ids to samples. `windows` are those that the kit's sampler may have had.
pub(super) fn end_to_end<B: Testable>(
    kit: &Kit,
    backend: &mut B,
    report: &mut Report,
    windows: &[usize],
) -> Result<(), KitError> {
    match (kit.find("e2e", "silent_in"), kit.find("e2e", "silent_out")) {
        (Some(raw), Some(expected)) => {
            let mut thinner = Thinner::default();
            let kept = raw.data.iter().map(|&v| v as u32).filter(|&t| thinner.keeps(t));
            report.compare("e2e", "silent_out", &expected, &whole(kept), Exact);
        }
        _ => report.absent("e2e", "silent_out"),
    }
    let prompt = kit.prompt()?;
    let expected = kit.ids("e2e", "llm_tokens")?;
    let mut thinned = Vec::new();
    for &window in windows {
        thinned = spoken(kit, backend, &expected, window)?;
        if thinned == expected {
            break;
        }
    }
    check(report, kit, ("e2e", "llm_tokens"), Some(&whole(thinned)), Exact);
    let sizes = kit.find("e2e", "stream_chunk_samples");
    let chunks_of = |plan, tokens| derive::chunks(kit, plan, prompt.tokens.len(), tokens);
    let plan = derive::hop_plan(kit, |plan| {
        sizes.as_ref().is_none_or(|e| e.data == derive::released(kit, &chunks_of(plan, expected.len())).data)
    });
    let chunks = chunks_of(plan, expected.len());
    let streamed = stream(kit, backend, &prompt, &expected, &chunks)?;
    let mel = streamed.as_ref().map(|s| s.mel.transposed());
    check(report, kit, ("e2e", "mel_stream"), mel.as_ref(), Abs(5e-4));
    let f0 = streamed.as_ref().map(|s| backend.hift(&s.mel, true)).transpose()?.and_then(|probe| probe.f0);
    check(report, kit, ("e2e", "f0_stream"), f0.as_ref(), Abs(1e-3));
    check(report, kit, ("e2e", "stream_chunk_samples"), Some(&derive::released(kit, &chunks)), Exact);
    check(report, kit, ("e2e", "wav_stream"), streamed.as_ref().map(|s| &s.wave), WAVE);
    let full = backend.mel(&prompt, &expected, false)?;
    check(report, kit, ("e2e", "wav_nonstream"), Some(&backend.hift(&full, true)?.wave), WAVE);
    converted(kit, backend, report, &prompt)?;
    // As shipped the hop of the first request stays grown for the second; as data it is only another plan.
    let next = derive::released(kit, &chunks_of(derive::grown(plan, &chunks), expected.len()));
    check(report, kit, ("e2e", "second_request_chunk_samples"), Some(&next), Exact);
    Ok(())
}

/// What the kit's sampler samples, thinned, until it is as much as `expected`.
fn spoken<B: Testable>(kit: &Kit, backend: &mut B, expected: &[u32], window: usize) -> Result<Vec<u32>, KitError> {
    let limit = kit.config.llm.speech_tokens;
    let mut thinner = Thinner::default();
    let mut thinned = Vec::new();
    backend.llm_decode(&prefix(kit, true)?, &mut |scores, ids| {
        if thinned.len() >= expected.len() {
            return None;
        }
        let id = settle(scores, limit, recent(ids, window), expected.get(thinned.len()).copied());
        if thinner.keeps(id) {
            thinned.push(id);
        }
        Some(id)
    })?;
    Ok(thinned)
}

/// Voice conversion: as many of the flow's tokens as the stored samples are long.
fn converted<B: Testable>(
    kit: &Kit,
    backend: &mut B,
    report: &mut Report,
    prompt: &FlowPrompt,
) -> Result<(), KitError> {
    let Some(expected) = kit.find("e2e", "vc_wav_stream") else {
        report.absent("e2e", "vc_wav_stream");
        return Ok(());
    };
    let per_token = (kit.config.token_mel_ratio * kit.config.hift.frame_samples()).max(1);
    let token = kit.ids("flow", "token")?;
    let source = token.get(..expected.data.len() / per_token).unwrap_or(&token);
    let sizes = kit.find("e2e", "vc_chunk_samples");
    let chunks_of = |plan| derive::chunks(kit, plan, prompt.tokens.len(), source.len());
    let plan = derive::hop_plan(kit, |plan| {
        sizes.as_ref().is_none_or(|e| e.data == derive::released(kit, &chunks_of(plan)).data)
    });
    let chunks = chunks_of(plan);
    check(report, kit, ("e2e", "vc_chunk_samples"), Some(&derive::released(kit, &chunks)), Exact);
    let streamed = stream(kit, backend, prompt, source, &chunks)?;
    check(report, kit, ("e2e", "vc_wav_stream"), streamed.as_ref().map(|s| &s.wave), WAVE);
    Ok(())
}

/// Mel `[frames, mel]` and samples of a stream.
struct Streamed {
    mel: Values,
    wave: Values,
}

/// The chunks one after the other: through the slot machine where they end with blocks, else through the networks
/// alone; `None` where the backend cannot.
fn stream<B: Testable>(
    kit: &Kit,
    backend: &mut B,
    prompt: &FlowPrompt,
    tokens: &[u32],
    chunks: &[Chunk],
) -> Result<Option<Streamed>, KitError> {
    let aligned = derive::is_aligned(kit, prompt.tokens.len(), chunks);
    if !aligned && !backend.cuts_blocks() {
        return Ok(None);
    }
    let cuts: Vec<usize> = chunks.iter().map(|c| c.to as usize).collect();
    let mel = backend.mel_chunks(prompt, tokens, &cuts, FinalChunk::Reference)?;
    let wave = if aligned {
        speak(backend, prompt, tokens, chunks)?
    } else {
        let ends = chunks.iter().scan(0, |frames, c| {
            *frames += c.frames as usize;
            Some(*frames)
        });
        backend.hift_chunks(&mel, &ends.collect::<Vec<_>>())?
    };
    Ok(Some(Streamed { mel, wave }))
}

/// Forced tokens through the slot machine: what a call would hear.
fn speak<B: Testable>(
    backend: &mut B,
    prompt: &FlowPrompt,
    tokens: &[u32],
    chunks: &[Chunk],
) -> Result<Values, KitError> {
    let slot = Slot(0);
    let voice = backend.add_voice(Arc::new(prompt.clone()))?;
    backend.prepare_voice(voice)?;
    let sampling = Sampling { key: [0; 2], min_len: 0, max_len: 0, min_length: MinLength::default(), forced: None };
    backend.open(slot, SlotRequest { voice, prefix: Vec::new(), sampling, speed: 1.0 })?;
    let mut wave = Vec::new();
    for chunk in chunks {
        let new = tokens.get(chunk.from as usize..chunk.to as usize).unwrap_or_default();
        backend.flow_push(slot, new, chunk.last)?;
        let mut flowed = Vec::new();
        loop {
            flowed.clear();
            backend.flow(&[slot], 3, &mut flowed)?;
            let result = flowed.pop().ok_or_else(|| no_result("flow"))?;
            if let Some(error) = result.failed {
                return Err(error.into());
            }
            if result.pending == 0 {
                break;
            }
        }
        let mut vocoded = Vec::new();
        loop {
            backend.vocode(&[slot], &mut vocoded)?;
            let result = vocoded.pop().ok_or_else(|| no_result("vocode"))?;
            if let Some(error) = result.failed {
                return Err(error.into());
            }
            wave.extend(result.pcm);
            if !result.more {
                break;
            }
        }
    }
    backend.close(slot);
    backend.release_voice(voice);
    Ok(Values::vector(wave))
}

fn no_result(stage: &str) -> KitError {
    KitError::Device(SynthError::Device(format!("{stage} gave no result")))
}
