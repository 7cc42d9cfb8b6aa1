//! A gateway for tests: WHIP over a few lines of HTTP, and on each call a voice that does as it is told.

#![allow(dead_code, reason = "each test binary uses its part")]

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use antiphon_loadgen::call::now;
use antiphon_loadgen::clock::sleep_until;
use antiphon_loadgen::codec::Codec;
use antiphon_loadgen::heard::{Clip, Ear, PayloadTypes, Recorder};
use antiphon_loadgen::speak::{Idle, Speaker};
use antiphon_loadgen::{codec, rtp as ours};
use rtc::ice::mdns::MulticastDnsMode;
use rtc::media_stream::MediaStreamTrack;
use rtc::peer_connection::configuration::media_engine::MIME_TYPE_OPUS;
use rtc::rtp_transceiver::rtp_sender::{
    RTCRtpCodec, RTCRtpCodecParameters, RTCRtpCodingParameters, RTCRtpEncodingParameters, RtpCodecKind,
};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{mpsc, oneshot, watch};
use tokio_util::task::AbortOnDropHandle;
use webrtc::data_channel::{DataChannel, DataChannelEvent};
use webrtc::media_stream::track_local::TrackLocal;
use webrtc::media_stream::track_local::static_rtp::TrackLocalStaticRTP;
use webrtc::media_stream::track_remote::{TrackRemote, TrackRemoteEvent};
use webrtc::peer_connection::{
    MediaEngine, PeerConnection, PeerConnectionBuilder, PeerConnectionEventHandler, RTCConfigurationBuilder,
    RTCIceGatheringState, RTCPeerConnectionState, RTCSessionDescription, Registry, SettingEngineBuilder,
    configure_rtcp_reports,
};
use webrtc::runtime::TokioRuntime;

/// What the voice does with a turn.
pub(crate) struct Reply {
    /// Before its first frame.
    pub(crate) delay: Duration,
    /// What it says.
    pub(crate) clip: Clip,
    /// Frames that are never sent.
    pub(crate) drop: Vec<usize>,
    /// Before these frames it leaves out time, its timestamps too: an underrun.
    pub(crate) pause: Vec<(usize, Duration)>,
}

impl Reply {
    pub(crate) fn plain(delay: Duration, clip: Clip) -> Reply {
        Reply { delay, clip, drop: Vec::new(), pause: Vec::new() }
    }
}

pub(crate) type Voice = Arc<dyn Fn(usize, &str) -> Reply + Send + Sync>;

/// The server; it ends with the value.
pub(crate) struct Whip {
    pub(crate) url: String,
    pub(crate) calls: Arc<AtomicUsize>,
    pub(crate) deleted: Arc<AtomicUsize>,
    /// What each caller said, in order of calls.
    pub(crate) ears: Arc<Mutex<Vec<Ear>>>,
    _accepting: AbortOnDropHandle<()>,
}

struct Shared {
    voice: Voice,
    calls: Arc<AtomicUsize>,
    deleted: Arc<AtomicUsize>,
    ears: Arc<Mutex<Vec<Ear>>>,
    sessions: Mutex<HashMap<String, Arc<dyn PeerConnection>>>,
    metrics: Mutex<String>,
}

impl Whip {
    pub(crate) async fn start(voice: impl Fn(usize, &str) -> Reply + Send + Sync + 'static) -> Whip {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address: SocketAddr = listener.local_addr().unwrap();
        let (calls, deleted) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
        let ears = Arc::new(Mutex::new(Vec::new()));
        let shared = Arc::new(Shared {
            voice: Arc::new(voice),
            calls: calls.clone(),
            deleted: deleted.clone(),
            ears: ears.clone(),
            sessions: Mutex::default(),
            metrics: Mutex::new("antiphon_underruns_total 0\n".to_owned()),
        });
        let accepting = AbortOnDropHandle::new(tokio::spawn(async move {
            loop {
                let (stream, _) = listener.accept().await.unwrap();
                let shared = shared.clone();
                tokio::spawn(async move { serve(stream, shared).await });
            }
        }));
        Whip { url: format!("http://{address}"), calls, deleted, ears, _accepting: accepting }
    }
}

