//! What is shipped beside the program: the systemd unit and its notifications, the Debian package, the alerts.

use std::os::unix::net::UnixDatagram;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use super::support::PATIENCE;

fn root(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(path)
}

/// Runs a program; nothing where it is not installed: then the test is skipped.
fn run(program: &str, arguments: &[&str]) -> Option<Output> {
    match Command::new(program).args(arguments).current_dir(root("")).stdin(Stdio::null()).output() {
        Ok(output) => Some(output),
        Err(error) => {
            antiphon_skip::skip(program, error);
            None
        }
    }
}

fn text(output: &Output) -> String {
    format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr))
}

#[test]
fn systemd_learns_that_the_gateway_is_ready_alive_and_stopping() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("notify");
    let socket = UnixDatagram::bind(&path).expect("a socket");
    socket.set_read_timeout(Some(PATIENCE)).expect("set");
    let mut program = Command::new(env!("CARGO_BIN_EXE_antiphon"))
        .arg("serve")
        .current_dir(folder.path())
        .env("XDG_STATE_HOME", folder.path())
        .env("NOTIFY_SOCKET", &path)
        .env("WATCHDOG_USEC", "200000")
        .env("ANTIPHON_HTTP__BIND", "127.0.0.1:0")
        .env("ANTIPHON_SIP__UDP", "off")
        .env("ANTIPHON_SIP__TCP", "off")
        .env("ANTIPHON_ENGINE__KIND", "tone")
        .stderr(Stdio::null())
        .spawn()
        .expect("the program starts");
    let heard = |wanted: &str| {
        let mut datagram = [0; 4096];
        loop {
            let length = socket.recv(&mut datagram).unwrap_or_else(|error| panic!("no {wanted}: {error}"));
            let message = String::from_utf8_lossy(&datagram[..length]);
            if message.lines().any(|line| line == wanted) {
                return;
            }
        }
    };
    heard("READY=1");
    heard("WATCHDOG=1");
    heard("WATCHDOG=1");
    let stopped = Command::new("kill").arg(program.id().to_string()).status().expect("kill is there");
    assert!(stopped.success());
    heard("STOPPING=1");
    assert!(program.wait().expect("it ends").success());
}

#[test]
fn the_debian_package_has_the_program_its_unit_and_its_configuration() {
    let folder = tempfile::tempdir().expect("a folder");
    let out = folder.path().to_string_lossy().into_owned();
    let script = root("config/packaging/debian/build").to_string_lossy().into_owned();
    // Any program will do, and a small one packs quickly.
    if run("dpkg-deb", &["--version"]).is_none() {
        return;
    }
    let built = run(&script, &["/bin/true", &out]).expect("a script of the project");
    assert!(built.status.success(), "{}", text(&built));
    let package =
        std::fs::read_dir(folder.path()).expect("a folder").next().expect("a package").expect("readable").path();
    let package = package.to_string_lossy().into_owned();
    let listed = run("dpkg-deb", &["--contents", &package]).expect("installed");
    let listed = text(&listed);
    for file in [
        "./usr/bin/antiphon",
        "./lib/systemd/system/antiphon.service",
        "./lib/systemd/system/antiphon@.service",
        "./etc/antiphon/gateway.toml",
        "./usr/share/doc/antiphon/HANDBOOK.md",
        "./usr/share/doc/antiphon/FAULTS.md",
        "./usr/share/antiphon/alerts.yml",
    ] {
        assert!(listed.contains(file), "{file}: {listed}");
    }
    let fields = text(&run("dpkg-deb", &["--field", &package]).expect("installed"));
    assert!(fields.contains(concat!("Version: ", env!("CARGO_PKG_VERSION"))), "{fields}");
    let missing = run(&script, &["/no/such/program", &out]).expect("a script of the project");
    assert_eq!(missing.status.code(), Some(69));
    assert!(text(&missing).contains("cargo build --release"));
}

#[test]
fn systemd_takes_every_line_of_the_unit() {
    let unit = std::fs::read_to_string(root("config/packaging/systemd/antiphon.service")).expect("readable");
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("antiphon.service");
    // The program is not installed here; everything else is judged as it is.
    std::fs::write(&path, unit.replace("/usr/bin/antiphon", "/bin/true")).expect("written");
    if let Some(verified) = run("systemd-analyze", &["verify", &path.to_string_lossy()]) {
        assert!(verified.status.success(), "{}", text(&verified));
        assert!(!text(&verified).contains("antiphon.service"), "{}", text(&verified));
    }
}

#[test]
fn each_alert_fires_for_what_it_means_and_for_nothing_else() {
    if let Some(tested) = run("promtool", &["test", "rules", "config/alerts.test.yml"]) {
        assert!(tested.status.success(), "{}", text(&tested));
    }
    let rules = std::fs::read_to_string(root("config/alerts.yml")).expect("readable");
    let tests = std::fs::read_to_string(root("config/alerts.test.yml")).expect("readable");
    for alert in rules.lines().filter_map(|line| line.trim().strip_prefix("- alert: ")) {
        assert!(tests.contains(&format!("alertname: {alert}")), "{alert} has no test");
        let handbook = std::fs::read_to_string(root("config/packaging/HANDBOOK.md")).expect("readable");
        assert!(handbook.contains(&format!("`{alert}`")), "the handbook does not say what to do about {alert}");
    }
}
