//! Audio in an object store that speaks the S3 protocol (AWS, MinIO, Ceph, R2 and others).
//!
//! Requests are signed by `rusty-s3` and sent by our HTTP client, on a runtime of one thread of their own: the thread of
//! jobs never waits for the network while it feeds the devices. An object is one utterance, a megabyte at most, so that it
//! is sent and fetched whole.
//!
//! # Why
//! - **Puts are repeated as they are**: the name holds the fence of the lease (see [`super::super::store`]), the bytes are
//!   a function of text and seed, so that a put that was lost on its way back does no harm when it is made again.
//! - **`rusty-s3` and not `object_store`**: that one switches on features of the HTTP stack that everything else is built
//!   without, and what it adds (parts of large objects, other clouds) is of no use for objects of this size.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, sync_channel};
use std::time::Duration;

use bytes::Bytes;
use reqwest::{Client, Method, StatusCode, Url};
use rusty_s3::actions::ListObjectsV2;
use rusty_s3::{Bucket, Credentials, S3Action, UrlStyle};
use serde::Deserialize;
use tokio::runtime::{Builder, Runtime};
use tokio::sync::{Semaphore, mpsc};

use crate::host;
use crate::reach::cause;
use crate::secret::Secret;

/// A connection, and a request with its answer.
const CONNECT: Duration = Duration::from_secs(5);
const ANSWER: Duration = Duration::from_secs(60);
/// How long a signature is good: clocks may differ by minutes.
const SIGNED: Duration = Duration::from_secs(900);
/// Tries of a request that failed on its way or was told to come again, and the pause before the second, which doubles.
const TRIES: u32 = 5;
const PAUSE: Duration = if cfg!(test) { Duration::from_millis(20) } else { Duration::from_millis(200) };
/// Requests under way at once when a job is removed, and when utterances are written.
const AT_ONCE: usize = 32;
/// What is shown of an answer that is no success.
const SHOWN: usize = 300;

/// `[batch.s3]`: how an object store is reached.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct S3 {
    /// Where it is, as `https://minio.internal:9000`; empty: AWS, by the region.
    pub endpoint: String,
    /// What requests are signed for; most stores but AWS take any.
    pub region: String,
    /// The name of the key.
    pub access_key: Option<Secret>,
    /// The key.
    pub secret_key: Option<Secret>,
}

impl S3 {
    /// Checks what the types cannot say, for audio at `place`.
    pub(in crate::batch) fn validate(&self, place: &str) -> Result<(), String> {
        self.bucket(place).map(drop)?;
        match (&self.access_key, &self.secret_key) {
            (Some(_), Some(_)) => Ok(()),
            _ => Err("s3.access_key and s3.secret_key must both be set where audio is s3://...".into()),
        }
    }

    /// The bucket and what keys begin with.
    fn bucket(&self, place: &str) -> Result<(Bucket, String), String> {
        let rest = place.strip_prefix("s3://").ok_or_else(|| {
            format!("audio `{place}` is no s3://BUCKET/PREFIX; for a folder leave it empty and set audio_dir")
        })?;
        let (bucket, prefix) = rest.split_once('/').unwrap_or((rest, ""));
        if bucket.is_empty() {
            return Err(format!("audio `{place}` names no bucket: s3://BUCKET/PREFIX"));
        }
        let region = if self.region.is_empty() { "us-east-1" } else { &self.region };
        // Stores of one's own have no name for each bucket; AWS wants one.
        let (endpoint, style) = match self.endpoint.as_str() {
            "" => (format!("https://s3.{region}.amazonaws.com"), UrlStyle::VirtualHost),
            endpoint => (endpoint.to_owned(), UrlStyle::Path),
        };
        let wrong = |error: String| format!("s3.endpoint `{endpoint}`: {error}: https://HOST or http://HOST:PORT");
        let url = Url::parse(&endpoint).map_err(|error| wrong(error.to_string()))?;
        host::of(&url).map_err(wrong)?;
        let found = Bucket::new(url, style, bucket.to_owned(), region.to_owned());
        let prefix = prefix.trim_matches('/');
        let prefix = if prefix.is_empty() { String::new() } else { format!("{prefix}/") };
        Ok((found.map_err(|error| wrong(error.to_string()))?, prefix))
    }
}

