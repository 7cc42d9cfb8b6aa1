//! Files, variables and mistakes.

use sha2::{Digest as _, Sha256};

use super::*;
use crate::server::config::Scope;

fn load(text: &str, variables: &[(&str, &str)]) -> Result<Config, ConfigError> {
    let dir = tempfile::tempdir().expect("temp dir");
    let path = dir.path().join("c.toml");
    std::fs::write(&path, text).expect("write");
    Config::load(Some(&path), variables.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())))
}

#[test]
fn an_unknown_key_is_named_with_its_line_and_the_nearest_name() {
    let error = load("[http]\nbind = \"127.0.0.1:1\"\n\n[engine]\nmodle = \"x\"\n", &[]).expect_err("unknown key");
    assert!(error.origin.ends_with("c.toml:5:1"), "{error}");
    assert!(error.message.contains("did you mean `model`"), "{error}");
}

#[test]
fn a_name_that_is_like_none_is_told_the_nearest_and_not_all() {
    let error = load("[call]\nxyzzy = 1\n", &[]).expect_err("unknown key");
    assert!(error.origin.ends_with("c.toml:2:1"), "{error}");
    assert!(
        error.message.contains("the nearest of")
            && error.message.matches('`').count() == 2 + 2 * super::explain::LISTED,
        "{error}"
    );
    // Where there are few they are all told.
    let error = load("[engine]\nkind = \"xyzzy\"\n", &[]).expect_err("unknown kind");
    assert!(error.message.contains("`cosyvoice3`") && error.message.contains("`tone`"), "{error}");
}

#[test]
fn a_value_of_the_wrong_type_is_told_with_the_default_for_an_example() {
    for (text, told) in [
        ("[call]\nmax_calls = \"many\"\n", "expected a whole number, for example `max_calls = 1000`"),
        ("[http]\nbind = 5\n", "for example `bind = \"127.0.0.1:8080\"`"),
        ("[call.vad]\noffset_ms = []\n", "for example `offset_ms = "),
        ("[[sip.trunk]]\nname = \"t\"\nhost = 7\n", "for example `host = "),
    ] {
        let error = load(text, &[]).expect_err(text);
        assert!(error.message.contains(told), "{text}: {error}");
    }
}

#[test]
fn a_mistake_across_sections_is_told_with_its_line() {
    let hook = "url = \"https://a.example/\"\nsecret = \"s\"\nevents = [\"ended\"]";
    for (text, line) in [
        (format!("[webhook.w]\n{hook}\ntenant = \"nobody\"\n"), 5),
        ("[cluster]\n\n[engine]\nkind = \"tone\"\nworkers = [\"10.0.0.1:7070\"]\n".to_owned(), 5),
        ("[engine]\nkind = \"cosyvoice3\"\n".to_owned(), 2),
        ("[engine]\ndtype = \"f32\"\nkv = \"int8\"\n".to_owned(), 3),
        ("[engine]\ndtype = \"f32\"\n\nproducts = \"fp8\"\n".to_owned(), 4),
        ("[engine]\ninvariant = true\nproducts = \"fp8\"\n".to_owned(), 3),
    ] {
        let error = load(&text, &[]).expect_err(&text);
        let at = error.origin.split(".toml:").nth(1).and_then(|at| at.split(':').next()?.parse::<usize>().ok());
        assert_eq!(at, Some(line), "{text}: {error}");
    }
}

#[test]
fn the_environment_overrides_the_file() {
    let config = load("[http]\nbind = \"127.0.0.1:1\"\n", &[("ANTIPHON_HTTP__BIND", "127.0.0.1:2")]).expect("valid");
    assert_eq!(config.http.bind.port(), 2);
}

#[test]
fn a_bad_variable_is_named() {
    let error = load("", &[("ANTIPHON_HTTP__BNID", "127.0.0.1:2")]).expect_err("unknown key");
    assert!(error.origin.contains("ANTIPHON_HTTP__BNID"), "{error}");
    assert!(error.message.contains("did you mean `bind`"), "{error}");
}

