//! Who is asked where the hosts of trunks are: name servers, for the records that RFC 3263 names.

use std::{net::IpAddr, sync::Arc};

use async_trait::async_trait;
use hickory_resolver::{
    TokioResolver,
    config::LookupIpStrategy,
    proto::rr::{RData, RecordType},
};
use rsipstack::{
    resolver::sip_resolver::{LookupSource, SrvRecord, Target, resolve_logic},
    sip::{Domain, Port, Transport},
};

/// Answers for names.
#[async_trait]
pub trait NameSource: LookupSource {
    /// The NAPTR records of a domain, in any order.
    ///
    /// # Errors
    /// There are none, or no name server answers.
    async fn lookup_naptr(&self, name: &str) -> Result<Vec<Naptr>, String> {
        Err(format!("no name server is asked for NAPTR of {name}"))
    }
}

/// A NAPTR record, as far as SIP reads it (RFC 3403 section 4, RFC 3263 section 4.1).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Naptr {
    /// Lower is better.
    pub order: u16,
    /// Between equal orders likewise.
    pub preference: u16,
    /// `s`: what it leads to is an SRV record.
    pub flags: String,
    /// `SIP+D2U`, `SIP+D2T`, `SIPS+D2T`.
    pub service: String,
    /// The name of that record.
    pub replacement: String,
}

/// The transports that a domain wants and the SRV record of each, best first. What we do not speak, and what is no SRV record,
/// is left out.
pub(super) fn wanted(mut records: Vec<Naptr>) -> Vec<(Transport, String)> {
    records.sort_by_key(|record| (record.order, record.preference));
    let transport = |record: &Naptr| match record.service.to_ascii_uppercase().as_str() {
        "SIPS+D2T" => Some(Transport::Tls),
        "SIP+D2T" => Some(Transport::Tcp),
        "SIP+D2U" => Some(Transport::Udp),
        _ => None,
    };
    let leads = |record: &&Naptr| record.flags.eq_ignore_ascii_case("s") && !record.replacement.is_empty();
    let wanted =
        records.iter().filter(leads).filter_map(|record| Some((transport(record)?, record.replacement.clone())));
    wanted.collect()
}

/// The families of addresses that requests of ours leave from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Families {
    v4: bool,
    v6: bool,
}

impl Families {
    /// Those of listeners; one at `[::]` takes both.
    pub(super) fn of(bound: impl Iterator<Item = IpAddr>) -> Families {
        bound.fold(Families { v4: false, v6: false }, |known, ip| match ip {
            IpAddr::V4(_) => Families { v4: true, ..known },
            IpAddr::V6(ip) => Families { v4: known.v4 || ip.is_unspecified(), v6: true },
        })
    }

    fn has(self, ip: IpAddr) -> bool {
        if ip.is_ipv4() { self.v4 } else { self.v6 }
    }
}

/// Who finds hosts, in the order in which we reach them.
#[derive(Clone)]
pub(super) struct Directory {
    pub(super) names: Arc<dyn NameSource>,
    families: Families,
}

impl Directory {
    /// `names`: who is asked; `None`: the system's name servers.
    pub(super) fn new(names: Option<Arc<dyn NameSource>>, families: Families) -> Directory {
        Directory { names: names.unwrap_or_else(|| System::open(families)), families }
    }

    /// Every address of a host, those that can be reached first, as `source` has it.
    ///
    /// # Errors
    /// It has none, or nobody answers.
    pub(super) async fn find(
        &self,
        source: &dyn LookupSource,
        domain: &Domain,
        port: Option<Port>,
        transport: Option<Transport>,
    ) -> Result<Vec<Target>, String> {
        let secure = matches!(transport, Some(Transport::Tls | Transport::Wss));
        let mut found = resolve_logic(source, domain, port, transport, secure).await?;
        found.sort_by_key(|target| !self.families.has(target.addr.ip()));
        Ok(found)
    }
}

/// Another source whose SRV record stands under a name of its own, as NAPTR may have it.
pub(super) struct At<'a> {
    pub(super) source: &'a dyn NameSource,
    pub(super) name: String,
}

#[async_trait]
impl LookupSource for At<'_> {
    async fn lookup_srv(&self, _: &str) -> Result<Vec<SrvRecord>, String> {
        self.source.lookup_srv(&self.name).await
    }

    async fn lookup_a_aaaa(&self, name: &str) -> Result<Vec<IpAddr>, String> {
        self.source.lookup_a_aaaa(name).await
    }
}

