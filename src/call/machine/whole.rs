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
    /// Why nothing can be said of it is told behind why the call takes nothing.
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
