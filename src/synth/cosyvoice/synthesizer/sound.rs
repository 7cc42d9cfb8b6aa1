//! What makes sound of tokens: a flow or a vocoder call, which can be made by itself or beside decoding.

use super::super::backend::{Backend, Flowed, Vocoded};
use crate::synth::{Slot, SynthError};

/// A flow or vocoder call.
pub(super) enum Call {
    Flow(Vec<Slot>, u32),
    Vocode(Vec<Slot>),
}

/// What such a call gave.
#[derive(Default)]
pub(super) struct Sound {
    pub(super) mel: Vec<Flowed>,
    pub(super) pcm: Vec<Vocoded>,
}

impl Call {
    /// Makes it.
    ///
    /// # Errors
    /// The device failed.
    pub(super) fn run<B: Backend>(&self, backend: &mut B) -> Result<Sound, SynthError> {
        let mut sound = Sound::default();
        match self {
            Call::Flow(slots, rounds) => backend.flow(slots, *rounds, &mut sound.mel)?,
            Call::Vocode(slots) => backend.vocode(slots, &mut sound.pcm)?,
        }
        Ok(sound)
    }
}
