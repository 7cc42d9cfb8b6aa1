//! A gateway whose port no peer can reach: through a real TURN server (coturn), over UDP and over TCP.

use std::net::{TcpListener, UdpSocket};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use crate::support::{Audio, Peer, echo, gateway, within};
use antiphon::media::leg::LegEvent;
use antiphon::secret::Secret;
use antiphon::webrtc::{IceServer, Login, WebRtcConfig};
use webrtc::peer_connection::RTCPeerConnectionState;

const SECRET: &str = "the relay knows it too";

/// coturn, killed when this is dropped.
struct Turn {
    child: Child,
    port: u16,
    _folder: tempfile::TempDir,
}

impl Turn {
    async fn start() -> Turn {
        let port = TcpListener::bind("127.0.0.1:0").and_then(|socket| socket.local_addr()).expect("a free port").port();
        let folder = tempfile::tempdir().expect("a folder");
        let child = Command::new("turnserver")
            .args(["-n", "--no-cli", "--no-tls", "--no-dtls", "--listening-ip=127.0.0.1", "--relay-ip=127.0.0.1"])
            .args(["--allow-loopback-peers", "--realm=example.org", "--use-auth-secret", "--log-file=stdout"])
            .arg(format!("--static-auth-secret={SECRET}"))
            .arg(format!("--listening-port={port}"))
            .arg(format!("--userdb={}", folder.path().join("users").display()))
            .arg(format!("--pidfile={}", folder.path().join("pid").display()))
            .current_dir(folder.path())
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .expect("coturn starts");
        let turn = Turn { child, port, _folder: folder };
        within("coturn", async {
            while tokio::net::TcpStream::connect(("127.0.0.1", port)).await.is_err() {
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        })
        .await;
        turn
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_gateway_that_nobody_reaches_is_called_through_its_relay() {
    if !antiphon_skip::has_program("turnserver", "coturn") {
        return;
    }
    let turn = Turn::start().await;
    for transport in ["udp", "tcp"] {
        let login = Login::Shared {
            secret: Secret::new(SECRET),
            username: "gateway".to_owned(),
            ttl: Duration::from_secs(600),
        };
        let server =
            IceServer { urls: vec![format!("turn:127.0.0.1:{}?transport={transport}", turn.port)], login: Some(login) };
        let gateway = gateway(WebRtcConfig { turn: Some(server), ..WebRtcConfig::default() }).await;
        let mut peer = Peer::new(Audio::SendRecv, Some("agent")).await;
        // A permission is for an address with all its ports: this one names the address and reaches nobody.
        let nobody = UdpSocket::bind("127.0.0.1:0").expect("a port");
        let elsewhere = format!(
            "a=candidate:1 1 udp 2130706431 127.0.0.1 {} typ host\r\n",
            nobody.local_addr().expect("bound").port()
        );
        let offer = peer.offer().await;
        let kept = offer.lines().filter(|line| !line.starts_with("a=candidate") && *line != "a=end-of-candidates");
        let offer = kept.fold(String::new(), |sdp, line| sdp + line + "\r\n") + &elsewhere;
        let answered = gateway.answer(&offer).await.expect("a good offer");
        let own = format!(" {} typ host", gateway.local_addr().port());
        let relayed: Vec<&str> = answered.sdp.lines().filter(|line| line.contains(" typ relay ")).collect();
        assert!(!relayed.is_empty(), "{transport}: {}", answered.sdp);
        assert!(relayed.iter().all(|line| line.ends_with("raddr 0.0.0.0 rport 0")), "{relayed:?}");
        // The gateway's own port is nowhere to the peer.
        let reached: Vec<&str> = answered.sdp.lines().filter(|line| !line.contains(&own)).collect();
        let mut call = echo(answered.leg);
        peer.accept(&(reached.join("\r\n") + "\r\n")).await;
        peer.state(RTCPeerConnectionState::Connected).await;
        call.next(|event| matches!(event, LegEvent::Connected)).await;
        peer.channel_open().await;
        peer.say(transport).await;
        assert_eq!(peer.next_text().await, format!("heard {transport}"));
        for number in 1..=20_u16 {
            peer.send(number, u32::from(number) * 960, b"sound").await;
            assert_eq!(&peer.next_rtp().await.payload[..], b"sound");
        }
        gateway.shutdown().await;
    }
}
