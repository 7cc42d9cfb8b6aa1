//! All live calls: placement, the limit, lookup and draining.
//!
//! A drain goes in two steps. First [`Calls::leave`]: whoever asks is told that no calls are taken, and calls still are, so that
//! balancers and registrars send theirs elsewhere before the first is refused. Then [`Calls::drain`] refuses.

use std::collections::HashMap;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use dashmap::DashMap;
use tokio::sync::{Notify, broadcast, mpsc, watch};

use super::bridge::BridgeRequest;
use super::handle::{CallHandle, CallMeta};
use super::info::{CallInfo, Shared};
use super::settings::CallConfig;
use super::speech::Speech;
use super::task::{CallTask, Told};
use super::{CallEvent, CallId, Dialling, EndReason, Witness};
use crate::clock;
use crate::hear::Ears;
use crate::media::leg::MediaLeg;
use crate::media::shard::{ShardError, Shards};
use crate::seats::{Seat, Seats};

/// Commands that may wait for a call's task.
const COMMANDS: usize = 256;
/// Bridges that may wait to be dialled.
const BRIDGES: usize = 64;
/// How often a drain looks which calls are still joined with a human.
const LOOK: Duration = Duration::from_millis(500);
/// Events of all calls that a slow listener may be behind before it loses the oldest.
const ALL_EVENTS: usize = 4_096;

/// All live calls of a gateway. Cheap to clone.
#[derive(Clone)]
pub struct Calls(Arc<Inner>);

struct Inner {
    config: Arc<CallConfig>,
    speech: Arc<dyn Speech>,
    ears: Option<Ears>,
    shards: Shards,
    live: DashMap<CallId, CallHandle>,
    /// Being answered: the peer may know the id before the call is live.
    arriving: DashMap<CallId, ()>,
    /// One of them is live, or will not be.
    arrived: Notify,
    capacity: Seats,
    door: watch::Sender<Door>,
    events: broadcast::Sender<(CallId, CallEvent)>,
    /// Set before the first call, if at all.
    witness: OnceLock<Arc<dyn Witness>>,
    /// Who dials for calls that ask for a bridge. Set as above.
    bridges: OnceLock<mpsc::Sender<(CallId, BridgeRequest)>>,
}

/// Whether new calls are taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Door {
    /// Yes. The number tells one drain from the next.
    Open(u64),
    /// Yes, until then at least, though whoever asks is told no.
    Leaving { number: u64, until: Instant, for_good: bool },
    /// No, until someone resumes.
    Draining(u64),
    /// No, for good.
    Closed,
}

/// How long a drain lets calls go on, by what they are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Grace {
    /// Calls of an agent: what is queued on them is said.
    pub turns: Duration,
    /// Calls that are joined with a human: until one of the two hangs up. Then the call ends as one of an agent does.
    pub bridged: Duration,
}

impl From<Duration> for Grace {
    /// The same for all.
    fn from(grace: Duration) -> Grace {
        Grace { turns: grace, bridged: grace }
    }
}

/// Why a call could not be started.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum StartError {
    /// As many calls as configured are live.
    #[error("all {0} calls of [call] max_calls are in progress")]
    Full(usize),
    /// The gateway is going down.
    #[error("the gateway is draining and takes no new calls")]
    Draining,
    /// A call with this id is live.
    #[error("a call with this id exists already")]
    Duplicate,
    /// The media threads cannot take it.
    #[error(transparent)]
    Shard(#[from] ShardError),
}

/// A call that is being answered; see [`Calls::announce`].
pub struct Arriving {
    calls: Calls,
    id: CallId,
}

impl Drop for Arriving {
    fn drop(&mut self) {
        self.calls.0.arriving.remove(&self.id);
        self.calls.0.arrived.notify_waiters();
    }
}

impl Calls {
    /// Starts the media threads; there are no calls yet.
    ///
    /// # Errors
    /// The operating system refuses a thread.
    pub fn new(config: CallConfig, speech: Arc<dyn Speech>) -> std::io::Result<Self> {
        Self::with_ears(config, speech, None)
    }

