//! Whether the caller is speaking: `earshot` scores of 16 ms frames through a state machine with hysteresis.
//!
//! Owns the detector and the decision; never decides what follows from it.
//!
//! # Why
//! One frame over the threshold is a click, a breath or line noise. Onset asks for several frames in a short
//! window, offset for an unbroken quiet stretch with a lower threshold, so that a sentence with pauses between
//! its words is one stretch of speech. An energy floor goes first: it spares quiet lines the network's cost
//! and keeps comfort noise from ever counting as speech.
//!
//! Over our own voice, frames that may be its echo are no proof of a caller, but no proof of the contrary either: a word has
//! quiet syllables between loud ones. So onset asks for half of its voice in frames that are louder than an echo can be, and
//! takes the rest as it comes; an echo alone has none of the former. Asking that of all frames took 0.3 s and more to notice
//! an interruption in the first second of a call, while what the line returns is not known yet.
//!
//! Behind speech over the noise of a street the network takes seconds to be sure that what is left is none, and in a third of
//! the sentences it never is while the noise lasts: a turn would not end. So a frame that it is not sure of is quiet, too,
//! where it is hardly louder than the softest of the last seconds. Lines that are quiet between words know no such noise, and
//! nothing changes on them.

use std::time::Duration;

use serde::{Deserialize, Serialize};

/// Samples per second that [`Vad`] hears.
pub const RATE: u32 = 16_000;

/// Samples of one decision: 16 ms.
pub const FRAME: usize = 256;

/// When a caller counts as speaking.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct VadConfig {
    /// Score (0..1) from which a frame is voice.
    pub onset_score: f32,
    /// Score under which a frame is quiet again; lower than `onset_score`.
    pub offset_score: f32,
    /// Voice needed inside [`VadConfig::onset_window_ms`] to begin.
    pub onset_ms: u64,
    /// The window for that.
    pub onset_window_ms: u64,
    /// Unbroken quiet that ends speech.
    pub offset_ms: u64,
    /// Frames under this level (dB below full scale) are quiet whatever they score.
    pub floor_dbfs: f32,
}

impl Default for VadConfig {
    fn default() -> Self {
        // Onset after 96 ms of voice in 144 ms: shorter than any word that means "stop", longer than a click.
        Self {
            onset_score: 0.55,
            offset_score: 0.35,
            onset_ms: 96,
            onset_window_ms: 144,
            offset_ms: 480,
            floor_dbfs: -50.0,
        }
    }
}

/// Hears 16 kHz audio and says when speech begins and ends.
pub struct Vad {
    detector: Box<earshot::Detector>,
    machine: Hysteresis,
    ground: Ground,
    pending: Vec<i16>,
    floor_energy: f32,
    /// What the network hears is so much louder than what comes.
    gain: f32,
    /// The floor is so much lower, as a mean square.
    reach: f32,
}

impl Vad {
    /// A detector that has heard nothing.
    pub fn new(config: &VadConfig) -> Self {
        // Mean square of the floor; frames compare energies, which saves a logarithm a frame.
        let floor_energy = 10f32.powf(config.floor_dbfs / 10.0);
        Self {
            detector: Box::default(),
            machine: Hysteresis::new(config),
            ground: Ground::default(),
            pending: Vec::with_capacity(FRAME * 2),
            floor_energy,
            gain: 1.0,
            reach: 1.0,
        }
    }

    /// What comes from now on is of a quiet caller: the network hears it with this `gain`, and the floor is lower by `reach` (of
    /// mean squares). Levels are compared with each other as they come.
    pub fn listen_closer(&mut self, gain: f32, reach: f32) {
        (self.gain, self.reach) = (gain, reach);
    }

    /// Hears `pcm` at [`RATE`]; returns whether somebody speaks when that changed in it (the last change).
    pub fn push(&mut self, pcm: &[i16]) -> Option<bool> {
        self.push_above(pcm, 0.0)
    }

