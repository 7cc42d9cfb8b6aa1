//! Every command of the program, run as one; what they compute has tests of its own.

use std::collections::BTreeSet;
use std::io::Write as _;
use std::path::Path;

use antiphon::recording::{Key, Sealer};
use antiphon::secret::Secret;
use antiphon::voice::bench::{speech, wav as recording};
use antiphon::voice::random::{self, CamPlusSize, TokenizerSize};
use antiphon_loadgen::{correlate, wav};

use super::program::{Serve, antiphon, succeeds};
use super::support::PATIENCE;

/// Each command, and the test of this suite that runs it to success.
const COMMANDS: &[(&str, &str)] = &[
    ("serve", "every_route_succeeds_and_every_metric_tells"),
    ("demo", "demo_has_both_callers_hear_the_text"),
    ("say", "say_speaks_into_files_of_every_format"),
    ("check", "check_names_the_line_of_a_mistake"),
    ("text", "text_prints_how_a_text_is_said"),
    ("top", "top_shows_a_running_gateway"),
    ("model convert", "a_checkpoint_of_ctranslate2_is_converted_to_the_bit"),
    ("model pull", "model_pull_fetches_from_a_hub"),
    ("model verify", "models_are_invented_verified_and_tested"),
    ("model random", "models_are_invented_verified_and_tested"),
    ("model selftest", "models_are_invented_verified_and_tested"),
    ("model transcribe", "models_are_invented_verified_and_tested"),
    ("voice add", "voices_are_added_listed_and_removed"),
    ("voice list", "voices_are_added_listed_and_removed"),
    ("voice rm", "voices_are_added_listed_and_removed"),
    ("recording decrypt", "recordings_are_decrypted_with_their_key"),
    ("bench", "bench_measures"),
    ("worker", "a_gateway_speaks_through_a_worker_of_another_process"),
    ("completions", "completions_and_manual_pages_name_every_command"),
    ("man", "completions_and_manual_pages_name_every_command"),
    ("doctor", "doctor_says_what_is_there_and_what_is_wrong"),
];

/// The commands that `help` lists.
async fn listed(folder: &Path, command: &[&str]) -> Vec<String> {
    let help = succeeds(folder, &[command, &["--help"]].concat()).await;
    let mut names = Vec::new();
    for line in help.lines().skip_while(|line| *line != "Commands:").skip(1).take_while(|line| !line.is_empty()) {
        // Deeper lines go on with a description.
        if let Some(name) = line.strip_prefix("  ").filter(|rest| !rest.starts_with(' ')) {
            names.extend(name.split_whitespace().next().filter(|name| *name != "help").map(str::to_owned));
        }
    }
    names
}

#[tokio::test]
async fn every_command_is_run_by_a_test() {
    let folder = tempfile::tempdir().expect("a folder");
    let mut all = BTreeSet::new();
    for name in listed(folder.path(), &[]).await {
        let below = listed(folder.path(), &[&name]).await;
        if below.is_empty() {
            all.insert(name);
        } else {
            all.extend(below.into_iter().map(|inner| format!("{name} {inner}")));
        }
    }
    let told: BTreeSet<String> = COMMANDS.iter().map(|(name, _)| (*name).to_owned()).collect();
    assert_eq!(told, all, "COMMANDS beside this test names who runs each command");
    let suite = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests");
    let sources: String =
        ["gateway/commands.rs", "gateway/converted.rs", "gateway/tour.rs", "cosyvoice/pull.rs", "gateway/workers.rs"]
            .map(|file| std::fs::read_to_string(suite.join(file)).expect("readable"))
            .concat();
    for (name, test) in COMMANDS {
        assert!(sources.contains(&format!("fn {test}(")), "{name}: there is no test {test}");
    }
}

