//! The protobuf wire format: fields of a message as ranges of the file.
//!
//! Every range handed out lies inside the message it was read from, so slicing with it cannot panic.

use std::ops::Range;

/// What a field holds.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Value {
    /// A varint.
    Int(u64),
    /// Length-delimited content.
    Bytes(Range<usize>),
    /// Four little-endian bytes.
    Fixed32(Range<usize>),
    /// Eight little-endian bytes.
    Fixed64,
}

/// Iterates over the fields of one message; after an error it ends.
pub(super) struct Message<'a> {
    bytes: &'a [u8],
    at: usize,
    end: usize,
}

impl<'a> Message<'a> {
    /// `range` must lie inside `bytes`.
    pub(super) fn new(bytes: &'a [u8], range: Range<usize>) -> Self {
        Self { bytes, at: range.start, end: range.end }
    }

    fn field(&mut self) -> Result<(u64, Value), String> {
        let tag = self.varint()?;
        let value = match tag & 7 {
            0 => Value::Int(self.varint()?),
            1 => self.skip(8).map(|_| Value::Fixed64)?,
            2 => {
                let length = self.varint()?;
                Value::Bytes(self.skip(length)?)
            }
            5 => Value::Fixed32(self.skip(4)?),
            kind => return Err(format!("byte {}: wire type {kind} does not occur in ONNX", self.at)),
        };
        Ok((tag >> 3, value))
    }

    fn varint(&mut self) -> Result<u64, String> {
        let mut value = 0;
        for shift in (0..70).step_by(7) {
            if self.at >= self.end {
                return Err(format!("it is cut off at byte {}", self.at));
            }
            let byte = self.bytes[self.at];
            self.at += 1;
            // The tenth byte carries one bit; what is beyond 64 bits is dropped, as protobuf readers do.
            value |= u64::from(byte & 0x7f).checked_shl(shift).unwrap_or(0);
            if byte & 0x80 == 0 {
                return Ok(value);
            }
        }
        Err(format!("byte {}: a number is longer than 10 bytes", self.at))
    }

    fn skip(&mut self, length: u64) -> Result<Range<usize>, String> {
        let start = self.at;
        let room = (self.end - start) as u64;
        if length > room {
            return Err(format!("it is cut off: byte {start} announces {length} more bytes, {room} follow"));
        }
        self.at += length as usize;
        Ok(start..self.at)
    }
}

impl Iterator for Message<'_> {
    type Item = Result<(u64, Value), String>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.at >= self.end {
            return None;
        }
        let field = self.field();
        if field.is_err() {
            self.at = self.end;
        }
        Some(field)
    }
}

/// The varints of a packed field.
pub(super) fn packed(bytes: &[u8], range: Range<usize>) -> impl Iterator<Item = Result<u64, String>> {
    let mut message = Message::new(bytes, range);
    std::iter::from_fn(move || {
        if message.at >= message.end {
            return None;
        }
        let value = message.varint();
        if value.is_err() {
            message.at = message.end;
        }
        Some(value)
    })
}
