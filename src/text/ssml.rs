//! A subset of SSML 1.1, parsed as it is written: a tag may be split over pieces of text anywhere.
//!
//! `speak, break, say-as, sub, phoneme, prosody` (`rate`, `volume`), `lang, mark, emphasis, p, s`. A mistake is told and
//! costs its own tag; the words around it are spoken.
//!
//! # Why
//! - **A parser of its own**: an XML parser wants the whole document, and a document without mistakes. Of a text that is
//!   spoken while a model writes it there is neither.
//! - **What has its place inside a sentence is one private character in the text** until the sentence is cut, so that the
//!   segmenter needs to know nothing of markup ([`Inlines`]). What changes how the voice speaks ends a sentence.
//! - **Bounded**: a tag has at most [`LONGEST_TAG`] bytes, elements are at most [`DEEPEST`] deep, and what is in an element
//!   that is said otherwise has at most [`LONGEST_INLINE`] bytes.

mod values;

use std::collections::BTreeMap;
use std::time::Duration;

use self::values::{attributes_of, break_of, decoded, gain_of, rate_of};
use super::given::{Given, Say};
use super::ipa::{are_phonemes, mnemonics};
use super::pinyin;
use super::say_as::SayAs;
use super::scan::floor;
use crate::turn::Phonemes;

/// Bytes of a tag or a comment.
const LONGEST_TAG: usize = 2_048;
/// Bytes of an entity: "&#x10FFFF;".
const LONGEST_ENTITY: usize = 10;
/// Elements within elements.
const DEEPEST: usize = 32;
/// Bytes of what is said otherwise.
const LONGEST_INLINE: usize = 512;
/// Bytes of the name of a mark.
const LONGEST_NAME: usize = 128;

/// Private characters of pieces that are written, and of places that are not.
const WRITTEN: std::ops::Range<u32> = 0xf_0100..0xf_8000;
const PLACES: std::ops::Range<u32> = 0xf_8000..0xf_ff00;

/// Whether `c` stands for a piece of text.
pub fn is_inline(c: char) -> bool {
    WRITTEN.contains(&(c as u32)) || is_place(c)
}

/// Whether `c` stands for a place between words.
pub fn is_place(c: char) -> bool {
    PLACES.contains(&(c as u32))
}

/// How the voice speaks where markup says so.
#[derive(Clone, Debug, PartialEq)]
pub struct Manner {
    /// BCP 47 language.
    pub language: Option<String>,
    /// Times the turn's own rate.
    pub rate: f32,
    /// Times the turn's own amplitude.
    pub gain: f32,
}

impl Default for Manner {
    fn default() -> Self {
        Self { language: None, rate: 1.0, gain: 1.0 }
    }
}

/// What was read of a text.
#[derive(Clone, Debug, PartialEq)]
pub enum Event {
    /// Text to speak, with private characters in it that [`Inlines`] knows.
    Text(String),
    /// What follows is spoken like this.
    Manner(Manner),
    /// Silence.
    Break(Duration),
    /// A mistake, and what to change. The text goes on without the tag.
    Mistake(String),
}

/// What the private characters of a text stand for.
#[derive(Debug, Default)]
pub struct Inlines {
    known: BTreeMap<char, (String, Say)>,
    written: u32,
    places: u32,
}

impl Inlines {
    fn add(&mut self, written: String, say: Say) -> char {
        let (range, count) = if written.is_empty() { (PLACES, &mut self.places) } else { (WRITTEN, &mut self.written) };
        let code = range.start + *count % (range.end - range.start);
        *count += 1;
        // Both ranges lie in a plane that has no surrogates.
        let c = char::from_u32(code).unwrap_or(char::REPLACEMENT_CHARACTER);
        self.known.insert(c, (written, say));
        c
    }