#[tokio::test]
async fn say_speaks_into_files_of_every_format() {
    let folder = tempfile::tempdir().expect("a folder");
    let text = "The quick brown fox jumps over the lazy dog.";
    let made = antiphon(folder.path(), &["say", text, "-o", "a.wav"]).await;
    let said = String::from_utf8_lossy(&made.stderr).into_owned();
    assert!(made.status.success() && made.stdout.is_empty(), "{said}");
    // Which file, how much, how fast; and no more of a bar than that.
    let last = said.lines().last().unwrap_or_default();
    assert!(last.starts_with("a.wav: ") && last.contains(" s of speech in ") && !said.contains('\u{1b}'), "{said}");
    let spoken = wav::read(folder.path().join("a.wav")).expect("a sound file");
    assert!((1.5..6.0).contains(&spoken.duration().as_secs_f64()), "{:?}", spoken.duration());
    for (name, magic) in [("b.flac", &b"fLaC"[..]), ("b.opus", b"OggS"), ("b.pcm", b"")] {
        succeeds(folder.path(), &["say", text, "-o", name]).await;
        let bytes = std::fs::read(folder.path().join(name)).expect("written");
        assert!(bytes.starts_with(magic), "{name}");
        if !magic.is_empty() {
            let sound = antiphon::voice::decode::decode(bytes).unwrap_or_else(|error| panic!("{name}: {error}"));
            let clip = antiphon_loadgen::heard::Clip { rate: sound.rate, pcm: sound.samples };
            let found = correlate::correlate(&clip, &spoken).expect("comparable rates");
            assert!(found.value > 0.9, "{name}: {found:?}");
        } else {
            assert_eq!(bytes.len(), 2 * spoken.pcm.len(), "{name}");
        }
    }
    let nothing = antiphon(folder.path(), &["say", " ", "-o", "c.wav"]).await;
    assert_eq!(nothing.status.code(), Some(1));
    let unknown = antiphon(folder.path(), &["say", text, "-o", "c.mp3"]).await;
    assert!(String::from_utf8_lossy(&unknown.stderr).contains("`mp3` is not known"));
}

/// What `antiphon` with these arguments, a line of the shell, writes to a terminal of its own.
async fn on_a_terminal(folder: &Path, line: &str) -> String {
    let program = format!("{} {line}", env!("CARGO_BIN_EXE_antiphon"));
    let output = tokio::process::Command::new("script")
        .args(["--quiet", "--return", "--command", &program, "/dev/null"])
        .current_dir(folder)
        .env("XDG_STATE_HOME", folder)
        .stdin(std::process::Stdio::null())
        .kill_on_drop(true)
        .output();
    let output = tokio::time::timeout(PATIENCE, output).await.expect("it ends").expect("it runs");
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{said}");
    said
}

#[tokio::test]
async fn on_a_terminal_say_shows_share_rate_and_what_is_left() {
    if !antiphon_skip::has_program("script", "bsdutils") {
        return;
    }
    let folder = tempfile::tempdir().expect("a folder");
    let text = "The quick brown fox jumps over the lazy dog. ".repeat(80);
    let said = on_a_terminal(folder.path(), &format!("say '{text}' -o a.wav")).await;
    let shares: Vec<u32> =
        said.split(" %, ").filter_map(|before| before.rsplit(' ').next()?.trim().parse().ok()).collect();
    assert!(shares.iter().any(|share| (1..=99).contains(share)), "{said}");
    assert!(shares.windows(2).all(|two| two[0] <= two[1]), "{shares:?}");
    assert!(
        said.contains(" s of speech, ") && said.contains(" times as fast as it is heard, ") && said.contains(" left")
    );
    assert!(said.trim_end().lines().last().is_some_and(|line| line.contains("a.wav: ")), "{said}");
}

#[tokio::test]
async fn check_names_the_line_of_a_mistake() {
    let folder = tempfile::tempdir().expect("a folder");
    let shipped = Path::new(env!("CARGO_MANIFEST_DIR")).join("config/gateway.toml");
    succeeds(folder.path(), &["check", "-c", shipped.to_str().expect("a path")]).await;
    std::fs::write(folder.path().join("wrong.toml"), "[call]\nmax_cals = 5\n").expect("written");
    let wrong = antiphon(folder.path(), &["check", "-c", "wrong.toml"]).await;
    let said = String::from_utf8_lossy(&wrong.stderr).into_owned();
    assert_eq!(wrong.status.code(), Some(64), "{said}");
    assert!(said.contains("wrong.toml:2") && said.contains("max_calls"), "{said}");
    assert!(!said.contains("setup_timeout_s"), "one name is near, the others are not listed: {said}");
    // A mistake that takes two keys to see has its line, too.
    std::fs::write(
        folder.path().join("ports.toml"),
        "[log]\nlevel = \"info\"\n\n[rtp]\nport_min = 3000\nport_max = 2000\n",
    )
    .expect("written");
    let ports = antiphon(folder.path(), &["check", "ports.toml"]).await;
    let said = String::from_utf8_lossy(&ports.stderr).into_owned();
    assert_eq!(ports.status.code(), Some(64), "{said}");
    assert!(said.contains("ports.toml:5") && said.contains("port_max"), "{said}");
    succeeds(folder.path(), &["check", shipped.to_str().expect("a path")]).await;
}

