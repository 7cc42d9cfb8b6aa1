//! Calls that come in: from the INVITE to the answer.
//!
//! Each INVITE that may become a call has a task of its own while it rings. That task owns the dialog; the
//! application holds an [`IncomingCall`] and tells it what to do. The caller's CANCEL wins over an answer
//! that comes later, and an answer that was sent wins over a later CANCEL (RFC 3261 section 9.2).

use std::{
    net::{IpAddr, SocketAddr},
    sync::Arc,
    time::{Duration, Instant},
};

use rsipstack::{
    dialog::{
        DialogId,
        dialog::{DialogState, DialogStateReceiver, TerminatedReason},
        invite_dialog::InviteDialog,
    },
    sip::{Header, Method, Request, StatusCode, Transport, prelude::HeadersExt},
    transaction::{
        Transaction,
        key::TransactionRole,
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
    auth::{Claim, Proof},
    body,
    bye::bye,
    config::Srtp,
    incoming::{Command, Rejection, incoming},
    neighbours::Admission,
    places::{FULL, HalfOpen, Place, Standing},
    reliable::{self, Due, Wish},
    replaces::{self, Replaced},
    session::{CONTROLS, SIGNALS, Session},
    shared::{RESTART, Shared},
    stateless::{Answer, Stateless},
    timer::SessionTimer,
    up::Party,
};
use crate::{
    clock::{self, Sparse},
    media::{
        leg::Codec,
        sip::{Signal, SipLeg, codec, latch::Peer},
    },
};

/// How long a call may ring here before it is declined.
const RINGING: Duration = Duration::from_secs(180);

/// Takes an INVITE outside any dialog. Returns when its transaction is over.
pub(super) async fn receive(shared: &Arc<Shared>, mut tx: Transaction) {
    let Some(source) = source(&tx) else { return };
    // The same INVITE by another path (RFC 3261 section 8.2.2.2).
    let Some(_once) = shared.once(&tx.original) else {
        return body::reply(&mut tx, StatusCode::LoopDetected, vec![]).await;
    };
    let admitted = match admit(shared, &tx, source) {
        Ok(admitted) => admitted,
        Err(refusal) => {
            tell(source, &refusal.status);
            body::reply(&mut tx, refusal.status, refusal.headers).await;
            return;
        }
    };
    let Admitted { account, party, vetted, slot } = admitted;
    let Vetted { standing, offer, policy, offered, timer, replaced } = vetted;
    let peer = Peer { signalling: source.ip(), trusted: standing != Standing::Stranger };

    let request = tx.original.clone();
    let transport = transport(&tx);
    let contact = shared.contact(None, transport, Some(source.ip()));
    let (sender, states) = shared.dialogs.new_dialog_state_channel();
    let dialog = match shared.dialogs.get_or_create_server_invite(&tx, sender, None, Some(contact)) {
        Ok(dialog) => dialog,
        Err(error) => {
            debug!(%source, %error, "INVITE makes no dialog");
            body::reply(&mut tx, StatusCode::BadRequest, vec![body::warning(&error.to_string())]).await;
            return;
        }
    };

    let (commands, receiver) = mpsc::channel(4);
    let gone = CancellationToken::new();
    let mut call = incoming(&request, source, standing == Standing::Trunk, account, offered, commands, gone.clone());
    call.trusted = peer.trusted;
    info!(call_id = %call.call_id, from = %call.from, to = %call.to, %source, "incoming call");
    let taken = match replaced {
        Some(replaced) => {
            shared.life.tasks.spawn(replaces::take(replaced, call, dialog.id()));
            true
        }
        // overflow: refused: the caller is told 503 and comes again
        None => shared.incoming.try_send(call).is_ok(),
    };
    let mut driver = dialog.clone();
    let wish = Wish::of(&request);
    let timed = timer.map(|timer| timer.answer_headers(&request)).unwrap_or_default();
    let timer = timer.map(|timer| (timer, timed));
    let responses = tx.tu_sender.clone();
    let shared = shared.clone();
    let tasks = shared.life.tasks.clone();
    let ringing = Ringing { shared, dialog, states, responses, offer, policy, slot, peer, party, gone, wish, timer };
    tasks.spawn(ringing.run(receiver, taken));

    // Sends 100 and drives the transaction until ACK, CANCEL or timeout.
    if let Err(error) = driver.handle(&mut tx).await {
        debug!(%source, %error, "INVITE transaction ended badly");
    }
}

struct Admitted {
    account: Option<String>,
    party: Party,
    vetted: Vetted,
    slot: Place,
}

/// What an INVITE asks for, found to be possible.
struct Vetted {
    standing: Standing,
    offer: Option<Description>,
    policy: Policy,
    offered: Vec<Codec>,
    timer: Option<SessionTimer>,
    /// The call whose place it takes.
    replaced: Option<Replaced>,
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

    fn challenge(shared: &Shared, now: Instant, source: IpAddr, call_id: &str, stale: bool) -> Refused {
        let challenges = shared.auth.challenges(now, source, call_id, stale);
        let headers = challenges.into_iter().map(|challenge| Header::WwwAuthenticate(challenge.into()));
        Refused::new(StatusCode::Unauthorized, headers.collect())
    }
}

/// What a request that no transaction has yet is answered with at once; `None`: it may make one. Keeps nothing, so that
/// it can be asked again.
pub(super) fn judge(shared: &Shared, request: &Request, source: SocketAddr) -> Option<Answer> {
    let refuse = |status, headers| Some((status, headers));
    // Neither makes a transaction of its own.
    if matches!(request.method, Method::Ack | Method::Cancel) {
        return None;
    }
    if request.to_header().ok().and_then(|to| to.tag().ok().flatten()).is_some() {
        let id = DialogId::try_from((request, TransactionRole::Server)).ok();
        let soon = || request.call_id_header().is_ok_and(|call_id| shared.calls.calling.has(call_id.value()));
        let known = id.is_some_and(|id| shared.dialogs.get_dialog(&id).is_some()) || soon();
        return if known { None } else { refuse(StatusCode::CallTransactionDoesNotExist, vec![]) };
    }
    match request.method {
        Method::Invite if Stateless::is_full(&shared.stack) => Some(Refused::later(FULL).into()),
        Method::Invite => vet(shared, request, source).err().map(|refused| {
            tell(source, &refused.status);
            refused.into()
        }),
        Method::Options => {
            if let Some(extension) = unsupported(request) {
                return refuse(StatusCode::BadExtension, vec![Header::Unsupported(extension.into())]);
            }
            let mut headers = body::capabilities();
            // Balancers send no calls to who says so.
            if let Admission::Closed { retry_after, .. } = shared.admission() {
                headers.push(body::retry_after(retry_after));
                return refuse(StatusCode::ServiceUnavailable, headers);
            }
            refuse(StatusCode::OK, headers)
        }
        // These belong to a dialog, and name none.
        Method::Bye | Method::Update | Method::Info | Method::PRack | Method::Notify => {
            refuse(StatusCode::CallTransactionDoesNotExist, vec![])
        }
        _ => refuse(StatusCode::MethodNotAllowed, vec![body::allow()]),
    }
}

fn tell(source: SocketAddr, status: &StatusCode) {
    static LINES: Sparse = Sparse::new();
    if let Some(missed) = LINES.admit(clock::now()) {
        info!(%source, %status, missed, "INVITE refused");
    }
}

impl From<Refused> for Answer {
    fn from(refused: Refused) -> Answer {
        (refused.status, refused.headers)
    }
}

/// Everything that an INVITE can be refused for without keeping anything, cheapest first.
fn vet(shared: &Shared, request: &Request, source: SocketAddr) -> Result<Vetted, Refused> {
    let now = clock::now();
    if shared.is_draining() {
        return Err(Refused::later(RESTART));
    }
    let trunk = shared.trunk_at(source.ip());
    let standing = if trunk.is_some() { Standing::Trunk } else { Standing::Stranger };
    if let Some(wait) = shared.places.refused(now, source.ip()).filter(|_| trunk.is_none()) {
        return Err(Refused::later(wait));
    }
    if shared.auth.is_required() && trunk.is_none() {
        // Before the stack has it: it would keep the refusal of each guess for half a minute.
        let claim = claim(request, source.ip());
        match shared.auth.refused(now, &claim) {
            Some(Proof::Throttled(wait)) => return Err(Refused::later(wait)),
            Some(_) => return Err(Refused::challenge(shared, now, source.ip(), claim.call_id, false)),
            None => {}
        }
    }
    // Who has to prove who they are learns of other gateways when that is done, in `admit`.
    if !shared.auth.is_required() || trunk.is_some() {
        turned_away(&shared.admission(), request)?;
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
    if !body::takes_sdp(request) {
        let accept = Header::Accept("application/sdp".into());
        return Err(Refused::new(StatusCode::NotAcceptable, vec![accept]));
    }
    let mut policy = shared.policy();
    policy.comfort_noise = trunk.is_some_and(|trunk| trunk.comfort_noise);
    match trunk.map(|trunk| trunk.srtp) {
        Some(Srtp::Required) => policy.srtp = SrtpPolicy::Required,
        Some(Srtp::Dtls) => policy.srtp = SrtpPolicy::Dtls,
        Some(Srtp::Off) | None => {}
    }
    let mut offered = Vec::new();
    if let Some(offer) = &offer {
        // A rehearsal: what cannot be agreed to need not ring.
        let local = body::local_media(IpAddr::from([127, 0, 0, 1]), 9, &shared.media.identity);
        if let Err(error) = Negotiator::new(policy.clone(), local).answer(offer) {
            return Err(Refused::new(StatusCode::NotAcceptableHere, vec![body::warning(&error.to_string())]));
        }
        let audio = offer.media.iter().filter(|m| m.kind == "audio" && m.port != 0);
        offered = audio.flat_map(|m| m.codecs()).map(codec).collect();
    }
    let timer = SessionTimer::asked(request, shared.session_wish(trunk), now)
        .map_err(|(status, headers)| Refused::new(status, headers))?;
    let replaced = replaces::named(shared, request).map_err(|status| Refused::new(status, vec![]))?;
    Ok(Vetted { standing, offer, policy, offered, timer, replaced })
}

/// What an INVITE says to prove who sent it.
fn claim(request: &Request, source: IpAddr) -> Claim<'_> {
    let call_id = request.call_id_header().map(|id| id.value()).unwrap_or_default();
    let credentials = request.authorization_header().map(|header| header.value());
    Claim { source, call_id, method: request.method, uri: &request.uri, credentials }
}

/// Sends a call that is not taken here to the gateway that would take it, or tells when to come again.
fn turned_away(admission: &Admission, request: &Request) -> Result<(), Refused> {
    let Admission::Closed { retry_after, elsewhere } = admission else { return Ok(()) };
    match elsewhere.as_ref().and_then(|listeners| listeners.contact(request)) {
        Some(contact) => Err(Refused::new(StatusCode::MovedTemporarily, vec![contact])),
        None => Err(Refused::later(*retry_after)),
    }
}

/// Takes what the call needs: its credentials are used up, and it has a place.
fn admit(shared: &Shared, tx: &Transaction, source: SocketAddr) -> Result<Admitted, Refused> {
    let request = &tx.original;
    let mut vetted = vet(shared, request, source)?;
    let now = clock::now();
    let mut account = None;
    if shared.auth.is_required() && vetted.standing != Standing::Trunk {
        let claim = claim(request, source.ip());
        match shared.auth.check(now, &claim) {
            Proof::Account(name) => (account, vetted.standing) = (Some(name), Standing::Account),
            Proof::Missing { stale } => return Err(Refused::challenge(shared, now, source.ip(), claim.call_id, stale)),
            Proof::Wrong => return Err(Refused::new(StatusCode::Forbidden, vec![])),
            Proof::Throttled(wait) => return Err(Refused::later(wait)),
        }
    }
    turned_away(&shared.admission(), request)?;
    let call_id = request.call_id_header().map(|id| id.value().to_owned()).unwrap_or_default();
    let party = match (shared.trunks.carriers.find(source.ip()), &account) {
        (Some(trunk), _) => Party::Trunk(trunk),
        (None, Some(name)) => Party::Account(name.clone()),
        (None, None) => Party::Stranger,
    };
    if let Some(replaced) = &vetted.replaced {
        replaced.allows(&party, shared.config.refer).map_err(|status| Refused::new(status, vec![]))?;
    }
    let half_open = HalfOpen { call_id, source, since: now };
    let slot = shared.places.inbound(now, vetted.standing, half_open).map_err(Refused::later)?;
    Ok(Admitted { account, party, vetted, slot })
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
    party: Party,
    gone: CancellationToken,
    /// How provisional responses may be sent.
    wish: Wish,
    /// What the 200 settles of RFC 4028, and how it says so.
    timer: Option<(SessionTimer, Vec<Header>)>,
}

/// Forgets what waits for a PRACK when the call rings no longer.
struct Rings {
    shared: Arc<Shared>,
    tag: String,
}

impl Drop for Rings {
    fn drop(&mut self) {
        self.shared.reliable.forget(&self.tag);
    }
}

impl Ringing {
    async fn run(mut self, mut commands: mpsc::Receiver<Command>, taken: bool) {
        // Told to everybody who waits, on every way out.
        let _gone = self.gone.clone().drop_guard();
        let tag = self.dialog.id().local_tag;
        let _ringing = Rings { shared: self.shared.clone(), tag: tag.clone() };
        // What comes before the answer waits in it for the leg.
        let (signals, receiver) = mpsc::channel(SIGNALS);
        let entered = self.shared.calls.ringing.enter(self.dialog.id(), self.party.clone(), &signals);
        let mut headers = vec![body::allow()];
        if !taken {
            return self.reject(Rejection::for_now(FULL, "no more calls can be taken"));
        }
        let limit = sleep(RINGING);
        tokio::pin!(limit);
        let stop = self.shared.life.stop.clone();
        loop {
            tokio::select! {
                biased;
                state = self.states.recv() => match state {
                    None => return self.forget(),
                    // BYE ends a call that rings, too, and leaves its INVITE open (RFC 3261 section 15.1.2).
                    Some(DialogState::Terminated(_, TerminatedReason::UacBye)) => {
                        self.respond(StatusCode::RequestTerminated, vec![]);
                        return self.forget();
                    }
                    Some(DialogState::Terminated(..)) => return self.forget(),
                    // Requests of the caller are answered where they come in: see `early`.
                    Some(_) => {}
                },
                () = stop.cancelled() => return self.reject(Rejection::for_now(RESTART, "shutting down")),
                () = reliable::due(&self.shared.reliable, &tag) => match self.shared.reliable.due(clock::now(), &tag) {
                    Some(Due::Repeat) => drop(self.dialog.ringing(Some(headers.clone()), None)),
                    // RFC 3262 section 3.
                    Some(Due::GiveUp) => return self.reject(Rejection {
                        status: 504,
                        reason: "no PRACK".to_owned(),
                        retry_after: None,
                    }),
                    None => {}
                },
                command = commands.recv() => match command {
                    Some(Command::Ringing) => {
                        match (self.wish, &self.offer) {
                            // It would have to bring our offer; see `reliable`.
                            (Wish::Demanded, None) => continue,
                            (Wish::Unknown, _) | (Wish::Known, None) => {}
                            (Wish::Known | Wish::Demanded, Some(_)) => {
                                let request = self.dialog.initial_request();
                                let pending = &self.shared.reliable;
                                headers.truncate(1);
                                headers.extend(pending.begin(clock::now(), &tag, &request, rand::random()));
                            }
                        }
                        self.dialog.ringing(Some(headers.clone()), None).ok();
                    }
                    Some(Command::Accept(headers, reply)) => {
                        drop(entered);
                        return self.accept(headers, reply, (signals, receiver)).await;
                    }
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
            let reason = cause.as_ref().map(|cause| Header::Reason(cause.clone().into()));
            self.respond(status.clone(), [body::retry_after(wait)].into_iter().chain(reason).collect());
        }
        self.dialog.reject(Some(status), cause).ok();
        self.forget();
    }

    /// Answers the INVITE past the stack's dialog.
    fn respond(&self, status: StatusCode, headers: Vec<Header>) {
        let mut response = self.shared.stack.make_response(&self.dialog.initial_request(), status, None);
        let tag = self.dialog.id().local_tag;
        for header in response.headers.iter_mut() {
            if let Header::To(to) = header {
                *to = to.with_tag(tag.clone().into());
            }
        }
        headers.into_iter().for_each(|header| response.headers.push(header));
        self.responses.send(TransactionEvent::Respond(response)).ok();
    }

    fn forget(self) {
        self.shared.dialogs.remove_dialog(&self.dialog.id());
    }

    async fn accept(
        self,
        extra: Vec<(String, String)>,
        reply: oneshot::Sender<Result<SipLeg, SipError>>,
        (signals, receiver): (mpsc::Sender<Signal>, mpsc::Receiver<Signal>),
    ) {
        if self.dialog.state().is_terminated() {
            reply.send(Err(SipError::Cancelled)).ok();
            return self.forget();
        }
        let ports = match self.shared.media.ports.bind() {
            Ok(ports) => ports,
            Err(error) => {
                reply.send(Err(SipError::NoPort(error))).ok();
                return self.reject(Rejection::for_now(FULL, "no media port is free"));
            }
        };
        let local =
            body::local_media(self.shared.media_ip(self.peer.signalling), ports.port, &self.shared.media.identity);
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
        let Ringing { shared, dialog, mut states, slot, peer, party, gone, .. } = self;
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
                        blame.penalise(clock::now());
                    }
                    reply.send(Err(error)).ok();
                    bye(&dialog, states, false, "no usable answer").await;
                    return shared.dialogs.remove_dialog(&dialog.id());
                }
            },
        };
        // It counts from the 200, not from the INVITE.
        let timer = timer.map(|timer| timer.restarted(clock::now()));
        let (sender, controls) = mpsc::channel(CONTROLS);
        let leg = Session::leg(&shared, ports, agreed, peer, (receiver, sender), None);
        // A leg that nobody takes is dropped here, and the session then hangs up.
        reply.send(leg.map_err(SipError::NoPort)).ok();
        let lease = None;
        let session =
            Session { shared, dialog, states, negotiator, signals, controls, slot, lease, peer, party, timer };
        session.run().await;
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

/// Extensions that we have: session timers, reliable provisional responses, and calls in the place of others.
const EXTENSIONS: [&str; 3] = ["timer", "100rel", "replaces"];

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

pub(super) fn transport(tx: &Transaction) -> Transport {
    let address = tx.connection.as_ref().and_then(|c| c.get_remote_addr()).and_then(|a: &SipAddr| a.r#type);
    address.unwrap_or(Transport::Udp)
}
