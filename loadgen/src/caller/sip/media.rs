//! The media of a telephone call: RTP and RTCP sockets, what was agreed about them, and both directions of sound.

use std::io;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use bytes::Bytes;
use rtc_srtp::context::Context;
use rtc_srtp::protection_profile::ProtectionProfile;
use tokio::net::UdpSocket;

use super::Config;
use crate::caller::call::{CallError, PeerReport};
use crate::caller::relay::{Relay, port_pair};
use crate::caller::speak::{Idle, Speaker};
use crate::clock;
use crate::sound::ear::Ear;
use crate::sound::heard::{PayloadTypes, Recorder};
use crate::wire::arrival::Arrivals;
use crate::wire::codec::Codec;
use crate::wire::rtp::{self, Report};

/// Between RTCP reports (RFC 3550 section 6.2).
const REPORT: Duration = Duration::from_secs(5);
/// The first one comes early, so that short calls have one.
const FIRST_REPORT: Duration = Duration::from_millis(500);
/// Datagrams taken at one wake: a flood does not starve signalling.
const BATCH: usize = 64;

pub(super) struct Media {
    rtp: UdpSocket,
    arrivals: Arrivals,
    rtcp: UdpSocket,
    relay: Option<Relay>,
    negotiator: sdp::Negotiator,
    opus_rate: u32,
    idle: Idle,
    pub(super) stream: Option<Stream>,
    pub(super) report: PeerReport,
}

/// What there is once both sides agree.
pub(super) struct Stream {
    pub(super) codec: Codec,
    pub(super) held: bool,
    pub(super) ear: Ear,
    pub(super) speaker: Speaker,
    agreed: sdp::Agreed,
    protection: Option<Protection>,
    next_report: Instant,
    /// Middle of the NTP time of the last sender report, and when it came.
    last_report: Option<(u32, Instant)>,
}

struct Protection {
    outgoing: Context,
    incoming: Context,
}

impl Media {
    pub(super) async fn bind(config: &Config) -> Result<Media, CallError> {
        let (rtp, rtcp) = port_pair(config.address).await?;
        let local = rtp.local_addr().map_err(CallError::io("local address"))?;
        let policy = sdp::Policy {
            codecs: config.codecs.iter().map(|c| wire_codec(*c)).collect(),
            telephone_event: true,
            srtp: if config.srtp { sdp::SrtpPolicy::Required } else { sdp::SrtpPolicy::Never },
            ..sdp::Policy::default()
        };
        let keys = std::array::from_fn(|_| sdp::Key(rand_key()));
        let relay = match config.impairment {
            Some(what) => Some(Relay::start(config.address, what, rand::random()).await?),
            None => None,
        };
        Ok(Media {
            arrivals: Arrivals::of(&rtp).map_err(CallError::io("times of arrival"))?,
            rtp,
            rtcp,
            negotiator: negotiator(&policy, relay.as_ref().map_or(local, Relay::outer), &keys),
            relay,
            opus_rate: config.opus_rate,
            idle: config.idle,
            stream: None,
            report: PeerReport::default(),
        })
    }

    pub(super) fn set_holding(&mut self, holding: bool) {
        self.negotiator.set_holding(holding);
    }

    pub(super) fn offer(&mut self) -> Vec<u8> {
        self.negotiator.offer().to_string().into_bytes()
    }

    /// Answers an offer.
    pub(super) fn answer(&mut self, now: Instant, offer: &[u8]) -> Result<Vec<u8>, CallError> {
        let offer = sdp::parse(offer).map_err(|e| CallError::BadAnswer(e.to_string()))?;
        let (answer, agreed) = self.negotiator.answer(&offer).map_err(|e| CallError::BadAnswer(e.to_string()))?;
        self.agree(now, agreed)?;
        Ok(answer.to_string().into_bytes())
    }

    /// Takes the answer to our offer.
    pub(super) fn accept(&mut self, now: Instant, answer: &[u8]) -> Result<(), CallError> {
        let answer = sdp::parse(answer).map_err(|e| CallError::BadAnswer(e.to_string()))?;
        let agreed = self.negotiator.accept(&answer).map_err(|e| CallError::BadAnswer(e.to_string()))?;
        self.agree(now, agreed)
    }

    /// When something is due by itself.
    pub(super) fn deadline(&self) -> Option<Instant> {
        self.stream.as_ref().map(|s| s.speaker.deadline().min(s.next_report))
    }

