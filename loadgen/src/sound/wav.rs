//! WAV files in and out.

use std::path::Path;

use crate::sound::heard::Clip;
use crate::wire::codec::to_i16;

/// Writes `clip` as 16-bit mono.
///
/// # Errors
/// The file cannot be written.
pub fn write(path: impl AsRef<Path>, clip: &Clip) -> Result<(), hound::Error> {
    samples(hound::WavWriter::create(path, spec(clip))?, clip)
}

/// The bytes of such a file.
///
/// # Errors
/// It would be too long for one.
pub fn bytes(clip: &Clip) -> Result<Vec<u8>, hound::Error> {
    let mut out = std::io::Cursor::new(Vec::new());
    samples(hound::WavWriter::new(&mut out, spec(clip))?, clip)?;
    Ok(out.into_inner())
}

fn spec(clip: &Clip) -> hound::WavSpec {
    hound::WavSpec { channels: 1, sample_rate: clip.rate, bits_per_sample: 16, sample_format: hound::SampleFormat::Int }
}

fn samples<W: std::io::Write + std::io::Seek>(
    mut writer: hound::WavWriter<W>,
    clip: &Clip,
) -> Result<(), hound::Error> {
    for sample in &clip.pcm {
        writer.write_sample(to_i16(*sample))?;
    }
    writer.finalize()
}

/// Reads a WAV file of any depth; of several channels the mean.
///
/// # Errors
/// It cannot be read or is no PCM.
pub fn read(path: impl AsRef<Path>) -> Result<Clip, hound::Error> {
    clip(hound::WavReader::open(path)?)
}

/// Reads a WAV file that is in memory.
///
/// # Errors
/// It is cut short or is no PCM.
pub fn parse(bytes: &[u8]) -> Result<Clip, hound::Error> {
    clip(hound::WavReader::new(bytes)?)
}

fn clip<R: std::io::Read>(mut reader: hound::WavReader<R>) -> Result<Clip, hound::Error> {
    let spec = reader.spec();
    let channels = usize::from(spec.channels.max(1));
    let all: Vec<f32> = match spec.sample_format {
        hound::SampleFormat::Float => reader.samples::<f32>().collect::<Result<_, _>>()?,
        hound::SampleFormat::Int => {
            let full = (1u64 << (spec.bits_per_sample.clamp(1, 32) - 1)) as f32;
            reader.samples::<i32>().map(|s| s.map(|s| s as f32 / full)).collect::<Result<_, _>>()?
        }
    };
    let pcm = all.chunks(channels).map(|frame| frame.iter().sum::<f32>() / channels as f32).collect();
    Ok(Clip { rate: spec.sample_rate, pcm })
}
