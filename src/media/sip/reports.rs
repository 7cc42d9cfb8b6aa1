//! RTCP of a leg: reports that come, and those that leave.

use std::net::SocketAddr;

use bytes::{Bytes, BytesMut};
use metrics::{counter, gauge};

use super::{SipLeg, secure::Component, srtp::Protection};
use crate::{
    clock,
    media::{leg::LegEvent, rtcp::Heard},
};

impl SipLeg {
    pub(super) fn on_rtcp(&mut self, datagram: &[u8], from: SocketAddr) {
        let (protected, protection) = self.rtcp_protection();
        let opened = match protection {
            Some(protection) => protection.open_rtcp(datagram).map(BytesMut::freeze),
            // The handshake is not over.
            None if protected => return,
            None => Ok(Bytes::copy_from_slice(datagram)),
        };
        let Ok(plain) = opened else {
            self.malformed(from);
            return;
        };
        // Without protection only the host that the media is with may report, and of it the first address that did.
        let proven = protected;
        let known = self.rtcp_source.is_none_or(|source| source == from) && self.latch.may_come_from(from.ip());
        if !proven && !known {
            self.counters.stranger.increment(1);
            return;
        }
        let now = clock::now();
        match self.rtcp.on_rtcp(now, clock::wall(), &plain) {
            Err(_) => self.malformed(from),
            Ok(heard) => {
                self.heard = now;
                self.rtcp_source = Some(from);
                counter!("antiphon_rtcp_packets_total", "direction" => "in").increment(1);
                for report in heard {
                    // BYE of a stream is no end of the call: transfers and restarts begin that way too.
                    let Heard::Report(mut report) = report else { continue };
                    if let Some(packets) = &mut self.packets {
                        report.highest_sequence = packets.acknowledged(report.highest_sequence);
                    }
                    // The latest of any call: kept for a release beside the histogram.
                    gauge!("antiphon_rtcp_fraction_lost").set(report.fraction_lost);
                    let line = &self.counters.line;
                    line.loss.record(f64::from(report.fraction_lost));
                    let jitter = f64::from(report.jitter) / f64::from(self.format.codec.clock_rate());
                    line.jitter.record(jitter);
                    if let Some(trip) = report.round_trip {
                        line.round_trip.record(trip);
                    }
                    self.events.push_back(LegEvent::Report(report));
                }
            }
        }
    }

    pub(super) fn send_rtcp(&mut self, datagram: &[u8]) {
        let (socket, target) = match self.agreed.rtcp_mux {
            true => (Component::Rtp, self.latch.target()),
            false => (Component::Rtcp, self.rtcp_target()),
        };
        let Some(target) = target else { return };
        let (protected, protection) = self.rtcp_protection();
        let sealed = protection.and_then(|protection| protection.protect_rtcp(datagram).ok());
        if protected && sealed.is_none() {
            return;
        }
        let Some(sockets) = &self.sockets else { return };
        let socket = if socket == Component::Rtp { &sockets.rtp } else { &sockets.rtcp };
        // overflow: drops (counted); the next report says the same and more
        match socket.try_send_to(sealed.as_deref().unwrap_or(datagram), target) {
            Ok(_) => counter!("antiphon_rtcp_packets_total", "direction" => "out").increment(1),
            Err(_) => counter!("antiphon_rtcp_packets_total", "direction" => "out_dropped").increment(1),
        }
    }

    /// Where reports go on a port of their own.
    pub(super) fn rtcp_target(&self) -> Option<SocketAddr> {
        let told = self.agreed.remote_rtcp.filter(|address| self.latch.may_send_to(address.ip()));
        self.rtcp_source.or(told)
    }

    /// Whether reports are to be protected, and what does it, where there is something yet.
    fn rtcp_protection(&mut self) -> (bool, Option<&mut Protection>) {
        let protected = self.encrypted();
        match &mut self.secure {
            Some(secure) if !self.agreed.rtcp_mux => (true, secure.rtcp_protection()),
            _ => (protected, self.protection.as_mut()),
        }
    }
}
