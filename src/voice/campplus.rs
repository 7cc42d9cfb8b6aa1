//! CAM++: the speaker encoder, `campplus.onnx` as a candle network.
//!
//! Owns the network and its sizes, all read from the file. Filterbank in, one vector out. Source: 3D-Speaker
//! (D-TDNN with context-aware masking).
//!
//! # Why
//! - Activations of the two-dimensional front are `[band, channel, time]`: candle's `conv2d` has one stride for
//!   both axes and the front strides bands only, so each output band is computed from the three input bands it
//!   sees: one product for each of the three taps in time, without a copy of the input for each tap.
//! - The last pooling window is divided by 100 though it holds fewer frames ([`Pooling::Fixed`]): the runtime that
//!   the checkpoint was trained and is used with did so. See [`Pooling`].

use std::path::Path;

use candle_core::{Device, Result, Tensor};

use super::features::{FBANK_BANDS, Matrix};
use super::onnx::{Binder, Model, OnnxError, Weight};

/// `eps` of every batch normalisation.
const EPS: f64 = 1e-5;
/// Frames of a pooling window when the graph does not say.
const SEGMENT: usize = 100;
/// Fewest filterbank frames: the standard deviation needs two frames after the stride of two.
pub const MIN_FRAMES: usize = 3;

/// What the sum of the last, partial pooling window is divided by.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Pooling {
    /// By the window's full length, as ONNX Runtime up to 1.28 does. The checkpoint's own.
    #[default]
    Fixed,
    /// By the frames it holds, as the ONNX specification, PyTorch and later runtimes do.
    Spec,
}

/// Where a forward pass stops to show its inside.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Probe {
    /// `[channels * bands, T]` after the two-dimensional front.
    Head,
    /// `[channels, T / 2]` after the strided convolution.
    Tdnn,
    /// `[bottleneck, T / 2]`: segment means in the first dense layer.
    Segments,
    /// `[growth, T / 2]`: output of the first dense layer, before it is appended.
    Layer1,
    /// `[2 * channels]`: mean and standard deviation.
    Stats,
    /// `[embedding]`: the speaker vector.
    Embedding,
}

/// The loaded network.
pub struct CamPlus {
    conv1: Conv2d,
    residual: Vec<Residual>,
    conv2: Conv2d,
    tdnn: Linear,
    tdnn_stride: usize,
    blocks: Vec<Block>,
    dense: Tensor,
    norm: Norm,
    segment: usize,
}

impl CamPlus {
    /// Loads the network (28 MB at full size).
    ///
    /// # Errors
    /// The file is not readable, or its parameters are not those of a CAM++.
    pub fn load(path: &Path) -> std::result::Result<Self, OnnxError> {
        let model = Model::open(path)?;
        let plan = Plan::bind(&model)?;
        plan.load(&model)
            .map_err(|e| OnnxError::Format { path: path.to_owned(), reason: format!("loading its weights: {e}") })
    }

    /// The speaker vector of a filterbank `[frames, 80]` whose time mean was subtracted; raw, not normalised.
    ///
    /// # Errors
    /// Fewer than [`MIN_FRAMES`] frames, or not 80 bands.
    pub fn embed(&self, fbank: &Matrix, pooling: Pooling) -> Result<Vec<f32>> {
        self.probe(fbank, pooling, Probe::Embedding)?.flatten_all()?.to_vec1()
    }

