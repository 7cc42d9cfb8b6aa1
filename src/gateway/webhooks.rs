//! `[webhook.<name>]`: events of calls sent to a server of the operator's or of a customer's own, as they happen.
//!
//! Records are written first and delivered until somebody has them ([`crate::records`]); events are the news, and what is
//! old is none: they wait in memory, in order, for a bounded time, and what is lost is counted.
//!
//! # Why
//! *Many events in one request*: they are sent in order and one request at a time, so one for each would make a receiver's
//! round trip the limit of how much may happen.
//!
//! *Calls never wait.* A call's task puts an event that somebody wants into a bounded queue, and has it dropped where there
//! is no room; what it looks like as JSON is worked out by the task that delivers.

use std::collections::BTreeMap;
use std::panic::AssertUnwindSafe;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use futures_util::FutureExt as _;
use metrics::counter;
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::runtime::Handle;
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use crate::call::{CallEvent, CallId, CallInfo, CallMeta, Dialling, EventKind, Witness};
use crate::clock::{self, Sparse};
use crate::fault;
use crate::secret::Secret;
use crate::supervise::Part;
use crate::webhook::{Client, Delivery, check, pause};

/// Events of one request at most.
const BATCH: usize = 100;
/// The first pause after a request that failed; it doubles up to [`LONGEST`].
const FIRST: Duration = if cfg!(test) { Duration::from_millis(5) } else { Duration::from_secs(1) };
const LONGEST: Duration = Duration::from_secs(60);

/// `[webhook.<name>]`
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Webhook {
    /// Where events are sent by POST.
    pub url: String,
    /// What requests are signed with; see [`crate::webhook::signature`].
    pub secret: Secret,
    /// Which events.
    pub events: Vec<EventKind>,
    /// Whose calls: those of this tenant; `None`: all.
    #[serde(default)]
    pub tenant: Option<String>,
    /// How often a request is tried; the pauses double from a second to a minute.
    #[serde(default = "default_tries")]
    pub tries: u32,
    /// Events that may wait; further ones are dropped.
    #[serde(default = "default_queue")]
    pub queue: u32,
}

fn default_tries() -> u32 {
    5
}

fn default_queue() -> u32 {
    1_000
}

impl Webhook {
    /// Checks what the types cannot say.
    ///
    /// # Errors
    /// The key and what it must be.
    pub fn validate(&self) -> Result<(), String> {
        check(&self.url, &self.secret, self.tries)?;
        if self.events.is_empty() {
            return Err("events must name at least one event".into());
        }
        if !(1..=100_000).contains(&self.queue) {
            return Err(format!("queue = {}: expected 1 to 100000 events", self.queue));
        }
        Ok(())
    }

    fn wants(&self, call: &CallMeta, kind: EventKind) -> bool {
        self.events.contains(&kind) && self.tenant.as_deref().is_none_or(|tenant| *call.tenant == *tenant)
    }
}

/// The receivers of a gateway's events. Clones mean the same ones.
#[derive(Clone, Debug)]
pub struct Webhooks(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    runtime: Handle,
    hooks: Mutex<Arc<[Hook]>>,
    /// One delivers to each receiver, until its queue is closed and empty.
    tasks: Mutex<JoinSet<()>>,
    /// What waits now is not delivered any more.
    cut: CancellationToken,
    /// The tasks.
    part: Arc<Part>,
}

/// A receiver, and what waits for it. Dropped, it gets what waits and no more.
#[derive(Clone, Debug)]
struct Hook {
    name: Arc<str>,
    config: Webhook,
    queue: mpsc::Sender<Arc<Told>>,
}

/// One event, and what is told with it.
#[derive(Debug)]
struct Told {
    /// Unix time.
    at: Duration,
    call: CallId,
    agent: String,
    tenant: Arc<str>,
    trace: Option<String>,
    event: CallEvent,
}

impl Told {
    fn describe(&self) -> Value {
        let mut value = self.event.describe(&self.call);
        value["atMs"] = json!(self.at.as_millis() as u64);
        value["agent"] = json!(self.agent);
        value["tenant"] = json!(*self.tenant);
        if let Some(trace) = &self.trace {
            value["traceparent"] = json!(trace);
        }
        value
    }
}

