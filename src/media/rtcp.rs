//! RTCP of one audio stream each way: what we tell the peer, and what it tells us (RFC 3550 section 6).
//!
//! Pure state: time comes in as an argument, packets go out as bytes. Protection and sockets are the leg's.
//! Contract: tell it of every packet sent and received; when [`Rtcp::deadline`] has passed, send what
//! [`Rtcp::report`] returns.

use std::time::{Duration, Instant};

use bytes::{Bytes, BytesMut};
use rtc_rtcp::{
    goodbye::Goodbye,
    packet::{self, Packet},
    receiver_report::ReceiverReport,
    reception_report::ReceptionReport,
    sender_report::SenderReport,
    source_description::{SdesType, SourceDescription, SourceDescriptionChunk, SourceDescriptionItem},
};

use super::leg::{Arrivals, InPacket, OutPacket, PeerReport};

/// Between reports, before it is spread (RFC 3550 section 6.2: at least 5 s).
const INTERVAL: Duration = Duration::from_secs(5);
/// Seconds from 1900, where NTP starts, to 1970.
const NTP_EPOCH: u64 = 2_208_988_800;
/// Sequence jump that still counts as loss, and step back that still counts as reordering (RFC 3550 A.1).
const MAX_DROPOUT: u16 = 3_000;
const MAX_MISORDER: u16 = 100;

/// What a received compound packet says.
#[derive(Clone, Debug, PartialEq)]
pub enum Heard {
    /// The peer's view of our stream.
    Report(PeerReport),
    /// The peer's stream is over. Its dialog may live on.
    Bye,
}

/// Both directions of one stream.
#[derive(Debug)]
pub struct Rtcp {
    ssrc: u32,
    cname: String,
    clock_rate: u32,
    deadline: Instant,
    packets_sent: u32,
    octets_sent: u32,
    /// RTP timestamp of the last packet sent and when that was.
    last_sent: Option<(u32, Instant)>,
    sent_since_report: bool,
    reception: Option<Reception>,
}

impl Rtcp {
    /// `ssrc` is ours and random, `cname` the same for the whole call, `clock_rate` that of the codec in Hz.
    pub fn new(now: Instant, ssrc: u32, cname: String, clock_rate: u32) -> Rtcp {
        Rtcp {
            ssrc,
            cname,
            clock_rate,
            // The first report comes after half an interval (RFC 3550 section 6.2).
            deadline: now + INTERVAL / 2,
            packets_sent: 0,
            octets_sent: 0,
            last_sent: None,
            sent_since_report: false,
            reception: None,
        }
    }

    /// The codec changed; jitter is counted in units of its clock.
    pub fn set_clock_rate(&mut self, clock_rate: u32) {
        if self.clock_rate != clock_rate {
            self.clock_rate = clock_rate;
            self.reception = None;
        }
    }

    /// A packet left.
    pub fn on_sent(&mut self, now: Instant, packet: &OutPacket) {
        self.packets_sent = self.packets_sent.wrapping_add(1);
        self.octets_sent = self.octets_sent.wrapping_add(u32::try_from(packet.payload.len()).unwrap_or(u32::MAX));
        self.last_sent = Some((packet.timestamp, now));
        self.sent_since_report = true;
    }

    /// A packet arrived. `audio`: it is of the codec, so that its timestamp tells of jitter.
    pub fn on_received(&mut self, packet: &InPacket, audio: bool) {
        Reception::take(&mut self.reception, packet, audio, self.clock_rate);
    }

    /// A compound packet arrived. `wall` is the time of day since 1970.
    ///
    /// # Errors
    /// It is malformed; nothing was taken from it.
    pub fn on_rtcp(&mut self, now: Instant, wall: Duration, datagram: &[u8]) -> Result<Vec<Heard>, Malformed> {
        let mut rest = Bytes::copy_from_slice(datagram);
        let packets = packet::unmarshal(&mut rest).map_err(|_| Malformed)?;
        let mut heard = Vec::new();
        for packet in packets {
            let any = packet.as_any();
            let blocks = if let Some(report) = any.downcast_ref::<SenderReport>() {
                if let Some(reception) = self.reception.as_mut().filter(|r| r.ssrc == report.ssrc) {
                    // The middle 32 bits, by definition.
                    reception.last_sender_report = Some(((report.ntp_time >> 16) as u32, now));
                }
                &report.reports
            } else if let Some(report) = any.downcast_ref::<ReceiverReport>() {
                &report.reports
            } else {
                if any.is::<Goodbye>() {
                    heard.push(Heard::Bye);
                }
                continue;
            };
            let ours = blocks.iter().filter(|block| block.ssrc == self.ssrc);
            heard.extend(ours.map(|block| Heard::Report(peer_report(block, wall))));
        }
        Ok(heard)
    }

