//! The HTTP client of this crate: one TLS provider, certificates not verified (a test instrument calls gateways
//! with certificates they made for themselves).

use std::time::Duration;

/// A client; TLS by `ring`, whatever else the process has installed.
///
/// # Errors
/// The TLS part could not be built.
pub fn client() -> reqwest::Result<reqwest::Client> {
    // reqwest takes the process's provider; installing it twice is no error worth telling.
    let _ = rustls::crypto::ring::default_provider().install_default();
    reqwest::Client::builder()
        .connect_timeout(Duration::from_secs(5))
        .timeout(Duration::from_secs(30))
        .tls_danger_accept_invalid_certs(true)
        .build()
}
