//! The media leg of a browser call: Opus (or G.722 or G.711, of peers without it) over SRTP and text on the data channel `agent`.
//!
//! Owns one end of a peer connection that [`crate::webrtc`] negotiated. Never negotiates, never touches a socket.
//!
//! # What runs where
//! The connection's driver (ICE, DTLS, SRTP, SCTP; one task) is born on the control runtime, where the offer is
//! answered. [`MediaLeg::attach`] moves it to the shard that calls it, so from then on a packet goes from the
//! call task to the driver by a wake on the same thread, and from the driver straight into the kernel. Incoming
//! datagrams are read by one task on the control runtime for all sessions and cross to the shard in a queue.
//!
//! # Why
//! The leg polls the connection's own event queues rather than have a task copy them: nothing is spawned for a
//! call beyond its driver, and every queue on the way is one of the bounded queues of `webrtc`.

mod driver;
mod reports;
pub mod rtvi;
mod succession;

use std::collections::VecDeque;
use std::future::{Future, pending};
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use ::webrtc::data_channel::{DataChannel, DataChannelEvent};
use ::webrtc::error::Error;
use ::webrtc::media_stream::track_local::TrackLocal;
use ::webrtc::media_stream::track_local::static_rtp::TrackLocalStaticRTP;
use ::webrtc::media_stream::track_remote::{TrackRemote, TrackRemoteEvent};
use ::webrtc::peer_connection::PeerConnection;
use futures_util::FutureExt;
use rtc::rtp;
use tokio::sync::{mpsc, watch};
use tokio::time::sleep_until;

use crate::clock;
use crate::media::leg::{Arrivals, InPacket, LegEnd, LegEvent, MediaFormat, MediaLeg, OutPacket, PeerReport};
use crate::media::packets::{self, Packets};
use crate::media::red;
use crate::media::rtcp::Reception;
use rtvi::{Asked, Rtvi};

pub use driver::Driver;
pub use reports::Reports;
pub use succession::Heir;
use succession::Succession;

/// How far a session has come. It only moves forward, and the first end is the one that counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Progress {
    /// ICE and DTLS are under way.
    Connecting,
    /// Media flows.
    Connected,
    /// Over, and why.
    Ended(LegEnd),
}

impl Progress {
    /// Whether the session is over.
    pub fn ended(self) -> Option<LegEnd> {
        match self {
            Progress::Ended(end) => Some(end),
            Progress::Connecting | Progress::Connected => None,
        }
    }

    /// Moves `progress` to `next`; says whether it was not already there or further.
    pub fn advance(progress: &watch::Sender<Progress>, next: Progress) -> bool {
        progress.send_if_modified(|now| {
            let forward = match (*now, next) {
                (Progress::Connecting, Progress::Connected | Progress::Ended(_)) => true,
                (Progress::Connected, Progress::Ended(_)) => true,
                (Progress::Connecting | Progress::Connected | Progress::Ended(_), _) => false,
            };
            if forward {
                *now = next;
            }
            forward
        })
    }
}

/// What the connection brings that was not there when it was answered.
pub enum Arrival {
    /// The peer's audio.
    Track(Arc<dyn TrackRemote>),
    /// The data channel `agent`, open.
    Channel(Arc<dyn DataChannel>),
    /// The data channel of a client that speaks RTVI, open.
    Client(Arc<dyn DataChannel>),
}

/// What a leg is made of.
pub struct Parts {
    /// What was agreed.
    pub format: MediaFormat,
    /// Payload type of redundant packets (RFC 2198), where they were agreed.
    pub red: Option<u8>,
    /// Of the stream we send.
    pub ssrc: u32,
    /// The negotiated connection.
    pub connection: Arc<dyn PeerConnection>,
    /// The stream we send.
    pub track: Arc<TrackLocalStaticRTP>,
    /// The task that runs the connection.
    pub driver: Driver,
    /// Shared with the task that supervises the session.
    pub progress: watch::Sender<Progress>,
    /// Tracks and channels as they come.
    pub arrivals: mpsc::Receiver<Arrival>,
    /// The peer's view of what we send.
    pub reports: watch::Receiver<Option<PeerReport>>,
    /// Whether the offer has a section for data channels, so that `agent` may still open.
    pub channels: bool,
    /// Milliseconds of audio in a packet that we send: 10, 20, 30, 40 or 60.
    pub ptime: u16,
}

