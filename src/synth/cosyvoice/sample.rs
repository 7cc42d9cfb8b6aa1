//! Sampling speech tokens: a counter-based generator and repetition-aware sampling.
//!
//! Pure functions. The result of a sample depends on the scores, the recent ids, the key and the index alone, never
//! on what else is decoded.
//!
//! # Why
//! The original samples from torch's global generator, so its results depend on everything that ran before. Philox
//! is a function of (key, counter): any device reproduces it, and row 64 of a batch samples what it would sample alone.

use sha2::{Digest, Sha256};

use super::backend::{Controls, MinLength};
use super::config::{LlmConfig, RasConfig};

/// The generator key of an utterance: the first 64 bits of a hash of everything that makes it what it is.
pub fn key(text: &str, instructions: &str, voice: &str, seed: u64) -> [u32; 2] {
    let mut hash = Sha256::new();
    for part in [text, instructions, voice] {
        hash.update((part.len() as u64).to_le_bytes());
        hash.update(part.as_bytes());
    }
    hash.update(seed.to_le_bytes());
    let digest = hash.finalize();
    let word = |at: usize| u32::from_le_bytes([digest[at], digest[at + 1], digest[at + 2], digest[at + 3]]);
    [word(0), word(4)]
}

/// Philox4x32 with ten rounds (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011).
pub fn philox(key: [u32; 2], counter: [u32; 4]) -> [u32; 4] {
    let [mut k0, mut k1] = key;
    let mut c = counter;
    for _ in 0..10 {
        let low = u64::from(c[0]) * 0xD251_1F53;
        let high = u64::from(c[2]) * 0xCD9E_8D57;
        c = [(high >> 32) as u32 ^ c[1] ^ k0, high as u32, (low >> 32) as u32 ^ c[3] ^ k1, low as u32];
        k0 = k0.wrapping_add(0x9E37_79B9);
        k1 = k1.wrapping_add(0xBB67_AE85);
    }
    c
}

/// The two uniform values of decode index `index`, in `[0, 1)` with 24 bits: one for the nucleus, one for the
/// fallback. Both come from one counter value, so that neither depends on whether the other is used.
pub fn uniforms(key: [u32; 2], index: u32) -> [f32; 2] {
    let bits = philox(key, [index, 0, 0, 0]);
    [bits[0], bits[1]].map(|b| (b >> 8) as f32 / (1u32 << 24) as f32)
}

/// Sets what may not be sampled to minus infinity: nothing from `min_len` on; before it every control id, or as
/// shipped only the first.
pub fn mask(scores: &mut [f32], config: &LlmConfig, decoded: u32, min_len: u32, min_length: MinLength) {
    if decoded >= min_len {
        return;
    }
    let last = match min_length {
        MinLength::Intended => scores.len(),
        MinLength::Reference => config.speech_tokens + 1,
    };
    let last = last.min(scores.len());
    if let Some(masked) = scores.get_mut(config.speech_tokens..last) {
        masked.fill(f32::NEG_INFINITY);
    }
}

/// Sets the control ids that a stretch may not sample to minus infinity.
pub fn hide(scores: &mut [f32], config: &LlmConfig, controls: Controls) {
    let first = config.speech_tokens;
    for (id, score) in scores.iter_mut().enumerate().skip(first) {
        let sampled = match controls {
            Controls::Only(only) => id == only as usize,
            Controls::AllButFirst => id != first,
            Controls::All => true,
        };
        if !sampled {
            *score = f32::NEG_INFINITY;
        }
    }
}

/// Log-softmax, the maximum and the sum in double.
pub fn log_softmax(scores: &[f32]) -> Vec<f32> {
    let max = scores.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum: f64 = scores.iter().map(|&s| f64::from(s - max).exp()).sum();
    let log_sum = sum.ln();
    scores.iter().map(|&s| (f64::from(s - max) - log_sum) as f32).collect()
}

