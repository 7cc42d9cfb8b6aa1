//! Attributes with a meaning for telephone audio, typed.

use std::{fmt, net::IpAddr, str::FromStr};

/// Audio codecs that are negotiated.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Codec {
    /// G.711 mu-law, static payload type 0.
    Pcmu,
    /// G.711 A-law, static payload type 8.
    Pcma,
    /// G.722, static payload type 9; its RTP clock is 8 kHz (RFC 3551 section 4.5.2).
    G722,
    /// RFC 7587, always dynamic, 48 kHz, two channels in the map whatever is sent.
    Opus,
}

impl Codec {
    /// Every codec there is.
    pub const ALL: [Codec; 4] = [Codec::Pcmu, Codec::Pcma, Codec::G722, Codec::Opus];

    /// Encoding name of the rtpmap.
    pub fn name(self) -> &'static str {
        match self {
            Codec::Pcmu => "PCMU",
            Codec::Pcma => "PCMA",
            Codec::G722 => "G722",
            Codec::Opus => "opus",
        }
    }

    /// RTP clock in Hz.
    pub fn clock_rate(self) -> u32 {
        match self {
            Codec::Opus => 48_000,
            Codec::Pcmu | Codec::Pcma | Codec::G722 => 8_000,
        }
    }

    /// Channels of the rtpmap.
    pub fn channels(self) -> u8 {
        if self == Codec::Opus { 2 } else { 1 }
    }

    /// The payload type that needs no rtpmap (RFC 3551 table 4).
    pub fn static_type(self) -> Option<u8> {
        match self {
            Codec::Pcmu => Some(0),
            Codec::Pcma => Some(8),
            Codec::G722 => Some(9),
            Codec::Opus => None,
        }
    }

    /// Whether it is one of the two of G.711.
    pub fn is_g711(self) -> bool {
        matches!(self, Codec::Pcmu | Codec::Pcma)
    }

    /// What a static payload type stands for.
    pub fn from_static(payload_type: u8) -> Option<Codec> {
        Codec::ALL.into_iter().find(|c| c.static_type() == Some(payload_type))
    }

    /// What a map stands for. Lenient where peers are known to be sloppy: G722 at its audio rate of
    /// 16 kHz, and Opus without its channels.
    pub fn from_map(map: &RtpMap) -> Option<Codec> {
        let codec = Codec::ALL.into_iter().find(|c| c.name().eq_ignore_ascii_case(&map.encoding))?;
        let rate = map.clock_rate == codec.clock_rate() || (codec == Codec::G722 && map.clock_rate == 16_000);
        let channels = codec == Codec::Opus || map.channels == 1;
        (rate && channels).then_some(codec)
    }
}

/// Which way media flows, from the point of view of its writer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Direction {
    /// Both ways.
    #[default]
    SendRecv,
    /// The writer only sends: the classic hold with music.
    SendOnly,
    /// The writer only listens.
    RecvOnly,
    /// Neither.
    Inactive,
}

impl Direction {
    /// From whether the writer sends and receives.
    pub fn new(sends: bool, receives: bool) -> Direction {
        match (sends, receives) {
            (true, true) => Direction::SendRecv,
            (true, false) => Direction::SendOnly,
            (false, true) => Direction::RecvOnly,
            (false, false) => Direction::Inactive,
        }
    }

    /// Whether the writer sends.
    pub fn sends(self) -> bool {
        matches!(self, Direction::SendRecv | Direction::SendOnly)
    }

    /// Whether the writer receives.
    pub fn receives(self) -> bool {
        matches!(self, Direction::SendRecv | Direction::RecvOnly)
    }

    /// The same flow seen from the other side.
    pub fn reversed(self) -> Direction {
        Direction::new(self.receives(), self.sends())
    }

    /// What remains when both agree to `self` and to `other`.
    pub fn and(self, other: Direction) -> Direction {
        Direction::new(self.sends() && other.sends(), self.receives() && other.receives())
    }

