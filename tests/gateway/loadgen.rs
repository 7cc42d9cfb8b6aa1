//! What the load generator does beside plain calls, against the gateway it was made for.

use std::path::Path;
use std::time::Duration;

use antiphon::secret::Secret;
use antiphon::sip::{TlsConfig, User};
use antiphon_loadgen::call::CallError;
use antiphon_loadgen::clock::sleep_until;
use antiphon_loadgen::codec::Codec;
use antiphon_loadgen::gateway;
use antiphon_loadgen::sip::{Caller, Config, Credentials, Transport};
use antiphon_loadgen::call::now;

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
