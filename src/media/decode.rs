//! What the peer says: packets in, 20 ms frames at 16 kHz out.
//!
//! Owns one incoming stream: its order, its codec state, its rate conversion. Never judges what is said.
//! Payloads are bounded by the datagram and may be anything: what cannot be decoded is concealed like a loss.

use std::collections::VecDeque;
use std::sync::LazyLock;
use std::time::{Duration, Instant};

use super::encode::CodecError;
use super::jitter::{Item, Jitter};
use super::leg::{Codec, InPacket};
use super::resample::Converter;
use crate::audio::{from_i16, to_i16};

/// Samples per second of what comes out.
pub const RATE: u32 = 16_000;

/// Samples of one frame that comes out: 20 ms.
pub const FRAME: usize = 320;

/// The longest Opus packet (RFC 6716 section 2.1.4): 120 ms.
const MAX_SAMPLES: usize = RATE as usize * 120 / 1_000;

/// What came out of a stream.
#[derive(Clone, Debug, PartialEq)]
#[expect(clippy::large_enum_variant, reason = "moved once, and boxing would allocate for every packet")]
pub enum Heard {
    /// The next 20 ms.
    Frame([i16; FRAME]),
    /// The peer sent nothing for this long, on purpose.
    Silence(Duration),
}

/// Static payload type of comfort noise at 8 kHz (RFC 3389 section 4, RFC 3551 table 4).
pub const COMFORT_NOISE: u8 = 13;

/// Decodes one incoming stream.
pub struct Inbound {
    codec: Codec,
    jitter: Jitter,
    decoder: Decoder,
    /// Timestamp at which the next packet is expected.
    expected: Option<u32>,
    /// Samples at [`RATE`] of the last packet: a lost one was as long.
    packet: usize,
    /// Payload type of telephone events, which have their place in the stream and no sound.
    events: Option<u8>,
    /// Samples at [`RATE`] that do not fill a frame yet.
    rest: Vec<i16>,
    out: VecDeque<Heard>,
}

impl Inbound {
    /// For what was agreed.
    ///
    /// # Errors
    /// A codec library cannot be set up.
    pub fn new(codec: Codec) -> Result<Self, CodecError> {
        Ok(Self {
            codec,
            jitter: Jitter::default(),
            decoder: Decoder::new(codec)?,
            expected: None,
            packet: FRAME,
            events: None,
            rest: Vec::with_capacity(MAX_SAMPLES + FRAME),
            out: VecDeque::new(),
        })
    }

    /// Packets of this payload type are telephone events.
    pub fn expect_events(&mut self, payload_type: Option<u8>) {
        self.events = payload_type;
    }

    /// Takes one packet of audio, or of a telephone event.
    pub fn push(&mut self, packet: InPacket) {
        self.jitter.push(packet);
    }

    /// The next of what was said, if there is more.
    pub fn poll(&mut self, now: Instant) -> Option<Heard> {
        loop {
            if let Some(heard) = self.out.pop_front() {
                return Some(heard);
            }
            match self.jitter.poll(now)? {
                Item::Restart => {
                    self.decoder.reset();
                    self.expected = None;
                    self.rest.clear();
                }
                Item::Lost { next } => {
                    let before = self.rest.len();
                    self.decoder.conceal(next.as_deref(), self.packet, &mut self.rest);
                    self.expect(None, self.rest.len() - before);
                }
                // The caller is silent from here on. Its level (RFC 3389 section 3) is not imitated: who listens here
                // looks for speech.
                Item::Packet { timestamp, payload_type: COMFORT_NOISE, .. } => {
                    self.skip_silence(timestamp);
                    self.expected = Some(timestamp);
                }
                // What was said meanwhile shows as silence with the next packet.
                Item::Packet { payload_type, .. } if Some(payload_type) == self.events => {}
                Item::Packet { timestamp, payload, .. } => {
                    self.skip_silence(timestamp);
                    let before = self.rest.len();
                    self.decoder.decode(&payload, &mut self.rest);
                    let samples = self.rest.len() - before;
                    if samples > 0 {
                        self.packet = samples.min(MAX_SAMPLES);
                    }
                    self.expect(Some(timestamp), self.rest.len() - before);
                }
            }
            self.cut();
        }
    }

    /// When to poll again though nothing arrives.
    pub fn deadline(&self) -> Option<Instant> {
        self.jitter.deadline()
    }

    /// Packets that never came.
    pub fn lost(&self) -> u64 {
        self.jitter.lost
    }