#[test]
fn a_section_whose_keys_need_each_other_comes_whole_from_the_environment() {
    let tls = [
        ("ANTIPHON_SIP__TLS__BIND", "127.0.0.1:5061"),
        ("ANTIPHON_SIP__TLS__CERT", "c.pem"),
        ("ANTIPHON_SIP__TLS__KEY", "k.pem"),
    ];
    let config = load("", &tls).expect("valid");
    assert_eq!(config.sip.tls.map(|tls| tls.bind.port()), Some(5061));
    let error = load("", &tls[..2]).expect_err("one is missing");
    assert!(error.origin.contains("ANTIPHON_SIP__TLS__BIND") && error.message.contains("`key`"), "{error}");
    let error = load("", &[("ANTIPHON_HTTP__BNID", "x"), tls[0], tls[1], tls[2]]).expect_err("unknown key");
    assert!(error.origin.contains("ANTIPHON_HTTP__BNID"), "{error}");
}

#[test]
fn tokens_may_be_strings_or_tables() {
    let (plain, named) = ("a-token-of-its-own", "another-of-its-own");
    let text = format!(
        "[http]\ntokens = [{plain:?}, {{ name = \"ops\", token = {named:?}, scopes = [\"admin\", \"metrics\"] }}]\n"
    );
    let config = load(&text, &[]).expect("valid");
    assert!(config.http.tokens[0].is(plain) && !config.http.tokens[0].is(named));
    assert!(config.http.tokens[1].is(named));
    assert_eq!(config.http.tokens[1].scopes, [Scope::Admin, Scope::Metrics]);
    let shown = format!("{config:?}");
    assert!(!shown.contains(plain) && !shown.contains(named));
}

#[test]
fn a_token_may_be_given_by_its_hash() {
    let text = "a-token-of-its-own";
    let hash = Sha256::digest(text).iter().map(|byte| format!("{byte:02x}")).collect::<String>();
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("hash");
    std::fs::write(&file, format!("{hash}\n")).expect("written");
    for given in [format!("{hash:?}"), format!("{:?}", hash.to_uppercase()), format!("{{ file = {file:?} }}")] {
        let config =
            load(&format!("[http]\ntokens = [{{ name = \"ops\", sha256 = {given}, scopes = [\"admin\"] }}]\n"), &[]);
        let tokens = config.expect("valid").http.tokens;
        assert!(tokens[0].is(text) && !tokens[0].is(&hash), "the hash itself opens nothing");
        assert_eq!((tokens[0].name.as_str(), &tokens[0].scopes[..]), ("ops", &[Scope::Admin][..]));
    }
    for (wrong, why) in [
        (format!("sha256 = {:?}", &hash[1..]), "64 hexadecimal"),
        (format!("sha256 = \"{}x\"", &hash[1..]), "64 hexadecimal"),
        ("sha256 = \"\"".to_owned(), "empty"),
        (format!("sha256 = {hash:?}, token = {text:?}"), "give one of"),
    ] {
        let error = load(&format!("[http]\ntokens = [{{ {wrong} }}]\n"), &[]).expect_err(&wrong).to_string();
        assert!(error.contains(why), "{wrong}: {error}");
    }
}

/// An empty token is what `Authorization: Bearer` without more presents.
#[test]
fn an_empty_or_short_token_is_refused_with_the_name_of_where_it_is_from() {
    let folder = tempfile::tempdir().expect("a folder");
    let empty = folder.path().join("empty");
    std::fs::write(&empty, "\n").expect("written");
    for (text, named) in [
        ("tokens = [\"\"]".to_owned(), "`tokens`"),
        ("tokens = [\"short\"]".to_owned(), "16 characters"),
        ("tokens = [{ name = \"ops\", token = \"short\" }]".to_owned(), "`ops`"),
        (
            "tokens = [{ name = \"ops\", token = { env = \"ANTIPHON_NO_SUCH_TOKEN\" } }]".to_owned(),
            "ANTIPHON_NO_SUCH_TOKEN",
        ),
        ("tokens = [{ env = \"ANTIPHON_NO_SUCH_TOKEN\" }]".to_owned(), "ANTIPHON_NO_SUCH_TOKEN"),
        (format!("tokens = [{{ file = {empty:?} }}]"), "empty"),
        ("tokens = [{ name = \"ops\" }]".to_owned(), "`token`"),
    ] {
        let error = load(&format!("[http]\n{text}\n"), &[]).expect_err(&text).to_string();
        assert!(error.contains(named), "{text}: {error}");
    }
    let error = load("", &[("ANTIPHON_HTTP__TOKENS", "[\"\"]")]).expect_err("empty").to_string();
    assert!(error.contains("ANTIPHON_HTTP__TOKENS"), "{error}");
}

