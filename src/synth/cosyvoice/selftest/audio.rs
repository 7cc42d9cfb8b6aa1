//! Flow and vocoder of a kit, each on stored inputs.

use super::Tolerance::{Abs, Exact, Rel};
use super::derive;
use super::kit::{Kit, KitError};
use super::{Report, Testable, check, rms};
use crate::synth::cosyvoice::backend::{FinalChunk, FlowPrompt};
use crate::synth::cosyvoice::checkpoint::Part;
use crate::synth::cosyvoice::probe::{DitInput, Values};

/// What names of mels at other speeds begin with.
const SPEED: &str = "mel_speed_";
/// What names of folded weights begin with.
const FUSED: &str = "fused.";

/// A stored mel `[1, mel, frames]` as `[frames, mel]`.
fn frames_first(mel: Values) -> Values {
    let shape = mel.shape.iter().copied().skip_while(|&d| d == 1).collect();
    Values { shape, data: mel.data }.transposed()
}

/// What a mel may differ by in single precision.
const MEL: f64 = 2e-4;

/// The flow, from its front to whole mels; `part`: of what is expected, what it may differ by in fewer bits.
pub(super) fn flow<B: Testable>(
    kit: &Kit,
    backend: &mut B,
    report: &mut Report,
    part: Option<f64>,
) -> Result<(), KitError> {
    let prompt = kit.prompt()?;
    let token = kit.ids("flow", "token")?;
    let all: Vec<u32> = prompt.tokens.iter().chain(&token).copied().collect();
    check(report, kit, ("flow", "t_span"), Some(&Values::vector(backend.times())), Abs(1e-6));
    check(report, kit, ("flow", "spk_proj"), backend.speaker(&prompt.speaker)?.as_ref(), Abs(1e-5));
    check(report, kit, ("flow", "pre_lookahead_final"), backend.look_ahead(&all, true)?.as_ref(), Abs(2e-5));
    let outputs = kit.find("flow", "pre_lookahead_ctx").and_then(|e| e.shape.get(1).copied());
    let context = all.get(..outputs.unwrap_or_default() + kit.config.flow.lookahead).unwrap_or(&all);
    check(report, kit, ("flow", "pre_lookahead_ctx"), backend.look_ahead(context, false)?.as_ref(), Abs(2e-5));
    dit(kit, backend, report)?;
    let mel = |v: Values| v.transposed();
    let full = backend.mel(&prompt, &token, false)?;
    check(report, kit, ("flow", "mel_nonstream"), Some(&mel(full.clone())), Abs(MEL));
    let masked = backend.mel(&prompt, &token, true)?;
    check(report, kit, ("flow", "mel_stream_mask_final"), Some(&mel(masked)), Abs(MEL));
    by_chunks(kit, backend, report, &prompt, &token)?;
    match kit.find("flow", "mel_odd_prompt") {
        Some(expected) => {
            // Of many differences the largest is some five times their root mean square.
            let tolerance = part.map_or(MEL, |part| 5.0 * part * rms(&expected.data)).max(MEL);
            let odd = derive::odd_prompt(kit, backend, &prompt, &token, &expected, tolerance as f32)?;
            check(report, kit, ("flow", "mel_odd_prompt"), odd.as_ref().map(|o| &o.mel), Abs(MEL));
            if let Some(odd) = odd {
                let frames = odd.prompt.mel.len() / kit.config.flow.mel.max(1);
                let (prompt, tokens) = (odd.prompt.tokens.len(), odd.tokens);
                report.explain(&format!("{prompt} prompt tokens, {frames} frames, {tokens} tokens"));
            }
        }
        None => report.absent("flow", "mel_odd_prompt"),
    }
    // The stored mel is the input, so that an error of the solver is not counted twice.
    let stored = kit.find("flow", "mel_nonstream").map(frames_first);
    let names = kit.names("flow", SPEED);
    if names.is_empty() {
        report.absent("flow", SPEED);
    }
    for name in names {
        let Some(speed) = name.strip_prefix(SPEED).and_then(|s| s.parse().ok()) else { continue };
        let made = stored.as_ref().map(|m| backend.respeed(m, speed)).transpose()?.map(mel);
        check(report, kit, ("flow", &name), made.as_ref(), Abs(1e-5));
    }
    Ok(())
}

/// The schedule of pushes and what comes of it.
fn by_chunks<B: Testable>(
    kit: &Kit,
    backend: &mut B,
    report: &mut Report,
    prompt: &FlowPrompt,
    token: &[u32],
) -> Result<(), KitError> {
    let expected = kit.find("flow", "chunk_schedule");
    let chunks_of = |plan| derive::chunks(kit, plan, prompt.tokens.len(), token.len());
    let plan = derive::hop_plan(kit, |plan| {
        expected.as_ref().is_none_or(|e| e.data == derive::schedule_table(kit, &chunks_of(plan)).data)
    });
    let chunks = chunks_of(plan);
    let cuts: Vec<usize> = chunks.iter().map(|c| c.to as usize).collect();
    check(report, kit, ("flow", "chunk_schedule"), Some(&derive::schedule_table(kit, &chunks)), Exact);
    report.explain(&format!("hops of {} to {} tokens, blocks of {}", plan.hop, plan.max, kit.config.block_tokens()));
    let aligned = derive::is_aligned(kit, prompt.tokens.len(), &chunks);
    let chunked = if aligned || backend.cuts_blocks() {
        Some(backend.mel_chunks(prompt, token, &cuts, FinalChunk::Reference)?.transposed())
    } else {
        None
    };
    check(report, kit, ("flow", "mel_stream_chunks"), chunked.as_ref(), Abs(MEL));
    if let Some(expected) = kit.find("flow", "mel_stream_mask_final").filter(|_| aligned) {
        let causal = backend.mel_chunks(prompt, token, &cuts, FinalChunk::Causal)?.transposed();
        report.compare("flow", "mel_stream_mask_final by chunks", &expected, &causal, Abs(MEL));
    }
    Ok(())
}

