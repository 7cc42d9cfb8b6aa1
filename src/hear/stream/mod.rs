//! Recognisers that hear while the caller speaks: one connection a call to Deepgram or OpenAI.
//!
//! The task of one caller moves sound, messages and time between the call, the turn machine and the [`link`]; the
//! [`protocol`] of each service is its own. A socket has a task of its own, so that a service that reads slowly holds up
//! nothing but itself.

pub mod link;
pub mod protocol;

use std::sync::Arc;
use std::time::Duration;

use futures_util::{SinkExt, StreamExt};
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio::time::{Instant as Alarm, sleep_until, timeout};
use tokio_tungstenite::tungstenite::Message as Frame;

use self::link::{Action, Link, Way};
use self::protocol::{Dialect, Message};
use super::ear::{BUSY, Heard, Item, Listen, Piece, Pulse, Sound, Teller};
use super::smart_turn::{self, Asked};
use super::turn::{Action as Turn, Delays, Machine, Source};
use super::{HearEvent, Phase};
use crate::secret::Secret;
use crate::socket::{self, Socket};

/// Messages that may wait for the socket: five seconds of sound, and what is sent again after a failure. A service that
/// is further behind has failed.
const OUTBOX: usize = 512;
/// Messages of the service that may wait for the task, which reads them at once. A full channel slows the service by TCP.
const INBOX: usize = 64;
/// The largest message of a service that is read. Words of a minute with their times have about 20 kB.
const LARGEST: usize = 256 << 10;
/// Sound that a turn may be judged by.
const RECENT: Duration = Duration::from_secs(8);
/// How long a service may take to take one message.
const WRITE: Duration = Duration::from_secs(5);

/// One service.
#[derive(Clone, Debug)]
pub struct Service {
    /// Its protocol.
    pub dialect: Dialect,
    /// Its address.
    pub url: String,
    /// Its API key.
    pub token: Option<Secret>,
    /// Its model, where one is named.
    pub model: Option<String>,
    /// What a minute of sound costs, in any currency.
    pub price: f64,
}

/// What streams to services, for all calls.
#[derive(Debug)]
pub struct Services {
    /// The first is used while it works.
    pub services: Vec<Service>,
    /// How long one may take with its words behind a pause; twice as long, and the turn ends without.
    pub patience: Duration,
}

/// One caller's ear.
pub(super) struct Listener {
    services: Arc<Services>,
    machine: Machine,
    link: Link,
    socket: Option<Connection>,
    pulse: Pulse,
    asked: Asked,
    /// The last seconds, where turns are judged by their sound.
    recent: Sound,
    /// Why the link failed last.
    trouble: Option<String>,
    pausing: bool,
    /// Sound that was sent to a service and not yet counted.
    uncounted: (usize, Duration),
    language: Option<String>,
    tell: Teller,
}

struct Connection {
    to: mpsc::Sender<Outgoing>,
    from: mpsc::Receiver<Incoming>,
    task: JoinHandle<()>,
}

enum Outgoing {
    Message(Message),
    Ping,
}

enum Incoming {
    Opened,
    Text(String),
    Closed(String),
}

impl Listener {
    pub(super) fn new(
        services: Arc<Services>,
        (delays, language, asked): (Delays, Option<String>, Asked),
        pulse: Pulse,
        tell: Teller,
    ) -> Self {
        let ways = services.services.iter().map(|one| Way { dialect: one.dialect, model: one.model.clone() }).collect();
        let mut machine = Machine::new(delays, Source::Streamed);
        machine.wait_for_words(services.patience * 2);
        machine.judge_sound(asked.is_there());
        Self {
            machine,
            link: Link::new(ways, language.clone(), services.patience),
            services,
            socket: None,
            pulse,
            asked,
            recent: Sound::default(),
            trouble: None,
            pausing: false,
            uncounted: (0, Duration::ZERO),
            language,
            tell,
        }
    }

    /// Runs until the call drops its end.
    pub(super) async fn run(mut self, mut items: mpsc::Receiver<Item>) {
        let mut alarm = std::pin::pin!(sleep_until(Alarm::now()));
        loop {
            self.act();
            let link = self.link.deadline();
            let next = self.machine.deadline().map_or(link, |at| at.min(link));
            // Before the first frame nothing is due.
            let deadline = self.pulse.instant_of(next);
            if let Some(deadline) = deadline {
                alarm.as_mut().reset(deadline.into());
            }
            tokio::select! {
                item = items.recv() => match item {
                    Some(Item::Sound(piece)) => self.take(piece),
                    Some(Item::Listen(listen)) => self.listen(listen),
                    None => break,
                },
                incoming = receive(&mut self.socket) => self.came(incoming),
                (id, complete) = self.asked.answer() => {
                    self.machine.judged(self.pulse.now(), id, complete >= smart_turn::COMPLETE);
                }
                () = &mut alarm, if deadline.is_some() => {
                    let now = self.pulse.now();
                    self.machine.tick(now);
                    self.link.tick(now);
                }
            }
        }
        self.close();
        self.count(true);
    }

