//! Whether two recordings say the same: correlation in short windows, each aligned on its own.
//!
//! A codec delays and colours, a clock drifts, an underrun inserts silence; the words stay the same. So the
//! reference is cut into windows, each is looked for near where the one before was found, and the result is
//! the mean of the best normalised correlations, weighted by the energy of the window. A window that fits
//! nowhere near is looked for further on; where it is then found tells how much was inserted before it.
//!
//! # Why
//! One correlation over the whole would fall to nothing with half a millisecond of drift. Spectra or envelopes
//! alone would also match another sentence of the same voice. The waveform in 200 ms windows does neither:
//! Opus at 24 kb/s keeps it above 0.95 and G.711 above 0.9, another sentence stays below 0.6.

use std::time::Duration;

use crate::sound::heard::Clip;
use crate::wire::codec::{CodecError, resample};

/// Both recordings are compared at this rate. What 16 kHz has above 8 kHz hardly matters, but at 8 kHz half a
/// sample of misplacement would already cost 7 % at 1 kHz.
const RATE: u32 = 16_000;
const WINDOW: usize = RATE as usize / 5;
const HOP: usize = WINDOW / 2;
const TAIL: usize = RATE as usize / 25;
/// Drift and change of codec delay between one window and the next.
const NEAR: isize = RATE as isize / 100;
/// How far a window that does not fit is looked for: backwards (lost packets) and forwards (underruns).
const FAR: (isize, isize) = (-(RATE as isize) / 4, RATE as isize * 3 / 2);
/// Windows quieter than this below the loudest say nothing.
const QUIET_DB: f32 = -30.0;
/// A window that correlates less than this is taken as misplaced and looked for further away.
const PLACED: f32 = 0.6;
/// One that correlates at least this well is exactly placed.
const FIRM: f32 = 0.85;

/// Time that passed between two windows of the reference in one recording but not in the other.
#[derive(Clone, Copy, Debug, PartialEq, serde::Serialize)]
pub struct Shift {
    /// Where in the reference, seconds.
    pub at: f64,
    /// How much was inserted (or, negative, left out), seconds.
    pub by: f64,
}

/// How well a recording matches a reference.
#[derive(Clone, Debug, Default, PartialEq, serde::Serialize)]
pub struct Correlation {
    /// Mean of the windows' best correlations, weighted by energy: 1 is the same waveform.
    pub value: f32,
    /// Share of the reference's energy that was found with a correlation of at least 0.6.
    pub found: f32,
    /// Where the reference begins in the recording, seconds (negative: cut off at the front).
    pub offset: f64,
    /// Inserted or missing time, of more than 10 ms each.
    pub shifts: Vec<Shift>,
    /// How many windows were compared.
    pub windows: usize,
}

/// Looks for `reference` in `heard`.
///
/// # Errors
/// A clip has a rate that cannot be resampled.
pub fn correlate(heard: &Clip, reference: &Clip) -> Result<Correlation, CodecError> {
    let mut heard = resample(&heard.pcm, heard.rate, RATE)?;
    // The last window is late by the delay of the codec, whose last milliseconds never come out of it.
    heard.resize(heard.len() + TAIL, 0.0);
    let reference = resample(&reference.pcm, reference.rate, RATE)?;
    let windows = loud_windows(&reference);
    if windows.is_empty() || heard.len() < WINDOW {
        return Ok(Correlation::default());
    }
    let search = Search::new(&heard);
    let Some(start) = first_lag(&search, &reference, &windows) else { return Ok(Correlation::default()) };
    let mut lag = start;
    let (mut sum, mut found, mut weights) = (0.0f64, 0.0f64, 0.0f64);
    let mut firm = Vec::new();
    let mut offset = None;
    for (at, energy) in &windows {
        let Some(window) = reference.get(*at..*at + WINDOW) else { continue };
        let (mut best, mut place) = search.best(window, *at as isize + lag, (-NEAR, NEAR), 1);
        if best < PLACED {
            let (coarse, far) = search.best(window, *at as isize + lag, FAR, 3);
            if coarse > best.max(0.4) {
                let (fine, far) = search.best(window, far, (-3, 3), 1);
                if fine > best && fine >= PLACED {
                    (best, place) = (fine, far);
                }
            }
        }
        if best >= PLACED {
            lag = place - *at as isize;
            if best >= FIRM {
                firm.push((*at, lag));
            }
            offset.get_or_insert(lag);
            found += f64::from(*energy);
        }
        sum += f64::from(best.max(0.0) * energy);
        weights += f64::from(*energy);
    }
    Ok(Correlation {
        value: (sum / weights.max(f64::MIN_POSITIVE)) as f32,
        found: (found / weights.max(f64::MIN_POSITIVE)) as f32,
        offset: offset.unwrap_or(start) as f64 / f64::from(RATE),
        shifts: shifts(&firm),
        windows: windows.len(),
    })
}

/// Where the lag moved for good. A window that straddles a hole, or the first one behind it, may be found a pitch
/// period off: what counts is the middle of three on either side.
fn shifts(firm: &[(usize, isize)]) -> Vec<Shift> {
    let middle = |windows: &[(usize, isize)]| {
        let mut lags: Vec<isize> = windows.iter().map(|(_, lag)| *lag).collect();
        lags.sort_unstable();
        lags.get(lags.len() / 2).copied()
    };
    let mut shifts = Vec::new();
    let mut before = 0;
    for n in 1..firm.len() {
        let Some(was) = middle(&firm[before.max(n.saturating_sub(3))..n]) else { continue };
        let Some(is) = middle(&firm[n..(n + 3).min(firm.len())]) else { continue };
        if (firm[n].1 - was).abs() > NEAR && (is - was).abs() > NEAR {
            let rate = f64::from(RATE);
            shifts.push(Shift { at: firm[n].0 as f64 / rate, by: (is - was) as f64 / rate });
            before = n;
        }
    }
    shifts
}