impl Webhooks {
    /// Delivers to `configured` by tasks of the runtime that this is called in.
    pub fn start(configured: &BTreeMap<String, Webhook>) -> Self {
        let (hooks, tasks) = (Mutex::new(Arc::default()), Mutex::default());
        let (cut, part) = (CancellationToken::new(), Arc::new(Part::new("webhooks")));
        let webhooks = Self(Arc::new(Inner { runtime: Handle::current(), hooks, tasks, cut, part }));
        webhooks.replace(configured);
        webhooks
    }

    /// Other receivers. One that is as it was keeps what waits for it; one that is not any more gets what waits.
    pub fn replace(&self, configured: &BTreeMap<String, Webhook>) {
        let mut hooks = self.0.hooks.lock().unwrap_or_else(PoisonError::into_inner);
        let mut tasks = self.0.tasks.lock().unwrap_or_else(PoisonError::into_inner);
        // A panic there was logged when it happened.
        while tasks.try_join_next().is_some() {}
        let replaced = configured.iter().filter_map(|(name, config)| {
            if let Some(same) = hooks.iter().find(|hook| *hook.name == **name && hook.config == *config) {
                return Some(same.clone());
            }
            let client = match Client::new() {
                Ok(client) => client,
                Err(error) => {
                    tracing::error!(%error, "[webhook.{name}]: no HTTP client; nothing is delivered");
                    return None;
                }
            };
            let (queue, waiting) = mpsc::channel(config.queue as usize);
            let hook = Hook { name: name.as_str().into(), config: config.clone(), queue };
            for outcome in ["delivered", "failed", "given_up", "dropped"] {
                count(&hook.name, outcome, 0);
            }
            let (name, config, batch) = (hook.name.clone(), config.clone(), Vec::new());
            let receiver = Receiver { name, config, client, waiting, batch };
            tasks.spawn_on(receiver.deliver(self.0.cut.clone(), self.0.part.clone()), &self.0.runtime);
            Some(hook)
        });
        *hooks = replaced.collect();
    }

    /// Whether what delivers to some receiver has panicked and is about to be started again.
    pub fn are_down(&self) -> bool {
        self.0.part.is_down()
    }

    /// Takes no more events, delivers what waits, and drops what is left after `grace`.
    pub async fn close(&self, grace: Duration) {
        *self.0.hooks.lock().unwrap_or_else(PoisonError::into_inner) = Arc::default();
        let mut tasks = std::mem::take(&mut *self.0.tasks.lock().unwrap_or_else(PoisonError::into_inner));
        let all = async { while tasks.join_next().await.is_some() {} };
        if tokio::time::timeout(grace, all).await.is_err() {
            self.0.cut.cancel();
            while tasks.join_next().await.is_some() {}
        }
    }

    fn tell(&self, call: &CallMeta, event: &CallEvent) {
        static LINES: Sparse = Sparse::new();
        let hooks = self.0.hooks.lock().unwrap_or_else(PoisonError::into_inner).clone();
        if hooks.is_empty() {
            return;
        }
        let kind = event.kind();
        let mut told = None;
        for hook in hooks.iter().filter(|hook| hook.config.wants(call, kind)) {
            let told = told.get_or_insert_with(|| {
                Arc::new(Told {
                    at: clock::wall(),
                    call: call.id.clone(),
                    agent: call.agent.clone(),
                    tenant: call.tenant.clone(),
                    trace: call.trace.as_ref().map(ToString::to_string),
                    event: event.clone(),
                })
            });
            // overflow: drops (counted); see the head
            if hook.queue.try_send(told.clone()).is_err() {
                count(&hook.name, "dropped", 1);
                if let Some(missed) = LINES.admit(clock::now()) {
                    tracing::warn!(webhook = %hook.name, missed, "an event was dropped: the receiver is too slow");
                }
            }
        }
    }
}

impl Witness for Webhooks {
    fn dialling(&self, meta: &CallMeta, _trunk: Option<&str>, state: &Dialling) {
        self.tell(meta, &CallEvent::Dialling(state.clone()));
    }

    fn begun(&self, _call: &CallInfo) {}

