//! Offer and answer (RFC 3264) of one call with one audio stream.
//!
//! A [`Negotiator`] lives as long as its call. It keeps what a later offer or answer must repeat: the order
//! of the `m=` lines, the version of `o=`, payload types and keys. It owns no I/O; the caller carries
//! descriptions to and fro and must not start an exchange before the last one is over.

mod address;
mod opus;
mod secure;

use std::net::{IpAddr, SocketAddr};

use self::address::Address;
pub use self::opus::OpusParams;
use crate::{
    attr::{Codec, Crypto, Direction, Fmtp, Key, RtpMap, Suite},
    dtls::{self, Dtls, LocalDtls, Theirs, attribute},
    error::NegotiateError,
    session::{Description, Media, Origin},
};

/// Payload types that our offers give to what has no static one.
const OPUS: u8 = 111;
const EVENTS_48K: u8 = 110;
const EVENTS_8K: u8 = 101;
/// Milliseconds of audio that a packet may have.
const PTIMES: [u16; 5] = [60, 40, 30, 20, 10];

/// Milliseconds of audio in the packets that we send to who wishes `ptime` and can take `maxptime` (RFC 8866 section 6.4), and
/// `otherwise` where neither says anything: the longest of 10, 20, 30, 40 and 60 that is no longer than both, and 10 at least.
pub fn packet_time(ptime: Option<u16>, maxptime: Option<u16>, otherwise: u16) -> u16 {
    let wished = ptime.filter(|ms| *ms > 0).unwrap_or(otherwise);
    let most = maxptime.filter(|ms| *ms > 0).unwrap_or(u16::MAX);
    PTIMES.into_iter().find(|ms| *ms <= wished.min(most)).unwrap_or(10)
}

/// What we want.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Policy {
    /// Codecs, favourite first.
    pub codecs: Vec<Codec>,
    /// Whether RFC 4733 events are used.
    pub telephone_event: bool,
    /// Encryption, with keys in the description (SDES) or of a handshake (DTLS).
    pub srtp: SrtpPolicy,
    /// Milliseconds of audio in a packet, where the peer wishes nothing else: 10, 20, 30, 40 or 60.
    pub ptime: u16,
    /// Whether silence may be sent as comfort noise (RFC 3389) where the codec is G.711.
    pub comfort_noise: bool,
}

impl Default for Policy {
    fn default() -> Self {
        Policy {
            codecs: vec![Codec::Opus, Codec::G722, Codec::Pcmu, Codec::Pcma],
            telephone_event: true,
            srtp: SrtpPolicy::Allowed,
            ptime: 20,
            comfort_noise: false,
        }
    }
}

/// Whether media is encrypted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum SrtpPolicy {
    /// Neither offered nor accepted.
    Never,
    /// Accepted when offered, and then preferred; not offered.
    #[default]
    Allowed,
    /// Offered with keys in the description, and nothing else accepted.
    Required,
    /// Offered with keys of a handshake; in offers, keys in the description are as good.
    Dtls,
}

/// Our side of the stream. The caller draws the random parts.
#[derive(Clone, Debug)]
pub struct LocalMedia {
    /// Address that the peer is told.
    pub address: IpAddr,
    /// RTP port; RTCP is on the next one unless multiplexed.
    pub port: u16,
    /// Random; names the session.
    pub session_id: u64,
    /// Random SRTP keys, one for each [`Suite`].
    pub keys: [Key; 4],
    /// DTLS, where we have a certificate.
    pub dtls: Option<LocalDtls>,
}

