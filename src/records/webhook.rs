//! Records of calls that have ended, sent to the configured URL: signed, tried again, never lost by a restart.

use std::sync::Arc;
use std::time::Duration;

use reqwest::Client;
use reqwest::header::CONTENT_TYPE;
use serde::Deserialize;
use tokio::sync::{Notify, watch};

use super::ledger::{Access, Ledger};
use super::store::Due;
use super::{RecordError, Webhook};
use crate::clock;
use crate::telemetry::context::TRACEPARENT;

/// Longest time for one delivery.
const PATIENCE: Duration = Duration::from_secs(10);
/// The first pause after a delivery that failed; it doubles up to [`LONGEST`].
const FIRST: Duration = if cfg!(test) { Duration::from_millis(20) } else { Duration::from_secs(5) };
const LONGEST: Duration = Duration::from_secs(3_600);
/// Records that are delivered between two looks at the database.
const BATCH: u32 = 16;
/// How long to wait where the database tells nothing.
const IDLE: Duration = Duration::from_secs(600);

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

/// Delivers what is due until `stop` changes. One at a time and in order of time, so that a receiver that is slow gets
/// no more than it takes.
pub async fn deliver((hook, database, due): (Webhook, Access, Arc<Notify>), mut stop: watch::Receiver<bool>) {
    let client = match Client::builder().timeout(PATIENCE).redirect(reqwest::redirect::Policy::none()).build() {
        Ok(client) => client,
        Err(error) => return tracing::error!(%error, "[records] webhook: no HTTP client; nothing is delivered"),
    };
    loop {
        let pause = match round(&client, &hook, &database).await {
            Ok(pause) => pause,
            Err(error) => {
                tracing::warn!(%error, "[records] webhook: the database tells nothing");
                IDLE
            }
        };
        tokio::select! {
            _ = stop.changed() => return,
            () = due.notified() => {}
            () = tokio::time::sleep(pause) => {}
        }
    }
}

/// Delivers what is due now; how long until something is due again.
async fn round(client: &Client, hook: &Webhook, database: &Access) -> Result<Duration, RecordError> {
    loop {
        let due = on_store(database, |store| store.due(clock::wall(), BATCH)).await?;
        let Some(due) = due else { return Ok(IDLE) };
        if due.is_empty() {
            let next = on_store(database, |store| store.next_due()).await?.flatten();
            // At least a moment: a clock that was set back must not make this loop spin.
            return Ok(next.map_or(IDLE, |at| at.saturating_sub(clock::wall()).clamp(FIRST, IDLE)));
        }
        for record in due {
            let outcome = send(client, hook, &record).await;
            let tries = record.tries + 1;
            let (label, again) = match outcome {
                Ok(()) => ("delivered", None),
                Err(error) if tries >= hook.tries => {
                    tracing::warn!(record = record.id, tries, %error, "[records] webhook: a record was not delivered");
                    ("given_up", None)
                }
                Err(error) => {
                    tracing::info!(record = record.id, tries, %error, "[records] webhook: tried again later");
                    let pause = (FIRST * 2u32.saturating_pow(tries.min(16) - 1)).min(LONGEST);
                    ("failed", Some(clock::wall() + pause))
                }
            };
            metrics::counter!("antiphon_webhooks_total", "outcome" => label).increment(1);
            on_store(database, move |store| store.tried(record.seq, again)).await?;
        }
    }
}

/// What the receiver's spans are part of: the call that the record is of.
fn trace(body: &str) -> Option<String> {
    #[derive(Deserialize)]
    struct Traced {
        traceparent: Option<String>,
    }
    serde_json::from_str::<Traced>(body).ok()?.traceparent
}

async fn send(client: &Client, hook: &Webhook, record: &Due) -> Result<(), String> {
    let timestamp = clock::wall().as_secs();
    let mut request = client
        .post(&hook.url)
        .header(CONTENT_TYPE, "application/json")
        .header("X-Antiphon-Delivery", &record.id)
        .header("X-Antiphon-Timestamp", timestamp.to_string())
        .header("X-Antiphon-Signature", signature(hook.secret.reveal(), timestamp, &record.body))
        .body(record.body.clone());
    if let Some(trace) = trace(&record.body) {
        request = request.header(TRACEPARENT, trace);
    }
    let response = request.send().await.map_err(|error| error.to_string())?;
    match response.status() {
        status if status.is_success() => Ok(()),
        status => Err(format!("answered {status}")),
    }
}

/// Runs `work` on the database, off the runtime's workers; `None`: there is none yet.
async fn on_store<T: Send + 'static>(
    database: &Access,
    work: impl FnOnce(&mut dyn Ledger) -> Result<T, RecordError> + Send + 'static,
) -> Result<Option<T>, RecordError> {
    let database = database.clone();
    let done = tokio::task::spawn_blocking(move || database.on(work)).await;
    done.unwrap_or_else(|error| Err(RecordError::Thread(std::io::Error::other(error))))
}
