//! Phonemes that a text gives, in the tokens that the model has for them: ARPAbet, as in the CMU pronouncing dictionary,
//! with the stress of each vowel.
//!
//! What is given are the mnemonics of espeak-ng (its `docs/phonemes.md`). In a text a phoneme is one private character until
//! the tokenizer makes a token of it, so that the rules of the text and the places where it is cut leave it whole.

use std::ops::Range;

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

/// The same phonemes as private characters; `None` where one of them is unknown.
fn phones(mnemonics: &str) -> Option<String> {
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
    (FIRST..FIRST + PHONES.len() as u32 * STRESSES).contains(&(c as u32))
}

/// The model's token for the phoneme `c`.
pub(super) fn token(c: char) -> Option<String> {
    let at = (c as u32).checked_sub(FIRST)?;
    let (place, stress) = (at / STRESSES, at % STRESSES);
    let phone = PHONES.get(place as usize)?;
    Some(if place < VOWELS { format!("[{phone}{stress}]") } else { format!("[{phone}]") })
}

/// `text` with phonemes in place of the pieces that have some given (`sounds`, in order). A piece with phonemes that the
/// model lacks stays as it is written, and what looks like a phoneme in `text` goes.
pub fn inlined(text: &str, sounds: &[(Range<usize>, String)]) -> String {
    let (mut said, mut at) = (String::with_capacity(text.len()), 0);
    for (range, mnemonics) in sounds {
        let (Some(before), Some(phones)) = (text.get(at..range.start), phones(mnemonics)) else { continue };
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

    fn tokens(mnemonics: &str) -> String {
        phones(mnemonics).map_or("none".into(), |phones| phones.chars().filter_map(token).collect())
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
            assert_eq!(tokens(mnemonics), said, "{mnemonics}");
        }
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
        for (mnemonic, phones) in MNEMONICS {
            assert!(phones.iter().all(|phone| PHONES.contains(phone)), "{mnemonic}");
        }
    }

    #[test]
    fn pieces_are_put_in_their_places_and_nobody_writes_phonemes_himself() {
        let text = "Say tomato now, ok.";
        let said = inlined(text, &[(4..10, "t@m'A:t@U".into()), (16..18, "ts.".into())]);
        assert_eq!(said.chars().filter(|c| is_phone(*c)).count(), 6);
        assert!(said.starts_with("Say ") && said.ends_with(" now, ok."), "{said}");
        let forged: String = ['a', char::from_u32(FIRST + 3).expect("private")].into_iter().collect();
        assert_eq!(inlined(&forged, &[]), "a");
        assert_eq!(inlined("é", &[(1..2, "a".into())]), "é");
    }
}
