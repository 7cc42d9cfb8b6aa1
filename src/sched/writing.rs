//! Jobs whose text is still being written.
//!
//! Such a job keeps its slot while it waits for text, is in no step meanwhile, and is late for no listener: the silence
//! is the writer's.

use std::time::{Duration, Instant};

use super::stream::Stream;
use super::table::Table;
use super::tenant::Tenants;
use super::{JobId, Stages};

/// The text of `job` is still being written.
pub(super) fn begin(table: &mut Table, job: JobId) {
    if let Some(state) = table.job_mut(job) {
        state.writing = true;
    }
}

/// So many characters more of the text of `job` were written.
pub(super) fn written(table: &mut Table, tenants: &mut Tenants, job: JobId, chars: u32) {
    let Some(state) = table.job_mut(job) else { return };
    state.spec.chars = state.spec.chars.saturating_add(chars);
    let tenant = state.tenant;
    tenants.wrote(tenant, chars);
}

/// The voice was given more of the text of `job`, or all of it (`last`): what it can run now. Where its listener heard silence
/// meanwhile it goes on with a first audio, due in `target`.
pub(super) fn fed(table: &mut Table, now: Instant, target: Duration, job: JobId, (ready, last): (Stages, bool)) {
    let Some(state) = table.job(job) else { return };
    let stream = table.stream(state.spec.stream);
    let silent = state.awaits_text() && stream.and_then(Stream::underrun_at).is_some_and(|at| at <= now);
    if let Some(state) = table.job_mut(job) {
        (state.ready, state.writing) = (ready, state.writing && !last);
        if silent {
            (state.resumes, state.deadline) = (true, now + target);
        }
        let stream = state.spec.stream;
        table.advance(stream);
    }
}
