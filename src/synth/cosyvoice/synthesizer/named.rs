//! Which voice an utterance means by a name.

use super::super::backend::Backend;
use super::super::probe::Probe;
use super::{CosyVoice, Known};
use crate::synth::SynthError;
use crate::voice::copies;

impl<B: Backend + Probe> CosyVoice<B> {
    /// The voice of this name, or the default one, and the name that it goes by.
    ///
    /// # Errors
    /// There is none.
    pub(super) fn find_voice<'a>(&'a self, name: Option<&'a str>) -> Result<(&'a str, &'a Known), SynthError> {
        let found = match name.or(self.settings.default_voice.as_deref()) {
            // A copy goes by the name that it has where it was enrolled: what is sampled depends on it.
            Some(name) => match copies::parts(name) {
                Some((name, content)) => self.voices.get(content).map(|known| (name, known)),
                None => self.voices.get_key_value(name).map(|(name, known)| (name.as_str(), known)),
            },
            // A copy is no default voice.
            None => self.own_voices().next(),
        };
        found.ok_or_else(|| match name {
            None if self.voices.is_empty() => SynthError::Input(
                "there are no voices: add one with `antiphon voice add NAME --wav FILE --text TEXT`".into(),
            ),
            _ => SynthError::UnknownVoice {
                name: name.or(self.settings.default_voice.as_deref()).unwrap_or_default().into(),
                known: self.own_voices().map(|(name, _)| name).collect::<Vec<_>>().join(", "),
            },
        })
    }

    /// Those that are no copies.
    fn own_voices(&self) -> impl Iterator<Item = (&str, &Known)> {
        let own = self.voices.iter().filter(|(name, _)| !copies::is_content(name));
        own.map(|(name, known)| (name.as_str(), known))
    }
}
