//! HTTPS: the certificate, read again when its files change.

use std::fmt;
use std::io;
use std::path::PathBuf;
use std::sync::{Arc, PoisonError, RwLock};
use std::time::SystemTime;

use rustls::ServerConfig;
use rustls::crypto::ring;
use rustls::server::{ClientHello, ResolvesServerCert};
use rustls::sign::CertifiedKey;
use tokio_rustls::TlsAcceptor;

use super::config::Tls;
use crate::pem;

/// A certificate in use. Clones mean the same.
#[derive(Clone, Debug)]
pub struct Certificate(Arc<Inner>);

struct Inner {
    files: Tls,
    current: RwLock<Current>,
}

struct Current {
    key: Arc<CertifiedKey>,
    stamp: Stamp,
}

/// What tells one state of the files from another.
type Stamp = [Option<(SystemTime, u64)>; 2];

impl Certificate {
    /// Reads the files.
    ///
    /// # Errors
    /// Which file is wrong, and how.
    pub fn open(files: &Tls) -> Result<Self, String> {
        let stamp = stamp(files);
        let current = Current { key: Arc::new(read(files)?), stamp };
        Ok(Self(Arc::new(Inner { files: files.clone(), current: RwLock::new(current) })))
    }

    /// Takes up the files as they are now; `false` when they have not changed. Connections that are there go on.
    ///
    /// # Errors
    /// They cannot be used; what was in use stays so.
    pub fn refresh(&self) -> Result<bool, String> {
        let inner = &self.0;
        // Before the look at them, so that a change meanwhile is found the next time.
        let stamp = stamp(&inner.files);
        if stamp == inner.current.read().unwrap_or_else(PoisonError::into_inner).stamp {
            return Ok(false);
        }
        let read = read(&inner.files);
        let mut current = inner.current.write().unwrap_or_else(PoisonError::into_inner);
        // Also where it failed: one state of the files is told of once.
        current.stamp = stamp;
        current.key = Arc::new(read?);
        Ok(true)
    }

    /// What connections are accepted with.
    ///
    /// # Errors
    /// TLS is not possible at all.
    pub(super) fn acceptor(&self) -> Result<TlsAcceptor, rustls::Error> {
        let builder = ServerConfig::builder_with_provider(Arc::new(ring::default_provider()))
            .with_safe_default_protocol_versions()?;
        let mut config = builder.with_no_client_auth().with_cert_resolver(self.0.clone());
        config.alpn_protocols = vec![b"http/1.1".to_vec()];
        Ok(TlsAcceptor::from(Arc::new(config)))
    }
}

impl ResolvesServerCert for Inner {
    fn resolve(&self, _: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        Some(self.current.read().unwrap_or_else(PoisonError::into_inner).key.clone())
    }
}

impl fmt::Debug for Inner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Certificate").field("files", &self.files).finish_non_exhaustive()
    }
}

fn stamp(files: &Tls) -> Stamp {
    let of = |path: &PathBuf| -> io::Result<_> {
        let file = std::fs::metadata(path)?;
        Ok((file.modified()?, file.len()))
    };
    [of(&files.cert).ok(), of(&files.key).ok()]
}

fn read(files: &Tls) -> Result<CertifiedKey, String> {
    let keyed = || {
        let (chain, key) = (pem::certificates(&files.cert)?, pem::key(&files.key)?);
        // Also compares the two.
        CertifiedKey::from_der(chain, key, &ring::default_provider()).map_err(|why| pem::wrong(&files.cert, why))
    };
    keyed().map_err(|error| format!("[http] tls: {error}"))
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    #[test]
    fn changed_files_are_taken_up_and_broken_ones_leave_what_was() {
        let data = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/sip");
        let folder = tempfile::tempdir().expect("a folder");
        let files = Tls { cert: folder.path().join("cert.pem"), key: folder.path().join("key.pem") };
        let good = |name: &str| std::fs::read(data.join(name)).expect("readable");
        let (cert, key) = (good("test-only-cert.pem"), good("test-only-key.pem"));
        std::fs::write(&files.cert, &cert).expect("written");
        assert!(Certificate::open(&files).expect_err("no key").contains("key.pem"));
        std::fs::write(&files.key, &key).expect("written");
        let certificate = Certificate::open(&files).expect("usable");
        assert_eq!(certificate.refresh(), Ok(false));
        let in_use = || certificate.0.current.read().expect("not poisoned").key.clone();
        let first = in_use();

        std::fs::write(&files.cert, b"half a certificate").expect("written");
        let error = certificate.refresh().expect_err("broken");
        assert!(error.contains("cert.pem"), "{error}");
        assert!(Arc::ptr_eq(&first, &in_use()));
        assert_eq!(certificate.refresh(), Ok(false), "told of once");
        std::fs::write(&files.cert, [&cert[..], b"\n"].concat()).expect("written");
        assert_eq!(certificate.refresh(), Ok(true));
        assert!(!Arc::ptr_eq(&first, &in_use()));
        certificate.acceptor().expect("TLS is possible");
    }
}
