//! What an operator writes about telephony: `[sip]`, `[[sip.trunk]]` and `[rtp]`.
//!
//! Owns the shape and the defaults of these sections; opens no socket and reads no file but the ones a
//! [`Secret`] names. A value that parsed is usable: ranges are checked while it is read.

use std::{
    net::{IpAddr, Ipv4Addr, SocketAddr},
    path::PathBuf,
    str::FromStr,
};

pub use super::number::{Format, Numbers, Rule};
use super::quota::Limits;
use crate::host;
pub use crate::secret::Secret;
use serde::{Deserialize, Deserializer, de::Error as _};

/// `[sip]`: where the gateway listens and whom it hears.
///
/// Why this struct is large: it is the section as operators write it, a field a key.
#[derive(Clone, Debug, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct SipConfig {
    /// UDP listener, or `"off"`.
    #[serde(deserialize_with = "listener")]
    pub udp: Option<SocketAddr>,
    /// TCP listener, or `"off"`.
    #[serde(deserialize_with = "listener")]
    pub tcp: Option<SocketAddr>,
    /// TLS listener; absent means off.
    pub tls: Option<TlsConfig>,
    /// WebSocket listener (RFC 7118); absent: off.
    pub ws: Option<SocketAddr>,
    /// WebSocket listener over TLS, with the certificate of `tls`; absent: off.
    pub wss: Option<SocketAddr>,
    /// Origins of pages that may connect to these (`https://app.example`, `*`); empty: pages of the same host.
    pub ws_origins: Vec<String>,
    /// PEM file with the authorities that TLS trunks are trusted by; absent: those of the system.
    pub tls_roots: Option<PathBuf>,
    /// Address that peers are told to use, where it differs from the one bound (NAT, `0.0.0.0`).
    pub public_ip: Option<IpAddr>,
    /// The same towards peers of some networks, such as a carrier behind a private line; the narrowest network counts.
    pub public_ips: Vec<PublicIp>,
    /// Networks that may talk to us (`10.0.0.0/8`, `::1`). Empty: everybody.
    pub allow: Vec<Network>,
    /// Private networks that peers outside them may name in descriptions and headers.
    pub internal_networks: Vec<Network>,
    /// Accounts for inbound calls. Not empty: every inbound INVITE must authenticate, but for those from the
    /// addresses of a trunk, which cannot know a password of ours.
    pub users: Vec<User>,
    /// Digest realm shown to callers.
    pub realm: String,
    /// Algorithms that callers are challenged with, the favourite first (RFC 8760).
    pub digest: Vec<DigestName>,
    /// Agent for inbound calls whose user part names none.
    pub agent: Option<String>,
    /// Codecs in order of preference.
    pub codecs: Vec<CodecName>,
    /// Inbound and outbound calls at a time; more get 503 with `Retry-After`.
    pub max_calls: usize,
    /// Answered and not acknowledged calls that one source may have.
    pub half_open_per_source: usize,
    /// Messages a second of one source; a trunk's ten times as many. 0: no limit.
    pub messages_per_second: u32,
    /// Seconds without any RTP or RTCP of a call that is not on hold before it is given up.
    pub media_timeout_s: u64,
    /// Seconds an outbound call may ring.
    pub ring_timeout_s: u64,
    /// Seconds after which a session that was not refreshed is over, as we ask for it (RFC 4028); 0: we ask for none.
    pub session_expires_s: u64,
    /// Whether calls may go out.
    pub outbound: Outbound,
    /// Whether `users` may hand calls over to whom they name (REFER), and to one another (INVITE with Replaces).
    pub refer: bool,
    /// Carriers and exchanges for outbound calls.
    pub trunk: Vec<TrunkConfig>,
}

