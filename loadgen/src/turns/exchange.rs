//! One call as a load test makes it: placed, given turns, listened to, judged.
//!
//! [`Plan`] says how calls reach the gateway and how turns reach a call; [`Exchange`] is one such call. Everything
//! in a [`Turn`] is measured by listening; what the gateway itself reports is kept beside it only to be compared.

mod spoken;

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use serde_json::Value;

pub use self::spoken::{Dictated, Saying};
use crate::caller::call::{Call, CallError, Leg, Setup};
use crate::caller::rtc;
use crate::caller::sip;
use crate::clock;
use crate::sound::heard::{Clip, Counts, Heard};
use crate::sound::listen::{self, Stall, StallCause};
use crate::turns::judge;
use crate::turns::stats::Spread;
use crate::under_test::agent::turn_frame;
use crate::under_test::dispatch::Dispatch;
use crate::under_test::gateway::Gateway;
use crate::under_test::recognizer::Recognizer;
use crate::under_test::stages::{StageTimes, TurnName};

/// How turns reach a call.
#[derive(Clone)]
pub enum Trigger {
    /// `POST /v1/calls/{id}/turns`.
    Http,
    /// The gateway dials our agent server for each call, of either kind.
    Agent(Arc<Dispatch>),
    /// The agent's greeting is the turn: for gateways of which only the SIP side is known. Its text is unknown.
    Greeting,
    /// The caller speaks ([`Exchange::converse`]), and whatever agent the gateway has answers.
    Speech,
}

/// What all calls of a test have in common.
#[derive(Clone)]
pub struct Plan {
    /// `sip:agent@host:port`.
    pub sip_target: Option<String>,
    /// How telephones are set up.
    pub sip: sip::Config,
    /// How browsers are set up; their URL is the target.
    pub webrtc: Option<rtc::Config>,
    /// The gateway's HTTP side.
    pub gateway: Option<Gateway>,
    /// How turns reach calls; browsers use their data channel unless our agent server serves them.
    pub trigger: Trigger,
    /// What turns are spoken with, one voice after the other from call to call; empty: the gateway's.
    pub voices: Vec<String>,
    /// The texts spoken directly, where the voice speaks the same text the same way twice.
    pub references: Arc<HashMap<String, Clip>>,
    /// Says which words are in the turns of the sample.
    pub recognizer: Option<Recognizer>,
    /// A listener's buffer, to judge stalls by.
    pub buffer: Duration,
    /// How long a turn may take to begin to sound.
    pub patience: Duration,
}

impl Plan {
    /// A voice to interrupt with: a second of one of the texts as the gateway itself speaks it, from its first audible
    /// sample on. `None` where none is known.
    ///
    /// # Why
    /// Noise that only resembles speech is noticed late or not at all by a detector that was trained on voices.
    pub fn voice(&self) -> Option<Clip> {
        let (_, clip) = self.references.iter().min_by_key(|(text, _)| text.as_str())?;
        let from = (judge::lead_in(clip).as_secs_f64() * f64::from(clip.rate)) as usize;
        let pcm = clip.pcm.iter().skip(from).take(clip.rate as usize).copied().collect();
        Some(Clip { rate: clip.rate, pcm })
    }
}

/// Quiet that ends a turn. Pauses between sentences are shorter; a gateway that lets its listener wait longer in
/// mid-turn is found out by the reference.
const END: Duration = Duration::from_millis(900);
/// A turn that is not complete by its reference is waited for this long.
const STALLED: Duration = Duration::from_secs(6);
/// The longest turn.
const LONGEST: Duration = Duration::from_secs(120);

/// What the caller is to do in the middle of a turn.
#[derive(Clone, Debug, Default)]
pub struct Interjection {
    /// After the onset of the turn.
    pub after: Duration,
    /// Speaks over the agent.
    pub speech: Option<Arc<Clip>>,
    /// Presses keys.
    pub digits: Option<String>,
    /// Hangs up.
    pub hang_up: bool,
}

/// How an interruption went.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct BargeIn {
    /// From the caller's first audible sample (or key) to the last audible sample of the agent.
    pub silence: Duration,
    /// How much of the turn was heard.
    pub heard: Duration,
    /// How much the gateway says was sent.
    pub reported: Option<Duration>,
}

