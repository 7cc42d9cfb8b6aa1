//! The frames between a gateway and a worker.
//!
//! A frame is its length (32 bits, little-endian, without itself), a byte for its kind, and its body: JSON; or the audio
//! of one utterance: its id (64 bits) and 32-bit floats, all little-endian; or a voice: what it is, 64 hexadecimal digits, and
//! its file.

use std::io;
use std::ops::Range;
use std::time::Duration;

use bytes::{Buf, BytesMut};
use serde::{Deserialize, Serialize};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};

use crate::sched::{Load, Refused, RefusedReason};
use crate::turn::{Class, Markup, Phonemes, Sound, UtteranceEnd, VoiceStages};
use crate::voice::copies::is_content;

/// Both sides must speak the same; raised with every change that the other side would misread. A field that may be missing, or
/// a frame that only a side gets which asked for it, is no such change: machines of two releases work together.
pub(super) const VERSION: u32 = 2;
/// How often a worker tells how it is.
pub(super) const STATUS: Duration = Duration::from_millis(100);
/// A side that is silent for so long is gone.
pub(super) const SILENCE: Duration = Duration::from_secs(3);
/// Pieces of an utterance's audio that may be on the way.
pub(super) const CREDIT: usize = 64;

/// The longest frame: a minute of audio in one piece would be 5.8 MB, and steps make some seconds at most.
const MAX_FRAME: usize = 8 << 20;
/// The same before the other side has said who it is: a thousand of strangers fill no memory.
const MAX_GREETING: usize = 4 << 10;
/// Room for what the next read brings: a TLS record and some.
const READ: usize = 32 << 10;
const JSON: u8 = 0;
const AUDIO: u8 = 1;
const VOICE: u8 = 2;
/// Characters of what a voice is.
const CONTENT: usize = 64;

/// From a gateway.
#[derive(Debug, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "camelCase")]
pub(super) enum ToWorker {
    /// The first frame.
    Hello {
        version: u32,
        /// What both sides know.
        token: String,
    },
    /// Something to speak.
    Submit(Box<Submission>),
    /// The next piece of the text of one whose text is still being written; behind the `last` none follows. Only of voices
    /// that the worker told to start after some of their text.
    Append {
        id: u64,
        text: String,
        last: bool,
        /// As in a [`Submission`].
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        sounds: Vec<(Range<usize>, String)>,
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        pinyin: Vec<(Range<usize>, String)>,
    },
    /// It is not wanted any more.
    Cancel { id: u64 },
    /// Pieces of its audio were handed on.
    Taken { id: u64, pieces: usize },
    /// About a stream's listener.
    Note { stream: u64, note: Note },
    /// Look for new and removed voices.
    Refresh,
    /// Still there.
    Alive,
}

/// An utterance.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Submission {
    /// The gateway's name of it.
    pub(super) id: u64,
    /// The gateway's name of its stream.
    pub(super) stream: u64,
    pub(super) batch: bool,
    pub(super) text: String,
    pub(super) voice: Option<String>,
    /// What the voice is, where it is one of the gateway's files; it was sent before, or the worker told of it.
    #[serde(default)]
    pub(super) content: Option<String>,
    pub(super) language: Option<String>,
    pub(super) instructions: Option<String>,
    pub(super) seed: u64,
    pub(super) speed: f32,
    pub(super) markup: Markup,
    /// Phonemes that are given, in the mnemonics of espeak-ng.
    #[serde(default)]
    pub(super) sounds: Vec<(Range<usize>, String)>,
    /// The same in pinyin: apart, so that a worker that knows no pinyin reads what is written.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(super) pinyin: Vec<(Range<usize>, String)>,
    pub(super) tenant: String,
    /// The text is still being written: `text` is its beginning.
    #[serde(default)]
    pub(super) streamed: bool,
    /// Somebody wants to know when its words sound.
    #[serde(default)]
    pub(super) words: bool,
    /// Somebody wants to know where the time to its first audio went.
    #[serde(default)]
    pub(super) stages: bool,
}

/// Pieces of a text, and their phonemes in one alphabet.
type Alphabet = Vec<(Range<usize>, String)>;

