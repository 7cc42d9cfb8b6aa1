//! Recognitions of no caller's speech: what they cost a GPU, and a voice that speaks on it.
//!
//! Weights are random, in the sizes of `openai/whisper-tiny.en`. Random text does not end by itself, so its length is given;
//! everything else is as in a recognition: a window, then a token at a time, each chosen among all.

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use serde::Serialize;

use super::HearError;
use super::engine::Engine;
use super::gpu::{Elt, GpuError, Seat, TEXTS, steps};
use super::rules::likeliest;
use super::stop::Stop;
use crate::clock;
use crate::synth::cosyvoice::gpu::whisper::{Sizes, Stack, Tensors, Whisper};
use crate::voice::features::Matrix;

/// Tokens of a sentence of some three seconds.
const TOKENS: usize = 12;

/// Sizes of `openai/whisper-tiny.en`.
pub const TINY: Sizes = Sizes {
    width: 384,
    bands: 80,
    frames: 3_000,
    text: 448,
    vocabulary: 51_864,
    encoder: Stack { layers: 4, heads: 6, inner: 1_536 },
    decoder: Stack { layers: 4, heads: 6, inner: 1_536 },
    token_scale: 1.0,
};

/// Values that keep activations near one.
pub struct Random(
    /// Changes every value.
    pub u64,
);

impl Tensors for Random {
    fn floats(&mut self, name: &str, shape: &[usize]) -> Result<Vec<f32>, GpuError> {
        let mean = if name.contains("norm.weight") { 1.0 } else { 0.0 };
        let fan = shape.iter().skip(1).product::<usize>().max(1);
        let scale = if shape.len() == 1 { 0.02 } else { (fan as f32).sqrt().recip() };
        let mut next = || {
            // Knuth's generator; the high bits are the random ones.
            self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (self.0 >> 40) as f32 / (1 << 23) as f32 - 1.0
        };
        Ok((0..shape.iter().product()).map(|_| mean + scale * next()).collect())
    }
}

/// A seat for random weights.
pub fn seat() -> Seat {
    Seat::new(|place| Whisper::load(place, &TINY, &mut Random(1), Elt::F16, TEXTS))
}

/// How recognitions fared.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Report {
    /// Begun a second.
    pub rate: f64,
    /// Done.
    pub recognitions: usize,
    /// That failed.
    pub failed: u64,
    /// From when one was due to its last token, seconds.
    pub p50: f64,
    /// The same for the slowest twentieth.
    pub p95: f64,
}

/// Has `rate` recognitions begin a second, at random, for as long as `work` takes.
///
/// # Errors
/// There is no thread for them.
pub fn beside<T>(seat: Seat, rate: f64, work: impl FnOnce() -> T) -> std::io::Result<(T, Report)> {
    let steps = steps(seat, None)?;
    let (over, failed, number) = (AtomicBool::new(false), AtomicU64::new(0), AtomicU64::new(0));
    let (took, start) = (Mutex::new(Vec::new()), clock::now());
    let serve = || {
        while !over.load(Ordering::Relaxed) {
            let due = due(start, number.fetch_add(1, Ordering::Relaxed), rate);
            while !over.load(Ordering::Relaxed) && clock::now() < due {
                std::thread::park_timeout(due.saturating_duration_since(clock::now()).min(Duration::from_millis(50)));
            }
            if over.load(Ordering::Relaxed) {
                break;
            }
            match recognise(&steps) {
                Ok(()) => {
                    let seconds = clock::now().saturating_duration_since(due).as_secs_f64();
                    took.lock().unwrap_or_else(std::sync::PoisonError::into_inner).push(seconds);
                }
                Err(_) => {
                    failed.fetch_add(1, Ordering::Relaxed);
                }
            }
        }
    };
    let result = std::thread::scope(|scope| {
        for _ in 0..TEXTS {
            scope.spawn(serve);
        }
        let result = work();
        over.store(true, Ordering::Relaxed);
        result
    });
    let mut took = took.into_inner().unwrap_or_else(std::sync::PoisonError::into_inner);
    took.sort_by(f64::total_cmp);
    let at = |share: f64| took.get((took.len() as f64 * share) as usize).copied().unwrap_or_default();
    let (recognitions, failed) = (took.len(), failed.into_inner());
    Ok((result, Report { rate, recognitions, failed, p50: at(0.5), p95: at(0.95) }))
}

/// When recognition `number` is due: one somewhere in each interval.
fn due(start: Instant, number: u64, rate: f64) -> Instant {
    let into: f64 = StdRng::seed_from_u64(number).random();
    start + Duration::from_secs_f64((number as f64 + into) / rate)
}

fn recognise(engine: &dyn Engine) -> Result<(), HearError> {
    let features = Matrix { rows: TINY.frames, cols: TINY.bands, data: vec![0.1; TINY.frames * TINY.bands] };
    let Some(mut text) = engine.hear(features, &Stop::default())? else { return Ok(()) };
    let mut token = 0;
    for _ in 0..TOKENS {
        token = likeliest(&text.next(&[token])?).0;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn recognitions_come_at_their_rate_and_without_a_gpu_each_is_told_so() {
        let start = clock::now();
        for number in 0..100 {
            let at = due(start, number, 40.0).duration_since(start).as_secs_f64() * 40.0;
            assert!((number as f64..=number as f64 + 1.0).contains(&at), "{number}: {at}");
        }
        // They are not loaded, and fail as fast as they come.
        let (done, report) = beside(seat(), 1e6, || {
            let until = clock::now() + Duration::from_secs(60);
            while clock::now() < until && recognise(&steps(seat(), None).expect("a thread")).is_ok() {}
            "done"
        })
        .expect("threads");
        assert_eq!((done, report.recognitions, report.p50), ("done", 0, 0.0));
    }
}
