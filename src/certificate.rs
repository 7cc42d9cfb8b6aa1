//! The certificate of a listener: read from PEM files, and again when they change. Connections that are there go on.
//!
//! Listeners of HTTPS and of SIP over TLS use it alike.

use std::collections::HashMap;
use std::fmt;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, PoisonError, RwLock};
use std::time::{Duration, SystemTime};

use rustls::ServerConfig;
use rustls::crypto::ring;
use rustls::server::{ClientHello, ResolvesServerCert};
use rustls::sign::CertifiedKey;

use crate::pem;

/// How often files are looked at; see [`Certificate::refresh`].
pub const LOOK: Duration = Duration::from_secs(5);
/// The protocol in which an authority asks a TLS server for proof of its name (RFC 8737).
pub const CHALLENGE: &[u8] = b"acme-tls/1";

/// A certificate in use. Clones mean the same.
#[derive(Clone, Debug)]
pub struct Certificate(Arc<Inner>);

struct Inner {
    /// Whose it is, as the configuration calls it: `[http] tls`.
    of: &'static str,
    /// The chain, and its private key.
    files: [PathBuf; 2],
    current: RwLock<Current>,
    /// What authorities are shown who ask for proof, by name.
    challenges: RwLock<HashMap<String, Arc<CertifiedKey>>>,
}

struct Current {
    key: Arc<CertifiedKey>,
    stamp: Stamp,
}

/// What tells one state of the files from another.
type Stamp = [Option<(SystemTime, u64)>; 2];

impl Certificate {
    /// Reads the files of `of`, the key of the configuration that errors name.
    ///
    /// # Errors
    /// Which file is wrong, and how.
    pub fn open(of: &'static str, cert: &Path, key: &Path) -> Result<Self, String> {
        let files = [cert.to_owned(), key.to_owned()];
        let stamp = stamp(&files);
        let key = Arc::new(read(of, &files)?);
        Ok(Self::with(of, files, Current { key, stamp }))
    }

    /// As [`Certificate::open`]; while the files cannot be used, `instead` is shown.
    pub fn open_or(of: &'static str, cert: &Path, key: &Path, instead: CertifiedKey) -> Self {
        Self::open(of, cert, key).unwrap_or_else(|_| {
            let current = Current { key: Arc::new(instead), stamp: Stamp::default() };
            Self::with(of, [cert.to_owned(), key.to_owned()], current)
        })
    }

    /// Chain and key in use, to be shown elsewhere.
    pub fn in_use(&self) -> CertifiedKey {
        CertifiedKey::clone(&self.0.current.read().unwrap_or_else(PoisonError::into_inner).key)
    }

    fn with(of: &'static str, files: [PathBuf; 2], current: Current) -> Self {
        let (current, challenges) = (RwLock::new(current), RwLock::default());
        Self(Arc::new(Inner { of, files, current, challenges }))
    }

    /// Takes up the files as they are now; `false` when they have not changed. Blocks.
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
        let read = read(inner.of, &inner.files);
        let mut current = inner.current.write().unwrap_or_else(PoisonError::into_inner);
        // Also where it failed: one state of the files is told of once.
        current.stamp = stamp;
        current.key = Arc::new(read?);
        Ok(true)
    }

    /// As [`Certificate::refresh`], off the runtime's workers, with a line in the log where something changed.
    pub async fn look(&self) {
        let (own, of) = (self.clone(), self.0.of);
        // A folder may lie on a disk that takes its time.
        match tokio::task::spawn_blocking(move || own.refresh()).await {
            Ok(Ok(true)) => tracing::info!("the certificate of {of} has changed"),
            Ok(Err(error)) => {
                tracing::error!(%error, "a certificate has changed and cannot be used: the old one stays")
            }
            Ok(Ok(false)) | Err(_) => {}
        }
    }

    /// What connections are accepted with; the favourite of `protocols` goes first, none: whatever the client speaks.
    ///
    /// # Errors
    /// TLS is not possible at all.
    pub fn config(&self, protocols: &[&[u8]]) -> Result<Arc<ServerConfig>, rustls::Error> {
        let builder = ServerConfig::builder_with_provider(Arc::new(ring::default_provider()))
            .with_safe_default_protocol_versions()?;
        let mut config = builder.with_no_client_auth().with_cert_resolver(self.0.clone());
        config.alpn_protocols = protocols.iter().map(|name| name.to_vec()).collect();
        Ok(Arc::new(config))
    }

    /// The first certificate of the chain in use, DER.
    #[cfg(test)]
    pub(crate) fn leaf(&self) -> Option<Vec<u8>> {
        let current = self.0.current.read().unwrap_or_else(PoisonError::into_inner);
        current.key.cert.first().map(|leaf| leaf.to_vec())
    }

    /// Shows `proof` to authorities that ask for `name` in [`CHALLENGE`]; `None`: nothing any more.
    pub fn prove(&self, name: &str, proof: Option<CertifiedKey>) {
        let mut challenges = self.0.challenges.write().unwrap_or_else(PoisonError::into_inner);
        match proof {
            Some(proof) => challenges.insert(name.to_ascii_lowercase(), Arc::new(proof)),
            None => challenges.remove(&name.to_ascii_lowercase()),
        };
    }
}

