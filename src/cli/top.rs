//! `antiphon top`: calls, devices, queue and latency of a running gateway, live in a terminal.
//!
//! Everything comes from the public API (`/readyz`, `/v1/calls`, `/metrics`), so it works on a gateway elsewhere.

mod metrics;
mod screen;

use std::io::IsTerminal;
use std::time::Duration;

use console::Term;
use serde_json::Value;

use self::metrics::Metrics;
use super::Failure;

#[derive(clap::Args)]
pub(super) struct Args {
    /// The gateway.
    #[arg(short, long, default_value = "http://127.0.0.1:8080", env = "ANTIPHON_URL", value_parser = url)]
    url: String,
    /// Token with the scopes `calls` and `admin`, where the gateway asks for one.
    #[arg(long, env = "ANTIPHON_TOKEN", hide_env_values = true)]
    token: Option<String>,
    /// Seconds between two looks.
    #[arg(short, long, default_value_t = 1.0, value_parser = seconds)]
    interval: f64,
    /// Print once and end; as when the output is no terminal.
    #[arg(long)]
    once: bool,
}

fn url(text: &str) -> Result<String, String> {
    match reqwest::Url::parse(text) {
        Ok(url) if matches!(url.scheme(), "http" | "https") => Ok(text.to_owned()),
        _ => Err("expected the address of a gateway, for example http://127.0.0.1:8080".to_owned()),
    }
}

fn seconds(text: &str) -> Result<f64, String> {
    match text.parse() {
        Ok(value) if (0.1..=3600.0).contains(&value) => Ok(value),
        _ => Err("expected from 0.1 to 3600 seconds, for example 2".to_owned()),
    }
}

/// What a gateway said of itself at one moment.
#[derive(Clone, Debug, Default)]
struct Snapshot {
    /// `/readyz`.
    ready: Value,
    /// `calls` of `/v1/calls`.
    calls: Vec<Value>,
    /// `/metrics`.
    metrics: Metrics,
}

/// How long one request may take.
const PATIENCE: Duration = Duration::from_secs(5);

/// Looks until Ctrl-C.
pub(super) fn run(args: &Args) -> Result<(), Failure> {
    super::block_on(async {
        let client = reqwest::Client::builder().timeout(PATIENCE).build().map_err(Failure::failed)?;
        let terminal = Term::stdout();
        let live = !args.once && std::io::stdout().is_terminal();
        let mut before: Option<Snapshot> = None;
        let mut tick = tokio::time::interval(Duration::from_secs_f64(args.interval));
        tick.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                _ = tick.tick() => {}
                _ = tokio::signal::ctrl_c() => return Ok(()),
            }
            let seen = look(&client, args).await;
            if !live {
                let text = screen::draw(&seen?, None, 0.0, usize::MAX, 200);
                return terminal.write_line(&text).map_err(Failure::failed);
            }
            let (rows, columns) = terminal.size();
            let text = match &seen {
                Ok(now) => screen::draw(now, before.as_ref(), args.interval, usize::from(rows), usize::from(columns)),
                // A gateway that restarts is waited for.
                Err(failure) => failure.message.clone(),
            };
            terminal.clear_screen().and_then(|()| terminal.write_str(&text)).map_err(Failure::failed)?;
            before = seen.ok();
        }
    })
}

async fn look(client: &reqwest::Client, args: &Args) -> Result<Snapshot, Failure> {
    // Not ready is an answer as well: 503 with the same body.
    let ready = text(client, args, "/readyz", true).await?;
    let calls = text(client, args, "/v1/calls", false).await?;
    let metrics = text(client, args, "/metrics", false).await?;
    let json = |text: &str| serde_json::from_str::<Value>(text).map_err(|e| unavailable(args, &e.to_string()));
    let calls = match json(&calls)?["calls"].take() {
        Value::Array(calls) => calls,
        _ => Vec::new(),
    };
    Ok(Snapshot { ready: json(&ready)?, calls, metrics: Metrics::parse(&metrics) })
}

async fn text(client: &reqwest::Client, args: &Args, path: &str, any_status: bool) -> Result<String, Failure> {
    let mut request = client.get(format!("{}{path}", args.url.trim_end_matches('/')));
    if let Some(token) = &args.token {
        request = request.bearer_auth(token);
    }
    let response = request.send().await.map_err(|error| unavailable(args, &error.to_string()))?;
    match response.status().as_u16() {
        401 | 403 => Err(Failure::failed(format!(
            "{} wants a token with the scopes `calls` and `admin`: --token, or ANTIPHON_TOKEN",
            args.url
        ))),
        200 => response.text().await.map_err(|error| unavailable(args, &error.to_string())),
        _ if any_status => response.text().await.map_err(|error| unavailable(args, &error.to_string())),
        status => Err(unavailable(args, &format!("{path} answers {status}"))),
    }
}

fn unavailable(args: &Args, why: &str) -> Failure {
    Failure::unavailable(format!("no gateway at {}: {why}; is `antiphon serve` running there?", args.url))
}
