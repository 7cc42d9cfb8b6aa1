//! The formulas of traffic: how often Poisson arrivals find all servers busy, and how long they wait.
//!
//! Loads are in erlangs: arrivals a second times seconds of service. Sources: A. K. Erlang (1917), T. O. Engset (1918).

/// Share of arrivals that find all servers busy and go away (Erlang's first formula).
pub fn erlang_b(servers: u64, load: f64) -> f64 {
    (1..=servers).fold(1.0, |b, n| load * b / (n as f64 + load * b))
}

/// Share of arrivals that find all servers busy and wait (Erlang's second formula), by the recursion of the first,
/// which does not overflow.
pub fn erlang_c(servers: u64, load: f64) -> f64 {
    if load <= 0.0 {
        return 0.0;
    }
    if load >= servers as f64 {
        return 1.0;
    }
    let blocked = erlang_b(servers, load);
    let used = load / servers as f64;
    blocked / (1.0 - used * (1.0 - blocked))
}

/// Share of arrivals that wait longer than `wait` for one of `servers`, each service taking `service` on average, both
/// in seconds. `spread` is the squared coefficient of variation of service times: 1 where they are exponential (then
/// this is exact), 0 where all are alike; the mean of what is left of a wait is taken to lie evenly between that of the
/// two.
pub fn late_share(servers: u64, load: f64, service: f64, spread: f64, wait: f64) -> f64 {
    if load >= servers as f64 {
        return 1.0;
    }
    let used = load / servers as f64;
    let fade = service * (spread / (1.0 - used) + (1.0 - spread) / decay(used)) / servers as f64;
    let long = if fade > 0.0 { (-wait / fade).exp() } else { f64::from(wait <= 0.0) };
    erlang_c(servers, load) * long
}

/// How fast long waits become rare, per service time, where all are alike: the positive root of `used (e^x - 1) = x`
/// (Cramér and Lundberg).
fn decay(used: f64) -> f64 {
    let (mut low, mut high) = (0.0, 64.0);
    for _ in 0..60 {
        let x = f64::midpoint(low, high);
        if used * x.exp_m1() < x { low = x } else { high = x }
    }
    high
}

/// Share of turns of `callers`, each in a turn for `occupied` of its time, that find all servers busy with the others.
pub fn engset(servers: u64, callers: u64, occupied: f64) -> f64 {
    let others = callers.saturating_sub(1);
    if others < servers || occupied <= 0.0 {
        return 0.0;
    }
    if occupied >= 1.0 {
        return 1.0;
    }
    // Binomial, from its first term up; logarithms, as the first term of many callers is no number any more.
    let odds = (occupied / (1.0 - occupied)).ln();
    let mut term = others as f64 * (1.0 - occupied).ln();
    let mut taken = 0.0;
    for n in 0..=others {
        if n >= servers {
            taken += term.exp();
        }
        term += ((others - n) as f64 / (n + 1) as f64).ln() + odds;
    }
    taken.min(1.0)
}

/// Share of the time in which more than `most` are there at once, where `mean` are on average and arrivals are
/// Poisson.
pub fn crowded(most: u64, mean: f64) -> f64 {
    if mean <= 0.0 {
        return 0.0;
    }
    let mut term = -mean;
    let mut within = term.exp();
    for n in 1..=most {
        term += (mean / n as f64).ln();
        within += term.exp();
    }
    (1.0 - within).max(0.0)
}

/// The greatest whole number up to `most` for which `holds`, which must not hold again once it has ceased to.
pub fn greatest(most: u64, holds: impl Fn(u64) -> bool) -> u64 {
    let (mut good, mut bad) = (0, 1);
    while bad <= most && holds(bad) {
        (good, bad) = (bad, bad.saturating_mul(2));
    }
    bad = bad.min(most.saturating_add(1));
    while bad - good > 1 {
        let middle = good + (bad - good) / 2;
        if holds(middle) { good = middle } else { bad = middle }
    }
    good
}

#[cfg(test)]
mod tests {
    use rand::rngs::StdRng;
    use rand::{Rng, SeedableRng};

    use super::*;