fn dit<B: Testable>(kit: &Kit, backend: &mut B, report: &mut Report) -> Result<(), KitError> {
    let frames = kit.find("flow", "rope_angles").and_then(|e| e.shape.first().copied()).unwrap_or_default();
    check(report, kit, ("flow", "rope_angles"), backend.angles(frames).as_ref(), Rel(1e-6));
    let Some(x) = kit.find("flow", "dit_x") else {
        report.absent("flow", "dit_x");
        return Ok(());
    };
    let times = kit.input("flow", "dit_t")?.data;
    let mut input = DitInput {
        x: x.transposed(),
        mu: kit.input("flow", "dit_mu")?.transposed(),
        cond: kit.input("flow", "dit_cond")?.transposed(),
        speaker: kit.input("flow", "dit_spks")?,
        times: [times.first().copied().unwrap_or_default(), times.last().copied().unwrap_or_default()],
        streaming: true,
    };
    let streaming = backend.dit(&input)?;
    let transposed = |v: &Option<Values>| v.as_ref().map(Values::transposed);
    check(report, kit, ("flow", "dit_time_embed"), streaming.time_embed.as_ref(), Abs(2e-5));
    check(report, kit, ("flow", "dit_input_embed"), streaming.input_embed.as_ref(), Abs(2e-5));
    check(report, kit, ("flow", "dit_attn0_streaming"), streaming.attention0.as_ref(), Abs(2e-5));
    check(report, kit, ("flow", "dit_block0_streaming"), streaming.block0.as_ref(), Abs(2e-5));
    check(report, kit, ("flow", "dit_out_streaming"), transposed(&streaming.out).as_ref(), Abs(5e-5));
    input.streaming = false;
    let full = backend.dit(&input)?;
    check(report, kit, ("flow", "dit_out_full"), transposed(&full.out).as_ref(), Abs(5e-5));
    Ok(())
}

/// The vocoder on stored mels.
pub(super) fn hift<B: Testable>(kit: &Kit, backend: &mut B, report: &mut Report) -> Result<(), KitError> {
    let stored = kit.input("hift", "mel")?;
    let mel = frames_first(stored);
    let probe = backend.hift(&mel, true)?;
    let turned = |v: &Option<Values>| v.as_ref().map(Values::transposed);
    let stage = |name| ("hift", name);
    check(report, kit, stage("f0_final"), probe.f0.as_ref(), Rel(1e-4));
    check(report, kit, stage("f0_stream"), backend.hift(&mel, false)?.f0.as_ref(), Rel(1e-4));
    check(report, kit, stage("source"), probe.source.as_ref(), Abs(1e-4));
    check(report, kit, stage("source_stft"), turned(&probe.spectrum).as_ref(), Abs(1e-4));
    check(report, kit, stage("conv_pre"), turned(&probe.conv_pre).as_ref(), Abs(2e-5));
    check(report, kit, stage("ups0"), turned(&probe.up0).as_ref(), Abs(2e-5));
    check(report, kit, stage("source_resblock0"), turned(&probe.source_block0).as_ref(), Abs(5e-5));
    check(report, kit, stage("resblock0"), turned(&probe.block0).as_ref(), Abs(5e-5));
    check(report, kit, stage("conv_post"), turned(&probe.conv_post).as_ref(), Abs(1e-4));
    check(report, kit, stage("wav_final"), Some(&probe.wave), Abs(1e-4));
    match kit.find("hift", "stream_schedule") {
        Some(schedule) => {
            let cuts: Vec<usize> = schedule.data.chunks_exact(3).map(|row| row[0] as usize).collect();
            let (frame, hold) = (kit.config.hift.frame_samples() as u32, derive::reference_hold(kit));
            let mut out = 0;
            let mut table = Vec::new();
            for row in schedule.data.chunks_exact(3) {
                let all = (row[0] as u32).saturating_sub(if row[1] == 1.0 { 0 } else { hold }) * frame;
                table.extend([row[0], row[1], all as f32 - out as f32]);
                out = all;
            }
            let made = Values { shape: schedule.shape.clone(), data: table };
            report.compare("hift", "stream_schedule", &schedule, &made, Exact);
            check(report, kit, stage("wav_stream"), Some(&backend.hift_chunks(&mel, &cuts)?), Abs(1e-4));
        }
        None => report.absent("hift", "stream_schedule"),
    }
    for key in kit.names("hift", FUSED) {
        let Some(expected) = kit.find("hift", &key) else { continue };
        let [out, inp, kernel] = expected.shape[..] else { continue };
        let name = key.strip_prefix(FUSED).unwrap_or(&key);
        let (weight, _) = kit.checkpoint.part(Part::Hift).convolution(name, [out, inp, kernel])?;
        report.compare("hift", &key, &expected, &Values { shape: expected.shape.clone(), data: weight }, Abs(1e-6));
    }
    Ok(())
}
