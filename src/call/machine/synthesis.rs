//! The engine's side of a call: utterances on their way to it, and speech on its way back.
//!
//! Owns the call's stream on the engine and the wait after a refusal. The utterances themselves are the queue's.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::outbox::Outbox;
use super::part::{Audio, Part, PartState};
use super::queue::TurnQueue;
use super::turn::Turn;
use crate::call::TurnId;
use crate::call::event::TurnHow;
use crate::call::handle::Style;
use crate::call::speech::{Speech, StreamState};
use crate::text::TELLING;
use crate::turn::{Markup, SpeechEvent, SpeechSink, StreamId, Streaming, UtteranceEnd, UtteranceId};

/// Refusals in a row that end a turn.
const MAX_REFUSALS: u32 = 6;
/// Text ids that a voice may wait for where its text would otherwise come in phrases: the shortest phrase,
/// `[call.segment] phrase_chars` of 24 letters, has about six.
const MOST_IDS: u32 = 8;
/// Bounds of the wait after a refusal.
const MIN_RETRY: Duration = Duration::from_millis(50);
pub(super) const MAX_RETRY: Duration = Duration::from_secs(2);

/// One call's stream on the engine.
pub(super) struct Synthesis {
    speech: Arc<dyn Speech>,
    /// Where the engine sends what it made.
    sink: SpeechSink,
    stream: StreamId,
    tenant: Arc<str>,
    /// When to submit again what was refused.
    retry_at: Option<Instant>,
    /// The turn that was given up while its text was being written.
    given_up: Option<TurnId>,
    told: Told,
}

/// What was told of texts that the voice will not say as they are meant, each once a call.
#[derive(Debug, Default)]
struct Told {
    phonemes: bool,
    /// A text that shows no language.
    unsure: bool,
    /// A language that the voice lacks.
    language: bool,
    /// The language that the voice was last known to speak.
    spoken: Option<String>,
}

impl Synthesis {
    pub(super) fn new(speech: Arc<dyn Speech>, sink: SpeechSink, tenant: Arc<str>) -> Self {
        Self { speech, sink, stream: StreamId::next(), tenant, retry_at: None, given_up: None, told: Told::default() }
    }

    /// Tells the engine how the listener fares.
    pub(super) fn note(&self, state: StreamState) {
        self.speech.note(self.stream, state);
    }

    /// Whether text of this style goes to its voice as it is written. `auto` does so where that sounds sooner than a phrase
    /// of its own would. SSML changes how one speaks in the midst of a text.
    pub(super) fn streams(&self, style: &Style) -> bool {
        let most = match style.stream {
            Streaming::Sentence => return false,
            Streaming::Auto => MOST_IDS,
            Streaming::Token => u32::MAX,
        };
        style.markup != Markup::Ssml && self.speech.starts_after(style.voice.as_deref()).is_some_and(|ids| ids <= most)
    }

    /// Tells, once a call, that the voice of a turn does not say the phonemes that its text gives.
    pub(super) fn check_phonemes(&mut self, turn: &Turn, out: &mut Outbox) {
        let voice = turn.style.voice.as_deref();
        let says = self.speech.says_phonemes(voice);
        if !turn.gives_phonemes || self.told.phonemes || says {
            return;
        }
        self.told.phonemes = true;
        let (voice, call) = (voice.unwrap_or("the default voice"), &out.shared.meta.id);
        tracing::warn!(%call, voice, "a text gives phonemes to a voice that says none");
        out.error(format!("`phoneme`: {voice} does not say phonemes; the words are spoken as they are written"));
    }

