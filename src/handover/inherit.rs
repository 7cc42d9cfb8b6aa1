//! Listening sockets that somebody else has opened: by name, and bound where the configuration says.

use std::io;
use std::net::{SocketAddr, TcpListener, UdpSocket};
use std::os::fd::OwnedFd;

use socket2::{Domain, Protocol, Socket, Type};

/// Connections that may wait to be accepted: as many as tokio lets.
const BACKLOG: i32 = 1_024;

/// What a socket is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Name {
    /// `[http] bind`.
    Http,
    /// `[sip] udp`.
    SipUdp,
    /// `[sip] tcp`.
    SipTcp,
    /// `[sip] tls`.
    SipTls,
    /// `[sip] ws`.
    SipWs,
    /// `[sip] wss`.
    SipWss,
    /// The port of all browsers.
    WebRtcUdp,
    /// The same number in TCP.
    WebRtcTcp,
}

impl Name {
    /// Every name.
    pub const ALL: [Name; 8] = [
        Name::Http,
        Name::SipUdp,
        Name::SipTcp,
        Name::SipTls,
        Name::SipWs,
        Name::SipWss,
        Name::WebRtcUdp,
        Name::WebRtcTcp,
    ];

    /// As in `FileDescriptorName=` (systemd.socket(5)).
    pub fn as_str(self) -> &'static str {
        match self {
            Name::Http => "http",
            Name::SipUdp => "sip-udp",
            Name::SipTcp => "sip-tcp",
            Name::SipTls => "sip-tls",
            Name::SipWs => "sip-ws",
            Name::SipWss => "sip-wss",
            Name::WebRtcUdp => "webrtc-udp",
            Name::WebRtcTcp => "webrtc-tcp",
        }
    }

    /// The configuration key that says where it is bound.
    pub fn key(self) -> &'static str {
        match self {
            Name::Http => "[http] bind",
            Name::SipUdp => "[sip] udp",
            Name::SipTcp => "[sip] tcp",
            Name::SipTls => "[sip.tls] bind",
            Name::SipWs => "[sip] ws",
            Name::SipWss => "[sip] wss",
            Name::WebRtcUdp => "[webrtc] bind_port",
            Name::WebRtcTcp => "[webrtc] tcp",
        }
    }

    /// The name that is written so.
    pub fn parse(text: &str) -> Option<Name> {
        Name::ALL.into_iter().find(|name| name.as_str() == text)
    }

    fn kind(self) -> Type {
        match self {
            Name::SipUdp | Name::WebRtcUdp => Type::DGRAM,
            Name::Http | Name::SipTcp | Name::SipTls | Name::SipWs | Name::SipWss | Name::WebRtcTcp => Type::STREAM,
        }
    }
}

/// `socket` as the socket `name` of a configuration that wants it at `wanted`; port 0 there takes any.
///
/// # Errors
/// It is of another kind, or bound elsewhere.
pub(super) fn fitting(name: Name, socket: OwnedFd, wanted: SocketAddr) -> io::Result<Socket> {
    let socket = Socket::from(socket);
    let told = |what: String| io::Error::new(io::ErrorKind::AddrNotAvailable, what);
    if socket.r#type()? != name.kind() {
        return Err(told(format!("the socket that was passed as `{}` is of another kind", name.as_str())));
    }
    let bound = socket.local_addr()?.as_socket();
    let fits = |bound: SocketAddr| bound.ip() == wanted.ip() && (wanted.port() == 0 || bound.port() == wanted.port());
    match bound {
        Some(bound) if fits(bound) => {}
        Some(bound) => {
            let (name, key) = (name.as_str(), name.key());
            return Err(told(format!(
                "the socket that was passed as `{name}` is bound to {bound}, {key} says {wanted}"
            )));
        }
        None => return Err(told(format!("the socket that was passed as `{}` is bound to no port", name.as_str()))),
    }
    // systemd leaves it open across exec: a child that speaks must not hold a port of ours.
    socket.set_cloexec(true)?;
    socket.set_nonblocking(true)?;
    Ok(socket)
}

