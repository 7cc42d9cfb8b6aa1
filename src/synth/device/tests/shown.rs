//! What a device shows of itself in the metrics.

use super::*;
use crate::telemetry::shown::counted;

/// The tone with a single slot, and a memory that it tells of.
struct Narrow(Tone, Caps);

impl Synthesizer for Narrow {
    fn caps(&self) -> &Caps {
        &self.1
    }

    fn voices(&self) -> Vec<VoiceInfo> {
        self.0.voices()
    }

    fn open(&mut self, slot: Slot, utterance: &Utterance) -> Result<Stages, SynthError> {
        self.0.open(slot, utterance)
    }

    fn run(&mut self, step: &Step, out: &mut Vec<Progress>) -> Result<(), SynthError> {
        self.0.run(step, out)
    }

    fn close(&mut self, slot: Slot) {
        self.0.close(slot);
    }

    fn memory_parts(&self) -> Vec<(&'static str, u64)> {
        vec![("weights", 7)]
    }

    fn warm_up(&mut self) -> Result<Seeds, SynthError> {
        self.0.warm_up()
    }
}

#[tokio::test]
async fn what_waits_what_gave_way_and_what_holds_memory_is_shown() {
    let preempted = || counted("antiphon_preemptions_total");
    let before = preempted();
    let caps = Caps { name: "tone", device: "narrow".into(), limits: EngineLimits::of_one_stage(1, 1) };
    let loader: Loader = Box::new(move || Ok(Box::new(Narrow(Tone::new(), caps.clone()))));
    let engine = Engine::start(vec![loader], Config::default()).expect("starts");
    engine.ready().await;
    // Batch work has the only slot when a caller comes, and gets it back when the caller has been spoken to.
    let (sink, batch) = mpsc::channel(1);
    engine.submit(Utterance { class: Class::Batch, ..long() }, sink).expect("accepted");
    let open = async {
        while engine.status()[0].load.batch_open == 0 {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(30), open).await.expect("it is begun");
    let (sink, live) = mpsc::channel(1024);
    engine.submit(long(), sink).expect("accepted");
    let shown = async {
        let waits = || counted("antiphon_scheduler_queue_depth{class=\"batch\",device=\"narrow\"}") == 1.0;
        let holds = || counted("voice_gpu_memory_bytes{device=\"narrow\",part=\"weights\"}") == 7.0;
        while !(waits() && holds() && preempted() > before) {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(30), shown).await.expect("it is shown");
    drop((batch, live));
    engine.shutdown();
}
