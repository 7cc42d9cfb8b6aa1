//! The endpoint: what it listens on, what it knows, and where each request goes.
//!
//! Owns the stack, the listeners and the limits. Calls have tasks of their own ([`super::session`],
//! [`super::inbound`]); this file only starts them. Contract: [`Endpoint::start`] fails or everything that
//! was configured is open; [`Endpoint::shutdown`] returns when every call has ended or a grace time is over.

use std::{
    future::{Future, poll_fn},
    net::SocketAddr,
    sync::{Arc, Mutex, Weak, atomic::Ordering},
    task::Poll,
    time::Duration,
};

use metrics::{counter, gauge};
use rsipstack::{
    EndpointBuilder,
    dialog::dialog_layer::DialogLayer,
    transaction::TransactionReceiver,
    transport::{SipConnection, TcpListenerConnection, TlsConfig as StackTls, udp::UdpConnection},
};
use tokio::{
    net::{TcpListener, UdpSocket},
    sync::{mpsc, oneshot},
    time::timeout,
};
use tokio_util::sync::{CancellationToken, DropGuard};
use tracing::{debug, info};

use super::{
    DialError, DialRequest, IncomingCall, RtpConfig, SipConfig, SipError,
    auth::Authenticator,
    cause::Farewells,
    door::Door,
    early::Provisional,
    inbound,
    inspect::Inspector,
    listen::{Guard, ScreenedUdp, StreamListener},
    names::{self, Carriers, Names, Naming},
    neighbours::{Addresses, Beside},
    outbound,
    parked::Parked,
    places::{HalfOpen, Places},
    quota::Quotas,
    reliable::Pending,
    reload, requests,
    resolve::{Directory, Families},
    routes::Routes,
    screen::MAX_MESSAGE,
    shared::{Bound, Calls, Dialer, Here, Life, Media, Settings, Shared, State, TrunkStatus, Trunks, lock},
    stateless::Stateless,
    tls, trunk,
    websocket::Origins,
};
use crate::{
    clock, fault,
    handover::{self, Kind, Name, Place},
    media::sip::{SipLeg, dtls::Identity, ports::PortPool},
};