    #[test]
    fn erlang_c_is_that_of_the_tables() {
        // Hand-computed: 2 servers, 1 erlang: B = 1/5, C = 1/3. 10 servers, 8 erlang: C = 0.4092 (published tables).
        assert!((erlang_c(2, 1.0) - 1.0 / 3.0).abs() < 1e-12);
        assert!((erlang_c(10, 8.0) - 0.4092).abs() < 0.0005, "{}", erlang_c(10, 8.0));
        assert_eq!((erlang_c(3, 0.0), erlang_c(3, 3.0)), (0.0, 1.0));
        assert!(erlang_c(100_000, 99_000.0) < 0.1, "large systems do not overflow");
    }

    /// Share of turns that wait longer than `wait` in a simulation.
    fn simulate(servers: usize, load: f64, mut service: impl FnMut(&mut StdRng) -> f64, mean: f64, wait: f64) -> f64 {
        let mut rng = StdRng::seed_from_u64(5);
        let mut free = vec![0.0f64; servers];
        let (mut now, mut late, turns) = (0.0, 0u32, 200_000);
        for _ in 0..turns {
            now += chance(&mut rng, load / mean);
            let first = (0..servers).min_by(|a, b| free[*a].total_cmp(&free[*b])).unwrap();
            let start = free[first].max(now);
            late += u32::from(start - now > wait);
            free[first] = start + service(&mut rng);
        }
        f64::from(late) / f64::from(turns)
    }

    fn chance(rng: &mut StdRng, rate: f64) -> f64 {
        -rng.random_range(f64::EPSILON..1.0f64).ln() / rate
    }

    #[test]
    fn an_m_m_c_queue_waits_as_the_formula_says() {
        let simulated = simulate(12, 9.6, |rng| chance(rng, 1.0 / 3.0), 3.0, 0.5);
        let formula = late_share(12, 9.6, 3.0, 1.0, 0.5);
        assert!((simulated - formula).abs() < 0.01, "{simulated} {formula}");
    }

    #[test]
    fn service_times_that_are_all_alike_halve_the_wait() {
        for load in [0.7, 0.8, 0.9] {
            let simulated = simulate(1, load, |_| 0.05, 0.05, 0.2);
            let formula = late_share(1, load, 0.05, 0.0, 0.2);
            // What matters is the load at which a share is reached: the formula is off by so little of it.
            let (under, over) =
                (late_share(1, load * 0.97, 0.05, 0.0, 0.2), late_share(1, load * 1.03, 0.05, 0.0, 0.2));
            assert!((under..over).contains(&simulated), "{load}: {simulated} {formula}");
        }
    }

    #[test]
    fn places_that_are_taken_refuse_as_the_formulas_say() {
        // Hand-computed: B(1, 1) = 1/2, B(2, 1) = 1/5; published tables: B(10, 4.46) = 1 %.
        assert!((erlang_b(1, 1.0) - 0.5).abs() < 1e-12 && (erlang_b(2, 1.0) - 0.2).abs() < 1e-12);
        assert!((erlang_b(10, 4.461) - 0.01).abs() < 1e-4, "{}", erlang_b(10, 4.461));
        // The one place is taken when the other caller speaks; of two others at least one does: 1 - 0.7 * 0.7.
        assert!((engset(1, 2, 0.3) - 0.3).abs() < 1e-12 && (engset(1, 3, 0.3) - 0.51).abs() < 1e-12);
        assert_eq!((engset(5, 5, 0.9), engset(2, 9, 0.0), engset(2, 9, 1.0)), (0.0, 0.0, 1.0));
        assert!((engset(100, 20_000, 0.9) - 1.0).abs() < 1e-6, "many callers are no problem");
    }

    #[test]
    fn a_crowd_is_as_rare_as_the_tables_say() {
        // Published tables of the Poisson distribution: P(X <= 4 | 2) = 0.9473, P(X <= 115 | 100) = 0.9368.
        assert!((crowded(4, 2.0) - 0.0527).abs() < 1e-4 && (crowded(115, 100.0) - 0.0632).abs() < 1e-3);
        assert_eq!(crowded(3, 0.0), 0.0);
        assert!(crowded(1_000, 2_000.0) > 0.999_999);
    }

    #[test]
    fn the_greatest_is_found_wherever_it_is() {
        for limit in [0, 1, 2, 3, 7, 8, 63, 99, 100] {
            assert_eq!(greatest(100, |n| n <= limit), limit);
        }
        assert_eq!((greatest(100, |_| true), greatest(0, |_| true)), (100, 0));
    }
}
