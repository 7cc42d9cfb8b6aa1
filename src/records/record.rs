//! What a record says, and how a call's events become it. Times are milliseconds of Unix time.

use std::collections::VecDeque;
use std::time::Duration;

use serde::Serialize;

use crate::call::{
    BridgeMode, BridgeState, CallEvent, CallId, CallInfo, CallMeta, Dialling, Direction, EndReason, Missed, TurnId,
};
use crate::media::answer::Answerer;
use crate::media::leg::PeerCause;

/// Turns, and words of the caller, that one record keeps; of longer calls the latest.
const KEPT: usize = 500;

/// One call, as clients and webhooks get it.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Record {
    pub(super) id: String,
    pub(super) direction: Direction,
    pub(super) from: String,
    pub(super) to: String,
    pub(super) agent: String,
    /// Name of the API token that placed it; empty for calls that came.
    pub(super) tenant: String,
    pub(super) trunk: Option<String>,
    /// `sip` or `webrtc`.
    pub(super) leg: Option<String>,
    pub(super) codec: Option<String>,
    /// `open` or `ended`.
    pub(super) state: &'static str,
    pub(super) started_ms: u64,
    pub(super) answered_ms: Option<u64>,
    pub(super) ended_ms: Option<u64>,
    pub(super) duration_ms: Option<u64>,
    /// Why it ended: an end reason, or what came of an outbound call that was not answered.
    pub(super) cause: Option<String>,
    /// `peer` or `gateway` (its agent, its API, a limit).
    pub(super) ended_by: Option<&'static str>,
    /// Who called, as a trunk says: see `X-Antiphon-` in [`crate::sip::IncomingCall::headers`].
    pub(super) identity: Option<Identity>,
    /// The final SIP status of the INVITE: ours, where the call came.
    pub(super) sip: Option<Sip>,
    /// Why the peer ended or refused it, where its signalling said so (RFC 3326).
    pub(super) peer_cause: Option<PeerCause>,
    /// Who answered an outbound call, where that was asked.
    pub(super) answered_by: Option<Answerer>,
    pub(super) handoff_data: Option<String>,
    /// Humans who were called for the caller; of a human's own call: the caller's.
    pub(super) bridges: VecDeque<Bridge>,
    pub(super) turns: VecDeque<Turn>,
    pub(super) prompts: VecDeque<Prompt>,
    /// Keys of the caller, by count: they may be a secret.
    pub(super) digits: u64,
    /// Turns and prompts that were forgotten because there were too many.
    pub(super) omitted: u64,
    pub(super) interruptions: u64,
    pub(super) rtp: Option<Rtp>,
    /// Its span (W3C Trace Context), where it was traced.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) traceparent: Option<String>,
}

#[derive(Clone, Debug, PartialEq, Serialize)]
pub(super) struct Sip {
    pub(super) status: u16,
    pub(super) reason: Option<String>,
}

/// Who called, by whose word.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Identity {
    asserted: Option<String>,
    diverted_from: Option<String>,
    verstat: Option<String>,
    /// A claim that this gateway has not verified.
    attestation: Option<String>,
}

impl Identity {
    fn of(meta: &CallMeta) -> Option<Self> {
        // What comes in carries the gateway's own findings only; what goes out may be told anything.
        if meta.direction != Direction::Inbound {
            return None;
        }
        let get = |name: &str| meta.headers.get(&format!("X-Antiphon-{name}")).cloned();
        let (asserted, diverted_from) = (get("Asserted"), get("Diverted-From"));
        let (verstat, attestation) = (get("Verstat"), get("Attestation"));
        let some = [&asserted, &diverted_from, &verstat, &attestation].iter().any(|found| found.is_some());
        some.then_some(Self { asserted, diverted_from, verstat, attestation })
    }
}

/// One bridge to another call.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Bridge {
    /// The other call; `None`: none was placed.
    pub(super) call: Option<String>,
    /// `connected`, `ended`, or why the human did not come.
    pub(super) state: &'static str,
    /// What the agent did meanwhile, at last.
    pub(super) mode: Option<BridgeMode>,
    /// When they were joined, or it was certain that they would not be.
    pub(super) at_ms: u64,
    pub(super) ended_ms: Option<u64>,
}

/// One turn of the agent.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Turn {
    pub(super) utterance_id: TurnId,
    pub(super) at_ms: u64,
    pub(super) how: Option<&'static str>,
    /// What left for the listener; `None` where text is not kept.
    pub(super) heard: Option<String>,
    pub(super) heard_words: u32,
    pub(super) sent_ms: u64,
    pub(super) first_audio_ms: Option<f64>,
    /// Where the time since the caller's last word went, of a turn that answers.
    pub(super) latency: Option<serde_json::Value>,
}

/// What the caller said.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Prompt {
    pub(super) at_ms: u64,
    pub(super) text: Option<String>,
    pub(super) chars: usize,
    pub(super) lang: String,
}

