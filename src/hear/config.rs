//! `[recognizer]` and `[turns]`: what hears, and when a caller has finished.

use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::Deserialize;

use super::stream::protocol::Dialect;
use super::stream::{Service, Services};
use crate::host;
use crate::secret::Secret;

/// `[recognizer]`
#[derive(Clone, Debug, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Recognizer {
    /// What recognises speech.
    pub kind: Kind,
    /// `whisper`: the checkpoint directory. Services: the name of their model.
    pub model: Option<String>,
    /// Where `whisper` computes: `cpu`, `cuda:0`, or `auto` (on the GPU that speaks, else on one that can be used, else on
    /// the CPU).
    pub device: String,
    /// BCP 47 tag of what callers speak; absent: it is found out, where the recogniser can.
    pub language: Option<String>,
    /// Address of the service.
    pub url: Option<String>,
    /// Its API key.
    pub token: Option<Secret>,
    /// Services: the one that is used where the first fails.
    pub fallback: Option<Fallback>,
    /// What a minute of sound costs, for `antiphon_recognizer_cost_micros_total`.
    pub price: f64,
    /// Threads of `whisper` on the CPU; 0: half the cores.
    pub threads: usize,
    /// A service that has not answered by then has failed.
    pub timeout_ms: u64,
    /// Spoken when a turn was not heard because recognition failed; empty: nothing.
    pub apology: String,
}

impl Default for Recognizer {
    fn default() -> Self {
        Self {
            kind: Kind::Auto,
            model: None,
            // Of the GPU, speech has the first claim: sharing it is asked for.
            device: "cpu".into(),
            language: None,
            url: None,
            token: None,
            fallback: None,
            price: 0.0,
            threads: 0,
            timeout_ms: 5_000,
            apology: "Sorry, I did not hear that. Could you say it again?".into(),
        }
    }
}

/// What recognises speech.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Kind {
    /// Nothing does.
    Off,
    /// `whisper` where `model` is set, `http` where `url` is, else nothing.
    #[default]
    Auto,
    /// A Whisper checkpoint, on this machine's GPU or processor.
    Whisper,
    /// A server with `POST /v1/audio/transcriptions`.
    Http,
    /// Deepgram, as the caller speaks: `/v1/listen`, or Flux (`/v2/listen`) where `model` begins with `flux`.
    Deepgram,
    /// OpenAI's realtime transcription.
    OpenAi,
    /// vLLM's `/v1/realtime`.
    Vllm,
}

/// A second service: of the same kind, or both stream.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Fallback {
    /// What it is; absent: the same as the first.
    pub kind: Option<Kind>,
    /// Its address.
    pub url: String,
    /// Its API key.
    pub token: Option<Secret>,
    /// Name of its model.
    pub model: Option<String>,
    /// What a minute of sound costs there.
    #[serde(default)]
    pub price: f64,
}

impl Kind {
    /// The protocol of a service that streams, and where it is unless told otherwise.
    fn dialect(self, model: Option<&str>) -> Option<(Dialect, &'static str)> {
        match self {
            Kind::Deepgram if model.is_some_and(|model| model.starts_with("flux")) => {
                Some((Dialect::Flux, "wss://api.deepgram.com"))
            }
            Kind::Deepgram => Some((Dialect::Listen, "wss://api.deepgram.com")),
            Kind::OpenAi => Some((Dialect::OpenAi, "wss://api.openai.com")),
            // The port that it has unless told otherwise.
            Kind::Vllm => Some((Dialect::Vllm, "ws://127.0.0.1:8000")),
            Kind::Off | Kind::Auto | Kind::Whisper | Kind::Http => None,
        }
    }
}

impl Recognizer {
    /// The services that stream; none where `kind` does not.
    pub fn services(&self) -> Option<Services> {
        let (dialect, url) = self.chosen().dialect(self.model.as_deref())?;
        let mut services = vec![Service {
            dialect,
            url: self.url.clone().unwrap_or_else(|| url.into()),
            token: self.token.clone(),
            model: self.model.clone(),
            price: self.price,
        }];
        if let Some(second) = &self.fallback {
            let (dialect, _) = second.kind.unwrap_or(self.chosen()).dialect(second.model.as_deref())?;
            let Fallback { url, token, model, price, .. } = second.clone();
            services.push(Service { dialect, url, token, model, price });
        }
        // Half of it for the first, so that the second has some time left.
        Some(Services { services, patience: Duration::from_millis(self.timeout_ms / 2) })
    }