/// The steps of one turn, as seen from outside, in seconds after it was sent.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Waterfall {
    /// The text.
    pub text: String,
    /// Which leg.
    pub leg: String,
    /// The gateway took it (HTTP 202), where that is told.
    pub accepted: Option<f64>,
    /// The gateway said that the turn began, where that is told.
    pub announced: Option<f64>,
    /// First packet behind the text with sound in it.
    pub first_packet: f64,
    /// First audible sample.
    pub first_audio: f64,
    /// Last audible sample.
    pub last_audio: f64,
    /// Sender pauses and late packets behind the first: where and how long.
    pub stalls: Vec<(f64, f64)>,
    /// How long it was in each stage inside the gateway, in order, as that told.
    #[serde(default)]
    pub stages: Vec<(String, f64)>,
}

/// One turn, heard.
#[derive(Clone, Debug)]
pub struct Turn {
    /// Which kind of call.
    pub leg: Leg,
    /// When the text left.
    pub sent: Instant,
    /// The end of the last audible sample, or of waiting.
    pub ended: Instant,
    /// Characters of the text.
    pub chars: usize,
    /// From the text to the first audible sample; `None` when there was none.
    pub first_audio: Option<Duration>,
    /// Of a caller who spoke: from the last audible sample said to the first one heard.
    pub mouth_to_ear: Option<Duration>,
    /// How long the speech is without what it was stalled by.
    pub speech: Duration,
    /// Time from first to last audible sample over the length of the speech: 1 when it never stalled.
    pub rtf: f64,
    /// Where a listener behind a buffer had nothing to hear, loss aside.
    pub stalls: Vec<Stall>,
    /// Packets lost during the turn, and received.
    pub packets: (u64, u64),
    /// Lateness of packets against the most punctual.
    pub lateness: Spread,
    /// Interarrival jitter at its end.
    pub jitter: Duration,
    /// Estimated opinion.
    pub mos: f64,
    /// Why it failed: a cause to count by.
    pub fault: Option<String>,
    /// The interruption, if there was one.
    pub barge_in: Option<BargeIn>,
    /// What was heard, silent where packets were lost, for a closer look.
    pub clip: Clip,
    /// Steps.
    pub waterfall: Waterfall,
    /// The text.
    pub text: String,
    /// Its name at the gateway, where that is known.
    pub name: Option<TurnName>,
    /// Where its time went inside the gateway, as that told.
    pub stages: StageTimes,
}

/// What turns of the call with this number are spoken with.
fn voice_of(voices: &[String], number: u64) -> Option<&String> {
    voices.get((number as usize).checked_rem(voices.len())?)
}

/// One call and what is needed to talk on it.
pub struct Exchange {
    plan: Arc<Plan>,
    call: Call,
    session: Option<crate::under_test::agent::Session>,
    id: Option<String>,
    /// What its turns are spoken with, if not with the gateway's voice.
    voice: Option<String>,
    /// What the gateway calls the turn that is going on.
    utterance: Option<String>,
    before: Counts,
    /// Greeting of the agent: first audible sample after the call was answered.
    pub greeting: Option<Duration>,
}

impl Exchange {
    /// Places a call and waits until the greeting, if any, is over.
    ///
    /// # Errors
    /// The call does not come about, or no way to give it turns is found.
    pub async fn open(plan: Arc<Plan>, leg: Leg) -> Result<(Exchange, Setup), CallError> {
        static NUMBER: AtomicU64 = AtomicU64::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let name = format!("lg{}x{number}x", std::process::id());
        let voice = voice_of(&plan.voices, number).cloned();
        let call = match leg {
            Leg::Sip => {
                let target =
                    plan.sip_target.as_deref().ok_or_else(|| CallError::Target("no sip: target".to_owned()))?;
                let config = sip::Config { user: name.clone(), ..plan.sip.clone() };
                sip::Caller::bind(config).await?.call(target).await?
            }
            Leg::Webrtc => {
                let config = plan.webrtc.clone().ok_or_else(|| CallError::Target("no http: target".to_owned()))?;
                rtc::Caller::connect(config).await?
            }
        };
        let setup = call.setup();
        let mut exchange = Exchange {
            id: call.id().map(str::to_owned),
            voice,
            plan,
            call,
            session: None,
            utterance: None,
            before: Counts::default(),
            greeting: None,
        };
        match exchange.prepare(leg, &name).await {
            Ok(()) => Ok((exchange, setup)),
            Err(error) => {
                exchange.call.hang_up().await;
                Err(error)
            }
        }
    }

