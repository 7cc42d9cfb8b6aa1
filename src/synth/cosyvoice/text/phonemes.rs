//! Phonemes that a text gives, in the tokens that the model has for them: ARPAbet, as in the CMU pronouncing dictionary,
//! with the stress of each vowel; and for Mandarin the initials and finals of pinyin, these with the mark of their tone
//! (`[j][ǐ]`).
//!
//! What is given are the mnemonics of espeak-ng (its `docs/phonemes.md`), or pinyin. In a text a phoneme is one private
//! character until the tokenizer makes a token of it, so that the rules of the text and the places where it is cut leave it
//! whole.

use std::sync::LazyLock;

use crate::text::pinyin::{self, Syllable};
use crate::turn::{Phonemes, Sound};

/// The first of the private characters.
const FIRST: u32 = 0xf_1000;
/// Stresses of a vowel: none, primary, secondary.
const STRESSES: u32 = 3;

/// Phonemes of the model; the vowels first.
const PHONES: [&str; 39] = [
    "AA", "AE", "AH", "AO", "AW", "AY", "EH", "ER", "EY", "IH", "IY", "OW", "OY", "UH", "UW", "B", "CH", "D", "DH",
    "F", "G", "HH", "JH", "K", "L", "M", "N", "NG", "P", "R", "S", "SH", "T", "TH", "V", "W", "Y", "Z", "ZH",
];
/// How many of them are vowels.
const VOWELS: u32 = 15;

/// The first of the private characters of pinyin, which follow those of ARPAbet.
const FIRST_PINYIN: u32 = FIRST + PHONES.len() as u32 * STRESSES;
/// The model's tokens of pinyin, in its own order.
static PINYIN: LazyLock<Vec<&'static str>> = LazyLock::new(|| {
    let all = super::tokenizer::SPECIAL.lines().skip_while(|token| *token != "[a]");
    all.take_while(|token| token.starts_with('[')).collect()
});

/// Mnemonics and their phonemes, longer ones first; of sounds that English lacks, the nearest that it has.
#[rustfmt::skip]
const MNEMONICS: &[(&str, &[&str])] = &[
    ("aI@", &["AY", "ER"]), ("aU@", &["AW", "ER"]), ("aI3", &["AY", "ER"]), ("oU#", &["OW"]),
    ("tS", &["CH"]), ("dZ", &["JH"]), ("aI", &["AY"]), ("aU", &["AW"]), ("eI", &["EY"]), ("oU", &["OW"]), ("@U", &["OW"]),
    ("OI", &["OY"]), ("i@", &["IH", "R"]), ("I@", &["IH", "R"]), ("e@", &["EH", "R"]), ("U@", &["UH", "R"]),
    ("o@", &["AO", "R"]), ("O@", &["AO", "R"]), ("A@", &["AA", "R"]), ("@L", &["AH", "L"]), ("i:", &["IY"]), ("u:", &["UW"]),
    ("A:", &["AA"]), ("O:", &["AO"]), ("3:", &["ER"]), ("I2", &["IH"]), ("I#", &["IH"]), ("a#", &["AH"]), ("@2", &["AH"]),
    ("@5", &["AH"]), ("n^", &["N", "Y"]), ("r-", &["R"]),
    ("p", &["P"]), ("b", &["B"]), ("t", &["T"]), ("d", &["D"]), ("k", &["K"]), ("g", &["G"]), ("f", &["F"]), ("v", &["V"]),
    ("T", &["TH"]), ("D", &["DH"]), ("s", &["S"]), ("z", &["Z"]), ("S", &["SH"]), ("Z", &["ZH"]), ("h", &["HH"]),
    ("x", &["K"]), ("C", &["SH"]), ("m", &["M"]), ("n", &["N"]), ("N", &["NG"]), ("l", &["L"]), ("r", &["R"]), ("R", &["R"]),
    ("*", &["D"]), ("j", &["Y"]), ("w", &["W"]), ("a", &["AE"]), ("A", &["AA"]), ("0", &["AA"]), ("O", &["AO"]), ("@", &["AH"]),
    ("3", &["ER"]), ("E", &["EH"]), ("e", &["EH"]), ("I", &["IH"]), ("i", &["IY"]), ("U", &["UH"]), ("u", &["UW"]),
    ("V", &["AH"]), ("o", &["OW"]), ("y", &["UW"]), ("Y", &["ER"]), ("W", &["ER"]),
];

