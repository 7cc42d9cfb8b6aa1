//! What leaves for the peer: frames of speech on their way through the encoder and the playout.
//!
//! Owns the agreed format, the encoder and the schedule of the stream. Never decides what is said.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use bytes::Bytes;

use super::outbox::Outbox;
use crate::audio::{FRAME_SAMPLES, RATE};
use crate::call::bridge::{LinkSender, Piece};
use crate::call::caller::converted;
use crate::call::info::{MediaFrame, TapDirection, TapSender};
use crate::media::decode;
use crate::media::echo::{self, EchoGuard};
use crate::media::encode::{CodecError, Encoder, OpusSettings};
use crate::media::leg::{MediaFormat, OutPacket, PeerReport};
use crate::media::noise::Bed;
use crate::media::playout::{Body, Departure, Frame, Playout, Tapped};
use crate::media::relay::{Relay, Sound};
use crate::media::resample::Converter;
use crate::media::ringback::Ringback;
use crate::turn::UtteranceId;

/// How long sound takes to fall to silence: 5 ms.
const FADE_SAMPLES: usize = RATE as usize / 200;

/// Loudest sample of sound that nobody hears: 60 dB below the loudest there is.
const QUIET: f32 = 0.001;

/// The sending half of a call.
pub(super) struct Output {
    format: MediaFormat,
    encoder: Encoder,
    pub(super) playout: Playout,
    /// PCM of the frames of speech that wait in the playout: to fade out from where it stops, and to encode
    /// them anew when the codec changes.
    prepared: VecDeque<(UtteranceId, Vec<f32>)>,
    /// The last frame that was prepared was speech: silence follows, to empty the codec's delay.
    tail_due: bool,
    /// Where listeners get the same sound, and what brings it to 8 and 16 kHz.
    tap: TapSender,
    narrow: Option<Converter>,
    wide: Option<Converter>,
    /// Levels of what left, against which the caller's are held.
    pub(super) echo: EchoGuard,
    /// What silence is filled with; `None`: it is digital.
    bed: Option<Bed>,
    /// What the caller hears of another call, while they are bridged.
    mix: Option<Mix>,
    /// What silence is filled with while that call rings.
    tone: Option<Waiting>,
    /// The timestamp of the last packet, and the RTP time that had passed until then.
    clock: Option<(u32, Duration)>,
}

/// What a caller hears while another telephone rings.
#[derive(Debug)]
enum Waiting {
    Tone(Ringback),
    /// What is played there: the tone of its country, music, an announcement.
    Sound(Box<Relay>),
}

impl Waiting {
    fn frame(&mut self) -> Sound {
        match self {
            Waiting::Tone(tone) => tone.frame(),
            Waiting::Sound(relay) => relay.pop().unwrap_or([0.0; FRAME_SAMPLES]),
        }
    }
}

/// What a bridged call sends: the other call's sound, and speech of its own where that is to be heard.
#[derive(Debug)]
pub(super) struct Mix {
    pub(super) voice: Relay,
    /// What the agent of the other call says to this peer.
    pub(super) whisper: Relay,
    /// Speech of this call is heard by its own peer.
    pub(super) to_peer: bool,
    /// It is heard by the other call's peer.
    pub(super) to_other: Option<LinkSender>,
}

impl Mix {
    /// Nothing has come yet.
    pub(super) fn new(to_peer: bool, to_other: Option<LinkSender>) -> Result<Self, CodecError> {
        Ok(Self { voice: Relay::new()?, whisper: Relay::new()?, to_peer, to_other })
    }

    /// The next 20 ms, with `own` speech in it or passed on.
    fn next(&mut self, own: Option<&[f32]>) -> Sound {
        let mut sound = self.voice.pop().unwrap_or([0.0; FRAME_SAMPLES]);
        let mut add = |more: &[f32]| {
            for (to, from) in sound.iter_mut().zip(more) {
                *to = (*to + from).clamp(-1.0, 1.0);
            }
        };
        if let Some(whisper) = self.whisper.pop() {
            add(&whisper);
        }
        let Some(own) = own else { return sound };
        if self.to_peer {
            add(own);
        }
        if let Some(other) = &self.to_other {
            let mut whole = [0.0; FRAME_SAMPLES];
            let length = own.len().min(FRAME_SAMPLES);
            whole[..length].copy_from_slice(&own[..length]);
            other.send(Piece::Whisper(Box::new(whole)));
        }
        sound
    }
}

