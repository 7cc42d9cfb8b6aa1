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
use crate::call::{Calls, Grace};
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
    /// How a drain goes.
    pub drain: Drain,
}

/// How a drain goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Drain {
    /// How long calls are still taken while everybody who asks is told that they are not.
    pub notice: Duration,
    /// How long those that live may go on.
    pub grace: Grace,
}

impl Gateway {
    /// Whether some device speaks.
    pub fn is_ready(&self) -> bool {
        is_ready(&self.engine)
    }

    /// The parts that do not work; see [`Fault`]. Devices tell for themselves, by their phase, unless they hang.
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
        let hanging = self.engine.status().iter().filter(|device| device.hangs).count();
        faults_of_devices(hanging, self.is_ready() || self.fallback.as_ref().is_some_and(is_ready), &mut faults);
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

    /// Says that no calls are taken, withdraws registrations and parks batch work; after the notice refuses calls and lets what is
    /// queued on the live ones be said, for the grace at most. Returns how many were cut off, also when [`Gateway::resume`]
    /// has taken it back meanwhile.
    pub async fn drain(&self) -> usize {
        if !self.leave(self.drain.notice, false).await {
            return 0;
        }
        self.outgoing.cancel_all();
        self.calls.drain(self.drain.grace).await
    }

    /// Takes calls again; what was told to finish still ends. `false`: the process ends.
    pub async fn resume(&self) -> bool {
        let open = self.calls.resume();
        if open {
            self.sip.iter().for_each(|sip| sip.leave(false));
            self.unpark().await;
        }
        open
    }

    /// As [`Gateway::drain`] with another notice, and for good: then no session is left.
    pub async fn close(&self, notice: Duration) -> usize {
        // Nobody asks a process whose place another has.
        let notice = if self.place.is_held() { notice } else { Duration::ZERO };
        self.leave(notice, true).await;
        // Who connects is refused once the listeners are gone.
        self.place.close();
        self.outgoing.cancel_all();
        let cut = self.calls.close(self.drain.grace).await;
        if let Some(sip) = &self.sip {
            sip.shutdown().await;
        }
        self.webrtc.shutdown().await;
        cut
    }

    /// What comes before calls are refused. `false`: it was taken back.
    async fn leave(&self, notice: Duration, for_good: bool) -> bool {
        let told = self.calls.leave(notice, for_good);
        self.sip.iter().for_each(|sip| sip.leave(true));
        let jobs = self.jobs.clone();
        let parked = async {
            // Waits for what is in hand. A panic there was logged when it happened.
            let _ = tokio::task::spawn_blocking(move || jobs.park()).await;
        };
        let withdrawn = async {
            if let Some(sip) = &self.sip {
                sip.withdrawn().await;
            }
        };
        // Batch work has until the last call: it is waited for at the very end.
        let parking = tokio::spawn(parked);
        let (told, ()) = tokio::join!(told, withdrawn);
        if !told {
            let _ = parking.await;
            self.unpark().await;
        }
        told
    }

    /// Goes on with batch work, unless it is another drain by now.
    async fn unpark(&self) {
        if self.calls.is_leaving() || !self.place.is_held() {
            return;
        }
        let jobs = self.jobs.clone();
        let _ = tokio::task::spawn_blocking(move || jobs.resume()).await;
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

/// So many devices hang; whether another `speaks`. Only a new process is sure to have them again, and is wanted at once where
/// nothing speaks any more.
fn faults_of_devices(hanging: usize, speaks: bool, faults: &mut Vec<Fault>) {
    if hanging > 0 {
        let rest = if speaks { "others speak: start the gateway anew when it suits" } else { "nothing else speaks" };
        let reason = format!("{hanging} of them hang, and may have to be had anew by another process; {rest}");
        faults.push(Fault { part: "devices", reason, fatal: !speaks, mends: speaks });
    }
}

fn is_ready(engine: &Engine) -> bool {
    engine.status().iter().any(|device| device.phase == Phase::Ready)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_whose_only_voice_hangs_is_to_be_started_anew() {
        let told = |hanging, speaks| {
            let mut faults = Vec::new();
            faults_of_devices(hanging, speaks, &mut faults);
            faults.first().map(|fault| (fault.fatal, fault.mends))
        };
        assert_eq!([told(0, false), told(0, true)], [None, None], "it loads, or is loaded again");
        assert_eq!(told(1, true), Some((false, true)));
        assert_eq!(told(1, false), Some((true, false)));
    }
}