/// Phonemes as private characters; `None` where the model lacks one of them.
fn phones(phonemes: &Phonemes) -> Option<String> {
    match phonemes {
        Phonemes::Espeak(mnemonics) => english(mnemonics),
        Phonemes::Pinyin { pinyin } => pinyin::syllables(pinyin).ok()?.into_iter().map(mandarin).collect(),
    }
}

/// A syllable as its initial, where it has one, and its final.
fn mandarin(syllable: Syllable) -> Option<String> {
    // The model spells `üe` with `v`, and has it in no other tone.
    let rime = syllable.marked().replacen("üè", "vè", 1);
    let place = |part: &str| {
        let token = PINYIN.iter().position(|token| token[1..].strip_suffix(']') == Some(part))?;
        char::from_u32(FIRST_PINYIN + token as u32)
    };
    let initial = if syllable.initial.is_empty() { None } else { Some(place(syllable.initial)?) };
    Some(initial.into_iter().chain([place(&rime)?]).collect())
}

/// The same of espeak-ng's mnemonics, by their nearest in English.
fn english(mnemonics: &str) -> Option<String> {
    // A word of its own without a mark is stressed on its first vowel.
    let unmarked = !mnemonics.contains('\'');
    let (mut said, mut rest, mut stress) = (String::new(), mnemonics, u32::from(unmarked));
    while let Some(c) = rest.chars().next() {
        match c {
            '\'' => stress = 1,
            ',' => stress = 2,
            // Syllables that are not stressed, joints, lengths, pauses.
            ' ' | '%' | '=' | '-' | '|' | ':' | '_' | ';' => {}
            _ => {
                let (behind, phones) =
                    MNEMONICS.iter().find_map(|(known, phones)| Some((rest.strip_prefix(known)?, phones)))?;
                for phone in *phones {
                    let place = PHONES.iter().position(|known| known == phone)? as u32;
                    let stressed = if place < VOWELS { std::mem::take(&mut stress) } else { 0 };
                    said.extend(char::from_u32(FIRST + place * STRESSES + stressed));
                }
                rest = behind;
                continue;
            }
        }
        rest = &rest[c.len_utf8()..];
    }
    (!said.is_empty()).then_some(said)
}

/// Whether `c` stands for a phoneme.
pub(super) fn is_phone(c: char) -> bool {
    (FIRST..FIRST_PINYIN + PINYIN.len() as u32).contains(&(c as u32))
}

/// The model's token for the phoneme `c`.
pub(super) fn token(c: char) -> Option<String> {
    if let Some(at) = (c as u32).checked_sub(FIRST_PINYIN) {
        return PINYIN.get(at as usize).map(|token| (*token).to_owned());
    }
    let at = (c as u32).checked_sub(FIRST)?;
    let (place, stress) = (at / STRESSES, at % STRESSES);
    let phone = PHONES.get(place as usize)?;
    Some(if place < VOWELS { format!("[{phone}{stress}]") } else { format!("[{phone}]") })
}

/// `text` with phonemes in place of the pieces that have some given (`sounds`, in order). A piece with phonemes that the
/// model lacks stays as it is written, and what looks like a phoneme in `text` goes.
pub fn inlined(text: &str, sounds: &[Sound]) -> String {
    let (mut said, mut at) = (String::with_capacity(text.len()), 0);
    for (range, phonemes) in sounds {
        let (Some(before), Some(phones)) = (text.get(at..range.start), phones(phonemes)) else { continue };
        if text.get(range.clone()).is_none() {
            continue;
        }
        said.extend(before.chars().filter(|c| !is_phone(*c)));
        said.push_str(&phones);
        at = range.end;
    }
    said.extend(text.get(at..).unwrap_or_default().chars().filter(|c| !is_phone(*c)));
    said
}

#[cfg(test)]
mod tests {
    use super::*;

    fn espeak(mnemonics: &str) -> Phonemes {
        Phonemes::Espeak(mnemonics.to_owned())
    }

    fn mandarin(pinyin: &str) -> Phonemes {
        Phonemes::Pinyin { pinyin: pinyin.to_owned() }
    }

    fn tokens(phonemes: &Phonemes) -> String {
        phones(phonemes).map_or("none".into(), |phones| phones.chars().filter_map(token).collect())
    }

