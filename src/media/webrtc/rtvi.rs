//! What a Pipecat client says on its data channel (RTVI, the label `rtvi-ai`), and what it is told there: the gateway's frames,
//! as far as a bot that speaks text has something to say in that protocol.
//!
//! Owns what the client has been told of the sentence that sounds. No I/O: texts in, texts and what they ask for out.
//!
//! | the client says | that does |
//! | --- | --- |
//! | `client-ready` | answered with `bot-ready`, and with what sounds already; nothing is told before |
//! | `send-text` | the caller wrote it: a prompt for the agent |
//! | `dtmf` | the caller pressed keys |
//! | `disconnect-bot` | hangs up |
//! | `client-message`, `append-to-context` | refused with `error-response`: the agent is a program of text elsewhere |
//!
//! | our frame | the client is told |
//! | --- | --- |
//! | `vad` | `user-started-speaking`, `user-stopped-speaking` |
//! | `prompt` | `user-transcription` |
//! | `info` `speaking` | `bot-started-speaking`, `bot-tts-text`, `bot-output` in progress |
//! | `info` `turnEnded`, `interrupt` | `bot-output` completed (what was heard of it), `bot-stopped-speaking` |
//! | `error` | `error`, not fatal |
//!
//! Everything else (pings, the state of tracks, pictures of pages) is heard and needs no answer. Source: the messages of
//! `@pipecat-ai/client-js` 1.13, protocol 2.1.

use std::time::Duration;

use serde_json::{Value, json};

use crate::voice::enrol::rfc3339;

/// The label of the data channel of Pipecat's SmallWebRTC transport.
pub const CHANNEL: &str = "chat";
/// Names the protocol in each message.
const LABEL: &str = "rtvi-ai";
/// The protocol that these messages are of. An older client is answered with its own.
const VERSION: &str = "2.1.0";
/// Longest text that counts as written by the caller, bytes: ten minutes of speech.
const MAX_TEXT: usize = 8 << 10;
/// Keys of one message.
const MAX_KEYS: usize = 64;

/// What a message of the client asks for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Asked {
    /// To be told this.
    Tell(String),
    /// The caller wrote it.
    Prompt(String),
    /// The caller pressed a key.
    Key(char),
    /// The call is over for the client.
    HangUp,
}

/// One client.
#[derive(Debug, Default)]
pub struct Rtvi {
    /// It has said that it listens.
    ready: bool,
    /// The sentence that sounds, and its number in the call.
    sounding: Option<(String, u64)>,
    /// Sentences so far.
    sentences: u64,
}

impl Rtvi {
    /// Takes what the client says. What is not of this protocol asks for nothing.
    pub fn take(&mut self, text: &str) -> Vec<Asked> {
        let Ok(message) = serde_json::from_str::<Value>(text) else { return Vec::new() };
        if message["label"] != LABEL {
            return Vec::new();
        }
        let (id, data) = (&message["id"], &message["data"]);
        let refuse = |why: &str| {
            vec![Asked::Tell(
                json!({ "label": LABEL, "type": "error-response", "id": id, "data": { "error": why } }).to_string(),
            )]
        };
        match message["type"].as_str().unwrap_or_default() {
            "client-ready" => self.greet(id, data["version"].as_str().unwrap_or(VERSION)),
            "send-text" => match data["content"].as_str().map(str::trim) {
                Some(text) if (1..=MAX_TEXT).contains(&text.len()) => vec![Asked::Prompt(text.to_owned())],
                _ => refuse("`content` must be a text of 1 to 8192 bytes"),
            },
            "dtmf" => {
                // One a message before protocol 2.1.
                let one = data["button"].as_str().into_iter();
                let many = data["buttons"].as_array().into_iter().flatten().filter_map(Value::as_str);
                let keys = one.chain(many).flat_map(str::chars).filter(|key| "0123456789*#ABCD".contains(*key));
                keys.take(MAX_KEYS).map(Asked::Key).collect()
            }
            "disconnect-bot" => vec![Asked::HangUp],
            "client-message" | "append-to-context" => {
                refuse("the agent of this call takes no messages beside the conversation: use `send-text`")
            }
            _ => Vec::new(),
        }
    }

