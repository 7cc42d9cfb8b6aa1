//! Digest authentication of callers (RFC 3261 section 22, RFC 7616, RFC 8760).
//!
//! Owns the secret that nonces are made with, the accounts, and what little must be remembered: the nonce counts of
//! credentials that were right, and the guesses of sources that were wrong. Keeps no state for a challenge: a nonce
//! says when it was made and is signed, so a flood of INVITEs costs no memory.
//!
//! # Why
//! *A nonce is bound to the Call-ID and the source*, so that credentials seen on the wire are of no use for another
//! call or from elsewhere while the nonce lives, and no caller's guesses count against another.
//!
//! *MD5 is the default*: it is what telephones and exchanges speak, and many of them fail where several algorithms are
//! offered. An operator who knows the telephones names better ones in `[sip] digest`.
//!
//! *Guesses are few*: after ten wrong ones a minute nothing of a source is evaluated, right or wrong.

use std::{
    collections::{HashMap, VecDeque},
    fmt::Write as _,
    net::IpAddr,
    sync::{Arc, Mutex, PoisonError, RwLock},
    time::{Duration, Instant},
};

use md5::Md5;
use metrics::counter;
use rsipstack::sip::{Method, Uri};
use sha2::{Digest, Sha256, Sha512_256};

use super::{
    config::{DigestName, Secret, User},
    places::block,
};
use crate::secret::same;

/// How long a nonce is good for.
const LIFETIME: Duration = Duration::from_secs(60);
/// Longest field of credentials that is looked at.
const MAX_FIELD: usize = 1_024;
/// Wrong credentials of one source that are evaluated in a minute.
const GUESSES: usize = 10;
const MINUTE: Duration = Duration::from_secs(60);
/// Sources whose guesses are remembered, and nonces whose counts are.
const MAX_SOURCES: usize = 4_096;
const MAX_NONCES: usize = 8_192;
/// How far behind the highest a nonce count may come (RFC 7616 section 3.4): requests overtake each other.
const WINDOW: u32 = 64;

/// Accounts and the secret behind nonces.
pub(super) struct Authenticator {
    realm: String,
    users: RwLock<Arc<HashMap<String, Secret>>>,
    /// In the order of the challenges, the favourite first.
    algorithms: Vec<DigestName>,
    secret: [u8; 32],
    epoch: Instant,
    seen: Mutex<Seen>,
}

#[derive(Debug, Default)]
struct Seen {
    /// When the last wrong ones of a source came, ten at most.
    guesses: HashMap<IpAddr, VecDeque<Instant>>,
    /// By nonce, with the time it was made.
    counts: HashMap<String, (u64, Counts)>,
}

/// Which counts of one nonce were used.
#[derive(Clone, Copy, Debug, Default)]
struct Counts {
    highest: u32,
    /// Bit `n`: `highest - n` was used.
    used: u64,
}

impl Counts {
    /// Whether `count` is new; it is used then.
    fn take(&mut self, count: u32) -> bool {
        if count > self.highest {
            let ahead = count - self.highest;
            self.used = if ahead >= WINDOW { 0 } else { self.used << ahead };
            (self.highest, self.used) = (count, self.used | 1);
            return true;
        }
        let behind = self.highest - count;
        let fresh = count > 0 && behind < WINDOW && self.used >> behind & 1 == 0;
        if fresh {
            self.used |= 1 << behind;
        }
        fresh
    }
}

/// A request that may bring credentials.
#[derive(Clone, Copy)]
pub(super) struct Claim<'a> {
    pub(super) source: IpAddr,
    pub(super) call_id: &'a str,
    pub(super) method: Method,
    pub(super) uri: &'a Uri,
    /// The value of `Authorization`.
    pub(super) credentials: Option<&'a str>,
}

/// Credentials that answer a challenge of ours.
#[derive(Debug)]
pub(super) struct Read {
    fields: HashMap<String, String>,
    /// When that was made.
    made: u64,
}

/// What credentials are worth.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Proof {
    /// They are right, and of this account.
    Account(String),
    /// There are none, or for another realm or nonce of ours that has expired or was used (`stale`): challenge.
    Missing {
        /// The password was right, the nonce not fresh: the peer need not ask its user again.
        stale: bool,
    },
    /// They are wrong.
    Wrong,
    /// Too many were wrong: these were not looked at. When others may be.
    Throttled(Duration),
}