/// Tells what became of a write, by its number. Full only while the thread of jobs does something else: the write waits.
pub(in crate::batch) type Answer = mpsc::Sender<Stored>;

/// A write by its number, and what became of it.
pub(in crate::batch) type Stored = (u64, Result<(), String>);

/// An object that was asked for.
pub(super) struct Asked(Receiver<Result<Bytes, String>>);

impl Asked {
    /// Its bytes. Blocks.
    pub(super) fn wait(self) -> Result<Bytes, String> {
        self.0.recv().unwrap_or_else(|_| Err(STOPPED.into()))
    }
}

const STOPPED: &str = "the object store is asked no more: this gateway stops";

/// An object store. Clones mean the same.
#[derive(Clone)]
pub(in crate::batch) struct Objects(Arc<Inner>);

struct Inner {
    store: Arc<Remote>,
    /// There until this is dropped, which may be where its end cannot be waited for.
    runtime: Option<Runtime>,
}

/// What requests are made of.
struct Remote {
    place: String,
    bucket: Bucket,
    credentials: Credentials,
    prefix: String,
    client: Client,
    /// Writes and removals at once.
    permits: Semaphore,
}

impl Objects {
    /// The store at `place`. Asks it nothing yet.
    pub(super) fn new(place: &str, s3: &S3) -> Result<Self, String> {
        s3.validate(place)?;
        let (bucket, prefix) = s3.bucket(place)?;
        let key = |key: &Option<Secret>| key.as_ref().map(|key| key.reveal().to_owned()).unwrap_or_default();
        let credentials = Credentials::new(key(&s3.access_key), key(&s3.secret_key));
        let client = Client::builder()
            .connect_timeout(CONNECT)
            .timeout(ANSWER)
            // A redirect would need another signature.
            .redirect(reqwest::redirect::Policy::none());
        let client = client.build().map_err(|error| format!("no HTTP client: {error}"))?;
        let (place, permits) = (place.to_owned(), Semaphore::new(AT_ONCE));
        let runtime = Builder::new_multi_thread().worker_threads(1).thread_name("batch-objects").enable_all().build();
        let runtime = Some(runtime.map_err(|error| format!("no thread for the object store: {error}"))?);
        let store = Arc::new(Remote { place, bucket, credentials, prefix, client, permits });
        Ok(Self(Arc::new(Inner { store, runtime })))
    }

    /// For messages.
    pub(super) fn name(&self) -> String {
        self.0.store.place.clone()
    }

    /// Starts `work` and gives where its outcome will come.
    fn start<T: Send + 'static, F>(&self, work: impl FnOnce(Arc<Remote>) -> F) -> Receiver<Result<T, String>>
    where
        F: Future<Output = Result<T, String>> + Send + 'static,
    {
        // One answer: sending never waits. It may not be wanted any more.
        let (answer, asked) = sync_channel(1);
        if let Some(runtime) = &self.0.runtime {
            let work = work(self.0.store.clone());
            runtime.spawn(async move {
                let _ = answer.send(work.await);
            });
        }
        asked
    }

    /// Does `work`. Blocks.
    fn wait<T: Send + 'static, F>(&self, work: impl FnOnce(Arc<Remote>) -> F) -> Result<T, String>
    where
        F: Future<Output = Result<T, String>> + Send + 'static,
    {
        self.start(work).recv().unwrap_or_else(|_| Err(STOPPED.into()))
    }

    /// Writes an object as a whole; `answer` is told by `number`.
    pub(super) fn put_later(&self, key: String, bytes: Vec<u8>, number: u64, answer: Answer) {
        let work = self.start(async move |store: Arc<Remote>| -> Result<(), String> {
            let permit = store.permits.acquire().await;
            let done = store.put(&key, bytes.into(), false).await;
            drop(permit);
            // The receiver is gone where the gateway stops.
            let _ = answer.send((number, done)).await;
            Ok(())
        });
        drop(work);
    }

    /// Writes an object unless there is one of that name. Blocks.
    pub(super) fn put_new(&self, key: String, bytes: Bytes) -> Result<(), String> {
        self.wait(async move |store: Arc<Remote>| store.put(&key, bytes, true).await)
    }

    /// The bytes of an object. Blocks.
    pub(super) fn get(&self, key: String) -> Result<Bytes, String> {
        self.wait(async move |store: Arc<Remote>| store.get(&key).await)
    }

