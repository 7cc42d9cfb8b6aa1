//! Audio in an object store: a server of the test that speaks as much of the S3 protocol as is asked of it, and verifies
//! each signature as Amazon's documents say (AWS Signature Version 4, query parameters).

use std::collections::BTreeMap;

use axum::Router;
use axum::body::{Body, to_bytes};
use axum::extract::State;
use axum::http::{HeaderMap, Method, Request, Response, StatusCode, Uri};
use ring::{digest, hmac};

use super::*;
use crate::postgres::Address;
use crate::secret::Secret;
use antiphon_skip::postgres::Postgres as Server;

const KEY: &str = "batch-work";
const SECRET: &str = "sesame/batch+work";
/// Keys of a page of a list.
const KEYS: usize = 3;

/// What the store holds, and how it behaves.
#[derive(Default)]
struct Held {
    objects: Mutex<BTreeMap<String, Vec<u8>>>,
    /// The secret that is accepted; empty: [`SECRET`].
    secret: Mutex<String>,
    /// Requests so far, and whether some of them are refused or their answers lost.
    requests: std::sync::atomic::AtomicU64,
    troubled: AtomicBool,
    /// Refuses everything.
    away: AtomicBool,
    /// Signatures that were wrong.
    strangers: std::sync::atomic::AtomicU64,
}

impl Held {
    fn keys(&self) -> Vec<String> {
        self.objects.lock().expect("sound").keys().cloned().collect()
    }

    /// Of utterances.
    fn made(&self) -> usize {
        self.keys().iter().filter(|key| key.ends_with(".pcm")).count()
    }
}

/// A store at its own port; the configuration of a gateway that uses it.
async fn store(prefix: &str) -> (Arc<Held>, Config) {
    let _ = rustls::crypto::ring::default_provider().install_default();
    let held = Arc::<Held>::default();
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a free port");
    let endpoint = format!("http://{}", listener.local_addr().expect("bound"));
    let app = Router::new().fallback(answer).with_state(held.clone());
    tokio::spawn(async move { axum::serve(listener, app).await });
    let key = |key: &str| Some(Secret::new(key));
    let s3 = S3 { endpoint, region: "eu-central-1".into(), access_key: key(KEY), secret_key: key(SECRET) };
    (held, Config { audio: format!("s3://speech{prefix}"), s3, lanes: 4, ..Config::default() })
}

async fn answer(State(held): State<Arc<Held>>, request: Request<Body>) -> Response<Body> {
    let refused = |status: StatusCode, code: &str| {
        let body = format!("<Error><Code>{code}</Code><Message>says the store</Message></Error>");
        Response::builder().status(status).body(body.into()).expect("a response")
    };
    let number = held.requests.fetch_add(1, Ordering::Relaxed);
    let troubled = held.troubled.load(Ordering::Relaxed);
    if held.away.load(Ordering::Relaxed) || troubled && number % 5 == 1 {
        return refused(StatusCode::SERVICE_UNAVAILABLE, "SlowDown");
    }
    let secret = match held.secret.lock().expect("sound").as_str() {
        "" => SECRET.to_owned(),
        secret => secret.to_owned(),
    };
    let (parts, body) = request.into_parts();
    if signature(&parts.method, &parts.uri, &parts.headers, &secret).is_none_or(|(told, own)| told != own) {
        held.strangers.fetch_add(1, Ordering::Relaxed);
        return refused(StatusCode::FORBIDDEN, "SignatureDoesNotMatch");
    }
    let body = to_bytes(body, 10 << 20).await.expect("a body").to_vec();
    let key = parts.uri.path().strip_prefix("/speech/").expect("the bucket").to_owned();
    let mut objects = held.objects.lock().expect("sound");
    let done = |body: Vec<u8>| Response::new(Body::from(body));
    let response = match parts.method {
        Method::PUT
            if parts.headers.get("if-none-match").is_some_and(|tag| tag == "*") && objects.contains_key(&key) =>
        {
            refused(StatusCode::PRECONDITION_FAILED, "PreconditionFailed")
        }
        Method::PUT => {
            objects.insert(key, body);
            done(Vec::new())
        }
        Method::DELETE => {
            objects.remove(&key);
            Response::builder().status(204).body(Body::empty()).expect("a response")
        }
        Method::GET if key.is_empty() => done(list(&objects, &parts.uri).into_bytes()),
        Method::GET => match objects.get(&key) {
            Some(bytes) => done(bytes.clone()),
            None => refused(StatusCode::NOT_FOUND, "NoSuchKey"),
        },
        _ => refused(StatusCode::METHOD_NOT_ALLOWED, "MethodNotAllowed"),
    };
    // Done, and the answer is lost.
    if troubled && number % 7 == 3 { refused(StatusCode::INTERNAL_SERVER_ERROR, "InternalError") } else { response }
}

