//! Callers on a script: voice and pauses frame by frame, words when the test says so.

use super::*;

const FRAME: Duration = Duration::from_millis(20);

fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

/// A machine with a caller in front of it, who has said nothing for a second.
struct Caller {
    machine: Machine,
    now: Duration,
    /// When the last voice was; the detector counts 480 ms after it as speaking.
    voice: Option<Duration>,
    requests: Vec<(u64, Duration, Duration, bool)>,
    cancelled: Vec<u64>,
    events: Vec<(Phase, String)>,
    deaf: Vec<Duration>,
    questions: Vec<(u64, Duration, Duration)>,
}

impl Caller {
    fn new(source: Source) -> Self {
        let delays = Delays { min: ms(350), max: ms(1_800) };
        let mut caller = Self {
            machine: Machine::new(delays, source),
            now: Duration::ZERO,
            voice: None,
            requests: Vec::new(),
            cancelled: Vec::new(),
            events: Vec::new(),
            deaf: Vec::new(),
            questions: Vec::new(),
        };
        caller.pause(1_000);
        caller
    }

    fn collect(&mut self) {
        while let Some(action) = self.machine.poll() {
            match action {
                Action::Recognise { id, from, to, urgent } => self.requests.push((id, from, to, urgent)),
                Action::Cancel { id } => self.cancelled.push(id),
                Action::Event(event) => self.events.push((event.phase, event.text)),
                Action::Deaf { lost } => self.deaf.push(lost),
                Action::Judge { id, from, to } => self.questions.push((id, from, to)),
                Action::Forget { .. } => {}
            }
        }
    }

    fn speak(&mut self, length: u64) {
        for _ in 0..length / 20 {
            self.now += FRAME;
            self.voice = Some(self.now);
            self.machine.frame(self.now, Some(Duration::ZERO));
            self.collect();
        }
    }

    fn pause(&mut self, length: u64) {
        for _ in 0..length / 20 {
            self.now += FRAME;
            let quiet = self.voice.map(|at| self.now - at).filter(|quiet| *quiet < ms(480));
            self.machine.frame(self.now, quiet);
            self.collect();
        }
    }

    /// Answers the last request.
    fn answer(&mut self, text: &str) {
        let id = self.requests.last().expect("words were asked for").0;
        let words = Words { text: text.into(), language: "en".into(), confidence: 0.9 };
        self.machine.recognised(self.now, id, words);
        self.collect();
    }

    fn phases(&self) -> Vec<Phase> {
        self.events.iter().map(|(phase, _)| *phase).collect()
    }

    /// How long after now the turn ends when nothing else happens.
    fn ends_after(&mut self) -> u64 {
        let before = self.now;
        while !self.phases().contains(&Phase::EndOfTurn) {
            assert!(self.now < before + ms(10_000), "the turn never ends: {:?}", self.machine);
            self.pause(20);
        }
        (self.now - before).as_millis() as u64
    }
}

#[test]
fn a_complete_answer_ends_after_the_short_delay_and_an_unfinished_one_after_the_long() {
    for (text, expected) in
        [("Yes.", 340..=380), ("I would like to", 1_780..=1_820), ("a table by the window", 800..=860)]
    {
        let mut caller = Caller::new(Source::Asked);
        caller.speak(800);
        caller.pause(220);
        caller.answer(text);
        let total = 220 + caller.ends_after();
        assert!(expected.contains(&total), "{text}: {total}");
        let (phase, said) = caller.events.last().expect("an end");
        assert_eq!((*phase, said.as_str()), (Phase::EndOfTurn, text));
        assert_eq!(caller.requests.len(), 1, "the words asked for in the pause are those of the end");
    }
}

#[test]
fn words_are_asked_for_before_the_end_with_the_sound_from_before_the_onset() {
    let mut caller = Caller::new(Source::Asked);
    caller.speak(800);
    caller.pause(200);
    let (_, from, to, urgent) = caller.requests[0];
    assert!(from <= ms(720) && to >= ms(1_980) && urgent, "{from:?} {to:?}");
}

#[test]
fn words_that_come_late_end_the_turn_when_they_come() {
    let mut caller = Caller::new(Source::Asked);
    caller.speak(800);
    caller.pause(3_000);
    assert_eq!(caller.phases(), [Phase::StartOfTurn]);
    caller.answer("Yes.");
    assert_eq!(caller.phases(), [Phase::StartOfTurn, Phase::EagerEndOfTurn, Phase::EndOfTurn]);
}

