//! PyTorch's zip files, read as data: the archive's directory and the pickle that lists the tensors.
//!
//! Owns no tensor bytes: it says where they lie in the file. It constructs nothing and calls nothing: a
//! class that is not one of the few tensor builders becomes an opaque value that is refused where it would matter.
//!
//! # Why
//! The pickle reader of `candle-core` indexes argument lists unchecked, copies memo entries (a few hundred bytes of
//! pickle can ask for terabytes) and reads each tensor through a copy of the whole directory. Here values are
//! shared, every step is bounded by the pickle's own length, and since `torch.save` stores entries uncompressed,
//! tensors can be used where they lie. Compressed entries are refused, so no archive is larger than its file.

use std::collections::HashMap;
use std::ops::Range;
use std::rc::Rc;

use crate::weights_file::Source;

/// Element types that occur in checkpoints.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(missing_docs, reason = "the names say it")]
pub enum Element {
    F64,
    F32,
    F16,
    Bf16,
    I64,
    I32,
    U8,
}

impl Element {
    /// Bytes of one element.
    pub fn size(self) -> usize {
        match self {
            Element::F64 | Element::I64 => 8,
            Element::F32 | Element::I32 => 4,
            Element::F16 | Element::Bf16 => 2,
            Element::U8 => 1,
        }
    }

    /// The name PyTorch gives it.
    pub fn name(self) -> &'static str {
        match self {
            Element::F64 => "float64",
            Element::F32 => "float32",
            Element::F16 => "float16",
            Element::Bf16 => "bfloat16",
            Element::I64 => "int64",
            Element::I32 => "int32",
            Element::U8 => "uint8",
        }
    }
}

/// A tensor as it lies in the file. `bytes` is checked to be inside the file and to fit the shape.
#[derive(Clone, Debug, PartialEq)]
pub struct Stored {
    /// Element type.
    pub element: Element,
    /// Row-major shape.
    pub shape: Vec<usize>,
    /// Where in the file; always contiguous.
    pub bytes: Range<usize>,
}

/// A value of a pickle. Containers are numbers into [`Pickle`]: what is meant twice is stored once, and however
/// deeply values nest, or hold themselves, freeing them is freeing a few lists.
#[derive(Clone, Debug)]
pub enum Object {
    /// A class or function, by name only.
    Global(Rc<str>),
    /// A whole number.
    Int(i64),
    /// Text.
    Text(Rc<str>),
    /// A tuple or list.
    Items(usize),
    /// A dictionary.
    Dict(usize),
    /// `PersistentLoad` of a storage description, which is a tuple.
    Storage(usize),
    /// A tensor.
    Tensor(usize),
    /// Anything else: None, booleans, floats.
    Opaque,
}

/// What a pickle describes.
#[derive(Debug)]
pub struct Pickle {
    /// The outermost value.
    pub root: Object,
    dicts: Vec<Vec<(Object, Object)>>,
    tensors: Vec<Result<Stored, String>>,
}

impl Pickle {
    /// The entries of a dictionary; `None` for other values.
    pub fn entries(&self, object: &Object) -> Option<&[(Object, Object)]> {
        match object {
            Object::Dict(n) => self.dicts.get(*n).map(Vec::as_slice),
            _ => None,
        }
    }

    /// A tensor, or why it cannot be used; `None` for other values.
    pub fn tensor(&self, object: &Object) -> Option<&Result<Stored, String>> {
        match object {
            Object::Tensor(n) => self.tensors.get(*n),
            _ => None,
        }
    }
}

/// Longest pickle read; the real ones are under 100 kB.
const MAX_PICKLE: usize = 16 << 20;
const MAX_ENTRIES: usize = 1 << 16;
const MAX_RANK: usize = 8;

/// Reads the tensor list of a `torch.save` archive.
///
/// # Errors
/// What is wrong with the file, for people.
pub fn read(file: &(impl Source + ?Sized)) -> Result<Pickle, String> {
    let entries = directory(file)?;
    let (name, pickle) = entries
        .iter()
        .find(|(n, _)| n.ends_with("/data.pkl"))
        .ok_or("no `data.pkl` in the archive: not a torch.save file")?;
    let prefix = name.strip_suffix("data.pkl").unwrap_or_default();
    if let Some(order) = entries.get(&format!("{prefix}byteorder"))
        && file.part(order.clone()).as_deref() != Some(b"little")
    {
        return Err("the tensors are not little-endian".into());
    }
    if pickle.len() > MAX_PICKLE {
        return Err(format!("`data.pkl` has {} bytes, more than any checkpoint's", pickle.len()));
    }
    let bytes = file.part(pickle.clone()).ok_or("`data.pkl` reaches past the end of the file")?;
    let mut machine = Machine::new(&bytes, &entries, prefix);
    let root = machine.run().map_err(|e| format!("`data.pkl` at byte {}: {e}", machine.at))?;
    Ok(Pickle { root, dicts: machine.dicts, tensors: machine.tensors })
}

