//! Which addresses a peer may name: in descriptions, in Contact and Record-Route, in names and URLs that it has us look
//! up; and the HTTP clients that ask such URLs.
//!
//! # Why
//! A gateway stands between networks, and a caller from one of them must not have it send packets into another:
//! `c=IN IP4 10.0.0.5` in a call from the internet would. So a peer names addresses that reach as far as its own or
//! further: one on the same host any, one of a private network private and public ones, all others public ones.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::sync::Arc;

use reqwest::dns::{Addrs, Name, Resolve, Resolving};
use reqwest::{Client, ClientBuilder, Url, redirect};

/// How far an address reaches, the nearest first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Scope {
    /// This host.
    Host,
    /// This link (RFC 3927, RFC 4291 section 2.5.6).
    Link,
    /// A private network (RFC 1918, RFC 4193) or a carrier's own (RFC 6598).
    Site,
    /// Everywhere.
    Global,
}

/// The scope of `ip`; `None` for what is no host's address: unspecified, multicast, broadcast, reserved.
pub fn scope(ip: IpAddr) -> Option<Scope> {
    match ip.to_canonical() {
        IpAddr::V4(ip) => scope_v4(ip),
        IpAddr::V6(ip) => scope_v6(ip),
    }
}

fn scope_v4(ip: Ipv4Addr) -> Option<Scope> {
    let [a, b, ..] = ip.octets();
    match a {
        0 | 224.. => None,
        127 => Some(Scope::Host),
        169 if b == 254 => Some(Scope::Link),
        100 if (64..128).contains(&b) => Some(Scope::Site),
        _ if ip.is_private() => Some(Scope::Site),
        _ => Some(Scope::Global),
    }
}

fn scope_v6(ip: Ipv6Addr) -> Option<Scope> {
    let segments = ip.segments();
    let embedded = |high: u16, low: u16| {
        let [a, b] = high.to_be_bytes();
        let [c, d] = low.to_be_bytes();
        scope_v4(Ipv4Addr::new(a, b, c, d))
    };
    match segments {
        _ if ip.is_unspecified() || ip.is_multicast() => None,
        _ if ip.is_loopback() => Some(Scope::Host),
        // Translators lead to the IPv4 address inside (RFC 6052, RFC 3056).
        [0x64, 0xff9b, 0, 0, 0, 0, high, low] => embedded(high, low),
        [0x2002, high, low, ..] => embedded(high, low),
        [first, ..] if first & 0xffc0 == 0xfe80 => Some(Scope::Link),
        [first, ..] if first & 0xfe00 == 0xfc00 => Some(Scope::Site),
        _ => Some(Scope::Global),
    }
}

/// Whether a peer at `source` may name `named`.
pub fn may_name(source: IpAddr, named: IpAddr) -> bool {
    match (scope(source), scope(named)) {
        (Some(source), Some(named)) => named >= source,
        _ => false,
    }
}

/// The address that a URL names in place of a host, where it is not public. It passes no resolver: who asks the URL by
/// [`Clients`] asks this first.
pub fn private_literal(url: &Url) -> Option<IpAddr> {
    let ip = url.host_str()?.trim_matches(['[', ']']).parse().ok()?;
    (!is_public(ip)).then_some(ip)
}

/// HTTP clients for URLs that peers have a part in. Cheap to clone; connections are shared. Redirects are not followed: they
/// may lead anywhere, and are the caller's to judge.
#[derive(Clone, Debug)]
pub struct Clients {
    /// Public addresses only.
    screened: Client,
    /// Any address.
    open: Client,
}

impl Clients {
    /// No connections yet; `builder` gives what else a client has.
    ///
    /// # Errors
    /// TLS cannot be set up.
    pub fn new(builder: impl Fn() -> ClientBuilder) -> reqwest::Result<Self> {
        // A proxy would resolve names itself, past the screen.
        let builder = || builder().redirect(redirect::Policy::none()).no_proxy();
        Ok(Self { screened: builder().dns_resolver(Arc::new(PublicNames)).build()?, open: builder().build()? })
    }

    /// The client that resolves names to public addresses only, unless private ones are allowed.
    pub fn of(&self, allow_private: bool) -> &Client {
        if allow_private { &self.open } else { &self.screened }
    }
}

