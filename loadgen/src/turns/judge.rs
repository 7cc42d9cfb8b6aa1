//! Whether what was heard is the speech that was asked for: not silence, not noise, not somebody else's.
//! What was measured of a turn is in `exchange.rs`.
//!
//! Silence and noise show without knowing the words. That the words are right shows by comparing with a reference of
//! the same text and voice, if the voice speaks the same text the same way twice: cheaply by loudness over time
//! ([`envelope_match`]), which tells one sentence from another, and exactly by [`mod@crate::sound::correlate`]. Of what
//! the network lost nothing is known, and nothing is concluded.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::sound::heard::{Clip, Spoken};

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
    /// A recogniser understands other words.
    WrongWords,
}

impl Fault {
    /// Name in reports.
    pub fn label(self) -> &'static str {
        match self {
            Fault::Silence => "silence",
            Fault::Noise => "noise",
            Fault::WrongAudio => "wrong_audio",
            Fault::CutShort => "cut_short",
            Fault::WrongWords => "wrong_words",
        }
    }
}

/// Quieter than this is not heard; as in [`crate::sound::listen`].
const AUDIBLE: f32 = 0.005;
/// Speech is voiced for at least this share of its audible frames; white noise for hardly any.
const VOICED_SHARE: f32 = 0.2;
/// A frame repeats itself at some pitch this well if it is voiced.
const VOICED: f32 = 0.6;
/// Loudness over time of the same words, spoken by the same voice, matches better than this; of others, worse.
const SAME_ENVELOPE: f32 = 0.8;
/// The waveform of the same words correlates with the reference at least this well; that of others, less.
pub const SAME_WORDS: f32 = 0.6;
/// A turn that lost more than this of its length was cut short.
const SHORTEST: f64 = 0.6;

