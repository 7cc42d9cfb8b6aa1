//! Files, variables and mistakes.

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
fn tokens_may_be_strings_or_tables() {
    let config = load("[http]\ntokens = [\"a\", { name = \"ops\", token = \"b\", scopes = [\"admin\"] }]\n", &[])
        .expect("valid");
    assert_eq!(config.http.tokens[0].token.reveal(), "a");
    assert_eq!(config.http.tokens[1].scopes, [Scope::Admin]);
    assert!(!format!("{config:?}").contains("\"b\""));
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
