//! A device that hangs: a call of its voice that does not come back, or a launched step that never ends.
//!
//! # Why
//! Nothing brings such a thread back: a kernel that never returns is waited for inside the driver, and the GPU is free again
//! with the process only. What can be done is to tell its streams, so that others speak for them, and to say that it hangs:
//! where nothing else speaks the gateway then ends, to be started anew.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::mpsc::{RecvTimeoutError, SyncSender, sync_channel};
use std::time::{Duration, Instant};

use tokio::sync::watch;

use super::guard::{guarded, up};
use super::{RETRY, Shared, State, Worker};
use crate::clock;
use crate::sched::Stage;
use crate::synth::SynthError;
use crate::synth::device::Phase;

/// A device may take so many times as long as its slowest stage does for one utterance: wide steps and long texts do.
const LONGEST: f64 = 50.0;
/// Longest pause between two looks.
const LOOK: Duration = Duration::from_secs(1);

/// Whether a voice is being called, and whether a step runs that was launched: odd while it is. Written by the device's thread.
#[derive(Default)]
pub(super) struct Calls {
    inside: AtomicU64,
    launched: AtomicU64,
}

impl Calls {
    /// Calls the voice; see [`guarded`].
    pub(super) fn within<T>(&self, call: impl FnOnce() -> Result<T, SynthError>) -> Result<T, SynthError> {
        self.inside.fetch_add(1, Relaxed);
        let result = guarded(call);
        self.inside.fetch_add(1, Relaxed);
        result
    }

    fn is_launched(&self) -> bool {
        self.launched.load(Relaxed) % 2 == 1
    }

    /// A step was launched, or the launched one has ended.
    pub(super) fn launches(&self, does: bool) {
        // No other thread writes.
        if self.is_launched() != does {
            self.launched.fetch_add(1, Relaxed);
        }
    }
}

/// One device, watched.
struct Watched {
    shared: Arc<Shared>,
    phase: Arc<watch::Sender<Phase>>,
    looks: Looks,
}

/// What was seen of [`Calls`].
struct Looks {
    at: Instant,
    seen: [u64; 2],
    lasted: [Duration; 2],
}

impl Looks {
    fn new(now: Instant) -> Self {
        Self { at: now, seen: [0; 2], lasted: [Duration::ZERO; 2] }
    }

    /// How long the longest of what goes on has gone on. Between two looks no more counts than two pauses: a process that
    /// was stopped meanwhile (SIGSTOP, a machine that is moved) has not hung.
    fn look(&mut self, now: Instant, calls: &Calls, pause: Duration) -> Duration {
        let passed = now.saturating_duration_since(self.at).min(2 * pause);
        self.at = now;
        let counts = [&calls.inside, &calls.launched].map(|count| count.load(Relaxed));
        for ((seen, lasted), count) in self.seen.iter_mut().zip(&mut self.lasted).zip(counts) {
            let same = count % 2 == 1 && *seen == count;
            *lasted = if same { *lasted + passed } else { Duration::ZERO };
            *seen = count;
        }
        self.lasted.into_iter().max().unwrap_or_default()
    }
}

/// Watches devices, of which each is said to hang after `limit`, on a thread that ends when what is given back is dropped.
///
/// # Errors
/// There is no thread.
pub(in crate::synth::device) fn watch_over(
    devices: Vec<(Arc<Shared>, Arc<watch::Sender<Phase>>)>,
    limit: Duration,
) -> std::io::Result<SyncSender<()>> {
    let (now, pause) = (clock::now(), (limit / 8).min(LOOK));
    let watched = |(shared, phase)| Watched { shared, phase, looks: Looks::new(now) };
    let mut devices: Vec<Watched> = devices.into_iter().map(watched).collect();
    let (end, ended) = sync_channel(0);
    let watch = move || {
        while ended.recv_timeout(pause) == Err(RecvTimeoutError::Timeout) {
            for (index, device) in devices.iter_mut().enumerate() {
                let lasted = device.looks.look(clock::now(), &device.shared.calls, pause);
                let state = device.shared.state();
                let hangs = !state.stop && !state.hangs && lasted >= patience(&state, limit);
                drop(state);
                if hangs {
                    device.gives_up(index, lasted);
                }
            }
        }
    };
    std::thread::Builder::new().name("device-watch".into()).spawn(watch)?;
    Ok(end)
}

/// How long a call of this device's voice may take.
fn patience(state: &State, limit: Duration) -> Duration {
    let Some(sched) = &state.sched else { return limit };
    let steps = sched.step_seconds();
    let slowest = Stage::ALL.into_iter().map(|stage| steps[stage]).fold(0.0, f64::max);
    Duration::try_from_secs_f64(slowest * LONGEST).map_or(Duration::MAX, |steps| steps.max(limit))
}

impl Watched {
    fn gives_up(&self, index: usize, lasted: Duration) {
        let reason = format!("it hangs: a step has not come back for {} s", lasted.as_secs());
        tracing::error!(device = index, error = reason, "speech device failed; only a new process may have it again");
        let label = up(&self.shared, index, false);
        metrics::counter!("antiphon_device_failures_total", "device" => label).increment(1);
        self.shared.state().hangs = true;
        self.shared.abandon(&reason, 1, None, || self.phase.send_replace(Phase::Failed(reason.clone())));
    }
}

impl Worker<'_> {
    /// What is said where the device was given up and its thread goes on: its voice is loaded anew, since its utterances are
    /// gone. A launched step is waited for: it may be what hangs, and then so would whatever else is asked of the device.
    pub(super) fn late(&mut self) -> SynthError {
        while self.shared.calls.is_launched() && self.shared.rest(clock::now() + RETRY) {
            match self.shared.calls.within(|| self.synth.poll()) {
                Ok(false) => {}
                Ok(true) => self.shared.calls.launches(false),
                Err(error) => return error,
            }
        }
        SynthError::Device("a step came back after the device was given up".into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAUSE: Duration = Duration::from_secs(1);

    #[test]
    fn only_what_does_not_come_back_adds_up() {
        let (calls, start) = (Calls::default(), clock::now());
        let mut looks = Looks::new(start);
        let mut second = 0;
        let mut look = |calls: &Calls| {
            second += 1;
            looks.look(start + second * PAUSE, calls, PAUSE)
        };
        // Nothing goes on, then something else at each look.
        assert_eq!(look(&calls), Duration::ZERO);
        for _ in 0..5 {
            calls.inside.fetch_add(2, Relaxed);
            assert_eq!(look(&calls), Duration::ZERO);
        }
        // A call that stays: it counts from the look that first saw it.
        calls.inside.fetch_add(1, Relaxed);
        assert_eq!([look(&calls), look(&calls), look(&calls)], [0, 1, 2].map(Duration::from_secs));
        calls.inside.fetch_add(1, Relaxed);
        assert_eq!(look(&calls), Duration::ZERO);
        // A launched step that never ends, while the voice is called for others.
        calls.launches(true);
        for seconds in 0..4 {
            calls.within(|| Ok(())).expect("it works");
            assert_eq!(look(&calls), Duration::from_secs(seconds));
        }
        calls.launches(false);
        calls.launches(false);
        assert_eq!(look(&calls), Duration::ZERO);
    }

    #[test]
    fn a_process_that_was_stopped_has_not_hung() {
        let (calls, start) = (Calls::default(), clock::now());
        let mut looks = Looks::new(start);
        calls.inside.fetch_add(1, Relaxed);
        looks.look(start + PAUSE, &calls, PAUSE);
        assert_eq!(looks.look(start + 3600 * PAUSE, &calls, PAUSE), 2 * PAUSE);
    }
}
