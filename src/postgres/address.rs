//! Where a database is: a file of SQLite's, or the URL of a PostgreSQL.

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustls::ClientConfig;
use serde::Deserialize;
use serde::de::{Deserializer, Error as _};
use tokio_postgres::config::{Host, SslMode};

use super::tls;
use crate::secret::Secret;

/// How a URL of PostgreSQL begins (libpq, section 34.1.1.2 of its manual).
const SCHEMES: [&str; 2] = ["postgres://", "postgresql://"];

/// `database` of a section: a path, a URL `postgres://...`, or a URL that is a secret (`{ env = "NAME" }`,
/// `{ file = "PATH" }`).
#[derive(Clone, PartialEq)]
pub enum Database {
    /// An SQLite file on this machine; empty: the default of its section.
    File(PathBuf),
    /// A PostgreSQL that several gateways share.
    Postgres(Address),
}

impl Database {
    /// Whether it is left to the default.
    pub fn is_unset(&self) -> bool {
        matches!(self, Database::File(path) if path.as_os_str().is_empty())
    }

    /// The SQLite file, if it is one.
    pub fn path(&self) -> Option<&Path> {
        match self {
            Database::File(path) => Some(path),
            Database::Postgres(_) => None,
        }
    }

    /// Whether other gateways may use it, too.
    pub fn is_shared(&self) -> bool {
        matches!(self, Database::Postgres(_))
    }
}

impl Default for Database {
    fn default() -> Self {
        Database::File(PathBuf::new())
    }
}

impl<T: Into<PathBuf>> From<T> for Database {
    fn from(path: T) -> Self {
        Database::File(path.into())
    }
}

impl fmt::Display for Database {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Database::File(path) => write!(f, "{}", path.display()),
            Database::Postgres(address) => write!(f, "{address}"),
        }
    }
}

impl fmt::Debug for Database {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", self.to_string())
    }
}

impl<'de> Deserialize<'de> for Database {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        #[derive(Deserialize)]
        #[serde(untagged, expecting = "a path, a URL `postgres://...`, { env = \"NAME\" } or { file = \"PATH\" }")]
        enum Source {
            Plain(String),
            Kept(Secret),
        }
        let url = match Source::deserialize(deserializer)? {
            Source::Plain(text) if !SCHEMES.iter().any(|scheme| text.starts_with(scheme)) => return Ok(text.into()),
            Source::Plain(url) => Secret::new(url),
            Source::Kept(url) => url,
        };
        Address::new(url).map(Database::Postgres).map_err(D::Error::custom)
    }
}

/// A PostgreSQL. Its URL may hold a password and is never shown.
#[derive(Clone, PartialEq)]
pub struct Address(Secret);

/// What a connection needs.
#[derive(Clone)]
pub(super) struct Target {
    pub(super) config: tokio_postgres::Config,
    /// None: in the clear.
    pub(super) tls: Option<Arc<ClientConfig>>,
}

/// What the URL says of TLS.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Security {
    Clear,
    /// The server's certificate must be vouched for by an authority of this file, or of the system.
    Verified(Option<PathBuf>),
}

impl Address {
    /// The PostgreSQL at `url`: `postgres://user:password@host:port/database`, with `sslmode` and `sslrootcert` as
    /// [`Address::read`] says, and what else `tokio-postgres` knows.
    ///
    /// # Errors
    /// What is wrong with it, without what it says.
    pub fn new(url: Secret) -> Result<Self, String> {
        let address = Self(url);
        address.read()?;
        Ok(address)
    }

    /// How to connect.
    ///
    /// # Errors
    /// A file of authorities cannot be used.
    pub(super) fn target(&self) -> Result<Target, String> {
        let (mut config, security) = self.read()?;
        let tls = match security {
            Security::Clear => None,
            Security::Verified(authorities) => Some(tls::client(authorities.as_deref())?),
        };
        config.ssl_mode(if tls.is_some() { SslMode::Require } else { SslMode::Disable });
        Ok(Target { config, tls })
    }

