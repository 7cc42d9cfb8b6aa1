//! How good a call can have sounded, from what its packets suffered: the E-model (ITU-T G.107) with its default values.
//!
//! Pure arithmetic. It says what the network did to a call, and nothing of the codec or the voice: the impairment of G.711
//! with loss concealment (G.113 appendix I: Ie 0, Bpl 25.1) is taken for every codec, so that calls can be compared.

use std::time::Duration;

/// R without any impairment (G.107 section 7.1, default values).
const BEST: f64 = 93.2;
/// Robustness of the codec against random loss, in percent.
const BPL: f64 = 25.1;
/// What a receiver's jitter buffer adds at least.
const BUFFER: Duration = Duration::from_millis(40);

/// Mean opinion score, 1 to 4.4, of one direction: `loss` is the share of packets lost, `delay` from mouth to ear without
/// the receiver's buffer, `jitter` the interarrival jitter, of which the buffer takes twice.
pub fn mos(loss: f64, delay: Duration, jitter: Duration) -> f64 {
    let percent = if loss.is_finite() { loss.clamp(0.0, 1.0) * 100.0 } else { 100.0 };
    let delay = (delay + BUFFER.max(jitter * 2)).as_secs_f64() * 1e3;
    // The usual approximation of Id: nothing to speak of up to 177 ms, then people interrupt each other.
    let slow = 0.024 * delay + 0.11 * (delay - 177.3).max(0.0);
    let lossy = 95.0 * percent / (percent + BPL);
    score(BEST - slow - lossy)
}

/// G.107 annex B.
fn score(r: f64) -> f64 {
    match r {
        r if r <= 0.0 => 1.0,
        r if r >= 100.0 => 4.5,
        r => (1.0 + 0.035 * r + r * (r - 60.0) * (100.0 - r) * 7e-6).clamp(1.0, 4.5),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn near(found: f64, wanted: f64) {
        assert!((found - wanted).abs() < 0.05, "{found} is not {wanted}");
    }

    #[test]
    fn the_score_is_that_of_the_e_model() {
        // G.107 annex B, table B.1: R of 93.2, 80, 70, 60 and 50.
        for (r, wanted) in [(93.2, 4.41), (80.0, 4.03), (70.0, 3.60), (60.0, 3.10), (50.0, 2.58)] {
            near(score(r), wanted);
        }
        let ms = Duration::from_millis;
        near(mos(0.0, ms(20), ms(2)), 4.38);
        // 5 % of random loss with concealment costs about 16 of R, 440 ms about 39.
        near(mos(0.05, ms(20), ms(2)), 3.86);
        near(mos(0.0, ms(400), ms(2)), 2.77);
    }

    #[test]
    fn it_never_rises_with_loss_delay_or_jitter_and_stays_in_range() {
        let ms = Duration::from_millis;
        let mut before = 5.0;
        for percent in 0..=100 {
            let now = mos(f64::from(percent) / 100.0, ms(10 * percent as u64), ms(2 * percent as u64));
            assert!((1.0..=4.5).contains(&now) && now <= before + 1e-9, "{percent}: {now} after {before}");
            before = now;
        }
        assert_eq!(mos(f64::NAN, Duration::MAX / 4, Duration::ZERO), 1.0);
    }
}
