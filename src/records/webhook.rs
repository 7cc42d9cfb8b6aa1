//! Records of calls that have ended, sent to the configured URL: signed, tried again, never lost by a restart.

use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt as _;
use serde::Deserialize;
use tokio::sync::{Notify, watch};

use super::ledger::{Access, Ledger};
use super::store::Due;
use super::{RecordError, Webhook};
use crate::clock;
use crate::fault;
use crate::supervise::Part;
use crate::webhook::{Client, Delivery, pause};

/// The first pause after a delivery that failed; it doubles up to [`LONGEST`].
const FIRST: Duration = if cfg!(test) { Duration::from_millis(20) } else { Duration::from_secs(5) };
const LONGEST: Duration = Duration::from_secs(3_600);
/// Records that are delivered between two looks at the database.
const BATCH: u32 = 16;
/// How long to wait where the database tells nothing.
const IDLE: Duration = Duration::from_secs(600);

/// What delivering needs; see [`super::Records::deliveries`].
pub struct Deliveries {
    pub(super) hook: Webhook,
    pub(super) database: Access,
    /// A record is due.
    pub(super) due: Arc<Notify>,
    pub(super) part: Arc<Part>,
}

/// Delivers what is due until `stop` changes. One at a time and in order of time, so that a receiver that is slow gets
/// no more than it takes.
pub async fn deliver(deliveries: Deliveries, mut stop: watch::Receiver<bool>) {
    let Deliveries { hook, database, due, part } = deliveries;
    let client = match Client::new() {
        Ok(client) => client,
        Err(error) => return tracing::error!(%error, "[records] webhook: no HTTP client; nothing is delivered"),
    };
    loop {
        let pause = match AssertUnwindSafe(round(&client, &hook, &database)).catch_unwind().await {
            Ok(Ok(pause)) => pause,
            Ok(Err(error)) => {
                tracing::warn!(%error, "[records] webhook: the database tells nothing");
                IDLE
            }
            // What was not delivered still is due.
            Err(_) => {
                part.fell().rest().await;
                Duration::ZERO
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
            fault::point("deliveries", &hook.url);
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
                    ("failed", Some(clock::wall() + pause(tries, FIRST, LONGEST)))
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
    let trace = trace(&record.body);
    let delivery = Delivery { id: &record.id, body: &record.body, trace: trace.as_deref() };
    client.post(&hook.url, &hook.secret, delivery).await
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
