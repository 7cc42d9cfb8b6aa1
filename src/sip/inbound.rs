//! Calls that come in: from the INVITE to the answer.
//!
//! Each INVITE that may become a call has a task of its own while it rings. That task owns the dialog; the
//! application holds an [`IncomingCall`] and tells it what to do. The caller's CANCEL wins over an answer
//! that comes later, and an answer that was sent wins over a later CANCEL (RFC 3261 section 9.2).

use std::{
    collections::BTreeMap,
    net::{IpAddr, SocketAddr},
    sync::Arc,
    time::Duration,
};

use rsipstack::{
    dialog::{
        dialog::{DialogState, DialogStateReceiver},
        invite_dialog::InviteDialog,
    },
    sip::{
        Header, Request, StatusCode, Transport,
        prelude::{HeadersExt, ToTypedHeader},
    },
    transaction::{
        Transaction,
        transaction::{TransactionEvent, TransactionEventSender},
    },
    transport::SipAddr,
};
use sdp::{Description, Negotiator, Policy, SrtpPolicy};
use tokio::{
    sync::{mpsc, oneshot},
    time::sleep,
};
use tokio_util::sync::CancellationToken;
use tracing::{debug, info};

use super::{
    SipError,
    auth::Proof,
    body,
    config::Srtp,
    endpoint::{Shared, reply},
    places::{FULL, HalfOpen, Place, Standing},
    session::{self, CONTROLS, SIGNALS, Session},
    timer::SessionTimer,
};
use crate::{
    clock::{self, Sparse},
    media::{
        leg::Codec,
        sip::{SipLeg, codec, latch::Peer},
    },
};

/// How long a call may ring here before it is declined.
const RINGING: Duration = Duration::from_secs(180);
/// The same where this endpoint is going down, and another takes its place.
pub(super) const RESTART: Duration = Duration::from_secs(30);
/// Headers handed to the application at most, and their length.
const MAX_HEADERS: usize = 64;
const MAX_HEADER: usize = 2_048;

/// A call that rings here. Dropping it unanswered declines it with 480.
pub struct IncomingCall {
    /// URI of the caller (From), without display name.
    pub from: String,
    /// URI that was called (To).
    pub to: String,
    /// User part of the request URI: names the agent.
    pub user: String,
    /// Call-ID.
    pub call_id: String,
    /// Where the INVITE came from.
    pub source: SocketAddr,
    /// Digest user, when `[sip] users` is set.
    pub account: Option<String>,
    /// Whether it is a trunk's or of an account. What nothing has proven may be forged until its ACK is here.
    pub trusted: bool,
    /// Headers that the stack does not use itself (`X-...`, `User-Agent`, `Diversion`), by name as written.
    pub headers: BTreeMap<String, String>,
    /// Codecs offered, the caller's favourite first; empty for an INVITE without an offer.
    pub offered: Vec<Codec>,
    commands: mpsc::Sender<Command>,
    gone: CancellationToken,
}

enum Command {
    Ringing,
    Accept(Vec<(String, String)>, oneshot::Sender<Result<SipLeg, SipError>>),
    Reject(Rejection),
}

/// Why a call is declined, and when the caller may come again.
struct Rejection {
    status: u16,
    reason: String,
    retry_after: Option<Duration>,
}

impl IncomingCall {
    /// Sends 180.
    pub fn ringing(&self) {
        // overflow: drops: it is full only while an earlier command is under way
        self.commands.try_send(Command::Ringing).ok();
    }

    /// Answers with 200. The leg says `Connected` when the ACK is here. Where the INVITE had no offer, this
    /// waits for the ACK with the answer.
    ///
    /// # Errors
    /// The caller cancelled, no port is free, or nothing common was offered (answered 488).
    pub async fn accept(self) -> Result<SipLeg, SipError> {
        self.accept_with(&[]).await
    }

    /// As [`IncomingCall::accept`], with these headers in the 200.
    ///
    /// # Errors
    /// As [`IncomingCall::accept`].
    pub async fn accept_with(self, headers: &[(&str, &str)]) -> Result<SipLeg, SipError> {
        let (reply, answer) = oneshot::channel();
        let headers = headers.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
        // overflow: awaited
        self.commands.send(Command::Accept(headers, reply)).await.map_err(|_| SipError::Cancelled)?;
        answer.await.map_err(|_| SipError::Cancelled)?
    }

