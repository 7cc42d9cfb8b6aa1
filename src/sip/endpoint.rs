//! The endpoint: what it listens on, what it knows, and where each request goes.
//!
//! Owns the stack, the listeners and the limits. Calls have tasks of their own ([`super::session`],
//! [`super::inbound`]); this file only starts them. Contract: [`Endpoint::start`] fails or everything that
//! was configured is open; [`Endpoint::shutdown`] returns when every call has ended or a grace time is over.

use std::{
    collections::HashSet,
    future::{Future, poll_fn},
    net::{IpAddr, Ipv4Addr, SocketAddr, UdpSocket as StdUdpSocket},
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    task::Poll,
    time::Duration,
};

use metrics::{counter, gauge};
use rsipstack::{
    EndpointBuilder,
    dialog::{dialog::Dialog, dialog_layer::DialogLayer},
    sip::{
        Auth, Header, Host, HostWithPort, Method, Param, Request, Scheme, StatusCode, Transport, Uri,
        prelude::HeadersExt,
    },
    transaction::{Transaction, TransactionReceiver, endpoint::EndpointInner},
    transport::{SipAddr, SipConnection, TcpListenerConnection, TlsConfig as StackTls, udp::UdpConnection},
};
use sdp::Agreed;
use tokio::{
    net::{TcpListener, UdpSocket},
    sync::{Semaphore, mpsc},
    time::timeout,
};
use tokio_util::{
    sync::{CancellationToken, DropGuard},
    task::TaskTracker,
};
use tracing::{debug, info};

use super::{
    DialError, DialRequest, IncomingCall, RtpConfig, SipConfig, SipError, TrunkConfig,
    auth::Authenticator,
    body, config,
    dialplan::{self, Dialplan},
    inbound::{self, unsupported},
    inspect::Inspector,
    listen::{Gate, ScreenedUdp, StreamListener},
    names::{self, Carriers, LOOK_UP, Names, Naming},
    outbound,
    places::{HalfOpen, Places},
    quota::Quotas,
    tls,
    trunk::{self, State, TrunkStatus},
};
use crate::{
    clock,
    media::sip::{SipLeg, latch::Peer, ports::PortPool},
};

/// Transactions handled at a time. Beyond it requests are dropped, and their senders repeat them.
const MAX_TRANSACTIONS: usize = 4_096;
/// Time for calls to end at a shutdown.
const GRACE: Duration = Duration::from_secs(5);
/// `User-Agent` and `Server`.
const AGENT: &str = concat!("antiphon/", env!("CARGO_PKG_VERSION"));

/// The gateway's SIP side: listeners, registrations and the table of calls. Cheap to clone; when the last
/// clone is dropped, calls end and listeners close.
#[derive(Clone)]
pub struct Endpoint {
    shared: Arc<Shared>,
    _stop: Arc<DropGuard>,
}

/// What every task of the endpoint sees.
pub(super) struct Shared {
    pub(super) config: SipConfig,
    pub(super) stack: Arc<EndpointInner>,
    pub(super) dialogs: DialogLayer,
    pub(super) ports: PortPool,
    pub(super) places: Places,
    pub(super) naming: Naming,
    pub(super) carriers: Carriers,
    pub(super) auth: Authenticator,
    /// What goes out through each trunk.
    pub(super) quotas: Quotas,
    pub(super) incoming: mpsc::Sender<IncomingCall>,
    /// Calls and registrations end.
    pub(super) stop: CancellationToken,
    pub(super) tasks: TaskTracker,
    bound: Bound,
    media_bind: IpAddr,
    work: Arc<Semaphore>,
    trunks: Mutex<Vec<State>>,
    /// INVITEs under way, by Call-ID, From tag and CSeq.
    invites: Mutex<HashSet<String>>,
    draining: AtomicBool,
    /// Sockets close.
    closed: CancellationToken,
}

/// Where the listeners are.
#[derive(Clone, Copy, Debug, Default)]
struct Bound {
    udp: Option<SocketAddr>,
    tcp: Option<SocketAddr>,
    tls: Option<SocketAddr>,
}

