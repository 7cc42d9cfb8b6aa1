//! The task of one telephone call: drives the machine, the link and the media until the call is over.

use std::time::{Duration, Instant};

use tokio::sync::{mpsc, oneshot, watch};

use super::dialog::Identity;
use super::link::{Link, Peer};
use super::media::Media;
use super::message::{Message, host_port};
use super::ua::{Event, To, Ua};
use super::{Config, Transport};
use crate::caller::call::{Call, CallError, Command, End, Leg, Setup, Status};
use crate::clock;

/// After the other side's BYE its repetitions are still answered for this long.
const LINGER: Duration = Duration::from_millis(200);

pub(super) async fn call(config: Config, mut link: Link, media: Media, target: &str) -> Result<Call, CallError> {
    let hop = host_port(target).ok_or_else(|| CallError::Target(target.to_owned()))?;
    let peer = link.connect(&hop).await?;
    let patience = config.patience;
    let (mut phone, ready) = Phone::new(config, link, media, patience);
    phone.peer = Some(peer);
    let offer = phone.media.offer();
    phone.ua.invite(phone.asked, target, &phone.config.headers, offer);
    tokio::spawn(phone.run());
    ready.await.unwrap_or(Err(CallError::Over))
}

pub(super) async fn answer(config: Config, link: Link, media: Media, within: Duration) -> Result<Call, CallError> {
    let (phone, ready) = Phone::new(config, link, media, within);
    tokio::spawn(phone.run());
    ready.await.unwrap_or(Err(CallError::Over))
}

type Ready = oneshot::Sender<Result<Call, CallError>>;

/// A telephone on one call, and the task that it is.
///
/// Why this struct is large: what SIP says is [`Ua`]'s and what is heard and said [`Media`]'s; here are the times that only
/// the task knows, and who waits for it.
struct Phone {
    config: Config,
    link: Link,
    media: Media,
    ua: Ua,
    peer: Option<Peer>,
    sender: Option<Peer>,
    ready: Option<Ready>,
    asked: Instant,
    rang: Option<Instant>,
    answered: Option<Instant>,
    give_up: Instant,
    patience: Duration,
    /// When to answer a call that rings.
    answer_at: Option<(Instant, Message)>,
    /// Our offer went out in a 200 and its answer comes in the ACK.
    late_offer: bool,
    headers: Vec<(String, String)>,
    status: watch::Sender<Status>,
    commands: mpsc::Receiver<Command>,
    command_sender: Option<mpsc::Sender<Command>>,
    holding: Option<oneshot::Sender<Result<(), CallError>>>,
    leaving: bool,
    over: Option<Instant>,
}

impl Phone {
    fn new(
        config: Config,
        link: Link,
        media: Media,
        patience: Duration,
    ) -> (Phone, oneshot::Receiver<Result<Call, CallError>>) {
        let now = clock::now();
        let (ready, receiver) = oneshot::channel();
        let (command_sender, commands) = mpsc::channel(16);
        let transport = match config.transport {
            Transport::Udp => "UDP",
            Transport::Tcp => "TCP",
            Transport::Tls => "TLS",
        };
        let me = Identity {
            transport,
            host: link.local().to_string(),
            user: config.user.clone(),
            credentials: config.credentials.clone(),
        };
        let phone = Phone {
            ua: Ua::new(me),
            config,
            link,
            media,
            peer: None,
            sender: None,
            ready: Some(ready),
            asked: now,
            rang: None,
            answered: None,
            give_up: now + patience,
            patience,
            answer_at: None,
            late_offer: false,
            headers: Vec::new(),
            status: watch::Sender::new(Status::default()),
            commands,
            command_sender: Some(command_sender),
            holding: None,
            leaving: false,
            over: None,
        };
        (phone, receiver)
    }

    async fn run(mut self) {
        let mut buffer = vec![0; 2048];
        self.pump().await;
        let mut deadline = clock::now();
        let timer = clock::sleep_until(deadline);
        tokio::pin!(timer);
        loop {
            let now = clock::now();
            if self.over.is_some_and(|over| now >= over) {
                return;
            }
            // A packet that comes in moves no deadline: the timer stays where it is.
            let next = self.deadline(now);
            if next != deadline || timer.is_elapsed() {
                deadline = next;
                timer.as_mut().reset(deadline.into());
            }
            tokio::select! {
                (message, from) = self.link.recv() => {
                    self.sender = Some(from);
                    // Replies of a connection come back on it; a peer without a way yet is reached the same way.
                    self.peer.get_or_insert(from);
                    self.ua.receive(clock::now(), message);
                }
                () = self.media.readable(), if self.over.is_none() => {
                    let reports = self.media.report.reports;
                    self.media.receive(&mut buffer);
                    if self.media.report.reports != reports {
                        let peer = self.media.report;
                        self.status.send_modify(|s| s.peer = peer);
                    }
                }
                command = self.commands.recv(), if self.ready.is_none() && !self.leaving => self.command(command),
                () = abandoned(&mut self.ready), if !self.leaving => self.leave(clock::now()),
                () = &mut timer => self.time_passed(clock::now()),
            }
            self.pump().await;
        }
    }

