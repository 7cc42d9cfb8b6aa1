//! When the caller begins, pauses and has finished: a state machine without I/O.
//!
//! Told of every frame whether it has voice, and of the recogniser's words as they come; decides what is to be
//! recognised when, and where a turn ends. All times are call time: since media began to flow.
//!
//! Contract: after every call [`Machine::poll`] until it returns nothing and carry out the actions in order; then
//! again at [`Machine::deadline`], by [`Machine::tick`]. Every turn that began ends with exactly one
//! [`Phase::EndOfTurn`], whose text is empty where nothing was understood.
//!
//! # Why
//! - Voice alone cannot tell a pause from an end, and words alone come late. So words are asked for when a pause
//!   begins, while it is not yet known what it is; when they are there, they say how long the pause must last.
//! - A caller who has paused for long inside a turn pauses so again: the delay for words that may be all follows
//!   the caller's own pauses.

use std::time::Duration;

use super::delay::{Expect, Verdict, judge};
use super::{Phase, TurnEvent};

/// A pause this long is worth asking for words: shorter ones are between syllables.
const SETTLE: Duration = Duration::from_millis(200);
/// Sound before the onset that belongs to the turn: what the detector needs to be sure, and a soft first consonant.
const LEAD: Duration = Duration::from_millis(300);
/// Frames with voice, less those without, that begin a turn while the detector still counts the last one as going on.
const ONSET: u32 = 6;
/// A turn is not longer; what follows is the next one.
const LONGEST: Duration = Duration::from_secs(60);
/// From this much sound on, a pause divides what is recognised: the words before it are not recognised again.
const COMMIT: Duration = Duration::from_secs(12);
/// Between two partial texts of one stretch of voice.
const PARTIAL: Duration = Duration::from_millis(1_200);
/// How long after the longest delay the words of a service that streams are waited for.
const LATE: Duration = Duration::from_millis(1_500);
/// How far before the last voice words may end that are about all of it.
const TOLERANCE: Duration = Duration::from_millis(350);

/// How long a caller is waited for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Delays {
    /// After words that are complete.
    pub min: Duration,
    /// After words that ask for more.
    pub max: Duration,
}

/// Where words come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source {
    /// They are asked for: [`Action::Recognise`].
    Asked,
    /// They come by themselves: [`Machine::streamed`].
    Streamed,
}

/// What the driver has to do.
#[derive(Clone, Debug, PartialEq)]
pub enum Action {
    /// Recognise the sound between two times and tell [`Machine::recognised`] or [`Machine::failed`].
    Recognise {
        /// Names the request.
        id: u64,
        /// Where the sound begins.
        from: Duration,
        /// Where it ends.
        to: Duration,
        /// Somebody waits for it; else it may be left out when there is other work.
        urgent: bool,
    },
    /// The answer to this request is not waited for any more.
    Cancel {
        /// Which.
        id: u64,
    },
    /// Sound before this time is not needed any more.
    Forget {
        /// When.
        before: Duration,
    },
    /// Tell the call.
    Event(TurnEvent),
    /// Find out how complete the sound between two times is, and tell [`Machine::judged`].
    Judge {
        /// Names the question.
        id: u64,
        /// Where the turn begins.
        from: Duration,
        /// Where the pause is.
        to: Duration,
    },
    /// Recognition failed, and this much of what the caller said is lost.
    Deaf {
        /// How much.
        lost: Duration,
    },
}

/// Recognised words.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Words {
    /// The text; empty where there was no speech.
    pub text: String,
    /// BCP 47 or ISO 639; empty where it is not known.
    pub language: String,
    /// 0 to 1.
    pub confidence: f32,
}

/// Words of a service that streams.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Streamed {
    /// What they are.
    pub words: Words,
    /// Until when in the call they are about the sound.
    pub until: Duration,
    /// They will not change; further words are about later sound.
    pub fixed: bool,
    /// The service takes the turn as ended.
    pub ended: bool,
    /// The service takes the turn as probably ended.
    pub eager: bool,
}

