//! Who answered an outbound call: a person, an answering machine, a fax; and when a machine's beep has sounded.
//!
//! A state machine over frames of 20 ms: audio and whether it is speech in, at most one finding out. Time is the
//! audio's own. Never decides what follows from a finding.
//!
//! # Why
//! People say little and wait: "Hello?", a name, seldom more than two seconds. Recordings talk on. The limits are those
//! that answering machine detectors of telephony agree on (Asterisk's `app_amd`: greeting 1.5 s, silence after it
//! 0.8 s, silence before it 2.5 s; Twilio: 2.4 s of speech, 5 s of silence): speech beyond [`LONG`] is a recording,
//! speech that ends before and stays quiet for [`WAITING`] a person. Tones need no such guess: a beep, a fax (ITU-T
//! T.30: called terminals answer with 2,100 Hz, calling ones with 1,100 Hz) and the network's own announcements
//! (ITU-T E.180: 950, 1,400, 1,800 Hz) are sine waves, which speech is not. Words say more than timing where a
//! recogniser hears: see [`Detector::heard`].

use std::time::Duration;

use serde::Serialize;

use super::decode::FRAME;

/// Length of one frame.
const TICK: Duration = Duration::from_millis(20);
/// Speech that goes on for so long, short pauses left out, is a recording.
const LONG: Duration = Duration::from_millis(2_400);
/// Quiet after a short greeting in which a person waits for us. The speech detector has its own 480 ms before it.
const WAITING: Duration = Duration::from_millis(280);
/// Quiet from the answer on, after which nothing is expected any more.
const SILENT: Duration = Duration::from_secs(4);
/// Quiet after which a message without a beep is over.
const MESSAGE_OVER: Duration = Duration::from_secs(3);
/// Longest message that is waited for.
const MESSAGE_LIMIT: Duration = Duration::from_secs(60);
/// Shortest beep.
const BEEP: Duration = Duration::from_millis(120);
/// Shortest signal of a fax; its called terminal reverses the phase every 450 ms.
const FAX: Duration = Duration::from_millis(400);
/// Shortest first tone of a network announcement (the shortest that is sent is 276 ms).
const NETWORK: Duration = Duration::from_millis(200);

/// Who or what answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Answerer {
    /// A person.
    Human,
    /// An answering machine, voicemail or an announcement.
    Machine,
    /// A service that asks who is calling before it rings the person.
    Screening,
    /// A menu of keys.
    Menu,
    /// A fax or a modem.
    Fax,
    /// Nothing was said.
    Silence,
}

/// What was found out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Finding {
    /// Who answered; told once, and once more where words show that a person is a machine after all, or what was taken for a
    /// recording by its length a service that asks for a name or a key.
    Answered(Answerer),
    /// The machine's message is over: after its beep (`true`), or after a long silence.
    MessageOver {
        /// Whether a beep was heard.
        beep: bool,
    },
}

/// Listens from the moment of the answer until all is found out.
#[derive(Debug, Default)]
pub struct Detector {
    elapsed: Duration,
    /// Speech so far, without pauses.
    speech: Duration,
    /// Since speech was last heard.
    quiet: Duration,
    tone: Tone,
    /// The tone before the one that sounds.
    previous: Option<f32>,
    found: Option<Answerer>,
    /// It was found by how long was spoken, which a recording of any kind does.
    by_length: bool,
    /// A beep has sounded that is still to be told.
    beeped: bool,
    over: bool,
}

impl Detector {
    /// Whether nothing more will be found out.
    pub fn is_done(&self) -> bool {
        match self.found {
            Some(Answerer::Machine) => self.over,
            found => found.is_some(),
        }
    }

    /// Hears 20 ms at 16 kHz; `speaking` is the speech detector's verdict on them.
    pub fn push(&mut self, frame: &[i16; FRAME], speaking: bool) -> Option<Finding> {
        if self.is_done() {
            return None;
        }
        let ended = self.tone.push(frame);
        if self.tone.sine().is_some() {
            // Neither speech nor quiet.
            self.elapsed += TICK;
        } else {
            self.advance(TICK, speaking);
        }
        self.tones(ended).or_else(|| self.timing())
    }

    /// Nothing arrived for `length`: the peer sends nothing in silence.
    pub fn silence(&mut self, length: Duration) -> Option<Finding> {
        if self.is_done() {
            return None;
        }
        let ended = self.tone.end();
        self.advance(length, false);
        self.tones(ended).or_else(|| self.timing())
    }

    /// A recogniser has heard `text` since the answer. Phrases of the commonest voicemail and screening
    /// services, in English, German, French and Spanish.
    pub fn heard(&mut self, text: &str) -> Option<Finding> {
        let found = by_words(text)?;
        let known = match self.found {
            Some(Answerer::Machine) => !self.by_length || self.over || found == Answerer::Machine,
            found => matches!(found, Some(Answerer::Screening | Answerer::Menu | Answerer::Fax)),
        };
        if known || self.elapsed > MESSAGE_LIMIT {
            return None;
        }
        self.found = Some(found);
        Some(Finding::Answered(found))
    }