fn query(uri: &Uri) -> Vec<(&str, &str)> {
    uri.query().unwrap_or_default().split('&').filter_map(|pair| pair.split_once('=')).collect()
}

fn list(objects: &BTreeMap<String, Vec<u8>>, uri: &Uri) -> String {
    let of = |name: &str| {
        let value = query(uri).into_iter().find(|(key, _)| *key == name).map(|(_, value)| value);
        value.unwrap_or_default().replace("%2F", "/")
    };
    let (prefix, from) = (of("prefix"), of("continuation-token"));
    let found: Vec<_> = objects.iter().filter(|(key, _)| key.starts_with(&prefix) && **key > from).collect();
    let page: String = found
        .iter()
        .take(KEYS)
        .map(|(key, bytes)| format!("<Contents><Key>{key}</Key><Size>{}</Size></Contents>", bytes.len()))
        .collect();
    let next = match found.get(KEYS - 1).filter(|_| found.len() > KEYS) {
        Some((last, _)) => {
            format!("<IsTruncated>true</IsTruncated><NextContinuationToken>{last}</NextContinuationToken>")
        }
        None => "<IsTruncated>false</IsTruncated>".into(),
    };
    format!("<ListBucketResult xmlns=\"http://s3.amazonaws.com/doc/2006-03-01/\">{page}{next}</ListBucketResult>")
}

/// The signature that a request has, and the one that it should have; `None`: it is not signed.
fn signature(method: &Method, uri: &Uri, headers: &HeaderMap, secret: &str) -> Option<(String, String)> {
    let mut pairs = query(uri);
    let of = |name: &str| query(uri).into_iter().find(|(key, _)| *key == name).map(|(_, value)| value);
    let told = of("X-Amz-Signature")?.to_owned();
    let (date, credential) = (of("X-Amz-Date")?, of("X-Amz-Credential")?.replace("%2F", "/"));
    let signed = of("X-Amz-SignedHeaders")?.replace("%3B", ";");
    let (key, scope) = credential.split_once('/')?;
    if key != KEY && key != "AKIAIOSFODNN7EXAMPLE" {
        return None;
    }
    pairs.retain(|(key, _)| *key != "X-Amz-Signature");
    pairs.sort_unstable();
    let asked: Vec<String> = pairs.iter().map(|(key, value)| format!("{key}={value}")).collect();
    let lines: Option<String> =
        signed.split(';').map(|name| Some(format!("{name}:{}\n", headers.get(name)?.to_str().ok()?.trim()))).collect();
    let canonical = format!("{method}\n{}\n{}\n{}\n{signed}\nUNSIGNED-PAYLOAD", uri.path(), asked.join("&"), lines?);
    let hex = |bytes: &[u8]| bytes.iter().map(|byte| format!("{byte:02x}")).collect::<String>();
    let hashed = hex(digest::digest(&digest::SHA256, canonical.as_bytes()).as_ref());
    let text = format!("AWS4-HMAC-SHA256\n{date}\n{scope}\n{hashed}");
    let sign =
        |key: &[u8], text: &str| hmac::sign(&hmac::Key::new(hmac::HMAC_SHA256, key), text.as_bytes()).as_ref().to_vec();
    let key = scope.split('/').fold(format!("AWS4{secret}").into_bytes(), |key, part| sign(&key, part));
    Some((told, hex(&sign(&key, &text))))
}

