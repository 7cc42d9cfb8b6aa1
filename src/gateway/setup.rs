//! Call set-up: one door for calls from SIP, from browsers and to telephones.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use serde::Deserialize;
use tokio::sync::broadcast::error::RecvError;
use tokio::sync::mpsc;
use tokio::time::timeout;

use super::missed::{Came, unanswered};
use super::tenants::Lease;
use super::{Gateway, GatewayError, WithFallback};
use crate::agent::config::Agent;
use crate::call::{
    Arriving, CallEvent, CallHandle, CallId, CallMeta, Direction, Missed, SpeakError, Style, TextDelta, TurnHow, TurnId,
};
use crate::cluster::Nodes;
use crate::fault;
use crate::media::leg::{LegEnd, MediaLeg};
use crate::media::webrtc::WebRtcLeg;
use crate::sip::IncomingCall;
use crate::telemetry::context;
use crate::webrtc::SessionId;

/// The turn by which parties are told that they are recorded.
const CONSENT: &str = "recording-consent";
/// The turn that callers hear before the answer.
const ANNOUNCEMENT: &str = "announcement";
/// How long one may take: a caller who hears nothing more is answered.
const ANNOUNCED: Duration = Duration::from_secs(60);
/// How long that may take. An outbound call may be held for its machine's message first.
const CONSENT_LIMIT: Duration = Duration::from_secs(120);

/// A call to be set up, before there is media for it.
#[derive(Clone, Debug)]
pub struct CallRequest {
    /// Which side begins it.
    pub direction: Direction,
    /// The caller's address.
    pub from: String,
    /// The called address.
    pub to: String,
    /// Name of its agent; `None`: the default one.
    pub agent: Option<String>,
    /// Signalling headers that are the agent's business.
    pub headers: BTreeMap<String, String>,
    /// Whose limits its speech counts to; empty for calls that come without an API token.
    pub tenant: Arc<str>,
}

/// Whether it is found out who answers an outbound call, and what waits for that.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Detection {
    /// Not asked for.
    #[default]
    Off,
    /// It is told; the agent speaks at once.
    Report,
    /// Nothing is said before it is known, and to a machine only after its message.
    Hold,
}

/// A call that was admitted and waits for its leg. [`crate::call::Calls::find`] waits for it meanwhile; dropping it
/// gives the call up.
pub struct Admission {
    gateway: Gateway,
    meta: CallMeta,
    agent: Agent,
    detection: Detection,
    /// Its part of the tenant's limits.
    lease: Lease,
    /// The answer names the call, and a peer may be quicker than the gateway to use the name.
    _arriving: Arriving,
}

impl Gateway {
    /// Admits a call: its agent exists, neither the limit of calls nor one of its tenant is reached, and a device can
    /// speak in time. Nothing is reserved but the tenant's part, so that [`Admission::start`] may still find the limit reached.
    ///
    /// # Errors
    /// No such agent, draining, full, or no device has room.
    pub fn admit(&self, request: CallRequest) -> Result<Admission, GatewayError> {
        self.admit_to(request, true)
    }

    /// As [`Gateway::admit`]; a call on which no voice of ours `speaks` needs no device.
    ///
    /// # Errors
    /// As there.
    pub(super) fn admit_to(&self, request: CallRequest, speaks: bool) -> Result<Admission, GatewayError> {
        let CallRequest { direction, from, to, agent, headers, tenant } = request;
        let name = agent.unwrap_or_else(|| self.default_agent.to_string());
        let Some(agent) = self.agents.find(&name) else { return Err(GatewayError::NoAgent(name)) };
        // What a token's bearer asked for is the bearer's; what comes in is the agent's owner's.
        let tenant = if tenant.is_empty() { agent.tenant.as_deref().unwrap_or_default().into() } else { tenant };
        self.calls.has_room()?;
        if speaks {
            self.has_room_for(&agent)?;
        }
        let lease = self.tenants.enter(&tenant)?;
        let id = CallId::of(self.nodes.as_ref().map(Nodes::name));
        let arriving = self.calls.announce(id.clone());
        let trace = context::of_new_call(&id.to_string());
        let meta = CallMeta { id, direction, from, to, agent: name, headers, tenant, trace };
        Ok(Admission { gateway: self.clone(), meta, agent, detection: Detection::Off, lease, _arriving: arriving })
    }

    /// A browser's call on the leg of `session`; `headers` is what its agent is told of it.
    ///
    /// # Errors
    /// As [`Gateway::admit`]; the leg is dropped, which ends the session.
    pub fn accept(
        &self,
        leg: WebRtcLeg,
        agent: Option<String>,
        tenant: Arc<str>,
        headers: BTreeMap<String, String>,
        session: &SessionId,
    ) -> Result<CallHandle, GatewayError> {
        let admission = self.admit(CallRequest {
            direction: Direction::Inbound,
            from: format!("webrtc:{session}"),
            to: agent.clone().unwrap_or_else(|| self.default_agent.to_string()),
            agent,
            headers,
            tenant,
        })?;
        admission.start(leg)
    }
}

