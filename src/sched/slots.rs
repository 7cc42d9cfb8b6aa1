//! What each slot of the engine is used for.

use super::job::JobId;
use super::step::Slot;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Use {
    Free,
    Job(JobId),
    /// The job ended under a launched step, which still works on its state of so many bytes.
    Ended(JobId, u64),
}

#[derive(Debug)]
pub(super) struct Slots(Vec<Use>);

impl Slots {
    pub(super) fn new(count: u32) -> Self {
        Self(vec![Use::Free; count as usize])
    }

    pub(super) fn take(&mut self, slot: Slot, job: JobId) {
        self.0[slot.0 as usize] = Use::Job(job);
    }

    pub(super) fn release(&mut self, slot: Slot) {
        self.0[slot.0 as usize] = Use::Free;
    }

    /// Its job ended under a launched step; it is released later.
    pub(super) fn keep(&mut self, slot: Slot, job: JobId, bytes: u64) {
        self.0[slot.0 as usize] = Use::Ended(job, bytes);
    }

    /// Whose state is, or was until a moment ago, in `slot`.
    pub(super) fn job_in(&self, slot: Slot) -> Option<JobId> {
        match self.0.get(slot.0 as usize)? {
            Use::Job(id) | Use::Ended(id, _) => Some(*id),
            Use::Free => None,
        }
    }

    /// The jobs that have one, in the order of slots.
    pub(super) fn jobs(&self) -> impl Iterator<Item = JobId> {
        self.0.iter().filter_map(|used| if let Use::Job(id) = used { Some(*id) } else { None })
    }

    pub(super) fn first_free(&self) -> Option<Slot> {
        self.0.iter().position(|used| *used == Use::Free).map(|slot| Slot(slot as u32))
    }

    pub(super) fn free(&self) -> u32 {
        self.0.iter().filter(|used| **used == Use::Free).count() as u32
    }

    pub(super) fn is_idle(&self) -> bool {
        self.0.iter().all(|used| *used == Use::Free)
    }

    /// How many hold the state of a job that is over, and the bytes of these.
    pub(super) fn kept(&self) -> (usize, u64) {
        let kept = self.0.iter().filter_map(|used| if let Use::Ended(_, bytes) = used { Some(*bytes) } else { None });
        kept.fold((0, 0), |(count, all), bytes| (count + 1, all + bytes))
    }
}
