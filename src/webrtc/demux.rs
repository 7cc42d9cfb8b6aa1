//! Whose datagram is it: all sessions share one UDP port.
//!
//! Owns the tables from ICE fragment, source address and transaction to a session. Reads no socket and no clock.
//!
//! - A connectivity check names its session by our fragment in USERNAME. Its source address is bound to the
//!   session only when MESSAGE-INTEGRITY proves that the sender knows our password, which it has from our answer.
//! - An answer to one of our own checks is known by its transaction.
//! - Everything else (DTLS, SRTP, SRTCP; RFC 7983) goes by its source address, and is dropped when no session has proved
//!   to be there.
//! - Sound from a stranger that carries the SSRC of a session has the stranger asked, by a check of our own: a peer whose
//!   address changed under it learns nothing of it and would go on unheard until its next check.
//!
//! # Why
//! Routing by fragment alone would let anybody who can guess or read a fragment steal the address of a live call.
//! The agent behind checks integrity too, but only after the address would have been bound.

use std::collections::{HashMap, VecDeque};
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ::webrtc::peer_connection::crypto::{HmacAlgorithm, RTCCryptoProvider};

use super::path::Kind;
use super::stun::{self, Class, Message};

/// One session, unique in this process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Key(pub(super) u64);

/// Why a datagram went nowhere. Closed: also a metric label.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Dropped {
    /// Neither STUN nor DTLS nor SRTP.
    Unknown,
    /// STUN that contradicts itself, or lacks what a check must have.
    Malformed,
    /// A check for a fragment that no session has.
    NoSession,
    /// A check whose sender does not know the password.
    Integrity,
    /// From an address that no session has proved, or an answer to nothing we asked.
    Stranger,
}

impl Dropped {
    /// The metric label.
    pub(super) fn label(self) -> &'static str {
        match self {
            Dropped::Unknown => "unknown",
            Dropped::Malformed => "malformed",
            Dropped::NoSession => "no_session",
            Dropped::Integrity => "integrity",
            Dropped::Stranger => "stranger",
        }
    }
}

/// The tables. `T` is where a session's datagrams go.
pub(super) struct Demux<T> {
    crypto: Arc<dyn RTCCryptoProvider>,
    sessions: HashMap<Key, Session<T>>,
    fragments: HashMap<String, Key>,
    addresses: HashMap<SocketAddr, Key>,
    transactions: HashMap<[u8; 12], Key>,
    /// Whose sound carries this SSRC. A hint, for which nothing is delivered.
    sources: HashMap<u32, Key>,
    /// Strangers that have been asked.
    asked: HashMap<[u8; 12], Key>,
}

struct Session<T> {
    sink: T,
    /// Fragment and password; a second pair after an ICE restart, during which checks of both generations arrive.
    credentials: VecDeque<(String, String)>,
    /// Fragment and password of the peer.
    peer: (String, String),
    addresses: VecDeque<SocketAddr>,
    transactions: VecDeque<[u8; 12]>,
    sources: VecDeque<u32>,
    question: Option<Question>,
}

/// A check of our own to a stranger.
struct Question {
    transaction: [u8; 12],
    to: SocketAddr,
    at: Instant,
}

/// What to do about a datagram from an address that is not proved.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Stranger<'a, T> {
    /// Nothing.
    Unknown,
    /// Send it this check.
    Ask(Vec<u8>),
    /// It has answered one: it is the peer of this session.
    Proved(&'a T),
}

/// Addresses a session may have bound: candidates of a host with many interfaces, and of its NATs. The oldest
/// makes room, so a peer that moves on keeps working.
const ADDRESSES: usize = 16;
/// Checks that may be unanswered at a time.
const TRANSACTIONS: usize = 128;
const GENERATIONS: usize = 2;
/// SSRCs by which a session's peer may be known: a browser has one, and one more for each track that it replaces.
const SOURCES: usize = 4;
/// A session's strangers are asked no more often: who forges its SSRC has us send ten small datagrams a second.
const ASKING: Duration = Duration::from_millis(100);

impl<T> Demux<T> {
    /// Without any session.
    pub(super) fn new(crypto: Arc<dyn RTCCryptoProvider>) -> Self {
        Self {
            crypto,
            sessions: HashMap::new(),
            fragments: HashMap::new(),
            addresses: HashMap::new(),
            transactions: HashMap::new(),
            sources: HashMap::new(),
            asked: HashMap::new(),
        }
    }

    /// A new session; nothing reaches it before [`Demux::credentials`].
    pub(super) fn insert(&mut self, key: Key, sink: T) {
        let session = Session {
            sink,
            credentials: VecDeque::new(),
            peer: Default::default(),
            addresses: VecDeque::new(),
            transactions: VecDeque::new(),
            sources: VecDeque::new(),
            question: None,
        };
        self.sessions.insert(key, session);
    }