    /// As [`Vad::push`]; frames up to the mean square `floor` (of samples in -1..=1) may be somebody else's voice, whatever
    /// they score.
    pub fn push_above(&mut self, pcm: &[i16], floor: f32) -> Option<bool> {
        let least = self.floor_energy / self.reach;
        self.pending.extend_from_slice(pcm);
        let mut changed = None;
        let whole = self.pending.len() / FRAME * FRAME;
        for frame in self.pending[..whole].chunks_exact(FRAME) {
            let energy = frame.iter().map(|s| (f32::from(*s) / 32_768.0).powi(2)).sum::<f32>() / FRAME as f32;
            let score = if energy < least { 0.0 } else { score(&mut self.detector, frame, self.gain) };
            let drowned = self.ground.push(energy) && score < SURE;
            let whose = if energy < floor { Whose::Anybodys } else { Whose::Callers };
            changed = self.machine.push(score, drowned, whose).or(changed);
        }
        self.pending.drain(..whole);
        changed
    }

    /// Nothing arrived for `time` (the peer sends nothing in silence): counts as quiet.
    pub fn silence(&mut self, time: Duration) -> Option<bool> {
        let frames = time.as_millis() as usize / 16;
        // What sends nothing has no noise to tell from speech.
        (0..frames.min(SMOOTH)).for_each(|_| _ = self.ground.push(0.0));
        // Past the offset more quiet changes nothing.
        (0..frames.min(self.machine.offset_frames))
            .fold(None, |changed, _| self.machine.push(0.0, false, Whose::Callers).or(changed))
    }

    /// How long the last voice is ago while somebody counts as speaking.
    pub fn quiet(&self) -> Option<Duration> {
        let frames = self.machine.speaking.then_some(self.machine.quiet)?;
        Some(Duration::from_secs(1) * (frames * FRAME) as u32 / RATE)
    }

    /// Whether somebody speaks.
    pub fn is_speaking(&self) -> bool {
        self.machine.speaking
    }
}

fn score(detector: &mut earshot::Detector, frame: &[i16], gain: f32) -> f32 {
    if gain == 1.0 {
        return detector.predict_i16(frame);
    }
    let mut louder = [0; FRAME];
    // Full scale clips: to the network that is as good as limited.
    louder.iter_mut().zip(frame).for_each(|(to, from)| *to = (f32::from(*from) * gain) as i16);
    detector.predict_i16(&louder)
}

impl std::fmt::Debug for Vad {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Vad").field("machine", &self.machine).finish_non_exhaustive()
    }
}

/// A frame with such a score is voice, however much noise there is.
const SURE: f32 = 0.9;
/// A frame is no louder than the noise that was measured up to this much more energy: 6 dB, by which noise varies.
const NEAR: f32 = 4.0;
/// Frames whose mean is the noise at that time: 128 ms, longer than the gaps inside words.
const SMOOTH: usize = 8;
/// Frames whose mean is looked at: 64 ms.
const RECENT: usize = 4;
/// Frames of one of [`BLOCKS`]: 256 ms.
const BLOCK: usize = 16;
/// Softest means that are remembered, and that must have been heard: two seconds, in which everybody pauses between words.
/// Noise that begins behind silence is known as soon as the silence is forgotten.
const BLOCKS: usize = 8;

/// The noise under a voice: the softest that was heard of late.
#[derive(Debug, Default)]
struct Ground {
    /// Mean squares of the latest frames; the newest is at `at - 1`.
    latest: [f32; SMOOTH],
    at: usize,
    /// The softest mean of each block, the newest at `blocks - 1`.
    softest: [f32; BLOCKS],
    blocks: usize,
    /// Of the block that is going on, which has `frames` of them.
    now: f32,
    frames: usize,
}

impl Ground {
    /// Hears a frame; whether the last ones are hardly louder than the noise.
    fn push(&mut self, energy: f32) -> bool {
        self.latest[self.at % SMOOTH] = energy;
        self.at += 1;
        let mean = |frames: usize| {
            let of = (1..=frames).map(|back| self.latest[(self.at + SMOOTH - back) % SMOOTH]);
            of.sum::<f32>() / frames as f32
        };
        let (recent, smooth) = (mean(RECENT), mean(SMOOTH));
        self.now = if self.frames == 0 { smooth } else { self.now.min(smooth) };
        self.frames += 1;
        let softest = self.softest[..self.blocks.min(BLOCKS)].iter().copied().fold(self.now, f32::min);
        if self.frames == BLOCK {
            self.softest[self.blocks % BLOCKS] = self.now;
            self.blocks += 1;
            self.frames = 0;
        }
        self.blocks >= BLOCKS && recent < softest * NEAR
    }
}

/// Whose voice a frame is, if it is one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Whose {
    /// Louder than an echo of ours can be.
    Callers,
    /// It may be that.
    Anybodys,
}

