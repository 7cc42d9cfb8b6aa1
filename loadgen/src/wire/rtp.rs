//! RTP and RTCP on the wire, as much as a telephone needs (RFC 3550), written apart from the gateway's own
//! stack so that a mistake in one is not hidden by the same mistake in the other.

use std::time::Duration;

use bytes::Bytes;

/// One RTP packet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Packet {
    /// Payload type, 0..=127.
    pub payload_type: u8,
    /// Marker bit.
    pub marker: bool,
    /// Sequence number.
    pub sequence: u16,
    /// Timestamp in units of the codec's clock.
    pub timestamp: u32,
    /// Sender.
    pub ssrc: u32,
    /// What it carries.
    pub payload: Bytes,
}

impl Packet {
    /// Reads a datagram; `None` when it is not RTP version 2 or its lengths do not add up.
    pub fn parse(datagram: &[u8]) -> Option<Packet> {
        let (head, _) = datagram.split_first_chunk::<12>()?;
        if head[0] >> 6 != 2 {
            return None;
        }
        let mut start = 12 + 4 * usize::from(head[0] & 0x0f);
        if head[0] & 0x10 != 0 {
            let extension = datagram.get(start..start + 4)?;
            start += 4 + 4 * usize::from(u16::from_be_bytes([extension[2], extension[3]]));
        }
        let mut end = datagram.len();
        if head[0] & 0x20 != 0 {
            let padding = usize::from(*datagram.last()?);
            if padding == 0 {
                return None;
            }
            end = end.checked_sub(padding)?;
        }
        Some(Packet {
            payload_type: head[1] & 0x7f,
            marker: head[1] & 0x80 != 0,
            sequence: u16::from_be_bytes([head[2], head[3]]),
            timestamp: u32::from_be_bytes([head[4], head[5], head[6], head[7]]),
            ssrc: u32::from_be_bytes([head[8], head[9], head[10], head[11]]),
            payload: Bytes::copy_from_slice(datagram.get(start..end)?),
        })
    }

    /// The datagram.
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(12 + self.payload.len());
        out.push(0x80);
        out.push(self.payload_type & 0x7f | if self.marker { 0x80 } else { 0 });
        out.extend_from_slice(&self.sequence.to_be_bytes());
        out.extend_from_slice(&self.timestamp.to_be_bytes());
        out.extend_from_slice(&self.ssrc.to_be_bytes());
        out.extend_from_slice(&self.payload);
        out
    }
}

/// What one source reports about another's stream (RFC 3550 section 6.4.1).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Block {
    /// Whose stream it is about.
    pub ssrc: u32,
    /// Lost since the report before, in 1/256.
    pub fraction_lost: u8,
    /// Lost in all, 24 bits signed.
    pub lost: i32,
    /// Extended highest sequence number received.
    pub highest: u32,
    /// Interarrival jitter in timestamp units.
    pub jitter: u32,
    /// Middle 32 bits of the last sender report's NTP time.
    pub last_report: u32,
    /// Since that report, in 1/65536 s.
    pub delay: u32,
}

/// The parts of a sender report before its blocks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SenderInfo {
    /// NTP time, 32.32 bits of seconds since 1900.
    pub ntp: u64,
    /// The same instant in RTP time.
    pub rtp: u32,
    /// Packets sent.
    pub packets: u32,
    /// Payload octets sent.
    pub octets: u32,
}

/// An RTCP packet this crate understands.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Report {
    /// Sender or receiver report; the information is there when it is a sender's.
    Report {
        /// Who reports.
        ssrc: u32,
        /// What it sent.
        sender: Option<SenderInfo>,
        /// What it received.
        blocks: Vec<Block>,
    },
    /// The source leaves.
    Bye {
        /// Who leaves.
        ssrc: u32,
    },
}

/// Reads a compound RTCP datagram; stops at the first part whose lengths do not add up. Parts of other types
/// are skipped.
pub fn parse_rtcp(mut datagram: &[u8]) -> Vec<Report> {
    let mut out = Vec::new();
    while let Some((head, rest)) = datagram.split_first_chunk::<4>() {
        let body_len = 4 * usize::from(u16::from_be_bytes([head[2], head[3]]));
        if head[0] >> 6 != 2 || rest.len() < body_len {
            break;
        }
        let (body, next) = rest.split_at(body_len);
        datagram = next;
        let word = |n: usize| body.get(4 * n..4 * n + 4).and_then(|b| b.try_into().ok()).map(u32::from_be_bytes);
        let Some(ssrc) = word(0) else { continue };
        match head[1] {
            200 | 201 => {
                let sender = (head[1] == 200)
                    .then(|| {
                        Some(SenderInfo {
                            ntp: u64::from(word(1)?) << 32 | u64::from(word(2)?),
                            rtp: word(3)?,
                            packets: word(4)?,
                            octets: word(5)?,
                        })
                    })
                    .flatten();
                let first = if head[1] == 200 { 6 } else { 1 };
                let blocks = (0..usize::from(head[0] & 0x1f))
                    .map_while(|n| {
                        let at = first + 6 * n;
                        let loss = word(at + 1)?;
                        Some(Block {
                            ssrc: word(at)?,
                            fraction_lost: (loss >> 24) as u8,
                            // Sign-extends the low 24 bits.
                            lost: ((loss << 8) as i32) >> 8,
                            highest: word(at + 2)?,
                            jitter: word(at + 3)?,
                            last_report: word(at + 4)?,
                            delay: word(at + 5)?,
                        })
                    })
                    .collect();
                out.push(Report::Report { ssrc, sender, blocks });
            }
            203 => out.push(Report::Bye { ssrc }),
            _ => {}
        }
    }
    out
}

