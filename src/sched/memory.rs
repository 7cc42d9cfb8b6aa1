//! The device memory of utterances: what they hold, what they will, and which of them may take more now.
//!
//! An engine that [`grows`](super::EngineLimits::grows) takes memory as an utterance becomes sound. What the utterance
//! will hold in the end is not known before: it is opened by what texts like it have needed so far, and each further
//! part is taken when the step that needs it is planned. Where that goes wrong, few utterances that get on are worth
//! more than many that wait for each other: the one nearest to its end keeps room to finish, others wait for it.
//!
//! # Why
//! - **By expected length, not by the longest**: a text may become three times as much speech as it usually does, and
//!   memory promised for that stands empty. On an engine with the memory of 161 utterances of 8 s, promises at the
//!   longest speech admit a third of them.
//! - **A third of what is still expected is counted for live work**: utterances are in different parts of their lives, and
//!   the one that ends gives back all it held. Batch is opened only where all of it fits: it would be what gives way.
//!   Simulated with memory for 177 s of speech, 39 turns a second of 1.6 or 5.5 s: 2 of 625 refused where half was
//!   counted, none at a third, and no gap either way.

use super::rank::Candidate;
use super::step::Stage;
use super::table::Table;

/// Weight of a new observation of what utterances really need.
const WEIGHT: f64 = 0.05;
/// Mean deviations of that above its mean that are expected.
const CAUTION: f64 = 1.0;

/// Device memory that an utterance will hold at its end.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Need {
    /// By the usual length of speech for such a text.
    pub expected: u64,
    /// At the longest speech that the text may become.
    pub most: u64,
}

impl Need {
    /// Of a voice that knows it exactly.
    pub fn exactly(bytes: u64) -> Self {
        Self { expected: bytes, most: bytes }
    }
}

/// The memory of one job.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Holding {
    /// What it will hold at its end, as the voice says.
    pub(super) need: Need,
    /// The same, by what others have really needed.
    pub(super) expected: u64,
    /// Bytes that it takes when it is opened.
    pub(super) initial: u64,
    /// All of what is expected is promised to it, not a part of what is missing.
    pub(super) in_full: bool,
    /// Bytes that it holds on the device, or did when it was parked.
    pub(super) holds: u64,
    /// Bytes that it will hold once its flow has run.
    pub(super) wants: u64,
    /// The most it held so far.
    pub(super) peak: u64,
}

impl Holding {
    /// Bytes that are promised to it: what it holds, and all or a third of what it is expected to take yet.
    pub(super) fn claim(&self) -> u64 {
        let holds = self.holds.max(self.initial);
        if self.in_full {
            return holds.max(self.expected);
        }
        holds + self.expected.saturating_sub(holds).div_ceil(3)
    }

    /// Bytes that it is expected to hold at its end.
    pub(super) fn in_the_end(&self) -> u64 {
        self.expected.max(self.wants)
    }

    /// Its flow runs: it takes what that needs.
    pub(super) fn grow(&mut self) {
        self.holds = self.holds.max(self.wants);
        self.peak = self.peak.max(self.holds);
    }

    /// What it held is given back.
    pub(super) fn restart(&mut self) {
        (self.holds, self.wants) = (0, 0);
    }
}

/// How much there is, and what of it may be taken.
#[derive(Debug)]
pub(super) struct Memory {
    /// Bytes that open utterances may hold; 0: not limited.
    limit: u64,
    /// Utterances take memory as they go.
    grows: bool,
    /// Memory was lacking where it had been counted to be there: nothing more is opened until some was given back.
    short: bool,
    /// What utterances really needed as a multiple of what was expected: mean and mean deviation.
    really: Option<(f64, f64)>,
}

impl Memory {
    pub(super) fn new(limit: u64, grows: bool) -> Self {
        Self { limit, grows, short: false, really: None }
    }

    pub(super) fn limit(&self) -> u64 {
        self.limit
    }

    /// Live streams that may have unfinished work at once as far as memory goes, where each has `bytes` at its end; 0: not
    /// limited, or not known.
    pub(super) fn streams(&self, bytes: Option<f64>) -> f64 {
        // Where memory is taken as it is used, a third of what is missing is promised: two thirds over a life.
        let part = if self.grows { 2.0 / 3.0 } else { 1.0 };
        bytes.filter(|bytes| *bytes > 0.0).map_or(0.0, |bytes| self.limit as f64 / (part * bytes))
    }

    pub(super) fn grows(&self) -> bool {
        self.grows && self.limit > 0
    }

    /// What open utterances may hold changed.
    pub(super) fn set_limit(&mut self, limit: u64) {
        self.limit = limit;
        self.short = false;
    }

    /// Memory was lacking where it had been counted to be there.
    pub(super) fn ran_short(&mut self) {
        self.short = true;
    }

    /// Some was given back.
    pub(super) fn freed(&mut self) {
        self.short = false;
    }

    /// Bytes that an utterance of that need is counted with before it is opened.
    pub(super) fn expected(&self, need: Need) -> u64 {
        if !self.grows() {
            return need.most;
        }
        let really = self.really.map_or(1.0, |(mean, deviation)| mean + CAUTION * deviation);
        ((need.expected as f64 * really).round() as u64).min(need.most).min(self.limit)
    }

    /// An utterance of that need held so much at its end.
    pub(super) fn learn(&mut self, need: Need, held: u64) {
        if !self.grows() || need.expected == 0 || held == 0 {
            return;
        }
        let new = held as f64 / need.expected as f64;
        let (mean, deviation) = self.really.get_or_insert((new, 0.0));
        *deviation += WEIGHT * ((new - *mean).abs() - *deviation);
        *mean += WEIGHT * (new - *mean);
    }

