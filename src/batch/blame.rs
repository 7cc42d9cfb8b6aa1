//! Which sentence makes a device fail: a machine without clock or I/O, told what was lost and what was finished.
//!
//! A device that fails ends the live calls on it, so a sentence that makes it fail must not be tried for ever. All
//! sentences that were on a device when it was lost are suspects. Until the last of them is cleared, batch runs one
//! sentence at a time:
//!
//! 1. After a loss nothing runs for a while, longer with each loss until some sentence is finished again.
//! 2. A sentence known to be harmless, the probe, shows that the device works. Where it is lost, too, the device is
//!    broken whatever runs: no sentence is blamed, and step 1 begins again.
//! 3. The suspects run alone, in turn. One that is finished is cleared. One under which the device is lost goes to the
//!    end of the queue, and it is guilty when that has happened [`LOSSES`] times.
//!
//! # Why
//! - **A probe before a suspect**: a loss says something of a sentence only where the device did work just before.
//! - **More than one loss**: live work runs at the same time as a suspect, and may have been the cause once.
//! - **In memory only**: after a restart suspicion begins anew, at the price of a few more losses.

use std::collections::{HashMap, VecDeque};
use std::time::{Duration, Instant};

use super::store::PartId;

/// Devices lost under a sentence that runs alone, until it is given up.
pub(super) const LOSSES: u32 = 2;
/// The pause after a loss; twice as long after each further one. Tests of what follows do not wait as long.
const PAUSE: Duration = if cfg!(test) { Duration::from_millis(50) } else { Duration::from_secs(2) };
/// The longest pause.
const LONGEST: Duration = Duration::from_secs(300);

/// What may be handed out next.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Turn {
    /// Whatever waits.
    Free,
    /// Nothing before something that runs has ended.
    Hold,
    /// Nothing before then.
    Wait(Instant),
    /// The harmless sentence.
    Probe,
    /// This one; see [`Blame::started`].
    Alone(PartId),
}

#[derive(Debug)]
pub(super) struct Blame {
    /// Were on a device when it was lost, the next one first.
    suspects: VecDeque<PartId>,
    /// Devices lost under those that ran alone.
    losses: HashMap<PartId, u32>,
    /// Runs alone now.
    alone: Option<PartId>,
    /// Whether the device is known to work since the last loss.
    proven: bool,
    /// Losses since a sentence was finished.
    streak: u32,
    /// Nothing is handed out before then.
    resume: Option<Instant>,
}

impl Blame {
    pub(super) fn new() -> Self {
        Self { suspects: VecDeque::new(), losses: HashMap::new(), alone: None, proven: true, streak: 0, resume: None }
    }

    /// What may run; `busy`: whether any batch work is on a device.
    pub(super) fn next(&self, now: Instant, busy: bool) -> Turn {
        if self.proven && self.suspects.is_empty() && self.alone.is_none() {
            return Turn::Free;
        }
        if busy {
            return Turn::Hold;
        }
        if let Some(until) = self.resume.filter(|until| now < *until) {
            return Turn::Wait(until);
        }
        match self.suspects.front() {
            Some(suspect) if self.proven => Turn::Alone(suspect.clone()),
            _ => Turn::Probe,
        }
    }

    /// A suspect was handed out.
    pub(super) fn started(&mut self, suspect: &PartId) {
        self.forget_suspicion(suspect);
        self.alone = Some(suspect.clone());
    }

    /// A device was lost with this sentence on it. Whether it is guilty: it is forgotten here then.
    pub(super) fn lost(&mut self, now: Instant, id: &PartId) -> bool {
        // One loss ends many sentences; until the probe has run all that end are of one loss.
        if self.proven {
            self.retreat(now);
        }
        if self.ran_alone(id) {
            let losses = self.losses.entry(id.clone()).or_default();
            *losses += 1;
            if *losses >= LOSSES {
                self.losses.remove(id);
                return true;
            }
        }
        if !self.suspects.contains(id) {
            self.suspects.push_back(id.clone());
        }
        false
    }

    /// The device was lost under the probe.
    pub(super) fn broken(&mut self, now: Instant) {
        self.retreat(now);
    }

    /// The probe did not make the device fail.
    pub(super) fn proved(&mut self) {
        self.proven = true;
    }

    /// This sentence was spoken to its end.
    pub(super) fn finished(&mut self, id: &PartId) {
        self.forget(id);
        self.streak = 0;
    }

    /// This sentence came back untouched and will be tried again.
    pub(super) fn returned(&mut self, id: &PartId) {
        if self.ran_alone(id) {
            self.suspects.push_front(id.clone());
        }
    }

    /// This sentence is not to be tried alone: it ended by itself, or its job was cancelled.
    pub(super) fn forget(&mut self, id: &PartId) {
        self.ran_alone(id);
        self.losses.remove(id);
        self.forget_suspicion(id);
    }

    /// Whether it was this one that ran alone, which it does no more.
    fn ran_alone(&mut self, id: &PartId) -> bool {
        self.alone.take_if(|alone| alone == id).is_some()
    }

