//! Whoever may name a destination makes nobody pay: what is not allowed is not dialled, by the API, an agent's transfer
//! or REFER.

use crate::support::{called, event, limited, loopback, raw::Raw, raw::header, raw::sdp, start, transfer};
use crate::wire;
use antiphon::{
    media::leg::{LegEvent, MediaLeg},
    sip::{DialError, DialRequest, Endpoint, Outbound, SipConfig, TrunkConfig},
};
use md5::{Digest as _, Md5};

/// A trunk at `telephone` that may be asked for German numbers.
fn trunk(telephone: &Raw, limits: &str) -> TrunkConfig {
    let uri = telephone.uri();
    let host = uri.rsplit('@').next().expect("an address");
    toml::from_str(&format!("name = \"carrier\"\nhost = \"{host}\"\nprefixes = [\"+49\"]\n{limits}")).expect("valid")
}

/// A telephone that no endpoint has been told of.
async fn telephone(call_id: &str) -> Raw {
    Raw::new(([127, 0, 0, 1], 9).into(), call_id).await
}

fn request(to: &str, trunk: Option<&str>) -> DialRequest {
    DialRequest { to: to.to_owned(), trunk: trunk.map(str::to_owned), ..DialRequest::default() }
}

/// A hundred of them, each to be asked for with and without the trunk's name.
fn forbidden(carrier: &Raw) -> Vec<String> {
    let host = carrier.uri().rsplit('@').next().expect("an address").to_owned();
    let mut all: Vec<String> =
        (0..70).map(|n| format!("+{}{n:02}1234567", [1, 7, 88, 23, 252, 960, 675][n % 7])).collect();
    all.extend((0..20).map(|n| format!("sip:+{}0{n}@{host}", [1, 88][n % 2])));
    all.extend((0..10).map(|n| format!("sip:+4930@192.0.2.{n}")));
    all
}

