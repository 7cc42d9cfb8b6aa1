//! Digest challenges of trunks, brought into the form that the stack can answer.
//!
//! # Why
//! The stack (rsipstack 0.7.14) takes the first challenge of a response, reads `qop` as one word and knows
//! SHA-256 only as `SHA256`. Common servers send `qop="auth,auth-int"`, several challenges with the strongest
//! first, and the name with its hyphen; each of these made the call fail. Challenges are therefore reduced
//! to the one that is answered best, and the algorithm's name is set right again in what we send.
//!
//! *SHA-512/256* (RFC 8760) the stack does not know at all. It is asked for SHA-256 in place of it, with a mark in front of what it
//! has to give back unread (`opaque`); where that comes back the digest is computed anew. Nothing is remembered meanwhile.

use rsipstack::sip::{Header, Headers, Method, ProxyAuthenticate, WwwAuthenticate};

use super::{
    auth::{digest, parse},
    config::{DigestName, Secret},
};

/// Before the `opaque` of a challenge whose answer is to be by SHA-512/256.
const MARK: &str = "antiphon.sha-512-256.";

/// Sets credentials right that the stack has made for a request of this method: the algorithm's name, and the digest where the
/// stack cannot compute it. `password` knows that of a user name.
pub(super) fn mend(headers: &mut Headers, method: Method, password: impl Fn(&str) -> Option<Secret>) {
    for header in headers.iter_mut() {
        let value = match header {
            Header::Authorization(value) => &mut value.0,
            Header::ProxyAuthorization(value) => &mut value.0,
            _ => continue,
        };
        *value = match computed(value, method, &password) {
            Some(computed) => computed,
            None => value.replace("algorithm=SHA256", "algorithm=SHA-256"),
        };
    }
}

/// Credentials by SHA-512/256, where a challenge asked for that.
fn computed(value: &str, method: Method, password: impl Fn(&str) -> Option<Secret>) -> Option<String> {
    let fields = parse(value)?;
    let field = |name: &str| fields.get(name).map(String::as_str);
    let opaque = field("opaque")?.strip_prefix(MARK)?;
    let (username, realm, nonce, uri) = (field("username")?, field("realm")?, field("nonce")?, field("uri")?);
    let password = password(username)?;
    // An ACK has the credentials of its INVITE (RFC 3261 section 22.1).
    let method = if method == Method::Ack { Method::Invite } else { method };
    let counted = match field("qop") {
        Some(_) => Some((field("nc")?, field("cnonce")?)),
        None => None,
    };
    let covered = counted.map_or(nonce.to_owned(), |(nc, cnonce)| format!("{nonce}:{nc}:{cnonce}:auth"));
    let who = [username, realm, password.reveal()];
    let response = digest(DigestName::Sha512_256, &who, &covered, &[&method.to_string(), uri]);
    let quoted = |text: &str| text.replace('\\', "\\\\").replace('"', "\\\"");
    let mut out = format!(
        "Digest username=\"{}\", realm=\"{}\", nonce=\"{nonce}\", uri=\"{uri}\", response=\"{response}\", \
         algorithm=SHA-512-256",
        quoted(username),
        quoted(realm)
    );
    if let Some((nc, cnonce)) = counted {
        out.push_str(&format!(", qop=auth, nc={nc}, cnonce=\"{cnonce}\""));
    }
    if !opaque.is_empty() {
        out.push_str(&format!(", opaque=\"{opaque}\""));
    }
    Some(out)
}

/// Leaves of the challenges the one that is answered best, of those for `realm` where one is given. Whether there is any.
pub(super) fn reduce(headers: &mut Headers, realm: Option<&str>) -> bool {
    let mut www = Vec::new();
    let mut proxy = Vec::new();
    for header in headers.iter() {
        match header {
            Header::WwwAuthenticate(value) => www.push(value.value().to_owned()),
            Header::ProxyAuthenticate(value) => proxy.push(value.value().to_owned()),
            _ => {}
        }
    }
    let (www, proxy) = (best(&www, realm), best(&proxy, realm));
    let any = www.is_some() || proxy.is_some();
    // Where none can be answered they stay as they are, and the stack reports the status.
    if let Some(best) = www {
        headers.retain(|h| !matches!(h, Header::WwwAuthenticate(_)));
        headers.push(Header::WwwAuthenticate(WwwAuthenticate::from(best)));
    }
    if let Some(best) = proxy {
        headers.retain(|h| !matches!(h, Header::ProxyAuthenticate(_)));
        headers.push(Header::ProxyAuthenticate(ProxyAuthenticate::from(best)));
    }
    any
}

/// The strongest challenge that can be answered, written anew.
fn best(challenges: &[String], realm: Option<&str>) -> Option<String> {
    let ours = |challenge: &&String| {
        realm.is_none_or(|realm| parse(challenge).is_some_and(|fields| fields.get("realm").is_some_and(|r| r == realm)))
    };
    let answerable = challenges.iter().filter(ours).filter_map(|challenge| rewrite(challenge));
    answerable.max_by_key(|(strength, _)| *strength).map(|c| c.1)
}

