//! Builds a session's connection and turns an offer into an answer.
//!
//! Owns nothing after it returns. The answer is complete: it names our candidates, so a peer that cannot trickle
//! works.
//!
//! # Why
//! - The agent believes it is bound to a loopback port of its own (see [`super::runtime`]), so its candidates are
//!   taken out of the answer and the addresses of the shared port put in.
//! - Our ICE credentials are the stack's own, read from the answer, rather than fixed by us: fixed ones would
//!   survive an ICE restart, which must change them (RFC 8445 section 9).
//! - Only the session's codec, the redundant form of Opus and telephone events are registered, so whatever else is offered is
//!   declined by the stack. Redundant packets stand first in the answer: that is what has a browser send them (RFC 3264 section
//!   6.1).
//! - Packets that are missing are asked for again (RFC 4585 section 6.2.1) only of peers that offer it, and only as long as the
//!   buffer of what is heard waits for them. What peers say of each packet (transport-wide feedback) is read by [`Reports`].

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use ::webrtc::data_channel::DataChannel;
use ::webrtc::error::Error;
use ::webrtc::media_stream::track_local::TrackLocal;
use ::webrtc::media_stream::track_local::static_rtp::TrackLocalStaticRTP;
use ::webrtc::media_stream::track_remote::TrackRemote;
use ::webrtc::peer_connection::crypto::RTCCryptoProvider;
use ::webrtc::peer_connection::{
    MediaEngine, PeerConnection, PeerConnectionBuilder, PeerConnectionEventHandler, RTCBundlePolicy, RTCCertificate,
    RTCConfigurationBuilder, RTCIceCandidateInit, RTCIceGatheringState, RTCIceServer, RTCPeerConnectionState,
    RTCSessionDescription, Registry, SettingEngineBuilder, configure_rtcp_reports,
};
use ::webrtc::rtp_transceiver::RtpSender;
use rtc::ice::mdns::MulticastDnsMode;
use rtc::interceptor::{NackGeneratorBuilder, NackResponderBuilder, Slot, TwccReceiverBuilder, TwccSenderBuilder};
use rtc::media_stream::MediaStreamTrack;
use rtc::peer_connection::configuration::media_engine::{
    MIME_TYPE_G722, MIME_TYPE_OPUS, MIME_TYPE_PCMA, MIME_TYPE_PCMU, MIME_TYPE_TELEPHONE_EVENT,
};
use rtc::peer_connection::configuration::setting_engine::SctpMaxMessageSize;
use rtc::rtp_transceiver::rtp_sender::{
    RTCPFeedback, RTCRtpCodec, RTCRtpCodecParameters, RTCRtpCodingParameters, RTCRtpEncodingParameters,
    RTCRtpHeaderExtensionCapability, RtpCodecKind,
};
use tokio::sync::{Notify, mpsc, watch};

use super::offer::{Candidate, Offer, judge};
use super::relay::Server;
use super::runtime::SessionRuntime;
use super::socket::Seat;
use super::trickle::candidate_lines;
use super::{IceServer, WebRtcError};
use crate::clock;
use crate::media::leg::{Codec, LegEnd, MediaFormat};
use crate::media::packets::short_frames;
use crate::media::webrtc::{Arrival, Driver, Parts, Progress, Reports, rtvi};
use crate::reach::{self, Scope};

/// The label of the data channel that carries the agent's frames.
pub(super) const CHANNEL: &str = "agent";

