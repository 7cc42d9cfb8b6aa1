//! The handshake that keys SRTP (RFC 5763, RFC 5764), for one component of one call.
//!
//! A state machine over `now`: datagrams in, datagrams and keys out. Owns no socket. The peer is who has the certificate
//! whose fingerprint the signalling brought; nothing else of the certificate counts.

use std::{
    collections::VecDeque,
    net::{Ipv4Addr, SocketAddr},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Instant,
};

use bytes::{Bytes, BytesMut};
use dtls_repeats::Repeats;
use ring::digest;
use rtc::{
    crypto::{RTCCryptoProvider, SignatureScheme, default_provider},
    dtls::{
        config::{ClientAuthType, ConfigBuilder, HandshakeConfig},
        crypto::Certificate,
        endpoint::{Endpoint, EndpointEvent},
        extension::extension_use_srtp::SrtpProtectionProfile as Profile,
    },
    peer_connection::certificate::{CertificateParams, RTCCertificate},
    shared::{TransportProtocol, error::Error},
};
use rtc_srtp::{
    config::{Config, LABEL_EXTRACTOR_DTLS_SRTP},
    protection_profile::ProtectionProfile,
};
use sdp::{Dtls, Fingerprint};

use super::srtp::Protection;

/// The stack tells associations apart by address; this one is a call's, wherever its peer is.
const PEER: SocketAddr = SocketAddr::new(std::net::IpAddr::V4(Ipv4Addr::LOCALHOST), 1);
/// What may be agreed on, our favourite first.
const PROFILES: [Profile; 4] = [
    Profile::Srtp_Aead_Aes_128_Gcm,
    Profile::Srtp_Aead_Aes_256_Gcm,
    Profile::Srtp_Aes128_Cm_Hmac_Sha1_80,
    Profile::Srtp_Aes128_Cm_Hmac_Sha1_32,
];

/// The certificate that all calls of an endpoint show. Clones mean the same.
#[derive(Clone)]
pub(crate) struct Identity(Arc<Own>);

struct Own {
    certificate: Certificate,
    fingerprint: Fingerprint,
    crypto: Arc<dyn RTCCryptoProvider>,
}

impl std::fmt::Debug for Identity {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Identity({})", self.0.fingerprint)
    }
}

impl Identity {
    /// A fresh one.
    ///
    /// # Errors
    /// There is no randomness, or no provider of cryptography.
    pub(crate) fn new() -> Result<Identity, String> {
        let crypto = default_provider().map_err(|error| error.to_string())?;
        let names = CertificateParams::new(vec!["antiphon".to_owned()]).map_err(|error| error.to_string())?;
        let made = RTCCertificate::generate(crypto.crypto(), SignatureScheme::EcdsaP256Sha256, names);
        let certificate = made.map_err(|error| error.to_string())?.dtls_certificate;
        let first = certificate.certificate.first().ok_or("an empty chain")?;
        let digest = digest::digest(&digest::SHA256, first).as_ref().to_vec();
        let fingerprint = Fingerprint { algorithm: "sha-256".to_owned(), digest };
        Ok(Identity(Arc::new(Own { certificate, fingerprint, crypto })))
    }

    /// What descriptions say of it.
    pub(crate) fn fingerprint(&self) -> Fingerprint {
        self.0.fingerprint.clone()
    }

    /// What it is computed with.
    pub(super) fn crypto(&self) -> &dyn RTCCryptoProvider {
        &*self.0.crypto
    }
}

/// Whether a certificate is one of those that were announced. SHA-1 is what old telephones announce; that somebody makes a
/// second certificate of the same hash is no threat of today, unlike a pair of them.
fn is_announced(certificate: &[u8], announced: &[Fingerprint]) -> bool {
    announced.iter().any(|one| {
        let algorithm = match one.algorithm.as_str() {
            "sha-256" => &digest::SHA256,
            "sha-384" => &digest::SHA384,
            "sha-512" => &digest::SHA512,
            "sha-1" => &digest::SHA1_FOR_LEGACY_USE_ONLY,
            _ => return false,
        };
        digest::digest(algorithm, certificate).as_ref() == one.digest
    })
}

/// What came of a datagram.
pub(super) enum Outcome {
    /// Nothing yet, or nothing new.
    Pending,
    /// The handshake is over.
    Keys(Box<Protection>),
    /// It cannot succeed any more, for this reason.
    Failed(String),
}

/// The handshake of one component.
pub(super) struct Association {
    endpoint: Endpoint,
    /// Where it is ours to begin, until it has begun.
    client: Option<Arc<HandshakeConfig>>,
    is_client: bool,
    repeats: Repeats,
    /// The peer has shown another certificate than was announced.
    foreign: Arc<AtomicBool>,
    keyed: bool,
}

