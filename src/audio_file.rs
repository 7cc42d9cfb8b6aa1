//! Audio as a file or a stream: WAV, raw PCM, Ogg Opus and FLAC, written as the audio is made.
//!
//! A writer never needs to know how long the audio will be, because nobody does: WAV carries the largest
//! length there is (players read to the end), FLAC says "unknown" (RFC 9639 section 8.2).

use std::borrow::Cow;

use flacenc::bitsink::ByteSink;
use flacenc::component::{BitRepr, Stream, StreamInfo};
use flacenc::config::Encoder as FlacConfig;
use flacenc::error::{Verified, Verify};
use flacenc::source::{Fill, FrameBuf};
use ogg::writing::{PacketWriteEndInfo, PacketWriter};

use crate::audio::{FRAME_SAMPLES, RATE, to_i16};

/// How audio is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Format {
    /// RIFF WAVE, 16-bit.
    Wav,
    /// 16-bit little-endian samples, nothing else.
    Pcm,
    /// Opus in Ogg (RFC 7845).
    Opus,
    /// FLAC (RFC 9639), 16-bit.
    Flac,
}

impl Format {
    /// The format called `name`, as in `response_format`.
    pub fn parse(name: &str) -> Option<Self> {
        match name {
            "wav" => Some(Format::Wav),
            "pcm" => Some(Format::Pcm),
            "opus" => Some(Format::Opus),
            "flac" => Some(Format::Flac),
            _ => None,
        }
    }

    /// The name that [`Format::parse`] reads, which is also the usual ending of a file's name.
    pub fn name(self) -> &'static str {
        match self {
            Format::Wav => "wav",
            Format::Pcm => "pcm",
            Format::Opus => "opus",
            Format::Flac => "flac",
        }
    }

    /// The media type.
    pub fn content_type(self) -> &'static str {
        match self {
            Format::Wav => "audio/wav",
            // RFC 2586 has L16 in network byte order; this is little-endian, so it has no registered name.
            Format::Pcm => "audio/pcm",
            Format::Opus => "audio/ogg; codecs=opus",
            Format::Flac => "audio/flac",
        }
    }
}

/// Writes mono audio at [`RATE`] piece by piece.
pub struct AudioWriter(Inner);

enum Inner {
    Wav { header: bool },
    Pcm,
    Opus(Box<Opus>),
    Flac(Box<Flac>),
}

impl AudioWriter {
    /// A writer of `format` for mono audio at [`RATE`].
    pub fn new(format: Format) -> Self {
        Self(match format {
            Format::Wav => Inner::Wav { header: false },
            Format::Pcm => Inner::Pcm,
            Format::Opus => Inner::Opus(Box::new(Opus::new())),
            Format::Flac => Inner::Flac(Box::new(Flac::new())),
        })
    }

    /// Takes the next samples in -1..=1; returns the bytes that are complete.
    pub fn push(&mut self, pcm: &[f32]) -> Vec<u8> {
        match &mut self.0 {
            Inner::Wav { header } => {
                let mut bytes = if std::mem::replace(header, true) { Vec::new() } else { wav_header(u32::MAX) };
                bytes.extend(samples(pcm));
                bytes
            }
            Inner::Pcm => samples(pcm).collect(),
            Inner::Opus(opus) => opus.push(pcm),
            Inner::Flac(flac) => flac.push(pcm),
        }
    }

    /// The rest: what completes the last frame and closes the file.
    pub fn finish(self) -> Vec<u8> {
        match self.0 {
            Inner::Wav { header: false } => wav_header(0),
            Inner::Wav { header: true } | Inner::Pcm => Vec::new(),
            Inner::Opus(opus) => opus.finish(),
            Inner::Flac(flac) => flac.finish(),
        }
    }
}

fn samples(pcm: &[f32]) -> impl Iterator<Item = u8> {
    pcm.iter().flat_map(|sample| to_i16(*sample).to_le_bytes())
}

/// The header of a WAV file whose audio has `bytes` bytes; `u32::MAX` when that is not known.
pub fn wav_header(bytes: u32) -> Vec<u8> {
    let mut header = Vec::with_capacity(44);
    header.extend(b"RIFF");
    header.extend(bytes.saturating_add(36).to_le_bytes());
    header.extend(b"WAVEfmt ");
    header.extend(16u32.to_le_bytes());
    header.extend(1u16.to_le_bytes());
    header.extend(1u16.to_le_bytes());
    header.extend(RATE.to_le_bytes());
    header.extend((RATE * 2).to_le_bytes());
    header.extend(2u16.to_le_bytes());
    header.extend(16u16.to_le_bytes());
    header.extend(b"data");
    header.extend(bytes.to_le_bytes());
    header
}

/// Largest Opus packet (RFC 6716 section 3.2.1: 1275 bytes and the table of contents).
const MAX_PACKET: usize = 1_276;
/// Granule positions count at 48 kHz whatever the rate (RFC 7845 section 4).
const GRANULE: u64 = 48_000 / RATE as u64;
/// Bits per second: transparent for mono speech.
const OPUS_BITRATE: i32 = 48_000;

