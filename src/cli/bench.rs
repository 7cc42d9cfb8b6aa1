//! `antiphon bench`: measurements of the engine, of egress pacing, of codecs and of enrolment.

use std::path::PathBuf;
use std::time::Duration;

use serde_json::{Value, json};

use super::Failure;
use crate::app::bench::{self, Level, Plan, Rate};
use crate::app::engines;
use crate::call::bench::EgressPacing;
use crate::clock;
use crate::config::EngineKind;
use crate::hear::whisper::rehearsal;
use crate::media;
use crate::synth::cosyvoice::backend::LanguageModel;
use crate::synth::cosyvoice::random;
use crate::synth::device::{Engine, Phase, Recovery};
use crate::voice;

/// About eight seconds of speech at the default voice's pace.
const TEXT: &str = "The meeting has been moved to Thursday at a quarter past three in the large room on the second \
    floor, so please bring the printed figures and a pen.";
/// Enough batch utterances to fill the widest steps of any engine and have some to spare.
const BACKLOG: u32 = 64;
/// How long a worker may take to be there.
const WORKER: Duration = Duration::from_secs(10);
/// Speech tokens a second.
const TOKENS: f64 = 25.0;

#[derive(clap::Args)]
pub(super) struct Args {
    /// Which engine.
    #[arg(long)]
    engine: Option<EngineKind>,
    /// Checkpoint directory, or random-full or random-tiny: written to the system's temporary folder once.
    #[arg(long)]
    model: Option<String>,
    /// Where CosyVoice3 computes: auto, cpu, cuda:N, cuda:all.
    #[arg(long)]
    device: Option<String>,
    /// Which of the checkpoint's language models: llm, or llm.rl.
    #[arg(long)]
    llm: Option<LanguageModel>,
    /// Listeners at once.
    #[arg(long, value_delimiter = ',', default_value = "1,2,4,8")]
    concurrency: Vec<u32>,
    /// Seconds that each level is measured.
    #[arg(long, default_value_t = 20.0)]
    seconds: f64,
    /// Open loop: turns begin at this rate a second over all listeners, whatever the engine does.
    #[arg(long, value_name = "RATE")]
    arrivals: Option<f64>,
    /// Open loop without listeners: turns begin at each of these rates a second, each on a stream of its own.
    #[arg(long, value_name = "RATE", value_delimiter = ',', value_parser = rate,
        conflicts_with_all = ["arrivals", "concurrency", "batch", "side_by_side", "throughput"])]
    turn_rates: Vec<f64>,
    /// Batch utterances that always wait beside the listeners.
    #[arg(long, value_name = "N")]
    batch: Option<u32>,
    /// Measure each level without and with the batch backlog (64 unless --batch says otherwise), and that alone.
    #[arg(long)]
    side_by_side: bool,
    /// Take audio as fast as it comes instead of in real time.
    #[arg(long)]
    throughput: bool,
    /// Seconds of speech of every turn, for checkpoints with random weights, which never end by themselves.
    #[arg(long, value_name = "S")]
    speech_seconds: Option<f64>,
    /// What is said.
    #[arg(long, default_value = TEXT)]
    text: String,
    /// Voice by name.
    #[arg(long)]
    voice: Option<String>,
    /// Measure how punctually N calls' packets leave, and what a call costs, instead.
    #[arg(long, value_name = "N")]
    departures: Option<usize>,
    /// Measure what encoding and decoding cost instead.
    #[arg(long)]
    codecs: bool,
    /// Measure voice enrolment instead.
    #[arg(long)]
    enrol: bool,
    /// Have so many recognitions begin a second beside the voice, on its GPU: of Whisper tiny.en, with random weights.
    #[arg(long, value_name = "RATE", value_parser = rate)]
    hear: Option<f64>,
    /// Write the results to a file, too.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Measure what `antiphon worker` at this address does for a gateway, in place of this machine's devices.
    #[arg(long, value_name = "ADDRESS")]
    worker: Option<String>,
    /// Configuration file.
    #[arg(short, long, value_name = "FILE")]
    config: Option<PathBuf>,
}

