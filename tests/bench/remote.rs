//! What the way to a worker and back costs: first audio through a worker of this machine beside first audio in process, of
//! the same voice, and beside a round trip of the same size on the same sockets.

use std::path::Path;
use std::time::{Duration, Instant};

use antiphon::sched::Config;
use antiphon::secret::Secret;
use antiphon::synth::device::remote::config::{Cluster, Tls};
use antiphon::synth::device::remote::serve::{Door, Service, serve};
use antiphon::synth::device::{Engine, Loader, Phase, Recovery, StreamNote};
use antiphon::synth::tone::Tone;
use antiphon::turn::{Class, SpeechEvent, StreamId, Utterance};
use antiphon_loadgen::call::now;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{mpsc, watch};

/// Bytes of an utterance's text on its way, and of its first audio, 200 ms as 32-bit floats.
const ASKED: usize = 400;
const ANSWERED: usize = 19_200;

fn tone() -> Vec<Loader> {
    vec![Box::new(|| Ok(Box::new(Tone::new())))]
}

/// Time from submitting to the first sample.
async fn first_audio(engine: &Engine) -> Duration {
    let (sink, mut events) = mpsc::channel(256);
    let stream = StreamId::next();
    let began = now();
    engine.submit(Utterance::plain(stream, Class::Live, "One two."), sink).expect("accepted");
    let mut first = None;
    while let Some(event) = events.recv().await {
        match event {
            SpeechEvent::Audio { .. } => drop(first.get_or_insert_with(|| began.elapsed())),
            SpeechEvent::End { .. } => break,
        }
    }
    engine.note(stream, StreamNote::Closed);
    first.expect("speech")
}

async fn echo(rounds: usize) -> Vec<Duration> {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let address = listener.local_addr().expect("bound");
    tokio::spawn(async move {
        let (mut stream, _) = listener.accept().await.expect("a connection");
        stream.set_nodelay(true).expect("set");
        let (mut asked, answer) = (vec![0; ASKED], vec![0; ANSWERED]);
        while stream.read_exact(&mut asked).await.is_ok() && stream.write_all(&answer).await.is_ok() {}
    });
    let mut stream = TcpStream::connect(address).await.expect("connected");
    stream.set_nodelay(true).expect("set");
    let (asked, mut answer) = (vec![0; ASKED], vec![0; ANSWERED]);
    let mut took = Vec::new();
    for _ in 0..rounds {
        let began: Instant = now();
        stream.write_all(&asked).await.expect("written");
        stream.read_exact(&mut answer).await.expect("read");
        took.push(began.elapsed());
    }
    took
}

fn at(times: &mut [Duration], share: f64) -> f64 {
    times.sort_unstable();
    times[((times.len() - 1) as f64 * share) as usize].as_secs_f64() * 1e3
}

/// First audio in process, through a worker with TLS on both sides, and a bare round trip; milliseconds.
async fn measure(turns: usize) -> [Vec<Duration>; 3] {
    let _ = rustls::crypto::ring::default_provider().install_default();
    let file = |name: &str| Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/cluster").join(name);
    let tls = Tls { cert: file("node.pem"), key: file("node-key.pem"), ca: file("ca.pem") };
    let cluster = Cluster { token: Some(Secret::new("between-machines")), tls: Some(tls), ..Cluster::default() };
    let here = Engine::start(tone(), Config::default()).expect("starts");
    here.ready().await;
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let address = listener.local_addr().expect("bound").to_string();
    let door: Door = cluster.door(&address).expect("TLS");
    let (stop, stopped) = watch::channel(false);
    // As in two processes: the worker's sockets have a thread of their own.
    let service = Service::new(here.clone());
    let serving = std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build();
        runtime.expect("a runtime").block_on(async move {
            listener_of(listener, door, service, stopped).await;
        });
    });
    let worker = cluster.worker(&address).expect("TLS");
    let engine = Engine::start_with_workers(vec![worker], Vec::new(), Config::default(), Recovery::default());
    let engine = engine.expect("starts");
    while engine.status()[0].phase != Phase::Ready {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    let (mut local, mut remote) = (Vec::new(), Vec::new());
    // In turn, so that both meet the same machine.
    for _ in 0..turns {
        local.push(first_audio(&here).await);
        remote.push(first_audio(&engine).await);
    }
    let trips = echo(turns).await;
    stop.send_replace(true);
    tokio::task::spawn_blocking(move || serving.join().expect("no panic")).await.expect("no panic");
    [local, remote, trips]
}

async fn listener_of(listener: TcpListener, door: Door, service: Service, stopped: watch::Receiver<bool>) {
    // Sockets belong to the runtime that polls them.
    let listener = TcpListener::from_std(listener.into_std().expect("a socket")).expect("a socket");
    serve(listener, door, service, stopped).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "takes some seconds and the whole machine"]
async fn first_audio_over_the_wire() {
    let [mut local, mut remote, mut trips] = measure(1_000).await;
    println!("1,000 turns of the tone, one after the other; ms       p50      p95      p99");
    for (name, times) in
        [("in process", &mut local), ("through a worker, TLS", &mut remote), ("round trip", &mut trips)]
    {
        println!("{name:<50} {:>8.3} {:>8.3} {:>8.3}", at(times, 0.5), at(times, 0.95), at(times, 0.99));
    }
    for (name, share) in [("p50", 0.5), ("p95", 0.95)] {
        let over = at(&mut remote, share) - at(&mut local, share) - at(&mut trips, share);
        println!("{name}: {over:.3} ms over in process and a round trip");
    }
}

/// That the measurement itself works.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn first_audio_is_measured_on_both_ways() {
    let times = measure(5).await;
    assert!(times.iter().all(|times| times.len() == 5 && times.iter().all(|time| !time.is_zero())));
}
