//! What is shipped beside the program: the systemd unit and its notifications, the Debian package, the alerts, the handbook.

use std::net::{SocketAddr, TcpListener, UdpSocket};
use std::os::unix::net::UnixDatagram;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use antiphon_loadgen::call::{End, now};
use antiphon_loadgen::sip;
use serde_json::Value;

use super::program::Serve;
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

fn text_of(output: &Output) -> String {
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
    let last = std::cell::RefCell::new(String::new());
    let heard = |wanted: &str| {
        let mut datagram = [0; 4096];
        // Several may come in one message.
        while !last.borrow().lines().any(|line| line == wanted) {
            let length = socket.recv(&mut datagram).unwrap_or_else(|error| panic!("no {wanted}: {error}"));
            last.replace(String::from_utf8_lossy(&datagram[..length]).into_owned());
        }
        if wanted.starts_with("WATCHDOG") {
            last.take();
        }
    };
    heard("READY=1");
    heard("WATCHDOG=1");
    heard("WATCHDOG=1");
    let stopped = Command::new("kill").arg(program.id().to_string()).status().expect("kill is there");
    assert!(stopped.success());
    heard("STOPPING=1");
    // Longer than the default of the unit: the notice, the longest grace, and time for last words.
    heard("EXTEND_TIMEOUT_USEC=65000000");
    // Somebody goes on to read: of what is not read the kernel keeps ten messages.
    std::thread::spawn(move || while socket.recv(&mut [0; 4096]).is_ok() {});
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
    assert!(built.status.success(), "{}", text_of(&built));
    let package =
        std::fs::read_dir(folder.path()).expect("a folder").next().expect("a package").expect("readable").path();
    let package = package.to_string_lossy().into_owned();
    let listed = run("dpkg-deb", &["--contents", &package]).expect("installed");
    let listed = text_of(&listed);
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
    let fields = text_of(&run("dpkg-deb", &["--field", &package]).expect("installed"));
    assert!(fields.contains(concat!("Version: ", env!("CARGO_PKG_VERSION"))), "{fields}");
    let missing = run(&script, &["/no/such/program", &out]).expect("a script of the project");
    assert_eq!(missing.status.code(), Some(69));
    assert!(text_of(&missing).contains("cargo build --release"));
}

#[test]
fn what_is_released_is_made_twice_the_same() {
    if run("dpkg-deb", &["--version"]).is_none() || run("python3", &["--version"]).is_none() {
        return;
    }
    let folder = tempfile::tempdir().expect("a folder");
    for name in ["antiphon", "antiphon-loadgen"] {
        std::fs::copy("/bin/true", folder.path().join(name)).expect("copied");
    }
    let (from, out) = (folder.path().to_string_lossy().into_owned(), folder.path().join("out"));
    let script = root("config/packaging/release").to_string_lossy().into_owned();
    let made = run(&script, &["--check", "--from", &from, &out.to_string_lossy()]).expect("a script of the project");
    assert!(made.status.success(), "{}", text_of(&made));
    let sums = std::fs::read_to_string(out.join("SHA256SUMS")).expect("written");
    for file in ["antiphon", "antiphon-loadgen", ".deb", "sbom.json", "NOTICE"] {
        assert!(sums.lines().any(|line| line.ends_with(file)), "{file}: {sums}");
    }
    let none = run(&script, &["--from", "/no/such/folder", &out.to_string_lossy()]).expect("a script of the project");
    assert_eq!(none.status.code(), Some(69), "{}", text_of(&none));
    assert_eq!(run(&script, &["--nonsense"]).expect("a script of the project").status.code(), Some(2));
}

