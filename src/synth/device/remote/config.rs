//! `[cluster]`: what machines of one gateway know of each other, and the TLS between them.

use std::path::PathBuf;
use std::sync::Arc;

use redis::{ConnectionAddr, IntoConnectionInfo};
use rustls::crypto::ring;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::WebPkiClientVerifier;
use rustls::{ClientConfig, RootCertStore, ServerConfig};
use serde::Deserialize;
use tokio_rustls::{TlsAcceptor, TlsConnector};

use super::link::Worker;
use super::serve::Door;
use crate::host;
use crate::node::NodeName;
use crate::pem;
use crate::secret::Secret;

/// Shortest token that signs requests between nodes, bytes.
const MIN_TOKEN: usize = 16;

/// `[cluster]`
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Cluster {
    /// What every machine must know; none: TLS, or the loopback, is enough.
    pub token: Option<Secret>,
    /// Mutual TLS between machines; none: on loopback only.
    pub tls: Option<Tls>,
    /// The registry of gateways: `redis://[user:password@]host:port[/database]` or `redis+unix:///path`; none: this
    /// gateway is alone.
    pub redis: Option<Secret>,
    /// The name of this gateway among them; its ids begin with it.
    pub node: Option<NodeName>,
    /// Where the others reach its HTTP: `http://host:port` or `https://host:port`.
    pub advertise: Option<String>,
}

/// `[cluster] tls`: PEM files.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Tls {
    /// The certificate of this machine and those between it and the authority; it must name the host that others
    /// connect to.
    pub cert: PathBuf,
    /// Its private key.
    pub key: PathBuf,
    /// The authority that vouches for every machine of the site, and for no other.
    pub ca: PathBuf,
}

impl Cluster {
    /// The worker at `address` (`host:port`).
    ///
    /// # Errors
    /// It is on another machine and there is no TLS, or a file cannot be used.
    pub fn worker(&self, address: &str) -> Result<Worker, String> {
        self.check(address)?;
        let tls = self.tls.as_ref().map(connector).transpose().map_err(in_tls)?;
        Ok(Worker { address: address.to_owned(), token: self.secret(), tls })
    }

    /// The door of a worker that listens at `address`.
    ///
    /// # Errors
    /// As [`Cluster::worker`].
    pub fn door(&self, address: &str) -> Result<Door, String> {
        self.check(address)?;
        let tls = self.tls.as_ref().map(acceptor).transpose().map_err(in_tls)?;
        Ok(Door { token: self.secret(), tls })
    }

    /// Whether what is said with `address` may be said as it is.
    ///
    /// # Errors
    /// It is no address, or is on another machine and there is no TLS.
    pub fn check(&self, address: &str) -> Result<(), String> {
        let parts = address.rsplit_once(':').filter(|(host, port)| !host.is_empty() && port.parse::<u16>().is_ok());
        let Some((host, _)) = parts else {
            return Err(format!("`{address}` is no address: write host:port, for example 127.0.0.1:7070"));
        };
        host::split(host)?;
        let host = host.trim_matches(['[', ']']);
        let near = host == "localhost" || host.parse::<std::net::IpAddr>().is_ok_and(|ip| ip.is_loopback());
        match near || self.tls.is_some() {
            true => Ok(()),
            false => Err(format!(
                "`{address}` is on a network, where text and speech would be open to all: set [cluster] tls = {{ cert, key, ca }}"
            )),
        }
    }

    /// Whether the keys of nodes go together.
    ///
    /// # Errors
    /// Which do not, and what to set.
    pub fn validate(&self) -> Result<(), String> {
        self.redis.as_ref().map_or(Ok(()), registry)?;
        if let Some(advertise) = &self.advertise {
            let url = reqwest::Url::parse(advertise).map_err(|error| format!("advertise `{advertise}`: {error}"))?;
            host::of(&url).map_err(|error| format!("advertise `{advertise}`: {error}"))?;
            let bare = url.path() == "/" && url.query().is_none() && url.fragment().is_none();
            let known = matches!(url.scheme(), "http" | "https") && url.username().is_empty();
            if !(bare && known && url.has_host()) {
                return Err(format!("advertise `{advertise}`: expected http://host:port or https://host:port"));
            }
        }
        let missing = |key: &str| Err(format!("{key} is not set, and redis needs it: see config/gateway.toml"));
        match self {
            Self { redis: None, .. } => Ok(()),
            Self { node: None, .. } => missing("node"),
            Self { advertise: None, .. } => missing("advertise"),
            Self { token: None, .. } => missing("token"),
            Self { token: Some(token), .. } if token.reveal().len() < MIN_TOKEN => {
                Err(format!("token is shorter than {MIN_TOKEN} characters, and signs what nodes say to each other"))
            }
            _ => Ok(()),
        }
    }

    /// TLS of requests to other nodes, where `tls` says who they are; `None`: as of any HTTPS.
    ///
    /// # Errors
    /// A file cannot be used.
    pub fn client_tls(&self) -> Result<Option<ClientConfig>, String> {
        self.tls.as_ref().map(client).transpose().map_err(in_tls)
    }