fn by_name(users: &[User]) -> Arc<HashMap<String, Secret>> {
    Arc::new(users.iter().map(|user| (user.username.clone(), user.password.clone())).collect())
}

impl Authenticator {
    /// `secret` is random. `now` only sets the scale.
    pub(super) fn new(
        realm: &str,
        users: &[User],
        algorithms: &[DigestName],
        secret: [u8; 32],
        now: Instant,
    ) -> Authenticator {
        let users = RwLock::new(by_name(users));
        let algorithms = if algorithms.is_empty() { vec![DigestName::Md5] } else { algorithms.to_vec() };
        let realm = realm.replace(['"', '\\', '\r', '\n'], "");
        Authenticator { realm, users, algorithms, secret, epoch: now, seen: Mutex::default() }
    }

    /// Other accounts, from the next request on.
    pub(super) fn replace(&self, users: &[User]) {
        *self.users.write().unwrap_or_else(PoisonError::into_inner) = by_name(users);
    }

    fn users(&self) -> Arc<HashMap<String, Secret>> {
        self.users.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Whether callers must authenticate.
    pub(super) fn is_required(&self) -> bool {
        !self.users().is_empty()
    }

    /// The values of `WWW-Authenticate`, one an algorithm.
    pub(super) fn challenges(&self, now: Instant, source: IpAddr, call_id: &str, stale: bool) -> Vec<String> {
        counter!("antiphon_sip_auth_total", "outcome" => "challenged").increment(1);
        let nonce = self.nonce(self.seconds(now), source, call_id);
        let stale = if stale { ", stale=true" } else { "" };
        let one = |algorithm: &DigestName| {
            let (realm, name) = (&self.realm, algorithm.name());
            format!("Digest realm=\"{realm}\", nonce=\"{nonce}\", algorithm={name}, qop=\"auth\"{stale}")
        };
        self.algorithms.iter().map(one).collect()
    }

    /// Checks what [`Authenticator::refused`] has read. Right credentials are used up by that: the same come a second time only as
    /// a replay.
    pub(super) fn check(&self, now: Instant, claim: &Claim<'_>, read: &Read) -> Proof {
        let proof = self.evaluate(now, claim, read);
        let outcome = match &proof {
            Proof::Account(_) => "right",
            Proof::Missing { stale: true } => "stale",
            Proof::Missing { stale: false } => return proof,
            Proof::Wrong => "wrong",
            Proof::Throttled(_) => "throttled",
        };
        counter!("antiphon_sip_auth_total", "outcome" => outcome).increment(1);
        proof
    }

    /// What needs no look at the password: there are no credentials, they answer no challenge of ours for this call, or
    /// their source has guessed too often. Uses nothing up, so that it may be asked of a request that nothing is kept of. Gives
    /// the credentials as they were read, for [`Authenticator::check`].
    ///
    /// # Errors
    /// What they are worth.
    pub(super) fn refused(&self, now: Instant, claim: &Claim<'_>) -> Result<Read, Proof> {
        let Some(read) = self.answered(claim) else { return Err(Proof::Missing { stale: false }) };
        let seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(wait) = seen.throttled(now, block(claim.source)) else { return Ok(read) };
        counter!("antiphon_sip_auth_total", "outcome" => "throttled").increment(1);
        Err(Proof::Throttled(wait))
    }

    /// The fields of credentials that answer a challenge of ours, and when that was made.
    fn answered(&self, claim: &Claim<'_>) -> Option<Read> {
        let fields = parse(claim.credentials?)?;
        let field = |name: &str| fields.get(name).map(String::as_str);
        // Another realm's credentials, or a nonce that is not ours for this call: not an attack, just not for us.
        let made = self.made(field("nonce")?, claim.source, claim.call_id);
        let made = made.filter(|_| field("realm") == Some(self.realm.as_str()))?;
        let whole = ["username", "uri", "response"].iter().all(|name| fields.contains_key(*name));
        whole.then_some(Read { fields, made })
    }

    fn evaluate(&self, now: Instant, claim: &Claim<'_>, Read { fields, made }: &Read) -> Proof {
        let field = |name: &str| fields.get(name).map(String::as_str);
        let (Some(username), Some(nonce), Some(uri), Some(response)) =
            (field("username"), field("nonce"), field("uri"), field("response"))
        else {
            return Proof::Missing { stale: false };
        };
        let mut seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        let source = block(claim.source);
        if let Some(wait) = seen.throttled(now, source) {
            return Proof::Throttled(wait);
        }
        let Some((password_right, count)) = self.is_right(claim, username, nonce, uri, response, &field) else {
            seen.guess(now, source);
            return Proof::Wrong;
        };
        if !password_right {
            seen.guess(now, source);
            return Proof::Wrong;
        }
        let age = self.seconds(now).saturating_sub(*made);
        if age > LIFETIME.as_secs() || !seen.take(self.seconds(now), nonce, *made, count) {
            return Proof::Missing { stale: true };
        }
        Proof::Account(username.to_owned())
    }

    /// Whether the digest is right, and its nonce count. `None`: it is of a kind that was not offered.
    fn is_right<'f>(
        &self,
        claim: &Claim<'_>,
        username: &str,
        nonce: &str,
        uri: &str,
        response: &str,
        field: &impl Fn(&str) -> Option<&'f str>,
    ) -> Option<(bool, u32)> {
        let named = field("algorithm").unwrap_or("MD5");
        let algorithm = self.algorithms.iter().find(|a| a.name().eq_ignore_ascii_case(named))?;
        let (covered, count) = match field("qop") {
            // RFC 2069: good for one request.
            None => (nonce.to_owned(), 1),
            Some("auth") => {
                let (nc, cnonce) = (field("nc")?, field("cnonce")?);
                let count = u32::from_str_radix(nc, 16).ok().filter(|_| nc.len() == 8)?;
                (format!("{nonce}:{nc}:{cnonce}:auth"), count)
            }
            Some(_) => return None,
        };
        if !covers(uri, claim.uri) {
            return None;
        }
        // An unknown user costs as much as a wrong password, so that names cannot be told apart by time.
        let users = self.users();
        let password = users.get(username).map_or("", Secret::reveal);
        let expected =
            digest(*algorithm, &[username, &self.realm, password], &covered, &[&claim.method.to_string(), uri]);
        let equal = same(expected.as_bytes(), response.to_ascii_lowercase().as_bytes());
        Some((equal & users.contains_key(username), count))
    }

