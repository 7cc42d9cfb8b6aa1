//! Which token may follow: what the checkpoint suppresses, and the order of timestamps.

use super::tokens::Tokens;

/// The rules of one text.
pub(super) struct Rules<'a> {
    pub(super) tokens: &'a Tokens,
    /// Whether it has timestamps.
    pub(super) timestamps: bool,
}

impl Rules<'_> {
    /// Takes from `scores` what may not follow `written` (the text without its prompt).
    pub(super) fn apply(&self, scores: &mut [f32], written: &[u32]) {
        let tokens = self.tokens;
        suppress(scores, tokens, written.is_empty());
        forbid(scores, [tokens.no_timestamps]);
        let (first, count) = (tokens.first_timestamp(), scores.len() as u32);
        if !self.timestamps {
            return forbid(scores, first..count);
        }
        self.order(scores, written);
        if written.is_empty() {
            // A text begins with its time, and not late: nothing is to be skipped.
            forbid(scores, 0..first);
            if let Some(latest) = tokens.max_initial {
                forbid(scores, first.saturating_add(latest).saturating_add(1)..count);
            }
        }
        // Where all times together are likelier than every word, it is time for one.
        let (words, times) = scores.split_at((first as usize).min(scores.len()));
        let most = words.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        if log_sum_exp(times) > most {
            forbid(scores, 0..first);
        }
    }

    /// Times come in pairs (the end of one part, the beginning of the next) and do not go back.
    fn order(&self, scores: &mut [f32], written: &[u32]) {
        let tokens = self.tokens;
        let (first, count) = (tokens.first_timestamp(), scores.len() as u32);
        let is_time = |back: usize| written.len().checked_sub(back).map(|at| written[at] >= first);
        let last = is_time(1).unwrap_or(false);
        let before = is_time(2).unwrap_or(true);
        if last && before {
            forbid(scores, first..count);
        } else if last {
            forbid(scores, 0..tokens.end);
        }
        if let Some(latest) = written.iter().rev().find(|id| **id >= first) {
            // The end of a part may be the beginning of the next; a part of no length may not be.
            let least = if last && !before { *latest } else { latest + 1 };
            forbid(scores, first..least.min(count));
        }
    }
}

/// Takes away what the checkpoint suppresses, always or as the `first` token.
pub(super) fn suppress(scores: &mut [f32], tokens: &Tokens, first: bool) {
    forbid(scores, tokens.suppressed.iter().copied());
    if first {
        forbid(scores, tokens.suppressed_first.iter().copied());
    }
}

fn forbid(scores: &mut [f32], ids: impl IntoIterator<Item = u32>) {
    for id in ids {
        if let Some(score) = scores.get_mut(id as usize) {
            *score = f32::NEG_INFINITY;
        }
    }
}

/// `ln(sum(exp(scores)))`; minus infinity where nothing is allowed.
pub(super) fn log_sum_exp(scores: &[f32]) -> f32 {
    let most = scores.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    if most == f32::NEG_INFINITY {
        return most;
    }
    most + scores.iter().map(|score| (score - most).exp()).sum::<f32>().ln()
}

/// The likeliest token and its log probability among those that are allowed.
pub(super) fn likeliest(scores: &[f32]) -> (u32, f32) {
    let (mut best, mut most) = (0, f32::NEG_INFINITY);
    for (id, score) in scores.iter().enumerate() {
        if *score > most {
            (best, most) = (id as u32, *score);
        }
    }
    (best, most - log_sum_exp(scores))
}

/// A token by its probability at `temperature`, where `random` is uniform in 0..1, and its log probability at 1.
pub(super) fn sampled(scores: &[f32], temperature: f32, random: f32) -> (u32, f32) {
    let warm: Vec<f32> = scores.iter().map(|score| score / temperature).collect();
    let total = log_sum_exp(&warm);
    let (mut rest, mut chosen) = (random, None);
    for (id, score) in warm.iter().enumerate().filter(|(_, score)| **score > f32::NEG_INFINITY) {
        chosen = Some(id);
        rest -= (score - total).exp();
        if rest < 0.0 {
            break;
        }
    }
    match chosen {
        Some(id) => (id as u32, scores[id] - log_sum_exp(scores)),
        None => likeliest(scores),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sums_and_samples_leave_out_what_is_forbidden() {
        let none = f32::NEG_INFINITY;
        assert_eq!(log_sum_exp(&[none, none]), none);
        let ln_2 = std::f32::consts::LN_2;
        assert!((log_sum_exp(&[1e3, 1e3, none]) - 1e3 - ln_2).abs() < 1e-3, "no overflow");
        let scores = [none, 1.0, none, 1.0];
        assert_eq!(likeliest(&scores).0, 1);
        assert!((likeliest(&scores).1 + ln_2).abs() < 1e-5);
        assert_eq!(sampled(&scores, 1.0, 0.0).0, 1);
        assert_eq!(sampled(&scores, 1.0, 0.75).0, 3);
        assert_eq!(sampled(&scores, 0.2, 0.999_999_9).0, 3, "rounding does not fall off the end");
    }
}