/// RFC 2198 section 5; the stack has no name for it.
const MIME_TYPE_RED: &str = "audio/red";
/// A peer that is silent this long is shown as disconnected, and after [`FAILED`] more as lost.
const DISCONNECTED: Duration = Duration::from_secs(5);
const FAILED: Duration = Duration::from_secs(7);
const KEEP_ALIVE: Duration = Duration::from_secs(2);
/// Gathering only lists sockets that exist, so this is for a driver that does not run at all.
const GATHERING: Duration = Duration::from_secs(5);
/// How long an answer waits for the TURN server: two round trips, and one more for a packet that is lost.
const RELAYING: Duration = Duration::from_secs(2);
/// How often packets that are missing are asked for, and how often one of them: what is heard waits for 120 ms at most.
const ASKING: Duration = Duration::from_millis(30);
const ASKED: u16 = 3;
/// Packets that a peer may ask for again: 1.3 s. The stack wants a power of two.
const REPEATABLE: u16 = 64;
/// draft-holmer-rmcat-transport-wide-cc-extensions-01: the header extension.
const TRANSPORT_CC: &str = "http://www.ietf.org/id/draft-holmer-rmcat-transport-wide-cc-extensions-01";
/// How often peers are told what has come of theirs. Browsers take 50 to 250 ms; at one stream of sound the longest will do.
const TELLING: Duration = Duration::from_millis(250);
/// One message of text; RFC 8831 section 6.6 has senders keep to 16 kB anyway.
const MESSAGE_BYTES: u32 = 64 * 1024;
const RECEIVE_BYTES: u32 = 256 * 1024;
const SEND_BYTES: usize = 256 * 1024;
/// Tracks and channels that the call task has not yet looked at.
const ARRIVALS: usize = 8;
/// Data channels of other labels that are kept open and emptied.
const FOREIGN_CHANNELS: usize = 8;
/// Nearest to the wire, or it would not see the sender reports that the stage at slot 11000 makes.
const REPORTS_SLOT: usize = 500;

/// What every session shares.
pub(super) struct Common {
    /// The one provider of the process.
    pub(super) crypto: Arc<dyn RTCCryptoProvider>,
    /// Of the DTLS handshakes, generated at start.
    pub(super) certificate: RTCCertificate,
    /// What the port is bound to.
    pub(super) local: std::net::SocketAddr,
    /// What peers are told.
    pub(super) advertised: Vec<std::net::SocketAddr>,
    /// Whether they are listening for TCP too.
    pub(super) tcp: bool,
    /// Whether peers are asked to leave out silence.
    pub(super) dtx: bool,
    /// The TURN server by which they are reached as well, and the login there.
    pub(super) relay: Option<(Server, IceServer)>,
}

impl Common {
    /// How near the nearest address is that peers are told.
    fn scope(&self) -> Scope {
        let scopes = self.advertised.iter().filter_map(|address| reach::scope(address.ip()));
        scopes.min().unwrap_or(Scope::Global)
    }

    /// Our candidates, as lines of SDP.
    fn candidates(&self) -> impl Iterator<Item = String> {
        candidate_lines(&self.advertised, self.tcp)
    }
}

/// A connection that has been built but not negotiated.
pub(super) struct Connection {
    pub(super) peer: Arc<dyn PeerConnection>,
    pub(super) sender: Arc<dyn RtpSender>,
    pub(super) track: Arc<TrackLocalStaticRTP>,
    pub(super) ssrc: u32,
    pub(super) driver: Driver,
    pub(super) progress: watch::Sender<Progress>,
    events: Arc<Events>,
    arrivals: Option<mpsc::Receiver<Arrival>>,
    reports: watch::Receiver<Option<crate::media::leg::PeerReport>>,
}

/// Our side after a negotiation.
#[derive(Clone, Debug)]
pub(super) struct Local {
    /// The answer to send.
    pub(super) sdp: String,
    /// Our ICE fragment.
    pub(super) fragment: String,
    /// Our ICE password.
    pub(super) password: String,
    /// `mid` of the first section.
    pub(super) mid: String,
    /// Our candidates, as lines of SDP.
    pub(super) candidates: Vec<String>,
}

