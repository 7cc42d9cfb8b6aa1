//! A small graph of an ONNX file, run node by node on the CPU.
//!
//! Contract: [`Graph::load`] refuses what it cannot run, so that [`Graph::run`] fails only where shapes do not fit.
//!
//! # Why
//! - *Node by node and not a network written out*: what is quantised how is the file's own, with 78 scales between the
//!   operations, and the next version of the model has other ones.
//! - *Quantised values stay real numbers*: `QuantizeLinear` rounds to the levels of its eight bits and gives the value of
//!   the level, so that `DequantizeLinear` has nothing left to do. That is the graph as it is written, computed in float;
//!   integer kernels differ from it by how they overflow.
//! - *Results are dropped behind their last use*: all of them together are 400 MB.

use std::collections::HashMap;
use std::path::Path;

use candle_core::{Device, Tensor};
use candle_nn::ops::{layer_norm, sigmoid, softmax};

use crate::voice::onnx::stored::{Numbers, Stored};
use crate::voice::onnx::{Model, Node, OnnxError};

/// Operators that [`step`] knows.
const KNOWN: [&str; 20] = [
    "Add",
    "Concat",
    "Conv",
    "DequantizeLinear",
    "Div",
    "Erf",
    "Gather",
    "Gemm",
    "LayerNormalization",
    "MatMul",
    "Mul",
    "QuantizeLinear",
    "ReduceSum",
    "Reshape",
    "Shape",
    "Sigmoid",
    "Slice",
    "Softmax",
    "Tanh",
    "Transpose",
];

/// What an edge carries.
#[derive(Clone, Debug)]
enum Value {
    /// Numbers that are computed with.
    Real(Tensor),
    /// A shape, or part of one.
    Whole(Vec<i64>),
}

/// One operation, its fixed inputs known.
struct Step {
    name: String,
    operator: &'static str,
    inputs: Vec<String>,
    output: String,
    ints: HashMap<&'static str, Vec<i64>>,
    epsilon: f32,
    /// Results that no later node needs.
    spent: Vec<String>,
}

/// A graph with one input and one output.
pub(super) struct Graph {
    fixed: HashMap<String, Value>,
    steps: Vec<Step>,
    input: String,
    output: String,
}

type Result<T> = std::result::Result<T, String>;

fn text(error: candle_core::Error) -> String {
    // Its first line; the rest is a backtrace.
    error.to_string().lines().next().unwrap_or_default().to_owned()
}

impl Graph {
    /// The graph of the file at `path`, from `input` to `output`.
    ///
    /// # Errors
    /// The file cannot be read, or has an operator or a number that is not known here.
    pub(super) fn load(path: &Path, input: &str, output: &str) -> std::result::Result<Self, OnnxError> {
        let model = Model::open(path)?;
        let format = |reason: String| OnnxError::Format { path: path.to_owned(), reason };
        let mut graph =
            Self { fixed: HashMap::new(), steps: Vec::new(), input: input.to_owned(), output: output.to_owned() };
        for node in model.in_order() {
            graph.add(&model, node).map_err(|reason| format(format!("node `{}`: {reason}", node.name())))?;
        }
        if graph.steps.iter().all(|step| step.output != output) {
            return Err(format(format!("no output `{output}`")));
        }
        if graph.steps.iter().all(|step| !step.inputs.iter().any(|edge| edge == input)) {
            return Err(format(format!("no input `{input}`")));
        }
        // Each result goes with the last step that takes it.
        let mut last = HashMap::new();
        for (place, step) in graph.steps.iter().enumerate() {
            for edge in &step.inputs {
                last.insert(edge.clone(), place);
            }
        }
        for (edge, place) in last {
            if !graph.fixed.contains_key(&edge) && edge != output {
                graph.steps[place].spent.push(edge);
            }
        }
        Ok(graph)
    }

