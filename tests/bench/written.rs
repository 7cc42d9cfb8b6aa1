//! How soon a text sounds that comes token by token, whatever the engine: whole calls, from the first token to the first
//! audible sample. Used by the tests of the GPU, too.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use antiphon::call::{
    CallConfig, CallEvent, CallHandle, CallId, CallMeta, Calls, Direction, EndReason, Refusal, Speech, StreamState,
    Style, TextDelta, TurnId,
};
use antiphon::clock;
use antiphon::media::leg::{Codec, LegEnd, LegEvent, MediaFormat, MediaLeg, OutPacket};
use antiphon::synth::device::Engine;
use antiphon::turn::{Saying, SpeechSink, StreamId, Streaming, Utterance, UtteranceId};
use audio_codec::Decoder;
use audio_codec::pcmu::PcmuDecoder;

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
        let format = MediaFormat::plain(Codec::Pcmu);
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

fn style(stream: Streaming, voice: Option<&str>) -> Style {
    Style { stream, voice: voice.map(str::to_owned), ..Style::default() }
}

fn quantile(times: &mut [Duration], at: f64) -> f64 {
    times.sort_unstable();
    times.get((times.len().saturating_sub(1) as f64 * at) as usize).map_or(f64::NAN, |t| t.as_secs_f64() * 1e3)
}

pub(crate) const MODES: [(&str, Streaming); 3] =
    [("sentence", Streaming::Sentence), ("auto", Streaming::Auto), ("token", Streaming::Token)];

/// The engine, counting what it refuses.
struct Counted {
    engine: Engine,
    refused: Mutex<BTreeMap<String, u32>>,
}

impl Speech for Counted {
    fn submit(&self, utterance: Utterance, sink: SpeechSink) -> Result<(), Refusal> {
        let counted = |refusal: &Refusal| {
            *self.refused.lock().expect("no panic").entry(refusal.reason.clone()).or_default() += 1;
        };
        Speech::submit(&self.engine, utterance, sink).inspect_err(counted)
    }

    fn starts_after(&self, voice: Option<&str>) -> Option<u32> {
        Engine::starts_after(&self.engine, voice)
    }

    fn append(&self, stream: StreamId, utterance: UtteranceId, said: &Saying, last: bool) {
        Engine::append(&self.engine, stream, utterance, said, last);
    }

    fn note(&self, stream: StreamId, note: StreamState) {
        Speech::note(&self.engine, stream, note);
    }
}

/// A voice of the first table, and which of the modes and rates are of interest.
pub(crate) struct Voice<'a> {
    /// Its name; `None`: the engine's default.
    pub(crate) name: Option<&'a str>,
    pub(crate) modes: &'a [(&'a str, Streaming)],
    pub(crate) rates: &'a [f64],
}

/// Prints how soon each opening sounds, of one call at a time.
pub(crate) async fn one_at_a_time(engine: &Engine, voices: &[Voice<'_>]) {
    let calls = Calls::new(CallConfig::default(), Arc::new(engine.clone())).expect("threads");
    println!("first token to first audible sample, ms: median and worst of {REPEATS}");
    println!("{:<12} {:>6} {:<9} {:>18} {:>18} {:>18}", "voice", "ids", "mode", "33", "78", "88 characters");
    let call = Call::start(&calls);
    call.say(OPENINGS[0], 80.0, style(Streaming::Token, voices[0].name), true).await;
    for voice in voices {
        let ids = engine.starts_after(voice.name).map_or("-".to_owned(), |ids| ids.to_string());
        for rate in voice.rates {
            for (name, mode) in voice.modes {
                let mut row = String::new();
                for opening in OPENINGS {
                    let mut times = Vec::new();
                    for _ in 0..REPEATS {
                        times.extend(call.say(opening, *rate, style(*mode, voice.name), false).await);
                    }
                    row += &format!(" {:>9.0} {:>8.0}", quantile(&mut times, 0.5), quantile(&mut times, 1.0));
                }
                println!("{:<12} {ids:>6} {name:<9}{row}   at {rate} tokens/s", voice.name.unwrap_or("default"));
            }
        }
    }
    call.handle.hang_up(EndReason::HungUp);
    tokio::task::block_in_place(|| calls.shutdown());
}

/// Prints the same of many calls at once, each three turns of 78 characters and a sentence to their ends, and what the engine
/// refused meanwhile, by reason. A turn whose beginning is refused is begun again a second later.
pub(crate) async fn at_once(engine: &Engine, voice: Option<&str>, levels: &[usize], rate: f64) {
    let counted = Arc::new(Counted { engine: engine.clone(), refused: Mutex::default() });
    let calls = Calls::new(CallConfig::default(), counted.clone()).expect("threads");
    println!("calls at once, each three turns of 78 characters and a sentence to their ends, at {rate} tokens/s");
    println!(
        "{:>6} {:<9} {:>8} {:>8} {:>10} {:>8}  refused",
        "calls", "mode", "p50 ms", "p95 ms", "underruns", "unheard"
    );
    for &level in levels {
        for (name, mode) in MODES {
            let talking = (0..level).map(|n| {
                let (call, style) = (Call::start(&calls), style(mode, voice));
                tokio::spawn(async move {
                    // Turns begin at any time.
                    tokio::time::sleep(Duration::from_millis((n * 7_919 % 4_000) as u64)).await;
                    let mut times = Vec::new();
                    for _ in 0..3 {
                        times.push(call.say(OPENINGS[1], rate, style.clone(), true).await);
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
            let refused = std::mem::take(&mut *counted.refused.lock().expect("no panic"));
            println!(
                "{level:>6} {name:<9} {:>8.0} {:>8.0} {underruns:>10} {unheard:>8}  {refused:?}",
                quantile(&mut times, 0.5),
                quantile(&mut times, 0.95)
            );
        }
    }
    tokio::task::block_in_place(|| calls.shutdown());
}
