//! A leg that another call takes over, as after a transfer: who speaks on it notices nothing but what is agreed.

use std::{fmt, io};

use tokio::net::UdpSocket;

use super::{SipLeg, Sockets};
use crate::{clock, media::leg::LegEvent};

impl SipLeg {
    /// Goes on as another call's leg. This one's is dropped: the task that signals for it sends BYE.
    pub(super) fn succeed(&mut self, mut next: SipLeg, with: String) {
        if self.over.is_some() {
            return;
        }
        let datagram = self.rtcp.goodbye(clock::now(), clock::wall());
        self.send_rtcp(&datagram);
        // Before that no socket is anybody's; then both are opened with the rest.
        if self.sockets.is_some() && next.begin().is_err() {
            return;
        }
        let mut events = std::mem::take(&mut self.events);
        events.push_back(LegEvent::Moved(with));
        if next.format != self.format {
            events.push_back(LegEvent::Format(next.format.clone()));
        }
        if next.agreed.held != self.agreed.held {
            events.push_back(LegEvent::Held(next.agreed.held));
        }
        events.append(&mut next.events);
        next.events = events;
        *self = next;
        self.shake();
    }

    /// Makes the sockets those of the runtime that this is called on.
    pub(super) fn begin(&mut self) -> io::Result<()> {
        if let Some(ports) = self.ports.take() {
            self.sockets =
                Some(Sockets { rtp: UdpSocket::from_std(ports.rtp)?, rtcp: UdpSocket::from_std(ports.rtcp)? });
            self.heard = clock::now();
        }
        Ok(())
    }
}

impl fmt::Debug for SipLeg {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SipLeg").field("port", &self.local_port()).field("remote", &self.remote()).finish()
    }
}
