//! What every task of the endpoint sees: configuration, stack, limits, and the questions about them.
//!
//! Knows none of the parts that use it. What a call needs of the part that places calls comes as a function
//! ([`Dialer`]), so that a transfer may call without its file needing that one.

use std::{
    collections::HashSet,
    future::Future,
    net::{IpAddr, Ipv4Addr, SocketAddr, UdpSocket as StdUdpSocket},
    pin::Pin,
    sync::{
        Arc, Mutex, OnceLock, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use rsipstack::{
    dialog::{DialogId, dialog_layer::DialogLayer},
    sip::{Auth, Host, HostWithPort, Param, Request, Scheme, Transport, Uri, prelude::HeadersExt},
    transaction::endpoint::EndpointInner,
    transport::SipAddr,
};
use sdp::Agreed;
use tokio::{
    sync::{Semaphore, mpsc, watch},
    time::timeout,
};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use super::{
    DialError, PublicIp, SipConfig, SipError, TrunkConfig,
    auth::Authenticator,
    calling::Calling,
    cause::Farewells,
    dialplan::{self, DialRequest, Dialplan},
    door::Door,
    incoming::IncomingCall,
    names::{Carriers, LOOK_UP, Naming},
    neighbours::{Admission, Beside},
    places::Places,
    quota::Quotas,
    refused::Refusals,
    reliable::Pending,
    routes::Routes,
    targets::{TargetStatus, Targets},
    up::Up,
};
use crate::media::sip::{SipLeg, dtls::Identity, latch::Peer, ports::PortPool};

/// When a caller may come again where this endpoint is going down, and another takes its place.
pub(super) const RESTART: Duration = Duration::from_secs(30);

/// The end of a call out: its leg, and the id of its dialog.
pub(super) type Dialled = Result<(SipLeg, DialogId), DialError>;

/// Who is told the status of each provisional response.
pub(super) type Progress = Box<dyn Fn(u16) + Send + Sync>;

/// Places a call.
pub(super) type Dialer =
    Box<dyn Fn(DialRequest, Progress) -> Pin<Box<dyn Future<Output = Dialled> + Send>> + Send + Sync>;

/// What every task of the endpoint sees.
pub(super) struct Shared {
    pub(super) settings: Settings,
    pub(super) stack: Arc<EndpointInner>,
    pub(super) dialogs: DialogLayer,
    pub(super) media: Media,
    pub(super) places: Places,
    pub(super) naming: Naming,
    pub(super) auth: Authenticator,
    pub(super) trunks: Trunks,
    pub(super) door: Arc<Door>,
    pub(super) incoming: mpsc::Sender<IncomingCall>,
    pub(super) calls: Calls,
    pub(super) here: Here,
    pub(super) life: Life,
    /// Provisional responses that wait for their PRACK.
    pub(super) reliable: Pending,
    /// Whether this process takes what comes, the gateway before it, and others where there may be some.
    pub(super) beside: Beside,
}

/// `[sip]` as it is in force.
pub(super) struct Settings(watch::Sender<Arc<SipConfig>>);

impl Settings {
    pub(super) fn new(config: SipConfig) -> Settings {
        Settings(watch::Sender::new(Arc::new(config)))
    }

    /// As it is now.
    pub(super) fn get(&self) -> Arc<SipConfig> {
        self.0.borrow().clone()
    }

    /// Another one.
    pub(super) fn set(&self, config: SipConfig) {
        self.0.send_replace(Arc::new(config));
    }

    /// Tells of others.
    pub(super) fn watch(&self) -> watch::Receiver<Arc<SipConfig>> {
        self.0.subscribe()
    }
}

/// A trunk as it was when it was looked up.
pub(super) struct Trunk {
    config: Arc<SipConfig>,
    index: usize,
}

impl std::ops::Deref for Trunk {
    type Target = TrunkConfig;

    fn deref(&self) -> &TrunkConfig {
        // It was there when it was looked up.
        &self.config.trunk[self.index]
    }
}

/// What the media of calls is made with.
pub(super) struct Media {
    pub(super) ports: PortPool,
    pub(super) identity: Identity,
}

/// The calls of the endpoint, for those that need other calls.
#[derive(Default)]
pub(super) struct Calls {
    /// Calls out, for who is below the part that places them. Set once at the start.
    pub(super) dialer: OnceLock<Dialer>,
    /// Those that we place, until they have their dialogs.
    pub(super) calling: Calling,
    /// Those that are answered.
    pub(super) up: Up,
    /// Those that ring here.
    pub(super) ringing: Up,
    /// What peers say when they end one.
    pub(super) farewells: Farewells,
    /// Of those that are refused, which are told of.
    pub(super) refusals: Refusals,
    /// INVITEs that came and are under way, by Call-ID, From tag and CSeq.
    pub(super) invites: Mutex<HashSet<String>>,
}

/// What runs, and how it ends.
#[derive(Debug)]
pub(super) struct Life {
    /// Calls and registrations end.
    pub(super) stop: CancellationToken,
    /// Sockets close.
    pub(super) closed: CancellationToken,
    /// What is waited for at the end.
    pub(super) tasks: TaskTracker,
    /// Transactions that may be handled at a time.
    pub(super) work: Arc<Semaphore>,
    /// New calls are refused.
    pub(super) draining: AtomicBool,
    /// Others had better send none: OPTIONS is told so, and nothing is registered.
    pub(super) leaving: watch::Sender<bool>,
    /// Registrars that were told of this gateway, and not yet that it is gone.
    pub(super) registered: watch::Sender<usize>,
    /// A task that must live as long as the endpoint has ended.
    pub(super) broken: Arc<AtomicBool>,
}

impl Life {
    /// Begun; `closed` closes the sockets, and so many transactions are handled at a time.
    pub(super) fn new(closed: CancellationToken, transactions: usize) -> Self {
        Self {
            stop: CancellationToken::new(),
            closed,
            tasks: TaskTracker::new(),
            work: Arc::new(Semaphore::new(transactions)),
            draining: AtomicBool::new(false),
            leaving: watch::Sender::new(false),
            registered: watch::Sender::new(0),
            broken: Arc::new(AtomicBool::new(false)),
        }
    }
}

/// Where we are.
#[derive(Clone, Debug)]
pub(super) struct Here {
    pub(super) bound: Bound,
    /// Where media listens.
    pub(super) media_bind: IpAddr,
    /// What others are told in place of it.
    pub(super) public_ip: Option<IpAddr>,
    /// The same for peers of some networks.
    pub(super) public_ips: Vec<PublicIp>,
}

impl Here {
    /// Where `peer` reaches a listener at `bound`; `None`: any other host.
    fn advertised(&self, bound: IpAddr, peer: Option<IpAddr>) -> IpAddr {
        let seen =
            peer.into_iter().flat_map(|peer| self.public_ips.iter().filter(move |one| one.network.contains(peer)));
        if let Some(narrowest) = seen.max_by_key(|one| one.network.prefix()) {
            return narrowest.ip;
        }
        if let Some(public) = self.public_ip.filter(|_| !peer.is_some_and(|p| p.is_loopback())) {
            return public;
        }
        if !bound.is_unspecified() {
            return bound;
        }
        peer.and_then(route).unwrap_or(IpAddr::V4(Ipv4Addr::LOCALHOST))
    }
}

/// The carriers and exchanges: what is known of each, by its place in the configuration.
pub(super) struct Trunks {
    pub(super) states: Mutex<Vec<State>>,
    /// What goes out through each.
    pub(super) quotas: Quotas,
    /// Whose addresses are whose.
    pub(super) carriers: Carriers,
    /// Where their hosts are.
    pub(super) routes: Routes,
}

/// Where the listeners are.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Bound {
    pub(super) udp: Option<SocketAddr>,
    pub(super) tcp: Option<SocketAddr>,
    pub(super) tls: Option<SocketAddr>,
    pub(super) ws: Option<SocketAddr>,
    pub(super) wss: Option<SocketAddr>,
}

impl Bound {
    /// All of them.
    pub(super) fn all(&self) -> impl Iterator<Item = SocketAddr> {
        [self.udp, self.tcp, self.tls, self.ws, self.wss].into_iter().flatten()
    }
}

/// State of a trunk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TrunkStatus {
    /// Its name.
    pub name: String,
    /// `None` when it is not to register; else whether it is registered now.
    pub registered: Option<bool>,
    /// Whether a host of it answers OPTIONS; `None`: none is sent, or none was answered yet.
    pub up: Option<bool>,
    /// Its hosts.
    pub targets: Vec<TargetStatus>,
    /// What went wrong last with the registration, while it is wrong.
    pub error: Option<String>,
}

