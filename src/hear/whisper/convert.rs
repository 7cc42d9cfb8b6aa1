//! `antiphon model convert`: a Whisper checkpoint of CTranslate2 becomes one in the published layout.
//!
//! `faster-whisper` and what is built on it ship their models so. Read are `model.bin` of version 6 with weights of
//! 16 or 32 bits, its `config.json` and `tokenizer.json`.
//!
//! The container, all little-endian: version u32, name of the model's kind, its revision u32, then a u32 count of
//! variables and each of them as name, rank u8, dimensions u32, type u8, bytes u32 and data; then a u32 count of
//! aliases, each two names. A name is a u16 length, which counts the closing NUL, and its bytes.

use std::collections::{BTreeMap, HashMap};
use std::path::Path;

use safetensors::tensor::{Dtype, TensorView, serialize_to_file};
use serde::Deserialize;
use serde_json::{Value, json};

use super::config::LoadError;
use super::verify::WEIGHTS;

const VERSION: u32 = 6;
const KIND: &str = "WhisperSpec";
/// The last layer, which is the vocabulary again.
const TIED: (&str, &str) = ("decoder/projection/weight", "decoder/embeddings/weight");
/// Entries of the smallest vocabulary that knows many languages.
const MULTILINGUAL: usize = 51_865;

/// Reads the checkpoint in `from` and writes it into `to`, with weights as precise as they are. Returns how many
/// tensors there are.
///
/// # Errors
/// A file is missing or is not what this reads, or `to` cannot be written.
pub fn convert(from: &Path, to: &Path) -> Result<usize, LoadError> {
    let path = from.join("model.bin");
    let bytes = std::fs::read(&path).map_err(|e| LoadError::file(&path, e))?;
    let failed = |reason: String| LoadError::file(&path, reason);
    let container = Container::read(&bytes).map_err(failed)?;
    let tensors = container.tensors().map_err(failed)?;
    let theirs = from.join("config.json");
    let rules: Rules = serde_json::from_slice(&std::fs::read(&theirs).map_err(|e| LoadError::file(&theirs, e))?)
        .map_err(|e| LoadError::file(&theirs, e))?;
    let tokenizer = from.join("tokenizer.json");
    let ids = special_ids(&tokenizer)?;
    let files = configuration(&container, &tensors, &rules, &ids).map_err(failed)?;
    std::fs::create_dir_all(to).map_err(|e| LoadError::file(to, e))?;
    for (name, value) in files {
        let path = to.join(name);
        std::fs::write(&path, format!("{value:#}\n")).map_err(|e| LoadError::file(&path, e))?;
    }
    let copy = to.join("tokenizer.json");
    std::fs::copy(&tokenizer, &copy).map_err(|e| LoadError::file(&copy, e))?;
    let path = to.join(WEIGHTS);
    let views = tensors.iter().map(|(name, tensor)| {
        let view = TensorView::new(tensor.dtype, tensor.shape.clone(), tensor.data);
        view.map(|view| (name.as_str(), view)).map_err(|e| LoadError::file(&path, e))
    });
    let views = views.collect::<Result<Vec<_>, _>>()?;
    let format = HashMap::from([("format".to_owned(), "pt".to_owned())]);
    serialize_to_file(views, Some(format), &path).map_err(|e| LoadError::file(&path, e))?;
    Ok(tensors.len())
}

/// A part of the file's data, in its precision.
#[derive(Clone)]
struct Variable<'a> {
    dtype: Dtype,
    shape: Vec<usize>,
    data: &'a [u8],
}

impl<'a> Variable<'a> {
    /// The `index`th of `count` equal parts of its rows.
    fn rows(&self, index: usize, count: usize) -> Result<Self, String> {
        let rows = self.shape.first().copied().unwrap_or_default();
        if !rows.is_multiple_of(count) {
            return Err(format!("{rows} rows are not {count} layers"));
        }
        let size = self.data.len() / count;
        let mut shape = self.shape.clone();
        shape[0] = rows / count;
        Ok(Self { dtype: self.dtype, shape, data: &self.data[index * size..(index + 1) * size] })
    }
}

struct Container<'a> {
    variables: BTreeMap<String, Variable<'a>>,
    /// Single values: sizes and switches.
    scalars: BTreeMap<String, i64>,
}

/// Takes a file apart from its beginning.
struct Cursor<'a>(&'a [u8]);

