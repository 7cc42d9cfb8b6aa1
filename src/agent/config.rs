//! `[agent.NAME]`: where an agent is and how its calls behave.

use std::collections::BTreeMap;

use serde::Deserialize;

use super::apology::apology_style;
use super::builtin::Builtin;
use super::llm::config::Llm;
use super::media::frames::Form;
use crate::call::{Interruptible, Style};
use crate::file;
use crate::host;
use crate::secret::Secret;
use crate::turn::{Streaming, checked_speed};

/// `[agent.NAME]`
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Agent {
    /// `ws://`, `wss://`, `builtin:demo`, `builtin:silent` or `builtin:client` (the browser itself); absent with `llm` and
    /// with `media`.
    #[serde(default)]
    pub url: String,
    /// A language model in place of an agent's program.
    pub llm: Option<Box<Llm>>,
    /// `ws://` or `wss://`: a bot that hears and speaks sound, as Twilio Media Streams frames; in place of `url`.
    pub media: Option<String>,
    /// Samples per second of `media`: 8000 is mu-law, 16000 and 24000 are 16-bit little-endian samples.
    #[serde(default = "default_media_rate")]
    pub media_rate: u32,
    /// Headers of the WebSocket request.
    #[serde(default)]
    pub headers: BTreeMap<String, Secret>,
    /// Spoken when the call is answered, before the agent says anything.
    pub greeting: Option<String>,
    /// What interrupts speech: `none`, `speech`, `dtmf`, `any`.
    pub interruptible: Option<Interruptible>,
    /// Voice of this agent.
    pub voice: Option<String>,
    /// How fast it speaks unless a frame says otherwise, 1.0 as the voice does; 0.25 to 4.
    #[serde(default = "default_speed")]
    pub speed: f32,
    /// Language of this agent's text, as a BCP 47 tag; none: the one that each sentence shows.
    pub language: Option<String>,
    /// Whether numbers, dates and signs of its text are brought into words: `on`, `reference`, `off`.
    #[serde(default)]
    pub normalise: crate::text::Normalise,
    /// Words of its text that are said otherwise than they are written, besides those for all.
    #[serde(default)]
    pub lexicon: Words,
    /// How soon its text is spoken while it writes: `auto`, `sentence`, `token`.
    #[serde(default)]
    pub stream: crate::turn::Streaming,
    /// Whether it is told of the caller's turns before they have ended: `prompt` with `last: false`.
    #[serde(default)]
    pub partials: bool,
    /// Spoken when the agent cannot be reached or fails (empty: the call ends at once), and in place of a turn of which
    /// nothing could be spoken.
    #[serde(default = "default_apology")]
    pub apology: String,
    /// Seconds without a sign of life (frame or pong) from the agent before it counts as stalled.
    #[serde(default = "default_stall_s")]
    pub stall_s: u64,
    /// Whether its calls are recorded, where `[recording] mode` leaves that to agents.
    pub record: Option<bool>,
    /// Said before a recording begins, in place of `[recording] consent`; empty: nothing.
    pub consent: Option<String>,
    /// Said to telephones before their call is answered (183 with sound), where a trunk or an account calls and offers media; to
    /// others as soon as it is. Empty: nothing.
    #[serde(default)]
    pub announcement: String,
    /// What becomes of a turn that the engine refuses or fails at: `refuse` or `default_voice`.
    #[serde(default)]
    pub overload: Overload,
    /// Whose agent this is: the name of a token. Calls that come in for it belong to that tenant, and no other names
    /// it. Absent: every tenant may name it, and the calls that come in for it are the operator's.
    pub tenant: Option<String>,
}

/// `[lexicon]`, `[agent.NAME.lexicon]`: words that are said otherwise than they are written.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Words {
    /// A TOML file of entries, as `words` has them; those of `words` go before it.
    pub file: Option<std::path::PathBuf>,
    /// What is written, and how it is said.
    pub words: crate::text::Entries,
    /// These entries, and in an agent's case those for all behind them, ready to be used: [`Words::settle`] makes it.
    #[serde(skip)]
    pub said: crate::text::Lexicon,
}

impl Words {
    /// Makes [`Words::said`] of these entries and of those for all.
    ///
    /// # Errors
    /// The entry and what it must be.
    pub fn settle(&mut self, general: &crate::text::Entries, own: &crate::text::Entries) -> Result<(), String> {
        self.said = crate::text::Lexicon::new(general, own)?;
        Ok(())
    }

    /// All entries.
    ///
    /// # Errors
    /// The file cannot be read, or is no list of entries.
    pub fn load(&self) -> Result<crate::text::Entries, String> {
        let mut entries = match &self.file {
            None => crate::text::Entries::new(),
            Some(path) => {
                let wrong = |error: String| format!("file {}: {error}", path.display());
                let text = file::read_at_most(path, file::MAX_NAMED).map_err(|error| wrong(error.to_string()))?;
                let text = String::from_utf8(text).map_err(|_| wrong("it is not UTF-8".to_owned()))?;
                toml::from_str(&text).map_err(|error| wrong(error.message().to_owned()))?
            }
        };
        entries.extend(self.words.clone());
        Ok(entries)
    }
}

/// What becomes of a turn that would be late, and of one whose device failed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Overload {
    /// It is refused at once; the agent is told when to try again.
    #[default]
    Refuse,
    /// The default voice (`espeak-ng`) speaks it, from an engine of its own.
    DefaultVoice,
}

fn default_apology() -> String {
    "Sorry, something went wrong. Please call again later.".into()
}

