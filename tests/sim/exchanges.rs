//! 200 exchanges on a script: when turns end and what interrupts, beside fixed rules of silence. Sound goes through the
//! call's own codec, jitter buffer, echo guard and speech detector; the words come from the script, 180 ms after they are
//! asked for, as a recogniser that never errs would give them.
//!
//! `cargo test --test sim exchanges -- --nocapture` prints the table.

use std::time::Duration;

use antiphon::call::{BargeInOutcome, CallEvent, TurnRequest};
use antiphon::hear::ear::{Feed, Frames};
use antiphon::hear::turn::{Action, Delays, Machine, Source};
use antiphon::hear::{Expect, HearEvent, Phase, Words};
use antiphon::media::decode;

use super::world::{MS, World};

const FRAME: Duration = Duration::from_millis(20);
/// What a recogniser on this machine takes for a short stretch of speech.
const RECOGNISER: Duration = Duration::from_millis(180);

const LONG: &str = "We have three rooms left for that week, one of them with a view of the lake and a balcony of its own, \
                    and two that look out on the garden behind the house, where it is very quiet in the morning.";

/// What a caller does next.
#[derive(Clone, Copy, Debug)]
enum Piece {
    /// Says this for so long.
    Say(&'static str, u64),
    /// Is silent.
    Pause(u64),
    /// Coughs, or drops something: noise in a burst.
    Burst(u64),
}
use Piece::{Burst, Pause, Say};

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Kind {
    Answer,
    Hesitation,
    Digits,
    Listing,
    Backchannel,
    Cough,
    Echo,
    Interruption,
}

#[derive(Clone, Debug)]
struct Exchange {
    kind: Kind,
    language: &'static str,
    pieces: Vec<Piece>,
}

/// A number that only depends on the ones before.
struct Dice(u64);

impl Dice {
    fn roll(&mut self, from: u64, to: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        from + (self.0 >> 33) % (to - from)
    }

