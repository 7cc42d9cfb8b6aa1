//! A drain, as those see it who send calls: they know before the first call is refused, and what goes on ends by its kind.

use std::time::Duration;

use antiphon::call::EndReason;
use antiphon::config::Config;
use antiphon_loadgen::call::End;
use antiphon_loadgen::codec::Codec;
use serde_json::{Value, json};
use tokio::time::timeout;

use super::bridges::joined;
use super::nodes::{Redis, until};
use super::raw::{Raw, header};
use super::support::{PATIENCE, Rig};

/// A trunk of this registrar.
fn registering(registrar: &Raw) -> impl Fn(&mut Config) + use<> {
    let host = registrar.uri().replace("sip:raw@", "");
    let trunk = format!("name = 'carrier'\nhost = '{host}'\nregister = true\nusername = 'us'\npassword = 'secret'");
    move |config| config.sip.trunk = vec![toml::from_str(&trunk).expect("a trunk")]
}

/// Whether it says that the gateway is gone (RFC 3261 section 10.2.2).
pub(crate) fn withdraws(register: &str) -> bool {
    let contact = header(register, "Contact").unwrap_or_default();
    header(register, "Expires") == Some("0") || contact.ends_with("expires=0")
}

/// The next registration (`true`) or withdrawal at `registrar`, which takes it; the address of the gateway.
pub(crate) async fn told(registrar: &mut Raw, registers: bool) -> String {
    loop {
        // Two gateways number their requests alike: each is answered, also one that is repeated.
        let request = registrar.expect("REGISTER").await;
        let contact = header(&request, "Contact").expect("a contact").to_owned();
        let address = contact.split(['@', '>', ';']).nth(1).expect("an address").to_owned();
        registrar.target = address.parse().expect("an address");
        let expires = if withdraws(&request) { 0 } else { 600 };
        registrar.answer(&request, "200 OK", &format!("Contact: {contact}\r\nExpires: {expires}\r\n")).await;
        if withdraws(&request) != registers {
            return address;
        }
    }
}

