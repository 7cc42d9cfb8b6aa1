//! What stands between the network and the SIP stack: bytes in, verdict out.
//!
//! Pure functions. The sockets ask [`screen`] about every message and [`frame`] about every stream, and only
//! what passes reaches the stack.
//!
//! # Why
//! The stack (rsipstack 0.7.14) is sound on good input, and on bad input it is silent where a peer needs an
//! answer, or lenient where that is unsafe. Found by reading its source and by the messages of RFC 4475:
//!
//! - a method it does not know is a parse error, so the peer retransmits into the void instead of being
//!   told 501; methods are compared without case, against RFC 3261 section 7.1;
//! - header lines after one that is not UTF-8 are lost without a word;
//! - a `Content-Length` that is no number counts as 0, one that is too large is cut to what is there, and
//!   on a stream a huge one overflows an addition;
//! - mandatory headers are looked at only when they are needed, so a message without them makes a
//!   transaction that cannot be answered;
//! - it reads neither all the white space that RFC 3261 section 7.3.1 allows nor requests without a From tag, as
//!   RFC 2543 had them. What it cannot read is written anew ([`tidy`](super::tidy)) before it is refused.

use std::{fmt::Write as _, net::SocketAddr};

use rsipstack::sip::{
    SipMessage,
    prelude::{HeadersExt, ToTypedHeader},
};

use super::tidy;

/// Longest message, in bytes; that of a datagram.
pub(super) const MAX_MESSAGE: usize = 65_535;
/// Most header lines.
const MAX_HEADERS: usize = 200;
/// Longest header line, unfolded.
const MAX_HEADER: usize = 8_192;
/// Longest header section. An INVITE with an identity and twenty routes has some six thousand.
const MAX_HEAD: usize = 32_768;
/// Longest that the headers may be together which an answer repeats: the stack keeps answers.
const MAX_ECHO: usize = 8_192;
/// The headers that an answer repeats.
const ECHOED: [&str; 5] = ["Via", "From", "To", "Call-ID", "CSeq"];
/// The methods that the stack knows. Others are answered with 501.
const METHODS: [&str; 14] = [
    "ACK",
    "BYE",
    "CANCEL",
    "INFO",
    "INVITE",
    "MESSAGE",
    "NOTIFY",
    "OPTIONS",
    "PRACK",
    "PUBLISH",
    "REFER",
    "REGISTER",
    "SUBSCRIBE",
    "UPDATE",
];