    fn secret(&self) -> Secret {
        self.token.clone().unwrap_or_else(|| Secret::new(""))
    }
}

/// Whether `redis` says where a registry is. Errors have its host and nothing more: a password may stand beside it.
fn registry(redis: &Secret) -> Result<(), String> {
    let read = redis.reveal().into_connection_info().map_err(|error| {
        format!("redis: {error}: expected redis://[user:password@]host:port[/database] or redis+unix:///path")
    })?;
    match read.addr() {
        ConnectionAddr::Tcp(host, _) | ConnectionAddr::TcpTls { host, .. } => {
            host::split(host).map(|_| ()).map_err(|why| format!("redis: {why}"))
        }
        _ => Ok(()),
    }
}

fn in_tls(error: String) -> String {
    format!("[cluster] tls: {error}")
}

fn connector(files: &Tls) -> Result<TlsConnector, String> {
    Ok(Arc::new(client(files)?).into())
}

fn client(files: &Tls) -> Result<ClientConfig, String> {
    let (chain, key, roots) = read(files)?;
    let config = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_safe_default_protocol_versions()
        .map_err(|error| error.to_string())?
        .with_root_certificates(roots)
        .with_client_auth_cert(chain, key)
        .map_err(|why| pem::wrong(&files.cert, why))?;
    Ok(config)
}

fn acceptor(files: &Tls) -> Result<TlsAcceptor, String> {
    let (chain, key, roots) = read(files)?;
    let provider = Arc::new(ring::default_provider());
    let clients = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider.clone()).build();
    let config = ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .map_err(|error| error.to_string())?
        .with_client_cert_verifier(clients.map_err(|why| pem::wrong(&files.ca, why))?)
        .with_single_cert(chain, key)
        .map_err(|why| pem::wrong(&files.cert, why))?;
    Ok(Arc::new(config).into())
}

type Read = (Vec<CertificateDer<'static>>, PrivateKeyDer<'static>, RootCertStore);

fn read(files: &Tls) -> Result<Read, String> {
    Ok((pem::certificates(&files.cert)?, pem::key(&files.key)?, pem::authorities(&files.ca)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_node_needs_a_name_an_address_and_a_token_that_cannot_be_guessed() {
        let read = |text: &str| toml::from_str::<Cluster>(text).expect("readable").validate();
        let whole =
            "redis = 'redis://127.0.0.1'\nnode = 'a'\nadvertise = 'http://10.0.0.1:8080'\ntoken = '0123456789abcdef'";
        assert_eq!(read(whole), Ok(()));
        assert_eq!(read(""), Ok(()));
        for key in ["node", "advertise", "token"] {
            let rest: Vec<&str> = whole.lines().filter(|line| !line.starts_with(key)).collect();
            assert!(read(&rest.join("\n")).expect_err(key).starts_with(key), "{key}");
        }
        assert!(read(&whole.replace("89abcdef", "")).is_err(), "a short token");
        for wrong in ["10.0.0.1:8080", "ftp://a", "http://a/b", "http://", "http://u@a"] {
            assert!(read(&whole.replace("http://10.0.0.1:8080", wrong)).is_err(), "{wrong}");
        }
        assert!(toml::from_str::<Cluster>("node = 'A b'").is_err());
        for good in
            ["redis://:a%2Fb@redis.example:6379/2", "redis://[2001:db8::7]:6379", "redis+unix:///run/redis.sock"]
        {
            assert_eq!(read(&whole.replace("redis://127.0.0.1", good)), Ok(()), "{good}");
        }
        for wrong in ["127.0.0.1:6379", "http://u:secret@a", "redis://u:secret@a..b", "redis://u:secret@1.2.3.400:6379"]
        {
            let error = read(&whole.replace("redis://127.0.0.1", wrong)).expect_err(wrong);
            assert!(error.starts_with("redis:") && !error.contains("secret"), "{wrong}: {error}");
        }
    }

    #[test]
    fn a_worker_on_a_network_needs_tls() {
        let open = Cluster::default();
        for near in ["127.0.0.1:7070", "[::1]:7070", "localhost:7070"] {
            assert!(open.check(near).is_ok(), "{near}");
        }
        for far in ["gpu-1:7070", "10.0.0.5:7070", "0.0.0.0:7070"] {
            assert!(open.check(far).expect_err(far).contains("[cluster] tls"), "{far}");
        }
        assert!(open.check("gpu-1").expect_err("no port").contains("host:port"));
        let files = || PathBuf::from("nowhere.pem");
        let closed = Cluster { tls: Some(Tls { cert: files(), key: files(), ca: files() }), ..Cluster::default() };
        assert!(closed.check("gpu-1:7070").is_ok());
        assert!(closed.worker("gpu-1:7070").err().expect("no file").contains("nowhere.pem"));
    }
}
