//! Quiet callers brought to the level at which callers are heard best: automatic gain control.
//!
//! Owns what is known of a caller's level, and the gain that follows from it; never decides what is speech, and does no I/O.
//!
//! # Why
//! A telephone on a table, a soft voice, an analogue line: what comes may be 30 dB quieter than what recognisers and the speech
//! detector were trained on, and its soft syllables lie under the detector's floor. So the level of what was voice is measured
//! (a little above its mean, as loud syllables count for more) and brought up to that of ITU-T telephony. The gain moves slowly,
//! and only while the caller speaks: noise, silence and pauses leave it where it is, so nothing swells between words. It never
//! attenuates: callers who are loud enough are passed on unchanged, and what was clipped before it came cannot be mended. Peaks are
//! held below full scale by a limiter, without delay.
//!
//! What is compared with what *we* sent (echoes) and what others hear (taps, recordings, bridges) has the level that it came with.

use super::decode::FRAME;

/// The mean square to which voices are brought: -23 dB of full scale, as it is measured here some -26 dBov, the nominal level of
/// speech in ITU-T P.830 and G.191.
const TARGET: f32 = 0.005_012;
/// The largest gain: 30 dB. What is quieter than that has little left of it in G.711.
const MOST: f32 = 31.62;
/// Frames of voice that must have been heard before anything is made louder: 200 ms, some syllables.
const ENOUGH: u32 = 10;
/// How much of a louder frame becomes the level: all of it within half a second.
const ATTACK: f32 = 1.0 / 25.0;
/// And of a quieter one: within three seconds of voice.
const DECAY: f32 = 1.0 / 150.0;
/// What has less than this much of the level's energy (20 dB) is somebody else, or noise that the detector takes for a voice.
const LEAST: f32 = 0.01;
/// A frame may have so much more gain than the one before: 15 dB in a second of voice.
const UP: f32 = 1.035;
/// And so much less: 60 dB in a second, as somebody else may have taken the telephone.
const DOWN: f32 = 0.871;
/// Peaks of what is made louder, of 16 bits: 1 dB below full scale.
const CEILING: f32 = 29_204.0;
/// The limiter lets go by so much a frame: 75 dB in a second.
const RELEASE: f32 = 1.189;
/// Samples over which one frame's gain becomes the next one's: 5 ms.
const RAMP: usize = 80;
/// By how much more, as a mean square, the detector listens for somebody who was never heard: 15 dB.
const UNKNOWN: f32 = 31.6;

/// The gain of one stream.
#[derive(Debug)]
pub struct Gain {
    /// Mean square of the caller's voice (of samples in -1..=1).
    level: f32,
    /// Frames of voice that it was learned from.
    voiced: u32,
    /// What follows from the level.
    gain: f32,
    /// What the latest frame had at its end.
    applied: f32,
}

impl Default for Gain {
    fn default() -> Self {
        Self { level: 0.0, voiced: 0, gain: 1.0, applied: 1.0 }
    }
}

impl Gain {
    /// The gain of the level that is known, at least 1.
    pub fn factor(&self) -> f32 {
        self.gain
    }

    /// By how much, as a mean square, the floor of a speech detector is too high for this caller; at least 1. It follows the
    /// level at once, as nothing is heard of it.
    pub fn reach(&self) -> f32 {
        if self.voiced < ENOUGH { UNKNOWN } else { self.goal() }
    }

    /// Puts the next 20 ms as they are to be heard in their place.
    pub fn frame(&mut self, frame: &mut [i16; FRAME]) {
        let peak = frame.iter().map(|sample| sample.unsigned_abs()).max().unwrap_or(0);
        // What is not made louder is not limited.
        let most = (CEILING / f32::from(peak.max(1))).max(1.0);
        let (from, to) = (self.applied, self.gain.min(most).min(self.applied * RELEASE));
        self.applied = to;
        if from == 1.0 && to == 1.0 {
            return;
        }
        for (n, sample) in frame.iter_mut().enumerate() {
            let gain = if n < RAMP { from + (to - from) * (n + 1) as f32 / RAMP as f32 } else { to };
            // Where a loud frame begins, the gain of the one before may be too much for some samples.
            *sample = (f32::from(*sample) * gain).round().clamp(-32_768.0, 32_767.0) as i16;
        }
    }

