//! Agents, which supply the text of calls: over WebSocket or data channel, language models, and built-in ones.
//!
//! One task a call, on the control runtime: it listens to the call's events and drives its handle. An agent
//! that cannot be reached, dies or stalls costs its own call an apology and nothing else.

mod apology;
pub mod builtin;
mod captions;
pub mod client;
pub mod config;
pub mod frames;
pub mod llm;
pub mod media;
pub mod relay;

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::future::Future;
use std::sync::{Arc, OnceLock, PoisonError, RwLock};

use dashmap::DashMap;
use tokio::sync::broadcast::error::RecvError;
use tokio::sync::mpsc;

use builtin::Builtin;
use config::{Agent, Words};
use llm::web::Web;
use relay::{Link, Relay, RelayEnd, VoiceRule};

use crate::call::handle::TurnRequest;
use crate::call::{BridgeState, CallEvent, CallHandle, CallId, EndReason, Messages, SpeakError};
use crate::text::{CurrentLexicon, Lexicon};

/// The agents of a gateway. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Agents(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    configured: RwLock<BTreeMap<String, Agent>>,
    /// Words for all: built-in agents and texts of no agent are read with them.
    lexicon: CurrentLexicon,
    attachable: DashMap<CallId, mpsc::Sender<Link>>,
    /// For agents that are models; made when the first is needed, `None` where TLS cannot be set up.
    web: OnceLock<Option<Web>>,
    /// Which voices an agent may name; not set: any.
    voices: OnceLock<VoiceRule>,
}

impl Agents {
    /// The configured agents, besides the built-in ones.
    pub fn new(configured: BTreeMap<String, Agent>) -> Self {
        Self(Arc::new(Inner {
            configured: RwLock::new(configured),
            lexicon: CurrentLexicon::default(),
            attachable: DashMap::new(),
            web: OnceLock::new(),
            voices: OnceLock::new(),
        }))
    }

    /// The agent called `name`; `demo`, `silent` and `client` exist unless configured otherwise.
    pub fn find(&self, name: &str) -> Option<Agent> {
        let configured = self.0.configured.read().unwrap_or_else(PoisonError::into_inner);
        configured.get(name).cloned().or_else(|| {
            let url = format!("builtin:{name}");
            Builtin::at(&url).map(|_| {
                let lexicon = Words { said: self.lexicon(), ..Words::default() };
                Agent { lexicon, ..Agent::at(&url) }
            })
        })
    }

    /// Words that are said otherwise than they are written, in texts of no agent in particular.
    pub fn lexicon(&self) -> Lexicon {
        self.0.lexicon.get()
    }

    /// The same, as they will be after any [`Agents::read_with`].
    pub fn current_lexicon(&self) -> CurrentLexicon {
        self.0.lexicon.clone()
    }

    /// Takes up other words; turns that are spoken keep theirs.
    pub fn read_with(&self, lexicon: Lexicon) {
        self.0.lexicon.set(lexicon);
    }

    /// Takes up other agents; calls that are live keep theirs.
    pub fn replace(&self, configured: BTreeMap<String, Agent>) {
        *self.0.configured.write().unwrap_or_else(PoisonError::into_inner) = configured;
    }

    /// Has agents name only those voices that `rule` lets them. Said once, before the first call.
    pub fn hold_to(&self, rule: VoiceRule) {
        // The first one stays.
        let _ = self.0.voices.set(rule);
    }

    /// Begins to supply the text of a call. Returns at once.
    pub fn serve(&self, handle: CallHandle, agent: Agent) {
        let agents = self.clone();
        // Subscribed here, before the call can produce events that the task would miss.
        let events = handle.events();
        let shown = (handle.info().leg == "webrtc").then(|| handle.events());
        let messages = handle.messages();
        // One replacement may wait; a second is refused until the first is served.
        let (attach, attached) = mpsc::channel(1);
        self.0.attachable.insert(handle.id().clone(), attach);
        tokio::spawn(async move {
            let relay = Relay::new(handle.clone(), &agent).held_to(agents.0.voices.get().cloned());
            let web = agent.llm.is_some().then(|| agents.web()).flatten();
            Conversation { relay, agent, web, events, shown, messages, attached }.run().await;
            agents.0.attachable.remove(handle.id());
        });
    }

