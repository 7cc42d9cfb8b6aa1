//! Recordings of every format, and files that are none: decoded or refused, within bounds.

use std::path::Path;
use std::time::Duration;

use antiphon::clock;
use antiphon::voice::decode::{self, DecodeError, MAX_BYTES, Recording, decode};
use proptest::prelude::*;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

const FILES: [(&str, u32, usize); 7] = [
    ("flac.flac", 16_000, 1),
    ("mp3.mp3", 24_000, 1),
    ("aac.m4a", 44_100, 1),
    ("adts.aac", 24_000, 1),
    ("vorbis.ogg", 16_000, 1),
    ("opus.ogg", 48_000, 1),
    ("opus_stereo.webm", 48_000, 2),
];

fn file(name: &str) -> Vec<u8> {
    std::fs::read(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/voice").join(name)).expect("fixture")
}

fn wav(rate: u32, channels: u16, frames: usize) -> Vec<u8> {
    let spec =
        hound::WavSpec { channels, sample_rate: rate, bits_per_sample: 16, sample_format: hound::SampleFormat::Int };
    let mut out = std::io::Cursor::new(Vec::new());
    let mut writer = hound::WavWriter::new(&mut out, spec).expect("header");
    for frame in 0..frames {
        for _ in 0..channels {
            writer.write_sample(((frame as f32 * 0.05).sin() * 8000.0) as i16).expect("sample");
        }
    }
    writer.finalize().expect("length");
    out.into_inner()
}

/// Overwrites bytes of a wav header.
fn patched(mut bytes: Vec<u8>, at: usize, value: &[u8]) -> Vec<u8> {
    bytes[at..at + value.len()].copy_from_slice(value);
    bytes
}

fn rms(recording: &Recording) -> f32 {
    (recording.samples.iter().map(|s| s * s).sum::<f32>() / recording.samples.len() as f32).sqrt()
}

/// Most memory this process ever held, in MiB.
fn peak_mib() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find(|l| l.starts_with("VmHWM:"))?;
    line.split_whitespace().nth(1)?.parse::<u64>().ok().map(|kib| kib / 1024)
}

/// What a fuzzer without coverage does: spoils recordings of every format, and recordings spoiled before, in every way
/// that files are spoiled, for so long. A hang or an abort is what it looks for, beside what the contract promises.
fn spoil_recordings(seed: u64, time: Duration) -> u64 {
    let mut rng = StdRng::seed_from_u64(seed);
    let mut corpus: Vec<Vec<u8>> = FILES.iter().map(|(name, ..)| file(name)).collect();
    corpus.extend([wav(8_000, 1, 4_000), wav(48_000, 2, 2_000)]);
    let kept = corpus.len();
    let until = clock::now() + time;
    let mut runs = 0;
    while clock::now() < until {
        let mut bytes = corpus[rng.random_range(0..corpus.len())].clone();
        for _ in 0..rng.random_range(1..12) {
            spoil(&mut bytes, &mut rng, &corpus);
        }
        let began = clock::now();
        decode::fuzz(&bytes);
        let took = clock::now() - began;
        assert!(took < Duration::from_secs(20), "{} bytes took {took:?} in run {runs} of seed {seed}", bytes.len());
        // Deeper damage grows on what was damaged and still decoded.
        if decode(bytes.clone()).is_ok() && bytes.len() < 1 << 20 {
            if corpus.len() > kept + 64 {
                corpus.swap_remove(rng.random_range(kept..corpus.len()));
            }
            corpus.push(bytes);
        }
        runs += 1;
    }
    runs
}

/// Damages `bytes` once; headers, which lie in front, more often than the rest.
fn spoil(bytes: &mut Vec<u8>, rng: &mut StdRng, others: &[Vec<u8>]) {
    const EDGES: [u32; 10] = [0, 1, 0x7f, 0x80, 0xff, 0x7fff, 0xffff, 0x7fff_ffff, 0x8000_0000, u32::MAX];
    if bytes.is_empty() {
        return bytes.push(rng.random());
    }
    let front = if rng.random_bool(0.6) { bytes.len().min(256) } else { bytes.len() };
    let at = rng.random_range(0..front);
    let rest = bytes.len() - at;
    match rng.random_range(0..8) {
        0 => bytes[at] ^= 1 << rng.random_range(0..8),
        1 => bytes[at] = rng.random(),
        2 => {
            let edge = EDGES[rng.random_range(0..EDGES.len())];
            let edge = if rng.random() { edge.to_le_bytes() } else { edge.to_be_bytes() };
            let size = [1, 2, 4][rng.random_range(0..3)].min(rest);
            bytes[at..at + size].copy_from_slice(&edge[..size]);
        }
        3 => bytes.truncate(at),
        4 => drop(bytes.drain(at..at + rng.random_range(1..=rest.min(64)))),
        5 => {
            let piece = bytes[at..at + rng.random_range(1..=rest.min(512))].to_vec();
            drop(bytes.splice(at..at, piece));
        }
        6 => drop(bytes.splice(at..at, (0..rng.random_range(1..32)).map(|n: u8| n.wrapping_mul(37)))),
        _ => {
            let other = &others[rng.random_range(0..others.len())];
            let from = rng.random_range(0..other.len().max(1)).min(other.len());
            bytes.truncate(at);
            bytes.extend(&other[from..]);
        }
    }
}

