//! The gateway put together: builds the parts from a configuration, serves, drains.

#[cfg(feature = "bench")]
pub mod bench;
pub mod descriptors;
mod ears;
pub mod engines;
mod handover;
mod phrases;
mod reload;
pub(crate) mod workers;

use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{mpsc, watch};
use tokio_util::sync::CancellationToken;

pub use self::reload::{Reloader, Report};

use self::engines::Choice;
use crate::acme::Keeper;
use crate::agent::Agents;
use crate::agent::config::Overload;
use crate::agent::relay::VoiceRule;
use crate::batch::Jobs;
use crate::call::{CallConfig, Calls, Grace};
use crate::certificate::Certificate;
use crate::clock;
use crate::cluster::{Nodes, Sip, Told};
use crate::config::{self, Config};
use crate::gateway::outgoing::Outgoing;
use crate::gateway::recent::{self, Recent};
use crate::gateway::tenants::Tenants;
use crate::gateway::webhooks::Webhooks;
use crate::gateway::{self, Drain, Gateway, Room};
use crate::handover::{Name, Place, from_systemd, listener};
use crate::recording::Recordings;
use crate::records::{self, RecordError, Records};
use crate::server;
use crate::sip::{Addresses, Beside, Endpoint};
use crate::synth::device::{Engine, Phase, Recovery};
use crate::telemetry;
use crate::voice::api::Service;
use crate::voice::copies::{Copies, Library};
use crate::voice::enrol::{Enroller, Options};
use crate::voice::store::{REFRESH, Store};

/// Calls that may ring while the gateway is busy accepting others; more are answered 503 by the SIP part.
const RINGING: usize = 256;
/// How often a database of jobs that cannot be used is tried again.
const RETRY_JOBS: Duration = Duration::from_secs(30);
/// How often gauges are read off the parts where a collector gets metrics.
const GAUGES: Duration = Duration::from_secs(10);
/// How long requests that are under way may take when everything else has stopped.
const HTTP_GRACE: Duration = Duration::from_secs(1);
/// How long receivers of events may take for the last ones.
const WEBHOOK_GRACE: Duration = Duration::from_secs(5);

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
    /// What systemd passes cannot be used.
    #[error("{0}")]
    Systemd(String),
    /// The gateway that runs here keeps its place.
    #[error("the place of the gateway that runs here cannot be taken: {0}")]
    Handover(String),
    /// What was to recognise callers is not there.
    #[error("{0}")]
    Recognizer(String),
}

/// Where the place of a gateway comes from, and where it goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Succession {
    /// Its sockets are its own, and no other process takes them over.
    None,
    /// It uses what systemd passes, and another may take its place. With `takeover` it takes the place of the one that runs
    /// with its state directory, if one does.
    Serve {
        /// As said.
        takeover: bool,
    },
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
    webhooks: Webhooks,
    /// Another gateway has the place, and no call is left here.
    left: CancellationToken,
}

impl App {
    /// Binds every socket, starts every part and serves. Speech is ready when [`App::ready`] returns.
    ///
    /// # Errors
    /// The first part that cannot start; what was started is stopped again by being dropped.
    pub async fn start(config: Config) -> Result<Self, StartError> {
        Self::start_in_place(config, Succession::None).await
    }

    /// As [`App::start`], with sockets of others as `succession` says.
    ///
    /// # Errors
    /// As there; what is passed does not fit, or the gateway that runs does not give its place.
    pub async fn start_in_place(config: Config, succession: Succession) -> Result<Self, StartError> {
        let config = config.with_state_dir(config::variables())?;
        let seat = ears::seat(&config.recognizer).map_err(StartError::Recognizer)?;
        let (mut left, hardware) = (seat.clone(), engines::hardware(&config.engine)?);
        let choice = engines::choose_beside(&config.engine, None, &mut left)?;
        let hearing = ears::place(seat.map(|(seat, _)| seat), left, hardware);
        Self::start_all(config, choice, hearing, succession).await
    }

    /// As [`App::start`], with voices that were chosen elsewhere.
    ///
    /// # Errors
    /// As there.
    pub async fn start_with(config: Config, choice: Choice) -> Result<Self, StartError> {
        Self::start_all(config, choice, ears::Place::Cpu, Succession::None).await
    }

