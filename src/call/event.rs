//! What a call tells those who listen to it. Closed enums are also metric labels.

mod kind;

use std::time::Duration;

use serde::Serialize;
use serde_json::{Value, json};

pub use self::kind::EventKind;

use super::bridge::{BridgeState, Speaker};
use super::{CallId, TurnId};
use crate::hear::TurnEvent;
use crate::media::answer::Answerer;
use crate::media::leg::{LegEnd, PeerCause};
use crate::turn::VoiceStages;

/// Which side began a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Direction {
    /// The peer called.
    Inbound,
    /// We called.
    Outbound,
}

/// How an outbound call fares before it is answered. SIP statuses are those of RFC 3261 section 21.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Dialling {
    /// The call is being placed.
    Trying,
    /// The called side rings.
    Ringing {
        /// SIP status.
        status: u16,
    },
    /// The called side sends sound before it answers.
    EarlyMedia {
        /// SIP status.
        status: u16,
    },
    /// Somebody answered; the call is live.
    Answered,
    /// The called side is busy.
    Busy {
        /// SIP status.
        status: u16,
    },
    /// Not answered in time.
    NoAnswer {
        /// SIP status, where the called side gave up and not the gateway.
        status: Option<u16>,
    },
    /// The called side or a trunk refused.
    Refused {
        /// SIP status.
        status: u16,
        /// Its reason phrase.
        reason: String,
    },
    /// We gave the call up.
    Cancelled,
    /// It could not be placed, or the answer could not be used.
    Failed {
        /// For people.
        reason: String,
    },
}

impl Dialling {
    /// Its name in events, calls and records.
    pub fn label(&self) -> &'static str {
        match self {
            Dialling::Trying => "trying",
            Dialling::Ringing { .. } => "ringing",
            Dialling::EarlyMedia { .. } => "earlyMedia",
            Dialling::Answered => "answered",
            Dialling::Busy { .. } => "busy",
            Dialling::NoAnswer { .. } => "noAnswer",
            Dialling::Refused { .. } => "refused",
            Dialling::Cancelled => "cancelled",
            Dialling::Failed { .. } => "failed",
        }
    }

    /// The SIP status that says so, if there is one.
    pub fn status(&self) -> Option<u16> {
        match self {
            Dialling::Ringing { status } | Dialling::EarlyMedia { status } | Dialling::Busy { status } => Some(*status),
            Dialling::Refused { status, .. } => Some(*status),
            Dialling::NoAnswer { status } => *status,
            _ => None,
        }
    }

    /// Why it came to nothing, for people.
    pub fn reason(&self) -> Option<&str> {
        match self {
            Dialling::Refused { reason, .. } | Dialling::Failed { reason } => Some(reason),
            _ => None,
        }
    }

    /// Whether the call came to nothing.
    pub fn is_over(&self) -> bool {
        !matches!(self, Dialling::Trying | Dialling::Ringing { .. } | Dialling::EarlyMedia { .. } | Dialling::Answered)
    }
}

/// A call that came and was never live.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Missed {
    /// Name of the trunk that it came by.
    pub trunk: Option<String>,
    /// The SIP status that it ended with: 487 where the caller gave it up.
    pub status: u16,
    /// Why, for people.
    pub reason: String,
    /// The caller gave it up; else the gateway refused it.
    pub by_peer: bool,
    /// What the caller said of that.
    pub cause: Option<PeerCause>,
}

impl Missed {
    /// What became of it, as records say: `cancelled` or `refused`.
    pub fn label(&self) -> &'static str {
        if self.by_peer { "cancelled" } else { "refused" }
    }
}

