//! When each packet of a call leaves and with which numbers: the pacer and the sending half of RTP.
//!
//! Owns the send schedule, sequence numbers and timestamps of one stream, and the account of what was sent of
//! each utterance. Never encodes, sends, or reads a clock. Contract: after every change call
//! [`Playout::poll`] until it returns nothing, then again at [`Playout::deadline`].
//!
//! Time is cut into slots of 20 ms from an anchor: slot `n` is due at `anchor + n * 20 ms`, never "20 ms after
//! the last one". A slot carries speech, a telephone event, silence, or nothing.
//!
//! # Why
//! - The first frame of a spurt anchors it and leaves at once: waiting for a tick would add 10 ms on average.
//! - A stream that never stops lets its slots of silence pass once speech is on its way, so that this too leaves at once and not
//!   with the next slot: 10 ms sooner on average. The timestamp moves by the time that passed, so the peer plays it sooner,
//!   too, and sees neither loss nor jitter. Only behind 200 ms of silence, as concealment at the far end goes on from what it
//!   heard last, and for 100 ms at most: most voices make their first sound in less, and nobody takes that for a broken path.
//! - A late wake sends at most two frames together. More would overflow small jitter buffers at the far end,
//!   which discard what a gap would merely delay; so after a longer stall the schedule moves on instead.
//! - When speech comes too late nothing is made up: the next frame begins a new spurt with marker bit and a
//!   timestamp moved by the time that passed, which is what receivers expect of silence suppression
//!   (RFC 3551 section 4.1).
//! - "Heard" is what this cursor has passed. What was queued is not heard.
//! - A peer that would rather be sent no silence (Opus DTX, RFC 7587 section 3.1.3) is sent the first 200 ms of a pause and then
//!   a frame every 400 ms, also in mid-speech. Sequence numbers count what is sent, timestamps what passes; the sound after the
//!   pause has the marker bit. What is left out counts as heard with the packet before it.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;

use super::dtmf;
use super::leg::{Codec, MediaFormat};
use crate::audio::FRAME;
use crate::turn::UtteranceId;

/// How many encoded frames are worth keeping ready: one that is due and one for a late wake. The rest of the
/// speech stays PCM, so that a long chunk is not encoded at once in front of the other calls of the shard.
pub const PREPARED: usize = 2;

/// Frames of a pause that are sent before the rest is left out: concealment at the far end goes on from silence then, and short
/// pauses between words stay as they are. libopus sends as many.
const HANGOVER: u32 = 10;

/// So long a stream that never stops waits for speech that is on its way.
const PATIENCE: Duration = Duration::from_millis(100);

/// Of what is left out one frame in so many is sent all the same: paths stay open.
const REFRESH: u32 = 20;

/// Sent packets that may wait to be acknowledged: more than a minute, when reports come every five seconds.
const LOG: usize = 4_096;

/// One encoded frame.
#[derive(Clone, Debug, PartialEq)]
pub struct Frame {
    /// The payload.
    pub payload: Bytes,
    /// Whose speech it is; `None` for what is of no turn (a fade, trailing silence).
    pub owner: Option<UtteranceId>,
    /// Samples of speech at [`crate::audio::RATE`] in it, without padding.
    pub samples: u32,
    /// Nobody would hear whether it is sent.
    pub quiet: bool,
    /// The same sound, where somebody listens in.
    pub tap: Option<Tapped>,
}

/// A frame for those who listen in.
#[derive(Clone, Debug, PartialEq)]
pub struct Tapped {
    /// At 8 kHz.
    pub narrow: Arc<[i16]>,
    /// At 16 kHz, where somebody wants that.
    pub wide: Option<Arc<[i16]>>,
}

