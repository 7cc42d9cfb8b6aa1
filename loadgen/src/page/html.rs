//! A report as one page that needs nothing else: tables, charts, verdicts.

use std::fmt::Write as _;

use crate::forecast::beside;
use crate::forecast::predict;
use crate::forecast::size;
use crate::page::chart::{self, Series, escape, number};
use crate::run::report::{Level, Limits, P95_TURNS, PUBLISHED, Published, RTX5090_20, RTX5090_80, Report};
use crate::turns::stats::Summary;
use crate::under_test::process::Usage;
use crate::under_test::stages::ORDER;

/// As [`P95_TURNS`], for the 99th percentile.
const P99_TURNS: u64 = 100;

/// The page.
pub fn page(report: &Report) -> String {
    compared(report, None)
}

/// The page, with another report's figures beside it.
pub fn compared(report: &Report, before: Option<&Report>) -> String {
    let mut body = String::new();
    head(&mut body, report);
    verdicts(&mut body, report);
    if let Some(before) = before {
        comparison(&mut body, report, before);
    }
    charts(&mut body, report, before);
    table(&mut body, report);
    inside(&mut body, report);
    let found = size::Measured::from_report(report);
    if let Some(found) = &found {
        sizes(&mut body, found);
    }
    prediction(&mut body, report);
    if !report.levels.is_empty() {
        published(&mut body, &beside::tables(report, found.as_ref()));
    }
    notes(&mut body, report);
    format!(
        "<!DOCTYPE html><html lang='en'><head><meta charset='utf-8'><meta name='viewport' content='width=device-width'>\
         <meta http-equiv='Content-Security-Policy' content=\"default-src 'none'; style-src 'unsafe-inline'; \
         script-src 'unsafe-inline'; img-src data: blob:\">\
         <title>{}</title><style>{STYLE}</style></head><body><main>{body}</main><script>{SCRIPT}</script></body></html>\n",
        escape(&title(report))
    )
}

/// What was measured, of what, on what.
fn title(report: &Report) -> String {
    let levels = report.levels.iter().filter(|l| l.turns > 0).map(|l| l.level);
    let calls = match (levels.clone().min(), levels.max()) {
        (Some(least), Some(most)) if least < most => format!("{least} to {most} calls"),
        (Some(level), _) => format!("{level} calls"),
        _ => return format!("{}: no call was heard", report.name),
    };
    let voices = report.devices.as_array().map(|all| all.iter().map(device).collect::<Vec<_>>()).unwrap_or_default();
    let on = if voices.is_empty() { String::new() } else { format!(", {}", voices.join("; ")) };
    format!("What callers hear at {calls}{on} ({})", report.name)
}

/// The percentile, where there are turns enough for it.
fn of_turns(value: f64, count: u64, least: u64) -> f64 {
    if count >= least { value } else { f64::NAN }
}

/// Level by level: both, and by how much the first differs from the second.
fn comparison(out: &mut String, report: &Report, before: &Report) {
    let _ = write!(
        out,
        "<h2>Compared with {}</h2><p><code>{}</code></p><table><thead><tr><th>calls<th>first audio p50<th>before<th>change\
         <th>p95<th>before<th>change<th>chars/s<th>before<th>change<th>stalled turns<th>before</tr></thead><tbody>",
        escape(&title(before)),
        escape(&before.command)
    );
    for l in report.levels.iter().filter(|l| l.turns > 0) {
        let Some(b) = before.levels.iter().find(|b| b.level == l.level && b.mode == l.mode && b.turns > 0) else {
            continue;
        };
        let _ = write!(out, "<tr><td>{}", l.level);
        let p95 = |l: &Level| of_turns(l.first_audio.p95, l.first_audio.count, P95_TURNS) * 1e3;
        let pairs = [
            (l.first_audio.p50 * 1e3, b.first_audio.p50 * 1e3, " ms"),
            (p95(l), p95(b), " ms"),
            (l.chars_per_s, b.chars_per_s, ""),
        ];
        for (now, then, unit) in pairs {
            let change = (now / then - 1.0) * 100.0;
            let told =
                |value: f64| if value.is_finite() { format!("{}{unit}", number(value)) } else { "–".to_owned() };
            let change = if change.is_finite() { format!("{change:+.0} %") } else { "–".to_owned() };
            let _ = write!(out, "<td>{}<td>{}<td>{change}", told(now), told(then));
        }
        let _ = write!(out, "<td>{}<td>{}</tr>", l.stalled_turns, b.stalled_turns);
    }
    out.push_str("</tbody></table>");
}

