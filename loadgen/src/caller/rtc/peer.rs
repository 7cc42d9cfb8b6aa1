//! A peer connection as every WebRTC endpoint of this crate, and of the tests of the gateway, sets one up: one codec, perhaps
//! telephone events, one audio section, all candidates gathered before the description is handed over.
//!
//! Owns the making of it and what its driver tells; who offers, who answers and what is said is its user's.

use std::net::{IpAddr, Ipv4Addr};
use std::sync::Arc;
use std::time::Duration;

use ::rtc::ice::mdns::MulticastDnsMode;
use ::rtc::ice::network_type::NetworkType;
use ::rtc::interceptor::{NackGeneratorBuilder, NackResponderBuilder, Slot};
use ::rtc::media_stream::MediaStreamTrack;
use ::rtc::peer_connection::configuration::media_engine::{
    MIME_TYPE_G722, MIME_TYPE_OPUS, MIME_TYPE_PCMA, MIME_TYPE_PCMU, MIME_TYPE_TELEPHONE_EVENT,
};
use ::rtc::rtp as wire;
use ::rtc::rtp_transceiver::rtp_sender::{
    RTCPFeedback, RTCRtpCodec, RTCRtpCodecParameters, RTCRtpCodingParameters, RTCRtpEncodingParameters, RtpCodecKind,
};
use tokio::sync::{mpsc, watch};
use webrtc::data_channel::DataChannel;
use webrtc::error::Error;
use webrtc::media_stream::track_local::TrackLocal;
use webrtc::media_stream::track_local::static_rtp::TrackLocalStaticRTP;
use webrtc::media_stream::track_remote::TrackRemote;
use webrtc::peer_connection::{
    MediaEngine, PeerConnection, PeerConnectionBuilder, PeerConnectionEventHandler, RTCConfigurationBuilder,
    RTCIceGatheringState, RTCPeerConnectionState, Registry, SettingEngineBuilder, configure_rtcp_reports,
};
use webrtc::rtp_transceiver::{RTCRtpTransceiverDirection, RTCRtpTransceiverInit};
use webrtc::runtime::TokioRuntime;

use super::runtime::Sparing;
use crate::caller::call::CallError;
use crate::wire::codec::Codec;
use crate::wire::rtp;

/// What a peer can do.
#[derive(Clone, Copy, Debug)]
pub struct Shape {
    /// Own address for media.
    pub address: IpAddr,
    /// What it speaks, and nothing else.
    pub codec: Codec,
    /// Payload type of that codec.
    pub audio: u8,
    /// Payload type of telephone events; browsers of today offer none.
    pub events: Option<u8>,
    /// Whether it has a microphone; without one it offers to receive only.
    pub sends: bool,
    /// Only TCP: a peer whose network lets no UDP out.
    pub tcp: bool,
    /// First connectivity checks after 20 instead of 200 ms: a load test sets up many calls.
    pub eager: bool,
    /// An ICE restart opens new sockets on the networks that there are then.
    pub roams: bool,
    /// Asks for packets that are missing, and sends its own again when it is asked (RFC 4585).
    pub repeats: bool,
}

impl Default for Shape {
    fn default() -> Self {
        let address = IpAddr::V4(Ipv4Addr::LOCALHOST);
        Shape {
            address,
            codec: Codec::Opus,
            audio: 111,
            events: None,
            sends: true,
            tcp: false,
            eager: false,
            roams: false,
            repeats: false,
        }
    }
}

/// A track that is sent on.
#[derive(Clone)]
pub struct Microphone {
    track: Arc<TrackLocalStaticRTP>,
    ssrc: u32,
}

impl Microphone {
    /// Sends `packet` under the track's own SSRC.
    ///
    /// # Errors
    /// The track is not bound to a connection, or that is closed.
    pub async fn send(&self, packet: rtp::Packet) -> Result<(), Error> {
        let header = wire::Header {
            version: 2,
            marker: packet.marker,
            payload_type: packet.payload_type,
            sequence_number: packet.sequence,
            timestamp: packet.timestamp,
            ssrc: self.ssrc,
            ..Default::default()
        };
        self.track.write_rtp(wire::Packet { header, payload: packet.payload }).await
    }
}

