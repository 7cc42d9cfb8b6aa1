//! Whose datagram is it: all sessions share one UDP port.
//!
//! Owns the tables from ICE fragment, source address and transaction to a session. Reads no socket and no clock.
//!
//! - A connectivity check names its session by our fragment in USERNAME. Its source address is bound to the
//!   session only when MESSAGE-INTEGRITY proves that the sender knows our password, which it has from our answer.
//! - An answer to one of our own checks is known by its transaction.
//! - Everything else (DTLS, SRTP, SRTCP; RFC 7983) goes by its source address, and is dropped when no session has proved
//!   to be there.
//!
//! # Why
//! Routing by fragment alone would let anybody who can guess or read a fragment steal the address of a live call.
//! The agent behind checks integrity too, but only after the address would have been bound.

use std::collections::{HashMap, VecDeque};
use std::net::SocketAddr;
use std::sync::Arc;

use ::webrtc::peer_connection::crypto::{HmacAlgorithm, RTCCryptoProvider};

use super::stun::{Class, Message};

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
}

struct Session<T> {
    sink: T,
    /// Fragment and password; a second pair after an ICE restart, during which checks of both generations arrive.
    credentials: VecDeque<(String, String)>,
    addresses: VecDeque<SocketAddr>,
    transactions: VecDeque<[u8; 12]>,
}

/// Addresses a session may have bound: candidates of a host with many interfaces, and of its NATs. The oldest
/// makes room, so a peer that moves on keeps working.
const ADDRESSES: usize = 16;
/// Checks that may be unanswered at a time.
const TRANSACTIONS: usize = 128;
const GENERATIONS: usize = 2;

impl<T> Demux<T> {
    /// Without any session.
    pub(super) fn new(crypto: Arc<dyn RTCCryptoProvider>) -> Self {
        Self {
            crypto,
            sessions: HashMap::new(),
            fragments: HashMap::new(),
            addresses: HashMap::new(),
            transactions: HashMap::new(),
        }
    }

    /// A new session; nothing reaches it before [`Demux::credentials`].
    pub(super) fn insert(&mut self, key: Key, sink: T) {
        let session =
            Session { sink, credentials: VecDeque::new(), addresses: VecDeque::new(), transactions: VecDeque::new() };
        self.sessions.insert(key, session);
    }

    /// Our ICE fragment and password in what the peer was answered. Those of the generation before stay valid.
    pub(super) fn credentials(&mut self, key: Key, fragment: &str, password: &str) {
        let Some(session) = self.sessions.get_mut(&key) else { return };
        if session.credentials.iter().any(|(known, _)| known == fragment) {
            return;
        }
        if session.credentials.len() == GENERATIONS
            && let Some((old, _)) = session.credentials.pop_front()
        {
            self.fragments.remove(&old);
        }
        session.credentials.push_back((fragment.to_owned(), password.to_owned()));
        self.fragments.insert(fragment.to_owned(), key);
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

    /// Where `datagram` from `source` goes.
    ///
    /// # Errors
    /// Nowhere, and why.
    pub(super) fn route(&mut self, source: SocketAddr, datagram: &[u8]) -> Result<(Key, &T), Dropped> {
        let key = match datagram.first() {
            Some(0..=3) => self.route_stun(source, datagram)?,
            Some(20..=63 | 128..=191) => *self.addresses.get(&source).ok_or(Dropped::Stranger)?,
            _ => return Err(Dropped::Unknown),
        };
        self.sessions.get(&key).map(|session| (key, &session.sink)).ok_or(Dropped::NoSession)
    }

    /// Whose connectivity check `datagram` is, proved by its password; for transports that have no source to bind.
    pub(super) fn claim(&self, datagram: &[u8]) -> Result<&T, Dropped> {
        let message = Message::parse(datagram).ok_or(Dropped::Malformed)?;
        let (key, fragment) = self.named(&message)?;
        self.verify(key, fragment, &message)?;
        self.sessions.get(&key).map(|session| &session.sink).ok_or(Dropped::NoSession)
    }

    fn route_stun(&mut self, source: SocketAddr, datagram: &[u8]) -> Result<Key, Dropped> {
        let message = Message::parse(datagram).ok_or(Dropped::Malformed)?;
        match message.class {
            Class::Indication => self.addresses.get(&source).copied().ok_or(Dropped::Stranger),
            Class::Response => self.transactions.get(&message.transaction).copied().ok_or(Dropped::Stranger),
            Class::Request => {
                let (key, fragment) = self.named(&message)?;
                // An address already bound saves the computation: the agent behind checks every message itself.
                if self.addresses.get(&source) != Some(&key) {
                    self.verify(key, fragment, &message)?;
                    self.bind(key, source);
                }
                Ok(key)
            }
        }
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

#[cfg(test)]
mod tests;