/// What happened on a call, in order.
#[derive(Clone, Debug, PartialEq)]
pub enum CallEvent {
    /// An outbound call before it is live. The call's own listeners begin later; those of all calls hear of it.
    Dialling(Dialling),
    /// Media may flow both ways.
    Connected,
    /// The first text of a turn was accepted; it may still wait for the turns before it.
    TurnStarted {
        /// Which turn.
        turn: TurnId,
    },
    /// The first packet of a turn's speech was handed to the leg.
    FirstAudio {
        /// Which turn.
        turn: TurnId,
        /// Since the turn was accepted.
        after: Duration,
        /// Whether nothing was being said when it was accepted, so that `after` is all latency and no queue.
        immediate: bool,
        /// Where `after` went.
        stages: Stages,
    },
    /// The first packet of a sentence was handed to the leg.
    Speaking {
        /// Which turn.
        turn: TurnId,
        /// The sentence, as it was written.
        text: String,
        /// How long it takes to say: exact where all of it was made, else by the pace of what was said before.
        lasts: Duration,
    },
    /// The turn is over; its last event.
    TurnEnded {
        /// Which turn.
        turn: TurnId,
        /// How.
        how: TurnHow,
        /// What left for the listener.
        heard: Heard,
    },
    /// Speech was cut off. Comes before the [`CallEvent::TurnEnded`] of the turn.
    Interrupted {
        /// The turn that was sounding.
        turn: TurnId,
        /// Who cut it off.
        cause: Cause,
        /// What left for the listener until then.
        heard: Heard,
    },
    /// The caller may be barging in: speech is silent, and the agent has `grace` to confirm or reject.
    BargeInPending {
        /// The turn that was sounding.
        turn: TurnId,
        /// What the caller did.
        cause: Cause,
        /// After this long the configured default applies.
        grace: Duration,
    },
    /// What became of a pending barge-in.
    BargeInResolved {
        /// The turn that was sounding.
        turn: TurnId,
        /// The outcome.
        outcome: BargeInOutcome,
    },
    /// The caller began or stopped speaking.
    Vad {
        /// Speaking now.
        speaking: bool,
    },
    /// What the caller said, as a recogniser understood it, or wrote.
    Prompt {
        /// The words.
        text: String,
        /// BCP 47 language; empty where it is not known.
        lang: String,
        /// Whether the caller has finished.
        last: bool,
        /// The eager end of turn ([`TurnEvent::eager`]) that had the same words: what was said in answer to it, with
        /// [`super::Style::speculation`], is spoken now.
        eager: Option<u64>,
    },
    /// The first packet of an answer left: where the time since the caller's last word went.
    Answered {
        /// The turn that answers.
        turn: TurnId,
        /// What took how long.
        stages: Stages,
    },
    /// What the agent hands to the party that goes on with the caller, in a form of its own; the call ends.
    Handoff(String),
    /// How far a recogniser is with the caller's turn. Its end is also told as [`CallEvent::Prompt`].
    Heard(TurnEvent),
    /// Part of what the caller said was not heard.
    Deaf {
        /// How much.
        lost: Duration,
        /// Why, for people.
        reason: String,
    },
    /// Who answered an outbound call, where that was asked.
    AnsweredBy(Answerer),
    /// The message of the machine that answered is over: from here on it records.
    MessageOver {
        /// Whether a beep was heard, rather than a long silence.
        beep: bool,
    },
    /// The caller pressed a key.
    Digit(char),
    /// Everything queued before this mark has been sent, or was cleared.
    Mark {
        /// The name given to it.
        name: String,
        /// Whether what came before was sent (`false`: cleared or interrupted).
        played: bool,
    },
    /// A text message came on the data channel. The agent reads it from [`super::CallHandle::messages`].
    Message {
        /// How long it is.
        bytes: usize,
    },
    /// Speech pauses (`true`) or goes on.
    Held {
        /// On hold now.
        held: bool,
        /// Whether the peer asked for it.
        by_peer: bool,
    },
    /// The listener heard a gap of this length because speech came too late.
    Underrun {
        /// The turn with the gap.
        turn: TurnId,
        /// How long nothing was sent.
        gap: Duration,
    },
    /// Back-pressure: whether more text is welcome. Text sent while it is not may be refused.
    Flow {
        /// More text is welcome.
        open: bool,
    },
    /// All that was written of a turn has been said and its end has not come: the listener hears silence because nothing
    /// more was written. Once a gap.
    Starved {
        /// Which turn.
        turn: TurnId,
    },
    /// Something the agent asked for could not be done; the call goes on. Of a turn that was accepted and is not spoken
    /// to its end it comes before [`CallEvent::TurnEnded`].
    Error(String),
    /// The peer has taken a transfer on. The call goes on until it has got there.
    TransferAccepted,
    /// The peer was handed over, and the call ends; or it did not take the transfer on.
    Transferred(Result<(), String>),
    /// A transfer that the peer had taken on came to nothing; the call goes on.
    TransferFailed(String),
    /// How far the peer is with a transfer that it has taken on: the SIP status of its target.
    TransferProgress(u16),
    /// The peer handed the call over, or another party was sent in its place: this one. The call goes on with it.
    HandedOver(String),
    /// What becomes of a bridge to a human.
    Bridge {
        /// The other call; `None`: none was placed.
        with: Option<CallId>,
        /// How far it is.
        state: BridgeState,
    },
    /// What was said on a bridged call, where the agent listens. Neither of the two waits for an answer.
    Overheard {
        /// Who said it.
        speaker: Speaker,
        /// The words.
        text: String,
        /// BCP 47 language; empty where it is not known.
        lang: String,
    },
    /// A call of a trunk or an account came and was never live; its only event.
    Missed(Missed),
    /// Why the peer ends the call, or has refused it. What ended follows.
    PeerCause(PeerCause),
    /// The call is over; nothing follows.
    Ended(EndReason),
}