    fn take(&mut self, Piece { at, heard, quiet, lost }: Piece) {
        self.pulse.beat(at);
        if !lost.is_zero() {
            self.tell.deaf(lost, BUSY.into());
        }
        if self.asked.is_there() {
            self.recent.silence(at, lost.min(RECENT));
            match &heard {
                Heard::Frame(pcm) => self.recent.push(at, &**pcm),
                Heard::Silence(length) => self.recent.silence(at, (*length).min(RECENT)),
            }
            self.recent.forget(at.saturating_sub(RECENT));
        }
        self.machine.frame(at, quiet);
        // What was lost or did not come is a hole to the link, which knows it by the times.
        if let Heard::Frame(pcm) = &heard {
            self.link.frame(at, pcm, self.machine.is_open());
        }
        let pausing = self.machine.is_pausing();
        match (self.pausing, pausing) {
            (false, true) => self.link.pause(at),
            (true, false) => self.link.resume(),
            _ => {}
        }
        self.pausing = pausing;
        self.link.tick(at);
    }

    fn listen(&mut self, listen: Listen) {
        if let Some(wanted) = listen.partials {
            self.machine.want_partials(wanted);
        }
        if let Some(language) = listen.language {
            self.link.speak(self.pulse.now(), &language);
            self.language = Some(language);
        }
        if listen.expect.is_some() {
            self.machine.expect(listen.expect);
        }
    }

    fn came(&mut self, incoming: Incoming) {
        let now = self.pulse.now();
        match incoming {
            Incoming::Opened => self.link.opened(now),
            Incoming::Text(text) => self.link.message(now, &text),
            Incoming::Closed(reason) => {
                self.close();
                self.link.failed(now, reason);
            }
        }
    }

    fn act(&mut self) {
        loop {
            if let Some(action) = self.link.poll() {
                self.carry_out(action);
            } else if let Some(action) = self.machine.poll() {
                match action {
                    Turn::Event(event) => {
                        if event.phase == Phase::EndOfTurn {
                            self.pausing = false;
                            self.link.turn_over();
                        }
                        self.tell.tell(HearEvent::Turn(event));
                    }
                    Turn::Deaf { lost } => {
                        let reason = self.trouble.clone().unwrap_or_else(|| "the recogniser gave no words".into());
                        self.tell.deaf(lost, reason);
                    }
                    Turn::Judge { id, from, to } => self.asked.ask(id, self.recent.judged_by(from, to)),
                    // Words come by themselves, and the link keeps the sound.
                    Turn::Recognise { .. } | Turn::Cancel { .. } | Turn::Forget { .. } => {}
                }
            } else {
                return;
            }
        }
    }

    fn carry_out(&mut self, action: Action) {
        match action {
            Action::Connect(service) => self.connect(service),
            Action::Send { message, sound } => {
                self.uncounted.1 += sound;
                self.count(false);
                self.send(Outgoing::Message(message));
            }
            Action::Ping => self.send(Outgoing::Ping),
            Action::Close => self.close(),
            Action::Words(mut streamed) => {
                if streamed.words.language.is_empty() {
                    streamed.words.language = self.language.clone().unwrap_or_default();
                }
                self.machine.streamed(self.pulse.now(), streamed);
            }
            Action::Trouble { service, reason } => {
                let kind = self.kind(service);
                metrics::counter!("antiphon_recognizer_errors_total", "kind" => kind).increment(1);
                tracing::warn!(kind, reason, "the link to a recogniser failed; its sound is sent again");
                self.trouble = Some(reason);
            }
        }
    }