    /// Waits until a datagram is there. Cancel safe.
    pub(super) async fn readable(&mut self) {
        // An error shows when the socket is read.
        tokio::select! {
            _ = self.rtp.readable() => {}
            _ = self.rtcp.readable() => {}
        }
    }

    /// Takes the datagrams that are there; says whether any was RTP.
    pub(super) fn receive(&mut self, buffer: &mut [u8]) -> bool {
        let mut heard = false;
        for _ in 0..BATCH {
            let Ok((n, now)) = self.arrivals.next(&self.rtp, buffer) else { break };
            let Some(stream) = &mut self.stream else { continue };
            // RFC 5761 section 4: RTCP may share the port.
            if matches!(buffer.get(1), Some(200..=207)) {
                stream.reported(now, &buffer[..n], &mut self.report);
                continue;
            }
            let clear = match &mut stream.protection {
                None => rtp::Packet::parse(&buffer[..n]),
                Some(p) => p.incoming.decrypt_rtp(&buffer[..n]).ok().and_then(|clear| rtp::Packet::parse(&clear)),
            };
            if let Some(packet) = clear {
                stream.ear.push(now, packet);
                heard = true;
            }
        }
        for _ in 0..BATCH {
            let Ok((n, _)) = self.rtcp.try_recv_from(buffer) else { break };
            if let Some(stream) = &mut self.stream {
                stream.reported(clock::now(), &buffer[..n], &mut self.report);
            }
        }
        heard
    }

    /// Sends what is due.
    pub(super) fn send(&mut self, now: Instant) {
        let Some(stream) = &mut self.stream else { return };
        for packet in stream.speaker.poll(now) {
            let Some(remote) = stream.agreed.remote_rtp else { continue };
            let wire = packet.to_bytes();
            let wire = match &mut stream.protection {
                None => Bytes::from(wire),
                Some(p) => match p.outgoing.encrypt_rtp(&wire) {
                    Ok(wire) => wire.freeze(),
                    Err(_) => continue,
                },
            };
            // A full socket buffer loses the packet, as on any network.
            let _ = self.rtp.try_send_to(&wire, remote);
        }
        if now >= stream.next_report {
            stream.next_report = now + REPORT;
            let _ = send_report(&self.rtp, &self.rtcp, stream, now, false);
        }
    }

    /// Says goodbye by RTCP.
    pub(super) fn leave(&mut self, now: Instant) {
        if let Some(stream) = &mut self.stream {
            let _ = send_report(&self.rtp, &self.rtcp, stream, now, true);
        }
    }

    fn agree(&mut self, now: Instant, mut agreed: sdp::Agreed) -> Result<(), CallError> {
        if let Some(relay) = &self.relay {
            relay.set_remote(agreed.remote_rtp, agreed.remote_rtcp);
            let [rtp, rtcp] = relay.inner();
            (agreed.remote_rtp, agreed.remote_rtcp) = (Some(rtp), Some(rtcp));
        }
        let codec = own_codec(agreed.codec);
        // Events of another clock than the speech would need their own timestamps: none of our codecs' offers mix.
        let event = agreed.telephone_event.as_ref();
        let types = PayloadTypes { audio: agreed.receive_payload_type, event: event.map(|e| e.receive_payload_type) };
        let speaker = || Speaker::new(now, codec, agreed.payload_type, event.map(|e| e.payload_type), self.idle);
        match &mut self.stream {
            None => {
                let ear = Ear::new(Recorder::new(now, codec, types, self.opus_rate)?);
                let mut speaker = speaker()?;
                speaker.set_sends(agreed.direction.sends());
                self.stream = Some(Stream {
                    codec,
                    held: agreed.held,
                    ear,
                    speaker,
                    protection: protection(agreed.srtp.as_ref())?,
                    next_report: now + FIRST_REPORT,
                    last_report: None,
                    agreed,
                });
            }
            Some(stream) => {
                if codec != stream.codec || agreed.payload_type != stream.agreed.payload_type {
                    stream.speaker = speaker()?;
                }
                stream.ear.recorder().change(codec, types)?;
                stream.speaker.set_sends(agreed.direction.sends());
                if agreed.srtp != stream.agreed.srtp {
                    stream.protection = protection(agreed.srtp.as_ref())?;
                }
                stream.codec = codec;
                stream.held = agreed.held;
                stream.agreed = agreed;
            }
        }
        Ok(())
    }
}