impl Default for SipConfig {
    fn default() -> Self {
        SipConfig {
            udp: Some(SocketAddr::from((Ipv4Addr::LOCALHOST, 5060))),
            tcp: Some(SocketAddr::from((Ipv4Addr::LOCALHOST, 5060))),
            tls: None,
            ws: None,
            wss: None,
            ws_origins: Vec::new(),
            tls_roots: None,
            public_ip: None,
            public_ips: Vec::new(),
            allow: Vec::new(),
            internal_networks: Vec::new(),
            users: Vec::new(),
            realm: "antiphon".to_owned(),
            digest: vec![DigestName::Md5],
            agent: None,
            codecs: vec![CodecName::Opus, CodecName::G722, CodecName::Pcmu, CodecName::Pcma],
            max_calls: 1000,
            half_open_per_source: 64,
            messages_per_second: 1000,
            media_timeout_s: 60,
            ring_timeout_s: 60,
            // What RFC 4028 section 4 recommends: a call on hold whose peer is gone ends in half an hour.
            session_expires_s: 1_800,
            outbound: Outbound::Trunks,
            refer: false,
            trunk: Vec::new(),
        }
    }
}

/// Shortest password of an account: guesses are limited, and this many characters take them years.
const MIN_PASSWORD: usize = 8;

impl SipConfig {
    /// What no single value can be wrong about.
    ///
    /// # Errors
    /// What to change.
    pub fn validate(&self) -> Result<(), String> {
        if self.wss.is_some() && self.tls.is_none() {
            return Err("wss: needs the certificate and key of `tls`".to_owned());
        }
        host::pages(&self.ws_origins).map_err(|error| format!("ws_origins: {error}"))?;
        let short = self.users.iter().find(|user| user.password.reveal().len() < MIN_PASSWORD);
        match short {
            Some(user) => Err(format!(
                "users: the password of `{}` has fewer than {MIN_PASSWORD} characters; a public port is guessed at all day",
                user.username
            )),
            None => Ok(()),
        }
    }

    /// Where it is to listen, each with its key; `None`: not there.
    pub fn listeners(&self) -> [(&'static str, Option<SocketAddr>); 5] {
        let tls = self.tls.as_ref().map(|tls| tls.bind);
        [("udp", self.udp), ("tcp", self.tcp), ("tls", tls), ("ws", self.ws), ("wss", self.wss)]
    }
}

/// `[sip] tls`: certificate chain and key, PEM files.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TlsConfig {
    /// Where to listen; 5061 is usual.
    pub bind: SocketAddr,
    /// PEM file with the certificate chain, leaf first.
    pub cert: PathBuf,
    /// PEM file with the private key.
    pub key: PathBuf,
}

/// An account that may call in.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct User {
    /// Digest user name.
    pub username: String,
    /// Digest password.
    pub password: Secret,
}