fn head(out: &mut String, report: &Report) {
    let host = &report.host;
    let devices = report.devices.as_array().map(|all| all.iter().map(device).collect::<Vec<_>>().join("; "));
    let _ = write!(
        out,
        "<h1>{}</h1><p>{} · {} · {} cores, {:.1} GB · Linux {}</p><p><code>{}</code></p>",
        escape(&title(report)),
        escape(&report.targets.join(", ")),
        escape(&host.cpu),
        host.cores,
        host.memory as f64 / 1e9,
        escape(&host.kernel),
        escape(&report.command)
    );
    if let Some(devices) = devices.filter(|d| !d.is_empty()) {
        let _ = write!(out, "<p>Speaks with {}</p>", escape(&devices));
    }
    if let Some(why) = &report.ended_early {
        let _ = write!(out, "<p class='bad'><b>Ended early:</b> {}</p>", escape(why));
    }
}

fn device(value: &serde_json::Value) -> String {
    let told = |key: &str| value[key].as_str().map(|text| if text == "cpu" { "on the CPU" } else { text });
    ["engine", "name", "device", "kind"].iter().filter_map(|key| told(key)).collect::<Vec<_>>().join(" ")
}

fn verdicts(out: &mut String, report: &Report) {
    out.push_str("<h2>Verdicts</h2><ul class='verdicts'>");
    // A limit on a percentile is confirmed by no handful of turns, and nothing by a run that was stopped.
    let few = report.levels.iter().any(|l| l.turns > 0 && l.first_audio.count < P95_TURNS);
    for verdict in report.verdicts().into_iter().chain(predict::verdict(report)) {
        let open = verdict.holds && few && verdict.name.starts_with("Interactive");
        let _ = write!(
            out,
            "<li class='{}'><b>{}</b> {}{}</li>",
            if open {
                "open"
            } else if verdict.holds {
                "good"
            } else {
                "bad"
            },
            escape(&verdict.name),
            escape(&verdict.text),
            if open { "; not confirmed: some level has fewer than 20 turns" } else { "" }
        );
    }
    if let Some(knee) = report.knee {
        let text = match knee.broken_at {
            Some(bad) => format!("{} calls pass, {bad} do not", knee.level),
            None => format!("not reached: {} calls pass", knee.level),
        };
        let _ = write!(out, "<li><b>Knee</b> {text}</li>");
    }
    out.push_str("</ul>");
}

