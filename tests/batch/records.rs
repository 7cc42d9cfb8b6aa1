//! Records of several gateways in one PostgreSQL, a real one that each test starts: every call has one record with one end
//! and is counted once, whoever is killed, gateways or the database.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use antiphon::call::{CallId, CallMeta, Dialling, Direction, Witness};
use antiphon::postgres::{Address, Database};
use antiphon::records::{Config, Filter, PAGE, Period, Records, Usage};
use antiphon::secret::Secret;
use antiphon::synth::device::Meter;
use antiphon::turn::Class;
use antiphon_skip::postgres::Postgres;

use super::counted::counted;
use super::found;

/// The records of a gateway, which is taken for dead after `lease_s`.
fn records(url: &str, folder: &Path, lease_s: u32) -> Records {
    let address = Address::new(Secret::new(url)).expect("an address");
    let database = Database::Postgres(address);
    Records::start(Config { database, lease_s, spool: folder.join("records.spool"), ..Config::default() })
        .expect("starts")
}

fn meta(id: &str) -> CallMeta {
    CallMeta {
        id: CallId::from(id),
        direction: Direction::Outbound,
        from: "sip:bot@example.com".into(),
        to: format!("sip:+49{id}@example.com"),
        agent: "support".into(),
        headers: BTreeMap::new(),
        tenant: "ops".into(),
        trace: None,
    }
}

/// A call that is placed, and one that was.
fn placed(records: &Records, id: &str) {
    records.dialling(&meta(id), Some("carrier"), &Dialling::Trying);
}

fn over(records: &Records, id: &str) {
    records.dialling(&meta(id), Some("carrier"), &Dialling::Busy { status: 486 });
}

/// Waits for the record of a call to say this of `cause`.
async fn ended(records: &Records, id: &str, cause: &str) -> serde_json::Value {
    let right = |record: &serde_json::Value| record["state"] == "ended" && record["cause"] == cause;
    found("the record ends", || records.get(id).ok().flatten().filter(right)).await
}

/// Calls that were placed, and characters that were spoken, live and in batch.
fn usage(records: &Records) -> [u64; 3] {
    let ops = Period { tenant: Some("ops".into()), ..Period::default() };
    let days = records.usage(&ops).expect("answered");
    let add = |[calls, live, batch]: [u64; 3], day: &Usage| {
        [calls + day.outbound_calls, live + day.live.characters, batch + day.batch.characters]
    };
    days.iter().fold([0; 3], add)
}

/// Not a test: the gateway that is killed. Its standard input says where the database and its folder are.
#[test]
#[ignore = "started by the tests below"]
fn writer() {
    let mut told = std::io::stdin().lines().map_while(Result::ok);
    let (Some(url), Some(folder)) = (told.next(), told.next()) else { return };
    let records = records(&url, Path::new(&folder), 2);
    placed(&records, "orphan");
    println!("\nopen");
    // Until it is killed.
    loop {
        std::thread::park();
    }
}

