//! Randomly initialised enrolment networks in the layout of the released files.
//!
//! Owns names, shapes and scales of their parameters, and the writing of an ONNX file that holds them. For measuring
//! speed and for tests at any size; what such networks compute means nothing. Operations without parameters are
//! left out: readers of weights do not see them, and a runtime would refuse the file.
//!
//! # Why
//! A network is described once as a list of parameters and then streamed: the larger file has 970 MB, and its
//! protobuf lengths must be known before its content.

use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::path::Path;

/// Sizes of a speaker encoder.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CamPlusSize {
    /// Channels of the two-dimensional front.
    pub head: usize,
    /// Channels after it.
    pub tdnn: usize,
    /// Channels that a dense layer appends.
    pub growth: usize,
    /// Channels inside a dense layer.
    pub bottleneck: usize,
    /// Dense layers of each block.
    pub layers: Vec<usize>,
    /// Length of the vector.
    pub embedding: usize,
}

impl CamPlusSize {
    /// The released network's.
    pub fn full() -> Self {
        Self { head: 32, tdnn: 128, growth: 32, bottleneck: 128, layers: vec![12, 24, 16], embedding: 192 }
    }

    /// Small enough for a test.
    pub fn tiny() -> Self {
        Self { head: 4, tdnn: 16, growth: 4, bottleneck: 8, layers: vec![2, 3, 2], embedding: 192 }
    }
}

/// Sizes of a speech tokenizer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TokenizerSize {
    /// Bands of the log-mel.
    pub bands: usize,
    /// Width; a multiple of 64.
    pub width: usize,
    /// Transformer blocks.
    pub blocks: usize,
    /// Width inside the feed-forward part.
    pub mlp: usize,
    /// Taps of the memory; odd.
    pub memory: usize,
    /// Quantised values; there are `3^values` tokens.
    pub values: usize,
}

impl TokenizerSize {
    /// The released network's.
    pub fn full() -> Self {
        Self { bands: 128, width: 1280, blocks: 12, mlp: 5120, memory: 31, values: 8 }
    }

    /// Small enough for a test, with `3^values` tokens.
    pub fn tiny(values: usize) -> Self {
        Self { bands: 128, width: 64, blocks: 2, mlp: 96, memory: 11, values }
    }
}

/// Writes `campplus.onnx` into `dir`.
///
/// # Errors
/// The file cannot be written.
pub fn write_campplus(dir: &Path, size: &CamPlusSize, seed: u64) -> io::Result<()> {
    let mut net = Network::default();
    let half = size.bottleneck / 2;
    let conv2d = |net: &mut Network, path: &str, input: usize, kernel: usize, stride: usize| {
        net.conv(path, &[size.head, input, kernel, kernel], true, &[("strides", &[stride, 1])]);
    };
    conv2d(&mut net, "/head/conv1/Conv", 1, 3, 1);
    for layer in 1..=2 {
        for block in 0..2 {
            let path = format!("/head/layer{layer}/layer{layer}.{block}");
            let stride = if block == 0 { 2 } else { 1 };
            conv2d(&mut net, &format!("{path}/conv1/Conv"), size.head, 3, stride);
            conv2d(&mut net, &format!("{path}/conv2/Conv"), size.head, 3, 1);
            if block == 0 {
                conv2d(&mut net, &format!("{path}/shortcut/shortcut.0/Conv"), size.head, 1, 2);
            }
        }
    }
    conv2d(&mut net, "/head/conv2/Conv", size.head, 3, 2);
    net.conv("/xvector/tdnn/linear/Conv", &[size.tdnn, 10 * size.head, 5], true, &[("strides", &[2])]);
    let mut width = size.tdnn;
    for (block, layers) in (1..).zip(&size.layers) {
        for layer in 1..=*layers {
            let path = format!("/xvector/block{block}/tdnnd{layer}");
            net.norm(&format!("{path}/nonlinear1/batchnorm/BatchNormalization"), width, 1);
            net.conv(&format!("{path}/linear1/Conv"), &[size.bottleneck, width, 1], true, &[]);
            let dilation = if block == 1 { 1 } else { 2 };
            let local = format!("{path}/cam_layer/linear_local/Conv");
            net.conv(&local, &[size.growth, size.bottleneck, 3], false, &[("dilations", &[dilation])]);
            net.conv(&format!("{path}/cam_layer/linear1/Conv"), &[half, size.bottleneck, 1], true, &[]);
            net.conv(&format!("{path}/cam_layer/linear2/Conv"), &[size.growth, half, 1], true, &[]);
            width += size.growth;
        }
        let path = format!("/xvector/transit{block}");
        net.norm(&format!("{path}/nonlinear/batchnorm/BatchNormalization"), width, 1);
        let last = block == size.layers.len();
        net.conv(&format!("{path}/linear/Conv"), &[width / 2, width, 1], last, &[]);
        width /= 2;
    }
    net.conv("/xvector/dense/linear/Conv", &[size.embedding, 2 * width, 1], false, &[]);
    // Without scale and shift of its own: those two inputs are constants of the graph.
    net.norm("/xvector/dense/nonlinear/batchnorm/BatchNormalization", size.embedding, 3);
    net.write(&dir.join("campplus.onnx"), seed)
}

