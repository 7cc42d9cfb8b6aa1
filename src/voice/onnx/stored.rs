//! What a graph consists of, for somebody who runs it: its nodes in order, and numbers of any kind that it stores.

use super::{Entry, Kind, Model, Node};

/// Numbers that a file stores.
#[derive(Clone, Debug, PartialEq)]
pub struct Stored {
    /// Length of each axis; none for a single number.
    pub dims: Vec<usize>,
    /// Row by row.
    pub numbers: Numbers,
}

/// Real or whole numbers.
#[derive(Clone, Debug, PartialEq)]
pub enum Numbers {
    /// `float` and `float16`.
    Floats(Vec<f32>),
    /// `uint8`, `int8`, `int32` and `int64`.
    Ints(Vec<i64>),
}

impl Model {
    /// The nodes, each behind those that it depends on.
    pub fn in_order(&self) -> impl Iterator<Item = &Node> {
        self.order.iter().filter_map(|name| self.nodes.get(name))
    }

    /// Names of the edges that enter `node` and are stored numbers.
    pub fn stored_inputs<'a>(&'a self, node: &'a Node) -> impl Iterator<Item = &'a str> {
        node.inputs.iter().map(String::as_str).filter(|edge| self.resolve(edge).is_some())
    }

    /// The numbers behind the edge called `edge`, if it is stored.
    ///
    /// # Errors
    /// They are of another kind, or not as many as the shape says.
    pub fn stored(&self, edge: &str) -> Option<Result<Stored, String>> {
        self.resolve(edge).map(|entry| {
            let numbers = match entry.kind {
                Kind::F32 | Kind::F16 => Numbers::Floats(self.read(entry)?),
                Kind::U8 | Kind::I8 | Kind::I32 | Kind::I64 => Numbers::Ints(self.whole(entry)?),
                Kind::Other => return Err(format!("`{}` holds numbers of an unknown kind", entry.name)),
            };
            Ok(Stored { dims: entry.dims.clone(), numbers })
        })
    }

    fn whole(&self, entry: &Entry) -> Result<Vec<i64>, String> {
        let mut out = entry.ints.clone();
        for range in &entry.values {
            let bytes = self.bytes(entry, range)?;
            match entry.kind {
                Kind::U8 => out.extend(bytes.iter().map(|byte| i64::from(*byte))),
                Kind::I8 => out.extend(bytes.iter().map(|byte| i64::from(byte.cast_signed()))),
                Kind::I32 => out.extend(bytes.as_chunks().0.iter().map(|four| i64::from(i32::from_le_bytes(*four)))),
                _ => out.extend(bytes.as_chunks().0.iter().map(|eight| i64::from_le_bytes(*eight))),
            }
        }
        let elements = entry.elements();
        if out.len() == elements { Ok(out) } else { Err(format!("`{}` has {} values", entry.name, out.len())) }
    }
}

impl Node {
    /// Its name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// What it does, such as `MatMul`.
    pub fn operator(&self) -> &str {
        &self.operator
    }

    /// Names of the edges that enter; empty for one that is left out.
    pub fn inputs(&self) -> &[String] {
        &self.inputs
    }

    /// Names of the edges that leave.
    pub fn outputs(&self) -> &[String] {
        &self.outputs
    }

    /// A list of whole numbers, or a single one.
    pub fn ints(&self, attribute: &str) -> &[i64] {
        self.ints.get(attribute).map(Vec::as_slice).unwrap_or_default()
    }

    /// A real number.
    pub fn float(&self, attribute: &str) -> Option<f32> {
        self.floats.get(attribute).copied()
    }
}