/// Reads `bytes` as an archive, and as the `data.pkl` of one with four storages of 64 bytes; for fuzzing.
pub fn fuzz(bytes: &[u8]) {
    let _ = read(bytes);
    let entries = (0..4).map(|n| (format!("a/data/{n}"), n * 64..(n + 1) * 64)).collect();
    let _ = Machine::new(bytes, &entries, "a/").run();
}

/// Name and content range of every entry of a zip archive.
fn directory(file: &(impl Source + ?Sized)) -> Result<HashMap<String, Range<usize>>, String> {
    const END: &[u8] = b"PK\x05\x06";
    let tail = file.size().saturating_sub(65_557);
    let end = file
        .part(tail..file.size())
        .and_then(|t| t.windows(4).rposition(|w| w == END))
        .map(|at| tail + at)
        .ok_or("not a zip archive, or cut off (no end record)")?;
    let cut = || "the archive's directory is damaged".to_string();
    let last = file.part(end..end + 20).ok_or_else(cut)?;
    let mut count = u64::from(u16_at(&last, 10).ok_or_else(cut)?);
    let mut start = u64::from(u32_at(&last, 16).ok_or_else(cut)?);
    if count == 0xffff || start == 0xffff_ffff {
        let locator = end.checked_sub(20).and_then(|at| file.part(at..at + 16)).ok_or_else(cut)?;
        if !locator.starts_with(b"PK\x06\x07") {
            return Err(cut());
        }
        let record = usize::try_from(u64_at(&locator, 8).ok_or_else(cut)?).map_err(|_| cut())?;
        let record = record.checked_add(56).and_then(|stop| file.part(record..stop)).ok_or_else(cut)?;
        if !record.starts_with(b"PK\x06\x06") {
            return Err(cut());
        }
        count = u64_at(&record, 32).ok_or_else(cut)?;
        start = u64_at(&record, 48).ok_or_else(cut)?;
    }
    if count > MAX_ENTRIES as u64 {
        return Err(format!("{count} entries are more than any checkpoint has"));
    }
    let mut at = usize::try_from(start).map_err(|_| cut())?;
    let mut entries = HashMap::new();
    for _ in 0..count {
        let head = at.checked_add(46).and_then(|stop| file.part(at..stop)).ok_or_else(cut)?;
        if !head.starts_with(b"PK\x01\x02") {
            return Err(cut());
        }
        let name_len = usize::from(u16_at(&head, 28).ok_or_else(cut)?);
        let extra_len = usize::from(u16_at(&head, 30).ok_or_else(cut)?);
        let comment_len = usize::from(u16_at(&head, 32).ok_or_else(cut)?);
        let name = file.part(at + 46..at + 46 + name_len).ok_or_else(cut)?;
        let name = String::from_utf8_lossy(&name).into_owned();
        let extra = file.part(at + 46 + name_len..at + 46 + name_len + extra_len).ok_or_else(cut)?;
        let method = u16_at(&head, 10).ok_or_else(cut)?;
        let flags = u16_at(&head, 8).ok_or_else(cut)?;
        if method != 0 || flags & 1 != 0 {
            return Err(format!("entry `{name}` is compressed or encrypted, which torch.save never does"));
        }
        let (size, local) = sizes(&head, &extra).ok_or_else(cut)?;
        let range =
            content(file, local, size).ok_or_else(|| format!("entry `{name}` reaches past the end of the file"))?;
        if entries.insert(name.clone(), range).is_some() {
            return Err(format!("entry `{name}` appears twice"));
        }
        at += 46 + name_len + extra_len + comment_len;
    }
    Ok(entries)
}

