//! Words on a recording whose voice does not say when each of them sounds: by how long they take and where it is silent.
//!
//! # Why
//! A share of the time is right on average and wrong wherever a voice pauses. What is silent is known from the
//! recording, and what is written says where pauses belong: at its marks. So marks and pauses are matched, in order, by
//! where the share of the letters says that each mark would be; between two of them the time that is not silent is shared
//! by the letters.

use super::weight;
use crate::audio::RATE;
use crate::turn::WordEnd;

/// Samples of which one energy is kept: 10 ms.
pub(in crate::call) const HOP: usize = RATE as usize / 100;
/// Sound below this share of the loudest is silence.
const SILENCE: f32 = 0.02;
/// Shorter silences are part of words: 60 ms, as before a "t".
const PAUSE: usize = 6;
/// A mark may be so far from where the letters say, as a share of the whole.
const FARTHEST: f64 = 0.2;
/// What leaving a mark without its pause costs, as a squared share.
const UNMATCHED: f64 = 0.01;
/// Pauses beyond which a recording is not looked at: it is no utterance.
const MOST: usize = 400;

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
}

/// A silence inside speech.
#[derive(Clone, Copy, Debug)]
struct Pause {
    /// Hops that are not silent before it.
    voiced: usize,
}

/// When each word of `text` ends in the sound of `envelope`; `None`: it has no pauses, so that nothing is learned from
/// it.
pub(super) fn words(text: &str, envelope: &Envelope) -> Option<Vec<WordEnd>> {
    let hops = &envelope.hops;
    let floor = hops.iter().copied().fold(0.0, f32::max) * SILENCE;
    let first = hops.iter().position(|hop| *hop > floor)?;
    let last = hops.iter().rposition(|hop| *hop > floor)?;
    // Which hops are silence, and the pauses between words.
    let mut silent = vec![false; hops.len()];
    let (mut pauses, mut voiced, mut at) = (Vec::new(), 0, first);
    while at <= last {
        let run = hops[at..=last].iter().take_while(|hop| **hop <= floor).count();
        if run >= PAUSE {
            silent[at..at + run].fill(true);
            pauses.push(Pause { voiced });
        } else {
            voiced += run.max(1);
        }
        at += run.max(1);
    }
    if pauses.is_empty() || pauses.len() > MOST {
        return None;
    }
    let ends = ends(text);
    let all = ends.last()?.weight;
    let marks: Vec<&End> = ends[..ends.len() - 1].iter().filter(|end| end.marked).collect();
    let matched = matches(&marks, all, &pauses, voiced);
    // Behind each anchor a new share begins: weight, and hops that are not silent.
    let mut anchors = vec![(0.0, 0usize)];
    anchors.extend(matched.iter().map(|(mark, pause)| (marks[*mark].weight, pauses[*pause].voiced)));
    anchors.push((all, voiced));
    let mut told = Vec::with_capacity(ends.len());
    let (mut hop, mut passed, mut anchor) = (first, 0, 1);
    for end in &ends {
        while anchor + 1 < anchors.len() && end.weight > anchors[anchor].0 {
            anchor += 1;
        }
        let ((from, before), (to, until)) = (anchors[anchor - 1], anchors[anchor]);
        let share = ((end.weight - from) / (to - from).max(1e-9)).clamp(0.0, 1.0);
        let wanted = before + (share * (until - before) as f64).round() as usize;
        while hop <= last && passed < wanted {
            passed += usize::from(!silent[hop]);
            hop += 1;
        }
        told.push(WordEnd { text: end.text, samples: (hop * HOP) as u64 });
    }
    Some(told)
}

/// The end of a word in a text.
struct End {
    /// Bytes up to there.
    text: usize,
    /// What is said up to there, by its letters.
    weight: f64,
    /// A mark follows at which one pauses.
    marked: bool,
}