/// Media figures.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Rtp {
    packets_sent: u64,
    packets_received: u64,
    /// Of those sent, as the peer reports.
    lost: i64,
    fraction_lost: f32,
    round_trip_ms: Option<f64>,
    /// Of what we sent, as the peer reports.
    jitter_ms: Option<f64>,
    mos: Option<f64>,
    /// Of what the peer sent.
    received_lost: u64,
    received_jitter_ms: Option<f64>,
    received_mos: Option<f64>,
    underruns: u64,
    underrun_ms: u64,
    lateness_max_ms: f64,
}

/// The record of a call that goes on.
#[derive(Debug)]
pub(super) struct Draft(Record, Stage);

/// Who says that a call is over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    /// Who dials: its media, if there is any, may end before.
    Dialling,
    /// Its media.
    Live,
}

impl Draft {
    pub(super) fn new(meta: &CallMeta, now: Duration) -> Self {
        let record = Record {
            id: meta.id.to_string(),
            direction: meta.direction,
            from: meta.from.clone(),
            to: meta.to.clone(),
            agent: meta.agent.clone(),
            tenant: meta.tenant.to_string(),
            trunk: None,
            leg: None,
            codec: None,
            state: "open",
            started_ms: ms(now),
            answered_ms: None,
            ended_ms: None,
            duration_ms: None,
            cause: None,
            ended_by: None,
            identity: Identity::of(meta),
            sip: None,
            peer_cause: None,
            answered_by: None,
            handoff_data: None,
            bridges: VecDeque::new(),
            turns: VecDeque::new(),
            prompts: VecDeque::new(),
            digits: 0,
            omitted: 0,
            interruptions: 0,
            rtp: None,
            traceparent: meta.trace.as_ref().map(ToString::to_string),
        };
        Self(record, Stage::Live)
    }

    /// Whether the end of its media is not the end of the call.
    pub(super) fn is_dialling(&self) -> bool {
        self.1 == Stage::Dialling
    }

    pub(super) fn record(&self) -> Record {
        self.0.clone()
    }

    /// An outbound call before it is live.
    pub(super) fn dialling(&mut self, trunk: Option<&str>, state: &Dialling, now: Duration) {
        self.1 = if *state == Dialling::Answered { Stage::Live } else { Stage::Dialling };
        let record = &mut self.0;
        record.leg = Some("sip".into());
        record.trunk = trunk.map(str::to_owned);
        let reason = state.reason().map(str::to_owned);
        match state {
            Dialling::Answered => record.sip = Some(Sip { status: 200, reason: None }),
            state if state.is_over() => {
                record.sip = state.status().map(|status| Sip { status, reason: reason.clone() });
                record.ended_by = Some(if record.sip.is_some() { "peer" } else { "gateway" });
                let cause = state.label().to_owned();
                self.close(cause, now);
            }
            _ => {}
        }
    }

    pub(super) fn begun(&mut self, call: &CallInfo) {
        self.0.leg = Some(call.leg.to_owned());
        self.0.codec = Some(call.codec.to_owned());
        self.0.trunk = self.0.trunk.take().or_else(|| call.trunk.clone());
    }

    /// A call that came and was never live.
    pub(super) fn missed(&mut self, missed: &Missed, now: Duration) {
        let record = &mut self.0;
        record.leg = Some("sip".into());
        (record.trunk, record.peer_cause) = (missed.trunk.clone(), missed.cause.clone());
        record.sip = Some(Sip { status: missed.status, reason: Some(missed.reason.clone()) });
        record.ended_by = Some(if missed.by_peer { "peer" } else { "gateway" });
        self.close(missed.label().to_owned(), now);
    }