/// Size and local header offset of a directory entry, from its zip64 extra field where the plain ones overflow.
fn sizes(head: &[u8], extra: &[u8]) -> Option<(u64, u64)> {
    let (packed, plain, local) = (u32_at(head, 20)?, u32_at(head, 24)?, u32_at(head, 42)?);
    let mut wide = Vec::new();
    let mut at = 0;
    while let (Some(id), Some(len)) = (u16_at(extra, at), u16_at(extra, at + 2)) {
        let body = extra.get(at + 4..at + 4 + usize::from(len))?;
        if id == 1 {
            wide = body.chunks_exact(8).filter_map(|c| u64_at(c, 0)).collect();
        }
        at += 4 + usize::from(len);
    }
    let mut wide = wide.into_iter();
    let mut widen = |value: u32| if value == u32::MAX { wide.next() } else { Some(u64::from(value)) };
    let size = widen(plain)?;
    let stored = widen(packed)?;
    let local = widen(local)?;
    (stored == size).then_some((size, local))
}

fn content(file: &(impl Source + ?Sized), local: u64, size: u64) -> Option<Range<usize>> {
    let local = usize::try_from(local).ok()?;
    let head = file.part(local..local.checked_add(30)?)?;
    if !head.starts_with(b"PK\x03\x04") {
        return None;
    }
    let start = local + 30 + usize::from(u16_at(&head, 26)?) + usize::from(u16_at(&head, 28)?);
    let stop = start.checked_add(usize::try_from(size).ok()?)?;
    (stop <= file.size()).then_some(start..stop)
}

fn u16_at(bytes: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_le_bytes(bytes.get(at..at.checked_add(2)?)?.try_into().ok()?))
}

fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_le_bytes(bytes.get(at..at.checked_add(4)?)?.try_into().ok()?))
}

fn u64_at(bytes: &[u8], at: usize) -> Option<u64> {
    Some(u64::from_le_bytes(bytes.get(at..at.checked_add(8)?)?.try_into().ok()?))
}

struct Machine<'a> {
    bytes: &'a [u8],
    at: usize,
    stack: Vec<Object>,
    marks: Vec<usize>,
    memo: HashMap<u32, Object>,
    items: Vec<Vec<Object>>,
    dicts: Vec<Vec<(Object, Object)>>,
    tensors: Vec<Result<Stored, String>>,
    entries: &'a HashMap<String, Range<usize>>,
    prefix: &'a str,
}

impl<'a> Machine<'a> {
    /// `entries`: where in the archive the storages lie, whose names begin with `prefix`.
    fn new(bytes: &'a [u8], entries: &'a HashMap<String, Range<usize>>, prefix: &'a str) -> Self {
        Self {
            bytes,
            at: 0,
            stack: Vec::new(),
            marks: Vec::new(),
            memo: HashMap::new(),
            items: Vec::new(),
            dicts: Vec::new(),
            tensors: Vec::new(),
            entries,
            prefix,
        }
    }

    fn run(&mut self) -> Result<Object, String> {
        loop {
            let op = self.take::<1>()?[0];
            match op {
                0x80 => {
                    let version = self.take::<1>()?[0];
                    if version > 5 {
                        return Err(format!("pickle protocol {version} is not known"));
                    }
                }
                b'.' => return self.pop(),
                // A frame length: the pickle is in memory as a whole anyway.
                0x95 => drop(self.take::<8>()?),
                b'(' => self.marks.push(self.stack.len()),
                b'N' | 0x88 | 0x89 => self.stack.push(Object::Opaque),
                b'G' => {
                    self.take::<8>()?;
                    self.stack.push(Object::Opaque);
                }
                b'J' => {
                    let v = i32::from_le_bytes(self.take()?);
                    self.stack.push(Object::Int(v.into()));
                }
                b'K' => {
                    let v = self.take::<1>()?[0];
                    self.stack.push(Object::Int(v.into()));
                }
                b'M' => {
                    let v = u16::from_le_bytes(self.take()?);
                    self.stack.push(Object::Int(v.into()));
                }
                0x8a => self.long()?,
                b'X' => {
                    let len = u32::from_le_bytes(self.take()?) as usize;
                    self.text(len)?;
                }
                0x8c => {
                    let len = self.take::<1>()?[0] as usize;
                    self.text(len)?;
                }
                b'c' => {
                    let module = self.line()?;
                    let name = self.line()?;
                    self.stack.push(Object::Global(format!("{module}.{name}").into()));
                }
                0x93 => {
                    let name = self.pop()?;
                    let module = self.pop()?;
                    let (Object::Text(module), Object::Text(name)) = (module, name) else {
                        return Err("a class name is no text".into());
                    };
                    self.stack.push(Object::Global(format!("{module}.{name}").into()));
                }
                b')' | b']' => self.push_items(Vec::new()),
                b't' => {
                    let items = self.since_mark()?;
                    self.push_items(items);
                }
                0x85..=0x87 => {
                    let count = usize::from(op - 0x84);
                    let start = self.stack.len().checked_sub(count).ok_or("stack underflow")?;
                    let items = self.stack.split_off(start);
                    self.push_items(items);
                }
                b'}' => self.push_dict(),
                b'a' => {
                    let item = self.pop()?;
                    self.extend_list(vec![item])?;
                }
                b'e' => {
                    let items = self.since_mark()?;
                    self.extend_list(items)?;
                }
                b's' => {
                    let value = self.pop()?;
                    let key = self.pop()?;
                    self.extend_dict(vec![key, value])?;
                }
                b'u' => {
                    let items = self.since_mark()?;
                    self.extend_dict(items)?;
                }
                b'q' => {
                    let id = self.take::<1>()?[0];
                    self.remember(id.into())?;
                }
                b'r' => {
                    let id = u32::from_le_bytes(self.take()?);
                    self.remember(id)?;
                }
                0x94 => {
                    let id = self.memo.len() as u32;
                    self.remember(id)?;
                }
                b'h' => {
                    let id = self.take::<1>()?[0];
                    self.recall(id.into())?;
                }
                b'j' => {
                    let id = u32::from_le_bytes(self.take()?);
                    self.recall(id)?;
                }
                b'Q' => {
                    let id = self.pop()?;
                    let Object::Items(id) = id else { return Err("a storage is not described by a tuple".into()) };
                    self.stack.push(Object::Storage(id));
                }
                b'R' | 0x81 => self.reduce()?,
                b'b' => {
                    // State of an object (`_metadata` of a state dict): nothing we read depends on it.
                    self.pop()?;
                }
                other => return Err(format!("opcode {other:#04x} does not occur in checkpoints")),
            }
        }
    }