    /// Declines with a status of 300 to 699; others count as 480.
    pub fn reject(self, status: u16, reason: &str) {
        let status = if (300..700).contains(&status) { status } else { 480 };
        self.decline(Rejection { status, reason: reason.to_owned(), retry_after: None });
    }

    /// Declines with 503, and says when another call is worth while.
    pub fn reject_for(self, retry_after: Duration, reason: &str) {
        self.decline(Rejection::for_now(retry_after, reason));
    }

    fn decline(self, rejection: Rejection) {
        // overflow: drops: then dropping the sender declines with 480
        self.commands.try_send(Command::Reject(rejection)).ok();
    }

    /// Returns when the caller gives up. Cancel safe.
    pub async fn cancelled(&self) {
        self.gone.cancelled().await;
    }
}

impl Rejection {
    fn nobody_answers() -> Rejection {
        Rejection { status: 480, reason: "nobody answers".to_owned(), retry_after: None }
    }

    fn for_now(retry_after: Duration, reason: &str) -> Rejection {
        Rejection { status: 503, reason: reason.to_owned(), retry_after: Some(retry_after) }
    }
}

/// Takes an INVITE outside any dialog. Returns when its transaction is over.
pub(super) async fn receive(shared: &Arc<Shared>, mut tx: Transaction) {
    let Some(source) = source(&tx) else { return };
    // The same INVITE by another path (RFC 3261 section 8.2.2.2).
    let Some(_once) = shared.once(&tx.original) else {
        return reply(&mut tx, StatusCode::LoopDetected, vec![]).await;
    };
    let admitted = match admit(shared, &tx, source) {
        Ok(admitted) => admitted,
        Err(refusal) => {
            static LINES: Sparse = Sparse::new();
            if let Some(missed) = LINES.admit(clock::now()) {
                info!(%source, status = %refusal.status, missed, "INVITE refused");
            }
            reply(&mut tx, refusal.status, refusal.headers).await;
            return;
        }
    };
    let Admitted { account, standing, offer, slot, policy, offered, timer } = admitted;
    let peer = Peer { signalling: source.ip(), trusted: standing != Standing::Stranger };

    let request = tx.original.clone();
    let transport = transport(&tx);
    let contact = shared.contact(None, transport, Some(source.ip()));
    let (sender, states) = shared.dialogs.new_dialog_state_channel();
    let dialog = match shared.dialogs.get_or_create_server_invite(&tx, sender, None, Some(contact)) {
        Ok(dialog) => dialog,
        Err(error) => {
            debug!(%source, %error, "INVITE makes no dialog");
            reply(&mut tx, StatusCode::BadRequest, vec![body::warning(&error.to_string())]).await;
            return;
        }
    };

    let (commands, receiver) = mpsc::channel(4);
    let gone = CancellationToken::new();
    let mut call = incoming(&request, source, account, offered, commands, gone.clone());
    call.trusted = peer.trusted;
    info!(call_id = %call.call_id, from = %call.from, to = %call.to, %source, "incoming call");
    // overflow: refused: the caller is told 503 and comes again
    let taken = shared.incoming.try_send(call).is_ok();
    let mut driver = dialog.clone();
    // Who demands provisional responses to be reliable gets none rather than such a one (RFC 3262 section 3).
    let quiet = request.header_contains_token("Require", "100rel");
    let timed = timer.map(|timer| timer.answer_headers(&request)).unwrap_or_default();
    let timer = timer.map(|timer| (timer, timed));
    let responses = tx.tu_sender.clone();
    let ringing =
        Ringing { shared: shared.clone(), dialog, states, responses, offer, policy, slot, peer, gone, quiet, timer };
    shared.tasks.spawn(ringing.run(receiver, taken));

    // Sends 100 and drives the transaction until ACK, CANCEL or timeout.
    if let Err(error) = driver.handle(&mut tx).await {
        debug!(%source, %error, "INVITE transaction ended badly");
    }
}

struct Admitted {
    account: Option<String>,
    standing: Standing,
    offer: Option<Description>,
    slot: Place,
    policy: Policy,
    offered: Vec<Codec>,
    timer: Option<SessionTimer>,
}

struct Refused {
    status: StatusCode,
    headers: Vec<Header>,
}

impl Refused {
    fn new(status: StatusCode, headers: Vec<Header>) -> Refused {
        Refused { status, headers }
    }

