//! Calls whose turns are spoken while they are written: the first sentence word by word into the running model, the second
//! so, too (`token`), or as one utterance when it is whole (`auto`).
//!
//! As `tests/gpu/text_rates.rs` on a device: a first sentence of 20 ids and 130 speech tokens, a second of 11 and 71, at 30 ids
//! a second, fifteen tokens for five ids.

use std::time::Duration;

use super::engine::{Costs, Engine};
use super::policy::Kind;
use super::world::{Event, Report, World};

/// Ids a second of whoever writes.
const RATE: f64 = 30.0;
const SENTENCES: [(u32, u32); 2] = [(20, 130), (11, 71)];
/// Characters of an id.
const CHARS: u32 = 4;

/// What each id of a text adds: every fifth one fifteen tokens, the last the rest.
fn pieces((ids, tokens): (u32, u32)) -> Vec<(u32, u32)> {
    let mut left = tokens;
    (1..=ids)
        .map(|id| {
            let more = if id == ids {
                left
            } else if id % 5 == 0 {
                15
            } else {
                0
            };
            left -= more;
            (more, CHARS)
        })
        .collect()
}

/// `calls` of three turns each, which begin at any time within four seconds.
fn run(calls: u64, token: bool) -> Report {
    let costs = Costs::named("h200");
    let mut world = World::new(Engine::new(costs.clone(), 1), Kind::ours().build(&costs));
    let gap = Duration::from_secs_f64(1.0 / RATE);
    for call in 0..calls {
        let mut at = Duration::from_millis(call * 7_919 % 4_000);
        for _ in 0..3 {
            let [first, second] = SENTENCES;
            world.at(at, Event::Written { stream: call, pieces: pieces(first), gap, new: true });
            let from = at + gap * first.0;
            if token {
                world.at(from, Event::Written { stream: call, pieces: pieces(second), gap, new: false });
            } else {
                let whole = vec![(second.1, second.0 * CHARS)];
                world.at(from + gap * second.0, Event::Written { stream: call, pieces: whole, gap, new: false });
            }
            at += Duration::from_secs_f64(f64::from(first.1 + second.1) / 25.0 + 1.1);
        }
    }
    world.run(Duration::from_secs(40));
    world.report
}

/// `WRITERS=200,250 cargo test --test sim -- --nocapture written_turns` prints these numbers of calls in place of a hundred.
#[test]
#[expect(clippy::disallowed_methods, reason = "whoever runs it says how many calls he wants")]
fn written_turns_sound_as_soon_whichever_way_they_go_on() {
    let wanted = std::env::var("WRITERS").unwrap_or_default();
    let named: Vec<u64> = wanted.split(',').filter_map(|calls| calls.parse().ok()).collect();
    let levels = if named.is_empty() { &[100][..] } else { &named };
    println!("{:>5} {:<6} {:>7} {:>7} {:>7} {:>6} refused", "calls", "mode", "p50 ms", "p95 ms", "p99 ms", "gaps");
    for &calls in levels {
        for (name, token) in [("auto", false), ("token", true)] {
            let report = run(calls, token);
            let ms = |q: f64| report.quantile(q).as_secs_f64() * 1e3;
            let gaps = report.underruns.len();
            println!(
                "{calls:>5} {name:<6} {:>7.0} {:>7.0} {:>7.0} {gaps:>6} {:?}",
                ms(0.5),
                ms(0.95),
                ms(0.99),
                report.refused_by
            );
            if named.is_empty() {
                assert_eq!(report.first_audio.len() as u64, 3 * calls);
                assert_eq!((gaps, report.refused), (0, 0), "{name}");
                // Five ids take 133 ms to be written.
                assert!(report.quantile(0.95) <= Duration::from_millis(200), "{name}: {:?}", report.quantile(0.95));
            }
        }
    }
}
