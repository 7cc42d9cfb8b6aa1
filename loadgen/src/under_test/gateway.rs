//! The gateway under test as its HTTP interface shows it: turns, calls, metrics, and speech as a reference.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use reqwest::header::CONTENT_TYPE;
use serde_json::{Value, json};

use crate::caller::call::CallError;
use crate::clock;
use crate::sound::heard::Clip;
use crate::wire::codec::from_i16;
use crate::wire::http::{self, Noted};

/// Rate of `pcm` from `/v1/audio/speech`.
const SPEECH_RATE: u32 = 24_000;

/// The HTTP side of a gateway.
#[derive(Clone, Debug)]
pub struct Gateway {
    client: reqwest::Client,
    base: reqwest::Url,
    token: Option<String>,
}

impl Gateway {
    /// The gateway at `base` (`http://host:port`).
    ///
    /// # Errors
    /// `base` is no HTTP address.
    pub fn at(base: &str, token: Option<String>) -> Result<Gateway, CallError> {
        let base = reqwest::Url::parse(base)
            .ok()
            .filter(|u| matches!(u.scheme(), "http" | "https") && u.has_host())
            .ok_or_else(|| CallError::Target(base.to_owned()))?;
        Ok(Gateway { client: http::client()?, base, token })
    }

    /// Its address.
    pub fn base(&self) -> &str {
        self.base.as_str()
    }

    /// Its bearer token.
    pub fn token(&self) -> Option<&str> {
        self.token.as_deref()
    }

    /// Its host, to find its SIP side by.
    pub fn host(&self) -> Option<&str> {
        self.base.host_str()
    }

    /// Has `text` spoken on a call; gives the instant the request left and the utterance's name.
    ///
    /// # Errors
    /// The gateway refuses or cannot be reached.
    pub async fn speak(
        &self,
        call: &str,
        text: &str,
        voice: Option<&str>,
    ) -> Result<(Instant, Option<String>), CallError> {
        let turn = json!({ "text": text, "voice": voice });
        let (body, taken) = Noted::new(turn.to_string());
        let request = self.request(reqwest::Method::POST, &format!("v1/calls/{call}/turns"))?;
        let request = request.header(CONTENT_TYPE, "application/json").body(reqwest::Body::wrap(body));
        let asked = clock::now();
        let body: Value = accepted(request.send().await?).await?.json().await?;
        let sent = taken.get().copied().unwrap_or(asked);
        Ok((sent, body["utteranceId"].as_str().map(str::to_owned)))
    }

    /// Silences what is being spoken on a call.
    ///
    /// # Errors
    /// As [`Gateway::speak`].
    pub async fn interrupt(&self, call: &str) -> Result<(), CallError> {
        let request = self.request(reqwest::Method::POST, &format!("v1/calls/{call}/interrupt"))?;
        accepted(request.send().await?).await.map(drop)
    }

    /// The id of the call whose `from` or `to` mentions `name`.
    ///
    /// # Errors
    /// As [`Gateway::speak`].
    pub async fn find_call(&self, name: &str) -> Result<Option<String>, CallError> {
        let body: Value = accepted(self.request(reqwest::Method::GET, "v1/calls")?.send().await?).await?.json().await?;
        let calls = body.as_array().or_else(|| body["calls"].as_array()).or_else(|| body["data"].as_array());
        let mentions = |call: &&Value, key: &str| call[key].as_str().is_some_and(|v| v.contains(name));
        Ok(calls
            .into_iter()
            .flatten()
            .find(|c| mentions(c, "from") || mentions(c, "to"))
            .and_then(|c| c["id"].as_str().map(str::to_owned)))
    }

    /// Asks for a call to `to`, through `trunk` where one is named.
    ///
    /// # Errors
    /// As [`Gateway::speak`].
    pub async fn place(&self, to: &str, trunk: Option<&str>) -> Result<(), CallError> {
        self.post("v1/calls", &json!({ "to": to, "trunk": trunk, "agent": "silent" })).await
    }

    /// Sends `body` to `path`.
    ///
    /// # Errors
    /// As [`Gateway::speak`].
    pub async fn post(&self, path: &str, body: &Value) -> Result<(), CallError> {
        accepted(self.request(reqwest::Method::POST, path)?.json(body).send().await?).await.map(drop)
    }

    /// How many calls are answered and not acknowledged, of sources whose address begins with `source`.
    ///
    /// # Errors
    /// As [`Gateway::speak`].
    pub async fn half_open(&self, source: &str) -> Result<usize, CallError> {
        let body: Value = accepted(self.request(reqwest::Method::GET, "v1/calls")?.send().await?).await?.json().await?;
        let calls = body["half_open"].as_array().into_iter().flatten();
        Ok(calls.filter(|call| call["source"].as_str().is_some_and(|address| address.starts_with(source))).count())
    }

    /// `text` spoken directly, not on a call.
    ///
    /// # Errors
    /// As [`Gateway::speak`].
    pub async fn synthesise(&self, text: &str) -> Result<Clip, CallError> {
        let body = json!({ "model": "default", "voice": "default", "input": text, "response_format": "pcm" });
        let request = self.request(reqwest::Method::POST, "v1/audio/speech")?.json(&body);
        let bytes = accepted(request.send().await?).await?.bytes().await?;
        let (samples, _) = bytes.as_chunks::<2>();
        Ok(Clip { rate: SPEECH_RATE, pcm: samples.iter().map(|s| from_i16(i16::from_le_bytes(*s))).collect() })
    }