impl<'a> Cursor<'a> {
    fn take(&mut self, count: usize) -> Result<&'a [u8], String> {
        let (head, rest) = self.0.split_at_checked(count).ok_or("the file ends too early")?;
        self.0 = rest;
        Ok(head)
    }

    fn number<const N: usize>(&mut self) -> Result<usize, String> {
        let bytes = self.take(N)?.iter().rev();
        Ok(bytes.fold(0, |number, byte| number << 8 | usize::from(*byte)))
    }

    fn name(&mut self) -> Result<String, String> {
        let length = self.number::<2>()?;
        let bytes = self.take(length)?;
        let bytes = bytes.strip_suffix(&[0]).unwrap_or(bytes);
        String::from_utf8(bytes.to_vec()).map_err(|_| "a name is no UTF-8".into())
    }
}

impl<'a> Container<'a> {
    fn read(bytes: &'a [u8]) -> Result<Self, String> {
        let mut cursor = Cursor(bytes);
        let version = cursor.number::<4>()?;
        if version != VERSION as usize {
            return Err(format!("version {version} of the container; only {VERSION} is read"));
        }
        let kind = cursor.name()?;
        if kind != KIND {
            return Err(format!("it holds a `{kind}`, not a `{KIND}`"));
        }
        let _revision = cursor.number::<4>()?;
        let (mut variables, mut scalars) = (BTreeMap::new(), BTreeMap::new());
        for _ in 0..cursor.number::<4>()? {
            let name = cursor.name()?;
            let rank = cursor.number::<1>()?;
            let shape = (0..rank).map(|_| cursor.number::<4>()).collect::<Result<Vec<_>, _>>()?;
            let kind = cursor.number::<1>()?;
            let length = cursor.number::<4>()?;
            let data = cursor.take(length)?;
            if shape.is_empty() {
                // Whatever type these are written with, they are whole numbers of their length.
                let negative = data.last().is_some_and(|byte| byte & 0x80 != 0);
                let fill = if negative { -1 } else { 0 };
                let value = data.iter().rev().fold(fill, |value: i64, byte| value << 8 | i64::from(*byte));
                scalars.insert(name, value);
                continue;
            }
            let (dtype, width) = match kind {
                0 => (Dtype::F32, 4),
                4 => (Dtype::F16, 2),
                5 => (Dtype::BF16, 2),
                other => {
                    return Err(format!(
                        "`{name}` has the type {other}: quantised checkpoints are not converted, get one of float16"
                    ));
                }
            };
            let size = shape.iter().try_fold(width, |size: usize, dim| size.checked_mul(*dim));
            if size != Some(length) {
                return Err(format!("`{name}` has {length} bytes, which its shape {shape:?} does not"));
            }
            variables.insert(name, Variable { dtype, shape, data });
        }
        for _ in 0..cursor.number::<4>()? {
            let alias = (cursor.name()?, cursor.name()?);
            if (alias.0.as_str(), alias.1.as_str()) != TIED {
                return Err(format!("`{}` is another name of `{}`, which is not expected", alias.0, alias.1));
            }
        }
        match cursor.0.len() {
            0 => Ok(Self { variables, scalars }),
            left => Err(format!("{left} bytes are left over at its end")),
        }
    }

