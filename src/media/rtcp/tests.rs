//! Two ends of a stream in virtual time.

use proptest::prelude::*;

use super::*;

fn wall(seconds: u64) -> Duration {
    Duration::from_secs(1_700_000_000 + seconds)
}

fn start() -> Instant {
    crate::clock::now()
}

fn packet(at: Instant, sequence: u16, timestamp: u32) -> InPacket {
    InPacket { payload_type: 0, marker: false, sequence, timestamp, ssrc: 7, arrived: at, payload: Bytes::new() }
}

fn sent(sequence: u16) -> OutPacket {
    OutPacket {
        payload_type: 0,
        marker: false,
        sequence,
        timestamp: u32::from(sequence) * 160,
        payload: Bytes::from_static(&[0; 160]),
    }
}

fn block(rtcp: &mut Rtcp, now: Instant) -> ReceptionReport {
    rtcp.reception.as_mut().expect("something arrived").report(now)
}

const FRAME: Duration = Duration::from_millis(20);

#[test]
fn steady_arrival_has_no_loss_and_no_jitter() {
    let t0 = start();
    let mut rtcp = Rtcp::new(t0, 1, "c".into(), 8_000);
    for n in 0..100_u16 {
        rtcp.on_received(&packet(t0 + FRAME * u32::from(n), 65_500_u16.wrapping_add(n), u32::from(n) * 160), true);
    }
    let block = block(&mut rtcp, t0);
    assert_eq!((block.fraction_lost, block.total_lost, block.jitter), (0, 0, 0));
    assert_eq!(block.last_sequence_number, 65_500 + 99, "extended over the wrap");
}

#[test]
fn loss_is_counted_for_the_interval_and_in_all() {
    let t0 = start();
    let mut rtcp = Rtcp::new(t0, 1, "c".into(), 8_000);
    for n in (0..100_u16).filter(|n| n % 4 != 1) {
        rtcp.on_received(&packet(t0 + FRAME * u32::from(n), n, u32::from(n) * 160), true);
    }
    let first = block(&mut rtcp, t0);
    assert_eq!((first.fraction_lost, first.total_lost), (64, 25));
    for n in 100..200_u16 {
        rtcp.on_received(&packet(t0 + FRAME * u32::from(n), n, u32::from(n) * 160), true);
    }
    let second = block(&mut rtcp, t0);
    assert_eq!((second.fraction_lost, second.total_lost), (0, 25));
}

#[test]
fn jitter_approaches_the_mean_deviation() {
    let t0 = start();
    let mut rtcp = Rtcp::new(t0, 1, "c".into(), 8_000);
    for n in 0..500_u16 {
        // Every other packet is 5 ms late: successive transit times differ by 40 units.
        let late = Duration::from_millis(if n % 2 == 1 { 5 } else { 0 });
        rtcp.on_received(&packet(t0 + FRAME * u32::from(n) + late, n, u32::from(n) * 160), true);
    }
    assert!((38..=41).contains(&block(&mut rtcp, t0).jitter), "{:?}", rtcp.jitter());
}

#[test]
fn a_restarted_source_is_not_a_huge_loss() {
    let t0 = start();
    let mut rtcp = Rtcp::new(t0, 1, "c".into(), 8_000);
    for n in [10_u16, 11, 12, 40_000, 40_001, 40_002] {
        rtcp.on_received(&packet(t0, n, 0), true);
    }
    assert_eq!(block(&mut rtcp, t0).total_lost, 0);
}

#[test]
fn round_trip_is_seen_by_both_ends() {
    let t0 = start();
    let mut a = Rtcp::new(t0, 1, "a".into(), 8_000);
    let mut b = Rtcp::new(t0, 7, "b".into(), 8_000);
    a.on_sent(t0, &sent(5));
    b.on_received(&InPacket { ssrc: 1, ..packet(t0, 5, 800) }, true);

    let report = a.report(t0, wall(0), 0.5);
    assert_eq!(a.deadline(), t0 + INTERVAL);
    // 30 ms there, 2 s in B, 30 ms back.
    let there = t0 + Duration::from_millis(30);
    assert_eq!(b.on_rtcp(there, wall(0), &report).expect("well formed"), vec![]);
    let answer = b.report(there + Duration::from_secs(2), wall(2), 0.5);
    let heard = a.on_rtcp(t0, wall(0) + Duration::from_millis(2_060), &answer).expect("well formed");
    let [Heard::Report(report)] = heard.as_slice() else { panic!("one report: {heard:?}") };
    assert_eq!((report.highest_sequence, report.lost), (5, 0));
    let trip = report.round_trip.expect("known").as_secs_f64();
    assert!((0.059..0.062).contains(&trip), "{trip}");
}

#[test]
fn sender_report_says_where_the_stream_would_be_now() {
    let t0 = start();
    let mut rtcp = Rtcp::new(t0, 1, "a".into(), 8_000);
    rtcp.on_sent(t0, &sent(10));
    let datagram = rtcp.report(t0 + Duration::from_secs(1), wall(0), 0.0);
    let packets = packet::unmarshal(&mut datagram.freeze()).expect("well formed");
    let report = packets[0].as_any().downcast_ref::<SenderReport>().expect("a sender report");
    assert_eq!((report.rtp_time, report.packet_count, report.octet_count), (1_600 + 8_000, 1, 160));
    // Nothing was sent since: a receiver report.
    let datagram = rtcp.report(t0 + Duration::from_secs(6), wall(5), 0.0);
    let packets = packet::unmarshal(&mut datagram.freeze()).expect("well formed");
    assert!(packets[0].as_any().is::<ReceiverReport>());
}

#[test]
fn goodbye_is_heard() {
    let t0 = start();
    let mut a = Rtcp::new(t0, 1, "a".into(), 8_000);
    let mut b = Rtcp::new(t0, 2, "b".into(), 8_000);
    assert_eq!(b.on_rtcp(t0, wall(0), &a.goodbye(t0, wall(0))), Ok(vec![Heard::Bye]));
    assert_eq!(b.on_rtcp(t0, wall(0), b"\x80\xc8\xff"), Err(Malformed));
}

proptest! {
    #[test]
    fn no_datagram_panics(bytes in proptest::collection::vec(any::<u8>(), 0..200), kind in 190_u8..210) {
        let t0 = start();
        let mut rtcp = Rtcp::new(t0, 1, "a".into(), 8_000);
        let _ = rtcp.on_rtcp(t0, wall(0), &bytes);
        // The same with a header that leads further in.
        let mut bytes = bytes;
        if bytes.len() >= 8 {
            bytes[0] = bytes[0] & 0x3f | 0x80;
            bytes[1] = kind;
            bytes[2] = 0;
            bytes[3] = u8::try_from(bytes.len() / 4 - 1).unwrap_or(0);
        }
        let _ = rtcp.on_rtcp(t0, wall(0), &bytes);
    }

    #[test]
    fn no_sequence_panics(packets in proptest::collection::vec((any::<u16>(), any::<u32>(), 0..3_000_u64), 1..60)) {
        let t0 = start();
        let mut rtcp = Rtcp::new(t0, 1, "a".into(), 48_000);
        for (sequence, timestamp, ms) in packets {
            rtcp.on_received(&packet(t0 + Duration::from_millis(ms), sequence, timestamp), true);
        }
        let block = block(&mut rtcp, t0);
        prop_assert!(block.total_lost <= 0x7f_ffff);
    }
}
