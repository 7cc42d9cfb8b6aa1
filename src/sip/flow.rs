//! The way between a trunk and us: asked whether it is alive, and kept open for the calls that come down it.
//!
//! # Why
//! Calls come down the flow that a registration made: behind NAT a mapping that is forgotten after some half a minute, and in
//! TCP and TLS a connection, which the stack closes when nothing was read from it for five. OPTIONS keeps both open with
//! every registrar. The double empty line of RFC 5626 section 4.4.1 would be shorter, but many registrars do not answer it,
//! and the stack reads its answer without telling anybody; that of a peer is answered, see `listen`.

use std::{future::pending, time::Duration};

use rsipstack::{
    sip::{Header, Method, Param, SipMessage, Transport as Wire, Uri, typed},
    transaction::{
        key::{TransactionKey, TransactionRole},
        make_tag,
        transaction::Transaction,
    },
    transport::{SipAddr, SipConnection},
};
use tokio::time::{sleep, timeout};
use tracing::debug;

use super::{
    config::{Transport, TrunkConfig},
    dialplan::{self, registrar},
    names,
    shared::Shared,
};

/// Time for an answer to what keeps a flow open (RFC 5626 section 4.4.1).
const PONG: Duration = Duration::from_secs(10);
/// Time for a connection to be closed whose peer may not read.
const CLOSING: Duration = Duration::from_secs(1);
/// A flow that lasted so long was not closed by habit.
const STEADY: Duration = Duration::from_secs(30);

/// How often in a row a flow was lost soon after a registration had made it.
#[derive(Debug, Default)]
pub(super) struct Losses(u32);

impl Losses {
    /// A flow was lost that had lasted so long. How long to wait before another is made: some registrars close every
    /// connection behind their answer, and are not asked for ever at that pace.
    pub(super) fn lost(&mut self, lasted: Duration) -> Duration {
        if lasted >= STEADY {
            self.0 = 0;
            return Duration::ZERO;
        }
        self.0 += 1;
        match self.0 {
            1 => Duration::ZERO,
            more => Duration::from_secs(1 << (more - 2).min(9)),
        }
    }
}

/// Whether silence means that the peer is gone: to who has answered before, only.
#[derive(Debug, Default)]
struct Pongs {
    answers: bool,
}

impl Pongs {
    /// What came of one question. `true`: the flow is dead.
    fn are_over(&mut self, answered: bool) -> bool {
        self.answers |= answered;
        self.answers && !answered
    }
}

/// Keeps the way from the registrar of `config` open, and returns, with the reason, when it is gone. A way without a connection
/// (UDP) never is: what is lost there is only a packet. `at`: which of the registrar's addresses it leads to.
pub(super) async fn lost(shared: &Shared, config: &TrunkConfig, at: Option<&SipAddr>) -> &'static str {
    let Some(connection) = connection(shared, config, at).await else {
        return kept(shared, config, at, false).await;
    };
    let closed = async {
        match connection.cancel_token() {
            Some(closed) => closed.cancelled().await,
            None => pending().await,
        }
    };
    tokio::select! {
        () = closed => "its connection was closed",
        why = kept(shared, config, at, true) => {
            // The next request opens another. This one may still be open on its other side.
            shared.stack.transport_layer.remove_connection(&connection);
            timeout(CLOSING, connection.close()).await.ok();
            why
        }
    }
}

/// Asks every `keep_alive_s` and returns when there is no answer any more, where that is to be `judged`.
async fn kept(shared: &Shared, config: &TrunkConfig, at: Option<&SipAddr>, judged: bool) -> &'static str {
    let every = Duration::from_secs(config.keep_alive_s);
    let mut pongs = Pongs::default();
    while !every.is_zero() {
        sleep(every).await;
        let answered = match timeout(PONG, probe(shared, config, &config.host, at)).await {
            // The stack's own, where nothing came.
            Ok(Ok(status)) => status != 408,
            Ok(Err(error)) => {
                debug!(trunk = config.name, error, "keep-alive");
                false
            }
            Err(_) => false,
        };
        if pongs.are_over(answered) && judged {
            return "there is no answer on its connection";
        }
    }
    pending().await
}

