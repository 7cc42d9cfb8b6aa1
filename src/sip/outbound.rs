//! Calls that go out: from what is asked for to an answer.
//!
//! # Why
//! *A host that fails is no end of a call.* The hosts of a trunk are asked one after the other: where one cannot be
//! reached, says nothing for a while or answers 500, 502, 503 or 504 (RFC 3263 section 4.3). Every other refusal is about the
//! call, and another host would ring the same telephone again.
//!
//! *A call that forks* is the stack's business: the first 2xx is the call, those of other branches are acknowledged and
//! ended by BYE (RFC 3261 section 13.2.2.4).

use std::{collections::VecDeque, net::IpAddr, sync::Arc, time::Duration};

use metrics::counter;
use rsipstack::{
    dialog::{
        DialogId, authenticate::Credential, dialog::DialogStateReceiver, invitation::InviteOption,
        invite_dialog::InviteDialog,
    },
    sip::{Header, HostWithPort, Param, Response, StatusCodeKind, Transport as Wire, Uri, prelude::HeadersExt},
    transport::SipAddr,
};
use sdp::{Agreed, Negotiator, SrtpPolicy};
use tokio::{
    sync::{mpsc, oneshot},
    time::timeout,
};
use tracing::{debug, info};

use super::{
    DialError, SipError, body,
    calling::Replacement,
    cause,
    config::{EarlyMedia, SipConfig, Srtp, TrunkConfig},
    dialplan::{self, Caller, DialRequest, Route},
    early::{Answer, Early, Ended, Tell, watch},
    headers::{asserted, extra_headers},
    names,
    session::{CONTROLS, Ends, SIGNALS, Session},
    shared::Shared,
    timer::{self, SessionTimer},
    up::Party,
};
use crate::{
    clock,
    media::{
        leg::LegEnd,
        sip::{Early as EarlyLeg, Signal, SipLeg, latch::Peer, ports::PortPair},
    },
};

/// How long a host may leave an INVITE without any response where there is another host to try: its seventh copy has
/// left by then (RFC 3261 section 17.1.1.2), and a caller who waits hears nothing yet.
const SILENCE: Duration = Duration::from_secs(5);

/// Whether `request` can be tried at all: its address, trunk, caller and headers. Gives the trunk's name.
pub(super) fn check(shared: &Shared, request: &DialRequest) -> Result<Option<String>, DialError> {
    Plan::new(shared, &shared.config(), request).map(|plan| plan.trunk.map(|(_, trunk)| trunk.name.clone()))
}

/// Calls out. The leg is connected; the id is that of its dialog.
pub(super) async fn dial(
    shared: &Arc<Shared>,
    request: DialRequest,
    tell: Tell<'_>,
) -> Result<(SipLeg, DialogId), DialError> {
    let (leg, id) = dial_early(shared, request, tell, None).await?;
    // Who waits for no early leg gets it here.
    leg.map(|leg| (leg, id)).ok_or(DialError::Sip(SipError::Closed))
}

/// As [`dial`]; where the called side sends sound before it answers, its leg goes to `early` at that time, and `None` is
/// what comes of the answer.
pub(super) async fn dial_early(
    shared: &Arc<Shared>,
    request: DialRequest,
    tell: Tell<'_>,
    early: Option<oneshot::Sender<SipLeg>>,
) -> Result<(Option<SipLeg>, DialogId), DialError> {
    if shared.is_draining() {
        return Err(DialError::Sip(SipError::Closed));
    }
    let config = shared.config();
    let plan = Plan::new(shared, &config, &request)?;
    let lease = match plan.trunk {
        Some((index, _)) => Some(shared.trunks.quotas.begin(index).map_err(DialError::Denied)?),
        None => None,
    };
    let slot = shared.places.outbound().ok_or(DialError::Overloaded)?;
    let ports = shared.media.ports.bind().map_err(SipError::NoPort)?;
    let limit = request.timeout.unwrap_or(Duration::from_secs(config.ring_timeout_s.max(1)));
    let (signals, receiver) = mpsc::channel(SIGNALS);
    let (control, controls) = mpsc::channel(CONTROLS);
    let mut media =
        Media { port: ports.port, parts: Some((ports, (receiver, control))), signals, early, untaken: None };
    // Dropping this future, by the limit or because our caller lost interest, sends CANCEL.
    let ended = timeout(limit, plan.try_hosts(&mut media, tell)).await.map_err(|_| DialError::NoAnswer)??;
    let Answered { dialog, response, states, answer, peer } = match ended {
        Outcome::Answered(answered) => *answered,
        Outcome::Replaced(replacement) => return Ok(media.replaced(replacement)),
    };

    if let Some(lease) = &lease {
        lease.answered();
    }
    let timer = SessionTimer::answered(&response, clock::now());
    let Answer { negotiator, agreed } = answer;
    let id = dialog.id();
    let peer = plan.peer(peer);
    let leg = agreed.and_then(|agreed| media.answered(shared, agreed, peer));
    let signals = media.signals;
    if leg.is_err() {
        // overflow: drops: only where an early leg reads nothing; it ends with the session
        signals.try_send(Signal::Closed(LegEnd::Failed)).ok();
    }
    // Where there is no leg its end of the channels is gone, and the session begins by hanging up.
    let shared = shared.clone();
    let party = plan.party();
    spawn(Session { shared, dialog, states, negotiator, signals, controls, slot, lease, peer, party, timer });
    leg.map(|leg| (leg, id)).map_err(DialError::Answer)
}

