//! Why a peer ends a call or refuses one, as its `Reason` says (RFC 3326; in responses RFC 6432).
//!
//! The stack tells that a dialog is over, not by which request. So the inspector, which sees every message, notes what BYE and
//! CANCEL say under the Call-ID and the tag of their sender, for calls that are known here; the call's task asks when
//! its dialog has ended.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError},
};

use rsipstack::sip::{Headers, Method, Request, prelude::HeadersExt};

use crate::media::leg::PeerCause;

/// Characters of a text that are kept: it goes into records and logs.
const MAX_TEXT: usize = 128;

/// The cause that `headers` name; `None`: none that is understood. Of several of one protocol the first counts.
pub(super) fn named(headers: &Headers) -> Option<PeerCause> {
    let mut cause = PeerCause::default();
    for header in headers.iter().filter(|header| header.name().eq_ignore_ascii_case("Reason")) {
        for value in split(header.value(), ',') {
            let mut parts = split(value, ';');
            let protocol = parts.next().unwrap_or_default().trim();
            let (mut number, mut text) = (None, None);
            for parameter in parts {
                let Some((name, value)) = parameter.split_once('=') else { continue };
                match name.trim() {
                    name if name.eq_ignore_ascii_case("cause") => number = value.trim().parse::<u16>().ok(),
                    name if name.eq_ignore_ascii_case("text") => text = readable(value),
                    _ => {}
                }
            }
            if protocol.eq_ignore_ascii_case("Q.850") && cause.q850.is_none() {
                cause.q850 =
                    number.and_then(|number| u8::try_from(number).ok()).filter(|cause| (1..128).contains(cause));
            } else if protocol.eq_ignore_ascii_case("SIP") && cause.sip.is_none() {
                cause.sip = number.filter(|status| (100..700).contains(status));
            } else {
                continue;
            }
            cause.text = cause.text.or(text);
        }
    }
    (cause != PeerCause::default()).then_some(cause)
}

/// The parts of a list that `mark` separates, where it does not stand in a quoted string.
fn split(text: &str, mark: char) -> impl Iterator<Item = &str> {
    let (mut quoted, mut escaped) = (false, false);
    text.split(move |c| {
        let inside = quoted;
        match c {
            _ if escaped => escaped = false,
            '\\' => escaped = quoted,
            '"' => quoted = !quoted,
            _ => {}
        }
        c == mark && !inside
    })
}

/// A token or quoted string, for people; `None`: nothing to read.
fn readable(value: &str) -> Option<String> {
    let value = value.trim();
    let quoted = value.strip_prefix('"').map(|rest| rest.strip_suffix('"').unwrap_or(rest));
    let mut escaped = false;
    let text = quoted.unwrap_or(value).chars().filter(|c| {
        escaped = !escaped && *c == '\\';
        !escaped && !c.is_control()
    });
    let text: String = text.take(MAX_TEXT).collect();
    (!text.is_empty()).then_some(text)
}

/// What the peer of one call says when it ends it. Clones mean the same call.
pub(super) type Farewell = Arc<OnceLock<PeerCause>>;

/// Call-ID and tag of a call's peer.
type Key = (String, String);

/// The calls whose peers may say something. Cheap to clone.
#[derive(Clone, Default)]
pub(super) struct Farewells(Arc<Mutex<HashMap<Key, Kept>>>);

/// What is kept of a call, and by how many: one that rang goes on under the same key.
type Kept = (Farewell, usize);

/// A call in [`Farewells`]; dropped, it is no more there.
pub(super) struct Entry {
    all: Farewells,
    key: Key,
    said: Farewell,
}

impl Farewells {
    /// A call that `tag` is the peer's of.
    pub(super) fn enter(&self, call_id: &str, tag: &str) -> Entry {
        let key = (call_id.to_owned(), tag.to_owned());
        let said = {
            let mut all = self.lock();
            let (said, entries) = all.entry(key.clone()).or_default();
            *entries += 1;
            said.clone()
        };
        Entry { all: self.clone(), key, said }
    }

