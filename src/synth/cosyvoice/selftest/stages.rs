//! What is compared, stage by stage, with the tolerances of the kits.

use std::sync::Arc;

use super::kit::{Kit, KitError};
use super::{Report, Testable, Tolerance};
use crate::synth::Slot;
use crate::synth::cosyvoice::backend::{Embed, FinalChunk, MinLength, Sampling, SlotRequest};
use crate::synth::cosyvoice::bistream::{Bistream, Draw, Order, Prompt, speak as speak_stream};
use crate::synth::cosyvoice::checkpoint::Part;
use crate::synth::cosyvoice::config::{EOS, SOS, TASK};
use crate::synth::cosyvoice::noise::{MersenneTwister, SineTable, flow_table};
use crate::synth::cosyvoice::probe::{DitInput, Values};
use crate::synth::cosyvoice::schedule::{Chunk, HopPlan, Hops};
use crate::synth::cosyvoice::text::{self, Thinner};
use crate::synth::cosyvoice::{backend, sample};

use Tolerance::{Abs, AbsOrRms, Exact, Rel};

/// A draw is no error where the best two scores are closer than this.
const MARGIN: f32 = 1e-3;
/// Frames that the original's vocoder withholds.
const REFERENCE_HOLD: u32 = 8;

/// Compares an optional output with an optional expectation.
fn check(report: &mut Report, kit: &Kit, at: (&'static str, &str), actual: Option<&Values>, tolerance: Tolerance) {
    let (stage, name) = at;
    let Some(expected) = kit.find(stage, name) else { return };
    match actual {
        Some(actual) => report.compare(stage, name, &expected, &first(actual, &expected), tolerance),
        None => report.not_shown(stage, name, &expected, tolerance),
    }
}

/// Kits store only the first steps of some long outputs: as many as `expected` has along the last axis.
fn first(actual: &Values, expected: &Values) -> Values {
    let (Some(&have), Some(&want)) = (actual.shape.last(), expected.shape.last()) else { return actual.clone() };
    if want >= have {
        return actual.clone();
    }
    let mut shape = actual.shape.clone();
    if let Some(last) = shape.last_mut() {
        *last = want;
    }
    let data = actual.data.chunks_exact(have).flat_map(|row| row[..want].iter().copied()).collect();
    Values { shape, data }
}

fn whole(values: impl IntoIterator<Item = u32>) -> Values {
    Values::vector(values.into_iter().map(|v| v as f32).collect())
}

/// Tokenizer and normaliser.
pub(super) fn text(kit: &Kit, report: &mut Report) -> Result<(), KitError> {
    let tokenizer_cases = kit.json("tokenizer_cases.json")?;
    let rule_cases = kit.json("text_normalize_cases.json")?;
    if tokenizer_cases.is_none() && rule_cases.is_none() {
        return Ok(());
    }
    let tokenizer = text::Tokenizer::load(&kit.checkpoint_dir())
        .map_err(|e| KitError::File { path: kit.checkpoint_dir().display().to_string(), reason: e.to_string() })?;
    let mut count = |name: &str, total: usize, wrong: Vec<String>| {
        let expected = Values::vector(vec![0.0]);
        report.compare("text", name, &expected, &Values::vector(vec![wrong.len() as f32]), Exact);
        if let Some(line) = report.lines.last_mut() {
            line.shape = vec![total];
            line.note = wrong.join("; ");
        }
    };
    let list = |v: Option<&serde_json::Value>| v.and_then(|v| v.as_array().cloned()).unwrap_or_default();
    if let Some(cases) = &tokenizer_cases {
        let all = list(cases.get("cases"));
        let mut wrong = Vec::new();
        for case in &all {
            let text = case["text"].as_str().unwrap_or_default();
            let ids: Vec<u64> = list(case.get("ids")).iter().filter_map(serde_json::Value::as_u64).collect();
            let actual: Vec<u64> = tokenizer.encode(text).unwrap_or_default().into_iter().map(u64::from).collect();
            if ids != actual {
                wrong.push(format!("{text:?} gives {actual:?}"));
            }
        }
        count("tokenizer cases", all.len(), wrong);
        let special = list(cases.get("special"));
        let name = |s: &serde_json::Value| s["text"].as_str().unwrap_or_default().to_string();
        let differs = |s: &&serde_json::Value| tokenizer.id(&name(s)).map(u64::from) != s["id"].as_u64();
        count("special tokens", special.len(), special.iter().filter(differs).map(name).collect());
    }
    let all = list(rule_cases.as_ref());
    let mut wrong = Vec::new();
    for case in &all {
        let text = case["text"].as_str().unwrap_or_default();
        let split: Vec<String> =
            list(case.get("split")).iter().filter_map(|s| s.as_str().map(Into::into)).collect();
        let whole = case["nosplit"].as_str().unwrap_or_default();
        let actual = text::segments(text, &tokenizer);
        if actual != split {
            wrong.push(format!("{text:?} splits into {actual:?}"));
        }
        let normal = text::normalize(text);
        if normal != whole {
            wrong.push(format!("{text:?} becomes {normal:?}"));
        }
    }
    count("text rules", 2 * all.len(), wrong);
    Ok(())
}

/// The fixed tables.
pub(super) fn noise<B: Testable>(kit: &Kit, backend: &mut B, report: &mut Report) -> Result<(), KitError> {
    if let Some(expected) = kit.find("flow", "rand_noise") {
        let frames = expected.shape.last().copied().unwrap_or_default();
        report.compare("noise", "rand_noise", &expected, &backend.flow_noise(frames)?, Abs(1e-6));
    }
    if let Some(expected) = kit.find("hift", "noise_head") {
        let mut table = SineTable::new(&kit.config, kit.sine_noise());
        let rows = expected.shape.first().copied().unwrap_or_default();
        let actual = Values { shape: expected.shape.clone(), data: table.prefix(rows).to_vec() };
        report.compare("noise", "noise_head", &expected, &actual, Exact);
    }
    if !kit.has("native_noise_tiny") {
        return Ok(());
    }
    let table = flow_table(&kit.config);
    let frames = kit.config.noise_frames();
    for (name, tail) in [("rand_noise", false), ("rand_noise_tail", true)] {
        let Some(expected) = kit.find("native_noise_tiny", name) else { continue };
        let columns = expected.shape.last().copied().unwrap_or_default();
        let from = if tail { frames - columns } else { 0 };
        let data = table.chunks_exact(frames).flat_map(|row| row[from..from + columns].to_vec()).collect();
        let name = format!("native {name}");
        report.compare("noise", &name, &expected, &Values { shape: expected.shape.clone(), data }, Abs(1e-6));
    }
    let mut sines = SineTable::new(&kit.config, backend::SineNoise::Native);
    let rows = sines.rows();
    for (name, from) in [("sine_waves_head", 0), ("sine_waves_at_1000000", 1_000_000)] {
        let Some(expected) = kit.find("native_noise_tiny", name) else { continue };
        let count = expected.data.len() / rows;
        let data = sines.prefix(from + count)[from * rows..].to_vec();
        report.compare("noise", &format!("native {name}"), &expected, &Values { shape: expected.shape.clone(), data }, Exact);
    }
    // The generator itself, against its published first output for seed 5489.
    let first = MersenneTwister::new(5489).next_u32();
    report.compare("noise", "mt19937", &whole([3_499_211_612 >> 8]), &whole([first >> 8]), Exact);
    Ok(())
}

/// The prefix of section 5.
fn prefix(kit: &Kit, with_speech: bool) -> Result<Vec<Embed>, KitError> {
    let llm = &kit.config.llm;
    let text = |name| kit.ids("llm", name).map(|ids| ids.into_iter().map(Embed::Text));
    let mut prefix = vec![Embed::Speech(llm.control(SOS))];
    prefix.extend(text("prompt_text")?);
    prefix.extend(text("text")?);
    prefix.push(Embed::Speech(llm.control(TASK)));
    if with_speech {
        prefix.extend(kit.ids("llm", "prompt_speech_token")?.into_iter().map(Embed::Speech));
    }
    Ok(prefix)
}

/// The best id below `limit` that is not among `excluded`.
fn best(scores: &[f32], limit: usize, excluded: &[u32]) -> u32 {
    let allowed = |id: &usize| !excluded.contains(&(*id as u32));
    let ids = (0..limit.min(scores.len())).filter(allowed);
    ids.fold(None, |best: Option<usize>, id| match best {
        Some(b) if scores[b] >= scores[id] => Some(b),
        _ => Some(id),
    })
    .unwrap_or_default() as u32
}

fn last_ten(ids: &[u32]) -> &[u32] {
    &ids[ids.len().saturating_sub(10)..]
}

/// The language model.
pub(super) fn llm<B: Testable>(kit: &Kit, backend: &mut B, report: &mut Report) -> Result<(), KitError> {
    if !kit.has("llm") {
        return Ok(());
    }
    let limit = kit.config.llm.speech_tokens;
    let prefix_ids = prefix(kit, true)?;
    let forced = kit.ids("llm", "forced_tokens")?;
    let probe = backend.llm(&prefix_ids, &forced)?;
    check(report, kit, ("llm", "lm_input"), probe.input.as_ref(), Abs(1e-6));
    check(report, kit, ("llm", "hidden_after_layer0"), probe.after_first.as_ref(), Abs(2e-5));
    check(report, kit, ("llm", "hidden_full"), probe.hidden.as_ref(), Abs(2e-5));
    check(report, kit, ("llm", "logits_last25"), Some(&probe.scores), Abs(5e-5));
    let mut rows = Vec::new();
    backend.llm_decode(&prefix_ids, &mut |scores, ids| {
        rows.extend_from_slice(scores);
        forced.get(ids.len()).copied()
    })?;
    let incremental = Values { shape: vec![forced.len() + 1, kit.config.llm.speech_rows()], data: rows };
    check(report, kit, ("llm", "logits_incremental"), Some(&incremental), Abs(5e-5));
    for (name, margin, speech, repeats) in [
        ("greedy_tokens", "greedy_margin", true, true),
        ("norep_tokens", "norep_margin", true, false),
        ("greedy_tokens_no_prompt_speech", "", false, false),
    ] {
        let Some(expected) = kit.find("llm", name) else { continue };
        let margins = kit.find("llm", margin).map(|m| m.data).unwrap_or_default();
        let wanted: Vec<u32> = expected.data.iter().map(|&v| v as u32).collect();
        let mut drawn = Vec::new();
        backend.llm_decode(&prefix(kit, speech)?, &mut |scores, ids| {
            let want = *wanted.get(ids.len())?;
            let id = best(scores, limit, if repeats { &[] } else { last_ten(ids) });
            let close = margins.get(ids.len()).is_some_and(|&m| m < MARGIN);
            // What follows is fed from the expectation, so that one wrong draw is one error.
            drawn.push(if close { want } else { id });
            Some(want)
        })?;
        report.compare("llm", name, &expected, &whole(drawn), Exact);
    }
    bistream(kit, backend, report)?;
    for n in 0.. {
        let Some(scores) = kit.find("llm", &format!("ras{n}_logp")) else { break };
        let chosen = sample::nucleus(&scores.data, &kit.config.llm.sampling);
        let ids = whole(chosen.iter().map(|c| c.0));
        let weights = Values::vector(chosen.iter().map(|c| c.1).collect());
        check(report, kit, ("llm", &format!("ras{n}_candidates")), Some(&ids), Exact);
        check(report, kit, ("llm", &format!("ras{n}_weights")), Some(&weights), Abs(1e-6));
    }
    Ok(())
}

/// Text in pieces, in the reference's order.
fn bistream<B: Testable>(kit: &Kit, backend: &mut B, report: &mut Report) -> Result<(), KitError> {
    // The kits' sampler ends the last phase once so many ids are decoded.
    const END_AFTER: usize = 75;
    let llm = &kit.config.llm;
    let prompt_text = kit.ids("llm", "prompt_text")?;
    let text = kit.ids("llm", "text")?;
    let speech = kit.ids("llm", "prompt_speech_token")?;
    let end = prompt_text.iter().position(|&id| Some(id) == kit.end_of_prompt()).map_or(0, |at| at + 1);
    for (name, pieces, speech) in [("bi1", 3, &speech[..]), ("bi2", 4, &[])] {
        let Some(expected) = kit.find("llm", &format!("{name}_tokens")) else { continue };
        let prompt = Prompt { system: &prompt_text[..end], transcript: &prompt_text[end..], speech };
        let mut stream = Bistream::new(llm, Order::Reference, &prompt);
        let mut left = text.chunks(pieces);
        let finishing = std::cell::Cell::new(false);
        let mut next = || {
            let ids = left.next().unwrap_or_default().to_vec();
            finishing.set(ids.is_empty());
            ids
        };
        let (limit, eos) = (llm.speech_tokens, llm.control(EOS));
        let mut choose = |scores: &[f32], items: &[u32]| {
            let ends = finishing.get() && items.len() >= END_AFTER;
            Some(if ends { eos } else { best(scores, limit, last_ten(items)) })
        };
        let mut draw = Draw { min_length: MinLength::Reference, choose: &mut choose };
        let mut tokens = Vec::new();
        let fed = speak_stream(backend, &mut stream, &mut draw, &mut next, &mut |t| tokens.push(t))?;
        report.compare("llm", &format!("{name}_tokens"), &expected, &whole(tokens), Exact);
        let mut total = 0;
        let steps = fed.into_iter().flat_map(|new| {
            total += new;
            [new as f32, total as f32]
        });
        let data: Vec<f32> = steps.collect();
        let steps = Values { shape: vec![data.len() / 2, 2], data };
        check(report, kit, ("llm", &format!("{name}_steps")), Some(&steps), Exact);
    }
    Ok(())
}

/// The flow, from its front to whole mels.
pub(super) fn flow<B: Testable>(kit: &Kit, backend: &mut B, report: &mut Report) -> Result<(), KitError> {
    if !kit.has("flow") {
        return Ok(());
    }
    let prompt = kit.prompt()?;
    let token = kit.ids("flow", "token")?;
    let all: Vec<u32> = prompt.tokens.iter().chain(&token).copied().collect();
    check(report, kit, ("flow", "t_span"), Some(&Values::vector(backend.times())), Abs(1e-6));
    check(report, kit, ("flow", "spk_proj"), backend.speaker(&prompt.speaker)?.as_ref(), Abs(1e-5));
    check(report, kit, ("flow", "pre_lookahead_final"), backend.look_ahead(&all, true)?.as_ref(), Abs(2e-5));
    if let Some(expected) = kit.find("flow", "pre_lookahead_ctx") {
        let count = expected.shape.get(1).copied().unwrap_or_default() + kit.config.flow.lookahead;
        let context = all.get(..count).unwrap_or(&all);
        check(report, kit, ("flow", "pre_lookahead_ctx"), backend.look_ahead(context, false)?.as_ref(), Abs(2e-5));
    }
    dit(kit, backend, report)?;
    let mel = |v: Values| v.transposed();
    let full = backend.mel(&prompt, &token, false)?;
    check(report, kit, ("flow", "mel_nonstream"), Some(&mel(full.clone())), Abs(2e-4));
    let masked = backend.mel(&prompt, &token, true)?;
    check(report, kit, ("flow", "mel_stream_mask_final"), Some(&mel(masked)), Abs(2e-4));
    let (chunks, cuts) = plan(kit, prompt.tokens.len(), token.len(), HopPlan::reference());
    let table: Vec<f32> = chunks
        .iter()
        .flat_map(|c| {
            let offset = c.from.saturating_sub(kit.config.flow.lookahead as u32);
            [offset, c.to, c.frames, u32::from(c.last)].map(|v| v as f32)
        })
        .collect();
    check(report, kit, ("flow", "chunk_schedule"), Some(&Values { shape: vec![chunks.len(), 4], data: table }), Exact);
    let chunked = backend.mel_chunks(&prompt, &token, &cuts, FinalChunk::Reference)?;
    check(report, kit, ("flow", "mel_stream_chunks"), Some(&mel(chunked)), Abs(2e-4));
    let causal = backend.mel_chunks(&prompt, &token, &cuts, FinalChunk::Causal)?;
    if let Some(expected) = kit.find("flow", "mel_stream_mask_final") {
        report.compare("flow", "mel_stream_mask_final by chunks", &expected, &mel(causal), Abs(2e-4));
    }
    if let Some(expected) = kit.find("flow", "mel_odd_prompt") {
        // The kit's voice-conversion case: 11 prompt tokens, 23 mel frames, 30 tokens.
        let mut odd = prompt.clone();
        odd.tokens.truncate(11);
        odd.mel.truncate(23 * kit.config.flow.mel);
        let tokens = token.get(..30).unwrap_or(&token);
        report.compare("flow", "mel_odd_prompt", &expected, &mel(backend.mel(&odd, tokens, false)?), Abs(2e-4));
    }
    // The stored mel is the input, so that an error of the solver is not counted twice.
    let stored = kit.find("flow", "mel_nonstream").map(|v| Values { shape: v.shape[1..].to_vec(), data: v.data }.transposed());
    for (name, speed) in [("mel_speed_1.3", 1.3), ("mel_speed_0.8", 0.8)] {
        let made = stored.as_ref().map(|m| backend.respeed(m, speed)).transpose()?.map(mel);
        check(report, kit, ("flow", name), made.as_ref(), Abs(1e-5));
    }
    Ok(())
}

fn dit<B: Testable>(kit: &Kit, backend: &mut B, report: &mut Report) -> Result<(), KitError> {
    if let Some(expected) = kit.find("flow", "rope_angles") {
        let frames = expected.shape.first().copied().unwrap_or_default();
        check(report, kit, ("flow", "rope_angles"), backend.angles(frames).as_ref(), Rel(1e-6));
    }
    let Some(x) = kit.find("flow", "dit_x") else { return Ok(()) };
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
    if !kit.has("hift") {
        return Ok(());
    }
    let stored = kit.input("hift", "mel")?;
    let mel = Values { shape: stored.shape[1..].to_vec(), data: stored.data }.transposed();
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
    if let Some(schedule) = kit.find("hift", "stream_schedule") {
        let cuts: Vec<usize> = schedule.data.chunks_exact(3).map(|row| row[0] as usize).collect();
        let frame = kit.config.hift.frame_samples() as u32;
        let mut out = 0;
        let mut table = Vec::new();
        for row in schedule.data.chunks_exact(3) {
            let all = (row[0] as u32).saturating_sub(if row[1] == 1.0 { 0 } else { REFERENCE_HOLD }) * frame;
            table.extend([row[0], row[1], (all - out) as f32]);
            out = all;
        }
        let made = Values { shape: schedule.shape.clone(), data: table };
        report.compare("hift", "stream_schedule", &schedule, &made, Exact);
        check(report, kit, stage("wav_stream"), Some(&backend.hift_chunks(&mel, &cuts)?), Abs(1e-4));
    }
    for name in ["conv_pre", "ups.0", "conv_post"] {
        let key = format!("fused.{name}");
        let Some(expected) = kit.find("hift", &key) else { continue };
        let [out, inp, kernel] = expected.shape[..] else { continue };
        let (weight, _) = kit.checkpoint.part(Part::Hift).convolution(name, [out, inp, kernel])?;
        report.compare("hift", &key, &expected, &Values { shape: expected.shape.clone(), data: weight }, Abs(1e-6));
    }
    Ok(())
}

/// From text ids to samples.
pub(super) fn end_to_end<B: Testable>(kit: &Kit, backend: &mut B, report: &mut Report) -> Result<(), KitError> {
    if !kit.has("e2e") {
        return Ok(());
    }
    if let (Some(raw), Some(expected)) = (kit.find("e2e", "silent_in"), kit.find("e2e", "silent_out")) {
        let mut thinner = Thinner::default();
        let kept = raw.data.iter().map(|&v| v as u32).filter(|&t| thinner.keeps(t));
        report.compare("e2e", "silent_out", &expected, &whole(kept), Exact);
    }
    let prompt = kit.prompt()?;
    let expected = kit.ids("e2e", "llm_tokens")?;
    let limit = kit.config.llm.speech_tokens;
    let mut thinner = Thinner::default();
    let mut thinned = Vec::new();
    backend.llm_decode(&prefix(kit, true)?, &mut |scores, ids| {
        if thinned.len() >= expected.len() {
            return None;
        }
        let id = best(scores, limit, last_ten(ids));
        if thinner.keeps(id) {
            thinned.push(id);
        }
        Some(id)
    })?;
    check(report, kit, ("e2e", "llm_tokens"), Some(&whole(thinned)), Exact);
    let token = kit.ids("flow", "token")?;
    let reference = HopPlan::reference();
    let (chunks, cuts) = plan(kit, prompt.tokens.len(), expected.len(), reference);
    let mel = backend.mel_chunks(&prompt, &expected, &cuts, FinalChunk::Reference)?;
    check(report, kit, ("e2e", "mel_stream"), Some(&mel.transposed()), Abs(5e-4));
    check(report, kit, ("e2e", "f0_stream"), backend.hift(&mel, true)?.f0.as_ref(), Abs(1e-3));
    let samples = |chunks: &[Chunk]| released(kit, chunks);
    check(report, kit, ("e2e", "stream_chunk_samples"), Some(&samples(&chunks)), Exact);
    let wave = speak(kit, backend, &expected, reference)?;
    check(report, kit, ("e2e", "wav_stream"), Some(&wave), AbsOrRms(5e-3, 1e-3));
    let full = backend.mel(&prompt, &expected, false)?;
    check(report, kit, ("e2e", "wav_nonstream"), Some(&backend.hift(&full, true)?.wave), AbsOrRms(5e-3, 1e-3));
    if kit.find("e2e", "vc_wav_stream").is_some() {
        // The kit converts the first 95 tokens of the flow's input.
        let source = token.get(..95).unwrap_or(&token);
        let (chunks, _) = plan(kit, prompt.tokens.len(), source.len(), reference);
        check(report, kit, ("e2e", "vc_chunk_samples"), Some(&samples(&chunks)), Exact);
        let wave = speak(kit, backend, source, reference)?;
        check(report, kit, ("e2e", "vc_wav_stream"), Some(&wave), AbsOrRms(5e-3, 1e-3));
    }
    // As shipped the hop of the first request stays grown for the second; as data it is only another plan.
    let grown = HopPlan { hop: reference.max, ..reference };
    let (chunks, _) = plan(kit, prompt.tokens.len(), expected.len(), grown);
    check(report, kit, ("e2e", "second_request_chunk_samples"), Some(&samples(&chunks)), Exact);
    Ok(())
}

/// The chunks of an utterance whose tokens are all there, and where they end.
fn plan(kit: &Kit, prompt: usize, tokens: usize, plan: HopPlan) -> (Vec<Chunk>, Vec<usize>) {
    let mut hops = Hops::new(plan, &kit.config, prompt as u32);
    let chunks: Vec<Chunk> = std::iter::from_fn(|| hops.next_chunk(tokens as u32, true)).collect();
    let cuts = chunks.iter().map(|c| c.to as usize).collect();
    (chunks, cuts)
}

/// Samples the original gives out for each chunk.
fn released(kit: &Kit, chunks: &[Chunk]) -> Values {
    let frame = kit.config.hift.frame_samples() as u32;
    let (mut frames, mut out) = (0, 0);
    whole(chunks.iter().map(|chunk| {
        frames += chunk.frames;
        let all = if chunk.last { frames } else { frames.saturating_sub(REFERENCE_HOLD) } * frame;
        let new = all - out;
        out = all;
        new
    }))
}

/// Forced tokens through the slot machine: what a call would hear.
fn speak<B: Testable>(kit: &Kit, backend: &mut B, tokens: &[u32], hops: HopPlan) -> Result<Values, KitError> {
    let slot = Slot(0);
    let prompt = Arc::new(kit.prompt()?);
    let voice = backend.add_voice(prompt.clone())?;
    backend.prepare_voice(voice)?;
    let sampling =
        Sampling { key: [0; 2], min_len: 0, max_len: 0, min_length: MinLength::default(), forced: None };
    backend.open(slot, SlotRequest { voice, prefix: Vec::new(), sampling, speed: 1.0 })?;
    let (chunks, _) = plan(kit, prompt.tokens.len(), tokens.len(), hops);
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
        backend.vocode(&[slot], &mut vocoded)?;
        let result = vocoded.pop().ok_or_else(|| no_result("vocode"))?;
        if let Some(error) = result.failed {
            return Err(error.into());
        }
        wave.extend(result.pcm);
    }
    backend.close(slot);
    backend.release_voice(voice);
    Ok(Values::vector(wave))
}

fn no_result(stage: &str) -> KitError {
    KitError::Device(crate::synth::SynthError::Device(format!("{stage} gave no result")))
}
