use super::*;
use crate::clock;

const TYPES: PayloadTypes = PayloadTypes { audio: 0, event: Some(101) };

fn recorder(now: Instant) -> Recorder {
    Recorder::new(now, Codec::Pcmu, TYPES, 16_000).unwrap()
}

fn ms(n: u64) -> Duration {
    Duration::from_millis(n)
}

/// Sequence numbers in the order they arrive, 20 ms apart.
fn hear(sequences: &[u16]) -> Heard {
    let start = clock::now();
    let mut recorder = recorder(start);
    for (n, sequence) in sequences.iter().enumerate() {
        let timestamp = u32::from(sequence.wrapping_sub(sequences[0])).wrapping_mul(160).wrapping_add(u32::MAX - 400);
        recorder.push(start + ms(20 * n as u64), packet(0, *sequence, timestamp, vec![*sequence as u8; 160]));
    }
    recorder.take(start + ms(1_000))
}

#[test]
fn sequence_and_timestamp_unwrap() {
    let heard = hear(&[65_534, 65_535, 0, 1]);
    let steps: Vec<_> =
        heard.packets.windows(2).map(|w| (w[1].sequence - w[0].sequence, w[1].timestamp - w[0].timestamp)).collect();
    assert_eq!(steps, [(1, 160); 3]);
    assert_eq!(heard.counts.lost, 0);
}

#[test]
fn reordered_packets_are_put_in_order_and_counted() {
    let heard = hear(&[1, 3, 2, 4]);
    assert_eq!(heard.packets.iter().map(|p| p.sequence).collect::<Vec<_>>(), [1, 2, 3, 4]);
    assert_eq!((heard.counts.reordered, heard.counts.lost), (1, 0));
}

#[test]
fn a_lost_packet_is_missing_and_counted_once_others_have_passed() {
    let heard = hear(&[1, 2, 4, 5, 6, 7, 8]);
    assert_eq!(heard.packets.iter().map(|p| p.sequence).collect::<Vec<_>>(), [1, 2, 4, 5, 6, 7, 8]);
    assert_eq!(heard.counts.lost, 1);
    assert_eq!(heard.clip(ms(100)).pcm.len(), 8 * 160, "the hole is silence");
}

#[test]
fn duplicates_are_heard_once() {
    let heard = hear(&[1, 2, 2, 3]);
    assert_eq!(heard.packets.len(), 3);
    assert_eq!((heard.counts.duplicates, heard.counts.lost), (1, 0));
}

#[test]
fn another_sender_begins_a_new_stream() {
    let start = clock::now();
    let mut recorder = recorder(start);
    recorder.push(start, packet(0, 10, 0, vec![0; 160]));
    recorder.push(start + ms(20), rtp::Packet { ssrc: 2, ..packet(0, 50_000, 99, vec![0; 160]) });
    let heard = recorder.take(start + ms(40));
    assert_ne!(heard.packets[0].stream, heard.packets[1].stream);
    assert_eq!(heard.counts.lost, 0);
}

#[test]
fn jitter_follows_the_rfc() {
    let start = clock::now();
    let mut recorder = recorder(start);
    // Every second packet comes 10 ms late: |D| is 10 ms each time, so the estimate tends to 10 ms.
    for n in 0..200u16 {
        let late = if n % 2 == 1 { 10 } else { 0 };
        recorder.push(start + ms(20 * u64::from(n) + late), packet(0, n, u32::from(n) * 160, vec![0; 160]));
    }
    let jitter = recorder.heard(start).counts.jitter;
    assert!((jitter - 0.01).abs() < 0.000_1, "{jitter}");
}

#[test]
fn digits_are_heard_among_speech() {
    let start = clock::now();
    let mut recorder = recorder(start);
    recorder.push(start, packet(0, 1, 0, vec![0; 160]));
    for (n, end) in [false, true, true].into_iter().enumerate() {
        let payload = dtmf::Event { digit: '5', end, duration: 160 }.to_bytes().unwrap();
        recorder.push(start + ms(20), packet(101, 2 + n as u16, 160, payload.to_vec()));
    }
    recorder.push(start + ms(40), packet(0, 5, 320, vec![0; 160]));
    let heard = recorder.take(start + ms(60));
    assert_eq!(heard.digits.iter().map(|d| d.digit).collect::<String>(), "5");
    assert_eq!((heard.packets.len(), heard.counts.lost), (2, 0));
}

#[test]
fn the_report_block_tells_loss_since_the_last_one() {
    let start = clock::now();
    let mut recorder = recorder(start);
    for n in [0u16, 1, 2, 4, 5, 6, 7] {
        recorder.push(start, packet(0, n, u32::from(n) * 160, vec![0; 160]));
    }
    let block = recorder.block().unwrap();
    assert_eq!((block.lost, block.fraction_lost, block.highest), (1, 32, 7));
    assert_eq!(recorder.block().unwrap().fraction_lost, 0, "nothing since");
}
