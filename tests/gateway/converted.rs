//! A checkpoint of CTranslate2, written by the test from the published layout of a small network, and converted back by the
//! program: the same tensors to the bit, and the same words.

use std::collections::BTreeMap;
use std::path::Path;

use safetensors::SafeTensors;
use serde_json::{Value, json};

use super::program::{antiphon, succeeds};

/// Shape and data of a tensor of single precision.
type Tensor = (Vec<usize>, Vec<u8>);

fn tensors(file: &Path) -> BTreeMap<String, Tensor> {
    let bytes = std::fs::read(file).expect("readable");
    let all = SafeTensors::deserialize(&bytes).expect("a checkpoint");
    all.tensors().into_iter().map(|(name, view)| (name, (view.shape().to_vec(), view.data().to_vec()))).collect()
}

/// Their names of what is not fused with others.
fn theirs(name: &str) -> Option<String> {
    let name = name.strip_prefix("model.")?;
    let (module, kind) = name.rsplit_once('.')?;
    let kind = match (module.ends_with("layer_norm"), kind) {
        (true, "weight") => "gamma",
        (true, _) => "beta",
        (false, kind) => kind,
    };
    let (side, rest) = module.split_once('.')?;
    let part = match rest {
        "embed_tokens" => return Some(format!("{side}/embeddings/weight")),
        "embed_positions" => return Some(format!("{side}/position_encodings/encodings")),
        "conv1" | "conv2" | "layer_norm" => rest.to_owned(),
        layer => {
            let (number, part) = layer.strip_prefix("layers.")?.split_once('.')?;
            let part = match part {
                "fc1" => "ffn/linear_0",
                "fc2" => "ffn/linear_1",
                "final_layer_norm" => "ffn/layer_norm",
                "self_attn_layer_norm" => "self_attention/layer_norm",
                "self_attn.out_proj" => "self_attention/linear_1",
                "encoder_attn_layer_norm" => "attention/layer_norm",
                "encoder_attn.q_proj" => "attention/linear_0",
                "encoder_attn.out_proj" => "attention/linear_2",
                _ => return None,
            };
            format!("layer_{number}/{part}")
        }
    };
    Some(format!("{side}/{part}/{kind}"))
}

/// Some layers' tensors one behind the other; a bias that is not there is zero.
fn fused(all: &BTreeMap<String, Tensor>, attention: &str, parts: &[&str], kind: &str) -> Tensor {
    let rows = all[&format!("{attention}.{}.weight", parts[0])].0[0];
    let mut out = (Vec::new(), Vec::new());
    for part in parts {
        match all.get(&format!("{attention}.{part}.{kind}")) {
            Some((shape, data)) => {
                out.0.clone_from(shape);
                out.1.extend_from_slice(data);
            }
            None => out.1.extend(std::iter::repeat_n(0, 4 * rows)),
        }
    }
    out.0[0] = rows * parts.len();
    out
}

/// The network in `from` as CTranslate2 lays it out: see the head of `src/hear/whisper/convert.rs`.
fn write_ct2(from: &Path, to: &Path) {
    let all = tensors(&from.join("model.safetensors"));
    let config: Value =
        serde_json::from_slice(&std::fs::read(from.join("config.json")).expect("readable")).expect("JSON");
    let mut variables: BTreeMap<String, Tensor> =
        all.iter().filter_map(|(name, tensor)| Some((theirs(name)?, tensor.clone()))).collect();
    for (side, attention, parts, name) in [
        ("encoder", "self_attn", &["q_proj", "k_proj", "v_proj"][..], "self_attention/linear_0"),
        ("decoder", "self_attn", &["q_proj", "k_proj", "v_proj"], "self_attention/linear_0"),
        ("decoder", "encoder_attn", &["k_proj", "v_proj"], "attention/linear_1"),
    ] {
        for n in 0..config[format!("{side}_layers")].as_u64().expect("a number") {
            let layer = format!("model.{side}.layers.{n}.{attention}");
            for kind in ["weight", "bias"] {
                variables.insert(format!("{side}/layer_{n}/{name}/{kind}"), fused(&all, &layer, parts, kind));
            }
        }
    }
    let mut file = Vec::new();
    let number = |file: &mut Vec<u8>, n: usize| file.extend(u32::try_from(n).expect("small").to_le_bytes());
    let name = |file: &mut Vec<u8>, name: &str| {
        file.extend((name.len() as u16 + 1).to_le_bytes());
        file.extend_from_slice(name.as_bytes());
        file.push(0);
    };
    let heads = ["encoder", "decoder"].map(|side| {
        (format!("{side}/num_heads"), config[format!("{side}_attention_heads")].as_u64().expect("a number") as u8)
    });
    number(&mut file, 6);
    name(&mut file, "WhisperSpec");
    number(&mut file, 3);
    number(&mut file, variables.len() + heads.len());
    for (key, (shape, data)) in &variables {
        name(&mut file, key);
        file.push(shape.len() as u8);
        shape.iter().for_each(|dim| number(&mut file, *dim));
        // Single precision.
        file.push(0);
        number(&mut file, data.len());
        file.extend_from_slice(data);
    }
    for (key, value) in heads {
        name(&mut file, &key);
        // A scalar, of a signed byte.
        file.extend([0, 1]);
        number(&mut file, 1);
        file.push(value);
    }
    number(&mut file, 1);
    name(&mut file, "decoder/projection/weight");
    name(&mut file, "decoder/embeddings/weight");
    std::fs::create_dir_all(to).expect("made");
    std::fs::write(to.join("model.bin"), file).expect("written");
    let rules = json!({
        "suppress_ids": config["suppress_tokens"], "suppress_ids_begin": config["begin_suppress_tokens"],
        "alignment_heads": [], "lang_ids": [],
    });
    std::fs::write(to.join("config.json"), rules.to_string()).expect("written");
    std::fs::copy(from.join("tokenizer.json"), to.join("tokenizer.json")).expect("copied");
}

#[tokio::test]
async fn a_checkpoint_of_ctranslate2_is_converted_to_the_bit() {
    let folder = tempfile::tempdir().expect("a folder");
    let published = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/whisper");
    write_ct2(&published, &folder.path().join("theirs"));
    succeeds(folder.path(), &["model", "convert", "theirs", "ours"]).await;
    let ours = folder.path().join("ours");
    let (wanted, found) = (tensors(&published.join("model.safetensors")), tensors(&ours.join("model.safetensors")));
    assert_eq!(wanted.keys().collect::<Vec<_>>(), found.keys().collect::<Vec<_>>());
    for (name, tensor) in wanted {
        assert!(found[&name] == tensor, "{name}");
    }
    succeeds(folder.path(), &["model", "verify", "ours"]).await;
    let wav = published.join("audio.wav");
    let words = async |model: &Path| {
        let (model, wav) = (model.to_str().expect("UTF-8"), wav.to_str().expect("UTF-8"));
        succeeds(folder.path(), &["model", "transcribe", model, wav, "--language", "en"]).await
    };
    assert_eq!(words(&ours).await, words(&published).await);

    // And what is missing is named.
    let nothing = antiphon(folder.path(), &["model", "convert", ".", "out"]).await;
    let said = String::from_utf8_lossy(&nothing.stderr).into_owned();
    assert_eq!(nothing.status.code(), Some(1), "{said}");
    assert!(said.contains("model.bin"), "{said}");
}
