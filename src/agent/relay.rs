//! Between a call and its agent: events become frames, frames become commands.
//!
//! The relay owns no socket: a [`Link`] is two bounded channels of frame texts. It never drops text that was
//! accepted: when the call holds as much as it may, the frame is kept and nothing more is read, so that a
//! flooding agent is slowed by its own transport and memory stays bounded.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tokio::sync::{broadcast, mpsc};

use super::apology::Apology;
use super::config::Agent;
use super::frames::{FromAgent, Permission, ToAgent, parse, print};
use crate::call::handle::Style;
use crate::call::{
    BridgeRequest, CallEvent, CallHandle, Direction, EndReason, PlayRequest, SpeakError, TextDelta, TurnId,
};
use crate::clock::{self, Sparse};
use crate::hear::Phase;
use crate::hear::ear::Listen;
use crate::telemetry::context::TraceContext;

/// Frames that may wait for an agent to read them. They are short.
pub const LINK_FRAMES: usize = 64;

/// Frames of an agent that may wait for the call. Each may have [`super::frames::MAX_FRAME`] bytes, so this bounds
/// what an agent that floods can make a call hold.
pub const LINK_INBOX: usize = 8;

/// How often a frame that did not fit is offered again when no event says that there is room.
pub(super) const RETRY: Duration = Duration::from_millis(50);

/// How long what an agent that is gone has sent is offered to a call that has no room for it.
const LEFT: Duration = Duration::from_secs(2);

/// A connection to an agent: frame texts both ways. Closed when either half is dropped.
#[derive(Debug)]
pub struct Link {
    /// To the agent.
    pub to: mpsc::Sender<String>,
    /// From the agent.
    pub from: mpsc::Receiver<String>,
}

/// Why a relay ended.
#[derive(Debug)]
pub enum RelayEnd {
    /// The call is over.
    CallEnded,
    /// The agent's side closed, or takes no more frames.
    LinkClosed,
    /// Another agent attached.
    Replaced(Link),
}

/// Whether an agent on a call of a tenant, the first argument, may name a voice, the second.
#[derive(Clone)]
pub struct VoiceRule(Arc<MayName>);

type MayName = dyn Fn(&str, &str) -> bool + Send + Sync;

impl VoiceRule {
    /// That of a function.
    pub fn new(rule: impl Fn(&str, &str) -> bool + Send + Sync + 'static) -> Self {
        Self(Arc::new(rule))
    }
}

impl fmt::Debug for VoiceRule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("VoiceRule")
    }
}

/// Turns frames into commands for one call.
#[derive(Debug)]
pub struct Relay {
    handle: CallHandle,
    style: Style,
    apology: Apology,
    /// The agent wants to hear of turns before they have ended.
    partials: bool,
    /// The same of one that does not say so.
    configured: bool,
    /// Which voices its frames may name.
    voices: Option<VoiceRule>,
}

impl Relay {
    /// A relay for `handle` with the voice and language that `agent` is configured with.
    pub fn new(handle: CallHandle, agent: &Agent) -> Self {
        let style = agent.style();
        // A call that is over hears nothing.
        let _ =
            handle.listen(Listen { partials: Some(agent.partials), language: agent.language.clone(), expect: None });
        let (partials, apology) = (agent.partials, Apology::new(&agent.apology));
        Self { handle, style, apology, partials, configured: partials, voices: None }
    }

    /// The same, whose frames may name those voices only that `rule` lets them.
    pub(super) fn held_to(self, rule: Option<VoiceRule>) -> Self {
        Self { voices: rule, ..self }
    }

    /// Another that looks on: it says what a listener is told, and changes nothing of the call.
    pub(super) fn observer(&self) -> Self {
        Self {
            handle: self.handle.clone(),
            style: self.style.clone(),
            apology: Apology::new(""),
            partials: true,
            configured: true,
            voices: self.voices.clone(),
        }
    }

    /// The call.
    pub fn handle(&self) -> &CallHandle {
        &self.handle
    }