/// What both sides have agreed to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Agreed {
    /// Codec both ways.
    pub codec: Codec,
    /// Payload type of what we send.
    pub payload_type: u8,
    /// Payload type of what we receive.
    pub receive_payload_type: u8,
    /// RFC 4733 events.
    pub telephone_event: Option<TelephoneEvent>,
    /// Where RTP goes; `None` where the peer gave no usable address and it must be learned from what it sends.
    pub remote_rtp: Option<SocketAddr>,
    /// Where RTCP goes.
    pub remote_rtcp: Option<SocketAddr>,
    /// Whether RTP and RTCP share a port.
    pub rtcp_mux: bool,
    /// From our point of view.
    pub direction: Direction,
    /// Whether the peer wants nothing from us: it put us on hold.
    pub held: bool,
    /// Milliseconds of audio in a packet that we send. The peer may send any.
    pub ptime: u16,
    /// Whether the peer takes silence as comfort noise, of the static payload type.
    pub comfort_noise: bool,
    /// What the peer asks of Opus.
    pub opus: OpusParams,
    /// Protection both ways, where its keys are in the descriptions.
    pub srtp: Option<SrtpKeys>,
    /// Protection whose keys come of a handshake.
    pub dtls: Option<Dtls>,
}

/// Payload types of RFC 4733 events.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TelephoneEvent {
    /// Of what we send.
    pub payload_type: u8,
    /// Of what we receive.
    pub receive_payload_type: u8,
    /// RTP clock in Hz.
    pub clock_rate: u32,
}

/// SRTP keys of both directions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SrtpKeys {
    /// Protection.
    pub suite: Suite,
    /// Protects what we send.
    pub local: Key,
    /// Protects what we receive.
    pub remote: Key,
}

/// Offer and answer over the life of one call.
#[derive(Clone, Debug)]
pub struct Negotiator {
    policy: Policy,
    local: LocalMedia,
    holding: bool,
    last: Option<Description>,
    /// The `m=` line in use.
    index: usize,
    agreed: Option<Agreed>,
    /// Name of that line, and whether the offer would have it share its transport.
    mid: Option<(String, bool)>,
    /// How often the peer has restarted ICE: our credentials change with it.
    restarts: u32,
}

/// The payload type that our offers give to a codec: without a type for one this does not compile.
fn offered_type(codec: Codec) -> u8 {
    match codec {
        Codec::Pcmu => 0,
        Codec::Pcma => 8,
        Codec::G722 => 9,
        Codec::Opus => OPUS,
    }
}

impl Negotiator {
    /// Nothing is agreed yet.
    pub fn new(policy: Policy, local: LocalMedia) -> Negotiator {
        Negotiator { policy, local, holding: false, last: None, index: 0, agreed: None, mid: None, restarts: 0 }
    }

    /// Whether we hold the peer: we do not want to hear it. Takes effect with the next offer or answer.
    pub fn set_holding(&mut self, holding: bool) {
        self.holding = holding;
    }

    /// Whether it does.
    pub fn is_holding(&self) -> bool {
        self.holding
    }

    /// Makes an offer: every codec of the policy at first, what is in use later on.
    pub fn offer(&mut self) -> Description {
        let mut audio = match self.agreed.clone() {
            None => self.fresh_audio(),
            Some(agreed) => {
                let proto = self.previous_proto();
                let events = agreed.telephone_event.map(|e| (e.receive_payload_type, e.clock_rate));
                let mut audio =
                    self.audio(&[(agreed.codec, agreed.receive_payload_type)], events.as_slice(), &proto, agreed.ptime);
                audio.rtcp_mux = agreed.rtcp_mux;
                if agreed.comfort_noise {
                    audio.add_comfort_noise();
                }
                if let Some(keys) = agreed.srtp {
                    audio.crypto = vec![Crypto { tag: 1, suite: keys.suite, key: keys.local }];
                }
                if let Some(dtls) = &agreed.dtls {
                    self.secured(&mut audio, dtls.ice.as_ref(), "actpass");
                }
                audio
            }
        };
        audio.direction = Some(self.wish());
        let media = match &self.last {
            None => vec![audio],
            Some(last) => {
                let mut media: Vec<Media> = last.media.iter().map(refused).collect();
                if let Some(line) = media.get_mut(self.index) {
                    *line = audio;
                }
                media
            }
        };
        self.describe(media)
    }

