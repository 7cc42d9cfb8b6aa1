//! A gateway of its own for each test, and what a caller of it says and hears.

use std::net::{Ipv4Addr, SocketAddr};
use std::path::Path;
use std::time::{Duration, Instant};

use antiphon::app::App;
use antiphon::app::engines::{self, Choice};
use antiphon::call::CallHandle;
use antiphon::config::{Config, EngineKind};
use antiphon::gateway::speaker::{Manner, Speaker};
use antiphon::synth::device::Engine;
use antiphon_loadgen::call::{Call, CallError, now};
use antiphon_loadgen::codec::Codec;
use antiphon_loadgen::heard::{Clip, Heard};
use antiphon_loadgen::listen::{self, Stall, StallCause};
use antiphon_loadgen::{correlate, rtc, sip};
use serde_json::{Value, json};

/// Longest wait for anything: tests run beside others on few cores.
pub(crate) const PATIENCE: Duration = Duration::from_secs(30);
/// By when a caller hears something: on an idle machine it takes some 50 ms, and nobody waits longer than this.
pub(crate) const FIRST_AUDIO: Duration = Duration::from_secs(5);
/// Longer than any pause inside a turn.
pub(crate) const TURN_PAUSE: Duration = Duration::from_millis(1_500);
/// A sentence with enough sound to compare.
pub(crate) const SENTENCE: &str = "The quick brown fox jumps over the lazy dog, and then it rests.";

/// A running gateway on free ports.
pub(crate) struct Rig {
    pub(crate) app: App,
    pub(crate) http: String,
    pub(crate) client: reqwest::Client,
    /// Of the jobs that a test may make.
    _folder: tempfile::TempDir,
}

impl Rig {
    pub(crate) async fn start() -> Rig {
        Rig::with(|_| {}).await
    }

    pub(crate) async fn with(change: impl FnOnce(&mut Config)) -> Rig {
        let (config, folder) = configured(change);
        let choice = engines::choose(&config.engine).expect("some voice works");
        let rig = Rig::begin(config, folder, choice).await;
        assert!(rig.app.gateway().is_ready(), "some voice works");
        rig
    }

    /// With voices of the test's own, which may be broken.
    pub(crate) async fn with_voices(change: impl FnOnce(&mut Config), voices: Choice) -> Rig {
        let (config, folder) = configured(change);
        Rig::begin(config, folder, voices).await
    }

    async fn begin(config: Config, folder: tempfile::TempDir, voices: Choice) -> Rig {
        super::watch::Watch::start();
        // A second call says that there is one already.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let app = App::start_with(config, voices).await.expect("the gateway starts");
        app.ready().await;
        let http = format!("http://{}", app.http());
        Rig { app, http, client: reqwest::Client::new(), _folder: folder }
    }

    pub(crate) fn sip_udp(&self) -> SocketAddr {
        self.app.gateway().sip.as_ref().and_then(|sip| sip.local_udp()).expect("SIP listens")
    }

    pub(crate) async fn telephone(&self, agent: &str, codec: Codec) -> Call {
        self.dial(agent, codec).await.expect("the telephone call is answered")
    }

