//! What the tests of the machine's parts share.

use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::mpsc;

use super::Machine;
use super::outbox::Outbox;
use super::speaking::Speaking;
use crate::call::command::Command;
use crate::call::info::Shared;
use crate::call::{CallConfig, CallHandle, CallId, CallMeta, Direction, EndReason, Refusal, Speech, StreamState};
use crate::media::leg::{Codec, MediaFormat};
use crate::media::playout::Playout;
use crate::turn::{SpeechSink, StreamId, Utterance};

pub(super) fn playout() -> Playout {
    Playout::new(&MediaFormat::plain(Codec::Pcmu), 0, 0)
}

/// Why a handle of the call has asked for its end.
pub(crate) fn asked_to_end(handle: &CallHandle) -> Option<EndReason> {
    handle.shared.end_asked()
}

fn meta() -> CallMeta {
    CallMeta {
        id: CallId::random(),
        direction: Direction::Inbound,
        from: "caller".into(),
        to: "called".into(),
        agent: "test".into(),
        headers: Default::default(),
        tenant: "".into(),
        trace: None,
    }
}

pub(super) fn outbox(now: Instant) -> Outbox {
    let (shared, _) = Shared::new(meta(), Arc::new(CallConfig::default()), "test", Codec::Pcmu, now, Duration::ZERO);
    Outbox::new(Arc::new(shared))
}

/// An engine that takes everything and makes nothing.
struct Mute;

impl Speech for Mute {
    fn submit(&self, _utterance: Utterance, _sink: SpeechSink) -> Result<(), Refusal> {
        Ok(())
    }

    fn note(&self, _stream: StreamId, _note: StreamState) {}
}

/// A call on a leg with `format`, of its own; what its handle sends.
pub(crate) fn machine(now: Instant, format: &MediaFormat) -> (Machine, CallHandle, mpsc::Receiver<Command>) {
    machine_with(now, format, Arc::new(Mute))
}

pub(super) fn machine_with(
    now: Instant,
    format: &MediaFormat,
    speech: Arc<dyn Speech>,
) -> (Machine, CallHandle, mpsc::Receiver<Command>) {
    let (meta, config) = (meta(), CallConfig::default());
    let (machine, handle, inbox, _) = Machine::detached(meta, config, ("test", format), speech, now).expect("a codec");
    (machine, handle, inbox)
}

pub(super) fn speaking(now: Instant, out: &Outbox) -> Speaking {
    speaking_with(now, out, Arc::new(Mute))
}

pub(super) fn speaking_with(now: Instant, out: &Outbox, speech: Arc<dyn Speech>) -> Speaking {
    let (sink, _) = tokio::sync::mpsc::channel(1);
    Speaking::new(&out.shared, &MediaFormat::plain(Codec::Pcmu), speech, sink, 0, now).expect("a codec")
}
