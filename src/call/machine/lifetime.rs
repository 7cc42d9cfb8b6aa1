//! How long a call may last: its set-up, its whole length, and silence on both sides.

use std::time::{Duration, Instant};

use crate::call::{CallConfig, EndReason};

/// The instants that the limits of a call count from.
#[derive(Debug)]
pub(super) struct Lifetime {
    started: Instant,
    connected: Option<Instant>,
    /// When sound began that the called side sends before it answers.
    early: Option<Instant>,
    last_activity: Instant,
    ended: bool,
}

impl Lifetime {
    pub(super) fn new(now: Instant) -> Self {
        Self { started: now, connected: None, early: None, last_activity: now, ended: false }
    }

    /// Media may flow; `false` when it did already.
    pub(super) fn connect(&mut self, now: Instant) -> bool {
        let first = self.connected.is_none();
        if first {
            self.connected = Some(now);
            self.last_activity = now;
        }
        first
    }

    /// The called side sends sound before it answers.
    pub(super) fn ring(&mut self, now: Instant) {
        if self.connected.is_none() {
            self.early.get_or_insert(now);
        }
    }

    /// Whether there is sound and no answer yet.
    pub(super) fn is_early(&self) -> bool {
        self.early.is_some() && self.connected.is_none()
    }

    /// One of both sides said or did something.
    pub(super) fn active(&mut self, now: Instant) {
        self.last_activity = now;
    }

    /// The call is over; `false` when it was already.
    pub(super) fn end(&mut self) -> bool {
        !std::mem::replace(&mut self.ended, true)
    }

    pub(super) fn has_ended(&self) -> bool {
        self.ended
    }

    /// When media began to flow.
    pub(super) fn connected(&self) -> Option<Instant> {
        self.connected
    }

    /// What the times of media frames count from: the first sound.
    pub(super) fn media_start(&self) -> Instant {
        self.early.or(self.connected).unwrap_or(self.started)
    }

    /// The limit that is reached, if any.
    pub(super) fn due(&self, now: Instant, config: &CallConfig) -> Option<EndReason> {
        self.limits(config).into_iter().flatten().find(|(at, _)| *at <= now).map(|(_, reason)| reason)
    }

    /// When the next limit is reached.
    pub(super) fn deadline(&self, config: &CallConfig) -> Option<Instant> {
        self.limits(config).into_iter().flatten().map(|(at, _)| at).min()
    }

    /// In the order in which they are told when several are reached.
    fn limits(&self, config: &CallConfig) -> [Option<(Instant, EndReason)>; 3] {
        let limit = |from: Instant, seconds: u64, reason: EndReason| {
            (seconds > 0).then(|| (from + Duration::from_secs(seconds), reason))
        };
        let setup = match self.connected {
            // How long it may ring is known to who dials.
            None if self.early.is_some() => {
                return [None, limit(self.started, config.max_duration_s, EndReason::TooLong), None];
            }
            None => limit(self.started, config.setup_timeout_s, EndReason::SetupTimeout),
            Some(_) => None,
        };
        [
            setup,
            limit(self.started, config.max_duration_s, EndReason::TooLong),
            limit(self.last_activity, config.max_idle_s, EndReason::Idle),
        ]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::clock;

    fn config() -> CallConfig {
        CallConfig { setup_timeout_s: 30, max_duration_s: 100, max_idle_s: 40, ..CallConfig::default() }
    }

    #[test]
    fn each_limit_ends_the_call_at_its_instant_and_not_before() {
        let (now, config) = (clock::now(), config());
        let at = |seconds: u64| now + Duration::from_secs(seconds);
        let mut life = Lifetime::new(now);
        assert_eq!(life.deadline(&config), Some(at(30)));
        assert_eq!(life.due(at(29), &config), None);
        assert_eq!(life.due(at(30), &config), Some(EndReason::SetupTimeout));
        assert!(life.connect(at(20)));
        assert!(!life.connect(at(21)), "it connects once");
        assert_eq!(life.deadline(&config), Some(at(60)), "idle, counted from the connection");
        life.active(at(55));
        assert_eq!(life.due(at(94), &config), None);
        assert_eq!(life.due(at(95), &config), Some(EndReason::Idle));
        life.active(at(94));
        assert_eq!(life.due(at(100), &config), Some(EndReason::TooLong));
        assert!(life.end());
        assert!(!life.end(), "it ends once");
    }

    #[test]
    fn what_rings_with_sound_is_no_call_that_fails_to_connect_and_its_clock_begins_there() {
        let (now, config) = (clock::now(), config());
        let at = |seconds: u64| now + Duration::from_secs(seconds);
        let mut life = Lifetime::new(now);
        life.ring(at(2));
        assert!(life.is_early());
        assert_eq!((life.media_start(), life.due(at(99), &config)), (at(2), None));
        assert!(life.connect(at(50)) && !life.is_early());
        life.ring(at(51));
        assert_eq!((life.media_start(), life.is_early()), (at(2), false), "frames go on counting");
        assert_eq!(life.due(at(90), &config), Some(EndReason::Idle), "counted from the answer");
    }

    #[test]
    fn zero_is_no_limit() {
        let now = clock::now();
        let config = CallConfig { setup_timeout_s: 0, max_duration_s: 0, max_idle_s: 0, ..CallConfig::default() };
        let life = Lifetime::new(now);
        assert_eq!(life.deadline(&config), None);
        assert_eq!(life.due(now + Duration::from_secs(1_000_000), &config), None);
    }
}
