//! Digest authentication as a client (RFC 3261 section 22 with RFC 2617: MD5, `qop=auth` or none).

use md5::{Digest as _, Md5};

/// Who the caller says it is.
#[derive(Clone)]
pub struct Credentials {
    /// User name.
    pub username: String,
    /// Password, never written anywhere but into a digest.
    pub password: String,
}

impl std::fmt::Debug for Credentials {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Credentials({})", self.username)
    }
}

/// The answer to the challenge of a `WWW-Authenticate` or `Proxy-Authenticate` value; `None` when it is no
/// digest by MD5.
pub(crate) fn answer(
    challenge: &str,
    credentials: &Credentials,
    method: &str,
    uri: &str,
    cnonce: &str,
) -> Option<String> {
    let rest = challenge.trim().strip_prefix("Digest").or_else(|| challenge.trim().strip_prefix("digest"))?;
    let realm = field(rest, "realm")?;
    let nonce = field(rest, "nonce")?;
    if field(rest, "algorithm").is_some_and(|a| !a.eq_ignore_ascii_case("MD5")) {
        return None;
    }
    let auth = field(rest, "qop").is_some_and(|q| q.split(',').any(|q| q.trim() == "auth"));
    let Credentials { username, password } = credentials;
    let ha1 = hex(&format!("{username}:{realm}:{password}"));
    let ha2 = hex(&format!("{method}:{uri}"));
    let response = if auth {
        hex(&format!("{ha1}:{nonce}:00000001:{cnonce}:auth:{ha2}"))
    } else {
        hex(&format!("{ha1}:{nonce}:{ha2}"))
    };
    let mut out = format!(
        "Digest username=\"{username}\", realm=\"{realm}\", nonce=\"{nonce}\", uri=\"{uri}\", \
         response=\"{response}\", algorithm=MD5"
    );
    if auth {
        out.push_str(&format!(", qop=auth, nc=00000001, cnonce=\"{cnonce}\""));
    }
    if let Some(opaque) = field(rest, "opaque") {
        out.push_str(&format!(", opaque=\"{opaque}\""));
    }
    Some(out)
}

fn hex(text: &str) -> String {
    Md5::digest(text.as_bytes()).iter().map(|b| format!("{b:02x}")).collect()
}

/// One field of a challenge, quotes taken off.
fn field<'a>(challenge: &'a str, name: &str) -> Option<&'a str> {
    let mut rest = challenge;
    loop {
        rest = rest.trim_start_matches([' ', ',', '\t']);
        let (key, behind) = rest.split_once('=')?;
        let behind = behind.trim_start();
        let (value, next) = match behind.strip_prefix('"') {
            Some(quoted) => quoted.split_once('"')?,
            None => behind.split_once(',').unwrap_or((behind, "")),
        };
        if key.trim().eq_ignore_ascii_case(name) {
            return Some(value.trim());
        }
        rest = next;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_example_of_rfc_2617_section_3_5_comes_out() {
        let challenge = "Digest realm=\"testrealm@host.com\", qop=\"auth,auth-int\", \
            nonce=\"dcd98b7102dd2f0e8b11d0f600bfb0c093\", opaque=\"5ccc069c403ebaf9f0171e9517f40e41\"";
        let credentials = Credentials { username: "Mufasa".into(), password: "Circle Of Life".into() };
        let answer = answer(challenge, &credentials, "GET", "/dir/index.html", "0a4f113b").unwrap();
        assert!(answer.contains("response=\"6629fae49393a05397450978507c4ef1\""), "{answer}");
        assert!(answer.contains("opaque=\"5ccc069c403ebaf9f0171e9517f40e41\""));
    }

    #[test]
    fn what_is_no_md5_digest_is_not_answered() {
        let credentials = Credentials { username: "a".into(), password: "b".into() };
        for challenge in
            ["Basic realm=\"x\"", "Digest realm=\"x\"", "Digest", "Digest realm=\"x\", nonce=\"y\", algorithm=SHA-256"]
        {
            assert_eq!(answer(challenge, &credentials, "INVITE", "sip:x", "c"), None);
        }
    }
}
