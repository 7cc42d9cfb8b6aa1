//! What a model writes for the eye, taken out of what is said.
//!
//! A state machine over characters: the same text gives the same, however it comes in pieces. What it holds back is
//! bounded, and each character is looked at a few times at most, whatever the text.
//!
//! | written | said |
//! | --- | --- |
//! | a fence of code | nothing, or what the configuration says in its place |
//! | `` `code` ``, `**bold**`, `_emphasis_`, headings, quotes | the words |
//! | `~~struck~~` | nothing: it no longer holds |
//! | list items, rows of a table | short ones behind commas or semicolons, long ones as sentences; cells behind commas |
//! | a line of hyphens, the second row of a table | a pause |
//! | `[text](url)`, `![alt](url)` | the text |
//! | `<https://…>`, bare addresses | the address, which the rules of reading say |
//! | `[^1]`, `word[3]`, `【4†source】`, `- [ ]` | nothing |
//! | emoji with all that belongs to one | nothing; the digit of a keycap stays |
//!
//! # Why
//! - **Not a Markdown parser**: a parser wants the whole text, and somebody listens. What it would see later (which
//!   lines are a table, whether a bracket is a link) is decided from the first characters or by a bounded look-ahead.
//! - **An opening that is never closed is text**: what looked like the beginning of a link is said as it was written.
//! - **Brackets that are no link stay**: some voices understand tags.

mod held;
mod writer;

use self::held::{Held, Verdict};
pub(super) use self::writer::PARAGRAPH;
use self::writer::{Gap, Writer};
use super::is_dense;

/// Longest run of characters that can mark a line: six for a heading, more for a rule or a fence.
const LONGEST_MARKER: usize = 6;
/// Digits of the number of a list item.
const NUMBER: usize = 3;
/// Longest line behind an opening fence that may turn out to be code in the midst of a text.
const LONGEST_INFO: usize = 200;
/// Links inside of links: an image may be one.
const DEEPEST: u8 = 2;

/// Removes what should not be read aloud, across pieces.
#[derive(Debug, Default)]
pub(super) struct Cleaner {
    said: Writer,
    line: Line,
    block: Block,
    /// What is not decided yet.
    held: Option<Held>,
    /// A run of `*`, `_` or `~` whose next character decides.
    run: Option<(char, usize)>,
    code: Code,
    /// A backslash, or a bar behind white space, whose next character decides.
    pending: Option<char>,
    /// Nothing that would be held is looked for.
    plain: bool,
    /// Links around what is read.
    depth: u8,
    /// Said in place of a block of code.
    in_place_of_code: String,
}

/// Where in its line a character is.
#[derive(Debug)]
struct Line {
    /// Only white space and markers so far, in a table since the last bar.
    start: bool,
    kind: Kind,
    /// What may mark it, at its start.
    lead: String,
    /// Hyphens, or what else rules a page.
    rule: bool,
    /// The line before was one of a list.
    after_item: bool,
    /// Inside `<https://…`.
    address: bool,
}

impl Default for Line {
    fn default() -> Self {
        Self { start: true, kind: Kind::Text, lead: String::new(), rule: false, after_item: false, address: false }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Text,
    Heading,
    Item,
    Row,
}

/// Code in the midst of a text.
#[derive(Debug, Default)]
struct Code {
    /// Backquotes that opened it and will close it; none: it is no code.
    open: usize,
    /// Backquotes that were just written.
    ticks: usize,
}

/// Lines of code.
#[derive(Debug, Default)]
enum Block {
    #[default]
    None,
    /// Behind an opening fence, on its line: a block of code, unless another fence ends it there.
    Opening { sign: char, length: usize, info: String },
    /// Of code. `closing`: signs of a fence since the line began, `None` where it cannot be one.
    Code { sign: char, length: usize, closing: Option<Closing> },
}

#[derive(Clone, Copy, Debug, Default)]
struct Closing {
    signs: usize,
    /// White space behind them.
    over: bool,
}

impl Cleaner {
    /// `in_place_of_code` is said for each block of code; may be empty.
    pub(super) fn new(in_place_of_code: &str) -> Self {
        Self { in_place_of_code: in_place_of_code.trim().to_owned(), ..Self::default() }
    }

