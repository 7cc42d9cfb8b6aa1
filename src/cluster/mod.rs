//! Other gateways behind the same number: which there are, how busy they are, and whose a call is.
//!
//! Every node writes itself into Redis each second, with an expiry, and reads the others. Ids carry the name of their
//! node ([`crate::node`]), so that Redis is not asked on the way of a request: what is known here answers. Without Redis
//! a node is alone and complete: its own calls go on, new ones are taken, and what it knew of the others is still tried.
//!
//! # Why
//! Redis holds only what every node says anew a second later, so losing it loses nothing. Keys that expire need not be
//! removed: a node that is killed is gone from the registry after [`view::TTL`], whichever others live.

mod lease;
mod pass;
mod registry;
mod rounds;
mod view;
pub mod voices;
pub mod workers;

use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::watch;

use self::lease::Leases;
pub use self::pass::{Caller, HEADER, Pass};
use self::view::View;
pub use self::view::{Load, Peer, Sip};
use self::voices::{Voice, Voices};
use crate::clock;
use crate::node::NodeName;
use crate::secret::Secret;
use crate::synth::device::remote::config::Cluster;

/// Longest wait for a connection to another node.
const CONNECT: Duration = Duration::from_secs(2);
/// How long a connection is kept for the next request: the other side closes it after fifteen seconds, and a request that
/// meets that would be lost.
const IDLE: Duration = Duration::from_secs(8);

/// What this node tells of itself.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Told {
    /// Where it takes telephone calls.
    pub sip: Sip,
    /// How busy it is.
    pub load: Load,
    /// The voices that were enrolled there.
    pub voices: Vec<Voice>,
    /// It drains and has told the registrars so: others may register at its trunks.
    pub withdrawn: bool,
}

/// Whose an object is, by its id.
#[derive(Clone, Debug, PartialEq)]
pub enum Owner {
    /// This node's, or no node's.
    Here,
    /// Another node's.
    There(Box<Peer>),
    /// A node's that is not known, or not any more.
    Gone(NodeName),
}

/// What this node knows of its cluster, for people.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Status {
    /// Its own name.
    pub node: NodeName,
    /// Whether the registry was read a moment ago.
    pub registry: bool,
    /// Why not, as far as that is known.
    pub error: Option<String>,
    /// The other nodes that the registry had when it was read last.
    pub others: Vec<NodeName>,
}

/// This node among the others. Clones mean the same.
#[derive(Clone)]
pub struct Nodes(Arc<Inner>);

struct Inner {
    name: NodeName,
    instance: String,
    advertise: String,
    token: Secret,
    redis: redis::Client,
    client: reqwest::Client,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    view: View,
    leases: Leases,
    voices: Voices,
    error: Option<String>,
}

impl Nodes {
    /// A node by its configuration, whose HTTP listens on `port`; `None` where it is to be alone. Connects to nothing yet.
    ///
    /// # Errors
    /// A key is missing or cannot be used.
    pub fn new(config: &Cluster, port: u16) -> Result<Option<Self>, String> {
        config.validate()?;
        let (Some(redis), Some(name), Some(advertise), Some(token)) =
            (&config.redis, &config.node, &config.advertise, &config.token)
        else {
            return Ok(None);
        };
        let redis = rounds::client(redis)?;
        let mut client = reqwest::Client::builder()
            .connect_timeout(CONNECT)
            .pool_idle_timeout(IDLE)
            .redirect(reqwest::redirect::Policy::none())
            .no_proxy();
        if let Some(tls) = config.client_tls()? {
            client = client.tls_backend_preconfigured(tls);
        }
        Ok(Some(Self(Arc::new(Inner {
            name: name.clone(),
            instance: uuid::Uuid::new_v4().simple().to_string(),
            advertise: advertised(advertise, port)?,
            token: token.clone(),
            redis,
            client: client.build().map_err(|error| format!("no HTTP client: {error}"))?,
            state: Mutex::default(),
        }))))
    }

    /// The name of this node.
    pub fn name(&self) -> &NodeName {
        &self.0.name
    }

    /// Whose `id` is.
    pub fn owner(&self, id: &str) -> Owner {
        match NodeName::of(id) {
            Some(name) if name != self.0.name => match self.lock().view.find(&name) {
                Some(peer) => Owner::There(Box::new(peer)),
                None => Owner::Gone(name),
            },
            _ => Owner::Here,
        }
    }

    /// The other nodes that live, as far as is known.
    pub fn others(&self) -> Vec<Peer> {
        self.lock().view.live().cloned().collect()
    }

    /// Nodes that would take a call that this one does not, the best first.
    pub fn with_room(&self, now: Instant) -> Vec<Peer> {
        self.lock().view.with_room(now)
    }

