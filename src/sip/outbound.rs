//! Calls that go out.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use rsipstack::{
    dialog::{
        DialogId,
        authenticate::Credential,
        dialog::{DialogState, DialogStateReceiver},
        invitation::InviteOption,
    },
    sip::{Header, Param, StatusCodeKind, Transport as Wire, Uri, prelude::HeadersExt},
};
use sdp::{Negotiator, SrtpPolicy};
use tokio::{sync::mpsc, time::timeout};
use tracing::info;

use super::{
    DialError, SipError, body,
    config::{Srtp, Transport, TrunkConfig},
    endpoint::Shared,
    session::{self, CONTROLS, SIGNALS, Session},
    timer::{self, SessionTimer},
};
use crate::{clock, media::sip::SipLeg};

/// Headers that an application may not set: the stack does, or the meaning of the call hangs on them.
const RESERVED: [&str; 24] = [
    "via",
    "v",
    "from",
    "f",
    "to",
    "t",
    "call-id",
    "i",
    "cseq",
    "contact",
    "m",
    "max-forwards",
    "content-length",
    "l",
    "content-type",
    "c",
    "route",
    "record-route",
    "require",
    "proxy-require",
    "supported",
    "k",
    "authorization",
    "proxy-authorization",
];

/// An outbound call.
#[derive(Clone, Debug, Default)]
pub struct DialRequest {
    /// `sip:user@host`, or a number or user for `trunk`.
    pub to: String,
    /// Our side, likewise; default: the trunk's user, or `antiphon`.
    pub from: Option<String>,
    /// `[[sip.trunk]]` to use; default: none for a full URI, the first one for a number.
    pub trunk: Option<String>,
    /// Further headers of the INVITE. Those that SIP itself needs are refused.
    pub headers: BTreeMap<String, String>,
    /// How long it may ring; default `[sip] ring_timeout_s`.
    pub timeout: Option<Duration>,
}

/// Calls out. The leg is connected; the id is that of its dialog.
pub(super) async fn dial(shared: &Arc<Shared>, request: DialRequest) -> Result<(SipLeg, DialogId), DialError> {
    if shared.is_draining() {
        return Err(DialError::Sip(SipError::Closed));
    }
    let (to, trunk) = target(shared, &request.to, request.trunk.as_deref())?;
    let headers = extra_headers(&request.headers)?;
    let slot = shared.calls.clone().try_acquire_owned().map_err(|_| DialError::Overloaded)?;
    let peer = shared
        .resolve(&to)
        .await
        .ok_or_else(|| DialError::Address(format!("`{}` has no address that can be found", to.host_with_port.host)))?;

    let ports = shared.ports.bind().map_err(SipError::NoPort)?;
    let mut policy = shared.policy();
    if let Some(trunk) = trunk {
        if !trunk.codecs.is_empty() {
            policy.codecs = trunk.codecs.iter().map(|c| c.codec()).collect();
        }
        policy.srtp = match trunk.srtp {
            Srtp::Off => SrtpPolicy::Allowed,
            Srtp::Required => SrtpPolicy::Required,
        };
    }
    let mut negotiator = Negotiator::new(policy, session::local_media(shared.media_ip(peer), ports.port));
    let offer = negotiator.offer().to_string();

    let wire = wire(&to);
    let user = trunk.and_then(|t| t.username.clone());
    let option = InviteOption {
        caller: caller(shared, request.from.as_deref(), trunk, wire)?,
        callee: to.clone(),
        contact: shared.contact(user.as_deref(), wire, Some(peer)),
        content_type: Some("application/sdp".to_owned()),
        offer: Some(offer.into_bytes()),
        credential: trunk.and_then(credential),
        headers: Some(headers),
        ..InviteOption::default()
    };
    let (sender, mut states) = shared.dialogs.new_dialog_state_channel();
    let limit = request.timeout.unwrap_or(Duration::from_secs(shared.config.ring_timeout_s.max(1)));
    info!(%to, "calling");
    // Dropping this future, by the limit or because our caller lost interest, sends CANCEL.
    let invited = timeout(limit, shared.dialogs.do_invite(option, sender)).await;
    let (dialog, response) = match invited {
        Err(_) => return Err(DialError::NoAnswer),
        Ok(Err(error)) => return Err(DialError::Sip(SipError::Stack(error.to_string()))),
        Ok(Ok((_, None))) => return Err(DialError::NoAnswer),
        Ok(Ok((dialog, Some(response)))) => (dialog, response),
    };
    if response.status_code.kind() != StatusCodeKind::Successful {
        let status = response.status_code.code();
        let reason = response.reason_phrase().unwrap_or_else(|| response.status_code.text()).to_owned();
        return Err(DialError::Declined { status, reason });
    }

    ports.discard();
    let timer = SessionTimer::answered(&response, clock::now());
    let agreed = match body::description(&response) {
        Ok(Some(answer)) => negotiator.accept(&answer).map_err(|e| e.to_string()),
        // The answer may have come in a reliable provisional response, and need not come again (RFC 3262 section 5).
        Ok(None) => match reliable_answer(&mut states) {
            Some(answer) => negotiator.accept(&answer).map_err(|e| e.to_string()),
            None => Err("200 without a description".to_owned()),
        },
        Err(refusal) => Err(refusal.reason),
    };
    let (signals, receiver) = mpsc::channel(SIGNALS);
    let (control, controls) = mpsc::channel(CONTROLS);
    let id = dialog.id();
    let leg = agreed
        .and_then(|agreed| Session::leg(shared, ports, agreed, receiver, control).map_err(|error| error.to_string()));
    // Where there is no leg its end of the channels is gone, and the session begins by hanging up.
    let shared = shared.clone();
    spawn(Session { shared, dialog, states, negotiator, signals, controls, slot, peer, timer });
    leg.map(|leg| (leg, id)).map_err(DialError::Answer)
}

