//! The media side of a SIP call: RTP and RTCP over two UDP sockets.
//!
//! Owns the sockets, the ports behind them, protection, reports and the knowledge where the peer is. Never
//! speaks SIP: the session task of [`crate::sip`] does, and the two meet in two bounded channels. Contract:
//! [`MediaLeg`]. Dropping the leg frees its ports and makes the session task send BYE.
//!
//! # Why
//! *Two sockets a call* rather than one for all: the kernel then demultiplexes, each call's receive buffer
//! is its own, and old exchanges that want RTCP on the odd port are served.
//!
//! *Drops are counted, not reported*: a packet that is malformed, of a stranger, of an unknown payload type,
//! or that finds the socket buffer full shows in `antiphon_rtp_discarded_total` by `reason`.

mod counters;
pub(crate) mod dtls;
mod fuzz;
mod ice;
pub(crate) mod latch;
mod noise;
pub(crate) mod ports;
mod reports;
mod seam;
mod secure;
pub(crate) mod srtp;
mod succession;

use std::{
    collections::VecDeque,
    future::pending,
    io,
    net::SocketAddr,
    sync::Arc,
    time::{Duration, Instant},
};

use bytes::Bytes;
use rtc::shared::marshal::{Marshal, MarshalSize, Unmarshal};
use sdp::Agreed;
use tokio::{net::UdpSocket, sync::mpsc, time::sleep_until};

pub use self::fuzz::fuzz;
pub(crate) use self::seam::{Control, Early, Parts, Signal};
use self::{
    counters::{Counters, Line},
    dtls::Identity,
    latch::Latch,
    noise::Noise,
    ports::PortPair,
    secure::{Component, Secure},
    srtp::Protection,
};
use super::{
    decode::COMFORT_NOISE,
    leg::{Arrivals, Codec, InPacket, LegEnd, LegEvent, MediaFormat, MediaLeg, OutPacket},
    packets::{Packets, length, short_frames},
    rtcp::Rtcp,
};
use crate::clock::{self, Sparse};

/// Larger datagrams than any audio packet are cut, and then refused as malformed or unauthentic.
const MAX_DATAGRAM: usize = 2_048;
/// Datagrams taken at a wake, so that a flood on one call leaves time to the others of its shard.
const BURST: usize = 32;

/// The media side of a SIP call: RTP and RTCP over UDP.
pub struct SipLeg {
    format: MediaFormat,
    agreed: Agreed,
    ports: Option<PortPair>,
    sockets: Option<Sockets>,
    latch: Latch,
    /// Where RTCP has come from.
    rtcp_source: Option<SocketAddr>,
    protection: Option<Protection>,
    /// The handshake that brings it, where the descriptions did not.
    secure: Option<Secure>,
    identity: Identity,
    /// The peer's ACK is here, or ours has left; the call was not told yet, where media has no keys.
    acknowledged: Option<bool>,
    ssrc: u32,
    /// Where packets were agreed on that are not as long as frames.
    packets: Option<Packets>,
    noise: Noise,
    rtcp: Rtcp,
    /// When RTP or RTCP was last heard, or the wait for it began.
    heard: Instant,
    media_timeout: Duration,
    /// Until the answer: whether packets leave.
    early: Option<Early>,
    /// Digits of ours go by INFO.
    signals_digits: bool,
    /// Name of the trunk at the other end.
    trunk: Option<Arc<str>>,
    signals: mpsc::Receiver<Signal>,
    controls: mpsc::Sender<Control>,
    /// Drained before anything else is read, so a wake bounds it.
    events: VecDeque<LegEvent>,
    over: Option<LegEnd>,
    counters: Counters,
    told: Sparse,
}

struct Sockets {
    rtp: UdpSocket,
    rtcp: UdpSocket,
}

enum Wake {
    Signal(Option<Signal>),
    Rtp,
    Rtcp,
    Time,
}

