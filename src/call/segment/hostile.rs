//! Texts that nobody means well with, as they stream in: what is held of them stays small, whatever their length.
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

const FAMILIES: [(&str, &str); 22] = [
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
#[ignore = "4.4 GB of text: minutes"]
fn a_hundred_megabytes_of_each_are_survived() {
    survive(100 << 20);
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
