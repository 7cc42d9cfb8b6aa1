//! Texts that are meant to harm, as they stream in: what is held of them stays small, whatever their length.
//!
//! Memory is what the state shows of itself in its `Debug` form, which has all text that it holds; a state that is
//! bounded also bounds the work of each piece, so that time grows with the length and no faster. Nothing here looks at a
//! clock.

use super::*;
use crate::text::{How, Normalise, read_given};
use crate::turn::Markup;

/// What a state may show of itself, in bytes: a window of 288 characters, elements of 64 levels, a tag, an element that is
/// said otherwise.
const HELD: usize = 48 << 10;
/// Pieces of a text as a socket may bring them.
const PIECE: usize = 4 << 10;
/// Said for each byte that is written at most: a digit is a word, and a sign may be several.
const SAID: usize = 48;

const FAMILIES: [(&str, &str); 34] = [
    ("right to left", "\u{202e}live \u{2067}evil\u{2069} \u{202d}\u{200f}abc "),
    ("combining marks", "e\u{301}\u{301}\u{301}\u{301}\u{301}\u{301}\u{301}\u{301}"),
    ("marks without letters", "\u{301}\u{20dd}\u{489}"),
    ("control characters", "\0\u{1}a\u{7f}\u{85}\u{9f}\u{1b}[31m"),
    ("no width", "a\u{200b}\u{200d}\u{feff}\u{ad}"),
    ("nested elements", "<prosody rate='fast'><emphasis>a"),
    ("elements without a beginning", "</prosody></speak>a"),
    ("openings", "<"),
    ("a tag without an end", "<sub alias='aaaaaaaa "),
    ("a comment without an end", "<!-- --"),
    ("marks", "<mark name='m'/>"),
    ("entities", "&amp;&#x41;&nothing;&"),
    ("control tokens", "<|endofprompt|>"),
    ("openings of control tokens", "<|<|a|"),
    ("tags of the voice", "[breath][laughter]<strong>"),
    ("emphasis", "*_*_**__`"),
    ("rules and headings", "\n### \n---\n> "),
    ("ends of sentences", ".!?…。"),
    ("closing signs", ".)]\"'»"),
    ("one endless word", "aaaaaaaaaaaaaaaa"),
    ("digits", "1.234,5678:90-12/3"),
    ("amounts", "$1,000,000.00 "),
    ("a fence without an end", "```\ncode "),
    ("fences", "```\n"),
    ("code without an end", "a ` b `` c"),
    ("openings of brackets", "["),
    ("links inside of links", "[a](b[c](http://d"),
    ("a link without an end", "[a](https://e/aaaaaaaa"),
    ("brackets and no address", "[a] (b [c](d e "),
    ("images", "![a](data:aaaaaaaaaaaa"),
    ("bars", "\n| a | -"),
    ("struck", " ~~a b~"),
    ("sources", "【a†"),
    ("pictures", "👨\u{200d}👩🏽\u{fe0f}1\u{20e3}"),
];

/// `length` bytes of one family.
fn pieces(family: &str, length: usize) -> impl Iterator<Item = String> {
    let piece = family.repeat((PIECE / family.len()).max(1));
    (0..length.div_ceil(piece.len())).map(move |_| piece.clone())
}

/// Streams a text and gives the most that was held, the longest part, and the bytes of all parts.
fn stream(family: &str, length: usize, markup: Markup) -> (usize, usize, usize) {
    let mut script = Script::new(SegmentConfig::default(), markup);
    let (mut held, mut longest, mut all) = (0, 0, 0);
    let mut see = |cuts: Vec<Cut>| {
        for cut in cuts {
            let Cut::Piece(piece) = cut else { continue };
            longest = longest.max(piece.text.len());
            all += piece.text.len();
        }
    };
    for piece in pieces(family, length) {
        let mut out = Vec::new();
        script.push(&piece, &mut out);
        see(out);
        while script.mistake().is_some() {}
        held = held.max(format!("{script:?}").len());
    }
    let mut out = Vec::new();
    script.finish(&mut out);
    see(out);
    (held, longest, all)
}

/// Streams every family, `length` bytes of it, as text and as markup.
fn survive(length: usize) {
    for (name, family) in FAMILIES {
        for markup in [Markup::None, Markup::Ssml] {
            let (held, longest, all) = stream(family, length, markup);
            assert!(held <= HELD, "{name}, {markup:?}: {held} bytes are held");
            // 280 characters of four bytes, and elements that are said otherwise among them.
            assert!(longest <= 16 << 10, "{name}, {markup:?}: a part of {longest} bytes");
            assert!(all <= 2 * length + PIECE, "{name}, {markup:?}: {all} bytes of {length}");
        }
    }
}

#[test]
fn what_is_held_of_a_hostile_text_does_not_grow_with_it() {
    survive(128 << 10);
    // Eight times as much holds no more.
    for (name, family) in FAMILIES {
        let (short, long) = (stream(family, 32 << 10, Markup::Ssml).0, stream(family, 256 << 10, Markup::Ssml).0);
        assert!(
            long <= short + short / 2 + 1_024,
            "{name}: {short} bytes are held of a short text, {long} of a long one"
        );
    }
}

#[test]
#[ignore = "6.8 GB of text: minutes"]
fn a_hundred_megabytes_of_each_are_survived() {
    survive(100 << 20);
}

/// Numbers from a seed: xorshift, so that a text is known by its number.
struct Dice(u64);