impl SipLeg {
    pub(crate) fn new(parts: Parts) -> Result<SipLeg, io::Error> {
        let now = clock::now();
        let Parts { ports, agreed, peer, media_timeout, early, signals_digits, trunk, identity, signals, controls } =
            parts;
        let protection = protection(None, &agreed)?;
        let dtls = agreed.dtls.clone();
        let secure = dtls.map(|dtls| Secure::new(&identity, dtls, agreed.rtcp_mux)).transpose()?;
        let ssrc = rand::random();
        let cname = format!("{:016x}", rand::random::<u64>());
        let counters = Counters::new(trunk.as_ref(), codec(agreed.codec));
        Ok(SipLeg {
            format: format(&agreed),
            packets: length(codec(agreed.codec), agreed.ptime).map(|length| Packets::new(Some(length))),
            noise: Noise::default(),
            latch: Latch::new(peer, agreed.remote_rtp),
            rtcp_source: None,
            rtcp: Rtcp::new(now, ssrc, cname, codec(agreed.codec).clock_rate()),
            agreed,
            ports: Some(ports),
            sockets: None,
            protection,
            secure,
            identity,
            acknowledged: Some(false),
            ssrc,
            heard: now,
            media_timeout,
            early,
            signals_digits,
            trunk,
            signals,
            controls,
            events: VecDeque::new(),
            over: None,
            counters,
            told: Sparse::new(),
        })
    }

    /// RTP port on this side.
    pub fn local_port(&self) -> Option<u16> {
        match (&self.sockets, &self.ports) {
            (Some(sockets), _) => sockets.rtp.local_addr().ok().map(|a| a.port()),
            (None, ports) => ports.as_ref().map(|p| p.port),
        }
    }

    /// Where the peer's media goes now.
    pub fn remote(&self) -> Option<SocketAddr> {
        self.latch.target()
    }

    /// Whether media is encrypted, or will be when the handshake is over.
    pub fn encrypted(&self) -> bool {
        self.secure.is_some() || self.protection.is_some()
    }

    /// Waits for the peer's ACK. The event of it stays to be read, or comes with the keys of the media; what the peer sends
    /// meanwhile is kept, too.
    ///
    /// # Errors
    /// The call ended before.
    pub async fn acknowledged(&mut self) -> Result<(), LegEnd> {
        while self.acknowledged == Some(false) {
            if let Some(end) = self.over {
                return Err(end);
            }
            let signal = self.signals.recv().await;
            self.on_signal(signal);
        }
        Ok(())
    }

    /// When something must be done without being asked.
    fn deadline(&self) -> Instant {
        let due = self.packets.as_ref().and_then(Packets::deadline);
        let shake = self.secure.as_ref().and_then(Secure::deadline);
        let report = due.into_iter().chain(shake).fold(self.rtcp.deadline(), Instant::min);
        if self.listens() { report.min(self.heard + self.media_timeout) } else { report }
    }

    fn listens(&self) -> bool {
        // What rings may do so in silence.
        self.early.is_none() && self.agreed.direction.receives() && !self.agreed.held
    }

    fn on_signal(&mut self, signal: Option<Signal>) {
        match signal {
            Some(Signal::Connected) => {
                if self.early.take().is_some() {
                    self.heard = clock::now();
                }
                if self.acknowledged == Some(false) {
                    self.acknowledged = Some(true);
                }
                self.connect();
            }
            Some(Signal::Media(agreed)) => self.on_media(*agreed),
            Some(Signal::Moved(leg, with)) => self.succeed(*leg, with),
            Some(Signal::Digit(digit)) => self.events.push_back(LegEvent::Digit(digit)),
            Some(Signal::HoldAnswered(hold, outcome)) => {
                self.events.push_back(LegEvent::HoldAnswered { hold, outcome });
            }
            Some(Signal::TransferAnswered(outcome)) => self.events.push_back(LegEvent::TransferAnswered(outcome)),
            Some(Signal::TransferEnded(outcome)) => self.events.push_back(LegEvent::TransferEnded(outcome)),
            Some(Signal::TransferProgress(status)) => self.events.push_back(LegEvent::TransferProgress(status)),
            Some(Signal::Cause(cause)) => self.events.push_back(LegEvent::Cause(cause)),
            Some(Signal::Closed(end)) => self.close(end),
            // The session task is gone without a word: the endpoint was dropped.
            None => self.close(LegEnd::Failed),
        }
    }

    /// Says that the call is up when it is acknowledged and media has its keys: what was said before would be lost.
    fn connect(&mut self) {
        if self.acknowledged == Some(true) && self.has_keys() {
            self.acknowledged = None;
            self.events.push_back(LegEvent::Connected);
        }
    }