    /// As [`Calls::new`], with what recognises callers, if anything does.
    ///
    /// # Errors
    /// As there.
    pub fn with_ears(config: CallConfig, speech: Arc<dyn Speech>, ears: Option<Ears>) -> std::io::Result<Self> {
        let shards = Shards::start(config.shards)?;
        Ok(Self(Arc::new(Inner {
            capacity: Seats::new(config.max_calls),
            config: Arc::new(config),
            speech,
            ears,
            shards,
            live: DashMap::new(),
            arriving: DashMap::new(),
            arrived: Notify::new(),
            door: watch::Sender::new(Door::Open(0)),
            events: broadcast::channel(ALL_EVENTS).0,
            witness: OnceLock::new(),
            bridges: OnceLock::new(),
        })))
    }

    /// Starts a call on `leg`. The first listener of the handle gets every event from the beginning.
    ///
    /// # Errors
    /// As many calls as configured are live, the gateway drains, or the id is taken. The leg is dropped: answer the peer before, or keep what is
    /// needed to refuse it.
    pub fn start<L: MediaLeg>(&self, meta: CallMeta, leg: L) -> Result<CallHandle, StartError> {
        self.start_with(meta, leg, self.0.speech.clone())
    }

    /// As [`Calls::start`], with what speaks on this call.
    ///
    /// # Errors
    /// As there.
    pub fn start_with<L: MediaLeg>(
        &self,
        meta: CallMeta,
        leg: L,
        speech: Arc<dyn Speech>,
    ) -> Result<CallHandle, StartError> {
        let inner = &self.0;
        if self.is_draining() {
            return Err(StartError::Draining);
        }
        let permit = inner.capacity.take().ok_or_else(|| StartError::Full(inner.capacity.most()))?;
        let (commands, inbox) = mpsc::channel(COMMANDS);
        let (shared, tellers) =
            Shared::new(meta, inner.config.clone(), leg.kind(), leg.format().codec, clock::now(), clock::wall());
        // It is set here only.
        leg.trunk().into_iter().for_each(|trunk| drop(shared.trunk.set(trunk.clone())));
        let shared = Arc::new(shared);
        let handle = CallHandle { shared: shared.clone(), commands, speech: Arc::downgrade(&speech) };
        let id = handle.id().clone();
        match inner.live.entry(id.clone()) {
            dashmap::Entry::Occupied(_) => return Err(StartError::Duplicate),
            dashmap::Entry::Vacant(entry) => entry.insert(handle.clone()),
        };
        // Made here and moved, so that a call that never starts, panics or ends leaves the registry alike.
        let mut listed = Listed { calls: self.clone(), shared: shared.clone(), permit: Some(permit), over: None };
        let told = Told {
            all: inner.events.clone(),
            witness: inner.witness.get().cloned(),
            bridges: inner.bridges.get().cloned(),
        };
        if let Some(witness) = &told.witness {
            witness.begun(&handle.info());
        }
        let voice_and_ears = (speech, inner.ears.clone());
        inner.shards.spawn(move || async move {
            let mut task = CallTask::new(shared, leg, voice_and_ears, inbox, tellers, told);
            listed.over = Some(task.run().await);
            // Before the task's ends of what it tells: who listens too late is told why it ended.
            drop(listed);
        })?;
        // Its announcement may go on: a call that is heard while it rings.
        inner.arrived.notify_waiters();
        // Draining may have begun meanwhile and not have seen this call.
        if self.is_draining() {
            handle.hang_up(EndReason::Drained);
        }
        Ok(handle)
    }

    /// Whether a call could start now, to be asked before a telephone rings.
    ///
    /// # Errors
    /// The gateway drains, or as many calls as configured are live.
    pub fn has_room(&self) -> Result<(), StartError> {
        if self.is_draining() {
            return Err(StartError::Draining);
        }
        match self.0.capacity.has_room() {
            false => Err(StartError::Full(self.0.capacity.most())),
            true => Ok(()),
        }
    }

    /// Calls that may be live at once.
    pub fn most(&self) -> usize {
        self.0.capacity.most()
    }

    /// Lets so many calls be live at once; none of those that are ends by it.
    pub fn limit(&self, most: usize) {
        self.0.capacity.set(most);
    }

    /// Says that the peer is about to be told `id`, until the guard is dropped: [`Calls::find`] waits for the call
    /// meanwhile. Drop it when the call was started or will not be.
    pub fn announce(&self, id: CallId) -> Arriving {
        self.0.arriving.insert(id.clone(), ());
        Arriving { calls: self.clone(), id }
    }

