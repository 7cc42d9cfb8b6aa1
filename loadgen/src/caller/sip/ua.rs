//! One call's worth of SIP as a machine: messages and time in, bytes and events out (RFC 3261).
//!
//! Contract: after [`Ua::receive`], [`Ua::handle_timeout`] or a command, drain [`Ua::poll_transmit`] and
//! [`Ua::poll_event`], then call [`Ua::handle_timeout`] at [`Ua::deadline`]. It knows no address: what is to be
//! sent goes to wherever the driver's link says, replies back to where the request came from.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use super::auth;
use super::dialog::{Dialog, Identity, reply, token};
use super::message::{Message, Start, uri_of};

/// Round-trip estimate and the longest interval of retransmissions (RFC 3261 section 17.1.1.1).
const T1: Duration = Duration::from_millis(500);
const T2: Duration = Duration::from_secs(4);
/// A transaction gives up after this.
const GIVE_UP: Duration = T1.saturating_mul(64);

/// What the driver is told.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Event {
    /// A provisional response to the INVITE.
    Progress,
    /// 2xx to the INVITE or re-INVITE; ACK is under way.
    Answered(Message),
    /// The INVITE or re-INVITE failed.
    Refused { code: u16, reason: String },
    /// A call comes in; answer by [`Ua::accept`], [`Ua::ring`] or [`Ua::reject`].
    Incoming(Message),
    /// A new offer within the call; answer by [`Ua::accept`] or [`Ua::reject`].
    Offered(Message),
    /// Our 2xx was acknowledged.
    Confirmed(Message),
    /// The other side hung up or gave up.
    Ended,
    /// Our BYE or CANCEL is through.
    Done,
    /// Body of an INFO.
    Info(Vec<u8>),
    /// The other side wants us to call elsewhere.
    Referred(String),
    /// A transaction got no answer.
    TimedOut(String),
}

/// Where bytes go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum To {
    /// The peer of the dialog, by its route or contact.
    Peer,
    /// The sender of what is being handled.
    Sender,
}

/// A request of ours that waits for its final response.
struct Client {
    method: String,
    request: Message,
    branch: String,
    next: Instant,
    interval: Duration,
    give_up: Instant,
    provisional: bool,
    authorised: bool,
}

/// An INVITE that we answer.
struct Server {
    request: Message,
    /// The final response, repeated until it is acknowledged.
    response: Option<Repeat>,
    fresh: bool,
}

struct Repeat {
    bytes: Vec<u8>,
    code: u16,
    next: Instant,
    interval: Duration,
    give_up: Instant,
}

pub(crate) struct Ua {
    me: Identity,
    dialog: Option<Dialog>,
    client: Option<Client>,
    /// BYE or CANCEL, beside an INVITE that may still be open.
    leaving: Option<Client>,
    cancel_wanted: bool,
    server: Option<Server>,
    /// ACK of our last 2xx, sent again when that is.
    ack: Option<(u32, Vec<u8>)>,
    /// Last responses to requests other than INVITE, by branch.
    answered: VecDeque<(String, Vec<u8>)>,
    out: VecDeque<(Vec<u8>, To)>,
    events: VecDeque<Event>,
    established: bool,
}

impl Ua {
    pub(crate) fn new(me: Identity) -> Ua {
        Ua {
            me,
            dialog: None,
            client: None,
            leaving: None,
            cancel_wanted: false,
            server: None,
            ack: None,
            answered: VecDeque::new(),
            out: VecDeque::new(),
            events: VecDeque::new(),
            established: false,
        }
    }

    /// Calls `target` with an offer.
    pub(crate) fn invite(&mut self, now: Instant, target: &str, headers: &[(String, String)], offer: Vec<u8>) {
        let local = format!("sip:{}@{}", self.me.user, self.me.host);
        self.dialog = Some(Dialog {
            call_id: format!("{}@{}", token(), self.me.host),
            local: format!("<{local}>"),
            local_tag: token(),
            remote: format!("<{target}>"),
            remote_tag: None,
            target: target.to_owned(),
            routes: Vec::new(),
            cseq: 0,
            remote_cseq: 0,
        });
        let Some(mut request) = self.request("INVITE") else { return };
        request.headers.extend(headers.iter().cloned());
        self.client = Some(self.start(now, request.with_body("application/sdp", offer)));
    }