    fn deadline(&self, now: Instant) -> Instant {
        let media = self.media.deadline().filter(|_| self.over.is_none());
        let set_up = self.ready.as_ref().map(|_| self.give_up);
        let answer = self.answer_at.as_ref().map(|(at, _)| *at);
        [self.ua.deadline(), media, set_up, answer, self.over]
            .into_iter()
            .flatten()
            .min()
            .unwrap_or(now + Duration::from_secs(3600))
    }

    fn time_passed(&mut self, now: Instant) {
        self.ua.handle_timeout(now);
        if self.over.is_none() {
            self.media.send(now);
        }
        if let Some((_, message)) = self.answer_at.take_if(|(at, _)| now >= *at) {
            self.pick_up(now, &message);
        }
        if self.ready.is_some() && now >= self.give_up {
            self.fail(CallError::Unanswered(self.patience));
            self.leave(now);
        }
    }

    fn command(&mut self, command: Option<Command>) {
        let now = clock::now();
        let Some(stream) = &mut self.media.stream else { return };
        match command {
            Some(Command::Say { pcm, began }) => stream.speaker.say(pcm, began),
            Some(Command::Press { digits, done }) => stream.speaker.press(&digits, done),
            Some(Command::StopSpeaking) => stream.speaker.stop(),
            // A telephone has no data channel: dropping the sender says so.
            Some(Command::Text { .. }) => {}
            Some(Command::Hold { hold, done }) => {
                self.media.set_holding(hold);
                let offer = self.media.offer();
                self.ua.offer(now, offer);
                self.holding = Some(done);
            }
            Some(Command::Bye) | None => self.leave(now),
        }
    }

    fn leave(&mut self, now: Instant) {
        if !self.leaving {
            self.leaving = true;
            self.media.leave(now);
            self.ua.leave(now);
            // A gateway that does not answer a BYE is waited for no longer.
            self.over.get_or_insert(now + Duration::from_secs(4));
        }
    }

    /// Sends what the machine wants sent and acts on what it saw.
    async fn pump(&mut self) {
        loop {
            while let Some((bytes, to)) = self.ua.poll_transmit() {
                self.transmit(&bytes, to).await;
            }
            let Some(event) = self.ua.poll_event() else { return };
            self.handle(clock::now(), event);
        }
    }

    async fn transmit(&mut self, bytes: &[u8], to: To) {
        let peer = match (to, &self.link) {
            (To::Sender, _) => self.sender,
            // Requests within the dialog follow its route or contact; datagrams can change their way at no cost.
            (To::Peer, Link::Udp { .. }) => match self.ua.next_hop().and_then(host_port).and_then(|h| h.parse().ok()) {
                Some(address) => Some(Peer::Address(address)),
                None => self.peer,
            },
            (To::Peer, Link::Stream(_)) => self.peer,
        };
        let Some(peer) = peer else { return };
        if let Err(error) = self.link.send(bytes, peer).await {
            tracing::debug!(%error, "signalling could not be sent");
            if matches!(peer, Peer::Connection(_)) {
                self.end(End::Failed(format!("signalling: {error}")));
            }
        }
    }

    fn handle(&mut self, now: Instant, event: Event) {
        match event {
            Event::Progress => {
                self.rang.get_or_insert(now);
            }
            Event::Answered(message) => self.answered_by(now, message),
            Event::Refused { code, reason } => {
                let error = CallError::Refused { code, reason };
                match self.holding.take() {
                    Some(holding) => {
                        // The task that asked may have gone.
                        let _ = holding.send(Err(error));
                    }
                    None => {
                        self.fail(error);
                        self.end(End::Local);
                    }
                }
            }
            Event::Incoming(message) => {
                self.asked = now;
                self.rang = Some(now);
                self.give_up = now + Duration::from_secs(32) + self.config.ringing;
                self.headers = message.headers.clone();
                if self.config.ringing.is_zero() {
                    self.pick_up(now, &message);
                } else {
                    self.ua.ring();
                    self.answer_at = Some((now + self.config.ringing, message));
                }
            }
            Event::Offered(message) => {
                let answer = if message.body.is_empty() {
                    self.late_offer = true;
                    Ok(self.media.offer())
                } else {
                    self.media.answer(now, &message.body)
                };
                match answer {
                    Ok(body) => {
                        self.ua.accept(now, &[], body);
                        self.tell_held();
                    }
                    Err(_) => self.ua.reject(now, 488, "Not Acceptable Here"),
                }
            }
            Event::Confirmed(message) => {
                if std::mem::take(&mut self.late_offer)
                    && let Err(error) = self.media.accept(now, &message.body)
                {
                    self.fail(error);
                    self.leave(now);
                    return;
                }
                self.tell_held();
                self.connected(now);
            }
            Event::Ended => {
                self.answer_at = None;
                self.fail(CallError::Refused { code: 487, reason: "the caller gave up".to_owned() });
                self.end(End::Remote);
            }
            Event::Done => self.end(End::Local),
            Event::Info(body) => {
                let text = String::from_utf8_lossy(&body);
                let signal = text.lines().find_map(|l| l.trim().strip_prefix("Signal=")).unwrap_or(&text);
                let digit = signal.trim().chars().next().filter(|c| crate::wire::dtmf::event_of(*c).is_some());
                self.status.send_modify(|s| s.info_digits.extend(digit));
            }
            Event::Referred(to) => self.status.send_modify(|s| s.referred = Some(to)),
            Event::TimedOut(method) => {
                self.fail(CallError::Unanswered(self.patience));
                self.end(End::Failed(format!("no answer to {method}")));
            }
        }
    }

