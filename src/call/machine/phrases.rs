//! What a turn's text becomes, without a call.

use std::sync::Arc;

use super::part::PartState;
use super::turn::Turn;
use super::writing::Writing;
use crate::call::TurnId;
use crate::call::handle::Style;
use crate::call::segment::SegmentConfig;
use crate::clock;
use crate::turn::{StreamId, Streaming, Utterance};

/// The utterances that a call with these settings makes of a whole turn: what may be spoken before anybody calls.
///
/// # Errors
/// The first mistake in the text's markup.
pub fn utterances(text: &str, style: Style, config: &SegmentConfig) -> Result<Vec<Utterance>, String> {
    // Nothing here is timed.
    Turn::whole(TurnId::next(), text, style, config, clock::now()).map(|turn| of(&turn))
}

/// The same of a text that comes as one streamed piece, which is spoken sentence by sentence.
///
/// # Errors
/// As there.
pub fn streamed_utterances(text: &str, style: Style, config: &SegmentConfig) -> Result<Vec<Utterance>, String> {
    let style = Style { stream: Streaming::Sentence, ..style };
    let mut turn = Turn::new(TurnId::next(), style, clock::now(), false);
    let writing = Writing::new(config, Streaming::Sentence, clock::now());
    turn.writing = Some(writing.reading(&turn.style.lexicon));
    let mut mistakes = turn.write(clock::now(), text);
    mistakes.extend(turn.finish_text());
    mistakes.into_iter().next().map_or_else(|| Ok(of(&turn)), Err)
}

fn of(turn: &Turn) -> Vec<Utterance> {
    let tenant: Arc<str> = "".into();
    let spoken = |place: &usize| turn.parts[*place].state == PartState::Waiting;
    (0..turn.parts.len()).filter(spoken).map(|place| turn.utterance(place, StreamId::next(), &tenant)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_phrase_is_what_a_call_would_ask_for() {
        let style = Style { language: Some("en".into()), seed: 3, ..Style::default() };
        let text = "Hello, and welcome to the service, caller 5. How can I help?";
        let texts = |utterances: Result<Vec<Utterance>, String>| {
            let utterances = utterances.expect("no markup");
            assert!(
                utterances.iter().all(|one| !one.streamed && one.seed == 3 && one.language.as_deref() == Some("en"))
            );
            utterances.into_iter().map(|utterance| utterance.text).collect::<Vec<_>>()
        };
        let config = SegmentConfig::default();
        let whole = texts(utterances(text, style.clone(), &config));
        assert_eq!(whole, ["Hello, and welcome to the service, caller five.", "How can I help?"]);
        // Streamed, a first part may end at a clause.
        let streamed = texts(streamed_utterances(text, style.clone(), &config));
        assert_eq!(streamed[0], "Hello, and welcome to the service,");
        let marked = Style { markup: crate::turn::Markup::Ssml, ..style };
        assert!(utterances("Say <brake/> now.", marked, &config).is_err());
    }
}
