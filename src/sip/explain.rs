//! How a call would go out, and whether trunks can be reached: for people, without placing a call.

use std::{
    net::{IpAddr, SocketAddr},
    sync::Arc,
    time::Duration,
};

use rsipstack::{
    sip::{Host, Transport as Wire, Uri},
    transport::SipAddr,
};

use super::{
    DialError, DialRequest, Endpoint, RtpConfig, SipConfig, SipError, TrunkStatus,
    config::{Srtp, Transport},
    dialplan::{self, Caller, Dialplan, Route},
    headers,
    resolve::{Directory, Families, NameSource},
    routes::Routes,
    timer,
};
use crate::clock;

/// How a call would be placed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Explanation {
    /// The trunk; `None`: straight to a loopback address.
    pub trunk: Option<String>,
    /// Request URIs, one a host, in the order in which they are tried where none has failed and chance decides nothing.
    pub targets: Vec<String>,
    /// `From`; `None`: a user of ours at the address of the listener.
    pub from: Option<String>,
    /// Headers of the INVITE beside those that every INVITE has.
    pub headers: Vec<String>,
    /// What is offered, in order.
    pub codecs: Vec<String>,
    /// How its keys are agreed on, where media is offered encrypted only: `SDES` or `DTLS`.
    pub srtp: Option<&'static str>,
    /// Whether the names of hosts say which transport is used; see [`ways`].
    pub transport_asked: bool,
    /// Limits of the trunk: calls at a time, calls a minute, minutes a day; 0 is none.
    pub limits: Option<(usize, usize, u32)>,
}

/// How `request` would be placed by a gateway of this configuration.
///
/// # Errors
/// It would not be; the text says why, and names the key.
pub fn explain(config: &SipConfig, request: &DialRequest) -> Result<Explanation, DialError> {
    let local = dialplan::all_loopback(listeners(config).map(|address| address.ip()));
    let plan = Dialplan { config, local };
    let from = request.from.as_deref();
    let Route { uri, trunk, user } = plan.route(&request.to, from, request.trunk.as_deref())?;
    let trunk = trunk.map(|(_, trunk)| trunk);
    let caller = match plan.caller(from, trunk)? {
        Caller::Address(uri) => Some(*uri),
        Caller::User(_) => None,
    };
    let mut headers = headers::extra_headers(&request.headers)?;
    headers.extend(caller.as_ref().and_then(|caller| headers::asserted(trunk, caller, &request.headers)));
    let own = trunk.and_then(|trunk| trunk.session_expires_s).unwrap_or(config.session_expires_s);
    headers.extend((own > 0).then(|| timer::wish_headers(own)).into_iter().flatten());
    let codecs = trunk.map(|trunk| &trunk.codecs).filter(|codecs| !codecs.is_empty()).unwrap_or(&config.codecs);
    let mut hosts: Vec<_> = trunk.map(|trunk| trunk.hosts().collect()).unwrap_or_default();
    hosts.sort_by_key(|(_, priority, weight)| (*priority, std::cmp::Reverse(*weight)));
    let at = hosts.iter().filter_map(|(host, ..)| dialplan::at(trunk?, host, &user).ok());
    let mut targets: Vec<String> = at.map(|uri| uri.to_string()).collect();
    if targets.is_empty() {
        targets.push(uri.to_string());
    }
    Ok(Explanation {
        trunk: trunk.map(|trunk| trunk.name.clone()),
        targets,
        from: caller.map(|caller| caller.to_string()),
        headers: headers.iter().map(ToString::to_string).collect(),
        codecs: codecs.iter().map(|codec| format!("{codec:?}").to_lowercase()).collect(),
        srtp: match trunk.map(|trunk| trunk.srtp) {
            Some(Srtp::Required) => Some("SDES"),
            Some(Srtp::Dtls) => Some("DTLS"),
            Some(Srtp::Off) | None => None,
        },
        transport_asked: trunk.is_some_and(|trunk| trunk.transport == Transport::Auto),
        limits: trunk.map(|trunk| (trunk.max_calls, trunk.calls_per_minute, trunk.minutes_per_day)),
    })
}