/// A browser call's media. Dropping it ends the session.
pub struct WebRtcLeg {
    format: MediaFormat,
    red: Option<Redundancy>,
    /// Where the peer wants packets that are not as long as frames.
    packets: Option<Packets>,
    ssrc: u32,
    connection: Arc<dyn PeerConnection>,
    track: Arc<TrackLocalStaticRTP>,
    driver: Driver,
    progress: watch::Sender<Progress>,
    seen: watch::Receiver<Progress>,
    arrivals: mpsc::Receiver<Arrival>,
    /// The other side has dropped its end of `arrivals`: nothing more will come.
    arrivals_over: bool,
    reports: watch::Receiver<Option<PeerReport>>,
    /// The stage that publishes them is gone.
    reports_over: bool,
    remote: Option<Arc<dyn TrackRemote>>,
    /// What came of it: the connection's own reports keep their count to themselves.
    reception: Option<Reception>,
    channel: Option<Arc<dyn DataChannel>>,
    /// The channel has not opened yet, but may: what is said meanwhile waits for it.
    awaited: bool,
    /// What the channel speaks, where it is not the agent's frames.
    rtvi: Option<Rtvi>,
    /// What a message asked for beyond the first thing: keys, which are few.
    asked: VecDeque<LegEvent>,
    outbox: Outbox,
    succession: Succession,
    closed: bool,
}

impl WebRtcLeg {
    /// A leg of these parts.
    pub fn new(parts: Parts) -> Self {
        let mut seen = parts.progress.subscribe();
        // It may have moved before this subscription.
        seen.mark_changed();
        let audio = parts.format.payload_type;
        let length = packets::length(parts.format.codec, parts.ptime);
        Self {
            packets: length.map(|length| Packets::new(Some(length))),
            format: parts.format,
            red: parts.red.map(|number| Redundancy::new(number, audio)),
            ssrc: parts.ssrc,
            connection: parts.connection,
            track: parts.track,
            driver: parts.driver,
            progress: parts.progress,
            seen,
            arrivals: parts.arrivals,
            arrivals_over: false,
            reports: parts.reports,
            reports_over: false,
            remote: None,
            reception: None,
            channel: None,
            awaited: parts.channels,
            rtvi: None,
            asked: VecDeque::new(),
            outbox: Outbox::default(),
            succession: Succession::default(),
            closed: false,
        }
    }

    /// Where the leg of a new connection is put that is to go on in place of this one.
    pub fn heir(&self) -> Heir {
        self.succession.heir()
    }

    /// Sends the packets that are due, of those that are not as long as frames.
    fn send_due(&mut self, now: Instant) -> Result<(), LegEnd> {
        while let Some(packet) = self.packets.as_mut().and_then(|packets| packets.poll(now)) {
            self.transmit(packet)?;
        }
        Ok(())
    }

    fn transmit(&mut self, packet: OutPacket) -> Result<(), LegEnd> {
        let packet = match &mut self.red {
            Some(red) => red.sender.add(packet),
            None => packet,
        };
        // overflow: drops (counted). The queue to the driver holds 256 packets, five seconds of audio.
        match self.track.write_rtp(packet.with_ssrc(self.ssrc)).now_or_never() {
            Some(Ok(())) => Ok(()),
            Some(Err(_)) => Err(self.progress.borrow().ended().unwrap_or(LegEnd::Failed)),
            None => {
                lost("queue_full");
                Ok(())
            }
        }
    }

    /// `None`: not for the call.
    fn on_track(&mut self, event: Option<TrackRemoteEvent>) -> Option<LegEvent> {
        let Some(event) = event else {
            self.remote = None;
            return None;
        };
        let TrackRemoteEvent::OnRtpPacket(rtp::Packet { header, payload }) = event else { return None };
        let event_type = self.format.telephone_event.map(|(payload_type, _)| payload_type);
        let known = [Some(self.format.payload_type), event_type, self.red.as_ref().map(|red| red.number)];
        if !known.contains(&Some(header.payload_type)) {
            return None;
        }
        let packet = InPacket {
            payload_type: header.payload_type,
            marker: header.marker,
            sequence: header.sequence_number,
            timestamp: header.timestamp,
            ssrc: header.ssrc,
            arrived: clock::now(),
            payload,
        };
        let audio = Some(packet.payload_type) != event_type;
        Reception::take(&mut self.reception, &packet, audio, self.format.codec.clock_rate());
        match &mut self.red {
            Some(red) => red.take(packet).map(LegEvent::Rtp),
            None => Some(LegEvent::Rtp(packet)),
        }
    }

