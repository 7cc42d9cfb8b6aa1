//! Calls that come in: what becomes of an INVITE.
//!
//! Each INVITE that may become a call has a task of its own while it rings ([`super::ringing`]). That task owns the dialog; the
//! application holds an [`super::IncomingCall`] and tells it what to do. The caller's CANCEL wins over an answer
//! that comes later, and an answer that was sent wins over a later CANCEL (RFC 3261 section 9.2).

use std::{
    net::{IpAddr, SocketAddr},
    sync::Arc,
    time::{Duration, Instant},
};

use rsipstack::{
    dialog::DialogId,
    sip::{Header, Method, Request, StatusCode, Transport, prelude::HeadersExt},
    transaction::{Transaction, key::TransactionRole},
    transport::SipAddr,
};
use sdp::{Description, Negotiator, Policy, SrtpPolicy};
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;
use tracing::{debug, info};

use super::{
    auth::{Claim, Proof, Read},
    body,
    config::Srtp,
    incoming::{Ends, incoming},
    neighbours::Admission,
    places::{FULL, HalfOpen, Place, Standing},
    reliable::Wish,
    replaces::{self, Replaced},
    ringing::Ringing,
    shared::{RESTART, Shared},
    stateless::{Answer, Stateless},
    timer::SessionTimer,
    up::Party,
};
use crate::{
    clock::{self, Sparse},
    media::{
        leg::Codec,
        sip::{codec, latch::Peer},
    },
};

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
            tell(shared, &tx.original, source, &refusal.status);
            body::reply(&mut tx, refusal.status, refusal.headers).await;
            return;
        }
    };
    let Admitted { account, party, vetted, slot } = admitted;
    let Vetted { standing, offer, policy, offered, timer, replaced, .. } = vetted;
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
    let id = dialog.id();
    let farewell = shared.calls.farewells.enter(&id.call_id, &id.remote_tag);
    let trunk = shared.trunk_at(source.ip()).map(|trunk| trunk.name.clone());
    let ends = Ends { commands, gone: gone.clone(), farewell: farewell.said().clone() };
    let mut call = incoming(&request, source, trunk, account, offered, ends);
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
    let sound = None;
    let ringing = Ringing {
        shared,
        dialog,
        states,
        responses,
        offer,
        policy,
        slot,
        peer,
        party,
        gone,
        farewell,
        wish,
        timer,
        sound,
    };
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
    /// To be checked where callers have to prove who they are.
    credentials: Option<Read>,
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
            tell(shared, request, source, &refused.status);
            refused.into()
        }),
        Method::Options => {
            if let Some(extension) = unsupported(request) {
                return refuse(StatusCode::BadExtension, vec![Header::Unsupported(extension.into())]);
            }
            let mut headers = body::capabilities();
            // Balancers send no calls to who says so.
            if let Admission::Closed { retry_after, .. } = shared.advertised() {
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

fn tell(shared: &Shared, request: &Request, source: SocketAddr, status: &StatusCode) {
    static LINES: Sparse = Sparse::new();
    let now = clock::now();
    if let Some(missed) = LINES.admit(now) {
        info!(%source, %status, missed, "INVITE refused");
    }
    let Some((trunk, told)) = shared.trunk_at(source.ip()).zip(shared.beside.refused.as_ref()) else { return };
    if let Some(call) = shared.calls.refusals.of(now, request, &trunk.name, status) {
        // overflow: drops: no more of them come than one a second for long
        told.try_send(call).ok();
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
    let mut credentials = None;
    if shared.auth.is_required() && trunk.is_none() {
        // Before the stack has it: it would keep the refusal of each guess for half a minute.
        let claim = claim(request, source.ip());
        match shared.auth.refused(now, &claim) {
            Err(Proof::Throttled(wait)) => return Err(Refused::later(wait)),
            Err(_) => return Err(Refused::challenge(shared, now, source.ip(), claim.call_id, false)),
            Ok(read) => credentials = Some(read),
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
    policy.comfort_noise = trunk.as_ref().is_some_and(|trunk| trunk.comfort_noise);
    match trunk.as_ref().map(|trunk| trunk.srtp) {
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
    let timer = SessionTimer::asked(request, shared.session_wish(trunk.as_deref()), now)
        .map_err(|(status, headers)| Refused::new(status, headers))?;
    let replaced = replaces::named(shared, request).map_err(|status| Refused::new(status, vec![]))?;
    Ok(Vetted { standing, credentials, offer, policy, offered, timer, replaced })
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
    if let Some(read) = vetted.credentials.take() {
        let claim = claim(request, source.ip());
        match shared.auth.check(now, &claim, &read) {
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
        replaced.allows(&party, shared.config().refer).map_err(|status| Refused::new(status, vec![]))?;
    }
    let half_open = HalfOpen { call_id, source, since: now };
    let slot = shared.places.inbound(now, vetted.standing, half_open).map_err(Refused::later)?;
    Ok(Admitted { account, party, vetted, slot })
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
