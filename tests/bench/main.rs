//! Measurements, printed. Run alone, with `cargo test --test bench -- --ignored --nocapture`; they assert nothing
//! about time, because what else runs on a machine is no property of this code.

mod enrolment;
mod remote;
mod text_rates;
mod written;

use std::time::Duration;

use antiphon::call::bench::EgressPacing;
use antiphon::media::bench;

#[test]
#[ignore = "takes a minute and the whole machine"]
fn departures_of_200_calls() {
    let report = EgressPacing { time: Duration::from_secs(8), ..EgressPacing::default() }.run().unwrap();
    println!("{report}");
    assert!(report.rows.iter().all(|row| row.packets > 0 && row.underruns == 0));
}

#[test]
#[ignore = "takes some seconds of a core"]
fn codecs() {
    for cost in bench::codecs(1_500).unwrap() {
        let bytes = cost.bytes.map_or_else(String::new, |bytes| format!("{bytes:.0} bytes"));
        let delay = cost.delay_ms.map_or_else(String::new, |delay| format!("{delay:.1} ms delay"));
        println!("{:<32} {:>7.1} us a frame {bytes:>10} {delay}", cost.name, cost.micros);
    }
}

/// Few calls for a moment: that the measurement itself works is tested everywhere.
#[test]
fn departures_measure_real_calls() {
    let report = EgressPacing { calls: 4, time: Duration::from_millis(500), shards: 1 }.run().unwrap();
    assert_eq!(report.rows.len(), 6);
    for row in &report.rows {
        assert!(row.packets >= 40 && row.delivered > 0.9, "{row:?}");
        assert!(row.cpu_percent_per_call > 0.0, "{row:?}");
    }
}