/// What is known of a trunk while running.
#[derive(Debug)]
pub(super) struct State {
    pub(super) name: String,
    pub(super) registered: Option<bool>,
    pub(super) error: Option<String>,
    pub(super) targets: Targets,
}

impl State {
    pub(super) fn new(config: &TrunkConfig) -> State {
        let registered = config.register.then_some(false);
        State { name: config.name.clone(), registered, error: None, targets: Targets::new(config) }
    }

    pub(super) fn status(&self, now: Instant) -> TrunkStatus {
        TrunkStatus {
            name: self.name.clone(),
            registered: self.registered,
            up: self.targets.is_up(),
            targets: self.targets.status(now),
            error: self.error.clone(),
        }
    }

    /// Whether calls can be expected to get through: registered where that is wanted, and answering where that is asked.
    pub(super) fn is_usable(&self) -> bool {
        self.registered != Some(false) && self.targets.is_up() != Some(false)
    }
}

/// An INVITE under way; another copy of it is refused while this lives.
pub(super) struct Once<'a> {
    invites: &'a Mutex<HashSet<String>>,
    key: String,
}

impl Drop for Once<'_> {
    fn drop(&mut self) {
        lock(self.invites).remove(&self.key);
    }
}

impl Shared {
    /// Calls out.
    pub(super) async fn dial(&self, request: DialRequest, progress: Progress) -> Dialled {
        match self.calls.dialer.get() {
            Some(dialer) => dialer(request, progress).await,
            None => Err(DialError::Sip(SipError::Closed)),
        }
    }

