//! Pinyin in the mnemonics of espeak-ng's Mandarin.
//!
//! What the program's own voice for pinyin (`cmn-latn-pinyin`) makes of each syllable, compared with it in the tests; the
//! voice for Chinese, which reads Latin letters as English, has the same sounds.

use crate::text::pinyin::{Syllable, syllables};

/// What stands for an initial.
#[rustfmt::skip]
const INITIALS: [(&str, &str); 21] = [
    ("b", "p"), ("p", "ph"), ("m", "m"), ("f", "f"), ("d", "t"), ("t", "th"), ("n", "n"), ("l", "l"), ("g", "k"),
    ("k", "kh"), ("h", "X"), ("j", "tS;"), ("q", "tS;h"), ("x", "S;"), ("zh", "ts."), ("ch", "ts.h"), ("sh", "s."),
    ("r", "z."), ("z", "ts"), ("c", "tsh"), ("s", "s"),
];

/// What stands for a rime: initials that it is for (none: all others), what is before the stress, the vowels, which the
/// tone follows, and what closes it.
#[rustfmt::skip]
const RIMES: [(&str, &[&str], &str, &str, &str); 59] = [
    ("a", &["y"], "j", "iA", ""), ("a", &["w"], "w", "A", ""), ("a", &[], "", "A", ""),
    ("ai", &["w"], "w", "ai", ""), ("ai", &["y"], "j", "iai", ""), ("ai", &[], "", "ai", ""),
    ("an", &["w"], "w", "A", "n"), ("an", &["y"], "j", "iE", "n"), ("an", &[], "", "a", "n"),
    ("ang", &["", "k", "ch"], "", "A", "N"), ("ang", &["w"], "w", "A", "N"), ("ang", &["y"], "j", "iA", "N"),
    ("ang", &[], "", "a", "N"), ("ao", &["y"], "j", "Au", ""), ("ao", &[], "", "Au", ""),
    ("e", &["d", "t", "n", "l"], "", "@", ""), ("e", &["y"], "j", "iE", ""), ("e", &[], "", "o-", ""),
    ("ei", &["w"], "w", "ei", ""), ("ei", &[], "", "ei", ""), ("en", &["w"], "w", "u@", "n"), ("en", &[], "", "@", "n"),
    ("eng", &["w"], "w", "u@", "N"), ("eng", &[], "", "@", "N"), ("er", &[], "", "@r", ""),
    ("i", &["zh", "ch", "sh", "r"], "", "i.", ""), ("i", &["z", "c", "s"], "", "i[", ""), ("i", &["y"], "j", "i", ""),
    ("i", &[], "", "i", ""), ("ia", &[], "", "iA", ""), ("ian", &[], "", "iE", "n"), ("iang", &[], "", "iA", "N"),
    ("iao", &[], "j", "Au", ""), ("ie", &[], "", "iE", ""), ("in", &["y"], "j", "i", "n"), ("in", &[], "", "i", "n"),
    ("ing", &["y"], "j", "i", "N"), ("ing", &[], "", "i", "N"), ("iong", &["q"], "", "u", "N"), ("iong", &[], "", "y", "N"), ("iu", &[], "", "iou", ""),
    ("o", &["w"], "w", "o", ""), ("o", &["y"], "j", "io", ""), ("o", &[], "", "o", ""), ("ong", &["y"], "", "yu", "N"),
    ("ong", &[], "", "ong", ""), ("ou", &["y"], "j", "iou", ""), ("ou", &[], "", "ou", ""),
    ("u", &["j", "q", "x"], "", "y", ""), ("u", &["y"], ";", "y", ""), ("u", &["w"], "w", "u", ""), ("u", &[], "", "u", ""),
    ("ua", &[], "w", "A", ""), ("uai", &[], "", "uai", ""), ("uan", &["j", "q", "x", "y"], "", "y&", "n"),
    ("uan", &["g", "k"], "w", "a", "n"), ("uan", &[], "", "ua", "n"), ("uang", &["g", "k"], "w", "a", "N"),
    ("uang", &[], "w", "A", "N"),
];
/// The rest of them; see [`RIMES`].
#[rustfmt::skip]
const MORE: [(&str, &[&str], &str, &str, &str); 13] = [
    ("ue", &[], "", "yE", ""), ("ui", &["sh"], "w", "ei", ""), ("ui", &[], "", "uei", ""),
    ("un", &["q"], "", "yi", "n"), ("un", &["j", "x"], "", "y@", "n"), ("un", &["y"], ";", "y@", "n"), ("un", &["t", "k", "h"], "w", "u@", "n"),
    ("un", &["sh"], "w", "o-", "n"), ("un", &[], "", "u@", "n"), ("uo", &["sh"], "w", "o", ""), ("uo", &[], "", "uo", ""),
    ("ü", &[], "", "y", ""), ("üe", &[], "", "yE", ""),
];
/// The courses of the tones, from the first to the neutral one.
const TONES: [&str; 5] = ["55", "35", "214", "51", "11"];