/// A packet that leaves now.
#[derive(Clone, Debug, PartialEq)]
pub struct Departure {
    /// RTP payload type.
    pub payload_type: u8,
    /// RTP marker bit.
    pub marker: bool,
    /// RTP sequence number; of the packet before it where it is left out.
    pub sequence: u16,
    /// RTP timestamp.
    pub timestamp: u32,
    /// What it carries.
    pub body: Body,
    /// Nothing is sent: it is silence, of which the peer would rather have none.
    pub left_out: bool,
    /// How long after its due time it leaves; zero for the first of a spurt.
    pub late: Duration,
    /// Set when the wake came so late that the schedule had to move on: how long the listener waited.
    pub stalled: Option<Duration>,
    /// Set on the first frame of speech of a spurt: playing time counts from here.
    pub anchored: Option<Instant>,
    /// Set on the first frame of speech after an underrun: how long the listener waited.
    pub underrun: Option<Duration>,
}

/// What a packet carries.
#[derive(Clone, Debug, PartialEq)]
pub enum Body {
    /// Speech.
    Speech(Frame),
    /// A telephone event.
    Event(Bytes),
    /// A frame of silence, to be encoded by the caller.
    Silence,
}

/// What was sent of one utterance, in samples at [`crate::audio::RATE`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Sent {
    /// Handed to the leg.
    pub sent: u64,
    /// Of these, acknowledged by the peer's reports.
    pub acked: u64,
}

/// What becomes of a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fate {
    Sent,
    /// Silence that is sent in the middle of what is left out.
    Refreshes,
    LeftOut,
}

/// The schedule of one stream.
#[derive(Debug)]
pub struct Playout {
    payload_type: u8,
    clock_rate: u32,
    continuous: bool,
    /// The peer would rather be sent no silence.
    dtx: bool,
    /// Slots of silence in a row.
    quiet: u32,
    /// As if continuous, for as long as something else fills silence.
    filled: bool,
    event_type: Option<u8>,
    /// Extended sequence number of the next packet.
    sequence: u64,
    /// Timestamps count from here, so that they never drift from the clock.
    origin: Option<(Instant, u32)>,
    spurt: Option<Spurt>,
    frames: VecDeque<Frame>,
    tones: dtmf::Sender,
    event_timestamp: u32,
    started: bool,
    /// Speech is frozen.
    paused: bool,
    /// Nothing at all leaves.
    muted: bool,
    expecting: bool,
    /// Since when speech is on its way to a silent listener.
    coming: Option<Instant>,
    /// Since when a listener waits for speech that was due.
    dry_since: Option<Instant>,
    /// The next packet follows a hole in the timeline.
    discontinuity: bool,
    /// What the departure under way tells of a late wake.
    stalled: Option<Duration>,
    /// The next frame of speech is the first after none: the stream's playing time counts from it.
    silent: bool,
    /// When work last arrived, for the deadline of an idle stream.
    ready_since: Option<Instant>,
    log: VecDeque<Logged>,
    sent: HashMap<UtteranceId, Sent>,
}

#[derive(Clone, Copy, Debug)]
struct Spurt {
    anchor: Instant,
    /// Slots used.
    slots: u64,
}

impl Spurt {
    fn due(&self) -> Instant {
        // u32 slots of 20 ms are 2.7 years; a call is ended long before.
        self.anchor + FRAME * self.slots.min(u64::from(u32::MAX)) as u32
    }
}

#[derive(Clone, Copy, Debug)]
struct Logged {
    sequence: u64,
    owner: Option<UtteranceId>,
    samples: u32,
}

impl Playout {
    /// A stream of `format` whose first packet has `sequence` and `timestamp`; both should be random
    /// (RFC 3550 section 5.1). Nothing leaves before [`Playout::start`].
    pub fn new(format: &MediaFormat, sequence: u16, timestamp: u32) -> Self {
        let mut playout = Self {
            payload_type: 0,
            clock_rate: 8_000,
            continuous: false,
            dtx: false,
            quiet: 0,
            filled: false,
            event_type: None,
            // One round ahead, so that acknowledgements of the first packets stay positive.
            sequence: u64::from(sequence) + (1 << 16),
            origin: None,
            spurt: None,
            frames: VecDeque::with_capacity(PREPARED + 2),
            tones: dtmf::Sender::new(8_000),
            event_timestamp: timestamp,
            started: false,
            paused: false,
            muted: false,
            expecting: false,
            coming: None,
            dry_since: None,
            discontinuity: true,
            stalled: None,
            silent: true,
            ready_since: None,
            log: VecDeque::new(),
            sent: HashMap::new(),
        };
        playout.set_format(format);
        playout
    }