    /// What `kind` comes to.
    pub fn chosen(&self) -> Kind {
        match self.kind {
            Kind::Auto if self.model.is_some() && self.url.is_none() => Kind::Whisper,
            Kind::Auto if self.url.is_some() => Kind::Http,
            Kind::Auto => Kind::Off,
            kind => kind,
        }
    }

    /// The GPU that `device` names.
    ///
    /// # Errors
    /// It names nothing.
    pub fn ordinal(&self) -> Result<Option<u32>, String> {
        if ["auto", "cpu"].contains(&self.device.as_str()) {
            return Ok(None);
        }
        let ordinal = self.device.strip_prefix("cuda:").and_then(|number| number.parse().ok());
        ordinal.map(Some).ok_or(format!("device = \"{}\": expected \"auto\", \"cpu\" or \"cuda:0\"", self.device))
    }

    /// Checks what the types cannot say.
    ///
    /// # Errors
    /// The key and what it must be.
    pub fn validate(&self) -> Result<(), String> {
        match self.chosen() {
            Kind::Whisper if self.model.is_none() => {
                return Err("kind = \"whisper\" needs `model`, the checkpoint directory: `antiphon model pull openai/whisper-tiny.en`".into());
            }
            Kind::Http if self.url.is_none() => {
                return Err(
                    "kind = \"http\" needs `url`, such as \"http://127.0.0.1:8000/v1/audio/transcriptions\"".into()
                );
            }
            _ => {}
        }
        if let Some(Services { services, .. }) = self.services() {
            for service in &services {
                service
                    .dialect
                    .address(&service.url, None, None)
                    .map_err(|error| error.strip_prefix("[recognizer] ").unwrap_or(&error).to_owned())?;
            }
            if self.token.is_none() && self.url.is_none() && self.chosen() != Kind::Vllm {
                return Err("needs `token`, the service's API key".into());
            }
        } else if self.chosen().dialect(None).is_some() {
            return Err(
                "fallback.kind: expected \"deepgram\", \"openai\" or \"vllm\"; both services must stream".into()
            );
        }
        if [self.price, self.fallback.as_ref().map_or(0.0, |second| second.price)]
            .iter()
            .any(|p| !p.is_finite() || *p < 0.0)
        {
            return Err("price: expected a number from 0".into());
        }
        let streams = self.chosen().dialect(None).is_some();
        let schemes: &[&str] = if streams { &["ws", "wss"] } else { &["http", "https"] };
        let fallback = self.fallback.as_ref().map(|fallback| &fallback.url);
        for (key, url) in [("url", self.url.as_ref()), ("fallback.url", fallback)] {
            if let Some(url) = url {
                host::url(url, schemes).map_err(|error| format!("{key} {error}"))?;
            }
        }
        if let Some(second) = &self.fallback {
            if self.chosen() != Kind::Http && !streams {
                return Err(
                    "`fallback` belongs to a service: kind = \"http\", \"deepgram\", \"openai\" or \"vllm\"".into()
                );
            }
            if self.chosen() == Kind::Http && second.kind.is_some_and(|kind| kind != Kind::Http) {
                return Err("fallback.kind: expected \"http\", as the first service is".into());
            }
        }
        self.ordinal()?;
        if !(100..=60_000).contains(&self.timeout_ms) {
            return Err(format!("timeout_ms = {}: expected 100 to 60000", self.timeout_ms));
        }
        Ok(())
    }
}

/// By what a turn is taken as over.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Mode {
    /// `smart_turn` where its file is given, else `words`.
    #[default]
    Auto,
    /// Pauses and words.
    Words,
    /// And by how it sounds: the network Smart Turn.
    SmartTurn,
}

/// `[turns]`
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Turns {
    /// By what a turn is taken as over.
    pub mode: Mode,
    /// The network's ONNX file.
    pub smart_turn: Option<PathBuf>,
    /// Silence after which a caller has finished who said something complete.
    pub min_delay_ms: u64,
    /// The same for one whose words ask for more of them.
    pub max_delay_ms: u64,
}

impl Default for Turns {
    fn default() -> Self {
        // Most pauses inside a sentence are under 350 ms; after 1.8 s people say "hello?".
        Self { mode: Mode::Auto, smart_turn: None, min_delay_ms: 350, max_delay_ms: 1_800 }
    }
}

