//! Records of calls that only these tests know.

use std::time::Duration;

use super::store::Store;
use super::*;
use crate::call::{Direction, Heard, Stages, TurnHow, TurnId};
use crate::telemetry::shown::Shown;
use crate::turn::Class;

fn config(folder: &std::path::Path) -> Config {
    Config { database: folder.join("records.sqlite").into(), ..Config::default() }
}

pub(super) fn meta(id: &str) -> CallMeta {
    CallMeta {
        id: CallId::from(id),
        direction: Direction::Outbound,
        from: "sip:bot@example.com".into(),
        to: format!("sip:+49{id}@example.com"),
        agent: "support".into(),
        headers: Default::default(),
        tenant: "ops".into(),
        trace: None,
    }
}

fn all() -> Filter {
    Filter { limit: PAGE, ..Filter::default() }
}

/// A call that is dialled, answered, and says something.
fn converse(records: &Records, id: &str) {
    let meta = meta(id);
    for state in [Dialling::Trying, Dialling::Ringing { status: 180 }, Dialling::Answered] {
        records.dialling(&meta, Some("carrier"), &state);
    }
    let turn = TurnId::from("t1");
    let heard = Heard { text: "Your code is 1234.".into(), words: 4, sent_ms: 900, ..Heard::default() };
    for event in [
        CallEvent::Connected,
        CallEvent::TurnStarted { turn: turn.clone() },
        CallEvent::FirstAudio {
            turn: turn.clone(),
            after: Duration::from_millis(80),
            immediate: true,
            stages: Stages::default(),
        },
        CallEvent::Answered {
            turn: turn.clone(),
            stages: Stages { agent: Duration::from_millis(70), ..Stages::default() },
        },
        CallEvent::TurnEnded { turn, how: TurnHow::Done, heard },
        CallEvent::Prompt { text: "Thank you".into(), lang: "en".into(), last: true, eager: None },
        CallEvent::Digit('5'),
        CallEvent::Handoff("{\"order\":7}".into()),
    ] {
        records.happened(&meta, &event);
    }
}

#[test]
fn a_call_that_is_not_answered_has_a_record_with_its_status() {
    let folder = tempfile::tempdir().expect("temp dir");
    let records = Records::start(config(folder.path())).expect("starts");
    assert_eq!(records.list(&all()).expect("reads"), Page::default());
    assert!(!folder.path().join("records.sqlite").exists(), "no call, no file");
    let busy = Dialling::Busy { status: 486 };
    for state in [Dialling::Trying, Dialling::Ringing { status: 180 }, busy] {
        records.dialling(&meta("1"), Some("carrier"), &state);
    }
    let refused = Dialling::Refused { status: 603, reason: "Decline".into() };
    records.dialling(&meta("2"), None, &Dialling::Trying);
    records.dialling(&meta("2"), None, &refused);
    records.shutdown();
    let record = records.get("1").expect("reads").expect("there");
    assert_eq!((&record["state"], &record["cause"]), (&"ended".into(), &"busy".into()));
    assert_eq!((&record["sip"]["status"], &record["trunk"]), (&486.into(), &"carrier".into()));
    assert!(record["answeredMs"].is_null() && record["endedMs"].is_u64());
    let record = records.get("2").expect("reads").expect("there");
    assert_eq!((&record["sip"]["reason"], &record["endedBy"]), (&"Decline".into(), &"peer".into()));
    assert_eq!(records.get("3").expect("reads"), None);
}

#[test]
fn records_that_a_dead_process_left_open_are_closed_by_the_next() {
    let folder = tempfile::tempdir().expect("temp dir");
    let first = Records::start(config(folder.path())).expect("starts");
    converse(&first, "1");
    // As after kill -9: what was written stays, and the end never comes.
    first.shutdown();
    let before = first.get("1").expect("reads").expect("there");
    assert_eq!((&before["state"], &before["cause"]), (&"open".into(), &serde_json::Value::Null));
    let second = Records::start(config(folder.path())).expect("starts");
    let after = second.get("1").expect("reads").expect("there");
    assert_eq!((&after["state"], &after["cause"]), (&"ended".into(), &"gateway stopped".into()));
    assert!(after["endedMs"].as_u64() >= after["answeredMs"].as_u64() && after["durationMs"].is_u64(), "{after}");
    second.shutdown();
    let third = Records::start(config(folder.path())).expect("starts");
    assert_eq!(third.get("1").expect("reads"), Some(after), "once");
    third.shutdown();
}