    /// What the client is told of `frame`, which left at `wall` (time since the Unix epoch).
    pub fn tell(&mut self, frame: &str, wall: Duration) -> Vec<String> {
        let Ok(frame) = serde_json::from_str::<Value>(frame) else { return Vec::new() };
        let mut told = Vec::new();
        match (frame["type"].as_str().unwrap_or_default(), frame["name"].as_str().unwrap_or_default()) {
            ("vad", _) => {
                let name = if frame["speaking"] == true { "user-started-speaking" } else { "user-stopped-speaking" };
                told.push(message(name, json!({})));
            }
            // `resumed` has no words: those before it were not the end after all.
            ("prompt", _) if frame["phase"] != "resumed" => {
                let said = json!({
                    "text": frame["voicePrompt"], "final": frame["last"], "timestamp": rfc3339(wall), "user_id": "caller",
                });
                told.push(message("user-transcription", said));
            }
            ("info", "speaking") => {
                let text = frame["text"].as_str().unwrap_or_default().to_owned();
                match self.complete(None) {
                    Some(completed) => told.push(completed),
                    None => told.push(message("bot-started-speaking", json!({}))),
                }
                self.sentences += 1;
                told.extend(begun(&text, self.sentences));
                self.sounding = Some((text, self.sentences));
            }
            ("info", "turnEnded") => {
                // How much of it was heard is known of the whole turn only: a sentence that was cut is one that did not end.
                let cut = frame["how"] != "done";
                told.extend(self.stop(cut.then_some("")));
            }
            ("interrupt", _) => {
                let heard = frame["utteranceUntilInterrupt"].as_str().unwrap_or_default().to_owned();
                told.extend(self.stop(Some(&heard)));
            }
            ("error", _) => {
                told.push(message("error", json!({ "error": frame["description"], "fatal": false })));
            }
            _ => {}
        }
        if self.ready { told } else { Vec::new() }
    }

    /// The client listens from now on.
    fn greet(&mut self, id: &Value, version: &str) -> Vec<Asked> {
        self.ready = true;
        let older = version.split('.').next().and_then(|major| major.parse().ok()).is_some_and(|major: u32| major < 2);
        let version = if older { version } else { VERSION };
        let about = json!({ "library": "antiphon", "library_version": env!("CARGO_PKG_VERSION") });
        let ready = json!({
            "label": LABEL, "type": "bot-ready", "id": id, "data": { "version": version, "about": about },
        });
        let mut told = vec![ready.to_string()];
        if let Some((text, number)) = &self.sounding {
            told.push(message("bot-started-speaking", json!({})));
            told.extend(begun(text, *number));
        }
        told.into_iter().map(Asked::Tell).collect()
    }

    /// The end of a turn, if one sounds.
    fn stop(&mut self, heard: Option<&str>) -> Vec<String> {
        let last = self.complete(heard);
        last.map_or_else(Vec::new, |last| vec![last, message("bot-stopped-speaking", json!({}))])
    }

    /// The end of the sentence that sounds, if one does; `heard` is what was of the turn, where that was cut.
    fn complete(&mut self, heard: Option<&str>) -> Option<String> {
        let (text, number) = self.sounding.take()?;
        // Of the turn so far; this sentence's own share is its end.
        let share = heard.map(|heard| spoken(&text, heard));
        let (heard, left) = share.unwrap_or((text.as_str(), ""));
        let status = if left.is_empty() { "completed" } else { "in-progress" };
        Some(output(&text, number, status, heard, left))
    }
}

