//! `kill -9` of gateways, Redis and PostgreSQL at random instants, while jobs and calls come in: nothing that was accepted is
//! lost or done twice, every record is closed, and the registry tells who lives.
//!
//! `ANTIPHON_KILLS=200` is the long form, `ANTIPHON_SEED` another sequence; what it said last is in `tests/README.md`.

use std::path::Path;
use std::time::Duration;

use antiphon_loadgen::call::{Call, now};
use antiphon_loadgen::codec::Codec;
use antiphon_loadgen::sip;
use antiphon_skip::postgres::Postgres;
use rand::{Rng, SeedableRng, rngs::StdRng};
use serde_json::{Value, json};
use tokio::time::{sleep, timeout};

use super::nodes::{Redis, TOKEN};
use super::program::Serve;

const NODES: [&str; 3] = ["a", "b", "c"];
/// By when the registry tells who lives.
const REGISTRY: Duration = Duration::from_secs(10);
/// By when everything is done that was accepted, once all are back.
const SETTLED: Duration = Duration::from_secs(60);
/// Items of a job; their texts tell them apart.
const ITEMS: [&str; 3] = ["One.", "Two and three.", "And four."];

#[allow(clippy::disallowed_methods, reason = "these variables belong to the test")]
fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok()?.parse().ok()
}

/// The node of this name, at the place of `before` where there was one.
fn node(folder: &Path, name: &str, redis: &Redis, postgres: &Postgres, before: Option<&Serve>) -> Serve {
    let mut node = Serve::start(folder, &folder.join(name), |command| {
        command
            .env("ANTIPHON_ENGINE__KIND", "tone")
            .env("ANTIPHON_BATCH__DATABASE", postgres.url())
            .env("ANTIPHON_RECORDS__DATABASE", postgres.url())
            .env("ANTIPHON_BATCH__AUDIO_DIR", folder.join("audio"))
            .env("ANTIPHON_BATCH__LEASE_S", "5")
            .env("ANTIPHON_RECORDS__LEASE_S", "5")
            .env("ANTIPHON_CLUSTER__REDIS", redis.url())
            .env("ANTIPHON_CLUSTER__NODE", name)
            .env("ANTIPHON_CLUSTER__ADVERTISE", "http://127.0.0.1:0")
            .env("ANTIPHON_CLUSTER__TOKEN", TOKEN);
        if let Some(before) = before {
            command
                .env("ANTIPHON_HTTP__BIND", before.http.trim_start_matches("http://"))
                .env("ANTIPHON_SIP__UDP", before.sip.to_string());
        }
    });
    if let Some(before) = before {
        (node.http, node.sip) = (before.http.clone(), before.sip);
    }
    node
}

struct Site {
    nodes: Vec<Serve>,
    client: reqwest::Client,
    /// Jobs that were accepted.
    jobs: Vec<String>,
    /// Calls that were answered and whose record was seen.
    recorded: Vec<String>,
    calls: Vec<Call>,
}

impl Site {
    /// What `node` says to `GET path`, where it says anything.
    async fn get(&self, node: usize, path: &str) -> Option<(u16, Value)> {
        let request = self.client.get(format!("{}{path}", self.nodes[node].http)).timeout(Duration::from_secs(5));
        let answer = request.send().await.ok()?;
        Some((answer.status().as_u16(), answer.json().await.unwrap_or(Value::Null)))
    }

    /// A job of three items at `node`; one that is not accepted is none.
    async fn submit(&mut self, node: usize) {
        let request = self.client.post(format!("{}/v1/audio/speech/batch", self.nodes[node].http));
        let answer = request.timeout(Duration::from_secs(5)).json(&json!({ "items": ITEMS })).send().await;
        let Ok(answer) = answer else { return };
        if answer.status() == 202 {
            let job: Value = answer.json().await.unwrap_or_default();
            self.jobs.extend(job["id"].as_str().map(str::to_owned));
        }
    }

    /// A telephone call to `node`, where it answers.
    async fn call(&mut self, node: usize) {
        let config =
            sip::Config { codecs: vec![Codec::Pcmu], patience: Duration::from_secs(3), ..sip::Config::default() };
        let caller = sip::Caller::bind(config).await.expect("free ports");
        let Ok(call) = caller.call(&format!("sip:silent@{}", self.nodes[node].sip)).await else { return };
        // What is not written yet is no record.
        let id = call.id().expect("named").to_owned();
        for _ in 0..10 {
            if self.get(node, &format!("/v1/records/{id}")).await.is_some_and(|(status, _)| status == 200) {
                self.recorded.push(id);
                break;
            }
            sleep(Duration::from_millis(50)).await;
        }
        self.calls.push(call);
    }

    /// Waits until every node is ready and knows the others; gives how long that took.
    async fn registry(&self, limit: Duration) -> Duration {
        let began = now();
        for (number, node) in NODES.iter().enumerate() {
            let others: Vec<&str> = NODES.iter().copied().filter(|name| name != node).collect();
            let right = async {
                loop {
                    if let Some((_, said)) = self.get(number, "/readyz").await
                        && said["cluster"]["registry"] == true
                        && said["cluster"]["others"] == json!(others)
                    {
                        return;
                    }
                    sleep(Duration::from_millis(50)).await;
                }
            };
            let left = limit.saturating_sub(began.elapsed());
            if timeout(left, right).await.is_err() {
                panic!("{node}: not right within {limit:?}: {:?}", self.get(number, "/readyz").await);
            }
        }
        began.elapsed()
    }