    fn on_channel(&mut self, event: Option<DataChannelEvent>) -> Option<LegEvent> {
        match event {
            Some(DataChannelEvent::OnMessage(message)) if message.is_string => {
                match String::from_utf8(message.data.to_vec()) {
                    Ok(text) => match &mut self.rtvi {
                        Some(rtvi) => {
                            let asked = rtvi.take(&text);
                            self.carry_out(asked);
                        }
                        None => return Some(LegEvent::Message(text)),
                    },
                    Err(_) => tracing::debug!("a text message that is not UTF-8 was ignored"),
                }
            }
            Some(DataChannelEvent::OnMessage(_)) => tracing::debug!("a binary message was ignored"),
            Some(DataChannelEvent::OnClose) | None => {
                self.channel = None;
                self.rtvi = None;
                self.outbox.clear();
            }
            Some(_) => {}
        }
        None
    }

    /// Does what a client of RTVI asks for.
    fn carry_out(&mut self, asked: Vec<Asked>) {
        for asked in asked {
            match asked {
                // overflow: refused; a client that reads nothing is told nothing.
                Asked::Tell(text) => drop(self.outbox.push(self.channel.as_ref(), &text)),
                Asked::Prompt(text) => self.asked.push_back(LegEvent::Prompt(text)),
                Asked::Key(key) => self.asked.push_back(LegEvent::Digit(key)),
                Asked::HangUp => drop(Progress::advance(&self.progress, Progress::Ended(LegEnd::Remote))),
            }
        }
    }
}

