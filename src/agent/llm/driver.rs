//! Moves bytes, events and time into the [`Dialogue`] of a call, and its actions out. Decides nothing.

use std::collections::VecDeque;
use std::panic::AssertUnwindSafe;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures_util::FutureExt as _;
use reqwest::header::{ACCEPT, AUTHORIZATION, CONTENT_TYPE, RETRY_AFTER};
use reqwest::{Client, RequestBuilder, Response};
use serde_json::Value;
use tokio::sync::{broadcast, mpsc};
use tokio::task::JoinSet;

use super::config::Llm;
use super::dialogue::{Action, Dialogue, Failure};
use super::tools::Order;
use super::web::{self, Web};
use crate::agent::config::Agent;
use crate::agent::frames::{ToAgent, print};
use crate::agent::relay::{Link, RETRY, Relay, RelayEnd};
use crate::call::handle::{Style, TurnRequest};
use crate::call::messages::MESSAGES;
use crate::call::{
    CallEvent, EndReason, Heard, Interruptible, Messages, PeerMessage, SpeakError, TextDelta, TurnHow, TurnId,
};
use crate::clock;
use crate::reach::cause;
use crate::telemetry::context::{TRACEPARENT, TraceContext};

/// How much of an error's body goes into the log.
const MAX_ERROR: usize = 400;
/// Largest answer of a server that does not stream.
const MAX_DOCUMENT: usize = 1 << 20;

/// Serves the call with the model `llm` until the call ends, another agent attaches, or the model is given up.
pub async fn run(
    relay: &mut Relay,
    (agent, llm): (&Agent, Arc<Llm>),
    web: Web,
    (events, messages): (&mut broadcast::Receiver<CallEvent>, &mut Option<Messages>),
    attach: &mut mpsc::Receiver<Link>,
) -> RelayEnd {
    let greeting = llm.greeting.as_deref().or(agent.greeting.as_deref());
    let interruptible = agent.interruptible != Some(Interruptible::None);
    let name = relay.handle().meta().agent.clone();
    let mut driver = Driver {
        dialogue: Dialogue::new(llm.clone(), &name, greeting, interruptible),
        has_channel: relay.handle().info().leg == "webrtc",
        relay,
        llm,
        web,
        net: Net::Idle,
        out: VecDeque::new(),
        tools: JoinSet::new(),
    };
    driver.tell(&driver.relay.setup());
    loop {
        if let Some(end) = driver.act() {
            return end;
        }
        if driver.flush().await {
            // What could not be said is known to the dialogue now.
            continue;
        }
        let deadline = driver.dialogue.deadline();
        let is_blocked = !driver.out.is_empty();
        tokio::select! {
            event = events.recv() => match event {
                Ok(CallEvent::Ended(_)) | Err(broadcast::error::RecvError::Closed) => return RelayEnd::CallEnded,
                Ok(event) => driver.event(&event),
                Err(broadcast::error::RecvError::Lagged(lost)) => {
                    tracing::warn!(call = %driver.relay.handle().id(), lost, "the agent's task fell behind its call");
                }
            },
            Some(link) = attach.recv() => return RelayEnd::Replaced(link),
            message = next(messages) => match message {
                Some(message) => driver.message(message),
                None => *messages = None,
            },
            // While the call takes no more text nothing is read: the server is slowed by TCP.
            came = driver.net.next(), if !is_blocked => driver.came(came),
            Some(done) = driver.tools.join_next(), if !driver.tools.is_empty() => {
                // A panic of its own is a result, too: none ends otherwise.
                if let Ok((id, result)) = done {
                    driver.dialogue.tool_done(clock::now(), &id, result);
                }
            }
            () = tokio::time::sleep_until(deadline.unwrap_or_else(clock::now).into()), if deadline.is_some() => {
                driver.dialogue.tick(clock::now());
            }
            () = tokio::time::sleep(RETRY), if is_blocked => driver.dialogue.waits(clock::now()),
        }
    }
}