    /// Answers an offer.
    ///
    /// # Errors
    /// Nothing in it can be agreed to (SIP: 488). The state is as before.
    pub fn answer(&mut self, offer: &Description) -> Result<(Description, Agreed), NegotiateError> {
        let (index, picked) = self.pick(offer)?;
        let Some(theirs) = offer.media.get(index) else { return Err(NegotiateError::NoAudio) };
        let Picked { codec, payload_type, crypto, dtls } = picked;

        let restarts = self.restarts + u32::from(dtls.as_ref().is_some_and(|theirs| self.restarts_ice(theirs)));
        let dtls = dtls.map(|theirs| self.dtls(theirs, restarts));
        let mut address = Address::of(offer, theirs)?;
        if dtls.as_ref().is_some_and(|dtls| dtls.ice.is_some()) {
            // The line has whatever was known before the checks, often nothing; they find the path.
            address = Address::Unknown;
        }
        let mut direction = offer.direction(theirs).reversed().and(self.wish());
        if address == Address::Nowhere {
            direction = direction.and(Direction::RecvOnly);
        }
        let event = self.event(theirs, codec).map(|(payload_type, clock_rate)| TelephoneEvent {
            payload_type,
            receive_payload_type: payload_type,
            clock_rate,
        });
        let agreed = Agreed {
            codec,
            payload_type,
            receive_payload_type: payload_type,
            telephone_event: event,
            remote_rtp: address.rtp(theirs),
            remote_rtcp: address.rtcp(theirs),
            rtcp_mux: theirs.rtcp_mux,
            direction,
            held: address == Address::Nowhere || !offer.direction(theirs).receives(),
            ptime: packet_time(theirs.ptime, theirs.maxptime, self.policy.ptime),
            comfort_noise: self.noise(theirs, codec),
            opus: OpusParams::read(theirs.fmtp(payload_type)),
            srtp: crypto.as_ref().map(|c| self.keys(c.suite, c.key)),
            dtls,
        };
        self.mid = dtls::mid(theirs).map(|mid| (mid.to_owned(), dtls::is_bundled(offer, mid)));
        self.restarts = restarts;

        let events = event.map(|e| (e.payload_type, e.clock_rate));
        let mut audio = self.audio(&[(codec, payload_type)], events.as_slice(), &theirs.proto, agreed.ptime);
        audio.direction = Some(direction);
        audio.rtcp_mux = theirs.rtcp_mux;
        if agreed.comfort_noise {
            audio.add_comfort_noise();
        }
        if let Some(c) = crypto {
            audio.crypto = vec![Crypto { tag: c.tag, suite: c.suite, key: self.keys(c.suite, c.key).local }];
        }
        if let Some(dtls) = &agreed.dtls {
            self.secured(&mut audio, dtls.ice.as_ref(), if dtls.client { "active" } else { "passive" });
        }
        let mut media: Vec<Media> = offer.media.iter().map(refused).collect();
        if let Some(line) = media.get_mut(index) {
            *line = audio;
        }
        self.index = index;
        self.agreed = Some(agreed.clone());
        Ok((self.describe(media), agreed))
    }

