//! What `antiphon.js` does beside calling: without a microphone, with another one or speaker, muted, where the browser wants a
//! click first, when the gateway is killed; and whether captions come with the sound.

use std::path::{Path, PathBuf};
use std::time::Duration;

use antiphon::call::{CallEvent, CallHandle, MediaTap, TapDirection};
use antiphon::server::config::{Scope, Token};
use antiphon_loadgen::heard::Clip;
use antiphon_loadgen::{synthetic, wav};
use axum::Router;
use axum::response::Html;
use axum::routing::get;
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio::sync::broadcast::Receiver;
use tokio::time::timeout;

use super::super::chromium::Page;
use super::super::program::{Serve, until};
use super::super::support::{PATIENCE, Rig, SENTENCE};
use super::KEY;

/// What a failed wait shows.
const STATE: &str = "JSON.stringify([window.failed, window.call?.state, window.told])";
/// A sample of the microphone is as loud as this, of full scale 32,768, where somebody speaks, and nowhere else.
const LOUD: u16 = 300;

/// A site of somebody else's with an empty page; gives its origin.
async fn site() -> String {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
    let origin = format!("http://{}", listener.local_addr().expect("bound"));
    let site = Router::new().route("/", get(async || Html("<title>page</title><body><p id=elsewhere>page</p></body>")));
    tokio::spawn(async { axum::serve(listener, site).await });
    origin
}

/// The page of `site`, with a button that plays, and what the scripts of the tests need. A call is begun without a click, and
/// listened to from the first moment that a page can.
async fn open(page: &mut Page, site: &str, gateway: &str) {
    page.ask("Page.navigate", json!({ "url": site })).await;
    page.until(&format!("location.origin == {site:?} && document.readyState == 'complete'"), "location.href").await;
    page.value(
        &"document.body.append(Object.assign(document.createElement('button'), \
           { id: 'play', textContent: 'play', onclick: () => call.play().catch(e => (window.failed = String(e))) })); \
         import('GATEWAY/antiphon.js').then(client => { \
           window.begin = options => { \
             Object.assign(window, { call: null, failed: null, told: {}, loudest: -100 }); \
             client.connect(options).then(call => { \
               window.call = call; \
               for (const name of ['state', 'caption', 'blocked', 'renewed', 'ended']) \
                 call.addEventListener(name, e => (told[name] ??= []).push(e.detail)); \
               call.addEventListener('level', e => (window.loudest = Math.max(loudest, e.detail.output))); \
             }, e => (window.failed = { code: e.code, message: e.message })); \
           }; \
           window.reports = async type => [...(await call._peer.getStats()).values()].find(one => one.type == type); \
           window.energy = async () => (await reports('inbound-rtp'))?.totalAudioEnergy ?? 0; \
           window.refused = promise => promise.then(() => 'no error', e => [e.name, e.code]); \
           window.client = client; \
         }).then(() => 0)"
            .replace("GATEWAY", gateway),
    )
    .await;
}

/// Begins a call of the page; gives the gateway's id of it.
async fn begin(page: &mut Page, options: Value) -> String {
    page.value(&format!("begin({options}), 0")).await;
    page.until("window.call?.state == 'connected'", STATE).await;
    page.value("call.id").await.as_str().expect("an id").to_owned()
}

/// Words and a pause, again and again; and how long once is.
fn words(folder: &Path) -> (PathBuf, Duration) {
    let recorded = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/whisper/audio.wav");
    let Clip { rate, mut pcm } = wav::read(recorded).expect("recorded words");
    pcm.truncate(rate as usize * 3);
    pcm.extend(vec![0.0; rate as usize]);
    let microphone = folder.join("words.wav");
    wav::write(&microphone, &Clip { rate, pcm }).expect("written");
    (microphone, Duration::from_secs(4))
}

/// A person who listens: anything louder might interrupt.
fn quiet(folder: &Path) -> PathBuf {
    let microphone = folder.join("quiet.wav");
    let mut room = synthetic::noise(1, 48_000, 5.0);
    room.pcm.iter_mut().for_each(|sample| *sample *= 0.000_5);
    wav::write(&microphone, &room).expect("written");
    microphone
}

