//! The sending side of a call: what agents, routes and tests hold.

use std::collections::BTreeMap;
use std::sync::{Arc, Weak};
use std::time::Duration;

use serde::Serialize;
use tokio::sync::{broadcast, mpsc, oneshot};

use super::command::Command;
use super::info::{CallInfo, MediaTap, Shared};
use super::machine::WholeTurn;
use super::settings::Interruptible;
use super::speech::Speech;
use super::{BargeInOutcome, CallEvent, CallId, Direction, EndReason, Messages, TurnId};
use crate::hear::ear::Listen;
use crate::telemetry::context::TraceContext;
use crate::text::{Lexicon, Normalise};
use crate::turn::{Markup, Streaming};

/// Longest data that an agent hands on: it is kept in the call's record.
pub const MAX_HANDOFF: usize = 64 << 10;

/// Longest prompt of a caller: ten minutes of speech have about as much.
pub const MAX_PROMPT: usize = 8 << 10;

/// What is known of a call before it begins. Never changes.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct CallMeta {
    /// Its id.
    pub id: CallId,
    /// Who began it.
    pub direction: Direction,
    /// The caller's address.
    pub from: String,
    /// The called address.
    pub to: String,
    /// Name of the agent that supplies the text.
    pub agent: String,
    /// Selected signalling headers (SIP `X-`), or the metadata of a page's token, for the agent.
    pub headers: BTreeMap<String, String>,
    /// Whose rate limits and fairness its speech counts to: the name of the API token; may be empty.
    #[serde(skip)]
    pub tenant: Arc<str>,
    /// Its span, for what is done for it elsewhere.
    #[serde(skip)]
    pub trace: Option<TraceContext>,
}

/// A whole turn to speak.
#[derive(Clone, Debug, PartialEq)]
pub struct TurnRequest {
    /// The agent's name for it; made here when absent.
    pub id: Option<TurnId>,
    /// What to say.
    pub text: String,
    /// Cut off and clear what is being said first.
    pub interrupt: bool,
    /// Speak it before other turns that wait.
    pub ahead: bool,
    /// Where there is no capacity it waits for some, as streamed text does, in place of being refused.
    pub patient: bool,
    /// How.
    pub style: Style,
}

impl TurnRequest {
    /// A turn with default settings.
    pub fn new(text: impl Into<String>) -> Self {
        Self { id: None, text: text.into(), interrupt: false, ahead: false, patient: false, style: Style::default() }
    }
}

/// How a turn is spoken.
#[derive(Clone, Debug, PartialEq)]
pub struct Style {
    /// Voice name; `None` is the engine's default.
    pub voice: Option<String>,
    /// BCP 47 language tag; `None`: the one that the text shows.
    pub language: Option<String>,
    /// Whether numbers and signs are brought into words.
    pub normalise: Normalise,
    /// Manner of speaking, for voices that can.
    pub instructions: Option<String>,
    /// Same text, voice and seed: same audio.
    pub seed: u64,
    /// Speaking rate, 1.0 as recorded.
    pub speed: f32,
    /// What the caller may interrupt it by; `None`: as configured.
    pub interruptible: Option<Interruptible>,
    /// Whether the text of a later turn cuts it off.
    pub preemptible: bool,
    /// The eager end of turn that it answers, of a streamed turn: it is made and does not sound before the caller's turn
    /// has ended with the same words, and is dropped where it goes on.
    pub speculation: Option<u64>,
    /// How soon its text is spoken while it is being written.
    pub stream: Streaming,
    /// What of its text is no words.
    pub markup: Markup,
    /// Amplitude, 1.0 as the voice speaks.
    pub volume: f32,
    /// Words that are said otherwise than they are written.
    pub lexicon: Lexicon,
    /// What it is part of, by the word of who wrote it.
    pub trace: Option<TraceContext>,
}

impl Default for Style {
    fn default() -> Self {
        Self {
            voice: None,
            language: None,
            normalise: Normalise::default(),
            instructions: None,
            seed: 0,
            speed: 1.0,
            interruptible: None,
            preemptible: false,
            speculation: None,
            stream: Streaming::default(),
            markup: Markup::default(),
            volume: 1.0,
            lexicon: Lexicon::default(),
            trace: None,
        }
    }
}

/// The next piece of a turn that is still being written.
#[derive(Clone, Debug, PartialEq)]
pub struct TextDelta {
    /// Which turn; `None`: the open one, or a new one. Naming another turn closes the open one.
    pub id: Option<TurnId>,
    /// The text, as it came: words may be split anywhere.
    pub token: String,
    /// The turn is complete.
    pub last: bool,
    /// How; taken from the first piece of a turn.
    pub style: Style,
}