/// Total of the inserted time.
pub fn inserted(shifts: &[Shift]) -> Duration {
    Duration::from_secs_f64(shifts.iter().map(|s| s.by.max(0.0)).sum())
}

/// Starts and energies of the windows that say something.
fn loud_windows(pcm: &[f32]) -> Vec<(usize, f32)> {
    let energy = |at: usize| pcm[at..at + WINDOW].iter().map(|s| s * s).sum::<f32>();
    let all: Vec<(usize, f32)> =
        (0..pcm.len().saturating_sub(WINDOW - 1)).step_by(HOP).map(|at| (at, energy(at))).collect();
    let loudest = all.iter().map(|(_, e)| *e).fold(0.0, f32::max);
    let floor = (loudest * 10f32.powf(QUIET_DB / 10.0)).max(WINDOW as f32 * 1e-7);
    all.into_iter().filter(|(_, e)| *e >= floor).collect()
}

/// The recording, with what makes normalising cheap.
struct Search<'a> {
    heard: &'a [f32],
    /// Sum of squares before each sample.
    squares: Vec<f64>,
}

impl<'a> Search<'a> {
    fn new(heard: &'a [f32]) -> Self {
        let mut total = 0.0f64;
        let mut squares = Vec::with_capacity(heard.len() + 1);
        squares.push(0.0);
        for sample in heard {
            total += f64::from(*sample).powi(2);
            squares.push(total);
        }
        Search { heard, squares }
    }

    /// The best normalised correlation of `window` around `centre`, and where.
    fn best(&self, window: &[f32], centre: isize, (from, to): (isize, isize), step: usize) -> (f32, isize) {
        let norm = window.iter().map(|s| f64::from(*s).powi(2)).sum::<f64>().sqrt();
        let last = self.heard.len() as isize - window.len() as isize;
        let mut best = (0.0f32, centre);
        for at in (centre + from..=centre + to).step_by(step) {
            if !(0..=last).contains(&at) {
                continue;
            }
            let start = at as usize;
            let energy = (self.squares[start + window.len()] - self.squares[start]).max(0.0).sqrt();
            if energy * norm <= f64::MIN_POSITIVE {
                continue;
            }
            let value = (f64::from(dot(window, &self.heard[start..start + window.len()])) / (energy * norm)) as f32;
            if value > best.0 {
                best = (value, at);
            }
        }
        best
    }
}

/// Eight running sums, so that the compiler may use vector registers.
fn dot(a: &[f32], b: &[f32]) -> f32 {
    let mut sums = [0.0f32; 8];
    let (a8, a_rest) = a.as_chunks::<8>();
    let (b8, b_rest) = b.as_chunks::<8>();
    for (x, y) in a8.iter().zip(b8) {
        for n in 0..8 {
            sums[n] += x[n] * y[n];
        }
    }
    sums.iter().sum::<f32>() + a_rest.iter().zip(b_rest).map(|(x, y)| x * y).sum::<f32>()
}

/// Where the reference begins, roughly by loudness and then by the waveform of its loudest windows.
fn first_lag(search: &Search<'_>, reference: &[f32], windows: &[(usize, f32)]) -> Option<isize> {
    const STEP: usize = RATE as usize / 100;
    let envelope = |pcm: &[f32]| -> Vec<f32> {
        pcm.chunks(STEP).map(|c| (c.iter().map(|s| s * s).sum::<f32>() / STEP as f32).sqrt()).collect()
    };
    let heard = envelope(search.heard);
    let wanted = envelope(reference);
    let mut candidates: Vec<(f32, isize)> = (-(wanted.len() as isize) + 10..heard.len() as isize - 10)
        .map(|lag| {
            let (mut dot, mut heard_energy) = (0.0f32, 0.0f32);
            for (n, level) in wanted.iter().enumerate() {
                let other = usize::try_from(n as isize + lag).ok().and_then(|n| heard.get(n)).copied().unwrap_or(0.0);
                dot += level * other;
                heard_energy += other * other;
            }
            (dot / heard_energy.sqrt().max(1e-9), lag)
        })
        .collect();
    candidates.sort_by(|a, b| b.0.total_cmp(&a.0));
    // Neighbouring lags look alike: keep peaks that are apart.
    let mut peaks: Vec<isize> = Vec::new();
    for (_, lag) in candidates {
        if peaks.iter().all(|p| (p - lag).abs() > 12) {
            peaks.push(lag);
        }
        if peaks.len() == 4 {
            break;
        }
    }
    let mut loudest = windows.to_vec();
    loudest.sort_by(|a, b| b.1.total_cmp(&a.1));
    let around = STEP as isize * 15;
    peaks
        .into_iter()
        .flat_map(|peak| loudest.iter().take(4).map(move |(at, _)| (peak, *at)))
        .filter_map(|(peak, at)| {
            let window = reference.get(at..at + WINDOW)?;
            let (_, coarse) = search.best(window, at as isize + peak * STEP as isize, (-around, around), 3);
            let (value, place) = search.best(window, coarse, (-3, 3), 1);
            Some((value, place - at as isize, at))
        })
        // Among equally good ones the earliest window: what lies behind it is found by following the shifts.
        .max_by(|a, b| if (a.0 - b.0).abs() < 0.03 { b.2.cmp(&a.2) } else { a.0.total_cmp(&b.0) })
        .map(|(_, lag, _)| lag)
}

#[cfg(test)]
pub(crate) mod tests;
