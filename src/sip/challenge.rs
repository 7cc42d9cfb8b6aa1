//! Digest challenges of trunks, brought into the form that the stack can answer.
//!
//! # Why
//! The stack (rsipstack 0.7.14) takes the first challenge of a response, reads `qop` as one word and knows
//! SHA-256 only as `SHA256`. Common servers send `qop="auth,auth-int"`, several challenges with the strongest
//! first, and the name with its hyphen; each of these made the call fail. Challenges are therefore reduced
//! to the one that is answered best, and the algorithm's name is set right again in what we send.

use rsipstack::sip::{Header, Headers, ProxyAuthenticate, WwwAuthenticate};

use super::auth::parse;

/// Sets the algorithm's name right in credentials that the stack has made.
pub(super) fn mend(headers: &mut Headers) {
    for header in headers.iter_mut() {
        let value = match header {
            Header::Authorization(value) => &mut value.0,
            Header::ProxyAuthorization(value) => &mut value.0,
            _ => continue,
        };
        *value = value.replace("algorithm=SHA256", "algorithm=SHA-256");
    }
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
    let (strength, algorithm) = match fields.get("algorithm").map(|a| a.to_ascii_uppercase()).as_deref() {
        None | Some("MD5") => (1, "MD5"),
        Some("SHA-256" | "SHA256") => (2, "SHA256"),
        Some(_) => return None,
    };
    let quoted = |name: &str| fields.get(name).filter(|v| !v.contains(['"', '\\'])).map(|v| format!("{name}=\"{v}\""));
    let mut out = format!("Digest {}, {}, algorithm={algorithm}", quoted("realm")?, quoted("nonce")?);
    for optional in ["opaque", "stale"].into_iter().filter_map(quoted) {
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
        assert_eq!(best(&challenges[..1], None), None);
        assert!(best(&challenges, Some("r")).is_some());
        assert_eq!(best(&challenges, Some("elsewhere")), None);
        assert_eq!(best(&["Digest nonce=\"1\"".to_owned()], None), None);
    }
}
