//! A gateway for tests: WHIP over a few lines of HTTP, and on each call a voice that does as it is told.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use antiphon_loadgen::call::now;
use antiphon_loadgen::clock::sleep_until;
use antiphon_loadgen::codec::Codec;
use antiphon_loadgen::ear::Ear;
use antiphon_loadgen::heard::{Clip, PayloadTypes, Recorder};
use antiphon_loadgen::rtc::peer::{Microphone, Peer, Shape, received};
use antiphon_loadgen::speak::{Idle, Speaker};
use antiphon_loadgen::{codec, rtp};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::oneshot;
use tokio_util::task::AbortOnDropHandle;
use webrtc::data_channel::DataChannelEvent;
use webrtc::media_stream::track_remote::TrackRemoteEvent;
use webrtc::peer_connection::{PeerConnection, RTCPeerConnectionState, RTCSessionDescription};

const FRAME: Duration = Duration::from_millis(20);

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
    /// It falls silent so long after it hears the caller; `None`: it speaks on.
    pub(crate) obeys: Option<Duration>,
}

impl Reply {
    pub(crate) fn plain(delay: Duration, clip: Clip) -> Reply {
        Reply { delay, clip, drop: Vec::new(), pause: Vec::new(), obeys: None }
    }
}

pub(crate) type Voice = Arc<dyn Fn(usize, &str) -> Reply + Send + Sync>;

/// The server; it ends with the value.
pub(crate) struct Whip {
    pub(crate) url: String,
    pub(crate) deleted: Arc<AtomicUsize>,
    /// What each caller said, in order of calls.
    pub(crate) ears: Arc<Mutex<Vec<Ear>>>,
    /// How its turns were broken off.
    pub(crate) stops: Arc<Mutex<Vec<Stop>>>,
    /// When the first frame of each turn was due.
    pub(crate) starts: Arc<Mutex<Vec<Instant>>>,
    _accepting: AbortOnDropHandle<()>,
}

struct Shared {
    voice: Voice,
    calls: AtomicUsize,
    deleted: Arc<AtomicUsize>,
    ears: Arc<Mutex<Vec<Ear>>>,
    stops: Arc<Mutex<Vec<Stop>>>,
    starts: Arc<Mutex<Vec<Instant>>>,
    sessions: Mutex<HashMap<String, Arc<dyn PeerConnection>>>,
    metrics: Mutex<String>,
}

