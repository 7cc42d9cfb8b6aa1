//! The silence at both ends of an utterance, which is bounded to what sounds natural between two sentences.
//!
//! A state machine over samples: it owns the beginning of an utterance until something sounds, and nothing of it afterwards.
//!
//! # Why
//! - **Voices begin and end in silence of their own**, a few hundred milliseconds each, which add up between two
//!   sentences of a turn and delay its first word. Every voice goes through here, whatever engine it is of.
//! - **The beginning** is held back only while nothing sounds: the first word leaves when it is there, and sooner than with
//!   the silence before it. What is held back is bounded, and so is what is left out.
//! - **Before a turn's first word somebody waits**: all silence that is left there is heard as slowness, so it is no more than a
//!   soft consonant needs to rise from it.
//! - **The end** is known when all of the utterance is there: what has not left of a longer silence is taken back. Nothing
//!   waits for it.
//! - Silence inside an utterance is its speaker's, and stays.
//! - Where each word sounds is told in the samples that the voice made: [`Quiet::left_out`] leads there.

use crate::audio::RATE;

/// Samples below this share of full scale are silence: -50 dBFS, below the softest consonant of a levelled voice and above
/// the noise of one.
const FLOOR: f32 = 0.003;
/// Silence that is left before the first sound: 60 ms, in which an "f" begins that is softer than the rest.
const BEFORE: usize = RATE as usize * 60 / 1_000;
/// What is left of it before a turn's first sound where nothing softer rises in it.
const BEFORE_ANSWER: usize = LET_IN;
/// Over what softer sound is looked for in it: 5 ms.
const PIECE: usize = RATE as usize * 5 / 1_000;
/// By what such a piece is above the quietest of them: 6 dB.
const RISEN: f32 = 2.0;
/// Silence that is left behind a sentence: 300 ms, a short pause of a speaker who goes on.
const BEHIND_SENTENCE: usize = RATE as usize * 300 / 1_000;
/// As above, behind a clause.
const BEHIND_CLAUSE: usize = RATE as usize * 150 / 1_000;
/// As above, inside a clause: the words go on.
const BEHIND_WORD: usize = RATE as usize * 60 / 1_000;
/// More silence than this before the first sound is meant, or is no silence: one second.
const MOST: usize = RATE as usize;
/// Over how long what is left of a shortened silence swells: 2 ms, since sound below [`FLOOR`] makes no click.
const LET_IN: usize = RATE as usize * 2 / 1_000;
/// Over how long the end of an utterance fades, so that it does not click: 5 ms.
const LET_OUT: usize = RATE as usize * 5 / 1_000;

/// What an utterance ends in, which decides how long the pause behind it may be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Ending {
    Sentence,
    Clause,
    Word,
}

impl Ending {
    fn samples(self) -> usize {
        match self {
            Self::Sentence => BEHIND_SENTENCE,
            Self::Clause => BEHIND_CLAUSE,
            Self::Word => BEHIND_WORD,
        }
    }
}

/// The silence around one utterance.
#[derive(Debug, Default)]
pub(super) struct Quiet {
    /// What came before anything sounded, the latest of it: [`BEFORE`] samples at most between two calls.
    held: Vec<f32>,
    /// It is a turn's first.
    answers: bool,
    /// Something sounds.
    begun: bool,
    /// Samples left out before it.
    left_out: u64,
    /// Samples of silence at the end of what came.
    trailing: usize,
}

impl Quiet {
    /// Of the utterance that a turn begins with.
    pub(super) fn of_answer() -> Self {
        Self { answers: true, ..Self::default() }
    }

