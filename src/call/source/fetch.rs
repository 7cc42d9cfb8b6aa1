//! Recordings that `play` names by an HTTPS URL.
//!
//! Owns the connections. Never decodes, never queues.
//!
//! # Why
//! An agent is the operator's and its words may be a caller's: a URL in them must not make the gateway ask services of
//! its own network. So only hosts that the configuration names are asked, by TLS, at public addresses; a redirect is
//! judged as the URL was, by us and not by the client, as it may lead anywhere; and time and size are bounded.

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use reqwest::header::{ACCEPT, LOCATION};
use reqwest::{Client, Response, Url};
use tokio::sync::Semaphore;

use crate::call::settings::PlayWeb;
use crate::reach::{Clients, cause, private_literal};

/// Redirects that are followed: one to a mirror, one to a signed URL, one to spare.
const MAX_REDIRECTS: usize = 3;
/// Longest wait for TCP and TLS.
const CONNECT: Duration = Duration::from_secs(3);
/// Downloads of all calls at a time; more wait within their own time limit. With the default size they hold 512 MiB at
/// most.
const AT_ONCE: usize = 32;

/// Connections to where recordings are. Cheap to clone.
#[derive(Clone, Debug)]
pub(super) struct Fetcher {
    clients: Clients,
    permits: Arc<Semaphore>,
}

impl Fetcher {
    /// The one of this process: connections and downloads at a time are shared by all calls.
    ///
    /// # Errors
    /// TLS cannot be set up.
    pub(super) fn shared() -> Result<Self, String> {
        static SHARED: OnceLock<Fetcher> = OnceLock::new();
        if let Some(fetcher) = SHARED.get() {
            return Ok(fetcher.clone());
        }
        let fetcher = Self::new(|builder| builder).map_err(|error| format!("no HTTPS client: {}", cause(&error)))?;
        Ok(SHARED.get_or_init(|| fetcher).clone())
    }

    fn new(adapt: impl Fn(reqwest::ClientBuilder) -> reqwest::ClientBuilder) -> reqwest::Result<Self> {
        let clients = Clients::new(|| adapt(Client::builder().connect_timeout(CONNECT).https_only(true)))?;
        Ok(Self { clients, permits: Arc::new(Semaphore::new(AT_ONCE)) })
    }

    /// The bytes at `url`, of a host that `rules` allow.
    ///
    /// # Errors
    /// What is wrong with the URL, the server, or what it sends; for the agent.
    pub(super) async fn get(&self, rules: &PlayWeb, url: Url) -> Result<Vec<u8>, String> {
        let limit = Duration::from_secs(rules.timeout_s);
        let fetched = async {
            // Never closed.
            let _permit = self.permits.acquire().await.map_err(|error| error.to_string())?;
            let response = self.follow(rules, url).await?;
            read(response, rules.max_bytes).await
        };
        let timed = tokio::time::timeout(limit, fetched).await;
        timed.unwrap_or_else(|_| Err(format!("it was not there within {} s", rules.timeout_s)))
    }

    async fn follow(&self, rules: &PlayWeb, mut url: Url) -> Result<Response, String> {
        let client = self.clients.of(rules.allow_private);
        for _ in 0..=MAX_REDIRECTS {
            judge(rules, &url)?;
            let request = client.get(url.clone()).header(ACCEPT, "audio/*");
            let response = request.send().await.map_err(|error| cause(&error))?;
            let status = response.status();
            if status.is_success() {
                return Ok(response);
            }
            let next = response.headers().get(LOCATION).and_then(|to| to.to_str().ok());
            match next.filter(|_| status.is_redirection()).map(|to| url.join(to)) {
                Some(Ok(next)) => url = next,
                Some(Err(error)) => return Err(format!("it redirects to what is no URL: {error}")),
                None => return Err(format!("its server answered {status}")),
            }
        }
        Err(format!("it redirects more than {MAX_REDIRECTS} times"))
    }
}

