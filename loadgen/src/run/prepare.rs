//! From the words of a command line or a scenario to a [`Plan`]: targets, a gateway to start, how turns get there.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use serde_json::Value;
use thiserror::Error;

use crate::caller::call::{CallError, Leg};
use crate::caller::relay::Impairment;
use crate::caller::rtc;
use crate::caller::sip;
use crate::caller::speak;
use crate::clock;
use crate::turns::exchange::{self, Plan, Trigger};
use crate::under_test::dispatch::Dispatch;
use crate::under_test::gateway::Gateway;
use crate::under_test::process::Spawned;
use crate::under_test::recognizer::Recognizer;
use crate::wire::codec::Codec;

/// How turns reach telephone calls.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Via {
    /// Over HTTP if there is an HTTP address, else by an agent server if it was given an address, else the greeting.
    #[default]
    Auto,
    /// `POST /v1/calls/{id}/turns`.
    Http,
    /// The gateway dials our agent server.
    Agent,
    /// The greeting is the turn.
    Greeting,
    /// Callers speak, and the agent that they call answers.
    Speech,
}

/// What is to be tested, in words.
#[derive(Clone, Debug)]
pub struct Target {
    /// `sip:agent@host:port` and `http://host:port`, either or both.
    pub addresses: Vec<String>,
    /// Bearer token of the HTTP side.
    pub token: Option<String>,
    /// Agent for WebRTC calls, and for telephone calls whose address was derived.
    pub agent: Option<String>,
    /// Kinds of calls; empty: all there are addresses for.
    pub legs: Vec<(Leg, f64)>,
    /// How turns reach telephone calls.
    pub via: Via,
    /// What turns are spoken with, one voice after the other from call to call; empty: the gateway's.
    pub voices: Vec<String>,
    /// Where our agent server listens.
    pub agent_bind: Option<SocketAddr>,
    /// Command that starts the gateway.
    pub spawn: Option<String>,
    /// Where the output of that gateway goes.
    pub log: PathBuf,
    /// Signalling of telephone calls.
    pub transport: sip::Transport,
    /// Codecs of telephone calls.
    pub codecs: Vec<Codec>,
    /// SRTP on telephone calls.
    pub srtp: bool,
    /// Digest credentials of telephone calls.
    pub credentials: Option<sip::Credentials>,
    /// What the network does to media.
    pub impairment: Option<Impairment>,
    /// Our own address.
    pub address: IpAddr,
    /// Compare what is heard with the same text spoken directly.
    pub verify: bool,
    /// Says which words are in the turns of the sample.
    pub recognizer: Option<Recognizer>,
}

impl Default for Target {
    fn default() -> Self {
        Target {
            addresses: Vec::new(),
            token: None,
            agent: None,
            legs: Vec::new(),
            via: Via::Auto,
            voices: Vec::new(),
            agent_bind: None,
            spawn: None,
            log: PathBuf::from("gateway.log"),
            transport: sip::Transport::Udp,
            codecs: sip::Config::default().codecs,
            srtp: false,
            credentials: None,
            impairment: None,
            address: IpAddr::V4(Ipv4Addr::LOCALHOST),
            verify: true,
            recognizer: None,
        }
    }
}

/// Why a test cannot begin.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum PrepareError {
    /// The words contradict themselves or lack something.
    #[error("{0}")]
    Usage(String),
    /// The gateway did not become ready.
    #[error("the gateway is not ready after {0:?}: {1}")]
    NotReady(Duration, String),
    /// Something could not be opened.
    #[error(transparent)]
    Call(#[from] CallError),
}

/// Everything a test needs.
pub struct Prepared {
    /// How calls are made.
    pub plan: Arc<Plan>,
    /// Kinds of calls and their weights.
    pub legs: Vec<(Leg, f64)>,
    /// The gateway, if it was started here.
    pub spawned: Option<Spawned>,
    /// What a report should say of it.
    pub about: About,
}

/// What is tested, for the report.
pub struct About {
    /// What the gateway says about its devices.
    pub devices: Value,
    /// What a reader of the report should know.
    pub notes: Vec<String>,
    /// What is called.
    pub targets: Vec<String>,
}

/// A model may take its time to load; nothing else does.
const READY: Duration = Duration::from_secs(180);

/// The agent that a gateway started here is configured with.
const AGENT: &str = "loadgen";
const AGENT_URL: &str = "ANTIPHON_AGENT__LOADGEN__URL";