    /// `text` as it was written, and what is said otherwise. What it knew of it is forgotten.
    pub fn expand(&mut self, text: &str) -> (String, Vec<Given>) {
        if !text.contains(is_inline) {
            return (text.to_owned(), Vec::new());
        }
        let (mut expanded, mut given) = (String::with_capacity(text.len()), Vec::new());
        for c in text.chars() {
            match self.known.remove(&c) {
                Some((written, say)) => {
                    let from = expanded.len();
                    expanded.push_str(&written);
                    given.push(Given { at: from..expanded.len(), say });
                }
                None if is_inline(c) => {}
                None => expanded.push(c),
            }
        }
        (expanded, given)
    }
}

/// Reads one text.
#[derive(Debug)]
pub struct Ssml {
    state: State,
    /// The tag or the entity that is being read.
    buffer: String,
    open: Vec<Open>,
    /// Elements that are open within the deepest that count.
    deeper: usize,
    /// What is being read to be said otherwise.
    capture: Option<Capture>,
    manner: Manner,
    /// What the text's private characters stand for.
    pub inlines: Inlines,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Text,
    Entity,
    /// In a tag, within these quotes.
    Tag(Option<char>),
    Comment,
    /// In `<![CDATA[`: no sign is markup before `]]>`.
    Verbatim,
    /// In a tag that is too long.
    Skip,
}

#[derive(Debug)]
struct Open {
    name: String,
    /// The manner before it.
    before: Option<Manner>,
    /// Tag of the voice at its end.
    tag: Option<&'static str>,
}

#[derive(Debug)]
struct Capture {
    say: Say,
    text: String,
}

impl Default for Ssml {
    fn default() -> Self {
        Self {
            state: State::Text,
            buffer: String::new(),
            open: Vec::new(),
            deeper: 0,
            capture: None,
            manner: Manner::default(),
            inlines: Inlines::default(),
        }
    }
}

impl Ssml {
    /// Takes the next piece; appends what was read to `out`.
    pub fn push(&mut self, piece: &str, out: &mut Vec<Event>) {
        for c in piece.chars() {
            match self.state {
                State::Text => self.text(c, out),
                State::Entity => self.entity(c, out),
                State::Tag(quote) => self.tag(c, quote, out),
                State::Comment => {
                    self.buffer.push(c);
                    if self.buffer.ends_with("-->") {
                        self.begin(State::Text);
                    } else if self.buffer.len() > LONGEST_TAG {
                        // Of a comment only its end counts.
                        let tail: String = self.buffer.chars().rev().take(2).collect();
                        self.buffer = tail.chars().rev().collect();
                    }
                }
                State::Verbatim => self.verbatim(c, out),
                State::Skip if c == '>' => self.begin(State::Text),
                State::Skip => {}
            }
        }
    }

    /// The text is complete.
    pub fn finish(&mut self, out: &mut Vec<Event>) {
        match self.state {
            State::Text => {}
            State::Entity => {
                let entity = std::mem::take(&mut self.buffer);
                self.say(&entity, out);
            }
            State::Verbatim => {
                mistake(out, "`<![CDATA[` is never closed by `]]>`".into());
                let rest = std::mem::take(&mut self.buffer);
                self.say(&rest, out);
            }
            State::Tag(_) | State::Comment | State::Skip => {
                mistake(out, format!("`<{}` is never closed by `>`", cut(&self.buffer)));
            }
        }
        self.begin(State::Text);
        self.close_capture(out);
        if let Some(open) = self.open.iter().rev().find(|open| open.name != "speak") {
            mistake(out, format!("`<{}>` is never closed: end it with `</{}>`", open.name, open.name));
        }
        while let Some(open) = self.open.pop() {
            self.leave(open, out);
        }
    }

    fn begin(&mut self, state: State) {
        self.state = state;
        self.buffer.clear();
    }

    fn text(&mut self, c: char, out: &mut Vec<Event>) {
        match c {
            '<' => self.begin(State::Tag(None)),
            '&' => self.begin(State::Entity),
            c if is_inline(c) => {}
            c => self.say(c.encode_utf8(&mut [0; 4]), out),
        }
    }