fn charts(out: &mut String, report: &Report, before: Option<&Report>) {
    let levels = &report.levels;
    if levels.is_empty() {
        return;
    }
    let ours = |name: &str, value: fn(&Level) -> f64| Series {
        name: name.to_owned(),
        points: levels.iter().filter(|l| l.turns > 0).map(|l| (f64::from(l.level), value(l))).collect(),
        foreign: false,
    };
    let earlier = |name: &str, value: fn(&Level) -> f64| Series {
        name: format!("before: {name}"),
        points: before
            .iter()
            .flat_map(|report| &report.levels)
            .filter(|l| l.turns > 0)
            .map(|l| (f64::from(l.level), value(l)))
            .collect(),
        foreign: false,
    };
    let theirs = |system: &'static str, value: fn(&Published) -> Option<f64>| Series {
        name: format!("published: {system}"),
        points: PUBLISHED
            .iter()
            .filter(|p| p.system == system)
            .filter_map(|p| Some((f64::from(p.level), value(p)?)))
            .collect(),
        foreign: true,
    };
    out.push_str("<h2>Charts</h2><div class='charts'>");
    let first = [
        ours("p50", |l| l.first_audio.p50),
        ours("p95", |l| of_turns(l.first_audio.p95, l.first_audio.count, P95_TURNS)),
        ours("p99", |l| of_turns(l.first_audio.p99, l.first_audio.count, P99_TURNS)),
        earlier("p50", |l| l.first_audio.p50),
        earlier("p95", |l| of_turns(l.first_audio.p95, l.first_audio.count, P95_TURNS)),
        theirs(RTX5090_20, |p| Some(p.first_audio_p95)),
        theirs(RTX5090_80, |p| Some(p.first_audio_p95)),
    ];
    let limit = Some(report.limits.first_audio_p95);
    out.push_str(&chart::lines("First audible sample after the turn", "calls", "seconds, log", &first, limit, true));
    let rtf = [
        ours("p50", |l| l.rtf.p50),
        ours("p95", |l| of_turns(l.rtf.p95, l.rtf.count, P95_TURNS)),
        theirs(RTX5090_20, |p| Some(p.rtf_p95)),
        theirs(RTX5090_80, |p| Some(p.rtf_p95)),
    ];
    out.push_str(&chart::lines(
        "Real-time factor of what is heard",
        "calls",
        "time / speech",
        &rtf,
        Some(report.limits.rtf_p95),
        true,
    ));
    let chars = [
        ours("chars/s", |l| l.chars_per_s),
        earlier("chars/s", |l| l.chars_per_s),
        theirs(RTX5090_20, |p| p.chars_per_s),
    ];
    out.push_str(&chart::lines("Throughput in characters", "calls", "chars/s", &chars, None, false));
    let audio = [ours("audio-s/s", |l| l.audio_s_per_s)];
    out.push_str(&chart::lines("Throughput in speech", "calls", "audio-s/s", &audio, None, false));
    let stalls = [ours("% of turns that stall", |l| l.stalled_turns as f64 / l.turns.max(1) as f64 * 100.0)];
    out.push_str(&chart::lines(
        "Underruns as heard",
        "calls",
        "% of turns",
        &stalls,
        Some(report.limits.stalled_turns * 100.0),
        false,
    ));
    if levels.iter().any(|l| l.gateway.is_some()) {
        let cores = [
            ours("gateway", |l| l.gateway.map_or(f64::NAN, |u| u.cores)),
            ours("generator", |l| l.generator.map_or(f64::NAN, |u| u.cores)),
        ];
        out.push_str(&chart::lines("Cores in use", "calls", "cores", &cores, None, false));
        let mut memory = vec![ours("gateway", |l| l.gateway.map_or(f64::NAN, |u| u.rss as f64 / 1e6))];
        if levels.iter().any(|l| l.metrics.gpu_memory > 0.0) {
            memory.push(ours("device", |l| l.metrics.gpu_memory / 1e6));
        }
        out.push_str(&chart::lines("Memory", "calls", "MB", &memory, None, false));
    }
    let stages: Vec<(String, Vec<(String, f64)>)> = levels
        .iter()
        .filter(|l| !l.metrics.stage_seconds.is_empty())
        .map(|l| (format!("{}", l.level), l.metrics.stage_seconds.clone().into_iter().collect()))
        .collect();
    if !stages.is_empty() {
        let whose = if report.has_gpu() { "Device time by stage, by calls" } else { "CPU time by stage, by calls" };
        out.push_str(&chart::stacks(whose, &stages));
    }
    let compare = levels.iter().find(|l| l.level >= 4 && l.turns > 0).or(levels.first());
    if let Some(level) = compare {
        let enough = level.first_audio.count >= P95_TURNS;
        let (which, ours) = if enough {
            ("p95", level.first_audio.p95)
        } else {
            ("p50 (too few turns for p95)", level.first_audio.p50)
        };
        let mut rows = vec![(format!("this run, {} calls, {which}", level.level), ours, true)];
        let nearest = |system: &str| {
            PUBLISHED.iter().filter(|p| p.system == system).min_by_key(|p| p.level.abs_diff(level.level))
        };
        for system in [RTX5090_20, RTX5090_80] {
            rows.extend(nearest(system).map(|p| (format!("{system}: {}", p.level), p.first_audio_p95, false)));
        }
        rows.push(("CosyVoice3-0.5B, TensorRT-LLM (expected)".to_owned(), 0.2, false));
        rows.push(("S1-mini service, A10G: whole request".to_owned(), 2.5, false));
        out.push_str(&chart::bars(
            "First audio p95 beside published systems (other hardware, other voices)",
            "s",
            &rows,
        ));
    }
    if let Some(w) = &report.waterfall {
        let mut steps = Vec::new();
        if let Some(accepted) = w.accepted {
            steps.push(("text taken (202)".to_owned(), 0.0, accepted));
        }
        steps.push(("text to first packet".to_owned(), 0.0, w.first_packet));
        // The gateway's clock is another: what it tells ends with the first packet, or a way through the network before it.
        let mut at = (w.first_packet - w.stages.iter().map(|(_, time)| time).sum::<f64>()).max(0.0);
        for (name, time) in &w.stages {
            steps.push((format!("gateway: {}", stage(name)), at, at + time));
            at += time;
        }
        steps.push(("packet to audible sample".to_owned(), w.first_packet, w.first_audio));
        if let Some(announced) = w.announced {
            steps.push(("announced by the gateway".to_owned(), 0.0, announced));
        }
        steps.push(("speech".to_owned(), w.first_audio, w.last_audio));
        steps.extend(w.stalls.iter().map(|(at, length)| ("stall".to_owned(), *at, at + length)));
        let title = format!("One turn on {}, from text to sound: {:?}", w.leg, w.text);
        // Of a turn without stalls the beginning is what there is to see.
        let until = if w.stalls.is_empty() { (w.first_audio * 3.0).min(w.last_audio) } else { w.last_audio };
        out.push_str(&chart::timeline(&title, &steps, until));
    }
    out.push_str("</div>");
}