    fn pick<T: Copy>(&mut self, list: &[T]) -> T {
        list[self.roll(0, list.len() as u64) as usize]
    }
}

fn script() -> Vec<Exchange> {
    let mut dice = Dice(16);
    let mut exchanges = Vec::new();
    for n in 0..200u64 {
        let german = n % 2 == 1;
        let of = |en: &[&'static str], de: &[&'static str], dice: &mut Dice| dice.pick(if german { de } else { en });
        let (kind, pieces) = match n {
            0..36 => {
                let text = of(
                    &["Yes.", "No, thank you.", "I would like to speak to somebody.", "Can you help me with my bill?"],
                    &["Ja.", "Nein, danke.", "Ich möchte mit jemandem sprechen.", "Können Sie mir helfen?"],
                    &mut dice,
                );
                (Kind::Answer, vec![Say(text, dice.roll(400, 2_000))])
            }
            36..72 => {
                let open = of(
                    &["I would like to", "I am calling because", "Um", "My name is, uh"],
                    &["Ich möchte gerne einen", "Ich rufe an, weil", "Ähm", "Mein Name ist, äh"],
                    &mut dice,
                );
                let rest = of(&["book a table for two."], &["einen Tisch für zwei."], &mut dice);
                let pause = dice.roll(500, 1_400);
                (
                    Kind::Hesitation,
                    vec![Say(open, dice.roll(500, 1_200)), Pause(pause), Say(rest, dice.roll(700, 1_500))],
                )
            }
            72..108 => {
                let group = |dice: &mut Dice| dice.pick(&["4 5 7", "0 8 1 5", "one two three", "9 9"]);
                let mut pieces = vec![Say(group(&mut dice), dice.roll(600, 1_100))];
                for _ in 0..dice.roll(1, 4) {
                    pieces.push(Pause(dice.roll(400, 1_200)));
                    pieces.push(Say(group(&mut dice), dice.roll(600, 1_100)));
                }
                (Kind::Digits, pieces)
            }
            108..128 => {
                let parts = of(&["bread, butter,"], &["Brot, Butter,"], &mut dice);
                let last = of(&["and a bottle of milk."], &["und eine Flasche Milch."], &mut dice);
                let pause = dice.roll(300, 900);
                (Kind::Listing, vec![Say(parts, dice.roll(700, 1_200)), Pause(pause), Say(last, dice.roll(600, 1_200))])
            }
            128..146 => {
                let text = of(&["Mm-hm.", "Yeah.", "Okay.", "Uh-huh."], &["Mhm.", "Ja.", "Genau.", "Okay."], &mut dice);
                (Kind::Backchannel, vec![Say(text, dice.roll(260, 520))])
            }
            146..164 => (Kind::Cough, vec![Burst(dice.roll(120, 420))]),
            164..182 => (Kind::Echo, vec![Pause(2_000)]),
            _ => {
                let text =
                    of(&["Stop.", "No, wait, not that week."], &["Halt.", "Nein, nicht diese Woche."], &mut dice);
                (Kind::Interruption, vec![Say(text, dice.roll(350, 1_600))])
            }
        };
        exchanges.push(Exchange { kind, language: if german { "de" } else { "en" }, pieces });
    }
    exchanges
}

/// Recorded speech without its pauses, at 8 kHz.
fn voice() -> Vec<i16> {
    let mut reader = hound::WavReader::open("tests/data/speech-8k.wav").expect("the recording");
    let pcm: Vec<i16> = reader.samples::<i16>().map(Result::unwrap).collect();
    let loud = |frame: &&[i16]| frame.iter().map(|s| i64::from(*s).pow(2)).sum::<i64>() / 160 > 500 * 500;
    pcm.chunks_exact(160).filter(loud).flatten().copied().collect()
}

/// How one exchange went.
#[derive(Debug, Default)]
struct Outcome {
    /// The turn was taken as ended before its last piece.
    cut_off: bool,
    /// Last sound to the end of the turn.
    delay: Option<Duration>,
    /// The same for a fixed silence of 500 and of 800 ms.
    fixed: [(bool, Option<Duration>); 2],
    interrupted: bool,
    /// The detector heard somebody while we spoke.
    noticed: bool,
    paused: bool,
    /// All of what we had to say was heard.
    finished: bool,
    prompts: usize,
}

/// The caller, the recogniser and the turn machine of one exchange.
struct Stage {
    world: World,
    frames: Frames,
    ear: Machine,
    /// When an answer is due, and until when the sound goes that it is about.
    asked: Option<(Duration, u64, Duration)>,
    /// Beginnings and ends of what was said, in call time, with the words.
    said: Vec<(Duration, Duration, &'static str)>,
    language: &'static str,
    /// When the detector last heard voice.
    last_voice: Option<Duration>,
    ends: Vec<Duration>,
    fixed: [Vec<Duration>; 2],
}

impl Stage {
    fn new(exchange: &Exchange) -> Self {
        let mut world = World::new();
        let (feed, frames) = Feed::detached();
        world.machine.hear(feed, "");
        let mut ear = Machine::new(Delays { min: 350 * MS, max: 1_800 * MS }, Source::Asked);
        ear.expect((exchange.kind == Kind::Digits).then_some(Expect::Digits));
        Self {
            world,
            frames,
            ear,
            asked: None,
            said: Vec::new(),
            language: exchange.language,
            last_voice: None,
            ends: Vec::new(),
            fixed: [Vec::new(), Vec::new()],
        }
    }

    fn now(&self) -> Duration {
        self.world.now - self.world.start
    }

