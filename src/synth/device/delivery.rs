//! From the device thread to the sinks: audio, its end, and what waits where a sink is full.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Instant;

use tokio::sync::mpsc::error::TrySendError;

use super::feed::Feed;
use super::phrases::Recorder;
use super::trace::Trace;
use super::worker::State;
use crate::clock;
use crate::sched::{JobEnd, JobId};
use crate::turn::{SpeechEvent, SpeechSink, Utterance, UtteranceEnd};

/// What the scheduler need not know of a job.
pub(super) struct Payload {
    pub(super) utterance: Arc<Utterance>,
    pub(super) sink: SpeechSink,
    /// Waits for room in the sink.
    pub(super) outbox: VecDeque<SpeechEvent>,
    /// Samples since it was last opened.
    pub(super) position: usize,
    /// Samples handed to the sink or the outbox. A displaced utterance starts again and makes the same audio
    /// again; what had been given is not given twice.
    pub(super) given: usize,
    pub(super) trace: Trace,
    pub(super) accepted: Instant,
    /// Of an utterance whose text is still being written.
    pub(super) feed: Option<Feed>,
    /// Keeps what is spoken.
    pub(super) recorder: Option<Recorder>,
}

impl State {
    /// Hands the audio that a step made for `job` to its sink.
    pub(super) fn deliver(&mut self, job: JobId, mut pcm: Vec<f32>) {
        let (Some(payload), Some(sched)) = (self.payloads.get_mut(&job), &mut self.sched) else { return };
        if payload.sink.is_closed() {
            // Also where the step made no audio: a language model would go on for the whole utterance.
            return sched.end(job, JobEnd::Cancelled);
        }
        let start = payload.position;
        payload.position += pcm.len();
        if payload.position <= payload.given {
            return;
        }
        pcm.drain(..payload.given.saturating_sub(start));
        payload.given = payload.position;
        if let Some(recorder) = &mut payload.recorder {
            recorder.hear(&pcm);
        }
        if let Some(stages) = payload.trace.tell(payload.utterance.id, payload.accepted, clock::now()) {
            payload.utterance.stages.tell(stages);
        }
        let event = SpeechEvent::Audio { utterance: payload.utterance.id, pcm };
        if !payload.outbox.is_empty() {
            payload.outbox.push_back(event);
            return;
        }
        // overflow: retained and the job waits, where it is not heard as it comes; the utterance fails otherwise
        match payload.sink.try_send(event) {
            Ok(()) => {}
            Err(TrySendError::Closed(_)) => sched.end(job, JobEnd::Cancelled),
            Err(TrySendError::Full(event)) if sched.may_wait(job) => {
                payload.outbox.push_back(event);
                sched.block(job, true);
                self.blocked.push(job);
            }
            Err(TrySendError::Full(_)) => {
                sched.end(job, JobEnd::Failed("its listener takes no more audio".into()));
            }
        }
    }

    /// Tells the sink that `job` is over, after all of its audio.
    pub(super) fn end(&mut self, job: JobId, how: JobEnd) {
        let Some(mut payload) = self.payloads.remove(&job) else { return };
        self.feeds.remove(&payload.utterance.id);
        let how = match how {
            JobEnd::Done => UtteranceEnd::Done,
            JobEnd::Cancelled => UtteranceEnd::Cancelled,
            JobEnd::Failed(reason) => UtteranceEnd::Failed(reason),
        };
        metrics::counter!("voice_requests_total", "class" => payload.utterance.class.label(), "outcome" => how.label())
            .increment(1);
        let Utterance { tenant, class, text, .. } = &*payload.utterance;
        let audio = crate::audio::duration_of(payload.given as u64);
        let chars = payload.feed.as_ref().map_or_else(|| text.chars().count(), Feed::chars);
        self.meter.add(tenant, *class, chars, audio);
        let took = clock::now().saturating_duration_since(payload.accepted);
        metrics::histogram!("voice_request_duration_seconds", "class" => payload.utterance.class.label()).record(took);
        if let UtteranceEnd::Failed(reason) = &how {
            let Utterance { id, stream, .. } = &*payload.utterance;
            tracing::warn!(utterance = %id, stream = stream.0, reason, "an accepted utterance could not be spoken");
        }
        if how == UtteranceEnd::Cancelled {
            payload.outbox.clear();
        }
        if let Some(recorder) = payload.recorder.take().filter(|_| how == UtteranceEnd::Done) {
            recorder.keep();
        }
        payload.outbox.push_back(SpeechEvent::End { utterance: payload.utterance.id, how });
        if !payload.flush() {
            self.leaving.push(payload);
        }
    }

    /// Tries again what sinks had no room for.
    pub(super) fn drain(&mut self) {
        self.leaving.retain_mut(|payload| !payload.flush());
        let blocked = std::mem::take(&mut self.blocked);
        for job in blocked {
            let (Some(payload), Some(sched)) = (self.payloads.get_mut(&job), &mut self.sched) else { continue };
            if payload.flush() {
                sched.block(job, false);
                if payload.sink.is_closed() {
                    sched.end(job, JobEnd::Cancelled);
                }
            } else {
                self.blocked.push(job);
            }
        }
    }
}

impl Payload {
    /// Whether the outbox is empty now.
    pub(super) fn flush(&mut self) -> bool {
        while let Some(event) = self.outbox.pop_front() {
            // overflow: retained
            match self.sink.try_send(event) {
                Ok(()) => {}
                Err(TrySendError::Full(event)) => {
                    self.outbox.push_front(event);
                    return false;
                }
                Err(TrySendError::Closed(_)) => self.outbox.clear(),
            }
        }
        true
    }
}