/// Scores in, decisions out.
#[derive(Debug)]
struct Hysteresis {
    onset_score: f32,
    offset_score: f32,
    onset_frames: u32,
    /// Voice of the latest frames, newest in bit 0; `window` bits count.
    recent: u64,
    /// Those of them that are the caller's for sure.
    sure: u64,
    window: u32,
    quiet: usize,
    offset_frames: usize,
    speaking: bool,
}

impl Hysteresis {
    fn new(config: &VadConfig) -> Self {
        let frames = |ms: u64| (ms / 16).max(1);
        let window = frames(config.onset_window_ms).min(64) as u32;
        Self {
            onset_score: config.onset_score,
            offset_score: config.offset_score.min(config.onset_score),
            onset_frames: (frames(config.onset_ms) as u32).min(window),
            recent: 0,
            sure: 0,
            window,
            quiet: 0,
            offset_frames: frames(config.offset_ms) as usize,
            speaking: false,
        }
    }

    /// `drowned`: the frame is one of the noise around the caller.
    fn push(&mut self, score: f32, drowned: bool, whose: Whose) -> Option<bool> {
        if self.speaking {
            let quiet = drowned || whose == Whose::Anybodys || score < self.offset_score;
            self.quiet = if quiet { self.quiet + 1 } else { 0 };
            if self.quiet < self.offset_frames {
                return None;
            }
            self.speaking = false;
            (self.recent, self.sure) = (0, 0);
            return Some(false);
        }
        let voice = score >= self.onset_score;
        self.recent = self.recent << 1 | u64::from(voice);
        self.sure = self.sure << 1 | u64::from(voice && whose == Whose::Callers);
        let mask = u64::MAX >> (64 - self.window);
        let [voice, sure] = [self.recent, self.sure].map(|frames| (frames & mask).count_ones());
        if voice < self.onset_frames || sure < self.onset_frames.div_ceil(2) {
            return None;
        }
        self.speaking = true;
        self.quiet = 0;
        Some(true)
    }
}

#[cfg(test)]
mod tests {
    use antiphon_loadgen::heard::Clip;
    use antiphon_loadgen::synthetic;

    use super::*;
    use crate::audio::FRAME as FRAME_TIME;
    use crate::clock;
    use crate::media::echo::{EchoGuard, energy};

    fn machine() -> Hysteresis {
        Hysteresis::new(&VadConfig::default())
    }

    #[test]
    fn speech_begins_after_six_voiced_frames_of_nine() {
        let mut machine = machine();
        let scores = [0.9, 0.1, 0.9, 0.9, 0.1, 0.9, 0.9];
        assert!(scores.iter().all(|score| machine.push(*score, false, Whose::Callers).is_none()));
        assert_eq!(machine.push(0.9, false, Whose::Callers), Some(true));
    }

    #[test]
    fn clicks_are_not_speech() {
        let mut machine = machine();
        for n in 0..1_000 {
            assert_eq!(machine.push(if n % 9 < 5 { 0.99 } else { 0.0 }, false, Whose::Callers), None);
        }
    }

    #[test]
    fn half_of_the_voice_must_be_louder_than_our_echo_can_be() {
        let mut machine = machine();
        for n in 0..999 {
            // Two frames of nine, as where a line returns more than was expected for a moment.
            let whose = if n % 9 < 2 { Whose::Callers } else { Whose::Anybodys };
            assert_eq!(machine.push(0.99, false, whose), None, "{n}");
        }
        for _ in 0..2 {
            assert_eq!(machine.push(0.99, false, Whose::Callers), None);
        }
        assert_eq!(machine.push(0.99, false, Whose::Callers), Some(true), "the quiet ones before count with it");
        // A caller who falls silent is silent, whatever comes back of us meanwhile.
        let ends = (0..30).filter_map(|_| machine.push(0.99, false, Whose::Anybodys)).collect::<Vec<_>>();
        assert_eq!(ends, [false]);
    }

