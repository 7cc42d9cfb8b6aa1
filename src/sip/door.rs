//! Who may talk to us, and how fast: what every datagram and connection meets first.
//!
//! # Why
//! A token bucket a source keeps one of them from taking the time of all. It stands before parsing, so that what is over
//! it costs a look into a table. An IPv6 host has a /64 to itself, and that is its source. A trunk carries many calls and
//! has more. Where there are more sources than can be remembered, as when they are forged, new ones pass: what they can
//! cost is bounded behind this, where answers keep no state.

use std::{
    collections::HashMap,
    net::IpAddr,
    sync::{
        Mutex, PoisonError, RwLock,
        atomic::{AtomicU32, Ordering},
    },
    time::{Duration, Instant},
};

use super::{
    config::{Network, SipConfig},
    names::Carriers,
    places::block,
};

/// Seconds of its rate that a source may save up.
const BURST: f64 = 4.0;
/// How many times the rate of others a trunk has.
const TRUNK: f64 = 10.0;
/// Sources remembered.
const MAX_SOURCES: usize = 65_536;
/// Between looks for sources that may be forgotten.
const SWEEP: Duration = Duration::from_secs(1);

/// The rules and what was used of them.
pub(super) struct Door {
    allow: RwLock<Vec<Network>>,
    carriers: Carriers,
    /// Messages a second; 0: no limit.
    rate: AtomicU32,
    buckets: Mutex<Buckets>,
}

#[derive(Debug, Default)]
struct Buckets {
    /// Messages that a source may still send, and when that was so.
    sources: HashMap<IpAddr, (f64, Instant)>,
    swept: Option<Instant>,
}

impl Door {
    pub(super) fn new(config: &SipConfig, carriers: Carriers) -> Door {
        let (allow, rate) = (RwLock::new(config.allow.clone()), AtomicU32::new(config.messages_per_second));
        Door { allow, carriers, rate, buckets: Mutex::default() }
    }

    /// Other rules. What sources have saved up or owe stays.
    pub(super) fn apply(&self, config: &SipConfig) {
        *self.allow.write().unwrap_or_else(PoisonError::into_inner) = config.allow.clone();
        self.rate.store(config.messages_per_second, Ordering::Relaxed);
    }

    /// Whether `ip` may talk to us at all.
    pub(super) fn admits(&self, ip: IpAddr) -> bool {
        let allow = self.allow.read().unwrap_or_else(PoisonError::into_inner);
        allow.is_empty() || allow.iter().any(|network| network.contains(ip))
    }

    /// Whether another message of `ip` may come in now.
    pub(super) fn lets_in(&self, now: Instant, ip: IpAddr) -> bool {
        let rate = f64::from(self.rate.load(Ordering::Relaxed));
        if rate == 0.0 {
            return true;
        }
        let mut buckets = self.buckets.lock().unwrap_or_else(PoisonError::into_inner);
        let source = block(ip);
        if let Some(bucket) = buckets.sources.get_mut(&source) {
            // Asked only of who has used up its own rate: the table of trunks has a lock of its own.
            let passes = take(bucket, now, rate);
            return passes || (self.carriers.find(ip).is_some() && take_more(bucket, rate));
        }
        if buckets.sources.len() >= MAX_SOURCES {
            let rested = buckets.swept.is_none_or(|at| now.saturating_duration_since(at) >= SWEEP);
            if rested {
                buckets.swept = Some(now);
                let full = rate * BURST;
                buckets.sources.retain(|_, bucket| level(*bucket, now, rate) < full);
            }
            if buckets.sources.len() >= MAX_SOURCES {
                return true;
            }
        }
        buckets.sources.insert(source, (rate * BURST - 1.0, now));
        true
    }
}

fn level((tokens, at): (f64, Instant), now: Instant, rate: f64) -> f64 {
    (tokens + now.saturating_duration_since(at).as_secs_f64() * rate).min(rate * BURST)
}

