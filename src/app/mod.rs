//! The gateway put together: builds the parts from a configuration, serves, drains.

#[cfg(feature = "bench")]
pub mod bench;
pub mod descriptors;
mod ears;
pub mod engines;
mod phrases;
mod reload;

use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use tokio::net::TcpListener;
use tokio::sync::{mpsc, watch};

pub use self::reload::{Reloader, Report};

use self::engines::Choice;
use crate::acme::Keeper;
use crate::agent::Agents;
use crate::agent::config::Overload;
use crate::batch::Jobs;
use crate::call::Calls;
use crate::certificate::Certificate;
use crate::clock;
use crate::cluster::{Nodes, Sip, Told};
use crate::config::{self, Config};
use crate::gateway::outgoing::Outgoing;
use crate::gateway::tenants::Tenants;
use crate::gateway::{self, Gateway, Room};
use crate::recording::Recordings;
use crate::records::{self, RecordError, Records};
use crate::server;
use crate::sip::{Addresses, Endpoint};
use crate::synth::device::{Engine, Recovery};
use crate::telemetry;
use crate::voice::api::Service;
use crate::voice::enrol::{Enroller, Options};
use crate::voice::store::{REFRESH, Store};

/// Calls that may ring while the gateway is busy accepting others; more are answered 503 by the SIP part.
const RINGING: usize = 256;
/// How often a database of jobs that cannot be used is tried again.
const RETRY_JOBS: Duration = Duration::from_secs(30);
/// How long requests that are under way may take when everything else has stopped.
const HTTP_GRACE: Duration = Duration::from_secs(1);