    /// Our ICE fragment and password in what the peer was answered, and the `peer`'s own. Ours of the generation before
    /// stay valid. Says whether they are new.
    pub(super) fn credentials(&mut self, key: Key, fragment: &str, password: &str, peer: (&str, &str)) -> bool {
        let Some(session) = self.sessions.get_mut(&key) else { return false };
        session.peer = (peer.0.to_owned(), peer.1.to_owned());
        if session.credentials.iter().any(|(known, _)| known == fragment) {
            return false;
        }
        if session.credentials.len() == GENERATIONS
            && let Some((old, _)) = session.credentials.pop_front()
        {
            self.fragments.remove(&old);
        }
        session.credentials.push_back((fragment.to_owned(), password.to_owned()));
        self.fragments.insert(fragment.to_owned(), key);
        true
    }

    /// The session is over: everything about it is forgotten.
    pub(super) fn remove(&mut self, key: Key) {
        let Some(session) = self.sessions.remove(&key) else { return };
        for (fragment, _) in session.credentials {
            self.fragments.remove(&fragment);
        }
        for address in session.addresses {
            // Another session may have proved the address since.
            if self.addresses.get(&address) == Some(&key) {
                self.addresses.remove(&address);
            }
        }
        for transaction in session.transactions {
            self.transactions.remove(&transaction);
        }
        for source in session.sources {
            self.sources.remove(&source);
        }
        if let Some(question) = session.question {
            self.asked.remove(&question.transaction);
        }
    }

    /// The session sends a check, whose answer will come from an address it may not have proved.
    pub(super) fn expect(&mut self, key: Key, transaction: [u8; 12]) {
        let Some(session) = self.sessions.get_mut(&key) else { return };
        if session.transactions.len() == TRANSACTIONS
            && let Some(old) = session.transactions.pop_front()
        {
            self.transactions.remove(&old);
        }
        session.transactions.push_back(transaction);
        self.transactions.insert(transaction, key);
    }

    /// Where `datagram` from `source` goes, and what it is.
    ///
    /// # Errors
    /// Nowhere, and why.
    pub(super) fn route(&mut self, source: SocketAddr, datagram: &[u8]) -> Result<(Key, &T, Kind), Dropped> {
        let (key, kind) = match datagram.first() {
            Some(0..=3) => self.route_stun(source, datagram)?,
            Some(first @ (20..=63 | 128..=191)) => {
                let key = *self.addresses.get(&source).ok_or(Dropped::Stranger)?;
                if *first >= 128 {
                    self.learn(key, datagram);
                }
                (key, Kind::Media)
            }
            _ => return Err(Dropped::Unknown),
        };
        self.sessions.get(&key).map(|session| (key, &session.sink, kind)).ok_or(Dropped::NoSession)
    }

