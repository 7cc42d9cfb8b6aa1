//! Markup whose end decides what it is: held back until it is there, or until it is too long to be any.

/// Characters of a link's text; more are text in brackets.
const LONGEST_LINK: usize = 256;
/// Characters of what may be an address and does not begin like one.
const LONGEST_TARGET: usize = 512;
/// Characters of a link's title.
const LONGEST_TITLE: usize = 300;
/// Characters that were struck out; more are said.
const LONGEST_STRUCK: usize = 200;
/// Characters of where a model says it has something from.
const LONGEST_SOURCE: usize = 64;
/// Digits of a citation.
const CITATION: usize = 3;

/// What an address begins with: a link's text is said as soon as this much of its target is there.
const ADDRESSES: [&str; 10] = ["http://", "https://", "mailto:", "tel:", "sms:", "data:", "/", "#", "./", "<"];
/// What is a tag to us, and what an address in angle brackets begins with.
const TAGS: [&str; 6] = ["<br>", "<br/>", "<br />", "<http://", "<https://", "<mailto:"];

/// What is held back.
#[derive(Debug)]
pub(super) enum Held {
    /// `[…`
    Link(Link),
    /// The target of a link whose text was said.
    Target(Target),
    /// `~~…`
    Struck(String),
    /// `<…`
    Tag(String),
    /// `【…`
    Source(String),
}

/// What the next character makes of it.
pub(super) enum Verdict {
    /// Nothing yet.
    More,
    /// It is text; the character is not part of it.
    Text,
    /// It is not said. `taken`: the character was part of it.
    Nothing { taken: bool },
    /// A link, with its text; the character was part of it.
    Link { text: String, image: bool, target: Option<Target> },
    /// A line break.
    Break,
    /// An address in angle brackets begins, with so much of it said.
    Address(String),
}

#[derive(Debug)]
pub(super) struct Link {
    /// All of it.
    written: String,
    /// An exclamation mark is before it.
    image: bool,
    /// It follows a word without a gap.
    attached: bool,
    /// It begins a list item.
    item: bool,
    /// Brackets, then parentheses, that are open.
    depth: usize,
    /// Where its text ended.
    text: Option<usize>,
    /// White space is in its target.
    spaced: bool,
}

#[derive(Debug)]
pub(super) struct Target {
    /// Parentheses that are open.
    depth: usize,
    /// Characters since white space ended the address: a title.
    title: Option<usize>,
    /// The title has begun.
    titled: bool,
}

impl Held {
    /// A bracket was opened.
    pub(super) fn link(image: bool, attached: bool, item: bool) -> Self {
        Self::Link(Link { written: "[".into(), image, attached, item, depth: 1, text: None, spaced: false })
    }

    /// Two tildes.
    pub(super) fn struck() -> Self {
        Self::Struck("~~".into())
    }

    /// An angle bracket was opened.
    pub(super) fn tag() -> Self {
        Self::Tag("<".into())
    }

    /// A bracket that some models set around a source.
    pub(super) fn source() -> Self {
        Self::Source("【".into())
    }

    /// What was written.
    pub(super) fn written(&self) -> &str {
        match self {
            Self::Link(link) => &link.written,
            Self::Target(_) => "",
            Self::Struck(written) | Self::Tag(written) | Self::Source(written) => written,
        }
    }

    /// Takes the next character.
    pub(super) fn push(&mut self, c: char) -> Verdict {
        match self {
            Self::Target(target) => target.push(c),
            _ if c == '\n' => match self {
                Self::Link(link) => link.closed('\n'),
                _ => Verdict::Text,
            },
            Self::Link(link) => link.push(c),
            Self::Struck(written) => {
                written.push(c);
                let inside = written.get(2..written.len().saturating_sub(2)).unwrap_or_default();
                match written.ends_with("~~") && !inside.is_empty() {
                    true if !inside.ends_with(char::is_whitespace) => Verdict::Nothing { taken: true },
                    _ if written.len() > LONGEST_STRUCK => {
                        written.pop();
                        Verdict::Text
                    }
                    _ => Verdict::More,
                }
            }
            Self::Tag(written) => {
                let begins = |tag: &&&str| {
                    tag.get(..written.len()).is_some_and(|part| part.eq_ignore_ascii_case(written))
                        && tag[written.len()..].starts_with(c.to_ascii_lowercase())
                };
                let Some(tag) = TAGS.iter().find(begins) else { return Verdict::Text };
                written.push(c);
                match written.len() == tag.len() {
                    false => Verdict::More,
                    true if tag.ends_with('>') => Verdict::Break,
                    true if *tag == "<mailto:" => Verdict::Address(String::new()),
                    true => Verdict::Address(written[1..].to_owned()),
                }
            }
            Self::Source(written) => {
                if c == '】' {
                    let source = written.contains('†');
                    return if source { Verdict::Nothing { taken: true } } else { Verdict::Text };
                }
                if written.chars().count() >= LONGEST_SOURCE {
                    return Verdict::Text;
                }
                written.push(c);
                Verdict::More
            }
        }
    }
}

