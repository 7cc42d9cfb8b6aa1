//! Where turns go on several devices, and what holds for all of them together.

use super::*;

#[tokio::test]
async fn streams_go_to_the_device_with_the_most_room_and_stay_there() {
    let scripts: Vec<Arc<Script>> = (0..3).map(|_| Arc::default()).collect();
    // Else room would follow how fast each thread happened to be.
    scripts.iter().for_each(|script| script.mute.store(true, Ordering::Relaxed));
    let engine = engine_of(&scripts.iter().collect::<Vec<_>>(), NEVER);
    engine.ready().await;
    let epoch = Epoch::default();
    let mut sinks = Vec::new();
    let mut streams = Vec::new();
    for n in 1..=9 {
        let (sink, events) = mpsc::channel(1024);
        let utterance = Utterance { token: epoch.token(), ..long() };
        streams.push(utterance.stream);
        engine.submit(utterance, sink).expect("accepted");
        sinks.push(events);
        let live: Vec<u32> = engine.status().iter().map(|d| d.load.live).collect();
        assert_eq!(live.iter().sum::<u32>(), n);
        assert!(live.iter().max() <= live.iter().min().map(|least| least + 1).as_ref(), "{live:?}");
    }
    // What a stream says next goes where it speaks, however much room there is elsewhere.
    let (sink, events) = mpsc::channel(1024);
    let placement = lock(&engine.inner.placements)[&streams[0]].device - LOCAL;
    engine.submit(Utterance { stream: streams[0], token: epoch.token(), ..long() }, sink).expect("accepted");
    sinks.push(events);
    assert_eq!(engine.status()[placement].load.live, 4);
    epoch.raise();
    streams.into_iter().for_each(|stream| engine.note(stream, StreamNote::Closed));
    for events in sinks {
        assert_eq!(heard(events).await.1, Some(UtteranceEnd::Cancelled));
    }
    engine.shutdown();
}

/// Seen with a token that may speak on 10 calls: on four devices it spoke on 40.
#[tokio::test]
async fn limits_of_a_tenant_are_the_same_on_any_number_of_devices() {
    let scripts: Vec<Arc<Script>> = (0..2).map(|_| Arc::default()).collect();
    scripts.iter().for_each(|script| script.mute.store(true, Ordering::Relaxed));
    let limit = crate::sched::Tenant { max_live: 3, ..Default::default() };
    let config = Config { tenant_default: limit, ..Config::default() };
    let loaders = scripts.iter().map(flaky).collect();
    let engine = Engine::start_with(loaders, config, NEVER).expect("starts");
    engine.ready().await;
    let mut sinks = Vec::new();
    for n in 1..=4 {
        let (sink, events) = mpsc::channel(64);
        let reason = engine.submit(long(), sink).err().map(|refused| refused.reason);
        assert_eq!(reason, (n > 3).then_some(RefusedReason::TenantFull), "stream {n}");
        sinks.push(events);
    }
    assert!(engine.status().iter().all(|device| device.load.live > 0), "they are on both");
    engine.shutdown();
}

/// Seen with two devices of which one was full: a call that had spoken on it before was refused.
#[tokio::test]
async fn a_new_turn_leaves_the_device_of_the_last_one_when_that_is_full() {
    let scripts: Vec<Arc<Script>> = (0..2).map(|_| Arc::default()).collect();
    let config = Config { max_live: 1, ..Config::default() };
    let loaders = scripts.iter().map(flaky).collect();
    let engine = Engine::start_with(loaders, config, NEVER).expect("starts");
    engine.ready().await;
    let first = utterance("one");
    let (stream, (sink, events)) = (first.stream, mpsc::channel(64));
    engine.submit(first, sink).expect("accepted");
    assert_eq!(heard(events).await.1, Some(UtteranceEnd::Done));
    let last = lock(&engine.inner.placements)[&stream].device - LOCAL;
    // Another stream fills that device, and never ends.
    scripts.iter().for_each(|script| script.mute.store(true, Ordering::Relaxed));
    let (sink, _unheard) = mpsc::channel(64);
    device_of(&engine, last).submit(&long(), None, &sink, None).expect("there is room for one");
    assert_eq!(engine.status()[last].load.live, 1);
    let (sink, _unheard) = mpsc::channel(64);
    engine.submit(Utterance { stream, ..long() }, sink).expect("the other device takes it");
    assert_eq!(lock(&engine.inner.placements)[&stream].device - LOCAL, 1 - last);
    engine.shutdown();
}

#[tokio::test]
async fn a_stream_without_a_clock_stays_one_on_another_device() {
    let scripts = [Arc::new(Script::default()), Arc::new(Script::default())];
    let engine = engine_of(&[&scripts[0], &scripts[1]], NEVER);
    engine.ready().await;
    let stream = StreamId::next();
    engine.note(stream, StreamNote::Unpaced);
    scripts[0].next(Fault::Device);
    let (sink, events) = mpsc::channel(64);
    engine.submit(Utterance { stream, ..utterance("one") }, sink).expect("accepted");
    failed(heard(events).await.1);
    // More than the sink takes: a listener with a clock would be cut off.
    let (sink, events) = mpsc::channel(1);
    engine.submit(Utterance { stream, ..utterance(&"word ".repeat(50)) }, sink).expect("accepted");
    assert_eq!(heard(events).await, (50 * (60 + 4 * 45 + 60) * 24, Some(UtteranceEnd::Done)));
    engine.shutdown();
}
