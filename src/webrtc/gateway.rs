//! The sessions: answered, trickled to, restarted, ended.
//!
//! Owns the port and the table of sessions. Every session has one keeper, a task on the control runtime that waits
//! for its end, on whichever side it begins, and then closes the connection and forgets the session; no other path does.
//!
//! # Why
//! A connection that is dropped but not closed keeps its driver for ever, so closing may not depend on a caller
//! that can be cancelled, such as an HTTP handler whose client has gone.

use std::collections::HashMap;
use std::fmt;
use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, RwLock};

use ::webrtc::error::Error;
use ::webrtc::peer_connection::RTCCertificate;
use ::webrtc::peer_connection::crypto::{SignatureScheme, default_provider};
use rtc::peer_connection::certificate::CertificateParams;
use rtc::peer_connection::transport::RTCDtlsTransportState;
use tokio::runtime::Handle;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, TryAcquireError, watch};
use tokio::time::Instant;

use super::negotiate::{Common, Connection};
use super::offer::{MAX_CANDIDATES, Offer};
use super::socket::{Port, Seat, advertised};
use super::trickle::{Fragment, restart_answer};
use super::{IceServer, WebRtcConfig, WebRtcError};
use crate::handover::Place;
use crate::media::leg::LegEnd;
use crate::media::webrtc::{Driver, Heir, Progress, WebRtcLeg};
use crate::node::fresh_id;

/// Names a session in URLs; not guessable.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct SessionId(Arc<str>);

impl SessionId {
    /// The id as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl From<&str> for SessionId {
    fn from(text: &str) -> Self {
        Self(text.into())
    }
}

impl fmt::Display for SessionId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// A session that waits for its peer.
pub struct Answered {
    /// Its name.
    pub id: SessionId,
    /// The answer, complete with candidates.
    pub sdp: String,
    /// The entity tag of its ICE credentials, quoted.
    pub etag: String,
    /// Its media. Dropping it ends the session.
    pub leg: WebRtcLeg,
}

/// A session that waits for its peer, and whose leg its call has.
pub struct Succeeded {
    /// Its name.
    pub id: SessionId,
    /// As [`Answered::sdp`].
    pub sdp: String,
    /// As [`Answered::etag`].
    pub etag: String,
}

/// What a fragment did.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Patched {
    /// Its candidates were taken.
    Trickled,
    /// ICE restarted: our new credentials as an SDP fragment, and their entity tag.
    Restarted {
        /// `application/trickle-ice-sdpfrag`.
        fragment: String,
        /// Quoted.
        etag: String,
    },
}

/// All browser sessions. Clones mean the same gateway.
#[derive(Clone)]
pub struct Gateway(Arc<Inner>);

struct Inner {
    config: WebRtcConfig,
    /// Those that peers are told about.
    ice_servers: RwLock<Arc<[IceServer]>>,
    common: Common,
    port: Port,
    runtime: Handle,
    room: Arc<Semaphore>,
    sessions: Mutex<HashMap<SessionId, Arc<Session>>>,
}

struct Session {
    id: SessionId,
    /// Who asked for it, for those who check that.
    owner: Arc<str>,
    seat: Arc<Seat>,
    progress: watch::Sender<Progress>,
    driver: Driver,
    /// Where a leg is put that is to follow this session's; set once that has been made.
    heir: OnceLock<Heir>,
    /// Locked across a negotiation: two restarts at a time would mix their credentials.
    negotiated: tokio::sync::Mutex<Negotiated>,
    /// Ends with the keeper.
    closed: watch::Sender<bool>,
}

struct Negotiated {
    connection: Connection,
    /// The offer in force; `None` before the first.
    offer: Option<Offer>,
    generation: u32,
    candidates: usize,
}

impl Gateway {
    /// Binds the port. Must run on the control runtime, which then reads it.
    ///
    /// # Errors
    /// The port is taken, or the configuration asks for what is not there.
    pub async fn start(config: WebRtcConfig) -> Result<Self, WebRtcError> {
        Self::start_at(config, &Place::default()).await
    }

