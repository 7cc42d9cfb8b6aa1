//! A recogniser behind `POST /v1/audio/transcriptions`: OpenAI's, or any Whisper server's.
//!
//! One request a turn: a WAV file in a multipart form, answered by `{"text": ...}` (OpenAI API reference, "Create
//! transcription"). A request that fails is tried again once, then at the second service, where there is one; a
//! service that failed is not asked first again for a while.

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use reqwest::StatusCode;
use reqwest::header::{AUTHORIZATION, CONTENT_TYPE, HeaderValue};
use serde::Deserialize;

use super::config::{Fallback, Recognizer};
use super::{Answer, RATE, Recogniser, Request, Trouble, Words};
use crate::clock;
use crate::secret::Secret;

/// Where a service has it, below its root.
const PATH: &str = "/v1/audio/transcriptions";
/// The largest answer that is read. The words of a minute have about a kilobyte.
const MAX_ANSWER: usize = 256 << 10;
/// The longest text that is taken from one.
const MAX_TEXT: usize = 8 << 10;
/// Between the two tries at one service.
const RETRY: Duration = Duration::from_millis(150);
/// How long a service that failed is asked second.
const AVOID: Duration = Duration::from_secs(30);
/// Requests under way at once; more are refused, since a service that is so slow will not get faster by them.
const MAX_REQUESTS: usize = 256;
/// The model that is named where none is configured.
const MODEL: &str = "whisper-1";

/// The services of a configuration.
pub struct Http(Arc<Inner>);

struct Inner {
    client: reqwest::Client,
    services: Vec<Service>,
    timeout: Duration,
    room: tokio::sync::Semaphore,
}

struct Service {
    url: String,
    authorization: Option<HeaderValue>,
    model: String,
    /// When it failed last.
    failed: Mutex<Option<Instant>>,
}

/// One try.
enum Failure {
    /// Another try may do better.
    Passing(String),
    /// It would fail alike.
    Lasting(String),
}

impl Http {
    /// The services of `config`.
    ///
    /// # Errors
    /// There is no address, or a token cannot be sent.
    pub fn new(config: &Recognizer) -> Result<Self, String> {
        let url = config.url.as_ref().ok_or("[recognizer] url is not set")?;
        let mut services = vec![Service::new(url, config.token.as_ref(), config.model.as_deref())?];
        if let Some(Fallback { url, token, model, .. }) = &config.fallback {
            services.push(Service::new(url, token.as_ref(), model.as_deref())?);
        }
        let timeout = Duration::from_millis(config.timeout_ms);
        let client = reqwest::Client::builder().timeout(timeout).build().map_err(|e| format!("HTTP client: {e}"))?;
        Ok(Self(Arc::new(Inner { client, services, timeout, room: tokio::sync::Semaphore::new(MAX_REQUESTS) })))
    }
}

impl Recogniser for Http {
    fn kind(&self) -> &'static str {
        "http"
    }

    fn recognise(&self, request: Request) -> Answer {
        let inner = self.0.clone();
        Box::pin(async move {
            // A service counts what it is asked: only words that somebody waits for are worth it.
            if !request.urgent {
                return Err(Trouble::Busy);
            }
            let Ok(_room) = inner.room.try_acquire() else { return Err(Trouble::Overloaded) };
            inner.ask(&request).await
        })
    }
}

impl Service {
    fn new(url: &str, token: Option<&Secret>, model: Option<&str>) -> Result<Self, String> {
        let base = url.trim_end_matches('/');
        let url = match base {
            whole if whole.ends_with("/audio/transcriptions") => whole.to_owned(),
            versioned if versioned.ends_with("/v1") => format!("{versioned}{}", PATH.trim_start_matches("/v1")),
            root => format!("{root}{PATH}"),
        };
        let authorization = match token {
            None => None,
            Some(token) => {
                let value = HeaderValue::try_from(format!("Bearer {}", token.reveal()));
                let mut value = value.map_err(|_| "[recognizer] token cannot be sent in a header".to_owned())?;
                value.set_sensitive(true);
                Some(value)
            }
        };
        Ok(Self { url, authorization, model: model.unwrap_or(MODEL).into(), failed: Mutex::new(None) })
    }

