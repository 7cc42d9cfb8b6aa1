//! A gateway that is cut off, from Redis or from PostgreSQL, while everybody else is not: what two must not own has one owner, calls go
//! on, and all is as before once the way is there again.

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use antiphon::config::Config;
use antiphon::secret::Secret;
use antiphon_loadgen::call::now;
use antiphon_loadgen::codec::Codec;
use antiphon_skip::postgres::Postgres;
use serde_json::{Value, json};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream, UdpSocket, UnixListener, UnixStream};
use tokio::sync::watch;
use tokio::time::timeout;

use super::database::share;
use super::nodes::{Redis, knows};
use super::raw::header;
use super::support::{PATIENCE, Rig, SENTENCE, hear_turn};

/// A way to a server that can be cut: connections stay, and nothing comes through, as where a switch is gone.
struct Way {
    url: String,
    open: watch::Sender<bool>,
    /// Of a socket that is a file.
    _folder: Option<tempfile::TempDir>,
}

impl Way {
    async fn to_redis(url: &str) -> Self {
        let server: SocketAddr = url.trim_start_matches("redis://").parse().expect("an address");
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let url = format!("redis://{}", listener.local_addr().expect("bound"));
        let (open, through) = watch::channel(true);
        tokio::spawn(async move {
            while let Ok((near, _)) = listener.accept().await {
                tokio::spawn(carry(near, TcpStream::connect(server), through.clone()));
            }
        });
        Self { url, open, _folder: None }
    }

    async fn to_postgres(url: &str) -> Self {
        let (_, host) = url.split_once("?host=").expect("a folder of sockets");
        let (there, port) = host.split_once("&port=").expect("a port");
        let folder = tempfile::tempdir().expect("a folder");
        let name = format!(".s.PGSQL.{port}");
        let server = Path::new(there).join(&name);
        let listener = UnixListener::bind(folder.path().join(name)).expect("bound");
        let url = url.replace(there, folder.path().to_str().expect("UTF-8"));
        let (open, through) = watch::channel(true);
        tokio::spawn(async move {
            while let Ok((near, _)) = listener.accept().await {
                tokio::spawn(carry(near, UnixStream::connect(server.clone()), through.clone()));
            }
        });
        Self { url, open, _folder: Some(folder) }
    }

    fn cut(&self, cut: bool) {
        self.open.send_replace(!cut);
    }
}

async fn carry<N, F>(mut near: N, far: impl Future<Output = std::io::Result<F>>, mut through: watch::Receiver<bool>)
where
    N: AsyncRead + AsyncWrite + Unpin,
    F: AsyncRead + AsyncWrite + Unpin,
{
    if through.wait_for(|open| *open).await.is_err() {
        return;
    }
    let Ok(mut far) = far.await else { return };
    let mut cut = through.clone();
    tokio::select! {
        _ = tokio::io::copy_bidirectional(&mut near, &mut far) => return,
        _ = cut.wait_for(|open| !*open) => {}
    }
    // What was under way is lost; who waits for it hears nothing until the way is open again.
    let _ = through.wait_for(|open| *open).await;
}

/// A registrar that takes whoever registers, and what it knows.
#[derive(Clone)]
struct Registrar {
    address: SocketAddr,
    /// Who is registered, and the most that were at a time.
    known: Arc<Mutex<(BTreeSet<String>, usize)>>,
}

impl Registrar {
    async fn start() -> Self {
        let socket = UdpSocket::bind("127.0.0.1:0").await.expect("a free port");
        let registrar = Self { address: socket.local_addr().expect("bound"), known: Arc::default() };
        let known = registrar.known.clone();
        tokio::spawn(async move {
            let mut buffer = vec![0; 65_536];
            while let Ok((length, from)) = socket.recv_from(&mut buffer).await {
                let request = String::from_utf8_lossy(&buffer[..length]).into_owned();
                if !request.starts_with("REGISTER") {
                    continue;
                }
                let contact = header(&request, "Contact").expect("a contact");
                let gateway = contact.split(['@', '>', ';']).nth(1).expect("an address").to_owned();
                let expires = header(&request, "Expires").expect("for how long");
                {
                    let (there, most) = &mut *known.lock().expect("sound");
                    if expires == "0" {
                        there.remove(&gateway)
                    } else {
                        there.insert(gateway)
                    };
                    *most = there.len().max(*most);
                }
                let of_request = request.split("\r\n").filter(|line| {
                    ["Via", "From", "To", "Call-ID", "CSeq"].contains(&line.split(':').next().unwrap_or_default())
                });
                let copied: String = of_request
                    .map(|line| {
                        let tag = if line.starts_with("To:") { ";tag=registrar" } else { "" };
                        format!("{line}{tag}\r\n")
                    })
                    .collect();
                let answer = format!(
                    "SIP/2.0 200 OK\r\n{copied}Contact: {contact}\r\nExpires: {expires}\r\nContent-Length: 0\r\n\r\n"
                );
                // A gateway that is gone asks no more.
                let _ = socket.send_to(answer.as_bytes(), from).await;
            }
        });
        registrar
    }

    fn trunk(&self, config: &mut Config) {
        let trunk = format!(
            "name = 'carrier'\nhost = '{}'\nregister = true\nusername = 'us'\npassword = 'secret'",
            self.address
        );
        config.sip.trunk = vec![toml::from_str(&trunk).expect("a trunk")];
    }

    fn there(&self) -> BTreeSet<String> {
        self.known.lock().expect("sound").0.clone()
    }

