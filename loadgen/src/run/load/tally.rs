//! The figures of a load, added up from what callers tell.
//!
//! Every turn counts once: as a failure by its cause, or as a turn that was heard, and then in every figure that turns
//! of its kind have. So [`Level::turns`] is the number of first audios, and of the turns that were spoken to their end
//! together with those that were interrupted.
//!
//! Where a recogniser listens, it says which words are in the turns of the sample. It errs by itself: a turn has wrong words
//! where many more of them are wrong than of the same text spoken directly, as far as that is known.
//!
//! # Why
//! Some turns are kept until the load is over and compared sample by sample then, when no caller is listening any more:
//! those of the sample, and those whose loudness says that the words are wrong. They are counted only when it is known
//! what they are.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use super::{Event, Progress};
use crate::caller::call::Leg;
use crate::run::report::Level;
use crate::sound::heard::Clip;
use crate::sound::listen::StallCause;
use crate::turns::exchange::{Plan, Turn};
use crate::turns::judge::{Fault, SAME_WORDS};
use crate::turns::stats::{Numbers, Spread};
use crate::turns::words::Errors;
use crate::under_test::recognizer::{Recognizer, RecognizerError};

/// Turns of the sample, and turns with doubtful words, that are kept for a closer look: at most so many of each.
const KEPT: usize = 40;
/// A third of a text's words, beyond those that the recogniser takes for others when the text is spoken directly, are wrong.
const WRONG_WORDS: f64 = 1.0 / 3.0;

pub(super) struct Tally {
    window: (Instant, Instant),
    sampled: u64,
    level: Level,
    first_audio: Spread,
    mouth_to_ear: Spread,
    rtf: Numbers,
    setup: Spread,
    greeting: Spread,
    service: Spread,
    cycle: Spread,
    jitter: Spread,
    lateness: Spread,
    mos: Numbers,
    said: Numbers,
    barge_in: Spread,
    report_error: Numbers,
    pub(super) concurrency: Numbers,
    by_leg: BTreeMap<Leg, Spread>,
    stages: BTreeMap<String, Numbers>,
    chars: f64,
    speech: f64,
    seen: u64,
    heard: u64,
    kept: Vec<Turn>,
    doubtful: Vec<Turn>,
}

impl Tally {
    /// Counts turns that are sent within `window`; keeps one in `sampled` for a closer look.
    pub(super) fn new(window: (Instant, Instant), sampled: u64) -> Tally {
        Tally {
            window,
            sampled,
            level: Level::default(),
            first_audio: Spread::default(),
            mouth_to_ear: Spread::default(),
            rtf: Numbers::default(),
            setup: Spread::default(),
            greeting: Spread::default(),
            service: Spread::default(),
            cycle: Spread::default(),
            jitter: Spread::default(),
            lateness: Spread::default(),
            mos: Numbers::default(),
            said: Numbers::default(),
            barge_in: Spread::default(),
            report_error: Numbers::default(),
            concurrency: Numbers::default(),
            by_leg: BTreeMap::new(),
            stages: BTreeMap::new(),
            chars: 0.0,
            speech: 0.0,
            seen: 0,
            heard: 0,
            kept: Vec::new(),
            doubtful: Vec::new(),
        }
    }

    /// The load ends now, if it was to go on.
    pub(super) fn cut(&mut self, now: Instant) {
        self.window.1 = self.window.1.min(now).max(self.window.0);
    }

    pub(super) fn add(&mut self, event: Event) {
        match event {
            Event::Connected(setup, greeting) => {
                self.level.calls += 1;
                self.setup.add(setup.time());
                if let Some(greeting) = greeting {
                    self.greeting.add(greeting);
                }
            }
            Event::Failed(cause) => *self.level.failures.entry(cause).or_default() += 1,
            Event::Turn(turn) => self.turn(*turn),
            Event::Again(cycle) => self.cycle.add(cycle),
        }
    }