/// Judges the sound of one turn; `reference` is the same text spoken directly, where that can be had.
///
/// # Errors
/// What is wrong with it.
pub fn judge(heard: &Spoken, reference: Option<&Clip>) -> Result<(), Fault> {
    let voiced = voiced_share(&heard.clip).ok_or(Fault::Silence)?;
    if voiced < VOICED_SHARE {
        return Err(Fault::Noise);
    }
    let Some(reference) = reference else { return Ok(()) };
    let wanted = audible_time(reference).as_secs_f64();
    let lost = heard.samples_lost() as f64 / f64::from(heard.clip.rate.max(1));
    if audible_time(&heard.clip).as_secs_f64() + lost < wanted * SHORTEST {
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

/// How long a clip is silent before its first audible sample, to 5 ms.
pub fn lead_in(clip: &Clip) -> Duration {
    let frame = (clip.rate as usize / 200).max(1);
    let silent = clip.pcm.chunks(frame).position(|f| rms(f) > AUDIBLE).unwrap_or(0);
    Duration::from_millis(5) * silent as u32
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

/// How well loudness over time matches, wherever the reference begins: 1 is the same. Stretches that were lost count
/// for nothing.
pub fn envelope_match(heard: &Spoken, reference: &Clip) -> f32 {
    let heard = envelope(heard);
    let wanted: Vec<f32> = envelope(&Spoken::from(reference.clone())).into_iter().flatten().collect();
    let all: f32 = wanted.iter().map(|v| v * v).sum();
    if all <= f32::EPSILON || heard.is_empty() {
        return 0.0;
    }
    let (first, last) = (-(wanted.len() as isize) / 2, heard.len() as isize);
    let mut best = 0.0f32;
    for lag in first..last {
        let (mut dot, mut energy, mut unknown) = (0.0f32, 0.0f32, 0.0f32);
        for (n, level) in wanted.iter().enumerate() {
            match usize::try_from(n as isize + lag).ok().and_then(|n| heard.get(n)) {
                Some(Some(other)) => {
                    dot += level * other;
                    energy += other * other;
                }
                Some(None) => unknown += level * level,
                None => {}
            }
        }
        let known = all - unknown;
        // What little is left when nearly all was lost matches anything.
        if energy > 0.0 && known > 0.2 * all {
            best = best.max(dot / (energy * known).sqrt());
        }
    }
    best
}

/// Loudness every 20 ms, freed of its mean so that any two loud sounds do not already match; `None` where some of it
/// was lost.
fn envelope(spoken: &Spoken) -> Vec<Option<f32>> {
    let frame = (spoken.clip.rate as usize / 50).max(1);
    let known = |n: usize| !spoken.is_lost(&(n * frame..(n + 1) * frame));
    let levels = spoken.clip.pcm.chunks(frame).enumerate().map(|(n, chunk)| known(n).then(|| rms(chunk)));
    let levels: Vec<Option<f32>> = levels.collect();
    // Silence before and after is no part of the words.
    let audible = |level: &Option<f32>| level.is_some_and(|level| level > AUDIBLE);
    let Some(first) = levels.iter().position(audible) else { return Vec::new() };
    let last = levels.iter().rposition(audible).unwrap_or(first);
    let words = &levels[first..=last];
    let mean = words.iter().flatten().sum::<f32>() / words.iter().flatten().count().max(1) as f32;
    words.iter().map(|level| level.map(|level| level - mean)).collect()
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
    use crate::sound::correlate::correlate;
    use crate::sound::correlate::tests::coded;
    use crate::sound::heard::{Heard, PayloadTypes, Recorder, packet};
    use crate::sound::synthetic::{babble, noise};
    use crate::wire::codec::{Codec, Encoder, resample, to_i16};

    #[test]
    fn speech_passes_and_what_is_none_is_named() {
        let reference = babble(21, 24_000, 3.0);
        for codec in Codec::ALL {
            let heard = coded(&reference, codec).into();
            assert_eq!(judge(&heard, Some(&reference)), Ok(()), "{codec:?}");
            assert_eq!(judge(&heard, None), Ok(()), "{codec:?}");
        }
        let silence = Clip { rate: 8_000, pcm: vec![0.0; 24_000] };
        assert_eq!(judge(&silence.into(), None), Err(Fault::Silence));
        assert_eq!(judge(&Clip { rate: 8_000, pcm: Vec::new() }.into(), None), Err(Fault::Silence));
        for rate in [8_000, 16_000, 24_000] {
            assert_eq!(judge(&noise(3, rate, 3.0).into(), None), Err(Fault::Noise), "{rate}");
        }
        for seed in 30..36 {
            let other = babble(seed, 16_000, 3.0).into();
            assert_eq!(judge(&other, Some(&reference)), Err(Fault::WrongAudio), "{seed}");
        }
        let cut = Clip { rate: 24_000, pcm: reference.pcm[..24_000].to_vec() };
        assert_eq!(judge(&cut.into(), Some(&reference)), Err(Fault::CutShort));
    }

    /// `clip` as a call would carry it in `codec`, without the packets that `lost` names.
    fn carried(clip: &Clip, codec: Codec, lost: impl Fn(usize) -> bool) -> Heard {
        let start = crate::clock::now();
        let types = PayloadTypes { audio: 0, event: None };
        let mut recorder = Recorder::new(start, codec, types, 16_000).unwrap();
        let mut encoder = Encoder::new(codec).unwrap();
        let pcm: Vec<i16> = resample(&clip.pcm, clip.rate, encoder.rate()).unwrap().into_iter().map(to_i16).collect();
        let frame = encoder.frame();
        for (n, chunk) in pcm.chunks_exact(frame).enumerate() {
            let payload = encoder.encode(chunk).unwrap();
            if !lost(n) {
                let timestamp = n as u32 * codec.frame_ticks();
                recorder.push(start + Duration::from_millis(20) * n as u32, packet(0, n as u16, timestamp, payload));
            }
        }
        recorder.take(start + Duration::from_secs(60))
    }

    /// Seen with 1 % of packets lost: 28 % of turns were called other words, for everything behind a lost packet was
    /// taken to come 20 ms earlier.
    #[test]
    fn words_are_the_same_whatever_share_of_them_the_network_lost() {
        let mut called_other = 0;
        for seed in 0..6u32 {
            let (reference, other) = (babble(100 + seed, 24_000, 4.0), babble(200 + seed, 24_000, 4.0));
            for codec in [Codec::Pcmu, Codec::Opus] {
                for percent in [1, 3, 10] {
                    // Independent losses, and the same share in bursts of three.
                    for burst in [1, 3] {
                        let random = move |n: usize| {
                            let group = (n / burst) as u32 + 1_000 * seed;
                            (group.wrapping_mul(2_654_435_761) >> 8) % 100 < percent
                        };
                        let heard = |clip| {
                            let heard = carried(clip, codec, random);
                            heard.spoken_between(heard.packets[0].arrived, heard.until)
                        };
                        let case = format!("{seed} {codec:?} {percent} % by {burst}");
                        let same = heard(&reference);
                        let judged = judge(&same, Some(&reference));
                        // Where more is lost, loudness may leave a doubt, which the waveform settles: so do reports.
                        let settled = || correlate(&same.clip, &reference).unwrap().value >= SAME_WORDS;
                        assert!(judged.is_ok() || percent > 1 && settled(), "{case}: {judged:?}");
                        called_other += u32::from(judge(&heard(&other), Some(&reference)) == Err(Fault::WrongAudio));
                    }
                }
            }
        }
        // Loudness alone mistakes a few sentences for each other, lost packets or not; what is heard of them settles it.
        assert!(called_other >= 72 * 9 / 10, "{called_other} of 72 other sentences were noticed");
    }

    #[test]
    fn silence_before_the_first_word_is_told() {
        let mut pcm = vec![0.0; 800];
        pcm.extend(babble(7, 8_000, 1.0).pcm);
        let led = lead_in(&Clip { rate: 8_000, pcm });
        assert!(led >= Duration::from_millis(100) && led < Duration::from_millis(130), "{led:?}");
        assert_eq!(lead_in(&Clip::default()), Duration::ZERO);
    }

    #[test]
    fn what_was_lost_is_silent_and_in_its_place_and_pauses_are_not_lost() {
        let clip = babble(7, 8_000, 1.0);
        let heard = carried(&clip, Codec::Pcmu, |n| n == 10 || n == 11 || n == 30);
        let spoken = heard.spoken_between(heard.packets[0].arrived, heard.until);
        assert_eq!(spoken.lost, [1_600..1_920, 4_800..4_960]);
        assert_eq!(spoken.clip.pcm.len(), 8_000);
        let whole = carried(&clip, Codec::Pcmu, |_| false);
        let whole = whole.spoken_between(whole.packets[0].arrived, whole.until);
        assert_eq!(spoken.clip.pcm[1_920..4_800], whole.clip.pcm[1_920..4_800]);
        assert_eq!((whole.samples_lost(), spoken.samples_lost()), (0, 480));
        // Time that the sender left out is no loss.
        let start = crate::clock::now();
        let types = PayloadTypes { audio: 0, event: None };
        let mut recorder = Recorder::new(start, Codec::Pcmu, types, 16_000).unwrap();
        for (sequence, timestamp) in [(1, 0), (2, 4_000), (4, 8_000)] {
            recorder.push(start, packet(0, sequence, timestamp, vec![0; 160]));
        }
        let heard = recorder.take(start);
        let spoken = heard.spoken_between(start, start + Duration::from_secs(1));
        assert_eq!(spoken.clip.pcm.len(), 640);
        assert_eq!((spoken.lost.len(), &spoken.lost[0]), (1, &(320..480)));
    }
}
