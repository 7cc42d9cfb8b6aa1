//! When a certificate is ordered: state with time as an argument, in seconds since the Unix epoch.

use std::path::Path;
use std::time::Duration;

use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;
use x509_parser::extensions::GeneralName;

use crate::pem;

/// Authorities count failures by the hour (Let's Encrypt: five of one name): the first pauses stay below that.
const FIRST_PAUSE: Duration = Duration::from_secs(15 * 60);
const LONGEST_PAUSE: Duration = Duration::from_secs(6 * 3_600);
/// Between orders that succeed: an authority whose certificates are old when they come is not asked all the time.
const SUCCESSES: Duration = Duration::from_secs(3_600);
/// The clock of a computer jumps, and computers sleep: it is looked at again after this.
const LOOK: Duration = Duration::from_secs(3_600);

/// What is known of a certificate.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Held {
    from: Duration,
    until: Duration,
    /// DNS names, in small letters.
    pub(super) names: Vec<String>,
}

impl Held {
    /// The first certificate of a PEM file.
    pub(super) fn read(file: &Path) -> Result<Self, String> {
        let chain = pem::certificates(file)?;
        pem::key(file)?;
        chain.first().ok_or("no certificate".to_owned()).and_then(|leaf| Self::parse(leaf))
    }

    /// The first certificate of PEM text.
    pub(super) fn of(text: &[u8]) -> Result<Self, String> {
        let leaf = CertificateDer::from_pem_slice(text).map_err(|error| error.to_string())?;
        Self::parse(&leaf)
    }

    /// A certificate, DER.
    pub(super) fn parse(der: &[u8]) -> Result<Self, String> {
        let (_, parsed) = x509_parser::parse_x509_certificate(der).map_err(|error| error.to_string())?;
        let seconds = |at: i64| Duration::from_secs(u64::try_from(at).unwrap_or(0));
        let names = parsed.subject_alternative_name().map_err(|error| error.to_string())?;
        let names = names.into_iter().flat_map(|names| &names.value.general_names).filter_map(|name| match name {
            GeneralName::DNSName(name) => Some(name.to_ascii_lowercase()),
            _ => None,
        });
        let validity = parsed.validity();
        Ok(Self {
            from: seconds(validity.not_before.timestamp()),
            until: seconds(validity.not_after.timestamp()),
            names: names.collect(),
        })
    }

    /// When a third of its life is left.
    pub(super) fn due(&self) -> Duration {
        self.until.saturating_sub(self.until.saturating_sub(self.from) / 3)
    }

    /// How long it is still good.
    pub(super) fn left(&self, now: Duration) -> Duration {
        self.until.saturating_sub(now)
    }
}

/// What came of orders so far.
#[derive(Debug, Default)]
pub(super) struct Attempts {
    failures: u32,
    /// Before this there is no other one.
    not_before: Duration,
}

impl Attempts {
    pub(super) fn succeeded(&mut self, now: Duration) {
        *self = Self { failures: 0, not_before: now + SUCCESSES };
    }

    pub(super) fn failed(&mut self, now: Duration) {
        let pause = FIRST_PAUSE.saturating_mul(1 << self.failures.min(8)).min(LONGEST_PAUSE);
        *self = Self { failures: self.failures + 1, not_before: now + pause };
    }

    /// How long to wait before the next look, where an order is `due` then; nothing: order now.
    pub(super) fn wait(&self, now: Duration, due: Duration) -> Duration {
        // A clock that went back by days does not stop renewals for days.
        let pause = self.not_before.saturating_sub(now).min(LONGEST_PAUSE);
        let wait = due.saturating_sub(now).max(pause);
        if wait == pause { wait } else { wait.min(LOOK) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DAY: Duration = Duration::from_secs(86_400);

    #[test]
    fn a_certificate_is_renewed_when_a_third_of_its_life_is_left() {
        let held = Held { from: 100 * DAY, until: 190 * DAY, names: Vec::new() };
        assert_eq!((held.due(), held.left(180 * DAY), held.left(200 * DAY)), (160 * DAY, 10 * DAY, Duration::ZERO));
        let attempts = Attempts::default();
        assert_eq!(attempts.wait(159 * DAY, held.due()), LOOK, "the clock may jump meanwhile");
        assert_eq!(attempts.wait(160 * DAY - LOOK / 2, held.due()), LOOK / 2);
        assert_eq!(attempts.wait(160 * DAY, held.due()), Duration::ZERO);
        assert_eq!(attempts.wait(100 * DAY, Duration::ZERO), Duration::ZERO, "there is none");
    }

    #[test]
    fn failures_are_repeated_ever_more_seldom_and_less_than_five_times_in_an_hour() {
        let (mut attempts, mut now, mut at) = (Attempts::default(), 100 * DAY, Vec::new());
        for _ in 0..12 {
            now += attempts.wait(now, Duration::ZERO);
            at.push(now);
            attempts.failed(now);
        }
        let first_hour = at.iter().filter(|at| **at < 100 * DAY + Duration::from_secs(3_600)).count();
        assert!(first_hour < 5, "{first_hour}");
        assert!(at.windows(2).all(|pair| pair[1] - pair[0] <= LONGEST_PAUSE));
        assert_eq!(at[11] - at[10], LONGEST_PAUSE);
        assert!(attempts.wait(now - 50 * DAY, Duration::ZERO) <= LONGEST_PAUSE, "the clock went back");
        attempts.succeeded(now);
        assert_eq!(attempts.wait(now, Duration::ZERO), SUCCESSES);
    }
}
