//! What a process costs, and a gateway that is started for a measurement.

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::PathBuf;
use std::process::{ExitStatus, Stdio};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use tokio::process::{Child, Command};

use crate::caller::call::CallError;
use crate::clock;

/// Clock ticks of `/proc/PID/stat`; 100 on every Linux of today (`getconf CLK_TCK`).
const TICKS: f64 = 100.0;

/// A reading of a process, its threads and the children it has waited for.
#[derive(Clone, Copy, Debug)]
pub struct Sample {
    /// When it was read.
    pub at: Instant,
    /// CPU time so far, seconds.
    pub cpu: f64,
    /// Of that what children used that have ended, seconds.
    pub children: f64,
    /// Resident memory, octets.
    pub rss: u64,
}

/// What a process cost between two readings.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Usage {
    /// Cores busy on average.
    pub cores: f64,
    /// Of these what children had that have ended.
    #[serde(default)]
    pub children: f64,
    /// Resident memory at the end, octets.
    pub rss: u64,
}

impl Sample {
    /// Reads process `pid`; `None` when it is gone or this is no Linux.
    pub fn of(pid: u32) -> Option<Sample> {
        Sample::read(&format!("/proc/{pid}"))
    }

    /// Reads this process.
    pub fn own() -> Option<Sample> {
        Sample::read("/proc/self")
    }

    /// What was used since `earlier`.
    pub fn since(&self, earlier: &Sample) -> Usage {
        let seconds = self.at.saturating_duration_since(earlier.at).as_secs_f64();
        let cores = |used: f64| if seconds > 0.0 { used.max(0.0) / seconds } else { 0.0 };
        let children = cores(self.children - earlier.children);
        Usage { cores: cores(self.cpu - earlier.cpu), children, rss: self.rss }
    }

    fn read(folder: &str) -> Option<Sample> {
        let at = clock::now();
        let stat = std::fs::read_to_string(format!("{folder}/stat")).ok()?;
        // utime, stime and the same of children that ended (a voice that is a child process per utterance).
        let cpu = |fields| ticks(&stat, fields).map(|ticks| ticks as f64 / TICKS);
        let (own, children) = (cpu(11..13)?, cpu(13..15)?);
        let status = std::fs::read_to_string(format!("{folder}/status")).ok()?;
        let rss = status
            .lines()
            .find_map(|l| l.strip_prefix("VmRSS:"))
            .and_then(|v| v.split_whitespace().next()?.parse::<u64>().ok())
            .unwrap_or(0);
        Some(Sample { at, cpu: own + children, children, rss: rss * 1024 })
    }
}

/// A thread of a process.
#[derive(Clone, Debug, PartialEq)]
pub struct Thread {
    /// As the process calls it, at most 15 characters.
    pub name: String,
    /// CPU time so far, seconds.
    pub cpu: f64,
}

/// Each thread of process `pid` by its id; nothing when it is gone.
pub fn threads(pid: u32) -> BTreeMap<u32, Thread> {
    let Ok(tasks) = std::fs::read_dir(format!("/proc/{pid}/task")) else { return BTreeMap::new() };
    let thread = |task: std::io::Result<std::fs::DirEntry>| {
        let task = task.ok()?;
        let stat = std::fs::read_to_string(task.path().join("stat")).ok()?;
        let name = stat.split_once('(')?.1.rsplit_once(')')?.0.to_owned();
        Some((task.file_name().to_str()?.parse().ok()?, Thread { name, cpu: ticks(&stat, 11..13)? as f64 / TICKS }))
    };
    tasks.filter_map(thread).collect()
}

/// CPU time that this computer has spent on anything so far, seconds; `None` where there is no `/proc`.
pub fn host_busy() -> Option<f64> {
    let stat = std::fs::read_to_string("/proc/stat").ok()?;
    let fields: Vec<u64> = stat.lines().next()?.split_whitespace().skip(1).filter_map(|f| f.parse().ok()).collect();
    // user, nice, system, then idle and iowait, then irq, softirq, steal; what follows is counted in user already.
    let busy = fields.iter().enumerate().filter(|(n, _)| !matches!(n, 3 | 4)).take(6).map(|(_, v)| v).sum::<u64>();
    Some(busy as f64 / TICKS)
}

/// Sum of some fields of a `stat` file, counted from behind the name in parentheses, which may hold spaces.
fn ticks(stat: &str, fields: Range<usize>) -> Option<u64> {
    let all: Vec<&str> = stat.rsplit_once(')')?.1.split_whitespace().collect();
    Some(fields.map(|n| all.get(n).and_then(|f| f.parse::<u64>().ok()).unwrap_or(0)).sum())
}

