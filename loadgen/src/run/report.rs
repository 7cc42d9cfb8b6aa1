//! The report of a measurement: what is written as JSON and shown as a page.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::turns::exchange::Waterfall;
use crate::turns::stats::Summary;
use crate::turns::words::Errors;
use crate::under_test::process::{Host, Usage};

/// Fewest turns of which a 95th percentile is told: of fewer it is the slowest turn and nothing else.
pub const P95_TURNS: u64 = 20;

/// Version of the format; raised when a field changes its meaning.
pub const FORMAT: u32 = 1;

/// Everything about one measurement.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Report {
    /// [`FORMAT`].
    pub format: u32,
    /// `ladder` or the name of the scenario.
    pub name: String,
    /// Seconds since the Unix epoch.
    pub when: u64,
    /// The command line or scenario that was run.
    pub command: String,
    /// What was called.
    pub targets: Vec<String>,
    /// Where caller and gateway ran.
    pub host: Host,
    /// What the gateway says it speaks with (`/readyz`).
    pub devices: serde_json::Value,
    /// What passing means.
    pub limits: Limits,
    /// One for each load, in order of load.
    pub levels: Vec<Level>,
    /// Where the gateway ceases to be good.
    pub knee: Option<Knee>,
    /// What should be known when reading the figures.
    pub notes: Vec<String>,
    /// Why it ended before it was done.
    pub ended_early: Option<String>,
    /// One turn, step by step: the one with the median first audio at the knee.
    pub waterfall: Option<Waterfall>,
}

/// What the interactive use of a level must keep to.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Limits {
    /// First audio, 95th percentile, seconds.
    pub first_audio_p95: f64,
    /// Time from first to last sound over the length of the speech, 95th percentile.
    pub rtf_p95: f64,
    /// Share of turns that may stall.
    pub stalled_turns: f64,
    /// Share of calls and turns that may fail.
    pub failures: f64,
}

impl Default for Limits {
    fn default() -> Self {
        // Interactive use as published comparisons judge it; no listener should hear a stall, and one turn in a hundred is
        // more than a week of use.
        Limits { first_audio_p95: 2.0, rtf_p95: 1.05, stalled_turns: 0.01, failures: 0.0 }
    }
}

impl Limits {
    /// Our own stricter limits: an answer that sounds at once.
    pub fn strict() -> Limits {
        Limits { first_audio_p95: 0.3, rtf_p95: 1.02, stalled_turns: 0.0, failures: 0.0 }
    }

    /// What `level` breaks; nothing when it passes.
    pub fn broken(&self, level: &Level) -> Vec<String> {
        let mut broken = Vec::new();
        if level.incomplete {
            broken.push("it was stopped before its time".to_owned());
        }
        if level.turns == 0 {
            broken.push("no turn was heard".to_owned());
            return broken;
        }
        if level.first_audio.p95 > self.first_audio_p95 {
            broken.push(format!("first audio p95 {:.3} s > {} s", level.first_audio.p95, self.first_audio_p95));
        }
        if level.rtf.p95 > self.rtf_p95 {
            broken.push(format!("RTF p95 {:.3} > {}", level.rtf.p95, self.rtf_p95));
        }
        let stalled = level.stalled_turns as f64 / level.turns as f64;
        if stalled > self.stalled_turns {
            broken.push(format!("{:.1} % of turns stalled", stalled * 100.0));
        }
        let failed: u64 = level.failures.values().sum();
        let failed_share = failed as f64 / (level.turns + failed) as f64;
        if failed_share > self.failures {
            let causes: Vec<String> = level.failures.iter().map(|(cause, n)| format!("{n} {cause}")).collect();
            broken.push(format!("failures: {}", causes.join(", ")));
        }
        broken
    }
}