    /// Runs as far as `probe` and returns what is there.
    ///
    /// # Errors
    /// As [`CamPlus::embed`].
    pub fn probe(&self, fbank: &Matrix, pooling: Pooling, probe: Probe) -> Result<Tensor> {
        if fbank.rows < MIN_FRAMES || fbank.cols != FBANK_BANDS {
            candle_core::bail!(
                "a filterbank of {} x {}, expected {FBANK_BANDS} bands and at least {MIN_FRAMES} frames",
                fbank.rows,
                fbank.cols
            );
        }
        // [T, 80] -> [80, 1, T]
        let image = Tensor::from_slice(&fbank.data, (fbank.rows, fbank.cols), &Device::Cpu)?.t()?.unsqueeze(1)?;
        let mut x = self.conv1.forward(&image)?.relu()?;
        for block in &self.residual {
            x = block.forward(&x)?;
        }
        let x = self.conv2.forward(&x)?.relu()?;
        // [band, channel, T] -> [channel * band, T], the channel outermost
        let x = x.transpose(0, 1)?.contiguous()?.flatten(0, 1)?;
        if probe == Probe::Head {
            return Ok(x);
        }
        let mut x = self.tdnn.conv(&x, self.tdnn_stride, 1)?.relu()?;
        if probe == Probe::Tdnn {
            return Ok(x);
        }
        for block in &self.blocks {
            for layer in &block.layers {
                let h = layer.bottleneck(&x)?;
                let context = layer.context(&h, self.segment, pooling)?;
                if probe == Probe::Segments {
                    return spread(&context.segments, self.segment, h.dim(1)?);
                }
                let y = layer.masked(&h, &context, self.segment)?;
                if probe == Probe::Layer1 {
                    return Ok(y);
                }
                x = Tensor::cat(&[&x, &y], 0)?;
            }
            x = block.transit.pointwise(&block.norm.forward(&x)?.relu()?)?;
        }
        let x = x.relu()?;
        let mean = x.mean_keepdim(1)?;
        let variance = (x.broadcast_sub(&mean)?.sqr()?.sum_keepdim(1)? / (x.dim(1)? - 1) as f64)?;
        let stats = Tensor::cat(&[mean, variance.sqrt()?], 0)?;
        if probe == Probe::Stats {
            return stats.flatten_all();
        }
        self.norm.forward(&self.dense.matmul(&stats)?)?.flatten_all()
    }
}

/// A 3x3 or 1x1 convolution over `[band, channel, time]`, stride in bands only.
struct Conv2d {
    /// For each tap in time `[out, bands * in]`: the bands it sees, stacked.
    taps: Vec<Tensor>,
    bias: Tensor,
    bands: usize,
    stride: usize,
}

impl Conv2d {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let (height, _, frames) = x.dims3()?;
        let around = (self.taps.len() / 2, self.bands / 2);
        let padded = x.pad_with_zeros(0, around.1, around.1)?.pad_with_zeros(2, around.0, around.0)?;
        let rows: Result<Vec<Tensor>> = (0..(height - 1) / self.stride + 1)
            .map(|row| {
                let seen = padded.narrow(0, row * self.stride, self.bands)?.flatten(0, 1)?;
                let mut sum = self.bias.clone();
                for (tap, kernel) in self.taps.iter().enumerate() {
                    sum = kernel.matmul(&seen.narrow(1, tap, frames)?)?.broadcast_add(&sum)?;
                }
                sum.unsqueeze(0)
            })
            .collect();
        Tensor::cat(&rows?, 0)
    }
}

struct Residual {
    conv1: Conv2d,
    conv2: Conv2d,
    shortcut: Option<Conv2d>,
}

impl Residual {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let y = self.conv2.forward(&self.conv1.forward(x)?.relu()?)?;
        let shortcut = match &self.shortcut {
            Some(conv) => conv.forward(x)?,
            None => x.clone(),
        };
        (y + shortcut)?.relu()
    }
}

/// A convolution over `[channel, time]`.
struct Linear {
    kernel: Tensor,
    bias: Option<Tensor>,
}

impl Linear {
    fn pointwise(&self, x: &Tensor) -> Result<Tensor> {
        self.biased(self.kernel.squeeze(2)?.matmul(x)?)
    }

    fn conv(&self, x: &Tensor, stride: usize, dilation: usize) -> Result<Tensor> {
        let pad = self.kernel.dim(2)? / 2 * dilation;
        self.biased(x.unsqueeze(0)?.conv1d(&self.kernel, pad, stride, dilation, 1)?.squeeze(0)?)
    }

    fn biased(&self, y: Tensor) -> Result<Tensor> {
        match &self.bias {
            Some(bias) => y.broadcast_add(&bias.unsqueeze(1)?),
            None => Ok(y),
        }
    }
}

