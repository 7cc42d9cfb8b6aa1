//! Writes state dicts as `torch.save` does: an uncompressed zip with a pickle and one aligned entry a tensor.

use std::fs::File;
use std::io::{self, BufWriter, Seek, SeekFrom, Write};
use std::path::Path;

/// Entries start at multiples of this, as `torch.save` has it.
const ALIGNMENT: u64 = 64;

/// A tensor to be written: all are float32.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tensor {
    /// Its key.
    pub key: String,
    /// Its shape.
    pub shape: Vec<usize>,
    /// Number of the storage that holds it; two tensors may share one.
    pub storage: usize,
}

/// Writes `tensors` to `path`; `fill` appends the little-endian bytes of a storage, called once each in order.
///
/// # Errors
/// The file cannot be written, or would pass the 4 GiB that plain zip files can have.
pub fn write(path: &Path, tensors: &[Tensor], mut fill: impl FnMut(usize, &mut Vec<u8>)) -> io::Result<()> {
    let stem = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
    let mut zip = Zip { out: BufWriter::with_capacity(1 << 20, File::create(path)?), at: 0, entries: Vec::new() };
    zip.entry(&format!("{stem}/data.pkl"), &pickle(tensors))?;
    zip.entry(&format!("{stem}/byteorder"), b"little")?;
    let storages = tensors.iter().map(|t| t.storage + 1).max().unwrap_or_default();
    let mut bytes = Vec::new();
    for storage in 0..storages {
        bytes.clear();
        fill(storage, &mut bytes);
        zip.entry(&format!("{stem}/data/{storage}"), &bytes)?;
    }
    zip.entry(&format!("{stem}/version"), b"3\n")?;
    zip.finish()
}

struct Zip {
    out: BufWriter<File>,
    at: u64,
    entries: Vec<Entry>,
}

struct Entry {
    name: String,
    crc: u32,
    size: u32,
    offset: u32,
}

impl Zip {
    fn entry(&mut self, name: &str, bytes: &[u8]) -> io::Result<()> {
        let too_large = || io::Error::new(io::ErrorKind::FileTooLarge, "a plain zip file ends at 4 GiB");
        let offset = u32::try_from(self.at).map_err(|_| too_large())?;
        let size = u32::try_from(bytes.len()).map_err(|_| too_large())?;
        // An extra field of the given length brings the content to its alignment.
        let head = 30 + name.len() as u64;
        let padding = (ALIGNMENT - (self.at + head + 4) % ALIGNMENT) % ALIGNMENT;
        let crc = crc32(bytes);
        let mut header = Vec::with_capacity(128);
        header.extend(b"PK\x03\x04");
        for field in [20u16, 0, 0, 0, 0] {
            header.extend(field.to_le_bytes());
        }
        for field in [crc, size, size] {
            header.extend(field.to_le_bytes());
        }
        header.extend((name.len() as u16).to_le_bytes());
        header.extend((padding as u16 + 4).to_le_bytes());
        header.extend(name.as_bytes());
        header.extend(b"FB");
        header.extend((padding as u16).to_le_bytes());
        header.resize(header.len() + padding as usize, b'Z');
        self.out.write_all(&header)?;
        self.out.write_all(bytes)?;
        self.at += (header.len() + bytes.len()) as u64;
        self.entries.push(Entry { name: name.into(), crc, size, offset });
        Ok(())
    }

