//! `[cluster]`: what machines of one gateway know of each other, and the TLS between them.

use std::path::PathBuf;
use std::sync::Arc;

use rustls::crypto::ring;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::WebPkiClientVerifier;
use rustls::{ClientConfig, RootCertStore, ServerConfig};
use serde::Deserialize;
use tokio_rustls::{TlsAcceptor, TlsConnector};

use super::link::Worker;
use super::serve::Door;
use crate::pem;
use crate::secret::Secret;

/// `[cluster]`
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Cluster {
    /// What every machine must know; none: TLS, or the loopback, is enough.
    pub token: Option<Secret>,
    /// Mutual TLS between machines; none: on loopback only.
    pub tls: Option<Tls>,
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
    /// The authority that vouches for every machine, and for nobody else.
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
        let Some((host, _)) = parts else { return Err(format!("`{address}` is no address: write host:port")) };
        let host = host.trim_matches(['[', ']']);
        let near = host == "localhost" || host.parse::<std::net::IpAddr>().is_ok_and(|ip| ip.is_loopback());
        match near || self.tls.is_some() {
            true => Ok(()),
            false => Err(format!(
                "`{address}` is on a network, where text and speech would be open to all: set [cluster] tls = {{ cert, key, ca }}"
            )),
        }
    }

    fn secret(&self) -> Secret {
        self.token.clone().unwrap_or_else(|| Secret::new(""))
    }
}

fn in_tls(error: String) -> String {
    format!("[cluster] tls: {error}")
}

fn connector(files: &Tls) -> Result<TlsConnector, String> {
    let (chain, key, roots) = read(files)?;
    let config = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_safe_default_protocol_versions()
        .map_err(|error| error.to_string())?
        .with_root_certificates(roots)
        .with_client_auth_cert(chain, key)
        .map_err(|why| pem::wrong(&files.cert, why))?;
    Ok(Arc::new(config).into())
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
    let (chain, key) = (pem::certificates(&files.cert)?, pem::key(&files.key)?);
    let mut roots = RootCertStore::empty();
    for authority in pem::certificates(&files.ca)? {
        roots.add(authority).map_err(|why| pem::wrong(&files.ca, why))?;
    }
    Ok((chain, key, roots))
}

#[cfg(test)]
mod tests {
    use super::*;

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
