//! The media side of a call, as the call task sees it: SIP/RTP, WebRTC or a test's loop.

use std::future::Future;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use serde::Serialize;

/// What is spoken on the wire.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Codec {
    /// RFC 7587; RTP clock 48 kHz.
    Opus,
    /// G.722; RTP clock 8 kHz by historic mistake (RFC 3551 section 4.5.2), audio at 16 kHz.
    G722,
    /// G.711 mu-law at 8 kHz.
    Pcmu,
    /// G.711 A-law at 8 kHz.
    Pcma,
}

impl Codec {
    /// All of them, the best first.
    pub const ALL: [Codec; 4] = [Codec::Opus, Codec::G722, Codec::Pcmu, Codec::Pcma];

    /// The codec of a [label](Self::label); `None`: no codec has it.
    pub fn labelled(label: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|codec| codec.label() == label)
    }

    /// What an `rtpmap` of SDP says behind the payload type, in lower case: name, clock and channels other than one.
    pub fn encoding(self) -> &'static str {
        match self {
            Codec::Opus => "opus/48000/2",
            Codec::G722 => "g722/8000",
            Codec::Pcmu => "pcmu/8000",
            Codec::Pcma => "pcma/8000",
        }
    }

    /// RTP timestamp units per second.
    pub fn clock_rate(self) -> u32 {
        match self {
            Codec::Opus => 48_000,
            Codec::G722 | Codec::Pcmu | Codec::Pcma => 8_000,
        }
    }

    /// RTP timestamp units of one 20 ms frame.
    pub fn frame_ticks(self) -> u32 {
        self.clock_rate() / 50
    }

    /// The metric label and SDP encoding name in lower case.
    pub fn label(self) -> &'static str {
        match self {
            Codec::Opus => "opus",
            Codec::G722 => "g722",
            Codec::Pcmu => "pcmu",
            Codec::Pcma => "pcma",
        }
    }
}

/// What was agreed for the audio the gateway sends and receives.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MediaFormat {
    /// Codec both ways.
    pub codec: Codec,
    /// Negotiated payload type of what is sent.
    pub payload_type: u8,
    /// Negotiated payload type of RFC 4733 events and its clock rate, when there is one.
    pub telephone_event: Option<(u8, u32)>,
    /// Whether Opus may carry in-band FEC (the peer's `useinbandfec`).
    pub opus_fec: bool,
    /// Whether the peer would rather be sent no silence where the codec is Opus (its `usedtx`).
    pub opus_dtx: bool,
    /// Whether the peer wants packets also in silence (most telephone trunks do); a few are spared in front of speech
    /// ([`super::playout`]).
    pub continuous: bool,
    /// Whether Opus is made in frames of 10 ms, two of them in each payload, for packets that are no multiple of 20 ms.
    pub short_frames: bool,
}

impl MediaFormat {
    /// Payload type 0, no events, no FEC, nothing sent in silence: what a leg that has agreed on nothing more would have.
    pub fn plain(codec: Codec) -> Self {
        Self {
            codec,
            payload_type: 0,
            telephone_event: None,
            opus_fec: false,
            opus_dtx: false,
            continuous: false,
            short_frames: false,
        }
    }
}

/// One RTP packet to send, without the fields the leg itself knows (SSRC, extensions, protection).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OutPacket {
    /// RTP payload type.
    pub payload_type: u8,
    /// First packet after silence.
    pub marker: bool,
    /// RTP sequence number.
    pub sequence: u16,
    /// RTP timestamp.
    pub timestamp: u32,
    /// The encoded frame.
    pub payload: Bytes,
}

impl OutPacket {
    /// The packet under the leg's SSRC.
    pub fn with_ssrc(self, ssrc: u32) -> rtc_rtp::Packet {
        let header = rtc_rtp::Header {
            version: 2,
            marker: self.marker,
            payload_type: self.payload_type,
            sequence_number: self.sequence,
            timestamp: self.timestamp,
            ssrc,
            ..rtc_rtp::Header::default()
        };
        rtc_rtp::Packet { header, payload: self.payload }
    }
}

/// One RTP packet that arrived, already authenticated and decrypted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InPacket {
    /// RTP payload type.
    pub payload_type: u8,
    /// Marker bit.
    pub marker: bool,
    /// RTP sequence number.
    pub sequence: u16,
    /// RTP timestamp.
    pub timestamp: u32,
    /// Sender.
    pub ssrc: u32,
    /// When it arrived.
    pub arrived: Instant,
    /// The encoded frame.
    pub payload: Bytes,
}

/// What a receiver report of the peer says about the stream we send (RFC 3550 section 6.4.1).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PeerReport {
    /// Extended highest sequence number the peer has received.
    pub highest_sequence: u32,
    /// Fraction lost since the report before, 0..=1.
    pub fraction_lost: f32,
    /// Packets lost in all.
    pub lost: i32,
    /// Interarrival jitter in RTP timestamp units.
    pub jitter: u32,
    /// Round trip, when it can be computed.
    pub round_trip: Option<Duration>,
}

/// What arrived of a peer's stream.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Arrivals {
    /// Packets that were sent, by their numbers.
    pub expected: u32,
    /// Packets that came, duplicates included.
    pub received: u32,
    /// Interarrival jitter (RFC 3550 section 6.4.1).
    pub jitter: Duration,
}

impl Arrivals {
    /// Packets that never came.
    pub fn lost(&self) -> u32 {
        self.expected.saturating_sub(self.received)
    }
}