impl Association {
    /// Waits for its peer, or for [`Association::begin`].
    ///
    /// # Errors
    /// The stack does not have what it takes.
    pub(super) fn new(identity: &Identity, agreed: &Dtls) -> Result<Association, String> {
        let foreign = Arc::new(AtomicBool::new(false));
        let (announced, seen) = (agreed.fingerprints.clone(), foreign.clone());
        let own = &identity.0;
        let config = ConfigBuilder::default()
            .with_crypto_provider(own.crypto.clone())
            .with_certificates(vec![own.certificate.clone()])
            .with_srtp_protection_profiles(PROFILES.to_vec())
            .with_client_auth(ClientAuthType::RequireAnyClientCert)
            // No authority signs these; the fingerprint is what is checked.
            .with_insecure_skip_verify(true)
            .with_verify_peer_certificate(Some(Arc::new(move |chain, _| match chain.first() {
                Some(first) if is_announced(first, &announced) => Ok(()),
                _ => {
                    seen.store(true, Ordering::Relaxed);
                    Err(Error::ErrNoMatchingCertificateFingerprint)
                }
            })))
            .build(agreed.client, None)
            .map_err(|error| error.to_string())?;
        let config = Arc::new(config);
        let (client, server) = if agreed.client { (Some(config), None) } else { (None, Some(config)) };
        Ok(Association {
            endpoint: Endpoint::new(PEER, TransportProtocol::UDP, server),
            client,
            is_client: agreed.client,
            repeats: Repeats::default(),
            foreign,
            keyed: false,
        })
    }

    /// Sends the first message, where that is ours to send and has not been sent.
    pub(super) fn begin(&mut self, now: Instant) {
        if let Some(config) = self.client.take()
            && let Err(error) = self.endpoint.connect(now, PEER, config, None)
        {
            tracing::debug!(%error, "a DTLS handshake could not begin");
        }
    }

    /// Takes a datagram of the peer.
    pub(super) fn take(&mut self, now: Instant, datagram: &[u8]) -> Outcome {
        if (self.is_client && self.client.is_some()) || self.repeats.is_repeat(datagram) {
            return Outcome::Pending;
        }
        let events = match self.endpoint.read(now, PEER, None, BytesMut::from(datagram)) {
            Ok(events) => events,
            Err(_) if self.foreign.load(Ordering::Relaxed) => {
                return Outcome::Failed("its certificate has not the fingerprint of its description".to_owned());
            }
            Err(error) => {
                tracing::debug!(%error, "a DTLS datagram was not understood");
                return Outcome::Pending;
            }
        };
        let complete = events.iter().any(|event| matches!(event, EndpointEvent::HandshakeComplete));
        if !complete || self.keyed {
            // The end of the association is no end of the call: signalling says that.
            return Outcome::Pending;
        }
        match self.keys() {
            Ok(protection) => {
                self.keyed = true;
                Outcome::Keys(Box::new(protection))
            }
            Err(why) => Outcome::Failed(why),
        }
    }

    /// RFC 5764 section 4.2.
    fn keys(&self) -> Result<Protection, String> {
        let state = self.endpoint.get_connection_state(PEER).ok_or("no association")?;
        let profile = match state.srtp_protection_profile() {
            Profile::Srtp_Aead_Aes_128_Gcm => ProtectionProfile::AeadAes128Gcm,
            Profile::Srtp_Aead_Aes_256_Gcm => ProtectionProfile::AeadAes256Gcm,
            Profile::Srtp_Aes128_Cm_Hmac_Sha1_80 => ProtectionProfile::Aes128CmHmacSha1_80,
            Profile::Srtp_Aes128_Cm_Hmac_Sha1_32 => ProtectionProfile::Aes128CmHmacSha1_32,
            _ => return Err("no protection of SRTP was agreed on".to_owned()),
        };
        let mut config = Config { profile, ..Config::default() };
        let exported = state.export_keying_material(LABEL_EXTRACTOR_DTLS_SRTP, &[], config.keying_material_len());
        let exported = exported.map_err(|error| error.to_string())?;
        let split = config.set_session_keys_from_keying_material(exported.as_ref(), self.is_client);
        split.map_err(|error| error.to_string())?;
        let keys = &config.keys;
        let local = (&keys.local_master_key[..], &keys.local_master_salt[..]);
        let remote = (&keys.remote_master_key[..], &keys.remote_master_salt[..]);
        Protection::of(profile, local, remote).map_err(|_| "SRTP is not available".to_owned())
    }

    /// When [`Association::handle_timeout`] is due.
    pub(super) fn deadline(&self) -> Option<Instant> {
        self.endpoint.poll_timeout(&PEER)
    }

    /// Sends again what is not answered.
    pub(super) fn handle_timeout(&mut self, now: Instant) {
        if self.deadline().is_some_and(|at| at <= now)
            && let Err(error) = self.endpoint.handle_timeout(PEER, now)
        {
            tracing::debug!(%error, "a DTLS handshake is not answered");
        }
    }

