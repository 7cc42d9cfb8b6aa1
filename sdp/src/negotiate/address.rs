//! Where a peer wants its media.

use std::net::{IpAddr, SocketAddr};

use crate::{
    attr::RtcpPort,
    error::NegotiateError,
    session::{Description, Media},
};

/// Where a peer wants its media.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Address {
    At(IpAddr),
    /// `0.0.0.0`: the hold of RFC 2543.
    Nowhere,
    /// A name. It is not looked up; the address is learned from what arrives.
    Unknown,
}

impl Address {
    pub(super) fn of(description: &Description, media: &Media) -> Result<Address, NegotiateError> {
        let Some(text) = description.address(media) else { return Ok(Address::Unknown) };
        match text.parse::<IpAddr>() {
            Err(_) => Ok(Address::Unknown),
            Ok(ip) if ip.is_unspecified() => Ok(Address::Nowhere),
            Ok(ip) if ip.is_multicast() || ip == IpAddr::from([255; 4]) => {
                Err(NegotiateError::Address(text.to_owned()))
            }
            Ok(ip) => Ok(Address::At(ip)),
        }
    }

    pub(super) fn rtp(self, media: &Media) -> Option<SocketAddr> {
        match self {
            Address::At(ip) => Some(SocketAddr::new(ip, media.port)),
            Address::Nowhere | Address::Unknown => None,
        }
    }

    pub(super) fn rtcp(self, media: &Media) -> Option<SocketAddr> {
        let Address::At(ip) = self else { return None };
        if media.rtcp_mux {
            return Some(SocketAddr::new(ip, media.port));
        }
        match media.rtcp {
            Some(RtcpPort { port, address }) => {
                let ip = address.filter(|ip| !ip.is_unspecified() && !ip.is_multicast()).unwrap_or(ip);
                (port != 0).then_some(SocketAddr::new(ip, port))
            }
            None => media.port.checked_add(1).map(|port| SocketAddr::new(ip, port)),
        }
    }
}
