//! `POST /v1/audio/speech`: speech of a text, streamed as it is made; compatible with OpenAI's clients.

use axum::body::{Body as HttpBody, Bytes};
use axum::extract::State;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use base64::engine::general_purpose::STANDARD;
use futures_util::stream;
use serde::Deserialize;
use serde_json::json;
use tokio::sync::mpsc;

use super::auth::Caller;
use super::error::ApiError;
use super::extract::Body;
use crate::audio_file::{AudioWriter, Format};
use crate::call::segment::{Cut, Script, SegmentConfig};
use crate::gateway::Gateway;
use crate::gateway::speaker::{Manner, Speaker, SpeechError};
use crate::text::{Normalise, Say};
use crate::turn::checked_speed;
use crate::voice::copies;

/// Longest input of one request in characters, as OpenAI's; longer texts are batch work.
pub const MAX_INPUT_CHARS: usize = 4_096;
/// Header of a response that is not all that was asked for.
const WARNING: &str = "x-antiphon-warning";
/// The text gives phonemes, and the voice does not say them.
const UNHEARD: &str = "phoneme: this voice does not say phonemes; the words are spoken as they are written";
/// Encoded pieces that may wait for the reader.
const BODY_PIECES: usize = 16;

/// The voice that a request of OpenAI's clients means: their `voice` is required, so the word `default` and
/// their own voices' names mean ours where there is no voice of that name.
///
/// # Errors
/// As [`own_voice`].
pub(super) fn voice_of(gateway: &Gateway, caller: &Caller, asked: Option<String>) -> Result<Option<String>, ApiError> {
    const FOREIGN: [&str; 12] =
        ["default", "alloy", "ash", "ballad", "coral", "echo", "fable", "nova", "onyx", "sage", "shimmer", "verse"];
    let Some(asked) = asked.filter(|name| !name.is_empty()) else { return Ok(None) };
    let known = gateway.engine.voices().iter().any(|voice| voice.name == asked);
    own_voice(gateway, caller, (known || !FOREIGN.contains(&asked.as_str())).then_some(asked))
}

/// `asked`, unless it was enrolled by somebody else.
///
/// # Errors
/// 404: to this caller there is no such voice.
pub(super) fn own_voice(gateway: &Gateway, caller: &Caller, asked: Option<String>) -> Result<Option<String>, ApiError> {
    let Some(name) = asked else { return Ok(None) };
    // Copies of other machines' voices are spoken by their names, which say whose they are.
    if copies::is_content(&name) || copies::parts(&name).is_some() {
        return Err(ApiError::not_found("voice", &name).param("voice"));
    }
    match gateway.rights().owner_of(&name) {
        Some(owner) if !caller.sees(&owner) => Err(ApiError::not_found("voice", &name).param("voice")),
        // Theirs by enrolment, whatever list of shared ones they have.
        Some(owner) if *owner == *caller.tenant => Ok(Some(name)),
        _ if !gateway.tenants.may_speak_as(&caller.tenant, &name) => {
            let message = format!("`{name}` is not among the `voices` of the tenant `{}`", caller.tenant);
            Err(ApiError::new(StatusCode::FORBIDDEN, "not_allowed", message).param("voice"))
        }
        _ => Ok(Some(name)),
    }
}

#[derive(Deserialize)]
pub(super) struct Request {
    input: String,
    voice: Option<Voice>,
    response_format: Option<String>,
    speed: Option<f32>,
    instructions: Option<String>,
    stream_format: Option<StreamFormat>,
    seed: Option<u64>,
    language: Option<String>,
    normalise: Option<Normalise>,
    #[serde(default)]
    markup: crate::turn::Markup,
    volume: Option<f32>,
}