/// What somebody has after unpacking it, with the configuration of the package: a caller hears something.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_gateway_out_of_the_debian_package_answers_a_call() {
    let folder = tempfile::tempdir().expect("a folder");
    if run("dpkg-deb", &["--version"]).is_none() {
        return;
    }
    let built = Command::new(root("config/packaging/debian/build"))
        .args([Path::new(env!("CARGO_BIN_EXE_antiphon")), folder.path()])
        // Packing what is unpacked at once is worth no time.
        .env("DPKG_DEB_COMPRESSOR_TYPE", "none")
        .output()
        .expect("a script of the project");
    assert!(built.status.success(), "{}", text_of(&built));
    let package = std::fs::read_dir(folder.path()).expect("a folder").next().expect("a package").expect("readable");
    let system = folder.path().join("system");
    let (package, into) = (package.path().to_string_lossy().into_owned(), system.to_string_lossy().into_owned());
    let begun = now();
    let unpacked = run("dpkg-deb", &["-x", &package, &into]).expect("installed");
    assert!(unpacked.status.success(), "{}", text_of(&unpacked));
    std::fs::remove_file(package).expect("it was large");

    let http = TcpListener::bind("127.0.0.1:0").and_then(|socket| socket.local_addr()).expect("a free port");
    let sip = UdpSocket::bind("127.0.0.1:0").and_then(|socket| socket.local_addr()).expect("a free port");
    let address = |address: SocketAddr| address.to_string();
    let child = Command::new(system.join("usr/bin/antiphon"))
        .args(["serve", "-c"])
        .arg(system.join("etc/antiphon/gateway.toml"))
        .current_dir(&system)
        .env("ANTIPHON_STATE__DIR", system.join("var/lib/antiphon"))
        .env("ANTIPHON_HTTP__BIND", address(http))
        .env("ANTIPHON_SIP__UDP", address(sip))
        .env("ANTIPHON_SIP__TCP", "off")
        .stdin(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .expect("it starts");
    let mut program = Serve::of(child, http, sip);
    program.ready().await;
    let caller = sip::Caller::bind(sip::Config::default()).await.expect("free ports");
    let call = caller.call(&format!("sip:demo@{sip}")).await.expect("answered");
    let onset = call.onset(call.setup().asked, PATIENCE).await.expect("the agent greets");
    println!("from the package to the first sound: {} ms", onset.saturating_duration_since(begun).as_millis());
    assert_eq!(call.hang_up().await, End::Local);
    assert_eq!(program.terminate().await, Some(0));
}

/// Commands of the handbook, and the test that runs each; `""`: its programs are no part of Debian, or change the system.
const HANDBOOK: &[(&str, &str)] = &[
    ("cargo build --release && config/packaging/debian/build", "a_gateway_out_of_the_debian_package_answers_a_call"),
    ("podman build", ""),
    (
        "cd config/packaging/compose && ./secrets.sh",
        "the_images_are_made_of_files_that_are_there_and_secrets_of_no_pattern",
    ),
    ("helm install", "what_containers_are_configured_with_is_taken_and_helm_takes_the_chart"),
    ("systemctl", "systemd_takes_every_line_of_the_unit"),
    ("journalctl", ""),
    ("antiphon check --call", "check_explains_a_call_and_asks_the_hosts_of_trunks"),
    ("antiphon check --sip", "check_explains_a_call_and_asks_the_hosts_of_trunks"),
    ("antiphon check -c", "check_names_the_line_of_a_mistake"),
    ("antiphon model pull", "model_pull_fetches_from_a_hub"),
    ("antiphon recording decrypt", "recordings_are_decrypted_with_their_key"),
    ("antiphon serve --takeover", "a_second_process_takes_the_place_of_the_first_and_no_call_is_lost"),
    ("antiphon worker", "a_gateway_speaks_through_a_worker_of_another_process"),
    ("antiphon top", "top_shows_a_running_gateway"),
    ("antiphon-loadgen ladder", "a_ladder_tells_what_few_places_bear"),
    ("antiphon-loadgen size", "a_report_becomes_a_page_and_a_size"),
    ("promtool test rules", "each_alert_fires_for_what_it_means_and_for_nothing_else"),
    ("sqlite3", "what_is_backed_up_while_the_gateway_runs_is_there_when_it_is_restored"),
    ("curl", "every_route_succeeds_and_every_metric_tells"),
];

/// Every command that the handbook tells: in code spans, and lines of blocks of shell.
fn commands(handbook: &str) -> Vec<String> {
    let programs = [
        "antiphon ",
        "antiphon-loadgen ",
        "cargo ",
        "podman ",
        "helm ",
        "docker ",
        "cd ",
        "systemctl ",
        "journalctl ",
        "promtool ",
        "sqlite3 ",
        "curl ",
    ];
    let mut found = Vec::new();
    let mut shell = false;
    for line in handbook.lines() {
        if let Some(kind) = line.strip_prefix("```") {
            shell = kind == "sh";
            continue;
        }
        let spans: Vec<&str> = if shell { vec![line] } else { line.split('`').skip(1).step_by(2).collect() };
        found.extend(
            spans.into_iter().filter(|span| programs.iter().any(|name| span.starts_with(name))).map(str::to_owned),
        );
    }
    found
}

