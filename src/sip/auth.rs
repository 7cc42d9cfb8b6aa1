//! Digest authentication of callers (RFC 3261 section 22, RFC 7616 with MD5).
//!
//! Owns the secret that nonces are made with and the accounts. Keeps no state for a challenge: a nonce says
//! when it was made and is signed, so a flood of INVITEs costs no memory.
//!
//! # Why
//! *A nonce is bound to the Call-ID*, so that credentials seen on the wire are of no use for another call
//! while the nonce lives. *MD5 only*: it is what telephones and exchanges speak, and offering two
//! algorithms makes many of them fail on both.

use std::{
    collections::HashMap,
    fmt::Write as _,
    time::{Duration, Instant},
};

use rsipstack::{
    dialog::authenticate::compute_digest,
    sip::{Method, headers::auth::Algorithm},
};
use sha2::{Digest, Sha256};

use super::config::{Secret, User};

/// How long a nonce is good for.
const LIFETIME: Duration = Duration::from_secs(60);
/// Longest field of credentials that is looked at.
const MAX_FIELD: usize = 1_024;

/// Accounts and the secret behind nonces.
pub(super) struct Authenticator {
    realm: String,
    users: HashMap<String, Secret>,
    secret: [u8; 32],
    epoch: Instant,
}

/// What credentials are worth.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Proof {
    /// They are right, and of this account.
    Account(String),
    /// There are none, or for another realm or nonce of ours that has expired (`stale`): challenge.
    Missing {
        /// The password was right, the nonce too old: the peer need not ask its user again.
        stale: bool,
    },
    /// They are wrong.
    Wrong,
}

impl Authenticator {
    /// `secret` is random. `now` only sets the scale.
    pub(super) fn new(realm: &str, users: &[User], secret: [u8; 32], now: Instant) -> Authenticator {
        let users = users.iter().map(|u| (u.username.clone(), u.password.clone())).collect();
        Authenticator { realm: realm.replace(['"', '\\', '\r', '\n'], ""), users, secret, epoch: now }
    }

    /// Whether callers must authenticate.
    pub(super) fn is_required(&self) -> bool {
        !self.users.is_empty()
    }

    /// The value of `WWW-Authenticate`.
    pub(super) fn challenge(&self, now: Instant, call_id: &str, stale: bool) -> String {
        let nonce = self.nonce(self.seconds(now), call_id);
        let stale = if stale { ", stale=true" } else { "" };
        format!("Digest realm=\"{}\", nonce=\"{nonce}\", algorithm=MD5, qop=\"auth\"{stale}", self.realm)
    }

    /// Checks the value of `Authorization`.
    pub(super) fn check(&self, now: Instant, call_id: &str, method: Method, credentials: Option<&str>) -> Proof {
        let Some(fields) = credentials.and_then(parse) else { return Proof::Missing { stale: false } };
        let field = |name: &str| fields.get(name).map(String::as_str);
        let (Some(username), Some(nonce), Some(uri), Some(response)) =
            (field("username"), field("nonce"), field("uri"), field("response"))
        else {
            return Proof::Missing { stale: false };
        };
        // Another realm's credentials, or a nonce that is not ours for this call: not an attack, just not for us.
        let Some(made) = self.made(nonce, call_id).filter(|_| field("realm") == Some(self.realm.as_str())) else {
            return Proof::Missing { stale: false };
        };
        if field("algorithm").is_some_and(|a| !a.eq_ignore_ascii_case("MD5")) {
            return Proof::Wrong;
        }
        // An unknown user costs as much as a wrong password, so that names cannot be told apart by time.
        let password = self.users.get(username).map_or("", Secret::reveal);
        // With `qop` the digest covers "nonce:nc:cnonce:qop" where it otherwise covers the nonce; handing
        // that in as the nonce avoids the stack's rendering of `nc`, which is decimal.
        let covered = match field("qop") {
            None => nonce.to_owned(),
            Some("auth") => match (field("nc"), field("cnonce")) {
                (Some(nc), Some(cnonce)) => format!("{nonce}:{nc}:{cnonce}:auth"),
                _ => return Proof::Wrong,
            },
            Some(_) => return Proof::Wrong,
        };
        let expected = compute_digest(username, password, &self.realm, &covered, &method, uri, Algorithm::Md5, None);
        let right = constant_time_eq(expected.as_bytes(), response.to_ascii_lowercase().as_bytes());
        if !right || !self.users.contains_key(username) {
            return Proof::Wrong;
        }
        if self.seconds(now).saturating_sub(made) > LIFETIME.as_secs() {
            return Proof::Missing { stale: true };
        }
        Proof::Account(username.to_owned())
    }

    fn seconds(&self, now: Instant) -> u64 {
        now.saturating_duration_since(self.epoch).as_secs()
    }

