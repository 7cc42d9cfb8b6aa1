//! SIP messages (RFC 3261 section 7), read leniently and written strictly.

use std::fmt::Write as _;

use thiserror::Error;

/// Longest message taken.
const LONGEST: usize = 64 * 1024;

/// First line of a message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Start {
    Request { method: String, uri: String },
    Response { code: u16, reason: String },
}

/// A message. Header names are kept as written, except that short forms are spelled out.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Message {
    pub(crate) start: Start,
    pub(crate) headers: Vec<(String, String)>,
    pub(crate) body: Vec<u8>,
}

/// Why bytes are no message.
#[derive(Debug, Error, PartialEq, Eq)]
pub(crate) enum ParseError {
    #[error("no empty line behind the headers")]
    Unfinished,
    #[error("not text")]
    NotText,
    #[error("bad first line: {0}")]
    Start(String),
    #[error("bad header line: {0}")]
    Header(String),
    #[error("bad Content-Length: {0}")]
    Length(String),
}

impl Message {
    pub(crate) fn request(method: &str, uri: &str) -> Message {
        let start = Start::Request { method: method.to_owned(), uri: uri.to_owned() };
        Message { start, headers: Vec::new(), body: Vec::new() }
    }

    pub(crate) fn response(code: u16, reason: &str) -> Message {
        let start = Start::Response { code, reason: reason.to_owned() };
        Message { start, headers: Vec::new(), body: Vec::new() }
    }

    pub(crate) fn with(mut self, name: &str, value: impl Into<String>) -> Message {
        self.headers.push((name.to_owned(), value.into()));
        self
    }

    pub(crate) fn with_body(mut self, kind: &str, body: impl Into<Vec<u8>>) -> Message {
        self.body = body.into();
        self.with("Content-Type", kind)
    }

    /// First value of a header.
    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(n, _)| n.eq_ignore_ascii_case(name)).map(|(_, v)| v.as_str())
    }

    /// Every value of a header that may be a list, in order.
    pub(crate) fn list(&self, name: &str) -> Vec<&str> {
        let all = self.headers.iter().filter(|(n, _)| n.eq_ignore_ascii_case(name));
        all.flat_map(|(_, v)| split_list(v)).collect()
    }

    /// Number and method of CSeq.
    pub(crate) fn cseq(&self) -> Option<(u32, &str)> {
        let (number, method) = self.header("CSeq")?.split_once(char::is_whitespace)?;
        Some((number.trim().parse().ok()?, method.trim()))
    }

    /// The branch of the topmost Via.
    pub(crate) fn branch(&self) -> Option<&str> {
        parameter(self.list("Via").first()?, "branch")
    }

    /// The tag of From or To.
    pub(crate) fn tag(&self, name: &str) -> Option<&str> {
        parameter(self.header(name)?, "tag")
    }

    /// Reads one datagram.
    pub(crate) fn parse(bytes: &[u8]) -> Result<Message, ParseError> {
        let (head, body) = split_head(bytes).ok_or(ParseError::Unfinished)?;
        let mut message = parse_head(head)?;
        // Over UDP the datagram ends the body; a Content-Length that wants less is obeyed (section 18.3).
        let wanted = message.content_length()?.unwrap_or(body.len());
        message.body =
            body.get(..wanted).ok_or_else(|| ParseError::Length("longer than the datagram".into()))?.to_vec();
        Ok(message)
    }

    /// Takes the first message off a stream; `None` while it is not complete.
    pub(crate) fn take(stream: &mut Vec<u8>) -> Result<Option<Message>, ParseError> {
        // Empty lines between messages keep a connection alive (section 7.5, RFC 5626).
        let blank = stream.iter().take_while(|b| matches!(b, b'\r' | b'\n')).count();
        stream.drain(..blank);
        let Some((head, rest)) = split_head(stream) else {
            return if stream.len() > LONGEST { Err(ParseError::Unfinished) } else { Ok(None) };
        };
        let mut message = parse_head(head)?;
        let wanted = message.content_length()?.unwrap_or(0);
        if wanted > LONGEST {
            return Err(ParseError::Length(wanted.to_string()));
        }
        let Some(body) = rest.get(..wanted) else { return Ok(None) };
        message.body = body.to_vec();
        let used = stream.len() - rest.len() + wanted;
        stream.drain(..used);
        Ok(Some(message))
    }

    pub(crate) fn to_bytes(&self) -> Vec<u8> {
        let mut text = match &self.start {
            Start::Request { method, uri } => format!("{method} {uri} SIP/2.0\r\n"),
            Start::Response { code, reason } => format!("SIP/2.0 {code} {reason}\r\n"),
        };
        for (name, value) in &self.headers {
            // Writing to a String cannot fail.
            let _ = write!(text, "{name}: {value}\r\n");
        }
        let _ = write!(text, "Content-Length: {}\r\n\r\n", self.body.len());
        let mut bytes = text.into_bytes();
        bytes.extend_from_slice(&self.body);
        bytes
    }

    fn content_length(&self) -> Result<Option<usize>, ParseError> {
        match self.header("Content-Length") {
            None => Ok(None),
            Some(value) => value.trim().parse().map(Some).map_err(|_| ParseError::Length(value.to_owned())),
        }
    }
}

