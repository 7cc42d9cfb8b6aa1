//! Recordings of any common format into mono samples: the boundary where files of strangers enter.
//!
//! Owns: finding out what a file is (by its content; its name is never asked), decoding it within fixed bounds,
//! and mixing its channels. Never resamples, trims or judges quality.
//!
//! Contract: whatever the bytes are, [`decode`] returns within work proportional to [`MAX_BYTES`] and
//! [`MAX_SECONDS`], and allocates no more than a small multiple of them. It does not panic.
//!
//! # Why
//! - The demuxers and decoders are symphonia's (safe Rust), and libopus for Opus. Some of symphonia's assertions
//!   can be reached by crafted files, so this one function catches unwinding; nothing it borrowed outlives it.
//! - A Vorbis set-up header of a few kilobytes can ask for gigabytes of tables (each of up to 256 codebooks within
//!   its own limit). What it asks for is added up before the decoder sees it.

use std::collections::VecDeque;
use std::io::Cursor;
use std::panic::{AssertUnwindSafe, catch_unwind};

use symphonia::core::codecs::audio::well_known::{CODEC_ID_OPUS, CODEC_ID_VORBIS};
use symphonia::core::codecs::audio::{AudioCodecParameters, AudioDecoder, AudioDecoderOptions};
use symphonia::core::errors::Error as Symphonia;
use symphonia::core::formats::probe::Hint;
use symphonia::core::formats::{FormatOptions, FormatReader, Track, TrackType};
use symphonia::core::io::MediaSourceStream;
use symphonia::core::meta::MetadataOptions;
use symphonia::core::packet::Packet;

/// Largest file: a minute of stereo at 192 kHz and 16 bit is 46 MB.
pub const MAX_BYTES: usize = 64 << 20;
/// Longest recording. Speech may last 30 s; the rest is room for silence around it.
pub const MAX_SECONDS: u32 = 60;
/// Most channels.
pub const MAX_CHANNELS: usize = 8;
/// Rates that can be resampled with sense.
pub const RATES: std::ops::RangeInclusive<u32> = 8_000..=192_000;

/// Of each minute: more packets than one of the shortest Opus packets, of video beside it, and of subtitles.
const MAX_PACKETS: usize = 100_000;
/// Bytes of codebook tables that a Vorbis header may ask for. Real encoders need about one million.
const MAX_CODEBOOK_BYTES: u64 = 64 << 20;
/// Opus is always decoded at this rate.
const OPUS_RATE: u32 = 48_000;
/// Longest Opus packet: 120 ms.
const OPUS_PACKET: usize = 5_760;
/// Recordings that end this much before the length they announce were cut off.
const CUT_OFF_SECONDS: f64 = 0.5;
/// From this magnitude on a sample counts as full scale.
const FULL_SCALE: f32 = 0.9995;

/// A decoded recording.
#[derive(Clone, Debug, PartialEq)]
pub struct Recording {
    /// Samples per second.
    pub rate: u32,
    /// How many channels were mixed.
    pub channels: usize,
    /// Mean of the channels.
    pub samples: Vec<f32>,
    /// Share of the channels' samples that sit at full scale beside another such sample.
    pub clipped: f64,
    /// Whether the channels cancel each other: their mean holds under a hundredth of their power.
    pub cancels: bool,
    /// Packets that could not be decoded and were left out.
    pub damaged_packets: usize,
    /// Name of the container.
    pub container: &'static str,
}

impl Recording {
    /// Length in seconds.
    pub fn seconds(&self) -> f64 {
        self.samples.len() as f64 / f64::from(self.rate)
    }
}

