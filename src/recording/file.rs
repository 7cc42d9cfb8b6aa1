//! A stereo file that grows: WAV, or Opus in Ogg (RFC 7845).

use std::fs::File;
use std::io::{self, BufWriter, Seek as _, SeekFrom, Write as _};
use std::path::Path;

use ogg::{PacketWriteEndInfo, PacketWriter};
use opus::{Application, Bitrate, Channels};
use serde::{Deserialize, Serialize};

use super::{Key, RATE, Sealer};
use crate::audio_file::{WAV_HEADER, opus_headers, wav_header};

/// Kind of file.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Format {
    /// Opus in Ogg: about 15 MB an hour.
    #[default]
    Opus,
    /// 16-bit samples: 115 MB an hour.
    Wav,
}

impl Format {
    /// How its files end.
    pub fn extension(self) -> &'static str {
        match self {
            Format::Opus => "opus",
            Format::Wav => "wav",
        }
    }

    /// The `Content-Type` of an HTTP response.
    pub fn mime(self) -> &'static str {
        match self {
            Format::Opus => "audio/ogg; codecs=opus",
            Format::Wav => "audio/wav",
        }
    }
}

/// Enough for two telephone channels.
const BITRATE: i32 = 32_000;
/// RFC 7845 counts in 48 kHz samples whatever goes in.
const SCALE: u64 = 48_000 / RATE as u64;
/// Samples of one channel in a packet of 20 ms.
const FRAME: usize = RATE as usize / 50;
/// Packets in a page: a second, which is what a crash loses.
const PAGE: u64 = 50;
const OGG_SERIAL: u32 = 0x414e_5452;

/// One file.
pub(super) struct Stereo(Kind);

/// Where it lies.
enum Disk {
    Plain(BufWriter<File>),
    Sealed(Box<Sealer<BufWriter<File>>>),
}

impl Disk {
    /// Returns when everything is on disk.
    fn finish(self) -> io::Result<()> {
        let file = match self {
            Disk::Plain(file) => file,
            Disk::Sealed(sealer) => sealer.finish()?,
        };
        file.into_inner().map_err(|error| error.into_error())?.sync_all()
    }
}

impl io::Write for Disk {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match self {
            Disk::Plain(file) => file.write(bytes),
            Disk::Sealed(sealer) => sealer.write(bytes),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        match self {
            Disk::Plain(file) => file.flush(),
            Disk::Sealed(sealer) => sealer.flush(),
        }
    }
}

enum Kind {
    Wav { file: Disk, samples: u64 },
    Opus(Box<Ogg>),
}

struct Ogg {
    encoder: opus::Encoder,
    writer: PacketWriter<'static, Disk>,
    pre_skip: u64,
    /// Less than a frame, of both channels.
    rest: Vec<i16>,
    /// Samples of one channel that came in.
    taken: u64,
    packets: u64,
    /// One packet is held back, because the last one of a stream is marked.
    held: Option<Vec<u8>>,
}

impl Stereo {
    /// A new file; there must be none. `key`: what it is encrypted with.
    pub(super) fn create(path: &Path, format: Format, key: Option<&Key>) -> io::Result<Self> {
        let mut options = File::options();
        options.write(true).create_new(true);
        // Other users of the machine may not read what was said.
        #[cfg(unix)]
        std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
        let file = BufWriter::new(options.open(path)?);
        let mut file = match key {
            Some(key) => Disk::Sealed(Box::new(Sealer::new(file, key)?)),
            None => Disk::Plain(file),
        };
        Ok(Self(match format {
            Format::Wav => {
                file.write_all(&wav_header(RATE, 2, u32::MAX))?;
                Kind::Wav { file, samples: 0 }
            }
            Format::Opus => Kind::Opus(Box::new(Ogg::new(file)?)),
        }))
    }

    /// Adds samples, left and right in turn.
    pub(super) fn push(&mut self, pcm: &[i16]) -> io::Result<()> {
        match &mut self.0 {
            Kind::Wav { file, samples } => {
                let bytes: Vec<u8> = pcm.iter().flat_map(|sample| sample.to_le_bytes()).collect();
                file.write_all(&bytes)?;
                *samples += pcm.len() as u64;
                file.flush()
            }
            Kind::Opus(ogg) => ogg.push(pcm),
        }
    }