#[test]
fn every_command_of_the_handbook_is_one_and_is_run_by_a_test() {
    let handbook = std::fs::read_to_string(root("config/packaging/HANDBOOK.md")).expect("readable");
    let mut tests = String::new();
    let mut folders = vec![root("tests"), root("loadgen/tests"), root("loadgen/src")];
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(folder).expect("readable").flatten() {
            match entry.path() {
                path if path.is_dir() => folders.push(path),
                path if path.extension().is_some_and(|end| end == "rs") => {
                    tests.push_str(&std::fs::read_to_string(path).expect("UTF-8"));
                }
                _ => {}
            }
        }
    }
    let commands = commands(&handbook);
    assert!(commands.len() >= 20, "{commands:?}");
    for command in &commands {
        let row = HANDBOOK.iter().find(|(known, _)| command.starts_with(known));
        let (_, test) = row.unwrap_or_else(|| panic!("`{command}` has no row in HANDBOOK"));
        assert!(test.is_empty() || tests.contains(&format!("fn {test}")), "`{command}`: no test `{test}`");
        // Whatever its test leaves out: it takes these options. With --help nothing is done.
        if let Some(arguments) = command.strip_prefix("antiphon ") {
            let arguments = arguments.split_whitespace().chain(["--help"]).collect::<Vec<_>>();
            let helped = run(env!("CARGO_BIN_EXE_antiphon"), &arguments).expect("it was built");
            assert!(helped.status.success(), "{command}: {}", text_of(&helped));
        }
    }
    for (known, _) in HANDBOOK {
        assert!(commands.iter().any(|command| command.starts_with(known)), "the handbook has no `{known}`");
    }
}

/// The object of the schema at `path`; names that are the user's own fit `additionalProperties`.
fn section<'a>(schema: &'a Value, path: &str) -> Option<&'a Value> {
    path.split('.').try_fold(schema, |node, part| {
        let inner = [&node["properties"][part], &node["additionalProperties"]];
        let inner = inner.into_iter().find(|inner| inner.is_object())?;
        Some(if inner["items"].is_object() { &inner["items"] } else { inner })
    })
}

#[test]
fn every_route_and_key_of_the_handbook_is_one() {
    let json = |path: &str| -> Value {
        let text = std::fs::read_to_string(root(path)).expect("readable");
        serde_json::from_str(&text).expect("JSON")
    };
    let (api, schema) = (json("src/server/openapi.json"), json("config/schema.json"));
    let handbook = std::fs::read_to_string(root("config/packaging/HANDBOOK.md")).expect("readable");
    // Blocks aside, what is between two backticks.
    let text: String = handbook.split("```").step_by(2).collect();
    let (mut routes, mut keys) = (0, 0);
    for span in text.split('`').skip(1).step_by(2) {
        let known = ["/v1/", "/debug/", "/healthz", "/readyz", "/metrics"];
        for word in span.split_whitespace().filter(|word| known.iter().any(|known| word.starts_with(known))) {
            let route = word.split('?').next().unwrap_or_default();
            // Or all below it.
            let mut paths = api["paths"].as_object().expect("paths").keys();
            let found = paths.any(|path| path.strip_prefix(route).is_some_and(|r| r.is_empty() || r.starts_with('/')));
            assert!(found, "`{span}`: there is no route {route}");
            routes += 1;
        }
        let Some((name, rest)) = span.strip_prefix('[').and_then(|rest| rest.split_once(']')) else { continue };
        let found = section(&schema, name.trim_start_matches('['));
        let found = found.unwrap_or_else(|| panic!("`{span}`: there is no section {name}"));
        let rest = rest.trim_start_matches([']', ' ']);
        let key = rest.split(|c: char| !(c.is_ascii_alphanumeric() || c == '_')).next().unwrap_or_default();
        assert!(key.is_empty() || found["properties"][key].is_object(), "`{span}`: [{name}] has no `{key}`");
        keys += 1;
    }
    assert!(routes >= 10 && keys >= 25, "{routes} routes, {keys} keys");
}