    /// Attribute name.
    pub fn name(self) -> &'static str {
        match self {
            Direction::SendRecv => "sendrecv",
            Direction::SendOnly => "sendonly",
            Direction::RecvOnly => "recvonly",
            Direction::Inactive => "inactive",
        }
    }

    /// From the attribute name.
    pub fn from_name(name: &str) -> Option<Direction> {
        [Direction::SendRecv, Direction::SendOnly, Direction::RecvOnly, Direction::Inactive]
            .into_iter()
            .find(|d| d.name() == name)
    }
}

/// `a=rtpmap:<type> <encoding>/<rate>[/<channels>]`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RtpMap {
    /// 0 to 127.
    pub payload_type: u8,
    /// Encoding name as written; compare without case.
    pub encoding: String,
    /// RTP clock in Hz.
    pub clock_rate: u32,
    /// Channels; 1 where not written.
    pub channels: u8,
}

impl FromStr for RtpMap {
    type Err = &'static str;

    fn from_str(value: &str) -> Result<Self, Self::Err> {
        let (payload_type, rest) = payload_type_and_rest(value)?;
        let mut fields = rest.split('/');
        let encoding = fields.next().unwrap_or_default().trim();
        if encoding.is_empty() {
            return Err("rtpmap without an encoding name");
        }
        let clock_rate = fields
            .next()
            .and_then(|rate| rate.trim().parse().ok())
            .filter(|rate| (1..=1_000_000).contains(rate))
            .ok_or("rtpmap without a usable clock rate")?;
        let channels = match fields.next() {
            None => 1,
            Some(text) => text.trim().parse().map_err(|_| "rtpmap with channels that are no number")?,
        };
        Ok(RtpMap { payload_type, encoding: encoding.to_owned(), clock_rate, channels })
    }
}

impl fmt::Display for RtpMap {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}/{}", self.payload_type, self.encoding, self.clock_rate)?;
        if self.channels > 1 {
            write!(f, "/{}", self.channels)?;
        }
        Ok(())
    }
}

/// `a=fmtp:<type> <parameters>`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fmtp {
    /// 0 to 127.
    pub payload_type: u8,
    /// The parameters as written.
    pub parameters: String,
}

impl Fmtp {
    /// The value of `name`, compared without case.
    pub fn get(&self, name: &str) -> Option<&str> {
        self.parameters.split(';').find_map(|part| {
            let (key, value) = part.split_once('=')?;
            key.trim().eq_ignore_ascii_case(name).then_some(value.trim())
        })
    }
}

impl FromStr for Fmtp {
    type Err = &'static str;

    fn from_str(value: &str) -> Result<Self, Self::Err> {
        let (payload_type, parameters) = payload_type_and_rest(value)?;
        Ok(Fmtp { payload_type, parameters: parameters.to_owned() })
    }
}

impl fmt::Display for Fmtp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.payload_type, self.parameters)
    }
}

fn payload_type_and_rest(value: &str) -> Result<(u8, &str), &'static str> {
    let (number, rest) = value.trim().split_once([' ', '\t']).ok_or("payload type without anything after it")?;
    let payload_type = number.parse().ok().filter(|n| *n <= 127).ok_or("payload type that is not 0 to 127")?;
    Ok((payload_type, rest.trim()))
}

/// `a=rtcp:<port> [IN IP4 <address>]` (RFC 3605).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RtcpPort {
    /// Where RTCP goes.
    pub port: u16,
    /// Where it differs from that of the media.
    pub address: Option<IpAddr>,
}

impl FromStr for RtcpPort {
    type Err = &'static str;

    fn from_str(value: &str) -> Result<Self, Self::Err> {
        let mut fields = value.split_whitespace();
        let port = fields.next().and_then(|p| p.parse().ok()).ok_or("rtcp without a port")?;
        let address = fields.nth(2).and_then(|a| a.parse().ok());
        Ok(RtcpPort { port, address })
    }
}

/// SRTP protection of RFC 4568 and RFC 7714.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Suite {
    /// `AES_CM_128_HMAC_SHA1_80`.
    AesCm128Sha1_80,
    /// `AES_CM_128_HMAC_SHA1_32`.
    AesCm128Sha1_32,
    /// `AEAD_AES_256_GCM`.
    AeadAes256Gcm,
    /// `AEAD_AES_128_GCM`.
    AeadAes128Gcm,
}

