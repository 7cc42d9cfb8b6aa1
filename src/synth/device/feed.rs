//! The text of an utterance that is still being written, on its way to the voice.

use crate::turn::Saying;

/// The pieces of a text in the order they were written.
///
/// All of them are kept: an utterance that gave up its slot starts again from its first, and the same pieces give the same
/// audio.
#[derive(Debug)]
pub(super) struct Feed {
    pieces: Vec<Saying>,
    /// How many the voice has.
    given: usize,
    /// Nothing follows, and whether the voice knows.
    last: bool,
    told: bool,
}

impl Feed {
    /// A text that begins so.
    pub(super) fn new(first: Saying) -> Self {
        Self { pieces: vec![first], given: 0, last: false, told: false }
    }

    /// Takes the next piece; behind the `last` none follows, and what comes nevertheless is not taken (`false`).
    pub(super) fn push(&mut self, piece: &Saying, last: bool) -> bool {
        if self.last {
            return false;
        }
        if !piece.is_empty() {
            self.pieces.push(piece.clone());
        }
        self.last = last;
        true
    }

    /// What the voice is to get now, and whether each is the last.
    pub(super) fn take(&mut self) -> Vec<(Saying, bool)> {
        let mut fresh: Vec<_> = self.pieces.iter().skip(self.given).map(|piece| (piece.clone(), false)).collect();
        self.given = self.pieces.len();
        if self.last && !std::mem::replace(&mut self.told, true) {
            match fresh.last_mut() {
                Some((_, last)) => *last = true,
                None => fresh.push((Saying::default(), true)),
            }
        }
        fresh
    }

    /// The voice begins anew and has nothing.
    pub(super) fn rewind(&mut self) {
        (self.given, self.told) = (0, false);
    }

    /// All of it behind the first piece, and whether each is the last.
    pub(super) fn behind_first(mut self) -> Vec<(Saying, bool)> {
        (self.given, self.told) = (1, false);
        self.take()
    }

    /// Characters so far.
    pub(super) fn chars(&self) -> usize {
        self.pieces.iter().map(|piece| piece.text.chars().count()).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_voice_gets_each_piece_once_and_all_of_them_again_after_it_began_anew() {
        let own =
            |pieces: &[(&str, bool)]| pieces.iter().map(|(p, last)| (Saying::from(*p), *last)).collect::<Vec<_>>();
        let mut feed = Feed::new("one ".into());
        assert_eq!(feed.take(), own(&[("one ", false)]));
        assert!(feed.push(&"two ".into(), false) && feed.push(&"three".into(), false));
        assert_eq!(feed.take(), own(&[("two ", false), ("three", false)]));
        assert!(feed.take().is_empty() && feed.push(&"".into(), true) && !feed.push(&"late".into(), true));
        assert_eq!(feed.take(), own(&[("", true)]), "the end is told even where no text comes with it");
        assert!(feed.take().is_empty(), "once");
        feed.rewind();
        assert_eq!(feed.take(), own(&[("one ", false), ("two ", false), ("three", true)]));
        assert_eq!(feed.chars(), 13);
        assert_eq!(feed.behind_first(), own(&[("two ", false), ("three", true)]));
    }
}