/// Phonemes as they go over the wire: those of espeak-ng, and pinyin.
pub(super) fn apart(sounds: &[Sound]) -> (Alphabet, Alphabet) {
    let (mut espeak, mut mandarin) = (Vec::new(), Vec::new());
    for (at, phonemes) in sounds {
        match phonemes {
            Phonemes::Espeak(mnemonics) => espeak.push((at.clone(), mnemonics.clone())),
            Phonemes::Pinyin { pinyin } => mandarin.push((at.clone(), pinyin.clone())),
        }
    }
    (espeak, mandarin)
}

/// The phonemes of a text, in order, from what came over the wire.
pub(super) fn together(espeak: Alphabet, mandarin: Alphabet) -> Vec<Sound> {
    let espeak = espeak.into_iter().map(|(at, mnemonics)| (at, Phonemes::Espeak(mnemonics)));
    let mandarin = mandarin.into_iter().map(|(at, pinyin)| (at, Phonemes::Pinyin { pinyin }));
    let mut sounds: Vec<Sound> = espeak.chain(mandarin).collect();
    sounds.sort_by_key(|(at, _)| at.start);
    sounds
}

/// [`VoiceStages`] in microseconds.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Stages {
    wait: u64,
    prefill: Option<u64>,
    first_token: Option<u64>,
    first_mel: Option<u64>,
    first_pcm: u64,
}

impl From<VoiceStages> for Stages {
    fn from(stages: VoiceStages) -> Self {
        let us = |time: Duration| time.as_micros() as u64;
        Self {
            wait: us(stages.wait),
            prefill: stages.prefill.map(us),
            first_token: stages.first_token.map(us),
            first_mel: stages.first_mel.map(us),
            first_pcm: us(stages.first_pcm),
        }
    }
}

impl From<Stages> for VoiceStages {
    fn from(stages: Stages) -> Self {
        let time = Duration::from_micros;
        Self {
            wait: time(stages.wait),
            prefill: stages.prefill.map(time),
            first_token: stages.first_token.map(time),
            first_mel: stages.first_mel.map(time),
            first_pcm: time(stages.first_pcm),
        }
    }
}

/// A [`crate::sched::StreamNote`]; clocks differ between machines, so times are ages.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) enum Note {
    Anchored { ago_us: u64 },
    Skipped { samples: u64 },
    Held,
    Resumed,
    Interrupted,
    Unpaced,
    Closed,
}

/// From a worker.
#[derive(Debug, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "camelCase")]
pub(super) enum ToGateway {
    /// The answer to `Hello`; a `refusal` says why there is no more.
    Welcome { version: u32, refusal: Option<String> },
    /// How it is.
    Status(Box<Status>),
    /// When words of an utterance sound whose gateway asked; before the audio that it is about, or behind the end.
    Words {
        id: u64,
        /// Letters and samples of [`crate::turn::NotBefore`], those that were not told yet.
        begins: Vec<(usize, u64)>,
        /// Bytes and samples of [`crate::turn::WordEnd`], once and all of them.
        ends: Option<Vec<(usize, u64)>>,
    },
    /// Where the time to the first audio of an utterance went whose gateway asked; before that audio.
    Stages { id: u64, stages: Stages },
    /// An utterance is over.
    End { id: u64, how: How },
}

/// All devices of a worker together.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(super) struct Status {
    /// Name of the voice's kind; `None`: no device is ready.
    pub(super) engine: Option<String>,
    /// Slots of all devices.
    pub(super) slots: u32,
    /// Where they are others than told before.
    pub(super) voices: Option<Vec<Voice>>,
    pub(super) load: Load,
    pub(super) memory_total: u64,
    pub(super) memory_used: u64,
    /// Why a new live stream would not be taken on.
    pub(super) refusal: Option<Refusal>,
    /// Whether it finishes what it has and takes no new stream of any class.
    #[serde(default)]
    pub(super) draining: bool,
    /// What its model is, see [`crate::synth::Identity::model`].
    #[serde(default)]
    pub(super) model: Option<String>,
    /// Whether it takes voices of gateways.
    #[serde(default)]
    pub(super) copies: bool,
    /// Voices that are files and what each holds, the default first; told with `voices`.
    #[serde(default)]
    pub(super) contents: Option<Vec<(String, String)>>,
}

/// A [`crate::synth::VoiceInfo`].
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Voice {
    pub(super) name: String,
    pub(super) languages: Vec<String>,
    #[serde(default)]
    pub(super) starts_after: Option<u32>,
}

/// A [`Refused`].
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Refusal {
    reason: String,
    retry_after_ms: u64,
}

