//! `[http]`: the address and the tokens of the API.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};

use serde::Deserialize;

use crate::secret::Secret;

/// `[http]`
#[derive(Clone, Debug, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Http {
    /// Where the API and the console listen.
    pub bind: SocketAddr,
    /// Who may use the API; empty: everybody who can reach `bind`.
    pub tokens: Vec<Token>,
    /// Origins that browsers may call from; `*` allows all.
    pub cors: Vec<String>,
}

impl Default for Http {
    fn default() -> Self {
        Self { bind: SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 8080), tokens: Vec::new(), cors: Vec::new() }
    }
}

/// A bearer token: a string, or a table with a name (for fairness, limits and logs) and scopes.
#[derive(Clone, Debug)]
pub struct Token {
    /// Who this is, in metrics and logs.
    pub name: String,
    /// What the request must carry.
    pub token: Secret,
    /// What it may do; empty: everything.
    pub scopes: Vec<Scope>,
}

/// What a token may do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Scope {
    /// Place, see and steer calls.
    Calls,
    /// Speech requests, jobs and voices.
    Speech,
    /// Metrics, events and drain.
    Admin,
}

impl<'de> Deserialize<'de> for Token {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        #[derive(Deserialize)]
        #[serde(deny_unknown_fields)]
        struct Full {
            name: Option<String>,
            token: Secret,
            #[serde(default)]
            scopes: Vec<Scope>,
        }
        #[derive(Deserialize)]
        #[serde(untagged, expecting = "a string or { name, token, scopes }")]
        enum Either {
            Full(Full),
            Plain(Secret),
        }
        Ok(match Either::deserialize(deserializer)? {
            Either::Plain(token) => Token { name: String::new(), token, scopes: Vec::new() },
            Either::Full(full) => Token { name: full.name.unwrap_or_default(), token: full.token, scopes: full.scopes },
        })
    }
}