/// What was measured under one load. Times in seconds.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Level {
    /// Calls at a time (closed loop), or the load that was offered in calls at a time (open loop).
    pub level: u32,
    /// `closed` or `open`.
    pub mode: String,
    /// How long the figures were gathered.
    pub seconds: f64,
    /// Calls placed.
    pub calls: u64,
    /// Open loop: calls a second that arrived.
    pub offered: Option<f64>,
    /// Turns heard for each call.
    pub turns_per_call: f64,
    /// Mean number of calls at a time.
    pub concurrency: f64,
    /// Turns that were sent within the time and heard as they should be; all other figures of turns are of these, each
    /// once.
    pub turns: u64,
    /// From the text to the first audible sample; of callers who speak, the same as `mouth_to_ear`.
    pub first_audio: Summary,
    /// From the last audible sample that a caller said to the first one of the answer.
    pub mouth_to_ear: Summary,
    /// From first to last audible sample over the length of the speech.
    pub rtf: Summary,
    /// From asking to media.
    pub setup: Summary,
    /// From the answer to the first audible sample of the greeting.
    pub greeting: Summary,
    /// From the text to the end of its speech: what a call occupies the gateway for.
    pub service: Summary,
    /// [`Level::service`] in parts of a twentieth of all turns each, the shortest first: a few turns that are much longer than the
    /// others stand for none.
    #[serde(skip)]
    pub service_shares: Vec<std::time::Duration>,
    /// From one turn of a caller to his next, at the mean; zero where nobody had two.
    ///
    /// # Why
    /// Not by how many turns the window has: of turns that last as long as half of it, callers who begin before it have one in it, or
    /// two. By that, turns of 11 s were taken to come every 17: the next level's callers began over 17 s, in the last 5 of which those who had
    /// begun first spoke again, and 413 of them asked for more slots at once than 420 who began over 13 s.
    #[serde(skip)]
    pub cycle: std::time::Duration,
    /// Characters spoken per second, all calls together.
    pub chars_per_s: f64,
    /// Seconds of speech per second, all calls together.
    pub audio_s_per_s: f64,
    /// Lengths of the turns' speech.
    pub speech: Summary,
    /// Squared coefficient of variation of the lengths of turns' speech: 0 when all are alike, 1 when exponential.
    pub speech_spread: f64,
    /// Turns with at least one stall.
    pub stalled_turns: u64,
    /// Stalls by cause.
    pub stalls: BTreeMap<String, u64>,
    /// Stalled time in all.
    pub stalled_s: f64,
    /// Packets lost in turns that were sent within the time, whatever became of them.
    pub packets_lost: u64,
    /// Packets received in these.
    pub packets: u64,
    /// Interarrival jitter at the ends of turns.
    pub jitter: Summary,
    /// Lateness of packets against the most punctual of their spurt.
    pub lateness: Summary,
    /// Estimated opinion (E-model).
    pub mos: Summary,
    /// From barging in to silence.
    pub barge_in: Summary,
    /// What the gateway reported as sent, less what was heard, of interrupted turns.
    pub report_error: Summary,
    /// Waveform correlation of sampled turns with the same text spoken directly.
    pub correlation: Summary,
    /// Where first audio went: seconds in each stage inside the gateway as it told (`stages::ORDER`), and `outside`, the rest
    /// of what the caller waited.
    pub stages: BTreeMap<String, Summary>,
    /// What a recogniser made of the words of sampled turns: `None` where none listened.
    pub words: Option<Errors>,
    /// Why a recogniser that was to say so did not.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub deaf: Option<String>,
    /// Calls and turns that failed, by cause; also those of the time in which callers become as many as they are to be.
    pub failures: BTreeMap<String, u64>,
    /// First audio by leg.
    pub by_leg: BTreeMap<String, Summary>,
    /// What the gateway cost.
    pub gateway: Option<Usage>,
    /// What the generator cost.
    pub generator: Option<Usage>,
    /// Cores that the gateway's busiest thread used, the threads of devices aside.
    pub busiest_thread: Option<f64>,
    /// Cores that the busiest thread of a device used, waiting for the device included where it does not sleep. `None` in
    /// reports of the last release, whose `busiest_thread` may be that.
    pub device_thread: Option<f64>,
    /// Cores that everything else on this computer used.
    pub others: Option<f64>,
    /// What the gateway's own metrics say it did during this level.
    pub metrics: GatewayMetrics,
    /// Wake-up lateness of the generator itself, 99th percentile: figures finer than this mean nothing.
    pub generator_lateness_p99: f64,
    /// It was stopped before its time: the figures are of what there was until then.
    pub incomplete: bool,
    /// Limits that were broken; empty: passed.
    pub broken: Vec<String>,
}