#[test]
fn what_was_said_is_kept_or_only_how_much() {
    for text in [true, false] {
        let folder = tempfile::tempdir().expect("temp dir");
        let records = Records::start(Config { text, ..config(folder.path()) }).expect("starts");
        converse(&records, "1");
        // An end writes what has come since.
        records.dialling(&meta("1"), None, &Dialling::Cancelled);
        records.shutdown();
        let record = records.get("1").expect("reads").expect("there");
        assert_eq!(
            record.to_string().contains("code is 1234") || record.to_string().contains("Thank"),
            text,
            "{record}"
        );
        assert_eq!((&record["turns"][0]["heardWords"], &record["prompts"][0]["chars"]), (&4.into(), &9.into()));
        assert_eq!(record["turns"][0]["firstAudioMs"], 80.0);
        assert_eq!(record["turns"][0]["latency"]["mouthToEarMs"], 70.0);
        assert_eq!((&record["digits"], &record["handoffData"]), (&1.into(), &"{\"order\":7}".into()));
        assert!(!record.to_string().contains("\"5\""), "keys may be a secret");
    }
}

#[test]
fn records_are_found_by_page_and_by_filter() {
    let folder = tempfile::tempdir().expect("temp dir");
    let records = Records::start(config(folder.path())).expect("starts");
    for n in 0..5 {
        records.dialling(&meta(&n.to_string()), None, &Dialling::Trying);
        let state = if n % 2 == 0 { Dialling::NoAnswer { status: None } } else { Dialling::Busy { status: 486 } };
        records.dialling(&meta(&n.to_string()), None, &state);
    }
    records.shutdown();
    let ids = |filter: &Filter| {
        let page = records.list(filter).expect("reads");
        let ids: Vec<String> = page.records.iter().map(|r| r["id"].as_str().unwrap_or("-").to_owned()).collect();
        (ids.join(""), page.has_more)
    };
    assert_eq!(ids(&Filter { limit: 2, ..all() }), ("43".into(), true));
    assert_eq!(ids(&Filter { limit: 3, after: Some("3".into()), ..all() }), ("210".into(), false));
    assert_eq!(ids(&Filter { cause: Some("busy".into()), ..all() }), ("31".into(), false));
    assert_eq!(ids(&Filter { party: Some("+493".into()), ..all() }), ("3".into(), false));
    assert_eq!(ids(&Filter { direction: Some("inbound".into()), ..all() }).0, "");
    assert_eq!(ids(&Filter { agent: Some("support".into()), until_ms: Some(1), ..all() }).0, "");
    assert_eq!(ids(&Filter { since_ms: Some(1), ..all() }).0, "43210");
    assert_eq!(ids(&Filter { tenant: Some("ops".into()), ..all() }).0, "43210");
    assert_eq!(ids(&Filter { tenant: Some("others".into()), ..all() }).0, "");
    assert!(matches!(records.list(&Filter { after: Some("x".into()), ..all() }), Err(RecordError::NotFound)));
}

#[test]
fn a_database_that_refuses_is_tried_again_and_calls_do_not_wait() {
    let folder = tempfile::tempdir().expect("temp dir");
    let blocked = folder.path().join("in the way");
    std::fs::write(&blocked, "a file where the folder should be").expect("written");
    let database = blocked.join("records.sqlite").into();
    let records = Records::start(Config { database, ..config(folder.path()) }).expect("starts");
    records.dialling(&meta("1"), None, &Dialling::Trying);
    // Far more than the queue holds: nothing waits, and what has no room is dropped.
    let shown = Shown::here();
    for _ in 0..3 * QUEUE {
        records.dialling(&meta("2"), None, &Dialling::Trying);
    }
    assert!(shown.sum("antiphon_records_dropped_total") >= 1.0);
    std::fs::remove_file(&blocked).expect("removed");
    records.dialling(&meta("1"), None, &Dialling::Busy { status: 486 });
    records.shutdown();
    assert!(records.get("2").expect("reads").is_some());
}

#[test]
fn old_records_are_forgotten_unless_they_are_to_be_delivered() {
    let folder = tempfile::tempdir().expect("temp dir");
    let path = folder.path().join("records.sqlite");
    let mut store = Store::open(&path).expect("opens");
    let ended = |id: &str, at: u64| {
        let mut draft = Draft::new(&meta(id), Duration::from_secs(at));
        draft.dialling(None, &Dialling::Cancelled, Duration::from_secs(at));
        draft.record()
    };
    store.write(&[ended("old", 100), ended("new", 900)], Duration::from_secs(900), false).expect("written");
    store.write(&[ended("due", 100)], Duration::from_secs(900), true).expect("written");
    assert_eq!(store.forget(Duration::from_secs(500)).expect("forgotten"), 1);
    assert!(store.get("old").expect("reads").is_none() && store.get("due").expect("reads").is_some());
}