/// The media of a call that is being placed.
struct Media {
    port: u16,
    /// What a leg is made of, until one is.
    parts: Option<(PortPair, Ends)>,
    signals: mpsc::Sender<Signal>,
    /// Who wants the leg before the answer.
    early: Option<oneshot::Sender<SipLeg>>,
    /// An early leg that no call has taken.
    untaken: Option<SipLeg>,
}

impl Media {
    /// The called side sends sound before it answers. `sends`: it gets silence meanwhile.
    fn sounds(&mut self, shared: &Shared, agreed: Agreed, peer: Peer, sends: bool) {
        if self.parts.is_none() {
            return self.changed(shared, agreed, peer).unwrap_or_else(|error| debug!(error, "early media"));
        }
        let Some(early) = self.early.take() else { return };
        let Some((ports, ends)) = self.parts.take() else { return };
        let until = if sends { EarlyLeg::Sends } else { EarlyLeg::Hears };
        match Session::leg(shared, ports, agreed, peer, ends, Some(until)) {
            Ok(leg) => self.untaken = early.send(leg).err(),
            // The answer cannot be used then, either, and says so.
            Err(error) => debug!(%error, "early media"),
        }
    }

    /// The call is answered: its leg, or `None` where that was taken before.
    fn answered(&mut self, shared: &Shared, agreed: Agreed, peer: Peer) -> Result<Option<SipLeg>, String> {
        let Some((ports, ends)) = self.parts.take() else {
            self.changed(shared, agreed, peer)?;
            return Ok(self.untaken.take());
        };
        ports.discard();
        Session::leg(shared, ports, agreed, peer, ends, None).map(Some).map_err(|error| error.to_string())
    }

    /// Another call has taken the place of this one: its leg, or `None` where it goes on as the one that was taken before.
    fn replaced(self, Replacement { leg, id, with }: Replacement) -> (Option<SipLeg>, DialogId) {
        if self.parts.is_some() || self.untaken.is_some() {
            return (Some(*leg), id);
        }
        // overflow: drops: a leg that leaves so many signals unread is stuck, and the new call ends with its own
        self.signals.try_send(Signal::Moved(leg, with)).ok();
        (None, id)
    }

    fn changed(&self, shared: &Shared, agreed: Agreed, peer: Peer) -> Result<(), String> {
        let agreed = Box::new(shared.reachable(agreed, peer));
        // overflow: refused: a leg that leaves so many signals unread is stuck
        self.signals.try_send(Signal::Media(agreed)).map_err(|_| "the media of the call has ended".to_owned())
    }
}

/// A call that may be placed: where it goes and what its INVITE says.
struct Plan<'a> {
    shared: &'a Shared,
    /// `[sip]` as it was when the call was asked for.
    config: &'a SipConfig,
    uri: Uri,
    trunk: Option<(usize, &'a TrunkConfig)>,
    /// Number or user, as the trunk is asked for it.
    user: String,
    caller: Uri,
    headers: Vec<Header>,
}

/// A host that a call tries.
#[derive(Clone)]
struct Hop {
    /// As the trunk has it.
    host: Option<String>,
    uri: Uri,
    /// Which of its addresses; `None`: the one that is found.
    address: Option<SipAddr>,
}

/// What came of a call.
enum Outcome {
    Answered(Box<Answered>),
    /// Another call has taken its place.
    Replaced(Replacement),
}

/// A call that somebody has answered.
struct Answered {
    dialog: InviteDialog,
    response: Response,
    states: DialogStateReceiver,
    answer: Answer,
    peer: IpAddr,
}