    fn seconds(&self, now: Instant) -> u64 {
        now.saturating_duration_since(self.epoch).as_secs()
    }

    fn nonce(&self, made: u64, source: IpAddr, call_id: &str) -> String {
        // Prefixing the secret is sound here: the length of what follows is fixed by the hashes, so nothing can be
        // appended.
        let mut hasher = Sha256::new();
        hasher.update(self.secret);
        hasher.update(made.to_be_bytes());
        hasher.update(Sha256::digest(source.to_canonical().to_string()));
        hasher.update(Sha256::digest(call_id));
        let mut nonce = format!("{made:x}.");
        nonce.push_str(&hex(&hasher.finalize()[..16]));
        nonce
    }

    /// When a nonce of ours for this call was made, in seconds of our scale.
    fn made(&self, nonce: &str, source: IpAddr, call_id: &str) -> Option<u64> {
        let made = u64::from_str_radix(nonce.split('.').next()?, 16).ok()?;
        same(self.nonce(made, source, call_id).as_bytes(), nonce.as_bytes()).then_some(made)
    }
}

impl Seen {
    fn throttled(&self, now: Instant, source: IpAddr) -> Option<Duration> {
        let guesses = self.guesses.get(&source)?;
        let oldest = guesses.front().filter(|_| guesses.len() >= GUESSES)?;
        MINUTE.checked_sub(now.saturating_duration_since(*oldest)).filter(|wait| !wait.is_zero())
    }

    fn guess(&mut self, now: Instant, source: IpAddr) {
        if self.guesses.len() >= MAX_SOURCES {
            let recent = |at: &Instant| now.saturating_duration_since(*at) < MINUTE;
            self.guesses.retain(|_, guesses| guesses.back().is_some_and(recent));
        }
        // Sources beyond it share one allowance: a nonce of ours has shown that each really is there.
        let source = if self.guesses.len() >= MAX_SOURCES { IpAddr::from([0; 4]) } else { source };
        let guesses = self.guesses.entry(source).or_default();
        if guesses.len() >= GUESSES {
            guesses.pop_front();
        }
        guesses.push_back(now);
    }

