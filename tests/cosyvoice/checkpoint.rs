//! Checkpoint files: what is read, what is refused, and that nothing in them can do more than fail.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use antiphon::synth::cosyvoice::archive;
use antiphon::synth::cosyvoice::backend::SineNoise;
use antiphon::synth::cosyvoice::checkpoint::{Part, TensorFile, find};
use antiphon::synth::cosyvoice::config::Config;
use antiphon::synth::cosyvoice::layout;
use antiphon::synth::cosyvoice::noise::{SineTable, flow_table};
use antiphon::synth::cosyvoice::pickle;
use antiphon::synth::cosyvoice::random::{self, Size};
use antiphon::synth::cosyvoice::text::{Tokenizer, inlined, normalize};
use antiphon::synth::cosyvoice::verify::{self, Report};
use antiphon::synth::cosyvoice::voices::spk2info;
use antiphon::synth::cosyvoice::{CosyVoice, Settings};
use antiphon::turn::{Markup, Phonemes};
use proptest::prelude::*;
use safetensors::tensor::{Dtype, TensorView};

fn golden() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/golden/cosyvoice3")
}

fn tiny() -> tempfile::TempDir {
    let dir = tempfile::tempdir().expect("temp dir");
    random::write(dir.path(), Size::Tiny, 3, |_, _| ()).expect("written");
    dir
}

/// A tensor in memory: shape and values.
type Tensors = BTreeMap<String, (Vec<usize>, Vec<f32>)>;

fn tensors(dir: &Path, part: Part) -> Tensors {
    let file = TensorFile::open(&find(dir, part.stem())).expect("opens");
    let read = |key: &str| {
        let shape = file.shape(key).expect("usable").to_vec();
        (key.to_string(), (shape.clone(), file.floats(key, &shape).expect("floats")))
    };
    file.entries().map(|(key, _)| read(key)).collect()
}

fn save_pt(path: &Path, tensors: &Tensors) {
    let entries: Vec<archive::Tensor> = tensors
        .iter()
        .enumerate()
        .map(|(storage, (key, (shape, _)))| archive::Tensor { key: key.clone(), shape: shape.clone(), storage })
        .collect();
    let values: Vec<&Vec<f32>> = tensors.values().map(|(_, v)| v).collect();
    let fill = |n: usize, bytes: &mut Vec<u8>| values[n].iter().for_each(|v| bytes.extend(v.to_le_bytes()));
    archive::write(path, &entries, fill).expect("written");
}

fn save_safetensors(path: &Path, tensors: &Tensors, element: Dtype) {
    let bytes: Vec<(String, Vec<usize>, Vec<u8>)> = tensors
        .iter()
        .map(|(key, (shape, values))| {
            let bytes = values.iter().flat_map(|&v| match element {
                Dtype::F16 => half::f16::from_f32(v).to_le_bytes().to_vec(),
                Dtype::I32 => (v as i32).to_le_bytes().to_vec(),
                _ => v.to_le_bytes().to_vec(),
            });
            (key.clone(), shape.clone(), bytes.collect())
        })
        .collect();
    let views = bytes.iter().map(|(k, s, b)| (k.clone(), TensorView::new(element, s.clone(), b).expect("fits")));
    safetensors::serialize_to_file(views, None, path).expect("written");
}

fn messages(report: &Report) -> String {
    report.to_string()
}

