//! Signed POSTs to somebody's own server: what records of calls and events are delivered by.

use std::time::Duration;

use reqwest::header::CONTENT_TYPE;

use crate::clock;
use crate::host;
use crate::secret::Secret;
use crate::telemetry::context::TRACEPARENT;

/// Longest time for one delivery.
const PATIENCE: Duration = Duration::from_secs(10);

/// `X-Antiphon-Signature` of a delivery: `v1=` and the HMAC-SHA256 (RFC 2104) of `TIMESTAMP.BODY` in hexadecimal.
/// Receivers compute it anew and refuse timestamps that are old.
pub fn signature(secret: &str, timestamp: u64, body: &str) -> String {
    let key = ring::hmac::Key::new(ring::hmac::HMAC_SHA256, secret.as_bytes());
    let tag = ring::hmac::sign(&key, format!("{timestamp}.{body}").as_bytes());
    tag.as_ref().iter().fold("v1=".to_owned(), |mut text, byte| {
        text.push_str(&format!("{byte:02x}"));
        text
    })
}

/// Whether a receiver can be used as it is configured.
///
/// # Errors
/// The key and what it must be.
pub fn check(url: &str, secret: &Secret, tries: u32) -> Result<(), String> {
    host::url(url, &["http", "https"]).map_err(|error| format!("url {error}"))?;
    if secret.reveal().is_empty() {
        return Err("secret must not be empty".into());
    }
    if tries == 0 {
        return Err("tries must be 1 or more".into());
    }
    Ok(())
}

/// The pause after so many tries that failed (1 or more): `first`, doubled with each, up to `longest`.
pub fn pause(tries: u32, first: Duration, longest: Duration) -> Duration {
    first.saturating_mul(2u32.saturating_pow(tries.clamp(1, 16) - 1)).min(longest)
}

/// What is delivered.
#[derive(Clone, Copy, Debug)]
pub struct Delivery<'a> {
    /// The same for every try, so that receivers know what they have already.
    pub id: &'a str,
    /// JSON.
    pub body: &'a str,
    /// The span that it is part of (W3C Trace Context), if there is one.
    pub trace: Option<&'a str>,
}

/// Delivers. Clones share connections.
#[derive(Clone, Debug)]
pub struct Client(reqwest::Client);

impl Client {
    /// One that follows no redirects: the receiver is the one that was configured.
    ///
    /// # Errors
    /// There is no TLS.
    pub fn new() -> Result<Self, String> {
        let client = reqwest::Client::builder().timeout(PATIENCE).redirect(reqwest::redirect::Policy::none());
        client.build().map(Self).map_err(|error| error.to_string())
    }

    /// Tries once.
    ///
    /// # Errors
    /// Why it was not taken, for people: no connection, no answer in time, or a status that is no success.
    pub async fn post(&self, url: &str, secret: &Secret, delivery: Delivery<'_>) -> Result<(), String> {
        let timestamp = clock::wall().as_secs();
        let mut request = self
            .0
            .post(url)
            .header(CONTENT_TYPE, "application/json")
            .header("X-Antiphon-Delivery", delivery.id)
            .header("X-Antiphon-Timestamp", timestamp.to_string())
            .header("X-Antiphon-Signature", signature(secret.reveal(), timestamp, delivery.body))
            .body(delivery.body.to_owned());
        if let Some(trace) = delivery.trace {
            request = request.header(TRACEPARENT, trace);
        }
        let response = request.send().await.map_err(|error| error.to_string())?;
        match response.status() {
            status if status.is_success() => Ok(()),
            status => Err(format!("answered {status}")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// RFC 4231 has no case with a full stop in it; the expected value is that of `openssl dgst -sha256 -hmac`.
    #[test]
    fn a_delivery_is_signed_over_its_time_and_its_body() {
        let signed = signature("key", 1_700_000_000, "{\"id\":\"1\"}");
        assert_eq!(signed, "v1=9e040cb90cefc5a04ab9a9848a74e2ff0489b4d8837b38d54555cb67e4f8e76e");
        assert_ne!(signed, signature("key", 1_700_000_001, "{\"id\":\"1\"}"));
    }

    #[test]
    fn pauses_double_up_to_the_longest() {
        let second = Duration::from_secs(1);
        let pauses: Vec<u64> =
            [0, 1, 2, 3, 7, 8, u32::MAX].map(|tries| pause(tries, second, 100 * second).as_secs()).into();
        assert_eq!(pauses, [1, 1, 2, 4, 64, 100, 100]);
    }
}