    /// `true` when the record is to be written now. `text`: what is said is kept.
    pub(super) fn happened(&mut self, event: &CallEvent, now: Duration, text: bool) -> bool {
        let record = &mut self.0;
        match event {
            CallEvent::Connected => {
                record.answered_ms = Some(ms(now));
                if record.direction == Direction::Inbound && record.leg.as_deref() == Some("sip") {
                    record.sip = Some(Sip { status: 200, reason: None });
                }
                return true;
            }
            CallEvent::TurnStarted { turn } => {
                record.omitted += make_room(&mut record.turns);
                record.turns.push_back(Turn {
                    utterance_id: turn.clone(),
                    at_ms: ms(now),
                    how: None,
                    heard: None,
                    heard_words: 0,
                    sent_ms: 0,
                    first_audio_ms: None,
                    latency: None,
                });
            }
            CallEvent::FirstAudio { turn, after, .. } => {
                if let Some(turn) = find(&mut record.turns, turn) {
                    turn.first_audio_ms = Some(after.as_secs_f64() * 1e3);
                }
            }
            CallEvent::Answered { turn, stages } => {
                if let Some(turn) = find(&mut record.turns, turn) {
                    turn.latency = Some(stages.describe());
                }
            }
            CallEvent::TurnEnded { turn, how, heard } => {
                if let Some(turn) = find(&mut record.turns, turn) {
                    turn.how = Some(how.label());
                    turn.heard = text.then(|| heard.text.clone());
                    (turn.heard_words, turn.sent_ms) = (heard.words, heard.sent_ms);
                }
            }
            CallEvent::Interrupted { .. } => record.interruptions += 1,
            CallEvent::Prompt { text: words, lang, last: true, .. } => {
                record.omitted += make_room(&mut record.prompts);
                record.prompts.push_back(Prompt {
                    at_ms: ms(now),
                    text: text.then(|| words.clone()),
                    chars: words.chars().count(),
                    lang: lang.clone(),
                });
            }
            CallEvent::Digit(_) => record.digits += 1,
            CallEvent::Bridge { with, state } => self.bridged(with.as_ref(), state, now),
            CallEvent::AnsweredBy(by) => record.answered_by = Some(*by),
            CallEvent::PeerCause(cause) => record.peer_cause = Some(cause.clone()),
            CallEvent::Handoff(data) => record.handoff_data = Some(data.clone()),
            _ => {}
        }
        false
    }

    fn bridged(&mut self, with: Option<&CallId>, state: &BridgeState, now: Duration) {
        let record = &mut self.0;
        let call = with.map(ToString::to_string);
        let open = record.bridges.back_mut().filter(|last| last.call == call && last.ended_ms.is_none());
        let mode = match state {
            BridgeState::Dialling(dialling) if !dialling.is_over() => return,
            BridgeState::Ended(_) => {
                if let Some(last) = open {
                    (last.state, last.ended_ms) = (state.label(), Some(ms(now)));
                }
                return;
            }
            BridgeState::Dialling(_) => None,
            BridgeState::Connected(mode) => Some(*mode),
        };
        match (open, mode) {
            (Some(last), Some(_)) => last.mode = mode,
            (_, mode) => {
                record.omitted += make_room(&mut record.bridges);
                let ended_ms = mode.is_none().then(|| ms(now));
                record.bridges.push_back(Bridge { call, state: state.label(), mode, at_ms: ms(now), ended_ms });
            }
        }
    }

    pub(super) fn ended(&mut self, call: &CallInfo, now: Duration) {
        let reason = call.end_reason.unwrap_or(EndReason::Failed);
        self.0.ended_by = Some(match reason {
            EndReason::Remote | EndReason::Cancelled | EndReason::Transferred | EndReason::Lost => "peer",
            _ => "gateway",
        });
        if self.0.direction == Direction::Inbound && self.0.leg.as_deref() == Some("sip") && self.0.sip.is_none() {
            self.0.sip = match reason {
                EndReason::Cancelled => Some(Sip { status: 487, reason: None }),
                // It hung up in the moment of its ACK.
                EndReason::Remote => Some(Sip { status: 200, reason: None }),
                _ => None,
            };
        }
        self.media(call);
        self.close(reason.label().to_owned(), now);
    }

    /// Figures of its media.
    pub(super) fn media(&mut self, call: &CallInfo) {
        self.0.codec = Some(call.codec.to_owned());
        self.0.rtp = Some(Rtp {
            packets_sent: call.packets_sent,
            packets_received: call.packets_received,
            lost: call.lost,
            fraction_lost: call.fraction_lost,
            round_trip_ms: call.round_trip_ms,
            jitter_ms: call.jitter_ms,
            mos: call.mos,
            received_lost: call.received_lost,
            received_jitter_ms: call.received_jitter_ms,
            received_mos: call.received_mos,
            underruns: call.underruns,
            underrun_ms: call.underrun_ms,
            lateness_max_ms: call.lateness_max_ms,
        });
    }

    fn close(&mut self, cause: String, now: Duration) {
        let record = &mut self.0;
        // One that lasted until the call's end.
        if let Some(last) = record.bridges.back_mut().filter(|last| last.ended_ms.is_none()) {
            (last.state, last.ended_ms) = ("ended", Some(ms(now)));
        }
        record.state = "ended";
        record.ended_ms = Some(ms(now));
        record.duration_ms = Some(ms(now).saturating_sub(record.started_ms));
        record.cause = Some(cause);
    }
}

fn find<'a>(turns: &'a mut VecDeque<Turn>, id: &TurnId) -> Option<&'a mut Turn> {
    turns.iter_mut().rev().find(|turn| turn.utterance_id == *id)
}

/// Forgets the oldest where there is no room for another; how many.
fn make_room<T>(list: &mut VecDeque<T>) -> u64 {
    let full = list.len() >= KEPT;
    if full {
        list.pop_front();
    }
    u64::from(full)
}

fn ms(time: Duration) -> u64 {
    time.as_millis() as u64
}