/// What waits for the call to take it.
enum Out {
    Piece { turn: TurnId, token: String, last: bool, speculation: Option<u64> },
    Whole { turn: TurnId, text: String },
    Finish,
}

struct Driver<'a> {
    dialogue: Dialogue,
    relay: &'a mut Relay,
    /// Whether the caller is a browser, which may show what is said and write instead of speaking.
    has_channel: bool,
    llm: Arc<Llm>,
    web: Web,
    net: Net,
    /// In order. The dialogue bounds it: one answer of `max_answer_chars`.
    out: VecDeque<Out>,
    /// At most [`super::answer::MAX_CALLS`]; ends with the call.
    tools: JoinSet<(String, Result<String, String>)>,
}

impl Driver<'_> {
    /// Carries out what the dialogue decided.
    fn act(&mut self) -> Option<RelayEnd> {
        while let Some(action) = self.dialogue.poll() {
            match action {
                Action::Ask(body) => {
                    let trace = self.relay.handle().meta().trace.as_ref();
                    self.net = Net::ask(&self.web.model, &self.llm, &body, trace);
                }
                Action::Drop { unsaid } => {
                    self.net = Net::Idle;
                    if unsaid {
                        self.out.retain(|out| !matches!(out, Out::Piece { .. }));
                    }
                }
                Action::Say { turn, token, last, speculation } => {
                    self.out.push_back(Out::Piece { turn, token, last, speculation });
                }
                Action::Speak { turn, text } => self.out.push_back(Out::Whole { turn, text }),
                // A call that takes no command now ends its turns itself; the dialogue waits only so long.
                Action::Interrupt => drop(self.relay.handle().interrupt()),
                Action::Run { id, order } => self.run_tool(id, order),
                Action::HangUp => self.out.push_back(Out::Finish),
                Action::Lost => return Some(RelayEnd::LinkClosed),
            }
        }
        None
    }

    fn run_tool(&mut self, id: String, order: Order) {
        let handle = self.relay.handle();
        let now = clock::now();
        let told = |outcome: Result<(), SpeakError>| match outcome {
            Ok(()) => Ok("done".to_owned()),
            Err(error) => Err(error.to_string()),
        };
        match order {
            Order::Digits(digits) => {
                let outcome = told(handle.dtmf(&digits));
                self.dialogue.tool_done(now, &id, outcome);
            }
            Order::Transfer(to) => {
                let outcome = told(handle.transfer(to, false));
                self.dialogue.tool_done(now, &id, outcome);
            }
            // Never ordered: the dialogue ends the call by `Action::HangUp`, after what is still to be said.
            Order::HangUp => self.out.push_back(Out::Finish),
            Order::Http { tool, arguments } => {
                let web = self.web.clone();
                self.tools.spawn(async move { (id, guarded(web.run(&tool, &arguments)).await) });
            }
        }
    }

    /// Hands the call what waits, as far as it takes it. `true`: something could not be said, and the dialogue knows.
    async fn flush(&mut self) -> bool {
        while let Some(out) = self.out.front() {
            let handle = self.relay.handle();
            let style = self.relay.style().clone();
            let taken = match out {
                Out::Piece { turn, token, last, speculation } => {
                    let style = Style { speculation: *speculation, ..style };
                    handle.push_text(TextDelta { id: Some(turn.clone()), token: token.clone(), last: *last, style })
                }
                Out::Whole { turn, text } => {
                    let new = TurnRequest::new(text.as_str());
                    handle.speak(TurnRequest { id: Some(turn.clone()), patient: true, style, ..new }).await.map(|_| ())
                }
                Out::Finish => handle.finish(EndReason::HungUp),
            };
            match taken {
                Err(SpeakError::Busy) => return false,
                Ok(()) => drop(self.out.pop_front()),
                Err(error) => {
                    tracing::info!(call = %handle.id(), %error, "what the model said was not taken");
                    if let Some(Out::Piece { turn, .. } | Out::Whole { turn, .. }) = self.out.pop_front() {
                        let event = CallEvent::TurnEnded { turn, how: TurnHow::Cancelled, heard: Heard::default() };
                        self.dialogue.handle(clock::now(), &event);
                        return true;
                    }
                }
            }
        }
        false
    }

    fn event(&mut self, event: &CallEvent) {
        self.dialogue.handle(clock::now(), event);
        // A message that could not be sent is such an error: telling of it would fail and be told of in turn.
        if !matches!(event, CallEvent::Error(_))
            && let Some(frame) = self.relay.frame(event)
        {
            self.tell(&frame);
        }
    }

    /// What a browser writes is what its caller says.
    fn message(&mut self, message: PeerMessage) {
        let refused = match message {
            PeerMessage::Text(text) => match prompt_of(&text) {
                Ok((text, lang)) => self.relay.handle().prompt(&text, &lang).err().map(|error| error.to_string()),
                Err(why) => Some(why),
            },
            PeerMessage::Refused(count) => Some(format!("{count} messages were refused: {MESSAGES} wait already")),
        };
        if let Some(description) = refused {
            self.tell(&ToAgent::Error { description });
        }
    }

    fn tell(&self, frame: &ToAgent) {
        if self.has_channel {
            // overflow: drops; the browser's channel is its own business
            let _ = self.relay.handle().send_message(print(frame));
        }
    }

    fn came(&mut self, came: Came) {
        let now = clock::now();
        match came {
            Came::Stream(response) => self.net = Net::Reading(Box::new(response)),
            Came::Bytes(bytes) => self.dialogue.data(now, &bytes),
            Came::Document(text) => {
                self.net = Net::Idle;
                self.dialogue.whole(now, &text);
            }
            Came::Closed => {
                self.net = Net::Idle;
                self.dialogue.closed(now);
            }
            Came::Failed(failure) => {
                self.net = Net::Idle;
                self.dialogue.failed(now, &failure);
            }
        }
    }
}