/// Why a recording cannot be used. Every message says what to do instead.
#[derive(Debug, thiserror::Error, PartialEq)]
#[non_exhaustive]
pub enum DecodeError {
    /// Too many bytes.
    #[error("the recording has {bytes} bytes, at most {MAX_BYTES} are taken; cut it to 30 s or less")]
    TooLarge {
        /// How many it has.
        bytes: usize,
    },
    /// Nothing known.
    #[error(
        "the content is no recording in a known format; give wav, flac, mp3, m4a (AAC), ogg (Vorbis, Opus) or webm"
    )]
    Unrecognised,
    /// A known container without sound.
    #[error("the file holds no audio track")]
    NoAudio,
    /// A codec we cannot decode.
    #[error("the audio in this {container} file cannot be decoded ({reason}); convert it to wav")]
    Codec {
        /// Name of the container.
        container: &'static str,
        /// What is not supported.
        reason: String,
    },
    /// A rate outside [`RATES`].
    #[error("the recording has {0} samples a second; 8000 to 192000 are taken, 24000 or more is best")]
    Rate(u32),
    /// Too many channels.
    #[error("the recording has {0} channels, at most {MAX_CHANNELS} are taken; give a mono file")]
    Channels(usize),
    /// Longer than it may be.
    #[error("the recording lasts more than {limit} s ({why}); cut it to 3 to 30 s of speech")]
    TooLong {
        /// How many seconds it may last.
        limit: u32,
        /// How that shows.
        why: String,
    },
    /// The end is missing.
    #[error("the recording is cut off: {have:.1} of {announced:.1} s are there; was the transfer complete?")]
    CutOff {
        /// Seconds that could be decoded.
        have: f64,
        /// Seconds that it announces.
        announced: f64,
    },
    /// Malformed content.
    #[error("the recording is damaged: {0}; export it again, best as wav")]
    Damaged(String),
    /// No samples.
    #[error("the recording is empty")]
    Empty,
    /// Infinite or undefined samples.
    #[error("the recording holds samples that are no numbers; export it again as 16-bit wav")]
    NotNumbers,
}

/// Decodes the recording in `bytes`.
///
/// # Errors
/// It is none, or beyond one of the bounds of this module.
pub fn decode(bytes: Vec<u8>) -> Result<Recording, DecodeError> {
    decode_within(bytes, MAX_SECONDS)
}

/// As [`decode`], of a recording that may last `limit` seconds.
///
/// # Errors
/// As there.
pub fn decode_within(bytes: Vec<u8>, limit: u32) -> Result<Recording, DecodeError> {
    if bytes.len() > MAX_BYTES {
        return Err(DecodeError::TooLarge { bytes: bytes.len() });
    }
    catch_unwind(AssertUnwindSafe(|| decode_inner(bytes, limit)))
        .unwrap_or_else(|_| Err(DecodeError::Damaged("its decoder gave up".into())))
}

/// What a fuzzer runs on arbitrary bytes: [`decode`], and what its contract promises of the result.
///
/// # Panics
/// When the contract is broken.
pub fn fuzz(bytes: &[u8]) {
    if let Ok(recording) = decode(bytes.to_vec()) {
        assert!(RATES.contains(&recording.rate));
        assert!((1..=MAX_CHANNELS).contains(&recording.channels));
        assert!(!recording.samples.is_empty() && recording.seconds() <= f64::from(MAX_SECONDS));
        assert!(recording.samples.iter().all(|s| s.is_finite()));
        assert!((0.0..=1.0).contains(&recording.clipped));
    }
}

fn decode_inner(bytes: Vec<u8>, limit: u32) -> Result<Recording, DecodeError> {
    // symphonia shifts by the number of channels before anyone can look at it.
    if let Some((channels, rate)) = wav_header(&bytes) {
        check_channels(channels.into())?;
        check_rate(rate)?;
    }
    let source = MediaSourceStream::new(Box::new(Cursor::new(bytes)), Default::default());
    let mut format = symphonia::default::get_probe()
        .probe(&Hint::new(), source, FormatOptions::default(), MetadataOptions::default())
        .map_err(unrecognised)?;
    let container = format.format_info().short_name;
    let track = format.default_track(TrackType::Audio).ok_or(DecodeError::NoAudio)?;
    let id = track.id;
    let announced = announced_seconds(track);
    let params = track.codec_params.as_ref().and_then(|p| p.audio()).ok_or(DecodeError::NoAudio)?;
    if let Some(rate) = params.sample_rate {
        check_rate(rate)?;
    }
    if let Some(channels) = &params.channels {
        check_channels(channels.count())?;
    }
    if let Some(seconds) = announced.filter(|s| *s > f64::from(limit)) {
        return Err(DecodeError::TooLong { limit, why: format!("it announces {}", length(seconds)) });
    }
    let mut codec = Codec::new(params, container)?;
    let mut mix = Mix { limit, ..Mix::default() };
    let most = MAX_PACKETS * limit.div_ceil(MAX_SECONDS).max(1) as usize;
    let mut damaged = 0;
    let mut packets = 0;
    while let Some(packet) = next_packet(format.as_mut())? {
        packets += 1;
        if packets > most {
            return Err(DecodeError::Damaged(format!("it has more than {most} packets")));
        }
        if packet.track_id != id {
            continue;
        }
        match codec.decode(&packet)? {
            Some(sound) => mix.push(&sound)?,
            None => damaged += 1,
        }
    }
    // Decoders of compressed sound start with a packet or two that lean on others before the cut.
    if damaged > 3 && damaged * 20 > packets {
        return Err(DecodeError::Damaged(format!("{damaged} of {packets} packets cannot be decoded")));
    }
    let mut recording = mix.finish()?;
    recording.damaged_packets = damaged;
    recording.container = container;
    match announced {
        Some(announced) if recording.seconds() + CUT_OFF_SECONDS < announced => {
            Err(DecodeError::CutOff { have: recording.seconds(), announced })
        }
        _ => Ok(recording),
    }
}