    /// Whether `needed` bytes more than `claimed` can be promised. Where nothing is claimed, nothing can be given back
    /// either that would be worth waiting for.
    pub(super) fn has(&self, claimed: u64, needed: u64) -> bool {
        let waits = self.short && claimed > 0;
        !waits && (self.limit == 0 || claimed + needed <= self.limit)
    }

    pub(super) fn fits(&self, table: &Table, needed: u64) -> bool {
        self.has(table.claimed(), needed)
    }

    /// Whether live utterances claim so much of it that they should be finished rather than rest: half of it where all
    /// is promised at the start, three quarters where it is taken as it is used. What batch holds can be had at any time.
    pub(super) fn is_mostly_live(&self, table: &Table) -> bool {
        self.live_share(table) > if self.grows { 0.75 } else { 0.5 }
    }

    /// The share of it that live utterances claim; 0 where it is not limited.
    pub(super) fn live_share(&self, table: &Table) -> f64 {
        if self.limit == 0 {
            return 0.0;
        }
        let live = table.open_jobs().filter(|(_, job)| job.is_live());
        live.map(|(_, job)| job.claimed()).sum::<u64>() as f64 / self.limit as f64
    }

    /// Takes from candidates, the most urgent first, the stage that would take memory which is not there or is kept for
    /// the one nearest to its end. Gives one that lacks it: the most urgent if that is live, or the one nearest to its
    /// end.
    ///
    /// Room is kept only for one that is on the device and can go on now: one that waits itself, for memory or to come back
    /// from where it was parked, would have them all wait for ever.
    pub(super) fn gate(&self, table: &Table, candidates: &mut Vec<Candidate>) -> Option<Lack> {
        let growing = |c: &&Candidate| c.growth > 0 && c.stages.has(Stage::Flow);
        let mut free = self.limit.saturating_sub(table.reserved());
        let remaining = |c: &Candidate| table.job(c.job).map_or(0, |job| job.remaining());
        let able = candidates.iter().filter(growing).filter(|c| c.memory_to_resume == 0 && c.growth <= free);
        let finisher = able.min_by_key(|c| (remaining(c), c.job)).map(|c| (c.job, remaining(c)));
        let mut kept = finisher.map_or(0, |(_, remaining)| remaining);
        let mut lack: Option<Lack> = None;
        for candidate in candidates.iter_mut() {
            if !growing(&&*candidate) {
                continue;
            }
            let is_finisher = finisher.is_some_and(|(job, _)| job == candidate.job);
            let reserve = if is_finisher { 0 } else { kept };
            if candidate.growth + reserve <= free {
                free -= candidate.growth;
                kept -= if is_finisher { candidate.growth.min(kept) } else { 0 };
                continue;
            }
            let (job, live, urgent) = (candidate.job, candidate.is_live(), candidate.rank.is_urgent());
            // The most urgent comes first; batch lacks it only where no live work does.
            if lack.is_none_or(|lack| live && !lack.live) {
                lack = Some(Lack { job, live, urgent, stuck: false });
            }
            candidate.stages = candidate.stages.without(Stage::Flow);
        }
        candidates.retain_mut(|candidate| match candidate.stages.last() {
            Some(last) => {
                candidate.stage = last;
                true
            }
            None => false,
        });
        // Where nothing else can run, waiting for memory is waiting for nothing; what is parked comes back behind live work.
        let stuck = candidates.iter().all(|c| c.memory_to_resume > 0);
        // Batch that lacks it while others go on waits for them.
        lack.filter(|lack| lack.live || stuck).map(|lack| Lack { stuck, ..lack })
    }
}

/// A job that cannot go on for want of memory.
#[derive(Clone, Copy, Debug)]
pub(super) struct Lack {
    pub(super) job: super::JobId,
    pub(super) live: bool,
    /// It cannot wait: live work may lose its memory to it.
    pub(super) urgent: bool,
    /// Nothing else can go on either: some job has to lose memory, whichever that harms.
    pub(super) stuck: bool,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_has_room_for_so_many_streams() {
        assert_eq!(Memory::new(100, false).streams(Some(20.0)), 5.0);
        let used = Memory::new(80, true).streams(Some(20.0));
        assert!((used - 6.0).abs() < 1e-9, "each is promised two thirds on average: {used}");
        assert_eq!((Memory::new(0, true).streams(Some(20.0)), Memory::new(90, true).streams(None)), (0.0, 0.0));
    }

    #[test]
    fn nothing_fits_after_memory_was_lacking_until_some_was_freed() {
        let mut memory = Memory::new(100, false);
        assert!(memory.has(40, 60) && !memory.has(41, 60));
        memory.ran_short();
        assert!(!memory.has(1, 1));
        assert!(memory.has(0, 1), "nobody would give any back");
        memory.freed();
        assert!(memory.has(1, 1));
        assert!(Memory::new(0, false).has(u64::MAX / 2, 1), "not limited");
    }

    #[test]
    fn what_is_expected_follows_what_utterances_needed() {
        let need = Need { expected: 100, most: 200 };
        assert_eq!(Memory::new(1_000, false).expected(need), 200, "an engine that takes it all at once");
        let mut memory = Memory::new(1_000, true);
        assert_eq!(memory.expected(need), 100);
        (0..200).for_each(|_| memory.learn(need, 60));
        assert_eq!(memory.expected(need), 60);
        (0..200).for_each(|n| memory.learn(need, if n % 2 == 0 { 40 } else { 80 }));
        assert!((75..=85).contains(&memory.expected(need)), "{}", memory.expected(need));
        (0..200).for_each(|_| memory.learn(need, 900));
        assert_eq!(memory.expected(need), 200, "never more than the longest");
    }
}
