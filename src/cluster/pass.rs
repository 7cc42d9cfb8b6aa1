//! What a node says when it passes a request on: from where, to whom, and for whom, signed with the cluster's token.
//!
//! # Why
//! The node that a client reached knows who it is, and the owner of a call has to believe that. A signature does not
//! show the token, is good for one request line to one node, and expires; a header with the token itself would open every
//! node to each that reads it once.

use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use ring::hmac;
use serde::{Deserialize, Serialize};

use crate::node::NodeName;
use crate::secret::Secret;

/// The header that carries it.
pub const HEADER: &str = "x-antiphon-passed-on";
/// How far the clocks of two nodes may be apart, and how long a request may be on its way.
const SKEW: Duration = Duration::from_secs(60);
/// Longest header that is looked at, bytes.
const MAX: usize = 4_096;
/// Sets these signatures apart from all others that one could make with the same token.
const PURPOSE: &str = "antiphon passes on, 1";

/// Who makes the request, as the node found that the client reached.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Caller {
    /// The owner of what is made.
    pub tenant: String,
    /// Whether everybody's objects are seen.
    pub all: bool,
    /// Where the token has limits of its own: what it is known by, a digest.
    pub dialer: Option<[u8; 32]>,
}

/// What is signed beside the request line.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Pass {
    /// The node that passes the request on.
    pub from: NodeName,
    /// The node that it is passed to.
    pub to: NodeName,
    /// For whom; `None`: the request brings a token that only the other node can judge.
    pub caller: Option<Caller>,
    /// The page that the request came from.
    pub origin: Option<String>,
    /// Unix time in milliseconds.
    at: u64,
}

impl Pass {
    /// A word of `from` to `to` at the time `wall`.
    pub fn new(from: NodeName, to: NodeName, caller: Option<Caller>, origin: Option<String>, wall: Duration) -> Self {
        Self { from, to, caller, origin, at: wall.as_millis() as u64 }
    }

    /// The value of the header for a request `METHOD /path?query`.
    pub fn sign(&self, token: &Secret, line: &str) -> String {
        // Strings and numbers only, which always have a form.
        let said = serde_json::to_vec(self).unwrap_or_default();
        let mac = hmac::sign(&key(token), &message(&said, line));
        format!("{}.{}", URL_SAFE_NO_PAD.encode(&said), URL_SAFE_NO_PAD.encode(mac))
    }

    /// What `header` says, if it was signed with `token` for this request line and for `own`, a moment before `wall`.
    ///
    /// # Errors
    /// Why it is not believed.
    pub fn verify(
        header: &str,
        token: &Secret,
        line: &str,
        own: &NodeName,
        wall: Duration,
    ) -> Result<Self, &'static str> {
        let wrong = "its signature is wrong: [cluster] token must be the same on all nodes";
        if header.len() > MAX {
            return Err(wrong);
        }
        let (said, mac) = header.split_once('.').ok_or(wrong)?;
        let decode = |part: &str| URL_SAFE_NO_PAD.decode(part).map_err(|_| wrong);
        let (said, mac) = (decode(said)?, decode(mac)?);
        hmac::verify(&key(token), &message(&said, line), &mac).map_err(|_| wrong)?;
        let pass: Self = serde_json::from_slice(&said).map_err(|_| "it is of another version of antiphon")?;
        if pass.to != *own {
            return Err("it was meant for another node: two go by one [cluster] advertise");
        }
        if wall.abs_diff(Duration::from_millis(pass.at)) > SKEW {
            return Err("it is a minute old or more: the clocks of the nodes differ");
        }
        Ok(pass)
    }
}

fn key(token: &Secret) -> hmac::Key {
    hmac::Key::new(hmac::HMAC_SHA256, token.reveal().as_bytes())
}

fn message(said: &[u8], line: &str) -> Vec<u8> {
    let mut message = Vec::with_capacity(PURPOSE.len() + said.len() + line.len() + 2);
    for part in [PURPOSE.as_bytes(), said, line.as_bytes()] {
        message.extend(part);
        // JSON and request lines hold none.
        message.push(0);
    }
    message
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: Duration = Duration::from_secs(1_800_000_000);

    fn name(name: &str) -> NodeName {
        name.parse().expect("a name")
    }

    #[test]
    fn what_is_signed_is_believed_for_its_request_and_its_time_only() {
        let token = Secret::new("between-these-machines");
        let caller = Some(Caller { tenant: "crm".into(), all: false, dialer: None });
        let pass = Pass::new(name("a"), name("b"), caller, Some("https://app.example".into()), NOW);
        let line = "DELETE /v1/calls/b.1";
        let header = pass.sign(&token, line);
        let verify =
            |header: &str, token: &Secret, line, own, wall| Pass::verify(header, token, line, &name(own), wall);
        assert_eq!(verify(&header, &token, line, "b", NOW + Duration::from_secs(30)), Ok(pass));
        assert!(verify(&header, &Secret::new("another"), line, "b", NOW).is_err());
        assert!(verify(&header, &token, "DELETE /v1/calls/b.2", "b", NOW).is_err());
        assert!(verify(&header, &token, line, "c", NOW).is_err_and(|why| why.contains("advertise")));
        for wall in [NOW + 2 * SKEW, NOW - 2 * SKEW] {
            assert!(verify(&header, &token, line, "b", wall).is_err_and(|why| why.contains("clocks")));
        }
        let operator = Caller { tenant: "crm".into(), all: true, dialer: None };
        let forged = Pass::new(name("a"), name("b"), Some(operator), None, NOW).sign(&Secret::new("guess"), line);
        let (said, _) = forged.split_once('.').expect("two parts");
        let (_, mac) = header.split_once('.').expect("two parts");
        assert!(verify(&format!("{said}.{mac}"), &token, line, "b", NOW).is_err(), "another's words");
        for broken in ["", ".", "x", "x.y", &"x".repeat(MAX + 1)] {
            assert!(verify(broken, &token, line, "b", NOW).is_err(), "{broken}");
        }
    }
}
