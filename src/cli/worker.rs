//! `antiphon worker`: synthesis for gateways on other machines.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use tokio::net::TcpListener;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::watch;

use super::Failure;
use crate::app::engines;
use crate::app::workers::forget_copies;
use crate::batch::{self, Batch};
use crate::certificate::Certificate;
use crate::cluster::workers::Announcer;
use crate::config::Config;
use crate::handover::Place;
use crate::server;
use crate::synth::device::remote;
use crate::synth::device::remote::serve::Service;
use crate::synth::device::{Engine, Phase};
use crate::telemetry;
use crate::text::CurrentLexicon;
use crate::voice::copies::Copies;

#[derive(clap::Args)]
pub(super) struct Args {
    /// Where gateways connect to, as `0.0.0.0:7070`; off loopback, `[cluster] tls` must be set.
    #[arg(long, value_name = "ADDRESS")]
    listen: String,
    /// Where it is asked for its health, readiness and metrics (`/healthz`, `/readyz`, `/metrics`); none: nowhere. Tokens and
    /// certificate are those of `[http]`.
    #[arg(long, value_name = "ADDRESS")]
    http: Option<SocketAddr>,
    /// Configuration file: `[engine]`, `[scheduler]`, `[cluster]` and `[log]` count, and `[call] drain_grace_s`. With
    /// `[cluster] redis` gateways find this worker by itself, at the host of `advertise`. With `[batch] database` on PostgreSQL its
    /// idle time is for the jobs there.
    #[arg(short, long, value_name = "FILE")]
    config: Option<PathBuf>,
}

/// Serves until SIGTERM or SIGINT. Then it takes nothing new and ends what it has; what is unfinished after the grace, or
/// when a second signal comes, gateways have other devices speak.
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
        let copies = Copies::open(&config.engine.voices);
        let (stop, stopped) = watch::channel(false);
        let service = Service::new(engine.clone()).with_copies(copies.clone());
        tokio::spawn(forget_copies(copies, engine.clone(), stop.subscribe()));
        let http = match args.http {
            Some(address) => Some(asked(&config, address, &service, stop.subscribe()).await?),
            None => None,
        };
        let in_cluster = |error| wrong(format!("[cluster] {error}"));
        let announcer = Announcer::new(&config.cluster, address, http).map_err(in_cluster)?;
        tokio::spawn(telemetry::metrics::keep(telemetry::metrics::recorder().clone(), stop.subscribe()));
        let served = tokio::spawn(remote::serve::serve(listener, door, service.clone(), stopped));
        tracing::info!("worker: {address}");
        engine.ready().await;
        for device in engine.status() {
            match (device.phase, device.caps) {
                (Phase::Failed(reason), _) => tracing::error!("a device failed: {reason}"),
                (_, Some(caps)) => tracing::info!("ready: {} on {}", caps.name, caps.device),
                _ => {}
            }
        }
        let batch = batch(&config, &engine)?;
        // Not before it speaks: who finds it may use it at once.
        let announced = announcer.map(|announcer| {
            tracing::info!("gateways find this worker at {}", announcer.address());
            let told = service.clone();
            tokio::spawn(announcer.keep(move || told.told(), stop.subscribe()))
        });
        let hangs = tokio::select! {
            _ = terminate.recv() => false,
            _ = interrupt.recv() => false,
            () = all_hang(engine.clone()) => true,
        };
        service.drain();
        if let Some(batch) = batch {
            // What is unfinished of it another begins anew. Joining the thread blocks.
            let _ = tokio::task::spawn_blocking(move || batch.shutdown()).await;
        }
        tracing::info!(open = service.open(), "draining: no new streams, and what is begun is ended");
        tokio::select! {
            () = service.idle() => {}
            () = tokio::time::sleep(Duration::from_secs(config.call.drain_grace_s)) => {}
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
        if service.open() > 0 {
            tracing::warn!(open = service.open(), "stopping; gateways have others speak what is unfinished");
        }
        let _ = stop.send(true);
        let _ = served.await;
        if let Some(announced) = announced {
            let _ = announced.await;
        }
        // Joining threads blocks, so it leaves the runtime.
        let _ = tokio::task::spawn_blocking(move || engine.shutdown()).await;
        match hangs {
            // The supervisor starts it anew, which is what such a device needs.
            true => Err(Failure::failed("every device hangs")),
            false => Ok(()),
        }
    })
}

/// Waits until every device hangs, so that nothing speaks here until a new process does.
async fn all_hang(engine: Engine) {
    let mut look = tokio::time::interval(Duration::from_secs(1));
    while !engine.status().iter().all(|device| device.hangs) {
        look.tick().await;
    }
}

/// Batch work of a database that gateways share, in the voices that are here; `None`: there is none.
fn batch(config: &Config, engine: &Engine) -> Result<Option<Batch>, Failure> {
    if config.batch.database.path().is_some() {
        // A file is a gateway's own.
        return Ok(None);
    }
    let lexicon = CurrentLexicon::default();
    lexicon.set(config.lexicon.said.clone());
    let batch = batch::Config { lexicon, own_voices: true, ..config.batch.clone() };
    let batch = Batch::open(batch, engine.clone()).map_err(Failure::failed)?;
    tracing::info!("idle time is for the jobs of {}", config.batch.database);
    Ok(Some(batch))
}

/// Serves health, readiness and metrics at `address` until `stop`; gives the address with the port that was got.
async fn asked(
    config: &Config,
    address: SocketAddr,
    service: &Service,
    stop: watch::Receiver<bool>,
) -> Result<SocketAddr, Failure> {
    let listener = TcpListener::bind(address).await;
    let listener =
        listener.map_err(|error| Failure::failed(format!("cannot listen for HTTP on {address}: {error}")))?;
    let address = listener.local_addr().map_err(Failure::failed)?;
    let open = |tls: &server::config::Tls| Certificate::open("[http] tls", &tls.cert, &tls.key);
    let certificate = config.http.tls.as_ref().map(open).transpose().map_err(Failure::failed)?;
    let bounds = server::Bounds { all: config.http.max_connections, per_address: config.http.connections_per_address };
    let place = Place::new(Vec::new(), true, false);
    let manners = server::Manners { bounds, certificate, grace: Duration::ZERO, place };
    let router = server::worker::router(service.clone(), server::Policies::new(&config.http));
    tokio::spawn(server::serve(listener, router, stop, manners));
    tracing::info!("health and metrics: {address}");
    Ok(address)
}
