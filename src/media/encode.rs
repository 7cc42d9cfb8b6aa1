//! Speech at 24 kHz to payloads of 20 ms.
//!
//! Owns one codec's sending state. Never queues: one frame in, one payload out.
//!
//! # Why
//! - Opus takes 24 kHz as it is; only its RTP clock says 48 kHz whatever goes in (RFC 7587 section 4.1).
//! - Two Opus profiles, chosen by what [`super::bench`] measures and the peer reports. *Clean* is the
//!   restricted low-delay mode (CELT only): at 32 kb/s 38 us a frame where the speech mode takes 133 (193 with
//!   FEC), 2.5 ms of delay instead of 6.5, packets of 81 bytes instead of 74. *Lossy* is the speech mode with
//!   in-band FEC, which CELT does not have; it is used while the peer reports loss and can use FEC.
//! - The bit rate of Opus follows loss as loss-based congestion control does (draft-ietf-rmcat-gcc-02 section 6): a path that
//!   loses more than a tenth gets less to carry, one that loses next to nothing a little more each report. What is lost on the
//!   air (less than a tenth) changes nothing: fewer bits would not help it.
//! - Where packets are to be 10 or 30 ms long, Opus makes two frames of 10 ms of each 20 ms and gives them as one packet (code 2,
//!   RFC 6716 section 3.2.4), which [`super::packets`] takes apart without an encoder. Everything else goes on in steps of 20 ms.
//! - The telephone codecs get a real anti-alias filter (see [`super::resample`]).

use bytes::Bytes;

use super::leg::{Codec, MediaFormat};
use super::resample::Converter;
use crate::audio::{FRAME_SAMPLES, RATE, to_i16};

/// How Opus is encoded. The defaults are what the benchmark favours.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OpusSettings {
    /// Bits per second. 32 kb/s carries 24 kHz speech in the low-delay mode at full band width.
    pub bitrate: i32,
    /// Bits per second that loss brings it down to at most: below 20 kb/s FEC leaves too little for the speech itself.
    pub least_bitrate: i32,
    /// 0 to 10. In the low-delay mode 0, 5 and 10 cost 17, 38 and 58 us a frame.
    pub complexity: i32,
    /// Share of packets lost (percent) from which the lossy profile is used.
    pub lossy_from: u8,
    /// Reports in a row without loss that end it.
    pub clean_after: u8,
}

impl Default for OpusSettings {
    fn default() -> Self {
        Self { bitrate: 32_000, least_bitrate: 20_000, complexity: 5, lossy_from: 2, clean_after: 3 }
    }
}

/// Encodes one stream.
#[derive(Debug)]
pub struct Encoder {
    kind: Kind,
    /// Scratch for the codec's rate.
    resampled: Vec<f32>,
    linear: Vec<i16>,
    payload: Vec<u8>,
}

enum Kind {
    Opus(Box<OpusState>),
    G722 { converter: Converter, encoder: Box<audio_codec::g722::G722Encoder> },
    G711 { converter: Converter, mu_law: bool },
}

struct OpusState {
    encoder: opus::Encoder,
    settings: OpusSettings,
    profile: Profile,
    /// Bits per second now.
    bitrate: i32,
    fec_allowed: bool,
    clean_reports: u8,
    short_frames: bool,
}

/// Which way Opus is encoded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Profile {
    /// Low-delay mode without protection.
    Clean,
    /// Speech mode with in-band FEC.
    Lossy,
}