/// What `/metrics` said over one level.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct GatewayMetrics {
    /// Underruns counted by the gateway.
    pub underruns: f64,
    /// Turns of calls that it refused, by its reason: also those that it spoke when they were asked for again.
    pub refusals: BTreeMap<String, f64>,
    /// Device seconds by stage.
    pub stage_seconds: BTreeMap<String, f64>,
    /// CPU seconds of processes that give way to everything else.
    pub background_seconds: f64,
    /// Seconds that live streams held their slots, all together.
    pub holding_seconds: Option<f64>,
    /// The former name of `holding_seconds`, for one release.
    pub held_seconds: Option<f64>,
    /// Speaking streams that the devices could keep up with, as the gateway sees it at the end.
    pub sustainable_streams: Option<f64>,
    /// The former name of `sustainable_streams`, for one release.
    pub carries: Option<f64>,
    /// Live streams that device memory has room for at once, likewise; 0: it is not what limits.
    pub memory_streams: Option<f64>,
    /// Calls that the gateway takes at once, as it is configured.
    pub max_calls: Option<f64>,
    /// Device memory in use at the end, octets.
    pub gpu_memory: f64,
    /// Device seconds for each second of speech: the engine's own real-time factor.
    pub engine_rtf: Option<f64>,
}

impl GatewayMetrics {
    /// Seconds that live streams held their slots; a report of the last release says it by another name.
    pub fn holding(&self) -> Option<f64> {
        self.holding_seconds.or(self.held_seconds)
    }

    /// Speaking streams that the devices could keep up with, likewise.
    pub fn sustainable(&self) -> Option<f64> {
        self.sustainable_streams.or(self.carries)
    }
}

/// Where the gateway ceases to be good.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Knee {
    /// Highest level that kept within the limits; 0: none did.
    pub level: u32,
    /// Lowest level that did not; `None` when all that were tried passed.
    pub broken_at: Option<u32>,
}

impl Report {
    /// Level `n`, if it was measured.
    pub fn at(&self, n: u32) -> Option<&Level> {
        self.levels.iter().find(|l| l.level == n)
    }

    /// Whether a GPU spoke.
    pub fn has_gpu(&self) -> bool {
        let devices = self.devices.as_array().into_iter().flatten();
        let named = devices.filter_map(|device| device["device"].as_str()).any(|name| name.starts_with("cuda"));
        named || self.levels.iter().any(|l| l.metrics.gpu_memory > 0.0)
    }

    /// What is to be concluded, line by line: a name, whether it holds, and why not.
    pub fn verdicts(&self) -> Vec<Verdict> {
        let best = |limits: &Limits| self.levels.iter().filter(|l| limits.broken(l).is_empty()).map(|l| l.level).max();
        let mut out = Vec::new();
        for (name, limits) in [("Interactive", self.limits), ("Interactive, strict", Limits::strict())] {
            let text = format!(
                "p95 first audio under {} s, p95 RTF under {}, stalled turns at most {:.0} %",
                limits.first_audio_p95,
                limits.rtf_p95,
                limits.stalled_turns * 100.0
            );
            out.push(match best(&limits) {
                Some(level) => Verdict { name: name.into(), holds: true, text: format!("{text}: up to {level} calls") },
                None => Verdict { name: name.into(), holds: false, text: format!("{text}: at no level") },
            });
        }
        let peak = self.levels.iter().max_by(|a, b| a.audio_s_per_s.total_cmp(&b.audio_s_per_s));
        if let Some(peak) = peak {
            // No listener waits for batch work: it is worth its while wherever speech comes out faster than it plays.
            let engine = peak.metrics.engine_rtf.map(|r| format!(", engine RTF {r:.3}")).unwrap_or_default();
            out.push(Verdict {
                name: "Batch".into(),
                holds: peak.audio_s_per_s >= 1.0,
                text: format!(
                    "most throughput {:.1} audio-s/s and {:.0} chars/s at {} calls{engine}",
                    peak.audio_s_per_s, peak.chars_per_s, peak.level
                ),
            });
        }
        let lost: u64 = self.levels.iter().map(|l| l.packets_lost).sum();
        let up_to_knee = self.knee.map_or(0, |k| k.level);
        let failures: u64 =
            self.levels.iter().filter(|l| l.level <= up_to_knee).flat_map(|l| l.failures.values()).sum();
        out.push(Verdict {
            name: "Failures".into(),
            holds: failures == 0 && self.ended_early.is_none(),
            text: format!("{failures} up to the knee; {lost} packets lost in all"),
        });
        if let Some(cost) = self.generator_share() {
            out.push(Verdict {
                name: "Generator".into(),
                holds: cost <= 1.0 / 3.0,
                text: format!("costs {:.0} % of what the gateway costs per call (a third at most)", cost * 100.0),
            });
        }
        if let Some(why) = &self.ended_early {
            out.push(Verdict { name: "Complete".into(), holds: false, text: format!("ended early: {why}") });
        }
        out
    }