impl MediaLeg for WebRtcLeg {
    fn kind(&self) -> &'static str {
        "webrtc"
    }

    fn format(&self) -> &MediaFormat {
        &self.format
    }

    async fn attach(&mut self) -> io::Result<()> {
        self.driver.move_here().await
    }

    async fn send(&mut self, packet: OutPacket) -> Result<(), LegEnd> {
        match *self.progress.borrow() {
            Progress::Ended(end) => return Err(end),
            // There is no key to protect it with yet.
            Progress::Connecting => {
                lost("connecting");
                return Ok(());
            }
            Progress::Connected => {}
        }
        let audio = packet.payload_type == self.format.payload_type;
        match &mut self.packets {
            None => self.transmit(packet),
            Some(packets) => {
                let now = clock::now();
                packets.push(now, packet, audio);
                self.send_due(now)
            }
        }
    }

    fn send_message(&mut self, text: &str) -> bool {
        if self.progress.borrow().ended().is_some() || !(self.awaited || self.channel.is_some()) {
            return false;
        }
        match &mut self.rtvi {
            Some(rtvi) => {
                let told = rtvi.tell(text, clock::wall());
                told.iter().all(|text| self.outbox.push(self.channel.as_ref(), text))
            }
            None => self.outbox.push(self.channel.as_ref(), text),
        }
    }

    async fn recv(&mut self) -> LegEvent {
        if self.closed {
            pending::<()>().await;
        }
        loop {
            if let Some(asked) = self.asked.pop_front() {
                return asked;
            }
            if let Some(packet) = self.red.as_mut().and_then(|red| red.opened.pop_front()) {
                return LegEvent::Rtp(packet);
            }
            let due = self.packets.as_ref().and_then(Packets::deadline);
            let event = tokio::select! {
                changed = self.seen.changed() => match (changed, *self.seen.borrow_and_update()) {
                    (Ok(()), Progress::Connected) => Some(LegEvent::Connected),
                    (Ok(()), Progress::Connecting) => None,
                    (Ok(()), Progress::Ended(end)) => {
                        self.closed = true;
                        Some(LegEvent::Closed(end))
                    }
                    // Cannot happen while `self.progress` lives; a failed leg beats a loop without end.
                    (Err(_), _) => {
                        self.closed = true;
                        Some(LegEvent::Closed(LegEnd::Failed))
                    }
                },
                arrival = self.arrivals.recv(), if !self.arrivals_over => {
                    match arrival {
                        // The newest wins: a peer that opens another means that one.
                        Some(Arrival::Track(track)) => self.remote = Some(track),
                        Some(Arrival::Channel(channel)) => {
                            self.awaited = false;
                            self.rtvi = None;
                            self.channel = Some(channel);
                        }
                        Some(Arrival::Client(channel)) => {
                            self.awaited = false;
                            self.channel = Some(channel);
                            let mut rtvi = Rtvi::default();
                            // What waited for a channel was meant for one that reads frames.
                            for frame in self.outbox.take() {
                                let told = rtvi.tell(&frame, clock::wall());
                                debug_assert!(told.is_empty(), "it has not said yet that it listens");
                            }
                            self.rtvi = Some(rtvi);
                        }
                        None => self.arrivals_over = true,
                    }
                    None
                }
                event = next_of_track(self.remote.as_deref()) => self.on_track(event),
                event = next_of_channel(self.channel.as_deref()) => self.on_channel(event),
                changed = self.reports.changed(), if !self.reports_over => {
                    self.reports_over = changed.is_err();
                    let mut report = *self.reports.borrow_and_update();
                    if let (Some(red), Some(report)) = (&mut self.red, &report) {
                        red.sender.report(report.fraction_lost);
                    }
                    if let (Some(packets), Some(report)) = (&mut self.packets, &mut report) {
                        report.highest_sequence = packets.acknowledged(report.highest_sequence);
                    }
                    report.map(LegEvent::Report)
                }
                () = self.outbox.drive(self.channel.as_ref()) => None,
                () = at(due) => {
                    let sent = self.send_due(clock::now());
                    self.closed = sent.is_err();
                    sent.err().map(LegEvent::Closed)
                }
                next = self.succession.next() => {
                    self.succeed(*next);
                    None
                }
            };
            if let Some(event) = event {
                return event;
            }
        }
    }

    async fn hang_up(&mut self) {
        Progress::advance(&self.progress, Progress::Ended(LegEnd::Local));
        if let Err(error) = self.connection.close().await {
            tracing::debug!(%error, "closing a WebRTC connection");
        }
    }

    fn arrivals(&self) -> Option<Arrivals> {
        self.reception.as_ref().map(|reception| reception.arrivals(self.format.codec.clock_rate()))
    }

    fn hold(&mut self, _hold: bool) -> Result<(), String> {
        // A browser holds by itself; no request is sent.
        Ok(())
    }

    fn transfer(&mut self, _to: &str, _attended: bool, _limit: Option<Duration>) -> Result<(), String> {
        Err("a browser call cannot be transferred: there is no REFER in WebRTC".to_owned())
    }
}

impl Drop for WebRtcLeg {
    fn drop(&mut self) {
        // The task that supervises the session closes the connection.
        Progress::advance(&self.progress, Progress::Ended(LegEnd::Local));
    }
}

/// Redundant audio both ways.
struct Redundancy {
    /// The payload type of its packets.
    number: u8,
    receiver: red::Receiver,
    sender: red::Sender,
    /// Frames of packets that came, in their order: at most those of one packet.
    opened: VecDeque<InPacket>,
}

impl Redundancy {
    fn new(number: u8, audio: u8) -> Self {
        let (receiver, sender) = (red::Receiver::new(number, audio), red::Sender::new(number, audio));
        Self { number, receiver, sender, opened: VecDeque::new() }
    }

    /// The first new frame of `packet`; the others wait.
    fn take(&mut self, packet: InPacket) -> Option<InPacket> {
        let before = self.receiver.recovered;
        self.receiver.take(packet, &mut self.opened);
        if self.receiver.recovered > before {
            metrics::counter!("antiphon_webrtc_recovered_total").increment(self.receiver.recovered - before);
        }
        self.opened.pop_front()
    }
}

fn lost(reason: &'static str) {
    metrics::counter!("antiphon_webrtc_packets_lost_total", "reason" => reason).increment(1);
}