    /// Asks for an object of so many bytes.
    pub(super) fn ask(&self, key: String, bytes: u64) -> Asked {
        Asked(self.start(async move |store: Arc<Remote>| {
            let found = store.get(&key).await?;
            if found.len() as u64 == bytes {
                return Ok(found);
            }
            Err(store.says(&key, &format!("has {} bytes, {bytes} were written", found.len())))
        }))
    }

    /// Removes an object; one that is not there is removed. Blocks.
    pub(super) fn delete(&self, key: String) -> Result<(), String> {
        self.wait(async move |store: Arc<Remote>| store.delete(&key).await)
    }

    /// The objects whose keys begin so, with their lengths. Blocks.
    pub(super) fn list(&self, prefix: String) -> Result<Vec<(String, u64)>, String> {
        self.wait(async move |store: Arc<Remote>| store.list(&prefix).await)
    }

    /// Removes the objects whose keys begin so. Blocks: for seconds where they are thousands.
    pub(super) fn delete_all(&self, prefix: String) -> Result<(), String> {
        self.wait(async move |store: Arc<Remote>| {
            let found = store.list(&prefix).await?;
            let each = found.iter().map(async |(key, _)| {
                let _permit = store.permits.acquire().await;
                store.delete(key).await
            });
            futures_util::future::join_all(each).await.into_iter().collect()
        })
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

impl Remote {
    fn key(&self, key: &str) -> String {
        format!("{}{key}", self.prefix)
    }

    fn says(&self, key: &str, what: &str) -> String {
        format!("{}: {key}: {what}", self.place)
    }

    /// Writes an object; with `new` not where there is one of that name.
    async fn put(&self, key: &str, bytes: Bytes, new: bool) -> Result<(), String> {
        let object = self.key(key);
        let mut action = self.bucket.put_object(Some(&self.credentials), &object);
        if new {
            action.headers_mut().insert("if-none-match", "*");
        }
        let (status, answer) = self.send(key, Method::PUT, || action.sign(SIGNED), bytes, new).await?;
        match status {
            status if status.is_success() => Ok(()),
            // Conflict: two at once, and the other one was first.
            StatusCode::PRECONDITION_FAILED | StatusCode::CONFLICT if new => Ok(()),
            status => Err(self.says(key, &refusal(status, &answer))),
        }
    }

    async fn get(&self, key: &str) -> Result<Bytes, String> {
        let object = self.key(key);
        let action = self.bucket.get_object(Some(&self.credentials), &object);
        match self.send(key, Method::GET, || action.sign(SIGNED), Bytes::new(), false).await? {
            (status, answer) if status.is_success() => Ok(answer),
            (status, answer) => Err(self.says(key, &refusal(status, &answer))),
        }
    }

    async fn delete(&self, key: &str) -> Result<(), String> {
        let object = self.key(key);
        let action = self.bucket.delete_object(Some(&self.credentials), &object);
        match self.send(key, Method::DELETE, || action.sign(SIGNED), Bytes::new(), false).await? {
            (status, _) if status.is_success() || status == StatusCode::NOT_FOUND => Ok(()),
            (status, answer) => Err(self.says(key, &refusal(status, &answer))),
        }
    }

    async fn list(&self, prefix: &str) -> Result<Vec<(String, u64)>, String> {
        let (mut found, mut from) = (Vec::new(), None::<String>);
        loop {
            let mut action = self.bucket.list_objects_v2(Some(&self.credentials));
            action.with_prefix(self.key(prefix));
            if let Some(from) = from.take() {
                action.with_continuation_token(from);
            }
            let (status, answer) = self.send(prefix, Method::GET, || action.sign(SIGNED), Bytes::new(), false).await?;
            if !status.is_success() {
                return Err(self.says(prefix, &refusal(status, &answer)));
            }
            let page = ListObjectsV2::parse_response(&String::from_utf8_lossy(&answer))
                .map_err(|error| self.says(prefix, &format!("a list that cannot be read: {error}")))?;
            // A prefix matches whatever begins with it; our own part of the name is left out.
            let own = page.contents.into_iter().filter_map(|object| {
                let key = object.key.strip_prefix(&self.prefix)?.to_owned();
                Some((key, object.size.unwrap_or(0)))
            });
            found.extend(own);
            match page.next_continuation_token {
                Some(next) => from = Some(next),
                None => return Ok(found),
            }
        }
    }

    /// Sends a request, again where it failed on its way or the store has no time. The status and the whole answer.
    async fn send(
        &self,
        key: &str,
        method: Method,
        url: impl Fn() -> Url,
        body: Bytes,
        new: bool,
    ) -> Result<(StatusCode, Bytes), String> {
        let mut pause = PAUSE;
        for left in (0..TRIES).rev() {
            // Signed anew each time, as a signature ages.
            let mut request = self.client.request(method.clone(), url());
            if method == Method::PUT {
                request = request.header("content-length", body.len()).body(body.clone());
            }
            if new {
                request = request.header("if-none-match", "*");
            }
            let outcome = async {
                let answer = request.send().await?;
                Ok::<_, reqwest::Error>((answer.status(), answer.bytes().await?))
            };
            let reason = match outcome.await {
                Ok((status, answer)) if status.is_server_error() || status == StatusCode::TOO_MANY_REQUESTS => {
                    refusal(status, &answer)
                }
                Ok(answer) => return Ok(answer),
                Err(error) => cause(&error.without_url()),
            };
            if left == 0 {
                return Err(self.says(key, &reason));
            }
            tracing::debug!(%reason, key, "the object store is asked again");
            tokio::time::sleep(pause).await;
            pause *= 2;
        }
        Err(self.says(key, "not asked"))
    }
}

/// Why a request was refused, from the answer's `Code` and `Message`, else its beginning.
fn refusal(status: StatusCode, answer: &[u8]) -> String {
    let text = String::from_utf8_lossy(answer);
    let part = |name: &str| {
        let (_, rest) = text.split_once(&format!("<{name}>"))?;
        Some(rest.split_once("</")?.0)
    };
    let what = match (part("Code"), part("Message")) {
        (Some(code), Some(message)) => format!("{code}: {message}"),
        (Some(code), None) => code.to_owned(),
        _ => text.trim().to_owned(),
    };
    format!("{status} {}", what.chars().take(SHOWN).collect::<String>()).trim_end().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn s3(endpoint: &str) -> S3 {
        let key = |key: &str| Some(Secret::new(key));
        S3 { endpoint: endpoint.into(), region: String::new(), access_key: key("a"), secret_key: key("b") }
    }

    #[test]
    fn a_place_is_a_bucket_with_what_its_keys_begin_with() {
        let (bucket, prefix) = s3("http://127.0.0.1:9000").bucket("s3://speech/batch/books/").expect("a place");
        assert_eq!((bucket.base_url().as_str(), prefix.as_str()), ("http://127.0.0.1:9000/speech/", "batch/books/"));
        let (bucket, prefix) = S3 { region: "eu-central-1".into(), ..s3("") }.bucket("s3://speech").expect("a place");
        assert_eq!(bucket.base_url().as_str(), "https://speech.s3.eu-central-1.amazonaws.com/");
        assert_eq!(prefix, "");
        for (place, endpoint, says) in [
            ("speech", "", "s3://BUCKET/PREFIX"),
            ("s3:///books", "", "names no bucket"),
            ("s3://speech", "minio", "s3.endpoint `minio`"),
            ("s3://speech", "ftp://minio", "s3.endpoint `ftp://minio`"),
        ] {
            let error = s3(endpoint).validate(place).expect_err("refused");
            assert!(error.contains(says), "{error}");
        }
        let error = S3 { secret_key: None, ..s3("") }.validate("s3://speech").expect_err("refused");
        assert!(error.contains("s3.access_key and s3.secret_key"), "{error}");
    }

    #[test]
    fn a_refusal_says_what_the_store_said() {
        let answer = b"<?xml version=\"1.0\"?><Error><Code>NoSuchBucket</Code><Message>There is none</Message></Error>";
        assert_eq!(refusal(StatusCode::NOT_FOUND, answer), "404 Not Found NoSuchBucket: There is none");
        assert_eq!(refusal(StatusCode::BAD_GATEWAY, b"no XML"), "502 Bad Gateway no XML");
        assert_eq!(refusal(StatusCode::FORBIDDEN, b""), "403 Forbidden");
    }
}