#[test]
fn names_and_origins_are_checked() {
    for (text, named) in [
        ("hosts = [\"https://voice.example\"]", "hosts"),
        ("hosts = [\"*\"]", "hosts"),
        ("cors = [\"app.example\"]", "cors"),
        ("cors = [\"https://app.example/\"]", "cors"),
    ] {
        let error = load(&format!("[http]\n{text}\n"), &[]).expect_err(text).to_string();
        assert!(error.contains(named), "{text}: {error}");
    }
    load("[http]\nhosts = [\"voice.example\"]\ncors = [\"https://app.example:8443\", \"*\"]\n", &[]).expect("valid");
}

#[test]
fn an_agent_is_a_url_or_a_model() {
    let model = "llm = { base_url = \"http://127.0.0.1:1/v1\", model = \"m\" }\n";
    let config = load(&format!("[agent.x]\n{model}"), &[]).expect("valid");
    assert_eq!(config.agent["x"].llm.as_ref().map(|llm| llm.model.as_str()), Some("m"));
    for (text, why) in [
        (format!("[agent.x]\nurl = \"builtin:demo\"\n{model}"), "one of these"),
        ("[agent.x]\ngreeting = \"Hi\"\n".to_owned(), "needs `url`"),
        ("[agent.x]\nllm = { base_url = \"x\", model = \"m\" }\n".to_owned(), "[agent.x] llm: base_url"),
    ] {
        let error = load(&text, &[]).expect_err(why);
        assert!(error.message.contains(why), "{error}");
    }
}

#[test]
fn an_agent_needs_a_usable_url() {
    let error = load("[agent.x]\nurl = \"http://x\"\n", &[]).expect_err("scheme");
    assert!(error.message.contains("[agent.x]"), "{error}");
    assert!(load("[agent.x]\nurl = \"builtin:silent\"\n", &[]).is_ok());
}

/// The shipped file documents the defaults; a key that changed in the code only would mislead.
#[test]
fn the_shipped_file_is_the_defaults() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("config/gateway.toml");
    let shipped = Config::load(Some(&path), []).expect("valid");
    assert_eq!(format!("{shipped:#?}"), format!("{:#?}", Config::default()));
}

#[test]
fn what_has_no_path_of_its_own_lies_in_the_state_directory() {
    let placed = |text: &str, variables: &[(&str, &str)]| {
        let variables: Vec<(String, String)> =
            variables.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect();
        load(text, &[]).expect("valid").with_state_dir(variables)
    };
    let paths = |config: &Config| {
        let database = config.batch.database.to_string();
        let [audio, voices] = [&config.batch.audio_dir, &config.engine.voices].map(|path| path.display().to_string());
        [database, audio, voices]
    };
    let xdg = [("HOME", "/home/a"), ("XDG_STATE_HOME", "/state")];
    let there = ["batch.sqlite", "batch", "voices"];
    assert_eq!(paths(&placed("", &xdg).expect("XDG")), there.map(|name| format!("/state/antiphon/{name}")));
    let home = placed("", &xdg[..1]).expect("HOME");
    assert_eq!(paths(&home), there.map(|name| format!("/home/a/.local/state/antiphon/{name}")));
    // The specification has relative paths ignored.
    let relative = placed("", &[("HOME", "/home/a"), ("XDG_STATE_HOME", "state")]).expect("HOME");
    assert_eq!(paths(&relative), paths(&home));
    let dir = placed("[state]\ndir = \"/srv\"\n", &xdg).expect("a folder");
    assert_eq!(paths(&dir), there.map(|name| format!("/srv/{name}")));
    let text = "[state]\ndir = \"/srv\"\n[batch]\ndatabase = \"jobs.db\"\n[engine]\nvoices = \"/v\"\n";
    let explicit = placed(text, &xdg).expect("paths");
    assert_eq!(paths(&explicit), ["jobs.db", "/srv/batch", "/v"]);
    let error = placed("", &[]).expect_err("no folder");
    assert!(error.to_string().contains("set it"), "{error}");
    let all = "[batch]\ndatabase = \"a\"\naudio_dir = \"b\"\n[engine]\nvoices = \"c\"\n[records]\ndatabase = \"d\"\n";
    assert!(placed(all, &[]).is_ok(), "nothing is asked of the environment where nothing is open");
    let recording = format!("{all}[recording]\nmode = \"all\"\n");
    assert!(placed(&recording, &[]).is_err(), "sound has to lie somewhere");
    assert!(placed(&format!("{recording}dir = \"e\"\n"), &[]).is_ok());
}

