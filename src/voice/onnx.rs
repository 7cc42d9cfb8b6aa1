//! Weights out of an ONNX file: which parameter belongs to which node, and nothing of running the graph ([`stored`] gives
//! what somebody needs who does).
//!
//! Owns the walk over the file's protobuf records and the report of what does not fit. Never computes, never
//! keeps a weight before it is asked for.
//!
//! Contract: [`Model::open`] indexes a file; a network then asks a [`Binder`] for its parameters by
//! *node* name, with the shapes it expects, and [`Binder::finish`] names every missing, misshapen and left-over
//! one in a single report. Afterwards [`Model::tensor`] cannot fail for a bound weight but for lack of memory, or
//! because somebody has written to the file meanwhile.
//!
//! # Why
//! - Node names keep the module path of the original network; names of initialisers with folded normalisation are
//!   numbers that change with every export.
//! - A hand-written walk of about a dozen record kinds (field numbers of `onnx.proto3`) instead of a protobuf
//!   library: the file is 970 MB, and a decoder into structs would hold it twice. The walk has the file in memory, and
//!   gives it back before the first weight is read.

use std::borrow::Cow;
use std::collections::{BTreeSet, HashMap, HashSet};
use std::ops::Range;
use std::path::{Path, PathBuf};

use candle_core::{Device, Tensor};
use half::f16;

use crate::weights_file::{Source, WeightsFile};

pub mod stored;
mod wire;

use wire::{Message, Value};

/// Files beyond these are no enrolment network: the larger of the two has 2,810 nodes.
const MAX_NODES: usize = 100_000;
const MAX_NAME: usize = 4096;

/// Why a network cannot be read from its file.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OnnxError {
    /// The file cannot be opened.
    #[error("{path}: {source}")]
    Io {
        /// Which file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// Not a readable ONNX model.
    #[error("{path}: not a usable ONNX file: {reason}")]
    Format {
        /// Which file.
        path: PathBuf,
        /// What is wrong.
        reason: String,
    },
    /// The parameters are not those of the network.
    #[error("{path}: {} of its parameters do not fit:\n  {}", .problems.len(), .problems.join("\n  "))]
    Weights {
        /// Which file.
        path: PathBuf,
        /// One line each, every one there is.
        problems: Vec<String>,
    },
}

/// An indexed file.
pub struct Model {
    path: PathBuf,
    source: Box<dyn Source + Send + Sync>,
    nodes: HashMap<String, Node>,
    /// Names of the nodes as the file has them: each behind those that it depends on.
    order: Vec<String>,
    initialisers: HashMap<String, Entry>,
    /// Values of `Constant` nodes and sources of `Identity` nodes, by the name of their output.
    constants: HashMap<String, Entry>,
    aliases: HashMap<String, String>,
}

/// One operation of the graph.
#[derive(Debug, Default)]
pub struct Node {
    name: String,
    operator: String,
    inputs: Vec<String>,
    outputs: Vec<String>,
    ints: HashMap<String, Vec<i64>>,
    floats: HashMap<String, f32>,
    constant: Option<Entry>,
}

/// Where a tensor's values lie.
#[derive(Clone, Debug, Default)]
struct Entry {
    name: String,
    dims: Vec<usize>,
    kind: Kind,
    values: Vec<Range<usize>>,
    /// Whole numbers that are not stored as raw bytes.
    ints: Vec<i64>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Kind {
    F32,
    F16,
    U8,
    I8,
    I32,
    I64,
    #[default]
    Other,
}

impl Model {
    /// Reads the file and indexes its graph.
    ///
    /// # Errors
    /// The file cannot be opened, or is no ONNX model with its weights inside.
    pub fn open(path: &Path) -> Result<Self, OnnxError> {
        let io = |source| OnnxError::Io { path: path.to_owned(), source };
        let file = WeightsFile::open(path).map_err(io)?;
        let mut bytes = vec![0; file.size()];
        file.read(&mut bytes, 0).map_err(io)?;
        Self::of(path, &bytes, Box::new(file))
    }

    /// The model of `bytes`, which `source` gives again later.
    fn of(path: &Path, bytes: &[u8], source: Box<dyn Source + Send + Sync>) -> Result<Self, OnnxError> {
        let mut model = Self {
            path: path.to_owned(),
            source,
            nodes: HashMap::new(),
            order: Vec::new(),
            initialisers: HashMap::new(),
            constants: HashMap::new(),
            aliases: HashMap::new(),
        };
        model.index(bytes).map_err(|reason| OnnxError::Format { path: path.to_owned(), reason })?;
        Ok(model)
    }