#[test]
fn the_layout_is_that_of_the_original() {
    let dir = tempfile::tempdir().expect("temp dir");
    random::write_texts(dir.path(), Size::Full).expect("written");
    let config = Config::load(dir.path()).expect("sizes");
    let made: Vec<String> = layout::expected(&config)
        .into_iter()
        .map(|t| {
            let shape: Vec<String> = t.shape.iter().map(usize::to_string).collect();
            format!("{}.pt\t{}\t{}\tfloat32", t.part.stem(), t.key, shape.join("x"))
        })
        .collect();
    let stored = fs::read_to_string(golden().join("keys_full.tsv")).expect("readable");
    let stored: Vec<&str> = stored.lines().skip(1).collect();
    assert_eq!(stored.len(), 951);
    assert_eq!(made, stored);
    let tokenizer = Tokenizer::load(dir.path()).expect("tokenizer");
    assert_eq!(tokenizer.end_of_prompt(), 151_646);
    assert_eq!(tokenizer.id("[ǜ]"), Some(151_923));
    // Phonemes that a text gives are the model's own tokens, whatever the text may not write.
    let text = "Say tomato [AA1] now.";
    let espeak = |mnemonics: &str| Phonemes::Espeak(mnemonics.to_owned());
    let said = inlined(text, &[(4..10, espeak("t@m'A:t@U"))]);
    let ids = tokenizer.encode_words(&said, Markup::None).expect("a text");
    let phones: Vec<u32> = ids.iter().copied().filter(|id| (151_664..=151_747).contains(id)).collect();
    assert_eq!(phones, [151_733, 151_673, 151_718, 151_666, 151_733, 151_722]);
    assert_eq!(inlined(text, &[(4..10, espeak("ts."))]), text, "the model lacks it");
    // Pinyin as well, in place of the characters: what an author writes as tags of the model is the same to it.
    let text = "高管也对报道给予好评。";
    let at = text.find("给").expect("there");
    let said = inlined(text, &[(at..at + 3, Phonemes::Pinyin { pinyin: "ji3".into() })]);
    let ids = tokenizer.encode_words(&normalize(&said), Markup::None).expect("a text");
    assert_eq!(ids, tokenizer.encode("高管也对报道[j][ǐ]予好评。").expect("a text"));
    let special: Vec<u32> = ids.into_iter().filter(|id| *id > 151_646).collect();
    assert_eq!(special, [tokenizer.id("[j]"), tokenizer.id("[ǐ]")].map(|id| id.expect("a token")));
}

#[test]
fn full_size_noise_is_the_original_s() {
    let dir = tempfile::tempdir().expect("temp dir");
    random::write_texts(dir.path(), Size::Full).expect("written");
    let config = Config::load(dir.path()).expect("sizes");
    let file = TensorFile::open(&golden().join("native_noise_full.safetensors")).expect("opens");
    let table = flow_table(&config);
    let columns = config.noise_frames();
    for (name, from) in [("rand_noise_cols0_64", 0), ("rand_noise_cols14984_15000", 14_984)] {
        let shape = file.shape(name).expect("there").to_vec();
        let expected = file.floats(name, &shape).expect("floats");
        let width = shape[shape.len() - 1];
        let made = table.chunks_exact(columns).flat_map(|row| &row[from..from + width]);
        let worst = made.zip(expected.iter()).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        assert!(worst <= 1e-6, "{name}: {worst}");
    }
    let mut sines = SineTable::new(&config, SineNoise::Native);
    let rows = sines.rows();
    let head = file.floats("sine_waves_rows0_480", file.shape("sine_waves_rows0_480").expect("there")).expect("floats");
    assert_eq!(sines.prefix(head.len() / rows), &*head);
    let index = file.integers("sine_waves_row_index").expect("integers");
    let expected = file
        .floats("sine_waves_rows_at_index", file.shape("sine_waves_rows_at_index").expect("there"))
        .expect("floats");
    for (row, expected) in index.iter().zip(expected.chunks_exact(rows)).filter(|(r, _)| **r < 2_000_000) {
        let row = *row as usize;
        assert_eq!(&sines.prefix(row + 1)[row * rows..], expected, "row {row}");
    }
}

#[test]
fn both_file_formats_and_spellings_hold_the_same_model() {
    let dir = tiny();
    let path = dir.path();
    for part in Part::ALL {
        let mut all = tensors(path, part);
        if part == Part::Hift {
            // As older tools write it: inside a wrapper, with the old names of weight norm.
            all = all
                .into_iter()
                .map(|(key, tensor)| {
                    let key = key
                        .replace("parametrizations.weight.original0", "weight_g")
                        .replace("parametrizations.weight.original1", "weight_v");
                    (format!("generator.{key}"), tensor)
                })
                .collect();
            save_pt(&path.join("hift.pt"), &all);
            continue;
        }
        all.remove(layout::LM_HEAD);
        fs::remove_file(path.join(format!("{}.pt", part.stem()))).expect("removed");
        save_safetensors(&path.join(format!("{}.safetensors", part.stem())), &all, Dtype::F32);
    }
    let report = verify::verify(path, "llm");
    assert!(report.passed(), "{report}");
    CosyVoice::load_cpu(path, Default::default(), Settings::default()).expect("loads");
}