/// The innermost cause: the outer ones only say that a request failed.
pub fn cause(error: &(dyn std::error::Error + 'static)) -> String {
    let mut cause = error;
    while let Some(inner) = cause.source() {
        cause = inner;
    }
    cause.to_string()
}

/// Resolves names to public addresses only, so that no moment lies between the check of an address and its use.
#[derive(Clone, Copy, Debug)]
struct PublicNames;

impl Resolve for PublicNames {
    fn resolve(&self, name: Name) -> Resolving {
        Box::pin(async move {
            let host = name.as_str().to_owned();
            let found: Vec<_> = tokio::net::lookup_host((host.as_str(), 0)).await?.collect();
            let public: Vec<_> = found.into_iter().filter(|address| is_public(address.ip())).collect();
            if public.is_empty() {
                return Err(format!("{host} has no public address").into());
            }
            let addresses: Addrs = Box::new(public.into_iter());
            Ok(addresses)
        })
    }
}

/// Whether an address is one of the public Internet (IANA special-purpose registries, RFC 6890), also inside the
/// forms of IPv6 that carry an IPv4 address.
fn is_public(ip: IpAddr) -> bool {
    match ip {
        IpAddr::V4(ip) => is_public_v4(ip),
        IpAddr::V6(ip) => is_public_v6(ip),
    }
}

fn is_public_v4(ip: Ipv4Addr) -> bool {
    let [a, b, c, _] = ip.octets();
    !(ip.is_private()
        || ip.is_loopback()
        || ip.is_link_local()
        || ip.is_multicast()
        || ip.is_documentation()
        || a == 0
        || a >= 240
        || (a == 100 && (64..128).contains(&b))
        || (a == 192 && b == 0 && c == 0)
        || (a == 198 && (18..20).contains(&b)))
}

fn is_public_v6(ip: Ipv6Addr) -> bool {
    let part = ip.segments();
    let v4 = |high: u16, low: u16| Ipv4Addr::from((u32::from(high) << 16) | u32::from(low));
    match part {
        // IPv4-mapped and IPv4-compatible; the unspecified address and loopback are among the latter.
        [0, 0, 0, 0, 0, 0xffff | 0, high, low] => is_public_v4(v4(high, low)),
        // NAT64 (RFC 6052) and 6to4 (RFC 3056).
        [0x64, 0xff9b, 0, 0, 0, 0, high, low] => is_public_v4(v4(high, low)),
        [0x2002, high, low, ..] => is_public_v4(v4(high, low)),
        [0x2001, 0xdb8, ..] => false,
        // Global unicast is 2000::/3, and nothing else is.
        [first, ..] => first & 0xe000 == 0x2000,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ip(text: &str) -> IpAddr {
        text.parse().expect("an address")
    }

    #[test]
    fn every_kind_of_address_has_its_scope() {
        for (text, expected) in [
            ("8.8.8.8", Some(Scope::Global)),
            ("192.0.2.1", Some(Scope::Global)),
            ("100.63.0.1", Some(Scope::Global)),
            ("100.64.0.1", Some(Scope::Site)),
            ("10.1.2.3", Some(Scope::Site)),
            ("172.31.0.1", Some(Scope::Site)),
            ("172.32.0.1", Some(Scope::Global)),
            ("192.168.0.1", Some(Scope::Site)),
            ("169.254.169.254", Some(Scope::Link)),
            ("127.9.9.9", Some(Scope::Host)),
            ("0.0.0.0", None),
            ("224.0.0.1", None),
            ("255.255.255.255", None),
            ("2001:db8::1", Some(Scope::Global)),
            ("fe80::1", Some(Scope::Link)),
            ("fd00::1", Some(Scope::Site)),
            ("::1", Some(Scope::Host)),
            ("::", None),
            ("ff02::1", None),
            ("::ffff:127.0.0.1", Some(Scope::Host)),
            ("64:ff9b::10.0.0.1", Some(Scope::Site)),
            ("2002:7f00:1::", Some(Scope::Host)),
        ] {
            assert_eq!(scope(ip(text)), expected, "{text}");
        }
    }

    #[test]
    fn no_peer_names_what_is_nearer_than_itself() {
        assert!(!may_name(ip("203.0.113.1"), ip("10.0.0.5")));
        assert!(!may_name(ip("203.0.113.1"), ip("169.254.169.254")));
        assert!(!may_name(ip("10.0.0.5"), ip("127.0.0.1")));
        assert!(!may_name(ip("127.0.0.1"), ip("224.0.0.1")));
        assert!(may_name(ip("127.0.0.1"), ip("10.0.0.5")));
        assert!(may_name(ip("10.0.0.5"), ip("192.168.1.1")));
        assert!(may_name(ip("10.0.0.5"), ip("203.0.113.1")));
    }

    #[test]
    fn addresses_of_no_public_host_are_known() {
        for inside in [
            "127.0.0.1",
            "10.1.2.3",
            "172.16.0.1",
            "192.168.1.1",
            "169.254.169.254",
            "0.0.0.0",
            "100.64.0.1",
            "224.0.0.1",
            "255.255.255.255",
            "198.18.0.1",
            "192.0.0.8",
            "::1",
            "::",
            "fe80::1",
            "fd00::1",
            "ff02::1",
            "::ffff:127.0.0.1",
            "::ffff:10.0.0.1",
            "64:ff9b::7f00:1",
            "2002:7f00:1::",
            "2001:db8::1",
            "::127.0.0.1",
        ] {
            assert!(!is_public(inside.parse().expect("an address")), "{inside}");
        }
        for outside in ["8.8.8.8", "100.128.0.1", "172.32.0.1", "2606:4700::1111", "::ffff:8.8.8.8", "64:ff9b::808:808"]
        {
            assert!(is_public(outside.parse().expect("an address")), "{outside}");
        }
    }

    #[tokio::test]
    async fn a_name_that_leads_inside_is_not_found() {
        let error = PublicNames.resolve("localhost".parse().expect("a name")).await.err().expect("screened");
        assert!(error.to_string().contains("no public address"), "{error}");
    }
}