    fn take<const N: usize>(&mut self) -> Result<[u8; N], String> {
        let bytes = self.slice(N)?;
        bytes.try_into().map_err(|_| "cut off".to_string())
    }

    fn slice(&mut self, len: usize) -> Result<&[u8], String> {
        let stop = self.at.checked_add(len).ok_or("cut off")?;
        let bytes = self.bytes.get(self.at..stop).ok_or("cut off")?;
        self.at = stop;
        Ok(bytes)
    }

    fn text(&mut self, len: usize) -> Result<(), String> {
        let text = std::str::from_utf8(self.slice(len)?).map_err(|_| "text is not UTF-8")?;
        let text = Object::Text(text.into());
        self.stack.push(text);
        Ok(())
    }

    fn line(&mut self) -> Result<String, String> {
        let rest = self.bytes.get(self.at..).ok_or("cut off")?;
        let len = rest.iter().position(|&b| b == b'\n').ok_or("cut off")?;
        let text = std::str::from_utf8(&rest[..len]).map_err(|_| "a name is not UTF-8")?.to_string();
        self.at += len + 1;
        Ok(text)
    }

    fn long(&mut self) -> Result<(), String> {
        let len = usize::from(self.take::<1>()?[0]);
        if len > 8 {
            return Err("an integer has more than 64 bits".into());
        }
        let bytes = self.slice(len)?;
        let fill = if bytes.last().is_some_and(|b| b & 0x80 != 0) { 0xff } else { 0 };
        let mut wide = [fill; 8];
        wide[..len].copy_from_slice(bytes);
        self.stack.push(Object::Int(i64::from_le_bytes(wide)));
        Ok(())
    }

    fn pop(&mut self) -> Result<Object, String> {
        self.stack.pop().ok_or_else(|| "stack underflow".to_string())
    }

    fn since_mark(&mut self) -> Result<Vec<Object>, String> {
        let mark = self.marks.pop().filter(|&m| m <= self.stack.len()).ok_or("no mark on the stack")?;
        Ok(self.stack.split_off(mark))
    }

    fn remember(&mut self, id: u32) -> Result<(), String> {
        let top = self.stack.last().ok_or("stack underflow")?.clone();
        self.memo.insert(id, top);
        Ok(())
    }

    fn recall(&mut self, id: u32) -> Result<(), String> {
        let object = self.memo.get(&id).ok_or("a memo entry that was never stored")?.clone();
        self.stack.push(object);
        Ok(())
    }

    fn push_items(&mut self, items: Vec<Object>) {
        self.stack.push(Object::Items(self.items.len()));
        self.items.push(items);
    }

    fn push_dict(&mut self) {
        self.stack.push(Object::Dict(self.dicts.len()));
        self.dicts.push(Vec::new());
    }