/// `pinyin` as mnemonics; `None`: it is none.
pub(super) fn mnemonics(pinyin: &str) -> Option<String> {
    let said: Option<Vec<String>> = syllables(pinyin).ok()?.into_iter().map(one).collect();
    Some(said?.join("_"))
}

fn one(syllable: Syllable) -> Option<String> {
    let Syllable { initial, rime, tone } = syllable;
    let begin = INITIALS.iter().find(|(known, _)| *known == initial).map_or("", |(_, mnemonic)| mnemonic);
    let (_, _, glide, vowels, end) = RIMES
        .iter()
        .chain(&MORE)
        .find(|(known, initials, ..)| *known == rime && (initials.is_empty() || initials.contains(&initial)))?;
    let course = TONES.get(usize::from(tone).checked_sub(1)?)?;
    let stress = if tone == 5 { "" } else { "'" };
    Some(format!("{begin}{glide}{stress}{vowels}{course}{end}"))
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::process::{Command, Stdio};

    use super::*;

    /// As the program's voice for pinyin has it, but for what it does to two only: `chàng`, unlike the other tones of it, and
    /// `yai`.
    #[test]
    fn every_syllable_is_said_as_the_program_says_it() {
        let all: Vec<Syllable> = crate::text::pinyin::all().collect();
        for syllable in &all {
            assert!(one(*syllable).is_some(), "{syllable}");
        }
        let mut command = Command::new("espeak-ng");
        command.args(["-v", "cmn-latn-pinyin", "-q", "-x"]).stdin(Stdio::piped()).stdout(Stdio::piped());
        let Ok(mut child) = command.spawn() else {
            return antiphon_skip::skip("espeak", "espeak-ng is not installed");
        };
        let mut stdin = child.stdin.take().expect("piped");
        let text: String = all.iter().map(|syllable| format!("{syllable}.\n\n")).collect();
        let writer = std::thread::spawn(move || stdin.write_all(text.as_bytes()).expect("it reads"));
        let output = child.wait_with_output().expect("it ends");
        writer.join().expect("written");
        let output = String::from_utf8(output.stdout).expect("ASCII");
        let said: Vec<&str> = output.lines().map(str::trim).filter(|line| !line.is_empty()).collect();
        assert_eq!(said.len(), all.len());
        let wrong: Vec<String> = all
            .iter()
            .zip(said)
            .map(|(syllable, said)| (syllable, one(*syllable).unwrap_or_default(), said.trim_end_matches(['_', '|'])))
            .filter(|(_, own, said)| own != said)
            .map(|(syllable, own, said)| format!("{syllable}: {own} / {said}"))
            .collect();
        let other = wrong.iter().filter(|line| !line.starts_with("chang4") && !line.starts_with("yai"));
        assert_eq!(other.count(), 0, "{wrong:#?}");
    }

    #[test]
    fn syllables_are_joined_and_what_is_none_is_refused() {
        assert_eq!(mnemonics("chong2 qing4").as_deref(), Some("ts.h'ong35_tS;h'i51N"));
        assert_eq!(mnemonics("xie4 xie5").as_deref(), Some("S;'iE51_S;iE11"));
        assert_eq!(mnemonics("hello"), None);
    }
}