    fn later(wait: Duration) -> Refused {
        Refused::new(StatusCode::ServiceUnavailable, vec![body::retry_after(wait)])
    }
}

/// Everything that can refuse an INVITE before it costs a dialog, cheapest first.
fn admit(shared: &Shared, tx: &Transaction, source: SocketAddr) -> Result<Admitted, Refused> {
    let request = &tx.original;
    let now = clock::now();
    if shared.is_draining() {
        return Err(Refused::later(RESTART));
    }
    let trunk = shared.trunk_at(source.ip());
    let mut standing = if trunk.is_some() { Standing::Trunk } else { Standing::Stranger };
    if let Some(wait) = shared.places.refused(now, source.ip()).filter(|_| trunk.is_none()) {
        return Err(Refused::later(wait));
    }
    let call_id = request.call_id_header().map(|id| id.value().to_owned()).unwrap_or_default();
    let mut account = None;
    if shared.auth.is_required() && trunk.is_none() {
        let credentials = request.authorization_header().map(|header| header.value());
        match shared.auth.check(now, &call_id, request.method, credentials) {
            Proof::Account(name) => (account, standing) = (Some(name), Standing::Account),
            Proof::Missing { stale } => {
                let challenge = shared.auth.challenge(now, &call_id, stale);
                return Err(Refused::new(StatusCode::Unauthorized, vec![Header::WwwAuthenticate(challenge.into())]));
            }
            Proof::Wrong => return Err(Refused::new(StatusCode::Forbidden, vec![])),
        }
    }
    if let Some(unsupported) = unsupported(request) {
        return Err(Refused::new(StatusCode::BadExtension, vec![Header::Unsupported(unsupported.into())]));
    }
    if request.contact_header().is_err() {
        return Err(Refused::new(StatusCode::BadRequest, vec![body::warning("INVITE without Contact")]));
    }
    let offer = body::description(request).map_err(|refusal| {
        let headers = refusal.headers();
        Refused::new(refusal.status, headers)
    })?;
    let mut policy = shared.policy();
    if trunk.is_some_and(|trunk| trunk.srtp == Srtp::Required) {
        policy.srtp = SrtpPolicy::Required;
    }
    let mut offered = Vec::new();
    if let Some(offer) = &offer {
        // A rehearsal: what cannot be agreed to need not ring.
        let local = body::local_media(IpAddr::from([127, 0, 0, 1]), 9);
        if let Err(error) = Negotiator::new(policy.clone(), local).answer(offer) {
            return Err(Refused::new(StatusCode::NotAcceptableHere, vec![body::warning(&error.to_string())]));
        }
        let audio = offer.media.iter().filter(|m| m.kind == "audio" && m.port != 0);
        offered = audio.flat_map(|m| m.codecs()).map(codec).collect();
    }
    let timer = SessionTimer::asked(request, now).map_err(|(status, headers)| Refused::new(status, headers))?;
    let half_open = HalfOpen { call_id, source, since: now };
    let slot = shared.places.inbound(now, standing, half_open).map_err(Refused::later)?;
    Ok(Admitted { account, standing, offer, slot, policy, offered, timer })
}

/// A call that rings: what its task owns until it is answered.
struct Ringing {
    shared: Arc<Shared>,
    dialog: InviteDialog,
    states: DialogStateReceiver,
    /// What the INVITE's transaction is to answer.
    responses: TransactionEventSender,
    offer: Option<Description>,
    policy: Policy,
    slot: Place,
    peer: Peer,
    gone: CancellationToken,
    /// No provisional responses.
    quiet: bool,
    /// What the 200 settles of RFC 4028, and how it says so.
    timer: Option<(SessionTimer, Vec<Header>)>,
}

impl Ringing {
    async fn run(mut self, mut commands: mpsc::Receiver<Command>, taken: bool) {
        // Told to everybody who waits, on every way out.
        let _gone = self.gone.clone().drop_guard();
        if !taken {
            return self.reject(Rejection::for_now(FULL, "no more calls can be taken"));
        }
        let limit = sleep(RINGING);
        tokio::pin!(limit);
        let stop = self.shared.stop.clone();
        loop {
            tokio::select! {
                biased;
                state = self.states.recv() => match state {
                    None => return self.forget(),
                    Some(DialogState::Terminated(..)) => return self.forget(),
                    Some(_) => {}
                },
                () = stop.cancelled() => return self.reject(Rejection::for_now(RESTART, "shutting down")),
                command = commands.recv() => match command {
                    Some(Command::Ringing) if self.quiet => {}
                    Some(Command::Ringing) => {
                        self.dialog.ringing(Some(vec![body::allow()]), None).ok();
                    }
                    Some(Command::Accept(headers, reply)) => return self.accept(headers, reply).await,
                    Some(Command::Reject(rejection)) => return self.reject(rejection),
                    None => return self.reject(Rejection::nobody_answers()),
                },
                () = &mut limit => return self.reject(Rejection::nobody_answers()),
            }
        }
    }