/// Where the time from a caller's last sound, or from a turn's first text, to its first packet went. The parts add up; `voice`
/// and `network` are no parts of their own.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stages {
    /// Last sound of the caller, by the speech detector, to the decision that the turn has ended.
    pub end_of_turn: Duration,
    /// To the first text of the answer.
    pub agent: Duration,
    /// To the engine taking its first part.
    pub queue: Duration,
    /// To the first PCM of it.
    pub first_audio: Duration,
    /// To the first RTP packet: encoder and pacing.
    pub egress: Duration,
    /// Where `first_audio` went on the device, stage by stage; `None`: no device made it, or an older worker did.
    pub voice: Option<VoiceStages>,
    /// How long the packet then travels: half of the last round trip that the peer reported. Its jitter buffer and its sound
    /// card, which no report tells of, come on top.
    pub network: Option<Duration>,
}

impl Stages {
    /// The parts, by the label of `antiphon_turn_seconds`.
    pub fn parts(&self) -> [(&'static str, Duration); 5] {
        [
            ("end_of_turn", self.end_of_turn),
            ("agent", self.agent),
            ("queue", self.queue),
            ("first_audio", self.first_audio),
            ("egress", self.egress),
        ]
    }

    /// All of it: what the caller waited.
    pub fn mouth_to_ear(&self) -> Duration {
        self.parts().iter().map(|(_, time)| *time).sum()
    }

    /// In milliseconds, as events and records show it.
    pub fn describe(&self) -> Value {
        let ms = |time: Duration| time.as_secs_f64() * 1e3;
        let mut described = self.describe_own();
        described["endOfTurnMs"] = ms(self.end_of_turn).into();
        described["agentMs"] = ms(self.agent).into();
        described["mouthToEarMs"] = ms(self.mouth_to_ear()).into();
        described
    }

    /// The same of a turn by itself: from its first text on.
    pub fn describe_own(&self) -> Value {
        let ms = |time: Duration| time.as_secs_f64() * 1e3;
        let mut described = json!({
            "queueMs": ms(self.queue), "firstAudioMs": ms(self.first_audio), "egressMs": ms(self.egress),
        });
        if let Some(voice) = self.voice {
            let stages =
                [("prefillMs", voice.prefill), ("firstTokenMs", voice.first_token), ("firstMelMs", voice.first_mel)];
            let mut shown = json!({ "waitMs": ms(voice.wait), "firstPcmMs": ms(voice.first_pcm) });
            for (name, time) in stages.into_iter().filter_map(|(name, time)| Some((name, time?))) {
                shown[name] = ms(time).into();
            }
            described["voice"] = shown;
        }
        if let Some(network) = self.network {
            described["networkMs"] = ms(network).into();
        }
        described
    }
}

/// What left for the listener of one turn, by the RTP send cursor.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Heard {
    /// The part of the turn's text that was spoken.
    pub text: String,
    /// Words in `text`; where a script has no spaces, its characters.
    pub words: u32,
    /// Milliseconds of the turn's speech handed to the leg.
    pub sent_ms: u64,
    /// Of these, what the peer's receiver reports have acknowledged. Lags by up to a report interval.
    pub acked_ms: u64,
    /// How exact `text` is.
    pub precision: Precision,
}

/// How well a position in the audio is known as a position in the text.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Precision {
    /// At the boundary of an utterance: every word, or none, of what was begun.
    #[default]
    Exact,
    /// Inside an utterance whose words the voice tells the times of: to the word.
    Word,
    /// Inside an utterance whose length is known: by share of characters, usually within a word or two.
    Proportional,
    /// Inside an utterance that is not synthesised to its end: by characters per second of speech before it.
    Estimated,
}