    /// When the next report is due.
    pub fn deadline(&self) -> Instant {
        self.deadline
    }

    /// The report that is due. `spread` (0..1, random) keeps many calls from reporting in step.
    pub fn report(&mut self, now: Instant, wall: Duration, spread: f64) -> BytesMut {
        self.deadline = now + INTERVAL.mul_f64(0.5 + spread.clamp(0.0, 1.0));
        self.compound(now, wall, None)
    }

    /// The last report, with BYE.
    pub fn goodbye(&mut self, now: Instant, wall: Duration) -> BytesMut {
        let bye = Goodbye { sources: vec![self.ssrc], reason: Bytes::new() };
        self.compound(now, wall, Some(bye))
    }

    /// What arrived of the present source, so far.
    pub fn received(&self) -> Option<Arrivals> {
        self.reception.as_ref().map(|reception| reception.arrivals(self.clock_rate))
    }

    /// Interarrival jitter of what arrives, in RTP timestamp units.
    pub fn jitter(&self) -> Option<u32> {
        self.reception.as_ref().map(Reception::jitter)
    }

    fn compound(&mut self, now: Instant, wall: Duration, bye: Option<Goodbye>) -> BytesMut {
        let reports: Vec<_> = self.reception.as_mut().map(|r| r.report(now)).into_iter().collect();
        let sending = std::mem::take(&mut self.sent_since_report);
        let first: Box<dyn Packet> = match self.last_sent.filter(|_| sending) {
            Some((timestamp, at)) => {
                let since = now.saturating_duration_since(at);
                Box::new(SenderReport {
                    ssrc: self.ssrc,
                    ntp_time: ntp(wall),
                    rtp_time: timestamp.wrapping_add(ticks(since, self.clock_rate)),
                    packet_count: self.packets_sent,
                    octet_count: self.octets_sent,
                    reports,
                    profile_extensions: Bytes::new(),
                })
            }
            None => Box::new(ReceiverReport { ssrc: self.ssrc, reports, profile_extensions: Bytes::new() }),
        };
        let cname = SourceDescriptionItem { sdes_type: SdesType::SdesCname, text: self.cname.clone().into() };
        let names =
            SourceDescription { chunks: vec![SourceDescriptionChunk { source: self.ssrc, items: vec![cname] }] };
        let mut packets: Vec<Box<dyn Packet>> = vec![first, Box::new(names)];
        if let Some(bye) = bye {
            packets.push(Box::new(bye));
        }
        // Our own packets are within every limit of the format, so an error cannot arise; were it to, an
        // empty datagram is nothing worse than a missing report.
        packet::marshal(&packets).unwrap_or_default()
    }
}

/// A datagram on the RTCP port that is no RTCP.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("not an RTCP packet")]
pub struct Malformed;

/// What arrives from one source (RFC 3550 appendix A.1, A.3 and A.8).
#[derive(Debug)]
pub struct Reception {
    ssrc: u32,
    base: u32,
    cycles: u32,
    highest: u16,
    /// Where a sequence must go on if the source has restarted.
    restart: Option<u16>,
    received: u32,
    expected_before: u32,
    received_before: u32,
    /// Jitter times 16.
    jitter: u32,
    /// RTP timestamp of the last packet and its arrival.
    last: (u32, Instant),
    /// NTP middle bits of the last sender report and its arrival.
    last_sender_report: Option<(u32, Instant)>,
}

impl Reception {
    /// A packet arrived, of the source that `present` counts or of another. `audio`: as for [`Rtcp::on_received`].
    pub fn take(present: &mut Option<Reception>, packet: &InPacket, audio: bool, clock_rate: u32) {
        match present {
            Some(reception) if reception.ssrc == packet.ssrc => reception.on_packet(packet, audio, clock_rate),
            // Another source took over: a transfer behind the peer, or its restart.
            _ => *present = Some(Reception::new(packet)),
        }
    }

    /// What has arrived so far.
    pub fn arrivals(&self, clock_rate: u32) -> Arrivals {
        let jitter = Duration::from_secs_f64(f64::from(self.jitter()) / f64::from(clock_rate.max(1)));
        Arrivals { expected: self.expected(), received: self.received, jitter }
    }

    fn new(packet: &InPacket) -> Reception {
        Reception {
            ssrc: packet.ssrc,
            base: u32::from(packet.sequence),
            cycles: 0,
            highest: packet.sequence,
            restart: None,
            received: 1,
            expected_before: 0,
            received_before: 0,
            jitter: 0,
            last: (packet.timestamp, packet.arrived),
            last_sender_report: None,
        }
    }