/// The next packet. A file that ends inside a packet ends before it; whether something is missing is judged by the
/// length it announces, and programs that stream a wav announce none.
fn next_packet(format: &mut dyn FormatReader) -> Result<Option<Packet>, DecodeError> {
    match format.next_packet() {
        Ok(packet) => Ok(packet),
        // The next of several chained streams: what follows is another recording.
        Err(Symphonia::ResetRequired) => Ok(None),
        Err(Symphonia::IoError(e)) if e.kind() == std::io::ErrorKind::UnexpectedEof => Ok(None),
        Err(e) => Err(DecodeError::Damaged(e.to_string())),
    }
}

/// Channels and rate in the header of a wav file.
fn wav_header(bytes: &[u8]) -> Option<(u16, u32)> {
    let rest = bytes.strip_prefix(b"RIFF")?.get(4..)?.strip_prefix(b"WAVE")?;
    // It is the first chunk, or the second after one that pads the header to a fixed size.
    let at = rest.get(..512.min(rest.len()))?.windows(4).position(|w| w == b"fmt ")?;
    let body = rest.get(at + 8..at + 16)?;
    Some((u16::from_le_bytes([body[2], body[3]]), u32::from_le_bytes([body[4], body[5], body[6], body[7]])))
}

fn announced_seconds(track: &Track) -> Option<f64> {
    let base = track.time_base?;
    let scale = f64::from(base.numer.get()) / f64::from(base.denom.get());
    let from_duration = track.duration.map(|d| d.get() as f64 * scale);
    let seconds = from_duration.or_else(|| track.num_frames.map(|n| n as f64 * scale))?;
    (seconds > 0.0).then_some(seconds)
}

fn length(seconds: f64) -> String {
    if seconds < 3600.0 { format!("{seconds:.0} s") } else { format!("{:.1} hours", seconds / 3600.0) }
}

fn check_rate(rate: u32) -> Result<(), DecodeError> {
    if RATES.contains(&rate) { Ok(()) } else { Err(DecodeError::Rate(rate)) }
}

fn check_channels(channels: usize) -> Result<(), DecodeError> {
    match channels {
        0 => Err(DecodeError::NoAudio),
        1..=MAX_CHANNELS => Ok(()),
        _ => Err(DecodeError::Channels(channels)),
    }
}

fn unrecognised(error: Symphonia) -> DecodeError {
    match error {
        Symphonia::Unsupported(what) if !what.starts_with("core (probe)") => {
            DecodeError::Codec { container: "audio", reason: what.into() }
        }
        Symphonia::DecodeError(what) => DecodeError::Damaged(what.into()),
        _ => DecodeError::Unrecognised,
    }
}

/// Sound of one packet, interleaved.
struct Sound {
    rate: u32,
    channels: usize,
    samples: Vec<f32>,
}

enum Codec {
    Symphonia(Box<dyn AudioDecoder>),
    Opus { decoder: opus::Decoder, channels: usize, buffer: Vec<f32> },
}