    /// Makes a new offer within the call.
    pub(crate) fn offer(&mut self, now: Instant, offer: Vec<u8>) {
        if self.client.is_none()
            && let Some(request) = self.request("INVITE")
        {
            self.client = Some(self.start(now, request.with_body("application/sdp", offer)));
        }
    }

    /// Answers the pending INVITE with 200 and `body`.
    pub(crate) fn accept(&mut self, now: Instant, headers: &[(String, String)], body: Vec<u8>) {
        let mut response = Message::response(200, "OK");
        response.headers.extend(headers.iter().cloned());
        self.answer(now, response.with_body("application/sdp", body));
        self.established = true;
    }

    /// Says that it rings.
    pub(crate) fn ring(&mut self) {
        if let Some(server) = &self.server {
            let response = self.reply(&server.request, Message::response(180, "Ringing"));
            self.out.push_back((response.to_bytes(), To::Sender));
        }
    }

    /// Refuses the pending INVITE.
    pub(crate) fn reject(&mut self, now: Instant, code: u16, reason: &str) {
        self.answer(now, Message::response(code, reason));
    }

    /// Leaves: BYE on an answered call, CANCEL before that.
    pub(crate) fn leave(&mut self, now: Instant) {
        if self.leaving.is_some() {
            return;
        }
        if self.established {
            if let Some(request) = self.request("BYE") {
                self.leaving = Some(self.start(now, request));
            }
        } else if let Some(client) = &self.client {
            if client.provisional {
                self.cancel(now);
            } else {
                // A CANCEL may not go before a provisional response (section 9.1).
                self.cancel_wanted = true;
            }
        } else {
            self.reject(now, 486, "Busy Here");
            self.events.push_back(Event::Done);
        }
    }

    pub(crate) fn receive(&mut self, now: Instant, message: Message) {
        match &message.start {
            Start::Response { code, reason } => {
                let (code, reason) = (*code, reason.clone());
                self.receive_response(now, code, &reason, message);
            }
            Start::Request { method, .. } => {
                let method = method.clone();
                self.receive_request(now, &method, message);
            }
        }
    }

    pub(crate) fn deadline(&self) -> Option<Instant> {
        let clients = self.client.iter().chain(&self.leaving).map(|c| c.next.min(c.give_up));
        let server = self.server.iter().filter_map(|s| s.response.as_ref()).map(|r| r.next.min(r.give_up));
        clients.chain(server).min()
    }

    pub(crate) fn handle_timeout(&mut self, now: Instant) {
        let udp = self.me.transport == "UDP";
        let far = now + GIVE_UP * 4;
        let mut out = Vec::new();
        let mut lost = Vec::new();
        for slot in [&mut self.client, &mut self.leaving] {
            let Some(client) = slot else { continue };
            if now >= client.give_up {
                lost.push(client.method.clone());
                *slot = None;
            } else if now >= client.next {
                let repeat = udp && !(client.provisional && client.method == "INVITE");
                if repeat {
                    out.push(client.request.to_bytes());
                    client.interval =
                        if client.method == "INVITE" { client.interval * 2 } else { (client.interval * 2).min(T2) };
                }
                client.next = if repeat { now + client.interval } else { far };
            }
        }
        for method in lost {
            let gone = method == "BYE" || method == "CANCEL";
            self.events.push_back(if gone { Event::Done } else { Event::TimedOut(method) });
        }
        if let Some(repeat) = self.server.as_mut().and_then(|s| s.response.as_mut()) {
            if now >= repeat.give_up {
                let accepted = repeat.code < 300;
                self.server = None;
                if accepted {
                    self.events.push_back(Event::TimedOut("ACK".to_owned()));
                }
            } else if now >= repeat.next {
                self.out.push_back((repeat.bytes.clone(), To::Sender));
                repeat.interval = (repeat.interval * 2).min(T2);
                repeat.next = now + repeat.interval;
            }
        }
        self.out.extend(out.into_iter().map(|bytes| (bytes, To::Peer)));
    }

    pub(crate) fn poll_transmit(&mut self) -> Option<(Vec<u8>, To)> {
        self.out.pop_front()
    }

    pub(crate) fn poll_event(&mut self) -> Option<Event> {
        self.events.pop_front()
    }

