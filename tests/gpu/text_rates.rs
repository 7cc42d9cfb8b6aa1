//! How soon a text sounds that comes token by token: whole calls, from the first token to the first audible sample.
//!
//! Random weights of full size; speech of the length that such a text has in English. The voice's transcript covers its
//! recording but for five ids, which are what the model waits for; the other voice is one as people record it, whose
//! transcript has fewer ids.

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use antiphon::call::{
    CallConfig, CallEvent, CallHandle, CallId, CallMeta, Calls, Direction, EndReason, Style, TextDelta, TurnId,
};
use antiphon::clock;
use antiphon::media::leg::{Codec, LegEnd, LegEvent, MediaFormat, MediaLeg, OutPacket};
use antiphon::sched;
use antiphon::synth::cosyvoice::backend::Options;
use antiphon::synth::cosyvoice::config::Config;
use antiphon::synth::cosyvoice::gpu::{GpuBackend, Precision};
use antiphon::synth::cosyvoice::{CosyVoice, Settings, random};
use antiphon::synth::device::{Engine, Loader};
use antiphon::turn::Streaming;
use audio_codec::Decoder;
use audio_codec::pcmu::PcmuDecoder;

/// Speech tokens of a text id in English.
const PACE: f64 = 6.5;
/// Turns of each kind.
const REPEATS: usize = 5;
/// -46 dBFS.
const AUDIBLE: i32 = 164;
/// First sentences of 33, 78 and 88 characters, without a comma.
const OPENINGS: [&str; 3] = [
    "Your table is booked for tonight.",
    "We have been looking at all of the numbers that you sent us earlier this week.",
    "I can see that your parcels left our warehouse in the north of the country this morning.",
];

/// A listener who takes the time of the first sound.
struct Ear {
    format: MediaFormat,
    connected: bool,
    heard: Arc<Mutex<Option<Instant>>>,
}

impl MediaLeg for Ear {
    fn kind(&self) -> &'static str {
        "bench"
    }

    fn format(&self) -> &MediaFormat {
        &self.format
    }

    async fn attach(&mut self) -> std::io::Result<()> {
        Ok(())
    }

    async fn send(&mut self, packet: OutPacket) -> Result<(), LegEnd> {
        if PcmuDecoder::new().decode(&packet.payload).into_iter().any(|sample| i32::from(sample).abs() >= AUDIBLE) {
            self.heard.lock().expect("no panic").get_or_insert_with(clock::now);
        }
        Ok(())
    }

    fn send_message(&mut self, _text: &str) -> bool {
        false
    }

    async fn recv(&mut self) -> LegEvent {
        if !std::mem::replace(&mut self.connected, true) {
            return LegEvent::Connected;
        }
        std::future::pending().await
    }

    async fn hang_up(&mut self) {}

    fn hold(&mut self, _hold: bool) -> Result<(), String> {
        Ok(())
    }

    fn transfer(&mut self, _to: &str, _attended: bool, _limit: Option<Duration>) -> Result<(), String> {
        Ok(())
    }
}

/// The engine, and a folder with voices whose transcripts are of several lengths.
fn engine(voices: &std::path::Path) -> Engine {
    let dir = super::checkpoint();
    let config = Config::load(&dir).expect("sizes");
    for words in 14..24 {
        let mut voice = random::voice(&config, "covered", 65, 3);
        voice.transcript = vec!["the"; words].join(" ");
        let path = voices.join(format!("covered-{words}.safetensors"));
        std::fs::write(path, voice.to_bytes()).expect("written");
    }
    let settings = Settings {
        voice_dirs: vec![voices.to_path_buf()],
        default_voice: Some("random-k10".into()),
        ..Settings::default()
    };
    let loader: Loader = Box::new(move || {
        let options = Options { hardware: super::hardware(), ..Options::default() };
        let mut voice: CosyVoice<GpuBackend> =
            CosyVoice::load_gpu(&dir, 0, options, Precision::default(), settings.clone())?;
        voice.force_pace(Some(PACE));
        Ok(Box::new(voice))
    });
    Engine::start(vec![loader], sched::Config::default()).expect("it starts")
}

/// Words, those that are long in two.
fn tokens(text: &str) -> Vec<String> {
    let split = |word: &str| {
        let half = word.char_indices().nth(if word.len() > 8 { 5 } else { word.len() });
        let at = half.map_or(word.len(), |(at, _)| at);
        [word[..at].to_owned(), word[at..].to_owned()]
    };
    text.split_inclusive(' ').flat_map(split).filter(|token| !token.is_empty()).collect()
}

struct Call {
    handle: CallHandle,
    heard: Arc<Mutex<Option<Instant>>>,
}

impl Call {
    fn start(calls: &Calls) -> Self {
        let heard = Arc::new(Mutex::new(None));
        let format = MediaFormat {
            codec: Codec::Pcmu,
            payload_type: 0,
            telephone_event: None,
            opus_fec: false,
            continuous: false,
        };
        let meta = CallMeta {
            id: CallId::random(),
            direction: Direction::Inbound,
            from: "sip:caller@bench.invalid".into(),
            to: "sip:bench@bench.invalid".into(),
            agent: "bench".into(),
            headers: Default::default(),
            tenant: "".into(),
            trace: None,
        };
        let handle = calls.start(meta, Ear { format, connected: false, heard: heard.clone() }).expect("a call");
        Self { handle, heard }
    }

