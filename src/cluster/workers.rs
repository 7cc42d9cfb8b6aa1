//! Workers that gateways find: each writes itself into Redis every second, with an expiry, and gateways look as often.
//!
//! # Why
//! What Redis says is where to knock, and nothing else: a gateway connects, with the TLS and the token of the cluster, and
//! what a worker is and whether it lives is what it says on that connection. So a registry that is lost or lies costs no
//! stream ([`crate::synth::device::Engine::keep_workers`]).

use std::net::SocketAddr;

use redis::aio::MultiplexedConnection;
use serde::{Deserialize, Serialize};
use tokio::sync::watch;

use super::registry::{LEAVE, LIST, PREFIX, SPEAK};
use super::rounds::{Link, Rounds, client, millis};
use super::view::TTL;
use super::{Nodes, advertised};
use crate::node::NodeName;
use crate::synth::device::remote::config::Cluster;
use crate::synth::device::remote::serve::Told;

/// Workers looked at: more than any gateway connects to, so that a registry full of rubbish fills no memory.
const MAX: usize = 1_024;

/// A worker as it tells of itself.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Word {
    /// Its name.
    pub name: NodeName,
    /// Which process goes by the name: a number that it drew at its start.
    pub instance: String,
    /// Where gateways connect to: `host:port`.
    pub address: String,
    /// Where it is asked for its health; `None`: nowhere.
    #[serde(default)]
    pub http: Option<String>,
    /// What it is and how busy.
    #[serde(flatten)]
    pub told: Told,
}

/// A worker that lets itself be found.
pub struct Announcer {
    redis: redis::Client,
    name: NodeName,
    instance: String,
    address: String,
    http: Option<String>,
}

impl Announcer {
    /// By its configuration; `None` where it has no registry. Gateways connect to the host of `[cluster] advertise` and the
    /// port of `listen`.
    ///
    /// # Errors
    /// A key is missing or cannot be used.
    pub fn new(config: &Cluster, listen: SocketAddr, http: Option<SocketAddr>) -> Result<Option<Self>, String> {
        config.validate()?;
        let (Some(redis), Some(name), Some(advertise)) = (&config.redis, &config.node, &config.advertise) else {
            return Ok(None);
        };
        let url = reqwest::Url::parse(advertise).map_err(|error| format!("advertise: {error}"))?;
        let host = url.host_str().ok_or("advertise: it has no host")?;
        let address = format!("{host}:{}", listen.port());
        config.check(&address)?;
        Ok(Some(Self {
            redis: client(redis)?,
            name: name.clone(),
            instance: uuid::Uuid::new_v4().simple().to_string(),
            address,
            http: http.map(|http| advertised(advertise, http.port())).transpose()?,
        }))
    }

    /// Where gateways will connect to.
    pub fn address(&self) -> &str {
        &self.address
    }

    /// Tells gateways of this worker until `stop`, and then that it is gone. `tell` is asked each time.
    pub async fn keep(self, tell: impl Fn() -> Told + Send, stop: watch::Receiver<bool>) {
        let (mut link, mut error) = (Link::new(self.redis.clone()), None);
        let mut rounds = Rounds::new(stop);
        while rounds.next().await {
            let told = tell();
            let said = link.exchange(|connection| self.say(connection, told)).await.err();
            match (&error, &said) {
                (None, Some(error)) => {
                    tracing::error!(error, "the registry cannot be used; no gateway finds this worker")
                }
                (Some(_), None) => tracing::info!("the registry can be used again"),
                _ => {}
            }
            error = said;
        }
        let mut leave = redis::cmd("EVAL");
        leave.arg(LEAVE).arg(2).arg(index()).arg(key(self.name.as_str()));
        leave.arg(self.name.as_str()).arg(&self.instance);
        // One that is not told so expires.
        let _ = link.leave(&leave).await;
    }

