//! What becomes of a request: an INVITE outside any dialog is a call, what belongs to a dialog goes to its call, and the
//! rest is answered here.

use std::{sync::Arc, time::Duration};

use rsipstack::{
    dialog::{
        DialogId,
        dialog::{Dialog, DialogState},
        invite_dialog::InviteDialog,
    },
    sip::{Header, Method, Request, Response, StatusCode, StatusCodeKind, prelude::HeadersExt},
    transaction::{Transaction, key::TransactionRole},
};
use tokio::time::{sleep, timeout};
use tracing::debug;

use super::{
    body::{self, Reply},
    early,
    inbound::{self, unsupported},
    shared::Shared,
};

/// How long a request waits for the ACK that was sent before it: datagrams overtake each other, and so do the tasks that
/// have them.
const ACK_BEFORE: Duration = Duration::from_millis(200);

/// Answers a request that has a transaction.
pub(super) async fn handle(shared: &Arc<Shared>, mut tx: Transaction) {
    let in_dialog = tx.original.to_header().ok().and_then(|to| to.tag().ok().flatten()).is_some();
    if tx.original.method == Method::Invite && !in_dialog {
        return inbound::receive(shared, tx).await;
    }
    let Some(source) = inbound::source(&tx) else { return };
    if in_dialog && let Ok(call_id) = tx.original.call_id_header() {
        shared.calls.calling.settled(call_id.value()).await;
        if let Some(reply) = of_a_call_out(shared, &tx.original).await {
            return answer(shared, &mut tx, reply).await;
        }
    }
    // It was judged when it came in; its dialog may be gone since.
    match inbound::judge(shared, &tx.original, source) {
        Some((status, headers)) => body::reply(&mut tx, status, headers).await,
        None => handle_in_dialog(shared, tx).await,
    }
}

/// What a request of a called side that has not answered yet is answered with; `None`: it is none, or none that such a call
/// knows.
async fn of_a_call_out(shared: &Shared, request: &Request) -> Option<Reply> {
    let asked = matches!(request.method, Method::Update | Method::Info | Method::Options | Method::Invite);
    let id = DialogId::try_from((request, TransactionRole::Server)).ok().filter(|_| asked)?;
    if unsupported(request).is_some() {
        shared.calls.calling.rings(&id)?;
        return Some(bad_extension(request));
    }
    shared.calls.calling.ask(&id, request).await
}

fn bad_extension(request: &Request) -> Reply {
    let extension = unsupported(request).unwrap_or_default();
    Reply::new(StatusCode::BadExtension, vec![Header::Unsupported(extension.into())])
}

async fn answer(shared: &Shared, tx: &mut Transaction, reply: Reply) {
    let Reply { status, mut headers, body } = reply;
    if status == StatusCode::OK && tx.original.method == Method::Update {
        let peer = inbound::source(tx).map(|source| source.ip());
        headers.push(early::contact(&shared.contact(None, inbound::transport(tx), peer)));
    }
    if let Err(error) = tx.reply_with(status, headers, body).await {
        debug!(%error, "a SIP response could not be sent");
    }
}

/// Waits a moment for the ACK where our answer to the INVITE has none yet.
async fn acknowledged(dialog: &InviteDialog) {
    let comes = async {
        while matches!(dialog.state(), DialogState::WaitAck(..)) {
            sleep(Duration::from_millis(5)).await;
        }
    };
    // Without it the request is answered as what comes too early.
    timeout(ACK_BEFORE, comes).await.ok();
}

async fn handle_in_dialog(shared: &Shared, mut tx: Transaction) {
    let method = tx.original.method;
    let Some(Dialog::Invite(mut dialog)) = shared.dialogs.match_dialog(&tx) else {
        if method != Method::Ack {
            body::reply(&mut tx, StatusCode::CallTransactionDoesNotExist, vec![]).await;
        }
        return;
    };
    let later = || vec![body::retry_after(Duration::from_secs(2))];
    let rings = dialog.role() == TransactionRole::Server && unsupported(&tx.original).is_none();
    if rings && let Some(reply) = early::ringing(shared, &dialog, &tx.original) {
        if reply.status == StatusCode::OK && method == Method::Update {
            early::follow(&dialog, &tx.original);
        }
        return answer(shared, &mut tx, reply).await;
    }
    if !matches!(method, Method::Ack | Method::Bye | Method::PRack) {
        acknowledged(&dialog).await;
    }
    match method {
        Method::Message | Method::Subscribe | Method::Publish | Method::Register => {
            body::reply(&mut tx, StatusCode::MethodNotAllowed, vec![body::allow()]).await;
        }
        Method::PRack => {
            let fits = shared.reliable.acknowledge(&dialog.id().local_tag, &tx.original);
            let status = match fits {
                // A description belongs to an exchange that a reliable response of ours never begins.
                true if !tx.original.body.is_empty() => StatusCode::NotAcceptableHere,
                true => StatusCode::OK,
                false => StatusCode::CallTransactionDoesNotExist,
            };
            body::reply(&mut tx, status, vec![]).await;
        }
        // A second INVITE while the first is open (RFC 3261 section 14.2); the stack would not answer it.
        Method::Invite if !dialog.state().is_confirmed() => {
            body::reply(&mut tx, StatusCode::ServerInternalError, later()).await;
        }
        Method::Invite | Method::Update if unsupported(&tx.original).is_some() => {
            let reply = bad_extension(&tx.original);
            answer(shared, &mut tx, reply).await;
        }
        _ => {
            if let Err(error) = dialog.handle(&mut tx).await {
                debug!(%method, %error, "request in a dialog ended badly");
            }
            let accepted = |response: &Response| response.status_code.kind() == StatusCodeKind::Successful;
            if matches!(method, Method::Invite | Method::Update) && tx.last_response.as_ref().is_some_and(accepted) {
                early::follow(&dialog, &tx.original);
            }
            // The stack leaves some without an answer: an old CSeq, or what comes before the ACK.
            if tx.last_response.is_none() && method != Method::Ack {
                body::reply(&mut tx, StatusCode::ServerInternalError, later()).await;
            }
        }
    }
}