    /// How turns are spoken unless a frame says otherwise.
    pub fn style(&self) -> &Style {
        &self.style
    }

    /// The first frame of a session.
    pub fn setup(&self) -> ToAgent {
        let meta = self.handle.meta();
        ToAgent::Setup {
            session_id: uuid::Uuid::new_v4().simple().to_string(),
            call_sid: meta.id.to_string(),
            from: meta.from.clone(),
            to: meta.to.clone(),
            direction: match meta.direction {
                Direction::Inbound => "inbound".into(),
                Direction::Outbound => "outbound".into(),
            },
            call_type: self.handle.info().leg.into(),
            custom_parameters: meta.headers.clone(),
            traceparent: meta.trace.as_ref().map(ToString::to_string),
        }
    }

    /// Serves `link` until the call or the link ends, or `attach` brings another.
    pub async fn run(
        &mut self,
        mut link: Link,
        events: &mut broadcast::Receiver<CallEvent>,
        attach: &mut mpsc::Receiver<Link>,
    ) -> RelayEnd {
        // What the agent before this one asked for was its own wish.
        if self.partials != self.configured {
            // A call that is over or full hears as before; the agent is told what it asked for either way.
            let _ = self.want_partials(self.configured);
        }
        // A peer that is gone is told nothing any more; what it has sent is carried out, here and below.
        let _ = link.to.send(print(&self.setup())).await;
        let mut kept: Option<FromAgent> = None;
        let mut gone: Option<Instant> = None;
        let told = Sparse::new();
        loop {
            tokio::select! {
                event = events.recv() => match event {
                    Ok(CallEvent::Ended(_)) | Err(broadcast::error::RecvError::Closed) => return RelayEnd::CallEnded,
                    Ok(event) => {
                        self.make_up_for(&event).await;
                        if let Some(frame) = self.frame(&event)
                            // overflow: an agent that reads none of 64 frames is gone; the link ends
                            && let Err(mpsc::error::TrySendError::Full(_)) = link.to.try_send(print(&frame))
                        {
                            return RelayEnd::LinkClosed;
                        }
                    }
                    Err(broadcast::error::RecvError::Lagged(lost)) => {
                        tracing::warn!(call = %self.handle.id(), lost, "the agent's task fell behind its call");
                    }
                },
                replacement = attach.recv() => if let Some(replacement) = replacement {
                    let frame = ToAgent::Error { description: "another agent attached to this call".into() };
                    // overflow: drops; the link ends anyway
                    let _ = link.to.try_send(print(&frame));
                    return RelayEnd::Replaced(replacement);
                },
                text = link.from.recv(), if kept.is_none() => {
                    let Some(text) = text else { return RelayEnd::LinkClosed };
                    match parse(&text) {
                        Ok(frame) => kept = self.offer(frame, &link.to).await,
                        Err(description) => {
                            if let Some(missed) = told.admit(clock::now()) {
                                let call = self.handle.id();
                                tracing::info!(%call, %description, missed, "bad frame from the agent");
                            }
                            // overflow: drops; the agent hears of the next one
                            let _ = link.to.try_send(print(&ToAgent::Error { description }));
                        }
                    }
                },
                () = tokio::time::sleep(RETRY), if kept.is_some() => {}
            }
            if let Some(frame) = kept.take() {
                kept = self.offer(frame, &link.to).await;
            }
            if kept.is_some() && link.to.is_closed() {
                let now = clock::now();
                if now.saturating_duration_since(*gone.get_or_insert(now)) >= LEFT {
                    return RelayEnd::LinkClosed;
                }
            }
        }
    }

    /// The caller hears the apology in place of a turn that could not be spoken.
    pub(super) async fn make_up_for(&mut self, event: &CallEvent) {
        let Some(turn) = self.apology.because_of(event, &self.style) else { return };
        if let Err(error) = self.handle.speak(turn).await {
            self.apology.give_up();
            tracing::warn!(call = %self.handle.id(), %error, "the apology for a silent turn was not spoken");
        }
    }