    fn on_media(&mut self, agreed: Agreed) {
        if self.protect_as(&agreed).is_err() {
            return self.close(LegEnd::Failed);
        }
        let (was_held, listened) = (self.agreed.held, self.listens());
        self.latch.signal(agreed.remote_rtp);
        self.rtcp.set_clock_rate(codec(agreed.codec).clock_rate());
        // As with RTP: a new description may move it.
        self.rtcp_source = None;
        let format = format(&agreed);
        match (&mut self.packets, length(codec(agreed.codec), agreed.ptime)) {
            (Some(packets), tens) => packets.set(clock::now(), tens),
            (packets, Some(tens)) => *packets = Some(Packets::new(Some(tens))),
            (None, None) => {}
        }
        self.agreed = agreed;
        if self.listens() && !listened {
            self.heard = clock::now();
        }
        if format != self.format {
            self.counters.line = Line::new(self.trunk.as_ref(), format.codec);
            self.format = format.clone();
            self.events.push_back(LegEvent::Format(format));
        }
        if self.agreed.held != was_held {
            self.events.push_back(LegEvent::Held(self.agreed.held));
        }
        self.connect();
        self.shake();
    }

    fn close(&mut self, end: LegEnd) {
        if self.over.is_none() {
            let datagram = self.rtcp.goodbye(clock::now(), clock::wall());
            self.send_rtcp(&datagram);
            self.over = Some(end);
            self.events.push_back(LegEvent::Closed(end));
        }
    }

    fn on_time(&mut self) {
        let now = clock::now();
        if let Err(end) = self.send_due(now) {
            self.close(end);
        }
        if self.secure.as_ref().and_then(Secure::deadline).is_some_and(|at| at <= now) {
            self.reshake(now);
        }
        if self.rtcp.deadline() <= now {
            let datagram = self.rtcp.report(now, clock::wall(), rand::random());
            self.send_rtcp(&datagram);
            if let Some(jitter) = self.rtcp.jitter() {
                let seconds = f64::from(jitter) / f64::from(self.format.codec.clock_rate());
                self.counters.line.local_jitter.record(seconds);
            }
        }
        if self.listens() && now.saturating_duration_since(self.heard) >= self.media_timeout {
            // overflow: retained, in effect: were the queue full, a hang-up would already be under way
            self.controls.try_send(Control::Lost).ok();
            self.close(LegEnd::Lost);
        }
    }

    fn read_rtp(&mut self) {
        let mut buffer = [0; MAX_DATAGRAM];
        for _ in 0..BURST {
            let Some(sockets) = &self.sockets else { return };
            match sockets.rtp.try_recv_from(&mut buffer) {
                Ok((length, from)) => self.on_rtp(&buffer[..length], from),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
                // Left over from an earlier send (ICMP); the socket is fine.
                Err(_) => {}
            }
        }
    }