/// The ways to one of [`Explanation::targets`] in the order in which a call tries them, each as transport and address, as
/// `names` (`None`: the system's name servers) have it.
pub async fn ways(
    config: &SipConfig,
    call: &Explanation,
    target: &str,
    names: Option<Arc<dyn NameSource>>,
) -> Vec<(String, SocketAddr)> {
    let Ok(uri) = Uri::try_from(target) else { return Vec::new() };
    let families = Families::of(listeners(config).map(|address| address.ip()));
    let wish = if call.transport_asked { Transport::Auto } else { Transport::Udp };
    if let Host::IpAddr(ip) = uri.host_with_port.host {
        // An address cannot be asked (RFC 3263 section 4.1).
        let port = uri.host_with_port.port.map_or(5060, u16::from);
        return vec![(Wire::Udp.to_string(), SocketAddr::new(ip, port))];
    }
    let found = Routes::new(Directory::new(names, families)).of(&uri, wish, clock::now()).await;
    let way = |address: SipAddr| Some((address.r#type?.to_string(), address.get_socketaddr().ok()?));
    found.into_iter().filter_map(way).collect()
}

fn listeners(config: &SipConfig) -> impl Iterator<Item = SocketAddr> {
    config.listeners().into_iter().filter_map(|(_, address)| address)
}

/// Asks every host of every trunk by OPTIONS, from free ports of the configured addresses, until each has answered or was
/// given up, and for `limit` at most. Registers nowhere: a registration from here would draw calls away from a gateway
/// that is running.
///
/// # Errors
/// A listener cannot be opened or the configuration cannot work.
pub async fn probe(config: &SipConfig, limit: Duration) -> Result<Vec<TrunkStatus>, SipError> {
    // A gateway may be running on the configured ones.
    let free = |address: SocketAddr| SocketAddr::new(address.ip(), 0);
    let mut config = SipConfig {
        udp: config.udp.map(free),
        tcp: config.tcp.map(free),
        ws: config.ws.map(free),
        wss: config.wss.map(free),
        ..config.clone()
    };
    if let Some(tls) = &mut config.tls {
        tls.bind = free(tls.bind);
    }
    for trunk in &mut config.trunk {
        trunk.options_s = 1;
        trunk.register = false;
    }
    let (sender, _calls) = tokio::sync::mpsc::channel(1);
    let endpoint = Endpoint::start(config, RtpConfig::default(), sender).await?;
    let end = clock::now() + limit;
    let settled = |trunk: &TrunkStatus| trunk.targets.iter().all(|target| target.up.is_some());
    while clock::now() < end && !endpoint.trunks().iter().all(settled) {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    let trunks = endpoint.trunks();
    endpoint.shutdown().await;
    Ok(trunks)
}

/// Addresses of a host with or without a port, as a call would look them up.
pub async fn addresses(host: &str) -> Vec<IpAddr> {
    super::shared::look_up(host).await
}

#[cfg(test)]
mod tests {
    use rsipstack::resolver::sip_resolver::{LookupSource, SrvRecord};

    use super::*;
    use crate::sip::resolve::Naptr;

    #[test]
    fn a_call_is_explained_and_a_refusal_names_the_key() {
        let config: SipConfig = toml::from_str(
            r#"
            codecs = ["opus", "pcma"]
            [[trunk]]
            name = "carrier"
            host = "late.example"
            targets = [{ host = "first.example:5070", priority = 0 }]
            prefixes = ["+49"]
            numbers = { country = "49", send = "digits" }
            assert_identity = true
            srtp = "required"
            max_calls = 3
            "#,
        )
        .expect("valid");
        let request = |to: &str| DialRequest {
            to: to.to_owned(),
            from: Some("030555".to_owned()),
            headers: [("X-Account".to_owned(), "7".to_owned())].into(),
            ..DialRequest::default()
        };
        let found = explain(&config, &request("0301234")).expect("allowed");
        assert_eq!(found.trunk.as_deref(), Some("carrier"));
        assert_eq!(found.targets, ["sip:49301234@first.example:5070", "sip:49301234@late.example"]);
        assert_eq!(found.from.as_deref(), Some("sip:4930555@late.example"));
        assert_eq!((found.codecs, found.srtp), (vec!["opus".to_owned(), "pcma".to_owned()], Some("SDES")));
        assert!(!found.transport_asked);
        assert_eq!(found.limits, Some((3, 60, 3_000)));
        for header in ["X-Account: 7", "P-Asserted-Identity: <sip:4930555@late.example>", "Session-Expires: 1800"] {
            assert!(found.headers.contains(&header.to_owned()), "{header}: {:?}", found.headers);
        }
        let refused = explain(&config, &request("+8812")).expect_err("a satellite");
        assert!(refused.to_string().contains("`prefixes`"), "{refused}");
        let loopback = DialRequest { to: "sip:demo@127.0.0.1:5090".to_owned(), ..DialRequest::default() };
        let direct = explain(&config, &loopback).expect("a test bench");
        assert_eq!((direct.trunk, direct.targets), (None, vec!["sip:demo@127.0.0.1:5090".to_owned()]));
        assert_eq!(direct.srtp, None);
    }

    /// A host that wants TLS at one address and takes UDP at another.
    struct Zone;

    #[async_trait::async_trait]
    impl LookupSource for Zone {
        async fn lookup_srv(&self, name: &str) -> Result<Vec<SrvRecord>, String> {
            let port = if name == "_sips._tcp.h.example" { 5061 } else { 5060 };
            Ok(vec![SrvRecord { target: "h.example".to_owned(), port, priority: 1, weight: 0 }])
        }

        async fn lookup_a_aaaa(&self, _: &str) -> Result<Vec<IpAddr>, String> {
            Ok(vec![IpAddr::from([192, 0, 2, 1])])
        }
    }

    #[async_trait::async_trait]
    impl NameSource for Zone {
        async fn lookup_naptr(&self, _: &str) -> Result<Vec<Naptr>, String> {
            let record = |order, service: &str, name: &str| Naptr {
                order,
                preference: 0,
                flags: "s".to_owned(),
                service: service.to_owned(),
                replacement: name.to_owned(),
            };
            Ok(vec![record(1, "SIPS+D2T", "_sips._tcp.h.example"), record(2, "SIP+D2U", "_sip._udp.h.example")])
        }
    }

    #[tokio::test]
    async fn the_transport_of_a_trunk_that_asks_for_it_is_explained() {
        let config: SipConfig = toml::from_str(
            "udp = \"127.0.0.1:0\"\n[[trunk]]\nname = \"t\"\nhost = \"h.example\"\ntransport = \"auto\"\n\
             targets = [{ host = \"192.0.2.9\" }]\nprefixes = [\"*\"]\nsrtp = \"dtls\"",
        )
        .expect("valid");
        let request = DialRequest { to: "+4930".to_owned(), ..DialRequest::default() };
        let call = explain(&config, &request).expect("allowed");
        assert_eq!((call.srtp, call.transport_asked), (Some("DTLS"), true));
        let mut found = Vec::new();
        for target in &call.targets {
            let ways = ways(&config, &call, target, Some(Arc::new(Zone))).await;
            found.extend(ways.into_iter().map(|(by, at)| format!("{by} {at}")));
        }
        found.sort();
        assert_eq!(found, ["TLS 192.0.2.1:5061", "UDP 192.0.2.1:5060", "UDP 192.0.2.9:5060"]);
    }
}