/// What people get wrong on the command line is answered with what to type instead, and nothing is done.
#[tokio::test]
async fn each_usual_mistake_is_answered_with_an_example() {
    let folder = tempfile::tempdir().expect("a folder");
    std::fs::create_dir(folder.path().join("empty")).expect("a folder");
    std::fs::write(folder.path().join("note.txt"), "A note.").expect("written");
    std::fs::write(folder.path().join("type.toml"), "[call]\nmax_calls = \"many\"\n").expect("written");
    for (command, example) in [
        ("say Hi -o a.mp3", "`-o speech.flac`"),
        ("say Hi -o nowhere/a.wav", "`mkdir -p nowhere`"),
        ("say Hi --speed 100 -o a.wav", "for example 1.2"),
        ("say Hi --lang x_y -o a.wav", "for example de or en-GB"),
        ("say Hi --device gpu -o a.wav", "for example cuda:0"),
        ("say Hi --engine cosyvoice3 -o a.wav", "`antiphon model pull`"),
        ("text Hi --lang x_y", "for example de or en-GB"),
        ("serve -c nowhere.toml", "/etc/antiphon/gateway.toml"),
        ("check type.toml", "for example `max_calls = 1000`"),
        ("demo --out note.txt/demo", "name another place, for example"),
        ("voice add anna --wav note.txt --text x", "`antiphon model pull`"),
        ("voice rm nobody", "`antiphon voice list`"),
        ("model verify empty", "`antiphon model pull --dir empty`"),
        ("model verify nowhere", "`antiphon model pull --dir nowhere`"),
        ("model random note.txt", "`antiphon model random random-model`"),
        ("model pull --dir note.txt", "`antiphon model pull --dir"),
        ("model selftest empty", "`antiphon model selftest tests/data/golden/cosyvoice3`"),
        ("model transcribe empty note.txt", "`antiphon model pull openai/whisper-tiny.en`"),
        ("model convert empty out", "`antiphon model convert faster-whisper-tiny.en whisper-tiny.en`"),
        ("top --url nonsense", "for example http://127.0.0.1:8080"),
        ("top --interval 0", "for example 2"),
        ("worker --listen nonsense", "for example 127.0.0.1:7070"),
        ("bench --engine cosyvoice3", "`antiphon model pull`"),
        ("bench --device gpu", "for example cuda:0"),
        ("demo --engine cosyvoice3 --out heard", "`antiphon model pull`"),
    ] {
        let words: Vec<&str> = command.split(' ').collect();
        let wrong = antiphon(folder.path(), &words).await;
        let said = String::from_utf8_lossy(&[wrong.stdout, wrong.stderr].concat()).into_owned();
        assert!(!wrong.status.success() && said.contains(example), "{command}: {said}");
    }
    let left: Vec<_> = std::fs::read_dir(folder.path()).expect("readable").flatten().map(|e| e.file_name()).collect();
    let known = |name: &std::ffi::OsString| ["empty", "note.txt", "type.toml"].iter().any(|known| name == known);
    assert!(left.iter().all(known), "{left:?}");
}

/// Answers every OPTIONS.
async fn telephone() -> (std::net::SocketAddr, tokio::task::JoinHandle<()>) {
    let socket = tokio::net::UdpSocket::bind("127.0.0.1:0").await.expect("binds");
    let at = socket.local_addr().expect("bound");
    let answering = tokio::spawn(async move {
        let mut buffer = [0; 4_096];
        loop {
            let (length, from) = socket.recv_from(&mut buffer).await.expect("receives");
            let request = String::from_utf8_lossy(&buffer[..length]).into_owned();
            let kept = ["Via", "From", "To", "Call-ID", "CSeq"];
            let lines = request.split("\r\n").filter(|line| kept.contains(&line.split(':').next().unwrap_or_default()));
            // Whoever answers for good names itself by a tag (RFC 3261 section 8.2.6.2).
            let tagged =
                |line: &str| if line.starts_with("To:") { format!("{line};tag=1\r\n") } else { format!("{line}\r\n") };
            let lines: String = lines.map(tagged).collect();
            let answer = format!("SIP/2.0 200 OK\r\n{lines}Content-Length: 0\r\n\r\n");
            socket.send_to(answer.as_bytes(), from).await.expect("sends");
        }
    });
    (at, answering)
}

