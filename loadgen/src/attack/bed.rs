//! The gateway that is attacked, the telephones that listen to it meanwhile, and the one that keeps calling.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream, UdpSocket};
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use super::verdict::{Figure, LATE, MEMORY, Must, Options, TURNS};
use crate::caller::call::{Call, CallError};
use crate::caller::sip::{Caller, Config, Credentials};
use crate::caller::speak::Idle;
use crate::clock;
use crate::sound::listen::{self, StallCause};
use crate::under_test::gateway::{Gateway, Metrics};
use crate::under_test::process::{Sample, Spawned};
use crate::wire::codec::Codec;

/// What the gateway says to each telephone, again and again.
const TEXT: &str = "The quick brown fox rests for a while.";
/// Longer than any pause inside a turn.
const TURN_PAUSE: Duration = Duration::from_millis(1_000);
/// How far behind a listener plays.
const BUFFER: Duration = Duration::from_millis(60);
/// Longest wait for anything; a busy computer takes its time.
pub(super) const PATIENCE: Duration = Duration::from_secs(30);
/// How often the genuine caller calls, health is asked for and memory is read.
const PROBE: Duration = Duration::from_millis(200);
/// The agent of the telephones that listen: it says what it is told to, and its calls are recorded.
const AGENT: &str = "spoken";
/// Media ports of the gateways of one process: below those of other gateways and of the system.
const PORTS: std::ops::Range<u16> = 10_000..20_000;
/// The only account of the gateway, where it has accounts.
pub(super) const USER: &str = "genuine";
/// Its password.
pub(super) const PASSWORD: &str = "genuine-long-enough";

/// How the gateway of an attack differs from others.
#[derive(Default)]
pub(super) struct Site {
    /// Tables and keys behind the common ones.
    pub(super) more: String,
    /// Callers must be the account.
    pub(super) users: bool,
    /// Put before the command.
    pub(super) prefix: String,
    /// Where the genuine caller is.
    pub(super) prober: Option<IpAddr>,
    /// Every fourth telephone holds the gateway between turns and sends next to nothing.
    pub(super) pauses: bool,
}

/// What was noticed while it lasted.
#[derive(Default)]
struct Notes {
    begun: AtomicU64,
    turns: AtomicU64,
    silent: AtomicU64,
    /// Why turns were not taken, and how often.
    untaken: Mutex<BTreeMap<String, u64>>,
    gaps: AtomicU64,
    /// When packets came too late for a listener.
    late: Mutex<Vec<Instant>>,
    lost: AtomicU64,
    refused: AtomicU64,
    unanswered: AtomicU64,
    /// Milliseconds until a genuine INVITE was answered, and `/healthz`.
    answered: Mutex<Vec<f64>>,
    health: Mutex<Vec<f64>>,
    unhealthy: AtomicU64,
    peak: AtomicU64,
}

/// All of it. Dropped, it ends.
pub(super) struct Bed {
    spawned: Spawned,
    pub(super) gateway: Arc<Gateway>,
    pub(super) http: SocketAddr,
    pub(super) sip: SocketAddr,
    pub(super) rtp: std::ops::Range<u16>,
    site: Site,
    stop: CancellationToken,
    tasks: JoinSet<()>,
    notes: Arc<Notes>,
    /// Ids of the calls that are spoken on.
    pub(super) calls: Vec<String>,
    folder: PathBuf,
    /// Memory before the attack, bytes.
    before: u64,
}

impl Bed {
    /// Starts a gateway and the calls; returns when every one of them speaks.
    pub(super) async fn start(options: &Options, site: Site) -> Result<Bed, CallError> {
        Bed::start_for(options, site, options.calls).await
    }

