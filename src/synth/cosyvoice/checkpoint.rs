//! Access to the tensors of a checkpoint directory by file and key.
//!
//! Owns the files. Reads `.pt` (zip pickles) and `.safetensors` alike. It never loads a tensor before it is asked
//! for, never executes anything from a file, and never panics on a damaged one: opening reads the directories
//! only, [`super::verify`] checks every tensor in one report.

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use half::{bf16, f16};
use safetensors::tensor::{Dtype, Metadata};

use super::pickle::{self, Element, Object, Pickle, Stored};
use crate::weights_file::{Source, WeightsFile};

/// One of the three state dicts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Part {
    /// `llm.pt`, or `llm.rl.pt` where it is asked for.
    Llm,
    /// `flow.pt`.
    Flow,
    /// `hift.pt`.
    Hift,
}

impl Part {
    /// All three.
    pub const ALL: [Part; 3] = [Part::Llm, Part::Flow, Part::Hift];

    /// File name without extension.
    pub fn stem(self) -> &'static str {
        match self {
            Part::Llm => "llm",
            Part::Flow => "flow",
            Part::Hift => "hift",
        }
    }
}

/// Why a tensor cannot be had.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CheckpointError {
    /// A file is missing or cannot be read.
    #[error("{path}: {source}")]
    Io {
        /// Which file.
        path: String,
        /// Why.
        source: std::io::Error,
    },
    /// A file is damaged or of another kind.
    #[error("{path}: {reason}")]
    File {
        /// Which file.
        path: String,
        /// What is wrong.
        reason: String,
    },
    /// A tensor is missing or not as expected.
    #[error("{path}: `{key}`: {reason}")]
    Tensor {
        /// Which file.
        path: String,
        /// Which tensor.
        key: String,
        /// What is wrong.
        reason: String,
    },
}

/// One file of tensors.
pub struct TensorFile {
    path: PathBuf,
    file: Arc<WeightsFile>,
    tensors: BTreeMap<String, Result<Stored, String>>,
}

/// The three files of a checkpoint directory.
pub struct Checkpoint {
    dir: PathBuf,
    llm: TensorFile,
    flow: TensorFile,
    hift: TensorFile,
}

impl Checkpoint {
    /// Opens `llm`, `flow` and `hift` in `dir`; `.pt` wins over `.safetensors` where both are there.
    ///
    /// # Errors
    /// A file is missing or its directory of tensors cannot be read.
    pub fn open(dir: &Path) -> Result<Self, CheckpointError> {
        Self::open_with(dir, "llm")
    }

    /// As [`Self::open`] with another language model, such as `llm.rl`.
    ///
    /// # Errors
    /// As [`Self::open`].
    pub fn open_with(dir: &Path, llm: &str) -> Result<Self, CheckpointError> {
        let open = |stem: &str| TensorFile::open(&find(dir, stem));
        Ok(Self {
            dir: dir.to_path_buf(),
            llm: open(llm)?,
            flow: open(Part::Flow.stem())?,
            hift: open(Part::Hift.stem())?,
        })
    }

    /// One of the files.
    pub fn part(&self, part: Part) -> &TensorFile {
        match part {
            Part::Llm => &self.llm,
            Part::Flow => &self.flow,
            Part::Hift => &self.hift,
        }
    }

    /// The directory.
    pub fn dir(&self) -> &Path {
        &self.dir
    }
}

/// The file that holds the state dict `stem` of `dir`.
pub fn find(dir: &Path, stem: &str) -> PathBuf {
    let pt = dir.join(format!("{stem}.pt"));
    let safe = dir.join(format!("{stem}.safetensors"));
    if !pt.exists() && safe.exists() { safe } else { pt }
}