#[test]
fn weight_norm_folds_the_same_from_every_spelling() {
    let dir = tiny();
    let file = TensorFile::open(&dir.path().join("hift.pt")).expect("opens");
    let shape = [24, 80, 5];
    let (folded, bias) = file.convolution("conv_pre", shape).expect("folds");
    let mut plain = Tensors::new();
    plain.insert("conv_pre.weight".into(), (shape.to_vec(), folded.clone()));
    plain.insert("conv_pre.bias".into(), (vec![24], bias));
    let path = dir.path().join("plain.pt");
    save_pt(&path, &plain);
    assert_eq!(TensorFile::open(&path).expect("opens").convolution("conv_pre", shape).expect("reads").0, folded);
}

#[test]
fn a_file_that_is_written_to_is_told_and_read_no_further() {
    let shape = [24, 80, 5];
    for format in ["pt", "safetensors"] {
        for (how, length) in [("cut short", Some(100)), ("written over", None)] {
            let dir = tiny();
            let path = dir.path().join(format!("changed.{format}"));
            let mut all = Tensors::new();
            all.insert("conv_pre.weight".into(), (shape.to_vec(), vec![0.5; 24 * 80 * 5]));
            if format == "pt" {
                save_pt(&path, &all)
            } else {
                save_safetensors(&path, &all, Dtype::F32)
            }
            let handle = fs::OpenOptions::new().write(true).open(&path).expect("opens");
            handle.set_modified(std::time::UNIX_EPOCH).expect("long ago");
            let file = TensorFile::open(&path).expect("opens");
            assert!(file.floats("conv_pre.weight", &shape).expect("whole").iter().all(|&v| v == 0.5));
            // Replaced by another, the one that is open stays what it is.
            let beside = dir.path().join("beside");
            fs::hard_link(&path, &beside).expect("linked");
            fs::remove_file(&beside).expect("removed");
            assert!(file.floats("conv_pre.weight", &shape).is_ok());
            match length {
                Some(length) => handle.set_len(length).expect("cut"),
                None => std::os::unix::fs::FileExt::write_all_at(&handle, &[9; 4096], 100).expect("written"),
            }
            let error = file.floats("conv_pre.weight", &shape).expect_err(how).to_string();
            assert!(error.contains("was written to") && error.contains("changed."), "{format}, {how}: {error}");
        }
    }
}

#[test]
fn everything_wrong_is_in_one_report() {
    let dir = tiny();
    let path = dir.path();
    let mut flow = tensors(path, Part::Flow);
    flow.remove("spk_embed_affine_layer.bias");
    flow.insert("surplus".into(), (vec![2], vec![0.0, 0.0]));
    let (shape, _) = flow.get_mut("input_embedding.weight").expect("there");
    shape.swap(0, 1);
    flow.get_mut("decoder.estimator.proj_out.weight").expect("there").1[3] = f32::NAN;
    flow.get_mut("decoder.estimator.proj_out.bias").expect("there").1[0] = f32::INFINITY;
    save_pt(&path.join("flow.pt"), &flow);
    let hift = tensors(path, Part::Hift);
    fs::remove_file(path.join("hift.pt")).expect("removed");
    save_safetensors(&path.join("hift.safetensors"), &hift, Dtype::I32);
    let report = verify::verify(path, "llm");
    let text = messages(&report);
    for part in [
        "flow.pt: `spk_embed_affine_layer.bias`: expected [80], found nothing",
        "flow.pt: `surplus`: expected nothing, found a tensor",
        "flow.pt: `input_embedding.weight`: expected shape [243, 80], found shape [80, 243]",
        "flow.pt: `decoder.estimator.proj_out.weight`: expected finite values, found 1 that are",
        "flow.pt: `decoder.estimator.proj_out.bias`: expected finite values",
        "hift.safetensors: `conv_pre.bias`: expected float32, float16 or bfloat16, found int32",
    ] {
        assert!(text.contains(part), "{part:?} is not in\n{text}");
    }
    let error = CosyVoice::load_cpu(path, Default::default(), Settings::default()).err().expect("refused").to_string();
    assert!(error.contains("surplus") && error.contains("int32"), "loading gives the same report: {error}");
}

