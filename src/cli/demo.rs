//! `antiphon demo`: the whole product in one command, over real sockets on loopback.
//!
//! It starts a gateway, places a SIP call and a WebRTC call to it, has each speak a turn, interrupts a second
//! one by a key or a request and a third one by a recorded voice that speaks over it, writes what each caller
//! heard and judges it by ear: the recording is compared with the same text synthesised directly.

use std::future::Future;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use antiphon_loadgen::call::Call;
use antiphon_loadgen::codec::Codec;
use antiphon_loadgen::heard::Clip;
use antiphon_loadgen::{correlate, listen, rtc, sip, synthetic, wav};
use serde_json::json;
use tokio::sync::broadcast::error::RecvError;

use super::Failure;
use crate::app::App;
use crate::audio;
use crate::call::segment::{SegmentConfig, Segmenter};
use crate::call::{CallEvent, CallId, Cause};
use crate::clock;
use crate::config::{Config, EngineKind};
use crate::gateway::speaker::{Manner, Speaker};
use crate::telemetry;

/// What is interrupted: long enough that it still sounds when the caller cuts in.
const SECOND_TURN: &str = "This second turn goes on for quite a while, because somebody is about to interrupt it, \
    and it would be a pity if it had already come to its end before that happens, so it keeps talking and talking.";
/// How long the second turn sounds before it is interrupted.
const BEFORE_BARGE_IN: Duration = Duration::from_millis(1_200);
/// What the caller says over the third turn: made, not recorded, so that the program carries no recording. This one
/// sounds from its first moment.
const CALLERS_VOICE: u32 = 3;
/// A pause of this length is the end of a turn: longer than any between sentences.
const TURN_PAUSE: Duration = Duration::from_millis(1_500);
/// Longest wait for anything that should happen at once.
const PATIENCE: Duration = Duration::from_secs(10);
/// Longest turn.
const LONGEST: Duration = Duration::from_secs(120);
/// First audio later than this is no conversation; on an idle machine it takes some 50 ms.
const LATEST_FIRST_AUDIO: Duration = Duration::from_secs(2);
/// From a key or a request until the caller hears silence: at most the promised 60 ms, and what a jitter buffer and
/// the pauses in which silence is found add on a busy machine.
const LONGEST_BARGE_IN: Duration = Duration::from_millis(500);
/// From the caller's first sound, which begins softly, until the gateway knows that somebody speaks.
const LONGEST_UNNOTICED: Duration = Duration::from_secs(2);
/// How a listener's jitter buffer is modelled when gaps are counted.
const LISTENER_BUFFER: Duration = Duration::from_millis(40);

#[derive(clap::Args)]
pub(super) struct Args {
    /// What the agent says.
    #[arg(long, default_value = "Hello! This is Antiphon, giving a text agent a voice on a live call.")]
    text: String,
    /// Where the recordings go.
    #[arg(long, default_value = ".", value_name = "DIR")]
    out: PathBuf,
    /// Which engine speaks.
    #[arg(long)]
    engine: Option<EngineKind>,
    /// Configuration file, for the engine and its voices; addresses are always free loopback ports.
    #[arg(short, long, value_name = "FILE")]
    config: Option<PathBuf>,
}

/// What one caller heard.
struct Report {
    leg: &'static str,
    codec: &'static str,
    first_audio: Duration,
    seconds: f64,
    underruns: usize,
    barge_in: Duration,
    /// From the caller's first sound to the decision that somebody speaks.
    noticed: Duration,
    /// From there to the last sound that the caller heard.
    silenced: Duration,
    match_value: f32,
    match_limit: f32,
    heard: String,
    file: PathBuf,
}

impl Report {
    /// What a caller would complain of.
    fn complaints(&self) -> Vec<String> {
        let mut all = Vec::new();
        if self.match_value < self.match_limit {
            all.push(format!("the text was not heard (match {:.2})", self.match_value));
        }
        if self.underruns > 0 {
            all.push(format!("{} gaps inside speech", self.underruns));
        }
        for (what, took, longest) in [
            ("first audio", self.first_audio, LATEST_FIRST_AUDIO),
            ("silence after the interruption", self.barge_in, LONGEST_BARGE_IN),
            ("noticing that the caller speaks", self.noticed, LONGEST_UNNOTICED),
            ("silence after that", self.silenced, LONGEST_BARGE_IN),
        ] {
            if took > longest {
                all.push(format!("{what} took {:.0} ms", took.as_secs_f64() * 1e3));
            }
        }
        all
    }
}

