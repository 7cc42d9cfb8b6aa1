//! A changed configuration taken up without dropping a call: by SIGHUP and by `POST /v1/admin/reload`.
//!
//! The file is read and checked whole before anything of it counts, so that a mistake changes nothing. What takes
//! effect at once are the sections and keys of [`APPLIED`]; every other key that changed is named, and waits for a
//! restart.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

use serde::Serialize;
use tokio::sync::watch;

use super::descriptors;
use crate::agent::Agents;
use crate::config::{self, Config, ConfigError, Source};
use crate::gateway::Gateway;
use crate::gateway::tenants::Tenants;
use crate::gateway::webhooks::Webhooks;
use crate::sched;
use crate::server::{self, Policies};
use crate::sip::{Endpoint, SipError};
use crate::telemetry;
use crate::turn::Utterance;

/// Keys, and sections with a dot after them, that a running gateway takes up.
const APPLIED: [&str; 8] =
    ["http.tokens", "http.hosts", "http.cors", "log.level", "agent.", "lexicon.", "tenant.", "webhook."];

/// The same where the gateway runs that they are about.
const STEERED: [&str; 19] = [
    "batch.keep_days",
    "call.max_calls",
    "recording.keep_days",
    "records.keep_days",
    "scheduler.tenant_default",
    "scheduler.tenants",
    "sip.allow",
    "sip.codecs",
    "sip.half_open_per_source",
    "sip.max_calls",
    "sip.media_timeout_s",
    "sip.messages_per_second",
    "sip.outbound",
    "sip.refer",
    "sip.ring_timeout_s",
    "sip.session_expires_s",
    "sip.trunk",
    "sip.users",
    "webrtc.ice_servers",
];

/// What a reload did.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Report {
    /// Keys that changed and count from now on.
    pub applied: BTreeSet<String>,
    /// Keys that changed and count after a restart.
    pub needs_restart: BTreeSet<String>,
}

/// The configuration in force, and those who follow it.
pub struct Reloader {
    file: Option<PathBuf>,
    /// What is in force: what waits for a restart is as it was.
    read: Mutex<Source>,
    policies: Policies,
    agents: Agents,
    tenants: Tenants,
    /// Who has the phrases of the configuration spoken.
    phrases: Option<watch::Sender<Arc<[Utterance]>>>,
    /// Who is told of events.
    webhooks: Option<Webhooks>,
    /// Whose limits, trunks and accounts are followed, where it runs.
    gateway: Option<Gateway>,
    /// What schedulers hold tenants to since the start, where nobody tells them of others.
    shares: BTreeMap<String, sched::Tenant>,
    /// Trunks that were to register at the start: nodes of a cluster hold leases of these.
    registering: BTreeSet<String>,
    /// `[log] level` in force.
    level: Mutex<String>,
}

impl Reloader {
    /// Follows the file that `config` was read from.
    pub fn new(config: &Config, policies: Policies, agents: Agents, tenants: Tenants) -> Self {
        let (file, read) = (config.source.file.clone(), Mutex::new(config.source.clone()));
        Self {
            file,
            read,
            policies,
            agents,
            tenants,
            phrases: None,
            webhooks: None,
            gateway: None,
            shares: config.scheduler.tenants.clone(),
            registering: registering(config),
            level: Mutex::new(config.log.level.clone()),
        }
    }

    /// Has `phrases` told which texts of the configuration will be said, and `webhooks` who wants events.
    pub fn telling(self, phrases: watch::Sender<Arc<[Utterance]>>, webhooks: Webhooks) -> Self {
        Self { phrases: Some(phrases), webhooks: Some(webhooks), ..self }
    }

    /// Has `gateway` follow, too.
    pub fn steering(self, gateway: Gateway) -> Self {
        Self { gateway: Some(gateway), ..self }
    }

    /// `[log] level` in force.
    pub fn log_level(&self) -> String {
        self.level.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Reads the file again and takes up what can change.
    ///
    /// # Errors
    /// The first mistake, with its place; then nothing has changed.
    pub fn reload(&self) -> Result<Report, ConfigError> {
        let mut config = Config::load(self.file.as_deref(), config::variables())?;
        config.check_exposure()?;
        if self.gateway.is_some() {
            let wrong = |error: SipError| ConfigError { origin: "[sip]".into(), message: error.to_string() };
            Endpoint::check_settings(&config.sip).map_err(wrong)?;
            if let Some(files) = descriptors::raise() {
                descriptors::fit(&mut config, files).iter().for_each(|line| tracing::warn!("{line}"));
            }
        }
        let mut read = self.read.lock().unwrap_or_else(PoisonError::into_inner);
        let mut report = report(read.changes(&config.source), self.gateway.as_ref());
        match &self.gateway {
            Some(gateway) => {
                report.needs_restart.extend(steer(gateway, &config));
                let new = registering(&config).into_iter().filter(|name| !self.registering.contains(name));
                let waits = new.filter(|_| gateway.nodes.is_some()).map(|name| format!("sip.trunk `{name}` register"));
                report.needs_restart.extend(waits);
            }
            None => {
                // Also of tenants that are not there any more.
                let names: BTreeSet<&String> = config.tenant.keys().chain(self.shares.keys()).collect();
                let changed = |name: &&String| self.shares.get(*name) != config.scheduler.tenants.get(*name);
                let waits = names.into_iter().filter(changed);
                let key = |name| format!("tenant.{name}.{{share, limits.streams, limits.chars_per_minute}}");
                report.needs_restart.extend(waits.map(key));
            }
        }
        self.policies.replace(&config.http);
        self.tenants.replace(config.tenant_rules());
        if let Some(phrases) = &self.phrases {
            phrases.send_replace(super::phrases::of(&config));
        }
        if let Some(webhooks) = &self.webhooks {
            webhooks.replace(&config.webhook);
        }
        self.agents.read_with(config.lexicon.said);
        self.agents.replace(config.agent);
        telemetry::set_level(&config.log.level);
        *self.level.lock().unwrap_or_else(PoisonError::into_inner) = config.log.level;
        // What waits for a restart is named again the next time: it still waits.
        read.take(&config.source, &report.applied);
        tracing::info!(applied = ?report.applied, needs_restart = ?report.needs_restart, "configuration reloaded");
        Ok(report)
    }
}

impl server::Configuration for Reloader {
    fn reload(&self) -> Result<serde_json::Value, String> {
        let report = Reloader::reload(self).map_err(|error| error.to_string())?;
        serde_json::to_value(report).map_err(|error| error.to_string())
    }

