use proptest::prelude::*;

use super::*;
use crate::clock;
use crate::media::leg::Codec;

const MS: Duration = Duration::from_millis(1);

fn format(codec: Codec, continuous: bool) -> MediaFormat {
    let telephone_event = Some((101, 8_000));
    MediaFormat { payload_type: 96, telephone_event, continuous, ..MediaFormat::plain(codec) }
}

fn frame(owner: u64) -> Frame {
    Frame { payload: Bytes::from_static(b"x"), owner: Some(UtteranceId(owner)), samples: 480, quiet: false, tap: None }
}

/// A stream with its own idea of time.
struct World {
    now: Instant,
    playout: Playout,
}

impl World {
    fn new(codec: Codec, continuous: bool) -> Self {
        let now = clock::now();
        let mut playout = Playout::new(&format(codec, continuous), 65_530, u32::MAX - 1_000);
        playout.start(now);
        Self { now, playout }
    }

    fn push(&mut self, owner: u64, frames: usize) {
        for _ in 0..frames {
            self.playout.push(self.now, frame(owner));
        }
    }

    fn drain(&mut self) -> Vec<Departure> {
        std::iter::from_fn(|| self.playout.poll(self.now)).collect()
    }

    /// Moves to `until`, waking at every deadline; returns departures with their instants.
    fn run(&mut self, until: Instant) -> Vec<(Instant, Departure)> {
        let mut out = Vec::new();
        loop {
            out.extend(self.drain().into_iter().map(|departure| (self.now, departure)));
            match self.playout.deadline().filter(|deadline| *deadline <= until) {
                Some(deadline) => self.now = self.now.max(deadline),
                None => break,
            }
        }
        self.now = until;
        out
    }
}

#[test]
fn the_first_frame_leaves_at_once_and_the_others_every_20_ms() {
    let mut world = World::new(Codec::Opus, false);
    let start = world.now;
    world.push(1, 5);
    let out = world.run(start + 200 * MS);
    let times = out.iter().map(|(at, _)| (*at - start).as_millis()).collect::<Vec<_>>();
    assert_eq!(times, [0, 20, 40, 60, 80]);
    let (_, first) = &out[0];
    assert_eq!((first.marker, first.sequence, first.timestamp), (true, 65_530, u32::MAX - 1_000));
    assert_eq!(first.anchored, Some(start));
    let (_, last) = &out[4];
    assert_eq!((last.marker, last.sequence, last.timestamp), (false, 65_534, (u32::MAX - 1_000).wrapping_add(4 * 960)));
    assert!(out[1..].iter().all(|(_, d)| d.anchored.is_none() && d.underrun.is_none()));
    assert_eq!(world.playout.deadline(), None);
}

#[test]
fn speech_between_two_slots_waits_for_the_grid_while_the_spurt_lasts() {
    let mut world = World::new(Codec::Pcmu, false);
    let start = world.now;
    world.push(1, 1);
    world.run(start + 5 * MS);
    world.push(2, 1);
    let out = world.run(start + 100 * MS);
    assert_eq!(out.len(), 1);
    assert_eq!(out[0].0, start + 20 * MS);
    assert!(!out[0].1.marker);
}

#[test]
fn an_underrun_sends_nothing_and_begins_a_new_spurt() {
    let mut world = World::new(Codec::Pcmu, false);
    let start = world.now;
    world.push(1, 2);
    world.playout.expect_more(true);
    assert_eq!(world.run(start + 75 * MS).len(), 2);
    world.push(1, 2);
    let out = world.run(start + 200 * MS);
    assert_eq!(out[0].0, start + 75 * MS);
    assert_eq!(out[0].1.underrun, Some(35 * MS));
    assert_eq!(out[0].1.anchored, Some(start + 75 * MS));
    assert!(out[0].1.marker);
    // 75 ms are 600 ticks at 8 kHz.
    assert_eq!(out[0].1.timestamp, (u32::MAX - 1_000).wrapping_add(600));
    assert_eq!(out[1].0, start + 95 * MS);
    assert_eq!(out[0].1.sequence, 65_532);
}

