//! The requests of a model's tools: to where the configuration says, and to public addresses only unless it allows
//! others.
//!
//! # Why
//! What a caller says reaches the arguments of a tool. The host of a tool is fixed, but a name may resolve to an
//! address inside (by mistake, or because its owner wants it to), and an answer may redirect there. So the resolver of
//! the client drops such addresses, which leaves no moment between the check and the use, and redirects are not
//! followed.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::sync::Arc;
use std::time::Duration;

use reqwest::dns::{Addrs, Name, Resolve, Resolving};
use reqwest::header::{HeaderName, HeaderValue};
use reqwest::{Client, Url};
use serde_json::{Map, Value};

use super::tools::{self, HttpTool, Method};
use crate::secret::Secret;

/// Longest wait for TCP and TLS.
const CONNECT: Duration = Duration::from_secs(3);

/// The clients of tools, and of the models themselves. Cheap to clone; connections are shared.
#[derive(Clone, Debug)]
pub struct Web {
    /// Public addresses only.
    screened: Client,
    /// Any address, for tools with `allow_private`.
    open: Client,
    /// For models, which the operator names: private addresses and proxies are fine.
    pub(super) model: Client,
}

impl Web {
    /// No connections yet.
    ///
    /// # Errors
    /// TLS cannot be set up.
    pub fn new() -> reqwest::Result<Self> {
        let builder = || Client::builder().connect_timeout(CONNECT).redirect(reqwest::redirect::Policy::none());
        // A proxy would resolve the names of tools itself, past the screen.
        Ok(Self {
            screened: builder().no_proxy().dns_resolver(Arc::new(Screen)).build()?,
            open: builder().no_proxy().build()?,
            model: builder().build()?,
        })
    }

    /// Makes the request of `tool`; gives what the model is told.
    ///
    /// # Errors
    /// It did not succeed; for the model, too.
    pub async fn run(&self, tool: &HttpTool, arguments: &Map<String, Value>) -> Result<String, String> {
        let limit = Duration::from_millis(tool.timeout_ms);
        match tokio::time::timeout(limit, self.fetch(tool, arguments)).await {
            Ok(result) => result,
            Err(_) => Err(format!("no answer within {} ms", tool.timeout_ms)),
        }
    }

    async fn fetch(&self, tool: &HttpTool, arguments: &Map<String, Value>) -> Result<String, String> {
        let (url, body) = tools::request(tool, arguments)?;
        // An address in the URL passes no resolver.
        if let Some(ip) = literal(&url).filter(|ip| !tool.allow_private && !is_public(*ip)) {
            return Err(format!("{ip} is a private address"));
        }
        let client = if tool.allow_private { &self.open } else { &self.screened };
        let method = match tool.method {
            Method::Get => reqwest::Method::GET,
            Method::Post => reqwest::Method::POST,
            Method::Put => reqwest::Method::PUT,
            Method::Patch => reqwest::Method::PATCH,
            Method::Delete => reqwest::Method::DELETE,
        };
        let mut request = client.request(method, url);
        for (name, value) in &tool.headers {
            let (name, value) = header(name, value)?;
            request = request.header(name, value);
        }
        if let Some(body) = body {
            request = request.json(&body);
        }
        let mut response = request.send().await.map_err(|error| explain(&error))?;
        let status = response.status();
        let mut bytes = Vec::new();
        let mut whole = true;
        while let Some(chunk) = response.chunk().await.map_err(|error| explain(&error))? {
            let room = tool.max_bytes - bytes.len();
            bytes.extend_from_slice(&chunk[..chunk.len().min(room)]);
            if chunk.len() > room {
                whole = false;
                break;
            }
        }
        let mut text = String::from_utf8_lossy(&bytes).into_owned();
        if !whole {
            text.push_str("\n[cut here: the answer was longer]");
        }
        match status.is_success() {
            true if text.trim().is_empty() => Ok("done".into()),
            true => Ok(text),
            false => Err(format!("HTTP {}: {text}", status.as_u16())),
        }
    }
}

/// The innermost cause: the outer ones only say that a request failed.
pub(super) fn explain(error: &reqwest::Error) -> String {
    let mut cause: &dyn std::error::Error = error;
    while let Some(inner) = cause.source() {
        cause = inner;
    }
    cause.to_string()
}

/// A header of the configuration.
///
/// # Errors
/// Name or value are none.
pub(super) fn header(name: &str, value: &Secret) -> Result<(HeaderName, HeaderValue), String> {
    let name = HeaderName::try_from(name).map_err(|error| format!("header `{name}`: {error}"))?;
    let mut value = HeaderValue::try_from(value.reveal()).map_err(|error| format!("header `{name}`: {error}"))?;
    value.set_sensitive(true);
    Ok((name, value))
}

/// The address of a URL whose host is none but an address.
pub(super) fn literal(url: &Url) -> Option<IpAddr> {
    url.host_str()?.trim_matches(['[', ']']).parse().ok()
}

/// Resolves names to public addresses only.
struct Screen;

impl Resolve for Screen {
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
pub(super) fn is_public(ip: IpAddr) -> bool {
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

    #[test]
    fn addresses_that_lead_inside_are_known() {
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
        let error = Screen.resolve("localhost".parse().expect("a name")).await.err().expect("screened");
        assert!(error.to_string().contains("no public address"), "{error}");
    }
}
