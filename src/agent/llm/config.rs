//! `[agent.NAME] llm`: where the model is, what it is told, what it may do.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use reqwest::Url;
use serde::Deserialize;
use serde_json::{Map, Value};

use super::tools::{self, HttpTool};
use super::web;
use crate::host;
use crate::secret::Secret;

/// `llm` of an agent.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Llm {
    /// The API up to `/chat/completions`, such as `http://127.0.0.1:8000/v1`.
    pub base_url: String,
    /// The model's name there.
    pub model: String,
    /// Sent as `Authorization: Bearer`.
    pub api_key: Option<Secret>,
    /// Further headers of the request.
    #[serde(default)]
    pub headers: BTreeMap<String, Secret>,
    /// What the model is told first.
    #[serde(default)]
    pub system: String,
    /// 0 to 2; absent: the server's default.
    pub temperature: Option<f32>,
    /// Most tokens of an answer; absent: the server's default.
    pub max_tokens: Option<u32>,
    /// Further fields of the request, as the server knows them.
    #[serde(default)]
    pub extra: Map<String, Value>,
    /// Spoken when the call begins; it is the first thing in the history. Absent: `greeting` of the agent.
    pub greeting: Option<String>,
    /// What the model may do.
    #[serde(default)]
    pub tools: Vec<Tool>,
    /// Where `transfer` may lead: a name that the model sees, and a SIP URI or number.
    #[serde(default)]
    pub transfer_to: BTreeMap<String, String>,
    /// Spoken while a tool takes longer than `filler_after_ms`; empty: silence.
    #[serde(default = "default_filler")]
    pub filler: String,
    /// How long a tool may take before `filler` is spoken.
    #[serde(default = "default_filler_after_ms")]
    pub filler_after_ms: u64,
    /// Spoken when there is no answer; the call goes on. Empty: silence.
    #[serde(default = "default_apology")]
    pub apology: String,
    /// So many answers in a row that fail end the call as a lost agent does.
    #[serde(default = "default_max_failures")]
    pub max_failures: u32,
    /// How often a request that fails before anything was said is sent again.
    #[serde(default = "default_retries")]
    pub retries: u32,
    /// Longest wait for the first word, and for the next one.
    #[serde(default = "default_first_token_ms")]
    pub first_token_ms: u64,
    /// Longest time that one answer may take to be written.
    #[serde(default = "default_answer_s")]
    pub answer_s: u64,
    /// Most characters of an answer that are spoken.
    #[serde(default = "default_max_answer_chars")]
    pub max_answer_chars: usize,
    /// Most bytes of history that are sent, besides `system`; a token has about four.
    #[serde(default = "default_max_history_chars")]
    pub max_history_chars: usize,
    /// After this pause the keys that the caller pressed are one message; `#` ends it at once.
    #[serde(default = "default_dtmf_pause_ms")]
    pub dtmf_pause_ms: u64,
    /// Ask the server to count tokens (`stream_options.include_usage`).
    #[serde(default = "default_usage")]
    pub usage: bool,
    /// Ask when the caller has probably finished, and make the answer, which leaves when that is certain. A caller who goes
    /// on costs a request whose answer is not heard.
    #[serde(default = "default_speculate")]
    pub speculate: bool,
    /// What a million tokens cost, for `antiphon_llm_cost_micros_total`.
    #[serde(default)]
    pub prices: Prices,
}

/// Prices of a million tokens, in any currency.
#[derive(Clone, Copy, Debug, Default, PartialEq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Prices {
    /// Of the prompt.
    pub input: f64,
    /// Of the answer.
    pub output: f64,
}

/// Something that the model may do.
#[derive(Clone, Debug, PartialEq)]
pub enum Tool {
    /// Something of the call.
    Builtin(Builtin),
    /// An HTTP request.
    Http(Box<HttpTool>),
}

impl<'de> Deserialize<'de> for Tool {
    /// A word is a built-in tool, a table an HTTP one; apart, so that a mistake in the table is named.
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        use serde::de::Error;
        match Value::deserialize(deserializer)? {
            Value::Object(table) => serde_json::from_value(Value::Object(table))
                .map(|http| Tool::Http(Box::new(http)))
                .map_err(D::Error::custom),
            word => serde_json::from_value(word).map(Tool::Builtin).map_err(|_| {
                D::Error::custom(
                    "a tool is \"transfer\", \"hang_up\", \"send_digits\" or { name, description, url, ... }",
                )
            }),
        }
    }
}