impl ResolvesServerCert for Inner {
    fn resolve(&self, hello: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        // An authority offers that protocol alone (RFC 8737 section 3).
        if hello.alpn().is_some_and(|mut protocols| protocols.next() == Some(CHALLENGE)) {
            let name = hello.server_name()?.to_ascii_lowercase();
            return self.challenges.read().unwrap_or_else(PoisonError::into_inner).get(&name).cloned();
        }
        Some(self.current.read().unwrap_or_else(PoisonError::into_inner).key.clone())
    }
}

impl fmt::Debug for Inner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Certificate").field("files", &self.files).finish_non_exhaustive()
    }
}

fn stamp(files: &[PathBuf; 2]) -> Stamp {
    let of = |path: &PathBuf| -> io::Result<_> {
        let file = std::fs::metadata(path)?;
        Ok((file.modified()?, file.len()))
    };
    [of(&files[0]).ok(), of(&files[1]).ok()]
}

fn read(of: &str, [cert, key]: &[PathBuf; 2]) -> Result<CertifiedKey, String> {
    let keyed = || {
        let (chain, key) = (pem::certificates(cert)?, pem::key(key)?);
        // Also compares the two.
        CertifiedKey::from_der(chain, key, &ring::default_provider()).map_err(|why| pem::wrong(cert, why))
    };
    keyed().map_err(|error| format!("{of}: {error}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn changed_files_are_taken_up_and_broken_ones_leave_what_was() {
        let data = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/sip");
        let folder = tempfile::tempdir().expect("a folder");
        let (cert_file, key_file) = (folder.path().join("cert.pem"), folder.path().join("key.pem"));
        let good = |name: &str| std::fs::read(data.join(name)).expect("readable");
        let (cert, key) = (good("test-only-cert.pem"), good("test-only-key.pem"));
        std::fs::write(&cert_file, &cert).expect("written");
        let open = || Certificate::open("[http] tls", &cert_file, &key_file);
        let error = open().expect_err("no key");
        assert!(error.starts_with("[http] tls: ") && error.contains("key.pem"), "{error}");
        std::fs::write(&key_file, &key).expect("written");
        let certificate = open().expect("usable");
        assert_eq!(certificate.refresh(), Ok(false));
        let in_use = || certificate.0.current.read().expect("not poisoned").key.clone();
        let first = in_use();

        std::fs::write(&cert_file, b"half a certificate").expect("written");
        let error = certificate.refresh().expect_err("broken");
        assert!(error.contains("cert.pem"), "{error}");
        assert!(Arc::ptr_eq(&first, &in_use()));
        assert_eq!(certificate.refresh(), Ok(false), "told of once");
        // Until there is one that can be used, something is shown.
        let until = Certificate::open_or("[http] acme", &cert_file, &key_file, CertifiedKey::clone(&first));
        assert_eq!(until.leaf().as_deref(), first.cert.first().map(AsRef::as_ref));
        std::fs::write(&cert_file, [&cert[..], b"\n"].concat()).expect("written");
        assert_eq!((certificate.refresh(), until.refresh()), (Ok(true), Ok(true)));
        assert!(!Arc::ptr_eq(&first, &in_use()));
        certificate.config(&[b"h2"]).expect("TLS is possible");
    }
}