/// What the gateway hears of the page.
struct Ear {
    sound: MediaTap,
    events: Receiver<CallEvent>,
}

impl Ear {
    fn of(call: &CallHandle) -> Self {
        Self { sound: call.media_tap(), events: call.events() }
    }

    /// Where the next frame of the caller's stands in its stream, whether somebody speaks in it, and whether the detector has
    /// said since the last one that the caller began to.
    async fn next(&mut self) -> (Duration, bool, bool) {
        let frame = loop {
            let frame = self.sound.recv().await.expect("the call lives");
            if frame.direction == TapDirection::Inbound {
                break frame;
            }
        };
        let mut began = false;
        while let Ok(event) = self.events.try_recv() {
            began |= matches!(event, CallEvent::Vad { speaking: true });
        }
        (frame.position, frame.pcm.iter().any(|sample| sample.unsigned_abs() > LOUD), began)
    }

    /// Waits for words of the caller, and for the detector to notice them.
    async fn words(&mut self) {
        let (mut loud, mut noticed) = (false, false);
        let heard = async {
            while !(loud && noticed) {
                let (_, speaks, began) = self.next().await;
                loud |= speaks;
                noticed |= began;
            }
        };
        timeout(PATIENCE, heard).await.expect("the caller is heard");
    }

    /// Waits until for `length` of the caller's stream there was no word, and none was noticed.
    async fn silence(&mut self, length: Duration) {
        let mut since = None;
        let silent = async {
            loop {
                let (at, speaks, began) = self.next().await;
                let first = *since.get_or_insert(at);
                if speaks || began {
                    since = None;
                } else if at.saturating_sub(first) > length {
                    return;
                }
            }
        };
        timeout(PATIENCE, silent).await.expect("the caller is silent");
    }
}

/// Nothing is heard before a click, and something behind it, though the call stands all the while.
async fn plays_after_a_click(page: &mut Page) {
    page.until("told.blocked?.length > 0 && call.blocked", STATE).await;
    page.value(&format!("call.say({:?}), 0", SENTENCE.repeat(4))).await;
    page.until("call.stats().then(stats => stats.received > 50)", STATE).await;
    assert_eq!(page.value("energy()").await, json!(0), "nothing is played");
    page.click("play").await;
    page.until("!call.blocked && loudest > -40 && energy().then(energy => energy > 0.001)", "loudest").await;
    page.value("call.interrupt()").await;
}