    /// The peer agreed to another format: frames made for the old one are dropped, numbers go on. A change of
    /// the clock rate moves the timestamps' origin.
    pub fn set_format(&mut self, format: &MediaFormat) {
        if self.clock_rate != format.codec.clock_rate()
            && let (Some((at, _)), Some(spurt)) = (self.origin, self.spurt)
        {
            let timestamp = self.timestamp_at(spurt.due());
            self.origin = Some((spurt.due().max(at), timestamp));
        }
        self.payload_type = format.payload_type;
        self.clock_rate = format.codec.clock_rate();
        self.continuous = format.continuous;
        self.dtx = format.opus_dtx && format.codec == Codec::Opus;
        self.event_type = format.telephone_event.map(|(payload_type, _)| payload_type);
        self.tones = dtmf::Sender::new(format.telephone_event.map_or(8_000, |(_, rate)| rate));
        self.frames.clear();
    }

    /// Media may flow from `now` on.
    pub fn start(&mut self, now: Instant) {
        self.started = true;
        self.ready_since = Some(now);
        self.origin.get_or_insert((now, self.event_timestamp));
        if self.never_stops() && self.spurt.is_none() {
            self.begin_spurt(now);
        }
    }

    /// Adds a frame of speech after those that wait.
    pub fn push(&mut self, now: Instant, frame: Frame) {
        self.frames.push_back(frame);
        self.ready_since = Some(now);
    }

    /// Sends `digits` in the next slots, before speech that waits. `false`: events were not agreed.
    pub fn dial(&mut self, now: Instant, digits: &str) -> bool {
        if self.event_type.is_none() {
            return false;
        }
        self.tones.dial(digits);
        self.ready_since = Some(now);
        true
    }

    /// Barge-in: drops the frames of utterances that are not to be kept. Nothing of them leaves any more.
    pub fn flush(&mut self, mut keep: impl FnMut(UtteranceId) -> bool) {
        self.frames.retain(|frame| frame.owner.is_some_and(&mut keep));
        self.expecting = false;
        self.dry_since = None;
    }

    /// Says whether speech of what sounds now is still to come: only then is running dry an underrun.
    pub fn expect_more(&mut self, expecting: bool) {
        self.expecting = expecting;
        if !expecting {
            self.dry_since = None;
        }
    }

    /// Says whether speech is on its way to a listener who hears none.
    pub fn await_speech(&mut self, now: Instant, coming: bool) {
        if coming != self.coming.is_some() {
            self.coming = coming.then_some(now);
            self.ready_since = Some(now);
        }
    }

    /// Freezes speech (`true`) or lets it go on. A continuous stream carries silence meanwhile.
    pub fn pause(&mut self, now: Instant, paused: bool) {
        self.paused = paused;
        self.dry_since = None;
        self.ready_since = Some(now);
    }

    /// Stops (`true`) or resumes sending altogether, as a peer that holds us wants it.
    pub fn mute(&mut self, now: Instant, muted: bool) {
        if self.muted == muted {
            return;
        }
        self.muted = muted;
        self.dry_since = None;
        self.ready_since = Some(now);
        self.spurt = None;
        if !muted && self.started && self.never_stops() {
            self.begin_spurt(now);
        }
    }

    /// Has every slot carry something (`true`), whatever was agreed: the caller of [`Playout::poll`] fills silence with
    /// sound.
    pub fn fill(&mut self, now: Instant, filled: bool) {
        self.filled = filled;
        self.ready_since = Some(now);
        if filled && self.started && !self.muted && self.spurt.is_none() {
            self.begin_spurt(now);
        }
    }