async fn serve(mut stream: TcpStream, shared: Arc<Shared>) -> Option<()> {
    let mut bytes = Vec::new();
    let mut buffer = [0; 4096];
    let (head, body) = loop {
        let n = stream.read(&mut buffer).await.ok().filter(|n| *n > 0)?;
        bytes.extend_from_slice(&buffer[..n]);
        let text = String::from_utf8_lossy(&bytes).into_owned();
        let Some((head, body)) = text.split_once("\r\n\r\n") else { continue };
        let length = head
            .lines()
            .find_map(|l| l.to_ascii_lowercase().strip_prefix("content-length:").map(|v| v.trim().parse().unwrap_or(0)))
            .unwrap_or(0usize);
        if body.len() >= length {
            break (head.to_owned(), body.to_owned());
        }
    };
    let mut first = head.lines().next()?.split(' ');
    let (method, path) = (first.next()?, first.next()?);
    let (status, headers, body) = match (method, path) {
        ("POST", p) if p.starts_with("/v1/webrtc") && p.contains("agent=nobody") => {
            ("404 Not Found", String::new(), "no such agent".to_owned())
        }
        ("POST", p) if p.starts_with("/v1/webrtc") => {
            let n = shared.calls.fetch_add(1, Ordering::SeqCst);
            let answer = answer(n, body, shared.clone()).await;
            let headers =
                format!("Location: /v1/webrtc/{n}\r\nX-Antiphon-Call: c{n}\r\nContent-Type: application/sdp\r\n");
            ("201 Created", headers, answer)
        }
        ("DELETE", p) => {
            shared.deleted.fetch_add(1, Ordering::SeqCst);
            let session = shared.sessions.lock().unwrap().remove(p.rsplit('/').next()?);
            if let Some(session) = session {
                tokio::spawn(async move { session.close().await });
            }
            ("200 OK", String::new(), String::new())
        }
        ("GET", "/metrics") => ("200 OK", String::new(), shared.metrics.lock().unwrap().clone()),
        _ => ("404 Not Found", String::new(), String::new()),
    };
    let reply =
        format!("HTTP/1.1 {status}\r\n{headers}Content-Length: {}\r\nConnection: close\r\n\r\n{body}", body.len());
    stream.write_all(reply.as_bytes()).await.ok()
}

struct Events {
    gathered: watch::Sender<bool>,
    arrivals: mpsc::Sender<Arrival>,
}

enum Arrival {
    Track(Arc<dyn TrackRemote>),
    Channel(Arc<dyn DataChannel>),
    Connected,
    Closed,
}

#[async_trait::async_trait]
impl PeerConnectionEventHandler for Events {
    async fn on_ice_gathering_state_change(&self, state: RTCIceGatheringState) {
        if state == RTCIceGatheringState::Complete {
            self.gathered.send_replace(true);
        }
    }

    async fn on_connection_state_change(&self, state: RTCPeerConnectionState) {
        let arrival = match state {
            RTCPeerConnectionState::Connected => Arrival::Connected,
            RTCPeerConnectionState::Closed | RTCPeerConnectionState::Failed => Arrival::Closed,
            _ => return,
        };
        let _ = self.arrivals.try_send(arrival);
    }

    async fn on_track(&self, track: Arc<dyn TrackRemote>) {
        let _ = self.arrivals.try_send(Arrival::Track(track));
    }

