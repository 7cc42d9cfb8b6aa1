//! A whole turn, read before its call takes it.
//!
//! Pure but for the clock: what is said of a text depends on nothing that the call knows.
//!
//! # Why
//! A text is read on the thread that asks for it, not on its call's: a long one takes milliseconds, in which the packets of
//! all calls of a shard would wait. And while a short one is read, in a tenth of a millisecond where the processor did
//! something else before, the threads of the call and of a device wake up.

use super::turn::Turn;
use crate::call::TurnId;
use crate::call::handle::{SpeakError, TurnRequest};
use crate::call::segment::SegmentConfig;
use crate::clock;
use crate::turn::checked_speed;

/// What a turn asks for, and what is said of it.
#[derive(Debug)]
pub struct WholeTurn {
    /// As it was asked for.
    pub request: TurnRequest,
    /// A mistake in it is told by a call that takes turns; one that is over or ending says that first.
    pub(super) turn: Result<Box<Turn>, SpeakError>,
}

impl WholeTurn {
    /// Reads the text of `request`. The call refuses one with a mistake ([`SpeakError::Invalid`]), and one of which nothing can
    /// be said ([`SpeakError::Empty`]).
    pub fn read(request: TurnRequest, config: &SegmentConfig) -> Self {
        let turn = read(&request, config);
        Self { request, turn }
    }
}

fn read(request: &TurnRequest, config: &SegmentConfig) -> Result<Box<Turn>, SpeakError> {
    checked_speed(request.style.speed).map_err(SpeakError::Invalid)?;
    let id = request.id.clone().unwrap_or_else(TurnId::next);
    let turn = Turn::whole(id, &request.text, request.style.clone(), config, clock::now());
    let turn = turn.map_err(SpeakError::Invalid)?;
    if turn.parts.is_empty() { Err(SpeakError::Empty) } else { Ok(Box::new(turn)) }
}

#[cfg(test)]
mod tests {
    use std::pin::pin;
    use std::sync::{Arc, Mutex};
    use std::task::{Context, Poll, Waker};

    use tokio::sync::mpsc;

    use super::*;
    use crate::call::command::Command;
    use crate::call::machine::fixture;
    use crate::call::{Refusal, Speech, StreamState};
    use crate::media::leg::{Codec, MediaFormat};
    use crate::turn::{SpeechSink, StreamId, Utterance};

    /// An engine whose call is over when it is told of a text.
    struct Parting(Mutex<Option<mpsc::Receiver<Command>>>);

    impl Speech for Parting {
        fn submit(&self, _utterance: Utterance, _sink: SpeechSink) -> Result<(), Refusal> {
            Ok(())
        }

        fn rouse(&self) {
            self.0.lock().unwrap().take();
        }

        fn note(&self, _stream: StreamId, _note: StreamState) {}
    }

    #[test]
    fn a_turn_takes_the_last_place_that_a_call_has_for_commands_and_is_refused_where_there_is_none() {
        let (_machine, handle, mut inbox) = fixture::machine(clock::now(), &MediaFormat::plain(Codec::Pcmu));
        while handle.mark("m").is_ok() {}
        let mut context = Context::from_waker(Waker::noop());
        let refused = pin!(handle.speak(TurnRequest::new("Hello."))).poll(&mut context);
        assert_eq!(refused, Poll::Ready(Err(SpeakError::Busy)));
        inbox.try_recv().expect("a mark");
        let mut taken = pin!(handle.speak(TurnRequest::new("Hello.")));
        assert_eq!(taken.as_mut().poll(&mut context), Poll::Pending);
        let last = std::iter::from_fn(|| inbox.try_recv().ok()).last();
        assert!(matches!(last, Some(Command::Speak { turn, .. }) if turn.request.text == "Hello."));
        assert_eq!(handle.info().backlog_bytes, 6, "what was refused is given back");
    }

    #[test]
    fn a_turn_that_is_read_while_its_call_ends_is_told_so() {
        let parting = Arc::new(Parting(Mutex::new(None)));
        let format = MediaFormat::plain(Codec::Pcmu);
        let (_machine, handle, inbox) = fixture::machine_with(clock::now(), &format, parting.clone());
        *parting.0.lock().unwrap() = Some(inbox);
        let told = pin!(handle.speak(TurnRequest::new("Hello."))).poll(&mut Context::from_waker(Waker::noop()));
        assert_eq!(told, Poll::Ready(Err(SpeakError::Ended)));
    }
}