impl Dice {
    fn roll(&mut self, sides: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 11) as usize % sides.max(1)
    }

    fn one_of<'a>(&mut self, all: &[&'a str]) -> &'a str {
        all[self.roll(all.len())]
    }

    /// Any character there is, the low ones more often.
    fn character(&mut self) -> char {
        let most = [0x80, 0x250, 0x3_100, 0xa_000, 0x11_0000][self.roll(5)];
        char::from_u32(self.roll(most) as u32).unwrap_or('\u{fffd}')
    }

    /// A text of anything: characters at random, what rules look for, markup, and what does harm.
    fn text(&mut self) -> String {
        const RULES: [&str; 40] = [
            "1", "2", "0", "19", "2024", ".", ",", ":", "-", "/", "$", "€", "%", "°C", "km", "th", "pm", "am", "Dr.",
            "No.", "XIV", "May", "年", "月", "日", "点", "第", "￥", "人", "時", "½", "²", "^", "×", "+", "=", "@",
            "www.", ".com", "#",
        ];
        const MARKUP: [&str; 22] = [
            "<speak>",
            "</speak>",
            "<sub alias='x'>",
            "<say-as interpret-as='date'>",
            "<break time='1s'/>",
            "<",
            ">",
            "&amp;",
            "&#x1F600;",
            "<!--",
            "[breath]",
            "**",
            "`",
            "\n\n",
            "\n```\n",
            "\n| ",
            "[",
            "](",
            "](https://",
            ")",
            "~~",
            "🎉",
        ];
        const HARM: [&str; 10] = [
            "<|endofprompt|>",
            "<|",
            "|>",
            "\u{202e}",
            "\u{2067}",
            "\u{301}\u{301}\u{301}",
            "\0",
            "\u{1b}[2J",
            "\u{200d}",
            "\u{feff}",
        ];
        let mut text = String::new();
        for _ in 0..self.roll(24) {
            match self.roll(8) {
                0 | 1 => text.push(self.character()),
                2..=4 => text.push_str(self.one_of(&RULES)),
                5 => text.push_str(self.one_of(&MARKUP)),
                6 => text.push_str(self.one_of(&HARM)),
                _ => text.push(' '),
            }
        }
        text
    }
}

/// Streams `count` random texts, cut anywhere, and reads all their parts.
fn survive_random(count: usize) {
    let mut dice = Dice(0x9e37_79b9_7f4a_7c15);
    let lexicon = Lexicon::default();
    for number in 0..count {
        let text = dice.text();
        let markup = [Markup::None, Markup::Tags, Markup::Ssml][dice.roll(3)];
        let language = ["en", "zh", "ja", "de", "fr", "es", "", "ru"][dice.roll(8)];
        let mut script = Script::new(SegmentConfig::default(), markup);
        let (mut out, mut from) = (Vec::new(), 0);
        while from < text.len() {
            let mut to = from + 1 + dice.roll(12);
            while !text.is_char_boundary(to.min(text.len())) {
                to += 1;
            }
            script.push(&text[from..to.min(text.len())], &mut out);
            from = to;
        }
        // A text of a few hundred bytes is held at most once, beside what a script always has.
        if number.is_multiple_of(64) {
            let held = format!("{script:?}").len();
            assert!(held <= 8 * text.len() + 4_096, "{number}: {held} bytes are held of {text:?}");
        }
        script.finish(&mut out);
        while script.mistake().is_some() {}
        let how = How { language: Some(language), normalise: Normalise::On, lexicon: &lexicon };
        for cut in &out {
            let Cut::Piece(piece) = cut else { continue };
            let reading = read_given("", &piece.text, &piece.given, how);
            let spoken = &reading.spoken;
            let given: usize = piece.given.iter().map(|given| format!("{given:?}").len()).sum();
            let most = SAID * (piece.text.len() + given) + 1_024;
            assert!(spoken.text.len() <= most, "{number}: {} bytes are said of {text:?}", spoken.text.len());
            let ends = spoken.spans.last().map_or((0, 0), |span| (span.written.end, span.spoken.end));
            assert_eq!(ends, (piece.text.len(), spoken.text.len()), "{number}: {text:?}");
            assert!(!crate::text::without_tokens(&spoken.text).contains("<|"), "{number}: {text:?}");
        }
    }
}

#[test]
#[expect(clippy::disallowed_methods, reason = "no key of the configuration: only this test has it")]
fn random_texts_are_survived() {
    // `ANTIPHON_TEXTS=1000000`: minutes.
    let count = std::env::var("ANTIPHON_TEXTS").ok().and_then(|count| count.parse().ok());
    survive_random(count.unwrap_or(1_500));
}

#[test]
fn hostile_parts_are_read_in_proportion_to_their_length() {
    for (name, family) in FAMILIES {
        let mut script = Script::new(SegmentConfig::default(), Markup::Ssml);
        let mut out = Vec::new();
        for piece in pieces(family, 8 << 10) {
            script.push(&piece, &mut out);
        }
        script.finish(&mut out);
        for language in ["en", "de", "zh", "ja"] {
            let lexicon = Lexicon::default();
            let how = How { language: Some(language), normalise: Normalise::On, lexicon: &lexicon };
            for cut in &out {
                let Cut::Piece(piece) = cut else { continue };
                let said = read_given("", &piece.text, &piece.given, how).spoken.text;
                let most = SAID * piece.text.len() + 1_024;
                assert!(said.len() <= most, "{name}, {language}: {} bytes said of {}", said.len(), piece.text.len());
                assert!(!said.contains("<|"), "{name}: a control token is said");
            }
        }
    }
}
