//! A leg whose keys come of a handshake: STUN, DTLS and media share its ports (RFC 7983), and the handshake needs time.

use std::{collections::VecDeque, io, net::SocketAddr, time::Instant};

use sdp::Dtls;

use super::{
    Control, SipLeg, Sockets,
    dtls::{Association, Identity, Outcome},
    ice,
    srtp::Protection,
};
use crate::{clock, media::leg::LegEnd};

/// Addresses of the peer that are remembered as checked.
const MAX_CHECKED: usize = 8;

/// Which of the two ports.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Component {
    Rtp,
    /// Where it is not multiplexed.
    Rtcp,
}

/// The handshakes of a leg.
pub(super) struct Secure {
    identity: Identity,
    agreed: Dtls,
    rtp: Association,
    /// A port of its own has a handshake of its own (RFC 5764 section 4.2).
    rtcp: Option<Association>,
    rtcp_protection: Option<Protection>,
    /// Where checks came from that were signed.
    checked: VecDeque<SocketAddr>,
    /// Where the handshakes are with.
    rtp_path: Option<SocketAddr>,
    rtcp_path: Option<SocketAddr>,
}

impl Secure {
    pub(super) fn new(identity: &Identity, agreed: Dtls, multiplexed: bool) -> io::Result<Secure> {
        let association = || Association::new(identity, &agreed).map_err(io::Error::other);
        Ok(Secure {
            rtp: association()?,
            rtcp: if multiplexed { None } else { Some(association()?) },
            identity: identity.clone(),
            agreed,
            rtcp_protection: None,
            checked: VecDeque::new(),
            rtp_path: None,
            rtcp_path: None,
        })
    }

    /// Takes a new description; `false`: it is of another association.
    fn continues(&mut self, agreed: &Dtls) -> bool {
        let same = self.agreed.fingerprints == agreed.fingerprints && self.agreed.client == agreed.client;
        if same {
            // Credentials change where ICE restarts; the association goes on.
            self.agreed.ice.clone_from(&agreed.ice);
        }
        same
    }

    fn association(&mut self, component: Component) -> Option<&mut Association> {
        match component {
            Component::Rtp => Some(&mut self.rtp),
            Component::Rtcp => self.rtcp.as_mut(),
        }
    }

    fn path(&mut self, component: Component) -> &mut Option<SocketAddr> {
        match component {
            Component::Rtp => &mut self.rtp_path,
            Component::Rtcp => &mut self.rtcp_path,
        }
    }

    pub(super) fn deadline(&self) -> Option<Instant> {
        [self.rtp.deadline(), self.rtcp.as_ref().and_then(Association::deadline)].into_iter().flatten().min()
    }

    /// What RTCP on a port of its own is protected with.
    pub(super) fn rtcp_protection(&mut self) -> Option<&mut Protection> {
        self.rtcp_protection.as_mut()
    }
}

impl SipLeg {
    /// Takes what a new description says of protection.
    pub(super) fn protect_as(&mut self, agreed: &sdp::Agreed) -> io::Result<()> {
        let Some(dtls) = &agreed.dtls else {
            self.secure = None;
            self.protection = super::protection(self.protection.take(), agreed)?;
            return Ok(());
        };
        if !self.secure.as_mut().is_some_and(|secure| secure.continues(dtls)) {
            self.secure = Some(Secure::new(&self.identity, dtls.clone(), agreed.rtcp_mux)?);
            self.protection = None;
        }
        Ok(())
    }

    /// Whether media can flow: where it is to be protected, there are keys.
    pub(super) fn has_keys(&self) -> bool {
        self.secure.is_none() || self.protection.is_some()
    }

    /// Takes what is neither RTP nor RTCP; `false`: it is one of those.
    pub(super) fn on_other(&mut self, component: Component, datagram: &[u8], from: SocketAddr) -> bool {
        if self.secure.is_none() {
            return false;
        }
        match datagram.first() {
            Some(0..=3) => self.on_check(component, datagram, from),
            Some(20..=63) => self.on_handshake(component, datagram, from),
            _ => return false,
        }
        true
    }

