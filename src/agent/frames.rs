//! The agent protocol: ConversationRelay frames, with additions that others may ignore.
//!
//! One JSON object a WebSocket text message (or data-channel message), told apart by `type`. Unknown fields
//! are ignored so that newer agents work; an unknown `type` is answered with an `error` frame.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::call::bridge::WaitTone;
use crate::call::{BargeInOutcome, BridgeMode, Interruptible, Precision, Speaker, TurnId};
use crate::hear::Expect;
use crate::turn::{Markup, Streaming};

/// Largest frame accepted from an agent. A text turn of an hour is about 60 kB.
pub const MAX_FRAME: usize = 1 << 20;

/// What the gateway tells an agent.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(tag = "type", rename_all = "camelCase", rename_all_fields = "camelCase")]
pub enum ToAgent {
    /// First frame of a session.
    Setup {
        /// Unique for this attachment.
        session_id: String,
        /// The call.
        call_sid: String,
        /// Calling party.
        from: String,
        /// Called party.
        to: String,
        /// `inbound` or `outbound`.
        direction: String,
        /// `sip` or `webrtc`.
        call_type: String,
        /// Headers of the call that signalling itself has no use for.
        custom_parameters: BTreeMap<String, String>,
        /// The call's span (W3C Trace Context), where the call is traced.
        #[serde(skip_serializing_if = "Option::is_none")]
        traceparent: Option<String>,
    },
    /// What the caller said, where a recogniser is attached.
    Prompt {
        /// Recognised text.
        voice_prompt: String,
        /// BCP 47 language.
        lang: String,
        /// Whether the caller has finished.
        last: bool,
        /// Where not: `partial` (words so far), `eager` (probably finished) or `resumed` (had not, after all).
        #[serde(skip_serializing_if = "Option::is_none")]
        phase: Option<&'static str>,
        /// With `eager`: names this end, for [`FromAgent::Text`]. With `last`: the eager end that had the same words, so
        /// that an agent that has answered it has no more to say.
        #[serde(skip_serializing_if = "Option::is_none")]
        speculation: Option<u64>,
    },
    /// The caller pressed a key.
    Dtmf {
        /// `0`-`9`, `*`, `#`, `A`-`D`.
        digit: String,
    },
    /// Speech was cut short by the caller or by the agent's own `clear`.
    Interrupt {
        /// The text that left for the listener before the cut.
        utterance_until_interrupt: String,
        /// How much of the turn left, in milliseconds.
        duration_until_interrupt_ms: u64,
        /// The turn that was sounding.
        utterance_id: TurnId,
        /// Words of it that left.
        heard_words: u32,
        /// Milliseconds of it that left, by the RTP send cursor.
        sent_ms: u64,
        /// Milliseconds of it that the peer's RTCP reports acknowledge.
        acked_ms: u64,
        /// How exactly the text is known.
        precision: Precision,
    },
    /// A frame could not be used, or the call had a problem.
    Error {
        /// For people.
        description: String,
    },
    /// Something worth knowing: a turn began to sound or ended.
    Info {
        /// `callConnected`, `answeredBy`, `messageOver`, `deaf`, `firstAudio`, `speaking`, `turn`, `turnEnded`,
        /// `underrun`, `bargeInPending`, `handedOver`, `transferred`.
        name: String,
        /// The turn it is about.
        #[serde(skip_serializing_if = "Option::is_none")]
        utterance_id: Option<TurnId>,
        /// Details that depend on `name`.
        #[serde(flatten)]
        details: BTreeMap<String, serde_json::Value>,
    },
    /// Everything queued before the mark has left, or was dropped.
    Mark {
        /// The agent's name for it.
        name: String,
    },
    /// Back-pressure: `pause` when the call holds as much text as it may, `resume` when there is room. `starved`: all of
    /// the turn that was written has been said, and the caller hears silence until more comes.
    Flow {
        /// `pause`, `resume` or `starved`.
        state: &'static str,
    },
    /// The caller began or stopped speaking.
    Vad {
        /// Whether the caller speaks.
        speaking: bool,
    },
    /// A pending barge-in was decided.
    BargeInResolved {
        /// What became of it.
        outcome: BargeInOutcome,
    },
    /// What becomes of a bridge to a human.
    Bridge {
        /// `trying`, `ringing`, `earlyMedia`, `answered`, `connected`, `ended`, or why the human did not come: `busy`, `noAnswer`,
        /// `refused`, `cancelled`, `failed`.
        state: &'static str,
        /// The human's call.
        #[serde(skip_serializing_if = "Option::is_none")]
        call_sid: Option<String>,
        /// More about it: `mode`, `status`, `reason`.
        #[serde(flatten)]
        details: BTreeMap<String, serde_json::Value>,
    },
    /// What was said on a bridged call, where the agent listens. It is no prompt: neither of the two waits for an answer.
    Overheard {
        /// `caller` or `human`.
        speaker: Speaker,
        /// Recognised text.
        voice_prompt: String,
        /// BCP 47 language.
        lang: String,
    },
    /// The peer put the call on hold.
    Hold {},
    /// The peer took the call off hold.
    Resume {},
    /// The peer took a transfer on or refused it. Its end is an `info` named `transferred`, its late failure an
    /// `error`.
    Transfer {
        /// Whether the peer goes there.
        accepted: bool,
        /// Why not.
        #[serde(skip_serializing_if = "Option::is_none")]
        reason: Option<String>,
    },
}

