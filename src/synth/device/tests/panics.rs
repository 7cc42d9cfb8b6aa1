//! Panics of a voice, and beside it.

use super::*;

#[tokio::test]
async fn a_panicking_voice_fails_its_device_only() {
    let loaders: Vec<Loader> = vec![Box::new(|| panic!("broken")), Box::new(|| Ok(Box::new(Tone::new())))];
    let engine = Engine::start(loaders, Config::default()).expect("starts");
    engine.ready().await;
    let (sink, events) = mpsc::channel(64);
    engine.submit(utterance("still here"), sink).expect("accepted by the other");
    assert_eq!(heard(events).await.1, Some(UtteranceEnd::Done));
    engine.shutdown();
}

#[tokio::test]
async fn a_panic_beside_the_voice_ends_the_device_and_not_its_thread() {
    let script = Arc::new(Script::default());
    let engine = engine_of(&[&script], SOON);
    engine.ready().await;
    script.beside.store(true, Ordering::Relaxed);
    script.next(Fault::Device);
    let (sink, events) = mpsc::channel(64);
    engine.submit(utterance("one two"), sink).expect("accepted");
    failed(heard(events).await.1);
    while engine.status()[0].failures < 2 {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    phase(&engine, 0, |phase| *phase == Phase::Ready).await;
    assert_eq!(script.loads.load(Ordering::Relaxed), 3);
    let (sink, events) = mpsc::channel(64);
    engine.submit(utterance("one three"), sink).expect("accepted");
    assert_eq!(heard(events).await, ((255 + 345) * 24, Some(UtteranceEnd::Done)));
    engine.shutdown();
}
