//! One caller's ear: the task between a call and the recognisers.
//!
//! Owns the sound of the open turn and the requests about it; [`super::turn::Machine`] decides. Ends with the call.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;
use tokio::sync::mpsc;
use tokio::time::{Instant as Alarm, sleep_until};

use super::config::Turns;
use super::smart_turn::{self, Asked, SmartTurn};
use super::stream::{Listener, Services};
use super::turn::{Action, Delays, Machine, Source};
use super::{Expect, HearEvent, RATE, Recogniser, Request, Stop, Trouble, Words};
use crate::clock;

/// Frames that may wait for the task: five seconds. More are dropped and told as deafness.
const FRAMES: usize = 250;
/// Events that may wait for the call, which reads them at once; they come a few a second.
const EVENTS: usize = 64;
/// The most sound that is kept: the longest turn and what comes while it is recognised.
const KEPT: Duration = Duration::from_secs(75);
/// Samples of one frame.
pub(super) const FRAME: usize = 320;

/// What hears, for all calls. Clones mean the same.
#[derive(Clone)]
pub struct Ears(Arc<Inner>);

/// Where words come from.
enum Mind {
    /// They are asked for, stretch by stretch.
    Asked(Arc<dyn Recogniser>),
    /// A service streams them.
    Streamed(Arc<Services>),
}

struct Inner {
    mind: Mind,
    language: Option<String>,
    delays: Delays,
    /// Where the tasks run.
    runtime: tokio::runtime::Handle,
    apology: String,
    /// Hears whether a turn is over.
    judge: Option<Arc<SmartTurn>>,
}

impl Ears {
    /// Ears that ask `recogniser`. Its tasks run on `runtime`.
    pub fn new(
        recogniser: Arc<dyn Recogniser>,
        language: Option<String>,
        turns: Turns,
        apology: String,
        runtime: tokio::runtime::Handle,
    ) -> Self {
        Self::with(Mind::Asked(recogniser), language, turns, apology, runtime)
    }

    /// Ears that stream to `services`. Their tasks run on `runtime`.
    pub fn streaming(
        services: Services,
        language: Option<String>,
        turns: Turns,
        apology: String,
        runtime: tokio::runtime::Handle,
    ) -> Self {
        Self::with(Mind::Streamed(Arc::new(services)), language, turns, apology, runtime)
    }

    fn with(
        mind: Mind,
        language: Option<String>,
        turns: Turns,
        apology: String,
        runtime: tokio::runtime::Handle,
    ) -> Self {
        let ms = Duration::from_millis;
        let delays = Delays { min: ms(turns.min_delay_ms), max: ms(turns.max_delay_ms) };
        Self(Arc::new(Inner { mind, language, delays, runtime, apology, judge: None }))
    }

    /// The same, with `judge` to hear whether a turn is over. To be called before the first caller is heard.
    #[must_use]
    pub fn judging(mut self, judge: Option<Arc<SmartTurn>>) -> Self {
        if let Some(inner) = Arc::get_mut(&mut self.0) {
            inner.judge = judge;
        }
        self
    }

    /// Begins to hear a caller. The task ends when the feed is dropped.
    pub fn open(&self) -> (Feed, mpsc::Receiver<HearEvent>) {
        let (items, inbox) = mpsc::channel(FRAMES);
        let (tell, told) = mpsc::channel(EVENTS);
        let (pulse, tell, language) = (Pulse::default(), Teller(tell), self.0.language.clone());
        let asked = Asked::new(self.0.judge.clone());
        match &self.0.mind {
            Mind::Asked(recogniser) => {
                let mut machine = Machine::new(self.0.delays, Source::Asked);
                machine.judge_sound(asked.is_there());
                let ear = Ear {
                    machine,
                    asked,
                    sound: Sound::default(),
                    language,
                    requests: FuturesUnordered::new(),
                    stops: VecDeque::new(),
                    recogniser: recogniser.clone(),
                    pulse,
                    trouble: None,
                    tell,
                };
                self.0.runtime.spawn(ear.run(inbox));
            }
            Mind::Streamed(services) => {
                let how = (self.0.delays, language, asked);
                self.0.runtime.spawn(Listener::new(services.clone(), how, pulse, tell).run(inbox));
            }
        }
        (Feed::new(items), told)
    }

