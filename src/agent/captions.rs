//! What a browser shows of its call while another than itself is the agent: captions of both sides.
//!
//! # Why
//! `builtin:demo` and `builtin:client` talk on the data channel themselves. A page whose agent is a program or a model
//! elsewhere would hear and see nothing; it gets the same frames, those of the agent's own business left out.

use std::convert::Infallible;

use tokio::sync::broadcast::{self, error::RecvError};

use super::frames::print;
use super::relay::Relay;
use crate::call::{CallEvent, SpeakError};

/// Tells the browser until the call has no more events; then waits for ever, for the agent's end is told elsewhere.
pub(super) async fn tell(relay: Relay, mut events: broadcast::Receiver<CallEvent>) -> Infallible {
    loop {
        match events.recv().await {
            Ok(event) if is_shown(&event) => {
                let Some(frame) = relay.frame(&event) else { continue };
                if is_over(&relay.handle().send_caption(print(&frame))) {
                    break;
                }
            }
            // Behind: captions that come too late to be read are left out.
            Ok(_) | Err(RecvError::Lagged(_)) => {}
            Err(RecvError::Closed) => break,
        }
    }
    std::future::pending().await
}

/// Whether no caption will be taken any more. A call that has no room now loses this one.
fn is_over(taken: &Result<(), SpeakError>) -> bool {
    matches!(taken, Err(SpeakError::Ended))
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_busy_call_loses_one_caption_and_an_ended_one_takes_no_more() {
        assert!(!is_over(&Err(SpeakError::Busy)));
        assert!(!is_over(&Ok(())));
        assert!(is_over(&Err(SpeakError::Ended)));
    }
}
