//! The configuration: TOML, then the environment (`ANTIPHON_SECTION__KEY`), then checks across sections.
//!
//! Each part defines its own section; this module composes them and is the one reader of the environment.
//! Loading has no side effects: nothing is bound, downloaded or created.
//!
//! # Why
//! A layered configuration crate would merge file and environment before the types see them and so lose the
//! line of a mistake. Here the file alone is read first, errors keep their line, and each variable is applied
//! and checked by itself, so that a bad one is named.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use serde::Deserialize;

use self::explain::{explain, located, place};
use crate::agent::config::Agent;
use crate::gateway::webhooks::Webhook;
use crate::recording::Mode;
use crate::server::config::Http;
use crate::synth::cosyvoice::backend::{LanguageModel, MemoryLimit};
use crate::synth::device::remote::config::Cluster;
use crate::telemetry::Log;
use crate::text::Entries;

/// The JSON schema of the configuration (draft 2020-12). Tests keep it equal to the types.
pub const SCHEMA: &str = include_str!("../../config/schema.json");

/// Prefix of variables that override keys.
const PREFIX: &str = "ANTIPHON_";

/// Everything that can be set. Defaults run a demo on loopback.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Config {
    /// HTTP and WebSocket.
    pub http: Http,
    /// Browser calls.
    pub webrtc: crate::webrtc::WebRtcConfig,
    /// Telephone calls.
    pub sip: crate::sip::SipConfig,
    /// Ports of telephone media.
    pub rtp: crate::sip::RtpConfig,
    /// How calls behave.
    pub call: crate::call::CallConfig,
    /// What recognises callers.
    pub recognizer: crate::hear::Recognizer,
    /// When a caller has finished.
    pub turns: crate::hear::Turns,
    /// Voices.
    pub engine: Engine,
    /// How live and batch work share a device.
    pub scheduler: crate::sched::Config,
    /// Batch work.
    pub batch: crate::batch::Config,
    /// Records of calls.
    pub records: crate::records::Config,
    /// Sound of calls.
    pub recording: crate::recording::Config,
    /// Agents by name: they supply the text of calls.
    pub agent: BTreeMap<String, Agent>,
    /// Words that are said otherwise than they are written, for all texts.
    pub lexicon: crate::agent::config::Words,
    /// Other machines of this gateway.
    pub cluster: Cluster,
    /// Customers by name: who they are, what they may use and how much.
    pub tenant: BTreeMap<String, Tenant>,
    /// Who is told of what happens on calls, by name.
    pub webhook: BTreeMap<String, Webhook>,
    /// The folder of voices and jobs.
    pub state: State,
    /// Logs and traces.
    pub log: Log,
    /// Where all this was read.
    #[serde(skip)]
    pub source: Source,
}

/// `[state]`
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct State {
    /// The folder of voices, of the databases of jobs and records and of the audio of jobs, unless these have paths of their own,
    /// and of what `[http.acme]` keeps; empty: `$XDG_STATE_HOME/antiphon`, or `~/.local/state/antiphon`.
    pub dir: PathBuf,
}

/// `[engine]`
#[derive(Clone, Debug, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Engine {
    /// Which voice: `auto` takes CosyVoice3 where there is a model, else `espeak`, else `tone`.
    pub kind: EngineKind,
    /// Checkpoint directory of CosyVoice3.
    pub model: Option<PathBuf>,
    /// Which of the checkpoint's language models speaks: `llm` or `llm.rl`.
    pub llm: String,
    /// Where voice files live; empty: `voices` in the state directory.
    pub voices: PathBuf,
    /// Name of the voice when a turn names none.
    pub voice: Option<String>,
    /// `auto`, `cuda:N`, `cuda:all` or `cpu`.
    pub device: String,
    /// Working precision on the GPU: `auto`, `bf16`, `f32`.
    pub dtype: String,
    /// How the last chunk of an utterance is solved: `causal` or `reference`.
    pub final_chunk: String,
    /// How much of a GPU's memory is used; `None`: what is free.
    pub memory: Option<String>,
    /// Folder of compiled kernels and of what was found fastest; empty: `kernels` in the state directory.
    pub cache: PathBuf,
    /// Architecture that GPU kernels are compiled for, for measuring; `None`: the device's own.
    pub arch: Option<String>,
    /// Workers on other machines, `host:port`; what they speak with comes before the voice of this machine.
    pub workers: Vec<String>,
    /// Shared memory of a block in KiB, for measuring; `None`: what the device has.
    pub shared_kib: Option<u32>,
    /// Whether a text, voice and seed give the same bits whatever else the GPU speaks meanwhile; costs speed.
    pub invariant: bool,
    /// How the flow keeps keys and values on a GPU: `full` (as they are computed) or `int8`.
    pub kv: String,
    /// What wide steps of the flow multiply on a GPU: `full` (16 bits) or `fp8`.
    pub products: String,
    /// How loud voices are, LUFS; 0: as they are.
    pub loudness: f32,
    /// What is kept of what was spoken.
    pub phrases: crate::synth::device::phrases::Config,
    /// Speech tokens of each text id, for measuring with random weights, which never end by themselves; `None`: the
    /// model decides.
    pub tokens_per_id: Option<f64>,
}

