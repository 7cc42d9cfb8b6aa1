//! The sizes of a checkpoint: `cosyvoice3.yaml` and `CosyVoice-BlankEN/config.json`.
//!
//! Owns every number that the network's shape or the sampler depends on. What neither file carries because the
//! original code fixes it is a named constant here, and nowhere else.

use std::path::Path;

use serde::Deserialize;

use super::times::Schedule;
use super::yaml::{self, Node, Value};

/// Rows of the speech tables past the codebook (control ids and unused ones); any of them ends decoding.
pub const CONTROL_ROWS: usize = 200;
/// Offsets of the control ids from the codebook's end.
pub const SOS: u32 = 0;
/// End of speech.
pub const EOS: u32 = 1;
/// Starts the speech part of the prefix.
pub const TASK: u32 = 2;
/// Asks for more text when text arrives in pieces.
pub const FILL: u32 = 3;
/// Frames the F0 network looks ahead.
pub const F0_AHEAD: usize = 3;
/// Euler steps of the flow solver where the description names none. The original has the number in its code; a
/// distilled flow needs fewer.
pub const EULER_STEPS: usize = 10;
/// Most steps that a description may ask for: the keys and values of every step are kept.
const MAX_EULER_STEPS: usize = 32;
/// Width of the sinusoidal time embedding.
pub const TIME_EMBED: usize = 256;
/// Kernel and groups of the convolutional position embedding.
pub const CONV_POS_KERNEL: usize = 31;
/// See [`CONV_POS_KERNEL`].
pub const CONV_POS_GROUPS: usize = 16;
/// Seconds that the fixed noise tables cover, of 50 mel frames and 24000 samples each whatever the model's rates are.
pub const NOISE_SECONDS: usize = 300;
/// Tokens of a non-final hop before it grows, its largest value, its growth.
pub const HOP: (u32, u32, u32) = (25, 100, 2);
/// LayerNorm epsilon of the DiT.
pub const LAYER_NORM_EPS: f64 = 1e-6;
/// Silent speech tokens: of a run only the first [`SILENT_RUN`] are passed on.
pub const SILENT_TOKENS: [u32; 11] = [1, 2, 28, 29, 55, 248, 494, 2241, 2242, 2322, 2323];
/// See [`SILENT_TOKENS`].
pub const SILENT_RUN: usize = 5;
/// Negative slope inside the pre-lookahead layer and before `conv_post`.
pub const DEFAULT_LEAKY_SLOPE: f64 = 0.01;

/// Everything about the sizes of one checkpoint.
#[derive(Clone, Debug, PartialEq)]
pub struct Config {
    /// Audio samples a second.
    pub sample_rate: usize,
    /// Speech tokens a second.
    pub token_rate: usize,
    /// Mel frames a token.
    pub token_mel_ratio: usize,
    /// The language model.
    pub llm: LlmConfig,
    /// Tokens to mel.
    pub flow: FlowConfig,
    /// Mel to waveform.
    pub hift: HiftConfig,
}

/// Sizes of the language model.
#[derive(Clone, Debug, PartialEq)]
pub struct LlmConfig {
    /// Width of the residual stream.
    pub hidden: usize,
    /// Decoder layers.
    pub layers: usize,
    /// Query heads.
    pub heads: usize,
    /// Key and value heads.
    pub kv_heads: usize,
    /// Width of a head.
    pub head_dim: usize,
    /// Width of the gated MLP.
    pub intermediate: usize,
    /// RMSNorm epsilon.
    pub rms_eps: f64,
    /// RoPE base.
    pub rope_theta: f64,
    /// Text vocabulary rows.
    pub vocab: usize,
    /// Whether `lm_head` is the embedding table.
    pub tied: bool,
    /// Codebook size; control ids follow.
    pub speech_tokens: usize,
    /// Text and speech ids of one text-streaming round.
    pub mix_ratio: [usize; 2],
    /// The sampler.
    pub sampling: RasConfig,
}