    /// Appends what is said of the next piece to `out`.
    pub(super) fn clean(&mut self, piece: &str, out: &mut String) {
        for c in piece.chars() {
            self.take(c, out);
        }
    }

    /// Whether something is held back until more comes.
    pub(super) fn is_holding(&self) -> bool {
        self.held.as_ref().is_some_and(|held| !matches!(held, Held::Target(_)))
            || self.line.lead.starts_with(|c: char| c.is_ascii_digit())
    }

    /// Nothing more comes for a while: what is held back is text.
    pub(super) fn give_up(&mut self, out: &mut String) {
        if let Some(held) = self.held.take_if(|held| !matches!(held, Held::Target(_))) {
            self.refuse(held, out);
        }
        if self.line.lead.starts_with(|c: char| c.is_ascii_digit()) {
            self.unmark(' ', out);
        }
    }

    /// The text is complete: what waited for its next character is decided.
    pub(super) fn finish(&mut self, out: &mut String) {
        self.give_up(out);
        self.end_line(out);
        *self = Self::new(&std::mem::take(&mut self.in_place_of_code));
    }

    fn take(&mut self, c: char, out: &mut String) {
        let c = if matches!(c, '\u{2028}' | '\u{2029}') { '\n' } else { c };
        if !matches!(self.block, Block::None) {
            return self.skip_code(c, out);
        }
        if let Some(mut held) = self.held.take() {
            let verdict = held.push(c);
            return self.decide(held, verdict, c, out);
        }
        match c {
            '\n' => self.end_line(out),
            c if c.is_whitespace() => self.blank(out),
            '\u{feff}' | '\u{ad}' | '\u{200b}' => {}
            c if c.is_control() => {}
            c => self.visible(c, out),
        }
    }

    /// What was held and `c` behind it.
    fn decide(&mut self, held: Held, verdict: Verdict, c: char, out: &mut String) {
        match verdict {
            Verdict::More => self.held = Some(held),
            Verdict::Text => {
                self.refuse(held, out);
                self.take(c, out);
            }
            Verdict::Nothing { taken } => {
                match &held {
                    Held::Target(target) if target.is_spaced() => self.said.space(out),
                    Held::Target(_) => {}
                    _ => self.said.leave_out(),
                }
                if !taken {
                    self.take(c, out);
                }
            }
            Verdict::Link { text, image, target } => {
                if image {
                    self.said.take_back('!', out);
                }
                let (plain, depth) = (self.plain, self.depth);
                self.depth += 1;
                self.plain |= self.depth > DEEPEST;
                for c in text.chars() {
                    self.take(c, out);
                }
                (self.plain, self.depth) = (plain, depth);
                if text.is_empty() {
                    self.said.leave_out();
                }
                if let Some(target) = target {
                    // What the text left open is no more than text.
                    if let Some(held) = self.held.take() {
                        self.refuse(held, out);
                    }
                    self.held = Some(Held::Target(target));
                }
            }
            Verdict::Break => match self.line.kind {
                Kind::Row => self.said.gap(Gap::Cell),
                _ => self.said.gap(Gap::Space),
            },
            Verdict::Address(scheme) => {
                self.line.address = true;
                scheme.chars().for_each(|c| self.said.write(c, out));
            }
        }
    }

    /// What was held is no markup: its words are said.
    fn refuse(&mut self, held: Held, out: &mut String) {
        let plain = std::mem::replace(&mut self.plain, true);
        for c in held.written().chars() {
            self.take(c, out);
        }
        self.plain = plain;
    }

    /// White space that is no line break.
    fn blank(&mut self, out: &mut String) {
        if self.line.start {
            if !self.line.lead.is_empty() {
                self.mark(out);
            }
            return;
        }
        self.line.address = false;
        if !self.release(' ', out) {
            self.said.space(out);
        }
    }