    fn advance(&mut self, length: Duration, speaking: bool) {
        self.elapsed += length;
        if speaking {
            self.speech += length;
            self.quiet = Duration::ZERO;
        } else {
            self.quiet += length;
        }
    }

    /// Judges the tone that has just ended and the one that sounds.
    fn tones(&mut self, ended: Option<Sine>) -> Option<Finding> {
        let now = self.tone.sine();
        if self.found.is_none() {
            if now.is_some_and(Sine::is_fax) {
                return self.answered(Answerer::Fax);
            }
            if let (Some(first), Some(second)) = (self.previous, now)
                && (900.0..1_000.0).contains(&first)
                && (1_340.0..1_460.0).contains(&second.hertz)
            {
                return self.answered(Answerer::Machine);
            }
        }
        let sine = ended?;
        self.previous = Some(sine.hertz).filter(|_| sine.length >= NETWORK);
        if sine.length < BEEP || !(350.0..2_300.0).contains(&sine.hertz) {
            return None;
        }
        match self.found {
            Some(Answerer::Machine) => self.message_over(true),
            // A beep is what only machines do, however little was said before it.
            None if self.speech > Duration::ZERO => {
                self.beeped = true;
                self.answered(Answerer::Machine)
            }
            _ => None,
        }
    }

    fn timing(&mut self) -> Option<Finding> {
        match self.found {
            Some(Answerer::Machine) if self.beeped => self.message_over(true),
            None if self.speech >= LONG => {
                self.by_length = true;
                self.answered(Answerer::Machine)
            }
            None if self.speech > Duration::ZERO && self.quiet >= WAITING => self.answered(Answerer::Human),
            None if self.speech.is_zero() && self.elapsed >= SILENT => self.answered(Answerer::Silence),
            Some(Answerer::Machine) if self.quiet >= MESSAGE_OVER || self.elapsed >= MESSAGE_LIMIT => {
                self.message_over(false)
            }
            _ => None,
        }
    }

    fn answered(&mut self, who: Answerer) -> Option<Finding> {
        self.found = Some(who);
        Some(Finding::Answered(who))
    }

    fn message_over(&mut self, beep: bool) -> Option<Finding> {
        self.over = true;
        Some(Finding::MessageOver { beep })
    }
}

/// What a greeting's words show.
fn by_words(text: &str) -> Option<Answerer> {
    const SCREENING: &[&str] =
        &["who is calling", "say your name", "state your name", "record your name", "reason for your call"];
    const MENU: &[&str] = &[
        "press one",
        "press 1",
        "for english",
        "drücken sie",
        "tapez",
        "appuyez sur",
        "pulse uno",
        "marque uno",
        "oprima",
    ];
    const MACHINE: &[&str] = &[
        "leave a message",
        "leave your message",
        "leave your name",
        "leave me a message",
        "after the tone",
        "after the beep",
        "at the tone",
        "voicemail",
        "voice mail",
        "mailbox",
        "not available",
        "unable to take your call",
        "can't take your call",
        "can't come to the phone",
        "cannot be reached",
        "record your message",
        "nachricht hinterlassen",
        "hinterlassen sie",
        "nach dem ton",
        "nach dem signalton",
        "mailbox von",
        "nicht erreichbar",
        "anrufbeantworter",
        "laissez un message",
        "laisser un message",
        "après le bip",
        "après le signal",
        "messagerie",
        "deje un mensaje",
        "deje su mensaje",
        "después del tono",
        "buzón de voz",
    ];
    let text = text.to_lowercase();
    let says = |phrases: &[&str]| phrases.iter().any(|phrase| text.contains(phrase));
    match () {
        () if says(SCREENING) => Some(Answerer::Screening),
        () if says(MACHINE) => Some(Answerer::Machine),
        () if says(MENU) => Some(Answerer::Menu),
        () => None,
    }
}

/// A sine wave.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Sine {
    hertz: f32,
    length: Duration,
}

impl Sine {
    /// The signals with which fax terminals call and answer.
    fn is_fax(self) -> bool {
        self.length >= FAX && ((1_060.0..1_140.0).contains(&self.hertz) || (2_075.0..2_125.0).contains(&self.hertz))
    }
}

/// Follows one sine wave from frame to frame.
#[derive(Debug, Default)]
struct Tone {
    hertz: f32,
    length: Duration,
}

/// Frames below this mean square (-40 dB of full scale) are quiet.
const AUDIBLE: f32 = 1e-4;
/// Share of a frame's energy that a sine may leave unexplained: noise of G.711 and the line, and what they do to the
/// frequency that is found.
const IMPURE: f32 = 0.06;
/// How far one wave may wander from frame to frame, in Hz.
const DRIFT: f32 = 25.0;

