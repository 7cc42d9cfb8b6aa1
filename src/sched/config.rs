//! `[scheduler]` of the configuration.

use std::collections::BTreeMap;
use std::time::Duration;

use serde::{Deserialize, Serialize};

/// How live and batch work share a device. Times are promises to listeners, so they are the same for
/// every engine; what an engine costs is learned, not configured.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Config {
    /// A live turn should sound this long after it was accepted, ms. It orders the work and bounds admission:
    /// a turn predicted to be later is refused, unless the device cannot do better even when idle.
    pub first_audio_target_ms: u32,
    /// A live stream that is this far ahead of its listener rests, ms. Bounds every buffer behind the scheduler;
    /// more lead survives longer stalls of the device, less wastes less on a barge-in.
    pub max_lead_ms: u32,
    /// A speaking stream with less than this ahead precedes those with more and is batched without regard
    /// to cost, ms; twice what its next chunk takes, if that is more. Under load, streams settle at this much lead.
    pub slack_reserve_ms: u32,
    /// Longest step planned while someone listens, ms. A new turn waits at most for one step.
    pub max_step_ms: u32,
    /// Longest step of batch work alone, ms: what a live turn can lose to batch. Longer is more efficient, so that steps take up to
    /// twice as long where no turn came for a minute.
    pub batch_step_ms: u32,
    /// By what batch may multiply the cost of a step that makes first audio, at least 1. Near 1 no caller notices it;
    /// more gives batch more of a busy device, and every first audio is later by about as much.
    pub batch_ride: f64,
    /// Batch work that has made no progress for so long runs single steps between live ones, seconds.
    pub batch_patience_s: u32,
    /// Share of the device such starving batch work may take, 0 to 0.5.
    pub batch_min_share: f64,
    /// Live streams with unfinished work at once; more are refused. The device usually refuses earlier.
    pub max_live: u32,
    /// Utterances that wait or run at once, live and batch together; more are refused.
    pub max_queued: u32,
    /// Predicted device load up to which live streams are admitted, above 0, at most 1.
    pub load_limit: f64,
    /// Limits of clients whose token is not in `tenants`, and of clients without a token.
    pub tenant_default: Tenant,
    /// Limits by the name of the API token.
    pub tenants: BTreeMap<String, Tenant>,
}

/// What one API token may take.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Tenant {
    /// Share of the device relative to others when there is not enough for all, above 0.
    pub weight: f64,
    /// Characters of text a minute, live and batch together; `0`: no limit. A minute's worth may come at once.
    pub chars_per_minute: u32,
    /// Live streams with unfinished work at once; `0`: no limit but the scheduler's.
    pub max_live: u32,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            first_audio_target_ms: 300,
            max_lead_ms: 4_000,
            slack_reserve_ms: 250,
            max_step_ms: 20,
            batch_step_ms: 6,
            batch_ride: 1.08,
            batch_patience_s: 30,
            batch_min_share: 0.02,
            max_live: 1_000,
            max_queued: 20_000,
            load_limit: 0.9,
            tenant_default: Tenant::default(),
            tenants: BTreeMap::new(),
        }
    }
}

impl Default for Tenant {
    fn default() -> Self {
        Self { weight: 1.0, chars_per_minute: 0, max_live: 0 }
    }
}

impl Config {
    /// Checks what the types cannot say.
    ///
    /// # Errors
    /// The key and what it must be.
    pub fn validate(&self) -> Result<(), String> {
        let positive = [
            ("first_audio_target_ms", self.first_audio_target_ms),
            ("max_lead_ms", self.max_lead_ms),
            ("max_step_ms", self.max_step_ms),
            ("batch_step_ms", self.batch_step_ms),
            ("max_live", self.max_live),
            ("max_queued", self.max_queued),
        ];
        if let Some((key, _)) = positive.iter().find(|(_, value)| *value == 0) {
            return Err(format!("{key} must be greater than 0"));
        }
        if self.slack_reserve_ms >= self.max_lead_ms {
            return Err("slack_reserve_ms must be less than max_lead_ms".into());
        }
        if !(1.0..=100.0).contains(&self.batch_ride) {
            return Err("batch_ride must be between 1 and 100".into());
        }
        if !(0.0..=0.5).contains(&self.batch_min_share) {
            return Err("batch_min_share must be between 0 and 0.5".into());
        }
        if !(self.load_limit > 0.0 && self.load_limit <= 1.0) {
            return Err("load_limit must be above 0 and at most 1".into());
        }
        let default = ("tenant_default", &self.tenant_default);
        let named = self.tenants.iter().map(|(name, tenant)| (name.as_str(), tenant));
        for (name, tenant) in std::iter::once(default).chain(named) {
            if !(tenant.weight > 0.0 && tenant.weight.is_finite()) {
                return Err(format!("weight of {name} must be a number above 0"));
            }
        }
        Ok(())
    }

    pub(super) fn first_audio_target(&self) -> Duration {
        Duration::from_millis(self.first_audio_target_ms.into())
    }

    pub(super) fn max_lead(&self) -> Duration {
        Duration::from_millis(self.max_lead_ms.into())
    }

    pub(super) fn slack_reserve(&self) -> Duration {
        Duration::from_millis(self.slack_reserve_ms.into())
    }

    pub(super) fn max_step(&self) -> Duration {
        Duration::from_millis(self.max_step_ms.into())
    }

    pub(super) fn batch_step(&self) -> Duration {
        Duration::from_millis(self.batch_step_ms.into())
    }

    pub(super) fn batch_patience(&self) -> Duration {
        Duration::from_secs(self.batch_patience_s.into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn defaults_are_valid_and_unknown_keys_are_not() {
        Config::default().validate().expect("valid");
        let config: Config = toml::from_str("max_lead_ms = 2000\n[tenants.acme]\nweight = 2.0").expect("parses");
        assert_eq!((config.max_lead_ms, config.tenants["acme"].weight), (2000, 2.0));
        assert!(toml::from_str::<Config>("max_laed_ms = 1").is_err());
        assert!(Config { load_limit: 0.0, ..Config::default() }.validate().is_err());
    }
}