/// A connection and what its driver tells. Dropping the connection leaves its socket open: it is to be closed.
pub struct Peer {
    /// The connection.
    pub connection: Arc<dyn PeerConnection>,
    /// What it speaks on, if it does.
    pub microphone: Option<Microphone>,
    /// How the connection is.
    pub state: watch::Receiver<RTCPeerConnectionState>,
    /// Whether all candidates are known.
    pub gathered: watch::Receiver<bool>,
    /// Tracks of the other side.
    pub tracks: mpsc::Receiver<Arc<dyn TrackRemote>>,
    /// Data channels that the other side opened.
    pub channels: mpsc::Receiver<Arc<dyn DataChannel>>,
}

impl Peer {
    /// Opens the sockets.
    ///
    /// # Errors
    /// The library refuses, for want of a port.
    pub async fn new(shape: Shape) -> Result<Peer, CallError> {
        let (state, state_seen) = watch::channel(RTCPeerConnectionState::New);
        let (gathered, gathered_seen) = watch::channel(false);
        let (tracks, tracks_seen) = mpsc::channel(4);
        let (channels, channels_seen) = mpsc::channel(4);
        let codecs = codecs(&shape);
        let mut engine = MediaEngine::default();
        for codec in &codecs {
            engine.register_codec(codec.clone(), RtpCodecKind::Audio).map_err(failed)?;
        }
        let mut interceptors = configure_rtcp_reports(Registry::new());
        if shape.repeats {
            let feedback = RTCPFeedback { typ: "nack".to_owned(), parameter: String::new() };
            engine.register_feedback(feedback, RtpCodecKind::Audio);
            interceptors =
                interceptors.with(Slot::NackResponder, NackResponderBuilder::new().with_size(64).build()).with(
                    Slot::NackGenerator,
                    NackGeneratorBuilder::new().with_interval(Duration::from_millis(30)).build(),
                );
        }
        let mut settings = SettingEngineBuilder::new()
            .with_multicast_dns_mode(MulticastDnsMode::Disabled)
            .with_include_loopback_candidate(true)
            .with_discard_local_candidates_during_ice_restart(shape.roams);
        if shape.eager {
            settings = settings.with_ice_connection_attempts(Some(Duration::from_millis(20)), Some(100));
        }
        let local = vec![format!("{}:0", shape.address)];
        let (udp, tcp) = match shape.tcp {
            true => {
                settings = settings.with_network_types(vec![NetworkType::Tcp4]);
                (Vec::new(), local)
            }
            false => (local, Vec::new()),
        };
        let connection = PeerConnectionBuilder::new()
            .with_configuration(RTCConfigurationBuilder::new().build())
            .with_media_engine(engine)
            .with_setting_engine(settings.build())
            .with_interceptor_registry(interceptors)
            .with_runtime(Arc::new(Sparing(TokioRuntime)))
            .with_handler(Arc::new(Events { state, gathered, tracks, channels }))
            .with_udp_addrs(udp)
            .with_tcp_addrs(tcp)
            .build()
            .await
            .map_err(failed)?;
        let connection: Arc<dyn PeerConnection> = Arc::new(connection);
        let microphone = microphone(connection.as_ref(), &shape).await;
        let made = match microphone {
            Ok(microphone) => prefer(connection.as_ref(), &codecs).await.map(|()| microphone),
            Err(error) => Err(error),
        };
        match made {
            Ok(microphone) => Ok(Peer {
                connection,
                microphone,
                state: state_seen,
                gathered: gathered_seen,
                tracks: tracks_seen,
                channels: channels_seen,
            }),
            Err(error) => {
                let _ = connection.close().await;
                Err(failed(error))
            }
        }
    }

    /// The local description with all its candidates, once one is set.
    ///
    /// # Errors
    /// None is set, or the driver is gone.
    pub async fn description(&mut self) -> Result<String, CallError> {
        let lost = |what: &str| CallError::WebRtc(what.to_owned());
        self.gathered.wait_for(|done| *done).await.map_err(|_| lost("no candidates"))?;
        Ok(self.connection.local_description().await.ok_or_else(|| lost("no local description"))?.sdp)
    }
}

