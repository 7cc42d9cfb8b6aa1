use antiphon::call::CallConfig;
use antiphon::call::CallEvent;
use antiphon::media::dtmf::Receiver;
use antiphon::media::leg::{Codec, InPacket, LegEvent, MediaFormat};
use bytes::Bytes;

use super::world::{MS, World, format};

fn key(world: &mut World, sequence: u16, timestamp: u32, payload: [u8; 4]) {
    world.leg(LegEvent::Rtp(InPacket {
        payload_type: 101,
        marker: false,
        sequence,
        timestamp,
        ssrc: 9,
        arrived: world.now,
        payload: Bytes::copy_from_slice(&payload),
    }));
}

#[test]
fn a_pressed_key_is_one_digit_whatever_its_packets_do() {
    let mut world = World::new();
    for n in 0..5 {
        key(&mut world, n, 1_000, [7, 10, 0, 160]);
    }
    for n in 5..8 {
        key(&mut world, n, 1_000, [7, 0x8a, 3, 0x20]);
    }
    key(&mut world, 8, 9_000, [11, 10, 0, 160]);
    world.leg(LegEvent::Digit('*'));
    let digits = world.take_events().into_iter().filter_map(|event| match event {
        CallEvent::Digit(digit) => Some(digit),
        _ => None,
    });
    assert_eq!(digits.collect::<String>(), "7#*");
}

#[test]
fn digits_are_sent_between_the_words_of_a_turn() {
    let mut world = World::new();
    world.say("Forty characters of speech are around it");
    world.run(500 * MS);
    world.handle.dtmf("42w1").unwrap();
    world.run(5_000 * MS);
    let mut receiver = Receiver::default();
    let heard = world
        .packets
        .iter()
        .filter(|(_, packet)| packet.payload_type == 101)
        .filter_map(|(_, packet)| receiver.push(packet.timestamp, &packet.payload))
        .collect::<String>();
    assert_eq!(heard, "421");
    // Nothing of the speech is lost, and the numbers have no hole.
    assert_eq!(world.packets.iter().filter(|(_, packet)| packet.payload_type == 0).count(), 101);
    let sequences = world.packets.iter().map(|(_, packet)| packet.sequence).collect::<Vec<_>>();
    assert!(sequences.windows(2).all(|pair| pair[1] == pair[0].wrapping_add(1)));
    assert!(world.handle.dtmf("12x").is_err());
    assert!(world.handle.dtmf("").is_err());
}

#[test]
fn where_events_were_not_agreed_the_tones_are_audible() {
    let format = MediaFormat { telephone_event: None, ..format(Codec::Pcmu, false) };
    let mut world = World::with(CallConfig::default(), format);
    world.handle.dtmf("5").unwrap();
    world.run(1_000 * MS);
    assert_eq!(world.audible().len(), 5 + 1);
    assert!(world.packets.iter().all(|(_, packet)| packet.payload_type == 0));
}