#[test]
fn records_lie_in_the_state_directory_and_a_webhook_is_checked() {
    let placed = load("[state]\ndir = \"/srv\"\n", &[]).expect("valid").with_state_dir([]).expect("a folder");
    assert_eq!(placed.records.database.path(), Some(Path::new("/srv/records.sqlite")));
    let shared =
        load("[state]\ndir = \"/srv\"\n[records]\ndatabase = \"postgres://127.0.0.1/a\"\n", &[]).expect("valid");
    let shared = shared.with_state_dir([]).expect("a folder");
    assert!(shared.records.database.is_shared());
    assert_eq!(shared.records.spool, Path::new("/srv/records.spool"));
    for section in ["batch", "records"] {
        let error = load(&format!("[{section}]\nlease_s = 0\n"), &[]).expect_err("no lease");
        assert!(error.message.contains("lease_s"), "{error}");
    }
    let hook = |url: &str, secret: &str| {
        load(&format!("[records]\nkeep_days = 7\nwebhook = {{ url = \"{url}\", secret = \"{secret}\" }}\n"), &[])
    };
    let config = hook("https://crm.example.com/calls", "s3cret").expect("valid");
    assert!(!format!("{config:?}").contains("s3cret"));
    for (url, secret, why) in
        [("ftp://x", "s", "webhook.url"), ("nothing", "s", "webhook.url"), ("http://x", "", "secret")]
    {
        let error = hook(url, secret).expect_err(url);
        assert!(error.message.contains(why), "{error}");
    }
}

#[test]
fn events_of_a_webhook_are_known_ones_and_the_schema_has_them_all() {
    let hook = |keys: &str| load(&format!("[webhook.crm]\nurl = \"http://x\"\nsecret = \"s3cret\"\n{keys}"), &[]);
    let config = hook("events = [\"answered\", \"bargeInPending\"]\n").expect("valid");
    assert!(!format!("{config:?}").contains("s3cret"));
    assert_eq!((config.webhook["crm"].tries, config.webhook["crm"].queue), (5, 1_000));
    let slip = hook("events = [\"anwsered\"]\n").expect_err("a slip of the pen");
    assert!(slip.message.contains("did you mean `answered`?"), "{slip}");
    let nobody = hook("events = [\"ended\"]\ntenant = \"shop\"\n").expect_err("no such tenant");
    assert!(nobody.message.contains("[tenant.shop]") && nobody.origin.ends_with("c.toml:5"), "{nobody}");
    assert!(hook("events = [\"ended\"]\ntenant = \"shop\"\n[tenant.shop]\n").is_ok());
    assert!(hook("events = []\n").expect_err("none").message.contains("events must name"));
    // An unknown word makes the type name its own.
    let all = serde_json::from_str::<crate::call::EventKind>("\"?\"").expect_err("unknown").to_string();
    let known: std::collections::BTreeSet<&str> = all.split('`').skip(3).step_by(2).collect();
    let schema: serde_json::Value = serde_json::from_str(SCHEMA).expect("JSON");
    let told = schema.pointer("/properties/webhook/additionalProperties/properties/events/items/enum").expect("words");
    let told: std::collections::BTreeSet<&str> =
        told.as_array().expect("a list").iter().filter_map(|w| w.as_str()).collect();
    assert!(told.len() > 30 && told == known, "{told:?} {known:?}");
}