/// A frame of speech that left.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Spoken {
    pub(super) utterance: UtteranceId,
    /// Set where playing time counts from this frame.
    pub(super) anchored: Option<Instant>,
    /// How long the listener heard a gap before it.
    pub(super) underrun: Option<Duration>,
}

impl Output {
    /// `random` seeds the RTP numbers.
    pub(super) fn new(format: &MediaFormat, random: u64, tap: TapSender) -> Result<Self, CodecError> {
        Ok(Self {
            encoder: Encoder::new(format, OpusSettings::default())?,
            playout: Playout::new(format, random as u16, (random >> 16) as u32),
            format: format.clone(),
            prepared: VecDeque::new(),
            tail_due: false,
            tap,
            narrow: None,
            wide: None,
            echo: EchoGuard::default(),
            bed: None,
            mix: None,
            tone: None,
            clock: None,
        })
    }

    /// Fills silence with noise from now on, also where the peer is sent nothing in silence otherwise.
    pub(super) fn fill_silence(&mut self, now: Instant, seed: u32) {
        self.bed = Some(Bed::new(seed));
        self.fill(now);
    }

    /// Has every slot carry something where something fills silence.
    fn fill(&mut self, now: Instant) {
        self.playout.fill(now, self.mix.is_some() || self.tone.is_some() || self.bed.is_some());
    }

    pub(super) fn format(&self) -> &MediaFormat {
        &self.format
    }

    /// Sends what `mix` gives from now on, or what this call says alone again. No speech may wait: it would be encoded for
    /// the other case.
    pub(super) fn bridge(&mut self, now: Instant, mix: Option<Mix>) {
        self.mix = mix;
        self.tone = None;
        self.fill(now);
    }

    /// What is mixed, while this call is bridged.
    pub(super) fn mix(&mut self) -> Option<&mut Mix> {
        self.mix.as_mut()
    }

    /// Fills silence with the ringing tone from now on (`true`), or no more.
    pub(super) fn ring(&mut self, now: Instant, rings: bool) {
        if self.tone.is_some() != rings {
            self.tone = rings.then(|| Waiting::Tone(Ringback::default()));
            self.fill(now);
        }
    }

    /// Fills silence with what comes of the call that rings, in place of the tone.
    pub(super) fn ring_as(&mut self, now: Instant, sound: Relay) {
        self.tone = Some(Waiting::Sound(Box::new(sound)));
        self.fill(now);
    }

    /// Where that goes.
    pub(super) fn ahead(&mut self) -> Option<&mut Relay> {
        match &mut self.tone {
            Some(Waiting::Sound(relay)) => Some(relay),
            Some(Waiting::Tone(_)) | None => None,
        }
    }

    /// The peer agreed to another format, which `encoder` is for: frames that wait are encoded anew.
    pub(super) fn set_format(&mut self, now: Instant, format: MediaFormat, encoder: Encoder, out: &mut Outbox) {
        self.encoder = encoder;
        self.playout.set_format(&format);
        self.format = format;
        for (owner, pcm) in self.prepared.clone() {
            self.encode(now, &pcm, Some(owner), out);
        }
    }

    /// Takes the peer's view of the stream.
    pub(super) fn report(&mut self, report: &PeerReport) {
        self.playout.acknowledge(report.highest_sequence);
        if let Err(error) = self.encoder.report_loss(report.fraction_lost) {
            tracing::warn!(%error, "the encoder keeps its profile");
        }
    }

    /// Encodes a frame of speech, which leaves after those that wait.
    pub(super) fn push(&mut self, now: Instant, owner: UtteranceId, pcm: Vec<f32>, out: &mut Outbox) {
        self.tail_due = true;
        self.encode(now, &pcm, Some(owner), out);
        self.prepared.push_back((owner, pcm));
    }

    /// Whether the last frame was speech, with nothing after it yet.
    pub(super) fn owes_tail(&self) -> bool {
        self.tail_due
    }

    /// One frame of silence after speech empties the delay of codec and resampler, which hold its last
    /// milliseconds. A continuous stream does so by itself.
    pub(super) fn push_tail(&mut self, now: Instant, out: &mut Outbox) {
        self.tail_due = false;
        if !self.format.continuous && self.mix.is_none() && self.bed.is_none() {
            self.encode(now, &[0.0; FRAME_SAMPLES], None, out);
        }
    }