#[test]
fn the_images_are_made_of_files_that_are_there_and_secrets_of_no_pattern() {
    let read = |path: &str| std::fs::read_to_string(root(path)).expect("readable");
    let image = read("config/packaging/oci/Containerfile");
    let copied = image.lines().filter_map(|line| line.strip_prefix("COPY ")?.split(' ').next());
    for file in copied.filter(|file| !file.starts_with("--") && *file != ".") {
        assert!(root(file).exists(), "COPY {file}");
    }
    assert!(image.contains("USER 10001") && !image.contains("--privileged"));
    // A build that fails is no image.
    assert!(!image.contains("|| true"), "{image}");
    // Built by the compiler that the project is built by.
    let manifest: toml::Table = read("Cargo.toml").parse().expect("TOML");
    let compiler = manifest["workspace"]["package"]["rust-version"].as_str().expect("a version");
    assert!(image.contains(&format!("/rust:{compiler}-")), "{compiler}: {image}");
    // What compose mounts lies where it says.
    let compose = read("config/packaging/compose/compose.yaml");
    for line in compose.lines() {
        let mounts = line.split(['"', ' ', '[', ',']).filter(|word| word.starts_with("./") || word.starts_with("../"));
        for file in mounts.filter_map(|word| word.split(':').next()).filter(|file| !file.contains("secrets")) {
            assert!(root("config/packaging/compose").join(file).exists(), "{line}");
        }
    }
    let folder = tempfile::tempdir().expect("a folder");
    let script = folder.path().join("secrets.sh");
    std::fs::copy(root("config/packaging/compose/secrets.sh"), &script).expect("copied");
    let made = Command::new(&script).current_dir(folder.path()).output().expect("a script of the project");
    assert!(made.status.success(), "{}", text_of(&made));
    let secrets: Vec<String> = ["antiphon_token", "turn_password", "grafana"]
        .map(|name| std::fs::read_to_string(folder.path().join("secrets").join(name)).expect(name).trim().to_owned())
        .into();
    assert!(secrets.iter().all(|secret| secret.len() >= 16) && secrets[0] != secrets[1], "{secrets:?}");
}

/// Without a registry: on a Debian that debootstrap makes, with the program of these tests.
#[test]
fn the_image_is_built_and_starts_as_its_user_on_a_root_that_nobody_may_write() {
    let script = root("config/packaging/oci/build").to_string_lossy().into_owned();
    assert_eq!(run(&script, &["--nonsense"]).expect("a script of the project").status.code(), Some(2));
    if !["buildah", "debootstrap"].into_iter().all(|name| antiphon_skip::has_program(name, name)) {
        return;
    }
    // Kept for the next time: it is a hundred packages.
    let base = root("target/ci/debian").to_string_lossy().into_owned();
    let program = env!("CARGO_BIN_EXE_antiphon");
    let built = run(&script, &["--program", program, "--base", &base]).expect("a script of the project");
    if built.status.code() == Some(69) {
        return antiphon_skip::skip("buildah", text_of(&built));
    }
    assert!(built.status.success() && text_of(&built).contains("ready as user 10001"), "{}", text_of(&built));
}

/// The text of a block (`key: |`) at the top of a YAML file.
fn block(yaml: &str, key: &str) -> String {
    let lines = yaml.lines().skip_while(|line| *line != format!("{key}: |")).skip(1);
    let lines = lines.take_while(|line| line.is_empty() || line.starts_with("  "));
    lines.map(|line| format!("{}\n", line.trim_start_matches("  "))).collect()
}