    fn happened(&self, call: &CallMeta, event: &CallEvent) {
        self.tell(call, event);
    }

    fn ended(&self, _call: &CallInfo) {}
}

fn count(webhook: &Arc<str>, outcome: &'static str, events: u64) {
    let webhook = metrics::SharedString::from(webhook.clone());
    counter!("antiphon_webhook_events_total", "webhook" => webhook, "outcome" => outcome).increment(events);
}

/// Brings the events of one receiver to it.
struct Receiver {
    name: Arc<str>,
    config: Webhook,
    client: Client,
    waiting: mpsc::Receiver<Arc<Told>>,
    /// Taken from there, and not delivered yet.
    batch: Vec<Arc<Told>>,
}

impl Receiver {
    /// Until the queue is closed and empty, or `cut` says to end; also when it panics: what was not delivered is sent then. Events
    /// with which that happens again and again are given up.
    async fn deliver(mut self, cut: CancellationToken, part: Arc<Part>) {
        let mut panics = 0;
        while AssertUnwindSafe(self.work(&cut, &mut panics)).catch_unwind().await.is_err() {
            panics += 1;
            if panics >= self.config.tries && !self.batch.is_empty() {
                count(&self.name, "given_up", self.batch.len() as u64);
                tracing::error!(webhook = %self.name, events = self.batch.len(), "events were given up: sending them panics");
                self.batch.clear();
            }
            part.fell().rest().await;
        }
    }

    /// `panics` is set back when something was sent.
    async fn work(&mut self, cut: &CancellationToken, panics: &mut u32) {
        loop {
            // There is some after a panic.
            if self.batch.is_empty() {
                tokio::select! {
                    biased;
                    () = cut.cancelled() => break,
                    received = self.waiting.recv_many(&mut self.batch, BATCH) => if received == 0 {
                        return;
                    },
                }
            }
            tokio::select! {
                biased;
                () = cut.cancelled() => break,
                () = self.send(&self.batch) => (),
            }
            self.batch.clear();
            *panics = 0;
        }
        self.waiting.close();
        let lost = self.batch.len() + self.waiting.len();
        if lost > 0 {
            count(&self.name, "dropped", lost as u64);
            tracing::warn!(webhook = %self.name, events = lost, "events were not delivered: the gateway ends");
        }
    }

