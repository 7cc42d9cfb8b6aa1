//! A device that is told of an utterance before it is there.

use super::*;

#[tokio::test]
async fn a_device_that_is_roused_rehearses_speaks_what_comes_and_sleeps_where_nothing_does() {
    let script = Arc::<Script>::default();
    let engine = engine_of(&[&script], NEVER);
    engine.ready().await;
    let device = device_of(&engine, 0);
    let until = async |reached: &dyn Fn() -> bool| {
        while !reached() {
            tokio::task::yield_now().await;
        }
    };
    for comes in [false, true, false] {
        until(&|| device.local().shared.state().asleep).await;
        let before = script.rehearsals.load(Ordering::Relaxed);
        engine.rouse();
        // Once is enough.
        engine.rouse();
        if comes {
            // It may be there before the thread has woken up, which rehearses no more then.
            let (sink, events) = mpsc::channel(64);
            engine.submit(utterance("one"), sink).expect("accepted");
            assert_eq!(heard(events).await.1, Some(UtteranceEnd::Done));
        } else {
            until(&|| script.rehearsals.load(Ordering::Relaxed) > before).await;
        }
    }
    until(&|| device.local().shared.state().asleep).await;
    engine.shutdown();
}
