//! Speech from another machine: `antiphon worker` as a process, with TLS on both sides.

use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use antiphon::config::{Config, EngineKind};
use antiphon::synth::device::Phase;
use antiphon::synth::device::remote::config::Tls;
use antiphon_loadgen::codec::Codec;
use serde_json::json;
use tokio::time::timeout;

use super::counted::{Growth, counted};
use super::nodes::Redis;
use super::support::{PATIENCE, Rig, SENTENCE, hear_turn, losses};

const TOKEN: &str = "between-these-machines";

fn file(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/cluster").join(name)
}

fn node() -> Tls {
    Tls { cert: file("node.pem"), key: file("node-key.pem"), ca: file("ca.pem") }
}

/// A worker that speaks with the placeholder tone, killed when the test is over.
pub(crate) struct Worker {
    process: Child,
    pub(crate) address: String,
    /// Where it is asked for its health.
    http: String,
}

impl Worker {
    fn start(folder: &Path) -> Self {
        Self::start_in(folder, "")
    }

    /// With `more` in `[cluster]`.
    pub(crate) fn start_in(folder: &Path, more: &str) -> Self {
        // Given back at once: the program binds them a moment later.
        let free = || TcpListener::bind("127.0.0.1:0").and_then(|socket| socket.local_addr()).expect("a free port");
        let (address, http, tls) = (free(), free(), node());
        let config = format!(
            "[engine]\nkind = 'tone'\n[cluster]\ntoken = '{TOKEN}'\ntls = {{ cert = '{}', key = '{}', ca = '{}' }}\n{more}\n",
            tls.cert.display(),
            tls.key.display(),
            tls.ca.display()
        );
        let path = folder.join(format!("worker-{}.toml", address.port()));
        std::fs::write(&path, config).expect("written");
        let process = Command::new(env!("CARGO_BIN_EXE_antiphon"))
            .args(["worker", "--listen", &address.to_string(), "--http", &http.to_string(), "-c"])
            .arg(&path)
            .env("XDG_STATE_HOME", folder)
            .stdin(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .expect("the program starts");
        Self { process, address: address.to_string(), http: format!("http://{http}") }
    }

    /// Asks it to end as an operator does.
    fn terminate(&self) {
        let sent = Command::new("kill").arg(self.process.id().to_string()).status().expect("kill runs");
        assert!(sent.success());
    }

    /// Waits until it has ended; gives its exit code.
    async fn ended(&mut self) -> Option<i32> {
        let ended = async {
            loop {
                if let Some(status) = self.process.try_wait().expect("a child") {
                    return status.code();
                }
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        };
        timeout(PATIENCE, ended).await.expect("it ends")
    }

    /// As by `kill -9`.
    pub(crate) fn kill(&mut self) {
        // It may have ended by itself.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        self.kill();
    }
}

/// A gateway that speaks through `workers`, and without them with a tone of its own.
pub(crate) fn speaks_through(config: &mut Config, workers: &[Worker]) {
    config.engine.kind = EngineKind::Tone;
    config.engine.workers = workers.iter().map(|worker| worker.address.clone()).collect();
    config.cluster.token = Some(antiphon::secret::Secret::new(TOKEN));
    config.cluster.tls = Some(node());
}

/// Waits until `wanted` of the gateway's workers, by address, are in this state.
async fn until(rig: &Rig, worker: &Worker, wanted: impl Fn(&Phase) -> bool) {
    let device = format!("worker {}", worker.address);
    let reached = async {
        loop {
            let devices = rig.app.gateway().engine.status();
            let state = devices.iter().find(|status| match (&status.caps, &status.phase) {
                (Some(caps), _) => caps.device == device,
                (None, Phase::Failed(reason)) => reason.contains(&worker.address),
                _ => false,
            });
            if state.is_some_and(|status| wanted(&status.phase)) {
                return;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    timeout(PATIENCE, reached).await.unwrap_or_else(|_| panic!("{device}: {:?}", rig.app.gateway().engine.status()));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_gateway_speaks_through_a_worker_of_another_process() {
    let folder = tempfile::tempdir().expect("a folder");
    let mut workers = [Worker::start(folder.path()), Worker::start(folder.path())];
    let rig = Rig::with(|config| speaks_through(config, &workers)).await;
    let up = |worker: &Worker| counted(&format!("antiphon_worker_up{{worker=\"{}\"}}", worker.address));
    for worker in &workers {
        until(&rig, worker, |phase| *phase == Phase::Ready).await;
        assert_eq!(up(worker), 1.0);
    }
    let call = rig.telephone("silent", Codec::Pcma).await;
    let asked = rig.speak(&call, SENTENCE).await;
    hear_turn(&call, asked).await;
    let produced = || -> Vec<u64> { rig.app.gateway().engine.status().iter().map(|device| device.produced).collect() };
    let made = produced();
    assert!(made[0] + made[1] > 0 && made[2] == 0, "{made:?}: a worker speaks, and not this machine");

    // The worker that speaks dies in the middle: the caller hears the rest without a gap.
    let text = SENTENCE.repeat(4);
    let asked = rig.speak(&call, &text).await;
    call.onset(asked, PATIENCE).await.expect("speech is heard");
    let live: Vec<u32> = rig.app.gateway().engine.status().iter().map(|device| device.load.live).collect();
    let speaking = usize::from(live[1] > live[0]);
    let counts = Growth::of(&["antiphon_worker_handovers_total"]);
    workers[speaking].kill();
    let (onset, end) = hear_turn(&call, asked).await;
    counts.assert();
    let clip = call.ear().heard().clip_between(onset, end);
    let whole = Rig::spoken_by(&rig.app.gateway().engine, &text).await;
    let seconds = |clip: &antiphon_loadgen::heard::Clip| clip.pcm.len() as f64 / f64::from(clip.rate);
    assert!(seconds(&clip) > 0.9 * seconds(&whole), "{} s of {} s", seconds(&clip), seconds(&whole));
    assert!(losses(&call.ear().heard(), onset, end).is_empty(), "{live:?}");
    until(&rig, &workers[speaking], |phase| matches!(phase, Phase::Failed(_))).await;
    assert_eq!((up(&workers[speaking]), up(&workers[1 - speaking])), (0.0, 1.0));

    // Without any worker the voice of this machine speaks.
    workers[1 - speaking].kill();
    until(&rig, &workers[1 - speaking], |phase| matches!(phase, Phase::Failed(_))).await;
    let before = produced()[2];
    let asked = rig.speak(&call, SENTENCE).await;
    hear_turn(&call, asked).await;
    assert!(produced()[2] > before);
    rig.app.drain().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_machine_that_its_authority_does_not_know_is_no_gateway_of_a_worker() {
    let folder = tempfile::tempdir().expect("a folder");
    let worker = Worker::start(folder.path());
    let rig = Rig::with(|config| {
        config.engine.kind = EngineKind::Tone;
        config.engine.workers = vec![worker.address.clone()];
        config.cluster.token = Some(antiphon::secret::Secret::new(TOKEN));
        config.cluster.tls =
            Some(Tls { cert: file("stranger.pem"), key: file("stranger-key.pem"), ca: file("ca.pem") });
    })
    .await;
    // Connected, and turned away: not only not there yet.
    until(&rig, &worker, |phase| matches!(phase, Phase::Failed(reason) if !reason.contains("refused"))).await;
    let call = rig.telephone("silent", Codec::Pcmu).await;
    let asked = rig.speak(&call, SENTENCE).await;
    hear_turn(&call, asked).await;
    rig.app.drain().await;
}

/// What `[cluster]` of a worker says that lets itself be found.
pub(crate) fn found(redis: &Redis, name: &str) -> String {
    format!("redis = '{}'\nnode = '{name}'\nadvertise = 'http://127.0.0.1:0'", redis.url())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn workers_are_found_through_redis_and_a_deploy_of_them_ends_no_turn() {
    let Some(redis) = Redis::start() else { return };
    let folder = tempfile::tempdir().expect("a folder");
    let rig = redis
        .gateway("a", |config| {
            config.cluster.token = Some(antiphon::secret::Secret::new(TOKEN));
            config.cluster.tls = Some(node());
        })
        .await;
    assert_eq!(rig.app.gateway().engine.status().len(), 1, "alone");
    let mut workers = ["gpu-1", "gpu-2"].map(|name| Worker::start_in(folder.path(), &found(&redis, name)));
    for worker in &workers {
        until(&rig, worker, |phase| *phase == Phase::Ready).await;
    }
    let call = rig.telephone("silent", Codec::Pcma).await;
    let asked = rig.speak(&call, &SENTENCE.repeat(2)).await;
    call.onset(asked, PATIENCE).await.expect("speech is heard");
    let devices = rig.app.gateway().engine.status();
    let speaking = devices.iter().position(|device| device.load.live > 0).expect("somebody speaks");
    let name = devices[speaking].caps.as_ref().expect("ready").device.clone();
    let speaking = workers.iter().position(|worker| name == format!("worker {}", worker.address));
    let speaking = speaking.unwrap_or_else(|| panic!("{name}: a worker speaks, and not this machine"));

    // Its health, while it speaks and while it ends what it has.
    let ask = async |path: &str| {
        let response = rig.client.get(format!("{}{path}", workers[speaking].http)).send().await.expect("HTTP");
        (response.status().as_u16(), response.text().await.expect("text"))
    };
    let ready = || async {
        let (status, said) = ask("/readyz").await;
        (status, serde_json::from_str::<serde_json::Value>(&said).expect("JSON"))
    };
    assert_eq!(ask("/healthz").await.0, 200);
    let (status, said) = ready().await;
    assert!(status == 200 && said["ready"] == true && said["open"].as_u64() > Some(0), "{said}");
    assert_eq!(said["devices"][0]["engine"], "tone", "{said}");
    let shown = ask("/metrics").await.1;
    assert!(shown.contains("antiphon_stream_capacity{state=\"used\"} 1"), "{shown}");
    workers[speaking].terminate();
    let draining = async {
        loop {
            let (status, said) = ready().await;
            if said["draining"] == true {
                return (status, said);
            }
        }
    };
    let (status, said) = timeout(PATIENCE, draining).await.expect("it drains");
    assert_eq!((status, &said["ready"], &said["room"]), (503, &json!(false), &json!(false)), "{said}");
    let (onset, end) = hear_turn(&call, asked).await;
    assert!(losses(&call.ear().heard(), onset, end).is_empty());
    assert_eq!(workers[speaking].ended().await, Some(0), "it ends by itself, with its last turn");
    let left = async {
        while rig.app.gateway().engine.status().len() > 2 {
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    };
    timeout(PATIENCE, left).await.expect("it is no device any more");

    // Another comes for it, and the other one may go.
    workers[speaking] = Worker::start_in(folder.path(), &found(&redis, "gpu-3"));
    until(&rig, &workers[speaking], |phase| *phase == Phase::Ready).await;
    workers[1 - speaking].terminate();
    assert_eq!(workers[1 - speaking].ended().await, Some(0));
    let asked = rig.speak(&call, SENTENCE).await;
    hear_turn(&call, asked).await;
    let new = format!("worker {}", workers[speaking].address);
    let devices = rig.app.gateway().engine.status();
    let of_new = devices.iter().find(|device| device.caps.as_ref().is_some_and(|caps| caps.device == new));
    assert!(of_new.is_some_and(|device| device.produced > 0), "{devices:?}");
    call.hang_up().await;
    rig.app.drain().await;
}