impl TensorFile {
    /// Opens a `.pt` or `.safetensors` file and reads its list of tensors.
    ///
    /// # Errors
    /// It cannot be read, or its list is damaged.
    pub fn open(path: &Path) -> Result<Self, CheckpointError> {
        let io = |source| CheckpointError::Io { path: path.display().to_string(), source };
        let file = WeightsFile::open(path).map_err(io)?;
        let bad = |reason: String| CheckpointError::File { path: path.display().to_string(), reason };
        let is_safe = path.extension().is_some_and(|e| e == "safetensors");
        let tensors = if is_safe { safetensors_list(&file) } else { pickle_list(&file) }.map_err(bad)?;
        Ok(Self { path: path.to_path_buf(), file: Arc::new(file), tensors })
    }

    /// Where it lies.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Every key, in order, with what is stored under it or why that cannot be used.
    pub fn entries(&self) -> impl Iterator<Item = (&str, Result<&Stored, &str>)> {
        self.tensors.iter().map(|(k, v)| (k.as_str(), v.as_ref().map_err(String::as_str)))
    }

    /// Whether there is a usable or unusable tensor of that name.
    pub fn has(&self, key: &str) -> bool {
        self.tensors.contains_key(key)
    }

    /// What is stored under `key`.
    ///
    /// # Errors
    /// It is missing or malformed.
    pub fn stored(&self, key: &str) -> Result<&Stored, CheckpointError> {
        match self.tensors.get(key) {
            Some(Ok(stored)) => Ok(stored),
            Some(Err(reason)) => Err(self.error(key, reason.clone())),
            None => Err(self.error(key, "is missing".into())),
        }
    }

    /// The shape of `key`.
    ///
    /// # Errors
    /// It is missing or malformed.
    pub fn shape(&self, key: &str) -> Result<&[usize], CheckpointError> {
        Ok(&self.stored(key)?.shape)
    }

    /// The values of `key` as f32 in row-major order.
    ///
    /// # Errors
    /// It is missing, malformed, of another shape, not of a floating type, or its file was written to.
    pub fn floats(&self, key: &str, shape: &[usize]) -> Result<Vec<f32>, CheckpointError> {
        let stored = self.stored(key)?;
        if stored.shape != shape {
            return Err(self.error(key, format!("has shape {:?}, expected {shape:?}", stored.shape)));
        }
        self.read_floats(key, stored.element, stored.bytes.clone())
    }

    /// Row `row` of the matrix `key` as f32.
    ///
    /// # Errors
    /// As [`Self::floats`]; or the row is out of range.
    pub fn row(&self, key: &str, row: usize) -> Result<Vec<f32>, CheckpointError> {
        let stored = self.stored(key)?;
        let [rows, columns] = stored.shape[..] else { return Err(self.error(key, "is no matrix".into())) };
        if row >= rows {
            return Err(self.error(key, format!("has {rows} rows, row {row} was asked for")));
        }
        let size = stored.element.size();
        let start = stored.bytes.start + row * columns * size;
        self.read_floats(key, stored.element, start..start + columns * size)
    }

    fn read_floats(&self, key: &str, element: Element, range: Range<usize>) -> Result<Vec<f32>, CheckpointError> {
        if element == Element::F32 && cfg!(target_endian = "little") {
            // Most of a checkpoint: read to where it is used from.
            let mut values = vec![0.0_f32; range.len() / size_of::<f32>()];
            self.read(bytemuck::cast_slice_mut(&mut values), range.start)?;
            return Ok(values);
        }
        let mut bytes = vec![0; range.len()];
        self.read(&mut bytes, range.start)?;
        floats(element, &bytes)
            .ok_or_else(|| self.error(key, format!("is {}, expected a floating type", element.name())))
    }

    fn read(&self, bytes: &mut [u8], start: usize) -> Result<(), CheckpointError> {
        let io = |source| CheckpointError::Io { path: self.path.display().to_string(), source };
        self.file.read(bytes, start).map_err(io)
    }

    /// Whole numbers of `key`, whatever integer type they have.
    ///
    /// # Errors
    /// It is missing, malformed or not of an integer type.
    pub fn integers(&self, key: &str) -> Result<Vec<i64>, CheckpointError> {
        let stored = self.stored(key)?;
        let mut bytes = vec![0; stored.bytes.len()];
        self.read(&mut bytes, stored.bytes.start)?;
        integers(stored.element, &bytes)
            .ok_or_else(|| self.error(key, format!("is {}, expected an integer type", stored.element.name())))
    }