fn dial(endpoint: &Endpoint, request: DialRequest) -> tokio::task::JoinHandle<Result<(), DialError>> {
    let endpoint = endpoint.clone();
    tokio::spawn(async move { endpoint.dial(request).await.map(|_| ()) })
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn of_a_hundred_forbidden_destinations_none_is_dialled() {
    let mut carrier = telephone("carrier").await;
    let (endpoint, _calls) = start(SipConfig { trunk: vec![trunk(&carrier, "")], ..loopback() }).await;
    carrier.target = endpoint.local_udp().expect("bound");
    let forbidden = forbidden(&carrier);
    assert_eq!(forbidden.len(), 100);
    for to in &forbidden {
        for name in [None, Some("carrier")] {
            let result = limited(endpoint.dial(request(to, name))).await;
            assert!(matches!(&result, Err(DialError::Denied(_))), "{to}: {:?}", result.err());
        }
    }
    // The first that rings is the first that is allowed.
    let dialling = dial(&endpoint, request("+49301", None));
    let invite = carrier.next("INVITE").await;
    assert!(invite.starts_with("INVITE sip:+49301@"), "{invite}");
    carrier.answer(&invite, "486 Busy Here", "").await;
    let result = limited(dialling).await.expect("runs");
    assert!(matches!(result, Err(DialError::Declined { status: 486, .. })), "{:?}", result.err());

    let closed = SipConfig { trunk: vec![trunk(&carrier, "")], outbound: Outbound::Deny, ..loopback() };
    let (closed, _calls) = start(closed).await;
    let result = limited(closed.dial(request("+49301", Some("carrier")))).await;
    assert!(matches!(&result, Err(DialError::Denied(why)) if why.contains("outbound")), "{:?}", result.err());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn transfers_obey_the_same_rules() {
    let carrier = telephone("carrier").await;
    let (endpoint, mut calls) = start(SipConfig { trunk: vec![trunk(&carrier, "")], ..loopback() }).await;
    let (mut raw, mut leg) = wire::call(&endpoint, &mut calls, "toll", 4_000).await;
    for (n, to) in forbidden(&carrier).iter().enumerate() {
        let error = transfer(&mut leg, to, n % 2 == 0).await.expect_err("not allowed");
        assert!(error.contains("not allowed"), "{to}: {error}");
    }
    // The first REFER that leaves is the first that is allowed.
    leg.transfer("+49301", false, None).expect("asked");
    let refer = raw.expect("REFER").await;
    assert!(header(&refer, "Refer-To").is_some_and(|to| to.starts_with("<sip:+49301@")), "{refer}");
    raw.answer(&refer, "202 Accepted", "").await;
    let answered = event(&mut leg, |e| matches!(e, LegEvent::TransferAnswered(_))).await;
    assert_eq!(answered, LegEvent::TransferAnswered(Ok(())));
}

/// The answer of account `a` to the challenge in `response`, as a header.
fn credentials(response: &str, uri: &str) -> String {
    let challenge = header(response, "WWW-Authenticate").expect("a challenge");
    let nonce = challenge.split("nonce=\"").nth(1).and_then(|rest| rest.split('"').next()).expect("a nonce");
    let hex = |text: String| Md5::digest(text).iter().map(|byte| format!("{byte:02x}")).collect::<String>();
    let secret = hex("a:antiphon:long enough".to_owned());
    let response = hex(format!("{secret}:{nonce}:{}", hex(format!("INVITE:{uri}"))));
    format!(
        "Authorization: Digest username=\"a\", realm=\"antiphon\", nonce=\"{nonce}\", uri=\"{uri}\", \
         response=\"{response}\", algorithm=MD5\r\n"
    )
}

/// Who may hand its call over (`refer = true`): a trunk by its address, or an account by its password.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_refer_of_who_may_send_us_elsewhere_obeys_the_same_rules() {
    for by_account in [false, true] {
        // The trunk is at the caller's address, or at another one.
        let carrier_at = if by_account { "127.0.0.8" } else { "127.0.0.1" };
        let mut carrier = Raw::at(carrier_at, ([127, 0, 0, 1], 9).into(), "carrier").await;
        let config = if by_account {
            let users = vec![toml::from_str("username = \"a\"\npassword = \"long enough\"").expect("valid")];
            SipConfig { users, refer: true, trunk: vec![trunk(&carrier, "")], ..loopback() }
        } else {
            SipConfig { trunk: vec![trunk(&carrier, "refer = true")], ..loopback() }
        };
        let (endpoint, mut calls) = start(config).await;
        carrier.target = endpoint.local_udp().expect("bound");
        let mut raw = Raw::new(carrier.target, "toll").await;
        let mut proof = String::new();
        if by_account {
            let challenged = raw.ask("INVITE", "", &sdp(4_000, ""), "SIP/2.0 401").await;
            raw.ack("").await;
            raw.remote_tag.clear();
            proof = credentials(&challenged, &raw.contact);
        }
        let (_, _leg) = called(&mut raw, &mut calls, &proof, &sdp(4_000, "")).await;
        let here = carrier.target;
        for (n, to) in forbidden(&carrier).iter().enumerate() {
            // As telephones name a number: at us, which is one of a trunk, or without a host.
            let to = match (to.starts_with('+'), n % 2 == 0) {
                (true, true) => format!("sip:{to}@{here}"),
                (true, false) => format!("tel:{to}"),
                (false, _) => to.clone(),
            };
            let status = raw.ask("REFER", &format!("Refer-To: <{to}>\r\n"), "", "SIP/2.0 ").await;
            assert!(status.starts_with("SIP/2.0 403"), "{to}: {status}");
        }
        // The first INVITE that leaves is the first that is allowed.
        raw.ask("REFER", &format!("Refer-To: <sip:+49301@{here}>\r\nRefer-Sub: false\r\n"), "", "SIP/2.0 202").await;
        let invite = carrier.next("INVITE").await;
        assert!(invite.starts_with("INVITE sip:+49301@"), "{invite}");
        carrier.answer(&invite, "486 Busy Here", "").await;
        carrier.expect("ACK").await;
        raw.ask("BYE", "", "", "SIP/2.0 200").await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_trunk_takes_so_many_calls_at_a_time_and_a_minute() {
    let mut carrier = telephone("carrier").await;
    let limited_trunk = trunk(&carrier, "max_calls = 1\ncalls_per_minute = 3");
    let (endpoint, _calls) = start(SipConfig { trunk: vec![limited_trunk], ..loopback() }).await;
    carrier.target = endpoint.local_udp().expect("bound");
    let denied = async |key: &str| {
        let result = limited(endpoint.dial(request("+49301", None))).await;
        assert!(matches!(&result, Err(DialError::Denied(why)) if why.contains(key)), "{key}: {:?}", result.err());
    };
    let kind = "Content-Type: application/sdp\r\n";
    let dialling = tokio::spawn({
        let endpoint = endpoint.clone();
        async move { endpoint.dial(request("+49301", None)).await }
    });
    let invite = carrier.next("INVITE").await;
    denied("max_calls = 1").await;
    carrier.answer_with(&invite, "200 OK", kind, &sdp(4_000, "")).await;
    let mut leg = limited(dialling).await.expect("runs").expect("answered");
    leg.attach().await.expect("attaches");
    denied("max_calls = 1").await;
    leg.hang_up().await;
    let bye = carrier.next("BYE").await;
    carrier.answer(&bye, "200 OK", "").await;
    crate::support::within("the call to be forgotten", || endpoint.calls() == 0).await;
    for _ in 0..2 {
        let dialling = dial(&endpoint, request("+49301", None));
        let invite = carrier.next("INVITE").await;
        carrier.answer(&invite, "486 Busy Here", "").await;
        limited(dialling).await.expect("runs").expect_err("busy");
    }
    denied("calls_per_minute = 3").await;
}
