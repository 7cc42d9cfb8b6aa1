//! Loading Whisper: its layers in the layouts of the kernels, and memory for every step.

use std::sync::Arc;

use super::super::device::{Buf, Device, Elt, GpuError, Staging};
use super::super::gemm::Gemm;
use super::super::lt::{Lt, Operands, Shape};
use super::super::units;
use super::super::weights::{Packed, Packer, padded};
use super::{Kernels, Place, ROWS, SPARE, Whisper, attend_shared, defines};

/// Layers of one side.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stack {
    /// How many.
    pub layers: usize,
    /// Attention heads of each.
    pub heads: usize,
    /// Inner width of their feed-forward parts.
    pub inner: usize,
}

/// Sizes of the network.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sizes {
    /// Of every layer.
    pub width: usize,
    /// Of the features.
    pub bands: usize,
    /// Of one window; even.
    pub frames: usize,
    /// Positions of a text, its prompt included.
    pub text: usize,
    /// Entries of the vocabulary.
    pub vocabulary: usize,
    /// What hears.
    pub encoder: Stack,
    /// What writes.
    pub decoder: Stack,
    /// What token vectors are multiplied by.
    pub token_scale: f32,
}

impl Sizes {
    /// Positions of one window.
    pub fn positions(&self) -> usize {
        self.frames / 2
    }

    /// Values that a text keeps of its window, and of itself.
    pub(super) fn heard_values(&self) -> usize {
        self.decoder.layers * self.positions() * 2 * self.width
    }

    pub(super) fn written_values(&self) -> usize {
        self.decoder.layers * self.text * 2 * self.width
    }

    /// Layers of the encoder that take about so many operations, at least one.
    pub(super) fn layers_of(&self, operations: f64) -> usize {
        let (positions, width) = (self.positions() as f64, self.width as f64);
        let gemms = 2.0 * positions * width * (4.0 * width + 2.0 * self.encoder.inner as f64);
        let attention = 4.0 * positions * positions * width;
        ((operations / (gemms + attention)) as usize).max(1)
    }

    /// Whether the kernels run these sizes where a block has `shared` bytes.
    fn check(&self, elt: Elt, shared: u32) -> Result<(), GpuError> {
        let head = |stack: &Stack| {
            let head = self.width / stack.heads.max(1);
            (16..=128).contains(&head) && head.is_power_of_two() && head * stack.heads == self.width
        };
        let fits = head(&self.encoder)
            && head(&self.decoder)
            && [self.width, self.encoder.inner, self.decoder.inner].iter().all(|n| n.is_multiple_of(32) && *n > 0)
            && self.frames.is_multiple_of(2)
            && attend_shared(elt, self.width / self.encoder.heads) <= shared
            && 4 * self.positions().max(self.text) < 32 << 10;
        if fits {
            return Ok(());
        }
        Err(GpuError::Model(format!(
            "Whisper of these sizes does not run on a GPU, whose kernels take heads 16, 32, 64 or 128 wide and layers in \
             multiples of 32: {self:?}"
        )))
    }
}

/// Where weights come from.
pub trait Tensors {
    /// The values of `name`, row-major; each is asked for once.
    ///
    /// # Errors
    /// There is no such tensor of that shape.
    fn floats(&mut self, name: &str, shape: &[usize]) -> Result<Vec<f32>, GpuError>;
}

/// A GEMM of the rows of a window: for cuBLASLt, or where that does not serve for a kernel of ours.
pub(super) struct Projection {
    pub(super) plain: Option<(Buf, Buf)>,
    pub(super) packed: Option<Packed>,
    pub(super) n: usize,
    pub(super) k: usize,
}

impl Projection {
    /// Of so many rows.
    pub(super) fn shape(&self, rows: usize) -> Shape {
        Shape { m: rows, n: self.n, k: self.k, gelu: false, fp8: false }
    }
}

pub(super) struct Norm {
    pub(super) weight: Buf,
    pub(super) bias: Buf,
}

pub(super) struct EncoderLayer {
    pub(super) attention_norm: Norm,
    pub(super) qkv: Projection,
    pub(super) out: Projection,
    pub(super) forward_norm: Norm,
    pub(super) up: Projection,
    pub(super) down: Projection,
}

pub(super) struct Encoder {
    pub(super) conv1: Projection,
    pub(super) conv2: Projection,
    pub(super) places: Buf,
    pub(super) layers: Vec<EncoderLayer>,
    pub(super) norm: Norm,
}

pub(super) struct DecoderLayer {
    pub(super) attention_norm: Norm,
    pub(super) qkv: Packed,
    pub(super) out: Packed,
    pub(super) heard_norm: Norm,
    pub(super) query: Packed,
    /// Keys and values of a window.
    pub(super) memory: Projection,
    pub(super) heard_out: Packed,
    pub(super) forward_norm: Norm,
    pub(super) up: Packed,
    pub(super) down: Packed,
}