    pub(super) fn is_draining(&self) -> bool {
        self.life.draining.load(Ordering::Relaxed)
    }

    /// Whether a new call would be taken.
    pub(super) fn admission(&self) -> Admission {
        if self.is_draining() {
            return Admission::Closed { retry_after: RESTART, elsewhere: None };
        }
        self.beside.neighbours.as_ref().map_or(Admission::Open, |neighbours| neighbours.admission())
    }

    /// What who asks is told of [`Shared::admission`]: in the notice before a drain calls are taken still.
    pub(super) fn advertised(&self) -> Admission {
        if *self.life.leaving.borrow() {
            return Admission::Closed { retry_after: RESTART, elsewhere: None };
        }
        self.admission()
    }

    /// Whether this gateway registers at `trunk`.
    pub(super) fn registers(&self, trunk: &str) -> bool {
        if *self.life.leaving.borrow() {
            return false;
        }
        self.beside.neighbours.as_ref().is_none_or(|neighbours| neighbours.registers(trunk))
    }

    /// `[sip]` as it is in force.
    pub(super) fn config(&self) -> Arc<SipConfig> {
        self.settings.get()
    }

    /// The rules for calls out, of [`Shared::config`].
    pub(super) fn dialplan<'a>(&self, config: &'a SipConfig) -> Dialplan<'a> {
        let addresses = self.here.bound.all().map(|address| address.ip());
        Dialplan { config, local: dialplan::all_loopback(addresses) }
    }

    /// What is negotiated where no trunk says otherwise.
    pub(super) fn policy(&self) -> sdp::Policy {
        let codecs = self.config().codecs.iter().map(|c| c.codec()).collect();
        sdp::Policy { codecs, ..sdp::Policy::default() }
    }

    /// The session interval that we ask for, in seconds; `None`: none.
    pub(super) fn session_wish(&self, trunk: Option<&TrunkConfig>) -> Option<u64> {
        let own = trunk.and_then(|trunk| trunk.session_expires_s);
        Some(own.unwrap_or(self.config().session_expires_s)).filter(|seconds| *seconds > 0)
    }

    /// Marks an INVITE as under way. `None`: it is already.
    pub(super) fn once(&self, invite: &Request) -> Option<Once<'_>> {
        let call_id = invite.call_id_header().ok()?.value();
        let from = invite.from_header().ok()?.value();
        let key = format!("{call_id}\n{from}\n{}", invite.cseq_header().ok()?.value());
        let invites = &self.calls.invites;
        lock(invites).insert(key.clone()).then(|| Once { invites, key })
    }

    /// The trunk that `ip` belongs to: it is known by its address, and cannot know a password of ours.
    pub(super) fn trunk_at(&self, ip: IpAddr) -> Option<Trunk> {
        let (index, config) = (self.trunks.carriers.find(ip)?, self.config());
        (index < config.trunk.len()).then_some(Trunk { config, index })
    }

    /// What is agreed, less the addresses that `peer` may not name: media waits for what comes from it then.
    pub(super) fn reachable(&self, mut agreed: Agreed, peer: Peer) -> Agreed {
        let allowed = |address: &SocketAddr| self.naming.allows(peer.signalling, address.ip());
        agreed.remote_rtp = agreed.remote_rtp.filter(allowed);
        agreed.remote_rtcp = agreed.remote_rtcp.filter(allowed);
        agreed
    }

    /// Reads or changes what is known of a trunk.
    pub(super) fn trunk_state<T>(&self, index: usize, with: impl FnOnce(&mut State) -> T) -> Option<T> {
        lock(&self.trunks.states).get_mut(index).map(with)
    }

    /// Where `peer` sends media.
    pub(super) fn media_ip(&self, peer: IpAddr) -> IpAddr {
        self.here.advertised(self.here.media_bind, Some(peer))
    }

    /// Our address for requests in a dialog.
    pub(super) fn contact(&self, user: Option<&str>, transport: Transport, peer: Option<IpAddr>) -> Uri {
        let all = self.here.bound;
        let bound = match transport {
            Transport::Tcp => all.tcp,
            Transport::Tls => all.tls,
            Transport::Ws => all.ws,
            Transport::Wss => all.wss,
            _ => all.udp,
        };
        let bound = bound.or_else(|| all.all().next());
        let bound = bound.unwrap_or_else(|| SocketAddr::from((Ipv4Addr::LOCALHOST, 5060)));
        let address = self.reached(bound, peer);
        let params = if transport == Transport::Udp { vec![] } else { vec![Param::Transport(transport)] };
        Uri {
            scheme: Some(Scheme::Sip),
            auth: Some(Auth { user: user.unwrap_or("antiphon").to_owned(), password: None }),
            host_with_port: address.into(),
            params,
            headers: vec![],
        }
    }

    /// Where `peer` reaches a listener; `None`: any other host.
    pub(super) fn reached(&self, bound: SocketAddr, peer: Option<IpAddr>) -> SocketAddr {
        SocketAddr::new(self.here.advertised(bound.ip(), peer), bound.port())
    }

    /// The address behind a URI.
    pub(super) async fn resolve(&self, uri: &Uri) -> Option<IpAddr> {
        let target = SipAddr::try_from(uri).ok()?;
        if let Host::IpAddr(ip) = target.addr.host {
            return Some(ip);
        }
        let resolver = &self.stack.transport_layer.inner.domain_resolver;
        let found = timeout(LOOK_UP, resolver.resolve(&target)).await.ok()?.ok()?;
        found.get_socketaddr().ok().map(|address| address.ip())
    }
}