impl LlmConfig {
    /// Rows of the speech tables.
    pub fn speech_rows(&self) -> usize {
        self.speech_tokens + CONTROL_ROWS
    }

    /// A control id by its offset ([`SOS`], [`EOS`], [`TASK`], [`FILL`]).
    pub fn control(&self, offset: u32) -> u32 {
        self.speech_tokens as u32 + offset
    }
}

/// Repetition-aware sampling.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RasConfig {
    /// Nucleus mass.
    pub top_p: f32,
    /// Most candidates.
    pub top_k: usize,
    /// How many recent ids are looked at.
    pub window: usize,
    /// Share of the window that makes an id a repetition.
    pub tau: f32,
}

/// Sizes of the flow model.
#[derive(Clone, Debug, PartialEq)]
pub struct FlowConfig {
    /// Width of the token embedding and of mu.
    pub input: usize,
    /// Mel channels.
    pub mel: usize,
    /// Length of the raw speaker vector.
    pub speaker: usize,
    /// Rows of the token embedding.
    pub vocab: usize,
    /// Tokens the pre-lookahead layer looks ahead.
    pub lookahead: usize,
    /// Hidden channels of the pre-lookahead layer.
    pub lookahead_channels: usize,
    /// Width of the DiT's residual stream.
    pub dim: usize,
    /// DiT blocks.
    pub depth: usize,
    /// Attention heads.
    pub heads: usize,
    /// Width of a head; also how many leading channels RoPE rotates.
    pub head_dim: usize,
    /// MLP width over `dim`.
    pub ff_mult: usize,
    /// Channels of the projected speaker vector.
    pub spk_dim: usize,
    /// Mel frames of a static block.
    pub block: usize,
    /// Blocks to the left that a frame attends to; `None`: all. The original attends to all whatever its
    /// description says under `num_decoding_left_chunks`, so this is what a checkpoint is loaded with.
    pub left_blocks: Option<usize>,
    /// Classifier-free guidance rate.
    pub guidance: f64,
    /// Euler steps of the solver.
    pub steps: usize,
    /// How its times are spaced.
    pub schedule: Schedule,
}

impl FlowConfig {
    /// Width of all attention heads together; may differ from `dim`.
    pub fn inner(&self) -> usize {
        self.heads * self.head_dim
    }

    /// Input channels of the DiT: x, cond, mu, speaker.
    pub fn dit_in(&self) -> usize {
        2 * self.mel + self.input + self.spk_dim
    }

    /// Width of the MLP.
    pub fn ff(&self) -> usize {
        self.dim * self.ff_mult
    }
}

/// Sizes of the vocoder.
#[derive(Clone, Debug, PartialEq)]
pub struct HiftConfig {
    /// Mel channels.
    pub mel: usize,
    /// Channels after `conv_pre`; halved by every stage.
    pub base_channels: usize,
    /// Harmonics above F0.
    pub harmonics: usize,
    /// Sine amplitude.
    pub sine_amp: f64,
    /// Noise amplitude while voiced; unvoiced it is `sine_amp / 3`.
    pub noise_std: f64,
    /// F0 above which a frame is voiced, Hz.
    pub voiced_threshold: f64,
    /// Upsampling rates.
    pub upsample_rates: Vec<usize>,
    /// Upsampling kernels.
    pub upsample_kernels: Vec<usize>,
    /// FFT size of source and output spectra.
    pub n_fft: usize,
    /// Hop of source and output spectra, samples.
    pub hop: usize,
    /// Kernels of the residual blocks of a stage.
    pub resblock_kernels: Vec<usize>,
    /// Dilations of each residual block.
    pub resblock_dilations: Vec<Vec<usize>>,
    /// Kernels of the source residual blocks, one a stage.
    pub source_kernels: Vec<usize>,
    /// Dilations of each source residual block.
    pub source_dilations: Vec<Vec<usize>>,
    /// Leaky slope in the stages.
    pub slope: f64,
    /// Samples are clamped to plus and minus this.
    pub limit: f32,
    /// Frames `conv_pre` looks ahead.
    pub look_right: usize,
    /// Hidden channels of the F0 network.
    pub f0_channels: usize,
}