/// What can be done with the call.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Builtin {
    /// Hand the caller over to one of `transfer_to`.
    Transfer,
    /// End the call when everything was said.
    HangUp,
    /// Press keys.
    SendDigits,
}

fn default_filler() -> String {
    "One moment, please.".into()
}
fn default_filler_after_ms() -> u64 {
    700
}
fn default_apology() -> String {
    "Sorry, I have no answer just now. Could you say that again?".into()
}
fn default_max_failures() -> u32 {
    3
}
fn default_retries() -> u32 {
    2
}
fn default_first_token_ms() -> u64 {
    8_000
}
fn default_answer_s() -> u64 {
    60
}
fn default_max_answer_chars() -> usize {
    4_000
}
fn default_max_history_chars() -> usize {
    24_000
}
fn default_dtmf_pause_ms() -> u64 {
    1_500
}
fn default_usage() -> bool {
    true
}
fn default_speculate() -> bool {
    true
}

impl Llm {
    /// A model with defaults.
    pub fn at(base_url: &str, model: &str) -> Self {
        Self {
            base_url: base_url.into(),
            model: model.into(),
            api_key: None,
            headers: BTreeMap::new(),
            system: String::new(),
            temperature: None,
            max_tokens: None,
            extra: Map::new(),
            greeting: None,
            tools: Vec::new(),
            transfer_to: BTreeMap::new(),
            filler: default_filler(),
            filler_after_ms: default_filler_after_ms(),
            apology: default_apology(),
            max_failures: default_max_failures(),
            retries: default_retries(),
            first_token_ms: default_first_token_ms(),
            answer_s: default_answer_s(),
            max_answer_chars: default_max_answer_chars(),
            max_history_chars: default_max_history_chars(),
            dtmf_pause_ms: default_dtmf_pause_ms(),
            usage: default_usage(),
            speculate: default_speculate(),
            prices: Prices::default(),
        }
    }

    /// Where requests go.
    ///
    /// # Errors
    /// `base_url` is none.
    pub fn endpoint(&self) -> Result<Url, String> {
        let text = format!("{}/chat/completions", self.base_url.trim_end_matches('/'));
        let url = Url::parse(&text).map_err(|error| format!("base_url `{}`: {error}", self.base_url))?;
        if !matches!(url.scheme(), "http" | "https") || url.host_str().is_none() {
            return Err(format!("base_url `{}`: expected http://... or https://...", self.base_url));
        }
        host::of(&url).map_err(|error| format!("base_url `{}`: {error}", self.base_url))?;
        Ok(url)
    }

    /// Longest wait for the next word.
    pub fn patience(&self) -> Duration {
        Duration::from_millis(self.first_token_ms)
    }

    /// Checks what the types cannot say.
    ///
    /// # Errors
    /// The key and what it must be.
    pub fn validate(&self) -> Result<(), String> {
        let url = self.endpoint()?;
        if self.base_url.trim_end_matches('/').ends_with("/chat/completions") || url.query().is_some() {
            return Err(format!(
                "base_url `{}`: leave out /chat/completions and any query; it usually ends in /v1",
                self.base_url
            ));
        }
        if self.model.trim().is_empty() {
            return Err("model is empty: name the model as the server does".into());
        }
        if let Some(t) = self.temperature.filter(|t| !(0.0..=2.0).contains(t)) {
            return Err(format!("temperature = {t}: expected 0 to 2"));
        }
        for (key, is_zero) in [
            ("first_token_ms", self.first_token_ms == 0),
            ("answer_s", self.answer_s == 0),
            ("max_answer_chars", self.max_answer_chars == 0),
            ("max_history_chars", self.max_history_chars == 0),
            ("max_failures", self.max_failures == 0),
        ] {
            if is_zero {
                return Err(format!("{key} = 0: expected 1 or more"));
            }
        }
        if [self.prices.input, self.prices.output].iter().any(|price| !price.is_finite() || *price < 0.0) {
            return Err("prices: expected numbers from 0".into());
        }
        for (name, value) in &self.headers {
            web::header(name, value).map_err(|error| format!("headers: {error}"))?;
        }
        if let Some(key) = &self.api_key {
            web::header("authorization", key).map_err(|_| "api_key has characters that no header may have")?;
        }
        for reserved in ["model", "messages", "stream", "tools"] {
            if self.extra.contains_key(reserved) {
                return Err(format!("extra: `{reserved}` is the gateway's own"));
            }
        }
        let mut names = BTreeSet::new();
        for tool in &self.tools {
            let name = match tool {
                Tool::Builtin(builtin) => builtin.name(),
                Tool::Http(http) => {
                    tools::validate(http).map_err(|error| format!("tool `{}`: {error}", http.name))?;
                    http.name.as_str()
                }
            };
            if !names.insert(name) {
                return Err(format!("tools: `{name}` is there twice"));
            }
        }
        let transfers = self.tools.contains(&Tool::Builtin(Builtin::Transfer));
        if transfers && self.transfer_to.is_empty() {
            return Err("tools has \"transfer\": say where with transfer_to = { NAME = \"sip:...\" }".into());
        }
        if !transfers && !self.transfer_to.is_empty() {
            return Err("transfer_to has no effect: add \"transfer\" to tools".into());
        }
        if let Some((name, _)) = self.transfer_to.iter().find(|(_, to)| to.trim().is_empty()) {
            return Err(format!("transfer_to.{name} is empty: expected a SIP URI or number"));
        }
        Ok(())
    }
}

