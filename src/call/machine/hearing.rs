//! What a recogniser made of the caller's words: events for those who listen, and an apology when it failed.

use std::time::{Duration, Instant};

use super::outbox::Outbox;
use super::speaking::Speaking;
use crate::call::{CallEvent, TurnRequest};
use crate::hear::{Backchannel, HearEvent, Phase, TurnEvent, backchannel};

/// Less than this is a cough or a syllable: nothing that somebody would say again.
const WORTH: Duration = Duration::from_millis(400);
/// Between two apologies: a recogniser that stays away makes a bad refrain.
const BETWEEN: Duration = Duration::from_secs(10);

/// The caller as recognised.
#[derive(Debug, Default)]
pub(super) struct Hearing {
    /// Said when a turn was not heard; empty: nothing.
    pub(super) apology: String,
    apologised: Option<Instant>,
    /// What is said in this turn is what listeners say while we speak: no prompt.
    aside: bool,
}

/// What words of the caller mean for what sounds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Weight {
    /// Nothing yet.
    Unknown,
    /// The caller listens, or coughed: speech goes on.
    Aside,
    /// The caller wants to say something.
    Meant {
        /// The same turn was taken for an aside before.
        after_all: bool,
    },
}

impl Hearing {
    /// What `turn` means for speech that `sounds`, and that has `much` still to say.
    pub(super) fn weigh(&mut self, turn: &TurnEvent, sounds: bool, much: bool) -> Weight {
        match turn.phase {
            Phase::StartOfTurn => {
                self.aside = false;
                return Weight::Unknown;
            }
            Phase::TurnResumed => return Weight::Unknown,
            Phase::Partial | Phase::EagerEndOfTurn | Phase::EndOfTurn => {}
        }
        let kind = backchannel(&turn.text, &turn.language);
        // Words so far: "yeah" may become "yeah, but".
        if turn.phase == Phase::Partial && kind.is_some() {
            return Weight::Unknown;
        }
        let listens = match kind {
            Some(Backchannel::Sound) => sounds,
            // Behind the last words of a question it is the answer.
            Some(Backchannel::Word) => much,
            None => turn.text.is_empty(),
        };
        // Speech that ended meanwhile does not make an answer of what was an aside.
        let listens = listens || self.aside && kind.is_some();
        if listens {
            self.aside = true;
            return Weight::Aside;
        }
        Weight::Meant { after_all: std::mem::take(&mut self.aside) }
    }

    /// Whether the turn at hand is no prompt.
    pub(super) fn is_aside(&self) -> bool {
        self.aside
    }

