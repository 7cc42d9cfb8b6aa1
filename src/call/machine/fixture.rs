//! What the tests of the machine's parts share.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::outbox::Outbox;
use crate::call::info::Shared;
use crate::call::{CallConfig, CallId, CallMeta, Direction};
use crate::media::leg::{Codec, MediaFormat};
use crate::media::playout::Playout;

pub(super) fn format(codec: Codec) -> MediaFormat {
    MediaFormat { codec, payload_type: 0, telephone_event: None, opus_fec: false, continuous: false }
}

pub(super) fn playout() -> Playout {
    Playout::new(&format(Codec::Pcmu), 0, 0)
}

pub(super) fn outbox(now: Instant) -> Outbox {
    let meta = CallMeta {
        id: CallId::random(),
        direction: Direction::Inbound,
        from: "caller".into(),
        to: "called".into(),
        agent: "test".into(),
        headers: Default::default(),
        tenant: "".into(),
    };
    let (shared, _) = Shared::new(meta, Arc::new(CallConfig::default()), "test", Codec::Pcmu, now, Duration::ZERO);
    Outbox::new(Arc::new(shared))
}