    async fn say(&self, mut connection: MultiplexedConnection, told: Told) -> Result<(), String> {
        let word = Word {
            name: self.name.clone(),
            instance: self.instance.clone(),
            address: self.address.clone(),
            http: self.http.clone(),
            told,
        };
        let word = serde_json::to_string(&word).map_err(|error| error.to_string())?;
        let mut speak = redis::cmd("EVAL");
        speak.arg(SPEAK).arg(2).arg(index()).arg(key(self.name.as_str()));
        speak.arg(self.name.as_str()).arg(word).arg(millis(TTL)).arg(&self.instance).arg(key(""));
        let answer: Vec<String> = speak.query_async(&mut connection).await.map_err(|error| error.to_string())?;
        match answer.first().map(String::as_str) {
            Some("ok") => Ok(()),
            _ => Err(format!("another worker goes by the name `{}`: [cluster] node must be unique", self.name)),
        }
    }
}

impl Nodes {
    /// Tells which workers there are, every second until `stop`; nothing is told while the registry cannot be read.
    pub async fn follow_workers(&self, mut tell: impl FnMut(Vec<Word>) + Send, stop: watch::Receiver<bool>) {
        let (mut link, mut rounds) = (Link::new(self.0.redis.clone()), Rounds::new(stop));
        while rounds.next().await {
            // That the registry cannot be used is told where this node speaks.
            if let Ok(words) = link.exchange(listed).await {
                tell(words);
            }
        }
    }
}

async fn listed(mut connection: MultiplexedConnection) -> Result<Vec<Word>, String> {
    let mut list = redis::cmd("EVAL");
    list.arg(LIST).arg(1).arg(index()).arg(key(""));
    let words: Vec<String> = list.query_async(&mut connection).await.map_err(|error| error.to_string())?;
    // A worker of another version may say what is not understood: it is not there for this one.
    Ok(words.iter().take(MAX).filter_map(|word| serde_json::from_str(word).ok()).collect())
}

fn index() -> String {
    format!("{PREFIX}:workers")
}

fn key(worker: &str) -> String {
    format!("{PREFIX}:worker:{worker}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_worker_is_found_at_the_host_that_it_advertises_and_the_port_that_it_listens_on() {
        let text = "redis = 'redis://127.0.0.1:9'\nnode = 'gpu-1'\nadvertise = 'http://127.0.0.1:0'\n\
                    token = '0123456789abcdef'";
        let config: Cluster = toml::from_str(text).expect("readable");
        let (listen, http) = (([0, 0, 0, 0], 7070).into(), ([0, 0, 0, 0], 9090).into());
        let found = Announcer::new(&config, listen, Some(http)).expect("valid").expect("a registry");
        assert_eq!((found.address(), found.http.as_deref()), ("127.0.0.1:7070", Some("http://127.0.0.1:9090")));
        assert!(Announcer::new(&config, listen, None).expect("valid").expect("a registry").http.is_none());
        assert!(Announcer::new(&Cluster::default(), listen, None).expect("valid").is_none());
        // Others would refuse to connect to it.
        let far: Cluster = toml::from_str(&text.replace("127.0.0.1:0", "10.0.0.5:0")).expect("readable");
        assert!(Announcer::new(&far, listen, None).err().expect("no TLS").contains("[cluster] tls"));
    }

    #[test]
    fn what_a_later_version_adds_is_no_reason_not_to_know_a_worker() {
        let told = Told { engine: Some("tone".into()), sustainable: 8.0, ..Told::default() };
        let word = Word {
            name: "w".parse().expect("a name"),
            instance: "1".into(),
            address: "127.0.0.1:1".into(),
            http: None,
            told,
        };
        let mut said = serde_json::to_value(&word).expect("JSON");
        assert_eq!(said["engine"], "tone");
        said["later"] = "added".into();
        assert_eq!(serde_json::from_value::<Word>(said).expect("read"), word);
        let least = serde_json::json!({ "name": "w", "instance": "1", "address": "127.0.0.1:1" });
        assert!(serde_json::from_value::<Word>(least).is_ok());
    }
}