    /// Takes the answer to the last [`Negotiator::offer`].
    ///
    /// # Errors
    /// It refuses the stream or does not fit. What was agreed before still holds.
    pub fn accept(&mut self, answer: &Description) -> Result<Agreed, NegotiateError> {
        let offer = self.last.as_ref().ok_or(NegotiateError::Mismatch("nothing was offered"))?;
        let ours = offer.media.get(self.index).ok_or(NegotiateError::Mismatch("nothing was offered"))?;
        // Peers that drop refused lines from the end are common and do no harm.
        let theirs = answer.media.get(self.index).ok_or(NegotiateError::Mismatch("its m= lines are fewer"))?;
        if theirs.kind != ours.kind || theirs.port == 0 {
            return Err(NegotiateError::NoAudio);
        }
        if secure(&theirs.proto) != secure(&ours.proto) {
            return Err(NegotiateError::Mismatch("its transport is another"));
        }
        let (codec, payload_type, receive_payload_type) = theirs
            .formats
            .iter()
            .find_map(|format| {
                let number = format.parse().ok()?;
                // A dynamic type without a map of its own means what our offer said it means.
                let mapped = theirs.rtpmaps.iter().any(|map| map.payload_type == number);
                let codec = if mapped { theirs.codec(format) } else { ours.codec(format) }?;
                Some((codec, number, ours.payload_type(codec)?))
            })
            .ok_or_else(|| NegotiateError::NoCommonCodec {
                ours: ours.formats.join(" "),
                theirs: theirs.formats.join(" "),
            })?;
        let dtls = match Theirs::of(offer, ours) {
            None => None,
            Some(_) => {
                let theirs = Theirs::of(answer, theirs);
                let theirs = theirs.ok_or(NegotiateError::Encryption("the answer has no fingerprint"))?;
                Some(self.dtls(theirs, self.restarts))
            }
        };
        let srtp = match secure(&ours.proto) && dtls.is_none() {
            false => None,
            true => {
                let chosen = theirs.crypto.first().ok_or(NegotiateError::Encryption("the answer has no key"))?;
                let offered = ours.crypto.iter().find(|c| c.tag == chosen.tag && c.suite == chosen.suite);
                let offered = offered.ok_or(NegotiateError::Mismatch("its key was not offered"))?;
                Some(SrtpKeys { suite: chosen.suite, local: offered.key, remote: chosen.key })
            }
        };
        let telephone_event = self.event(theirs, codec).and_then(|(payload_type, clock_rate)| {
            let receive = ours.telephone_events().find(|(_, rate)| *rate == clock_rate)?.0;
            Some(TelephoneEvent { payload_type, receive_payload_type: receive, clock_rate })
        });
        let mut address = Address::of(answer, theirs)?;
        if dtls.as_ref().is_some_and(|dtls| dtls.ice.is_some()) {
            address = Address::Unknown;
        }
        let mut direction = answer.direction(theirs).reversed().and(offer.direction(ours));
        if address == Address::Nowhere {
            direction = direction.and(Direction::RecvOnly);
        }
        let agreed = Agreed {
            codec,
            payload_type,
            receive_payload_type,
            telephone_event,
            remote_rtp: address.rtp(theirs),
            remote_rtcp: address.rtcp(theirs),
            rtcp_mux: ours.rtcp_mux && theirs.rtcp_mux,
            direction,
            // While we hold the peer it answers that it only listens or does nothing: not a hold of its own
            // unless it does not even want what we send.
            held: address == Address::Nowhere || !answer.direction(theirs).receives(),
            ptime: packet_time(theirs.ptime, theirs.maxptime, self.policy.ptime),
            comfort_noise: self.noise(theirs, codec),
            opus: OpusParams::read(theirs.fmtp(payload_type)),
            srtp,
            dtls,
        };
        self.agreed = Some(agreed.clone());
        Ok(agreed)
    }

    /// What holds now.
    pub fn agreed(&self) -> Option<&Agreed> {
        self.agreed.as_ref()
    }

    /// What we sent last.
    pub fn local(&self) -> Option<&Description> {
        self.last.as_ref()
    }

    fn wish(&self) -> Direction {
        if self.holding { Direction::SendOnly } else { Direction::SendRecv }
    }

    fn keys(&self, suite: Suite, remote: Key) -> SrtpKeys {
        let local = self.key(suite);
        SrtpKeys { suite, local, remote }
    }