#[test]
fn spoilt_recordings_neither_abort_nor_hang() {
    assert!(spoil_recordings(7, Duration::from_secs(2)) > 0);
}

#[test]
#[ignore = "spoils recordings for two minutes; a new seed each time"]
fn spoilt_recordings_neither_abort_nor_hang_for_long() {
    let seed = clock::wall().as_secs();
    let runs = spoil_recordings(seed, Duration::from_secs(120));
    println!("{runs} recordings spoilt from seed {seed}");
}

#[test]
fn every_format_is_known_by_its_content() {
    for (name, rate, channels) in FILES {
        let recording = decode(file(name)).unwrap_or_else(|e| panic!("{name}: {e}"));
        assert_eq!((recording.rate, recording.channels), (rate, channels), "{name}");
        assert!((1.1..1.35).contains(&recording.seconds()), "{name}: {} s", recording.seconds());
        assert!((0.05..0.3).contains(&rms(&recording)), "{name}: rms {}", rms(&recording));
        assert_eq!(recording.damaged_packets, 0, "{name}");
    }
    for (rate, channels) in [(8_000, 1), (22_050, 2), (48_000, 6), (192_000, 1)] {
        let recording = decode(wav(rate, channels, rate as usize)).expect("a plain wav");
        assert_eq!((recording.rate, recording.channels), (rate, usize::from(channels)));
        assert!((recording.seconds() - 1.0).abs() < 1e-3);
    }
}

#[test]
fn rates_and_channels_out_of_bounds_are_refused() {
    // Bytes 24..28 of a plain wav are the rate, 22..24 the channels.
    let plain = wav(16_000, 1, 16_000);
    for rate in [1, 7_999, 192_001, 384_000, u32::MAX] {
        let error = decode(patched(plain.clone(), 24, &rate.to_le_bytes())).expect_err("refused");
        assert_eq!(error, DecodeError::Rate(rate));
    }
    assert!(decode(patched(plain.clone(), 24, &[0; 4])).is_err(), "0 Hz");
    assert!(decode(patched(plain, 22, &[0; 2])).is_err(), "no channel");
    for channels in [9, 64] {
        let error = decode(wav(16_000, channels, 16_000)).expect_err("refused");
        assert!(error.to_string().contains("channels"), "{channels} channels: {error}");
    }
}

#[test]
fn ten_hours_are_refused_by_their_header() {
    let bytes = 10 * 3600 * 32_000_u32;
    let long = patched(wav(16_000, 1, 16_000), 40, &bytes.to_le_bytes());
    let long = patched(long, 4, &(bytes + 36).to_le_bytes());
    let error = decode(long).expect_err("refused").to_string();
    assert!(error.contains("10.0 hours"), "{error}");
}

#[test]
fn a_recording_that_goes_on_is_cut_short_by_the_bound() {
    // Length unknown, as programs write that stream a wav: the bound is met while decoding.
    let streamed = |seconds: usize| patched(patched(wav(8_000, 1, seconds * 8_000), 40, &[0xff; 4]), 4, &[0xff; 4]);
    assert!(matches!(decode(streamed(61)), Err(DecodeError::TooLong { .. })));
    assert!((decode(streamed(20)).expect("in bounds").seconds() - 20.0).abs() < 1e-3);
}

#[test]
fn a_small_file_of_much_sound_is_refused() {
    // Five minutes of silence in a few kilobytes. The length is in the last 36 bits of bytes 18 to 26.
    let bomb = file("silence_5min.flac");
    assert_eq!(decode(bomb.clone()), Err(DecodeError::TooLong { limit: 60, why: "it announces 300 s".into() }));
    let unannounced = patched(bomb, 22, &[0; 4]);
    assert_eq!(decode(unannounced), Err(DecodeError::TooLong { limit: 60, why: "it goes on after 60 s".into() }));
}

