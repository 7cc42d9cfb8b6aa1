use super::*;
use crate::sound::synthetic::babble;
use crate::wire::codec::{Codec, Decoder, Encoder, from_i16, to_i16};

/// Through a codec, as a call would.
pub(crate) fn coded(clip: &Clip, codec: Codec) -> Clip {
    let mut encoder = Encoder::new(codec).unwrap();
    let mut decoder = Decoder::new(codec, 24_000).unwrap();
    let low: Vec<i16> = resample(&clip.pcm, clip.rate, encoder.rate()).unwrap().into_iter().map(to_i16).collect();
    let mut heard = Vec::new();
    for frame in low.chunks_exact(encoder.frame()) {
        decoder.decode(&encoder.encode(frame).unwrap(), &mut heard).unwrap();
    }
    Clip { rate: decoder.rate(), pcm: heard.into_iter().map(from_i16).collect() }
}

fn behind_silence(clip: &Clip, seconds: f32) -> Clip {
    let mut pcm = vec![0.0; (clip.rate as f32 * seconds) as usize];
    pcm.extend_from_slice(&clip.pcm);
    Clip { rate: clip.rate, pcm }
}

#[test]
fn the_same_words_through_any_codec_match() {
    let reference = babble(1, 24_000, 3.0);
    for (codec, least) in [(Codec::Opus, 0.9), (Codec::G722, 0.9), (Codec::Pcmu, 0.8), (Codec::Pcma, 0.8)] {
        let found = correlate(&behind_silence(&coded(&reference, codec), 0.7), &reference).unwrap();
        assert!(found.value > least, "{codec:?}: {found:?}");
        assert!((found.offset - 0.7).abs() < 0.03, "{codec:?}: {found:?}");
        assert_eq!(found.shifts, [], "{codec:?}");
    }
}

#[test]
fn other_words_noise_and_silence_do_not() {
    let reference = babble(1, 24_000, 3.0);
    let noise = Clip {
        rate: 8_000,
        pcm: (0..24_000u32).map(|n| (n.wrapping_mul(2_654_435_761) >> 16) as f32 / 65_536.0 - 0.5).collect(),
    };
    let silence = Clip { rate: 8_000, pcm: vec![0.0; 24_000] };
    for other in [babble(2, 24_000, 3.0), babble(9, 8_000, 3.0), noise, silence, Clip::default()] {
        let found = correlate(&other, &reference).unwrap();
        assert!(found.value < 0.6, "{found:?}");
        assert!(found.found < 0.5, "{found:?}");
    }
}

#[test]
fn slow_drift_is_followed() {
    let reference = babble(3, 24_000, 4.0);
    // A clock that is 500 ppm off shifts by 2 ms in 4 s: 16 periods of 8 kHz.
    let drifted = Clip { rate: 24_000, pcm: resample(&reference.pcm, 24_000, 24_012).unwrap() };
    let found = correlate(&drifted, &reference).unwrap();
    assert!(found.value > 0.9, "{found:?}");
}

#[test]
fn inserted_silence_is_found_where_and_as_long_as_it_was() {
    let reference = babble(4, 24_000, 4.0);
    let cut = 24_000 * 2;
    let mut pcm = reference.pcm[..cut].to_vec();
    pcm.resize(cut + 24_000 * 3 / 10, 0.0);
    pcm.extend_from_slice(&reference.pcm[cut..]);
    let found = correlate(&coded(&Clip { rate: 24_000, pcm }, Codec::Pcmu), &reference).unwrap();
    assert!(found.value > 0.8, "{found:?}");
    assert!(inserted(&found.shifts).abs_diff(Duration::from_millis(300)) < Duration::from_millis(3), "{found:?}");
    assert!((found.shifts[0].at - 2.0).abs() < 0.25, "{found:?}");
}