fn table(out: &mut String, report: &Report) {
    out.push_str(
        "<h2>Levels</h2><table><thead><tr><th>calls<th>mode<th>turns<th>first audio p50<th>p95<th>p99<th>RTF p95\
         <th>set-up p95<th>chars/s<th>audio-s/s<th>stalled<th>lost<th>jitter p95<th>lateness p99<th>MOS<th>barge-in p95\
         <th>correlation<th>cores<th>MB<th>CPU a call<th>generator a call<th>failures</tr></thead><tbody>",
    );
    let ms = |s: f64| number(s * 1e3);
    let told = |s: f64| if s.is_finite() { format!("{} ms", ms(s)) } else { "–".to_owned() };
    let share = |l: &Level, usage: Option<Usage>| {
        usage.map_or("–".to_owned(), |u| format!("{} %", number(u.cores / l.concurrency.max(1.0) * 100.0)))
    };
    let dash = |count: u64, text: String| if count == 0 { "–".to_owned() } else { text };
    let spoken = report.levels.iter().filter(|l| l.mouth_to_ear.count > 0);
    let spoken: Vec<String> = spoken
        .map(|l| {
            let of = &l.mouth_to_ear;
            let p95 = told(of_turns(of.p95, of.count, P95_TURNS));
            format!("<p>{} calls, mouth to ear: p50 {} ms, p95 {p95}, of {} turns</p>", l.level, ms(of.p50), of.count)
        })
        .collect();
    for l in &report.levels {
        let failures: Vec<String> = l.failures.iter().map(|(cause, n)| format!("{n} {cause}")).collect();
        let lost = l.packets_lost as f64 / (l.packets + l.packets_lost).max(1) as f64 * 100.0;
        let _ = write!(
            out,
            "<tr class='{}'><td>{}<td>{}<td>{}<td>{} ms<td>{}<td>{}<td>{}<td>{} ms<td>{}<td>{}<td>{}<td>{} %<td>{} ms<td>{} ms<td>{}<td>{}<td>{}<td>{}<td>{}<td>{}<td>{}<td>{}</tr>",
            if l.broken.is_empty() { "good" } else { "bad" },
            l.level,
            escape(&l.mode),
            l.turns,
            ms(l.first_audio.p50),
            told(of_turns(l.first_audio.p95, l.first_audio.count, P95_TURNS)),
            told(of_turns(l.first_audio.p99, l.first_audio.count, P99_TURNS)),
            dash(u64::from(l.rtf.count >= P95_TURNS), number(l.rtf.p95)),
            ms(l.setup.p95),
            number(l.chars_per_s),
            number(l.audio_s_per_s),
            l.stalled_turns,
            number(lost),
            ms(l.jitter.p95),
            ms(l.lateness.p99),
            number(l.mos.p50),
            dash(l.barge_in.count, format!("{} ms", ms(l.barge_in.p95))),
            dash(l.correlation.count, number(l.correlation.p50)),
            l.gateway.map_or("–".to_owned(), |u| number(u.cores)),
            l.gateway.map_or("–".to_owned(), |u| number(u.rss as f64 / 1e6)),
            share(l, l.gateway),
            share(l, l.generator),
            escape(&failures.join(", "))
        );
    }
    out.push_str("</tbody></table>");
    out.push_str(&spoken.concat());
    for l in &report.levels {
        let words = l.words.map(|words| format!("words that a recogniser gets wrong in sampled turns: {words}"));
        let deaf = l.deaf.as_ref().map(|why| format!("no recogniser listened: {why}"));
        for told in words.into_iter().chain(deaf) {
            let _ = write!(out, "<p>{} calls, {}</p>", l.level, escape(&told));
        }
    }
    for l in report.levels.iter().filter(|l| !l.metrics.refusals.is_empty()) {
        let by: Vec<String> = l.metrics.refusals.iter().map(|(reason, n)| format!("{n} {reason}")).collect();
        let _ = write!(out, "<p>{} calls, turns that the gateway refused: {}</p>", l.level, escape(&by.join(", ")));
    }
    for l in report.levels.iter().filter(|l| !l.broken.is_empty()) {
        let _ = write!(out, "<p class='bad'>{} calls: {}</p>", l.level, escape(&l.broken.join("; ")));
    }
}