    /// What to do about `datagram`, for which [`Demux::route`] has said [`Dropped::Stranger`].
    pub(super) fn stranger(&mut self, now: Instant, source: SocketAddr, datagram: &[u8]) -> Stranger<'_, T> {
        let proof = match datagram.first() {
            Some(0..=3) => self.proof(source, datagram),
            Some(128..=191) => return self.ask(now, source, datagram).map_or(Stranger::Unknown, Stranger::Ask),
            _ => None,
        };
        let session = proof.and_then(|key| self.sessions.get(&key));
        session.map_or(Stranger::Unknown, |session| Stranger::Proved(&session.sink))
    }

    /// Whose connectivity check `datagram` is, proved by its password; for transports that have no source to bind.
    pub(super) fn claim(&self, datagram: &[u8]) -> Result<&T, Dropped> {
        let message = Message::parse(datagram).ok_or(Dropped::Malformed)?;
        let (key, fragment) = self.named(&message)?;
        self.verify(key, fragment, &message)?;
        self.sessions.get(&key).map(|session| &session.sink).ok_or(Dropped::NoSession)
    }

    fn route_stun(&mut self, source: SocketAddr, datagram: &[u8]) -> Result<(Key, Kind), Dropped> {
        let message = Message::parse(datagram).ok_or(Dropped::Malformed)?;
        let transaction = message.transaction;
        match message.class {
            Class::Indication => {
                let key = self.addresses.get(&source).copied().ok_or(Dropped::Stranger)?;
                Ok((key, Kind::Check { nominates: false, transaction }))
            }
            Class::Success | Class::Failure => {
                let key = self.transactions.get(&transaction).copied().ok_or(Dropped::Stranger)?;
                Ok((key, Kind::Answer(transaction)))
            }
            Class::Request => {
                let (key, fragment) = self.named(&message)?;
                // Of known addresses too: a check may move the session's media.
                self.verify(key, fragment, &message)?;
                if self.addresses.get(&source) != Some(&key) {
                    self.bind(key, source);
                }
                Ok((key, Kind::Check { nominates: message.nominates, transaction }))
            }
        }
    }

    /// Remembers the SSRC of a session's sound.
    fn learn(&mut self, key: Key, datagram: &[u8]) {
        let Some(ssrc) = ssrc(datagram) else { return };
        // The first to send it keeps it: no stranger takes that of a live call by naming it.
        if self.sources.contains_key(&ssrc) {
            return;
        }
        let Some(session) = self.sessions.get_mut(&key) else { return };
        if session.sources.len() == SOURCES
            && let Some(old) = session.sources.pop_front()
        {
            self.sources.remove(&old);
        }
        session.sources.push_back(ssrc);
        self.sources.insert(ssrc, key);
    }

    /// A check for a stranger whose sound is that of a session.
    fn ask(&mut self, now: Instant, source: SocketAddr, datagram: &[u8]) -> Option<Vec<u8>> {
        let key = *self.sources.get(&ssrc(datagram)?)?;
        let session = self.sessions.get_mut(&key)?;
        if session.question.as_ref().is_some_and(|last| now.saturating_duration_since(last.at) < ASKING) {
            return None;
        }
        let (own, _) = session.credentials.back()?;
        let (fragment, password) = &session.peer;
        let transaction = rand::random();
        let check = stun::check(&*self.crypto, transaction, format!("{fragment}:{own}"), password.clone())?;
        if let Some(last) = session.question.replace(Question { transaction, to: source, at: now }) {
            self.asked.remove(&last.transaction);
        }
        self.asked.insert(transaction, key);
        Some(check)
    }

    /// The session whose question `datagram` answers, with its peer's password and from the address that was asked.
    fn proof(&mut self, source: SocketAddr, datagram: &[u8]) -> Option<Key> {
        let message = Message::parse(datagram).filter(|message| message.class == Class::Success)?;
        let key = *self.asked.get(&message.transaction)?;
        let session = self.sessions.get_mut(&key)?;
        let question = session.question.as_ref()?;
        if question.transaction != message.transaction || question.to != source {
            return None;
        }
        let (_, password) = session.peer.clone();
        self.signed(&message, &password).ok()?;
        self.asked.remove(&message.transaction);
        self.bind(key, source);
        Some(key)
    }

    /// The session that a request names, and our fragment in it.
    fn named<'a>(&self, message: &Message<'a>) -> Result<(Key, &'a str), Dropped> {
        if message.class != Class::Request {
            return Err(Dropped::Malformed);
        }
        let (fragment, _) = message.username.and_then(|name| name.split_once(':')).ok_or(Dropped::Malformed)?;
        self.fragments.get(fragment).map(|key| (*key, fragment)).ok_or(Dropped::NoSession)
    }

    fn verify(&self, key: Key, fragment: &str, message: &Message<'_>) -> Result<(), Dropped> {
        let session = self.sessions.get(&key).ok_or(Dropped::NoSession)?;
        let (_, password) = session.credentials.iter().find(|(own, _)| own == fragment).ok_or(Dropped::NoSession)?;
        self.signed(message, password)
    }

    fn signed(&self, message: &Message<'_>, password: &str) -> Result<(), Dropped> {
        let (parts, tag) = message.protected().ok_or(Dropped::Malformed)?;
        self.crypto
            .crypto()
            .new_hmac(HmacAlgorithm::Sha1, password.as_bytes())
            .and_then(|mut mac| mac.verify(&parts, tag))
            .map_err(|_| Dropped::Integrity)
    }

    fn bind(&mut self, key: Key, source: SocketAddr) {
        let Some(session) = self.sessions.get_mut(&key) else { return };
        if session.addresses.len() == ADDRESSES
            && let Some(old) = session.addresses.pop_front()
            && self.addresses.get(&old) == Some(&key)
        {
            self.addresses.remove(&old);
        }
        session.addresses.push_back(source);
        self.addresses.insert(source, key);
    }
}

/// The sender of an SRTP or SRTCP packet, which is not encrypted (RFC 3711). Second octets 192 to 223 are RTCP's (RFC 5761
/// section 4).
fn ssrc(datagram: &[u8]) -> Option<u32> {
    let at = if (192..=223).contains(datagram.get(1)?) { 4 } else { 8 };
    datagram.get(at..at + 4)?.try_into().ok().map(u32::from_be_bytes)
}

#[cfg(test)]
mod tests;
