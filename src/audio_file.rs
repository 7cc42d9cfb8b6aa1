//! Speech as a file or a download: WAV, raw PCM, Ogg Opus, FLAC.
//!
//! Owns the bytes of one stream and nothing else: samples go in, bytes come out as soon as the format allows, so
//! the same writer serves a growing HTTP response and a file on disk. The same samples always give the same
//! bytes. Mono throughout.
//!
//! # Why
//! A stream whose length is not known when it starts cannot have it in its header. WAV then says the largest
//! length, as other streaming writers do and players accept; FLAC says "unknown", as its format allows; Ogg
//! carries it in its last page anyway.

use flacenc::bitsink::ByteSink;
use flacenc::component::{BitRepr, StreamInfo};
use flacenc::config::Encoder as FlacConfig;
use flacenc::error::{Verified, Verify};
use flacenc::source::{Fill, FrameBuf};
use ogg::{PacketWriteEndInfo, PacketWriter};
use opus::{Application, Bitrate, Channels};
use serde::{Deserialize, Serialize};

use crate::audio::to_i16;

/// A file format. The names are those of `response_format` in the OpenAI API.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Format {
    /// RIFF WAVE, 16-bit.
    #[default]
    Wav,
    /// 16-bit little-endian samples and nothing else.
    Pcm,
    /// Opus in Ogg (RFC 7845).
    Opus,
    /// FLAC (RFC 9639), 16-bit.
    Flac,
}

impl Format {
    /// Every format.
    pub const ALL: [Format; 4] = [Format::Wav, Format::Pcm, Format::Opus, Format::Flac];

    /// The format of this name (`wav`, `pcm`, `opus`, `flac`), if there is one.
    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|format| format.name() == name)
    }

    /// Its name, which is also its usual file extension.
    pub fn name(self) -> &'static str {
        match self {
            Format::Wav => "wav",
            Format::Pcm => "pcm",
            Format::Opus => "opus",
            Format::Flac => "flac",
        }
    }

    /// The `Content-Type` of an HTTP response.
    pub fn mime(self) -> &'static str {
        match self {
            Format::Wav => "audio/wav",
            Format::Pcm => "audio/pcm",
            Format::Opus => "audio/ogg; codecs=opus",
            Format::Flac => "audio/flac",
        }
    }
}

/// Why audio could not be written.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum AudioFileError {
    /// The format has no such sample rate.
    #[error("{format} cannot carry {rate} samples per second")]
    Rate {
        /// Which format.
        format: &'static str,
        /// What was asked for.
        rate: u32,
    },
    /// The encoder failed.
    #[error("{format} encoder: {reason}")]
    Encoder {
        /// Which format.
        format: &'static str,
        /// What it said.
        reason: String,
    },
}

/// Writes one stream.
pub struct AudioWriter {
    /// Bytes not yet taken: at first the header.
    bytes: Vec<u8>,
    body: Body,
}

enum Body {
    /// WAV after its header, and PCM.
    Samples,
    Opus(Box<OpusBody>),
    Flac(Box<FlacBody>),
}

impl AudioWriter {
    /// A stream at `rate` samples per second, of unknown length.
    ///
    /// # Errors
    /// The format cannot carry `rate`, or its encoder does not start.
    pub fn new(format: Format, rate: u32) -> Result<Self, AudioFileError> {
        Self::start(format, rate, None)
    }

    /// A stream of exactly `samples` samples, which headers then say.
    ///
    /// # Errors
    /// As [`AudioWriter::new`].
    pub fn with_length(format: Format, rate: u32, samples: u64) -> Result<Self, AudioFileError> {
        Self::start(format, rate, Some(samples))
    }