#[test]
fn an_onset_that_does_not_fit_its_window_is_refused_with_what_to_change() {
    let error = load("[call.vad]\nonset_ms = 300\n", &[]).expect_err("144 ms of window");
    assert!(error.message.contains("set onset_window_ms to 300 or more"), "{error}");
    let config = load("[call.vad]\nonset_ms = 300\nonset_window_ms = 450\n", &[]).expect("valid");
    assert_eq!(config.call.vad.onset_ms, 300);
    for (bad, why) in [
        ("onset_window_ms = 2000", "at most 1024"),
        ("onset_score = 1.5", "0 to 1"),
        ("offset_score = 0.9", "above onset_score"),
    ] {
        let error = load(&format!("[call.vad]\n{bad}\n"), &[]).expect_err(bad);
        assert!(error.message.contains(why), "{error}");
    }
}

#[test]
fn what_others_reach_must_not_be_open() {
    let closed = "[http]\ntokens = [\"a long enough token\"]\n";
    for (text, key) in [
        ("", None),
        ("[http]\nbind = \"0.0.0.0:8080\"\n", Some("[http] tokens")),
        ("[http]\nbind = \"[2001:db8::1]:8080\"\n", Some("[http] tokens")),
        ("[http]\nbind = \"0.0.0.0:8080\"\ntokens = [\"a long enough token\"]\n", None),
        ("[sip]\nudp = \"0.0.0.0:5060\"\n", Some("[sip] allow")),
        ("[sip]\nudp = \"off\"\ntcp = \"192.0.2.1:5060\"\n", Some("[sip] allow")),
        ("[sip]\ntls = { bind = \"[::]:5061\", cert = \"c\", key = \"k\" }\n", Some("[sip] allow")),
        ("[sip]\nws = \"0.0.0.0:8089\"\n", Some("[sip] allow")),
        (
            "[sip]\ntls = { bind = \"127.0.0.1:5061\", cert = \"c\", key = \"k\" }\nwss = \"192.0.2.1:8443\"\n",
            Some("[sip] allow"),
        ),
        ("[sip]\nws = \"127.0.0.1:8089\"\n", None),
        ("[sip]\nws = \"0.0.0.0:8089\"\nallow = [\"192.0.2.0/24\"]\n", None),
        ("[sip]\nudp = \"0.0.0.0:5060\"\nallow = [\"192.0.2.0/24\"]\n", None),
        ("[sip]\nudp = \"0.0.0.0:5060\"\nusers = [{ username = \"a\", password = \"long enough\" }]\n", None),
        ("[sip]\nudp = \"127.9.9.9:5060\"\n", None),
    ] {
        let result = load(text, &[]).expect("each value is valid").check_exposure();
        assert_eq!(result.as_ref().err().map(|error| error.origin.as_str()), key, "{text}");
    }
    assert!(load(&format!("{closed}[sip]\nudp = \"0.0.0.0:1\"\n"), &[]).expect("valid").check_exposure().is_err());
}

#[test]
fn one_of_udp_and_tcp_takes_the_other_along() {
    let usual = Config::default().sip;
    let at = |text: &str, variables: &[(&str, &str)]| {
        let sip = load(text, variables).expect("valid").sip;
        (sip.udp.map(|a| a.port()), sip.tcp.map(|a| a.port()))
    };
    assert_eq!(at("", &[]), (usual.udp.map(|a| a.port()), usual.tcp.map(|a| a.port())));
    assert_eq!(at("[sip]\nudp = \"127.0.0.1:5070\"\n", &[]), (Some(5070), Some(5070)));
    assert_eq!(at("[sip]\ntcp = \"127.0.0.1:5070\"\n", &[]), (Some(5070), Some(5070)));
    assert_eq!(at("", &[("ANTIPHON_SIP__UDP", "127.0.0.1:5071")]), (Some(5071), Some(5071)));
    assert_eq!(at("[sip]\nudp = \"127.0.0.1:5070\"\ntcp = \"127.0.0.1:5072\"\n", &[]), (Some(5070), Some(5072)));
    assert_eq!(at("[sip]\nudp = \"127.0.0.1:5070\"\ntcp = \"off\"\n", &[]), (Some(5070), None));
    assert_eq!(at("[sip]\nudp = \"off\"\n", &[]), (None, Some(5060)));
}