/// Transactions handled at a time. Beyond it requests are dropped, and their senders repeat them.
const MAX_TRANSACTIONS: usize = 4_096;
/// How often it is looked whether the stack still reads.
const LOOK: Duration = Duration::from_millis(250);
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
        Self::start_beside(config, rtp, incoming, Beside::default()).await
    }

    /// As [`Endpoint::start`], beside other gateways.
    ///
    /// # Errors
    /// As there.
    pub async fn start_beside(
        config: SipConfig,
        rtp: RtpConfig,
        incoming: mpsc::Sender<IncomingCall>,
        beside: Beside,
    ) -> Result<Endpoint, SipError> {
        let listeners = Listeners::open(&config, &beside.place)?;
        let bound = listeners.bound;
        let media_bind = bound.all().next().map(|a| a.ip()).ok_or_else(|| {
            SipError::Config("[sip] has no listener: set one of udp, tcp, tls, ws and wss".to_owned())
        })?;
        let ports = PortPool::new(media_bind, rtp.port_min, rtp.port_max).ok_or_else(|| {
            SipError::Config(format!(
                "[rtp] port_min = {} and port_max = {} leave no even port with an odd one above it",
                rtp.port_min, rtp.port_max
            ))
        })?;
        reload::check(&config)?;

        let closed = CancellationToken::new();
        let addresses = bound.all().map(|address| address.ip());
        let parked = Parked::new(rand::random());
        let (naming, carriers) = (Naming::new(&config, addresses), Carriers::new(&config));
        let farewells = Farewells::default();
        let families = Families::of(bound.all().map(|address| address.ip()));
        let directory = Directory::new(beside.names.clone(), families);
        let stack = EndpointBuilder::new()
            .with_domain_resolver(Box::new(Names::new(directory.clone(), naming.clone(), carriers.clone())))
            .with_user_agent(AGENT)
            .with_cancel_token(closed.clone())
            .with_transport_inspector(Box::new(parked.clone()))
            .with_inspector(Box::new(Inspector {
                naming: naming.clone(),
                carriers: carriers.clone(),
                farewells: farewells.clone(),
            }))
            .build();
        if config.tls_roots.is_some() || config.trunk.iter().any(|t| t.transport.may_be_tls()) {
            tls::install_provider();
            let ca_certs = tls::roots(config.tls_roots.as_deref()).await?;
            stack.inner.transport_layer.set_tls_config(StackTls { ca_certs, ..StackTls::default() });
        }
        let life = Life::new(closed, MAX_TRANSACTIONS);
        let stop = life.stop.clone();
        let secret: [u8; 32] = rand::random();
        let identity = Identity::new().map_err(|why| SipError::Config(format!("no certificate for DTLS: {why}")))?;
        let door = Arc::new(Door::new(&config, carriers.clone()));
        let shared = Arc::new(Shared {
            stack: stack.inner.clone(),
            dialogs: DialogLayer::new(stack.inner.clone()),
            media: Media { ports, identity },
            places: Places::new(config.max_calls, config.half_open_per_source, !config.trunk.is_empty()),
            naming,
            auth: Authenticator::new(&config.realm, &config.users, &config.digest, secret, clock::now()),
            trunks: Trunks {
                states: Mutex::new(config.trunk.iter().map(State::new).collect()),
                quotas: Quotas::new(config.trunk.iter().map(|trunk| (trunk.name.clone(), trunk.limits()))),
                carriers,
                routes: Routes::new(directory),
            },
            incoming,
            calls: Calls { farewells, ..Calls::default() },
            here: Here { bound, media_bind, public_ip: config.public_ip, public_ips: config.public_ips.clone() },
            life,
            reliable: Pending::default(),
            beside,
            door,
            settings: Settings::new(config),
        });
        let weak = Arc::downgrade(&shared);
        let dialer: Dialer = Box::new(move |request, progress| {
            let shared = weak.upgrade();
            Box::pin(async move {
                let shared = shared.ok_or(SipError::Closed)?;
                outbound::dial(&shared, request, &|said: Provisional| progress(said.status())).await
            })
        });
        // It is set here only.
        shared.calls.dialer.set(dialer).ok();
        let requests = stack.incoming_transactions().map_err(stack_error)?;
        let dispatching = Vital { shared: shared.clone(), task: "dispatch" };
        listeners.serve(&shared, &stack, parked).await?;
        tokio::spawn(async move {
            let vital = dispatching;
            dispatch(vital.shared.clone(), requests).await;
        });
        for index in 0..shared.config().trunk.len() {
            shared.life.tasks.spawn(trunk::run(shared.clone(), index));
        }
        info!(udp = ?bound.udp, tcp = ?bound.tcp, tls = ?bound.tls, ws = ?bound.ws, wss = ?bound.wss, "SIP endpoint is up");
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
        tell: &(dyn Fn(Provisional) + Send + Sync),
    ) -> Result<SipLeg, DialError> {
        outbound::dial(&self.shared, request, tell).await.map(|(leg, _)| leg)
    }

    /// As [`Endpoint::dial_watched`]; where the called side sends sound before it answers, its leg goes to `early`, and
    /// `None` is what comes of the answer. That leg is connected with the answer, and over where there is none.
    ///
    /// # Errors
    /// As there.
    pub async fn dial_early(
        &self,
        request: DialRequest,
        tell: &(dyn Fn(Provisional) + Send + Sync),
        early: oneshot::Sender<SipLeg>,
    ) -> Result<Option<SipLeg>, DialError> {
        outbound::dial_early(&self.shared, request, tell, Some(early)).await.map(|(leg, _)| leg)
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
        self.shared.here.bound.udp
    }

    /// Where TCP is bound.
    pub fn local_tcp(&self) -> Option<SocketAddr> {
        self.shared.here.bound.tcp
    }

    /// Where WebSockets come in, plain and over TLS.
    pub fn local_ws(&self) -> (Option<SocketAddr>, Option<SocketAddr>) {
        (self.shared.here.bound.ws, self.shared.here.bound.wss)
    }

    /// Where TLS is bound.
    pub fn local_tls(&self) -> Option<SocketAddr> {
        self.shared.here.bound.tls
    }

    /// Calls up or being set up.
    pub fn calls(&self) -> usize {
        self.shared.places.taken()
    }

    /// Calls that were answered and wait for their ACK, the oldest first.
    pub fn half_open(&self) -> Vec<HalfOpen> {
        self.shared.places.half_open()
    }

    /// Whether a task has ended that calls cannot do without.
    pub fn is_broken(&self) -> bool {
        self.shared.life.broken.load(Ordering::Relaxed)
    }

    /// Where other hosts reach the listeners.
    pub fn addresses(&self) -> Addresses {
        let Bound { udp, tcp, tls, .. } = self.shared.here.bound;
        let at = |bound: Option<SocketAddr>| bound.map(|bound| self.shared.reached(bound, None));
        Addresses { udp: at(udp), tcp: at(tcp), tls: at(tls) }
    }

    /// State of each trunk, in the order of the configuration.
    pub fn trunks(&self) -> Vec<TrunkStatus> {
        let now = clock::now();
        let states = lock(&self.shared.trunks.states);
        // One that was removed has no name.
        states.iter().filter(|state| !state.name.is_empty()).map(|state| state.status(now)).collect()
    }

    /// Whether this `[sip]` could be taken up.
    ///
    /// # Errors
    /// What is wrong with it.
    pub fn check_settings(config: &SipConfig) -> Result<(), SipError> {
        reload::check(config)
    }

    /// Takes up what of another `[sip]` can change while calls go on; gives the keys that changed and wait for a restart.
    pub fn apply(&self, config: &SipConfig) -> Vec<String> {
        reload::apply(&self.shared, config)
    }

    /// Says to who asks by OPTIONS that no calls are taken, and withdraws registrations, or, with `false`, takes both back. Calls
    /// that come in are taken all the same.
    pub fn leave(&self, leaving: bool) {
        self.shared.life.leaving.send_if_modified(|now| std::mem::replace(now, leaving) != leaving);
    }

    /// Whether it leaves, and no registrar has this gateway any more.
    pub fn is_withdrawn(&self) -> bool {
        *self.shared.life.leaving.borrow() && *self.shared.life.registered.borrow() == 0
    }

    /// Waits, after [`Endpoint::leave`], until no registrar has this gateway, or has not answered in time.
    pub async fn withdrawn(&self) {
        // Who has taken this one's place has the registrations, too.
        if self.shared.beside.place.is_held() {
            let mut registered = self.shared.life.registered.subscribe();
            // The sender is in `shared`.
            let _ = timeout(trunk::WITHDRAWN, registered.wait_for(|count| *count == 0)).await;
        }
    }

    /// Answers new calls with 503 from now on; calls that are up go on.
    pub fn drain(&self) {
        self.shared.life.draining.store(true, Ordering::Relaxed);
    }

    /// Call-IDs of the calls that are up or being set up here.
    pub fn call_ids(&self) -> Vec<String> {
        let dialogs = &self.shared.dialogs;
        let known = dialogs.all_dialog_ids().into_iter().filter_map(|id| dialogs.get_dialog_with(&id));
        let mut ids: Vec<String> = known.map(|dialog| dialog.id().call_id).collect();
        // Those that have no dialog yet.
        ids.extend(lock(&self.shared.calls.invites).iter().filter_map(|key| key.lines().next()).map(str::to_owned));
        ids.extend(self.shared.calls.calling.ids());
        ids
    }

    /// Unregisters, ends every call with BYE, closes the listeners.
    pub async fn shutdown(&self) {
        self.drain();
        self.leave(true);
        self.withdrawn().await;
        self.shared.life.stop.cancel();
        self.shared.life.tasks.close();
        if timeout(GRACE, self.shared.life.tasks.wait()).await.is_err() {
            debug!("some SIP calls did not end in time");
        }
        self.shared.life.closed.cancel();
    }
}

