//! Log lines: one event, one line, whatever a stranger put into it.
//!
//! # Why
//! A caller's headers, an agent's frames and a client's URLs end in the log. So a value is cut at [`MAX_VALUE`]
//! characters, control characters (line ends above all: a value must not be able to write a line of its own) are
//! escaped, a place in the code that repeats itself is told of [`BURST`] times in [`WINDOW`] and then counted, and
//! telephone numbers and what callers and agents say are left out unless `[log] redact = false`.

use std::borrow::Cow;
use std::collections::HashMap;
use std::fmt::{self, Write as _};
use std::io::Write as _;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use serde_json::{Map, Value};
use tracing::callsite::Identifier;
use tracing::field::{Field, Visit};
use tracing::{Event, Level, Subscriber};
use tracing_subscriber::Layer;
use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::fmt::time::{FormatTime, SystemTime};
use tracing_subscriber::layer::Context;

use super::LogFormat;
use super::otlp::{Collector, Line};
use crate::clock;

/// Longest value of a field, in characters.
const MAX_VALUE: usize = 1_024;
/// Lines of one place in the code, in one window.
const BURST: u32 = 200;
const WINDOW: Duration = Duration::from_secs(10);
/// Fields that hold what somebody said or typed.
const SAID: [&str; 6] = ["text", "prompt", "digit", "digits", "handoff", "data"];
/// What is written for them.
const HIDDEN: &str = "[redacted]";

/// Writes events as lines.
pub(super) struct Lines {
    format: LogFormat,
    redact: bool,
    repeats: Mutex<Repeats>,
    write: fn(&str),
    collector: Option<Collector>,
}

impl Lines {
    /// To standard error.
    pub(super) fn new(format: LogFormat, redact: bool) -> Self {
        let write = |line: &str| {
            // A log whose reader has gone stops nothing.
            let _ = std::io::stderr().lock().write_all(line.as_bytes());
        };
        Self { format, redact, repeats: Mutex::default(), write, collector: None }
    }

    /// And to a collector, where there is one.
    pub(super) fn beside(self, collector: Option<Collector>) -> Self {
        Self { collector, ..self }
    }
}

impl<S: Subscriber> Layer<S> for Lines {
    fn on_event(&self, event: &Event<'_>, _: Context<'_, S>) {
        let meta = event.metadata();
        let mut missed = 0;
        // Debug lines are asked for to see them all.
        if *meta.level() <= Level::INFO {
            let admitted =
                self.repeats.lock().unwrap_or_else(PoisonError::into_inner).admit(meta.callsite(), clock::now());
            match admitted {
                Some(count) => missed = count,
                None => return,
            }
        }
        let mut fields = Fields { redact: self.redact, message: String::new(), rest: Vec::new() };
        event.record(&mut fields);
        if missed > 0 {
            fields.rest.push(("suppressed", missed.into()));
        }
        if let Some(collector) = self.collector.as_ref().filter(|_| Line::wanted(meta.target())) {
            let (message, fields) = (fields.message.clone(), fields.rest.clone());
            collector.log(Line {
                at: clock::wall(),
                level: *meta.level(),
                target: meta.target().into(),
                message,
                fields,
            });
        }
        let mut time = String::new();
        // It writes digits into a string, which does not fail.
        let _ = SystemTime.format_time(&mut Writer::new(&mut time));
        let line = match self.format {
            LogFormat::Text => text(&time, meta.level(), meta.target(), &fields),
            LogFormat::Json => json(&time, meta.level(), meta.target(), fields),
        };
        (self.write)(&line);
    }
}

fn text(time: &str, level: &Level, target: &str, fields: &Fields) -> String {
    let mut line = format!("{time} {level:>5} {target}: {}", escaped(&fields.message));
    for (name, value) in &fields.rest {
        let _ = match value {
            Value::String(value) => write!(line, " {name}={}", escaped(value)),
            value => write!(line, " {name}={value}"),
        };
    }
    line.push('\n');
    line
}

fn json(time: &str, level: &Level, target: &str, fields: Fields) -> String {
    let mut object = Map::new();
    object.insert("timestamp".into(), time.into());
    object.insert("level".into(), level.as_str().into());
    object.insert("message".into(), fields.message.into());
    for (name, value) in fields.rest {
        object.insert(name.into(), value);
    }
    object.insert("target".into(), target.into());
    format!("{}\n", Value::Object(object))
}

/// The fields of one event, cut and redacted.
struct Fields {
    redact: bool,
    message: String,
    rest: Vec<(&'static str, Value)>,
}

impl Fields {
    fn add(&mut self, field: &Field, value: &str) {
        let name = field.name();
        let value = match self.redact {
            true if SAID.contains(&name) => HIDDEN.into(),
            true => masked(value),
            false => value.into(),
        };
        let value = cut(&value);
        match name {
            "message" => self.message = value,
            name => self.rest.push((name, value.into())),
        }
    }
}

impl Visit for Fields {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        self.add(field, &format!("{value:?}"));
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        self.add(field, value);
    }

    fn record_u64(&mut self, field: &Field, value: u64) {
        self.rest.push((field.name(), value.into()));
    }

