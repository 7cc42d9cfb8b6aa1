//! Signs that a text was not said: the model makes up fluent words over silence and noise, and falls into loops.

use std::io::Write;

use flate2::Compression;
use flate2::write::ZlibEncoder;

/// Tokens of a loop before it counts as one: no speaker repeats a phrase for so long, but "no, no, no" is speech.
const LOOP: usize = 32;
/// The longest phrase that is looked for.
const PHRASE: usize = 16;

/// From where on a text is doubted. The values are those of the reference implementation.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Limits {
    /// Probability of the no-speech token from which a text of low probability is dropped.
    pub no_speech: f32,
    /// Mean log probability of the tokens under which a text is tried again at a higher temperature.
    pub log_probability: f32,
    /// Bytes of the text over bytes of it compressed, above which it repeats itself.
    pub compression: f32,
}

impl Default for Limits {
    fn default() -> Self {
        Self { no_speech: 0.6, log_probability: -1.0, compression: 2.4 }
    }
}

/// Why a text was dropped. Closed: also a metric label.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Suppressed {
    /// There was no speech.
    NoSpeech,
    /// It repeats itself.
    Repetition,
}

impl Suppressed {
    /// The metric label.
    pub fn label(self) -> &'static str {
        match self {
            Suppressed::NoSpeech => "no_speech",
            Suppressed::Repetition => "repetition",
        }
    }
}

/// Whether the tokens end in a phrase said over and over.
pub(super) fn loops(tokens: &[u32]) -> bool {
    (1..=PHRASE).any(|phrase| {
        let span = LOOP.max(4 * phrase);
        tokens.len() >= span && {
            let tail = &tokens[tokens.len() - span..];
            tail[phrase..].iter().zip(tail).all(|(a, b)| a == b)
        }
    })
}

/// How many times shorter the text gets when compressed; 0 for none.
pub(super) fn compression(text: &str) -> f32 {
    let mut encoder = ZlibEncoder::new(Vec::new(), Compression::default());
    let compressed = encoder.write_all(text.as_bytes()).and_then(|()| encoder.finish());
    // Writing into memory does not fail; a text that could not be judged is not doubted.
    compressed.map_or(0.0, |bytes| text.len() as f32 / bytes.len() as f32)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_loop_is_told_from_emphasis() {
        let phrase = |words: &[u32], times: usize| words.repeat(times);
        assert!(!loops(&phrase(&[5], 8)), "no no no no no no no no");
        assert!(loops(&phrase(&[5], 32)));
        assert!(loops(&[phrase(&[1, 2, 3, 4, 5, 6, 7], 1), phrase(&[8, 9, 10], 12)].concat()));
        assert!(!loops(&(0..200).collect::<Vec<_>>()));
        assert!(loops(&phrase(&(0..12).collect::<Vec<_>>(), 4)));
        assert!(!loops(&phrase(&(0..12).collect::<Vec<_>>(), 3)));
    }

    #[test]
    fn speech_compresses_less_than_a_loop() {
        assert!(compression("Thank you, I would like to change the address on my account, please.") < 1.5);
        assert!(compression(&"Thanks for watching! ".repeat(20)) > 2.4);
        assert!(compression("") < 1.0);
    }
}
