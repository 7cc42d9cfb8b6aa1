//! A description with its parts typed.

use std::net::IpAddr;

use crate::attr::{Codec, Crypto, Direction, Fmtp, RtcpPort, RtpMap};

/// A whole session description.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Description {
    /// `o=`.
    pub origin: Origin,
    /// `s=`.
    pub name: String,
    /// Address of `c=` at session level, as written without a multicast suffix.
    pub connection: Option<String>,
    /// Direction at session level, which holds for every stream that has none.
    pub direction: Option<Direction>,
    /// Other attributes at session level.
    pub attributes: Vec<Attribute>,
    /// Streams, in order.
    pub media: Vec<Media>,
}

/// `o=`: who made it, and which version this is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Origin {
    /// User name, `-` where there is none.
    pub username: String,
    /// Session id, as written: some peers exceed 64 bits.
    pub session_id: String,
    /// Version; raised by one with each change.
    pub version: u64,
    /// Address of the maker, as written.
    pub address: String,
}

/// An attribute that is only passed on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Attribute {
    /// Name before the colon.
    pub name: String,
    /// What is after it.
    pub value: Option<String>,
}

/// RFC 3551 table 4.
const COMFORT_NOISE: u8 = 13;

/// `m=` and what follows it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Media {
    /// `audio`, `video`, ...
    pub kind: String,
    /// 0: refused or disabled.
    pub port: u16,
    /// `RTP/AVP`, `RTP/SAVP`, ...
    pub proto: String,
    /// Formats as written, in order of preference.
    pub formats: Vec<String>,
    /// Address of its own `c=`.
    pub connection: Option<String>,
    /// Its own direction.
    pub direction: Option<Direction>,
    /// Milliseconds a packet should hold.
    pub ptime: Option<u16>,
    /// Milliseconds a packet may hold.
    pub maxptime: Option<u16>,
    /// `a=rtpmap`.
    pub rtpmaps: Vec<RtpMap>,
    /// `a=fmtp`.
    pub fmtps: Vec<Fmtp>,
    /// `a=rtcp`.
    pub rtcp: Option<RtcpPort>,
    /// `a=rtcp-mux` (RFC 5761).
    pub rtcp_mux: bool,
    /// `a=crypto` lines that can be used.
    pub crypto: Vec<Crypto>,
    /// `a=candidate` values, untouched.
    pub candidates: Vec<String>,
    /// Other attributes.
    pub attributes: Vec<Attribute>,
}

impl Media {
    /// What `format` stands for: by its rtpmap, else by the static table.
    pub fn codec(&self, format: &str) -> Option<Codec> {
        let payload_type = format.parse().ok()?;
        match self.rtpmaps.iter().find(|map| map.payload_type == payload_type) {
            Some(map) => Codec::from_map(map),
            None => Codec::from_static(payload_type),
        }
    }

    /// Payload type of `codec`: the first format that stands for it.
    pub fn payload_type(&self, codec: Codec) -> Option<u8> {
        self.formats.iter().find(|f| self.codec(f) == Some(codec))?.parse().ok()
    }

    /// Every codec among the formats, in order.
    pub fn codecs(&self) -> Vec<Codec> {
        let mut codecs = Vec::new();
        for codec in self.formats.iter().filter_map(|f| self.codec(f)) {
            if !codecs.contains(&codec) {
                codecs.push(codec);
            }
        }
        codecs
    }

    /// `telephone-event` formats as payload type and clock rate.
    pub fn telephone_events(&self) -> impl Iterator<Item = (u8, u32)> {
        self.rtpmaps
            .iter()
            .filter(|map| map.encoding.eq_ignore_ascii_case("telephone-event"))
            .filter(|map| self.formats.iter().any(|f| f.parse() == Ok(map.payload_type)))
            .map(|map| (map.payload_type, map.clock_rate))
    }

    /// Whether comfort noise at 8 kHz is among the formats (RFC 3389 section 4: the static payload type 13).
    pub fn has_comfort_noise(&self) -> bool {
        let mapped = self.rtpmaps.iter().find(|map| map.payload_type == COMFORT_NOISE);
        let meant = mapped.is_none_or(|map| map.encoding.eq_ignore_ascii_case("CN") && map.clock_rate == 8_000);
        meant && self.formats.iter().any(|format| format.parse() == Ok(COMFORT_NOISE))
    }

    pub(crate) fn add_comfort_noise(&mut self) {
        self.formats.push(COMFORT_NOISE.to_string());
        let encoding = "CN".to_owned();
        self.rtpmaps.push(RtpMap { payload_type: COMFORT_NOISE, encoding, clock_rate: 8_000, channels: 1 });
    }

    /// The parameters of `payload_type`.
    pub fn fmtp(&self, payload_type: u8) -> Option<&Fmtp> {
        self.fmtps.iter().find(|f| f.payload_type == payload_type)
    }
}

impl Description {
    /// The address that media of `media` goes to, as written.
    pub fn address<'a>(&'a self, media: &'a Media) -> Option<&'a str> {
        media.connection.as_deref().or(self.connection.as_deref())
    }

    /// The same where it is an IP address.
    pub fn ip(&self, media: &Media) -> Option<IpAddr> {
        self.address(media)?.parse().ok()
    }

    /// The direction of `media`.
    pub fn direction(&self, media: &Media) -> Direction {
        media.direction.or(self.direction).unwrap_or_default()
    }
}
