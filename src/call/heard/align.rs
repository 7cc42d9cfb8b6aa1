//! Words on a recording whose voice does not say when each of them sounds: by how long they take and where it is silent.
//!
//! # Why
//! A share of the time is right on average and wrong wherever a voice pauses. What is silent is known from the
//! recording, and what is written says where pauses belong: at its marks. So marks and pauses are matched, in order, by
//! where the lengths of the words ([`lengths`]) say that each mark would be; between two of them the time that is not
//! silent is shared by these lengths. Boundaries are not moved to dips of the energy: where words run together there are
//! as many dips inside of words as between them, and what they win in one sentence they lose in the next.

use super::lengths::length;
use crate::audio::RATE;
use crate::text::Language;
use crate::turn::WordEnd;

/// Samples of which one energy is kept: 10 ms.
pub(in crate::call) const HOP: usize = RATE as usize / 100;
/// Sound below this share of the loudest is silence.
const SILENCE: f32 = 0.02;
/// Shorter silences are part of words: 60 ms, as before a "t".
const PAUSE: usize = 6;
/// A mark may be so far from where the lengths say, as a share of the whole.
const FARTHEST: f64 = 0.2;
/// What leaving a mark without its pause costs, as a squared share.
const UNMATCHED: f64 = 0.04;
/// Pauses beyond which a recording is not looked at: it is no utterance.
const MOST: usize = 400;
/// How far what was heard of a voice before decides how fast it goes on, in sounds: some three words.
const TRUSTED: f64 = 15.0;

/// The energy of sound as it comes, hop by hop.
#[derive(Debug, Default)]
pub(in crate::call) struct Envelope {
    hops: Vec<f32>,
    /// Of the hop that is not complete: its sum so far, and samples.
    open: (f32, usize),
}

impl Envelope {
    /// The next samples.
    pub(in crate::call) fn push(&mut self, pcm: &[f32]) {
        for sample in pcm {
            self.open = (self.open.0 + sample.abs(), self.open.1 + 1);
            if self.open.1 == HOP {
                self.hops.push(self.open.0);
                self.open = (0.0, 0);
            }
        }
    }

    /// Hops so far: what is told of fewer is out of date.
    pub(in crate::call) fn len(&self) -> usize {
        self.hops.len()
    }
}

/// A silence inside speech.
#[derive(Clone, Copy, Debug)]
struct Pause {
    /// Hops that are not silent before it.
    voiced: usize,
}

/// What a recording holds.
struct Sound {
    /// Which hops are silence between words.
    silent: Vec<bool>,
    pauses: Vec<Pause>,
    /// Hops that are not silent.
    voiced: usize,
    first: usize,
    /// Behind the last hop that is not silent.
    end: usize,
}

impl Sound {
    /// `None`: there is nothing to hear, or far too many pauses.
    fn of(hops: &[f32], whole: bool) -> Option<Self> {
        let floor = hops.iter().copied().fold(0.0, f32::max) * SILENCE;
        let first = hops.iter().position(|hop| *hop > floor)?;
        let last = hops.iter().rposition(|hop| *hop > floor)?;
        // A silence at the end of what goes on is a pause as others are.
        let end = if whole { last + 1 } else { hops.len() };
        let mut sound = Self { silent: vec![false; hops.len()], pauses: Vec::new(), voiced: 0, first, end };
        let mut at = first;
        while at < end {
            let run = hops[at..end].iter().take_while(|hop| **hop <= floor).count();
            if run >= PAUSE {
                sound.silent[at..at + run].fill(true);
                sound.pauses.push(Pause { voiced: sound.voiced });
            } else {
                sound.voiced += run.max(1);
            }
            at += run.max(1);
        }
        (sound.pauses.len() <= MOST).then_some(sound)
    }
}