    fn add(&mut self, model: &Model, node: &Node) -> Result<()> {
        let Some(operator) = KNOWN.into_iter().find(|known| *known == node.operator()) else {
            return Err(format!("the operator {} is not known here", node.operator()));
        };
        let [output] = node.outputs() else { return Err("it has not one output".into()) };
        if operator == "DequantizeLinear" && node.inputs().first().is_some_and(|edge| model.stored(edge).is_some()) {
            let value = weights(model, node)?;
            self.fixed.insert(output.clone(), Value::Real(value));
            return Ok(());
        }
        for edge in model.stored_inputs(node) {
            if !self.fixed.contains_key(edge)
                && let Some(stored) = model.stored(edge)
            {
                self.fixed.insert(edge.to_owned(), value(stored?, operator)?);
            }
        }
        let attributes =
            ["axis", "end", "keepdims", "pads", "perm", "start", "strides", "dilations", "group", "transB"];
        let ints = attributes.into_iter().map(|key| (key, node.ints(key).to_vec()));
        self.steps.push(Step {
            name: node.name().to_owned(),
            operator,
            inputs: node.inputs().to_vec(),
            output: output.clone(),
            ints: ints.filter(|(_, values)| !values.is_empty()).collect(),
            epsilon: node.float("epsilon").unwrap_or(1e-5),
            spent: Vec::new(),
        });
        Ok(())
    }

    /// What the graph makes of `input`.
    ///
    /// # Errors
    /// Its shape does not fit, or there is not enough memory.
    pub(super) fn run(&self, input: Tensor) -> Result<Tensor> {
        let mut values: HashMap<&str, Value> = HashMap::from([(self.input.as_str(), Value::Real(input))]);
        for step in &self.steps {
            let inputs: Vec<&Value> = step
                .inputs
                .iter()
                .map(|edge| values.get(edge.as_str()).or_else(|| self.fixed.get(edge)))
                .map(|value| value.ok_or_else(|| "an input is missing".to_owned()))
                .collect::<Result<_>>()
                .map_err(|error| format!("node `{}`: {error}", step.name))?;
            let result = step.run(&inputs).map_err(|error| format!("node `{}`: {error}", step.name))?;
            for edge in &step.spent {
                values.remove(edge.as_str());
            }
            values.insert(&step.output, result);
        }
        match values.remove(self.output.as_str()) {
            Some(Value::Real(tensor)) => Ok(tensor),
            _ => Err("the output is no number".into()),
        }
    }
}

impl Step {
    fn int(&self, key: &str) -> Option<i64> {
        self.ints.get(key)?.first().copied()
    }

    fn axis(&self, rank: usize, default: i64) -> Result<usize> {
        let axis = self.int("axis").unwrap_or(default);
        let axis = if axis < 0 { axis + rank as i64 } else { axis };
        usize::try_from(axis).ok().filter(|axis| *axis < rank).ok_or_else(|| format!("there is no axis {axis}"))
    }

