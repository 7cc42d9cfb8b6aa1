//! What the gateway, the generator and their host have used up so far; two of them tell what a load cost.

use std::collections::BTreeMap;

use crate::run::report::{GatewayMetrics, Level};
use crate::turns::exchange::Plan;
use crate::under_test::gateway::Metrics;
use crate::under_test::process::{self, Sample, Thread};

/// What the gateway calls the threads of its devices: `device-0` and so on.
const DEVICE: &str = "device-";

/// All counters at one instant.
pub struct Snapshot {
    gateway: Option<Sample>,
    own: Option<Sample>,
    threads: BTreeMap<u32, Thread>,
    host: Option<f64>,
    metrics: Metrics,
    sustainable: Option<f64>,
    memory_streams: Option<f64>,
    held: Option<f64>,
    max_calls: Option<f64>,
}

impl Snapshot {
    /// Reads them; `pid` is the gateway's process, if it is known.
    pub async fn take(plan: &Plan, pid: Option<u32>) -> Snapshot {
        let gateway = pid.and_then(Sample::of);
        let (own, host) = (Sample::own(), process::host_busy());
        let threads = pid.map(process::threads).unwrap_or_default();
        let (mut metrics, mut sustainable, mut held) = (Metrics::default(), None, None);
        let (mut memory_streams, mut max_calls) = (None, None);
        if let Some(gateway) = &plan.gateway {
            // A gateway without these, or one that is dead by now, tells nothing.
            metrics = gateway.metrics().await.unwrap_or_default();
            let ready = gateway.ready().await.unwrap_or_default();
            let told = |key: &str| {
                let devices = ready["devices"].as_array().into_iter().flatten();
                devices.filter_map(|d| d[key].as_f64()).reduce(|a, b| a + b)
            };
            // A gateway of the last release has only the second names.
            sustainable = told("sustainableStreams").or_else(|| told("carries"));
            memory_streams = told("memoryStreams");
            held = told("holdingSeconds").or_else(|| told("heldSeconds"));
            max_calls = ready["maxCalls"].as_f64();
        }
        Snapshot { gateway, own, threads, host, metrics, sustainable, memory_streams, held, max_calls }
    }

    /// Writes into `level` what was used since `earlier`; of the level its throughput must be known.
    pub fn since(&self, earlier: &Snapshot, level: &mut Level) {
        level.gateway = self.gateway.zip(earlier.gateway).map(|(end, start)| end.since(&start));
        level.generator = self.own.zip(earlier.own).map(|(end, start)| end.since(&start));
        if let (Some(own), Some(start)) = (self.own, earlier.own) {
            let seconds = own.at.saturating_duration_since(start.at).as_secs_f64();
            if seconds > 0.0 {
                // A thread that has ended is none that runs all the time.
                let busiest = |devices: bool| {
                    let threads = self.threads.iter().filter(|(_, t)| t.name.starts_with(DEVICE) == devices);
                    let used = threads.filter_map(|(id, t)| Some((t.cpu - earlier.threads.get(id)?.cpu) / seconds));
                    used.reduce(f64::max)
                };
                (level.busiest_thread, level.device_thread) = (busiest(false), busiest(true));
                let ours = level.gateway.map_or(0.0, |u| u.cores) + level.generator.map_or(0.0, |u| u.cores);
                // Without the gateway's process its cost would be taken for that of others.
                level.others = self
                    .host
                    .zip(earlier.host)
                    .filter(|_| level.gateway.is_some())
                    .map(|(end, start)| ((end - start) / seconds - ours).max(0.0));
            }
        }
        level.metrics = self.metrics(earlier, level.audio_s_per_s * level.seconds);
    }

    fn metrics(&self, earlier: &Snapshot, speech: f64) -> GatewayMetrics {
        let since = |name: &str| (self.metrics.total(name) - earlier.metrics.total(name)).max(0.0);
        let was = earlier.metrics.by("antiphon_step_seconds_sum", "stage");
        let stage_seconds: BTreeMap<String, f64> = self
            .metrics
            .by("antiphon_step_seconds_sum", "stage")
            .into_iter()
            .map(|(name, value)| {
                let was = was.get(&name).copied().unwrap_or(0.0);
                (name, (value - was).max(0.0))
            })
            .collect();
        let busy: f64 = stage_seconds.values().sum();
        let held = self.held.zip(earlier.held).map(|(end, start)| (end - start).max(0.0));
        // Batch work is refused as a matter of course while calls are live.
        let refused = |metrics: &Metrics| metrics.by_where("antiphon_refusals_total", "reason", "class=\"live\"");
        let was = refused(&earlier.metrics);
        let more = |(reason, count): (String, f64)| {
            let count = count - was.get(&reason).copied().unwrap_or(0.0);
            (count > 0.0).then_some((reason, count))
        };
        GatewayMetrics {
            refusals: refused(&self.metrics).into_iter().filter_map(more).collect(),
            underruns: since("antiphon_underruns_total"),
            background_seconds: since("antiphon_background_cpu_seconds_sum"),
            engine_rtf: (busy > 0.0 && speech > 0.0).then(|| busy / speech),
            stage_seconds,
            holding_seconds: held,
            held_seconds: held,
            sustainable_streams: self.sustainable,
            carries: self.sustainable,
            memory_streams: self.memory_streams,
            max_calls: self.max_calls,
            gpu_memory: self.metrics.total("voice_gpu_memory_bytes"),
        }
    }
}