    fn forget_suspicion(&mut self, id: &PartId) {
        self.suspects.retain(|suspect| suspect != id);
    }

    fn retreat(&mut self, now: Instant) {
        self.proven = false;
        self.streak = self.streak.saturating_add(1);
        let doublings = (self.streak - 1).min(16);
        self.resume = Some(now + PAUSE.saturating_mul(1 << doublings).min(LONGEST));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::clock;

    fn part(part: u32) -> PartId {
        PartId { seq: 1, item: 0, part }
    }

    /// A device, and a machine that hands out to it: `deadly` says whether the device is lost under what runs.
    struct Rig {
        blame: Blame,
        now: Instant,
        waited: Vec<Duration>,
        probes: u32,
        losses: u32,
        finished: Vec<u32>,
        guilty: Vec<u32>,
    }

    impl Rig {
        fn new() -> Self {
            let (now, blame) = (clock::now(), Blame::new());
            Self { blame, now, waited: Vec::new(), probes: 0, losses: 0, finished: Vec::new(), guilty: Vec::new() }
        }

        /// The first of so many sentences are lost together.
        fn lose(&mut self, sentences: u32) {
            self.losses += 1;
            assert!((0..sentences).all(|n| !self.blame.lost(self.now, &part(n))));
        }

        /// Does what comes next; `false` where anything may run.
        fn step(&mut self, deadly: impl Fn(Option<u32>) -> bool) -> bool {
            match self.blame.next(self.now, false) {
                Turn::Free => return false,
                Turn::Hold => panic!("nothing runs"),
                Turn::Wait(until) => {
                    self.waited.push(until - self.now);
                    self.now = until;
                }
                Turn::Probe => {
                    self.probes += 1;
                    if deadly(None) {
                        self.losses += 1;
                        self.blame.broken(self.now);
                    } else {
                        self.blame.proved();
                    }
                }
                Turn::Alone(id) => {
                    self.blame.started(&id);
                    assert_eq!(self.blame.next(self.now, true), Turn::Hold, "not alone");
                    if !deadly(Some(id.part)) {
                        self.blame.finished(&id);
                        self.finished.push(id.part);
                        return true;
                    }
                    self.losses += 1;
                    if self.blame.lost(self.now, &id) {
                        self.guilty.push(id.part);
                    }
                }
            }
            true
        }

        fn run(&mut self, deadly: impl Fn(Option<u32>) -> bool) {
            assert!((0..1_000).any(|_| !self.step(&deadly)), "it never ends");
        }
    }

    #[test]
    fn the_one_that_makes_the_device_fail_is_found_and_the_others_are_spoken() {
        let mut rig = Rig::new();
        rig.lose(5);
        rig.run(|sentence| sentence == Some(2));
        assert_eq!((&rig.guilty[..], &rig.finished[..]), (&[2][..], &[0, 1, 3, 4][..]));
        // Each loss ends the calls on the device.
        assert_eq!((rig.losses, rig.probes), (1 + LOSSES, 1 + LOSSES));
    }

    #[test]
    fn a_sentence_that_ran_during_an_accident_is_spoken() {
        let mut rig = Rig::new();
        rig.lose(3);
        let accident = std::cell::Cell::new(true);
        rig.run(|sentence| sentence == Some(0) && accident.take());
        assert_eq!((&rig.guilty[..], &rig.finished[..]), (&[][..], &[1, 2, 0][..]));
    }

    #[test]
    fn no_sentence_is_blamed_for_a_device_that_fails_whatever_runs() {
        let mut rig = Rig::new();
        rig.lose(4);
        for _ in 0..100 {
            assert!(rig.step(|_| true));
        }
        assert_eq!((&rig.guilty[..], &rig.finished[..]), (&[][..], &[][..]));
        assert_eq!(rig.waited[..3], [PAUSE, 2 * PAUSE, 4 * PAUSE]);
        assert_eq!(rig.waited.last(), Some(&LONGEST));
        rig.run(|_| false);
        assert_eq!((&rig.guilty[..], &rig.finished[..]), (&[][..], &[0, 1, 2, 3][..]));
        // What was long ago is not held against the next loss.
        rig.waited.clear();
        rig.lose(1);
        rig.step(|_| false);
        assert_eq!(rig.waited, [PAUSE]);
    }

    #[test]
    fn a_suspect_that_was_cancelled_or_refused_does_not_hold_up_the_rest() {
        let mut rig = Rig::new();
        rig.lose(2);
        assert_eq!(rig.blame.next(rig.now, true), Turn::Hold, "others that still run may be lost as well");
        while rig.blame.next(rig.now, false) != Turn::Alone(part(0)) {
            rig.step(|_| false);
        }
        rig.blame.started(&part(0));
        rig.blame.returned(&part(0));
        assert_eq!(rig.blame.next(rig.now, false), Turn::Alone(part(0)));
        rig.blame.started(&part(0));
        rig.blame.forget(&part(0));
        assert_eq!(rig.blame.next(rig.now, false), Turn::Alone(part(1)));
        rig.blame.forget(&part(1));
        assert_eq!(rig.blame.next(rig.now, false), Turn::Free);
    }
}