impl HiftConfig {
    /// Samples of one mel frame.
    pub fn frame_samples(&self) -> usize {
        self.upsample_rates.iter().product::<usize>() * self.hop
    }

    /// Spectrum rows: real and imaginary.
    pub fn spectrum_rows(&self) -> usize {
        self.n_fft + 2
    }

    /// Channels after stage `i`.
    pub fn channels(&self, stage: usize) -> usize {
        self.base_channels >> (stage + 1)
    }

    /// Kernel and stride of `source_downs[stage]`: what brings the spectrum down to that stage's rate.
    pub fn source_down(&self, stage: usize) -> (usize, usize) {
        let stride: usize = self.upsample_rates.iter().skip(stage + 1).product();
        if stride == 1 { (1, 1) } else { (2 * stride, stride) }
    }
}

/// Why the sizes cannot be read.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ConfigError {
    /// A file is missing or cannot be read.
    #[error("{path}: {source}")]
    Io {
        /// Which file.
        path: String,
        /// Why.
        source: std::io::Error,
    },
    /// A file is not what its name says.
    #[error("{path}: {reason}")]
    Format {
        /// Which file.
        path: String,
        /// What is wrong.
        reason: String,
    },
}

/// Name of the model description in a checkpoint directory.
pub const YAML: &str = "cosyvoice3.yaml";
/// Name of the language model's folder in a checkpoint directory.
pub const BLANK: &str = "CosyVoice-BlankEN";

#[derive(Deserialize)]
struct Qwen2 {
    hidden_size: usize,
    num_hidden_layers: usize,
    num_attention_heads: usize,
    num_key_value_heads: usize,
    intermediate_size: usize,
    rms_norm_eps: f64,
    rope_theta: f64,
    vocab_size: usize,
    head_dim: Option<usize>,
    #[serde(default)]
    tie_word_embeddings: bool,
}

impl Config {
    /// Reads the two files of a checkpoint directory.
    ///
    /// # Errors
    /// A file is missing, malformed, or names sizes that cannot work together.
    pub fn load(dir: &Path) -> Result<Self, ConfigError> {
        let yaml_path = dir.join(YAML);
        let json_path = dir.join(BLANK).join("config.json");
        let yaml = read(&yaml_path)?;
        let json = read(&json_path)?;
        let format = |path: &Path, reason: String| ConfigError::Format { path: path.display().to_string(), reason };
        let qwen: Qwen2 = serde_json::from_str(&json).map_err(|e| format(&json_path, e.to_string()))?;
        let root = yaml::parse(&yaml).map_err(|e| format(&yaml_path, e.to_string()))?.resolved();
        let config = build(&root, &qwen).map_err(|e| format(&yaml_path, e))?;
        config.check().map_err(|e| format(&yaml_path, e))?;
        Ok(config)
    }

    /// Whether speech of this model sounds right on a call. Kits for numerical tests need not.
    ///
    /// # Errors
    /// Rates that contradict each other, or a sample rate that calls do not have.
    pub fn playable(&self) -> Result<(), String> {
        let made = self.hift.frame_samples() * self.frame_rate();
        if made != self.sample_rate {
            return Err(format!("hift makes {made} samples a second of mel, `sample_rate` is {}", self.sample_rate));
        }
        if self.sample_rate != crate::audio::RATE as usize {
            return Err(format!("`sample_rate` is {}, calls are fed at {}", self.sample_rate, crate::audio::RATE));
        }
        Ok(())
    }

    /// Mel frames a second.
    pub fn frame_rate(&self) -> usize {
        self.token_rate * self.token_mel_ratio
    }

    /// Speech tokens of a static block.
    pub fn block_tokens(&self) -> usize {
        self.flow.block / self.token_mel_ratio
    }

    /// Columns of the fixed noise table of the flow, frames.
    pub fn noise_frames(&self) -> usize {
        NOISE_SECONDS * 50
    }

