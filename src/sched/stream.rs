//! What a stream's listener hears and when it underruns: arithmetic on the anchor, never a question to the call.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use super::JobId;
use super::tenant::Permit;
use crate::audio::{duration_of, samples_in};
use crate::turn::TurnToken;

/// What the owner of a stream tells the scheduler about its listener.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StreamNote {
    /// The first frame of a talk spurt left at `at`.
    Anchored {
        /// When.
        at: Instant,
    },
    /// So much of what was produced is not going to be heard: silence around a sentence that was left out. What follows it
    /// is heard sooner.
    Skipped {
        /// Samples.
        samples: u64,
    },
    /// Playout stands still (SIP hold, agent's pause): no underrun comes nearer.
    Held,
    /// Playout goes on.
    Resumed,
    /// What was produced and not yet heard has been dropped (barge-in). Raising the epoch does the same for
    /// the work; this only makes it known at once.
    Interrupted,
    /// The consumer takes audio as fast as it comes (a file download): the lead limit does not apply, and a
    /// full sink delays the stream instead of failing it.
    Unpaced,
    /// The stream is over: its work is cancelled and it is forgotten.
    Closed,
}

/// One stream: its jobs in speaking order and its listener's position.
#[derive(Debug)]
pub(super) struct Stream {
    pub(super) jobs: VecDeque<JobId>,
    /// That of the last job: when stale, what was produced has been flushed.
    pub(super) token: TurnToken,
    pub(super) paced: bool,
    /// Reached the lead limit and waits until some of it is used up.
    pub(super) resting: bool,
    /// Memory is short and so much of its utterance is left: it goes on to the end, which frees what it holds.
    pub(super) finishing: Option<Duration>,
    /// While it is a live stream with unfinished work: since when, and its part of its tenant's limit.
    pub(super) counted: Option<(Instant, Permit)>,
    pub(super) touched: Instant,
    playout: Playout,
}

impl Stream {
    pub(super) fn new(now: Instant, token: TurnToken) -> Self {
        Self {
            jobs: VecDeque::new(),
            token,
            paced: true,
            resting: false,
            finishing: None,
            counted: None,
            touched: now,
            playout: Playout::default(),
        }
    }

    /// Audio of this stream was produced.
    pub(super) fn produced(&mut self, now: Instant, samples: u64) {
        self.playout.push(now, samples);
        self.touched = now;
    }

    /// Follows the playout, except what concerns the jobs.
    pub(super) fn note(&mut self, now: Instant, note: StreamNote) {
        self.touched = now;
        match note {
            StreamNote::Anchored { at } => self.playout.anchored(now, at),
            StreamNote::Skipped { samples } => self.playout.skip(samples),
            StreamNote::Held => self.playout.hold(now),
            StreamNote::Resumed => self.playout.resume(now),
            StreamNote::Interrupted => self.flush(),
            StreamNote::Unpaced => self.paced = false,
            // The scheduler ends the jobs and forgets the stream.
            StreamNote::Closed => {}
        }
    }

    /// What was produced is not going to be heard.
    pub(super) fn flush(&mut self) {
        self.playout.flush();
        self.resting = false;
    }

    pub(super) fn is_held(&self) -> bool {
        self.playout.held.is_some()
    }

    /// When the listener hears a gap if nothing more comes; in the past after an underrun, `None` when nothing is playing or held.
    pub(super) fn underrun_at(&self) -> Option<Instant> {
        self.playout.underrun_at()
    }

    /// Audio ahead of the listener.
    pub(super) fn lead(&self, now: Instant) -> Duration {
        self.playout.lead(now)
    }
}

/// The listener's position. The assumed anchor is never later than the real one (audio cannot leave before
/// it was produced), so deadlines err on the safe side until the call says what it really was.
#[derive(Debug, Default)]
struct Playout {
    /// When the sample `base` was heard. `None`: nothing plays.
    anchor: Option<Instant>,
    /// Samples of the stream before this spurt.
    base: u64,
    /// Samples of the stream in all.
    produced: u64,
    /// Whether the call has told the real anchor of this spurt.
    confirmed: bool,
    held: Option<Instant>,
}

impl Playout {
    fn push(&mut self, now: Instant, samples: u64) {
        if samples == 0 {
            return;
        }
        let clock = self.held.unwrap_or(now);
        let underrun = self.anchor.is_none_or(|anchor| anchor + duration_of(self.produced - self.base) < clock);
        if underrun {
            self.anchor = Some(clock);
            self.base = self.produced;
            self.confirmed = false;
        }
        self.produced += samples;
    }