/// What the caller has said of the turn that is open.
#[derive(Debug, Default)]
struct Turn {
    start: Duration,
    last_voice: Duration,
    /// Words that stay, and until when they are about the sound.
    fixed: Vec<Words>,
    fixed_until: Duration,
    /// Words that may change, and until when they are about the sound.
    latest: Option<(Words, Duration)>,
    job: Option<Job>,
    /// Until when sound was asked about.
    asked_until: Duration,
    /// [`Phase::EagerEndOfTurn`] was told and not taken back.
    eager: bool,
    /// What was told last.
    told: String,
    /// A request failed and no later one has made up for it.
    failed: bool,
    /// The service takes it as ended.
    ended: bool,
    /// The service takes it as probably ended.
    likely: bool,
    /// The service has said something final of it, be it that there are no words.
    answered: bool,
    /// The caller is in a pause that counts for [`Machine::pause`].
    pausing: bool,
    /// What was asked of this pause about the sound, and the answer.
    asked: Option<u64>,
    complete: Option<bool>,
}

#[derive(Clone, Copy, Debug)]
struct Job {
    id: u64,
    to: Duration,
    urgent: bool,
}

/// The turns of one caller.
#[derive(Debug)]
pub struct Machine {
    delays: Delays,
    source: Source,
    /// How long after the longest delay the words of a service that streams are waited for.
    late: Duration,
    partials: bool,
    /// Pauses are judged by their sound, too.
    judges: bool,
    expect: Option<Expect>,
    turn: Option<Turn>,
    /// Whether the detector counted the caller as speaking in the last frame.
    speaking: bool,
    onset: u32,
    /// The caller's pauses inside turns, smoothed.
    pause: Duration,
    /// Where the sound of the next turn begins, when the last one was full.
    carry: Option<Duration>,
    next_id: u64,
    /// How often [`Phase::EagerEndOfTurn`] was told.
    eagers: u64,
    out: std::collections::VecDeque<Action>,
}

impl Machine {
    /// A caller who has said nothing.
    pub fn new(delays: Delays, source: Source) -> Self {
        Self {
            delays,
            source,
            late: LATE,
            partials: false,
            judges: false,
            expect: None,
            turn: None,
            speaking: false,
            onset: 0,
            pause: Duration::ZERO,
            carry: None,
            next_id: 0,
            eagers: 0,
            out: std::collections::VecDeque::new(),
        }
    }

    /// Whether text is wanted while the caller speaks.
    pub fn want_partials(&mut self, wanted: bool) {
        self.partials = wanted;
    }

    /// Pauses are judged by their sound, too: [`Action::Judge`].
    pub fn judge_sound(&mut self, wanted: bool) {
        self.judges = wanted;
    }

    /// How long after the longest delay the words of a service that streams are waited for.
    pub fn wait_for_words(&mut self, late: Duration) {
        self.late = late;
    }

    /// Whether the caller is in a turn.
    pub fn is_open(&self) -> bool {
        self.turn.is_some()
    }

    /// Whether the caller is in a turn and pauses.
    pub fn is_pausing(&self) -> bool {
        self.turn.as_ref().is_some_and(|turn| turn.pausing)
    }

    /// What the next turn, or the open one, is expected to be.
    pub fn expect(&mut self, expect: Option<Expect>) {
        self.expect = expect;
    }

    /// A frame has passed. `quiet`: `None` while the detector takes the caller as silent, else how long the last
    /// voice is ago.
    pub fn frame(&mut self, now: Duration, quiet: Option<Duration>) {
        let voiced = quiet.is_some_and(|quiet| quiet.is_zero());
        let began = quiet.is_some() && !self.speaking;
        self.speaking = quiet.is_some();
        self.onset = if voiced { (self.onset + 1).min(2 * ONSET) } else { self.onset.saturating_sub(1) };
        if self.turn.is_none() {
            if began || voiced && self.onset >= ONSET {
                self.begin(now);
            } else {
                // The lead of a turn that may begin.
                self.out.push_back(Action::Forget { before: now.saturating_sub(LEAD * 2) });
            }
        } else if voiced {
            self.voice(now);
        }
        self.tick(now);
    }