    fn start(format: Format, rate: u32, samples: Option<u64>) -> Result<Self, AudioFileError> {
        let (bytes, body) = match format {
            Format::Wav => (wav_header(rate, 1, wav_data(samples)), Body::Samples),
            Format::Pcm => (Vec::new(), Body::Samples),
            Format::Opus => {
                let body = OpusBody::new(rate)?;
                (Vec::new(), Body::Opus(Box::new(body)))
            }
            Format::Flac => {
                let (header, body) = FlacBody::new(rate, samples)?;
                (header, Body::Flac(Box::new(body)))
            }
        };
        Ok(Self { bytes, body })
    }

    /// Adds samples in -1..=1 and returns the bytes that are complete; possibly none.
    ///
    /// # Errors
    /// The encoder failed.
    pub fn push(&mut self, pcm: &[f32]) -> Result<Vec<u8>, AudioFileError> {
        match &mut self.body {
            Body::Samples => self.bytes.extend(pcm.iter().flat_map(|sample| to_i16(*sample).to_le_bytes())),
            Body::Opus(opus) => opus.push(pcm, &mut self.bytes)?,
            Body::Flac(flac) => flac.push(pcm, &mut self.bytes)?,
        }
        Ok(std::mem::take(&mut self.bytes))
    }

    /// Ends the stream and returns its last bytes.
    ///
    /// # Errors
    /// The encoder failed.
    pub fn finish(mut self) -> Result<Vec<u8>, AudioFileError> {
        match &mut self.body {
            Body::Samples => {}
            Body::Opus(opus) => opus.finish(&mut self.bytes)?,
            Body::Flac(flac) => flac.finish(&mut self.bytes)?,
        }
        Ok(self.bytes)
    }
}

/// Bytes of a WAV header before its samples.
pub const WAV_HEADER: u32 = 44;

/// The canonical header of 16-bit samples, so many bytes of them; [`u32::MAX`] where that is not known.
pub fn wav_header(rate: u32, channels: u16, data: u32) -> Vec<u8> {
    let frame = channels * 2;
    let mut header = Vec::with_capacity(WAV_HEADER as usize);
    header.extend(b"RIFF");
    header.extend(data.saturating_add(WAV_HEADER - 8).to_le_bytes());
    header.extend(b"WAVEfmt ");
    header.extend(16u32.to_le_bytes());
    // Format 1 is PCM.
    header.extend(1u16.to_le_bytes());
    header.extend(channels.to_le_bytes());
    header.extend(rate.to_le_bytes());
    header.extend((rate * u32::from(frame)).to_le_bytes());
    header.extend(frame.to_le_bytes());
    header.extend(16u16.to_le_bytes());
    header.extend(b"data");
    header.extend(data.to_le_bytes());
    header
}

/// Bytes of `samples` of one channel, as [`wav_header`] takes them.
fn wav_data(samples: Option<u64>) -> u32 {
    let data = samples.and_then(|samples| u32::try_from(samples * 2).ok());
    data.filter(|data| *data <= u32::MAX - WAV_HEADER).unwrap_or(u32::MAX)
}

/// The two packets before the audio of an Ogg Opus stream (RFC 7845 sections 5.1 and 5.2): version 1, so many channels,
/// pre-skip in samples of 48 kHz, input rate, no gain, mapping family 0; then the vendor and no comments.
pub fn opus_headers(rate: u32, channels: u8, pre_skip: u64) -> [Vec<u8>; 2] {
    let mut head = b"OpusHead\x01".to_vec();
    head.push(channels);
    head.extend((pre_skip as u16).to_le_bytes());
    head.extend(rate.to_le_bytes());
    head.extend([0, 0, 0]);
    let vendor = b"antiphon";
    let mut tags = b"OpusTags".to_vec();
    tags.extend((vendor.len() as u32).to_le_bytes());
    tags.extend(vendor);
    tags.extend(0u32.to_le_bytes());
    [head, tags]
}