/// The body, of `most` bytes at most.
async fn read(mut response: Response, most: usize) -> Result<Vec<u8>, String> {
    let too_large = || format!("it is larger than the {most} bytes of [call.play] max_bytes");
    if response.content_length().is_some_and(|length| length > most as u64) {
        return Err(too_large());
    }
    let mut bytes = Vec::new();
    while let Some(chunk) = response.chunk().await.map_err(|error| cause(&error))? {
        if bytes.len() + chunk.len() > most {
            return Err(too_large());
        }
        bytes.extend_from_slice(&chunk);
    }
    Ok(bytes)
}

/// Whether `rules` let `url` be asked.
///
/// # Errors
/// What is wrong with it, and what would mend it.
pub(super) fn judge(rules: &PlayWeb, url: &Url) -> Result<(), String> {
    if url.scheme() != "https" {
        return Err(format!("`{}:` is not fetched; use https:", url.scheme()));
    }
    if !url.username().is_empty() || url.password().is_some() {
        return Err("a URL with a user name or a password is not fetched".into());
    }
    let host = url.host_str().unwrap_or_default();
    let port = url.port_or_known_default().unwrap_or(443);
    if !rules.allows(host, port) {
        return Err(format!("`{host}` (port {port}) is none of [call.play] hosts"));
    }
    match private_literal(url) {
        Some(ip) if !rules.allow_private => Err(format!("{ip} is a private address")),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::TcpListener;

    use super::*;

    fn rules(hosts: &[&str]) -> PlayWeb {
        PlayWeb { hosts: hosts.iter().map(|host| (*host).to_owned()).collect(), ..PlayWeb::default() }
    }

    fn url(text: &str) -> Url {
        text.parse().expect("a URL")
    }

    #[test]
    fn only_named_hosts_are_asked_by_tls_and_at_public_addresses() {
        let named = rules(&["media.example.com", "*.cdn.example", "files.example:8443", "10.0.0.1"]);
        for good in ["https://media.example.com/a.mp3", "https://a.b.cdn.example/x", "https://files.example:8443/x"] {
            assert_eq!(judge(&named, &url(good)), Ok(()), "{good}");
        }
        for (bad, why) in [
            ("http://media.example.com/a", "use https"),
            ("https://media.example.com:444/a", "none of [call.play] hosts"),
            ("https://cdn.example/a", "none of"),
            ("https://evilcdn.example/a", "none of"),
            ("https://files.example/a", "none of"),
            ("https://me:secret@media.example.com/a", "password"),
            ("https://me@media.example.com/a", "user name"),
            ("https://10.0.0.1/a", "private address"),
            ("file:///etc/passwd", "use https"),
        ] {
            let refused = judge(&named, &url(bad)).expect_err(bad);
            assert!(refused.contains(why) && !refused.contains("secret"), "{bad}: {refused}");
        }
        let all = rules(&["*"]);
        assert_eq!(judge(&all, &url("https://anything.example/a")), Ok(()));
        for inside in
            ["https://127.0.0.1/a", "https://[::1]/a", "https://169.254.169.254/latest", "https://2130706433/a"]
        {
            assert!(judge(&all, &url(inside)).is_err(), "{inside}");
        }
        assert!(judge(&PlayWeb::default(), &url("https://media.example.com/a")).is_err(), "nothing is open by default");
    }

    /// A server of HTTPS on loopback; gives its port. What it answers depends on the path.
    async fn server() -> u16 {
        let data = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/cluster");
        let chain = crate::pem::certificates(&data.join("node.pem")).expect("a certificate");
        let key = crate::pem::key(&data.join("node-key.pem")).expect("a key");
        let config = rustls::ServerConfig::builder_with_provider(Arc::new(rustls::crypto::ring::default_provider()))
            .with_safe_default_protocol_versions()
            .expect("versions")
            .with_no_client_auth()
            .with_single_cert(chain, key)
            .expect("they belong together");
        let acceptor = tokio_rustls::TlsAcceptor::from(Arc::new(config));
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("binds");
        let port = listener.local_addr().expect("bound").port();
        tokio::spawn(async move {
            while let Ok((socket, _)) = listener.accept().await {
                let acceptor = acceptor.clone();
                tokio::spawn(async move {
                    let Ok(mut socket) = acceptor.accept(socket).await else { return };
                    let mut head = Vec::new();
                    while !head.ends_with(b"\r\n\r\n") {
                        let mut byte = [0];
                        if socket.read_exact(&mut byte).await.is_err() {
                            return;
                        }
                        head.push(byte[0]);
                    }
                    let head = String::from_utf8_lossy(&head).into_owned();
                    let path = head.split(' ').nth(1).unwrap_or_default().to_owned();
                    let answer = match path.as_str() {
                        "/sound" => "HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nsound".to_owned(),
                        "/moved" => "HTTP/1.1 302 Found\r\nLocation: /sound\r\nContent-Length: 0\r\n\r\n".into(),
                        "/away" => {
                            "HTTP/1.1 307 T\r\nLocation: https://other.example/a\r\nContent-Length: 0\r\n\r\n".into()
                        }
                        "/down" => format!(
                            "HTTP/1.1 301 M\r\nLocation: http://localhost:{port}/sound\r\nContent-Length: 0\r\n\r\n"
                        ),
                        "/round" => "HTTP/1.1 302 F\r\nLocation: /round\r\nContent-Length: 0\r\n\r\n".into(),
                        "/long" => format!("HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n{}", "x".repeat(5_000)),
                        // It never answers.
                        "/never" => return std::future::pending().await,
                        _ => "HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n".into(),
                    };
                    let _ = socket.write_all(answer.as_bytes()).await;
                    let _ = socket.shutdown().await;
                });
            }
        });
        port
    }

    fn fetcher() -> Fetcher {
        let _ = rustls::crypto::ring::default_provider().install_default();
        let ca = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/data/cluster/ca.pem");
        let ca = reqwest::Certificate::from_pem(&std::fs::read(ca).expect("there")).expect("a certificate");
        Fetcher::new(move |builder| builder.tls_certs_only([ca.clone()])).expect("a client")
    }

    #[tokio::test]
    async fn a_recording_is_fetched_within_its_limits_and_redirects_are_judged_again() {
        let (port, fetcher) = (server().await, fetcher());
        let open = PlayWeb { allow_private: true, max_bytes: 4_000, timeout_s: 30, ..rules(&["*"]) };
        let named = PlayWeb { hosts: vec![format!("localhost:{port}")], ..open.clone() };
        let at = |path: &str| url(&format!("https://localhost:{port}{path}"));
        assert_eq!(fetcher.get(&named, at("/sound")).await.as_deref(), Ok(&b"sound"[..]));
        assert_eq!(fetcher.get(&named, at("/moved")).await.as_deref(), Ok(&b"sound"[..]));
        for (path, why) in [
            ("/away", "`other.example` (port 443) is none of"),
            ("/down", "use https"),
            ("/round", "redirects more than"),
            ("/long", "larger than the 4000 bytes"),
            ("/none", "404"),
        ] {
            let failed = fetcher.get(&named, at(path)).await.expect_err(path);
            assert!(failed.contains(why), "{path}: {failed}");
        }
        let hurried = PlayWeb { timeout_s: 1, ..named.clone() };
        let late = fetcher.get(&hurried, at("/never")).await.expect_err("too slow");
        assert!(late.contains("within 1 s"), "{late}");
        // The name leads to this host, which is not public.
        let screened = PlayWeb { allow_private: false, ..named };
        let inside = fetcher.get(&screened, at("/sound")).await.expect_err("screened");
        assert!(inside.contains("no public address"), "{inside}");
    }
}