    /// A call was sent to `peer`.
    pub fn sent(&self, peer: &Peer) {
        self.lock().view.sent(&peer.name);
    }

    /// When a call that this node would have come again after `own` may come again to any.
    pub fn retry_after(&self, now: Instant, own: Duration) -> Duration {
        self.lock().view.retry_after(now, own)
    }

    /// Whether this node is the one that registers at `trunk`: it has the lease. One that never found the registry has none:
    /// another may.
    pub fn registers(&self, now: Instant, trunk: &str) -> bool {
        self.lock().leases.holds(now, trunk)
    }

    /// What is known.
    pub fn status(&self, now: Instant) -> Status {
        let state = self.lock();
        Status {
            node: self.0.name.clone(),
            registry: state.view.is_fresh(now),
            error: state.error.clone(),
            others: state.view.live().map(|peer| peer.name.clone()).collect(),
        }
    }

    /// A request to `peer` for `caller`, to be sent. `path` begins with a slash and may have a query. `Err`: the path is
    /// not what a URL would say.
    ///
    /// # Errors
    /// As said.
    pub fn request(
        &self,
        peer: &Peer,
        method: reqwest::Method,
        path: &str,
        caller: Option<Caller>,
        origin: Option<String>,
    ) -> Result<reqwest::RequestBuilder, String> {
        let url = reqwest::Url::parse(&format!("{}{path}", peer.advertise)).map_err(|error| error.to_string())?;
        // A URL is brought into a normal form, in which a path with dots may be another one: that one was not judged.
        let sent = url.query().map_or_else(|| url.path().to_owned(), |query| format!("{}?{query}", url.path()));
        if sent != path {
            return Err(format!("the path {path} cannot be passed on"));
        }
        let pass = Pass::new(self.0.name.clone(), peer.name.clone(), caller, origin, clock::wall());
        let signed = pass.sign(&self.0.token, &format!("{method} {path}"));
        Ok(self.0.client.request(method, url).header(HEADER, signed))
    }

    /// What the header of a request that another node passed on says.
    ///
    /// # Errors
    /// Why it is not believed.
    pub fn verify(&self, header: &str, method: &str, path: &str) -> Result<Pass, &'static str> {
        Pass::verify(header, &self.0.token, &format!("{method} {path}"), &self.0.name, clock::wall())
    }

    /// Reads which other nodes there are, so that the first request knows them; where the registry cannot be read, after a few
    /// seconds without. Says nothing of this node.
    ///
    /// A node that takes the place of another is asked for calls of all others at once.
    pub async fn look(&self) {
        registry::look(self).await;
    }

    /// Writes this node into the registry, reads the others and holds leases of `trunks`, until `stop`. `tell` is asked
    /// each time. `ends` is asked at the end: where it says that this process ends and the node does not, others are told of the
    /// node until the process that takes its place tells of itself.
    pub async fn keep(
        self,
        tell: impl Fn() -> Told + Send,
        trunks: Vec<String>,
        stop: watch::Receiver<bool>,
        ends: impl Fn() -> bool + Send,
    ) {
        registry::keep(&self, tell, trunks, stop, ends).await;
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // What is behind it is sound between any two steps.
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// An address without a slash at its end; port 0 stands for the one that was got.
fn advertised(address: &str, port: u16) -> Result<String, String> {
    let mut url = reqwest::Url::parse(address).map_err(|error| format!("advertise: {error}"))?;
    if url.port() == Some(0) {
        url.set_port(Some(port)).map_err(|()| "advertise: it can have no port".to_owned())?;
    }
    Ok(url.as_str().trim_end_matches('/').to_owned())
}

impl fmt::Debug for Nodes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Nodes")
            .field("name", &self.0.name)
            .field("advertise", &self.0.advertise)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_node_registers_at_a_trunk_while_it_has_the_lease() {
        // A second call says that there is one already.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let text =
            "redis = 'redis://127.0.0.1:9'\nnode = 'a'\nadvertise = 'http://10.0.0.1:0/'\ntoken = '0123456789abcdef'";
        let config: Cluster = toml::from_str(text).expect("readable");
        let nodes = Nodes::new(&config, 8080).expect("valid").expect("a cluster");
        assert_eq!(nodes.0.advertise, "http://10.0.0.1:8080", "the port that was got");
        let now = clock::now();
        assert!(!nodes.registers(now, "t"), "another may have it");
        nodes.lock().leases.answered(now, "t", Some(1));
        assert!(nodes.registers(now, "t") && !nodes.registers(now + lease::LEASE, "t"));
        assert!(Nodes::new(&Cluster::default(), 8080).expect("valid").is_none());
    }
}