impl Connection {
    /// A connection of one stream of `codec` each way.
    ///
    /// # Errors
    /// The stack cannot be set up, such as when no more sockets can be opened.
    pub(super) async fn build(common: &Common, seat: Arc<Seat>, codec: Codec) -> Result<Self, WebRtcError> {
        let ssrc = rand::random::<u32>();
        let driver = Driver::default();
        let progress = watch::Sender::new(Progress::Connecting);
        let (report, reports) = watch::channel(None);
        // overflow: refused, by `Events`
        let (arrive, arrivals) = mpsc::channel(ARRIVALS);
        let events = Arc::new(Events {
            progress: progress.clone(),
            arrive,
            gathered: Notify::new(),
            foreign: Arc::new(AtomicUsize::new(0)),
        });
        let settings = SettingEngineBuilder::new()
            .with_crypto_provider(common.crypto.clone())
            .with_ice_timeouts(Some(DISCONNECTED), Some(FAILED), Some(KEEP_ALIVE))
            .with_multicast_dns_mode(MulticastDnsMode::Disabled)
            .with_sctp_max_message_size(SctpMaxMessageSize::Bounded(MESSAGE_BYTES))
            .with_sctp_max_receive_buffer_size(RECEIVE_BYTES)
            .build();
        let configuration = RTCConfigurationBuilder::new()
            .with_bundle_policy(RTCBundlePolicy::MaxBundle)
            .with_ice_servers(servers(common))
            .with_certificates(vec![common.certificate.clone()])
            .build();
        // Those of what was not agreed see no stream and do nothing.
        let missing = NackGeneratorBuilder::new().with_interval(ASKING).with_max_nacks_per_packet(ASKED);
        let interceptors = configure_rtcp_reports(Registry::new())
            .with(Slot::from(REPORTS_SLOT), Reports::new(ssrc, report))
            .with(Slot::TwccSender, TwccSenderBuilder::new().build())
            .with(Slot::TwccReceiver, TwccReceiverBuilder::new().with_interval(TELLING).build())
            .with(Slot::NackResponder, NackResponderBuilder::new().with_size(REPEATABLE).build())
            .with(Slot::NackGenerator, missing.build());
        // The agent binds a loopback port of each family that the shared one carries, and gets a queue instead.
        let sockets = match common.local.ip() {
            ip if ip.is_ipv4() => vec!["127.0.0.1:0"],
            ip if ip.is_unspecified() => vec!["127.0.0.1:0", "[::1]:0"],
            _ => vec!["[::1]:0"],
        };
        let peer = PeerConnectionBuilder::new()
            .with_configuration(configuration)
            .with_media_engine(codecs(codec)?)
            .with_setting_engine(settings)
            .with_interceptor_registry(interceptors)
            .with_runtime(Arc::new(SessionRuntime::new(seat, driver.clone())))
            .with_handler(events.clone())
            .with_data_channel_send_buffer_limit(SEND_BYTES)
            .with_tcp_addrs(if common.tcp { sockets.clone() } else { Vec::new() })
            .with_udp_addrs(sockets)
            .build()
            .await?;
        let peer: Arc<dyn PeerConnection> = Arc::new(peer);
        let track = Arc::new(TrackLocalStaticRTP::new(MediaStreamTrack::new(
            "antiphon".to_owned(),
            "speech".to_owned(),
            "speech".to_owned(),
            RtpCodecKind::Audio,
            vec![RTCRtpEncodingParameters {
                rtp_coding_parameters: RTCRtpCodingParameters { ssrc: Some(ssrc), ..Default::default() },
                active: true,
                codec: capability(codec),
                ..Default::default()
            }],
        )));
        match peer.add_track(track.clone() as Arc<dyn TrackLocal>).await {
            Ok(sender) => {
                let arrivals = Some(arrivals);
                Ok(Self { peer, sender, track, ssrc, driver, progress, events, arrivals, reports })
            }
            Err(error) => {
                // A connection that is only dropped keeps its task.
                let _ = peer.close().await;
                Err(error.into())
            }
        }
    }

    /// Answers `offer`: the first one of a session, or one that restarts ICE.
    ///
    /// # Errors
    /// [`WebRtcError::BadOffer`] when the stack will not have it.
    pub(super) async fn answer(&self, common: &Common, offer: &Offer) -> Result<Local, WebRtcError> {
        let refused = |error: Error| WebRtcError::BadOffer(format!("the offer cannot be answered: {error}"));
        let remote = RTCSessionDescription::offer(offer.text.clone()).map_err(refused)?;
        self.peer.set_remote_description(remote).await.map_err(refused)?;
        let answer = self.peer.create_answer(None).await.map_err(refused)?;
        self.peer.set_local_description(answer).await.map_err(refused)?;
        self.add_candidates(common, &offer.candidates).await;
        // The agent takes a check only once it has listed its sockets, which is the driver's next turn.
        let patience = if common.relay.is_some() { RELAYING } else { GATHERING };
        let gathered = tokio::time::timeout(patience, self.events.gathered.notified()).await.is_ok();
        if !gathered && common.relay.is_some() {
            // The sockets were listed first. Browsers that reach the port are served without the relay.
            tracing::warn!("the TURN server of [webrtc] turn does not answer");
        } else if !gathered {
            return Err(WebRtcError::Stack(Error::Other("ICE gathering did not end".to_owned())));
        }
        let description = self.peer.local_description().await;
        let text = description.map(|description| description.sdp).unwrap_or_default();
        local(&text, common, offer.red)
    }

