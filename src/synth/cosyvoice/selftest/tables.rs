//! Text, tokenizer and the fixed noise tables of a kit.

use super::Tolerance::{Abs, Exact};
use super::kit::{Kit, KitError};
use super::{Report, Testable, whole};
use crate::synth::cosyvoice::backend;
use crate::synth::cosyvoice::noise::{MersenneTwister, SineTable, draws_before, flow_table};
use crate::synth::cosyvoice::probe::Values;
use crate::synth::cosyvoice::text;

/// The file of the original's own tables.
const NATIVE: &str = "native_noise_tiny";

/// Tokenizer and normaliser.
pub(super) fn text(kit: &Kit, report: &mut Report) -> Result<(), KitError> {
    let tokenizer_cases = kit.json("tokenizer_cases.json")?;
    let rule_cases = kit.json("text_normalize_cases.json")?;
    for (name, cases) in [("tokenizer cases", &tokenizer_cases), ("text rules", &rule_cases)] {
        if cases.is_none() {
            report.absent("text", name);
        }
    }
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
    let Some(cases) = &rule_cases else { return Ok(()) };
    let all = list(Some(cases));
    let mut wrong = Vec::new();
    for case in &all {
        let text = case["text"].as_str().unwrap_or_default();
        let split: Vec<String> = list(case.get("split")).iter().filter_map(|s| s.as_str().map(Into::into)).collect();
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
    match kit.find("flow", "rand_noise") {
        Some(expected) => {
            let frames = expected.shape.last().copied().unwrap_or_default();
            report.compare("noise", "rand_noise", &expected, &backend.flow_noise(frames)?, Abs(1e-6));
        }
        None => report.absent("noise", "rand_noise"),
    }
    match kit.find("hift", "noise_head") {
        Some(expected) => {
            let mut table = SineTable::new(&kit.config, kit.sine_noise());
            let rows = expected.shape.first().copied().unwrap_or_default();
            let actual = Values { shape: expected.shape.clone(), data: table.prefix(rows).to_vec() };
            report.compare("noise", "noise_head", &expected, &actual, Exact);
        }
        None => report.absent("noise", "noise_head"),
    }
    if kit.has(NATIVE) {
        native(kit, report)
    } else {
        report.absent("noise", "native tables")
    }
    // The generator itself, against its published first output for seed 5489.
    let first = MersenneTwister::new(5489).next_u32();
    report.compare("noise", "mt19937", &whole([3_499_211_612 >> 8]), &whole([first >> 8]), Exact);
    Ok(())
}

/// The tables as the original itself draws them for these sizes.
fn native(kit: &Kit, report: &mut Report) {
    let table = flow_table(&kit.config);
    let frames = kit.config.noise_frames();
    for (name, tail) in [("rand_noise", false), ("rand_noise_tail", true)] {
        let Some(expected) = kit.find(NATIVE, name) else {
            report.absent("noise", &format!("native {name}"));
            continue;
        };
        let columns = expected.shape.last().copied().unwrap_or_default().min(frames);
        let from = if tail { frames - columns } else { 0 };
        let data = table.chunks_exact(frames).flat_map(|row| row[from..from + columns].to_vec()).collect();
        let name = format!("native {name}");
        report.compare("noise", &name, &expected, &Values { shape: expected.shape.clone(), data }, Abs(1e-6));
    }
    let mut sines = SineTable::new(&kit.config, backend::SineNoise::Native);
    let rows = sines.rows();
    // Drawn before and after the excitation table; nothing that is heard depends on either.
    let mut generator = MersenneTwister::new(0);
    generator.skip(draws_before(&kit.config) - rows);
    if let Some(expected) = kit.find(NATIVE, "rand_ini") {
        let mut data: Vec<f32> = (0..rows).map(|_| generator.next_unit()).collect();
        // The fundamental starts at phase zero.
        data[0] = 0.0;
        report.compare("noise", "native rand_ini", &expected, &Values { shape: vec![rows], data }, Exact);
    } else {
        generator.skip(rows);
    }
    for name in kit.names(NATIVE, "sine_waves_") {
        let Some(expected) = kit.find(NATIVE, &name) else { continue };
        let from: usize = name.rsplit('_').next().and_then(|n| n.parse().ok()).unwrap_or_default();
        let count = expected.data.len() / rows;
        let data = sines.prefix(from + count).get(from * rows..).unwrap_or_default().to_vec();
        let made = Values { shape: expected.shape.clone(), data };
        report.compare("noise", &format!("native {name}"), &expected, &made, Exact);
    }
    if let Some(expected) = kit.find(NATIVE, "source_uv_head") {
        // Behind the excitation table the source's linear layer is drawn: a weight a row and a bias.
        generator.skip(sines.limit() * rows + rows + 1);
        let data = expected.data.iter().map(|_| generator.next_unit()).collect();
        let made = Values { shape: expected.shape.clone(), data };
        report.compare("noise", "native source_uv_head", &expected, &made, Exact);
    }
}
