//! What the load generator does beside plain calls, against the gateway it was made for.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use antiphon::secret::Secret;
use antiphon::sip::{TlsConfig, User};
use antiphon_loadgen::call::{CallError, Leg, now};
use antiphon_loadgen::clock::sleep_until;
use antiphon_loadgen::codec::Codec;
use antiphon_loadgen::corpus::{self, Length};
use antiphon_loadgen::exchange::{Plan, Trigger};
use antiphon_loadgen::ladder::{self, Options};
use antiphon_loadgen::load::Behaviour;
use antiphon_loadgen::report::{Limits, Report};
use antiphon_loadgen::{gateway, html, sip, size};
use antiphon_loadgen::sip::{Caller, Config, Credentials, Transport};

use super::support::{PATIENCE, Rig, SENTENCE, hear_turn};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn batch_work_is_accepted_followed_and_done() {
    let rig = Rig::start().await;
    let gateway = gateway::Gateway::at(&rig.http, None).expect("an address");
    let id = gateway.batch(&["One.".to_owned(), "Two and three.".to_owned()]).await.expect("accepted");
    let deadline = now() + PATIENCE;
    let done = loop {
        let (done, over) = gateway.job(&id).await.expect("followed");
        if over {
            break done;
        }
        assert!(now() < deadline, "the job ends");
        sleep_until(now() + Duration::from_millis(50)).await;
    };
    assert_eq!(done, 2);
    // A job that is over is removed by the same request that cancels one.
    let id = gateway.batch(&[SENTENCE.repeat(20)]).await.expect("accepted");
    gateway.cancel_job(&id).await.expect("cancelled");
    rig.app.drain().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_telephone_calls_over_tls_with_protected_media() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/sip");
    let rig = Rig::with(|config| {
        config.sip.tls = Some(TlsConfig {
            bind: ([127, 0, 0, 1], 0).into(),
            cert: folder.join("test-only-cert.pem"),
            key: folder.join("test-only-key.pem"),
        });
    })
    .await;
    let target = rig.app.gateway().sip.as_ref().and_then(|sip| sip.local_tls()).expect("TLS listens");
    let config = Config { transport: Transport::Tls, srtp: true, codecs: vec![Codec::Pcmu], ..Config::default() };
    let caller = Caller::bind(config).await.expect("free ports");
    let call = caller.call(&format!("sip:silent@{target}")).await.expect("answered");
    let asked = rig.speak(&call, "This is said in private.").await;
    hear_turn(&call, asked).await;
    call.hang_up().await;
    rig.app.drain().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_telephone_says_who_it_is() {
    let rig = Rig::with(|config| {
        config.sip.users = vec![User { username: "alice".into(), password: Secret::new("open sesame") }];
    })
    .await;
    let target = format!("sip:demo@{}", rig.sip_udp());
    let call = async |password: Option<&str>| {
        let credentials =
            password.map(|p| Credentials { username: "alice".to_owned(), password: p.to_owned() });
        Caller::bind(Config { credentials, ..Config::default() }).await.expect("free ports").call(&target).await
    };
    let known = call(Some("open sesame")).await.expect("answered");
    assert!(known.onset(known.setup().asked, PATIENCE).await.is_some(), "the greeting is heard");
    known.hang_up().await;
    for stranger in [None, Some("open barley")] {
        let refused = call(stranger).await;
        assert!(matches!(refused, Err(CallError::Refused { code: 401 | 403 | 407, .. })), "{:?}", refused.err());
    }
    rig.app.drain().await;
}

/// A gateway that admits ten speaking lines, whatever the machine could do: its knee is there, and is foreseen from half
/// the load.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_knee_is_where_it_was_predicted() {
    let rig = Rig::with(|config| {
        config.scheduler.max_live = 10;
        // Lines are busy nearly as long as their speech is heard.
        config.scheduler.max_lead_ms = 400;
    })
    .await;
    let gateway = gateway::Gateway::at(&rig.http, None).expect("an address");
    let ready = gateway.ready().await.expect("ready");
    let plan = Plan {
        sip_target: Some(format!("sip:silent@{}", rig.sip_udp())),
        sip: sip::Config { codecs: vec![Codec::Pcmu], ..sip::Config::default() },
        webrtc: None,
        gateway: Some(gateway),
        trigger: Trigger::Http,
        references: Arc::default(),
        buffer: Duration::from_millis(60),
        patience: Duration::from_secs(5),
    };
    // Only refusals count: this is about the places, not about how punctual a busy machine is.
    let limits = Limits { first_audio_p95: 60.0, rtf_p95: 60.0, stalled_turns: 1.0, failures: 0.0 };
    let options = Options {
        levels: vec![5, 10],
        most: 16,
        duration: Duration::from_secs(6),
        open_loop: false,
        rate: None,
        turns: 1..=1,
        legs: vec![(Leg::Sip, 1.0)],
        texts: corpus::select(&["en".to_owned()], &[Length::Medium]),
        think: (0.0, 0.0),
        behaviour: Behaviour::default(),
        limits,
        seed: 1,
        sampled: 1,
        find_knee: true,
    };
    let mut report = Report { devices: ready["devices"].clone(), limits, ..Report::default() };
    report.host.cores = 64;
    ladder::climb(Arc::new(plan), &options, &mut None, None, &mut report, |_, _, _| {}).await;
    assert_eq!(report.ended_early, None);
    let knee = report.knee.expect("levels were measured");
    let predicted = size::predict(&report).expect("a prediction");
    assert_eq!((predicted.bound, predicted.from), ("places", 5), "{predicted:?}");
    let off = predicted.deviation(&knee).expect("a knee");
    assert!(off.abs() <= 0.1 + 1e-9, "{predicted:?} {knee:?}");
    let page = html::page(&report);
    assert!(page.contains("<h2>Prediction</h2>") && page.contains("<td>places<td>"), "the page compares them");
    rig.app.drain().await;
}
