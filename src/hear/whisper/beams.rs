//! Beam search: several texts side by side, and the likeliest of those that come to an end.
//!
//! # Why
//! The likeliest next token often begins a text that becomes unlikely: where sound is poor, as on a telephone, a text that
//! began with the second choice is right. Of a hundred sentences by G.711 the reference gets 6.3 % of the words wrong with
//! five texts and 7.6 % by the likeliest token alone (`tests/bench/README.md`). Weights are read once a step for all of them, so it costs little.
//!
//! As the reference does it (`openai/whisper`, `BeamSearchDecoder` with patience 1): a text that ends leaves the race and
//! makes no room; the race is over when as many have ended as began.

use super::HearError;
use super::engine::Beams;
use super::quality;
use super::rules::{Rules, log_sum_exp};
use super::stop::Stop;

/// Texts side by side where somebody waits for the words; as many as the reference's own programs take.
pub const BEAMS: usize = 5;

/// A text and how likely it is.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Found {
    pub(super) tokens: Vec<u32>,
    /// Sum of the log probabilities of its tokens, its end included where it has one.
    pub(super) sum: f32,
}

impl Found {
    /// Mean log probability.
    pub(super) fn probability(&self) -> f32 {
        self.sum / (self.tokens.len() as f32 + 1.0)
    }
}

/// The likeliest of texts of up to `most` tokens; `None` when stopped. `first`: scores of the first token. `width`: texts
/// side by side, from 1.
pub(super) fn search(
    beams: &mut dyn Beams,
    first: &[f32],
    rules: &Rules<'_>,
    (width, most): (usize, usize),
    stop: &Stop,
) -> Result<Option<Found>, HearError> {
    let (mut open, mut ended) = (vec![Found::default()], Vec::new());
    let mut scores = vec![first.to_vec()];
    loop {
        let mut next = Vec::new();
        for (parent, (text, scores)) in open.iter().zip(&mut scores).enumerate() {
            rules.apply(scores, &text.tokens);
            let total = log_sum_exp(scores);
            // One more than can go on: one of them may be the end.
            let of = |(token, score): (u32, f32)| (text.sum + score - total, parent, token);
            next.extend(highest(scores, width + 1).into_iter().map(of));
        }
        next.sort_by(|a, b| b.0.total_cmp(&a.0));
        let mut going = Vec::new();
        for (sum, parent, token) in next {
            if token == rules.tokens.end {
                ended.push(Found { tokens: open[parent].tokens.clone(), sum });
            } else {
                going.push((sum, parent, token));
            }
            if going.len() == width {
                break;
            }
        }
        if stop.is_set() {
            return Ok(None);
        }
        if going.is_empty() {
            break;
        }
        let longer = |(sum, parent, token): &(f32, usize, u32)| {
            let tokens = open[*parent].tokens.iter().copied().chain([*token]).collect();
            Found { tokens, sum: *sum }
        };
        open = going.iter().map(longer).collect();
        // A loop is likelier with every round; the caller tries otherwise.
        let stuck = open.first().is_some_and(|text| quality::loops(&text.tokens));
        if ended.len() >= width || stuck || open[0].tokens.len() >= most {
            break;
        }
        scores = beams.next(&going.iter().map(|(_, parent, token)| (*parent, *token)).collect::<Vec<_>>())?;
    }
    // Texts without an end count where too few have one.
    let enough = ended.len() >= width;
    let all = ended.into_iter().chain(open.into_iter().filter(|_| !enough));
    Ok(all.max_by(|a, b| a.probability().total_cmp(&b.probability())).or_else(|| Some(Found::default())))
}

