//! The four codecs a call may use, as a listener needs them: decode what came, encode what is said.
//!
//! Decoded sound is 16-bit mono at the rate the codec carries: 8 kHz for G.711, 16 kHz for G.722, and for Opus
//! the rate asked for (it decodes to any of its rates; the lower, the cheaper).

use audio_codec::CodecType;
use rubato::audioadapter_buffers::direct::InterleavedSlice;
use rubato::{Fft, FixedSync, Resampler};
use thiserror::Error;

/// What is spoken on the wire.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Codec {
    /// RFC 7587; RTP clock 48 kHz.
    Opus,
    /// G.722; RTP clock 8 kHz although the audio is 16 kHz (RFC 3551 section 4.5.2).
    G722,
    /// G.711 mu-law at 8 kHz.
    Pcmu,
    /// G.711 A-law at 8 kHz.
    Pcma,
}

/// Why sound could not be coded or decoded.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum CodecError {
    /// libopus refused.
    #[error("opus: {0}")]
    Opus(#[from] opus::Error),
    /// G.711 or G.722 refused.
    #[error("{codec}: {reason}")]
    Telephone {
        /// Codec name.
        codec: &'static str,
        /// What it said.
        reason: String,
    },
    /// The two rates cannot be converted.
    #[error("cannot resample from {from} Hz to {to} Hz: {reason}")]
    Resample {
        /// Rate of the input.
        from: u32,
        /// Rate wanted.
        to: u32,
        /// What the resampler said.
        reason: String,
    },
}

impl Codec {
    /// Every codec, in the order a caller prefers them.
    pub const ALL: [Codec; 4] = [Codec::Opus, Codec::G722, Codec::Pcmu, Codec::Pcma];

    /// RTP timestamp units per second.
    pub fn clock_rate(self) -> u32 {
        match self {
            Codec::Opus => 48_000,
            Codec::G722 | Codec::Pcmu | Codec::Pcma => 8_000,
        }
    }

    /// RTP timestamp units of one 20 ms frame.
    pub fn frame_ticks(self) -> u32 {
        self.clock_rate() / 50
    }

    /// Whether what a packet sounds like depends on those before it.
    pub fn predicts(self) -> bool {
        matches!(self, Codec::Opus | Codec::G722)
    }

    /// Name in lower case, as in SDP and reports.
    pub fn label(self) -> &'static str {
        match self {
            Codec::Opus => "opus",
            Codec::G722 => "g722",
            Codec::Pcmu => "pcmu",
            Codec::Pcma => "pcma",
        }
    }

    /// The codec of an SDP encoding name, in any case.
    pub fn named(name: &str) -> Option<Codec> {
        Codec::ALL.into_iter().find(|c| c.label().eq_ignore_ascii_case(name))
    }

    /// The fixed payload type of RFC 3551, or the one this crate offers Opus with.
    pub fn payload_type(self) -> u8 {
        match self {
            Codec::Pcmu => 0,
            Codec::Pcma => 8,
            Codec::G722 => 9,
            Codec::Opus => 111,
        }
    }

    /// What goes behind the payload type in `a=rtpmap`.
    pub fn rtpmap(self) -> &'static str {
        match self {
            Codec::Opus => "opus/48000/2",
            Codec::G722 => "G722/8000",
            Codec::Pcmu => "PCMU/8000",
            Codec::Pcma => "PCMA/8000",
        }
    }

    fn telephone(self) -> Option<CodecType> {
        match self {
            Codec::Opus => None,
            Codec::G722 => Some(CodecType::G722),
            Codec::Pcmu => Some(CodecType::PCMU),
            Codec::Pcma => Some(CodecType::PCMA),
        }
    }
}

/// Decodes one stream.
pub struct Decoder {
    kind: DecoderKind,
    rate: u32,
}

enum DecoderKind {
    Opus(opus::Decoder),
    Telephone(Box<dyn audio_codec::Decoder>, Codec),
}