    fn web(&self) -> Option<Web> {
        let made = self.0.web.get_or_init(|| {
            Web::new().inspect_err(|error| tracing::error!(%error, "no HTTP client for language models")).ok()
        });
        made.clone()
    }

    /// Lets `link` take over a call.
    ///
    /// # Errors
    /// The call is over, or another agent is attaching at this moment; the link is given back.
    pub fn attach(&self, id: &CallId, link: Link) -> Result<(), Link> {
        let Some(attach) = self.0.attachable.get(id).map(|entry| entry.value().clone()) else { return Err(link) };
        // overflow: refused
        attach.try_send(link).map_err(mpsc::error::TrySendError::into_inner)
    }
}

/// `serving` to its end, and `captions` as long.
async fn beside<T>(captions: Option<impl Future<Output = Infallible>>, serving: impl Future<Output = T>) -> T {
    let captions = async {
        match captions {
            Some(captions) => captions.await,
            None => std::future::pending().await,
        }
    };
    tokio::select! {
        end = serving => end,
        never = captions => match never {},
    }
}

struct Conversation {
    relay: Relay,
    agent: Agent,
    /// Where the agent is a model.
    web: Option<Web>,
    events: tokio::sync::broadcast::Receiver<crate::call::CallEvent>,
    /// The same for the page of a browser call, until somebody else than a built-in agent serves it.
    shown: Option<tokio::sync::broadcast::Receiver<crate::call::CallEvent>>,
    /// Text of a browser that is its own agent.
    messages: Option<Messages>,
    attached: mpsc::Receiver<Link>,
}

impl Conversation {
    async fn run(mut self) {
        // A model's greeting is part of its history.
        if let Some(greeting) = self.agent.greeting.as_ref().filter(|_| self.agent.llm.is_none()) {
            let style = self.relay.style().clone();
            let turn = TurnRequest { patient: true, style, ..TurnRequest::new(greeting.as_str()) };
            if let Err(error) = self.relay.handle().speak(turn).await {
                tracing::warn!(call = %self.relay.handle().id(), %error, "the greeting was not spoken");
            }
        }
        let mut end = self.serve_configured().await;
        let mut was_attached = false;
        loop {
            end = match end {
                RelayEnd::CallEnded => return,
                RelayEnd::Replaced(link) => {
                    was_attached = true;
                    self.serve_link(link).await
                }
                RelayEnd::LinkClosed => match self.attached.try_recv() {
                    // It came while the one before was dialled.
                    Ok(link) => RelayEnd::Replaced(link),
                    // An agent that attached by itself may leave and come back; the call waits.
                    Err(_) if was_attached => self.serve_builtin(Builtin::Silent).await,
                    // The caller speaks with a human and does not miss the agent, which is called again when that is over.
                    Err(_) if self.relay.handle().info().bridged_with.is_some() => match self.bridge_over().await {
                        Some(end) => end,
                        None => self.serve_configured().await,
                    },
                    Err(_) => return self.apologise().await,
                },
            };
        }
    }