/// A batch normalisation as one multiplication and one addition a channel.
struct Norm {
    scale: Tensor,
    shift: Tensor,
}

impl Norm {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        x.broadcast_mul(&self.scale)?.broadcast_add(&self.shift)
    }
}

struct Block {
    layers: Vec<Dense>,
    norm: Norm,
    transit: Linear,
}

/// One dense layer with its context-aware mask.
struct Dense {
    norm: Norm,
    linear1: Linear,
    local: Linear,
    dilation: usize,
    context1: Linear,
    context2: Linear,
}

/// Means of a layer's hidden state.
struct Context {
    /// `[channels, 1]` over all frames.
    mean: Tensor,
    /// `[channels, segments]`.
    segments: Tensor,
}

impl Dense {
    fn bottleneck(&self, x: &Tensor) -> Result<Tensor> {
        self.linear1.pointwise(&self.norm.forward(x)?.relu()?)?.relu()
    }

    fn context(&self, h: &Tensor, segment: usize, pooling: Pooling) -> Result<Context> {
        let frames = h.dim(1)?;
        let segments: Result<Vec<Tensor>> = (0..frames.div_ceil(segment))
            .map(|i| {
                let held = segment.min(frames - i * segment);
                let divisor = if pooling == Pooling::Spec { held } else { segment };
                h.narrow(1, i * segment, held)?.sum_keepdim(1)? / divisor as f64
            })
            .collect();
        Ok(Context { mean: h.mean_keepdim(1)?, segments: Tensor::cat(&segments?, 1)? })
    }

    /// The gate is constant within a segment, so it is computed once for each.
    fn masked(&self, h: &Tensor, context: &Context, segment: usize) -> Result<Tensor> {
        let y = self.local.conv(h, 1, self.dilation)?;
        let gate = context.segments.broadcast_add(&context.mean)?;
        let gate = self.context2.pointwise(&self.context1.pointwise(&gate)?.relu()?)?;
        y * spread(&candle_nn::ops::sigmoid(&gate)?, segment, h.dim(1)?)?
    }
}

/// Repeats each column `segment` times, cut to `frames` columns.
fn spread(columns: &Tensor, segment: usize, frames: usize) -> Result<Tensor> {
    let index: Vec<u32> = (0..frames).map(|t| (t / segment) as u32).collect();
    columns.index_select(&Tensor::from_vec(index, frames, columns.device())?, 1)
}

/// Parameters found in the file, before any is copied.
struct Plan {
    conv1: Conv2dPlan,
    residual: Vec<(Conv2dPlan, Conv2dPlan, Option<Conv2dPlan>)>,
    conv2: Conv2dPlan,
    tdnn: LinearPlan,
    tdnn_stride: usize,
    blocks: Vec<BlockPlan>,
    dense: Weight,
    mean: Weight,
    variance: Weight,
    segment: usize,
}

struct Conv2dPlan {
    kernel: Weight,
    bias: Weight,
    stride: usize,
}

struct LinearPlan {
    kernel: Weight,
    bias: Option<Weight>,
}

struct NormPlan([Weight; 4]);

struct BlockPlan {
    layers: Vec<DensePlan>,
    norm: NormPlan,
    transit: LinearPlan,
}

struct DensePlan {
    norm: NormPlan,
    linear1: LinearPlan,
    local: LinearPlan,
    dilation: usize,
    context1: LinearPlan,
    context2: LinearPlan,
}