    /// Tries until the batch is taken or given up.
    async fn send(&self, batch: &[Arc<Told>]) {
        fault::point("webhooks", &self.config.url);
        let (id, events) = (uuid::Uuid::new_v4().simple().to_string(), batch.len() as u64);
        let described: Vec<Value> = batch.iter().map(|told| told.describe()).collect();
        let body = json!({ "webhook": &*self.name, "events": described }).to_string();
        // Where all is of one call, it is part of that call's trace.
        let trace = batch.first().and_then(|first| first.trace.as_deref());
        let trace = trace.filter(|trace| batch.iter().all(|told| told.trace.as_deref() == Some(*trace)));
        for tries in 1.. {
            let delivery = Delivery { id: &id, body: &body, trace };
            match self.client.post(&self.config.url, &self.config.secret, delivery).await {
                Ok(()) => return count(&self.name, "delivered", events),
                Err(error) if tries >= self.config.tries => {
                    tracing::warn!(webhook = %self.name, events, tries, %error, "events were not delivered");
                    return count(&self.name, "given_up", events);
                }
                Err(error) => {
                    tracing::info!(webhook = %self.name, events, tries, %error, "events are sent again");
                    count(&self.name, "failed", events);
                    tokio::time::sleep(pause(tries, FIRST, LONGEST)).await;
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    use tokio::net::TcpListener;

    use super::*;
    use crate::call::{Direction, EndReason};
    use crate::webhook::signature;

    /// Longer than anything here takes on the slowest machine.
    const PATIENCE: Duration = Duration::from_secs(60);

    fn call(id: &str, tenant: &str) -> CallMeta {
        CallMeta {
            id: CallId::from(id),
            direction: Direction::Inbound,
            from: "sip:a@example.com".into(),
            to: "sip:b@example.com".into(),
            agent: "support".into(),
            headers: BTreeMap::new(),
            tenant: tenant.into(),
            trace: None,
        }
    }

    fn hook(url: &str, events: &[EventKind]) -> Webhook {
        let (tries, queue) = (default_tries(), default_queue());
        Webhook { url: url.into(), secret: Secret::new("hook"), events: events.into(), tenant: None, tries, queue }
    }

    /// A receiver on a real socket.
    struct Server(TcpListener);

    /// Its head, lower case, and its body.
    type Request = (String, String);

    impl Server {
        async fn start() -> (Self, String) {
            // What the program does at its start; a second time says that it was done already.
            let _ = rustls::crypto::ring::default_provider().install_default();
            let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
            let url = format!("http://{}/events", listener.local_addr().expect("bound"));
            (Self(listener), url)
        }

        /// Takes the next request and answers it with `status`.
        async fn take(&self, status: u16) -> Request {
            tokio::time::timeout(PATIENCE, self.take_one(status)).await.expect("a request comes")
        }

        async fn take_one(&self, status: u16) -> Request {
            let (mut stream, _) = self.0.accept().await.expect("open");
            let mut text = String::new();
            loop {
                let mut piece = [0; 4_096];
                let read = stream.read(&mut piece).await.expect("read");
                text.push_str(&String::from_utf8_lossy(&piece[..read]));
                let Some((head, body)) = text.split_once("\r\n\r\n") else { continue };
                let head = head.to_lowercase();
                if body.len() >= header(&head, "content-length").parse::<usize>().expect("a number") {
                    let answer = format!("HTTP/1.1 {status} x\r\ncontent-length: 0\r\nconnection: close\r\n\r\n");
                    stream.write_all(answer.as_bytes()).await.expect("written");
                    return (head, body.to_owned());
                }
            }
        }
    }

    fn header<'a>(head: &'a str, name: &str) -> &'a str {
        let mut lines = head.lines().filter_map(|line| line.split_once(": "));
        lines.find(|(key, _)| *key == name).map_or("", |(_, value)| value)
    }

    fn names(body: &str) -> Vec<String> {
        let body: Value = serde_json::from_str(body).expect("JSON");
        let events = body["events"].as_array().expect("a list").iter();
        events.map(|event| format!("{} {}", event["callId"], event["event"]).replace('"', "")).collect()
    }

    #[tokio::test]
    async fn what_was_being_sent_at_a_panic_is_sent_and_given_up_where_it_panics_each_time() {
        let (server, url) = Server::start().await;
        let webhooks = Webhooks::start(&BTreeMap::from([(
            "crm".to_owned(),
            Webhook { tries: 2, ..hook(&url, &[EventKind::Connected, EventKind::Ended]) },
        )]));
        fault::arm("webhooks", &url);
        webhooks.happened(&call("1", "crm"), &CallEvent::Connected);
        let (_, body) = server.take(200).await;
        assert_eq!(names(&body), ["1 connected"]);
        // Twice, with the same events: they are given up, and the next ones are not.
        fault::arm("webhooks", &url);
        webhooks.happened(&call("2", "crm"), &CallEvent::Connected);
        let down = async {
            while !webhooks.are_down() {
                tokio::task::yield_now().await;
            }
            fault::arm("webhooks", &url);
            while webhooks.are_down() {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        };
        tokio::time::timeout(PATIENCE, down).await.expect("it panics and rests");
        tokio::time::sleep(Duration::from_millis(20)).await;
        webhooks.happened(&call("3", "crm"), &CallEvent::Ended(EndReason::Remote));
        let (_, body) = server.take(200).await;
        assert_eq!(names(&body), ["3 ended"]);
        webhooks.close(PATIENCE).await;
    }

    #[tokio::test]
    async fn events_of_the_kinds_and_the_tenant_arrive_signed_in_order_and_again_after_a_failure() {
        let (server, url) = Server::start().await;
        let theirs = Webhook { tenant: Some("crm".into()), ..hook(&url, &[EventKind::Connected, EventKind::Ended]) };
        let webhooks = Webhooks::start(&BTreeMap::from([("crm".to_owned(), theirs)]));
        let (theirs, others) = (call("1", "crm"), call("2", "shop"));
        for event in [CallEvent::Connected, CallEvent::Digit('5'), CallEvent::Ended(EndReason::Remote)] {
            webhooks.happened(&others, &event);
            webhooks.happened(&theirs, &event);
        }
        let (refused, first) = server.take(503).await;
        let (head, body) = server.take(204).await;
        assert_eq!((&first, names(&body)), (&body, vec!["1 connected".to_owned(), "1 ended".to_owned()]));
        assert_eq!(header(&head, "x-antiphon-delivery"), header(&refused, "x-antiphon-delivery"), "it is the same one");
        let timestamp = header(&head, "x-antiphon-timestamp").parse().expect("a time");
        assert_eq!(header(&head, "x-antiphon-signature"), signature("hook", timestamp, &body));
        let body: Value = serde_json::from_str(&body).expect("JSON");
        let event = &body["events"][1];
        assert_eq!(
            (&body["webhook"], &event["tenant"], &event["agent"]),
            (&"crm".into(), &"crm".into(), &"support".into())
        );
        assert_eq!(event["reason"], "remote");
        assert!(event["atMs"].as_u64() > Some(1_600_000_000_000), "{event}");
        webhooks.close(PATIENCE).await;
    }

    #[tokio::test]
    async fn what_a_receiver_has_no_room_for_is_dropped_and_what_it_never_takes_is_given_up() {
        let (server, url) = Server::start().await;
        let small = Webhook { queue: 2, tries: 2, ..hook(&url, &[EventKind::Dtmf, EventKind::Busy]) };
        let webhooks = Webhooks::start(&BTreeMap::from([("small".to_owned(), small)]));
        // Nothing is delivered before this task waits for something.
        for digit in ['1', '2', '3'] {
            webhooks.happened(&call("1", ""), &CallEvent::Digit(digit));
        }
        for _ in 0..2 {
            let (_, body) = server.take(500).await;
            assert_eq!(names(&body), ["1 dtmf", "1 dtmf"], "the third had no room");
        }
        webhooks.dialling(&call("2", ""), None, &Dialling::Busy { status: 486 });
        let (_, body) = server.take(200).await;
        assert_eq!(names(&body), ["2 busy"], "those before it were given up");
        webhooks.close(PATIENCE).await;
    }

    #[tokio::test]
    async fn a_changed_receiver_gets_what_waits_and_the_end_waits_for_what_it_can() {
        let ((old, old_url), (new, new_url)) = (Server::start().await, Server::start().await);
        let of = |url: &str| BTreeMap::from([("a".to_owned(), hook(url, &[EventKind::Connected, EventKind::Ended]))]);
        let webhooks = Webhooks::start(&of(&old_url));
        webhooks.happened(&call("1", ""), &CallEvent::Connected);
        webhooks.replace(&of(&new_url));
        webhooks.happened(&call("1", ""), &CallEvent::Ended(EndReason::HungUp));
        assert_eq!(names(&old.take(200).await.1), ["1 connected"]);
        let closing = webhooks.close(PATIENCE);
        let ((), (_, body)) = tokio::join!(closing, new.take(200));
        assert_eq!(names(&body), ["1 ended"]);
        // Closed, it takes nothing; and a receiver that does not answer holds nobody up.
        webhooks.happened(&call("1", ""), &CallEvent::Connected);
        let (_silent, url) = Server::start().await;
        let webhooks = Webhooks::start(&of(&url));
        webhooks.happened(&call("1", ""), &CallEvent::Connected);
        webhooks.close(Duration::from_millis(1)).await;
    }

    #[test]
    fn a_receiver_that_cannot_work_is_refused() {
        let good = hook("https://crm.example.com/events", &[EventKind::Ended]);
        assert_eq!(good.validate(), Ok(()));
        for (bad, why) in [
            (Webhook { url: "ftp://x".into(), ..good.clone() }, "url `ftp://x`"),
            (Webhook { events: Vec::new(), ..good.clone() }, "at least one"),
            (Webhook { queue: 0, ..good.clone() }, "queue = 0"),
            (Webhook { tries: 0, ..good.clone() }, "tries"),
            (Webhook { secret: Secret::new(""), ..good.clone() }, "secret"),
        ] {
            let error = bad.validate().expect_err(why);
            assert!(error.contains(why), "{error}");
        }
    }
}
