//! Calls that go out, from the moment they are asked for until they are answered or end unanswered.
//!
//! # Why
//! A telephone rings for longer than an HTTP client or a proxy waits. So a call has its id at once, a task of its own
//! dials, and the client that asked follows it in the list of calls and on `/v1/events`.

use std::pin::pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use dashmap::DashMap;
use serde::Serialize;
use tokio::sync::oneshot;
use tokio_util::sync::{CancellationToken, DropGuard};

use super::bridge::Bridge;
use super::dialers::{self, Dialer};
use super::{Admission, CallRequest, Detection, Gateway, GatewayError};
use crate::call::{CallEvent, CallHandle, CallId, CallMeta, Dialling, Direction, EndReason};
use crate::clock;
use crate::sip::{DialError, DialRequest, Endpoint, Provisional};

/// The calls that ring. Clones mean the same ones.
#[derive(Clone, Debug, Default)]
pub struct Outgoing(Arc<DashMap<CallId, Arc<Ringing>>>);

/// A call that has not been answered yet.
#[derive(Debug)]
struct Ringing {
    meta: CallMeta,
    started: Instant,
    started_ms: u64,
    /// Name of the trunk that carries it.
    trunk: Option<String>,
    state: Mutex<Dialling>,
    /// Ends it.
    cancel: CancellationToken,
    /// The call that waits for it, where it is to be joined with one.
    bridge: Option<Bridge>,
}

/// What is shown of a call that rings, in the shape of a live one as far as it goes.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct RingingInfo {
    /// As of a live call.
    #[serde(flatten)]
    pub meta: CallMeta,
    /// `sip`.
    pub leg: &'static str,
    /// `trying`, `ringing`, `earlyMedia` or `answered`.
    pub state: &'static str,
    /// The SIP status that says so.
    pub status: Option<u16>,
    /// Unix time of its beginning in milliseconds.
    pub started_ms: u64,
    /// How long it has rung, in milliseconds.
    pub duration_ms: u64,
}

/// A call that was placed.
#[derive(Debug)]
pub struct Placed {
    id: CallId,
    /// How it ended, or the live call.
    answer: oneshot::Receiver<Result<CallHandle, GatewayError>>,
    cancel: CancellationToken,
}

impl Outgoing {
    /// What rings, oldest first.
    pub fn list(&self) -> Vec<RingingInfo> {
        let mut calls: Vec<_> = self.0.iter().map(|entry| entry.value().info()).collect();
        calls.sort_by(|a, b| (a.started_ms, &a.meta.id).cmp(&(b.started_ms, &b.meta.id)));
        calls
    }

    /// The call with this id while it rings.
    pub fn get(&self, id: &CallId) -> Option<RingingInfo> {
        self.0.get(id).map(|entry| entry.value().info())
    }

    /// Gives up the call with this id; `false` where none rings.
    pub fn cancel(&self, id: &CallId) -> bool {
        let entry = self.0.get(id);
        entry.map(|entry| entry.value().cancel.cancel()).is_some()
    }

    /// Gives up every call that rings.
    pub fn cancel_all(&self) {
        self.0.iter().for_each(|entry| entry.value().cancel.cancel());
    }
}

impl Ringing {
    fn info(&self) -> RingingInfo {
        let state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        RingingInfo {
            meta: self.meta.clone(),
            leg: "sip",
            state: state.label(),
            status: state.status(),
            started_ms: self.started_ms,
            duration_ms: clock::now().saturating_duration_since(self.started).as_millis() as u64,
        }
    }
}

impl Placed {
    /// The id that the call has and will keep.
    pub fn id(&self) -> &CallId {
        &self.id
    }

    /// Waits until somebody answers. Dropping the future gives the call up.
    ///
    /// # Errors
    /// It was not answered.
    pub async fn answered(self) -> Result<CallHandle, GatewayError> {
        let guard: DropGuard = self.cancel.drop_guard();
        let answer = self.answer.await;
        guard.disarm();
        // The task always answers; without one the process is going down.
        answer.unwrap_or(Err(GatewayError::Dial(DialError::NoAnswer)))
    }
}

/// What an outbound call is for.
pub(super) enum Purpose {
    /// Its agent, and whether it is found out who answers.
    Agent(Detection),
    /// The caller of another call.
    Bridge(Bridge),
}

