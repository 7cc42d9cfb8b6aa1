//! What a browser shows of its call while another than itself is the agent: captions of both sides.
//!
//! # Why
//! `builtin:demo` and `builtin:client` talk on the data channel themselves. A page whose agent is a program or a model
//! elsewhere would hear and see nothing; it gets the same frames, those of the agent's own business left out.

use std::convert::Infallible;

use tokio::sync::broadcast::{self, error::RecvError};

use super::frames::print;
use super::relay::Relay;
use crate::call::CallEvent;

/// Tells the browser until the call has no more events; then waits for ever, for the agent's end is told elsewhere.
pub(super) async fn tell(relay: Relay, mut events: broadcast::Receiver<CallEvent>) -> Infallible {
    loop {
        match events.recv().await {
            Ok(event) if is_shown(&event) => {
                if let Some(frame) = relay.frame(&event)
                    && relay.handle().send_caption(print(&frame)).is_err()
                {
                    break;
                }
            }
            // Behind: captions that nobody could read any more are left out.
            Ok(_) | Err(RecvError::Lagged(_)) => {}
            Err(RecvError::Closed) => break,
        }
    }
    std::future::pending().await
}

/// What is seen and heard on the call itself. Errors, keys, marks and holds are the agent's.
fn is_shown(event: &CallEvent) -> bool {
    matches!(
        event,
        CallEvent::Connected
            | CallEvent::FirstAudio { .. }
            | CallEvent::Speaking { .. }
            | CallEvent::TurnEnded { .. }
            | CallEvent::Interrupted { .. }
            | CallEvent::Prompt { .. }
            | CallEvent::Heard(_)
            | CallEvent::Vad { .. }
            | CallEvent::Underrun { .. }
    )
}