/// A browser that gives the page no microphone tells it no addresses either, and one that had no click plays nothing.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_page_without_a_microphone_calls_by_names_of_mdns_and_plays_after_a_click() {
    if !antiphon_skip::has_program("chromium", "chromium") {
        return;
    }
    let site = site().await;
    let rig = Rig::with(|config| {
        config.http.tokens = vec![Token::new("shop", KEY, vec![Scope::Calls])];
        config.http.cors = vec![site.clone()];
    })
    .await;
    let folder = tempfile::tempdir().expect("a folder");
    let microphone = quiet(folder.path());
    // The latter of two switches counts.
    let mut page = Page::open_with(&microphone, &["--use-fake-ui-for-media-stream=deny"]).await;
    open(&mut page, &site, &rig.http).await;
    page.value(&format!("begin({}), 0", json!({ "agent": "silent", "token": KEY }))).await;
    page.until("window.failed?.code == 'microphone'", STATE).await;

    page.value(
        "window.sent = []; window.ask = fetch; \
         window.fetch = (url, options) => { sent.push(options?.body ?? ''); return ask(url, options); }; 0",
    )
    .await;
    begin(&mut page, json!({ "agent": "silent", "token": KEY, "microphone": false })).await;
    page.until("call._peer.iceGatheringState == 'complete' && !call._pending && !call._sending", STATE).await;
    let addresses = "[...new Set(sent.join('\\n').match(/^a=candidate:.*/gm).map(line => line.split(' ')[4]))]";
    let addresses = page.value(addresses).await;
    let addresses: Vec<&str> = addresses.as_array().expect("a list").iter().filter_map(Value::as_str).collect();
    assert!(!addresses.is_empty() && addresses.iter().all(|name| name.ends_with(".local")), "{addresses:?}");
    assert_eq!(page.value("loudest").await, json!(-100));
    plays_after_a_click(&mut page).await;
    page.value("call.hangUp()").await;

    // One that is given up before it stands is no call, here or there.
    let given_up = "(stop => { \
        window.fetch = (url, options) => { if (options?.method == 'POST') stop.abort(); return ask(url, options); }; \
        return client.connect({ agent: 'silent', token: KEY, microphone: false, signal: stop.signal }); \
        })(new AbortController())"
        .replace("KEY", &json!(KEY).to_string());
    assert_eq!(page.value(&format!("refused({given_up})")).await, json!(["CallError", "hungUp"]));
    let never = "window.fetch = ask; refused(client.connect({ signal: AbortSignal.abort() }))";
    assert_eq!(page.value(never).await, json!(["CallError", "hungUp"]));
    let calls = &rig.app.gateway().calls;
    let none = async {
        while !calls.list().is_empty() {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    timeout(PATIENCE, none).await.expect("the gateway is told");

    // As long as its token says, and no longer; another call would need another token.
    let body = json!({ "agent": "silent", "limits": { "durationSeconds": 1 } });
    let issued = rig.client.post(format!("{}/v1/tokens", rig.http)).bearer_auth(KEY).json(&body);
    let issued: Value = issued.send().await.expect("HTTP").json().await.expect("JSON");
    page.value(&format!("begin({}), 0", json!({ "token": issued["token"], "microphone": false }))).await;
    // On a machine that is slow enough it is over before it stands.
    page.until("(told.ended?.[0].reason ?? window.failed?.code) == 'remote'", STATE).await;
    let ended = async {
        loop {
            let asked = rig.client.get(format!("{}/v1/records?limit=1", rig.http)).bearer_auth(KEY).send();
            let page: Value = asked.await.expect("HTTP").json().await.expect("JSON");
            if page["records"][0]["cause"] == json!("too_long") {
                return;
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    };
    timeout(PATIENCE, ended).await.expect("its record says why");
    assert_eq!(page.value("[told.renewed, call?.state ?? 'ended']").await, json!([null, "ended"]));
    rig.app.drain().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_page_changes_its_microphone_and_speaker_and_is_silent_while_it_is_muted() {
    if !antiphon_skip::has_program("chromium", "chromium") {
        return;
    }
    let site = site().await;
    let rig = Rig::with(|config| config.http.cors = vec![site.clone()]).await;
    let folder = tempfile::tempdir().expect("a folder");
    let (microphone, once) = words(folder.path());
    let switches = ["--use-fake-device-for-media-stream=device-count=2", "--autoplay-policy=user-gesture-required"];
    let mut page = Page::open_with(&microphone, &switches).await;
    open(&mut page, &site, &rig.http).await;
    // One that only listens at first.
    let id = begin(&mut page, json!({ "agent": "silent", "microphone": false })).await;
    plays_after_a_click(&mut page).await;
    assert_eq!(page.value("refused(call.digits('1'))").await, json!(["CallError", "no_microphone"]));
    assert_eq!(page.value("call.levels().input").await, json!(-100));

    let devices = page.value("client.devices()").await;
    let ids = |kind: &str| -> Vec<String> {
        let all = devices[kind].as_array().expect("a list").iter();
        let named = all.filter(|one| one["label"].as_str().is_some_and(|label| !label.is_empty()));
        named.filter_map(|one| one["id"].as_str()).filter(|id| *id != "default").map(str::to_owned).collect()
    };
    let (microphones, speakers) = (ids("microphones"), ids("speakers"));
    assert!(microphones.len() >= 2 && speakers.len() >= 2, "{devices}");

    let call = rig.handle_of(&id).await;
    let mut ear = Ear::of(&call);
    let used = "[call._sender.track.getSettings().deviceId, call._sender.track.readyState]";
    page.value(&format!("call.setMicrophone({:?})", microphones[0])).await;
    assert_eq!(page.value(used).await, json!([microphones[0], "live"]));
    ear.words().await;
    page.until("call.levels().input > -50", "call.levels().input").await;

    page.value("call.mute()").await;
    ear.silence(once).await;
    assert_eq!(
        page.value("[call.muted, told.state.at(-1).muted, call.levels().input]").await,
        json!([true, true, -100])
    );
    // Another microphone is as silent, from its first sample on.
    page.value(
        "const { replaceTrack } = RTCRtpSender.prototype; \
         RTCRtpSender.prototype.replaceTrack = function (track) { \
           window.taken = track?.enabled; return replaceTrack.call(this, track); }; 0",
    )
    .await;
    page.value(&format!("window.first = call._sender.track; call.setMicrophone({:?})", microphones[1])).await;
    assert_eq!(page.value("taken").await, json!(false));
    assert_eq!(page.value(used).await, json!([microphones[1], "live"]));
    assert_eq!(page.value("[first.readyState, call.muted]").await, json!(["ended", true]));
    ear.silence(once).await;
    page.value("call.mute(false)").await;
    ear.words().await;

    page.value("call.setMicrophone(false)").await;
    assert_eq!(page.value("[call._sender.track, call.levels().input]").await, json!([null, -100]));
    assert_eq!(page.value("refused(call.digits('1'))").await, json!(["CallError", "no_microphone"]));
    assert_eq!(page.value("refused(call.setMicrophone('none such'))").await, json!(["CallError", "microphone"]));
    // One that the page opened stays the page's.
    page.value(
        "navigator.mediaDevices.getUserMedia({ audio: true }).then(own => call.setMicrophone(window.own = own))",
    )
    .await;
    // What came before is heard by now.
    let mut ear = Ear::of(&call);
    ear.words().await;

    for speaker in &speakers {
        page.value(&format!("call.setSpeaker({speaker:?})")).await;
        assert_eq!(page.value("call._audio.sinkId").await, json!(speaker));
    }
    assert_eq!(page.value("refused(call.setSpeaker('none such'))").await, json!(["CallError", "speaker"]));

    page.value("call.hangUp()").await;
    timeout(PATIENCE, call.ended()).await.expect("the gateway is told");
    page.until("told.ended?.[0].reason == 'hungUp' && told.ended.length == 1", STATE).await;
    assert_eq!(page.value("own.getAudioTracks()[0].readyState").await, json!("live"));
    assert_eq!(page.value("refused(call.setMicrophone(true))").await, json!(["CallError", "ended"]));
    rig.app.drain().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_call_is_begun_anew_when_its_gateway_is_killed_and_back_before_the_browser_has_noticed() {
    if !antiphon_skip::has_program("chromium", "chromium") {
        return;
    }
    let (folder, state) = (tempfile::tempdir().expect("a folder"), tempfile::tempdir().expect("a folder"));
    let site = site().await;
    let mut program = Serve::start(folder.path(), state.path(), |command| {
        command.env("ANTIPHON_HTTP__CORS", format!("[{site:?}]"));
    });
    program.ready().await;
    let http = program.http.clone();
    let microphone = quiet(folder.path());
    let mut page = Page::open(&microphone).await;
    open(&mut page, &site, &http).await;
    // Nothing is said: the browser sees only that its path is gone, after seconds.
    let before = begin(&mut page, json!({ "agent": "silent" })).await;
    let written = |record: &Value| record["state"] == "open" && !record["answeredMs"].is_null();
    until(&format!("{http}/v1/records/{before}"), written).await;
    // A page that has the microphone may play, but its meters stand still until there is a click, anywhere.
    assert_eq!(page.value("[call.blocked, call._context.state]").await, json!([false, "suspended"]));
    page.click("elsewhere").await;
    page.until("call._context.state == 'running'", STATE).await;
    let devices = page.value("client.devices()").await;
    let speaker = devices["speakers"].as_array().and_then(|all| all.last()).expect("a speaker")["id"].clone();
    page.value(&format!("call.setSpeaker({speaker})")).await;

    assert_eq!(program.end_by("KILL").await, None, "no exit code: it was killed");
    let mut program = Serve::start(folder.path(), state.path(), |command| {
        command.env("ANTIPHON_HTTP__CORS", format!("[{site:?}]"));
        command.env("ANTIPHON_HTTP__BIND", http.trim_start_matches("http://"));
    });
    program.http.clone_from(&http);
    program.ready().await;
    page.until("told.renewed?.length == 1 || call.state == 'ended'", STATE).await;
    let (told, id) = (page.value("told.renewed?.[0]").await, page.value("call.id").await);
    assert_eq!(told, json!({ "id": id, "before": before }), "{}", page.value(STATE).await);
    assert_ne!(id, json!(before));
    assert_eq!(page.value("told.state.map(one => one.state)").await, json!(["reconnecting", "connected"]));
    // Where the page wanted it to be heard, and by what is its microphone.
    assert_eq!(page.value("call._audio.sinkId").await, speaker);
    page.value(&format!("window.loudest = -100; call.say({SENTENCE:?}), 0")).await;
    page.until("loudest > -40 && energy().then(energy => energy > 0.001)", STATE).await;
    page.until(&format!("told.caption?.at(-1).heard == {SENTENCE:?}"), STATE).await;
    assert_eq!(page.value("call._sender.track.readyState").await, json!("live"));
    page.value("call.hangUp()").await;
    assert_eq!(program.terminate().await, Some(0));
}

/// When a sentence begins in what the page plays and when its first word is a caption, by the page's clock, and the longest
/// that the page was held up meanwhile, by which either may be late.
const MEASURE: &str = "async text => { \
    let [onset, shown, last, held] = [null, null, performance.now(), 0]; \
    const seen = e => { if (e.detail.who == 'agent' && e.detail.heard && !e.detail.final) shown ??= performance.now(); }; \
    call.addEventListener('caption', seen); \
    const ended = new Promise(done => call.addEventListener('caption', \
      e => e.detail.who == 'agent' && e.detail.final && done())); \
    const watch = setInterval(() => { \
      const now = performance.now(); held = Math.max(held, now - last); last = now; \
      if (onset == null && call.levels().output > -45) onset = now; \
      if (onset != null && shown != null) clearInterval(watch); \
    }, 5); \
    await call.say(text); await ended; \
    clearInterval(watch); call.removeEventListener('caption', seen); \
    return { onset, shown, held }; }";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn captions_come_with_the_sound() {
    if !antiphon_skip::has_program("chromium", "chromium") {
        return;
    }
    let site = site().await;
    let rig = Rig::with(|config| config.http.cors = vec![site.clone()]).await;
    let folder = tempfile::tempdir().expect("a folder");
    let microphone = quiet(folder.path());
    let mut page = Page::open_with(&microphone, &["--autoplay-policy=no-user-gesture-required"]).await;
    open(&mut page, &site, &rig.http).await;
    begin(&mut page, json!({ "agent": "silent", "microphone": false })).await;
    page.value(&format!("window.measure = {MEASURE}, 0")).await;
    // Each begins with a word that is said at once.
    let mut off = Vec::new();
    for text in ["I am here to help you.", "We have a table for two.", "It is a sunny day in town."] {
        page.until("call.levels().output < -60", "call.levels().output").await;
        let measured = page.value(&format!("measure({text:?})")).await;
        let at = |name: &str| measured[name].as_f64().unwrap_or_else(|| panic!("{name}: {measured}"));
        println!(
            "{text}: caption {:.0} ms after the onset, page held up for {:.0} ms",
            at("shown") - at("onset"),
            at("held")
        );
        off.push((at("shown") - at("onset"), at("held")));
    }
    // What holds up the gateway, or the browser beside its page, is not seen here: one of the three may be late by that.
    let close = off.iter().filter(|(off, held)| off.abs() < 300.0 + held).count();
    assert!(close >= 2 && off.iter().all(|(off, _)| off.abs() < 1_000.0), "{off:?}");
    page.value("call.hangUp()").await;
    rig.app.drain().await;
}
