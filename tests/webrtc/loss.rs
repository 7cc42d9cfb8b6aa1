//! What is heard of a browser through a network that loses and shakes, with redundant audio (RFC 2198) and without, and of a
//! browser that is silent by not sending. In virtual time: the same seed gives the same network.

use std::collections::VecDeque;
use std::path::Path;
use std::time::{Duration, Instant};

use antiphon::media::decode::{FRAME, Heard, Inbound, RATE};
use antiphon::media::leg::{Codec, InPacket, OutPacket};
use antiphon::media::red::{Receiver, Sender};
use antiphon_loadgen::correlate::correlate;
use antiphon_loadgen::heard::Clip;
use antiphon_loadgen::relay::{Impair, Impairment};
use antiphon_loadgen::wav;
use bytes::Bytes;
use opus::{Application, Bitrate, Channels, Encoder};

const OPUS: u8 = 111;
const RED: u8 = 63;
/// What the rest of a stream waits for at most, and some more.
const LONG: Duration = Duration::from_secs(2);

/// Sounds as of a voice, at 16 kHz.
fn words() -> Clip {
    let words = wav::read(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/whisper/audio.wav"));
    let words = words.expect("recorded words");
    assert_eq!(words.rate, RATE);
    words
}

/// An encoder as a browser has it.
fn encoder() -> Encoder {
    let mut encoder = Encoder::new(RATE, Channels::Mono, Application::Voip).expect("an encoder");
    encoder.set_bitrate(Bitrate::Bits(32_000)).expect("set");
    encoder.set_inband_fec(true).expect("set");
    encoder.set_packet_loss_perc(10).expect("set");
    encoder
}

fn packet(sequence: u16, timestamp: u32, payload: Vec<u8>) -> OutPacket {
    OutPacket { payload_type: OPUS, marker: false, sequence, timestamp, payload: Bytes::from(payload) }
}

/// What a call made of a stream.
pub(crate) struct Outcome {
    pub(crate) clip: Clip,
    /// Frames that never came.
    lost: u64,
    /// Silence that was not sent.
    silence: Duration,
    /// When each frame came out, and how many samples did before it.
    pub(crate) came: Vec<(Instant, usize)>,
}

/// Hears `packets`, of which each arrives at its instant, if at all.
pub(crate) fn hear(packets: Vec<(Instant, OutPacket)>) -> Outcome {
    let mut packets = packets;
    packets.sort_by_key(|(at, _)| *at);
    let mut receiver = Receiver::new(RED, OPUS);
    let mut inbound = Inbound::new(Codec::Opus).expect("a decoder");
    let clip = Clip { rate: RATE, pcm: Vec::new() };
    let mut outcome = Outcome { clip, lost: 0, silence: Duration::ZERO, came: Vec::new() };
    let mut drain = |inbound: &mut Inbound, now: Instant| {
        while let Some(heard) = inbound.poll(now) {
            outcome.came.push((now, outcome.clip.pcm.len()));
            match heard {
                Heard::Frame(frame) => outcome.clip.pcm.extend(frame.iter().map(|s| f32::from(*s) / 32_768.0)),
                Heard::Silence(length) => {
                    outcome.silence += length;
                    let samples = (length.as_secs_f64() * f64::from(RATE)).round() as usize;
                    outcome.clip.pcm.extend(std::iter::repeat_n(0.0, samples));
                }
            }
        }
    };
    let last = packets.last().expect("packets").0;
    let mut opened = VecDeque::new();
    for (at, OutPacket { payload_type, marker, sequence, timestamp, payload }) in packets {
        while let Some(due) = inbound.deadline().filter(|due| *due <= at) {
            drain(&mut inbound, due);
        }
        receiver
            .take(InPacket { payload_type, marker, sequence, timestamp, ssrc: 1, arrived: at, payload }, &mut opened);
        for packet in opened.drain(..) {
            inbound.push(packet);
        }
        drain(&mut inbound, at);
    }
    drain(&mut inbound, last + LONG);
    outcome.lost = inbound.lost();
    outcome
}

/// The words through a network that loses `loss` of the packets and shakes them by up to 60 ms.
fn through(loss: f64, redundant: bool, seed: u64) -> Outcome {
    hear(arriving(&words(), (loss, redundant, seed), antiphon::clock::now()))
}

/// What arrives of `clip` and when, where it is sent from `start` on through a network that loses this share, with redundant
/// packets or without, and of this seed.
pub(crate) fn arriving(
    clip: &Clip,
    (loss, redundant, seed): (f64, bool, u64),
    start: Instant,
) -> Vec<(Instant, OutPacket)> {
    let mut network = Impair::new(Impairment { loss, jitter_ms: 60.0, ..Impairment::default() }, seed);
    let (mut encoder, mut sender) = (encoder(), Sender::new(RED, OPUS));
    if redundant {
        sender.report(loss as f32);
    }
    let mut packets = Vec::new();
    for (number, frame) in clip.pcm.chunks_exact(FRAME).enumerate() {
        let payload = encoder.encode_vec_float(frame, 1_275).expect("a frame");
        let packet = sender.add(packet(number as u16, number as u32 * 960, payload));
        let sent = start + Duration::from_millis(20) * number as u32;
        packets.extend(network.fate(sent).into_iter().map(|at| (at, packet.clone())));
    }
    packets
}

/// Correlation with what a network without fault brings, the mean of several networks, and the share that was lost.
fn quality(loss: f64, redundant: bool) -> (f32, f64) {
    let whole = through(0.0, false, 1).clip;
    let (mut found, mut lost) = (0.0, 0);
    let seeds = 1..=3;
    for seed in seeds.clone() {
        let outcome = through(loss, redundant, seed);
        found += correlate(&outcome.clip, &whole).expect("comparable").value;
        lost += outcome.lost;
    }
    let packets = words().pcm.len() / FRAME * seeds.clone().count();
    (found / seeds.count() as f32, lost as f64 / packets as f64)
}

#[test]
fn redundant_audio_brings_back_what_a_network_loses() {
    for (loss, least) in [(0.05, 0.99), (0.15, 0.97)] {
        let (plain, gone) = quality(loss, false);
        let (redundant, left) = quality(loss, true);
        println!(
            "loss {loss}, jitter 60 ms: correlation {plain:.3} with Opus' FEC, {redundant:.3} with RED; lost {gone:.4}, {left:.4}"
        );
        assert!(redundant > plain, "{loss}: {redundant} is no better than {plain}");
        assert!(redundant > least, "{loss}: {redundant}");
        assert!(gone > loss * 0.6 && left < gone / 5.0, "{loss}: lost {gone} and {left}");
    }
}

#[test]
fn a_browser_that_sends_nothing_in_silence_loses_nothing() {
    let mut encoder = encoder();
    encoder.set_inband_fec(false).expect("set");
    encoder.set_dtx(true).expect("set");
    let (words, start) = (words(), antiphon::clock::now());
    // A second and a half of words, four seconds of nothing, the words again.
    let said = &words.pcm[..RATE as usize * 3 / 2];
    let pcm = [said, &vec![0.0; RATE as usize * 4], said].concat();
    let (mut packets, mut sequence) = (Vec::new(), 0);
    for (number, frame) in pcm.chunks_exact(FRAME).enumerate() {
        let payload = encoder.encode_vec_float(frame, 1_275).expect("a frame");
        // RFC 7587 section 3.1.3: a frame of two octets or less is not sent. Every 400 ms there is a longer one.
        if payload.len() > 2 {
            let sent = start + Duration::from_millis(20) * number as u32;
            packets.push((sent, packet(sequence, number as u32 * 960, payload)));
            sequence += 1;
        }
    }
    let frames = pcm.len() / FRAME;
    assert!(packets.len() < frames * 3 / 4, "{} of {frames} were sent", packets.len());
    let outcome = hear(packets);
    assert_eq!(outcome.lost, 0);
    assert!(outcome.silence > Duration::from_secs(2), "{:?}", outcome.silence);
    // Time goes on as it did for who spoke.
    assert!(outcome.clip.pcm.len().abs_diff(pcm.len()) <= FRAME, "{} of {}", outcome.clip.pcm.len(), pcm.len());
}

#[test]
fn frames_of_any_length_and_of_two_channels_are_heard() {
    let words = words();
    for (channels, length) in [(1, 10), (1, 20), (1, 40), (1, 60), (2, 20)] {
        let layout = if channels == 2 { Channels::Stereo } else { Channels::Mono };
        let mut encoder = Encoder::new(RATE, layout, Application::Voip).expect("an encoder");
        encoder.set_bitrate(Bitrate::Bits(32_000)).expect("set");
        let samples = RATE as usize * length / 1_000;
        let start = antiphon::clock::now();
        let mut packets = Vec::new();
        for (number, frame) in words.pcm.chunks_exact(samples).enumerate() {
            // The answer asks for one channel; a sender of two is heard all the same.
            let frame: Vec<f32> = frame.iter().flat_map(|s| std::iter::repeat_n(*s, channels)).collect();
            let payload = encoder.encode_vec_float(&frame, 1_275).expect("a frame");
            let at = start + Duration::from_millis(length as u64) * number as u32;
            packets.push((at, packet(number as u16, (number * length * 48) as u32, payload)));
        }
        let outcome = hear(packets);
        let found = correlate(&outcome.clip, &words).expect("comparable").value;
        println!("{channels} channels, {length} ms: correlation {found:.3}");
        assert_eq!((outcome.lost, outcome.silence), (0, Duration::ZERO), "{channels} channels, {length} ms");
        assert!(found > 0.8, "{channels} channels, {length} ms: {found}");
    }
}