    /// Whether `count` of `nonce` was not used yet.
    fn take(&mut self, now: u64, nonce: &str, made: u64, count: u32) -> bool {
        if self.counts.len() >= MAX_NONCES {
            self.counts.retain(|_, (made, _)| now.saturating_sub(*made) <= LIFETIME.as_secs());
        }
        // overflow: refused: as if the nonce were stale, so that its sender asks for another
        if self.counts.len() >= MAX_NONCES && !self.counts.contains_key(nonce) {
            return false;
        }
        self.counts.entry(nonce.to_owned()).or_insert((made, Counts::default())).1.take(count)
    }
}

/// The digest of RFC 7616 section 3.4.1; `covered` is what stands between the two hashes.
pub(super) fn digest(algorithm: DigestName, who: &[&str], covered: &str, what: &[&str]) -> String {
    let hash = |text: String| match algorithm {
        DigestName::Md5 => hex(&Md5::digest(text)),
        DigestName::Sha256 => hex(&Sha256::digest(text)),
        DigestName::Sha512_256 => hex(&Sha512_256::digest(text)),
    };
    hash(format!("{}:{covered}:{}", hash(who.join(":")), hash(what.join(":"))))
}

/// Whether a digest over `uri` is one for a request to `requested`. Telephones that name the server alone are taken.
fn covers(uri: &str, requested: &Uri) -> bool {
    let Ok(uri) = Uri::try_from(uri) else { return false };
    let address = |uri: &Uri| {
        let port = uri.host_with_port.port.as_ref().map_or(5060, |port| u16::from(*port));
        (uri.host_with_port.host.to_string().to_ascii_lowercase(), port)
    };
    address(&uri) == address(requested) && (uri.user().is_none() || uri.user() == requested.user())
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::new(), |mut out, byte| {
        // Writing to a String cannot fail.
        let _ = write!(out, "{byte:02x}");
        out
    })
}

