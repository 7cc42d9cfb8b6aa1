//! The link of one call to the services that recognise its caller: a state machine without I/O.
//!
//! Owns the sound that has no final words yet, which connection is used, and when to give up. All times are call time.
//!
//! Contract: after every call [`Link::poll`] until it returns nothing and carry out the actions in order; then again at
//! [`Link::deadline`], by [`Link::tick`].
//!
//! # Why
//! - A service that dies must not cost what the caller said: sound is kept until its words are final, and is sent again
//!   on the next connection, faster than it was spoken.
//! - The next connection goes to the next service, where there is one: what failed once fails again.
//! - Services are paid by the minute. Sound is sent while somebody speaks, and a little longer; then the connection is
//!   only kept open. So a service's clock and the call's differ, and a table leads from the one to the other.

use std::collections::VecDeque;
use std::time::Duration;

use super::protocol::{Dialect, Message, Said, Talk};
use crate::audio::FRAME;
use crate::hear::ear::FRAME as SAMPLES;
use crate::hear::turn::Streamed;

/// Frames of one message: Deepgram recommends 80 ms.
const CHUNK: usize = 4;
/// The most sound that is kept: longer than any stretch without final words.
const KEPT: usize = 1_500;
/// Sound that is kept while the caller is silent: what comes before the onset belongs to the turn.
const LEAD: usize = 30;
/// How long sound is sent behind the last voice: what services need to find the end of a sentence.
const LINGER: Duration = Duration::from_millis(1_200);
/// The same for a service that finds the ends of turns itself.
const LINGER_TURNS: Duration = Duration::from_secs(6);
/// Between two signs of life on an idle connection; Deepgram closes one after ten seconds.
const KEEP_ALIVE: Duration = Duration::from_secs(4);
/// How long a connection may take to open.
const OPENING: Duration = Duration::from_secs(5);
/// The first pause before a service is tried again, once all have failed; it doubles.
const BACK_OFF: Duration = Duration::from_millis(250);
/// The longest such pause.
const LONGEST_PAUSE: Duration = Duration::from_secs(5);

/// A service, as far as the link needs to know it.
#[derive(Clone, Debug)]
pub struct Way {
    /// Its protocol.
    pub dialect: Dialect,
    /// Its model, where one is named.
    pub model: Option<String>,
}

/// What the driver has to do.
#[derive(Clone, Debug, PartialEq)]
pub enum Action {
    /// Open a connection to this service, in place of any other, and tell [`Link::opened`] or [`Link::failed`].
    Connect(usize),
    /// Send a message on the connection.
    Send {
        /// Which.
        message: Message,
        /// How much of the caller's sound it carries: what the service is paid for.
        sound: Duration,
    },
    /// Send a WebSocket ping.
    Ping,
    /// Close the connection.
    Close,
    /// Words came.
    Words(Streamed),
    /// A service failed, for people; it is being made up for.
    Trouble {
        /// Which.
        service: usize,
        /// Why.
        reason: String,
    },
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum State {
    /// Until then nothing is tried.
    Waiting(Duration),
    Opening(Duration),
    Open,
}

/// The link of one call.
pub struct Link {
    ways: Vec<Way>,
    language: Option<String>,
    patience: Duration,
    service: usize,
    state: State,
    /// In a row, over all services.
    failures: u32,
    talk: Option<Talk>,
    /// Frames without final words, oldest first, each with the call time of its end.
    kept: VecDeque<(Duration, [i16; SAMPLES])>,
    /// How many of them were sent on this connection.
    sent: usize,
    /// Beginnings of stretches of sound without a hole: on the connection, and in the call.
    stretches: VecDeque<(Duration, Duration)>,
    /// Somebody speaks, or spoke until then.
    voice: Option<Duration>,
    /// Words are due for the sound until the first, by the second.
    awaited: Option<(Duration, Duration)>,
    /// When something was sent last.
    spoke: Duration,
    out: VecDeque<Action>,
}

impl Link {
    /// A link that opens at once. `patience`: how long a service may take with its words behind a pause.
    pub fn new(ways: Vec<Way>, language: Option<String>, patience: Duration) -> Self {
        let mut link = Self {
            ways,
            language,
            patience,
            service: 0,
            state: State::Waiting(Duration::ZERO),
            failures: 0,
            talk: None,
            kept: VecDeque::new(),
            sent: 0,
            stretches: VecDeque::new(),
            voice: None,
            awaited: None,
            spoke: Duration::ZERO,
            out: VecDeque::new(),
        };
        link.connect(Duration::ZERO);
        link
    }

