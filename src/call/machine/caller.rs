//! What the caller does and what follows from it: barge-in, hold, transfer, digits, and how speech is cut off.

use std::collections::VecDeque;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use super::{Machine, PendingBargeIn, StaleStream, Transfer};
use crate::audio::RATE;
use crate::call::ear::Sign;
use crate::call::event::{BargeInOutcome, Cause, TurnHow};
use crate::call::handle::Style;
use crate::call::speech::StreamState;
use crate::call::stream::{Entry, Turn};
use crate::call::{CallEvent, EndReason, TurnId};
use crate::media::dtmf;

/// How long sound takes to fall to silence: 5 ms.
const FADE_SAMPLES: usize = RATE as usize / 200;

/// How long the peer may take to reach whom it was sent to: longer than telephones ring.
const TRANSFER_LIMIT: Duration = Duration::from_secs(180);

impl Machine {
    pub(super) fn caller_did(&mut self, now: Instant, sign: Sign) {
        self.last_activity = now;
        match sign {
            Sign::Digit(digit) => {
                self.event(CallEvent::Digit(digit));
                self.barge_in(now, Cause::Dtmf);
            }
            Sign::Speaking(speaking) => {
                self.shared.stats.caller_speaking.store(speaking, Relaxed);
                if speaking {
                    // First the silence, then the news of it.
                    self.barge_in(now, Cause::Speech);
                }
                self.event(CallEvent::Vad { speaking });
            }
        }
    }

    fn barge_in(&mut self, now: Instant, cause: Cause) {
        let config = &self.shared.config.barge_in;
        let Some(front) = self.stream.front() else { return };
        if self.barge_in.is_some() || !front.style.interruptible.unwrap_or(config.interruptible).by(cause) {
            return;
        }
        let grace = config.grace();
        if grace.is_zero() {
            return self.interrupt(now, cause);
        }
        let turn = front.id.clone();
        self.barge_in = Some(PendingBargeIn { turn: turn.clone(), cause, until: now + grace });
        self.apply_pause(now);
        self.event(CallEvent::BargeInPending { turn, cause, grace });
    }

    pub(super) fn resolve_barge_in(&mut self, now: Instant, outcome: BargeInOutcome) {
        let Some(pending) = self.barge_in.take() else { return };
        self.event(CallEvent::BargeInResolved { turn: pending.turn, outcome });
        if matches!(outcome, BargeInOutcome::Confirmed | BargeInOutcome::TimedOutConfirmed) {
            self.interrupt(now, pending.cause);
        }
        self.apply_pause(now);
    }

    /// Cuts off what sounds and forgets what waits, except turns that `cause` may not interrupt.
    pub(super) fn interrupt(&mut self, now: Instant, cause: Cause) {
        let default = self.shared.config.barge_in.interruptible;
        let spared = |turn: &Turn| !turn.style.interruptible.unwrap_or(default).by(cause);
        self.cancel(now, cause, spared);
    }

