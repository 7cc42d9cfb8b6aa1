//! The places of calls: who may take one, how many of them may be half open, and who is turned away.
//!
//! State with time as an argument behind one lock; a call holds a [`Place`] and gives it back by dropping it. A call is
//! half open from its INVITE until its ACK.
//!
//! # Why
//! *An INVITE costs its sender nothing*, and its source address is what it says it is. So strangers' half-open calls are
//! few, of each source and in all, a share of the places is kept for trunks where there are any, and sources that leave
//! answered calls without ACK collect penalties and are refused until these have expired.
//!
//! *A trunk is never refused for what came over UDP in its name*: ten forged packets would lock a carrier out.

use std::{
    collections::HashMap,
    net::{IpAddr, Ipv6Addr, SocketAddr},
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};

use crate::seats::{Seat, Seats};

/// Penalties at which a source is refused.
const ALLOWED: f64 = 10.0;
/// A penalty expires in this time.
const FORGIVEN: Duration = Duration::from_secs(10);
/// Sources remembered; beyond it the least guilty are forgotten.
const MAX_SOURCES: usize = 4_096;
/// When a caller may come again where every place is taken: calls end all the time.
pub(super) const FULL: Duration = Duration::from_secs(10);
/// One in so many places may be half open by strangers, and is kept for trunks.
const SHARE: usize = 10;
/// Strangers' half-open calls where nothing is kept for trunks.
const LEAST_HALF_OPEN: usize = 16;

/// What is known of a caller when its INVITE comes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Standing {
    /// Its address is that of a trunk.
    Trunk,
    /// It has proven to be one of `[sip] users`.
    Account,
    Stranger,
}

/// A call that was answered here, or is about to be, and not acknowledged yet.
#[derive(Clone, Debug)]
pub struct HalfOpen {
    /// Its Call-ID.
    pub call_id: String,
    /// Where its INVITE came from.
    pub source: SocketAddr,
    /// When.
    pub since: Instant,
}

/// All places. Cheap to clone.
#[derive(Clone, Debug)]
pub(super) struct Places {
    table: Arc<Mutex<Table>>,
    seats: Seats,
}

#[derive(Debug)]
struct Table {
    limits: Limits,
    penalties: Penalties,
    calls: HashMap<u64, Entry>,
    next: u64,
}

#[derive(Debug)]
struct Limits {
    /// Half-open calls that one source may have.
    of_one: usize,
    /// Half-open calls that strangers may have, and calls of theirs in all.
    strange_half_open: usize,
    strange: usize,
}

impl Limits {
    /// Of `max` places. `trunks`: there are some, and a share is theirs.
    fn new(max: usize, of_one: usize, trunks: bool) -> Limits {
        let share = (max / SHARE).max(1);
        Limits {
            of_one,
            strange_half_open: if trunks { share } else { share.max(LEAST_HALF_OPEN) },
            strange: if trunks { max - share.min(max) } else { max },
        }
    }
}

#[derive(Debug)]
struct Entry {
    standing: Standing,
    /// `None`: acknowledged.
    half_open: Option<HalfOpen>,
}

/// One call's place.
#[derive(Debug)]
pub(super) struct Place {
    table: Arc<Mutex<Table>>,
    /// `None` for a call out.
    inbound: Option<(u64, IpAddr, Standing)>,
    _permit: Seat,
}

impl Places {
    /// Room for `max` calls; `of_one` of one source may be half open. `trunks`: there are some, and a share is theirs.
    pub(super) fn new(max: usize, of_one: usize, trunks: bool) -> Places {
        let (limits, penalties, calls) = (Limits::new(max, of_one, trunks), Penalties::default(), HashMap::new());
        let table = Table { limits, penalties, calls, next: 0 };
        Places { table: Arc::new(Mutex::new(table)), seats: Seats::new(max) }
    }

    /// Other limits, as of [`Places::new`]; who has a place keeps it.
    pub(super) fn limit(&self, max: usize, of_one: usize, trunks: bool) {
        lock(&self.table).limits = Limits::new(max, of_one, trunks);
        self.seats.set(max);
    }

    /// Places that are taken.
    pub(super) fn taken(&self) -> usize {
        self.seats.taken()
    }

    /// A place for a call out.
    pub(super) fn outbound(&self) -> Option<Place> {
        let permit = self.seats.take()?;
        Some(Place { table: self.table.clone(), inbound: None, _permit: permit })
    }

    /// A place for a call in, half open.
    ///
    /// # Errors
    /// When its sender may come again.
    pub(super) fn inbound(&self, now: Instant, standing: Standing, call: HalfOpen) -> Result<Place, Duration> {
        let source = block(call.source.ip());
        let mut table = lock(&self.table);
        table.admit(now, standing, source)?;
        let permit = self.seats.take().ok_or(FULL)?;
        table.next += 1;
        let id = table.next;
        table.calls.insert(id, Entry { standing, half_open: Some(call) });
        Ok(Place { table: self.table.clone(), inbound: Some((id, source, standing)), _permit: permit })
    }