    /// The packet that leaves now, if one is due.
    pub fn poll(&mut self, now: Instant) -> Option<Departure> {
        if !self.started || self.muted {
            return None;
        }
        loop {
            let speech = !self.paused && !self.frames.is_empty();
            let nothing = !speech && self.tones.is_idle();
            if self.spurt.is_none() {
                if nothing && (!self.never_stops() || self.patient_until().is_some_and(|until| now < until)) {
                    return None;
                }
                self.begin_spurt(now);
            }
            let mut spurt = self.spurt?;
            let due = spurt.due();
            let late = now.checked_duration_since(due)?;
            let waits = self.quiet >= HANGOVER && self.patient_until().is_some_and(|until| due < until);
            if nothing && (!self.never_stops() || waits) {
                self.spurt = None;
                self.silent = true;
                if self.expecting && !self.paused {
                    self.dry_since.get_or_insert(due);
                }
                return None;
            }
            self.stalled = None;
            if late >= FRAME * 2 {
                self.stalled = Some(late - FRAME);
                // This slot becomes due one frame ago, so that it and the next leave together and no more.
                spurt.anchor += late - FRAME;
                self.spurt = Some(spurt);
                self.discontinuity = true;
            }
            let timestamp = self.timestamp_at(spurt.due());
            self.spurt = Some(Spurt { slots: spurt.slots + 1, ..spurt });
            match self.tones.pop() {
                Some(dtmf::Slot::Event { first, payload }) => return Some(self.event(first, payload, timestamp, late)),
                Some(dtmf::Slot::Quiet) if !self.never_stops() => {
                    self.discontinuity = true;
                    continue;
                }
                Some(dtmf::Slot::Quiet) => return Some(self.silence(timestamp, late)),
                None if speech => return self.speech(due.max(spurt.due()), timestamp, late),
                None => {
                    self.silent = true;
                    if self.expecting && !self.paused {
                        self.dry_since.get_or_insert(due);
                    }
                    return Some(self.silence(timestamp, late));
                }
            }
        }
    }

    /// When to poll again at the latest; `None`: when something changes.
    pub fn deadline(&self) -> Option<Instant> {
        if !self.started || self.muted {
            return None;
        }
        match &self.spurt {
            Some(spurt) => Some(spurt.due()),
            None if !self.tones.is_idle() || (!self.paused && !self.frames.is_empty()) => self.ready_since,
            None if self.never_stops() => self.patient_until().or(self.ready_since),
            None => None,
        }
    }

    /// Whether another encoded frame is worth having.
    pub fn wants_frame(&self) -> bool {
        self.frames.len() < PREPARED
    }

    /// Whether no frame of speech waits.
    pub fn is_empty(&self) -> bool {
        self.frames.is_empty()
    }

    /// Whether digits are being sent.
    pub fn is_dialing(&self) -> bool {
        !self.tones.is_idle()
    }

    /// Takes a receiver report: everything up to `highest` has arrived, as far as the peer can tell.
    pub fn acknowledge(&mut self, highest: u32) {
        // The peer counts rounds of its own, so only the low half is comparable: the nearest number not
        // ahead of what was sent.
        let last = self.sequence - 1;
        let behind = (last as u16).wrapping_sub(highest as u16);
        if behind > u16::MAX / 2 {
            return;
        }
        let highest = last.saturating_sub(u64::from(behind));
        while let Some(logged) = self.log.pop_front_if(|logged| logged.sequence <= highest) {
            if let Some(sent) = logged.owner.and_then(|owner| self.sent.get_mut(&owner)) {
                sent.acked += u64::from(logged.samples);
            }
        }
    }

    /// What was sent of `utterance`.
    pub fn sent(&self, utterance: UtteranceId) -> Sent {
        self.sent.get(&utterance).copied().unwrap_or_default()
    }

    /// Closes the account of `utterance`.
    pub fn forget(&mut self, utterance: UtteranceId) {
        self.sent.remove(&utterance);
    }

    fn never_stops(&self) -> bool {
        self.continuous || self.filled
    }

