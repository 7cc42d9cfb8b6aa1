//! One recording that two tasks share: the one that receives writes it, the one that judges waits for what it hears.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::Notify;

use crate::clock;
use crate::sound::heard::{Counts, Heard, Recorder};
use crate::sound::listen;
use crate::wire::rtp;

/// How far back the search for an onset looks again.
const MARGIN: Duration = Duration::from_millis(300);

/// One recorder, shared between the task that receives and those who listen.
#[derive(Clone)]
pub struct Ear(Arc<Shared>);

struct Shared {
    recorder: Mutex<Recorder>,
    /// Told of every packet.
    heard: Notify,
}

impl Ear {
    /// Shares `recorder`.
    pub fn new(recorder: Recorder) -> Ear {
        Ear(Arc::new(Shared { recorder: Mutex::new(recorder), heard: Notify::new() }))
    }

    /// Takes one packet that arrived at `now`.
    pub fn push(&self, now: Instant, packet: rtp::Packet) {
        self.recorder().push(now, packet);
        self.0.heard.notify_waiters();
    }

    /// Exclusive use of the recorder, for a moment.
    pub(crate) fn recorder(&self) -> MutexGuard<'_, Recorder> {
        // A panic while pushing cannot leave a recording that would mislead: at worst one packet is missing.
        self.0.recorder.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A copy of what was heard so far.
    pub fn heard(&self) -> Heard {
        self.recorder().heard(clock::now()).clone()
    }

    /// Takes what was heard so far out; later recordings start empty.
    pub fn take(&self) -> Heard {
        self.recorder().take(clock::now())
    }

    /// Counts since the call began.
    pub fn counts(&self) -> Counts {
        // Decodes what waits: whether that can be decoded is counted too.
        self.recorder().heard(clock::now()).counts
    }

    /// The first audible instant at or after `after`, waiting for it no longer than `within` from now.
    pub async fn onset(&self, after: Instant, within: Duration) -> Option<Instant> {
        // What was silent when it was looked at stays so; packets out of order are the reason for the margin.
        let mut from = after;
        self.wait(within, |heard| {
            let found = listen::onset(heard, from);
            from = after.max(heard.until.checked_sub(MARGIN).unwrap_or(after));
            found
        })
        .await
    }

    /// Waits until nothing audible has been heard for `quiet` since the later of `after` and the last audible
    /// sample; gives the instant of that sample, or `after`. `None` when that does not happen within `within`.
    pub async fn silence(&self, after: Instant, quiet: Duration, within: Duration) -> Option<Instant> {
        let deadline = clock::now() + within;
        let mut last = after;
        loop {
            // Nothing before the last audible sample needs to be looked at again.
            last = listen::last_audible(self.recorder().heard(clock::now()), last).unwrap_or(last);
            // Packets carry sound that is heard after they arrive, so `last` may lie ahead of now.
            let now = clock::now();
            let quiet_at = last + quiet;
            if now >= quiet_at {
                return Some(last);
            }
            if now >= deadline {
                return None;
            }
            clock::sleep_until(quiet_at.min(deadline)).await;
        }
    }

    /// Waits for a digit at or after `after`.
    pub async fn digit(&self, after: Instant, within: Duration) -> Option<char> {
        self.wait(within, |heard| heard.digits.iter().find(|d| d.at >= after).map(|d| d.digit)).await
    }

    /// Waits until `found` finds something; it is asked again after every packet.
    pub async fn wait<T>(&self, within: Duration, mut found: impl FnMut(&Heard) -> Option<T>) -> Option<T> {
        let deadline = clock::now() + within;
        let over = clock::sleep_until(deadline);
        tokio::pin!(over);
        loop {
            // Registered before looking, so that no packet comes between.
            let packet = self.0.heard.notified();
            tokio::pin!(packet);
            packet.as_mut().enable();
            if let Some(it) = found(self.recorder().heard(clock::now())) {
                return Some(it);
            }
            tokio::select! {
                () = packet => {}
                () = &mut over => return None,
            }
        }
    }
}