    fn turn(&mut self, turn: Turn) {
        if turn.fault.as_deref() == Some(Fault::WrongAudio.label()) && self.doubtful.len() < KEPT {
            self.doubtful.push(turn);
            return;
        }
        if turn.fault.is_none() && turn.barge_in.is_none() && self.is_inside(&turn) {
            self.seen += 1;
            if self.seen.is_multiple_of(self.sampled) && self.kept.len() < KEPT {
                self.kept.push(turn);
                return;
            }
        }
        self.count(&turn);
    }

    fn is_inside(&self, turn: &Turn) -> bool {
        let (from, until) = self.window;
        turn.sent >= from && turn.sent < until
    }

    fn count(&mut self, turn: &Turn) {
        let (from, until) = self.window;
        // Before, the load was not yet what it is to be; after, it is no more.
        let inside = self.is_inside(turn);
        if inside {
            self.level.packets_lost += turn.packets.0;
            self.level.packets += turn.packets.1;
        }
        let (Some(first), None) = (turn.first_audio, &turn.fault) else {
            let cause = turn.fault.clone().unwrap_or_else(|| Fault::Silence.label().to_owned());
            *self.level.failures.entry(cause).or_default() += 1;
            return;
        };
        self.heard += 1;
        if turn.barge_in.is_none() {
            // The part of the turn that lies in the window.
            let whole = turn.ended.saturating_duration_since(turn.sent).as_secs_f64();
            let part = turn.ended.min(until).saturating_duration_since(turn.sent.max(from)).as_secs_f64();
            if whole > 0.0 {
                self.chars += turn.chars as f64 * part / whole;
                self.speech += turn.speech.as_secs_f64() * part / whole;
            }
        }
        if !inside {
            return;
        }
        self.level.turns += 1;
        self.first_audio.add(first);
        if let Some(time) = turn.mouth_to_ear {
            self.mouth_to_ear.add(time);
        }
        self.by_leg.entry(turn.leg).or_default().add(first);
        if !turn.stages.is_empty() {
            let inside: f64 = turn.stages.values().sum();
            let all = turn.stages.iter().map(|(stage, time)| (stage.as_str(), *time));
            for (stage, time) in all.chain([("outside", first.as_secs_f64() - inside)]) {
                self.stages.entry(stage.to_owned()).or_default().add(time);
            }
        }
        self.lateness.merge(&turn.lateness);
        self.jitter.add(turn.jitter);
        self.mos.add(turn.mos);
        for stall in &turn.stalls {
            let cause = match stall.cause {
                StallCause::Lost => "lost",
                StallCause::Late => "late",
                StallCause::Paused => "paused",
            };
            *self.level.stalls.entry(cause.to_owned()).or_default() += 1;
            self.level.stalled_s += stall.length.as_secs_f64();
        }
        self.level.stalled_turns += u64::from(!turn.stalls.is_empty());
        if let Some(barge_in) = turn.barge_in {
            self.barge_in.add(barge_in.silence);
            if let Some(reported) = barge_in.reported {
                self.report_error.add(reported.as_secs_f64() - barge_in.heard.as_secs_f64());
            }
        } else {
            self.rtf.add(turn.rtf);
            self.service.add(turn.ended.saturating_duration_since(turn.sent));
            self.said.add(turn.speech.as_secs_f64());
        }
    }

    pub(super) fn progress(&self, calls: u32, done: f64) -> Progress {
        Progress {
            calls,
            turns: self.level.turns + self.kept.len() as u64,
            failures: self.level.failures.values().sum(),
            first_audio_p95: self.first_audio.summary().p95,
            done,
        }
    }

    /// Has a recogniser listen to the turns of the sample.
    pub(super) async fn recognise(&mut self, recognizer: &Recognizer, plan: &Plan) -> Result<(), RecognizerError> {
        let texts: BTreeSet<&str> = self.kept.iter().map(|turn| turn.text.as_str()).collect();
        let direct: Vec<(&str, &Clip)> =
            texts.into_iter().filter_map(|text| Some((text, plan.references.get(text)?))).collect();
        let clips: Vec<&Clip> = direct.iter().map(|(_, clip)| *clip).collect();
        let heard = recognizer.words(&clips).await?;
        let own: BTreeMap<&str, f64> =
            direct.iter().zip(&heard).map(|((text, _), words)| (*text, Errors::between(text, words).rate())).collect();
        let clips: Vec<&Clip> = self.kept.iter().map(|turn| &turn.clip).collect();
        let heard = recognizer.words(&clips).await?;
        let mut all = Errors::default();
        let mut wrong = Vec::new();
        for (turn, words) in self.kept.iter().zip(&heard) {
            let errors = Errors::between(&turn.text, words);
            all += errors;
            wrong.push(errors.rate() > own.get(turn.text.as_str()).copied().unwrap_or(0.0) + WRONG_WORDS);
        }
        for (turn, wrong) in self.kept.iter_mut().zip(wrong) {
            turn.fault = wrong.then(|| Fault::WrongWords.label().to_owned());
        }
        self.level.words = Some(all);
        Ok(())
    }