    /// Time has passed.
    pub fn tick(&mut self, now: Duration) {
        let Some(turn) = &self.turn else { return };
        let quiet = now.saturating_sub(turn.last_voice);
        if now.saturating_sub(turn.start) >= LONGEST
            && let Some(until) = self.full(turn)
        {
            // What was said since belongs to the next turn.
            self.carry = Some(until);
            return self.end(now);
        }
        self.ask(now, quiet);
        self.settle(now, quiet);
    }

    /// The answer to [`Action::Recognise`].
    pub fn recognised(&mut self, now: Duration, id: u64, words: Words) {
        let Some(turn) = self.turn.as_mut() else { return };
        let Some(job) = turn.job.take_if(|job| job.id == id) else { return };
        turn.failed = false;
        turn.latest = Some((words, job.to));
        self.tell_partial();
        self.tick(now);
    }

    /// There is no answer to [`Action::Recognise`]. Asked for again once; then the sound is lost.
    pub fn failed(&mut self, now: Duration, id: u64) {
        let Some(turn) = self.turn.as_mut() else { return };
        let Some(job) = turn.job.take_if(|job| job.id == id) else { return };
        if !job.urgent {
            return;
        }
        if std::mem::replace(&mut turn.failed, true) {
            let lost = turn.last_voice.saturating_sub(turn.fixed_until.max(turn.start));
            self.out.push_back(Action::Deaf { lost });
            turn.latest = Some((Words::default(), job.to));
        } else {
            turn.asked_until = turn.fixed_until;
        }
        self.tick(now);
    }

    /// Words of a service that streams.
    pub fn streamed(&mut self, now: Duration, streamed: Streamed) {
        let Some(turn) = self.turn.as_mut() else { return };
        // What a service still has to say of the turn before.
        if streamed.until + TOLERANCE < turn.start {
            return;
        }
        turn.ended |= streamed.ended;
        turn.likely = streamed.eager || streamed.ended;
        turn.answered |= streamed.fixed;
        if streamed.fixed {
            turn.fixed_until = turn.fixed_until.max(streamed.until);
            turn.latest = None;
            if !streamed.words.text.is_empty() {
                turn.fixed.push(streamed.words);
            }
        } else {
            turn.latest = Some((streamed.words, streamed.until));
        }
        self.tell_partial();
        self.tick(now);
    }

    /// The answer to [`Action::Judge`].
    pub fn judged(&mut self, now: Duration, id: u64, complete: bool) {
        let Some(turn) = self.turn.as_mut().filter(|turn| turn.pausing && turn.asked == Some(id)) else { return };
        turn.complete = Some(complete);
        self.tick(now);
    }

    /// The link to a service that streams broke; `lost` of the sound will not be recognised.
    pub fn lost(&mut self, now: Duration, lost: Duration) {
        if lost.is_zero() {
            return;
        }
        self.out.push_back(Action::Deaf { lost });
        if let Some(turn) = self.turn.as_mut() {
            turn.fixed_until = turn.fixed_until.max(turn.last_voice);
            (turn.latest, turn.answered) = (None, true);
        }
        self.tick(now);
    }

    /// The next thing to do.
    pub fn poll(&mut self) -> Option<Action> {
        self.out.pop_front()
    }

    /// When to call [`Machine::tick`] at the latest, should no frame come.
    pub fn deadline(&self) -> Option<Duration> {
        let turn = self.turn.as_ref()?;
        if turn.job.is_some_and(|job| job.urgent) {
            return None;
        }
        let settled = turn.asked_until >= turn.last_voice || self.source == Source::Streamed;
        if !settled {
            return Some(turn.last_voice + SETTLE);
        }
        Some(match self.covers(turn) {
            true => turn.last_voice + self.delay(turn),
            false => turn.last_voice + self.delays.max + self.late,
        })
    }

    fn begin(&mut self, now: Duration) {
        let start = now.saturating_sub(LEAD);
        let start = self.carry.take().filter(|carry| *carry + LATE >= start).unwrap_or(start).min(start);
        self.turn = Some(Turn { start, last_voice: now, fixed_until: start, asked_until: start, ..Turn::default() });
        self.event(Phase::StartOfTurn);
    }

