//! Calls by their dialogs, those that are answered and those that ring here: whose each is, and the way to its leg for a call that takes its place.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use rsipstack::{dialog::DialogId, sip::StatusCode};
use tokio::sync::mpsc;

use crate::media::sip::Signal;

/// Whose a call is: what its other side has proven to be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Party {
    /// A trunk, by its place in the configuration.
    Trunk(usize),
    /// One of `[sip] users`.
    Account(String),
    /// Nothing is proven.
    Stranger,
}

impl Party {
    /// Whether a call of `self` may take the place of one of `other`. `users`: `[sip] users` hand calls to one another.
    pub(super) fn may_replace(&self, other: &Party, users: bool) -> bool {
        match (self, other) {
            (Party::Stranger, _) | (_, Party::Stranger) => false,
            (Party::Account(_), Party::Account(_)) if users => true,
            (one, other) => one == other,
        }
    }
}

/// A call that is answered.
#[derive(Clone, Debug)]
pub(super) struct Answered {
    party: Party,
    /// To its leg. Weak: a leg learns from the end of this channel that its session is gone.
    signals: mpsc::WeakSender<Signal>,
}

/// The calls that are answered, by their dialogs.
#[derive(Clone, Debug, Default)]
pub(super) struct Up(Arc<Mutex<HashMap<DialogId, Answered>>>);

/// A call in [`Up`]; dropped, it is no more there.
pub(super) struct Entry {
    up: Up,
    id: DialogId,
}

impl Up {
    pub(super) fn enter(&self, id: DialogId, party: Party, signals: &mpsc::Sender<Signal>) -> Entry {
        self.lock().insert(id.clone(), Answered { party, signals: signals.downgrade() });
        Entry { up: self.clone(), id }
    }

    pub(super) fn get(&self, id: &DialogId) -> Option<Answered> {
        self.lock().get(id).cloned()
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<DialogId, Answered>> {
        // Nothing here panics while it holds it.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Entry {
    fn drop(&mut self) {
        self.up.lock().remove(&self.id);
    }
}

impl Answered {
    /// The way to its leg, while it has one.
    pub(super) fn signals(&self) -> Option<mpsc::Sender<Signal>> {
        self.signals.upgrade()
    }

    /// Whether `party` may have another call take its place. `users`: `[sip] users` hand calls to one another.
    ///
    /// # Errors
    /// 403: it is not its call.
    pub(super) fn allows(&self, party: &Party, users: bool) -> Result<(), StatusCode> {
        let may = party.may_replace(&self.party, users);
        if may { Ok(()) } else { Err(StatusCode::Forbidden) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_whose_call_it_is_may_replace_it() {
        let account = |name: &str| Party::Account(name.to_owned());
        let all = [Party::Trunk(0), Party::Trunk(1), account("a"), account("b"), Party::Stranger];
        for (n, one) in all.iter().enumerate() {
            for (m, other) in all.iter().enumerate() {
                let same = n == m && *one != Party::Stranger;
                assert_eq!(one.may_replace(other, false), same, "{one:?} {other:?}");
                let users = (2..4).contains(&n) && (2..4).contains(&m);
                assert_eq!(one.may_replace(other, true), same || users, "{one:?} {other:?}");
            }
        }
    }

    #[test]
    fn a_call_that_is_over_is_found_no_more_and_keeps_no_leg_waiting() {
        let (up, id) = (Up::default(), DialogId { call_id: "a".into(), local_tag: "1".into(), remote_tag: "2".into() });
        let (signals, mut leg) = mpsc::channel(1);
        let entry = up.enter(id.clone(), Party::Trunk(0), &signals);
        let answered = up.get(&id).expect("there");
        drop(signals);
        assert!(leg.try_recv().is_err_and(|error| error == mpsc::error::TryRecvError::Disconnected));
        assert!(answered.signals().is_none());
        drop(entry);
        assert!(up.get(&id).is_none());
    }
}
