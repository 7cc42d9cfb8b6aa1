//! Who a caller is said to be, and by whom: asserted identities (RFC 3325), diversions (RFC 5806, RFC 7044), and what
//! STIR/SHAKEN attests (RFC 8224, RFC 8225, RFC 8588).
//!
//! Reads headers and claims nothing of its own. An attestation is reported as it was sent: its signature is for the
//! carrier to verify, which says so in `verstat` (3GPP TS 24.229 section 7.2A.20); without that it is a claim.
//!
//! # Why
//! What is found is handed to the agent among the call's headers, under names that begin with [`OURS`]; a caller's headers
//! of such names are dropped, so that they can be relied on. An identity that somebody outside our trunks asserts
//! is dropped, too: RFC 3325 section 5 wants that of peers that are not trusted.

use std::collections::BTreeMap;

use base64::{Engine as _, engine::general_purpose::URL_SAFE_NO_PAD};
use serde::Deserialize;

/// What begins the names of headers that the gateway itself adds to a call's.
pub(super) const OURS: &str = "X-Antiphon-";

/// Claims of a PASSporT (RFC 8225 section 5, RFC 8588 section 4).
#[derive(Deserialize)]
struct Passport {
    attest: Option<String>,
    orig: Option<Orig>,
    iat: Option<u64>,
}

#[derive(Deserialize)]
struct Orig {
    tn: Option<String>,
    uri: Option<String>,
}

/// Completes the headers of a call that comes in. `trusted`: it comes from a trunk.
pub(super) fn complete(headers: &mut BTreeMap<String, String>, from: &str, trusted: bool) {
    headers.retain(|name, _| !starts_with(name, OURS));
    if !trusted {
        headers.retain(|name, _| !starts_with(name, "P-Asserted-") && !starts_with(name, "P-Called-Party"));
    }
    let get = |name: &str| headers.iter().find(|(n, _)| n.eq_ignore_ascii_case(name)).map(|(_, value)| value.as_str());
    let mut found = Vec::new();
    let asserted = get("P-Asserted-Identity");
    if let Some(user) = asserted.and_then(user) {
        found.push(("Asserted", user));
    }
    if let Some(user) = get("Diversion").or(get("History-Info")).and_then(user) {
        found.push(("Diverted-From", user));
    }
    // Only a carrier's word counts.
    let verstat = asserted.into_iter().chain([from]).find_map(verstat).filter(|_| trusted);
    if let Some(verstat) = verstat {
        found.push(("Verstat", verstat));
    }
    match get("Identity").map(passport) {
        Some(Some(passport)) => {
            let known = |text: &str| matches!(text, "A" | "B" | "C");
            found.extend(passport.attest.filter(|attest| known(attest)).map(|attest| ("Attestation", attest)));
            let orig = passport.orig.and_then(|orig| orig.tn.or(orig.uri));
            let sound = |text: &String| text.len() <= 128 && !text.chars().any(char::is_control);
            found.extend(orig.filter(sound).map(|orig| ("Attestation-Orig", orig)));
            found.extend(passport.iat.map(|iat| ("Attestation-Iat", iat.to_string())));
        }
        Some(None) => found.push(("Attestation", "unreadable".to_owned())),
        None => {}
    }
    headers.extend(found.into_iter().map(|(name, value)| (format!("{OURS}{name}"), value)));
}

fn starts_with(name: &str, prefix: &str) -> bool {
    name.get(..prefix.len()).is_some_and(|start| start.eq_ignore_ascii_case(prefix))
}

/// The user of the first address of a header: `"A" <sip:+49301234;x@h>;reason=...`, `<tel:+49301234>`.
fn user(value: &str) -> Option<String> {
    let address = value.split_once('<').map_or(value, |(_, rest)| rest.split('>').next().unwrap_or_default()).trim();
    let (scheme, rest) = address.split_once(':')?;
    let user = match scheme.to_ascii_lowercase().as_str() {
        "sip" | "sips" => rest.split_once('@')?.0,
        "tel" => rest,
        _ => return None,
    };
    let user = user.split([';', ':', '?']).next().unwrap_or_default();
    (!user.is_empty() && user.len() <= 128).then(|| rsipstack::sip::event_packages::percent_decode(user))
}