    /// The next thing to do.
    pub fn poll(&mut self) -> Option<Action> {
        self.out.pop_front()
    }

    /// When to call [`Link::tick`] at the latest.
    pub fn deadline(&self) -> Duration {
        match self.state {
            State::Waiting(until) => until,
            State::Opening(since) => since + OPENING,
            State::Open => self.awaited.map_or(self.spoke + KEEP_ALIVE, |(_, by)| by.min(self.spoke + KEEP_ALIVE)),
        }
    }

    /// Time has passed.
    pub fn tick(&mut self, now: Duration) {
        match self.state {
            State::Waiting(until) if until <= now => self.connect(now),
            State::Opening(since) if since + OPENING <= now => self.failed(now, "no connection in time".into()),
            State::Open if self.awaited.is_some_and(|(_, by)| by <= now) => {
                self.failed(now, "no words in time".into());
            }
            State::Open if self.spoke + KEEP_ALIVE <= now => {
                self.spoke = now;
                let keep = self.talk.as_ref().and_then(Talk::keep_alive);
                self.out.push_back(keep.map_or(Action::Ping, control));
            }
            _ => {}
        }
    }

    /// A frame has passed. `open`: it belongs to a turn of the caller.
    pub fn frame(&mut self, now: Duration, pcm: &[i16; SAMPLES], open: bool) {
        if open {
            self.voice = Some(now);
        }
        self.kept.push_back((now, *pcm));
        let turns = self.talk.as_ref().is_some_and(Talk::wants_silence);
        let linger = if turns { LINGER_TURNS } else { LINGER };
        let wanted = self.voice.is_some_and(|voice| now.saturating_sub(voice) <= linger);
        let most = if wanted || self.awaited.is_some() { KEPT } else { LEAD };
        while self.kept.len() > most {
            self.kept.pop_front();
            self.sent = self.sent.saturating_sub(1);
        }
        if wanted && self.kept.len() - self.sent >= CHUNK {
            self.send(now);
        }
    }

    /// The caller pauses: words are waited for.
    pub fn pause(&mut self, now: Duration) {
        self.awaited = Some((now, now + self.patience));
        self.send(now);
        self.finish(now);
    }

    /// The caller speaks on, or the turn is over: no words are waited for.
    pub fn resume(&mut self) {
        self.awaited = None;
    }

    /// The caller's turn has ended: what was said is not needed any more.
    pub fn turn_over(&mut self) {
        self.awaited = None;
        let turns = self.talk.as_ref().is_some_and(Talk::wants_silence);
        if !turns {
            self.voice = None;
        }
    }

    /// The caller speaks another language from now on.
    pub fn speak(&mut self, now: Duration, language: &str) {
        if self.language.as_deref() != Some(language) {
            self.language = Some(language.to_owned());
            self.out.push_back(Action::Close);
            self.connect(now);
        }
    }

    /// The connection is open: what has no final words is sent again.
    pub fn opened(&mut self, now: Duration) {
        let way = &self.ways[self.service];
        let talk = Talk::new(way.dialect, way.model.as_deref(), self.language.as_deref());
        self.state = State::Open;
        self.spoke = now;
        self.sent = 0;
        self.stretches.clear();
        if let Some(hello) = talk.hello() {
            self.out.push_back(control(hello));
        }
        self.talk = Some(talk);
        if self.voice.is_some_and(|voice| now.saturating_sub(voice) <= LINGER) || self.awaited.is_some() {
            self.send(now);
        }
        if self.awaited.is_some() {
            // The next service has as long as the one before.
            self.awaited = Some((now, now + self.patience));
            self.finish(now);
        }
    }

    /// A message of the service.
    pub fn message(&mut self, now: Duration, text: &str) {
        let Some(talk) = &mut self.talk else { return };
        let (held, read) = (!talk.takes_sound(), talk.read(text));
        let released = held && talk.takes_sound();
        match read {
            Ok(None) => {}
            Ok(Some(Said::Words { words, until, fixed, ended, eager })) => {
                self.failures = 0;
                let until = self.in_call(until).min(now);
                if fixed {
                    self.forget(until);
                }
                self.awaited = self.awaited.filter(|(sound, _)| !(fixed || ended) || until + FRAME * 10 < *sound);
                self.out.push_back(Action::Words(Streamed { words, until, fixed, ended, eager }));
                // The caller has gone on, and paused, while it thought.
                if released && self.awaited.is_some() {
                    self.send(now);
                    self.finish(now);
                }
            }
            Ok(Some(Said::Failed(reason))) | Err(reason) => self.failed(now, reason),
        }
    }