impl Tone {
    /// The wave that sounds, if one does.
    fn sine(&self) -> Option<Sine> {
        (!self.length.is_zero()).then_some(Sine { hertz: self.hertz, length: self.length })
    }

    /// Takes a frame; the wave that ended with it.
    fn push(&mut self, frame: &[i16; FRAME]) -> Option<Sine> {
        match pitch(frame) {
            Some(hertz) if !self.length.is_zero() && (hertz - self.hertz).abs() < DRIFT => {
                self.length += TICK;
                None
            }
            Some(hertz) => {
                let ended = self.end();
                (self.hertz, self.length) = (hertz, TICK);
                ended
            }
            None => self.end(),
        }
    }

    fn end(&mut self) -> Option<Sine> {
        let ended = self.sine();
        self.length = Duration::ZERO;
        ended
    }
}

/// The frequency of a frame that is one sine wave.
///
/// Samples of a sine obey `x[n] + x[n-2] = 2 cos(w) x[n-1]`, so least squares give `w` (Prony's method for one wave);
/// the wave of that frequency that fits best must then leave next to nothing of the frame. Every other sample is
/// enough: telephones carry nothing above 4 kHz.
fn pitch(frame: &[i16; FRAME]) -> Option<f32> {
    let mut x = [0.0f32; FRAME / 2];
    for (x, pair) in x.iter_mut().zip(frame.chunks_exact(2)) {
        *x = (f32::from(pair[0]) + f32::from(pair[1])) / 65_536.0;
    }
    let energy: f32 = x.iter().map(|x| x * x).sum();
    if energy / (x.len() as f32) < AUDIBLE {
        return None;
    }
    let sums = x.windows(3).fold((0.0, 0.0), |(cross, square), w| (cross + w[1] * (w[0] + w[2]), square + w[1] * w[1]));
    let cosine = sums.0 / (2.0 * sums.1);
    if !(-0.99..0.99).contains(&cosine) {
        return None;
    }
    let w = cosine.acos();
    // Normal equations of a cos(wn) + b sin(wn).
    let (mut cc, mut cs, mut ss, mut xc, mut xs) = (0.0, 0.0, 0.0, 0.0, 0.0);
    for (n, x) in x.iter().enumerate() {
        let (sin, cos) = (w * n as f32).sin_cos();
        cc += cos * cos;
        cs += cos * sin;
        ss += sin * sin;
        xc += x * cos;
        xs += x * sin;
    }
    let explained = (xc * xc * ss - 2.0 * xc * xs * cs + xs * xs * cc) / (cc * ss - cs * cs);
    (energy - explained < energy * IMPURE).then(|| w * 8_000.0 / std::f32::consts::TAU)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A detector that is fed by its own clock.
    struct Line {
        detector: Detector,
        phase: f32,
        found: Vec<(u128, Finding)>,
        noise: u32,
    }

    impl Line {
        fn new() -> Self {
            Self { detector: Detector::default(), phase: 0.0, found: Vec::new(), noise: 1 }
        }

        fn frames(mut self, ms: u64, speaking: bool, mut sample: impl FnMut(&mut Self) -> f32) -> Self {
            for _ in 0..ms / 20 {
                let frame = std::array::from_fn(|_| (sample(&mut self) * 32_767.0) as i16);
                if let Some(found) = self.detector.push(&frame, speaking) {
                    self.found.push((self.detector.elapsed.as_millis(), found));
                }
            }
            self
        }

        fn random(&mut self) -> f32 {
            self.noise = self.noise.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            self.noise as f32 / u32::MAX as f32 - 0.5
        }

        /// A voice: harmonics of 120 Hz, as the speech detector would take it.
        fn speech(self, ms: u64) -> Self {
            self.frames(ms, true, |line| {
                line.phase += 120.0 / 16_000.0 * std::f32::consts::TAU;
                (1..12).map(|n| (line.phase * n as f32).sin() / n as f32).sum::<f32>() * 0.15
            })
        }

        fn quiet(self, ms: u64) -> Self {
            self.frames(ms, false, |line| line.random() * 0.001)
        }

        /// A sine in the noise of a telephone line, which a speech detector may take for speech.
        fn tone(self, hertz: f32, ms: u64) -> Self {
            self.frames(ms, true, |line| {
                line.phase += hertz / 16_000.0 * std::f32::consts::TAU;
                line.phase.sin() * 0.3 + line.random() * 0.01
            })
        }

        fn found(&self) -> Vec<Finding> {
            self.found.iter().map(|(_, found)| *found).collect()
        }
    }

    use Answerer::{Fax, Human, Machine, Menu, Screening, Silence};
    use Finding::{Answered, MessageOver};

    #[test]
    fn a_person_says_little_and_waits() {
        for length in [200, 400, 900, 1_600, 2_300] {
            let line = Line::new().quiet(400).speech(length).quiet(1_000);
            assert_eq!(line.found(), [Answered(Human)], "{length}");
            assert!(line.detector.is_done());
        }
        // "Hello? ... Who is there?"
        assert_eq!(Line::new().quiet(600).speech(400).quiet(200).speech(700).quiet(800).found(), [Answered(Human)]);
    }

    #[test]
    fn a_recording_talks_on_and_its_beep_ends_it() {
        for hertz in [425.0, 1_000.0, 1_400.0, 2_000.0] {
            let line =
                Line::new().quiet(300).speech(1_500).quiet(200).speech(3_000).quiet(500).tone(hertz, 300).quiet(200);
            assert_eq!(line.found(), [Answered(Machine), MessageOver { beep: true }], "{hertz}");
            let (decided, over) = (line.found[0].0, line.found[1].0);
            assert!(decided < 300 + 3_000, "known within three seconds of speech: {decided}");
            assert_eq!(over, 300 + 1_500 + 200 + 3_000 + 500 + 300 + 20);
        }
    }

    #[test]
    fn a_message_without_a_beep_ends_in_silence() {
        let line = Line::new().speech(4_000).quiet(4_000);
        assert_eq!(line.found(), [Answered(Machine), MessageOver { beep: false }]);
    }

    #[test]
    fn a_short_message_is_known_by_its_beep() {
        let line = Line::new().quiet(200).speech(900).quiet(60).tone(1_000.0, 400).quiet(3_200);
        assert_eq!(line.found(), [Answered(Machine), MessageOver { beep: true }]);
    }

    #[test]
    fn faxes_and_announcements_of_the_network_are_known_by_their_tones() {
        assert_eq!(Line::new().quiet(500).tone(2_100.0, 3_000).found(), [Answered(Fax)]);
        assert_eq!(Line::new().quiet(500).tone(1_100.0, 500).quiet(3_000).found(), [Answered(Fax)]);
        let line = Line::new().tone(950.0, 380).tone(1_400.0, 380).tone(1_800.0, 380).speech(2_000);
        assert_eq!(line.found()[0], Answered(Machine));
        assert!(line.found[0].0 <= 420, "before a word is said: {:?}", line.found);
    }

    #[test]
    fn nobody_says_anything() {
        assert_eq!(Line::new().quiet(5_000).found(), [Answered(Silence)]);
        let mut detector = Detector::default();
        assert_eq!(detector.silence(SILENT), Some(Answered(Silence)));
        assert_eq!(detector.silence(SILENT), None);
    }

    #[test]
    fn two_tones_at_once_and_speech_are_no_beep() {
        let frame =
            |sample: &dyn Fn(f32) -> f32| std::array::from_fn(|n| (sample(n as f32 / 16_000.0) * 32_767.0) as i16);
        let sine = |hertz: f32, t: f32| (hertz * t * std::f32::consts::TAU).sin();
        assert_eq!(pitch(&frame(&|t| 0.2 * sine(697.0, t) + 0.2 * sine(1_209.0, t))), None);
        assert_eq!(pitch(&frame(&|t| 0.2 * sine(150.0, t) + 0.1 * sine(300.0, t) + 0.1 * sine(450.0, t))), None);
        assert_eq!(pitch(&frame(&|_| 0.0)), None);
        for hertz in [400.0, 1_000.0, 2_100.0] {
            let found = pitch(&frame(&|t| 0.2 * sine(hertz, t))).expect("a sine");
            assert!((found - hertz).abs() < 2.0, "{hertz}: {found}");
        }
    }

    #[test]
    fn words_say_more_than_timing() {
        let mut line = Line::new().quiet(300).speech(1_200).quiet(400);
        assert_eq!(line.found(), [Answered(Human)]);
        assert_eq!(line.detector.heard("Please leave a message"), Some(Answered(Machine)));
        assert_eq!(line.detector.heard("after the tone"), None, "said once");
        assert!(!line.detector.is_done(), "its beep is waited for");
        let mut long = Line::new().quiet(300).speech(4_000);
        assert_eq!(long.found(), [Answered(Machine)]);
        assert_eq!(long.detector.heard("The mailbox is full"), None, "as was found");
        assert_eq!(long.detector.heard("please state your name"), Some(Answered(Screening)));
        assert_eq!(long.detector.heard("press one"), None, "the first words that say it count");
        assert_eq!(Detector::default().heard("Hi, if you state your name"), Some(Answered(Screening)));
        assert_eq!(Detector::default().heard("For sales, press one."), Some(Answered(Menu)));
        assert_eq!(Detector::default().heard("Hello, this is Anna."), None);
    }
}
