//! Calls that take the place of others (RFC 3891): how a telephone or an exchange completes an attended transfer to an agent
//! of ours. It has spoken with the agent, and has somebody else's INVITE name that call.
//!
//! The agent stays on its call, and goes over to the new one when that is answered; the old one ends. A peer that names a call
//! knows its Call-ID and both tags, which only its parties learn; that alone is not enough, see [`Party`](super::up::Party).

use std::time::Duration;

use rsipstack::{
    dialog::DialogId,
    sip::{Header, Request, StatusCode},
};

use super::{
    calling::{Replacement, Rings},
    incoming::IncomingCall,
    shared::Shared,
    up::{Answered, Party},
};
use crate::media::sip::Signal;

/// How long a leg may leave its signals unread.
const UNREAD: Duration = Duration::from_secs(2);

/// A call that another one may take the place of.
pub(super) enum Replaced {
    Answered(Answered),
    /// One of ours that is not answered yet.
    Rings(Rings),
}

impl Replaced {
    /// Whether a call of `party` may do so. `users`: `[sip] users` hand calls to one another.
    ///
    /// # Errors
    /// 403: it is not its call.
    pub(super) fn allows(&self, party: &Party, users: bool) -> Result<(), StatusCode> {
        match self {
            Replaced::Answered(answered) => answered.allows(party, users),
            Replaced::Rings(rings) => rings.allows(party, users),
        }
    }
}

/// The call that `request` is to take the place of, if any: one that is answered, or one of ours that rings (RFC 3891
/// section 3: a telephone that picks up what rings elsewhere).
///
/// # Errors
/// 400: it is named in no way that can be read, or several are. 481: there is none, or it rings here. 486: it is answered, and
/// only one that is not was meant. 603: it is over.
pub(super) fn named(shared: &Shared, request: &Request) -> Result<Option<Replaced>, StatusCode> {
    let mut values = request.headers.iter().filter(|header| is_replaces(header)).map(Header::value);
    let Some(value) = values.next() else { return Ok(None) };
    let (id, early_only) = read(value).filter(|_| values.next().is_none()).ok_or(StatusCode::BadRequest)?;
    match shared.calls.up.get(&id) {
        Some(_) if early_only => Err(StatusCode::BusyHere),
        Some(answered) => Ok(Some(Replaced::Answered(answered))),
        None => match shared.calls.calling.rings(&id) {
            Some(rings) => Ok(Some(Replaced::Rings(rings))),
            None => Err(match shared.dialogs.get_dialog(&id) {
                Some(dialog) if dialog.state().is_terminated() => StatusCode::Decline,
                _ => StatusCode::CallTransactionDoesNotExist,
            }),
        },
    }
}

/// Answers `call`, whose dialog is `id`, and has the agent of the `replaced` one go over to it.
pub(super) async fn take(replaced: Replaced, call: IncomingCall, id: DialogId) {
    // Where it fails, the other side has been told, and nothing has changed.
    let from = call.from.clone();
    let Ok(leg) = call.accept().await else { return };
    let answered = match replaced {
        Replaced::Answered(answered) => answered,
        Replaced::Rings(rings) => return rings.replace(Replacement { leg: Box::new(leg), id, with: from }).await,
    };
    if let Some(signals) = answered.signals() {
        // overflow: awaited, for a while: a leg that leaves its signals unread is stuck or gone. What is not taken is dropped,
        // and its session hangs up.
        signals.send_timeout(Signal::Moved(Box::new(leg), from), UNREAD).await.ok();
    }
}

fn is_replaces(header: &Header) -> bool {
    header.name().eq_ignore_ascii_case("Replaces")
}

/// `Call-ID;to-tag=...;from-tag=...[;early-only]`: the tags as the sender of the INVITE writes them to us, so that `to-tag` is
/// ours.
pub(super) fn read(value: &str) -> Option<(DialogId, bool)> {
    let mut parts = value.split(';').map(str::trim);
    let call_id = parts.next().filter(|id| !id.is_empty())?.to_owned();
    let (mut local_tag, mut remote_tag, mut early_only) = (None, None, false);
    for part in parts {
        match part.split_once('=').map(|(name, value)| (name.trim().to_ascii_lowercase(), value.trim())) {
            Some((name, value)) if name == "to-tag" => local_tag = Some(value.to_owned()),
            Some((name, value)) if name == "from-tag" => remote_tag = Some(value.to_owned()),
            None if part.eq_ignore_ascii_case("early-only") => early_only = true,
            _ => {}
        }
    }
    Some((DialogId { call_id, local_tag: local_tag?, remote_tag: remote_tag? }, early_only))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_call_is_named_by_its_id_and_both_tags() {
        let (id, early) = read("a@b; from-tag=theirs ;to-tag=ours;x=y").expect("valid");
        assert_eq!((id.call_id.as_str(), id.local_tag.as_str(), id.remote_tag.as_str()), ("a@b", "ours", "theirs"));
        assert!(!early && read("a;to-tag=1;from-tag=2;early-only").expect("valid").1);
        for bad in ["", ";to-tag=1;from-tag=2", "a;to-tag=1", "a;from-tag=2", "a"] {
            assert!(read(bad).is_none(), "{bad}");
        }
    }
}
