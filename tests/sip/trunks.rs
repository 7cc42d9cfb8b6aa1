//! Trunks: several hosts, health, numbers, identities, redirections. Hosts are telephones that say what a test tells them.

use std::time::Duration;

use crate::counted::{Growth, counted};
use crate::support::{
    event, limited, loopback,
    raw::{Raw, header, sdp},
    start, within,
};
use antiphon::{
    media::{
        leg::{LegEnd, LegEvent, MediaLeg},
        sip::SipLeg,
    },
    sip::{Beside, DialError, DialRequest, Endpoint, NameSource, Naptr, RtpConfig, SipConfig, TlsConfig, TrunkConfig},
};
use rsipstack::resolver::sip_resolver::{LookupSource, SrvRecord};
use tokio::task::JoinHandle;

/// A host of a trunk, and its `host:port`. It can be answered from once its endpoint is known.
async fn host() -> (Raw, String) {
    let raw = Raw::new(([127, 0, 0, 1], 9).into(), "host").await;
    let at = raw.uri().split_once('@').expect("a host").1.to_owned();
    (raw, at)
}

async fn endpoint(trunk: &str, hosts: &mut [&mut Raw]) -> Endpoint {
    let trunk: TrunkConfig = toml::from_str(trunk).expect("valid");
    let (endpoint, _calls) = start(SipConfig { trunk: vec![trunk], ..loopback() }).await;
    for host in hosts {
        host.target = endpoint.local_udp().expect("bound");
    }
    endpoint
}

fn dial(endpoint: &Endpoint, to: &str) -> JoinHandle<Result<SipLeg, DialError>> {
    let request = DialRequest { to: to.to_owned(), from: Some("030555".to_owned()), ..DialRequest::default() };
    let endpoint = endpoint.clone();
    tokio::spawn(async move { endpoint.dial(request).await })
}

async fn pick_up(host: &mut Raw, invite: &str, headers: &str) {
    let kind = format!("{headers}Content-Type: application/sdp\r\n");
    host.answer_with(invite, "200 OK", &kind, &sdp(4_000, "")).await;
    host.expect("ACK").await;
}