    /// 20 ms of the caller.
    fn frame(&mut self, pcm: &[i16]) {
        let mut payload = vec![0; 160];
        antiphon::media::encode::mu_law_into(pcm, &mut payload);
        self.world.hear(payload);
        self.world.run(FRAME);
        while let Some((at, quiet)) = self.frames.take() {
            if let Some(quiet) = quiet.filter(|quiet| quiet.is_zero()) {
                self.last_voice = Some(at - quiet);
            }
            for (rule, silence) in [500 * MS, 800 * MS].into_iter().enumerate() {
                let over = self.last_voice.filter(|voice| at - *voice >= silence);
                // One end for each stretch of voice.
                if over.is_some_and(|voice| self.fixed[rule].last().is_none_or(|end| *end < voice)) {
                    self.fixed[rule].push(at);
                }
            }
            self.ear.frame(at, quiet);
            if let Some((_, id, to)) = self.asked.take_if(|(due, ..)| *due <= at) {
                let text: Vec<&str> =
                    self.said.iter().filter(|(from, ..)| *from < to).map(|(.., text)| *text).collect();
                let words = Words { text: text.join(" "), language: self.language.into(), confidence: 0.9 };
                self.ear.recognised(at, id, words);
            }
            self.act(at);
        }
    }

    fn act(&mut self, at: Duration) {
        while let Some(action) = self.ear.poll() {
            match action {
                Action::Recognise { id, to, .. } => self.asked = Some((at + RECOGNISER, id, to)),
                Action::Cancel { id } => self.asked = self.asked.filter(|(_, known, _)| *known != id),
                Action::Event(event) => {
                    if event.phase == Phase::EndOfTurn && !event.text.is_empty() {
                        self.ends.push(at);
                    }
                    self.world.machine.handle_heard(self.world.now, HearEvent::Turn(event));
                    self.world.settle();
                }
                Action::Forget { .. } | Action::Deaf { .. } | Action::Judge { .. } => {}
            }
        }
    }