    /// The line to use and what of it.
    fn pick(&self, offer: &Description) -> Result<(usize, Picked), NegotiateError> {
        let mut error = NegotiateError::NoAudio;
        let mut best: Option<(usize, Picked)> = None;
        for (index, media) in offer.media.iter().enumerate() {
            if media.kind != "audio" || media.port == 0 || !rtp(&media.proto) {
                continue;
            }
            match self.pick_from(offer, media) {
                Ok(picked) => {
                    // The line that is in use stays; then an encrypted one; then the first.
                    let stays = self.agreed.is_some() && index == self.index;
                    let better = match &best {
                        None => true,
                        Some((_, other)) => stays || (picked.is_encrypted() && !other.is_encrypted()),
                    };
                    if better {
                        best = Some((index, picked));
                    }
                    if stays {
                        break;
                    }
                }
                Err(reason) => error = reason,
            }
        }
        best.ok_or(error)
    }

    fn pick_from(&self, offer: &Description, media: &Media) -> Result<Picked, NegotiateError> {
        let refused = |why| Err(NegotiateError::Encryption(why));
        let (crypto, dtls) = match (secure(&media.proto), self.policy.srtp) {
            (false, SrtpPolicy::Required | SrtpPolicy::Dtls) => {
                return refused("encryption (RTP/SAVP) is required and not offered");
            }
            (true, SrtpPolicy::Never) => return refused("encryption is offered and switched off here"),
            (false, _) => (None, None),
            (true, _) => {
                let theirs = Theirs::of(offer, media).filter(|_| self.local.dtls.is_some());
                let sdes = media.crypto.first().cloned().filter(|_| !media.proto.starts_with(DTLS));
                match (sdes, theirs) {
                    (Some(crypto), _) => (Some(crypto), None),
                    (None, Some(theirs)) => (None, Some(theirs)),
                    (None, None) => {
                        return refused(
                            "encryption is offered with neither an a=crypto line that we support nor a fingerprint",
                        );
                    }
                }
            }
        };
        for codec in &self.policy.codecs {
            if let Some(payload_type) = media.payload_type(*codec) {
                return Ok(Picked { codec: *codec, payload_type, crypto, dtls });
            }
        }
        let ours: Vec<_> = self.policy.codecs.iter().map(|c| c.name()).collect();
        Err(NegotiateError::NoCommonCodec { ours: ours.join(" "), theirs: media.formats.join(" ") })
    }

    /// Events at the clock of the codec, else at any: peers that offer Opus beside 8 kHz events mean them.
    fn event(&self, media: &Media, codec: Codec) -> Option<(u8, u32)> {
        if !self.policy.telephone_event {
            return None;
        }
        let fitting = media.telephone_events().find(|(_, rate)| *rate == codec.clock_rate());
        fitting.or_else(|| media.telephone_events().next())
    }

    /// G.711 alone: the others have silence of their own, or a clock that the payload type is not for.
    fn noise(&self, theirs: &Media, codec: Codec) -> bool {
        self.policy.comfort_noise && codec.is_g711() && theirs.has_comfort_noise()
    }

    fn previous_proto(&self) -> String {
        let line = self.last.as_ref().and_then(|last| last.media.get(self.index));
        line.map_or_else(|| "RTP/AVP".to_owned(), |media| media.proto.clone())
    }

    fn fresh_audio(&self) -> Media {
        let codecs: Vec<_> = self.policy.codecs.iter().map(|codec| (*codec, offered_type(*codec))).collect();
        let mut events = Vec::new();
        if self.policy.telephone_event {
            for (payload_type, rate) in [(EVENTS_48K, 48_000), (EVENTS_8K, 8_000)] {
                if self.policy.codecs.iter().any(|c| c.clock_rate() == rate) {
                    events.push((payload_type, rate));
                }
            }
        }
        let keys = self.policy.srtp == SrtpPolicy::Required;
        let handshake = self.policy.srtp == SrtpPolicy::Dtls;
        let proto = match self.policy.srtp {
            SrtpPolicy::Required => "RTP/SAVP",
            SrtpPolicy::Dtls => "UDP/TLS/RTP/SAVP",
            SrtpPolicy::Never | SrtpPolicy::Allowed => "RTP/AVP",
        };
        let mut audio = self.audio(&codecs, &events, proto, self.policy.ptime);
        if self.policy.comfort_noise && self.policy.codecs.iter().any(|codec| codec.is_g711()) {
            audio.add_comfort_noise();
        }
        if keys {
            let lines = Suite::ALL.into_iter().zip(1..);
            audio.crypto = lines.map(|(suite, tag)| Crypto { tag, suite, key: self.key(suite) }).collect();
        }
        if handshake {
            // One port, so that one handshake does.
            audio.rtcp_mux = true;
            self.secured(&mut audio, None, "actpass");
        }
        audio
    }