    fn in_force(&self) -> serde_json::Value {
        self.read.lock().unwrap_or_else(PoisonError::into_inner).in_force()
    }
}

fn registering(config: &Config) -> BTreeSet<String> {
    config.sip.trunk.iter().filter(|trunk| trunk.register).map(|trunk| trunk.name.clone()).collect()
}

/// Tells the parts of a gateway; gives what waits for a restart all the same.
fn steer(gateway: &Gateway, config: &Config) -> Vec<String> {
    gateway.calls.limit(config.call.max_calls);
    gateway.records.keep(config.records.keep_days);
    gateway.recordings.keep(config.recording.keep_days);
    gateway.jobs.keep(config.batch.keep_days);
    gateway.webrtc.tell_ice_servers(&config.webrtc.ice_servers);
    for engine in std::iter::once(&gateway.engine).chain(&gateway.fallback) {
        engine.limit_tenants(&config.scheduler);
    }
    gateway.sip.as_ref().map(|sip| sip.apply(&config.sip)).unwrap_or_default()
}

fn report(changed: BTreeSet<String>, gateway: Option<&Gateway>) -> Report {
    let steered = |key: &String| {
        gateway.is_some_and(|gateway| {
            STEERED.contains(&key.as_str()) && (gateway.sip.is_some() || !key.starts_with("sip."))
        })
    };
    let applies = |key: &String| {
        steered(key) || APPLIED.iter().any(|known| key == known || (known.ends_with('.') && key.starts_with(known)))
    };
    let (applied, needs_restart) = changed.into_iter().partition(applies);
    Report { applied, needs_restart }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::server::config::Http;

    #[test]
    fn a_reload_applies_what_it_can_names_the_rest_and_refuses_a_mistake_whole() {
        let folder = tempfile::tempdir().expect("a folder");
        let file = folder.path().join("gateway.toml");
        let write = |text: &str| std::fs::write(&file, text).expect("written");
        write("[agent.a]\nurl = \"builtin:demo\"\n");
        let config = Config::load(Some(&file), []).expect("valid");
        let agents = Agents::new(config.agent.clone());
        let reloader = Reloader::new(&config, Policies::new(&Http::default()), agents.clone(), Tenants::default());
        assert_eq!(reloader.reload().expect("valid"), Report::default());

        let changed = "[sip]\nmax_calls = 7\n[agent.a]\nurl = \"builtin:silent\"\n[agent.b]\nurl = \"builtin:demo\"\n\
                       [webhook.w]\nurl = \"http://127.0.0.1:9/\"\nsecret = \"s\"\nevents = [\"ended\"]\n";
        write(&format!("[http]\nhosts = [\"voice.example\"]\nnonsense = 1\n{changed}"));
        let error = reloader.reload().expect_err("a mistake").to_string();
        assert!(error.contains("nonsense"), "{error}");
        assert_eq!(agents.find("a").expect("there").url, "builtin:demo", "nothing has changed");

        write(&format!("[http]\nhosts = [\"voice.example\"]\n{changed}"));
        let keys = |keys: &[&str]| keys.iter().map(|key| (*key).to_owned()).collect::<BTreeSet<_>>();
        let report = reloader.reload().expect("valid");
        assert_eq!(report.applied, keys(&["agent.a", "agent.b", "http.hosts", "webhook.w"]));
        assert_eq!(report.needs_restart, keys(&["sip.max_calls"]));
        assert_eq!(agents.find("a").expect("there").url, "builtin:silent");
        assert!(agents.find("b").is_some());
        // A tenant that is gone keeps its share until then.
        let tenants = BTreeMap::from([("gone".to_owned(), sched::Tenant { max_live: 1, ..Default::default() })]);
        let mut before = config.clone();
        before.scheduler.tenants = tenants;
        let reloaded = Reloader::new(&before, Policies::new(&Http::default()), agents.clone(), Tenants::default());
        let told = reloaded.reload().expect("valid").needs_restart;
        assert!(told.iter().any(|key| key.starts_with("tenant.gone.")), "{told:?}");
        // What waits for a restart still does.
        let again = reloader.reload().expect("valid");
        assert_eq!((again.applied, again.needs_restart), (keys(&[]), keys(&["sip.max_calls"])));
        let in_force = server::Configuration::in_force(&reloader);
        let of = |key: &str| in_force["settings"].as_array()?.iter().find(|one| one["key"] == key).cloned();
        assert_eq!(of("http.hosts").expect("listed")["value"][0], "voice.example");
        assert_eq!(of("sip.max_calls").expect("listed")["isSet"], false, "it waits");
    }
}
