//! Calls out whose INVITE is under way, by Call-ID.
//!
//! # Why
//! The stack sends the ACK of a call out first and registers its dialog a moment later. A carrier that holds or refreshes
//! in that moment would be told 481 and end the call, so a request of such a call waits until its dialog is there.

use std::{
    collections::HashMap,
    sync::{Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use rsipstack::transaction::make_uuid_v4;
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;

/// How long a request waits at most (T1 of RFC 3261: then it would come again). A dialog needs microseconds; one that
/// rings takes this long to be told 481.
const LIMIT: Duration = Duration::from_millis(500);

/// The calls out that are being set up.
#[derive(Debug, Default)]
pub(super) struct Calling {
    /// Each is cancelled when its INVITE has ended.
    calls: Mutex<HashMap<String, CancellationToken>>,
}

/// One of them, until this is dropped.
pub(super) struct Attempt<'a> {
    calling: &'a Calling,
    call_id: String,
}

impl Calling {
    /// A call out begins.
    pub(super) fn begin(&self) -> Attempt<'_> {
        let call_id = make_uuid_v4();
        self.lock().insert(call_id.clone(), CancellationToken::new());
        Attempt { calling: self, call_id }
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
        let ended = self.lock().get(call_id).cloned();
        if let Some(ended) = ended {
            // Elapsed: it still rings, and is answered without its dialog.
            timeout(LIMIT, ended.cancelled()).await.ok();
        }
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<String, CancellationToken>> {
        self.calls.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Attempt<'_> {
    pub(super) fn call_id(&self) -> &str {
        &self.call_id
    }
}

impl Drop for Attempt<'_> {
    fn drop(&mut self) {
        if let Some(ended) = self.calling.lock().remove(&self.call_id) {
            ended.cancel();
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
        let attempt = calling.begin();
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
        let rings = calling.begin();
        timeout(60 * LIMIT, calling.settled(rings.call_id())).await.expect("in good time");
    }
}
