//! `[webrtc]`.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr};
use std::time::Duration;

use serde::Deserialize;

/// `[webrtc]`: one UDP port for all browser calls.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct WebRtcConfig {
    /// The UDP port of all sessions; 0 takes a free one.
    pub bind_port: u16,
    /// The address to bind. Absent: every address where `public_ip` is set, else loopback only.
    pub bind_ip: Option<IpAddr>,
    /// The address that browsers are told to send to, where it is not the bound one (NAT, containers).
    pub public_ip: Option<IpAddr>,
    /// STUN and TURN servers that browsers are told about.
    pub ice_servers: Vec<IceServer>,
    /// Whether the same port number also listens for ICE over TCP, for browsers that may send no UDP.
    pub tcp: bool,
    /// Sessions at the same time; more are refused with 503.
    pub max_sessions: usize,
    /// A session that has not connected after this many seconds is closed.
    pub connect_timeout_s: u64,
}

impl Default for WebRtcConfig {
    fn default() -> Self {
        Self {
            bind_port: 0,
            bind_ip: None,
            public_ip: None,
            ice_servers: Vec::new(),
            tcp: false,
            max_sessions: 1000,
            connect_timeout_s: 20,
        }
    }
}

impl WebRtcConfig {
    /// What to bind.
    pub(super) fn bind_ip(&self) -> IpAddr {
        match (self.bind_ip, self.public_ip) {
            (Some(ip), _) => ip,
            (None, Some(IpAddr::V4(_))) => IpAddr::V4(Ipv4Addr::UNSPECIFIED),
            (None, Some(IpAddr::V6(_))) => IpAddr::V6(std::net::Ipv6Addr::UNSPECIFIED),
            (None, None) => IpAddr::V4(Ipv4Addr::LOCALHOST),
        }
    }

    pub(super) fn connect_timeout(&self) -> Duration {
        Duration::from_secs(self.connect_timeout_s)
    }
}

/// A STUN or TURN server (RFC 7064, RFC 7065).
#[derive(Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct IceServer {
    /// `stun:host:port`, `turn:host:port?transport=udp`, ...
    pub urls: Vec<String>,
    /// TURN user.
    #[serde(default)]
    pub username: Option<String>,
    /// TURN password. Browsers are given it, so use short-lived ones.
    #[serde(default)]
    pub credential: Option<String>,
}

impl fmt::Debug for IceServer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // The password stays out of logs.
        f.debug_struct("IceServer")
            .field("urls", &self.urls)
            .field("username", &self.username)
            .field("credential", &self.credential.as_ref().map(|_| "..."))
            .finish()
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
    fn the_turn_password_is_not_printed() {
        let text = "[[ice_servers]]\nurls = ['turn:t']\nusername = 'u'\ncredential = 'hidden'";
        let config: WebRtcConfig = toml::from_str(text).expect("valid");
        assert!(!format!("{config:?}").contains("hidden"));
    }
}