    /// Drops what waits of utterances that are not to be `kept`; where it was `sounding`, it fades.
    pub(super) fn cut(
        &mut self,
        now: Instant,
        sounding: bool,
        mut kept: impl FnMut(UtteranceId) -> bool,
        out: &mut Outbox,
    ) {
        self.playout.flush(&mut kept);
        let mut cut = None;
        self.prepared.retain_mut(|(owner, pcm)| {
            let keep = kept(*owner);
            if !keep && cut.is_none() {
                cut = Some(std::mem::take(pcm));
            }
            keep
        });
        let Some(pcm) = cut.filter(|_| self.mix.is_none()) else { return };
        if let Err(error) = self.encoder.forget_unsent() {
            tracing::warn!(%error, "the encoder builds on frames that were not sent");
        }
        if sounding {
            self.fade(now, pcm, out);
        }
    }

    /// Forgets the PCM of utterances that were withdrawn; their frames have been dropped.
    pub(super) fn forget_unless(&mut self, mut known: impl FnMut(UtteranceId) -> bool) {
        self.prepared.retain(|(owner, _)| known(*owner));
    }

    /// The packet of what leaves now, and whose speech it carries. `connected`: when media began to flow.
    pub(super) fn packet(
        &mut self,
        now: Instant,
        departure: Departure,
        connected: Option<Instant>,
        out: &mut Outbox,
    ) -> (Option<OutPacket>, Option<Spoken>) {
        let mut spoken = None;
        let position = self.position(departure.timestamp);
        let payload = match departure.body {
            Body::Event(payload) => payload,
            Body::Silence if departure.left_out => return (None, None),
            Body::Silence => {
                let at = connected.map(|since| (now.saturating_duration_since(since), position));
                match self.silence(now, None, at) {
                    Ok(payload) => payload,
                    Err(error) => {
                        out.error(format!("silence could not be encoded: {error}"));
                        return (None, None);
                    }
                }
            }
            Body::Speech(frame) => {
                let mut own = None;
                if let Some(utterance) = frame.owner {
                    own = self.prepared.pop_front().map(|(_, pcm)| pcm);
                    if let Some(pcm) = own.as_ref().filter(|_| self.mix.is_none()) {
                        self.echo.sent(now, echo::energy(pcm.iter().copied()));
                    }
                    let (anchored, underrun) = (departure.anchored, departure.underrun);
                    spoken = Some(Spoken { utterance, anchored, underrun });
                }
                // Nothing was encoded when it was prepared: it leaves in a mix.
                let mixed = self.mix.is_some() && frame.payload.is_empty();
                let at = connected.map(|since| (now.saturating_duration_since(since), position));
                if mixed {
                    match self.silence(now, own.as_deref(), at) {
                        Ok(payload) => payload,
                        Err(error) => {
                            out.error(format!("a frame could not be encoded: {error}"));
                            return (None, spoken);
                        }
                    }
                } else {
                    self.tell(frame.tap, at);
                    frame.payload
                }
            }
        };
        if departure.left_out {
            return (None, spoken);
        }
        let packet = OutPacket {
            payload_type: departure.payload_type,
            marker: departure.marker,
            sequence: departure.sequence,
            timestamp: departure.timestamp,
            payload,
        };
        (Some(packet), spoken)
    }

    /// What leaves where this call has nothing of its own to send its peer, and `own` where that goes to the other call:
    /// the other call's sound, a tone, noise, or nothing. Listeners get what is no silence.
    fn silence(
        &mut self,
        now: Instant,
        own: Option<&[f32]>,
        at: Option<(Duration, Duration)>,
    ) -> Result<Bytes, CodecError> {
        let sound = match (&mut self.mix, &mut self.tone) {
            (Some(mix), _) => mix.next(own),
            (None, Some(tone)) => tone.frame(),
            (None, None) => {
                return match &mut self.bed {
                    Some(bed) => self.encoder.encode(&bed.frame()),
                    None => self.encoder.silence(),
                };
            }
        };
        self.echo.sent(now, echo::energy(sound.iter().copied()));
        if self.tap.is_heard() {
            let tapped = self.tapped(&sound);
            self.tell(tapped, at);
        }
        self.encoder.encode(&sound)
    }

    /// Gives listeners what leaves `at` so long after the first sound, at its place in the stream.
    fn tell(&self, tapped: Option<Tapped>, at: Option<(Duration, Duration)>) {
        if let (Some(Tapped { narrow: pcm, wide }), Some((at, position))) = (tapped, at) {
            self.tap.send(MediaFrame { direction: TapDirection::Outbound, at, position, pcm, wide });
        }
    }

