//! Jobs of gateways that the idle time of `antiphon worker` is for, as a process on a PostgreSQL of the test's own.

use std::path::Path;
use std::process::{Child, Command, Stdio};

use antiphon::batch::JobSpec;
use antiphon_skip::postgres::Postgres;

use super::found;
use super::shared::{Gate, audio, files, gateway, link, number, over, spec, undisturbed};

/// Killed when the test is over.
struct Worker(Child);

impl Worker {
    fn start(url: &str, folder: &Path) -> Self {
        let process = Command::new(env!("CARGO_BIN_EXE_antiphon"))
            .args(["worker", "--listen", "127.0.0.1:0"])
            .env("XDG_STATE_HOME", folder)
            .env("ANTIPHON_ENGINE__KIND", "tone")
            .env("ANTIPHON_CLUSTER__TOKEN", "between-these-machines")
            .env("ANTIPHON_BATCH__DATABASE", url)
            .env("ANTIPHON_BATCH__AUDIO_DIR", folder)
            .env("ANTIPHON_BATCH__LEASE_S", "3")
            .env("ANTIPHON_BATCH__LANES", "4")
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn();
        Self(process.expect("the program starts"))
    }

    fn kill(&mut self) {
        // It may have ended by itself.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        self.kill();
    }
}

#[tokio::test]
async fn a_worker_speaks_what_gateways_are_too_busy_for_and_leaves_voices_that_it_has_not() {
    let Some(server) = Postgres::start() else { return };
    let folder = tempfile::tempdir().expect("a folder");
    let gate = Gate::default();
    gate.set(true);
    let a = gateway(&server.url(), folder.path(), 3, &gate);
    // The gateway is at the first ones of this and comes no further.
    let job = a.submit(spec(0)).expect("accepted");
    let mut own = link(&server.url());
    let held = "SELECT COUNT(*) FROM antiphon.batch_part WHERE holder IS NOT NULL";
    found("the gateway is busy", || Some(number(&mut own, held)).filter(|count| *count == 4)).await;
    // It would come first.
    let elsewhere = JobSpec { voice: Some("enrolled-elsewhere".into()), priority: 9, ..spec(0) };
    let elsewhere = a.submit(elsewhere).expect("accepted");
    let mut worker = Worker::start(&server.url(), folder.path());
    let look = || a.job(&job.id).ok().filter(|job| job.finished == job.total - 4);
    found("the worker has spoken the rest", look).await;
    assert_eq!(a.job(&elsewhere.id).expect("known").finished, 0, "it has not that voice");
    a.cancel(&elsewhere.id).expect("known");

    // It is killed at its work on the next one; the gateway goes on with that, too.
    let next = a.submit(spec(1)).expect("accepted");
    found("the worker is at it", || a.job(&next.id).ok().filter(|job| job.finished > 0)).await;
    worker.kill();
    gate.set(false);
    for (book, id) in [(0, &job.id), (1, &next.id)] {
        let done = over(&a, id).await;
        assert_eq!(audio(&a, &done), undisturbed(book).await, "to the bit as by one gateway alone");
    }
    let all = (job.total + next.total) as usize;
    found("each once", || (files(folder.path()).len() == all).then_some(())).await;
    a.shutdown();
}
