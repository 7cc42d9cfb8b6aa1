//! The addresses behind the name of a trunk's host, one after the other (RFC 3263 section 4): several SRV records, or one
//! name with several addresses.
//!
//! # Why
//! The stack takes the first address that it finds and knows of no other: a carrier that has one of its three hosts down
//! loses every call that begins there. Where TLS checks a certificate it needs the name, so that the stack is given that, and
//! the address by [`super::names::pinned`].
//!
//! *Which transport* a host wants stands in its NAPTR records, and is asked with `transport = "auto"` only: otherwise the
//! configuration says it.

use std::{
    collections::HashMap,
    net::SocketAddr,
    sync::{Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use rsipstack::{
    resolver::sip_resolver::Target,
    sip::{Domain, Host, Param, Port, Transport, Uri},
    transport::SipAddr,
};
use tokio::time::timeout;

use super::{
    config,
    names::LOOK_UP,
    resolve::{At, Directory, wanted},
};

/// Addresses of one host that one call tries.
const MOST: usize = 6;
/// Addresses that are remembered as failed; those that wait no longer are forgotten first.
const MAX_FAILED: usize = 1_024;

/// Where hosts are, and which of their addresses have failed.
pub(super) struct Routes {
    directory: Directory,
    failed: Mutex<HashMap<SocketAddr, Instant>>,
}

impl Routes {
    /// `directory`: who is asked for them.
    pub(super) fn new(directory: Directory) -> Routes {
        Routes { directory, failed: Mutex::default() }
    }

    /// Where a request to `uri` at a trunk of this transport may go, in the order in which it is tried; none: where the stack
    /// finds it.
    pub(super) async fn of(&self, uri: &Uri, wish: config::Transport, now: Instant) -> Vec<SipAddr> {
        let Host::Domain(domain) = &uri.host_with_port.host else { return Vec::new() };
        let transport = uri.params.iter().find_map(|param| match param {
            Param::Transport(transport) => Some(*transport),
            _ => None,
        });
        // Who names a port says which transport by that (RFC 3263 section 4.1).
        let asks = wish == config::Transport::Auto && uri.host_with_port.port.is_none();
        let transport = transport.or((!asks).then_some(Transport::Udp));
        if !matches!(transport, None | Some(Transport::Udp | Transport::Tcp | Transport::Tls)) {
            return Vec::new();
        }
        let found = timeout(LOOK_UP, self.look_up(domain, uri.host_with_port.port, transport)).await;
        self.order(now, found.unwrap_or_default())
    }

    /// Every address of a host. `transport`: `None` where the host is to say.
    async fn look_up(&self, domain: &Domain, port: Option<Port>, transport: Option<Transport>) -> Vec<Target> {
        let (directory, names) = (&self.directory, &*self.directory.names);
        if transport.is_some() {
            return directory.find(names, domain, port, transport).await.unwrap_or_default();
        }
        let mut found = Vec::new();
        for (transport, name) in wanted(names.lookup_naptr(&domain.to_string()).await.unwrap_or_default()) {
            let at = At { source: names, name };
            found.extend(directory.find(&at, domain, None, Some(transport)).await.unwrap_or_default());
        }
        if found.is_empty() {
            // Then SRV of each transport, and an address by UDP.
            found = directory.find(names, domain, None, None).await.unwrap_or_default();
        }
        found
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
    use std::{net::IpAddr, sync::Arc};

    use rsipstack::resolver::sip_resolver::{LookupSource, SrvRecord};

    use super::*;
    use crate::{
        clock,
        sip::resolve::{Families, NameSource, Naptr},
    };

    fn routes(names: Option<Arc<dyn NameSource>>) -> Routes {
        Routes::new(Directory::new(names, Families::of([IpAddr::from([127, 0, 0, 1])].into_iter())))
    }

    fn target(address: &str) -> Target {
        Target { addr: address.parse().expect("an address"), transport: Transport::Udp }
    }

    #[test]
    fn addresses_that_failed_come_last_until_their_time_is_over() {
        let (routes, now) = (routes(None), clock::now());
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
    async fn addresses_and_websockets_are_left_to_the_stack() {
        let routes = routes(None);
        for uri in ["sip:x@192.0.2.1", "sip:x@carrier.example;transport=wss", "sip:x@[2001:db8::1]:5070"] {
            let uri = Uri::try_from(uri).expect("an address");
            assert_eq!(routes.of(&uri, config::Transport::Auto, clock::now()).await, []);
        }
    }

    /// Records by name; a number stands for an address of 192.0.2.0/24.
    struct Zone {
        naptr: Vec<(&'static str, &'static str)>,
        srv: Vec<(&'static str, &'static str, u16)>,
        a: Vec<(&'static str, u8)>,
    }

    #[async_trait::async_trait]
    impl LookupSource for Zone {
        async fn lookup_srv(&self, name: &str) -> Result<Vec<SrvRecord>, String> {
            let records = self.srv.iter().filter(|(at, ..)| *at == name).zip(1..);
            let record = |((_, target, port), priority): (&(_, &str, u16), u16)| SrvRecord {
                target: (*target).to_owned(),
                port: *port,
                priority,
                weight: 0,
            };
            Ok(records.map(record).collect())
        }

        async fn lookup_a_aaaa(&self, name: &str) -> Result<Vec<IpAddr>, String> {
            Ok(self.a.iter().filter(|(at, _)| *at == name).map(|(_, n)| [192, 0, 2, *n].into()).collect())
        }
    }

    #[async_trait::async_trait]
    impl NameSource for Zone {
        async fn lookup_naptr(&self, name: &str) -> Result<Vec<Naptr>, String> {
            assert_eq!(name, "h.example");
            let record = |((service, replacement), order): (&(&str, &str), u16)| Naptr {
                order,
                preference: 0,
                flags: "s".to_owned(),
                service: (*service).to_owned(),
                replacement: (*replacement).to_owned(),
            };
            Ok(self.naptr.iter().zip(1..).map(record).collect())
        }
    }

    async fn found(zone: Zone, uri: &str, wish: config::Transport) -> Vec<String> {
        let routes = routes(Some(Arc::new(zone)));
        let uri = Uri::try_from(uri).expect("an address");
        let found = routes.of(&uri, wish, clock::now()).await;
        found.iter().map(|a| format!("{} {}", a.r#type.expect("a transport"), a.addr)).collect()
    }

    #[tokio::test]
    async fn a_host_says_which_transport_it_wants_where_it_is_asked() {
        let zone = || Zone {
            naptr: vec![("SIPS+D2T", "_sips._tcp.else.example"), ("SIP+D2U", "_sip._udp.h.example")],
            srv: vec![
                ("_sips._tcp.else.example", "one.example", 5061),
                ("_sips._tcp.else.example", "two.example", 5071),
                ("_sip._udp.h.example", "one.example", 5060),
                ("_sips._tcp.h.example", "two.example", 5081),
            ],
            a: vec![("one.example", 1), ("two.example", 2), ("two.example", 3), ("h.example", 9)],
        };
        let auto = config::Transport::Auto;
        assert_eq!(
            found(zone(), "sip:x@h.example", auto).await,
            ["TLS 192.0.2.1:5061", "TLS 192.0.2.2:5071", "TLS 192.0.2.3:5071", "UDP 192.0.2.1:5060"]
        );
        assert_eq!(found(zone(), "sip:x@h.example:5090", auto).await, ["UDP 192.0.2.9:5090"], "a port says it");
        // A trunk whose transport is written down asks no name server for it.
        assert_eq!(
            found(zone(), "sip:x@h.example;transport=tls", config::Transport::Tls).await,
            ["TLS 192.0.2.2:5081", "TLS 192.0.2.3:5081"]
        );
        assert_eq!(found(zone(), "sip:x@h.example", config::Transport::Udp).await, ["UDP 192.0.2.1:5060"]);
        // Without NAPTR the SRV records say it, without any the address is one for UDP.
        let plain = Zone { naptr: vec![], srv: vec![("_sip._tcp.h.example", "one.example", 5070)], ..zone() };
        assert_eq!(found(plain, "sip:x@h.example", auto).await, ["TCP 192.0.2.1:5070"]);
        let bare = Zone { naptr: vec![], srv: vec![], ..zone() };
        assert_eq!(found(bare, "sip:x@h.example", auto).await, ["UDP 192.0.2.9:5060"]);
    }
    /// A name with an address of either family.
    struct Both;

    #[async_trait::async_trait]
    impl LookupSource for Both {
        async fn lookup_srv(&self, _: &str) -> Result<Vec<SrvRecord>, String> {
            Ok(Vec::new())
        }

        async fn lookup_a_aaaa(&self, _: &str) -> Result<Vec<IpAddr>, String> {
            Ok(vec!["192.0.2.1".parse().expect("one"), "2001:db8::1".parse().expect("one")])
        }
    }

    #[async_trait::async_trait]
    impl NameSource for Both {}

    #[tokio::test]
    async fn who_has_one_family_only_goes_to_addresses_of_that_first() {
        let uri = Uri::try_from("sip:x@h.example:5070").expect("an address");
        let (v4, v6) = ("192.0.2.1:5070", "[2001:db8::1]:5070");
        for (bound, order) in [("::1", [v6, v4]), ("127.0.0.1", [v4, v6]), ("::", [v4, v6])] {
            let families = Families::of([bound.parse().expect("an address")].into_iter());
            let routes = Routes::new(Directory::new(Some(Arc::new(Both)), families));
            let found = routes.of(&uri, config::Transport::Udp, clock::now()).await;
            let found: Vec<_> = found.iter().map(|a| a.get_socketaddr().expect("one").to_string()).collect();
            assert_eq!(found, order, "bound to {bound}");
        }
    }
}