    fn reject(self, rejection: Rejection) {
        let Rejection { status, reason, retry_after } = rejection;
        let text: String = reason.chars().filter(|c| !matches!(c, '"' | '\\') && !c.is_control()).take(100).collect();
        let cause = (!text.is_empty()).then(|| format!("SIP;cause={status};text=\"{text}\""));
        let status = StatusCode::from(status);
        if let Some(wait) = retry_after {
            // The stack's own rejection takes no headers. A transaction sends the first final response that it is
            // given and drops later ones, so that after this one the stack's only ends the dialog.
            let mut response = self.shared.stack.make_response(&self.dialog.initial_request(), status.clone(), None);
            let tag = self.dialog.id().local_tag;
            for header in response.headers.iter_mut() {
                if let Header::To(to) = header {
                    *to = to.with_tag(tag.clone().into());
                }
            }
            response.headers.push(body::retry_after(wait));
            if let Some(cause) = &cause {
                response.headers.push(Header::Reason(cause.clone().into()));
            }
            self.responses.send(TransactionEvent::Respond(response)).ok();
        }
        self.dialog.reject(Some(status), cause).ok();
        self.forget();
    }

    fn forget(self) {
        self.shared.dialogs.remove_dialog(&self.dialog.id());
    }

    async fn accept(self, extra: Vec<(String, String)>, reply: oneshot::Sender<Result<SipLeg, SipError>>) {
        if self.dialog.state().is_terminated() {
            reply.send(Err(SipError::Cancelled)).ok();
            return self.forget();
        }
        let ports = match self.shared.ports.bind() {
            Ok(ports) => ports,
            Err(error) => {
                reply.send(Err(SipError::NoPort(error))).ok();
                return self.reject(Rejection::for_now(FULL, "no media port is free"));
            }
        };
        let local = body::local_media(self.shared.media_ip(self.peer.signalling), ports.port);
        let mut negotiator = Negotiator::new(self.policy.clone(), local);
        let (description, agreed) = match &self.offer {
            None => (negotiator.offer(), None),
            Some(offer) => match negotiator.answer(offer) {
                Ok((answer, agreed)) => (answer, Some(agreed)),
                Err(error) => {
                    reply.send(Err(SipError::NotAcceptable(error.to_string()))).ok();
                    let reason = "nothing in common".to_owned();
                    return self.reject(Rejection { status: 488, reason, retry_after: None });
                }
            },
        };
        let (timer, timed) = self.timer.clone().unzip();
        let mut headers = body::sdp_headers();
        headers.extend(timed.into_iter().flatten());
        headers.extend(extra.into_iter().map(|(name, value)| rsipstack::sip::Header::Other(name, value)));
        let sent = self.dialog.accept(Some(headers), Some(description.to_string().into_bytes()));
        if sent.is_err() {
            reply.send(Err(SipError::Cancelled)).ok();
            return self.forget();
        }
        let Ringing { shared, dialog, mut states, slot, peer, gone, .. } = self;
        gone.cancel();
        let agreed = match agreed {
            Some(agreed) => agreed,
            None => match answer_in_ack(&dialog, &mut states, &mut negotiator).await {
                Ok(agreed) => agreed,
                Err(error) => {
                    // Without the ACK the stack gives up after half a minute, and so much again may pass until a BYE
                    // is: its place is free before.
                    let blame = slot.release();
                    if matches!(error, SipError::Cancelled) {
                        blame.strike(clock::now());
                    }
                    reply.send(Err(error)).ok();
                    session::bye(&dialog, states, false, "no usable answer").await;
                    return shared.dialogs.remove_dialog(&dialog.id());
                }
            },
        };
        // It counts from the 200, not from the INVITE.
        let timer = timer.map(|timer| timer.restarted(clock::now()));
        let (signals, receiver) = mpsc::channel(SIGNALS);
        let (sender, controls) = mpsc::channel(CONTROLS);
        let leg = Session::leg(&shared, ports, agreed, peer, receiver, sender);
        // A leg that nobody takes is dropped here, and the session then hangs up.
        reply.send(leg.map_err(SipError::NoPort)).ok();
        Session { shared, dialog, states, negotiator, signals, controls, slot, lease: None, peer, timer }.run().await;
    }
}

