//! Where a transfer stands that the agent has asked for.

use std::time::{Duration, Instant};

use crate::call::CallEvent;

/// How long the peer may take to reach the party it was sent to: longer than telephones ring.
const LIMIT: Duration = Duration::from_secs(180);
/// Beyond the agent's own limit, which the signalling watches and knows the reason of.
const SLACK: Duration = Duration::from_secs(10);

/// One transfer at a time.
#[derive(Debug, Default)]
pub(super) struct Transfer(Option<State>);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// The peer has not answered. It may take so long then.
    Asked { limit: Duration },
    /// The peer has taken it on; it ends by what the peer tells, by its hang-up, or at this instant without a word.
    Accepted { until: Instant },
}

impl Transfer {
    /// The agent asks for one.
    ///
    /// # Errors
    /// Another is under way.
    pub(super) fn ask(&mut self, limit: Option<Duration>) -> Result<(), String> {
        if self.0.is_some() {
            return Err("another transfer is under way".into());
        }
        self.0 = Some(State::Asked { limit: limit.map_or(LIMIT, |limit| limit + SLACK) });
        Ok(())
    }

    /// The peer has taken it on or refused it; gives what is told of it.
    pub(super) fn answered(&mut self, now: Instant, outcome: Result<(), String>) -> CallEvent {
        match outcome {
            Ok(()) => {
                let limit = match self.0 {
                    Some(State::Asked { limit }) => limit,
                    Some(State::Accepted { .. }) | None => LIMIT,
                };
                self.0 = Some(State::Accepted { until: now + limit });
                CallEvent::TransferAccepted
            }
            Err(reason) => {
                self.0 = None;
                CallEvent::Transferred(Err(reason))
            }
        }
    }

    /// The peer talks to the other party now (`Ok`), or still to us; gives what is told of it.
    pub(super) fn ended(&mut self, outcome: Result<(), String>) -> CallEvent {
        self.0 = None;
        match outcome {
            Ok(()) => CallEvent::Transferred(Ok(())),
            Err(reason) => CallEvent::TransferFailed(reason),
        }
    }

    /// Whether a hang-up of the peer means that it has gone where it was sent.
    pub(super) fn is_accepted(&self) -> bool {
        matches!(self.0, Some(State::Accepted { .. }))
    }

    /// When the peer has taken too long to tell how it went.
    pub(super) fn deadline(&self) -> Option<Instant> {
        match self.0 {
            Some(State::Accepted { until }) => Some(until),
            Some(State::Asked { .. }) | None => None,
        }
    }

    /// Whether the peer has taken too long.
    pub(super) fn is_overdue(&self, now: Instant) -> bool {
        self.deadline().is_some_and(|until| until <= now)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::clock;

    #[test]
    fn one_transfer_at_a_time_until_its_end() {
        let now = clock::now();
        let mut transfer = Transfer::default();
        transfer.ask(None).expect("the first");
        assert!(transfer.ask(None).is_err());
        assert!(!transfer.is_accepted(), "a hang-up before the answer is a hang-up");
        assert_eq!(transfer.deadline(), None);
        assert_eq!(transfer.answered(now, Ok(())), CallEvent::TransferAccepted);
        assert!(transfer.is_accepted());
        assert!(transfer.ask(None).is_err());
        assert!(!transfer.is_overdue(now + LIMIT - Duration::from_nanos(1)));
        assert!(transfer.is_overdue(now + LIMIT));
        assert_eq!(transfer.ended(Err("busy".into())), CallEvent::TransferFailed("busy".into()));
        transfer.ask(None).expect("another after its end");
        assert_eq!(transfer.answered(now, Err("no".into())), CallEvent::Transferred(Err("no".into())));
        transfer.ask(Some(Duration::from_secs(20))).expect("another after a refusal");
        assert_eq!(transfer.answered(now, Ok(())), CallEvent::TransferAccepted);
        assert_eq!(transfer.deadline(), Some(now + Duration::from_secs(20) + SLACK), "the agent's own limit");
        assert_eq!(transfer.ended(Ok(())), CallEvent::Transferred(Ok(())));
    }
}