    /// CPU of the generator over that of the gateway, at the knee (or the highest level).
    pub fn generator_share(&self) -> Option<f64> {
        let level = self.knee.and_then(|k| self.at(k.level)).or(self.levels.last())?;
        let (gateway, generator) = (level.gateway?, level.generator?);
        (gateway.cores > 0.0).then(|| generator.cores / gateway.cores)
    }
}

/// One line of what is to be concluded.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Verdict {
    /// About what.
    pub name: String,
    /// Whether it is good.
    pub holds: bool,
    /// In words.
    pub text: String,
}

/// Figures of another system, as published.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Published {
    /// System and hardware.
    pub system: &'static str,
    /// Requests at a time.
    pub level: u32,
    /// First audio, 95th percentile, seconds.
    pub first_audio_p95: f64,
    /// Real-time factor, 95th percentile.
    pub rtf_p95: f64,
    /// Characters per second, where it was told.
    pub chars_per_s: Option<f64>,
}

/// CosyVoice3-0.5B on one RTX 5090, vLLM fp16 with 20 % and with 80 % of the memory.
pub const PUBLISHED: &[Published] = &[
    published_20(4, 1.83, 1.15, 34.61),
    published_20(8, 1.94, 0.94, 51.81),
    published_20(12, 2.54, 1.64, 52.01),
    published_20(16, 4.52, 2.42, 49.27),
    published_20(20, 6.24, 3.78, 47.61),
    published_20(24, 5.35, 2.88, 49.67),
    published_20(32, 7.66, 5.00, 49.29),
    published_20(40, 11.04, 6.09, 53.03),
    published_20(48, 12.48, 6.71, 50.41),
    published_80(4, 1.23, 0.74),
    published_80(8, 1.75, 1.27),
    published_80(12, 2.41, 1.39),
];

/// Name of the published series with 20 % of the memory.
pub const RTX5090_20: &str = "CosyVoice3-0.5B, vLLM fp16, RTX 5090, 20 % memory";
/// Name of the published series with 80 % of the memory.
pub const RTX5090_80: &str = "CosyVoice3-0.5B, vLLM fp16, RTX 5090, 80 % memory";
/// The most characters a second of that series, and of how many requests at a time; nothing else was told of these.
pub const RTX5090_80_PEAK: (u32, f64) = (24, 55.0);

const fn published_20(level: u32, first_audio_p95: f64, rtf_p95: f64, chars: f64) -> Published {
    Published { system: RTX5090_20, level, first_audio_p95, rtf_p95, chars_per_s: Some(chars) }
}

const fn published_80(level: u32, first_audio_p95: f64, rtf_p95: f64) -> Published {
    Published { system: RTX5090_80, level, first_audio_p95, rtf_p95, chars_per_s: None }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn level(n: u32, p95: f64) -> Level {
        let summary = |p95| Summary { count: 10, p95, ..Summary::default() };
        Level { level: n, turns: 10, first_audio: summary(p95), rtf: summary(1.0), ..Level::default() }
    }

    #[test]
    fn limits_name_what_is_broken() {
        let limits = Limits::default();
        assert!(limits.broken(&level(4, 0.1)).is_empty());
        let mut bad = level(8, 3.0);
        bad.stalled_turns = 5;
        bad.failures.insert("silence".into(), 2);
        assert_eq!(limits.broken(&bad).len(), 3, "{:?}", limits.broken(&bad));
        assert_eq!(limits.broken(&Level::default()), ["no turn was heard"]);
    }

    #[test]
    fn a_gateway_that_died_is_no_success() {
        let report = Report {
            levels: vec![level(4, 0.1)],
            knee: Some(Knee { level: 4, broken_at: Some(8) }),
            ended_early: Some("the gateway died".into()),
            ..Report::default()
        };
        let verdicts = report.verdicts();
        assert!(verdicts.iter().any(|v| v.name == "Interactive" && v.holds && v.text.contains("up to 4")));
        assert!(verdicts.iter().any(|v| !v.holds && v.text.contains("the gateway died")));
        assert!(verdicts.iter().any(|v| v.name == "Failures" && !v.holds));
    }
}