/// The description of the last reliable provisional response. Takes what has happened so far from the stream; the
/// session asks the dialog itself whether it is confirmed.
fn reliable_answer(states: &mut DialogStateReceiver) -> Option<sdp::Description> {
    let mut answer = None;
    while let Ok(state) = states.try_recv() {
        if let DialogState::Early(_, response) = state
            && response.header_contains_token("Require", "100rel")
        {
            answer = body::description(&response).ok().flatten().or(answer);
        }
    }
    answer
}

/// Apart, so that the type of `dial` does not depend on that of the session, which may dial itself.
fn spawn(session: Session) {
    let tasks = session.shared.tasks.clone();
    tasks.spawn(session.run());
}

/// Where `to` leads, and through which trunk.
pub(super) fn target<'a>(
    shared: &'a Shared,
    to: &str,
    trunk: Option<&str>,
) -> Result<(Uri, Option<&'a TrunkConfig>), DialError> {
    let to = to.trim();
    let trunks = &shared.config.trunk;
    let named = match trunk {
        None => None,
        Some(name) => {
            Some(trunks.iter().find(|t| t.name == name).ok_or_else(|| DialError::UnknownTrunk(name.to_owned()))?)
        }
    };
    if to.is_empty()
        || to.len() > 255
        || to.chars().any(|c| c.is_control() || c.is_whitespace() || "<>\"\\".contains(c))
    {
        return Err(DialError::Address(format!("`{to}` is no SIP address or telephone number")));
    }
    let lower = to.to_ascii_lowercase();
    let full = if lower.starts_with("sip:") || lower.starts_with("sips:") {
        Some(to.to_owned())
    } else if to.contains('@') {
        Some(format!("sip:{to}"))
    } else {
        None
    };
    if let Some(full) = full {
        let uri = Uri::try_from(full.as_str()).ok().filter(|uri| !uri.host_with_port.host.to_string().is_empty());
        let uri = uri.ok_or_else(|| DialError::Address(format!("`{to}` is not a valid SIP URI")))?;
        return Ok((uri, named));
    }
    let number = lower.strip_prefix("tel:").unwrap_or(to);
    let trunk = named.or(trunks.first()).ok_or_else(|| {
        DialError::Address(format!(
            "`{to}` is no full SIP URI (sip:user@host), and there is no [[sip.trunk]] to call it through"
        ))
    })?;
    Ok((through(trunk, number)?, Some(trunk)))
}