    fn nonce(&self, made: u64, call_id: &str) -> String {
        // Prefixing the secret is sound here: the length of what follows is fixed by the hash of the Call-ID,
        // so nothing can be appended.
        let mut hasher = Sha256::new();
        hasher.update(self.secret);
        hasher.update(made.to_be_bytes());
        hasher.update(Sha256::digest(call_id));
        let mut nonce = format!("{made:x}.");
        for byte in &hasher.finalize()[..16] {
            // Writing to a String cannot fail.
            let _ = write!(nonce, "{byte:02x}");
        }
        nonce
    }

    /// When a nonce of ours for this call was made, in seconds of our scale.
    fn made(&self, nonce: &str, call_id: &str) -> Option<u64> {
        let made = u64::from_str_radix(nonce.split('.').next()?, 16).ok()?;
        constant_time_eq(self.nonce(made, call_id).as_bytes(), nonce.as_bytes()).then_some(made)
    }
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

fn constant_time_eq(a: &[u8], b: &[u8]) -> bool {
    a.len() == b.len() && a.iter().zip(b).fold(0, |differs, (x, y)| differs | (x ^ y)) == 0
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn authenticator(now: Instant) -> Authenticator {
        let users = [User { username: "alice".into(), password: Secret::new("wonder") }];
        Authenticator::new("here", &users, [7; 32], now)
    }

    /// What a telephone would send; MD5 by the stack's other entry.
    fn credentials(challenge: &str, user: &str, password: &str, nc: &str) -> String {
        let fields = parse(challenge).expect("ours parses");
        let nonce = &fields["nonce"];
        let covered = format!("{nonce}:{nc}:cn:auth");
        let response =
            compute_digest(user, password, "here", &covered, &Method::Invite, "sip:x@y", Algorithm::Md5, None);
        format!(
            "Digest username=\"{user}\",realm=\"here\",nonce=\"{nonce}\",uri=\"sip:x@y\",response=\"{response}\",\
             algorithm=MD5,qop=auth,nc={nc},cnonce=\"cn\""
        )
    }

    #[test]
    fn digest_of_rfc_2617_is_computed() {
        // Section 3.5 of that RFC, with the nonce extended as `check` does. SIP has no GET, so that the value is not
        // the RFC's but what MD5 gives by its formula for OPTIONS.
        let covered = "dcd98b7102dd2f0e8b11d0f600bfb0c093:00000001:0a4f113b:auth";
        let (user, password, realm, uri) = ("Mufasa", "Circle Of Life", "testrealm@host.com", "/dir/index.html");
        let ours = compute_digest(user, password, realm, covered, &Method::Options, uri, Algorithm::Md5, None);
        assert_eq!(ours, "cb59c5277a3fd40023cf6c1362027107");
    }

    #[test]
    fn right_credentials_name_the_account() {
        let now = crate::clock::now();
        let auth = authenticator(now);
        let challenge = auth.challenge(now, "call-1", false);
        for nc in ["00000001", "0000000a"] {
            let proof =
                auth.check(now, "call-1", Method::Invite, Some(&credentials(&challenge, "alice", "wonder", nc)));
            assert_eq!(proof, Proof::Account("alice".into()));
        }
        let good = credentials(&challenge, "alice", "wonder", "00000001");
        assert_eq!(auth.check(now, "call-2", Method::Invite, Some(&good)), Proof::Missing { stale: false });
        assert_eq!(auth.check(now, "call-1", Method::Bye, Some(&good)), Proof::Wrong);
        let bad = credentials(&challenge, "alice", "guess", "00000001");
        assert_eq!(auth.check(now, "call-1", Method::Invite, Some(&bad)), Proof::Wrong);
        let nobody = credentials(&challenge, "bob", "", "00000001");
        assert_eq!(auth.check(now, "call-1", Method::Invite, Some(&nobody)), Proof::Wrong);
    }

    #[test]
    fn old_nonces_are_stale_and_foreign_ones_unknown() {
        let now = crate::clock::now();
        let auth = authenticator(now);
        let good = credentials(&auth.challenge(now, "c", false), "alice", "wonder", "00000001");
        let late = now + LIFETIME + Duration::from_secs(2);
        assert_eq!(auth.check(late, "c", Method::Invite, Some(&good)), Proof::Missing { stale: true });
        assert!(auth.challenge(late, "c", true).ends_with("stale=true"));
        let other = Authenticator::new("here", &[], [8; 32], now);
        let foreign = credentials(&other.challenge(now, "c", false), "alice", "wonder", "00000001");
        assert_eq!(auth.check(now, "c", Method::Invite, Some(&foreign)), Proof::Missing { stale: false });
        for nothing in [None, Some("Basic abc"), Some("Digest"), Some("Digest username=\"x")] {
            assert_eq!(auth.check(now, "c", Method::Invite, nothing), Proof::Missing { stale: false });
        }
    }

    proptest! {
        #[test]
        fn no_credentials_panic(text in ".{0,200}") {
            let now = crate::clock::now();
            let _ = authenticator(now).check(now, "c", Method::Invite, Some(&text));
            let _ = authenticator(now).check(now, "c", Method::Invite, Some(&format!("Digest {text}")));
        }
    }
}