/// Where first audio went, beside what was heard.
fn inside(out: &mut String, report: &Report) {
    let told: Vec<&Level> = report.levels.iter().filter(|l| !l.stages.is_empty()).collect();
    if told.is_empty() {
        return;
    }
    let names = ORDER.iter().chain(&["outside"]).filter(|stage| told.iter().any(|l| l.stages.contains_key(**stage)));
    let names: Vec<&str> = names.copied().collect();
    out.push_str("<h2>Where first audio goes</h2><table><thead><tr><th>calls<th>turns<th>heard");
    for name in &names {
        let _ = write!(out, "<th>{}", stage(name));
    }
    out.push_str("</tr></thead><tbody>");
    let cell = |of: &Summary| {
        let p95 = of_turns(of.p95, of.count, P95_TURNS);
        let p95 = if p95.is_finite() { format!(" / {}", number(p95 * 1e3)) } else { String::new() };
        format!("<td>{}{p95} ms", number(of.p50 * 1e3))
    };
    for l in told {
        let turns = l.stages.values().map(|of| of.count).max().unwrap_or(0);
        let _ = write!(out, "<tr><td>{}<td>{turns}{}", l.level, cell(&l.first_audio));
        for name in &names {
            out.push_str(&l.stages.get(*name).map_or("<td>–".to_owned(), cell));
        }
        out.push_str("</tr>");
    }
    out.push_str(
        "</tbody></table><p>p50 / p95 of each by itself. Heard is from the text to the first audible sample, by the caller; \
         what is inside the gateway is told by it, turn by turn; outside is the rest: the request, the network, and what of \
         the first packets is silent.</p>",
    );
}

/// A stage's name for people.
fn stage(name: &str) -> &str {
    match name {
        "wait" => "waits for the device",
        "firstToken" => "first tokens",
        "firstMel" => "flow",
        "firstPcm" => "vocoder",
        "speech" => "rest of the voice",
        "egress" => "encoding and pacing",
        "outside" => "outside",
        other => other,
    }
}

