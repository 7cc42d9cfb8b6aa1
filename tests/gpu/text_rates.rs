//! How soon a text sounds that comes token by token, on a GPU.
//!
//! Random weights of full size; speech of the length that such a text has in English. The voice's transcript covers its
//! recording but for five ids, which are what the model waits for; the other voice is one as people record it, whose
//! transcript has fewer ids.

use antiphon::sched;
use antiphon::synth::cosyvoice::backend::Options;
use antiphon::synth::cosyvoice::config::Config;
use antiphon::synth::cosyvoice::gpu::{GpuBackend, Precision};
use antiphon::synth::cosyvoice::{CosyVoice, Settings, random};
use antiphon::synth::device::{Engine, Loader};
use antiphon::turn::Streaming;

use super::written::{MODES, Voice, at_once, one_at_a_time};

/// Speech tokens of a text id in English.
const PACE: f64 = 6.5;

/// The engine, and a folder with voices whose transcripts are of several lengths.
fn engine(voices: &std::path::Path) -> Engine {
    let dir = super::checkpoint();
    let config = Config::load(&dir).expect("sizes");
    for words in 14..24 {
        let mut voice = random::voice(&config, "covered", 65, 3);
        voice.transcript = vec!["the"; words].join(" ");
        let path = voices.join(format!("covered-{words}.safetensors"));
        std::fs::write(path, voice.to_bytes()).expect("written");
    }
    let settings = Settings {
        voice_dirs: vec![voices.to_path_buf()],
        default_voice: Some("random-k10".into()),
        ..Settings::default()
    };
    let loader: Loader = Box::new(move || {
        let options = Options { hardware: super::hardware(), ..Options::default() };
        let mut voice: CosyVoice<GpuBackend> =
            CosyVoice::load_gpu(&dir, 0, options, Precision::default(), settings.clone())?;
        voice.force_pace(Some(PACE));
        Ok(Box::new(voice))
    });
    Engine::start(vec![loader], sched::Config::default()).expect("it starts")
}

/// `ANTIPHON_TEST_CALLS`: only the second table, with so many calls at once (100 and 200 else).
#[test]
#[ignore = "measures; run it on a quiet device"]
fn text_rates() {
    let Some(_device) = super::device() else { return };
    let voices = tempfile::tempdir().expect("a folder");
    let engine = engine(voices.path());
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(4).enable_all().build().expect("a runtime");
    runtime.block_on(async {
        engine.ready().await;
        let all = engine.voices();
        let covered = all.iter().find(|voice| voice.name.starts_with("covered") && voice.starts_after == Some(5));
        let covered = covered.expect("one begins after five ids").name.as_str();
        let voices = [
            Voice { name: Some(covered), modes: &MODES, rates: &[10.0, 30.0, 80.0] },
            // With the other voice only the mode in question.
            Voice { name: Some("random-k10"), modes: &[("token", Streaming::Token)], rates: &[30.0, 80.0] },
        ];
        let calls = super::variable("ANTIPHON_TEST_CALLS").map(|calls| calls.parse().expect("a number of calls"));
        if calls.is_none() {
            one_at_a_time(&engine, &voices).await;
        }
        let levels = calls.map_or_else(|| vec![100, 200], |calls| vec![calls]);
        at_once(&engine, Some(covered), &levels, 30.0).await;
    });
    engine.shutdown();
}
