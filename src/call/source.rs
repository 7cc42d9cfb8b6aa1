//! Recorded audio that `play` can name: files under one folder, `data:` URLs, and HTTPS URLs of hosts that the
//! configuration names. What a recording is shows in its content: WAV, FLAC, MP3, AAC, Ogg (Vorbis, Opus), WebM.

mod fetch;

use std::path::{Component, Path};
use std::sync::Arc;

use base64::Engine as _;
use reqwest::Url;
use tokio::sync::oneshot;

use self::fetch::Fetcher;
use super::TurnId;
use super::command::Command;
use super::handle::{CallHandle, PlayRequest, SpeakError};
use super::settings::CallConfig;
use crate::audio;
use crate::media::resample;
use crate::voice::decode::{self, DecodeError};

/// Longest source in bytes that is read at all: 5 min of 48 kHz stereo.
const MAX_BYTES: usize = 64 << 20;

impl CallHandle {
    /// Plays recorded audio, after what waits already. Reads and decodes the source before it returns; a URL is fetched
    /// while what waits already is said, and what comes later waits for it. An interruption ends the download. One that
    /// fails is a turn that failed.
    ///
    /// # Errors
    /// The source cannot be read or played, its URL may not be fetched, or the call takes no more.
    pub async fn play(&self, request: PlayRequest) -> Result<TurnId, SpeakError> {
        if let Some(url) = remote(&self.shared.config, &request.source)? {
            return self.play_remote(request, url).await;
        }
        // A file that there is no room for is not read: its agent offers it again and again.
        let (reply, answer) = oneshot::channel();
        self.send(Command::Room { reply })?;
        self.answered(answer).await?;
        let clip = load(&self.shared.config, &request.source).await?;
        let (reply, answer) = oneshot::channel();
        self.send(Command::Play { request, clip, reply })?;
        self.answered(answer).await
    }

    async fn play_remote(&self, request: PlayRequest, url: Url) -> Result<TurnId, SpeakError> {
        let (wanted, mut dropped) = oneshot::channel();
        let (reply, answer) = oneshot::channel();
        self.send(Command::Await { request, wanted, reply })?;
        let turn = self.answered(answer).await?;
        let (config, commands, id) = (self.shared.config.clone(), self.commands.clone(), turn.clone());
        tokio::spawn(async move {
            let clip = tokio::select! {
                clip = fetch(&config, url) => clip,
                // The turn was cut off, or the call is over.
                _ = &mut dropped => return,
            };
            // overflow: awaited; a turn that waits for its clip must be told. A call that is over needs nothing.
            let _ = commands.send(Command::Arrived { turn: id, clip }).await;
        });
        Ok(turn)
    }
}

/// The URL in `source`, where it names one that may be fetched; `None`: [`load`] reads it.
///
/// # Errors
/// [`SpeakError::Invalid`] says why it may not.
pub(super) fn remote(config: &CallConfig, source: &str) -> Result<Option<Url>, SpeakError> {
    if source.starts_with("data:") || !source.contains("://") {
        return Ok(None);
    }
    let wrong = |why: String| SpeakError::Invalid(format!("the recording cannot be fetched: {why}"));
    let url = Url::parse(source).map_err(|error| wrong(format!("its URL: {error}")))?;
    fetch::judge(&config.play, &url).map_err(wrong)?;
    Ok(Some(url))
}

/// Fetches and decodes the recording at `url` to mono at [`audio::RATE`]. Cancel safe.
///
/// # Errors
/// Why there is none; for the agent.
pub(super) async fn fetch(config: &CallConfig, url: Url) -> Result<Arc<[f32]>, String> {
    // Making the client reads the certificates of the system.
    let fetcher = match tokio::task::spawn_blocking(Fetcher::shared).await {
        Ok(fetcher) => fetcher?,
        Err(error) => return Err(error.to_string()),
    };
    let host = url.host_str().unwrap_or_default().to_owned();
    let bytes = fetcher.get(&config.play, url).await.map_err(|why| format!("the recording of {host}: {why}"))?;
    let limit = config.max_clip_s;
    let decoded = tokio::task::spawn_blocking(move || decode(bytes, limit)).await;
    decoded.unwrap_or_else(|error| Err(error.to_string())).map_err(|why| format!("the recording of {host}: {why}"))
}

