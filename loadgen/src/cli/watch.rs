//! Showing a measurement as it goes: bars on a terminal, a line for each level elsewhere.

use std::io::IsTerminal as _;
use std::time::Duration;

use antiphon_loadgen::load::Progress;
use antiphon_loadgen::predict;
use antiphon_loadgen::report::{Level, Report};
use indicatif::{ProgressBar, ProgressStyle};

pub(crate) struct Watch {
    bar: Option<ProgressBar>,
    terminal: bool,
    seconds: u64,
}

impl Watch {
    pub(crate) fn new(duration: Duration) -> Watch {
        Watch { bar: None, terminal: std::io::stderr().is_terminal(), seconds: duration.as_secs().max(1) }
    }

    pub(crate) fn show(&mut self, name: &str, progress: &Progress, done: Option<&Level>) {
        if let Some(level) = done {
            if let Some(bar) = self.bar.take() {
                bar.finish_and_clear();
            }
            eprintln!("{}", line(name, level));
            return;
        }
        if !self.terminal {
            return;
        }
        let bar = self.bar.get_or_insert_with(|| {
            let style = ProgressStyle::with_template("{prefix:>12} [{bar:30}] {elapsed} {msg}");
            let bar = ProgressBar::new(self.seconds * 10);
            bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
            bar
        });
        bar.set_prefix(name.to_owned());
        bar.set_position((progress.done * self.seconds as f64 * 10.0) as u64);
        bar.set_message(format!(
            "{} calls, {} turns, first audio p95 {:.0} ms, {} failed",
            progress.calls,
            progress.turns,
            progress.first_audio_p95 * 1_000.0,
            progress.failures
        ));
    }
}

fn line(name: &str, level: &Level) -> String {
    let failed: u64 = level.failures.values().sum();
    let gateway =
        level.gateway.map(|u| format!("  gateway {:.2} cores {} MB", u.cores, u.rss >> 20)).unwrap_or_default();
    let spoken = match &level.mouth_to_ear {
        of if of.count > 0 => format!("  mouth to ear p50 {:.0} p95 {:.0} ms", of.p50 * 1e3, of.p95 * 1e3),
        _ => String::new(),
    };
    let verdict = if level.broken.is_empty() { "ok".to_owned() } else { level.broken.join("; ") };
    format!(
        "{name:>12}  turns {:>5}  first audio p50 {:>4.0} p95 {:>4.0} p99 {:>4.0} ms  RTF p95 {:.3}  {:>6.1} chars/s  \
         {:>5.1} audio-s/s  stalled {}  failed {failed}{spoken}{gateway}  {verdict}",
        level.turns,
        level.first_audio.p50 * 1e3,
        level.first_audio.p95 * 1e3,
        level.first_audio.p99 * 1e3,
        level.rtf.p95,
        level.chars_per_s,
        level.audio_s_per_s,
        level.stalled_turns,
    )
}

/// What is to be concluded, on standard output.
pub(crate) fn conclude(report: &Report) {
    for verdict in report.verdicts().into_iter().chain(predict::verdict(report)) {
        println!("{} {:<20} {}", if verdict.holds { "✓" } else { "✗" }, verdict.name, verdict.text);
    }
    if let Some(knee) = report.knee {
        match knee.broken_at {
            Some(bad) => println!("  knee                 {} calls pass, {bad} do not", knee.level),
            None => println!("  knee                 not reached: {} calls pass", knee.level),
        }
    }
    for note in &report.notes {
        println!("  note                 {note}");
    }
}