/// The example of Amazon's documents ("Authenticating Requests: Using Query Parameters").
#[test]
fn the_server_of_these_tests_signs_as_the_documents_do() {
    let uri: Uri = "https://examplebucket.s3.amazonaws.com/test.txt?X-Amz-Algorithm=AWS4-HMAC-SHA256&X-Amz-Credential=\
                    AKIAIOSFODNN7EXAMPLE%2F20130524%2Fus-east-1%2Fs3%2Faws4_request&X-Amz-Date=20130524T000000Z&\
                    X-Amz-Expires=86400&X-Amz-SignedHeaders=host&X-Amz-Signature=\
                    aeeed9bbccd4d02ee5c0109b86d86835f995330da4c265957d157751f604d404"
        .parse()
        .expect("a URI");
    let mut headers = HeaderMap::new();
    headers.insert("host", "examplebucket.s3.amazonaws.com".parse().expect("a value"));
    let secret = "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY";
    let (told, own) = signature(&Method::GET, &uri, &headers, secret).expect("signed");
    assert_eq!(told, own);
}

const TEXT: &str = "Here is one more sentence to be spoken. ";

/// The same job with its audio in a folder.
async fn undisturbed(spec: JobSpec) -> Vec<u8> {
    let folder = tempfile::tempdir().expect("temp dir");
    let batch = Batch::open(config(folder.path()), engine()).expect("opens");
    let id = batch.submit(spec).expect("accepted").id;
    over(&batch, &id).await;
    let all = bytes(&batch, &id, None);
    batch.shutdown();
    all
}

/// Reads audio where the store may answer meanwhile.
async fn read(batch: &Batch, id: &str) -> Vec<u8> {
    let (batch, id) = (batch.clone(), id.to_owned());
    tokio::task::spawn_blocking(move || bytes(&batch, &id, None)).await.expect("no panic")
}

#[tokio::test(flavor = "multi_thread")]
async fn audio_of_an_object_store_that_fails_now_and_then_is_that_of_a_folder() {
    let folder = tempfile::tempdir().expect("temp dir");
    let (held, config) = store("/books").await;
    held.troubled.store(true, Ordering::Relaxed);
    let config = Config { database: folder.path().join("jobs.sqlite").into(), ..config };
    let spec = spec(&[&TEXT.repeat(16), &TEXT.repeat(6)], Format::Flac);
    let batch = Batch::open(config.clone(), engine()).expect("opens");
    let job = batch.submit(spec.clone()).expect("accepted");
    batch.shutdown();
    // What was on its way is taken over, or made again.
    let batch = Batch::open(config, engine()).expect("opens again");
    let job = over(&batch, &job.id).await;
    assert_eq!((job.state, job.finished), (JobState::Done, job.total));
    assert_eq!(read(&batch, &job.id).await, undisturbed(spec).await);
    assert_eq!(held.made(), job.total as usize, "each once: {:?}", held.keys());
    assert!(held.keys().iter().all(|key| key.starts_with(&format!("books/{}/", job.id))), "{:?}", held.keys());
    assert_eq!(held.strangers.load(Ordering::Relaxed), 0, "every request was signed");
    batch.shutdown();
}