pub(super) struct Decoder {
    /// `[vocabulary, width]`.
    pub(super) tokens: Buf,
    pub(super) places: Buf,
    pub(super) layers: Vec<DecoderLayer>,
    pub(super) norm: Norm,
    /// The token vectors again, as a GEMM.
    pub(super) vocabulary: Packed,
}

/// Activations, and what texts keep.
///
/// Why this struct is large: a window may be half heard while texts are written, so that both have their own.
pub(super) struct Scratch {
    pub(super) features: Staging,
    pub(super) taps: Buf,
    pub(super) halves: Buf,
    pub(super) x: Buf,
    pub(super) normed: Buf,
    pub(super) qkv: Buf,
    pub(super) taken: Buf,
    pub(super) y: Buf,
    pub(super) inner: Buf,
    pub(super) words: Staging,
    pub(super) text_x: Buf,
    pub(super) text_normed: Buf,
    pub(super) text_qkv: Buf,
    pub(super) text_taken: Buf,
    pub(super) text_y: Buf,
    pub(super) text_inner: Buf,
    pub(super) scores: Staging,
    /// Of every text: keys and values of its window and of its own tokens.
    pub(super) heard: Buf,
    pub(super) written: Buf,
}

/// What layers are made with.
struct Loader<'a> {
    device: Arc<Device>,
    packer: Packer,
    tensors: &'a mut dyn Tensors,
}

/// The rows of a GEMM: weights `[n, k]` and biases.
struct Rows {
    weight: Vec<f32>,
    bias: Vec<f32>,
    k: usize,
}