/// Writes `speech_tokenizer_v3.onnx` into `dir`.
///
/// # Errors
/// The file cannot be written.
pub fn write_tokenizer(dir: &Path, size: &TokenizerSize, seed: u64) -> io::Result<()> {
    let mut net = Network::default();
    let n = size.width;
    net.conv("/conv1/Conv", &[n, size.bands, 3], true, &[("strides", &[2])]);
    net.conv("/conv2/Conv", &[n, n, 3], true, &[("strides", &[2])]);
    for block in 0..size.blocks {
        let path = |part: &str| format!("/blocks.{block}/{part}");
        for norm in ["attn_ln", "mlp_ln"] {
            net.operand(&path(&format!("{norm}/Mul")), "Mul", &[n], Scale::One);
            net.operand(&path(&format!("{norm}/Add_1")), "Add", &[n], Scale::Small);
        }
        let linears = [
            ("attn/query", n, n, true),
            ("attn/key", n, n, false),
            ("attn/value", n, n, true),
            ("attn/out", n, n, true),
            ("mlp/mlp.0", n, size.mlp, true),
            ("mlp/mlp.2", size.mlp, n, true),
        ];
        for (part, input, output, bias) in linears {
            net.linear(&path(part), input, output, bias);
        }
        net.conv(&path("attn/fsmn_block/Conv"), &[n, 1, size.memory], false, &[]);
    }
    net.linear("/quantizer/project_in", n, size.values, true);
    net.write(&dir.join("speech_tokenizer_v3.onnx"), seed)
}

/// How large the values of a parameter are.
#[derive(Clone, Copy, Debug)]
enum Scale {
    /// Variance of one over the number of inputs.
    Inputs(usize),
    /// Around 0.
    Small,
    /// Around 1, positive.
    One,
}

#[derive(Default)]
struct Network {
    /// Serialised nodes.
    nodes: Vec<Vec<u8>>,
    parameters: Vec<(String, Vec<usize>, Scale)>,
}

impl Network {
    fn conv(&mut self, path: &str, shape: &[usize], bias: bool, attributes: &[(&str, &[usize])]) {
        let inputs: usize = shape.iter().skip(1).product();
        let mut names = vec!["x".to_owned(), self.parameter(shape, Scale::Inputs(inputs))];
        if bias {
            names.push(self.parameter(&shape[..1], Scale::Small));
        }
        self.node(path, "Conv", &names, attributes);
    }

    /// A batch normalisation whose inputs from number `first` (1: scale) are parameters.
    fn norm(&mut self, path: &str, width: usize, first: usize) {
        let scales = [Scale::One, Scale::Small, Scale::Small, Scale::One];
        let mut names = vec!["x".to_owned()];
        for (input, scale) in (1..).zip(scales) {
            names.push(if input < first { "constant".into() } else { self.parameter(&[width], scale) });
        }
        self.node(path, "BatchNormalization", &names, &[]);
    }

    fn linear(&mut self, path: &str, input: usize, output: usize, bias: bool) {
        self.operand(&format!("{path}/MatMul"), "MatMul", &[input, output], Scale::Inputs(input));
        if bias {
            self.operand(&format!("{path}/Add"), "Add", &[output], Scale::Small);
        }
    }