/// When each word of `text` ends in the sound of `envelope`. `expected`: how many hops of sound, without pauses, the text
/// should have, where the recording goes on; what is told of words that are not in it yet is a guess. `None`: there is
/// nothing to align.
pub(super) fn words(
    text: &str,
    language: Language,
    envelope: &Envelope,
    expected: Option<f64>,
) -> Option<Vec<WordEnd>> {
    let sound = Sound::of(&envelope.hops, expected.is_none())?;
    let ends = ends(text, language);
    let all = ends.last()?.weight;
    let marks: Vec<&End> = ends[..ends.len() - 1].iter().filter(|end| end.marked).collect();
    let likely = expected.map_or(sound.voiced as f64, |expected| expected.max(sound.voiced as f64));
    let matched = matches(&marks, all, &sound.pauses, likely);
    // Behind each anchor a new share begins: weight, and hops that are not silent.
    let mut anchors = vec![(0.0, 0.0)];
    anchors.extend(matched.iter().map(|(mark, pause)| (marks[*mark].weight, sound.pauses[*pause].voiced as f64)));
    anchors.push(match expected {
        None => (all, sound.voiced as f64),
        Some(expected) => {
            // As fast as up to the last pause, as far as that says anything.
            let (said, passed) = anchors.last().copied().unwrap_or_default();
            let pace = (passed + expected / all.max(1e-9) * TRUSTED) / (said + TRUSTED);
            (all, (passed + (all - said) * pace).max(sound.voiced as f64))
        }
    });
    let mut told = Vec::with_capacity(ends.len());
    let (mut hop, mut passed, mut anchor) = (sound.first, 0, 1);
    for end in &ends {
        while anchor + 1 < anchors.len() && end.weight > anchors[anchor].0 {
            anchor += 1;
        }
        let ((from, before), (to, until)) = (anchors[anchor - 1], anchors[anchor]);
        let share = ((end.weight - from) / (to - from).max(1e-9)).clamp(0.0, 1.0);
        let wanted = (before + share * (until - before)).round() as usize;
        while hop < sound.end && passed < wanted {
            passed += usize::from(!sound.silent[hop]);
            hop += 1;
        }
        // What is still to come follows what there is.
        told.push(WordEnd { text: end.text, samples: ((hop + wanted.saturating_sub(passed)) * HOP) as u64 });
    }
    Some(told)
}

/// The end of a word in a text.
struct End {
    /// Bytes up to there.
    text: usize,
    /// How long what is said up to there takes.
    weight: f64,
    /// A mark follows at which one pauses.
    marked: bool,
}

/// Whether one pauses at it.
pub(super) fn is_mark(c: char) -> bool {
    matches!(c, '.' | '!' | '?' | '…' | '。' | '！' | '？' | ',' | ';' | ':' | '，' | '、' | '；' | '：')
}

fn ends(text: &str, language: Language) -> Vec<End> {
    let (mut ends, mut said, mut start) = (Vec::<End>::new(), 0.0, 0);
    let mut chars = text.char_indices().peekable();
    while let Some((at, c)) = chars.next() {
        let next = chars.peek().map(|(_, c)| *c);
        let apart = |c: char| c.is_whitespace() || super::is_ideograph(c);
        // A mark of a script without spaces belongs to what it stands behind, and ends it.
        let wide = |c: char| is_mark(c) && !c.is_ascii();
        let dense = (super::is_ideograph(c) || wide(c)) && !next.is_some_and(wide);
        if !(dense || next.is_none_or(apart)) {
            continue;
        }
        let end = at + c.len_utf8();
        if c.is_whitespace() {
            start = end;
            continue;
        }
        let word = &text[start..end];
        let marked = word.trim_end_matches(|c: char| !c.is_alphanumeric()).len() < word.len()
            && word.chars().rev().take_while(|c| !c.is_alphanumeric()).any(is_mark);
        said += length(word, language, marked || text[end..].trim().is_empty());
        ends.push(End { text: end, weight: said, marked });
        start = end;
    }
    ends
}

/// Which mark is which pause, in order: where the shares differ least. Quadratic in what an utterance has of both.
fn matches(marks: &[&End], all: f64, pauses: &[Pause], voiced: f64) -> Vec<(usize, usize)> {
    let distance =
        |mark: usize, pause: usize| marks[mark].weight / all.max(1e-9) - pauses[pause].voiced as f64 / voiced.max(1.0);
    // Least cost of the first so many marks and pauses, and whether the last of both are matched.
    let width = pauses.len() + 1;
    let mut cost = vec![(0.0, false); (marks.len() + 1) * width];
    for mark in 1..=marks.len() {
        cost[mark * width] = (cost[(mark - 1) * width].0 + UNMATCHED, false);
        for pause in 1..=pauses.len() {
            let (left, up) = (cost[mark * width + pause - 1].0, cost[(mark - 1) * width + pause].0 + UNMATCHED);
            let away = distance(mark - 1, pause - 1);
            let both = cost[(mark - 1) * width + pause - 1].0 + away * away;
            let matched = away.abs() <= FARTHEST && both < left.min(up);
            cost[mark * width + pause] = if matched { (both, true) } else { (left.min(up), false) };
        }
    }
    let (mut mark, mut pause, mut found) = (marks.len(), pauses.len(), Vec::new());
    while mark > 0 && pause > 0 {
        if cost[mark * width + pause].1 {
            found.push((mark - 1, pause - 1));
            (mark, pause) = (mark - 1, pause - 1);
        } else if cost[mark * width + pause - 1].0 <= cost[(mark - 1) * width + pause].0 + UNMATCHED {
            pause -= 1;
        } else {
            mark -= 1;
        }
    }
    found.reverse();
    found
}