/// What an agent tells the gateway.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(tag = "type", rename_all = "camelCase", rename_all_fields = "camelCase")]
pub enum FromAgent {
    /// More text of the current turn.
    Text {
        /// The text.
        token: String,
        /// Whether the turn is complete with it.
        #[serde(default)]
        last: bool,
        /// BCP 47 language of the text.
        #[serde(default)]
        lang: Option<String>,
        /// Whether the caller may interrupt this turn.
        #[serde(default)]
        interruptible: Option<Permission>,
        /// Whether the agent's own next turn may cut this one short.
        #[serde(default)]
        preemptible: Option<bool>,
        /// The agent's name for the turn.
        #[serde(default)]
        utterance_id: Option<String>,
        /// Voice by name.
        #[serde(default)]
        voice: Option<String>,
        /// Manner of speaking.
        #[serde(default)]
        instructions: Option<String>,
        /// Speaking rate, 1.0 as the voice speaks; 0.25 to 4.
        #[serde(default)]
        speed: Option<f32>,
        /// Same text, voice and seed: same audio.
        #[serde(default)]
        seed: Option<u64>,
        /// How soon the text is spoken while it is being written.
        #[serde(default)]
        stream: Option<Streaming>,
        /// What of the text is no words.
        #[serde(default)]
        markup: Option<Markup>,
        /// Amplitude, 1.0 as the voice speaks.
        #[serde(default)]
        volume: Option<f32>,
        /// What the caller is expected to answer: how long a pause may be before the answer counts as finished.
        #[serde(default)]
        expect: Option<Expect>,
        /// The eager end of turn that it answers: it is made, waits for the caller's turn to end, and is dropped where the
        /// caller goes on.
        #[serde(default)]
        speculation: Option<u64>,
        /// What the turn is part of (W3C Trace Context); one that is none is as if it were absent.
        #[serde(default)]
        traceparent: Option<String>,
    },
    /// The answer to `setup`, also later: how the agent wants to hear, in place of what the configuration says.
    Setup {
        /// Also prompts before the caller has finished.
        #[serde(default)]
        partials: Option<bool>,
        /// BCP 47 tag of what the caller speaks.
        #[serde(default)]
        transcription_language: Option<String>,
        /// What the caller's next turn is expected to be.
        #[serde(default)]
        expect: Option<Expect>,
    },
    /// Play a recording.
    Play {
        /// A file below the configured media folder, a `data:` URL, or an `https:` URL of a host in `[call.play]`.
        source: String,
        /// How often; 0 is until interrupted.
        #[serde(default, rename = "loop")]
        repeat: Option<u32>,
        /// Whether the caller may interrupt it.
        #[serde(default)]
        interruptible: Option<Permission>,
    },
    /// Send keys to the peer.
    SendDigits {
        /// `0`-`9`, `*`, `#`, `A`-`D`; `w` waits half a second.
        digits: String,
    },
    /// The language of what follows.
    Language {
        /// Of speech.
        #[serde(default)]
        tts_language: Option<String>,
        /// Of recognition.
        #[serde(default)]
        transcription_language: Option<String>,
    },
    /// Hang up when all that is queued has been said.
    End {
        /// Goes to events, the call's record and its webhook.
        #[serde(default)]
        handoff_data: Option<String>,
    },
    /// Answer with a `mark` when everything queued so far has left or was dropped.
    Mark {
        /// The agent's name for it.
        name: String,
    },
    /// Drop everything queued and silence what plays.
    Clear {},
    /// Hand the caller over.
    Transfer {
        /// A SIP URI or number.
        to: String,
        /// `blind` or `attended`.
        #[serde(default)]
        mode: Option<String>,
        /// Seconds after which the call comes back if the destination has not answered, 1 to 600.
        #[serde(default, rename = "timeoutS")]
        timeout_s: Option<u64>,
    },
    /// Call a human and join them with the caller, or (without `to`) do something else on a call that is bridged.
    Bridge {
        /// A SIP URI or number.
        #[serde(default)]
        to: Option<String>,
        /// `leave`, `listen`, `whisper` or `join`.
        #[serde(default)]
        mode: BridgeMode,
        /// Who calls.
        #[serde(default)]
        from: Option<String>,
        /// Through which trunk.
        #[serde(default)]
        trunk: Option<String>,
        /// `ringback` or `none`: what the caller hears until somebody picks up.
        #[serde(default)]
        wait: WaitTone,
        /// How long it may ring, in seconds.
        #[serde(default)]
        ring_timeout_s: Option<u64>,
    },
    /// End the bridge, or give it up while it rings: the caller is back with the agent.
    EndBridge {},
    /// Put the caller on hold.
    Hold {},
    /// Take the caller off hold.
    Resume {},
    /// A pending barge-in is meant.
    BargeInConfirm {},
    /// A pending barge-in is not meant; go on speaking.
    BargeInReject {},
}

