//! A telephone that says exactly what a test tells it to, over UDP or TCP.

use std::net::SocketAddr;

use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpStream, UdpSocket},
    time::timeout,
};

use super::LIMIT;

/// SDP with one G.711 stream at `port`, and `extra` lines.
pub(crate) fn sdp(port: u16, extra: &str) -> String {
    format!(
        "v=0\r\no=- 1 1 IN IP4 127.0.0.1\r\ns=-\r\nc=IN IP4 127.0.0.1\r\nt=0 0\r\nm=audio {port} RTP/AVP 0 101\r\n\
         a=rtpmap:101 telephone-event/8000\r\n{extra}"
    )
}

/// One end of one dialog.
pub(crate) struct Raw {
    socket: UdpSocket,
    pub(crate) target: SocketAddr,
    call_id: String,
    local: String,
    pub(crate) remote_tag: String,
    pub(crate) contact: String,
    cseq: u32,
    branch: u32,
    /// Requests that came, by CSeq.
    seen: Vec<String>,
}

impl Raw {
    pub(crate) async fn new(target: SocketAddr, call_id: &str) -> Raw {
        Raw::at(if target.is_ipv6() { "::1" } else { "127.0.0.1" }, target, call_id).await
    }

    /// As [`Raw::new`], at another address of this machine.
    pub(crate) async fn at(ip: &str, target: SocketAddr, call_id: &str) -> Raw {
        let socket = UdpSocket::bind((ip, 0)).await.expect("binds");
        let local = socket.local_addr().expect("bound").to_string();
        let contact = format!("sip:demo@{target}");
        Raw {
            socket,
            target,
            call_id: call_id.to_owned(),
            local,
            remote_tag: String::new(),
            contact,
            cseq: 0,
            branch: 0,
            seen: Vec::new(),
        }
    }

    /// Where it can be called.
    pub(crate) fn uri(&self) -> String {
        format!("sip:raw@{}", self.local)
    }

    /// A request of this dialog; `headers` are whole lines.
    pub(crate) fn request(&mut self, method: &str, headers: &str, body: &str) -> String {
        if !matches!(method, "ACK" | "CANCEL") {
            self.cseq += 1;
        }
        if method != "CANCEL" {
            self.branch += 1;
        }
        let Raw { local, call_id, cseq, branch, contact, .. } = self;
        let tag = if self.remote_tag.is_empty() { String::new() } else { format!(";tag={}", self.remote_tag) };
        let kind =
            if body.is_empty() || headers.contains("Content-Type") { "" } else { "Content-Type: application/sdp\r\n" };
        format!(
            "{method} {contact} SIP/2.0\r\nVia: SIP/2.0/UDP {local};branch=z9hG4bK{call_id}{branch};rport\r\n\
             Max-Forwards: 70\r\nFrom: <sip:raw@{local}>;tag=raw\r\nTo: <sip:demo@127.0.0.1>{tag}\r\n\
             Call-ID: {call_id}\r\nCSeq: {cseq} {method}\r\nContact: <sip:raw@{local}>\r\n{kind}{headers}\
             Content-Length: {}\r\n\r\n{body}",
            body.len()
        )
    }

    pub(crate) async fn send(&self, text: &str) {
        self.socket.send_to(text.as_bytes(), self.target).await.expect("sends");
    }

    /// The next message whose first line contains `wanted`. Others are passed over.
    pub(crate) async fn expect(&mut self, wanted: &str) -> String {
        let mut buffer = vec![0; 65_536];
        let found = timeout(LIMIT, async {
            loop {
                let (length, _) = self.socket.recv_from(&mut buffer).await.expect("receives");
                let text = String::from_utf8_lossy(&buffer[..length]).into_owned();
                if text.lines().next().unwrap_or_default().contains(wanted) {
                    return text;
                }
            }
        })
        .await;
        let Ok(text) = found else { panic!("`{wanted}` never came") };
        if let Some(tag) =
            header(&text, "To").and_then(|to| to.split(";tag=").nth(1)).filter(|_| text.starts_with("SIP/"))
        {
            self.remote_tag = tag.to_owned();
        }
        text
    }

    /// The next request of this method that is no repetition: one that is answered late is sent again.
    pub(crate) async fn next(&mut self, method: &str) -> String {
        loop {
            let request = self.expect(method).await;
            let number = header(&request, "CSeq").expect("CSeq").to_owned();
            if !self.seen.contains(&number) {
                self.seen.push(number);
                return request;
            }
        }
    }

