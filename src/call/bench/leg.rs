//! The far ends: a leg of RTP or SRTP, a socket that swallows what calls say, callers who send.

use std::io;
use std::net::{Ipv4Addr, SocketAddr, UdpSocket};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use bytes::Bytes;
use sdp::{Key, SrtpKeys, Suite};

use crate::audio::FRAME;
use crate::clock;
use crate::media::leg::{Codec, InPacket, LegEnd, LegEvent, MediaFormat, MediaLeg, OutPacket};
use crate::media::sip::srtp::Protection;
use crate::media::{bench, encode};

/// RTP or SRTP on a socket of its own, without signalling or reports.
pub(super) struct UdpLeg {
    socket: Option<UdpSocket>,
    attached: Option<tokio::net::UdpSocket>,
    address: SocketAddr,
    sink: SocketAddr,
    format: MediaFormat,
    connected: bool,
    buffer: Vec<u8>,
    protection: Option<Protection>,
    /// When the first packet left and with which timestamp.
    first: Option<(Instant, u32)>,
    /// Microseconds that packets were late.
    late: Vec<u32>,
    lateness: Arc<Mutex<Vec<u32>>>,
}

impl UdpLeg {
    pub(super) fn new(codec: Codec, srtp: bool, sink: SocketAddr, lateness: Arc<Mutex<Vec<u32>>>) -> io::Result<Self> {
        let socket = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0))?;
        socket.set_nonblocking(true)?;
        let format = format(codec);
        Ok(Self {
            address: socket.local_addr()?,
            socket: Some(socket),
            attached: None,
            sink,
            format,
            connected: false,
            buffer: Vec::with_capacity(1_500),
            protection: if srtp { Some(protection(1, 2)?) } else { None },
            first: None,
            late: Vec::new(),
            lateness,
        })
    }

    pub(super) fn address(&self) -> SocketAddr {
        self.address
    }
}

impl MediaLeg for UdpLeg {
    fn kind(&self) -> &'static str {
        "bench"
    }

    fn format(&self) -> &MediaFormat {
        &self.format
    }

    async fn attach(&mut self) -> io::Result<()> {
        let socket = self.socket.take().ok_or_else(|| io::Error::other("attached twice"))?;
        let socket = tokio::net::UdpSocket::from_std(socket)?;
        // Until the runtime has seen it writable once, a send that does not wait loses its packet.
        socket.writable().await?;
        self.attached = Some(socket);
        Ok(())
    }

    async fn send(&mut self, packet: OutPacket) -> Result<(), LegEnd> {
        self.buffer.clear();
        self.buffer.extend([0x80, packet.payload_type | u8::from(packet.marker) << 7]);
        self.buffer.extend(packet.sequence.to_be_bytes());
        self.buffer.extend(packet.timestamp.to_be_bytes());
        self.buffer.extend([0; 4]);
        self.buffer.extend_from_slice(&packet.payload);
        let sealed = match &mut self.protection {
            Some(protection) => Some(protection.protect_rtp(&self.buffer).map_err(|_| LegEnd::Failed)?),
            None => None,
        };
        if let Some(socket) = &self.attached {
            // overflow: drops (seen as packets not delivered)
            let _ = socket.try_send_to(sealed.as_deref().unwrap_or(&self.buffer), self.sink);
        }
        let now = clock::now();
        let (at, timestamp) = *self.first.get_or_insert((now, packet.timestamp));
        let ticks = packet.timestamp.wrapping_sub(timestamp);
        let due = at + Duration::from_secs_f64(f64::from(ticks) / f64::from(self.format.codec.clock_rate()));
        self.late.push(now.saturating_duration_since(due).as_micros() as u32);
        Ok(())
    }

    fn send_message(&mut self, _text: &str) -> bool {
        false
    }

    async fn recv(&mut self) -> LegEvent {
        if !std::mem::replace(&mut self.connected, true) {
            return LegEvent::Connected;
        }
        let Some(socket) = &self.attached else { return LegEvent::Closed(LegEnd::Failed) };
        let mut datagram = [0; 1_500];
        loop {
            let Ok(length) = socket.recv(&mut datagram).await else { continue };
            let opened = match &mut self.protection {
                Some(protection) => match protection.open_rtp(&datagram[..length]) {
                    Ok(opened) => Some(opened),
                    Err(_) => continue,
                },
                None => None,
            };
            let plain = opened.as_deref().unwrap_or(&datagram[..length]);
            let [_, kind, s0, s1, t0, t1, t2, t3, _, _, _, _, ref payload @ ..] = *plain else { continue };
            return LegEvent::Rtp(InPacket {
                payload_type: kind & 0x7f,
                marker: kind >> 7 == 1,
                sequence: u16::from_be_bytes([s0, s1]),
                timestamp: u32::from_be_bytes([t0, t1, t2, t3]),
                ssrc: 0,
                arrived: clock::now(),
                payload: Bytes::copy_from_slice(payload),
            });
        }
    }

    async fn hang_up(&mut self) {}

    fn hold(&mut self, _hold: bool) -> Result<(), String> {
        Ok(())
    }

    fn transfer(&mut self, _to: &str, _attended: bool, _limit: Option<Duration>) -> Result<(), String> {
        Err("a bench leg cannot be transferred".into())
    }
}

