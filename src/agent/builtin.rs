//! Agents inside the gateway, so that everything works with no other program.

use tokio::sync::{broadcast, mpsc};

use super::config::Agent;
use super::frames::{ToAgent, parse, print};
use super::relay::{Link, Relay, RelayEnd};
use crate::call::handle::TurnRequest;
use crate::call::{CallEvent, SpeakError};

/// What `builtin:demo` says first.
pub const GREETING: &str =
    "Hello, this is Antiphon. Type something, and I will say it. Press a key, and I will name it.";

/// The built-in agents.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Builtin {
    /// Greets, speaks back what it is sent, reads keys aloud.
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

    /// Serves the call until it ends or another agent attaches.
    pub async fn run(
        self,
        relay: &mut Relay,
        agent: &Agent,
        events: &mut broadcast::Receiver<CallEvent>,
        attach: &mut mpsc::Receiver<Link>,
    ) -> RelayEnd {
        if self == Builtin::Client {
            // overflow: drops where there is no data channel; then nobody asks
            let _ = relay.handle().send_message(print(&relay.setup()));
        }
        loop {
            let event = tokio::select! {
                event = events.recv() => event,
                Some(link) = attach.recv() => return RelayEnd::Replaced(link),
            };
            match event {
                Ok(CallEvent::Ended(_)) | Err(broadcast::error::RecvError::Closed) => return RelayEnd::CallEnded,
                Ok(event) => self.handle(relay, agent, &event).await,
                Err(broadcast::error::RecvError::Lagged(_)) => {}
            }
        }
    }

    async fn handle(self, relay: &mut Relay, agent: &Agent, event: &CallEvent) {
        if self == Builtin::Silent {
            return;
        }
        let outcome = match (self, event) {
            (Builtin::Demo, CallEvent::Connected) if agent.greeting.is_none() => say(relay, GREETING).await,
            (Builtin::Demo, CallEvent::Digit(digit)) => say(relay, &format!("You pressed {}.", key_name(*digit))).await,
            (_, CallEvent::Message(text)) => match parse(text) {
                Ok(frame) => relay.apply(frame).await,
                // Not a frame: the demo agent takes it as text, the client is told.
                Err(_) if self == Builtin::Demo && !text.trim_start().starts_with('{') => say(relay, text).await,
                Err(description) => Err(SpeakError::Invalid(description)),
            },
            _ => Ok(()),
        };
        let frame = match outcome {
            Ok(()) => relay.frame(event),
            Err(error) => Some(ToAgent::Error { description: error.to_string() }),
        };
        if let Some(frame) = frame {
            // overflow: drops; the browser's channel is its own business
            let _ = relay.handle().send_message(print(&frame));
        }
    }
}

async fn say(relay: &Relay, text: &str) -> Result<(), SpeakError> {
    let turn = TurnRequest { style: relay.style().clone(), ..TurnRequest::new(text) };
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