    fn expect(&mut self, timestamp: Option<u32>, samples: usize) {
        let ticks = (samples as u64 * u64::from(self.codec.clock_rate()) / u64::from(RATE)) as u32;
        self.expected = timestamp.or(self.expected).map(|from| from.wrapping_add(ticks));
    }

    /// A hole in the timestamps without one in the sequence numbers is silence the peer chose not to send.
    fn skip_silence(&mut self, timestamp: u32) {
        let Some(expected) = self.expected else { return };
        let ticks = timestamp.wrapping_sub(expected);
        let length = Duration::from_secs(1).mul_f64(f64::from(ticks) / f64::from(self.codec.clock_rate()));
        // Half the circle is "before": a sender that counts oddly is taken as it comes.
        if ticks < u32::MAX / 2 && length >= Duration::from_millis(20) {
            self.out.push_back(Heard::Silence(length.min(Duration::from_secs(3_600))));
        }
    }

    fn cut(&mut self) {
        let whole = self.rest.len() / FRAME * FRAME;
        for chunk in self.rest[..whole].chunks_exact(FRAME) {
            let mut frame = [0; FRAME];
            frame.copy_from_slice(chunk);
            self.out.push_back(Heard::Frame(frame));
        }
        self.rest.drain(..whole);
    }
}

impl std::fmt::Debug for Inbound {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Inbound").field("codec", &self.codec).field("jitter", &self.jitter).finish_non_exhaustive()
    }
}

/// Decodes payloads of one codec to [`RATE`].
pub struct Decoder {
    kind: Kind,
    /// The last 20 ms, to conceal a loss of the codecs that cannot.
    last: Vec<i16>,
    losses: i32,
}

enum Kind {
    Opus(Box<opus::Decoder>),
    G722(Box<audio_codec::g722::G722Decoder>),
    G711 { worth: &'static [f32; 256], up: Converter, rest: Vec<f32> },
}

/// What each octet of mu-law, and of A-law, is worth.
static WORTHS: LazyLock<[[f32; 256]; 2]> =
    LazyLock::new(|| [mu_law, a_law].map(|expand| std::array::from_fn(|byte| from_i16(expand(byte as u8)))));

impl Decoder {
    /// For `codec`.
    ///
    /// # Errors
    /// A codec library cannot be set up.
    pub fn new(codec: Codec) -> Result<Self, CodecError> {
        let kind = match codec {
            Codec::Opus => Kind::Opus(Box::new(opus::Decoder::new(RATE, opus::Channels::Mono)?)),
            Codec::G722 => Kind::G722(Box::default()),
            Codec::Pcmu | Codec::Pcma => Kind::G711 {
                worth: &WORTHS[usize::from(codec == Codec::Pcma)],
                up: Converter::new(8_000, RATE)?,
                rest: Vec::with_capacity(320),
            },
        };
        Ok(Self { kind, last: Vec::with_capacity(FRAME), losses: 0 })
    }

    /// Appends what `payload` decodes to; conceals what does not decode.
    pub fn decode(&mut self, payload: &[u8], out: &mut Vec<i16>) {
        let start = out.len();
        let done = match &mut self.kind {
            Kind::Opus(decoder) => {
                out.resize(start + MAX_SAMPLES, 0);
                match decoder.decode(payload, &mut out[start..], false) {
                    Ok(samples) => {
                        out.truncate(start + samples);
                        true
                    }
                    Err(_) => {
                        out.truncate(start);
                        false
                    }
                }
            }
            Kind::G722(decoder) => {
                // Two samples a byte; a datagram bounds the payload.
                out.resize(start + payload.len() * 2, 0);
                let samples = decoder.decode_frame_into(payload, &mut out[start..]).unwrap_or(0);
                out.truncate(start + samples);
                true
            }
            Kind::G711 { worth, up, rest } => {
                rest.extend(payload.iter().map(|byte| worth[usize::from(*byte)]));
                let whole = rest.len() / 160 * 160;
                let mut wide = [0.0; FRAME];
                for frame in rest[..whole].chunks_exact(160) {
                    up.frame(frame, &mut wide);
                    out.extend(wide.iter().map(|s| to_i16(*s)));
                }
                rest.drain(..whole);
                true
            }
        };
        if !done {
            self.conceal(None, FRAME, out);
            return;
        }
        self.losses = 0;
        self.remember(&out[start..]);
    }