impl Decoder {
    /// A decoder for `codec`; Opus decodes to `opus_rate` (8, 12, 16, 24 or 48 kHz).
    ///
    /// # Errors
    /// `opus_rate` is not one of Opus' rates.
    pub fn new(codec: Codec, opus_rate: u32) -> Result<Decoder, CodecError> {
        Ok(match codec.telephone() {
            None => Decoder {
                kind: DecoderKind::Opus(opus::Decoder::new(opus_rate, opus::Channels::Mono)?),
                rate: opus_rate,
            },
            Some(kind) => {
                let decoder = audio_codec::create_decoder(kind);
                Decoder { rate: decoder.sample_rate(), kind: DecoderKind::Telephone(decoder, codec) }
            }
        })
    }

    /// Samples per second of what comes out.
    pub fn rate(&self) -> u32 {
        self.rate
    }

    /// Appends the sound of `payload` to `out`; says how many samples that were.
    ///
    /// # Errors
    /// The payload is not of this codec.
    pub fn decode(&mut self, payload: &[u8], out: &mut Vec<i16>) -> Result<usize, CodecError> {
        let start = out.len();
        match &mut self.kind {
            DecoderKind::Opus(decoder) => {
                out.resize(start + decoder.get_nb_samples(payload)?, 0);
                let decoded = decoder.decode(payload, &mut out[start..], false);
                out.truncate(start + *decoded.as_ref().unwrap_or(&0));
                Ok(decoded?)
            }
            DecoderKind::Telephone(decoder, codec) => {
                out.resize(start + decoder.max_decode_samples(payload.len()), 0);
                let decoded = decoder.decode_into(payload, &mut out[start..]);
                out.truncate(start + *decoded.as_ref().unwrap_or(&0));
                decoded.map_err(|e| CodecError::Telephone { codec: codec.label(), reason: format!("{e:?}") })
            }
        }
    }
}

/// Encodes one stream in 20 ms frames.
pub struct Encoder {
    kind: EncoderKind,
    codec: Codec,
}

enum EncoderKind {
    Opus(Box<opus::Encoder>),
    Telephone(Box<dyn audio_codec::Encoder>),
}

impl Encoder {
    /// An encoder for `codec`. Opus runs at 16 kHz, which is what speech needs.
    ///
    /// # Errors
    /// libopus could not start.
    pub fn new(codec: Codec) -> Result<Encoder, CodecError> {
        Ok(match codec.telephone() {
            None => {
                let mut encoder =
                    opus::Encoder::new(Encoder::rate_of(codec), opus::Channels::Mono, opus::Application::Voip)?;
                encoder.set_complexity(5)?;
                encoder.set_bitrate(opus::Bitrate::Bits(32_000))?;
                Encoder { kind: EncoderKind::Opus(Box::new(encoder)), codec }
            }
            Some(kind) => Encoder { kind: EncoderKind::Telephone(audio_codec::create_encoder(kind)), codec },
        })
    }

    /// Samples per second that encoders of `codec` take.
    pub fn rate_of(codec: Codec) -> u32 {
        match codec {
            Codec::Pcmu | Codec::Pcma => 8_000,
            Codec::G722 | Codec::Opus => 16_000,
        }
    }

    /// Samples per second of what goes in.
    pub fn rate(&self) -> u32 {
        Encoder::rate_of(self.codec)
    }

    /// Samples of one 20 ms frame.
    pub fn frame(&self) -> usize {
        self.rate() as usize / 50
    }

    /// Encodes one frame of [`Encoder::frame`] samples.
    ///
    /// # Errors
    /// The frame has another length.
    pub fn encode(&mut self, frame: &[i16]) -> Result<Vec<u8>, CodecError> {
        match &mut self.kind {
            EncoderKind::Opus(encoder) => Ok(encoder.encode_vec(frame, 1275)?),
            EncoderKind::Telephone(encoder) => {
                let mut out = vec![0; encoder.max_encode_bytes(frame.len())];
                let n = encoder
                    .encode_into(frame, &mut out)
                    .map_err(|e| CodecError::Telephone { codec: self.codec.label(), reason: format!("{e:?}") })?;
                out.truncate(n);
                Ok(out)
            }
        }
    }
}

