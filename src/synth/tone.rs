//! The voice that needs nothing: one beep a word. It keeps calls, demos and tests audible where no other
//! voice can be loaded, and it is deterministic to the bit.

use std::collections::HashMap;
use std::f32::consts::TAU;
use std::time::Duration;

use super::{
    Caps, EngineLimits, Identity, Outcome, PerStage, Progress, Seeds, Slot, Stage, Stages, Step, SynthError,
    Synthesizer, VoiceInfo,
};
use crate::audio::{FRAME_SAMPLES, RATE};
use crate::turn::Utterance;

/// Utterances open at once; each costs a few bytes.
const SLOTS: u32 = 256;
/// Samples a slot gets in one step: long enough to be cheap, short enough to stay a bounded step.
const CHUNK: usize = 10 * FRAME_SAMPLES;
/// Bytes of text; the same order as the other voices accept.
const MAX_TEXT: usize = 48 << 10;

/// One beep a word, its length by the word's length and its pitch by the word's letters.
pub struct Tone {
    caps: Caps,
    open: HashMap<Slot, Beeps>,
}

/// What is left to say in one slot.
struct Beeps {
    /// `(frequency in hertz, samples sounding, samples silent after)`, in playing order.
    words: Vec<(f32, usize, usize)>,
    word: usize,
    /// Samples of the current word already given.
    at: usize,
    produced: u64,
}

impl Tone {
    /// A tone generator.
    pub fn new() -> Self {
        let caps = Caps { name: "tone", device: "cpu".into(), limits: EngineLimits::of_one_stage(SLOTS, SLOTS) };
        Self { caps, open: HashMap::new() }
    }
}

impl Default for Tone {
    fn default() -> Self {
        Self::new()
    }
}

impl Synthesizer for Tone {
    fn caps(&self) -> &Caps {
        &self.caps
    }

    fn voices(&self) -> Vec<VoiceInfo> {
        vec![VoiceInfo { name: "tone".into(), languages: Vec::new(), starts_after: None }]
    }

    fn identity(&self) -> Option<Identity> {
        Some(Identity::of_program("tone"))
    }

    fn open(&mut self, slot: Slot, utterance: &Utterance) -> Result<Stages, SynthError> {
        if let Some(name) = utterance.voice.as_deref()
            && name != "tone"
        {
            return Err(SynthError::UnknownVoice { name: name.into(), known: "tone".into() });
        }
        if utterance.text.len() > MAX_TEXT {
            return Err(SynthError::Input(format!(
                "text of {} bytes is longer than one utterance may be ({MAX_TEXT}): split it into sentences",
                utterance.text.len()
            )));
        }
        self.open.insert(slot, Beeps::new(&utterance.text, utterance.speed));
        Ok(Stages::NONE.with(Stage::Vocode))
    }

    fn run(&mut self, step: &Step, out: &mut Vec<Progress>) -> Result<(), SynthError> {
        for &slot in &step.slots {
            let Some(beeps) = self.open.get_mut(&slot) else { continue };
            let pcm = beeps.next_chunk();
            let done = beeps.word >= beeps.words.len();
            let ready = if done { Stages::NONE } else { Stages::NONE.with(Stage::Vocode) };
            out.push(Progress::new(Outcome { decoded: beeps.produced, done, ..Outcome::ready(slot, ready) }, pcm));
        }
        Ok(())
    }

    fn close(&mut self, slot: Slot) {
        self.open.remove(&slot);
    }

    fn warm_up(&mut self) -> Result<Seeds, SynthError> {
        Ok(PerStage::new([Duration::ZERO, Duration::ZERO, Duration::ZERO, Duration::from_micros(50)]).into())
    }
}

impl Beeps {
    fn new(text: &str, speed: f32) -> Self {
        let speed = if speed.is_finite() { speed.clamp(0.25, 4.0) } else { 1.0 };
        let samples = |ms: f32| (ms / speed * RATE as f32 / 1000.0) as usize;
        let words = text
            .split_whitespace()
            .map(|word| {
                let sum: u32 = word.chars().map(u32::from).fold(0, u32::wrapping_add);
                // Two octaves that every telephone passes.
                let hertz = 330.0 * 2f32.powf((sum % 24) as f32 / 12.0);
                let letters = word.chars().count().min(24) as f32;
                (hertz, samples(60.0 + 45.0 * letters), samples(60.0))
            })
            .collect();
        Self { words, word: 0, at: 0, produced: 0 }
    }

    fn next_chunk(&mut self) -> Vec<f32> {
        let mut pcm = Vec::with_capacity(CHUNK);
        while pcm.len() < CHUNK {
            let Some(&(hertz, sounding, silent)) = self.words.get(self.word) else { break };
            // 5 ms in and out, so that a beep does not click.
            let fade = RATE as usize / 200;
            let level = self.at.min(sounding.saturating_sub(self.at)).min(fade) as f32 / fade as f32;
            let cycles = (hertz as f64 * self.at as f64 / f64::from(RATE)).fract() as f32;
            pcm.push(0.3 * level * (TAU * cycles).sin());
            self.at += 1;
            if self.at >= sounding + silent {
                self.at = 0;
                self.word += 1;
            }
        }
        self.produced += pcm.len() as u64;
        pcm
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::synth::espeak::tests::{speak, utterance};

    #[test]
    fn speaks_every_word_and_the_same_twice() {
        let mut tone = Tone::new();
        let first = speak(&mut tone, utterance("one three"));
        // 60 + 3 * 45 + 60 ms, then 60 + 5 * 45 + 60.
        assert_eq!(first.len(), (255 + 345) * 24);
        assert!(first.iter().any(|s| s.abs() > 0.25));
        assert_eq!(first, speak(&mut tone, utterance("one three")));
    }

    #[test]
    fn chunks_are_whole_frames_except_the_last() {
        let mut tone = Tone::new();
        tone.open(Slot(3), &utterance("a few words to say here")).expect("opens");
        let step = Step { stage: Stage::Vocode, slots: vec![Slot(3)], rounds: 1 };
        for _ in 0..100 {
            let mut out = Vec::new();
            tone.run(&step, &mut out).expect("runs");
            if out[0].outcome.done {
                return;
            }
            assert_eq!(out[0].pcm.len() % FRAME_SAMPLES, 0);
        }
        panic!("never done");
    }
}
