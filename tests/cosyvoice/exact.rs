//! Incremental equals one-shot, however the work is cut; and an independent Qwen2 agrees with ours.

use std::cell::Cell;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, OnceLock};

use antiphon::synth::cosyvoice::backend::{Embed, FinalChunk, FlowPrompt, MinLength, Options};
use antiphon::synth::cosyvoice::bistream::{Bistream, Order, Prompt, Sampler, speak};
use antiphon::synth::cosyvoice::checkpoint::{Part, TensorFile, find};
use antiphon::synth::cosyvoice::config::{Config, EOS};
use antiphon::synth::cosyvoice::cpu::CpuBackend;
use antiphon::synth::cosyvoice::probe::{Probe, Values};
use antiphon::synth::cosyvoice::random;
use candle_core::{DType, Device, Tensor};
use candle_nn::VarBuilder;
use candle_transformers::models::qwen2;
use proptest::prelude::*;

fn checkpoint() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/golden/cosyvoice3/checkpoint")
}

fn config() -> Config {
    Config::load(&checkpoint()).expect("sizes")
}

fn backend() -> MutexGuard<'static, CpuBackend> {
    static BACKEND: OnceLock<Mutex<CpuBackend>> = OnceLock::new();
    let load = || Mutex::new(CpuBackend::load(&checkpoint(), Options::default()).expect("loads"));
    BACKEND.get_or_init(load).lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

fn prompt(tokens: usize) -> FlowPrompt {
    let voice = random::voice(&config(), "exact", tokens, 5);
    FlowPrompt { tokens: voice.tokens, mel: voice.mel, speaker: voice.speaker }
}

fn largest_difference(a: &Values, b: &Values) -> f32 {
    assert_eq!(a.shape, b.shape);
    a.data.iter().zip(&b.data).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max)
}

/// Token counts at which pushes may end: the prompt and they less the look-ahead are whole blocks.
fn cuts(prompt: usize, tokens: usize, picks: &[bool]) -> Vec<usize> {
    let config = config();
    let (block, ahead) = (config.block_tokens(), config.flow.lookahead);
    let first = (block - prompt % block) % block + ahead;
    let all = (first..tokens).step_by(block).filter(|&c| c > ahead);
    let mut chosen: Vec<usize> = all.zip(picks).filter(|(_, p)| **p).map(|(c, _)| c).collect();
    chosen.push(tokens);
    chosen
}

/// The kit's checkpoint in `dir`, described as one that is solved in `steps` steps.
fn solved(dir: &Path, steps: usize, schedule: &str) {
    for entry in std::fs::read_dir(checkpoint()).expect("a folder") {
        let entry = entry.expect("an entry");
        let to = dir.join(entry.file_name());
        if entry.file_name() != "cosyvoice3.yaml" {
            std::os::unix::fs::symlink(entry.path(), to).expect("a link");
            continue;
        }
        let described = std::fs::read_to_string(entry.path()).expect("readable");
        let solver = format!("t_scheduler: '{schedule}'\n                n_timesteps: {steps}");
        let changed = described.replace("t_scheduler: 'cosine'", &solver);
        assert_ne!(changed, described);
        std::fs::write(to, changed).expect("written");
    }
}

