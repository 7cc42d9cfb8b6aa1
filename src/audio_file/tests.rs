use std::io::Cursor;

use symphonia::core::codecs::audio::AudioDecoderOptions;
use symphonia::core::formats::TrackType;
use symphonia::core::formats::probe::Hint;
use symphonia::core::io::MediaSourceStream;

use super::*;

fn tone(samples: usize) -> Vec<f32> {
    (0..samples).map(|n| 0.5 * (n as f32 * 0.11).sin()).collect()
}

/// All bytes of `pcm`, pushed in uneven pieces.
fn written(format: Format, pcm: &[f32], known: bool) -> Vec<u8> {
    let writer = match known {
        true => AudioWriter::with_length(format, 24_000, pcm.len() as u64),
        false => AudioWriter::new(format, 24_000),
    };
    let mut writer = writer.expect("starts");
    let mut bytes = Vec::new();
    for piece in pcm.chunks(1_111) {
        bytes.extend(writer.push(piece).expect("writes"));
    }
    bytes.extend(writer.finish().expect("ends"));
    bytes
}

/// What an independent reader makes of a FLAC or WAV file.
fn decoded(bytes: Vec<u8>) -> Vec<f32> {
    let stream = MediaSourceStream::new(Box::new(Cursor::new(bytes)), Default::default());
    let mut format = symphonia::default::get_probe()
        .probe(&Hint::new(), stream, Default::default(), Default::default())
        .expect("recognised");
    let track = format.default_track(TrackType::Audio).expect("a track");
    let params = track.codec_params.as_ref().and_then(|p| p.audio()).expect("audio").clone();
    assert_eq!(params.sample_rate, Some(24_000));
    let mut decoder =
        symphonia::default::get_codecs().make_audio_decoder(&params, &AudioDecoderOptions::default()).expect("decoder");
    let mut all = Vec::new();
    while let Ok(Some(packet)) = format.next_packet() {
        let buffer = decoder.decode(&packet).expect("decodes");
        let mut samples = Vec::<f32>::new();
        buffer.copy_to_vec_interleaved(&mut samples);
        all.extend(samples);
    }
    all
}

#[test]
fn wav_and_flac_keep_every_sample() {
    for samples in [0usize, 1, 31, 2_400, 2_401, 30_000] {
        let pcm = tone(samples);
        for (format, known) in [(Format::Flac, true), (Format::Flac, false), (Format::Wav, true)] {
            if samples == 0 && format == Format::Flac {
                continue;
            }
            let back = decoded(written(format, &pcm, known));
            assert!(back.len() >= samples && back.len() < samples + 32, "{format:?}: {} of {samples}", back.len());
            for (a, b) in pcm.iter().zip(&back) {
                assert!((a - b).abs() < 1e-4, "{format:?}: {a} became {b}");
            }
        }
    }
}

#[test]
fn opus_has_the_right_length_and_sound() {
    let pcm = tone(50_000);
    let bytes = written(Format::Opus, &pcm, false);
    let mut reader = ogg::PacketReader::new(Cursor::new(bytes));
    let mut decoder = opus::Decoder::new(24_000, Channels::Mono).expect("decoder");
    let head = reader.read_packet_expected().expect("head").data;
    assert_eq!(&head[..10], b"OpusHead\x01\x01");
    let pre_skip = usize::from(u16::from_le_bytes([head[10], head[11]])) / 2;
    assert_eq!(&reader.read_packet_expected().expect("tags").data[..8], b"OpusTags");
    let (mut out, mut end) = (Vec::new(), 0);
    while let Some(packet) = reader.read_packet().expect("well-formed") {
        let mut frame = [0.0; 480];
        let n = decoder.decode_float(&packet.data, &mut frame, false).expect("decodes");
        out.extend_from_slice(&frame[..n]);
        end = packet.absgp_page();
        assert_eq!(packet.last_in_stream(), out.len() >= pre_skip + 50_000);
    }
    assert_eq!(end as usize, 2 * (pre_skip + 50_000));
    let out = &out[pre_skip..pre_skip + 50_000];
    let dot: f32 = pcm.iter().zip(out).map(|(a, b)| a * b).sum();
    let norm: f32 = pcm.iter().map(|a| a * a).sum::<f32>().sqrt() * out.iter().map(|a| a * a).sum::<f32>().sqrt();
    assert!(dot / norm > 0.99, "correlation {}", dot / norm);
}

#[test]
fn the_same_samples_give_the_same_bytes() {
    let pcm = tone(20_000);
    for format in Format::ALL {
        assert_eq!(written(format, &pcm, false), written(format, &pcm, false), "{format:?}");
        assert_eq!(Format::named(format.name()), Some(format));
    }
    assert_eq!(written(Format::Pcm, &[1.0, -1.0], false), [0xff, 0x7f, 0x01, 0x80]);
}

#[test]
fn a_rate_that_opus_has_not_is_refused() {
    assert!(matches!(AudioWriter::new(Format::Opus, 22_050), Err(AudioFileError::Rate { .. })));
}