struct Opus {
    encoder: opus::Encoder,
    pages: PacketWriter<'static, Vec<u8>>,
    serial: u32,
    pending: Vec<f32>,
    /// A packet is held back so that the last one can carry the end of the stream.
    held: Option<Vec<u8>>,
    frames: u64,
    samples: u64,
    pre_skip: u64,
}

impl Opus {
    fn new() -> Self {
        let mut encoder = opus::Encoder::new(RATE, opus::Channels::Mono, opus::Application::Audio)
            .expect("libopus supports mono at 24 kHz");
        encoder.set_bitrate(opus::Bitrate::Bits(OPUS_BITRATE)).expect("a bit rate in libopus' range");
        let pre_skip = encoder.get_lookahead().map_or(0, |samples| u64::try_from(samples).unwrap_or(0)) * GRANULE;
        // One logical stream a file: any number identifies it, and a constant keeps files reproducible.
        let mut opus = Self {
            encoder,
            pages: PacketWriter::new(Vec::new()),
            serial: 1,
            pending: Vec::new(),
            held: None,
            frames: 0,
            samples: 0,
            pre_skip,
        };
        let mut head = b"OpusHead".to_vec();
        head.extend([1, 1]);
        head.extend((pre_skip as u16).to_le_bytes());
        head.extend(RATE.to_le_bytes());
        head.extend([0, 0, 0]);
        let mut tags = b"OpusTags".to_vec();
        let vendor = b"antiphon";
        tags.extend((vendor.len() as u32).to_le_bytes());
        tags.extend(vendor);
        tags.extend(0u32.to_le_bytes());
        opus.write(head, PacketWriteEndInfo::EndPage, 0);
        opus.write(tags, PacketWriteEndInfo::EndPage, 0);
        opus
    }

    fn write(&mut self, packet: Vec<u8>, end: PacketWriteEndInfo, granule: u64) {
        let written = self.pages.write_packet(Cow::Owned(packet), self.serial, end, granule);
        written.expect("writing to memory does not fail");
    }

    fn push(&mut self, pcm: &[f32]) -> Vec<u8> {
        self.samples += pcm.len() as u64;
        self.pending.extend(pcm);
        self.encode();
        std::mem::take(self.pages.inner_mut())
    }

    fn encode(&mut self) {
        while self.pending.len() >= FRAME_SAMPLES {
            let rest = self.pending.split_off(FRAME_SAMPLES);
            let frame = std::mem::replace(&mut self.pending, rest);
            let packet = self.encoder.encode_vec_float(&frame, MAX_PACKET).expect("a whole frame of finite samples");
            if let Some(held) = self.held.replace(packet) {
                // A page a second: little overhead, and a listener who follows is never far behind.
                let end = if self.frames.is_multiple_of(50) {
                    PacketWriteEndInfo::EndPage
                } else {
                    PacketWriteEndInfo::NormalPacket
                };
                self.write(held, end, self.frames * FRAME_SAMPLES as u64 * GRANULE);
            }
            self.frames += 1;
        }
    }

    fn finish(mut self) -> Vec<u8> {
        // The decoder is behind by the pre-skip, so that much silence pushes the last samples out.
        let end = self.samples * GRANULE + self.pre_skip;
        let needed = end.div_ceil(FRAME_SAMPLES as u64 * GRANULE);
        let missing =
            (needed as usize * FRAME_SAMPLES).saturating_sub(self.frames as usize * FRAME_SAMPLES + self.pending.len());
        self.pending.extend(std::iter::repeat_n(0.0, missing));
        self.encode();
        if let Some(held) = self.held.take() {
            self.write(held, PacketWriteEndInfo::EndStream, end);
        }
        std::mem::take(self.pages.inner_mut())
    }
}

/// Samples of one FLAC frame: the format's usual block size.
const FLAC_BLOCK: usize = 4_096;

struct Flac {
    config: Verified<FlacConfig>,
    info: StreamInfo,
    frame: FrameBuf,
    pending: Vec<i32>,
    number: usize,
    header: bool,
}

impl Flac {
    fn new() -> Self {
        let mut config = FlacConfig::default();
        config.block_size = FLAC_BLOCK;
        config.multithread = false;
        let mut info = StreamInfo::new(RATE as usize, 1, 16).expect("mono 16-bit at 24 kHz is a valid stream");
        info.set_block_sizes(FLAC_BLOCK, FLAC_BLOCK).expect("a valid block size");
        Self {
            config: config.into_verified().map_err(|(_, e)| e).expect("the default configuration is valid"),
            info,
            frame: FrameBuf::with_size(1, FLAC_BLOCK).expect("a valid size"),
            pending: Vec::new(),
            number: 0,
            header: false,
        }
    }