impl Endpoint {
    /// Binds the listeners, starts registering, and sends each inbound call to `incoming`.
    ///
    /// Calls that find `incoming` full are answered 503.
    ///
    /// # Errors
    /// A listener cannot be opened or the configuration cannot work.
    pub async fn start(
        config: SipConfig,
        rtp: RtpConfig,
        incoming: mpsc::Sender<IncomingCall>,
    ) -> Result<Endpoint, SipError> {
        let listeners = Listeners::open(&config).await?;
        let bound = listeners.bound;
        let first = bound.udp.or(bound.tcp).or(bound.tls);
        let media_bind = first
            .map(|a| a.ip())
            .ok_or_else(|| SipError::Config("[sip] has no listener: set one of udp, tcp and tls".to_owned()))?;
        let ports = PortPool::new(media_bind, rtp.port_min, rtp.port_max).ok_or_else(|| {
            SipError::Config(format!(
                "[rtp] port_min = {} and port_max = {} leave no even port with an odd one above it",
                rtp.port_min, rtp.port_max
            ))
        })?;
        for (n, trunk) in config.trunk.iter().enumerate() {
            dialplan::registrar(trunk).map_err(|_| {
                SipError::Config(format!("[[sip.trunk]] `{}`: host `{}` is no host or address", trunk.name, trunk.host))
            })?;
            if config.trunk[..n].iter().any(|t| t.name == trunk.name) {
                return Err(SipError::Config(format!("two [[sip.trunk]] are named `{}`", trunk.name)));
            }
            if trunk.register && (trunk.username.is_none() || trunk.password.is_none()) {
                return Err(SipError::Config(format!(
                    "[[sip.trunk]] `{}`: register needs username and password",
                    trunk.name
                )));
            }
        }

        let closed = CancellationToken::new();
        let addresses = [bound.udp, bound.tcp, bound.tls].into_iter().flatten().map(|address| address.ip());
        let (naming, carriers) = (Naming::new(&config, addresses), Carriers::new(&config));
        let stack = EndpointBuilder::new()
            .with_domain_resolver(Box::new(Names::new(naming.clone(), carriers.clone())))
            .with_user_agent(AGENT)
            .with_cancel_token(closed.clone())
            .with_inspector(Box::new(Inspector { naming: naming.clone(), carriers: carriers.clone() }))
            .build();
        if config.tls_roots.is_some() || config.trunk.iter().any(|t| t.transport == config::Transport::Tls) {
            tls::install_provider();
            let ca_certs = tls::roots(config.tls_roots.as_deref()).await?;
            stack.inner.transport_layer.set_tls_config(StackTls { ca_certs, ..StackTls::default() });
        }
        let stop = CancellationToken::new();
        let secret: [u8; 32] = rand::random();
        let shared = Arc::new(Shared {
            stack: stack.inner.clone(),
            dialogs: DialogLayer::new(stack.inner.clone()),
            ports,
            places: Places::new(config.max_calls, config.half_open_per_source, !config.trunk.is_empty()),
            naming,
            carriers,
            auth: Authenticator::new(&config.realm, &config.users, secret, clock::now()),
            quotas: Quotas::new(&config.trunk),
            incoming,
            stop: stop.clone(),
            tasks: TaskTracker::new(),
            bound,
            media_bind,
            work: Arc::new(Semaphore::new(MAX_TRANSACTIONS)),
            trunks: Mutex::new(config.trunk.iter().map(State::new).collect()),
            invites: Mutex::default(),
            draining: AtomicBool::new(false),
            closed: closed.clone(),
            config,
        });
        let requests = stack.incoming_transactions().map_err(stack_error)?;
        listeners.serve(&shared, &stack).await?;
        tokio::spawn(dispatch(shared.clone(), requests));
        for index in 0..shared.config.trunk.len() {
            shared.tasks.spawn(trunk::keep(shared.clone(), index));
        }
        info!(udp = ?bound.udp, tcp = ?bound.tcp, tls = ?bound.tls, "SIP endpoint is up");
        Ok(Endpoint { shared, _stop: Arc::new(stop.drop_guard()) })
    }

    /// Calls out and waits for the answer. Dropping the future cancels the call.
    ///
    /// # Errors
    /// See [`DialError`].
    pub async fn dial(&self, request: DialRequest) -> Result<SipLeg, DialError> {
        self.dial_watched(request, &|_| ()).await
    }

    /// As [`Endpoint::dial`]; `tell` hears of what the called side says before it answers.
    ///
    /// # Errors
    /// As there.
    pub async fn dial_watched(
        &self,
        request: DialRequest,
        tell: &(dyn Fn(outbound::Provisional) + Send + Sync),
    ) -> Result<SipLeg, DialError> {
        outbound::dial(&self.shared, request, tell).await.map(|(leg, _)| leg)
    }

