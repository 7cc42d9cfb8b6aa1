//! Calls out whose INVITE is under way, by Call-ID: the way to each for requests of its called side, and for calls that take
//! its place.
//!
//! # Why
//! The stack sends the ACK of a call out first and registers its dialog a moment later. A carrier that holds or refreshes
//! in that moment would be told 481 and end the call, so a request of such a call waits until its dialog is there.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use rsipstack::{
    dialog::DialogId,
    sip::{Request, StatusCode},
    transaction::make_uuid_v4,
};
use tokio::{
    sync::{mpsc, oneshot},
    time::timeout,
};
use tokio_util::sync::CancellationToken;

use super::{body::Reply, up::Party};
use crate::media::sip::SipLeg;

/// How long a request waits for the dialog at most, well below the time after which it would come again (T1 of RFC 3261). A
/// dialog needs microseconds.
const LIMIT: Duration = Duration::from_millis(200);
/// Requests of one call that wait.
const WAITING: usize = 8;
/// Telephones that one call may ring at.
const MOST: usize = 32;

/// The calls out that are being set up. Cheap to clone.
#[derive(Clone, Debug, Default)]
pub(super) struct Calling(Arc<Mutex<HashMap<String, Entry>>>);

#[derive(Debug)]
struct Entry {
    /// Cancelled when its INVITE has ended.
    ended: CancellationToken,
    party: Party,
    asked: mpsc::Sender<Asked>,
    /// The dialogs of the telephones that ring.
    rings: Vec<DialogId>,
}

/// What reaches a call out before its answer.
#[derive(Debug)]
pub(super) enum Asked {
    /// A request of the called side, and where its answer goes.
    Request(Box<Request>, oneshot::Sender<Reply>),
    /// Another call has taken its place.
    Replaced(Replacement),
}

/// A call that has taken the place of one that rang.
#[derive(Debug)]
pub(super) struct Replacement {
    pub(super) leg: Box<SipLeg>,
    pub(super) id: DialogId,
    /// Whom it is with.
    pub(super) with: String,
}

/// A call out that rings.
#[derive(Clone, Debug)]
pub(super) struct Rings {
    party: Party,
    asked: mpsc::Sender<Asked>,
}

/// One of the calls, until this is dropped.
pub(super) struct Attempt {
    calling: Calling,
    call_id: String,
    asked: mpsc::Receiver<Asked>,
}

impl Calling {
    /// A call out to `party` begins.
    pub(super) fn begin(&self, party: Party) -> Attempt {
        let call_id = make_uuid_v4();
        let (sender, asked) = mpsc::channel(WAITING);
        let entry = Entry { ended: CancellationToken::new(), party, asked: sender, rings: Vec::new() };
        self.lock().insert(call_id.clone(), entry);
        Attempt { calling: self.clone(), call_id, asked }
    }

    /// Whether the call is being set up.
    pub(super) fn has(&self, call_id: &str) -> bool {
        self.lock().contains_key(call_id)
    }

    /// Every Call-ID.
    pub(super) fn ids(&self) -> Vec<String> {
        self.lock().keys().cloned().collect()
    }

    /// Waits until the call has its dialog or has failed, for [`LIMIT`] at most.
    pub(super) async fn settled(&self, call_id: &str) {
        let ended = self.lock().get(call_id).map(|entry| entry.ended.clone());
        if let Some(ended) = ended {
            // Elapsed: it still rings.
            timeout(LIMIT, ended.cancelled()).await.ok();
        }
    }

    /// The call that rings with this dialog.
    pub(super) fn rings(&self, id: &DialogId) -> Option<Rings> {
        let calls = self.lock();
        let entry = calls.get(&id.call_id).filter(|entry| entry.rings.contains(id))?;
        Some(Rings { party: entry.party.clone(), asked: entry.asked.clone() })
    }

    /// Asks the call that rings with this dialog; `None`: there is none, or no more.
    pub(super) async fn ask(&self, id: &DialogId, request: &Request) -> Option<Reply> {
        let rings = self.rings(id)?;
        let (sender, answer) = oneshot::channel();
        // overflow: refused: as if there were none
        rings.asked.try_send(Asked::Request(Box::new(request.clone()), sender)).ok()?;
        drop(rings);
        answer.await.ok()
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<String, Entry>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Rings {
    /// Whether a call of `party` may take its place. `users`: `[sip] users` hand calls to one another.
    ///
    /// # Errors
    /// 403: it is not its call.
    pub(super) fn allows(&self, party: &Party, users: bool) -> Result<(), StatusCode> {
        let may = party.may_replace(&self.party, users);
        if may { Ok(()) } else { Err(StatusCode::Forbidden) }
    }

    /// Another call takes its place; where it rings no longer, that one ends.
    pub(super) async fn replace(self, replacement: Replacement) {
        // overflow: awaited: who sets up the call reads this first
        self.asked.send(Asked::Replaced(replacement)).await.ok();
    }
}

impl Attempt {
    pub(super) fn call_id(&self) -> &str {
        &self.call_id
    }

    /// A telephone rings, with this dialog.
    pub(super) fn rings(&self, id: DialogId) {
        let mut calls = self.calling.lock();
        let Some(entry) = calls.get_mut(&self.call_id) else { return };
        if !entry.rings.contains(&id) && entry.rings.len() < MOST && !id.remote_tag.is_empty() {
            entry.rings.push(id);
        }
    }

    /// What reaches the call next. Cancel safe.
    pub(super) async fn asked(&mut self) -> Asked {
        match self.asked.recv().await {
            Some(asked) => asked,
            // Its sender is in the table for as long as this lives.
            None => std::future::pending().await,
        }
    }
}

impl Drop for Attempt {
    fn drop(&mut self) {
        if let Some(entry) = self.calling.lock().remove(&self.call_id) {
            entry.ended.cancel();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{
        pin::pin,
        task::{Context, Waker},
    };

    use super::*;

    #[tokio::test]
    async fn a_request_waits_for_the_end_of_its_invite_and_no_longer() {
        let calling = Calling::default();
        let attempt = calling.begin(Party::Stranger);
        let call_id = attempt.call_id().to_owned();
        assert!(calling.has(&call_id) && calling.ids() == [call_id.clone()]);
        let mut context = Context::from_waker(Waker::noop());
        let mut waits = pin!(calling.settled(&call_id));
        assert!(waits.as_mut().poll(&mut context).is_pending());
        drop(attempt);
        assert!(waits.as_mut().poll(&mut context).is_ready());
        assert!(!calling.has(&call_id) && calling.ids().is_empty());
        // Of a call that is not being set up.
        assert!(pin!(calling.settled(&call_id)).poll(&mut context).is_ready());
        // One that rings is waited for, and not for ever.
        let rings = calling.begin(Party::Stranger);
        timeout(60 * LIMIT, calling.settled(rings.call_id())).await.expect("in good time");
    }
}
