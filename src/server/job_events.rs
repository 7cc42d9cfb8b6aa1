//! `GET /v1/jobs/{id}/events`: how a batch job gets on, as one stream, whichever gateways work on it; and the jobs of
//! `/v1/events`.
//!
//! # Why
//! A change is told by the job's name only, so the database is read for what it is. That costs more for a job of many items,
//! and so it is not done again before ten times as long as it took has passed: a stream is as fresh as its job is small. What
//! nobody told (a reason to stand still, a database that was away) is found by looking every now and then.

use std::collections::{BTreeMap, BTreeSet};
use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use axum::extract::{Path, State};
use axum::response::sse::{Event, KeepAlive, Sse};
use axum::routing::get;
use axum::{Extension, Router};
use futures_util::stream::{self, Stream};
use serde_json::{Value, json};
use tokio::sync::{Semaphore, mpsc};

use super::auth::Caller;
use super::error::ApiError;
use super::jobs::{on_batch, own};
use crate::batch::{BatchError, ChangesReader, Job, JobState};
use crate::clock;
use crate::gateway::Gateway;

/// How many may follow jobs at once.
const FOLLOWERS: usize = 256;
/// When another may have left.
const RETRY: Duration = Duration::from_secs(10);
/// Events that may wait for a follower.
const WAITING: usize = 64;
/// Shortest time between two looks at the database.
const REST: Duration = Duration::from_millis(200);
/// So many times as long as a look took it is not looked again.
const COSTS: u32 = 10;
/// Longest time between two looks.
const LOOK: Duration = Duration::from_secs(5);
/// How often `/v1/events` tells of jobs that have changed.
const GATHER: Duration = Duration::from_secs(1);

/// Room for followers.
#[derive(Clone)]
struct Followers(Arc<Semaphore>);

pub(super) fn router() -> Router<Gateway> {
    let followers = Followers(Arc::new(Semaphore::new(FOLLOWERS)));
    Router::new().route("/v1/jobs/{id}/events", get(follow)).layer(Extension(followers))
}

/// The job as it is, each item that has changed since, and the job whenever its state, what is finished of it or why it
/// stands still has changed. Ends when the job is over.
async fn follow(
    State(gateway): State<Gateway>,
    Extension(Followers(followers)): Extension<Followers>,
    caller: Caller,
    Path(id): Path<String>,
) -> Result<Sse<impl Stream<Item = Result<Event, Infallible>>>, ApiError> {
    let place = followers.try_acquire_owned();
    let place = place.map_err(|_| ApiError::unavailable(format!("{FOLLOWERS} follow jobs already"), RETRY))?;
    // Before the first look, so that nothing happens between them unheard.
    let changes = gateway.jobs.changes();
    let first = {
        let id = id.clone();
        on_batch(&gateway, move |batch| own(&batch, &caller, &id).and_then(|()| batch.job(&id))).await?
    };
    let (tell, events) = mpsc::channel(WAITING);
    tokio::spawn(async move {
        // A follower that has left ends it.
        let _ = tell_of(&gateway, &id, first, changes, &tell).await;
        drop(place);
    });
    let events = stream::unfold(events, |mut events| async move { Some((Ok(events.recv().await?), events)) });
    Ok(Sse::new(events).keep_alive(KeepAlive::default()))
}