/// Held by a task that must live as long as the endpoint: a task that drops it earlier, by ending or by a panic, breaks it.
struct Vital {
    shared: Arc<Shared>,
    task: &'static str,
}

impl Drop for Vital {
    fn drop(&mut self) {
        // A runtime that goes down drops its tasks, too; then nothing asks any more.
        if !self.shared.life.closed.is_cancelled() && !self.shared.life.stop.is_cancelled() {
            tracing::error!(task = self.task, "a task of the SIP endpoint has ended");
            self.shared.life.broken.store(true, Ordering::Relaxed);
        }
    }
}

/// Listeners that are bound and not yet served.
struct Listeners {
    bound: Bound,
    udp: Option<UdpSocket>,
    tcp: Option<TcpListener>,
    tls: Option<(TcpListener, tls::Tls)>,
    ws: Option<TcpListener>,
    wss: Option<(TcpListener, tls::Tls)>,
}

impl Listeners {
    fn open(config: &SipConfig, place: &Place) -> Result<Listeners, SipError> {
        let error = |address, transport| move |source| SipError::Listen { address, transport, source };
        let mut listeners = Listeners { bound: Bound::default(), udp: None, tcp: None, tls: None, ws: None, wss: None };
        if let Some(address) = config.udp {
            let socket = place.datagrams(Name::SipUdp, address, handover::datagrams).and_then(UdpSocket::from_std);
            let socket = socket.map_err(error(address, "udp"))?;
            listeners.bound.udp = socket.local_addr().ok();
            listeners.udp = Some(socket);
        }
        if let Some(address) = config.tcp {
            let listener = place.listener(Name::SipTcp, address, handover::listener).map_err(error(address, "tcp"))?;
            listeners.bound.tcp = listener.local_addr().ok();
            listeners.tcp = Some(listener);
        }
        if let Some(tls) = &config.tls {
            let secure = tls::Tls::open(&tls.cert, &tls.key)?;
            let listener = place.listener(Name::SipTls, tls.bind, handover::listener);
            let listener = listener.map_err(error(tls.bind, "tls"))?;
            listeners.bound.tls = listener.local_addr().ok();
            listeners.tls = Some((listener, secure.clone()));
            if let Some(address) = config.wss {
                let listener =
                    place.listener(Name::SipWss, address, handover::listener).map_err(error(address, "wss"))?;
                listeners.bound.wss = listener.local_addr().ok();
                listeners.wss = Some((listener, secure));
            }
        } else if config.wss.is_some() {
            return Err(SipError::Config("[sip] wss needs the certificate and key of [sip] tls".to_owned()));
        }
        if let Some(address) = config.ws {
            let listener = place.listener(Name::SipWs, address, handover::listener).map_err(error(address, "ws"))?;
            listeners.bound.ws = listener.local_addr().ok();
            listeners.ws = Some(listener);
        }
        Ok(listeners)
    }

