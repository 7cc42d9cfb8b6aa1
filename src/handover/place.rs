//! A process's place: which sockets it reads, whether it does now, and the way to the process before it.

use std::collections::HashSet;
use std::io;
use std::net::{SocketAddr, TcpListener as StdListener, UdpSocket as StdUdp};
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use bytes::Bytes;
use metrics::{counter, gauge};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{mpsc, watch};

use super::inherit::{Name, Passed, fitting};
use super::words::Word;

/// Datagrams that may wait on their way: some hundred milliseconds of a thousand calls.
const WAITING: usize = 4_096;

/// Which port a datagram is of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// SIP over UDP.
    Sip,
    /// The port of all browsers.
    WebRtc,
}

/// A datagram and its sender.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Datagram {
    /// Who sent it.
    pub from: SocketAddr,
    /// Its content.
    pub bytes: Bytes,
}

/// What the process after this one passes on.
pub type Arrived = mpsc::Receiver<Datagram>;

/// The place of this process. Clones mean the same.
#[derive(Clone)]
pub struct Place(Arc<Inner>);

struct Inner {
    /// Whether this process reads and accepts.
    held: watch::Sender<bool>,
    sockets: Mutex<Sockets>,
    /// Whether there is a process before this one: asked for every datagram.
    follows: AtomicBool,
    before: Mutex<Option<Before>>,
    /// Asks the process after this one, where that answers what is its own.
    after: Mutex<Option<reqwest::Client>>,
    sip: Inlet,
    webrtc: Inlet,
}

#[derive(Default)]
struct Sockets {
    /// Passed to this process, and not used yet.
    inherited: Passed,
    /// Duplicates of those that it uses; `None`: it never passes them on.
    kept: Option<Passed>,
}

/// The process whose place this one took.
struct Before {
    calls: HashSet<String>,
    outlet: mpsc::Sender<Word>,
    /// Answers requests that are passed on.
    client: reqwest::Client,
}

struct Inlet {
    arrive: mpsc::Sender<Datagram>,
    arrived: Mutex<Option<Arrived>>,
}

impl Inlet {
    fn new() -> Self {
        // overflow: drops (counted)
        let (arrive, arrived) = mpsc::channel(WAITING);
        Self { arrive, arrived: Mutex::new(Some(arrived)) }
    }
}

impl Default for Place {
    fn default() -> Self {
        Self::new(Vec::new(), true, false)
    }
}

impl Place {
    /// With sockets that were passed to it. `held`: it reads at once. `passes_on`: it keeps what it needs to pass them on.
    pub fn new(inherited: Passed, held: bool, passes_on: bool) -> Self {
        Self(Arc::new(Inner {
            held: watch::Sender::new(held),
            sockets: Mutex::new(Sockets { inherited, kept: passes_on.then(Vec::new) }),
            follows: AtomicBool::new(false),
            before: Mutex::new(None),
            after: Mutex::new(None),
            sip: Inlet::new(),
            webrtc: Inlet::new(),
        }))
    }

    /// The listener `name`: the one that was passed, or the one that `open` makes.
    ///
    /// # Errors
    /// What `open` says, or the one that was passed is bound elsewhere than at `address`.
    pub fn listener(
        &self,
        name: Name,
        address: SocketAddr,
        open: impl FnOnce(SocketAddr) -> io::Result<StdListener>,
    ) -> io::Result<TcpListener> {
        let socket = match self.inherited(name, address)? {
            Some(socket) => socket.into(),
            None => open(address)?,
        };
        self.keep(name, &socket)?;
        TcpListener::from_std(socket)
    }

    /// As [`Place::listener`], of datagrams. `open` makes one that does not block.
    ///
    /// # Errors
    /// As there.
    pub fn datagrams(
        &self,
        name: Name,
        address: SocketAddr,
        open: impl FnOnce(SocketAddr) -> io::Result<StdUdp>,
    ) -> io::Result<StdUdp> {
        let socket = match self.inherited(name, address)? {
            Some(socket) => socket.into(),
            None => open(address)?,
        };
        self.keep(name, &socket)?;
        Ok(socket)
    }

    /// Whether a socket of that name was passed, and nothing has taken it yet.
    pub fn has(&self, name: Name) -> bool {
        self.unused().contains(&name)
    }

    /// What was passed and nothing has taken.
    pub fn unused(&self) -> Vec<Name> {
        lock(&self.0.sockets).inherited.iter().map(|(name, _)| *name).collect()
    }