    /// Tells, once a call each, that the language of a turn's latest text is not certain, and that its voice lacks it.
    pub(super) fn check_language(&mut self, turn: &Turn, out: &mut Outbox) {
        let Some(part) = turn.parts.iter().rev().find(|part| !part.text.is_empty()) else { return };
        let voice = turn.style.voice.as_deref();
        let named = voice.unwrap_or("the default voice");
        let call = &out.shared.meta.id;
        match part.reading.language.as_deref() {
            None => {
                let letters = part.text.chars().filter(|c| c.is_alphabetic()).count();
                if letters < TELLING || std::mem::replace(&mut self.told.unsure, true) {
                    return;
                }
                tracing::warn!(%call, "the language of a text is not certain: it is read as English");
                out.error("`lang`: the language of a text is not certain; name it, else it is read as English".into());
            }
            Some(tag) if self.told.language || self.told.spoken.as_deref() == Some(tag) => {}
            Some(tag) if self.speech.speaks(voice, tag) => self.told.spoken = Some(tag.to_owned()),
            Some(tag) => {
                self.told.language = true;
                tracing::warn!(%call, voice = named, language = tag, "a text is in a language that its voice lacks");
                out.error(format!("`lang`: {named} does not speak `{tag}`; the text is spoken as well as it can"));
            }
        }
    }

    /// When to submit again what was refused.
    pub(super) fn retry_at(&self) -> Option<Instant> {
        self.retry_at
    }

    /// The turn that was given up while its text was being written: the rest of it is not to be said.
    pub(super) fn take_given_up(&mut self) -> Option<TurnId> {
        self.given_up.take()
    }

    /// The wait after a refusal may be over.
    pub(super) fn tick(&mut self, now: Instant) {
        self.retry_at = self.retry_at.filter(|at| *at > now);
    }

    /// What was refused is not tried again; gives how long the wait would have been.
    pub(super) fn give_up(&mut self, now: Instant) -> Duration {
        self.retry_at.take().map_or(MAX_RETRY, |at| at.saturating_duration_since(now))
    }

    /// Hands the next utterances to the engine, while the window has room; whether it took any.
    pub(super) fn submit(&mut self, now: Instant, queue: &mut TurnQueue) -> bool {
        let mut submitted = false;
        for turn in queue.turns_mut() {
            for part in turn.parts.iter_mut().filter(|part| part.state == PartState::Submitted && !part.fallback) {
                if let Some((said, last)) = part.take_feed() {
                    self.speech.append(self.stream, part.utterance, &said, last);
                }
            }
        }
        if self.retry_at.is_some() {
            return submitted;
        }
        while let Some((turn, place)) = queue.next_to_submit() {
            let utterance = turn.utterance(place, self.stream, &self.tenant);
            let taken = if turn.fallback {
                self.speech.fallback(utterance, self.sink.clone())
            } else {
                self.speech.submit(utterance.clone(), self.sink.clone()).or_else(|refusal| {
                    // What the first engine says of when to come back counts, not what the other does.
                    self.speech.fallback(utterance, self.sink.clone()).map_err(|_| refusal)?;
                    turn.fallback = true;
                    Ok(())
                })
            };
            let part = &mut turn.parts[place];
            match taken {
                Ok(()) => {
                    part.state = PartState::Submitted;
                    part.fallback = turn.fallback;
                    part.submitted = Some(now);
                    // The fallback voice speaks whole texts: what follows are parts of their own.
                    part.taken(!turn.fallback);
                    turn.streams &= !turn.fallback;
                    turn.refusals = 0;
                    submitted = true;
                }
                Err(refusal) => {
                    let utterance = part.utterance;
                    self.refused(now, queue, utterance, refusal.retry_after);
                    return submitted;
                }
            }
        }
        submitted
    }

    /// Takes what the engine made.
    pub(super) fn receive(&mut self, now: Instant, queue: &mut TurnQueue, event: SpeechEvent) {
        match event {
            // What belongs to no part was cancelled or withdrawn: late audio is dropped on sight.
            SpeechEvent::Audio { utterance, pcm } => {
                let Some(part) = queue.part(utterance) else { return };
                if part.made.is_none() {
                    part.made = Some(now);
                    // Told later, it would be of audio behind a beginning that was kept.
                    part.voice = part.stages.known();
                }
                let out = part.left_out();
                part.receive(pcm);
                let samples = part.left_out() - out;
                if samples > 0 {
                    self.speech.note(self.stream, StreamState::Skipped { samples });
                }
            }
            SpeechEvent::End { utterance, how } => self.ended(now, queue, utterance, how),
        }
    }