/// Why the gateway did not start.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StartError {
    /// A voice that was asked for is not there.
    #[error("{0}")]
    Engine(#[from] crate::synth::SynthError),
    /// A socket cannot be used.
    #[error("cannot listen for HTTP on {address}: {source}")]
    Http {
        /// What was to be bound.
        address: SocketAddr,
        /// Why.
        source: std::io::Error,
    },
    /// HTTPS has no certificate.
    #[error("{0}")]
    Certificate(String),
    /// A worker cannot be used as it is configured.
    #[error("[engine] workers: {0}")]
    Worker(String),
    /// The other gateways cannot be reached as configured.
    #[error("[cluster] {0}")]
    Cluster(String),
    /// SIP did not start.
    #[error("{0}")]
    Sip(#[from] crate::sip::SipError),
    /// WebRTC did not start.
    #[error("{0}")]
    WebRtc(#[from] crate::webrtc::WebRtcError),
    /// No media threads.
    #[error("cannot start media threads: {0}")]
    Threads(std::io::Error),
    /// The configuration does not say where to keep voices and jobs.
    #[error(transparent)]
    Config(#[from] crate::config::ConfigError),
    /// Calls cannot be recorded.
    #[error("[records] {0}")]
    Records(#[from] crate::records::RecordError),
    /// What was to recognise callers is not there.
    #[error("{0}")]
    Recognizer(String),
}

/// A running gateway.
pub struct App {
    gateway: Gateway,
    http: SocketAddr,
    tls: bool,
    stop: watch::Sender<bool>,
    served: tokio::task::JoinHandle<()>,
    /// The word to other gateways.
    kept: Option<tokio::task::JoinHandle<()>>,
    reloader: Arc<Reloader>,
}

impl App {
    /// Binds every socket, starts every part and serves. Speech is ready when [`App::ready`] returns.
    ///
    /// # Errors
    /// The first part that cannot start; what was started is stopped again by being dropped.
    pub async fn start(config: Config) -> Result<Self, StartError> {
        let config = config.with_state_dir(config::variables())?;
        let choice = engines::choose(&config.engine)?;
        Self::start_with(config, choice).await
    }

    /// As [`App::start`], with voices that were chosen elsewhere.
    ///
    /// # Errors
    /// As there.
    pub async fn start_with(config: Config, choice: Choice) -> Result<Self, StartError> {
        let mut config = config.with_state_dir(config::variables())?;
        tracing::info!("voices: {}; jobs: {}", config.engine.voices.display(), config.batch.database);
        let paths = [("batch.sqlite", config.batch.database.path()), ("voices", Some(&*config.engine.voices))];
        for (old, path) in paths.into_iter().filter_map(|(old, path)| Some((old, path?))) {
            if Path::new(old).exists() && path != Path::new(old) {
                tracing::warn!("`{old}` in the current folder is not used any more: move it to {}", path.display());
            }
        }
        let metrics = telemetry::metrics::recorder();
        let address = config.http.bind;
        let listener = TcpListener::bind(address).await.map_err(|source| StartError::Http { address, source })?;
        let open = |tls: &server::config::Tls| Certificate::open("[http] tls", &tls.cert, &tls.key);
        let certificate = config.http.tls.as_ref().map(open).transpose();
        let certificate = certificate.map_err(StartError::Certificate)?;
        let keeper = config.http.acme.clone().map(|acme| {
            if address.port() != 443 {
                tracing::info!("the authority of [http.acme] connects to port 443, which must lead to {address}");
            }
            Keeper::open(acme, config.state.dir.join("acme"), certificate.as_ref().map(Certificate::in_use))
        });
        let keeper = keeper.transpose().map_err(StartError::Certificate)?;
        let certificate = keeper.as_ref().map(|keeper| keeper.certificate().clone()).or(certificate);
        let http = listener.local_addr().map_err(|source| StartError::Http { address, source })?;

        let nodes = Nodes::new(&config.cluster, http.port()).map_err(StartError::Cluster)?;
        // Ids tell where their object is.
        let node = nodes.as_ref().map(|nodes| nodes.name().clone());
        (config.webrtc.node, config.batch.node) = (node.clone(), node);

        for reason in &choice.reasons {
            tracing::info!("{reason}");
        }
        let worker = |address: &String| config.cluster.worker(address);
        let workers = config.engine.workers.iter().map(worker).collect::<Result<Vec<_>, _>>();
        let workers = workers.map_err(StartError::Worker)?;
        for worker in &workers {
            tracing::info!("the worker {} speaks where it can be reached", worker.address);
        }
        let recovery = Recovery::default();
        let engine = Engine::start_with_workers(workers, choice.loaders, config.scheduler.clone(), recovery)?;
        engine.keep_phrases(&config.engine.phrases);
        let (tell_phrases, told_phrases) = watch::channel(phrases::of(&config));
        let wanted = config.agent.values().any(|agent| agent.overload == Overload::DefaultVoice);
        let fallback = match choice.fallback.filter(|_| wanted) {
            Some(loader) => Some(Engine::start(vec![loader], config.scheduler.clone())?),
            None => None,
        };
        if wanted && fallback.is_none() {
            tracing::warn!(
                "overload = \"default_voice\" has no effect: the default voice is all that speaks, or is missing"
            );
        }
        let ears = ears::choose(&config.recognizer, &config.turns).await.map_err(StartError::Recognizer)?;
        let calls =
            Calls::with_ears(config.call.clone(), Arc::new(engine.clone()), ears).map_err(StartError::Threads)?;
        let records = Records::start(config.records.clone())?;
        records.count(engine.meter());
        if let Some(fallback) = &fallback {
            records.count(fallback.meter());
        }
        calls.observe(Arc::new(records.clone()));
        let tenants = Tenants::new(config.tenant_rules());
        // A restart gives no tenant another day.
        let counted = records.clone();
        let used = tokio::task::spawn_blocking(move || counted.usage_today()).await;
        let used = match used.unwrap_or_else(|error| Err(RecordError::Thread(std::io::Error::other(error)))) {
            // Calls do not wait for a database that others use, too; until it is back each day begins anew.
            Err(RecordError::Postgres(error)) => {
                tracing::warn!(%error, "what tenants have used today is not known");
                Vec::new()
            }
            used => used?,
        };
        for used in used {
            tenants.used_today(&used.tenant, Duration::from_secs_f64(used.call_seconds.max(0.0)));
        }
        let agents = Agents::new(config.agent.clone());
        agents.read_with(config.lexicon.said.clone());
        let webrtc = crate::webrtc::Gateway::start(config.webrtc.clone()).await?;
        let room = Room::new(calls.clone(), engine.clone(), fallback.clone(), nodes.clone());
        let (incoming, ringing) = mpsc::channel(RINGING);
        let sip = if config.sip.udp.is_some() || config.sip.tcp.is_some() || config.sip.tls.is_some() {
            let neighbours = Some(Arc::new(room.clone()) as _);
            Some(Arc::new(Endpoint::start_among(config.sip.clone(), config.rtp, incoming, neighbours).await?))
        } else {
            None
        };

        let jobs = Jobs::new(config.batch.clone(), engine.clone());
        let gateway = Gateway {
            jobs,
            voices: Arc::new(voices(&config)),
            calls,
            outgoing: Outgoing::default(),
            dialers: gateway::dialers::Dialers::default(),
            records,
            recordings: Recordings::start(config.recording.clone()).map_err(StartError::Threads)?,
            agents,
            engine,
            fallback,
            sip,
            dispatcher: gateway::Dispatcher::default(),
            webrtc,
            metrics,
            tenants,
            room,
            nodes,
            default_agent: config.sip.agent.clone().unwrap_or_else(|| "demo".into()).into(),
            drain_grace: Duration::from_secs(config.call.drain_grace_s),
        };
        let (stop, stopped) = watch::channel(false);
        tokio::spawn(phrases::render(gateway.engine.clone(), told_phrases, stop.subscribe()));
        tokio::spawn(gateway::answer(gateway.clone(), ringing));
        if let Some(keeper) = keeper {
            tokio::spawn(keeper.keep(stop.subscribe()));
        }
        if let Some(deliveries) = gateway.records.deliveries() {
            tokio::spawn(records::deliver(deliveries, stop.subscribe()));
        }
        tokio::spawn(telemetry::metrics::keep(metrics.clone(), stop.subscribe()));
        tokio::spawn(retry_jobs(gateway.jobs.clone(), stop.subscribe()));
        tokio::spawn(watch_voices(gateway.voices.clone(), gateway.engine.clone(), stop.subscribe()));
        let kept = gateway.nodes.clone().map(|nodes| {
            let (room, sip) = (gateway.room.clone(), gateway.sip.clone());
            let tell = move || {
                let Addresses { udp, tcp, tls } = sip.as_ref().map(|sip| sip.addresses()).unwrap_or_default();
                Told { sip: Sip { udp, tcp, tls }, load: room.load() }
            };
            let trunks = config.sip.trunk.iter().filter(|trunk| trunk.register).map(|trunk| trunk.name.clone());
            tokio::spawn(nodes.keep(tell, trunks.collect(), stop.subscribe()))
        });
        let policies = server::Policies::new(&config.http).among(gateway.nodes.clone());
        let reloader = Reloader::new(&config, policies.clone(), gateway.agents.clone(), gateway.tenants.clone());
        let reloader = Arc::new(reloader.telling(tell_phrases));
        let router = server::router(gateway.clone(), policies, reloader.clone());
        let bounds =
            server::Bounds { all: config.http.max_connections, per_address: config.http.connections_per_address };
        let tls = certificate.is_some();
        let manners = server::Manners { bounds, certificate, grace: HTTP_GRACE };
        let served = tokio::spawn(server::serve(listener, router, stopped, manners));
        Ok(Self { gateway, http, tls, stop, served, kept, reloader })
    }

    /// The parts, for the command line and tests.
    pub fn gateway(&self) -> &Gateway {
        &self.gateway
    }

    /// Where HTTP listens.
    pub fn http(&self) -> SocketAddr {
        self.http
    }

    /// As [`App::http`], with the scheme that is spoken there.
    pub fn url(&self) -> String {
        format!("{}://{}", if self.tls { "https" } else { "http" }, self.http)
    }

    /// What takes up a changed configuration.
    pub fn reloader(&self) -> &Arc<Reloader> {
        &self.reloader
    }

    /// Waits until speech can be made.
    pub async fn ready(&self) {
        self.gateway.ready().await;
    }

    /// Refuses new calls, lets turns end, closes legs and stops; calls that still live after the grace are cut.
    pub async fn drain(self) {
        let cut = self.gateway.close().await;
        if cut > 0 {
            tracing::warn!(calls = cut, "cut off at the end of the grace");
        }
        let _ = self.stop.send(true);
        let _ = self.served.await;
        if let Some(kept) = self.kept {
            let _ = kept.await;
        }
        // Joining threads blocks, so it leaves the runtime.
        let joined = tokio::task::spawn_blocking(move || self.gateway.shutdown());
        let _ = joined.await;
    }
}

/// Enrolment works where the checkpoint has the networks for it; listing and removing work anyway.
fn voices(config: &Config) -> Service {
    let enroller = config.engine.model.as_deref().and_then(|model| match Enroller::open(model) {
        Ok(enroller) => Some(enroller),
        Err(error) => {
            tracing::info!(%error, "voices cannot be enrolled");
            None
        }
    });
    // Enrolment is rare and calls are not: it gets half the cores.
    let threads = std::thread::available_parallelism().map_or(1, |cores| (cores.get() / 2).max(1));
    Service::new(Store::open(&config.engine.voices), enroller, Options { threads, ..Options::default() })
}

/// Opens a database of jobs that could not be opened at the start, once it can be.
async fn retry_jobs(jobs: Jobs, mut stop: watch::Receiver<bool>) {
    loop {
        tokio::select! {
            _ = stop.changed() => return,
            () = tokio::time::sleep(RETRY_JOBS) => {}
        }
        let jobs = jobs.clone();
        // A panic there was logged when it happened.
        let _ = tokio::task::spawn_blocking(move || jobs.retry()).await;
    }
}

/// Makes voices that others put into the folder (`antiphon voice add` beside a running gateway) speak without a restart.
async fn watch_voices(voices: Arc<Service>, engine: Engine, mut stop: watch::Receiver<bool>) {
    loop {
        tokio::select! {
            // Also when the application was dropped without being drained.
            _ = stop.changed() => return,
            () = tokio::time::sleep(REFRESH) => {}
        }
        let voices = voices.clone();
        // A folder may lie on a disk that takes its time.
        let looked = tokio::task::spawn_blocking(move || voices.store().refresh(clock::now())).await;
        if looked.unwrap_or(false) {
            engine.refresh_voices().await;
        }
    }
}
