//! Whether sampling on the device draws what its specification does ([`sample`]), also of scores that no model gives.

use super::super::device::{Device, Elt, GpuError, start};
use super::super::units;
use super::{Args, RECENT, Sampler, Seq, defines, sample_shared};
use crate::synth::cosyvoice::backend::Hardware;
use crate::synth::cosyvoice::config::LlmConfig;
use crate::synth::cosyvoice::sample;

/// A row to draw from.
struct Row {
    what: &'static str,
    scores: Vec<f32>,
    /// What was drawn before.
    recent: Vec<u32>,
}

/// Of which rows of scores, as many as `config` has speech ids, the device draws another id than the specification.
///
/// # Errors
/// The device failed.
pub fn disagreements(ordinal: u32, hardware: &Hardware, config: &LlmConfig) -> Result<Vec<String>, GpuError> {
    let device = Device::open(ordinal, hardware)?;
    let module = device.compile(&units::LLM, Elt::Bf16, &defines(config))?;
    let scores = config.speech_rows();
    let kernel = module.kernel("llm_sample", sample_shared(scores).max(49 << 10))?;
    let rows = rows(scores);
    let zeros = |bytes: usize| device.zeros("a check", bytes);
    let key = |row: usize| [row as u32, 7];
    let seqs: Vec<Seq> = rows.iter().enumerate().map(|(n, row)| sequence(&row.recent, key(n))).collect();
    let slots: Vec<i32> = (0..rows.len() as i32).collect();
    let all: Vec<f32> = rows.iter().flat_map(|row| row.scores.iter().copied()).collect();
    let (seq, slots, logits) =
        (device.upload("a check", &seqs)?, device.upload("a check", &slots)?, device.upload("a check", &all)?);
    let (tokens, counts) = (zeros(rows.len() * 4)?, zeros(rows.len() * 4)?);
    // Sampling reads which slot a row is of, the slots' records and how many positions there are, nothing else.
    let args = Args {
        text: 0,
        speech: 0,
        rope: 0,
        cache: 0,
        seq: seq.ptr,
        forced: 0,
        x: 0,
        xe: 0,
        row_slot: 0,
        row_pos: 0,
        slots: slots.ptr,
        ids: 0,
        slot_stride: 0,
        layer_stride: 0,
        hidden: 0,
        positions: i32::MAX,
        rows: rows.len() as i32,
        tiled_rows: 0,
    };
    let (sampler, grid) = (Sampler::new(config), (rows.len() as u32, 1, 1));
    start!(device, kernel, grid, 1024, sample_shared(scores);
        args, sampler, logits.ptr, scores as i32, scores as i32, tokens.ptr, counts.ptr, 1i32)?;
    let mut drawn = vec![0i32; rows.len()];
    device.read(tokens.ptr, &mut drawn)?;
    let mut wrong = Vec::new();
    for (n, (row, drawn)) in rows.iter().zip(drawn).enumerate() {
        let index = row.recent.len() as u32;
        let expected = match sample::next_id(&row.scores, &row.recent, &config.sampling, key(n), index) {
            None => super::BAD,
            Some(id) if id as usize >= config.speech_tokens => super::END - (id as i32 - config.speech_tokens as i32),
            Some(id) => id as i32,
        };
        if drawn != expected {
            wrong.push(format!("{}, row {n}: {drawn} in place of {expected}", row.what));
        }
    }
    Ok(wrong)
}

/// A slot that has drawn `recent`.
fn sequence(recent: &[u32], key: [u32; 2]) -> Seq {
    let mut seq = Seq { decoded: recent.len() as i32, key, max_len: i32::MAX, ..Seq::default() };
    for (at, &id) in recent.iter().enumerate() {
        seq.recent[at % RECENT] = id as i32;
    }
    seq
}

fn rows(scores: usize) -> Vec<Row> {
    let row = |what, scores: Vec<f32>| Row { what, scores, recent: Vec::new() };
    let made = |of: &dyn Fn(usize) -> f32| (0..scores).map(of).collect::<Vec<f32>>();
    // The sum of four uniform numbers, the same in every run.
    let noise = |n: usize, i: usize| {
        let bits = sample::philox([n as u32, 3], [i as u32, 0, 0, 0]);
        bits.iter().map(|&b| b as f32 / u32::MAX as f32 - 0.5).sum::<f32>()
    };
    let mut rows = Vec::new();
    for n in 0..16 {
        rows.push(row("scores like a model's", made(&|i| noise(n, i) * 3.0)));
        rows.push(row("few likely ids", made(&|i| noise(n, i) * 12.0)));
        let scores = made(&|i| noise(n, i) * 12.0);
        let best = (0..scores.len() as u32).max_by(|&a, &b| scores[a as usize].total_cmp(&scores[b as usize]));
        let recent = (0..n as u32 + 1).map(|i| if i % 2 == 0 { best.unwrap_or(0) } else { i }).collect();
        rows.push(Row { what: "a repetition", scores, recent });
    }
    for n in 0..4 {
        rows.push(row("equal scores", made(&|_| 0.5)));
        rows.push(row("better from id to id", made(&|i| i as f32 * 0.01)));
        rows.push(row("worse from id to id", made(&|i| i as f32 * -0.01)));
        rows.push(row(
            "the best of one group of threads",
            made(&|i| noise(n, i) + if i % 1024 / 16 == 3 { 9.0 } else { 0.0 }),
        ));
        rows.push(row(
            "five ids left",
            made(&|i| if i % 911 == 5 && i < 4_600 { noise(n, i) } else { f32::NEG_INFINITY }),
        ));
    }
    rows.push(row("one id left", made(&|i| if i == 77 { -3.0 } else { f32::NEG_INFINITY })));
    let only = made(&|i| if i == 77 { -3.0 } else { f32::NEG_INFINITY });
    rows.push(Row { what: "one id left, and that a repetition", scores: only, recent: vec![77] });
    rows.push(row("no id left", made(&|_| f32::NEG_INFINITY)));
    rows.push(row("no number", made(&|i| if i == 4_000 % scores { f32::NAN } else { 0.0 })));
    rows
}