/// Recorded audio to play.
#[derive(Clone, Debug, PartialEq)]
pub struct PlayRequest {
    /// The agent's name for it; made here when absent.
    pub id: Option<TurnId>,
    /// A file name under the configured folder, a `data:audio/...;base64,` URL, or an `https:` URL.
    pub source: String,
    /// How many times; 0 is without end.
    pub times: u32,
    /// What the caller may interrupt it by; `None`: as configured.
    pub interruptible: Option<Interruptible>,
    /// Whether the text of a later turn cuts it off.
    pub preemptible: bool,
}

/// Why something cannot be said, played or done.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SpeakError {
    /// The call is over.
    #[error("the call has ended")]
    Ended,
    /// The gateway or the call is going down.
    #[error("the call is ending and takes no new text")]
    Draining,
    /// Too much is queued on this call already.
    #[error("this call has too much queued; wait for `flow` to open or for turns to end")]
    Busy,
    /// There is no capacity.
    #[error("no capacity: {reason}")]
    Refused {
        /// When trying again is worth while.
        retry_after: Duration,
        /// For people.
        reason: String,
    },
    /// Nothing in it can be spoken.
    #[error("the text contains nothing to speak")]
    Empty,
    /// The peer speaks with a human, and the agent is not to be heard.
    #[error(
        "the call is bridged: its agent speaks in the modes `whisper` and `join` only, or when the bridge has ended"
    )]
    Bridged,
    /// The request is wrong; the message says what to change.
    #[error("{0}")]
    Invalid(String),
}

/// Sends to one call. Cheap to clone; keeps nothing alive.
///
/// Why this struct is large: it is the one door to a call, a method for each thing that can be asked of it.
#[derive(Clone, Debug)]
pub struct CallHandle {
    pub(super) shared: Arc<Shared>,
    pub(super) commands: mpsc::Sender<Command>,
    pub(super) speech: Weak<dyn Speech>,
}

impl CallHandle {
    /// The call's id.
    pub fn id(&self) -> &CallId {
        &self.shared.meta.id
    }

    /// What was known before it began.
    pub fn meta(&self) -> &CallMeta {
        &self.shared.meta
    }

    /// A snapshot of its state and figures.
    pub fn info(&self) -> CallInfo {
        self.shared.info()
    }

    /// Whether the call is over.
    pub fn has_ended(&self) -> bool {
        self.shared.ended().is_some()
    }

    /// Listens to the call. The first listener also gets what happened before it asked (up to the capacity);
    /// a listener that falls [`super::info::EVENTS`] events behind loses the oldest and is told how many.
    pub fn events(&self) -> broadcast::Receiver<CallEvent> {
        self.shared.events()
    }

    /// Text of the peer, for its one reader: the agent. `None` when it was taken before.
    pub fn messages(&self) -> Option<Messages> {
        self.shared.messages()
    }

    /// Hears both directions of the call: 20 ms frames at 8 kHz. A listener that falls behind loses the oldest.
    pub fn media_tap(&self) -> MediaTap {
        MediaTap::new(self.shared.clone(), false)
    }

    /// As [`CallHandle::media_tap`], with [`super::MediaFrame::wide`]. Frames that were prepared before it was made have
    /// none.
    pub fn wide_tap(&self) -> MediaTap {
        MediaTap::new(self.shared.clone(), true)
    }

    /// Speaks a whole turn, after those that wait already.
    ///
    /// # Errors
    /// It was not accepted; nothing of it will be spoken.
    pub async fn speak(&self, turn: TurnRequest) -> Result<TurnId, SpeakError> {
        let bytes = turn.text.len();
        self.reserve(bytes)?;
        // overflow: refused
        let place = self.commands.try_reserve().inspect_err(|_| self.shared.backlog.give_back(bytes)).map_err(full)?;
        // A device and the call's task wake up while the text is read here. A call with no room for more commands is awake.
        self.rouse_device();
        let _ = self.send(Command::Wake);
        let (reply, answer) = oneshot::channel();
        place.send(Command::Speak { turn: WholeTurn::read(turn, &self.shared.config.segment), reply });
        self.answered(answer).await
    }

    /// Speaks the next piece of a turn that is still being written. Sounds at the first safe boundary.
    ///
    /// # Errors
    /// The piece was not accepted; the turn goes on without it when more follows.
    pub fn push_text(&self, delta: TextDelta) -> Result<(), SpeakError> {
        let bytes = delta.token.len();
        self.reserve(bytes)?;
        // The task reads what is pushed. Of a text that goes on, most pieces are of no use to a device yet.
        if delta.last {
            self.rouse_device();
        }
        self.send(Command::Text(delta)).inspect_err(|_| self.shared.backlog.give_back(bytes))
    }