/// How many steps the solver makes, and when, is the description's to say.
#[test]
fn a_distilled_flow_is_solved_in_its_own_steps() {
    let spoken = random::voice(&config(), "spoken", 70, 6).tokens;
    let prompt = prompt(30);
    let ten = backend().mel(&prompt, &spoken, true).expect("ten steps");
    for (steps, schedule, times) in [
        (4, "linear", vec![0.0, 0.25, 0.5, 0.75, 1.0]),
        (1, "cosine", vec![0.0, 1.0]),
        (10, "cosine", backend().times()),
    ] {
        let dir = tempfile::tempdir().expect("a folder");
        solved(dir.path(), steps, schedule);
        let mut distilled = CpuBackend::load(dir.path(), Options::default()).expect("loads");
        let told = distilled.times();
        assert!(told.len() == steps + 1 && told.iter().zip(&times).all(|(a, b)| (a - b).abs() < 1e-6), "{told:?}");
        let whole = distilled.mel(&prompt, &spoken, true).expect("one call");
        let cuts = cuts(30, 70, &[true; 8]);
        let pieces = distilled.mel_chunks(&prompt, &spoken, &cuts, FinalChunk::Causal).expect("pushes");
        assert!(largest_difference(&whole, &pieces) <= 2e-6);
        assert_eq!(largest_difference(&whole, &ten) == 0.0, steps == 10);
    }
    for (steps, schedule, why) in
        [(0, "cosine", "n_timesteps"), (33, "cosine", "n_timesteps"), (4, "sine", "t_scheduler")]
    {
        let dir = tempfile::tempdir().expect("a folder");
        solved(dir.path(), steps, schedule);
        let error = Config::load(dir.path()).expect_err("it cannot be solved").to_string();
        assert!(error.contains(why), "{error}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(12))]

    #[test]
    fn flow_frames_do_not_depend_on_how_tokens_are_pushed(
        prompt_tokens in 4usize..60,
        tokens in 1usize..140,
        picks in proptest::collection::vec(any::<bool>(), 8),
    ) {
        let spoken = random::voice(&config(), "spoken", tokens, 6).tokens;
        let prompt = prompt(prompt_tokens);
        let cuts = cuts(prompt_tokens, tokens, &picks);
        let mut backend = backend();
        let whole = backend.mel(&prompt, &spoken, true).expect("one call");
        let pieces = backend.mel_chunks(&prompt, &spoken, &cuts, FinalChunk::Causal).expect("pushes");
        prop_assert!(largest_difference(&whole, &pieces) <= 2e-6, "{}", largest_difference(&whole, &pieces));
    }

    #[test]
    fn samples_do_not_depend_on_how_frames_arrive(
        frames in 1usize..90,
        cuts in proptest::collection::btree_set(1usize..90, 0..8),
    ) {
        let config = config();
        let data = random::voice(&config, "frames", frames, 8).mel;
        let mel = Values { shape: vec![frames, config.hift.mel], data: data[..frames * config.hift.mel].to_vec() };
        let mut cuts: Vec<usize> = cuts.into_iter().filter(|&c| c < frames).collect();
        cuts.push(frames);
        let mut backend = backend();
        let whole = backend.hift(&mel, true).expect("one call").wave;
        prop_assert_eq!(whole.data.len(), frames * 480);
        let pieces = backend.hift_chunks(&mel, &cuts).expect("pieces");
        prop_assert!(largest_difference(&whole, &pieces) <= 5e-7, "{}", largest_difference(&whole, &pieces));
        // A mel that goes on gives the same samples, only fewer.
        let open = backend.hift(&mel, false).expect("open end").wave;
        prop_assert_eq!(open.data.len(), frames.saturating_sub(5) * 480);
        let worst = open.data.iter().zip(&whole.data).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        prop_assert!(worst <= 5e-7, "{}", worst);
    }

    #[test]
    fn cached_scores_equal_those_of_one_pass(
        text in proptest::collection::vec(0u32..900, 1..40),
        speech in proptest::collection::vec(0u32..729, 1..20),
    ) {
        let prefix: Vec<Embed> = text.into_iter().map(Embed::Text).collect();
        let mut backend = backend();
        let pass = backend.llm(&prefix, &speech).expect("one pass").scores;
        let mut rows = Vec::new();
        backend.llm_decode(&prefix, &mut |scores, ids| {
            rows.extend_from_slice(scores);
            speech.get(ids.len()).copied()
        }).expect("steps");
        let steps = Values { shape: pass.shape.clone(), data: rows };
        prop_assert!(largest_difference(&pass, &steps) <= 2e-5, "{}", largest_difference(&pass, &steps));
    }
}

/// Speaks text that arrives id by id: how many positions were fed, how many tokens came, and how many before the
/// text had ended.
fn stream(order: Order, prompt: &Prompt<'_>, text: &[u32]) -> (usize, usize, usize) {
    let llm = config().llm;
    let mut machine = Bistream::new(&llm, order, prompt);
    let mut left = text.iter();
    let ended = Cell::new(false);
    let mut next = || {
        let ids: Vec<u32> = left.next().into_iter().copied().collect();
        ended.set(ids.is_empty());
        ids
    };
    let (codebook, eos) = (llm.speech_tokens, llm.control(EOS));
    let mut choose = |scores: &[f32], items: &[u32]| {
        let id =
            (0..codebook).filter(|&i| !items.contains(&(i as u32))).max_by(|&a, &b| scores[a].total_cmp(&scores[b]));
        if ended.get() && items.len() > 70 { Some(eos) } else { id.map(|i| i as u32) }
    };
    let (mut tokens, mut early) = (0, 0);
    let mut sampler = Sampler { min_length: MinLength::Intended, choose: &mut choose };
    let mut emit = |_| {
        tokens += 1;
        early += usize::from(!ended.get());
    };
    let fed = speak(&mut *backend(), &mut machine, &mut sampler, &mut next, &mut emit).expect("speaks");
    (fed.iter().sum(), tokens, early)
}

#[test]
fn streamed_text_is_fed_once_and_spoken_before_it_ends() {
    let ids: Vec<u32> = (0..40).map(|n| n * 11 % 900).collect();
    let speech: Vec<u32> = (0..19).map(|n| n * 17 % 729).collect();
    for speech in [&speech[..], &[]] {
        let prompt = Prompt { system: &ids[..6], transcript: &ids[6..14], speech };
        let text = &ids[14..];
        let (fed, tokens, early) = stream(Order::Fixed, &prompt, text);
        // sos, text, task, prompt speech and every token once.
        assert_eq!(fed, 1 + ids.len() + 1 + speech.len() + tokens);
        assert!(early >= 15, "{early} tokens left while the text was being written");
        let (fed, tokens, _) = stream(Order::Reference, &prompt, text);
        assert_eq!(fed, 1 + ids.len() + 1 + speech.len() + tokens + 1, "the reference feeds one token twice");
    }
}

/// The same weights in the Qwen2 of `candle-transformers`, which shares no code with ours.
#[test]
fn an_independent_qwen2_gives_the_same_hidden_states() {
    let config = config().llm;
    let file = TensorFile::open(&find(&checkpoint(), Part::Llm.stem())).expect("tensors");
    let tensors = file
        .entries()
        .filter_map(|(key, _)| {
            let name = key.strip_prefix("llm.model.")?;
            let shape = file.shape(key).expect("usable").to_vec();
            let values = file.floats(key, &shape).expect("floats");
            Some((name.to_string(), Tensor::from_vec(values, shape, &Device::Cpu).expect("tensor")))
        })
        .collect();
    let other = qwen2::Config {
        vocab_size: config.vocab,
        hidden_size: config.hidden,
        intermediate_size: config.intermediate,
        num_hidden_layers: config.layers,
        num_attention_heads: config.heads,
        num_key_value_heads: config.kv_heads,
        max_position_embeddings: 4096,
        sliding_window: 4096,
        max_window_layers: config.layers,
        tie_word_embeddings: true,
        rope_theta: config.rope_theta,
        rms_norm_eps: config.rms_eps,
        use_sliding_window: false,
        hidden_act: candle_nn::Activation::Silu,
    };
    let vars = VarBuilder::from_tensors(tensors, DType::F32, &Device::Cpu);
    let mut model = qwen2::Model::new(&other, vars).expect("model");
    let ids: Vec<u32> = (0..60).map(|n| n * 13 % 900).collect();
    let input = Tensor::from_slice(&ids, (1, ids.len()), &Device::Cpu).expect("ids");
    let theirs = model.forward(&input, 0, None).expect("forward").squeeze(0).expect("one row");
    let prefix: Vec<Embed> = ids.into_iter().map(Embed::Text).collect();
    let ours = backend().llm(&prefix, &[]).expect("one pass").hidden.expect("shown");
    let theirs =
        Values { shape: theirs.dims().to_vec(), data: theirs.flatten_all().and_then(|t| t.to_vec1()).expect("floats") };
    assert!(largest_difference(&ours, &theirs) < 2e-5, "{}", largest_difference(&ours, &theirs));
}
