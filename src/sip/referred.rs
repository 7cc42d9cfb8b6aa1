//! Being handed over: REFER of the other side (RFC 3515, RFC 5589). The agent stays on its call, whose other end becomes the
//! party that we are sent to; where that does not answer, nothing has changed.
//!
//! # Why
//! *Refused unless the configuration says otherwise* (603): a peer that may send us anywhere spends our money. What is allowed
//! then is what `POST /v1/calls` is allowed: the same dial plan, prefixes and quotas.
//!
//! *The call goes on until the new one is answered.* Who sends a blind REFER may hang up at once; the new call is
//! placed all the same, and the agent's call ends only where that fails.

use std::{collections::BTreeMap, convert::Infallible, sync::Arc, time::Duration};

use rsipstack::{
    dialog::invite_dialog::InviteDialog,
    sip::{Header, Host, HostWithPort, Request, StatusCode, event_packages::percent_decode},
};
use tokio::{
    sync::mpsc,
    time::{sleep, timeout},
};

use super::{DialError, body, dialplan::DialRequest, shared::Shared, up::Party};
use crate::media::sip::SipLeg;

/// How long the peer may take to answer a NOTIFY that we wait for.
const NOTIFIED: Duration = Duration::from_secs(5);
/// Between looks whether the dialog may be spoken in again: the stack answers a request first.
const TURN: Duration = Duration::from_millis(10);
/// Seconds for which we tell how it goes.
const SUBSCRIBED: u64 = 180;
/// Steps that may wait to be told.
const STEPS: usize = 8;
/// Longest header that is passed on.
const MAX_HEADER: usize = 1_024;

/// Why a REFER is refused.
pub(super) type Refused = (StatusCode, Vec<Header>);

/// A REFER that is followed.
#[derive(Debug)]
pub(super) struct Referral {
    request: DialRequest,
    /// The peer wants to hear how it goes (RFC 4488 lets it say no).
    pub(super) told: bool,
}

/// What a REFER of `party` asks for.
///
/// # Errors
/// 603: the configuration does not let this party send us anywhere. 400: it does not say where. 403: what it names may not be
/// called.
pub(super) fn wanted(shared: &Shared, party: &Party, request: &Request) -> Result<Referral, Refused> {
    let config = shared.config();
    let allowed = match party {
        Party::Trunk(index) => config.trunk.get(*index).is_some_and(|trunk| trunk.refer),
        Party::Account(_) => config.refer,
        Party::Stranger => false,
    };
    if !allowed {
        return Err((StatusCode::Decline, vec![]));
    }
    let own = |host: &HostWithPort| is_here(shared, host);
    let referral = read(request, own).map_err(|why| (StatusCode::BadRequest, vec![body::warning(why)]))?;
    let route = shared.dialplan(&config).route(&referral.request.to, None, None);
    route.map_err(|error| (StatusCode::Forbidden, vec![body::warning(&error.to_string())]))?;
    Ok(referral)
}

/// Whether `host` is ours.
fn is_here(shared: &Shared, host: &HostWithPort) -> bool {
    let Host::IpAddr(ip) = host.host else { return false };
    let here = &shared.here;
    let listeners = here.bound.all().map(|bound| bound.ip());
    let public = here.public_ip.into_iter().chain(here.public_ips.iter().map(|one| one.ip));
    let known = listeners.chain(public).any(|own| own.to_canonical() == ip.to_canonical());
    let port = host.port.as_ref().map_or(5060, |port| u16::from(*port));
    known && here.bound.all().any(|bound| bound.port() == port)
}