    /// Every tensor by its published name.
    fn tensors(&self) -> Result<BTreeMap<String, Variable<'a>>, String> {
        let mut left = self.variables.clone();
        let mut out = BTreeMap::new();
        let mut take = |name: String| left.remove(&name).ok_or_else(|| format!("`{name}` is missing"));
        let mut layers = BTreeMap::new();
        for side in ["encoder", "decoder"] {
            let count =
                (0..).take_while(|n| self.variables.contains_key(&format!("{side}/layer_{n}/ffn/linear_0/weight")));
            layers.insert(side, count.count());
        }
        {
            let mut both = |to: String, from: String, kinds: [&str; 2]| {
                out.insert(format!("{to}.weight"), take(format!("{from}/{}", kinds[0]))?);
                out.insert(format!("{to}.bias"), take(format!("{from}/{}", kinds[1]))?);
                Ok::<(), String>(())
            };
            const LINEAR: [&str; 2] = ["weight", "bias"];
            const NORM: [&str; 2] = ["gamma", "beta"];
            for conv in ["conv1", "conv2"] {
                both(format!("model.encoder.{conv}"), format!("encoder/{conv}"), LINEAR)?;
            }
            for (side, count) in &layers {
                both(format!("model.{side}.layer_norm"), format!("{side}/layer_norm"), NORM)?;
                for n in 0..*count {
                    let (to, from) = (format!("model.{side}.layers.{n}"), format!("{side}/layer_{n}"));
                    both(format!("{to}.fc1"), format!("{from}/ffn/linear_0"), LINEAR)?;
                    both(format!("{to}.fc2"), format!("{from}/ffn/linear_1"), LINEAR)?;
                    both(format!("{to}.final_layer_norm"), format!("{from}/ffn/layer_norm"), NORM)?;
                    let own = format!("{from}/self_attention");
                    both(format!("{to}.self_attn_layer_norm"), format!("{own}/layer_norm"), NORM)?;
                    both(format!("{to}.self_attn.out_proj"), format!("{own}/linear_1"), LINEAR)?;
                    if *side == "decoder" {
                        let heard = format!("{from}/attention");
                        both(format!("{to}.encoder_attn_layer_norm"), format!("{heard}/layer_norm"), NORM)?;
                        both(format!("{to}.encoder_attn.q_proj"), format!("{heard}/linear_0"), LINEAR)?;
                        both(format!("{to}.encoder_attn.out_proj"), format!("{heard}/linear_2"), LINEAR)?;
                    }
                }
            }
        }
        out.insert("model.decoder.embed_tokens.weight".into(), take(TIED.1.into())?);
        for (side, count) in &layers {
            let name = format!("model.{side}.embed_positions.weight");
            out.insert(name, take(format!("{side}/position_encodings/encodings"))?);
            for n in 0..*count {
                let (to, from) = (format!("model.{side}.layers.{n}"), format!("{side}/layer_{n}"));
                // Layers with the same input are one, their rows behind each other.
                let mut fused = vec![("self_attn", "self_attention/linear_0", &["q_proj", "k_proj", "v_proj"][..])];
                if *side == "decoder" {
                    fused.push(("encoder_attn", "attention/linear_1", &["k_proj", "v_proj"][..]));
                }
                for (attention, source, parts) in fused {
                    let weight = take(format!("{from}/{source}/weight"))?;
                    let bias = take(format!("{from}/{source}/bias"))?;
                    for (index, part) in parts.iter().enumerate() {
                        let name = format!("{to}.{attention}.{part}");
                        out.insert(format!("{name}.weight"), weight.rows(index, parts.len())?);
                        let bias = bias.rows(index, parts.len())?;
                        if *part != "k_proj" {
                            out.insert(format!("{name}.bias"), bias);
                        } else if bias.data.iter().any(|byte| *byte != 0) {
                            return Err(format!("`{name}` has a bias, which this network has no place for"));
                        }
                    }
                }
            }
        }
        match left.keys().next() {
            None => Ok(out),
            Some(name) => Err(format!("`{name}` is no part of this network")),
        }
    }
}

/// What CTranslate2's `config.json` says of decoding.
#[derive(Deserialize)]
struct Rules {
    suppress_ids: Vec<i64>,
    suppress_ids_begin: Vec<i64>,
    #[serde(default)]
    lang_ids: Vec<u32>,
    #[serde(default)]
    alignment_heads: Value,
}

fn special_ids(path: &Path) -> Result<BTreeMap<String, u32>, LoadError> {
    #[derive(Deserialize)]
    struct File {
        added_tokens: Vec<Token>,
    }
    #[derive(Deserialize)]
    struct Token {
        id: u32,
        content: String,
    }
    let text = std::fs::read(path).map_err(|e| LoadError::file(path, e))?;
    let file: File = serde_json::from_slice(&text).map_err(|e| LoadError::file(path, e))?;
    Ok(file.added_tokens.into_iter().map(|token| (token.content, token.id)).collect())
}