    /// A request that came.
    pub(super) fn heard(&self, request: &Request) {
        if !matches!(request.method, Method::Bye | Method::Cancel) {
            return;
        }
        let Some(cause) = named(&request.headers) else { return };
        let tag = request.from_header().ok().and_then(|from| from.tag().ok().flatten());
        let (Ok(call_id), Some(tag)) = (request.call_id_header(), tag) else { return };
        if let Some((said, _)) = self.lock().get(&(call_id.value().to_owned(), tag.to_string())) {
            // The first counts: what comes again is the same.
            said.set(cause).ok();
        }
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<Key, Kept>> {
        // Nothing here panics while it holds it.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Entry {
    /// What the peer says, once it does.
    pub(super) fn said(&self) -> &Farewell {
        &self.said
    }
}

impl Drop for Entry {
    fn drop(&mut self) {
        let mut all = self.all.lock();
        let Some((_, entries)) = all.get_mut(&self.key) else { return };
        *entries -= 1;
        if *entries == 0 {
            all.remove(&self.key);
        }
    }
}

#[cfg(test)]
mod tests {
    use rsipstack::sip::{Header, Version};

    use super::*;

    fn cause(values: &[&str]) -> Option<PeerCause> {
        let headers: Vec<Header> = values.iter().map(|value| Header::Reason((*value).into())).collect();
        named(&headers.into())
    }

    fn told(q850: Option<u8>, sip: Option<u16>, text: Option<&str>) -> Option<PeerCause> {
        Some(PeerCause { q850, sip, text: text.map(str::to_owned) })
    }

    #[test]
    fn a_reason_is_read_as_carriers_write_it() {
        for (values, wanted) in [
            (&["Q.850;cause=16;text=\"Terminated\""][..], told(Some(16), None, Some("Terminated"))),
            (&["q.850 ; cause = 34 ; text = none"], told(Some(34), None, Some("none"))),
            (&["SIP ;cause=200 ;text=\"Call completed, elsewhere; really\""], {
                told(None, Some(200), Some("Call completed, elsewhere; really"))
            }),
            (&["SIP;cause=503,Q.850;cause=41;text=\"Temporary\""], told(Some(41), Some(503), Some("Temporary"))),
            (&["Q.850;cause=1", "SIP;cause=404;text=\"a \\\"b\\\" c\""], told(Some(1), Some(404), Some("a \"b\" c"))),
            (&["Q.850;cause=300;text=\"\""], None),
            (&["X;cause=16"], None),
            (&["Q.850;text=\"unclosed"], told(None, None, Some("unclosed"))),
            (&[""], None),
        ] {
            assert_eq!(cause(values), wanted, "{values:?}");
        }
        let long = cause(&[&format!("SIP;text=\"{}\u{7}\"", "x".repeat(500))]).and_then(|cause| cause.text);
        assert_eq!(long.map(|text| text.len()), Some(MAX_TEXT));
    }

    #[test]
    fn a_farewell_counts_from_the_calls_own_peer_only_and_once() {
        let request = |tag: &str, cause: u8| Request {
            method: Method::Bye,
            uri: "sip:a@b".try_into().expect("valid"),
            version: Version::V2,
            headers: vec![
                Header::From(format!("<sip:a@b>;tag={tag}").into()),
                Header::CallId("1".into()),
                Header::Reason(format!("Q.850;cause={cause}").into()),
            ]
            .into(),
            body: Vec::new(),
        };
        let all = Farewells::default();
        all.heard(&request("peer", 16));
        let rings = all.enter("1", "peer");
        assert_eq!(rings.said().get(), None, "it was no call of ours then");
        let up = all.enter("1", "peer");
        drop(rings);
        for (tag, cause) in [("us", 1), ("peer", 34), ("peer", 16)] {
            all.heard(&request(tag, cause));
        }
        assert_eq!(up.said().get().and_then(|cause| cause.q850), Some(34));
        drop(up);
        assert!(all.lock().is_empty());
    }
}
