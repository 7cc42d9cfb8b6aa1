//! Twilio Media Streams frames: a call's sound as JSON messages of a WebSocket, both ways.
//!
//! One [`Framing`] is one stream; who opened the WebSocket makes no difference to it. Messages are those of
//! twilio.com/docs/voice/media-streams/websocket-messages. Beside mu-law at 8 kHz, which is all that Twilio has, a stream
//! may carry 16-bit little-endian samples (`audio/x-l16`), as other carriers' streams do.
//!
//! # Why
//! What a peer plays comes in pieces of any length. They are converted as one stream, so that where a piece ends is not
//! heard: what is less than a frame waits for the next piece, or for a mark.

use audio_codec::{
    Decoder, Encoder,
    pcmu::{PcmuDecoder, PcmuEncoder},
};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde::Deserialize;
use serde_json::{Value, json};

use crate::audio::{self, from_i16, to_i16};
use crate::call::{CallId, CallMeta, MediaFrame, TapDirection};
use crate::media::resample::Converter;

/// Samples per second of [`MediaFrame::wide`].
const WIDE: u32 = 16_000;

/// How samples are written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    /// Mu-law at 8 kHz.
    MuLaw,
    /// 16-bit little-endian samples, so many a second: 16000 or 24000.
    Linear(u32),
}

impl Form {
    /// The form of a rate; `None` for one that no stream has.
    pub fn at(rate: u32) -> Option<Self> {
        match rate {
            8_000 => Some(Form::MuLaw),
            16_000 | 24_000 => Some(Form::Linear(rate)),
            _ => None,
        }
    }

    /// Samples per second.
    pub fn rate(self) -> u32 {
        match self {
            Form::MuLaw => 8_000,
            Form::Linear(rate) => rate,
        }
    }

    /// Whether it needs more than the telephone band.
    pub fn is_wide(self) -> bool {
        self != Form::MuLaw
    }

    fn encoding(self) -> &'static str {
        match self {
            Form::MuLaw => "audio/x-mulaw",
            Form::Linear(_) => "audio/x-l16",
        }
    }

    /// The samples of what a peer sends.
    fn decode(self, bytes: &[u8]) -> Result<Vec<i16>, String> {
        match self {
            Form::MuLaw => Ok(PcmuDecoder::new().decode(bytes)),
            Form::Linear(_) if !bytes.len().is_multiple_of(2) => {
                Err(format!("media.payload: {} bytes are no whole number of 16-bit samples", bytes.len()))
            }
            Form::Linear(_) => {
                Ok(bytes.chunks_exact(2).map(|sample| i16::from_le_bytes([sample[0], sample[1]])).collect())
            }
        }
    }
}

/// What a peer wants.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Order {
    /// Play this: mono at [`audio::RATE`]. Empty where what came is not a frame yet.
    Play(Vec<i16>),
    /// Play what is left over, and say when all that was played before has been heard.
    Mark {
        /// The end of what came before, at [`audio::RATE`].
        rest: Vec<i16>,
        /// The peer's name for the mark.
        name: String,
    },
    /// Throw away what waits.
    Clear,
}

#[derive(Deserialize)]
#[serde(tag = "event", rename_all = "lowercase")]
enum FromPeer {
    Media { media: Media },
    Mark { mark: Mark },
    Clear {},
    Connected {},
    Start {},
    Stop {},
}

#[derive(Deserialize)]
struct Media {
    payload: String,
}

#[derive(Deserialize)]
struct Mark {
    name: String,
}

/// One stream of one call.
pub struct Framing {
    stream: String,
    call: CallId,
    form: Form,
    sequence: u64,
    /// Of the caller's track and of ours.
    chunks: [u64; 2],
    encoder: PcmuEncoder,
    /// To the stream's rate, of each track; absent where the call has that rate.
    down: [Option<Converter>; 2],
    /// From the stream's rate to that of the call.
    up: Converter,
    /// Samples of the peer that are no frame yet.
    rest: Vec<f32>,
}

impl Framing {
    /// A new stream.
    ///
    /// # Errors
    /// The rate cannot be converted: a broken build.
    pub fn new(call: CallId, form: Form) -> Result<Self, String> {
        let text = |error: &dyn std::fmt::Display| format!("{} Hz: {error}", form.rate());
        let down = || match form {
            Form::Linear(rate) if rate != WIDE => Converter::new(WIDE, rate).map(Some).map_err(|error| text(&error)),
            _ => Ok(None),
        };
        Ok(Self {
            stream: format!("MZ{}", uuid::Uuid::new_v4().simple()),
            call,
            form,
            sequence: 0,
            chunks: [0; 2],
            encoder: PcmuEncoder::new(),
            down: [down()?, down()?],
            up: Converter::new(form.rate(), audio::RATE).map_err(|error| text(&error))?,
            rest: Vec::new(),
        })
    }

    /// The first message.
    pub fn connected(&self) -> String {
        json!({ "event": "connected", "protocol": "Call", "version": "1.0.0" }).to_string()
    }