#[tokio::test(flavor = "multi_thread")]
async fn jobs_wait_for_an_object_store_that_refuses_and_say_why() {
    let folder = tempfile::tempdir().expect("temp dir");
    let (held, config) = store("").await;
    "another".clone_into(&mut held.secret.lock().expect("sound"));
    let config = Config { database: folder.path().join("jobs.sqlite").into(), ..config };
    let batch = Batch::open(config, engine()).expect("opens");
    let job = batch.submit(spec(&[TEXT], Format::Wav)).expect("accepted");
    let why = reason(&batch, &job.id).await;
    assert!(why.contains("s3://speech") && why.contains("SignatureDoesNotMatch"), "{why}");
    assert!(!why.contains(SECRET) && !why.contains("X-Amz"), "{why}");
    held.away.store(true, Ordering::Relaxed);
    held.secret.lock().expect("sound").clear();
    let away = found(|| batch.job(&job.id).expect("known").reason.filter(|why| why.contains("SlowDown"))).await;
    assert!(away.contains("503"), "{away}");
    held.away.store(false, Ordering::Relaxed);
    let job = over(&batch, &job.id).await;
    assert_eq!((job.state, held.made()), (JobState::Done, 1));
    let id = job.id.clone();
    // One that somebody has changed is not given out as what was spoken.
    held.objects.lock().expect("sound").values_mut().for_each(|bytes| bytes.truncate(100));
    let other = batch.clone();
    let error = tokio::task::spawn_blocking(move || other.audio(&id, None).expect("done").find_map(Result::err)).await;
    assert!(error.expect("no panic").expect("an error").to_string().contains("has 100 bytes"));
    batch.shutdown();
}

#[tokio::test(flavor = "multi_thread")]
async fn gateways_share_an_object_store_and_refuse_another() {
    let Some(server) = Server::start() else { return };
    let (held, config) = store("/books").await;
    held.troubled.store(true, Ordering::Relaxed);
    let address = Address::new(Secret::new(server.url())).expect("an address");
    let config = Config { database: Database::Postgres(address), ..config };
    let (a, b) =
        (Batch::open(config.clone(), engine()).expect("opens"), Batch::open(config.clone(), engine()).expect("opens"));
    let spec = spec(&[&TEXT.repeat(20)], Format::Pcm);
    let (first, second) = (a.submit(spec.clone()).expect("accepted"), b.submit(spec.clone()).expect("accepted"));
    let whole = undisturbed(spec.clone()).await;
    for (batch, other, job) in [(&b, &a, first), (&a, &b, second)] {
        let job = over(batch, &job.id).await;
        assert_eq!((job.state, job.finished), (JobState::Done, job.total));
        assert_eq!(read(batch, &job.id).await, whole);
        assert_eq!(read(other, &job.id).await, whole, "as the other gateway reads it");
        // ITEM-PART.FENCE.pcm: one whose every answer was lost is spoken again under another fence, and one of the two counts.
        let keys = held.keys();
        let keys = keys.iter().filter_map(|key| key.strip_prefix(&format!("books/{}/", job.id)));
        let parts: std::collections::BTreeSet<&str> = keys.filter_map(|key| key.split('.').next()).collect();
        assert_eq!(parts.len(), job.total as usize, "{parts:?}");
    }
    let elsewhere = Config { audio: "s3://speech/films".into(), ..config };
    let c = Batch::open(elsewhere, engine()).expect("opens");
    let fault = found(|| c.fault()).await;
    assert!(fault.contains("s3://speech/films") && fault.contains("keep audio"), "{fault}");
    c.shutdown();
    // It asked more than once: it is over when its thread is.
    assert!(!held.keys().iter().any(|key| key.starts_with("films/")), "it leaves no mark: {:?}", held.keys());
    // A cancelled job leaves nothing.
    let long = JobSpec { items: vec![TEXT.repeat(3_000).into()], ..spec };
    let third = a.submit(long).expect("accepted");
    found(|| a.job(&third.id).ok().filter(|job| job.finished > 0)).await;
    let (id, other) = (third.id.clone(), b.clone());
    let cancelled = tokio::task::spawn_blocking(move || other.cancel(&id)).await.expect("no panic").expect("known");
    assert_eq!(cancelled.state, JobState::Cancelled);
    found(|| (!held.keys().iter().any(|key| key.contains(&third.id))).then_some(())).await;
    assert_eq!(held.strangers.load(Ordering::Relaxed), 0, "every request was signed");
    a.shutdown();
    b.shutdown();
}
