//! What goes wrong during a soak, from its seed: a disk without room, databases that somebody holds, a voice that dies.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use antiphon_loadgen::call::now;
use rusqlite::Connection;

use super::super::full_disk::may_write;
use super::Rng;

/// How long a disk has no room, or a database is held.
const LASTS: Duration = Duration::from_secs(2);
/// What a fault may still do to what begins after it: a database is waited for, a voice is started again.
const AFTER: Duration = Duration::from_secs(6);
/// Less than any database has already.
const LITTLE: u64 = 1_024;

/// When something was wrong.
#[derive(Clone, Debug)]
struct Window {
    what: &'static str,
    from: Instant,
    to: Instant,
}

/// All that went wrong. Clones mean the same.
#[derive(Clone, Default)]
pub(super) struct Windows(Arc<Mutex<Vec<Window>>>);

impl Windows {
    /// Whether something was wrong between these instants, or shortly before.
    pub(super) fn touch(&self, from: Instant, to: Instant) -> bool {
        self.0.lock().expect("no panic").iter().any(|window| window.from <= to && from <= window.to + AFTER)
    }

    /// How often each went wrong.
    pub(super) fn told(&self) -> String {
        let windows = self.0.lock().expect("no panic");
        let mut kinds: Vec<&str> = windows.iter().map(|window| window.what).collect();
        kinds.sort_unstable();
        kinds.dedup();
        let count = |kind: &&str| windows.iter().filter(|window| window.what == *kind).count();
        kinds.iter().map(|kind| format!("{} of {kind}", count(kind))).collect::<Vec<_>>().join(", ")
    }

    /// Something is wrong while `work` goes on.
    async fn during(&self, what: &'static str, work: impl Future<Output = ()>) {
        let from = now();
        let at = {
            let mut windows = self.0.lock().expect("no panic");
            // Until it is known better: who asks meanwhile is in the middle of it.
            windows.push(Window { what, from, to: from + 60 * LASTS });
            windows.len() - 1
        };
        work.await;
        self.0.lock().expect("no panic")[at].to = now();
    }
}

/// Breaks one thing after the other until `end`; `state` is the folder with the databases.
pub(super) async fn make(process: u32, state: PathBuf, mut rng: Rng, windows: Windows, end: Instant) {
    loop {
        let pause = Duration::from_secs(6 + rng.below(14));
        if now() + pause + LASTS + AFTER > end {
            return;
        }
        tokio::time::sleep(pause).await;
        match rng.below(4) {
            0 => windows.during("a full disk", full_disk(process)).await,
            1 => windows.during("held records", held(&state, "records.sqlite")).await,
            2 => windows.during("held jobs", held(&state, "batch.sqlite")).await,
            _ => windows.during("a killed voice", async { kill_a_voice(process, &mut rng) }).await,
        }
    }
}

async fn full_disk(process: u32) {
    may_write(process, LITTLE);
    tokio::time::sleep(LASTS).await;
    may_write(process, u64::MAX);
}

/// Has a database, if it is there yet, to itself for a while.
async fn held(state: &Path, name: &str) {
    let Some(path) = find(state, name) else { return };
    let holder = tokio::task::spawn_blocking(move || {
        let connection = Connection::open(path).expect("opened");
        connection.busy_timeout(Duration::from_secs(5)).expect("set");
        // Who comes too late for it, holds nothing.
        connection.execute_batch("BEGIN EXCLUSIVE").is_ok().then_some(connection)
    });
    let holder = holder.await.expect("no panic");
    tokio::time::sleep(LASTS).await;
    if let Some(connection) = holder {
        connection.execute_batch("ROLLBACK").expect("given back");
    }
}

fn find(folder: &Path, name: &str) -> Option<PathBuf> {
    fs::read_dir(folder).ok()?.flatten().find_map(|entry| {
        let path = entry.path();
        if path.is_dir() { find(&path, name) } else { (entry.file_name() == name).then_some(path) }
    })
}

/// Kills one of the processes that speak, where there are some.
fn kill_a_voice(process: u32, rng: &mut Rng) {
    let voices = children(process);
    if voices.is_empty() {
        return;
    }
    let chosen = voices[rng.below(voices.len() as u64) as usize];
    // It may have ended by itself.
    let _ = std::process::Command::new("kill").args(["-s", "KILL", &chosen.to_string()]).status();
}

/// The processes that `process` has started.
fn children(process: u32) -> Vec<u32> {
    let tasks = fs::read_dir(format!("/proc/{process}/task")).into_iter().flatten().flatten();
    let lists = tasks.filter_map(|task| fs::read_to_string(task.path().join("children")).ok());
    lists.flat_map(|list| list.split_whitespace().filter_map(|id| id.parse().ok()).collect::<Vec<u32>>()).collect()
}

/// UDP sockets of a process: the ports of calls, beside those of listeners.
pub(super) fn datagram_sockets(process: u32) -> usize {
    let own: Vec<u64> = fs::read_dir(format!("/proc/{process}/fd"))
        .into_iter()
        .flatten()
        .flatten()
        // What the link leads to: a socket has the number that the table of all of them names.
        .filter_map(|entry| fs::metadata(entry.path()).ok().map(|socket| socket.ino()))
        .collect();
    let tables = ["udp", "udp6"].map(|table| fs::read_to_string(format!("/proc/{process}/net/{table}")));
    let lines = tables.iter().flatten().flat_map(|table| table.lines().skip(1));
    lines.filter_map(|line| line.split_whitespace().nth(9)?.parse().ok()).filter(|inode| own.contains(inode)).count()
}
