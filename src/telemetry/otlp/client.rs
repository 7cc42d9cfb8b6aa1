//! How requests reach the collector: by the HTTP client that the rest of the project uses.

use std::time::Duration;

use bytes::Bytes;
use opentelemetry_http::{HttpClient, HttpError, Request, Response};

/// How long a collector may take to answer.
pub(super) const PATIENCE: Duration = Duration::from_secs(5);
/// Longest answer that is read: it says at most what was refused and why.
const MAX_ANSWER: usize = 1 << 20;

/// Clones share connections.
#[derive(Clone, Debug)]
pub(super) struct Client(reqwest::Client);

impl Client {
    pub(super) fn new() -> reqwest::Result<Self> {
        reqwest::Client::builder().timeout(PATIENCE).build().map(Self)
    }

    /// Posts what is encoded already.
    ///
    /// # Errors
    /// The collector does not answer, or with an error.
    pub(super) async fn post(&self, url: &str, body: Vec<u8>) -> Result<(), String> {
        let request = self.0.post(url).header("content-type", "application/x-protobuf").body(body);
        let answer = request.send().await.map_err(|error| error.to_string())?;
        let status = answer.status();
        if status.is_success() { Ok(()) } else { Err(format!("status {}", status.as_u16())) }
    }
}

#[async_trait::async_trait]
impl HttpClient for Client {
    async fn send_bytes(&self, request: Request<Bytes>) -> Result<Response<Bytes>, HttpError> {
        let request = reqwest::Request::try_from(request)?;
        let mut answer = self.0.execute(request).await?;
        let mut response = Response::new(Bytes::new());
        *response.status_mut() = answer.status();
        *response.headers_mut() = std::mem::take(answer.headers_mut());
        let mut body = Vec::new();
        while let Some(piece) = answer.chunk().await? {
            if body.len() + piece.len() > MAX_ANSWER {
                return Err("the answer is too long".into());
            }
            body.extend_from_slice(&piece);
        }
        *response.body_mut() = body.into();
        Ok(response)
    }
}