    fn entity(&mut self, c: char, out: &mut Vec<Event>) {
        if c == ';' {
            let entity = std::mem::take(&mut self.buffer);
            self.state = State::Text;
            match decoded(&entity) {
                Some(c) => self.say(c.encode_utf8(&mut [0; 4]), out),
                None => self.say(&format!("&{entity};"), out),
            }
        } else if self.buffer.len() < LONGEST_ENTITY && (c.is_ascii_alphanumeric() || c == '#') {
            self.buffer.push(c);
        } else {
            // An ampersand that is one: "AT&T", "you & me".
            let text = format!("&{}", std::mem::take(&mut self.buffer));
            self.state = State::Text;
            self.say(&text, out);
            self.text(c, out);
        }
    }

    fn tag(&mut self, c: char, quote: Option<char>, out: &mut Vec<Event>) {
        if self.buffer.is_empty() && !(c.is_ascii_alphabetic() || matches!(c, '/' | '!' | '?')) {
            // A sign that compares: "a < b".
            self.state = State::Text;
            self.say("<", out);
            return self.text(c, out);
        }
        match (c, quote) {
            ('>', None) => {
                let tag = std::mem::take(&mut self.buffer);
                self.state = State::Text;
                return self.read_tag(&tag, out);
            }
            ('<', None) => {
                mistake(out, format!("`<{}` is not closed by `>` before the next `<`", cut(&self.buffer)));
                return self.begin(State::Tag(None));
            }
            ('"' | '\'', None) => self.state = State::Tag(Some(c)),
            (c, Some(quote)) if c == quote => self.state = State::Tag(None),
            _ => {}
        }
        self.buffer.push(c);
        if self.buffer == "!--" {
            self.begin(State::Comment);
        } else if self.buffer == "![CDATA[" {
            self.begin(State::Verbatim);
        } else if self.buffer.len() > LONGEST_TAG {
            mistake(out, format!("the tag `<{}` is longer than {LONGEST_TAG} bytes", cut(&self.buffer)));
            self.begin(State::Skip);
        }
    }

    fn verbatim(&mut self, c: char, out: &mut Vec<Event>) {
        const END: &str = "]]>";
        self.buffer.push(c);
        while !END.starts_with(&self.buffer) {
            let c = self.buffer.remove(0);
            if !is_inline(c) {
                self.say(c.encode_utf8(&mut [0; 4]), out);
            }
        }
        if self.buffer == END {
            self.begin(State::Text);
        }
    }

    fn say(&mut self, text: &str, out: &mut Vec<Event>) {
        if let Some(capture) = &mut self.capture {
            capture.text.push_str(text);
            if capture.text.len() > LONGEST_INLINE {
                mistake(out, format!("an element that is said otherwise has at most {LONGEST_INLINE} bytes of text"));
                let text = self.capture.take().map(|capture| capture.text).unwrap_or_default();
                push_text(&text, out);
            }
            return;
        }
        push_text(text, out);
    }

    fn close_capture(&mut self, out: &mut Vec<Event>) {
        let Some(Capture { say, text }) = self.capture.take() else { return };
        if text.trim().is_empty() {
            return;
        }
        let c = self.inlines.add(text, say);
        push_text(c.encode_utf8(&mut [0; 4]), out);
    }

    fn place(&mut self, say: Say, out: &mut Vec<Event>) {
        let c = self.inlines.add(String::new(), say);
        push_text(c.encode_utf8(&mut [0; 4]), out);
    }