/// Why a call ends or came to nothing, as the signalling of its peer says (`Reason`, RFC 3326).
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct PeerCause {
    /// Cause of ITU-T Q.850, 1 to 127: 16 is normal clearing, 17 busy, 34 no circuit.
    pub q850: Option<u8>,
    /// SIP status, 100 to 699.
    pub sip: Option<u16>,
    /// For people, as the peer wrote it: of the first of both that has one.
    pub text: Option<String>,
}

/// What happened on a leg.
#[derive(Clone, Debug, PartialEq)]
pub enum LegEvent {
    /// There is sound before the call is answered.
    Early {
        /// Whether packets of ours may leave.
        sends: bool,
        /// Whether they may say something: where we are called. Who has not answered us is not spoken to.
        speaks: bool,
    },
    /// Media may flow (ICE and DTLS done; SIP: ACK seen).
    Connected,
    /// A packet of the negotiated audio or telephone-event payload types.
    Rtp(InPacket),
    /// A digit that came outside RTP (SIP INFO).
    Digit(char),
    /// A text message on the WebRTC data channel `agent`.
    Message(String),
    /// The peer wrote it, in place of saying it.
    Prompt(String),
    /// The peer's view of what we send.
    Report(PeerReport),
    /// The peer put us on hold or took us off (re-INVITE direction).
    Held(bool),
    /// The agreed format changed (re-INVITE).
    Format(MediaFormat),
    /// The peer's answer to [`MediaLeg::hold`]. Of requests that overtake one another only the last is answered.
    HoldAnswered {
        /// What was asked for.
        hold: bool,
        /// Why the peer did not do it.
        outcome: Result<(), String>,
    },
    /// The peer's answer to [`MediaLeg::transfer`]: it has taken the task on (how it goes arrives as
    /// [`LegEvent::TransferEnded`] or as its hang-up), or says why not.
    TransferAnswered(Result<(), String>),
    /// What became of a transfer that the peer had taken on.
    TransferEnded(Result<(), String>),
    /// How far the peer is with a transfer that it has taken on: the SIP status that its target answers with.
    TransferProgress(u16),
    /// Another party took the peer's place: the peer handed the call over to it (SIP REFER), or it was sent here (INVITE with
    /// Replaces). Its address.
    Moved(String),
    /// Why the peer ends the call. [`LegEvent::Closed`] follows.
    Cause(PeerCause),
    /// The leg is over; nothing follows.
    Closed(LegEnd),
}

/// Why a leg is over. Closed: also a metric label.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum LegEnd {
    /// The peer hung up (BYE, DELETE, DTLS close).
    Remote,
    /// We hung up.
    Local,
    /// The peer vanished: no media or ICE consent.
    Lost,
    /// The transport failed.
    Failed,
}

/// The media side of one call. It lives on one media shard: it is built elsewhere, moved there, and
/// [`MediaLeg::attach`] is the first call there. Dropping it ends the session without ceremony.
pub trait MediaLeg: Send + 'static {
    /// `sip` or `webrtc`: the metric label.
    fn kind(&self) -> &'static str;

    /// What was agreed.
    fn format(&self) -> &MediaFormat;

    /// Registers sockets with the shard's runtime; called once, first, on the shard.
    fn attach(&mut self) -> impl Future<Output = std::io::Result<()>> + Send;

    /// Sends one packet now. Never waits on the network: a full socket buffer loses the packet, counted.
    ///
    /// # Errors
    /// The leg is over.
    fn send(&mut self, packet: OutPacket) -> impl Future<Output = Result<(), LegEnd>> + Send;

    /// Sends text on the data channel, where there is one; `false` when there is none or it is full.
    fn send_message(&mut self, text: &str) -> bool;

    /// The next event. Cancel safe.
    fn recv(&mut self) -> impl Future<Output = LegEvent> + Send;

    /// Ends the session properly (BYE, DTLS close).
    fn hang_up(&mut self) -> impl Future<Output = ()> + Send;

    /// Asks the peer to hold (`true`) or resume, and returns at once: media goes on while it makes up its mind, and
    /// the answer arrives as [`LegEvent::HoldAnswered`]. Legs without hold do nothing, and say nothing.
    ///
    /// # Errors
    /// It cannot be asked for now; the text says why, for the agent. No answer follows.
    fn hold(&mut self, hold: bool) -> Result<(), String>;

    /// What has arrived of the peer's stream; `None`: nothing yet, or the leg does not count.
    fn arrivals(&self) -> Option<Arrivals> {
        None
    }

    /// Asks the peer to go over to `to` (SIP REFER), and returns at once; the answer arrives as
    /// [`LegEvent::TransferAnswered`]. `limit`: how long the peer may take to reach them; `None`: as long as telephones ring.
    ///
    /// # Errors
    /// As [`MediaLeg::hold`].
    fn transfer(&mut self, to: &str, attended: bool, limit: Option<Duration>) -> Result<(), String>;

    /// Name of the trunk at the other end, where it is one's.
    fn trunk(&self) -> Option<&Arc<str>> {
        None
    }

    /// Whether digits go beside the media (SIP INFO), by [`MediaLeg::dial`].
    fn signals_digits(&self) -> bool {
        false
    }

    /// Sends digits (`0`-`9`, `*`, `#`, `A`-`D`; `w` or `,` waits half a second) beside the media, where it does.
    ///
    /// # Errors
    /// They do not go there, or too many wait.
    fn dial(&mut self, _digits: &str) -> Result<(), String> {
        Err("digits go with the media".to_owned())
    }
}