    /// Sizes that contradict each other or that no model has: every later allocation relies on this.
    fn check(&self) -> Result<(), String> {
        let sizes = [
            self.sample_rate,
            self.token_rate,
            self.token_mel_ratio,
            self.llm.hidden,
            self.llm.layers,
            self.llm.heads,
            self.llm.kv_heads,
            self.llm.head_dim,
            self.llm.intermediate,
            self.llm.vocab,
            self.llm.speech_tokens,
            self.llm.mix_ratio[0],
            self.llm.mix_ratio[1],
            self.llm.sampling.top_k,
            self.flow.input,
            self.flow.mel,
            self.flow.speaker,
            self.flow.vocab,
            self.flow.lookahead,
            self.flow.lookahead_channels,
            self.flow.dim,
            self.flow.depth,
            self.flow.heads,
            self.flow.head_dim,
            self.flow.ff_mult,
            self.flow.spk_dim,
            self.flow.block,
            self.hift.mel,
            self.hift.base_channels,
            self.hift.n_fft,
            self.hift.hop,
            self.hift.f0_channels,
        ];
        if sizes.iter().any(|s| !(1..1 << 20).contains(s)) {
            return Err("a size is zero or beyond any model".into());
        }
        let rule = |holds: bool, text: &str| if holds { Ok(()) } else { Err(text.to_string()) };
        rule(self.llm.heads.is_multiple_of(self.llm.kv_heads), "query heads must be a multiple of key heads")?;
        rule(self.llm.head_dim.is_multiple_of(2) && self.flow.head_dim.is_multiple_of(2), "head sizes must be even")?;
        rule((1..=MAX_EULER_STEPS).contains(&self.flow.steps), "n_timesteps must be 1 to 32")?;
        rule(self.flow.block.is_multiple_of(self.token_mel_ratio), "static_chunk_size must be whole tokens")?;
        rule(
            self.flow.dim.is_multiple_of(CONV_POS_GROUPS),
            "DiT dim must be a multiple of 16 (position convolution groups)",
        )?;
        rule(self.flow.mel == self.hift.mel, "flow and hift disagree on mel channels")?;
        rule(
            self.flow.input == self.flow.mel && self.flow.spk_dim == self.flow.mel,
            "mu, speaker and mel channels must agree",
        )?;
        let h = &self.hift;
        let stages = h.upsample_rates.len();
        rule((1..=8).contains(&stages), "hift needs 1 to 8 upsampling stages")?;
        rule(h.base_channels >> stages > 0, "base_channels is too small for its stages")?;
        let lists = [h.upsample_kernels.len(), h.source_kernels.len(), h.source_dilations.len()];
        rule(lists.iter().all(|&n| n == stages), "hift lists differ in length")?;
        rule(
            h.resblock_kernels.len() == h.resblock_dilations.len() && !h.resblock_kernels.is_empty(),
            "resblock lists differ in length",
        )?;
        rule(
            h.resblock_dilations.iter().chain(&h.source_dilations).all(|d| !d.is_empty()),
            "a residual block of hift has no dilations",
        )?;
        let kernels =
            h.upsample_kernels.iter().chain(&h.resblock_kernels).chain(&h.source_kernels).chain(&h.upsample_rates);
        let dilations = h.resblock_dilations.iter().chain(&h.source_dilations).flatten();
        rule(
            kernels.chain(dilations).all(|n| (1..=1024).contains(n)),
            "a hift kernel, rate or dilation is out of range",
        )?;
        rule(
            h.n_fft.is_multiple_of(2) && h.n_fft.is_multiple_of(h.hop) && h.n_fft <= 4096,
            "istft n_fft must be even and a multiple of its hop",
        )
    }
}

