//! Jobs whose text is still being written.
//!
//! Such a job keeps its slot while it waits for text, is in no step meanwhile, and is late for nobody: the silence is the
//! writer's.

use std::time::Instant;

use super::job::State;
use super::stream::Stream;
use super::{JobId, Scheduler, Slot, Stages};

impl Scheduler {
    /// The text of `job` is still being written: while it is open and can run nothing it waits for more. It keeps its slot
    /// meanwhile, as a stream that was promised speech, and is in no step.
    pub fn begin_writing(&mut self, job: JobId) {
        if let Some(state) = self.table.job_mut(job) {
            state.writing = true;
        }
    }

    /// So many characters more of the text of `job` were written.
    pub fn written(&mut self, job: JobId, chars: u32) {
        let Some(state) = self.table.job_mut(job) else { return };
        state.spec.chars = state.spec.chars.saturating_add(chars);
        let tenant = state.tenant;
        self.tenants.wrote(tenant, chars);
    }

    /// The voice was given more of its text, or all of it (`last`): what `job` can run now. Where its listener heard
    /// silence meanwhile that was the writer's: what it goes on with is a first audio, and not late.
    pub fn fed(&mut self, now: Instant, job: JobId, ready: Stages, last: bool) {
        let target = self.config.first_audio_target();
        let Some(state) = self.table.job(job) else { return };
        let stream = self.table.stream(state.spec.stream);
        let silent = state.awaits_text() && stream.and_then(Stream::underrun_at).is_some_and(|at| at <= now);
        if let Some(state) = self.table.job_mut(job) {
            (state.ready, state.writing) = (ready, state.writing && !last);
            if silent {
                (state.resumes, state.deadline) = (true, now + target);
            }
            let stream = state.spec.stream;
            self.table.advance(stream);
        }
    }

    /// The slot of `job`, if its state is in one.
    pub fn slot_of(&self, job: JobId) -> Option<Slot> {
        let job = self.table.job(job)?;
        if matches!(job.state, State::Open(_) | State::Parked(_)) { job.slot() } else { None }
    }
}