/// Why an INVITE to one host came to nothing.
enum Failure {
    /// The call is over.
    Call(DialError),
    /// Another host may do better. `out`: this one should be left alone for a while.
    Host { error: DialError, out: bool },
    /// The session interval must be so long (RFC 4028 section 7.4).
    Interval(u64, DialError),
    /// The called side is elsewhere (3xx).
    Moved(Vec<Uri>, DialError),
}

impl<'a> Plan<'a> {
    fn new(shared: &'a Shared, config: &'a SipConfig, request: &DialRequest) -> Result<Plan<'a>, DialError> {
        let from = request.from.as_deref();
        let dialplan = shared.dialplan(config);
        let Route { uri, trunk, user } = dialplan.route(&request.to, from, request.trunk.as_deref())?;
        let mut headers = extra_headers(&request.headers)?;
        let at = trunk.map(|(_, trunk)| trunk);
        let caller = match dialplan.caller(from, at)? {
            Caller::Address(uri) => *uri,
            Caller::User(user) => {
                let mut uri = shared.contact(Some(&user), wire(&uri), None);
                uri.params.clear();
                uri
            }
        };
        headers.extend(asserted(at, &caller, &request.headers));
        Ok(Plan { shared, config, uri, trunk, user, caller, headers })
    }

    fn party(&self) -> Party {
        self.trunk.map_or(Party::Stranger, |(index, _)| Party::Trunk(index))
    }

    fn peer(&self, signalling: IpAddr) -> Peer {
        Peer { signalling, trusted: self.trunk.is_some() }
    }

    /// Asks one host after the other until one of them takes the call.
    async fn try_hosts(&self, media: &mut Media, tell: Tell<'_>) -> Result<Outcome, DialError> {
        let shared = self.shared;
        let order = self
            .trunk
            .and_then(|(index, _)| shared.trunk_state(index, |state| state.targets.order(clock::now(), rand::random)));
        let mut hosts: VecDeque<Hop> = VecDeque::new();
        match (self.trunk, order) {
            (Some((_, trunk)), Some(order)) => {
                for host in order {
                    let uri = dialplan::at(trunk, &host, &self.user)?;
                    hosts.push_back(Hop { host: Some(host), uri, address: None });
                }
            }
            _ => hosts.push_back(Hop { host: None, uri: self.uri.clone(), address: None }),
        }
        let tell_of = |host: &Option<String>, failed: Option<&DialError>| {
            let Some(((index, _), host)) = self.trunk.zip(host.as_deref()) else { return };
            shared.trunk_state(index, |state| match failed {
                None => state.targets.worked(host),
                Some(error) => state.targets.failed(clock::now(), host, &error.to_string()),
            });
        };
        let mut interval = shared.session_wish(self.trunk.map(|(_, trunk)| trunk));
        let mut redirects = self.trunk.map_or(0, |(_, trunk)| trunk.redirects);
        let mut last = DialError::NoAnswer;
        while let Some(hop) = hosts.pop_front() {
            // Each address of a trunk's host is tried.
            let found = match (&hop, self.trunk) {
                (Hop { address: None, uri, .. }, Some((_, trunk))) => {
                    shared.trunks.routes.of(uri, trunk.transport, clock::now()).await
                }
                _ => Vec::new(),
            };
            if !found.is_empty() {
                let hops = found.into_iter().map(|address| Hop { address: Some(address), ..hop.clone() });
                hops.rev().for_each(|hop| hosts.push_front(hop));
                continue;
            }
            let patience = (!hosts.is_empty()).then_some(SILENCE);
            let asked = self.invite(&hop, media, interval, patience, tell).await;
            let Hop { host, uri, address } = hop;
            match asked {
                Ok(outcome) => {
                    tell_of(&host, None);
                    address.iter().for_each(|address| shared.trunks.routes.worked(address));
                    return Ok(outcome);
                }
                Err(Failure::Call(error)) => {
                    tell_of(&host, None);
                    return Err(error);
                }
                Err(Failure::Host { error, out }) => {
                    let wait = self.trunk.map(|(_, trunk)| Duration::from_secs(trunk.failed_target_s));
                    if let (true, Some(address), Some(wait)) = (out, &address, wait) {
                        shared.trunks.routes.failed(clock::now(), address, wait);
                    }
                    // A host has failed when all of its addresses have.
                    if out && hosts.front().is_none_or(|next| next.host != host) {
                        tell_of(&host, Some(&error));
                    }
                    if !hosts.is_empty() {
                        info!(to = %uri, %error, "the host of a trunk failed a call; the next is tried");
                        counter!("antiphon_trunk_failovers_total").increment(1);
                    }
                    last = error;
                }
                // Longer each time, so that it ends.
                Err(Failure::Interval(seconds, error)) => {
                    if interval.is_none_or(|asked| asked >= seconds) {
                        return Err(error);
                    }
                    interval = Some(seconds);
                    hosts.push_front(Hop { host, uri, address });
                }
                Err(Failure::Moved(contacts, error)) => {
                    let allowed = contacts.iter().filter_map(|contact| self.redirected(contact)).next();
                    let Some(uri) = allowed.filter(|_| redirects > 0) else { return Err(error) };
                    redirects -= 1;
                    info!(to = %uri, "the call is redirected");
                    hosts.push_front(Hop { host: None, uri, address: None });
                }
            }
        }
        Err(last)
    }

    /// Where a redirection to `contact` leads: to hosts of the same trunk, and to what the dial plan allows there.
    fn redirected(&self, contact: &Uri) -> Option<Uri> {
        let (_, trunk) = self.trunk.filter(|(_, trunk)| dialplan::leads_to(trunk, &contact.host_with_port))?;
        let to = format!("sip:{}@{}", contact.user()?, contact.host_with_port);
        let route = self.shared.dialplan(self.config).route(&to, None, Some(&trunk.name)).ok()?;
        dialplan::at(trunk, &contact.host_with_port.to_string(), &route.user).ok()
    }

    /// One INVITE. `patience`: how long nothing at all may be heard of it.
    async fn invite(
        &self,
        Hop { uri: to, address, .. }: &Hop,
        media: &mut Media,
        interval: Option<u64>,
        patience: Option<Duration>,
        tell: Tell<'_>,
    ) -> Result<Outcome, Failure> {
        let shared = self.shared;
        let trunk = self.trunk.map(|(_, trunk)| trunk);
        let known = address.as_ref().and_then(|address| address.get_socketaddr().ok()).map(|address| address.ip());
        if let Some(ip) = known {
            // What comes from there is the trunk's.
            shared.trunks.carriers.found(&to.host_with_port.host, ip);
        }
        let peer = match known {
            Some(ip) => Some(ip),
            None => shared.resolve(to).await,
        };
        let Some(peer) = peer else {
            let host = &to.host_with_port.host;
            let error = DialError::Address(format!("`{host}` has no address that can be found"));
            return Err(Failure::Host { error, out: true });
        };
        let wire = address.as_ref().and_then(|address| address.r#type).unwrap_or_else(|| wire(to));
        connect(shared, to, address.as_ref(), wire).await?;
        let local = body::local_media(shared.media_ip(peer), media.port, &shared.media.identity);
        let mut negotiator = Negotiator::new(policy(shared, trunk), local);
        let offer = negotiator.offer().to_string();
        let user = trunk.and_then(|t| t.username.clone());
        let timer = interval.map(timer::wish_headers).unwrap_or_default();
        // Until the dialog is there.
        let mut attempt = shared.calls.calling.begin(self.party());
        let option = InviteOption {
            call_id: Some(attempt.call_id().to_owned()),
            caller: self.caller.clone(),
            callee: to.clone(),
            destination: address.as_ref().map(|address| named(to, address, wire)),
            contact: shared.contact(user.as_deref(), wire, Some(peer)),
            content_type: Some("application/sdp".to_owned()),
            offer: Some(offer.into_bytes()),
            credential: trunk.and_then(credential),
            headers: Some(self.headers.iter().cloned().chain(timer).collect()),
            ..InviteOption::default()
        };
        let (sender, mut states) = shared.dialogs.new_dialog_state_channel();
        info!(%to, "calling");
        let policy = trunk.map(|trunk| trunk.early_media).unwrap_or_default();
        let signals = media.signals.clone();
        let mut sound = |agreed: Agreed| {
            if policy != EarlyMedia::Off {
                media.sounds(shared, agreed, self.peer(peer), policy == EarlyMedia::Both);
            }
        };
        let mut early = Early::new(negotiator, &mut attempt, signals, tell, &mut sound);
        let invite = names::pinned(to, address.as_ref(), shared.dialogs.do_invite(option, sender));
        let (dialog, response) = match watch(invite, &mut states, &mut early, patience).await {
            Ended::Silent => return Err(Failure::Host { error: DialError::NoAnswer, out: true }),
            // Dropping the INVITE has cancelled it.
            Ended::Replaced(replacement) => return Ok(Outcome::Replaced(replacement)),
            Ended::With(Err(error)) => {
                let error = DialError::Sip(SipError::Stack(error.to_string()));
                return Err(Failure::Host { error, out: true });
            }
            Ended::With(Ok((_, None))) => {
                return Err(Failure::Host { error: DialError::NoAnswer, out: !early.anything });
            }
            Ended::With(Ok((dialog, Some(response)))) => (dialog, response),
        };
        if response.status_code.kind() == StatusCodeKind::Successful {
            let answer = early.answered(&response);
            return Ok(Outcome::Answered(Box::new(Answered { dialog, response, states, answer, peer })));
        }
        let status = response.status_code.code();
        // As it came: the stack's own accessor of this name reads the header `Reason`.
        let reason = response.wire_reason.clone().unwrap_or_else(|| response.status_code.text().to_owned());
        let error = DialError::Declined { status, reason, cause: cause::named(&response.headers) };
        Err(match status {
            300..400 => {
                let contacts = response.typed_contact_headers().unwrap_or_default();
                Failure::Moved(contacts.into_iter().map(|contact| contact.uri).collect(), error)
            }
            422 => match timer::demanded(&response) {
                Some(seconds) => Failure::Interval(seconds, error),
                None => Failure::Call(error),
            },
            // The stack's own, where nothing was heard; else the called side's word.
            408 if !early.anything => Failure::Host { error, out: true },
            // RFC 3261 section 21.5.4: to be left alone. The others are about this call.
            503 => Failure::Host { error, out: true },
            500 | 502 | 504 => Failure::Host { error, out: false },
            _ => Failure::Call(error),
        })
    }
}