    async fn start_all(
        config: Config,
        mut choice: Choice,
        hearing: ears::Place,
        succession: Succession,
    ) -> Result<Self, StartError> {
        let mut config = config.with_state_dir(config::variables())?;
        tracing::info!("voices: {}; jobs: {}", config.engine.voices.display(), config.batch.database);
        let paths = [("batch.sqlite", config.batch.database.path()), ("voices", Some(&*config.engine.voices))];
        for (old, path) in paths.into_iter().filter_map(|(old, path)| Some((old, path?))) {
            if Path::new(old).exists() && path != Path::new(old) {
                tracing::warn!("`{old}` in the current folder is not used any more: move it to {}", path.display());
            }
        }
        let metrics = telemetry::metrics::recorder();
        let mut passed = match succession {
            Succession::Serve { .. } => {
                let names = config::variables().find(|(name, _)| name == "LISTEN_FDNAMES");
                from_systemd(&names.unwrap_or_default().1).map_err(StartError::Systemd)?
            }
            Succession::None => Vec::new(),
        };
        let (mut started, mut predecessor) = (None, None);
        if succession == (Succession::Serve { takeover: true }) {
            // Voices first: until they speak the other one goes on as ever.
            let engine = start_engine(&config, &mut choice)?;
            engine.ready().await;
            let status = engine.status();
            let ready = || status.iter().filter(|device| device.phase == Phase::Ready);
            // The gateway that runs may hold what memory this one found none of: its voice is not given up for the spare.
            let speaks = ready().any(|device| device.caps.as_ref().is_some_and(|caps| !choice.is_spare(caps)));
            let instead = ready().next().is_some();
            started = Some(engine);
            if let Some((other, sockets)) = handover::Predecessor::ask(&config.state.dir).await? {
                if !speaks {
                    let what = if instead { "only the spare voice" } else { "no voice" };
                    return Err(StartError::Handover(format!("{what} of this one speaks; its log says why")));
                }
                tracing::info!("this gateway takes the place of the one that runs");
                // Those of systemd would be the same ones.
                (predecessor, passed) = (Some(other), sockets);
            }
        }
        let place = Place::new(passed, predecessor.is_none(), succession != Succession::None);
        let address = config.http.bind;
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
        let listener =
            place.listener(Name::Http, address, listener).map_err(|source| StartError::Http { address, source })?;
        let http = listener.local_addr().map_err(|source| StartError::Http { address, source })?;

        let nodes = Nodes::new(&config.cluster, http.port()).map_err(StartError::Cluster)?;
        // Ids tell where their object is.
        let node = nodes.as_ref().map(|nodes| nodes.name().clone());
        (config.webrtc.node, config.batch.node) = (node.clone(), node);

        let engine = match started {
            Some(engine) => engine,
            None => start_engine(&config, &mut choice)?,
        };
        engine.keep_phrases(&config.engine.phrases);
        let voices = Arc::new(voices(&config));
        let copies = Copies::open(&config.engine.voices);
        let library = Library::new(voices.store().clone(), copies.clone());
        engine.lend_voices(match nodes.clone() {
            Some(nodes) => library.with_others(Arc::new(workers::Others(nodes))),
            None => library,
        });
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
        let ears = ears::choose(&config.recognizer, &config.turns, hearing).await.map_err(StartError::Recognizer)?;
        let calls =
            Calls::with_ears(config.call.clone(), Arc::new(engine.clone()), ears).map_err(StartError::Threads)?;
        let records = Records::start_beside(config.records.clone(), predecessor.is_some())?;
        records.count(engine.meter());
        if let Some(fallback) = &fallback {
            records.count(fallback.meter());
        }
        let webhooks = Webhooks::start(&config.webhook);
        calls.observe(Arc::new((records.clone(), webhooks.clone())));
        let tenants = Tenants::new(config.tenant_rules());
        // A restart gives no tenant another day.
        let counted = records.clone();
        let used = tokio::task::spawn_blocking(move || counted.usage_today()).await;
        let used = match used.unwrap_or_else(|error| Err(RecordError::Thread(std::io::Error::other(error)))) {
            // Calls do not wait for a database; until it can be read each day begins anew.
            Err(error @ (RecordError::Postgres(_) | RecordError::Database(_))) => {
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
        let webrtc = crate::webrtc::Gateway::start_at(config.webrtc.clone(), &place).await?;
        let room = Room::new(calls.clone(), engine.clone(), fallback.clone(), nodes.clone());
        let (incoming, ringing) = mpsc::channel(RINGING);
        let (refused, told_refused) = mpsc::channel(RINGING);
        let sip = if config.sip.listeners().iter().any(|(_, address)| address.is_some()) {
            let neighbours = Some(Arc::new(room.clone()) as _);
            let beside = Beside { place: place.clone(), neighbours, names: None, refused: Some(refused) };
            Some(Arc::new(Endpoint::start_beside(config.sip.clone(), config.rtp, incoming, beside).await?))
        } else {
            None
        };
        if let Some(name) = place.unused().first() {
            let (name, key) = (name.as_str(), name.key());
            let message = format!("a socket `{name}` is passed, which this configuration does not use: set {key}");
            return Err(if predecessor.is_some() {
                StartError::Handover(message)
            } else {
                StartError::Systemd(message)
            });
        }

        config.batch.lexicon = agents.current_lexicon();
        let jobs = Jobs::new(config.batch.clone(), engine.clone());
        let gateway = Gateway {
            jobs,
            voices,
            calls,
            outgoing: Outgoing::default(),
            dialers: gateway::dialers::Dialers::default(),
            records,
            recordings: Recordings::start(config.recording.clone()).map_err(StartError::Threads)?,
            webhooks: webhooks.clone(),
            agents,
            engine,
            fallback,
            sip,
            dispatcher: gateway::Dispatcher::default(),
            webrtc,
            recent: Recent::default(),
            metrics,
            tenants,
            room,
            nodes,
            place: place.clone(),
            default_agent: config.sip.agent.clone().unwrap_or_else(|| "demo".into()).into(),
            drain: drain(&config.call),
        };
        // Before the first call; it holds nothing that holds the agents.
        let rights = gateway.rights();
        gateway.agents.hold_to(VoiceRule::new(move |tenant, voice| rights.may_name(tenant, voice)));
        let (stop, stopped) = watch::channel(false);
        tokio::spawn(phrases::render(gateway.engine.clone(), told_phrases, stop.subscribe()));
        tokio::spawn(gateway::answer(gateway.clone(), ringing));
        tokio::spawn(gateway::refused(gateway.clone(), told_refused));
        if let Some(keeper) = keeper {
            tokio::spawn(keeper.keep(stop.subscribe()));
        }
        tokio::spawn(gateway::bridge::serve(gateway.clone(), stop.subscribe()));
        if let Some(deliveries) = gateway.records.deliveries() {
            tokio::spawn(records::deliver(deliveries, stop.subscribe()));
        }
        tokio::spawn(recent::follow(gateway.recent.clone(), gateway.calls.events(), stop.subscribe()));
        tokio::spawn(telemetry::metrics::keep(metrics.clone(), stop.subscribe()));
        if config.log.otlp.is_some() {
            tokio::spawn(server::keep_gauges(gateway.clone(), GAUGES, stop.subscribe()));
        }
        tokio::spawn(retry_jobs(gateway.jobs.clone(), stop.subscribe()));
        tokio::spawn(watch_voices(gateway.voices.clone(), gateway.engine.clone(), stop.subscribe()));
        let kept = gateway.nodes.clone().map(|nodes| {
            let (room, sip, enrolled) = (gateway.room.clone(), gateway.sip.clone(), gateway.voices.clone());
            let tell = move || {
                let Addresses { udp, tcp, tls } = sip.as_ref().map(|sip| sip.addresses()).unwrap_or_default();
                let withdrawn = sip.as_ref().is_some_and(|sip| sip.is_withdrawn());
                Told { sip: Sip { udp, tcp, tls }, load: room.load(), voices: workers::enrolled(&enrolled), withdrawn }
            };
            let trunks = config.sip.trunk.iter().filter(|trunk| trunk.register).map(|trunk| trunk.name.clone());
            let (place, stop, trunks) = (place.clone(), stop.subscribe(), trunks.collect());
            tokio::spawn(tell_others(nodes, tell, trunks, place, stop))
        });
        if let Some(nodes) = gateway.nodes.clone() {
            let (engine, cluster) = (gateway.engine.clone(), config.cluster.clone());
            tokio::spawn(workers::follow(nodes, engine, cluster, stop.subscribe()));
            tokio::spawn(workers::forget_copies(copies, gateway.engine.clone(), stop.subscribe()));
        }
        // A request for another node's call may be the first.
        if let Some(nodes) = &gateway.nodes {
            nodes.look().await;
        }
        let policies = server::Policies::new(&config.http).among(gateway.nodes.clone());
        let reloader = Reloader::new(&config, policies.clone(), gateway.agents.clone(), gateway.tenants.clone());
        let reloader = Arc::new(reloader.telling(tell_phrases, webhooks.clone()).steering(gateway.clone()));
        let router = server::router(gateway.clone(), policies, reloader.clone());
        let bounds =
            server::Bounds { all: config.http.max_connections, per_address: config.http.connections_per_address };
        let tls = certificate.is_some();
        let manners = server::Manners { bounds, certificate, grace: HTTP_GRACE, place: place.clone() };
        let served = tokio::spawn(server::serve(listener, router.clone(), stopped, manners));
        let follows = predecessor.is_some();
        let answers = handover::Answers { dir: config.state.dir.clone(), router, stop: stop.subscribe() };
        if let Some(predecessor) = predecessor {
            predecessor.relieve(&place, answers.clone()).await?;
        }
        let left = CancellationToken::new();
        if succession != Succession::None && !config.state.dir.as_os_str().is_empty() {
            let gateway = gateway.clone();
            tokio::spawn(handover::Offer { gateway, answers, follows, left: left.clone() }.stand());
        }
        Ok(Self { gateway, http, tls, stop, served, kept, reloader, webhooks, left })
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

    /// Waits until another gateway has taken the place of this one and the last call here has ended.
    pub async fn left(&self) {
        self.left.cancelled().await;
    }

    /// Says that no calls are taken, refuses them after the notice, lets turns end, closes legs and stops; calls that still live
    /// after the grace are cut.
    pub async fn drain(self) {
        self.end(true).await;
    }

    /// As [`App::drain`], without the notice.
    pub async fn drain_at_once(self) {
        self.end(false).await;
    }

    async fn end(self, notice: bool) {
        let notice = if notice { self.gateway.drain.notice } else { Duration::ZERO };
        let cut = self.gateway.close(notice).await;
        if cut > 0 {
            tracing::warn!(calls = cut, "cut off at the end of the grace");
        }
        // After the last event of the last call.
        self.webhooks.close(WEBHOOK_GRACE).await;
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

/// Tells other gateways of this one while it has the place: who has it goes by the name of the node.
async fn tell_others(
    nodes: Nodes,
    tell: impl Fn() -> Told + Clone + Send,
    trunks: Vec<String>,
    place: Place,
    mut stop: watch::Receiver<bool>,
) {
    loop {
        tokio::select! {
            // An error says that the application was dropped without being drained.
            _ = stop.wait_for(|stop| *stop) => return,
            () = place.until(true) => {}
        }
        let (end, ended) = watch::channel(false);
        let keeping = nodes.clone().keep(tell.clone(), trunks.clone(), ended, || place.is_held());
        let mut keeping = std::pin::pin!(keeping);
        tokio::select! {
            () = &mut keeping => return,
            _ = stop.wait_for(|stop| *stop) => {}
            () = place.until(false) => {}
        }
        end.send_replace(true);
        keeping.await;
    }
}

fn drain(config: &CallConfig) -> Drain {
    let seconds = Duration::from_secs;
    let grace = Grace { turns: seconds(config.drain_grace_s), bridged: seconds(config.drain_bridged_s) };
    Drain { notice: seconds(config.drain_notice_s), grace }
}

/// Starts what speaks, here and on other machines. Takes the loaders of `choice`.
fn start_engine(config: &Config, choice: &mut Choice) -> Result<Engine, StartError> {
    for reason in &choice.reasons {
        tracing::info!("{reason}");
    }
    let worker = |address: &String| config.cluster.worker(address);
    let workers = config.engine.workers.iter().map(worker).collect::<Result<Vec<_>, _>>();
    let workers = workers.map_err(StartError::Worker)?;
    for worker in &workers {
        tracing::info!("the worker {} speaks where it can be reached", worker.address);
    }
    let loaders = std::mem::take(&mut choice.loaders);
    Ok(Engine::start_with_workers(workers, loaders, config.scheduler.clone(), Recovery::default())?)
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