    /// The file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Whether the graph has a node of that name.
    pub fn has(&self, node: &str) -> bool {
        self.nodes.contains_key(node)
    }

    /// How many of `name(0)`, `name(1)`, ... (from `first`) exist without a gap.
    pub fn count(&self, first: usize, name: impl Fn(usize) -> String) -> usize {
        (first..).take_while(|i| self.has(&name(*i))).count()
    }

    /// First value of an integer list attribute, such as a convolution's dilation.
    pub fn attribute(&self, node: &str, attribute: &str) -> Option<usize> {
        let value = self.nodes.get(node)?.ints.get(attribute)?.first()?;
        usize::try_from(*value).ok()
    }

    /// The single number that enters `node` as a constant, such as the epsilon of a normalisation.
    pub fn constant(&self, node: &str) -> Option<f32> {
        let inputs = &self.nodes.get(node)?.inputs;
        let entry = inputs.iter().find_map(|input| self.resolve(input))?;
        if entry.elements() != 1 { None } else { self.read(entry).ok()?.first().copied() }
    }

    /// Copies a bound weight into a tensor.
    ///
    /// # Errors
    /// Not enough memory, or somebody has written to the file.
    pub fn tensor(&self, weight: &Weight) -> candle_core::Result<Tensor> {
        let Some(entry) = &weight.entry else {
            candle_core::bail!("a weight that was never bound is used");
        };
        let values = self.read(entry).map_err(candle_core::Error::Msg)?;
        Tensor::from_vec(values, entry.dims.as_slice(), &Device::Cpu)
    }

    fn index(&mut self, bytes: &[u8]) -> Result<(), String> {
        let mut graphs = 0;
        let mut seen = 0;
        for field in Message::new(bytes, 0..bytes.len()) {
            let (7, Value::Bytes(graph)) = field? else { continue };
            graphs += 1;
            for field in Message::new(bytes, graph) {
                match field? {
                    (1, Value::Bytes(range)) => {
                        let node = Node::parse(bytes, range)?;
                        match (node.operator.as_str(), node.constant.clone(), node.inputs.first()) {
                            ("Constant", Some(value), _) => {
                                self.constants.extend(node.outputs.first().map(|o| (o.clone(), value)));
                            }
                            ("Identity", _, Some(input)) => {
                                self.aliases.extend(node.outputs.first().map(|o| (o.clone(), input.clone())));
                            }
                            _ => {
                                self.order.push(node.name.clone());
                                self.nodes.insert(node.name.clone(), node);
                            }
                        }
                        seen += 1;
                    }
                    (5, Value::Bytes(range)) => {
                        let entry = Entry::parse(bytes, range)?;
                        self.initialisers.insert(entry.name.clone(), entry);
                        seen += 1;
                    }
                    _ => {}
                }
                if seen > MAX_NODES {
                    return Err(format!("it has more than {MAX_NODES} nodes and weights"));
                }
            }
        }
        match graphs {
            1 => Ok(()),
            0 => Err("it holds no graph".into()),
            _ => Err("it holds more than one graph".into()),
        }
    }

    /// The tensor behind the name of an edge, if it is a fixed one.
    fn resolve(&self, edge: &str) -> Option<&Entry> {
        let mut edge = edge;
        // Bounded: a malformed file may alias in a circle.
        for _ in 0..8 {
            if let Some(entry) = self.initialisers.get(edge).or_else(|| self.constants.get(edge)) {
                return Some(entry);
            }
            edge = self.aliases.get(edge)?;
        }
        None
    }

    /// The bytes of one range of an entry's values.
    fn bytes(&self, entry: &Entry, range: &Range<usize>) -> Result<Cow<'_, [u8]>, String> {
        let written = || format!("`{}` cannot be read any more: {} was written to", entry.name, self.path.display());
        self.source.part(range.clone()).ok_or_else(written)
    }

    fn read(&self, entry: &Entry) -> Result<Vec<f32>, String> {
        let elements = entry.elements();
        let mut out = Vec::with_capacity(elements);
        for range in &entry.values {
            let bytes = self.bytes(entry, range)?;
            match entry.kind {
                Kind::F32 => out.extend(bytes.as_chunks().0.iter().copied().map(f32::from_le_bytes)),
                Kind::F16 => out.extend(bytes.as_chunks().0.iter().map(|c| f16::from_le_bytes(*c).to_f32())),
                _ => return Err(format!("`{}` does not hold floating-point numbers", entry.name)),
            }
        }
        if out.len() == elements { Ok(out) } else { Err(format!("`{}` has {} values", entry.name, out.len())) }
    }
}