/// Has all of `codecs` offered: left alone, only the track's own one is.
async fn prefer(connection: &dyn PeerConnection, codecs: &[RTCRtpCodecParameters]) -> Result<(), Error> {
    if codecs.len() > 1 {
        for transceiver in connection.get_transceivers().await {
            transceiver.set_codec_preferences(codecs.to_vec()).await?;
        }
    }
    Ok(())
}

async fn microphone(connection: &dyn PeerConnection, shape: &Shape) -> Result<Option<Microphone>, Error> {
    if !shape.sends {
        let init = RTCRtpTransceiverInit { direction: RTCRtpTransceiverDirection::Recvonly, ..Default::default() };
        connection.add_transceiver_from_kind(RtpCodecKind::Audio, Some(init)).await?;
        return Ok(None);
    }
    let ssrc = rand::random::<u32>();
    let coding = RTCRtpEncodingParameters {
        rtp_coding_parameters: RTCRtpCodingParameters { ssrc: Some(ssrc), ..Default::default() },
        codec: capability(shape.codec),
        ..Default::default()
    };
    let name = || "microphone".to_owned();
    let stream = MediaStreamTrack::new(name(), name(), name(), RtpCodecKind::Audio, vec![coding]);
    let track = Arc::new(TrackLocalStaticRTP::new(stream));
    connection.add_track(track.clone() as Arc<dyn TrackLocal>).await?;
    Ok(Some(Microphone { track, ssrc }))
}

/// A packet of the library as one of ours.
pub fn received(packet: wire::Packet) -> rtp::Packet {
    rtp::Packet {
        payload_type: packet.header.payload_type,
        marker: packet.header.marker,
        sequence: packet.header.sequence_number,
        timestamp: packet.header.timestamp,
        ssrc: packet.header.ssrc,
        payload: packet.payload,
    }
}

/// What the connection's driver tells: it runs on the driver's task, so everything is handed on at once.
struct Events {
    state: watch::Sender<RTCPeerConnectionState>,
    gathered: watch::Sender<bool>,
    tracks: mpsc::Sender<Arc<dyn TrackRemote>>,
    channels: mpsc::Sender<Arc<dyn DataChannel>>,
}

#[async_trait::async_trait]
impl PeerConnectionEventHandler for Events {
    async fn on_ice_gathering_state_change(&self, state: RTCIceGatheringState) {
        if state == RTCIceGatheringState::Complete {
            self.gathered.send_replace(true);
        }
    }

    async fn on_connection_state_change(&self, state: RTCPeerConnectionState) {
        self.state.send_replace(state);
    }

    async fn on_track(&self, track: Arc<dyn TrackRemote>) {
        // overflow: refused; a fifth audio track would not be listened to anyway.
        let _ = self.tracks.try_send(track);
    }

    async fn on_data_channel(&self, channel: Arc<dyn DataChannel>) {
        // overflow: refused, as above.
        let _ = self.channels.try_send(channel);
    }
}

fn codecs(shape: &Shape) -> Vec<RTCRtpCodecParameters> {
    let events = shape.events.map(|payload_type| RTCRtpCodecParameters {
        rtp_codec: RTCRtpCodec {
            mime_type: MIME_TYPE_TELEPHONE_EVENT.to_owned(),
            clock_rate: 8_000,
            ..RTCRtpCodec::default()
        },
        payload_type,
    });
    let audio = RTCRtpCodecParameters { rtp_codec: capability(shape.codec), payload_type: shape.audio };
    std::iter::once(audio).chain(events).collect()
}

fn capability(codec: Codec) -> RTCRtpCodec {
    let (mime, channels, parameters) = match codec {
        Codec::Opus => (MIME_TYPE_OPUS, 2, "minptime=10;useinbandfec=1"),
        Codec::G722 => (MIME_TYPE_G722, 0, ""),
        Codec::Pcmu => (MIME_TYPE_PCMU, 0, ""),
        Codec::Pcma => (MIME_TYPE_PCMA, 0, ""),
    };
    RTCRtpCodec {
        mime_type: mime.to_owned(),
        clock_rate: codec.clock_rate(),
        channels,
        sdp_fmtp_line: parameters.to_owned(),
        rtcp_feedback: Vec::new(),
    }
}

pub(super) fn failed(error: Error) -> CallError {
    CallError::WebRtc(error.to_string())
}
