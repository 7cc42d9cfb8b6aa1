//! Whether the caller is speaking: `earshot` scores of 16 ms frames through a state machine with hysteresis.
//!
//! Owns the detector and the decision; never decides what follows from it.
//!
//! # Why
//! One frame over the threshold is a click, a breath or line noise. Onset asks for several frames in a short
//! window, offset for an unbroken quiet stretch with a lower threshold, so that a sentence with pauses between
//! its words is one stretch of speech. An energy floor goes first: it spares quiet lines the network's cost
//! and keeps comfort noise from ever counting as speech.

use std::time::Duration;

use serde::{Deserialize, Serialize};

/// Samples per second that [`Vad`] hears.
pub const RATE: u32 = 16_000;

/// Samples of one decision: 16 ms.
pub const FRAME: usize = 256;

/// When a caller counts as speaking.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct VadConfig {
    /// Score (0..1) from which a frame is voice.
    pub onset_score: f32,
    /// Score under which a frame is quiet again; lower than `onset_score`.
    pub offset_score: f32,
    /// Voice needed inside [`VadConfig::onset_window_ms`] to begin.
    pub onset_ms: u64,
    /// The window for that.
    pub onset_window_ms: u64,
    /// Unbroken quiet that ends speech.
    pub offset_ms: u64,
    /// Frames under this level (dB below full scale) are quiet whatever they score.
    pub floor_dbfs: f32,
}

impl Default for VadConfig {
    fn default() -> Self {
        // Onset after 96 ms of voice in 144 ms: shorter than any word that means "stop", longer than a click.
        Self {
            onset_score: 0.55,
            offset_score: 0.35,
            onset_ms: 96,
            onset_window_ms: 144,
            offset_ms: 480,
            floor_dbfs: -50.0,
        }
    }
}

/// Hears 16 kHz audio and says when speech begins and ends.
pub struct Vad {
    detector: Box<earshot::Detector>,
    machine: Hysteresis,
    pending: Vec<i16>,
    floor_energy: f32,
}

impl Vad {
    /// A detector that has heard nothing.
    pub fn new(config: &VadConfig) -> Self {
        // Mean square of the floor; frames compare energies, which saves a logarithm a frame.
        let floor_energy = 10f32.powf(config.floor_dbfs / 10.0);
        Self {
            detector: Box::default(),
            machine: Hysteresis::new(config),
            pending: Vec::with_capacity(FRAME * 2),
            floor_energy,
        }
    }

    /// Hears `pcm` at [`RATE`]; returns whether somebody speaks when that changed in it (the last change).
    pub fn push(&mut self, pcm: &[i16]) -> Option<bool> {
        self.push_above(pcm, 0.0)
    }

    /// As [`Vad::push`]; frames up to the mean square `floor` (of samples in -1..=1) are quiet whatever they score, as they
    /// may be somebody else's voice.
    pub fn push_above(&mut self, pcm: &[i16], floor: f32) -> Option<bool> {
        let floor = floor.max(self.floor_energy);
        self.pending.extend_from_slice(pcm);
        let mut changed = None;
        let whole = self.pending.len() / FRAME * FRAME;
        for frame in self.pending[..whole].chunks_exact(FRAME) {
            let energy = frame.iter().map(|s| (f32::from(*s) / 32_768.0).powi(2)).sum::<f32>() / FRAME as f32;
            let score = if energy < floor { 0.0 } else { self.detector.predict_i16(frame) };
            changed = self.machine.push(score).or(changed);
        }
        self.pending.drain(..whole);
        changed
    }

    /// Nothing arrived for `time` (the peer sends nothing in silence): counts as quiet.
    pub fn silence(&mut self, time: Duration) -> Option<bool> {
        let frames = time.as_millis() as usize / 16;
        // Past the offset more quiet changes nothing.
        (0..frames.min(self.machine.offset_frames)).fold(None, |changed, _| self.machine.push(0.0).or(changed))
    }