impl Loader<'_> {
    fn floats(&mut self, name: &str, shape: &[usize]) -> Result<Vec<f32>, GpuError> {
        self.tensors.floats(name, shape)
    }

    /// Layers over the same `k` inputs, one after the other: name, outputs, whether there is a bias, and a factor.
    fn rows(&mut self, parts: &[(String, usize, bool, f32)], k: usize) -> Result<Rows, GpuError> {
        let mut rows = Rows { weight: Vec::new(), bias: Vec::new(), k };
        for (name, n, biased, factor) in parts {
            let weight = self.floats(&format!("{name}.weight"), &[*n, k])?;
            let bias = if *biased { self.floats(&format!("{name}.bias"), &[*n])? } else { vec![0.0; *n] };
            rows.weight.extend(weight.iter().map(|v| v * factor));
            rows.bias.extend(bias.iter().map(|v| v * factor));
        }
        Ok(rows)
    }

    fn layer(&mut self, name: String, n: usize, k: usize) -> Result<Rows, GpuError> {
        self.rows(&[(name, n, true, 1.0)], k)
    }

    /// A convolution of three taps as rows over `[tap][channel]`, padded to a multiple of 32.
    fn convolution(&mut self, name: &str, out: usize, channels: usize) -> Result<Rows, GpuError> {
        let weight = self.floats(&format!("{name}.weight"), &[out, channels, 3])?;
        let bias = self.floats(&format!("{name}.bias"), &[out])?;
        let k = padded(3 * channels);
        let mut rows = Rows { weight: vec![0.0; out * k], bias, k };
        for (to, from) in rows.weight.chunks_mut(k).zip(weight.chunks(3 * channels)) {
            for (channel, taps) in from.chunks(3).enumerate() {
                for (tap, value) in taps.iter().enumerate() {
                    to[tap * channels + channel] = *value;
                }
            }
        }
        Ok(rows)
    }

    fn packed(&self, rows: &Rows) -> Result<Packed, GpuError> {
        self.packer.whole(&rows.weight, rows.bias.len(), rows.k, 1, Some(&rows.bias))
    }

    fn projection(&self, rows: &Rows) -> Result<Projection, GpuError> {
        let (n, k) = (rows.bias.len(), rows.k);
        if self.packer.elt == Elt::F32 {
            return Ok(Projection { plain: None, packed: Some(self.packed(rows)?), n, k });
        }
        let plain = (self.packer.elements(&rows.weight)?, self.packer.elements(&rows.bias)?);
        Ok(Projection { plain: Some(plain), packed: None, n, k })
    }

    fn norm(&mut self, name: &str, width: usize) -> Result<Norm, GpuError> {
        let weight = self.floats(&format!("{name}.weight"), &[width])?;
        let bias = self.floats(&format!("{name}.bias"), &[width])?;
        Ok(Norm { weight: self.device.upload("weights", &weight)?, bias: self.device.upload("weights", &bias)? })
    }

    fn table(&mut self, name: &str, shape: &[usize]) -> Result<Buf, GpuError> {
        let values = self.floats(name, shape)?;
        self.device.upload("weights", &values)
    }

    fn encoder(&mut self, sizes: &Sizes) -> Result<Encoder, GpuError> {
        let (root, width) = ("model.encoder", sizes.width);
        let conv1 = self.convolution(&format!("{root}.conv1"), width, sizes.bands)?;
        let conv2 = self.convolution(&format!("{root}.conv2"), width, width)?;
        let mut layers = Vec::new();
        for n in 0..sizes.encoder.layers {
            let name = format!("{root}.layers.{n}");
            let qkv = self.rows(&self_attention(&name, width, sizes.encoder.heads), width)?;
            let out = self.layer(format!("{name}.self_attn.out_proj"), width, width)?;
            let up = self.layer(format!("{name}.fc1"), sizes.encoder.inner, width)?;
            let down = self.layer(format!("{name}.fc2"), width, sizes.encoder.inner)?;
            layers.push(EncoderLayer {
                attention_norm: self.norm(&format!("{name}.self_attn_layer_norm"), width)?,
                qkv: self.projection(&qkv)?,
                out: self.projection(&out)?,
                forward_norm: self.norm(&format!("{name}.final_layer_norm"), width)?,
                up: self.projection(&up)?,
                down: self.projection(&down)?,
            });
        }
        Ok(Encoder {
            conv1: self.projection(&conv1)?,
            conv2: self.projection(&conv2)?,
            places: self.table(&format!("{root}.embed_positions.weight"), &[sizes.positions(), width])?,
            layers,
            norm: self.norm(&format!("{root}.layer_norm"), width)?,
        })
    }

    fn decoder(&mut self, sizes: &Sizes) -> Result<Decoder, GpuError> {
        let (root, width, inner) = ("model.decoder", sizes.width, sizes.decoder.inner);
        let mut layers = Vec::new();
        for n in 0..sizes.decoder.layers {
            let name = format!("{root}.layers.{n}");
            let heard = format!("{name}.encoder_attn");
            let qkv = self.rows(&self_attention(&name, width, sizes.decoder.heads), width)?;
            let out = self.layer(format!("{name}.self_attn.out_proj"), width, width)?;
            let scale = scale(width, sizes.decoder.heads);
            let query = self.rows(&[(format!("{heard}.q_proj"), width, true, scale)], width)?;
            let parts = [(format!("{heard}.k_proj"), width, false, 1.0), (format!("{heard}.v_proj"), width, true, 1.0)];
            let memory = self.rows(&parts, width)?;
            let heard_out = self.layer(format!("{heard}.out_proj"), width, width)?;
            let up = self.layer(format!("{name}.fc1"), inner, width)?;
            let down = self.layer(format!("{name}.fc2"), width, inner)?;
            layers.push(DecoderLayer {
                attention_norm: self.norm(&format!("{name}.self_attn_layer_norm"), width)?,
                qkv: self.packed(&qkv)?,
                out: self.packed(&out)?,
                heard_norm: self.norm(&format!("{heard}_layer_norm"), width)?,
                query: self.packed(&query)?,
                memory: self.projection(&memory)?,
                heard_out: self.packed(&heard_out)?,
                forward_norm: self.norm(&format!("{name}.final_layer_norm"), width)?,
                up: self.packed(&up)?,
                down: self.packed(&down)?,
            });
        }
        let tokens = self.floats(&format!("{root}.embed_tokens.weight"), &[sizes.vocabulary, width])?;
        Ok(Decoder {
            vocabulary: self.packer.whole(&tokens, sizes.vocabulary, width, 1, None)?,
            tokens: self.packer.elements(&tokens)?,
            places: self.table(&format!("{root}.embed_positions.weight"), &[sizes.text, width])?,
            layers,
            norm: self.norm(&format!("{root}.layer_norm"), width)?,
        })
    }
}

/// What scores are multiplied by.
fn scale(width: usize, heads: usize) -> f32 {
    ((width / heads) as f32).sqrt().recip()
}

/// Queries, scaled, keys and values as the parts of one GEMM. Keys have no bias.
fn self_attention(name: &str, width: usize, heads: usize) -> [(String, usize, bool, f32); 3] {
    let part = |part: &str| format!("{name}.self_attn.{part}_proj");
    [(part("q"), width, true, scale(width, heads)), (part("k"), width, false, 1.0), (part("v"), width, true, 1.0)]
}