    /// Hands the stack those of `candidates` that could reach us; says how many were no candidates at all.
    pub(super) async fn add_candidates(&self, common: &Common, candidates: &[String]) -> usize {
        let mut malformed = 0;
        let own = common.scope();
        for candidate in candidates {
            match judge(candidate, common.local, own) {
                Candidate::Foreign => {}
                Candidate::Malformed => malformed += 1,
                Candidate::Usable => {
                    let init = RTCIceCandidateInit { candidate: candidate.clone(), ..Default::default() };
                    if let Err(error) = self.peer.add_ice_candidate(init).await {
                        tracing::debug!(%error, "a candidate was not accepted");
                        malformed += 1;
                    }
                }
            }
        }
        malformed
    }

    /// What the leg is made of; once, after [`Connection::answer`].
    ///
    /// # Errors
    /// [`WebRtcError::BadOffer`] when no stream was agreed.
    pub(super) async fn parts(&mut self, offer: &Offer) -> Result<Parts, WebRtcError> {
        let none = || WebRtcError::BadOffer("no stream of sound was agreed: offer `opus/48000/2`".to_owned());
        // Not a constant: an answer keeps the offer's number, and a packet of another one is silently lost.
        let agreed = self.sender.get_parameters().await?.rtp_parameters.codecs;
        let number = |mime: &str| {
            let mut found = agreed.iter().filter(|codec| codec.rtp_codec.mime_type.eq_ignore_ascii_case(mime));
            found.next().map(|codec| (codec.payload_type, codec.rtp_codec.clock_rate))
        };
        let (payload_type, _) = number(&capability(offer.codec).mime_type).ok_or_else(none)?;
        let telephone_event = number(MIME_TYPE_TELEPHONE_EVENT);
        let red = number(MIME_TYPE_RED).map(|(red, _)| red).filter(|_| offer.red.is_some());
        let arrivals = self.arrivals.take().ok_or_else(none)?;
        Ok(Parts {
            format: MediaFormat {
                codec: offer.codec,
                payload_type,
                telephone_event,
                opus_fec: offer.opus_fec,
                opus_dtx: offer.opus_dtx,
                continuous: false,
                short_frames: short_frames(offer.codec, offer.ptime),
            },
            red,
            ssrc: self.ssrc,
            connection: self.peer.clone(),
            track: self.track.clone(),
            driver: self.driver.clone(),
            progress: self.progress.clone(),
            arrivals,
            reports: self.reports.clone(),
            channels: offer.channels,
            ptime: offer.ptime,
        })
    }
}