    /// Takes what the voice made next; gives what is to be heard of it.
    pub(super) fn pass(&mut self, pcm: Vec<f32>) -> Vec<f32> {
        match pcm.iter().rposition(|sample| sample.abs() > FLOOR) {
            Some(last) => self.trailing = pcm.len() - 1 - last,
            None => self.trailing += pcm.len(),
        }
        if self.begun {
            return pcm;
        }
        let mut held = std::mem::take(&mut self.held);
        if held.is_empty() {
            held = pcm;
        } else {
            held.extend(pcm);
        }
        let first = held.iter().position(|sample| sample.abs() > FLOOR);
        let before = match first {
            Some(first) if self.answers => rise(&held[first.saturating_sub(BEFORE)..first]),
            _ => BEFORE,
        };
        let out = first.unwrap_or(held.len()).saturating_sub(before);
        self.begun = first.is_some() || self.left_out as usize + out > MOST;
        self.left_out += out as u64;
        held.drain(..out);
        if !self.begun {
            self.held = held;
            return Vec::new();
        }
        if self.left_out > 0 {
            for (n, sample) in held.iter_mut().take(LET_IN).enumerate() {
                *sample *= swell(n, LET_IN);
            }
        }
        held
    }

    /// All of the utterance is there: gives what was held back, where nothing sounded at all.
    pub(super) fn finish(&mut self) -> Vec<f32> {
        self.begun = true;
        std::mem::take(&mut self.held)
    }

    /// Samples at the end of an utterance that are more silence than belongs behind `ending`.
    pub(super) fn surplus(&self, ending: Ending) -> usize {
        self.trailing.saturating_sub(ending.samples())
    }

    /// Samples that the voice made and that are not heard, all of them before the first that is heard.
    pub(super) fn left_out(&self) -> u64 {
        self.left_out
    }
}

/// How much of the silence right before a turn's first sound is left: what rises in it, and [`BEFORE_ANSWER`] more.
fn rise(silence: &[f32]) -> usize {
    let energy = |piece: &[f32]| piece.iter().map(|sample| sample * sample).sum::<f32>();
    let pieces = || silence.rchunks_exact(PIECE).map(energy);
    let quietest = pieces().fold(f32::INFINITY, f32::min);
    let risen = pieces().take_while(|piece| *piece > RISEN * RISEN * quietest).count();
    (risen * PIECE + BEFORE_ANSWER).min(BEFORE)
}

/// How far sound that swells over `all` samples has swelled after `n`: half a cosine.
fn swell(n: usize, all: usize) -> f32 {
    0.5 - 0.5 * (std::f32::consts::PI * (n as f32 / all as f32).min(1.0)).cos()
}