async fn at(due: Option<Instant>) {
    match due {
        Some(due) => sleep_until(due.into()).await,
        None => pending().await,
    }
}

/// Cancel safe: the connection's queue is only read when it is ready.
async fn next_of_track(track: Option<&dyn TrackRemote>) -> Option<TrackRemoteEvent> {
    match track {
        Some(track) => track.poll().await,
        None => pending().await,
    }
}

/// Cancel safe, as [`next_of_track`].
async fn next_of_channel(channel: Option<&dyn DataChannel>) -> Option<DataChannelEvent> {
    match channel {
        Some(channel) => channel.poll().await,
        None => pending().await,
    }
}

/// A text on its way into the data channel.
type Sending = Pin<Box<dyn Future<Output = Result<(), Error>> + Send>>;

/// Texts waiting for the data channel to open or to have room, oldest first.
#[derive(Default)]
struct Outbox {
    waiting: VecDeque<String>,
    bytes: usize,
    sending: Option<Sending>,
}

/// What may wait for a peer that does not read: an agent's frames are short, so this is minutes of them.
const OUTBOX_MESSAGES: usize = 256;
const OUTBOX_BYTES: usize = 256 * 1024;

impl Outbox {
    // overflow: refused
    fn push(&mut self, channel: Option<&Arc<dyn DataChannel>>, text: &str) -> bool {
        if self.waiting.len() >= OUTBOX_MESSAGES || self.bytes + text.len() > OUTBOX_BYTES {
            return false;
        }
        self.bytes += text.len();
        self.waiting.push_back(text.to_owned());
        // Usually it goes at once; `recv` finishes what cannot.
        let _ = self.poll(channel, &mut Context::from_waker(Waker::noop()));
        true
    }

    fn clear(&mut self) {
        *self = Self::default();
    }

    /// Everything that waits.
    fn take(&mut self) -> VecDeque<String> {
        std::mem::take(self).waiting
    }

    /// Sends as long as there is anything to send; never completes. Cancel safe: its state is in `self`.
    fn drive(&mut self, channel: Option<&Arc<dyn DataChannel>>) -> impl Future<Output = ()> {
        std::future::poll_fn(move |cx| self.poll(channel, cx))
    }

    fn poll(&mut self, channel: Option<&Arc<dyn DataChannel>>, cx: &mut Context<'_>) -> Poll<()> {
        loop {
            if let Some(sending) = &mut self.sending {
                match sending.as_mut().poll(cx) {
                    Poll::Pending => return Poll::Pending,
                    Poll::Ready(result) => {
                        self.sending = None;
                        if let Err(error) = result {
                            tracing::debug!(%error, "a message was not sent on the data channel");
                        }
                    }
                }
            }
            let Some(channel) = channel else { return Poll::Pending };
            let Some(text) = self.waiting.pop_front() else { return Poll::Pending };
            self.bytes -= text.len();
            let channel = channel.clone();
            self.sending = Some(Box::pin(async move { channel.send_text(&text).await }));
        }
    }
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;

    use super::*;
    use crate::clock;
    use crate::telemetry::shown::Shown;

    #[test]
    fn a_frame_that_a_copy_brings_back_is_counted() {
        let (red, audio) = (63, 111);
        let (mut there, mut here) = (Redundancy::new(red, audio), Redundancy::new(red, audio));
        there.sender.report(0.05);
        let shown = Shown::here();
        for sequence in 0..10u16 {
            let (timestamp, payload) = (u32::from(sequence) * 960, Bytes::from(vec![7; 40]));
            let sent = OutPacket { payload_type: audio, marker: false, sequence, timestamp, payload };
            let OutPacket { payload_type, marker, sequence, timestamp, payload } = there.sender.add(sent);
            // One is lost, and comes with the next.
            if sequence == 6 {
                continue;
            }
            let arrived = clock::now();
            let came = here.take(InPacket { payload_type, marker, sequence, timestamp, ssrc: 1, arrived, payload });
            assert_eq!(came.map(|packet| packet.sequence), Some(if sequence == 7 { 6 } else { sequence }));
            here.opened.clear();
        }
        assert_eq!(shown.sum("antiphon_webrtc_recovered_total"), 1.0);
    }
}