#[cfg(test)]
mod tests {
    use super::super::{Pace, aligned, prefix, words as count};
    use super::*;
    use crate::synth::espeak::tests::{speak, utterance};
    use crate::synth::espeak::{Config, Espeak};
    use crate::turn::Utterance;

    fn ends_of(text: &str, envelope: &Envelope, expected: Option<f64>) -> Vec<WordEnd> {
        words(text, Language::English, envelope, expected).expect("sound")
    }

    #[test]
    fn a_pause_is_at_its_mark_and_what_is_steady_is_shared() {
        // "One two," in 200 ms, a pause of 800, "three four" in 400.
        let mut envelope = Envelope::default();
        envelope.push(&vec![0.5; 20 * HOP]);
        envelope.push(&vec![0.0; 80 * HOP]);
        envelope.push(&vec![0.5; 40 * HOP]);
        let told = ends_of("one two, nine four", &envelope, None);
        let texts: Vec<usize> = told.iter().map(|end| end.text).collect();
        assert_eq!(texts, [3, 8, 13, 18]);
        assert_eq!(told[1].samples, 20 * HOP as u64, "the pause is behind the comma");
        assert_eq!(told[3].samples, 140 * HOP as u64);
        let mut steady = Envelope::default();
        steady.push(&vec![0.5; 100 * HOP]);
        let told = ends_of("one two three four", &steady, None);
        assert!(told.windows(2).all(|pair| pair[0].samples < pair[1].samples) && told[3].samples == 100 * HOP as u64);
        assert!(words("one two", Language::English, &Envelope::default(), None).is_none());
        assert!(words(" ", Language::English, &steady, None).is_none());
    }

    #[test]
    fn words_of_any_script_end_behind_their_marks() {
        let texts = |text: &str, language| -> Vec<String> {
            let mut from = 0;
            let pieces = ends(text, language).into_iter().map(|end| {
                let piece = text[from..end.text].trim().to_owned();
                from = end.text;
                format!("{piece}{}", if end.marked { "|" } else { "" })
            });
            pieces.collect()
        };
        assert_eq!(texts("Well, (yes) no.", Language::English), ["Well,|", "(yes)", "no.|"]);
        assert_eq!(texts("你好，Rust 世界！", Language::Chinese), ["你", "好，|", "Rust", "世", "界！|"]);
    }

    /// Where a recording goes on, what it holds of a text is found by how fast the voice speaks, and its pauses.
    #[test]
    fn a_recording_that_goes_on_is_aligned_as_far_as_it_goes() {
        let text = "one two, nine four, six ten";
        // Two words in 200 ms, a pause of 500, and it goes on with 100 of the next two.
        let mut envelope = Envelope::default();
        envelope.push(&vec![0.5; 20 * HOP]);
        envelope.push(&vec![0.0; 50 * HOP]);
        envelope.push(&vec![0.5; 10 * HOP]);
        let told = ends_of(text, &envelope, Some(60.0));
        assert_eq!(told[1].samples, 20 * HOP as u64);
        assert!((75..=85).contains(&(told[2].samples / HOP as u64)), "{told:?}");
        assert!(told[5].samples > 100 * HOP as u64, "what is to come was not heard: {told:?}");
        // It is silent behind the mark: nothing of what follows is heard.
        let mut silent = Envelope::default();
        silent.push(&vec![0.5; 20 * HOP]);
        silent.push(&vec![0.0; 50 * HOP]);
        let told = ends_of(text, &silent, Some(60.0));
        assert_eq!(told[1].samples, 20 * HOP as u64);
        assert!(told[2].samples > 70 * HOP as u64, "{told:?}");
    }