fn default_media_rate() -> u32 {
    8_000
}

fn default_speed() -> f32 {
    1.0
}

fn default_stall_s() -> u64 {
    30
}

impl Agent {
    /// How its turns are spoken unless a frame says otherwise.
    pub fn style(&self) -> Style {
        Style {
            voice: self.voice.clone(),
            language: self.language.clone(),
            normalise: self.normalise,
            speed: self.speed,
            interruptible: self.interruptible,
            stream: self.stream,
            lexicon: self.lexicon.said.clone(),
            ..Style::default()
        }
    }

    /// How its parties are told what nothing cuts off: that they are recorded, and its announcement.
    pub fn consent_style(&self) -> Style {
        Style {
            voice: self.voice.clone(),
            language: self.language.clone(),
            normalise: self.normalise,
            lexicon: self.lexicon.said.clone(),
            speed: self.speed,
            // Who has not heard it has not been told.
            interruptible: Some(Interruptible::None),
            stream: Streaming::Sentence,
            ..Style::default()
        }
    }

    /// Texts of the configuration that its calls will say or may say, and how: those heard first go first.
    pub fn phrases(&self) -> Vec<(&str, Style)> {
        let style = self.style();
        let (mut texts, mut sorry) = (vec![self.greeting.as_deref()], vec![self.apology.as_str()]);
        if let Some(llm) = &self.llm {
            texts = vec![llm.greeting.as_deref().or(self.greeting.as_deref()), Some(&llm.filler)];
            sorry.insert(0, &llm.apology);
        }
        let mut phrases: Vec<_> = texts.into_iter().flatten().chain(sorry).map(|text| (text, style.clone())).collect();
        phrases.push((&self.apology, apology_style(&style)));
        phrases.insert(0, (self.announcement.as_str(), self.consent_style()));
        phrases.retain(|(text, _)| !text.trim().is_empty());
        phrases.iter_mut().for_each(|(text, _)| *text = text.trim());
        phrases.dedup();
        phrases
    }

    /// An agent with defaults at `url`.
    pub fn at(url: &str) -> Self {
        Self {
            url: url.into(),
            llm: None,
            media: None,
            media_rate: default_media_rate(),
            headers: BTreeMap::new(),
            greeting: None,
            interruptible: None,
            voice: None,
            speed: default_speed(),
            language: None,
            normalise: crate::text::Normalise::default(),
            lexicon: Words::default(),
            stream: crate::turn::Streaming::default(),
            partials: false,
            apology: default_apology(),
            stall_s: default_stall_s(),
            record: None,
            consent: None,
            announcement: String::new(),
            overload: Overload::default(),
            tenant: None,
        }
    }

    /// An agent that is the model `llm`.
    pub fn of(llm: Llm) -> Self {
        Self { llm: Some(Box::new(llm)), ..Self::at("") }
    }

    /// Checks what the types cannot say.
    ///
    /// # Errors
    /// The key and what it must be.
    pub fn validate(&self) -> Result<(), String> {
        let url = &self.url;
        let given: Vec<&str> = [("url", !url.is_empty()), ("llm", self.llm.is_some()), ("media", self.media.is_some())]
            .into_iter()
            .filter_map(|(name, is_given)| is_given.then_some(name))
            .collect();
        match given[..] {
            [] => return Err("needs `url` (a WebSocket or a built-in agent), `llm` or `media`".into()),
            [_] => {}
            _ => return Err(format!("{}: an agent is one of these; remove the others", given.join(" and "))),
        }
        checked_speed(self.speed)?;
        let is_socket = |url: &str| ["ws://", "wss://"].iter().any(|scheme| url.starts_with(scheme));
        let socket = |key: &str, url: &str| {
            let read = host::url(url, &["ws", "wss"]).map_err(|error| format!("{key} {error}"));
            read.map(|_| ())
        };
        if Form::at(self.media_rate).is_none() {
            return Err(format!("media_rate = {}: expected 8000, 16000 or 24000", self.media_rate));
        }
        if let Some(llm) = &self.llm {
            return llm.validate().map_err(|error| format!("llm: {error}"));
        }
        match &self.media {
            Some(media) => socket("media", media),
            None if is_socket(url) => socket("url", url),
            None if Builtin::at(url).is_some() => Ok(()),
            None => Err(format!(
                "url `{url}`: expected ws://..., wss://..., builtin:demo, builtin:silent or builtin:client"
            )),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_agent_is_one_thing_and_its_stream_has_a_rate_that_there_is() {
        let read = |text: &str| {
            let agent: Agent = toml::from_str(text).map_err(|error| error.message().to_owned())?;
            agent.validate().map(|()| agent)
        };
        let agent = read("media = \"wss://bot.example.com/stream\"").expect("valid");
        assert_eq!((agent.media_rate, agent.interruptible), (8_000, None), "as Twilio's");
        assert!(read("media = \"ws://127.0.0.1:1/\"\nmedia_rate = 24000").is_ok());
        for (wrong, why) in [
            ("", "`media`"),
            ("media = \"ws://a\"\nurl = \"ws://b\"", "url and media"),
            ("media = \"https://a\"", "wss://"),
            ("media = \"ws://a\"\nmedia_rate = 11025", "11025"),
            ("url = \"builtin:nobody\"", "builtin:demo"),
            ("url = \"ws://a\"\nspeed = 5", "0.25"),
        ] {
            let error = read(wrong).expect_err(wrong);
            assert!(error.contains(why), "{wrong}: {error}");
        }
    }
}