    /// `sslmode`: `disable`, or `require` and `verify-full`, which both check the certificate and its name. Without one,
    /// TLS is asked for wherever the way leads over a network: the texts of jobs and the words of callers go over it.
    fn read(&self) -> Result<(tokio_postgres::Config, Security), String> {
        let url = self.0.reveal();
        if !SCHEMES.iter().any(|scheme| url.starts_with(scheme)) {
            return Err("the secret is no URL of a PostgreSQL: write postgres://user:password@host/database".into());
        }
        let (base, query) = url.split_once('?').unwrap_or((url, ""));
        // Only to take its parameters apart, and out of percent signs.
        let pairs = reqwest::Url::parse(&format!("http://x/?{query}")).map_err(|error| error.to_string())?;
        let (mut mode, mut authorities) = (None, None);
        for (name, value) in pairs.query_pairs() {
            match &*name {
                "sslmode" => mode = Some(value.into_owned()),
                "sslrootcert" => authorities = Some(PathBuf::from(value.into_owned())),
                _ => {}
            }
        }
        let ours = |pair: &&str| !pair.starts_with("sslmode=") && !pair.starts_with("sslrootcert=");
        let theirs: Vec<&str> = query.split('&').filter(|pair| !pair.is_empty()).filter(ours).collect();
        let rest = if theirs.is_empty() { base.to_owned() } else { format!("{base}?{}", theirs.join("&")) };
        let config: tokio_postgres::Config =
            rest.parse().map_err(|error: tokio_postgres::Error| super::told(&error))?;
        let near = |host: &Host| match host {
            Host::Unix(_) => true,
            Host::Tcp(name) => {
                name == "localhost" || name.parse::<std::net::IpAddr>().is_ok_and(|address| address.is_loopback())
            }
        };
        if config.get_hosts().is_empty() {
            return Err("the URL names no host: write postgres://user:password@host/database".into());
        }
        for name in
            config.get_hosts().iter().filter_map(|host| if let Host::Tcp(name) = host { Some(name) } else { None })
        {
            crate::host::split(name)?;
        }
        let security = match mode.as_deref() {
            Some("disable") => Security::Clear,
            None if config.get_hosts().iter().all(near) => Security::Clear,
            None | Some("require" | "verify-full") => Security::Verified(authorities),
            Some(other) => {
                return Err(format!(
                    "sslmode `{other}`: write verify-full (or require, which means the same here) or disable"
                ));
            }
        };
        Ok((config, security))
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Ok((config, _)) = self.read() else { return f.write_str("PostgreSQL") };
        let hosts = config.get_hosts().iter().map(|host| match host {
            Host::Tcp(name) => name.clone(),
            Host::Unix(path) => path.display().to_string(),
        });
        let hosts: Vec<String> = hosts.collect();
        write!(
            f,
            "PostgreSQL at {}, database {}",
            hosts.join(", "),
            config.get_dbname().unwrap_or("of the user's name")
        )
    }
}

impl fmt::Debug for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, Deserialize)]
    struct Section {
        database: Database,
    }

    fn read(value: &str) -> Result<Database, String> {
        toml::from_str::<Section>(&format!("database = {value}"))
            .map(|section| section.database)
            .map_err(|error| error.message().to_owned())
    }

    fn security(url: &str) -> Result<Security, String> {
        Address(Secret::new(url)).read().map(|(_, security)| security)
    }

    #[test]
    fn a_database_is_a_path_or_a_url_and_shows_no_password() {
        assert!(read("\"\"").expect("the default").is_unset());
        let path = read("\"/srv/jobs.sqlite\"").expect("a path");
        assert_eq!((path.path(), path.is_shared()), (Some(Path::new("/srv/jobs.sqlite")), false));
        let url = "postgres://antiphon:sesame@db.internal:5433/voice?application_name=sesame";
        let shared = read(&format!("\"{url}\"")).expect("a URL");
        assert!(shared.is_shared() && shared.path().is_none());
        assert_eq!(shared.to_string(), "PostgreSQL at db.internal, database voice");
        assert!(!format!("{shared:?}").contains("sesame"));
        let folder = tempfile::tempdir().expect("a folder");
        let file = folder.path().join("url");
        std::fs::write(&file, format!("{url}\n")).expect("written");
        assert_eq!(read(&format!("{{ file = {file:?} }}")), Ok(shared));
        std::fs::write(&file, "sesame").expect("written");
        let error = read(&format!("{{ file = {file:?} }}")).expect_err("no URL");
        assert!(error.contains("postgres://") && !error.contains("sesame"), "{error}");
        assert!(read("5").is_err());
    }

    #[test]
    fn a_connection_over_a_network_is_secured_unless_the_url_says_otherwise() {
        let system = Ok(Security::Verified(None));
        for near in ["postgres://127.0.0.1/a", "postgresql://u@localhost:5433/a", "postgres:///a?host=/run/postgresql"]
        {
            assert_eq!(security(near), Ok(Security::Clear), "{near}");
        }
        assert_eq!(security("postgres://db/a"), system);
        assert_eq!(security("postgres://127.0.0.1/a?sslmode=require"), system);
        assert_eq!(security("postgres://db/a?sslmode=disable&connect_timeout=3"), Ok(Security::Clear));
        let own = security("postgres://db/a?sslmode=verify-full&sslrootcert=%2Fetc%2Fca.pem");
        assert_eq!(own, Ok(Security::Verified(Some("/etc/ca.pem".into()))));
        for (wrong, why) in [
            ("postgres://db/a?sslmode=prefer", "verify-full"),
            ("postgres://db/a?sesame=1", "unknown option"),
            ("postgres:///a", "no host"),
            ("mysql://db/a", "postgres://"),
        ] {
            let error = security(wrong).expect_err(wrong);
            assert!(error.contains(why), "{wrong}: {error}");
        }
    }
}
