//! What a recogniser made of the caller's words: events for those who listen, and an apology when it failed.

use std::time::{Duration, Instant};

use super::outbox::Outbox;
use super::speaking::Speaking;
use crate::call::{CallEvent, TurnRequest};
use crate::hear::{HearEvent, Phase};

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
}

impl Hearing {
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
                let ended = turn.phase == Phase::EndOfTurn && !turn.text.is_empty();
                let prompt = ended.then(|| (turn.text.clone(), turn.language.clone()));
                let eager = match turn.phase {
                    Phase::EagerEndOfTurn => {
                        speaking.speculation.open(turn.eager, &turn.text);
                        None
                    }
                    Phase::TurnResumed => speaking.settle_speculation(now, None, out),
                    Phase::EndOfTurn => speaking.settle_speculation(now, Some(&turn.text), out),
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
    use crate::hear::TurnEvent;

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