    async fn prepare(&mut self, leg: Leg, name: &str) -> Result<(), CallError> {
        match (leg, &self.plan.trigger) {
            (Leg::Sip, Trigger::Http) => {
                if self.id.is_none() {
                    let gateway =
                        self.plan.gateway.as_ref().ok_or_else(|| CallError::Target("no http: target".to_owned()))?;
                    self.id = gateway.find_call(name).await?;
                }
                if self.id.is_none() {
                    return Err(CallError::BadAnswer("the gateway does not tell the call's id".to_owned()));
                }
            }
            (_, Trigger::Agent(dispatch)) => {
                let names = [name.to_owned(), self.id.clone().unwrap_or_default()];
                let session = dispatch.session(&names, Duration::from_secs(10)).await;
                self.session =
                    Some(session.ok_or_else(|| CallError::BadAnswer("the agent was not dialled".to_owned()))?);
            }
            (Leg::Sip, Trigger::Greeting) => return Ok(()),
            (_, Trigger::Speech) => {}
            (Leg::Webrtc, _) => {
                if !self.call.status_becomes(Duration::from_secs(10), |s| s.channel).await {
                    return Err(CallError::WebRtc("the data channel does not open".to_owned()));
                }
            }
        }
        self.settle().await;
        Ok(())
    }

    /// Lets a greeting end, so that the first turn is not mistaken for it.
    async fn settle(&mut self) {
        let answered = self.call.setup().answered;
        if let Some(onset) = self.call.onset(answered, Duration::from_millis(400)).await {
            self.greeting = Some(onset.saturating_duration_since(answered));
            // A caller who speaks lets the agent finish: it may be part of what the agent remembers.
            if !matches!(self.plan.trigger, Trigger::Speech) {
                self.cut_greeting().await;
            }
            self.call.silence(onset, END, Duration::from_secs(30)).await;
        }
        self.before = self.call.take_heard().counts;
    }

    /// Asks for the rest of the greeting to be left out: a load test measures turns. A gateway that does not
    /// understand this greets to the end.
    async fn cut_greeting(&mut self) {
        let clear = serde_json::json!({ "type": "clear" });
        match (&self.session, self.call.leg(), &self.plan.gateway, &self.id) {
            (Some(session), ..) => drop(session.send(&clear).await),
            (None, Leg::Webrtc, ..) => drop(self.call.send_text(&clear.to_string()).await),
            (None, Leg::Sip, Some(gateway), Some(id)) => drop(gateway.interrupt(id).await),
            _ => {}
        }
    }

    /// The call itself.
    pub fn call(&self) -> &Call {
        &self.call
    }

    /// Has `text` spoken and listens to the end of it.
    pub async fn turn(&mut self, text: &str, interjection: Option<&Interjection>) -> Turn {
        while self.call.next_text(Duration::ZERO).await.is_some() {}
        let mut accepted = None;
        self.utterance = None;
        let sent = match self.send(text, &mut accepted).await {
            Ok(sent) => sent,
            Err(error) => {
                let fault = if matches!(error, CallError::Over) { "call_lost".to_owned() } else { error.cause() };
                return self.failed(text, clock::now(), fault);
            }
        };
        let Some(onset) = self.call.onset(sent, self.plan.patience).await else {
            let fault = if self.call.status().end.is_some() { "call_lost" } else { "silence" };
            return self.failed(text, sent, fault.to_owned());
        };
        let mut interrupted = None;
        if let Some(what) = interjection {
            interrupted = self.interject(what, onset).await;
        }
        let reference = self.plan.references.get(text).cloned();
        let ended = if interrupted.is_some() {
            self.call.silence(onset, END, LONGEST).await.unwrap_or_else(clock::now)
        } else {
            self.wait_for_end(onset, reference.as_ref().map(judge::audible_length)).await
        };
        let heard = self.call.take_heard();
        let mut turn = self.measure(text, sent, onset, ended, &heard, reference.as_ref(), interrupted.is_some());
        turn.waterfall.accepted = accepted.map(|at: Instant| seconds(sent, at));
        self.read_frames(sent, &mut turn, interrupted.as_ref().map(|(at, _)| *at), onset, &heard).await;
        if let Some((_, Some(fault))) = interrupted {
            turn.fault = Some(fault);
        }
        turn.name = self.id.clone().zip(self.utterance.take());
        turn
    }

    /// Ends the call.
    pub async fn close(self) {
        self.call.hang_up().await;
    }

    async fn send(&mut self, text: &str, accepted: &mut Option<Instant>) -> Result<Instant, CallError> {
        let voice = self.voice.as_deref();
        match (self.call.leg(), &self.plan.trigger, &self.session) {
            (_, _, Some(session)) => session.send(&turn_frame(text, voice)).await,
            (Leg::Webrtc, ..) => self.call.send_text(&turn_frame(text, voice).to_string()).await,
            (Leg::Sip, Trigger::Greeting, _) => Ok(self.call.setup().answered),
            (Leg::Sip, Trigger::Speech, _) => Err(CallError::Target("callers who speak send no text".to_owned())),
            (Leg::Sip, ..) => {
                let (Some(gateway), Some(id)) = (&self.plan.gateway, &self.id) else {
                    return Err(CallError::Target("no http: target".to_owned()));
                };
                let (sent, utterance) = gateway.speak(id, text, voice).await?;
                self.utterance = utterance;
                *accepted = Some(clock::now());
                Ok(sent)
            }
        }
    }