    /// As [`Rig::telephone`], by a caller who comes again while there is no room.
    pub(crate) async fn telephone_at_last(&self, agent: &str, codec: Codec) -> Call {
        let until = now() + PATIENCE;
        loop {
            match self.dial(agent, codec).await {
                Err(CallError::Refused { code: 503, .. }) if now() < until => {}
                answer => return answer.expect("the telephone call is answered"),
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    }

    async fn dial(&self, agent: &str, codec: Codec) -> Result<Call, CallError> {
        let config = sip::Config { codecs: vec![codec], ..sip::Config::default() };
        let caller = sip::Caller::bind(config).await.expect("free ports");
        caller.call(&format!("sip:{agent}@{}", self.sip_udp())).await
    }

    pub(crate) async fn browser(&self, agent: &str) -> Call {
        let config = rtc::Config { agent: Some(agent.to_owned()), ..rtc::Config::new(self.http.clone()) };
        rtc::Caller::connect(config).await.expect("the browser call is answered")
    }

    pub(crate) async fn post(&self, path: &str, body: Value) -> (u16, Value) {
        let response = self.client.post(format!("{}{path}", self.http)).json(&body).send().await.expect("HTTP");
        let status = response.status().as_u16();
        (status, response.json().await.unwrap_or(Value::Null))
    }

    pub(crate) async fn get(&self, path: &str) -> (u16, Value) {
        let response = self.client.get(format!("{}{path}", self.http)).send().await.expect("HTTP");
        let status = response.status().as_u16();
        (status, response.json().await.unwrap_or(Value::Null))
    }

    /// Waits until the recording of the latest call is written to its end, which is a moment after the call.
    pub(crate) async fn recorded(&self) {
        let (_, records) = self.get("/v1/records").await;
        let record = format!("/v1/records/{}", records["records"][0]["id"].as_str().expect("the call"));
        let written = async {
            while self.get(&record).await.1["recording"]["durationMs"].is_null() {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        };
        tokio::time::timeout(PATIENCE, written).await.expect("the recording is complete");
    }

    /// The gateway's end of `call`, which the caller may know a moment before it is there.
    pub(crate) async fn handle(&self, call: &Call) -> CallHandle {
        self.handle_of(call.id().expect("the answer names the call")).await
    }

    /// As [`Rig::handle`], by the call's id.
    pub(crate) async fn handle_of(&self, id: &str) -> CallHandle {
        self.app.gateway().calls.find(&id.into()).await.expect("live")
    }

    /// Speaks a turn; the instant is the one before the request left.
    pub(crate) async fn speak(&self, call: &Call, text: &str) -> Instant {
        let asked = now();
        let id = call.id().expect("the answer names the call");
        let (status, body) = self.post(&format!("/v1/calls/{id}/turns"), json!({ "text": text })).await;
        assert_eq!(status, 202, "{body}");
        asked
    }

    /// That `call` heard `text` between `from` and `to`, as what is made of it without a call sounds. `limit` is the
    /// least correlation: telephone codecs carry half the band.
    pub(crate) async fn assert_heard(&self, call: &Call, text: &str, (from, to): (Instant, Instant), limit: f32) {
        let recording = call.ear().heard().clip_between(from, to + Duration::from_millis(200));
        let found = correlate::correlate(&recording, &self.reference(text).await).expect("comparable rates");
        assert!(found.value > limit, "{:?} {:?}, \"{text}\": {found:?}", call.leg(), call.codec());
    }

    /// `text` synthesised directly.
    pub(crate) async fn reference(&self, text: &str) -> Clip {
        Self::spoken_by(&self.app.gateway().engine, text).await
    }

    /// `text` synthesised by `engine`.
    pub(crate) async fn spoken_by(engine: &Engine, text: &str) -> Clip {
        let manner = Manner {
            voice: None,
            language: None,
            normalise: Default::default(),
            instructions: None,
            seed: 0,
            speed: 1.0,
            markup: antiphon::turn::Markup::None,
            volume: 1.0,
            lexicon: Default::default(),
            tenant: "".into(),
        };
        let mut speaker = Speaker::new(engine.clone(), manner);
        speaker.add([text.to_owned()]);
        let mut pcm = Vec::new();
        while let Some(piece) = speaker.next().await.expect("speech") {
            pcm.extend(piece);
        }
        Clip { rate: antiphon::audio::RATE, pcm }
    }
}

/// The CPU speaks with the model in `model`, as late as it likes.
pub(crate) fn speak_with(config: &mut Config, model: &Path) {
    config.engine.kind = EngineKind::Cosyvoice3;
    config.engine.model = Some(model.to_owned());
    config.engine.device = "cpu".into();
    config.scheduler.first_audio_target_ms = 60_000;
    config.scheduler.load_limit = 1.0;
}

/// The defaults on free ports with what `change` changes, and the folder of its jobs.
fn configured(change: impl FnOnce(&mut Config)) -> (Config, tempfile::TempDir) {
    let mut config = Config::default();
    let any = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
    config.http.bind = any;
    config.sip.udp = Some(any);
    config.sip.tcp = Some(any);
    config.call.drain_notice_s = 0;
    config.call.drain_grace_s = 2;
    config.call.drain_bridged_s = 2;
    let folder = tempfile::tempdir().expect("a folder");
    config.state.dir = folder.path().to_owned();
    change(&mut config);
    (config.with_state_dir([]).expect("a folder"), folder)
}

/// Waits for the whole turn that was asked for at `asked`, which begins soon; gives its first and last audible instants.
pub(crate) async fn hear_turn(call: &Call, asked: Instant) -> (Instant, Instant) {
    let (onset, end) = hear_turn_at_last(call, asked).await;
    let waited = onset.saturating_duration_since(asked);
    assert!(waited < FIRST_AUDIO, "{:?} {:?}: silent for {waited:?}", call.leg(), call.codec());
    (onset, end)
}

/// As [`hear_turn`], of a voice that takes its time or a turn that was asked for before others.
pub(crate) async fn hear_turn_at_last(call: &Call, asked: Instant) -> (Instant, Instant) {
    let onset = call.onset(asked, PATIENCE).await.expect("speech is heard");
    let end = call.silence(onset, TURN_PAUSE, PATIENCE).await.expect("the turn ends");
    (onset, end)
}

/// What the sender left out between `from` and `to`, by RTP sequence numbers and timestamps: how late packets arrive
/// on a busy machine does not count.
pub(crate) fn gaps(heard: &Heard, from: Instant, to: Instant) -> Vec<Stall> {
    // No packet is late for who plays an hour behind.
    let all = listen::stalls(heard, from, to, Duration::from_secs(3_600));
    all.into_iter().filter(|stall| stall.cause != StallCause::Late).collect()
}

/// As [`gaps`] where processes come and go beside the call: what that could cost is packets, or seconds, and a busy machine may
/// speak late.
pub(crate) fn losses(heard: &Heard, from: Instant, to: Instant) -> Vec<Stall> {
    const PAUSE: Duration = Duration::from_secs(1);
    let mut stalls = gaps(heard, from, to);
    stalls.retain(|stall| stall.cause != StallCause::Paused || stall.length > PAUSE);
    stalls
}