fn sizes(out: &mut String, measured: &size::Measured) {
    let demand = size::Demand::default();
    let _ = write!(
        out,
        "<h2>Size</h2><p>A gateway has {}.</p><table><thead><tr><th>users<th>calls at a time, busy hour<th>gateways\
         <th>GPUs<th>cores</tr></thead><tbody>",
        escape(&measured.with())
    );
    for users in [1_000, 10_000, 50_000] {
        let row = size::plan(&size::Demand { users, ..demand.clone() }, measured);
        let _ = write!(
            out,
            "<tr><td>{users}<td>{}<td>{}<td>{}<td>{}</tr>",
            number(row.calls),
            row.gateways,
            row.gpus.map_or("–".to_owned(), |gpus| gpus.to_string()),
            row.cores.map_or("–".to_owned(), number)
        );
    }
    out.push_str("</tbody></table><ul>");
    for line in size::assumptions(&demand, measured) {
        let _ = write!(out, "<li>{}</li>", escape(&line));
    }
    out.push_str("</ul>");
}

fn published(out: &mut String, tables: &[beside::Table]) {
    out.push_str("<h2>Beside published systems</h2>");
    for table in tables {
        let _ = write!(out, "<h3>{}</h3><table><thead><tr>", escape(&table.title));
        for name in &table.head {
            let _ = write!(out, "<th>{}", escape(name));
        }
        out.push_str("</tr></thead><tbody>");
        for row in &table.rows {
            out.push_str("<tr>");
            for cell in row {
                let _ = write!(out, "<td>{}", escape(cell));
            }
            out.push_str("</tr>");
        }
        out.push_str("</tbody></table>");
    }
}

fn prediction(out: &mut String, report: &Report) {
    let (Some(predicted), Some(knee)) = (predict::predict(report), report.knee) else { return };
    let (found, deviation) = match predicted.deviation(&knee) {
        Some(off) => (number(f64::from(knee.level)), format!("{:+.0} %", off * 100.0)),
        None => (format!("over {}", knee.level), "–".to_owned()),
    };
    let _ = write!(
        out,
        "<h2>Prediction</h2><table><thead><tr><th>from levels<th>what runs out<th>predicted calls<th>found\
         <th>deviation</tr></thead><tbody><tr><td>{}<td>{}<td>{}<td>{found}<td>{deviation}</tr></tbody></table>\
         <table><thead><tr><th>what may run out<th>at calls<th>by</tr></thead><tbody>",
        predicted.levels(),
        predicted.bound,
        number(predicted.capacity.round()),
    );
    for bound in &predicted.bounds {
        let _ = write!(
            out,
            "<tr><td>{}<td>{}<td class='text'>{}</tr>",
            bound.what,
            number(bound.calls.round()),
            escape(&bound.basis)
        );
    }
    out.push_str("</tbody></table>");
}

fn notes(out: &mut String, report: &Report) {
    out.push_str("<h2>Notes</h2><ul>");
    for note in &report.notes {
        let _ = write!(out, "<li>{}</li>", escape(note));
    }
    let worst = report.levels.iter().map(|l| l.generator_lateness_p99).fold(0.0, f64::max);
    let strict = Limits::strict();
    let _ = write!(
        out,
        "<li>Timers of the generator were at most {} ms late (p99): figures finer than that mean nothing.</li>\
         <li>First audio is the first audible sample in the decoded sound, from the instant the text left. RTF is the \
         time from the first to the last audible sample over the length of the speech: 1 when the listener never waited. \
         A stall is time in which a listener behind a 60 ms buffer had nothing to play.</li>\
         <li>p95 is told from {P95_TURNS} turns on, p99 from {P99_TURNS}.</li>\
         <li>Strict limits: first audio p95 {} s, RTF p95 {}, no stall.</li>\
         <li>Published figures are of other hardware, and of requests that are made as fast as the engine goes; calls take \
         speech no faster than it is heard, so at a light load their characters a second are those of the listeners. \
         Their RTF is that of whole requests.</li></ul>",
        number(worst * 1e3),
        strict.first_audio_p95,
        strict.rtf_p95
    );
}