/// `[[sip.trunk]]`: a carrier or exchange that outbound calls go through.
///
/// Why this struct is large: it is the section as operators write it, a field a key.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TrunkConfig {
    /// What `POST /v1/calls` names it by.
    pub name: String,
    /// Host or address with optional port.
    #[serde(deserialize_with = "host::with_port")]
    pub host: String,
    /// Further hosts of the same carrier, tried where one fails.
    #[serde(default)]
    pub targets: Vec<TargetConfig>,
    /// Seconds that a host which failed a call is tried after the others only.
    #[serde(default = "failed_target_s")]
    pub failed_target_s: u64,
    /// Seconds between OPTIONS to every host, which tell whether it lives; 0: none are sent.
    #[serde(default)]
    pub options_s: u64,
    /// Seconds between OPTIONS that keep the way from the registrar open (`register = true`); 0: none.
    #[serde(default = "keep_alive_s")]
    pub keep_alive_s: u64,
    /// `udp` (default), `tcp`, `tls`, or `auto`: what the NAPTR and SRV records of the host say.
    #[serde(default)]
    pub transport: Transport,
    /// How numbers are read and written here; absent: they are sent as they are.
    pub numbers: Option<Numbers>,
    /// Whether addresses that are sent say `user=phone` (RFC 3261 section 19.1.1).
    #[serde(default)]
    pub user_phone: bool,
    /// Whether calls out carry P-Asserted-Identity with the caller (RFC 3325).
    #[serde(default)]
    pub assert_identity: bool,
    /// How often a call follows a redirection (3xx), and to hosts of this trunk only; 0: never.
    #[serde(default)]
    pub redirects: u8,
    /// What becomes of sound that the called side sends before it answers (183, or 180 with a description).
    #[serde(default)]
    pub early_media: EarlyMedia,
    /// As `[sip] session_expires_s`, for this trunk.
    pub session_expires_s: Option<u64>,
    /// User for digest, and the user part of our address there.
    pub username: Option<String>,
    /// Password for digest.
    pub password: Option<Secret>,
    /// Realm whose challenges the password answers; absent: any that the trunk asks for. No other realm is answered.
    pub realm: Option<String>,
    /// Whether to register, so that calls to our number reach us.
    #[serde(default)]
    pub register: bool,
    /// Codecs to offer there, in order; empty: those of `[sip]`.
    #[serde(default)]
    pub codecs: Vec<CodecName>,
    /// Milliseconds of audio in a packet, where the carrier asks for nothing else: 10, 20, 30, 40 or 60.
    #[serde(default = "ptime", deserialize_with = "packet_time")]
    pub ptime: u16,
    /// Whether silence is sent as comfort noise (RFC 3389) where the carrier takes it, with G.711 in packets of 20 ms.
    #[serde(default)]
    pub comfort_noise: bool,
    /// How digits are sent there: `events` (RFC 4733, tones where the carrier takes none) or `info` (SIP INFO). They are read in
    /// every form.
    #[serde(default)]
    pub dtmf: Dtmf,
    /// Whether to encrypt media.
    #[serde(default)]
    pub srtp: Srtp,
    /// What a number or user must begin with to be called here; `*` is everything. Empty: nothing is called.
    #[serde(default)]
    pub prefixes: Vec<String>,
    /// Whether it may hand calls of its over to whom it names (REFER): they are called as `prefixes` and the limits below
    /// allow.
    #[serde(default)]
    pub refer: bool,
    /// Calls out at a time; 0: as many as `[sip] max_calls`.
    #[serde(default = "max_calls")]
    pub max_calls: usize,
    /// Calls out in a minute; 0: no limit.
    #[serde(default = "calls_per_minute")]
    pub calls_per_minute: usize,
    /// Minutes of calls out in 24 hours; when they are used up calls end. 0: no limit.
    #[serde(default = "minutes_per_day")]
    pub minutes_per_day: u32,
}

/// `{ host = "sip2.example.com", priority = 2, weight = 1 }`
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TargetConfig {
    /// Host or address with optional port.
    #[serde(deserialize_with = "host::with_port")]
    pub host: String,
    /// Lower is tried first; that of the trunk's `host` is 1.
    #[serde(default = "one")]
    pub priority: u16,
    /// Share of the calls among hosts of the same priority; that of the trunk's `host` is 1.
    #[serde(default = "one")]
    pub weight: u16,
}

impl TrunkConfig {
    /// How much may be called through it.
    pub(super) fn limits(&self) -> Limits {
        let Self { max_calls, calls_per_minute, minutes_per_day, .. } = *self;
        Limits { max_calls, calls_per_minute, minutes_per_day }
    }

    /// Every host with its priority and weight, `host` first.
    pub(super) fn hosts(&self) -> impl Iterator<Item = (String, u16, u16)> + '_ {
        let more = self.targets.iter().map(|target| (target.host.clone(), target.priority, target.weight));
        std::iter::once((self.host.clone(), one(), one())).chain(more)
    }
}

fn one() -> u16 {
    1
}

/// What nearly all carriers use.
fn ptime() -> u16 {
    20
}

fn packet_time<'de, D: Deserializer<'de>>(deserializer: D) -> Result<u16, D::Error> {
    let ms = u16::deserialize(deserializer)?;
    let possible = matches!(ms, 10 | 20 | 30 | 40 | 60);
    possible.then_some(ms).ok_or_else(|| D::Error::custom(format!("ptime = {ms}: expected 10, 20, 30, 40 or 60")))
}

/// Mappings of NAT in UDP last half a minute (RFC 5626 section 4.4.2 has 24 to 29 seconds).
fn keep_alive_s() -> u64 {
    25
}

/// As long as a registrar or proxy takes to restart.
fn failed_target_s() -> u64 {
    60
}

/// Enough for a small contact centre, little enough that a stolen token is noticed before it is ruinous.
fn max_calls() -> usize {
    30
}

fn calls_per_minute() -> usize {
    60
}

fn minutes_per_day() -> u32 {
    3_000
}