/// Reads a REFER. `own` tells our hosts: a user or number there is one of a trunk.
pub(super) fn read(request: &Request, own: impl Fn(&HostWithPort) -> bool) -> Result<Referral, &'static str> {
    let named = |name: &'static str| {
        request.headers.iter().filter(move |header| header.name().eq_ignore_ascii_case(name)).map(Header::value)
    };
    let mut targets = named("Refer-To").chain(named("r"));
    let target = targets.next().filter(|_| targets.next().is_none());
    let target = target.ok_or("a REFER needs one Refer-To (RFC 3515 section 2.4.1)")?;
    let target = match target.split_once('<') {
        Some((_, rest)) => rest.split('>').next().unwrap_or_default(),
        None => target.split(';').next().unwrap_or_default(),
    };
    let (address, query) = target.trim().split_once('?').unwrap_or((target.trim(), ""));
    if address.to_ascii_lowercase().split(';').any(|part| part.starts_with("method=") && part != "method=invite") {
        return Err("only calls are placed: method=INVITE");
    }
    let mut headers = BTreeMap::new();
    for (name, value) in query.split('&').filter_map(|pair| pair.split_once('=')) {
        if name.eq_ignore_ascii_case("Replaces") {
            headers.insert("Replaces".to_owned(), percent_decode(value));
        }
    }
    if let Some(by) = named("Referred-By").chain(named("b")).next().filter(|by| by.len() <= MAX_HEADER) {
        headers.insert("Referred-By".to_owned(), by.to_owned());
    }
    let told = !named("Refer-Sub").any(|value| value.trim().eq_ignore_ascii_case("false"));
    let host = rsipstack::sip::Uri::try_from(address).ok().filter(|uri| own(&uri.host_with_port));
    let to = host.and_then(|uri| uri.user().map(str::to_owned)).unwrap_or_else(|| address.to_owned());
    Ok(Referral { request: DialRequest { to, headers, ..DialRequest::default() }, told })
}

impl Referral {
    /// Where it leads.
    pub(super) fn to(&self) -> &str {
        &self.request.to
    }

    /// What the 202 says.
    pub(super) fn headers(&self) -> Option<Vec<Header>> {
        (!self.told).then(|| vec![Header::Other("Refer-Sub".to_owned(), "false".to_owned())])
    }

    /// Places the call and tells the peer how it goes. The leg of the new call; the peer is told of that by [`done`].
    ///
    /// # Errors
    /// Why it was not answered. The peer knows.
    pub(super) async fn follow(self, shared: Arc<Shared>, dialog: InviteDialog) -> Result<Box<SipLeg>, String> {
        let (steps, mut steps_told) = mpsc::channel(STEPS);
        // overflow: drops: the peer hears of the next step
        let progress = Box::new(move |status: u16| {
            steps.try_send(status).ok();
        });
        let told = self.told;
        let tell = async {
            // The stack sends our 202 from another task, and not every peer takes news that overtake it, which they may (RFC 6665
            // section 4.1.2.4).
            tokio::time::sleep(ACCEPTED).await;
            let mut last = 0;
            let mut next = Some(100);
            while let Some(status) = next {
                if told && status != last {
                    notify(&dialog, &StatusCode::from(status), false).await;
                    last = status;
                }
                next = steps_told.recv().await;
            }
            std::future::pending::<Infallible>().await
        };
        let dialled = tokio::select! {
            dialled = shared.dial(self.request, progress) => dialled,
            never = tell => match never {},
        };
        match dialled {
            Ok((leg, _)) => Ok(Box::new(leg)),
            Err(error) => {
                if told {
                    timeout(NOTIFIED, notify(&dialog, &status(&error), true)).await.ok();
                }
                Err(error.to_string())
            }
        }
    }
}

/// Tells the peer that the new call is answered.
pub(super) async fn done(dialog: &InviteDialog) {
    timeout(NOTIFIED, notify(dialog, &StatusCode::OK, true)).await.ok();
}

/// How long our 202 may take to leave.
const ACCEPTED: Duration = Duration::from_millis(20);