/// `;verstat=TN-Validation-Passed` of an address.
fn verstat(value: &str) -> Option<String> {
    let at = value.to_ascii_lowercase().find(";verstat=")?;
    let rest = value.get(at + ";verstat=".len()..)?;
    let end = rest.find(|c: char| !(c.is_ascii_alphanumeric() || c == '-')).unwrap_or(rest.len());
    Some(rest[..end].to_owned()).filter(|word| !word.is_empty())
}

/// The claims of an Identity header: `HEADER.PAYLOAD.SIGNATURE;info=<...>;alg=ES256;ppt=shaken`. Of the compact form
/// (RFC 8224 section 7), whose payload is to be rebuilt by the verifier, there are none.
fn passport(value: &str) -> Option<Passport> {
    let token = value.split(';').next()?.trim();
    let payload = token.split('.').nth(1)?;
    serde_json::from_slice(&URL_SAFE_NO_PAD.decode(payload).ok()?).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn completed(headers: &[(&str, &str)], trusted: bool) -> BTreeMap<String, String> {
        let mut headers = headers.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
        complete(&mut headers, "sip:+12155550112;verstat=No-TN-Validation@carrier.example", trusted);
        headers
    }

    fn identity(claims: &str) -> String {
        let header = URL_SAFE_NO_PAD.encode("{\"alg\":\"ES256\",\"ppt\":\"shaken\",\"typ\":\"passport\"}");
        let payload = URL_SAFE_NO_PAD.encode(claims);
        format!("{header}.{payload}.c2lnbmF0dXJl;info=<https://cert.example/p.cer>;alg=ES256;ppt=shaken")
    }

    #[test]
    fn what_a_trunk_says_of_its_caller_is_found() {
        // The claims of RFC 8588 section 5.
        let claims = "{\"attest\":\"A\",\"dest\":{\"tn\":[\"12125551213\"]},\"iat\":1443208345,\
                      \"orig\":{\"tn\":\"12155551212\"},\"origid\":\"123e4567-e89b-12d3-a456-426655440000\"}";
        let found = completed(
            &[
                ("P-Asserted-Identity", "\"A\" <sip:+12155551212;verstat=TN-Validation-Passed@carrier.example>"),
                ("diversion", "<tel:+12125551213>;reason=no-answer;counter=1"),
                ("Identity", &identity(claims)),
                ("x-antiphon-attestation", "C"),
                ("X-Account", "7"),
            ],
            true,
        );
        for (name, value) in [
            ("Asserted", "+12155551212"),
            ("Diverted-From", "+12125551213"),
            ("Verstat", "TN-Validation-Passed"),
            ("Attestation", "A"),
            ("Attestation-Orig", "12155551212"),
            ("Attestation-Iat", "1443208345"),
        ] {
            assert_eq!(found.get(&format!("{OURS}{name}")).map(String::as_str), Some(value), "{name}");
        }
        assert!(found.contains_key("Identity") && found.contains_key("X-Account"), "passed through as it came");
        assert!(!found.contains_key("x-antiphon-attestation"), "a caller cannot write what the gateway finds");
    }

    #[test]
    fn a_stranger_asserts_nothing() {
        let found = completed(&[("P-Asserted-Identity", "<sip:+1@bank.example;verstat=TN-Validation-Passed>")], false);
        assert!(found.is_empty(), "{found:?}");
    }

    #[test]
    fn what_cannot_be_read_is_said_to_be_so_and_breaks_nothing() {
        for value in ["", "..sig;info=<x>", "a.b", "a.!!!.c", &identity("[]"), &identity("{\"attest\":7}")] {
            let found = completed(&[("Identity", value)], true);
            assert_eq!(found.get("X-Antiphon-Attestation").map(String::as_str), Some("unreadable"), "{value}");
        }
        let odd =
            completed(&[("Identity", &identity("{\"attest\":\"Z\\u0000\",\"orig\":{\"tn\":\"\\u0000\"}}"))], true);
        assert!(!odd.keys().any(|name| name.starts_with("X-Antiphon-Att")), "{odd:?}");
        for value in ["", "<sip:>", "<sip:host>", "<http://a@b>", "sip", "<sip:%"] {
            assert_eq!(user(value), None, "{value}");
        }
    }
}