    /// Waits for the end of what began at `onset`: quiet, and not before as much was heard as the text is long.
    async fn wait_for_end(&self, onset: Instant, length: Option<Duration>) -> Instant {
        let give_up = onset + LONGEST;
        let mut from = onset;
        loop {
            let left = give_up.saturating_duration_since(clock::now());
            let Some(last) = self.call.silence(from, END, left).await else { return clock::now() };
            let complete = length.is_none_or(|l| last.saturating_duration_since(onset) >= l.mul_f64(0.93));
            let over = self.call.status().end.is_some();
            if complete || over || clock::now() >= give_up {
                return last;
            }
            // In mid-turn: is it stalled, or was it cut short?
            match self.call.onset(last + Duration::from_millis(20), STALLED).await {
                Some(more) => from = more,
                None => return last,
            }
        }
    }

    /// Interrupts; gives when, and what went wrong.
    async fn interject(&self, what: &Interjection, onset: Instant) -> Option<(Instant, Option<String>)> {
        clock::sleep_until(onset + what.after).await;
        if what.hang_up {
            let at = clock::now();
            self.call.hang_up().await;
            return Some((at, None));
        }
        let audible =
            listen::last_audible(&self.call.ear().heard(), clock::now() - Duration::from_millis(300)).is_some();
        if !audible {
            // The turn is over already: nothing to interrupt.
            return None;
        }
        let at = match (&what.speech, &what.digits) {
            // Silence before the first word is no interruption.
            (Some(clip), _) => self.call.say(clip).await.ok()? + judge::lead_in(clip),
            (None, Some(digits)) => {
                let at = clock::now();
                self.call.press(digits).await.ok()?;
                at
            }
            (None, None) => return None,
        };
        match self.call.silence(at, Duration::from_millis(400), Duration::from_secs(5)).await {
            Some(_) => Some((at, None)),
            None => Some((at, Some("not_interrupted".to_owned()))),
        }
    }

    #[expect(clippy::too_many_arguments, reason = "the instants of one turn, each from another step of it")]
    fn measure(
        &mut self,
        text: &str,
        sent: Instant,
        onset: Instant,
        ended: Instant,
        heard: &Heard,
        reference: Option<&Clip>,
        interrupted: bool,
    ) -> Turn {
        let from = listen::packet_at(heard, onset);
        let mut stalls = listen::stalls(heard, from, ended, self.plan.buffer);
        stalls.retain(|s| s.cause != StallCause::Lost && s.length >= Duration::from_millis(5));
        let listening = ended.saturating_duration_since(onset);
        let stalled: Duration = stalls.iter().map(|s| s.length).sum();
        let spoken = heard.spoken_between(from, ended);
        let speech = match reference.filter(|_| !interrupted) {
            Some(reference) => judge::audible_length(reference),
            None => listening.saturating_sub(stalled),
        };
        let fault =
            if interrupted { None } else { judge::judge(&spoken, reference).err().map(|f| f.label().to_owned()) };
        let counts = heard.counts;
        let packets = (counts.lost.saturating_sub(self.before.lost), counts.received - self.before.received);
        self.before = counts;
        let mut lateness = Spread::default();
        for late in listen::lateness(heard, from, ended) {
            lateness.add(late);
        }
        let loss = packets.0 as f64 / (packets.0 + packets.1).max(1) as f64;
        let round_trip = self.call.status().peer.round_trip.unwrap_or_default();
        // One frame to fill, the way, and the listener's buffer.
        let delay = Duration::from_millis(20) + round_trip / 2 + self.plan.buffer;
        let first_packet = heard.packets_between(from, ended).next().map_or(onset, |p| p.arrived.max(sent));
        Turn {
            leg: self.call.leg(),
            sent,
            ended,
            chars: text.chars().count(),
            first_audio: Some(onset.saturating_duration_since(sent)),
            mouth_to_ear: None,
            speech,
            rtf: if speech.is_zero() { f64::NAN } else { listening.as_secs_f64() / speech.as_secs_f64() },
            packets,
            lateness,
            jitter: Duration::from_secs_f64(counts.jitter),
            mos: listen::mos(heard.codec, loss, delay),
            fault,
            barge_in: None,
            waterfall: Waterfall {
                text: text.to_owned(),
                leg: self.call.leg().label().to_owned(),
                first_packet: seconds(sent, first_packet),
                first_audio: seconds(sent, onset),
                last_audio: seconds(sent, ended),
                stalls: stalls.iter().map(|s| (seconds(sent, s.at), s.length.as_secs_f64())).collect(),
                ..Waterfall::default()
            },
            stalls,
            clip: spoken.clip,
            text: text.to_owned(),
            name: None,
            stages: StageTimes::new(),
        }
    }

