//! A browser-like peer on the `webrtc` crate, and a call that echoes, for the tests of the WebRTC leg.

#![allow(dead_code, reason = "each test binary uses its part")]

use std::future::Future;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use antiphon::media::leg::{LegEnd, LegEvent, MediaLeg, OutPacket};
use antiphon::media::webrtc::WebRtcLeg;
use antiphon::webrtc::{Gateway, WebRtcConfig};
use bytes::Bytes;
use rtc::ice::mdns::MulticastDnsMode;
use rtc::ice::network_type::NetworkType;
use rtc::media_stream::MediaStreamTrack;
use rtc::peer_connection::configuration::RTCOfferOptions;
use rtc::peer_connection::configuration::media_engine::{MIME_TYPE_OPUS, MIME_TYPE_TELEPHONE_EVENT};
use rtc::rtp;
use rtc::rtp_transceiver::rtp_sender::{
    RTCRtpCodec, RTCRtpCodecParameters, RTCRtpCodingParameters, RTCRtpEncodingParameters, RtpCodecKind,
};
use tokio::sync::{mpsc, watch};
use webrtc::data_channel::{DataChannel, DataChannelEvent};
use webrtc::media_stream::track_local::TrackLocal;
use webrtc::media_stream::track_local::static_rtp::TrackLocalStaticRTP;
use webrtc::media_stream::track_remote::{TrackRemote, TrackRemoteEvent};
use webrtc::peer_connection::{
    MediaEngine, PeerConnection, PeerConnectionBuilder, PeerConnectionEventHandler, RTCConfigurationBuilder,
    RTCIceCandidateInit, RTCIceGatheringState, RTCPeerConnectionIceEvent, RTCPeerConnectionState,
    RTCSessionDescription, Registry, SettingEngineBuilder, configure_rtcp_reports,
};
use webrtc::rtp_transceiver::{RTCRtpTransceiverDirection, RTCRtpTransceiverInit};
use webrtc::runtime::TokioRuntime;

/// What Firefox numbers Opus, so that a constant 111 anywhere shows.
pub(crate) const PEER_OPUS: u8 = 109;

/// And telephone events.
pub(crate) const PEER_EVENTS: u8 = 101;

pub(crate) async fn gateway(config: WebRtcConfig) -> Gateway {
    Gateway::start(config).await.expect("a free port")
}