impl Default for Engine {
    fn default() -> Self {
        Self {
            kind: EngineKind::Auto,
            model: None,
            llm: "llm".into(),
            voices: PathBuf::new(),
            voice: None,
            device: "auto".into(),
            dtype: "auto".into(),
            final_chunk: "causal".into(),
            memory: None,
            cache: PathBuf::new(),
            arch: None,
            workers: Vec::new(),
            shared_kib: None,
            invariant: false,
            kv: "full".into(),
            products: "full".into(),
            loudness: -22.0,
            phrases: Default::default(),
            tokens_per_id: None,
        }
    }
}

/// Which voice speaks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum EngineKind {
    /// The best there is.
    #[default]
    Auto,
    /// The neural voice.
    #[value(name = "cosyvoice3")]
    Cosyvoice3,
    /// The `espeak-ng` program.
    Espeak,
    /// An audible placeholder.
    Tone,
}

/// Why a configuration cannot be used. The text says where and what to change.
#[derive(Debug, thiserror::Error)]
#[error("{origin}: {message}")]
pub struct ConfigError {
    /// File, line and column, or the environment variable.
    pub origin: String,
    /// What is wrong and what to change.
    pub message: String,
}

/// Reads `bytes` as a configuration; for fuzzing.
pub fn fuzz(bytes: &[u8]) {
    let part = folder::Part { origin: "fuzz".to_owned(), text: String::from_utf8_lossy(bytes).into_owned() };
    let _ = Config::of(&[part], None, []);
}

impl Config {
    /// Reads `file` (or only defaults; of a folder every `*.toml` in it, by name), applies `variables` and checks the whole.
    ///
    /// # Errors
    /// The first mistake, with its place.
    pub fn load(
        file: Option<&Path>,
        variables: impl IntoIterator<Item = (String, String)>,
    ) -> Result<Self, ConfigError> {
        Self::of(&folder::read(file)?, file, variables)
    }

    fn of(
        parts: &[folder::Part],
        file: Option<&Path>,
        variables: impl IntoIterator<Item = (String, String)>,
    ) -> Result<Self, ConfigError> {
        let (mut config, mut table) = (Config::default(), toml::Table::new());
        for part in parts {
            let (origin, text) = (&part.origin, &part.text);
            config = toml::from_str(text).map_err(|e| located(origin, text, &e))?;
            let inner: toml::Table = text.parse().map_err(|e| located(origin, text, &e))?;
            folder::merge(&mut table, inner, "").map_err(|message| {
                let message = format!("{message}, which another file of the folder sets, too; remove one");
                ConfigError { origin: place(origin, text, &message), message }
            })?;
        }
        if parts.len() > 1 {
            // Each was right by itself; what only the whole can tell is named without a line.
            let whole =
                |error: toml::de::Error| ConfigError { origin: part_of(parts), message: explain(error.message()) };
            config = table.clone().try_into().map_err(whole)?;
        }
        let mut variables: Vec<_> = variables.into_iter().collect();
        variables.sort();
        // One may only make sense beside the next, as the address and the certificate of TLS do: the first that leaves a mistake
        // is told of when all are there, with what is wrong then.
        let mut mistake: Option<ConfigError> = None;
        for (name, value) in variables {
            let Some(path) = name.strip_prefix(PREFIX).filter(|rest| rest.contains("__")) else { continue };
            let at = |message: String| ConfigError { origin: format!("environment variable `{name}`"), message };
            let keys: Vec<String> = path.split("__").map(str::to_lowercase).collect();
            apply(&mut table, &keys, parse_value(&value)).map_err(at)?;
            // Secrets make the types fit for reading only, so the table is read anew for each variable.
            match table.clone().try_into() {
                Ok(read) => (config, mistake) = (read, None),
                Err(error) => {
                    let now = at(explain(error.message()));
                    let origin = mistake.map_or(now.origin, |first| first.origin);
                    mistake = Some(ConfigError { origin, message: now.message });
                }
            }
        }
        if let Some(mistake) = mistake {
            return Err(mistake);
        }
        config.source = Source::new(file.map(Path::to_path_buf), &table);
        follow(&table, &mut config.sip);
        let at = |message: String| {
            let found = parts.iter().map(|part| place(&part.origin, &part.text, &message));
            // Where a line was found, that place; else the whole.
            let origin = found.zip(parts).find(|(found, part)| *found != part.origin).map(|(found, _)| found);
            ConfigError { origin: origin.unwrap_or_else(|| part_of(parts)), message }
        };
        config.settle_tenants().map_err(at)?;
        config.settle_lexicons().map_err(at)?;
        config.validate().map_err(at)?;
        Ok(config)
    }