/// `POST /v1/admin/drain`, whose answer comes at the end.
fn drain(rig: &Rig) -> tokio::task::JoinHandle<Value> {
    let request = rig.client.post(format!("{}/v1/admin/drain", rig.http));
    tokio::spawn(async move { request.send().await.expect("HTTP").json().await.expect("JSON") })
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn balancers_and_registrars_know_of_a_drain_before_a_call_is_refused() {
    let mut registrar = Raw::new("127.0.0.1:9".parse().expect("an address"), "registrar").await;
    let trunk = registering(&registrar);
    let rig = Rig::with(|config| {
        trunk(config);
        // Nothing waits for its end.
        config.call.drain_notice_s = 3_600;
    })
    .await;
    told(&mut registrar, true).await;
    until(&rig, |said| said["ready"] == true && said["trunks"][0]["registered"] == true).await;
    let live = rig.telephone("silent", Codec::Pcmu).await;

    // Who asked for it has gone before it begins.
    let impatient = rig.client.post(format!("{}/v1/admin/drain", rig.http)).timeout(Duration::from_millis(300)).send();
    assert!(impatient.await.is_err(), "there is no answer before the end");
    let draining = drain(&rig);
    told(&mut registrar, false).await;
    until(&rig, |said| said["ready"] == false && said["draining"] == true).await;
    let mut asked = Raw::new(rig.sip_udp(), "prober").await;
    let refused = asked.ask("OPTIONS", "", "", "SIP/2.0").await;
    assert!(refused.starts_with("SIP/2.0 503") && header(&refused, "Retry-After").is_some(), "{refused}");
    // Who has not heard of it yet is served.
    rig.telephone("silent", Codec::Pcmu).await.hang_up().await;
    rig.browser("silent").await.hang_up().await;
    let (status, answer) = rig.get("/v1/jobs").await;
    assert_eq!(status, 503, "batch work is parked: {answer}");

    let back = rig.client.delete(format!("{}/v1/admin/drain", rig.http)).send().await.expect("HTTP");
    assert_eq!(back.status(), 200);
    let answer = timeout(PATIENCE, draining).await.expect("it is over").expect("no panic");
    assert_eq!((&answer["cutOff"], &answer["draining"]), (&json!(0), &json!(false)));
    told(&mut registrar, true).await;
    until(&rig, |said| said["ready"] == true && said["trunks"][0]["registered"] == true).await;
    let answered = Raw::new(rig.sip_udp(), "prober-again").await.ask("OPTIONS", "", "", "SIP/2.0").await;
    assert!(answered.starts_with("SIP/2.0 200"), "{answered}");
    assert_eq!(rig.get("/v1/jobs").await.0, 200, "and goes on");

    // At the end the registrar is told while the call goes on: nobody is sent here who would find nobody.
    let ending = tokio::spawn(rig.app.drain_at_once());
    let gone = loop {
        let request = registrar.expect("REGISTER").await;
        if withdraws(&request) {
            break request;
        }
    };
    assert_eq!(live.ended(Duration::ZERO).await, None, "no BYE before it");
    registrar.answer(&gone, "200 OK", "Expires: 0\r\n").await;
    assert_eq!(live.ended(PATIENCE).await, Some(End::Remote));
    timeout(PATIENCE, ending).await.expect("it ends").expect("no panic");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_drain_ends_turns_by_their_limit_and_lets_people_go_on() {
    let rig = Rig::with(|config| {
        config.call.drain_grace_s = 1;
        config.call.drain_bridged_s = 3_600;
    })
    .await;
    let endless = rig.telephone("silent", Codec::Pcmu).await;
    rig.speak(&endless, &"This is one sentence of a long turn. ".repeat(400)).await;
    let caller = rig.telephone("silent", Codec::Pcmu).await;
    let call = rig.handle(&caller).await;
    let (human, _) = joined(&rig, &call, "leave").await;

    let draining = drain(&rig);
    assert_eq!(endless.ended(PATIENCE).await, Some(End::Remote), "cut off at the end of the grace for turns");
    assert!(!call.has_ended(), "two people speak with each other");
    // The human hangs up: then the caller's call is like any other, and has nothing left to say.
    assert_eq!(human.hang_up().await, End::Local);
    assert_eq!(caller.ended(PATIENCE).await, Some(End::Remote));
    assert_eq!(call.ended().await, EndReason::Drained);
    let answer = timeout(PATIENCE, draining).await.expect("it is over").expect("no panic");
    assert_eq!((&answer["cutOff"], &answer["draining"]), (&json!(1), &json!(true)), "{answer}");
    rig.app.drain().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_that_drains_leaves_its_trunks_to_another() {
    let Some(redis) = Redis::start() else { return };
    let mut registrar = Raw::new("127.0.0.1:9".parse().expect("an address"), "registrar").await;
    let trunk = registering(&registrar);
    let (a, b) = (redis.gateway("a", &trunk).await, redis.gateway("b", &trunk).await);
    let first = told(&mut registrar, true).await;
    let (holder, other) = if a.sip_udp().to_string() == first { (a, b) } else { (b, a) };
    let state = |state: Value| move |said: &Value| said["trunks"][0]["registered"] == state;
    until(&holder, state(json!(true))).await;

    let draining = drain(&holder);
    assert_eq!(told(&mut registrar, false).await, first);
    draining.await.expect("no panic");
    assert_eq!(told(&mut registrar, true).await, other.sip_udp().to_string());
    until(&other, state(json!(true))).await;
    until(&holder, state(Value::Null)).await;
    let ended = async {
        tokio::join!(holder.app.drain_at_once(), other.app.drain_at_once());
    };
    let goodbye = async {
        loop {
            told(&mut registrar, false).await;
        }
    };
    tokio::select! {
        () = ended => {}
        () = goodbye => {}
    }
}
