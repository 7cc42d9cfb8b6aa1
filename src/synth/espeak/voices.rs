//! What `espeak-ng --voices` lists, and how a requested name becomes one of it.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::process::Stdio;

use super::child::{confined, limit};
use crate::synth::{SynthError, VoiceInfo};

/// The voices and variants the installed program has.
#[derive(Debug, Default)]
pub(super) struct Catalogue {
    /// Voice name in lower case -> the languages it is listed for, its own first.
    voices: BTreeMap<String, Vec<String>>,
    /// Language in lower case -> the voice with the best (smallest) priority for it.
    languages: BTreeMap<String, (u32, String)>,
    /// Lower case -> as the program spells it: what may follow a `+`.
    variants: BTreeMap<String, String>,
}

impl Catalogue {
    pub(super) fn load(program: &Path) -> Result<Self, SynthError> {
        let mut catalogue = Self::default();
        catalogue.add_voices(&list(program, "--voices")?);
        catalogue.add_variants(&list(program, "--voices=variant")?);
        if catalogue.voices.is_empty() {
            return Err(SynthError::Device(format!(
                "`{} --voices` lists none: install the Debian package `espeak-ng-data`",
                program.display()
            )));
        }
        Ok(catalogue)
    }

    /// Lines of: priority, language, age/gender, name, file, `(language priority)...`.
    fn add_voices(&mut self, listing: &str) {
        for line in listing.lines().skip(1) {
            let mut words = line.split_whitespace();
            let (Some(priority), Some(name)) = (words.next().and_then(|w| w.parse().ok()), words.next()) else {
                continue;
            };
            let name = name.to_lowercase();
            let mut languages = vec![name.clone()];
            self.offer(&name, priority, &name);
            // "(en 2)(en-gb 9)": pairs after the first parenthesis.
            let others = line.split_once('(').map(|(_, rest)| rest).unwrap_or_default();
            // Names such as `English_(America)` hold parentheses too, but no blank inside them.
            for pair in others.split(['(', ')']).filter_map(|p| p.split_once(' ')) {
                let Ok(priority) = pair.1.trim().parse() else { continue };
                let language = pair.0.to_lowercase();
                self.offer(&language, priority, &name);
                languages.push(language);
            }
            self.voices.insert(name, languages);
        }
    }

    fn offer(&mut self, language: &str, priority: u32, voice: &str) {
        let best = self.languages.entry(language.into()).or_insert_with(|| (priority, voice.into()));
        if priority < best.0 {
            *best = (priority, voice.into());
        }
    }

    /// Lines of: priority, `variant`, age/gender, name, `!v/file`.
    fn add_variants(&mut self, listing: &str) {
        for line in listing.lines().skip(1) {
            for word in line.split_whitespace() {
                if let Some(file) = word.strip_prefix("!v/") {
                    self.variants.insert(file.to_lowercase(), file.into());
                }
            }
        }
    }

    /// The program's `-v` argument for a requested voice: `de`, `en-us`, `EN_US`, `en+f3`.
    pub(super) fn resolve(&self, name: &str) -> Result<String, SynthError> {
        let unknown = || {
            let known: Vec<&str> = self.voices.keys().map(String::as_str).collect();
            SynthError::UnknownVoice {
                name: name.into(),
                known: format!("{}; add `+f3` or another variant", known.join(", ")),
            }
        };
        let (base, variant) = match name.split_once('+') {
            Some((base, variant)) => (base, Some(variant)),
            None => (name, None),
        };
        let base = base.to_lowercase().replace('_', "-");
        let voice = if self.voices.contains_key(&base) {
            base
        } else {
            self.languages.get(&base).map(|(_, voice)| voice.clone()).ok_or_else(unknown)?
        };
        let Some(variant) = variant else { return Ok(voice) };
        let variant = self.variants.get(&variant.to_lowercase()).ok_or_else(unknown)?;
        Ok(format!("{voice}+{variant}"))
    }