    /// How long `source` must wait for its penalties; `None`: it is welcome.
    pub(super) fn refused(&self, now: Instant, source: IpAddr) -> Option<Duration> {
        lock(&self.table).penalties.refused(now, block(source))
    }

    /// The half-open calls, the oldest first.
    pub(super) fn half_open(&self) -> Vec<HalfOpen> {
        let mut calls: Vec<_> = lock(&self.table).calls.values().filter_map(|entry| entry.half_open.clone()).collect();
        calls.sort_by_key(|call| call.since);
        calls
    }
}

impl Place {
    /// The ACK is here.
    pub(super) fn confirm(&self) {
        if let Some((id, ..)) = self.inbound
            && let Some(entry) = lock(&self.table).calls.get_mut(&id)
        {
            entry.half_open = None;
        }
    }

    /// Gives the place back; who to blame where no ACK comes.
    pub(super) fn release(self) -> Blame {
        let source = self.inbound.filter(|(_, _, standing)| *standing != Standing::Trunk).map(|(_, source, _)| source);
        Blame { table: self.table.clone(), source }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        if let Some((id, ..)) = self.inbound {
            lock(&self.table).calls.remove(&id);
        }
    }
}

/// The source of a call that gave its place back.
#[derive(Debug)]
pub(super) struct Blame {
    table: Arc<Mutex<Table>>,
    source: Option<IpAddr>,
}

impl Blame {
    /// The call was answered and never acknowledged.
    pub(super) fn penalise(&self, now: Instant) {
        if let Some(source) = self.source {
            lock(&self.table).penalties.penalise(now, source);
        }
    }
}

impl Table {
    fn admit(&self, now: Instant, standing: Standing, source: IpAddr) -> Result<(), Duration> {
        if standing == Standing::Trunk {
            return Ok(());
        }
        if let Some(wait) = self.penalties.refused(now, source) {
            return Err(wait);
        }
        let half_open = |fits: &dyn Fn(Standing, IpAddr) -> bool| {
            let open = self.calls.values().filter_map(|entry| Some((entry.standing, entry.half_open.as_ref()?)));
            open.filter(|(standing, call)| fits(*standing, block(call.source.ip()))).count()
        };
        let mine = half_open(&|standing, other| standing != Standing::Trunk && other == source);
        if mine >= self.limits.of_one {
            return Err(FULL);
        }
        if standing == Standing::Stranger {
            let strangers = self.calls.values().filter(|entry| entry.standing == Standing::Stranger).count();
            let theirs = half_open(&|standing, _| standing == Standing::Stranger);
            if theirs >= self.limits.strange_half_open || strangers >= self.limits.strange {
                return Err(FULL);
            }
        }
        Ok(())
    }
}

/// What counts as one source: an IPv4 address, and of IPv6 the /64 that one host has to itself.
pub(super) fn block(ip: IpAddr) -> IpAddr {
    match ip.to_canonical() {
        IpAddr::V6(ip) => IpAddr::V6(Ipv6Addr::from_bits(ip.to_bits() >> 64 << 64)),
        ip => ip,
    }
}

fn lock(table: &Mutex<Table>) -> std::sync::MutexGuard<'_, Table> {
    // Nothing here panics while it holds one, and the table is sound after every step.
    table.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Penalties by source.
#[derive(Debug, Default)]
struct Penalties {
    sources: HashMap<IpAddr, (f64, Instant)>,
}

impl Penalties {
    fn penalise(&mut self, now: Instant, source: IpAddr) {
        if self.sources.len() >= MAX_SOURCES {
            self.sources.retain(|_, entry| level(*entry, now) > 1.0);
        }
        if self.sources.len() < MAX_SOURCES || self.sources.contains_key(&source) {
            let entry = self.sources.entry(source).or_insert((0.0, now));
            *entry = (level(*entry, now) + 1.0, now);
        }
    }

    fn refused(&self, now: Instant, source: IpAddr) -> Option<Duration> {
        let excess = level(*self.sources.get(&source)?, now) - ALLOWED;
        (excess >= 0.0).then(|| FORGIVEN.mul_f64(excess.max(1.0)))
    }
}