/// Runs the demo; succeeds only if both callers heard the text in time, without a gap, and could interrupt.
pub(super) fn run(args: Args) -> Result<(), Failure> {
    let mut config = super::load(args.config.as_deref())?;
    if let Some(kind) = args.engine {
        config.engine.kind = kind;
    }
    if args.config.is_none() {
        // The table is the output; the log only speaks of trouble.
        config.log.level = "warn".into();
    }
    on_loopback(&mut config);
    // A gateway that serves may be at work on the jobs and records of the state directory.
    config.batch.database = args.out.join("batch.sqlite").into();
    config.batch.audio_dir = args.out.join("batch");
    config.records.database = args.out.join("records.sqlite").into();
    super::checked(&config)?;
    telemetry::init(&config.log).map_err(|message| Failure { code: super::BAD_CONFIG, message })?;
    std::fs::create_dir_all(&args.out).map_err(|e| Failure::to_make(&args.out, &e))?;
    super::block_on(async move {
        let app = App::start(config).await.map_err(super::serve::failure)?;
        app.ready().await;
        if !app.gateway().is_ready() {
            return Err(Failure::unavailable(
                "no voice works: install espeak-ng, for example by `apt-get install espeak-ng`",
            ));
        }
        let outcome = Demo { app: &app, text: &args.text, out: args.out }.run().await;
        app.drain_at_once().await;
        outcome
    })
}

/// Free loopback ports, no tokens, no traces, an agent that leaves the talking to the demo.
fn on_loopback(config: &mut Config) {
    let any = std::net::SocketAddr::from((std::net::Ipv4Addr::LOCALHOST, 0));
    config.http.bind = any;
    config.http.tokens.clear();
    config.sip.udp = Some(any);
    config.sip.tcp = None;
    config.sip.tls = None;
    config.sip.users.clear();
    config.sip.trunk.clear();
    config.sip.public_ip = None;
    // Over before a collector would have taken a trace.
    config.log.otlp = None;
    config.webrtc.bind_port = 0;
    config.webrtc.bind_ip = None;
    config.webrtc.public_ip = Vec::new();
}

struct Demo<'a> {
    app: &'a App,
    text: &'a str,
    out: PathBuf,
}