    /// As [`Bed::start`], with media ports for so many calls.
    pub(super) async fn start_for(options: &Options, site: Site, most: usize) -> Result<Bed, CallError> {
        static NEXT: AtomicUsize = AtomicUsize::new(0);
        let name = format!("antiphon-attack-{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
        let folder = std::env::temp_dir().join(name);
        std::fs::create_dir_all(&folder).map_err(CallError::io(format!("make {}", folder.display())))?;
        let (http, sip, rtp) = ports(most).await?;
        let file = folder.join("gateway.toml");
        let users = match site.users {
            true => format!("users = [{{ username = \"{USER}\", password = \"{PASSWORD}\" }}]"),
            false => String::new(),
        };
        let text = format!(
            "[http]\nbind = \"{http}\"\n[state]\ndir = {state:?}\n[engine]\nkind = {engine:?}\n[recognizer]\nkind = \"off\"\n\
             [log]\nlevel = \"warn\"\n[rtp]\nport_min = {}\nport_max = {}\n[call]\ndrain_notice_s = 0\ndrain_grace_s = 1\n\
             [recording]\nmode = \"agents\"\nconsent = \"\"\n\
             [agent.{AGENT}]\nurl = \"builtin:silent\"\nrecord = true\n[sip]\n\
             udp = \"{sip}\"\ntcp = \"{sip}\"\n{users}\n{}\n",
            rtp.start,
            rtp.end - 1,
            site.more,
            state = folder.join("state").display().to_string(),
            engine = options.engine,
        );
        std::fs::write(&file, text).map_err(CallError::io(format!("write {}", file.display())))?;
        let command = format!("{} {} -c {}", site.prefix, options.spawn, file.display());
        let mut spawned = Spawned::start(&command, &[], folder.join("gateway.log"))?;
        let gateway = Arc::new(Gateway::at(&format!("http://{http}"), None)?);
        let deadline = clock::now() + PATIENCE * 2;
        while gateway.ready().await.is_err() {
            if spawned.exited().is_some() || clock::now() > deadline {
                return Err(CallError::BadAnswer(format!("the gateway does not start: {}", spawned.last_words())));
            }
            clock::sleep_until(clock::now() + Duration::from_millis(100)).await;
        }
        let (stop, notes, tasks) = (CancellationToken::new(), Arc::new(Notes::default()), JoinSet::new());
        let mut bed =
            Bed { spawned, gateway, http, sip, rtp, site, stop, tasks, notes, calls: Vec::new(), folder, before: 0 };
        for n in 0..options.calls {
            bed.call(n).await?;
        }
        let all = options.calls as u64;
        let deadline = clock::now() + PATIENCE * 2;
        while bed.notes.begun.load(Ordering::Relaxed) < all && clock::now() < deadline {
            clock::sleep_until(clock::now() + Duration::from_millis(50)).await;
        }
        bed.probe();
        bed.before = bed.memory();
        Ok(bed)
    }

    /// Memory of the gateway's process, bytes.
    fn memory(&self) -> u64 {
        Sample::of(self.spawned.pid()).map_or(0, |sample| sample.rss)
    }

    /// The readings of the gateway.
    pub(super) async fn metrics(&self) -> Result<Metrics, CallError> {
        self.gateway.metrics().await
    }

    async fn call(&mut self, n: usize) -> Result<(), CallError> {
        let quiet = self.site.pauses && n.is_multiple_of(4);
        let idle = if quiet { Idle::KeepAlive(Duration::from_secs(1)) } else { Idle::Continuous };
        let config = Config { idle, ..telephone(Ipv4Addr::LOCALHOST.into(), self.site.users) };
        let call = Caller::bind(config).await?.call(&format!("sip:{AGENT}@{}", self.sip)).await?;
        let id = call.id().ok_or_else(|| CallError::BadAnswer("the answer does not name the call".to_owned()))?;
        let id = id.to_owned();
        self.calls.push(id.clone());
        let (gateway, notes, stop) = (self.gateway.clone(), self.notes.clone(), self.stop.clone());
        self.tasks.spawn(async move {
            while !stop.is_cancelled() && listen(&call, &id, &gateway, &notes).await {
                if quiet {
                    // A refusal shows as a call that is lost.
                    let _ = call.hold(true).await;
                    clock::sleep_until(clock::now() + PROBE).await;
                    let _ = call.hold(false).await;
                }
            }
            if call.status().end.is_some() {
                count(&notes.lost);
            }
            call.hang_up().await;
        });
        Ok(())
    }

    /// The genuine caller, health and memory, until the end.
    fn probe(&mut self) {
        let (notes, stop, users) = (self.notes.clone(), self.stop.clone(), self.site.users);
        let (sip, address) = (self.sip, self.site.prober.unwrap_or(IpAddr::V4(Ipv4Addr::new(127, 0, 0, 3))));
        self.tasks.spawn(async move {
            while !stop.is_cancelled() {
                let began = clock::now();
                match genuine(address, users, sip).await {
                    Ok(took) => push(&notes.answered, took),
                    Err(CallError::Refused { .. }) => count(&notes.refused),
                    Err(_) => count(&notes.unanswered),
                }
                clock::sleep_until(began + PROBE).await;
            }
        });
        let (notes, stop, http, pid) = (self.notes.clone(), self.stop.clone(), self.http, self.spawned.pid());
        self.tasks.spawn(async move {
            while !stop.is_cancelled() {
                let began = clock::now();
                match healthy(http).await {
                    Some(took) => push(&notes.health, took),
                    None => count(&notes.unhealthy),
                }
                if let Some(sample) = Sample::of(pid) {
                    notes.peak.fetch_max(sample.rss, Ordering::Relaxed);
                }
                clock::sleep_until(began + PROBE).await;
            }
        });
    }

    /// Lets the turns end and the telephones hang up, stops the gateway, and tells what was noticed.
    pub(super) async fn end(mut self) -> Vec<Figure> {
        self.stop.cancel();
        let ended = async { while self.tasks.join_next().await.is_some() {} };
        // What has not ended by then is stuck, and was counted.
        let _ = tokio::time::timeout(PATIENCE * 2, ended).await;
        let died = self.spawned.exited().is_some();
        // Of calls that have ended, so that the end of each is counted; a gateway that does not tell has lost everything.
        let metrics = self.metrics().await.ok();
        let total = |name: &str| metrics.as_ref().map_or(f64::INFINITY, |metrics| metrics.total(name));
        let unrecorded = total("antiphon_recording_dropped_seconds") + total("antiphon_recording_errors_total");
        let (underruns, stalls) = (total("antiphon_underruns_total"), total("antiphon_pacing_stalls_total"));
        self.spawned.stop(Duration::from_secs(20)).await;
        let recorded = recorded(&self.folder.join("state/recordings"));
        // It lies in the folder for what is temporary.
        let _ = std::fs::remove_dir_all(&self.folder);
        let notes = &self.notes;
        let of = |counter: &AtomicU64| counter.load(Ordering::Relaxed) as f64;
        let grown = notes.peak.load(Ordering::Relaxed).saturating_sub(self.before) as f64 / f64::from(1 << 20);
        let none = Must::AtMost(0.0);
        let late = notes.late.lock().unwrap_or_else(PoisonError::into_inner);
        let mut figures = vec![
            Figure::new("gateway ended by itself", f64::from(u8::from(died)), none),
            Figure::new(TURNS, of(&notes.turns), Must::AtLeast(1.0)),
            // A busy computer's gateway refuses turns and calls that would be late.
            Figure::timed("turns that were not heard", of(&notes.silent), none),
            Figure::timed("gaps in speech, by RTP", of(&notes.gaps), none),
            // Nothing to send when it was due, as the gateway itself counts, and sent late for want of a processor.
            Figure::timed("underruns, by the gateway", underruns, none),
            Figure::timed("times that it sent more than a frame late", stalls, Must::Nothing),
            Figure { at: late.clone(), ..Figure::timed(LATE, late.len() as f64, none) },
            Figure::new("calls lost", of(&notes.lost), none),
            Figure::timed("calls recorded to their end", recorded, Must::AtLeast(self.calls.len() as f64)),
            Figure::timed("recordings that failed, seconds of sound lost", unrecorded, none),
            Figure::new(MEMORY, grown.round(), Must::AtMost(64.0)),
        ];
        let untaken = notes.untaken.lock().unwrap_or_else(PoisonError::into_inner);
        let causes = untaken.iter();
        figures.extend(
            causes.map(|(cause, times)| Figure::new(format!("turns not taken: {cause}"), *times as f64, Must::Nothing)),
        );
        let answered = sorted(&notes.answered);
        figures.push(Figure::new("genuine INVITEs answered", answered.len() as f64, Must::AtLeast(1.0)));
        figures.push(Figure::timed("genuine INVITEs refused", of(&notes.refused), none));
        figures.push(Figure::timed("genuine INVITEs unanswered", of(&notes.unanswered), none));
        figures.push(Figure::timed("genuine INVITE answered p99, ms", p99(&answered), Must::AtMost(200.0)));
        let health = sorted(&notes.health);
        figures.push(Figure::timed("/healthz p99, ms", p99(&health), Must::AtMost(100.0)));
        figures.push(Figure::timed("/healthz without an answer", of(&notes.unhealthy), none));
        figures
    }
}

/// A turn on a call, from request to its end; whether there can be another.
async fn listen(call: &Call, id: &str, gateway: &Gateway, notes: &Notes) -> bool {
    let add = |counter: &AtomicU64, n: usize| {
        counter.fetch_add(n as u64, Ordering::Relaxed);
    };
    let asked = match gateway.speak(id, TEXT, None).await {
        Ok((asked, _)) => asked,
        Err(error) => {
            add(&notes.silent, 1);
            let cause = match &error {
                CallError::Http(error) if error.is_connect() => "no connection".to_owned(),
                _ => error.cause(),
            };
            *notes.untaken.lock().unwrap_or_else(PoisonError::into_inner).entry(cause).or_default() += 1;
            // It may be a refusal of a moment.
            clock::sleep_until(clock::now() + PROBE).await;
            return call.status().end.is_none();
        }
    };
    let Some(onset) = call.onset(asked, PATIENCE).await else {
        add(&notes.silent, 1);
        return call.status().end.is_none();
    };
    add(&notes.begun, 1);
    let end = call.silence(onset, TURN_PAUSE, PATIENCE).await;
    let stalls = listen::stalls(&call.take_heard(), onset, end.unwrap_or_else(clock::now), BUFFER);
    let late: Vec<Instant> =
        stalls.iter().filter(|stall| stall.cause == StallCause::Late).map(|stall| stall.at).collect();
    add(&notes.gaps, stalls.len() - late.len());
    notes.late.lock().unwrap_or_else(PoisonError::into_inner).extend(late);
    add(if end.is_some() { &notes.turns } else { &notes.silent }, 1);
    call.status().end.is_none()
}

/// Calls and hangs up; milliseconds until it was answered.
async fn genuine(address: IpAddr, users: bool, sip: SocketAddr) -> Result<f64, CallError> {
    let call = Caller::bind(telephone(address, users)).await?.call(&format!("sip:silent@{sip}")).await?;
    let setup = call.setup();
    call.hang_up().await;
    Ok(milliseconds(setup.answered.saturating_duration_since(setup.asked)))
}

fn telephone(address: IpAddr, users: bool) -> Config {
    let account = || Credentials { username: USER.to_owned(), password: PASSWORD.to_owned() };
    Config {
        address,
        credentials: users.then(account),
        codecs: vec![Codec::Pcmu],
        patience: PATIENCE,
        ..Config::default()
    }
}

/// Asks on a connection of its own, as a load balancer does; milliseconds until the answer.
pub(super) async fn healthy(http: SocketAddr) -> Option<f64> {
    let began: Instant = clock::now();
    let ask = async {
        let mut stream = TcpStream::connect(http).await.ok()?;
        let request = format!("GET /healthz HTTP/1.1\r\nHost: {http}\r\nConnection: close\r\n\r\n");
        stream.write_all(request.as_bytes()).await.ok()?;
        let mut answer = Vec::new();
        stream.read_to_end(&mut answer).await.ok()?;
        answer.starts_with(b"HTTP/1.1 200").then_some(())
    };
    tokio::time::timeout(Duration::from_secs(5), ask).await.ok()??;
    Some(milliseconds(clock::now().saturating_duration_since(began)))
}

/// Recordings in `folder` that are complete.
fn recorded(folder: &Path) -> f64 {
    let complete = |entry: std::io::Result<std::fs::DirEntry>| {
        let path = entry.ok()?.path();
        let text = std::fs::read(path.extension().is_some_and(|kind| kind == "json").then_some(path)?).ok()?;
        let description: serde_json::Value = serde_json::from_slice(&text).ok()?;
        description["durationMs"].as_u64().filter(|length| *length > 0)
    };
    std::fs::read_dir(folder).into_iter().flatten().filter_map(complete).count() as f64
}

/// Free ports for HTTP and SIP, and media ports for as many calls as there will be, and some that are taken. No two gateways
/// of this process have media ports in common, as long as there are enough.
async fn ports(calls: usize) -> Result<(SocketAddr, SocketAddr, std::ops::Range<u16>), CallError> {
    static NEXT: Mutex<Option<u16>> = Mutex::new(None);
    let io = || CallError::io("bind a free port");
    let any = (Ipv4Addr::LOCALHOST, 0);
    let http = TcpListener::bind(any).await.and_then(|socket| socket.local_addr()).map_err(io())?;
    // UDP and TCP of SIP share a number: one that is free for both.
    let sip = loop {
        let udp = UdpSocket::bind(any).await.map_err(io())?;
        let address = udp.local_addr().map_err(io())?;
        if TcpListener::bind(address).await.is_ok() {
            break address;
        }
    };
    let wanted = u16::try_from(calls.saturating_mul(2).saturating_add(200)).unwrap_or(u16::MAX).min(4_000) & !1;
    let mut next = NEXT.lock().unwrap_or_else(PoisonError::into_inner);
    // Processes beside this one begin elsewhere; even, as RTP ports are.
    let first = next.unwrap_or(PORTS.start + 2 * (std::process::id() % 1_000) as u16);
    let first = if first > PORTS.end - wanted { PORTS.start } else { first };
    *next = Some(first + wanted);
    Ok((http, sip, first..first + wanted))
}

fn count(counter: &AtomicU64) {
    counter.fetch_add(1, Ordering::Relaxed);
}

fn push(list: &Mutex<Vec<f64>>, value: f64) {
    list.lock().unwrap_or_else(PoisonError::into_inner).push(value);
}

fn sorted(list: &Mutex<Vec<f64>>) -> Vec<f64> {
    let mut all = list.lock().unwrap_or_else(PoisonError::into_inner).clone();
    all.sort_by(f64::total_cmp);
    all
}

/// 0 of nothing.
pub(super) fn p99(sorted: &[f64]) -> f64 {
    let index = (sorted.len() * 99).div_ceil(100).saturating_sub(1);
    sorted.get(index).copied().unwrap_or(0.0)
}

fn milliseconds(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1e3
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_a_hundred_the_ninety_ninth_is_told() {
        let all: Vec<f64> = (1..=100).map(f64::from).collect();
        assert_eq!((p99(&all), p99(&all[..1]), p99(&[])), (99.0, 1.0, 0.0));
    }
}
