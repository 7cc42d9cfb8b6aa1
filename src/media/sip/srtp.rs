//! SRTP and SRTCP (RFC 3711, RFC 7714) with keys from descriptions (RFC 4568) or of a handshake.

use bytes::BytesMut;
use rtc_srtp::{
    context::Context,
    crypto::default_provider,
    option::{srtcp_replay_protection, srtp_replay_protection},
    protection_profile::ProtectionProfile,
};
use sdp::{SrtpKeys, Suite};

/// Packets behind the newest that may still arrive.
const REPLAY_WINDOW: usize = 128;

/// Both directions of one stream.
pub(crate) struct Protection {
    /// Where they were in the descriptions.
    keys: Option<SrtpKeys>,
    outgoing: Context,
    incoming: Context,
}

/// A packet that could not be protected or did not prove who sent it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Rejected;

/// Master key and salt of one direction.
pub(super) type Master<'a> = (&'a [u8], &'a [u8]);

impl Protection {
    /// Derives the session keys of keys from the descriptions.
    pub(crate) fn new(keys: SrtpKeys) -> Result<Protection, Rejected> {
        let SrtpKeys { suite, local, remote } = &keys;
        let profile = match suite {
            Suite::AesCm128Sha1_80 => ProtectionProfile::Aes128CmHmacSha1_80,
            Suite::AesCm128Sha1_32 => ProtectionProfile::Aes128CmHmacSha1_32,
            Suite::AeadAes256Gcm => ProtectionProfile::AeadAes256Gcm,
            Suite::AeadAes128Gcm => ProtectionProfile::AeadAes128Gcm,
        };
        let [local, remote] = [local, remote].map(|key| (key.master(*suite), key.salt(*suite)));
        Ok(Protection { keys: Some(keys), ..Protection::of(profile, local, remote)? })
    }

    /// Derives the session keys; `local` protects what we send.
    pub(super) fn of(
        profile: ProtectionProfile,
        local: Master<'_>,
        remote: Master<'_>,
    ) -> Result<Protection, Rejected> {
        let (outgoing, incoming) = (context(profile, local, false)?, context(profile, remote, true)?);
        Ok(Protection { keys: None, outgoing, incoming })
    }

    /// Whether it already uses `keys`: then it must be kept, for its counters.
    pub(super) fn uses(&self, keys: &SrtpKeys) -> bool {
        self.keys.as_ref() == Some(keys)
    }

    pub(crate) fn protect_rtp(&mut self, packet: &[u8]) -> Result<BytesMut, Rejected> {
        self.outgoing.encrypt_rtp(packet).map_err(|_| Rejected)
    }

    pub(super) fn protect_rtcp(&mut self, packet: &[u8]) -> Result<BytesMut, Rejected> {
        self.outgoing.encrypt_rtcp(packet).map_err(|_| Rejected)
    }

    pub(crate) fn open_rtp(&mut self, packet: &[u8]) -> Result<BytesMut, Rejected> {
        self.incoming.decrypt_rtp(packet).map_err(|_| Rejected)
    }

    pub(super) fn open_rtcp(&mut self, packet: &[u8]) -> Result<BytesMut, Rejected> {
        self.incoming.decrypt_rtcp(packet).map_err(|_| Rejected)
    }
}

fn context(profile: ProtectionProfile, (key, salt): Master<'_>, receiving: bool) -> Result<Context, Rejected> {
    let provider = default_provider().map_err(|_| Rejected)?;
    let replay = receiving.then(|| srtp_replay_protection(REPLAY_WINDOW));
    let control_replay = receiving.then(|| srtcp_replay_protection(REPLAY_WINDOW));
    Context::new(key, salt, profile, replay, control_replay, provider.crypto()).map_err(|_| Rejected)
}

#[cfg(test)]
mod tests {
    use super::*;
    use sdp::Key;

    #[test]
    fn every_suite_goes_there_and_back_and_refuses_replays() {
        for suite in Suite::ALL {
            let (a, b) = (Key([1; Key::LENGTH]), Key([2; Key::LENGTH]));
            let mut here = Protection::new(SrtpKeys { suite, local: a, remote: b }).expect("keys fit");
            let mut there = Protection::new(SrtpKeys { suite, local: b, remote: a }).expect("keys fit");
            for sequence in [65_534_u16, 65_535, 0, 1] {
                let mut packet = vec![0x80, 0];
                packet.extend(sequence.to_be_bytes());
                packet.extend([0, 0, 0, 1, 0, 0, 0, 9, 1, 2, 3, 4]);
                let sealed = here.protect_rtp(&packet).expect("protects");
                assert_ne!(&sealed[12..16], &packet[12..16]);
                assert_eq!(&there.open_rtp(&sealed).expect("opens")[..], &packet[..], "over the wrap too");
                assert!(there.open_rtp(&sealed).is_err(), "a replay");
                let mut forged = sealed.to_vec();
                forged[13] ^= 1;
                assert!(there.open_rtp(&forged).is_err());
            }
            let report = [0x80, 201, 0, 1, 0, 0, 0, 9];
            let sealed = here.protect_rtcp(&report).expect("protects");
            assert_eq!(&there.open_rtcp(&sealed).expect("opens")[..], &report[..]);
            for length in 0..sealed.len() {
                assert!(there.open_rtcp(&sealed[..length]).is_err());
                assert!(there.open_rtp(&sealed[..length]).is_err());
            }
        }
    }
}