/// Whether calls may go out: by the API, by agents, by transfers.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "lowercase")]
pub enum Outbound {
    /// None at all.
    Deny,
    /// Through a trunk and to its `prefixes`; on a gateway that listens on loopback only, to loopback as well.
    #[default]
    Trunks,
}

/// `[rtp]`: UDP ports of calls. Each call takes an even port and the odd one above it.
#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct RtpConfig {
    /// Lowest port.
    pub port_min: u16,
    /// Highest port, inclusive.
    pub port_max: u16,
}

impl Default for RtpConfig {
    fn default() -> Self {
        RtpConfig { port_min: 20_000, port_max: 29_999 }
    }
}

impl RtpConfig {
    /// # Errors
    /// The range has no even port with an odd one above it.
    pub fn validate(&self) -> Result<(), String> {
        let first = self.port_min.saturating_add(self.port_min % 2);
        if self.port_min == 0 || first.checked_add(1).is_none_or(|second| second > self.port_max) {
            return Err(format!(
                "port_min = {} and port_max = {} leave no even port with an odd one above it; a range such as 20000 to \
                 29999 carries 5,000 calls",
                self.port_min, self.port_max
            ));
        }
        Ok(())
    }
}

/// Signalling transport of a trunk.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "lowercase")]
pub enum Transport {
    /// Datagrams.
    #[default]
    Udp,
    /// A stream.
    Tcp,
    /// A stream under TLS.
    Tls,
    /// What the host's name servers say (RFC 3263 section 4.1), UDP where they say nothing.
    Auto,
}

impl Transport {
    /// Whether certificates may have to be checked.
    pub(super) fn may_be_tls(self) -> bool {
        matches!(self, Transport::Tls | Transport::Auto)
    }
}

/// What becomes of sound before an answer.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "lowercase")]
pub enum EarlyMedia {
    /// It is thrown away.
    Off,
    /// It is heard: by recogniser, speech detector and media sockets.
    #[default]
    Hear,
    /// It is heard, and silence is sent: some carriers and NATs pass nothing on before they have got a packet.
    Both,
}

/// How digits go to a trunk.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "lowercase")]
pub enum Dtmf {
    /// With the media: RFC 4733 events, or tones where none were agreed.
    #[default]
    Events,
    /// Each as an INFO (`application/dtmf-relay`): nothing of it is heard.
    Info,
}

/// Our address as one network sees it.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq)]
#[serde(deny_unknown_fields)]
pub struct PublicIp {
    /// Where the peer is.
    pub network: Network,
    /// Where it reaches us.
    pub ip: IpAddr,
}

/// Media encryption towards a trunk.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "lowercase")]
pub enum Srtp {
    /// Plain RTP is offered.
    #[default]
    Off,
    /// RTP/SAVP with keys in the description (SDES, RFC 4568) is offered and nothing else accepted.
    Required,
    /// UDP/TLS/RTP/SAVP with keys of a handshake (DTLS, RFC 5763) is offered and nothing else accepted; of offers that come,
    /// those with keys in the description are, too.
    Dtls,
}

/// An algorithm of digest authentication.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq)]
pub enum DigestName {
    /// RFC 2617: what every telephone speaks.
    #[serde(rename = "md5")]
    Md5,
    /// RFC 7616.
    #[serde(rename = "sha-256")]
    Sha256,
    /// RFC 7616.
    #[serde(rename = "sha-512-256")]
    Sha512_256,
}

impl DigestName {
    /// Its name in headers.
    pub(super) fn name(self) -> &'static str {
        match self {
            DigestName::Md5 => "MD5",
            DigestName::Sha256 => "SHA-256",
            DigestName::Sha512_256 => "SHA-512-256",
        }
    }
}

/// A codec as configuration names it.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "lowercase")]
pub enum CodecName {
    /// RFC 7587.
    Opus,
    /// Wideband at telephone bit rate.
    G722,
    /// G.711 mu-law.
    Pcmu,
    /// G.711 A-law.
    Pcma,
}

impl CodecName {
    pub(super) fn codec(self) -> sdp::Codec {
        match self {
            CodecName::Opus => sdp::Codec::Opus,
            CodecName::G722 => sdp::Codec::G722,
            CodecName::Pcmu => sdp::Codec::Pcmu,
            CodecName::Pcma => sdp::Codec::Pcma,
        }
    }
}

