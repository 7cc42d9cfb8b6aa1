//! A certificate from an authority, without anybody's hand: ordered, proved, kept and renewed (ACME, RFC 8555).
//!
//! The authority proves a name by a TLS connection to port 443 of it (TLS-ALPN-01, RFC 8737), which the HTTPS listener
//! answers itself: no other port is opened and no file served.
//!
//! - `schedule`: when, with time as an argument
//! - `order`: the exchange with the authority, by the crate `instant-acme` through our HTTP client
//!
//! # Why
//! *A valid certificate is never given up.* What an order brings is looked at before it takes the old one's place, in one
//! file that holds chain and key, so that no moment has one without the other. An order that fails is told of, with how
//! long the present certificate lasts, and made again later: authorities count failures.

mod order;
mod schedule;

use std::fs::DirBuilder;
use std::net::IpAddr;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustls::crypto::ring;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::sign::CertifiedKey;
use serde::Deserialize;
use tokio::sync::watch;

use self::order::Authority;
use self::schedule::{Attempts, Held};
use crate::certificate::Certificate;
use crate::clock;
use crate::file::replace_secret;
use crate::host;
use crate::pem;

/// `[http.acme]`
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Acme {
    /// What the certificate is for; the authority connects to port 443 of each.
    pub domains: Vec<String>,
    /// Whom the authority writes to when something is wrong; empty: no address is given.
    #[serde(default)]
    pub email: String,
    /// The authority.
    #[serde(default = "lets_encrypt")]
    pub directory: String,
    /// PEM file with the roots that the authority itself is trusted by; `None`: those of the system.
    #[serde(default)]
    pub roots: Option<PathBuf>,
}

fn lets_encrypt() -> String {
    "https://acme-v02.api.letsencrypt.org/directory".into()
}

impl Acme {
    /// Checks what the types cannot say.
    ///
    /// # Errors
    /// The key and what it must be.
    pub fn validate(&self) -> Result<(), String> {
        if self.domains.is_empty() {
            return Err("domains: name at least one, like \"voice.example.com\"".into());
        }
        let sound = |name: &&String| {
            let letters = name.bytes().all(|b| b.is_ascii_alphanumeric() || b"-.".contains(&b));
            letters && name.contains('.') && !name.starts_with('.') && !name.ends_with('.') && !name.contains("..")
        };
        if let Some(name) = self.domains.iter().find(|name| !sound(name) || name.parse::<IpAddr>().is_ok()) {
            return Err(format!(
                "domains: `{name}` is no name that a certificate can be had for by connecting to it; write a host name \
                 without scheme, port or `*`, like \"voice.example.com\""
            ));
        }
        if !self.email.is_empty() && !self.email.contains('@') {
            return Err(format!("email: `{}` is no address of mail", self.email));
        }
        let read = host::url(&self.directory, &["https"]).map(|_| ());
        read.map_err(|error| format!("directory {error}; Let's Encrypt's is \"{}\"", lets_encrypt()))
    }

    /// The names as certificates have them.
    fn names(&self) -> Vec<String> {
        self.domains.iter().map(|name| name.to_ascii_lowercase()).collect()
    }
}

/// Keeps a certificate.
pub struct Keeper {
    config: Acme,
    /// Where account and certificate are.
    folder: PathBuf,
    certificate: Certificate,
}

/// Chain and key.
const CERTIFICATE: &str = "certificate.pem";

impl Keeper {
    /// With what `folder` holds; until there is something, `instead` is shown, or a certificate of the gateway's own.
    ///
    /// # Errors
    /// The folder cannot be made, or the roots cannot be read.
    pub fn open(config: Acme, folder: PathBuf, instead: Option<CertifiedKey>) -> Result<Self, String> {
        let failed = |why: &dyn std::fmt::Display| format!("[http] acme: {}: {why}", folder.display());
        DirBuilder::new().recursive(true).mode(0o700).create(&folder).map_err(|error| failed(&error))?;
        // Also says now what would be wrong with each order.
        Authority::new(&config).map_err(|error| format!("[http] acme: {error}"))?;
        let instead = match instead {
            Some(instead) => instead,
            None => own(&config.names()).map_err(|error| failed(&error))?,
        };
        let file = folder.join(CERTIFICATE);
        if let Err(error) = Held::read(&file)
            && file.exists()
        {
            tracing::warn!(%error, "the stored certificate cannot be used: another one is ordered");
        }
        let certificate = Certificate::open_or("[http] acme", &file, &file, instead);
        Ok(Self { config, folder, certificate })
    }

    /// What the listener shows.
    pub fn certificate(&self) -> &Certificate {
        &self.certificate
    }

    /// Orders when there is a reason to, until `stop`.
    pub async fn keep(self, mut stop: watch::Receiver<bool>) {
        let mut attempts = Attempts::default();
        loop {
            let now = clock::wall();
            let held = self.held();
            let due = held.as_ref().map_or(Duration::ZERO, Held::due);
            let wait = attempts.wait(now, due);
            if !wait.is_zero() {
                tokio::select! {
                    // Also when the application was dropped.
                    _ = stop.changed() => return,
                    () = tokio::time::sleep(wait) => continue,
                }
            }
            let ordered = tokio::select! {
                _ = stop.changed() => return,
                ordered = self.order() => ordered,
            };
            let now = clock::wall();
            let days = |held: Option<Held>| held.map_or(0, |held| held.left(now).as_secs() / 86_400);
            match ordered {
                Ok(held) => {
                    attempts.succeeded(now);
                    let domains = self.config.domains.join(", ");
                    tracing::info!("a certificate for {domains} is in use; it is good for {} days", days(Some(held)));
                }
                Err(error) => {
                    attempts.failed(now);
                    let minutes = attempts.wait(now, Duration::ZERO).as_secs().div_ceil(60);
                    tracing::error!(
                        %error,
                        directory = self.config.directory,
                        days_left = days(held),
                        "no certificate from the authority; what is in use stays, and the next attempt is in {minutes} minutes"
                    );
                }
            }
        }
    }

