//! Recorded audio that `play` can name: WAV files under one folder, and `data:` URLs.

use std::io::Cursor;
use std::path::{Component, Path};
use std::sync::Arc;

use base64::Engine as _;

use super::handle::SpeakError;
use super::settings::CallConfig;
use crate::audio;
use crate::media::resample;

/// Longest source in bytes that is read at all: 5 min of 48 kHz stereo.
const MAX_BYTES: usize = 64 << 20;

/// Reads and decodes `source` to mono at [`audio::RATE`], on a blocking thread.
///
/// # Errors
/// [`SpeakError::Invalid`] says what is wrong with the source.
pub(super) async fn load(config: &Arc<CallConfig>, source: &str) -> Result<Arc<[f32]>, SpeakError> {
    let (config, source) = (config.clone(), source.to_owned());
    tokio::task::spawn_blocking(move || {
        let bytes = read(&config, &source)?;
        decode(&bytes, config.max_clip_s)
    })
    .await
    .unwrap_or_else(|_| Err(SpeakError::Invalid("the audio could not be decoded".into())))
}

fn read(config: &CallConfig, source: &str) -> Result<Vec<u8>, SpeakError> {
    let invalid = |text: String| SpeakError::Invalid(text);
    if let Some(rest) = source.strip_prefix("data:") {
        let Some((kind, data)) = rest.split_once(";base64,") else {
            return Err(invalid("a data: source must be `data:audio/wav;base64,` and the file".into()));
        };
        if !matches!(kind, "audio/wav" | "audio/x-wav" | "audio/wave") {
            return Err(invalid(format!("`{kind}` cannot be played; use audio/wav")));
        }
        return base64::engine::general_purpose::STANDARD
            .decode(data)
            .map_err(|error| invalid(format!("the data: source is not base64: {error}")));
    }
    if source.contains("://") {
        return Err(invalid("only files of the media folder and data: sources can be played".into()));
    }
    let Some(folder) = &config.media_dir else {
        return Err(invalid("no media folder is configured; use a data: source".into()));
    };
    // Only plain names below the folder: no `..`, no root, so nothing outside can be named.
    if source.is_empty() || !Path::new(source).components().all(|part| matches!(part, Component::Normal(_))) {
        return Err(invalid(format!("`{source}` is not a file name below the media folder")));
    }
    let missing = |error| invalid(format!("`{source}` cannot be read from the media folder: {error}"));
    let path = folder.join(source).canonicalize().map_err(missing)?;
    // A link inside the folder must not lead out of it.
    if !path.starts_with(folder.canonicalize().map_err(missing)?) {
        return Err(invalid(format!("`{source}` is not below the media folder")));
    }
    let length = path.metadata().map_err(missing)?.len();
    if length > MAX_BYTES as u64 {
        return Err(invalid(format!("`{source}` is larger than {} MiB", MAX_BYTES >> 20)));
    }
    std::fs::read(&path).map_err(missing)
}

fn decode(bytes: &[u8], max_seconds: u64) -> Result<Arc<[f32]>, SpeakError> {
    let invalid = |error: hound::Error| SpeakError::Invalid(format!("the audio is not a readable WAV file: {error}"));
    let mut reader = hound::WavReader::new(Cursor::new(bytes)).map_err(invalid)?;
    let spec = reader.spec();
    let channels = usize::from(spec.channels.max(1));
    if u64::from(reader.duration()) > max_seconds * u64::from(spec.sample_rate.max(1)) {
        return Err(SpeakError::Invalid(format!("the audio is longer than {max_seconds} s")));
    }
    let samples = match spec.sample_format {
        hound::SampleFormat::Float => reader.samples::<f32>().collect::<Result<Vec<_>, _>>().map_err(invalid)?,
        hound::SampleFormat::Int => {
            let full = (1i64 << (spec.bits_per_sample.clamp(1, 32) - 1)) as f32;
            let samples = reader.samples::<i32>().map(|s| s.map(|s| s as f32 / full));
            samples.collect::<Result<Vec<_>, _>>().map_err(invalid)?
        }
    };
    let mono = samples.chunks(channels).map(|frame| frame.iter().sum::<f32>() / channels as f32);
    let mono = mono.map(|s| if s.is_finite() { s.clamp(-1.0, 1.0) } else { 0.0 }).collect::<Vec<_>>();
    if mono.is_empty() {
        return Err(SpeakError::Invalid("the audio is empty".into()));
    }
    let pcm = resample::whole(&mono, spec.sample_rate, audio::RATE)
        .map_err(|error| SpeakError::Invalid(format!("audio at {} Hz cannot be played: {error}", spec.sample_rate)))?;
    Ok(pcm.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn wav(rate: u32, seconds: u32) -> Vec<u8> {
        let mut bytes = Cursor::new(Vec::new());
        let spec = hound::WavSpec {
            channels: 2,
            sample_rate: rate,
            bits_per_sample: 16,
            sample_format: hound::SampleFormat::Int,
        };
        let mut writer = hound::WavWriter::new(&mut bytes, spec).unwrap();
        for n in 0..rate * seconds {
            let sample = ((n as f32 * 440.0 * std::f32::consts::TAU / rate as f32).sin() * 8_000.0) as i16;
            writer.write_sample(sample).unwrap();
            writer.write_sample(sample).unwrap();
        }
        writer.finalize().unwrap();
        bytes.into_inner()
    }

    #[test]
    fn files_are_mixed_to_mono_and_resampled() {
        for rate in [8_000, 16_000, 24_000, 44_100, 48_000] {
            let pcm = decode(&wav(rate, 2), 10).unwrap();
            assert!(pcm.len().abs_diff(48_000) <= 1, "{rate}: {}", pcm.len());
            let peak = pcm[4_800..43_200].iter().fold(0f32, |peak, s| peak.max(s.abs()));
            assert!((0.23..0.26).contains(&peak), "{rate}: {peak}");
        }
        assert!(decode(&wav(8_000, 2), 1).is_err());
        assert!(decode(b"RIFF", 1).is_err());
    }

    #[test]
    fn nothing_outside_the_folder_is_read() {
        let folder = tempfile::tempdir().unwrap();
        let inside = folder.path().join("media");
        std::fs::create_dir(&inside).unwrap();
        std::fs::write(folder.path().join("secret.wav"), wav(8_000, 1)).unwrap();
        std::fs::write(inside.join("ok.wav"), wav(8_000, 1)).unwrap();
        std::os::unix::fs::symlink(folder.path().join("secret.wav"), inside.join("link.wav")).unwrap();
        let config = CallConfig { media_dir: Some(inside), ..CallConfig::default() };
        assert!(read(&config, "ok.wav").is_ok());
        for bad in [
            "../secret.wav",
            "/etc/passwd",
            "link.wav",
            "none.wav",
            "",
            "http://host/x.wav",
            "data:text/plain;base64,AA",
            "data:audio/wav;base64,@",
        ] {
            assert!(matches!(read(&config, bad), Err(SpeakError::Invalid(_))), "{bad}");
        }
        assert!(read(&CallConfig::default(), "ok.wav").is_err());
    }
}