    /// The voice for a BCP 47 tag: the tag itself, then shorter and shorter prefixes of it, then `default`.
    /// When the default voice speaks the tag's language, it stays.
    pub(super) fn for_language(&self, tag: &str, default: &str) -> Result<String, SynthError> {
        let tag = tag.to_lowercase().replace('_', "-");
        let own = self.resolve(default)?;
        let primary = tag.split('-').next().unwrap_or_default();
        if !tag.contains('-') && own.split(['-', '+']).next() == Some(primary) {
            return Ok(own);
        }
        let mut prefix = tag.as_str();
        loop {
            if let Ok(voice) = self.resolve(prefix) {
                return Ok(voice);
            }
            match prefix.rsplit_once('-') {
                Some((shorter, _)) => prefix = shorter,
                None => return Ok(own),
            }
        }
    }

    pub(super) fn infos(&self, default: &str) -> Vec<VoiceInfo> {
        let default = self.resolve(default).unwrap_or_default();
        let info = |name: &str| {
            let base = name.split('+').next().unwrap_or(name);
            let languages: BTreeSet<String> = self.voices.get(base).into_iter().flatten().cloned().collect();
            VoiceInfo { name: name.into(), languages: languages.into_iter().collect(), starts_after: None }
        };
        let others = self.voices.keys().filter(|name| **name != default);
        std::iter::once(info(&default)).chain(others.map(|name| info(name))).collect()
    }
}

pub(super) fn list(program: &Path, what: &str) -> Result<String, SynthError> {
    let mut command = confined(program);
    let command = command.arg(what).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let process = command.spawn().map_err(|e| missing(program, &e))?;
    limit(&process);
    let output = process.wait_with_output().map_err(|e| missing(program, &e))?;
    if !output.status.success() {
        let reason = String::from_utf8_lossy(&output.stderr);
        return Err(SynthError::Device(format!("`{} {what}` failed: {}", program.display(), reason.trim())));
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// Why the program could not be started, and what to do about it.
pub(super) fn missing(program: &Path, error: &std::io::Error) -> SynthError {
    let program = program.display();
    SynthError::Device(if error.kind() == std::io::ErrorKind::NotFound {
        format!("`{program}` was not found: install the Debian package `espeak-ng` (apt-get install espeak-ng)")
    } else {
        format!("`{program}` could not be started: {error}")
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample() -> Catalogue {
        let mut catalogue = Catalogue::default();
        catalogue.add_voices(
            "Pty Language       Age/Gender VoiceName          File                 Other Languages\n\
             \x205  de              --/M      German             gmw/de               \n\
             \x202  en-gb           --/M      English_(Great_Britain) gmw/en               (en 2)\n\
             \x202  en-us           --/M      English_(America)  gmw/en-US            (en 3)\n\
             \x205  cmn             --/M      Chinese_(Mandarin,_latin_as_English) sit/cmn              (zh-cmn 5)(zh 5)\n",
        );
        catalogue
            .add_variants("Pty Language\n 5  variant         --/F      female3            !v/f3                \n");
        catalogue
    }

    #[test]
    fn names_resolve_whatever_their_case() {
        let c = sample();
        assert_eq!(c.resolve("EN_US").expect("known"), "en-us");
        assert_eq!(c.resolve("en").expect("known"), "en-gb");
        assert_eq!(c.resolve("zh+F3").expect("known"), "cmn+f3");
        assert!(matches!(c.resolve("en+nobody"), Err(SynthError::UnknownVoice { .. })));
        assert!(matches!(c.resolve("-w /tmp/x"), Err(SynthError::UnknownVoice { .. })));
    }

    #[test]
    fn a_language_picks_its_voice_and_keeps_a_default_that_speaks_it() {
        let c = sample();
        assert_eq!(c.for_language("de-AT", "en-us").expect("falls back"), "de");
        assert_eq!(c.for_language("en", "en-us").expect("default"), "en-us");
        assert_eq!(c.for_language("en-GB", "en-us").expect("exact"), "en-gb");
        assert_eq!(c.for_language("tlh", "en-us").expect("unknown: default"), "en-us");
    }
}