    /// Where requests of the dialog go: its first route, else the other side's contact.
    pub(crate) fn next_hop(&self) -> Option<&str> {
        let dialog = self.dialog.as_ref()?;
        Some(dialog.routes.first().map_or(dialog.target.as_str(), |route| uri_of(route)))
    }

    fn receive_response(&mut self, now: Instant, code: u16, reason: &str, message: Message) {
        let method = message.cseq().map(|(_, method)| method.to_owned()).unwrap_or_default();
        let branch = message.branch().unwrap_or_default().to_owned();
        if self.leaving.as_ref().is_some_and(|c| c.branch == branch && c.method == method) {
            if code >= 200 {
                let retry = self.leaving.take().and_then(|client| self.authorise(now, code, &message, client));
                match retry {
                    Some(client) => self.leaving = Some(client),
                    None if method == "BYE" => self.events.push_back(Event::Done),
                    None => {}
                }
            } else if let Some(client) = &mut self.leaving {
                client.next = now + T2;
                client.interval = T2;
            }
            return;
        }
        let matches = self.client.as_ref().is_some_and(|c| c.branch == branch && c.method == method);
        if !matches {
            // A 2xx that is sent again wants its ACK again (section 13.2.2.4).
            if let (true, Some((cseq, ack))) = (code / 100 == 2 && method == "INVITE", &self.ack)
                && message.cseq().is_some_and(|(n, _)| n == *cseq)
            {
                self.out.push_back((ack.clone(), To::Peer));
            }
            return;
        }
        if code < 200 {
            if let Some(client) = &mut self.client {
                client.provisional = true;
                // The far end rings as long as it likes; the driver has its own patience.
                client.give_up = now + GIVE_UP * 4;
            }
            if self.cancel_wanted {
                self.cancel(now);
            }
            self.events.push_back(Event::Progress);
            return;
        }
        let Some(client) = self.client.take() else { return };
        if code < 300 {
            self.confirm(&message);
            self.events.push_back(Event::Answered(message));
            return;
        }
        // The ACK of a refusal belongs to the transaction: same branch, and only to the next hop.
        let mut ack = Message::request("ACK", self.target());
        for name in ["Via", "From", "Call-ID", "Max-Forwards", "Route"] {
            let all = client.request.headers.iter().filter(|(n, _)| n.eq_ignore_ascii_case(name)).cloned();
            ack.headers.extend(all);
        }
        let number = client.request.cseq().map_or(1, |(n, _)| n);
        ack = ack.with("To", message.header("To").unwrap_or_default()).with("CSeq", format!("{number} ACK"));
        self.out.push_back((ack.to_bytes(), To::Peer));
        match self.authorise(now, code, &message, client) {
            Some(client) => self.client = Some(client),
            None => self.events.push_back(Event::Refused { code, reason: reason.to_owned() }),
        }
    }

    /// Repeats a challenged request with credentials; `None` when that is no use.
    fn authorise(&mut self, now: Instant, code: u16, message: &Message, client: Client) -> Option<Client> {
        let (challenge, answer) = match code {
            401 => ("WWW-Authenticate", "Authorization"),
            407 => ("Proxy-Authenticate", "Proxy-Authorization"),
            _ => return None,
        };
        let credentials = self.me.credentials.as_ref().filter(|_| !client.authorised)?;
        let Start::Request { uri, .. } = &client.request.start else { return None };
        let value = auth::answer(message.header(challenge)?, credentials, &client.method, uri, &token())?;
        let mut request = client.request.clone();
        request.headers.retain(|(n, _)| !["Via", "CSeq"].contains(&n.as_str()));
        let dialog = self.dialog.as_mut()?;
        dialog.cseq += 1;
        let cseq = format!("{} {}", dialog.cseq, client.method);
        let via = self.me.via();
        request.headers.insert(0, ("Via".to_owned(), via));
        request = request.with("CSeq", cseq).with(answer, value);
        let mut client = self.start(now, request);
        client.authorised = true;
        Some(client)
    }