    fn read_tag(&mut self, tag: &str, out: &mut Vec<Event>) {
        if tag.starts_with(['!', '?']) {
            return;
        }
        if let Some(name) = tag.strip_prefix('/') {
            return self.end(name.trim(), out);
        }
        let (tag, empty) = tag.strip_suffix('/').map_or((tag, false), |tag| (tag, true));
        let split = tag.find(|c: char| c.is_whitespace()).unwrap_or(tag.len());
        let (name, attributes) = tag.split_at(split);
        let attributes = match attributes_of(attributes) {
            Ok(attributes) => attributes,
            Err(error) => {
                mistake(out, format!("`<{}>`: {error}", cut(tag)));
                BTreeMap::new()
            }
        };
        if self.open.len() >= DEEPEST && !empty {
            // Its end is its own, and not that of an element around it with the same name.
            self.deeper += 1;
            return mistake(out, format!("`<{name}>`: elements are nested more than {DEEPEST} deep"));
        }
        if self.capture.is_some() {
            mistake(out, format!("`<{name}>` inside an element that is said otherwise: only text may stand there"));
        } else if let Err(error) = self.element(name, &attributes, empty, out) {
            mistake(out, format!("`<{name}>`: {error}"));
        } else {
            return;
        }
        if !empty {
            self.open.push(Open { name: name.to_owned(), before: None, tag: None });
        }
    }

    /// Begins an element; one with an end is open afterwards.
    fn element(
        &mut self,
        name: &str,
        attributes: &BTreeMap<String, String>,
        empty: bool,
        out: &mut Vec<Event>,
    ) -> Result<(), String> {
        let attribute = |name: &str| attributes.get(name).map(String::as_str);
        let needed = |name: &str| attribute(name).ok_or_else(|| format!("needs the attribute `{name}`"));
        let mut open = Open { name: name.to_owned(), before: None, tag: None };
        match name {
            "speak" | "lang" => {
                let language = match (name, attribute("xml:lang").or(attribute("lang"))) {
                    ("lang", None) => return Err("needs the attribute `xml:lang`".into()),
                    (_, language) => language,
                };
                if let Some(language) = language {
                    let tag = |c: char| c.is_ascii_alphanumeric() || c == '-' || c == '_';
                    if language.is_empty() || language.len() > 35 || !language.chars().all(tag) {
                        return Err(format!(
                            "xml:lang=\"{}\": expected a BCP 47 tag such as de or pt-BR",
                            cut(language)
                        ));
                    }
                    let manner = Manner { language: Some(language.to_owned()), ..self.manner.clone() };
                    open.before = Some(self.change(manner, out));
                }
            }
            "p" | "s" => push_text("\n\n", out),
            "break" => out.push(Event::Break(break_of(attribute("time"), attribute("strength"))?)),
            "mark" => {
                let name = needed("name")?;
                if name.is_empty() || name.len() > LONGEST_NAME {
                    return Err(format!("the name of a mark has 1 to {LONGEST_NAME} bytes"));
                }
                self.place(Say::Mark(name.to_owned()), out);
            }
            "prosody" => {
                let mut manner = self.manner.clone();
                if let Some(rate) = attribute("rate") {
                    manner.rate = (manner.rate * rate_of(rate)?).clamp(0.25, 4.0);
                }
                if let Some(volume) = attribute("volume") {
                    manner.gain = (manner.gain * gain_of(volume)?).clamp(0.0, 4.0);
                }
                if let Some(other) = attributes.keys().find(|name| !matches!(name.as_str(), "rate" | "volume")) {
                    mistake(out, format!("`<prosody>`: `{other}` has no effect, only `rate` and `volume` have"));
                }
                if !empty {
                    open.before = Some(self.change(manner, out));
                }
            }
            "emphasis" => {
                let tags = match attribute("level").unwrap_or("moderate") {
                    "strong" | "moderate" => Some(("<strong>", "</strong>")),
                    "none" | "reduced" => None,
                    other => {
                        return Err(format!("level=\"{}\": expected strong, moderate, none or reduced", cut(other)));
                    }
                };
                if let Some((begin, end)) = tags.filter(|_| !empty) {
                    self.place(Say::Tag(begin), out);
                    open.tag = Some(end);
                }
            }
            "say-as" => {
                let format = attribute("format").unwrap_or_default();
                self.capture(Say::As(SayAs::named(needed("interpret-as")?, format)?));
            }
            "sub" => {
                let alias = needed("alias")?.trim();
                if alias.is_empty() || alias.len() > LONGEST_INLINE {
                    return Err(format!("an alias has 1 to {LONGEST_INLINE} bytes"));
                }
                self.capture(Say::Words(alias.to_owned()));
            }
            "phoneme" => {
                let phonemes = needed("ph")?;
                let phonemes = match attribute("alphabet").unwrap_or("ipa") {
                    "ipa" => Phonemes::Espeak(mnemonics(phonemes)?),
                    "x-espeak" | "espeak" => Phonemes::Espeak(phonemes.to_owned()),
                    // As vendors of voices for Chinese name it.
                    "pinyin" | "x-pinyin" | "x-amazon-pinyin" | "py" => Phonemes::Pinyin {
                        pinyin: pinyin::canonical(phonemes).map_err(|error| format!("ph: {error}"))?,
                    },
                    other => return Err(format!("alphabet=\"{}\": expected ipa, pinyin or x-espeak", cut(other))),
                };
                if matches!(&phonemes, Phonemes::Espeak(mnemonics) if !are_phonemes(mnemonics)) {
                    return Err("ph: expected ASCII mnemonics without brackets, at most 200 of them".into());
                }
                self.capture(Say::Phonemes(phonemes));
            }
            _ => {
                return Err(
                    "not among speak, break, say-as, sub, phoneme, prosody, lang, mark, emphasis, p and s; its \
                            text is spoken as it is"
                        .into(),
                );
            }
        }
        if empty {
            self.capture = None;
        } else {
            self.open.push(open);
        }
        Ok(())
    }