    /// Sentences of two languages, some of them long and without a mark inside.
    const TEXTS: [(&str, &str); 10] = [
        (
            "en",
            "Well, thank you for calling us today. Your parcel left our warehouse this morning, and it will be with you tomorrow.",
        ),
        (
            "en",
            "No, I am afraid not: the office is closed. We open again on Monday at nine, or you can write to us, if you like.",
        ),
        (
            "en",
            "Yes. It works like this: press the button, wait until the light is green, and then pull the handle slowly.",
        ),
        (
            "en",
            "Good morning. I have three messages for you, all of them from yesterday. The first, from your sister, is rather long.",
        ),
        (
            "en",
            "The technician will come to your house between nine and eleven on Thursday morning unless you tell us otherwise",
        ),
        (
            "en",
            "Please listen carefully because the options of our menu have changed since the last time that you called.",
        ),
        (
            "de",
            "Guten Tag, mein Name ist Anna, wie kann ich Ihnen heute helfen? Ihre Bestellung wurde gestern verschickt.",
        ),
        (
            "de",
            "Die Geschwindigkeitsbegrenzung auf der Autobahn wird voraussichtlich im kommenden Jahr wieder aufgehoben werden.",
        ),
        (
            "de",
            "Unser Fahrer konnte den Eingang Ihres Hauses nicht finden und hat das Paket wieder ins Lager gebracht.",
        ),
        (
            "de",
            "Wir haben leider keine freien Zimmer mehr, aber ich kann Ihnen gern ein anderes Hotel in der Nähe empfehlen.",
        ),
    ];

    /// Words of `espeak-ng`, which knows when each of them sounds, at 500 random instants: how many are at most a word off,
    /// by a share of the time and by alignment, of what is there whole and of what is still being made.
    #[test]
    fn aligned_words_are_right_to_the_word() {
        let Ok(mut voice) = Espeak::new(Config::default()) else {
            return antiphon_skip::skip("espeak", "espeak-ng is not installed");
        };
        let (mut near, mut exact, mut tried, mut random) = ([0; 4], [0; 4], 0, 7u64);
        let (_open, never) = std::sync::mpsc::sync_channel::<()>(1);
        // A call that has lasted for some sentences knows how fast its voice speaks.
        let mut pace = Pace::default();
        let before = speak(&mut voice, utterance(TEXTS[0].1)).len() as u64;
        (0..8).for_each(|_| pace.learn(TEXTS[0].1, before));
        for (tag, text) in TEXTS {
            let told = Utterance { language: Some(tag.into()), ..utterance(text) };
            let truth = told.words.clone();
            let pcm = speak(&mut voice, told);
            for waited in 0.. {
                if truth.known().is_some() {
                    break;
                }
                assert!(waited < 6_000, "when words sound was not found in a minute");
                // Nothing comes: it waits.
                let _ = never.recv_timeout(std::time::Duration::from_millis(10));
            }
            let (mut envelope, language) = (Envelope::default(), Language::of_tag(tag));
            envelope.push(&pcm);
            let total = pcm.len() as u64;
            let whole = aligned(text, language, &envelope, None).expect("sound");
            let heard =
                |at, total, words: Option<&[WordEnd]>| i64::from(count(prefix(text, at, total, words, &pace).0));
            assert_eq!(heard(total, Some(total), Some(&whole)), i64::from(count(text)), "never off at the end");
            assert_eq!(heard(0, Some(total), Some(&whole)), 0);
            for _ in 0..50 {
                random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                let at = 1 + (random >> 33) % (total - 1);
                let really = heard(at, Some(total), truth.known());
                // A second more was made than was heard.
                let mut part = Envelope::default();
                part.push(&pcm[..(at as usize + RATE as usize).min(pcm.len())]);
                let made = aligned(text, language, &part, Some(&pace));
                let found = [
                    heard(at, Some(total), None),
                    heard(at, Some(total), Some(&whole)),
                    heard(at, None, None),
                    heard(at, None, made.as_deref()),
                ];
                for (n, found) in found.iter().enumerate() {
                    near[n] += u32::from((found - really).abs() <= 1);
                    exact[n] += u32::from(*found == really);
                }
                tried += 1;
            }
            pace.learn(text, total);
        }
        println!("of {tried}: by share, aligned, by pace, aligned as it comes: {near:?} near, {exact:?} exact");
        assert!(tried == 500 && near[1] >= 495 && near[1] > near[0], "{near:?} of {tried}, exact {exact:?}");
        assert!(near[3] > near[2], "{near:?} of {tried}, exact {exact:?}");
    }
}
