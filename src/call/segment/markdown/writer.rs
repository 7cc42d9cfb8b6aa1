//! What is said, with one space between words and the pauses that lines make.

use super::super::{is_dense, is_terminator};

/// Stands for an empty line in cleaned text. Cannot come from outside: it is white space there.
pub(in super::super) const PARAGRAPH: char = '\u{b}';

/// Letters from which a list item or a row is a sentence of its own: voices do badly on single words.
const SENTENCE: usize = 12;

/// What lies between the last word and the next, each more than the one before.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Gap {
    #[default]
    None,
    /// A line break.
    Space,
    /// Of a table.
    Cell,
    /// Of a list.
    Item,
    /// Of a table.
    Row,
    /// An empty line.
    Paragraph,
}

/// Writes what is said.
#[derive(Debug)]
pub(super) struct Writer {
    gap: Gap,
    /// White space was written last, or nothing.
    spaced: bool,
    /// The last character that is none.
    last: Option<char>,
    /// Letters since the last pause of a line.
    length: usize,
    /// Something was left out since the last character.
    left_out: bool,
}

impl Default for Writer {
    fn default() -> Self {
        Self { gap: Gap::None, spaced: true, last: None, length: 0, left_out: false }
    }
}

impl Writer {
    /// At least this much lies before the next character.
    pub(super) fn gap(&mut self, gap: Gap) {
        self.gap = self.gap.max(gap);
    }

    /// Something is not said.
    pub(super) fn leave_out(&mut self) {
        self.left_out = true;
    }

    /// Something was, right before the next character.
    pub(super) fn has_left_out(&self) -> bool {
        self.left_out
    }

    /// Nothing, a gap or white space is before the next character.
    pub(super) fn is_spaced(&self) -> bool {
        self.spaced || self.gap != Gap::None
    }

    /// A paragraph, an item, a row or the text begins.
    pub(super) fn is_apart(&self) -> bool {
        self.last.is_none() || self.gap >= Gap::Item
    }

    /// A letter or a digit is right before the next character.
    pub(super) fn is_joined(&self) -> bool {
        self.is_attached() && self.last.is_some_and(char::is_alphanumeric)
    }

    /// Something is right before the next character.
    pub(super) fn is_attached(&self) -> bool {
        !self.is_spaced()
    }

    /// `c` is right before the next character.
    pub(super) fn follows(&self, c: char) -> bool {
        self.is_attached() && self.last == Some(c)
    }

    /// The last character that is no white space.
    pub(super) fn last(&self) -> Option<char> {
        self.last
    }

    /// Takes back `c`, if it was written last and is still there.
    pub(super) fn take_back(&mut self, c: char, out: &mut String) {
        if self.follows(c) && out.ends_with(c) {
            out.pop();
            self.last = out.trim_end().chars().next_back().or(self.last);
            self.spaced = out.is_empty() || out.ends_with(char::is_whitespace);
        }
    }

    pub(super) fn space(&mut self, out: &mut String) {
        if !self.is_spaced() {
            out.push(' ');
            self.spaced = true;
        }
    }

    pub(super) fn write(&mut self, c: char, out: &mut String) {
        if c == ' ' {
            return self.space(out);
        }
        self.close_gap(c, out);
        // "Great 🎉!"
        if std::mem::take(&mut self.left_out) && self.spaced && is_closing(c) && out.ends_with(' ') {
            out.pop();
        }
        out.push(c);
        self.length += if is_dense(c) { 3 } else { 1 };
        (self.spaced, self.last) = (false, Some(c));
    }

    fn close_gap(&mut self, next: char, out: &mut String) {
        let gap = std::mem::take(&mut self.gap);
        let Some(last) = self.last.filter(|_| gap != Gap::None) else { return };
        self.left_out = false;
        let length = self.length;
        if gap >= Gap::Item {
            self.length = 0;
        }
        let waits = !out.trim().is_empty();
        let pause = match gap {
            _ if !waits => None,
            Gap::None | Gap::Space => None,
            Gap::Paragraph => Some(PARAGRAPH),
            Gap::Item | Gap::Row if is_terminator(last) || (length >= SENTENCE && !is_clause(last)) => Some(PARAGRAPH),
            _ if is_terminator(last) || is_clause(last) => None,
            Gap::Row => Some(if is_dense(last) { '；' } else { ';' }),
            Gap::Cell | Gap::Item => Some(if is_dense(last) { '，' } else { ',' }),
        };
        let Some(pause) = pause else {
            let joined = is_dense(last) && is_dense(next);
            if !self.spaced && !joined {
                out.push(' ');
            }
            return;
        };
        if out.ends_with(' ') {
            out.pop();
        }
        out.push(pause);
        if !is_dense(pause) && pause != PARAGRAPH {
            out.push(' ');
        }
    }
}

/// Ends a clause: no comma is needed behind it.
fn is_clause(c: char) -> bool {
    matches!(c, ',' | ';' | ':' | '—' | '–' | '，' | '、' | '；' | '：')
}

/// Stands at the end of a word.
fn is_closing(c: char) -> bool {
    matches!(c, '.' | ',' | '!' | '?' | ';' | ':' | '…' | ')' | '。' | '，' | '！' | '？')
}