fn rewrite(challenge: &str) -> Option<(u8, String)> {
    let fields = parse(challenge)?;
    let (strength, algorithm, mark) = match fields.get("algorithm").map(|a| a.to_ascii_uppercase()).as_deref() {
        None | Some("MD5") => (1, "MD5", None),
        Some("SHA-512-256") => (2, "SHA256", Some(MARK)),
        Some("SHA-256" | "SHA256") => (3, "SHA256", None),
        Some(_) => return None,
    };
    let quoted = |name: &str| fields.get(name).filter(|v| !v.contains(['"', '\\'])).map(|v| format!("{name}=\"{v}\""));
    let mut out = format!("Digest {}, {}, algorithm={algorithm}", quoted("realm")?, quoted("nonce")?);
    let opaque = quoted("opaque").or(mark.map(|_| "opaque=\"\"".to_owned()));
    // The mark goes behind the first quote.
    let opaque = opaque.map(|opaque| opaque.replacen('"', &format!("\"{}", mark.unwrap_or_default()), 1));
    for optional in opaque.into_iter().chain(quoted("stale")) {
        out.push_str(", ");
        out.push_str(&optional);
    }
    match fields.get("qop") {
        None => {}
        Some(qop) if qop.split(',').any(|q| q.trim().eq_ignore_ascii_case("auth")) => out.push_str(", qop=\"auth\""),
        // Only auth-int: it covers the body in a way the stack computes for an empty one.
        Some(_) => return None,
    }
    Some((strength, out))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What is sent in place of `made`, to whoever has the password.
    fn mended(made: &str, method: Method, password: Option<&str>) -> String {
        let mut headers: Headers = vec![Header::Authorization(made.into())].into();
        mend(&mut headers, method, |_| password.map(Secret::new));
        headers.iter().next().map(|header| header.value().to_owned()).expect("one")
    }

    #[test]
    fn what_is_asked_for_by_sha_512_256_is_answered_so() {
        let asked = "Digest realm=\"r\", nonce=\"n\", algorithm=SHA-512-256, qop=\"auth\", opaque=\"theirs\"";
        let (_, ours) = rewrite(asked).expect("can be answered");
        assert!(ours.contains("algorithm=SHA256") && ours.contains(&format!("opaque=\"{MARK}theirs\"")), "{ours}");
        // As the stack writes it.
        let made = format!(
            "Digest username=\"u\", realm=\"r\", nonce=\"n\", uri=\"sip:x@h\", response=\"00\", algorithm=SHA256, \
             opaque=\"{MARK}theirs\", qop=auth, nc=00000001, cnonce=\"c\""
        );
        let sent = mended(&made, Method::Invite, Some("p"));
        let fields = parse(&sent).expect("credentials");
        assert_eq!((fields["algorithm"].as_str(), fields["opaque"].as_str()), ("SHA-512-256", "theirs"));
        let right = digest(DigestName::Sha512_256, &["u", "r", "p"], "n:00000001:c:auth", &["INVITE", "sip:x@h"]);
        assert_eq!((&fields["response"], fields["nc"].as_str()), (&right, "00000001"));
        assert_eq!(mended(&made, Method::Ack, Some("p")), sent, "an ACK has those of its INVITE");
        assert_eq!(mended(&sent, Method::Invite, Some("p")), sent, "a repetition is the same");
        // Without a count, without anything of theirs, and a name in quotes.
        let old = format!(
            "Digest username=\"a \\\"b\\\"\", realm=\"r\", nonce=\"n\", uri=\"sip:h\", response=\"00\", algorithm=SHA256, \
             opaque=\"{MARK}\""
        );
        let fields = parse(&mended(&old, Method::Register, Some("p"))).expect("credentials");
        let right = digest(DigestName::Sha512_256, &["a \"b\"", "r", "p"], "n", &["REGISTER", "sip:h"]);
        assert_eq!((&fields["response"], fields.get("opaque")), (&right, None));
        // What is of others stays as it is, but for the name.
        assert!(mended(&made.replace(MARK, ""), Method::Invite, Some("p")).contains("algorithm=SHA-256"));
    }

    #[test]
    fn strongest_answerable_challenge_is_kept() {
        let challenges = [
            "Digest realm=\"r\", nonce=\"1\", algorithm=SHA-512-256, qop=\"auth\"".to_owned(),
            "Digest realm=\"r\", nonce=\"2\", algorithm=SHA-256, qop=\"auth,auth-int\"".to_owned(),
            "Digest realm=\"r\", nonce=\"3\", qop=\"auth\", stale=true".to_owned(),
            "Basic realm=\"r\"".to_owned(),
        ];
        assert_eq!(
            best(&challenges, None).as_deref(),
            Some("Digest realm=\"r\", nonce=\"2\", algorithm=SHA256, qop=\"auth\"")
        );
        assert_eq!(
            best(&challenges[2..], None).as_deref(),
            Some("Digest realm=\"r\", nonce=\"3\", algorithm=MD5, stale=\"true\", qop=\"auth\"")
        );
        let marked = format!("Digest realm=\"r\", nonce=\"1\", algorithm=SHA256, opaque=\"{MARK}\", qop=\"auth\"");
        assert_eq!(best(&challenges[..1], None), Some(marked));
        assert_eq!(best(&["Digest realm=\"r\", nonce=\"1\", algorithm=SHA-512".to_owned()], None), None);
        assert!(best(&challenges, Some("r")).is_some());
        assert_eq!(best(&challenges, Some("elsewhere")), None);
        assert_eq!(best(&["Digest nonce=\"1\"".to_owned()], None), None);
    }
}