const STYLE: &str = "\
:root{color-scheme:light dark;--ink:#1c2430;--paper:#fbfbfa;--faint:#5d6776;--line:#d9dde3;--good:#19734a;--bad:#b3261e;\
--c0:#0072b2;--c1:#b85700;--c2:#00795a;--c3:#a6487f;--c4:#3a86b7;--c5:#7a6a00}\
@media(prefers-color-scheme:dark){:root{--ink:#e6e9ee;--paper:#14181e;--faint:#a0aab8;--line:#303844;--good:#5fc795;--bad:#ff8a80;\
--c0:#56b4e9;--c1:#e69f00;--c2:#2fc39a;--c3:#e39cc8;--c4:#9ad1f0;--c5:#f0e442}}\
body{font:15px/1.45 system-ui,sans-serif;color:var(--ink);background:var(--paper);margin:0}\
main{max-width:1360px;margin:0 auto;padding:24px}h1{margin:0 0 4px}h2{margin:28px 0 8px}h3{font-size:1rem;margin:16px 0 4px}\
code{background:color-mix(in srgb,var(--ink) 8%,transparent);padding:2px 4px;border-radius:3px}\
.charts{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,430px),1fr));gap:16px}\
figure{margin:0;border:1px solid var(--line);border-radius:6px;padding:10px}figcaption{font-weight:600;margin-bottom:4px}\
figure{position:relative;min-width:0}svg{width:100%;height:auto}.tick{fill:var(--faint);font-size:12px}.grid{stroke:var(--line)}\
.limit{stroke:var(--bad);stroke-dasharray:2 3}.line{fill:none;stroke-width:2.2}\
.line.f0{stroke-dasharray:7 4}.line.f1{stroke-dasharray:2 3}.line.f2{stroke-dasharray:9 3 2 3}.line.foreign{stroke:var(--faint)}\
.dot.foreign{fill:var(--paper);stroke:var(--faint);stroke-width:1.6}.bar.foreign{fill:var(--faint)}\
.key{display:inline-block;width:32px;height:12px;margin:0 5px 0 8px;vertical-align:middle}.legend{font-size:13px;color:var(--faint)}\
.line.c1{stroke-dasharray:9 3}.line.c2{stroke-dasharray:4 3}.line.c3{stroke-dasharray:1 3}.line.c4{stroke-dasharray:9 3 2 3}.line.c5{stroke-dasharray:12 3 4 3}\
.line.c0{stroke:var(--c0)}.line.c1{stroke:var(--c1)}.line.c2{stroke:var(--c2)}.line.c3{stroke:var(--c3)}.line.c4{stroke:var(--c4)}.line.c5{stroke:var(--c5)}\
.dot.c0,.bar.c0{fill:var(--c0)}.dot.c1,.bar.c1{fill:var(--c1)}.dot.c2,.bar.c2{fill:var(--c2)}.dot.c3,.bar.c3{fill:var(--c3)}.dot.c4,.bar.c4{fill:var(--c4)}.dot.c5,.bar.c5{fill:var(--c5)}\
.png{position:absolute;right:8px;top:8px;font:12px system-ui,sans-serif;color:inherit;background:none;border:1px solid var(--line);border-radius:4px;cursor:pointer}\
@media(max-width:600px){main{padding:8px}figure{padding:6px}h1{font-size:1.3rem}.plot .tick{font-size:19px}.tick{font-size:17px}}\
@media print{.png{display:none}}\
h1,h2,h3,p,li,code{overflow-wrap:anywhere}figcaption{padding-right:48px}\
td.text{text-align:left;white-space:normal}table{border-collapse:collapse;display:block;overflow-x:auto}th,td{padding:4px 8px;border-bottom:1px solid var(--line);text-align:right;white-space:nowrap}\
th{font-weight:600;color:var(--faint);font-size:12px}.verdicts{list-style:none;padding:0}.verdicts li:before{content:'· '}\
.verdicts .good:before{content:'✓ ';color:var(--good)}.verdicts .bad:before{content:'✗ ';color:var(--bad)}p.bad{color:var(--bad)}tr.bad td:first-child{color:var(--bad)}";

