//! The International Phonetic Alphabet in the mnemonics of espeak-ng.
//!
//! Source: the table of phonemes in espeak-ng's own documentation (`docs/phonemes.md`, the ASCII mnemonics after
//! Kirshenbaum); for English and what its neighbours share with it. What the voice's language lacks it says by the
//! nearest that it has.

/// Symbols and their mnemonics, longer ones first.
const SYMBOLS: &[(&str, &str)] = &[
    ("tʃ", "tS"), ("dʒ", "dZ"), ("t͡ʃ", "tS"), ("d͡ʒ", "dZ"), ("aɪ", "aI"), ("aʊ", "aU"), ("eɪ", "eI"), ("oʊ", "oU"),
    ("əʊ", "oU"), ("ɔɪ", "OI"), ("ɪə", "i@"), ("eə", "e@"), ("ʊə", "U@"), ("iː", "i:"), ("uː", "u:"), ("ɑː", "A:"),
    ("ɔː", "O:"), ("ɜː", "3:"), ("ɜ˞", "3:"), ("p", "p"), ("b", "b"), ("t", "t"), ("d", "d"), ("k", "k"), ("ɡ", "g"),
    ("g", "g"), ("f", "f"), ("v", "v"), ("θ", "T"), ("ð", "D"), ("s", "s"), ("z", "z"), ("ʃ", "S"), ("ʒ", "Z"),
    ("h", "h"), ("x", "x"), ("ç", "C"), ("m", "m"), ("n", "n"), ("ŋ", "N"), ("l", "l"), ("ɫ", "l"), ("r", "r"),
    ("ɹ", "r"), ("ɾ", "*"), ("j", "j"), ("w", "w"), ("æ", "a"), ("a", "a"), ("ɑ", "A:"), ("ɒ", "0"), ("ɔ", "O:"),
    ("ə", "@"), ("ɚ", "3"), ("ɝ", "3:"), ("ɜ", "3:"), ("ɛ", "E"), ("e", "e"), ("ɪ", "I"), ("i", "i"), ("ʊ", "U"),
    ("u", "u:"), ("ʌ", "V"), ("o", "o"), ("y", "y"), ("ø", "Y"), ("œ", "W"), ("ɲ", "n^"), ("ʁ", "r"), ("ˈ", "'"),
    ("ˌ", ","), ("ː", ":"), (".", ""), ("'", "'"), ("\u{361}", ""), (" ", " "),
];

/// Bytes of phonemes.
const LONGEST: usize = 200;

/// Whether `text` can be handed to espeak-ng as phonemes.
pub(super) fn are_phonemes(text: &str) -> bool {
    let fits = |c: char| (c.is_ascii_graphic() && !matches!(c, '[' | ']' | '<' | '>' | '&')) || c == ' ';
    !text.trim().is_empty() && text.len() <= LONGEST && text.chars().all(fits)
}

/// `text` in mnemonics.
///
/// # Errors
/// A symbol that has none.
pub(super) fn mnemonics(text: &str) -> Result<String, String> {
    let (mut said, mut rest) = (String::new(), text);
    while let Some(c) = rest.chars().next() {
        let found = SYMBOLS.iter().find_map(|(symbol, mnemonic)| Some((rest.strip_prefix(symbol)?, *mnemonic)));
        let Some((behind, mnemonic)) = found else {
            return Err(format!("ph: `{c}` is no symbol that is known here; use alphabet=\"x-espeak\" for mnemonics"));
        };
        said.push_str(mnemonic);
        rest = behind;
    }
    Ok(said)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn symbols_become_mnemonics_and_an_unknown_one_is_named() {
        assert_eq!(mnemonics("təˈmɑːtəʊ").as_deref(), Ok("t@'mA:toU"));
        assert_eq!(mnemonics("ˈt͡ʃɛk").as_deref(), Ok("'tSEk"));
        assert!(mnemonics("ʘa").expect_err("no symbol of ours").contains('ʘ'));
    }
}
