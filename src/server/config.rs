//! `[http]`: the address and the tokens of the API.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::PathBuf;

use serde::Deserialize;
use serde::de::{Deserializer, Error, MapAccess, Visitor, value::MapAccessDeserializer};
use sha2::{Digest, Sha256};

use crate::acme::Acme;
use crate::gateway::dialers::Dialer;
use crate::host;
use crate::secret::{Secret, same};
use crate::sip::quota::Limits;

/// Fewest characters of a token: with fewer it could be guessed.
pub const MIN_TOKEN: usize = 16;

/// `[http]`
#[derive(Clone, Debug, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Http {
    /// Where the API and the console listen.
    pub bind: SocketAddr,
    /// Who may use the API; empty: everybody who can reach `bind`.
    pub tokens: Vec<Token>,
    /// Names that the gateway goes by beside its addresses and `localhost`; see [`crate::server`].
    pub hosts: Vec<String>,
    /// Origins that browsers may call from; `*` allows all.
    pub cors: Vec<String>,
    /// Most connections at once, of which sockets that stay open may be three of four.
    pub max_connections: usize,
    /// Of these, from one address (IPv6: one /64). Loopback is not held to it: a proxy there speaks for everybody.
    pub connections_per_address: usize,
    /// HTTPS in place of HTTP.
    pub tls: Option<Tls>,
    /// HTTPS with a certificate that the gateway orders for itself; that of `tls` is shown until it is there.
    pub acme: Option<Acme>,
}

/// `[http.tls]`
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Tls {
    /// PEM file: the certificate and those between it and the authority. Read again when it changes.
    pub cert: PathBuf,
    /// PEM file of its private key.
    pub key: PathBuf,
}

impl Default for Http {
    fn default() -> Self {
        Self {
            bind: SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 8080),
            tokens: Vec::new(),
            hosts: Vec::new(),
            cors: Vec::new(),
            max_connections: 8_192,
            connections_per_address: 256,
            tls: None,
            acme: None,
        }
    }
}

impl Http {
    /// Whether clients come over TLS that the gateway itself ends.
    pub fn is_secure(&self) -> bool {
        self.tls.is_some() || self.acme.is_some()
    }

    /// Checks what the types cannot say.
    ///
    /// # Errors
    /// The key and what it must be.
    pub fn validate(&self) -> Result<(), String> {
        if let Some(host) = self.hosts.iter().find(|text| host::split(text) != Ok((text.as_str(), None))) {
            return Err(format!("hosts: `{host}` is no host name; write it without scheme, port or `*`"));
        }
        if self.max_connections == 0 || self.connections_per_address == 0 {
            return Err("max_connections and connections_per_address are at least 1".into());
        }
        if let Some(acme) = &self.acme {
            acme.validate().map_err(|error| format!("acme: {error}"))?;
        }
        host::pages(&self.cors).map_err(|error| format!("cors: {error}"))
    }
}

/// A bearer token: a string, or a table with a name (for ownership, fairness, limits and logs) and scopes. With `sha256` in place of
/// `token` the configuration itself has no more than the digest.
#[derive(Clone, PartialEq, Eq)]
pub struct Token {
    /// Who this is, in metrics and logs, and the owner of what is made with it.
    pub name: String,
    /// SHA-256 of what the request must carry: the text itself is forgotten once it is read.
    pub(super) digest: [u8; 32],
    /// What it may do; empty: everything.
    pub scopes: Vec<Scope>,
    /// How much may be called out with it, within what the trunks allow.
    pub outbound: Option<Limits>,
}

impl Token {
    /// The token whose text is `text`.
    pub fn new(name: &str, text: &str, scopes: Vec<Scope>) -> Self {
        Self { name: name.to_owned(), digest: digest(text), scopes, outbound: None }
    }

    /// The same text and limits as another's, with other rights.
    pub fn of(&self, name: &str, scopes: Vec<Scope>) -> Self {
        Self { name: name.to_owned(), digest: self.digest, scopes, outbound: self.outbound }
    }

    /// Who calls out with it, where it has limits for that.
    pub(super) fn dialer(&self) -> Option<Dialer> {
        let (key, name) = (self.digest, self.name.as_str().into());
        self.outbound.map(|limits| Dialer { key, name, limits })
    }

