//! Reads the peer's receiver reports about the stream we send, on their way through the connection.
//!
//! Owns the instants of our last sender reports, and the count of what transport-wide feedback tells. Changes no packet. The
//! newest report wins: a reader that is late misses old ones, which is right, because each report holds totals.
//!
//! # Why
//! Browsers report about a stream of sound every five seconds (RFC 3550 section 6.2), but where transport-wide feedback
//! (draft-holmer-rmcat-transport-wide-cc-extensions-01) was agreed, about each packet within a quarter of one. So loss is known
//! after [`WINDOW`], and protection follows a network that goes bad before much is missed.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use ::webrtc::error::Error;
use rtc::interceptor::{Interceptor, Packet, StreamInfo, TaggedPacket};
use rtc::rtcp::receiver_report::ReceiverReport;
use rtc::rtcp::reception_report::ReceptionReport;
use rtc::rtcp::sender_report::SenderReport;
use rtc::rtcp::transport_feedbacks::transport_layer_cc::TransportLayerCc;
use rtc::sansio::Protocol;
use tokio::sync::watch;

use crate::media::leg::PeerReport;

/// How many of our own sender reports a peer's report may refer to. One is sent a second, so this covers four
/// seconds of round trip.
const SENT: usize = 4;
/// Over how long, and of how many packets at least, loss is counted from transport-wide feedback.
const WINDOW: Duration = Duration::from_secs(1);
const PACKETS: u32 = 20;

/// The stage of a connection's packet chain that publishes [`PeerReport`]s about `ssrc`.
pub struct Reports {
    ssrc: u32,
    out: watch::Sender<Option<PeerReport>>,
    /// The middle half of the NTP time of each of our sender reports, and when it left.
    sent: VecDeque<(u32, Instant)>,
    /// The last report, for what feedback does not tell.
    last: Option<PeerReport>,
    /// Packets that feedback told of since the instant, and those of them that never came.
    told: Option<(Instant, u32, u32)>,
    reads: VecDeque<TaggedPacket>,
    writes: VecDeque<TaggedPacket>,
}

impl Reports {
    /// Reports about the stream `ssrc`, published on `out`.
    pub fn new(ssrc: u32, out: watch::Sender<Option<PeerReport>>) -> Self {
        let sent = VecDeque::with_capacity(SENT);
        Self { ssrc, out, sent, last: None, told: None, reads: VecDeque::new(), writes: VecDeque::new() }
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
        // What feedback says of the last second is newer than the share of the last five.
        let recent = self.told.is_some_and(|(since, ..)| now.saturating_duration_since(since) < 3 * WINDOW);
        let newer = self.last.filter(|_| recent);
        let report = PeerReport {
            highest_sequence: block.last_sequence_number,
            fraction_lost: newer.map_or(f32::from(block.fraction_lost) / 256.0, |last| last.fraction_lost),
            lost: sign_extend_24(block.total_lost),
            jitter: block.jitter,
            round_trip,
        };
        self.last = Some(report);
        self.out.send_replace(self.last);
    }

    /// Counts what feedback tells; publishes the share that was lost when a window is over.
    fn count(&mut self, now: Instant, feedback: &TransportLayerCc) {
        let told = u32::from(feedback.packet_status_count);
        // There is one arrival time for each packet that came.
        let came = u32::try_from(feedback.recv_deltas.len()).unwrap_or(told).min(told);
        let (since, packets, lost) = self.told.unwrap_or((now, 0, 0));
        let (packets, lost) = (packets.saturating_add(told), lost.saturating_add(told - came));
        if now.saturating_duration_since(since) < WINDOW || packets < PACKETS {
            self.told = Some((since, packets, lost));
            return;
        }
        self.told = Some((now, 0, 0));
        // Until the first report it is not known how far the peer is.
        if let Some(last) = &mut self.last {
            last.fraction_lost = lost as f32 / packets as f32;
            self.out.send_replace(self.last);
        }
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
                if let Some(feedback) = part.as_any().downcast_ref::<TransportLayerCc>() {
                    self.count(packet.now, feedback);
                    continue;
                }
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
    use rtc::rtcp::transport_feedbacks::transport_layer_cc::{RecvDelta, SymbolTypeTcc};
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

    /// Feedback about `told` packets of which every `lost`th did not come.
    fn feedback(told: u16, lost: u16) -> TransportLayerCc {
        let came = (1..=told).filter(|number| number % lost != 0).count();
        let delta = RecvDelta { type_tcc_packet: SymbolTypeTcc::PacketReceivedSmallDelta, delta: 20_000 };
        TransportLayerCc { packet_status_count: told, recv_deltas: vec![delta; came], ..Default::default() }
    }

    #[test]
    fn feedback_about_each_packet_gives_loss_each_second() {
        let (out, mut seen) = watch::channel(None);
        let mut reports = Reports::new(7, out);
        let start = crate::clock::now();
        let mut at = start;
        let mut tell = |reports: &mut Reports, quarters: u32, lost| {
            for _ in 0..quarters {
                at += Duration::from_millis(250);
                reports.handle_read(tagged(at, feedback(12, lost))).expect("passes");
                assert!(reports.poll_read().is_some());
            }
        };
        tell(&mut reports, 6, 4);
        assert!(!seen.has_changed().expect("alive"), "without a report it is not known what was heard");
        let block =
            ReceptionReport { ssrc: 7, fraction_lost: 128, last_sequence_number: 90, jitter: 5, ..Default::default() };
        let theirs = ReceiverReport { ssrc: 9, reports: vec![block], ..Default::default() };
        reports.handle_read(tagged(start + 2 * WINDOW, theirs)).expect("passes");
        tell(&mut reports, 8, 4);
        let report = seen.borrow_and_update().expect("published");
        assert_eq!((report.fraction_lost, report.highest_sequence, report.jitter), (0.25, 90, 5));
        tell(&mut reports, 8, u16::MAX);
        assert_eq!(seen.borrow().expect("published").fraction_lost, 0.0, "the network is well again");
    }
}
