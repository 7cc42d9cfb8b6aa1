//! What streaming services are sent and what they say: Deepgram's `/v1/listen` and `/v2/listen` (Flux), OpenAI's realtime
//! transcription, and vLLM's.
//!
//! Owns what a protocol has to remember of one connection; knows nothing of sockets or time. Messages are those of the
//! services' references: developers.deepgram.com/reference/speech-to-text (listen-streaming, listen-flux), and
//! developers.openai.com/api/docs/guides/realtime-transcription; of vLLM docs.vllm.ai, `speech_to_text/realtime`: a commit
//! begins an utterance, one with `final` ends it, and what is appended before its `transcription.done` is lost.

use std::collections::VecDeque;
use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Value, json};

use crate::audio::{from_i16, to_i16};
use crate::hear::http::{tag, tidy};
use crate::hear::{RATE, Words};
use crate::media::resample::Converter;

/// Samples per second of OpenAI's `audio/pcm`.
const OPENAI_RATE: u32 = 24_000;
/// Deepgram's model where none is named.
const NOVA: &str = "nova-3";
/// OpenAI's model where none is named.
const TRANSCRIBE: &str = "gpt-4o-mini-transcribe";

/// Which protocol a service speaks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Dialect {
    /// Deepgram `/v1/listen`.
    Listen,
    /// Deepgram `/v2/listen`: the service finds the ends of turns itself.
    Flux,
    /// OpenAI realtime transcription.
    OpenAi,
    /// vLLM's `/v1/realtime`.
    Vllm,
}

/// A message to a service.
#[derive(Clone, Debug, PartialEq)]
pub enum Message {
    /// JSON.
    Text(String),
    /// Sound.
    Binary(Vec<u8>),
}

/// What a service said.
#[derive(Clone, Debug, PartialEq)]
pub enum Said {
    /// Words.
    Words {
        /// What they are.
        words: Words,
        /// The end of the sound that they are about, since the first sample that was sent on this connection.
        until: Duration,
        /// They will not change.
        fixed: bool,
        /// The service takes the turn as ended.
        ended: bool,
        /// The service takes it as probably ended.
        eager: bool,
    },
    /// The connection is of no more use.
    Failed(String),
}

impl Dialect {
    /// The metric label.
    pub fn kind(self) -> &'static str {
        match self {
            Dialect::Listen | Dialect::Flux => "deepgram",
            Dialect::OpenAi => "openai",
            Dialect::Vllm => "vllm",
        }
    }

    /// The address of a connection. `url`: the service's, with or without a path.
    ///
    /// # Errors
    /// It is no address of a WebSocket.
    pub fn address(self, url: &str, model: Option<&str>, language: Option<&str>) -> Result<String, String> {
        let mut url = reqwest::Url::parse(url).map_err(|error| format!("[recognizer] url `{url}`: {error}"))?;
        if !matches!(url.scheme(), "ws" | "wss") {
            return Err(format!("[recognizer] url `{url}`: expected ws://... or wss://..."));
        }
        let has_path = url.path().len() > 1;
        let rate = RATE.to_string();
        let mut add = |pairs: &[(&str, &str)]| {
            let given: Vec<String> = url.query_pairs().map(|(key, _)| key.into_owned()).collect();
            let mut query = url.query_pairs_mut();
            for (key, value) in pairs.iter().filter(|(key, _)| !given.iter().any(|known| known == key)) {
                query.append_pair(key, value);
            }
        };
        match self {
            Dialect::Listen => {
                add(&[
                    ("model", model.unwrap_or(NOVA)),
                    ("encoding", "linear16"),
                    ("sample_rate", &rate),
                    ("channels", "1"),
                    ("interim_results", "true"),
                    ("punctuate", "true"),
                ]);
                if let Some(language) = language {
                    add(&[("language", language)]);
                }
            }
            Dialect::Flux => {
                add(&[
                    ("model", model.unwrap_or("flux-general-en")),
                    ("encoding", "linear16"),
                    ("sample_rate", &rate),
                    ("eager_eot_threshold", "0.5"),
                ]);
                // Only the model of many languages takes hints.
                if let Some(language) = language.filter(|_| model.is_some_and(|model| model.ends_with("-multi"))) {
                    add(&[("language_hint", language.split(['-', '_']).next().unwrap_or_default())]);
                }
            }
            Dialect::OpenAi => add(&[("intent", "transcription")]),
            Dialect::Vllm => {}
        }
        if !has_path {
            url.set_path(match self {
                Dialect::Listen => "/v1/listen",
                Dialect::Flux => "/v2/listen",
                Dialect::OpenAi | Dialect::Vllm => "/v1/realtime",
            });
        }
        Ok(url.into())
    }

    /// The value of `Authorization` for a token.
    pub fn authorization(self, token: &str) -> String {
        match self {
            Dialect::Listen | Dialect::Flux => format!("Token {token}"),
            Dialect::OpenAi | Dialect::Vllm => format!("Bearer {token}"),
        }
    }
}