/// What to do with a message.
#[derive(Debug)]
pub(super) enum Verdict {
    /// It is sound.
    Pass {
        /// What was read.
        message: Box<SipMessage>,
        /// The bytes are good for the stack; else only what was read is.
        verbatim: bool,
    },
    /// It is a request that gets this answer, and the stack does not see it.
    Answer(Vec<u8>),
    /// Nothing can or should be said to it. For the log.
    Ignore(&'static str),
}

/// What the bytes of a stream begin with.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Frame {
    /// Not a whole message yet.
    More,
    /// This many bytes of keep-alive, and whether they ask for an answer (RFC 5626 section 3.5.1).
    KeepAlive(usize, bool),
    /// A message of this many bytes.
    Message(usize),
    /// Where the message ends cannot be known: the stream must be closed.
    Broken(&'static str),
}

/// Finds the end of the first message of a stream.
pub(super) fn frame(bytes: &[u8]) -> Frame {
    if bytes.starts_with(b"\r\n\r\n") {
        return Frame::KeepAlive(4, true);
    }
    if bytes.starts_with(b"\r\n") {
        // The other half of a ping may still be on its way.
        return if bytes.len() == 2 || bytes == b"\r\n\r" { Frame::More } else { Frame::KeepAlive(2, false) };
    }
    let head = find_head(bytes);
    if has_bare_break(&bytes[..head.unwrap_or(bytes.len())], head.is_none()) {
        return Frame::Broken("bare CR or LF");
    }
    let Some(head) = head else {
        return if bytes.len() > MAX_HEAD { Frame::Broken("header section too long") } else { Frame::More };
    };
    let mut length = None;
    for line in bytes[..head].split(|b| *b == b'\n') {
        let Some(colon) = line.iter().position(|b| *b == b':') else { continue };
        let name = line[..colon].trim_ascii();
        if !(name.eq_ignore_ascii_case(b"content-length") || name.eq_ignore_ascii_case(b"l")) {
            continue;
        }
        let value = std::str::from_utf8(&line[colon + 1..]).ok().and_then(|v| v.trim().parse::<usize>().ok());
        match (value, length) {
            (None, _) => return Frame::Broken("Content-Length is not a number"),
            (Some(new), Some(old)) if new != old => return Frame::Broken("two different Content-Length"),
            (Some(new), _) => length = Some(new),
        }
    }
    // RFC 3261 section 20.14 demands the header on streams; without it the body is taken to be empty.
    match head.checked_add(4).and_then(|n| n.checked_add(length.unwrap_or(0))).filter(|n| *n <= MAX_MESSAGE) {
        None => Frame::Broken("message too long"),
        Some(total) if total <= bytes.len() => Frame::Message(total),
        Some(_) => Frame::More,
    }
}

/// Judges one message. `from` is its sender; `agent` goes into `Server` of answers.
pub(super) fn screen(bytes: &[u8], from: SocketAddr, agent: &str) -> Verdict {
    // The empty line of a datagram without a body is left out by some.
    let (head, body) = match find_head(bytes) {
        Some(head) => (head, &bytes[head + 4..]),
        None if bytes.ends_with(b"\r\n") => (bytes.len() - 2, &bytes[bytes.len()..]),
        None => return Verdict::Ignore("no end of header section"),
    };
    let section = &bytes[..head];
    // A peer that takes one for the end of a line reads other headers than we do.
    if has_bare_break(section, false) {
        return Verdict::Ignore("bare CR or LF");
    }
    let utf8 = std::str::from_utf8(section);
    let text = String::from_utf8_lossy(section);
    let mut lines = text.split("\r\n");
    let start = lines.next().unwrap_or_default();
    let Some(headers) = Headers::read(lines) else { return Verdict::Ignore("too many or too long headers") };

    if start.starts_with("SIP/") {
        return screen_response(bytes, start, &headers, body);
    }
    if head > MAX_HEAD || headers.echo() > MAX_ECHO {
        return Verdict::Ignore("headers too long");
    }
    let mut words = start.split(' ');
    let (Some(method), Some(uri), Some(version), None) = (words.next(), words.next(), words.next(), words.next())
    else {
        let method = start.split_whitespace().next().unwrap_or_default();
        return headers.refuse(method, 400, "Malformed Request-Line", from, agent);
    };
    if !method.bytes().all(is_token) || method.is_empty() || uri.is_empty() {
        return headers.refuse(method, 400, "Malformed Request-Line", from, agent);
    }
    if !version.eq_ignore_ascii_case("SIP/2.0") {
        return match version.get(..4) {
            Some(name) if name.eq_ignore_ascii_case("SIP/") => {
                headers.refuse(method, 505, "Version Not Supported", from, agent)
            }
            _ => Verdict::Ignore("not SIP"),
        };
    }
    if utf8.is_err() {
        return headers.refuse(method, 400, "Headers Are Not UTF-8", from, agent);
    }
    if let Err(reason) = headers.check(method, body.len()) {
        return headers.refuse(method, 400, reason, from, agent);
    }
    if !METHODS.contains(&method) {
        return headers.refuse(method, 501, "Not Implemented", from, agent);
    }
    let scheme = uri.split(':').next().unwrap_or_default();
    if !scheme.bytes().all(|b| b.is_ascii_alphanumeric() || b"+-.".contains(&b)) {
        return headers.refuse(method, 400, "Malformed Request-URI", from, agent);
    }
    if !["sip", "sips", "tel"].iter().any(|s| scheme.eq_ignore_ascii_case(s)) {
        return headers.refuse(method, 416, "Unsupported URI Scheme", from, agent);
    }
    if let Some(message) = parse(bytes) {
        return pass(message, &headers, body, true);
    }
    match parse(&tidy::request(start, &headers.0, body, from)) {
        Some(message) => pass(message, &headers, body, false),
        None => headers.refuse(method, 400, "Malformed Header Or Request-URI", from, agent),
    }
}

/// Without a length the body ends with the datagram or the WebSocket's frame (RFC 3261 section 20.14, RFC 7118 section 5);
/// the stack would take it for empty. A stream's message has none then: see [`frame`].
fn pass(mut message: SipMessage, headers: &Headers<'_>, body: &[u8], verbatim: bool) -> Verdict {
    let open = !body.is_empty() && headers.all("Content-Length").next().is_none();
    if open {
        let own = match &mut message {
            SipMessage::Request(request) => &mut request.body,
            SipMessage::Response(response) => &mut response.body,
        };
        *own = body.to_vec();
    }
    Verdict::Pass { message: Box::new(message), verbatim: verbatim && !open }
}

fn screen_response(bytes: &[u8], start: &str, headers: &Headers<'_>, body: &[u8]) -> Verdict {
    let code = start.strip_prefix("SIP/2.0 ").and_then(|rest| rest.get(..3)).and_then(|code| code.parse().ok());
    if !code.is_some_and(|code: u16| (100..700).contains(&code)) {
        return Verdict::Ignore("malformed Status-Line");
    }
    if headers.mandatory().is_none() {
        return Verdict::Ignore("response without a mandatory header");
    }
    match parse(bytes) {
        Some(message) => pass(message, headers, body, true),
        None => Verdict::Ignore("malformed response"),
    }
}

/// Reads a message with the stack's parser, and the headers it would otherwise read in the middle of its
/// work.
fn parse(bytes: &[u8]) -> Option<SipMessage> {
    let message = SipMessage::try_from(bytes).ok()?;
    message.top_via_header().ok()?.typed().ok()?;
    message.from_header().ok()?.typed().ok()?.tag()?;
    let to = message.to_header().ok()?.typed().ok()?;
    let cseq = message.cseq_header().ok()?;
    cseq.seq().ok()?;
    cseq.method().ok()?;
    message.typed_contact_headers().ok()?;
    message.typed_record_route_headers().ok()?;
    match &message {
        // A 2xx makes a dialog and needs its tag; that others have none is a habit of old gateways.
        SipMessage::Response(response) if (200..300).contains(&response.status_code().code()) => {
            to.tag()?;
        }
        _ => {}
    }
    Some(message)
}

/// Header lines as they stand.
struct Headers<'a>(Vec<(&'a str, String)>);