/// Reads the stack's answer and puts our addresses in; and, with `red`, what redundant packets carry.
fn local(answer: &str, common: &Common, red: Option<(u8, u8)>) -> Result<Local, WebRtcError> {
    let mut local = Local {
        sdp: String::with_capacity(answer.len() + 128),
        fragment: String::new(),
        password: String::new(),
        mid: "0".to_owned(),
        candidates: common.candidates().collect(),
    };
    // Listed before the first section that shows them: what the stack was given by a TURN server is as good as ours.
    let relayed = answer.lines().map(str::trim_end).filter_map(relayed);
    for line in relayed {
        if !local.candidates.contains(&line) {
            local.candidates.push(line);
        }
    }
    let mut sections = 0;
    let mut open = false;
    let opus = answer.lines().find_map(|line| line.strip_prefix("a=rtpmap:")?.trim_end().strip_suffix(" opus/48000/2"));
    let dtx = opus.filter(|_| common.dtx).map(|number| format!("a=fmtp:{number} "));
    for line in answer.lines().map(str::trim_end) {
        if let Some(section) = line.strip_prefix("m=") {
            if open {
                push_candidates(&mut local.sdp, &local.candidates);
            }
            sections += 1;
            // A declined section has port 0 and no transport.
            open = section.split(' ').nth(1).is_some_and(|port| port != "0");
        }
        if line.starts_with("a=candidate:") || line == "a=end-of-candidates" {
            continue;
        }
        if let Some(value) = line.strip_prefix("a=ice-ufrag:") {
            value.clone_into(&mut local.fragment);
        } else if let Some(value) = line.strip_prefix("a=ice-pwd:") {
            value.clone_into(&mut local.password);
        } else if let (Some(value), 1) = (line.strip_prefix("a=mid:"), sections) {
            value.clone_into(&mut local.mid);
        }
        match red {
            Some((red, _)) if line.starts_with("m=audio ") => local.sdp.push_str(&preferring(line, red)),
            _ if line.starts_with("a=fmtp:") => {
                let line = of_one_channel(line);
                local.sdp.push_str(&line);
                // RFC 7587 section 6.1: what the one who receives prefers.
                if dtx.as_ref().is_some_and(|opus| line.starts_with(opus)) && !line.contains("usedtx=") {
                    local.sdp.push_str(";usedtx=1");
                }
            }
            _ => local.sdp.push_str(line),
        }
        local.sdp.push_str("\r\n");
        if let Some((red, opus)) = red
            && line.starts_with(&format!("a=rtpmap:{red} "))
        {
            local.sdp.push_str(&format!("a=fmtp:{red} {opus}/{opus}\r\n"));
        }
    }
    if open {
        push_candidates(&mut local.sdp, &local.candidates);
    }
    if local.fragment.is_empty() || local.password.is_empty() {
        return Err(WebRtcError::BadOffer("the offer leaves nothing to answer: every section was declined".to_owned()));
    }
    Ok(local)
}

/// The parameters of a format without those that ask for two channels or announce them (RFC 7587 section 6.1): the stack
/// gives the peer its own ones back, but what we hear and say is one.
fn of_one_channel(line: &str) -> String {
    let Some((format, parameters)) = line.split_once(' ') else { return line.to_owned() };
    let one = |parameter: &&str| !["stereo=", "sprop-stereo="].iter().any(|two| parameter.trim().starts_with(*two));
    let parameters: Vec<&str> = parameters.split(';').filter(one).collect();
    format!("{format} {}", parameters.join(";"))
}

/// An `m=` line with the format `first` in front of the others, if it has it.
fn preferring(line: &str, first: u8) -> String {
    let first = first.to_string();
    let mut words: Vec<&str> = line.split(' ').collect();
    // Media, port and protocol; then the formats.
    if let Some(at) = words.iter().skip(3).position(|word| *word == first) {
        let word = words.remove(at + 3);
        words.insert(3, word);
    }
    words.join(" ")
}

/// A candidate at a TURN server, without the address that it stands for: that never leaves this process.
fn relayed(line: &str) -> Option<String> {
    let (candidate, _) = line.strip_prefix("a=candidate:")?.split_once(" typ relay")?;
    Some(format!("a=candidate:{candidate} typ relay raddr 0.0.0.0 rport 0"))
}

/// What the stack is to gather from.
fn servers(common: &Common) -> Vec<RTCIceServer> {
    let Some((server, login)) = &common.relay else { return Vec::new() };
    let (username, credential) = login.credentials(clock::wall()).unwrap_or_default();
    vec![RTCIceServer { urls: vec![server.url()], username, credential }]
}

fn push_candidates(sdp: &mut String, candidates: &[String]) {
    for line in candidates {
        sdp.push_str(line);
        sdp.push_str("\r\n");
    }
    sdp.push_str("a=end-of-candidates\r\n");
}

