//! `[tenant.<name>]`: what the customers of one gateway may use, and how much of it.
//!
//! What bounds their speech (streams, characters a minute, their share of a device) is the scheduler's; here is what
//! bounds their calls. A call counts from the moment it is asked for, ringing included, until it is over.
//!
//! # Why
//! *Minutes are checked when a call begins and not while it lasts*: a customer who has used up a day hears the end of the
//! sentence. `[call] max_duration_s` bounds how far over the limit that can lead.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use serde::Deserialize;

use super::GatewayError;
use crate::clock::{self, DAY};

/// When a call may have ended.
const BUSY: Duration = Duration::from_secs(10);

/// What a tenant may use; empty lists: everything that belongs to no other tenant.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Rules {
    /// Trunks that its calls may go out through.
    pub trunks: Vec<String>,
    /// Voices that its turns, requests and jobs may name, beside those it has enrolled.
    pub voices: Vec<String>,
    /// How much.
    pub limits: Limits,
}

/// `[tenant.<name>] limits`; 0: none.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Limits {
    /// Calls at a time, in and out.
    pub calls: u32,
    /// Minutes of calls a day (UTC), from being asked for to the end.
    pub minutes_per_day: u32,
    /// Live streams with unfinished work at a time.
    pub streams: u32,
    /// Characters of text a minute, live and batch together.
    pub chars_per_minute: u32,
    /// Characters of jobs a day (UTC).
    pub batch_chars_per_day: u64,
}

/// The tenants of a gateway. Clones mean the same ones.
#[derive(Clone, Debug, Default)]
pub struct Tenants(Arc<Inner>);

#[derive(Debug, Default)]
struct Inner {
    rules: Mutex<Arc<BTreeMap<String, Rules>>>,
    accounts: Mutex<HashMap<String, Account>>,
}

/// The calls of one tenant.
#[derive(Debug, Default)]
struct Account {
    /// Days since 1970.
    day: u64,
    /// Of calls that ended on that day.
    used: Duration,
    /// When the others began.
    live: Vec<Instant>,
}

impl Account {
    /// At `wall`, another day may have begun.
    fn turn_day(&mut self, wall: Duration) {
        let today = wall.as_secs() / DAY.as_secs();
        if self.day != today {
            (self.day, self.used) = (today, Duration::ZERO);
        }
    }
}

/// A call's part of its tenant's limits, until it is dropped.
#[derive(Debug)]
pub struct Lease {
    tenants: Tenants,
    tenant: String,
    began: Instant,
}

impl Drop for Lease {
    fn drop(&mut self) {
        self.tenants.leave(&self.tenant, self.began, clock::now(), clock::wall());
    }
}

impl Tenants {
    /// Tenants with these rules; nothing is used yet.
    pub fn new(rules: BTreeMap<String, Rules>) -> Self {
        let tenants = Self::default();
        tenants.replace(rules);
        tenants
    }

    /// Other rules. Calls that go on keep counting.
    pub fn replace(&self, rules: BTreeMap<String, Rules>) {
        *self.0.rules.lock().unwrap_or_else(PoisonError::into_inner) = Arc::new(rules);
    }

    /// A process before this one had `used` so much of today.
    pub fn used_today(&self, tenant: &str, used: Duration) {
        self.with(tenant, clock::wall(), |account| account.used += used);
    }

    /// Whether a call through `trunk` may be placed.
    ///
    /// # Errors
    /// It may not.
    pub fn may_dial(&self, tenant: &str, trunk: Option<&str>) -> Result<(), GatewayError> {
        let rules = self.rules();
        let Some(rules) = rules.get(tenant).filter(|rules| !rules.trunks.is_empty()) else { return Ok(()) };
        match trunk.filter(|trunk| rules.trunks.iter().any(|allowed| allowed == trunk)) {
            Some(_) => Ok(()),
            None => Err(GatewayError::Forbidden(match trunk {
                Some(trunk) => format!("`{trunk}` is not among the `trunks` of the tenant `{tenant}`"),
                None => format!("the tenant `{tenant}` may call through its `trunks` only"),
            })),
        }
    }

    /// Whether a shared voice may be named.
    pub fn may_speak_as(&self, tenant: &str, voice: &str) -> bool {
        let rules = self.rules();
        rules.get(tenant).is_none_or(|rules| rules.voices.is_empty() || rules.voices.iter().any(|name| name == voice))
    }

    /// Characters of jobs that the tenant may hand in a day; 0: no limit.
    pub fn batch_chars_per_day(&self, tenant: &str) -> u64 {
        self.rules().get(tenant).map_or(0, |rules| rules.limits.batch_chars_per_day)
    }