    /// Carries out `frame`; gives it back when the call has no room for it now.
    async fn offer(&mut self, frame: FromAgent, to: &mpsc::Sender<String>) -> Option<FromAgent> {
        match self.apply(frame.clone()).await {
            Ok(()) | Err(SpeakError::Ended) => None,
            Err(SpeakError::Busy) => Some(frame),
            Err(error) => {
                let frame = ToAgent::Error { description: error.to_string() };
                // overflow: drops; the agent hears of the next one
                let _ = to.try_send(print(&frame));
                None
            }
        }
    }

    /// Carries out one frame of the agent.
    ///
    /// # Errors
    /// What the call says; [`SpeakError::Busy`] means: try the same frame again later.
    pub async fn apply(&mut self, frame: FromAgent) -> Result<(), SpeakError> {
        match frame {
            FromAgent::Text {
                token,
                last,
                lang,
                interruptible,
                preemptible,
                utterance_id,
                voice,
                instructions,
                speed,
                seed,
                stream,
                markup,
                volume,
                expect,
                speculation,
                traceparent,
            } => {
                let tenant = &self.handle.meta().tenant;
                let may = |name: &str| self.voices.as_ref().is_none_or(|rule| (rule.0)(tenant, name));
                if let Some(name) = voice.as_ref().filter(|name| !may(name)) {
                    return Err(SpeakError::Invalid(format!("there is no voice `{name}` on this call")));
                }
                let style = Style {
                    voice: voice.or_else(|| self.style.voice.clone()),
                    language: lang.or_else(|| self.style.language.clone()),
                    normalise: self.style.normalise,
                    instructions,
                    seed: seed.unwrap_or(self.style.seed),
                    interruptible: interruptible.map(Permission::kind).or(self.style.interruptible),
                    preemptible: preemptible.unwrap_or(false),
                    speculation,
                    speed: speed.unwrap_or(self.style.speed).clamp(0.25, 4.0),
                    stream: stream.unwrap_or(self.style.stream),
                    markup: markup.unwrap_or_default(),
                    volume: volume.unwrap_or(self.style.volume).clamp(0.0, 4.0),
                    lexicon: self.style.lexicon.clone(),
                    trace: traceparent.as_deref().and_then(TraceContext::parse),
                };
                let id = utterance_id.as_deref().map(TurnId::from);
                if expect.is_some() {
                    self.handle.listen(Listen { expect, ..Listen::default() })?;
                }
                self.handle.push_text(TextDelta { id, token, last, style })
            }
            FromAgent::Setup { partials, transcription_language, expect } => {
                self.handle.listen(Listen { partials, language: transcription_language, expect })?;
                self.partials = partials.unwrap_or(self.partials);
                Ok(())
            }
            FromAgent::Play { source, repeat, interruptible } => {
                let interruptible = interruptible.map(Permission::kind).or(self.style.interruptible);
                let times = repeat.unwrap_or(1);
                let request = PlayRequest { id: None, source, times, interruptible, preemptible: false };
                self.handle.play(request).await.map(|_| ())
            }
            FromAgent::SendDigits { digits } => self.handle.dtmf(&digits),
            FromAgent::Language { tts_language, transcription_language } => {
                if transcription_language.is_some() {
                    self.handle.listen(Listen { language: transcription_language, ..Listen::default() })?;
                }
                if tts_language.is_some() {
                    self.style.language = tts_language;
                }
                Ok(())
            }
            FromAgent::End { handoff_data: Some(data) } => self.handle.finish_with(EndReason::HungUp, data),
            FromAgent::End { handoff_data: None } => self.handle.finish(EndReason::HungUp),
            FromAgent::Mark { name } => self.handle.mark(name),
            FromAgent::Clear {} => self.handle.clear(),
            FromAgent::Transfer { timeout_s: Some(seconds), .. } if !(1..=600).contains(&seconds) => {
                Err(SpeakError::Invalid(format!("timeoutS is {seconds}: expected 1 to 600")))
            }
            FromAgent::Transfer { to, mode, timeout_s } => match mode.as_deref() {
                None | Some("blind") => self.handle.transfer_within(to, false, timeout_s.map(Duration::from_secs)),
                Some("attended") => self.handle.transfer_within(to, true, timeout_s.map(Duration::from_secs)),
                Some(other) => Err(SpeakError::Invalid(format!("transfer mode `{other}`: expected blind or attended"))),
            },
            FromAgent::Bridge { ring_timeout_s: Some(seconds), .. } if !(1..=600).contains(&seconds) => {
                Err(SpeakError::Invalid(format!("ringTimeoutS is {seconds}: expected 1 to 600")))
            }
            FromAgent::Bridge { to: Some(to), mode, from, trunk, wait, ring_timeout_s } => {
                self.handle.bridge(BridgeRequest { to, from, trunk, mode, wait, ring_timeout_s })
            }
            FromAgent::Bridge { to: None, mode, .. } => self.handle.set_bridge_mode(mode),
            FromAgent::EndBridge {} => self.handle.end_bridge(),
            FromAgent::Hold {} => self.handle.hold(),
            FromAgent::Resume {} => self.handle.resume(),
            FromAgent::BargeInConfirm {} => self.handle.resolve_barge_in(true),
            FromAgent::BargeInReject {} => self.handle.resolve_barge_in(false),
        }
    }