/// The result of a tool. One that panics has failed: the model waits for every one.
async fn guarded(tool: impl Future<Output = Result<String, String>>) -> Result<String, String> {
    AssertUnwindSafe(tool).catch_unwind().await.unwrap_or_else(|_| Err("the tool failed".into()))
}

/// The words and the language of a browser's message: plain text, or a `prompt` frame.
fn prompt_of(text: &str) -> Result<(String, String), String> {
    if !text.trim_start().starts_with('{') {
        return Ok((text.to_owned(), String::new()));
    }
    let frame: Value = serde_json::from_str(text).map_err(|error| format!("not a usable frame: {error}"))?;
    match (frame["type"].as_str(), frame["voicePrompt"].as_str()) {
        (Some("prompt"), Some(words)) => Ok((words.to_owned(), frame["lang"].as_str().unwrap_or_default().to_owned())),
        _ => Err("this call's agent is a model: send text, or { \"type\": \"prompt\", \"voicePrompt\": ... }".into()),
    }
}

/// The next message; never where they are over.
async fn next(messages: &mut Option<Messages>) -> Option<PeerMessage> {
    match messages {
        Some(messages) => messages.recv().await,
        None => std::future::pending().await,
    }
}

type Opening = Pin<Box<dyn Future<Output = Came> + Send>>;

/// The request under way. Dropping it closes its connection, which tells the server to stop.
enum Net {
    Idle,
    Opening(Opening),
    Reading(Box<Response>),
}

enum Came {
    Stream(Response),
    Bytes(Bytes),
    Document(String),
    Closed,
    Failed(Failure),
}

impl Net {
    fn ask(client: &Client, llm: &Llm, body: &Value, trace: Option<&TraceContext>) -> Net {
        match request(client, llm, body, trace) {
            Ok(request) => Net::Opening(Box::pin(open(request))),
            Err(why) => Net::Opening(Box::pin(async { Came::Failed(Failure::Unreachable(why)) })),
        }
    }

