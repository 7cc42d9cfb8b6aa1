//! What the host knows of each voice, and who holds it.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::device::Buf;
use super::slabs::{Pool, Slab};
use crate::synth::cosyvoice::backend::{FlowPrompt, VoiceHandle};

/// A voice and what its utterances share.
pub(super) struct Voice {
    pub(super) prompt: Arc<FlowPrompt>,
    /// Frames of the prompt's mel.
    pub(super) frames: usize,
    /// The mel `[frames, mel]`.
    pub(super) cond: Buf,
    /// The projected speaker vector.
    pub(super) speaker: Buf,
    pub(super) prefix: Option<Prefix>,
    /// The caller and every slot that uses it.
    pub(super) holds: u32,
}

/// Solved blocks of a prompt.
pub(super) struct Prefix {
    pub(super) slabs: Vec<Slab>,
    /// Histories of the position convolutions after the last of them.
    pub(super) hist: Buf,
}

/// All voices by handle.
#[derive(Default)]
pub(super) struct Voices {
    list: BTreeMap<VoiceHandle, Voice>,
    next: u32,
}

impl Voices {
    /// Adds a voice under a handle that none had before.
    pub(super) fn add(&mut self, voice: Voice) -> VoiceHandle {
        let handle = VoiceHandle(self.next);
        self.next += 1;
        self.list.insert(handle, voice);
        handle
    }

    pub(super) fn get(&self, handle: VoiceHandle) -> Option<&Voice> {
        self.list.get(&handle)
    }

    pub(super) fn get_mut(&mut self, handle: VoiceHandle) -> Option<&mut Voice> {
        self.list.get_mut(&handle)
    }

    /// Ends one hold; a voice without any goes, and its slabs go back to `pool`.
    pub(super) fn release(&mut self, handle: VoiceHandle, pool: &mut impl Pool) {
        let Some(voice) = self.list.get_mut(&handle) else { return };
        voice.holds = voice.holds.saturating_sub(1);
        if voice.holds == 0
            && let Some(prefix) = self.list.remove(&handle).and_then(|v| v.prefix)
        {
            prefix.slabs.into_iter().for_each(|slab| pool.put(slab));
        }
    }

    /// Slabs that voices hold.
    pub(super) fn slabs(&self) -> usize {
        self.list.values().filter_map(|v| v.prefix.as_ref()).map(|p| p.slabs.len()).sum()
    }

    /// Frames of a voice's prompt; none where it is gone.
    pub(super) fn frames(&self, handle: VoiceHandle) -> usize {
        self.get(handle).map_or(0, |v| v.frames)
    }
}
