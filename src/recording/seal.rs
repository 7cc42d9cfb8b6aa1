//! Recordings under a key: AES-256-GCM in chunks, so that a file can grow, be read as it grows, and lose its end only.
//!
//! # The container
//!
//! | bytes | |
//! | --- | --- |
//! | 8 | `ANTRECS1` |
//! | 16 | salt, random |
//! | then chunks: 4 | length of what follows, big endian; its highest bit marks the last chunk |
//! | length | ciphertext of up to 64 KiB, and its tag of 16 bytes |
//!
//! The key of a file is HKDF-SHA256 (RFC 5869) of the configured one with the salt and the information `antiphon recording
//! 1`; the nonce of chunk `n`, from 0, is `n` as 11 bytes, big endian, and a byte that is 1 for the last chunk, as in the
//! STREAM construction of Hoang, Reyhanitabar, Rogaway and Vizár (CRYPTO 2015). So chunks can be neither changed nor moved,
//! taken from another file or left out at the end without notice.
//!
//! # Why
//! *A key a file*, because nonces count from 0 in each.

use std::io::{self, Read, Write};

use ring::aead::{AES_256_GCM, Aad, LessSafeKey, NONCE_LEN, Nonce, UnboundKey};
use ring::hkdf::{HKDF_SHA256, KeyType, Salt};

use crate::secret::Secret;

const MAGIC: &[u8; 8] = b"ANTRECS1";
const SALT: usize = 16;
const INFORMATION: &[u8] = b"antiphon recording 1";
/// Plain bytes of a chunk, at most.
const CHUNK: usize = 64 << 10;
/// Marks the last chunk.
const LAST: u32 = 1 << 31;

/// The key of all recordings.
#[derive(Clone)]
pub struct Key([u8; 32]);

impl Key {
    /// Reads 64 hexadecimal digits.
    ///
    /// # Errors
    /// It is something else; the text says how to make one.
    pub fn parse(secret: &Secret) -> Result<Self, String> {
        let wrong = || "the key has to be 64 hexadecimal digits: `openssl rand -hex 32` makes one".to_owned();
        let text = secret.reveal().trim().as_bytes();
        let mut key = [0; 32];
        if text.len() != 64 {
            return Err(wrong());
        }
        for (byte, pair) in key.iter_mut().zip(text.chunks_exact(2)) {
            let digit = |c: u8| char::from(c).to_digit(16).ok_or_else(wrong);
            *byte = (digit(pair[0])? << 4 | digit(pair[1])?) as u8;
        }
        Ok(Self(key))
    }

    fn of_file(&self, salt: &[u8; SALT]) -> LessSafeKey {
        struct Length;
        impl KeyType for Length {
            fn len(&self) -> usize {
                32
            }
        }
        let mut key = [0; 32];
        let derived = Salt::new(HKDF_SHA256, salt).extract(&self.0);
        // Both fail for lengths that are not these.
        derived.expand(&[INFORMATION], Length).and_then(|okm| okm.fill(&mut key)).expect("32 bytes");
        LessSafeKey::new(UnboundKey::new(&AES_256_GCM, &key).expect("32 bytes"))
    }
}

fn nonce(chunk: u64, last: bool) -> Nonce {
    let mut bytes = [0; NONCE_LEN];
    bytes[3..11].copy_from_slice(&chunk.to_be_bytes());
    bytes[11] = u8::from(last);
    Nonce::assume_unique_for_key(bytes)
}

/// Encrypts what is written.
pub struct Sealer<W> {
    out: W,
    key: LessSafeKey,
    chunk: u64,
    plain: Vec<u8>,
}

impl<W: Write> Sealer<W> {
    /// Begins a file.
    ///
    /// # Errors
    /// Those of `out`.
    pub fn new(mut out: W, key: &Key) -> io::Result<Self> {
        let salt: [u8; SALT] = rand::random();
        out.write_all(MAGIC)?;
        out.write_all(&salt)?;
        Ok(Self { out, key: key.of_file(&salt), chunk: 0, plain: Vec::new() })
    }

    /// Writes the last chunk; without it a reader knows that the end is missing.
    ///
    /// # Errors
    /// Those of `out`.
    pub fn finish(mut self) -> io::Result<W> {
        self.seal(true)?;
        self.out.flush()?;
        Ok(self.out)
    }

    fn seal(&mut self, last: bool) -> io::Result<()> {
        let mut bytes = std::mem::take(&mut self.plain);
        let sealed = self.key.seal_in_place_append_tag(nonce(self.chunk, last), Aad::empty(), &mut bytes);
        sealed.map_err(|_| io::Error::other("encryption failed"))?;
        // 64 KiB and a tag.
        let length = bytes.len() as u32 | if last { LAST } else { 0 };
        self.out.write_all(&length.to_be_bytes())?;
        self.out.write_all(&bytes)?;
        self.chunk += 1;
        bytes.clear();
        self.plain = bytes;
        Ok(())
    }
}

impl<W: Write> Write for Sealer<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let taken = bytes.len().min(CHUNK - self.plain.len());
        self.plain.extend_from_slice(&bytes[..taken]);
        if self.plain.len() == CHUNK {
            self.seal(false)?;
        }
        Ok(taken)
    }

    /// Ends the chunk, so that what came is on its way to the disk.
    fn flush(&mut self) -> io::Result<()> {
        if !self.plain.is_empty() {
            self.seal(false)?;
        }
        self.out.flush()
    }
}

/// Reads what a [`Sealer`] wrote.
pub struct Opener<R> {
    source: R,
    key: LessSafeKey,
    chunk: u64,
    plain: Vec<u8>,
    /// Bytes of `plain` that were read.
    read: usize,
    over: bool,
    cut_off: bool,
}