fn ends(text: &str) -> Vec<End> {
    let (mut ends, mut said) = (Vec::new(), 0.0);
    let mut chars = text.char_indices().peekable();
    while let Some((at, c)) = chars.next() {
        let pauses =
            matches!(c, '.' | '!' | '?' | '…' | '。' | '！' | '？' | ',' | ';' | ':' | '，' | '、' | '；' | '：');
        if !pauses {
            said += weight(c);
        }
        let next = chars.peek().map(|(_, c)| *c);
        if super::is_ideograph(c) || next.is_none_or(|next| next.is_whitespace() || super::is_ideograph(next)) {
            let marked = pauses || next.is_some_and(|next| matches!(next, '。' | '，' | '、'));
            if !c.is_whitespace() {
                ends.push(End { text: at + c.len_utf8(), weight: said, marked });
            }
        }
    }
    ends
}

/// Which mark is which pause, in order: where the shares differ least. Quadratic in what an utterance has of both.
fn matches(marks: &[&End], all: f64, pauses: &[Pause], voiced: usize) -> Vec<(usize, usize)> {
    let distance = |mark: usize, pause: usize| {
        marks[mark].weight / all.max(1e-9) - pauses[pause].voiced as f64 / voiced.max(1) as f64
    };
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
    use super::super::{Pace, prefix, words as count};
    use super::*;
    use crate::synth::espeak::tests::{speak, utterance};
    use crate::synth::espeak::{Config, Espeak};

    #[test]
    fn a_pause_is_at_its_mark_and_what_is_steady_tells_nothing() {
        // "One two," in 200 ms, a pause of 800, "three four" in 400.
        let mut envelope = Envelope::default();
        envelope.push(&vec![0.5; 20 * HOP]);
        envelope.push(&vec![0.0; 80 * HOP]);
        envelope.push(&vec![0.5; 40 * HOP]);
        let told = words("one two, nine four", &envelope).expect("a pause");
        let texts: Vec<usize> = told.iter().map(|end| end.text).collect();
        assert_eq!(texts, [3, 8, 13, 18]);
        assert_eq!(told[1].samples, 20 * HOP as u64, "the pause is behind the comma");
        assert_eq!(told[3].samples, 140 * HOP as u64);
        let mut steady = Envelope::default();
        steady.push(&vec![0.5; 100 * HOP]);
        assert!(words("one two, three four", &steady).is_none());
        assert!(words("one two", &Envelope::default()).is_none());
    }

    /// Words of `espeak-ng`, which knows when each of them sounds, at 500 instants: how many are at most a word off, by a
    /// share of the time and by this.
    #[test]
    fn pauses_tell_where_words_are() {
        let Ok(mut voice) = Espeak::new(Config::default()) else {
            return antiphon_skip::skip("espeak", "espeak-ng is not installed");
        };
        let texts = [
            "Well, thank you for calling us today. Your parcel left our warehouse this morning, and it will be with you tomorrow.",
            "No, I am afraid not: the office is closed. We open again on Monday at nine, or you can write to us, if you like.",
            "One moment, please. I can see the booking here, for two people, with breakfast; is that the one you mean?",
            "Yes. It works like this: press the button, wait until the light is green, and then pull the handle slowly.",
            "Good morning. I have three messages for you, all of them from yesterday. The first, from your sister, is rather long.",
        ];
        let (mut before, mut after, mut exact, mut tried, mut random) = (0, 0, (0, 0), 0, 7u64);
        let (_open, never) = std::sync::mpsc::sync_channel::<()>(1);
        for text in texts {
            let told = utterance(text);
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
            let mut envelope = Envelope::default();
            envelope.push(&pcm);
            let (pace, total) = (Pace::default(), Some(pcm.len() as u64));
            let aligned = words(text, &envelope).expect("pauses");
            for _ in 0..100 {
                random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                let at = 1 + (random >> 33) % (pcm.len() as u64 - 1);
                let heard = |words: Option<&[WordEnd]>| i64::from(count(prefix(text, at, total, words, &pace).0));
                let really = heard(truth.known());
                let (share, by_pauses) = ((heard(None) - really).abs(), (heard(Some(&aligned)) - really).abs());
                (before, after) = (before + u32::from(share <= 1), after + u32::from(by_pauses <= 1));
                exact = (exact.0 + u32::from(share == 0), exact.1 + u32::from(by_pauses == 0));
                tried += 1;
            }
        }
        println!("of {tried}, at most a word off: {before} by share, {after} by pauses; exact: {exact:?}");
        assert!(tried == 500 && after > before && after >= 475, "{before} before, {after} after, exact {exact:?}");
    }
}