#[test]
fn a_caller_who_speaks_on_takes_the_end_back_and_the_words_are_those_of_both_parts() {
    let mut caller = Caller::new(Source::Asked);
    caller.speak(800);
    caller.pause(240);
    caller.answer("a table for two");
    caller.pause(100);
    assert_eq!(caller.phases(), [Phase::StartOfTurn, Phase::EagerEndOfTurn]);
    caller.speak(400);
    assert_eq!(caller.phases().last(), Some(&Phase::TurnResumed));
    caller.pause(220);
    let (_, from, _, _) = *caller.requests.last().expect("asked again");
    assert!(from <= ms(720), "all of it is recognised together: {from:?}");
    caller.answer("a table for two, please.");
    caller.ends_after();
    assert_eq!(caller.events.last().expect("an end").1, "a table for two, please.");
    assert_eq!(caller.phases().iter().filter(|phase| **phase == Phase::StartOfTurn).count(), 1);
}

#[test]
fn a_request_that_the_caller_overtakes_is_cancelled() {
    let mut caller = Caller::new(Source::Asked);
    caller.speak(800);
    caller.pause(240);
    caller.speak(200);
    assert_eq!(caller.cancelled, [0]);
    caller.pause(220);
    caller.machine.recognised(caller.now, 0, Words { text: "stale".into(), ..Words::default() });
    caller.answer("Fresh.");
    caller.ends_after();
    assert_eq!(caller.events.last().expect("an end").1, "Fresh.");
}

#[test]
fn the_delay_follows_the_callers_own_pauses() {
    let delay = |pauses: usize| {
        let mut caller = Caller::new(Source::Asked);
        caller.speak(600);
        for _ in 0..pauses {
            caller.pause(760);
            caller.answer("one thing");
            caller.speak(600);
        }
        caller.pause(220);
        caller.answer("one thing and another thing");
        caller.ends_after()
    };
    assert!(delay(3) > delay(0) + 80, "{} {}", delay(3), delay(0));
}

#[test]
fn a_long_turn_is_recognised_in_parts_that_stay() {
    let mut caller = Caller::new(Source::Asked);
    caller.speak(14_000);
    caller.pause(240);
    caller.answer("the first part and");
    caller.speak(2_000);
    caller.pause(240);
    let (_, from, _, _) = *caller.requests.last().expect("asked again");
    assert!(from > ms(14_900), "what stays is not recognised again: {from:?}");
    caller.answer("the second.");
    caller.ends_after();
    assert_eq!(caller.events.last().expect("an end").1, "the first part and the second.");
}

#[test]
fn a_caller_who_never_pauses_gets_an_end_at_the_upper_limit() {
    let mut caller = Caller::new(Source::Asked);
    caller.speak(60_400);
    caller.answer("on and on");
    caller.speak(400);
    assert!(caller.events.contains(&(Phase::EndOfTurn, "on and on".into())), "{:?}", caller.events);
    assert_eq!(caller.phases().last(), Some(&Phase::StartOfTurn), "and goes on in the next turn");
}

#[test]
fn noise_that_holds_no_words_ends_without_any() {
    let mut caller = Caller::new(Source::Asked);
    caller.speak(300);
    caller.pause(220);
    caller.answer("");
    caller.ends_after();
    assert_eq!(caller.events.last().expect("an end"), &(Phase::EndOfTurn, String::new()));
    assert!(!caller.phases().contains(&Phase::EagerEndOfTurn));
}

#[test]
fn a_failure_is_tried_again_once_and_then_told() {
    let mut caller = Caller::new(Source::Asked);
    caller.speak(1_000);
    caller.pause(220);
    caller.machine.failed(caller.now, 0);
    caller.collect();
    assert_eq!((caller.requests.len(), caller.deaf.len()), (2, 0));
    caller.machine.failed(caller.now, 1);
    caller.collect();
    assert_eq!(caller.deaf.len(), 1);
    assert!(caller.deaf[0] >= ms(1_000), "{:?}", caller.deaf);
    caller.ends_after();
    caller.speak(500);
    assert_eq!(caller.phases().last(), Some(&Phase::StartOfTurn), "the next turn is heard");
}

#[test]
fn partial_texts_come_where_they_are_wanted_and_only_when_they_change() {
    let mut caller = Caller::new(Source::Asked);
    caller.machine.want_partials(true);
    caller.speak(1_300);
    assert_eq!(caller.requests.len(), 1);
    assert!(!caller.requests[0].3, "nobody waits for it");
    caller.answer("I would");
    caller.speak(1_300);
    caller.answer("I would");
    caller.speak(1_300);
    caller.answer("I would like");
    let partials: Vec<&str> =
        caller.events.iter().filter(|(phase, _)| *phase == Phase::Partial).map(|(_, text)| text.as_str()).collect();
    assert_eq!(partials, ["I would", "I would like"]);
}

