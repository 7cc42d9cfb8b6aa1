//! The listening half of a call: what the caller says and presses.
//!
//! Owns the incoming stream, the speech detector and the digit receiver. Never decides what follows
//! (barge-in: `machine/pause.rs` and `machine/hearing.rs`).

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::bridge::{LinkSender, Piece};
use super::info::{MediaFrame, TapDirection, TapSender};
use super::settings::CallConfig;
use crate::audio::{from_i16, to_i16};
use crate::hear::Feed;
use crate::media::answer::{Detector, Finding};
use crate::media::decode::{self, Heard, Inbound};
use crate::media::dtmf;
use crate::media::echo::{self, EchoGuard};
use crate::media::encode::CodecError;
use crate::media::gain::Gain;
use crate::media::leg::{InPacket, MediaFormat};
use crate::media::resample::Converter;
use crate::media::suppress::Suppressor;
use crate::media::vad::Vad;

/// A caller who sends nothing for this long while speaking has stopped: peers with silence suppression send
/// nothing, and so does a browser whose microphone was muted.
const QUIET: Duration = Duration::from_millis(200);

/// Sound is muted for so long after a packet of a telephone event: senders repeat these every 20 to 60 ms, and some send
/// the tone itself beside them.
const KEY: Duration = Duration::from_millis(70);

/// One frame of [`Inbound`].
const FRAME: Duration = Duration::from_millis(20);

/// Words that come later than this behind the caller's last sound were not said, but written.
const RECENT: Duration = Duration::from_secs(10);

/// What the caller did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Signal {
    /// Began (`true`) or stopped speaking.
    Speaking(bool),
    /// Pressed a key.
    Digit(char),
    /// Turned out to be a person or a machine.
    Found(Finding),
}

/// The incoming stream of one caller.
///
/// Why this struct is large: one stream is listened to for five purposes (voice, keys, words, who answered, another call), and
/// each is fed from the same frames.
#[derive(Debug)]
pub(super) struct CallerInput {
    inbound: Inbound,
    /// Takes noise out, where that is asked for.
    suppressor: Option<Suppressor>,
    /// Makes quiet callers louder for the detector and for recognisers, where that is wanted.
    gain: Option<Gain>,
    vad: Vad,
    digits: dtmf::Receiver,
    event_type: Option<u8>,
    digit: Option<char>,
    /// Until when what comes is the tone of a key.
    keyed: Option<Instant>,
    tap: Option<Converter>,
    /// RTP time of what was heard so far.
    position: Duration,
    /// Where the sound is recognised, if it is.
    feed: Option<Feed>,
    /// The call that hears this one, while they are bridged.
    link: Option<LinkSender>,
    /// Finds out who answered, while that is asked.
    answer: Option<Detector>,
    found: Option<Finding>,
    /// When a peer that sends nothing has been silent for another [`QUIET`], while it is found out who answered.
    silent_at: Option<Instant>,
    /// When speech may end although nothing arrives.
    quiet_at: Option<Instant>,
    /// When the latest frame with voice was.
    last_voice: Option<Instant>,
    /// How much of it had voice since the caller began to speak.
    voiced: Duration,
}

impl CallerInput {
    pub(super) fn new(format: &MediaFormat, config: &CallConfig) -> Result<Self, CodecError> {
        Ok(Self {
            inbound: inbound(format)?,
            suppressor: config.suppress_noise.then(Suppressor::default),
            gain: config.agc.then(Gain::default),
            vad: Vad::new(&config.vad),
            digits: dtmf::Receiver::default(),
            event_type: format.telephone_event.map(|(payload_type, _)| payload_type),
            digit: None,
            keyed: None,
            tap: None,
            position: Duration::ZERO,
            feed: None,
            link: None,
            answer: None,
            found: None,
            silent_at: None,
            quiet_at: None,
            last_voice: None,
            voiced: Duration::ZERO,
        })
    }

    /// What the caller says from now on is recognised, too.
    pub(super) fn hear(&mut self, feed: Feed) {
        self.feed = Some(feed);
    }

    /// Where the sound is recognised.
    pub(super) fn feed(&mut self) -> Option<&mut Feed> {
        self.feed.as_mut()
    }

    /// What the caller says goes to another call from now on (`None`: no more).
    pub(super) fn join(&mut self, link: Option<LinkSender>) {
        self.link = link;
    }

    /// Finds out from now on who answered.
    pub(super) fn detect(&mut self, now: Instant) {
        self.answer = Some(Detector::default());
        self.silent_at = Some(now + QUIET);
    }

    /// Whether it is being found out.
    pub(super) fn is_detecting(&self) -> bool {
        self.answer.as_ref().is_some_and(|answer| !answer.is_done())
    }