impl Codec {
    fn new(params: &AudioCodecParameters, container: &'static str) -> Result<Self, DecodeError> {
        let unsupported = |reason: String| DecodeError::Codec { container, reason };
        if params.codec == CODEC_ID_OPUS {
            // More than two channels come as several streams in a packet; recordings of a voice are never so.
            let channels = params.channels.as_ref().map_or(1, |c| c.count());
            let layout = match channels {
                1 => opus::Channels::Mono,
                2 => opus::Channels::Stereo,
                n => return Err(DecodeError::Channels(n)),
            };
            let decoder = opus::Decoder::new(OPUS_RATE, layout).map_err(|e| unsupported(e.to_string()))?;
            return Ok(Self::Opus { decoder, channels, buffer: vec![0.0; OPUS_PACKET * channels] });
        }
        if params.codec == CODEC_ID_VORBIS {
            let wanted = params.extra_data.as_deref().map_or(0, codebook_bytes);
            if wanted > MAX_CODEBOOK_BYTES {
                return Err(DecodeError::Damaged(format!("its header asks for {wanted} bytes of tables")));
            }
        }
        symphonia::default::get_codecs()
            .make_audio_decoder(params, &AudioDecoderOptions::default())
            .map(Self::Symphonia)
            .map_err(|e| unsupported(e.to_string()))
    }

    /// `None`: this packet cannot be decoded, the next may.
    fn decode(&mut self, packet: &Packet) -> Result<Option<Sound>, DecodeError> {
        match self {
            Self::Symphonia(decoder) => match decoder.decode(packet) {
                Ok(buffer) => {
                    let (rate, channels) = (buffer.spec().rate(), buffer.spec().channels().count());
                    check_rate(rate)?;
                    check_channels(channels)?;
                    let mut samples = Vec::new();
                    buffer.copy_to_vec_interleaved(&mut samples);
                    Ok(Some(Sound { rate, channels, samples }))
                }
                Err(Symphonia::DecodeError(_) | Symphonia::IoError(_)) => Ok(None),
                Err(e) => Err(DecodeError::Damaged(e.to_string())),
            },
            Self::Opus { decoder, channels, buffer } => {
                // An empty packet would ask the decoder to conceal a loss.
                if packet.data.is_empty() {
                    return Ok(None);
                }
                let Ok(frames) = decoder.decode_float(&packet.data, buffer, false) else { return Ok(None) };
                let start = frames.min(usize::try_from(packet.trim_start.get()).unwrap_or(frames));
                let end = frames.saturating_sub(usize::try_from(packet.trim_end.get()).unwrap_or(frames)).max(start);
                let samples = buffer[start * *channels..end * *channels].to_vec();
                Ok(Some(Sound { rate: OPUS_RATE, channels: *channels, samples }))
            }
        }
    }
}

/// Channels into one, with what is lost by it measured on the way.
#[derive(Default)]
struct Mix {
    /// Seconds that it may last.
    limit: u32,
    rate: u32,
    channels: usize,
    samples: Vec<f32>,
    /// Per channel: whether its last sample was at full scale.
    full: Vec<bool>,
    clipped: u64,
    channel_power: f64,
    mono_power: f64,
}

impl Mix {
    fn push(&mut self, sound: &Sound) -> Result<(), DecodeError> {
        if self.samples.is_empty() {
            (self.rate, self.channels) = (sound.rate, sound.channels);
            self.full = vec![false; sound.channels];
        } else if (self.rate, self.channels) != (sound.rate, sound.channels) {
            return Err(DecodeError::Damaged("its rate or channels change on the way".into()));
        }
        for frame in sound.samples.chunks_exact(self.channels) {
            let mut sum = 0.0;
            for (sample, was_full) in frame.iter().zip(&mut self.full) {
                let full = sample.abs() >= FULL_SCALE;
                self.clipped += u64::from(full && *was_full);
                *was_full = full;
                self.channel_power += f64::from(*sample).powi(2);
                sum += sample;
            }
            let mono = sum / self.channels as f32;
            if !mono.is_finite() {
                return Err(DecodeError::NotNumbers);
            }
            self.mono_power += f64::from(mono).powi(2);
            self.samples.push(mono);
        }
        let limit = self.limit;
        if self.samples.len() as u64 > u64::from(limit) * u64::from(self.rate) {
            return Err(DecodeError::TooLong { limit, why: format!("it goes on after {limit} s") });
        }
        Ok(())
    }

