//! Why speech stands still: one of both sides holds, a barge-in waits for the agent's decision, or it is not known yet who
//! answered. Which turns a caller may interrupt is asked in `speaking.rs`, what words mean in `hearing.rs`.

use std::time::{Duration, Instant};

use crate::call::settings;
use crate::call::{BargeInOutcome, Cause, Interruptible, TurnId};

/// How long words of a caller who may be interrupting are waited for: the pause behind them, and a slow recogniser.
const WORDS: Duration = Duration::from_millis(2_500);

/// The reasons for which speech is paused.
#[derive(Debug, Default)]
pub(super) struct Pause {
    /// We hold the peer.
    held: bool,
    /// The peer holds us.
    peer_held: bool,
    /// Nothing is said before it is known who answered.
    unanswered: bool,
    pending: Option<Pending>,
}

/// The caller may be barging in; speech is silent until the agent has decided.
#[derive(Clone, Debug)]
struct Pending {
    turn: TurnId,
    cause: Cause,
    until: Instant,
    /// The caller's words decide, too.
    by_words: bool,
}

/// What follows from something that the caller did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Reaction {
    /// Speech goes on.
    None,
    /// It is cut off now.
    Interrupt,
    /// It pauses, and the agent has this long to decide.
    Ask(Duration),
}

/// A barge-in that was decided.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Decided {
    /// The turn that was sounding.
    pub(super) turn: TurnId,
    /// What the caller did, where speech is cut off for it.
    pub(super) interrupts: Option<Cause>,
}

impl Pause {
    /// Whether speech stands still.
    pub(super) fn is_on(&self) -> bool {
        self.is_held() || self.unanswered || self.pending.is_some()
    }

    /// Whether one of both sides holds.
    pub(super) fn is_held(&self) -> bool {
        self.held || self.peer_held
    }

    /// Whether it is waited for who answered.
    pub(super) fn is_unanswered(&self) -> bool {
        self.unanswered
    }

    /// Waits for who answered (`true`), or no longer; `false` when that is no change.
    pub(super) fn await_answer(&mut self, waits: bool) -> bool {
        std::mem::replace(&mut self.unanswered, waits) != waits
    }

    /// We hold (`true`) or resume; `false` when that is no change.
    pub(super) fn hold(&mut self, hold: bool) -> bool {
        std::mem::replace(&mut self.held, hold) != hold
    }

    /// As [`Pause::hold`], by the peer.
    pub(super) fn peer_hold(&mut self, hold: bool) -> bool {
        std::mem::replace(&mut self.peer_held, hold) != hold
    }

    /// The caller did `cause` while the turn sounded or waited to, which `interruptible` may interrupt. `hears`: words of the
    /// caller will come.
    pub(super) fn barge_in(
        &mut self,
        now: Instant,
        cause: Cause,
        (turn, interruptible): (&TurnId, Interruptible),
        config: &settings::BargeIn,
        hears: bool,
    ) -> Reaction {
        // A key is meant, whatever the words turn out to be; what is pending goes with what is cut off.
        let is_key = cause == Cause::Dtmf && interruptible.by(cause);
        if is_key && !self.unanswered && self.awaits_words() && config.grace().is_zero() {
            return Reaction::Interrupt;
        }
        // A greeting of the other side interrupts nothing that has not begun.
        if self.unanswered || self.pending.is_some() || !interruptible.by(cause) {
            return Reaction::None;
        }
        let by_words = hears && config.reversible && cause == Cause::Speech;
        let grace = config.grace().max(if by_words { WORDS } else { Duration::ZERO });
        if grace.is_zero() {
            return Reaction::Interrupt;
        }
        self.pending = Some(Pending { turn: turn.clone(), cause, until: now + grace, by_words });
        Reaction::Ask(grace)
    }

    /// Whether speech is silent until it is known what the caller says.
    pub(super) fn awaits_words(&self) -> bool {
        self.pending.as_ref().is_some_and(|pending| pending.by_words)
    }

    /// The pending barge-in is decided, if there is one.
    pub(super) fn resolve(&mut self, outcome: BargeInOutcome) -> Option<Decided> {
        let Pending { turn, cause, .. } = self.pending.take()?;
        let confirmed = matches!(outcome, BargeInOutcome::Confirmed | BargeInOutcome::TimedOutConfirmed);
        Some(Decided { turn, interrupts: confirmed.then_some(cause) })
    }

    /// Forgets a pending barge-in, as what sounded is cut off anyway; `false` when there is none.
    pub(super) fn forget_barge_in(&mut self) -> bool {
        self.pending.take().is_some()
    }

    /// When the agent has taken too long to decide.
    pub(super) fn deadline(&self) -> Option<Instant> {
        self.pending.as_ref().map(|pending| pending.until)
    }

