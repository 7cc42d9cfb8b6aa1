use super::*;
use crate::clock;
use crate::sound::heard::{PayloadTypes, Recorder, packet};
use crate::wire::codec::{Encoder, to_i16};

fn ms(n: u64) -> Duration {
    Duration::from_millis(n)
}

/// Frames of a tone (`true`) or silence, each with when it arrives (ms) and its timestamp in frames.
fn hear(frames: &[(u64, u32, bool)]) -> (Instant, Heard) {
    let start = clock::now();
    let types = PayloadTypes { audio: 0, event: None };
    let mut recorder = Recorder::new(start, Codec::Pcmu, types, 8_000).unwrap();
    let mut encoder = Encoder::new(Codec::Pcmu).unwrap();
    let mut sequence = 0;
    let mut last = None;
    for (at, frame, loud) in frames {
        let pcm: Vec<i16> = (0..160).map(|n| if *loud { to_i16((n as f32 * 0.4).sin() * 0.3) } else { 0 }).collect();
        // A jump of the timestamp alone is a pause; tests that lose packets take them out of the sequence.
        sequence = last.map_or(0, |_| sequence + 1);
        last = Some(*frame);
        recorder.push(start + ms(*at), packet(0, sequence, frame * 160, encoder.encode(&pcm).unwrap()));
    }
    (start, recorder.take(start + ms(5_000)))
}

fn near(a: Duration, b: Duration) {
    assert!(a.abs_diff(b) <= ms(5), "{a:?} is not {b:?}");
}

#[test]
fn onset_is_the_first_audible_sample_after_the_instant() {
    let (start, heard) = hear(&[(0, 0, true), (20, 1, false), (40, 2, false), (60, 3, true), (80, 4, true)]);
    near(onset(&heard, start).unwrap() - start, ms(0));
    near(onset(&heard, start + ms(25)).unwrap() - start, ms(60));
    assert_eq!(onset(&heard, start + ms(300)), None);
}

/// As a telephone hears it whose peer lets silence pass without packets once it has something to say.
#[test]
fn what_is_missing_of_the_silence_before_is_no_stall() {
    let (start, heard) = hear(&[(0, 0, false), (20, 1, false), (60, 3, true), (80, 4, true), (100, 5, true)]);
    let onset = onset(&heard, start).unwrap();
    assert_eq!(packet_at(&heard, onset), start + ms(60));
    assert_eq!(stalls(&heard, packet_at(&heard, onset), start + ms(1_000), ms(40)), []);
    assert_eq!(stalls(&heard, start, start + ms(1_000), ms(40)).len(), 1);
    // In the middle of a packet, and where there is none.
    assert_eq!(packet_at(&heard, start + ms(79)), start + ms(60));
    assert_eq!(packet_at(&heard, start + ms(500)), start + ms(500));
}

#[test]
fn silence_is_measured_to_the_last_audible_sample() {
    let frames: Vec<_> = (0..50u32).map(|n| (u64::from(n) * 20, n, n < 10)).collect();
    let (start, heard) = hear(&frames);
    near(silent_from(&heard, start + ms(100), ms(200)).unwrap() - start, ms(200));
    assert_eq!(silent_from(&heard, start + ms(400), ms(200)), Some(start + ms(400)), "already silent");
    let endless: Vec<_> = (0..250u32).map(|n| (u64::from(n) * 20, n, true)).collect();
    let (start, heard) = hear(&endless);
    assert_eq!(silent_from(&heard, start + ms(100), ms(200)), None);
}

#[test]
fn spans_join_over_short_pauses_only() {
    let loud = |n: u32| n < 5 || (8..12).contains(&n) || n > 40;
    let frames: Vec<_> = (0..50u32).map(|n| (u64::from(n) * 20, n, loud(n))).collect();
    let (start, heard) = hear(&frames);
    let spans = spans(&heard, start, start + ms(5_000), ms(200));
    assert_eq!(spans.len(), 2);
    near(spans[0].duration(), ms(240));
    near(spans[1].from - start, ms(820));
}

#[test]
fn a_late_packet_stalls_by_what_the_buffer_does_not_cover() {
    let (start, heard) = hear(&[(0, 0, true), (20, 1, true), (140, 2, true), (160, 3, true)]);
    let found = stalls(&heard, start, start + ms(1_000), ms(40));
    assert_eq!(found.len(), 1);
    assert_eq!(found[0].cause, StallCause::Late);
    near(found[0].length, ms(60));
    assert_eq!(stalls(&heard, start, start + ms(1_000), ms(120)), []);
}

#[test]
fn a_pause_of_the_sender_is_a_stall_of_its_length() {
    let (start, heard) = hear(&[(0, 0, true), (20, 1, true), (140, 7, true), (160, 8, true)]);
    let found = stalls(&heard, start, start + ms(1_000), ms(40));
    assert_eq!(found.len(), 1);
    assert_eq!(found[0].cause, StallCause::Paused);
    near(found[0].length, ms(100));
}

#[test]
fn lateness_is_against_the_most_punctual_packet_of_the_spurt() {
    let (start, heard) = hear(&[(3, 0, true), (20, 1, true), (45, 2, true), (60, 3, true)]);
    assert_eq!(lateness(&heard, start, start + ms(1_000)), [ms(3), ms(0), ms(5), ms(0)]);
}

#[test]
fn mos_falls_with_loss_and_delay() {
    let clean = mos(Codec::Pcmu, 0.0, ms(20));
    assert!((4.3..4.5).contains(&clean), "{clean}");
    // R = 93.2 - 0.48 - 95 * 5 / 30.1 = 76.94.
    let lossy = mos(Codec::Pcmu, 0.05, ms(20));
    assert!((lossy - 3.90).abs() < 0.01, "{lossy}");
    assert!(mos(Codec::Pcmu, 0.0, ms(400)) < clean - 0.5);
    assert!(mos(Codec::Opus, 1.0, ms(5_000)) >= 1.0);
}