/// OpenAI's newer clients may send an object.
#[derive(Deserialize)]
#[serde(untagged)]
pub(super) enum Voice {
    Name(String),
    Object { id: String },
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum StreamFormat {
    #[default]
    Audio,
    Sse,
}

/// `POST /v1/audio/speech`.
///
/// # Errors
/// 400 for a bad request; 429 or 503 with `Retry-After` when there is no capacity.
pub(super) async fn speech(
    State(gateway): State<Gateway>,
    caller: Caller,
    Body(request): Body<Request>,
) -> Result<Response, ApiError> {
    let format = format_of(request.response_format.as_deref())?;
    let speed = speed_of(request.speed)?;
    let characters = request.input.chars().count();
    if characters > MAX_INPUT_CHARS {
        let message = format!(
            "`input` has {characters} characters, more than {MAX_INPUT_CHARS}; use /v1/audio/speech/batch for long texts"
        );
        return Err(ApiError::bad_request("input_too_long", message).param("input"));
    }
    let lexicon = gateway.agents.lexicon();
    let parts = Script::whole_reading(&request.input, SegmentConfig::default(), request.markup, &lexicon)
        .map_err(|mistake| ApiError::bad_request("bad_markup", mistake).param("input"))?;
    if parts.is_empty() {
        return Err(ApiError::bad_request("nothing_to_speak", "`input` contains nothing to speak").param("input"));
    }
    let asked = request.voice.map(|voice| match voice {
        Voice::Name(name) | Voice::Object { id: name } => name,
    });
    let manner = Manner {
        voice: voice_of(&gateway, &caller, asked)?,
        language: request.language,
        normalise: request.normalise.unwrap_or_default(),
        instructions: request.instructions,
        seed: request.seed.unwrap_or(0),
        speed,
        markup: request.markup,
        volume: volume_of(request.volume)?,
        lexicon,
        tenant: caller.tenant,
    };
    let given = |cut: &Cut| matches!(cut, Cut::Piece(piece) if piece.given.iter().any(|given| matches!(given.say, Say::Phonemes(_))));
    let unheard = parts.iter().any(given) && !gateway.engine.says_phonemes(manner.voice.as_deref());
    if unheard {
        tracing::warn!(voice = manner.voice, "a text gives phonemes to a voice that says none");
    }
    let mut speaker = Speaker::new(gateway.engine.clone(), manner);
    speaker.add(parts);
    // The first event decides the status code; afterwards only the connection can tell of a failure.
    let first = speaker.next().await?.unwrap_or_default();
    let stream_format = request.stream_format.unwrap_or_default();
    let (pieces, body) = mpsc::channel(BODY_PIECES);
    let writer = AudioWriter::new(format, crate::audio::RATE).map_err(SpeechError::from)?;
    tokio::spawn(produce(speaker, first, writer, stream_format, characters, pieces));
    let content_type = match stream_format {
        StreamFormat::Audio => format.mime(),
        StreamFormat::Sse => "text/event-stream",
    };
    let body = stream::unfold(body, |mut body| async move { body.recv().await.map(|piece| (piece, body)) });
    let headers = [(header::CONTENT_TYPE, content_type), (header::CACHE_CONTROL, "no-store")];
    let mut response = (StatusCode::OK, headers, HttpBody::from_stream(body)).into_response();
    if unheard {
        response.headers_mut().insert(WARNING, HeaderValue::from_static(UNHEARD));
    }
    Ok(response)
}

/// The `response_format` of a request.
///
/// # Errors
/// 400 naming the formats there are.
pub fn format_of(name: Option<&str>) -> Result<Format, ApiError> {
    match name {
        None => Ok(Format::Wav),
        Some(name) => Format::named(name).ok_or_else(|| {
            let message = format!("response_format `{name}` is not supported; use wav, pcm, opus or flac");
            ApiError::bad_request("unsupported_format", message).param("response_format")
        }),
    }
}

/// The `speed` of a request.
///
/// # Errors
/// 400 when it is out of range.
pub fn speed_of(speed: Option<f32>) -> Result<f32, ApiError> {
    checked_speed(speed.unwrap_or(1.0))
        .map_err(|mistake| ApiError::bad_request("invalid_speed", mistake).param("speed"))
}

/// The amplitude, checked.
///
/// # Errors
/// 400.
pub fn volume_of(volume: Option<f32>) -> Result<f32, ApiError> {
    let volume = volume.unwrap_or(1.0);
    if (0.0..=4.0).contains(&volume) {
        Ok(volume)
    } else {
        Err(ApiError::bad_request("invalid_volume", "`volume` must lie between 0 and 4").param("volume"))
    }
}

async fn produce(
    mut speaker: Speaker,
    first: Vec<f32>,
    mut writer: AudioWriter,
    stream_format: StreamFormat,
    characters: usize,
    pieces: mpsc::Sender<std::io::Result<Bytes>>,
) {
    let wrap = |bytes: Vec<u8>| match stream_format {
        StreamFormat::Audio => Bytes::from(bytes),
        StreamFormat::Sse => {
            let audio = base64::Engine::encode(&STANDARD, bytes);
            sse(&json!({ "type": "speech.audio.delta", "audio": audio }))
        }
    };
    let mut samples = 0;
    let mut next: Result<_, SpeechError> = Ok(Some(first));
    loop {
        match next {
            Ok(Some(pcm)) => {
                samples += pcm.len();
                let bytes = match writer.push(&pcm) {
                    Ok(bytes) => bytes,
                    Err(error) => return cut_short(error.into(), &pieces).await,
                };
                // A reader that left drops the body: the speaker's drop cancels the rest.
                if !bytes.is_empty() && pieces.send(Ok(wrap(bytes))).await.is_err() {
                    return;
                }
            }
            Ok(None) => break,
            Err(error) => return cut_short(error, &pieces).await,
        }
        next = tokio::select! {
            next = speaker.next() => next,
            // Without this it would be noticed with the next piece only, which may be a second of Opus away.
            () = pieces.closed() => return,
        };
    }
    let rest = match writer.finish() {
        Ok(rest) => rest,
        Err(error) => return cut_short(error.into(), &pieces).await,
    };
    if !rest.is_empty() && pieces.send(Ok(wrap(rest))).await.is_err() {
        return;
    }
    if stream_format == StreamFormat::Sse {
        let seconds = samples as f64 / f64::from(crate::audio::RATE);
        let usage = json!({ "input_tokens": characters, "output_tokens": samples, "total_tokens": characters + samples, "seconds": seconds });
        let _ = pieces.send(Ok(sse(&json!({ "type": "speech.audio.done", "usage": usage })))).await;
    }
}

/// The connection is reset, so that the reader sees the failure.
async fn cut_short(error: SpeechError, pieces: &mpsc::Sender<std::io::Result<Bytes>>) {
    tracing::warn!(%error, "a speech response was cut short");
    let _ = pieces.send(Err(std::io::Error::other(error.to_string()))).await;
}

fn sse(value: &serde_json::Value) -> Bytes {
    format!("data: {value}\n\n").into()
}