    /// As [`Gateway::start`], with the sockets of `place` where it has some, and beside the gateway before or after this one.
    ///
    /// # Errors
    /// As there.
    pub async fn start_at(config: WebRtcConfig, place: &Place) -> Result<Self, WebRtcError> {
        if config.max_sessions == 0 || config.connect_timeout_s == 0 {
            let message = "[webrtc] max_sessions and connect_timeout_s must be at least 1";
            return Err(WebRtcError::Config(message.to_owned()));
        }
        let address = SocketAddr::new(config.bind_ip(), config.bind_port);
        // `::` carries both families, everything else its own.
        let carried = |ip: IpAddr| ip.is_ipv4() == address.is_ipv4() || address.ip() == Ipv6Addr::UNSPECIFIED;
        if !config.public_ip.iter().all(|ip| carried(*ip)) {
            let message =
                "[webrtc] public_ip has an address of another family than bind_ip: set bind_ip = \"::\" for both";
            return Err(WebRtcError::Config(message.to_owned()));
        }
        let relay = config.relay().map_err(|error| WebRtcError::Config(format!("[webrtc] turn: {error}")))?;
        let crypto = default_provider().map_err(|error| Error::Crypto(error.to_string()))?;
        let certificate = certificate(&*crypto)?;
        let bind = |source| WebRtcError::Bind { port: config.bind_port, source };
        let port = Port::bind(address, config.tcp, crypto.clone(), place).map_err(bind)?;
        let local = port.local_addr();
        let advertised = advertised(local, &config.public_ip).map_err(bind)?;
        tracing::info!(%local, ?advertised, "WebRTC port open");
        Ok(Self(Arc::new(Inner {
            common: Common { crypto, certificate, local, advertised, tcp: config.tcp, dtx: config.dtx, relay },
            port,
            runtime: Handle::current(),
            room: Arc::new(Semaphore::new(config.max_sessions)),
            sessions: Mutex::default(),
            ice_servers: RwLock::new(config.ice_servers.as_slice().into()),
            config,
        })))
    }

    /// Answers an offer: a new session, and its leg.
    ///
    /// # Errors
    /// [`WebRtcError::BadOffer`] says what to change; [`WebRtcError::Full`] to come back later.
    pub async fn answer(&self, offer: &str) -> Result<Answered, WebRtcError> {
        self.answer_for(offer, "".into()).await
    }

    /// As [`Gateway::answer`], for `owner`, whom [`Gateway::owner`] then tells.
    ///
    /// # Errors
    /// As there.
    pub async fn answer_for(&self, offer: &str, owner: Arc<str>) -> Result<Answered, WebRtcError> {
        let offer = Offer::read(offer)?;
        let full = |reason| match reason {
            TryAcquireError::NoPermits => WebRtcError::Full(self.0.config.max_sessions),
            TryAcquireError::Closed => WebRtcError::Closing,
        };
        let place = self.0.room.clone().try_acquire_owned().map_err(full)?;
        // A task of its own: the caller may be cancelled half way, the session must not be.
        let inner = self.0.clone();
        let answered = self.0.runtime.spawn(async move { inner.establish(offer, owner, place).await }).await;
        answered.unwrap_or_else(|_| Err(WebRtcError::BadOffer("the offer cannot be answered".to_owned())))
    }

    /// Answers the offer of a new connection on which the call of session `id` goes on: the session it gives takes that one's
    /// place as soon as it has connected, and its leg is the call's already.
    ///
    /// # Errors
    /// As [`Gateway::answer`], and no such session.
    pub async fn succeed(&self, id: &SessionId, offer: &str) -> Result<Succeeded, WebRtcError> {
        let session = self.session(id)?;
        let heir = session.heir.get().ok_or(WebRtcError::NoSession)?;
        let Answered { id, sdp, etag, leg } = self.answer_for(offer, session.owner.clone()).await?;
        // A leg that is refused is dropped, which ends its session.
        heir.put(leg).map_err(|_| WebRtcError::NoSession)?;
        Ok(Succeeded { id, sdp, etag })
    }