/// `user` at the trunk.
fn through(trunk: &TrunkConfig, user: &str) -> Result<Uri, DialError> {
    let transport = match trunk.transport {
        Transport::Udp => "",
        Transport::Tcp => ";transport=tcp",
        Transport::Tls => ";transport=tls",
    };
    let text = format!("sip:{}@{}{transport}", escape_user(user), trunk.host);
    Uri::try_from(text.as_str())
        .map_err(|_| DialError::Address(format!("`{user}` cannot be called at trunk `{}`", trunk.name)))
}

/// The registrar's address of a trunk.
pub(super) fn registrar(trunk: &TrunkConfig) -> Result<Uri, DialError> {
    let mut uri = through(trunk, "x")?;
    uri.auth = None;
    Ok(uri)
}

pub(super) fn credential(trunk: &TrunkConfig) -> Option<Credential> {
    let (username, password) = (trunk.username.as_ref()?, trunk.password.as_ref()?);
    Some(Credential {
        username: username.clone(),
        password: password.reveal().to_owned(),
        realm: None,
        auth_username: None,
    })
}

fn caller(shared: &Shared, from: Option<&str>, trunk: Option<&TrunkConfig>, wire: Wire) -> Result<Uri, DialError> {
    let user = match from {
        Some(from) if from.contains('@') => return target(shared, from, None).map(|(uri, _)| uri),
        Some(from) => from.strip_prefix("tel:").unwrap_or(from),
        None => trunk.and_then(|t| t.username.as_deref()).unwrap_or("antiphon"),
    };
    if user.is_empty() || user.chars().any(|c| c.is_control() || c.is_whitespace() || "<>\"\\".contains(c)) {
        return Err(DialError::Address(format!("`from` (`{user}`) is no SIP address or number")));
    }
    match trunk {
        Some(trunk) => through(trunk, user),
        None => {
            let mut uri = shared.contact(Some(&escape_user(user)), wire, None);
            uri.params.clear();
            Ok(uri)
        }
    }
}

/// Percent-escapes what a user part may not hold (RFC 3261 section 25.1), as `#` of a number.
fn escape_user(user: &str) -> String {
    user.bytes().fold(String::new(), |mut out, byte| {
        if byte.is_ascii_alphanumeric() || b"-_.!~*'()&=+$,;?/%".contains(&byte) {
            out.push(char::from(byte));
        } else {
            out.push_str(&format!("%{byte:02X}"));
        }
        out
    })
}

fn wire(uri: &Uri) -> Wire {
    let named = uri.params.iter().find_map(|param| match param {
        Param::Transport(transport) => Some(*transport),
        _ => None,
    });
    let secure = uri.scheme == Some(rsipstack::sip::Scheme::Sips);
    named.unwrap_or(if secure { Wire::Tls } else { Wire::Udp })
}

fn extra_headers(headers: &BTreeMap<String, String>) -> Result<Vec<Header>, DialError> {
    let mut extra = vec![body::allow(), timer::supported()];
    for (name, value) in headers {
        let token = !name.is_empty() && name.bytes().all(|b| b.is_ascii_alphanumeric() || b"-.!%*_+`'~".contains(&b));
        if !token || RESERVED.contains(&name.to_ascii_lowercase().as_str()) {
            return Err(DialError::Address(format!("the header `{name}` cannot be set")));
        }
        if value.chars().any(char::is_control) || value.len() > 1_024 {
            return Err(DialError::Address(format!(
                "the value of header `{name}` is too long or has control characters"
            )));
        }
        extra.push(Header::Other(name.clone(), value.clone()));
    }
    Ok(extra)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reserved_and_unsafe_headers_are_refused() {
        let one = |name: &str, value: &str| extra_headers(&BTreeMap::from([(name.to_owned(), value.to_owned())]));
        assert!(one("X-Account", "7").is_ok());
        assert!(one("Via", "x").is_err());
        assert!(one("X-Bad", "a\r\nVia: b").is_err());
        assert!(one("X Bad", "a").is_err());
        assert!(one("", "a").is_err());
    }

    #[test]
    fn numbers_are_escaped() {
        assert_eq!(escape_user("+49*21#"), "+49*21%23");
    }
}