    /// The caller speaks on.
    fn voice(&mut self, now: Duration) {
        let Some(turn) = self.turn.as_mut() else { return };
        let paused = now.saturating_sub(turn.last_voice);
        let resumed = std::mem::take(&mut turn.pausing);
        turn.last_voice = now;
        (turn.ended, turn.likely) = (false, false);
        (turn.asked, turn.complete) = (None, None);
        if !resumed {
            return;
        }
        // An average over some pauses; the first counts fully.
        self.pause = if self.pause.is_zero() { paused } else { (self.pause * 2 + paused) / 3 };
        if let Some(job) = turn.job.take_if(|job| job.urgent) {
            turn.asked_until = turn.fixed_until;
            self.out.push_back(Action::Cancel { id: job.id });
        }
        // What was recognised up to the pause stays, once there is enough of it.
        if self.source == Source::Asked
            && let Some((words, until)) = turn.latest.take_if(|(_, until)| *until >= turn.fixed_until + COMMIT)
        {
            if !words.text.is_empty() {
                turn.fixed.push(words);
            }
            turn.fixed_until = until;
            turn.asked_until = until;
            self.out.push_back(Action::Forget { before: until.saturating_sub(LEAD) });
        }
        if std::mem::take(&mut turn.eager) {
            self.event(Phase::TurnResumed);
        }
    }

    /// Asks for words where it is time for some.
    fn ask(&mut self, now: Duration, quiet: Duration) {
        let Some(turn) = self.turn.as_mut() else { return };
        let full = now.saturating_sub(turn.start) >= LONGEST;
        if quiet >= SETTLE && !std::mem::replace(&mut turn.pausing, true) && self.judges {
            turn.asked = Some(self.next_id);
            self.out.push_back(Action::Judge { id: self.next_id, from: turn.start, to: now });
            self.next_id += 1;
        }
        if self.source == Source::Streamed {
            return;
        }
        // A full turn is asked about once, though the caller goes on.
        let due = quiet >= SETTLE && turn.asked_until < turn.last_voice;
        let final_due = if full { turn.asked_until < turn.start + LONGEST } else { due };
        let since = now.saturating_sub(turn.asked_until.max(turn.fixed_until));
        let partial_due = self.partials && !turn.pausing && since >= PARTIAL && turn.job.is_none();
        if !final_due && !partial_due {
            return;
        }
        if let Some(job) = turn.job.take_if(|_| final_due) {
            self.out.push_back(Action::Cancel { id: job.id });
        }
        let id = self.next_id;
        self.next_id += 1;
        turn.job = Some(Job { id, to: now, urgent: final_due });
        turn.asked_until = now;
        self.out.push_back(Action::Recognise { id, from: turn.fixed_until, to: now, urgent: final_due });
    }

    /// Ends the turn, or tells that it may be ending, where the words and the silence say so.
    fn settle(&mut self, now: Duration, quiet: Duration) {
        let Some(turn) = &self.turn else { return };
        if !turn.pausing || turn.job.is_some() {
            return;
        }
        if !self.covers(turn) {
            if self.source == Source::Streamed && quiet >= self.delays.max + self.late {
                // Words so far are better than none. A service that has heard the sound and has nothing to say of it heard
                // no words; one that says nothing has not heard.
                let heard = turn.latest.as_ref().map_or(turn.fixed_until, |(_, until)| *until);
                let lost = turn.last_voice.saturating_sub(turn.fixed_until.max(turn.start));
                if text(turn).is_empty() && heard + TOLERANCE * 2 < turn.last_voice {
                    self.out.push_back(Action::Deaf { lost });
                }
                return self.end(now);
            }
            if turn.likely && !turn.eager && !text(turn).is_empty() {
                self.eager();
            }
            return;
        }
        let (text, verdict) = (text(turn), self.verdict(turn));
        if !text.is_empty() && !turn.eager && verdict != Verdict::Unfinished {
            self.eager();
        }
        let Some(turn) = &self.turn else { return };
        if quiet >= self.delay(turn) {
            self.end(now);
        }
    }