    /// Tells of `event`; gives what is to be said about it.
    pub(super) fn take(
        &mut self,
        now: Instant,
        event: HearEvent,
        speaking: &mut Speaking,
        out: &mut Outbox,
    ) -> Option<TurnRequest> {
        match event {
            HearEvent::Turn(turn) => {
                let ended = turn.phase == Phase::EndOfTurn && !turn.text.is_empty() && !self.aside;
                let prompt = ended.then(|| (turn.text.clone(), turn.language.clone()));
                let eager = match turn.phase {
                    Phase::EagerEndOfTurn => {
                        speaking.speculation.open(turn.eager, &turn.text);
                        None
                    }
                    Phase::TurnResumed => speaking.settle_speculation(now, None, out),
                    Phase::EndOfTurn => {
                        speaking.settle_speculation(now, Some(turn.text.as_str()).filter(|_| !self.aside), out)
                    }
                    Phase::StartOfTurn | Phase::Partial => None,
                };
                out.event(CallEvent::Heard(turn));
                if let Some((text, lang)) = prompt {
                    out.event(CallEvent::Prompt { text, lang, last: true, eager });
                }
                None
            }
            HearEvent::Deaf { lost, reason } => {
                out.event(CallEvent::Deaf { lost, reason });
                let soon = self.apologised.is_some_and(|at| now.saturating_duration_since(at) < BETWEEN);
                if lost < WORTH || soon || self.apology.is_empty() {
                    return None;
                }
                self.apologised = Some(now);
                Some(TurnRequest::new(self.apology.as_str()))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::call::machine::{Action, fixture};
    use crate::clock;

    fn turn(phase: Phase, text: &str) -> HearEvent {
        let (start, end) = (Duration::from_secs(1), Duration::from_secs(2));
        let language = "en".into();
        HearEvent::Turn(TurnEvent { phase, text: text.into(), language, start, end, confidence: 0.9, eager: 0 })
    }

    fn events(out: &mut Outbox) -> Vec<CallEvent> {
        let action = |action| match action {
            Action::Event(event) => event,
            other => panic!("{other:?}"),
        };
        std::iter::from_fn(|| out.pop()).map(action).collect()
    }

    #[test]
    fn the_end_of_a_turn_is_a_prompt_unless_it_has_no_words() {
        let now = clock::now();
        let (mut out, mut hearing) = (fixture::outbox(now), Hearing::default());
        let mut speaking = fixture::speaking(now, &out);
        for event in [turn(Phase::Partial, "yes"), turn(Phase::EndOfTurn, "Yes."), turn(Phase::EndOfTurn, "")] {
            assert!(hearing.take(now, event, &mut speaking, &mut out).is_none());
        }
        let told = events(&mut out);
        let prompts: Vec<_> = told.iter().filter(|event| matches!(event, CallEvent::Prompt { .. })).collect();
        assert_eq!(prompts, [&CallEvent::Prompt { text: "Yes.".into(), lang: "en".into(), last: true, eager: None }]);
        assert_eq!(told.len(), 4);
    }

    #[test]
    fn what_a_listener_says_is_no_prompt_and_an_answer_is_one() {
        let turn = |phase, text: &str| match turn(phase, text) {
            HearEvent::Turn(turn) => turn,
            HearEvent::Deaf { .. } => panic!("a turn"),
        };
        let mut hearing = Hearing::default();
        let mut weigh = |phase, text: &str, sounds, much| {
            let weight = hearing.weigh(&turn(phase, text), sounds, much);
            (weight, hearing.is_aside())
        };
        let meant = |after_all| Weight::Meant { after_all };
        assert_eq!(weigh(Phase::StartOfTurn, "", true, true), (Weight::Unknown, false));
        assert_eq!(weigh(Phase::Partial, "Mm-hm", true, true), (Weight::Unknown, false), "it may go on");
        assert_eq!(weigh(Phase::EagerEndOfTurn, "Mm-hm.", true, true), (Weight::Aside, true));
        assert_eq!(weigh(Phase::EndOfTurn, "Mm-hm, but wait.", true, true), (meant(true), false));
        assert!(!weigh(Phase::StartOfTurn, "", true, true).1);
        assert_eq!(weigh(Phase::EndOfTurn, "Yes.", true, false), (meant(false), false), "the question was at its end");
        assert_eq!(weigh(Phase::EndOfTurn, "Yes.", true, true), (Weight::Aside, true));
        assert!(!weigh(Phase::StartOfTurn, "", false, false).1);
        assert_eq!(weigh(Phase::EndOfTurn, "Mm-hm.", false, false), (meant(false), false), "nothing sounds: an answer");
        assert_eq!(weigh(Phase::EndOfTurn, "", true, true).0, Weight::Aside, "a cough");
    }

    #[test]
    fn a_turn_that_was_not_heard_is_apologised_for_but_not_again_and_again() {
        let now = clock::now();
        let (mut out, mut hearing) = (fixture::outbox(now), Hearing::default());
        let mut speaking = fixture::speaking(now, &out);
        let deaf = |ms| HearEvent::Deaf { lost: Duration::from_millis(ms), reason: "gone".into() };
        assert!(hearing.take(now, deaf(2_000), &mut speaking, &mut out).is_none(), "nothing is configured");
        hearing.apology = "Sorry?".into();
        assert!(hearing.take(now, deaf(100), &mut speaking, &mut out).is_none(), "too short to matter");
        assert_eq!(hearing.take(now, deaf(2_000), &mut speaking, &mut out).expect("an apology").text, "Sorry?");
        assert!(hearing.take(now + BETWEEN / 2, deaf(2_000), &mut speaking, &mut out).is_none());
        assert!(hearing.take(now + BETWEEN, deaf(2_000), &mut speaking, &mut out).is_some());
        assert_eq!(events(&mut out).len(), 5, "each is told of");
    }
}