/// Where the stack sends a request to `uri` that is to go to `address`: TLS needs the name to know the certificate by.
fn named(uri: &Uri, address: &SipAddr, wire: Wire) -> SipAddr {
    match wire {
        Wire::Tls => SipAddr::new(Wire::Tls, HostWithPort { port: None, ..uri.host_with_port.clone() }),
        _ => address.clone(),
    }
}

/// Connects to a host before the INVITE, which takes the same connection: the stack would go on trying for half a minute where
/// no server listens.
async fn connect(shared: &Shared, to: &Uri, address: Option<&SipAddr>, wire: Wire) -> Result<(), Failure> {
    if !matches!(wire, Wire::Tcp | Wire::Tls) {
        return Ok(());
    }
    let mut target = match address {
        Some(address) => named(to, address, wire),
        None => SipAddr::new(wire, to.host_with_port.clone()),
    };
    if target.addr.port.is_none() && wire == Wire::Tls {
        target.addr.port = Some(5061.into());
    }
    let connecting = names::pinned(to, address, shared.stack.transport_layer.lookup(&target, None));
    let why = match timeout(SILENCE, connecting).await {
        Ok(Ok(_)) => return Ok(()),
        Ok(Err(error)) => error.to_string(),
        Err(_) => "no connection in time".to_owned(),
    };
    let at = address.unwrap_or(&target);
    let error = DialError::Sip(SipError::Stack(format!("no connection to {at}: {why}")));
    Err(Failure::Host { error, out: true })
}

