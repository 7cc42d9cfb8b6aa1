//! Utterances whose voice is on another machine: they wait until it was fetched, and what follows in their stream behind them,
//! for a stream is heard in order.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use super::{Inner, LOADING, Refused, RefusedReason, lock};
use crate::turn::{SpeechEvent, SpeechSink, StreamId, Utterance, UtteranceEnd};

/// Utterances of a stream that may wait.
const BEHIND: usize = 256;
/// Streams that may.
const STREAMS: usize = 1_024;
/// The kind of voice that speaks with files.
const WITH_FILES: &str = "cosyvoice3";
/// Longest wait for a voice; then its utterances say that there is none.
const FETCHED: Duration = Duration::from_secs(10);

/// What waits, by stream.
#[derive(Default)]
pub(super) struct Awaited(Mutex<HashMap<StreamId, VecDeque<(Utterance, SpeechSink)>>>);

impl Inner {
    /// Takes `utterance` if it has to wait; `None`: it need not.
    pub(super) fn awaits(self: &Arc<Self>, utterance: &Utterance, sink: &SpeechSink) -> Option<Result<(), Refused>> {
        let library = self.library.get()?;
        let mut streams = lock(&self.awaited.0);
        if let Some(queue) = streams.get_mut(&utterance.stream) {
            if queue.len() >= BEHIND {
                return Some(Err(Refused { reason: RefusedReason::Full, retry_after: LOADING }));
            }
            queue.push_back((utterance.clone(), sink.clone()));
            return Some(Ok(()));
        }
        let name = utterance.voice.clone()?;
        let content = library.content(&name)?;
        let devices = self.devices();
        let mut ready = devices.values().filter(|device| device.is_ready());
        // Where no voice speaks with files there is no use for one.
        let wanted = ready.clone().any(|device| device.kind() == Some(WITH_FILES));
        if library.has(&name, &content) || !wanted || ready.any(|device| device.has_copy(&content)) {
            return None;
        }
        if streams.len() >= STREAMS {
            return Some(Err(Refused { reason: RefusedReason::Full, retry_after: LOADING }));
        }
        let (stream, inner, library) = (utterance.stream, self.clone(), library.clone());
        let fetched = async move {
            let fetched = tokio::time::timeout(FETCHED, library.fetch(&name, &content)).await;
            match fetched.unwrap_or_else(|_| Err("no machine gives it in time".to_owned())) {
                Ok(()) => {
                    tracing::info!(voice = name, content, "a voice was fetched from another machine");
                    inner.refresh_voices().await;
                }
                Err(error) => tracing::error!(voice = name, error, "a voice of another machine cannot be had"),
            }
            inner.go_on(stream);
        };
        if let Err(error) = self.hub.run(fetched) {
            tracing::error!(error, "a voice cannot be fetched");
            return None;
        }
        streams.insert(stream, VecDeque::from([(utterance.clone(), sink.clone())]));
        Some(Ok(()))
    }

    /// Speaks what has waited.
    fn go_on(&self, stream: StreamId) {
        loop {
            let next = {
                let mut streams = lock(&self.awaited.0);
                let next = streams.get_mut(&stream).and_then(VecDeque::pop_front);
                if next.is_none() {
                    streams.remove(&stream);
                }
                next
            };
            let Some((utterance, sink)) = next else { return };
            if let Err(Refused { retry_after, .. }) = self.speak_anew(&utterance, &sink) {
                let end = SpeechEvent::End { utterance: utterance.id, how: UtteranceEnd::Refused { retry_after } };
                // overflow: drops; a sink that is full before its first event is not read by anybody
                let _ = sink.try_send(end);
            }
        }
    }
}
