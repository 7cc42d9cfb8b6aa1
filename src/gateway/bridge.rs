//! A human is called for a caller and joined with them.
//!
//! The human's call is an outbound call as any other: the same trunks, rules and limits, and a record of its own. What is
//! different is that no agent serves it, and that giving the bridge up, or the end of the caller's call, ends it.

use std::time::Duration;

use tokio::sync::watch;

use super::dialers::Dialer;
use super::outgoing::Purpose;
use super::{Gateway, GatewayError};
use crate::call::bridge::{BridgeClaim, WaitTone};
use crate::call::{BridgeMode, BridgeRequest, CallHandle, CallId, Dialling, EndReason};
use crate::sip::DialRequest;

/// A bridge that is being dialled.
#[derive(Debug)]
pub(super) struct Bridge {
    pub(super) claim: BridgeClaim,
    mode: BridgeMode,
    wait: WaitTone,
}

impl Bridge {
    /// Nothing stands in its way: from here on the caller's call hears of it.
    pub(super) fn begin(mut self) -> Self {
        self.claim.keep();
        self
    }

    /// Tells the caller's call how far it is.
    pub(super) fn tell(&self, human: &CallId, state: Dialling) {
        self.claim.tell(Some(human.clone()), state, self.wait);
    }

    /// The human's network plays something while it rings, as most do: the caller hears that in place of our tone.
    pub(super) fn early(&self, human: &CallHandle) {
        if self.wait == WaitTone::Ringback {
            self.claim.hear(human);
        }
    }

    /// The human has picked up.
    pub(super) fn join(&self, human: &CallHandle) {
        if let Err(error) = self.claim.join(human, self.mode) {
            tracing::info!(call = %self.claim.call().id(), %error, "two calls could not be joined");
            human.hang_up(EndReason::HungUp);
            self.tell(human.id(), Dialling::Failed { reason: error.to_string() });
        }
    }
}

impl Gateway {
    /// Calls a human for the peer of `call`, and joins them; what comes of it is told as
    /// [`crate::call::CallEvent::Bridge`]. Gives the id of the human's call.
    ///
    /// # Errors
    /// As [`Gateway::place`]; or the call has a bridge already.
    pub fn bridge(
        &self,
        call: &CallHandle,
        request: BridgeRequest,
        dialer: Option<&Dialer>,
    ) -> Result<CallId, GatewayError> {
        let BridgeRequest { to, from, trunk, mode, wait, ring_timeout_s } = request;
        let Some(claim) = call.claim_bridge() else { return Err(GatewayError::Bridged) };
        let bridge = Bridge { claim, mode, wait };
        let timeout = ring_timeout_s.map(Duration::from_secs);
        let request = DialRequest { to, from, trunk, headers: Default::default(), timeout };
        let meta = call.meta();
        let (agent, tenant) = (Some(meta.agent.clone()), meta.tenant.clone());
        let placed = self.place_for(Purpose::Bridge(bridge), request, agent, tenant, dialer)?;
        Ok(placed.id().clone())
    }
}

/// Dials for the calls whose agents ask for it, until `stop`. A request that cannot be carried out is told to its agent.
pub async fn serve(gateway: Gateway, mut stop: watch::Receiver<bool>) {
    let Some(mut asked) = gateway.calls.bridges() else { return };
    loop {
        let (id, request) = tokio::select! {
            asked = asked.recv() => match asked {
                Some(asked) => asked,
                None => return,
            },
            _ = stop.wait_for(|stop| *stop) => return,
        };
        // A call that is over needs no bridge.
        let Some(call) = gateway.calls.get(&id) else { continue };
        if let Err(error) = gateway.bridge(&call, request, None) {
            tracing::info!(call = %id, %error, "a call gets no bridge");
            call.bridge_refused(error.to_string());
        }
    }
}
