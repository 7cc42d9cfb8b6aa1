//! Which trace a call and a turn belong to, and how that is said to others: W3C Trace Context
//! (<https://www.w3.org/TR/trace-context/>), the header `traceparent`.
//!
//! A client that asks for a call over HTTP may say in which trace that happens; the call is then part of it, its agent, model and
//! webhook are told so, and a turn belongs to what the agent says of its text, else to the call. `tracestate` is not passed on,
//! which the standard allows.
//!
//! # Why
//! *An implicit context of the task* ([`within`]): between the HTTP handler that reads the header and the part that begins the
//! call lie three layers that have nothing to say about it.
//!
//! *Ids by hash* of call and turn: parts that know nothing of each other name the same span.

use std::collections::HashMap;
use std::fmt;

use opentelemetry::Context;
use opentelemetry::propagation::TextMapPropagator as _;
use opentelemetry::trace::{SpanContext, SpanId, TraceContextExt as _, TraceFlags, TraceId, TraceState};
use opentelemetry_sdk::propagation::TraceContextPropagator;
use sha2::{Digest, Sha256};

use super::otlp::TARGET;

/// The header, and the field of frames.
pub const TRACEPARENT: &str = "traceparent";

/// A span that others refer to.
#[derive(Clone, PartialEq)]
pub struct TraceContext(SpanContext);

impl TraceContext {
    /// What a `traceparent` says; `None`: it is none, and a trace begins here.
    pub fn parse(traceparent: &str) -> Option<Self> {
        let carrier = HashMap::from([(TRACEPARENT.to_owned(), traceparent.trim().to_owned())]);
        let context = TraceContextPropagator::new().extract_with_context(&Context::new(), &carrier);
        let span = context.span().span_context().clone();
        span.is_valid().then_some(Self(span))
    }

    /// The span of `call`, in the trace of `parent` where there is one.
    pub(super) fn of_call(parent: Option<&Self>, call: &str) -> Self {
        let trace = parent.map_or_else(|| trace_id(call, ""), |parent| parent.0.trace_id());
        let flags = parent.map_or(TraceFlags::SAMPLED, |parent| parent.0.trace_flags());
        Self(SpanContext::new(trace, span_id(call, "", "call"), flags, false, TraceState::NONE))
    }

    pub(super) fn span(&self) -> &SpanContext {
        &self.0
    }
}

impl fmt::Display for TraceContext {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (trace, span, flags) = (self.0.trace_id(), self.0.span_id(), self.0.trace_flags());
        write!(f, "00-{trace:032x}-{span:016x}-{:02x}", u8::from(flags.is_sampled()))
    }
}

impl fmt::Debug for TraceContext {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// The trace of a turn of `call`, or of the call itself (`""`), that is part of no other.
pub(super) fn trace_id(call: &str, turn: &str) -> TraceId {
    TraceId::from_bytes(first(hash(call, turn, "")))
}

/// The span `name` of a turn.
pub(super) fn span_id(call: &str, turn: &str, name: &str) -> SpanId {
    SpanId::from_bytes(first(hash(call, turn, name)))
}

fn hash(call: &str, turn: &str, what: &str) -> [u8; 32] {
    let mut hash = Sha256::new();
    for part in [call, "\0", turn, "\0", what] {
        hash.update(part);
    }
    hash.finalize().into()
}

fn first<const N: usize>(hash: [u8; 32]) -> [u8; N] {
    std::array::from_fn(|at| hash[at])
}

tokio::task_local! {
    static CURRENT: Option<TraceContext>;
}

/// Runs `work` as part of the trace that `context` names.
pub async fn within<F: Future>(context: Option<TraceContext>, work: F) -> F::Output {
    CURRENT.scope(context, work).await
}

/// What this task works for.
pub fn current() -> Option<TraceContext> {
    CURRENT.try_with(Clone::clone).ok().flatten()
}

/// The context of a call that begins in this task. Without a collector there is no span of ours to refer to: then others get
/// what this task works for as it came, or nothing.
pub fn of_new_call(call: &str) -> Option<TraceContext> {
    let parent = current();
    if !tracing::enabled!(target: TARGET, tracing::Level::TRACE) {
        return parent;
    }
    if let Some(parent) = &parent {
        tracing::trace!(target: "antiphon::spans", kind = "parent", call, parent = %parent);
    }
    Some(TraceContext::of_call(parent.as_ref(), call))
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIVEN: &str = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";

    #[test]
    fn a_context_is_read_and_written_as_the_standard_says_and_garbage_is_none() {
        let context = TraceContext::parse(GIVEN).expect("valid");
        assert_eq!(context.to_string(), GIVEN);
        let unsampled = GIVEN.replace("-01", "-00");
        assert_eq!(TraceContext::parse(&unsampled).expect("valid").to_string(), unsampled);
        // A later version may say more after the flags.
        assert!(TraceContext::parse(&format!("cc{}-more", &GIVEN[2..])).is_some());
        let zero = "00-00000000000000000000000000000000-b7ad6b7169203331-01";
        for bad in ["", "00", "ff-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", zero, "00-x-y-z", "🙂"] {
            assert_eq!(TraceContext::parse(bad), None, "{bad}");
        }
    }

    #[tokio::test]
    async fn a_call_belongs_to_the_trace_of_the_request_that_began_it() {
        let given = TraceContext::parse(GIVEN);
        let (inside, passed) = within(given.clone(), async { (current(), of_new_call("c")) }).await;
        assert_eq!((&inside, &passed), (&given, &given), "without a collector it is passed on as it came");
        assert_eq!((current(), of_new_call("c")), (None, None), "and it ends with the request");
        let own = TraceContext::of_call(given.as_ref(), "c");
        assert!(own.to_string().starts_with(&GIVEN[..36]) && own != given.expect("valid"), "{own}");
        assert_ne!(TraceContext::of_call(None, "c"), TraceContext::of_call(None, "d"));
    }
}