impl Gateway {
    /// Records a call, where that is wanted: after its parties were told, if they are to be.
    fn record(&self, call: &CallHandle, agent: &Agent) {
        let Some(consent) = self.recordings.wanted(agent.record, agent.consent.as_deref()) else { return };
        let (recordings, call) = (self.recordings.clone(), call.clone());
        if consent.is_empty() {
            return recordings.record(&call);
        }
        let style = agent.consent_style();
        let told = match self.say(&call, CONSENT, consent, style) {
            Ok(told) => told,
            Err(error) => {
                tracing::warn!(call = %call.id(), %error, "the call is not recorded: its parties cannot be told");
                return;
            }
        };
        tokio::spawn(async move {
            // What was lost may have been the end of it: the call is then not recorded.
            match timeout(CONSENT_LIMIT, told).await {
                Ok(true) => recordings.record(&call),
                Ok(false) if call.has_ended() => {}
                _ => tracing::warn!(call = %call.id(), "the call is not recorded: its parties were not told"),
            }
        });
    }
}

impl Gateway {
    /// Says `text` as the turn `turn`; what comes of it is whether it was said whole.
    fn say(
        &self,
        call: &CallHandle,
        turn: &str,
        text: String,
        style: Style,
    ) -> Result<impl Future<Output = bool> + Send + use<>, SpeakError> {
        let mut events = self.calls.events();
        let (call, turn) = (call.clone(), TurnId::from(turn));
        call.push_text(TextDelta { id: Some(turn.clone()), token: text, last: true, style })?;
        Ok(async move {
            loop {
                match events.recv().await {
                    Ok((id, CallEvent::TurnEnded { turn: ended, how, .. })) if id == *call.id() && ended == turn => {
                        return matches!(how, TurnHow::Done);
                    }
                    Ok((id, CallEvent::Ended(_))) if id == *call.id() => return false,
                    Ok(_) | Err(RecvError::Lagged(_)) => {}
                    Err(RecvError::Closed) => return false,
                }
            }
        })
    }

    /// Says the agent's announcement before the call is answered, then answers it.
    ///
    /// # Errors
    /// There is none, or it cannot be said before: the call is to be answered at once.
    async fn announce(&self, admission: Admission, call: IncomingCall) -> Result<(), (Admission, IncomingCall)> {
        let id = admission.id().clone();
        let headers = [("X-Antiphon-Call", id.as_str())];
        // To who has proven nothing no sound is sent before the ACK: its address may be another's.
        if admission.agent.announcement.is_empty() || !call.trusted {
            return Err((admission, call));
        }
        let leg = match call.sound(&headers).await {
            Ok(leg) => leg,
            Err(error) => {
                tracing::debug!(%error, "nothing is said before the answer");
                return Err((admission, call));
            }
        };
        let handle = match admission.begin(leg) {
            Ok(handle) => handle,
            Err(error) => {
                tracing::warn!(%error, "a call could not be started");
                return Ok(());
            }
        };
        let (text, style) = (admission.agent.announcement.clone(), admission.agent.consent_style());
        match self.say(&handle, ANNOUNCEMENT, text, style) {
            Ok(told) => drop(timeout(ANNOUNCED, told).await),
            Err(error) => tracing::warn!(call = %id, %error, "the announcement was not said"),
        }
        if handle.has_ended() {
            admission.leave(&handle);
            return Ok(());
        }
        match call.answer(&headers).await {
            Ok(()) => admission.serve(&handle),
            Err(error) => {
                tracing::info!(%error, "a call was not answered");
                admission.leave(&handle);
            }
        }
        Ok(())
    }
}

impl Admission {
    /// Finds out who answers.
    pub(super) fn detecting(self, detection: Detection) -> Self {
        Self { detection, ..self }
    }

    /// The id that the call will have.
    pub fn id(&self) -> &CallId {
        &self.meta.id
    }

    /// What is known of the call.
    pub(super) fn meta(&self) -> &CallMeta {
        &self.meta
    }

    /// Starts the call on its leg and hands it to its agent.
    ///
    /// # Errors
    /// The limit of calls was reached meanwhile, or the gateway drains; the leg is dropped, which ends the session.
    pub fn start<L: MediaLeg>(self, leg: L) -> Result<CallHandle, GatewayError> {
        let handle = self.begin(leg)?;
        self.serve(&handle);
        Ok(handle)
    }

    /// Starts the call on its leg, without its agent: the first half of [`Admission::start`].
    ///
    /// # Errors
    /// As there.
    pub(super) fn begin<L: MediaLeg>(&self, leg: L) -> Result<CallHandle, GatewayError> {
        let Self { gateway, meta, agent, .. } = self;
        Ok(match gateway.fallback_for(agent) {
            Some(fallback) => {
                let speech = WithFallback::new(gateway.engine.clone(), fallback.clone());
                gateway.calls.start_with(meta.clone(), leg, Arc::new(speech))?
            }
            None => gateway.calls.start(meta.clone(), leg)?,
        })
    }

