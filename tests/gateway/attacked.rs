//! The attacks of the load generator in small, against the program itself: nothing dialled, no digit injected, no packet
//! leaked, places left, memory bounded. Their rates are a hundredth of an attacker's, so that tests beside them do not suffer;
//! in full, with what depends on the speed of the computer, they are made by `antiphon-loadgen attack`.

use std::time::Duration;

use antiphon_loadgen::attack::{self, Options, Row};

/// Makes an attack with this share of its rate, for as long as it `lasts`.
async fn withstands(row: Row, scale: f64, lasts: u64) {
    let options = Options {
        spawn: format!("{} serve", env!("CARGO_BIN_EXE_antiphon")),
        engine: "tone".to_owned(),
        calls: 2,
        lasts: Duration::from_secs(lasts),
        scale,
    };
    let verdict = attack::run(row, &options).await.expect("the gateway starts and takes calls");
    println!("{verdict}");
    let broken = verdict.broken(false);
    assert!(broken.is_empty(), "{broken:#?}");
}

/// What the others are compared with.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn calls_that_nobody_attacks_are_heard() {
    withstands(Row::Control, 1.0, 2).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn malformed_messages_are_dropped() {
    withstands(Row::Malformed, 0.02, 2).await;
}

/// Twice as many as may be half open.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn invites_that_are_never_acknowledged_leave_nine_places_in_ten() {
    withstands(Row::HalfOpen, 0.5, 4).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn packets_of_strangers_at_every_media_port_are_dropped() {
    withstands(Row::Rtp, 0.02, 2).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn guessed_and_replayed_credentials_are_refused() {
    withstands(Row::Digest, 0.1, 2).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn forbidden_destinations_are_not_dialled() {
    withstands(Row::Toll, 1.0, 1).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn connections_that_say_next_to_nothing_leave_the_gateway_well() {
    withstands(Row::Slow, 0.005, 2).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn calls_that_there_are_no_files_for_are_refused() {
    withstands(Row::Descriptors, 0.1, 1).await;
}
