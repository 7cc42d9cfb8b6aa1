//! What a caller hears in place of a turn that was accepted and could not be spoken.

use crate::call::{CallEvent, Style, TurnHow, TurnId, TurnRequest};
use crate::turn::Markup;

/// How an agent that speaks so says sorry for a turn.
pub(super) fn apology_style(style: &Style) -> Style {
    Style { voice: None, instructions: None, markup: Markup::None, ..style.clone() }
}

/// Says sorry for turns of which nothing was heard.
///
/// # Why
/// - **Only where nothing was heard**: after half an answer it would be the more puzzling half.
/// - **In the engine's default voice**: the voice that was asked for may be what cannot speak.
/// - **One at a time**: an apology that fails is not apologised for, and turns that fail together share one.
#[derive(Debug)]
pub(super) struct Apology {
    text: String,
    /// The one that is being said.
    pending: Option<TurnId>,
}

impl Apology {
    /// `text`: what to say; empty: nothing.
    pub(super) fn new(text: &str) -> Self {
        Self { text: text.trim().to_owned(), pending: None }
    }

    /// What to say because of `event`, if anything. `style`: how the agent speaks.
    pub(super) fn because_of(&mut self, event: &CallEvent, style: &Style) -> Option<TurnRequest> {
        let CallEvent::TurnEnded { turn, how, heard } = event else { return None };
        if self.pending.as_ref() == Some(turn) {
            self.pending = None;
            return None;
        }
        let silent = heard.sent_ms == 0 && matches!(how, TurnHow::Failed(_) | TurnHow::Refused { .. });
        if !silent || self.text.is_empty() || self.pending.is_some() {
            return None;
        }
        let id = TurnId::next();
        self.pending = Some(id.clone());
        Some(TurnRequest {
            id: Some(id),
            ahead: true,
            style: apology_style(style),
            ..TurnRequest::new(self.text.as_str())
        })
    }

    /// What was to be said was not taken.
    pub(super) fn give_up(&mut self) {
        self.pending = None;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::call::Heard;

    fn ended(turn: &TurnId, how: TurnHow, sent_ms: u64) -> CallEvent {
        CallEvent::TurnEnded { turn: turn.clone(), how, heard: Heard { sent_ms, ..Heard::default() } }
    }

    #[test]
    fn a_turn_of_which_nothing_was_heard_has_one_apology_in_the_default_voice() {
        let failed = || TurnHow::Failed("no memory".into());
        let style = Style { voice: Some("nobody".into()), ..Style::default() };
        let mut apology = Apology::new(" Sorry. ");
        let turn = TurnId::next();
        assert!(apology.because_of(&ended(&turn, TurnHow::Done, 900), &style).is_none());
        assert!(apology.because_of(&ended(&turn, failed(), 40), &style).is_none(), "part of it was heard");
        let said = apology.because_of(&ended(&turn, failed(), 0), &style).expect("it would be silent");
        assert_eq!((said.text.as_str(), said.style.voice.as_deref(), said.ahead), ("Sorry.", None, true));
        assert!(apology.because_of(&ended(&turn, failed(), 0), &style).is_none(), "one at a time");
        let own = said.id.expect("named");
        assert!(apology.because_of(&ended(&own, failed(), 0), &style).is_none(), "not for itself");
        let refused = TurnHow::Refused { retry_after: std::time::Duration::ZERO };
        assert!(apology.because_of(&ended(&turn, refused, 0), &style).is_some());
        assert!(Apology::new("").because_of(&ended(&turn, failed(), 0), &style).is_none());
    }
}