impl From<Refused> for Refusal {
    fn from(refused: Refused) -> Self {
        Self { reason: refused.reason.label().to_owned(), retry_after_ms: refused.retry_after.as_millis() as u64 }
    }
}

impl From<&Refusal> for Refused {
    fn from(refusal: &Refusal) -> Self {
        let known = [
            RefusedReason::Full,
            RefusedReason::RateLimited,
            RefusedReason::TenantFull,
            RefusedReason::NotReady,
            RefusedReason::Overloaded,
        ];
        let reason = known.into_iter().find(|reason| reason.label() == refusal.reason);
        Self {
            reason: reason.unwrap_or(RefusedReason::Overloaded),
            retry_after: Duration::from_millis(refusal.retry_after_ms),
        }
    }
}

/// An [`UtteranceEnd`].
#[derive(Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) enum How {
    Done,
    Cancelled,
    Refused { retry_after_ms: u64 },
    Failed { reason: String },
}

impl From<UtteranceEnd> for How {
    fn from(how: UtteranceEnd) -> Self {
        match how {
            UtteranceEnd::Done => How::Done,
            UtteranceEnd::Cancelled => How::Cancelled,
            UtteranceEnd::Refused { retry_after } => How::Refused { retry_after_ms: retry_after.as_millis() as u64 },
            UtteranceEnd::Failed(reason) => How::Failed { reason },
        }
    }
}

impl From<How> for UtteranceEnd {
    fn from(how: How) -> Self {
        match how {
            How::Done => UtteranceEnd::Done,
            How::Cancelled => UtteranceEnd::Cancelled,
            How::Refused { retry_after_ms } => {
                UtteranceEnd::Refused { retry_after: Duration::from_millis(retry_after_ms) }
            }
            How::Failed { reason } => UtteranceEnd::Failed(reason),
        }
    }
}

pub(super) fn class(batch: bool) -> Class {
    if batch { Class::Batch } else { Class::Live }
}

/// A frame that was read.
#[derive(Debug)]
pub(super) enum Frame<T> {
    Message(T),
    Audio { id: u64, pcm: Vec<f32> },
    Voice { content: String, file: Vec<u8> },
}

/// A frame of JSON, to be written.
pub(super) fn message<T: Serialize>(message: &T) -> Vec<u8> {
    let mut frame = vec![0, 0, 0, 0, JSON];
    // Frames hold strings, numbers and lists only, and a vector takes every byte.
    if let Err(error) = serde_json::to_writer(&mut frame, message) {
        tracing::error!(%error, "a frame cannot be written");
    }
    seal(frame)
}

/// A frame of audio, to be written.
pub(super) fn audio(id: u64, pcm: &[f32]) -> Vec<u8> {
    let mut frame = Vec::with_capacity(13 + 4 * pcm.len());
    frame.extend([0, 0, 0, 0, AUDIO]);
    frame.extend(id.to_le_bytes());
    pcm.iter().for_each(|sample| frame.extend_from_slice(&sample.to_le_bytes()));
    seal(frame)
}

/// A frame with a voice, to be written; `None`: it is longer than a frame may be.
pub(super) fn voice(content: &str, file: &[u8]) -> Option<Vec<u8>> {
    if content.len() != CONTENT || file.len() > MAX_FRAME - CONTENT - 1 {
        return None;
    }
    let mut frame = Vec::with_capacity(5 + CONTENT + file.len());
    frame.extend([0, 0, 0, 0, VOICE]);
    frame.extend(content.as_bytes());
    frame.extend(file);
    Some(seal(frame))
}

fn seal(mut frame: Vec<u8>) -> Vec<u8> {
    let length = (frame.len() - 4) as u32;
    frame[..4].copy_from_slice(&length.to_le_bytes());
    frame
}

/// Reads `bytes` as what a gateway and what a worker says; for fuzzing.
pub(super) fn fuzz(bytes: &[u8]) {
    fn all<T: for<'a> Deserialize<'a>>(bytes: &[u8]) {
        use futures_util::FutureExt;
        let mut reader = Reader::new(bytes);
        // A slice never makes anybody wait.
        while let Some(Ok(_)) = reader.next::<T>().now_or_never() {}
    }
    all::<ToWorker>(bytes);
    all::<ToGateway>(bytes);
}

/// Writes whole frames, as they are.
pub(super) async fn write(to: &mut (impl AsyncWrite + Unpin), frame: &[u8]) -> io::Result<()> {
    to.write_all(frame).await?;
    to.flush().await
}

