//! `[webrtc]`.

use std::net::{IpAddr, Ipv4Addr};
use std::time::Duration;

use base64::Engine as _;
use hmac::{Hmac, Mac};
use serde::Deserialize;

use super::relay::Server;
use crate::host;
use crate::node::NodeName;
use crate::secret::Secret;

/// `[webrtc]`: one UDP port for all browser calls.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct WebRtcConfig {
    /// The UDP port of all sessions; 0 takes a free one.
    pub bind_port: u16,
    /// The address to bind. Absent: every address where `public_ip` is set, else loopback only.
    pub bind_ip: Option<IpAddr>,
    /// The addresses that browsers are told to send to, best first, where they are not the bound ones (NAT, containers, several
    /// uplinks): one, or a list. Each leads to the port of the same number here.
    #[serde(deserialize_with = "one_or_many")]
    pub public_ip: Vec<IpAddr>,
    /// STUN and TURN servers that browsers are told about.
    pub ice_servers: Vec<IceServer>,
    /// A TURN server that the gateway itself has browsers reach it by, where nothing reaches its own port.
    pub turn: Option<IceServer>,
    /// Whether the same port number also listens for ICE over TCP, for browsers that may send no UDP.
    pub tcp: bool,
    /// Whether browsers are asked to send next to nothing while their users are silent (Opus DTX, RFC 7587 section 3.1.3), also where
    /// they do not offer it. It saves them and us the packets of silence; its noise is then not heard either.
    pub dtx: bool,
    /// Sessions at the same time; more are refused with 503.
    pub max_sessions: usize,
    /// A session that has not connected after this many seconds is closed.
    pub connect_timeout_s: u64,
    /// What names of sessions begin with, where there are other machines.
    #[serde(skip)]
    pub node: Option<NodeName>,
}

impl Default for WebRtcConfig {
    fn default() -> Self {
        Self {
            bind_port: 0,
            bind_ip: None,
            public_ip: Vec::new(),
            ice_servers: Vec::new(),
            turn: None,
            tcp: false,
            dtx: false,
            max_sessions: 1000,
            connect_timeout_s: 20,
            node: None,
        }
    }
}

impl WebRtcConfig {
    /// What to bind.
    pub(super) fn bind_ip(&self) -> IpAddr {
        match (self.bind_ip, &self.public_ip[..]) {
            (Some(ip), _) => ip,
            (None, []) => IpAddr::V4(Ipv4Addr::LOCALHOST),
            // Where one of them is of the newer family, the socket carries both.
            (None, public) if public.iter().any(IpAddr::is_ipv6) => IpAddr::V6(std::net::Ipv6Addr::UNSPECIFIED),
            (None, _) => IpAddr::V4(Ipv4Addr::UNSPECIFIED),
        }
    }

    /// The gateway's own relay.
    ///
    /// # Errors
    /// What to change.
    pub(super) fn relay(&self) -> Result<Option<(Server, IceServer)>, String> {
        let Some(turn) = &self.turn else { return Ok(None) };
        match &turn.urls[..] {
            [url] if turn.login.is_some() => Ok(Some((Server::parse(url)?, turn.clone()))),
            [_] => Err("needs `username` and `credential`, or `secret`".to_owned()),
            _ => Err("`urls` names one server".to_owned()),
        }
    }

    pub(super) fn connect_timeout(&self) -> Duration {
        Duration::from_secs(self.connect_timeout_s)
    }
}

/// One address as such, several as a list.
fn one_or_many<'de, D: serde::Deserializer<'de>>(value: D) -> Result<Vec<IpAddr>, D::Error> {
    #[derive(Deserialize)]
    #[serde(untagged, expecting = "an IP address or a list of some, such as [\"203.0.113.7\", \"2001:db8::7\"]")]
    enum Written {
        One(IpAddr),
        Many(Vec<IpAddr>),
    }
    Ok(match Written::deserialize(value)? {
        Written::One(ip) => vec![ip],
        Written::Many(ips) => ips,
    })
}