#[tokio::test]
async fn records_of_a_killed_gateway_are_closed_by_another_and_counted_once() {
    let Some(server) = Postgres::start() else { return };
    let (theirs, ours) = (tempfile::tempdir().expect("a folder"), tempfile::tempdir().expect("a folder"));
    let mut child = Command::new(std::env::current_exe().expect("known"))
        .args(["--ignored", "--exact", "records::writer", "--nocapture"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .expect("starts");
    writeln!(child.stdin.take().expect("piped"), "{}\n{}", server.url(), theirs.path().display()).expect("told");
    let open =
        BufReader::new(child.stdout.take().expect("piped")).lines().map_while(Result::ok).any(|line| line == "open");
    assert!(open, "the writer did not start");
    let (a, b) = (records(&server.url(), ours.path(), 2), records(&server.url(), &ours.path().join("b"), 2));
    placed(&a, "own");
    found("it is written", || a.get("orphan").ok().flatten()).await;
    child.kill().expect("killed");
    child.wait().expect("reaped");
    let after = ended(&a, "orphan", "gateway stopped").await;
    assert!(after["endedMs"].is_u64() && after["durationMs"].is_u64() && after["endedBy"] == "gateway", "{after}");
    found("both see it", || b.get("own").ok().flatten()).await;
    over(&a, "own");
    let own = ended(&b, "own", "busy").await;
    assert_eq!(own["sip"]["status"], 486);
    a.shutdown();
    b.shutdown();
    assert_eq!(usage(&a), [2, 0, 0]);
    let filter = Filter { limit: PAGE, party: Some("+49own".into()), ..Filter::default() };
    let page = a.list(&filter).expect("answered");
    assert_eq!((page.records.len(), page.has_more, &page.records[0]["id"]), (1, false, &"own".into()));
}

#[tokio::test]
async fn while_the_database_is_away_records_wait_on_disk_and_follow_after_a_restart() {
    let Some(mut server) = Postgres::start() else { return };
    let folder = tempfile::tempdir().expect("a folder");
    let first = records(&server.url(), folder.path(), 30);
    let meter = Arc::<Meter>::default();
    first.count(meter.clone());
    placed(&first, "1");
    found("it is written", || first.get("1").ok().flatten()).await;
    server.kill();
    over(&first, "1");
    placed(&first, "2");
    meter.add(&"ops".into(), Class::Live, 12, Duration::from_millis(1_500));
    found("it is told", || first.fault()).await;
    let spool = folder.path().join("records.spool");
    // The recorder is there from here on.
    counted("antiphon_records_spooled_bytes ");
    found("it waits on disk", || std::fs::metadata(&spool).ok().filter(|file| file.len() > 0)).await;
    found("it is shown", || Some(()).filter(|()| counted("antiphon_records_spooled_bytes ") > 0.0)).await;
    assert!(first.get("1").is_err());
    // Counted speech is collected at the end.
    first.shutdown();
    let waits = std::fs::read_to_string(&spool).expect("readable");
    assert!(waits.contains("\"speech\"") && waits.contains("+491"), "{waits}");

    server.run();
    let second = records(&server.url(), folder.path(), 30);
    ended(&second, "1", "busy").await;
    let open = found("it follows", || second.get("2").ok().flatten()).await;
    assert_eq!(open["state"], "open", "who placed it may live");
    let used = found("the speech follows", || Some(usage(&second)).filter(|[_, live, _]| *live > 0)).await;
    assert_eq!(used, [1, 12, 0]);
    found("nothing waits", || std::fs::metadata(&spool).ok().filter(|file| file.len() == 0)).await;
    second.shutdown();
}

#[tokio::test]
async fn every_call_is_counted_once_though_the_database_is_killed() {
    let Some(mut server) = Postgres::start() else { return };
    let folder = tempfile::tempdir().expect("a folder");
    let gateways: Vec<Records> =
        ["a", "b"].iter().map(|name| records(&server.url(), &folder.path().join(name), 30)).collect();
    let meter = Arc::<Meter>::default();
    gateways[0].count(meter.clone());
    let (mut calls, mut seed) = (Vec::new(), 0x9e37_79b9_7f4a_7c15u64);
    for round in 0..5 {
        for n in 0..20 {
            let (id, gateway) = (format!("{round}-{n}"), &gateways[n % 2]);
            placed(gateway, &id);
            meter.add(&"ops".into(), Class::Batch, 1, Duration::from_millis(1));
            over(gateway, &id);
            calls.push(id);
        }
        seed ^= seed << 13;
        seed ^= seed >> 7;
        seed ^= seed << 17;
        tokio::time::sleep(Duration::from_micros(seed % 50_000)).await;
        server.kill();
        server.run();
    }
    for id in &calls {
        ended(&gateways[0], id, "busy").await;
    }
    gateways.iter().for_each(Records::shutdown);
    assert_eq!(usage(&gateways[0]), [100, 0, 100]);
}
