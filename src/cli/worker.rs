//! `antiphon worker`: synthesis for gateways on other machines.

use std::path::PathBuf;

use tokio::net::TcpListener;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::watch;

use super::Failure;
use crate::app::engines;
use crate::synth::device::remote;
use crate::synth::device::{Engine, Phase};
use crate::telemetry;

#[derive(clap::Args)]
pub(super) struct Args {
    /// Where gateways connect to, as `0.0.0.0:7070`; off loopback, `[cluster] tls` must be set.
    #[arg(long, value_name = "ADDRESS")]
    listen: String,
    /// Configuration file: `[engine]`, `[scheduler]`, `[cluster]` and `[log]` count.
    #[arg(short, long, value_name = "FILE")]
    config: Option<PathBuf>,
}

/// Serves until SIGTERM or SIGINT; gateways have other devices speak what is unfinished then.
pub(super) fn run(args: &Args) -> Result<(), Failure> {
    let config = super::load(args.config.as_deref())?;
    let wrong = |message: String| Failure { code: super::BAD_CONFIG, message };
    let traces = telemetry::init(&config.log).map_err(wrong)?;
    // Turns are traced where their calls are.
    drop(traces);
    if !config.engine.workers.is_empty() {
        return Err(wrong("[engine] workers: a worker speaks by itself; remove them here".into()));
    }
    let door = config.cluster.door(&args.listen).map_err(|error| wrong(format!("--listen {error}")))?;
    super::block_on(async {
        let mut terminate = signal(SignalKind::terminate()).map_err(Failure::failed)?;
        let mut interrupt = signal(SignalKind::interrupt()).map_err(Failure::failed)?;
        let listener = TcpListener::bind(&args.listen).await;
        let listener =
            listener.map_err(|error| Failure::failed(format!("cannot listen on {}: {error}", args.listen)))?;
        let address = listener.local_addr().map_err(Failure::failed)?;
        let choice = engines::choose(&config.engine).map_err(Failure::unavailable)?;
        choice.reasons.iter().for_each(|reason| tracing::info!("{reason}"));
        let engine = Engine::start(choice.loaders, config.scheduler.clone()).map_err(Failure::failed)?;
        let (stop, stopped) = watch::channel(false);
        tokio::spawn(telemetry::metrics::keep(telemetry::metrics::recorder().clone(), stop.subscribe()));
        let served = tokio::spawn(remote::serve::serve(listener, door, engine.clone(), stopped));
        tracing::info!("worker: {address}");
        engine.ready().await;
        for device in engine.status() {
            match (device.phase, device.caps) {
                (Phase::Failed(reason), _) => tracing::error!("a device failed: {reason}"),
                (_, Some(caps)) => tracing::info!("ready: {} on {}", caps.name, caps.device),
                _ => {}
            }
        }
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
        tracing::info!("stopping; gateways have others speak what is unfinished");
        let _ = stop.send(true);
        let _ = served.await;
        // Joining threads blocks, so it leaves the runtime.
        let _ = tokio::task::spawn_blocking(move || engine.shutdown()).await;
        Ok(())
    })
}