/// What is offered to a trunk, or (`None`) where there is none.
fn policy(shared: &Shared, trunk: Option<&TrunkConfig>) -> sdp::Policy {
    let mut policy = shared.policy();
    if let Some(trunk) = trunk {
        if !trunk.codecs.is_empty() {
            policy.codecs = trunk.codecs.iter().map(|c| c.codec()).collect();
        }
        policy.ptime = trunk.ptime;
        policy.comfort_noise = trunk.comfort_noise;
        policy.srtp = match trunk.srtp {
            Srtp::Off => SrtpPolicy::Allowed,
            Srtp::Required => SrtpPolicy::Required,
            Srtp::Dtls => SrtpPolicy::Dtls,
        };
    }
    policy
}

/// Apart, so that the type of `dial` does not depend on that of the session, which may dial itself.
fn spawn(session: Session) {
    let tasks = session.shared.life.tasks.clone();
    tasks.spawn(session.run());
}

pub(super) fn credential(trunk: &TrunkConfig) -> Option<Credential> {
    let (username, password) = (trunk.username.as_ref()?, trunk.password.as_ref()?);
    Some(Credential {
        username: username.clone(),
        password: password.reveal().to_owned(),
        realm: None,
        auth_username: None,
    })
}

fn wire(uri: &Uri) -> Wire {
    let named = uri.params.iter().find_map(|param| match param {
        Param::Transport(transport) => Some(*transport),
        _ => None,
    });
    let secure = uri.scheme == Some(rsipstack::sip::Scheme::Sips);
    named.unwrap_or(if secure { Wire::Tls } else { Wire::Udp })
}