    fn inherited(&self, name: Name, address: SocketAddr) -> io::Result<Option<socket2::Socket>> {
        let mut sockets = lock(&self.0.sockets);
        let found = sockets.inherited.iter().position(|(inherited, _)| *inherited == name);
        let taken = found.map(|index| sockets.inherited.swap_remove(index).1);
        taken.map(|socket| fitting(name, socket, address)).transpose()
    }

    fn keep(&self, name: Name, socket: &impl AsFd) -> io::Result<()> {
        if let Some(kept) = &mut lock(&self.0.sockets).kept {
            kept.push((name, socket.as_fd().try_clone_to_owned()?));
        }
        Ok(())
    }

    /// Duplicates of every socket, to be passed on.
    ///
    /// # Errors
    /// There are no more descriptors, or this process passes nothing on (any more).
    pub fn duplicates(&self) -> io::Result<Passed> {
        let sockets = lock(&self.0.sockets);
        let kept = sockets.kept.as_ref().ok_or_else(|| io::Error::other("the gateway is being stopped"))?;
        kept.iter().map(|(name, socket)| Ok((*name, socket.try_clone()?))).collect()
    }

    /// Forgets the duplicates: who connects is refused once the listeners are gone.
    pub fn close(&self) {
        lock(&self.0.sockets).kept = None;
    }

    /// Whether this process reads and accepts.
    pub fn is_held(&self) -> bool {
        *self.0.held.borrow()
    }

    /// Begins to read and accept, or stops.
    pub fn hold(&self, held: bool) {
        self.0.held.send_replace(held);
    }

    /// Waits until [`Place::is_held`] is `held`.
    pub async fn until(&self, held: bool) {
        if self.is_held() != held {
            // The sender is in `self`.
            let _ = self.0.held.subscribe().wait_for(|now| *now == held).await;
        }
    }

    /// As `accept` of the listener, while this process accepts. Cancel safe.
    ///
    /// # Errors
    /// As there.
    pub async fn accept(&self, listener: &TcpListener) -> io::Result<(TcpStream, SocketAddr)> {
        loop {
            self.until(true).await;
            tokio::select! {
                accepted = listener.accept() => return accepted,
                () = self.until(false) => {}
            }
        }
    }

    /// Where datagrams come from that the process after this one passes on. Once for each kind: afterwards there is one that
    /// nothing comes from.
    pub fn arrived(&self, kind: Kind) -> Arrived {
        let taken = lock(&self.inlet(kind).arrived).take();
        // overflow: refused: its sender is gone
        taken.unwrap_or_else(|| mpsc::channel(1).1)
    }

    /// Takes what the process after this one passes on.
    pub fn arrive(&self, kind: Kind, datagram: Datagram) {
        // overflow: drops (counted)
        let outcome = if self.inlet(kind).arrive.try_send(datagram).is_ok() { "arrived" } else { "dropped" };
        counter!("antiphon_handover_datagrams_total", "outcome" => outcome).increment(1);
    }

    fn inlet(&self, kind: Kind) -> &Inlet {
        match kind {
            Kind::Sip => &self.0.sip,
            Kind::WebRtc => &self.0.webrtc,
        }
    }

    /// There is a process before this one, with `calls`; words to it go to `outlet`, requests by `client`.
    pub fn follow(&self, calls: Vec<String>, outlet: mpsc::Sender<Word>, client: reqwest::Client) {
        *lock(&self.0.before) = Some(Before { calls: calls.into_iter().collect(), outlet, client });
        self.0.follows.store(true, Ordering::Release);
    }

    /// The process before this one has more calls.
    pub fn theirs(&self, calls: Vec<String>) {
        if let Some(before) = &mut *lock(&self.0.before) {
            before.calls.extend(calls);
        }
    }

    /// The process before this one has so many calls left.
    pub fn left(&self, calls: u32) {
        gauge!("antiphon_handover_calls").set(f64::from(calls));
    }

    /// The process before this one has ended.
    pub fn alone(&self) {
        self.0.follows.store(false, Ordering::Release);
        *lock(&self.0.before) = None;
        self.left(0);
    }

    /// Whether there is a process before this one.
    pub fn follows(&self) -> bool {
        self.0.follows.load(Ordering::Acquire)
    }

    /// Another process has this one's place, and answers what is its own by `client`; `None`: it does not, or is gone.
    pub fn precede(&self, client: Option<reqwest::Client>) {
        *lock(&self.0.after) = client;
    }