#[test]
fn silence_between_turns_is_no_underrun() {
    let mut world = World::new(Codec::Opus, false);
    let start = world.now;
    world.push(1, 2);
    assert_eq!(world.run(start + 500 * MS).len(), 2);
    world.push(2, 1);
    world.playout.expect_more(true);
    let out = world.run(start + 510 * MS);
    assert_eq!(out[0].1.underrun, None);
    assert!(out[0].1.marker);
    // The end of an utterance that comes after its last frame was played is no gap either.
    world.run(start + 600 * MS);
    world.playout.expect_more(false);
    world.push(2, 1);
    assert_eq!(world.drain()[0].underrun, None);
}

#[test]
fn a_late_wake_sends_two_frames_and_never_more() {
    let mut world = World::new(Codec::Pcmu, false);
    let start = world.now;
    world.push(1, 20);
    assert_eq!(world.drain().len(), 1);
    world.now = start + 45 * MS;
    let two = world.drain();
    assert_eq!(two.iter().map(|d| d.late).collect::<Vec<_>>(), [25 * MS, 5 * MS]);
    assert!(two.iter().all(|d| !d.marker));
    // 300 ms without the processor: fourteen are due, two leave, and the grid moves on.
    world.now = start + 345 * MS;
    let out = world.drain();
    assert_eq!(out.len(), 2);
    assert!(out[0].marker && !out[1].marker);
    assert_eq!((out[0].stalled, out[1].stalled), (Some(265 * MS), None));
    assert_eq!(out[1].timestamp.wrapping_sub(out[0].timestamp), 160);
    assert_eq!(world.playout.deadline(), Some(start + 365 * MS));
}

#[test]
fn a_continuous_stream_never_stops_and_speech_takes_its_next_slot() {
    let mut world = World::new(Codec::Pcmu, true);
    let start = world.now;
    let out = world.run(start + 99 * MS);
    assert_eq!(out.len(), 5);
    assert!(out.iter().all(|(_, d)| d.body == Body::Silence));
    assert!(out[0].1.marker && !out[1].1.marker);
    world.push(1, 2);
    let out = world.run(start + 161 * MS);
    let kinds =
        out.iter().map(|(at, d)| ((*at - start).as_millis(), matches!(d.body, Body::Speech(_)))).collect::<Vec<_>>();
    assert_eq!(kinds, [(100, true), (120, true), (140, false), (160, false)]);
    assert!(out.iter().all(|(_, d)| !d.marker));
    assert_eq!(out[0].1.anchored, Some(start + 100 * MS));
}

#[test]
fn a_continuous_stream_lets_silence_pass_for_speech_that_is_on_its_way() {
    let mut world = World::new(Codec::Pcmu, true);
    let start = world.now;
    assert_eq!(world.run(start + 305 * MS).len(), 16);
    world.playout.await_speech(world.now, true);
    assert!(world.run(start + 333 * MS).is_empty());
    world.push(1, 2);
    let out = world.run(start + 380 * MS);
    let kinds =
        out.iter().map(|(at, d)| ((*at - start).as_millis(), matches!(d.body, Body::Speech(_)))).collect::<Vec<_>>();
    assert_eq!(kinds, [(333, true), (353, true), (373, false)]);
    let first = &out[0].1;
    assert_eq!((first.marker, first.anchored, first.late), (true, Some(start + 333 * MS), Duration::ZERO));
    // Nothing is missing; 333 ms are 2,664 ticks at 8 kHz.
    assert_eq!((first.sequence, first.timestamp), (10, (u32::MAX - 1_000).wrapping_add(2_664)));
    assert!(!out[1].1.marker && !out[2].1.marker);
}

#[test]
fn a_continuous_stream_goes_on_when_speech_takes_long_or_does_not_come() {
    let mut world = World::new(Codec::Pcmu, true);
    let start = world.now;
    world.run(start + 305 * MS);
    world.playout.await_speech(world.now, true);
    let out = world.run(start + 450 * MS);
    let times = |out: &[(Instant, Departure)]| out.iter().map(|(at, _)| (*at - start).as_millis()).collect::<Vec<_>>();
    assert_eq!(times(&out), [405, 425, 445]);
    assert!(out[0].1.marker && out.iter().all(|(_, d)| d.body == Body::Silence && d.stalled.is_none()));
    // It does not wait again for the same speech, however long that takes.
    assert_eq!(world.run(start + 900 * MS).len(), 22);
    world.playout.await_speech(world.now, false);
    world.playout.await_speech(world.now, true);
    assert!(world.run(start + 950 * MS).is_empty());
    world.playout.await_speech(world.now, false);
    assert_eq!(times(&world.run(start + 975 * MS)), [950, 970]);
}

