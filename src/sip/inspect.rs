//! What every message passes on its way into the stack and out of it.

use std::net::IpAddr;

use rsipstack::{
    sip::{
        Response, SipMessage, StatusCode,
        prelude::{HeadersExt, ToTypedHeader},
    },
    transaction::endpoint::MessageInspector,
    transport::SipAddr,
};

use super::{
    cause::Farewells,
    challenge,
    names::{Carriers, Challenger, Naming},
    tidy,
};

/// Amends what peers say about where they are, and challenges and credentials; notes why they end calls.
pub(super) struct Inspector {
    pub(super) naming: Naming,
    pub(super) carriers: Carriers,
    pub(super) farewells: Farewells,
}

impl MessageInspector for Inspector {
    fn before_send(&self, mut message: SipMessage, _: Option<&SipAddr>) -> SipMessage {
        match &mut message {
            SipMessage::Request(request) => {
                let to = request.to_header().ok().and_then(|to| to.typed().ok());
                let password = |username: &str| self.carriers.password(&to.as_ref()?.uri.host_with_port.host, username);
                challenge::mend(&mut request.headers, request.method, password);
            }
            SipMessage::Response(response) => tidy::hide(response),
        }
        message
    }

    fn after_received(&self, mut message: SipMessage, from: Option<&SipAddr>) -> SipMessage {
        let Some(from) = from.and_then(|from| from.get_socketaddr().ok()) else { return message };
        self.naming.amend(&mut message, from);
        if let SipMessage::Request(request) = &message {
            self.farewells.heard(request);
        }
        if let SipMessage::Response(response) = &mut message
            && matches!(response.status_code, StatusCode::Unauthorized | StatusCode::ProxyAuthenticationRequired)
        {
            self.on_challenge(response, from.ip());
        }
        message
    }
}

impl Inspector {
    /// Leaves what may be answered. The password of a trunk goes to its addresses and its realm only: a digest of it is
    /// enough to guess it at leisure, and a host that passes a challenge on could call in our name.
    fn on_challenge(&self, response: &mut Response, from: IpAddr) {
        // Requests that bring credentials of ours are addressed to the trunk's host.
        let to = response.to_header().ok().and_then(|to| to.typed().ok());
        let Some(to) = to else { return };
        let answered = match self.carriers.challenger(&to.uri.host_with_port.host, from) {
            // Nothing is sent in answer; the status is what counts.
            Challenger::Unknown => return,
            // One that cannot be answered is reported as it is, but for one of another realm.
            Challenger::Trunk(realm) => challenge::reduce(&mut response.headers, realm.as_deref()) || realm.is_none(),
            Challenger::Foreign => false,
        };
        if !answered {
            tracing::warn!(%from, to = %to.uri, "a host other than the trunk asked for its password; it was not answered");
            response.status_code = StatusCode::Forbidden;
        }
    }
}