#[test]
fn a_damaged_database_of_records_is_put_aside_and_a_locked_one_waited_for() {
    let folder = tempfile::tempdir().expect("temp dir");
    let database = folder.path().join("records.sqlite");
    std::fs::write(&database, b"this is no database, and long enough to look at".repeat(100)).expect("written");
    let records = Records::start(config(folder.path())).expect("starts");
    converse(&records, "1");
    records.shutdown();
    assert!(records.get("1").expect("reads").is_some());
    let names = || std::fs::read_dir(folder.path()).expect("readable").map(|file| file.expect("there").file_name());
    assert_eq!(names().filter(|name| name.to_string_lossy().contains(".damaged-")).count(), 1);

    // Its call has not ended, and somebody else holds the file when the next process starts.
    let other = rusqlite::Connection::open(&database).expect("opens");
    other.execute_batch("BEGIN IMMEDIATE").expect("locked");
    let records = Records::start(config(folder.path())).expect("starts all the same");
    assert!(records.fault().is_some_and(|why| why.contains("locked")), "{:?}", records.fault());
    converse(&records, "2");
    other.execute_batch("ROLLBACK").expect("given back");
    let begun = clock::now();
    while records.fault().is_some() {
        assert!(clock::now() - begun < Duration::from_secs(60), "{:?}", records.fault());
        std::thread::park_timeout(Duration::from_millis(5));
    }
    records.shutdown();
    assert_eq!(records.get("1").expect("reads").expect("there")["cause"], "gateway stopped");
    assert_eq!(records.get("2").expect("reads").expect("there")["state"], "open", "its own is not closed");
}

#[test]
fn usage_counts_each_call_once_and_what_was_spoken() {
    let folder = tempfile::tempdir().expect("temp dir");
    let records = Records::start(config(folder.path())).expect("starts");
    let meter = Arc::<Meter>::default();
    records.count(meter.clone());
    records.dialling(&meta("1"), Some("carrier"), &Dialling::Trying);
    records.dialling(&meta("1"), Some("carrier"), &Dialling::Busy { status: 486 });
    converse(&records, "2");
    meter.add(&"ops".into(), Class::Live, 12, Duration::from_millis(1_500));
    meter.add(&"".into(), Class::Batch, 300, Duration::from_secs(20));
    records.shutdown();

    let today = |records: &Records| records.usage_today().expect("reads");
    let usage = today(&records);
    let [nobody, ops] = &usage[..] else { panic!("{usage:?}") };
    assert_eq!((ops.tenant.as_str(), ops.outbound_calls, ops.inbound_calls), ("ops", 1, 0), "the other goes on");
    assert_eq!(ops.live, Speech { utterances: 1, characters: 12, audio_seconds: 1.5 });
    assert_eq!((nobody.tenant.as_str(), nobody.batch.characters, nobody.batch.audio_seconds), ("", 300, 20.0));

    // The next process closes what was left open, and counts it once.
    for _ in 0..2 {
        let next = Records::start(config(folder.path())).expect("starts");
        assert_eq!(today(&next)[1].outbound_calls, 2);
        next.shutdown();
    }
    let period = Period { from: Some("2001-01-01".into()), to: Some("2001-01-02".into()), tenant: None };
    assert_eq!(records.usage(&period).expect("reads"), []);
}

#[test]
fn a_database_of_the_version_before_is_brought_up_to_date() {
    let folder = tempfile::tempdir().expect("temp dir");
    let config = config(folder.path());
    let old = rusqlite::Connection::open(config.database.path().expect("a file")).expect("opens");
    old.execute_batch(&format!("{}PRAGMA user_version = 1;", store::SCHEMA)).expect("the tables of version 1");
    drop(old);
    let records = Records::start(config).expect("starts");
    converse(&records, "1");
    records.shutdown();
    assert!(records.get("1").expect("reads").is_some());
    assert_eq!(records.usage_today().expect("reads"), [], "it goes on");
}

#[test]
fn who_called_is_recorded_as_a_trunk_said_and_only_of_calls_that_came() {
    let folder = tempfile::tempdir().expect("temp dir");
    let records = Records::start(config(folder.path())).expect("starts");
    let headers = [("X-Antiphon-Asserted", "+4930555"), ("X-Antiphon-Attestation", "B"), ("X-Account", "7")];
    let headers: std::collections::BTreeMap<_, _> =
        headers.into_iter().map(|(name, value)| (name.to_owned(), value.to_owned())).collect();
    for (id, direction) in [("1", Direction::Inbound), ("2", Direction::Outbound)] {
        let meta = CallMeta { direction, headers: headers.clone(), ..meta(id) };
        records.dialling(&meta, None, &Dialling::Cancelled);
    }
    records.shutdown();
    let came = records.get("1").expect("reads").expect("written");
    let (asserted, attestation) = (&came["identity"]["asserted"], &came["identity"]["attestation"]);
    assert_eq!((asserted.as_str(), attestation.as_str()), (Some("+4930555"), Some("B")), "{came}");
    assert!(records.get("2").expect("reads").expect("written")["identity"].is_null());
}