    /// Streams `pcm` (mono, 16-bit, `rate` samples per second: 8000, 16000, 24000 or 48000) into the call
    /// after what waits already; pieces that follow one another without a gap sound as one. `interruptible`: what cuts it
    /// off, as of text.
    ///
    /// # Errors
    /// The rate is not one of these, or the call takes no more.
    pub fn inject_audio(
        &self,
        pcm: Vec<i16>,
        rate: u32,
        interruptible: Option<Interruptible>,
    ) -> Result<(), SpeakError> {
        if !matches!(rate, 8_000 | 16_000 | 24_000 | 48_000) {
            return Err(SpeakError::Invalid(format!("sample rate {rate} is not 8000, 16000, 24000 or 48000")));
        }
        self.send(Command::Audio { pcm, rate, interruptible })
    }

    /// Reports [`CallEvent::Mark`] when everything queued so far has been sent.
    ///
    /// # Errors
    /// The call takes no more.
    pub fn mark(&self, name: impl Into<String>) -> Result<(), SpeakError> {
        self.send(Command::Mark(name.into()))
    }

    /// Cuts off what is being said and forgets what waits; reports what was heard.
    ///
    /// # Errors
    /// The call takes no more commands.
    pub fn interrupt(&self) -> Result<(), SpeakError> {
        self.send(Command::Interrupt)
    }

    /// Forgets what waits and cuts off recorded audio and speech alike, as a media stream's `clear` does.
    ///
    /// # Errors
    /// The call takes no more commands.
    pub fn clear(&self) -> Result<(), SpeakError> {
        self.send(Command::Clear)
    }

    /// Answers [`CallEvent::BargeInPending`]: `true` cuts speech off, `false` lets it go on.
    ///
    /// # Errors
    /// The call takes no more commands.
    pub fn resolve_barge_in(&self, confirm: bool) -> Result<(), SpeakError> {
        let outcome = if confirm { BargeInOutcome::Confirmed } else { BargeInOutcome::Rejected };
        self.send(Command::ResolveBargeIn(outcome))
    }

    /// Finds out who answered, told as [`CallEvent::AnsweredBy`] and [`CallEvent::MessageOver`]. With `hold` speech waits
    /// until that is known, and on a machine for the end of its message.
    ///
    /// # Errors
    /// The call takes no more commands.
    pub fn detect_answer(&self, hold: bool) -> Result<(), SpeakError> {
        self.send(Command::DetectAnswer { hold })
    }

    /// Pauses speech and asks the peer to hold.
    ///
    /// # Errors
    /// The call takes no more commands.
    pub fn hold(&self) -> Result<(), SpeakError> {
        self.send(Command::Hold(true))
    }

    /// Ends hold: speech goes on where it stopped.
    ///
    /// # Errors
    /// The call takes no more commands.
    pub fn resume(&self) -> Result<(), SpeakError> {
        self.send(Command::Hold(false))
    }

    /// Hands the peer over to `to`; the peer's answer comes as [`CallEvent::TransferAccepted`]
    /// or [`CallEvent::Transferred`], its late failure as [`CallEvent::TransferFailed`].
    ///
    /// # Errors
    /// The call takes no more commands.
    pub fn transfer(&self, to: impl Into<String>, attended: bool) -> Result<(), SpeakError> {
        self.transfer_within(to, attended, None)
    }

    /// As [`CallHandle::transfer`]; the call comes back after `limit` where the destination has not answered by then (`None`:
    /// after as long as telephones ring).
    ///
    /// # Errors
    /// As there.
    pub fn transfer_within(
        &self,
        to: impl Into<String>,
        attended: bool,
        limit: Option<Duration>,
    ) -> Result<(), SpeakError> {
        self.send(Command::Transfer { to: to.into(), attended, limit })
    }

    /// Sends digits to the peer (`0`-`9`, `*`, `#`, `A`-`D`; `w` or `,` waits half a second).
    ///
    /// # Errors
    /// A character is none of these, or the call takes no more commands.
    pub fn dtmf(&self, digits: &str) -> Result<(), SpeakError> {
        if let Some(bad) = digits.chars().find(|c| !crate::media::dtmf::is_dialable(*c)) {
            return Err(SpeakError::Invalid(format!("`{bad}` is not a digit; use 0-9, *, #, A-D, w or a comma")));
        }
        if digits.is_empty() || digits.len() > 64 {
            return Err(SpeakError::Invalid("digits must have 1 to 64 characters".into()));
        }
        self.send(Command::Digits(digits.to_owned()))
    }