    /// What comes next; never where there is no request. Cancel safe.
    async fn next(&mut self) -> Came {
        match self {
            Net::Idle => std::future::pending().await,
            Net::Opening(opening) => opening.await,
            Net::Reading(response) => match response.chunk().await {
                Ok(Some(bytes)) => Came::Bytes(bytes),
                Ok(None) => Came::Closed,
                Err(error) => {
                    tracing::info!(error = cause(&error), "the model's stream broke");
                    Came::Closed
                }
            },
        }
    }
}

fn request(client: &Client, llm: &Llm, body: &Value, trace: Option<&TraceContext>) -> Result<RequestBuilder, String> {
    let mut request = client.post(llm.endpoint()?).header(ACCEPT, "text/event-stream").json(body);
    if let Some(trace) = trace {
        request = request.header(TRACEPARENT, trace.to_string());
    }
    for (name, value) in &llm.headers {
        let (name, value) = web::header(name, value)?;
        request = request.header(name, value);
    }
    if let Some(key) = &llm.api_key {
        let mut value = reqwest::header::HeaderValue::try_from(format!("Bearer {}", key.reveal()))
            .map_err(|_| "api_key has characters that no header may have")?;
        value.set_sensitive(true);
        request = request.header(AUTHORIZATION, value);
    }
    Ok(request)
}

async fn open(request: RequestBuilder) -> Came {
    let mut response = match request.send().await {
        Ok(response) => response,
        Err(error) => return Came::Failed(Failure::Unreachable(cause(&error))),
    };
    let status = response.status();
    if !status.is_success() {
        let after = response.headers().get(RETRY_AFTER).and_then(|value| value.to_str().ok()?.trim().parse().ok());
        let message = read(&mut response, MAX_ERROR).await.unwrap_or_default();
        // One line, whatever the server sends.
        let message = message.split_whitespace().collect::<Vec<_>>().join(" ");
        let retry_after = after.map(Duration::from_secs);
        return Came::Failed(Failure::Status { code: status.as_u16(), message, retry_after });
    }
    let kind = response.headers().get(CONTENT_TYPE).and_then(|value| value.to_str().ok()).unwrap_or_default();
    if !kind.trim_start().to_ascii_lowercase().starts_with("application/json") {
        return Came::Stream(response);
    }
    match read(&mut response, MAX_DOCUMENT).await {
        Some(text) => Came::Document(text),
        None => Came::Closed,
    }
}

/// The first `limit` bytes of a body; `None` where it breaks off.
async fn read(response: &mut Response, limit: usize) -> Option<String> {
    let mut bytes = Vec::new();
    while bytes.len() < limit
        && let Some(chunk) = response.chunk().await.ok()?
    {
        bytes.extend_from_slice(&chunk);
    }
    bytes.truncate(limit);
    Some(String::from_utf8_lossy(&bytes).into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_tool_that_panics_has_failed() {
        let panics = async { if true { panic!("on purpose") } else { Ok(String::new()) } };
        assert_eq!(guarded(panics).await, Err("the tool failed".into()));
        assert_eq!(guarded(async { Ok("done".into()) }).await, Ok("done".into()));
    }

    #[test]
    fn a_browser_may_write_plain_text_or_a_prompt_frame() {
        assert_eq!(prompt_of("Where is it?"), Ok(("Where is it?".into(), String::new())));
        let frame = r#"{"type":"prompt","voicePrompt":"Wo ist es?","lang":"de"}"#;
        assert_eq!(prompt_of(frame), Ok(("Wo ist es?".into(), "de".into())));
        for other in [r#"{"type":"text","token":"x"}"#, "{", r#"{"type":"prompt"}"#] {
            assert!(prompt_of(other).is_err(), "{other}");
        }
    }
}