    /// Ends the turns that `spared` does not spare, silently and at once.
    pub(super) fn cancel(&mut self, now: Instant, cause: Cause, spared: impl Fn(&Turn) -> bool) {
        if self.barge_in.take().is_some() {
            self.apply_pause(now);
        }
        let sounding = self.stream.front().is_some_and(|turn| turn.sounded && !spared(turn));
        let stream = &mut self.stream;
        self.playout.flush(|owner| stream.turn_of(owner).is_some_and(|turn| spared(turn)));
        let cut = self.prepared.iter().position(|(owner, _)| !stream.turn_of(*owner).is_some_and(|turn| spared(turn)));
        let cut = cut.and_then(|place| self.prepared.get_mut(place)).map(|(_, pcm)| std::mem::take(pcm));
        self.prepared.retain(|(owner, _)| stream.turn_of(*owner).is_some_and(|turn| spared(turn)));
        if cut.is_some()
            && let Err(error) = self.encoder.forget_unsent()
        {
            tracing::warn!(%error, "the encoder builds on frames that were not sent");
        }
        if let Some(pcm) = cut.filter(|_| sounding) {
            self.fade(now, pcm);
        }
        let (mut kept, mut interrupted) = (VecDeque::new(), true);
        for entry in std::mem::take(&mut self.stream.entries) {
            match entry {
                Entry::Turn(turn) if spared(&turn) => kept.push_back(Entry::Turn(turn)),
                Entry::Turn(turn) => {
                    if turn.is_open() {
                        self.stale = Some(StaleStream { turn: turn.id.clone(), latest: now });
                    }
                    let heard = turn.heard(&self.playout, &self.stream.pace);
                    let how = if turn.sounded { TurnHow::Interrupted(cause) } else { TurnHow::Cancelled };
                    // One interruption, told of the turn that sounded or was about to.
                    if std::mem::take(&mut interrupted) && !turn.silent {
                        self.meters.interrupted(&self.shared.stats, cause);
                        self.event(CallEvent::Interrupted { turn: turn.id.clone(), cause, heard });
                    }
                    self.turn_ended(*turn, how);
                }
                // A mark behind a turn that goes on still has something to wait for.
                Entry::Mark(name) if kept.is_empty() => self.event(CallEvent::Mark { name, played: false }),
                entry @ (Entry::Mark(_) | Entry::End(_)) => kept.push_back(entry),
            }
        }
        self.stream.entries = kept;
        self.speech.note(self.stream_id, StreamState::Interrupted);
        self.update_flow();
    }

    /// Lets sound that is cut off fall to silence within a frame instead of breaking off, which clicks, and
    /// which the far end's concealment would stretch.
    fn fade(&mut self, now: Instant, mut pcm: Vec<f32>) {
        for (n, sample) in pcm.iter_mut().enumerate() {
            *sample *= (1.0 - n as f32 / FADE_SAMPLES as f32).max(0.0);
        }
        self.tail_due = true;
        self.push_frame(now, &pcm, None);
        self.push_tail(now);
    }

    pub(super) fn transfer_answered(&mut self, now: Instant, outcome: Result<(), String>) {
        match outcome {
            Ok(()) => {
                self.transfer = Some(Transfer::Accepted { until: now + TRANSFER_LIMIT });
                self.event(CallEvent::TransferAccepted);
            }
            Err(reason) => {
                self.transfer = None;
                self.event(CallEvent::Transferred(Err(reason)));
            }
        }
    }

    /// The peer talks to somebody else now, or still to us.
    pub(super) fn transfer_ended(&mut self, outcome: Result<(), String>) {
        self.transfer = None;
        match outcome {
            Ok(()) => {
                self.event(CallEvent::Transferred(Ok(())));
                self.finish(EndReason::Transferred);
            }
            Err(reason) => self.event(CallEvent::TransferFailed(reason)),
        }
    }

    pub(super) fn apply_hold(&mut self, now: Instant, held: bool, by_peer: bool) {
        self.shared.stats.held.store(self.held || self.peer_held, Relaxed);
        self.apply_pause(now);
        self.event(CallEvent::Held { held, by_peer });
    }

    fn apply_pause(&mut self, now: Instant) {
        let paused = self.held || self.peer_held || self.barge_in.is_some();
        self.playout.pause(now, paused);
        self.speech.note(self.stream_id, if paused { StreamState::Held } else { StreamState::Resumed });
    }

    pub(super) fn dial(&mut self, now: Instant, digits: &str) {
        if !self.playout.dial(now, digits) {
            // No events were agreed: the tones go as sound.
            let mut turn = Turn::new(TurnId::next(), Style::default(), now, false);
            turn.silent = true;
            turn.add_clip(dtmf::tones(digits).into(), 1);
            self.stream.add(turn, true, &mut self.playout);
        }
    }
}