#[tokio::test]
async fn check_explains_a_call_and_asks_the_hosts_of_trunks() {
    let folder = tempfile::tempdir().expect("a folder");
    let (at, answering) = telephone().await;
    let trunk = format!(
        "[sip]\nudp = \"127.0.0.1:0\"\n[[sip.trunk]]\nname = \"carrier\"\nhost = \"{at}\"\nprefixes = [\"+49\"]\n\
         codecs = [\"pcma\"]\nnumbers = {{ country = \"49\" }}\n"
    );
    std::fs::write(folder.path().join("a.toml"), trunk).expect("written");
    let said = succeeds(folder.path(), &["check", "-c", "a.toml", "--call", "030555", "0301234", "--sip"]).await;
    for part in [&format!("INVITE     sip:+49301234@{at}"), "sip:+4930555@", "pcma", "carrier", "answers OPTIONS"] {
        assert!(said.contains(part), "{part}: {said}");
    }
    let refused = antiphon(folder.path(), &["check", "-c", "a.toml", "--call", "", "+8812"]).await;
    let why = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(refused.status.code() == Some(1) && why.contains("`prefixes`"), "{why}");
    answering.abort();
    let _ = answering.await;
    let gone = antiphon(folder.path(), &["check", "-c", "a.toml", "--sip"]).await;
    assert_eq!(gone.status.code(), Some(69), "{}", String::from_utf8_lossy(&gone.stderr));
}

#[tokio::test]
async fn models_are_invented_verified_and_tested() {
    let folder = tempfile::tempdir().expect("a folder");
    succeeds(folder.path(), &["model", "random", "tiny", "--seed", "3"]).await;
    succeeds(folder.path(), &["model", "verify", "tiny"]).await;
    let kit = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/golden/cosyvoice3");
    let report = succeeds(folder.path(), &["model", "selftest", kit.to_str().expect("a path")]).await;
    assert!(report.contains("e2e"), "{report}");
    std::fs::write(folder.path().join("tiny/flow.pt"), b"PK\x03\x04 no weights").expect("written");
    let broken = antiphon(folder.path(), &["model", "verify", "tiny"]).await;
    assert_eq!(broken.status.code(), Some(1));
    let said = String::from_utf8_lossy(&[broken.stdout, broken.stderr].concat()).into_owned();
    assert!(said.contains("flow.pt"), "{said}");
    let kit = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/whisper");
    let (model, sound) = (kit.display().to_string(), kit.join("audio.wav").display().to_string());
    let heard = succeeds(folder.path(), &["model", "transcribe", &model, &sound]).await;
    assert!(heard.lines().any(|line| line.starts_with(&format!("{sound}: "))), "{heard}");
    let both = antiphon(folder.path(), &["model", "transcribe", &model, "tiny/flow.pt", &sound]).await;
    assert_eq!(both.status.code(), Some(1));
    let (said, told) = (String::from_utf8_lossy(&both.stdout), String::from_utf8_lossy(&both.stderr));
    assert!(said.contains(&sound) && told.contains("flow.pt"), "the others are heard: {said}{told}");
}

#[tokio::test]
async fn voices_are_added_listed_and_removed() {
    let folder = tempfile::tempdir().expect("a folder");
    random::write_campplus(folder.path(), &CamPlusSize::tiny(), 1).expect("written");
    random::write_tokenizer(folder.path(), &TokenizerSize::tiny(6), 2).expect("written");
    std::fs::write(folder.path().join("anna.wav"), recording(&speech(5))).expect("written");
    let text = "This is about as much as one says in five seconds, give or take a word.";
    let model = ["--model", ".", "--voices", "voices"];
    succeeds(folder.path(), &[&["voice", "add", "anna", "--wav", "anna.wav", "--text", text][..], &model].concat())
        .await;
    assert!(succeeds(folder.path(), &["voice", "list", "--voices", "voices"]).await.contains("anna"));
    succeeds(folder.path(), &["voice", "rm", "anna", "--voices", "voices"]).await;
    assert!(!succeeds(folder.path(), &["voice", "list", "--voices", "voices"]).await.contains("anna"));
    assert_eq!(antiphon(folder.path(), &["voice", "rm", "anna", "--voices", "voices"]).await.status.code(), Some(1));
}