impl Stream {
    fn reported(&mut self, now: Instant, datagram: &[u8], peer: &mut PeerReport) {
        let clear;
        let datagram = match &mut self.protection {
            None => datagram,
            Some(p) => match p.incoming.decrypt_rtcp(datagram) {
                Ok(bytes) => {
                    clear = bytes;
                    &clear[..]
                }
                Err(_) => return,
            },
        };
        for report in rtp::parse_rtcp(datagram) {
            let Report::Report { sender, blocks, .. } = report else { continue };
            if let Some(info) = sender {
                self.last_report = Some(((info.ntp >> 16) as u32, now));
            }
            peer.reports += 1;
            for block in blocks.iter().filter(|b| b.ssrc == self.speaker.ssrc()) {
                peer.lost = block.lost;
                peer.jitter = f64::from(block.jitter) / f64::from(self.codec.clock_rate());
                peer.round_trip = rtp::round_trip(rtp::ntp(clock::wall()), block).or(peer.round_trip);
            }
        }
    }
}

fn send_report(
    rtp_socket: &UdpSocket,
    rtcp_socket: &UdpSocket,
    stream: &mut Stream,
    now: Instant,
    leaving: bool,
) -> io::Result<()> {
    let Some(remote) = stream.agreed.remote_rtcp else { return Ok(()) };
    let mut blocks = Vec::new();
    if let Some(mut block) = stream.ear.recorder().block() {
        if let Some((ntp, at)) = stream.last_report {
            block.last_report = ntp;
            block.delay = (now.saturating_duration_since(at).as_secs_f64() * 65_536.0) as u32;
        }
        blocks.push(block);
    }
    let sender = stream.speaker.report(rtp::ntp(clock::wall()));
    let wire = rtp::write_rtcp(stream.speaker.ssrc(), sender, &blocks, "caller@antiphon-loadgen", leaving);
    let wire = match &mut stream.protection {
        None => Bytes::from(wire),
        Some(p) => p.outgoing.encrypt_rtcp(&wire).map_err(io::Error::other)?.freeze(),
    };
    let socket = if stream.agreed.rtcp_mux { rtp_socket } else { rtcp_socket };
    socket.try_send_to(&wire, remote).map(drop)
}

fn negotiator(policy: &sdp::Policy, local: SocketAddr, keys: &[sdp::Key; 4]) -> sdp::Negotiator {
    let local = sdp::LocalMedia {
        address: local.ip(),
        port: local.port(),
        // Some peers read the id as a signed 64-bit number.
        session_id: rand::random::<u64>() >> 2,
        keys: *keys,
        dtls: None,
    };
    sdp::Negotiator::new(policy.clone(), local)
}

fn rand_key() -> [u8; sdp::Key::LENGTH] {
    let mut key = [0; sdp::Key::LENGTH];
    for byte in &mut key {
        *byte = rand::random();
    }
    key
}

fn protection(keys: Option<&sdp::SrtpKeys>) -> Result<Option<Protection>, CallError> {
    let Some(keys) = keys else { return Ok(None) };
    let profile = match keys.suite {
        sdp::Suite::AesCm128Sha1_80 => ProtectionProfile::Aes128CmHmacSha1_80,
        sdp::Suite::AesCm128Sha1_32 => ProtectionProfile::Aes128CmHmacSha1_32,
        sdp::Suite::AeadAes256Gcm => ProtectionProfile::AeadAes256Gcm,
        sdp::Suite::AeadAes128Gcm => ProtectionProfile::AeadAes128Gcm,
    };
    let fail = |reason: String| CallError::BadAnswer(format!("SRTP: {reason}"));
    let provider = rtc_srtp::crypto::default_provider().map_err(|e| fail(e.to_string()))?;
    let context = |key: &sdp::Key| {
        let (master, salt) = (key.master(keys.suite), key.salt(keys.suite));
        Context::new(master, salt, profile, None, None, provider.crypto()).map_err(|e| fail(e.to_string()))
    };
    Ok(Some(Protection { outgoing: context(&keys.local)?, incoming: context(&keys.remote)? }))
}

fn wire_codec(codec: Codec) -> sdp::Codec {
    match codec {
        Codec::Opus => sdp::Codec::Opus,
        Codec::G722 => sdp::Codec::G722,
        Codec::Pcmu => sdp::Codec::Pcmu,
        Codec::Pcma => sdp::Codec::Pcma,
    }
}

fn own_codec(codec: sdp::Codec) -> Codec {
    match codec {
        sdp::Codec::Opus => Codec::Opus,
        sdp::Codec::G722 => Codec::G722,
        sdp::Codec::Pcmu => Codec::Pcmu,
        sdp::Codec::Pcma => Codec::Pcma,
    }
}