    fn answered_by(&mut self, now: Instant, message: Message) {
        if let Err(error) = self.media.accept(now, &message.body) {
            match self.holding.take() {
                Some(holding) => {
                    let _ = holding.send(Err(error));
                }
                None => {
                    self.fail(error);
                    self.leave(now);
                }
            }
            return;
        }
        if let Some(holding) = self.holding.take() {
            let _ = holding.send(Ok(()));
            self.tell_held();
            return;
        }
        self.answered.get_or_insert(now);
        self.headers = message.headers;
        if self.leaving {
            // The answer crossed our CANCEL: the call stands and is hung up (section 15).
            self.ua.leave(now);
            return;
        }
        self.tell_held();
        self.connected(now);
    }

    fn pick_up(&mut self, now: Instant, invite: &Message) {
        let body = if invite.body.is_empty() {
            self.late_offer = true;
            Ok(self.media.offer())
        } else {
            self.media.answer(now, &invite.body)
        };
        match body {
            Ok(body) => {
                self.answered = Some(now);
                self.ua.accept(now, &self.config.headers, body);
            }
            Err(error) => {
                self.ua.reject(now, 488, "Not Acceptable Here");
                self.fail(error);
                self.end(End::Local);
            }
        }
    }

    fn connected(&mut self, now: Instant) {
        let (Some(ready), Some(stream)) = (self.ready.take(), &self.media.stream) else { return };
        let Some(commands) = self.command_sender.take() else { return };
        let answered = self.answered.unwrap_or(now);
        let (_, texts) = mpsc::channel(1);
        let call = Call {
            leg: Leg::Sip,
            id: header(&self.headers, "X-Antiphon-Call"),
            codec: stream.codec,
            say_rate: stream.speaker.rate(),
            setup: Setup { asked: self.asked, rang: self.rang.unwrap_or(answered), answered, connected: now },
            ear: stream.ear.clone(),
            commands,
            status: self.status.subscribe(),
            texts,
            headers: self.headers.clone(),
        };
        if ready.send(Ok(call)).is_err() {
            self.leave(now);
        }
    }

    fn tell_held(&self) {
        let held = self.media.stream.as_ref().is_some_and(|s| s.held);
        self.status.send_if_modified(|s| std::mem::replace(&mut s.held, held) != held);
    }

    /// The call did not come about.
    fn fail(&mut self, error: CallError) {
        if let Some(ready) = self.ready.take() {
            // The task that waited may have gone.
            let _ = ready.send(Err(error));
        }
    }

    fn end(&mut self, end: End) {
        let now = clock::now();
        self.fail(CallError::Over);
        if let Some(holding) = self.holding.take() {
            let _ = holding.send(Err(CallError::Over));
        }
        let linger = if end == End::Remote { LINGER } else { Duration::ZERO };
        if self.status.borrow().end.is_none() {
            self.media.leave(now);
            self.status.send_modify(|s| s.end = Some(end));
        }
        self.leaving = true;
        self.over = Some(now + linger);
    }
}

impl Drop for Phone {
    fn drop(&mut self) {
        self.status.send_if_modified(|s| {
            let open = s.end.is_none();
            if open {
                s.end = Some(End::Local);
            }
            open
        });
    }
}

/// Ends when the call is not waited for any more; never once it is connected.
async fn abandoned(ready: &mut Option<Ready>) {
    match ready {
        Some(ready) => ready.closed().await,
        None => std::future::pending().await,
    }
}

fn header(headers: &[(String, String)], name: &str) -> Option<String> {
    headers.iter().find(|(n, _)| n.eq_ignore_ascii_case(name)).map(|(_, v)| v.clone())
}
