//! Every tensor that a checkpoint of given sizes has, in the order in which the original writes them.

use super::checkpoint::Part;
use super::config::{CONV_POS_GROUPS, CONV_POS_KERNEL, Config, TIME_EMBED};

/// One tensor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Expected {
    /// Which file.
    pub part: Part,
    /// Its key.
    pub key: String,
    /// Its shape.
    pub shape: Vec<usize>,
}

/// How the weight of a convolution is spelled, besides `weight` itself.
pub const WEIGHT_NORM: [[&str; 2]; 2] =
    [["parametrizations.weight.original0", "parametrizations.weight.original1"], ["weight_g", "weight_v"]];

/// The tied output head of the text model, which files may leave out.
pub const LM_HEAD: &str = "llm.model.lm_head.weight";
/// What [`LM_HEAD`] is tied to.
pub const TEXT_TABLE: &str = "llm.model.model.embed_tokens.weight";

struct List {
    part: Part,
    tensors: Vec<Expected>,
}

impl List {
    fn add(&mut self, key: impl Into<String>, shape: &[usize]) {
        self.tensors.push(Expected { part: self.part, key: key.into(), shape: shape.to_vec() });
    }

    fn linear(&mut self, name: &str, out: usize, inp: usize) {
        self.add(format!("{name}.weight"), &[out, inp]);
        self.add(format!("{name}.bias"), &[out]);
    }

    /// A convolution under weight norm, as the original names its parts.
    fn normed(&mut self, name: &str, out: usize, inp: usize, kernel: usize) {
        let [gain, direction] = WEIGHT_NORM[0];
        self.add(format!("{name}.bias"), &[out]);
        self.add(format!("{name}.{gain}"), &[out, 1, 1]);
        self.add(format!("{name}.{direction}"), &[out, inp, kernel]);
    }

    fn block(&mut self, name: &str, channels: usize, kernel: usize, dilations: &[usize]) {
        for which in ["convs1", "convs2"] {
            for d in 0..dilations.len() {
                self.normed(&format!("{name}.{which}.{d}"), channels, channels, kernel);
            }
        }
        for which in ["activations1", "activations2"] {
            for d in 0..dilations.len() {
                self.add(format!("{name}.{which}.{d}.alpha"), &[channels]);
            }
        }
    }
}

/// All tensors of all three files.
pub fn expected(config: &Config) -> Vec<Expected> {
    [llm(config), flow(config), hift(config)].concat()
}

fn llm(config: &Config) -> Vec<Expected> {
    let c = &config.llm;
    let mut list = List { part: Part::Llm, tensors: Vec::new() };
    let (queries, keys) = (c.heads * c.head_dim, c.kv_heads * c.head_dim);
    list.add(TEXT_TABLE, &[c.vocab, c.hidden]);
    for n in 0..c.layers {
        let at = format!("llm.model.model.layers.{n}");
        list.linear(&format!("{at}.self_attn.q_proj"), queries, c.hidden);
        list.linear(&format!("{at}.self_attn.k_proj"), keys, c.hidden);
        list.linear(&format!("{at}.self_attn.v_proj"), keys, c.hidden);
        list.add(format!("{at}.self_attn.o_proj.weight"), &[c.hidden, queries]);
        list.add(format!("{at}.mlp.gate_proj.weight"), &[c.intermediate, c.hidden]);
        list.add(format!("{at}.mlp.up_proj.weight"), &[c.intermediate, c.hidden]);
        list.add(format!("{at}.mlp.down_proj.weight"), &[c.hidden, c.intermediate]);
        list.add(format!("{at}.input_layernorm.weight"), &[c.hidden]);
        list.add(format!("{at}.post_attention_layernorm.weight"), &[c.hidden]);
    }
    list.add("llm.model.model.norm.weight", &[c.hidden]);
    list.add(LM_HEAD, &[c.vocab, c.hidden]);
    list.add("llm_decoder.weight", &[c.speech_rows(), c.hidden]);
    list.add("speech_embedding.weight", &[c.speech_rows(), c.hidden]);
    list.tensors
}