/// The value of `;name=value` behind the address part of a header value.
pub(crate) fn parameter<'a>(value: &'a str, name: &str) -> Option<&'a str> {
    let behind = value.rfind('>').map_or(value, |n| &value[n..]);
    behind.split(';').skip(1).find_map(|p| {
        let (key, value) = p.split_once('=').unwrap_or((p, ""));
        key.trim().eq_ignore_ascii_case(name).then(|| value.trim())
    })
}

/// The URI of a From, To, Contact or Route value.
pub(crate) fn uri_of(value: &str) -> &str {
    match value.split_once('<') {
        Some((_, rest)) => rest.split('>').next().unwrap_or(rest),
        None => value.split(';').next().unwrap_or(value).trim(),
    }
}

/// `host:port` of a SIP URI, with the default port when there is none.
pub(crate) fn host_port(uri: &str) -> Option<String> {
    let rest = uri.strip_prefix("sips:").or_else(|| uri.strip_prefix("sip:"))?;
    let secure = uri.starts_with("sips:");
    let rest = rest.rsplit_once('@').map_or(rest, |(_, host)| host);
    let rest = rest.split([';', '?', '>']).next()?;
    let has_port = match rest.rfind(']') {
        Some(n) => rest[n..].contains(':'),
        None => rest.contains(':'),
    };
    if rest.is_empty() {
        return None;
    }
    Some(if has_port { rest.to_owned() } else { format!("{rest}:{}", if secure { 5061 } else { 5060 }) })
}

fn split_head(bytes: &[u8]) -> Option<(&[u8], &[u8])> {
    // Bare line feeds are tolerated, as most stacks do.
    let crlf = bytes.windows(4).position(|w| w == b"\r\n\r\n").map(|n| (n, n + 4));
    let lf = bytes.windows(2).position(|w| w == b"\n\n").map(|n| (n, n + 2));
    let (end, next) = match (crlf, lf) {
        (Some(a), Some(b)) => a.min(b),
        (a, b) => a.or(b)?,
    };
    Some((&bytes[..end], &bytes[next..]))
}

fn parse_head(head: &[u8]) -> Result<Message, ParseError> {
    let text = std::str::from_utf8(head).map_err(|_| ParseError::NotText)?;
    let mut lines = text.lines();
    let first = lines.next().unwrap_or_default();
    let bad = || ParseError::Start(first.chars().take(60).collect());
    let start = match first.strip_prefix("SIP/2.0 ") {
        Some(rest) => {
            let (code, reason) = rest.split_once(' ').unwrap_or((rest, ""));
            let code = code.parse().ok().filter(|c| (100..700).contains(c)).ok_or_else(bad)?;
            Start::Response { code, reason: reason.trim().to_owned() }
        }
        None => {
            let mut parts = first.split(' ');
            match (parts.next(), parts.next(), parts.next(), parts.next()) {
                (Some(method), Some(uri), Some("SIP/2.0"), None) if !method.is_empty() && !uri.is_empty() => {
                    Start::Request { method: method.to_owned(), uri: uri.to_owned() }
                }
                _ => return Err(bad()),
            }
        }
    };
    let mut headers: Vec<(String, String)> = Vec::new();
    for line in lines {
        if line.starts_with([' ', '\t']) {
            let (_, value) = headers.last_mut().ok_or_else(|| ParseError::Header(line.to_owned()))?;
            value.push(' ');
            value.push_str(line.trim());
            continue;
        }
        let (name, value) = line.split_once(':').ok_or_else(|| ParseError::Header(line.chars().take(60).collect()))?;
        headers.push((long_form(name.trim()).to_owned(), value.trim().to_owned()));
    }
    Ok(Message { start, headers, body: Vec::new() })
}