/// Measures, prints a table, and writes JSON where asked.
pub(super) fn run(args: Args) -> Result<(), Failure> {
    let results = if let Some(calls) = args.departures {
        let time = Duration::from_secs_f64(args.seconds);
        let report = EgressPacing { calls, time, ..EgressPacing::default() }.run().map_err(Failure::failed)?;
        println!("{report}");
        json!({ "departures": report })
    } else if args.codecs {
        let costs = media::bench::codecs(500).map_err(Failure::failed)?;
        for cost in &costs {
            let bytes = cost.bytes.map_or(String::new(), |bytes| format!("{bytes:.0} bytes"));
            let delay = cost.delay_ms.map_or(String::new(), |ms| format!("{ms:.1} ms delay"));
            println!("{:<34} {:>8.1} us {bytes:>10} {delay:>14}", cost.name, cost.micros);
        }
        json!({ "codecs": costs })
    } else if args.enrol {
        let config = voice::bench::Config {
            seconds: vec![5, 15, 30],
            model: args.model.as_ref().map(PathBuf::from),
            scratch: std::env::temp_dir(),
            threads: 0,
        };
        let report = voice::bench::run(&config).map_err(Failure::failed)?;
        println!("{report}");
        json!({ "enrolment": report })
    } else {
        engine(&args)?
    };
    if let Some(file) = &args.json {
        let text = format!("{results:#}\n");
        std::fs::write(file, text).map_err(|e| Failure::failed(format!("{}: {e}", file.display())))?;
    }
    Ok(())
}

fn engine(args: &Args) -> Result<Value, Failure> {
    let mut config = super::load(args.config.as_deref())?;
    crate::telemetry::init(&config.log).map_err(|message| Failure { code: super::BAD_CONFIG, message })?;
    if let Some(kind) = args.engine {
        config.engine.kind = kind;
    }
    if let Some(device) = &args.device {
        config.engine.device.clone_from(device);
    }
    if let Some(llm) = args.llm {
        config.engine.llm = llm.to_string();
    }
    if args.voice.is_some() {
        config.engine.voice.clone_from(&args.voice);
    }
    let mut forced = args.speech_seconds;
    if let Some(model) = &args.model {
        let (size, dir) = match model.as_str() {
            "random-full" => (Some(random::Size::Full), std::env::temp_dir().join("antiphon-random-full")),
            "random-tiny" => (Some(random::Size::Tiny), std::env::temp_dir().join("antiphon-random-tiny")),
            dir => (None, PathBuf::from(dir)),
        };
        if let Some(size) = size {
            if !dir.join("cosyvoice3.yaml").exists() {
                eprintln!("writing random weights to {}", dir.display());
                random::write(&dir, size, 0, |_, _| {}).map_err(Failure::failed)?;
            }
            forced = forced.or(Some(8.0));
        }
        config.engine.model = Some(dir);
    }
    super::checked(&config)?;
    if let Some(address) = &args.worker {
        let wrong = |message: String| Failure { code: super::BAD_CONFIG, message: format!("--worker: {message}") };
        let worker = config.cluster.worker(address).map_err(wrong)?;
        let engine = Engine::start_with_workers(vec![worker], Vec::new(), config.scheduler, Recovery::default());
        let engine = engine.map_err(Failure::failed)?;
        let results = connected(&engine).and_then(|()| measure(args, &engine, &plan(args), forced));
        engine.shutdown();
        return results;
    }
    let tokens = forced.map(|seconds| (seconds * TOKENS).round() as u32);
    let seat = args.hear.map(|_| rehearsal::seat());
    let mut left = seat.clone().map(|seat| (seat, None));
    let choice = engines::choose_beside(&config.engine, tokens, &mut left).map_err(Failure::unavailable)?;
    if left.is_some() {
        return Err(Failure::unavailable("--hear needs a voice that speaks on a GPU"));
    }
    for reason in &choice.reasons {
        eprintln!("{reason}");
    }
    let plan = plan(args);
    let engine = Engine::start(choice.loaders, config.scheduler).map_err(Failure::failed)?;
    let measure = || measure(args, &engine, &plan, forced);
    let results = match seat.zip(args.hear) {
        None => measure(),
        Some((seat, rate)) => {
            super::block_on(async {
                engine.ready().await;
                Ok(())
            })?;
            let (results, hearing) = rehearsal::beside(seat, rate, measure).map_err(Failure::failed)?;
            println!(
                "{} recognitions, {} failed: p50 {:.1} ms, p95 {:.1} ms",
                hearing.recognitions,
                hearing.failed,
                hearing.p50 * 1e3,
                hearing.p95 * 1e3
            );
            results.map(|results| json!({ "hearing": hearing, "speaking": results }))
        }
    };
    // A device thread that still computes while the process ends would have its driver taken away under it.
    engine.shutdown();
    results
}