impl Demo<'_> {
    async fn run(&self) -> Result<(), Failure> {
        let reference = self.reference().await?;
        let engine = self.app.gateway().engine.status();
        let names: Vec<_> =
            engine.iter().filter_map(|d| d.caps.as_ref()).map(|c| format!("{} on {}", c.name, c.device)).collect();
        println!("gateway on http://{}/, voice: {}", self.app.http(), names.join(", "));
        let mut reports = Vec::new();
        for leg in ["sip", "webrtc"] {
            let call = match leg {
                "sip" => self.call_by_telephone().await,
                _ => self.call_by_browser().await,
            }
            .map_err(|e| Failure::failed(format!("the {leg} call failed: {e}")))?;
            reports.push(self.converse(leg, call, &reference).await?);
        }
        print(&reports, self.text);
        let bad: Vec<String> = reports
            .iter()
            .flat_map(|report| report.complaints().into_iter().map(|what| format!("{}: {what}", report.leg)))
            .collect();
        if bad.is_empty() { Ok(()) } else { Err(Failure::failed(bad.join("; "))) }
    }

    /// The same text without a call.
    async fn reference(&self) -> Result<Clip, Failure> {
        let manner = Manner::plain("".into());
        let mut parts = Vec::new();
        Segmenter::new(SegmentConfig::default()).whole(self.text, &mut parts);
        let mut speaker = Speaker::new(self.app.gateway().engine.clone(), manner);
        speaker.add(parts);
        let mut pcm = Vec::new();
        while let Some(piece) = speaker.next().await.map_err(Failure::failed)? {
            pcm.extend(piece);
        }
        Ok(Clip { rate: audio::RATE, pcm })
    }

    async fn call_by_telephone(&self) -> Result<Call, String> {
        let address = self.app.gateway().sip.as_ref().and_then(|sip| sip.local_udp()).ok_or("SIP is off")?;
        let config = sip::Config { codecs: vec![Codec::Pcmu], ..sip::Config::default() };
        let caller = sip::Caller::bind(config).await.map_err(|e| e.to_string())?;
        caller.call(&format!("sip:silent@{address}")).await.map_err(|e| e.to_string())
    }

    async fn call_by_browser(&self) -> Result<Call, String> {
        let url = format!("http://{}", self.app.http());
        let config = rtc::Config { agent: Some("silent".to_owned()), ..rtc::Config::new(url) };
        rtc::Caller::connect(config).await.map_err(|e| e.to_string())
    }

    async fn converse(&self, leg: &'static str, call: Call, reference: &Clip) -> Result<Report, Failure> {
        let trouble = |what: &str| Failure::failed(format!("{leg}: {what}"));
        let id = call.id().ok_or_else(|| trouble("the answer did not name the call"))?.to_owned();
        let asked = self.speak(&id, self.text).await?;
        let onset = call.ear().onset(asked, PATIENCE).await.ok_or_else(|| trouble("no speech was heard"))?;
        let end = call
            .ear()
            .silence(onset, TURN_PAUSE, LONGEST)
            .await
            .ok_or_else(|| trouble("the first turn did not end"))?;
        let heard = call.ear().heard();
        let recording = heard.clip_between(asked, end + Duration::from_millis(200));
        let underruns = listen::stalls(&heard, onset, end, LISTENER_BUFFER).len();
        let file = self.out.join(format!("{leg}.wav"));
        wav::write(&file, &recording).map_err(|e| Failure::failed(format!("{}: {e}", file.display())))?;
        let correlation = correlate::correlate(&recording, reference).map_err(Failure::failed)?;

        let asked_again = self.speak(&id, SECOND_TURN).await?;
        call.ear().onset(asked_again, PATIENCE).await.ok_or_else(|| trouble("no second turn was heard"))?;
        tokio::time::sleep(BEFORE_BARGE_IN).await;
        let events = self.interrupted_text(&id);
        let cut = clock::now();
        if leg == "sip" {
            call.press("5").await.map_err(Failure::failed)?;
        } else {
            self.post(&format!("/v1/calls/{id}/interrupt"), json!({})).await?;
        }
        let silent = call
            .ear()
            .silence(cut, Duration::from_millis(400), PATIENCE)
            .await
            .ok_or_else(|| trouble("speech went on after the interruption"))?;
        let heard = events.await;
        let (noticed, silenced) = self.speak_over(&call, &id).await.map_err(|what| trouble(&what))?;
        let codec = call.codec();
        call.hang_up().await;
        Ok(Report {
            leg,
            codec: codec.label(),
            first_audio: onset.saturating_duration_since(asked),
            seconds: recording.duration().as_secs_f64(),
            underruns,
            barge_in: silent.saturating_duration_since(cut),
            noticed,
            silenced,
            match_value: correlation.value,
            // G.711 carries half the band, so less of the reference can be found in it.
            match_limit: if codec == Codec::Opus { 0.9 } else { 0.8 },
            heard,
            file,
        })
    }

    /// Has the caller speak over a turn; gives how long until that was noticed, and from there until silence.
    async fn speak_over(&self, call: &Call, id: &str) -> Result<(Duration, Duration), String> {
        let voice = synthetic::babble(CALLERS_VOICE, 8_000, 3.5);
        let handle = self.app.gateway().calls.find(&CallId::from(id)).await.ok_or("the call is over")?;
        let asked = self.speak(id, SECOND_TURN).await.map_err(|failure| failure.message)?;
        call.ear().onset(asked, PATIENCE).await.ok_or("no third turn was heard")?;
        let mut events = handle.events();
        let spoke = call.say(&voice).await.map_err(|e| e.to_string())?;
        let noticed = async {
            loop {
                match events.recv().await {
                    Ok(CallEvent::Interrupted { cause: Cause::Speech, .. }) => return Ok(clock::now()),
                    Ok(_) | Err(RecvError::Lagged(_)) => {}
                    Err(RecvError::Closed) => return Err("the call ended"),
                }
            }
        };
        let noticed = tokio::time::timeout(PATIENCE, noticed).await.unwrap_or(Err("the caller spoke in vain"))?;
        let quiet = call.ear().silence(noticed, Duration::from_millis(400), PATIENCE).await;
        let quiet = quiet.ok_or("speech went on over the caller")?;
        Ok((noticed.saturating_duration_since(spoke), quiet.saturating_duration_since(noticed)))
    }

    /// Speaks on a call through the API; the instant is the one before the request left.
    async fn speak(&self, id: &str, text: &str) -> Result<Instant, Failure> {
        let asked = clock::now();
        self.post(&format!("/v1/calls/{id}/turns"), json!({ "text": text })).await?;
        Ok(asked)
    }

    async fn post(&self, path: &str, body: serde_json::Value) -> Result<(), Failure> {
        let url = format!("http://{}{path}", self.app.http());
        let response = reqwest::Client::new().post(url).json(&body).send().await.map_err(Failure::failed)?;
        let status = response.status();
        if status.is_success() {
            return Ok(());
        }
        let text = response.text().await.unwrap_or_default();
        Err(Failure::failed(format!("{path}: {status} {text}")))
    }

    /// What the gateway says was heard of the turn that is interrupted next.
    fn interrupted_text(&self, id: &str) -> impl Future<Output = String> + use<> {
        let events = self.app.gateway().calls.get(&CallId::from(id)).map(|call| call.events());
        async move {
            let Some(mut events) = events else { return String::new() };
            let wait = async {
                loop {
                    match events.recv().await {
                        Ok(CallEvent::Interrupted { heard, .. }) => return heard.text,
                        Ok(_) | Err(RecvError::Lagged(_)) => {}
                        Err(RecvError::Closed) => return String::new(),
                    }
                }
            };
            tokio::time::timeout(PATIENCE, wait).await.unwrap_or_default()
        }
    }
}