impl Node {
    fn parse(bytes: &[u8], range: Range<usize>) -> Result<Self, String> {
        let mut node = Self::default();
        for field in Message::new(bytes, range) {
            match field? {
                (1, Value::Bytes(r)) => node.inputs.push(name(bytes, r)?),
                (2, Value::Bytes(r)) => node.outputs.push(name(bytes, r)?),
                (3, Value::Bytes(r)) => node.name = name(bytes, r)?,
                (4, Value::Bytes(r)) => node.operator = name(bytes, r)?,
                (5, Value::Bytes(r)) => node.attribute(bytes, r)?,
                _ => {}
            }
        }
        Ok(node)
    }

    fn attribute(&mut self, bytes: &[u8], range: Range<usize>) -> Result<(), String> {
        let (mut key, mut ints, mut float) = (String::new(), Vec::new(), None);
        for field in Message::new(bytes, range) {
            match field? {
                (1, Value::Bytes(r)) => key = name(bytes, r)?,
                (2, Value::Fixed32(r)) => float = bytes[r].as_chunks().0.first().copied().map(f32::from_le_bytes),
                (3, Value::Int(v)) => ints.push(v.cast_signed()),
                (5, Value::Bytes(r)) => self.constant = Some(Entry::parse(bytes, r)?),
                (8, Value::Int(v)) => ints.push(v.cast_signed()),
                (8, Value::Bytes(r)) => {
                    for value in wire::packed(bytes, r) {
                        ints.push(value?.cast_signed());
                    }
                }
                _ => {}
            }
        }
        if let Some(value) = float {
            self.floats.insert(key.clone(), value);
        }
        if !ints.is_empty() {
            self.ints.insert(key, ints);
        }
        Ok(())
    }
}

impl Entry {
    fn parse(bytes: &[u8], range: Range<usize>) -> Result<Self, String> {
        let mut entry = Self::default();
        let mut external = false;
        let mut dims = Vec::new();
        for field in Message::new(bytes, range) {
            match field? {
                (1, Value::Int(v)) => dims.push(v),
                (1, Value::Bytes(r)) => {
                    for value in wire::packed(bytes, r) {
                        dims.push(value?);
                    }
                }
                (2, Value::Int(1)) => entry.kind = Kind::F32,
                (2, Value::Int(10)) => entry.kind = Kind::F16,
                (2, Value::Int(2)) => entry.kind = Kind::U8,
                (2, Value::Int(3)) => entry.kind = Kind::I8,
                (2, Value::Int(6)) => entry.kind = Kind::I32,
                (2, Value::Int(7)) => entry.kind = Kind::I64,
                // `int32_data`, which holds narrower numbers too, and `int64_data`.
                (5 | 7, Value::Int(v)) => entry.ints.push(v.cast_signed()),
                (5 | 7, Value::Bytes(r)) => {
                    for value in wire::packed(bytes, r) {
                        entry.ints.push(value?.cast_signed());
                    }
                }
                // `float_data`, packed or one by one; `raw_data`.
                (4, Value::Bytes(r) | Value::Fixed32(r)) | (9, Value::Bytes(r)) => entry.values.push(r),
                (8, Value::Bytes(r)) => entry.name = name(bytes, r)?,
                (13, _) => external = true,
                _ => {}
            }
        }
        if external {
            return Err(format!("`{}` lies in a separate file; use the single-file model", entry.name));
        }
        let limit = bytes.len() as u64;
        let product = dims.iter().try_fold(1_u64, |all, d| all.checked_mul(*d)).filter(|p| *p <= limit);
        if product.is_none() {
            return Err(format!("`{}` of shape {dims:?} is larger than the file", entry.name));
        }
        // Each dimension divides a product that fits into the file's length, unless the tensor is empty.
        entry.dims = dims.iter().map(|d| usize::try_from(*d).unwrap_or(usize::MAX)).collect();
        Ok(entry)
    }

    fn elements(&self) -> usize {
        if self.dims.contains(&0) { 0 } else { self.dims.iter().product() }
    }
}

/// Reads `bytes` as a model and every weight of it; for fuzzing.
pub fn fuzz(bytes: &[u8]) {
    if let Ok(model) = Model::of(Path::new("fuzz"), bytes, Box::new(bytes.to_vec())) {
        for (name, entry) in &model.initialisers {
            let _ = (model.read(entry), model.resolve(name), model.constant(name));
        }
        for name in model.nodes.keys().chain(model.aliases.keys()) {
            let _ = (model.resolve(name), model.attribute(name, "kernel_shape"));
        }
    }
}