    /// A recogniser understood `words`, which may show who answered.
    pub(super) fn understood(&mut self, words: &str) {
        self.found = self.answer.as_mut().and_then(|answer| answer.heard(words)).or(self.found);
    }

    /// When the caller's last sound was; `None`: not of late, or never.
    pub(super) fn last_voice(&self, now: Instant) -> Option<Instant> {
        self.last_voice.filter(|at| now.saturating_duration_since(*at) <= RECENT)
    }

    /// How much voice there was since the caller began to speak.
    pub(super) fn voiced(&self) -> Duration {
        self.voiced
    }

    /// The peer agreed to another format.
    pub(super) fn set_format(&mut self, format: &MediaFormat) -> Result<(), CodecError> {
        self.inbound = inbound(format)?;
        self.event_type = format.telephone_event.map(|(payload_type, _)| payload_type);
        Ok(())
    }

    /// Takes one packet.
    pub(super) fn push(&mut self, packet: InPacket) {
        if Some(packet.payload_type) == self.event_type {
            self.digit = self.digits.push(packet.timestamp, &packet.payload).or(self.digit);
            self.keyed = Some(packet.arrived + KEY);
            // It has a number among those of sound; without it there would be a hole to conceal.
            self.inbound.push(packet);
            return;
        }
        self.quiet_at = Some(packet.arrived + QUIET);
        self.silent_at = self.silent_at.map(|_| packet.arrived + QUIET);
        self.inbound.push(packet);
    }

    /// What the caller did, if anything. `since` is when the call connected; `echo` knows what was sent.
    pub(super) fn poll(
        &mut self,
        now: Instant,
        since: Instant,
        tap: &TapSender,
        echo: &mut EchoGuard,
    ) -> Option<Signal> {
        if let Some(digit) = self.digit.take() {
            return Some(Signal::Digit(digit));
        }
        if let Some(found) = self.found.take() {
            return Some(Signal::Found(found));
        }
        let at = now.saturating_duration_since(since);
        while let Some(heard) = self.inbound.poll(now) {
            let changed = match heard {
                Heard::Frame(mut frame) => {
                    if self.keyed.is_some_and(|until| now < until) {
                        frame.fill(0);
                    }
                    // The tones of a machine are as steady as noise.
                    let unfiltered = frame;
                    if let Some(suppressor) = &mut self.suppressor {
                        suppressor.frame(&mut frame);
                    }
                    if let Some(link) = &self.link {
                        link.send(Piece::Heard(Box::new(frame)));
                    }
                    if tap.is_heard() {
                        self.tap(&frame, at, tap);
                    }
                    self.position += FRAME;
                    // What is compared with our own voice has the level that it came with.
                    let energy = echo::energy(frame.iter().map(|s| from_i16(*s)));
                    if let Some(gain) = &self.gain {
                        self.vad.listen_closer(gain.factor(), gain.reach());
                    }
                    let changed = self.vad.push_above(&frame, echo.floor(now));
                    echo.learn(now, energy);
                    if let Some(quiet) = self.vad.quiet() {
                        self.last_voice = now.checked_sub(quiet);
                        if changed.is_some() {
                            self.voiced = Duration::ZERO;
                        }
                        if quiet.is_zero() {
                            self.voiced += FRAME;
                            if let Some(gain) = &mut self.gain {
                                gain.learn(energy);
                            }
                        }
                    }
                    if let Some(gain) = &mut self.gain {
                        gain.frame(&mut frame);
                    }
                    if let Some(feed) = &mut self.feed {
                        feed.frame(at, &frame, self.vad.quiet());
                    }
                    if let Some(answer) = &mut self.answer {
                        self.found = answer.push(&unfiltered, self.vad.is_speaking());
                    }
                    changed
                }
                Heard::Silence(length) => {
                    if let Some(link) = &self.link {
                        link.send(Piece::Silence(length));
                    }
                    self.position += length;
                    let changed = self.vad.silence(length);
                    echo.silence(now, length);
                    if let Some(feed) = &mut self.feed {
                        feed.silence(at, length, self.vad.quiet());
                    }
                    if let Some(answer) = &mut self.answer {
                        self.found = answer.silence(length);
                    }
                    changed
                }
            };
            // A finding of the same frame is told by the next poll.
            if let Some(speaking) = changed {
                return Some(Signal::Speaking(speaking));
            }
            if let Some(found) = self.found.take() {
                return Some(Signal::Found(found));
            }
        }
        if let Some(answer) = &mut self.answer
            && self.silent_at.is_some_and(|at| at <= now)
        {
            let found = answer.silence(QUIET);
            self.silent_at = (!answer.is_done()).then_some(now + QUIET);
            if let Some(found) = found {
                return Some(Signal::Found(found));
            }
        }
        if self.vad.is_speaking() && self.quiet_at.is_some_and(|at| at <= now) {
            // Silence counts from here on, so that the usual offset applies in full.
            self.quiet_at = Some(now + QUIET);
            let changed = self.vad.silence(QUIET);
            if let Some(feed) = &mut self.feed {
                feed.silence(at, QUIET, self.vad.quiet());
            }
            return changed.map(Signal::Speaking);
        }
        None
    }