    /// Says `opening` and a sentence more, so many tokens a second. From its first token to its first sound. `whole`: to
    /// its end, else cut off when it sounds.
    async fn say(&self, opening: &str, rate: f64, style: Style, whole: bool) -> Option<Duration> {
        // The end of the turn before is still on its way to the listener.
        tokio::time::sleep(Duration::from_millis(700)).await;
        *self.heard.lock().expect("no panic") = None;
        let id = TurnId::next();
        let mut events = self.handle.events();
        let (from, mut told) = (clock::now(), false);
        let text = tokens(&format!("{opening} Is there anything else that I can do for you?"));
        for (n, token) in text.iter().enumerate() {
            tokio::time::sleep_until((from + Duration::from_secs_f64(n as f64 / rate)).into()).await;
            let last = n + 1 == text.len();
            let delta = TextDelta { id: Some(id.clone()), token: token.clone(), last, style: style.clone() };
            self.handle.push_text(delta).expect("the call takes it");
            let heard = self.heard.lock().expect("no panic").is_some();
            if heard && !whole && !std::mem::replace(&mut told, true) {
                self.handle.interrupt().expect("the call is there");
                break;
            }
        }
        loop {
            let event = tokio::time::timeout(Duration::from_millis(2), events.recv()).await;
            if let Ok(Ok(CallEvent::TurnEnded { .. })) = event {
                break;
            }
            let heard = self.heard.lock().expect("no panic").is_some();
            if heard && !whole && !std::mem::replace(&mut told, true) {
                self.handle.interrupt().expect("the call is there");
            }
            if clock::now() > from + Duration::from_secs(60) {
                break;
            }
        }
        let heard = *self.heard.lock().expect("no panic");
        heard.map(|at| at - from)
    }
}

fn style(stream: Streaming, voice: &str) -> Style {
    Style { stream, voice: Some(voice.into()), ..Style::default() }
}

fn quantile(times: &mut [Duration], at: f64) -> f64 {
    times.sort_unstable();
    times.get((times.len().saturating_sub(1) as f64 * at) as usize).map_or(f64::NAN, |t| t.as_secs_f64() * 1e3)
}

const MODES: [(&str, Streaming); 3] =
    [("sentence", Streaming::Sentence), ("auto", Streaming::Auto), ("token", Streaming::Token)];

/// `ANTIPHON_TEST_CALLS`: how many calls speak at once in the second table (100 and 200 else).
#[test]
#[ignore = "measures; run it on a quiet device"]
fn text_rates() {
    let Some(_device) = super::device() else { return };
    let voices = tempfile::tempdir().expect("a folder");
    let engine = engine(voices.path());
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(4).enable_all().build().expect("a runtime");
    runtime.block_on(async {
        engine.ready().await;
        let all = engine.voices();
        let covered = all.iter().find(|voice| voice.name.starts_with("covered") && voice.starts_after == Some(5));
        let covered = covered.expect("one begins after five ids");
        let calls = Calls::new(CallConfig::default(), Arc::new(engine.clone())).expect("threads");
        println!("first token to first audible sample, ms: median and worst of {REPEATS}");
        println!("{:<12} {:>6} {:<9} {:>18} {:>18} {:>18}", "voice", "ids", "mode", "33", "78", "88 characters");
        let call = Call::start(&calls);
        call.say(OPENINGS[0], 80.0, style(Streaming::Token, &covered.name), true).await;
        for (voice, ids) in [(covered.name.as_str(), 5), ("random-k10", 0)] {
            let ids = engine.starts_after(Some(voice)).unwrap_or(ids);
            for rate in [10.0, 30.0, 80.0] {
                for (name, mode) in MODES {
                    // With the other voice only the mode in question.
                    if voice == "random-k10" && (name != "token" || rate < 20.0) {
                        continue;
                    }
                    let mut row = String::new();
                    for opening in OPENINGS {
                        let mut times = Vec::new();
                        for _ in 0..REPEATS {
                            times.extend(call.say(opening, rate, style(mode, voice), false).await);
                        }
                        row += &format!(" {:>9.0} {:>8.0}", quantile(&mut times, 0.5), quantile(&mut times, 1.0));
                    }
                    println!("{voice:<12} {ids:>6} {name:<9}{row}   at {rate} tokens/s");
                }
            }
        }
        call.handle.hang_up(EndReason::HungUp);
        let levels = super::variable("ANTIPHON_TEST_CALLS")
            .map_or_else(|| vec![100, 200], |calls| vec![calls.parse().expect("a number of calls")]);
        println!("calls at once, each three turns of 78 characters and a sentence to their ends, at 30 tokens/s");
        println!("{:>6} {:<9} {:>8} {:>8} {:>10} {:>8}", "calls", "mode", "p50 ms", "p95 ms", "underruns", "unheard");
        for level in levels {
            for (name, mode) in MODES {
                let talking = (0..level).map(|n| {
                    let (call, style) = (Call::start(&calls), style(mode, &covered.name));
                    tokio::spawn(async move {
                        // Turns begin at any time.
                        tokio::time::sleep(Duration::from_millis((n * 7_919 % 4_000) as u64)).await;
                        let mut times = Vec::new();
                        for _ in 0..3 {
                            times.push(call.say(OPENINGS[1], 30.0, style.clone(), true).await);
                        }
                        let underruns = call.handle.info().underruns;
                        call.handle.hang_up(EndReason::HungUp);
                        (times, underruns)
                    })
                });
                let (mut times, mut underruns, mut unheard) = (Vec::new(), 0, 0);
                for task in talking.collect::<Vec<_>>() {
                    let (own, gaps) = task.await.expect("no panic");
                    unheard += own.iter().filter(|time| time.is_none()).count();
                    times.extend(own.into_iter().flatten());
                    underruns += gaps;
                }
                println!(
                    "{level:>6} {name:<9} {:>8.0} {:>8.0} {underruns:>10} {unheard:>8}",
                    quantile(&mut times, 0.5),
                    quantile(&mut times, 0.95)
                );
            }
        }
        tokio::task::block_in_place(|| calls.shutdown());
    });
    engine.shutdown();
}
