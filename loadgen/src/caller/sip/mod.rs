//! A SIP telephone: places a call to a gateway, or answers one from it.
//!
//! [`Caller`] is bound to its addresses first, so that a gateway can be told [`Caller::uri`]; [`Caller::call`] or
//! [`Caller::answer`] then make the one call it is for. Signalling is a machine without I/O ([`ua`]), written apart
//! from the gateway's stack; media is RTP with RTCP on the next port, SRTP by SDES where asked for.

mod auth;
mod dialog;
mod link;
mod media;
pub(crate) mod message;
mod task;
mod ua;

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::time::Duration;

pub use self::auth::Credentials;
use self::link::Link;
use self::media::Media;
use crate::caller::call::{Call, CallError};
use crate::caller::relay::Impairment;
use crate::caller::speak::Idle;
use crate::wire::codec::Codec;

/// What signalling runs over.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Transport {
    /// Datagrams.
    #[default]
    Udp,
    /// A connection.
    Tcp,
    /// A connection under TLS. The gateway's certificate is not verified: this is a test instrument.
    Tls,
}

/// How the telephone is set up.
#[derive(Clone, Debug)]
pub struct Config {
    /// Own address for signalling and media.
    pub address: IpAddr,
    /// What signalling runs over.
    pub transport: Transport,
    /// User part of its own address.
    pub user: String,
    /// For a gateway that asks who calls.
    pub credentials: Option<Credentials>,
    /// Codecs, favourite first.
    pub codecs: Vec<Codec>,
    /// SRTP by SDES: offered and required.
    pub srtp: bool,
    /// More headers for the INVITE, or for the 200 OK when answering.
    pub headers: Vec<(String, String)>,
    /// What is sent while nothing is said.
    pub idle: Idle,
    /// Opus is decoded to this rate.
    pub opus_rate: u32,
    /// How long the other side may take to answer.
    pub patience: Duration,
    /// How long it rings before it is answered (when called).
    pub ringing: Duration,
    /// Media passes through a relay that does this to it.
    pub impairment: Option<Impairment>,
}

impl Default for Config {
    fn default() -> Self {
        Config {
            address: IpAddr::V4(Ipv4Addr::LOCALHOST),
            transport: Transport::Udp,
            user: "caller".to_owned(),
            credentials: None,
            codecs: vec![Codec::Pcmu, Codec::Pcma, Codec::G722, Codec::Opus],
            srtp: false,
            headers: Vec::new(),
            idle: Idle::Continuous,
            opus_rate: 24_000,
            patience: Duration::from_secs(20),
            ringing: Duration::ZERO,
            impairment: None,
        }
    }
}

/// The `Authorization` that answers the challenge of a `WWW-Authenticate` value; `None` when it is no digest by MD5.
pub(crate) fn answer_challenge(challenge: &str, account: &Credentials, method: &str, uri: &str) -> Option<String> {
    auth::answer(challenge, account, method, uri, "0a4f113b")
}

/// A telephone with its addresses, without a call yet.
pub struct Caller {
    config: Config,
    link: Link,
    media: Media,
}

impl Caller {
    /// Opens the sockets.
    ///
    /// # Errors
    /// An address is not there or no ports are free.
    pub async fn bind(config: Config) -> Result<Caller, CallError> {
        let link = Link::bind(config.address, config.transport).await?;
        let media = Media::bind(&config).await?;
        Ok(Caller { config, link, media })
    }

    /// Where it can be called: `sip:user@address:port`.
    pub fn uri(&self) -> String {
        let transport = match self.config.transport {
            Transport::Udp => "",
            Transport::Tcp => ";transport=tcp",
            Transport::Tls => ";transport=tls",
        };
        format!("sip:{}@{}{transport}", self.config.user, self.link.local())
    }

    /// Where signalling is received.
    pub fn local_addr(&self) -> SocketAddr {
        self.link.local()
    }

    /// Calls `target` (`sip:user@host[:port]`) and waits for the answer. Cancelled or timed out, the INVITE is
    /// cancelled too.
    ///
    /// # Errors
    /// No answer within the configured patience, the other side refuses, or its answer cannot be used.
    pub async fn call(self, target: &str) -> Result<Call, CallError> {
        task::call(self.config, self.link, self.media, target).await
    }

    /// Waits for a call within `within` and answers it.
    ///
    /// # Errors
    /// No call in time, or the offer cannot be used.
    pub async fn answer(self, within: Duration) -> Result<Call, CallError> {
        task::answer(self.config, self.link, self.media, within).await
    }
}
