//! Requests that are valid and that the stack cannot read, written so that it can.
//!
//! # Why
//! RFC 3261 allows white space in places where only tests write any, and folded lines; RFC 2543, which old
//! gateways still speak, had neither tags in From nor Contacts in every INVITE. The stack needs the latter two to know
//! a transaction and to answer in its dialog, so that they are made up, the same for the same call: the tag is taken out
//! of answers again ([`hide`]), and the Contact is where the request came from.

use std::net::SocketAddr;

use rsipstack::sip::{Header, Response};
use sha2::{Digest, Sha256};

/// What a tag begins with that we have made up.
const MADE_UP: &str = "rfc2543-";

/// A request with its header lines unfolded and without the white space that is free.
pub(super) fn request(start: &str, headers: &[(&str, String)], body: &[u8], from: SocketAddr) -> Vec<u8> {
    let mut out = format!("{start}\r\n");
    let is = |name: &str, long: &str, short: &str| name.eq_ignore_ascii_case(long) || name.eq_ignore_ascii_case(short);
    let call_id = headers.iter().find(|(name, _)| is(name, "Call-ID", "i")).map(|(_, value)| value.as_str());
    for (name, value) in headers {
        let mut value = match *name {
            name if is(name, "Via", "v") => squeeze(value, "/;=,"),
            name if is(name, "From", "f") || is(name, "To", "t") || is(name, "Contact", "m") => squeeze(value, ";="),
            name if is(name, "Record-Route", "") || is(name, "Route", "") => squeeze(value, ";=,"),
            _ => squeeze(value, ""),
        };
        if is(name, "From", "f") && !parameters(&value).any(|name| name.eq_ignore_ascii_case("tag")) {
            // A number in angle brackets, so that the tag is not a parameter of its address.
            if !value.contains('<') {
                value = format!("<{value}>");
            }
            value.push_str(&format!(";tag={MADE_UP}{}", short_hash(call_id.unwrap_or_default())));
        }
        out.push_str(&format!("{name}: {value}\r\n"));
    }
    if start.starts_with("INVITE ") && !headers.iter().any(|(name, _)| is(name, "Contact", "m")) {
        out.push_str(&format!("Contact: <sip:{from}>\r\n"));
    }
    out.push_str("\r\n");
    let mut out = out.into_bytes();
    out.extend_from_slice(body);
    out
}

/// Takes tags that were made up out of an answer.
pub(super) fn hide(response: &mut Response) {
    for header in response.headers.iter_mut() {
        if let Header::From(from) = header
            && let Some((before, _)) = from.value().split_once(&format!(";tag={MADE_UP}"))
        {
            *from = before.to_owned().into();
        }
    }
}

/// Names of the parameters behind an address.
fn parameters(value: &str) -> impl Iterator<Item = &str> {
    let behind = value.rsplit_once('>').map_or(value, |(_, behind)| behind);
    behind.split(';').skip(1).map(|parameter| parameter.split('=').next().unwrap_or_default().trim())
}

/// `value` without white space around any of `around`, and with single spaces elsewhere; quoted strings stay.
fn squeeze(value: &str, around: &str) -> String {
    let mut out = String::with_capacity(value.len());
    let (mut quoted, mut escaped, mut space) = (false, false, false);
    for c in value.chars() {
        if quoted {
            out.push(c);
            (quoted, escaped) = (escaped || c != '"', !escaped && c == '\\');
            continue;
        }
        if c == ' ' || c == '\t' {
            space = true;
            continue;
        }
        let glued = around.contains(c) || out.chars().next_back().is_none_or(|last| around.contains(last));
        if space && !glued {
            out.push(' ');
        }
        space = false;
        quoted = c == '"';
        out.push(c);
    }
    out
}

fn short_hash(text: &str) -> String {
    Sha256::digest(text)[..8].iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn free_white_space_goes_and_quoted_stays() {
        for (value, around, expected) in [
            (
                "SIP  / 2.0  / TCP     h.example   ;  branch  =   z9  ,  SIP / 2.0/UDP i",
                "/;=,",
                "SIP/2.0/TCP h.example;branch=z9,SIP/2.0/UDP i",
            ),
            (
                "\"J  R \\\"\"       <sip:j@example.com>   ;   tag = 98",
                ";=",
                "\"J  R \\\"\" <sip:j@example.com>;tag=98",
            ),
            ("0009   INVITE", "", "0009 INVITE"),
        ] {
            assert_eq!(squeeze(value, around), expected);
        }
    }

    #[test]
    fn what_rfc_2543_lacked_is_made_up_and_hidden() {
        let headers = [("From", "sip:+1303@h;user=phone".to_owned()), ("Call-ID", "c".to_owned())];
        let from = SocketAddr::from(([192, 0, 2, 1], 5070));
        let written = String::from_utf8(request("INVITE sip:x SIP/2.0", &headers, b"", from)).expect("text");
        assert!(written.contains("From: <sip:+1303@h;user=phone>;tag=rfc2543-"), "{written}");
        assert!(written.contains("Contact: <sip:192.0.2.1:5070>\r\n"), "{written}");
        let again = String::from_utf8(request("ACK sip:x SIP/2.0", &headers, b"", from)).expect("text");
        let line = |text: &str| text.lines().find(|line| line.starts_with("From")).map(str::to_owned);
        assert_eq!(line(&again), line(&written), "the same transaction");
        let mut response = Response {
            status_code: rsipstack::sip::StatusCode::OK,
            wire_reason: None,
            version: rsipstack::sip::Version::V2,
            headers: vec![Header::From(line(&written).expect("one")[6..].into())].into(),
            body: Vec::new(),
        };
        hide(&mut response);
        assert!(matches!(response.headers.iter().next(), Some(Header::From(from)) if !from.value().contains("tag")));
    }
}