    /// The caller has probably finished.
    fn eager(&mut self) {
        if let Some(turn) = self.turn.as_mut() {
            turn.eager = true;
        }
        self.eagers += 1;
        self.event(Phase::EagerEndOfTurn);
    }

    /// Until when the words of a turn are about its sound that has reached its longest; `None`: they are waited for.
    fn full(&self, turn: &Turn) -> Option<Duration> {
        match self.source {
            Source::Streamed => Some(turn.last_voice),
            Source::Asked => {
                turn.latest.as_ref().map(|(_, until)| *until).filter(|until| *until >= turn.start + LONGEST)
            }
        }
    }

    /// Whether the words are about all of the voice.
    fn covers(&self, turn: &Turn) -> bool {
        match self.source {
            Source::Asked => {
                let latest = turn.latest.as_ref().map(|(_, until)| *until);
                latest.unwrap_or(turn.fixed_until).max(turn.fixed_until) >= turn.last_voice
            }
            Source::Streamed => turn.ended || turn.fixed_until + TOLERANCE >= turn.last_voice && turn.answered,
        }
    }

    fn verdict(&self, turn: &Turn) -> Verdict {
        if turn.ended {
            return Verdict::Complete;
        }
        let words = judge(&text(turn), &language(turn), self.expect);
        // Where something particular is awaited the words say more: a group of digits sounds complete.
        match turn.complete.filter(|_| self.expect.is_none()) {
            Some(true) => words.sooner(),
            Some(false) => words.later(),
            None => words,
        }
    }

    /// How long this turn's last pause must be.
    fn delay(&self, turn: &Turn) -> Duration {
        let Delays { min, max } = self.delays;
        // A cough, a door: there is nothing to wait for. Words that follow are the next turn.
        if text(turn).is_empty() {
            return min;
        }
        match self.verdict(turn) {
            Verdict::Complete => min,
            // A third of the way; longer for a caller whose pauses are.
            Verdict::Open => (min + (max - min) / 3).max(self.pause * 5 / 4).min(max),
            Verdict::Unfinished => max,
        }
    }

    fn end(&mut self, now: Duration) {
        self.event(Phase::EndOfTurn);
        if let Some(job) = self.turn.take().and_then(|turn| turn.job) {
            self.out.push_back(Action::Cancel { id: job.id });
        }
        self.expect = None;
        self.onset = 0;
        let before = self.carry.unwrap_or(now).min(now.saturating_sub(LEAD));
        self.out.push_back(Action::Forget { before });
    }

    fn tell_partial(&mut self) {
        let Some(turn) = self.turn.as_mut() else { return };
        let text = text(turn);
        if !self.partials || text.is_empty() || text == turn.told {
            return;
        }
        turn.told = text;
        self.event(Phase::Partial);
    }

    fn event(&mut self, phase: Phase) {
        let Some(turn) = &self.turn else { return };
        let event = TurnEvent {
            phase,
            text: text(turn),
            language: language(turn),
            start: turn.start,
            end: turn.last_voice,
            confidence: confidence(turn),
            eager: self.eagers,
        };
        self.out.push_back(Action::Event(event));
    }
}

fn parts(turn: &Turn) -> impl Iterator<Item = &Words> {
    turn.fixed.iter().chain(turn.latest.iter().map(|(words, _)| words)).filter(|words| !words.text.is_empty())
}

fn text(turn: &Turn) -> String {
    parts(turn).map(|words| words.text.trim()).collect::<Vec<_>>().join(" ")
}

fn language(turn: &Turn) -> String {
    parts(turn).map(|words| &words.language).filter(|code| !code.is_empty()).last().cloned().unwrap_or_default()
}

/// The least of the parts': one that is doubtful makes the whole so.
fn confidence(turn: &Turn) -> f32 {
    parts(turn).map(|words| words.confidence).reduce(f32::min).unwrap_or(0.0)
}

#[cfg(test)]
#[path = "turn_tests.rs"]
mod tests;