impl Gateway {
    /// Places a call to a telephone, to be connected to an agent (`None`: the default one), for a token with limits of its
    /// own or without any. Returns at once; what comes of it is told as [`crate::call::CallEvent::Dialling`].
    ///
    /// # Errors
    /// As [`Gateway::admit`]; the token's limits are reached; or the address, the caller or a header cannot be used.
    pub fn place(
        &self,
        request: DialRequest,
        agent: Option<String>,
        tenant: Arc<str>,
        detection: Detection,
        dialer: Option<&Dialer>,
    ) -> Result<Placed, GatewayError> {
        self.place_for(Purpose::Agent(detection), request, agent, tenant, dialer)
    }

    /// As [`Gateway::place`], for whatever purpose.
    ///
    /// # Errors
    /// As there.
    pub(super) fn place_for(
        &self,
        purpose: Purpose,
        request: DialRequest,
        agent: Option<String>,
        tenant: Arc<str>,
        dialer: Option<&Dialer>,
    ) -> Result<Placed, GatewayError> {
        let Some(sip) = &self.sip else { return Err(GatewayError::NoSip) };
        let (detection, bridge) = match purpose {
            Purpose::Agent(detection) => (detection, None),
            Purpose::Bridge(bridge) => (Detection::Off, Some(bridge)),
        };
        let asked = CallRequest {
            direction: Direction::Outbound,
            from: request.from.clone().unwrap_or_default(),
            to: request.to.clone(),
            agent,
            headers: request.headers.clone(),
            tenant,
        };
        let admission = self.admit_to(asked, bridge.is_none())?.detecting(detection);
        let trunk = sip.check(&request)?;
        self.tenants.may_dial(&admission.meta().tenant, trunk.as_deref())?;
        // Last, so that a mistake does not count as a call.
        let lease = dialer.map(|dialer| self.dialers.begin(dialer)).transpose()?;
        let (told, answer) = oneshot::channel();
        let bridge = bridge.map(Bridge::begin);
        let cancel = bridge.as_ref().map_or_else(CancellationToken::new, |bridge| bridge.claim.given_up().clone());
        let id = admission.id().clone();
        let ringing = Arc::new(Ringing {
            meta: admission.meta().clone(),
            started: clock::now(),
            started_ms: clock::wall().as_millis() as u64,
            trunk,
            state: Mutex::new(Dialling::Trying),
            cancel: cancel.clone(),
            bridge,
        });
        self.outgoing.0.insert(id.clone(), ringing.clone());
        let (gateway, sip) = (self.clone(), sip.clone());
        tokio::spawn(async move {
            gateway.dialling(&ringing, Dialling::Trying);
            let tell = |provisional| {
                gateway.dialling(
                    &ringing,
                    match provisional {
                        Provisional::Ringing { status } => Dialling::Ringing { status },
                        Provisional::EarlyMedia { status } => Dialling::EarlyMedia { status },
                    },
                );
            };
            let outcome = gateway.ring(&sip, request, &tell, admission, &ringing).await;
            // Live or over: what is told of its end can be relied on in the list.
            gateway.outgoing.0.remove(&ringing.meta.id);
            let outcome = outcome.and_then(|call| unless_given_up(call, &ringing));
            if let Err(error) = &outcome {
                if let GatewayError::Dial(DialError::Declined { cause: Some(cause), .. }) = error {
                    gateway.calls.tell(&ringing.meta, CallEvent::PeerCause(cause.clone()));
                }
                gateway.dialling(&ringing, how(error));
            }
            if let (Ok(call), Some(lease)) = (&outcome, lease) {
                tokio::spawn(dialers::watch(call.clone(), lease));
            }
            if let (Ok(call), Some(bridge)) = (&outcome, &ringing.bridge) {
                bridge.join(call);
            }
            // Its result is not needed.
            let _ = told.send(outcome);
        });
        Ok(Placed { id, answer, cancel })
    }