    /// Whether `text` is what the request must carry. Takes as long whatever it is.
    pub fn is(&self, text: &str) -> bool {
        same(&self.digest, &digest(text))
    }
}

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Token")
            .field("name", &self.name)
            .field("scopes", &self.scopes)
            .field("outbound", &self.outbound)
            .finish_non_exhaustive()
    }
}

/// What is kept of a token.
pub(super) fn digest(text: &str) -> [u8; 32] {
    Sha256::digest(text.as_bytes()).into()
}

/// What a token may do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Scope {
    /// Place, see and steer calls.
    Calls,
    /// Speech requests, jobs and voices.
    Speech,
    /// Everything else: events, drain, reload, and what the other scopes allow to see of all.
    Admin,
    /// Metrics, for whoever only scrapes; `admin` has them, too.
    Metrics,
}

impl<'de> Deserialize<'de> for Token {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(Form)
    }
}

/// Reads a token by hand: an untagged enum would swallow the reason why a secret cannot be read, and with it the
/// name of the variable that is empty.
struct Form;

impl<'de> Visitor<'de> for Form {
    type Value = Token;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a string or { name, token or sha256, scopes, outbound }")
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<Token, E> {
        token(String::new(), &Secret::new(text), Vec::new(), "a string of `tokens`")
    }

    fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<Token, A::Error> {
        #[derive(Deserialize)]
        #[serde(deny_unknown_fields)]
        struct Table {
            name: Option<String>,
            token: Option<Secret>,
            sha256: Option<Secret>,
            #[serde(default)]
            scopes: Vec<Scope>,
            outbound: Option<Limits>,
            env: Option<String>,
            file: Option<PathBuf>,
        }
        let table = Table::deserialize(MapAccessDeserializer::new(map))?;
        let (name, outbound) = (table.name.unwrap_or_default(), table.outbound);
        if let Some(hash) = table.sha256 {
            if table.token.is_some() || table.env.is_some() || table.file.is_some() {
                return Err(Error::custom("give one of `token`, `sha256`, `env` and `file`"));
            }
            let digest = hashed(hash.reveal()).ok_or_else(|| {
                Error::custom("sha256 must be 64 hexadecimal digits: `printf %s \"$TOKEN\" | sha256sum` prints them")
            })?;
            return Ok(Token { name, digest, scopes: table.scopes, outbound });
        }
        let (secret, from) = match (table.token, table.env, table.file) {
            (Some(token), None, None) => (token, "`token`".to_owned()),
            (None, Some(env), None) => {
                (Secret::from_env(&env).map_err(Error::custom)?, format!("the variable `{env}`"))
            }
            (None, None, Some(file)) => {
                let from = format!("the file `{}`", file.display());
                (Secret::from_file(&file).map_err(Error::custom)?, from)
            }
            _ => return Err(Error::custom("give one of `token`, `sha256`, `env` and `file`")),
        };
        token(name, &secret, table.scopes, &from).map(|token| Token { outbound, ..token })
    }
}

/// A digest from its hexadecimal digits.
fn hashed(hex: &str) -> Option<[u8; 32]> {
    let (pairs, rest) = hex.as_bytes().as_chunks::<2>();
    let digit = |byte: u8| char::from(byte).to_digit(16).map(|digit| digit as u8);
    let bytes: Option<Vec<u8>> = pairs.iter().map(|[high, low]| Some(digit(*high)? << 4 | digit(*low)?)).collect();
    bytes.filter(|_| rest.is_empty())?.try_into().ok()
}

fn token<E: Error>(name: String, secret: &Secret, scopes: Vec<Scope>, from: &str) -> Result<Token, E> {
    let text = secret.reveal();
    if text.chars().count() < MIN_TOKEN {
        let who = if name.is_empty() { String::new() } else { format!(" of `{name}`") };
        return Err(E::custom(format!(
            "the token{who} from {from} has fewer than {MIN_TOKEN} characters and could be guessed; `openssl rand -hex 24` \
             makes a good one"
        )));
    }
    Ok(Token { digest: digest(text), name, scopes, outbound: None })
}
