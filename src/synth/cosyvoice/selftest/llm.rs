//! The language model of a kit: one pass, cached decoding, sampling, text in pieces.

use super::Tolerance::{Abs, Exact};
use super::derive;
use super::kit::{Kit, KitError};
use super::{Report, Testable, check, whole};
use crate::synth::cosyvoice::backend::{Embed, MinLength};
use crate::synth::cosyvoice::bistream::{Bistream, Order, Prompt, Sampler, speak};
use crate::synth::cosyvoice::config::{EOS, SOS, TASK};
use crate::synth::cosyvoice::probe::Values;
use crate::synth::cosyvoice::sample;

/// A sample is no error where the best two scores are closer than this.
const MARGIN: f32 = 1e-3;

/// The prefix of section 5.
pub(super) fn prefix(kit: &Kit, with_speech: bool) -> Result<Vec<Embed>, KitError> {
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

/// Whether `other` scores as well as `id` within [`MARGIN`].
fn is_tie(scores: &[f32], id: u32, other: u32) -> bool {
    let of = |id: u32| scores.get(id as usize).copied().unwrap_or(f32::NEG_INFINITY);
    of(id) - of(other) < MARGIN
}

/// The kit's sample: the best id below `limit` that is not among `excluded`, or `want` where that is allowed and as
/// good as equal.
pub(super) fn settle(scores: &[f32], limit: usize, excluded: &[u32], want: Option<u32>) -> u32 {
    let id = best(scores, limit, excluded);
    want.filter(|&want| !excluded.contains(&want) && is_tie(scores, id, want)).unwrap_or(id)
}

/// The last `window` of `ids`.
pub(super) fn recent(ids: &[u32], window: usize) -> &[u32] {
    &ids[ids.len().saturating_sub(window)..]
}

/// The scores before each of `tokens`, which are fed whatever the scores say.
fn scores_along<B: Testable>(backend: &mut B, prefix: &[Embed], tokens: &[u32]) -> Result<Vec<Vec<f32>>, KitError> {
    let mut rows = Vec::with_capacity(tokens.len());
    backend.llm_decode(prefix, &mut |scores, ids| {
        let next = *tokens.get(ids.len())?;
        rows.push(scores.to_vec());
        Some(next)
    })?;
    Ok(rows)
}

/// The language model. Returns the windows that the kit's sampler may have had, the likeliest first.
pub(super) fn llm<B: Testable>(kit: &Kit, backend: &mut B, report: &mut Report) -> Result<Vec<usize>, KitError> {
    let limit = kit.config.llm.speech_tokens;
    let prefix_ids = prefix(kit, true)?;
    one_pass(kit, backend, report, &prefix_ids)?;
    let mut sampled = Vec::new();
    let mut windows = derive::windows(kit.config.llm.sampling.window);
    for (name, margin, speech, repeats) in [
        ("greedy_tokens", "greedy_margin", true, true),
        ("norep_tokens", "norep_margin", true, false),
        ("greedy_tokens_no_prompt_speech", "", false, false),
    ] {
        let Some(expected) = kit.find("llm", name) else {
            report.absent("llm", name);
            continue;
        };
        let wanted: Vec<u32> = expected.data.iter().map(|&v| v as u32).collect();
        // Each sample follows the expected ones, so that one wrong sample is one error.
        let rows = scores_along(backend, &prefix(kit, speech)?, &wanted)?;
        if !repeats {
            windows.retain(|&w| derive::explains(w, &rows, limit, &wanted));
        }
        let margins = kit.find("llm", margin).map(|m| m.data).unwrap_or_default();
        sampled.push((name, expected, wanted, rows, margins, repeats));
    }
    if windows.is_empty() {
        windows.push(derive::KIT_WINDOW);
    }
    for (name, expected, wanted, rows, margins, repeats) in sampled {
        let ids = wanted.iter().zip(&rows).enumerate().map(|(at, (&want, scores))| {
            let excluded = if repeats { &[] } else { recent(&wanted[..at], windows[0]) };
            let id = best(scores, limit, excluded);
            let close = margins.get(at).is_some_and(|&m| m < MARGIN) || is_tie(scores, id, want);
            // A tie is no licence for what may not be sampled.
            if close && !excluded.contains(&want) { want } else { id }
        });
        report.compare("llm", name, &expected, &whole(ids), Exact);
    }
    bistream(kit, backend, report, &windows)?;
    for n in 0.. {
        let Some(scores) = kit.find("llm", &format!("ras{n}_logp")) else {
            if n == 0 {
                report.absent("llm", "ras0_logp");
            }
            break;
        };
        let chosen = sample::nucleus(&scores.data, &kit.config.llm.sampling);
        let ids = whole(chosen.iter().map(|c| c.0));
        let weights = Values::vector(chosen.iter().map(|c| c.1).collect());
        check(report, kit, ("llm", &format!("ras{n}_candidates")), Some(&ids), Exact);
        check(report, kit, ("llm", &format!("ras{n}_weights")), Some(&weights), Abs(1e-6));
    }
    Ok(windows)
}

/// Hidden states and scores, in one pass and from the cache.
fn one_pass<B: Testable>(
    kit: &Kit,
    backend: &mut B,
    report: &mut Report,
    prefix_ids: &[Embed],
) -> Result<(), KitError> {
    let Some(forced) = kit.find("llm", "forced_tokens") else {
        report.absent("llm", "forced_tokens");
        return Ok(());
    };
    let forced: Vec<u32> = forced.data.iter().map(|&v| v as u32).collect();
    let probe = backend.llm(prefix_ids, &forced)?;
    check(report, kit, ("llm", "lm_input"), probe.input.as_ref(), Abs(1e-6));
    // Of a model of one layer, the Python list of hidden states has the normed one in this place.
    let normed = probe.hidden.as_ref().filter(|_| kit.config.llm.layers == 1);
    let expected = kit.find("llm", "hidden_after_layer0");
    let apart = |v: &Values| expected.as_ref().map_or(f32::INFINITY, |e| derive::apart(&e.data, &v.data));
    let after_first = match (probe.after_first.as_ref(), normed) {
        (Some(plain), Some(normed)) if apart(normed) < apart(plain) => Some(normed),
        (plain, _) => plain,
    };
    check(report, kit, ("llm", "hidden_after_layer0"), after_first, Abs(2e-5));
    check(report, kit, ("llm", "hidden_full"), probe.hidden.as_ref(), Abs(2e-5));
    for name in kit.names("llm", "logits_last") {
        check(report, kit, ("llm", &name), Some(&probe.scores), Abs(5e-5));
    }
    let mut rows = Vec::new();
    backend.llm_decode(prefix_ids, &mut |scores, ids| {
        rows.extend_from_slice(scores);
        forced.get(ids.len()).copied()
    })?;
    let incremental = Values { shape: vec![forced.len() + 1, kit.config.llm.speech_rows()], data: rows };
    check(report, kit, ("llm", "logits_incremental"), Some(&incremental), Abs(5e-5));
    Ok(())
}

/// Text in pieces, in the reference's order.
fn bistream<B: Testable>(kit: &Kit, backend: &mut B, report: &mut Report, windows: &[usize]) -> Result<(), KitError> {
    let llm = &kit.config.llm;
    let prompt_text = kit.ids("llm", "prompt_text")?;
    let text = kit.ids("llm", "text")?;
    let speech = kit.ids("llm", "prompt_speech_token")?;
    let end = prompt_text.iter().position(|&id| Some(id) == kit.end_of_prompt()).map_or(0, |at| at + 1);
    for (name, speech) in [("bi1", &speech[..]), ("bi2", &[])] {
        let (tokens_name, steps_name) = (format!("{name}_tokens"), format!("{name}_steps"));
        let Some(expected) = kit.find("llm", &tokens_name) else {
            report.absent("llm", &tokens_name);
            continue;
        };
        let wanted: Vec<u32> = expected.data.iter().map(|&v| v as u32).collect();
        let prompt = Prompt { system: &prompt_text[..end], transcript: &prompt_text[end..], speech };
        let steps = kit.find("llm", &steps_name);
        let pieces = derive::pieces(llm, &prompt, &text, &wanted, steps.as_ref());
        let (mut tokens, mut fed) = (Vec::new(), Vec::new());
        for &window in windows {
            (tokens, fed) = in_pieces(kit, backend, &prompt, text.chunks(pieces), window, &wanted)?;
            if tokens == wanted {
                break;
            }
        }
        report.compare("llm", &tokens_name, &expected, &whole(tokens), Exact);
        report.explain(&format!("text by {pieces}"));
        check(report, kit, ("llm", &steps_name), Some(&derive::table(&fed)), Exact);
    }
    Ok(())
}

/// The tokens and the passes of a stream whose text comes in `pieces`.
fn in_pieces<B: Testable>(
    kit: &Kit,
    backend: &mut B,
    prompt: &Prompt<'_>,
    mut pieces: std::slice::Chunks<'_, u32>,
    window: usize,
    wanted: &[u32],
) -> Result<(Vec<u32>, Vec<usize>), KitError> {
    let llm = &kit.config.llm;
    let mut stream = Bistream::new(llm, Order::Reference, prompt);
    let finishing = std::cell::Cell::new(false);
    let mut next = || {
        let ids = pieces.next().unwrap_or_default().to_vec();
        finishing.set(ids.is_empty());
        ids
    };
    let (limit, eos) = (llm.speech_tokens, llm.control(EOS));
    let mut choose = |scores: &[f32], items: &[u32]| {
        let spoken = items.iter().filter(|&&t| (t as usize) < limit).count();
        // The last phase of the kits' sampler ends somewhere; where, their count of tokens says.
        if finishing.get() && spoken >= wanted.len() {
            return Some(eos);
        }
        Some(settle(scores, limit, recent(items, window), wanted.get(spoken).copied()))
    };
    let mut sampler = Sampler { min_length: MinLength::Reference, choose: &mut choose };
    let mut tokens = Vec::new();
    let fed = speak(backend, &mut stream, &mut sampler, &mut next, &mut |t| tokens.push(t))?;
    Ok((tokens, fed))
}