async fn hang_up(host: &mut Raw, call: JoinHandle<Result<SipLeg, DialError>>) {
    let mut leg = limited(call).await.expect("runs").expect("answered");
    leg.hang_up().await;
    let bye = host.next("BYE").await;
    host.answer(&bye, "200 OK", "").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_host_that_fails_is_passed_over_and_left_alone() {
    let ((mut a, at_a), (mut b, at_b)) = (host().await, host().await);
    let trunk = format!(
        "name = \"t\"\nhost = \"{at_a}\"\ntargets = [{{ host = \"{at_b}\", priority = 2 }}]\nprefixes = [\"+49\"]\n\
         numbers = {{ country = \"49\", send = \"international\" }}\nuser_phone = true\nassert_identity = true"
    );
    let counts = Growth::of(&["antiphon_trunk_failovers_total"]);
    let endpoint = endpoint(&trunk, &mut [&mut a, &mut b]).await;
    let call = dial(&endpoint, "030-1234");
    let invite = a.next("INVITE").await;
    assert!(invite.starts_with(&format!("INVITE sip:0049301234@{at_a};user=phone ")), "{invite}");
    let asserted = header(&invite, "P-Asserted-Identity");
    assert_eq!(asserted, Some(format!("<sip:004930555@{at_a};user=phone>").as_str()));
    assert_eq!(header(&invite, "Session-Expires"), Some("1800"));
    a.answer(&invite, "503 Service Unavailable", "").await;
    a.expect("ACK").await;
    let invite = b.next("INVITE").await;
    assert!(invite.starts_with(&format!("INVITE sip:0049301234@{at_b};user=phone ")), "{invite}");
    pick_up(&mut b, &invite, "").await;
    hang_up(&mut b, call).await;
    counts.assert();
    let hosts = &endpoint.trunks()[0].targets;
    assert_eq!((hosts[0].blocked, hosts[1].blocked), (true, false));
    assert!(hosts[0].error.as_ref().is_some_and(|error| error.contains("503")), "{hosts:?}");
    // The next call begins with the other one, and what is about the call is no reason to try the first again.
    let call = dial(&endpoint, "+49301234");
    let invite = b.next("INVITE").await;
    b.answer(&invite, "486 Busy Here", "").await;
    b.expect("ACK").await;
    let result = limited(call).await.expect("runs");
    assert!(matches!(result, Err(DialError::Declined { status: 486, .. })), "{:?}", result.err());
    assert!(!a.hears("INVITE", Duration::from_millis(300)).await);
    within("every call to be forgotten", || endpoint.calls() == 0).await;
}

/// A name server that knows one carrier: the ports of its hosts, best first.
struct Names(Vec<u16>);

#[async_trait::async_trait]
impl LookupSource for Names {
    async fn lookup_srv(&self, name: &str) -> Result<Vec<SrvRecord>, String> {
        assert_eq!(name, "_sip._udp.carrier.example");
        let records = self.0.iter().zip(1..).map(|(port, priority)| SrvRecord {
            target: "one.carrier.example".to_owned(),
            port: *port,
            priority,
            weight: 1,
        });
        Ok(records.collect())
    }

    async fn lookup_a_aaaa(&self, name: &str) -> Result<Vec<std::net::IpAddr>, String> {
        assert_eq!(name, "one.carrier.example");
        Ok(vec![[127, 0, 0, 1].into()])
    }
}

#[async_trait::async_trait]
impl NameSource for Names {}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn of_the_hosts_that_a_name_stands_for_the_next_is_asked_where_one_fails() {
    let ((mut a, at_a), (mut b, at_b)) = (host().await, host().await);
    let port = |at: &str| at.rsplit(':').next().and_then(|port| port.parse().ok()).expect("a port");
    let names = Names(vec![port(&at_a), port(&at_b)]);
    let beside = Beside { names: Some(std::sync::Arc::new(names)), ..Beside::default() };
    let trunk = "name = \"t\"\nhost = \"carrier.example\"\nprefixes = [\"*\"]";
    let config = SipConfig { trunk: vec![toml::from_str(trunk).expect("valid")], ..loopback() };
    let (sender, _calls) = tokio::sync::mpsc::channel(1);
    let endpoint = Endpoint::start_beside(config, RtpConfig::default(), sender, beside).await.expect("starts");
    for host in [&mut a, &mut b] {
        host.target = endpoint.local_udp().expect("bound");
    }
    let call = dial(&endpoint, "bob");
    let invite = a.next("INVITE").await;
    assert!(invite.starts_with("INVITE sip:bob@carrier.example "), "the name stays: {invite}");
    a.answer(&invite, "503 Service Unavailable", "").await;
    a.expect("ACK").await;
    let invite = b.next("INVITE").await;
    pick_up(&mut b, &invite, "").await;
    hang_up(&mut b, call).await;
    assert!(!endpoint.trunks()[0].targets[0].blocked, "another of its hosts took the call");
    // The next call does not begin with the one that failed.
    let call = dial(&endpoint, "bob");
    let invite = b.next("INVITE").await;
    b.answer(&invite, "486 Busy Here", "").await;
    b.expect("ACK").await;
    assert!(limited(call).await.expect("runs").is_err());
    within("every call to be forgotten", || endpoint.calls() == 0).await;
}

/// A name server whose `localhost` wants TLS, at these ports.
struct Secure(Vec<u16>);

#[async_trait::async_trait]
impl LookupSource for Secure {
    async fn lookup_srv(&self, name: &str) -> Result<Vec<SrvRecord>, String> {
        let records = self.0.iter().zip(1..).map(|(port, priority)| SrvRecord {
            target: "edge.carrier.example".to_owned(),
            port: *port,
            priority,
            weight: 1,
        });
        if name == "_sips._tcp.localhost" { Ok(records.collect()) } else { Err("no such record".to_owned()) }
    }

    async fn lookup_a_aaaa(&self, name: &str) -> Result<Vec<std::net::IpAddr>, String> {
        assert_eq!(name, "edge.carrier.example");
        Ok(vec![[127, 0, 0, 1].into()])
    }
}

#[async_trait::async_trait]
impl NameSource for Secure {
    async fn lookup_naptr(&self, name: &str) -> Result<Vec<Naptr>, String> {
        assert_eq!(name, "localhost");
        let (flags, service, replacement) = ("S".to_owned(), "SIPS+D2T".to_owned(), "_sips._tcp.localhost".to_owned());
        Ok(vec![Naptr { order: 1, preference: 1, flags, service, replacement }])
    }
}

/// The certificate is that of the name, at whichever of its addresses: one that takes no connection, and one that is no TLS, are
/// passed over at once, and stay behind.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn behind_one_name_of_tls_the_next_address_is_asked() {
    let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/sip");
    let (cert, key) = (folder.join("test-only-cert.pem"), folder.join("test-only-key.pem"));
    for transport in ["tls", "auto"] {
        let tls = TlsConfig { bind: ([127, 0, 0, 1], 0).into(), cert: cert.clone(), key: key.clone() };
        let (callee, mut calls) = start(SipConfig { tls: Some(tls), ..loopback() }).await;
        let live = callee.local_tls().expect("bound").port();
        let plain = callee.local_tcp().expect("bound").port();
        let closed = std::net::TcpListener::bind("127.0.0.1:0").expect("binds").local_addr().expect("bound").port();
        let names = std::sync::Arc::new(Secure(vec![closed, plain, live]));
        let beside = Beside { names: Some(names), ..Beside::default() };
        let trunk = format!("name = \"t\"\nhost = \"localhost\"\ntransport = \"{transport}\"\nprefixes = [\"*\"]");
        let trunk = vec![toml::from_str(&trunk).expect("valid")];
        let config = SipConfig { trunk, tls_roots: Some(cert.clone()), ..loopback() };
        let (sender, _calls) = tokio::sync::mpsc::channel(1);
        let endpoint = Endpoint::start_beside(config, RtpConfig::default(), sender, beside).await.expect("starts");
        for _ in 0..2 {
            let call = dial(&endpoint, "demo");
            let mut called = limited(limited(calls.recv()).await.expect("a call").accept()).await.expect("accepted");
            let mut leg = limited(call).await.expect("runs").expect("answered");
            for leg in [&mut called, &mut leg] {
                leg.attach().await.expect("attaches");
            }
            leg.hang_up().await;
            event(&mut called, |e| matches!(e, LegEvent::Closed(LegEnd::Remote))).await;
        }
        assert!(!endpoint.trunks()[0].targets[0].blocked, "another of its addresses took the calls");
        within("every call to be forgotten", || endpoint.calls() == 0 && callee.calls() == 0).await;
        // Nobody is left: that is known at once, not after half a minute.
        callee.shutdown().await;
        drop(calls);
        let began = dial(&endpoint, "demo");
        assert!(limited(began).await.expect("runs").is_err());
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_host_that_says_nothing_is_given_up_for_the_next() {
    let ((mut a, at_a), (mut b, at_b)) = (host().await, host().await);
    let trunk = format!(
        "name = \"t\"\nhost = \"{at_a}\"\ntargets = [{{ host = \"{at_b}\", priority = 2 }}]\nprefixes = [\"*\"]"
    );
    let endpoint = endpoint(&trunk, &mut [&mut a, &mut b]).await;
    let call = dial(&endpoint, "bob");
    let lost = a.next("INVITE").await;
    let invite = b.next("INVITE").await;
    pick_up(&mut b, &invite, "").await;
    // The first one wakes up: it is told that the call is over there (RFC 3261 section 9.1).
    a.answer(&lost, "180 Ringing", "").await;
    let cancel = a.expect("CANCEL").await;
    a.answer(&cancel, "200 OK", "").await;
    a.answer(&lost, "487 Request Terminated", "").await;
    hang_up(&mut b, call).await;
    within("every call to be forgotten", || endpoint.calls() == 0).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_interval_that_is_too_short_for_the_called_side_is_asked_for_again() {
    let (mut a, at) = host().await;
    let trunk = format!("name = \"t\"\nhost = \"{at}\"\nprefixes = [\"*\"]\nsession_expires_s = 300");
    let endpoint = endpoint(&trunk, &mut [&mut a]).await;
    let call = dial(&endpoint, "bob");
    let invite = a.next("INVITE").await;
    assert_eq!((header(&invite, "Session-Expires"), header(&invite, "Min-SE")), (Some("300"), Some("90")));
    a.answer(&invite, "422 Session Interval Too Small", "Min-SE: 3600\r\n").await;
    a.expect("ACK").await;
    let invite = a.next("INVITE").await;
    assert_eq!(header(&invite, "Session-Expires"), Some("3600"));
    // A second demand that is no more ends it.
    a.answer(&invite, "422 Session Interval Too Small", "Min-SE: 3600\r\n").await;
    a.expect("ACK").await;
    let result = limited(call).await.expect("runs");
    assert!(matches!(result, Err(DialError::Declined { status: 422, .. })), "{:?}", result.err());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_redirection_is_followed_to_hosts_of_the_trunk_only() {
    let ((mut a, at_a), (mut b, at_b)) = (host().await, host().await);
    let trunk = format!(
        "name = \"t\"\nhost = \"{at_a}\"\ntargets = [{{ host = \"{at_b}\", priority = 2 }}]\nprefixes = [\"+49\"]\n\
         redirects = 1"
    );
    let endpoint = endpoint(&trunk, &mut [&mut a, &mut b]).await;
    let call = dial(&endpoint, "+49301");
    let invite = a.next("INVITE").await;
    // The first contact is none of the trunk's, the second a number that is not allowed.
    let moved = format!("Contact: <sip:+49302@127.0.0.1:9>, <sip:+88@{at_b}>, <sip:+49302@{at_b}>\r\n");
    let answer = |status: &str, invite: &str| {
        let kept = ["Via", "From", "To", "Call-ID", "CSeq"];
        let lines = invite.lines().filter(|line| kept.contains(&line.split(':').next().unwrap_or_default()));
        let lines: Vec<String> = lines
            .map(|line| if line.starts_with("To:") { format!("{line};tag=raw\r\n") } else { format!("{line}\r\n") })
            .collect();
        format!("SIP/2.0 {status}\r\n{}{moved}Content-Length: 0\r\n\r\n", lines.concat())
    };
    a.send(&answer("302 Moved Temporarily", &invite)).await;
    a.expect("ACK").await;
    let invite = b.next("INVITE").await;
    assert!(invite.starts_with(&format!("INVITE sip:+49302@{at_b} ")), "{invite}");
    // One redirection is allowed, and no more.
    b.send(&answer("302 Moved Temporarily", &invite)).await;
    b.expect("ACK").await;
    let result = limited(call).await.expect("runs");
    assert!(matches!(result, Err(DialError::Declined { status: 302, .. })), "{:?}", result.err());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn health_is_asked_by_options_and_shown() {
    let ((mut a, at_a), (mut b, at_b)) = (host().await, host().await);
    let trunk = format!("name = \"asked\"\nhost = \"{at_a}\"\ntargets = [{{ host = \"{at_b}\" }}]\noptions_s = 1");
    let counts = Growth::of(&[
        "antiphon_trunk_checks_total{outcome=\"answered\"}",
        "antiphon_trunk_checks_total{outcome=\"failed\"}",
    ]);
    let endpoint = endpoint(&trunk, &mut [&mut a, &mut b]).await;
    assert_eq!(endpoint.trunks()[0].up, None);
    let answering = tokio::spawn(async move {
        loop {
            // Not knowing the method is a sign of life, too.
            let options = a.expect("OPTIONS").await;
            a.answer(&options, "405 Method Not Allowed", "").await;
        }
    });
    let refusing = tokio::spawn(async move {
        loop {
            let options = b.expect("OPTIONS").await;
            b.answer(&options, "503 Service Unavailable", "").await;
        }
    });
    within("both to be known", || endpoint.trunks()[0].targets.iter().all(|target| target.up.is_some())).await;
    let trunk = &endpoint.trunks()[0];
    assert_eq!((trunk.up, trunk.targets[0].up, trunk.targets[1].up), (Some(true), Some(true), Some(false)));
    assert!(trunk.targets[1].error.as_ref().is_some_and(|error| error.contains("503")), "{trunk:?}");
    counts.assert();
    within("its state to be shown", || counted("antiphon_trunk_up{trunk=\"asked\"}") == 1.0).await;
    answering.abort();
    refusing.abort();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn of_a_call_that_forks_the_first_answer_wins_and_the_others_are_ended() {
    let (mut a, at) = host().await;
    let trunk = format!("name = \"t\"\nhost = \"{at}\"\nprefixes = [\"*\"]");
    let endpoint = endpoint(&trunk, &mut [&mut a]).await;
    let call = dial(&endpoint, "bob");
    let invite = a.next("INVITE").await;
    let branch = |tag: &str| {
        let to = header(&invite, "To").expect("To").to_owned();
        invite.replace(&format!("To: {to}"), &format!("To: {to};tag={tag}"))
    };
    a.answer(&branch("one"), "180 Ringing", "").await;
    a.answer(&branch("two"), "180 Ringing", "").await;
    let kind = "Content-Type: application/sdp\r\n";
    a.answer_with(&branch("two"), "200 OK", kind, &sdp(4_000, "")).await;
    let ack = a.expect("ACK").await;
    assert!(header(&ack, "To").is_some_and(|to| to.ends_with(";tag=two")), "{ack}");
    // Another telephone was picked up at the same time.
    a.answer_with(&branch("one"), "200 OK", kind, &sdp(4_002, "")).await;
    let bye = a.next("BYE").await;
    assert!(header(&bye, "To").is_some_and(|to| to.ends_with(";tag=one")), "{bye}");
    a.answer(&bye, "200 OK", "").await;
    let mut leg = limited(call).await.expect("runs").expect("answered");
    leg.hang_up().await;
    let bye = a.expect("BYE").await;
    assert!(header(&bye, "To").is_some_and(|to| to.ends_with(";tag=two")), "{bye}");
    a.answer(&bye, "200 OK", "").await;
    within("every call to be forgotten", || endpoint.calls() == 0).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn who_calls_is_told_as_a_trunk_says_and_not_as_a_stranger_does() {
    let trunk: TrunkConfig = toml::from_str("name = \"t\"\nhost = \"127.0.0.1:9\"").expect("valid");
    let trusting = start(SipConfig { trunk: vec![trunk], ..loopback() }).await;
    let other = start(loopback()).await;
    let headers = "P-Asserted-Identity: <sip:+4930555;verstat=TN-Validation-Passed@carrier>\r\nX-Account: 7\r\n\
                   Diversion: <sip:+4930777@carrier>;reason=user-busy\r\nX-Antiphon-Asserted: forged\r\n";
    for ((endpoint, mut calls), trusted) in [(trusting, true), (other, false)] {
        let mut raw = Raw::new(endpoint.local_udp().expect("bound"), "identity").await;
        let invite = raw.request("INVITE", headers, &sdp(4_000, ""));
        raw.send(&invite).await;
        let call = limited(calls.recv()).await.expect("a call");
        let told = |name: &str| call.headers.get(name).map(String::as_str);
        assert_eq!(told("X-Account"), Some("7"));
        assert_eq!(told("X-Antiphon-Diverted-From"), Some("+4930777"));
        assert_eq!(told("X-Antiphon-Asserted"), trusted.then_some("+4930555"));
        assert_eq!(told("X-Antiphon-Verstat"), trusted.then_some("TN-Validation-Passed"));
        assert_eq!(told("P-Asserted-Identity").is_some(), trusted);
        call.reject(486, "busy");
        raw.expect("SIP/2.0 486").await;
        raw.ack("").await;
    }
}

/// Who keeps accounts is told of each call of a trunk that is refused before it rings, and of no stranger's.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn refused_calls_of_trunks_are_told_of_once() {
    let odd = sdp(4_000, "").replace("RTP/AVP 0 101", "RTP/AVP 18 101");
    for trunks in [1, 0] {
        let trunk = toml::from_str("name = \"carrier\"\nhost = \"127.0.0.1:9\"").expect("valid");
        let config = SipConfig { trunk: [trunk].into_iter().take(trunks).collect(), ..loopback() };
        let (told, mut refused) = tokio::sync::mpsc::channel(4);
        let (sender, _calls) = tokio::sync::mpsc::channel(4);
        let beside = Beside { refused: Some(told), ..Beside::default() };
        let endpoint = Endpoint::start_beside(config, RtpConfig::default(), sender, beside).await.expect("starts");
        let mut raw = Raw::new(endpoint.local_udp().expect("bound"), "refused").await;
        let invite = raw.request("INVITE", "", &odd);
        for _ in 0..2 {
            raw.send(&invite).await;
            raw.expect("SIP/2.0 488").await;
        }
        let told: Vec<_> = std::iter::from_fn(|| refused.try_recv().ok()).collect();
        assert_eq!(told.len(), trunks, "{told:?}");
        for call in told {
            assert_eq!((call.trunk.as_str(), call.user.as_str(), call.status), ("carrier", "demo", 488));
            assert!(call.from.starts_with("sip:raw@127.0.0.1"), "{}", call.from);
        }
    }
}