#[test]
fn a_continuous_stream_lets_nothing_pass_behind_sound_or_while_paused() {
    let mut world = World::new(Codec::Pcmu, true);
    let start = world.now;
    // The path may not be open yet, and concealment would go on from sound.
    world.playout.await_speech(world.now, true);
    assert_eq!(world.run(start + 90 * MS).len(), 5);
    world.playout.await_speech(world.now, false);
    world.push(1, 1);
    world.run(start + 290 * MS);
    world.playout.await_speech(world.now, true);
    // Ten slots of silence came behind the one of speech, which left at 100 ms.
    assert_eq!(world.run(start + 310 * MS).len(), 1);
    assert!(world.run(start + 330 * MS).is_empty());
    world.playout.pause(world.now, true);
    assert_eq!(world.run(start + 380 * MS).len(), 3);
    world.playout.fill(world.now, true);
    world.playout.pause(world.now, false);
    assert_eq!(world.run(start + 440 * MS).len(), 3);
}

#[test]
fn a_continuous_stream_fills_an_underrun_with_silence_and_counts_it() {
    let mut world = World::new(Codec::Pcma, true);
    let start = world.now;
    world.push(1, 1);
    world.playout.expect_more(true);
    assert_eq!(world.run(start + 45 * MS).len(), 3);
    world.push(1, 1);
    let out = world.run(start + 60 * MS);
    assert_eq!(out[0].1.underrun, Some(40 * MS));
    assert!(!out[0].1.marker);
}

#[test]
fn barge_in_is_silence_at_once_and_says_what_was_sent() {
    let mut world = World::new(Codec::Opus, false);
    let start = world.now;
    world.push(1, 3);
    world.push(2, 3);
    assert_eq!(world.run(start + 50 * MS).len(), 3);
    world.playout.flush(|_| false);
    assert!(world.run(start + 500 * MS).is_empty());
    assert_eq!(world.playout.sent(UtteranceId(1)).sent, 3 * 480);
    assert_eq!(world.playout.sent(UtteranceId(2)).sent, 0);
    world.push(3, 1);
    assert_eq!(world.drain()[0].underrun, None);
}

#[test]
fn a_turn_that_may_not_be_interrupted_survives_a_flush() {
    let mut world = World::new(Codec::Opus, false);
    world.push(1, 1);
    world.push(2, 1);
    world.playout.flush(|owner| owner == UtteranceId(2));
    let out = world.drain();
    assert_eq!(out.len(), 1);
    assert!(matches!(&out[0].body, Body::Speech(frame) if frame.owner == Some(UtteranceId(2))));
}

#[test]
fn reports_acknowledge_across_the_wrap() {
    let mut world = World::new(Codec::Opus, false);
    let start = world.now;
    world.push(1, 10);
    world.run(start + 300 * MS);
    world.playout.acknowledge(65_531);
    assert_eq!(world.playout.sent(UtteranceId(1)), Sent { sent: 4_800, acked: 960 });
    // 65_530 + 7 wraps to 1, and the peer has begun a round of its own.
    world.playout.acknowledge(0x1_0001);
    assert_eq!(world.playout.sent(UtteranceId(1)).acked, 3_840);
    // Numbers that were never sent acknowledge nothing.
    world.playout.acknowledge(500);
    assert_eq!(world.playout.sent(UtteranceId(1)).acked, 3_840);
    world.playout.forget(UtteranceId(1));
    assert_eq!(world.playout.sent(UtteranceId(1)), Sent::default());
}

#[test]
fn digits_go_before_speech_and_share_its_numbers() {
    let mut world = World::new(Codec::Pcmu, false);
    let start = world.now;
    world.push(1, 2);
    world.drain();
    assert!(world.playout.dial(world.now, "5"));
    let out = world.run(start + 400 * MS);
    assert_eq!(out.len(), 9);
    assert!(out[..8].iter().all(|(_, d)| d.payload_type == 101 && d.timestamp == out[0].1.timestamp));
    assert!(out[0].1.marker && !out[1].1.marker);
    let (at, speech) = &out[8];
    assert_eq!((*at, speech.payload_type), (start + 180 * MS, 96));
    assert_eq!(speech.timestamp.wrapping_sub(out[0].1.timestamp), 8 * 160);
    let sequences = out.iter().map(|(_, d)| d.sequence.wrapping_sub(65_531)).collect::<Vec<_>>();
    assert_eq!(sequences, (0..9).collect::<Vec<_>>());
}

