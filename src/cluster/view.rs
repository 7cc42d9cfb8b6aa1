//! What this node knows of the others, as the registry told last. No I/O; time is an argument.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use crate::node::NodeName;

/// A node that has not been written for so long is gone from the registry; loads that are older say nothing.
pub(super) const TTL: Duration = Duration::from_secs(5);
/// How long the address of a node that is gone is remembered. It may only have lost the registry; and an id of it is
/// told from one that no gateway ever made.
const REMEMBERED: Duration = Duration::from_secs(600);
/// Nodes remembered: more than any cluster has, so that names of machines that come and go fill no memory.
const MAX_NODES: usize = 1_024;

/// Where a node takes telephone calls.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Sip {
    /// Where UDP comes in.
    pub udp: Option<SocketAddr>,
    /// TCP.
    pub tcp: Option<SocketAddr>,
    /// TLS.
    pub tls: Option<SocketAddr>,
}

/// How busy a node is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Load {
    /// Calls in progress.
    pub calls: u32,
    /// Most calls at a time.
    pub max_calls: u32,
    /// Streams that could be added, by the devices and by `max_calls`.
    pub free: f64,
    /// Whether a new call would be taken.
    pub room: bool,
    /// Whether none is, until somebody says otherwise.
    pub draining: bool,
    /// When a refused call may come again, in milliseconds.
    pub retry_after_ms: u64,
    /// Seconds until a listener hears a gap if nothing more is made; `None`: none listens.
    pub slack_s: Option<f64>,
}

/// A node as it tells of itself.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Peer {
    /// Its name.
    pub name: NodeName,
    /// Which process goes by the name: a number that it drew at its start.
    pub instance: String,
    /// Where other nodes reach its HTTP.
    pub advertise: String,
    /// Where it takes telephone calls.
    #[serde(default)]
    pub sip: Sip,
    /// How busy it is.
    #[serde(default)]
    pub load: Load,
    /// Which list of voices it has; the list is a key of its own.
    #[serde(default)]
    pub voices: Option<String>,
}

/// All others.
#[derive(Debug, Default)]
pub(super) struct View {
    nodes: BTreeMap<NodeName, Known>,
    /// When the registry was read last.
    read: Option<Instant>,
    /// How often it was read.
    round: u64,
}

#[derive(Debug)]
struct Known {
    peer: Peer,
    /// When the registry told of it last, and in which round.
    seen: Instant,
    round: u64,
    /// Calls that were sent there since.
    sent: u32,
}

impl View {
    /// Takes in what the registry holds; `own` is left out.
    pub(super) fn heard(&mut self, now: Instant, own: &NodeName, peers: Vec<Peer>) {
        self.read = Some(now);
        self.round += 1;
        self.nodes.retain(|_, known| now.saturating_duration_since(known.seen) < REMEMBERED);
        for peer in peers.into_iter().filter(|peer| peer.name != *own) {
            if self.nodes.len() < MAX_NODES || self.nodes.contains_key(&peer.name) {
                self.nodes.insert(peer.name.clone(), Known { peer, seen: now, round: self.round, sent: 0 });
            }
        }
    }

    /// Where a node is, as far as that was ever known.
    pub(super) fn find(&self, name: &NodeName) -> Option<Peer> {
        self.nodes.get(name).map(|known| known.peer.clone())
    }

    /// Nodes that the registry had when it was read last. Where it cannot be read they are still asked: calls live on.
    pub(super) fn live(&self) -> impl Iterator<Item = &Peer> {
        self.nodes.values().filter(|known| known.round == self.round).map(|known| &known.peer)
    }

    /// Nodes that would take a call, the one with the most room first; none where what is known is old.
    pub(super) fn with_room(&self, now: Instant) -> Vec<Peer> {
        if !self.is_fresh(now) {
            return Vec::new();
        }
        let free = |known: &Known| known.peer.load.free - f64::from(known.sent);
        let mut found: Vec<&Known> = self.nodes.values().filter(|known| known.round == self.round).collect();
        found.retain(|known| known.peer.load.room && free(known) > 0.0);
        let slack = |known: &Known| known.peer.load.slack_s.unwrap_or(f64::MAX);
        found.sort_by(|a, b| free(b).total_cmp(&free(a)).then(slack(b).total_cmp(&slack(a))));
        found.into_iter().map(|known| known.peer.clone()).collect()
    }