impl Link {
    fn push(&mut self, c: char) -> Verdict {
        let Some(text) = self.text else { return self.push_text(c) };
        if self.written.len() == text + 1 {
            if c != '(' {
                return self.closed(c);
            }
            self.written.push(c);
            return Verdict::More;
        }
        match c {
            ')' if self.depth == 0 => {
                let is_target = self.written.get(text + 2..).is_some_and(is_target);
                return if is_target { self.link(text, None) } else { Verdict::Text };
            }
            '(' => self.depth += 1,
            ')' => self.depth -= 1,
            _ => {}
        }
        self.written.push(c);
        let target = &self.written[text + 2..];
        self.spaced |= c.is_whitespace();
        let is = |begin: &&str| target.len() == begin.len() && target.eq_ignore_ascii_case(begin);
        if !self.spaced && (ADDRESSES.iter().any(is) || target.len() > LONGEST_TARGET) {
            return self.link(text, Some(Target { depth: self.depth, title: None, titled: false }));
        }
        if target.len() > LONGEST_TARGET {
            self.written.pop();
            return Verdict::Text;
        }
        Verdict::More
    }

    fn link(&self, text: usize, target: Option<Target>) -> Verdict {
        Verdict::Link { text: self.written[1..text].to_owned(), image: self.image, target }
    }

    fn push_text(&mut self, c: char) -> Verdict {
        let escaped = self.written.ends_with('\\');
        match c {
            '[' if !escaped => self.depth += 1,
            ']' if !escaped => self.depth -= 1,
            _ => {}
        }
        if self.depth == 0 {
            self.text = Some(self.written.len());
        } else if self.written.len() > LONGEST_LINK {
            return Verdict::Text;
        }
        self.written.push(c);
        Verdict::More
    }

    /// No target follows, but `next`.
    fn closed(&self, next: char) -> Verdict {
        let Some(inside) = self.text.and_then(|text| self.written.get(1..text)) else { return Verdict::Text };
        if self.written.len() > inside.len() + 2 {
            return Verdict::Text;
        }
        let number = !inside.is_empty() && inside.len() <= CITATION && inside.bytes().all(|c| c.is_ascii_digit());
        let task = self.item && matches!(inside, " " | "x" | "X") && next.is_whitespace();
        if task || (number && self.attached) || (inside.starts_with('^') && !inside.contains(char::is_whitespace)) {
            return Verdict::Nothing { taken: false };
        }
        Verdict::Text
    }
}

impl Target {
    /// White space is behind it, and no title.
    pub(super) fn is_spaced(&self) -> bool {
        self.title.is_some() && !self.titled
    }

    fn push(&mut self, c: char) -> Verdict {
        match c {
            '\n' => return Verdict::Nothing { taken: false },
            ')' if self.depth == 0 => return Verdict::Nothing { taken: true },
            _ => {}
        }
        match &mut self.title {
            None if c.is_whitespace() => self.title = Some(0),
            None => {}
            Some(length) => {
                *length += 1;
                // Behind a space only a title belongs to it; the parenthesis was forgotten.
                let begins = matches!(c, '"' | '\'' | '(');
                if (!self.titled && !begins && !c.is_whitespace()) || *length > LONGEST_TITLE {
                    return Verdict::Nothing { taken: false };
                }
                self.titled |= begins;
            }
        }
        match c {
            '(' => self.depth += 1,
            ')' => self.depth -= 1,
            _ => {}
        }
        Verdict::More
    }
}

/// Whether `target` is an address, with a title or without.
fn is_target(target: &str) -> bool {
    let target = target.trim();
    let (address, title) = target.split_once(char::is_whitespace).unwrap_or((target, ""));
    let title = title.trim();
    let quoted = |open, close| title.len() >= 2 && title.starts_with(open) && title.ends_with(close);
    !address.starts_with(['"', '\''])
        && (title.is_empty() || quoted('"', '"') || quoted('\'', '\'') || quoted('(', ')'))
}