fn read(path: &Path) -> Result<String, ConfigError> {
    let io = |source| ConfigError::Io { path: path.display().to_string(), source };
    let size = std::fs::metadata(path).map_err(io)?.len();
    // Both files are a few kilobytes.
    if size > 4 << 20 {
        return Err(ConfigError::Format {
            path: path.display().to_string(),
            reason: format!("{size} bytes is too large"),
        });
    }
    std::fs::read_to_string(path).map_err(io)
}

/// A mapping of the description and how to name it in messages.
#[derive(Clone, Copy)]
struct At<'a>(&'a Node, &'a str);

impl<'a> At<'a> {
    fn to(self, key: &'a str) -> Result<At<'a>, String> {
        self.0.find(key).map(|n| At(n, key)).ok_or_else(|| format!("`{key}` is missing (under `{}`)", self.1))
    }

    fn number(self, key: &str) -> Result<f64, String> {
        let node = self.0.find(key).ok_or_else(|| format!("`{key}` is missing (under `{}`)", self.1))?;
        let text = node.scalar().filter(|_| node.tag.is_none());
        text.and_then(|s| s.parse().ok())
            .filter(|v: &f64| v.is_finite())
            .ok_or_else(|| format!("`{}.{key}` is not a number", self.1))
    }

    fn number_or(self, key: &str, default: f64) -> Result<f64, String> {
        if self.0.find(key).is_none() { Ok(default) } else { self.number(key) }
    }

    fn size(self, key: &str) -> Result<usize, String> {
        whole(self.number(key)?).ok_or_else(|| format!("`{}.{key}` is not a size", self.1))
    }

    fn size_or(self, key: &str, default: usize) -> Result<usize, String> {
        if self.0.find(key).is_none() { Ok(default) } else { self.size(key) }
    }

    fn sizes(self, key: &str) -> Result<Vec<usize>, String> {
        sizes_of(self.to(key)?.0).ok_or_else(|| format!("`{}.{key}` is not a list of sizes", self.1))
    }

    fn size_lists(self, key: &str) -> Result<Vec<Vec<usize>>, String> {
        let lists = match &self.to(key)?.0.value {
            Value::Sequence(items) => items.iter().map(sizes_of).collect::<Option<Vec<_>>>(),
            _ => None,
        };
        lists.ok_or_else(|| format!("`{}.{key}` is not a list of lists of sizes", self.1))
    }
}

fn whole(value: f64) -> Option<usize> {
    (value >= 0.0 && value.fract() == 0.0 && value < 1e9).then_some(value as usize)
}

fn sizes_of(node: &Node) -> Option<Vec<usize>> {
    match &node.value {
        Value::Sequence(items) => items.iter().map(|n| whole(n.scalar()?.parse().ok()?)).collect(),
        _ => None,
    }
}

fn build(root: &Node, qwen: &Qwen2) -> Result<Config, String> {
    let root = At(root, "the file");
    let llm = root.to("llm")?;
    let flow = root.to("flow")?;
    let hift = root.to("hift")?;
    let class = |at: At<'_>, want: &str| match &at.0.tag {
        Some(tag) if tag.ends_with(want) => Ok(()),
        other => Err(format!("`{}` is {}, expected a class {want}", at.1, other.as_deref().unwrap_or("untagged"))),
    };
    class(llm, "CosyVoice3LM")?;
    class(flow, "CausalMaskedDiffWithDiT")?;
    class(hift, "CausalHiFTGenerator")?;
    let sampling = llm.to("sampling")?;
    let mix = llm.sizes("mix_ratio")?;
    let [text, speech] = mix[..] else { return Err("`llm.mix_ratio` needs two numbers".into()) };
    let lookahead = flow.to("pre_lookahead_layer")?;
    let decoder = flow.to("decoder")?;
    let cfm = decoder.to("cfm_params")?;
    // The original wraps these in a DictConfig with one key `content`.
    let cfm = cfm.to("content").unwrap_or(cfm);
    let dit = decoder.to("estimator")?;
    let spectrum = hift.to("istft_params")?;
    let solver = cfm.0.find("t_scheduler").and_then(Node::scalar);
    let schedule = match solver {
        None | Some("cosine") => Schedule::Cosine,
        Some("linear") => Schedule::Linear,
        Some(other) => return Err(format!("`t_scheduler` is `{other}`: cosine and linear are known")),
    };
    let heads = qwen.num_attention_heads;
    let config = Config {
        sample_rate: root.size("sample_rate")?,
        token_rate: root.size("token_frame_rate")?,
        token_mel_ratio: root.size("token_mel_ratio")?,
        llm: LlmConfig {
            hidden: qwen.hidden_size,
            layers: qwen.num_hidden_layers,
            heads,
            kv_heads: qwen.num_key_value_heads,
            head_dim: qwen.head_dim.unwrap_or(qwen.hidden_size / heads.max(1)),
            intermediate: qwen.intermediate_size,
            rms_eps: qwen.rms_norm_eps,
            rope_theta: qwen.rope_theta,
            vocab: qwen.vocab_size,
            tied: qwen.tie_word_embeddings,
            speech_tokens: llm.size("speech_token_size")?,
            mix_ratio: [text, speech],
            sampling: RasConfig {
                top_p: sampling.number_or("top_p", 0.8)? as f32,
                top_k: sampling.size_or("top_k", 25)?,
                window: sampling.size_or("win_size", 10)?,
                tau: sampling.number_or("tau_r", 0.1)? as f32,
            },
        },
        flow: FlowConfig {
            input: flow.size("input_size")?,
            mel: flow.size("output_size")?,
            speaker: flow.size("spk_embed_dim")?,
            vocab: flow.size("vocab_size")?,
            lookahead: flow.size_or("pre_lookahead_len", 3)?,
            lookahead_channels: lookahead.size("channels")?,
            dim: dit.size("dim")?,
            depth: dit.size("depth")?,
            heads: dit.size("heads")?,
            head_dim: dit.size("dim_head")?,
            ff_mult: dit.size_or("ff_mult", 4)?,
            spk_dim: dit.size("spk_dim")?,
            block: dit.size("static_chunk_size")?,
            left_blocks: None,
            guidance: cfm.number("inference_cfg_rate")?,
            steps: cfm.size_or("n_timesteps", EULER_STEPS)?,
            schedule,
        },
        hift: HiftConfig {
            mel: hift.size("in_channels")?,
            base_channels: hift.size("base_channels")?,
            harmonics: hift.size("nb_harmonics")?,
            sine_amp: hift.number_or("nsf_alpha", 0.1)?,
            noise_std: hift.number_or("nsf_sigma", 0.003)?,
            voiced_threshold: hift.number_or("nsf_voiced_threshold", 10.0)?,
            upsample_rates: hift.sizes("upsample_rates")?,
            upsample_kernels: hift.sizes("upsample_kernel_sizes")?,
            n_fft: spectrum.size("n_fft")?,
            hop: spectrum.size("hop_len")?,
            resblock_kernels: hift.sizes("resblock_kernel_sizes")?,
            resblock_dilations: hift.size_lists("resblock_dilation_sizes")?,
            source_kernels: hift.sizes("source_resblock_kernel_sizes")?,
            source_dilations: hift.size_lists("source_resblock_dilation_sizes")?,
            slope: hift.number_or("lrelu_slope", 0.1)?,
            limit: hift.number_or("audio_limit", 0.99)? as f32,
            look_right: hift.size_or("conv_pre_look_right", 4)?,
            f0_channels: hift.to("f0_predictor")?.size("cond_channels")?,
        },
    };
    Ok(config)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_residual_block_without_dilations_is_refused() {
        let config = Config::load(Path::new("tests/data/golden/cosyvoice3/checkpoint")).expect("the kit's sizes");
        for source in [false, true] {
            let mut empty = config.clone();
            let h = &mut empty.hift;
            let lists = if source { &mut h.source_dilations } else { &mut h.resblock_dilations };
            lists[1].clear();
            let error = empty.check().expect_err("a block of no layers");
            assert!(error.contains("dilations"), "{error}");
        }
    }
}
