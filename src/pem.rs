//! Certificates and keys from PEM files, with errors that name the file.

use std::fmt::Display;
use std::path::Path;

use rustls::RootCertStore;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};

/// The certificates of a file, at least one.
///
/// # Errors
/// The file, and what is wrong with it.
pub fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, String> {
    let all: Vec<_> =
        CertificateDer::pem_file_iter(path).and_then(Iterator::collect).map_err(|why| wrong(path, why))?;
    if all.is_empty() { Err(wrong(path, "no certificate in it")) } else { Ok(all) }
}

/// The authorities of a file, by which others' certificates are judged.
///
/// # Errors
/// As [`certificates`].
pub fn authorities(path: &Path) -> Result<RootCertStore, String> {
    let mut roots = RootCertStore::empty();
    for authority in certificates(path)? {
        roots.add(authority).map_err(|why| wrong(path, why))?;
    }
    Ok(roots)
}

/// The private key of a file.
///
/// # Errors
/// As [`certificates`].
pub fn key(path: &Path) -> Result<PrivateKeyDer<'static>, String> {
    PrivateKeyDer::from_pem_file(path).map_err(|why| wrong(path, why))
}

/// What is said of a file that cannot be used.
pub fn wrong(path: &Path, why: impl Display) -> String {
    format!("{}: {why}", path.display())
}