fn codecs(codec: Codec) -> Result<MediaEngine, Error> {
    let mut engine = MediaEngine::default();
    // One is enough: the stack matches by name, and takes the clock rate of the offer.
    let events =
        RTCRtpCodec { mime_type: MIME_TYPE_TELEPHONE_EVENT.to_owned(), clock_rate: 48_000, ..RTCRtpCodec::default() };
    let red =
        RTCRtpCodec { mime_type: MIME_TYPE_RED.to_owned(), clock_rate: 48_000, channels: 2, ..RTCRtpCodec::default() };
    let red = (codec == Codec::Opus).then_some((63, red));
    // The numbers are the offer's, whatever stands here.
    for (payload_type, rtp_codec) in [(111, capability(codec))].into_iter().chain(red).chain([(110, events)]) {
        let codec = RTCRtpCodecParameters { rtp_codec, payload_type };
        engine.register_codec(codec, RtpCodecKind::Audio)?;
    }
    for kind in ["nack", "transport-cc"] {
        let feedback = RTCPFeedback { typ: kind.to_owned(), parameter: String::new() };
        engine.register_feedback(feedback, RtpCodecKind::Audio);
    }
    let numbered = RTCRtpHeaderExtensionCapability { uri: TRANSPORT_CC.to_owned() };
    engine.register_header_extension(numbered, RtpCodecKind::Audio, None)?;
    Ok(engine)
}

/// `codec` as the stack knows it.
fn capability(codec: Codec) -> RTCRtpCodec {
    let (mime, channels, parameters) = match codec {
        Codec::Opus => (MIME_TYPE_OPUS, 2, "minptime=10;useinbandfec=1"),
        Codec::G722 => (MIME_TYPE_G722, 0, ""),
        Codec::Pcmu => (MIME_TYPE_PCMU, 0, ""),
        Codec::Pcma => (MIME_TYPE_PCMA, 0, ""),
    };
    RTCRtpCodec {
        mime_type: mime.to_owned(),
        clock_rate: codec.clock_rate(),
        channels,
        sdp_fmtp_line: parameters.to_owned(),
        rtcp_feedback: Vec::new(),
    }
}

/// Runs on the driver's task: hands over and returns at once.
struct Events {
    progress: watch::Sender<Progress>,
    arrive: mpsc::Sender<Arrival>,
    gathered: Notify,
    foreign: Arc<AtomicUsize>,
}

#[async_trait::async_trait]
impl PeerConnectionEventHandler for Events {
    async fn on_ice_gathering_state_change(&self, state: RTCIceGatheringState) {
        if state == RTCIceGatheringState::Complete {
            self.gathered.notify_one();
        }
    }

    async fn on_connection_state_change(&self, state: RTCPeerConnectionState) {
        let next = match state {
            RTCPeerConnectionState::Connected => Progress::Connected,
            RTCPeerConnectionState::Failed if *self.progress.borrow() == Progress::Connecting => {
                Progress::Ended(LegEnd::Failed)
            }
            RTCPeerConnectionState::Failed => Progress::Ended(LegEnd::Lost),
            RTCPeerConnectionState::Closed => Progress::Ended(LegEnd::Remote),
            _ => return,
        };
        Progress::advance(&self.progress, next);
    }

    async fn on_track(&self, track: Arc<dyn TrackRemote>) {
        if track.kind().await == RtpCodecKind::Audio {
            // overflow: refused
            let _ = self.arrive.try_send(Arrival::Track(track));
        }
    }

    async fn on_data_channel(&self, channel: Arc<dyn DataChannel>) {
        if channel.label().await.is_ok_and(|label| label == CHANNEL) {
            // overflow: refused. What is dropped unregisters itself, and its messages with it.
            let _ = self.arrive.try_send(Arrival::Channel(channel));
            return;
        }
        if channel.label().await.is_ok_and(|label| label == rtvi::CHANNEL) {
            // overflow: refused, as above.
            let _ = self.arrive.try_send(Arrival::Client(channel));
            return;
        }
        if self.foreign.fetch_add(1, Ordering::Relaxed) >= FOREIGN_CHANNELS {
            self.foreign.fetch_sub(1, Ordering::Relaxed);
            return;
        }
        // Emptied, because a channel that is not read holds up all channels of the connection.
        let foreign = self.foreign.clone();
        tokio::spawn(async move {
            while channel.poll().await.is_some() {}
            foreign.fetch_sub(1, Ordering::Relaxed);
        });
    }
}