    fn ended(&mut self, now: Instant, queue: &mut TurnQueue, utterance: UtteranceId, how: UtteranceEnd) {
        let Some(part) = queue.part(utterance) else { return };
        if let UtteranceEnd::Refused { retry_after } = how
            && part.received() == 0
        {
            part.state = PartState::Waiting;
            return self.refused(now, queue, utterance, retry_after);
        }
        if let UtteranceEnd::Failed(reason) = &how
            && self.rescue(queue, utterance)
        {
            tracing::warn!(%reason, "an utterance failed; the fallback voice speaks it");
            return;
        }
        let trouble = match how {
            UtteranceEnd::Done => {
                let samples = queue.complete(utterance);
                if samples > 0 {
                    self.speech.note(self.stream, StreamState::Skipped { samples });
                }
                return;
            }
            UtteranceEnd::Failed(reason) => TurnHow::Failed(reason),
            UtteranceEnd::Refused { retry_after } => TurnHow::Refused { retry_after },
            UtteranceEnd::Cancelled => TurnHow::Failed("the engine gave it up".into()),
        };
        if let Some(part) = queue.part(utterance) {
            part.state = PartState::Ended;
        }
        if let Some(turn) = queue.turn_of(utterance) {
            turn.trouble = Some(trouble);
        }
    }

    /// A part that the engine failed at is spoken from its beginning by the fallback voice, where there is one. What
    /// was heard of it already is heard again: the sentence is whole, and where a broken one stopped is not known.
    fn rescue(&self, queue: &mut TurnQueue, utterance: UtteranceId) -> bool {
        let Some(turn) = queue.turn_of(utterance) else { return false };
        // Its neighbours may have been with the engine that failed, too: each is rescued, once.
        let Some(place) = turn.parts.iter().position(|part| part.utterance == utterance && !part.fallback) else {
            return false;
        };
        let again = turn.utterance(place, self.stream, &self.tenant);
        if self.speech.fallback(again, self.sink.clone()).is_err() {
            return false;
        }
        turn.parts[place].fallback = true;
        turn.parts[place].taken(false);
        (turn.fallback, turn.streams) = (true, false);
        true
    }