/// The three files of configuration.
fn configuration(
    container: &Container<'_>,
    tensors: &BTreeMap<String, Variable<'_>>,
    rules: &Rules,
    ids: &BTreeMap<String, u32>,
) -> Result<[(&'static str, Value); 3], String> {
    let shape = |name: &str, axis: usize| {
        let tensor = tensors.get(name).and_then(|tensor| tensor.shape.get(axis).copied());
        tensor.ok_or_else(|| format!("`{name}` is missing"))
    };
    let id = |name: &str| ids.get(name).copied().ok_or_else(|| format!("tokenizer.json has no {name}"));
    let heads = |side: &str| {
        let name = format!("{side}/num_heads");
        container.scalars.get(&name).copied().ok_or_else(|| format!("`{name}` is missing"))
    };
    let layers = |side: &str| {
        let last = format!("model.{side}.layers.");
        tensors.keys().filter(|name| name.starts_with(&last) && name.ends_with(".fc1.weight")).count()
    };
    let vocabulary = shape("model.decoder.embed_tokens.weight", 0)?;
    let (start, end, silent) = (id("<|startoftranscript|>")?, id("<|endoftext|>")?, id("<|notimestamps|>")?);
    let bands = shape("model.encoder.conv1.weight", 1)?;
    let multilingual = vocabulary >= MULTILINGUAL;
    let positions = shape("model.decoder.embed_positions.weight", 0)?;
    let sizes = json!({
        "activation_function": "gelu",
        "architectures": ["WhisperForConditionalGeneration"],
        "begin_suppress_tokens": rules.suppress_ids_begin,
        "d_model": shape("model.decoder.embed_tokens.weight", 1)?,
        "decoder_attention_heads": heads("decoder")?,
        "decoder_ffn_dim": shape("model.decoder.layers.0.fc1.weight", 0)?,
        "decoder_layers": layers("decoder"),
        "decoder_start_token_id": start,
        "encoder_attention_heads": heads("encoder")?,
        "encoder_ffn_dim": shape("model.encoder.layers.0.fc1.weight", 0)?,
        "encoder_layers": layers("encoder"),
        "eos_token_id": end,
        "is_encoder_decoder": true,
        "max_source_positions": shape("model.encoder.embed_positions.weight", 0)?,
        "max_target_positions": positions,
        "model_type": "whisper",
        "num_mel_bins": bands,
        "scale_embedding": container.scalars.get("decoder/scale_embeddings").is_some_and(|value| *value != 0),
        "suppress_tokens": rules.suppress_ids,
        "vocab_size": vocabulary,
    });
    let mut generation = json!({
        "alignment_heads": rules.alignment_heads,
        "begin_suppress_tokens": rules.suppress_ids_begin,
        "decoder_start_token_id": start,
        "eos_token_id": end,
        "is_multilingual": multilingual,
        "max_initial_timestamp_index": 50,
        "max_length": positions,
        "no_timestamps_token_id": silent,
        "suppress_tokens": rules.suppress_ids,
    });
    if multilingual {
        let languages = ids.iter().filter(|(_, id)| rules.lang_ids.contains(id));
        generation["lang_to_id"] = languages.map(|(name, id)| (name.clone(), json!(id))).collect();
        generation["task_to_id"] = json!({"transcribe": id("<|transcribe|>")?, "translate": id("<|translate|>")?});
    }
    let features = json!({
        "chunk_length": 30,
        "feature_extractor_type": "WhisperFeatureExtractor",
        "feature_size": bands,
        "hop_length": 160,
        "n_fft": 400,
        "n_samples": 480_000,
        "nb_max_frames": 3_000,
        "padding_side": "right",
        "padding_value": 0.0,
        "sampling_rate": 16_000,
    });
    Ok([("config.json", sizes), ("generation_config.json", generation), ("preprocessor_config.json", features)])
}

#[cfg(test)]
mod tests {
    use super::*;

    fn name(text: &str) -> Vec<u8> {
        [&(text.len() as u16 + 1).to_le_bytes()[..], text.as_bytes(), &[0]].concat()
    }

    fn container(version: u32, kind: &str, type_id: u8) -> Vec<u8> {
        let number = |n: u32| n.to_le_bytes().to_vec();
        let tensor = [name("a"), vec![2], number(3), number(1), vec![type_id], number(6), vec![1, 0, 2, 0, 3, 0]];
        let scalar = [name("encoder/num_heads"), vec![0, 1], number(1), vec![6]];
        let parts = [
            vec![number(version), name(kind), number(3), number(2)],
            tensor.into(),
            scalar.into(),
            vec![number(1), name(TIED.0), name(TIED.1)],
        ];
        parts.concat().concat()
    }

    #[test]
    fn a_container_is_read_and_what_it_is_not_is_told() {
        let good = container(6, KIND, 4);
        let read = Container::read(&good).expect("readable");
        assert_eq!(read.scalars["encoder/num_heads"], 6);
        let third = read.variables["a"].rows(2, 3).expect("three rows");
        assert_eq!((third.shape, third.data), (vec![1, 1], &[3, 0][..]));
        assert!(read.variables["a"].rows(0, 2).is_err());
        assert!(read.tensors().is_err(), "it is no whole network");
        for (bytes, why) in [
            (container(5, KIND, 4), "version 5"),
            (container(6, "TransformerSpec", 4), "TransformerSpec"),
            (container(6, KIND, 1), "quantised"),
            (container(6, KIND, 0), "bytes"),
            (good[..good.len() - 3].to_vec(), "too early"),
            ([good.clone(), vec![0]].concat(), "left over"),
        ] {
            let error = Container::read(&bytes).err().expect(why);
            assert!(error.contains(why), "{error}");
        }
    }
}