impl<R: Read> Opener<R> {
    /// `cut_off`: the end may be missing, as of a recording whose gateway was killed.
    ///
    /// # Errors
    /// It is no such file, or cannot be read.
    pub fn new(mut source: R, key: &Key, cut_off: bool) -> io::Result<Self> {
        let (mut magic, mut salt) = ([0; MAGIC.len()], [0; SALT]);
        source.read_exact(&mut magic)?;
        if magic != *MAGIC {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "this is no encrypted recording"));
        }
        source.read_exact(&mut salt)?;
        let key = key.of_file(&salt);
        Ok(Self { source, key, chunk: 0, plain: Vec::new(), read: 0, over: false, cut_off })
    }

    fn next(&mut self) -> io::Result<()> {
        let wrong = |what| io::Error::new(io::ErrorKind::InvalidData, what);
        let mut length = [0; 4];
        if let Err(error) = self.source.read_exact(&mut length) {
            return self.ended(error);
        }
        let length = u32::from_be_bytes(length);
        let last = length & LAST != 0;
        let length = (length & !LAST) as usize;
        if !(AES_256_GCM.tag_len()..=CHUNK + AES_256_GCM.tag_len()).contains(&length) {
            return Err(wrong("the recording is damaged"));
        }
        self.plain.resize(length, 0);
        if let Err(error) = self.source.read_exact(&mut self.plain) {
            self.plain.clear();
            return self.ended(error);
        }
        let opened = self.key.open_in_place(nonce(self.chunk, last), Aad::empty(), &mut self.plain);
        let length = opened.map_err(|_| wrong("the key is another, or the recording is damaged"))?.len();
        self.plain.truncate(length);
        (self.read, self.over) = (0, last);
        self.chunk += 1;
        Ok(())
    }

    fn ended(&mut self, error: io::Error) -> io::Result<()> {
        if error.kind() == io::ErrorKind::UnexpectedEof && self.cut_off {
            self.over = true;
            return Ok(());
        }
        Err(match error.kind() {
            io::ErrorKind::UnexpectedEof => io::Error::new(error.kind(), "the end of the recording is missing"),
            _ => error,
        })
    }
}

impl<R: Read> Read for Opener<R> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        while self.read == self.plain.len() {
            if self.over {
                return Ok(0);
            }
            self.plain.clear();
            self.read = 0;
            self.next()?;
        }
        let some = into.len().min(self.plain.len() - self.read);
        into[..some].copy_from_slice(&self.plain[self.read..self.read + some]);
        self.read += some;
        Ok(some)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(digit: char) -> Key {
        Key::parse(&Secret::new(digit.to_string().repeat(64))).expect("64 digits")
    }

    fn sealed(parts: &[Vec<u8>]) -> Vec<u8> {
        let mut sealer = Sealer::new(Vec::new(), &key('a')).expect("memory");
        for part in parts {
            sealer.write_all(part).expect("memory");
            sealer.flush().expect("memory");
        }
        sealer.finish().expect("memory")
    }

    fn opened(bytes: &[u8], key: &Key, cut_off: bool) -> io::Result<Vec<u8>> {
        let mut plain = Vec::new();
        Opener::new(bytes, key, cut_off)?.read_to_end(&mut plain).map(|_| plain)
    }

    #[test]
    fn what_is_sealed_is_opened_by_its_key_and_by_no_other() {
        for parts in [vec![], vec![vec![7; 3]], vec![vec![1; CHUNK], vec![2; 2 * CHUNK + 1], vec![3]]] {
            let plain = parts.concat();
            let bytes = sealed(&parts);
            assert_eq!(opened(&bytes, &key('a'), false).expect("opens"), plain);
            assert!(opened(&bytes, &key('b'), true).is_err());
            assert!(!bytes.windows(8).any(|window| window == [1; 8] || window == [2; 8]), "nothing of it shows");
        }
        assert_ne!(sealed(&[vec![7; 32]]), sealed(&[vec![7; 32]]), "a key of its own for each file");
    }

    #[test]
    fn what_was_changed_moved_or_cut_off_is_noticed() {
        let bytes = sealed(&[vec![1; 40], vec![2; 40], vec![3; 40]]);
        for at in [0, 9, 30, 60, 100, bytes.len() - 1] {
            let mut changed = bytes.clone();
            changed[at] ^= 1;
            assert!(opened(&changed, &key('a'), false).is_err(), "byte {at}");
        }
        let chunk = 4 + 40 + 16;
        let mut moved = bytes.clone();
        moved[24..24 + 2 * chunk].rotate_left(chunk);
        assert!(opened(&moved, &key('a'), true).is_err());
        let cut = &bytes[..24 + 2 * chunk];
        let error = opened(cut, &key('a'), false).expect_err("no end");
        assert!(error.to_string().contains("the end"), "{error}");
        assert_eq!(opened(cut, &key('a'), true).expect("what is there"), [vec![1; 40], vec![2; 40]].concat());
        // In the middle of a chunk.
        assert_eq!(opened(&cut[..cut.len() - 7], &key('a'), true).expect("what is whole"), vec![1; 40]);
        assert!(opened(b"RIFF", &key('a'), true).is_err() && opened(b"OggS....OggS", &key('a'), true).is_err());
    }

    #[test]
    fn a_key_that_is_none_is_refused_with_how_to_make_one() {
        for text in ["", "secret", &"a".repeat(63), &"g".repeat(64), &"é".repeat(32)] {
            let error = Key::parse(&Secret::new(text)).map(|_| ()).expect_err(text);
            assert!(error.contains("openssl rand -hex 32"), "{error}");
        }
    }
}