impl Drop for UdpLeg {
    fn drop(&mut self) {
        self.lateness.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).append(&mut self.late);
    }
}

/// Swallows and counts what all calls say.
pub(super) struct Sink {
    address: SocketAddr,
    stop: Arc<AtomicBool>,
    thread: thread::JoinHandle<u64>,
}

impl Sink {
    pub(super) fn start() -> io::Result<Self> {
        let socket = socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::DGRAM, None)?;
        socket.set_recv_buffer_size(8 << 20)?;
        socket.bind(&SocketAddr::from((Ipv4Addr::LOCALHOST, 0)).into())?;
        let socket = UdpSocket::from(socket);
        socket.set_read_timeout(Some(Duration::from_millis(100)))?;
        let (address, stop) = (socket.local_addr()?, Arc::new(AtomicBool::new(false)));
        let stopped = stop.clone();
        let thread = thread::Builder::new().name("sink".into()).spawn(move || {
            let (mut count, mut datagram) = (0, [0; 1_500]);
            loop {
                match socket.recv(&mut datagram) {
                    Ok(_) => count += 1,
                    // Only an empty socket ends it: what was sent before the stop is counted.
                    Err(_) if stopped.load(Relaxed) => return count,
                    Err(_) => {}
                }
            }
        })?;
        Ok(Self { address, stop, thread })
    }

    pub(super) fn address(&self) -> SocketAddr {
        self.address
    }

    pub(super) fn stop(self) -> u64 {
        self.stop.store(true, Relaxed);
        self.thread.join().unwrap_or(0)
    }
}

/// Sends to every call what a caller sends: a packet each 20 ms. Stops when dropped.
pub(super) struct Traffic {
    stop: Arc<AtomicBool>,
}

/// The callers' packets go out in this many groups, spread over a frame.
const GROUPS: usize = 20;

impl Traffic {
    pub(super) fn start(codec: Codec, srtp: bool, callers: Vec<SocketAddr>) -> io::Result<Self> {
        let mut sealing = if srtp { Some(protection(2, 1)?) } else { None };
        let socket = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0))?;
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = stop.clone();
        let payloads = payloads(codec).map_err(io::Error::other)?;
        let (wake, alarm) = std::sync::mpsc::sync_channel::<()>(0);
        thread::Builder::new().name("callers".into()).spawn(move || {
            // Kept, so that waiting on it times out instead of ending.
            let _wake = wake;
            let (start, number) = (clock::now(), AtomicU64::new(0));
            while !stopped.load(Relaxed) {
                let n = number.fetch_add(1, Relaxed);
                let (frame, group) = (n / GROUPS as u64, n as usize % GROUPS);
                let due = start + FRAME / GROUPS as u32 * n as u32;
                let wait = due.saturating_duration_since(clock::now());
                if !wait.is_zero() {
                    let _ = alarm.recv_timeout(wait);
                }
                let payload = &payloads[frame as usize % payloads.len()];
                let mut packet = vec![0x80, 96];
                packet.extend((frame as u16).to_be_bytes());
                packet.extend((frame as u32 * codec.frame_ticks()).to_be_bytes());
                packet.extend([0; 4]);
                packet.extend_from_slice(payload);
                // One for all: they have the same keys.
                if let Some(sealed) = sealing.as_mut().and_then(|sealing| sealing.protect_rtp(&packet).ok()) {
                    packet = sealed.to_vec();
                }
                for caller in callers.iter().skip(group).step_by(GROUPS) {
                    // overflow: drops: a call that is over has no socket
                    let _ = socket.send_to(&packet, caller);
                }
            }
        })?;
        Ok(Self { stop })
    }
}

impl Drop for Traffic {
    fn drop(&mut self) {
        self.stop.store(true, Relaxed);
    }
}

/// The suite that every peer knows, with keys that are told apart by these bytes.
fn protection(local: u8, remote: u8) -> io::Result<Protection> {
    let key = |byte| Key([byte; Key::LENGTH]);
    let keys = SrtpKeys { suite: Suite::AesCm128Sha1_80, local: key(local), remote: key(remote) };
    Protection::new(keys).map_err(|_| io::Error::other("the keys do not fit"))
}

fn format(codec: Codec) -> MediaFormat {
    MediaFormat { payload_type: 96, opus_fec: true, ..MediaFormat::plain(codec) }
}

fn payloads(codec: Codec) -> Result<Vec<Bytes>, encode::CodecError> {
    let format = format(codec);
    let mut encoder = encode::Encoder::new(&format, encode::OpusSettings::default())?;
    let speech = bench::speech(250);
    speech.chunks_exact(480).map(|frame| encoder.encode(frame)).collect()
}