    fn operand(&mut self, path: &str, operator: &str, shape: &[usize], scale: Scale) {
        let name = self.parameter(shape, scale);
        self.node(path, operator, &["x".into(), name], &[]);
    }

    /// Names are numbers, as exporters give them to folded weights: no code may rely on them.
    fn parameter(&mut self, shape: &[usize], scale: Scale) -> String {
        let name = format!("onnx::{}", self.parameters.len());
        self.parameters.push((name.clone(), shape.to_vec(), scale));
        name
    }

    fn node(&mut self, path: &str, operator: &str, inputs: &[String], attributes: &[(&str, &[usize])]) {
        let mut node = Vec::new();
        for input in inputs {
            bytes(&mut node, 1, input.as_bytes());
        }
        bytes(&mut node, 2, format!("{path}_output_0").as_bytes());
        bytes(&mut node, 3, path.as_bytes());
        bytes(&mut node, 4, operator.as_bytes());
        for (name, values) in attributes {
            let mut attribute = Vec::new();
            bytes(&mut attribute, 1, name.as_bytes());
            for value in *values {
                int(&mut attribute, 8, *value as u64);
            }
            // 20: the attribute's type, 7: integers.
            int(&mut attribute, 20, 7);
            bytes(&mut node, 5, &attribute);
        }
        self.nodes.push(node);
    }

    fn write(&self, path: &Path, seed: u64) -> io::Result<()> {
        let mut nodes = Vec::new();
        for node in &self.nodes {
            bytes(&mut nodes, 1, node);
        }
        // Everything of a parameter but its values, and how many bytes those are.
        let heads: Vec<(Vec<u8>, usize)> = self
            .parameters
            .iter()
            .map(|(name, shape, _)| {
                let size = shape.iter().product::<usize>() * 4;
                let mut tensor = Vec::new();
                for dim in shape {
                    int(&mut tensor, 1, *dim as u64);
                }
                int(&mut tensor, 2, 1);
                bytes(&mut tensor, 8, name.as_bytes());
                head(&mut tensor, 9, size);
                let mut record = Vec::new();
                head(&mut record, 5, tensor.len() + size);
                record.extend(tensor);
                (record, size)
            })
            .collect();
        let length = nodes.len() + heads.iter().map(|(record, size)| record.len() + size).sum::<usize>();

        let mut out = BufWriter::with_capacity(1 << 20, File::create(path)?);
        let mut start = Vec::new();
        // The version of the format.
        int(&mut start, 1, 8);
        head(&mut start, 7, length);
        out.write_all(&start)?;
        out.write_all(&nodes)?;
        let mut random = Random(seed);
        for ((record, size), (_, _, scale)) in heads.iter().zip(&self.parameters) {
            out.write_all(record)?;
            for _ in 0..size / 4 {
                out.write_all(&random.value(*scale).to_le_bytes())?;
            }
        }
        out.flush()
    }
}

/// SplitMix64: fast, and good enough for weights that mean nothing.
struct Random(u64);

impl Random {
    fn value(&mut self, scale: Scale) -> f32 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        // Uniform in -1..1: the variance is a third.
        let uniform = ((z ^ z >> 31) >> 40) as f32 / (1 << 23) as f32 - 1.0;
        match scale {
            Scale::Inputs(n) => uniform * (3.0 / n.max(1) as f32).sqrt(),
            Scale::Small => uniform * 0.05,
            Scale::One => 1.0 + uniform * 0.2,
        }
    }
}

fn varint(out: &mut Vec<u8>, mut value: u64) {
    while value >= 0x80 {
        out.push(value as u8 | 0x80);
        value >>= 7;
    }
    out.push(value as u8);
}

fn int(out: &mut Vec<u8>, field: u64, value: u64) {
    varint(out, field << 3);
    varint(out, value);
}

fn head(out: &mut Vec<u8>, field: u64, length: usize) {
    varint(out, field << 3 | 2);
    varint(out, length as u64);
}

fn bytes(out: &mut Vec<u8>, field: u64, content: &[u8]) {
    head(out, field, content.len());
    out.extend_from_slice(content);
}
