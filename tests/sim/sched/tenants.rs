//! Shares and limits of API tokens, and batch work that must not starve.

use std::time::Duration;

use antiphon::audio::duration_of;
use antiphon::sched::{Config, JobSpec, Plan, RefusedReason, Scheduler, StreamNote, Tenant};
use antiphon::turn::{Class, StreamId, TurnToken};

use super::engine::{Costs, Engine};
use super::policy::Kind;
use super::rng::Rng;
use super::world::{Event, Report, World, quantile, zero};

const SECOND: Duration = Duration::from_secs(1);

fn tenant(weight: f64, chars_per_minute: u32, max_live: u32) -> Tenant {
    Tenant { weight, chars_per_minute, max_live }
}

/// One run on the recorded engine: turns of two utterances arrive for each `(tenant, per second)`.
fn run(config: &Config, live: &[(&'static str, f64)], backlog: &[&'static str], seconds: u64) -> Report {
    measured(config, live, backlog, 0, seconds)
}

/// The same, measured only from an instant on.
fn measured(
    config: &Config,
    live: &[(&'static str, f64)],
    backlog: &[&'static str],
    from: u64,
    seconds: u64,
) -> Report {
    let costs = Costs::named("h200");
    let policy = Kind::Ours(config.clone()).build(&costs);
    let mut world = World::new(Engine::new(costs, 1), policy);
    world.measure_from = zero() + Duration::from_secs(from);
    world.backlog_tenants = backlog.to_vec();
    world.backlog = if backlog.is_empty() { 0 } else { 300 };
    let end = Duration::from_secs(seconds);
    let mut stream = 0;
    for (number, &(tenant, per_second)) in live.iter().enumerate() {
        let mut rng = Rng::new(number as u64 + 1);
        let mut at = Duration::ZERO;
        while at < end {
            at += rng.gap(per_second);
            stream += 1;
            let tokens = (0..2).map(|_| rng.range(60, 130) as u32).collect();
            world.at(at, Event::Turn { stream, class: Class::Live, tenant, tokens });
        }
    }
    world.run(end);
    world.report
}

#[test]
fn batch_of_two_tenants_shares_the_device_by_weight() {
    let mut config = Config::default();
    for (heavy, expected) in [(1.0, 1.0), (3.0, 3.0)] {
        config.tenants.insert("heavy".into(), tenant(heavy, 0, 0));
        // Fair over minutes: a tenant's sentences are finished once begun, whoever is ahead.
        let report = run(&config, &[], &["heavy", "light"], 60);
        let share = report.device_by["heavy"] / report.device_by["light"];
        println!("weight {heavy}: {share:.2} times as much of the device");
        assert!((share / expected - 1.0).abs() < 0.1, "weight {heavy} gives {share} times as much");
    }
}

/// What a tenant's callers heard: first audio at the 95th percentile, and how many turns were refused.
fn heard(report: &Report, tenant: &'static str) -> (Duration, u32) {
    let refused = report.refused_by.iter().filter(|((of, _), _)| *of == tenant).map(|(_, n)| *n).sum();
    (quantile(&report.first_by[tenant], 0.95), refused)
}

/// Of twice what the device makes, half is refused: all of that to the one who asks for it. What is taken on is in time,
/// whoever's it is.
#[test]
fn a_flood_of_one_tenant_has_its_own_turns_refused_and_not_those_of_another() {
    let config = Config::default();
    let calm = run(&config, &[("calm", 2.0)], &[], 15);
    let flood = run(&config, &[("calm", 2.0), ("flood", 90.0)], &[], 15);
    let (alone, beside, itself) = (heard(&calm, "calm"), heard(&flood, "calm"), heard(&flood, "flood"));
    println!("calm alone {alone:.1?}, beside the flood {beside:.1?}, the flood itself {itself:.1?}");
    let target = Duration::from_millis(Config::default().first_audio_target_ms.into());
    assert!(beside.0 <= target / 2 && itself.0 <= target, "calm {beside:?}, flood {itself:?}");
    assert!(beside.1 == 0 && itself.1 > 300, "calm {beside:?}, flood {itself:?}");
}

#[test]
fn a_tenant_at_its_limit_of_calls_is_refused_and_others_are_not() {
    let mut config = Config::default();
    config.tenants.insert("flood".into(), tenant(1.0, 0, 20));
    let report = run(&config, &[("calm", 2.0), ("flood", 45.0)], &[], 25);
    assert!(report.refused_by.get(&("flood", "tenant_full")).is_some_and(|n| *n > 100), "{:?}", report.refused_by);
    assert!(report.refused_by.keys().all(|(tenant, _)| *tenant == "flood"), "{:?}", report.refused_by);
    assert!(report.underruns.is_empty());
}

#[test]
fn a_rate_limit_holds_over_any_minute_and_says_when_to_come_back() {
    const PER_MINUTE: u32 = 600;
    const CHARS: u32 = 50;
    let config = Config { tenant_default: tenant(1.0, PER_MINUTE, 0), ..Config::default() };
    let mut sched = Costs::named("simple").scheduler(config);
    let submit = |sched: &mut Scheduler, now, stream: u64| {
        let (stream, class) = (StreamId(stream), if stream.is_multiple_of(2) { Class::Live } else { Class::Batch });
        let spec = JobSpec { stream, class, token: TurnToken::forever(), tenant: "one".into(), chars: CHARS };
        let result = sched.submit(now, spec);
        // Only the limit is looked at here: the work itself is given up at once.
        sched.note(now, stream, StreamNote::Closed);
        while matches!(sched.plan(now), Plan::End { .. }) {}
        result
    };
    let mut accepted: Vec<u64> = Vec::new();
    let mut stream = 0;
    let mut tenth = 0;
    while tenth < 10 * 600 {
        let now = zero() + SECOND * tenth / 10;
        stream += 1;
        match submit(&mut sched, now, stream) {
            Ok(_) => accepted.push(u64::from(tenth)),
            Err(refused) => {
                assert_eq!(refused.reason, RefusedReason::RateLimited);
                // Who comes back when told is served; a little earlier is too early.
                stream += 1;
                let back = now + refused.retry_after;
                if refused.retry_after > SECOND {
                    assert!(submit(&mut sched, back - SECOND / 2, stream).is_err());
                }
                stream += 1;
                submit(&mut sched, back, stream).expect("it was told to come back now");
                tenth += (refused.retry_after.as_secs_f64() * 10.0).ceil() as u32;
                accepted.push(u64::from(tenth));
            }
        }
        tenth += 1;
    }
    for (n, from) in accepted.iter().enumerate() {
        let within = accepted[n..].iter().take_while(|at| **at < from + 600).count() as u32;
        // A minute's worth may come at once, and what refills meanwhile; the text that crosses the line is not cut.
        assert!(within * CHARS <= 2 * PER_MINUTE + CHARS, "{within} texts within a minute of {from}");
    }
    let total = accepted.len() as u32 * CHARS;
    assert!((10 * PER_MINUTE..=11 * PER_MINUTE + CHARS).contains(&total), "{total} characters in ten minutes");
}

#[test]
fn batch_that_has_waited_for_its_patience_gets_its_small_share_and_no_more() {
    // More live work than there is room for: nothing is left for batch.
    let live = [("", 60.0)];
    let patient = Config { batch_patience_s: 3_600, load_limit: 1.0, ..Config::default() };
    // Until live work has filled the device there is room for batch.
    let starved = measured(&patient, &live, &["book"], 10, 45);
    let (patience, share) = (2, 0.05);
    let aged = Config { batch_patience_s: patience, batch_min_share: share, ..patient };
    let fed = measured(&aged, &live, &["book"], 10, 45);
    println!(
        "batch makes {:.1} s, with ageing {:.1} s; longest without a step of it {:.2?}",
        duration_of(starved.batch_samples).as_secs_f64(),
        duration_of(fed.batch_samples).as_secs_f64(),
        fed.longest_without_batch
    );
    let taken = fed.device_by["book"] / fed.busy;
    assert!(duration_of(fed.batch_samples) > 3 * SECOND, "it does not come on");
    assert!(starved.batch_samples * 4 < fed.batch_samples, "it would not have starved");
    assert!(taken <= share, "{taken} of the device");
    assert!(fed.longest_without_batch <= (patience + 1) * SECOND, "{:?}", fed.longest_without_batch);
    assert!(fed.most_behind_batch <= 1, "live work waited for {} steps of batch", fed.most_behind_batch);
    // The share is of device time, paid by live work that has time to spare: its listeners do not notice.
    assert!(fed.underruns.is_empty(), "{} underruns", fed.underruns.len());
    // Batch that had the device first, and then only rides in steps of listeners, costs no turn either.
    let without = measured(&aged, &live, &[], 10, 45);
    let (beside, alone) = (fed.first_audio.len(), without.first_audio.len());
    println!("{beside} turns taken on beside it, {alone} without");
    assert!(beside as f64 >= 0.97 * alone as f64, "{beside} turns were taken on beside it, {alone} without");
}