    /// Takes the candidates of an SDP fragment, or restarts ICE when it has new credentials.
    /// `if_match` is the entity tag that the peer knows, or `*`.
    ///
    /// # Errors
    /// No such session, a stale tag, or a fragment that cannot be read.
    pub async fn patch(&self, id: &SessionId, if_match: &str, fragment: &str) -> Result<Patched, WebRtcError> {
        let session = self.session(id)?;
        let fragment = Fragment::read(fragment)?;
        let mut negotiated = session.negotiated.lock().await;
        let current = etag(id, negotiated.generation);
        if if_match != "*" && !if_match.split(',').any(|tag| tag.trim().trim_start_matches("W/") == current) {
            return Err(WebRtcError::Stale { current });
        }
        let Some(offer) = &negotiated.offer else { return Err(WebRtcError::NoSession) };
        match fragment.credentials {
            Some((ufrag, pwd)) if (&ufrag, &pwd) != (&offer.fragment, &offer.password) => {
                let mut offer = offer.restarted(&ufrag, &pwd);
                offer.candidates = fragment.candidates;
                let local = negotiated.connection.answer(&self.0.common, &offer).await?;
                session.seat.credentials(&local.fragment, &local.password, offer.credentials());
                negotiated.candidates = offer.candidates.len();
                negotiated.offer = Some(offer);
                negotiated.generation += 1;
                let fragment =
                    restart_answer(&local.fragment, &local.password, &local.mid, local.candidates.into_iter());
                Ok(Patched::Restarted { fragment, etag: etag(id, negotiated.generation) })
            }
            _ => {
                negotiated.trickle(&self.0.common, &fragment.candidates).await?;
                Ok(Patched::Trickled)
            }
        }
    }

    /// Takes single candidates, for peers that send them as JSON.
    ///
    /// # Errors
    /// No such session, or a candidate that cannot be read.
    pub async fn trickle(&self, id: &SessionId, candidates: &[String]) -> Result<(), WebRtcError> {
        let session = self.session(id)?;
        session.negotiated.lock().await.trickle(&self.0.common, candidates).await
    }

    /// Negotiates an existing session anew: a peer that changes its tracks or restarts ICE by a whole offer.
    ///
    /// # Errors
    /// No such session, or [`WebRtcError::BadOffer`].
    pub async fn renegotiate(&self, id: &SessionId, offer: &str) -> Result<String, WebRtcError> {
        let offer = Offer::read(offer)?;
        let session = self.session(id)?;
        let mut negotiated = session.negotiated.lock().await;
        if let Some(codec) = negotiated.offer.as_ref().map(|old| old.codec).filter(|codec| *codec != offer.codec) {
            let spoken = codec.label();
            let message =
                format!("the session speaks {spoken}, which the offer lacks or has beside a better one: keep to it");
            return Err(WebRtcError::BadOffer(message));
        }
        let local = negotiated.connection.answer(&self.0.common, &offer).await?;
        session.seat.credentials(&local.fragment, &local.password, offer.credentials());
        let restarted = negotiated
            .offer
            .as_ref()
            .is_none_or(|old| (&old.fragment, &old.password) != (&offer.fragment, &offer.password));
        if restarted {
            negotiated.generation += 1;
            negotiated.candidates = offer.candidates.len();
        }
        negotiated.offer = Some(offer);
        Ok(local.sdp)
    }

    /// Ends a session for its peer; `false` if there is none. Returns when it is closed.
    pub async fn delete(&self, id: &SessionId) -> bool {
        let Some(session) = self.0.lock().get(id).cloned() else { return false };
        Progress::advance(&session.progress, Progress::Ended(LegEnd::Remote));
        session.closed().await;
        true
    }

