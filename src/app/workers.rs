//! What other machines of the cluster have for the voices here: workers that are found through the registry become devices of
//! the engine, and go again; voices that were enrolled at other nodes are fetched when somebody wants to hear them.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use futures_util::future::BoxFuture;
use tokio::sync::watch;

use crate::cluster::voices::Voice;
use crate::cluster::workers::Word;
use crate::cluster::{Caller, Nodes};
use crate::synth::device::Engine;
use crate::synth::device::remote::config::Cluster;
use crate::synth::device::remote::link::Worker;
use crate::voice::api::Service;
use crate::voice::copies::{Copies, Elsewhere};

/// How often copies of voices are looked through for those that are old.
const LOOK: Duration = Duration::from_secs(600);
/// Workers that a gateway connects to at a time.
const MAX: usize = 256;

/// Keeps the workers of `engine` as the registry tells, until `stop`.
pub(super) async fn follow(nodes: Nodes, engine: Engine, cluster: Cluster, stop: watch::Receiver<bool>) {
    let mut found = Found::new(cluster);
    nodes.follow_workers(|words| engine.keep_workers(found.among(words)), stop).await;
}

/// The voices that were enrolled here, for other nodes.
pub(super) fn enrolled(voices: &Service) -> Vec<Voice> {
    let enrolled = voices.list().voices.into_iter();
    enrolled
        .map(|entry| Voice {
            name: entry.name.to_string(),
            id: entry.id,
            owner: entry.owner,
            languages: entry.languages,
        })
        .collect()
}

/// Voices of other nodes.
pub(super) struct Others(pub(super) Nodes);

impl Elsewhere for Others {
    fn content(&self, name: &str) -> Option<String> {
        self.0.voice(name).map(|(_, voice)| voice.id)
    }

    fn fetch(&self, name: String, content: String) -> BoxFuture<'static, Result<Vec<u8>, String>> {
        let nodes = self.0.clone();
        Box::pin(async move {
            let found = nodes.voice(&name).filter(|(_, voice)| voice.id == content);
            let (peer, _) = found.ok_or("the node that had it has it no more")?;
            // Who may speak with it was asked where the request came in.
            let caller = Caller { tenant: String::new(), all: true, dialer: None };
            let path = format!("/v1/audio/voices/{name}");
            let request = nodes.request(&peer, reqwest::Method::GET, &path, Some(caller), None)?;
            let answer = request.send().await.and_then(reqwest::Response::error_for_status);
            let answer = answer.map_err(|error| format!("{}: {error}", peer.name))?;
            let file = answer.bytes().await.map_err(|error| format!("{}: {error}", peer.name))?;
            Ok(file.to_vec())
        })
    }
}

/// Forgets copies of voices that are old, until `stop`.
pub(crate) async fn forget_copies(copies: Copies, engine: Engine, mut stop: watch::Receiver<bool>) {
    loop {
        let looking = copies.clone();
        // A panic there was logged when it happened.
        if tokio::task::spawn_blocking(move || looking.forget_old()).await.unwrap_or(false) {
            engine.refresh_voices().await;
        }
        tokio::select! {
            // Also when the application was dropped without being drained.
            _ = stop.changed() => return,
            () = tokio::time::sleep(LOOK) => {}
        }
    }
}

/// What is needed to connect to those that were told of.
struct Found {
    cluster: Cluster,
    workers: BTreeMap<String, Worker>,
    /// Said once.
    unusable: BTreeSet<String>,
}

impl Found {
    fn new(cluster: Cluster) -> Self {
        Self { cluster, workers: BTreeMap::new(), unusable: BTreeSet::new() }
    }

    /// Those of `words` that may be connected to. One that drains is none for who does not know it yet.
    fn among(&mut self, words: Vec<Word>) -> Vec<Worker> {
        let mut there: BTreeSet<String> =
            words.into_iter().filter(|word| !word.told.draining).map(|word| word.address).collect();
        while there.len() > MAX {
            there.pop_last();
        }
        self.workers.retain(|address, _| there.contains(address));
        self.unusable.retain(|address| there.contains(address));
        for address in there {
            if self.workers.contains_key(&address) || self.unusable.contains(&address) {
                continue;
            }
            match self.cluster.worker(&address) {
                Ok(worker) => drop(self.workers.insert(address, worker)),
                Err(error) => {
                    tracing::error!(error, "a worker of the registry cannot be used");
                    self.unusable.insert(address);
                }
            }
        }
        self.workers.values().cloned().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::synth::device::remote::serve::Told;

    fn word(address: &str, draining: bool) -> Word {
        Word {
            name: "w".parse().expect("a name"),
            instance: "1".into(),
            address: address.into(),
            http: None,
            told: Told { draining, ..Told::default() },
        }
    }

    #[test]
    fn only_workers_that_may_be_connected_to_are_devices() {
        let mut found = Found::new(Cluster::default());
        let addresses = |workers: Vec<Worker>| -> Vec<String> { workers.into_iter().map(|w| w.address).collect() };
        let words = vec![word("127.0.0.1:2", false), word("127.0.0.1:1", false), word("127.0.0.1:3", true)];
        assert_eq!(addresses(found.among(words)), ["127.0.0.1:1", "127.0.0.1:2"]);
        // On a network without TLS, and no address at all.
        let words = vec![word("10.0.0.5:1", false), word("rubbish", false), word("127.0.0.1:2", false)];
        assert_eq!(addresses(found.among(words)), ["127.0.0.1:2"]);
        assert_eq!(found.unusable.len(), 2);
        let many = (1..=2 * MAX).map(|port| word(&format!("127.0.0.1:{port}"), false)).collect();
        assert_eq!(found.among(many).len(), MAX);
        assert!(found.unusable.is_empty());
        assert!(found.among(Vec::new()).is_empty());
    }
}
