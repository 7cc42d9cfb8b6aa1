//! The requests of a model's tools: to where the configuration says, and to public addresses only unless it allows
//! others.
//!
//! # Why
//! What a caller says reaches the arguments of a tool. The host of a tool is fixed, but a name may resolve to an
//! address inside (by mistake, or because its owner wants it to), and an answer may redirect there. So the resolver of
//! the client drops such addresses, which leaves no moment between the check and the use, and redirects are not
//! followed.

use std::time::Duration;

use reqwest::Client;
use reqwest::header::{HeaderName, HeaderValue};
use serde_json::{Map, Value};

use super::tools::{self, HttpTool, Method};
use crate::reach::{Clients, cause, private_literal};
use crate::secret::Secret;

/// Longest wait for TCP and TLS.
const CONNECT: Duration = Duration::from_secs(3);

/// The clients of tools, and of the models themselves. Cheap to clone; connections are shared.
#[derive(Clone, Debug)]
pub struct Web {
    tools: Clients,
    /// For models, which the operator names: private addresses and proxies are fine.
    pub(super) model: Client,
}

impl Web {
    /// No connections yet.
    ///
    /// # Errors
    /// TLS cannot be set up.
    pub fn new() -> reqwest::Result<Self> {
        let builder = || Client::builder().connect_timeout(CONNECT).redirect(reqwest::redirect::Policy::none());
        Ok(Self { tools: Clients::new(builder)?, model: builder().build()? })
    }

    /// Makes the request of `tool`; gives what the model is told.
    ///
    /// # Errors
    /// It did not succeed; for the model, too.
    pub async fn run(&self, tool: &HttpTool, arguments: &Map<String, Value>) -> Result<String, String> {
        let limit = Duration::from_millis(tool.timeout_ms);
        match tokio::time::timeout(limit, self.fetch(tool, arguments)).await {
            Ok(result) => result,
            Err(_) => Err(format!("no answer within {} ms", tool.timeout_ms)),
        }
    }

    async fn fetch(&self, tool: &HttpTool, arguments: &Map<String, Value>) -> Result<String, String> {
        let (url, body) = tools::request(tool, arguments)?;
        if let Some(ip) = private_literal(&url).filter(|_| !tool.allow_private) {
            return Err(format!("{ip} is a private address"));
        }
        let method = match tool.method {
            Method::Get => reqwest::Method::GET,
            Method::Post => reqwest::Method::POST,
            Method::Put => reqwest::Method::PUT,
            Method::Patch => reqwest::Method::PATCH,
            Method::Delete => reqwest::Method::DELETE,
        };
        let mut request = self.tools.of(tool.allow_private).request(method, url);
        for (name, value) in &tool.headers {
            let (name, value) = header(name, value)?;
            request = request.header(name, value);
        }
        if let Some(body) = body {
            request = request.json(&body);
        }
        let mut response = request.send().await.map_err(|error| cause(&error))?;
        let status = response.status();
        let mut bytes = Vec::new();
        let mut whole = true;
        while let Some(chunk) = response.chunk().await.map_err(|error| cause(&error))? {
            let room = tool.max_bytes - bytes.len();
            bytes.extend_from_slice(&chunk[..chunk.len().min(room)]);
            if chunk.len() > room {
                whole = false;
                break;
            }
        }
        let mut text = String::from_utf8_lossy(&bytes).into_owned();
        if !whole {
            text.push_str("\n[cut here: the answer was longer]");
        }
        match status.is_success() {
            true if text.trim().is_empty() => Ok("done".into()),
            true => Ok(text),
            false => Err(format!("HTTP {}: {text}", status.as_u16())),
        }
    }
}

/// A header of the configuration.
///
/// # Errors
/// Name or value are none.
pub(super) fn header(name: &str, value: &Secret) -> Result<(HeaderName, HeaderValue), String> {
    let name = HeaderName::try_from(name).map_err(|error| format!("header `{name}`: {error}"))?;
    let mut value = HeaderValue::try_from(value.reveal()).map_err(|error| format!("header `{name}`: {error}"))?;
    value.set_sensitive(true);
    Ok((name, value))
}
