//! Handing a call over: REFER, blind or with a consultation call (RFC 3515, RFC 3891, RFC 5589).

use std::time::Duration;

use rsipstack::{
    dialog::{DialogId, invite_dialog::InviteDialog},
    sip::{Header, Request, StatusCode, StatusCodeKind, prelude::HeadersExt},
};

use super::{dialplan::DialRequest, shared::Shared};
use crate::media::sip::SipLeg;

/// A transfer that the peer has taken on.
pub(super) struct Transfer {
    /// The call to the target of an attended transfer. The target ends it when the peer has taken its place;
    /// dropping it ends it otherwise.
    _consultation: Option<SipLeg>,
}

/// How it goes, as a NOTIFY says.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Outcome {
    Pending,
    /// The peer talks to the target.
    Done,
    /// It does not, for this status where it told one.
    Failed(Option<StatusCode>),
}

impl Transfer {
    /// Sends REFER. Attended: calls the target first, for `limit` at most, and lets the peer replace that call.
    pub(super) async fn begin(
        shared: &Shared,
        dialog: &InviteDialog,
        to: &str,
        attended: bool,
        limit: Option<Duration>,
    ) -> Result<Transfer, String> {
        let config = shared.config();
        let route = shared.dialplan(&config).route(to, None, None).map_err(|e| e.to_string())?;
        // The peer places this call, and often our trunk: it counts to that trunk's calls a minute. An attended one
        // is counted where the consultation call begins.
        if let Some((index, _)) = route.trunk.filter(|_| !attended) {
            drop(shared.trunks.quotas.begin(index)?);
        }
        let target = route.uri;
        let mut refer_to = format!("<{target}>");
        let mut consultation = None;
        if attended {
            let request = DialRequest { to: to.to_owned(), timeout: limit, ..DialRequest::default() };
            let (leg, id) = shared.dial(request, Box::new(|_| ())).await.map_err(|e| e.to_string())?;
            refer_to = format!("<{target}?Replaces={}>", replaces(&id));
            consultation = Some(leg);
        }
        let us = dialog.snapshot().local_contact.map(|uri| Header::ReferredBy(format!("<{uri}>").into()));
        let response = dialog.refer(refer_to, us.map(|h| vec![h]), None).await.map_err(|e| e.to_string())?;
        match response {
            Some(response) if response.status_code.kind() == StatusCodeKind::Successful => {
                Ok(Transfer { _consultation: consultation })
            }
            Some(response) => Err(format!("the peer refused to be transferred: {}", response.status_code)),
            None => Err("the peer does not answer".to_owned()),
        }
    }
}

/// Reads a NOTIFY of the peer's progress.
pub(super) fn progress(notify: &Request) -> Outcome {
    let state = notify.header_value("Subscription-State").unwrap_or_default().to_ascii_lowercase();
    let over = state.trim_start().starts_with("terminated");
    match status(&notify.body) {
        Some(code) if code < 200 && !over => Outcome::Pending,
        Some(code) if (200..300).contains(&code) => Outcome::Done,
        Some(code) if (300..700).contains(&code) => Outcome::Failed(Some(StatusCode::from(code))),
        // The peer forgot about it before it knew.
        _ if over => Outcome::Failed(None),
        _ => Outcome::Pending,
    }
}

/// Status of a `message/sipfrag` body.
pub(super) fn status(body: &[u8]) -> Option<u16> {
    let text = std::str::from_utf8(body).ok()?;
    text.trim_start().strip_prefix("SIP/2.0 ")?.get(..3)?.parse().ok().filter(|status| (100..700).contains(status))
}

/// The Replaces value for the consultation call, escaped for a URI. Tags are from the target's view: its own
/// is the `to-tag`.
fn replaces(id: &DialogId) -> String {
    escape(&format!("{};to-tag={};from-tag={}", id.call_id, id.remote_tag, id.local_tag))
}

fn escape(text: &str) -> String {
    text.bytes().fold(String::new(), |mut out, byte| {
        if byte.is_ascii_alphanumeric() || b"-_.!~*'()".contains(&byte) {
            out.push(char::from(byte));
        } else {
            out.push_str(&format!("%{byte:02X}"));
        }
        out
    })
}

#[cfg(test)]
mod tests {
    use rsipstack::sip::{Method, Version};

    use super::*;

    fn notify(state: &str, body: &str) -> Request {
        Request {
            method: Method::Notify,
            uri: "sip:a@b".try_into().expect("valid"),
            version: Version::V2,
            headers: vec![Header::SubscriptionState(state.into())].into(),
            body: body.as_bytes().to_vec(),
        }
    }

    #[test]
    fn progress_is_understood() {
        for (state, body, outcome) in [
            ("active;expires=60", "SIP/2.0 100 Trying\r\n", Outcome::Pending),
            ("active", "SIP/2.0 200 OK\r\n", Outcome::Done),
            ("terminated;reason=noresource", "SIP/2.0 486 Busy Here", Outcome::Failed(Some(StatusCode::BusyHere))),
            ("terminated", "SIP/2.0 180 Ringing", Outcome::Failed(None)),
            ("active", "nonsense", Outcome::Pending),
        ] {
            assert_eq!(progress(&notify(state, body)), outcome, "{state} {body}");
        }
    }

    #[test]
    fn replaces_is_escaped() {
        let id = DialogId { call_id: "a@b".into(), local_tag: "l".into(), remote_tag: "r".into() };
        assert_eq!(replaces(&id), "a%40b%3Bto-tag%3Dr%3Bfrom-tag%3Dl");
    }
}
