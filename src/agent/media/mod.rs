//! Agents that hear and speak sound: the gateway dials a WebSocket and carries the call over it as Twilio Media Streams
//! frames.
//!
//! # Why
//! - *The bot decides what interrupts it.* It hears the caller and sends `clear`, as it would on Twilio; so nothing of
//!   the gateway's own cuts it off unless `interruptible` says so.
//! - *A bot that closes its WebSocket has ended the conversation*: what it said is heard, then the call ends, as a call
//!   on Twilio goes on behind the stream. A link that breaks is opened again, as a new stream.
//! - *A slow bot loses sound, never keys or marks*: while its socket takes nothing, the tap drops its oldest frames and
//!   counts them. What the caller says while the link is being opened is kept in the same way: the last 2.5 s of it.

pub mod frames;

use std::collections::VecDeque;
use std::time::Duration;

use tokio::sync::{broadcast, mpsc};

use self::frames::{Form, Framing, Order};
use super::client::{self, Closing, DialError, Dialled};
use super::config::Agent;
use super::relay::{LINK_FRAMES, Link, RETRY, Relay, RelayEnd};
use crate::call::{BridgeState, CallEvent, CallHandle, EndReason, Interruptible, MediaTap, SpeakError, TapDirection};
use crate::clock::{self, Sparse};

/// Failures in a row after which the bot is given up.
const TRIES: u32 = 3;
/// The first pause before the link is opened again; it doubles.
const PAUSE: Duration = Duration::from_millis(250);
/// A link that lived for so long was good: what comes then is the first failure.
const GOOD: Duration = Duration::from_secs(10);

/// Serves the call with the bot at `url` until the call ends, another agent attaches, or the bot is lost.
pub async fn run(
    relay: &Relay,
    agent: &Agent,
    url: &str,
    events: &mut broadcast::Receiver<CallEvent>,
    attach: &mut mpsc::Receiver<Link>,
) -> RelayEnd {
    let Some(form) = Form::at(agent.media_rate) else { return RelayEnd::LinkClosed };
    let handle = relay.handle().clone();
    let interruptible = agent.interruptible.unwrap_or(Interruptible::None);
    let mut stream = Stream { handle, form, interruptible, keys: VecDeque::new(), told: Sparse::new() };
    let mut failures = 0;
    loop {
        let began = clock::now();
        // "Hello?" is often said before there is a link.
        let tap = stream.listen();
        let dialled = tokio::select! {
            dialled = client::open(url, agent, relay.handle().meta().trace.as_ref()) => dialled,
            end = stream.until_over(events, attach) => return end,
        };
        let mut is_patient = true;
        let reason = match dialled {
            Ok(dialled) => match stream.serve(dialled, tap, events, attach).await {
                Outcome::Over(end) => return end,
                Outcome::Hung => {
                    // Refused where the call is ending already.
                    let _ = stream.handle.finish(EndReason::HungUp);
                    return stream.until_over(events, attach).await;
                }
                Outcome::Broken(reason) => reason,
            },
            // A caller does not listen to silence three times as long.
            Err(error @ DialError::Timeout) => {
                is_patient = false;
                error.to_string()
            }
            Err(error) => error.to_string(),
        };
        let was_good = clock::now().saturating_duration_since(began) >= GOOD;
        failures = if was_good { 1 } else { failures + 1 };
        tracing::warn!(call = %stream.handle.id(), failures, reason, "the link to a media agent failed");
        if failures > TRIES || !is_patient {
            return RelayEnd::LinkClosed;
        }
        tokio::select! {
            () = tokio::time::sleep(PAUSE * 2u32.pow(failures - 1)) => {}
            end = stream.until_over(events, attach) => return end,
        }
    }
}

/// What came of one connection.
enum Outcome {
    /// The call, or the bot's part of it, is over.
    Over(RelayEnd),
    /// The bot has closed it.
    Hung,
    /// It broke.
    Broken(String),
}

struct Stream {
    handle: CallHandle,
    form: Form,
    /// What cuts off what the bot plays, beside the bot.
    interruptible: Interruptible,
    /// Keys that were pressed while there was no link.
    keys: VecDeque<char>,
    told: Sparse,
}

impl Stream {
    /// Listens to the call while there is no link.
    async fn until_over(
        &mut self,
        events: &mut broadcast::Receiver<CallEvent>,
        attach: &mut mpsc::Receiver<Link>,
    ) -> RelayEnd {
        loop {
            tokio::select! {
                event = events.recv() => match event {
                    Ok(CallEvent::Ended(_)) | Err(broadcast::error::RecvError::Closed) => return RelayEnd::CallEnded,
                    // More keys than any number has are a cat on the telephone.
                    Ok(CallEvent::Digit(digit)) if self.keys.len() < LINK_FRAMES / 2 => self.keys.push_back(digit),
                    Ok(_) | Err(broadcast::error::RecvError::Lagged(_)) => {}
                },
                Some(link) = attach.recv() => return RelayEnd::Replaced(link),
            }
        }
    }

    /// What the call's caller says from now on.
    fn listen(&self) -> MediaTap {
        if self.form.is_wide() { self.handle.wide_tap() } else { self.handle.media_tap() }
    }