impl Suite {
    /// Every suite, in the order in which it is offered: what all peers know comes first, since some read one line only.
    pub const ALL: [Suite; 4] =
        [Suite::AesCm128Sha1_80, Suite::AesCm128Sha1_32, Suite::AeadAes256Gcm, Suite::AeadAes128Gcm];

    /// Name on the wire.
    pub fn name(self) -> &'static str {
        match self {
            Suite::AesCm128Sha1_80 => "AES_CM_128_HMAC_SHA1_80",
            Suite::AesCm128Sha1_32 => "AES_CM_128_HMAC_SHA1_32",
            Suite::AeadAes256Gcm => "AEAD_AES_256_GCM",
            Suite::AeadAes128Gcm => "AEAD_AES_128_GCM",
        }
    }

    /// From the name on the wire.
    pub fn from_name(name: &str) -> Option<Suite> {
        Suite::ALL.into_iter().find(|s| s.name().eq_ignore_ascii_case(name))
    }

    /// Bytes of the master key.
    pub fn key_length(self) -> usize {
        match self {
            Suite::AeadAes256Gcm => 32,
            Suite::AesCm128Sha1_80 | Suite::AesCm128Sha1_32 | Suite::AeadAes128Gcm => 16,
        }
    }

    /// Bytes of the master salt.
    pub fn salt_length(self) -> usize {
        match self {
            Suite::AesCm128Sha1_80 | Suite::AesCm128Sha1_32 => 14,
            Suite::AeadAes256Gcm | Suite::AeadAes128Gcm => 12,
        }
    }
}

/// SRTP master key and behind it the salt, as many bytes of it as a suite uses. Not shown by `Debug`.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Key(pub [u8; Key::LENGTH]);

impl Key {
    /// What the longest suite uses.
    pub const LENGTH: usize = 44;

    /// The master key.
    pub fn master(&self, suite: Suite) -> &[u8] {
        &self.0[..suite.key_length()]
    }

    /// The master salt.
    pub fn salt(&self, suite: Suite) -> &[u8] {
        &self.whole(suite)[suite.key_length()..]
    }

    fn whole(&self, suite: Suite) -> &[u8] {
        &self.0[..suite.key_length() + suite.salt_length()]
    }
}

impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Key(..)")
    }
}

/// `a=crypto:<tag> <suite> inline:<key>[|lifetime][|MKI:length]` with a suite we have and one key.
#[derive(Clone, Debug)]
pub struct Crypto {
    /// Number that an answer refers to.
    pub tag: u32,
    /// Protection.
    pub suite: Suite,
    /// Master key and salt.
    pub key: Key,
}

/// Equal where both print the same: of the key only the bytes count that the suite uses.
impl PartialEq for Crypto {
    fn eq(&self, other: &Crypto) -> bool {
        (self.tag, self.suite) == (other.tag, other.suite) && self.key.whole(self.suite) == other.key.whole(other.suite)
    }
}

impl Eq for Crypto {}

impl Crypto {
    /// Reads a value. `None`: a suite, a parameter or a key form that we do not support, which only means
    /// that this line is not chosen.
    pub(crate) fn from_value(value: &str) -> Option<Crypto> {
        let mut fields = value.split_whitespace();
        let tag = fields.next()?.parse().ok()?;
        let suite = Suite::from_name(fields.next()?)?;
        let keys = fields.next()?.strip_prefix("inline:")?;
        // A second key, an MKI, or a session parameter such as UNENCRYPTED_SRTP changes what is on the
        // wire: such a line is passed over rather than half understood.
        if keys.contains(';') || fields.next().is_some() {
            return None;
        }
        let mut parts = keys.split('|');
        let bytes = decode_base64(parts.next()?)?;
        if parts.any(|part| part.contains(':')) {
            return None;
        }
        let mut key = Key([0; Key::LENGTH]);
        let length = suite.key_length() + suite.salt_length();
        key.0.get_mut(..length)?.copy_from_slice(Some(bytes).filter(|bytes| bytes.len() == length)?.as_slice());
        Some(Crypto { tag, suite, key })
    }
}

impl fmt::Display for Crypto {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {} inline:{}", self.tag, self.suite.name(), encode_base64(self.key.whole(self.suite)))
    }
}

const BASE64: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";

