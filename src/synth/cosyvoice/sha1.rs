//! SHA-1 (FIPS 180-4), for git's names of blobs: it tells damage, not malice.

/// The state of a hash.
pub(super) struct Sha1 {
    state: [u32; 5],
    block: Vec<u8>,
    bytes: u64,
}

impl Default for Sha1 {
    fn default() -> Self {
        Self { state: [0x6745_2301, 0xefcd_ab89, 0x98ba_dcfe, 0x1032_5476, 0xc3d2_e1f0], block: Vec::new(), bytes: 0 }
    }
}

impl Sha1 {
    /// Takes more of the message.
    pub(super) fn update(&mut self, bytes: &[u8]) {
        self.bytes += bytes.len() as u64;
        self.block.extend_from_slice(bytes);
        let whole = self.block.len() / 64 * 64;
        let rest = self.block.split_off(whole);
        for block in std::mem::replace(&mut self.block, rest).chunks_exact(64) {
            self.mix(block);
        }
    }

    /// The digest.
    pub(super) fn finish(mut self) -> [u8; 20] {
        let bits = 8 * self.bytes;
        let mut tail = vec![0x80];
        tail.resize(1 + (119 - self.block.len()) % 64, 0);
        tail.extend(bits.to_be_bytes());
        self.update(&tail);
        let mut digest = [0; 20];
        for (out, word) in digest.chunks_exact_mut(4).zip(self.state) {
            out.copy_from_slice(&word.to_be_bytes());
        }
        digest
    }

    fn mix(&mut self, block: &[u8]) {
        let mut words = [0u32; 80];
        for (word, bytes) in words.iter_mut().zip(block.chunks_exact(4)) {
            *word = u32::from_be_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
        }
        for i in 16..80 {
            words[i] = (words[i - 3] ^ words[i - 8] ^ words[i - 14] ^ words[i - 16]).rotate_left(1);
        }
        let [mut a, mut b, mut c, mut d, mut e] = self.state;
        for (i, word) in words.into_iter().enumerate() {
            let (f, k) = match i / 20 {
                0 => (b & c | !b & d, 0x5a82_7999),
                1 => (b ^ c ^ d, 0x6ed9_eba1),
                2 => (b & c | b & d | c & d, 0x8f1b_bcdc),
                _ => (b ^ c ^ d, 0xca62_c1d6),
            };
            let next = a.rotate_left(5).wrapping_add(f).wrapping_add(e).wrapping_add(k).wrapping_add(word);
            (e, d, c, b, a) = (d, c, b.rotate_left(30), a, next);
        }
        for (state, word) in self.state.iter_mut().zip([a, b, c, d, e]) {
            *state = state.wrapping_add(word);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::Sha1;

    #[test]
    fn digests_match_the_standard() {
        let of = |text: &[u8]| {
            let mut hash = Sha1::default();
            text.chunks(7).for_each(|c| hash.update(c));
            hash.finish().iter().map(|b| format!("{b:02x}")).collect::<String>()
        };
        assert_eq!(of(b""), "da39a3ee5e6b4b0d3255bfef95601890afd80709");
        assert_eq!(of(b"abc"), "a9993e364706816aba3e25717850c26c9cd0d89d");
        assert_eq!(
            of(b"abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq"),
            "84983e441c3bd26ebaae4aa1f95129e5e54670f1"
        );
    }
}
