//! A browser-like peer on the `webrtc` crate, and a call that echoes, for the tests of the WebRTC leg.

use std::future::Future;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use antiphon::media::leg::{LegEnd, LegEvent, MediaLeg, OutPacket};
use antiphon::media::webrtc::WebRtcLeg;
use antiphon::server::auth::Caller;
use antiphon::webrtc::{Gateway, WebRtcConfig};
use antiphon_loadgen::rtc::peer::{self, Shape};
use antiphon_loadgen::rtp::Packet;
use antiphon_loadgen::{synthetic, wav};
use bytes::Bytes;
use rtc::peer_connection::configuration::RTCOfferOptions;
use rtc::rtp;
use tempfile::TempDir;
use tokio::sync::mpsc;
use webrtc::data_channel::{DataChannel, DataChannelEvent};
use webrtc::media_stream::track_remote::{TrackRemote, TrackRemoteEvent};
use webrtc::peer_connection::{PeerConnection, RTCIceCandidateInit, RTCPeerConnectionState, RTCSessionDescription};

use crate::chromium::Page;

/// What Firefox numbers Opus, so that a constant 111 anywhere shows.
pub(crate) const PEER_OPUS: u8 = 109;

/// And telephone events.
pub(crate) const PEER_EVENTS: u8 = 101;

/// How long [`within`] waits, for the driver of Chromium.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

pub(crate) async fn gateway(config: WebRtcConfig) -> Gateway {
    Gateway::start(config).await.expect("a free port")
}

/// A site whose only page is `page`, beside WHIP by `whip`: where it is, and Chromium, whose microphone hears next to nothing as
/// long as the folder is kept.
pub(crate) async fn site_and_browser(page: String, whip: axum::Router) -> (String, Page, TempDir) {
    let pages = axum::Router::new().route("/", axum::routing::get(async move || axum::response::Html(page)));
    let router = pages.merge(whip.layer(axum::Extension(Caller::anybody())));
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a free port");
    let site = format!("http://{}/", listener.local_addr().expect("bound"));
    tokio::spawn(async move { axum::serve(listener, router).await });
    let folder = tempfile::tempdir().expect("a folder");
    let microphone = folder.path().join("quiet.wav");
    wav::write(&microphone, &synthetic::noise(1, 48_000, 0.1)).expect("written");
    (site, Page::open(&microphone).await, folder)
}

/// Nothing here takes seconds on an idle machine; a busy one gets a minute.
pub(crate) async fn within<T>(what: &str, work: impl Future<Output = T>) -> T {
    match tokio::time::timeout(PATIENCE, work).await {
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
    audio: u8,
    peer: peer::Peer,
    remote: Option<Arc<dyn TrackRemote>>,
}

impl Peer {
    pub(crate) async fn new(audio: Audio, channel: Option<&str>) -> Self {
        let shape = Shape {
            audio: PEER_OPUS,
            events: Some(PEER_EVENTS),
            sends: audio != Audio::RecvOnly,
            tcp: audio == Audio::OverTcp,
            ..Shape::default()
        };
        Self::shaped(shape, channel).await
    }

    pub(crate) async fn shaped(shape: Shape, channel: Option<&str>) -> Self {
        let peer = peer::Peer::new(shape).await.expect("a peer");
        let connection = peer.connection.clone();
        let channel = match channel {
            Some(label) => Some(connection.create_data_channel(label, None).await.expect("a channel")),
            None => None,
        };
        Self { connection, channel, tcp: shape.tcp, audio: shape.audio, peer, remote: None }
    }

    /// An offer with all candidates.
    pub(crate) async fn offer(&mut self) -> String {
        let offer = self.connection.create_offer(None).await.expect("an offer");
        self.connection.set_local_description(offer).await.expect("an offer");
        within("gathering", self.peer.description()).await.expect("an offer")
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
        within("the state", self.peer.state.wait_for(|state| *state == wanted)).await.expect("a driver");
    }

    pub(crate) async fn send(&self, sequence: u16, timestamp: u32, payload: &[u8]) {
        self.send_as(self.audio, sequence, timestamp, payload).await;
    }

    pub(crate) async fn send_as(&self, payload_type: u8, sequence: u16, timestamp: u32, payload: &[u8]) {
        let payload = Bytes::copy_from_slice(payload);
        let packet = Packet { payload_type, marker: false, sequence, timestamp, ssrc: 0, payload };
        self.peer.microphone.as_ref().expect("a sending peer").send(packet).await.expect("a connected peer");
    }

    pub(crate) async fn next_rtp(&mut self) -> rtp::Packet {
        within("a packet", async {
            loop {
                let Some(track) = &self.remote else {
                    self.remote = Some(self.peer.tracks.recv().await.expect("a driver"));
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
