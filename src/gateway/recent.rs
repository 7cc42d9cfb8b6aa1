//! The latest turns of all calls, with where their time went: what somebody who is called at night looks at first.
//!
//! What was said is not kept. A ring of [`KEPT`] turns takes some 200 kB.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use serde::Serialize;
use tokio::sync::{broadcast, watch};

use crate::call::{CallEvent, CallId, TurnId};
use crate::clock;

/// Turns that are kept.
pub const KEPT: usize = 512;

/// One turn, as far as it is.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct RecentTurn {
    /// Its call.
    pub call: CallId,
    /// Its id.
    pub turn: TurnId,
    /// Unix time of its acceptance in milliseconds.
    pub accepted_ms: u64,
    /// From its acceptance to its first packet, in milliseconds.
    pub first_audio_ms: Option<f64>,
    /// Whether it had no other turn before it, so that this is all latency.
    pub immediate: Option<bool>,
    /// Where `first_audio_ms` went.
    pub stages: Option<serde_json::Value>,
    /// Where the time since the caller's last word went, of a turn that answers.
    pub latency: Option<serde_json::Value>,
    /// Gaps that the listener heard, and how long they were together.
    pub underruns: u32,
    /// In milliseconds.
    pub underrun_ms: u64,
    /// How it ended; `None`: it goes on.
    pub how: Option<&'static str>,
    /// Why it was not spoken to its end.
    pub trouble: Option<String>,
    /// How much of it was sent, in milliseconds.
    pub sent_ms: Option<u64>,
}

/// The ring. Clones are the same one.
#[derive(Clone, Debug, Default)]
pub struct Recent(Arc<Mutex<VecDeque<RecentTurn>>>);

impl Recent {
    /// The latest first.
    pub fn list(&self) -> Vec<RecentTurn> {
        self.lock().iter().rev().cloned().collect()
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, VecDeque<RecentTurn>> {
        // What it guards is sound after every step.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Something happened on `call` at `now`, Unix time.
    pub fn note(&self, call: &CallId, event: &CallEvent, now: Duration) {
        if let CallEvent::TurnStarted { turn } = event {
            let mut all = self.lock();
            if all.len() == KEPT {
                all.pop_front();
            }
            return all.push_back(RecentTurn {
                call: call.clone(),
                turn: turn.clone(),
                accepted_ms: now.as_millis() as u64,
                first_audio_ms: None,
                immediate: None,
                stages: None,
                latency: None,
                underruns: 0,
                underrun_ms: 0,
                how: None,
                trouble: None,
                sent_ms: None,
            });
        }
        let (CallEvent::FirstAudio { turn, .. }
        | CallEvent::Answered { turn, .. }
        | CallEvent::Underrun { turn, .. }
        | CallEvent::TurnEnded { turn, .. }) = event
        else {
            return;
        };
        let mut all = self.lock();
        let Some(known) = all.iter_mut().rev().find(|known| known.call == *call && known.turn == *turn) else { return };
        match event {
            CallEvent::FirstAudio { after, immediate, stages, .. } => {
                known.first_audio_ms = Some(after.as_secs_f64() * 1e3);
                known.immediate = Some(*immediate);
                known.stages = Some(stages.describe_own());
            }
            CallEvent::Answered { stages, .. } => known.latency = Some(stages.describe()),
            CallEvent::Underrun { gap, .. } => {
                known.underruns += 1;
                known.underrun_ms += gap.as_millis() as u64;
            }
            CallEvent::TurnEnded { how, heard, .. } => {
                known.how = Some(how.label());
                known.trouble = how.trouble();
                known.sent_ms = Some(heard.sent_ms);
            }
            _ => {}
        }
    }
}

/// Notes what happens on all calls until `stop`. Where it falls behind it misses the oldest: those turns look unfinished.
pub async fn follow(
    recent: Recent,
    mut events: broadcast::Receiver<(CallId, CallEvent)>,
    mut stop: watch::Receiver<bool>,
) {
    loop {
        let event = tokio::select! {
            // Also when its sender is gone.
            _ = stop.changed() => return,
            event = events.recv() => event,
        };
        match event {
            Ok((call, event)) => recent.note(&call, &event, clock::wall()),
            Err(broadcast::error::RecvError::Lagged(_)) => {}
            Err(broadcast::error::RecvError::Closed) => return,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::call::Stages;

    #[test]
    fn a_turn_gathers_what_happened_to_it_and_the_oldest_are_forgotten() {
        let recent = Recent::default();
        let (call, other) = (CallId::from("c"), CallId::from("d"));
        let turn = |name: &str| TurnId::from(name);
        let started = |name: &str| CallEvent::TurnStarted { turn: turn(name) };
        recent.note(&call, &started("a"), Duration::from_secs(7));
        recent.note(&other, &started("a"), Duration::from_secs(8));
        let stages = Stages { first_audio: Duration::from_millis(70), ..Stages::default() };
        let after = Duration::from_millis(80);
        let first = CallEvent::FirstAudio { turn: turn("a"), after, immediate: true, stages };
        recent.note(&call, &first, Duration::from_secs(9));
        for gap in [20, 40] {
            let event = CallEvent::Underrun { turn: turn("a"), gap: Duration::from_millis(gap) };
            recent.note(&call, &event, Duration::from_secs(9));
        }
        recent.note(&call, &CallEvent::Connected, Duration::from_secs(9));
        let all = recent.list();
        assert_eq!((all.len(), &all[0].call, all[0].first_audio_ms), (2, &other, None), "the latest first");
        assert_eq!((all[1].accepted_ms, all[1].first_audio_ms, all[1].immediate), (7_000, Some(80.0), Some(true)));
        assert_eq!(all[1].stages.as_ref().map(|stages| stages["firstAudioMs"].clone()), Some(70.0.into()));
        assert_eq!((all[1].underruns, all[1].underrun_ms, all[1].how), (2, 60, None));
        for n in 0..KEPT {
            recent.note(&call, &started(&format!("t{n}")), Duration::from_secs(10));
        }
        let all = recent.list();
        assert_eq!((all.len(), all[0].turn.clone()), (KEPT, turn(&format!("t{}", KEPT - 1))));
        // Of one that is forgotten nothing is noted.
        recent.note(&call, &first, Duration::from_secs(11));
        assert!(recent.list().iter().all(|turn| turn.first_audio_ms.is_none()));
    }
}