/// The connection that a registration goes by; `None`: it goes by UDP, or there is none.
async fn connection(shared: &Shared, config: &TrunkConfig, at: Option<&SipAddr>) -> Option<SipConnection> {
    let uri = registrar(config).ok()?;
    let target = SipAddr::try_from(&uri).ok()?;
    let (connection, _) = names::pinned(&uri, at, shared.stack.transport_layer.lookup(&target, None)).await.ok()?;
    connection.is_reliable().then_some(connection)
}

/// The address of a host itself.
pub(super) fn host_uri(config: &TrunkConfig, host: &str) -> Result<Uri, String> {
    let mut uri = dialplan::at(config, host, "x").map_err(|e| e.to_string())?;
    uri.auth = None;
    uri.params.retain(|param| !matches!(param, Param::User(_)));
    Ok(uri)
}

/// One OPTIONS to a host of the trunk, at this of its addresses where one is given; the status of its answer.
pub(super) async fn probe(
    shared: &Shared,
    config: &TrunkConfig,
    host: &str,
    at: Option<&SipAddr>,
) -> Result<u16, String> {
    let uri = host_uri(config, host)?;
    names::pinned(&uri.clone(), at, ask(shared, config, uri)).await
}

async fn ask(shared: &Shared, config: &TrunkConfig, uri: Uri) -> Result<u16, String> {
    let error = |error: rsipstack::Error| error.to_string();
    let stack = &shared.stack;
    let target = SipAddr::try_from(&uri).map_err(error)?;
    let (connection, _) = stack.transport_layer.lookup(&target, None).await.map_err(error)?;
    let via = stack.get_via(Some(connection.get_addr().clone()), None).map_err(error)?;
    let peer = shared.resolve(&uri).await;
    let by = connection.get_addr().r#type.unwrap_or_else(|| wire(config));
    let us: Uri = shared.contact(config.username.as_deref(), by, peer);
    let from = typed::From { display_name: None, uri: us.clone(), params: vec![] }.with_tag(make_tag());
    let to = typed::To { display_name: None, uri: uri.clone(), params: vec![] };
    let mut request = stack.make_request(Method::Options, uri, via, from, to, 1, None);
    request.headers.push(Header::Contact(typed::Contact { display_name: None, uri: us, params: vec![] }.into()));
    request.headers.push(Header::Accept("application/sdp".into()));
    let key = TransactionKey::from_request(&request, TransactionRole::Client).map_err(error)?;
    let mut tx = Transaction::new_client(key, request, stack.clone(), None);
    tx.send().await.map_err(error)?;
    while let Some(message) = tx.receive().await {
        let SipMessage::Response(response) = message else { continue };
        match response.status_code.code() {
            100..200 => {}
            status => return Ok(status),
        }
    }
    Err("no answer to OPTIONS".to_owned())
}

pub(super) fn wire(config: &TrunkConfig) -> Wire {
    match config.transport {
        // What its contact is at first; a call knows better.
        Transport::Udp | Transport::Auto => Wire::Udp,
        Transport::Tcp => Wire::Tcp,
        Transport::Tls => Wire::Tls,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_connection_is_made_anew_at_once_but_not_for_ever_at_that_pace() {
        let mut losses = Losses::default();
        let soon = Duration::from_secs(3);
        let waits: Vec<u64> = (0..12).map(|_| losses.lost(soon).as_secs()).collect();
        assert_eq!(waits, [0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 512]);
        assert_eq!(losses.lost(STEADY), Duration::ZERO);
        assert_eq!(losses.lost(soon), Duration::ZERO, "one that had lasted begins the count again");
    }

    #[test]
    fn silence_counts_where_there_was_an_answer_before() {
        let mut mute = Pongs::default();
        assert!(!mute.are_over(false) && !mute.are_over(false));
        assert!(!mute.are_over(true) && !mute.are_over(true) && mute.are_over(false));
    }
}
