//! What of an engine changes while it runs: the limits of tenants, and the workers that speak for it.

use super::{Device, Engine, LOCAL, Phase, Worker};
use crate::sched::Config;

impl Engine {
    /// Other limits of tenants on the devices here; what they have taken stays taken.
    pub fn limit_tenants(&self, config: &Config) {
        self.inner.quotas.limit(&config.tenants, &config.tenant_default);
    }

    /// Makes devices of the workers that were `found`, beside those that the engine was started with. One that is not among
    /// them any more goes once its connection is lost, too: a registry that has just lost everything ends no stream.
    pub fn keep_workers(&self, found: Vec<Worker>) {
        let inner = &self.inner;
        let devices = inner.devices();
        for (number, device) in devices.range(inner.configured..LOCAL) {
            let Device::Worker(link) = device else { continue };
            let there = found.iter().any(|worker| worker.address == link.address());
            if !there && link.phase() != Phase::Ready {
                tracing::info!(worker = link.address(), "a worker is gone");
                link.stop();
                inner.change(|devices| drop(devices.remove(number)));
            }
        }
        let known = |worker: &Worker| {
            devices.values().any(|device| matches!(device, Device::Worker(link) if link.address() == worker.address))
        };
        for worker in found.into_iter().filter(|worker| !known(worker)) {
            tracing::info!(worker = worker.address, "a worker was found");
            if let Err(error) = inner.connect(worker) {
                // It is tried again when the registry is read next.
                tracing::error!(error, "a worker that was found cannot be used");
            }
        }
    }
}