    /// Seen in 24 minutes of calls whose callers interrupt 0.4 to 1.5 s into the first turn: silence came 342 ms behind their
    /// first sound at the 95th percentile, where callers who speak later had 140.
    #[test]
    fn a_voice_over_ours_is_noticed_soon_in_the_first_second_of_a_call() {
        let mut reader = hound::WavReader::open("tests/data/speech-8k.wav").expect("the recording");
        let narrow: Vec<i16> = reader.samples::<i16>().map(|s| s.expect("a sample")).collect();
        let wide: Vec<i16> = narrow.windows(2).flat_map(|pair| [pair[0], pair[0].midpoint(pair[1])]).collect();
        let step = RATE as usize / 50;
        let level = |frame: &[i16]| energy(frame.iter().map(|s| f32::from(*s) / 32_768.0));
        let mut late = Vec::new();
        for (begins, at) in (0..10).flat_map(|begins| [20, 30, 40].map(|at| (begins * RATE as usize / 4, at))) {
            let (mut vad, mut guard, mut now) = (Vad::new(&VadConfig::default()), EchoGuard::default(), clock::now());
            let theirs = std::iter::repeat_n(&[0i16; 320][..], at).chain(wide[begins..].chunks_exact(step));
            let mut noticed = None;
            for (n, (ours, theirs)) in wide.chunks_exact(step).zip(theirs).enumerate() {
                now += FRAME_TIME;
                guard.sent(now, level(ours));
                if vad.push_above(theirs, guard.floor(now)) == Some(true) {
                    noticed = Some((n + 1 - at) * 20);
                    break;
                }
                guard.learn(now, level(theirs));
            }
            late.push(noticed.expect("it is noticed"));
        }
        late.sort_unstable();
        // Where all frames of the voice had to be louder than an echo, a tenth took more than 400 ms.
        assert!(late[late.len() / 2] <= 160 && late[late.len() * 9 / 10] <= 240, "ms, sorted: {late:?}");
    }

    #[test]
    fn pauses_between_words_do_not_end_speech() {
        let mut machine = machine();
        for _ in 0..6 {
            machine.push(0.9, false, Whose::Callers);
        }
        assert!(machine.speaking);
        for n in 0..300 {
            assert_eq!(machine.push(if n % 30 == 0 { 0.9 } else { 0.0 }, false, Whose::Callers), None);
        }
        let quiet = (0..30).filter_map(|_| machine.push(0.0, false, Whose::Callers)).collect::<Vec<_>>();
        assert_eq!(quiet, [false]);
    }