#[test]
fn a_short_password_of_an_account_is_refused() {
    let users = |password: &str| format!("[sip]\nusers = [{{ username = \"bob\", password = \"{password}\" }}]\n");
    let error = load(&users("1234567"), &[]).expect_err("too short");
    assert!(error.message.contains("`bob`"), "{error}");
    assert!(load(&users(""), &[]).is_err());
    assert!(load(&users("12345678"), &[]).is_ok());
}

#[test]
fn a_host_that_cannot_be_one_is_refused_with_its_key_and_line() {
    let trunk = |host: &str| format!("[[sip.trunk]]\nname = \"t\"\nhost = {host:?}\n");
    for good in ["carrier.example", "carrier.example.:5061", "192.0.2.7:5060", "[2001:db8::7]:5060", "2001:db8::7"] {
        assert!(load(&trunk(good), &[]).is_ok(), "{good}: {:?}", load(&trunk(good), &[]).err());
    }
    let targets = format!("{}targets = [\n{{ host = \"b\" }},\n{{ host = \"b c\" }},\n]\n", trunk("a"));
    let agent = |key: &str| format!("[agent.a]\nspeed = 1.0\n{key} = \"ws://not a host/\"\n");
    let node = "redis = \"redis://127.0.0.1\"\nnode = \"a\"\ntoken = \"0123456789abcdef\"";
    for (text, line, key) in [
        (trunk("not a host"), 3, "host"),
        (trunk("carrier.example/x"), 3, "host"),
        (trunk("carrier..example"), 3, "host"),
        (trunk("sip:carrier.example"), 3, "host"),
        (trunk("carrier.example:99999"), 3, "host"),
        (targets, 6, "host"),
        ("[sip]\nws_origins = [\"*\", \"https://a b\"]\n".to_owned(), 2, "ws_origins"),
        ("[http]\ncors = [\"https://app..example\"]\n".to_owned(), 2, "cors"),
        ("[http]\nhosts = [\"a..b\"]\n".to_owned(), 2, "hosts"),
        ("[http]\nacme = { domains = [\"a.example\"], directory = \"https://a b/\" }\n".to_owned(), 2, "acme"),
        ("[webrtc]\nice_servers = [{ urls = [\"stun:not a host\"] }]\n".to_owned(), 2, "urls"),
        ("[webrtc]\nice_servers = [{ urls = [\"turn.example.net:3478\"] }]\n".to_owned(), 2, "urls"),
        (format!("[cluster]\n{node}\nadvertise = \"http://a..b:8080\"\n"), 5, "advertise"),
        ("[cluster]\nredis = \"redis://a..b\"\n".to_owned(), 2, "redis"),
        ("[engine]\nworkers = [\"local host:7070\"]\n".to_owned(), 2, "workers"),
        ("[log]\notlp = \"http://collector.example:4317:1\"\n".to_owned(), 2, "otlp"),
        ("[recognizer]\nurl = \"http://1.2.3.400/\"\n".to_owned(), 2, "url"),
        ("[call.play]\nhosts = [\"a..b\"]\n".to_owned(), 2, "hosts"),
        ("[records]\ndatabase = \"postgres://u@a..b/calls?sslmode=disable\"\n".to_owned(), 2, "a..b"),
        ("[webhook.w]\nurl = \"https://a..b/\"\nsecret = \"s\"\nevents = [\"ended\"]\n".to_owned(), 2, "url"),
        (agent("url"), 3, "url"),
        (agent("media"), 3, "media"),
    ] {
        let error = load(&text, &[]).expect_err(&text);
        let at = error.origin.split(".toml:").nth(1).and_then(|at| at.split(':').next()?.parse::<usize>().ok());
        assert_eq!(at, Some(line), "{text}: {error}");
        assert!(error.message.contains(key), "{text}: {error}");
    }
}
