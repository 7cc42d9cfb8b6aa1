//! What calls of both kinds have in common: how they are set up, spoken on and ended.

use std::time::{Duration, Instant};

use thiserror::Error;
use tokio::sync::{mpsc, oneshot, watch};

use crate::clock;
use crate::sound::ear::Ear;
use crate::sound::heard::Clip;
use crate::wire::codec::{Codec, CodecError, resample, to_i16};

/// Which kind of endpoint a call is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Leg {
    /// SIP and RTP.
    Sip,
    /// WebRTC.
    Webrtc,
}

impl Leg {
    /// Name in lower case, as on the command line and in reports.
    pub fn label(self) -> &'static str {
        match self {
            Leg::Sip => "sip",
            Leg::Webrtc => "webrtc",
        }
    }
}

/// How a call ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum End {
    /// The gateway hung up (BYE, a closed connection).
    Remote,
    /// The caller hung up.
    Local,
    /// The transport failed; the text says how.
    Failed(String),
}

/// Why a call did not come about, or something on it could not be done. Each is a cause in reports.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum CallError {
    /// A socket could not be opened or used.
    #[error("{what}: {source}")]
    Io {
        /// What was tried.
        what: String,
        /// What the system said.
        source: std::io::Error,
    },
    /// The address cannot be called.
    #[error("{0:?} cannot be called: expected sip:USER@HOST[:PORT] or http://HOST[:PORT]")]
    Target(String),
    /// Not answered in time.
    #[error("no answer within {0:?}")]
    Unanswered(Duration),
    /// The gateway refused.
    #[error("refused: {code} {reason}")]
    Refused {
        /// SIP or HTTP status.
        code: u16,
        /// Its phrase.
        reason: String,
    },
    /// The gateway's answer cannot be used.
    #[error("bad answer: {0}")]
    BadAnswer(String),
    /// Sound could not be coded.
    #[error(transparent)]
    Codec(#[from] CodecError),
    /// WebRTC failed.
    #[error("webrtc: {0}")]
    WebRtc(String),
    /// HTTP failed.
    #[error("http: {0}")]
    Http(#[from] reqwest::Error),
    /// The call is over.
    #[error("the call is over")]
    Over,
}

impl CallError {
    /// A short name without particulars, to count failures by.
    pub fn cause(&self) -> String {
        match self {
            CallError::Io { .. } => "io".to_owned(),
            CallError::Target(_) => "target".to_owned(),
            CallError::Unanswered(_) => "unanswered".to_owned(),
            CallError::Refused { code, .. } => format!("refused_{code}"),
            CallError::BadAnswer(_) => "bad_answer".to_owned(),
            CallError::Codec(_) => "codec".to_owned(),
            CallError::WebRtc(_) => "webrtc".to_owned(),
            CallError::Http(_) => "http".to_owned(),
            CallError::Over => "over".to_owned(),
        }
    }

    pub(crate) fn io(what: impl Into<String>) -> impl FnOnce(std::io::Error) -> CallError {
        let what = what.into();
        move |source| CallError::Io { what, source }
    }
}

/// When the steps of setting a call up happened.
#[derive(Clone, Copy, Debug)]
pub struct Setup {
    /// The caller asked (first INVITE, POST of the offer), or was asked.
    pub asked: Instant,
    /// First sign of life: a provisional response, or the answer where there is none.
    pub rang: Instant,
    /// The answer was there.
    pub answered: Instant,
    /// Media may flow: ACK sent, or ICE and DTLS done.
    pub connected: Instant,
}

impl Setup {
    /// From asking to media.
    pub fn time(&self) -> Duration {
        self.connected.saturating_duration_since(self.asked)
    }
}

/// What the gateway reports about what it receives from the caller (RTCP).
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct PeerReport {
    /// Reports received.
    pub reports: u64,
    /// Lost in all.
    pub lost: i32,
    /// Interarrival jitter, seconds.
    pub jitter: f64,
    /// Round trip of the last report that told one.
    pub round_trip: Option<Duration>,
}

/// What changes during a call.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Status {
    /// The gateway holds the caller: it wants no media.
    pub held: bool,
    /// Where the gateway referred the caller to (SIP REFER).
    pub referred: Option<String>,
    /// Digits that came as SIP INFO.
    pub info_digits: String,
    /// What the gateway said last by RTCP.
    pub peer: PeerReport,
    /// The data channel is open.
    pub channel: bool,
    /// How the call ended; `None` while it lives.
    pub end: Option<End>,
}

/// What a call's task is asked to do.
pub(crate) enum Command {
    /// Says samples at the encoder's rate; told when the first frame left.
    Say { pcm: Vec<i16>, began: oneshot::Sender<Instant> },
    /// Presses keys one after the other; told when the last one is released.
    Press { digits: String, done: oneshot::Sender<Instant> },
    /// Stops saying what is not yet said.
    StopSpeaking,
    /// Sends text on the data channel; told when it left.
    Text { text: String, sent: oneshot::Sender<Instant> },
    /// Holds (`true`) or takes back.
    Hold { hold: bool, done: oneshot::Sender<Result<(), CallError>> },
    /// Hangs up.
    Bye,
}

/// The handle of a call of either kind. Dropping it hangs up.
pub struct Call {
    pub(crate) leg: Leg,
    pub(crate) id: Option<String>,
    pub(crate) codec: Codec,
    /// What encoders of this call take.
    pub(crate) say_rate: u32,
    pub(crate) setup: Setup,
    pub(crate) ear: Ear,
    pub(crate) commands: mpsc::Sender<Command>,
    pub(crate) status: watch::Receiver<Status>,
    /// Text that came on the data channel, with its arrival.
    pub(crate) texts: mpsc::Receiver<(Instant, String)>,
    pub(crate) headers: Vec<(String, String)>,
}