    fn record_i64(&mut self, field: &Field, value: i64) {
        self.rest.push((field.name(), value.into()));
    }

    fn record_f64(&mut self, field: &Field, value: f64) {
        self.rest.push((field.name(), value.into()));
    }

    fn record_bool(&mut self, field: &Field, value: bool) {
        self.rest.push((field.name(), value.into()));
    }
}

/// The first [`MAX_VALUE`] characters, and how many more there were.
fn cut(value: &str) -> String {
    match value.char_indices().nth(MAX_VALUE) {
        None => value.to_owned(),
        Some((at, _)) => format!("{}... (+{} bytes)", &value[..at], value.len() - at),
    }
}

/// Control characters as `\n`, `\u{1b}` and so on.
fn escaped(value: &str) -> Cow<'_, str> {
    if !value.chars().any(char::is_control) {
        return value.into();
    }
    let mut out = String::with_capacity(value.len() + 8);
    for c in value.chars() {
        match c.is_control() {
            true => out.extend(c.escape_default()),
            false => out.push(c),
        }
    }
    out.into()
}

/// `value` without the user parts of SIP and TEL URIs and without numbers as they are dialled; their last two characters stay.
fn masked(value: &str) -> Cow<'_, str> {
    match dialled(value) {
        Some(hidden) => named(&hidden).into_owned().into(),
        None => named(value),
    }
}

/// `value` without the numbers that it is, or quotes: one without `+` cannot be told from others in the middle of a text.
fn dialled(value: &str) -> Option<String> {
    let number = |text: &str| {
        let digits = text.bytes().filter(u8::is_ascii_digit).count();
        let dialled = text.bytes().all(|b| b.is_ascii_digit() || b" -.()*#".contains(&b));
        digits >= 7 && dialled && text.parse::<std::net::IpAddr>().is_err()
    };
    let hidden = |text: &str| {
        let mut out = String::new();
        hide(&mut out, text);
        out
    };
    if number(value) {
        return Some(hidden(value));
    }
    let pieces: Vec<&str> = value.split('`').collect();
    let quoted = |place: usize| place % 2 == 1 && place + 1 < pieces.len() && number(pieces[place]);
    (0..pieces.len()).any(quoted).then(|| {
        let shown = |place: usize| if quoted(place) { hidden(pieces[place]) } else { pieces[place].to_owned() };
        (0..pieces.len()).map(shown).collect::<Vec<_>>().join("`")
    })
}

/// `value` without the user parts of URIs and without international numbers.
fn named(value: &str) -> Cow<'_, str> {
    let lower = value.to_ascii_lowercase();
    if !["sip:", "sips:", "tel:"].iter().any(|scheme| lower.contains(scheme)) && !value.contains('+') {
        return value.into();
    }
    let user = |c: char| c.is_alphanumeric() || "+-_.!~*'()&=$,;?/%#:".contains(c);
    let number = |c: char| c.is_ascii_digit() || "-.()".contains(c);
    let (mut out, mut at) = (String::with_capacity(value.len()), 0);
    while let Some(c) = value[at..].chars().next() {
        // Of a longer word, as in "hotel:", it is the end.
        let begins = !out.ends_with(char::is_alphanumeric);
        let scheme = ["sip:", "sips:", "tel:"].into_iter().find(|scheme| begins && lower[at..].starts_with(scheme));
        let rest = &value[at..];
        if let Some(scheme) = scheme {
            let after = &rest[scheme.len()..];
            let end = after.find(|c: char| !user(c)).unwrap_or(after.len());
            // Without a user part what follows is a host, and no secret.
            if (scheme == "tel:" && end > 0) || after[end..].starts_with('@') {
                out.push_str(&rest[..scheme.len()]);
                hide(&mut out, &after[..end]);
                at += scheme.len() + end;
                continue;
            }
            out.push_str(&rest[..scheme.len()]);
            at += scheme.len();
            continue;
        }
        if c == '+' {
            let after = &rest[1..];
            let end = after.find(|c: char| !number(c)).unwrap_or(after.len());
            if after[..end].chars().filter(char::is_ascii_digit).count() >= 7 {
                hide(&mut out, &after[..end]);
                at += 1 + end;
                continue;
            }
        }
        out.push(c);
        at += c.len_utf8();
    }
    out.into()
}

fn hide(out: &mut String, value: &str) {
    out.push_str("***");
    if value.chars().count() > 5
        && let Some((at, _)) = value.char_indices().rev().nth(1)
    {
        out.push_str(&value[at..]);
    }
}

/// How often each call site has logged. As many entries as there are call sites.
#[derive(Default)]
struct Repeats(HashMap<Identifier, Repeat>);

struct Repeat {
    since: Instant,
    told: u32,
    missed: u64,
}

impl Repeats {
    /// `Some(missed)`: tell, and that so many before were not told of.
    fn admit(&mut self, place: Identifier, now: Instant) -> Option<u64> {
        let repeat = self.0.entry(place).or_insert(Repeat { since: now, told: 0, missed: 0 });
        if now.saturating_duration_since(repeat.since) >= WINDOW {
            (repeat.since, repeat.told) = (now, 0);
        }
        if repeat.told >= BURST {
            repeat.missed += 1;
            return None;
        }
        repeat.told += 1;
        Some(std::mem::take(&mut repeat.missed))
    }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use tracing_subscriber::layer::SubscriberExt as _;