#[tokio::test]
async fn recordings_are_decrypted_with_their_key() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = |name: &str| folder.path().join(name);
    let digits = "0f".repeat(32);
    std::fs::write(path("key"), format!("{digits}\n")).expect("written");
    std::fs::write(path("gateway.toml"), "[recording]\nkey = { file = \"key\" }\n").expect("written");
    let key = Key::parse(&Secret::new(digits)).expect("64 digits");
    let mut sealer = Sealer::new(Vec::new(), &key).expect("memory");
    sealer.write_all(b"OggS and what follows").and_then(|()| sealer.flush()).expect("memory");
    let whole = sealer.finish().expect("memory");
    std::fs::write(path("a.opus.enc"), &whole).expect("written");
    std::fs::write(path("b.opus.enc"), &whole[..whole.len() - 20]).expect("written");
    succeeds(folder.path(), &["recording", "decrypt", "a.opus.enc", "--config", "gateway.toml"]).await;
    assert_eq!(std::fs::read(path("a.opus")).expect("written"), b"OggS and what follows");
    let cut = ["recording", "decrypt", "b.opus.enc", "--key-file", "key", "--out", "b"];
    let refused = antiphon(folder.path(), &cut).await;
    assert_eq!(refused.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&refused.stderr).contains("--partial"), "{refused:?}");
    succeeds(folder.path(), &[&cut[..], &["--partial"]].concat()).await;
    assert_eq!(std::fs::read(path("b")).expect("written"), b"OggS and what follows");
}

#[tokio::test]
async fn bench_measures() {
    let folder = tempfile::tempdir().expect("a folder");
    let file = |name: &str| -> serde_json::Value {
        let text = std::fs::read_to_string(folder.path().join(name)).expect("written");
        serde_json::from_str(&text).expect("JSON")
    };
    let level = ["--engine", "tone", "--concurrency", "2", "--seconds", "2", "--json", "engine.json"];
    succeeds(folder.path(), &[&["bench"][..], &level].concat()).await;
    let report = file("engine.json");
    assert_eq!(report["levels"][0]["listeners"], 2, "{report}");
    let rates = ["--engine", "tone", "--turn-rates", "4,8", "--seconds", "2", "--text", "Yes.", "--json", "rates.json"];
    succeeds(folder.path(), &[&["bench"][..], &rates].concat()).await;
    let report = file("rates.json");
    let turns = |n: usize| report["rates"][n]["turns"].as_u64();
    assert!(turns(0).is_some() && turns(1) > Some(0) && report["rates"][1]["firstP95Ms"].is_f64(), "{report}");
    assert!(!antiphon(folder.path(), &["bench", "--turn-rates", "0"]).await.status.success());
    succeeds(folder.path(), &["bench", "--departures", "2", "--seconds", "1", "--json", "pacing.json"]).await;
    let report = file("pacing.json");
    assert!(report["departures"]["rows"][0]["packets"].as_u64() > Some(10), "{report}");
    succeeds(folder.path(), &["bench", "--codecs", "--json", "codecs.json"]).await;
    let report = file("codecs.json");
    assert!(report["codecs"].as_array().is_some_and(|rows| rows.len() >= 8), "{report}");
}