    /// What was accepted is not lost by one refusal: it is tried again a few times, then its turn ends.
    fn refused(&mut self, now: Instant, queue: &mut TurnQueue, utterance: UtteranceId, retry_after: Duration) {
        let Some(turn) = queue.turn_of(utterance) else { return };
        turn.refusals += 1;
        if turn.refusals < MAX_REFUSALS {
            self.retry_at = Some(now + retry_after.clamp(MIN_RETRY, MAX_RETRY));
            return;
        }
        turn.trouble = Some(TurnHow::Refused { retry_after });
        if turn.writing.take().is_some() {
            self.given_up = Some(turn.id.clone());
        }
        // Its marks are answered with its end.
        let waiting = turn.parts.iter_mut().filter(|part| part.state == PartState::Waiting);
        let marks: Vec<_> = waiting.flat_map(|part| std::mem::take(&mut part.reading.marks)).collect();
        turn.parts.retain(|part| part.state != PartState::Waiting);
        if !marks.is_empty() {
            let mut end = Part::sound(Audio::Silence(0));
            end.reading.marks = marks.into_iter().map(|(_, name)| (0, name)).collect();
            turn.parts.push(end);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use tokio::sync::mpsc;

    use super::*;
    use crate::call::Refusal;
    use crate::call::machine::fixture;
    use crate::call::machine::writing::Writing;
    use crate::clock;
    use crate::turn::Utterance;

    /// Refuses the first so many; its fallback takes everything where there is one.
    #[derive(Default)]
    struct Refusing {
        refuse: Mutex<u32>,
        has_fallback: bool,
        no_phonemes: bool,
        lacks: Option<&'static str>,
        taken: Mutex<Vec<String>>,
    }

    impl Speech for Refusing {
        fn submit(&self, utterance: Utterance, _sink: SpeechSink) -> Result<(), Refusal> {
            let mut refuse = self.refuse.lock().expect("one thread");
            if *refuse > 0 {
                *refuse -= 1;
                return Err(Refusal { retry_after: Duration::from_secs(60), reason: "full".into() });
            }
            self.taken.lock().expect("one thread").push(utterance.text);
            Ok(())
        }

        fn fallback(&self, utterance: Utterance, _sink: SpeechSink) -> Result<(), Refusal> {
            if !self.has_fallback {
                return Err(Refusal { retry_after: Duration::ZERO, reason: "none".into() });
            }
            self.taken.lock().expect("one thread").push(format!("*{}", utterance.text));
            Ok(())
        }

        fn says_phonemes(&self, _voice: Option<&str>) -> bool {
            !self.no_phonemes
        }

        fn speaks(&self, _voice: Option<&str>, tag: &str) -> bool {
            self.lacks != Some(tag)
        }

        fn note(&self, _stream: StreamId, _note: StreamState) {}
    }

    fn set_up(speech: Refusing) -> (Arc<Refusing>, Synthesis, TurnQueue, Instant) {
        let now = clock::now();
        let speech = Arc::new(speech);
        let (sink, _) = mpsc::channel(1);
        let mut queue = TurnQueue::default();
        let mut turn = Turn::new(TurnId::next(), Style::default(), now, true);
        turn.add_text(vec!["one".into(), "two".into()]);
        queue.add(turn, false, &mut fixture::playout());
        (speech.clone(), Synthesis::new(speech, sink, "".into()), queue, now)
    }

    #[test]
    fn a_refusal_is_tried_again_within_bounds_and_six_in_a_row_end_the_turn() {
        let (_, mut synthesis, mut queue, mut now) = set_up(Refusing { refuse: 99.into(), ..Refusing::default() });
        for _ in 1..MAX_REFUSALS {
            synthesis.submit(now, &mut queue);
            let at = synthesis.retry_at().expect("it is tried again");
            assert_eq!(at, now + MAX_RETRY, "a long wait is cut short");
            synthesis.submit(now, &mut queue);
            assert_eq!(synthesis.retry_at(), Some(at), "not before its time");
            now = at;
            synthesis.tick(now);
        }
        synthesis.submit(now, &mut queue);
        let turn = queue.front().expect("it is told of its end");
        assert!(matches!(turn.trouble, Some(TurnHow::Refused { .. })) && turn.parts.is_empty());
    }

    #[test]
    fn the_rest_and_the_marks_of_a_turn_that_is_given_up_are_known() {
        let (_, mut synthesis, mut queue, mut now) = set_up(Refusing { refuse: 99.into(), ..Refusing::default() });
        let style = Style { markup: Markup::Ssml, ..Style::default() };
        let mut turn = Turn::new(TurnId::next(), style, now, true);
        turn.writing = Some(Writing::new(&Default::default(), turn.style.stream, now));
        let mistakes = turn.write(now, "<speak>One is here. <mark name='a'/>Two is there. <mark name='b'/>And three. ");
        turn.look(now, true);
        assert!(mistakes.is_empty() && !turn.parts.is_empty(), "{mistakes:?}");
        let (id, mut marks) = (turn.id.clone(), Vec::new());
        let written: Vec<_> =
            turn.parts.iter().flat_map(|part| &part.reading.marks).map(|(_, name)| name.clone()).collect();
        assert!(!written.is_empty());
        queue.entries.clear();
        queue.add(turn, false, &mut fixture::playout());
        for _ in 0..MAX_REFUSALS {
            assert_eq!(synthesis.take_given_up(), None);
            synthesis.submit(now, &mut queue);
            now += MAX_RETRY;
            synthesis.tick(now);
        }
        assert_eq!((synthesis.take_given_up(), synthesis.take_given_up()), (Some(id), None));
        queue.turns_mut().for_each(|turn| marks.extend(turn.unreached()));
        assert_eq!(marks, written);
    }

    #[test]
    fn a_voice_without_phonemes_is_told_of_once_and_speaks_the_words() {
        let now = clock::now();
        for no_phonemes in [true, false] {
            let mut out = fixture::outbox(now);
            let (_, mut synthesis, ..) = set_up(Refusing { no_phonemes, ..Refusing::default() });
            for _ in 0..2 {
                let style = Style { markup: Markup::Ssml, ..Style::default() };
                let mut turn = Turn::new(TurnId::next(), style, now, true);
                let text = "I say <phoneme alphabet='x-espeak' ph=\"t@m'A:t@U\">tomato</phoneme>.";
                let cuts = crate::call::segment::Script::whole(text, Default::default(), Markup::Ssml);
                cuts.expect("no mistake").into_iter().for_each(|cut| turn.add(cut));
                assert_eq!(turn.parts[0].said(), "I say tomato.");
                synthesis.check_phonemes(&turn, &mut out);
            }
            let told = std::iter::from_fn(|| out.pop()).filter(|action| format!("{action:?}").contains("phoneme"));
            assert_eq!(told.count(), usize::from(no_phonemes));
        }
    }

    #[test]
    fn a_language_that_is_uncertain_or_lacking_is_told_of_once() {
        let now = clock::now();
        let told = |lacks, texts: &[&str]| {
            let mut out = fixture::outbox(now);
            let (_, mut synthesis, ..) = set_up(Refusing { lacks, ..Refusing::default() });
            for text in texts {
                let mut turn = Turn::new(TurnId::next(), Style::default(), now, true);
                turn.add_text(vec![(*text).to_owned()]);
                synthesis.check_language(&turn, &mut out);
            }
            let told = std::iter::from_fn(|| out.pop()).map(|action| format!("{action:?}"));
            told.filter(|action| action.contains("`lang`")).collect::<Vec<_>>()
        };
        let german = "Guten Tag, wie kann ich Ihnen helfen?";
        assert!(told(None, &[german, "Hello, how can I help you?", "Acme 42"]).is_empty());
        let lacking = told(Some("de"), &["Hello, how can I help you?", german, german]);
        assert!(lacking.len() == 1 && lacking[0].contains("`de`"), "{lacking:?}");
        let names = "Schmidt Müller Petersen Andersson Kowalski";
        assert_eq!(told(None, &[names, names]).len(), 1);
    }

    #[test]
    fn what_the_engine_refuses_or_fails_at_goes_to_the_fallback_once() {
        let (speech, mut synthesis, mut queue, now) =
            set_up(Refusing { refuse: 1.into(), has_fallback: true, ..Refusing::default() });
        synthesis.submit(now, &mut queue);
        assert_eq!(*speech.taken.lock().expect("one thread"), ["*one", "*two"], "the rest of the turn is its, too");
        let (speech, mut synthesis, mut queue, now) = set_up(Refusing { has_fallback: true, ..Refusing::default() });
        synthesis.submit(now, &mut queue);
        let utterance = queue.front().expect("one").parts[0].utterance;
        let failed = || SpeechEvent::End { utterance, how: UtteranceEnd::Failed("broken".into()) };
        synthesis.receive(now, &mut queue, failed());
        assert_eq!(*speech.taken.lock().expect("one thread"), ["one", "two", "*one"]);
        assert!(queue.front().expect("one").trouble.is_none());
        synthesis.receive(now, &mut queue, failed());
        assert_eq!(queue.front().expect("one").trouble, Some(TurnHow::Failed("broken".into())));
    }
}
