//! Agents inside the gateway, so that everything works with no other program.

use tokio::sync::{broadcast, mpsc};

use super::config::Agent;
use super::frames::{ToAgent, parse, print};
use super::relay::{Link, RETRY, Relay, RelayEnd};
use crate::call::handle::TurnRequest;
use crate::call::messages::MESSAGES;
use crate::call::{CallEvent, Messages, PeerMessage, SpeakError};

/// What `builtin:demo` says first.
pub const GREETING: &str =
    "Hello, this is Antiphon. Type something, and I will say it. Press a key, and I will name it.";

/// The built-in agents.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Builtin {
    /// Greets, speaks back what it is sent and what the caller said, reads keys aloud.
    Demo,
    /// Says nothing; turns come over HTTP or from an attached agent.
    Silent,
    /// The browser itself, on the data channel.
    Client,
}

impl Builtin {
    /// The built-in agent at `url`, if it is one.
    pub fn at(url: &str) -> Option<Self> {
        match url {
            "builtin:demo" => Some(Builtin::Demo),
            "builtin:silent" => Some(Builtin::Silent),
            "builtin:client" => Some(Builtin::Client),
            _ => None,
        }
    }

    /// Serves the call until it ends or another agent attaches. `messages`: text of the browser, in order; while
    /// the call has no room for one, no other is read.
    pub async fn run(
        self,
        relay: &mut Relay,
        agent: &Agent,
        (events, messages): (&mut broadcast::Receiver<CallEvent>, &mut Option<Messages>),
        attach: &mut mpsc::Receiver<Link>,
    ) -> RelayEnd {
        let has_channel = relay.handle().info().leg == "webrtc";
        if self == Builtin::Client && has_channel {
            // overflow: drops where there is no data channel, whose peer would read it
            let _ = relay.handle().send_message(print(&relay.setup()));
        }
        let mut kept: Option<String> = None;
        loop {
            let told = tokio::select! {
                event = events.recv() => match event {
                    Ok(CallEvent::Ended(_)) | Err(broadcast::error::RecvError::Closed) => return RelayEnd::CallEnded,
                    Ok(event) => {
                        relay.make_up_for(&event).await;
                        self.handle(relay, agent, &event).await
                    }
                    Err(broadcast::error::RecvError::Lagged(lost)) => {
                        tracing::warn!(call = %relay.handle().id(), lost, "the agent's task fell behind its call");
                        None
                    }
                },
                Some(link) = attach.recv() => return RelayEnd::Replaced(link),
                message = next(messages), if kept.is_none() && self != Builtin::Silent => match message {
                    Some(PeerMessage::Text(text)) => {
                        kept = Some(text);
                        None
                    }
                    Some(PeerMessage::Refused(refused)) => Some(ToAgent::Error {
                        description: format!(
                            "{refused} messages were refused: {MESSAGES} wait already; send on when turns have ended"
                        ),
                    }),
                    None => {
                        *messages = None;
                        None
                    }
                },
                () = tokio::time::sleep(RETRY), if kept.is_some() => None,
            };
            let taken = match kept.take() {
                None => Ok(()),
                Some(text) => match self.take(relay, &text).await {
                    // The call holds as much as it may: the same message is offered again.
                    Err(SpeakError::Busy) => {
                        kept = Some(text);
                        Ok(())
                    }
                    taken => taken,
                },
            };
            let refused = taken.err().map(|error| ToAgent::Error { description: error.to_string() });
            for frame in told.into_iter().chain(refused).filter(|_| has_channel) {
                // overflow: drops; the browser's channel is its own business
                let _ = relay.handle().send_message(print(&frame));
            }
        }
    }

    /// Carries out a message of the browser.
    async fn take(self, relay: &mut Relay, text: &str) -> Result<(), SpeakError> {
        match parse(text) {
            Ok(frame) => relay.apply(frame).await,
            // Not a frame: the demo agent takes it as text, the client is told.
            Err(_) if self == Builtin::Demo && !text.trim_start().starts_with('{') => say(relay, text).await,
            Err(description) => Err(SpeakError::Invalid(description)),
        }
    }

    /// Acts on an event; gives what a browser is told of it.
    async fn handle(self, relay: &mut Relay, agent: &Agent, event: &CallEvent) -> Option<ToAgent> {
        if self == Builtin::Silent {
            return None;
        }
        let outcome = match (self, event) {
            (Builtin::Demo, CallEvent::Connected) if agent.greeting.is_none() => say(relay, GREETING).await,
            (Builtin::Demo, CallEvent::Prompt { text, last: true, .. }) => {
                say(relay, &format!("You said: {text}")).await
            }
            (Builtin::Demo, CallEvent::Digit(digit)) => say(relay, &format!("You pressed {}.", key_name(*digit))).await,
            // A message that could not be sent is such an error: telling of it would fail and be told of in turn.
            (_, CallEvent::Error(_)) => return None,
            _ => Ok(()),
        };
        match outcome {
            Ok(()) => relay.frame(event),
            Err(error) => Some(ToAgent::Error { description: error.to_string() }),
        }
    }
}

/// The next message; never where they are over.
async fn next(messages: &mut Option<Messages>) -> Option<PeerMessage> {
    match messages {
        Some(messages) => messages.recv().await,
        None => std::future::pending().await,
    }
}

async fn say(relay: &Relay, text: &str) -> Result<(), SpeakError> {
    let turn = TurnRequest { patient: true, style: relay.style().clone(), ..TurnRequest::new(text) };
    relay.handle().speak(turn).await.map(|_| ())
}

fn key_name(digit: char) -> String {
    match digit {
        '0' => "zero".into(),
        '1' => "one".into(),
        '2' => "two".into(),
        '3' => "three".into(),
        '4' => "four".into(),
        '5' => "five".into(),
        '6' => "six".into(),
        '7' => "seven".into(),
        '8' => "eight".into(),
        '9' => "nine".into(),
        '*' => "star".into(),
        '#' => "the hash key".into(),
        other => other.to_string(),
    }
}