    /// What a call says when a turn was not heard; empty: nothing.
    pub fn apology(&self) -> &str {
        &self.0.apology
    }
}

impl std::fmt::Debug for Ears {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let kind = match &self.0.mind {
            Mind::Asked(recogniser) => recogniser.kind(),
            Mind::Streamed(_) => "streamed",
        };
        f.debug_struct("Ears").field("kind", &kind).finish_non_exhaustive()
    }
}

/// The call's end: takes what its caller says. Never waits.
#[derive(Debug)]
pub struct Feed {
    items: mpsc::Sender<Item>,
    /// Sound that found no room since something did.
    lost: Duration,
    /// A wish that found none.
    wish: Option<Listen>,
}

/// How an agent wants to hear.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Listen {
    /// Also texts before the end of a turn.
    pub partials: Option<bool>,
    /// BCP 47 tag of what the caller will speak from now on.
    pub language: Option<String>,
    /// What the next turn is expected to be.
    pub expect: Option<Expect>,
}

impl Listen {
    /// This, but for what `newer` says.
    fn with(self, newer: Listen) -> Self {
        Self {
            partials: newer.partials.or(self.partials),
            language: newer.language.or(self.language),
            expect: newer.expect.or(self.expect),
        }
    }
}

/// What a call's end sends to its task.
#[derive(Debug)]
pub(super) enum Item {
    Sound(Piece),
    Listen(Listen),
}

/// Sound that ended `at` in the call.
#[derive(Debug)]
pub(super) struct Piece {
    pub(super) at: Duration,
    pub(super) heard: Heard,
    /// As in [`Machine::frame`].
    pub(super) quiet: Option<Duration>,
    /// How much was lost between the piece before and this one.
    pub(super) lost: Duration,
}

#[derive(Debug)]
pub(super) enum Heard {
    Frame(Box<[i16; FRAME]>),
    /// Nothing came for so long.
    Silence(Duration),
}

/// What a [`Feed`] was given, for drivers with a time of their own.
#[derive(Debug)]
pub struct Frames(mpsc::Receiver<Item>);

impl Frames {
    /// The next frame or silence, as (call time, since the last voice): the arguments of [`Machine::frame`].
    pub fn take(&mut self) -> Option<(Duration, Option<Duration>)> {
        loop {
            match self.0.try_recv().ok()? {
                Item::Sound(Piece { at, quiet, .. }) => return Some((at, quiet)),
                Item::Listen(_) => {}
            }
        }
    }

    /// The sound of the next frame, and since the last voice.
    #[cfg(test)]
    pub(crate) fn sound(&mut self) -> Option<(Option<Duration>, Box<[i16; FRAME]>)> {
        loop {
            match self.0.try_recv().ok()? {
                Item::Sound(Piece { heard: Heard::Frame(pcm), quiet, .. }) => return Some((quiet, pcm)),
                Item::Sound(_) | Item::Listen(_) => {}
            }
        }
    }
}

impl Feed {
    /// A feed without a task, and what comes of it.
    pub fn detached() -> (Self, Frames) {
        let (items, inbox) = mpsc::channel(FRAMES);
        (Self::new(items), Frames(inbox))
    }

    fn new(items: mpsc::Sender<Item>) -> Self {
        Self { items, lost: Duration::ZERO, wish: None }
    }

    /// 20 ms of the caller at `at` in the call. `quiet` as in [`Machine::frame`].
    pub fn frame(&mut self, at: Duration, pcm: &[i16; FRAME], quiet: Option<Duration>) {
        self.send(at, Heard::Frame(Box::new(*pcm)), quiet, crate::audio::FRAME);
    }

    /// The caller sent nothing for `length` until `at`.
    pub fn silence(&mut self, at: Duration, length: Duration, quiet: Option<Duration>) {
        self.send(at, Heard::Silence(length), quiet, length);
    }

