//! Whether what was heard is the speech that was asked for: not silence, not noise, not somebody else's.
//!
//! Silence and noise show without knowing the words. That the words are right shows by comparing with a reference
//! of the same text and voice, if the voice speaks the same text the same way twice: cheaply by loudness over time
//! ([`envelope_match`]), which tells one sentence from another, and exactly by [`mod@crate::correlate`].

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::heard::Clip;

/// Why a turn's sound is not what it should be. Each is a cause of failure in reports.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Fault {
    /// Nothing audible.
    Silence,
    /// Loud, but without the voicing that all speech has.
    Noise,
    /// Speech, but not of this text.
    WrongAudio,
    /// Less of it than the text is long.
    CutShort,
}

impl Fault {
    /// Name in reports.
    pub fn label(self) -> &'static str {
        match self {
            Fault::Silence => "silence",
            Fault::Noise => "noise",
            Fault::WrongAudio => "wrong_audio",
            Fault::CutShort => "cut_short",
        }
    }
}

/// Quieter than this is not heard; as in [`crate::listen`].
const AUDIBLE: f32 = 0.005;
/// Speech is voiced for at least this share of its audible frames; white noise for hardly any.
const VOICED_SHARE: f32 = 0.2;
/// A frame repeats itself at some pitch this well if it is voiced.
const VOICED: f32 = 0.6;
/// Loudness over time of the same words, spoken by the same voice, matches better than this; of others, worse.
const SAME_ENVELOPE: f32 = 0.8;
/// A turn that lost more than this of its length was cut short.
const SHORTEST: f64 = 0.6;

/// Judges the sound of one turn; `reference` is the same text spoken directly, where that can be had.
///
/// # Errors
/// What is wrong with it.
pub fn judge(heard: &Clip, reference: Option<&Clip>) -> Result<(), Fault> {
    let voiced = voiced_share(heard).ok_or(Fault::Silence)?;
    if voiced < VOICED_SHARE {
        return Err(Fault::Noise);
    }
    let Some(reference) = reference else { return Ok(()) };
    let wanted = audible_time(reference).as_secs_f64();
    if audible_time(heard).as_secs_f64() < wanted * SHORTEST {
        return Err(Fault::CutShort);
    }
    if envelope_match(heard, reference) < SAME_ENVELOPE {
        return Err(Fault::WrongAudio);
    }
    Ok(())
}

/// How much of a clip is audible, by frames of 20 ms.
pub fn audible_time(clip: &Clip) -> Duration {
    let frame = (clip.rate as usize / 50).max(1);
    let loud = clip.pcm.chunks(frame).filter(|f| rms(f) > AUDIBLE).count();
    Duration::from_millis(20) * loud as u32
}

/// From the first to the last audible frame.
pub fn audible_length(clip: &Clip) -> Duration {
    let frame = (clip.rate as usize / 50).max(1);
    let mut loud = clip.pcm.chunks(frame).enumerate().filter(|(_, f)| rms(f) > AUDIBLE).map(|(n, _)| n);
    let Some(first) = loud.next() else { return Duration::ZERO };
    Duration::from_millis(20) * (loud.next_back().unwrap_or(first) - first + 1) as u32
}

/// Share of audible frames that are voiced; `None` when hardly any is audible.
pub fn voiced_share(clip: &Clip) -> Option<f32> {
    let frame = clip.rate as usize * 4 / 100;
    let frames: Vec<&[f32]> = clip.pcm.chunks_exact(frame.max(1)).filter(|f| rms(f) > AUDIBLE).collect();
    if frames.len() < 2 {
        return None;
    }
    // Forty frames tell as much as all of them, and cost a listener of many calls little.
    let step = frames.len().div_ceil(40);
    let judged: Vec<bool> = frames.iter().step_by(step).map(|f| is_voiced(f, clip.rate)).collect();
    Some(judged.iter().filter(|v| **v).count() as f32 / judged.len() as f32)
}

