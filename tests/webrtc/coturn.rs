//! A real TURN server (coturn), which speaks UDP, TCP and TLS on loopback.

use std::net::TcpListener;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use antiphon::secret::Secret;
use antiphon::webrtc::{IceServer, Login};

const SECRET: &str = "the relay knows it too";
/// It starts in half a second on an idle machine.
const START: Duration = Duration::from_secs(60);

/// coturn, killed when this is dropped.
pub(crate) struct Turn {
    child: Child,
    port: u16,
    secure: u16,
    folder: tempfile::TempDir,
}

impl Turn {
    /// `None`, and the calling test is skipped, where it is not installed.
    pub(crate) async fn start() -> Option<Turn> {
        if !antiphon_skip::has_program("turnserver", "coturn") {
            return None;
        }
        let ports = [(); 2].map(|()| TcpListener::bind("127.0.0.1:0").expect("a free port"));
        let [port, secure] = ports.map(|port| port.local_addr().expect("bound").port());
        let folder = tempfile::tempdir().expect("a folder");
        let path = |name: &str| folder.path().join(name).display().to_string();
        let own = rcgen::generate_simple_self_signed(["127.0.0.1".to_owned()]).expect("a certificate");
        std::fs::write(path("certificate"), own.cert.pem()).expect("written");
        std::fs::write(path("key"), own.signing_key.serialize_pem()).expect("written");
        let child = Command::new("turnserver")
            .args(["-n", "--no-cli", "--no-dtls", "--listening-ip=127.0.0.1", "--relay-ip=127.0.0.1"])
            .args(["--allow-loopback-peers", "--realm=example.org", "--use-auth-secret", "--log-file=stdout"])
            .arg(format!("--static-auth-secret={SECRET}"))
            .arg(format!("--listening-port={port}"))
            .arg(format!("--tls-listening-port={secure}"))
            .arg(format!("--cert={}", path("certificate")))
            .arg(format!("--pkey={}", path("key")))
            .arg(format!("--userdb={}", path("users")))
            .arg(format!("--pidfile={}", path("pid")))
            .current_dir(folder.path())
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .expect("coturn starts");
        let turn = Turn { child, port, secure, folder };
        let listens = async {
            for port in [port, secure] {
                while tokio::net::TcpStream::connect(("127.0.0.1", port)).await.is_err() {
                    tokio::time::sleep(Duration::from_millis(50)).await;
                }
            }
        };
        tokio::time::timeout(START, listens).await.expect("coturn listens");
        Some(turn)
    }

    /// The server by `udp`, `tcp` or `tls`, with passwords that end.
    pub(crate) fn by(&self, transport: &str) -> IceServer {
        let url = match transport {
            "tls" => format!("turns:127.0.0.1:{}?transport=tcp", self.secure),
            _ => format!("turn:127.0.0.1:{}?transport={transport}", self.port),
        };
        at(url)
    }

    /// Its certificate, which it has signed itself.
    pub(crate) fn certificate(&self) -> PathBuf {
        self.folder.path().join("certificate")
    }
}

/// A server of this module, perhaps of another process, by its URL.
pub(crate) fn at(url: String) -> IceServer {
    let login =
        Login::Shared { secret: Secret::new(SECRET), username: "antiphon".into(), ttl: Duration::from_secs(600) };
    IceServer { urls: vec![url], login: Some(login) }
}

impl Drop for Turn {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