/// Enough for transparent mono speech.
const OPUS_BITRATE: i32 = 40_000;
/// RFC 7845 counts in 48 kHz samples whatever goes in.
const OPUS_RATE: u32 = 48_000;
/// Largest packet libopus recommends room for.
const OPUS_PACKET: usize = 4_000;
/// Packets in a page: 200 ms, so that a download sounds soon and the overhead stays near one percent.
const OPUS_PAGE: u64 = 10;
/// Any number identifies the only stream of a file; a fixed one keeps the same audio the same bytes.
const OGG_SERIAL: u32 = 0x414e_5450;

struct OpusBody {
    encoder: opus::Encoder,
    writer: PacketWriter<'static, Vec<u8>>,
    /// Samples of one 20 ms packet, at the input's rate.
    frame: usize,
    /// 48 kHz samples for one of the input.
    scale: u64,
    pre_skip: u64,
    /// Less than a frame.
    rest: Vec<f32>,
    /// Samples that came in.
    taken: u64,
    /// Packets encoded.
    packets: u64,
    /// One packet is held back, because the last one of a stream is marked.
    held: Option<Vec<u8>>,
}

impl OpusBody {
    fn new(rate: u32) -> Result<Self, AudioFileError> {
        if ![8_000, 12_000, 16_000, 24_000, 48_000].contains(&rate) {
            return Err(AudioFileError::Rate { format: "opus", rate });
        }
        let mut encoder = opus::Encoder::new(rate, Channels::Mono, Application::Audio).map_err(opus_failed)?;
        encoder.set_bitrate(Bitrate::Bits(OPUS_BITRATE)).map_err(opus_failed)?;
        let scale = u64::from(OPUS_RATE / rate);
        let pre_skip = encoder.get_lookahead().map_err(opus_failed)?.max(0) as u64 * scale;
        let mut writer = PacketWriter::new(Vec::new());
        for header in opus_headers(rate, 1, pre_skip) {
            writer.write_packet(header, OGG_SERIAL, PacketWriteEndInfo::EndPage, 0).map_err(ogg_failed)?;
        }
        Ok(Self {
            encoder,
            writer,
            frame: rate as usize / 50,
            scale,
            pre_skip,
            rest: Vec::new(),
            taken: 0,
            packets: 0,
            held: None,
        })
    }

    fn push(&mut self, pcm: &[f32], bytes: &mut Vec<u8>) -> Result<(), AudioFileError> {
        self.taken += pcm.len() as u64;
        self.rest.extend_from_slice(pcm);
        self.encode()?;
        bytes.append(self.writer.inner_mut());
        Ok(())
    }

    fn encode(&mut self) -> Result<(), AudioFileError> {
        let whole = self.rest.len() / self.frame * self.frame;
        let frames: Vec<f32> = self.rest.drain(..whole).collect();
        for frame in frames.chunks_exact(self.frame) {
            let packet = self.encoder.encode_vec_float(frame, OPUS_PACKET).map_err(opus_failed)?;
            if let Some(held) = self.held.replace(packet) {
                let end = if self.packets.is_multiple_of(OPUS_PAGE) {
                    PacketWriteEndInfo::EndPage
                } else {
                    PacketWriteEndInfo::NormalPacket
                };
                // The position after this packet: all packets so far are whole.
                let position = self.packets * (self.frame as u64 * self.scale);
                self.writer.write_packet(held, OGG_SERIAL, end, position).map_err(ogg_failed)?;
            }
            self.packets += 1;
        }
        Ok(())
    }

    fn finish(&mut self, bytes: &mut Vec<u8>) -> Result<(), AudioFileError> {
        // What the decoder will have skipped at the start has to come out at the end.
        let end = self.pre_skip + self.taken * self.scale;
        let frame = self.frame as u64 * self.scale;
        let wanted = end.div_ceil(frame).max(1);
        while self.packets < wanted {
            let missing = self.frame - self.rest.len().min(self.frame);
            self.rest.extend(std::iter::repeat_n(0.0, missing));
            self.encode()?;
        }
        let last = self.held.take().unwrap_or_default();
        self.writer.write_packet(last, OGG_SERIAL, PacketWriteEndInfo::EndStream, end).map_err(ogg_failed)?;
        bytes.append(self.writer.inner_mut());
        Ok(())
    }
}

