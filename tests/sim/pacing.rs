use antiphon::call::machine::Action;
use antiphon::call::{CallConfig, CallEvent, EndReason, StreamState};
use antiphon::media::leg::{Codec, LegEnd, LegEvent};

use super::world::{MS, World, format};

#[test]
fn speech_on_a_continuous_leg_waits_for_the_end_of_the_silence_before_it() {
    let mut world = World::with(CallConfig::default(), format(Codec::Pcmu, true));
    world.run(1_003 * MS);
    assert_eq!(world.packets.len(), 51);
    world.say("Hello there, caller.");
    world.run(2_000 * MS);
    let times = world.packets.iter().map(|(at, _)| (*at - world.start).as_millis()).collect::<Vec<_>>();
    assert!(times.windows(2).all(|pair| pair[1] - pair[0] == 20));
    let first = world.when(|e| matches!(e, CallEvent::FirstAudio { .. })).unwrap();
    // Ready at 1,013 ms, when the silence before it still lasts until 1,020 ms.
    assert_eq!(first, 1_020 * MS);
}

#[test]
fn a_continuous_leg_sends_no_silence_in_front_of_speech_that_is_on_its_way() {
    let mut world = World::with(CallConfig::default(), format(Codec::Pcmu, true));
    world.run(1_015 * MS);
    world.say("Hello there, caller.");
    world.run(2_000 * MS);
    // Ready at 1,025 ms; the slot at 1,020 ms had passed without a packet.
    assert_eq!(world.when(|e| matches!(e, CallEvent::FirstAudio { .. })), Some(1_025 * MS));
    let times = world.packets.iter().map(|(at, _)| (*at - world.start).as_millis()).collect::<Vec<_>>();
    assert_eq!(times[49..53], [980, 1_000, 1_025, 1_045]);
    assert!(times[51..].windows(2).all(|pair| pair[1] - pair[0] == 20));
    let (before, first) = (&world.packets[50].1, &world.packets[51].1);
    assert_eq!(first.sequence, before.sequence.wrapping_add(1));
    // 25 ms are 200 ticks at 8 kHz.
    assert_eq!((first.marker, first.timestamp), (true, before.timestamp.wrapping_add(200)));
}

#[test]
fn hold_freezes_speech_tells_the_engine_and_goes_on_where_it_stopped() {
    let mut world = World::new();
    world.say("Exactly forty characters are said here..");
    world.run(500 * MS);
    world.handle.hold().unwrap();
    world.run(2_000 * MS);
    assert_eq!(world.asked, [Action::Hold(true)]);
    let frozen = world.packets.len();
    assert_eq!(frozen, 25);
    assert!(world.handle.info().held);
    world.handle.resume().unwrap();
    world.run(3_000 * MS);
    assert_eq!(world.packets.len(), 101);
    assert_eq!(world.handle.info().underruns, 0);
    let notes = world.engine.notes();
    assert!(
        matches!(
            notes[..],
            [StreamState::Anchored { .. }, StreamState::Held, StreamState::Resumed, StreamState::Anchored { .. }]
        ),
        "{notes:?}"
    );
}

#[test]
fn a_peer_that_holds_us_gets_nothing_and_then_the_rest() {
    let mut world = World::with(CallConfig::default(), format(Codec::Pcmu, true));
    world.say("Exactly forty characters are said here..");
    world.run(500 * MS);
    world.leg(LegEvent::Held(true));
    let before = world.packets.len();
    world.run(2_000 * MS);
    assert_eq!(world.packets.len(), before);
    world.leg(LegEvent::Held(false));
    world.run(3_000 * MS);
    // 100 frames and what the resampler still held of the last one.
    assert_eq!(world.audible().len(), 101);
    assert!(world.events.iter().any(|(_, e)| *e == CallEvent::Held { held: true, by_peer: true }));
}