    fn end_line(&mut self, out: &mut String) {
        if self.line.start && !self.line.lead.is_empty() {
            let (first, length) = self.lead();
            match first {
                '`' | '~' if length >= 3 => return self.open_code(out),
                '-' | '*' | '_' | '=' if length >= 3 => self.line.rule = true,
                '0'..='9' => _ = self.unmark(' ', out),
                _ => {}
            }
        } else {
            self.release('\n', out);
        }
        self.code = Code::default();
        let line = std::mem::take(&mut self.line);
        let empty = line.start && line.kind == Kind::Text && line.lead.is_empty();
        self.said.gap(match line.kind {
            _ if line.rule || empty || line.kind == Kind::Heading => Gap::Paragraph,
            Kind::Row => Gap::Row,
            _ => Gap::Space,
        });
        self.line.after_item = line.kind == Kind::Item || (empty && line.after_item);
    }

    fn visible(&mut self, c: char, out: &mut String) {
        if self.line.start && self.begins(c, out) {
            return;
        }
        self.line.start = false;
        self.inline(c, out);
    }

    /// The first sign of what may mark the line, and how many signs there are.
    fn lead(&self) -> (char, usize) {
        let mut signs = self.line.lead.chars();
        (signs.next().unwrap_or(' '), 1 + signs.count())
    }

    /// Takes `c` at the start of a line or a cell, if it may belong to a marker.
    fn begins(&mut self, c: char, out: &mut String) -> bool {
        let row = self.line.kind == Kind::Row;
        let lead = self.line.lead.as_str();
        let joins = match (lead.chars().next(), c) {
            (None, '#' | '>' | '-' | '+' | '*' | '_' | '=' | '`' | '~' | '0'..='9') => true,
            (None | Some('-'), ':') | (Some(':'), '-') => row,
            (Some('-' | '='), '>') => true,
            (Some('0'..='9'), '0'..='9') => lead.len() < NUMBER && lead.chars().all(|c| c.is_ascii_digit()),
            (Some('0'..='9'), '.' | ')') => lead.chars().all(|c| c.is_ascii_digit()),
            (Some('0'..='9'), '\u{fe0f}' | '\u{20e3}') => true,
            (Some(first), c) => first == c,
            (None, _) => false,
        };
        if joins {
            if lead.chars().count() < LONGEST_MARKER {
                self.line.lead.push(c);
            }
            return true;
        }
        match c {
            '|' if lead.is_empty() || is_ruled(lead) => {
                let first = !row;
                self.line.lead.clear();
                self.line.kind = Kind::Row;
                self.said.gap(if first { Gap::Row } else { Gap::Cell });
                true
            }
            '•' | '◦' | '‣' | '▪' | '●' | '○' if lead.is_empty() => {
                self.item();
                true
            }
            // What an emoji stands before is an item, too.
            c if lead.is_empty() && !row && is_picture(c) => {
                self.item();
                true
            }
            c => !lead.is_empty() && self.unmark(c, out),
        }
    }

    fn item(&mut self) {
        self.line.kind = Kind::Item;
        self.said.gap(Gap::Item);
    }

    /// White space is behind what the line begins with: it is a marker, if it can be one.
    fn mark(&mut self, out: &mut String) {
        let (first, length) = self.lead();
        let lead = self.line.lead.as_str();
        if self.line.kind == Kind::Row && is_ruled(lead) {
            return self.line.lead.clear();
        }
        match first {
            '`' | '~' if length >= 3 => _ = self.unmark(' ', out),
            '#' => {
                (self.line.start, self.line.kind) = (false, Kind::Heading);
                self.said.gap(Gap::Paragraph);
            }
            '-' | '+' | '*' if length == 1 => self.item(),
            '-' | '*' | '_' | '=' if length >= 3 => self.line.rule = true,
            '-' | '+' | '*' | '>' => {}
            '0'..='9' if lead.ends_with(|c: char| !c.is_ascii_digit()) => {
                let number: String = lead.chars().take_while(char::is_ascii_digit).collect();
                let sign = if lead.contains(')') { ')' } else { '.' };
                // As in CommonMark: in the midst of a paragraph only a first item begins a list.
                if number == "1" || self.line.after_item || self.said.is_apart() || lead.contains('\u{20e3}') {
                    self.item();
                    // Behind a comma its full stop would end a sentence.
                    self.said.gap(Gap::Paragraph);
                }
                self.line.start = false;
                number.chars().chain([sign]).for_each(|c| self.said.write(c, out));
                self.said.space(out);
            }
            _ => {
                self.unmark(' ', out);
                self.blank(out);
            }
        }
        self.line.lead.clear();
    }