    /// Whether `request` can be tried at all, before anything is sent; gives the name of the trunk that would carry it.
    ///
    /// # Errors
    /// The address, the caller or a header cannot be used, or the dial plan forbids it.
    pub fn check(&self, request: &DialRequest) -> Result<Option<String>, DialError> {
        outbound::check(&self.shared, request)
    }

    /// Where UDP is bound.
    pub fn local_udp(&self) -> Option<SocketAddr> {
        self.shared.bound.udp
    }

    /// Where TCP is bound.
    pub fn local_tcp(&self) -> Option<SocketAddr> {
        self.shared.bound.tcp
    }

    /// Where TLS is bound.
    pub fn local_tls(&self) -> Option<SocketAddr> {
        self.shared.bound.tls
    }

    /// Calls up or being set up.
    pub fn calls(&self) -> usize {
        self.shared.places.taken()
    }

    /// Calls that were answered and wait for their ACK, the oldest first.
    pub fn half_open(&self) -> Vec<HalfOpen> {
        self.shared.places.half_open()
    }

    /// State of each trunk, in the order of the configuration.
    pub fn trunks(&self) -> Vec<TrunkStatus> {
        lock(&self.shared.trunks).iter().map(|state| state.status.clone()).collect()
    }

    /// Answers new calls with 503 from now on; calls that are up go on.
    pub fn drain(&self) {
        self.shared.draining.store(true, Ordering::Relaxed);
    }

    /// Ends every call with BYE, unregisters, closes the listeners.
    pub async fn shutdown(&self) {
        self.drain();
        self.shared.stop.cancel();
        self.shared.tasks.close();
        if timeout(GRACE, self.shared.tasks.wait()).await.is_err() {
            debug!("some SIP calls did not end in time");
        }
        self.shared.closed.cancel();
    }
}

/// Listeners that are bound and not yet served.
struct Listeners {
    bound: Bound,
    udp: Option<UdpSocket>,
    tcp: Option<TcpListener>,
    tls: Option<(TcpListener, tokio_rustls::TlsAcceptor)>,
}

impl Listeners {
    async fn open(config: &SipConfig) -> Result<Listeners, SipError> {
        let error = |address, transport| move |source| SipError::Listen { address, transport, source };
        let mut listeners = Listeners { bound: Bound::default(), udp: None, tcp: None, tls: None };
        if let Some(address) = config.udp {
            let socket = UdpSocket::bind(address).await.map_err(error(address, "udp"))?;
            listeners.bound.udp = socket.local_addr().ok();
            listeners.udp = Some(socket);
        }
        if let Some(address) = config.tcp {
            let listener = TcpListener::bind(address).await.map_err(error(address, "tcp"))?;
            listeners.bound.tcp = listener.local_addr().ok();
            listeners.tcp = Some(listener);
        }
        if let Some(tls) = &config.tls {
            let acceptor = tls::acceptor(&tls.cert, &tls.key)?;
            let listener = TcpListener::bind(tls.bind).await.map_err(error(tls.bind, "tls"))?;
            listeners.bound.tls = listener.local_addr().ok();
            listeners.tls = Some((listener, acceptor));
        }
        Ok(listeners)
    }

    async fn serve(self, shared: &Arc<Shared>, stack: &rsipstack::transaction::Endpoint) -> Result<(), SipError> {
        let gate = Gate(Arc::new(shared.config.allow.clone()));
        let layer = &stack.inner.transport_layer;
        let public = |bound: Option<SocketAddr>| Some(SocketAddr::new(shared.config.public_ip?, bound?.port()));
        if let Some(socket) = self.udp {
            let socket = Arc::new(ScreenedUdp { socket, gate: gate.clone(), agent: AGENT.to_owned() });
            let external = public(self.bound.udp);
            let udp = UdpConnection::from_socket(socket, external, Some(shared.closed.clone()));
            layer.add_transport(SipConnection::Udp(udp.await.map_err(stack_error)?));
        }
        let inner = stack.inner.clone();
        let mut serve = Box::pin(names::in_signalling(async move { inner.serve().await }));
        // The first poll makes the stack open what listeners it was given; the TCP one is ours, and is added
        // after that only so that the stack knows which address to write into Via and Contact.
        poll_fn(|context| {
            let _ = serve.as_mut().poll(context);
            Poll::Ready(())
        })
        .await;
        if let Some(address) = self.bound.tcp {
            let name = TcpListenerConnection::new(address, public(self.bound.tcp)).await.map_err(stack_error)?;
            layer.add_transport(SipConnection::TcpListener(name));
        }
        tokio::spawn(serve);

        let plain = self.tcp.map(|listener| (listener, None));
        let secure = self.tls.map(|(listener, acceptor)| (listener, Some(acceptor)));
        for (listener, tls) in plain.into_iter().chain(secure) {
            let listener = StreamListener {
                listener,
                tls,
                gate: gate.clone(),
                agent: AGENT.into(),
                stack: stack.inner.clone(),
                stop: shared.closed.clone(),
            };
            tokio::spawn(listener.run());
        }
        Ok(())
    }
}