    fn read_rtcp(&mut self) {
        let mut buffer = [0; MAX_DATAGRAM];
        for _ in 0..BURST {
            let Some(sockets) = &self.sockets else { return };
            match sockets.rtcp.try_recv_from(&mut buffer) {
                Ok((length, from)) => {
                    if !self.on_other(Component::Rtcp, &buffer[..length], from) {
                        self.on_rtcp(&buffer[..length], from);
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
                Err(_) => {}
            }
        }
    }

    fn on_rtp(&mut self, datagram: &[u8], from: SocketAddr) {
        if self.on_other(Component::Rtp, datagram, from) || !self.has_keys() {
            return;
        }
        // RFC 5761 section 4: on a shared port the second octet tells RTCP apart.
        if self.agreed.rtcp_mux && datagram.get(1).is_some_and(|b| (192..=223).contains(b)) {
            return self.on_rtcp(datagram, from);
        }
        let Some(packet) = self.open(datagram) else {
            self.malformed(from);
            return;
        };
        let now = clock::now();
        let header = packet.header;
        let event = self.agreed.telephone_event;
        let audio = header.payload_type == self.agreed.receive_payload_type;
        // What the call task compares with is the number we send; peers may number the other way differently.
        // Sent by many without having been agreed on, where the codec's clock is that of the noise.
        let noise = header.payload_type == COMFORT_NOISE && self.format.codec.clock_rate() == 8_000;
        let payload_type = match event {
            _ if audio => self.format.payload_type,
            _ if noise => COMFORT_NOISE,
            Some(event) if header.payload_type == event.receive_payload_type => event.payload_type,
            _ => {
                self.counters.unexpected.increment(1);
                return;
            }
        };
        let proven = self.protection.is_some();
        if !self.latch.admit(now, from, header.ssrc, header.sequence_number, proven) {
            self.counters.stranger.increment(1);
            return;
        }
        self.heard = now;
        let packet = InPacket {
            payload_type,
            marker: header.marker,
            sequence: header.sequence_number,
            timestamp: header.timestamp,
            ssrc: header.ssrc,
            arrived: now,
            payload: packet.payload,
        };
        self.rtcp.on_received(&packet, audio);
        if self.agreed.direction.receives() {
            self.events.push_back(LegEvent::Rtp(packet));
        }
    }

    fn malformed(&self, from: SocketAddr) {
        self.counters.malformed.increment(1);
        if let Some(missed) = self.told.admit(clock::now()) {
            tracing::info!(%from, missed, "malformed RTP or RTCP was dropped");
        }
    }

    fn open(&mut self, datagram: &[u8]) -> Option<rtc_rtp::Packet> {
        if datagram.len() < 12 || datagram[0] >> 6 != 2 {
            return None;
        }
        let mut plain = match &mut self.protection {
            Some(protection) => protection.open_rtp(datagram).ok()?.freeze(),
            None => Bytes::copy_from_slice(datagram),
        };
        rtc_rtp::Packet::unmarshal(&mut plain).ok()
    }

    /// Sends the packets that are due, of those that are not as long as frames.
    fn send_due(&mut self, now: Instant) -> Result<(), LegEnd> {
        while let Some(packet) = self.packets.as_mut().and_then(|packets| packets.poll(now)) {
            self.transmit(packet)?;
        }
        Ok(())
    }

    fn transmit(&mut self, packet: OutPacket) -> Result<(), LegEnd> {
        let Some(sockets) = &self.sockets else { return Err(LegEnd::Failed) };
        // On hold nothing is sent; without an address or keys nothing can be, until the peer is heard.
        let sends = self.agreed.direction.sends() && self.has_keys();
        let Some(target) = self.latch.target().filter(|_| sends) else { return Ok(()) };
        let rtp = packet.clone().with_ssrc(self.ssrc);
        let mut buffer = [0; MAX_DATAGRAM];
        if rtp.marshal_size() > buffer.len() {
            self.counters.full.increment(1);
            return Ok(());
        }
        let Ok(length) = rtp.marshal_to(&mut buffer) else {
            self.counters.full.increment(1);
            return Ok(());
        };
        let sealed;
        let datagram = match &mut self.protection {
            None => &buffer[..length],
            Some(protection) => match protection.protect_rtp(&buffer[..length]) {
                Ok(packet) => {
                    sealed = packet;
                    &sealed[..]
                }
                // The keys are used up (2^48 packets): the session must not go on unprotected.
                Err(_) => return Err(LegEnd::Failed),
            },
        };
        // overflow: drops (counted): late audio is worse than none
        match sockets.rtp.try_send_to(datagram, target) {
            Ok(_) => {
                self.rtcp.on_sent(clock::now(), &packet);
            }
            Err(_) => self.counters.full.increment(1),
        }
        Ok(())
    }

    /// Asks the session task for something. The answer is a signal.
    fn ask(&self, control: Control) -> Result<(), String> {
        if self.over.is_some() {
            return Err("the call is over".to_owned());
        }
        // overflow: refused
        self.controls.try_send(control).map_err(|_| "too many requests are under way".to_owned())
    }
}

impl MediaLeg for SipLeg {
    fn kind(&self) -> &'static str {
        "sip"
    }

    fn format(&self) -> &MediaFormat {
        &self.format
    }

    async fn attach(&mut self) -> io::Result<()> {
        if self.sockets.is_some() {
            return Ok(());
        }
        self.begin()?;
        if let Some(sockets) = &self.sockets {
            // A try_send before the runtime has seen the socket once would report it full.
            sockets.rtp.writable().await?;
            sockets.rtcp.writable().await?;
        }
        if let Some(early) = self.early {
            self.events.push_back(LegEvent::Early { sends: early != Early::Hears, speaks: early == Early::Speaks });
        }
        self.shake();
        Ok(())
    }

    async fn send(&mut self, packet: OutPacket) -> Result<(), LegEnd> {
        if let Some(end) = self.over {
            return Err(end);
        }
        let audio = packet.payload_type == self.format.payload_type;
        let now = clock::now();
        match &mut self.packets {
            None if self.agreed.comfort_noise => {
                let packet = self.noise.pass(packet, self.format.codec, audio);
                self.transmit(packet)
            }
            None => self.transmit(packet),
            Some(packets) => {
                packets.push(now, packet, audio);
                self.send_due(now)
            }
        }
    }

    fn send_message(&mut self, _text: &str) -> bool {
        false
    }

    async fn recv(&mut self) -> LegEvent {
        loop {
            if let Some(event) = self.events.pop_front() {
                return event;
            }
            if self.over.is_some() {
                return pending().await;
            }
            let deadline = tokio::time::Instant::from_std(self.deadline());
            let Some(sockets) = &self.sockets else {
                self.close(LegEnd::Failed);
                continue;
            };
            // Every branch can be dropped and taken up again without loss: nothing is read in it.
            let wake = tokio::select! {
                biased;
                signal = self.signals.recv() => Wake::Signal(signal),
                _ = sockets.rtp.readable() => Wake::Rtp,
                _ = sockets.rtcp.readable() => Wake::Rtcp,
                () = sleep_until(deadline) => Wake::Time,
            };
            match wake {
                Wake::Signal(signal) => self.on_signal(signal),
                Wake::Rtp => self.read_rtp(),
                Wake::Rtcp => self.read_rtcp(),
                Wake::Time => {}
            }
            // A flood of packets must not keep reports from leaving.
            if deadline.into_std() <= clock::now() {
                self.on_time();
            }
        }
    }

    async fn hang_up(&mut self) {
        if self.over.is_none() {
            // overflow: refused: what fills the queue is a hang-up under way or a request that the end of
            // this leg answers
            self.controls.try_send(Control::HangUp).ok();
            self.close(LegEnd::Local);
        }
    }

    fn arrivals(&self) -> Option<Arrivals> {
        self.rtcp.received()
    }

    fn hold(&mut self, hold: bool) -> Result<(), String> {
        self.ask(Control::Hold(hold))
    }

    fn transfer(&mut self, to: &str, attended: bool, limit: Option<Duration>) -> Result<(), String> {
        self.ask(Control::Transfer { to: to.to_owned(), attended, limit })
    }

    fn trunk(&self) -> Option<&Arc<str>> {
        self.trunk.as_ref()
    }

    fn signals_digits(&self) -> bool {
        self.signals_digits
    }

    fn dial(&mut self, digits: &str) -> Result<(), String> {
        self.ask(Control::Digits(digits.to_owned()))
    }
}

/// The protection that `agreed` asks for: the present one where its keys are the same.
fn protection(present: Option<Protection>, agreed: &Agreed) -> io::Result<Option<Protection>> {
    let Some(keys) = agreed.srtp else { return Ok(None) };
    match present.filter(|p| p.uses(&keys)) {
        Some(present) => Ok(Some(present)),
        None => Protection::new(keys).map(Some).map_err(|_| io::Error::other("SRTP is not available")),
    }
}

fn format(agreed: &Agreed) -> MediaFormat {
    MediaFormat {
        codec: codec(agreed.codec),
        payload_type: agreed.payload_type,
        telephone_event: agreed.telephone_event.map(|e| (e.payload_type, e.clock_rate)),
        opus_fec: agreed.opus.fec,
        opus_dtx: agreed.opus.dtx,
        // Trunks take a gap for a broken path, and NAT for an unused one.
        continuous: true,
        short_frames: short_frames(codec(agreed.codec), agreed.ptime),
    }
}

/// The codec of the description as the media side names it.
pub(crate) fn codec(codec: sdp::Codec) -> Codec {
    match codec {
        sdp::Codec::Pcmu => Codec::Pcmu,
        sdp::Codec::Pcma => Codec::Pcma,
        sdp::Codec::G722 => Codec::G722,
        sdp::Codec::Opus => Codec::Opus,
    }
}
