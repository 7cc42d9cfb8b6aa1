//! What the voices of an engine can do, whichever device would speak.

use super::Engine;
use super::place::{self, serves};

impl Engine {
    /// How many text ids of a text that is still being written `voice` waits for before it speaks
    /// ([`crate::synth::VoiceInfo::starts_after`]); `None`: on some device that has it, it speaks whole texts only.
    pub fn starts_after(&self, voice: Option<&str>) -> Option<u32> {
        let devices = self.inner.devices();
        let content = self.inner.content(voice);
        let serving =
            devices.values().filter(|device| device.is_ready() && serves(&devices, device, voice, content.as_deref()));
        place::starts_after(&serving.collect::<Vec<_>>(), voice, content.as_deref())
    }

    /// Whether `voice` says phonemes that a text gives; others say the words that are written. While no device is ready:
    /// yes.
    pub fn says_phonemes(&self, voice: Option<&str>) -> bool {
        let devices = self.inner.devices();
        let content = self.inner.content(voice);
        let mut serving =
            devices.values().filter(|device| device.is_ready() && serves(&devices, device, voice, content.as_deref()));
        serving.all(|device| matches!(device.kind(), Some("espeak" | "cosyvoice3")))
    }

    /// Whether `voice` speaks the language of this BCP 47 tag, as far as is known. While no device is ready: yes.
    pub fn speaks(&self, voice: Option<&str>, tag: &str) -> bool {
        let devices = self.inner.devices();
        let content = self.inner.content(voice);
        let mut serving =
            devices.values().filter(|device| device.is_ready() && serves(&devices, device, voice, content.as_deref()));
        serving.all(|device| place::speaks(device, voice, tag))
    }
}