    fn on_check(&mut self, component: Component, datagram: &[u8], from: SocketAddr) {
        let Some(secure) = &mut self.secure else { return };
        let ice = secure.agreed.ice.as_ref();
        let check = ice.and_then(|ice| ice::check(secure.identity.crypto(), ice, datagram, from));
        let Some(check) = check else {
            self.counters.stranger.increment(1);
            return;
        };
        if !secure.checked.contains(&from) {
            if secure.checked.len() == MAX_CHECKED {
                secure.checked.pop_front();
            }
            secure.checked.push_back(from);
        }
        // Until one is chosen, the first that works will do.
        let chosen = check.nominates;
        match component {
            Component::Rtp if chosen || self.latch.target().is_none() => self.latch.proven_at(from),
            Component::Rtcp if chosen || self.rtcp_source.is_none() => self.rtcp_source = Some(from),
            Component::Rtp | Component::Rtcp => {}
        }
        self.put(component, &check.answer, from);
        self.shake();
    }

    fn on_handshake(&mut self, component: Component, datagram: &[u8], from: SocketAddr) {
        let Some(secure) = &mut self.secure else { return };
        let admitted = match secure.agreed.ice.is_some() {
            true => secure.checked.contains(&from),
            // As with media, from the host of the signalling or of the description.
            false => *secure.path(component) == Some(from) || self.latch.may_come_from(from.ip()),
        };
        let now = clock::now();
        let outcome = match secure.association(component).filter(|_| admitted) {
            Some(association) => association.take(now, datagram),
            None => {
                self.counters.stranger.increment(1);
                return;
            }
        };
        *secure.path(component) = Some(from);
        match (outcome, component) {
            (Outcome::Pending, _) => {}
            (Outcome::Keys(protection), Component::Rtp) => {
                self.protection = Some(*protection);
                self.heard = now;
                self.latch.proven_at(from);
                self.connect();
            }
            (Outcome::Keys(protection), Component::Rtcp) => {
                secure.rtcp_protection = Some(*protection);
                self.rtcp_source = Some(from);
            }
            (Outcome::Failed(why), _) => {
                tracing::info!(%from, why, "a call's media cannot be protected: it ends");
                // overflow: retained, in effect: were the queue full, a hang-up would already be under way
                self.controls.try_send(Control::HangUp).ok();
                self.close(LegEnd::Failed);
            }
        }
        self.shake();
    }

    /// Sends what handshakes have to send, and begins those that are ours to begin once there is somebody to send to.
    pub(super) fn shake(&mut self) {
        for component in [Component::Rtp, Component::Rtcp] {
            let told = match component {
                Component::Rtp => self.latch.target(),
                Component::Rtcp => self.rtcp_target(),
            };
            let Some(secure) = &mut self.secure else { return };
            // A path that was chosen later is as good for what is left of the handshake.
            let to = if secure.agreed.ice.is_some() { told } else { secure.path(component).or(told) };
            let Some((to, association)) = to.zip(secure.association(component)) else { continue };
            association.begin(clock::now());
            for datagram in association.poll() {
                self.put(component, &datagram, to);
            }
        }
    }

    /// Sends again what is due.
    pub(super) fn reshake(&mut self, now: Instant) {
        let Some(secure) = &mut self.secure else { return };
        for component in [Component::Rtp, Component::Rtcp] {
            if let Some(association) = secure.association(component) {
                association.handle_timeout(now);
            }
        }
        self.shake();
    }

    fn put(&self, component: Component, datagram: &[u8], to: SocketAddr) {
        let Some(Sockets { rtp, rtcp }) = &self.sockets else { return };
        let socket = if component == Component::Rtp { rtp } else { rtcp };
        // overflow: drops: checks and handshakes are repeated
        socket.try_send_to(datagram, to).ok();
    }
}
