//! What each tenant has had of the voices, counted where speech leaves the devices.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use crate::turn::Class;

/// Speech of one class.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Spoken {
    /// Utterances that made audio.
    pub utterances: u64,
    /// Characters of their texts, whole where one was cut off: the text was read before it sounded.
    pub characters: u64,
    /// Audio that was made.
    pub audio: Duration,
}

/// Speech since it was last asked, by tenant and class. All devices of an engine count in the same one.
#[derive(Debug, Default)]
pub struct Meter(Mutex<HashMap<(Arc<str>, Class), Spoken>>);

impl Meter {
    /// An utterance of `characters` is over and made so much audio.
    pub fn add(&self, tenant: &Arc<str>, class: Class, characters: usize, audio: Duration) {
        if audio.is_zero() {
            return;
        }
        // Names come from the configuration, so there are few. An update leaves no half state behind a panic.
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let spoken = all.entry((tenant.clone(), class)).or_default();
        spoken.utterances += 1;
        spoken.characters += characters as u64;
        spoken.audio += audio;
    }

    /// What was counted since the last call; the count begins again.
    pub fn take(&self) -> HashMap<(Arc<str>, Class), Spoken> {
        std::mem::take(&mut *self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_sounded_counts_to_its_tenant_once() {
        let (meter, crm) = (Meter::default(), Arc::<str>::from("crm"));
        meter.add(&crm, Class::Live, 10, Duration::from_secs(1));
        meter.add(&crm, Class::Live, 5, Duration::from_secs(2));
        meter.add(&crm, Class::Batch, 7, Duration::ZERO);
        let taken = meter.take();
        let expected = Spoken { utterances: 2, characters: 15, audio: Duration::from_secs(3) };
        assert_eq!(taken, HashMap::from([((crm, Class::Live), expected)]));
        assert!(meter.take().is_empty());
    }
}