/// Why a codec does not work. Only a wrong build gets here.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CodecError {
    /// libopus refused.
    #[error("opus: {0}")]
    Opus(#[from] opus::Error),
    /// The resampler refused.
    #[error("resampler: {0}")]
    Resampler(#[from] rubato::ResamplerConstructionError),
    /// Another codec refused.
    #[error("{0}")]
    Other(String),
}

/// The largest packet Opus makes (RFC 6716 section 3.4).
const MAX_OPUS: usize = 1_275;

impl Encoder {
    /// For what was agreed.
    ///
    /// # Errors
    /// A codec library cannot be set up.
    pub fn new(format: &MediaFormat, settings: OpusSettings) -> Result<Self, CodecError> {
        let kind = match format.codec {
            Codec::Opus => Kind::Opus(Box::new(OpusState {
                encoder: opus_encoder(Profile::Clean, settings, settings.bitrate, 0)?,
                settings,
                profile: Profile::Clean,
                bitrate: settings.bitrate,
                fec_allowed: format.opus_fec,
                clean_reports: 0,
                short_frames: format.short_frames,
            })),
            Codec::G722 => Kind::G722 { converter: Converter::new(RATE, 16_000)?, encoder: Box::default() },
            codec @ (Codec::Pcmu | Codec::Pcma) => {
                Kind::G711 { converter: Converter::new(RATE, 8_000)?, mu_law: codec == Codec::Pcmu }
            }
        };
        Ok(Self { kind, resampled: vec![0.0; 320], linear: Vec::with_capacity(320), payload: vec![0; MAX_OPUS] })
    }

    /// Encodes 20 ms: [`FRAME_SAMPLES`] samples at [`RATE`]; a shorter slice is filled up with silence.
    /// Allocates the payload and nothing else.
    ///
    /// # Errors
    /// A codec library failed, which valid lengths cannot cause.
    pub fn encode(&mut self, pcm: &[f32]) -> Result<Bytes, CodecError> {
        let mut frame = [0.0; FRAME_SAMPLES];
        let pcm = match pcm.len() {
            FRAME_SAMPLES => pcm,
            length => {
                let length = length.min(FRAME_SAMPLES);
                frame[..length].copy_from_slice(&pcm[..length]);
                &frame
            }
        };
        let written = match &mut self.kind {
            Kind::Opus(state) if state.short_frames => state.encode_short(pcm, &mut self.payload)?,
            Kind::Opus(state) => state.encoder.encode_float(pcm, &mut self.payload)?,
            Kind::G722 { converter, encoder } => {
                self.linear.clear();
                converter.frame(pcm, &mut self.resampled);
                self.linear.extend(self.resampled[..320].iter().map(|s| to_i16(*s)));
                let encode = audio_codec::Encoder::encode_into(&mut **encoder, &self.linear, &mut self.payload);
                encode.map_err(|error| CodecError::Other(format!("g722: {error:?}")))?
            }
            Kind::G711 { converter, mu_law } => {
                self.linear.clear();
                converter.frame(pcm, &mut self.resampled);
                self.linear.extend(self.resampled[..160].iter().map(|s| to_i16(*s)));
                if *mu_law {
                    mu_law_into(&self.linear, &mut self.payload)
                } else {
                    a_law_into(&self.linear, &mut self.payload)
                }
            }
        };
        Ok(Bytes::copy_from_slice(&self.payload[..written]))
    }

    /// Encodes 20 ms of silence through the same state, so that the stream stays continuous.
    ///
    /// # Errors
    /// As [`Encoder::encode`].
    pub fn silence(&mut self) -> Result<Bytes, CodecError> {
        self.encode(&[0.0; FRAME_SAMPLES])
    }

    /// Frames that were encoded will not be sent: forgets the past, or the decoder, which never sees them,
    /// makes an audible noise of the frames that build on them. Settings stay.
    ///
    /// # Errors
    /// libopus refuses, which it does not.
    pub fn forget_unsent(&mut self) -> Result<(), CodecError> {
        match &mut self.kind {
            Kind::Opus(state) => state.encoder.reset_state()?,
            // G.722's own state adapts within milliseconds; a reset one would not match the decoder's.
            Kind::G711 { converter, .. } | Kind::G722 { converter, .. } => converter.reset(),
        }
        Ok(())
    }

    /// Takes the share of packets (0..=1) that the peer reports as lost since its report before.
    ///
    /// # Errors
    /// libopus cannot be set up anew; the old profile stays.
    pub fn report_loss(&mut self, fraction: f32) -> Result<(), CodecError> {
        let Kind::Opus(state) = &mut self.kind else { return Ok(()) };
        // NaN and negative shares become 0.
        let percent = (fraction.clamp(0.0, 1.0) * 100.0).round() as u8;
        state.follow(percent)?;
        if !state.fec_allowed {
            return Ok(());
        }
        if percent >= state.settings.lossy_from {
            state.clean_reports = 0;
            if state.profile == Profile::Clean {
                state.encoder = opus_encoder(Profile::Lossy, state.settings, state.bitrate, percent)?;
                state.profile = Profile::Lossy;
            } else {
                state.encoder.set_packet_loss_perc(i32::from(percent.min(30)))?;
            }
        } else if state.profile == Profile::Lossy {
            state.clean_reports += u8::from(percent == 0);
            if state.clean_reports >= state.settings.clean_after {
                state.encoder = opus_encoder(Profile::Clean, state.settings, state.bitrate, 0)?;
                state.profile = Profile::Clean;
            }
        }
        Ok(())
    }

    /// Bits per second of Opus; `None` for other codecs, whose rate is fixed.
    pub fn bitrate(&self) -> Option<i32> {
        match &self.kind {
            Kind::Opus(state) => Some(state.bitrate),
            Kind::G722 { .. } | Kind::G711 { .. } => None,
        }
    }

    /// The Opus profile in use; `None` for other codecs.
    pub fn profile(&self) -> Option<Profile> {
        match &self.kind {
            Kind::Opus(state) => Some(state.profile),
            Kind::G722 { .. } | Kind::G711 { .. } => None,
        }
    }
}

impl OpusState {
    /// Two frames of 10 ms as one packet.
    fn encode_short(&mut self, pcm: &[f32], out: &mut [u8]) -> Result<usize, opus::Error> {
        let (early, late) = pcm.split_at(pcm.len() / 2);
        // Both and what stands before them fit into any packet.
        let (mut first, mut second) = ([0; MAX_OPUS / 2 - 2], [0; MAX_OPUS / 2 - 2]);
        for _ in 0..2 {
            let ends = (self.encoder.encode_float(early, &mut first)?, self.encoder.encode_float(late, &mut second)?);
            if let Some(written) = together(&first[..ends.0], &second[..ends.1], out) {
                return Ok(written);
            }
            // The mode changed between them, seldom. The decoder sees neither, so the encoder forgets them, and begins in one.
            self.encoder.reset_state()?;
        }
        self.encoder.encode_float(pcm, out)
    }

    /// The bit rate after a report of `percent` lost.
    fn follow(&mut self, percent: u8) -> Result<(), opus::Error> {
        let rate = match percent {
            0..2 => self.bitrate + self.bitrate / 20,
            2..=10 => self.bitrate,
            _ => self.bitrate - self.bitrate * i32::from(percent) / 200,
        };
        let rate = rate.clamp(self.settings.least_bitrate.min(self.settings.bitrate), self.settings.bitrate);
        if rate != self.bitrate {
            self.encoder.set_bitrate(opus::Bitrate::Bits(rate))?;
            self.bitrate = rate;
        }
        Ok(())
    }
}

impl std::fmt::Debug for Kind {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Kind::Opus(_) => "Opus",
            Kind::G722 { .. } => "G722",
            Kind::G711 { mu_law: true, .. } => "Pcmu",
            Kind::G711 { mu_law: false, .. } => "Pcma",
        })
    }
}