    /// The second message. `tracks`: whose sound it will carry.
    pub fn start(&mut self, meta: &CallMeta, tracks: &[TapDirection]) -> String {
        let start = json!({
            "streamSid": self.stream,
            // Bots read it as the account to hang up with over Twilio's own API, which there is none of.
            "accountSid": "",
            "callSid": self.call,
            "tracks": tracks,
            "mediaFormat": { "encoding": self.form.encoding(), "sampleRate": self.form.rate(), "channels": 1 },
            "customParameters": meta.headers,
        });
        self.numbered(json!({ "event": "start", "start": start }))
    }

    /// 20 ms of sound; `None` for a frame that was prepared before anybody wanted the wide band.
    pub fn media(&mut self, frame: &MediaFrame) -> Option<String> {
        let (track, place) = match frame.direction {
            TapDirection::Inbound => ("inbound", 0),
            TapDirection::Outbound => ("outbound", 1),
        };
        let payload = match self.form {
            Form::MuLaw => STANDARD.encode(self.encoder.encode(&frame.pcm)),
            Form::Linear(_) => {
                let wide = frame.wide.as_ref()?;
                let bytes = |pcm: &[i16]| pcm.iter().flat_map(|sample| sample.to_le_bytes()).collect::<Vec<u8>>();
                STANDARD.encode(match &mut self.down[place] {
                    Some(converter) => bytes(&convert(converter, wide.iter().map(|sample| from_i16(*sample)))),
                    None => bytes(wide),
                })
            }
        };
        self.chunks[place] += 1;
        let chunk = self.chunks[place].to_string();
        Some(self.numbered(json!({ "event": "media", "media": {
            "track": track, "chunk": chunk, "timestamp": frame.at.as_millis().to_string(), "payload": payload,
        } })))
    }

    /// The caller pressed a key.
    pub fn dtmf(&mut self, digit: char) -> String {
        self.numbered(json!({ "event": "dtmf", "dtmf": { "track": "inbound_track", "digit": digit.to_string() } }))
    }

    /// What was played before the mark has been heard, or was thrown away.
    pub fn mark(&mut self, name: &str) -> String {
        self.numbered(json!({ "event": "mark", "mark": { "name": name } }))
    }

    /// The last message.
    pub fn stop(&mut self) -> String {
        self.numbered(json!({ "event": "stop", "stop": { "accountSid": "", "callSid": self.call } }))
    }

    /// The peer sent something that could not be used.
    pub fn error(&self, reason: &str) -> String {
        json!({ "event": "error", "streamSid": self.stream, "error": { "message": reason } }).to_string()
    }

    fn numbered(&mut self, mut frame: Value) -> String {
        self.sequence += 1;
        frame["sequenceNumber"] = json!(self.sequence.to_string());
        frame["streamSid"] = json!(self.stream);
        frame.to_string()
    }

    /// Reads a message of the peer; `None` where it asks for nothing.
    ///
    /// # Errors
    /// What is wrong with it.
    pub fn read(&mut self, text: &str) -> Result<Option<Order>, String> {
        let frame: FromPeer = serde_json::from_str(text).map_err(|e| format!("not a usable frame: {e}"))?;
        Ok(match frame {
            FromPeer::Media { media } => {
                let bytes = STANDARD.decode(media.payload).map_err(|e| format!("media.payload: {e}"))?;
                let pcm = self.form.decode(&bytes)?;
                Some(Order::Play(self.play(&pcm)))
            }
            FromPeer::Mark { mark } => Some(Order::Mark { rest: self.flush(), name: mark.name }),
            FromPeer::Clear {} => {
                self.rest.clear();
                self.up.reset();
                Some(Order::Clear)
            }
            FromPeer::Connected {} | FromPeer::Start {} | FromPeer::Stop {} => None,
        })
    }

    /// The whole frames of what came, at the call's rate.
    fn play(&mut self, pcm: &[i16]) -> Vec<i16> {
        self.rest.extend(pcm.iter().map(|sample| from_i16(*sample)));
        let whole = self.rest.len() - self.rest.len() % self.up.frame_in();
        let mut out = Vec::with_capacity(whole / self.up.frame_in() * self.up.frame_out());
        for frame in self.rest[..whole].chunks(self.up.frame_in()) {
            out.extend(convert(&mut self.up, frame.iter().copied()));
        }
        self.rest.drain(..whole);
        out
    }

    /// What is no whole frame, filled up with silence.
    fn flush(&mut self) -> Vec<i16> {
        if self.rest.is_empty() { Vec::new() } else { convert(&mut self.up, std::mem::take(&mut self.rest)) }
    }
}

impl std::fmt::Debug for Framing {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Framing").field("stream", &self.stream).field("form", &self.form).finish_non_exhaustive()
    }
}

