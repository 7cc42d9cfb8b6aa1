//! What a call has to say, in order: turns, marks, and the end of the call.
//!
//! Owns text and PCM until they leave. Never encodes, never decides when something leaves, never talks to the
//! engine: it says which utterance comes next and takes the speech that was made of it.

use std::collections::VecDeque;
use std::time::Instant;

use super::part::{Part, PartState};
use super::turn::Turn;
use crate::audio::RATE;
use crate::call::EndReason;
use crate::call::heard::Pace;
use crate::media::playout::Playout;
use crate::turn::UtteranceId;

/// Utterances of one call that are with the engine at a time: the one that sounds next, the one that follows it
/// without a gap, and one more for a voice that makes several at once.
pub(super) const WINDOW: usize = 3;

/// No further utterance is submitted while this much speech waits: it bounds what one call can hold.
const MAX_AHEAD: usize = 10 * RATE as usize;

/// With less speech than this left the next words are wanted: 400 ms, in which an utterance begins to sound.
const HUNGRY: usize = RATE as usize * 2 / 5;

/// The queue of one call.
#[derive(Debug, Default)]
pub(super) struct TurnQueue {
    pub(super) entries: VecDeque<Entry>,
    pub(super) pace: Pace,
}

/// One thing after the other.
#[derive(Debug)]
pub(super) enum Entry {
    Turn(Box<Turn>),
    Mark(String),
    End(EndReason),
}

impl TurnQueue {
    pub(super) fn turns(&self) -> impl Iterator<Item = &Turn> {
        self.entries.iter().filter_map(|entry| match entry {
            Entry::Turn(turn) => Some(&**turn),
            Entry::Mark(_) | Entry::End(_) => None,
        })
    }

    pub(super) fn turns_mut(&mut self) -> impl Iterator<Item = &mut Turn> {
        self.entries.iter_mut().filter_map(|entry| match entry {
            Entry::Turn(turn) => Some(&mut **turn),
            Entry::Mark(_) | Entry::End(_) => None,
        })
    }

    /// The turn that sounds, or sounds next.
    pub(super) fn front(&self) -> Option<&Turn> {
        self.turns().next()
    }

    /// The turn whose text is still being written.
    pub(super) fn open(&mut self) -> Option<&mut Turn> {
        self.turns_mut().find(|turn| turn.is_open())
    }

    /// When [`TurnQueue::look`] is due.
    pub(super) fn look_at(&self) -> Option<Instant> {
        self.turns().find(|turn| turn.is_open())?.look_at(self.is_hungry())
    }

    /// Cuts what can be spoken now of the text that is being written.
    pub(super) fn look(&mut self, now: Instant) {
        if !self.turns().any(Turn::is_open) {
            return;
        }
        let hungry = self.is_hungry();
        if let Some(turn) = self.open() {
            turn.look(now, hungry);
        }
    }

    /// Whether the listener would hear silence soon: all that was cut is made, and little of it has not left.
    fn is_hungry(&self) -> bool {
        self.turns().flat_map(|turn| &turn.parts).all(|part| part.state == PartState::Ended)
            && self.waiting_samples() < HUNGRY
    }

    pub(super) fn part(&mut self, utterance: UtteranceId) -> Option<&mut Part> {
        self.turns_mut().flat_map(|turn| turn.parts.iter_mut().rev()).find(|part| part.utterance == utterance)
    }

    pub(super) fn turn_of(&mut self, utterance: UtteranceId) -> Option<&mut Turn> {
        self.turns_mut().find(|turn| turn.parts.iter().rev().any(|part| part.utterance == utterance))
    }

    /// Whether the call ends when everything is said.
    pub(super) fn is_ending(&self) -> bool {
        self.entries.iter().any(|entry| matches!(entry, Entry::End(_)))
    }

