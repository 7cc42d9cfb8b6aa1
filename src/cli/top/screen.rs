//! What `antiphon top` shows: a snapshot and the one before it in, text out.

use std::fmt::Write;

use serde_json::Value;

use super::Snapshot;

/// Draws `now` on at most `rows` lines of `columns` characters. Rates and latencies are of the `seconds` since
/// `before`; without it, of the gateway's whole life.
pub(super) fn draw(now: &Snapshot, before: Option<&Snapshot>, seconds: f64, rows: usize, columns: usize) -> String {
    let mut lines = vec![head(now), String::new()];
    devices(now, &mut lines);
    lines.push(String::new());
    latency(now, before, seconds, &mut lines);
    lines.push(String::new());
    let room = rows.saturating_sub(lines.len() + 2);
    calls(now, room, &mut lines);
    for line in &mut lines {
        if let Some((end, _)) = line.char_indices().nth(columns) {
            line.truncate(end);
        }
    }
    lines.truncate(rows);
    lines.join("\n")
}

fn head(now: &Snapshot) -> String {
    let state = match (now.ready["draining"].as_bool(), now.ready["ready"].as_bool()) {
        (Some(true), _) => "draining",
        (_, Some(true)) => "ready",
        _ => "NOT READY",
    };
    let legs = now.metrics.by("antiphon_calls", "leg");
    let legs: Vec<String> = legs.iter().map(|(leg, count)| format!("{leg} {count:.0}")).collect();
    let speaking = now.calls.iter().filter(|call| call["speaking"] == true).count();
    let calls = now.calls.len();
    format!("antiphon: {state}   calls {calls} ({})   speaking {speaking}", legs.join(", "))
}

fn devices(now: &Snapshot, lines: &mut Vec<String>) {
    lines.push(
        "DEVICE                 ENGINE       STATE     LIVE/CAPACITY  BATCH  QUEUED  LOAD  SLACK    MEMORY".to_owned(),
    );
    for device in now.ready["devices"].as_array().into_iter().flatten() {
        let name = |key: &str| device[key].as_str().unwrap_or("-").to_owned();
        let number = |key: &str| device[key].as_f64();
        let slack = number("slackSeconds").map_or_else(|| "-".to_owned(), |s| format!("{:.0} ms", s * 1e3));
        let gib = |bytes: f64| bytes / f64::from(1 << 30);
        let memory = match (number("memoryUsed"), number("memoryTotal")) {
            (Some(used), Some(total)) if total > 0.0 => format!("{:.1}/{:.1} GiB", gib(used), gib(total)),
            _ => "-".to_owned(),
        };
        let mut line = format!("{:<22} {:<12} {:<9}", name("device"), name("engine"), name("state"));
        let live = format!("{:.0}/{:.0}", number("live").unwrap_or(0.0), number("capacity").unwrap_or(0.0));
        let count = |key: &str| number(key).unwrap_or(0.0);
        // Writing to a String cannot fail.
        let _ = write!(
            line,
            " {live:>13}  {:>5.0}  {:>6.0}  {:>3.0}%  {slack:>7}  {memory}",
            count("batch"),
            count("queued"),
            count("load") * 100.0
        );
        lines.push(line);
        if let Some(error) = device["error"].as_str() {
            lines.push(format!("    {error}"));
        }
    }
}

fn latency(now: &Snapshot, before: Option<&Snapshot>, seconds: f64, lines: &mut Vec<String>) {
    let earlier = before.map(|snapshot| &snapshot.metrics);
    let milliseconds = |name: &str, q: f64| {
        // A quiet second has no latency of its own: the gateway's whole life stands in.
        let value = now.metrics.quantile(name, q, earlier).or_else(|| now.metrics.quantile(name, q, None));
        value.map_or_else(|| "-".to_owned(), |value| format!("{:.0}", value * 1e3))
    };
    for (title, name) in
        [("first audio", "antiphon_first_audio_seconds"), ("packet lateness", "antiphon_pacing_lateness_seconds")]
    {
        let [p50, p95, p99] = [0.5, 0.95, 0.99].map(|q| milliseconds(name, q));
        lines.push(format!("{title:<16} p50 {p50:>5}  p95 {p95:>5}  p99 {p99:>5} ms"));
    }
    let since =
        |name: &str, label: &str| now.metrics.sum(name, label) - earlier.map_or(0.0, |before| before.sum(name, label));
    let unit = if before.is_some() { "/s" } else { "" };
    let per = if before.is_some() { seconds } else { 1.0 };
    let rate = |name: &str, label: &str| format!("{:.1}{unit}", since(name, label) / per);
    lines.push(format!(
        "turns {}   refused {}   failed {}   underruns {:.0}   RTP out {}   queue live {:.0}, batch {:.0}",
        rate("antiphon_turns_total", ""),
        rate("voice_requests_total", "outcome=\"refused\""),
        rate("voice_requests_total", "outcome=\"failed\""),
        now.metrics.sum("antiphon_underruns_total", ""),
        rate("antiphon_rtp_packets_total", "direction=\"sent\""),
        now.metrics.sum("antiphon_scheduler_queue_depth", "class=\"live\""),
        now.metrics.sum("antiphon_scheduler_queue_depth", "class=\"batch\""),
    ));
}