    async fn on_data_channel(&self, channel: Arc<dyn DataChannel>) {
        let _ = self.arrivals.try_send(Arrival::Channel(channel));
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

async fn answer(n: usize, offer: String, shared: Arc<Shared>) -> String {
    let (gathered, mut gathered_seen) = watch::channel(false);
    let (arrivals, arrived) = mpsc::channel(16);
    let mut engine = MediaEngine::default();
    let codec = RTCRtpCodecParameters { rtp_codec: opus(), payload_type: 111 };
    engine.register_codec(codec, RtpCodecKind::Audio).unwrap();
    let settings = SettingEngineBuilder::new().with_multicast_dns_mode(MulticastDnsMode::Disabled).build();
    let connection = PeerConnectionBuilder::new()
        .with_configuration(RTCConfigurationBuilder::new().build())
        .with_media_engine(engine)
        .with_setting_engine(settings)
        .with_interceptor_registry(configure_rtcp_reports(Registry::new()))
        .with_runtime(Arc::new(TokioRuntime))
        .with_handler(Arc::new(Events { gathered, arrivals }))
        .with_udp_addrs(vec!["127.0.0.1:0"])
        .build()
        .await
        .unwrap();
    let connection: Arc<dyn PeerConnection> = Arc::new(connection);
    let ssrc = rand::random::<u32>();
    let coding = RTCRtpEncodingParameters {
        rtp_coding_parameters: RTCRtpCodingParameters { ssrc: Some(ssrc), ..Default::default() },
        codec: opus(),
        ..Default::default()
    };
    let name = || "voice".to_owned();
    let track = Arc::new(TrackLocalStaticRTP::new(MediaStreamTrack::new(
        name(),
        name(),
        name(),
        RtpCodecKind::Audio,
        vec![coding],
    )));
    connection.add_track(track.clone() as Arc<dyn TrackLocal>).await.unwrap();
    connection.set_remote_description(RTCSessionDescription::offer(offer).unwrap()).await.unwrap();
    let answer = connection.create_answer(None).await.unwrap();
    connection.set_local_description(answer).await.unwrap();
    gathered_seen.wait_for(|done| *done).await.unwrap();
    let sdp = connection.local_description().await.unwrap().sdp;
    shared.sessions.lock().unwrap().insert(n.to_string(), connection.clone());
    let types = PayloadTypes { audio: 111, event: None };
    let ear = Ear::new(Recorder::new(now(), Codec::Opus, types, 24_000).unwrap());
    shared.ears.lock().unwrap().push(ear.clone());
    tokio::spawn(live(n, shared.voice.clone(), arrived, track, ssrc, ear));
    sdp
}

async fn live(
    n: usize,
    voice: Voice,
    mut arrived: mpsc::Receiver<Arrival>,
    track: Arc<TrackLocalStaticRTP>,
    ssrc: u32,
    ear: Ear,
) {
    let mut tasks = Vec::new();
    while let Some(arrival) = arrived.recv().await {
        match arrival {
            Arrival::Connected => {}
            Arrival::Closed => return,
            Arrival::Track(remote) => {
                let ear = ear.clone();
                tasks.push(AbortOnDropHandle::new(tokio::spawn(async move {
                    while let Some(event) = remote.poll().await {
                        if let TrackRemoteEvent::OnRtpPacket(p) = event {
                            let packet = ours::Packet {
                                payload_type: p.header.payload_type,
                                marker: p.header.marker,
                                sequence: p.header.sequence_number,
                                timestamp: p.header.timestamp,
                                ssrc: p.header.ssrc,
                                payload: p.payload,
                            };
                            ear.push(now(), packet);
                        }
                    }
                })));
            }
            Arrival::Channel(channel) => {
                let (voice, track) = (voice.clone(), track.clone());
                tasks.push(AbortOnDropHandle::new(tokio::spawn(async move {
                    let mut mouth = Mouth::new(track, ssrc);
                    while let Some(event) = channel.poll().await {
                        let DataChannelEvent::OnMessage(message) = event else { continue };
                        let Ok(frame) = serde_json::from_slice::<Value>(&message.data) else { continue };
                        if frame["type"] == "text" {
                            let token = frame["token"].as_str().unwrap_or_default().to_owned();
                            channel.send_text(&json!({"type": "info", "got": token}).to_string()).await.unwrap();
                            mouth.say(voice(n, &token)).await;
                        }
                    }
                })));
            }
        }
    }
}

/// Sends what a [`Reply`] asks for, with the faults it asks for.
struct Mouth {
    track: Arc<TrackLocalStaticRTP>,
    ssrc: u32,
    sequence: u16,
    timestamp: u32,
    last: Option<std::time::Instant>,
}

impl Mouth {
    fn new(track: Arc<TrackLocalStaticRTP>, ssrc: u32) -> Mouth {
        Mouth { track, ssrc, sequence: 7, timestamp: 1_000, last: None }
    }

    async fn say(&mut self, reply: Reply) {
        let start = now() + reply.delay;
        if let Some(last) = self.last {
            self.timestamp = self.timestamp.wrapping_add(((start - last).as_secs_f64() * 48_000.0) as u32);
        }
        // The library's speaker encodes; its times and numbers are replaced by ours.
        let mut speaker =
            Speaker::new(start, Codec::Opus, 111, None, Idle::KeepAlive(Duration::from_secs(3600))).unwrap();
        let pcm = codec::resample(&reply.clip.pcm, reply.clip.rate, speaker.rate()).unwrap();
        let frames = pcm.len().div_ceil(speaker.rate() as usize / 50);
        let (began, _) = oneshot::channel();
        speaker.say(pcm.into_iter().map(codec::to_i16).collect(), began);
        let mut at = start;
        for n in 0..frames {
            let encoded = speaker.poll(start + Duration::from_millis(20) * n as u32);
            let paused: Duration = reply.pause.iter().filter(|(f, _)| *f == n).map(|(_, d)| *d).sum();
            at += paused;
            self.timestamp = self.timestamp.wrapping_add((paused.as_secs_f64() * 48_000.0) as u32);
            sleep_until(at).await;
            let marker = n == 0 || !paused.is_zero();
            for packet in encoded {
                self.sequence = self.sequence.wrapping_add(1);
                if reply.drop.contains(&n) {
                    continue;
                }
                let packet = rtc::rtp::Packet {
                    header: rtc::rtp::Header {
                        version: 2,
                        marker,
                        payload_type: 111,
                        sequence_number: self.sequence,
                        timestamp: self.timestamp,
                        ssrc: self.ssrc,
                        ..Default::default()
                    },
                    payload: packet.payload,
                };
                let _ = self.track.write_rtp(packet).await;
            }
            self.timestamp = self.timestamp.wrapping_add(960);
            at += Duration::from_millis(20);
        }
        self.last = Some(at);
    }
}