    /// Adds a turn after the others, or after the one that sounds (`ahead`).
    pub(super) fn add(&mut self, turn: Turn, ahead: bool, playout: &mut Playout) {
        let place = if ahead {
            let sounding = |entry: &Entry| matches!(entry, Entry::Turn(turn) if turn.sounded || turn.is_underway());
            let place = self.entries.iter().rposition(sounding).map_or(0, |place| place + 1);
            for entry in self.entries.range_mut(place..) {
                if let Entry::Turn(turn) = entry {
                    turn.withdraw(playout);
                }
            }
            place
        } else {
            // Behind an end nothing is heard: new text goes before it.
            let ends = |entry: &Entry| matches!(entry, Entry::End(_));
            self.entries.iter().position(ends).unwrap_or(self.entries.len())
        };
        self.entries.insert(place, Entry::Turn(Box::new(turn)));
    }

    /// The next utterance to submit, while the window and the buffers have room.
    pub(super) fn next_to_submit(&mut self) -> Option<(&mut Turn, usize)> {
        let (mut open, mut ahead) = (0, 0);
        for part in self.turns().flat_map(|turn| &turn.parts) {
            open += usize::from(part.state == PartState::Submitted);
            ahead += part.buffered();
        }
        if open >= WINDOW || ahead >= MAX_AHEAD {
            return None;
        }
        self.turns_mut().find_map(|turn| {
            let place = turn.parts.iter().position(|part| part.state == PartState::Waiting)?;
            Some((turn, place))
        })
    }

    /// Takes the next frame of speech into `out`; returns whose it is.
    pub(super) fn take_frame(&mut self, out: &mut Vec<f32>) -> Option<UtteranceId> {
        out.clear();
        for entry in &mut self.entries {
            match entry {
                // It waits for the caller's turn to end, which takes no longer than a caller's longest pause.
                Entry::Turn(turn) if turn.held => return None,
                Entry::Turn(turn) => {
                    for part in &mut turn.parts {
                        if part.take(out) {
                            return Some(part.utterance);
                        }
                        if part.state != PartState::Ended {
                            return None;
                        }
                    }
                    if turn.is_open() {
                        return None;
                    }
                }
                Entry::Mark(_) => {}
                Entry::End(_) => return None,
            }
        }
        None
    }

    /// Whether only the end of the call is left.
    pub(super) fn is_last(&self) -> bool {
        matches!(self.entries.front(), Some(Entry::End(_)))
    }

    /// Removes the first entry if its time has come; the end of the call only when it `may_end`.
    pub(super) fn retire(&mut self, playout: &Playout, may_end: bool) -> Option<Entry> {
        self.entries.pop_front_if(|entry| match entry {
            Entry::Turn(turn) => turn.is_over(playout),
            Entry::Mark(_) => true,
            // The last frame must have left.
            Entry::End(_) => may_end && playout.is_empty() && !playout.is_dialing(),
        })
    }

    /// Samples of speech that wait.
    pub(super) fn waiting_samples(&self) -> usize {
        self.turns().flat_map(|turn| &turn.parts).fold(0, |sum, part| sum.saturating_add(part.available()))
    }

    /// All of an utterance was made; gives the samples of its end that are left out.
    pub(super) fn complete(&mut self, utterance: UtteranceId) -> u64 {
        let Self { entries, pace } = self;
        let turns = entries.iter_mut().filter_map(|entry| match entry {
            Entry::Turn(turn) => Some(turn),
            Entry::Mark(_) | Entry::End(_) => None,
        });
        let mut parts = turns.flat_map(|turn| &mut turn.parts);
        let Some(part) = parts.find(|part| part.utterance == utterance) else { return 0 };
        let out = part.complete();
        pace.learn(part.said(), part.received());
        out
    }

    /// The text of the open turn is complete; gives the mistakes of its markup.
    pub(super) fn close_open(&mut self) -> Vec<String> {
        self.open().map(Turn::finish_text).unwrap_or_default()
    }

    /// Takes the turns out that wait for the end of the caller's turn. Nothing of them has left.
    pub(super) fn take_held(&mut self) -> Vec<Turn> {
        let (mut kept, mut taken) = (VecDeque::new(), Vec::new());
        for entry in std::mem::take(&mut self.entries) {
            match entry {
                Entry::Turn(turn) if turn.held => taken.push(*turn),
                entry => kept.push_back(entry),
            }
        }
        self.entries = kept;
        taken
    }