    /// Whether somebody who was given nothing could use the gateway from another host. Commands that do not
    /// serve need not ask.
    ///
    /// # Errors
    /// It is reachable and open; the key that closes it.
    pub fn check_exposure(&self) -> Result<(), ConfigError> {
        let exposed = |address: SocketAddr| !address.ip().to_canonical().is_loopback();
        let refuse = |origin: &str, message: String| Err(ConfigError { origin: origin.into(), message });
        let bind = self.http.bind;
        if exposed(bind) && self.http.tokens.is_empty() {
            let why = format!(
                "is empty, and [http] bind = \"{bind}\" is reached by other hosts: set a token, or bind to loopback"
            );
            return refuse("[http] tokens", why);
        }
        let sip = &self.sip;
        let open = sip.listeners().into_iter().find_map(|(key, address)| Some((key, address.filter(|a| exposed(*a))?)));
        if let Some((key, address)) = open.filter(|_| sip.allow.is_empty() && sip.users.is_empty()) {
            let why = format!(
                "is empty, and so is `users`, while [sip] {key} is at {address}: anybody could call. Name the networks that \
                 may (your trunk's), or set users; allow = [\"0.0.0.0/0\", \"::/0\"] says that everybody may"
            );
            return refuse("[sip] allow", why);
        }
        Ok(())
    }

    /// Reads the files of lexicons and makes one for each agent.
    fn settle_lexicons(&mut self) -> Result<(), String> {
        let wrong = |error: String| format!("[lexicon] {error}");
        let general = self.lexicon.load().map_err(wrong)?;
        self.lexicon.settle(&general, &Entries::new()).map_err(wrong)?;
        for (name, agent) in &mut self.agent {
            let wrong = |error: String| format!("[agent.{name}.lexicon] {error}");
            let own = agent.lexicon.load().map_err(wrong)?;
            agent.lexicon.settle(&general, &own).map_err(wrong)?;
        }
        Ok(())
    }

