//! The end of a call from our side.

use std::time::Duration;

use rsipstack::{
    dialog::{
        dialog::{DialogState, DialogStateReceiver, TerminatedReason},
        invite_dialog::InviteDialog,
    },
    sip::Header,
};
use tokio::time::timeout;
use tracing::debug;

/// 64 * T1: longer than any transaction of the stack lasts.
const TRANSACTION: Duration = Duration::from_secs(33);

/// Ends the dialog from our side, after the ACK where that is still missing. Whether the dialog was ever confirmed, or
/// its peer has shown otherwise that it is there.
pub(super) async fn bye(
    dialog: &InviteDialog,
    mut states: DialogStateReceiver,
    connected: bool,
    reason: &'static str,
) -> bool {
    let mut acknowledged = connected || dialog.state().is_confirmed();
    if !acknowledged {
        let confirmed = async {
            while let Some(state) = states.recv().await {
                match state {
                    DialogState::Terminated(_, reason) => return !matches!(reason, TerminatedReason::Timeout),
                    state if state.is_confirmed() => return true,
                    _ => {}
                }
            }
            true
        };
        acknowledged = timeout(TRANSACTION, confirmed).await.unwrap_or(false);
    }
    if dialog.state().is_terminated() {
        return acknowledged;
    }
    // Q.850 cause 16: normal clearing.
    let headers = vec![Header::Reason(format!("Q.850;cause=16;text=\"{reason}\"").into())];
    match timeout(TRANSACTION, dialog.bye_with_headers(Some(headers))).await {
        Ok(Ok(())) => {}
        Ok(Err(error)) => debug!(id = %dialog.id(), %error, "BYE failed"),
        Err(_) => debug!(id = %dialog.id(), "BYE was not answered"),
    }
    acknowledged
}
