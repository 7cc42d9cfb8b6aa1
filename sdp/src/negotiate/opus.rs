//! What a peer asks of who sends it Opus.

use crate::attr::Fmtp;

/// Parameters of RFC 7587 section 6.1 that concern a sender.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct OpusParams {
    /// The peer can use in-band FEC.
    pub fec: bool,
    /// The peer likes DTX.
    pub dtx: bool,
    /// Upper limit in bit/s.
    pub max_average_bitrate: Option<u32>,
    /// Highest rate in Hz that is of use.
    pub max_playback_rate: Option<u32>,
}

impl OpusParams {
    pub(super) fn read(fmtp: Option<&Fmtp>) -> OpusParams {
        let Some(fmtp) = fmtp else { return OpusParams::default() };
        let number = |name| fmtp.get(name).and_then(|v| v.parse().ok());
        OpusParams {
            fec: fmtp.get("useinbandfec") == Some("1"),
            dtx: fmtp.get("usedtx") == Some("1"),
            max_average_bitrate: number("maxaveragebitrate"),
            max_playback_rate: number("maxplaybackrate"),
        }
    }
}
