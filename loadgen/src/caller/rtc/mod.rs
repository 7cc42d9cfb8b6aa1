//! A browser, as far as a gateway can tell: WebRTC through a WHIP-style endpoint, Opus both ways and the data
//! channel `agent` (RFC 9725 with media in both directions).
//!
//! [`Caller::connect`] posts an offer with all its candidates and returns when media may flow; the offer has no
//! telephone events, as browsers' have. Ending the call sends DELETE and closes the connection.

pub mod peer;
mod runtime;
mod task;

use std::net::{IpAddr, Ipv4Addr};
use std::sync::Arc;
use std::time::Duration;

use reqwest::header::{HeaderMap, LOCATION};
use tokio::sync::{mpsc, watch};
use webrtc::data_channel::DataChannel;
use webrtc::media_stream::track_remote::TrackRemote;
use webrtc::peer_connection::{PeerConnection, RTCPeerConnectionState, RTCSessionDescription};

use self::peer::{Microphone, Peer, Shape, failed};
use crate::caller::call::{Call, CallError};
use crate::caller::relay::{Impairment, Relay};
use crate::caller::speak::Idle;
use crate::clock;

/// The data channel that carries the agent's frames.
pub const CHANNEL: &str = "agent";

/// What we number Opus; the gateway must answer with the same number.
const OPUS: u8 = 111;

/// How the browser is set up.
#[derive(Clone, Debug)]
pub struct Config {
    /// The endpoint: `http://host:port/v1/webrtc`, or just `http://host:port`.
    pub url: String,
    /// Which agent answers; the gateway's default when `None`.
    pub agent: Option<String>,
    /// Bearer token.
    pub token: Option<String>,
    /// Own address for media.
    pub address: IpAddr,
    /// What is sent while nothing is said. Browsers send silence; a load test need not.
    pub idle: Idle,
    /// Opus is decoded to this rate.
    pub opus_rate: u32,
    /// How long setting up may take.
    pub patience: Duration,
    /// Everything between the browser and the gateway's UDP port passes through a relay that does this to it.
    pub impairment: Option<Impairment>,
}

impl Config {
    /// Calls the gateway at `url` with everything else as usual.
    pub fn new(url: impl Into<String>) -> Config {
        Config {
            url: url.into(),
            agent: None,
            token: None,
            address: IpAddr::V4(Ipv4Addr::LOCALHOST),
            idle: Idle::Continuous,
            opus_rate: 24_000,
            patience: Duration::from_secs(20),
            impairment: None,
        }
    }

    fn endpoint(&self) -> Result<reqwest::Url, CallError> {
        let mut url = reqwest::Url::parse(&self.url)
            .ok()
            .filter(|u| u.has_host())
            .ok_or_else(|| CallError::Target(self.url.clone()))?;
        if url.path() == "/" {
            url.set_path("/v1/webrtc");
        }
        if let Some(agent) = &self.agent {
            url.query_pairs_mut().append_pair("agent", agent);
        }
        Ok(url)
    }
}

/// A browser.
pub struct Caller;

impl Caller {
    /// Calls and waits until media may flow.
    ///
    /// # Errors
    /// The gateway refuses, its answer cannot be used, or ICE and DTLS do not come about in time.
    pub async fn connect(config: Config) -> Result<Call, CallError> {
        let patience = config.patience;
        match tokio::time::timeout(patience, connect(config)).await {
            Ok(result) => result,
            Err(_) => Err(CallError::Unanswered(patience)),
        }
    }
}

/// The parts of a connection, handed to the task of the call.
struct Parts {
    connection: Connection,
    microphone: Microphone,
    channel: Arc<dyn DataChannel>,
    state: watch::Receiver<RTCPeerConnectionState>,
    tracks: mpsc::Receiver<Arc<dyn TrackRemote>>,
    session: Option<Session>,
    /// Lives as long as the call.
    relay: Option<Relay>,
}

/// Where DELETE goes.
struct Session {
    client: reqwest::Client,
    url: reqwest::Url,
    token: Option<String>,
}

/// A connection that is closed on every path: dropping one alone would leave its socket and task alive.
struct Connection(Option<Arc<dyn PeerConnection>>);

impl Connection {
    fn get(&self) -> Result<&Arc<dyn PeerConnection>, CallError> {
        self.0.as_ref().ok_or(CallError::Over)
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        if let (Some(connection), Ok(runtime)) = (self.0.take(), tokio::runtime::Handle::try_current()) {
            runtime.spawn(async move { connection.close().await });
        }
    }
}