fn take(bucket: &mut (f64, Instant), now: Instant, rate: f64) -> bool {
    *bucket = (level(*bucket, now, rate), now);
    let passes = bucket.0 >= 1.0;
    if passes {
        bucket.0 -= 1.0;
    }
    passes
}

/// A trunk may run up a debt of several bursts and pays it at a price of its own.
fn take_more(bucket: &mut (f64, Instant), rate: f64) -> bool {
    let passes = bucket.0 > -(TRUNK * rate * BURST);
    if passes {
        bucket.0 -= 1.0 / TRUNK;
    }
    passes
}

#[cfg(test)]
mod tests {
    use super::*;

    fn door(extra: &str) -> Door {
        let config: SipConfig = toml::from_str(&format!("messages_per_second = 10\n{extra}")).expect("valid");
        Door::new(&config, Carriers::new(&config))
    }

    fn passed(door: &Door, ip: &str, now: Instant, messages: usize) -> usize {
        let ip = ip.parse().expect("an address");
        (0..messages).filter(|_| door.lets_in(now, ip)).count()
    }

    #[test]
    fn a_source_has_its_rate_and_a_burst() {
        let (now, door) = (crate::clock::now(), door(""));
        assert_eq!(passed(&door, "192.0.2.1", now, 1_000), 40);
        assert_eq!(passed(&door, "192.0.2.2", now, 1_000), 40, "each of them");
        assert_eq!(passed(&door, "192.0.2.1", now + Duration::from_secs(1), 1_000), 10);
        assert_eq!(passed(&door, "192.0.2.1", now + Duration::from_secs(3_600), 1_000), 40);
    }

    #[test]
    fn other_rules_count_from_the_next_message_on() {
        let (now, door) = (crate::clock::now(), door(""));
        assert_eq!(passed(&door, "192.0.2.1", now, 1_000), 40);
        let other = "messages_per_second = 100\nallow = [\"192.0.2.0/24\"]";
        door.apply(&toml::from_str(other).expect("valid"));
        assert_eq!(passed(&door, "192.0.2.1", now, 1_000), 0, "what was used stays used");
        assert_eq!(passed(&door, "192.0.2.1", now + Duration::from_secs(1), 1_000), 100);
        let ip = |text: &str| text.parse().expect("an address");
        assert!(door.admits(ip("192.0.2.9")) && !door.admits(ip("198.51.100.1")));
        door.apply(&SipConfig { messages_per_second: 0, ..SipConfig::default() });
        assert!(door.admits(ip("198.51.100.1")));
        assert_eq!(passed(&door, "192.0.2.1", now, 1_000), 1_000);
    }

    #[test]
    fn a_network_of_ipv6_is_one_source() {
        let (now, door) = (crate::clock::now(), door(""));
        let passed: usize = (0..100).map(|n| passed(&door, &format!("2001:db8::{n:x}"), now, 1)).sum();
        assert_eq!(passed, 40);
        assert_eq!(self::passed(&door, "2001:db8:0:1::1", now, 1), 1);
    }

    #[test]
    fn a_trunk_has_ten_times_as_much() {
        let now = crate::clock::now();
        let door = door("[[trunk]]\nname = \"t\"\nhost = \"192.0.2.1\"\n");
        assert!(passed(&door, "192.0.2.1", now, 400) == 400);
        assert!(passed(&door, "192.0.2.1", now, 1_000_000) < 10_000);
    }

    #[test]
    fn forged_sources_fill_no_memory_and_shut_no_caller_out() {
        let (now, door) = (crate::clock::now(), door(""));
        for n in 0..100_000_u32 {
            assert!(door.lets_in(now, IpAddr::from(n.to_be_bytes())));
        }
        assert!(door.buckets.lock().expect("sound").sources.len() <= MAX_SOURCES);
        assert!(door.lets_in(now, [203, 0, 113, 9].into()), "a new one");
        let later = now + Duration::from_secs(10);
        assert!(door.lets_in(later, [203, 0, 113, 9].into()));
        assert_eq!(door.buckets.lock().expect("sound").sources.len(), 1, "the others are forgotten");
    }
}