    fn push(&mut self, pcm: &[f32]) -> Vec<u8> {
        self.pending.extend(pcm.iter().map(|sample| i32::from(to_i16(*sample))));
        let mut bytes = self.start();
        while self.pending.len() >= FLAC_BLOCK {
            let rest = self.pending.split_off(FLAC_BLOCK);
            let block = std::mem::replace(&mut self.pending, rest);
            self.write(&block, &mut bytes);
        }
        bytes
    }

    fn start(&mut self) -> Vec<u8> {
        if std::mem::replace(&mut self.header, true) {
            return Vec::new();
        }
        let mut sink = ByteSink::new();
        // A stream without frames is its marker and STREAMINFO, with length and checksum unknown.
        Stream::with_stream_info(self.info.clone()).write(&mut sink).expect("writing to memory does not fail");
        sink.into_inner()
    }

    fn write(&mut self, block: &[i32], bytes: &mut Vec<u8>) {
        if block.len() != FLAC_BLOCK {
            self.frame = FrameBuf::with_size(1, block.len()).expect("a valid size");
        }
        self.frame.fill_interleaved(block).expect("the buffer has the block's size");
        let frame = flacenc::encode_fixed_size_frame(&self.config, &self.frame, self.number, &self.info)
            .expect("16-bit samples, and fewer than 2^31 frames in any length of speech");
        let mut sink = ByteSink::new();
        frame.write(&mut sink).expect("writing to memory does not fail");
        bytes.extend(sink.into_inner());
        self.number += 1;
    }

    fn finish(mut self) -> Vec<u8> {
        let mut bytes = self.start();
        if !self.pending.is_empty() {
            let block = std::mem::take(&mut self.pending);
            self.write(&block, &mut bytes);
        }
        bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tone(seconds: f32) -> Vec<f32> {
        (0..(seconds * RATE as f32) as usize).map(|n| 0.5 * (n as f32 * 0.1).sin()).collect()
    }

    fn write(format: Format, pcm: &[f32], piece: usize) -> Vec<u8> {
        let mut writer = AudioWriter::new(format);
        let mut bytes: Vec<u8> = pcm.chunks(piece).flat_map(|chunk| writer.push(chunk)).collect();
        bytes.extend(writer.finish());
        bytes
    }

    fn decode(bytes: Vec<u8>) -> usize {
        use symphonia::core::formats::probe::Hint;
        use symphonia::core::io::MediaSourceStream;
        let stream = MediaSourceStream::new(Box::new(std::io::Cursor::new(bytes)), Default::default());
        let mut format = symphonia::default::get_probe()
            .probe(&Hint::new(), stream, Default::default(), Default::default())
            .expect("a known format");
        let track = format.tracks().first().expect("a track").clone();
        let parameters = track.codec_params.as_ref().and_then(|p| p.audio()).expect("audio").clone();
        let mut decoder = symphonia::default::get_codecs()
            .make_audio_decoder(&parameters, &Default::default())
            .expect("a known codec");
        let mut samples = 0;
        while let Ok(Some(packet)) = format.next_packet() {
            samples += decoder.decode(&packet).expect("a sound frame").frames();
        }
        samples
    }

    #[test]
    fn how_the_audio_was_cut_does_not_show() {
        let pcm = tone(1.3);
        for format in [Format::Wav, Format::Pcm, Format::Opus, Format::Flac] {
            assert_eq!(write(format, &pcm, 480), write(format, &pcm, 7_777), "{format:?}");
            assert_eq!(Format::parse(format.name()), Some(format));
        }
    }

    #[test]
    fn flac_and_wav_keep_every_sample() {
        let pcm = tone(1.3);
        assert_eq!(decode(write(Format::Flac, &pcm, 960)), pcm.len());
        assert_eq!(write(Format::Wav, &pcm, 960).len(), 44 + 2 * pcm.len());
        assert_eq!(write(Format::Pcm, &pcm, 960).len(), 2 * pcm.len());
    }

    #[test]
    fn ogg_opus_has_the_length_of_the_audio() {
        let pcm = tone(1.3);
        let bytes = write(Format::Opus, &pcm, 960);
        let mut reader = ogg::PacketReader::new(std::io::Cursor::new(bytes));
        let (mut packets, mut end) = (0, 0);
        while let Some(packet) = reader.read_packet().expect("sound pages") {
            packets += 1;
            end = packet.absgp_page();
        }
        let head = 2;
        assert!(packets > head + 65, "{packets}");
        let pre_skip = opus::Encoder::new(RATE, opus::Channels::Mono, opus::Application::Audio)
            .and_then(|mut e| e.get_lookahead())
            .expect("libopus") as u64
            * GRANULE;
        assert_eq!(end - pre_skip, pcm.len() as u64 * GRANULE);
    }

    #[test]
    fn nothing_is_a_valid_file_too() {
        assert_eq!(write(Format::Wav, &[], 1).len(), 44);
        assert!(!write(Format::Opus, &[], 1).is_empty());
        assert_eq!(&write(Format::Flac, &[], 1)[..4], b"fLaC");
    }
}