    /// What looked like a marker belongs to the text: "-5", "#1", "**bold**". Whether it took `next`, too.
    fn unmark(&mut self, next: char, out: &mut String) -> bool {
        let (first, length) = self.lead();
        let lead = std::mem::take(&mut self.line.lead);
        self.line.start = false;
        match first {
            '`' | '~' if length >= 3 => {
                let info = String::from(next);
                self.block = Block::Opening { sign: first, length, info };
                return true;
            }
            '`' => self.code.ticks = length,
            '*' | '_' | '~' => self.run = Some((first, length)),
            // A quotation, but no comparison.
            '>' if next.is_alphabetic() || matches!(next, '"' | '“' | '\'' | '*' | '_' | '[') => {}
            _ => {
                for c in lead.chars().filter(|c| !matches!(c, '\u{fe0f}' | '\u{20e3}')) {
                    self.said.write(c, out);
                }
            }
        }
        false
    }

    /// A character of the text.
    fn inline(&mut self, c: char, out: &mut String) {
        if self.code.ticks > 0 && c != '`' {
            self.close_ticks(c);
        }
        if self.code.open > 0 && c != '`' {
            return self.put(c, out);
        }
        match c {
            '`' if self.pending != Some('\\') => {
                if !self.release(c, out) {
                    self.code.ticks += 1;
                }
            }
            '*' | '_' | '~' if self.pending != Some('\\') => match &mut self.run {
                Some((sign, length)) if *sign == c => *length += 1,
                _ => {
                    if !self.release(c, out) {
                        self.run = Some((c, 1));
                    }
                }
            },
            _ if self.release(c, out) => {}
            '\\' => self.pending = Some(c),
            '|' if self.line.kind == Kind::Row => {
                self.said.gap(Gap::Cell);
                self.line.start = true;
            }
            '|' if self.said.is_spaced() && !self.plain => self.pending = Some(c),
            '•' if self.said.is_spaced() => self.said.gap(Gap::Cell),
            '[' if !self.plain => {
                let item = self.line.kind == Kind::Item && self.said.is_apart();
                self.held = Some(Held::link(self.said.follows('!'), self.said.is_attached(), item));
            }
            '<' if !self.plain => self.held = Some(Held::tag()),
            '【' if !self.plain => self.held = Some(Held::source()),
            '>' if std::mem::take(&mut self.line.address) => {}
            c => self.put(c, out),
        }
    }

    /// Writes `c`, unless it is a picture or belongs to one.
    fn put(&mut self, c: char, out: &mut String) {
        // Between letters it shapes them.
        let joiner = c == '\u{200d}' && self.said.has_left_out();
        if is_picture(c) || joiner {
            return self.said.leave_out();
        }
        self.said.write(c, out);
    }

    /// Decides on what waits for its next character, which is `next`; whether that is taken with it.
    fn release(&mut self, next: char, out: &mut String) -> bool {
        if self.code.ticks > 0 && next != '`' {
            self.close_ticks(next);
        }
        match self.pending.take() {
            Some('\\') if next.is_ascii_punctuation() => {
                self.said.write(next, out);
                return true;
            }
            Some('\\') if next == '\n' => {}
            Some('|') if next.is_whitespace() => {
                self.said.gap(Gap::Cell);
                return true;
            }
            Some(sign) => self.said.write(sign, out),
            None => {}
        }
        let Some((sign, length)) = self.run.take() else { return false };
        let joined = self.said.is_joined();
        if sign == '~' {
            if length == 2 && !self.plain && !joined && !next.is_whitespace() {
                let mut held = Held::struck();
                let verdict = held.push(next);
                self.decide(held, verdict, next, out);
                return true;
            }
            (0..length).for_each(|_| self.said.write(sign, out));
            return false;
        }
        let last = self.said.last();
        let digits = last.is_some_and(|c| c.is_ascii_digit()) && next.is_ascii_digit();
        // Scripts without spaces set emphasis between characters.
        let dense = is_dense(next) || last.is_some_and(is_dense);
        let within = joined && next.is_alphanumeric() && !dense;
        let apart = self.said.is_spaced() && next.is_whitespace();
        match (sign, length) {
            // A power, as programmers write it.
            ('*', 2) if joined && digits => self.said.write('^', out),
            ('*', 1) if within || apart => self.said.write(sign, out),
            ('_', _) if within => (0..length).for_each(|_| self.said.write(sign, out)),
            _ => {}
        }
        false
    }