#[test]
fn what_containers_are_configured_with_is_taken_and_helm_takes_the_chart() {
    let read = |path: &str| std::fs::read_to_string(root(path)).expect("readable");
    let folder = tempfile::tempdir().expect("a folder");
    for secret in ["token", "metrics", "antiphon_token", "turn_password"] {
        std::fs::write(folder.path().join(secret), format!("a-{secret}-that-is-long-enough\n")).expect("written");
    }
    let here = format!("{}/", folder.path().display());
    let chart = block(&read("config/packaging/helm/antiphon/values.yaml"), "config");
    for (name, text, secrets) in [
        ("chart.toml", chart, "/etc/antiphon/secrets/"),
        ("compose.toml", read("config/packaging/compose/gateway.toml"), "/run/secrets/"),
    ] {
        assert!(text.contains(secrets), "{name}: {text}");
        let file = folder.path().join(name);
        std::fs::write(&file, text.replace(secrets, &here)).expect("written");
        let checked = run(env!("CARGO_BIN_EXE_antiphon"), &["check", "-c", &file.to_string_lossy()]);
        let checked = checked.expect("it was built");
        assert!(checked.status.success(), "{name}: {}", text_of(&checked));
    }
    let chart = "config/packaging/helm/antiphon";
    let Some(linted) = run("helm", &["lint", "--strict", chart]) else { return };
    assert!(linted.status.success(), "{}", text_of(&linted));
    let with = [
        "keda.enabled=true",
        "podMonitor.enabled=true",
        "podMonitor.labels.release=prometheus",
        "state.storageClass=fast",
        "resources.limits.nvidia\\.com/gpu=1",
        "environment.ANTIPHON_LOG__LEVEL=debug",
        "secretFiles.carrier=open-sesame",
        "drain.bridgedS=600",
    ];
    let made = run("helm", &["template", "voice", chart, "--set", &with.join(",")]).expect("it was there");
    let made = text_of(&made);
    for kind in ["Secret", "ConfigMap", "PodMonitor", "Service", "StatefulSet", "PodDisruptionBudget", "ScaledObject"] {
        assert_eq!(made.lines().filter(|line| *line == format!("kind: {kind}")).count(), 1, "{kind}: {made}");
    }
    for part in ["nvidia.com/gpu: 1", "storageClassName: fast", "path: /readyz", "readOnlyRootFilesystem: true"] {
        assert!(made.contains(part), "{part}: {made}");
    }
    // What is mounted is made by the chart, with every file that the configuration names, and what scrapes has one of them.
    let mounted = |made: &str| {
        let named = made.split("secretName: ").nth(1).expect("a Secret is mounted");
        named.split([',', ' ', '}']).next().expect("by name").to_owned()
    };
    let secret = made.split("---").find(|part| part.contains("kind: Secret")).expect("a Secret");
    assert!(secret.contains(&format!("name: {}", mounted(&made))), "{secret}");
    let named = read("config/packaging/helm/antiphon/values.yaml");
    let named = named.lines().filter_map(|line| line.split("/etc/antiphon/secrets/").nth(1)?.split('"').next());
    for file in named.chain(["carrier"]) {
        let value = secret.lines().find_map(|line| line.trim().strip_prefix(&format!("{file}: ")));
        assert!(value.is_some_and(|value| value.len() >= 12), "{file}: {secret}");
    }
    let scraped = format!("authorization: {{ credentials: {{ name: {}, key: metrics }} }}", mounted(&made));
    for part in
        [&scraped, "release: prometheus", "name: ANTIPHON_LOG__LEVEL, value: \"debug\"", "GracePeriodSeconds: 635"]
    {
        assert!(made.contains(part), "{part}: {made}");
    }
    // Or it is somebody's own, and none is made.
    let theirs = run("helm", &["template", "voice", chart, "--set", "secret=ours"]).expect("it was there");
    let theirs = text_of(&theirs);
    assert!(mounted(&theirs) == "ours" && !theirs.contains("kind: Secret"), "{theirs}");
    scales_on_calls_and_on_slack(&made, folder.path());
}