    /// A convolution's weight `[out, in/groups, kernel]` and bias, weight norm folded: accepts `weight`,
    /// `weight_g`/`weight_v` and `parametrizations.weight.original0/1` under `name`.
    ///
    /// # Errors
    /// As [`Self::floats`].
    pub fn convolution(&self, name: &str, shape: [usize; 3]) -> Result<(Vec<f32>, Vec<f32>), CheckpointError> {
        let (weight, bias) = self.convolution_f64(name, shape)?;
        Ok((weight.into_iter().map(|v| v as f32).collect(), bias))
    }

    /// As [`Self::convolution`] with the folded weight not rounded: the F0 network runs in double, its weight norm too.
    ///
    /// # Errors
    /// As [`Self::floats`].
    pub fn convolution_f64(&self, name: &str, shape: [usize; 3]) -> Result<(Vec<f64>, Vec<f32>), CheckpointError> {
        let bias = self.floats(&format!("{name}.bias"), &shape[..1])?;
        let plain = format!("{name}.weight");
        if self.has(&plain) {
            return Ok((self.floats(&plain, &shape)?.iter().map(|&v| v.into()).collect(), bias));
        }
        let old = (format!("{name}.weight_g"), format!("{name}.weight_v"));
        let new =
            (format!("{name}.parametrizations.weight.original0"), format!("{name}.parametrizations.weight.original1"));
        let (gain, direction) = if self.has(&old.0) { old } else { new };
        let gain = self.floats(&gain, &[shape[0], 1, 1])?;
        let direction = self.floats(&direction, &shape)?;
        Ok((fold_weight_norm(&gain, &direction, shape[1] * shape[2]), bias))
    }

    fn error(&self, key: &str, reason: String) -> CheckpointError {
        CheckpointError::Tensor { path: self.path.display().to_string(), key: key.into(), reason }
    }
}

/// g * v / ||v|| with the norm over all axes but the first, summed in double.
pub fn fold_weight_norm(gain: &[f32], direction: &[f32], row: usize) -> Vec<f64> {
    let mut out = Vec::with_capacity(direction.len());
    for (&g, v) in gain.iter().zip(direction.chunks_exact(row.max(1))) {
        let norm = v.iter().map(|&x| f64::from(x) * f64::from(x)).sum::<f64>().sqrt();
        let scale = f64::from(g) / norm;
        out.extend(v.iter().map(|&x| f64::from(x) * scale));
    }
    out
}

/// Reads a pickle of nested dictionaries (`spk2info.pt`): outer key, inner key, tensor bytes as stored.
///
/// # Errors
/// The file cannot be read or is no dictionary of dictionaries.
pub fn nested(path: &Path) -> Result<BTreeMap<String, TensorFile>, CheckpointError> {
    let io = |source| CheckpointError::Io { path: path.display().to_string(), source };
    let bad = |reason: String| CheckpointError::File { path: path.display().to_string(), reason };
    let file = Arc::new(WeightsFile::open(path).map_err(io)?);
    let pickle = pickle::read(&*file).map_err(bad)?;
    let outer = pickle.entries(&pickle.root).ok_or_else(|| bad("is not a dictionary".into()))?;
    let mut files = BTreeMap::new();
    for (key, value) in outer {
        let (Object::Text(key), Some(inner)) = (key, pickle.entries(value)) else {
            return Err(bad("is not a dictionary of dictionaries".into()));
        };
        let tensors = tensors_in(&pickle, inner);
        files.insert(key.to_string(), TensorFile { path: path.to_path_buf(), file: file.clone(), tensors });
    }
    Ok(files)
}

fn pickle_list(file: &WeightsFile) -> Result<BTreeMap<String, Result<Stored, String>>, String> {
    let pickle = pickle::read(file)?;
    let entries = pickle.entries(&pickle.root).ok_or("holds no dictionary of tensors")?;
    Ok(tensors_in(&pickle, entries))
}