impl Whip {
    pub(crate) async fn start(voice: impl Fn(usize, &str) -> Reply + Send + Sync + 'static) -> Whip {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address: SocketAddr = listener.local_addr().unwrap();
        let deleted = Arc::new(AtomicUsize::new(0));
        let ears = Arc::new(Mutex::new(Vec::new()));
        let stops = Arc::new(Mutex::new(Vec::new()));
        let starts = Arc::new(Mutex::new(Vec::new()));
        let shared = Arc::new(Shared {
            voice: Arc::new(voice),
            calls: AtomicUsize::new(0),
            deleted: deleted.clone(),
            ears: ears.clone(),
            stops: stops.clone(),
            starts: starts.clone(),
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
        Whip { url: format!("http://{address}"), deleted, ears, stops, starts, _accepting: accepting }
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

async fn answer(n: usize, offer: String, shared: Arc<Shared>) -> String {
    let mut peer = Peer::new(Shape::default()).await.unwrap();
    peer.connection.set_remote_description(RTCSessionDescription::offer(offer).unwrap()).await.unwrap();
    let answer = peer.connection.create_answer(None).await.unwrap();
    peer.connection.set_local_description(answer).await.unwrap();
    let sdp = peer.description().await.unwrap();
    shared.sessions.lock().unwrap().insert(n.to_string(), peer.connection.clone());
    let types = PayloadTypes { audio: 111, event: None };
    let ear = Ear::new(Recorder::new(now(), Codec::Opus, types, 24_000).unwrap());
    shared.ears.lock().unwrap().push(ear.clone());
    tokio::spawn(live(n, shared, peer, ear));
    sdp
}

async fn live(n: usize, shared: Arc<Shared>, mut peer: Peer, ear: Ear) {
    let mut tasks = Vec::new();
    loop {
        tokio::select! {
            Ok(()) = peer.state.changed() => {
                let state = *peer.state.borrow_and_update();
                if matches!(state, RTCPeerConnectionState::Closed | RTCPeerConnectionState::Failed) {
                    return;
                }
            }
            Some(remote) = peer.tracks.recv() => {
                let ear = ear.clone();
                tasks.push(AbortOnDropHandle::new(tokio::spawn(async move {
                    while let Some(event) = remote.poll().await {
                        if let TrackRemoteEvent::OnRtpPacket(packet) = event {
                            ear.push(now(), received(packet));
                        }
                    }
                })));
            }
            Some(channel) = peer.channels.recv() => {
                let (shared, ear) = (shared.clone(), ear.clone());
                let mut mouth = Mouth::new(peer.microphone.clone().unwrap());
                tasks.push(AbortOnDropHandle::new(tokio::spawn(async move {
                    while let Some(event) = channel.poll().await {
                        let DataChannelEvent::OnMessage(message) = event else { continue };
                        let Ok(frame) = serde_json::from_slice::<Value>(&message.data) else { continue };
                        if frame["type"] == "text" {
                            let token = frame["token"].as_str().unwrap_or_default().to_owned();
                            channel.send_text(&json!({"type": "info", "got": token}).to_string()).await.unwrap();
                            let reply = (shared.voice)(n, &token);
                            let start = now() + reply.delay;
                            shared.starts.lock().unwrap().push(start);
                            if let Some(stop) = mouth.say(start, reply, &ear).await {
                                let report = json!({"type": "interrupt", "sentMs": stop.sent.as_millis() as u64});
                                channel.send_text(&report.to_string()).await.unwrap();
                                shared.stops.lock().unwrap().push(stop);
                            }
                        }
                    }
                })));
            }
            else => return,
        }
    }
}

/// How a turn was broken off.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Stop {
    /// When the caller was heard.
    pub(crate) heard: Instant,
    /// When the sound of the last frame ended.
    pub(crate) ended: Instant,
    /// How much sound was sent.
    pub(crate) sent: Duration,
}

/// Sends what a [`Reply`] asks for, with the faults it asks for.
struct Mouth {
    microphone: Microphone,
    sequence: u16,
    timestamp: u32,
    last: Option<Instant>,
}

impl Mouth {
    fn new(microphone: Microphone) -> Mouth {
        Mouth { microphone, sequence: 7, timestamp: 1_000, last: None }
    }

    async fn say(&mut self, start: Instant, reply: Reply, ear: &Ear) -> Option<Stop> {
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
        let mut stopped = None;
        for n in 0..frames {
            let encoded = speaker.poll(start + FRAME * n as u32);
            let paused: Duration = reply.pause.iter().filter(|(f, _)| *f == n).map(|(_, d)| *d).sum();
            at += paused;
            self.timestamp = self.timestamp.wrapping_add((paused.as_secs_f64() * 48_000.0) as u32);
            sleep_until(at).await;
            if let Some(delay) = reply.obeys
                && let Some(heard) = ear.onset(start, Duration::ZERO).await
                && at >= heard + delay
            {
                stopped = Some(Stop { heard, ended: at, sent: FRAME * n as u32 });
                break;
            }
            let marker = n == 0 || !paused.is_zero();
            for packet in encoded {
                self.sequence = self.sequence.wrapping_add(1);
                if reply.drop.contains(&n) {
                    continue;
                }
                let (sequence, timestamp) = (self.sequence, self.timestamp);
                let _ = self.microphone.send(rtp::Packet { marker, sequence, timestamp, ..packet }).await;
            }
            self.timestamp = self.timestamp.wrapping_add(960);
            at += FRAME;
        }
        self.last = Some(at);
        stopped
    }
}
