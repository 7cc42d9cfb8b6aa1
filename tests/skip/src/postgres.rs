//! A PostgreSQL of a test's own: its program in a folder of its own, killed and started as the test likes.

use std::env;
use std::fs::{self, File};
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread::park_timeout;
use std::time::{Duration, Instant};

use crate::skip;

/// Longest wait for the server to answer: after a crash it reads its log first.
const LIMIT: Duration = Duration::from_secs(120);
/// Between two looks at it.
const LOOK: Duration = Duration::from_millis(20);
/// The superuser, and the database that every cluster has.
const USER: &str = "antiphon";
const DATABASE: &str = "postgres";

/// A server that listens at a socket in its folder, and ends with this value.
pub struct Postgres {
    process: Option<Child>,
    programs: PathBuf,
    folder: PathBuf,
    /// Of TCP with TLS, where it was asked for.
    port: Option<u16>,
}

impl Postgres {
    /// A new and empty one; `None`: the program is not here, and the test is skipped.
    ///
    /// # Panics
    /// It is here and does not start.
    pub fn start() -> Option<Self> {
        let mut server = Self::new()?;
        server.run();
        Some(server)
    }

    /// The same, which takes connections over TCP only with TLS and a password, at [`Postgres::secured_url`].
    ///
    /// # Panics
    /// As [`Postgres::start`], or a file cannot be read.
    pub fn start_secured(certificate: &Path, key: &Path, password: &str) -> Option<Self> {
        let mut server = Self::new()?;
        // Given back at once: the program binds it a moment later.
        let free = TcpListener::bind("127.0.0.1:0").and_then(|socket| socket.local_addr()).expect("a free port");
        server.port = Some(free.port());
        for (from, name) in [(certificate, "server.crt"), (key, "server.key")] {
            let to = server.data().join(name);
            fs::copy(from, &to).expect("copied");
            fs::set_permissions(&to, fs::Permissions::from_mode(0o600)).expect("set");
            server.give(&to);
        }
        let rules = "local all all trust\nhostssl all all 127.0.0.1/32 scram-sha-256\n";
        fs::write(server.data().join("pg_hba.conf"), rules).expect("written");
        // A server of one session: what it is told here lies in its tables.
        let mut single = server.command("postgres");
        single.args(["--single", "-D"]).arg(server.data()).arg(DATABASE);
        let mut single =
            single.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::null()).spawn().expect("runs");
        let told = format!("ALTER ROLE {USER} PASSWORD '{password}'\n");
        single.stdin.take().expect("piped").write_all(told.as_bytes()).expect("told");
        assert!(single.wait().expect("ends").success(), "the password was not taken");
        server.run();
        Some(server)
    }

    fn new() -> Option<Self> {
        let Some(programs) = programs() else {
            skip("postgresql", "the program is not installed (Debian: postgresql)");
            return None;
        };
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let number = COUNT.fetch_add(1, Ordering::Relaxed);
        let folder = env::temp_dir().join(format!("antiphon-pg-{}-{number}", std::process::id()));
        // Of a process that had the same number and was killed.
        let _ = fs::remove_dir_all(&folder);
        fs::create_dir(&folder).expect("a folder");
        let server = Self { process: None, programs, folder, port: None };
        server.give(&server.folder);
        let mut make = server.command("initdb");
        make.args([
            "--username",
            USER,
            "--auth",
            "trust",
            "--encoding",
            "UTF8",
            "--locale",
            "C",
            "--no-sync",
            "--pgdata",
        ]);
        let made = make.arg(server.data()).stdin(Stdio::null()).output().expect("initdb runs");
        assert!(made.status.success(), "initdb: {}", String::from_utf8_lossy(&made.stderr));
        Some(server)
    }

    /// Starts it, or starts it again, and waits until it answers.
    ///
    /// # Panics
    /// It does not.
    #[allow(clippy::disallowed_methods, reason = "the clock of the gateway is none of this crate's")]
    pub fn run(&mut self) {
        let begun = Instant::now();
        while begun.elapsed() < LIMIT {
            let mut command = self.command("postgres");
            command.arg("-D").arg(self.data());
            // What the machine would lose with its power is not lost with the process.
            let mut settings = vec!["fsync=off".to_owned(), "max_connections=40".into(), "shared_buffers=16MB".into()];
            settings.push(format!("unix_socket_directories={}", self.folder.display()));
            match self.port {
                None => settings.push("listen_addresses=".into()),
                Some(port) => {
                    settings.extend([format!("port={port}"), "listen_addresses=127.0.0.1".into(), "ssl=on".into()])
                }
            }
            settings.iter().for_each(|setting| {
                command.args(["-c", setting]);
            });
            let log = File::options().create(true).append(true).open(self.folder.join("log")).expect("a log");
            command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log);
            let mut process = command.spawn().expect("postgres starts");
            // One that ends found processes of the one before it, which are about to end.
            while process.try_wait().expect("a child").is_none() && begun.elapsed() < LIMIT {
                if self.answers() {
                    self.process = Some(process);
                    return;
                }
                park_timeout(LOOK);
            }
            let _ = process.kill();
            let _ = process.wait();
        }
        panic!("postgres does not start: {}", fs::read_to_string(self.folder.join("log")).unwrap_or_default());
    }

    /// Kills it with SIGKILL, if it runs.
    pub fn kill(&mut self) {
        if let Some(mut process) = self.process.take() {
            // It may have ended by itself.
            let _ = process.kill();
            let _ = process.wait();
        }
    }

    /// Where it is, by its socket.
    pub fn url(&self) -> String {
        let port = self.port.unwrap_or(5432);
        format!("postgres://{USER}@/{DATABASE}?host={}&port={port}", self.folder.display())
    }

    /// Where it is, over TCP.
    pub fn secured_url(&self, password: &str) -> String {
        format!("postgres://{USER}:{password}@localhost:{}/{DATABASE}", self.port.unwrap_or(5432))
    }

    fn data(&self) -> PathBuf {
        self.folder.join("data")
    }

    /// A program of PostgreSQL, which refuses to run as root.
    fn command(&self, name: &str) -> Command {
        let mut command = Command::new(self.programs.join(name));
        command
            .current_dir(&self.folder)
            .env_clear()
            .env("LC_ALL", "C")
            .env("PATH", env::var_os("PATH").unwrap_or_default());
        if let Some((user, group)) = nobody() {
            command.uid(user).gid(group);
        }
        command
    }

    /// Makes `path` a thing of the user that the server runs as.
    fn give(&self, path: &Path) {
        if let Some((user, group)) = nobody() {
            chown(path, Some(user), Some(group)).expect("root may");
        }
    }

    /// Whether it takes sessions: the start of one is answered by a request for authentication, which is trust.
    fn answers(&self) -> bool {
        let port = self.port.unwrap_or(5432);
        let Ok(mut socket) = UnixStream::connect(self.folder.join(format!(".s.PGSQL.{port}"))) else { return false };
        let names = format!("user\0{USER}\0database\0{DATABASE}\0\0");
        let mut start = (8 + names.len() as u32).to_be_bytes().to_vec();
        start.extend(196_608u32.to_be_bytes());
        start.extend(names.as_bytes());
        let mut first = [0];
        let asked = socket.set_read_timeout(Some(LIMIT)).and_then(|()| socket.write_all(&start));
        let local = asked.and_then(|()| socket.read_exact(&mut first)).is_ok() && first == *b"R";
        // Both sockets are open before the first session is taken.
        local && self.port.is_none_or(|port| TcpStream::connect(("127.0.0.1", port)).is_ok())
    }
}