    /// Leaves a call that has begun without an agent.
    pub(super) fn leave(self, handle: &CallHandle) {
        let (ending, lease) = (handle.clone(), self.lease);
        tokio::spawn(async move {
            ending.ended().await;
            drop(lease);
        });
    }

    /// Hands a call that has begun to its agent: the other half.
    pub(super) fn serve(self, handle: &CallHandle) {
        let Self { gateway, agent, detection, lease, _arriving, .. } = self;
        if detection != Detection::Off {
            // Before the agent's first word. A call that is over already has no answer.
            let _ = handle.detect_answer(detection == Detection::Hold);
        }
        let ending = handle.clone();
        tokio::spawn(async move {
            ending.ended().await;
            drop(lease);
        });
        // Before the agent's first word, too.
        gateway.record(handle, &agent);
        gateway.agents.serve(handle.clone(), agent);
    }
}

/// Whether [`answer`] still answers. Clones mean the same.
#[derive(Clone, Debug, Default)]
pub struct Dispatcher(Arc<AtomicBool>);

impl Dispatcher {
    /// It has ended while there was something to answer.
    pub fn is_gone(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}

/// Says that the dispatcher is gone unless it ended as it should; also when it panics.
struct Answering(Dispatcher, bool);

impl Drop for Answering {
    fn drop(&mut self) {
        if !self.1 {
            self.0.0.store(true, Ordering::Relaxed);
        }
    }
}

/// Answers the calls that come over SIP, each in a task of its own, until the endpoint is gone.
pub async fn answer(gateway: Gateway, mut ringing: mpsc::Receiver<IncomingCall>) {
    let mut answering = Answering(gateway.dispatcher.clone(), false);
    let port = gateway.sip.as_ref().and_then(|sip| sip.local_udp()).map_or(0, |address| address.port());
    while let Some(call) = ringing.recv().await {
        fault::point("dispatcher", port);
        tokio::spawn(answer_one(gateway.clone(), call));
    }
    // The endpoint is gone, or was never there.
    answering.1 = true;
}

async fn answer_one(gateway: Gateway, call: IncomingCall) {
    let (came, farewell) = (Came::of(&call), call.farewell());
    let miss = |gateway: &Gateway, missed: Missed| {
        if let Some(came) = came.clone() {
            gateway.missed(came, Missed { cause: farewell(), ..missed });
        }
    };
    // The user part names the agent where there is one of that name; all other calls get the default.
    let agent = gateway.agents.find(&call.user).map(|_| call.user.clone());
    let admission = gateway.admit(CallRequest {
        direction: Direction::Inbound,
        from: call.from.clone(),
        to: call.to.clone(),
        agent,
        headers: call.headers.clone(),
        tenant: "".into(),
    });
    let admission = match admission {
        Ok(admission) => admission,
        Err(error) => {
            if let GatewayError::NoAgent(agent) = &error {
                tracing::warn!(%agent, "no such agent; check [sip] agent");
            }
            let (status, reason) = match error.retry_after() {
                Some(after) => {
                    call.reject_for(after, &error.to_string());
                    (503, error.to_string())
                }
                None => {
                    call.reject(404, "No such agent");
                    (404, "No such agent".to_owned())
                }
            };
            return miss(&gateway, Missed { trunk: None, status, reason, by_peer: false, cause: None });
        }
    };
    let (admission, call) = match gateway.announce(admission, call).await {
        Ok(()) => return,
        Err(unsaid) => unsaid,
    };
    let id = admission.id().clone();
    let trusted = call.trusted;
    match call.accept_with(&[("X-Antiphon-Call", id.as_str())]).await {
        Err(error) => {
            tracing::info!(%error, "a call was not answered");
            miss(&gateway, unanswered(&error));
        }
        Ok(mut leg) => {
            // An INVITE may be forged, its ACK may not: for who nothing is known of, no agent is dialled before.
            let acknowledged = if trusted { Ok(()) } else { leg.acknowledged().await };
            match acknowledged {
                Ok(()) => {}
                // Who hangs up knows our answer as well as who acknowledges it (its message may be the first to be looked at): that
                // was a call, and has a record. Its caller has gone, so that no agent is started.
                Err(LegEnd::Remote) => {
                    return match admission.begin(leg) {
                        Ok(call) => admission.leave(&call),
                        Err(error) => tracing::warn!(%error, "an answered call could not be started"),
                    };
                }
                Err(_) => return tracing::debug!("a call was answered and never acknowledged"),
            }
            match admission.begin(leg) {
                Ok(handle) => {
                    let agent = &admission.agent;
                    if !agent.announcement.is_empty() {
                        let (text, style) = (agent.announcement.clone(), agent.consent_style());
                        // What comes behind it waits in the call's queue.
                        if let Err(error) = gateway.say(&handle, ANNOUNCEMENT, text, style) {
                            tracing::warn!(call = %id, %error, "the announcement was not said");
                        }
                    }
                    admission.serve(&handle);
                }
                Err(error) => tracing::warn!(%error, "an answered call could not be started"),
            }
        }
    }
}