    /// There is no connection, or none any more.
    pub fn failed(&mut self, now: Duration, reason: String) {
        self.talk = None;
        self.sent = 0;
        self.out.push_back(Action::Trouble { service: self.service, reason });
        self.out.push_back(Action::Close);
        self.failures += 1;
        self.service = (self.service + 1) % self.ways.len();
        let rounds = self.failures as usize / self.ways.len();
        if rounds == 0 {
            return self.connect(now);
        }
        let pause = BACK_OFF * 2u32.saturating_pow((rounds as u32 - 1).min(8));
        self.state = State::Waiting(now + pause.min(LONGEST_PAUSE));
    }

    fn connect(&mut self, now: Duration) {
        self.talk = None;
        self.state = State::Opening(now);
        self.out.push_back(Action::Connect(self.service));
    }

    /// Sends what was not sent yet.
    fn send(&mut self, now: Duration) {
        let Some(talk) = self.talk.as_mut().filter(|talk| talk.takes_sound()) else { return };
        while self.sent < self.kept.len() {
            self.out.extend(talk.begin().map(control));
            let mut pcm = Vec::with_capacity(CHUNK * SAMPLES);
            let begins = self.kept[self.sent].0.saturating_sub(FRAME);
            let mut at = begins;
            while pcm.len() < CHUNK * SAMPLES
                && let Some((end, frame)) = self.kept.get(self.sent)
                // A hole ends the stretch.
                && end.saturating_sub(FRAME) <= at + FRAME / 2
            {
                pcm.extend_from_slice(frame);
                at = *end;
                self.sent += 1;
            }
            let offset = talk.sent();
            let follows = self
                .stretches
                .back()
                .is_some_and(|(from, call)| (*call + offset.saturating_sub(*from)).abs_diff(begins) <= FRAME / 2);
            if !follows {
                self.stretches.push_back((offset, begins));
            }
            self.spoke = now;
            let message = talk.sound(&pcm);
            self.out.push_back(Action::Send { message, sound: talk.sent().saturating_sub(offset) });
        }
        // Only what words may still come for.
        while self.stretches.len() > 64 {
            self.stretches.pop_front();
        }
    }

    fn finish(&mut self, now: Duration) {
        if let Some(message) = self.talk.as_mut().and_then(Talk::pause) {
            self.spoke = now;
            self.out.push_back(control(message));
        }
    }

    /// Call time of a time on the connection.
    fn in_call(&self, until: Duration) -> Duration {
        let stretch = self.stretches.iter().rev().find(|(from, _)| *from < until).or(self.stretches.front());
        stretch.map_or(Duration::ZERO, |(from, call)| *call + until.saturating_sub(*from))
    }

