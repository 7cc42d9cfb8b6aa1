//! `antiphon model verify DIR` for Whisper: everything that is wrong with a checkpoint directory, in one report.
//!
//! Reads the header of the weights only.

use std::collections::BTreeMap;
use std::fmt;
use std::fs::File;
use std::io::Read;
use std::path::Path;

use serde::Deserialize;

use super::config::{Config, LoadError, Sizes};
use super::tokens::Tokens;

/// The file of the weights.
pub const WEIGHTS: &str = "model.safetensors";
/// The files of a checkpoint that recognition needs.
pub const NEEDED: [&str; 3] = ["config.json", "tokenizer.json", WEIGHTS];
/// The files it uses where they are there.
pub const WELCOME: [&str; 2] = ["generation_config.json", "preprocessor_config.json"];
/// The published checkpoint to begin with: 39 million parameters, English only.
pub const DEFAULT_ID: &str = "openai/whisper-tiny.en";

/// The last layer, which is the vocabulary again; some files hold it twice.
const TIED: &str = "proj_out.weight";
/// A header is some hundred bytes a tensor.
const MAX_HEADER: u64 = 64 << 20;

/// What a check of a directory found, one line a fault.
pub type Report = crate::synth::cosyvoice::verify::Report<String>;

/// Checks the directory of a Whisper checkpoint.
pub fn verify(dir: &Path) -> Report {
    let mut report = Report::default();
    let config = match Config::load(dir) {
        Ok(config) => config,
        Err(error) => {
            report.problems.push(error.to_string());
            return report;
        }
    };
    if let Err(error) = Tokens::load(dir, &config) {
        report.problems.push(error.to_string());
    }
    let path = dir.join(WEIGHTS);
    let mut found = match header(&path) {
        Ok(found) => found,
        Err(error) => {
            report.problems.push(error.to_string());
            return report;
        }
    };
    for (name, shape) in layout(&config.sizes) {
        report.tensors += 1;
        report.values += shape.iter().product::<usize>() as u64;
        match found.remove(&name) {
            None => report.problems.push(format!("`{name}`: expected {shape:?}, found none")),
            Some(tensor) if tensor.shape != shape => {
                report.problems.push(format!("`{name}`: expected {shape:?}, found {:?}", tensor.shape));
            }
            Some(tensor) if !matches!(tensor.dtype.as_str(), "F32" | "F16" | "BF16") => {
                report.problems.push(format!("`{name}`: expected F32, F16 or BF16, found {}", tensor.dtype));
            }
            Some(_) => {}
        }
    }
    found.remove(TIED);
    report.problems.extend(found.keys().map(|name| format!("`{name}`: no part of this network; are the sizes right?")));
    report
}

/// Name and shape of every tensor.
pub(super) fn layout(sizes: &Sizes) -> Vec<(String, Vec<usize>)> {
    let width = sizes.d_model;
    let mut all = vec![
        ("model.encoder.conv1.weight".to_owned(), vec![width, sizes.num_mel_bins, 3]),
        ("model.encoder.conv1.bias".to_owned(), vec![width]),
        ("model.encoder.conv2.weight".to_owned(), vec![width, width, 3]),
        ("model.encoder.conv2.bias".to_owned(), vec![width]),
        ("model.encoder.embed_positions.weight".to_owned(), vec![sizes.max_source_positions, width]),
        ("model.decoder.embed_positions.weight".to_owned(), vec![sizes.max_target_positions, width]),
        ("model.decoder.embed_tokens.weight".to_owned(), vec![sizes.vocab_size, width]),
    ];
    let sides = [
        ("encoder", sizes.encoder_layers, sizes.encoder_ffn_dim, &["self_attn"][..]),
        ("decoder", sizes.decoder_layers, sizes.decoder_ffn_dim, &["self_attn", "encoder_attn"][..]),
    ];
    for (side, layers, inner, attentions) in sides {
        let mut add = |name: String, rows: usize, columns: Option<usize>, bias: bool| {
            let shape = [Some(rows), columns].into_iter().flatten().collect();
            all.push((format!("model.{side}.{name}.weight"), shape));
            if bias {
                all.push((format!("model.{side}.{name}.bias"), vec![rows]));
            }
        };
        for layer in 0..layers {
            for attention in attentions {
                for part in ["q_proj", "k_proj", "v_proj", "out_proj"] {
                    add(format!("layers.{layer}.{attention}.{part}"), width, Some(width), part != "k_proj");
                }
                add(format!("layers.{layer}.{attention}_layer_norm"), width, None, true);
            }
            add(format!("layers.{layer}.fc1"), inner, Some(width), true);
            add(format!("layers.{layer}.fc2"), width, Some(inner), true);
            add(format!("layers.{layer}.final_layer_norm"), width, None, true);
        }
        add("layer_norm".into(), width, None, true);
    }
    all
}

#[derive(Deserialize)]
struct Entry {
    dtype: String,
    shape: Vec<usize>,
    data_offsets: [u64; 2],
}

/// The list of tensors at the beginning of a safetensors file, which must be as long as the list says.
fn header(path: &Path) -> Result<BTreeMap<String, Entry>, LoadError> {
    let failed = |reason: &dyn fmt::Display| LoadError::file(path, reason);
    let mut file = File::open(path).map_err(|e| failed(&e))?;
    let size = file.metadata().map_err(|e| failed(&e))?.len();
    let mut length = [0; 8];
    file.read_exact(&mut length).map_err(|e| failed(&e))?;
    let length = u64::from_le_bytes(length);
    if length > MAX_HEADER {
        return Err(failed(&"this is no safetensors file"));
    }
    let mut text = vec![0; length as usize];
    file.read_exact(&mut text).map_err(|e| failed(&e))?;
    let mut all: BTreeMap<String, serde_json::Value> = serde_json::from_slice(&text).map_err(|e| failed(&e))?;
    all.remove("__metadata__");
    let read = |(name, value)| Ok((name, serde_json::from_value::<Entry>(value).map_err(|e| failed(&e))?));
    let entries = all.into_iter().map(read).collect::<Result<BTreeMap<_, _>, LoadError>>()?;
    let data = entries.values().map(|entry| entry.data_offsets[1]).max().unwrap_or_default();
    let expected = data.saturating_add(length + 8);
    if size != expected {
        return Err(failed(&format!("{size} bytes long, its list of tensors asks for {expected}")));
    }
    Ok(entries)
}