    /// What asks the other process over HTTP: the one before this one, or, where this one has lent its place, the one after.
    pub fn client(&self) -> Option<reqwest::Client> {
        if self.follows() {
            return lock(&self.0.before).as_ref().map(|before| before.client.clone());
        }
        if self.is_held() { None } else { lock(&self.0.after).clone() }
    }

    /// Whether a call with this Call-ID is the process's before this one.
    pub fn is_theirs(&self, call_id: &str) -> bool {
        self.follows() && lock(&self.0.before).as_ref().is_some_and(|before| before.calls.contains(call_id))
    }

    /// Passes a datagram on to the process before this one; `false`: there is none.
    pub fn pass(&self, kind: Kind, from: SocketAddr, datagram: &[u8]) -> bool {
        if !self.follows() {
            return false;
        }
        let before = lock(&self.0.before);
        let Some(before) = &*before else { return false };
        let datagram = Datagram { from, bytes: Bytes::copy_from_slice(datagram) };
        // overflow: drops (counted)
        let outcome = if before.outlet.try_send(Word::Passed(kind, datagram)).is_ok() { "passed" } else { "dropped" };
        counter!("antiphon_handover_datagrams_total", "outcome" => outcome).increment(1);
        true
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // What they guard is sound after every step.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::super::listener;
    use super::*;
    use crate::telemetry::shown::Shown;

    const PATIENCE: Duration = Duration::from_secs(30);

    fn any() -> SocketAddr {
        "127.0.0.1:0".parse().expect("an address")
    }

    #[tokio::test]
    async fn what_one_passes_on_the_next_uses_and_only_who_holds_the_place_accepts() {
        let old = Place::new(Vec::new(), true, true);
        let first = old.listener(Name::Http, any(), listener).expect("a port");
        let bound = first.local_addr().expect("bound");
        let passed = old.duplicates().expect("duplicates");
        let new = Place::new(passed, false, true);
        assert!(new.has(Name::Http) && !new.has(Name::SipUdp));
        let second = new.listener(Name::Http, bound, |_| panic!("it was passed")).expect("the same");
        assert!(new.unused().is_empty());

        old.hold(false);
        let connected = TcpStream::connect(bound).await.expect("it waits in the kernel");
        let early = tokio::time::timeout(Duration::from_millis(50), async {
            tokio::select! {
                _ = old.accept(&first) => {}
                _ = new.accept(&second) => {}
            }
        });
        assert!(early.await.is_err(), "nobody accepts");
        new.hold(true);
        let (_, from) = tokio::time::timeout(PATIENCE, new.accept(&second)).await.expect("accepted").expect("well");
        assert_eq!(from, connected.local_addr().expect("connected"));
        old.close();
        assert!(old.duplicates().is_err() && Place::default().duplicates().is_err());
    }

    #[tokio::test]
    async fn datagrams_go_to_the_process_before_until_it_is_gone() {
        let (shown, from, place) = (Shown::here(), any(), Place::default());
        assert!(!place.pass(Kind::Sip, from, b"x") && !place.is_theirs("a") && place.client().is_none());
        let (outlet, mut words) = mpsc::channel(1);
        let _ = rustls::crypto::ring::default_provider().install_default();
        place.follow(vec!["a".into()], outlet, reqwest::Client::new());
        place.theirs(vec!["b".into()]);
        assert!(place.is_theirs("a") && place.is_theirs("b") && !place.is_theirs("c") && place.client().is_some());
        assert!(place.pass(Kind::Sip, from, b"x"));
        assert!(place.pass(Kind::Sip, from, b"y"), "full: lost, and not ours either");
        let Some(Word::Passed(Kind::Sip, passed)) = words.recv().await else { panic!("it was passed") };
        assert!(words.try_recv().is_err());
        let mut arrived = place.arrived(Kind::Sip);
        place.arrive(Kind::Sip, passed.clone());
        assert_eq!(arrived.recv().await, Some(passed));
        place.alone();
        assert!(!place.pass(Kind::Sip, from, b"x") && !place.is_theirs("a"));
        assert!(shown.sum("antiphon_handover_datagrams_total{") >= 2.0, "one that was passed on and one that was lost");
    }

    #[tokio::test]
    async fn who_has_lent_its_place_asks_who_has_it() {
        let _ = rustls::crypto::ring::default_provider().install_default();
        let place = Place::default();
        place.precede(Some(reqwest::Client::new()));
        assert!(place.client().is_none(), "it has its place still");
        place.hold(false);
        assert!(place.client().is_some());
        // The successor died.
        place.hold(true);
        place.precede(None);
        place.hold(false);
        assert!(place.client().is_none());
    }
}