    /// The figures, and the turns of the sample.
    pub(super) fn finish(mut self, plan: &Plan, mode: &str) -> (Level, Vec<Turn>) {
        let mut correlation = Numbers::default();
        let match_of = |turn: &Turn| {
            let reference = plan.references.get(&turn.text)?;
            crate::sound::correlate::correlate(&turn.clip, reference).ok().map(|found| found.value)
        };
        let level_words = self.level.words;
        let (mut kept, doubtful) = (std::mem::take(&mut self.kept), std::mem::take(&mut self.doubtful));
        for turn in &mut kept {
            if let Some(value) = match_of(turn) {
                correlation.add(f64::from(value));
                // Who understands words knows better than who compares waveforms.
                if value < SAME_WORDS && level_words.is_none() {
                    turn.fault = Some(Fault::WrongAudio.label().to_owned());
                }
            }
            self.count(turn);
        }
        for mut turn in doubtful {
            if match_of(&turn).is_some_and(|value| value >= SAME_WORDS) {
                turn.fault = None;
            }
            self.count(&turn);
        }
        let mut level = self.level;
        let seconds = self.window.1.saturating_duration_since(self.window.0).as_secs_f64();
        level.mode = mode.to_owned();
        level.seconds = seconds;
        level.concurrency = self.concurrency.summary().mean;
        level.first_audio = self.first_audio.summary();
        level.mouth_to_ear = self.mouth_to_ear.summary();
        level.rtf = self.rtf.summary();
        level.setup = self.setup.summary();
        level.greeting = self.greeting.summary();
        level.service = self.service.summary();
        level.service_shares = self.service.shares(20);
        level.cycle = Duration::from_secs_f64(self.cycle.summary().mean.max(0.0));
        level.jitter = self.jitter.summary();
        level.lateness = self.lateness.summary();
        level.mos = self.mos.summary();
        level.barge_in = self.barge_in.summary();
        level.report_error = self.report_error.summary();
        level.turns_per_call = self.heard as f64 / level.calls.max(1) as f64;
        level.speech = self.said.summary();
        level.speech_spread = self.said.spread();
        level.chars_per_s = self.chars / seconds.max(f64::MIN_POSITIVE);
        level.audio_s_per_s = self.speech / seconds.max(f64::MIN_POSITIVE);
        level.by_leg = self.by_leg.iter().map(|(leg, spread)| (leg.label().to_owned(), spread.summary())).collect();
        level.stages = self.stages.iter().map(|(stage, numbers)| (stage.clone(), numbers.summary())).collect();
        level.correlation = correlation.summary();
        (level, kept)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::caller::rtc;
    use crate::caller::sip;
    use crate::clock;
    use crate::sound::synthetic::babble;
    use crate::turns::exchange::{BargeIn, Trigger, Waterfall};
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    fn turn(sent: Instant, text: &str, clip: &Clip, fault: Option<Fault>) -> Turn {
        Turn {
            leg: Leg::Sip,
            sent,
            ended: sent + Duration::from_secs(2),
            chars: 10,
            first_audio: (fault != Some(Fault::Silence)).then_some(Duration::from_millis(50)),
            mouth_to_ear: None,
            speech: Duration::from_millis(1_900),
            rtf: 1.0,
            stalls: Vec::new(),
            packets: (1, 99),
            lateness: Spread::default(),
            jitter: Duration::ZERO,
            mos: 4.0,
            fault: fault.map(|f| f.label().to_owned()),
            barge_in: None,
            clip: clip.clone(),
            waterfall: Waterfall::default(),
            text: text.to_owned(),
            name: None,
            stages: [("queue".to_owned(), 0.004), ("speech".to_owned(), 0.030)].into(),
        }
    }

    fn plan(text: &str, reference: Clip) -> Plan {
        Plan {
            voices: Vec::new(),
            sip_target: None,
            sip: sip::Config::default(),
            webrtc: None::<rtc::Config>,
            gateway: None,
            trigger: Trigger::Greeting,
            references: Arc::new([(text.to_owned(), reference)].into()),
            recognizer: None,
            buffer: Duration::ZERO,
            patience: Duration::ZERO,
        }
    }

    #[test]
    fn every_turn_counts_once_and_in_every_figure() {
        let start = clock::now();
        let (said, other) = (babble(1, 16_000, 2.0), babble(2, 16_000, 2.0));
        let mut tally = Tally::new((start, start + Duration::from_secs(60)), 2);
        let mut add = |after: u64, clip: &Clip, fault: Option<Fault>| {
            let turn = turn(start + Duration::from_secs(after), "words", clip, fault);
            tally.add(Event::Turn(Box::new(turn)));
        };
        for _ in 0..4 {
            add(1, &said, None);
        }
        // Good ones that the comparison finds to be of other words; every second is compared.
        add(2, &said, None);
        add(2, &other, None);
        // Taken for other words by their loudness: one is not.
        add(3, &said, Some(Fault::WrongAudio));
        add(3, &other, Some(Fault::WrongAudio));
        add(4, &said, Some(Fault::Silence));
        add(4, &said, Some(Fault::CutShort));
        // Sent when the load is over.
        add(61, &said, None);
        // Of a caller who spoke.
        let mut spoken = turn(start + Duration::from_secs(5), "words", &said, None);
        spoken.mouth_to_ear = Some(Duration::from_millis(700));
        tally.add(Event::Turn(Box::new(spoken)));
        let interrupted = BargeIn { silence: Duration::from_millis(150), heard: Duration::ZERO, reported: None };
        let mut cut = turn(start, "words", &said, None);
        cut.barge_in = Some(interrupted);
        tally.add(Event::Turn(Box::new(cut)));
        [11, 12].into_iter().for_each(|cycle| tally.add(Event::Again(Duration::from_secs(cycle))));
        let (level, kept) = tally.finish(&plan("words", said), "closed");
        // Within a bucket of the distribution.
        let cycle = level.cycle.as_secs_f64();
        assert!((cycle / 11.5 - 1.0).abs() < 0.01, "{cycle}, however many turns the window has");
        let failures: Vec<(&str, u64)> = level.failures.iter().map(|(cause, n)| (cause.as_str(), *n)).collect();
        assert_eq!(failures, [("cut_short", 1), ("silence", 1), ("wrong_audio", 2)]);
        assert_eq!(level.turns, 8, "six good ones, one that was doubted, one that was interrupted");
        assert_eq!((level.mouth_to_ear.count, (level.mouth_to_ear.p50 * 1e3).round()), (1, 700.0));
        assert_eq!(level.first_audio.count, level.turns);
        let outside = &level.stages["outside"];
        assert_eq!((level.stages["queue"].count, outside.count), (level.turns, level.turns));
        assert!((outside.p50 - 0.016).abs() < 1e-9, "50 ms were heard, 34 told: {outside:?}");
        assert_eq!(level.by_leg.values().map(|s| s.count).sum::<u64>(), level.turns);
        assert_eq!((level.rtf.count + level.barge_in.count, level.service.count, level.mos.count), (8, 7, 8));
        assert_eq!(level.packets, 12 * 99, "of all that were sent within the window");
        assert_eq!((kept.len(), level.correlation.count), (3, 3));
    }

    /// A service that understands these words, one after the other, and ends.
    async fn understands(words: &'static [&'static str]) -> (Recognizer, tokio::task::JoinHandle<Vec<String>>) {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}/v1/audio/transcriptions", listener.local_addr().unwrap());
        let serve = async move {
            let mut asked = Vec::new();
            for said in words {
                let (mut socket, _) = listener.accept().await.unwrap();
                let mut request = Vec::new();
                let whole = |request: &[u8]| {
                    let text = String::from_utf8_lossy(request).to_lowercase();
                    let (head, _) = text.split_once("\r\n\r\n")?;
                    let length = head.lines().find_map(|line| line.strip_prefix("content-length: "))?;
                    (request.len() >= head.len() + 4 + length.parse::<usize>().ok()?).then_some(())
                };
                while whole(&request).is_none() {
                    assert!(socket.read_buf(&mut request).await.unwrap() > 0, "it ends in the middle");
                }
                asked.push(String::from_utf8_lossy(&request).into_owned());
                let body = format!("{{\"text\":\"{said}\"}}");
                let head = "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\nconnection: close";
                let answer = format!("{head}\r\ncontent-length: {}\r\n\r\n{body}", body.len());
                socket.write_all(answer.as_bytes()).await.unwrap();
            }
            asked
        };
        (Recognizer::named(&url, "any", Some("secret".to_owned())), tokio::spawn(serve))
    }

    #[tokio::test]
    async fn a_recogniser_tells_wrong_words_beyond_those_that_it_gets_wrong_anyway() {
        let text = "To change the number on your account, call us.";
        let start = clock::now();
        // Said in another way than the reference: its waveform tells nothing.
        let (said, direct) = (babble(1, 16_000, 2.0), babble(2, 16_000, 2.0));
        let mut tally = Tally::new((start, start + Duration::from_secs(60)), 1);
        for _ in 0..3 {
            tally.add(Event::Turn(Box::new(turn(start, text, &said, None))));
        }
        let (recognizer, service) = understands(&[
            // The same text spoken directly: it takes two words of nine for others.
            "To change the lumber on your account caller's.",
            "to change the number on your account call us",
            "to change the lumber on your a count, call us",
            "Your parcel left the depot this morning.",
        ])
        .await;
        let plan = plan(text, direct);
        tally.recognise(&recognizer, &plan).await.expect("it answers");
        let (level, _) = tally.finish(&plan, "closed");
        assert_eq!(level.failures, [("wrong_words".to_owned(), 1)].into());
        assert_eq!(level.turns, 2);
        let words = level.words.expect("it listened");
        assert!(words.said == 27 && words.all() >= 9, "{words}");
        let asked = service.await.unwrap();
        assert!(asked.iter().all(|request| request.contains("RIFF") && request.contains("Bearer secret")));

        // One that does not answer spoils no figure.
        let mut tally = Tally::new((start, start + Duration::from_secs(60)), 1);
        tally.add(Event::Turn(Box::new(turn(start, text, &said, None))));
        let nobody = Recognizer::named("http://127.0.0.1:1", "any", None);
        assert!(tally.recognise(&nobody, &plan).await.is_err());
        assert_eq!(tally.finish(&plan, "closed").0.failures, [("wrong_audio".to_owned(), 1)].into(), "by waveform");
        // A checkpoint is read by another program, which says why it cannot.
        let folder = Recognizer::Checkpoint { folder: "nowhere".into(), program: "false".into() };
        let error = folder.words(&[&said]).await.expect_err("it fails");
        assert!(error.to_string().starts_with("false model transcribe"), "{error}");
    }

    #[test]
    fn a_load_that_is_cut_short_counts_what_it_has() {
        let start = clock::now();
        let said = babble(1, 16_000, 2.0);
        let second = Duration::from_secs(1);
        let mut tally = Tally::new((start, start + 60 * second), 8);
        for n in 0..4 {
            tally.add(Event::Turn(Box::new(turn(start + n * second, "words", &said, None))));
        }
        tally.cut(start + 3 * second);
        let (level, _) = tally.finish(&plan("words", said.clone()), "closed");
        assert_eq!((level.turns, level.seconds), (4, 3.0), "what was counted before stays");
        let mut early = Tally::new((start, start + second), 8);
        early.cut(start - second);
        assert_eq!(early.finish(&plan("words", said), "closed").0.seconds, 0.0, "before it began");
    }
}