    /// The stored certificate, if it is for what the configuration names, and of this authority.
    fn held(&self) -> Option<Held> {
        let held = Held::read(&self.folder.join(CERTIFICATE)).ok()?;
        let same = order::account_of(&self.folder).is_some_and(|directory| directory == self.config.directory);
        (same && self.config.names().iter().all(|name| held.names.contains(name))).then_some(held)
    }

    /// One order, from the account to the certificate in use.
    async fn order(&self) -> Result<Held, String> {
        let authority = Authority::new(&self.config)?;
        let names = self.config.names();
        let issued = authority.order(&self.folder, &names, &self.certificate).await;
        names.iter().for_each(|name| self.certificate.prove(name, None));
        let issued = issued?;
        let held =
            Held::of(issued.as_bytes()).map_err(|why| format!("what the authority issued cannot be used: {why}"))?;
        if let Some(name) = names.iter().find(|name| !held.names.contains(name)) {
            return Err(format!("what the authority issued is not for {name}"));
        }
        if held.left(clock::wall()).is_zero() {
            return Err("what the authority issued has expired already; is the clock of this computer right?".into());
        }
        let (folder, certificate) = (self.folder.clone(), self.certificate.clone());
        let taken = tokio::task::spawn_blocking(move || {
            put(&folder.join(CERTIFICATE), issued.as_bytes())?;
            certificate.refresh()
        });
        taken.await.map_err(|error| error.to_string())??;
        Ok(held)
    }
}

/// Writes a file that other users of the machine may not read, whole or not at all.
fn put(file: &Path, bytes: &[u8]) -> Result<(), String> {
    replace_secret(file, bytes).map_err(|error| pem::wrong(file, error))
}

/// A certificate of our own making, which browsers warn of.
fn own(names: &[String]) -> Result<CertifiedKey, String> {
    let made = rcgen::generate_simple_self_signed(names).map_err(|error| error.to_string())?;
    usable(made.cert.der().clone(), &made.signing_key)
}

/// A certificate of our own making and its key as TLS takes them. They are not compared: what looks at certificates there knows
/// nothing of the extension that a proof has, and refuses it because it is critical.
fn usable(certificate: CertificateDer<'static>, key: &rcgen::KeyPair) -> Result<CertifiedKey, String> {
    let key = PrivateKeyDer::Pkcs8(key.serialize_der().into());
    let key = ring::sign::any_supported_type(&key).map_err(|error| error.to_string())?;
    Ok(CertifiedKey::new(vec![certificate], key))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    fn acme(text: &str) -> Result<(), String> {
        toml::from_str::<Acme>(text).map_err(|error| error.to_string())?.validate()
    }

    #[test]
    fn what_no_certificate_can_be_had_for_is_named() {
        acme("domains = [\"voice.example.com\", \"a-b.example\"]\nemail = \"ops@example.com\"").expect("sound");
        for (text, wanted) in [
            ("domains = []", "at least one"),
            ("domains = [\"*.example.com\"]", "`*.example.com`"),
            ("domains = [\"192.0.2.1\"]", "`192.0.2.1`"),
            ("domains = [\"localhost\"]", "`localhost`"),
            ("domains = [\"https://a.example\"]", "without scheme"),
            ("domains = [\"a.example\"]\nemail = \"ops\"", "email"),
            ("domains = [\"a.example\"]\ndirectory = \"http://a.example/dir\"", "https://"),
            ("domains = [\"a.example\"]\nmail = \"ops\"", "unknown field"),
        ] {
            let error = acme(text).expect_err(text);
            assert!(error.contains(wanted), "{text}: {error}");
        }
    }

    #[test]
    fn without_a_stored_certificate_one_of_our_own_is_shown_and_a_broken_one_is_no_obstacle() {
        // A second call says that there is one already.
        let _ = ring::default_provider().install_default();
        let folder = tempfile::tempdir().expect("a folder");
        let config: Acme = toml::from_str("domains = [\"Voice.example\"]").expect("sound");
        let open = || Keeper::open(config.clone(), folder.path().join("acme"), None).expect("made");
        let names = |keeper: &Keeper| Held::parse(&keeper.certificate().leaf().expect("shown")).expect("sound").names;
        let keeper = open();
        assert_eq!((names(&keeper), keeper.held().is_none()), (vec!["voice.example".to_owned()], true));
        let made = rcgen::generate_simple_self_signed(vec!["other.example".to_owned()]).expect("made");
        let file = folder.path().join("acme").join(CERTIFICATE);
        put(&file, (made.cert.pem() + &made.signing_key.serialize_pem()).as_bytes()).expect("written");
        assert_eq!(file.metadata().expect("there").permissions().mode() & 0o777, 0o600);
        let keeper = open();
        assert_eq!(names(&keeper), ["other.example"], "what is stored is shown");
        assert!(keeper.held().is_none(), "it is for something else");
        std::fs::write(&file, "half a certificate").expect("written");
        assert_eq!(names(&open()), ["voice.example"]);
    }
}
