//! A turn whose text is still being written: when which part of it is spoken.
//!
//! A state machine in the caller's time. Owns the text that is not cut into utterances yet and how long the writer has
//! paused; never the utterances.
//!
//! # Why
//! - **Words first.** While the listener hears something, parts end at sentences, which sound best. Where he would hear
//!   silence (at the start of a turn, and when what was cut is nearly said), a part ends inside a sentence: as soon as it
//!   is long enough, or when the writer pauses.
//! - **A pause is measured against the writer's pace**: one who writes three words a second is not cut off behind each.

use std::time::{Duration, Instant};

use crate::call::segment::{Patience, SegmentConfig, Segmenter};
use crate::text::Lexicon;
use crate::turn::Streaming;

/// After so many pauses in a row whatever was written is taken as complete, a number too.
const SILENT: u32 = 3;
/// A writer has paused after so many times the usual time between two pieces, at least; at most after
/// [`LONGEST_PAUSE`].
const PACES: u32 = 2;
/// The longest time that is waited for the next piece before it counts as a pause, however slow the writer.
const LONGEST_PAUSE: Duration = Duration::from_millis(800);

/// What is wanted of a text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Hunger {
    /// Sentences: something sounds meanwhile.
    None,
    /// Phrases: nothing else is about to sound.
    Phrases,
    /// Words, for a voice that takes text as it is written.
    Words,
}

/// The text of one turn on its way into utterances.
#[derive(Debug)]
pub(super) struct Writing {
    segmenter: Segmenter,
    /// Unfinished sentences may be spoken.
    phrases: bool,
    pause: Duration,
    /// When the latest piece came.
    latest: Instant,
    /// The usual time between two pieces, from the second on.
    pace: Option<Duration>,
    /// What was tried since the latest piece.
    tried: Option<Patience>,
}

impl Writing {
    /// Nothing is written yet.
    pub(super) fn new(config: &SegmentConfig, stream: Streaming, now: Instant) -> Self {
        Self {
            segmenter: Segmenter::new(config.clone()),
            phrases: stream != Streaming::Sentence,
            pause: Duration::from_millis(config.pause_ms),
            latest: now,
            pace: None,
            tried: None,
        }
    }

    /// Cuts no entry of `lexicon`.
    pub(super) fn reading(self, lexicon: &Lexicon) -> Self {
        Self { segmenter: self.segmenter.reading(lexicon.clone()), ..self }
    }

    /// Takes the next piece; appends the sentences that are complete to `out`.
    pub(super) fn push(&mut self, now: Instant, token: &str, out: &mut Vec<String>) {
        if self.segmenter.has_begun() {
            let gap = now.saturating_duration_since(self.latest).min(LONGEST_PAUSE);
            self.pace = Some(self.pace.map_or(gap, |pace| (pace * 3 + gap) / 4));
        }
        self.latest = now;
        self.tried = None;
        self.segmenter.push(token, out);
    }

    /// What follows is spoken otherwise: appends what there is to `out`.
    pub(super) fn flush(&mut self, out: &mut Vec<String>) {
        self.segmenter.finish(out);
    }

    /// The text is complete: appends the rest to `out`.
    pub(super) fn finish(mut self, out: &mut Vec<String>) {
        self.segmenter.finish(out);
    }

    /// When [`Self::look`] is due.
    pub(super) fn due(&self, hunger: Hunger) -> Option<Instant> {
        if self.segmenter.is_probably_complete() && self.tried.is_none() {
            return Some(self.latest + self.pause());
        }
        // That the writer says nothing more matters to a voice that waits for him, too.
        let waits = self.segmenter.is_waiting() || hunger == Hunger::Words;
        if hunger == Hunger::None || !self.phrases || !waits {
            return None;
        }
        match self.tried {
            None | Some(Patience::Writing) => Some(self.latest + self.pause()),
            Some(Patience::Paused) => Some(self.latest + self.pause() * SILENT),
            Some(Patience::Silent) => None,
        }
    }

    /// Appends what can be spoken now to `out`. `say` gives the words that a text will be read as.
    pub(super) fn look(&mut self, now: Instant, hunger: Hunger, say: &dyn Fn(&str) -> String, out: &mut Vec<String>) {
        let hungry = hunger != Hunger::None;
        let silent = now.saturating_duration_since(self.latest);
        let patience = match silent {
            _ if silent >= self.pause() * SILENT => Patience::Silent,
            _ if silent >= self.pause() => Patience::Paused,
            _ => Patience::Writing,
        };
        if patience >= Patience::Paused && self.tried.is_none() {
            self.segmenter.settle(out);
        }
        if hungry && self.phrases && out.is_empty() {
            self.segmenter.phrase(patience, hunger == Hunger::Words, say, out);
        }
        if patience >= Patience::Paused && (hungry || !self.phrases) {
            self.tried = Some(patience);
        }
    }

