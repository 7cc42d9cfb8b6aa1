//! `GET /v1/audio/speech/stream` (WebSocket): text in as it is written, audio out as it is made.
//!
//! In: `session.config {voice, response_format, speed, instructions, language, seed, markup, volume}` (first, optional),
//! `input.text {text}`, `input.done` (end of a turn), `session.close`. Out: binary audio, and JSON
//! `session.created`, `audio.done` after each turn, `error`.

use std::time::{Duration, Instant};

use axum::extract::State;
use axum::extract::ws::{Message, WebSocket, WebSocketUpgrade};
use axum::response::Response;
use serde::Deserialize;
use serde_json::{Value, json};

use super::auth::Caller;
use super::sockets::{Pulse, WRITE_TIMEOUT, bounded, ping, write};
use super::speech::{MAX_INPUT_CHARS, format_of, speed_of, voice_of, volume_of};
use crate::audio_file::{AudioWriter, Format};
use crate::call::segment::{Script, SegmentConfig};
use crate::clock;
use crate::gateway::Gateway;
use crate::gateway::speaker::{Manner, Speaker};
use crate::text::Normalise;
use crate::turn::Markup;

/// Largest message: the longest text in four-byte characters, and the frame around it.
const MAX_FRAME: usize = 4 * MAX_INPUT_CHARS + 1_024;
/// The writer adds nothing for so long: a sentence that looks finished is.
const PAUSE: Duration = Duration::from_millis(200);

/// Upgrades and serves one session.
pub(super) async fn stream(State(gateway): State<Gateway>, caller: Caller, upgrade: WebSocketUpgrade) -> Response {
    let tenant = caller.tenant.clone();
    let manner = Manner::plain(tenant);
    bounded(upgrade, MAX_FRAME).on_upgrade(|socket| Session::new(gateway, caller, manner).run(socket))
}

#[derive(Deserialize)]
#[serde(tag = "type")]
pub(super) enum FromClient {
    #[serde(rename = "session.config")]
    Config(Config),
    #[serde(rename = "input.text")]
    Text { text: String },
    #[serde(rename = "input.done")]
    Done {},
    #[serde(rename = "session.close")]
    Close {},
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Config {
    model: Option<String>,
    voice: Option<String>,
    response_format: Option<String>,
    speed: Option<f32>,
    instructions: Option<String>,
    language: Option<String>,
    normalise: Option<Normalise>,
    seed: Option<u64>,
    #[serde(default)]
    markup: Markup,
    volume: Option<f32>,
}

struct Session {
    gateway: Gateway,
    caller: Caller,
    manner: Manner,
    format: Format,
    turn: Option<Turn>,
}

/// A turn that is being written or spoken.
struct Turn {
    script: Script,
    speaker: Speaker,
    writer: AudioWriter,
    complete: bool,
    characters: usize,
    /// When a finished sentence is spoken although the writer has added nothing.
    settles: Option<Instant>,
}

impl Session {
    fn new(gateway: Gateway, caller: Caller, manner: Manner) -> Self {
        Self { gateway, caller, manner, format: Format::Pcm, turn: None }
    }

    async fn run(mut self, mut socket: WebSocket) {
        if !write(&mut socket, json!({ "type": "session.created" }).to_string()).await {
            return;
        }
        let mut pulse = Pulse::new();
        loop {
            // While a complete turn is spoken nothing more is read: the next turn waits in the socket.
            let reads = !self.turn.as_ref().is_some_and(|turn| turn.complete);
            let settles = self.turn.as_ref().and_then(|turn| turn.settles);
            let speaks = self.turn.as_ref().is_some_and(|turn| turn.complete || !turn.speaker.is_idle());
            tokio::select! {
                lives = pulse.due() => {
                    if !reads {
                        pulse.heard();
                    } else if !lives {
                        return;
                    }
                    if !ping(&mut socket).await {
                        return;
                    }
                }
                message = socket.recv(), if reads => match message.inspect(|_| pulse.heard()) {
                    Some(Ok(Message::Text(text))) => match self.obey(&text) {
                        Ok(true) => {}
                        Ok(false) => break,
                        Err(message) => {
                            let error = json!({ "type": "error", "error": { "message": message, "type": "invalid_request_error" } });
                            if !write(&mut socket, error.to_string()).await {
                                break;
                            }
                        }
                    },
                    Some(Ok(Message::Binary(_) | Message::Ping(_) | Message::Pong(_))) => {}
                    Some(Err(error)) => return super::sockets::fail(&mut socket, error).await,
                    Some(Ok(Message::Close(_))) | None => break,
                },
                () = until(settles) => self.settle(),
                spoken = next_audio(&mut self.turn), if speaks => if !self.deliver(&mut socket, spoken).await {
                    break;
                },
            }
        }
    }