    /// The live call with this id, waited for where it was announced. Cancel safe.
    pub async fn find(&self, id: &CallId) -> Option<CallHandle> {
        loop {
            let mut arrived = std::pin::pin!(self.0.arrived.notified());
            // Listening before looking, so that an arrival in between is not missed.
            arrived.as_mut().enable();
            // Arriving first: what ends its announcement between the two looks is live by the second.
            let arriving = self.0.arriving.contains_key(id);
            let call = self.get(id);
            if call.is_some() || !arriving {
                return call;
            }
            arrived.await;
        }
    }

    /// The live call with this id.
    pub fn get(&self, id: &CallId) -> Option<CallHandle> {
        self.0.live.get(id).map(|entry| entry.value().clone())
    }

    /// Snapshots of all live calls, oldest first.
    pub fn list(&self) -> Vec<CallInfo> {
        let mut calls = self.0.live.iter().map(|entry| entry.value().info()).collect::<Vec<_>>();
        calls.sort_by(|a, b| (a.started_ms, &a.meta.id).cmp(&(b.started_ms, &b.meta.id)));
        calls
    }

    /// How many calls are live.
    pub fn count(&self) -> usize {
        self.0.live.len()
    }

    /// Whether new calls are refused.
    pub fn is_draining(&self) -> bool {
        matches!(*self.0.door.borrow(), Door::Draining(_) | Door::Closed)
    }

    /// Whether others had better send no calls here: they are refused, or will be in a moment.
    pub fn is_leaving(&self) -> bool {
        !matches!(*self.0.door.borrow(), Door::Open(_))
    }

    /// Settings of all calls; [`Calls::most`] is how many they are now.
    pub fn config(&self) -> &Arc<CallConfig> {
        &self.0.config
    }

    /// The media threads, for work that belongs on the threads of the calls.
    pub fn shards(&self) -> &Shards {
        &self.0.shards
    }

    /// Has `witness` told of every call from now on. There is one: a second is ignored.
    pub fn observe(&self, witness: Arc<dyn Witness>) {
        let _ = self.0.witness.set(witness);
    }

    /// What calls ask for from now on that want to be joined with a human. There is one taker: `None` for a second.
    pub fn bridges(&self) -> Option<mpsc::Receiver<(CallId, BridgeRequest)>> {
        let (ask, asked) = mpsc::channel(BRIDGES);
        self.0.bridges.set(ask).ok().map(|()| asked)
    }

    /// Tells of an outbound call that is not live yet.
    pub fn dialling(&self, meta: &CallMeta, trunk: Option<&str>, state: Dialling) {
        tracing::debug!(call = %meta.id, ?state, "call");
        if let Some(witness) = self.0.witness.get() {
            witness.dialling(meta, trunk, &state);
        }
        // overflow: drops the oldest; the listener is told how many. No listener is fine, too.
        let _ = self.0.events.send((meta.id.clone(), CallEvent::Dialling(state)));
    }

    /// Tells of a call that is not live, or never was.
    pub fn tell(&self, meta: &CallMeta, event: CallEvent) {
        tracing::debug!(call = %meta.id, ?event, "call");
        if let Some(witness) = self.0.witness.get() {
            witness.happened(meta, &event);
        }
        // overflow: as above
        let _ = self.0.events.send((meta.id.clone(), event));
    }

    /// Events of all calls, for monitoring. A listener that falls behind loses the oldest.
    pub fn events(&self) -> broadcast::Receiver<(CallId, CallEvent)> {
        self.0.events.subscribe()
    }

    /// Says to whoever asks that no calls are taken, and takes them for `notice` all the same; waits for that time. One that
    /// another drain has begun is not begun anew. `for_good`: nobody can take it back. `false`: calls are taken again meanwhile.
    pub async fn leave(&self, notice: Duration, for_good: bool) -> bool {
        let begins = clock::now() + notice;
        self.0.door.send_modify(|door| match door {
            Door::Open(number) => *door = Door::Leaving { number: *number, until: begins, for_good },
            Door::Leaving { for_good: told, .. } => *told |= for_good,
            Door::Draining(_) | Door::Closed => {}
        });
        let mut door = self.0.door.subscribe();
        let Door::Leaving { number, until, .. } = *door.borrow_and_update() else { return true };
        let over = |door: &Door| !matches!(door, Door::Leaving { number: now, .. } if *now == number);
        tokio::select! {
            () = tokio::time::sleep(until.saturating_duration_since(clock::now())) => true,
            // Resumed, or drained by somebody who waits less.
            door = door.wait_for(over) => door.is_ok_and(|door| !matches!(*door, Door::Open(_))),
        }
    }