    /// Whether the writer has paused for so long that nothing he has begun is waited for.
    pub(super) fn is_silent(&self) -> bool {
        self.tried == Some(Patience::Silent)
    }

    /// A pause of this writer.
    fn pause(&self) -> Duration {
        self.pause.max((self.pace.unwrap_or_default() * PACES).min(LONGEST_PAUSE))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::clock;
    use crate::text::{Normalise, read};

    const MS: Duration = Duration::from_millis(1);

    fn english(text: &str) -> String {
        read(text, Some("en"), Normalise::On).spoken.text
    }

    /// Writes `pieces`, `gap` apart, to a listener who hears nothing else, and looks whenever it is due until `until`
    /// behind the last. Each part with when it was cut, in milliseconds.
    fn heard(stream: Streaming, pieces: &[&str], gap: Duration, until: Duration) -> Vec<(u128, String)> {
        let start = clock::now();
        let mut writing = Writing::new(&SegmentConfig::default(), stream, start);
        let mut heard = Vec::new();
        let mut now = start;
        for (n, piece) in pieces.iter().enumerate() {
            let mut out = Vec::new();
            writing.push(now, piece, &mut out);
            let next = now + if n + 1 == pieces.len() { until } else { gap };
            loop {
                writing.look(now, Hunger::Phrases, &english, &mut out);
                heard.extend(out.drain(..).map(|part| ((now - start).as_millis(), part)));
                match writing.due(Hunger::Phrases).filter(|due| *due < next) {
                    Some(due) => now = due.max(now),
                    None => break,
                }
            }
            now = next;
        }
        let mut out = Vec::new();
        writing.finish(&mut out);
        heard.extend(out.into_iter().map(|part| ((now - start).as_millis(), part)));
        heard
    }

    fn tokens(text: &str) -> Vec<&str> {
        text.split_inclusive(' ').collect()
    }

    #[test]
    fn what_is_written_before_a_tool_call_is_spoken_after_the_pause() {
        let pieces = ["Let me", " check that", " for you"];
        let parts = heard(Streaming::Auto, &pieces, 20 * MS, Duration::from_secs(5));
        assert_eq!(parts, [(240, "Let me check that for you".to_owned())]);
        let parts = heard(Streaming::Sentence, &pieces, 20 * MS, Duration::from_secs(5));
        assert_eq!(parts, [(5_040, "Let me check that for you".to_owned())], "sentences only, where that is asked for");
    }

    #[test]
    fn a_long_opening_without_a_comma_does_not_wait_for_its_end() {
        let text = "We have been looking at all of the numbers that you sent us earlier in the week today.";
        let parts = heard(Streaming::Auto, &tokens(text), 100 * MS, 100 * MS);
        assert_eq!(parts[0], (600, "We have been looking at all".to_owned()));
        let said: Vec<&str> = parts.iter().map(|(_, part)| part.as_str()).collect();
        assert_eq!(said.join(" "), text);
        assert!(heard(Streaming::Sentence, &tokens(text), 100 * MS, 100 * MS)[0].0 >= 1_600);
    }

    #[test]
    fn while_something_sounds_sentences_are_waited_for() {
        let start = clock::now();
        let mut writing = Writing::new(&SegmentConfig::default(), Streaming::Auto, start);
        let mut out = Vec::new();
        writing.push(start, "We have been looking at all of the numbers that you sent", &mut out);
        assert_eq!(writing.due(Hunger::None), None);
        writing.look(start + Duration::from_secs(2), Hunger::None, &english, &mut out);
        assert!(out.is_empty());
        assert!(
            writing.due(Hunger::Phrases).is_some_and(|due| due <= start + Duration::from_secs(2)),
            "until nothing does"
        );
    }

    #[test]
    fn a_slow_writer_is_not_cut_off_behind_each_word() {
        let text = "I am a slow writer and take some time for each of my words.";
        let parts = heard(Streaming::Auto, &tokens(text), 300 * MS, 300 * MS);
        assert!(parts.len() <= 4, "{parts:?}");
    }

    #[test]
    fn a_number_waits_for_what_may_follow_it_but_not_for_ever() {
        let parts = heard(Streaming::Auto, &["It costs about 3"], MS, Duration::from_secs(5));
        assert_eq!(parts, [(200, "It costs".to_owned()), (600, "about 3".to_owned())]);
        let parts = heard(Streaming::Auto, &["It costs about 3", ".5 dollars"], 400 * MS, MS);
        let said: Vec<&str> = parts.iter().map(|(_, part)| part.as_str()).collect();
        assert_eq!(said, ["It costs", "about 3.5 dollars"]);
    }
}