    fn silence(&mut self, ms: u64) {
        (0..ms / 20).for_each(|_| self.frame(&[0; 160]));
    }
}

/// The other side's echo of what we sent 100 ms ago, 15 dB lower.
fn echo(world: &World) -> Vec<i16> {
    let then = world.now - 100 * MS;
    let packet = world.packets.iter().rev().find(|(at, _)| *at <= then && then - *at < FRAME);
    let Some((_, packet)) = packet.filter(|(_, packet)| packet.payload.len() == 160) else { return vec![0; 160] };
    let mut decoder = audio_codec::pcmu::PcmuDecoder::new();
    let pcm = audio_codec::Decoder::decode(&mut decoder, &packet.payload);
    pcm.iter().map(|sample| (f32::from(*sample) * 0.177_8) as i16).collect()
}

fn run(exchange: &Exchange, voice: &[i16], dice: &mut Dice) -> Outcome {
    let mut stage = Stage::new(exchange);
    let over = exchange.kind >= Kind::Backchannel;
    stage.silence(300);
    let turn = over.then(|| {
        stage.world.engine.speak_as(voice);
        stage.world.speak(TurnRequest::new(LONG)).expect("a turn that is taken")
    });
    if over {
        for _ in 0..60 {
            let back = if exchange.kind == Kind::Echo { echo(&stage.world) } else { vec![0; 160] };
            stage.frame(&back);
        }
    }
    let mut at = dice.roll(0, 40) as usize * 160;
    let (mut last_begins, mut last_ends) = (Duration::ZERO, Duration::ZERO);
    for piece in &exchange.pieces {
        match *piece {
            Say(text, ms) => {
                last_begins = stage.now();
                stage.said.push((last_begins, last_begins + Duration::from_millis(ms), text));
                for _ in 0..ms / 20 {
                    let frame: Vec<i16> = voice.iter().cycle().skip(at).take(160).copied().collect();
                    at = (at + 160) % voice.len();
                    stage.frame(&frame);
                }
                last_ends = stage.now();
            }
            Burst(ms) => {
                for n in 0..ms / 20 {
                    // Loud at once, falling off.
                    let level = 9_000.0 * 0.85f32.powi(n as i32);
                    let frame: Vec<i16> =
                        (0..160).map(|_| ((dice.roll(0, 2_000) as f32 / 1_000.0 - 1.0) * level) as i16).collect();
                    stage.frame(&frame);
                }
                last_ends = stage.now();
            }
            Pause(ms) if exchange.kind == Kind::Echo => {
                for _ in 0..ms / 20 {
                    let back = echo(&stage.world);
                    stage.frame(&back);
                }
            }
            Pause(ms) => stage.silence(ms),
        }
    }
    stage.silence(3_400);
    if over {
        stage.world.run(Duration::from_secs(30));
    }
    let judge = |ends: &[Duration]| {
        let cut_off = ends.iter().any(|end| *end < last_begins);
        let delay = ends.iter().find(|end| **end >= last_ends).map(|end| *end - last_ends);
        (cut_off, delay)
    };
    let (cut_off, delay) = judge(&stage.ends);
    let happened = |wanted: &dyn Fn(&CallEvent) -> bool| stage.world.events.iter().any(|(_, event)| wanted(event));
    let resolved = |event: &CallEvent| matches!(event, CallEvent::BargeInResolved { outcome, .. } if *outcome == BargeInOutcome::Rejected);
    Outcome {
        cut_off,
        delay,
        fixed: [judge(&stage.fixed[0]), judge(&stage.fixed[1])],
        interrupted: happened(&|event| matches!(event, CallEvent::Interrupted { .. })),
        noticed: happened(&|event| *event == CallEvent::Vad { speaking: true }),
        paused: happened(&resolved),
        finished: happened(&|event| {
            matches!(event, CallEvent::TurnEnded { turn: ended, heard, .. }
                if Some(ended) == turn.as_ref() && heard.text.ends_with("in the morning."))
        }),
        prompts: stage.world.events.iter().filter(|(_, event)| matches!(event, CallEvent::Prompt { .. })).count(),
    }
}

fn percentile(delays: &mut [Duration], share: f64) -> u128 {
    delays.sort_unstable();
    delays.get(((delays.len() as f64 - 1.0) * share).round() as usize).map_or(0, |delay| delay.as_millis())
}

#[test]
fn two_hundred_exchanges_are_ended_and_interrupted_as_people_would() {
    const { assert!(decode::RATE == 16_000) };
    let voice = voice();
    let mut dice = Dice(5);
    let outcomes: Vec<(Kind, Outcome)> =
        script().iter().map(|exchange| (exchange.kind, run(exchange, &voice, &mut dice))).collect();
    assert_eq!(outcomes.len(), 200);
    let turns: Vec<&(Kind, Outcome)> = outcomes.iter().filter(|(kind, _)| *kind < Kind::Backchannel).collect();
    let all = |kind: Kind, is: &dyn Fn(&Outcome) -> bool| {
        outcomes.iter().filter(|(of, outcome)| *of == kind && is(outcome)).count()
    };
    println!("rule            cut off   delay p50   p95 (ms), of {} turns", turns.len());
    let mut table = Vec::new();
    for (name, of) in [
        ("words and pauses", (|o: &Outcome| (o.cut_off, o.delay)) as fn(&Outcome) -> (bool, Option<Duration>)),
        ("500 ms", |o| o.fixed[0]),
        ("800 ms", |o| o.fixed[1]),
    ] {
        let cut = turns.iter().filter(|(_, outcome)| of(outcome).0).count();
        let mut delays: Vec<Duration> = turns.iter().filter_map(|(_, outcome)| of(outcome).1).collect();
        let row = (cut, delays.len(), percentile(&mut delays, 0.5), percentile(&mut delays, 0.95));
        println!("{name:16} {:>6} {:>11} {:>8}", row.0, row.2, row.3);
        table.push(row);
    }
    for kind in [Kind::Answer, Kind::Hesitation, Kind::Digits, Kind::Listing] {
        let of: Vec<&Outcome> = turns.iter().filter(|(of, _)| *of == kind).map(|(_, outcome)| outcome).collect();
        let cut = |is: &dyn Fn(&Outcome) -> bool| of.iter().filter(|outcome| is(outcome)).count();
        let mut delays: Vec<Duration> = of.iter().filter_map(|outcome| outcome.delay).collect();
        println!(
            "{kind:?}: {} of {} cut off (500 ms: {}, 800 ms: {}), delay p50 {}",
            cut(&|o| o.cut_off),
            of.len(),
            cut(&|o| o.fixed[0].0),
            cut(&|o| o.fixed[1].0),
            percentile(&mut delays, 0.5)
        );
    }
    for kind in [Kind::Backchannel, Kind::Cough, Kind::Echo, Kind::Interruption] {
        println!(
            "{kind:?}: {} noticed, {} paused and resumed, {} interrupted, {} heard to the end, of {}",
            all(kind, &|o| o.noticed),
            all(kind, &|o| o.paused),
            all(kind, &|o| o.interrupted),
            all(kind, &|o| o.finished),
            all(kind, &|_| true)
        );
    }
    // Turns.
    let (ours, short, long) = (table[0], table[1], table[2]);
    assert_eq!(ours.1, turns.len(), "every turn ends");
    assert!(ours.0 <= 6 && ours.0 * 4 <= long.0 && long.0 <= short.0, "{table:?}");
    let quick: Vec<_> = turns.iter().filter(|(kind, _)| *kind == Kind::Answer).collect();
    assert!(quick.iter().filter(|(_, o)| o.delay.is_some_and(|delay| delay <= 500 * MS)).count() >= 30, "{quick:?}");
    // Interruptions.
    for kind in [Kind::Backchannel, Kind::Cough, Kind::Echo] {
        assert_eq!(all(kind, &|o| o.interrupted), 0, "{kind:?}");
        assert_eq!(all(kind, &|o| o.finished), 18, "what was paused goes on to its end: {kind:?}");
        assert_eq!(all(kind, &|o| o.prompts > 0), 0, "{kind:?}");
    }
    assert_eq!(all(Kind::Echo, &|o| o.noticed), 0, "our own voice is no caller");
    assert_eq!(all(Kind::Interruption, &|o| o.interrupted && o.prompts > 0), 18);
}

#[test]
fn the_same_echo_is_a_voice_where_it_is_not_ours() {
    // What the guard is for: without it this level would be somebody who speaks.
    let voice = voice();
    let mut world = World::new();
    for frame in voice.chunks_exact(160).cycle().take(150) {
        let quiet: Vec<i16> = frame.iter().map(|sample| (f32::from(*sample) * 0.177_8) as i16).collect();
        let mut payload = vec![0; 160];
        antiphon::media::encode::mu_law_into(&quiet, &mut payload);
        world.hear(payload);
        world.run(FRAME);
    }
    assert!(world.when(|event| *event == CallEvent::Vad { speaking: true }).is_some());
}

#[test]
fn a_caller_of_11_db_less_is_noticed_in_the_second_second_of_our_voice() {
    let voice = voice();
    let mut world = World::new();
    world.engine.speak_as(&voice);
    world.speak(TurnRequest::new(LONG)).expect("a turn that is taken");
    let hear = |world: &mut World, pcm: &[i16]| {
        let mut payload = vec![0; 160];
        antiphon::media::encode::mu_law_into(pcm, &mut payload);
        world.hear(payload);
        world.run(FRAME);
    };
    for _ in 0..60 {
        hear(&mut world, &[0; 160]);
    }
    let began = world.now - world.start;
    // Another part of the recording than the one that we speak then.
    for frame in voice.chunks_exact(160).cycle().skip(100).take(100) {
        let quiet: Vec<i16> = frame.iter().map(|sample| (f32::from(*sample) * 0.281_8) as i16).collect();
        hear(&mut world, &quiet);
    }
    let noticed = world.when(|event| *event == CallEvent::Vad { speaking: true }).expect("a quiet caller is a caller");
    assert!(noticed >= began && noticed <= began + 800 * MS, "began at {began:?}, noticed at {noticed:?}");
}