    /// RTP time since the first packet. A step back (a key of several packets has one timestamp) is none.
    fn position(&mut self, timestamp: u32) -> Duration {
        let (last, passed) = self.clock.unwrap_or((timestamp, Duration::ZERO));
        let ticks = timestamp.wrapping_sub(last).cast_signed();
        let Ok(ticks) = u32::try_from(ticks) else { return passed };
        let frames = f64::from(ticks) / f64::from(self.format.codec.frame_ticks());
        let position = passed + Duration::from_millis(20).mul_f64(frames);
        self.clock = Some((timestamp, position));
        position
    }

    fn encode(&mut self, now: Instant, pcm: &[f32], owner: Option<UtteranceId>, out: &mut Outbox) {
        if self.mix.is_some() {
            // What it is mixed with is not there yet: it is encoded when it leaves.
            return self
                .playout
                .push(now, Frame { payload: Bytes::new(), owner, samples: pcm.len() as u32, quiet: false, tap: None });
        }
        let payload = match self.encoder.encode(pcm) {
            Ok(payload) => payload,
            Err(error) => return out.error(format!("a frame could not be encoded: {error}")),
        };
        let tap = if self.tap.is_heard() { self.tapped(pcm) } else { None };
        let quiet = pcm.iter().all(|sample| sample.abs() < QUIET);
        self.playout.push(now, Frame { payload, owner, samples: pcm.len() as u32, quiet, tap });
    }

    /// A frame as listeners get it.
    fn tapped(&mut self, pcm: &[f32]) -> Option<Tapped> {
        let convert = |converter: &mut Option<Converter>, rate| {
            if converter.is_none() {
                *converter = Converter::new(RATE, rate).ok();
            }
            converter.as_mut().map(|converter| converted(converter, pcm.iter().copied()))
        };
        let narrow = convert(&mut self.narrow, 8_000)?;
        let wide = if self.tap.is_wide() { convert(&mut self.wide, decode::RATE) } else { None };
        Some(Tapped { narrow, wide })
    }

    /// Lets sound that is cut off fall to silence within a frame instead of breaking off, which clicks, and
    /// which the far end's concealment would stretch.
    fn fade(&mut self, now: Instant, mut pcm: Vec<f32>, out: &mut Outbox) {
        fade_out(&mut pcm);
        self.encode(now, &pcm, None, out);
        self.push_tail(now, out);
    }
}

