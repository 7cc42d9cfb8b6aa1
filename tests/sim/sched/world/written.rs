//! Utterances whose text is written while they are spoken.

use std::time::{Duration, Instant};

use antiphon::sched::{JobId, JobSpec, Refused};
use antiphon::turn::{Class, Epoch, StreamId};

use super::{Event, Listener, Utterance, World, zero};

/// Bounds of a call's wait after a refusal.
const RETRY: (Duration, Duration) = (Duration::from_millis(50), Duration::from_secs(2));
/// Tokens that room is kept for where a text is still being written.
const STREAMED: u32 = 144;

impl World {
    /// Submits the first piece of a text, which goes on. Where it is refused it waits, within the bounds of a call, with all
    /// that was written until then.
    pub(super) fn begin_writing(
        &mut self,
        at: Instant,
        stream: u64,
        pieces: Vec<(u32, u32)>,
        gap: Duration,
        new: bool,
    ) {
        let listener = self.listeners.entry(stream).or_insert_with(|| Listener {
            epoch: Epoch::default(),
            accepted: at,
            sounded: false,
            class: Class::Live,
            dry: None,
            held: None,
            left: 0,
        });
        if new && listener.left == 0 {
            listener.accepted = at;
            listener.sounded = false;
        }
        self.report.turns += u32::from(new);
        let token = listener.epoch.token();
        let (first, chars) = pieces[0];
        let spec =
            JobSpec { stream: StreamId(stream), class: Class::Live, token: token.clone(), tenant: "".into(), chars };
        match self.policy.submit(at, spec) {
            Ok(job) => {
                let tokens: u32 = pieces.iter().map(|(tokens, _)| tokens).sum();
                let whole = pieces.len() == 1;
                if !whole {
                    self.policy.begin_writing(job);
                }
                self.cycle.accepted(job);
                self.report.submitted += 1;
                listener.left += 1;
                let utterance = Utterance {
                    stream,
                    tenant: "",
                    tokens,
                    written: first,
                    writing: !whole,
                    sized: if whole { tokens } else { STREAMED },
                    position: 0,
                    given: 0,
                    epoch: token,
                    class: Class::Live,
                    submitted: at,
                    behind_batch: 0,
                    reached: [None; 4],
                };
                self.jobs.insert(job, utterance);
                let count = pieces.len();
                for (n, (tokens, chars)) in pieces.into_iter().enumerate().skip(1) {
                    let event = Event::Piece { stream, tokens, chars, last: n + 1 == count };
                    self.at(at - zero() + gap * n as u32, event);
                }
            }
            Err(Refused { retry_after, reason }) => {
                self.report.refused += 1;
                *self.report.refused_by.entry(("", reason.label())).or_default() += 1;
                let wait = retry_after.clamp(RETRY.0, RETRY.1);
                // What was written until then is there at once.
                let there = (wait.as_secs_f64() / gap.as_secs_f64().max(1e-3)) as usize + 1;
                let (ready, rest) = pieces.split_at(there.min(pieces.len()));
                let sum = ready.iter().fold((0, 0), |sum, piece| (sum.0 + piece.0, sum.1 + piece.1));
                let pieces = std::iter::once(sum).chain(rest.iter().copied()).collect();
                self.at(at - zero() + wait, Event::Written { stream, pieces, gap, new: false });
            }
        }
    }

    /// There is more of the text of `stream`: so many tokens and characters, or (`last`) its end.
    pub(super) fn go_on(&mut self, stream: u64, (tokens, chars): (u32, u32), last: bool) {
        // The latest of the stream whose text is being written; one that was refused gets all of it when it is taken.
        let mut of = self.jobs.iter().rev().filter(|(_, one)| one.stream == stream && one.writing);
        let Some(job) = of.next().map(|(job, _)| *job) else { return };
        let utterance = self.jobs.get_mut(&job).expect("known");
        utterance.written += tokens;
        utterance.writing = !last;
        if last {
            utterance.written = utterance.tokens;
        }
        self.policy.written(job, chars);
        self.cycle.written(job);
    }

    /// Gives the engine what was written on of utterances that are open; the others get it when they are opened.
    pub(super) fn feed(&mut self, jobs: &[JobId]) {
        for &job in jobs {
            let Some(slot) = self.slots.iter().find(|(_, open)| **open == job).map(|(slot, _)| *slot) else { continue };
            let Utterance { written, writing, .. } = self.jobs[&job];
            let ready = self.engine.feed(slot, written);
            self.policy.fed(self.now, job, ready, !writing);
        }
    }
}