/// A listener at `address` that this process opens by itself.
///
/// # Errors
/// The address cannot be bound.
pub fn listener(address: SocketAddr) -> io::Result<TcpListener> {
    let socket = Socket::new(Domain::for_address(address), Type::STREAM, Some(Protocol::TCP))?;
    socket.set_reuse_address(true)?;
    socket.set_nonblocking(true)?;
    socket.bind(&address.into())?;
    socket.listen(BACKLOG)?;
    Ok(socket.into())
}

/// A socket for datagrams at `address` that this process opens by itself.
///
/// # Errors
/// The address cannot be bound.
pub fn datagrams(address: SocketAddr) -> io::Result<UdpSocket> {
    let socket = UdpSocket::bind(address)?;
    socket.set_nonblocking(true)?;
    Ok(socket)
}

/// Sockets that another process opened, with what each is for.
pub type Passed = Vec<(Name, OwnedFd)>;

/// The sockets that systemd passes (sd_listen_fds(3)); none where it passes none. `names`: `LISTEN_FDNAMES`, which has each
/// one's `FileDescriptorName=`.
///
/// # Errors
/// One has a name that no socket of a gateway has, or two have the same.
pub fn from_systemd(names: &str) -> Result<Passed, String> {
    let mut passed = listenfd::ListenFd::from_env();
    let names = if passed.len() == 0 { Vec::new() } else { by_name(names, passed.len())? };
    let mut sockets = Vec::new();
    for (index, name) in names.into_iter().enumerate() {
        let wrong = |error: io::Error| format!("the socket `{}` from systemd: {error}", name.as_str());
        let socket = match name.kind() {
            Type::DGRAM => passed.take_udp_socket(index).map_err(wrong)?.map(OwnedFd::from),
            _ => passed.take_tcp_listener(index).map_err(wrong)?.map(OwnedFd::from),
        };
        sockets.extend(socket.map(|socket| (name, socket)));
    }
    Ok(sockets)
}

/// The names in `LISTEN_FDNAMES`, one for each of `count` sockets.
fn by_name(names: &str, count: usize) -> Result<Vec<Name>, String> {
    let known = || Name::ALL.map(Name::as_str).join(", ");
    let mut found: Vec<Name> = Vec::new();
    for name in names.split(':').filter(|name| !name.is_empty()) {
        let Some(one) = Name::parse(name) else {
            return Err(format!("systemd passes a socket `{name}`: set FileDescriptorName= to one of {}", known()));
        };
        if found.contains(&one) {
            return Err(format!("systemd passes two sockets `{name}`: one address of each kind can be used"));
        }
        found.push(one);
    }
    if found.len() != count {
        return Err(format!(
            "systemd passes {count} sockets and names {}: set FileDescriptorName= to one of {}",
            found.len(),
            known()
        ));
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sockets_go_by_their_names_and_a_wrong_one_says_which_there_are() {
        assert_eq!(by_name("sip-udp:http", 2), Ok(vec![Name::SipUdp, Name::Http]));
        assert_eq!(by_name("", 0), Ok(Vec::new()));
        for (names, count) in [("antiphon.socket", 1), ("http:http", 2), ("", 1), ("http", 2)] {
            let error = by_name(names, count).expect_err(names);
            assert!(error.contains("http") || error.contains("FileDescriptorName="), "{error}");
        }
        assert!(Name::ALL.iter().all(|name| Name::parse(name.as_str()) == Some(*name)));
    }

    #[test]
    fn a_socket_fits_where_the_configuration_wants_it_and_nowhere_else() {
        let udp = || UdpSocket::bind("127.0.0.1:0").expect("a port");
        let socket = udp();
        let bound = socket.local_addr().expect("bound");
        let any: SocketAddr = "127.0.0.1:0".parse().expect("an address");
        let fits = fitting(Name::SipUdp, socket.into(), bound).expect("the same address");
        assert!(fits.nonblocking().expect("known"));
        assert!(fitting(Name::WebRtcUdp, udp().into(), any).is_ok(), "any port");
        let other: SocketAddr = "127.0.0.2:0".parse().expect("an address");
        let error = fitting(Name::SipUdp, udp().into(), other).expect_err("elsewhere").to_string();
        assert!(error.contains("[sip] udp"), "{error}");
        assert!(fitting(Name::Http, udp().into(), any).is_err(), "of another kind");
        let listener = listener(any).expect("a port");
        assert!(fitting(Name::Http, listener.into(), any).is_ok());
    }
}