    /// Takes the dialog from a 2xx and acknowledges it.
    fn confirm(&mut self, message: &Message) {
        let first = !self.established;
        self.established = true;
        let number = message.cseq().map_or(1, |(n, _)| n);
        if let Some(dialog) = &mut self.dialog {
            if first {
                dialog.remote_tag = message.tag("To").map(str::to_owned);
                dialog.remote = message.header("To").unwrap_or(&dialog.remote).to_owned();
                let mut routes: Vec<String> = message.list("Record-Route").into_iter().map(str::to_owned).collect();
                routes.reverse();
                dialog.routes = routes;
            }
            if let Some(contact) = message.list("Contact").first() {
                dialog.target = uri_of(contact).to_owned();
            }
        }
        let Some(mut ack) = self.request("ACK") else { return };
        ack.headers.retain(|(n, _)| n != "CSeq");
        if let Some(dialog) = &mut self.dialog {
            // The ACK bears the number of its INVITE and uses none up.
            dialog.cseq -= 1;
        }
        let bytes = ack.with("CSeq", format!("{number} ACK")).to_bytes();
        self.out.push_back((bytes.clone(), To::Peer));
        self.ack = Some((number, bytes));
    }

    fn cancel(&mut self, now: Instant) {
        self.cancel_wanted = false;
        let Some(client) = &self.client else { return };
        let Start::Request { uri, .. } = &client.request.start else { return };
        let mut request = Message::request("CANCEL", uri);
        for name in ["Via", "From", "To", "Call-ID", "Max-Forwards", "Route"] {
            let all = client.request.headers.iter().filter(|(n, _)| n.eq_ignore_ascii_case(name)).cloned();
            request.headers.extend(all);
        }
        let number = client.request.cseq().map_or(1, |(n, _)| n);
        self.leaving = Some(self.start(now, request.with("CSeq", format!("{number} CANCEL"))));
    }

    fn receive_request(&mut self, now: Instant, method: &str, message: Message) {
        let ours = self.dialog.as_ref().is_some_and(|d| {
            message.header("Call-ID") == Some(d.call_id.as_str())
                && message.tag("To").is_none_or(|tag| tag == d.local_tag)
                && message.tag("From") == d.remote_tag.as_deref()
        });
        let key = format!("{method} {}", message.branch().unwrap_or_default());
        if let Some((_, bytes)) = self.answered.iter().find(|(k, _)| *k == key) {
            self.out.push_back((bytes.clone(), To::Sender));
            return;
        }
        match method {
            "ACK" => {
                if let Some(server) = self.server.take_if(|s| s.response.is_some())
                    && server.response.is_some_and(|r| r.code < 300)
                {
                    self.events.push_back(Event::Confirmed(message));
                }
            }
            "INVITE" => self.receive_invite(now, ours, message),
            "CANCEL" => {
                let pending = self
                    .server
                    .as_ref()
                    .is_some_and(|s| s.response.is_none() && s.request.branch() == message.branch());
                let code = if pending { (200, "OK") } else { (481, "Call/Transaction Does Not Exist") };
                self.respond(&message, code.0, code.1, key);
                if pending {
                    self.reject(now, 487, "Request Terminated");
                    self.events.push_back(Event::Ended);
                }
            }
            "OPTIONS" => self.respond(&message, 200, "OK", key),
            _ if !ours => self.respond(&message, 481, "Call/Transaction Does Not Exist", key),
            "BYE" => {
                self.respond(&message, 200, "OK", key);
                self.events.push_back(Event::Ended);
            }
            "INFO" => {
                self.respond(&message, 200, "OK", key);
                self.events.push_back(Event::Info(message.body));
            }
            "UPDATE" if message.body.is_empty() => self.respond(&message, 200, "OK", key),
            "NOTIFY" => self.respond(&message, 200, "OK", key),
            "REFER" => match message.header("Refer-To").map(uri_of).map(str::to_owned) {
                Some(to) => {
                    self.respond(&message, 202, "Accepted", key);
                    if let Some(request) = self.request("NOTIFY") {
                        let notify = request
                            .with("Event", "refer")
                            .with("Subscription-State", "terminated;reason=noresource")
                            .with_body("message/sipfrag;version=2.0", "SIP/2.0 200 OK\r\n");
                        self.out.push_back((notify.to_bytes(), To::Peer));
                    }
                    self.events.push_back(Event::Referred(to));
                }
                None => self.respond(&message, 400, "Missing Refer-To", key),
            },
            _ => self.respond(&message, 501, "Not Implemented", key),
        }
    }