    /// One connection, from its first frame to its end. `tap` may hold what was said before it was there.
    async fn serve(
        &mut self,
        Dialled { mut link, closing }: Dialled,
        mut tap: MediaTap,
        events: &mut broadcast::Receiver<CallEvent>,
        attach: &mut mpsc::Receiver<Link>,
    ) -> Outcome {
        let mut framing = match Framing::new(self.handle.id().clone(), self.form) {
            Ok(framing) => framing,
            Err(error) => return Outcome::Broken(error),
        };
        // Twilio's stream of a bot carries the caller only.
        let start = framing.start(self.handle.meta(), &[TapDirection::Inbound]);
        let mut out = VecDeque::from([framing.connected(), start]);
        out.extend(self.keys.drain(..).map(|digit| framing.dtmf(digit)));
        // What the call has no room for now. Until it is taken nothing more is read.
        let mut kept: VecDeque<Step> = VecDeque::new();
        // On a bridged call that the bot has left it hears nothing.
        let mut away = self.handle.info().bridge_mode.is_some_and(|mode| !mode.hears());
        // One that has closed the link is told nothing any more; what it has sent is heard.
        let mut listens = true;
        loop {
            tokio::select! {
                room = link.to.reserve(), if listens && !out.is_empty() => match (room, out.pop_front()) {
                    (Ok(room), Some(frame)) => room.send(frame),
                    _ => listens = false,
                },
                // Not while other frames wait: a slow bot loses sound.
                frame = tap.recv(), if out.is_empty() => match frame {
                    Some(frame) if frame.direction == TapDirection::Inbound && !away => out.extend(framing.media(&frame)),
                    Some(_) => {}
                    None => return self.end(&link, &mut framing, out),
                },
                event = events.recv() => match event {
                    Ok(CallEvent::Ended(_)) | Err(broadcast::error::RecvError::Closed) => {
                        return self.end(&link, &mut framing, out);
                    }
                    Ok(CallEvent::Bridge { state, .. }) => {
                        away = matches!(state, BridgeState::Connected(mode) if !mode.hears());
                    }
                    Ok(CallEvent::Digit(digit)) => out.push_back(framing.dtmf(digit)),
                    Ok(CallEvent::Mark { name, .. }) => out.push_back(framing.mark(&name)),
                    Ok(_) => {}
                    Err(broadcast::error::RecvError::Lagged(lost)) => {
                        tracing::warn!(call = %self.handle.id(), lost, "the agent's task fell behind its call");
                    }
                },
                Some(link) = attach.recv() => return Outcome::Over(RelayEnd::Replaced(link)),
                text = link.from.recv(), if kept.is_empty() => match text {
                    Some(text) => self.read(&text, &mut framing, &mut kept),
                    None => return self.closed(closing).await,
                },
                () = tokio::time::sleep(RETRY), if !kept.is_empty() => {}
            }
            if !listens {
                out.clear();
            }
            if out.len() > LINK_FRAMES {
                return Outcome::Broken("it reads nothing".into());
            }
            while let Some(step) = kept.front() {
                match self.apply(step.clone()) {
                    // The call holds as much as it may: the bot is slowed by its own socket.
                    Err(SpeakError::Busy) => break,
                    Err(error) => self.complain(&error.to_string()),
                    Ok(()) => {}
                }
                kept.pop_front();
            }
        }
    }

    fn read(&self, text: &str, framing: &mut Framing, kept: &mut VecDeque<Step>) {
        match framing.read(text) {
            Ok(None) => {}
            Ok(Some(Order::Play(pcm))) => kept.extend(step(pcm)),
            Ok(Some(Order::Mark { rest, name })) => {
                kept.extend(step(rest));
                kept.push_back(Step::Mark(name));
            }
            Ok(Some(Order::Clear)) => kept.push_back(Step::Clear),
            // A bot that knows Twilio's frames knows none that tells of errors.
            Err(reason) => self.complain(&reason),
        }
    }

    fn apply(&self, step: Step) -> Result<(), SpeakError> {
        match step {
            Step::Play(pcm) => self.handle.inject_audio(pcm, crate::audio::RATE, Some(self.interruptible)),
            Step::Mark(name) => self.handle.mark(name),
            Step::Clear => self.handle.clear(),
        }
    }

    fn complain(&self, reason: &str) {
        if let Some(missed) = self.told.admit(clock::now()) {
            tracing::info!(call = %self.handle.id(), reason, missed, "a frame of a media agent was not used");
        }
    }

    /// The call is over: the bot is told, as far as it listens.
    fn end(&self, link: &Link, framing: &mut Framing, out: VecDeque<String>) -> Outcome {
        for frame in out.into_iter().chain([framing.stop()]) {
            // overflow: drops; the end of the WebSocket says the same
            let _ = link.to.try_send(frame);
        }
        Outcome::Over(RelayEnd::CallEnded)
    }

    async fn closed(&self, closing: tokio::sync::oneshot::Receiver<Closing>) -> Outcome {
        match closing.await {
            Ok(Closing::Peer) => Outcome::Hung,
            Ok(Closing::Broken(reason)) => Outcome::Broken(reason),
            Err(_) => Outcome::Broken("the link broke".into()),
        }
    }
}

/// One connection to its end, for tests.
#[cfg(test)]
pub(super) async fn serve_once(
    handle: &CallHandle,
    dialled: Dialled,
    events: &mut broadcast::Receiver<CallEvent>,
    attach: &mut mpsc::Receiver<Link>,
) {
    let (handle, interruptible) = (handle.clone(), Interruptible::None);
    let mut stream = Stream { handle, form: Form::MuLaw, interruptible, keys: VecDeque::new(), told: Sparse::new() };
    let tap = stream.listen();
    let outcome = stream.serve(dialled, tap, events, attach).await;
    assert!(matches!(outcome, Outcome::Hung));
}

/// One thing for the call to do.
#[derive(Clone)]
enum Step {
    Play(Vec<i16>),
    Mark(String),
    Clear,
}

fn step(pcm: Vec<i16>) -> Option<Step> {
    (!pcm.is_empty()).then_some(Step::Play(pcm))
}