#[test]
fn swapped_keys_are_found_where_shapes_differ() {
    let dir = tiny();
    let path = dir.path();
    let mut llm = tensors(path, Part::Llm);
    let (a, b) = ("llm.model.model.layers.0.mlp.down_proj.weight", "llm.model.model.layers.0.mlp.up_proj.weight");
    let (down, up) = (llm.remove(a).expect("there"), llm.remove(b).expect("there"));
    llm.insert(a.into(), up);
    llm.insert(b.into(), down);
    save_pt(&path.join("llm.pt"), &llm);
    let text = messages(&verify::verify(path, "llm"));
    assert!(text.contains(a) && text.contains(b), "{text}");
}

/// A pickle in an archive, as `flow.pt`.
fn with_pickle(dir: &Path, pickle: &[u8]) -> String {
    let path = dir.join("flow.pt");
    let mut bytes = fs::read(&path).expect("readable");
    // The first entry is the pickle; what is shorter is filled with opcodes that push nothing lasting.
    let start = bytes.windows(2).position(|w| w == [0x80, 2]).expect("a pickle");
    bytes[start..start + pickle.len()].copy_from_slice(pickle);
    fs::write(&path, bytes).expect("written");
    messages(&verify::verify(dir, "llm"))
}

#[test]
fn foreign_pickles_are_data_and_run_nothing() {
    let marker = tempfile::tempdir().expect("temp dir").path().join("ran");
    let shell = format!("cos\nsystem\n(X\x0c\0\0\0touch {}\ntR.", marker.display());
    let bomb: Vec<u8> = {
        // Each tuple holds the one before twice: 2^60 leaves if anything were copied or walked.
        let mut bytes = vec![0x80, 2, b')', b'q', 0];
        for n in 0..60u8 {
            bytes.extend([b'h', n, b'h', n, 0x86, b'q', n + 1]);
        }
        bytes.push(b'.');
        bytes
    };
    let cases: [(&str, Vec<u8>, &str); 7] = [
        ("a call of os.system", [b"\x80\x02", shell.as_bytes()].concat(), "expected a readable list"),
        ("an exponential tuple", bomb, "expected a readable list"),
        ("an unknown opcode", b"\x80\x02\xff.".to_vec(), "opcode 0xff"),
        ("an empty stack", b"\x80\x02R.".to_vec(), "stack underflow"),
        (
            "a builder without arguments",
            b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n)R.".to_vec(),
            "holds no dictionary",
        ),
        ("a long string", b"\x80\x02X\xff\xff\xff\x7f.".to_vec(), "cut off"),
        (
            "another object",
            b"\x80\x02cbuiltins\neval\nX\x01\0\0\x001\x85R.".to_vec(),
            "`builtins.eval` is not a tensor builder",
        ),
    ];
    for (name, pickle, expected) in cases {
        let dir = tiny();
        let text = with_pickle(dir.path(), &pickle);
        assert!(text.contains(expected), "{name}: {text}");
    }
    assert!(!marker.exists());
}

/// An input that is refused at its first byte teaches a fuzzer nothing.
#[test]
fn the_fuzzer_s_corpus_of_pickles_is_read_to_its_end() {
    let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fuzz/corpus/pickle");
    for entry in fs::read_dir(corpus).expect("a corpus") {
        let path = entry.expect("an entry").path();
        let mut bytes = fs::read(&path).expect("readable");
        if path.extension().is_some_and(|ending| ending == "pkl") {
            bytes = zip(&[("a/data.pkl".to_owned(), bytes)]);
        }
        if let Err(reason) = pickle::read(&bytes[..]) {
            panic!("{}: {reason}", path.display());
        }
    }
}