/// Waits for the ACK of a 2xx that carried our offer, and takes its answer.
async fn answer_in_ack(
    dialog: &InviteDialog,
    states: &mut DialogStateReceiver,
    negotiator: &mut Negotiator,
) -> Result<sdp::Agreed, SipError> {
    loop {
        match states.recv().await {
            None | Some(DialogState::Terminated(..)) => return Err(SipError::Cancelled),
            Some(DialogState::Confirmed(..)) => break,
            Some(_) => {}
        }
    }
    let ack = dialog.last_remote_ack().ok_or(SipError::Cancelled)?;
    let answer = body::description(&ack).map_err(|refusal| SipError::NotAcceptable(refusal.reason))?;
    let answer = answer.ok_or_else(|| SipError::NotAcceptable("the ACK brings no answer".to_owned()))?;
    negotiator.accept(&answer).map_err(|error| SipError::NotAcceptable(error.to_string()))
}

fn incoming(
    request: &Request,
    source: SocketAddr,
    account: Option<String>,
    offered: Vec<Codec>,
    commands: mpsc::Sender<Command>,
    gone: CancellationToken,
) -> IncomingCall {
    let from = request.from_header().ok().and_then(|h| h.typed().ok()).map(|h| h.uri.to_string());
    let to = request.to_header().ok().and_then(|h| h.typed().ok()).map(|h| h.uri.to_string());
    let user = request.uri.user().unwrap_or_default();
    // A password in a URI, or the subscriber parameters of a number, name no agent.
    let user = user.split([':', ';']).next().unwrap_or_default();
    IncomingCall {
        from: from.unwrap_or_default(),
        to: to.unwrap_or_default(),
        user: rsipstack::sip::event_packages::percent_decode(user),
        call_id: request.call_id_header().map(|id| id.value().to_owned()).unwrap_or_default(),
        source,
        account,
        trusted: false,
        headers: headers(request),
        offered,
        commands,
        gone,
    }
}

/// Headers with a meaning to the application.
fn headers(request: &Request) -> BTreeMap<String, String> {
    let told = request.headers.iter().filter(|header| {
        !matches!(
            header,
            Header::Via(_)
                | Header::From(_)
                | Header::To(_)
                | Header::CallId(_)
                | Header::CSeq(_)
                | Header::Contact(_)
                | Header::MaxForwards(_)
                | Header::ContentLength(_)
                | Header::ContentType(_)
                | Header::Route(_)
                | Header::RecordRoute(_)
                | Header::Authorization(_)
                | Header::ProxyAuthorization(_)
                | Header::Allow(_)
                | Header::Supported(_)
        )
    });
    let told = told.filter(|header| header.value().len() <= MAX_HEADER).take(MAX_HEADERS);
    told.map(|header| (header.name().to_owned(), header.value().to_owned())).collect()
}

/// Extensions that we have: session timers, and reliable provisional responses, which we acknowledge where we call
/// and do without where we are called.
const EXTENSIONS: [&str; 2] = ["timer", "100rel"];

/// Extensions that are required of us and that we do not have.
pub(super) fn unsupported(request: &Request) -> Option<String> {
    let required: Vec<_> = request
        .headers
        .iter()
        .filter_map(|header| match header {
            Header::Require(value) => Some(value.value()),
            _ => None,
        })
        .flat_map(|value| value.split(','))
        .map(str::trim)
        .filter(|tag| !tag.is_empty() && !EXTENSIONS.iter().any(|known| known.eq_ignore_ascii_case(tag)))
        .collect();
    (!required.is_empty()).then(|| required.join(", "))
}

/// Where a transaction's request really came from.
pub(super) fn source(tx: &Transaction) -> Option<SocketAddr> {
    tx.connection.as_ref()?.get_remote_addr()?.get_socketaddr().ok()
}

fn transport(tx: &Transaction) -> Transport {
    let address = tx.connection.as_ref().and_then(|c| c.get_remote_addr()).and_then(|a: &SipAddr| a.r#type);
    address.unwrap_or(Transport::Udp)
}