fn level((penalties, at): (f64, Instant), now: Instant) -> f64 {
    (penalties - now.saturating_duration_since(at).div_duration_f64(FORGIVEN)).max(0.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn call(now: Instant, source: [u8; 4], id: usize) -> HalfOpen {
        HalfOpen { call_id: id.to_string(), source: (source, 5060).into(), since: now }
    }

    #[test]
    fn a_flood_of_half_open_calls_leaves_nine_in_ten_places_to_trunks() {
        let now = crate::clock::now();
        let places = Places::new(1_000, 64, true);
        let mut held = Vec::new();
        for n in 0..30_000 {
            // From a hundred sources, as forged ones are.
            let source = [203, 0, 113, u8::try_from(n % 100).expect("small")];
            held.extend(places.inbound(now, Standing::Stranger, call(now, source, n)));
        }
        assert_eq!((held.len(), places.half_open().len()), (100, 100));
        let trunk: Vec<_> = (0..1_000)
            .filter_map(|n| places.inbound(now, Standing::Trunk, call(now, [198, 51, 100, 1], n)).ok())
            .collect();
        assert_eq!(trunk.len(), 900);
        assert!(places.outbound().is_none());
        drop((held, trunk));
        assert_eq!((places.taken(), places.half_open().len()), (0, 0));
    }

    #[test]
    fn confirmed_calls_of_strangers_leave_a_share_too() {
        let now = crate::clock::now();
        let places = Places::new(100, 64, true);
        let mut held = Vec::new();
        for n in 0..200 {
            let Ok(place) = places.inbound(now, Standing::Stranger, call(now, [192, 0, 2, 1], n)) else { continue };
            place.confirm();
            held.push(place);
        }
        assert_eq!((held.len(), places.half_open().len()), (90, 0));
        assert!(places.inbound(now, Standing::Trunk, call(now, [198, 51, 100, 1], 0)).is_ok());
        // Without trunks there is nothing to keep.
        let places = Places::new(10, 64, false);
        let all: Vec<_> = (0..20)
            .filter_map(|n| places.inbound(now, Standing::Stranger, call(now, [192, 0, 2, 1], n)).ok())
            .collect();
        assert_eq!(all.len(), 10);
    }

    #[test]
    fn one_source_has_few_half_open_calls() {
        let now = crate::clock::now();
        let places = Places::new(1_000, 3, false);
        let of = |source: String| HalfOpen {
            call_id: String::new(),
            source: SocketAddr::new(source.parse().expect("an address"), 5060),
            since: now,
        };
        let take = |source: &str, standing| places.inbound(now, standing, of(source.to_owned()));
        let held: Vec<_> = (0..3).map(|_| take("192.0.2.1", Standing::Stranger).expect("few")).collect();
        assert!(take("192.0.2.1", Standing::Stranger).is_err());
        assert!(take("192.0.2.1", Standing::Account).is_err());
        assert!(take("192.0.2.1", Standing::Trunk).is_ok());
        assert!(take("192.0.2.2", Standing::Stranger).is_ok());
        held[0].confirm();
        assert!(take("192.0.2.1", Standing::Stranger).is_ok(), "that one is up");
        // The addresses of one /64 are one source.
        let six: Vec<_> = (1..=3).map(|n| take(&format!("2001:db8::{n}"), Standing::Stranger).expect("few")).collect();
        assert!(take("2001:db8::ffff", Standing::Stranger).is_err());
        assert!(take("2001:db8:0:1::1", Standing::Stranger).is_ok());
        drop(six);
    }

    #[test]
    fn penalties_add_up_expire_and_never_hit_a_trunk() {
        let now = crate::clock::now();
        let places = Places::new(1_000, 64, true);
        let (bad, trunk) = ([192, 0, 2, 1], [192, 0, 2, 9]);
        let fail = |standing, source| {
            places.inbound(now, standing, call(now, source, 0)).expect("welcome").release().penalise(now);
        };
        for _ in 0..9 {
            fail(Standing::Stranger, bad);
        }
        assert_eq!(places.refused(now, bad.into()), None);
        fail(Standing::Stranger, bad);
        assert_eq!(places.refused(now, bad.into()), Some(FORGIVEN));
        assert!(places.inbound(now, Standing::Stranger, call(now, bad, 0)).is_err());
        assert_eq!(places.refused(now, [192, 0, 2, 2].into()), None);
        assert_eq!(places.refused(now + FORGIVEN * 2, bad.into()), None);
        for _ in 0..100 {
            fail(Standing::Trunk, trunk);
        }
        assert_eq!(places.refused(now, trunk.into()), None);
        assert!(places.inbound(now, Standing::Trunk, call(now, bad, 0)).is_ok(), "known by its address");
    }

    #[test]
    fn memory_is_bounded() {
        let now = crate::clock::now();
        let mut penalties = Penalties::default();
        for n in 0..10_000_u32 {
            penalties.penalise(now, IpAddr::from(n.to_be_bytes()));
        }
        assert!(penalties.sources.len() <= MAX_SOURCES);
    }
}