/// The values without which nothing can be answered: From, To, Call-ID, CSeq.
type Mandatory<'a> = (&'a str, &'a str, &'a str, &'a str);

impl<'a> Headers<'a> {
    fn read(lines: impl Iterator<Item = &'a str>) -> Option<Headers<'a>> {
        let mut headers: Vec<(&str, String)> = Vec::new();
        for line in lines {
            if line.starts_with([' ', '\t']) {
                let (_, value) = headers.last_mut()?;
                value.push(' ');
                value.push_str(line.trim());
                if value.len() > MAX_HEADER {
                    return None;
                }
                continue;
            }
            let Some((name, value)) = line.split_once(':') else { continue };
            if headers.len() >= MAX_HEADERS || value.len() > MAX_HEADER {
                return None;
            }
            headers.push((long_name(name.trim()), value.trim().to_owned()));
        }
        Some(Headers(headers))
    }

    fn all(&self, name: &str) -> impl Iterator<Item = &str> {
        self.0.iter().filter(move |(n, _)| n.eq_ignore_ascii_case(name)).map(|(_, value)| value.as_str())
    }

    fn one(&self, name: &str) -> Option<&str> {
        let mut values = self.all(name);
        let first = values.next().filter(|v| !v.is_empty())?;
        values.next().is_none().then_some(first)
    }

    /// Length of what an answer repeats.
    fn echo(&self) -> usize {
        let echoed = |name: &str| ECHOED.iter().any(|known| known.eq_ignore_ascii_case(name));
        self.0.iter().filter(|(name, _)| echoed(name)).map(|(name, value)| name.len() + value.len() + 4).sum()
    }

    fn mandatory(&self) -> Option<Mandatory<'_>> {
        self.all("Via").next()?;
        Some((self.one("From")?, self.one("To")?, self.one("Call-ID")?, self.one("CSeq")?))
    }