/// That the queries of the chart's triggers ask for as many pods as there should be.
fn scales_on_calls_and_on_slack(made: &str, folder: &Path) {
    let queries: Vec<&str> = made.lines().filter_map(|line| line.trim().strip_prefix("query: ")).collect();
    assert_eq!(queries.len(), 2, "{made}");
    let rules =
        queries.iter().zip(["calls", "slack"]).map(|(query, name)| format!("  - record: {name}\n    expr: {query}\n"));
    let rules: String = ["groups:\n- name: scaling\n  rules:\n".to_owned()].into_iter().chain(rules).collect();
    std::fs::write(folder.join("scaling.yml"), rules).expect("written");
    // Three pods, of which one falls behind after a minute; a pod of another release is none of theirs.
    let tests = "
rule_files: [scaling.yml]
evaluation_interval: 1m
tests:
- interval: 1m
  input_series:
  - { series: 'antiphon_calls{pod=\"voice-0\"}', values: '40 40' }
  - { series: 'antiphon_calls{pod=\"voice-1\"}', values: '60 60' }
  - { series: 'antiphon_calls{pod=\"voice-2\"}', values: '0 0' }
  - { series: 'antiphon_calls{pod=\"other-0\"}', values: '9 9' }
  - { series: 'antiphon_slack_seconds{pod=\"voice-0\",device=\"0\"}', values: '4 0.2' }
  - { series: 'antiphon_slack_seconds{pod=\"voice-0\",device=\"1\"}', values: '4 0.1' }
  - { series: 'antiphon_slack_seconds{pod=\"voice-1\",device=\"0\"}', values: '3 3' }
  - { series: 'antiphon_slack_seconds{pod=\"other-0\",device=\"0\"}', values: '0 0' }
  promql_expr_test:
  - { expr: calls, eval_time: 0m, exp_samples: [{ labels: calls, value: 100 }] }
  - { expr: slack, eval_time: 0m, exp_samples: [{ labels: slack, value: 0 }] }
  - { expr: slack, eval_time: 1m, exp_samples: [{ labels: slack, value: 4 }] }
";
    let file = folder.join("scaling.test.yml");
    std::fs::write(&file, tests).expect("written");
    if let Some(tested) = run("promtool", &["test", "rules", &file.to_string_lossy()]) {
        assert!(tested.status.success(), "{}", text_of(&tested));
    }
}

/// Every panel of the dashboard, from a gateway under load: what the script of the project draws, and refuses.
#[test]
fn the_dashboard_is_drawn_from_a_real_run() {
    let (folder, script) = (tempfile::tempdir().expect("a folder"), root("config/packaging/grafana/render"));
    let nothing =
        run(&script.to_string_lossy(), &["--from", "/no/such/folder", "x.png"]).expect("a script of the project");
    assert_eq!(nothing.status.code(), Some(69), "{}", text_of(&nothing));
    let there = ["prometheus", "chromium"].into_iter().all(|name| antiphon_skip::has_program(name, name));
    let programs = Path::new(env!("CARGO_BIN_EXE_antiphon")).parent().expect("a folder");
    if !there {
        return;
    }
    if !programs.join("antiphon-loadgen").exists() {
        return antiphon_skip::skip("antiphon-loadgen", "it is built with the whole workspace only");
    }
    let picture = folder.path().join("dashboard.png");
    let (from, out) = (programs.to_string_lossy().into_owned(), picture.to_string_lossy().into_owned());
    let drawn = run(&script.to_string_lossy(), &["--from", &from, "--seconds", "15", "--calls", "4", &out]);
    let drawn = drawn.expect("a script of the project");
    assert!(drawn.status.success(), "{}", text_of(&drawn));
    assert!(std::fs::metadata(picture).expect("drawn").len() > 50_000, "{}", text_of(&drawn));
}

#[test]
fn systemd_takes_every_line_of_the_unit() {
    let unit = std::fs::read_to_string(root("config/packaging/systemd/antiphon.service")).expect("readable");
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("antiphon.service");
    // The program is not installed here; everything else is judged as it is.
    std::fs::write(&path, unit.replace("/usr/bin/antiphon", "/bin/true")).expect("written");
    if let Some(verified) = run("systemd-analyze", &["verify", &path.to_string_lossy()]) {
        assert!(verified.status.success(), "{}", text_of(&verified));
        assert!(!text_of(&verified).contains("antiphon.service"), "{}", text_of(&verified));
    }
}

#[test]
fn each_alert_fires_for_what_it_means_and_for_nothing_else() {
    if let Some(tested) = run("promtool", &["test", "rules", "config/alerts.test.yml"]) {
        assert!(tested.status.success(), "{}", text_of(&tested));
    }
    let rules = std::fs::read_to_string(root("config/alerts.yml")).expect("readable");
    let tests = std::fs::read_to_string(root("config/alerts.test.yml")).expect("readable");
    for alert in rules.lines().filter_map(|line| line.trim().strip_prefix("- alert: ")) {
        assert!(tests.contains(&format!("alertname: {alert}")), "{alert} has no test");
        let handbook = std::fs::read_to_string(root("config/packaging/HANDBOOK.md")).expect("readable");
        assert!(handbook.contains(&format!("`{alert}`")), "the handbook does not say what to do about {alert}");
    }
}