    /// Hears differently from now on.
    pub fn listen(&mut self, listen: Listen) {
        self.wish = Some(self.wish.take().unwrap_or_default().with(listen));
        self.wish();
    }

    fn wish(&mut self) {
        // overflow: retained; it goes before the next sound that finds room
        if let Some(wish) = self.wish.take()
            && let Err(mpsc::error::TrySendError::Full(Item::Listen(wish))) = self.items.try_send(Item::Listen(wish))
        {
            self.wish = Some(wish);
        }
    }

    fn send(&mut self, at: Duration, heard: Heard, quiet: Option<Duration>, length: Duration) {
        self.wish();
        let piece = Piece { at, heard, quiet, lost: self.lost };
        // overflow: drops the newest; the next that finds room says how much, and the task tells of it as deafness
        self.lost = match self.items.try_send(Item::Sound(piece)) {
            Err(mpsc::error::TrySendError::Full(_)) => self.lost + length,
            Ok(()) | Err(mpsc::error::TrySendError::Closed(_)) => Duration::ZERO,
        };
    }
}

/// The caller's sound, from some time of the call on, without holes.
#[derive(Debug, Default)]
pub(super) struct Sound {
    pcm: VecDeque<i16>,
    /// When the last sample was.
    end: Duration,
}

impl Sound {
    pub(super) fn push(&mut self, at: Duration, pcm: &[i16]) {
        self.pcm.extend(pcm);
        self.end = at;
        let most = samples(KEPT);
        if self.pcm.len() > most {
            self.pcm.drain(..self.pcm.len() - most);
        }
    }

    pub(super) fn silence(&mut self, at: Duration, length: Duration) {
        let zeros = samples(length.min(KEPT));
        self.pcm.extend(std::iter::repeat_n(0, zeros));
        self.push(at, &[]);
    }

    pub(super) fn forget(&mut self, before: Duration) {
        let keep = samples(self.end.saturating_sub(before)).min(self.pcm.len());
        self.pcm.drain(..self.pcm.len() - keep);
    }

    /// What a turn is judged by that began at `from` and pauses at `to`.
    pub(super) fn judged_by(&self, from: Duration, to: Duration) -> Vec<i16> {
        let window = Duration::from_secs(smart_turn::WINDOW as u64) / RATE;
        self.between(from.max(to.saturating_sub(window)), to)
    }

    fn between(&self, from: Duration, to: Duration) -> Vec<i16> {
        let index = |at: Duration| self.pcm.len().saturating_sub(samples(self.end.saturating_sub(at)));
        let (from, to) = (index(from), index(to));
        self.pcm.range(from..to.max(from)).copied().collect()
    }
}

fn samples(time: Duration) -> usize {
    (time.as_micros() * u128::from(RATE) / 1_000_000) as usize
}

type Reply = std::pin::Pin<Box<dyn Future<Output = (u64, Instant, Result<Option<Words>, Trouble>)> + Send>>;

struct Ear {
    machine: Machine,
    asked: Asked,
    sound: Sound,
    language: Option<String>,
    requests: FuturesUnordered<Reply>,
    /// Of the requests that are under way.
    stops: VecDeque<(u64, Stop)>,
    recogniser: Arc<dyn Recogniser>,
    pulse: Pulse,
    /// Why the last request failed.
    trouble: Option<String>,
    tell: Teller,
}

/// Why sound is lost between a call and its ear.
pub(super) const BUSY: &str = "this machine is too busy to listen";

/// Call time by the frames that come: when it was zero, by the last of them.
#[derive(Debug, Default)]
pub(super) struct Pulse(Option<Instant>);

impl Pulse {
    /// Call time; zero before the first frame.
    pub(super) fn now(&self) -> Duration {
        self.0.map_or(Duration::ZERO, |origin| clock::now().saturating_duration_since(origin))
    }

    /// When it is `at` in the call; never before the first frame.
    pub(super) fn instant_of(&self, at: Duration) -> Option<Instant> {
        self.0.map(|origin| origin + at)
    }

    /// A piece of sound ended at `at`.
    pub(super) fn beat(&mut self, at: Duration) {
        self.0 = clock::now().checked_sub(at);
    }
}

