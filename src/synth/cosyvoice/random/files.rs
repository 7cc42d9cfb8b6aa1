//! The text files of a random checkpoint.

use std::collections::HashSet;

use super::Size;

/// Pairs that a byte-level tokenizer joins, most frequent first, learnt from this project's own English (its comments,
/// documents and what its load generator says). English is cut into about four characters an id, as by the released
/// tokenizer, so that a text is as much work as it is there.
const MERGES: &str = include_str!("merges.txt");
/// The same for a vocabulary that has room for a few.
const FEW_MERGES: &str = "t h\ni n\ne r\na n\no n\nth e\nr e\no u\nin g\nĠ the\nĠ a\nĠ t\nl l\nh e";

struct Sizes {
    hidden: usize,
    layers: usize,
    heads: usize,
    kv_heads: usize,
    intermediate: usize,
    base_vocab: usize,
    rows: usize,
    speech: usize,
    lookahead: usize,
    dim: usize,
    depth: usize,
    dit_heads: usize,
    dim_head: usize,
    base: usize,
    f0: usize,
}

fn sizes(size: Size) -> Sizes {
    match size {
        Size::Full => Sizes {
            hidden: 896,
            layers: 24,
            heads: 14,
            kv_heads: 2,
            intermediate: 4864,
            base_vocab: 151_643,
            rows: 151_936,
            speech: 6561,
            lookahead: 1024,
            dim: 1024,
            depth: 22,
            dit_heads: 16,
            dim_head: 64,
            base: 512,
            f0: 512,
        },
        // No two sizes equal, and the attention's width not the model's, so that mixed-up axes show.
        Size::Tiny => Sizes {
            hidden: 48,
            layers: 2,
            heads: 6,
            kv_heads: 2,
            intermediate: 80,
            base_vocab: 300,
            rows: 640,
            speech: 243,
            lookahead: 40,
            dim: 32,
            depth: 2,
            dit_heads: 3,
            dim_head: 8,
            base: 24,
            f0: 16,
        },
    }
}

/// `cosyvoice3.yaml`.
pub(super) fn yaml(size: Size) -> String {
    let s = sizes(size);
    format!(
        "# Random weights in the layout of Fun-CosyVoice3-0.5B.
sample_rate: 24000
llm_input_size: {hidden}
llm_output_size: {hidden}
spk_embed_dim: 192
qwen_pretrain_path: ''
token_frame_rate: 25
token_mel_ratio: 2
chunk_size: 25
num_decoding_left_chunks: -1

llm: !new:cosyvoice.llm.llm.CosyVoice3LM
    llm_input_size: !ref <llm_input_size>
    llm_output_size: !ref <llm_output_size>
    speech_token_size: {speech}
    mix_ratio: [5, 15]
    llm: !new:cosyvoice.llm.llm.Qwen2Encoder
        pretrain_path: !ref <qwen_pretrain_path>
    sampling: !name:cosyvoice.utils.common.ras_sampling
        top_p: 0.8
        top_k: 25
        win_size: 10
        tau_r: 0.1

flow: !new:cosyvoice.flow.flow.CausalMaskedDiffWithDiT
    input_size: 80
    output_size: 80
    spk_embed_dim: !ref <spk_embed_dim>
    vocab_size: {speech}
    input_frame_rate: !ref <token_frame_rate>
    token_mel_ratio: !ref <token_mel_ratio>
    pre_lookahead_len: 3
    pre_lookahead_layer: !new:cosyvoice.transformer.upsample_encoder.PreLookaheadLayer
        in_channels: 80
        channels: {lookahead}
        pre_lookahead_len: 3
    decoder: !new:cosyvoice.flow.flow_matching.CausalConditionalCFM
        in_channels: 240
        cfm_params: !new:omegaconf.DictConfig
            content:
                t_scheduler: 'cosine'
                inference_cfg_rate: 0.7
        estimator: !new:cosyvoice.flow.DiT.dit.DiT
            dim: {dim}
            depth: {depth}
            heads: {dit_heads}
            dim_head: {dim_head}
            ff_mult: 2
            mel_dim: 80
            mu_dim: 80
            spk_dim: 80
            out_channels: 80
            static_chunk_size: !ref <chunk_size> * <token_mel_ratio>
            num_decoding_left_chunks: !ref <num_decoding_left_chunks>

hift: !new:cosyvoice.hifigan.generator.CausalHiFTGenerator
    in_channels: 80
    base_channels: {base}
    nb_harmonics: 8
    sampling_rate: !ref <sample_rate>
    nsf_alpha: 0.1
    nsf_sigma: 0.003
    nsf_voiced_threshold: 10
    upsample_rates: [8, 5, 3]
    upsample_kernel_sizes: [16, 11, 7]
    istft_params:
        n_fft: 16
        hop_len: 4
    resblock_kernel_sizes: [3, 7, 11]
    resblock_dilation_sizes: [[1, 3, 5], [1, 3, 5], [1, 3, 5]]
    source_resblock_kernel_sizes: [7, 7, 11]
    source_resblock_dilation_sizes: [[1, 3, 5], [1, 3, 5], [1, 3, 5]]
    lrelu_slope: 0.1
    audio_limit: 0.99
    conv_pre_look_right: 4
    f0_predictor: !new:cosyvoice.hifigan.f0_predictor.CausalConvRNNF0Predictor
        num_class: 1
        in_channels: 80
        cond_channels: {f0}
",
        hidden = s.hidden,
        speech = s.speech,
        lookahead = s.lookahead,
        dim = s.dim,
        depth = s.depth,
        dit_heads = s.dit_heads,
        dim_head = s.dim_head,
        base = s.base,
        f0 = s.f0,
    )
}