impl Plan {
    fn bind(model: &Model) -> std::result::Result<Self, OnnxError> {
        let mut b = Binder::new(model);
        let conv1 = conv2d(&mut b, model, "/head/conv1/Conv", Some(1), None, 3);
        let channels = conv1.kernel.dim(0);
        let mut residual = Vec::new();
        let mut bands = FBANK_BANDS;
        for layer in 1..=model.count(1, |l| format!("/head/layer{l}/layer{l}.0/conv1/Conv")).max(1) {
            let path = |block: usize, conv: &str| format!("/head/layer{layer}/layer{layer}.{block}/{conv}/Conv");
            for block in 0..model.count(0, |i| path(i, "conv1")).max(1) {
                let first = conv2d(&mut b, model, &path(block, "conv1"), channels, channels, 3);
                let second = conv2d(&mut b, model, &path(block, "conv2"), channels, channels, 3);
                let shortcut = path(block, "shortcut/shortcut.0");
                let shortcut = model.has(&shortcut).then(|| conv2d(&mut b, model, &shortcut, channels, channels, 1));
                if shortcut.as_ref().map_or(1, |s| s.stride) != first.stride {
                    b.complain(format!("`{}` strides unlike its shortcut", path(block, "conv1")));
                }
                bands = bands.div_ceil(first.stride);
                residual.push((first, second, shortcut));
            }
        }
        let conv2 = conv2d(&mut b, model, "/head/conv2/Conv", channels, channels, 3);
        bands = bands.div_ceil(conv2.stride);

        let tdnn = linear(&mut b, "/xvector/tdnn/linear/Conv", channels.map(|c| c * bands), None, None);
        let tdnn_stride = model.attribute("/xvector/tdnn/linear/Conv", "strides").unwrap_or(2).max(1);
        let mut width = tdnn.kernel.dim(0);
        let mut blocks = Vec::new();
        for block in 1..=model.count(1, |i| format!("/xvector/transit{i}/linear/Conv")).max(1) {
            let mut layers = Vec::new();
            let path = |layer: usize, part: &str| format!("/xvector/block{block}/tdnnd{layer}/{part}");
            for i in 1..=model.count(1, |i| path(i, "linear1/Conv")).max(1) {
                let norm = norm(&mut b, &path(i, "nonlinear1/batchnorm/BatchNormalization"), width);
                let linear1 = linear(&mut b, &path(i, "linear1/Conv"), width, None, Some(1));
                let hidden = linear1.kernel.dim(0);
                let name = path(i, "cam_layer/linear_local/Conv");
                let local = linear(&mut b, &name, hidden, None, None);
                let growth = local.kernel.dim(0);
                let dilation = model.attribute(&name, "dilations").unwrap_or(1).max(1);
                let context1 = linear(&mut b, &path(i, "cam_layer/linear1/Conv"), hidden, None, Some(1));
                let inner = context1.kernel.dim(0);
                let context2 = linear(&mut b, &path(i, "cam_layer/linear2/Conv"), inner, growth, Some(1));
                layers.push(DensePlan { norm, linear1, local, dilation, context1, context2 });
                width = width.zip(growth).map(|(w, g)| w + g);
            }
            let name = |part: &str| format!("/xvector/transit{block}/{part}");
            let norm = norm(&mut b, &name("nonlinear/batchnorm/BatchNormalization"), width);
            let transit = linear(&mut b, &name("linear/Conv"), width, None, Some(1));
            width = transit.kernel.dim(0);
            blocks.push(BlockPlan { layers, norm, transit });
        }

        let dense = b.input("/xvector/dense/linear/Conv", 1, &[None, width.map(|w| 2 * w), Some(1)]);
        let last = "/xvector/dense/nonlinear/batchnorm/BatchNormalization";
        let mean = b.input(last, 3, &[dense.dim(0)]);
        let variance = b.input(last, 4, &[dense.dim(0)]);
        let pool = "/xvector/block1/tdnnd1/cam_layer/AveragePool";
        let segment = model.attribute(pool, "kernel_shape").unwrap_or(SEGMENT).max(1);
        b.finish()?;
        Ok(Self { conv1, residual, conv2, tdnn, tdnn_stride, blocks, dense, mean, variance, segment })
    }