/// Each chart as a PNG, twice as large as it is shown: its styles are written into a copy, which is drawn on a canvas.
const SCRIPT: &str = "\
for (const button of document.querySelectorAll('.png')) button.onclick = () => {\
  const svg = button.parentElement.querySelector('svg');\
  const copy = svg.cloneNode(true);\
  const from = svg.querySelectorAll('*');\
  copy.querySelectorAll('*').forEach((element, n) => {\
    const style = getComputedStyle(from[n]);\
    for (const name of ['fill', 'stroke', 'stroke-width', 'stroke-dasharray', 'font-size', 'font-family', 'text-anchor'])\
      element.style.setProperty(name, style.getPropertyValue(name));\
  });\
  const { width, height } = svg.viewBox.baseVal;\
  copy.setAttribute('width', 2 * width);\
  copy.setAttribute('height', 2 * height);\
  copy.setAttribute('xmlns', 'http:' + '//www.w3.org/2000/svg');\
  const image = new Image();\
  image.onload = () => {\
    const canvas = Object.assign(document.createElement('canvas'), { width: 2 * width, height: 2 * height });\
    const context = canvas.getContext('2d');\
    context.fillStyle = getComputedStyle(document.body).backgroundColor;\
    context.fillRect(0, 0, canvas.width, canvas.height);\
    context.drawImage(image, 0, 0);\
    const name = button.parentElement.querySelector('figcaption').textContent.toLowerCase().replace(/[^a-z0-9]+/g, '-').slice(0, 60);\
    Object.assign(document.createElement('a'), { href: canvas.toDataURL('image/png'), download: name + '.png' }).click();\
  };\
  image.src = 'data:image/svg+xml,' + encodeURIComponent(new XMLSerializer().serializeToString(copy));\
};";

#[cfg(test)]
mod tests {
    use super::*;
    use crate::run::report::Knee;

    #[test]
    fn a_page_stands_alone_and_says_what_the_report_says() {
        let level = |n: u32| Level {
            level: n,
            mode: "closed".into(),
            turns: 10,
            first_audio: Summary { count: 10, p50: 0.04, p95: 0.05, p99: 0.06, ..Summary::default() },
            rtf: Summary { count: 10, p50: 1.0, p95: 1.0, ..Summary::default() },
            ..Level::default()
        };
        let report = Report {
            name: "<ladder>".into(),
            levels: vec![level(4), level(8)],
            knee: Some(Knee { level: 8, broken_at: None }),
            ended_early: Some("the gateway died & was gone".into()),
            notes: vec!["a note".into()],
            ..Report::default()
        };
        let page = page(&report);
        assert!(
            !page.contains("http://") && !page.contains("https://") && !page.contains(" src="),
            "needs the network"
        );
        for words in ["&lt;ladder&gt;", "died &amp; was gone", "a note", "RTX 5090, 20 % memory", "8 calls pass"] {
            assert!(page.contains(words), "{words}");
        }
        assert!(!page.contains("NaN"));
        assert!(page.contains("What callers hear at 4 to 8 calls"), "the title says what was measured");
        // Ten turns have no 95th percentile, and confirm none.
        assert!(!page.contains("<title>p95: "), "drawn from ten turns");
        assert!(page.contains("not confirmed"));
        assert!(!report.has_gpu() && !page.contains("one GPU"), "no GPU was there");
        let devices = serde_json::json!([{ "engine": "espeak", "device": "cpu" }]);
        let spoken = Report { devices, ..report.clone() };
        assert!(title(&spoken).contains("espeak on the CPU") && !spoken.has_gpu(), "{}", title(&spoken));
        let gpu = Report { devices: serde_json::json!([{ "engine": "cosyvoice3", "device": "cuda:0" }]), ..report };
        assert!(gpu.has_gpu());
    }

    #[test]
    fn two_reports_stand_side_by_side() {
        let report = |p50: f64, turns: u64| Report {
            name: "ladder".into(),
            levels: vec![Level {
                level: 4,
                turns,
                chars_per_s: 50.0,
                first_audio: Summary { count: turns, p50, p95: 2.0 * p50, ..Summary::default() },
                ..Level::default()
            }],
            ..Report::default()
        };
        let page = compared(&report(0.05, 40), Some(&report(0.04, 10)));
        for words in ["Compared with", "+25 %", "before: p50", "<title>p95: 0.1 at 4"] {
            assert!(page.contains(words), "{words}");
        }
        assert!(!page.contains("<title>before: p95"), "ten turns have none");
        assert!(!page.contains("NaN"));
    }
}