/// Addresses of a host with or without a port.
pub(super) async fn look_up(host: &str) -> Vec<IpAddr> {
    let Ok(host) = HostWithPort::try_from(host) else { return Vec::new() };
    if let Host::IpAddr(ip) = host.host {
        return vec![ip];
    }
    let name = (host.host.to_string(), 0);
    match timeout(LOOK_UP, tokio::net::lookup_host(name)).await {
        Ok(Ok(addresses)) => addresses.map(|address| address.ip()).take(16).collect(),
        _ => Vec::new(),
    }
}

/// The address of ours that packets to `peer` leave from. Connecting a UDP socket sends nothing.
fn route(peer: IpAddr) -> Option<IpAddr> {
    let any: SocketAddr = if peer.is_ipv4() { "0.0.0.0:0" } else { "[::]:0" }.parse().ok()?;
    let socket = StdUdpSocket::bind(any).ok()?;
    socket.connect((peer, 9)).ok()?;
    socket.local_addr().ok().map(|address| address.ip())
}

pub(super) fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    // Nothing in this module panics while it holds one, and what they guard is sound after every step.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_network_is_told_the_address_that_it_sees() {
        let config: SipConfig = toml::from_str(
            r#"
            public_ip = "203.0.113.7"
            public_ips = [
                { network = "10.0.0.0/8", ip = "10.1.2.3" },
                { network = "10.9.0.0/16", ip = "10.9.0.4" },
                { network = "2001:db8::/32", ip = "2001:db8::1" },
            ]
            "#,
        )
        .expect("valid");
        let ip = |text: &str| text.parse::<IpAddr>().expect("an address");
        let here = Here {
            bound: Bound::default(),
            media_bind: ip("0.0.0.0"),
            public_ip: config.public_ip,
            public_ips: config.public_ips,
        };
        for (peer, told) in [
            ("198.51.100.1", "203.0.113.7"),
            ("10.7.7.7", "10.1.2.3"),
            ("10.9.7.7", "10.9.0.4"),
            ("::ffff:10.9.7.7", "10.9.0.4"),
            ("2001:db8::9", "2001:db8::1"),
        ] {
            assert_eq!(here.advertised(here.media_bind, Some(ip(peer))), ip(told), "{peer}");
        }
        assert_eq!(here.advertised(here.media_bind, None), ip("203.0.113.7"));
        assert!(here.advertised(ip("127.0.0.1"), Some(ip("127.0.0.1"))).is_loopback());
    }
}