    fn on_packet(&mut self, packet: &InPacket, audio: bool, clock_rate: u32) {
        let ahead = packet.sequence.wrapping_sub(self.highest);
        if ahead < MAX_DROPOUT {
            if packet.sequence < self.highest {
                self.cycles = self.cycles.wrapping_add(1 << 16);
            }
            self.highest = packet.sequence;
        } else if ahead <= u16::MAX - MAX_MISORDER {
            // A large jump counts when a second packet continues it.
            if self.restart != Some(packet.sequence) {
                self.restart = Some(packet.sequence.wrapping_add(1));
                return;
            }
            let sender_report = self.last_sender_report;
            *self = Reception { last_sender_report: sender_report, ..Reception::new(packet) };
            return;
        }
        self.restart = None;
        self.received = self.received.wrapping_add(1);
        if !audio {
            return;
        }
        let (timestamp, arrived) = self.last;
        self.last = (packet.timestamp, packet.arrived);
        // Difference of the transit times, as signed arithmetic on wrapping counters.
        let elapsed = ticks(packet.arrived.saturating_duration_since(arrived), clock_rate);
        let transit = elapsed.wrapping_sub(packet.timestamp.wrapping_sub(timestamp)).cast_signed().unsigned_abs();
        // A pause between talk spurts is no jitter; a second is far above any real one.
        if transit < clock_rate {
            self.jitter = self.jitter + transit - ((self.jitter + 8) >> 4);
        }
    }

    fn jitter(&self) -> u32 {
        self.jitter >> 4
    }

    /// Packets that were sent, by their numbers.
    fn expected(&self) -> u32 {
        self.cycles.wrapping_add(u32::from(self.highest)).wrapping_sub(self.base).wrapping_add(1)
    }

    fn report(&mut self, now: Instant) -> ReceptionReport {
        let highest = self.cycles.wrapping_add(u32::from(self.highest));
        let expected = self.expected();
        // Duplicates can make this negative, which the field of this format cannot say: 0 then.
        let lost = expected.wrapping_sub(self.received).cast_signed().clamp(0, 0x7f_ffff).cast_unsigned();
        let expected_now = expected.wrapping_sub(self.expected_before);
        let received_now = self.received.wrapping_sub(self.received_before);
        self.expected_before = expected;
        self.received_before = self.received;
        let lost_now = expected_now.saturating_sub(received_now);
        let fraction = (u64::from(lost_now) << 8).checked_div(u64::from(expected_now)).unwrap_or(0);
        let (last_sender_report, delay) = self
            .last_sender_report
            .map_or((0, 0), |(ntp, at)| (ntp, ticks(now.saturating_duration_since(at), 1 << 16)));
        ReceptionReport {
            ssrc: self.ssrc,
            fraction_lost: u8::try_from(fraction).unwrap_or(u8::MAX),
            total_lost: lost,
            last_sequence_number: highest,
            jitter: self.jitter(),
            last_sender_report,
            delay,
        }
    }
}

fn peer_report(block: &ReceptionReport, wall: Duration) -> PeerReport {
    let round_trip = (block.last_sender_report != 0).then(|| {
        let now = (ntp(wall) >> 16) as u32;
        let units = now.wrapping_sub(block.last_sender_report).wrapping_sub(block.delay).cast_signed();
        // Clocks of peers are read in steps, so a tiny negative value is a very short trip.
        Duration::from_secs(1).mul_f64(f64::from(units.max(0)) / 65_536.0)
    });
    PeerReport {
        highest_sequence: block.last_sequence_number,
        fraction_lost: f32::from(block.fraction_lost) / 256.0,
        // 24 bits, signed (RFC 3550 section 6.4.1).
        lost: ((block.total_lost << 8).cast_signed()) >> 8,
        jitter: block.jitter,
        // A trip of more than 30 s is a wrong clock or a forged report.
        round_trip: round_trip.filter(|trip| *trip < Duration::from_secs(30)),
    }
}

/// NTP time: seconds since 1900 and their fraction in 32 bits each.
fn ntp(wall: Duration) -> u64 {
    let seconds = (wall.as_secs() + NTP_EPOCH) & u64::from(u32::MAX);
    let fraction = (u64::from(wall.subsec_nanos()) << 32) / 1_000_000_000;
    seconds << 32 | fraction
}

/// `time` in units of a clock of `rate` Hz, modulo 2^32 as RTP counts.
fn ticks(time: Duration, rate: u32) -> u32 {
    (time.as_nanos() * u128::from(rate) / 1_000_000_000) as u32
}

#[cfg(test)]
mod tests;