/// A STUN or TURN server (RFC 7064, RFC 7065).
///
/// A TURN password is either fixed (`username`, `credential`), or made for each browser from a `secret` that the TURN
/// server shares (coturn's `use-auth-secret`; draft-uberti-behave-turn-rest-00): the browser then learns a password
/// that ends with `ttl_s`, and never the secret.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(try_from = "Written")]
pub struct IceServer {
    /// `stun:host:port`, `turn:host:port?transport=udp`, ...
    pub urls: Vec<String>,
    /// How browsers log in, for TURN.
    pub login: Option<Login>,
}

/// How a browser logs in at a TURN server.
#[derive(Clone, Debug, PartialEq)]
pub enum Login {
    /// The same name and password for all.
    Fixed {
        /// TURN user.
        username: String,
        /// TURN password; browsers are given it.
        credential: Secret,
    },
    /// A password for each browser, from what we share with the TURN server.
    Shared {
        /// The shared secret.
        secret: Secret,
        /// Stands in each user name, for the TURN server's log and quotas.
        username: String,
        /// How long a password is good for.
        ttl: Duration,
    },
}

/// As it stands in the configuration.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Written {
    urls: Vec<String>,
    username: Option<String>,
    credential: Option<Secret>,
    secret: Option<Secret>,
    ttl_s: Option<u64>,
}

/// Long enough for any call that starts now; a relay is only asked for at its start.
const TTL: Duration = Duration::from_secs(4 * 3600);

impl TryFrom<Written> for IceServer {
    type Error = String;

    fn try_from(written: Written) -> Result<Self, Self::Error> {
        let Written { urls, username, credential, secret, ttl_s } = written;
        let login = match (username, credential, secret) {
            (None, None, None) if ttl_s.is_some() => return Err("`ttl_s` needs `secret`".to_owned()),
            (None, None, None) => None,
            (Some(_), Some(_), None) if ttl_s.is_some() => return Err("`ttl_s` needs `secret`".to_owned()),
            (Some(username), Some(credential), None) => Some(Login::Fixed { username, credential }),
            (username, None, Some(secret)) => {
                let ttl = ttl_s.map_or(TTL, Duration::from_secs);
                Some(Login::Shared { secret, username: username.unwrap_or_else(|| "antiphon".to_owned()), ttl })
            }
            (Some(_), None, None) => return Err("`username` needs `credential` or `secret`".to_owned()),
            (None, Some(_), _) => return Err("`credential` needs `username`".to_owned()),
            (_, Some(_), Some(_)) => return Err("`credential` and `secret` exclude each other".to_owned()),
        };
        if urls.is_empty() {
            return Err("`urls` is empty: name at least one, such as \"turn:turn.example.com:3478\"".to_owned());
        }
        urls.iter().try_for_each(|url| check(url))?;
        Ok(Self { urls, login })
    }
}

/// Whether browsers take `url`: one that they refuse fails all of theirs (W3C WebRTC section 4.4.1.6).
fn check(url: &str) -> Result<(), String> {
    let wrong = |why: String| format!("urls: `{url}`: {why}");
    let expected = "expected stun:HOST, stuns:HOST, turn:HOST or turns:HOST, each with or without a port";
    let (scheme, rest) = url.split_once(':').ok_or_else(|| wrong(expected.to_owned()))?;
    let (server, query) = rest.split_once('?').map_or((rest, None), |(server, query)| (server, Some(query)));
    match (scheme, query) {
        ("stun" | "stuns", None) | ("turn" | "turns", None | Some("transport=udp" | "transport=tcp")) => {}
        ("stun" | "stuns", Some(_)) => return Err(wrong("what follows `?` belongs to TURN".to_owned())),
        ("turn" | "turns", Some(_)) => return Err(wrong("expected ?transport=udp or ?transport=tcp".to_owned())),
        _ => return Err(wrong(expected.to_owned())),
    }
    host::in_url(server).map_err(wrong)
}