/// Fields of `Digest name="value", name=value`. `None`: not digest, or broken.
pub(super) fn parse(credentials: &str) -> Option<HashMap<String, String>> {
    let (scheme, mut rest) = credentials.trim().split_once(char::is_whitespace)?;
    if !scheme.eq_ignore_ascii_case("digest") {
        return None;
    }
    let mut fields = HashMap::new();
    loop {
        rest = rest.trim_start_matches([' ', '\t', ',']);
        if rest.is_empty() {
            return Some(fields);
        }
        let (name, after) = rest.split_once('=')?;
        let after = after.trim_start();
        let (value, remainder) = if let Some(quoted) = after.strip_prefix('"') {
            let mut value = String::new();
            let mut chars = quoted.char_indices();
            let end = loop {
                match chars.next()? {
                    (at, '"') => break at,
                    (_, '\\') => value.push(chars.next()?.1),
                    (_, c) => value.push(c),
                }
            };
            (value, &quoted[end + 1..])
        } else {
            let end = after.find(',').unwrap_or(after.len());
            (after[..end].trim().to_owned(), &after[end..])
        };
        if value.len() > MAX_FIELD || fields.len() > 20 {
            return None;
        }
        fields.insert(name.trim().to_ascii_lowercase(), value);
        rest = remainder;
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const ALL: [DigestName; 3] = [DigestName::Sha512_256, DigestName::Sha256, DigestName::Md5];
    const SOURCE: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(192, 0, 2, 1));

    fn authenticator(now: Instant) -> Authenticator {
        let users = [User { username: "alice".into(), password: Secret::new("wonderland") }];
        Authenticator::new("here", &users, &ALL, [7; 32], now)
    }

    fn uri(text: &str) -> Uri {
        text.try_into().expect("an address")
    }

    /// What a telephone would send.
    fn credentials(challenge: &str, password: &str, nc: &str, uri: &str) -> String {
        let fields = parse(challenge).expect("ours parses");
        let nonce = &fields["nonce"];
        let algorithm = ALL.into_iter().find(|a| a.name() == fields["algorithm"]).expect("known");
        let covered = format!("{nonce}:{nc}:cn:auth");
        let response = digest(algorithm, &["alice", "here", password], &covered, &["INVITE", uri]);
        format!(
            "Digest username=\"alice\",realm=\"here\",nonce=\"{nonce}\",uri=\"{uri}\",response=\"{response}\",\
             algorithm={},qop=auth,nc={nc},cnonce=\"cn\"",
            algorithm.name()
        )
    }

    fn check(auth: &Authenticator, now: Instant, call_id: &str, credentials: Option<&str>) -> Proof {
        let uri = uri("sip:x@y");
        prove(auth, now, &Claim { source: SOURCE, call_id, method: Method::Invite, uri: &uri, credentials })
    }

    /// As an INVITE is looked at.
    fn prove(auth: &Authenticator, now: Instant, claim: &Claim<'_>) -> Proof {
        match auth.refused(now, claim) {
            Ok(read) => auth.check(now, claim, &read),
            Err(proof) => proof,
        }
    }

    fn challenge(auth: &Authenticator, now: Instant, call_id: &str) -> String {
        auth.challenges(now, SOURCE, call_id, false).remove(0)
    }

    #[test]
    fn digests_are_those_of_the_rfcs() {
        // RFC 2617 section 3.5 and RFC 7616 section 3.9.1.
        let covered = "dcd98b7102dd2f0e8b11d0f600bfb0c093:00000001:0a4f113b:auth";
        let old = digest(
            DigestName::Md5,
            &["Mufasa", "testrealm@host.com", "Circle Of Life"],
            covered,
            &["GET", "/dir/index.html"],
        );
        assert_eq!(old, "6629fae49393a05397450978507c4ef1");
        let covered =
            "7ypf/xlj9XXwfDPEoM4URrv/xwf94BcCAzFZH4GiTo0v:00000001:f2/wE4q74E6zIJEtWaHKaf5wv/H5QzzpXusqGemxURZJ:auth";
        let who = ["Mufasa", "http-auth@example.org", "Circle of Life"];
        let what = ["GET", "/dir/index.html"];
        assert_eq!(digest(DigestName::Md5, &who, covered, &what), "8ca523f5e9506fed4657c9700eebdbec");
        assert_eq!(
            digest(DigestName::Sha256, &who, covered, &what),
            "753927fa0e85d155564e2e272a28d1802ca10daf4496794697cf8db5856cb6c1"
        );
        // FIPS 180-4's own example of the third.
        assert_eq!(hex(&Sha512_256::digest("abc")), "53048e2681941ef99b2e29b76b4c7dabe4c2d0c634fc6d46e0e2f13107e7af23");
    }

    #[test]
    fn right_credentials_of_every_algorithm_name_the_account() {
        let now = crate::clock::now();
        let auth = authenticator(now);
        for (n, challenge) in auth.challenges(now, SOURCE, "call-1", false).iter().enumerate() {
            let nc = format!("{:08x}", n + 1);
            let good = credentials(challenge, "wonderland", &nc, "sip:x@y");
            assert_eq!(check(&auth, now, "call-1", Some(&good)), Proof::Account("alice".into()), "{challenge}");
        }
        let challenge = challenge(&auth, now, "call-1");
        let good = credentials(&challenge, "wonderland", "00000009", "sip:x@y");
        assert_eq!(check(&auth, now, "call-2", Some(&good)), Proof::Missing { stale: false }, "of another call");
        let elsewhere = Claim {
            source: [192, 0, 2, 2].into(),
            call_id: "call-1",
            method: Method::Invite,
            uri: &uri("sip:x@y"),
            credentials: Some(&good),
        };
        assert_eq!(prove(&auth, now, &elsewhere), Proof::Missing { stale: false }, "of another host");
        let bye = Claim { source: SOURCE, method: Method::Bye, ..elsewhere };
        assert_eq!(prove(&auth, now, &bye), Proof::Wrong);
        let bad = credentials(&challenge, "guess", "00000009", "sip:x@y");
        assert_eq!(check(&auth, now, "call-1", Some(&bad)), Proof::Wrong);
        let nobody = good.replace("alice", "bob");
        assert_eq!(check(&auth, now, "call-1", Some(&nobody)), Proof::Wrong);
        let weaker = good.replace("algorithm=SHA-512-256", "algorithm=SHA-1");
        assert_eq!(check(&auth, now, "call-1", Some(&weaker)), Proof::Wrong);
    }

    #[test]
    fn credentials_are_for_the_address_that_is_called() {
        let now = crate::clock::now();
        let auth = authenticator(now);
        let challenge = challenge(&auth, now, "c");
        for (n, (named, right)) in [
            ("sip:other@y", false),
            ("sip:x@elsewhere", false),
            ("nonsense", false),
            ("sip:y", true),
            ("sip:x@Y:5060", true),
        ]
        .into_iter()
        .enumerate()
        {
            let value = credentials(&challenge, "wonderland", &format!("{:08x}", n + 1), named);
            assert_eq!(check(&auth, now, "c", Some(&value)) == Proof::Account("alice".into()), right, "{named}");
        }
    }

    #[test]
    fn replays_are_stale_and_a_window_forgives_disorder() {
        let now = crate::clock::now();
        let auth = authenticator(now);
        let challenge = challenge(&auth, now, "c");
        let with = |nc: u32| {
            let value = credentials(&challenge, "wonderland", &format!("{nc:08x}"), "sip:x@y");
            check(&auth, now, "c", Some(&value))
        };
        let (account, stale) = (Proof::Account("alice".into()), Proof::Missing { stale: true });
        for (nc, expected) in [
            (1, &account),
            (1, &stale),
            (5, &account),
            (3, &account),
            (3, &stale),
            (100, &account),
            (36, &stale),
            (37, &account),
        ] {
            assert_eq!(with(nc), *expected, "{nc}");
        }
        assert_eq!(with(0), stale);
    }

    #[test]
    fn ten_guesses_a_minute_are_evaluated() {
        let now = crate::clock::now();
        let auth = authenticator(now);
        let challenge = challenge(&auth, now, "c");
        let bad = credentials(&challenge, "guess", "00000001", "sip:x@y");
        let good = credentials(&challenge, "wonderland", "00000001", "sip:x@y");
        // A thousand a second for half a minute.
        let evaluated = (0..30_000_u64)
            .filter(|n| check(&auth, now + Duration::from_millis(*n), "c", Some(&bad)) == Proof::Wrong)
            .count();
        assert_eq!(evaluated, 10);
        let end = now + Duration::from_secs(30);
        assert!(matches!(check(&auth, end, "c", Some(&good)), Proof::Throttled(_)), "a right one is not told apart");
        let later = now + MINUTE + Duration::from_secs(1);
        let fresh = credentials(&self::challenge(&auth, later, "c"), "wonderland", "00000001", "sip:x@y");
        assert_eq!(check(&auth, later, "c", Some(&fresh)), Proof::Account("alice".into()));
        // Another source is not concerned.
        let other: IpAddr = [192, 0, 2, 7].into();
        let theirs = auth.challenges(end, other, "d", false).remove(0);
        let good = credentials(&theirs, "wonderland", "00000001", "sip:x@y");
        let claim = Claim {
            source: other,
            call_id: "d",
            method: Method::Invite,
            uri: &uri("sip:x@y"),
            credentials: Some(&good),
        };
        assert_eq!(prove(&auth, end, &claim), Proof::Account("alice".into()));
    }

    #[test]
    fn memory_is_bounded() {
        let now = crate::clock::now();
        let mut seen = Seen::default();
        for n in 0..10_000_u32 {
            seen.guess(now, IpAddr::from(n.to_be_bytes()));
            seen.take(0, &n.to_string(), 0, 1);
        }
        assert!(seen.guesses.len() <= MAX_SOURCES + 1 && seen.counts.len() <= MAX_NONCES);
    }

    #[test]
    fn old_nonces_are_stale_and_foreign_ones_unknown() {
        let now = crate::clock::now();
        let auth = authenticator(now);
        let good = credentials(&challenge(&auth, now, "c"), "wonderland", "00000001", "sip:x@y");
        let late = now + LIFETIME + Duration::from_secs(2);
        assert_eq!(check(&auth, late, "c", Some(&good)), Proof::Missing { stale: true });
        assert!(auth.challenges(late, SOURCE, "c", true).iter().all(|value| value.ends_with("stale=true")));
        let other = Authenticator::new("here", &[], &ALL, [8; 32], now);
        let foreign = credentials(&challenge(&other, now, "c"), "wonderland", "00000001", "sip:x@y");
        assert_eq!(check(&auth, now, "c", Some(&foreign)), Proof::Missing { stale: false });
        for nothing in [None, Some("Basic abc"), Some("Digest"), Some("Digest username=\"x")] {
            assert_eq!(check(&auth, now, "c", nothing), Proof::Missing { stale: false });
        }
    }

    proptest! {
        #[test]
        fn no_credentials_panic(text in "(Digest )?.{0,200}") {
            let now = crate::clock::now();
            let _ = check(&authenticator(now), now, "c", Some(&text));
        }
    }
}