    fn anchored(&mut self, now: Instant, at: Instant) {
        let at = at.min(now);
        let Some(anchor) = self.anchor else { return };
        if at <= anchor {
            // Of an earlier spurt, or exactly what was assumed.
            self.confirmed |= at == anchor;
            return;
        }
        if self.confirmed {
            // The call saw a gap where arithmetic saw none. What had been heard by then is at most this much, so
            // the new instant of underrun is at most too early.
            self.base = self.produced.min(self.base + samples_in(at - anchor));
        }
        self.anchor = Some(at);
        self.confirmed = true;
    }

    /// The listener's position passes `samples` at once.
    fn skip(&mut self, samples: u64) {
        self.base = self.produced.min(self.base.saturating_add(samples));
    }

    fn hold(&mut self, now: Instant) {
        self.held.get_or_insert(now);
    }

    fn resume(&mut self, now: Instant) {
        let Some(since) = self.held.take() else { return };
        if let Some(anchor) = &mut self.anchor {
            *anchor += now.saturating_duration_since(since);
        }
    }

    fn flush(&mut self) {
        self.anchor = None;
        self.base = self.produced;
        self.confirmed = false;
    }

    fn underrun_at(&self) -> Option<Instant> {
        if self.held.is_some() {
            return None;
        }
        self.anchor.map(|anchor| anchor + duration_of(self.produced - self.base))
    }

    fn lead(&self, now: Instant) -> Duration {
        let Some(anchor) = self.anchor else { return Duration::ZERO };
        let heard = self.held.unwrap_or(now).saturating_duration_since(anchor);
        duration_of(self.produced - self.base).saturating_sub(heard)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);
    const MS: Duration = Duration::from_millis(1);

    fn start() -> Instant {
        crate::clock::now()
    }

    #[test]
    fn the_anchor_moves_to_the_first_frame_that_left() {
        let t = start();
        let mut p = Playout::default();
        p.push(t, 24_000);
        assert_eq!(p.underrun_at(), Some(t + SECOND));
        p.anchored(t + 15 * MS, t + 12 * MS);
        assert_eq!(p.underrun_at(), Some(t + SECOND + 12 * MS));
        p.push(t + 500 * MS, 24_000);
        assert_eq!(p.underrun_at(), Some(t + 2 * SECOND + 12 * MS));
        assert_eq!(p.lead(t + SECOND), SECOND + 12 * MS);
    }

    #[test]
    fn audio_after_an_underrun_starts_a_spurt() {
        let t = start();
        let mut p = Playout::default();
        p.push(t, 2_400);
        p.push(t + SECOND, 2_400);
        assert_eq!(p.underrun_at(), Some(t + SECOND + 100 * MS));
        // A late note of the first spurt changes nothing.
        p.anchored(t + SECOND, t + 5 * MS);
        assert_eq!(p.underrun_at(), Some(t + SECOND + 100 * MS));
    }

    #[test]
    fn what_is_left_out_brings_the_underrun_nearer() {
        let t = start();
        let mut p = Playout::default();
        p.push(t, samples_in(SECOND));
        p.anchored(t + MS, t + MS);
        p.skip(samples_in(200 * MS));
        assert_eq!(p.underrun_at(), Some(t + 801 * MS));
        assert_eq!(p.lead(t + 101 * MS), 700 * MS);
        p.skip(samples_in(10 * SECOND));
        assert_eq!(p.underrun_at(), Some(t + MS), "no more than was produced");
        p.push(t + SECOND, samples_in(SECOND));
        assert_eq!(p.underrun_at(), Some(t + 2 * SECOND), "a new spurt begins");
    }

    #[test]
    fn hold_stops_the_listener_and_resume_moves_the_anchor() {
        let t = start();
        let mut p = Playout::default();
        p.push(t, 24_000);
        p.hold(t + 200 * MS);
        assert_eq!(p.underrun_at(), None);
        assert_eq!(p.lead(t + 5 * SECOND), 800 * MS);
        p.resume(t + 5 * SECOND);
        assert_eq!(p.underrun_at(), Some(t + 5 * SECOND + 800 * MS));
    }

    #[test]
    fn a_gap_that_only_the_call_saw_never_makes_deadlines_late() {
        let t = start();
        let mut p = Playout::default();
        p.push(t, 24_000);
        p.anchored(t, t + MS);
        p.push(t + 900 * MS, 24_000);
        // The chunk came too late for the call: it played 1 s until 1.001, then started anew at 1.05.
        p.anchored(t + 1_050 * MS, t + 1_050 * MS);
        let real = t + 1_050 * MS + SECOND;
        let ours = p.underrun_at().expect("playing");
        assert!(ours <= real && real - ours < 60 * MS, "{:?} early", real - ours);
    }

    #[test]
    fn a_flush_leaves_silence() {
        let t = start();
        let mut p = Playout::default();
        p.push(t, 240_000);
        p.flush();
        assert_eq!((p.underrun_at(), p.lead(t)), (None, Duration::ZERO));
    }
}