    /// Refuses new calls, lets what is queued on the live ones be said, and ends them; those that still live
    /// after `grace` are ended at once. Returns when none is left, or [`Calls::resume`] opens again meanwhile, and
    /// tells how many were cut off.
    pub async fn drain(&self, grace: impl Into<Grace>) -> usize {
        self.0.door.send_modify(|door| {
            if let Door::Open(number) | Door::Leaving { number, .. } = *door {
                *door = Door::Draining(number);
            }
        });
        self.emptied(grace.into()).await
    }

    /// As [`Calls::drain`], for good: nothing opens again.
    pub async fn close(&self, grace: impl Into<Grace>) -> usize {
        self.0.door.send_replace(Door::Closed);
        self.emptied(grace.into()).await
    }

    /// Takes new calls again after a drain. Calls that were told to finish still end. `false` after
    /// [`Calls::close`], and when that is to come.
    pub fn resume(&self) -> bool {
        self.0.door.send_if_modified(|door| {
            let (Door::Leaving { number, for_good: false, .. } | Door::Draining(number)) = *door else { return false };
            *door = Door::Open(number + 1);
            true
        });
        matches!(*self.0.door.borrow(), Door::Open(_))
    }

    /// Ends every call, and waits for that while none can be opened.
    async fn emptied(&self, grace: Grace) -> usize {
        let mut door = self.0.door.subscribe();
        let mine = *door.borrow();
        let handles = || self.0.live.iter().map(|entry| entry.value().clone()).collect::<Vec<_>>();
        for handle in handles() {
            if handle.finish(EndReason::Drained).is_err() {
                handle.hang_up(EndReason::Drained);
            }
        }
        let (begun, mut late) = (clock::now(), Vec::new());
        // When a call was last seen joined with a human.
        let mut joined: HashMap<CallId, Instant> = HashMap::new();
        loop {
            let now = clock::now();
            let mut next = begun + grace.turns.max(grace.bridged);
            for handle in handles() {
                if handle.is_bridged() {
                    joined.insert(handle.id().clone(), now);
                }
                let ends = match joined.get(handle.id()) {
                    Some(seen) => (begun + grace.bridged).min(*seen + grace.turns).max(begun + grace.turns),
                    None => begun + grace.turns,
                };
                if ends <= now {
                    handle.hang_up(EndReason::Drained);
                    late.push(handle);
                } else {
                    next = next.min(ends);
                }
            }
            if next <= now {
                break;
            }
            let all_ended = async {
                for handle in handles() {
                    handle.ended().await;
                }
            };
            let wait = (next - now).min(LOOK);
            tokio::select! {
                ended = tokio::time::timeout(wait, all_ended) => if ended.is_ok() {
                    break;
                },
                // Opened meanwhile, or closed for good: then that one waits.
                _ = door.wait_for(|door| *door != mine) => return 0,
            }
        }
        for handle in &late {
            handle.ended().await;
        }
        late.sort_by(|a, b| a.id().cmp(b.id()));
        late.dedup_by(|a, b| a.id() == b.id());
        late.len()
    }

    /// Joins the media threads; drain first. Blocks.
    pub fn shutdown(&self) {
        self.0.shards.shutdown();
    }
}

impl std::fmt::Debug for Calls {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Calls").field("live", &self.count()).finish_non_exhaustive()
    }
}

/// A call's entry in the registry; dropping it removes the entry and makes sure that the call counts as over.
struct Listed {
    calls: Calls,
    shared: Arc<Shared>,
    permit: Option<Seat>,
    /// Why it ended, and how long it had lasted.
    over: Option<(EndReason, Duration)>,
}

impl Drop for Listed {
    fn drop(&mut self) {
        self.calls.0.live.remove(&self.shared.meta.id);
        drop(self.permit.take());
        // Who hears of the end finds the call gone and room for another. Only a panic or a start that failed has no reason.
        let (reason, lasted) = self.over.unwrap_or((EndReason::Failed, clock::now() - self.shared.started));
        self.shared.set_ended(reason, lasted);
        if let Some(witness) = self.calls.0.witness.get() {
            witness.ended(&self.shared.info());
        }
    }
}

#[cfg(test)]
mod tests;