/// The `count` likeliest tokens that are allowed.
fn highest(scores: &[f32], count: usize) -> Vec<(u32, f32)> {
    let mut best: Vec<(u32, f32)> = Vec::with_capacity(count + 1);
    for (token, score) in scores.iter().enumerate() {
        let least = if best.len() < count { f32::NEG_INFINITY } else { best[count - 1].1 };
        if *score > least {
            let at = best.partition_point(|(_, other)| other >= score);
            best.insert(at, (token as u32, *score));
            best.truncate(count);
        }
    }
    best
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::super::Whisper;
    use super::*;

    /// A text, and the tokens that may follow it with their probabilities.
    type Row<'a> = (&'a [u32], &'a [(u32, f32)]);

    /// Probabilities of the next token, by the text so far; what has none ends.
    struct Told<'a> {
        texts: Vec<Vec<u32>>,
        table: &'a [Row<'a>],
        size: usize,
        end: u32,
        steps: usize,
    }

    impl Told<'_> {
        fn scores(&self, text: &[u32]) -> Vec<f32> {
            let mut scores = vec![1e-6f32.ln(); self.size];
            let row = self.table.iter().find(|(known, _)| *known == text);
            for (token, p) in row.map_or(&[(self.end, 0.99)][..], |(_, row)| row) {
                scores[*token as usize] = p.ln();
            }
            scores
        }
    }

    impl Beams for Told<'_> {
        fn next(&mut self, from: &[(usize, u32)]) -> Result<Vec<Vec<f32>>, HearError> {
            self.steps += 1;
            let longer = |(parent, token): &(usize, u32)| [&self.texts[*parent][..], &[*token]].concat();
            self.texts = from.iter().map(longer).collect();
            Ok(self.texts.iter().map(|text| self.scores(text)).collect())
        }
    }

    fn whisper() -> Whisper {
        let kit = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/whisper");
        Whisper::load(&kit).expect("the kit loads")
    }

    #[test]
    fn a_text_that_begins_worse_and_goes_on_better_is_found() {
        let whisper = whisper();
        let tokens = &whisper.tokens;
        let rules = Rules { tokens, timestamps: false };
        let allowed = |id: &u32| !tokens.suppressed.contains(id) && !tokens.suppressed_first.contains(id);
        let some: Vec<u32> = (0..tokens.end).filter(allowed).take(4).collect();
        let [a, b, c, d] = some[..] else { panic!("four tokens") };
        let table: &[Row<'_>] = &[(&[], &[(a, 0.55), (b, 0.45)]), (&[a], &[(c, 0.3), (d, 0.3)]), (&[b], &[(d, 0.95)])];
        let found = |width: usize, most: usize| {
            let size = tokens.first_timestamp() as usize;
            let mut told = Told { texts: vec![Vec::new()], table, size, end: tokens.end, steps: 0 };
            let first = told.scores(&[]);
            let found = search(&mut told, &first, &rules, (width, most), &Stop::default()).expect("it works");
            (found.expect("not stopped"), told.steps)
        };
        assert_eq!(found(1, 8).0.tokens[..1], [a], "alone the likeliest token decides");
        for width in [2, 5] {
            let (best, steps) = found(width, 8);
            assert_eq!(best.tokens, [b, d], "{width}");
            assert!((best.probability() - (0.45f32 * 0.95 * 0.99).ln() / 3.0).abs() < 0.1, "{best:?}");
            assert!(steps < 8, "{steps}: it ends when enough texts have");
        }
        assert_eq!(found(2, 1).0.tokens.len(), 1, "no longer than it may be");
        let stop = Stop::default();
        stop.set();
        let mut told = Told { texts: vec![Vec::new()], table, size: 9, end: tokens.end, steps: 0 };
        let first = vec![0.0; tokens.first_timestamp() as usize];
        assert_eq!(search(&mut told, &first, &rules, (2, 8), &stop).expect("it works"), None);
    }

    #[test]
    fn texts_side_by_side_have_the_scores_that_each_has_alone() {
        let whisper = whisper();
        let sound: Vec<f32> = (0..16_000).map(|n| ((n * n) as f32 * 1e-4).sin() * 0.3).collect();
        let begun = || whisper.listen(&sound, &Stop::default()).expect("it works").expect("not stopped");
        let (prompt, steps) = ([whisper.tokens.start], [vec![(0, 5), (0, 6), (0, 7)], vec![(2, 8), (0, 9), (2, 10)]]);
        let mut text = begun();
        text.next(&prompt).expect("scores");
        let mut beams = text.beams(3).expect("the CPU has them");
        let last: Vec<_> = steps.iter().map(|step| beams.next(step).expect("scores")).collect();
        for (tokens, scores) in [([7, 8], &last[1][0]), ([5, 9], &last[1][1]), ([7, 10], &last[1][2])] {
            let mut alone = begun();
            alone.next(&prompt).expect("scores");
            let expected = alone.next(&tokens).expect("scores");
            let worst = expected.iter().zip(scores).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
            assert!(worst < 1e-3, "{tokens:?}: {worst}");
        }
        drop(beams);
        assert_eq!(text.len(), 1, "the text itself is as it was");
    }

    #[test]
    fn the_highest_are_in_order_and_allowed() {
        let none = f32::NEG_INFINITY;
        assert_eq!(highest(&[1.0, none, 3.0, 2.0, 3.0], 3), [(2, 3.0), (4, 3.0), (3, 2.0)]);
        assert_eq!(highest(&[none, 1.0, f32::NAN], 3), [(1, 1.0)]);
    }
}