/// `Err`: nobody listens any more.
async fn tell_of(
    gateway: &Gateway,
    id: &str,
    mut known: Job,
    mut changes: ChangesReader,
    tell: &mpsc::Sender<Event>,
) -> Result<(), mpsc::error::SendError<Event>> {
    // overflow: awaited, here and below; what changes meanwhile is told as it is then
    tell.send(event("job", &json!(known))).await?;
    let mut rest = REST;
    while !is_over(known.state) {
        let changed = async { while changes.next().await.is_some_and(|job| *job != *id) {} };
        tokio::select! {
            () = tell.closed() => return Ok(()),
            // Late is as good as told.
            _ = tokio::time::timeout(LOOK, changed) => {}
        }
        tokio::time::sleep(rest).await;
        let begun = clock::now();
        let wanted = id.to_owned();
        let jobs = gateway.jobs.clone();
        let looked = tokio::task::spawn_blocking(move || jobs.batch()?.job(&wanted)).await;
        rest = REST.max(clock::now().saturating_duration_since(begun) * COSTS);
        match looked {
            Ok(Ok(job)) => {
                for one in differences(&known, &job) {
                    tell.send(one).await?;
                }
                known = job;
            }
            // Forgotten: it was over, or somebody removed it.
            Ok(Err(BatchError::NotFound(_))) => return Ok(()),
            // The database is away, or another process has it: it is looked again.
            Ok(Err(_)) | Err(_) => {}
        }
    }
    Ok(())
}

/// What has changed, in order: items, then the job without them.
fn differences(before: &Job, now: &Job) -> Vec<Event> {
    let known: BTreeMap<u32, _> = before.results.iter().map(|item| (item.index, item)).collect();
    let changed = now.results.iter().filter(|item| known.get(&item.index) != Some(item));
    let mut events: Vec<Event> = changed.map(|item| event("item", &json!(item))).collect();
    if (before.state, before.finished, &before.reason) != (now.state, now.finished, &now.reason) {
        events.push(event("job", &brief(now)));
    }
    events
}

/// A job without its items.
fn brief(job: &Job) -> Value {
    let mut told = json!(job);
    if let Some(fields) = told.as_object_mut() {
        fields.remove("results");
    }
    told
}

fn is_over(state: JobState) -> bool {
    matches!(state, JobState::Done | JobState::Failed | JobState::Cancelled)
}

fn event(name: &str, data: &Value) -> Event {
    Event::default().event(name).json_data(data).expect("plain JSON")
}

/// Tells `tell` of all jobs that change, each once a second at most, until nobody listens.
pub(super) async fn gather(gateway: Gateway, tell: mpsc::Sender<Value>) {
    let mut changes = gateway.jobs.changes();
    loop {
        let mut changed = BTreeSet::new();
        tokio::select! {
            () = tell.closed() => return,
            job = changes.next() => changed.extend(job),
        }
        let until = clock::now() + GATHER;
        while let Ok(job) = tokio::time::timeout_at(until.into(), changes.next()).await {
            changed.extend(job);
        }
        if changed.is_empty() {
            continue;
        }
        // Only where jobs are open already: who listens opens no database.
        let Some(batch) = gateway.jobs.opened() else { continue };
        let Ok(Ok(jobs)) = tokio::task::spawn_blocking(move || batch.jobs(&changed)).await else { continue };
        for job in jobs {
            // overflow: awaited; changes wait meanwhile, and where those fall behind the next one is told
            if tell.send(brief(&job)).await.is_err() {
                return;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::batch::ItemResult;

    #[test]
    fn items_that_have_changed_are_told_before_their_job() {
        let item = |index, status, duration_ms| ItemResult { index, status, duration_ms, error: None };
        let job = |finished, results| Job {
            id: "j".into(),
            state: JobState::Running,
            total: 3,
            finished,
            eta_seconds: None,
            reason: None,
            results,
        };
        let queued = [0, 1, 2].map(|index| item(index, JobState::Queued, 0)).to_vec();
        let mut some = queued.clone();
        some[1] = item(1, JobState::Done, 1_200);
        let told =
            |before: &Job, now: &Job| differences(before, now).iter().map(|e| format!("{e:?}")).collect::<Vec<_>>();
        let events = told(&job(0, queued.clone()), &job(1, some.clone()));
        assert_eq!(events.len(), 2, "{events:?}");
        assert!(events[0].contains("event: item") && events[0].contains("1200"), "{events:?}");
        assert!(events[1].contains("event: job") && !events[1].contains("results"), "{events:?}");
        assert_eq!(told(&job(1, some.clone()), &job(1, some)), [""; 0]);
    }
}