#[test]
fn a_shape_that_overflows_behind_no_elements_is_read() {
    let mut bytes = b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n((X\x07\0\0\0storagectorch\nFloatStorage\n".to_vec();
    bytes.extend(b"X\x01\0\0\x000X\x03\0\0\0cpuK\0tQK\0");
    // No elements, in rows of 2^40 times 2^40.
    for _ in ["shape", "strides"] {
        bytes.extend(b"(K\0\x8a\x06\0\0\0\0\0\x01\x8a\x06\0\0\0\0\0\x01t");
    }
    bytes.extend(b"\x89ccollections\nOrderedDict\n)RtR.");
    let archive = zip(&[("a/data.pkl".to_owned(), bytes), ("a/data/0".to_owned(), Vec::new())]);
    let read = pickle::read(&archive[..]).expect("a pickle");
    let tensor = read.tensor(&read.root).expect("a tensor").as_ref().expect("that fits");
    assert_eq!((&tensor.shape[..], tensor.bytes.len()), (&[0, 1 << 40, 1 << 40][..], 0));
}

#[test]
fn compressed_archives_are_refused_unopened() {
    let dir = tiny();
    let path = dir.path().join("hift.pt");
    let mut bytes = fs::read(&path).expect("readable");
    // Claim in the directory that the last entry is deflated to almost nothing, as a zip bomb does.
    let at = bytes.windows(4).rposition(|w| w == b"PK\x01\x02").expect("a directory entry");
    bytes[at + 10] = 8;
    bytes[at + 24..at + 28].copy_from_slice(&u32::MAX.to_le_bytes());
    fs::write(&path, bytes).expect("written");
    let text = messages(&verify::verify(dir.path(), "llm"));
    assert!(text.contains("compressed or encrypted"), "{text}");
}

#[test]
fn truncated_files_are_named() {
    for part in Part::ALL {
        let dir = tiny();
        let path = dir.path().join(format!("{}.pt", part.stem()));
        let bytes = fs::read(&path).expect("readable");
        for share in [0, 1, 50, 99] {
            fs::write(&path, &bytes[..bytes.len() * share / 100]).expect("written");
            let report = verify::verify(dir.path(), "llm");
            assert!(report.problems.iter().any(|p| p.file == path), "{report}");
        }
    }
}

#[test]
fn a_directory_without_a_checkpoint_says_so() {
    let dir = tempfile::tempdir().expect("temp dir");
    assert!(messages(&verify::verify(dir.path(), "llm")).contains("cosyvoice3.yaml"));
    let dir = tiny();
    fs::remove_file(dir.path().join("hift.pt")).expect("removed");
    fs::remove_file(dir.path().join("CosyVoice-BlankEN/merges.txt")).expect("removed");
    let text = messages(&verify::verify(dir.path(), "llm"));
    assert!(text.contains("hift.pt") && text.contains("merges.txt"), "{text}");
}

#[test]
fn voices_saved_by_the_original_are_read() {
    let dir = tiny();
    let config = Config::load(dir.path()).expect("sizes");
    let tokenizer = Tokenizer::load(dir.path()).expect("tokenizer");
    let ids = tokenizer.encode("You are a helpful assistant.<|endofprompt|>The spoken words.").expect("ids");
    let path = dir.path().join("spk2info.pt");
    let tokens: Vec<i64> = (0..20).collect();
    let mel: Vec<f32> = (0..41 * 80).map(|n| n as f32 / 1000.0).collect();
    fs::write(&path, saved_voice("anna", &tokens, &mel, &[0.25; 192], &ids)).expect("written");
    let (voices, refused) = spk2info(&path, &tokenizer, &config).expect("reads");
    assert_eq!(refused, Vec::<String>::new());
    let voice = &voices["anna"];
    assert_eq!(voice.transcript, "The spoken words.");
    assert_eq!((voice.tokens.len(), voice.mel.len()), (20, 40 * 80));
    assert!(voice.to_bytes().len() > 40 * 80 * 4, "it can be written as a voice file");
    let engine = CosyVoice::load_cpu(dir.path(), Default::default(), Settings::default()).expect("loads");
    assert!(antiphon::synth::Synthesizer::voices(&engine).iter().any(|v| v.name == "anna"));
}

/// A `spk2info.pt`: a dictionary of one dictionary, as `torch.save` pickles it.
fn saved_voice(name: &str, tokens: &[i64], mel: &[f32], speaker: &[f32], text: &[u32]) -> Vec<u8> {
    let text: Vec<i32> = text.iter().map(|&t| t as i32).collect();
    let fields: [(&str, &str, Vec<usize>, Vec<u8>); 4] = [
        (
            "flow_prompt_speech_token",
            "LongStorage",
            vec![1, tokens.len()],
            tokens.iter().flat_map(|v| v.to_le_bytes()).collect(),
        ),
        (
            "prompt_speech_feat",
            "FloatStorage",
            vec![1, mel.len() / 80, 80],
            mel.iter().flat_map(|v| v.to_le_bytes()).collect(),
        ),
        (
            "flow_embedding",
            "FloatStorage",
            vec![1, speaker.len()],
            speaker.iter().flat_map(|v| v.to_le_bytes()).collect(),
        ),
        ("prompt_text", "IntStorage", vec![1, text.len()], text.iter().flat_map(|v| v.to_le_bytes()).collect()),
    ];
    let put = |out: &mut Vec<u8>, text: &str| {
        out.push(b'X');
        out.extend((text.len() as u32).to_le_bytes());
        out.extend(text.as_bytes());
    };
    let int = |out: &mut Vec<u8>, v: usize| {
        out.push(b'J');
        out.extend((v as i32).to_le_bytes());
    };
    let mut pickle = vec![0x80, 2, b'}'];
    put(&mut pickle, name);
    pickle.extend(b"}(");
    for (n, (key, class, shape, bytes)) in fields.iter().enumerate() {
        put(&mut pickle, key);
        pickle.extend(b"ctorch._utils\n_rebuild_tensor_v2\n((");
        put(&mut pickle, "storage");
        pickle.extend(format!("ctorch\n{class}\n").as_bytes());
        put(&mut pickle, &n.to_string());
        put(&mut pickle, "cpu");
        int(&mut pickle, bytes.len());
        pickle.extend(b"tQ");
        int(&mut pickle, 0);
        let strides: Vec<usize> = (0..shape.len()).map(|i| shape[i + 1..].iter().product()).collect();
        for sizes in [shape, &strides] {
            pickle.push(b'(');
            sizes.iter().for_each(|&v| int(&mut pickle, v));
            pickle.push(b't');
        }
        pickle.extend(b"\x89ccollections\nOrderedDict\n)RtR");
    }
    pickle.extend(b"us.");
    let mut entries = vec![("spk2info/data.pkl".to_string(), pickle)];
    entries.extend(fields.into_iter().enumerate().map(|(n, f)| (format!("spk2info/data/{n}"), f.3)));
    zip(&entries)
}

/// A stored zip archive.
fn zip(entries: &[(String, Vec<u8>)]) -> Vec<u8> {
    let (mut out, mut directory) = (Vec::new(), Vec::new());
    for (name, bytes) in entries {
        let offset = out.len() as u32;
        let mut common = Vec::new();
        common.extend([20, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
        common.extend((bytes.len() as u32).to_le_bytes());
        common.extend((bytes.len() as u32).to_le_bytes());
        common.extend((name.len() as u16).to_le_bytes());
        common.extend([0, 0]);
        out.extend(b"PK\x03\x04");
        out.extend(&common);
        out.extend(name.as_bytes());
        out.extend(bytes);
        directory.extend(b"PK\x01\x02\x14\0");
        directory.extend(&common);
        directory.extend([0; 10]);
        directory.extend(offset.to_le_bytes());
        directory.extend(name.as_bytes());
    }
    let start = out.len() as u32;
    out.extend(&directory);
    out.extend(b"PK\x05\x06\0\0\0\0");
    out.extend((entries.len() as u16).to_le_bytes());
    out.extend((entries.len() as u16).to_le_bytes());
    out.extend((directory.len() as u32).to_le_bytes());
    out.extend(start.to_le_bytes());
    out.extend([0, 0]);
    out
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn no_damage_to_a_pickle_archive_panics(seed in any::<u64>(), hits in 1usize..12) {
        let all: Tensors = (0..4).map(|n| (format!("t{n}"), (vec![2, 3], vec![n as f32; 6]))).collect();
        let dir = tempfile::tempdir().expect("temp dir");
        let path = dir.path().join("t.pt");
        save_pt(&path, &all);
        let mut bytes = fs::read(&path).expect("readable");
        let mut state = seed;
        for _ in 0..hits {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let at = (state >> 33) as usize % bytes.len();
            bytes[at] = (state >> 24) as u8;
        }
        fs::write(&path, &bytes).expect("written");
        if let Ok(file) = TensorFile::open(&path) {
            for (key, _) in file.entries() {
                if let Ok(shape) = file.shape(key) {
                    let shape = shape.to_vec();
                    let _ = file.floats(key, &shape).map(|v| v.len());
                }
            }
        }
    }
}