    fn failed(&self) -> Option<Instant> {
        *self.failed.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    fn note(&self, failed: Option<Instant>) {
        *self.failed.lock().unwrap_or_else(|poisoned| poisoned.into_inner()) = failed;
    }
}

impl Inner {
    async fn ask(&self, request: &Request) -> Result<Option<Words>, Trouble> {
        let now = clock::now();
        let mut order: Vec<&Service> = self.services.iter().collect();
        // Stable: the first stays first among those that work.
        order.sort_by_key(|service| service.failed().is_some_and(|at| now.saturating_duration_since(at) < AVOID));
        let mut told = String::new();
        for service in order {
            for attempt in 0..2 {
                if request.stop.is_set() {
                    return Ok(None);
                }
                if attempt > 0 {
                    tokio::time::sleep(RETRY).await;
                }
                match self.try_once(service, request).await {
                    Ok(words) => {
                        service.note(None);
                        return Ok(Some(words));
                    }
                    Err(Failure::Passing(reason)) => told = reason,
                    Err(Failure::Lasting(reason)) => {
                        told = reason;
                        break;
                    }
                }
            }
            service.note(Some(clock::now()));
            tracing::warn!(url = service.url, reason = told, "a recogniser failed");
        }
        Err(Trouble::Failed(told))
    }

    async fn try_once(&self, service: &Service, request: &Request) -> Result<Words, Failure> {
        let (boundary, body) = form(&service.model, request);
        let mut post = self.client.post(&service.url).timeout(self.timeout).body(body);
        post = post.header(CONTENT_TYPE, format!("multipart/form-data; boundary={boundary}"));
        if let Some(authorization) = &service.authorization {
            post = post.header(AUTHORIZATION, authorization.clone());
        }
        // The address may hold what should not be logged.
        let failed = |error: reqwest::Error| Failure::Passing(describe(&error));
        let mut response = post.send().await.map_err(failed)?;
        let status = response.status();
        let mut answer = Vec::new();
        while let Some(piece) = response.chunk().await.map_err(failed)? {
            if answer.len() + piece.len() > MAX_ANSWER {
                return Err(Failure::Lasting(format!("the recogniser's answer is larger than {MAX_ANSWER} bytes")));
            }
            answer.extend_from_slice(&piece);
        }
        if !status.is_success() {
            let reason = format!("the recogniser answered {status}");
            let passing = status.is_server_error()
                || [StatusCode::TOO_MANY_REQUESTS, StatusCode::REQUEST_TIMEOUT].contains(&status);
            return Err(if passing { Failure::Passing(reason) } else { Failure::Lasting(reason) });
        }
        read(&answer).map_err(Failure::Passing)
    }
}

fn describe(error: &reqwest::Error) -> String {
    match () {
        () if error.is_timeout() => "the recogniser did not answer in time".into(),
        () if error.is_connect() => "the recogniser cannot be reached".into(),
        () => "the link to the recogniser broke".into(),
    }
}

/// The words of an answer.
fn read(answer: &[u8]) -> Result<Words, String> {
    #[derive(Deserialize)]
    struct Transcription {
        text: String,
        #[serde(default)]
        language: Option<String>,
    }
    let answer: Transcription =
        serde_json::from_slice(answer).map_err(|_| "the recogniser's answer is no transcription".to_owned())?;
    let language = tag(answer.language.as_deref().unwrap_or_default());
    Ok(Words { text: tidy(&answer.text), language, confidence: 1.0 })
}

/// A language from outside; empty where it cannot be one (BCP 47 needs no more than 35 characters).
pub(super) fn tag(text: &str) -> String {
    let may_be = text.len() <= 35 && text.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '-' | '_'));
    if may_be { text.to_owned() } else { String::new() }
}

/// Text from outside: without control characters, and no longer than speech.
pub(super) fn tidy(text: &str) -> String {
    let clean = text.chars().map(|c| if c.is_control() { ' ' } else { c }).collect::<String>();
    let mut words = clean.split_whitespace().collect::<Vec<_>>().join(" ");
    if words.len() > MAX_TEXT {
        let end = (0..=MAX_TEXT).rev().find(|at| words.is_char_boundary(*at)).unwrap_or(0);
        words.truncate(end);
    }
    words
}

