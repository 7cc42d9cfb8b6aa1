//! The attacks of the load generator in small, against the program itself. What depends on the speed of the computer is
//! measured by `antiphon-loadgen attack`, and not asserted here. A flood fills the queues of the loopback device, which tests
//! beside it use as well, so these run by themselves:
//! `cargo test --test gateway attacked -- --ignored --test-threads 1`.

use std::time::Duration;

use antiphon_loadgen::attack::{self, Options, Row};

async fn withstands(row: Row, scale: f64) {
    let options = Options {
        spawn: format!("{} serve", env!("CARGO_BIN_EXE_antiphon")),
        engine: "tone".to_owned(),
        calls: 2,
        lasts: Duration::from_secs(2),
        scale,
    };
    let verdict = attack::run(row, &options).await.expect("the gateway starts and takes calls");
    println!("{verdict}");
    let broken = verdict.broken(false);
    assert!(broken.is_empty(), "{broken:#?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "a flood: run it by itself"]
async fn a_flood_of_malformed_messages() {
    withstands(Row::Malformed, 0.1).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "a flood: run it by itself"]
async fn invites_that_are_never_acknowledged() {
    withstands(Row::HalfOpen, 1.0).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "a flood: run it by itself"]
async fn packets_of_strangers_at_every_media_port() {
    withstands(Row::Rtp, 0.2).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "a flood: run it by itself"]
async fn guessed_and_replayed_credentials() {
    withstands(Row::Digest, 0.2).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "a flood: run it by itself"]
async fn destinations_that_nobody_may_call() {
    withstands(Row::Toll, 1.0).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "a flood: run it by itself"]
async fn connections_that_say_next_to_nothing() {
    withstands(Row::Slow, 0.02).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "a flood: run it by itself"]
async fn more_calls_than_there_are_files_for() {
    withstands(Row::Descriptors, 0.2).await;
}
