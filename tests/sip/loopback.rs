//! Calls between two endpoints of ours over loopback sockets: signalling, media, and what happens when
//! either side does the unexpected.

use std::time::Duration;

use crate::support::{
    Pair, event, hold, limited, loopback, packet, pair, pair_with,
    raw::{Raw, header},
    speak_until_heard, start, transfer, within,
};
use antiphon::{
    media::leg::{Codec, LegEnd, LegEvent, MediaLeg},
    sip::{
        Beside, CodecName, DialError, DialRequest, DigestName, Endpoint, IncomingCall, NameSource, RtpConfig, Secret,
        SipConfig, SipError, TlsConfig, TrunkConfig, User,
    },
};
use rsipstack::resolver::sip_resolver::{LookupSource, SrvRecord};
use tokio::sync::mpsc;

fn to(endpoint: &Endpoint) -> DialRequest {
    let port = endpoint.local_udp().expect("bound").port();
    DialRequest { to: format!("sip:demo@127.0.0.1:{port}"), ..DialRequest::default() }
}

fn trunk(endpoint: &Endpoint) -> TrunkConfig {
    let port = endpoint.local_udp().expect("bound").port();
    toml::from_str(&format!("name = \"t\"\nhost = \"127.0.0.1:{port}\"\nprefixes = [\"*\"]")).expect("valid")
}