    /// Appends `samples`, [`FRAME`] for 20 ms, in place of a packet that was lost. `next` is the packet after it.
    pub fn conceal(&mut self, next: Option<&[u8]>, samples: usize, out: &mut Vec<i16>) {
        let start = out.len();
        self.losses = (self.losses + 1).min(8);
        if let Kind::Opus(decoder) = &mut self.kind {
            out.resize(start + samples, 0);
            // With `fec` the decoder takes the copy that `next` carries, or conceals if it carries none.
            let samples = match next {
                Some(next) => decoder.decode(next, &mut out[start..], true),
                None => decoder.decode(&[], &mut out[start..], false),
            };
            out.truncate(start + samples.unwrap_or(0));
            return;
        }
        // 6 dB quieter with every loss in a row.
        out.extend(self.last.iter().cycle().take(samples).map(|s| s >> self.losses));
        out.resize(start + samples, 0);
    }

    /// Forgets the past.
    pub fn reset(&mut self) {
        match &mut self.kind {
            // Fails for no decoder that exists.
            Kind::Opus(decoder) => drop(decoder.reset_state()),
            Kind::G722(decoder) => **decoder = audio_codec::g722::G722Decoder::default(),
            Kind::G711 { up, rest, .. } => {
                up.reset();
                rest.clear();
            }
        }
        self.last.clear();
        self.losses = 0;
    }

    fn remember(&mut self, pcm: &[i16]) {
        self.last.clear();
        self.last.extend_from_slice(&pcm[pcm.len().saturating_sub(FRAME)..]);
    }
}

impl std::fmt::Debug for Decoder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match &self.kind {
            Kind::Opus(_) => "Decoder(Opus)",
            Kind::G722(_) => "Decoder(G722)",
            Kind::G711 { .. } => "Decoder(G711)",
        })
    }
}

/// One G.711 mu-law sample.
pub fn mu_law(byte: u8) -> i16 {
    let mut sample = [0];
    // One byte into one place always fits.
    let _ = audio_codec::Decoder::decode_into(&mut audio_codec::pcmu::PcmuDecoder::new(), &[byte], &mut sample);
    sample[0]
}