#[test]
fn a_codec_change_in_mid_call_keeps_the_call_speaking() {
    let mut world = World::new();
    world.say("Exactly forty characters are said here..");
    world.run(500 * MS);
    world.leg(LegEvent::Format(format(Codec::Opus, false)));
    world.run(3_000 * MS);
    assert_eq!(world.handle.info().codec, "opus");
    let sequences = world.packets.iter().map(|(_, packet)| packet.sequence).collect::<Vec<_>>();
    assert!(sequences.windows(2).all(|pair| pair[1] == pair[0].wrapping_add(1)));
    assert_eq!(world.packets.len(), 101);
    assert!(
        world.events.iter().any(|(_, e)| matches!(e, CallEvent::TurnEnded { heard, .. } if heard.sent_ms == 2_000))
    );
    // The same format again changes nothing.
    let before = world.packets.len();
    world.leg(LegEvent::Format(format(Codec::Opus, false)));
    world.run(100 * MS);
    assert_eq!(world.packets.len(), before);
}

fn asked_to_transfer() -> World {
    let mut world = World::new();
    world.handle.transfer("sip:other@example.com", false).expect("the call lives");
    world.settle();
    assert!(matches!(world.asked[..], [Action::Transfer { attended: false, .. }]));
    world
}

#[test]
fn a_transfer_ends_the_call_when_the_peer_has_got_there() {
    let mut world = asked_to_transfer();
    // The other way round the call goes on with somebody else.
    world.leg(LegEvent::Moved("sip:other@example.com".into()));
    assert_eq!(world.take_events().last(), Some(&CallEvent::HandedOver("sip:other@example.com".into())));
    world.leg(LegEvent::TransferAnswered(Err("603 Decline".into())));
    assert_eq!(world.take_events().last(), Some(&CallEvent::Transferred(Err("603 Decline".into()))));
    world.handle.transfer("sip:other@example.com", false).unwrap();
    world.settle();
    world.leg(LegEvent::TransferAnswered(Ok(())));
    assert_eq!(world.take_events().last(), Some(&CallEvent::TransferAccepted));
    // One at a time.
    world.handle.transfer("sip:third@example.com", false).unwrap();
    world.settle();
    assert!(matches!(world.take_events().last(), Some(CallEvent::Transferred(Err(_)))));
    assert_eq!(world.asked.len(), 2);
    world.leg(LegEvent::TransferEnded(Ok(())));
    assert_eq!(world.ended(), Some(EndReason::Transferred));
}

#[test]
fn a_transfer_that_fails_late_or_is_forgotten_leaves_the_call_speaking() {
    let mut world = asked_to_transfer();
    world.leg(LegEvent::TransferAnswered(Ok(())));
    world.say("Exactly forty characters are said here..");
    world.run(500 * MS);
    world.leg(LegEvent::TransferEnded(Err("the target answered 486 Busy Here".into())));
    world.run(3_000 * MS);
    assert!(world.events.iter().any(|(_, e)| matches!(e, CallEvent::TransferFailed(why) if why.contains("486"))));
    assert_eq!(world.audible().len(), 101);
    assert_eq!(world.handle.info().underruns, 0);
    world.handle.transfer("sip:other@example.com", false).unwrap();
    world.settle();
    world.leg(LegEvent::TransferAnswered(Ok(())));
    world.take_events();
    world.run(200_000 * MS);
    assert!(world.take_events().iter().any(|e| matches!(e, CallEvent::TransferFailed(_))));
    assert_eq!(world.ended(), None);
}

#[test]
fn a_peer_that_hangs_up_in_a_transfer_has_gone_over() {
    let mut world = asked_to_transfer();
    world.leg(LegEvent::TransferAnswered(Ok(())));
    world.leg(LegEvent::Closed(LegEnd::Remote));
    assert_eq!(world.ended(), Some(EndReason::Transferred));
}

#[test]
fn a_hold_that_the_peer_refuses_is_told() {
    let mut world = World::new();
    world.leg(LegEvent::HoldAnswered { hold: true, outcome: Ok(()) });
    assert!(!world.take_events().iter().any(|e| matches!(e, CallEvent::Error(_))));
    world.leg(LegEvent::HoldAnswered { hold: false, outcome: Err("the peer refused: 488".into()) });
    let told = world.take_events();
    assert!(matches!(&told[0], CallEvent::Error(why) if why.contains("off hold: the peer refused")));
    assert_eq!(told[1..], [CallEvent::Held { held: true, by_peer: false }], "it is as before");
}