/// One connection's side of the protocol.
pub struct Talk {
    dialect: Dialect,
    model: Option<String>,
    language: Option<String>,
    /// Sound that was sent.
    sent: Duration,
    /// For OpenAI: 16 to 24 kHz.
    wide: Option<Converter>,
    /// Sound that has not been committed yet.
    uncommitted: bool,
    /// Ends of what was committed and is not yet known by its item.
    commits: VecDeque<Duration>,
    /// Items under way: id, end of its sound, text so far.
    items: VecDeque<(String, Duration, String)>,
    /// vLLM: what it has said of the utterance that it hears.
    utterance: Option<String>,
    /// vLLM: the end of the sound that its last words are awaited for.
    ending: Option<Duration>,
}

impl Talk {
    /// Nothing was sent yet.
    pub fn new(dialect: Dialect, model: Option<&str>, language: Option<&str>) -> Self {
        Self {
            dialect,
            model: model.map(Into::into),
            language: language.map(Into::into),
            sent: Duration::ZERO,
            wide: (dialect == Dialect::OpenAi).then(|| Converter::new(RATE, OPENAI_RATE).ok()).flatten(),
            uncommitted: false,
            commits: VecDeque::new(),
            items: VecDeque::new(),
            utterance: None,
            ending: None,
        }
    }

    /// How much sound was sent.
    pub fn sent(&self) -> Duration {
        self.sent
    }

    /// The first message.
    pub fn hello(&self) -> Option<Message> {
        match self.dialect {
            Dialect::Listen | Dialect::Flux => return None,
            Dialect::Vllm => {
                return Some(Message::Text(json!({ "type": "session.update", "model": self.model }).to_string()));
            }
            Dialect::OpenAi => {}
        }
        let mut transcription = json!({ "model": self.model.as_deref().unwrap_or(TRANSCRIBE) });
        if let Some(language) = &self.language {
            transcription["language"] = json!(language.split(['-', '_']).next().unwrap_or_default());
        }
        // The gateway knows where turns end, and commits there.
        let input = json!({
            "format": { "type": "audio/pcm", "rate": OPENAI_RATE },
            "transcription": transcription,
            "turn_detection": null,
        });
        let session = json!({ "type": "transcription", "audio": { "input": input } });
        Some(Message::Text(json!({ "type": "session.update", "session": session }).to_string()))
    }

    /// Whether sound may be sent now; else it is kept until words have come.
    pub fn takes_sound(&self) -> bool {
        self.ending.is_none()
    }

    /// What is to be sent before the next sound.
    pub fn begin(&mut self) -> Option<Message> {
        if self.dialect != Dialect::Vllm || self.utterance.is_some() {
            return None;
        }
        self.utterance = Some(String::new());
        Some(Message::Text(json!({ "type": "input_audio_buffer.commit" }).to_string()))
    }

    /// Sound at [`RATE`]: whole frames of 20 ms.
    pub fn sound(&mut self, pcm: &[i16]) -> Message {
        self.sent += Duration::from_secs(pcm.len() as u64) / RATE;
        self.uncommitted = true;
        let bytes = |pcm: &[i16]| pcm.iter().flat_map(|sample| sample.to_le_bytes()).collect::<Vec<u8>>();
        let append = |pcm: Vec<u8>| {
            let audio = STANDARD.encode(pcm);
            Message::Text(json!({ "type": "input_audio_buffer.append", "audio": audio }).to_string())
        };
        let Some(wide) = &mut self.wide else {
            return if self.dialect == Dialect::Vllm { append(bytes(pcm)) } else { Message::Binary(bytes(pcm)) };
        };
        let mut out = Vec::with_capacity(pcm.len() * 3 / 2);
        let mut frame_out = vec![0.0; wide.frame_out()];
        for frame in pcm.chunks(wide.frame_in()) {
            let mut frame: Vec<f32> = frame.iter().map(|sample| from_i16(*sample)).collect();
            frame.resize(wide.frame_in(), 0.0);
            wide.frame(&frame, &mut frame_out);
            out.extend(frame_out.iter().map(|sample| to_i16(*sample)));
        }
        append(bytes(&out))
    }