/// Gives each request a task.
async fn dispatch(shared: Arc<Shared>, mut requests: TransactionReceiver) {
    loop {
        let tx = tokio::select! {
            () = shared.closed.cancelled() => return,
            tx = requests.recv() => tx,
        };
        let Some(tx) = tx else { return };
        // overflow: drops (counted): the sender repeats its request
        let Ok(permit) = shared.work.clone().try_acquire_owned() else {
            counter!("antiphon_sip_messages_total", "outcome" => "overload").increment(1);
            continue;
        };
        let shared = shared.clone();
        tokio::spawn(async move {
            gauge!("antiphon_sip_transactions").increment(1.0);
            handle(&shared, tx).await;
            gauge!("antiphon_sip_transactions").decrement(1.0);
            drop(permit);
        });
    }
}

async fn handle(shared: &Arc<Shared>, mut tx: Transaction) {
    let request = &tx.original;
    let in_dialog = request.to_header().ok().and_then(|to| to.tag().ok().flatten()).is_some();
    if in_dialog {
        return handle_in_dialog(shared, tx).await;
    }
    match request.method {
        Method::Invite => inbound::receive(shared, tx).await,
        Method::Options => {
            if let Some(extension) = unsupported(request) {
                let headers = vec![Header::Unsupported(extension.into())];
                return reply(&mut tx, StatusCode::BadExtension, headers).await;
            }
            let mut headers = body::capabilities();
            let status = if shared.is_draining() {
                headers.push(body::retry_after(inbound::RESTART));
                StatusCode::ServiceUnavailable
            } else {
                StatusCode::OK
            };
            reply(&mut tx, status, headers).await;
        }
        Method::Ack => {}
        // These belong to a dialog, and name none.
        Method::Bye | Method::Update | Method::Info | Method::PRack | Method::Cancel | Method::Notify => {
            reply(&mut tx, StatusCode::CallTransactionDoesNotExist, vec![]).await;
        }
        Method::Register | Method::Subscribe | Method::Publish | Method::Message | Method::Refer => {
            reply(&mut tx, StatusCode::MethodNotAllowed, vec![body::allow()]).await;
        }
    }
}

async fn handle_in_dialog(shared: &Shared, mut tx: Transaction) {
    let method = tx.original.method;
    let Some(Dialog::Invite(mut dialog)) = shared.dialogs.match_dialog(&tx) else {
        if method != Method::Ack {
            reply(&mut tx, StatusCode::CallTransactionDoesNotExist, vec![]).await;
        }
        return;
    };
    let later = || vec![body::retry_after(Duration::from_secs(2))];
    match method {
        Method::Message | Method::Subscribe | Method::Publish | Method::Register => {
            reply(&mut tx, StatusCode::MethodNotAllowed, vec![body::allow()]).await;
        }
        // We send no reliable provisional response that one could acknowledge.
        Method::PRack => reply(&mut tx, StatusCode::CallTransactionDoesNotExist, vec![]).await,
        // A second INVITE while the first is open (RFC 3261 section 14.2); the stack would not answer it.
        Method::Invite if !dialog.state().is_confirmed() => {
            reply(&mut tx, StatusCode::ServerInternalError, later()).await;
        }
        Method::Invite | Method::Update if unsupported(&tx.original).is_some() => {
            let extension = unsupported(&tx.original).unwrap_or_default();
            reply(&mut tx, StatusCode::BadExtension, vec![Header::Unsupported(extension.into())]).await;
        }
        _ => {
            if let Err(error) = dialog.handle(&mut tx).await {
                debug!(%method, %error, "request in a dialog ended badly");
            }
            // The stack leaves some without an answer: an old CSeq, or what comes before the ACK.
            if tx.last_response.is_none() && method != Method::Ack {
                reply(&mut tx, StatusCode::ServerInternalError, later()).await;
            }
        }
    }
}