/// The frames of a connection.
///
/// # Why
/// It keeps what has come of a frame, so that waiting for the rest may be given up and taken up again: who reads can wait for
/// other things in the same task, and no task and no channel lie between the socket and what is done with a frame.
pub(super) struct Reader<R> {
    from: R,
    come: BytesMut,
}

impl<R: AsyncRead + Unpin> Reader<R> {
    pub(super) fn new(from: R) -> Self {
        Self { from, come: BytesMut::new() }
    }

    /// The next frame. Cancel safe.
    ///
    /// # Errors
    /// The connection, or bytes that are no frame.
    pub(super) async fn next<T: for<'a> Deserialize<'a>>(&mut self) -> io::Result<Frame<T>> {
        self.within(MAX_FRAME).await
    }

    /// The first frame, of a side that nothing is known of. Cancel safe.
    ///
    /// # Errors
    /// As of [`Self::next`], or it is longer than a greeting.
    pub(super) async fn greeting<T: for<'a> Deserialize<'a>>(&mut self) -> io::Result<Frame<T>> {
        self.within(MAX_GREETING).await
    }

    async fn within<T: for<'a> Deserialize<'a>>(&mut self, limit: usize) -> io::Result<Frame<T>> {
        loop {
            if let Some(length) = self.come.first_chunk().map(|length| u32::from_le_bytes(*length) as usize) {
                if !(1..=limit).contains(&length) {
                    return Err(wrong(format!("a frame of {length} bytes; is the other side an antiphon?")));
                }
                if let Some(body) = self.come.get(4..4 + length) {
                    let frame = frame(body);
                    self.come.advance(4 + length);
                    return frame;
                }
            }
            self.come.reserve(READ);
            if self.from.read_buf(&mut self.come).await? == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
        }
    }
}

fn wrong(what: String) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what)
}