fn calls(now: &Snapshot, room: usize, lines: &mut Vec<String>) {
    lines.push(
        "CALL                                  LEG     CODEC  AGENT         STATE       AGE  TURNS  FIRST AUDIO  LOSS"
            .to_owned(),
    );
    // The longest-lived last: what has just begun is what one looks for.
    let mut sorted: Vec<&Value> = now.calls.iter().collect();
    sorted.sort_by(|a, b| b["startedMs"].as_u64().cmp(&a["startedMs"].as_u64()));
    for call in sorted.iter().take(room) {
        let name = |key: &str| call[key].as_str().unwrap_or("-").to_owned();
        let state = match () {
            () if call["held"] == true => "held".to_owned(),
            () if call["speaking"] == true => "speaking".to_owned(),
            () if call["callerSpeaking"] == true => "listening".to_owned(),
            () => name("state"),
        };
        let first = call["firstAudioMs"].as_f64().map_or_else(|| "-".to_owned(), |ms| format!("{ms:.0} ms"));
        lines.push(format!(
            "{:<37} {:<7} {:<6} {:<13} {state:<10} {:>4}s  {:>5}  {first:>11}  {:>3.0}%",
            printable(&name("id")),
            name("leg"),
            name("codec"),
            printable(&name("agent")),
            call["durationMs"].as_u64().unwrap_or(0) / 1_000,
            call["turns"].as_u64().unwrap_or(0),
            call["fractionLost"].as_f64().unwrap_or(0.0) * 100.0,
        ));
    }
    if sorted.len() > room {
        lines.push(format!("... and {} more", sorted.len() - room));
    }
}

/// Names that strangers chose do not steer the terminal.
fn printable(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { '?' } else { c }).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::super::metrics::Metrics;
    use super::*;

    fn snapshot(turns: u32) -> Snapshot {
        Snapshot {
            ready: json!({ "ready": true, "draining": false, "devices": [{
                "device": "cuda:0", "engine": "cosyvoice3", "state": "ready", "live": 3, "capacity": 161, "batch": 2,
                "queued": 1, "load": 0.25, "slackSeconds": 0.125, "memoryUsed": 1u64 << 30, "memoryTotal": 2u64 << 30,
            }]}),
            calls: (0..5)
                .map(|n| {
                    json!({ "id": format!("c{n}"), "leg": "sip", "codec": "pcmu", "agent": "de\u{1b}mo",
                    "state": "connected", "startedMs": n, "durationMs": 61_000, "turns": 2, "speaking": n == 0 })
                })
                .collect(),
            metrics: Metrics::parse(&format!(
                "antiphon_turns_total{{leg=\"sip\",how=\"spoken\"}} {turns}\nantiphon_calls{{leg=\"sip\"}} 5\n"
            )),
        }
    }

    #[test]
    fn rates_are_since_the_last_look() {
        let text = draw(&snapshot(10), Some(&snapshot(4)), 2.0, 40, 200);
        assert!(text.contains("turns 3.0/s"), "{text}");
        assert!(text.contains("calls 5 (sip 5)   speaking 1"), "{text}");
        assert!(text.contains("3/161"), "{text}");
        assert!(text.contains("25%"), "{text}");
        assert!(text.contains("1.0/2.0 GiB"), "{text}");
    }

    #[test]
    fn it_fits_the_terminal_and_the_newest_call_comes_first() {
        let text = draw(&snapshot(1), None, 1.0, 13, 40);
        assert!(text.lines().count() <= 13, "{text}");
        assert!(text.lines().all(|line| line.chars().count() <= 40), "{text}");
        assert!(text.contains("c4") && !text.contains("c0 "), "{text}");
        assert!(text.contains("more"), "{text}");
    }

    #[test]
    fn a_name_from_outside_does_not_steer_the_terminal() {
        assert!(!draw(&snapshot(1), None, 1.0, 40, 200).contains('\u{1b}'));
    }
}