/// Starts the gateway if asked to, waits until it is ready, and gathers what calls need. `texts` are spoken directly
/// once, as references.
///
/// # Errors
/// The target lacks something, or the gateway does not become ready.
pub async fn prepare(target: &Target, texts: &[&str]) -> Result<Prepared, PrepareError> {
    let usage = |text: &str| PrepareError::Usage(text.to_owned());
    let mut sip_target = None;
    let mut http = None;
    for address in &target.addresses {
        match address.split(':').next() {
            Some("sip" | "sips") => sip_target = Some(address.clone()),
            Some("http" | "https") => http = Some(address.trim_end_matches('/').to_owned()),
            _ => return Err(PrepareError::Call(CallError::Target(address.clone()))),
        }
    }
    let gateway = http.as_deref().map(|base| Gateway::at(base, target.token.clone())).transpose()?;
    let mut legs = target.legs.clone();
    if legs.is_empty() {
        legs.extend(sip_target.iter().map(|_| (Leg::Sip, 1.0)));
        legs.extend(http.iter().map(|_| (Leg::Webrtc, 1.0)));
    }
    // A gateway that is started here is given an agent without a greeting, unless another is asked for.
    let agent = target.agent.clone().or(target.spawn.as_ref().map(|_| AGENT.to_owned()));
    let wants = |leg| legs.iter().any(|(l, weight)| *l == leg && *weight > 0.0);
    if legs.is_empty() {
        return Err(usage("no target: give --target sip:USER@HOST:PORT or --target http://HOST:PORT, or both"));
    }
    if wants(Leg::Webrtc) && http.is_none() {
        return Err(usage("WebRTC calls need an http: target"));
    }
    if wants(Leg::Sip) && sip_target.is_none() {
        let host = gateway.as_ref().and_then(Gateway::host).unwrap_or("127.0.0.1");
        sip_target = Some(format!("sip:{}@{host}:5060", agent.as_deref().unwrap_or("demo")));
    }

    let trigger = match (target.via, &gateway, target.agent_bind) {
        (Via::Http, None, _) => return Err(usage("turns over HTTP need an http: target")),
        (Via::Http, ..) | (Via::Auto, Some(_), None) => Trigger::Http,
        (Via::Agent, _, bind) | (Via::Auto, _, bind @ Some(_)) => {
            let bind = bind.unwrap_or_else(|| SocketAddr::new(target.address, 0));
            Trigger::Agent(Arc::new(Dispatch::bind(bind).await?))
        }
        (Via::Greeting, ..) | (Via::Auto, None, None) => Trigger::Greeting,
        (Via::Speech, ..) => Trigger::Speech,
    };

    let mut notes = Vec::new();
    let mut environment = Vec::new();
    if let Trigger::Agent(dispatch) = &trigger {
        environment.push((AGENT_URL.to_owned(), dispatch.url().to_owned()));
        notes.push(format!("turns are sent by the built-in agent server {}", dispatch.url()));
    }
    if environment.is_empty() {
        // Who speaks is answered by an agent that repeats it.
        let agent = if matches!(trigger, Trigger::Speech) { "builtin:demo" } else { "builtin:client" };
        environment.push((AGENT_URL.to_owned(), agent.to_owned()));
    }
    let mut spawned = match &target.spawn {
        Some(command) => {
            notes.push(format!("gateway started by: {command}; its log: {}", target.log.display()));
            Some(Spawned::start(command, &environment, target.log.clone())?)
        }
        None => None,
    };
    let devices = wait_until_ready(gateway.as_ref(), spawned.as_mut()).await?;

    let mut references = Default::default();
    if matches!(trigger, Trigger::Speech) {
        notes.push("callers speak: first audio is mouth to ear, and what is answered is not known".to_owned());
    } else if let (Some(gateway), true, true) = (&gateway, target.verify, target.voices.is_empty()) {
        let (found, why_not) = exchange::references(gateway, texts).await;
        references = found;
        notes.extend(why_not);
    } else {
        notes.push("no reference speech: silence and noise are noticed, wrong words are not".to_owned());
    }
    if let Some(recognizer) = &target.recognizer {
        notes.push(format!("words of sampled turns are those that {} understands", recognizer.about()));
    }
    if matches!(trigger, Trigger::Greeting) && wants(Leg::Sip) {
        notes.push("telephone calls: the greeting is the turn, measured from the answer".to_owned());
    }
    if let Some(what) = &target.impairment {
        notes.push(format!("media passes a relay: {what:?}"));
    }
    let webrtc = http.as_ref().map(|url| rtc::Config {
        agent,
        token: target.token.clone(),
        address: target.address,
        // Browsers that say nothing send next to nothing (DTX); what they send costs both sides the same.
        idle: speak::Idle::KeepAlive(Duration::from_millis(400)),
        opus_rate: 16_000,
        impairment: target.impairment,
        ..rtc::Config::new(url)
    });
    let plan = Plan {
        sip_target: sip_target.clone(),
        sip: sip::Config {
            address: target.address,
            transport: target.transport,
            codecs: target.codecs.clone(),
            srtp: target.srtp,
            credentials: target.credentials.clone(),
            opus_rate: 16_000,
            impairment: target.impairment,
            ..sip::Config::default()
        },
        webrtc,
        gateway,
        trigger,
        voices: target.voices.clone(),
        references: Arc::new(references),
        recognizer: target.recognizer.clone(),
        buffer: Duration::from_millis(60),
        patience: Duration::from_secs(30),
    };
    let targets = sip_target.into_iter().filter(|_| wants(Leg::Sip)).chain(http).collect();
    Ok(Prepared { plan: Arc::new(plan), legs, spawned, about: About { devices, notes, targets } })
}

async fn wait_until_ready(gateway: Option<&Gateway>, mut spawned: Option<&mut Spawned>) -> Result<Value, PrepareError> {
    let Some(gateway) = gateway else { return Ok(Value::Null) };
    // A gateway that runs already is ready or is not.
    let patience = if spawned.is_some() { READY } else { Duration::from_secs(5) };
    let deadline = clock::now() + patience;
    loop {
        let why = match gateway.ready().await {
            Ok(state) => return Ok(state["devices"].clone()),
            // Other gateways have no such route; they are taken as ready.
            Err(CallError::Refused { code: 404, .. }) => return Ok(Value::Null),
            Err(error) => error.to_string(),
        };
        if let Some(spawned) = spawned.as_deref_mut()
            && let Some(status) = spawned.exited()
        {
            return Err(PrepareError::NotReady(patience, format!("it ended ({status}): {}", spawned.last_words())));
        }
        if clock::now() >= deadline {
            return Err(PrepareError::NotReady(patience, why));
        }
        clock::sleep_until(clock::now() + Duration::from_millis(100)).await;
    }
}