    /// Ends the file, and returns when it is on disk.
    pub(super) fn finish(self) -> io::Result<()> {
        let file = match self.0 {
            Kind::Wav { mut file, samples } => {
                // A crash leaves the largest length there, which players take for "until the end"; and so does
                // encryption, as what was encrypted once is not encrypted anew.
                if let Disk::Plain(file) = &mut file {
                    let data = u32::try_from(samples * 2).unwrap_or(u32::MAX).min(u32::MAX - WAV_HEADER);
                    file.seek(SeekFrom::Start(0))?;
                    file.write_all(&wav_header(RATE, 2, data))?;
                }
                file
            }
            Kind::Opus(ogg) => ogg.finish()?,
        };
        file.finish()
    }
}

impl Ogg {
    fn new(file: Disk) -> io::Result<Self> {
        let mut encoder = opus::Encoder::new(RATE, Channels::Stereo, Application::Voip).map_err(failed)?;
        encoder.set_bitrate(Bitrate::Bits(BITRATE)).map_err(failed)?;
        let pre_skip = encoder.get_lookahead().map_err(failed)?.max(0) as u64 * SCALE;
        let mut writer = PacketWriter::new(file);
        for header in opus_headers(RATE, 2, pre_skip) {
            writer.write_packet(header, OGG_SERIAL, PacketWriteEndInfo::EndPage, 0)?;
        }
        Ok(Self { encoder, writer, pre_skip, rest: Vec::new(), taken: 0, packets: 0, held: None })
    }

    fn push(&mut self, pcm: &[i16]) -> io::Result<()> {
        self.taken += pcm.len() as u64 / 2;
        self.rest.extend_from_slice(pcm);
        let whole = self.rest.len() / (2 * FRAME) * (2 * FRAME);
        let frames: Vec<i16> = self.rest.drain(..whole).collect();
        for frame in frames.chunks_exact(2 * FRAME) {
            self.encode(frame)?;
        }
        self.writer.inner_mut().flush()
    }

    fn encode(&mut self, frame: &[i16]) -> io::Result<()> {
        let packet = self.encoder.encode_vec(frame, 4_000).map_err(failed)?;
        if let Some(held) = self.held.replace(packet) {
            self.packets += 1;
            let end = match self.packets % PAGE {
                0 => PacketWriteEndInfo::EndPage,
                _ => PacketWriteEndInfo::NormalPacket,
            };
            let granule = self.packets * FRAME as u64 * SCALE;
            self.writer.write_packet(held, OGG_SERIAL, end, granule)?;
        }
        Ok(())
    }

    fn finish(mut self) -> io::Result<Disk> {
        // The codec's delay is pushed out, and the last granule says where the sound ends (section 4.4).
        let end = self.taken * SCALE + self.pre_skip;
        while (self.packets + u64::from(self.held.is_some())) * FRAME as u64 * SCALE < end {
            let mut frame = std::mem::take(&mut self.rest);
            frame.resize(2 * FRAME, 0);
            self.encode(&frame)?;
        }
        let last = self.held.take().unwrap_or_default();
        self.writer.write_packet(last, OGG_SERIAL, PacketWriteEndInfo::EndStream, end)?;
        let mut file = self.writer.into_inner();
        file.flush()?;
        Ok(file)
    }
}

/// Sets the length in the head of a WAV file that was written before it was known. Other files stay as they are.
pub fn complete(file: &mut [u8]) {
    let head = wav_header(RATE, 2, 0);
    if file.starts_with(b"RIFF") && file.len() >= head.len() {
        let data = u32::try_from(file.len() - head.len()).unwrap_or(u32::MAX).min(u32::MAX - WAV_HEADER);
        file[..head.len()].copy_from_slice(&wav_header(RATE, 2, data));
    }
}

fn failed(error: opus::Error) -> io::Error {
    io::Error::other(format!("opus: {error}"))
}
