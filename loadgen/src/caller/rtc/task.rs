//! The task of one WebRTC call: speaks by the clock, listens, carries text, and closes what was opened.

use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::{mpsc, watch};
use tokio_util::task::AbortOnDropHandle;
use webrtc::data_channel::{DataChannel, DataChannelEvent};
use webrtc::media_stream::track_remote::{TrackRemote, TrackRemoteEvent};
use webrtc::peer_connection::RTCPeerConnectionState;

use super::peer::received;
use super::{Config, OPUS, Parts, Session};
use crate::caller::call::{Call, CallError, Command, End, Leg, Setup, Status};
use crate::caller::speak::Speaker;
use crate::clock;
use crate::sound::ear::Ear;
use crate::sound::heard::{PayloadTypes, Recorder};
use crate::wire::codec::Codec;

/// Texts that are not taken yet; more are dropped.
const TEXTS: usize = 256;

pub(super) fn start(
    config: &Config,
    parts: Parts,
    headers: Vec<(String, String)>,
    asked: Instant,
    answered: Instant,
) -> Result<Call, CallError> {
    let now = clock::now();
    let types = PayloadTypes { audio: OPUS, event: None };
    let ear = Ear::new(Recorder::new(now, Codec::Opus, types, config.opus_rate)?);
    let speaker = Speaker::new(now, Codec::Opus, OPUS, None, config.idle)?;
    let say_rate = speaker.rate();
    let (commands, command_queue) = mpsc::channel(16);
    let (text_queue, texts) = mpsc::channel(TEXTS);
    let status = watch::Sender::new(Status::default());
    let call = Call {
        leg: Leg::Webrtc,
        id: headers.iter().find(|(n, _)| n.eq_ignore_ascii_case("X-Antiphon-Call")).map(|(_, v)| v.clone()),
        codec: Codec::Opus,
        say_rate,
        setup: Setup { asked, rang: answered, answered, connected: now },
        ear: ear.clone(),
        commands,
        status: status.subscribe(),
        texts,
        headers,
    };
    tokio::spawn(run(parts, ear, speaker, command_queue, text_queue, status));
    Ok(call)
}

async fn run(
    mut parts: Parts,
    ear: Ear,
    mut speaker: Speaker,
    mut commands: mpsc::Receiver<Command>,
    texts: mpsc::Sender<(Instant, String)>,
    status: watch::Sender<Status>,
) {
    let mut listening = None;
    let channel = AbortOnDropHandle::new(tokio::spawn(read_channel(parts.channel.clone(), texts, status.clone())));
    let end = loop {
        tokio::select! {
            command = commands.recv() => match command {
                Some(Command::Say { pcm, began }) => speaker.say(pcm, began),
                Some(Command::Press { digits, done }) => speaker.press(&digits, done),
                Some(Command::StopSpeaking) => speaker.stop(),
                Some(Command::Text { text, sent }) => {
                    // What is sent before the channel is open would be lost: the sender is dropped instead.
                    if parts.channel.send_text(&text).await.is_ok() {
                        let _ = sent.send(clock::now());
                    }
                }
                Some(Command::Hold { done, .. }) => {
                    let _ = done.send(Err(CallError::WebRtc("a browser cannot hold".to_owned())));
                }
                Some(Command::Bye) | None => break End::Local,
            },
            Some(track) = parts.tracks.recv() => {
                listening.get_or_insert_with(|| AbortOnDropHandle::new(tokio::spawn(listen(track, ear.clone()))));
            }
            Ok(()) = parts.state.changed() => {
                let state = *parts.state.borrow_and_update();
                match state {
                    RTCPeerConnectionState::Closed => break End::Remote,
                    RTCPeerConnectionState::Failed | RTCPeerConnectionState::Disconnected => {
                        break End::Failed(format!("connection {state}"));
                    }
                    _ => {}
                }
            }
            () = clock::sleep_until(speaker.deadline()) => {
                for packet in speaker.poll(clock::now()) {
                    // An unbound or closed track shows as a state change.
                    let _ = parts.microphone.send(packet).await;
                }
            }
        }
    };
    drop((channel, listening));
    if end == End::Local {
        end_session(parts.session.take()).await;
    }
    if let Some(connection) = parts.connection.0.take() {
        let _ = tokio::time::timeout(Duration::from_secs(2), connection.close()).await;
    }
    status.send_modify(|s| s.end = Some(end));
}

/// Tells the gateway that the call is over; bounded.
pub(super) async fn end_session(session: Option<Session>) {
    let Some(Session { client, url, token }) = session else { return };
    let mut request = client.delete(url).timeout(Duration::from_secs(3));
    if let Some(token) = token {
        request = request.bearer_auth(token);
    }
    if let Err(error) = request.send().await {
        tracing::debug!(%error, "DELETE of the session");
    }
}

async fn listen(track: Arc<dyn TrackRemote>, ear: Ear) {
    while let Some(event) = track.poll().await {
        if let TrackRemoteEvent::OnRtpPacket(packet) = event {
            ear.push(clock::now(), received(packet));
        }
    }
}

async fn read_channel(
    channel: Arc<dyn DataChannel>,
    texts: mpsc::Sender<(Instant, String)>,
    status: watch::Sender<Status>,
) {
    while let Some(event) = channel.poll().await {
        match event {
            DataChannelEvent::OnOpen => status.send_modify(|s| s.channel = true),
            DataChannelEvent::OnMessage(message) => {
                if let Ok(text) = String::from_utf8(message.data.to_vec()) {
                    // overflow: drops; a test that reads texts takes them in time.
                    let _ = texts.try_send((clock::now(), text));
                }
            }
            DataChannelEvent::OnClose => status.send_modify(|s| s.channel = false),
            _ => {}
        }
    }
}