/// `interruptible` as ConversationRelay has it: a boolean or one of the four words.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(untagged)]
pub enum Permission {
    /// `true` is `any`, `false` is `none`.
    Flag(bool),
    /// `none`, `speech`, `dtmf`, `any`.
    Kind(Interruptible),
}

impl Permission {
    /// The one meaning of both spellings.
    pub fn kind(self) -> Interruptible {
        match self {
            Permission::Flag(true) => Interruptible::Any,
            Permission::Flag(false) => Interruptible::None,
            Permission::Kind(kind) => kind,
        }
    }
}

/// Reads one frame.
///
/// # Errors
/// What is wrong with it, for an `error` frame.
pub fn parse(text: &str) -> Result<FromAgent, String> {
    if text.len() > MAX_FRAME {
        return Err(format!("a frame of {} bytes is larger than {MAX_FRAME}", text.len()));
    }
    serde_json::from_str(text).map_err(|e| format!("not a usable frame: {e}"))
}

/// Writes one frame.
pub fn print(frame: &ToAgent) -> String {
    serde_json::to_string(frame).expect("frames hold only strings, numbers and maps with string keys")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_plain_conversation_relay_text_frame_is_enough() {
        let frame = parse(r#"{"type":"text","token":"Hi","last":true,"interruptible":true,"lang":"en-US","x":1}"#);
        match frame.expect("valid") {
            FromAgent::Text { token, last, lang, interruptible, voice, .. } => {
                assert_eq!((token.as_str(), last, lang.as_deref()), ("Hi", true, Some("en-US")));
                assert_eq!(interruptible.map(Permission::kind), Some(Interruptible::Any));
                assert_eq!(voice, None);
            }
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn interrupt_carries_the_standard_names() {
        let json = print(&ToAgent::Interrupt {
            utterance_until_interrupt: "Hello".into(),
            duration_until_interrupt_ms: 460,
            utterance_id: TurnId::from("u1"),
            heard_words: 1,
            sent_ms: 460,
            acked_ms: 0,
            precision: Precision::Proportional,
        });
        assert!(
            json.starts_with(r#"{"type":"interrupt","utteranceUntilInterrupt":"Hello","durationUntilInterruptMs":460"#),
            "{json}"
        );
    }

    #[test]
    fn the_outcome_of_a_barge_in_is_spelt_as_the_other_names_are() {
        let json = print(&ToAgent::BargeInResolved { outcome: BargeInOutcome::TimedOutConfirmed });
        assert_eq!(json, r#"{"type":"bargeInResolved","outcome":"timedOutConfirmed"}"#);
    }

    #[test]
    fn nonsense_is_an_error_that_says_so() {
        for text in
            ["", "{}", "[]", r#"{"type":"nope"}"#, r#"{"type":"text"}"#, "\u{0}", r#"{"type":"text","token":5}"#]
        {
            assert!(parse(text).is_err(), "{text}");
        }
    }
}
