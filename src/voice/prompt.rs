//! How long a voice prompt is, to the token.
//!
//! Owns the choice of the stretch of a recording that becomes the prompt. Pure arithmetic.
//!
//! # Why
//! The flow model works in blocks of [`BLOCK`] tokens counted from the start of the prompt, and a block can only
//! run when all its tokens are known. With a prompt of `P` tokens the first sound of every utterance waits for
//! `25 - P mod 25` tokens, so the prompt's length decides how soon that is: 8 is the shortest hop that lets the
//! vocoder release something useful. The length is met by taking more or less of the silence around the speech.
//! Only a recording without silence loses speech to it, and always less than a second; then the hop that costs
//! the least speech is taken, as a lost word does more harm than a few tokens of waiting.

use std::ops::Range;

/// Tokens of one block of the flow model.
pub const BLOCK: usize = 25;
/// Tokens a second.
pub const TOKENS: usize = 25;
/// The longest prompt: 30 s.
pub const MAX_TOKENS: usize = 30 * TOKENS;
/// The longest first hop that is still of use.
pub const MAX_FIRST_HOP: usize = 15;
/// Silence that is kept on both sides of speech if there is any, seconds.
const MARGIN: f64 = 0.06;

/// The stretch of a recording that becomes the prompt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Window {
    /// In samples of the recording.
    pub samples: Range<usize>,
    /// Tokens that it has.
    pub tokens: usize,
    /// Samples of speech after its end.
    pub cut: usize,
}

impl Window {
    /// Tokens that the first sound of an utterance waits for.
    pub fn first_hop(&self) -> usize {
        BLOCK - self.tokens % BLOCK
    }
}

/// Chooses the window: `length` samples at `rate`, of which `speech` are speech. `first_hop` is the shortest hop
/// to aim for, `1..=25`.
///
/// `None` when the recording is shorter than any prompt with such a hop.
pub fn window(length: usize, rate: u32, speech: &Range<usize>, first_hop: usize) -> Option<Window> {
    let rate = rate as usize;
    // Samples that give at least `tokens` tokens after resampling.
    let needed = |tokens: usize| (tokens * rate).div_ceil(TOKENS);
    let longest = (length * TOKENS / rate).min(MAX_TOKENS);
    let margin = (MARGIN * rate as f64) as usize;
    let wanted = speech.start.saturating_sub(margin)..(speech.end + margin).min(length);
    let least = (wanted.len() * TOKENS).div_ceil(rate);
    let hops = first_hop..=first_hop.max(MAX_FIRST_HOP);

    // The shortest hop whose prompt holds all the speech.
    let whole = hops.clone().find_map(|hop| {
        let rest = (BLOCK - hop) % BLOCK;
        let tokens = least + (rest + BLOCK - least % BLOCK) % BLOCK;
        (tokens > 0 && tokens <= longest).then_some(tokens)
    });
    if let Some(tokens) = whole {
        // More silence is taken from before the speech: after it, it would sound like a pause to continue.
        let extra = needed(tokens).saturating_sub(wanted.len());
        let before = extra.min(wanted.start);
        let end = (wanted.end + extra - before).min(length);
        let start = end.saturating_sub(needed(tokens));
        return Some(Window { samples: start..start + needed(tokens), tokens, cut: 0 });
    }
    // The hop that loses the least; of equals, the shortest.
    let tokens = hops.filter_map(|hop| longest.checked_sub((longest + hop) % BLOCK)).filter(|t| *t > 0).max()?;
    let start = wanted.start.min(length - needed(tokens));
    let samples = start..start + needed(tokens);
    let cut = speech.end.saturating_sub(samples.end) + samples.start.saturating_sub(speech.start);
    Some(Window { samples, tokens, cut })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn silence_around_speech_gives_the_shortest_hop() {
        // 10 s, speech from 2 s to 8 s.
        let w = window(240_000, 24_000, &(48_000..192_000), 8).expect("fits");
        assert_eq!((w.first_hop(), w.tokens, w.cut), (8, 167, 0));
        assert!(w.samples.start <= 48_000 && w.samples.end >= 192_000);
        assert_eq!(w.samples.len(), 167 * 960);
    }

    #[test]
    fn little_silence_gives_a_longer_hop_before_it_costs_speech() {
        // 160 tokens of which 150 are speech: 167 does not fit, a hop of 15 (160) does.
        let w = window(160 * 960, 24_000, &(5 * 960..155 * 960), 8).expect("fits");
        assert_eq!((w.tokens, w.first_hop(), w.cut), (160, 15, 0));
    }

    #[test]
    fn no_silence_costs_the_least_speech() {
        // 159 tokens, all speech: 142 (hop 8) to 135 (hop 15).
        let w = window(159 * 960, 24_000, &(0..159 * 960), 8).expect("fits");
        assert_eq!((w.tokens, w.first_hop()), (142, 8));
        assert_eq!(w.cut, 17 * 960);
    }

    #[test]
    fn thirty_seconds_are_the_most() {
        let w = window(40 * 24_000, 24_000, &(24_000..30 * 24_000), 8).expect("fits");
        assert!(w.tokens <= MAX_TOKENS);
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn windows_lie_inside_and_lose_less_than_a_second(
            rate in 8_000_u32..192_001,
            seconds in 3.0_f64..45.0,
            from in 0.0_f64..0.5,
            to in 0.5_f64..1.0,
            hop in 1_usize..=25,
        ) {
            let length = (seconds * f64::from(rate)) as usize;
            let speech = (from * length as f64) as usize..(to * length as f64) as usize;
            prop_assume!(speech.len() < 30 * rate as usize);
            let w = window(length, rate, &speech, hop).expect("three seconds are enough");
            prop_assert!(w.samples.end <= length);
            prop_assert!(w.first_hop() >= hop && w.first_hop() <= hop.max(MAX_FIRST_HOP));
            prop_assert!(w.cut < rate as usize + rate as usize / 10, "{} cut", w.cut);
            // Enough samples for the tokens, at both rates of the networks.
            for (to, per_token) in [(24_000, 960), (16_000, 640)] {
                prop_assert!((w.samples.len() * to).div_ceil(rate as usize) >= w.tokens * per_token);
            }
        }
    }
}