/// What came of a call, as a NOTIFY says it.
fn status(error: &DialError) -> StatusCode {
    match error {
        DialError::Declined { status, .. } => StatusCode::from(*status),
        DialError::NoAnswer => StatusCode::RequestTimeout,
        DialError::Denied(_) | DialError::UnknownTrunk(_) => StatusCode::Forbidden,
        DialError::Address(_) => StatusCode::NotFound,
        DialError::Answer(_) => StatusCode::NotAcceptableHere,
        DialError::Overloaded | DialError::Sip(_) => StatusCode::ServiceUnavailable,
    }
}

/// One NOTIFY, once the dialog can be spoken in. Nothing where it is over.
async fn notify(dialog: &InviteDialog, status: &StatusCode, last: bool) {
    while !dialog.state().is_confirmed() {
        if dialog.state().is_terminated() {
            return;
        }
        sleep(TURN).await;
    }
    let state = if last { "terminated;reason=noresource".to_owned() } else { format!("active;expires={SUBSCRIBED}") };
    let headers = vec![
        Header::Event("refer".into()),
        Header::SubscriptionState(state.into()),
        Header::ContentType("message/sipfrag;version=2.0".into()),
    ];
    let fragment = format!("SIP/2.0 {} {}\r\n", status.code(), status.text());
    if let Err(error) = dialog.notify(Some(headers), Some(fragment.into_bytes())).await {
        tracing::debug!(id = %dialog.id(), %error, "NOTIFY failed");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rsipstack::sip::{Method, Version};

    fn refer(headers: &[(&str, &str)]) -> Request {
        let headers: Vec<Header> =
            headers.iter().map(|(name, value)| Header::Other((*name).to_owned(), (*value).to_owned())).collect();
        Request {
            method: Method::Refer,
            uri: "sip:a@b".try_into().expect("valid"),
            version: Version::V2,
            headers: headers.into(),
            body: Vec::new(),
        }
    }

    fn target(value: &str) -> Result<(String, Option<String>), &'static str> {
        let own = |host: &HostWithPort| host.to_string() == "192.0.2.1";
        let read = read(&refer(&[("Refer-To", value)]), own)?;
        Ok((read.request.to, read.request.headers.get("Replaces").cloned()))
    }

    fn plain(to: &str) -> Result<(String, Option<String>), &'static str> {
        Ok((to.to_owned(), None))
    }

    #[test]
    fn where_to_is_read_as_telephones_write_it() {
        assert_eq!(target("<sip:+49301@carrier.example>"), plain("sip:+49301@carrier.example"));
        assert_eq!(target("sip:+49301@carrier.example;x=y"), plain("sip:+49301@carrier.example"));
        assert_eq!(
            target("\"A\" <sip:bob@h;user=phone;method=INVITE>;a=b"),
            plain("sip:bob@h;user=phone;method=INVITE")
        );
        assert_eq!(target("<tel:+49301>"), plain("tel:+49301"));
        assert_eq!(target("<sip:+49301@192.0.2.1>"), plain("+49301"), "a number at ours is one of a trunk");
        assert_eq!(
            target("<sip:bob@h?Replaces=a%40b%3Bto-tag%3D1%3Bfrom-tag%3D2&X=y>"),
            Ok(("sip:bob@h".to_owned(), Some("a@b;to-tag=1;from-tag=2".to_owned())))
        );
        assert!(target("<sip:bob@h;method=BYE>").is_err());
        assert!(read(&refer(&[]), |_| false).is_err());
        assert!(read(&refer(&[("Refer-To", "<sip:a@b>"), ("refer-to", "<sip:c@d>")]), |_| false).is_err());
    }

    #[test]
    fn who_wants_no_news_gets_none() {
        let quiet = read(&refer(&[("Refer-To", "<sip:a@b>"), ("Refer-Sub", "false")]), |_| false).expect("valid");
        assert!(!quiet.told && quiet.headers().is_some());
        let by = read(&refer(&[("Refer-To", "<sip:a@b>"), ("Referred-By", "<sip:c@d>")]), |_| false).expect("valid");
        assert_eq!(by.request.headers.get("Referred-By").map(String::as_str), Some("<sip:c@d>"));
        assert!(by.told && by.headers().is_none());
    }
}