    /// How long the last voice is ago while somebody counts as speaking.
    pub fn quiet(&self) -> Option<Duration> {
        let frames = self.machine.speaking.then_some(self.machine.quiet)?;
        Some(Duration::from_secs(1) * (frames * FRAME) as u32 / RATE)
    }

    /// Whether somebody speaks.
    pub fn is_speaking(&self) -> bool {
        self.machine.speaking
    }
}

impl std::fmt::Debug for Vad {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Vad").field("machine", &self.machine).finish_non_exhaustive()
    }
}

/// Scores in, decisions out.
#[derive(Debug)]
struct Hysteresis {
    onset_score: f32,
    offset_score: f32,
    onset_frames: u32,
    /// Voice of the latest frames, newest in bit 0; `window` bits count.
    recent: u64,
    window: u32,
    quiet: usize,
    offset_frames: usize,
    speaking: bool,
}

impl Hysteresis {
    fn new(config: &VadConfig) -> Self {
        let frames = |ms: u64| (ms / 16).max(1);
        let window = frames(config.onset_window_ms).min(64) as u32;
        Self {
            onset_score: config.onset_score,
            offset_score: config.offset_score.min(config.onset_score),
            onset_frames: (frames(config.onset_ms) as u32).min(window),
            recent: 0,
            window,
            quiet: 0,
            offset_frames: frames(config.offset_ms) as usize,
            speaking: false,
        }
    }

    fn push(&mut self, score: f32) -> Option<bool> {
        if self.speaking {
            self.quiet = if score < self.offset_score { self.quiet + 1 } else { 0 };
            if self.quiet < self.offset_frames {
                return None;
            }
            self.speaking = false;
            self.recent = 0;
            return Some(false);
        }
        self.recent = self.recent << 1 | u64::from(score >= self.onset_score);
        let mask = u64::MAX >> (64 - self.window);
        if (self.recent & mask).count_ones() < self.onset_frames {
            return None;
        }
        self.speaking = true;
        self.quiet = 0;
        Some(true)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn machine() -> Hysteresis {
        Hysteresis::new(&VadConfig::default())
    }

    #[test]
    fn speech_begins_after_six_voiced_frames_of_nine() {
        let mut machine = machine();
        let scores = [0.9, 0.1, 0.9, 0.9, 0.1, 0.9, 0.9];
        assert!(scores.iter().all(|score| machine.push(*score).is_none()));
        assert_eq!(machine.push(0.9), Some(true));
    }

    #[test]
    fn clicks_are_not_speech() {
        let mut machine = machine();
        for n in 0..1_000 {
            assert_eq!(machine.push(if n % 9 < 5 { 0.99 } else { 0.0 }), None);
        }
    }

    #[test]
    fn pauses_between_words_do_not_end_speech() {
        let mut machine = machine();
        for _ in 0..6 {
            machine.push(0.9);
        }
        assert!(machine.speaking);
        for n in 0..300 {
            assert_eq!(machine.push(if n % 30 == 0 { 0.9 } else { 0.0 }), None);
        }
        let quiet = (0..30).filter_map(|_| machine.push(0.0)).collect::<Vec<_>>();
        assert_eq!(quiet, [false]);
    }

    #[test]
    fn silence_and_noise_are_not_speech_and_absence_ends_it() {
        let mut vad = Vad::new(&VadConfig::default());
        assert_eq!(vad.push(&[0; 16_000]), None);
        let mut state = 1u32;
        let noise = std::iter::repeat_with(|| {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 24) as i16 - 128
        });
        assert_eq!(vad.push(&noise.take(16_000).collect::<Vec<_>>()), None);
        assert_eq!(vad.quiet(), None);
        vad.machine.speaking = true;
        assert_eq!(vad.quiet(), Some(Duration::ZERO));
        assert_eq!(vad.silence(Duration::from_millis(160)), None);
        assert_eq!(vad.quiet(), Some(Duration::from_millis(160)));
        vad.machine.quiet = 0;
        assert_eq!(vad.silence(Duration::from_millis(479)), None);
        assert_eq!(vad.silence(Duration::from_secs(3_600)), Some(false));
    }
}