impl Turns {
    /// The file of the network that judges turns; `None`: none does.
    pub fn network(&self) -> Option<&Path> {
        self.smart_turn.as_deref().filter(|_| self.mode != Mode::Words)
    }

    /// Checks what the types cannot say.
    ///
    /// # Errors
    /// The key and what it must be.
    pub fn validate(&self) -> Result<(), String> {
        if self.mode == Mode::SmartTurn && self.smart_turn.is_none() {
            return Err(
                "mode = \"smart_turn\" needs `smart_turn`, the file smart-turn-v3.2-cpu.onnx of the Python package \
                        pipecat-ai"
                    .into(),
            );
        }
        if self.min_delay_ms < 100 {
            return Err(format!("min_delay_ms = {}: expected 100 or more", self.min_delay_ms));
        }
        if self.max_delay_ms < self.min_delay_ms || self.max_delay_ms > 10_000 {
            return Err(format!(
                "max_delay_ms = {}: expected {} (min_delay_ms) to 10000",
                self.max_delay_ms, self.min_delay_ms
            ));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn auto_is_what_there_is_something_for() {
        let with = |model: Option<&str>, url: Option<&str>| Recognizer {
            model: model.map(Into::into),
            url: url.map(Into::into),
            ..Recognizer::default()
        };
        assert_eq!(with(None, None).chosen(), Kind::Off);
        assert_eq!(with(Some("whisper-tiny.en"), None).chosen(), Kind::Whisper);
        assert_eq!(with(Some("whisper-1"), Some("http://a/")).chosen(), Kind::Http);
        assert!(with(None, Some("ftp://a/")).validate().is_err());
        assert!(with(None, Some("http://a/")).validate().is_ok());
        assert!(Recognizer { kind: Kind::Whisper, ..Recognizer::default() }.validate().is_err());
        let on = |device: &str| Recognizer { device: device.into(), ..with(Some("whisper-tiny.en"), None) };
        assert_eq!(
            [on("auto").ordinal(), on("cpu").ordinal(), on("cuda:1").ordinal()],
            [Ok(None), Ok(None), Ok(Some(1))]
        );
        assert!(on("gpu").validate().expect_err("no device").contains("gpu") && on("cuda:0").validate().is_ok());
        let streams = |more: &str| -> Result<Recognizer, String> {
            let config: Recognizer = toml::from_str(more).map_err(|error| error.message().to_owned())?;
            config.validate().map(|()| config)
        };
        let flux = "kind = \"deepgram\"\ntoken = \"k\"\nmodel = \"flux-general-en\"\n";
        let second = |more: &str| format!("{flux}fallback = {{ url = \"wss://b\", {more} }}");
        let services = streams(&second("kind = \"openai\"")).expect("valid").services().expect("they stream").services;
        let dialects: Vec<Dialect> = services.iter().map(|service| service.dialect).collect();
        assert_eq!(dialects, [Dialect::Flux, Dialect::OpenAi]);
        assert_eq!(services[0].url, "wss://api.deepgram.com");
        let own = streams("kind = \"vllm\"").expect("it needs no key").services().expect("it streams").services;
        assert_eq!((own[0].dialect, own[0].url.as_str()), (Dialect::Vllm, "ws://127.0.0.1:8000"));
        for (wrong, why) in [
            ("kind = \"deepgram\"".to_owned(), "token"),
            (second("kind = \"whisper\""), "fallback.kind"),
            (format!("{flux}url = \"https://a\""), "wss://"),
            (format!("{flux}price = -1.0"), "price"),
        ] {
            let error = streams(&wrong).expect_err(&wrong);
            assert!(error.contains(why), "{wrong}: {error}");
        }
        assert!(Turns { min_delay_ms: 500, max_delay_ms: 400, ..Turns::default() }.validate().is_err());
        let file = Some(PathBuf::from("a.onnx"));
        let turns =
            |mode, smart_turn: &Option<PathBuf>| Turns { mode, smart_turn: smart_turn.clone(), ..Turns::default() };
        assert!(turns(Mode::SmartTurn, &None).validate().is_err_and(|error| error.contains("pipecat-ai")));
        assert_eq!(turns(Mode::Auto, &file).network(), file.as_deref());
        assert_eq!(turns(Mode::Words, &file).network(), None);
        assert!(Turns::default().validate().is_ok());
    }
}