    /// Takes the entries out that `keep` does not name, in order.
    pub(super) fn take_unless(&mut self, mut keep: impl FnMut(&Turn) -> bool) -> Vec<Entry> {
        let (mut kept, mut taken) = (VecDeque::new(), Vec::new());
        for entry in std::mem::take(&mut self.entries) {
            match entry {
                Entry::Turn(turn) if keep(&turn) => kept.push_back(Entry::Turn(turn)),
                Entry::Turn(turn) => taken.push(Entry::Turn(turn)),
                // A mark after a turn that goes on still has something to wait for.
                Entry::Mark(name) if kept.is_empty() => taken.push(Entry::Mark(name)),
                entry @ (Entry::Mark(_) | Entry::End(_)) => kept.push_back(entry),
            }
        }
        self.entries = kept;
        taken
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::call::TurnId;
    use crate::call::handle::Style;
    use crate::call::machine::fixture::playout;
    use crate::clock;

    fn turn(texts: &[&str]) -> Turn {
        let mut turn = Turn::new(TurnId::next(), Style::default(), clock::now(), true);
        turn.add_text(texts.iter().map(|text| (*text).to_owned()).collect());
        turn
    }

    fn texts(queue: &TurnQueue) -> Vec<&str> {
        queue.turns().flat_map(|turn| turn.parts.iter().map(|part| part.text.as_str())).collect()
    }

    #[test]
    fn no_more_utterances_are_submitted_than_the_window_holds() {
        let (mut queue, mut playout) = (TurnQueue::default(), playout());
        queue.add(turn(&["a", "b", "c", "d", "e"]), false, &mut playout);
        let mut submitted = Vec::new();
        while let Some((turn, place)) = queue.next_to_submit() {
            turn.parts[place].state = PartState::Submitted;
            submitted.push(turn.parts[place].text.clone());
        }
        assert_eq!(submitted, ["a", "b", "c"]);
        let first = queue.turns().next().expect("one").parts[0].utterance;
        queue.part(first).expect("known").state = PartState::Ended;
        let (turn, place) = queue.next_to_submit().expect("room again");
        assert_eq!(turn.parts[place].text, "d");
        turn.parts[place].receive(vec![0.1; MAX_AHEAD]);
        assert!(queue.next_to_submit().is_none(), "so much waits that nothing more is made");
    }

    #[test]
    fn a_turn_ahead_goes_behind_what_sounds_and_withdraws_what_waits() {
        let (mut queue, mut playout) = (TurnQueue::default(), playout());
        let mut sounding = turn(&["now"]);
        sounding.sounded = true;
        queue.add(sounding, false, &mut playout);
        queue.add(turn(&["later"]), false, &mut playout);
        let before = queue.turns().nth(1).expect("two").parts[0].utterance;
        queue.add(turn(&["next"]), true, &mut playout);
        assert_eq!(texts(&queue), ["now", "next", "later"]);
        assert!(queue.part(before).is_none(), "it is submitted anew under another name");
    }

    #[test]
    fn behind_the_end_nothing_is_queued_and_marks_wait_for_what_goes_on() {
        let (mut queue, mut playout) = (TurnQueue::default(), playout());
        queue.entries.push_back(Entry::Mark("first".into()));
        queue.add(turn(&["cut"]), false, &mut playout);
        queue.add(turn(&["kept"]), false, &mut playout);
        queue.entries.push_back(Entry::Mark("second".into()));
        queue.entries.push_back(Entry::End(EndReason::HungUp));
        queue.add(turn(&["more"]), false, &mut playout);
        assert!(matches!(queue.entries.back(), Some(Entry::End(_))));
        let taken = queue.take_unless(|turn| turn.parts[0].text != "cut");
        assert!(matches!(&taken[..], [Entry::Mark(name), Entry::Turn(_)] if name == "first"), "{taken:?}");
        assert_eq!(texts(&queue), ["kept", "more"]);
        assert!(queue.is_ending());
    }
}