fn encode_base64(bytes: &[u8]) -> String {
    let mut text = String::with_capacity(bytes.len().div_ceil(3) * 4);
    for chunk in bytes.chunks(3) {
        let group = chunk.iter().chain(&[0, 0]).take(3).fold(0_u32, |group, byte| group << 8 | u32::from(*byte));
        // A byte more makes a digit more; the rest is padding.
        for (n, shift) in [18, 12, 6, 0].into_iter().enumerate() {
            text.push(if n <= chunk.len() { char::from(BASE64[(group >> shift & 63) as usize]) } else { '=' });
        }
    }
    text
}

/// With or without padding: not all peers write it.
fn decode_base64(text: &str) -> Option<Vec<u8>> {
    let digits = text.trim_end_matches('=').as_bytes();
    if digits.len() % 4 == 1 || text.len() > 2 * Key::LENGTH {
        return None;
    }
    let mut out = Vec::with_capacity(Key::LENGTH);
    for group in digits.chunks(4) {
        let mut value = 0_u32;
        for digit in group {
            value = value << 6 | u32::try_from(BASE64.iter().position(|b| b == digit)?).ok()?;
        }
        value <<= 6 * (4 - group.len());
        out.extend_from_slice(&value.to_be_bytes()[1..group.len()]);
    }
    Some(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rtpmap_reads_and_prints() {
        let map: RtpMap = "111 opus/48000/2".parse().expect("valid");
        assert_eq!(map.to_string(), "111 opus/48000/2");
        assert_eq!(Codec::from_map(&map), Some(Codec::Opus));
        assert_eq!(Codec::from_map(&"9 G722/16000".parse().expect("valid")), Some(Codec::G722));
        assert_eq!(Codec::from_map(&"0 PCMU/16000".parse().expect("valid")), None);
        for bad in ["", "96", "200 a/8000", "96 /8000", "96 x", "96 x/0", "x y/8000", "96 x/8000/many"] {
            assert!(bad.parse::<RtpMap>().is_err(), "{bad}");
        }
    }

    #[test]
    fn key_of_the_rfc_survives() {
        // The inline key of the example in RFC 4568 section 4.1.
        let text = "1 AES_CM_128_HMAC_SHA1_80 inline:NzB4d1BINUAvLEw6UzF3WSJ+PSdFcGdUJShpX1Zj";
        let crypto = Crypto::from_value(&format!("{text}|2^20")).expect("lifetime is allowed");
        assert_eq!(crypto.to_string(), text);
        assert_eq!(crypto.key.0[0], b'7');
        assert!(Crypto::from_value(&format!("{text}|2^20|1:4")).is_none(), "an MKI is not supported");
        assert!(Crypto::from_value(&format!("{text} UNENCRYPTED_SRTP")).is_none());
        assert!(Crypto::from_value("1 AES_CM_128_HMAC_SHA1_80 inline:short").is_none());
        assert!(
            Crypto::from_value(&text.replace("CM_128_HMAC_SHA1_80", "128_GCM").replace("AES_1", "AEAD_AES_1"))
                .is_none()
        );
    }

    #[test]
    fn keys_of_every_suite_survive_with_and_without_padding() {
        let key = Key(std::array::from_fn(|n| n as u8 * 5));
        for suite in Suite::ALL {
            let crypto = Crypto { tag: 7, suite, key };
            let text = crypto.to_string();
            let read = Crypto::from_value(&text).expect("as written");
            assert_eq!(read, crypto, "{text}");
            assert_ne!(read, Crypto { key: Key([9; Key::LENGTH]), ..crypto }, "{text}");
            assert_eq!(Crypto::from_value(text.trim_end_matches('=')), Some(read.clone()), "{text}");
            assert_eq!(read.key.master(suite).len() + read.key.salt(suite).len(), key.whole(suite).len());
        }
    }

    #[test]
    fn directions_reverse_and_meet() {
        assert_eq!(Direction::SendOnly.reversed(), Direction::RecvOnly);
        assert_eq!(Direction::SendRecv.and(Direction::RecvOnly), Direction::RecvOnly);
        assert_eq!(Direction::SendOnly.and(Direction::RecvOnly), Direction::Inactive);
    }
}