    fn want_partials(&mut self, wanted: bool) -> Result<(), SpeakError> {
        self.partials = wanted;
        self.handle.listen(Listen { partials: Some(wanted), ..Listen::default() })
    }

    /// The language of a prompt: as recognised, else as configured.
    fn spoken(&self, lang: &str) -> String {
        if lang.is_empty() { self.style.language.clone().unwrap_or_default() } else { lang.to_owned() }
    }

    /// What an agent is told of `event`, if anything.
    pub fn frame(&self, event: &CallEvent) -> Option<ToAgent> {
        let info = |name: &str, turn: Option<&TurnId>, details: Value| {
            let details: BTreeMap<String, Value> = match details {
                Value::Object(map) => map.into_iter().collect(),
                _ => BTreeMap::new(),
            };
            Some(ToAgent::Info { name: name.into(), utterance_id: turn.cloned(), details })
        };
        match event {
            CallEvent::Connected => info("callConnected", None, Value::Null),
            CallEvent::FirstAudio { turn, after, .. } => {
                info("firstAudio", Some(turn), json!({"afterMs": after.as_secs_f64() * 1e3}))
            }
            CallEvent::Speaking { turn, text, lasts } => {
                info("speaking", Some(turn), json!({"text": text, "lastsMs": lasts.as_millis() as u64}))
            }
            CallEvent::TurnEnded { turn, how, heard } => {
                let mut details = json!({"how": how.label(), "heard": heard});
                if let Some(reason) = how.reason() {
                    details["reason"] = json!(reason);
                }
                if let Some(wait) = how.retry_after_ms() {
                    details["retryAfterMs"] = json!(wait);
                }
                info("turnEnded", Some(turn), details)
            }
            CallEvent::Interrupted { turn, heard, .. } => Some(ToAgent::Interrupt {
                utterance_until_interrupt: heard.text.clone(),
                duration_until_interrupt_ms: heard.sent_ms,
                utterance_id: turn.clone(),
                heard_words: heard.words,
                sent_ms: heard.sent_ms,
                acked_ms: heard.acked_ms,
                precision: heard.precision,
            }),
            CallEvent::BargeInPending { turn, cause, grace } => {
                info("bargeInPending", Some(turn), json!({"cause": cause, "graceMs": grace.as_millis() as u64}))
            }
            CallEvent::BargeInResolved { outcome, .. } => Some(ToAgent::BargeInResolved { outcome: *outcome }),
            CallEvent::Vad { speaking } => Some(ToAgent::Vad { speaking: *speaking }),
            CallEvent::Prompt { text, lang, last, eager } => Some(ToAgent::Prompt {
                voice_prompt: text.clone(),
                lang: self.spoken(lang),
                last: *last,
                phase: None,
                // Told to those who were told of the eager end.
                speculation: eager.filter(|_| self.partials),
            }),
            CallEvent::Answered { turn, stages } => info("turn", Some(turn), stages.describe()),
            CallEvent::Heard(turn) => {
                let phase = match turn.phase {
                    Phase::Partial => "partial",
                    Phase::EagerEndOfTurn => "eager",
                    Phase::TurnResumed => "resumed",
                    // The first is told as `vad`, the last as a prompt of its own.
                    Phase::StartOfTurn | Phase::EndOfTurn => return None,
                };
                self.partials.then(|| ToAgent::Prompt {
                    voice_prompt: turn.text.clone(),
                    lang: self.spoken(&turn.language),
                    last: false,
                    phase: Some(phase),
                    speculation: (turn.phase == Phase::EagerEndOfTurn).then_some(turn.eager),
                })
            }
            CallEvent::Deaf { lost, reason } => {
                info("deaf", None, json!({"lostMs": lost.as_millis() as u64, "reason": reason}))
            }
            CallEvent::Digit(digit) => Some(ToAgent::Dtmf { digit: digit.to_string() }),
            CallEvent::AnsweredBy(by) => info("answeredBy", None, json!({"by": by})),
            CallEvent::MessageOver { beep } => info("messageOver", None, json!({"beep": beep})),
            CallEvent::Mark { name, .. } => Some(ToAgent::Mark { name: name.clone() }),
            CallEvent::Held { held: true, .. } => Some(ToAgent::Hold {}),
            CallEvent::Held { held: false, .. } => Some(ToAgent::Resume {}),
            CallEvent::Underrun { turn, gap } => info("underrun", Some(turn), json!({"gapMs": gap.as_millis() as u64})),
            CallEvent::Flow { open } => Some(ToAgent::Flow { state: if *open { "resume" } else { "pause" } }),
            CallEvent::Starved { .. } => Some(ToAgent::Flow { state: "starved" }),
            CallEvent::Error(description) => Some(ToAgent::Error { description: description.clone() }),
            CallEvent::TransferAccepted => Some(ToAgent::Transfer { accepted: true, reason: None }),
            CallEvent::Transferred(Err(reason)) => {
                Some(ToAgent::Transfer { accepted: false, reason: Some(reason.clone()) })
            }
            CallEvent::Transferred(Ok(())) => info("transferred", None, Value::Null),
            CallEvent::TransferProgress(status) => info("transferProgress", None, json!({"status": status})),
            CallEvent::PeerCause(cause) => info("peerCause", None, json!(cause)),
            CallEvent::HandedOver(with) => info("handedOver", None, json!({"to": with})),
            CallEvent::TransferFailed(reason) => {
                Some(ToAgent::Error { description: format!("the transfer failed, the caller is still here: {reason}") })
            }
            CallEvent::Bridge { with, state } => {
                let details = match state.describe() {
                    Value::Object(map) => {
                        map.into_iter().filter(|(key, value)| key != "state" && !value.is_null()).collect()
                    }
                    _ => BTreeMap::new(),
                };
                let call_sid = with.as_ref().map(ToString::to_string);
                Some(ToAgent::Bridge { state: state.label(), call_sid, details })
            }
            CallEvent::Overheard { speaker, text, lang } => {
                Some(ToAgent::Overheard { speaker: *speaker, voice_prompt: text.clone(), lang: self.spoken(lang) })
            }
            CallEvent::Dialling(_)
            | CallEvent::Handoff(_)
            | CallEvent::TurnStarted { .. }
            | CallEvent::Message { .. }
            | CallEvent::Missed(_)
            | CallEvent::Ended(_) => None,
        }
    }
}