    /// The caller's voice was in a frame with this mean square, as it came.
    pub fn learn(&mut self, energy: f32) {
        if self.voiced >= ENOUGH && energy < self.level * LEAST {
            return;
        }
        self.voiced = self.voiced.saturating_add(1);
        let share = if energy > self.level { ATTACK } else { DECAY };
        self.level += (energy - self.level) * share.max(1.0 / self.voiced as f32);
        if self.voiced < ENOUGH {
            return;
        }
        let goal = self.goal().sqrt();
        self.gain = if goal > self.gain { (self.gain * UP).min(goal) } else { (self.gain * DOWN).max(goal) };
    }

    /// The gain that brings the level to [`TARGET`], as a mean square.
    fn goal(&self) -> f32 {
        (TARGET / self.level.max(f32::MIN_POSITIVE)).clamp(1.0, MOST * MOST)
    }
}

#[cfg(test)]
mod tests {
    use antiphon_loadgen::synthetic;

    use super::*;
    use crate::audio::from_i16;
    use crate::media::echo::energy;
    use crate::media::vad::{RATE, Vad, VadConfig};

    /// Somebody who says three sentences, with a second and a half of nothing before and behind each, so much louder.
    fn said(db: f32) -> Vec<i16> {
        let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/smart_turn");
        let (pause, gain) = (vec![0; RATE as usize * 3 / 2], 10f32.powf(db / 20.0));
        let mut all = pause.clone();
        for name in ["blue_whole.wav", "card_whole.wav", "office_whole.wav"] {
            let words = hound::WavReader::open(folder.join(name)).expect("recorded words");
            let words = words.into_samples::<i16>().map(|sample| sample.expect("16 bits"));
            all.extend(words.map(|sample| (f32::from(sample) * gain).round().clamp(-32_768.0, 32_767.0) as i16));
            all.extend(&pause);
        }
        all.truncate(all.len() / FRAME * FRAME);
        all
    }

    /// What a call does with each frame.
    struct Line {
        gain: Gain,
        vad: Vad,
        agc: bool,
        /// Frames so far, and those at which speech began or ended.
        frames: usize,
        turns: Vec<usize>,
        heard: Vec<i16>,
    }

    impl Line {
        fn new(agc: bool) -> Self {
            let vad = Vad::new(&VadConfig::default());
            Self { gain: Gain::default(), vad, agc, frames: 0, turns: Vec::new(), heard: Vec::new() }
        }

        fn hear(&mut self, pcm: &[i16]) {
            for frame in pcm.as_chunks::<FRAME>().0 {
                let (mut frame, energy) = (*frame, energy(frame.iter().map(|s| from_i16(*s))));
                if self.agc {
                    self.vad.listen_closer(self.gain.factor(), self.gain.reach());
                }
                if self.vad.push(&frame).is_some() {
                    self.turns.push(self.frames);
                }
                if self.agc && self.vad.quiet().is_some_and(|quiet| quiet.is_zero()) {
                    self.gain.learn(energy);
                }
                if self.agc {
                    self.gain.frame(&mut frame);
                }
                self.heard.extend(frame);
                self.frames += 1;
            }
        }
    }

    fn heard(agc: bool, pcm: &[i16]) -> Line {
        let mut line = Line::new(agc);
        line.hear(pcm);
        line
    }

    /// Mean of the frames in which something is, in dB of full scale.
    fn level(pcm: &[i16]) -> f32 {
        let frames = pcm.as_chunks::<FRAME>().0;
        let energies: Vec<f32> = frames.iter().map(|frame| energy(frame.iter().map(|s| from_i16(*s)))).collect();
        let least = energies.iter().copied().fold(0.0, f32::max) / 1_000.0;
        let loud: Vec<f32> = energies.into_iter().filter(|energy| *energy > least).collect();
        10.0 * (loud.iter().sum::<f32>() / loud.len() as f32).log10()
    }

