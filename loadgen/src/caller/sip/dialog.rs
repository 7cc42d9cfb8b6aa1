//! What a dialog's messages are made of: who we are, what both sides agreed to be called, and where requests go.

use super::auth::Credentials;
use super::message::{Message, Start};

/// Who we are on the wire.
#[derive(Clone, Debug)]
pub(crate) struct Identity {
    /// `UDP`, `TCP` or `TLS`.
    pub(crate) transport: &'static str,
    /// `host:port` of Via and Contact.
    pub(crate) host: String,
    pub(crate) user: String,
    pub(crate) credentials: Option<Credentials>,
}

impl Identity {
    pub(crate) fn via(&self) -> String {
        format!("SIP/2.0/{} {};branch=z9hG4bK{};rport", self.transport, self.host, token())
    }

    fn contact(&self) -> String {
        let transport = match self.transport {
            "UDP" => "",
            "TCP" => ";transport=tcp",
            _ => ";transport=tls",
        };
        format!("<sip:{}@{}{transport}>", self.user, self.host)
    }
}

/// What both sides of a call remember to recognise each other's requests (RFC 3261 section 12).
pub(crate) struct Dialog {
    pub(crate) call_id: String,
    pub(crate) local: String,
    pub(crate) local_tag: String,
    pub(crate) remote: String,
    pub(crate) remote_tag: Option<String>,
    pub(crate) target: String,
    pub(crate) routes: Vec<String>,
    pub(crate) cseq: u32,
    pub(crate) remote_cseq: u32,
}

impl Dialog {
    /// A request of the dialog, numbered anew.
    pub(crate) fn request(&mut self, me: &Identity, method: &str) -> Message {
        self.cseq += 1;
        let to = match &self.remote_tag {
            Some(tag) if !self.remote.contains(";tag=") => format!("{};tag={tag}", self.remote),
            _ => self.remote.clone(),
        };
        let from = match self.local.contains(";tag=") {
            true => self.local.clone(),
            false => format!("{};tag={}", self.local, self.local_tag),
        };
        let mut request = Message::request(method, &self.target)
            .with("Via", me.via())
            .with("Max-Forwards", "70")
            .with("From", from)
            .with("To", to)
            .with("Call-ID", &self.call_id)
            .with("CSeq", format!("{} {method}", self.cseq))
            .with("Contact", me.contact())
            .with("Allow", ALLOW)
            .with("User-Agent", concat!("antiphon-loadgen/", env!("CARGO_PKG_VERSION")));
        for route in &self.routes {
            request = request.with("Route", route);
        }
        request
    }
}

/// Completes a response by what it copies from its request.
pub(crate) fn reply(me: &Identity, tag: Option<&str>, request: &Message, response: Message) -> Message {
    let mut headers: Vec<(String, String)> = Vec::new();
    for name in ["Via", "Record-Route", "From", "To", "Call-ID", "CSeq"] {
        headers.extend(request.headers.iter().filter(|(n, _)| n.eq_ignore_ascii_case(name)).cloned());
    }
    if let Some((_, to)) = headers.iter_mut().find(|(n, _)| n.eq_ignore_ascii_case("To"))
        && !to.contains(";tag=")
        && !matches!(response.start, Start::Response { code: 100, .. })
    {
        let tag = tag.unwrap_or("unknown");
        to.push_str(&format!(";tag={tag}"));
    }
    headers.push(("Contact".to_owned(), me.contact()));
    headers.push(("Allow".to_owned(), ALLOW.to_owned()));
    headers.extend(response.headers);
    Message { headers, ..response }
}

const ALLOW: &str = "INVITE, ACK, CANCEL, BYE, OPTIONS, INFO, UPDATE, REFER, NOTIFY";

/// A unique name.
pub(crate) fn token() -> String {
    format!("{:016x}", rand::random::<u64>())
}