    fn finish(self) -> Result<Recording, DecodeError> {
        if self.samples.is_empty() {
            return Err(DecodeError::Empty);
        }
        let all = self.samples.len() as f64 * self.channels as f64;
        Ok(Recording {
            rate: self.rate,
            channels: self.channels,
            clipped: self.clipped as f64 / all,
            cancels: self.channels > 1 && self.mono_power * 100.0 < self.channel_power / self.channels as f64,
            samples: self.samples,
            damaged_packets: 0,
            container: "",
        })
    }
}

/// An upper bound for the tables that the codebooks in a Vorbis set-up header ask for.
///
/// A codebook starts, at any bit, with a 24-bit mark, then 16 bits of dimensions and 24 of entries. Every place
/// that looks so is counted; the mark turning up by chance is rare and only makes the bound larger.
fn codebook_bytes(header: &[u8]) -> u64 {
    const MARK: u64 = 0x56_4342;
    let mut total = 0_u64;
    let mut window: VecDeque<u8> = header.iter().take(9).copied().collect();
    let mut rest = header.iter().skip(9);
    while window.len() >= 8 {
        let low = window.iter().rev().fold(0_u128, |word, byte| word << 8 | u128::from(*byte));
        for bit in 0..8 {
            let word = (low >> bit) as u64;
            if word & 0xff_ffff == MARK {
                let (dimensions, entries) = (word >> 24 & 0xffff, word >> 40 & 0xff_ffff);
                total = total.saturating_add(dimensions * entries * 4);
            }
        }
        window.pop_front();
        window.extend(rest.next());
    }
    total
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Eight bytes of a codebook's head, `shift` bits into a byte.
    fn codebook(dimensions: u64, entries: u64, shift: u32) -> Vec<u8> {
        let head = u128::from(0x56_4342 | dimensions << 24 | entries << 40) << shift;
        head.to_le_bytes()[..9].to_vec()
    }

    #[test]
    fn codebooks_are_found_at_any_bit() {
        for shift in 0..8 {
            let header = [vec![0x55; 11], codebook(32, 131_072, shift), vec![0x55; 5]].concat();
            assert_eq!(codebook_bytes(&header), 32 * 131_072 * 4, "shift {shift}");
        }
        assert_eq!(codebook_bytes(&[0x42, 0x43]), 0);
    }

    #[test]
    fn the_tables_of_a_real_header_are_counted() {
        let file = include_bytes!("../../tests/data/voice/vorbis.ogg");
        let source = MediaSourceStream::new(Box::new(Cursor::new(file)), Default::default());
        let probe = symphonia::default::get_probe();
        let format = probe.probe(&Hint::new(), source, FormatOptions::default(), MetadataOptions::default());
        let format = format.expect("an ogg file");
        let track = format.default_track(TrackType::Audio).expect("a track");
        let params = track.codec_params.as_ref().and_then(|p| p.audio()).expect("of audio");
        let bytes = codebook_bytes(params.extra_data.as_deref().expect("with a header"));
        assert!((1_000..16 << 20).contains(&bytes), "{bytes}");
    }

    #[test]
    fn many_large_codebooks_add_up() {
        let header: Vec<u8> = (0..256).flat_map(|_| codebook(32, 131_072, 0)).collect();
        assert!(codebook_bytes(&header) > MAX_CODEBOOK_BYTES);
    }

    #[test]
    fn opposite_channels_are_noticed() {
        let mut mix = Mix { limit: MAX_SECONDS, ..Mix::default() };
        let samples = (0..1000).flat_map(|i| [(i as f32 * 0.1).sin(), -(i as f32 * 0.1).sin()]).collect();
        mix.push(&Sound { rate: 48_000, channels: 2, samples }).expect("in bounds");
        assert!(mix.finish().expect("not empty").cancels);
    }

    #[test]
    fn only_neighbours_at_full_scale_are_clipped() {
        let mut mix = Mix { limit: MAX_SECONDS, ..Mix::default() };
        let samples = vec![1.0, 0.0, 1.0, 1.0, 1.0, 0.0, -1.0, -1.0, 0.0, 0.0];
        mix.push(&Sound { rate: 48_000, channels: 1, samples }).expect("in bounds");
        assert!((mix.finish().expect("not empty").clipped - 0.3).abs() < 1e-9);
    }
}
