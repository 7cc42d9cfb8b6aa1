//! Text to types, bounded.

use sdp_types::{Connection, Session};

use crate::{
    attr::{Crypto, Direction},
    error::ParseError,
    session::{Attribute, Description, Media, Origin},
};

/// Longest text that is looked at, in bytes.
const MAX_BYTES: usize = 64 * 1024;
/// Most lines.
const MAX_LINES: usize = 2_000;
/// Most `m=` lines: an answer repeats every one.
const MAX_MEDIA: usize = 32;
/// Most formats of one `m=` line: an answer may repeat them.
const MAX_FORMATS: usize = 256;

/// Reads a description.
///
/// # Errors
/// It is too large, has no sense as a whole, or has a broken line that a call needs.
pub fn parse(text: &[u8]) -> Result<Description, ParseError> {
    if text.len() > MAX_BYTES {
        return Err(ParseError::new(0, format!("longer than {MAX_BYTES} bytes")));
    }
    if text.iter().filter(|b| **b == b'\n').count() > MAX_LINES {
        return Err(ParseError::new(MAX_LINES, format!("more than {MAX_LINES} lines")));
    }
    let session = Session::parse(text).map_err(|error| ParseError::new(line_of(&error), error.to_string()))?;
    let lines = Lines::new(text);
    if session.medias.len() > MAX_MEDIA {
        return Err(ParseError::new(lines.media(MAX_MEDIA), format!("more than {MAX_MEDIA} m= lines")));
    }

    let mut description = Description {
        origin: Origin {
            username: session.origin.username.unwrap_or_else(|| "-".to_owned()),
            session_id: session.origin.sess_id,
            version: session.origin.sess_version,
            address: session.origin.unicast_address,
        },
        name: session.session_name,
        connection: session.connection.as_ref().and_then(address),
        direction: None,
        attributes: Vec::new(),
        media: Vec::new(),
    };
    for attribute in session.attributes {
        match Direction::from_name(&attribute.attribute) {
            Some(direction) => description.direction = Some(direction),
            None => {
                description.attributes.push(Attribute { name: attribute.attribute, value: attribute.value });
            }
        }
    }
    for (index, source) in session.medias.into_iter().enumerate() {
        description.media.push(media(source, lines.media(index), &lines)?);
    }
    Ok(description)
}

fn media(source: sdp_types::Media, line: usize, lines: &Lines<'_>) -> Result<Media, ParseError> {
    let mut media = Media {
        kind: source.media,
        port: source.port,
        proto: source.proto,
        formats: source.fmt.split_whitespace().map(str::to_owned).collect(),
        connection: source.connections.first().and_then(address),
        ..Media::default()
    };
    if media.formats.len() > MAX_FORMATS {
        return Err(ParseError::new(line, format!("more than {MAX_FORMATS} formats")));
    }
    // Only what a call with us needs may refuse it: another stream's broken line is not our concern.
    let needed = media.kind == "audio" && media.port != 0;
    for attribute in source.attributes {
        let value = attribute.value.as_deref().unwrap_or_default();
        let broken = match attribute.attribute.as_str() {
            "rtpmap" => value.parse().map(|map| media.rtpmaps.push(map)).err(),
            // Parameters are advice; a broken line is passed over.
            "fmtp" => {
                media.fmtps.extend(value.parse());
                None
            }
            "ptime" => {
                media.ptime = milliseconds(value);
                None
            }
            "maxptime" => {
                media.maxptime = milliseconds(value);
                None
            }
            "rtcp" => value.parse().map(|rtcp| media.rtcp = Some(rtcp)).err(),
            "rtcp-mux" => {
                media.rtcp_mux = true;
                None
            }
            "crypto" => {
                media.crypto.extend(Crypto::from_value(value));
                None
            }
            "candidate" => {
                media.candidates.push(value.to_owned());
                None
            }
            name => {
                match Direction::from_name(name) {
                    Some(direction) => media.direction = Some(direction),
                    None => media
                        .attributes
                        .push(Attribute { name: attribute.attribute.clone(), value: attribute.value.clone() }),
                }
                None
            }
        };
        if let Some(reason) = broken.filter(|_| needed) {
            let at = lines.attribute(line, &attribute.attribute, value);
            return Err(ParseError::new(at, format!("a={}:{value}: {reason}", attribute.attribute)));
        }
    }
    Ok(media)
}

/// Some peers write fractions (`a=ptime:20.0`) or nonsense; only a plain number counts.
fn milliseconds(value: &str) -> Option<u16> {
    value.trim().parse().ok().filter(|ms| *ms > 0)
}

/// Without the TTL of a multicast address. A line that has nothing else (`c=IN IP4 /127`) has no address.
fn address(connection: &Connection) -> Option<String> {
    let text = &connection.connection_address;
    let ip = text.split_once('/').map_or(text.as_str(), |(ip, _)| ip);
    (!ip.is_empty()).then(|| ip.to_owned())
}

/// Finds where an attribute stands: the parser below does not keep line numbers.
struct Lines<'a>(Vec<&'a [u8]>);

impl<'a> Lines<'a> {
    fn new(text: &'a [u8]) -> Lines<'a> {
        Lines(text.split(|b| *b == b'\n').map(|line| line.strip_suffix(b"\r").unwrap_or(line)).collect())
    }

    /// Line number of the `index`th `m=`, counted from 0.
    fn media(&self, index: usize) -> usize {
        let mut lines = self.0.iter().enumerate().filter(|(_, line)| line.starts_with(b"m="));
        lines.nth(index).map_or(0, |(n, _)| n + 1)
    }

    /// Line number of an attribute at or after line `from`.
    fn attribute(&self, from: usize, name: &str, value: &str) -> usize {
        let wanted = format!("a={name}:{value}");
        let mut lines = self.0.iter().enumerate().skip(from);
        lines.find(|(_, line)| **line == wanted.as_bytes()).map_or(from, |(n, _)| n + 1)
    }
}

fn line_of(error: &sdp_types::ParserError) -> usize {
    use sdp_types::ParserError as E;
    match error {
        E::InvalidLineFormat(n, _)
        | E::InvalidFieldEncoding(n, _)
        | E::InvalidFieldFormat(n, _)
        | E::MissingField(n, _)
        | E::FieldTrailingData(n, _)
        | E::InvalidVersion(n, _)
        | E::MultipleVersions(n)
        | E::MultipleOrigins(n)
        | E::MultipleSessionNames(n)
        | E::MultipleSessionDescription(n)
        | E::MultipleUris(n)
        | E::MultipleConnections(n)
        | E::MultipleTimeZones(n)
        | E::MultipleMediaTitles(n)
        | E::MultipleKeys(n)
        | E::RepeatWithoutTime(n) => *n,
        // The rest speaks of the whole text.
        _ => 0,
    }
}