    fn run(&self, inputs: &[&Value]) -> Result<Value> {
        // Of shapes.
        match (self.operator, inputs) {
            ("Shape", [Value::Real(x)]) => {
                let dims: Vec<i64> = x.dims().iter().map(|dim| *dim as i64).collect();
                let (from, to) = (self.int("start").unwrap_or(0), self.int("end").unwrap_or(i64::MAX));
                return Ok(Value::Whole(cut(&dims, from, to)));
            }
            ("Concat", parts) => {
                let mut all = Vec::new();
                for part in parts {
                    all.extend(part.whole()?);
                }
                return Ok(Value::Whole(all));
            }
            ("Gather", [from, places]) => {
                let (from, places) = (from.whole()?, places.whole()?);
                let at = |place: &i64| usize::try_from(*place).ok().and_then(|at| from.get(at)).copied();
                let found: Option<Vec<i64>> = places.iter().map(at).collect();
                return found.map(Value::Whole).ok_or_else(|| "it gathers what is not there".into());
            }
            ("Slice", [from, start, end, ..]) => {
                let one = |value: &Value| value.whole()?.first().copied().ok_or_else(|| "an empty slice".to_owned());
                return Ok(Value::Whole(cut(from.whole()?, one(start)?, one(end)?)));
            }
            ("Reshape", [x, shape]) => return reshape(x.real()?, shape.whole()?).map(Value::Real),
            _ => {}
        }
        let first = inputs.first().ok_or("it has no input")?.real()?;
        let other = |place: usize| inputs.get(place).ok_or("an input is missing")?.real();
        let result = match self.operator {
            "Add" => first.broadcast_add(other(1)?),
            "Mul" => first.broadcast_mul(other(1)?),
            "Div" => first.broadcast_div(other(1)?),
            "MatMul" => first.contiguous().and_then(|x| x.broadcast_matmul(other(1).map_err(candle_core::Error::Msg)?)),
            "Erf" => first.erf(),
            "Tanh" => first.tanh(),
            "Sigmoid" => sigmoid(first),
            "Softmax" => softmax(first, self.axis(first.rank(), -1)?),
            "ReduceSum" => {
                let axes = inputs.get(1).ok_or("which axes is not told")?.whole()?;
                let axes: Vec<usize> = axes.iter().map(|axis| *axis as usize).collect();
                match self.int("keepdims") {
                    Some(0) => first.sum(axes),
                    _ => first.sum_keepdim(axes),
                }
            }
            "Transpose" => {
                let order: Vec<usize> =
                    self.ints.get("perm").into_iter().flatten().map(|axis| *axis as usize).collect();
                first.permute(order).and_then(|x| x.contiguous())
            }
            "LayerNormalization" => {
                let x = first.contiguous().map_err(text)?;
                layer_norm(&x, other(1)?, other(2)?, self.epsilon)
            }
            "Gemm" => {
                let weight = other(1)?;
                let weight = if self.int("transB") == Some(1) { weight.t() } else { Ok(weight.clone()) };
                let product =
                    weight.and_then(|weight| first.contiguous()?.matmul(&weight.contiguous()?)).map_err(text)?;
                product.broadcast_add(other(2)?)
            }
            "Conv" => {
                let int = |key: &str, default: i64| self.int(key).unwrap_or(default) as usize;
                let (x, weight) = (first.contiguous().map_err(text)?, other(1)?);
                let convolved = x
                    .conv1d(weight, int("pads", 0), int("strides", 1), int("dilations", 1), int("group", 1))
                    .map_err(text)?;
                let bias = other(2)?;
                let channels = bias.elem_count();
                bias.reshape((1, channels, 1)).and_then(|bias| convolved.broadcast_add(&bias))
            }
            "QuantizeLinear" => return quantised(first, inputs).map(Value::Real),
            // Of what was quantised, which has its value already.
            "DequantizeLinear" => Ok(first.clone()),
            other => return Err(format!("{other} of such inputs is not known here")),
        };
        result.map(Value::Real).map_err(text)
    }
}

impl Value {
    fn real(&self) -> Result<&Tensor> {
        match self {
            Value::Real(tensor) => Ok(tensor),
            Value::Whole(_) => Err("a shape where numbers are computed with".into()),
        }
    }

    fn whole(&self) -> Result<&[i64]> {
        match self {
            Value::Whole(numbers) => Ok(numbers),
            Value::Real(_) => Err("numbers where a shape is expected".into()),
        }
    }
}

/// Part of a shape; places below zero count from its end.
fn cut(all: &[i64], from: i64, to: i64) -> Vec<i64> {
    let length = all.len() as i64;
    let place = |at: i64| if at < 0 { at.saturating_add(length) } else { at }.clamp(0, length) as usize;
    let (from, to) = (place(from), place(to));
    all[from..to.max(from)].to_vec()
}

fn reshape(x: &Tensor, shape: &[i64]) -> Result<Tensor> {
    let known = |place: usize, dim: i64| match dim {
        0 => x.dims().get(place).copied().unwrap_or(0),
        dim => usize::try_from(dim).unwrap_or(1),
    };
    let mut dims: Vec<usize> = shape.iter().enumerate().map(|(place, dim)| known(place, *dim)).collect();
    if let Some(free) = shape.iter().position(|dim| *dim == -1) {
        let rest: usize = dims.iter().product();
        dims[free] = x.elem_count() / rest.max(1);
    }
    x.contiguous().and_then(|x| x.reshape(dims)).map_err(text)
}