    fn audio(&self, codecs: &[(Codec, u8)], events: &[(u8, u32)], proto: &str, ptime: u16) -> Media {
        let mut audio = Media {
            kind: "audio".to_owned(),
            port: self.local.port,
            proto: proto.to_owned(),
            ptime: Some(ptime),
            ..Media::default()
        };
        let mut add = |payload_type: u8, encoding: &str, clock_rate, channels| {
            audio.formats.push(payload_type.to_string());
            audio.rtpmaps.push(RtpMap { payload_type, encoding: encoding.to_owned(), clock_rate, channels });
        };
        for (codec, payload_type) in codecs {
            add(*payload_type, codec.name(), codec.clock_rate(), codec.channels());
        }
        for (payload_type, clock_rate) in events {
            add(*payload_type, "telephone-event", *clock_rate, 1);
        }
        for (codec, payload_type) in codecs {
            if *codec == Codec::Opus {
                let parameters = "useinbandfec=1".to_owned();
                audio.fmtps.push(Fmtp { payload_type: *payload_type, parameters });
            }
        }
        for (payload_type, _) in events {
            audio.fmtps.push(Fmtp { payload_type: *payload_type, parameters: "0-15".to_owned() });
        }
        audio
    }

    /// Wraps the lines, raising the version when anything changed (RFC 3264 section 8).
    fn describe(&mut self, media: Vec<Media>) -> Description {
        let address = self.local.address.to_string();
        let mut description = Description {
            origin: Origin {
                username: "-".to_owned(),
                session_id: self.local.session_id.to_string(),
                version: self.last.as_ref().map_or(1, |last| last.origin.version),
                address: address.clone(),
            },
            name: "-".to_owned(),
            connection: Some(address),
            direction: None,
            attributes: self.session_attributes(&media),
            media,
        };
        if self.last.as_ref().is_some_and(|last| *last != description) {
            description.origin.version += 1;
        }
        self.last = Some(description.clone());
        description
    }
}

struct Picked {
    codec: Codec,
    payload_type: u8,
    crypto: Option<Crypto>,
    dtls: Option<Theirs>,
}

impl Picked {
    fn is_encrypted(&self) -> bool {
        self.crypto.is_some() || self.dtls.is_some()
    }
}

/// The line that refuses `media`; it must keep a format (RFC 3264 section 6).
fn refused(media: &Media) -> Media {
    let (kind, proto, formats) = (media.kind.clone(), media.proto.clone(), media.formats.clone());
    // A line keeps its name, refused or not (RFC 5888 section 9.2).
    let attributes = dtls::mid(media).map(|mid| attribute("mid", mid)).into_iter().collect();
    Media { kind, proto, formats, attributes, ..Media::default() }
}

/// What the transports begin with that are keyed by a handshake (RFC 5764 section 8).
const DTLS: &str = "UDP/TLS/";

fn rtp(proto: &str) -> bool {
    let proto = proto.strip_prefix(DTLS).filter(|rest| secure(rest)).unwrap_or(proto);
    matches!(proto, "RTP/AVP" | "RTP/AVPF" | "RTP/SAVP" | "RTP/SAVPF")
}

fn secure(proto: &str) -> bool {
    proto.ends_with("/SAVP") || proto.ends_with("/SAVPF")
}

#[cfg(test)]
mod tests;