    use super::*;

    thread_local! {
        static WRITTEN: RefCell<Vec<String>> = const { RefCell::new(Vec::new()) };
    }

    /// The lines of what `tell` logs.
    fn logged(format: LogFormat, redact: bool, tell: impl FnOnce()) -> Vec<String> {
        let write = |line: &str| WRITTEN.with_borrow_mut(|lines| lines.push(line.to_owned()));
        let lines = Lines { write, ..Lines::new(format, redact) };
        WRITTEN.take();
        tracing::subscriber::with_default(tracing_subscriber::registry().with(lines), tell);
        WRITTEN.take()
    }

    #[test]
    fn a_stranger_cannot_write_a_line_of_its_own_nor_a_long_one() {
        let evil = format!("x\n2026-01-01T00:00:00Z ERROR antiphon: forged\u{1b}[31m{}", "y".repeat(100_000));
        for format in [LogFormat::Text, LogFormat::Json] {
            let lines = logged(format, true, || tracing::info!(header = %evil, count = 3, "refused: {evil}"));
            assert_eq!(lines.len(), 1);
            assert_eq!(lines[0].matches('\n').count(), 1, "{}", lines[0]);
            assert!(lines[0].ends_with('\n') && !lines[0].contains('\u{1b}'));
            assert!(lines[0].len() < 4 * MAX_VALUE, "{}", lines[0].len());
            assert!(lines[0].contains("bytes)"), "{}", lines[0]);
        }
        let json = logged(LogFormat::Json, true, || tracing::warn!(count = 3, ok = true, "some \"words\""));
        let value: Value = serde_json::from_str(&json[0]).expect("JSON");
        assert!(value["message"] == "some \"words\"" && value["count"] == 3 && value["ok"] == true, "{value}");
        assert_eq!(value["level"], "WARN");
    }

    #[test]
    fn numbers_and_words_are_left_out_unless_asked_for() {
        let tell = || {
            tracing::info!(
                from = "\"Eve\" <sip:+4915112345678@carrier.example;user=phone>",
                to = "tel:+1-202-555-0143",
                text = "my secret",
                "hotel: SIP: UDP, to sip:demo@host and +4930123456 from sip:192.0.2.1:5060"
            );
        };
        let line = logged(LogFormat::Text, true, tell).remove(0);
        for hidden in ["15112345", "202-555", "my secret", "30123456", "demo"] {
            assert!(!line.contains(hidden), "{hidden}: {line}");
        }
        for kept in
            ["***78@carrier.example", "tel:***43", "text=[redacted]", "***56", "sip:192.0.2.1:5060", "hotel: SIP: UDP"]
        {
            assert!(line.contains(kept), "{kept}: {line}");
        }
        let line = logged(LogFormat::Text, false, tell).remove(0);
        assert!(line.contains("+4915112345678") && line.contains("my secret"), "{line}");
    }

    #[test]
    fn numbers_without_a_plus_are_left_out_where_they_can_be_told() {
        let tell = || {
            tracing::info!(
                to = "004989123456",
                from = "0171-2345678",
                peer = "192.168.100.200",
                code = "123456",
                "`0088212345678` begins with none of the `prefixes`; 16777216 bytes"
            );
        };
        let line = logged(LogFormat::Text, true, tell).remove(0);
        for hidden in ["4989123", "2345678", "88212345"] {
            assert!(!line.contains(hidden), "{hidden}: {line}");
        }
        for kept in ["to=***56", "from=***78", "192.168.100.200", "123456", "`***78` begins", "16777216 bytes"] {
            assert!(line.contains(kept), "{kept}: {line}");
        }
        assert!(logged(LogFormat::Text, false, tell).remove(0).contains("004989123456"));
    }

    #[test]
    fn what_repeats_itself_is_counted() {
        let lines = logged(LogFormat::Text, true, || {
            for n in 0..2 * BURST {
                tracing::info!(n, "again");
                tracing::debug!("details");
            }
            tracing::info!("another");
        });
        let of = |words: &str| lines.iter().filter(|line| line.contains(words)).count();
        assert_eq!((of("again"), of("another"), of("details")), (BURST as usize, 1, 2 * BURST as usize));

        let mut repeats = Repeats::default();
        let place = tracing::callsite::Identifier(&PLACE);
        let start = clock::now();
        assert!((0..BURST).all(|_| repeats.admit(place.clone(), start) == Some(0)));
        assert_eq!((repeats.admit(place.clone(), start), repeats.admit(place.clone(), start)), (None, None));
        assert_eq!(repeats.admit(place, start + WINDOW), Some(2));
    }

    struct Place;

    static PLACE: Place = Place;

    impl tracing::Callsite for Place {
        fn set_interest(&self, _: tracing::subscriber::Interest) {}

        fn metadata(&self) -> &tracing::Metadata<'_> {
            unreachable!("never asked for")
        }
    }
}
