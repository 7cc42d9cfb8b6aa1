//! Whether a new call would be taken, here or by another gateway: what OPTIONS, readiness and the other nodes are told.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::{GatewayError, is_ready};
use crate::call::Calls;
use crate::clock;
use crate::cluster::{Load, Nodes, Sip};
use crate::sip::{Addresses, Admission, Neighbours};
use crate::synth::device::{Engine, Phase, Refused};

/// What the devices said is believed for so long: a flood of OPTIONS asks them no oftener.
const CACHED: Duration = Duration::from_millis(50);
/// When a refused call may come again where nothing says it better.
const RETRY: Duration = Duration::from_secs(5);

/// What the devices said, and when.
type Asked = (Instant, Result<(), Refused>);

/// The room of this gateway and, where there are others, theirs. Clones mean the same.
#[derive(Clone)]
pub struct Room {
    calls: Calls,
    engine: Engine,
    fallback: Option<Engine>,
    nodes: Option<Nodes>,
    asked: Arc<Mutex<Option<Asked>>>,
}

impl Room {
    /// Of a gateway with these parts.
    pub fn new(calls: Calls, engine: Engine, fallback: Option<Engine>, nodes: Option<Nodes>) -> Self {
        Self { calls, engine, fallback, nodes, asked: Arc::default() }
    }

    /// Whether a call would be taken here, whichever agent it is for.
    ///
    /// # Errors
    /// Draining, full, or no device speaks in time.
    pub fn check(&self) -> Result<(), GatewayError> {
        self.calls.has_room()?;
        let now = clock::now();
        let mut asked = self.asked.lock().unwrap_or_else(PoisonError::into_inner);
        let answer = match &*asked {
            Some((at, answer)) if now.saturating_duration_since(*at) < CACHED => answer.clone(),
            _ => {
                let spoken = self.fallback.as_ref().is_some_and(is_ready);
                let answer = if spoken { Ok(()) } else { self.engine.has_room() };
                *asked = Some((now, answer.clone()));
                answer
            }
        };
        Ok(answer?)
    }

    /// What the other nodes are told.
    pub fn load(&self) -> Load {
        let refused = self.check().err();
        let (calls, most) = (self.calls.count(), self.calls.most());
        let (mut streams, mut slack) = (0.0, None::<f64>);
        for device in self.engine.status().iter().filter(|device| device.phase == Phase::Ready) {
            let load = &device.load;
            streams += free_streams(load.sustainable, load.capacity, load.live);
            slack = [slack, load.slack].into_iter().flatten().reduce(f64::min);
        }
        let calls_left = most.saturating_sub(calls) as f64;
        Load {
            calls: u32::try_from(calls).unwrap_or(u32::MAX),
            max_calls: u32::try_from(most).unwrap_or(u32::MAX),
            // The fallback voice costs next to nothing: calls are its only limit.
            free: if self.fallback.is_some() { calls_left } else { calls_left.min(streams) },
            room: refused.is_none() && !self.calls.is_leaving(),
            draining: self.calls.is_leaving(),
            retry_after_ms: wait(refused.as_ref()).as_millis() as u64,
            slack_s: slack.filter(|seconds| seconds.is_finite()),
        }
    }

    /// Whether a balancer should send requests: there is room, or no other gateway has any either.
    pub fn is_wanted(&self) -> bool {
        let elsewhere = || self.nodes.as_ref().is_some_and(|nodes| !nodes.with_room(clock::now()).is_empty());
        !elsewhere() || self.check().is_ok()
    }
}

/// Live streams that a device could take beside `live`: as many as it sustains, once that is known.
pub(super) fn free_streams(sustainable: f64, capacity: u32, live: u32) -> f64 {
    let known = sustainable.is_finite() && sustainable > 0.0;
    let most = if known { sustainable.min(f64::from(capacity)) } else { f64::from(capacity) };
    (most - f64::from(live)).max(0.0)
}

fn wait(refused: Option<&GatewayError>) -> Duration {
    refused.map_or(Duration::ZERO, |error| error.retry_after().unwrap_or(RETRY))
}

impl Neighbours for Room {
    fn registers(&self, trunk: &str) -> bool {
        self.nodes.as_ref().is_none_or(|nodes| nodes.registers(clock::now(), trunk))
    }

    fn admission(&self) -> Admission {
        let Err(error) = self.check() else { return Admission::Open };
        let (now, own) = (clock::now(), wait(Some(&error)));
        let Some(nodes) = &self.nodes else { return Admission::Closed { retry_after: own, elsewhere: None } };
        let speaks = |sip: &Sip| sip.udp.or(sip.tcp).or(sip.tls).is_some();
        let other = nodes.with_room(now).into_iter().find(|peer| speaks(&peer.sip));
        // Told for every INVITE, also one that is repeated, so it is not counted as sent: a second later it tells itself.
        let elsewhere = other.map(|peer| Addresses { udp: peer.sip.udp, tcp: peer.sip.tcp, tls: peer.sip.tls });
        Admission::Closed { retry_after: nodes.retry_after(now, own), elsewhere }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_has_room_for_what_it_sustains_and_has_memory_for() {
        for (sustainable, capacity, live, wanted) in [
            (0.0, 64, 4, 60.0),
            (f64::INFINITY, 64, 4, 60.0),
            (40.5, 64, 4, 36.5),
            (90.0, 64, 4, 60.0),
            (3.0, 64, 4, 0.0),
        ] {
            assert_eq!(free_streams(sustainable, capacity, live), wanted, "{sustainable} {capacity} {live}");
        }
    }
}