impl IceServer {
    /// User name and password for a browser at `wall` (time since the Unix epoch); nothing for STUN.
    pub fn credentials(&self, wall: Duration) -> Option<(String, String)> {
        match self.login.as_ref()? {
            Login::Fixed { username, credential } => Some((username.clone(), credential.reveal().to_owned())),
            Login::Shared { secret, username, ttl } => {
                let name = format!("{}:{username}", (wall + *ttl).as_secs());
                let mut mac = Hmac::<sha1::Sha1>::new_from_slice(secret.reveal().as_bytes()).ok()?;
                mac.update(name.as_bytes());
                let password = base64::engine::general_purpose::STANDARD.encode(mac.finalize().into_bytes());
                Some((name, password))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unknown_keys_are_refused_and_defaults_stay_on_loopback() {
        assert!(toml::from_str::<WebRtcConfig>("bind_prot = 1").is_err());
        let config: WebRtcConfig = toml::from_str("bind_port = 9").expect("valid");
        assert!(config.bind_ip().is_loopback());
        let config: WebRtcConfig = toml::from_str("public_ip = '192.0.2.1'").expect("valid");
        assert_eq!(config.bind_ip(), IpAddr::V4(Ipv4Addr::UNSPECIFIED));
    }

    #[test]
    fn several_public_addresses_are_of_either_family() {
        let config: WebRtcConfig = toml::from_str("public_ip = ['192.0.2.1', '192.0.2.2']").expect("valid");
        assert_eq!((config.public_ip.len(), config.bind_ip()), (2, IpAddr::V4(Ipv4Addr::UNSPECIFIED)));
        let config: WebRtcConfig = toml::from_str("public_ip = ['192.0.2.1', '2001:db8::1']").expect("valid");
        assert_eq!(config.bind_ip(), IpAddr::V6(std::net::Ipv6Addr::UNSPECIFIED));
        let error =
            toml::from_str::<WebRtcConfig>("public_ip = ['voice.example.com']").expect_err("a name").to_string();
        assert!(error.contains("an IP address or a list"), "{error}");
    }

    #[test]
    fn the_turn_password_is_not_printed() {
        let text = "[[ice_servers]]\nurls = ['turn:t']\nusername = 'u'\ncredential = 'hidden'";
        let config: WebRtcConfig = toml::from_str(text).expect("valid");
        assert!(!format!("{config:?}").contains("hidden"));
    }

    #[test]
    fn the_gateways_own_relay_is_one_server_with_a_login() {
        let relay = |turn: &str| toml::from_str::<WebRtcConfig>(&format!("turn = {turn}")).expect("valid").relay();
        let good = relay("{ urls = ['turn:t:1'], username = 'u', credential = 'c' }").expect("good").expect("there");
        assert_eq!(good.0.url(), "turn:t:1?transport=udp");
        for (turn, word) in [
            ("{ urls = ['turn:t'] }", "needs `username`"),
            ("{ urls = ['turn:t', 'turn:u'], username = 'u', credential = 'c' }", "one server"),
            ("{ urls = ['stun:t'], username = 'u', credential = 'c' }", "turn:host:port"),
        ] {
            let error = relay(turn).expect_err(turn);
            assert!(error.contains(word), "{turn}: {error}");
        }
    }

    fn server(text: &str) -> Result<IceServer, toml::de::Error> {
        toml::from_str(text)
    }

    #[test]
    fn a_shared_secret_makes_a_password_that_ends() {
        let server = server("urls = ['turn:t']\nsecret = 'north'\nusername = 'web'\nttl_s = 600").expect("valid");
        let (username, password) = server.credentials(Duration::from_secs(1_000)).expect("a login");
        assert_eq!(username, "1600:web");
        // `printf 1600:web | openssl dgst -sha1 -hmac north -binary | base64`
        assert_eq!(password, "1kQNhxf5RIdCmXWF1aquyDCmi2Y=");
        assert!(!format!("{server:?}").contains("north"));
    }

    #[test]
    fn half_a_login_is_refused_with_what_is_missing() {
        for (text, missing) in [
            ("username = 'u'", "needs `credential`"),
            ("credential = 'c'", "needs `username`"),
            ("username = 'u'\ncredential = 'c'\nsecret = 's'", "exclude"),
            ("ttl_s = 5", "needs `secret`"),
        ] {
            let error = server(&format!("urls = ['turn:t']\n{text}")).expect_err(text).to_string();
            assert!(error.contains(missing), "{text}: {error}");
        }
        assert!(server("urls = []").is_err());
        let stun = server("urls = ['stun:s']").expect("STUN needs no login");
        assert_eq!(stun.credentials(Duration::ZERO), None);
    }
}