#[test]
fn hold_freezes_speech_and_loses_none_of_it() {
    let mut world = World::new(Codec::Opus, false);
    let start = world.now;
    world.push(1, 4);
    world.playout.expect_more(true);
    assert_eq!(world.run(start + 30 * MS).len(), 2);
    world.playout.pause(world.now, true);
    assert!(world.run(start + 500 * MS).is_empty());
    world.playout.pause(world.now, false);
    let out = world.run(start + 1_000 * MS);
    assert_eq!(out.len(), 2);
    assert_eq!(out[0].0, start + 500 * MS);
    assert_eq!(out[0].1.underrun, None);
    assert!(out[0].1.marker && out[0].1.anchored.is_some());
}

#[test]
fn a_muted_stream_is_silent_even_when_continuous() {
    let mut world = World::new(Codec::Pcmu, true);
    let start = world.now;
    world.run(start + 50 * MS);
    world.playout.mute(world.now, true);
    world.push(1, 1);
    assert!(world.run(start + 500 * MS).is_empty());
    world.playout.mute(world.now, false);
    assert!(matches!(world.drain()[..], [Departure { body: Body::Speech(_), marker: true, .. }]));
}

#[derive(Clone, Debug)]
enum Act {
    Push(u8),
    Wait(u16),
    Flush,
    Dial,
    Pause(bool),
    Expect(bool),
    Await(bool),
}

