//! The addresses behind the name of a trunk's host, one after the other (RFC 3263 section 4): several SRV records, or one
//! name with several addresses.
//!
//! # Why
//! The stack takes the first address that it finds and knows of no other: a carrier that has one of its three hosts down
//! loses every call that begins there. NAPTR would say which transport a host wants, and the configuration says that.
//! Where TLS checks a certificate it needs the name, so that the stack looks it up by itself there.

use std::{
    collections::HashMap,
    net::SocketAddr,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use rsipstack::{
    resolver::sip_resolver::{LookupSource, SipResolver, Target, resolve_logic},
    sip::{Host, Param, Transport, Uri},
    transport::SipAddr,
};
use tokio::time::timeout;

use super::names::LOOK_UP;

/// Addresses of one host that one call tries.
const MOST: usize = 6;
/// Addresses that are remembered as failed; those that wait no longer are forgotten first.
const MAX_FAILED: usize = 1_024;

/// Where hosts are, and which of their addresses have failed.
pub(super) struct Routes {
    names: Source,
    failed: Mutex<HashMap<SocketAddr, Instant>>,
}

enum Source {
    System(SipResolver),
    Given(Arc<dyn LookupSource>),
}

impl Routes {
    /// `names`: who is asked for them; `None`: the system's name servers.
    pub(super) fn new(names: Option<Arc<dyn LookupSource>>) -> Routes {
        let names = names.map_or_else(|| Source::System(SipResolver::default()), Source::Given);
        Routes { names, failed: Mutex::default() }
    }

    /// Where a request to `uri` may go, in the order in which it is tried; none: where the stack finds it.
    pub(super) async fn of(&self, uri: &Uri, now: Instant) -> Vec<SipAddr> {
        let Host::Domain(domain) = &uri.host_with_port.host else { return Vec::new() };
        let transport = uri.params.iter().find_map(|param| match param {
            Param::Transport(transport) => Some(*transport),
            _ => None,
        });
        let transport = transport.unwrap_or(Transport::Udp);
        if !matches!(transport, Transport::Udp | Transport::Tcp) {
            return Vec::new();
        }
        let port = uri.host_with_port.port;
        let found = match &self.names {
            Source::System(resolver) => timeout(LOOK_UP, resolver.lookup(domain, port, Some(transport), false)).await,
            Source::Given(source) => {
                timeout(LOOK_UP, resolve_logic(&**source, domain, port, Some(transport), false)).await
            }
        };
        self.order(now, found.ok().and_then(Result::ok).unwrap_or_default())
    }

    /// Those that failed come last, and each once.
    fn order(&self, now: Instant, found: Vec<Target>) -> Vec<SipAddr> {
        let failed = self.lock();
        let is_out = |target: &Target| failed.get(&target.addr).is_some_and(|until| *until > now);
        let (out, well): (Vec<_>, Vec<_>) = found.into_iter().partition(is_out);
        let mut order: Vec<SipAddr> = Vec::new();
        for target in well.into_iter().chain(out) {
            let address = SipAddr::new(target.transport, target.addr.into());
            if !order.contains(&address) && order.len() < MOST {
                order.push(address);
            }
        }
        order
    }

    /// A call failed at `address`, which is left alone for a while.
    pub(super) fn failed(&self, now: Instant, address: &SipAddr, wait: Duration) {
        let Ok(address) = address.get_socketaddr() else { return };
        let mut failed = self.lock();
        if failed.len() >= MAX_FAILED {
            failed.retain(|_, until| *until > now);
        }
        if failed.len() < MAX_FAILED {
            failed.insert(address, now + wait);
        }
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<SocketAddr, Instant>> {
        // Nothing here panics while it holds one.
        self.failed.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A call got through.
    pub(super) fn worked(&self, address: &SipAddr) {
        if let Ok(address) = address.get_socketaddr() {
            self.lock().remove(&address);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::clock;

    fn target(address: &str) -> Target {
        Target { addr: address.parse().expect("an address"), transport: Transport::Udp }
    }

    #[test]
    fn addresses_that_failed_come_last_until_their_time_is_over() {
        let (routes, now) = (Routes::new(None), clock::now());
        let found =
            || ["192.0.2.1:5060", "192.0.2.1:5060", "192.0.2.2:5070", "[2001:db8::1]:5060"].map(target).to_vec();
        let order = |at| -> Vec<String> {
            routes.order(at, found()).iter().map(|a| a.get_socketaddr().expect("one").to_string()).collect()
        };
        let all = ["192.0.2.1:5060", "192.0.2.2:5070", "[2001:db8::1]:5060"];
        assert_eq!(order(now), all);
        let first = SipAddr::new(Transport::Udp, target(all[0]).addr.into());
        routes.failed(now, &first, Duration::from_secs(30));
        assert_eq!(order(now + Duration::from_secs(29)), [all[1], all[2], all[0]]);
        assert_eq!(order(now + Duration::from_secs(30)), all);
        routes.worked(&first);
        assert_eq!(order(now), all);
        let many = (0..20).map(|n| target(&format!("192.0.2.{n}:5060"))).collect();
        assert_eq!(routes.order(now, many).len(), MOST);
    }

    #[tokio::test]
    async fn addresses_and_certificates_are_left_to_the_stack() {
        let routes = Routes::new(None);
        for uri in ["sip:x@192.0.2.1", "sip:x@carrier.example;transport=tls", "sip:x@[2001:db8::1]:5070"] {
            let uri = Uri::try_from(uri).expect("an address");
            assert_eq!(routes.of(&uri, clock::now()).await, []);
        }
    }
}