/// Writes a report with its CNAME (RFC 3550 section 6.1 wants both in every compound packet), and a BYE behind
/// when `leaving`.
pub fn write_rtcp(ssrc: u32, sender: Option<SenderInfo>, blocks: &[Block], cname: &str, leaving: bool) -> Vec<u8> {
    let mut out = Vec::with_capacity(128);
    let blocks = &blocks[..blocks.len().min(31)];
    let words = 1 + if sender.is_some() { 5 } else { 0 } + 6 * blocks.len();
    out.push(0x80 | blocks.len() as u8);
    out.push(if sender.is_some() { 200 } else { 201 });
    out.extend_from_slice(&(words as u16).to_be_bytes());
    out.extend_from_slice(&ssrc.to_be_bytes());
    if let Some(info) = sender {
        out.extend_from_slice(&info.ntp.to_be_bytes());
        for word in [info.rtp, info.packets, info.octets] {
            out.extend_from_slice(&word.to_be_bytes());
        }
    }
    for block in blocks {
        let loss = u32::from(block.fraction_lost) << 24 | (block.lost as u32 & 0x00ff_ffff);
        for word in [block.ssrc, loss, block.highest, block.jitter, block.last_report, block.delay] {
            out.extend_from_slice(&word.to_be_bytes());
        }
    }
    let name = &cname.as_bytes()[..cname.len().min(200)];
    let mut chunk = ssrc.to_be_bytes().to_vec();
    chunk.extend_from_slice(&[1, name.len() as u8]);
    chunk.extend_from_slice(name);
    // At least one zero octet ends the items, and the chunk fills whole words.
    chunk.resize((chunk.len() / 4 + 1) * 4, 0);
    out.extend_from_slice(&[0x81, 202]);
    out.extend_from_slice(&((chunk.len() / 4) as u16).to_be_bytes());
    out.extend_from_slice(&chunk);
    if leaving {
        out.extend_from_slice(&[0x81, 203, 0, 1]);
        out.extend_from_slice(&ssrc.to_be_bytes());
    }
    out
}

/// NTP time (32.32 bits since 1900) of a wall-clock time since the Unix epoch.
pub fn ntp(wall: Duration) -> u64 {
    // 70 years with 17 leap days.
    let seconds = wall.as_secs() + 2_208_988_800;
    (seconds << 32) | ((u64::from(wall.subsec_nanos()) << 32) / 1_000_000_000)
}

/// The round trip a block tells, if it answers a report of ours: `now` and the block's times in NTP short format.
pub fn round_trip(now_ntp: u64, block: &Block) -> Option<Duration> {
    if block.last_report == 0 {
        return None;
    }
    let now = (now_ntp >> 16) as u32;
    let elapsed = now.wrapping_sub(block.last_report).wrapping_sub(block.delay);
    // A clock step or a rounding makes it "negative": nothing can be said.
    (elapsed < 1 << 31).then(|| Duration::from_secs_f64(f64::from(elapsed) / 65_536.0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_packet_survives_the_wire() {
        let packet = Packet {
            payload_type: 111,
            marker: true,
            sequence: 65_535,
            timestamp: 0xfedc_ba98,
            ssrc: 7,
            payload: Bytes::from_static(b"speech"),
        };
        assert_eq!(Packet::parse(&packet.to_bytes()), Some(packet));
    }

    #[test]
    fn extension_csrc_and_padding_are_skipped() {
        let mut wire = vec![0xb1, 0, 0, 1, 0, 0, 0, 2, 0, 0, 0, 3];
        wire.extend_from_slice(&[9, 9, 9, 9]);
        wire.extend_from_slice(&[0xbe, 0xde, 0, 1, 1, 2, 3, 4]);
        wire.extend_from_slice(&[42, 43, 0, 2]);
        assert_eq!(Packet::parse(&wire).unwrap().payload, Bytes::from_static(&[42, 43]));
    }

    #[test]
    fn short_or_lying_datagrams_are_refused() {
        assert_eq!(Packet::parse(&[]), None);
        assert_eq!(Packet::parse(&[0x80; 11]), None);
        assert_eq!(Packet::parse(&[0x8f, 0, 0, 1, 0, 0, 0, 2, 0, 0, 0, 3]), None);
        assert_eq!(Packet::parse(&[0xa0, 0, 0, 1, 0, 0, 0, 2, 0, 0, 0, 200]), None);
        assert_eq!(Packet::parse(&[0x90, 0, 0, 1, 0, 0, 0, 2, 0, 0, 0, 3, 0, 0, 0xff, 0xff]), None);
    }

    #[test]
    fn a_report_survives_the_wire() {
        let block =
            Block { ssrc: 9, fraction_lost: 12, lost: -3, highest: 70_000, jitter: 5, last_report: 6, delay: 7 };
        let info = SenderInfo { ntp: 1 << 40, rtp: 160, packets: 50, octets: 8_000 };
        let wire = write_rtcp(4, Some(info), &[block], "caller", true);
        assert_eq!(wire.len() % 4, 0);
        assert_eq!(
            parse_rtcp(&wire),
            [Report::Report { ssrc: 4, sender: Some(info), blocks: vec![block] }, Report::Bye { ssrc: 4 }]
        );
        // Every truncation is survived.
        for n in 0..wire.len() {
            parse_rtcp(&wire[..n]);
        }
    }

    #[test]
    fn round_trip_is_now_less_report_less_delay() {
        let sent = ntp(Duration::from_millis(1_000));
        let block = Block { last_report: (sent >> 16) as u32, delay: 65_536 / 10, ..Block::default() };
        let rtt = round_trip(ntp(Duration::from_millis(1_150)), &block).unwrap();
        assert!((rtt.as_secs_f64() - 0.05).abs() < 0.001, "{rtt:?}");
    }
}