impl Whisper {
    /// Loads a checkpoint of `sizes` onto `place`, with memory for as many of `texts` texts as there is room for.
    ///
    /// # Errors
    /// The kernels do not run these sizes, a tensor is missing, or there is not enough memory for one text.
    pub fn load(
        place: &Place,
        sizes: &Sizes,
        tensors: &mut dyn Tensors,
        elt: Elt,
        texts: usize,
    ) -> Result<Self, GpuError> {
        let device = place.0.clone();
        sizes.check(elt, device.shared)?;
        let (encoder_head, decoder_head) = (sizes.width / sizes.encoder.heads, sizes.width / sizes.decoder.heads);
        let module = device.compile(&units::WHISPER, elt, &defines(encoder_head, decoder_head))?;
        let kernel = |name| module.kernel(name, 0);
        let kernels = Kernels {
            frames: kernel("hear_frames")?,
            halves: kernel("hear_halves")?,
            gelu: kernel("hear_gelu")?,
            places: kernel("hear_places")?,
            embed: kernel("hear_embed")?,
            norm: kernel("hear_norm")?,
            keep: kernel("hear_keep")?,
            recall: kernel("hear_recall")?,
            attend: module.kernel("hear_attend", attend_shared(elt, encoder_head))?,
        };
        let gemm = Gemm::new(&device, elt)?;
        let packer = Packer::new(&device, elt)?;
        let lt = if elt == Elt::F32 { None } else { Some(Lt::new(&device, elt)?) };
        let mut loader = Loader { device: device.clone(), packer, tensors };
        let encoder = loader.encoder(sizes)?;
        let decoder = loader.decoder(sizes)?;
        let each = (sizes.heard_values() + (1 + SPARE) * sizes.written_values()) * elt.size();
        // At most a quarter of what is left: the rest is for speech.
        let texts = texts.min((device.room()? / 4) as usize / each.max(1)).max(1);
        let written = texts * (1 + SPARE);
        let scratch = scratch(&device, sizes, &decoder, elt, (texts, written))?;
        let (sizes, window) = (*sizes, None);
        let mut this =
            Self { device, sizes, elt, gemm, lt, kernels, encoder, decoder, scratch, texts, written, window };
        this.prepare()?;
        Ok(this)
    }

    /// Chooses how GEMMs run, so that no caller waits for it; and runs everything once.
    fn prepare(&mut self) -> Result<(), GpuError> {
        if let Some(lt) = &mut self.lt {
            let Encoder { conv1, conv2, layers, .. } = &self.encoder;
            let s = &self.scratch;
            let positions = self.sizes.positions();
            let mut all = vec![(conv1, self.sizes.frames, &s.taps, &s.halves), (conv2, positions, &s.taps, &s.y)];
            if let Some(layer) = layers.first() {
                all.extend([
                    (&layer.qkv, positions, &s.normed, &s.qkv),
                    (&layer.out, positions, &s.taken, &s.y),
                    (&layer.up, positions, &s.normed, &s.inner),
                    (&layer.down, positions, &s.inner, &s.y),
                ]);
            }
            if let Some(layer) = self.decoder.layers.first() {
                all.push((&layer.memory, positions, &s.normed, &s.heard));
            }
            for (projection, rows, x, y) in all {
                if let Some((w, bias)) = &projection.plain {
                    lt.prepare(projection.shape(rows), Operands::whole(x.ptr, w.ptr, bias.ptr, y.ptr))?;
                }
            }
        }
        self.open(0, &vec![0.0; self.sizes.frames * self.sizes.bands])?;
        while !self.listen()? {}
        let word = super::Word { text: 0, window: 0, position: 0, token: 0, scored: true };
        self.write(&[word]).map(drop)
    }
}

fn scratch(
    device: &Arc<Device>,
    sizes: &Sizes,
    decoder: &Decoder,
    elt: Elt,
    (texts, written): (usize, usize),
) -> Result<Scratch, GpuError> {
    let Sizes { width, frames, .. } = *sizes;
    let positions = sizes.positions();
    // The driver's zeros are numbers in every type: what was never written must be.
    let elements = |count: usize| device.zeros("activations", count * elt.size());
    let floats = |count: usize| device.zeros("activations", count * 4);
    Ok(Scratch {
        features: Staging::new(device, "features", frames * sizes.bands * 4)?,
        taps: elements((frames * padded(3 * sizes.bands)).max(positions * padded(3 * width)))?,
        halves: elements(frames * width)?,
        x: floats(positions * width)?,
        normed: elements(positions * width)?,
        qkv: elements(positions * 3 * width)?,
        taken: elements(positions * width)?,
        y: elements(positions * width)?,
        inner: elements(positions * sizes.encoder.inner)?,
        words: Staging::new(device, "words", 5 * ROWS * 4)?,
        text_x: floats(ROWS * width)?,
        text_normed: elements(ROWS * width)?,
        text_qkv: elements(ROWS * 3 * width)?,
        text_taken: elements(ROWS * width)?,
        text_y: elements(ROWS * width)?,
        text_inner: elements(ROWS * sizes.decoder.inner)?,
        scores: Staging::new(device, "scores", ROWS * decoder.vocabulary.n * 4)?,
        heard: elements(texts * sizes.heard_values())?,
        written: elements(written * sizes.written_values())?,
    })
}
