//! What encoding, decoding and detecting cost, measured: the figures behind the choices in
//! [`super::encode`].

use std::hint::black_box;
use std::time::Duration;

use super::decode::Decoder;
use super::encode::{CodecError, Encoder, OpusSettings};
use super::leg::{Codec, MediaFormat};
use super::vad::{Vad, VadConfig};
use crate::audio::{FRAME_SAMPLES, RATE};
use crate::clock;

/// One measured way of doing something to 20 ms of sound.
#[derive(Clone, Debug, PartialEq, serde::Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Cost {
    /// What was done.
    pub name: String,
    /// Microseconds of one core per 20 ms.
    pub micros: f64,
    /// Bytes per packet, where packets are made.
    pub bytes: Option<f64>,
    /// Algorithmic delay in milliseconds, where the codec tells.
    pub delay_ms: Option<f64>,
}

/// Measures every codec over `frames` frames each.
///
/// # Errors
/// A codec library cannot be set up.
pub fn codecs(frames: usize) -> Result<Vec<Cost>, CodecError> {
    let speech = speech(frames);
    let mut costs = Vec::new();
    for (name, application, complexity, fec) in [
        ("opus low-delay, complexity 0", opus::Application::LowDelay, 0, false),
        ("opus low-delay, complexity 5", opus::Application::LowDelay, 5, false),
        ("opus low-delay, complexity 10", opus::Application::LowDelay, 10, false),
        ("opus voip, complexity 0", opus::Application::Voip, 0, false),
        ("opus voip, complexity 5", opus::Application::Voip, 5, false),
        ("opus voip, complexity 5, FEC", opus::Application::Voip, 5, true),
        ("opus voip, complexity 10, FEC", opus::Application::Voip, 10, true),
    ] {
        let mut encoder = opus::Encoder::new(RATE, opus::Channels::Mono, application)?;
        encoder.set_bitrate(opus::Bitrate::Bits(OpusSettings::default().bitrate))?;
        encoder.set_complexity(complexity)?;
        encoder.set_inband_fec(fec)?;
        encoder.set_packet_loss_perc(if fec { 5 } else { 0 })?;
        let delay_ms = encoder.get_lookahead()? as f64 * 1_000.0 / f64::from(RATE);
        let (mut out, mut bytes) = ([0; 1_275], 0);
        let took = timed(&speech, |frame| {
            bytes += encoder.encode_float(frame, &mut out).unwrap_or(0);
        });
        costs.push(Cost {
            name: name.into(),
            micros: micros(took, frames),
            bytes: Some(bytes as f64 / frames as f64),
            delay_ms: Some(delay_ms),
        });
    }
    for codec in Codec::ALL {
        let mut encoder = Encoder::new(&MediaFormat::plain(codec), OpusSettings::default())?;
        let mut payloads = Vec::with_capacity(frames);
        let took = timed(&speech, |frame| payloads.extend(encoder.encode(frame)));
        let bytes = payloads.iter().map(bytes::Bytes::len).sum::<usize>() as f64 / frames as f64;
        costs.push(Cost {
            name: format!("{} as calls send it", codec.label()),
            micros: micros(took, frames),
            bytes: Some(bytes),
            delay_ms: None,
        });
        let mut decoder = Decoder::new(codec)?;
        let mut pcm = Vec::new();
        let start = clock::now();
        for payload in &payloads {
            pcm.clear();
            decoder.decode(payload, &mut pcm);
            black_box(&pcm);
        }
        let name = format!("{} decoded to 16 kHz", codec.label());
        costs.push(Cost { name, micros: micros(clock::now() - start, frames), bytes: None, delay_ms: None });
    }
    let mut vad = Vad::new(&VadConfig::default());
    let wide = speech.iter().step_by(3).map(|s| (s * 20_000.0) as i16).collect::<Vec<_>>();
    let start = clock::now();
    for frame in wide.chunks(320) {
        black_box(vad.push(frame));
    }
    let frames = wide.len() / 320;
    costs.push(Cost {
        name: "voice activity".into(),
        micros: micros(clock::now() - start, frames),
        bytes: None,
        delay_ms: None,
    });
    Ok(costs)
}

fn micros(took: Duration, frames: usize) -> f64 {
    took.as_secs_f64() * 1e6 / frames.max(1) as f64
}

fn timed(speech: &[f32], mut encode: impl FnMut(&[f32])) -> Duration {
    let start = clock::now();
    for frame in speech.chunks_exact(FRAME_SAMPLES) {
        encode(black_box(frame));
    }
    clock::now() - start
}

/// Something as hard to encode as speech: a gliding voice with harmonics, syllables, noise and pauses.
pub fn speech(frames: usize) -> Vec<f32> {
    let mut noise = 12_345u32;
    let (mut phase, mut hiss) = (0.0f32, 0.0f32);
    (0..frames * FRAME_SAMPLES)
        .map(|n| {
            let t = n as f32 / RATE as f32;
            noise = noise.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            hiss = 0.7 * hiss + 0.3 * ((noise >> 8) as f32 / 8_388_608.0 - 1.0);
            let pitch = 120.0 + 40.0 * (t * 2.3).sin();
            phase = (phase + pitch / RATE as f32).fract();
            let voice = (1..20).map(|k| {
                // Two formants that move with the syllables.
                let hertz = pitch * k as f32;
                let formant = |centre: f32, width: f32| 1.0 / (1.0 + ((hertz - centre) / width).powi(2));
                let gain = formant(500.0 + 250.0 * (t * 9.0).sin(), 120.0)
                    + 0.5 * formant(1_700.0 + 500.0 * (t * 6.0).cos(), 200.0);
                gain * (std::f32::consts::TAU * phase * k as f32).sin()
            });
            let syllable = (t * 4.0 * std::f32::consts::TAU).sin().max(0.0);
            let pause = if t % 3.0 > 2.6 { 0.0 } else { 1.0 };
            (0.12 * voice.sum::<f32>() * syllable + 0.05 * hiss * (1.0 - syllable)) * pause
        })
        .collect()
}