    fn noise(kind: &str, db: f32) -> Vec<i16> {
        let street = synthetic::street(1, RATE, 20.0).pcm;
        let mut state = 1_u32;
        let white = street.iter().map(|_| {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 8) as f32 / (1 << 23) as f32 - 1.0
        });
        let sound: Vec<f32> = if kind == "street" { street.clone() } else { white.collect() };
        let scale = 10f32.powf(db / 20.0) / energy(sound.iter().copied()).sqrt();
        sound.iter().map(|sample| (sample * scale * 32_767.0).round().clamp(-32_768.0, 32_767.0) as i16).collect()
    }

    #[test]
    fn the_turns_of_a_quiet_caller_are_those_of_a_loud_one() {
        let loud = heard(true, &said(0.0)).turns;
        assert_eq!(loud.len(), 6, "three sentences: {loud:?}");
        for db in [-20.0, -30.0] {
            let quiet = heard(true, &said(db)).turns;
            let near = |(a, b): (&usize, &usize)| a.abs_diff(*b) <= 5;
            assert!(quiet.len() == 6 && quiet.iter().zip(&loud).all(near), "{db} dB: {quiet:?}, not {loud:?}");
        }
        let without = heard(false, &said(-30.0)).turns;
        let late = without.iter().zip(&loud).map(|(a, b)| a.abs_diff(*b)).max();
        assert!(without.len() != 6 || late > Some(5), "it takes the gain: {without:?}");
    }

    #[test]
    fn a_recogniser_has_quiet_callers_at_the_usual_level_from_their_first_sentence_on() {
        for db in [-12.0, -20.0, -30.0] {
            let line = heard(true, &said(db));
            let last = &line.heard[line.heard.len() * 2 / 3..];
            let (level, came) = (level(last), level(&said(db)));
            println!("{db} dB: {came:.1} dB came, {level:.1} dB of full scale in the end");
            assert!((level + 26.0).abs() < 3.0, "{db} dB: {level}");
            let peak = last.iter().map(|sample| sample.unsigned_abs()).max().expect("some");
            assert!(f32::from(peak) <= CEILING + 1.0, "{peak}");
        }
    }

    #[test]
    fn noise_and_silence_are_never_made_louder() {
        for (kind, db) in [("white", -55.0), ("white", -35.0), ("street", -60.0), ("street", -45.0), ("street", -30.0)]
        {
            let line = heard(true, &noise(kind, db));
            assert_eq!((line.gain.factor(), &line.turns), (1.0, &Vec::new()), "{kind} at {db} dB");
            assert!(line.heard == noise(kind, db), "to the bit");
        }
        let line = heard(true, &vec![0; 160_000]);
        assert_eq!(line.gain.factor(), 1.0);
    }

    #[test]
    fn the_gain_rests_in_pauses_whatever_noise_there_is() {
        let mut line = heard(true, &said(-25.0));
        let before = line.gain.factor();
        assert!(before > 3.0, "{before}");
        line.hear(&noise("white", -65.0));
        line.hear(&vec![0; 160_000]);
        assert_eq!(line.gain.factor(), before);
    }

    #[test]
    fn a_loud_caller_is_passed_on_to_the_bit_and_is_not_clipped_after_a_quiet_one() {
        for db in [6.0, 12.0] {
            assert!(heard(true, &said(db)).heard == said(db), "{db} dB");
        }
        let usual = heard(true, &said(0.0)).gain.factor();
        assert!(usual < 1.5, "{usual}");
        let mut line = heard(true, &said(-30.0));
        let (before, from) = (line.gain.factor(), line.heard.len());
        assert!(before > 10.0, "{before}");
        line.hear(&said(6.0));
        // Half a second of voice takes the gain away, and until then there is the limiter: only its ramp may clip.
        let clipped = line.heard[from..].iter().filter(|sample| sample.unsigned_abs() >= 32_767).count();
        assert!(line.gain.factor() < 1.1 && clipped < 2 * RAMP, "{}, {clipped}", line.gain.factor());
    }

    #[test]
    fn somebody_far_behind_a_loud_caller_is_silence_as_before() {
        let mut line = heard(true, &said(0.0));
        let turns = line.turns.len();
        line.hear(&said(-42.0));
        assert_eq!(line.turns.len(), turns);
        // Before any voice was heard, that might be the caller.
        assert!(heard(true, &said(-42.0)).turns.len() >= 2);
    }
}