async fn closed(leg: &mut impl MediaLeg) -> LegEnd {
    limited(async {
        loop {
            if let LegEvent::Closed(end) = leg.recv().await {
                return end;
            }
        }
    })
    .await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn audio_flows_both_ways_and_bye_ends_both() {
    let Pair { mut caller, mut called, at, .. } = pair().await;
    assert_eq!(caller.format().codec, Codec::Opus);
    assert_eq!(caller.format(), called.format());
    speak_until_heard(&mut caller, &mut called).await;
    speak_until_heard(&mut called, &mut caller).await;

    caller.hang_up().await;
    assert_eq!(closed(&mut called).await, LegEnd::Remote);
    assert_eq!(closed(&mut caller).await, LegEnd::Local);
    assert_eq!(caller.send(packet(&caller, 0, b"x")).await, Err(LegEnd::Local));
    within("both calls to be forgotten", || at.0.calls() == 0 && at.1.calls() == 0).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn called_side_can_end_and_dropping_a_leg_hangs_up() {
    let Pair { mut caller, mut called, at, calls } = pair().await;
    called.hang_up().await;
    assert_eq!(closed(&mut caller).await, LegEnd::Remote);
    within("the call to be forgotten", || at.0.calls() == 0 && at.1.calls() == 0).await;
    drop(calls);

    let Pair { mut caller, called, at: _at, .. } = pair().await;
    drop(called);
    assert_eq!(closed(&mut caller).await, LegEnd::Remote);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn calls_run_over_tcp() {
    let Pair { mut caller, mut called, at: _at, .. } = pair_with(loopback(), loopback(), ";transport=tcp").await;
    speak_until_heard(&mut caller, &mut called).await;
    hold(&mut caller, true).await.expect("held over the stream");
    called.hang_up().await;
    assert_eq!(closed(&mut caller).await, LegEnd::Remote);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn endpoints_bound_to_every_address_tell_one_that_works() {
    let everywhere = || SipConfig { udp: Some(([0, 0, 0, 0], 0).into()), tcp: None, ..SipConfig::default() };
    let (b, mut calls) = start(everywhere()).await;
    // Who is reached by others calls through trunks only.
    let (a, _) = start(SipConfig { trunk: vec![trunk(&b)], ..everywhere() }).await;
    let request = DialRequest { to: "demo".to_owned(), ..DialRequest::default() };
    let answer = async { calls.recv().await.expect("a call").accept().await.expect("accepted") };
    let (caller, mut called) = limited(async { tokio::join!(a.dial(request), answer) }).await;
    let mut caller = caller.expect("answered");
    caller.attach().await.expect("attaches");
    called.attach().await.expect("attaches");
    assert_eq!(caller.remote().map(|a| a.ip()), Some([127, 0, 0, 1].into()), "by the route to the peer");
    speak_until_heard(&mut caller, &mut called).await;
    speak_until_heard(&mut called, &mut caller).await;
    called.hang_up().await;
    assert_eq!(closed(&mut caller).await, LegEnd::Remote);
}

/// A host with an address of either family, at which only the second is listened to.
struct Dual;

#[async_trait::async_trait]
impl LookupSource for Dual {
    async fn lookup_srv(&self, _: &str) -> Result<Vec<SrvRecord>, String> {
        Ok(Vec::new())
    }

    async fn lookup_a_aaaa(&self, name: &str) -> Result<Vec<std::net::IpAddr>, String> {
        assert_eq!(name, "localhost");
        Ok(vec![[127, 0, 0, 1].into(), std::net::Ipv6Addr::LOCALHOST.into()])
    }
}

#[async_trait::async_trait]
impl NameSource for Dual {}

/// An endpoint that has no address of version 4, with `trunk` at `localhost`.
async fn six(trunk: &str, tls: Option<TlsConfig>) -> (Endpoint, mpsc::Receiver<IncomingCall>) {
    let at = || Some("[::1]:0".parse().expect("an address"));
    let tls_roots = tls.as_ref().map(|tls| tls.cert.clone());
    let trunk = (!trunk.is_empty()).then(|| toml::from_str(trunk).expect("valid"));
    let config =
        SipConfig { udp: at(), tcp: at(), tls, tls_roots, trunk: trunk.into_iter().collect(), ..SipConfig::default() };
    let (sender, calls) = mpsc::channel(4);
    let beside = Beside { names: Some(std::sync::Arc::new(Dual)), ..Beside::default() };
    (Endpoint::start_beside(config, RtpConfig::default(), sender, beside).await.expect("starts"), calls)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn calls_run_over_ipv6_by_every_transport() {
    let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/sip");
    let tls = || TlsConfig {
        bind: "[::1]:0".parse().expect("an address"),
        cert: folder.join("test-only-cert.pem"),
        key: folder.join("test-only-key.pem"),
    };
    let (b, mut calls) = six("", Some(tls())).await;
    for (transport, at) in [("udp", b.local_udp()), ("tcp", b.local_tcp()), ("tls", b.local_tls())] {
        let at = at.expect("bound");
        // By its name, which has an address of version 4, too.
        let trunk = format!(
            "name = \"t\"\nhost = \"localhost:{}\"\ntransport = \"{transport}\"\nprefixes = [\"*\"]",
            at.port()
        );
        let (a, _calls) = six(&trunk, Some(tls())).await;
        let request = DialRequest { to: "demo".to_owned(), ..DialRequest::default() };
        let answer = async { calls.recv().await.expect("a call").accept().await.expect("accepted") };
        let (caller, mut called) = limited(async { tokio::join!(a.dial(request), answer) }).await;
        let mut caller = caller.unwrap_or_else(|error| panic!("{transport}: {error}"));
        caller.attach().await.expect("attaches");
        called.attach().await.expect("attaches");
        assert!(caller.remote().is_some_and(|address| address.is_ipv6()), "{transport}");
        speak_until_heard(&mut caller, &mut called).await;
        hold(&mut called, true).await.expect("requests go back the same way");
        called.hang_up().await;
        assert_eq!(closed(&mut caller).await, LegEnd::Remote);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_trunk_is_registered_with_over_ipv6() {
    let mut registrar = Raw::new("[::1]:9".parse().expect("an address"), "registrar").await;
    let port = registrar.uri().rsplit(':').next().expect("a port").to_owned();
    let trunk = format!(
        "name = \"t\"\nhost = \"localhost:{port}\"\nregister = true\nusername = \"a\"\npassword = \"b\"\n\
         prefixes = [\"*\"]"
    );
    let (endpoint, _calls) = six(&trunk, None).await;
    registrar.target = endpoint.local_udp().expect("bound");
    let register = registrar.next("REGISTER").await;
    assert!(header(&register, "Contact").is_some_and(|contact| contact.contains("@[::1]:")), "{register}");
    registrar.answer(&register, "200 OK", "Expires: 600\r\n").await;
    within("the registration", || endpoint.trunks()[0].registered == Some(true)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn cancelled_call_is_gone_on_both_sides() {
    let (a, _) = start(loopback()).await;
    let (b, mut calls) = start(loopback()).await;
    let dialling = tokio::spawn({
        let (a, request) = (a.clone(), to(&b));
        async move { a.dial(request).await.map(|_| ()) }
    });
    let call = limited(calls.recv()).await.expect("a call");
    call.ringing();
    dialling.abort();
    limited(call.cancelled()).await;
    assert!(matches!(limited(call.accept()).await, Err(SipError::Cancelled)));
    within("both calls to be forgotten", || a.calls() == 0 && b.calls() == 0).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn unanswered_call_times_out_with_cancel() {
    let (a, _) = start(loopback()).await;
    let (b, mut calls) = start(loopback()).await;
    let request = DialRequest { timeout: Some(Duration::from_secs(2)), ..to(&b) };
    let (result, call) = limited(async { tokio::join!(a.dial(request), calls.recv()) }).await;
    assert!(matches!(result, Err(DialError::NoAnswer)), "{:?}", result.err());
    limited(call.expect("a call").cancelled()).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn declining_is_heard_with_its_status() {
    let (a, _) = start(loopback()).await;
    let (b, mut calls) = start(loopback()).await;
    let decline = async { calls.recv().await.expect("a call").reject(486, "in a meeting") };
    let (result, ()) = limited(async { tokio::join!(a.dial(to(&b)), decline) }).await;
    assert!(matches!(result, Err(DialError::Declined { status: 486, .. })), "{:?}", result.err());

    let forget = async { drop(calls.recv().await.expect("a call")) };
    let (result, ()) = limited(async { tokio::join!(a.dial(to(&b)), forget) }).await;
    assert!(matches!(result, Err(DialError::Declined { status: 480, .. })), "{:?}", result.err());
    within("both calls to be forgotten", || a.calls() == 0 && b.calls() == 0).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn limits_and_mismatches_are_refused_with_the_right_status() {
    let (a, _) = start(SipConfig { codecs: vec![CodecName::Pcmu], ..loopback() }).await;
    let (full, _calls) = start(SipConfig { max_calls: 0, ..loopback() }).await;
    let (other, _calls) = start(SipConfig { codecs: vec![CodecName::Pcma], ..loopback() }).await;
    let (draining, _calls) = start(loopback()).await;
    draining.drain();
    for (endpoint, expected) in [(&full, 503), (&other, 488), (&draining, 503)] {
        let result = limited(a.dial(to(endpoint))).await;
        assert!(
            matches!(result, Err(DialError::Declined { status, .. }) if status == expected),
            "{expected}: {:?}",
            result.err()
        );
    }
    assert!(matches!(full.dial(to(&a)).await, Err(DialError::Overloaded)));
    for nowhere in ["", "sip:", "no spaces allowed", "12345"] {
        let request = DialRequest { to: nowhere.to_owned(), ..DialRequest::default() };
        assert!(matches!(limited(a.dial(request)).await, Err(DialError::Address(_))), "{nowhere}");
    }
    let request = DialRequest { trunk: Some("x".to_owned()), ..to(&a) };
    assert!(matches!(a.dial(request).await, Err(DialError::UnknownTrunk(_))));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn hold_and_resume_are_seen_by_the_other_side() {
    let Pair { mut caller, mut called, at: _at, .. } = pair().await;
    for holder_is_caller in [true, false] {
        let (holder, held) = if holder_is_caller { (&mut caller, &mut called) } else { (&mut called, &mut caller) };
        hold(holder, true).await.expect("held");
        assert_eq!(event(held, |e| matches!(e, LegEvent::Held(_))).await, LegEvent::Held(true));
        // Nothing is sent by who is held, and that is no error.
        held.send(packet(held, 1, b"unheard")).await.expect("up");
        hold(holder, false).await.expect("resumed");
        assert_eq!(event(held, |e| matches!(e, LegEvent::Held(_))).await, LegEvent::Held(false));
        speak_until_heard(held, holder).await;
    }
    caller.hang_up().await;
    assert_eq!(hold(&mut caller, true).await, Err("the call is over".to_owned()));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn both_sides_may_hold_at_once() {
    let Pair { mut caller, mut called, at: _at, .. } = pair().await;
    // Glare: each may be refused with 491 and tries again, so both get there.
    let (first, second) = limited(async { tokio::join!(hold(&mut caller, true), hold(&mut called, true)) }).await;
    assert_eq!((first, second), (Ok(()), Ok(())));
    caller.hang_up().await;
    assert_eq!(closed(&mut called).await, LegEnd::Remote);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn passwords_are_asked_for_and_checked() {
    let users = vec![User { username: "alice".to_owned(), password: Secret::new("wonder") }];
    let (b, mut calls) = start(SipConfig { users, ..loopback() }).await;
    let (stranger, _) = start(loopback()).await;
    let result = limited(stranger.dial(to(&b))).await;
    assert!(matches!(result, Err(DialError::Declined { status: 401, .. })), "{:?}", result.err());

    for (password, status) in [("guess", Some(403)), ("wonder", None)] {
        let mut with = trunk(&b);
        with.username = Some("alice".to_owned());
        with.password = Some(Secret::new(password));
        let (a, _) = start(SipConfig { trunk: vec![with], ..loopback() }).await;
        let request = DialRequest { to: "demo".to_owned(), ..DialRequest::default() };
        match status {
            Some(expected) => {
                let result = limited(a.dial(request)).await;
                assert!(matches!(result, Err(DialError::Declined { status, .. }) if status == expected));
            }
            None => {
                let answer = async {
                    let call = calls.recv().await.expect("a call");
                    assert_eq!((call.account.as_deref(), call.user.as_str()), (Some("alice"), "demo"));
                    call.accept().await.expect("accepted")
                };
                let (leg, mut called) = limited(async { tokio::join!(a.dial(request), answer) }).await;
                let mut leg = leg.expect("answered");
                leg.attach().await.expect("attaches");
                called.attach().await.expect("attaches");
                leg.hang_up().await;
                assert_eq!(closed(&mut called).await, LegEnd::Remote);
            }
        }
    }
}

/// RFC 8760: whichever a carrier asks for, and only for that.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn each_algorithm_that_a_carrier_may_ask_for_is_answered() {
    for algorithm in [DigestName::Md5, DigestName::Sha256, DigestName::Sha512_256] {
        let users = vec![User { username: "alice".to_owned(), password: Secret::new("wonder") }];
        let (b, mut calls) = start(SipConfig { users, digest: vec![algorithm], ..loopback() }).await;
        let mut with = trunk(&b);
        (with.username, with.password) = (Some("alice".to_owned()), Some(Secret::new("wonder")));
        let (a, _) = start(SipConfig { trunk: vec![with], ..loopback() }).await;
        let answer = async {
            let call = calls.recv().await.expect("a call");
            assert_eq!(call.account.as_deref(), Some("alice"), "{algorithm:?}");
            call.accept().await.expect("accepted")
        };
        let request = DialRequest { to: "demo".to_owned(), ..DialRequest::default() };
        let (leg, mut called) = limited(async { tokio::join!(a.dial(request), answer) }).await;
        let mut leg = leg.unwrap_or_else(|error| panic!("{algorithm:?}: {error}"));
        leg.attach().await.expect("attaches");
        called.attach().await.expect("attaches");
        // A request within the call is challenged, too, or not: its answer is what counts.
        hold(&mut leg, true).await.unwrap_or_else(|error| panic!("{algorithm:?}: {error}"));
        leg.hang_up().await;
        assert_eq!(closed(&mut called).await, LegEnd::Remote);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn trunk_chooses_codecs_and_encryption() {
    let (b, mut calls) = start(loopback()).await;
    let mut secure = trunk(&b);
    secure.codecs = vec![CodecName::Pcma];
    secure.srtp =
        toml::from_str::<TrunkConfig>("name=\"\"\nhost=\"192.0.2.1\"\nsrtp=\"required\"").expect("valid").srtp;
    let (a, _) = start(SipConfig { trunk: vec![secure], ..loopback() }).await;
    let request = DialRequest {
        to: "+49 30".replace(' ', ""),
        headers: [("X-Account".to_owned(), "7".to_owned())].into(),
        ..DialRequest::default()
    };
    let answer = async {
        let call = calls.recv().await.expect("a call");
        assert_eq!(call.user, "+4930");
        assert_eq!(call.headers.get("X-Account").map(String::as_str), Some("7"));
        assert_eq!(call.offered, [Codec::Pcma]);
        call.accept().await.expect("accepted")
    };
    let (caller, mut called) = limited(async { tokio::join!(a.dial(request), answer) }).await;
    let mut caller = caller.expect("answered");
    caller.attach().await.expect("attaches");
    called.attach().await.expect("attaches");
    assert!(caller.encrypted() && called.encrypted());
    assert_eq!(caller.format().codec, Codec::Pcma);
    speak_until_heard(&mut caller, &mut called).await;
    speak_until_heard(&mut called, &mut caller).await;
    // The keys survive a re-INVITE.
    hold(&mut caller, true).await.expect("held");
    hold(&mut caller, false).await.expect("resumed");
    speak_until_heard(&mut caller, &mut called).await;
    // Reports are protected too. Each side sends its own while it is listened to.
    let listening = async {
        loop {
            called.recv().await;
        }
    };
    tokio::select! {
        () = listening => {}
        report = event(&mut caller, |e| matches!(e, LegEvent::Report(_))) => {
            let LegEvent::Report(report) = report else { unreachable!("filtered") };
            assert_eq!(report.lost, 0);
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn calls_go_out_over_tls_to_whom_the_configured_authority_vouches_for() {
    let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/sip");
    let (cert, key) = (folder.join("test-only-cert.pem"), folder.join("test-only-key.pem"));
    let tls = TlsConfig { bind: ([127, 0, 0, 1], 0).into(), cert: cert.clone(), key: key.clone() };
    let (b, mut calls) = start(SipConfig { tls: Some(tls), ..loopback() }).await;
    let host = b.local_tls().expect("bound");
    let trunk: TrunkConfig = toml::from_str(&format!(
        "name = \"t\"\nhost = \"{host}\"\ntransport = \"tls\"\nsrtp = \"required\"\nprefixes = [\"*\"]"
    ))
    .expect("valid");
    let request = DialRequest { to: "demo".to_owned(), ..DialRequest::default() };

    let trusting = SipConfig { trunk: vec![trunk.clone()], tls_roots: Some(cert), ..loopback() };
    let (a, _) = start(trusting).await;
    let mut dialling = tokio::spawn({
        let (a, request) = (a.clone(), request.clone());
        async move { a.dial(request).await.expect("answered") }
    });
    let call = tokio::select! {
        call = limited(calls.recv()) => call.expect("a call"),
        leg = &mut dialling => panic!("not called: {:?}", leg.err()),
    };
    assert_eq!(call.user, "demo");
    let mut called = limited(call.accept()).await.expect("accepted");
    let mut caller = limited(dialling).await.expect("answered");
    caller.attach().await.expect("attaches");
    called.attach().await.expect("attaches");
    assert!(caller.encrypted() && called.encrypted());
    speak_until_heard(&mut caller, &mut called).await;
    hold(&mut caller, true).await.expect("held over the stream");
    // Requests of the called side come back on the same stream: nothing listens for others.
    hold(&mut called, true).await.expect("held over the stream");
    called.hang_up().await;
    assert_eq!(closed(&mut caller).await, LegEnd::Remote);

    // Nobody vouches for a certificate that the system's authorities have not signed.
    let watched = TrunkConfig { options_s: 1, ..trunk };
    let (stranger, _) = start(SipConfig { trunk: vec![watched], ..loopback() }).await;
    let refused = limited(stranger.dial(request)).await.expect_err("an unknown certificate is not trusted");
    assert!(refused.to_string().contains("certificate"), "who looks for the mistake is told of it: {refused}");
    within("the host to be down", || stranger.trunks()[0].targets[0].up == Some(false)).await;
    let target = stranger.trunks()[0].targets[0].clone();
    assert!(target.error.as_ref().is_some_and(|error| error.contains("certificate")), "{target:?}");
    assert!(calls.try_recv().is_err());
    // A file without a certificate is a mistake of the configuration.
    let (sender, _receiver) = tokio::sync::mpsc::channel(1);
    let config = SipConfig { tls_roots: Some(key), ..loopback() };
    let error = Endpoint::start(config, antiphon::sip::RtpConfig::default(), sender).await.err().expect("refused");
    assert!(error.to_string().contains("tls_roots"), "{error}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn transfer_that_the_peer_declines_leaves_the_call_up() {
    let Pair { mut caller, mut called, at: _at, .. } = pair().await;
    let error = transfer(&mut caller, "sip:somebody@127.0.0.1", false).await.expect_err("declined");
    assert!(error.contains("603"), "{error}");
    assert!(transfer(&mut caller, "not an address", false).await.is_err());
    speak_until_heard(&mut caller, &mut called).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn shutdown_says_goodbye_to_every_call() {
    let Pair { mut caller, mut called, at, .. } = pair().await;
    limited(at.1.shutdown()).await;
    assert_eq!(closed(&mut caller).await, LegEnd::Remote);
    assert_eq!(closed(&mut called).await, LegEnd::Local);
    assert_eq!(at.1.calls(), 0);
    let again = limited(at.1.dial(to(&at.0))).await;
    assert!(matches!(again, Err(DialError::Sip(SipError::Closed))));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn silence_of_the_peer_ends_the_call() {
    let config = SipConfig { media_timeout_s: 1, ..loopback() };
    let Pair { mut caller, mut called, at: _at, .. } = pair_with(loopback(), config, "").await;
    assert_eq!(closed(&mut called).await, LegEnd::Lost);
    assert_eq!(closed(&mut caller).await, LegEnd::Remote);
}

#[tokio::test]
async fn what_cannot_work_is_refused_at_the_start() {
    let (a, _) = start(loopback()).await;
    let (sender, _receiver) = tokio::sync::mpsc::channel(1);
    let rtp = antiphon::sip::RtpConfig::default();
    let taken = SipConfig { udp: a.local_udp(), ..loopback() };
    let error = Endpoint::start(taken, rtp, sender.clone()).await.err().expect("in use");
    assert!(error.to_string().contains("udp"), "{error}");
    let none = SipConfig { udp: None, tcp: None, ..loopback() };
    assert!(matches!(Endpoint::start(none, rtp, sender.clone()).await, Err(SipError::Config(_))));
    let narrow = antiphon::sip::RtpConfig { port_min: 7, port_max: 8 };
    assert!(matches!(Endpoint::start(loopback(), narrow, sender.clone()).await, Err(SipError::Config(_))));
    let twice = SipConfig { trunk: vec![trunk(&a), trunk(&a)], ..loopback() };
    assert!(matches!(Endpoint::start(twice, rtp, sender).await, Err(SipError::Config(_))));
}