async fn connect(config: Config) -> Result<Call, CallError> {
    let url = config.endpoint()?;
    let (mut parts, mut gathered) = build(&config).await?;
    let asked = clock::now();
    let connection = parts.connection.get()?;
    let offer = connection.create_offer(None).await.map_err(failed)?;
    connection.set_local_description(offer).await.map_err(failed)?;
    gathered.wait_for(|done| *done).await.map_err(|_| CallError::WebRtc("no candidates".to_owned()))?;
    let offer =
        connection.local_description().await.ok_or_else(|| CallError::WebRtc("no local description".to_owned()))?;

    let client = client()?;
    let mut request = client.post(url.clone()).header("Content-Type", "application/sdp").body(offer.sdp);
    if let Some(token) = &config.token {
        request = request.bearer_auth(token);
    }
    let response = request.send().await?;
    let status = response.status();
    let headers = response.headers().clone();
    let body = response.text().await?;
    if !status.is_success() {
        let reason = body.chars().take(200).collect();
        return Err(CallError::Refused { code: status.as_u16(), reason });
    }
    let answered = clock::now();
    parts.session = headers
        .get(LOCATION)
        .and_then(|l| l.to_str().ok())
        .and_then(|l| url.join(l).ok())
        .map(|url| Session { client, url, token: config.token.clone() });
    let body = match config.impairment {
        Some(what) => {
            let relay = Relay::start(config.address, what, rand::random()).await?;
            let body = through(&body, &relay)?;
            parts.relay = Some(relay);
            body
        }
        None => body,
    };
    let answer = RTCSessionDescription::answer(body).map_err(|e| CallError::BadAnswer(e.to_string()))?;
    let applied = connection.set_remote_description(answer).await.map_err(|e| CallError::BadAnswer(e.to_string()));
    let connected = match applied {
        Ok(()) => connected(&mut parts.state).await,
        Err(error) => Err(error),
    };
    if let Err(error) = connected {
        task::end_session(parts.session.take()).await;
        return Err(error);
    }
    task::start(&config, parts, pairs(&headers), asked, answered)
}

async fn build(config: &Config) -> Result<(Parts, watch::Receiver<bool>), CallError> {
    let shape = Shape { address: config.address, audio: OPUS, eager: true, ..Shape::default() };
    let peer = Peer::new(shape).await?;
    let connection = Connection(Some(peer.connection.clone()));
    let channel = peer.connection.create_data_channel(CHANNEL, None).await.map_err(failed)?;
    let microphone = peer.microphone.ok_or_else(|| CallError::WebRtc("no track to speak on".to_owned()))?;
    let parts =
        Parts { connection, microphone, channel, state: peer.state, tracks: peer.tracks, session: None, relay: None };
    Ok((parts, peer.gathered))
}

async fn connected(state: &mut watch::Receiver<RTCPeerConnectionState>) -> Result<(), CallError> {
    let settled = |s: &RTCPeerConnectionState| {
        matches!(s, RTCPeerConnectionState::Connected | RTCPeerConnectionState::Failed | RTCPeerConnectionState::Closed)
    };
    let state = *state.wait_for(settled).await.map_err(|_| CallError::WebRtc("the driver is gone".to_owned()))?;
    match state {
        RTCPeerConnectionState::Connected => Ok(()),
        other => Err(CallError::WebRtc(format!("connection {other}"))),
    }
}

/// Puts the relay in the place of the gateway's first UDP candidate, and takes the others out.
fn through(answer: &str, relay: &Relay) -> Result<String, CallError> {
    let mut found = false;
    let mut out = String::with_capacity(answer.len());
    for line in answer.lines() {
        let Some(candidate) = line.strip_prefix("a=candidate:") else {
            out.push_str(line);
            out.push_str("\r\n");
            continue;
        };
        let mut fields: Vec<String> = candidate.split_whitespace().map(str::to_owned).collect();
        let address = match &fields[..] {
            [_, _, protocol, _, ip, port, ..] if protocol.eq_ignore_ascii_case("udp") => {
                format!("{ip}:{port}").parse().ok()
            }
            _ => None,
        };
        if let (Some(address), false) = (address, found) {
            found = true;
            relay.set_remote(Some(address), None);
            fields[4] = relay.inner()[0].ip().to_string();
            fields[5] = relay.inner()[0].port().to_string();
            out.push_str(&format!("a=candidate:{}\r\n", fields.join(" ")));
        }
    }
    if found { Ok(out) } else { Err(CallError::BadAnswer("no UDP candidate to put a relay before".to_owned())) }
}

/// One client for all calls of the process, so that connections to the gateway are shared.
fn client() -> Result<reqwest::Client, CallError> {
    static CLIENT: std::sync::OnceLock<reqwest::Client> = std::sync::OnceLock::new();
    if let Some(client) = CLIENT.get() {
        return Ok(client.clone());
    }
    let client = crate::wire::http::client()?;
    Ok(CLIENT.get_or_init(|| client).clone())
}

fn pairs(headers: &HeaderMap) -> Vec<(String, String)> {
    headers.iter().filter_map(|(n, v)| Some((n.as_str().to_owned(), v.to_str().ok()?.to_owned()))).collect()
}
