//! Silence as comfort noise (RFC 3389): one octet in place of a frame, for peers that have agreed to it.
//!
//! # Why
//! *Only digital silence is*: of G.711 that is one octet over and over, so that what leaves says by itself that it is
//! silence. Whatever else is sent in a pause, a quiet bed or the tail of a word, stays sound.
//!
//! *One for every frame.* Further apart would be allowed, but the numbers of packets would no longer be those of frames, and
//! carriers take a gap for a broken path.

use bytes::Bytes;

use crate::media::{
    decode::COMFORT_NOISE,
    leg::{Codec, OutPacket},
};

/// -65 dBov: a quiet room (RFC 3389 section 3.1 has 0 to 127 below the overload point).
const LEVEL: u8 = 65;

/// Makes comfort noise of silence.
#[derive(Debug, Default)]
pub(super) struct Noise {
    /// What went last was noise.
    silent: bool,
}

impl Noise {
    /// The packet as it is sent: a frame of `codec` that is silent becomes noise, and the first sound behind noise is marked
    /// (RFC 3551 section 4.1). `audio`: it is of the codec.
    pub(super) fn pass(&mut self, mut packet: OutPacket, codec: Codec, audio: bool) -> OutPacket {
        if !audio {
            return packet;
        }
        if is_silence(&packet.payload, codec) {
            self.silent = true;
            (packet.payload_type, packet.marker, packet.payload) = (COMFORT_NOISE, false, Bytes::from_static(&[LEVEL]));
        } else if std::mem::take(&mut self.silent) {
            packet.marker = true;
        }
        packet
    }
}

/// The octet of the smallest sample, of either sign.
fn is_silence(payload: &[u8], codec: Codec) -> bool {
    let quiet = match codec {
        Codec::Pcmu => [0xff, 0x7f],
        Codec::Pcma => [0xd5, 0x55],
        Codec::G722 | Codec::Opus => return false,
    };
    !payload.is_empty() && payload.iter().all(|octet| quiet.contains(octet))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn packet(octet: u8, payload_type: u8) -> OutPacket {
        let payload = Bytes::from(vec![octet; 160]);
        OutPacket { payload_type, marker: false, sequence: 7, timestamp: 160, payload }
    }

    #[test]
    fn silence_is_one_octet_and_the_first_sound_behind_it_is_marked() {
        for (codec, payload_type, quiet, loud) in [(Codec::Pcmu, 0, 0xff, 0x10), (Codec::Pcma, 8, 0xd5, 0x10)] {
            let mut noise = Noise::default();
            let sound = noise.pass(packet(loud, payload_type), codec, true);
            assert_eq!((sound.marker, sound.payload.len()), (false, 160));
            for _ in 0..2 {
                let silent = noise.pass(packet(quiet, payload_type), codec, true);
                assert_eq!((silent.payload_type, &silent.payload[..]), (COMFORT_NOISE, &[LEVEL][..]));
                assert_eq!((silent.sequence, silent.timestamp), (7, 160));
            }
            // A digit between is none of the codec's.
            assert_eq!(noise.pass(packet(quiet, 101), codec, false), packet(quiet, 101));
            assert!(noise.pass(packet(loud, payload_type), codec, true).marker);
            assert!(!noise.pass(packet(loud, payload_type), codec, true).marker);
        }
        let wide = packet(0xff, 9);
        assert_eq!(Noise::default().pass(wide.clone(), Codec::G722, true), wide);
    }
}