    #[test]
    fn silence_and_noise_are_not_speech_and_absence_ends_it() {
        let mut vad = Vad::new(&VadConfig::default());
        assert_eq!(vad.push(&[0; 16_000]), None);
        let mut state = 1u32;
        let noise = std::iter::repeat_with(|| {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 24) as i16 - 128
        });
        assert_eq!(vad.push(&noise.take(16_000).collect::<Vec<_>>()), None);
        assert_eq!(vad.quiet(), None);
        vad.machine.speaking = true;
        assert_eq!(vad.quiet(), Some(Duration::ZERO));
        assert_eq!(vad.silence(Duration::from_millis(160)), None);
        assert_eq!(vad.quiet(), Some(Duration::from_millis(160)));
        vad.machine.quiet = 0;
        assert_eq!(vad.silence(Duration::from_millis(479)), None);
        assert_eq!(vad.silence(Duration::from_secs(3_600)), Some(false));
    }

    /// Speech of a telephone in the noise of a street `since` so many seconds, which lies 10 dB below it, has gone on for
    /// two seconds and does so for five more: how long the last voice is ago behind each frame, and where the speech is.
    fn on_the_street(since: usize) -> (Vec<(usize, Option<Duration>)>, std::ops::Range<usize>) {
        let mut reader = hound::WavReader::open("tests/data/speech-8k.wav").expect("the recording");
        let narrow: Vec<f32> = reader.samples::<i16>().map(|s| f32::from(s.expect("a sample")) / 32_768.0).collect();
        let wide = narrow.windows(2).flat_map(|pair| [pair[0], (pair[0] + pair[1]) / 2.0]);
        let pause = |seconds: usize| std::iter::repeat_n(0.0, seconds * RATE as usize);
        let speech: Vec<f32> = wide.take(3 * RATE as usize).collect();
        let first = 2 * RATE as usize + speech.iter().position(|s| s.abs() > 0.05).expect("a voice");
        let last = 2 * RATE as usize + speech.iter().rposition(|s| s.abs() > 0.05).expect("a voice");
        let clip = Clip { rate: RATE, pcm: pause(2).chain(speech).chain(pause(5)).collect() };
        let mut street = synthetic::street(1, RATE, 77.0);
        street.pcm.rotate_left(since * RATE as usize);
        let noisy = clip.over(&street, 10.0).to_i16();
        let mut vad = Vad::new(&VadConfig::default());
        let frames = noisy.chunks_exact(FRAME).enumerate().map(|(n, frame)| {
            vad.push(frame);
            (n * FRAME, vad.quiet())
        });
        (frames.collect(), first..last)
    }

    #[test]
    fn speech_on_a_street_ends_although_the_noise_does_not() {
        // By its score alone the end shows after 0.6, 1.1, 1.0 and 3.1 seconds.
        for since in [0, 20, 30, 45] {
            let (frames, speech) = on_the_street(since);
            let began =
                frames.iter().position(|(at, quiet)| *at > speech.start && quiet.is_some()).expect("it is heard");
            assert!(frames[began].0 < speech.start + RATE as usize / 2, "{since}: {frames:?}");
            let paused = |quiet: &Option<Duration>| quiet.is_none_or(|quiet| quiet >= Duration::from_millis(350));
            let end = frames[began..].iter().find(|(_, quiet)| paused(quiet)).expect("it ends").0;
            let late = (end as f32 - speech.end as f32) / RATE as f32;
            assert!((0.0..0.5).contains(&late), "{since}: {late} s behind the speech");
        }
    }

    /// How long after speech its end is noticed, at telephone quality, where the noise of a street `since` so many seconds
    /// begins 100 ms before it, in mid-call, and goes on behind it.
    fn behind_a_street_that_begins(since: usize) -> f32 {
        let mut reader = hound::WavReader::open("tests/data/speech-8k.wav").expect("the recording");
        let narrow: Vec<f32> = reader.samples::<i16>().map(|s| f32::from(s.expect("a sample")) / 32_768.0).collect();
        let wide = narrow.windows(2).flat_map(|pair| [pair[0], (pair[0] + pair[1]) / 2.0]);
        let pause = |ms: usize| std::iter::repeat_n(0.0, ms * RATE as usize / 1_000);
        let speech: Vec<f32> = pause(100).chain(wide.take(3 * RATE as usize)).collect();
        let last = speech.iter().rposition(|s| s.abs() > 0.05).expect("a voice");
        let clip = Clip { rate: RATE, pcm: speech.into_iter().chain(pause(8_000)).collect() };
        let mut street = synthetic::street(1, RATE, 77.0);
        street.pcm.rotate_left(since * RATE as usize);
        let mut vad = Vad::new(&VadConfig::default());
        vad.push(&[0; 5 * RATE as usize]);
        let mut heard = false;
        for (n, frame) in clip.over(&street, 10.0).to_i16().chunks_exact(FRAME).enumerate() {
            vad.push(frame);
            let paused = vad.quiet().is_none_or(|quiet| quiet >= Duration::from_millis(350));
            heard |= !paused;
            if heard && paused {
                assert!(n * FRAME > last, "{since}: cut off at {n}");
                return (n * FRAME - last) as f32 / RATE as f32;
            }
        }
        panic!("{since}: the turn does not end");
    }

    #[test]
    fn a_street_that_begins_in_mid_call_holds_no_turn_open() {
        let mut late: Vec<f32> = (0..77).step_by(5).map(behind_a_street_that_begins).collect();
        late.sort_by(f32::total_cmp);
        // With four seconds of silence remembered 1.0 and 3.0 s; half a second is the pause itself and a frame or two.
        assert!(late[late.len() / 2] < 0.5 && late[late.len() - 1] < 2.5, "{late:?}");
    }

    #[test]
    fn where_it_is_quiet_between_words_nothing_is_taken_for_noise() {
        let mut ground = Ground::default();
        for n in 0..1_000 {
            // Words over silence: soft ones, too.
            let energy = if n % 40 < 30 { 1e-4 * (1 + n % 7) as f32 } else { 1e-9 };
            let near = ground.push(energy);
            assert!(!near || energy < 1e-8, "{n}");
        }
        // A tone that begins a call is no noise before a pause was heard, or could have been.
        let mut ground = Ground::default();
        assert!((0..BLOCKS * BLOCK - 1).all(|_| !ground.push(0.1)));
        let mut vad = Vad::new(&VadConfig::default());
        vad.ground = ground;
        vad.silence(Duration::from_secs(3));
        assert!((0..100).all(|_| !vad.ground.push(0.1)), "a peer that sends nothing in its pauses");
    }
}