impl Call {
    /// SIP or WebRTC.
    pub fn leg(&self) -> Leg {
        self.leg
    }

    /// The gateway's name of the call, where it told one (`X-Antiphon-Call`).
    pub fn id(&self) -> Option<&str> {
        self.id.as_deref()
    }

    /// What is spoken.
    pub fn codec(&self) -> Codec {
        self.codec
    }

    /// When the call was set up.
    pub fn setup(&self) -> Setup {
        self.setup
    }

    /// Headers of the answer (SIP 200 OK or HTTP 201); of the INVITE when the gateway called.
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(n, _)| n.eq_ignore_ascii_case(name)).map(|(_, v)| v.as_str())
    }

    /// What is heard.
    pub fn ear(&self) -> &Ear {
        &self.ear
    }

    /// What changed since the beginning.
    pub fn status(&self) -> Status {
        self.status.borrow().clone()
    }

    /// Waits until `wanted` holds of the status; `false` when it does not within `within`.
    pub async fn status_becomes(&self, within: Duration, wanted: impl FnMut(&Status) -> bool) -> bool {
        let mut status = self.status.clone();
        let result = tokio::time::timeout(within, status.wait_for(wanted)).await;
        matches!(result, Ok(Ok(_)))
    }

    /// Speaks `clip`; gives the instant its first frame left. The rest follows in real time.
    ///
    /// # Errors
    /// The call is over, or the clip's rate cannot be converted.
    pub async fn say(&self, clip: &Clip) -> Result<Instant, CallError> {
        let pcm = resample(&clip.pcm, clip.rate, self.say_rate)?.into_iter().map(to_i16).collect();
        let (began, when) = oneshot::channel();
        self.command(Command::Say { pcm, began }).await?;
        when.await.map_err(|_| CallError::Over)
    }

    /// Presses keys (`0-9*#A-D`); gives the instant the last one is released.
    ///
    /// # Errors
    /// The call is over, or has no way to send digits.
    pub async fn press(&self, digits: &str) -> Result<Instant, CallError> {
        let (done, when) = oneshot::channel();
        self.command(Command::Press { digits: digits.to_owned(), done }).await?;
        when.await.map_err(|_| CallError::Over)
    }

    /// Stops speaking.
    ///
    /// # Errors
    /// The call is over.
    pub async fn stop_speaking(&self) -> Result<(), CallError> {
        self.command(Command::StopSpeaking).await
    }

    /// Sends text on the data channel `agent`; gives the instant it was handed over.
    ///
    /// # Errors
    /// The call is over or has no such channel.
    pub async fn send_text(&self, text: &str) -> Result<Instant, CallError> {
        let (sent, when) = oneshot::channel();
        self.command(Command::Text { text: text.to_owned(), sent }).await?;
        when.await.map_err(|_| CallError::Over)
    }

    /// The next text from the data channel and when it came; `None` when none comes within `within`.
    pub async fn next_text(&mut self, within: Duration) -> Option<(Instant, String)> {
        tokio::time::timeout(within, self.texts.recv()).await.ok().flatten()
    }

    /// Holds the gateway (`true`: it shall send nothing) or resumes. WebRTC calls cannot.
    ///
    /// # Errors
    /// The gateway refused or the call is over.
    pub async fn hold(&self, hold: bool) -> Result<(), CallError> {
        let (done, answer) = oneshot::channel();
        self.command(Command::Hold { hold, done }).await?;
        answer.await.map_err(|_| CallError::Over)?
    }

    /// Hangs up and waits, bounded, until the gateway has agreed.
    pub async fn hang_up(&self) -> End {
        // A full or closed channel means the task is ending anyway.
        let _ = self.command(Command::Bye).await;
        self.ended(Duration::from_secs(5)).await.unwrap_or(End::Local)
    }

    /// Waits for the end of the call; `None` when it still lives after `within`.
    pub async fn ended(&self, within: Duration) -> Option<End> {
        let mut status = self.status.clone();
        let waited = tokio::time::timeout(within, status.wait_for(|s| s.end.is_some())).await;
        match waited {
            Ok(Ok(status)) => status.end.clone(),
            Ok(Err(_)) => Some(End::Failed("the call's task is gone".to_owned())),
            Err(_) => None,
        }
    }

    /// Everything heard since the last time it was taken.
    pub fn take_heard(&self) -> crate::sound::heard::Heard {
        self.ear.take()
    }

    /// The instant of the first audible sample at or after `after`, waiting for it.
    pub async fn onset(&self, after: Instant, within: Duration) -> Option<Instant> {
        self.ear.onset(after, within).await
    }

    /// Listens until nothing has been audible for `quiet`; gives the instant of the last audible sample after
    /// `after` (or `after` itself), `None` when it is still audible after `within`.
    pub async fn silence(&self, after: Instant, quiet: Duration, within: Duration) -> Option<Instant> {
        self.ear.silence(after, quiet, within).await
    }

    async fn command(&self, command: Command) -> Result<(), CallError> {
        // overflow: awaited; the task takes commands within one frame.
        self.commands.send(command).await.map_err(|_| CallError::Over)
    }
}

/// Now, for callers of this crate who have no clock of their own.
pub fn now() -> Instant {
    clock::now()
}