    fn capture(&mut self, say: Say) {
        self.capture = Some(Capture { say, text: String::new() });
    }

    fn change(&mut self, manner: Manner, out: &mut Vec<Event>) -> Manner {
        let before = std::mem::replace(&mut self.manner, manner);
        if before != self.manner {
            out.push(Event::Manner(self.manner.clone()));
        }
        before
    }

    fn end(&mut self, name: &str, out: &mut Vec<Event>) {
        if self.deeper > 0 {
            self.deeper -= 1;
            return;
        }
        let Some(at) = self.open.iter().rposition(|open| open.name == name) else {
            return mistake(out, format!("`</{}>` without a beginning", cut(name)));
        };
        if at + 1 < self.open.len() {
            let inner = &self.open[self.open.len() - 1].name;
            mistake(
                out,
                format!("`</{}>` before `</{}>`: elements must end inside one another", cut(name), cut(inner)),
            );
        }
        while self.open.len() > at {
            if let Some(open) = self.open.pop() {
                self.leave(open, out);
            }
        }
    }

    fn leave(&mut self, open: Open, out: &mut Vec<Event>) {
        match open.name.as_str() {
            "sub" | "say-as" | "phoneme" => self.close_capture(out),
            "p" | "s" => push_text("\n\n", out),
            _ => {}
        }
        if let Some(tag) = open.tag {
            self.place(Say::Tag(tag), out);
        }
        if let Some(before) = open.before {
            self.change(before, out);
        }
    }
}

fn push_text(text: &str, out: &mut Vec<Event>) {
    match out.last_mut() {
        Some(Event::Text(last)) => last.push_str(text),
        _ => out.push(Event::Text(text.to_owned())),
    }
}

fn mistake(out: &mut Vec<Event>, what: String) {
    out.push(Event::Mistake(format!("markup: {what}")));
}

/// The beginning of what is told of.
fn cut(text: &str) -> &str {
    text.get(..floor(text, text.len().min(60))).unwrap_or_default()
}

#[cfg(test)]
mod tests;