    fn check(&self, method: &str, body: usize) -> Result<(), &'static str> {
        let (_, _, _, cseq) = self.mandatory().ok_or("Missing Or Repeated Mandatory Header")?;
        let (number, name) = cseq.split_once(char::is_whitespace).ok_or("Malformed CSeq")?;
        if number.parse::<u32>().ok().is_none_or(|n| n > i32::MAX.cast_unsigned()) {
            return Err("CSeq Out Of Range");
        }
        if name.trim() != method {
            return Err("CSeq Method Mismatch");
        }
        if self.all("Max-Forwards").any(|v| v.parse::<u8>().is_err()) {
            return Err("Malformed Max-Forwards");
        }
        let mut addresses = ["From", "To", "Contact"].into_iter().flat_map(|name| self.all(name));
        if addresses.any(|value| !quotes_end(value)) {
            return Err("Quoted String Without End");
        }
        let mut lengths = self.all("Content-Length");
        if let Some(first) = lengths.next()
            && lengths.any(|other| other != first)
        {
            return Err("Two Different Content-Length");
        }
        if self.all("Content-Length").any(|v| v.parse::<usize>().ok().is_none_or(|n| n > body)) {
            return Err("Content-Length Does Not Match");
        }
        Ok(())
    }

    /// An answer to a request, where one can be made: with the first of each header that it is to repeat, and without
    /// those that are not there. An ACK is never answered.
    fn refuse(&self, method: &str, code: u16, reason: &'static str, from: SocketAddr, agent: &str) -> Verdict {
        if method == "ACK" || self.all("Via").next().is_none() {
            return Verdict::Ignore(reason);
        }
        // Writing to a String cannot fail.
        let mut out = format!("SIP/2.0 {code} {reason}\r\n");
        for (n, via) in self.all("Via").enumerate() {
            let via = if n == 0 { received(via, from) } else { via.to_owned() };
            let _ = write!(out, "Via: {via}\r\n");
        }
        for name in ["From", "To", "Call-ID", "CSeq"] {
            let Some(value) = self.all(name).next() else { continue };
            let tag = if name == "To" && !value.contains("tag") { ";tag=screen" } else { "" };
            let _ = write!(out, "{name}: {value}{tag}\r\n");
        }
        let _ = write!(out, "Server: {agent}\r\nContent-Length: 0\r\n\r\n");
        Verdict::Answer(out.into_bytes())
    }
}

/// The top Via with where it really came from (RFC 3261 section 18.2.1, RFC 3581).
fn received(via: &str, from: SocketAddr) -> String {
    // Several may stand in one line; the first is the sender's.
    let (first, rest) = via.split_once(',').map_or((via, None), |(first, rest)| (first, Some(rest)));
    let mut parts: Vec<String> = Vec::new();
    for part in first.split(';') {
        let name = part.split('=').next().unwrap_or_default().trim();
        if name.eq_ignore_ascii_case("rport") {
            parts.push(format!("rport={}", from.port()));
        } else if !name.eq_ignore_ascii_case("received") {
            parts.push(part.to_owned());
        }
    }
    parts.push(format!("received={}", from.ip()));
    let mut out = parts.join(";");
    if let Some(rest) = rest {
        out.push(',');
        out.push_str(rest);
    }
    out
}

fn long_name(name: &str) -> &str {
    match name {
        "v" | "V" => "Via",
        "f" | "F" => "From",
        "t" | "T" => "To",
        "i" | "I" => "Call-ID",
        "l" | "L" => "Content-Length",
        name => name,
    }
}

/// Whether every quoted string has its second quote.
fn quotes_end(value: &str) -> bool {
    let (mut quoted, mut escaped) = (false, false);
    for byte in value.bytes() {
        match byte {
            _ if escaped => escaped = false,
            b'\\' => escaped = quoted,
            b'"' => quoted = !quoted,
            _ => {}
        }
    }
    !quoted
}

/// Whether a CR or LF stands alone. `open`: more may follow the last byte.
fn has_bare_break(bytes: &[u8], open: bool) -> bool {
    bytes.iter().enumerate().any(|(at, byte)| match byte {
        b'\n' => at == 0 || bytes[at - 1] != b'\r',
        b'\r' => bytes.get(at + 1).map_or(!open, |next| *next != b'\n'),
        _ => false,
    })
}

fn find_head(bytes: &[u8]) -> Option<usize> {
    bytes.windows(4).position(|w| w == b"\r\n\r\n")
}

fn is_token(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || b"-.!%*_+`'~".contains(&byte)
}

#[cfg(test)]
mod tests;