fn act() -> impl Strategy<Value = Act> {
    prop_oneof![
        4 => (1u8..6).prop_map(Act::Push),
        6 => (0u16..400).prop_map(Act::Wait),
        1 => Just(Act::Flush),
        1 => Just(Act::Dial),
        1 => any::<bool>().prop_map(Act::Pause),
        2 => any::<bool>().prop_map(Act::Expect),
        2 => any::<bool>().prop_map(Act::Await),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    /// Whatever happens: sequence numbers have no hole, audio timestamps follow the clock within a late
    /// wake and never run backwards or overlap, at most two packets leave in one wake, and a flushed
    /// stream of speech is silent.
    #[test]
    fn numbers_are_continuous_and_nothing_bursts(
        acts in proptest::collection::vec(act(), 1..60),
        continuous in any::<bool>(),
        steps in proptest::collection::vec(0u64..90, 1..40),
    ) {
        let mut world = World::new(Codec::Pcmu, continuous);
        let start = world.now;
        let mut steps = steps.into_iter().cycle();
        let mut out: Vec<(Instant, Departure)> = Vec::new();
        for act in acts {
            match act {
                Act::Push(frames) => world.push(1, usize::from(frames)),
                Act::Flush => world.playout.flush(|_| false),
                Act::Dial => { world.playout.dial(world.now, "1"); }
                Act::Pause(paused) => world.playout.pause(world.now, paused),
                Act::Expect(more) => world.playout.expect_more(more),
                Act::Await(coming) => world.playout.await_speech(world.now, coming),
                Act::Wait(ms) => {
                    // Wakes come late by up to 90 ms.
                    let until = world.now + u32::from(ms) * MS;
                    loop {
                        let departures = world.drain();
                        prop_assert!(departures.len() <= 2, "{} at once", departures.len());
                        let now = world.now;
                        out.extend(departures.into_iter().map(|d| (now, d)));
                        match world.playout.deadline().filter(|deadline| *deadline <= until) {
                            Some(deadline) => {
                                let late = steps.next().unwrap_or(0) as u32 * MS;
                                world.now = (world.now.max(deadline) + late).min(until.max(deadline));
                            }
                            None => break,
                        }
                    }
                    world.now = world.now.max(until);
                }
            }
        }
        let mut last_audio: Option<u32> = None;
        for (n, (at, departure)) in out.iter().enumerate() {
            prop_assert_eq!(departure.sequence, 65_530u16.wrapping_add(n as u16));
            if matches!(departure.body, Body::Event(_)) {
                continue;
            }
            let timestamp = departure.timestamp.wrapping_sub(u32::MAX - 1_000);
            let clock = (*at - start).as_millis() as u32 * 8;
            prop_assert!(timestamp <= clock && clock - timestamp < 40 * 8, "{} at {}", timestamp, clock);
            if let Some(last) = last_audio {
                prop_assert!(timestamp - last >= 160);
                prop_assert!(departure.marker || timestamp - last == 160);
            }
            last_audio = Some(timestamp);
        }
    }
}

/// Packets of `out` that are sent: milliseconds from its first slot, marker, sequence number, and timestamp in frames from
/// there.
fn sent(out: &[(Instant, Departure)]) -> Vec<(u128, bool, u16, u32)> {
    let (start, first) = (out[0].0, out[0].1.timestamp);
    let left = out.iter().filter(|(_, departure)| !departure.left_out);
    let line = |(at, d): &(Instant, Departure)| {
        ((*at - start).as_millis(), d.marker, d.sequence, d.timestamp.wrapping_sub(first) / 960)
    };
    left.map(line).collect()
}

#[test]
fn a_peer_that_wants_no_silence_is_sent_the_beginning_of_a_pause_and_a_frame_every_400_ms() {
    for continuous in [false, true] {
        let mut world = World::new(Codec::Opus, continuous);
        let format = MediaFormat { opus_dtx: true, ..format(Codec::Opus, continuous) };
        world.playout.set_format(&format);
        let start = world.now;
        world.push(1, 5);
        // A pause of 1.2 s in mid-speech.
        for _ in 0..60 {
            world.playout.push(world.now, Frame { quiet: true, ..frame(1) });
        }
        world.push(1, 5);
        let out = world.run(start + 1_399 * MS);
        assert_eq!(out.len(), 70, "every slot is told of");
        let left = sent(&out);
        let sequences: Vec<u16> = left.iter().map(|(.., sequence, _)| *sequence).collect();
        let expected: Vec<u16> = (0..sequences.len() as u16).map(|n| 65_530_u16.wrapping_add(n)).collect();
        assert_eq!(sequences, expected, "numbers count what is sent");
        let places: Vec<u32> = left.iter().map(|(.., place)| *place).collect();
        let expected: Vec<u32> = (0..15).chain([34, 54]).chain(65..70).collect();
        assert_eq!(places, expected, "timestamps count what passes");
        assert!(left.iter().all(|(at, .., place)| *at == u128::from(*place) * 20), "{left:?}");
        let marked: Vec<u32> = left.iter().filter(|(_, marker, ..)| *marker).map(|(.., place)| *place).collect();
        assert_eq!(marked, [0, 65], "the speech after the pause is marked");
        assert!(out.iter().skip(1).all(|(_, d)| d.underrun.is_none() && d.anchored.is_none()));
        // What was left out has arrived with the packet before it.
        assert_eq!(world.playout.sent(UtteranceId(1)).sent, 70 * 480);
        world.playout.acknowledge(u32::from(65_530_u16.wrapping_add(14)));
        assert_eq!(world.playout.sent(UtteranceId(1)).acked, 34 * 480);
        world.playout.acknowledge(u32::from(65_530_u16.wrapping_add(21)));
        assert_eq!(world.playout.sent(UtteranceId(1)).acked, 70 * 480);
    }
}

#[test]
fn silence_is_left_out_between_turns_too_but_not_where_something_fills_it_or_the_peer_wants_it() {
    let second = |dtx, filled| {
        let mut world = World::new(Codec::Opus, true);
        world.playout.set_format(&MediaFormat { opus_dtx: dtx, ..format(Codec::Opus, true) });
        world.playout.fill(world.now, filled);
        let out = world.run(world.now + 999 * MS);
        assert_eq!(out.len(), 50);
        sent(&out).len()
    };
    assert_eq!((second(true, false), second(true, true), second(false, false)), (12, 50, 50));
    // Usage of another codec changes nothing.
    let mut world = World::new(Codec::Pcmu, true);
    world.playout.set_format(&MediaFormat { opus_dtx: true, ..format(Codec::Pcmu, true) });
    let out = world.run(world.now + 999 * MS);
    assert!(out.iter().all(|(_, departure)| !departure.left_out));
}