/// This computer, for the head of a report.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Host {
    /// Processor.
    pub cpu: String,
    /// Cores this process may use.
    pub cores: usize,
    /// Memory, octets.
    pub memory: u64,
    /// Kernel.
    pub kernel: String,
}

impl Host {
    /// Reads this computer.
    pub fn here() -> Host {
        let read = |path: &str| std::fs::read_to_string(path).unwrap_or_default();
        let field = |text: &str, name: &str| {
            text.lines().find(|l| l.starts_with(name)).and_then(|l| l.split(':').nth(1)).map(|v| v.trim().to_owned())
        };
        let memory = field(&read("/proc/meminfo"), "MemTotal")
            .and_then(|v| v.split_whitespace().next()?.parse::<u64>().ok())
            .unwrap_or(0);
        Host {
            cpu: field(&read("/proc/cpuinfo"), "model name").unwrap_or_else(|| std::env::consts::ARCH.to_owned()),
            cores: std::thread::available_parallelism().map_or(1, usize::from),
            memory: memory * 1024,
            kernel: read("/proc/sys/kernel/osrelease").trim().to_owned(),
        }
    }
}

/// A gateway started for a measurement; killed with the value if it was not stopped before, and, where `setpriv` (of
/// util-linux) is installed, asked to end when this process is gone in whatever way: one that was left over kept a GPU.
pub struct Spawned {
    child: Child,
    pid: u32,
    log: PathBuf,
}

impl Spawned {
    /// Runs `command` in a shell, with `environment` added, its output in the file `log`.
    ///
    /// # Errors
    /// The log cannot be written or there is no shell.
    pub fn start(command: &str, environment: &[(String, String)], log: PathBuf) -> Result<Spawned, CallError> {
        let file = std::fs::File::create(&log).map_err(CallError::io(format!("write {}", log.display())))?;
        let errors = file.try_clone().map_err(CallError::io("log"))?;
        let child = Command::new("sh")
            // The shell gives its place to the gateway, so that the process measured is the gateway.
            .arg("-c")
            .arg("if command -v setpriv >/dev/null; then exec setpriv --pdeathsig TERM sh -c \"$0\"; fi; eval \"$0\"")
            .arg(format!("exec {command}"))
            .envs(environment.iter().cloned())
            .stdin(Stdio::null())
            .stdout(file)
            .stderr(errors)
            .kill_on_drop(true)
            .spawn()
            .map_err(CallError::io(format!("run {command:?}")))?;
        let pid = child.id().ok_or(CallError::Over)?;
        Ok(Spawned { child, pid, log })
    }

    /// Its process.
    pub fn pid(&self) -> u32 {
        self.pid
    }

    /// How it ended, if it has.
    pub fn exited(&mut self) -> Option<ExitStatus> {
        self.child.try_wait().ok().flatten()
    }

    /// The last lines it printed.
    pub fn last_words(&self) -> String {
        let text = std::fs::read_to_string(&self.log).unwrap_or_default();
        let lines: Vec<&str> = text.lines().collect();
        lines[lines.len().saturating_sub(5)..].join("\n")
    }

    /// Asks it to end (SIGTERM) and waits for `within`, then kills it.
    pub async fn stop(mut self, within: Duration) {
        // No signals in the standard library, and no unsafe code here. Every shell has `kill`; the program of that name is
        // missing on small systems.
        let _ = Command::new("sh").arg("-c").arg(format!("kill -TERM {}", self.pid)).status().await;
        if tokio::time::timeout(within, self.child.wait()).await.is_err() {
            let _ = self.child.kill().await;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_process_uses_memory_and_time() {
        let before = Sample::own().unwrap();
        let mut n = 1u64;
        while Sample::own().unwrap().cpu - before.cpu < 0.05 {
            n = n.wrapping_mul(31).wrapping_add(7);
        }
        let usage = Sample::own().unwrap().since(&before);
        assert!(usage.cores > 0.05 && usage.rss > 1_000_000, "{usage:?} {n}");
        let own = threads(std::process::id());
        let cpu = own.values().map(|thread| thread.cpu).sum::<f64>();
        assert!(cpu >= 0.02 && own.values().all(|thread| !thread.name.is_empty()), "{own:?}");
        assert!(host_busy().unwrap() >= cpu);
        assert!(Host::here().cores >= 1);
    }

    #[tokio::test]
    async fn a_process_that_dies_is_noticed_and_quoted() {
        let folder = tempfile::tempdir().unwrap();
        let mut spawned = Spawned::start("sh -c 'echo cannot; exit 3'", &[], folder.path().join("log")).unwrap();
        let status = tokio::time::timeout(Duration::from_secs(10), spawned.child.wait()).await.unwrap().unwrap();
        assert_eq!(status.code(), Some(3));
        assert!(spawned.exited().is_some());
        assert_eq!(spawned.last_words(), "cannot");
    }
}
