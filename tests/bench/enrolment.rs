//! Enrolment at full size: random networks with the released sizes, 5, 15 and 30 s of speech.

use antiphon::voice::bench::{self, Config};

#[test]
#[ignore = "writes 1 GB of weights and computes for about a minute"]
fn full_size_enrolment_stays_under_two_gigabytes() {
    let scratch = tempfile::tempdir().expect("temp dir");
    let config = Config { seconds: vec![5, 15, 30], model: None, scratch: scratch.path().to_owned(), threads: 0 };
    let report = bench::run(&config).expect("measured");
    println!("{report}");
    for row in &report.rows {
        assert!(row.peak.is_none_or(|p| p < 2_000_000_000), "{} s took {:?} bytes", row.seconds, row.peak);
    }
}