    /// The agent that the configuration names, to its end.
    async fn serve_configured(&mut self) -> RelayEnd {
        match (self.agent.llm.clone(), self.agent.media.clone(), Builtin::at(&self.agent.url)) {
            (Some(llm), ..) => self.serve_llm(llm.into()).await,
            (None, Some(url), _) => self.serve_media(&url).await,
            (None, None, Some(builtin)) => self.serve_builtin(builtin).await,
            (None, None, None) => {
                let handle = self.relay.handle().clone();
                // No event is taken meanwhile: the agent hears of all of them.
                let dialled = tokio::select! {
                    dialled = client::dial(&self.agent, handle.meta().trace.as_ref()) => dialled,
                    _ = handle.ended() => return RelayEnd::CallEnded,
                    Some(link) = self.attached.recv() => return RelayEnd::Replaced(link),
                };
                match dialled {
                    Ok(link) => self.serve_link(link).await,
                    Err(error) => {
                        tracing::warn!(call = %handle.id(), %error, "the agent cannot be reached");
                        RelayEnd::LinkClosed
                    }
                }
            }
        }
    }

    /// Waits for the end of the bridge (`None`), of the call, or for an agent that attaches.
    async fn bridge_over(&mut self) -> Option<RelayEnd> {
        loop {
            tokio::select! {
                event = self.events.recv() => match event {
                    Ok(CallEvent::Bridge { state: BridgeState::Ended(_), .. }) => return None,
                    Ok(CallEvent::Ended(_)) | Err(RecvError::Closed) => return Some(RelayEnd::CallEnded),
                    Ok(_) => {}
                    // What was lost may have been the end of it.
                    Err(RecvError::Lagged(_)) if self.relay.handle().info().bridged_with.is_none() => return None,
                    Err(RecvError::Lagged(_)) => {}
                },
                Some(link) = self.attached.recv() => return Some(RelayEnd::Replaced(link)),
            }
        }
    }

    async fn serve_builtin(&mut self, builtin: Builtin) -> RelayEnd {
        // The others tell the page themselves; an agent that takes over does not tell it again.
        let captions = (builtin == Builtin::Silent).then(|| self.captions());
        self.shown = None;
        let told = (&mut self.events, &mut self.messages);
        beside(captions, builtin.run(&mut self.relay, &self.agent, told, &mut self.attached)).await
    }

    async fn serve_llm(&mut self, llm: Arc<llm::config::Llm>) -> RelayEnd {
        let Some(web) = self.web.clone() else { return RelayEnd::LinkClosed };
        let captions = Some(self.captions());
        let told = (&mut self.events, &mut self.messages);
        let serving = llm::driver::run(&mut self.relay, (&self.agent, llm), web, told, &mut self.attached);
        beside(captions, serving).await
    }

    async fn serve_media(&mut self, url: &str) -> RelayEnd {
        let captions = Some(self.captions());
        let serving = media::run(&self.relay, &self.agent, url, &mut self.events, &mut self.attached);
        beside(captions, serving).await
    }

    async fn serve_link(&mut self, link: Link) -> RelayEnd {
        let captions = Some(self.captions());
        beside(captions, self.relay.run(link, &mut self.events, &mut self.attached)).await
    }

    /// Shows the call to the page that is on it, if one is; see [`captions`].
    fn captions(&mut self) -> impl Future<Output = Infallible> + use<> {
        let relay = self.relay.observer();
        let is_page = relay.handle().info().leg == "webrtc";
        let events = is_page.then(|| self.shown.take().unwrap_or_else(|| relay.handle().events()));
        async move {
            match events {
                Some(events) => captions::tell(relay, events).await,
                None => std::future::pending().await,
            }
        }
    }

    /// The agent is lost: the caller hears the apology, then the call ends.
    async fn apologise(&self) {
        let handle = self.relay.handle();
        let apology = self.agent.apology.trim();
        let turn = TurnRequest { interrupt: true, style: self.relay.style().clone(), ..TurnRequest::new(apology) };
        match handle.speak(turn).await {
            Ok(_) if handle.finish(EndReason::AgentLost).is_ok() => {}
            // It has ended the call behind what it said, and that is heard. Asked for without an apology, too.
            Err(SpeakError::Draining) => {}
            _ => handle.hang_up(EndReason::AgentLost),
        }
    }
}

#[cfg(test)]
mod tests;