    /// What the agent's silence means, once it has taken too long.
    pub(super) fn timed_out(&self, now: Instant, config: &settings::BargeIn) -> Option<BargeInOutcome> {
        self.deadline().filter(|until| *until <= now)?;
        Some(match config.confirm_by_default {
            true => BargeInOutcome::TimedOutConfirmed,
            false => BargeInOutcome::TimedOutRejected,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::clock;

    fn asking() -> settings::BargeIn {
        settings::BargeIn { grace_ms: 300, ..settings::BargeIn::default() }
    }

    #[test]
    fn without_a_grace_the_caller_interrupts_at_once_unless_the_turn_says_otherwise() {
        let (now, turn, config) = (clock::now(), TurnId::next(), settings::BargeIn::default());
        let mut pause = Pause::default();
        assert_eq!(
            pause.barge_in(now, Cause::Speech, (&turn, Interruptible::Any), &config, false),
            Reaction::Interrupt
        );
        assert_eq!(pause.barge_in(now, Cause::Speech, (&turn, Interruptible::Dtmf), &config, false), Reaction::None);
        assert!(!pause.is_on());
    }

    #[test]
    fn a_pending_barge_in_pauses_until_it_is_decided_once() {
        let (now, turn, config) = (clock::now(), TurnId::next(), asking());
        let grace = Duration::from_millis(300);
        let mut pause = Pause::default();
        assert_eq!(pause.barge_in(now, Cause::Dtmf, (&turn, Interruptible::Any), &config, false), Reaction::Ask(grace));
        assert!(pause.is_on() && !pause.is_held());
        assert_eq!(pause.barge_in(now, Cause::Speech, (&turn, Interruptible::Any), &config, false), Reaction::None);
        assert_eq!(pause.timed_out(now + grace - Duration::from_nanos(1), &config), None);
        assert_eq!(pause.timed_out(now + grace, &config), Some(BargeInOutcome::TimedOutConfirmed));
        let decided = pause.resolve(BargeInOutcome::Confirmed).expect("one is pending");
        assert_eq!(decided, Decided { turn: turn.clone(), interrupts: Some(Cause::Dtmf) });
        assert_eq!(pause.resolve(BargeInOutcome::Confirmed), None);
        pause.barge_in(now, Cause::Speech, (&turn, Interruptible::Any), &config, false);
        assert_eq!(pause.resolve(BargeInOutcome::Rejected).expect("pending").interrupts, None);
        assert!(!pause.is_on());
    }

    #[test]
    fn who_answers_interrupts_nothing_while_it_is_not_known_who_that_is() {
        let (now, turn, config) = (clock::now(), TurnId::next(), settings::BargeIn::default());
        let mut pause = Pause::default();
        assert!(pause.await_answer(true) && !pause.await_answer(true) && pause.is_on() && !pause.is_held());
        assert_eq!(pause.barge_in(now, Cause::Speech, (&turn, Interruptible::Any), &config, false), Reaction::None);
        assert!(pause.await_answer(false) && !pause.is_on());
        assert_eq!(
            pause.barge_in(now, Cause::Speech, (&turn, Interruptible::Any), &config, false),
            Reaction::Interrupt
        );
    }

    #[test]
    fn where_words_come_speech_pauses_until_they_do_unless_that_is_off() {
        let (now, turn) = (clock::now(), TurnId::next());
        let (on, off) = (settings::BargeIn::default(), settings::BargeIn { reversible: false, ..Default::default() });
        let what = (&turn, Interruptible::Any);
        let mut pause = Pause::default();
        assert_eq!(pause.barge_in(now, Cause::Speech, what, &off, true), Reaction::Interrupt);
        assert_eq!(pause.barge_in(now, Cause::Dtmf, what, &on, true), Reaction::Interrupt, "a key is meant");
        assert_eq!(pause.barge_in(now, Cause::Speech, what, &on, true), Reaction::Ask(WORDS));
        assert!(pause.is_on() && pause.awaits_words());
        assert_eq!(
            pause.barge_in(now, Cause::Dtmf, what, &on, true),
            Reaction::Interrupt,
            "nor does it wait for words"
        );
        let asks = settings::BargeIn { reversible: true, ..asking() };
        assert_eq!(pause.barge_in(now, Cause::Dtmf, what, &asks, true), Reaction::None, "the agent was asked");
        assert_eq!(pause.timed_out(now + WORDS, &on), Some(BargeInOutcome::TimedOutConfirmed));
    }

    #[test]
    fn both_sides_hold_independently() {
        let mut pause = Pause::default();
        assert!(pause.hold(true) && !pause.hold(true) && pause.peer_hold(true));
        assert!(pause.hold(false) && pause.is_on(), "the peer still holds");
        assert!(pause.peer_hold(false) && !pause.is_on());
    }
}