    /// What is wrong across keys, with the section and key that it is told of.
    pub(crate) fn validate(&self) -> Result<(), String> {
        for (name, agent) in &self.agent {
            agent.validate().map_err(|error| format!("[agent.{name}] {error}"))?;
        }
        self.http.validate().map_err(|e| format!("[http] {e}"))?;
        self.sip.validate().map_err(|e| format!("[sip] {e}"))?;
        self.rtp.validate().map_err(|e| format!("[rtp] {e}"))?;
        self.call.validate()?;
        self.batch.validate().map_err(|e| format!("[batch] {e}"))?;
        self.records.validate().map_err(|e| format!("[records] {e}"))?;
        self.recording.validate().map_err(|e| format!("[recording] {e}"))?;
        for (name, hook) in &self.webhook {
            hook.validate().map_err(|e| format!("[webhook.{name}] {e}"))?;
            // Those of [tenant] are among the tokens, too, if they have any.
            let known = |tenant: &String| {
                self.tenant.contains_key(tenant) || self.http.tokens.iter().any(|token| token.name == *tenant)
            };
            if let Some(tenant) = hook.tenant.as_ref().filter(|tenant| !known(tenant)) {
                return Err(format!(
                    "[webhook.{name}] tenant: there is no [tenant.{tenant}] and no token of that name"
                ));
            }
        }
        self.recognizer.validate().map_err(|e| format!("[recognizer] {e}"))?;
        self.turns.validate().map_err(|e| format!("[turns] {e}"))?;
        self.scheduler.validate().map_err(|e| format!("[scheduler] {e}"))?;
        self.log.validate().map_err(|e| format!("[log] {e}"))?;
        if let Some(Err(error)) = self.engine.memory.as_deref().map(str::parse::<MemoryLimit>) {
            return Err(format!("[engine] memory: {error}"));
        }
        if !(-40.0..=-10.0).contains(&self.engine.loudness) && self.engine.loudness != 0.0 {
            return Err(format!("[engine] loudness = {}: expected -40 to -10 LUFS, or 0", self.engine.loudness));
        }
        if self.engine.kind == EngineKind::Cosyvoice3 && self.engine.model.is_none() {
            return Err("[engine] kind = \"cosyvoice3\" needs `model`, the checkpoint directory, for example the one that `antiphon model pull` fetches".into());
        }
        self.engine.llm.parse::<LanguageModel>().map_err(|e| format!("[engine] llm: {e}"))?;
        self.cluster.validate().map_err(|e| format!("[cluster] {e}"))?;
        for worker in &self.engine.workers {
            self.cluster.check(worker).map_err(|e| format!("[engine] workers: {e}"))?;
        }
        let device = &self.engine.device;
        let cuda = device.strip_prefix("cuda:").is_some_and(|n| n == "all" || n.parse::<u32>().is_ok());
        if !(cuda || device == "auto" || device == "cpu") {
            return Err(format!(
                "[engine] device `{device}`: expected auto, cpu, cuda:N or cuda:all, for example cuda:0"
            ));
        }
        if !matches!(self.engine.kv.as_str(), "full" | "int8") {
            return Err(format!("[engine] kv `{}`: expected full or int8", self.engine.kv));
        }
        if self.engine.kv == "int8" && self.engine.dtype == "f32" {
            return Err("[engine] kv = \"int8\" needs 16 bits: say dtype = \"auto\", or kv = \"full\"".into());
        }
        if !matches!(self.engine.products.as_str(), "full" | "fp8") {
            return Err(format!("[engine] products `{}`: expected full or fp8", self.engine.products));
        }
        if self.engine.products == "fp8" && self.engine.dtype == "f32" {
            return Err(
                "[engine] products = \"fp8\" needs 16 bits: say dtype = \"auto\", or products = \"full\"".into()
            );
        }
        if self.engine.products == "fp8" && self.engine.invariant {
            return Err(
                "[engine] products = \"fp8\" cannot be invariant: say invariant = false, or products = \"full\"".into(),
            );
        }
        if !matches!(self.engine.dtype.as_str(), "auto" | "bf16" | "f32") {
            return Err(format!("[engine] dtype `{}`: expected auto, bf16 or f32", self.engine.dtype));
        }
        if !matches!(self.engine.final_chunk.as_str(), "causal" | "reference") {
            return Err(format!("[engine] final_chunk `{}`: expected causal or reference", self.engine.final_chunk));
        }
        Ok(())
    }
}

impl Config {
    /// Puts what has no path of its own below the state directory: `[state] dir`, else `antiphon` below
    /// `XDG_STATE_HOME`, else below `~/.local/state`. Explicit paths stay as they are.
    ///
    /// # Errors
    /// A path is needed, and neither the configuration nor `variables` say where the state directory is.
    pub fn with_state_dir(
        mut self,
        variables: impl IntoIterator<Item = (String, String)>,
    ) -> Result<Self, ConfigError> {
        let paths = [&self.batch.audio_dir, &self.engine.voices];
        let databases = [&self.batch.database, &self.records.database];
        // Where nothing is recorded no place is needed, and account and certificate have no path of their own.
        let recordings = (self.recording.mode != Mode::Off).then_some(&self.recording.dir);
        let placed = paths.into_iter().chain(recordings).all(|path| !path.as_os_str().is_empty());
        // Records wait for a database on disk.
        let spooled = !self.records.database.is_shared() || !self.records.spool.as_os_str().is_empty();
        let placed = placed && spooled && databases.iter().all(|database| !database.is_unset());
        let placed = placed && (self.http.acme.is_none() || !self.state.dir.as_os_str().is_empty());
        if placed {
            return Ok(self);
        }
        let dir = match self.state.dir.as_os_str().is_empty() {
            false => self.state.dir.clone(),
            true => state_home(variables).ok_or_else(|| ConfigError {
                origin: "[state] dir".into(),
                message: "is not set, and neither XDG_STATE_HOME nor HOME says where to keep voices and jobs; set it"
                    .into(),
            })?,
        };
        let databases = [(&mut self.batch.database, "batch.sqlite"), (&mut self.records.database, "records.sqlite")];
        for (database, name) in databases {
            if database.is_unset() {
                *database = dir.join(name).into();
            }
        }
        let paths = [
            (&mut self.batch.audio_dir, "batch"),
            (&mut self.engine.voices, "voices"),
            (&mut self.records.spool, "records.spool"),
            (&mut self.recording.dir, "recordings"),
            (&mut self.engine.cache, "kernels"),
            (&mut self.engine.phrases.dir, "phrases"),
        ];
        for (path, name) in paths {
            if path.as_os_str().is_empty() {
                *path = dir.join(name);
            }
        }
        self.state.dir = dir;
        Ok(self)
    }
}

