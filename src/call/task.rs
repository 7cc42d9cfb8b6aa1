//! The one select loop of a call.

use std::sync::Arc;

use tokio::sync::{broadcast, mpsc};

use super::handle::Command;
use super::info::Shared;
use super::speech::Speech;
use super::{CallEvent, CallId};
use crate::media::leg::MediaLeg;

/// A call.
pub(super) struct CallTask<L> {
    shared: Arc<Shared>,
    leg: L,
    speech: Arc<dyn Speech>,
    inbox: mpsc::Receiver<Command>,
    all: broadcast::Sender<(CallId, CallEvent)>,
}

impl<L: MediaLeg> CallTask<L> {
    pub(super) fn new(
        shared: Arc<Shared>,
        leg: L,
        speech: Arc<dyn Speech>,
        inbox: mpsc::Receiver<Command>,
        all: broadcast::Sender<(CallId, CallEvent)>,
    ) -> Self {
        Self { shared, leg, speech, inbox, all }
    }

    pub(super) async fn run(self) {}
}