/// Who cut speech off. Closed: also a metric label.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Cause {
    /// The caller spoke.
    Speech,
    /// The caller pressed a key.
    Dtmf,
    /// The agent asked for it.
    Agent,
    /// A later turn replaced it.
    Preempted,
}

impl Cause {
    /// The metric label.
    pub fn label(self) -> &'static str {
        match self {
            Cause::Speech => "speech",
            Cause::Dtmf => "dtmf",
            Cause::Agent => "agent",
            Cause::Preempted => "preempted",
        }
    }
}

/// What became of a pending barge-in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "camelCase")]
pub enum BargeInOutcome {
    /// The agent confirmed it, or what the caller says.
    Confirmed,
    /// The agent rejected it, or it was a cough or "mm-hm": speech goes on where it stopped.
    Rejected,
    /// The agent said nothing in time and the default confirms.
    TimedOutConfirmed,
    /// The agent said nothing in time and the default rejects.
    TimedOutRejected,
}

/// How a turn ended. Closed: also a metric label.
#[derive(Clone, Debug, PartialEq)]
pub enum TurnHow {
    /// All of it was sent.
    Done,
    /// Cut off by the caller, or by the agent while it sounded.
    Interrupted(Cause),
    /// Cancelled before any of it was sent.
    Cancelled,
    /// There was no capacity for it.
    Refused {
        /// When trying again is worth while.
        retry_after: Duration,
    },
    /// A part could not be synthesised; the reason is for people.
    Failed(String),
    /// The call ended first.
    CallEnded,
}

impl TurnHow {
    /// The metric label.
    pub fn label(&self) -> &'static str {
        match self {
            TurnHow::Done => "done",
            TurnHow::Interrupted(_) => "interrupted",
            TurnHow::Cancelled => "cancelled",
            TurnHow::Refused { .. } => "refused",
            TurnHow::Failed(_) => "failed",
            TurnHow::CallEnded => "call_ended",
        }
    }

    /// What went wrong with a turn that was accepted, for people.
    pub fn trouble(&self) -> Option<String> {
        match self {
            TurnHow::Failed(reason) => Some(reason.clone()),
            TurnHow::Refused { retry_after } => Some(format!(
                "the speech engine had no room for it; try again in {} s",
                retry_after.as_secs_f64().ceil()
            )),
            _ => None,
        }
    }

    /// Why it failed, for people.
    pub fn reason(&self) -> Option<&str> {
        match self {
            TurnHow::Failed(reason) => Some(reason),
            _ => None,
        }
    }

    /// Milliseconds after which another try is worth while, of a turn that was refused.
    pub fn retry_after_ms(&self) -> Option<u64> {
        match self {
            TurnHow::Refused { retry_after } => Some(retry_after.as_millis() as u64),
            _ => None,
        }
    }
}

/// Why a call ended. Closed: also a metric label.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum EndReason {
    /// The peer hung up.
    Remote,
    /// The caller gave up before the call was answered, while it heard what is said before.
    Cancelled,
    /// The agent or the API hung up.
    HungUp,
    /// The peer was handed over to somebody else.
    Transferred,
    /// The peer vanished.
    Lost,
    /// The transport failed.
    Failed,
    /// Media did not connect in time.
    SetupTimeout,
    /// Nothing was said or received for `max_idle`.
    Idle,
    /// `max_duration` was reached.
    TooLong,
    /// The gateway is going down.
    Drained,
    /// The agent died or stalled, and the call is configured to end then.
    AgentLost,
}

impl EndReason {
    /// The metric label.
    pub fn label(self) -> &'static str {
        match self {
            EndReason::Remote => "remote",
            EndReason::Cancelled => "cancelled",
            EndReason::HungUp => "hung_up",
            EndReason::Transferred => "transferred",
            EndReason::Lost => "lost",
            EndReason::Failed => "failed",
            EndReason::SetupTimeout => "setup_timeout",
            EndReason::Idle => "idle",
            EndReason::TooLong => "too_long",
            EndReason::Drained => "drained",
            EndReason::AgentLost => "agent_lost",
        }
    }
}

impl From<LegEnd> for EndReason {
    fn from(end: LegEnd) -> Self {
        match end {
            LegEnd::Remote => EndReason::Remote,
            LegEnd::Local => EndReason::HungUp,
            LegEnd::Lost => EndReason::Lost,
            LegEnd::Failed => EndReason::Failed,
        }
    }
}