#[test]
fn half_a_recording_is_not_taken_for_a_whole() {
    for (name, _, _) in [FILES[0], FILES[2]] {
        let whole = file(name);
        let half = whole[..whole.len() / 2].to_vec();
        assert!(decode(half).is_err(), "{name}");
    }
    let plain = wav(16_000, 1, 64_000);
    let error = decode(plain[..plain.len() / 2].to_vec()).expect_err("refused").to_string();
    assert!(error.contains("2.0 of 4.0 s"), "{error}");
}

#[test]
fn what_is_no_recording_is_named_so() {
    let texts: [&[u8]; 6] = [
        b"",
        b"x",
        b"RIFF",
        b"<!doctype html><html>not found</html>",
        b"PK\x03\x04\x14\0\0\0\x08\0 a zip archive, or so it says",
        b"\x1f\x8b\x08\0 gzip",
    ];
    for text in texts {
        let error = decode(text.to_vec()).expect_err("refused").to_string();
        assert!(error.contains("no recording") || error.contains("damaged"), "{error}");
    }
    assert!(decode(vec![0; 1 << 20]).is_err());
    assert!(decode(vec![0xff; 1 << 20]).is_err());
    assert!(matches!(decode(vec![0; MAX_BYTES + 1]), Err(DecodeError::TooLarge { .. })));
}

#[test]
fn samples_that_are_no_numbers_are_refused() {
    let spec = hound::WavSpec {
        channels: 1,
        sample_rate: 16_000,
        bits_per_sample: 32,
        sample_format: hound::SampleFormat::Float,
    };
    let mut out = std::io::Cursor::new(Vec::new());
    let mut writer = hound::WavWriter::new(&mut out, spec).expect("header");
    for i in 0..16_000 {
        writer.write_sample(if i == 9_000 { f32::NAN } else { 0.1 }).expect("sample");
    }
    writer.finalize().expect("length");
    assert_eq!(decode(out.into_inner()), Err(DecodeError::NotNumbers));
}

#[test]
fn every_truncation_is_survived_in_bounded_memory() {
    for (name, _, _) in FILES {
        let whole = file(name);
        // Headers at every byte, the rest in steps.
        let lengths = (0..whole.len().min(700)).chain((700..whole.len()).step_by(whole.len() / 100));
        for length in lengths {
            decode::fuzz(&whole[..length]);
        }
    }
    let plain = wav(16_000, 1, 800);
    for length in 0..plain.len() {
        decode::fuzz(&plain[..length]);
    }
    if let Some(peak) = peak_mib() {
        assert!(peak < 1024, "{peak} MiB");
    }
}

#[test]
fn lengths_that_lie_are_survived_in_bounded_memory() {
    for (name, _, _) in FILES {
        let whole = file(name);
        // Headers are at the start, those of m4a at the end.
        let tail = if name == "aac.m4a" { 1000 } else { 0 };
        let end = whole.len() - 4;
        for at in (0..end.min(300)).chain(end - tail..end) {
            for value in [[0xff; 4], [0; 4]] {
                decode::fuzz(&patched(whole.clone(), at, &value));
            }
        }
    }
    if let Some(peak) = peak_mib() {
        assert!(peak < 1024, "{peak} MiB");
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn changed_bytes_are_survived(which in 0..FILES.len(), changes in prop::collection::vec((any::<u32>(), any::<u8>()), 1..24)) {
        let mut bytes = file(FILES[which].0);
        for (at, value) in changes {
            let at = at as usize % bytes.len();
            bytes[at] = value;
        }
        decode::fuzz(&bytes);
    }

    #[test]
    fn arbitrary_bytes_are_survived(bytes in prop::collection::vec(any::<u8>(), 0..2048)) {
        decode::fuzz(&bytes);
    }

    #[test]
    fn arbitrary_bytes_after_a_known_mark_are_survived(which in 0..6_usize, bytes in prop::collection::vec(any::<u8>(), 0..1024)) {
        let mark: &[u8] = [
            &b"RIFF\xff\xff\xff\x7fWAVEfmt "[..], b"fLaC", b"OggS\0\x02", b"\0\0\0\x20ftypM4A ", b"\xff\xfb\x90\0", b"\x1a\x45\xdf\xa3",
        ][which];
        decode::fuzz(&[mark, &bytes].concat());
    }
}