    /// The writer pauses: a sentence that is finished does not wait for the next word.
    fn settle(&mut self) {
        let Some(turn) = &mut self.turn else { return };
        turn.settles = None;
        let mut parts = Vec::new();
        turn.script.settle(&mut parts);
        turn.speaker.add(parts);
    }

    async fn deliver(&mut self, socket: &mut WebSocket, spoken: Result<Option<Vec<f32>>, String>) -> bool {
        let (bytes, done) = self.encode(spoken).unwrap_or_else(|message| {
            self.turn = None;
            let error = json!({ "type": "error", "error": { "message": message, "type": "server_error" } });
            (Vec::new(), Some(error))
        });
        if !bytes.is_empty() {
            let send = tokio::time::timeout(WRITE_TIMEOUT, socket.send(Message::Binary(bytes.into())));
            if !matches!(send.await, Ok(Ok(()))) {
                return false;
            }
        }
        match done {
            None => true,
            Some(message) => write(socket, message.to_string()).await,
        }
    }

    /// The bytes of what was spoken, and the message that ends the turn when it is over.
    fn encode(&mut self, spoken: Result<Option<Vec<f32>>, String>) -> Result<(Vec<u8>, Option<Value>), String> {
        let Some(turn) = &mut self.turn else { return Ok((Vec::new(), None)) };
        if let Some(pcm) = spoken? {
            return Ok((turn.writer.push(&pcm).map_err(|e| e.to_string())?, None));
        }
        if !turn.complete {
            return Ok((Vec::new(), None));
        }
        let Some(turn) = self.turn.take() else { return Ok((Vec::new(), None)) };
        let done = json!({ "type": "audio.done", "characters": turn.characters });
        Ok((turn.writer.finish().map_err(|e| e.to_string())?, Some(done)))
    }

    /// Carries out one message; `false` ends the session.
    fn obey(&mut self, text: &str) -> Result<bool, String> {
        match serde_json::from_str(text).map_err(|e| format!("not a usable message: {e}"))? {
            FromClient::Config(config) => self.configure(config)?,
            FromClient::Text { text } => {
                if self.turn.is_none() {
                    self.turn = Some(Turn {
                        script: Script::new(SegmentConfig::default(), self.manner.markup).reading(&self.manner.lexicon),
                        speaker: Speaker::new(self.gateway.engine.clone(), self.manner.clone()),
                        writer: AudioWriter::new(self.format, crate::audio::RATE).map_err(|e| e.to_string())?,
                        complete: false,
                        characters: 0,
                        settles: None,
                    });
                }
                let Some(turn) = &mut self.turn else { return Ok(true) };
                turn.characters += text.chars().count();
                if turn.characters > MAX_INPUT_CHARS {
                    return Err(format!(
                        "a turn of more than {MAX_INPUT_CHARS} characters; send `input.done` between turns"
                    ));
                }
                let mut parts = Vec::new();
                turn.script.push(&text, &mut parts);
                turn.speaker.add(parts);
                turn.settles = Some(clock::now() + PAUSE);
                if let Some(mistake) = turn.script.mistake() {
                    return Err(mistake);
                }
            }
            FromClient::Done {} => {
                let Some(turn) = &mut self.turn else { return Err("`input.done` without `input.text`".into()) };
                let mut parts = Vec::new();
                turn.script.finish(&mut parts);
                turn.speaker.add(parts);
                turn.complete = true;
                turn.settles = None;
                if let Some(mistake) = turn.script.mistake() {
                    return Err(mistake);
                }
            }
            FromClient::Close {} => return Ok(false),
        }
        Ok(true)
    }

    fn configure(&mut self, config: Config) -> Result<(), String> {
        if self.turn.is_some() {
            return Err("`session.config` must come between turns".into());
        }
        let _ = config.model;
        if let Some(name) = &config.response_format {
            self.format = format_of(Some(name)).map_err(|e| e.to_string())?;
        }
        self.manner = Manner {
            voice: voice_of(&self.gateway, &self.caller, config.voice).map_err(|e| e.to_string())?,
            language: config.language,
            normalise: config.normalise.unwrap_or_default(),
            instructions: config.instructions,
            seed: config.seed.unwrap_or(0),
            speed: speed_of(config.speed).map_err(|e| e.to_string())?,
            markup: config.markup,
            volume: volume_of(config.volume).map_err(|e| e.to_string())?,
            lexicon: self.gateway.agents.lexicon(),
            tenant: self.manner.tenant.clone(),
        };
        Ok(())
    }
}

async fn until(when: Option<Instant>) {
    match when {
        Some(when) => tokio::time::sleep_until(when.into()).await,
        None => std::future::pending().await,
    }
}

async fn next_audio(turn: &mut Option<Turn>) -> Result<Option<Vec<f32>>, String> {
    match turn {
        Some(turn) => turn.speaker.next().await.map_err(|e| e.to_string()),
        // Guarded by the caller; a turn is there.
        None => std::future::pending().await,
    }
}