    fn receive_invite(&mut self, now: Instant, ours: bool, message: Message) {
        if let Some(server) = &self.server
            && server.request.branch() == message.branch()
        {
            // Sent again: so is our answer, if there is one yet.
            if let Some(repeat) = &server.response {
                self.out.push_back((repeat.bytes.clone(), To::Sender));
            }
            return;
        }
        let number = message.cseq().map_or(0, |(n, _)| n);
        if ours && message.tag("To").is_some() {
            if self.client.is_some() || self.server.is_some() {
                self.reply_once(&message, 491, "Request Pending");
                return;
            }
            if let Some(dialog) = &mut self.dialog {
                dialog.remote_cseq = number;
                if let Some(contact) = message.list("Contact").first() {
                    dialog.target = uri_of(contact).to_owned();
                }
            }
            self.server = Some(Server { request: message.clone(), response: None, fresh: false });
            self.events.push_back(Event::Offered(message));
            return;
        }
        if self.dialog.is_some() || self.server.is_some() {
            self.reply_once(&message, 486, "Busy Here");
            return;
        }
        if message.header("From").is_none() || message.header("Call-ID").is_none() || message.list("Contact").is_empty()
        {
            self.reply_once(&message, 400, "Bad Request");
            return;
        }
        let header = |name: &str| message.header(name).unwrap_or_default().to_owned();
        let routes = message.list("Record-Route").into_iter().map(str::to_owned).collect();
        let target = message.list("Contact").first().map(|c| uri_of(c).to_owned()).unwrap_or_default();
        self.dialog = Some(Dialog {
            call_id: header("Call-ID"),
            local: header("To"),
            local_tag: token(),
            remote: header("From"),
            remote_tag: message.tag("From").map(str::to_owned),
            target,
            routes,
            cseq: 0,
            remote_cseq: number,
        });
        let trying = self.reply(&message, Message::response(100, "Trying"));
        self.out.push_back((trying.to_bytes(), To::Sender));
        self.server = Some(Server { request: message.clone(), response: None, fresh: true });
        let _ = now;
        self.events.push_back(Event::Incoming(message));
    }

    /// Sends the final response to the pending INVITE, and again until it is acknowledged.
    fn answer(&mut self, now: Instant, response: Message) {
        let Some(server) = &self.server else { return };
        let Start::Response { code, .. } = response.start else { return };
        let bytes = self.reply(&server.request, response).to_bytes();
        self.out.push_back((bytes.clone(), To::Sender));
        let fresh = server.fresh;
        if let Some(server) = &mut self.server {
            let repeat = Repeat { bytes, code, next: now + T1, interval: T1, give_up: now + GIVE_UP };
            server.response = Some(repeat);
        }
        if code >= 300 && fresh {
            self.dialog = None;
        }
    }

    fn respond(&mut self, request: &Message, code: u16, reason: &str, key: String) {
        let bytes = self.reply(request, Message::response(code, reason)).to_bytes();
        self.out.push_back((bytes.clone(), To::Sender));
        if self.answered.len() == 16 {
            self.answered.pop_front();
        }
        self.answered.push_back((key, bytes));
    }

    /// A refusal of an INVITE that is not repeated: its sender repeats the INVITE when it got lost.
    fn reply_once(&mut self, request: &Message, code: u16, reason: &str) {
        let response = self.reply(request, Message::response(code, reason));
        self.out.push_back((response.to_bytes(), To::Sender));
    }

    fn start(&mut self, now: Instant, request: Message) -> Client {
        let method = request.cseq().map(|(_, m)| m.to_owned()).unwrap_or_default();
        let branch = request.branch().unwrap_or_default().to_owned();
        self.out.push_back((request.to_bytes(), To::Peer));
        Client {
            method,
            branch,
            request,
            next: now + T1,
            interval: T1,
            give_up: now + GIVE_UP,
            provisional: false,
            authorised: false,
        }
    }

    fn target(&self) -> &str {
        self.dialog.as_ref().map_or("", |d| d.target.as_str())
    }

    /// Completes a response by what it copies from its request.
    fn reply(&self, request: &Message, response: Message) -> Message {
        reply(&self.me, self.dialog.as_ref().map(|d| d.local_tag.as_str()), request, response)
    }

    /// A request of the dialog, numbered anew.
    fn request(&mut self, method: &str) -> Option<Message> {
        Some(self.dialog.as_mut()?.request(&self.me, method))
    }
}

#[cfg(test)]
#[path = "ua_tests.rs"]
mod tests;