    /// The caller pauses: what was sent is to be recognised now. `None`: the service does so by itself.
    pub fn pause(&mut self) -> Option<Message> {
        if !std::mem::take(&mut self.uncommitted) {
            return None;
        }
        match self.dialect {
            Dialect::Listen => Some(Message::Text(json!({ "type": "Finalize" }).to_string())),
            Dialect::Flux => None,
            Dialect::OpenAi => {
                self.commits.push_back(self.sent);
                Some(Message::Text(json!({ "type": "input_audio_buffer.commit" }).to_string()))
            }
            Dialect::Vllm => {
                self.ending = Some(self.sent);
                Some(Message::Text(json!({ "type": "input_audio_buffer.commit", "final": true }).to_string()))
            }
        }
    }

    /// What keeps an idle connection open; `None`: a WebSocket ping does.
    pub fn keep_alive(&self) -> Option<Message> {
        match self.dialect {
            Dialect::Listen => Some(Message::Text(json!({ "type": "KeepAlive" }).to_string())),
            Dialect::Flux | Dialect::OpenAi | Dialect::Vllm => None,
        }
    }

    /// Whether the service must be sent silence, too, to find the end of a turn.
    pub fn wants_silence(&self) -> bool {
        self.dialect == Dialect::Flux
    }

    /// Reads a message of the service.
    ///
    /// # Errors
    /// It is no JSON object: the service is none, or broken.
    pub fn read(&mut self, text: &str) -> Result<Option<Said>, String> {
        let message: Value =
            serde_json::from_str(text).map_err(|_| "the recogniser sent what is no message".to_owned())?;
        let kind = message["type"].as_str().ok_or("the recogniser sent what is no message")?;
        Ok(match (self.dialect, kind) {
            (Dialect::Listen, "Results") => listen(&message),
            (Dialect::Flux, "TurnInfo") => flux(&message),
            (Dialect::Listen | Dialect::Flux, "Error" | "ConfigureFailure") => Some(failed(&message["description"])),
            (Dialect::OpenAi, kind) => self.openai(kind, &message),
            (Dialect::Vllm, kind) => self.vllm(kind, &message),
            _ => None,
        })
    }

    fn openai(&mut self, kind: &str, message: &Value) -> Option<Said> {
        let id = message["item_id"].as_str().unwrap_or_default();
        match kind {
            "input_audio_buffer.committed" => {
                let until = self.commits.pop_front().unwrap_or(self.sent);
                self.items.push_back((id.to_owned(), until, String::new()));
                // A service that never finishes what it took has forgotten the oldest.
                if self.items.len() > MAX_ITEMS {
                    self.items.pop_front();
                }
                None
            }
            "conversation.item.input_audio_transcription.delta" => {
                let (_, until, text) = self.items.iter_mut().find(|(known, ..)| known == id)?;
                let delta = message["delta"].as_str().unwrap_or_default();
                // An endless answer is none.
                if text.len() + delta.len() <= MAX_ITEM {
                    text.push_str(delta);
                }
                Some(said(text, "", 1.0, *until, false))
            }
            "conversation.item.input_audio_transcription.completed" => {
                let place = self.items.iter().position(|(known, ..)| known == id)?;
                let (_, until, _) = self.items.remove(place)?;
                let language = self.language.clone().unwrap_or_default();
                Some(said(message["transcript"].as_str().unwrap_or_default(), &language, 1.0, until, true))
            }
            "conversation.item.input_audio_transcription.failed" | "error" => {
                Some(failed(&message["error"]["message"]))
            }
            _ => None,
        }
    }
}