/// Writes two packets of a frame each as one; `None`: they are not of one kind, or do not fit.
fn together(first: &[u8], second: &[u8], out: &mut [u8]) -> Option<usize> {
    let ((toc, first), (other, second)) = (first.split_first()?, second.split_first()?);
    // RFC 6716 section 3.2.1: from 252 on the second octet counts fours.
    let low = if first.len() < 252 { first.len() } else { 252 + (first.len() & 3) };
    let high = (first.len() - low) >> 2;
    let head = &[toc | 2, low as u8, high as u8][..if low < 252 { 2 } else { 3 }];
    let total = head.len() + first.len() + second.len();
    if toc != other || toc & 3 != 0 || total > out.len() {
        return None;
    }
    out[..head.len()].copy_from_slice(head);
    out[head.len()..total - second.len()].copy_from_slice(first);
    out[total - second.len()..total].copy_from_slice(second);
    Some(total)
}

/// An encoder of one profile at `bitrate`; `loss` in percent. The application cannot be changed on a running encoder, so a
/// change of profile is a new one: decoders bridge the change of mode (RFC 6716 section 4.5).
fn opus_encoder(
    profile: Profile,
    settings: OpusSettings,
    bitrate: i32,
    loss: u8,
) -> Result<opus::Encoder, opus::Error> {
    let application = match profile {
        Profile::Clean => opus::Application::LowDelay,
        Profile::Lossy => opus::Application::Voip,
    };
    let mut encoder = opus::Encoder::new(RATE, opus::Channels::Mono, application)?;
    encoder.set_bitrate(opus::Bitrate::Bits(bitrate))?;
    encoder.set_complexity(settings.complexity)?;
    encoder.set_signal(opus::Signal::Voice)?;
    if profile == Profile::Lossy {
        encoder.set_inband_fec(true)?;
        encoder.set_packet_loss_perc(i32::from(loss.clamp(1, 30)))?;
    }
    Ok(encoder)
}