    /// How long slots of silence may pass, as speech is on its way.
    fn patient_until(&self) -> Option<Instant> {
        self.coming.filter(|_| !self.filled && !self.paused).map(|since| since + PATIENCE)
    }

    fn begin_spurt(&mut self, now: Instant) {
        self.spurt = Some(Spurt { anchor: now, slots: 0 });
        self.discontinuity = true;
        self.quiet = 0;
    }

    /// What becomes of the next slot.
    fn fate(&mut self, quiet: bool) -> Fate {
        self.quiet = if quiet { self.quiet.saturating_add(1) } else { 0 };
        let left_out = self.quiet.saturating_sub(HANGOVER);
        match left_out {
            0 => Fate::Sent,
            _ if !self.dtx || self.filled => Fate::Sent,
            n if n.is_multiple_of(REFRESH) => Fate::Refreshes,
            _ => Fate::LeftOut,
        }
    }

    /// Whether what meets that fate has the marker bit.
    fn marker(&mut self, fate: Fate) -> bool {
        self.discontinuity |= fate == Fate::LeftOut;
        fate == Fate::Sent && std::mem::take(&mut self.discontinuity)
    }

    fn timestamp_at(&self, at: Instant) -> u32 {
        let Some((origin, timestamp)) = self.origin else { return self.event_timestamp };
        let passed = at.saturating_duration_since(origin).as_nanos();
        // Wraps as RTP timestamps do.
        timestamp.wrapping_add((passed * u128::from(self.clock_rate) / 1_000_000_000) as u32)
    }

    fn number(&mut self, owner: Option<UtteranceId>, samples: u32, fate: Fate) -> u16 {
        // What is left out is as good as there once the packet before it is.
        let sequence = self.sequence - u64::from(fate == Fate::LeftOut);
        self.sequence = sequence + 1;
        if self.log.len() == LOG {
            self.log.pop_front();
        }
        self.log.push_back(Logged { sequence, owner, samples });
        sequence as u16
    }

    fn speech(&mut self, due: Instant, timestamp: u32, late: Duration) -> Option<Departure> {
        let frame = self.frames.pop_front()?;
        if let Some(owner) = frame.owner {
            self.sent.entry(owner).or_default().sent += u64::from(frame.samples);
        }
        let fate = self.fate(frame.quiet);
        Some(Departure {
            payload_type: self.payload_type,
            marker: self.marker(fate),
            sequence: self.number(frame.owner, frame.samples, fate),
            timestamp,
            left_out: fate == Fate::LeftOut,
            late,
            stalled: self.stalled.take(),
            anchored: (frame.owner.is_some() && std::mem::take(&mut self.silent)).then_some(due),
            underrun: self.dry_since.take().map(|since| due.saturating_duration_since(since)),
            body: Body::Speech(frame),
        })
    }

    fn silence(&mut self, timestamp: u32, late: Duration) -> Departure {
        let fate = self.fate(true);
        Departure {
            payload_type: self.payload_type,
            marker: self.marker(fate),
            sequence: self.number(None, 0, fate),
            timestamp,
            left_out: fate == Fate::LeftOut,
            body: Body::Silence,
            late,
            stalled: self.stalled.take(),
            anchored: None,
            underrun: None,
        }
    }

    fn event(&mut self, first: bool, payload: Bytes, timestamp: u32, late: Duration) -> Departure {
        if first {
            self.event_timestamp = timestamp;
        }
        // Audio after the event is a talk spurt of its own (RFC 4733 section 2.2.1 sets the marker per event).
        self.discontinuity = true;
        self.quiet = 0;
        Departure {
            payload_type: self.event_type.unwrap_or(self.payload_type),
            marker: first,
            sequence: self.number(None, 0, Fate::Sent),
            timestamp: self.event_timestamp,
            left_out: false,
            body: Body::Event(payload),
            late,
            stalled: self.stalled.take(),
            anchored: None,
            underrun: None,
        }
    }
}

#[cfg(test)]
mod tests;