    /// Dials until somebody answers. Where the called side sends sound before, the call is live from then on, without its
    /// agent: it is heard, and media sockets may listen.
    async fn ring(
        &self,
        sip: &Endpoint,
        request: DialRequest,
        tell: &(dyn Fn(Provisional) + Send + Sync),
        admission: Admission,
        ringing: &Ringing,
    ) -> Result<CallHandle, GatewayError> {
        let mut live: Option<CallHandle> = None;
        let (early, mut sound) = oneshot::channel();
        let mut waits = true;
        // Dropped before what follows: it sends CANCEL where the call is not answered.
        let answered = {
            let mut dial = pin!(sip.dial_early(request, tell, early));
            loop {
                tokio::select! {
                    biased;
                    leg = &mut sound, if waits => {
                        waits = false;
                        let Ok(leg) = leg else { continue };
                        match admission.begin(leg) {
                            Ok(call) => {
                                if let Some(bridge) = &ringing.bridge {
                                    bridge.early(&call);
                                }
                                live = Some(call);
                            }
                            Err(error) => break Err(error),
                        }
                    }
                    answer = &mut dial => break answer.map_err(GatewayError::Dial),
                    () = ringing.cancel.cancelled() => break Err(GatewayError::Cancelled),
                    () = over(live.as_ref()) => break Err(GatewayError::Cancelled),
                    () = over(ringing.bridge.as_ref().map(|bridge| bridge.claim.call())) => {
                        break Err(GatewayError::Cancelled);
                    }
                }
            }
        };
        let answered = match answered {
            // Sound and answer came together.
            Ok(None) if live.is_none() => Ok(sound.try_recv().ok()),
            other => other,
        };
        let begun = answered.and_then(|leg| {
            self.dialling(ringing, Dialling::Answered);
            match (leg, live.clone()) {
                (Some(leg), _) => admission.begin(leg),
                (None, Some(call)) => Ok(call),
                (None, None) => Err(GatewayError::Cancelled),
            }
        });
        match begun {
            Ok(call) if ringing.bridge.is_some() => {
                admission.leave(&call);
                if ringing.cancel.is_cancelled() {
                    call.hang_up(EndReason::HungUp);
                    return Err(GatewayError::Cancelled);
                }
                Ok(call)
            }
            Ok(call) => {
                admission.serve(&call);
                // Given up at the moment of the answer.
                if ringing.cancel.is_cancelled() {
                    call.hang_up(EndReason::HungUp);
                }
                Ok(call)
            }
            Err(error) => {
                if let Some(call) = live {
                    call.hang_up(EndReason::HungUp);
                    call.ended().await;
                }
                Err(error)
            }
        }
    }

    fn dialling(&self, ringing: &Ringing, state: Dialling) {
        *ringing.state.lock().unwrap_or_else(PoisonError::into_inner) = state.clone();
        if let Some(bridge) = &ringing.bridge {
            bridge.tell(&ringing.meta.id, state.clone());
        }
        self.calls.dialling(&ringing.meta, ringing.trunk.as_deref(), state);
    }
}

/// A call that was answered, unless it was given up as long as it was to be found: it ends, and no call is joined with it.
fn unless_given_up(call: CallHandle, ringing: &Ringing) -> Result<CallHandle, GatewayError> {
    if !ringing.cancel.is_cancelled() {
        return Ok(call);
    }
    call.hang_up(EndReason::HungUp);
    match ringing.bridge {
        Some(_) => Err(GatewayError::Cancelled),
        None => Ok(call),
    }
}

/// Waits for the end of a call; for ever where there is none.
async fn over(call: Option<&CallHandle>) {
    match call {
        Some(call) => drop(call.ended().await),
        None => std::future::pending().await,
    }
}

/// What became of a call that is not live.
fn how(error: &GatewayError) -> Dialling {
    match error {
        GatewayError::Cancelled => Dialling::Cancelled,
        GatewayError::Dial(DialError::NoAnswer) => Dialling::NoAnswer { status: None },
        GatewayError::Dial(DialError::Declined { status, reason, .. }) => match *status {
            status @ (486 | 600) => Dialling::Busy { status },
            status @ (408 | 480) => Dialling::NoAnswer { status: Some(status) },
            status => Dialling::Refused { status, reason: reason.clone() },
        },
        other => Dialling::Failed { reason: other.to_string() },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_status_of_the_called_side_says_what_became_of_the_call() {
        let reason = "No".to_owned();
        let declined =
            |status| how(&GatewayError::Dial(DialError::Declined { status, reason: reason.clone(), cause: None }));
        for (status, label) in [(486, "busy"), (600, "busy"), (480, "noAnswer"), (408, "noAnswer"), (603, "refused")] {
            let told = declined(status);
            assert_eq!((told.label(), told.status(), told.is_over()), (label, Some(status), true));
        }
        assert_eq!(how(&GatewayError::Dial(DialError::NoAnswer)).label(), "noAnswer");
        assert_eq!(how(&GatewayError::Cancelled), Dialling::Cancelled);
        assert_eq!(how(&GatewayError::NoSip).label(), "failed");
        assert!(!Dialling::Answered.is_over() && !Dialling::EarlyMedia { status: 183 }.is_over());
    }
}