    /// When to poll again though nothing arrives.
    pub(super) fn deadline(&self) -> Option<Instant> {
        let quiet = self.quiet_at.filter(|_| self.vad.is_speaking());
        self.inbound.deadline().into_iter().chain(quiet).chain(self.silent_at).min()
    }

    fn tap(&mut self, frame: &[i16; decode::FRAME], at: Duration, tap: &TapSender) {
        if self.tap.is_none() {
            self.tap = Converter::new(decode::RATE, 8_000).ok();
        }
        let Some(converter) = &mut self.tap else { return };
        let pcm = converted(converter, frame.iter().map(|s| from_i16(*s)));
        let wide = tap.is_wide().then(|| frame.as_slice().into());
        tap.send(MediaFrame { direction: TapDirection::Inbound, at, position: self.position, pcm, wide });
    }
}

/// The stream of what was agreed.
fn inbound(format: &MediaFormat) -> Result<Inbound, CodecError> {
    let mut inbound = Inbound::new(format.codec)?;
    inbound.expect_events(format.telephone_event.map(|(payload_type, _)| payload_type));
    Ok(inbound)
}

/// One frame at the converter's rate, for taps.
pub(super) fn converted(converter: &mut Converter, frame: impl Iterator<Item = f32>) -> Arc<[i16]> {
    let mut from = frame.collect::<Vec<_>>();
    from.resize(converter.frame_in(), 0.0);
    let mut to = vec![0.0; converter.frame_out()];
    converter.frame(&from, &mut to);
    to.iter().map(|s| to_i16(*s)).collect()
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;

    use super::*;
    use crate::clock;
    use crate::media::encode::mu_law_into;
    use crate::media::leg::Codec;

    #[test]
    fn the_tone_of_a_key_is_not_heard_and_the_key_is() {
        let telephone_event = Some((101, 8_000));
        let format = MediaFormat { telephone_event, continuous: true, ..MediaFormat::plain(Codec::Pcmu) };
        let mut caller = CallerInput::new(&format, &CallConfig::default()).expect("a codec");
        let tap = TapSender::new();
        let mut tapped = tap.subscribe();
        let (start, mut echo) = (clock::now(), EchoGuard::default());
        let (mut sequence, mut keys) = (0, String::new());
        // A second of sound, a key for 200 ms with the tone in every other packet, a second of sound.
        for n in 0..110_u32 {
            let now = start + FRAME * n;
            let keyed = (50..60).contains(&n);
            let mut send = |payload_type, timestamp, payload: Bytes| {
                let marker = false;
                caller.push(InPacket { payload_type, marker, sequence, timestamp, ssrc: 1, arrived: now, payload });
                sequence += 1;
            };
            if keyed {
                send(101, 50 * 160, Bytes::copy_from_slice(&[5, 10, 0, 160]));
            }
            if !keyed || n % 2 == 0 {
                send(0, n * 160, Bytes::from_static(&[0x90; 160]));
            }
            while let Some(signal) = caller.poll(now, start, &tap, &mut echo) {
                if let Signal::Digit(digit) = signal {
                    keys.push(digit);
                }
            }
        }
        assert_eq!(keys, "5");
        assert_eq!(caller.inbound.lost(), 0, "events leave no hole");
        let frames: Vec<_> = std::iter::from_fn(|| tapped.try_recv().ok()).collect();
        let loud = |from: u64, to: u64| {
            let within = |frame: &&MediaFrame| (from..to).contains(&(frame.at.as_millis() as u64));
            frames.iter().filter(within).filter(|frame| frame.pcm.iter().any(|s| s.abs() > 500)).count()
        };
        assert!(loud(0, 1_000) >= 49 && loud(1_320, 2_200) >= 40, "{} and {}", loud(0, 1_000), loud(1_320, 2_200));
        // The filter of the tap's converter rings for a frame.
        assert_eq!(loud(1_020, 1_240), 0, "nothing while it is pressed");
    }

    #[test]
    fn noise_behind_a_caller_is_taken_out_where_that_is_asked_for() {
        // Two seconds of noise at some -30 dB, by telephone; the power of the second one as a listener has it.
        let heard = |suppress_noise| {
            let format = MediaFormat { continuous: true, ..MediaFormat::plain(Codec::Pcmu) };
            let config = CallConfig { suppress_noise, ..CallConfig::default() };
            let mut caller = CallerInput::new(&format, &config).expect("a codec");
            let tap = TapSender::new();
            let mut tapped = tap.subscribe();
            let (start, mut echo, mut state) = (clock::now(), EchoGuard::default(), 7_u32);
            let mut power = 0.0;
            for n in 0..100_u32 {
                let now = start + FRAME * n;
                let payload = (0..160).map(|_| {
                    state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                    // Either sign, and one of the sixteen steps around 1,000.
                    0x30 | (state >> 24) as u8 & 0x8f
                });
                let (payload, sequence, timestamp) = (payload.collect(), n as u16, n * 160);
                let packet =
                    InPacket { payload_type: 0, marker: false, sequence, timestamp, ssrc: 1, arrived: now, payload };
                caller.push(packet);
                while caller.poll(now, start, &tap, &mut echo).is_some() {}
                while let Ok(frame) = tapped.try_recv() {
                    if n >= 50 {
                        power += frame.pcm.iter().map(|s| f64::from(*s).powi(2)).sum::<f64>();
                    }
                }
            }
            power
        };
        let quieter = 10.0 * (heard(false) / heard(true)).log10();
        assert!(quieter > 9.0, "{quieter} dB quieter");
    }

    /// What a call by telephone hears of somebody who says a sentence twice, `db` louder than it was recorded: its turns and
    /// the sound of its last second of voice for a recogniser, and the loudest sample that a tap had.
    fn turns_of(db: f32, agc: bool) -> (Vec<(Duration, bool)>, f32, i16) {
        let format = MediaFormat { continuous: true, ..MediaFormat::plain(Codec::Pcmu) };
        let mut caller = CallerInput::new(&format, &CallConfig { agc, ..CallConfig::default() }).expect("a codec");
        let (feed, mut frames) = Feed::detached();
        caller.hear(feed);
        let tap = TapSender::new();
        let mut tapped = tap.subscribe();
        let (start, mut echo, gain) = (clock::now(), EchoGuard::default(), 10f32.powf(db / 20.0));
        let words = hound::WavReader::open("tests/data/speech-8k.wav").expect("the recording").into_samples::<i16>();
        let words: Vec<i16> = words.map(|s| (f32::from(s.expect("16 bits")) * gain).round() as i16).collect();
        let pause = vec![0; 8_000];
        let said = [&pause[..], &words, &pause, &words, &pause].concat();
        let (mut turns, mut loudest, mut last) = (Vec::new(), 0, Vec::new());
        for (n, pcm) in said.chunks_exact(160).enumerate() {
            let now = start + FRAME * n as u32;
            let mut payload = vec![0; 160];
            mu_law_into(pcm, &mut payload);
            let (payload, sequence, timestamp) = (payload.into(), n as u16, n as u32 * 160);
            let packet =
                InPacket { payload_type: 0, marker: false, sequence, timestamp, ssrc: 1, arrived: now, payload };
            caller.push(packet);
            while let Some(signal) = caller.poll(now, start, &tap, &mut echo) {
                if let Signal::Speaking(speaking) = signal {
                    turns.push((now - start, speaking));
                }
            }
            while let Ok(frame) = tapped.try_recv() {
                loudest = frame.pcm.iter().map(|s| s.saturating_abs()).fold(loudest, i16::max);
            }
            while let Some((quiet, pcm)) = frames.sound() {
                if quiet == Some(Duration::ZERO) {
                    last.push(echo::energy(pcm.iter().map(|s| from_i16(*s))));
                }
            }
        }
        let last = &last[last.len().saturating_sub(50)..];
        (turns, 10.0 * (last.iter().sum::<f32>() / last.len() as f32).log10(), loudest)
    }

    #[test]
    fn a_caller_who_is_30_db_quieter_is_heard_as_well_and_taps_have_what_came() {
        let (loud, level, _) = turns_of(0.0, true);
        assert!(loud.len() == 4 && level > -25.0, "{loud:?}, {level}");
        for db in [-20.0, -30.0] {
            let (turns, level, tapped) = turns_of(db, true);
            let near = |(a, b): (&(Duration, bool), &(Duration, bool))| {
                a.1 == b.1 && a.0.abs_diff(b.0) <= Duration::from_millis(100)
            };
            assert!(turns.len() == 4 && turns.iter().zip(&loud).all(near), "{db} dB: {turns:?}, not {loud:?}");
            assert!((level + 24.0).abs() < 4.0, "{db} dB: {level}");
            assert!(f32::from(tapped) < 40_000.0 * 10f32.powf(db / 20.0), "{db} dB: {tapped}");
        }
        // Without it the floor of the detector takes most of the words.
        let (turns, level, _) = turns_of(-30.0, false);
        let missed = turns.len() != 4 || turns[0].0.abs_diff(loud[0].0) > Duration::from_millis(100);
        assert!(missed || level < -40.0, "{turns:?}, {level}");
    }
}