impl Talk {
    fn vllm(&mut self, kind: &str, message: &Value) -> Option<Said> {
        match kind {
            "transcription.delta" => {
                let (text, delta) = (self.utterance.as_mut()?, message["delta"].as_str().unwrap_or_default());
                // An endless answer is none.
                if text.len() + delta.len() <= MAX_ITEM {
                    text.push_str(delta);
                }
                Some(said(text, "", 1.0, self.ending.unwrap_or(self.sent), false))
            }
            "transcription.done" => {
                self.utterance = None;
                let until = self.ending.take().unwrap_or(self.sent);
                let language = self.language.clone().unwrap_or_default();
                Some(said(message["text"].as_str().unwrap_or_default(), &language, 1.0, until, true))
            }
            "error" => Some(failed(&message["error"])),
            _ => None,
        }
    }
}

/// Bytes of one item's text: a minute of speech has about one thousand.
const MAX_ITEM: usize = 16 << 10;
/// Items under way.
const MAX_ITEMS: usize = 64;
/// No connection lasts as long: a year.
const LONGEST: Duration = Duration::from_secs(365 * 24 * 3_600);

fn failed(reason: &Value) -> Said {
    let reason = tidy(reason.as_str().unwrap_or("no reason given"));
    Said::Failed(format!("the recogniser says: {}", reason.chars().take(200).collect::<String>()))
}

fn said(text: &str, language: &str, confidence: f32, until: Duration, fixed: bool) -> Said {
    let words = Words { text: tidy(text), language: tag(language), confidence: confidence.clamp(0.0, 1.0) };
    Said::Words { words, until, fixed, ended: false, eager: false }
}

/// Seconds of a message; nonsense counts as none, also what no call lasts: times are added to one another.
fn seconds(value: &Value) -> Duration {
    let time = Duration::try_from_secs_f64(value.as_f64().unwrap_or_default()).unwrap_or_default();
    if time < LONGEST { time } else { Duration::ZERO }
}

fn listen(message: &Value) -> Option<Said> {
    let best = &message["channel"]["alternatives"][0];
    let language = best["languages"][0].as_str().unwrap_or_default();
    let until = seconds(&message["start"]) + seconds(&message["duration"]);
    let fixed = message["is_final"].as_bool().unwrap_or_default();
    let confidence = best["confidence"].as_f64().unwrap_or(1.0) as f32;
    Some(said(best["transcript"].as_str()?, language, confidence, until, fixed))
}

fn flux(message: &Value) -> Option<Said> {
    let event = message["event"].as_str()?;
    let language = message["languages"][0].as_str().unwrap_or_default();
    let until = seconds(&message["audio_window_end"]);
    let words = message["words"].as_array().map(Vec::as_slice).unwrap_or_default();
    let sure = words.iter().filter_map(|word| word["confidence"].as_f64()).reduce(f64::min).unwrap_or(1.0) as f32;
    let mut said = said(message["transcript"].as_str()?, language, sure, until, event == "EndOfTurn");
    if let Said::Words { ended, eager, .. } = &mut said {
        (*ended, *eager) = (event == "EndOfTurn", event == "EagerEndOfTurn");
    }
    Some(said)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_and_shares_that_cannot_be_are_none() {
        for (start, duration, expected) in
            [(1.5, 0.5, 2.0), (1e19, 1e19, 0.0), (1.0, 1.8e19, 1.0), (-1.0, 2.0, 2.0), (f64::MAX, 1e308, 0.0)]
        {
            let best = json!({ "transcript": "Yes.", "confidence": 1e300, "languages": ["e\u{7}n"] });
            let message = json!({
                "type": "Results", "start": start, "duration": duration, "is_final": true,
                "channel": { "alternatives": [best] },
            });
            let read = Talk::new(Dialect::Listen, None, None).read(&message.to_string());
            let Ok(Some(Said::Words { words, until, .. })) = read else { panic!("{read:?}") };
            assert_eq!((until.as_secs_f64(), words.confidence), (expected, 1.0), "{start} and {duration}");
            assert_eq!(words.language, "", "a control character is in no language's name");
        }
    }

    #[test]
    fn a_service_that_only_takes_sound_and_never_finishes_is_bounded() {
        let mut talk = Talk::new(Dialect::OpenAi, None, None);
        for n in 0..1_000 {
            let taken = json!({ "item_id": format!("item-{n}") });
            assert!(talk.openai("input_audio_buffer.committed", &taken).is_none());
        }
        assert_eq!(talk.items.len(), MAX_ITEMS);
        let done = json!({ "item_id": "item-999", "transcript": "Yes." });
        assert!(talk.openai("conversation.item.input_audio_transcription.completed", &done).is_some());
    }
}