    /// What the gateway says about the turn, beside what was heard.
    async fn read_frames(
        &mut self,
        sent: Instant,
        turn: &mut Turn,
        interrupted: Option<Instant>,
        onset: Instant,
        heard: &Heard,
    ) {
        let mut reported = None;
        // The report of an interruption comes right behind it.
        let within = if interrupted.is_some() { Duration::from_millis(300) } else { Duration::ZERO };
        while let Some((at, frame)) = self.next_frame(within).await {
            match frame["type"].as_str() {
                Some("info") if frame["name"] == "turnStarted" => {
                    turn.waterfall.announced.get_or_insert(seconds(sent, at));
                    self.utterance = self.utterance.take().or(frame["utteranceId"].as_str().map(str::to_owned));
                }
                Some("interrupt") => {
                    let ms = frame["sentMs"].as_u64().or(frame["durationUntilInterruptMs"].as_u64());
                    reported = ms.map(Duration::from_millis);
                    break;
                }
                _ => {}
            }
        }
        if let Some(at) = interrupted
            && let Some(last) = listen::silent_from(heard, at, Duration::from_millis(300))
        {
            let silence = last.saturating_duration_since(at);
            let heard = last.saturating_duration_since(onset);
            turn.barge_in = Some(BargeIn { silence, heard, reported });
        }
    }

    async fn next_frame(&mut self, within: Duration) -> Option<(Instant, Value)> {
        if let Some(session) = &mut self.session {
            return session.recv(within).await;
        }
        let (at, text) = self.call.next_text(within).await?;
        Some((at, serde_json::from_str(&text).unwrap_or(Value::Null)))
    }

    fn failed(&mut self, text: &str, sent: Instant, fault: String) -> Turn {
        let heard = self.call.take_heard();
        let packets =
            (heard.counts.lost.saturating_sub(self.before.lost), heard.counts.received - self.before.received);
        self.before = heard.counts;
        Turn {
            leg: self.call.leg(),
            sent,
            ended: clock::now(),
            chars: text.chars().count(),
            first_audio: None,
            mouth_to_ear: None,
            speech: Duration::ZERO,
            rtf: f64::NAN,
            stalls: Vec::new(),
            packets,
            lateness: Spread::default(),
            jitter: Duration::from_secs_f64(heard.counts.jitter),
            mos: f64::NAN,
            fault: Some(fault),
            barge_in: None,
            clip: Clip::default(),
            waterfall: Waterfall::default(),
            text: text.to_owned(),
            name: None,
            stages: StageTimes::new(),
        }
    }
}

fn seconds(from: Instant, to: Instant) -> f64 {
    to.saturating_duration_since(from).as_secs_f64()
}

/// Has every text spoken directly, twice where it tells something, and keeps them as references if the voice speaks
/// the same text the same way; otherwise gives none and says why.
pub async fn references(gateway: &Gateway, texts: &[&str]) -> (HashMap<String, Clip>, Option<String>) {
    let mut out = HashMap::new();
    for (n, text) in texts.iter().enumerate() {
        let clip = match gateway.synthesise(text).await {
            Ok(clip) => clip,
            Err(error) => return (HashMap::new(), Some(format!("no reference speech: {error}"))),
        };
        if n == 0 {
            let again = gateway.synthesise(text).await.unwrap_or_default();
            let same = crate::sound::correlate::correlate(&again, &clip).map_or(0.0, |c| c.value);
            if same < 0.8 {
                let why = "the voice does not speak the same text the same way twice: words are not compared";
                return (HashMap::new(), Some(why.to_owned()));
            }
        }
        out.insert((*text).to_owned(), clip);
    }
    (out, None)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn calls_are_spoken_to_with_one_voice_after_the_other() {
        let voices = ["anna".to_owned(), "ben".to_owned()];
        let spoken = [0, 1, 2].map(|n| turn_frame("Yes.", voice_of(&voices, n).map(String::as_str))["voice"].clone());
        assert_eq!(spoken, ["anna", "ben", "anna"]);
        assert_eq!((voice_of(&[], 1), turn_frame("Yes.", None).get("voice")), (None, None));
    }
}
