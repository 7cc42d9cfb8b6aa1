//! Calls that go out.

use std::{collections::BTreeMap, future::Future, pin::pin, sync::Arc, time::Duration};

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
    config::{Srtp, TrunkConfig},
    dialplan::{Caller, DialRequest, Route},
    session::{CONTROLS, SIGNALS, Session},
    shared::Shared,
    timer::{self, SessionTimer},
};
use crate::{
    clock,
    media::sip::{SipLeg, latch::Peer},
};

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

/// What the called side says before it answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Provisional {
    /// It rings, or is looked for.
    Ringing {
        /// SIP status, 180 to 199.
        status: u16,
    },
    /// It sends sound already (which is not heard yet).
    EarlyMedia {
        /// SIP status, 180 to 199.
        status: u16,
    },
}

/// Who is told of provisional responses.
pub(super) type Tell<'a> = &'a (dyn Fn(Provisional) + Send + Sync);

/// Whether `request` can be tried at all: its address, trunk, caller and headers. Gives the trunk's name.
pub(super) fn check(shared: &Shared, request: &DialRequest) -> Result<Option<String>, DialError> {
    let Route { uri: to, trunk } =
        shared.dialplan().route(&request.to, request.from.as_deref(), request.trunk.as_deref())?;
    extra_headers(&request.headers)?;
    let trunk = trunk.map(|(_, trunk)| trunk);
    caller(shared, request.from.as_deref(), trunk, wire(&to))?;
    Ok(trunk.map(|trunk| trunk.name.clone()))
}

/// Calls out. The leg is connected; the id is that of its dialog.
pub(super) async fn dial(
    shared: &Arc<Shared>,
    request: DialRequest,
    tell: Tell<'_>,
) -> Result<(SipLeg, DialogId), DialError> {
    if shared.is_draining() {
        return Err(DialError::Sip(SipError::Closed));
    }
    let Route { uri: to, trunk } =
        shared.dialplan().route(&request.to, request.from.as_deref(), request.trunk.as_deref())?;
    let headers = extra_headers(&request.headers)?;
    let lease = match trunk {
        Some((index, _)) => Some(shared.quotas.begin(index).map_err(DialError::Denied)?),
        None => None,
    };
    let trunk = trunk.map(|(_, trunk)| trunk);
    let slot = shared.places.outbound().ok_or(DialError::Overloaded)?;
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
    let mut negotiator = Negotiator::new(policy, body::local_media(shared.media_ip(peer), ports.port));
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
    let mut early = None;
    let invite = watch(shared.dialogs.do_invite(option, sender), &mut states, &mut early, tell);
    let invited = timeout(limit, invite).await;
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
    if let Some(lease) = &lease {
        lease.answered();
    }
    let timer = SessionTimer::answered(&response, clock::now());
    let agreed = match body::description(&response) {
        Ok(Some(answer)) => negotiator.accept(&answer).map_err(|e| e.to_string()),
        // The answer may have come in a reliable provisional response, and need not come again (RFC 3262 section 5).
        Ok(None) => match early {
            Some(answer) => negotiator.accept(&answer).map_err(|e| e.to_string()),
            None => Err("200 without a description".to_owned()),
        },
        Err(refusal) => Err(refusal.reason),
    };
    let (signals, receiver) = mpsc::channel(SIGNALS);
    let (control, controls) = mpsc::channel(CONTROLS);
    let id = dialog.id();
    let peer = Peer { signalling: peer, trusted: trunk.is_some() };
    let leg = agreed.and_then(|agreed| {
        Session::leg(shared, ports, agreed, peer, receiver, control).map_err(|error| error.to_string())
    });
    // Where there is no leg its end of the channels is gone, and the session begins by hanging up.
    let shared = shared.clone();
    spawn(Session { shared, dialog, states, negotiator, signals, controls, slot, lease, peer, timer });
    leg.map(|leg| (leg, id)).map_err(DialError::Answer)
}

/// Waits for the end of an INVITE and tells of its provisional responses meanwhile; `answer` gets the description of the
/// last reliable one. Takes what happens until then from the stream; the session asks the dialog itself whether it is
/// confirmed.
async fn watch<T>(
    invite: impl Future<Output = T>,
    states: &mut DialogStateReceiver,
    answer: &mut Option<sdp::Description>,
    tell: Tell<'_>,
) -> T {
    let mut invite = pin!(invite);
    let mut take = |state: DialogState| {
        let DialogState::Early(_, response) = state else { return };
        let description = body::description(&response).ok().flatten();
        let status = response.status_code.code();
        tell(match description {
            Some(_) => Provisional::EarlyMedia { status },
            None => Provisional::Ringing { status },
        });
        if response.header_contains_token("Require", "100rel") && description.is_some() {
            *answer = description;
        }
    };
    loop {
        tokio::select! {
            ended = &mut invite => {
                while let Ok(state) = states.try_recv() {
                    take(state);
                }
                return ended;
            }
            Some(state) = states.recv() => take(state),
        }
    }
}

/// Apart, so that the type of `dial` does not depend on that of the session, which may dial itself.
fn spawn(session: Session) {
    let tasks = session.shared.tasks.clone();
    tasks.spawn(session.run());
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
    Ok(match shared.dialplan().caller(from, trunk)? {
        Caller::Address(uri) => *uri,
        Caller::User(user) => {
            let mut uri = shared.contact(Some(&user), wire, None);
            uri.params.clear();
            uri
        }
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
}
