//! An answer that is asked for when the caller has probably finished.
//!
//! The request goes out at the eager end of the caller's turn; what comes of it goes to the call with the number of that
//! end, which holds it back. The end of the turn makes it an answer like any other; a caller who goes on undoes it: the
//! history is what it was before.

use std::time::Instant;

use super::{Action, Dialogue, Phase};
use crate::agent::llm::history::History;
use crate::hear::{Phase as Hearing, TurnEvent};

/// A request whose question may not be whole.
#[derive(Debug)]
pub(super) struct Speculating {
    /// Which eager end of turn it answers.
    number: u64,
    /// The history without it.
    before: History,
}

impl Dialogue {
    /// Whether the request under way may still be for nothing.
    pub(super) fn is_speculating(&self) -> bool {
        self.speculation.is_some()
    }

    /// Which eager end of turn the request under way answers.
    pub(super) fn answers(&self) -> Option<u64> {
        self.speculation.as_ref().map(|speculating| speculating.number)
    }

    /// How far the caller's turn is.
    pub(super) fn heard(&mut self, now: Instant, turn: &TurnEvent) {
        match turn.phase {
            Hearing::EagerEndOfTurn => self.speculate(now, turn),
            Hearing::TurnResumed => self.abandon(false, "abandoned"),
            // Nothing was understood: no prompt follows.
            Hearing::EndOfTurn if turn.text.is_empty() => self.abandon(false, "abandoned"),
            Hearing::StartOfTurn | Hearing::Partial | Hearing::EndOfTurn => {}
        }
    }

    fn speculate(&mut self, now: Instant, turn: &TurnEvent) {
        // While something else is under way the end of the turn is waited for: to cut off what sounds, or a tool, takes
        // more than a guess.
        let idle = matches!(self.phase, Phase::Listening) && self.digits.is_none() && !self.history.is_sounding();
        if !self.config.speculate || !idle || turn.text.trim().is_empty() {
            return;
        }
        let before = self.history.clone();
        self.history.user(&turn.text);
        (self.attempt, self.rounds) = (0, 0);
        self.speculation = Some(Speculating { number: turn.eager, before });
        self.ask(now);
    }

    /// The caller's turn has ended with `text`; `eager`: the eager end that had the same words.
    pub(super) fn ended_turn(&mut self, now: Instant, text: &str, eager: Option<u64>) {
        if !self.confirm(now, eager) {
            self.prompt(now, text);
        }
    }

    /// Whether the answer to `eager` is under way, and right.
    fn confirm(&mut self, now: Instant, eager: Option<u64>) -> bool {
        let Some(number) = self.answers() else { return false };
        if eager != Some(number) {
            // The call has dropped what was made of it.
            self.abandon(false, "abandoned");
            return false;
        }
        // From now on it is an answer like any other.
        self.speculation = None;
        if let Phase::Asking(asking) = &self.phase
            && asking.finished.is_some()
        {
            self.conclude(now);
        }
        true
    }

    /// The caller goes on, something else came first, or it failed. `cut`: the call does not know, and holds what was
    /// made. `outcome` is what the request is counted as.
    pub(super) fn abandon(&mut self, cut: bool, outcome: &'static str) {
        let Some(Speculating { before, .. }) = self.speculation.take() else { return };
        let Phase::Asking(asking) = &self.phase else { return };
        let said = asking.said > 0;
        self.count(outcome);
        self.act(Action::Drop { unsaid: true });
        if cut && said {
            self.act(Action::Interrupt);
        }
        self.history = before;
        self.phase = Phase::Listening;
    }
}