fn tensors_in(pickle: &Pickle, entries: &[(Object, Object)]) -> BTreeMap<String, Result<Stored, String>> {
    let mut tensors = BTreeMap::new();
    for (key, value) in entries {
        let Object::Text(key) = key else { continue };
        // Older vocoders were saved from inside a training wrapper.
        let key = key.strip_prefix("generator.").unwrap_or(key).to_string();
        let tensor = pickle.tensor(value).cloned().unwrap_or_else(|| Err("is no tensor".to_string()));
        tensors.insert(key, tensor);
    }
    tensors
}

/// Longest list of tensors read; the real ones are under 200 kB.
const MAX_LIST: usize = 64 << 20;

/// A length of eight bytes, so many bytes of JSON, the tensors.
fn safetensors_list(file: &WeightsFile) -> Result<BTreeMap<String, Result<Stored, String>>, String> {
    let cut = || "not a safetensors file, or cut off".to_string();
    let length = file.part(0..8).and_then(|head| head[..].try_into().ok().map(u64::from_le_bytes)).ok_or_else(cut)?;
    let length = usize::try_from(length).ok().filter(|&length| length <= MAX_LIST).ok_or_else(cut)?;
    let base = 8 + length;
    let list = file.part(8..base).ok_or_else(cut)?;
    let list: Metadata = serde_json::from_slice(&list).map_err(|error| error.to_string())?;
    let tensor = |shape: &[usize], dtype, (from, to): (usize, usize)| {
        let element = match dtype {
            Dtype::F64 => Element::F64,
            Dtype::F32 => Element::F32,
            Dtype::F16 => Element::F16,
            Dtype::BF16 => Element::Bf16,
            Dtype::I64 => Element::I64,
            Dtype::I32 => Element::I32,
            Dtype::U8 => Element::U8,
            other => return Err(format!("element type {other:?} is not known")),
        };
        let count = shape.iter().try_fold(1_usize, |all, n| all.checked_mul(*n));
        let size = count.and_then(|count| count.checked_mul(element.size()));
        let stop = to.checked_add(base).filter(|&stop| from <= to && stop <= file.size());
        match stop {
            Some(stop) if size == Some(to - from) => {
                Ok(Stored { element, shape: shape.to_vec(), bytes: base + from..stop })
            }
            Some(_) => Err(format!("has {} bytes, which is not {shape:?} of {}", to - from, element.name())),
            None => Err("reaches past the end of the file".to_string()),
        }
    };
    let named = |(name, info): (String, &safetensors::tensor::TensorInfo)| {
        let name = name.strip_prefix("generator.").unwrap_or(&name).to_string();
        (name, tensor(&info.shape, info.dtype, info.data_offsets))
    };
    Ok(list.tensors().into_iter().map(named).collect())
}

fn floats(element: Element, bytes: &[u8]) -> Option<Vec<f32>> {
    Some(match element {
        Element::F32 => words::<4>(bytes).map(f32::from_le_bytes).collect(),
        Element::F64 => words::<8>(bytes).map(|c| f64::from_le_bytes(c) as f32).collect(),
        Element::F16 => words::<2>(bytes).map(|c| f16::from_le_bytes(c).to_f32()).collect(),
        Element::Bf16 => words::<2>(bytes).map(|c| bf16::from_le_bytes(c).to_f32()).collect(),
        Element::I64 | Element::I32 | Element::U8 => return None,
    })
}

fn integers(element: Element, bytes: &[u8]) -> Option<Vec<i64>> {
    Some(match element {
        Element::I64 => words::<8>(bytes).map(i64::from_le_bytes).collect(),
        Element::I32 => words::<4>(bytes).map(|c| i32::from_le_bytes(c).into()).collect(),
        Element::U8 => bytes.iter().map(|&b| b.into()).collect(),
        _ => return None,
    })
}

fn words<const N: usize>(bytes: &[u8]) -> impl Iterator<Item = [u8; N]> + '_ {
    bytes.chunks_exact(N).filter_map(|c| c.try_into().ok())
}
