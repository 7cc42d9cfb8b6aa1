//! The keys of a call, and what its descriptions say of DTLS and ICE.

use super::Negotiator;
use crate::{
    attr::{Key, Suite},
    dtls::{self, Dtls, Ice, Setup, Theirs, attribute},
    session::{Attribute, Media},
};

impl Negotiator {
    /// Our key for `suite`: each has one of its own.
    pub(super) fn key(&self, suite: Suite) -> Key {
        let [first, second, third, fourth] = self.local.keys;
        match suite {
            Suite::AesCm128Sha1_80 => first,
            Suite::AesCm128Sha1_32 => second,
            Suite::AeadAes256Gcm => third,
            Suite::AeadAes128Gcm => fourth,
        }
    }

    /// Whether the peer has new ICE credentials.
    pub(super) fn restarts_ice(&self, theirs: &Theirs) -> bool {
        let before = self.agreed.as_ref().and_then(|agreed| agreed.dtls.as_ref()?.ice.as_ref());
        before.is_some_and(|ice| theirs.fragment.as_ref().is_some_and(|fragment| *fragment != ice.remote_fragment))
    }

    /// What comes of the peer's side and ours.
    pub(super) fn dtls(&self, theirs: Theirs, restarts: u32) -> Dtls {
        let Theirs { fingerprints, setup, fragment } = theirs;
        let before = self.agreed.as_ref().and_then(|agreed| agreed.dtls.as_ref());
        let kept = before.filter(|dtls| dtls.fingerprints == fingerprints);
        Dtls {
            // An association that goes on keeps its roles (RFC 8842 section 5.3). Where we may choose we let the peer begin:
            // what it sends shows where it is.
            client: kept.map_or(setup == Setup::Passive, |dtls| dtls.client),
            ice: fragment.zip(self.local.dtls.as_ref()).map(|(remote_fragment, own)| {
                let again = if restarts == 0 { String::new() } else { format!("{restarts:x}") };
                let (fragment, password) = (format!("{}{again}", own.fragment), format!("{}{again}", own.password));
                Ice { fragment, password, remote_fragment }
            }),
            fingerprints,
        }
    }

    /// Adds what DTLS and ICE need.
    pub(super) fn secured(&self, audio: &mut Media, ice: Option<&Ice>, setup: &str) {
        let Some(own) = &self.local.dtls else { return };
        if let Some((mid, _)) = &self.mid {
            audio.attributes.push(attribute("mid", mid));
        }
        audio.attributes.push(attribute("fingerprint", &own.fingerprint));
        audio.attributes.push(attribute("setup", setup));
        let Some(ice) = ice else { return };
        audio.attributes.push(attribute("ice-ufrag", &ice.fragment));
        audio.attributes.push(attribute("ice-pwd", &ice.password));
        // Pages that look for a stream by name find one.
        audio.attributes.push(attribute("msid", "antiphon speech"));
        let components = if audio.rtcp_mux { 1 } else { 2 };
        for component in 1..=components {
            let (address, port) = (self.local.address, self.local.port + component - 1);
            // RFC 8445 section 5.1.2.1, of a host.
            let priority = (126_u32 << 24) + (65_535 << 8) + 256 - u32::from(component);
            audio.candidates.push(format!("1 {component} udp {priority} {address} {port} typ host"));
        }
        audio.attributes.push(dtls::flag("end-of-candidates"));
    }

    /// That we are a lite agent, and which line has the transport, where it could have been shared.
    pub(super) fn session_attributes(&self, media: &[Media]) -> Vec<Attribute> {
        let mut attributes = Vec::new();
        let ice = media.iter().any(|line| line.attributes.iter().any(|a| a.name == "ice-ufrag"));
        if ice {
            attributes.push(dtls::flag("ice-lite"));
        }
        if let Some((mid, true)) = &self.mid {
            attributes.push(attribute("group", format_args!("BUNDLE {mid}")));
        }
        attributes
    }
}