    /// What is to be sent now.
    pub(super) fn poll(&mut self) -> VecDeque<Bytes> {
        let mut out = VecDeque::new();
        while let Some(transmit) = self.endpoint.poll_transmit() {
            let datagram = transmit.message.freeze();
            self.repeats.sent(&datagram);
            out.push_back(datagram);
        }
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::clock;

    fn agreed(client: bool, peer: &Identity) -> Dtls {
        Dtls { fingerprints: vec![peer.fingerprint()], client, ice: None }
    }

    /// Carries datagrams to and fro until both are quiet; the keys of both, or why one failed. Loses the `n`th datagram.
    fn shake(client: &mut Association, server: &mut Association, lost: usize) -> (Option<Protection>, Vec<String>) {
        let (mut now, mut sent) = (clock::now(), 0);
        let (mut keys, mut failed) = ([None, None], Vec::new());
        client.begin(now);
        for _ in 0..200 {
            let mut quiet = true;
            for from in [0, 1] {
                let ends = [&mut *client, &mut *server];
                let out = {
                    let [a, b] = ends;
                    if from == 0 { a.poll() } else { b.poll() }
                };
                for datagram in out {
                    quiet = false;
                    sent += 1;
                    if sent == lost {
                        continue;
                    }
                    let to = if from == 0 { &mut *server } else { &mut *client };
                    match to.take(now, &datagram) {
                        Outcome::Pending => {}
                        Outcome::Keys(protection) => keys[1 - from] = Some(*protection),
                        Outcome::Failed(why) => failed.push(why),
                    }
                }
            }
            if quiet {
                let next = [client.deadline(), server.deadline()].into_iter().flatten().min();
                let Some(at) = next.filter(|_| keys.iter().any(Option::is_none) && failed.is_empty()) else { break };
                now = at;
                client.handle_timeout(now);
                server.handle_timeout(now);
            }
        }
        let [a, b] = keys;
        let (Some(mut a), Some(mut b)) = (a, b) else { return (None, failed) };
        let packet = [0x80, 0, 0, 1, 0, 0, 0, 1, 0, 0, 0, 9, 1, 2, 3, 4];
        let sealed = a.protect_rtp(&packet).expect("protects");
        assert_eq!(&b.open_rtp(&sealed).expect("opens")[..], packet);
        let sealed = b.protect_rtp(&packet).expect("protects");
        assert_eq!(&a.open_rtp(&sealed).expect("opens")[..], packet);
        (Some(a), failed)
    }

    #[test]
    fn two_sides_have_keys_that_fit_whatever_datagram_is_lost() {
        let (here, there) = (Identity::new().expect("made"), Identity::new().expect("made"));
        for lost in 0..12 {
            let mut client = Association::new(&here, &agreed(true, &there)).expect("made");
            let mut server = Association::new(&there, &agreed(false, &here)).expect("made");
            assert!(shake(&mut client, &mut server, lost).0.is_some(), "{lost}");
        }
    }

    #[test]
    fn a_certificate_that_was_not_announced_ends_it() {
        let (here, there, other) = (Identity::new(), Identity::new(), Identity::new());
        let (here, there, other) = (here.expect("made"), there.expect("made"), other.expect("made"));
        for (expected_here, expected_there) in [(&other, &here), (&there, &other)] {
            let mut client = Association::new(&here, &agreed(true, expected_here)).expect("made");
            let mut server = Association::new(&there, &agreed(false, expected_there)).expect("made");
            let (keys, failed) = shake(&mut client, &mut server, 0);
            assert!(keys.is_none() && failed.iter().any(|why| why.contains("fingerprint")), "{failed:?}");
        }
        let unknown = Fingerprint { algorithm: "md2".to_owned(), digest: vec![1] };
        assert!(!is_announced(b"x", &[unknown]));
        let known = digest::digest(&digest::SHA1_FOR_LEGACY_USE_ONLY, b"x").as_ref().to_vec();
        assert!(is_announced(b"x", &[Fingerprint { algorithm: "sha-1".to_owned(), digest: known }]));
    }

    #[test]
    fn bytes_of_a_stranger_change_nothing() {
        let (here, there) = (Identity::new().expect("made"), Identity::new().expect("made"));
        let mut server = Association::new(&there, &agreed(false, &here)).expect("made");
        for junk in [&[][..], &[22], &[22, 254, 253, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 7], &[20; 200], &[23; 64]] {
            assert!(matches!(server.take(clock::now(), junk), Outcome::Pending));
        }
        server.poll();
        let mut client = Association::new(&here, &agreed(true, &there)).expect("made");
        assert!(shake(&mut client, &mut server, 0).0.is_some(), "it still answers the peer");
    }
}