    fn kind(&self, service: usize) -> &'static str {
        self.services.services.get(service).map_or("unknown", |service| service.dialect.kind())
    }

    fn connect(&mut self, service: usize) {
        self.close();
        self.count(true);
        let Some(chosen) = self.services.services.get(service).cloned() else { return };
        let (to, outbox) = mpsc::channel(OUTBOX);
        let (inbox, from) = mpsc::channel(INBOX);
        let task = tokio::spawn(serve(chosen, self.language.clone(), outbox, inbox));
        self.uncounted.0 = service;
        self.socket = Some(Connection { to, from, task });
    }

    fn send(&mut self, message: Outgoing) {
        let Some(connection) = &self.socket else { return };
        // overflow: the service reads too slowly and has failed; what it did not get goes to the next
        if connection.to.try_send(message).is_err() {
            self.close();
            self.link.failed(self.pulse.now(), "it reads too slowly".into());
        }
    }

    fn close(&mut self) {
        if let Some(connection) = self.socket.take() {
            // The socket's task ends when both its channels are closed; one that hangs in a write is dropped.
            if connection.to.capacity() == 0 {
                connection.task.abort();
            }
        }
    }

    /// Counts whole seconds of sound, or with `all` the rest.
    fn count(&mut self, all: bool) {
        let (service, time) = self.uncounted;
        let seconds = if all { time.as_secs_f64().round() as u64 } else { time.as_secs() };
        if seconds == 0 {
            return;
        }
        self.uncounted.1 = time.saturating_sub(Duration::from_secs(seconds));
        let kind = self.kind(service);
        metrics::counter!("antiphon_recognizer_audio_seconds_total", "kind" => kind).increment(seconds);
        let price = self.services.services.get(service).map_or(0.0, |service| service.price);
        let cost = (seconds as f64 / 60.0 * price * 1e6).round() as u64;
        metrics::counter!("antiphon_recognizer_cost_micros_total", "kind" => kind).increment(cost);
    }
}

/// The next thing of the connection; never where there is none. Cancel safe.
async fn receive(socket: &mut Option<Connection>) -> Incoming {
    match socket {
        Some(connection) => connection.from.recv().await.unwrap_or_else(|| Incoming::Closed("the link broke".into())),
        None => std::future::pending().await,
    }
}

/// One connection, from its opening to its end.
async fn serve(
    service: Service,
    language: Option<String>,
    mut outbox: mpsc::Receiver<Outgoing>,
    inbox: mpsc::Sender<Incoming>,
) {
    let opened = tokio::select! {
        opened = open(&service, language.as_deref()) => opened,
        // The call is over, or another service was chosen meanwhile.
        () = inbox.closed() => return,
    };
    let reason = match opened {
        Ok(socket) => {
            if inbox.send(Incoming::Opened).await.is_err() {
                return;
            }
            pump(socket, &mut outbox, &inbox).await
        }
        Err(reason) => reason,
    };
    // A call that is over needs no reason.
    let _ = inbox.send(Incoming::Closed(reason)).await;
}

async fn open(service: &Service, language: Option<&str>) -> Result<Socket, String> {
    let address = service.dialect.address(&service.url, service.model.as_deref(), language)?;
    let token = service.token.as_ref().map(|token| Secret::new(service.dialect.authorization(token.reveal())));
    let headers = token.iter().map(|token| ("authorization", token));
    socket::connect(&address, headers, LARGEST).await.map_err(|error| error.to_string())
}

/// Moves messages both ways; gives why it ended.
async fn pump(mut socket: Socket, outbox: &mut mpsc::Receiver<Outgoing>, inbox: &mpsc::Sender<Incoming>) -> String {
    loop {
        tokio::select! {
            message = outbox.recv() => {
                let message = match message {
                    Some(Outgoing::Message(Message::Text(text))) => Frame::text(text),
                    Some(Outgoing::Message(Message::Binary(pcm))) => Frame::binary(pcm),
                    Some(Outgoing::Ping) => Frame::Ping(bytes::Bytes::new()),
                    None => {
                        // A peer that is gone cannot be told.
                        let _ = timeout(Duration::from_secs(1), socket.close(None)).await;
                        return "closed".into();
                    }
                };
                match timeout(WRITE, socket.send(message)).await {
                    Ok(Ok(())) => {}
                    Ok(Err(error)) => return format!("the link broke: {error}"),
                    Err(_) => return "it reads too slowly".into(),
                }
            }
            message = socket.next() => match message {
                Some(Ok(Frame::Text(text))) => {
                    if inbox.send(Incoming::Text(text.as_str().to_owned())).await.is_err() {
                        return "closed".into();
                    }
                }
                Some(Ok(Frame::Close(frame))) => {
                    return frame.map_or_else(
                        || "it closed the link".into(),
                        |frame| format!("it closed the link: {} {}", frame.code, frame.reason),
                    );
                }
                Some(Ok(Frame::Binary(_) | Frame::Ping(_) | Frame::Pong(_) | Frame::Frame(_))) => {}
                Some(Err(error)) => return format!("the link broke: {error}"),
                None => return "it closed the link".into(),
            },
        }
    }
}

#[cfg(test)]
mod tests;