/// Lets sound fall to silence along half a cosine: one without a corner has the least sound of its own.
fn fade_out(pcm: &mut [f32]) {
    for (n, sample) in pcm.iter_mut().enumerate() {
        let passed = (n as f32 / FADE_SAMPLES as f32).min(1.0);
        *sample *= 0.5 + 0.5 * (std::f32::consts::PI * passed).cos();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::audio::FRAME;
    use crate::call::machine::fixture;
    use crate::clock;
    use crate::media::leg::Codec;

    /// Everything that leaves until `until`, as (utterance, loudest sample of the decoded payload).
    fn departures(output: &mut Output, mut now: Instant, until: Instant, out: &mut Outbox) -> Vec<(bool, i16)> {
        let mut left = Vec::new();
        while now <= until {
            while let Some(departure) = output.playout.poll(now) {
                let (packet, spoken) = output.packet(now, departure, None, out);
                let mut decoder = audio_codec::pcmu::PcmuDecoder::new();
                let pcm = audio_codec::Decoder::decode(&mut decoder, &packet.expect("encoded").payload);
                left.push((spoken.is_some(), pcm.iter().map(|s| s.saturating_abs()).max().unwrap_or(0)));
            }
            now += FRAME;
        }
        left
    }

    #[test]
    fn speech_that_is_cut_off_fades_within_a_frame_and_nothing_of_it_follows() {
        let now = clock::now();
        let mut out = fixture::outbox(now);
        let mut output = Output::new(&MediaFormat::plain(Codec::Pcmu), 0, out.shared.tap.clone()).expect("a codec");
        output.playout.start(now);
        let (cut, kept) = (UtteranceId::next(), UtteranceId::next());
        for owner in [cut, cut, kept] {
            output.push(now, owner, vec![0.5; FRAME_SAMPLES], &mut out);
        }
        output.cut(now, true, |owner| owner == kept, &mut out);
        let left = departures(&mut output, now, now + FRAME * 5, &mut out);
        let spoken: Vec<bool> = left.iter().map(|(spoken, _)| *spoken).collect();
        assert_eq!(spoken, [true, false, false], "the spared frame, the fade and the silence after it: {left:?}");
        assert_eq!(output.playout.sent(cut).sent, 0);
        assert!(left[1].1 > 2_000, "the fade begins where the sound was: {left:?}");
    }

    /// A click is sound where there was none: of a tone of 1 kHz that is cut off, what lies above 4 kHz, in decibels of the
    /// tone.
    #[test]
    fn a_cut_clicks_less_than_60_db() {
        let click = |fade: fn(&mut [f32])| {
            let tone = |n: usize| 0.5 * (std::f32::consts::TAU * 1_000.0 * (n as f32 + 6.0) / RATE as f32).sin();
            let mut sound: Vec<f32> = (0..4 * FRAME_SAMPLES).map(tone).collect();
            // It begins softly: only its end is looked at.
            for (n, sample) in sound[..2 * FRAME_SAMPLES].iter_mut().enumerate() {
                *sample *= 0.5 - 0.5 * (std::f32::consts::PI * n as f32 / (2 * FRAME_SAMPLES) as f32).cos();
            }
            fade(&mut sound[3 * FRAME_SAMPLES..]);
            sound.resize(8 * FRAME_SAMPLES, 0.0);
            let power = |bin: usize| {
                let turn = std::f64::consts::TAU * bin as f64 / sound.len() as f64;
                let (mut re, mut im) = (0.0, 0.0);
                for (n, sample) in sound.iter().enumerate() {
                    re += f64::from(*sample) * (turn * n as f64).cos();
                    im += f64::from(*sample) * (turn * n as f64).sin();
                }
                re * re + im * im
            };
            let bin_of = |hertz: usize| hertz * sound.len() / RATE as usize;
            let (all, above): (f64, f64) =
                ((0..sound.len() / 2).map(power).sum(), (bin_of(4_000)..sound.len() / 2).map(power).sum());
            10.0 * (above / all).log10()
        };
        let cut = click(|pcm| pcm.fill(0.0));
        assert!(cut > -50.0, "a tone that breaks off clicks: {cut} dB");
        let faded = click(fade_out);
        assert!(faded < -60.0, "{faded} dB");
    }

    #[test]
    fn silence_is_digital_or_a_quiet_bed() {
        let now = clock::now();
        let mut out = fixture::outbox(now);
        // The last of them would be sent nothing in silence, as a browser is.
        for (bed, continuous) in [(false, true), (true, true), (true, false)] {
            let format = MediaFormat { continuous, ..MediaFormat::plain(Codec::Pcmu) };
            let mut output = Output::new(&format, 0, out.shared.tap.clone()).expect("a codec");
            if bed {
                output.fill_silence(now, 7);
            }
            output.playout.start(now);
            let left = departures(&mut output, now, now + FRAME * 50, &mut out);
            assert!(left.len() >= 50 && left.iter().all(|(spoken, _)| !spoken));
            // The filter begins empty.
            let loud = left[1..].iter().filter(|(_, loudest)| (20..400).contains(loudest)).count();
            assert_eq!(loud, if bed { left.len() - 1 } else { 0 }, "{left:?}");
        }
    }

    #[test]
    fn a_cut_of_what_does_not_sound_yet_leaves_nothing() {
        let now = clock::now();
        let mut out = fixture::outbox(now);
        let mut output = Output::new(&MediaFormat::plain(Codec::Pcmu), 0, out.shared.tap.clone()).expect("a codec");
        output.playout.start(now);
        output.push(now, UtteranceId::next(), vec![0.5; FRAME_SAMPLES], &mut out);
        output.cut(now, false, |_| false, &mut out);
        assert_eq!(departures(&mut output, now, now + FRAME * 5, &mut out), []);
    }

    #[test]
    fn frames_that_wait_are_encoded_anew_for_another_codec() {
        let now = clock::now();
        let mut out = fixture::outbox(now);
        let mut output = Output::new(&MediaFormat::plain(Codec::Opus), 0, out.shared.tap.clone()).expect("a codec");
        output.playout.start(now);
        let owner = UtteranceId::next();
        output.push(now, owner, vec![0.25; FRAME_SAMPLES], &mut out);
        output.push(now, owner, vec![0.25; FRAME_SAMPLES], &mut out);
        let format = MediaFormat::plain(Codec::Pcmu);
        let encoder = Encoder::new(&format, OpusSettings::default()).expect("a codec");
        output.set_format(now, format, encoder, &mut out);
        let left = departures(&mut output, now, now + FRAME * 3, &mut out);
        assert_eq!(left.len(), 2);
        assert!(left.iter().all(|(spoken, _)| *spoken));
        assert!(left[1].1 > 4_000, "what waited is heard in the new codec: {left:?}");
    }
}