/// Answers with a final response.
pub(super) async fn reply(tx: &mut Transaction, status: StatusCode, headers: Vec<Header>) {
    if let Err(error) = tx.reply_with(status, headers, None).await {
        debug!(%error, "a SIP response could not be sent");
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
    pub(super) fn is_draining(&self) -> bool {
        self.draining.load(Ordering::Relaxed)
    }

    /// The rules for calls out.
    pub(super) fn dialplan(&self) -> Dialplan<'_> {
        let Bound { udp, tcp, tls } = self.bound;
        let addresses = [udp, tcp, tls].into_iter().flatten().map(|address| address.ip());
        Dialplan { config: &self.config, local: dialplan::all_loopback(addresses) }
    }

    /// What is negotiated where no trunk says otherwise.
    pub(super) fn policy(&self) -> sdp::Policy {
        let codecs = self.config.codecs.iter().map(|c| c.codec()).collect();
        sdp::Policy { codecs, ..sdp::Policy::default() }
    }

    /// Marks an INVITE as under way. `None`: it is already.
    pub(super) fn once(&self, invite: &Request) -> Option<Once<'_>> {
        let call_id = invite.call_id_header().ok()?.value();
        let from = invite.from_header().ok()?.value();
        let key = format!("{call_id}\n{from}\n{}", invite.cseq_header().ok()?.value());
        lock(&self.invites).insert(key.clone()).then(|| Once { invites: &self.invites, key })
    }

    /// The trunk that `ip` belongs to: it is known by its address, and cannot know a password of ours.
    pub(super) fn trunk_at(&self, ip: IpAddr) -> Option<&TrunkConfig> {
        self.config.trunk.get(self.carriers.find(ip)?)
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
        lock(&self.trunks).get_mut(index).map(with)
    }

    /// Where `peer` sends media.
    pub(super) fn media_ip(&self, peer: IpAddr) -> IpAddr {
        self.advertised(self.media_bind, Some(peer))
    }

    /// Our address for requests in a dialog.
    pub(super) fn contact(&self, user: Option<&str>, transport: Transport, peer: Option<IpAddr>) -> Uri {
        let bound = match transport {
            Transport::Tcp => self.bound.tcp,
            Transport::Tls => self.bound.tls,
            _ => self.bound.udp,
        };
        let bound = bound.or(self.bound.udp).or(self.bound.tcp).or(self.bound.tls);
        let bound = bound.unwrap_or_else(|| SocketAddr::from((Ipv4Addr::LOCALHOST, 5060)));
        let address = SocketAddr::new(self.advertised(bound.ip(), peer), bound.port());
        let params = if transport == Transport::Udp { vec![] } else { vec![Param::Transport(transport)] };
        Uri {
            scheme: Some(Scheme::Sip),
            auth: Some(Auth { user: user.unwrap_or("antiphon").to_owned(), password: None }),
            host_with_port: address.into(),
            params,
            headers: vec![],
        }
    }

    fn advertised(&self, bound: IpAddr, peer: Option<IpAddr>) -> IpAddr {
        if let Some(public) = self.config.public_ip.filter(|_| !peer.is_some_and(|p| p.is_loopback())) {
            return public;
        }
        if !bound.is_unspecified() {
            return bound;
        }
        peer.and_then(route).unwrap_or(IpAddr::V4(Ipv4Addr::LOCALHOST))
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

    /// Addresses of a host with or without a port.
    pub(super) async fn look_up(&self, host: &str) -> Vec<IpAddr> {
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
}

/// The address of ours that packets to `peer` leave from. Connecting a UDP socket sends nothing.
fn route(peer: IpAddr) -> Option<IpAddr> {
    let any: SocketAddr = if peer.is_ipv4() { "0.0.0.0:0" } else { "[::]:0" }.parse().ok()?;
    let socket = StdUdpSocket::bind(any).ok()?;
    socket.connect((peer, 9)).ok()?;
    socket.local_addr().ok().map(|address| address.ip())
}

fn stack_error(error: rsipstack::Error) -> SipError {
    SipError::Stack(error.to_string())
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    // Nothing in this module panics while it holds one, and what they guard is sound after every step.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
