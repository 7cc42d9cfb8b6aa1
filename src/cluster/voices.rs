//! Which enrolled voices each node has: told in Redis by each, with an expiry, and read when they have changed.
//!
//! # Why
//! The list of a node changes rarely and may be long, so the word of each second says only which list it is.

use std::collections::BTreeMap;

use redis::aio::MultiplexedConnection;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use super::registry::PREFIX;
use super::rounds::millis;
use super::view::{Peer, TTL};
use super::{Nodes, State};
use crate::node::NodeName;

/// Voices of a node that others are told of; those behind them in order of name speak where they are.
const MAX: usize = 1_000;

/// A voice that a node has.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Voice {
    /// Its name.
    pub name: String,
    /// What it is: the same for equal voices.
    pub id: String,
    /// Whose it is; `None`: everybody may speak with it.
    #[serde(default)]
    pub owner: Option<String>,
    /// BCP 47 tags, if known.
    #[serde(default)]
    pub languages: Vec<String>,
}

/// What is known of the voices of all nodes.
#[derive(Debug, Default)]
pub(super) struct Voices {
    /// Which list each has, and the list.
    others: BTreeMap<NodeName, (String, Vec<Voice>)>,
}

/// Which list this is, and the list as others read it.
pub(super) fn told(mut voices: Vec<Voice>) -> (String, String) {
    voices.truncate(MAX);
    // Strings and lists only, which always have a form.
    let list = serde_json::to_string(&voices).unwrap_or_default();
    (crate::voice::file::hex(&Sha256::digest(&list)[..8]), list)
}

/// Writes the list of `node`, or has it last.
pub(super) async fn write(
    connection: &mut MultiplexedConnection,
    node: &NodeName,
    (which, list): &(String, String),
    written: &mut Option<String>,
) -> Result<(), redis::RedisError> {
    if written.as_ref() == Some(which) {
        let mut last = redis::cmd("PEXPIRE");
        last.arg(key(node)).arg(millis(TTL));
        let lasts: i64 = last.query_async(connection).await?;
        if lasts == 1 {
            return Ok(());
        }
    }
    let mut set = redis::cmd("SET");
    set.arg(key(node)).arg(list).arg("PX").arg(millis(TTL));
    let _: () = set.query_async(connection).await?;
    *written = Some(which.clone());
    Ok(())
}

/// Reads the lists that have changed.
pub(super) async fn read(nodes: &Nodes, connection: &mut MultiplexedConnection) -> Result<(), redis::RedisError> {
    let changed: Vec<(NodeName, String)> = {
        let mut state = nodes.lock();
        let State { view, voices, .. } = &mut *state;
        let live: Vec<&Peer> = view.live().collect();
        voices.others.retain(|name, _| live.iter().any(|peer| peer.name == *name));
        let changed = live.into_iter().filter_map(|peer| Some((peer.name.clone(), peer.voices.clone()?)));
        changed.filter(|(name, which)| voices.others.get(name).is_none_or(|(known, _)| known != which)).collect()
    };
    for (name, which) in changed {
        let list: Option<String> = redis::cmd("GET").arg(key(&name)).query_async(connection).await?;
        // One that has just expired is written again within a second.
        let Some(list) = list.and_then(|list| serde_json::from_str(&list).ok()) else { continue };
        nodes.lock().voices.others.insert(name, (which, list));
    }
    Ok(())
}

fn key(node: &NodeName) -> String {
    format!("{PREFIX}:voices:{node}")
}

impl Nodes {
    /// The voice of this name that another node has, and the node.
    pub fn voice(&self, name: &str) -> Option<(Peer, Voice)> {
        let state = self.lock();
        let found = state.voices.find(name, state.view.live());
        found.map(|(peer, voice)| (peer.clone(), voice.clone()))
    }

    /// The voices of all other nodes; where several have one of a name, that of the first node.
    pub fn voices(&self) -> Vec<Voice> {
        let state = self.lock();
        let mut all: Vec<Voice> = Vec::new();
        for peer in state.view.live() {
            for voice in state.voices.others.get(&peer.name).map_or(&[][..], |(_, voices)| voices) {
                if !all.iter().any(|known| known.name == voice.name) {
                    all.push(voice.clone());
                }
            }
        }
        all
    }
}

impl Voices {
    /// The first node, by name, among `live` that has a voice of this name.
    fn find<'a>(&'a self, name: &str, mut live: impl Iterator<Item = &'a Peer>) -> Option<(&'a Peer, &'a Voice)> {
        live.find_map(|peer| {
            let (_, voices) = self.others.get(&peer.name)?;
            Some((peer, voices.iter().find(|voice| voice.name == name)?))
        })
    }
}