/// Reads and decodes `source` to mono at [`audio::RATE`], on a blocking thread.
///
/// # Errors
/// [`SpeakError::Invalid`] says what is wrong with the source.
pub(super) async fn load(config: &Arc<CallConfig>, source: &str) -> Result<Arc<[f32]>, SpeakError> {
    let (config, source) = (config.clone(), source.to_owned());
    tokio::task::spawn_blocking(move || {
        let bytes = read(&config, &source)?;
        decode(bytes, config.max_clip_s).map_err(|why| SpeakError::Invalid(format!("the recording: {why}")))
    })
    .await
    .unwrap_or_else(|_| Err(SpeakError::Invalid("the audio could not be decoded".into())))
}

fn read(config: &CallConfig, source: &str) -> Result<Vec<u8>, SpeakError> {
    let invalid = |text: String| SpeakError::Invalid(text);
    if let Some(rest) = source.strip_prefix("data:") {
        let Some((kind, data)) = rest.split_once(";base64,") else {
            return Err(invalid("a data: source must be `data:audio/...;base64,` and the file".into()));
        };
        if !kind.starts_with("audio/") {
            return Err(invalid(format!("`{kind}` cannot be played; use audio/wav or another audio type")));
        }
        return base64::engine::general_purpose::STANDARD
            .decode(data)
            .map_err(|error| invalid(format!("the data: source is not base64: {error}")));
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

fn decode(bytes: Vec<u8>, max_seconds: u64) -> Result<Arc<[f32]>, String> {
    let limit = u32::try_from(max_seconds).unwrap_or(u32::MAX);
    let recording = decode::decode_within(bytes, limit).map_err(|error| match error {
        DecodeError::TooLong { .. } => format!("it is longer than {max_seconds} s"),
        error => error.to_string(),
    })?;
    let mono: Vec<f32> = recording.samples.iter().map(|sample| sample.clamp(-1.0, 1.0)).collect();
    let pcm = resample::whole(&mono, recording.rate, audio::RATE)
        .map_err(|error| format!("audio at {} Hz cannot be played: {error}", recording.rate))?;
    if pcm.is_empty() {
        return Err("it is too short to be played".into());
    }
    Ok(pcm.into())
}

#[cfg(test)]
mod tests {
    use std::io::Cursor;

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
            let pcm = decode(wav(rate, 2), 10).unwrap();
            assert!(pcm.len().abs_diff(48_000) <= 1, "{rate}: {}", pcm.len());
            let peak = pcm[4_800..43_200].iter().fold(0f32, |peak, s| peak.max(s.abs()));
            assert!((0.23..0.26).contains(&peak), "{rate}: {peak}");
        }
        assert!(decode(wav(8_000, 2), 1).is_err_and(|why| why.contains("longer than 1 s")));
        assert!(decode(b"RIFF".to_vec(), 1).is_err());
    }

    #[test]
    fn other_files_than_wav_are_played() {
        let mut flac = crate::audio_file::AudioWriter::new(crate::audio_file::Format::Flac, 24_000).unwrap();
        let mut bytes = flac.push(&vec![0.25; 24_000]).unwrap();
        bytes.extend(flac.finish().unwrap());
        assert_eq!(decode(bytes, 10).unwrap().len(), 24_000);
    }

    #[test]
    fn what_is_a_url_is_judged_before_anything_is_queued() {
        let play = crate::call::settings::PlayWeb { hosts: vec!["media.example".into()], ..Default::default() };
        let config = CallConfig { play, ..CallConfig::default() };
        for local in ["ok.wav", "data:audio/wav;base64,AA"] {
            assert!(matches!(remote(&config, local), Ok(None)), "{local}");
        }
        assert!(matches!(remote(&config, "https://media.example/a.mp3"), Ok(Some(_))));
        for bad in ["http://media.example/a", "https://other.example/a", "https://", "ftp://media.example/a"] {
            assert!(matches!(remote(&config, bad), Err(SpeakError::Invalid(_))), "{bad}");
        }
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
            "data:text/plain;base64,AA",
            "data:audio/wav;base64,@",
        ] {
            assert!(matches!(read(&config, bad), Err(SpeakError::Invalid(_))), "{bad}");
        }
        assert!(read(&CallConfig::default(), "ok.wav").is_err());
    }
}
