//! The times of a turn, for traces.

use std::time::{Duration, Instant};

use super::latency::Asked;
use super::outbox::{Outbox, age};
use super::part::Part;
use super::turn::Turn;
use crate::call::event::Stages;
use crate::telemetry::context::TraceContext;
use crate::turn::UtteranceId;

/// What the spans of `turn` are part of: what its text came with, else its call.
pub(super) fn parent<'a>(turn: &'a Turn, out: &'a Outbox) -> Option<&'a TraceContext> {
    turn.style.trace.as_ref().or(out.shared.meta.trace.as_ref())
}

/// When the first packet of a turn left, and what came before.
pub(super) fn trace_first_audio(now: Instant, turn: &Turn, utterance: UtteranceId, codec: &'static str, out: &Outbox) {
    if !tracing::enabled!(target: "antiphon::spans", tracing::Level::TRACE) {
        return;
    }
    let part = turn.parts.iter().find(|part| part.utterance == utterance);
    let at = |field: fn(&Part) -> Option<Instant>| part.and_then(field).map(|at| age(now, at));
    tracing::trace!(
        target: "antiphon::spans",
        kind = "first",
        call = %out.shared.meta.id,
        turn = %turn.id,
        parent = parent(turn, out).map(tracing::field::display),
        leg = out.shared.leg,
        codec,
        utterance = %utterance,
        accepted_us = age(now, turn.accepted),
        submitted_us = at(|part| part.submitted),
        made_us = at(|part| part.made),
    );
}

/// From the caller's last sound to the first packet of the answer.
pub(super) fn trace_answer(
    now: Instant,
    turn: &Turn,
    asked: Asked,
    stages: &Stages,
    codec: &'static str,
    out: &Outbox,
) {
    let us = |time: Duration| time.as_micros() as u64;
    tracing::trace!(
        target: "antiphon::spans",
        kind = "answer",
        call = %out.shared.meta.id,
        turn = %turn.id,
        parent = parent(turn, out).map(tracing::field::display),
        leg = out.shared.leg,
        codec,
        spoke_us = age(now, asked.spoke),
        end_of_turn_us = us(stages.end_of_turn),
        agent_us = us(stages.agent),
        queue_us = us(stages.queue),
        first_audio_us = us(stages.first_audio),
        egress_us = us(stages.egress),
    );
}