    /// Begins a call of `tenant`.
    ///
    /// # Errors
    /// A limit is reached.
    pub fn enter(&self, tenant: &str) -> Result<Lease, GatewayError> {
        let began = clock::now();
        self.enter_at(tenant, began, clock::wall())?;
        Ok(Lease { tenants: self.clone(), tenant: tenant.to_owned(), began })
    }

    fn enter_at(&self, tenant: &str, now: Instant, wall: Duration) -> Result<(), GatewayError> {
        let rules = self.rules();
        let limits = rules.get(tenant).map(|rules| &rules.limits);
        self.with(tenant, wall, |account| {
            if let Some(limits) = limits {
                let full = |what: String, retry_after| Err(GatewayError::TenantFull { what, retry_after });
                if limits.calls > 0 && account.live.len() >= limits.calls as usize {
                    return full(format!("all {} calls of the tenant `{tenant}` are in progress", limits.calls), BUSY);
                }
                let live: Duration = account.live.iter().map(|began| now.saturating_duration_since(*began)).sum();
                let allowed = Duration::from_secs(u64::from(limits.minutes_per_day) * 60);
                if !allowed.is_zero() && account.used + live >= allowed {
                    let what = format!("the {} minutes a day of the tenant `{tenant}`", limits.minutes_per_day);
                    let tomorrow = clock::midnight(wall) + DAY - wall;
                    return full(format!("{what} are used up"), tomorrow);
                }
            }
            account.live.push(now);
            Ok(())
        })
    }

    fn leave(&self, tenant: &str, began: Instant, now: Instant, wall: Duration) {
        self.with(tenant, wall, |account| {
            if let Some(index) = account.live.iter().position(|live| *live == began) {
                account.live.swap_remove(index);
            }
            account.used += now.saturating_duration_since(began);
        });
    }

    fn rules(&self) -> Arc<BTreeMap<String, Rules>> {
        self.0.rules.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn with<T>(&self, tenant: &str, wall: Duration, change: impl FnOnce(&mut Account) -> T) -> T {
        let mut accounts = self.0.accounts.lock().unwrap_or_else(PoisonError::into_inner);
        let account = accounts.entry(tenant.to_owned()).or_default();
        account.turn_day(wall);
        change(account)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tenants(limits: Limits) -> Tenants {
        let rules = Rules { trunks: vec!["cheap".into()], voices: vec!["anna".into()], limits };
        Tenants::new(BTreeMap::from([("crm".to_owned(), rules)]))
    }

    #[test]
    fn calls_at_a_time_count_until_they_end() {
        let tenants = tenants(Limits { calls: 1, ..Limits::default() });
        let lease = tenants.enter("crm").expect("the first");
        let error = tenants.enter("crm").expect_err("the second");
        assert!(error.to_string().contains("all 1 calls of the tenant `crm`"), "{error}");
        assert!(tenants.enter("other").is_ok(), "nobody else's limit");
        drop(lease);
        assert!(tenants.enter("crm").is_ok());
    }

    #[test]
    fn minutes_count_live_calls_and_begin_again_at_midnight() {
        let tenants = tenants(Limits { minutes_per_day: 3, ..Limits::default() });
        let (began, minute) = (clock::now(), Duration::from_secs(60));
        let evening = 2 * DAY - Duration::from_secs(600);
        tenants.enter_at("crm", began, evening).expect("nothing is used");
        tenants.leave("crm", began, began + 2 * minute, evening + 2 * minute);
        // Two minutes are over, and one goes on.
        tenants.enter_at("crm", began + 2 * minute, evening + 2 * minute).expect("one minute is left");
        let at = 3 * minute + Duration::from_secs(1);
        let error = tenants.enter_at("crm", began + at, evening + at).expect_err("used up");
        assert_eq!(error.retry_after(), Some(Duration::from_secs(419)), "at midnight");
        tenants.leave("crm", began + 2 * minute, began + at, evening + at);
        tenants.enter_at("crm", began + 11 * minute, evening + 11 * minute).expect("another day");
    }

    #[test]
    fn a_list_of_trunks_or_voices_leaves_the_others_to_others() {
        let tenants = tenants(Limits::default());
        assert!(tenants.may_dial("crm", Some("cheap")).is_ok());
        assert!(tenants.may_dial("crm", Some("dear")).is_err() && tenants.may_dial("crm", None).is_err());
        assert!(tenants.may_dial("", Some("dear")).is_ok() && tenants.may_dial("other", None).is_ok());
        assert!(tenants.may_speak_as("crm", "anna") && !tenants.may_speak_as("crm", "berta"));
        assert!(tenants.may_speak_as("other", "berta"));
        tenants.replace(BTreeMap::new());
        assert!(tenants.may_dial("crm", Some("dear")).is_ok());
    }
}