#[test]
fn what_the_agent_expects_holds_for_one_turn() {
    let mut caller = Caller::new(Source::Asked);
    caller.machine.expect(Some(Expect::Digits));
    caller.speak(800);
    caller.pause(220);
    caller.answer("4 5 7 1.");
    assert!(caller.ends_after() > 1_500);
    caller.events.clear();
    caller.speak(800);
    caller.pause(220);
    caller.answer("4 5 7 1.");
    assert!(caller.ends_after() < 300);
}

#[test]
fn a_service_that_streams_is_believed_when_it_says_the_turn_is_over() {
    let mut caller = Caller::new(Source::Streamed);
    caller.machine.want_partials(true);
    let words = |text: &str| Words { text: text.into(), language: "en".into(), confidence: 1.0 };
    caller.speak(1_000);
    let until = caller.now;
    caller.machine.streamed(caller.now, Streamed { words: words("two tick"), until, ..Streamed::default() });
    caller.pause(240);
    let fixed = Streamed { words: words("two tickets and"), until, fixed: true, ended: true, ..Streamed::default() };
    caller.machine.streamed(caller.now, fixed);
    caller.collect();
    assert!(caller.ends_after() <= 140);
    let texts: Vec<&str> = caller.events.iter().map(|(_, text)| text.as_str()).collect();
    assert_eq!(texts, ["", "two tick", "two tickets and", "two tickets and", "two tickets and"]);
    assert!(caller.requests.is_empty());
}

#[test]
fn a_service_that_streams_nothing_does_not_hold_the_turn_for_ever() {
    let mut caller = Caller::new(Source::Streamed);
    caller.speak(600);
    assert!(caller.ends_after() < 3_500);
    caller.machine.lost(caller.now, Duration::ZERO);
    caller.collect();
    assert_eq!(caller.deaf.len(), 1, "what it said nothing of was not heard");
    caller.deaf.clear();
    caller.speak(600);
    caller.machine.lost(caller.now, ms(600));
    caller.collect();
    assert_eq!(caller.deaf, [ms(600)]);
}

/// How long the pause was behind `text` that ended the turn, where its sound was judged as `complete`.
fn ended_after(text: &str, complete: Option<bool>, expect: Option<Expect>) -> Duration {
    let mut caller = Caller::new(Source::Asked);
    caller.machine.judge_sound(complete.is_some());
    caller.machine.expect(expect);
    caller.speak(1_000);
    let spoke = caller.now;
    caller.pause(220);
    caller.answer(text);
    if let Some(complete) = complete {
        let (id, from, to) = *caller.questions.last().expect("the sound is asked about when the pause begins");
        assert!(from < spoke && to >= spoke + SETTLE, "{from:?} to {to:?}");
        caller.machine.judged(caller.now, id, complete);
        caller.collect();
    }
    while caller.phases().last() != Some(&Phase::EndOfTurn) {
        assert!(caller.now < spoke + ms(5_000), "no end: {:?}", caller.events);
        caller.pause(20);
    }
    assert_eq!(caller.questions.len(), usize::from(complete.is_some()), "once a pause");
    caller.now - spoke
}

#[test]
fn how_a_turn_sounds_makes_its_end_come_sooner_or_later() {
    let open = "I would like a table for two";
    let (words, sooner, later) =
        (ended_after(open, None, None), ended_after(open, Some(true), None), ended_after(open, Some(false), None));
    assert!(sooner < words && words < later, "{sooner:?} {words:?} {later:?}");
    assert!(sooner <= ms(400) && later >= ms(1_780));
    let full = "A table for two, please.";
    assert!(ended_after(full, Some(false), None) > ended_after(full, None, None) + ms(300), "the voice stays up");
    assert!(ended_after("A table for two and", Some(true), None) < ms(1_000), "and trails off");
    let digits = Some(Expect::Digits);
    assert_eq!(ended_after("4 5 7", Some(true), digits), ended_after("4 5 7", None, digits), "a group is not all");
}

#[test]
fn an_answer_about_a_pause_that_is_over_counts_for_nothing() {
    let mut caller = Caller::new(Source::Asked);
    caller.machine.judge_sound(true);
    caller.speak(1_000);
    caller.pause(220);
    let (first, ..) = caller.questions[0];
    caller.speak(500);
    caller.pause(220);
    caller.machine.judged(caller.now, first, true);
    caller.answer("I would like a table for two");
    caller.pause(300);
    assert_ne!(caller.phases().last(), Some(&Phase::EndOfTurn), "{:?}", caller.events);
    assert_eq!(caller.questions.len(), 2);
}