    /// Waits until `path` of some node says what is wanted.
    async fn until(&self, path: &str, wanted: impl Fn(&Value) -> bool) -> Value {
        let look = async {
            loop {
                for node in 0..NODES.len() {
                    if let Some((200, said)) = self.get(node, path).await
                        && wanted(&said)
                    {
                        return said;
                    }
                }
                sleep(Duration::from_millis(100)).await;
            }
        };
        match timeout(SETTLED, look).await {
            Ok(said) => said,
            Err(_) => panic!("{path}: {:?}", self.get(0, path).await),
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn whatever_is_killed_nothing_that_was_accepted_is_lost_or_done_twice() {
    let (Some(mut postgres), Some(mut redis)) = (Postgres::start(), Redis::start()) else { return };
    let kills = number("ANTIPHON_KILLS").unwrap_or(6);
    let seed = number("ANTIPHON_SEED").unwrap_or(22);
    let mut random = StdRng::seed_from_u64(seed);
    let _ = rustls::crypto::ring::default_provider().install_default();
    let folder = tempfile::tempdir().expect("a folder");
    let nodes = NODES.iter().map(|name| node(folder.path(), name, &redis, &postgres, None)).collect();
    let client = reqwest::Client::builder().pool_max_idle_per_host(0).build().expect("a client");
    let mut site = Site { nodes, client, jobs: Vec::new(), recorded: Vec::new(), calls: Vec::new() };
    site.registry(SETTLED).await;

    // What a job makes that nobody disturbs.
    site.submit(0).await;
    let whole = site.jobs.pop().expect("accepted");
    let path = format!("/v1/jobs/{whole}");
    site.until(&path, |job| job["state"] == "done").await;
    let audio = async |site: &Site, job: &str| {
        let request = site.client.get(format!("{}/v1/jobs/{job}/audio", site.nodes[0].http));
        request.send().await.expect("HTTP").bytes().await.expect("whole")
    };
    let reference = audio(&site, &whole).await;
    assert!(reference.len() > 1_000);

    let (mut killed, mut slowest) = (std::collections::BTreeMap::<&str, u32>::new(), Duration::ZERO);
    for round in 0..kills {
        // The first ones of each kind, and then at random.
        let victim = if round < 3 { [0, 3, 4][round as usize] } else { random.random_range(0..5) };
        let (at, caller) = (random.random_range(0..NODES.len()), random.random_range(0..NODES.len()));
        let wait = Duration::from_millis(random.random_range(0..400));
        site.submit(at).await;
        site.call(caller).await;
        sleep(wait).await;
        let away = Duration::from_millis(random.random_range(0..800));
        match victim {
            3 => {
                redis.kill();
                site.submit(at).await;
                sleep(away).await;
                redis.run();
            }
            4 => {
                postgres.kill();
                site.call(at).await;
                sleep(away).await;
                postgres.run();
            }
            victim => {
                site.nodes[victim].signal("KILL");
                site.nodes[victim].ended().await;
                site.submit((victim + 1) % NODES.len()).await;
                sleep(away).await;
                let next = node(folder.path(), NODES[victim], &redis, &postgres, Some(&site.nodes[victim]));
                site.nodes[victim] = next;
            }
        }
        *killed.entry(["node", "node", "node", "redis", "postgresql"][victim]).or_default() += 1;
        // The registry is looked at now and then: kills come while it heals, too.
        if round % 3 == 2 || round + 1 == kills {
            // How long it took is told; the short form, on a machine that does other things, does not judge it.
            let limit = if kills > 6 { REGISTRY } else { SETTLED };
            slowest = slowest.max(site.registry(limit).await);
        }
        // Callers of a node that is gone hear nothing and hang up; some others do, too.
        while site.calls.len() > 6 {
            site.calls.remove(0).hang_up().await;
        }
    }
    for call in std::mem::take(&mut site.calls) {
        call.hang_up().await;
    }

    for job in &site.jobs {
        let said = site.until(&format!("/v1/jobs/{job}"), |said| said["state"] == "done").await;
        assert_eq!((&said["total"], &said["finished"]), (&json!(3), &json!(3)), "{said}");
        let results: Vec<(&Value, &Value)> =
            said["results"].as_array().into_iter().flatten().map(|item| (&item["index"], &item["status"])).collect();
        let done = json!("done");
        assert_eq!(results, [(&json!(0), &done), (&json!(1), &done), (&json!(2), &done)], "{said}");
        assert!(audio(&site, job).await == reference, "{job} sounds as one that nobody disturbed");
    }
    for id in &site.recorded {
        let record = site.until(&format!("/v1/records/{id}"), |record| record["state"] == "ended").await;
        assert!(record["cause"].is_string() && record["endedMs"].is_u64(), "{record}");
    }
    let all = site.until("/v1/records?limit=100", |page| page["records"].is_array()).await;
    let open: Vec<&Value> =
        all["records"].as_array().into_iter().flatten().filter(|record| record["state"] != "ended").collect();
    assert!(open.is_empty(), "{open:#?}");
    println!(
        "seed {seed}: {killed:?} killed, {} jobs of {} items done once, {} records closed, registry right after {slowest:?} at most",
        site.jobs.len(),
        ITEMS.len(),
        site.recorded.len()
    );
    assert!(site.jobs.len() as u64 >= kills / 2 && !site.recorded.is_empty());
}