/// Nothing here takes seconds on an idle machine; a busy one gets a minute.
pub(crate) async fn within<T>(what: &str, work: impl Future<Output = T>) -> T {
    match tokio::time::timeout(Duration::from_secs(60), work).await {
        Ok(value) => value,
        Err(_) => panic!("{what} did not happen in time"),
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Audio {
    SendRecv,
    RecvOnly,
    /// As `SendRecv`, by a peer whose network lets no UDP out.
    OverTcp,
}

pub(crate) struct Peer {
    pub(crate) connection: Arc<dyn PeerConnection>,
    pub(crate) channel: Option<Arc<dyn DataChannel>>,
    tcp: bool,
    track: Option<(Arc<TrackLocalStaticRTP>, u32)>,
    state: watch::Receiver<RTCPeerConnectionState>,
    gathered: watch::Receiver<bool>,
    tracks: mpsc::Receiver<Arc<dyn TrackRemote>>,
    remote: Option<Arc<dyn TrackRemote>>,
}

struct Events {
    state: watch::Sender<RTCPeerConnectionState>,
    gathered: watch::Sender<bool>,
    tracks: mpsc::Sender<Arc<dyn TrackRemote>>,
}

#[async_trait::async_trait]
impl PeerConnectionEventHandler for Events {
    async fn on_ice_candidate(&self, _: RTCPeerConnectionIceEvent) {}

    async fn on_ice_gathering_state_change(&self, state: RTCIceGatheringState) {
        if state == RTCIceGatheringState::Complete {
            self.gathered.send_replace(true);
        }
    }

    async fn on_connection_state_change(&self, state: RTCPeerConnectionState) {
        self.state.send_replace(state);
    }

    async fn on_track(&self, track: Arc<dyn TrackRemote>) {
        self.tracks.try_send(track).expect("one track");
    }
}

fn opus() -> RTCRtpCodec {
    RTCRtpCodec {
        mime_type: MIME_TYPE_OPUS.to_owned(),
        clock_rate: 48_000,
        channels: 2,
        sdp_fmtp_line: "minptime=10;useinbandfec=1".to_owned(),
        rtcp_feedback: Vec::new(),
    }
}

impl Peer {
    pub(crate) async fn new(audio: Audio, channel: Option<&str>) -> Self {
        let (state, state_seen) = watch::channel(RTCPeerConnectionState::New);
        let (gathered, gathered_seen) = watch::channel(false);
        let (tracks, tracks_seen) = mpsc::channel(4);
        let mut engine = MediaEngine::default();
        let codec = RTCRtpCodecParameters { rtp_codec: opus(), payload_type: PEER_OPUS };
        let mut codecs = vec![codec.clone()];
        engine.register_codec(codec, RtpCodecKind::Audio).expect("a codec");
        let events = RTCRtpCodec {
            mime_type: MIME_TYPE_TELEPHONE_EVENT.to_owned(),
            clock_rate: 8_000,
            ..RTCRtpCodec::default()
        };
        let codec = RTCRtpCodecParameters { rtp_codec: events, payload_type: PEER_EVENTS };
        codecs.push(codec.clone());
        engine.register_codec(codec, RtpCodecKind::Audio).expect("a codec");
        let settings = SettingEngineBuilder::new().with_multicast_dns_mode(MulticastDnsMode::Disabled);
        let (settings, udp, tcp) = match audio {
            Audio::OverTcp => (settings.with_network_types(vec![NetworkType::Tcp4]), vec![], vec!["127.0.0.1:0"]),
            Audio::SendRecv | Audio::RecvOnly => (settings, vec!["127.0.0.1:0"], vec![]),
        };
        let connection = PeerConnectionBuilder::new()
            .with_configuration(RTCConfigurationBuilder::new().build())
            .with_media_engine(engine)
            .with_setting_engine(settings.build())
            .with_interceptor_registry(configure_rtcp_reports(Registry::new()))
            .with_runtime(Arc::new(TokioRuntime))
            .with_handler(Arc::new(Events { state, gathered, tracks }))
            .with_udp_addrs(udp)
            .with_tcp_addrs(tcp)
            .build()
            .await
            .expect("a peer");
        let connection: Arc<dyn PeerConnection> = Arc::new(connection);
        let track = match audio {
            Audio::SendRecv | Audio::OverTcp => {
                let ssrc = rand::random::<u32>();
                let coding = RTCRtpEncodingParameters {
                    rtp_coding_parameters: RTCRtpCodingParameters { ssrc: Some(ssrc), ..Default::default() },
                    codec: opus(),
                    ..Default::default()
                };
                let track = Arc::new(TrackLocalStaticRTP::new(MediaStreamTrack::new(
                    "stream".to_owned(),
                    "microphone".to_owned(),
                    "microphone".to_owned(),
                    RtpCodecKind::Audio,
                    vec![coding],
                )));
                connection.add_track(track.clone() as Arc<dyn TrackLocal>).await.expect("a sender");
                Some((track, ssrc))
            }
            Audio::RecvOnly => {
                let init =
                    RTCRtpTransceiverInit { direction: RTCRtpTransceiverDirection::Recvonly, ..Default::default() };
                connection.add_transceiver_from_kind(RtpCodecKind::Audio, Some(init)).await.expect("a transceiver");
                None
            }
        };
        for transceiver in connection.get_transceivers().await {
            // Without this only the track's own codec is offered.
            transceiver.set_codec_preferences(codecs.clone()).await.expect("registered codecs");
        }
        let channel = match channel {
            Some(label) => Some(connection.create_data_channel(label, None).await.expect("a channel")),
            None => None,
        };
        Self {
            connection,
            channel,
            tcp: audio == Audio::OverTcp,
            track,
            state: state_seen,
            gathered: gathered_seen,
            tracks: tracks_seen,
            remote: None,
        }
    }

    /// An offer with all candidates.
    pub(crate) async fn offer(&mut self) -> String {
        let offer = self.connection.create_offer(None).await.expect("an offer");
        self.connection.set_local_description(offer).await.expect("an offer");
        within("gathering", self.gathered.wait_for(|done| *done)).await.expect("a driver");
        self.connection.local_description().await.expect("an offer").sdp
    }

    /// An offer that restarts ICE, with all candidates.
    pub(crate) async fn restart(&mut self) -> String {
        let before = self.connection.local_description().await.expect("an offer").sdp;
        let options = RTCOfferOptions { ice_restart: true };
        let offer = self.connection.create_offer(Some(options)).await.expect("an offer");
        self.connection.set_local_description(offer).await.expect("an offer");
        within("gathering", async {
            loop {
                let now = self.connection.local_description().await.expect("an offer").sdp;
                if now != before && now.contains("a=candidate:") {
                    return now;
                }
                tokio::task::yield_now().await;
            }
        })
        .await
    }

    pub(crate) async fn accept(&self, answer: &str) {
        let answer = RTCSessionDescription::answer(answer.to_owned()).expect("an answer");
        let passive: Vec<String> =
            answer.sdp.lines().filter(|line| line.ends_with("passive")).map(str::to_owned).collect();
        self.connection.set_remote_description(answer).await.expect("an answer that fits");
        if self.tcp {
            // This stack connects to candidates that it is given one by one.
            for line in passive {
                let candidate = RTCIceCandidateInit { candidate: line[2..].to_owned(), ..Default::default() };
                self.connection.add_ice_candidate(candidate).await.expect("a candidate");
            }
        }
    }

    pub(crate) async fn state(&mut self, wanted: RTCPeerConnectionState) {
        within("the state", self.state.wait_for(|state| *state == wanted)).await.expect("a driver");
    }

    pub(crate) async fn send(&self, sequence: u16, timestamp: u32, payload: &[u8]) {
        self.send_as(PEER_OPUS, sequence, timestamp, payload).await;
    }

    pub(crate) async fn send_as(&self, payload_type: u8, sequence: u16, timestamp: u32, payload: &[u8]) {
        let (track, ssrc) = self.track.as_ref().expect("a sending peer");
        let packet = rtp::Packet {
            header: rtp::Header {
                version: 2,
                payload_type,
                sequence_number: sequence,
                timestamp,
                ssrc: *ssrc,
                ..Default::default()
            },
            payload: Bytes::copy_from_slice(payload),
        };
        track.write_rtp(packet).await.expect("a connected peer");
    }

    pub(crate) async fn next_rtp(&mut self) -> rtp::Packet {
        within("a packet", async {
            loop {
                let Some(track) = &self.remote else {
                    self.remote = Some(self.tracks.recv().await.expect("a driver"));
                    continue;
                };
                if let TrackRemoteEvent::OnRtpPacket(packet) = track.poll().await.expect("a live track") {
                    return packet;
                }
            }
        })
        .await
    }

    pub(crate) async fn channel_open(&self) {
        let channel = self.channel.as_ref().expect("a channel");
        within("the channel", async {
            while !matches!(channel.poll().await.expect("a live channel"), DataChannelEvent::OnOpen) {}
        })
        .await;
    }

    pub(crate) async fn say(&self, text: &str) {
        self.channel.as_ref().expect("a channel").send_text(text).await.expect("an open channel");
    }

    pub(crate) async fn next_text(&self) -> String {
        let channel = self.channel.as_ref().expect("a channel");
        within("a message", async {
            loop {
                if let DataChannelEvent::OnMessage(message) = channel.poll().await.expect("a live channel") {
                    return String::from_utf8(message.data.to_vec()).expect("text");
                }
            }
        })
        .await
    }

    pub(crate) async fn close(&self) {
        self.connection.close().await.expect("closing");
    }
}

/// What a call on a shard of its own saw.
pub(crate) struct Call {
    pub(crate) events: mpsc::Receiver<LegEvent>,
    pub(crate) thread: thread::JoinHandle<LegEnd>,
}

impl Call {
    pub(crate) async fn next(&mut self, wanted: impl Fn(&LegEvent) -> bool) -> LegEvent {
        within("an event of the leg", async {
            loop {
                let event = self.events.recv().await.expect("a live leg");
                if wanted(&event) {
                    return event;
                }
            }
        })
        .await
    }

    pub(crate) async fn end(mut self) -> LegEnd {
        self.next(|event| matches!(event, LegEvent::Closed(_))).await;
        self.thread.join().expect("no panic on the shard")
    }
}

/// Runs `leg` on a thread of its own: sends back what it hears and what it is told.
pub(crate) fn echo(mut leg: WebRtcLeg) -> Call {
    let (tell, events) = mpsc::channel(1024);
    let thread = thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
        runtime.block_on(async move {
            if leg.attach().await.is_err() {
                return LegEnd::Failed;
            }
            loop {
                let event = leg.recv().await;
                // A test that does not look loses events, not the call.
                let _ = tell.try_send(event.clone());
                match event {
                    LegEvent::Rtp(packet) => {
                        let packet = OutPacket {
                            payload_type: leg.format().payload_type,
                            marker: packet.marker,
                            sequence: packet.sequence,
                            timestamp: packet.timestamp,
                            payload: packet.payload,
                        };
                        let _ = leg.send(packet).await;
                    }
                    LegEvent::Message(text) => assert!(leg.send_message(&format!("heard {text}"))),
                    LegEvent::Closed(end) => return end,
                    _ => {}
                }
            }
        })
    });
    Call { events, thread }
}

/// A connected call of `peer`.
pub(crate) async fn call(gateway: &Gateway, peer: &mut Peer) -> (antiphon::webrtc::SessionId, String, Call) {
    let offer = peer.offer().await;
    let answered = gateway.answer(&offer).await.expect("a good offer");
    let call = echo(answered.leg);
    peer.accept(&answered.sdp).await;
    peer.state(RTCPeerConnectionState::Connected).await;
    (answered.id, answered.etag, call)
}