/// The files of `CosyVoice-BlankEN`: sizes and a small byte-level tokenizer whose special tokens have the ids that
/// the sizes give them.
pub(super) fn blank(size: Size) -> Vec<(&'static str, String)> {
    let s = sizes(size);
    let config = serde_json::json!({
        "architectures": ["Qwen2ForCausalLM"],
        "hidden_act": "silu",
        "hidden_size": s.hidden,
        "intermediate_size": s.intermediate,
        "max_position_embeddings": 32768,
        "model_type": "qwen2",
        "num_attention_heads": s.heads,
        "num_hidden_layers": s.layers,
        "num_key_value_heads": s.kv_heads,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1_000_000.0,
        "tie_word_embeddings": true,
        "vocab_size": s.rows,
    });
    let mut vocab: Vec<String> = byte_symbols();
    let mut merges = vec!["#version: 0.2".to_string()];
    let pairs = match size {
        Size::Full => MERGES,
        Size::Tiny => FEW_MERGES,
    };
    let mut known: HashSet<String> = vocab.iter().cloned().collect();
    for pair in pairs.lines() {
        let joined = pair.replace(' ', "");
        if known.insert(joined.clone()) {
            vocab.push(joined);
            merges.push(pair.into());
        }
    }
    // Ids that no merge leads to keep the special tokens where the sizes want them.
    for n in vocab.len()..s.base_vocab {
        vocab.push(format!("<unused {n}>"));
    }
    let vocab: serde_json::Map<String, serde_json::Value> =
        vocab.into_iter().enumerate().map(|(id, token)| (token, id.into())).collect();
    let added: serde_json::Map<String, serde_json::Value> = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
        .iter()
        .enumerate()
        .map(|(n, token)| ((s.base_vocab + n).to_string(), serde_json::json!({ "content": token, "special": true })))
        .collect();
    let tokenizer = serde_json::json!({ "added_tokens_decoder": added, "tokenizer_class": "Qwen2Tokenizer" });
    vec![
        ("config.json", format!("{config:#}\n")),
        ("vocab.json", serde_json::Value::Object(vocab).to_string()),
        ("merges.txt", merges.join("\n") + "\n"),
        ("tokenizer_config.json", format!("{tokenizer:#}\n")),
    ]
}

/// The characters that stand for bytes in a byte-level vocabulary: printable ones for themselves, the others from
/// U+0100 on.
fn byte_symbols() -> Vec<String> {
    let mut spare = 0x100;
    (0u32..256)
        .map(|byte| {
            let printable = matches!(byte, 0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff);
            let code = if printable {
                byte
            } else {
                spare += 1;
                spare - 1
            };
            char::from_u32(code).unwrap_or_default().to_string()
        })
        .collect()
}
