//! What is tested: the options that `ladder` and `run` share.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use antiphon_loadgen::call::Leg;
use antiphon_loadgen::codec::Codec;
use antiphon_loadgen::prepare::{PrepareError, Target, Via};
use antiphon_loadgen::recognizer::Recognizer;
use antiphon_loadgen::sip::{Credentials, Transport};
use clap::{Args, ValueEnum};

use super::{FAILED, Failure, UNAVAILABLE};

#[derive(Args)]
pub(crate) struct TargetOptions {
    /// `sip:agent@host:port` for telephone calls, `http://host:port` for WebRTC calls, turns and metrics; repeat for both
    #[arg(long = "target", value_name = "URI")]
    pub(crate) targets: Vec<String>,
    /// Kinds of calls, each with a weight if wanted: `sip,webrtc` or `sip=3,webrtc=1`
    #[arg(long, value_delimiter = ',', value_parser = leg)]
    pub(crate) legs: Vec<(Leg, f64)>,
    /// Agent that answers
    #[arg(long)]
    pub(crate) agent: Option<String>,
    /// Bearer token of the gateway's HTTP side
    #[arg(long, env = "ANTIPHON_TOKEN", hide_env_values = true)]
    pub(crate) token: Option<String>,
    /// How turns reach telephone calls
    #[arg(long, value_enum, default_value_t = ViaOption::Auto)]
    pub(crate) via: ViaOption,
    /// Voices that turns are spoken with, one after the other from call to call; left out: the gateway's
    #[arg(long, value_delimiter = ',', value_name = "NAME")]
    pub(crate) voices: Vec<String>,
    /// Where the built-in agent server listens, for a gateway configured to dial it
    #[arg(long, value_name = "ADDRESS")]
    pub(crate) agent_bind: Option<SocketAddr>,
    /// Command that starts the gateway; it is stopped at the end
    #[arg(long, value_name = "COMMAND")]
    pub(crate) spawn: Option<String>,
    /// Process of a gateway that runs already, to sample its CPU and memory
    #[arg(long)]
    pub(crate) pid: Option<u32>,
    /// Signalling of telephone calls
    #[arg(long, value_enum, default_value_t = TransportOption::Udp)]
    pub(crate) transport: TransportOption,
    /// Codecs of telephone calls, favourite first
    #[arg(long, value_delimiter = ',', value_parser = codec, default_value = "pcmu,pcma,g722,opus")]
    pub(crate) codecs: Vec<Codec>,
    /// Protect the media of telephone calls (SRTP by SDES)
    #[arg(long)]
    pub(crate) srtp: bool,
    /// Digest credentials of telephone calls, `user:password`
    #[arg(long, value_name = "USER:PASSWORD", env = "ANTIPHON_SIP_CREDENTIALS", hide_env_values = true)]
    pub(crate) credentials: Option<String>,
    #[command(flatten)]
    pub(crate) recognizer: RecognizerOptions,
    /// Do not compare what is heard with the same text spoken directly
    #[arg(long)]
    pub(crate) no_verify: bool,
}

/// Who says which words were heard.
#[derive(Args)]
pub(crate) struct RecognizerOptions {
    /// Recogniser of the words in sampled turns: the address of a service with `/v1/audio/transcriptions`, or the folder of a
    /// Whisper checkpoint
    #[arg(long, value_name = "URL|FOLDER")]
    pub(crate) recognizer: Option<String>,
    /// Model that the service is asked for
    #[arg(long, value_name = "MODEL", default_value = "whisper-1")]
    pub(crate) recognizer_model: String,
    /// Bearer token of the service
    #[arg(long, env = "ANTIPHON_RECOGNIZER_TOKEN", hide_env_values = true)]
    pub(crate) recognizer_token: Option<String>,
}

impl RecognizerOptions {
    pub(crate) fn named(&self) -> Option<Recognizer> {
        let name = self.recognizer.as_deref()?;
        Some(Recognizer::named(name, &self.recognizer_model, self.recognizer_token.clone()))
    }
}

#[derive(Clone, Copy, ValueEnum)]
pub(crate) enum ViaOption {
    Auto,
    Http,
    Agent,
    Greeting,
}

#[derive(Clone, Copy, ValueEnum)]
pub(crate) enum TransportOption {
    Udp,
    Tcp,
    Tls,
}

impl TargetOptions {
    /// The target, the gateway's log beside the report `output`.
    pub(crate) fn target(&self, output: &Path) -> Target {
        let credentials = self.credentials.as_ref().map(|pair| {
            let (username, password) = pair.split_once(':').unwrap_or((pair, ""));
            Credentials { username: username.to_owned(), password: password.to_owned() }
        });
        Target {
            addresses: self.targets.clone(),
            token: self.token.clone(),
            agent: self.agent.clone(),
            legs: self.legs.clone(),
            via: match self.via {
                ViaOption::Auto => Via::Auto,
                ViaOption::Http => Via::Http,
                ViaOption::Agent => Via::Agent,
                ViaOption::Greeting => Via::Greeting,
            },
            voices: self.voices.clone(),
            agent_bind: self.agent_bind,
            spawn: self.spawn.clone(),
            log: log_beside(output),
            transport: match self.transport {
                TransportOption::Udp => Transport::Udp,
                TransportOption::Tcp => Transport::Tcp,
                TransportOption::Tls => Transport::Tls,
            },
            codecs: self.codecs.clone(),
            srtp: self.srtp,
            credentials,
            verify: !self.no_verify,
            recognizer: self.recognizer.named(),
            ..Target::default()
        }
    }
}

/// `ladder.gateway.log` of `ladder.json`.
pub(crate) fn log_beside(report: &Path) -> PathBuf {
    report.with_extension("gateway.log")
}

pub(crate) fn refused(error: PrepareError) -> Failure {
    let code = match error {
        PrepareError::Usage(_) => 2,
        PrepareError::NotReady(..) => UNAVAILABLE,
        _ => FAILED,
    };
    Failure::new(code, error.to_string())
}

fn leg(text: &str) -> Result<(Leg, f64), String> {
    let (name, weight) = text.split_once('=').unwrap_or((text, "1"));
    let leg = match name {
        "sip" => Leg::Sip,
        "webrtc" => Leg::Webrtc,
        other => return Err(format!("{other:?} is neither sip nor webrtc")),
    };
    match weight.parse::<f64>() {
        Ok(weight) if weight >= 0.0 && weight.is_finite() => Ok((leg, weight)),
        _ => Err(format!("{weight:?} is no weight")),
    }
}

pub(super) fn codec(text: &str) -> Result<Codec, String> {
    let known = || Codec::ALL.map(Codec::label).join(", ");
    Codec::named(text).ok_or_else(|| format!("{text:?} is none of {}", known()))
}
