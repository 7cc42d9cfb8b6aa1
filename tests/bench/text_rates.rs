//! How soon a text sounds that comes token by token, in the default voice.

use antiphon::app::engines;
use antiphon::config::Config;
use antiphon::synth::device::Engine;

use super::written::{MODES, Voice, at_once, one_at_a_time};

#[test]
#[ignore = "takes ten minutes of a quiet machine"]
fn text_rates() {
    let config = Config::default();
    let choice = engines::choose(&config.engine).expect("a voice");
    let engine = Engine::start(choice.loaders, config.scheduler).expect("it starts");
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().expect("a runtime");
    runtime.block_on(async {
        engine.ready().await;
        one_at_a_time(&engine, &[Voice { name: None, modes: &MODES, rates: &[10.0, 30.0, 80.0] }]).await;
        at_once(&engine, None, &[20], 30.0).await;
    });
    engine.shutdown();
}
