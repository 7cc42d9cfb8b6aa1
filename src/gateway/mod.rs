//! The gateway itself: its parts, whether it is ready, and the one door through which every call is set up.
//!
//! SIP, WHIP and the API each bring a leg of their own, and all of them pass [`Gateway::admit`]: it finds the agent,
//! asks the limits and the devices, and gives an [`Admission`], which becomes a call once there is a leg. Nothing
//! here knows HTTP: [`crate::server`] translates requests into these calls and [`GatewayError`] into status codes.
//!
//! Also here, because this is where both the calls and the engine are known: the engine as what calls speak with
//! (`speech`), and the speech of requests that are no calls ([`speaker`]).

pub mod bridge;
pub mod dialers;
mod error;
mod missed;
pub mod outgoing;
pub mod recent;
pub mod rights;
mod room;
mod setup;
pub mod speaker;
mod speech;
pub mod tenants;
pub mod webhooks;

use std::sync::Arc;
use std::time::Duration;

pub use error::GatewayError;
use metrics_exporter_prometheus::PrometheusHandle;
pub use missed::refused;
pub use room::Room;
pub use setup::{Admission, CallRequest, Detection, Dispatcher, answer};
pub use speech::WithFallback;

use crate::agent::Agents;
use crate::agent::config::{Agent as AgentConfig, Overload};
use crate::batch::{Jobs, JobsFault};
use crate::call::Calls;
use crate::clock;
use crate::cluster::Nodes;
use crate::handover::Place;
use crate::recording::Recordings;
use crate::records::Records;
use crate::sip::Endpoint;
use crate::synth::device::{Engine, Phase, Refused};
use crate::voice::api::Service;

/// A part that does not work.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fault {
    /// Which.
    pub part: &'static str,
    /// What is wrong with it.
    pub reason: String,
    /// Whether calls cannot be served without it.
    pub fatal: bool,
    /// Whether it is started again by itself; else the process ends, to be started anew.
    pub mends: bool,
}

/// The parts of a running gateway. Clones mean the same parts.
#[derive(Clone)]
pub struct Gateway {
    /// Live calls.
    pub calls: Calls,
    /// Calls that ring.
    pub outgoing: outgoing::Outgoing,
    /// What tokens have called out.
    pub dialers: dialers::Dialers,
    /// Their agents.
    pub agents: Agents,
    /// The speech engine.
    pub engine: Engine,
    /// The default voice on an engine of its own, for agents with `overload = "default_voice"`.
    pub fallback: Option<Engine>,
    /// Batch work.
    pub jobs: Jobs,
    /// Records of calls.
    pub records: Records,
    /// Sound of calls.
    pub recordings: Recordings,
    /// Who is told of events as they happen.
    pub webhooks: webhooks::Webhooks,
    /// Enrolled voices.
    pub voices: Arc<Service>,
    /// Telephone signalling, where it is configured.
    pub sip: Option<Arc<Endpoint>>,
    /// Whether calls that come over SIP are answered.
    pub dispatcher: Dispatcher,
    /// Browser sessions.
    pub webrtc: crate::webrtc::Gateway,
    /// The latest turns.
    pub recent: recent::Recent,
    /// The process's metrics.
    pub metrics: &'static PrometheusHandle,
    /// What customers of this gateway may use.
    pub tenants: tenants::Tenants,
    /// Whether a new call would be taken.
    pub room: Room,
    /// The other gateways behind the same number, where there are some.
    pub nodes: Option<Nodes>,
    /// Whether this process takes what comes, and the gateway before it.
    pub place: Place,
    /// The agent of calls that name none.
    pub default_agent: Arc<str>,
    /// How long a drain lets turns end.
    pub drain_grace: Duration,
}

impl Gateway {
    /// Whether some device speaks.
    pub fn is_ready(&self) -> bool {
        is_ready(&self.engine)
    }

    /// The parts that do not work; see [`Fault`]. Devices tell for themselves, by their phase.
    pub fn faults(&self) -> Vec<Fault> {
        let mut faults = Vec::new();
        let mut gone = |part, is| {
            if is {
                let reason = "its task has ended unexpectedly; the log says why".to_owned();
                faults.push(Fault { part, reason, fatal: true, mends: false });
            }
        };
        gone("sip", self.sip.as_ref().is_some_and(|sip| sip.is_broken()));
        gone("dispatcher", self.dispatcher.is_gone());
        let still = self.calls.shards().still(clock::now());
        if still > 0 {
            let reason =
                format!("{still} of its {} threads stand still: their calls are silent", self.calls.shards().count());
            faults.push(Fault { part: "media", reason, fatal: true, mends: true });
        }
        match self.jobs.fault() {
            Some(JobsFault::Thread) => {
                let reason = "its thread panicked and is started again".to_owned();
                faults.push(Fault { part: "batch", reason, fatal: true, mends: true });
            }
            // Telephony goes on without it.
            Some(JobsFault::Database(reason)) => {
                faults.push(Fault { part: "batch", reason, fatal: false, mends: true })
            }
            None => {}
        }
        // They keep what comes meanwhile.
        let resting = [
            ("records", self.records.are_down()),
            ("recordings", self.recordings.are_down()),
            ("webhooks", self.webhooks.are_down()),
        ];
        for (part, _) in resting.into_iter().filter(|(_, down)| *down) {
            let reason = "it panicked and is started again".to_owned();
            faults.push(Fault { part, reason, fatal: false, mends: true });
        }
        if let Some(reason) = self.records.fault() {
            faults.push(Fault { part: "records", reason, fatal: false, mends: true });
        }
        faults
    }

    /// Whose voices are.
    pub fn rights(&self) -> rights::Rights {
        rights::Rights::new(self.voices.clone(), self.tenants.clone(), self.nodes.clone())
    }

    /// Waits until every engine speaks, or has failed.
    pub async fn ready(&self) {
        self.engine.ready().await;
        if let Some(fallback) = &self.fallback {
            fallback.ready().await;
        }
    }

    /// Whether a call to this agent could be spoken on in time; when to come back, if not.
    ///
    /// # Errors
    /// No device speaks, or the first turn would be late, and the agent has no fallback that is ready.
    pub fn has_room_for(&self, agent: &AgentConfig) -> Result<(), Refused> {
        if self.fallback_for(agent).is_some_and(is_ready) {
            return Ok(());
        }
        self.engine.has_room()
    }

    /// The fallback voice of an agent that asks for one.
    fn fallback_for(&self, agent: &AgentConfig) -> Option<&Engine> {
        self.fallback.as_ref().filter(|_| agent.overload == Overload::DefaultVoice)
    }

    /// Refuses new calls and lets what is queued on the live ones be said, for the grace at most; then no session is
    /// left. Returns how many calls were cut off.
    pub async fn close(&self) -> usize {
        self.outgoing.cancel_all();
        let cut = self.calls.close(self.drain_grace).await;
        if let Some(sip) = &self.sip {
            sip.shutdown().await;
        }
        self.webrtc.shutdown().await;
        cut
    }

    /// Stops the threads of the parts; [`Gateway::close`] first. Blocks until they are joined.
    pub fn shutdown(self) {
        self.jobs.shutdown();
        self.calls.shutdown();
        self.records.shutdown();
        self.recordings.shutdown();
        self.engine.shutdown();
        if let Some(fallback) = self.fallback {
            fallback.shutdown();
        }
    }
}

fn is_ready(engine: &Engine) -> bool {
    engine.status().iter().any(|device| device.phase == Phase::Ready)
}
