//! Reads the peer's receiver reports about the stream we send, on their way through the connection.
//!
//! Owns the instants of our last sender reports. Changes no packet. The newest report wins: a reader that is
//! late misses old ones, which is right, because each report holds totals.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use ::webrtc::error::Error;
use rtc::interceptor::{Interceptor, Packet, StreamInfo, TaggedPacket};
use rtc::rtcp::receiver_report::ReceiverReport;
use rtc::rtcp::reception_report::ReceptionReport;
use rtc::rtcp::sender_report::SenderReport;
use rtc::sansio::Protocol;
use tokio::sync::watch;

use crate::media::leg::PeerReport;

/// How many of our own sender reports a peer's report may refer to. One is sent a second, so this covers four
/// seconds of round trip.
const SENT: usize = 4;

/// The stage of a connection's packet chain that publishes [`PeerReport`]s about `ssrc`.
pub struct Reports {
    ssrc: u32,
    out: watch::Sender<Option<PeerReport>>,
    /// The middle half of the NTP time of each of our sender reports, and when it left.
    sent: VecDeque<(u32, Instant)>,
    reads: VecDeque<TaggedPacket>,
    writes: VecDeque<TaggedPacket>,
}

impl Reports {
    /// Reports about the stream `ssrc`, published on `out`.
    pub fn new(ssrc: u32, out: watch::Sender<Option<PeerReport>>) -> Self {
        Self { ssrc, out, sent: VecDeque::with_capacity(SENT), reads: VecDeque::new(), writes: VecDeque::new() }
    }

    fn publish(&mut self, now: Instant, block: &ReceptionReport) {
        if block.ssrc != self.ssrc {
            return;
        }
        let round_trip = self
            .sent
            .iter()
            .rev()
            .find(|(ntp, _)| *ntp == block.last_sender_report && *ntp != 0)
            .map(|(_, at)| now.saturating_duration_since(*at).saturating_sub(ntp_short(block.delay)));
        self.out.send_replace(Some(PeerReport {
            highest_sequence: block.last_sequence_number,
            fraction_lost: f32::from(block.fraction_lost) / 256.0,
            lost: sign_extend_24(block.total_lost),
            jitter: block.jitter,
            round_trip,
        }));
    }
}

impl Protocol<TaggedPacket, TaggedPacket, ()> for Reports {
    type Rout = TaggedPacket;
    type Wout = TaggedPacket;
    type Eout = ();
    type Error = Error;
    type Time = Instant;

    fn handle_read(&mut self, packet: TaggedPacket) -> Result<(), Error> {
        if let Packet::Rtcp(compound) = &packet.message.packet {
            for part in compound {
                let blocks = if let Some(report) = part.as_any().downcast_ref::<ReceiverReport>() {
                    &report.reports
                } else if let Some(report) = part.as_any().downcast_ref::<SenderReport>() {
                    &report.reports
                } else {
                    continue;
                };
                for block in blocks {
                    self.publish(packet.now, block);
                }
            }
        }
        self.reads.push_back(packet);
        Ok(())
    }

    fn poll_read(&mut self) -> Option<TaggedPacket> {
        self.reads.pop_front()
    }

    fn handle_write(&mut self, packet: TaggedPacket) -> Result<(), Error> {
        if let Packet::Rtcp(compound) = &packet.message.packet {
            for part in compound {
                let Some(report) = part.as_any().downcast_ref::<SenderReport>() else { continue };
                if report.ssrc == self.ssrc {
                    if self.sent.len() == SENT {
                        self.sent.pop_front();
                    }
                    self.sent.push_back(((report.ntp_time >> 16) as u32, packet.now));
                }
            }
        }
        self.writes.push_back(packet);
        Ok(())
    }

    fn poll_write(&mut self) -> Option<TaggedPacket> {
        self.writes.pop_front()
    }
}

impl Interceptor for Reports {
    fn bind_local_stream(&mut self, _: &StreamInfo) {}
    fn unbind_local_stream(&mut self, _: &StreamInfo) {}
    fn bind_remote_stream(&mut self, _: &StreamInfo) {}
    fn unbind_remote_stream(&mut self, _: &StreamInfo) {}
}

/// A duration in units of 1/65536 s (RFC 3550 section 4).
fn ntp_short(units: u32) -> Duration {
    // 2^32 * 1e9 < 2^62: no overflow.
    Duration::from_nanos((u64::from(units) * 1_000_000_000) >> 16)
}

/// The 24-bit signed field of a report block (RFC 3550 section 6.4.1): duplicates make it negative.
fn sign_extend_24(value: u32) -> i32 {
    ((value << 8) as i32) >> 8
}

#[cfg(test)]
mod tests {
    use rtc::interceptor::AttributedPacket;
    use rtc::rtcp;
    use rtc::shared::TransportContext;

    use super::*;

    fn tagged(now: Instant, part: impl rtcp::Packet + 'static) -> TaggedPacket {
        TaggedPacket {
            now,
            transport: TransportContext::default(),
            message: AttributedPacket::new(Packet::Rtcp(vec![Box::new(part)])),
        }
    }

    #[test]
    fn a_report_about_our_stream_gives_loss_and_round_trip() {
        let (out, seen) = watch::channel(None);
        let mut reports = Reports::new(7, out);
        let start = crate::clock::now();
        let ours = SenderReport { ssrc: 7, ntp_time: 0x1111_2222_3333_4444, ..Default::default() };
        reports.handle_write(tagged(start, ours)).expect("passes");
        assert!(reports.poll_write().is_some());
        let block = ReceptionReport {
            ssrc: 7,
            fraction_lost: 64,
            total_lost: 0x00ff_ffff,
            last_sequence_number: 0x0001_0005,
            jitter: 12,
            last_sender_report: 0x2222_3333,
            delay: 65_536 / 2,
        };
        let foreign = ReceptionReport { ssrc: 8, ..block.clone() };
        let theirs = ReceiverReport { ssrc: 9, reports: vec![block, foreign], ..Default::default() };
        reports.handle_read(tagged(start + Duration::from_millis(620), theirs)).expect("passes");
        assert!(reports.poll_read().is_some());
        let report = seen.borrow().expect("published");
        assert_eq!((report.highest_sequence, report.lost, report.jitter), (0x0001_0005, -1, 12));
        assert_eq!(report.fraction_lost, 0.25);
        assert_eq!(report.round_trip, Some(Duration::from_millis(120)));
    }
}