/// Encodes `pcm` as G.711 mu-law into `out`; returns how many bytes, one a sample, as many as fit.
pub fn mu_law_into(pcm: &[i16], out: &mut [u8]) -> usize {
    audio_codec::Encoder::encode_into(&mut audio_codec::pcmu::PcmuEncoder::new(), pcm, out).unwrap_or(0)
}

fn a_law_into(pcm: &[i16], out: &mut [u8]) -> usize {
    audio_codec::Encoder::encode_into(&mut audio_codec::pcma::PcmaEncoder::new(), pcm, out).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn format(codec: Codec) -> MediaFormat {
        MediaFormat { opus_fec: true, ..MediaFormat::plain(codec) }
    }

    #[test]
    fn telephone_frames_have_their_fixed_size() {
        for (codec, bytes) in [(Codec::Pcmu, 160), (Codec::Pcma, 160), (Codec::G722, 160)] {
            let mut encoder = Encoder::new(&format(codec), OpusSettings::default()).unwrap();
            assert_eq!(encoder.encode(&[0.1; 480]).unwrap().len(), bytes);
            assert_eq!(encoder.encode(&[0.1; 7]).unwrap().len(), bytes);
            assert_eq!(encoder.encode(&[]).unwrap().len(), bytes);
        }
        let mut encoder = Encoder::new(&format(Codec::Pcmu), OpusSettings::default()).unwrap();
        assert_eq!(encoder.silence().unwrap(), vec![0xff; 160]);
        let mut encoder = Encoder::new(&format(Codec::Pcma), OpusSettings::default()).unwrap();
        assert_eq!(encoder.silence().unwrap(), vec![0xd5; 160]);
    }

    /// Reports of loss change bit rate and profile; two frames of 10 ms stay in each payload, and sound as loud as ever.
    #[test]
    fn short_frames_go_in_pairs_whatever_the_peer_reports() {
        let short = MediaFormat { short_frames: true, ..format(Codec::Opus) };
        let mut encoder = Encoder::new(&short, OpusSettings::default()).unwrap();
        let mut decoder = super::super::decode::Decoder::new(Codec::Opus).unwrap();
        let (mut quietest, mut loudest) = (i32::MAX, 0);
        for n in 0..600 {
            if n % 20 == 19 {
                encoder.report_loss([0.0, 0.2, 0.05, 0.4, 0.0, 0.0, 0.0][n / 20 % 7]).unwrap();
            }
            let tone = |k: usize| 0.4 * ((n * 480 + k) as f32 * 0.115).sin();
            let payload = encoder.encode(&std::array::from_fn::<f32, 480, _>(tone)).unwrap();
            assert_eq!(payload[0] & 3, 2, "{n}: two frames");
            let mut pcm = Vec::new();
            decoder.decode(&payload, &mut pcm);
            assert_eq!(pcm.len(), super::super::decode::FRAME, "{n}");
            if n > 5 {
                let power = pcm.iter().map(|s| i32::from(*s).pow(2) / 320).sum::<i32>().isqrt();
                (quietest, loudest) = (quietest.min(power), loudest.max(power));
            }
        }
        assert_eq!(encoder.profile(), Some(Profile::Lossy), "it has changed");
        // 9,268 is the tone's own; at a change of mode a part of a frame is fainter, as with frames of 20 ms.
        assert!(quietest > 6_000 && loudest < 11_000, "{quietest} to {loudest}");
    }

    #[test]
    fn frames_of_two_kinds_share_no_packet() {
        let mut out = [0; MAX_OPUS];
        assert_eq!(together(&[8, 1, 2], &[8, 3], &mut out), Some(5));
        assert_eq!(out[..5], [10, 2, 1, 2, 3]);
        // 500 is 252 + 62 * 4, 255 is 255 + 0 * 4.
        for (length, low, high) in [(252, 252, 0), (255, 255, 0), (500, 252, 62)] {
            assert_eq!(together(&vec![8; length + 1], &[8], &mut out), Some(3 + length));
            assert_eq!(out[..3], [10, low, high]);
        }
        for (first, second) in [(&[8, 1][..], &[16, 1][..]), (&[9, 1], &[9, 1]), (&[], &[8]), (&[8], &[])] {
            assert_eq!(together(first, second, &mut out), None);
        }
        assert_eq!(together(&[8; 700], &[8; 700], &mut out), None);
    }

    #[test]
    fn dropped_frames_leave_no_trace_in_what_follows() {
        let tone = (0..480).map(|n| 0.4 * (n as f32 * 0.13).sin()).collect::<Vec<_>>();
        let mut encoder = Encoder::new(&format(Codec::Opus), OpusSettings::default()).unwrap();
        let mut decoder = super::super::decode::Decoder::new(Codec::Opus).unwrap();
        let mut pcm = Vec::new();
        for _ in 0..20 {
            decoder.decode(&encoder.encode(&tone).unwrap(), &mut pcm);
        }
        // Loud frames that never leave, then silence.
        let loud = (0..480).map(|n| if n % 7 < 3 { 0.9 } else { -0.9 }).collect::<Vec<_>>();
        encoder.encode(&loud).unwrap();
        encoder.encode(&loud).unwrap();
        encoder.forget_unsent().unwrap();
        pcm.clear();
        for _ in 0..4 {
            decoder.decode(&encoder.silence().unwrap(), &mut pcm);
        }
        // What was sent before fades within the codec's overlap; nothing else is heard. (Without the reset the
        // third frame still peaks at 1,500.)
        let loudest = pcm[80..].iter().map(|s| s.unsigned_abs()).max().unwrap();
        assert!(loudest < 20, "{loudest}");
    }

    #[test]
    fn the_bit_rate_falls_with_heavy_loss_and_comes_back_step_by_step() {
        for opus_fec in [true, false] {
            let format = MediaFormat { opus_fec, ..format(Codec::Opus) };
            let mut encoder = Encoder::new(&format, OpusSettings::default()).unwrap();
            let size = |encoder: &mut Encoder| {
                let frame = |n: usize| (0..480).map(|i| 0.3 * ((n * 480 + i) as f32 * 0.09).sin()).collect::<Vec<_>>();
                (0..20).map(|n| encoder.encode(&frame(n)).unwrap().len()).sum::<usize>()
            };
            let full = size(&mut encoder);
            encoder.report_loss(0.08).unwrap();
            assert_eq!(encoder.bitrate(), Some(32_000), "as a bad radio loses");
            encoder.report_loss(0.2).unwrap();
            assert_eq!(encoder.bitrate(), Some(28_800));
            (0..10).for_each(|_| encoder.report_loss(0.4).unwrap());
            assert_eq!(encoder.bitrate(), Some(20_000));
            let least = size(&mut encoder);
            assert!(least < full * 3 / 4, "{least} of {full} bytes");
            encoder.report_loss(0.0).unwrap();
            assert_eq!(encoder.bitrate(), Some(21_000));
            (0..20).for_each(|_| encoder.report_loss(0.0).unwrap());
            assert_eq!(encoder.bitrate(), Some(32_000));
        }
        assert_eq!(Encoder::new(&format(Codec::Pcmu), OpusSettings::default()).unwrap().bitrate(), None);
    }

    #[test]
    fn loss_switches_protection_on_and_its_end_off() {
        let mut encoder = Encoder::new(&format(Codec::Opus), OpusSettings::default()).unwrap();
        assert_eq!(encoder.profile(), Some(Profile::Clean));
        encoder.report_loss(0.01).unwrap();
        assert_eq!(encoder.profile(), Some(Profile::Clean));
        encoder.report_loss(0.05).unwrap();
        assert_eq!(encoder.profile(), Some(Profile::Lossy));
        assert!(!encoder.encode(&[0.1; 480]).unwrap().is_empty());
        for clean in [0.0, 0.0, 0.03, 0.0, 0.0] {
            encoder.report_loss(clean).unwrap();
            assert_eq!(encoder.profile(), Some(Profile::Lossy));
        }
        encoder.report_loss(0.0).unwrap();
        assert_eq!(encoder.profile(), Some(Profile::Clean));
        encoder.report_loss(f32::NAN).unwrap();
        let mut plain =
            Encoder::new(&MediaFormat { opus_fec: false, ..format(Codec::Opus) }, OpusSettings::default()).unwrap();
        plain.report_loss(0.5).unwrap();
        assert_eq!(plain.profile(), Some(Profile::Clean));
    }
}