/// One frame; a short one is filled up with silence.
fn convert(converter: &mut Converter, frame: impl IntoIterator<Item = f32>) -> Vec<i16> {
    let mut from: Vec<f32> = frame.into_iter().collect();
    from.resize(converter.frame_in(), 0.0);
    let mut to = vec![0.0; converter.frame_out()];
    converter.frame(&from, &mut to);
    to.into_iter().map(to_i16).collect()
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::time::Duration;

    use super::*;

    fn framing(rate: u32) -> Framing {
        Framing::new("c1".into(), Form::at(rate).expect("a form")).expect("it converts")
    }

    fn tone(rate: u32, samples: usize) -> Vec<i16> {
        let wave = |n: usize| (std::f64::consts::TAU * 440.0 * n as f64 / f64::from(rate)).sin();
        (0..samples).map(|n| (wave(n) * 10_000.0) as i16).collect()
    }

    fn message(form: Form, pcm: &[i16]) -> String {
        let bytes = match form {
            Form::MuLaw => PcmuEncoder::new().encode(pcm),
            Form::Linear(_) => pcm.iter().flat_map(|sample| sample.to_le_bytes()).collect(),
        };
        json!({ "event": "media", "streamSid": "MZ", "media": { "payload": STANDARD.encode(bytes) } }).to_string()
    }

    #[test]
    fn sound_of_the_call_comes_at_the_rate_of_the_stream() {
        let narrow: Arc<[i16]> = tone(8_000, 160).into();
        let wide: Arc<[i16]> = tone(16_000, 320).into();
        let at = Duration::from_millis(60);
        let frame = MediaFrame { direction: TapDirection::Inbound, at, position: at, pcm: narrow, wide: Some(wide) };
        for (rate, bytes) in [(8_000, 160), (16_000, 640), (24_000, 960)] {
            let mut framing = framing(rate);
            let first: Value = serde_json::from_str(&framing.media(&frame).expect("a frame")).expect("JSON");
            let second: Value = serde_json::from_str(&framing.media(&frame).expect("a frame")).expect("JSON");
            let payload = STANDARD.decode(second["media"]["payload"].as_str().expect("a payload")).expect("base64");
            assert_eq!(payload.len(), bytes, "{rate} Hz");
            assert_eq!((&first["media"]["chunk"], &second["media"]["chunk"]), (&json!("1"), &json!("2")));
            assert_eq!((&second["sequenceNumber"], &second["media"]["timestamp"]), (&json!("2"), &json!("60")));
            assert_eq!((&second["media"]["track"], &second["streamSid"]), (&json!("inbound"), &json!(framing.stream)));
        }
        let frame = MediaFrame { wide: None, ..frame };
        assert!(framing(16_000).media(&frame).is_none(), "prepared before it was asked for");
        assert!(framing(8_000).media(&frame).is_some());
    }

    #[test]
    fn pieces_of_any_length_sound_as_one() {
        for rate in [8_000, 16_000, 24_000] {
            let form = Form::at(rate).expect("a form");
            let pcm = tone(rate, rate as usize);
            let played = |pieces: usize| {
                let (mut framing, mut all) = (framing(rate), Vec::new());
                for piece in pcm.chunks(pieces) {
                    match framing.read(&message(form, piece)) {
                        Ok(Some(Order::Play(pcm))) => all.extend(pcm),
                        other => panic!("{other:?}"),
                    }
                }
                match framing.read(r#"{"event":"mark","mark":{"name":"end"}}"#) {
                    Ok(Some(Order::Mark { rest, name })) if name == "end" => all.extend(rest),
                    other => panic!("{other:?}"),
                }
                all
            };
            let whole = played(pcm.len());
            assert_eq!(whole.len(), audio::RATE as usize, "{rate} Hz");
            for pieces in [1, 7, 161, 1_000] {
                assert!(played(pieces) == whole, "{rate} Hz in pieces of {pieces}");
            }
            // Not only as long: it is the tone.
            let loud = whole[2_400..].iter().map(|sample| sample.unsigned_abs()).max();
            assert!(loud.is_some_and(|loud| (9_000..11_500).contains(&loud)), "{rate} Hz: {loud:?}");
        }
    }

    #[test]
    fn what_is_cleared_is_not_heard_later() {
        let mut framing = framing(8_000);
        let half = message(Form::MuLaw, &tone(8_000, 80));
        assert_eq!(framing.read(&half), Ok(Some(Order::Play(Vec::new()))));
        assert_eq!(framing.read(r#"{"event":"clear","streamSid":"MZ"}"#), Ok(Some(Order::Clear)));
        let mark = framing.read(r#"{"event":"mark","mark":{"name":"a"}}"#);
        assert_eq!(mark, Ok(Some(Order::Mark { rest: Vec::new(), name: "a".into() })));
    }

    #[test]
    fn nonsense_is_an_error_that_says_so() {
        for text in [
            "",
            "{}",
            r#"{"event":"hello"}"#,
            r#"{"event":"media"}"#,
            r#"{"event":"media","media":{"payload":"?"}}"#,
            r#"{"event":"media","media":{"payload":"AAAA"}}"#,
        ] {
            assert!(framing(16_000).read(text).is_err(), "{text}");
        }
        assert_eq!(framing(16_000).read(r#"{"event":"stop"}"#), Ok(None));
        assert_eq!(Form::at(44_100), None);
    }
}