    fn extend_list(&mut self, items: Vec<Object>) -> Result<(), String> {
        match self.stack.last() {
            Some(&Object::Items(n)) => {
                self.items[n].extend(items);
                Ok(())
            }
            Some(Object::Opaque) => Ok(()),
            _ => Err("items for something that is no list".into()),
        }
    }

    fn extend_dict(&mut self, items: Vec<Object>) -> Result<(), String> {
        if !items.len().is_multiple_of(2) {
            return Err("a key without a value".into());
        }
        match self.stack.last() {
            Some(&Object::Dict(n)) => {
                let mut items = items.into_iter();
                while let (Some(key), Some(value)) = (items.next(), items.next()) {
                    self.dicts[n].push((key, value));
                }
                Ok(())
            }
            Some(Object::Opaque) => Ok(()),
            _ => Err("entries for something that is no dictionary".into()),
        }
    }

    fn reduce(&mut self) -> Result<(), String> {
        let args = self.pop()?;
        let callable = self.pop()?;
        let Object::Global(name) = callable else { return Err("call of something that is no class".into()) };
        match (&*name, args) {
            ("collections.OrderedDict", _) => self.push_dict(),
            ("torch._utils._rebuild_tensor_v2", Object::Items(args)) => {
                let tensor = self.tensor(args);
                self.stack.push(Object::Tensor(self.tensors.len()));
                self.tensors.push(tensor);
            }
            ("torch._utils._rebuild_parameter", Object::Items(args)) => {
                let inner = self.items[args].first().cloned();
                self.stack.push(inner.unwrap_or(Object::Opaque));
            }
            _ => return Err(format!("`{name}` is not a tensor builder; nothing of it is run")),
        }
        Ok(())
    }

    /// Arguments: storage, offset, shape, strides, requires_grad, hooks.
    fn tensor(&self, args: usize) -> Result<Stored, String> {
        let [Object::Storage(storage), Object::Int(offset), Object::Items(shape), Object::Items(strides), ..] =
            &self.items[args][..]
        else {
            return Err("its description is malformed".into());
        };
        let (storage, shape, strides) = (&self.items[*storage], &self.items[*shape], &self.items[*strides]);
        let [_, Object::Global(class), Object::Text(file), _, Object::Int(_), ..] = &storage[..] else {
            return Err("its storage description is malformed".into());
        };
        let element = match &**class {
            "torch.FloatStorage" => Element::F32,
            "torch.DoubleStorage" => Element::F64,
            "torch.HalfStorage" => Element::F16,
            "torch.BFloat16Storage" => Element::Bf16,
            "torch.LongStorage" => Element::I64,
            "torch.IntStorage" => Element::I32,
            "torch.ByteStorage" => Element::U8,
            other => return Err(format!("element type `{other}` is not known")),
        };
        let shape = sizes_in(shape).filter(|s| s.len() <= MAX_RANK).ok_or("its shape is malformed")?;
        let strides = sizes_in(strides).ok_or("its strides are malformed")?;
        let count = shape.iter().try_fold(1usize, |n, &d| n.checked_mul(d)).ok_or("its shape overflows")?;
        let mut expected = 1_usize;
        for (&size, &stride) in shape.iter().zip(&strides).rev() {
            // The stride of an axis of one element is never used, so any value is contiguous.
            if size != 1 && stride != expected && count > 0 {
                return Err("its elements are not contiguous".into());
            }
            expected = expected.saturating_mul(size.max(1));
        }
        if strides.len() != shape.len() {
            return Err("its strides do not fit its shape".into());
        }
        let entry = self
            .entries
            .get(&format!("{}data/{file}", self.prefix))
            .ok_or_else(|| format!("its storage `data/{file}` is missing from the archive"))?;
        let offset = usize::try_from(*offset)
            .ok()
            .and_then(|o| o.checked_mul(element.size()))
            .ok_or("its offset is malformed")?;
        let len = count.checked_mul(element.size()).ok_or("its shape overflows")?;
        let stop = offset.checked_add(len).filter(|&s| s <= entry.len());
        match stop {
            Some(stop) => Ok(Stored { element, shape, bytes: entry.start + offset..entry.start + stop }),
            None => Err(format!("its storage has {} bytes, too few for its shape {shape:?}", entry.len())),
        }
    }
}

fn sizes_in(items: &[Object]) -> Option<Vec<usize>> {
    items.iter().map(|i| if let Object::Int(v) = i { usize::try_from(*v).ok() } else { None }).collect()
}
