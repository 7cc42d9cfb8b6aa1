//! Kamailio as registrar and proxy: it shares no code with us, asks for a password, and stays in the dialog by
//! Record-Route. Without it the test is skipped, and counted.

use std::{net::UdpSocket as StdUdpSocket, path::Path, process::Stdio};

use crate::support::{event, hold, limited, loopback, speak_until_heard, start, within};
use antiphon::{
    media::leg::{LegEnd, LegEvent, MediaLeg},
    sip::{DialRequest, SipConfig, TrunkConfig},
};
use tempfile::TempDir;
use tokio::process::{Child, Command};

/// A running Kamailio, which ends with it.
struct Proxy {
    child: Child,
    port: u16,
    _folder: TempDir,
}

impl Proxy {
    fn start() -> Option<Proxy> {
        if !antiphon_skip::has_program("kamailio", "kamailio") {
            return None;
        }
        let folder = tempfile::tempdir().expect("a folder");
        let port = StdUdpSocket::bind("127.0.0.1:0").and_then(|s| s.local_addr()).expect("a free port").port();
        let child = Command::new("kamailio")
            .arg("-f")
            .arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/sip/kamailio.cfg"))
            .args(["-l", &format!("udp:127.0.0.1:{port}"), "-DD", "-E", "-m", "16", "-M", "4"])
            .arg("-w")
            .arg(folder.path())
            .arg("-Y")
            .arg(folder.path())
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .expect("kamailio runs");
        Some(Proxy { child, port, _folder: folder })
    }

    /// It as a trunk.
    fn trunk(&self, more: &str) -> TrunkConfig {
        toml::from_str(&format!("name = \"proxy\"\nhost = \"127.0.0.1:{}\"\n{more}", self.port)).expect("valid")
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        // It has processes of its own, and ends them when it is asked to end.
        if let Some(id) = self.child.id() {
            let _ = std::process::Command::new("kill").arg(id.to_string()).status();
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn kamailio_is_registered_with_and_calls_pass_through_it() {
    let Some(proxy) = Proxy::start() else { return };
    let registered = proxy.trunk("username = \"alice\"\npassword = \"wonderland\"\nregister = true");
    let (called, mut calls) = start(SipConfig { trunk: vec![registered], ..loopback() }).await;
    within("the registration", || called.trunks()[0].registered == Some(true)).await;
    let trunk = proxy.trunk("codecs = [\"pcma\"]\nprefixes = [\"*\"]\noptions_s = 1");
    let (caller, _none) = start(SipConfig { trunk: vec![trunk], ..loopback() }).await;
    let request = |to: &str| DialRequest { to: to.to_owned(), ..DialRequest::default() };
    assert!(limited(caller.dial(request("nobody"))).await.is_err(), "who is not registered cannot be called");
    let dialled = limited(caller.dial(request("alice")));
    let accepted = async { limited(limited(calls.recv()).await.expect("a call").accept()).await };
    let (dialled, accepted) = tokio::join!(dialled, accepted);
    let (mut here, mut there) = (dialled.expect("answered"), accepted.expect("accepted"));
    here.attach().await.expect("attaches");
    there.attach().await.expect("attaches");
    event(&mut there, |e| *e == LegEvent::Connected).await;
    speak_until_heard(&mut here, &mut there).await;
    speak_until_heard(&mut there, &mut here).await;
    // In the dialog both ways, by the route that was recorded.
    hold(&mut here, true).await.expect("held through the proxy");
    hold(&mut here, false).await.expect("and resumed");
    there.hang_up().await;
    assert_eq!(event(&mut here, |e| matches!(e, LegEvent::Closed(_))).await, LegEvent::Closed(LegEnd::Remote));
    within("the health of the trunk", || caller.trunks()[0].up == Some(true)).await;
    within("every call to be forgotten", || caller.calls() + called.calls() == 0).await;
}