/// Short header names (RFC 3261 section 7.3.3).
fn long_form(name: &str) -> &str {
    match name {
        "v" | "V" => "Via",
        "f" | "F" => "From",
        "t" | "T" => "To",
        "i" | "I" => "Call-ID",
        "m" | "M" => "Contact",
        "c" | "C" => "Content-Type",
        "l" | "L" => "Content-Length",
        "e" | "E" => "Content-Encoding",
        "k" | "K" => "Supported",
        "s" | "S" => "Subject",
        _ => name,
    }
}

/// Splits at commas that are in neither quotes nor angle brackets.
fn split_list(value: &str) -> Vec<&str> {
    let (mut out, mut start, mut quoted, mut angle) = (Vec::new(), 0, false, false);
    for (n, c) in value.char_indices() {
        match c {
            '"' => quoted = !quoted,
            '<' if !quoted => angle = true,
            '>' if !quoted => angle = false,
            ',' if !quoted && !angle => {
                out.push(value[start..n].trim());
                start = n + 1;
            }
            _ => {}
        }
    }
    out.push(value[start..].trim());
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_survives_the_wire() {
        let message = Message::request("INVITE", "sip:demo@127.0.0.1")
            .with("Via", "SIP/2.0/UDP 127.0.0.1:5070;branch=z9hG4bK1;rport")
            .with("From", "\"A, B\" <sip:a@b;x=1>;tag=77")
            .with("CSeq", "1 INVITE")
            .with_body("application/sdp", "v=0\r\n");
        let read = Message::parse(&message.to_bytes()).unwrap();
        assert_eq!(read.start, message.start);
        assert_eq!(read.body, message.body);
        assert_eq!((read.branch(), read.tag("From"), read.cseq()), (Some("z9hG4bK1"), Some("77"), Some((1, "INVITE"))));
    }

    #[test]
    fn short_forms_folding_and_lists_are_understood() {
        let text = "SIP/2.0 200 OK\nv: SIP/2.0/UDP a;branch=1,\n SIP/2.0/UDP b;branch=2\nt: <sip:x@y>;tag=q\nl: 0\n\n";
        let read = Message::parse(text.as_bytes()).unwrap();
        assert_eq!(read.list("Via").len(), 2);
        assert_eq!(read.branch(), Some("1"));
        assert_eq!(read.tag("To"), Some("q"));
    }

    #[test]
    fn a_stream_is_cut_into_messages() {
        let one = Message::response(100, "Trying").with("CSeq", "1 INVITE").to_bytes();
        let two = Message::response(200, "OK").with_body("text/plain", "hello").to_bytes();
        let mut stream = [b"\r\n\r\n".as_slice(), &one, &two].concat();
        let mut late = stream.split_off(stream.len() - 3);
        assert!(matches!(Message::take(&mut stream), Ok(Some(m)) if m.header("CSeq").is_some()));
        assert_eq!(Message::take(&mut stream), Ok(None));
        stream.append(&mut late);
        assert!(matches!(Message::take(&mut stream), Ok(Some(m)) if m.body == b"hello"));
        assert!(stream.is_empty());
    }

    #[test]
    fn broken_messages_are_errors() {
        for text in [
            "",
            "\r\n\r\n",
            "INVITE sip:x\r\n\r\n",
            "SIP/2.0 9 x\r\n\r\n",
            "A b SIP/2.0\r\nnocolon\r\n\r\n",
            "A b SIP/2.0\r\nContent-Length: x\r\n\r\n",
            "A b SIP/2.0\r\nContent-Length: 9\r\n\r\nhi",
        ] {
            assert!(Message::parse(text.as_bytes()).is_err(), "{text:?}");
        }
    }

    #[test]
    fn addresses_are_found() {
        assert_eq!(uri_of("\"N\" <sip:a@b:1;lr>;tag=2"), "sip:a@b:1;lr");
        assert_eq!(uri_of("sip:a@b;tag=2"), "sip:a@b");
        assert_eq!(host_port("sip:demo@127.0.0.1:5062;transport=tcp").as_deref(), Some("127.0.0.1:5062"));
        assert_eq!(host_port("sip:[::1]").as_deref(), Some("[::1]:5060"));
        assert_eq!(host_port("tel:1"), None);
    }
}