fn plan(args: &Args) -> Plan {
    Plan {
        levels: args.concurrency.clone(),
        time: Duration::from_secs_f64(args.seconds),
        arrivals: args.arrivals,
        text: args.text.clone(),
        voice: args.voice.clone(),
        paced: !args.throughput,
        batch: args.batch.unwrap_or(if args.side_by_side { BACKLOG } else { 0 }),
        seed: 1,
    }
}

/// Waits until the worker of `engine` can be used.
fn connected(engine: &Engine) -> Result<(), Failure> {
    super::block_on(async {
        let ready = || engine.status().iter().any(|device| device.phase == Phase::Ready);
        let until = clock::now() + WORKER;
        while !ready() {
            if clock::now() > until {
                let reason = engine.status().into_iter().find_map(|device| match device.phase {
                    Phase::Failed(reason) => Some(reason),
                    _ => None,
                });
                return Err(Failure::unavailable(reason.unwrap_or_else(|| "the worker is not ready".into())));
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        Ok(())
    })
}

fn measure(args: &Args, engine: &Engine, plan: &Plan, forced: Option<f64>) -> Result<Value, Failure> {
    super::block_on(async {
        engine.ready().await;
        let mut devices = Vec::new();
        for device in engine.status() {
            if let Phase::Failed(reason) = device.phase {
                return Err(Failure::unavailable(reason));
            }
            let Some(caps) = device.caps else { continue };
            println!("{} on {}, {} slots", caps.name, caps.device, caps.limits.slots);
            devices.push(json!({ "engine": caps.name, "device": caps.device, "memoryTotal": device.memory.total }));
        }
        if !args.turn_rates.is_empty() {
            println!("{}", Rate::header());
            let rates = bench::rates(engine, plan, &args.turn_rates, |rate| println!("{rate}")).await;
            for rate in &rates {
                println!("share of time at {} turns a second:", rate.rate);
                rate.shares.iter().filter(|share| share.share >= 0.001).for_each(|share| println!("{share}"));
            }
            return Ok(json!({ "devices": devices, "speechSeconds": forced, "rates": rates }));
        }
        println!("{}", Level::header());
        if args.side_by_side {
            let report = bench::side_by_side(engine, plan, |level| println!("{level}")).await;
            let pairs = report.pairs.iter().flat_map(|pair| [&pair.live, &pair.both]);
            print_shares(std::iter::once(&report.batch_alone).chain(pairs));
            for pair in &report.pairs {
                println!(
                    "{} listeners: p95 first audio with batch is {:.2} of that without; batch gets {:.1} % of what it makes alone",
                    pair.live.listeners,
                    pair.first_p95_ratio,
                    pair.batch_share * 100.0
                );
            }
            return Ok(json!({ "devices": devices, "arrivals": plan.arrivals, "sideBySide": report }));
        }
        let levels = bench::run(engine, plan, |level| println!("{level}")).await;
        print_shares(&levels);
        print_devices(&devices, &levels);
        Ok(json!({ "devices": devices, "paced": plan.paced, "arrivals": plan.arrivals, "levels": levels }))
    })
}

/// Where the devices' time went, level by level.
fn print_shares<'a>(levels: impl IntoIterator<Item = &'a Level>) {
    for level in levels {
        println!("share of time with {} listeners and {} batch utterances:", level.listeners, level.batch);
        level.shares.iter().filter(|share| share.share >= 0.001).for_each(|share| println!("{share}"));
    }
}

/// Which device made how much, and what the memory was used for when utterances held most of it.
fn print_devices(devices: &[Value], levels: &[Level]) {
    let Some(fullest) = levels.iter().max_by_key(|level| level.memory_used) else { return };
    if devices.len() > 1 {
        for level in levels {
            let all: f64 = level.by_device.iter().sum();
            let share = |made: &f64| format!("{:.0} %", 100.0 * made / all.max(f64::MIN_POSITIVE));
            let shares: Vec<String> = level.by_device.iter().map(share).collect();
            println!("{:>9} listeners: by device {}", level.listeners, shares.join(", "));
        }
    }
    if !fullest.memory_parts.is_empty() {
        println!("device memory with {} listeners, MB:", fullest.listeners);
        for (part, bytes) in &fullest.memory_parts {
            println!("{part:>16} {:>10.1}", *bytes as f64 / 1e6);
        }
    }
}

fn rate(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(rate) if (0.1..=10_000.0).contains(&rate) => Ok(rate),
        _ => Err("expected 0.1 to 10000 turns a second".to_owned()),
    }
}