/// `body` is not empty.
fn frame<T: for<'a> Deserialize<'a>>(body: &[u8]) -> io::Result<Frame<T>> {
    match (body[0], &body[1..]) {
        (JSON, text) => match serde_json::from_slice(text) {
            Ok(message) => Ok(Frame::Message(message)),
            Err(error) => Err(wrong(format!("a frame that is none: {error}"))),
        },
        (AUDIO, id) if id.len() >= 8 && (id.len() - 8) % 4 == 0 => {
            let (id, samples) = id.split_at(8);
            let id = id.iter().rev().fold(0, |id, byte| id << 8 | u64::from(*byte));
            let sample = |bytes: &[u8]| bytes.try_into().map(f32::from_le_bytes).unwrap_or_default();
            Ok(Frame::Audio { id, pcm: samples.chunks_exact(4).map(sample).collect() })
        }
        (VOICE, voice) if voice.len() > CONTENT => {
            let (content, file) = voice.split_at(CONTENT);
            let content = String::from_utf8_lossy(content).into_owned();
            if !is_content(&content) {
                return Err(wrong("a voice that does not say what it is".to_owned()));
            }
            Ok(Frame::Voice { content, file: file.to_vec() })
        }
        (kind, _) => Err(wrong(format!("a frame of kind {kind}"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn frames_survive_the_way_to_the_bit() {
        let pcm = [0.0, -1.0, f32::MIN_POSITIVE, 0.1];
        let mut bytes = audio(u64::MAX - 1, &pcm);
        bytes.extend(message(&ToGateway::End { id: 7, how: How::Failed { reason: "no \"voice\"".into() } }));
        let mut from = Reader::new(&bytes[..]);
        match from.next::<ToGateway>().await.expect("audio") {
            Frame::Audio { id, pcm: read } => assert_eq!((id, &read[..]), (u64::MAX - 1, &pcm[..])),
            other => panic!("{other:?}"),
        }
        match from.next::<ToGateway>().await.expect("an end") {
            Frame::Message(ToGateway::End { id: 7, how }) => {
                assert_eq!(UtteranceEnd::from(how), UtteranceEnd::Failed("no \"voice\"".into()));
            }
            other => panic!("{other:?}"),
        }
        assert!(from.next::<ToGateway>().await.is_err(), "the end");
    }

    #[tokio::test]
    async fn a_frame_that_comes_in_bits_is_whole_although_its_reader_did_not_wait_for_all_of_it() {
        use futures_util::FutureExt;
        let pcm = vec![0.25; 5_000];
        let bytes = [audio(3, &pcm), message(&ToGateway::End { id: 3, how: How::Done })].concat();
        let (mut to, from) = tokio::io::duplex(bytes.len());
        let mut from = Reader::new(from);
        let mut frames = Vec::new();
        for bits in bytes.chunks(777) {
            to.write_all(bits).await.expect("room");
            // As a task that has something else to do.
            frames.extend(from.next::<ToGateway>().now_or_never());
        }
        frames.extend(from.next::<ToGateway>().now_or_never());
        match &frames[..] {
            [Ok(Frame::Audio { id: 3, pcm: read }), Ok(Frame::Message(ToGateway::End { id: 3, how: How::Done }))] => {
                assert_eq!(*read, pcm);
            }
            other => panic!("{other:?}"),
        }
    }

    #[tokio::test]
    async fn words_of_an_older_release_are_understood() {
        let submit = br#"{"type":"submit","id":1,"stream":2,"batch":false,"text":"Hi.","voice":null,"language":null,
            "instructions":null,"seed":0,"speed":1.0,"markup":"none","tenant":""}"#;
        match frame::<ToWorker>(&[&[JSON][..], &submit[..]].concat()).expect("understood") {
            Frame::Message(ToWorker::Submit(submission)) => {
                assert!(!submission.streamed && !submission.words && !submission.stages)
            }
            other => panic!("{other:?}"),
        }
        let voice: Voice = serde_json::from_str(r#"{"name":"anna","languages":[]}"#).expect("understood");
        assert_eq!(voice.starts_after, None, "it is given whole texts");
    }

    #[tokio::test]
    async fn a_voice_says_what_it_is() {
        let content = "0a".repeat(32);
        let frame = voice(&content, b"file").expect("short enough");
        match Reader::new(&frame[..]).next::<ToWorker>().await.expect("a voice") {
            Frame::Voice { content: read, file } => assert_eq!((read, &file[..]), (content.clone(), &b"file"[..])),
            other => panic!("{other:?}"),
        }
        assert!(voice(&content, &vec![0; MAX_FRAME]).is_none() && voice("anna", b"file").is_none());
        let mut wrong = frame;
        wrong[5] = b'/';
        assert!(Reader::new(&wrong[..]).next::<ToWorker>().await.is_err());
    }

    #[tokio::test]
    async fn a_stranger_may_not_say_much() {
        let mut long = message(&ToWorker::Hello { version: VERSION, token: "x".repeat(MAX_GREETING) });
        long.truncate(64);
        let error = Reader::new(&long[..]).greeting::<ToWorker>().await.expect_err("refused by its length alone");
        assert_eq!(error.kind(), io::ErrorKind::InvalidData);
        let short = message(&ToWorker::Hello { version: VERSION, token: "x".repeat(64) });
        assert!(Reader::new(&short[..]).greeting::<ToWorker>().await.is_ok());
    }

    #[test]
    fn phonemes_keep_their_order_and_pinyin_is_apart_for_workers_that_know_none() {
        let pinyin = (9..15, Phonemes::Pinyin { pinyin: "chong2 qing4".into() });
        let sounds = vec![(0..3, Phonemes::Espeak("a".into())), pinyin, (20..22, Phonemes::Espeak("b".into()))];
        let (espeak, mandarin) = apart(&sounds);
        assert_eq!((espeak.len(), mandarin.len()), (2, 1));
        assert_eq!(together(espeak, mandarin), sounds);
        // As a gateway before this sends it, and as it is sent where nothing is given.
        let plain = r#"{"type":"append","id":1,"text":"a ","last":false}"#;
        let append: ToWorker = serde_json::from_str(plain).expect("a message");
        assert_eq!(serde_json::to_string(&append).expect("JSON"), plain);
    }

    #[tokio::test]
    async fn what_is_no_frame_is_refused_without_reading_on() {
        for bytes in [&b"GET / HTTP/1.1\r\n\r\n"[..], &[0, 0, 0, 0], &[3, 0, 0, 0, AUDIO, 1, 2], &[2, 0, 0, 0, 9, 9]] {
            let error = Reader::new(bytes).next::<ToWorker>().await.expect_err("refused");
            assert_eq!(error.kind(), io::ErrorKind::InvalidData, "{bytes:?}");
        }
    }
}