fn a_law(byte: u8) -> i16 {
    let mut sample = [0];
    let _ = audio_codec::Decoder::decode_into(&mut audio_codec::pcma::PcmaDecoder::new(), &[byte], &mut sample);
    sample[0]
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;
    use proptest::prelude::*;

    use super::super::encode::{Encoder, OpusSettings};
    use super::super::leg::MediaFormat;
    use super::*;
    use crate::clock;

    fn encoder(codec: Codec) -> Encoder {
        let format = MediaFormat { opus_fec: true, ..MediaFormat::plain(codec) };
        Encoder::new(&format, OpusSettings::default()).unwrap()
    }

    fn tone(frame: usize) -> Vec<f32> {
        (0..480).map(|n| 0.3 * ((frame * 480 + n) as f32 * 440.0 * std::f32::consts::TAU / 24_000.0).sin()).collect()
    }

    fn packet(codec: Codec, n: u16, now: Instant, payload: Bytes) -> InPacket {
        let timestamp = u32::from(n) * codec.frame_ticks();
        InPacket { payload_type: 0, marker: false, sequence: n, timestamp, ssrc: 1, arrived: now, payload }
    }

    fn level(pcm: &[i16]) -> f32 {
        (pcm.iter().map(|s| from_i16(*s).powi(2)).sum::<f32>() / pcm.len().max(1) as f32).sqrt()
    }

    #[test]
    fn every_codec_gives_back_what_was_encoded() {
        for codec in Codec::ALL {
            let (mut encoder, mut inbound, now) = (encoder(codec), Inbound::new(codec).unwrap(), clock::now());
            let mut pcm = Vec::new();
            for n in 0..50 {
                inbound.push(packet(codec, n, now, encoder.encode(&tone(usize::from(n))).unwrap()));
                while let Some(Heard::Frame(frame)) = inbound.poll(now) {
                    pcm.extend_from_slice(&frame);
                }
            }
            assert_eq!(pcm.len(), 50 * FRAME, "{codec:?}");
            let level = level(&pcm[3_200..]);
            assert!((level - 0.212).abs() < 0.02, "{codec:?}: {level}");
            // The tone and not something else: 440 crossings upwards a second.
            let crossings = pcm[3_200..12_800].windows(2).filter(|pair| pair[0] < 0 && pair[1] >= 0).count();
            assert!((255..=275).contains(&crossings), "{codec:?}: {crossings}");
        }
    }

    #[test]
    fn a_lost_packet_is_concealed_and_time_goes_on() {
        for codec in Codec::ALL {
            let (mut encoder, mut inbound, start) = (encoder(codec), Inbound::new(codec).unwrap(), clock::now());
            let mut frames = Vec::new();
            for n in 0..20u16 {
                let now = start + Duration::from_millis(20) * u32::from(n);
                let payload = encoder.encode(&tone(usize::from(n))).unwrap();
                if n != 10 {
                    inbound.push(packet(codec, n, now, payload));
                }
                frames.extend(std::iter::from_fn(|| inbound.poll(now)));
            }
            assert_eq!(frames.len(), 20, "{codec:?}");
            assert!(frames.iter().all(|heard| matches!(heard, Heard::Frame(_))), "{codec:?}");
            let Heard::Frame(concealed) = frames[10] else { panic!("a frame") };
            assert!(level(&concealed) > 0.03, "{codec:?}: {}", level(&concealed));
        }
    }

    #[test]
    fn packets_of_any_length_give_the_same_frames_and_a_lost_one_is_as_long() {
        for (codec, tens) in [Codec::Pcmu, Codec::G722].into_iter().flat_map(|c| [1, 3, 4, 6].map(|tens| (c, tens))) {
            let mut encoder = encoder(codec);
            let sound: Vec<u8> = (0..60).flat_map(|n| encoder.encode(&tone(n)).unwrap().to_vec()).collect();
            let (mut inbound, now) = (Inbound::new(codec).unwrap(), clock::now());
            let mut heard = Vec::new();
            for (n, payload) in sound.chunks(80 * tens).enumerate() {
                // One in the middle is lost.
                if n != 60 / tens {
                    let timestamp = (n * 80 * tens) as u32;
                    let packet = packet(codec, n as u16, now, Bytes::copy_from_slice(payload));
                    inbound.push(InPacket { timestamp, ..packet });
                }
                heard.extend(std::iter::from_fn(|| inbound.poll(now + Duration::from_secs(n as u64))));
            }
            assert_eq!(heard.len(), 60, "{codec:?}, {tens}");
            assert!(heard.iter().all(|heard| matches!(heard, Heard::Frame(_))), "{codec:?}, {tens}: no hole in time");
        }
    }

    #[test]
    fn comfort_noise_is_silence_and_no_sound() {
        let (mut encoder, mut inbound, now) = (encoder(Codec::Pcmu), Inbound::new(Codec::Pcmu).unwrap(), clock::now());
        inbound.push(packet(Codec::Pcmu, 0, now, encoder.silence().unwrap()));
        for (sequence, timestamp) in [(1, 160), (2, 4_160)] {
            let mut noise = packet(Codec::Pcmu, sequence, now, Bytes::from_static(&[64]));
            (noise.payload_type, noise.timestamp) = (COMFORT_NOISE, timestamp);
            inbound.push(noise);
        }
        let mut later = packet(Codec::Pcmu, 3, now, encoder.silence().unwrap());
        later.timestamp = 8_160;
        inbound.push(later);
        let heard = std::iter::from_fn(|| inbound.poll(now)).collect::<Vec<_>>();
        let half = Heard::Silence(Duration::from_millis(500));
        assert!(
            matches!(&heard[..], [Heard::Frame(_), one, other, Heard::Frame(_)] if *one == half && *other == half),
            "{} parts",
            heard.len()
        );
        assert_eq!(inbound.lost(), 0);
    }

    #[test]
    fn silence_that_was_not_sent_is_reported() {
        let (mut encoder, mut inbound, now) = (encoder(Codec::Pcmu), Inbound::new(Codec::Pcmu).unwrap(), clock::now());
        inbound.push(packet(Codec::Pcmu, 0, now, encoder.silence().unwrap()));
        let mut later = packet(Codec::Pcmu, 1, now, encoder.silence().unwrap());
        later.timestamp = 160 + 8_000;
        inbound.push(later);
        let heard = std::iter::from_fn(|| inbound.poll(now)).collect::<Vec<_>>();
        assert!(
            matches!(heard[..], [Heard::Frame(_), Heard::Silence(s), Heard::Frame(_)] if s == Duration::from_secs(1))
        );
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(100))]

        /// No payload panics a decoder or makes it invent more than a packet can hold.
        #[test]
        fn any_payload_is_survived(payloads in proptest::collection::vec(proptest::collection::vec(any::<u8>(), 0..300), 1..20)) {
            for codec in Codec::ALL {
                let (mut inbound, now) = (Inbound::new(codec).unwrap(), clock::now());
                for (n, payload) in payloads.iter().enumerate() {
                    inbound.push(packet(codec, n as u16, now, Bytes::copy_from_slice(payload)));
                    let frames = std::iter::from_fn(|| inbound.poll(now)).count();
                    prop_assert!(frames <= 16);
                }
            }
        }
    }
}