/// Collects the parameters of a network and what is wrong with them.
pub struct Binder<'a> {
    model: &'a Model,
    used: HashSet<&'a str>,
    problems: Vec<String>,
}

/// One bound parameter, or the hole where one should be (reported by [`Binder::finish`]).
#[derive(Clone, Debug)]
pub struct Weight {
    entry: Option<Entry>,
}

impl Weight {
    /// Length of one axis; `None` if the weight or the axis is missing.
    pub fn dim(&self, axis: usize) -> Option<usize> {
        self.entry.as_ref()?.dims.get(axis).copied()
    }
}

impl<'a> Binder<'a> {
    /// Starts with nothing used.
    pub fn new(model: &'a Model) -> Self {
        Self { model, used: HashSet::new(), problems: Vec::new() }
    }

    /// The parameter that enters `node` as input number `input`. `shape` gives the expected length of each axis;
    /// `None` takes any.
    pub fn input(&mut self, node: &str, input: usize, shape: &[Option<usize>]) -> Weight {
        match self.model.nodes.get(node) {
            None => self.problem(format!("node `{node}` is missing")),
            Some(n) => match n.inputs.get(input).and_then(|edge| self.model.resolve(edge)) {
                None => self.problem(format!("node `{node}`: input {input} is no stored weight")),
                Some(entry) => self.take(node, entry, shape),
            },
        }
    }

    /// As [`Binder::input`], `None` without a complaint when the node has no such input.
    pub fn optional(&mut self, node: &str, input: usize, shape: &[Option<usize>]) -> Option<Weight> {
        let present = self.model.nodes.get(node).is_some_and(|n| n.inputs.get(input).is_some_and(|e| !e.is_empty()));
        present.then(|| self.input(node, input, shape))
    }

    /// The one stored operand of `node`, an addition or multiplication whose other operand is computed.
    pub fn operand(&mut self, node: &str, shape: &[Option<usize>]) -> Weight {
        let Some(n) = self.model.nodes.get(node) else {
            return self.problem(format!("node `{node}` is missing"));
        };
        match n.inputs.iter().find_map(|edge| self.model.resolve(edge)) {
            None => self.problem(format!("node `{node}`: no input is a stored weight")),
            Some(entry) => self.take(node, entry, shape),
        }
    }

    /// Records a fault that only the network can see.
    pub fn complain(&mut self, problem: String) {
        self.problems.push(problem);
    }

    /// Ends binding.
    ///
    /// # Errors
    /// Everything that was missing or misshapen, and every stored weight that nothing asked for.
    pub fn finish(mut self) -> Result<(), OnnxError> {
        let left: BTreeSet<&str> =
            self.model.initialisers.keys().map(String::as_str).filter(|name| !self.used.contains(name)).collect();
        self.problems.extend(left.iter().map(|name| format!("initialiser `{name}` is not used by this network")));
        if self.problems.is_empty() {
            return Ok(());
        }
        Err(OnnxError::Weights { path: self.model.path.clone(), problems: self.problems })
    }

    fn take(&mut self, node: &str, entry: &'a Entry, shape: &[Option<usize>]) -> Weight {
        self.used.insert(&entry.name);
        let fits = entry.dims.len() == shape.len()
            && entry.dims.iter().zip(shape).all(|(have, want)| want.is_none_or(|want| want == *have));
        let width = match entry.kind {
            Kind::F32 => 4,
            Kind::F16 => 2,
            _ => return self.problem(format!("node `{node}`: `{}` is not float32 or float16", entry.name)),
        };
        if !fits {
            let want: Vec<String> = shape.iter().map(|d| d.map_or("any".into(), |d| d.to_string())).collect();
            let want = want.join(", ");
            return self.problem(format!("node `{node}`: `{}` is {:?}, expected [{want}]", entry.name, entry.dims));
        }
        let bytes: usize = entry.values.iter().map(Range::len).sum();
        if bytes != entry.elements() * width {
            return self.problem(format!("node `{node}`: `{}` {:?} has {bytes} bytes", entry.name, entry.dims));
        }
        Weight { entry: Some(entry.clone()) }
    }

    fn problem(&mut self, problem: String) -> Weight {
        self.problems.push(problem);
        Weight { entry: None }
    }
}

fn name(bytes: &[u8], range: Range<usize>) -> Result<String, String> {
    if range.len() > MAX_NAME {
        return Err(format!("a name of {} bytes", range.len()));
    }
    String::from_utf8(bytes[range].to_vec()).map_err(|_| "a name is not text".into())
}

#[cfg(test)]
mod tests;