#[tokio::test]
async fn doctor_says_what_is_there_and_what_is_wrong() {
    let folder = tempfile::tempdir().expect("a folder");
    std::fs::write(folder.path().join("tone.toml"), "[engine]\nkind = \"tone\"\n").expect("written");
    let looked = antiphon(folder.path(), &["doctor", "--json", "--seconds", "0", "--cards", "-c", "tone.toml"]).await;
    let found: serde_json::Value = serde_json::from_slice(&looked.stdout).expect("JSON");
    assert!(found["defaultVoice"]["cores"].as_u64() > Some(0), "{found}");
    assert!(found["cards"].as_array().is_some_and(|cards| cards.len() >= 7), "{found}");
    std::fs::write(folder.path().join("gone.toml"), "[engine]\nmodel = \"nowhere\"\ndevice = \"cuda:99\"\n")
        .expect("written");
    let wrong = antiphon(folder.path(), &["doctor", "--seconds", "0", "-c", "gone.toml"]).await;
    let said = String::from_utf8_lossy(&wrong.stdout).into_owned();
    assert_eq!(wrong.status.code(), Some(1), "{said}");
    assert!(said.contains("cuda:99") && said.contains("nowhere"), "{said}");
}

#[tokio::test]
async fn demo_has_both_callers_hear_the_text() {
    let folder = tempfile::tempdir().expect("a folder");
    let table = succeeds(folder.path(), &["demo", "--out", "out", "--text", "This is said on both calls."]).await;
    for leg in ["sip", "webrtc"] {
        assert!(table.lines().any(|line| line.starts_with(leg)), "{table}");
        let heard = wav::read(folder.path().join(format!("out/{leg}.wav"))).expect("a recording");
        assert!(heard.duration().as_secs_f64() > 1.0, "{leg}: {:?}", heard.duration());
    }
}

#[tokio::test]
async fn top_shows_a_running_gateway() {
    let folder = tempfile::tempdir().expect("a folder");
    let program = Serve::start(folder.path(), folder.path(), |command| {
        command.env("ANTIPHON_SIP__UDP", "off").env("ANTIPHON_ENGINE__KIND", "tone");
    });
    program.ready().await;
    let shown = succeeds(folder.path(), &["top", "--once", "--url", &program.http]).await;
    assert!(shown.contains("antiphon: ready") && shown.contains("calls 0"), "{shown}");
    let nobody = antiphon(folder.path(), &["top", "--once", "--url", "http://127.0.0.1:9"]).await;
    assert_eq!(nobody.status.code(), Some(69));
}

#[tokio::test]
async fn text_prints_how_a_text_is_said() {
    let folder = tempfile::tempdir().expect("a folder");
    let said = succeeds(folder.path(), &["text", "I have 3 cats."]).await;
    assert_eq!(said, "I have three cats.\n");
    assert!(succeeds(folder.path(), &["text", "--lang", "de", "Ich habe 3 Katzen."]).await.contains("drei"));
    let told = succeeds(folder.path(), &["text", "--json", "I have 3 cats."]).await;
    serde_json::from_str::<serde_json::Value>(&told).expect("JSON");
}

#[tokio::test]
async fn completions_and_manual_pages_name_every_command() {
    let folder = tempfile::tempdir().expect("a folder");
    for shell in ["bash", "zsh", "fish"] {
        let script = succeeds(folder.path(), &["completions", shell]).await;
        assert!(script.contains("completions") && script.contains("bench"), "{shell}");
    }
    let page = succeeds(folder.path(), &["man"]).await;
    assert!(page.contains(".TH antiphon") && page.contains("completions"), "{page}");
    succeeds(folder.path(), &["man", "--dir", "man"]).await;
    for name in ["antiphon.1", "antiphon-serve.1", "antiphon-model-pull.1"] {
        assert!(folder.path().join("man").join(name).is_file(), "{name}");
    }
}

/// `antiphon ... | head`: the reader goes, and nothing is said about it.
#[tokio::test]
async fn a_closed_pipe_is_no_error() {
    let folder = tempfile::tempdir().expect("a folder");
    let program = env!("CARGO_BIN_EXE_antiphon");
    for command in ["check --schema", "completions bash", "man", "text 'It is 5.'", "say --engine tone Hello."] {
        // The reader is gone before the first byte.
        let line = format!("(sleep 0.2; '{program}' {command}; echo \"status $?\" >&2) 2>said | true");
        let status = tokio::process::Command::new("bash")
            .args(["-c", &line])
            .current_dir(folder.path())
            .status()
            .await
            .expect("bash runs");
        assert!(status.success());
        let said = std::fs::read_to_string(folder.path().join("said")).expect("written");
        // It says which voice speaks, and why, before it does.
        let said = said.strip_prefix("[engine] kind = \"tone\"\n").unwrap_or(&said);
        assert_eq!(said, "status 0\n", "{command}");
    }
}