/// Converts a whole recording from one rate to another, without a shift in time.
///
/// # Errors
/// A rate is zero or the two have no ratio the resampler can build.
pub fn resample(pcm: &[f32], from: u32, to: u32) -> Result<Vec<f32>, CodecError> {
    if from == to || pcm.is_empty() {
        return Ok(pcm.to_vec());
    }
    let fail = |reason: String| CodecError::Resample { from, to, reason };
    if from == 0 || to == 0 {
        return Err(fail("a rate is zero".to_owned()));
    }
    let mut resampler =
        Fft::<f32>::new(from as usize, to as usize, 1024, 1, FixedSync::Both).map_err(|e| fail(e.to_string()))?;
    let input = InterleavedSlice::new(pcm, 1, pcm.len()).map_err(|e| fail(e.to_string()))?;
    let out = resampler.process_all(&input, pcm.len(), None).map_err(|e| fail(e.to_string()))?;
    Ok(out.take_data())
}

/// `f32` in -1..=1 to 16-bit, rounding and saturating; NaN is silence.
pub fn to_i16(sample: f32) -> i16 {
    (sample * 32_767.0).round() as i16
}

/// 16-bit to `f32` in -1..=1.
pub fn from_i16(sample: i16) -> f32 {
    f32::from(sample) / 32_768.0
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tone(rate: u32, hz: f32, seconds: f32) -> Vec<i16> {
        (0..(rate as f32 * seconds) as usize)
            .map(|n| to_i16((n as f32 * hz * std::f32::consts::TAU / rate as f32).sin() * 0.5))
            .collect()
    }

    #[test]
    fn every_codec_gives_back_the_loudness_it_was_given() {
        for codec in Codec::ALL {
            let mut encoder = Encoder::new(codec).unwrap();
            let mut decoder = Decoder::new(codec, 24_000).unwrap();
            let mut heard = Vec::new();
            for frame in tone(encoder.rate(), 440.0, 0.4).chunks_exact(encoder.frame()) {
                let packet = encoder.encode(frame).unwrap();
                let n = decoder.decode(&packet, &mut heard).unwrap();
                assert_eq!(n, decoder.rate() as usize / 50, "{codec:?}");
            }
            let late = &heard[heard.len() / 2..];
            let rms = (late.iter().map(|s| f64::from(*s).powi(2)).sum::<f64>() / late.len() as f64).sqrt();
            assert!((rms / 11_585.0 - 1.0).abs() < 0.1, "{codec:?}: {rms}");
        }
    }

    #[test]
    fn resampling_keeps_length_and_place() {
        let pcm: Vec<f32> = tone(24_000, 300.0, 0.5).iter().map(|s| from_i16(*s)).collect();
        let low = resample(&pcm, 24_000, 8_000).unwrap();
        assert!(low.len().abs_diff(4_000) <= 1, "{}", low.len());
        // Sample n at 8 kHz is sample 3n at 24 kHz.
        let worst = (400..3_600).map(|n| (low[n] - pcm[n * 3]).abs()).fold(0.0, f32::max);
        assert!(worst < 0.02, "{worst}");
    }

    #[test]
    fn a_payload_of_another_codec_is_an_error_or_noise_but_never_a_panic() {
        for codec in Codec::ALL {
            let mut decoder = Decoder::new(codec, 16_000).unwrap();
            for len in [0usize, 1, 2, 3, 160, 1_400] {
                let junk: Vec<u8> = (0..len).map(|n| (n * 37 + 11) as u8).collect();
                let mut out = Vec::new();
                let decoded = decoder.decode(&junk, &mut out);
                assert!(decoded.is_err() || out.len() == decoded.unwrap());
            }
        }
    }
}