    /// Where the port is bound.
    pub fn local_addr(&self) -> SocketAddr {
        self.0.port.local_addr()
    }

    /// For whom a session was made; `None` when there is no such session.
    pub fn owner(&self, id: &SessionId) -> Option<Arc<str>> {
        self.0.lock().get(id).map(|session| session.owner.clone())
    }

    /// Sessions in progress.
    pub fn count(&self) -> usize {
        self.0.lock().len()
    }

    /// STUN and TURN servers that peers are told about.
    pub fn ice_servers(&self) -> Arc<[IceServer]> {
        self.0.ice_servers.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Tells peers about others from now on.
    pub fn tell_ice_servers(&self, servers: &[IceServer]) {
        *self.0.ice_servers.write().unwrap_or_else(PoisonError::into_inner) = servers.into();
    }

    /// Ends all sessions and answers no more.
    pub async fn shutdown(&self) {
        self.0.room.close();
        let sessions: Vec<Arc<Session>> = self.0.lock().values().cloned().collect();
        for session in &sessions {
            Progress::advance(&session.progress, Progress::Ended(LegEnd::Local));
        }
        for session in &sessions {
            session.closed().await;
        }
        self.0.port.close();
    }

    fn session(&self, id: &SessionId) -> Result<Arc<Session>, WebRtcError> {
        let session = self.0.lock().get(id).cloned();
        session.filter(|session| session.progress.borrow().ended().is_none()).ok_or(WebRtcError::NoSession)
    }
}

impl Inner {
    fn lock(&self) -> MutexGuard<'_, HashMap<SessionId, Arc<Session>>> {
        // Insertion and removal leave no half state behind a panic.
        self.sessions.lock().unwrap_or_else(PoisonError::into_inner)
    }

    async fn establish(
        self: Arc<Self>,
        offer: Offer,
        owner: Arc<str>,
        place: OwnedSemaphorePermit,
    ) -> Result<Answered, WebRtcError> {
        let seat = Arc::new(self.port.open(self.common.relay.as_ref().map(|(server, _)| server)));
        let connection = Connection::build(&self.common, seat.clone(), offer.codec).await?;
        let session = Arc::new(Session {
            id: SessionId(fresh_id(self.config.node.as_ref()).into()),
            owner,
            seat,
            progress: connection.progress.clone(),
            driver: connection.driver.clone(),
            heir: OnceLock::new(),
            negotiated: tokio::sync::Mutex::new(Negotiated { connection, offer: None, generation: 0, candidates: 0 }),
            closed: watch::Sender::new(false),
        });
        self.lock().insert(session.id.clone(), session.clone());
        metrics::gauge!("antiphon_webrtc_sessions").increment(1);
        tokio::spawn(self.clone().keep(session.clone(), place));
        // From here on, every way out ends the session.
        let unfinished = Unfinished(&session.progress);
        let mut negotiated = session.negotiated.lock().await;
        let local = negotiated.connection.answer(&self.common, &offer).await?;
        session.seat.credentials(&local.fragment, &local.password, offer.credentials());
        let leg = WebRtcLeg::new(negotiated.connection.parts(&offer).await?);
        let _ = session.heir.set(leg.heir());
        negotiated.candidates = offer.candidates.len();
        negotiated.offer = Some(offer);
        unfinished.disarm();
        let id = session.id.clone();
        Ok(Answered { etag: etag(&id, negotiated.generation), sdp: local.sdp, id, leg })
    }