/// What of `sentence` stands at the end of `heard`, and the rest of it.
fn spoken<'a>(sentence: &'a str, heard: &str) -> (&'a str, &'a str) {
    let mut ends = sentence.char_indices().map(|(at, _)| at).chain([sentence.len()]).rev();
    let at = ends.find(|at| heard.ends_with(&sentence[..*at])).unwrap_or(0);
    (sentence[..at].trim_end(), sentence[at..].trim_start())
}

/// What is told of a sentence that begins to sound.
fn begun(text: &str, number: u64) -> [String; 2] {
    [message("bot-tts-text", json!({ "text": text })), output(text, number, "in-progress", "", text)]
}

fn output(text: &str, number: u64, status: &str, heard: &str, left: &str) -> String {
    let data = json!({
        "text": text, "aggregated_by": "sentence", "segment_id": number, "spoken": true, "will_be_spoken": true,
        "spoken_status": status, "spoken_progress": { "accumulated_text": heard, "remaining_text": left },
    });
    message("bot-output", data)
}

fn message(kind: &str, data: Value) -> String {
    json!({ "label": LABEL, "type": kind, "data": data }).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    const WALL: Duration = Duration::from_secs(1_000_000_000);

    fn ready(rtvi: &mut Rtvi, version: &str) -> Vec<Value> {
        let asked = rtvi.take(
            &json!({ "label": LABEL, "type": "client-ready", "id": "7", "data": { "version": version } }).to_string(),
        );
        asked
            .into_iter()
            .map(|asked| match asked {
                Asked::Tell(text) => serde_json::from_str(&text).expect("JSON"),
                other => panic!("{other:?}"),
            })
            .collect()
    }

    fn tell(rtvi: &mut Rtvi, frame: Value) -> Vec<Value> {
        let told = rtvi.tell(&frame.to_string(), WALL);
        told.iter().map(|text| serde_json::from_str(text).expect("JSON")).collect()
    }

    fn kinds(told: &[Value]) -> Vec<&str> {
        told.iter().map(|message| message["type"].as_str().expect("a type")).collect()
    }

    fn speaking(text: &str) -> Value {
        json!({ "type": "info", "name": "speaking", "text": text, "lastsMs": 900 })
    }

    #[test]
    fn a_client_that_comes_late_is_told_what_sounds() {
        let mut rtvi = Rtvi::default();
        assert!(tell(&mut rtvi, speaking("Hello.")).is_empty(), "it does not listen yet");
        let told = ready(&mut rtvi, "2.1.0");
        assert_eq!(kinds(&told), ["bot-ready", "bot-started-speaking", "bot-tts-text", "bot-output"]);
        assert_eq!((&told[0]["id"], &told[0]["data"]["version"]), (&json!("7"), &json!("2.1.0")));
        assert_eq!(
            (&told[3]["data"]["text"], &told[3]["data"]["spoken_status"]),
            (&json!("Hello."), &json!("in-progress"))
        );
        assert!(told.iter().all(|message| message["label"] == LABEL));
        assert_eq!(
            ready(&mut Rtvi::default(), "1.2.0")[0]["data"]["version"],
            "1.2.0",
            "the protocol of an older client"
        );
    }

    #[test]
    fn a_turn_is_sentences_that_begin_and_are_completed() {
        let mut rtvi = Rtvi::default();
        ready(&mut rtvi, "2.1.0");
        assert_eq!(kinds(&tell(&mut rtvi, speaking("One."))), ["bot-started-speaking", "bot-tts-text", "bot-output"]);
        let told = tell(&mut rtvi, speaking("Two."));
        assert_eq!(kinds(&told), ["bot-output", "bot-tts-text", "bot-output"]);
        let about = |message: &Value| (message["data"]["segment_id"].clone(), message["data"]["spoken_status"].clone());
        assert_eq!(about(&told[0]), (json!(1), json!("completed")));
        assert_eq!(about(&told[2]), (json!(2), json!("in-progress")));
        let told = tell(&mut rtvi, json!({ "type": "info", "name": "turnEnded", "how": "done" }));
        assert_eq!(kinds(&told), ["bot-output", "bot-stopped-speaking"]);
        assert_eq!(told[0]["data"]["spoken_progress"], json!({ "accumulated_text": "Two.", "remaining_text": "" }));
        assert!(tell(&mut rtvi, json!({ "type": "info", "name": "turnEnded", "how": "done" })).is_empty());
    }

    #[test]
    fn an_interruption_tells_what_was_heard_of_the_sentence() {
        let mut rtvi = Rtvi::default();
        ready(&mut rtvi, "2.1.0");
        tell(&mut rtvi, speaking("First."));
        tell(&mut rtvi, speaking("There are three flights."));
        let told = tell(&mut rtvi, json!({ "type": "interrupt", "utteranceUntilInterrupt": "First. There are" }));
        assert_eq!(kinds(&told), ["bot-output", "bot-stopped-speaking"]);
        let progress = json!({ "accumulated_text": "There are", "remaining_text": "three flights." });
        assert_eq!(
            (&told[0]["data"]["spoken_progress"], &told[0]["data"]["spoken_status"]),
            (&progress, &json!("in-progress"))
        );
        assert!(tell(&mut rtvi, json!({ "type": "info", "name": "turnEnded", "how": "interrupted" })).is_empty());
    }

    #[test]
    fn the_caller_is_transcribed() {
        let mut rtvi = Rtvi::default();
        ready(&mut rtvi, "2.1.0");
        assert_eq!(kinds(&tell(&mut rtvi, json!({ "type": "vad", "speaking": true }))), ["user-started-speaking"]);
        let told = tell(&mut rtvi, json!({ "type": "prompt", "voicePrompt": "Yes.", "lang": "en", "last": true }));
        let expected =
            json!({ "text": "Yes.", "final": true, "timestamp": "2001-09-09T01:46:40Z", "user_id": "caller" });
        assert_eq!((kinds(&told), &told[0]["data"]), (vec!["user-transcription"], &expected));
        assert!(
            tell(&mut rtvi, json!({ "type": "prompt", "voicePrompt": "", "last": false, "phase": "resumed" }))
                .is_empty()
        );
        assert_eq!(kinds(&tell(&mut rtvi, json!({ "type": "error", "description": "no voice" }))), ["error"]);
        assert!(tell(&mut rtvi, json!({ "type": "mark", "name": "x" })).is_empty());
        assert!(rtvi.tell("nonsense", WALL).is_empty());
    }

    #[test]
    fn what_the_client_asks_for_is_done_or_refused() {
        let mut rtvi = Rtvi::default();
        let mut ask = |kind: &str, data: Value| {
            rtvi.take(&json!({ "label": LABEL, "type": kind, "id": "3", "data": data }).to_string())
        };
        assert_eq!(ask("send-text", json!({ "content": " When? " })), [Asked::Prompt("When?".into())]);
        assert_eq!(ask("dtmf", json!({ "buttons": ["1", "#"] })), [Asked::Key('1'), Asked::Key('#')]);
        assert_eq!(ask("dtmf", json!({ "button": "5" })), [Asked::Key('5')]);
        assert_eq!(ask("disconnect-bot", json!({})), [Asked::HangUp]);
        for (kind, data) in [
            ("send-text", json!({ "content": "" })),
            ("send-text", json!({ "content": "x".repeat(MAX_TEXT + 1) })),
            ("client-message", json!({ "t": "weather" })),
        ] {
            let [Asked::Tell(refusal)] = &ask(kind, data)[..] else { panic!("{kind}") };
            assert!(refusal.contains("error-response") && refusal.contains("\"3\""), "{refusal}");
        }
        for other in ["ping: 1", "{}", "[1]", r#"{"type":"signalling","message":{"type":"trackStatus"}}"#] {
            assert!(rtvi.take(other).is_empty(), "{other}");
        }
    }
}
