//! The device memory of utterances.

use super::table::Table;

/// How much there is, and whether the device lacked it although it should have been there.
#[derive(Debug)]
pub(super) struct Memory {
    /// Bytes that open utterances may hold; 0: not limited.
    limit: u64,
    /// An open failed for want of memory: nothing more is opened until some was given back.
    short: bool,
}

impl Memory {
    pub(super) fn new(limit: u64) -> Self {
        Self { limit, short: false }
    }

    pub(super) fn limit(&self) -> u64 {
        self.limit
    }

    pub(super) fn is_unlimited(&self) -> bool {
        self.limit == 0
    }

    /// What open utterances may hold changed.
    pub(super) fn set_limit(&mut self, limit: u64) {
        *self = Self::new(limit);
    }

    /// The device had no memory for what was counted to fit.
    pub(super) fn ran_short(&mut self) {
        self.short = true;
    }

    /// Some was given back.
    pub(super) fn freed(&mut self) {
        self.short = false;
    }

    /// Whether `needed` bytes more than `reserved` can be had.
    pub(super) fn has(&self, reserved: u64, needed: u64) -> bool {
        !self.short && (self.limit == 0 || reserved + needed <= self.limit)
    }

    pub(super) fn fits(&self, table: &Table, needed: u64) -> bool {
        self.has(table.reserved(), needed)
    }

    /// Whether more than half of it is held by live utterances. What batch holds can be had at any time.
    pub(super) fn is_mostly_live(&self, table: &Table) -> bool {
        let live = table.open_jobs().filter(|(_, job)| job.is_live());
        self.limit > 0 && live.map(|(_, job)| job.resident()).sum::<u64>() > self.limit / 2
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_fits_after_an_open_failed_until_something_was_freed() {
        let mut memory = Memory::new(100);
        assert!(memory.has(40, 60) && !memory.has(41, 60));
        memory.ran_short();
        assert!(!memory.has(0, 1));
        memory.freed();
        assert!(memory.has(0, 1));
        assert!(Memory::new(0).has(u64::MAX / 2, 1), "not limited");
    }
}