fn print(reports: &[Report], text: &str) {
    println!("said: {text}");
    println!(
        "{:<8} {:<6} {:>14} {:>9} {:>10} {:>16} {:>16} {:>15} {:>7}  file",
        "leg",
        "codec",
        "first audio ms",
        "seconds",
        "underruns",
        "barge-in ms",
        "voice noticed ms",
        "then silence ms",
        "match"
    );
    for r in reports {
        println!(
            "{:<8} {:<6} {:>14.1} {:>9.2} {:>10} {:>16.1} {:>16.1} {:>15.1} {:>7.3}  {}",
            r.leg,
            r.codec,
            r.first_audio.as_secs_f64() * 1e3,
            r.seconds,
            r.underruns,
            r.barge_in.as_secs_f64() * 1e3,
            r.noticed.as_secs_f64() * 1e3,
            r.silenced.as_secs_f64() * 1e3,
            r.match_value,
            r.file.display()
        );
    }
    for r in reports {
        println!("{}: heard before the interruption: \"{}\"", r.leg, r.heard);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn good() -> Report {
        Report {
            leg: "sip",
            codec: "pcmu",
            first_audio: Duration::from_millis(40),
            seconds: 4.0,
            underruns: 0,
            barge_in: Duration::from_millis(40),
            noticed: Duration::from_millis(300),
            silenced: Duration::from_millis(20),
            match_value: 0.95,
            match_limit: 0.8,
            heard: String::new(),
            file: PathBuf::new(),
        }
    }

    #[test]
    fn what_a_caller_would_complain_of_fails_the_demo() {
        assert_eq!(good().complaints(), [""; 0]);
        let late = Duration::from_secs(3);
        for (report, why) in [
            (Report { first_audio: late, ..good() }, "first audio took 3000 ms"),
            (Report { underruns: 2, ..good() }, "2 gaps"),
            (Report { barge_in: late, ..good() }, "silence after the interruption"),
            (Report { noticed: late, ..good() }, "noticing"),
            (Report { silenced: late, ..good() }, "silence after that"),
            (Report { match_value: 0.5, ..good() }, "not heard"),
        ] {
            let said = report.complaints();
            assert!(said.len() == 1 && said[0].contains(why), "{said:?}");
        }
    }
}