/// The form's boundary and bytes.
fn form(model: &str, request: &Request) -> (String, Vec<u8>) {
    let boundary = format!("antiphon-{}", uuid::Uuid::new_v4().simple());
    let mut body = Vec::with_capacity(request.pcm.len() * 2 + 1_024);
    let mut field = |name: &str, value: &str| {
        let part = format!("--{boundary}\r\nContent-Disposition: form-data; name=\"{name}\"\r\n\r\n{value}\r\n");
        body.extend_from_slice(part.as_bytes());
    };
    field("model", model);
    field("response_format", "json");
    field("temperature", "0");
    if let Some(language) = &request.language {
        // Such services know ISO 639-1 codes, not tags with regions.
        field("language", language.split(['-', '_']).next().unwrap_or_default());
    }
    let head = format!(
        "--{boundary}\r\nContent-Disposition: form-data; name=\"file\"; filename=\"turn.wav\"\r\n\
         Content-Type: audio/wav\r\n\r\n"
    );
    body.extend_from_slice(head.as_bytes());
    wav(&request.pcm, &mut body);
    body.extend_from_slice(format!("\r\n--{boundary}--\r\n").as_bytes());
    (boundary, body)
}

/// A WAV file of 16-bit mono at [`RATE`].
fn wav(pcm: &[i16], out: &mut Vec<u8>) {
    let bytes = (pcm.len() * 2) as u32;
    out.extend_from_slice(b"RIFF");
    out.extend_from_slice(&(36 + bytes).to_le_bytes());
    out.extend_from_slice(b"WAVEfmt ");
    out.extend_from_slice(&16u32.to_le_bytes());
    for number in [1u16, 1] {
        out.extend_from_slice(&number.to_le_bytes());
    }
    for number in [RATE, RATE * 2] {
        out.extend_from_slice(&number.to_le_bytes());
    }
    for number in [2u16, 16] {
        out.extend_from_slice(&number.to_le_bytes());
    }
    out.extend_from_slice(b"data");
    out.extend_from_slice(&bytes.to_le_bytes());
    out.extend(pcm.iter().flat_map(|sample| sample.to_le_bytes()));
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeMap, VecDeque};

    use axum::extract::{Multipart, State};
    use axum::http::HeaderMap;
    use axum::response::{IntoResponse, Response};
    use axum::routing::post;

    use super::*;
    use crate::hear::Stop;

    /// What a server does with one request.
    #[derive(Clone, Debug)]
    enum Act {
        Say(&'static str),
        Status(u16),
        Body(String),
        Hang,
    }

    /// Fields of one request, and its token.
    type Form = BTreeMap<String, Vec<u8>>;

    #[derive(Clone, Default)]
    struct Script {
        acts: Arc<Mutex<VecDeque<Act>>>,
        seen: Arc<Mutex<Vec<Form>>>,
    }

    async fn answer(State(script): State<Script>, headers: HeaderMap, mut form: Multipart) -> Response {
        let mut fields = BTreeMap::new();
        while let Some(field) = form.next_field().await.expect("a form") {
            fields.insert(field.name().expect("a name").to_owned(), field.bytes().await.expect("bytes").to_vec());
        }
        if let Some(token) = headers.get(AUTHORIZATION) {
            fields.insert("token".into(), token.as_bytes().to_vec());
        }
        script.seen.lock().expect("lock").push(fields);
        let act = script.acts.lock().expect("lock").pop_front().unwrap_or(Act::Say(""));
        match act {
            Act::Say(text) => axum::Json(serde_json::json!({"text": text, "language": "en"})).into_response(),
            Act::Status(code) => axum::http::StatusCode::from_u16(code).expect("a code").into_response(),
            Act::Body(body) => body.into_response(),
            Act::Hang => std::future::pending().await,
        }
    }

    async fn server(acts: Vec<Act>) -> (String, Script) {
        let script = Script { acts: Arc::new(Mutex::new(acts.into())), ..Script::default() };
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let url = format!("http://{}", listener.local_addr().expect("bound"));
        let app = axum::Router::new().route(PATH, post(answer)).with_state(script.clone());
        tokio::spawn(async move { axum::serve(listener, app).await });
        (url, script)
    }

    fn request() -> Request {
        Request { pcm: vec![7; 1_600], language: Some("en-US".into()), urgent: true, stop: Stop::default() }
    }

    fn http(url: &str, fallback: Option<&str>, timeout_ms: u64) -> Http {
        let _ = rustls::crypto::ring::default_provider().install_default();
        let config = Recognizer {
            url: Some(url.into()),
            token: Some(Secret::new("key")),
            fallback: fallback.map(|url| Fallback {
                kind: None,
                url: url.into(),
                token: None,
                model: None,
                price: 0.0,
            }),
            timeout_ms,
            ..Recognizer::default()
        };
        Http::new(&config).expect("a client")
    }

    #[tokio::test]
    async fn a_turn_goes_as_a_file_and_comes_back_as_words() {
        let (url, script) = server(vec![Act::Say(" Hello\nthere. ")]).await;
        let words = http(&url, None, 20_000).recognise(request()).await.expect("an answer").expect("not stopped");
        assert_eq!((words.text.as_str(), words.language.as_str()), ("Hello there.", "en"));
        let seen = script.seen.lock().expect("lock").clone();
        let field = |name: &str| String::from_utf8_lossy(&seen[0][name]).into_owned();
        assert_eq!(
            (field("language"), field("model"), field("token")),
            ("en".into(), MODEL.into(), "Bearer key".into())
        );
        let sound = hound::WavReader::new(std::io::Cursor::new(seen[0]["file"].clone())).expect("a WAV file");
        assert_eq!((sound.spec().sample_rate, sound.spec().channels), (RATE, 1));
        assert!(sound.into_samples::<i16>().all(|sample| sample.expect("whole") == 7));
    }

    #[tokio::test]
    async fn a_passing_failure_is_tried_again_and_a_lasting_one_is_not() {
        let (url, script) = server(vec![Act::Status(503), Act::Say("Again.")]).await;
        let words = http(&url, None, 20_000).recognise(request()).await.expect("an answer").expect("not stopped");
        assert_eq!((words.text.as_str(), script.seen.lock().expect("lock").len()), ("Again.", 2));
        let (url, script) = server(vec![Act::Status(401)]).await;
        let error = http(&url, None, 20_000).recognise(request()).await.expect_err("refused");
        assert!(error.to_string().contains("401"), "{error}");
        assert_eq!(script.seen.lock().expect("lock").len(), 1);
    }

    #[tokio::test]
    async fn rubbish_floods_and_silence_are_failures_and_the_second_service_is_asked() {
        let bad = [
            (vec![Act::Body("<html>".into()), Act::Body("{}".into())], 20_000),
            (vec![Act::Body("x".repeat(MAX_ANSWER + 1))], 20_000),
            (vec![Act::Hang, Act::Hang], 2_000),
        ];
        for (acts, timeout) in bad {
            let told = format!("{:.40}", format!("{acts:?}"));
            let (first, _) = server(acts).await;
            let (second, script) = server(vec![Act::Say("I am the second."), Act::Say("Still the second.")]).await;
            let http = http(&first, Some(&second), timeout);
            let words = http.recognise(request()).await.expect(&told).expect("not stopped");
            assert_eq!(words.text, "I am the second.", "{told}");
            let words = http.recognise(request()).await.expect(&told).expect("not stopped");
            assert_eq!(words.text, "Still the second.", "one that failed is asked second");
            assert!(!script.seen.lock().expect("lock")[0].contains_key("token"), "keys stay with their service");
        }
    }

    #[tokio::test]
    async fn a_service_that_is_not_there_is_told_and_partial_texts_are_not_asked_for() {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let url = format!("http://{}", listener.local_addr().expect("bound"));
        drop(listener);
        let gone = http(&url, None, 20_000);
        let error = gone.recognise(request()).await.expect_err("nobody listens");
        assert!(error.to_string().contains("cannot be reached"), "{error}");
        assert_eq!(gone.recognise(Request { urgent: false, ..request() }).await, Err(Trouble::Busy));
        let stopped = request();
        stopped.stop.set();
        assert_eq!(gone.recognise(stopped).await, Ok(None));
    }

    #[test]
    fn addresses_may_leave_out_the_path_and_texts_are_bounded() {
        let url = |url: &str| Service::new(url, None, None).expect("usable").url;
        assert_eq!(url("http://a:1"), "http://a:1/v1/audio/transcriptions");
        assert_eq!(url("http://a/v1/"), "http://a/v1/audio/transcriptions");
        assert_eq!(url("http://a/x/audio/transcriptions"), "http://a/x/audio/transcriptions");
        assert_eq!(tidy("\u{1b}[2J a\0b "), "[2J a b");
        assert_eq!(tidy(&"ä".repeat(MAX_TEXT)).len(), MAX_TEXT);
        assert!(Service::new("http://a", Some(&Secret::new("a\nb")), None).is_err());
    }
}