    /// Tells the agent that the caller said `text`, as a recogniser does: every listener gets [`CallEvent::Prompt`].
    /// `lang` is a BCP 47 tag, empty where it is not known.
    ///
    /// # Errors
    /// There are no words in it or more than [`MAX_PROMPT`] bytes, or the call takes no more commands.
    pub fn prompt(&self, text: &str, lang: &str) -> Result<(), SpeakError> {
        let text = text.trim();
        if text.is_empty() || text.len() > MAX_PROMPT {
            return Err(SpeakError::Invalid(format!("a prompt has 1 to {MAX_PROMPT} bytes, this one {}", text.len())));
        }
        self.send(Command::Prompt { text: text.to_owned(), lang: lang.to_owned() })
    }

    /// Sends text on the data channel; lost where there is none.
    ///
    /// # Errors
    /// The call takes no more commands.
    pub fn send_message(&self, text: impl Into<String>) -> Result<(), SpeakError> {
        self.send(Command::Message(text.into()))
    }

    /// As [`CallHandle::send_message`], of what a peer may do without: where there is no data channel, it is not sent.
    ///
    /// # Errors
    /// The call takes no more commands.
    pub fn send_caption(&self, text: impl Into<String>) -> Result<(), SpeakError> {
        self.send(Command::Caption(text.into()))
    }

    /// Hears differently from now on, where a recogniser listens.
    ///
    /// # Errors
    /// The call takes no more commands.
    pub fn listen(&self, listen: Listen) -> Result<(), SpeakError> {
        self.send(Command::Listen(listen))
    }

    /// Ends the call now.
    pub fn hang_up(&self, reason: EndReason) {
        // The flag is what counts: it reaches a call whose command channel is full, too.
        self.shared.ask_to_end(reason);
    }

    /// Ends the call when everything queued has been said.
    ///
    /// # Errors
    /// The call takes no more commands.
    pub fn finish(&self, reason: EndReason) -> Result<(), SpeakError> {
        self.send(Command::Finish(reason))
    }

    /// As [`CallHandle::finish`], and hands `data` over to those that follow the call: both, or neither.
    ///
    /// # Errors
    /// `data` is too long; the call takes no more commands.
    pub fn finish_with(&self, reason: EndReason, data: String) -> Result<(), SpeakError> {
        if data.len() > MAX_HANDOFF {
            return Err(SpeakError::Invalid(format!("handoffData has {} bytes, at most {MAX_HANDOFF}", data.len())));
        }
        // overflow: refused
        let mut room = self.commands.try_reserve_many(2).map_err(full)?;
        for command in [Command::Handoff(data), Command::Finish(reason)] {
            if let Some(place) = room.next() {
                place.send(command);
            }
        }
        Ok(())
    }

    /// Waits for the end of the call.
    pub async fn ended(&self) -> EndReason {
        self.shared.wait_ended().await
    }

    /// Tells the engine that text is on its way.
    fn rouse_device(&self) {
        self.speech.upgrade().iter().for_each(|speech| speech.rouse());
    }

    fn reserve(&self, bytes: usize) -> Result<(), SpeakError> {
        if self.has_ended() {
            return Err(SpeakError::Ended);
        }
        let limit = self.shared.backlog.limit();
        if bytes > limit {
            // It would not fit into an empty queue either: waiting for room would be waiting for ever.
            return Err(SpeakError::Invalid(format!(
                "{bytes} bytes of text are more than the {limit} that may wait in one call; send it in parts"
            )));
        }
        if self.shared.backlog.take(bytes) { Ok(()) } else { Err(SpeakError::Busy) }
    }

    /// What the call says to a command that was sent. One that comes while the call ends may lie in the queue, neither read
    /// nor dropped, as long as there is a handle: so that nobody reads the queue any more is an answer, too.
    pub(super) async fn answered<T>(&self, answer: oneshot::Receiver<Result<T, SpeakError>>) -> Result<T, SpeakError> {
        tokio::select! {
            biased;
            answer = answer => answer.unwrap_or(Err(SpeakError::Ended)),
            () = self.commands.closed() => Err(SpeakError::Ended),
        }
    }

    pub(super) fn send(&self, command: Command) -> Result<(), SpeakError> {
        // overflow: refused
        self.commands.try_send(command).map_err(full)
    }
}

/// Why the call takes no command.
fn full<T>(error: mpsc::error::TrySendError<T>) -> SpeakError {
    match error {
        mpsc::error::TrySendError::Full(_) => SpeakError::Busy,
        mpsc::error::TrySendError::Closed(_) => SpeakError::Ended,
    }
}
