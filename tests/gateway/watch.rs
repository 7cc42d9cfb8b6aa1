//! What this process logs and traces: one subscriber for all tests of it, as a process has only one.

use std::collections::VecDeque;
use std::net::TcpListener;
use std::sync::{Mutex, OnceLock, PoisonError};

use antiphon::telemetry::otlp;
use tracing::field::{Field, Visit};
use tracing_subscriber::Layer as _;
use tracing_subscriber::filter::{LevelFilter, Targets};
use tracing_subscriber::layer::{Context, SubscriberExt as _};
use tracing_subscriber::util::SubscriberInitExt as _;

/// Lines that are kept.
const LINES: usize = 20_000;

/// The process's log, and its way to a collector.
pub(crate) struct Watch {
    lines: Mutex<VecDeque<String>>,
    /// Where the exporter delivers, and the exporter: for the one test of traces.
    pub(crate) traces: Mutex<Option<(TcpListener, otlp::Exporter)>>,
}

impl Watch {
    /// Begins to watch, once.
    pub(crate) fn start() -> &'static Watch {
        static WATCH: OnceLock<Watch> = OnceLock::new();
        static SUBSCRIBED: OnceLock<()> = OnceLock::new();
        let mut spans = None;
        let watch = WATCH.get_or_init(|| {
            let collector = TcpListener::bind("127.0.0.1:0").expect("a free port");
            let (layer, _collector, exporter) =
                otlp::pair(&format!("http://{}", collector.local_addr().expect("bound")));
            spans = Some(layer);
            Watch { lines: Mutex::default(), traces: Mutex::new(Some((collector, exporter))) }
        });
        SUBSCRIBED.get_or_init(|| {
            let only = |target, level| Targets::new().with_target(target, level);
            tracing_subscriber::registry()
                .with(Lines(watch).with_filter(only("antiphon", LevelFilter::INFO)))
                .with(spans.map(|spans| spans.with_filter(only(otlp::TARGET, LevelFilter::TRACE))))
                .init();
        });
        watch
    }

    /// How many lines contain all of `words`.
    pub(crate) fn lines(&self, words: &[&str]) -> usize {
        let lines = self.lines.lock().unwrap_or_else(PoisonError::into_inner);
        lines.iter().filter(|line| words.iter().all(|word| line.contains(word))).count()
    }
}

struct Lines(&'static Watch);

impl<S: tracing::Subscriber> tracing_subscriber::Layer<S> for Lines {
    fn on_event(&self, event: &tracing::Event<'_>, _: Context<'_, S>) {
        struct Text(String);
        impl Visit for Text {
            fn record_debug(&mut self, field: &Field, value: &dyn std::fmt::Debug) {
                self.0.push_str(&format!(" {field}={value:?}"));
            }
        }
        let mut text = Text(event.metadata().target().to_owned());
        event.record(&mut text);
        let mut lines = self.0.lines.lock().unwrap_or_else(PoisonError::into_inner);
        if lines.len() >= LINES {
            lines.pop_front();
        }
        lines.push_back(text.0);
    }
}
