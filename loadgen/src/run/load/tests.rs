use super::*;

fn arrivals(arrivals: &Arrivals, seconds: u64) -> Vec<f64> {
    let mut rng = StdRng::seed_from_u64(3);
    let start = clock::now();
    let duration = Duration::from_secs(seconds);
    let mut last = start;
    let mut out = Vec::new();
    while let Some(next) = next_arrival(arrivals, start, last, duration, out.len(), &mut rng) {
        if next >= start + duration || out.len() > 100_000 {
            break;
        }
        assert!(next >= last);
        last = next;
        out.push((next - start).as_secs_f64());
    }
    out
}

#[test]
fn poisson_arrivals_have_their_rate_and_its_variance() {
    let at = arrivals(&Arrivals::Poisson(5.0), 2_000);
    assert!((at.len() as f64 / 10_000.0 - 1.0).abs() < 0.03, "{}", at.len());
    let gaps: Vec<f64> = at.windows(2).map(|w| w[1] - w[0]).collect();
    let mean = gaps.iter().sum::<f64>() / gaps.len() as f64;
    let deviation = (gaps.iter().map(|g| (g - mean).powi(2)).sum::<f64>() / gaps.len() as f64).sqrt();
    assert!((deviation / mean - 1.0).abs() < 0.05, "{deviation} {mean}");
}

#[test]
fn counted_arrivals_are_as_many_as_told_and_poisson() {
    let at = arrivals(&Arrivals::Counted(10_000), 2_000);
    assert_eq!(at.len(), 10_000);
    let early = at.iter().filter(|t| **t < 500.0).count() as f64;
    assert!((early / 2_500.0 - 1.0).abs() < 0.05, "a quarter in the first quarter: {early}");
    let gaps: Vec<f64> = at.windows(2).map(|w| w[1] - w[0]).collect();
    let mean = gaps.iter().sum::<f64>() / gaps.len() as f64;
    let deviation = (gaps.iter().map(|g| (g - mean).powi(2)).sum::<f64>() / gaps.len() as f64).sqrt();
    assert!((deviation / mean - 1.0).abs() < 0.05, "{deviation} {mean}");
}

#[test]
fn a_ramp_grows_evenly() {
    let at = arrivals(&Arrivals::Ramp(0.0, 20.0), 1_000);
    let early = at.iter().filter(|t| **t < 500.0).count() as f64;
    assert!((at.len() as f64 / 10_000.0 - 1.0).abs() < 0.05, "{}", at.len());
    assert!((early / at.len() as f64 - 0.25).abs() < 0.03, "a quarter in the first half: {early}");
}

/// How long callers of a closed loop hear that a turn has ended before they pause.
const HEAR: f64 = 0.5;

/// From one turn to the next in the mean, in seconds.
fn cycle(turns: &[Duration], think: (f64, f64)) -> f64 {
    let turn = turns.iter().map(Duration::as_secs_f64).sum::<f64>() / turns.len() as f64;
    turn + f64::midpoint(think.0, think.1) + HEAR
}

/// How many turns 20,000 callers of a closed loop ask for in each fifth of a second of twelve, each of whom begins at `begins` of the share of
/// callers before him; as shares of how many that is in the mean.
fn asked(turns: &[Duration], think: (f64, f64), begins: impl Fn(f64) -> f64) -> Vec<f64> {
    let callers = 20_000;
    let mut rng = StdRng::seed_from_u64(7);
    let mut asked = vec![0u32; 60];
    for n in 0..callers {
        let mut at = begins(f64::from(n) / f64::from(callers));
        while let Some(count) = asked.get_mut((at / 0.2) as usize) {
            *count += 1;
            at += turns[rng.random_range(0..turns.len())].as_secs_f64() + rng.random_range(think.0..=think.1) + HEAR;
        }
    }
    let mean = f64::from(callers) * 0.2 / cycle(turns, think);
    asked.into_iter().map(|n| f64::from(n) / mean).collect()
}

fn assert_even(asked: &[f64]) {
    let most = asked.iter().map(|share| (share - 1.0).abs()).fold(0.0, f64::max);
    assert!(most < 0.1, "{most} {asked:?}");
}

#[test]
fn callers_of_a_closed_loop_ask_for_turns_as_often_while_they_begin_as_later() {
    // Turns of any length from 2 to 4 s, and turns that are short or long.
    let even: Vec<Duration> = (0..100).map(|n| Duration::from_millis(1_500 + 20 * n)).collect();
    let two = [1_500, 5_500].map(Duration::from_millis);
    for (turns, think) in [(&even[..], (0.5, 0.5)), (&two[..], (0.2, 0.6))] {
        let cycles = Cycles::of(turns, think, cycle(turns, think));
        let begins = |share| {
            let at = cycles.begins(share).expect("turns are known");
            assert!(at >= 0.0 && at <= cycles.longest().as_secs_f64());
            at
        };
        assert_even(&asked(turns, think, begins));
    }
}

#[test]
fn a_ramp_leaves_time_to_measure() {
    let seconds = Duration::from_secs;
    let ramp = |turn: u64| Cycles::of(&[seconds(turn)], (0.0, 0.0), 0.0).ramp(seconds(12));
    let ramps = [4, 2, 1, 12].map(ramp);
    assert_eq!(
        ramps,
        [seconds(4), seconds(4), seconds(3), seconds(6)],
        "whole turns, a quarter at least, half at most"
    );
    assert_eq!(
        (Cycles::default().ramp(seconds(12)), Cycles::default().begins(0.5)),
        (seconds(3), None),
        "not known yet"
    );
}

#[test]
fn callers_who_begin_over_more_than_one_turn_ask_evenly_too() {
    let (turns, think) = ([1_300, 1_500].map(Duration::from_millis), (0.5, 0.7));
    let cycles = Cycles::of(&turns, think, cycle(&turns, think));
    let ramp = cycles.ramp(Duration::from_secs(12));
    assert!(ramp >= 2 * cycles.longest().mul_f64(0.99), "{ramp:?}");
    let asked = asked(&turns, think, |share| ramp.as_secs_f64() * cycles.begins_within(ramp, share));
    assert_even(&asked[(ramp.as_secs_f64() / 0.2).ceil() as usize..]);
}

#[test]
fn bursts_and_traces_come_when_they_should() {
    assert_eq!(arrivals(&Arrivals::Burst(2, Duration::from_secs(4)), 10), [0.0, 0.0, 4.0, 4.0, 8.0, 8.0]);
    let trace = [0.5, 0.5, 3.0].map(Duration::from_secs_f64).to_vec();
    assert_eq!(arrivals(&Arrivals::Trace(trace), 10), [0.5, 0.5, 3.0]);
}

#[test]
fn legs_are_sampled_by_weight() {
    let mut rng = StdRng::seed_from_u64(1);
    let legs = [(Leg::Sip, 3.0), (Leg::Webrtc, 1.0)];
    let sip = (0..4_000).filter(|_| pick(&legs, &mut rng) == Leg::Sip).count();
    assert!((2_850..3_150).contains(&sip), "{sip}");
    assert_eq!(pick(&[], &mut rng), Leg::Sip);
}
