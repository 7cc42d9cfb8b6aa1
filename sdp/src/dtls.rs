//! What descriptions say of DTLS-SRTP (RFC 5763, RFC 8122) and of ICE (RFC 8839).

use std::{fmt, str::FromStr};

use crate::session::{Attribute, Description, Media};

/// Longest digest that is read, in bytes.
const MAX_DIGEST: usize = 64;
/// Fingerprints of one stream that are looked at.
const MAX_FINGERPRINTS: usize = 8;
/// Longest fragment and password (RFC 8839 section 5.4).
const MAX_CREDENTIAL: usize = 256;

/// `a=fingerprint:<algorithm> <digest>`: what the peer's certificate hashes to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fingerprint {
    /// `sha-256` and the like, in lower case.
    pub algorithm: String,
    /// The digest.
    pub digest: Vec<u8>,
}

impl FromStr for Fingerprint {
    type Err = &'static str;

    fn from_str(value: &str) -> Result<Self, Self::Err> {
        let (algorithm, digest) = value.trim().split_once([' ', '\t']).ok_or("fingerprint without a digest")?;
        let bytes: Result<Vec<u8>, _> = digest.trim().split(':').map(|byte| u8::from_str_radix(byte, 16)).collect();
        let digest = bytes.map_err(|_| "fingerprint whose digest is not hexadecimal")?;
        if digest.is_empty() || digest.len() > MAX_DIGEST {
            return Err("fingerprint of an impossible length");
        }
        Ok(Fingerprint { algorithm: algorithm.to_ascii_lowercase(), digest })
    }
}

impl fmt::Display for Fingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let digits: Vec<String> = self.digest.iter().map(|byte| format!("{byte:02X}")).collect();
        write!(f, "{} {}", self.algorithm, digits.join(":"))
    }
}

/// Our side of DTLS and ICE. The caller draws the random parts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LocalDtls {
    /// Of our certificate.
    pub fingerprint: Fingerprint,
    /// ICE user fragment, at least 4 characters.
    pub fragment: String,
    /// ICE password, at least 22 characters.
    pub password: String,
}

/// DTLS-SRTP as agreed: the keys come of a handshake on the media path.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Dtls {
    /// The peer's certificate has one of these.
    pub fingerprints: Vec<Fingerprint>,
    /// Whether the handshake is ours to begin.
    pub client: bool,
    /// Where ICE finds the path. We are a lite agent (RFC 8445 section 2.5): we answer checks and send none.
    pub ice: Option<Ice>,
}

/// The credentials of checks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ice {
    /// Our user fragment: what checks are addressed to.
    pub fragment: String,
    /// Our password: what they are signed with.
    pub password: String,
    /// The peer's user fragment.
    pub remote_fragment: String,
}

/// Who begins the handshake, by `a=setup` (RFC 4145).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Setup {
    Active,
    Passive,
    Either,
}

/// What an offer or an answer says of its stream.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Theirs {
    pub(crate) fingerprints: Vec<Fingerprint>,
    pub(crate) setup: Setup,
    /// User fragment, where they do ICE.
    pub(crate) fragment: Option<String>,
}

impl Theirs {
    /// `None`: no DTLS.
    pub(crate) fn of(description: &Description, media: &Media) -> Option<Theirs> {
        let read = |attributes: &[Attribute]| -> Vec<Fingerprint> {
            let values = attributes.iter().filter(|a| a.name == "fingerprint").filter_map(|a| a.value.as_deref());
            values.filter_map(|value| value.parse().ok()).take(MAX_FINGERPRINTS).collect()
        };
        let mut fingerprints = read(&media.attributes);
        if fingerprints.is_empty() {
            fingerprints = read(&description.attributes);
        }
        if fingerprints.is_empty() {
            return None;
        }
        let setup = match value(description, media, "setup").map(str::trim) {
            Some("active") => Setup::Active,
            Some("passive") => Setup::Passive,
            // `holdconn` makes no connection now; it is not offered with media.
            _ => Setup::Either,
        };
        let fits = |text: &&str| !text.is_empty() && text.len() <= MAX_CREDENTIAL;
        let fragment = value(description, media, "ice-ufrag").filter(fits);
        let fragment = fragment.filter(|_| value(description, media, "ice-pwd").is_some()).map(str::to_owned);
        Some(Theirs { fingerprints, setup, fragment })
    }
}

/// An attribute of a stream, or else of the session.
fn value<'a>(description: &'a Description, media: &'a Media, name: &str) -> Option<&'a str> {
    let of = |attributes: &'a [Attribute]| attributes.iter().find(|a| a.name == name)?.value.as_deref();
    of(&media.attributes).or_else(|| of(&description.attributes))
}

/// The name of a stream (RFC 5888).
pub(crate) fn mid(media: &Media) -> Option<&str> {
    media.attributes.iter().find(|a| a.name == "mid")?.value.as_deref()
}

/// Whether a stream may share its transport with others (RFC 9143).
pub(crate) fn is_bundled(description: &Description, mid: &str) -> bool {
    let groups = description.attributes.iter().filter(|a| a.name == "group").filter_map(|a| a.value.as_deref());
    groups.filter_map(|group| group.strip_prefix("BUNDLE")).any(|mids| mids.split_whitespace().any(|one| one == mid))
}

pub(crate) fn attribute(name: &str, value: impl fmt::Display) -> Attribute {
    Attribute { name: name.to_owned(), value: Some(value.to_string()) }
}

pub(crate) fn flag(name: &str) -> Attribute {
    Attribute { name: name.to_owned(), value: None }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fingerprints_read_and_print() {
        let print: Fingerprint = "SHA-1 4A:ad:B9".parse().expect("valid");
        assert_eq!((print.algorithm.as_str(), &print.digest[..]), ("sha-1", &[0x4a, 0xad, 0xb9][..]));
        assert_eq!(print.to_string(), "sha-1 4A:AD:B9");
        for bad in ["", "sha-256", "sha-256 ", "sha-256 4A:XY", "sha-256 4A::B9", &format!("x {}", "AA:".repeat(99))] {
            assert!(bad.parse::<Fingerprint>().is_err(), "{bad}");
        }
    }
}