fn flow(config: &Config) -> Vec<Expected> {
    let c = &config.flow;
    let mut list = List { part: Part::Flow, tensors: Vec::new() };
    list.add("input_embedding.weight", &[c.vocab, c.input]);
    list.linear("spk_embed_affine_layer", c.spk_dim, c.speaker);
    list.add("pre_lookahead_layer.conv1.weight", &[c.lookahead_channels, c.input, c.lookahead + 1]);
    list.add("pre_lookahead_layer.conv1.bias", &[c.lookahead_channels]);
    list.add("pre_lookahead_layer.conv2.weight", &[c.input, c.lookahead_channels, 3]);
    list.add("pre_lookahead_layer.conv2.bias", &[c.input]);
    let at = "decoder.estimator";
    list.linear(&format!("{at}.time_embed.time_mlp.0"), c.dim, TIME_EMBED);
    list.linear(&format!("{at}.time_embed.time_mlp.2"), c.dim, c.dim);
    list.linear(&format!("{at}.input_embed.proj"), c.dim, c.dit_in());
    for n in [1, 2] {
        let name = format!("{at}.input_embed.conv_pos_embed.conv{n}.0");
        list.add(format!("{name}.weight"), &[c.dim, c.dim / CONV_POS_GROUPS, CONV_POS_KERNEL]);
        list.add(format!("{name}.bias"), &[c.dim]);
    }
    list.add(format!("{at}.rotary_embed.inv_freq"), &[c.head_dim / 2]);
    for n in 0..c.depth {
        let block = format!("{at}.transformer_blocks.{n}");
        list.linear(&format!("{block}.attn_norm.linear"), 6 * c.dim, c.dim);
        for part in ["to_q", "to_k", "to_v"] {
            list.linear(&format!("{block}.attn.{part}"), c.inner(), c.dim);
        }
        list.linear(&format!("{block}.attn.to_out.0"), c.dim, c.inner());
        list.linear(&format!("{block}.ff.ff.0.0"), c.ff(), c.dim);
        list.linear(&format!("{block}.ff.ff.2"), c.dim, c.ff());
    }
    list.linear(&format!("{at}.norm_out.linear"), 2 * c.dim, c.dim);
    list.linear(&format!("{at}.proj_out"), c.mel, c.dim);
    list.tensors
}

fn hift(config: &Config) -> Vec<Expected> {
    let c = &config.hift;
    let mut list = List { part: Part::Hift, tensors: Vec::new() };
    let stages = c.upsample_rates.len();
    list.linear("m_source.l_linear", 1, c.harmonics + 1);
    list.normed("conv_pre", c.base_channels, c.mel, c.look_right + 1);
    for (i, &kernel) in c.upsample_kernels.iter().enumerate() {
        list.normed(&format!("ups.{i}"), c.base_channels >> (i + 1), c.base_channels >> i, kernel);
    }
    for i in 0..stages {
        let name = format!("source_downs.{i}");
        list.add(format!("{name}.weight"), &[c.channels(i), c.spectrum_rows(), c.source_down(i).0]);
        list.add(format!("{name}.bias"), &[c.channels(i)]);
    }
    for i in 0..stages {
        list.block(&format!("source_resblocks.{i}"), c.channels(i), c.source_kernels[i], &c.source_dilations[i]);
    }
    for i in 0..stages {
        for (j, (&kernel, dilations)) in c.resblock_kernels.iter().zip(&c.resblock_dilations).enumerate() {
            let name = format!("resblocks.{}", i * c.resblock_kernels.len() + j);
            list.block(&name, c.channels(i), kernel, dilations);
        }
    }
    list.normed("conv_post", c.spectrum_rows(), c.channels(stages - 1), 7);
    for n in 0..5 {
        let (inp, kernel) = if n == 0 { (c.mel, 4) } else { (c.f0_channels, 3) };
        list.normed(&format!("f0_predictor.condnet.{}", 2 * n), c.f0_channels, inp, kernel);
    }
    list.linear("f0_predictor.classifier", 1, c.f0_channels);
    list.tensors
}
