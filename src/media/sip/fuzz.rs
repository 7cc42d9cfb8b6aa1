//! What a telephone may send to a media port, for fuzzing.

use bytes::Bytes;
use rtc::shared::marshal::Unmarshal;
use sdp::{Key, SrtpKeys, Suite};

use super::srtp::Protection;
use crate::{
    clock,
    media::{
        decode::Inbound,
        dtmf,
        leg::{Codec, InPacket},
    },
};

/// Reads `bytes` as protected packets, and as datagrams one behind the other, each with its length in a byte before it,
/// that are decoded as every codec and as digits.
pub fn fuzz(bytes: &[u8]) {
    for suite in Suite::ALL {
        let keys = SrtpKeys { suite, local: Key([1; Key::LENGTH]), remote: Key([2; Key::LENGTH]) };
        if let Ok(mut protection) = Protection::new(keys) {
            let _ = (protection.open_rtp(bytes), protection.open_rtcp(bytes));
        }
    }
    let now = clock::now();
    let mut inbound: Vec<Inbound> = Codec::ALL.into_iter().filter_map(|codec| Inbound::new(codec).ok()).collect();
    let mut digits = dtmf::Receiver::default();
    let mut rest = bytes;
    while let Some((length, behind)) = rest.split_first() {
        let (datagram, behind) = behind.split_at(behind.len().min(usize::from(*length)));
        rest = behind;
        let Ok(packet) = rtc_rtp::Packet::unmarshal(&mut Bytes::copy_from_slice(datagram)) else { continue };
        digits.push(packet.header.timestamp, &packet.payload);
        for stream in &mut inbound {
            stream.push(InPacket {
                payload_type: packet.header.payload_type,
                marker: packet.header.marker,
                sequence: packet.header.sequence_number,
                timestamp: packet.header.timestamp,
                ssrc: packet.header.ssrc,
                arrived: now,
                payload: packet.payload.clone(),
            });
        }
    }
    for stream in &mut inbound {
        let later = stream.deadline().unwrap_or(now);
        // Bounded: a stream says no more than a buffer of packets holds.
        for _ in 0..512 {
            if stream.poll(later).is_none() {
                break;
            }
        }
    }
}