    async fn serve(
        self,
        shared: &Arc<Shared>,
        stack: &rsipstack::transaction::Endpoint,
        parked: Parked,
    ) -> Result<(), SipError> {
        let (weak, config) = (Arc::downgrade(shared), shared.config());
        let guard = Guard {
            door: shared.door.clone(),
            stateless: Stateless {
                stack: stack.inner.clone(),
                secret: rand::random(),
                judge: Arc::new(move |request, source| inbound::judge(&*weak.upgrade()?, request, source)),
            },
            agent: AGENT.into(),
            broken: shared.life.broken.clone(),
        };
        let layer = &stack.inner.transport_layer;
        let public = |bound: Option<SocketAddr>| Some(SocketAddr::new(config.public_ip?, bound?.port()));
        if let Some(socket) = self.udp {
            let buffer = Mutex::new(vec![0; MAX_MESSAGE]);
            let away = Mutex::new(None);
            let (guard, place) = (guard.clone(), shared.beside.place.clone());
            let arrived = tokio::sync::Mutex::new(place.arrived(Kind::Sip));
            let socket = Arc::new(ScreenedUdp { socket, guard, place, arrived, parked, buffer, away });
            // Tracked, so that it ends with the endpoint.
            shared.life.tasks.spawn(watch_socket(shared.clone(), Arc::downgrade(&socket)));
            let external = public(self.bound.udp);
            let udp = UdpConnection::from_socket(socket, external, Some(shared.life.closed.clone()));
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
        let vital = Vital { shared: shared.clone(), task: "stack" };
        tokio::spawn(async move {
            let _vital = vital;
            serve.await.ok();
        });

        let origins = Origins::new(&config.ws_origins);
        let plain = self.tcp.map(|listener| (listener, None, None));
        let secure = self.tls.map(|(listener, acceptor)| (listener, Some(acceptor), None));
        let ws = self.ws.map(|listener| (listener, None, Some(origins.clone())));
        let wss = self.wss.map(|(listener, acceptor)| (listener, Some(acceptor), Some(origins)));
        for (listener, tls, websocket) in plain.into_iter().chain(secure).chain(ws).chain(wss) {
            let listener = StreamListener {
                listener,
                tls,
                websocket,
                guard: guard.clone(),
                stack: stack.inner.clone(),
                stop: shared.life.closed.clone(),
                place: shared.beside.place.clone(),
            };
            let vital = Vital { shared: shared.clone(), task: "listener" };
            tokio::spawn(async move {
                let _vital = vital;
                listener.run().await;
            });
        }
        Ok(())
    }
}

/// Looks whether the stack still reads from its socket. It does so in a task of its own, whose end it does not tell.
async fn watch_socket(shared: Arc<Shared>, socket: Weak<ScreenedUdp>) {
    let mut before = false;
    loop {
        tokio::select! {
            () = shared.life.stop.cancelled() => return,
            () = tokio::time::sleep(LOOK) => {}
        }
        let Some(socket) = socket.upgrade() else { return };
        // Twice, for a process that was stopped and goes on has not read either.
        let abandoned = socket.is_abandoned(clock::now());
        if abandoned && before && !shared.life.broken.swap(true, Ordering::Relaxed) {
            tracing::error!("nothing reads the SIP socket any more");
        }
        before = abandoned;
    }
}

/// Gives each request a task.
async fn dispatch(shared: Arc<Shared>, mut requests: TransactionReceiver) {
    loop {
        let tx = tokio::select! {
            () = shared.life.closed.cancelled() => return,
            tx = requests.recv() => tx,
        };
        let Some(tx) = tx else { return };
        fault::point("sip", shared.here.bound.udp.map_or(0, |udp| udp.port()));
        // overflow: drops (counted): the sender repeats its request
        let Ok(permit) = shared.life.work.clone().try_acquire_owned() else {
            counter!("antiphon_sip_messages_total", "outcome" => "overload").increment(1);
            continue;
        };
        let shared = shared.clone();
        tokio::spawn(async move {
            gauge!("antiphon_sip_transactions").increment(1.0);
            requests::handle(&shared, tx).await;
            gauge!("antiphon_sip_transactions").decrement(1.0);
            drop(permit);
        });
    }
}

fn stack_error(error: rsipstack::Error) -> SipError {
    SipError::Stack(error.to_string())
}