    /// Words for the sound until then are final.
    fn forget(&mut self, until: Duration) {
        while self.kept.front().is_some_and(|(end, _)| *end <= until) && self.sent > 0 {
            self.kept.pop_front();
            self.sent -= 1;
        }
    }
}

/// A message without sound.
fn control(message: Message) -> Action {
    Action::Send { message, sound: Duration::ZERO }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn ms(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    struct World {
        link: Link,
        now: Duration,
        connects: Vec<usize>,
        /// Bytes of sound on this connection.
        sound: usize,
        /// Sound on all connections.
        paid: Duration,
        texts: Vec<Value>,
        words: Vec<(String, Duration, bool)>,
        troubles: Vec<usize>,
        pings: usize,
    }

    impl World {
        fn new(dialects: &[Dialect]) -> Self {
            let ways = dialects.iter().map(|dialect| Way { dialect: *dialect, model: None }).collect();
            let mut world = Self {
                link: Link::new(ways, None, ms(2_000)),
                now: Duration::ZERO,
                connects: Vec::new(),
                sound: 0,
                paid: Duration::ZERO,
                texts: Vec::new(),
                words: Vec::new(),
                troubles: Vec::new(),
                pings: 0,
            };
            world.act();
            world
        }

        fn act(&mut self) {
            while let Some(action) = self.link.poll() {
                match action {
                    Action::Connect(service) => {
                        self.connects.push(service);
                        (self.sound, self.texts) = (0, Vec::new());
                    }
                    Action::Send { message, sound } => {
                        self.paid += sound;
                        match message {
                            Message::Binary(pcm) => self.sound += pcm.len(),
                            Message::Text(text) => self.texts.push(serde_json::from_str(&text).expect("JSON")),
                        }
                    }
                    Action::Ping => self.pings += 1,
                    Action::Close => {}
                    Action::Words(said) => self.words.push((said.words.text, said.until, said.fixed)),
                    Action::Trouble { service, .. } => self.troubles.push(service),
                }
            }
        }

        fn with(&mut self, input: impl FnOnce(&mut Link, Duration)) {
            input(&mut self.link, self.now);
            self.act();
        }

        fn sound(&mut self, time: u64, open: bool) {
            for _ in 0..time / 20 {
                self.now += FRAME;
                self.with(|link, now| {
                    link.frame(now, &[7; SAMPLES], open);
                    link.tick(now);
                });
            }
        }

        fn results(&mut self, start: f64, duration: f64, text: &str, fixed: bool) {
            let alternative = json!({ "transcript": text, "confidence": 0.9 });
            let message = json!({
                "type": "Results", "start": start, "duration": duration, "is_final": fixed,
                "channel": { "alternatives": [alternative] },
            });
            self.with(|link, now| link.message(now, &message.to_string()));
        }

        fn kinds(&self) -> Vec<&str> {
            self.texts.iter().map(|text| text["type"].as_str().expect("a type")).collect()
        }
    }

    #[test]
    fn words_are_placed_in_the_call_though_silence_is_not_sent() {
        let mut world = World::new(&[Dialect::Listen]);
        world.with(Link::opened);
        world.sound(10_000, false);
        assert_eq!(world.sound, 0, "silence costs nothing");
        assert_eq!(world.kinds(), ["KeepAlive", "KeepAlive"]);
        world.sound(1_000, true);
        world.with(Link::pause);
        assert_eq!(world.kinds().last(), Some(&"Finalize"));
        // The lead of 600 ms and a second of voice.
        assert_eq!(world.sound, (600 + 1_000) * 32);
        world.results(0.0, 1.6, "two tickets", true);
        let (text, until, fixed) = world.words.pop().expect("words");
        assert_eq!((text.as_str(), until, fixed), ("two tickets", ms(11_000), true));
        world.with(|link, _| link.turn_over());
        world.sound(20_000, false);
        let before = world.sound;
        world.sound(500, true);
        assert_eq!(world.sound - before, (600 + 500) * 32, "and the next turn begins where it was");
        world.results(1.6, 1.1, "please", false);
        assert_eq!(world.words.pop().expect("words").1, ms(31_500));
    }

    #[test]
    fn a_connection_that_breaks_gets_the_sound_again_that_has_no_final_words() {
        let mut world = World::new(&[Dialect::Listen, Dialect::Listen]);
        world.with(Link::opened);
        world.sound(2_000, true);
        world.results(0.0, 1.0, "I would like", true);
        world.with(|link, now| link.failed(now, "it broke".into()));
        assert_eq!((world.connects.as_slice(), world.troubles.as_slice()), (&[0, 1][..], &[0][..]));
        world.sound(400, true);
        world.with(Link::opened);
        assert_eq!(world.sound, 1_400 * 32, "all behind the final words, also what came meanwhile");
        world.results(0.0, 1.4, "a table", true);
        assert_eq!(world.words.last().expect("words"), &("a table".into(), ms(2_400), true));
        assert!(world.link.kept.is_empty());
    }

    #[test]
    fn a_service_that_is_slow_or_gone_is_left_and_tried_again_after_longer_and_longer_pauses() {
        let mut world = World::new(&[Dialect::Listen, Dialect::Flux]);
        world.with(Link::opened);
        world.sound(1_000, true);
        world.with(Link::pause);
        world.sound(1_980, false);
        assert_eq!(world.connects, [0]);
        world.sound(40, false);
        assert_eq!(world.connects, [0, 1], "no words in time");
        world.with(Link::opened);
        assert!(world.sound >= 1_000 * 32, "the second hears all of it");
        for _ in 0..3 {
            world.with(|link, now| link.failed(now, "gone".into()));
        }
        let count = world.connects.len();
        world.sound(200, false);
        assert_eq!(world.connects.len(), count, "not at once");
        world.sound(3_000, false);
        assert!(world.connects.len() > count);
        world.sound(6_000, false);
        assert!(world.troubles.len() >= 5, "a connection that does not open has failed");
    }

    #[test]
    fn rubbish_and_errors_of_a_service_are_failures() {
        for message in ["", "[]", "{", r#"{"type":"Error","description":"no\u0007 credit"}"#] {
            let mut world = World::new(&[Dialect::Listen]);
            world.with(Link::opened);
            world.with(|link, now| link.message(now, message));
            assert_eq!(world.troubles, [0], "{message}");
        }
        let mut world = World::new(&[Dialect::Listen]);
        world.with(Link::opened);
        world.results(-5.0, f64::MAX, "far away", false);
        world.with(|link, now| link.message(now, r#"{"type":"Metadata"}"#));
        assert!(world.troubles.is_empty());
    }

    #[test]
    fn openai_is_told_the_format_and_commits_at_pauses() {
        let mut world = World::new(&[Dialect::OpenAi]);
        world.with(Link::opened);
        assert_eq!(world.texts[0]["session"]["audio"]["input"]["format"]["rate"], 24_000);
        world.sound(1_000, true);
        world.with(Link::pause);
        assert_eq!(world.kinds().last(), Some(&"input_audio_buffer.commit"));
        let id = "item_1";
        for message in [
            json!({ "type": "input_audio_buffer.committed", "item_id": id }),
            json!({ "type": "conversation.item.input_audio_transcription.delta", "item_id": id, "delta": "Hel" }),
            json!({ "type": "conversation.item.input_audio_transcription.completed", "item_id": id, "transcript": "Hello." }),
        ] {
            world.with(|link, now| link.message(now, &message.to_string()));
        }
        assert_eq!(world.words, [("Hel".into(), ms(1_000), false), ("Hello.".into(), ms(1_000), true)]);
        assert_eq!(world.paid, ms(1_000), "what is paid for is counted once, whatever it is sent as");
        world.sound(8_000, false);
        assert!(world.pings > 0 && world.troubles.is_empty(), "an idle connection is kept");
    }

    #[test]
    fn vllm_is_begun_and_ended_for_each_utterance_and_sent_nothing_while_it_thinks() {
        let mut world = World::new(&[Dialect::Vllm]);
        world.with(Link::opened);
        assert_eq!(world.texts[0], json!({ "type": "session.update", "model": null }));
        assert_eq!(world.texts.len(), 1, "nothing is begun before somebody speaks");
        world.sound(1_000, true);
        world.with(Link::pause);
        let kinds = world.kinds();
        assert_eq!(kinds[1], "input_audio_buffer.commit");
        assert!(kinds[2..kinds.len() - 1].iter().all(|kind| *kind == "input_audio_buffer.append"), "{kinds:?}");
        assert_eq!(world.texts.last().expect("some")["final"], true);
        assert_eq!(world.paid, ms(1_000));
        // The caller goes on and pauses again before the words of the first part are there.
        let sent = world.texts.len();
        world.with(|link, _| link.resume());
        world.sound(500, true);
        world.with(Link::pause);
        assert_eq!(world.texts.len(), sent, "what is sent now would be lost");
        world.with(|link, now| link.message(now, r#"{"type":"transcription.delta","delta":"Two"}"#));
        world.with(|link, now| link.message(now, r#"{"type":"transcription.done","text":"Two tickets","usage":null}"#));
        assert_eq!(world.words, [("Two".into(), ms(1_000), false), ("Two tickets".into(), ms(1_000), true)]);
        assert_eq!((world.texts[sent]["final"].is_null(), world.kinds()[sent]), (true, "input_audio_buffer.commit"));
        assert_eq!(world.texts.last().expect("some")["final"], true, "the second part was asked about at once");
        assert_eq!(world.paid, ms(1_500));
        world.with(|link, now| link.message(now, r#"{"type":"transcription.done","text":"to Bonn."}"#));
        assert_eq!(world.words.last().expect("words"), &("to Bonn.".into(), ms(1_500), true));
        world.with(|link, now| link.message(now, r#"{"type":"error","error":"no such model","code":"x"}"#));
        assert_eq!(world.troubles, [0]);
    }

    #[test]
    fn flux_says_itself_where_a_turn_ends() {
        let mut world = World::new(&[Dialect::Flux]);
        world.with(Link::opened);
        world.sound(1_000, true);
        for (event, until) in [("Update", 0.5), ("EagerEndOfTurn", 0.9), ("EndOfTurn", 1.0)] {
            let message = json!({
                "type": "TurnInfo", "event": event, "turn_index": 0, "audio_window_start": 0.0,
                "audio_window_end": until, "transcript": "Good morning.", "words": [], "end_of_turn_confidence": 0.8,
            });
            world.with(|link, now| link.message(now, &message.to_string()));
        }
        let fixed: Vec<bool> = world.words.iter().map(|(.., fixed)| *fixed).collect();
        assert_eq!(fixed, [false, false, true]);
        assert_eq!(world.words[2].1, ms(1_000));
    }
}