fn opus_failed(error: opus::Error) -> AudioFileError {
    AudioFileError::Encoder { format: "opus", reason: error.to_string() }
}

fn ogg_failed(error: std::io::Error) -> AudioFileError {
    AudioFileError::Encoder { format: "opus", reason: error.to_string() }
}

/// Samples of a FLAC block: 100 ms at 24 kHz. Larger ones compress a little better and sound later.
const FLAC_BLOCK: usize = 2_400;
/// The encoder takes no smaller block; a shorter end is filled with silence.
const FLAC_LEAST: usize = 32;

struct FlacBody {
    config: Verified<FlacConfig>,
    info: StreamInfo,
    rest: Vec<i32>,
    blocks: usize,
}

impl FlacBody {
    fn new(rate: u32, samples: Option<u64>) -> Result<(Vec<u8>, Self), AudioFileError> {
        let mut info =
            StreamInfo::new(rate as usize, 1, 16).map_err(|_| AudioFileError::Rate { format: "flac", rate })?;
        info.set_block_sizes(FLAC_BLOCK, FLAC_BLOCK).map_err(flac_failed)?;
        if let Some(samples) = samples {
            info.set_total_samples(padded(samples as usize));
        }
        let config = FlacConfig::default().into_verified().map_err(|(_, error)| flac_failed(error))?;
        // RFC 9639 section 8: the marker, then the only metadata block (last, STREAMINFO, 34 bytes).
        let mut header = b"fLaC\x80\0\0\x22".to_vec();
        let mut sink = ByteSink::new();
        info.write(&mut sink).map_err(flac_failed)?;
        header.append(&mut sink.into_inner());
        Ok((header, Self { config, info, rest: Vec::new(), blocks: 0 }))
    }

    fn push(&mut self, pcm: &[f32], bytes: &mut Vec<u8>) -> Result<(), AudioFileError> {
        self.rest.extend(pcm.iter().map(|sample| i32::from(to_i16(*sample))));
        let mut from = 0;
        while self.rest.len() - from >= FLAC_BLOCK {
            let block = self.rest[from..from + FLAC_BLOCK].to_vec();
            self.block(&block, bytes)?;
            from += FLAC_BLOCK;
        }
        self.rest.drain(..from);
        Ok(())
    }

    fn block(&mut self, samples: &[i32], bytes: &mut Vec<u8>) -> Result<(), AudioFileError> {
        let mut block = FrameBuf::with_size(1, samples.len()).map_err(flac_failed)?;
        block.fill_interleaved(samples).map_err(flac_failed)?;
        let frame =
            flacenc::encode_fixed_size_frame(&self.config, &block, self.blocks, &self.info).map_err(flac_failed)?;
        let mut sink = ByteSink::new();
        frame.write(&mut sink).map_err(flac_failed)?;
        bytes.append(&mut sink.into_inner());
        self.blocks += 1;
        Ok(())
    }

    fn finish(&mut self, bytes: &mut Vec<u8>) -> Result<(), AudioFileError> {
        if self.rest.is_empty() {
            return Ok(());
        }
        let mut last = std::mem::take(&mut self.rest);
        last.resize(last.len().max(FLAC_LEAST), 0);
        self.block(&last, bytes)
    }
}

/// Samples with the silence that fills up a last block that is too short.
fn padded(samples: usize) -> usize {
    match samples % FLAC_BLOCK {
        rest @ 1..FLAC_LEAST => samples + FLAC_LEAST - rest,
        _ => samples,
    }
}

fn flac_failed(error: impl std::fmt::Display) -> AudioFileError {
    AudioFileError::Encoder { format: "flac", reason: error.to_string() }
}

#[cfg(test)]
mod tests;