    /// Sends a request and returns the final response.
    pub(crate) async fn ask(&mut self, method: &str, headers: &str, body: &str, wanted: &str) -> String {
        let request = self.request(method, headers, body);
        self.send(&request).await;
        self.expect(wanted).await
    }

    pub(crate) async fn ack(&mut self, body: &str) {
        let ack = self.request("ACK", "", body);
        self.send(&ack).await;
    }

    /// Answers a request that came to us.
    pub(crate) async fn answer(&self, request: &str, status: &str, headers: &str) {
        self.answer_with(request, status, headers, "").await;
    }

    /// The same with a body; `headers` name its type.
    pub(crate) async fn answer_with(&self, request: &str, status: &str, headers: &str, body: &str) {
        let mut out = format!("SIP/2.0 {status}\r\n");
        for line in request.split("\r\n") {
            let name = line.split(':').next().unwrap_or_default();
            if ["Via", "From", "To", "Call-ID", "CSeq"].contains(&name) {
                out.push_str(line);
                // The answer to a first INVITE makes a dialog.
                if name == "To" && !line.contains(";tag=") && !status.starts_with("100") {
                    out.push_str(";tag=raw");
                }
                out.push_str("\r\n");
            }
        }
        let (local, length) = (&self.local, body.len());
        out.push_str(&format!("Contact: <sip:raw@{local}>\r\n{headers}Content-Length: {length}\r\n\r\n{body}"));
        self.send(&out).await;
    }

    /// Whether anything arrives that contains `unwanted`, in the time that would take.
    pub(crate) async fn hears(&mut self, unwanted: &str, wait: std::time::Duration) -> bool {
        let mut buffer = vec![0; 65_536];
        timeout(wait, async {
            loop {
                let (length, _) = self.socket.recv_from(&mut buffer).await.expect("receives");
                if String::from_utf8_lossy(&buffer[..length]).contains(unwanted) {
                    return;
                }
            }
        })
        .await
        .is_ok()
    }
}

/// Value of the first header `name`.
pub(crate) fn header<'a>(text: &'a str, name: &str) -> Option<&'a str> {
    text.lines().find_map(|line| {
        let (n, value) = line.split_once(':')?;
        n.eq_ignore_ascii_case(name).then_some(value.trim())
    })
}

/// What is after the empty line.
pub(crate) fn body(text: &str) -> &str {
    text.split_once("\r\n\r\n").map_or("", |(_, body)| body)
}

/// The port at which the description in `text` wants its audio.
pub(crate) fn audio_port(text: &str) -> u16 {
    let media = body(text).lines().find_map(|line| line.strip_prefix("m=audio ")).expect("audio");
    media.split(' ').next().and_then(|port| port.parse().ok()).expect("a port")
}

/// Whether `target` answers OPTIONS with 200 over UDP.
pub(crate) async fn answers_options(target: SocketAddr, call_id: &str) {
    let mut raw = Raw::new(target, call_id).await;
    let response = raw.ask("OPTIONS", "", "", "SIP/2.0 200").await;
    assert!(header(&response, "Allow").expect("Allow").contains("INVITE"));
}

/// The same over TCP.
pub(crate) async fn answers_options_tcp(target: SocketAddr, call_id: &str) {
    let mut stream = TcpStream::connect(target).await.expect("connects");
    let local = stream.local_addr().expect("bound");
    let request = format!(
        "OPTIONS sip:demo@{target} SIP/2.0\r\nVia: SIP/2.0/TCP {local};branch=z9hG4bK{call_id}\r\nMax-Forwards: 70\r\n\
         From: <sip:raw@{local}>;tag=raw\r\nTo: <sip:demo@{target}>\r\nCall-ID: {call_id}\r\nCSeq: 1 OPTIONS\r\n\
         Content-Length: 0\r\n\r\n"
    );
    stream.write_all(request.as_bytes()).await.expect("writes");
    let mut buffer = vec![0; 4_096];
    let length = timeout(LIMIT, stream.read(&mut buffer)).await.expect("an answer").expect("reads");
    assert!(buffer[..length].starts_with(b"SIP/2.0 200"), "{}", String::from_utf8_lossy(&buffer[..length]));
}