/// Each number as the nearest that eight bits can tell, halves to the even level.
fn quantised(x: &Tensor, inputs: &[&Value]) -> Result<Tensor> {
    let number = |place: usize| -> Result<f32> {
        let tensor = inputs.get(place).ok_or("scale and zero point are not stored")?.real()?;
        tensor.flatten_all().and_then(|flat| flat.get(0)?.to_scalar()).map_err(text)
    };
    let (scale, zero) = (number(1)?, number(2)?);
    let mut values = x.flatten_all().and_then(|flat| flat.to_vec1::<f32>()).map_err(text)?;
    for value in &mut values {
        let level = ((*value / scale).round_ties_even() + zero).clamp(0.0, 255.0);
        *value = (level - zero) * scale;
    }
    Tensor::from_vec(values, x.dims(), &Device::Cpu).map_err(text)
}

/// A stored input of an operator: shapes for those that take one, else real numbers.
fn value(stored: Stored, operator: &str) -> Result<Value> {
    match stored.numbers {
        Numbers::Floats(values) => Tensor::from_vec(values, stored.dims, &Device::Cpu).map(Value::Real).map_err(text),
        // Zero points.
        Numbers::Ints(values) if matches!(operator, "QuantizeLinear" | "DequantizeLinear") => {
            let values: Vec<f32> = values.into_iter().map(|value| value as f32).collect();
            Tensor::from_vec(values, stored.dims, &Device::Cpu).map(Value::Real).map_err(text)
        }
        Numbers::Ints(values) => Ok(Value::Whole(values)),
    }
}

/// The value of stored weights that are quantised, each channel of an axis by its own scale.
fn weights(model: &Model, node: &Node) -> Result<Tensor> {
    let stored = |place: usize| {
        let edge = node.inputs().get(place).ok_or("scale and zero point are not stored")?;
        model.stored(edge).ok_or_else(|| format!("input {place} is not stored"))?
    };
    let real = |stored: Stored| match stored.numbers {
        Numbers::Floats(values) => values,
        Numbers::Ints(values) => values.into_iter().map(|value| value as f32).collect(),
    };
    let levels = stored(0)?;
    let dims = levels.dims.clone();
    let (levels, scale, zero) = (real(levels), real(stored(1)?), real(stored(2)?));
    let scalar = scale.len() == 1;
    // One scale for all, or one for each place along the axis.
    let axis = node.ints("axis").first().copied().unwrap_or(1).max(0) as usize;
    let length = if scalar { 1 } else { dims.get(axis).copied().unwrap_or(0) };
    if scale.len() != length || zero.len() != length {
        return Err(format!("{} scales for an axis of {length}", scale.len()));
    }
    let inner: usize = if scalar { 1 } else { dims[axis + 1..].iter().product() };
    let values = levels.iter().enumerate().map(|(at, level)| {
        let channel = at / inner.max(1) % length;
        (level - zero[channel]) * scale[channel]
    });
    Tensor::from_vec(values.collect::<Vec<f32>>(), dims, &Device::Cpu).map_err(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shapes_are_cut_and_completed_as_the_operators_say() {
        assert_eq!(cut(&[1, 6, 400, 64], i64::MIN, -2), [1, 6]);
        assert_eq!(cut(&[1, 6, 400, 64], -1, i64::MAX), [64]);
        assert_eq!(cut(&[1, 6], 5, 9), [0i64; 0]);
        let x = Tensor::zeros((1, 6, 4, 8), candle_core::DType::F32, &Device::Cpu).expect("a tensor");
        assert_eq!(reshape(&x, &[-1, 4, 8]).expect("it fits").dims(), [6, 4, 8]);
        assert_eq!(reshape(&x, &[0, -1]).expect("it fits").dims(), [1, 192]);
        assert!(reshape(&x, &[5, 5]).is_err());
    }

    #[test]
    fn levels_are_those_of_eight_bits() {
        let real = |values: &[f32]| {
            Value::Real(Tensor::from_vec(values.to_vec(), values.len(), &Device::Cpu).expect("a tensor"))
        };
        let x = real(&[0.0, 0.24, 0.26, 0.25, 0.75, 999.0, -999.0]);
        let (scale, zero) = (real(&[0.5]), real(&[3.0]));
        let Value::Real(tensor) = &x else { unreachable!("made so") };
        let rounded = quantised(tensor, &[&x, &scale, &zero]).expect("numbers").to_vec1::<f32>().expect("numbers");
        assert_eq!(rounded, [0.0, 0.0, 0.5, 0.0, 1.0, 126.0, -1.5]);
    }
}