/// An address block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Network {
    address: IpAddr,
    prefix: u8,
}

impl Network {
    /// How many bits of it are given: the more, the narrower.
    pub(super) fn prefix(&self) -> u8 {
        self.prefix
    }

    /// Whether `ip` is inside. An IPv4-mapped IPv6 address counts as IPv4.
    pub fn contains(&self, ip: IpAddr) -> bool {
        match (self.address, ip.to_canonical()) {
            (IpAddr::V4(net), IpAddr::V4(ip)) => {
                same_prefix(u128::from(net.to_bits()) << 96, u128::from(ip.to_bits()) << 96, self.prefix)
            }
            (IpAddr::V6(net), IpAddr::V6(ip)) => same_prefix(net.to_bits(), ip.to_bits(), self.prefix),
            _ => false,
        }
    }
}

fn same_prefix(a: u128, b: u128, prefix: u8) -> bool {
    // A shift by the full width is undefined for integers, hence the test for zero.
    prefix == 0 || (a ^ b) >> (128 - u32::from(prefix)) == 0
}

impl FromStr for Network {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let (address, prefix) = text.split_once('/').map_or((text, None), |(a, p)| (a, Some(p)));
        let address: IpAddr =
            address.trim().parse().map_err(|_| format!("`{text}` is not an address or a block like 10.0.0.0/8"))?;
        let widest = if address.is_ipv4() { 32 } else { 128 };
        let prefix = match prefix {
            None => widest,
            Some(p) => p
                .trim()
                .parse()
                .ok()
                .filter(|p| *p <= widest)
                .ok_or_else(|| format!("the prefix of `{text}` must be a number from 0 to {widest}"))?,
        };
        Ok(Network { address, prefix })
    }
}

impl<'de> Deserialize<'de> for Network {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(D::Error::custom)
    }
}

fn listener<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<SocketAddr>, D::Error> {
    let text = String::deserialize(deserializer)?;
    if matches!(text.as_str(), "" | "off") {
        return Ok(None);
    }
    text.parse().map(Some).map_err(|_| D::Error::custom(format!("`{text}` is neither an address:port nor \"off\"")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_contain_what_they_should() {
        let net: Network = "10.1.0.0/16".parse().expect("valid");
        assert!(net.contains("10.1.255.3".parse().expect("ip")));
        assert!(net.contains("::ffff:10.1.0.1".parse().expect("ip")));
        assert!(!net.contains("10.2.0.1".parse().expect("ip")));
        let all: Network = "0.0.0.0/0".parse().expect("valid");
        assert!(all.contains("203.0.113.9".parse().expect("ip")));
        assert!(!all.contains("2001:db8::1".parse().expect("ip")));
        let one: Network = "2001:db8::1".parse().expect("valid");
        assert!(one.contains("2001:db8::1".parse().expect("ip")));
        assert!(!one.contains("2001:db8::2".parse().expect("ip")));
        assert!("10.0.0.0/33".parse::<Network>().is_err());
        assert!("example.com".parse::<Network>().is_err());
    }

    #[test]
    fn a_full_section_reads() {
        let config: SipConfig = toml::from_str(
            r#"
            udp = "0.0.0.0:5060"
            tcp = "off"
            public_ip = "192.0.2.1"
            allow = ["192.0.2.0/24"]
            users = [{ username = "alice", password = "pw" }]
            [tls]
            bind = "0.0.0.0:5061"
            cert = "cert.pem"
            key = "key.pem"
            [[trunk]]
            name = "carrier"
            host = "sip.example.com"
            transport = "tls"
            username = "u"
            password = "p"
            register = true
            codecs = ["pcma"]
            srtp = "required"
            "#,
        )
        .expect("valid");
        assert_eq!(config.tcp, None);
        assert_eq!(config.trunk[0].srtp, Srtp::Required);
        assert!(!format!("{config:?}").contains("\"pw\""));
    }

    #[test]
    fn unknown_keys_are_refused() {
        assert!(toml::from_str::<SipConfig>("upd = \"off\"").is_err());
        assert!(toml::from_str::<RtpConfig>("port_mim = 1").is_err());
    }
}