    /// A call was sent there: until its next word it has one place less.
    pub(super) fn sent(&mut self, name: &NodeName) {
        if let Some(known) = self.nodes.get_mut(name) {
            known.sent = known.sent.saturating_add(1);
        }
    }

    /// When a call that is refused everywhere may come again: the first node that has a place then.
    pub(super) fn retry_after(&self, now: Instant, own: Duration) -> Duration {
        if !self.is_fresh(now) {
            return own;
        }
        let of = |peer: &Peer| Duration::from_millis(peer.load.retry_after_ms);
        self.live().filter(|peer| !peer.load.draining).map(of).fold(own, Duration::min)
    }

    /// Whether the registry was read a moment ago.
    pub(super) fn is_fresh(&self, now: Instant) -> bool {
        self.read.is_some_and(|read| now.saturating_duration_since(read) < TTL)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::clock;

    fn peer(name: &str, free: f64) -> Peer {
        let load = Load { free, room: free > 0.0, retry_after_ms: 3_000, ..Load::default() };
        let advertise = format!("http://{name}:8080");
        Peer {
            name: name.parse().expect("a name"),
            instance: "1".into(),
            advertise,
            sip: Sip::default(),
            load,
            voices: None,
        }
    }

    fn names(peers: &[Peer]) -> Vec<&str> {
        peers.iter().map(|peer| peer.name.as_str()).collect()
    }

    #[test]
    fn a_call_goes_to_the_node_with_the_most_room() {
        let (mut view, now, own) = (View::default(), clock::now(), "a".parse().expect("a name"));
        view.heard(now, &own, vec![peer("a", 90.0), peer("b", 2.0), peer("c", 2.5), peer("d", 0.0)]);
        assert_eq!(names(&view.with_room(now)), ["c", "b"], "neither itself nor one that is full");
        let c = "c".parse().expect("a name");
        view.sent(&c);
        assert_eq!(names(&view.with_room(now)), ["b", "c"], "not all of them to one");
        view.sent(&c);
        view.sent(&c);
        assert_eq!(names(&view.with_room(now)), ["b"]);
        view.heard(now, &own, vec![peer("c", 2.5)]);
        assert_eq!(names(&view.with_room(now)), ["c"], "b is gone from the registry");
        assert!(view.with_room(now + TTL).is_empty(), "what was known is old");
    }

    #[test]
    fn a_node_that_is_gone_is_remembered_for_a_while() {
        let (mut view, now, own) = (View::default(), clock::now(), "a".parse().expect("a name"));
        let b: NodeName = "b".parse().expect("a name");
        view.heard(now, &own, vec![peer("b", 1.0)]);
        view.heard(now + TTL, &own, Vec::new());
        assert!(view.live().next().is_none() && view.find(&b).is_some());
        view.heard(now + REMEMBERED, &own, Vec::new());
        assert!(view.find(&b).is_none());
    }

    #[test]
    fn who_is_refused_comes_back_when_some_node_has_room() {
        let (mut view, now, own) = (View::default(), clock::now(), "a".parse().expect("a name"));
        let long = Duration::from_secs(20);
        assert_eq!(view.retry_after(now, long), long, "alone");
        let mut draining = peer("d", 0.0);
        draining.load = Load { draining: true, retry_after_ms: 1, ..draining.load };
        view.heard(now, &own, vec![peer("b", 0.0), draining]);
        assert_eq!(view.retry_after(now, long), Duration::from_secs(3));
        assert_eq!(view.retry_after(now, Duration::from_secs(1)), Duration::from_secs(1));
    }

    #[test]
    fn names_that_come_and_go_fill_no_memory() {
        let (mut view, now, own) = (View::default(), clock::now(), "a".parse().expect("a name"));
        for n in 0..3 {
            view.heard(now, &own, (0..MAX_NODES).map(|m| peer(&format!("n-{n}-{m}"), 1.0)).collect());
        }
        assert_eq!(view.nodes.len(), MAX_NODES);
    }
}