    fn finish(mut self) -> io::Result<()> {
        let start = self.at;
        let mut directory = Vec::new();
        for entry in &self.entries {
            directory.extend(b"PK\x01\x02");
            for field in [20u16, 20, 0, 0, 0, 0] {
                directory.extend(field.to_le_bytes());
            }
            for field in [entry.crc, entry.size, entry.size] {
                directory.extend(field.to_le_bytes());
            }
            for field in [entry.name.len() as u16, 0, 0, 0, 0] {
                directory.extend(field.to_le_bytes());
            }
            directory.extend(0u32.to_le_bytes());
            directory.extend(entry.offset.to_le_bytes());
            directory.extend(entry.name.as_bytes());
        }
        let count = self.entries.len() as u16;
        let size = directory.len() as u32;
        let start = u32::try_from(start).map_err(|_| io::Error::from(io::ErrorKind::FileTooLarge))?;
        directory.extend(b"PK\x05\x06");
        for field in [0u16, 0, count, count] {
            directory.extend(field.to_le_bytes());
        }
        directory.extend(size.to_le_bytes());
        directory.extend(start.to_le_bytes());
        directory.extend(0u16.to_le_bytes());
        self.out.write_all(&directory)?;
        self.out.flush()?;
        let mut file = self.out.into_inner().map_err(|e| e.into_error())?;
        file.seek(SeekFrom::End(0))?;
        file.sync_all()
    }
}

/// Protocol 2, without memo: nothing in it repeats but a few short names.
fn pickle(tensors: &[Tensor]) -> Vec<u8> {
    let mut out = vec![0x80, 2, b'}', b'('];
    let text = |out: &mut Vec<u8>, text: &str| {
        out.push(b'X');
        out.extend((text.len() as u32).to_le_bytes());
        out.extend(text.as_bytes());
    };
    let int = |out: &mut Vec<u8>, value: usize| {
        out.push(b'J');
        out.extend((value as i32).to_le_bytes());
    };
    for tensor in tensors {
        text(&mut out, &tensor.key);
        out.extend(b"ctorch._utils\n_rebuild_tensor_v2\n((");
        text(&mut out, "storage");
        out.extend(b"ctorch\nFloatStorage\n");
        text(&mut out, &tensor.storage.to_string());
        text(&mut out, "cpu");
        int(&mut out, tensor.shape.iter().product());
        out.extend(b"tQ");
        int(&mut out, 0);
        let mut strides = vec![1usize; tensor.shape.len()];
        for i in (1..strides.len()).rev() {
            strides[i - 1] = strides[i] * tensor.shape[i];
        }
        for sizes in [&tensor.shape, &strides] {
            out.push(b'(');
            for &size in sizes {
                int(&mut out, size);
            }
            out.push(b't');
        }
        out.extend(b"\x89ccollections\nOrderedDict\n)RtR");
    }
    out.extend(b"u.");
    out
}

/// CRC-32 of zip files, eight bytes at a time.
fn crc32(bytes: &[u8]) -> u32 {
    static TABLES: std::sync::LazyLock<[[u32; 256]; 8]> = std::sync::LazyLock::new(|| {
        let mut tables = [[0u32; 256]; 8];
        for (i, entry) in tables[0].iter_mut().enumerate() {
            let mut value = i as u32;
            for _ in 0..8 {
                value = if value & 1 == 1 { value >> 1 ^ 0xedb8_8320 } else { value >> 1 };
            }
            *entry = value;
        }
        for i in 0..256 {
            for t in 1..8 {
                let before = tables[t - 1][i];
                tables[t][i] = before >> 8 ^ tables[0][(before & 0xff) as usize];
            }
        }
        tables
    });
    let tables = &*TABLES;
    let mut crc = u32::MAX;
    let mut words = bytes.chunks_exact(8);
    for word in &mut words {
        let low = crc ^ u32::from_le_bytes([word[0], word[1], word[2], word[3]]);
        let low = low.to_le_bytes();
        crc = (0..4).fold(0, |sum, i| sum ^ tables[7 - i][low[i] as usize] ^ tables[3 - i][word[4 + i] as usize]);
    }
    for &byte in words.remainder() {
        crc = crc >> 8 ^ tables[0][((crc ^ u32::from(byte)) & 0xff) as usize];
    }
    !crc
}

#[cfg(test)]
mod tests {
    #[test]
    fn crc_matches_its_check_value() {
        assert_eq!(super::crc32(b"123456789"), 0xcbf4_3926);
    }
}