/// The system's name servers. Where its list of them cannot be read, the system itself is asked, which knows addresses only.
pub(super) struct System(Option<TokioResolver>);

impl System {
    fn open(families: Families) -> Arc<dyn NameSource> {
        let resolver = TokioResolver::builder_tokio().and_then(|mut builder| {
            builder.options_mut().ip_strategy = match families.v4 {
                true => LookupIpStrategy::Ipv4thenIpv6,
                false => LookupIpStrategy::Ipv6thenIpv4,
            };
            builder.build()
        });
        if let Err(error) = &resolver {
            tracing::warn!(%error, "the list of name servers cannot be read: hosts of trunks are found without SRV and NAPTR");
        }
        Arc::new(System(resolver.ok()))
    }

    async fn records<T>(
        &self,
        name: &str,
        kind: RecordType,
        read: impl Fn(&RData) -> Option<T>,
    ) -> Result<Vec<T>, String> {
        let resolver = self.0.as_ref().ok_or("no name server is known")?;
        let found = resolver.lookup(name, kind).await.map_err(|error| error.to_string())?;
        Ok(found.answers().iter().filter_map(|record| read(&record.data)).collect())
    }
}

/// A name without the dot at its end.
fn bare(name: impl ToString) -> String {
    name.to_string().trim_end_matches('.').to_owned()
}

#[async_trait]
impl LookupSource for System {
    async fn lookup_srv(&self, name: &str) -> Result<Vec<SrvRecord>, String> {
        let read = |data: &RData| match data {
            RData::SRV(srv) => Some(SrvRecord {
                target: bare(&srv.target),
                port: srv.port,
                priority: srv.priority,
                weight: srv.weight,
            }),
            _ => None,
        };
        self.records(name, RecordType::SRV, read).await
    }

    async fn lookup_a_aaaa(&self, name: &str) -> Result<Vec<IpAddr>, String> {
        match &self.0 {
            Some(resolver) => {
                let found = resolver.lookup_ip(name).await.map_err(|error| error.to_string())?;
                Ok(found.iter().collect())
            }
            None => {
                let found = tokio::net::lookup_host((name, 0)).await.map_err(|error| error.to_string())?;
                Ok(found.map(|address| address.ip()).collect())
            }
        }
    }
}

#[async_trait]
impl NameSource for System {
    async fn lookup_naptr(&self, name: &str) -> Result<Vec<Naptr>, String> {
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        let read = |data: &RData| match data {
            RData::NAPTR(naptr) => Some(Naptr {
                order: naptr.order,
                preference: naptr.preference,
                flags: text(&naptr.flags),
                service: text(&naptr.services),
                replacement: bare(&naptr.replacement),
            }),
            _ => None,
        };
        self.records(name, RecordType::NAPTR, read).await
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_listener_at_any_address_of_version_6_reaches_both_families() {
        let of = |bound: &[&str]| Families::of(bound.iter().map(|ip| ip.parse().expect("an address")));
        for (bound, v4, v6) in [
            (&["127.0.0.1"][..], true, false),
            (&["2001:db8::1"], false, true),
            (&["::"], true, true),
            (&["192.0.2.1", "2001:db8::1"], true, true),
        ] {
            assert_eq!(of(bound), Families { v4, v6 }, "{bound:?}");
        }
    }

    #[test]
    fn a_domain_says_which_transports_it_wants_and_where() {
        let record = |order, preference, flags: &str, service: &str, replacement: &str| Naptr {
            order,
            preference,
            flags: flags.to_owned(),
            service: service.to_owned(),
            replacement: replacement.to_owned(),
        };
        // The example of RFC 3263 section 4.1, out of order, with what is not for us.
        let records = vec![
            record(100, 50, "s", "SIP+D2U", "_sip._udp.example.com"),
            record(50, 50, "s", "SIPS+D2T", "_sips._tcp.example.com"),
            record(90, 60, "S", "sip+d2t", "_sip._tcp.example.com"),
            record(90, 50, "s", "SIP+D2S", "_sip._sctp.example.com"),
            record(10, 50, "u", "E2U+sip", ""),
            record(20, 50, "", "SIP+D2U", "elsewhere.example.com"),
        ];
        assert_eq!(
            wanted(records),
            [
                (Transport::Tls, "_sips._tcp.example.com".to_owned()),
                (Transport::Tcp, "_sip._tcp.example.com".to_owned()),
                (Transport::Udp, "_sip._udp.example.com".to_owned()),
            ]
        );
    }
}