    /// Starts a batch job of `texts`; gives its id.
    ///
    /// # Errors
    /// As [`Gateway::speak`].
    pub async fn batch(&self, texts: &[String]) -> Result<String, CallError> {
        let request = self.request(reqwest::Method::POST, "v1/audio/speech/batch")?.json(&json!({ "items": texts }));
        let body: Value = accepted(request.send().await?).await?.json().await?;
        body["id"].as_str().map(str::to_owned).ok_or_else(|| CallError::BadAnswer("a job without id".to_owned()))
    }

    /// How far a batch job is: finished items and whether it is over.
    ///
    /// # Errors
    /// As [`Gateway::speak`].
    pub async fn job(&self, id: &str) -> Result<(u64, bool), CallError> {
        let request = self.request(reqwest::Method::GET, &format!("v1/jobs/{id}"))?;
        let body: Value = accepted(request.send().await?).await?.json().await?;
        let over = matches!(body["state"].as_str(), Some("done" | "failed" | "cancelled"));
        Ok((body["finished"].as_u64().unwrap_or(0), over))
    }

    /// Cancels a batch job.
    ///
    /// # Errors
    /// As [`Gateway::speak`].
    pub async fn cancel_job(&self, id: &str) -> Result<(), CallError> {
        accepted(self.request(reqwest::Method::DELETE, &format!("v1/jobs/{id}"))?.send().await?).await.map(drop)
    }

    /// Reads `/metrics`.
    ///
    /// # Errors
    /// As [`Gateway::speak`].
    pub async fn metrics(&self) -> Result<Metrics, CallError> {
        let response = self.request(reqwest::Method::GET, "metrics")?.timeout(Duration::from_secs(5)).send().await?;
        Ok(Metrics::parse(&accepted(response).await?.text().await?))
    }

    /// What `/readyz` says about the devices; an error while it is not ready.
    ///
    /// # Errors
    /// As [`Gateway::speak`]; not ready is refused with 503.
    pub async fn ready(&self) -> Result<Value, CallError> {
        let response = self.request(reqwest::Method::GET, "readyz")?.timeout(Duration::from_secs(5)).send().await?;
        Ok(accepted(response).await?.json().await?)
    }

    /// Its stream of events, which lasts until one side ends it.
    ///
    /// # Errors
    /// As [`Gateway::speak`].
    pub async fn events(&self) -> Result<reqwest::Response, CallError> {
        let request = self.request(reqwest::Method::GET, "v1/events")?.timeout(Duration::from_secs(86_400));
        accepted(request.send().await?).await
    }

    fn request(&self, method: reqwest::Method, path: &str) -> Result<reqwest::RequestBuilder, CallError> {
        let url = self.base.join(path).map_err(|_| CallError::Target(path.to_owned()))?;
        let request = self.client.request(method, url);
        Ok(match &self.token {
            Some(token) => request.bearer_auth(token),
            None => request,
        })
    }
}

async fn accepted(response: reqwest::Response) -> Result<reqwest::Response, CallError> {
    let status = response.status();
    if status.is_success() {
        return Ok(response);
    }
    let reason = response.text().await.unwrap_or_default().chars().take(200).collect();
    Err(CallError::Refused { code: status.as_u16(), reason })
}

/// A reading of Prometheus metrics: the values by series, as `name{labels}`.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Metrics(BTreeMap<String, f64>);

impl Metrics {
    /// Reads the text format; lines that are none are passed over.
    pub fn parse(text: &str) -> Metrics {
        let series = text.lines().filter(|l| !l.starts_with('#')).filter_map(|line| {
            // Label values may hold spaces: what is behind the last brace, or the first space, is the value.
            let (name, rest) = match line.rfind('}') {
                Some(end) => line.split_at(end + 1),
                None => line.split_once(' ')?,
            };
            let value = rest.split_whitespace().next()?.parse().ok()?;
            Some((name.to_owned(), value))
        });
        Metrics(series.collect())
    }

    /// Sum over all series of `name`.
    pub fn total(&self, name: &str) -> f64 {
        self.series(name).map(|(_, value)| value).sum()
    }

    /// Sum over the series of `name` by the value of `label`.
    pub fn by(&self, name: &str, label: &str) -> BTreeMap<String, f64> {
        self.by_where(name, label, "")
    }

    /// As [`Metrics::by`], of those series that have `other`, a label and its value as they are written.
    pub fn by_where(&self, name: &str, label: &str, other: &str) -> BTreeMap<String, f64> {
        let mut out = BTreeMap::new();
        for (series, value) in self.series(name).filter(|(series, _)| series.contains(other)) {
            let of = series
                .split_once(&format!("{label}=\""))
                .and_then(|(_, rest)| rest.split('"').next())
                .unwrap_or_default();
            *out.entry(of.to_owned()).or_insert(0.0) += value;
        }
        out
    }

    fn series(&self, name: &str) -> impl Iterator<Item = (&str, f64)> {
        self.0.iter().filter_map(move |(series, value)| {
            let rest = series.strip_prefix(name)?;
            (rest.is_empty() || rest.starts_with('{')).then_some((series.as_str(), *value))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn metrics_are_summed_by_name_and_label() {
        let text = "# TYPE x counter\nx_total{leg=\"sip\",a=\"b c\"} 2\nx_total{leg=\"webrtc\"} 3 1700000000\nx_total_more 9\nx 1.5\nbroken\n";
        let metrics = Metrics::parse(text);
        assert_eq!(metrics.total("x_total"), 5.0);
        assert_eq!(metrics.total("x"), 1.5);
        assert_eq!(metrics.by("x_total", "leg"), BTreeMap::from([("sip".into(), 2.0), ("webrtc".into(), 3.0)]));
        assert_eq!(metrics.total("nothing"), 0.0);
    }

    #[test]
    fn what_is_no_address_is_refused() {
        assert!(Gateway::at("sip:x", None).is_err());
        assert!(Gateway::at("http://127.0.0.1:8080", None).is_ok());
    }
}