/// Tells the call.
pub(super) struct Teller(mpsc::Sender<HearEvent>);

impl Teller {
    pub(super) fn deaf(&self, lost: Duration, reason: String) {
        metrics::histogram!("antiphon_deaf_seconds").record(lost);
        self.tell(HearEvent::Deaf { lost, reason });
    }

    pub(super) fn tell(&self, event: HearEvent) {
        // overflow: drops; a call that reads none of 64 events has hung, and its end will be told by others
        if self.0.try_send(event).is_err() {
            tracing::debug!("an event of the recogniser found no call to take it");
        }
    }
}

impl Ear {
    async fn run(mut self, mut items: mpsc::Receiver<Item>) {
        let mut alarm = std::pin::pin!(sleep_until(Alarm::now()));
        loop {
            self.act();
            let deadline = self.machine.deadline().and_then(|at| self.pulse.instant_of(at));
            if let Some(deadline) = deadline {
                alarm.as_mut().reset(deadline.into());
            }
            tokio::select! {
                item = items.recv() => match item {
                    Some(Item::Sound(piece)) => self.take(piece),
                    Some(Item::Listen(listen)) => self.listen(listen),
                    None => break,
                },
                Some((id, asked, result)) = self.requests.next(), if !self.requests.is_empty() => {
                    self.answered(id, asked, result);
                }
                (id, complete) = self.asked.answer() => {
                    self.machine.judged(self.pulse.now(), id, complete >= smart_turn::COMPLETE);
                }
                () = &mut alarm, if deadline.is_some() => self.machine.tick(self.pulse.now()),
            }
        }
        for (_, stop) in self.stops {
            stop.set();
        }
    }

    fn take(&mut self, Piece { at, heard, quiet, lost }: Piece) {
        self.pulse.beat(at);
        if !lost.is_zero() {
            self.sound.silence(at, lost);
            self.tell.deaf(lost, BUSY.into());
        }
        match heard {
            Heard::Frame(pcm) => self.sound.push(at, &*pcm),
            Heard::Silence(length) => self.sound.silence(at, length),
        }
        self.machine.frame(at, quiet);
    }

    fn listen(&mut self, listen: Listen) {
        if let Some(wanted) = listen.partials {
            self.machine.want_partials(wanted);
        }
        if listen.language.is_some() {
            self.language = listen.language;
        }
        if listen.expect.is_some() {
            self.machine.expect(listen.expect);
        }
    }

    fn answered(&mut self, id: u64, asked: Instant, result: Result<Option<Words>, Trouble>) {
        self.stops.retain(|(known, _)| *known != id);
        let kind = self.recogniser.kind();
        match result {
            Ok(Some(words)) => {
                let took = clock::now().saturating_duration_since(asked);
                metrics::histogram!("antiphon_recognizer_seconds", "kind" => kind).record(took);
                self.machine.recognised(self.pulse.now(), id, words);
            }
            // Given up: the result is not waited for.
            Ok(None) => {}
            Err(trouble) => {
                if trouble != Trouble::Busy {
                    metrics::counter!("antiphon_recognizer_errors_total", "kind" => kind).increment(1);
                    self.trouble = Some(trouble.to_string());
                }
                self.machine.failed(self.pulse.now(), id);
            }
        }
    }