    fn load(&self, model: &Model) -> Result<CamPlus> {
        let residual: Result<_> = self
            .residual
            .iter()
            .map(|(conv1, conv2, shortcut)| {
                let shortcut = shortcut.as_ref().map(|s| s.load(model)).transpose()?;
                Ok(Residual { conv1: conv1.load(model)?, conv2: conv2.load(model)?, shortcut })
            })
            .collect();
        let scale = (model.tensor(&self.variance)? + EPS)?.sqrt()?.recip()?;
        let shift = (model.tensor(&self.mean)?.neg()? * &scale)?;
        Ok(CamPlus {
            conv1: self.conv1.load(model)?,
            residual: residual?,
            conv2: self.conv2.load(model)?,
            tdnn: self.tdnn.load(model)?,
            tdnn_stride: self.tdnn_stride,
            blocks: self.blocks.iter().map(|b| b.load(model)).collect::<Result<_>>()?,
            dense: model.tensor(&self.dense)?.squeeze(2)?,
            norm: Norm { scale: scale.unsqueeze(1)?, shift: shift.unsqueeze(1)? },
            segment: self.segment,
        })
    }
}

fn conv2d(
    b: &mut Binder<'_>,
    model: &Model,
    node: &str,
    input: Option<usize>,
    output: Option<usize>,
    size: usize,
) -> Conv2dPlan {
    let kernel = b.input(node, 1, &[output, input, Some(size), Some(size)]);
    let bias = b.input(node, 2, &[kernel.dim(0)]);
    Conv2dPlan { kernel, bias, stride: model.attribute(node, "strides").unwrap_or(1).max(1) }
}

fn linear(
    b: &mut Binder<'_>,
    node: &str,
    input: Option<usize>,
    output: Option<usize>,
    size: Option<usize>,
) -> LinearPlan {
    let kernel = b.input(node, 1, &[output, input, size]);
    let bias = b.optional(node, 2, &[kernel.dim(0)]);
    LinearPlan { kernel, bias }
}

fn norm(b: &mut Binder<'_>, node: &str, width: Option<usize>) -> NormPlan {
    NormPlan([1, 2, 3, 4].map(|input| b.input(node, input, &[width])))
}

impl Conv2dPlan {
    fn load(&self, model: &Model) -> Result<Conv2d> {
        // [out, in, band, time] -> for each time [out, band * in]
        let kernel = model.tensor(&self.kernel)?;
        let (bands, width) = (kernel.dim(2)?, kernel.dim(3)?);
        let kernel = kernel.transpose(1, 2)?.contiguous()?.flatten(1, 2)?;
        let taps = (0..width).map(|tap| kernel.narrow(2, tap, 1)?.squeeze(2)?.contiguous()).collect::<Result<_>>()?;
        let bias = model.tensor(&self.bias)?.unsqueeze(1)?;
        Ok(Conv2d { taps, bias, bands, stride: self.stride })
    }
}

impl LinearPlan {
    fn load(&self, model: &Model) -> Result<Linear> {
        let bias = self.bias.as_ref().map(|b| model.tensor(b)).transpose()?;
        Ok(Linear { kernel: model.tensor(&self.kernel)?, bias })
    }
}

impl NormPlan {
    fn load(&self, model: &Model) -> Result<Norm> {
        let [weight, bias, mean, variance] = &self.0;
        let scale = (model.tensor(weight)? / (model.tensor(variance)? + EPS)?.sqrt()?)?;
        let shift = (model.tensor(bias)? - (model.tensor(mean)? * &scale)?)?;
        Ok(Norm { scale: scale.unsqueeze(1)?, shift: shift.unsqueeze(1)? })
    }
}

impl BlockPlan {
    fn load(&self, model: &Model) -> Result<Block> {
        let layers = self.layers.iter().map(|l| l.load(model)).collect::<Result<_>>()?;
        Ok(Block { layers, norm: self.norm.load(model)?, transit: self.transit.load(model)? })
    }
}

impl DensePlan {
    fn load(&self, model: &Model) -> Result<Dense> {
        Ok(Dense {
            norm: self.norm.load(model)?,
            linear1: self.linear1.load(model)?,
            local: self.local.load(model)?,
            dilation: self.dilation,
            context1: self.context1.load(model)?,
            context2: self.context2.load(model)?,
        })
    }
}
