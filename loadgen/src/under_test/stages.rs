//! Where the time of a turn went inside the gateway, as its stream of events tells, to stand beside what the caller heard.
//!
//! # Why
//! A caller hears that an answer was late, and not why. The gateway knows why, and not what was heard. The turn's name joins
//! them. A gateway that tells no stages, or a token that may not read events, costs nothing but these figures.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use serde_json::Value;
use tokio_util::task::AbortOnDropHandle;

use crate::clock;
use crate::under_test::gateway::Gateway;

/// Stages in the order in which a turn passes them: parts of what the gateway tells, whose sum is the whole.
pub const ORDER: [&str; 8] = ["queue", "wait", "prefill", "firstToken", "firstMel", "firstPcm", "speech", "egress"];
/// Turns whose caller has not been heard of yet: of those that fail it never is.
const MOST: usize = 20_000;
/// Longest event.
const MAX_EVENT: usize = 1 << 20;
/// Until a stream that broke off is asked for again.
const AGAIN: Duration = Duration::from_secs(1);

/// The turn's call and its own name.
pub type TurnName = (String, String);

/// Seconds by stage, [`ORDER`] has their names. `speech` is what of the time until the voice's first sound no other stage has.
pub type StageTimes = BTreeMap<String, f64>;

/// Listens to a gateway's events until it is dropped.
pub struct Followed {
    known: Arc<Mutex<HashMap<TurnName, StageTimes>>>,
    _task: AbortOnDropHandle<()>,
}

impl Followed {
    /// Begins to listen.
    pub fn start(gateway: Gateway) -> Followed {
        let known = Arc::<Mutex<HashMap<TurnName, StageTimes>>>::default();
        let kept = known.clone();
        let task = tokio::spawn(async move {
            loop {
                // Refused or broken off: it may be otherwise later.
                if let Ok(response) = gateway.events().await {
                    listen(response, &kept).await;
                }
                clock::sleep_until(clock::now() + AGAIN).await;
            }
        });
        Followed { known, _task: AbortOnDropHandle::new(task) }
    }

    /// What was told of this turn.
    pub fn take(&self, turn: &TurnName) -> Option<StageTimes> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner).remove(turn)
    }
}

async fn listen(mut response: reqwest::Response, known: &Mutex<HashMap<TurnName, StageTimes>>) {
    let mut read = Vec::new();
    while let Ok(Some(piece)) = response.chunk().await {
        read.extend_from_slice(&piece);
        while let Some(end) = read.windows(2).position(|two| two == b"\n\n") {
            let event: Vec<u8> = read.drain(..end + 2).collect();
            let Some((turn, stages)) = std::str::from_utf8(&event).ok().and_then(told) else { continue };
            let mut known = known.lock().unwrap_or_else(PoisonError::into_inner);
            // overflow: drops what is new; figures of what is known stay right
            if known.len() < MOST {
                known.insert(turn, stages);
            }
        }
        if read.len() > MAX_EVENT {
            return;
        }
    }
}

/// The stages in an event that tells of a turn's first audio.
fn told(event: &str) -> Option<(TurnName, StageTimes)> {
    // Most events are others, and reading them costs the generator what it must not.
    if !event.contains("\"firstAudio\"") {
        return None;
    }
    let data = event.lines().find_map(|line| line.strip_prefix("data:"))?;
    let event: Value = serde_json::from_str(data).ok()?;
    let name = |key: &str| event[key].as_str().map(str::to_owned);
    let stages = times(event.get("stages")?)?;
    Some(((name("callId")?, name("utteranceId")?), stages))
}

/// Seconds by stage of what a gateway writes in milliseconds.
fn times(stages: &Value) -> Option<StageTimes> {
    let seconds = |of: &Value, stage: &str| of[format!("{stage}Ms")].as_f64().map(|ms| ms / 1e3);
    let speech = seconds(stages, "firstAudio")?;
    let mut out = StageTimes::new();
    for stage in ORDER {
        let time = seconds(stages, stage).or_else(|| seconds(&stages["voice"], stage));
        out.extend(time.map(|time| (stage.to_owned(), time)));
    }
    let voice: f64 = ["wait", "prefill", "firstToken", "firstMel", "firstPcm"].iter().filter_map(|s| out.get(*s)).sum();
    out.insert("speech".to_owned(), (speech - voice).max(0.0));
    Some(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stages_of_a_turn_add_up_to_what_the_gateway_took() {
        let event = "event: call\ndata: {\"event\":\"firstAudio\",\"callId\":\"c\",\"utteranceId\":\"u1\",\"afterMs\":31,\
            \"stages\":{\"queueMs\":1,\"firstAudioMs\":20,\"egressMs\":10,\"networkMs\":2,\
            \"voice\":{\"waitMs\":2,\"prefillMs\":3,\"firstTokenMs\":5,\"firstMelMs\":8,\"firstPcmMs\":1}}}\n\n";
        let ((call, turn), stages) = told(event).expect("stages");
        assert_eq!((call.as_str(), turn.as_str(), stages.len()), ("c", "u1", 8));
        assert!((stages["speech"] - 0.001).abs() < 1e-9 && (stages["firstMel"] - 0.008).abs() < 1e-9, "{stages:?}");
        assert!((stages.values().sum::<f64>() - 0.031).abs() < 1e-9, "{stages:?}");
        // A voice of one stage, and a gateway that tells none.
        let plain = event.replace(",\"voice\":{", ",\"none\":{");
        let (_, stages) = told(&plain).expect("stages");
        assert!(stages.len() == 3 && (stages["speech"] - 0.020).abs() < 1e-9, "{stages:?}");
        assert_eq!(told(&event.replace("stages", "other")), None);
        assert_eq!(told("event: call\ndata: {\"event\":\"ended\"}\n\n"), None);
    }
}