/// The state directory by the XDG Base Directory Specification, which has relative paths ignored.
fn state_home(variables: impl IntoIterator<Item = (String, String)>) -> Option<PathBuf> {
    let (mut state, mut home) = (None, None);
    for (name, value) in variables {
        let path = Some(PathBuf::from(value)).filter(|path| path.is_absolute());
        match name.as_str() {
            "XDG_STATE_HOME" => state = path,
            "HOME" => home = path,
            _ => {}
        }
    }
    Some(state.or_else(|| Some(home?.join(".local/state")))?.join("antiphon"))
}

/// The variables of this process, for [`Config::load`].
pub fn variables() -> impl Iterator<Item = (String, String)> {
    std::env::vars_os().filter_map(|(name, value)| Some((name.into_string().ok()?, value.into_string().ok()?)))
}

/// Another model hub than the public one: `HF_ENDPOINT`, as every client of such hubs reads it.
pub fn hub_endpoint() -> Option<String> {
    variables().find(|(name, _)| name == "HF_ENDPOINT").map(|(_, value)| value).filter(|value| !value.is_empty())
}

/// What a mistake of the whole is told of.
fn part_of(parts: &[folder::Part]) -> String {
    let origins: Vec<&str> = parts.iter().map(|part| part.origin.as_str()).collect();
    if origins.is_empty() { "defaults".to_owned() } else { origins.join(", ") }
}

/// A variable's value as TOML where it is TOML (numbers, booleans, arrays), else as a string.
fn parse_value(value: &str) -> toml::Value {
    #[derive(Deserialize)]
    struct Wrapped {
        v: toml::Value,
    }
    match toml::from_str::<Wrapped>(&format!("v = {value}")) {
        Ok(wrapped) => wrapped.v,
        Err(_) => toml::Value::String(value.to_owned()),
    }
}

/// One of `[sip] udp` and `tcp` takes the other along: a telephone that finds a message too long for UDP goes on at
/// the same address over TCP (RFC 3261 section 18.1.1). Closing one closes only that one.
fn follow(table: &toml::Table, sip: &mut crate::sip::SipConfig) {
    let is_set = |key: &str| table.get("sip").and_then(|sip| sip.get(key)).is_some();
    match (is_set("udp"), is_set("tcp")) {
        (true, false) if sip.udp.is_some() => sip.tcp = sip.udp,
        (false, true) if sip.tcp.is_some() => sip.udp = sip.tcp,
        _ => {}
    }
}

fn apply(table: &mut toml::Table, keys: &[String], value: toml::Value) -> Result<(), String> {
    match keys {
        [] => Ok(()),
        [last] => {
            table.insert(last.clone(), value);
            Ok(())
        }
        [first, rest @ ..] => {
            match table.entry(first.clone()).or_insert_with(|| toml::Value::Table(toml::Table::new())) {
                toml::Value::Table(inner) => apply(inner, rest, value),
                _ => Err(format!("`{first}` is not a section")),
            }
        }
    }
}

mod explain;
mod folder;
mod in_force;
mod source;
mod tenant;

pub use source::Source;
pub use tenant::Tenant;

#[cfg(test)]
mod schema_tests;
#[cfg(test)]
mod tests;