/// Lets the end of `pcm` fall to silence.
pub(super) fn fade_end(pcm: &mut [f32]) {
    for (n, sample) in pcm.iter_mut().rev().take(LET_OUT).enumerate() {
        *sample *= swell(n, LET_OUT);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const MS: usize = RATE as usize / 1_000;

    fn sound(ms: usize) -> Vec<f32> {
        (0..ms * MS).map(|n| if n % 2 == 0 { 0.5 } else { -0.5 }).collect()
    }

    fn silence(ms: usize) -> Vec<f32> {
        (0..ms * MS).map(|n| if n % 2 == 0 { 0.001 } else { -0.001 }).collect()
    }

    fn passed(pieces: &[Vec<f32>]) -> (Vec<f32>, Quiet) {
        passed_by(Quiet::default(), pieces)
    }

    fn passed_by(mut quiet: Quiet, pieces: &[Vec<f32>]) -> (Vec<f32>, Quiet) {
        let mut heard: Vec<f32> = pieces.iter().flat_map(|piece| quiet.pass(piece.clone())).collect();
        heard.extend(quiet.finish());
        (heard, quiet)
    }

    #[test]
    fn a_long_silence_before_the_first_sound_is_left_out_and_one_inside_stays() {
        let (heard, quiet) = passed(&[silence(200), silence(150), [sound(100), silence(700), sound(50)].concat()]);
        assert_eq!((heard.len(), quiet.left_out()), (910 * MS, 290 * MS as u64));
        assert!(heard[..LET_IN].iter().all(|sample| sample.abs() <= 0.001));
        assert_eq!(heard[60 * MS..160 * MS], sound(100)[..], "what sounds is as it was");
        let (heard, quiet) = passed(&[[silence(40), sound(100)].concat()]);
        assert_eq!((heard.len(), quiet.left_out()), (140 * MS, 0), "a natural one is as it was");
        assert_eq!(heard[..40 * MS], silence(40)[..]);
    }

    /// As an "f" at -60 dBFS.
    fn soft(ms: usize) -> Vec<f32> {
        silence(ms).iter().map(|sample| sample * 2.5).collect()
    }

    #[test]
    fn a_turn_begins_with_its_first_sound_and_with_what_rises_to_it() {
        let begins = |pieces: &[Vec<f32>]| passed_by(Quiet::of_answer(), pieces).1.left_out() / MS as u64;
        assert_eq!(begins(&[[silence(150), sound(100)].concat()]), 148);
        assert_eq!(begins(&[silence(120), [silence(30), soft(25), sound(100)].concat()]), 148);
        assert_eq!(begins(&[[vec![0.0; 150 * MS], soft(25), sound(100)].concat()]), 148);
        assert_eq!(
            begins(&[[silence(150), soft(80), sound(100)].concat()]),
            228,
            "all of it alike: no softer than the rest"
        );
        assert_eq!(begins(&[[silence(8), sound(100)].concat()]), 6);
        assert_eq!(begins(&[[silence(2), sound(100)].concat()]), 0);
        assert_eq!(begins(&[sound(100)]), 0);
        let (heard, _) = passed_by(Quiet::of_answer(), &[[silence(150), sound(100)].concat()]);
        assert_eq!(heard[2 * MS..], sound(100)[..], "what sounds is as it was");
    }

    #[test]
    fn nothing_is_held_back_behind_the_first_sound_and_little_before_it() {
        let mut quiet = Quiet::default();
        for _ in 0..5 {
            assert!(quiet.pass(silence(100)).is_empty());
            assert!(quiet.held.len() <= BEFORE);
        }
        assert_eq!(quiet.pass(sound(10)).len(), 70 * MS);
        assert_eq!(quiet.pass(silence(400)).len(), 400 * MS);
        assert_eq!(quiet.surplus(Ending::Sentence), 100 * MS);
        assert_eq!(quiet.surplus(Ending::Word), 340 * MS);
        quiet.pass(sound(1));
        assert_eq!(quiet.surplus(Ending::Word), 0);
    }

    #[test]
    fn what_is_all_silence_is_no_more_than_shortened() {
        let (heard, quiet) = passed(&[silence(300)]);
        assert_eq!((heard.len(), quiet.left_out()), (60 * MS, 240 * MS as u64));
        let (heard, quiet) = passed(&vec![silence(100); 40]);
        assert_eq!(heard.len() as u64 + quiet.left_out(), 4_000 * MS as u64);
        assert!(quiet.left_out() as usize <= MOST + 100 * MS, "a second at most: it may be meant");
    }

    proptest! {
        #[test]
        fn pieces_change_nothing(
            (before, softly) in (0usize..600, 0usize..100),
            sounds in 1usize..50,
            after in 0usize..600,
            answers in any::<bool>(),
            cut in any::<prop::sample::Index>(),
        ) {
            let whole = [silence(before), soft(softly), sound(sounds), silence(after)].concat();
            let (first, second) = whole.split_at(cut.index(whole.len()));
            let new = || if answers { Quiet::of_answer() } else { Quiet::default() };
            let (one, quiet) = passed_by(new(), std::slice::from_ref(&whole));
            let (two, other) = passed_by(new(), &[first.to_vec(), second.to_vec()]);
            prop_assert_eq!(one, two);
            prop_assert_eq!(quiet.left_out(), other.left_out());
            prop_assert_eq!(quiet.surplus(Ending::Clause), other.surplus(Ending::Clause));
        }
    }
}