    #[test]
    fn mnemonics_become_the_tokens_of_the_model_with_their_stress() {
        for (mnemonics, said) in [
            ("t@m'A:t@U", "[T][AH0][M][AA1][T][OW0]"),
            ("h@l'oU", "[HH][AH0][L][OW1]"),
            ("'tSEk", "[CH][EH1][K]"),
            ("kat", "[K][AE1][T]"),
            ("nu:'jo@k", "[N][UW0][Y][AO1][R][K]"),
            (",Ink@r-'Ekt", "[IH2][N][K][AH0][R][EH1][K][T]"),
            ("'T3:d", "[TH][ER1][D]"),
            ("ts.h", "none"),
            ("", "none"),
        ] {
            assert_eq!(tokens(&espeak(mnemonics)), said, "{mnemonics}");
        }
    }

    #[test]
    fn pinyin_becomes_an_initial_and_a_final_with_its_tone() {
        for (pinyin, said) in [
            ("ji3 yu3", "[j][ǐ][y][ǔ]"),
            ("chong2 qing4", "[ch][óng][q][ìng]"),
            ("yin2 hang2", "[y][ín][h][áng]"),
            ("er2", "[ér]"),
            ("an1", "[ān]"),
            ("nü3", "[n][ǚ]"),
            ("lüe4", "[l][vè]"),
            ("jiong3", "[j][iǒng]"),
            ("men5", "[m][en]"),
            ("lüe3", "none"),
            ("chongqing", "none"),
        ] {
            assert_eq!(tokens(&mandarin(pinyin)), said, "{pinyin}");
        }
    }

    /// What the model has no token for is rare: the word is read as it is written then.
    #[test]
    fn the_syllables_of_mandarin_have_tokens() {
        let lacks = |one: &Syllable| phones(&mandarin(&one.to_string())).is_none();
        let lacking: Vec<String> = pinyin::all().filter(lacks).map(|one| one.to_string()).collect();
        let toned: Vec<&str> = lacking.iter().map(String::as_str).filter(|one| !one.ends_with('5')).collect();
        assert_eq!(toned, ["er1", "nü1", "lü1", "nüe1", "nüe2", "nüe3", "lüe1", "lüe2", "lüe3"], "none that is a word");
        // Of the neutral tone, those that words of grammar end in.
        for common in ["de5", "le5", "zhe5", "ma5", "ne5", "ba5", "a5", "ge5", "men5", "zi5", "tou5", "me5", "li5"] {
            assert!(!lacking.iter().any(|one| one == common), "{common}");
        }
        assert_eq!((PINYIN.len(), PINYIN[0], PINYIN[175]), (176, "[a]", "[ǜ]"));
    }

    #[test]
    fn every_token_is_one_that_the_model_has() {
        let special = include_str!("special_tokens.txt");
        for at in 0..PHONES.len() as u32 * STRESSES {
            let c = char::from_u32(FIRST + at).expect("a private character");
            assert!(is_phone(c));
            let token = token(c).expect("a phoneme");
            assert!(special.lines().any(|known| known == token), "{token}");
        }
        assert_eq!((token('a'), is_phone('a')), (None, false));
        let last = char::from_u32(FIRST_PINYIN + PINYIN.len() as u32 - 1).expect("a private character");
        let next = char::from_u32(last as u32 + 1).expect("a private character");
        assert_eq!((token(last).as_deref(), token(next), is_phone(next)), (Some("[ǜ]"), None, false));
        for (mnemonic, phones) in MNEMONICS {
            assert!(phones.iter().all(|phone| PHONES.contains(phone)), "{mnemonic}");
        }
    }

    #[test]
    fn pieces_are_put_in_their_places_and_nobody_writes_phonemes_himself() {
        let text = "Say tomato now, ok.";
        let said = inlined(text, &[(4..10, espeak("t@m'A:t@U")), (16..18, espeak("ts."))]);
        assert_eq!(said.chars().filter(|c| is_phone(*c)).count(), 6);
        assert!(said.starts_with("Say ") && said.ends_with(" now, ok."), "{said}");
        let forged: String = ['a', char::from_u32(FIRST + 3).expect("private")].into_iter().collect();
        assert_eq!(inlined(&forged, &[]), "a");
        assert_eq!(inlined("é", &[(1..2, espeak("a"))]), "é");
        let said = inlined("他给予好评", &[(3..9, mandarin("ji3 yu3"))]);
        assert_eq!(said.chars().filter(|c| is_phone(*c)).count(), 4);
        assert!(said.starts_with('他') && said.ends_with("好评"), "{said}");
    }
}