/// The nucleus: ids by descending probability (equal ones by ascending id) while the sum so far is below `top_p`
/// and fewer than `top_k` are taken; the one that crosses is in it. Returns ids and their probabilities.
pub fn nucleus(log_probs: &[f32], config: &RasConfig) -> Vec<(u32, f32)> {
    let mut order: Vec<u32> = (0..log_probs.len() as u32).collect();
    let of = |id: u32| log_probs[id as usize];
    let descending = |a: &u32, b: &u32| of(*b).total_cmp(&of(*a)).then(a.cmp(b));
    let kept = config.top_k.min(order.len());
    // Only the top_k need an order among themselves.
    if kept > 0 && kept < order.len() {
        order.select_nth_unstable_by(kept - 1, descending);
        order.truncate(kept);
    }
    order.sort_unstable_by(descending);
    let mut sum = 0f32;
    let mut taken = Vec::with_capacity(kept);
    for id in order {
        if sum >= config.top_p {
            break;
        }
        let probability = of(id).exp();
        sum += probability;
        taken.push((id, probability));
    }
    taken
}

/// One id by RAS (section 5): from the nucleus, and when that id is a repetition within the window once more from
/// everything but that id. `recent` holds the ids emitted so far, newest last. `None`: no finite score.
pub fn next_id(scores: &[f32], recent: &[u32], config: &RasConfig, key: [u32; 2], index: u32) -> Option<u32> {
    if scores.iter().any(|s| s.is_nan()) {
        return None;
    }
    let mut log_probs = log_softmax(scores);
    let [first, second] = uniforms(key, index);
    let candidates = nucleus(&log_probs, config);
    let id = pick(candidates.iter().map(|&(id, p)| (id, f64::from(p))), first)?;
    let window = &recent[recent.len().saturating_sub(config.window)..];
    let repeats = window.iter().filter(|&&r| r == id).count();
    if (repeats as f32) < config.window as f32 * config.tau {
        return Some(id);
    }
    // The sample is in proportion, so the rest need not be normalised again.
    *log_probs.get_mut(id as usize)? = f32::NEG_INFINITY;
    pick(log_probs.iter().enumerate().map(|(i, &l)| (i as u32, f64::from(l).exp())), second)
}

/// The first entry whose running sum passes `uniform` times the total, in the order given.
fn pick(weights: impl Iterator<Item = (u32, f64)> + Clone, uniform: f32) -> Option<u32> {
    let total: f64 = weights.clone().map(|(_, w)| w).sum();
    if total.is_nan() || total <= 0.0 {
        return None;
    }
    let target = total * f64::from(uniform);
    let mut sum = 0.0;
    let mut last = None;
    for (id, weight) in weights {
        sum += weight;
        if weight > 0.0 {
            last = Some(id);
            if sum > target {
                break;
            }
        }
    }
    last
}

#[cfg(test)]
mod tests {
    use super::*;

    const RAS: RasConfig = RasConfig { top_p: 0.8, top_k: 25, window: 10, tau: 0.1 };

    #[test]
    fn philox_matches_the_published_vectors() {
        // Known-answer vectors of the Random123 distribution.
        assert_eq!(philox([0; 2], [0; 4]), [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]);
        assert_eq!(philox([u32::MAX; 2], [u32::MAX; 4]), [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]);
    }

    #[test]
    fn a_repeated_id_is_never_sampled_twice_in_a_row_of_samples() {
        let scores = [5.0f32, 0.0, 0.0, 0.0];
        for index in 0..200 {
            let id = next_id(&scores, &[0], &RAS, [1, 2], index).expect("finite scores");
            assert_ne!(id, 0);
        }
    }

    #[test]
    fn samples_follow_the_nucleus_probabilities() {
        let scores = [0.6f32, 0.3, 0.05, 0.05].map(f32::ln);
        let counts = (0..20_000).fold([0u32; 4], |mut n, index| {
            n[next_id(&scores, &[], &RAS, [7, 9], index).expect("finite") as usize] += 1;
            n
        });
        // The nucleus is the first two: 0.6 is below 0.8, 0.9 crosses it.
        assert_eq!(counts[2] + counts[3], 0);
        assert!((f64::from(counts[0]) / 20_000.0 - 2.0 / 3.0).abs() < 0.01, "{counts:?}");
    }

    #[test]
    fn poisoned_scores_sample_nothing() {
        assert_eq!(next_id(&[f32::NAN, 0.0], &[], &RAS, [0; 2], 0), None);
        assert_eq!(next_id(&[f32::NEG_INFINITY; 3], &[], &RAS, [0; 2], 0), None);
    }
}