    /// Backquotes end before `next`: they open code or close it. One between letters is an apostrophe.
    fn close_ticks(&mut self, next: char) {
        let ticks = std::mem::take(&mut self.code.ticks);
        if self.code.open == ticks {
            self.code.open = 0;
        } else if self.code.open == 0 && !(self.said.is_joined() && next.is_alphanumeric()) {
            self.code.open = ticks;
        }
    }

    /// The line that a fence opens is over.
    fn open_code(&mut self, out: &mut String) {
        let (sign, length) = match std::mem::take(&mut self.block) {
            Block::Opening { sign, length, .. } => (sign, length),
            _ => self.lead(),
        };
        self.block = Block::Code { sign, length, closing: Some(Closing::default()) };
        self.said.gap(Gap::Paragraph);
        let instead = std::mem::take(&mut self.in_place_of_code);
        instead.chars().for_each(|c| self.said.write(if c.is_whitespace() { ' ' } else { c }, out));
        self.in_place_of_code = instead;
        self.said.gap(Gap::Paragraph);
    }

    /// A character of a block of code, or of the line that opens one.
    fn skip_code(&mut self, c: char, out: &mut String) {
        match &mut self.block {
            Block::None => {}
            Block::Opening { .. } if c == '\n' => self.open_code(out),
            Block::Opening { sign: '`', length, info } if c == '`' => {
                let (length, info) = (*length, std::mem::take(info));
                self.block = Block::None;
                self.line.start = false;
                self.code = Code { open: length, ticks: 0 };
                info.chars().filter(|c| !c.is_control()).for_each(|c| match c.is_whitespace() {
                    true => self.said.space(out),
                    false => self.put(c, out),
                });
                self.code.ticks = 1;
            }
            Block::Opening { info, .. } => {
                info.push(c);
                if info.len() > LONGEST_INFO {
                    self.open_code(out);
                    if let Block::Code { closing, .. } = &mut self.block {
                        *closing = None;
                    }
                }
            }
            Block::Code { length, closing, .. } if c == '\n' => {
                if closing.is_some_and(|closing| closing.signs >= *length) {
                    (self.block, self.line) = (Block::None, Line::default());
                } else {
                    *closing = Some(Closing::default());
                }
            }
            Block::Code { sign, closing, .. } => {
                let signs = closing.map_or(0, |closing| closing.signs);
                *closing = match closing {
                    Some(closing) if c == *sign && !closing.over => {
                        Some(Closing { signs: (closing.signs + 1).min(LONGEST_MARKER), over: false })
                    }
                    Some(_) if c.is_whitespace() => Some(Closing { signs, over: signs > 0 }),
                    _ => None,
                };
            }
        }
    }
}

/// Whether `lead` is what rules a table, or stands in a cell for nothing.
fn is_ruled(lead: &str) -> bool {
    !lead.is_empty() && lead.chars().all(|c| matches!(c, '-' | ':' | '=' | '_'))
}

/// Whether `c` is an emoji, or belongs to one.
///
/// Unicode's `Extended_Pictographic` (UTS #51) in the blocks that hold pictures, with what changes or joins them; not the
/// signs of other blocks that have the property, too (©, ™, ↔), nor the numbers in circles, which are said.
fn is_picture(c: char) -> bool {
    matches!(c as u32,
        0x2600..=0x2775 | 0x2794..=0x27bf
        | 0x231a | 0x231b | 0x2328 | 0x23cf | 0x23e9..=0x23f3 | 0x23f8..=0x23fa
        | 0x25b6 | 0x25c0 | 0x25fb..=0x25fe | 0x2934 | 0x2935 | 0x2b05..=0x2b07 | 0x2b1b | 0x2b1c | 0x2b50 | 0x2b55
        | 0x3030 | 0x303d
        | 0x1f000..=0x1f0ff | 0x1f170..=0x1f2ff | 0x1f300..=0x1faff
        // Selectors, the frame of a keycap, tags of flags.
        | 0xfe0e | 0xfe0f | 0x20e3 | 0xe0001..=0xe007f)
}