    /// Waits for the end of a session and cleans up behind it.
    async fn keep(self: Arc<Self>, session: Arc<Session>, place: OwnedSemaphorePermit) {
        let mut seen = session.progress.subscribe();
        let deadline = Instant::now() + self.config.connect_timeout();
        let end = loop {
            let now = *seen.borrow_and_update();
            if let Some(end) = now.ended() {
                break end;
            }
            tokio::select! {
                // The session holds a sender, so this does not fail; were it to, the loop ends as failed.
                changed = seen.changed() => if changed.is_err() { break LegEnd::Failed },
                () = tokio::time::sleep_until(deadline), if now == Progress::Connecting => {
                    tracing::info!(session = %session.id, "a WebRTC session never connected");
                    Progress::advance(&session.progress, Progress::Ended(LegEnd::Failed));
                }
                // Nothing would ever move again: the stack gave up, or panicked.
                () = session.driver.ended() => {
                    Progress::advance(&session.progress, Progress::Ended(LegEnd::Failed));
                }
                () = session.seat.alerted() => if session.closed_by_peer().await {
                    Progress::advance(&session.progress, Progress::Ended(LegEnd::Remote));
                },
            }
        };
        let negotiated = session.negotiated.lock().await;
        if let Err(error) = negotiated.connection.peer.close().await {
            tracing::debug!(%error, session = %session.id, "closing a WebRTC connection");
        }
        drop(negotiated);
        session.seat.leave();
        drop(place);
        self.lock().remove(&session.id);
        session.closed.send_replace(true);
        metrics::gauge!("antiphon_webrtc_sessions").decrement(1);
        metrics::counter!("antiphon_webrtc_sessions_total", "end" => label(end)).increment(1);
        tracing::debug!(session = %session.id, ?end, "WebRTC session over");
    }
}

impl Session {
    async fn closed(&self) {
        // The sender is in `self`, so the wait ends only with the keeper.
        let _ = self.closed.subscribe().wait_for(|closed| *closed).await;
    }

    /// Whether the peer has sent a DTLS `close_notify`. The stack has no event for it, but its transport knows.
    async fn closed_by_peer(&self) -> bool {
        let sender = self.negotiated.lock().await.connection.sender.clone();
        let Ok(Some(transport)) = sender.transport().await else { return false };
        matches!(transport.state().await, Ok(RTCDtlsTransportState::Closed | RTCDtlsTransportState::Failed))
    }
}

impl Negotiated {
    async fn trickle(&mut self, common: &Common, candidates: &[String]) -> Result<(), WebRtcError> {
        self.candidates += candidates.len();
        if self.candidates > MAX_CANDIDATES {
            return Err(WebRtcError::BadFragment(format!("more than {MAX_CANDIDATES} candidates")));
        }
        match self.connection.add_candidates(common, candidates).await {
            0 => Ok(()),
            malformed => Err(WebRtcError::BadFragment(format!("{malformed} of the candidates cannot be read"))),
        }
    }
}

/// Ends the session unless disarmed.
struct Unfinished<'a>(&'a watch::Sender<Progress>);

impl Unfinished<'_> {
    fn disarm(self) {
        std::mem::forget(self);
    }
}

impl Drop for Unfinished<'_> {
    fn drop(&mut self) {
        Progress::advance(self.0, Progress::Ended(LegEnd::Failed));
    }
}

fn label(end: LegEnd) -> &'static str {
    match end {
        LegEnd::Remote => "remote",
        LegEnd::Local => "local",
        LegEnd::Lost => "lost",
        LegEnd::Failed => "failed",
    }
}

fn etag(id: &SessionId, generation: u32) -> String {
    let short: String = id.as_str().chars().take(8).collect();
    format!("\"{short}-{generation}\"")
}

/// One for all sessions: making a key takes a millisecond, and browsers compare its fingerprint only.
fn certificate(
    crypto: &dyn ::webrtc::peer_connection::crypto::RTCCryptoProvider,
) -> Result<RTCCertificate, WebRtcError> {
    let parameters = CertificateParams::new(vec!["antiphon".to_owned()])
        .map_err(|error| Error::Other(format!("the DTLS certificate: {error}")))?;
    Ok(RTCCertificate::generate(crypto.crypto(), SignatureScheme::EcdsaP256Sha256, parameters)?)
}