    /// Waits until this gateway is registered, and no other.
    async fn only(&self, rig: &Rig) {
        let wanted = BTreeSet::from([rig.sip_udp().to_string()]);
        let only = async {
            while self.there() != wanted {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        };
        timeout(PATIENCE, only).await.unwrap_or_else(|_| panic!("{:?} and not {wanted:?}", self.there()));
    }
}

/// Waits until what `/readyz` of a gateway says is as wanted; gives how long that took.
async fn until(rig: &Rig, wanted: impl Fn(&Value) -> bool) -> Duration {
    let began = now();
    let look = async {
        while !wanted(&rig.get("/readyz").await.1) {
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    };
    let said = timeout(PATIENCE, look).await;
    assert!(said.is_ok(), "{}", rig.get("/readyz").await.1);
    began.elapsed()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_gateway_that_is_cut_off_from_redis_stops_to_register_before_another_begins() {
    let Some(mut redis) = Redis::start() else { return };
    let (way, registrar) = (Way::to_redis(&redis.url()).await, Registrar::start().await);
    let cuttable = Secret::new(way.url.clone());
    let a = redis
        .gateway("a", |config| {
            config.cluster.redis = Some(cuttable);
            registrar.trunk(config);
        })
        .await;
    registrar.only(&a).await;
    let b = redis.gateway("b", |config| registrar.trunk(config)).await;
    knows(&a, &["b"]).await;
    knows(&b, &["a"]).await;
    let call = a.telephone("silent", Codec::Pcmu).await;

    way.cut(true);
    registrar.only(&b).await;
    assert_eq!(registrar.known.lock().expect("sound").1, 1, "never two at a time");
    until(&a, |said| said["cluster"]["registry"] == false && said["trunks"][0]["registered"].is_null()).await;
    let asked = a.speak(&call, SENTENCE).await;
    hear_turn(&call, asked).await;
    let own = a.telephone("silent", Codec::Pcmu).await;
    own.hang_up().await;

    way.cut(false);
    let healed =
        until(&a, |said| said["cluster"]["registry"] == true && said["cluster"]["others"] == json!(["b"])).await;
    knows(&b, &["a"]).await;
    registrar.only(&b).await;

    // Gone for all: nobody else can have the lease, and who is registered stays so for longer than it lasts.
    redis.kill();
    for rig in [&a, &b] {
        until(rig, |said| said["cluster"]["error"].is_string()).await;
    }
    tokio::time::sleep(Duration::from_secs(11)).await;
    registrar.only(&b).await;
    until(&b, |said| said["trunks"][0]["registered"] == true).await;
    // It comes back without its memory.
    redis.run();
    knows(&a, &["b"]).await;
    knows(&b, &["a"]).await;
    assert!(!a.get("/readyz").await.1["trunks"][0]["registered"].is_boolean());

    // And it is handed on as ever, once the other one may take it.
    b.app.drain().await;
    registrar.only(&a).await;
    assert_eq!(registrar.known.lock().expect("sound").1, 1, "never two at a time");
    println!("in the registry again after {healed:?}");
    call.hang_up().await;
    a.app.drain().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_gateway_that_is_cut_off_from_postgresql_takes_calls_and_another_does_its_batch_work() {
    let Some(server) = Postgres::start() else { return };
    let audio = tempfile::tempdir().expect("a folder");
    let way = Way::to_postgres(&server.url()).await;
    let faults = |said: &Value| said["faults"].as_array().map_or(0, Vec::len);
    let settings = |config: &mut Config, url: &str| {
        share(config, url, audio.path());
        (config.batch.lease_s, config.records.lease_s) = (3, 3);
    };
    let a = Rig::with(|config| settings(config, &way.url)).await;
    let b = Rig::with(|config| settings(config, &server.url())).await;
    let before = a.telephone("silent", Codec::Pcmu).await;
    let id = before.id().expect("named").to_owned();
    let record = async |rig: &Rig, id: &str, wanted: &dyn Fn(&Value) -> bool| {
        let look = async {
            loop {
                let (status, said) = rig.get(&format!("/v1/records/{id}")).await;
                if status == 200 && wanted(&said) {
                    return said;
                }
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        };
        timeout(PATIENCE, look).await.expect("a record")
    };
    record(&b, &id, &|_| true).await;
    // Enough for both to be at it.
    let text = SENTENCE.repeat(40);
    let (status, job) = a.post("/v1/audio/speech/batch", json!({ "input": text })).await;
    assert_eq!(status, 202, "{job}");

    way.cut(true);
    until(&a, |said| faults(said) > 0).await;
    let asked = a.speak(&before, SENTENCE).await;
    hear_turn(&before, asked).await;
    let during = a.telephone("silent", Codec::Pcmu).await;
    let late = during.id().expect("named").to_owned();
    let job = format!("/v1/jobs/{}", job["id"].as_str().expect("an id"));
    let done = async {
        while b.get(&job).await.1["state"] != "done" {
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    };
    timeout(PATIENCE, done).await.expect("the other one has what the first had begun");
    during.hang_up().await;

    way.cut(false);
    let healed = until(&a, |said| faults(said) == 0).await;
    record(&b, &late, &|said| said["state"] == "ended").await;
    let said = b.get(&job).await.1;
    assert_eq!((&said["total"], &said["state"]), (&said["finished"], &json!("done")), "each once: {said}");
    before.hang_up().await;
    // The other gateway took it for dead meanwhile; its own end counts.
    record(&b, &id, &|said| said["state"] == "ended" && said["cause"] != "gateway stopped").await;
    println!("the database again after {healed:?}");
    for rig in [a, b] {
        rig.app.drain().await;
    }
}