impl Drop for Postgres {
    fn drop(&mut self) {
        if let Some(mut process) = self.process.take() {
            // Ends its sessions as well, at once and without tidying up.
            let asked = Command::new("kill").args(["-s", "QUIT", &process.id().to_string()]).status();
            if !asked.is_ok_and(|asked| asked.success()) {
                let _ = process.kill();
            }
            let _ = process.wait();
        }
        let _ = fs::remove_dir_all(&self.folder);
    }
}

/// The folder of the programs: behind the name on the path, or where Debian keeps them.
fn programs() -> Option<PathBuf> {
    let versions = fs::read_dir("/usr/lib/postgresql").into_iter().flatten().flatten();
    let debian = versions.map(|version| version.path().join("bin/postgres"));
    let mut found: Vec<PathBuf> = crate::find("postgres").into_iter().chain(debian).collect();
    found.retain(|program| program.with_file_name("initdb").is_file());
    // By its true name: it finds the rest of itself beside that.
    let program = fs::canonicalize(found.first()?).ok()?;
    program.parent().map(Path::to_path_buf)
}

/// Whom root runs it as; `None`: this is not root.
fn nobody() -> Option<(u32, u32)> {
    if fs::metadata("/proc/self").ok()?.uid() != 0 {
        return None;
    }
    let users = fs::read_to_string("/etc/passwd").ok()?;
    let of = |name: &str| {
        let mut fields =
            users.lines().map(|line| line.split(':')).find(|fields| fields.clone().next() == Some(name))?;
        Some((fields.nth(2)?.parse().ok()?, fields.next()?.parse().ok()?))
    };
    of("postgres").or_else(|| of("nobody"))
}