/// How well loudness over time matches, wherever the reference begins: 1 is the same.
pub fn envelope_match(heard: &Clip, reference: &Clip) -> f32 {
    let heard = envelope(heard);
    let wanted = envelope(reference);
    let norm = |e: &[f32]| e.iter().map(|v| v * v).sum::<f32>().sqrt();
    let wanted_norm = norm(&wanted);
    if wanted_norm <= f32::EPSILON || heard.is_empty() {
        return 0.0;
    }
    let (first, last) = (-(wanted.len() as isize) / 2, heard.len() as isize);
    let mut best = 0.0f32;
    for lag in first..last {
        let (mut dot, mut energy) = (0.0f32, 0.0f32);
        for (n, level) in wanted.iter().enumerate() {
            let Some(other) = usize::try_from(n as isize + lag).ok().and_then(|n| heard.get(n)) else { continue };
            dot += level * other;
            energy += other * other;
        }
        if energy > 0.0 {
            best = best.max(dot / (energy.sqrt() * wanted_norm));
        }
    }
    best
}

/// Loudness every 20 ms, freed of its mean so that any two loud sounds do not already match.
fn envelope(clip: &Clip) -> Vec<f32> {
    let frame = (clip.rate as usize / 50).max(1);
    let levels: Vec<f32> = clip.pcm.chunks(frame).map(rms).collect();
    // Silence before and after is no part of the words.
    let Some(first) = levels.iter().position(|l| *l > AUDIBLE) else { return Vec::new() };
    let last = levels.iter().rposition(|l| *l > AUDIBLE).unwrap_or(first);
    let words = &levels[first..=last];
    let mean = words.iter().sum::<f32>() / words.len() as f32;
    words.iter().map(|l| l - mean).collect()
}

fn rms(frame: &[f32]) -> f32 {
    (frame.iter().map(|s| s * s).sum::<f32>() / frame.len().max(1) as f32).sqrt()
}

/// Whether 40 ms repeat themselves at a pitch of 70 to 400 Hz. Judged at about 8 kHz, which is plenty.
fn is_voiced(frame: &[f32], rate: u32) -> bool {
    let by = (rate / 8_000).max(1) as usize;
    let low: Vec<f32> = frame.chunks(by).map(|c| c.iter().sum::<f32>() / c.len() as f32).collect();
    let rate = rate as usize / by;
    let half = low.len() / 2;
    let window = &low[..half];
    // Energies up to each sample, so that the energy of any stretch is a difference.
    let mut sums = Vec::with_capacity(low.len() + 1);
    sums.push(0.0f32);
    sums.extend(low.iter().scan(0.0f32, |sum, v| {
        *sum += v * v;
        Some(*sum)
    }));
    let own = sums[half];
    (rate / 400..=(rate / 70).min(low.len() - half)).any(|lag| {
        let dot: f32 = window.iter().zip(&low[lag..lag + half]).map(|(a, b)| a * b).sum();
        let other = (sums[lag + half] - sums[lag]).max(0.0);
        dot > VOICED * (own * other).sqrt()
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::codec::Codec;
    use crate::synthetic::{babble, noise};

    #[test]
    fn speech_passes_and_what_is_none_is_named() {
        let reference = babble(21, 24_000, 3.0);
        for codec in Codec::ALL {
            let heard = crate::correlate::tests::coded(&reference, codec);
            assert_eq!(judge(&heard, Some(&reference)), Ok(()), "{codec:?}");
            assert_eq!(judge(&heard, None), Ok(()), "{codec:?}");
        }
        let silence = Clip { rate: 8_000, pcm: vec![0.0; 24_000] };
        assert_eq!(judge(&silence, None), Err(Fault::Silence));
        assert_eq!(judge(&Clip { rate: 8_000, pcm: Vec::new() }, None), Err(Fault::Silence));
        for rate in [8_000, 16_000, 24_000] {
            assert_eq!(judge(&noise(3, rate, 3.0), None), Err(Fault::Noise), "{rate}");
        }
        for seed in 30..36 {
            assert_eq!(judge(&babble(seed, 16_000, 3.0), Some(&reference)), Err(Fault::WrongAudio), "{seed}");
        }
        let cut = Clip { rate: 24_000, pcm: reference.pcm[..24_000].to_vec() };
        assert_eq!(judge(&cut, Some(&reference)), Err(Fault::CutShort));
    }
}
