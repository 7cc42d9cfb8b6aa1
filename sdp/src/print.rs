//! Types to text.

use std::{fmt, net::IpAddr};

use sdp_types::{AddrType, Connection, NetType, Session};

use crate::{
    attr::Direction,
    session::{Attribute, Description, Media},
};

impl fmt::Display for Description {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut bytes = Vec::with_capacity(512);
        session(self).write(&mut bytes).map_err(|_| fmt::Error)?;
        f.write_str(&String::from_utf8_lossy(&bytes))
    }
}

fn session(from: &Description) -> Session {
    let mut origin = sdp_types::Origin::new(
        &from.origin.session_id,
        from.origin.version,
        NetType::In,
        family(&from.origin.address),
        &from.origin.address,
    );
    if from.origin.username != "-" {
        origin.set_username(&from.origin.username);
    }
    let mut session = Session::new(origin, &from.name);
    session.connection = from.connection.as_deref().map(connection);
    session.attributes.extend(from.direction.map(direction));
    session.attributes.extend(from.attributes.iter().map(other));
    session.medias = from.media.iter().map(media).collect();
    session
}

fn media(from: &Media) -> sdp_types::Media {
    let mut attributes = Vec::new();
    attributes.extend(from.rtpmaps.iter().map(|map| valued("rtpmap", map)));
    attributes.extend(from.fmtps.iter().map(|fmtp| valued("fmtp", fmtp)));
    attributes.extend(from.ptime.map(|ms| valued("ptime", ms)));
    attributes.extend(from.maxptime.map(|ms| valued("maxptime", ms)));
    attributes.extend(from.rtcp.map(|rtcp| match rtcp.address {
        None => valued("rtcp", rtcp.port),
        Some(ip) => valued("rtcp", format_args!("{} IN {} {ip}", rtcp.port, if ip.is_ipv4() { "IP4" } else { "IP6" })),
    }));
    attributes.extend(from.rtcp_mux.then(|| flag("rtcp-mux")));
    attributes.extend(from.crypto.iter().map(|crypto| valued("crypto", crypto)));
    attributes.extend(from.candidates.iter().map(|candidate| valued("candidate", candidate)));
    attributes.extend(from.direction.map(direction));
    attributes.extend(from.attributes.iter().map(other));
    sdp_types::Media {
        media: from.kind.clone(),
        port: from.port,
        num_ports: None,
        proto: from.proto.clone(),
        fmt: from.formats.join(" "),
        media_title: None,
        connections: from.connection.as_deref().map(connection).into_iter().collect(),
        bandwidths: Vec::new(),
        key: None,
        attributes,
    }
}

fn connection(address: &str) -> Connection {
    Connection::new(NetType::In, family(address), address)
}

fn family(address: &str) -> AddrType {
    match address.parse() {
        Ok(IpAddr::V6(_)) => AddrType::Ip6,
        _ => AddrType::Ip4,
    }
}

fn direction(direction: Direction) -> sdp_types::Attribute {
    flag(direction.name())
}

fn other(attribute: &Attribute) -> sdp_types::Attribute {
    sdp_types::Attribute { attribute: attribute.name.clone(), value: attribute.value.clone() }
}

fn flag(name: &str) -> sdp_types::Attribute {
    sdp_types::Attribute { attribute: name.to_owned(), value: None }
}

fn valued(name: &str, value: impl fmt::Display) -> sdp_types::Attribute {
    sdp_types::Attribute { attribute: name.to_owned(), value: Some(value.to_string()) }
}