impl Builtin {
    /// What the model calls it.
    pub fn name(self) -> &'static str {
        match self {
            Builtin::Transfer => "transfer",
            Builtin::HangUp => "hang_up",
            Builtin::SendDigits => "send_digits",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Result<Llm, String> {
        let llm: Llm = toml::from_str(text).map_err(|error| error.message().to_owned())?;
        llm.validate().map(|()| llm)
    }

    const PLAIN: &str = "base_url = \"http://127.0.0.1:8000/v1/\"\nmodel = \"m\"\n";

    #[test]
    fn an_address_and_a_model_are_enough() {
        let llm = read(PLAIN).expect("valid");
        assert_eq!(llm.endpoint().expect("a URL").as_str(), "http://127.0.0.1:8000/v1/chat/completions");
        assert_eq!(format!("{llm:?}"), format!("{:?}", Llm::at("http://127.0.0.1:8000/v1/", "m")));
    }

    #[test]
    fn everything_can_be_set_and_the_key_never_shows() {
        let llm = read(&format!(
            "{PLAIN}api_key = \"sk-1\"\nsystem = \"s\"\ntemperature = 0.2\nextra = {{ top_p = 0.9 }}
            prices = {{ input = 0.15, output = 0.6 }}
            tools = [\"transfer\", \"hang_up\", {{ name = \"track\", description = \"d\",
              url = \"https://api.example.com/parcels/{{id}}\",
              parameters = {{ type = \"object\", properties = {{ id = {{ type = \"string\" }} }}, required = [\"id\"] }} }}]
            transfer_to = {{ desk = \"sip:desk@pbx.example.com\" }}"
        ))
        .expect("valid");
        assert_eq!(llm.tools.len(), 3);
        assert!(!format!("{llm:?}").contains("sk-1"));
    }

    #[test]
    fn mistakes_say_what_to_change() {
        for (more, why) in [
            ("temperature = 3.0", "0 to 2"),
            ("tools = [\"transfer\"]", "transfer_to"),
            ("transfer_to = { a = \"sip:a@b\" }", "add \"transfer\""),
            ("tools = [\"hang_up\", \"hang_up\"]", "twice"),
            ("tools = [\"fly\"]", "send_digits"),
            ("extra = { stream = false }", "the gateway's own"),
            ("headers = { \"bad header\" = \"x\" }", "bad header"),
            ("first_token_ms = 0", "first_token_ms"),
            ("modle = \"x\"", "unknown field"),
            ("tools = [{ name = \"a\", url = \"https://x\", descripton = \"\" }]", "description"),
            ("tools = [{ name = \"a\", description = \"d\", url = \"http://10.0.0.1/\" }]", "allow_private"),
            (
                "tools = [{ name = \"a\", description = \"d\", url = \"https://a..b/{id}\", parameters = { type = \"object\", properties = { id = {} } } }]",
                "two dots",
            ),
            ("prices = { input = -1.0 }", "prices"),
        ] {
            let error = read(&format!("{PLAIN}{more}\n")).expect_err(more);
            assert!(error.contains(why), "{more}: {error}");
        }
        for url in ["ftp://x", "localhost:8000", "http://x/v1/chat/completions", ""] {
            assert!(read(&format!("base_url = \"{url}\"\nmodel = \"m\"")).is_err(), "{url}");
        }
    }
}