    fn act(&mut self) {
        while let Some(action) = self.machine.poll() {
            match action {
                Action::Recognise { id, from, to, urgent } => {
                    let (stop, asked) = (Stop::default(), clock::now());
                    self.stops.push_back((id, stop.clone()));
                    let pcm = self.sound.between(from, to);
                    let answer =
                        self.recogniser.recognise(Request { pcm, language: self.language.clone(), urgent, stop });
                    self.requests.push(Box::pin(async move { (id, asked, answer.await) }));
                }
                Action::Cancel { id } => {
                    if let Some((_, stop)) = self.stops.iter().find(|(known, _)| *known == id) {
                        stop.set();
                    }
                }
                Action::Judge { id, from, to } => self.asked.ask(id, self.sound.judged_by(from, to)),
                Action::Forget { before } => self.sound.forget(before),
                Action::Event(event) => self.tell.tell(HearEvent::Turn(event)),
                Action::Deaf { lost } => {
                    let reason = self.trouble.clone().unwrap_or_else(|| "the recogniser failed".into());
                    self.tell.deaf(lost, reason);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hear::{Answer, Phase};

    #[test]
    fn sound_is_found_by_its_time_and_bounded() {
        let mut sound = Sound::default();
        for n in 0..100u64 {
            sound.push(Duration::from_millis(20 * (n + 1)), &[n as i16; FRAME]);
        }
        let between =
            |sound: &Sound, from: u64, to: u64| sound.between(Duration::from_millis(from), Duration::from_millis(to));
        assert_eq!(between(&sound, 20, 60), [[1; FRAME], [2; FRAME]].concat());
        sound.forget(Duration::from_millis(1_980));
        assert_eq!(sound.pcm.len(), FRAME);
        assert_eq!(between(&sound, 0, 9_000), [99; FRAME]);
        sound.silence(Duration::from_secs(3_600), Duration::from_secs(3_598));
        assert_eq!(sound.pcm.len(), samples(KEPT));
    }

    /// Answers what the script says, one line a request.
    struct Script(std::sync::Mutex<VecDeque<Result<&'static str, Trouble>>>);

    impl Recogniser for Script {
        fn kind(&self) -> &'static str {
            "script"
        }

        fn recognise(&self, request: Request) -> Answer {
            assert!(request.pcm.len() > 320 * 20, "the turn's sound comes with it");
            let line = self.0.lock().expect("unpoisoned").pop_front().unwrap_or(Ok(""));
            let words = |text: &str| Words { text: text.into(), language: "en".into(), confidence: 0.8 };
            Box::pin(async move { line.map(|text| Some(words(text))) })
        }
    }

    /// Speaks and pauses once, by the frames' own clock.
    async fn converse(lines: Vec<Result<&'static str, Trouble>>) -> Vec<HearEvent> {
        let script = Arc::new(Script(std::sync::Mutex::new(lines.into())));
        let ears = Ears::new(script, None, Turns::default(), String::new(), tokio::runtime::Handle::current());
        let (mut feed, mut told) = ears.open();
        let (mut events, mut at) = (Vec::new(), Duration::ZERO);
        let mut quiet = Duration::ZERO;
        while events.iter().all(|event| !matches!(event, HearEvent::Turn(t) if t.phase == Phase::EndOfTurn)) {
            at += Duration::from_millis(20);
            if at > Duration::from_secs(1) {
                quiet += Duration::from_millis(20);
            }
            feed.frame(at, &[1_000; FRAME], Some(quiet).filter(|quiet| quiet.as_millis() < 480));
            tokio::task::yield_now().await;
            while let Ok(event) = told.try_recv() {
                events.push(event);
            }
            assert!(at < Duration::from_secs(60), "no end: {events:?}");
        }
        drop(feed);
        while let Some(event) = told.recv().await {
            events.push(event);
        }
        events
    }

    #[tokio::test]
    async fn a_turn_is_heard_and_the_task_ends_with_the_call() {
        let events = converse(vec![Ok("Yes please.")]).await;
        let phases: Vec<_> = events
            .iter()
            .map(|event| match event {
                HearEvent::Turn(turn) => (turn.phase, turn.text.as_str()),
                HearEvent::Deaf { .. } => panic!("{event:?}"),
            })
            .collect();
        let text = "Yes please.";
        assert_eq!(phases, [(Phase::StartOfTurn, ""), (Phase::EagerEndOfTurn, text), (Phase::EndOfTurn, text)]);
    }

    #[tokio::test]
    async fn a_recogniser_that_fails_twice_makes_the_call_deaf_once() {
        let failed = || Err(Trouble::Failed("connection refused".into()));
        let events = converse(vec![failed(), failed()]).await;
        let deaf: Vec<_> = events.iter().filter(|event| matches!(event, HearEvent::Deaf { .. })).collect();
        assert!(matches!(&deaf[..], [HearEvent::Deaf { reason, .. }] if reason == "connection refused"), "{events:?}");
        let again = converse(vec![failed(), Ok("Once more.")]).await;
        assert!(matches!(again.last(), Some(HearEvent::Turn(turn)) if turn.text == "Once more."), "{again:?}");
    }

    /// Keeps what it is asked about.
    struct Keeps(std::sync::Mutex<Vec<Vec<i16>>>);

    impl Recogniser for Keeps {
        fn kind(&self) -> &'static str {
            "keeps"
        }

        fn recognise(&self, request: Request) -> Answer {
            self.0.lock().expect("unpoisoned").push(request.pcm);
            Box::pin(async { Ok(Some(Words { text: "Yes.".into(), language: "en".into(), confidence: 0.8 })) })
        }
    }

    #[tokio::test]
    async fn sound_that_finds_no_room_is_missing_where_it_was_lost() {
        let kept = Arc::new(Keeps(std::sync::Mutex::default()));
        let ears = Ears::new(kept.clone(), None, Turns::default(), String::new(), tokio::runtime::Handle::current());
        let (mut feed, mut told) = ears.open();
        let frames = |n: usize| crate::audio::FRAME * n as u32;
        // The task does not run while this does not wait.
        for n in 0..FRAMES + 47 {
            feed.frame(frames(n + 1), &[1; FRAME], Some(Duration::ZERO));
        }
        feed.silence(frames(FRAMES + 50), frames(3), Some(Duration::ZERO));
        assert_eq!(feed.lost, frames(50));
        while feed.items.capacity() < FRAMES {
            tokio::task::yield_now().await;
        }
        // A second of voice, then the pause in which words are asked for.
        for n in FRAMES + 50..FRAMES + 120 {
            let quiet = frames((n + 1).saturating_sub(FRAMES + 100));
            feed.frame(frames(n + 1), &[2; FRAME], Some(quiet));
        }
        let mut deaf = Vec::new();
        while kept.0.lock().expect("unpoisoned").is_empty() {
            tokio::task::yield_now().await;
        }
        drop(feed);
        while let Some(event) = told.recv().await {
            deaf.extend(match event {
                HearEvent::Deaf { lost, reason } => Some((lost, reason)),
                HearEvent::Turn(_) => None,
            });
        }
        assert_eq!(deaf, [(frames(50), BUSY.to_owned())], "told once");
        let asked = kept.0.lock().expect("unpoisoned");
        let sound: Vec<i16> = asked[0].chunks_exact(FRAME).map(|frame| frame[0]).collect();
        assert!(asked[0].chunks_exact(FRAME).all(|frame| frame.iter().all(|s| *s == frame[0])), "whole frames");
        let (heard, rest) = sound.split_at(FRAMES);
        let (lost, after) = rest.split_at(50);
        assert!(heard.iter().all(|s| *s == 1) && lost.iter().all(|s| *s == 0), "{sound:?}");
        assert!(after.len() >= 50 && after.iter().all(|s| *s == 2), "{sound:?}");
    }

    #[tokio::test]
    async fn a_wish_that_finds_no_room_goes_before_the_next_sound_that_does() {
        let (mut feed, mut frames) = Feed::detached();
        for n in 0..FRAMES as u64 {
            feed.frame(Duration::from_millis(20 * n), &[0; FRAME], None);
        }
        feed.listen(Listen { partials: Some(true), ..Listen::default() });
        feed.listen(Listen { expect: Some(Expect::Digits), ..Listen::default() });
        assert_eq!(feed.lost, Duration::ZERO, "a wish is no sound");
        for _ in 0..2 {
            frames.0.try_recv().expect("a frame");
        }
        feed.frame(Duration::from_secs(6), &[0; FRAME], None);
        let mut rest = std::iter::from_fn(|| frames.0.try_recv().ok()).skip(FRAMES - 2);
        let wished = Listen { partials: Some(true), language: None, expect: Some(Expect::Digits) };
        assert!(matches!(rest.next(), Some(Item::Listen(listen)) if listen == wished));
        assert!(matches!(rest.next(), Some(Item::Sound(Piece { lost: Duration::ZERO, .. }))));
    }
}
