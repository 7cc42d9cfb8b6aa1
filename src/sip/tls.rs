//! Certificates of the TLS listener, and whom TLS trunks are trusted by.

use std::path::Path;

use rustls::{
    crypto::ring,
    pki_types::{CertificateDer, pem::PemObject},
};
use tokio_rustls::TlsAcceptor;

use super::SipError;
use crate::certificate::Certificate;

/// Where Linux distributions keep the roots they trust.
const BUNDLES: [&str; 3] =
    ["/etc/ssl/certs/ca-certificates.crt", "/etc/pki/tls/certs/ca-bundle.crt", "/etc/ssl/cert.pem"];

/// A certificate that is read again when its files change, and what connections are accepted with.
#[derive(Clone)]
pub(super) struct Tls {
    pub(super) certificate: Certificate,
    pub(super) acceptor: TlsAcceptor,
}

impl Tls {
    /// The chain of `cert` with the key of `key`, both PEM files.
    pub(super) fn open(cert: &Path, key: &Path) -> Result<Tls, SipError> {
        let certificate = Certificate::open("[sip] tls", cert, key).map_err(SipError::Config)?;
        let config = certificate.config(&[]).map_err(|why| SipError::Config(format!("[sip] tls: {why}")))?;
        Ok(Tls { certificate, acceptor: config.into() })
    }
}

/// The authorities that trunks are trusted by, PEM: those of `file`, else of the system. Without any no TLS trunk
/// can be trusted, and calls to it fail saying so.
pub(super) async fn roots(file: Option<&Path>) -> Result<Option<Vec<u8>>, SipError> {
    let Some(file) = file else { return Ok(system_roots().await) };
    let wrong = |why: String| SipError::Config(format!("[sip] tls_roots: {}: {why}", file.display()));
    let pem = tokio::fs::read(file).await.map_err(|error| wrong(error.to_string()))?;
    match CertificateDer::pem_slice_iter(&pem).collect::<Result<Vec<_>, _>>() {
        Ok(found) if !found.is_empty() => Ok(Some(pem)),
        Ok(_) => Err(wrong("no certificate in it".to_owned())),
        Err(error) => Err(wrong(error.to_string())),
    }
}

async fn system_roots() -> Option<Vec<u8>> {
    for bundle in BUNDLES {
        if let Ok(pem) = tokio::fs::read(bundle).await {
            return Some(pem);
        }
    }
    None
}

/// Names the provider that the stack's TLS client takes. One that is there already stays.
pub(super) fn install_provider() {
    ring::default_provider().install_default().ok();
}
