//! What requests and responses carry: descriptions, digits, and the headers that go with them.

use std::{net::IpAddr, time::Duration};

use rsipstack::{
    dialog::invite_dialog::InviteDialog,
    sip::{Header, Headers, Request, Response, StatusCode, StatusCodeKind},
    transaction::Transaction,
};
use tracing::debug;

use crate::{clock, media::sip::dtls::Identity};

/// Methods we take, as `Allow` says.
const ALLOW: &str = "INVITE, ACK, CANCEL, BYE, OPTIONS, INFO, UPDATE, PRACK, NOTIFY, REFER";

/// What a request of the peer is answered with.
#[derive(Debug)]
pub(super) struct Reply {
    pub(super) status: StatusCode,
    pub(super) headers: Vec<Header>,
    pub(super) body: Option<Vec<u8>>,
}

impl Reply {
    pub(super) fn new(status: StatusCode, headers: Vec<Header>) -> Reply {
        Reply { status, headers, body: None }
    }
}

impl From<Refusal> for Reply {
    fn from(refusal: Refusal) -> Reply {
        let headers = refusal.headers();
        Reply::new(refusal.status, headers)
    }
}

/// Anything with headers and a body.
pub(super) trait Message {
    fn headers(&self) -> &Headers;
    fn body(&self) -> &[u8];
}

impl Message for Request {
    fn headers(&self) -> &Headers {
        &self.headers
    }

    fn body(&self) -> &[u8] {
        &self.body
    }
}

impl Message for Response {
    fn headers(&self) -> &Headers {
        &self.headers
    }

    fn body(&self) -> &[u8] {
        &self.body
    }
}

/// Why a body cannot be used, as a response.
#[derive(Debug)]
pub(super) struct Refusal {
    pub(super) status: StatusCode,
    pub(super) reason: String,
}

impl Refusal {
    pub(super) fn headers(&self) -> Vec<Header> {
        match self.status {
            StatusCode::UnsupportedMediaType => vec![Header::Accept("application/sdp".into())],
            _ => vec![warning(&self.reason)],
        }
    }
}

/// The session description of a message; `None` where there is no body.
///
/// A description inside `multipart/*` is found, as exchanges that add ISUP or location send it.
pub(super) fn description(message: &impl Message) -> Result<Option<sdp::Description>, Refusal> {
    let body = message.body();
    if body.is_empty() {
        return Ok(None);
    }
    let content_type = content_type(message);
    let text = match media_type(&content_type) {
        // RFC 3261 demands the header with a body; those who leave it out mean this.
        "application/sdp" | "" => body,
        kind if kind.starts_with("multipart/") => part(body, &content_type).ok_or_else(|| Refusal {
            status: StatusCode::UnsupportedMediaType,
            reason: "no application/sdp part".to_owned(),
        })?,
        other => {
            let reason = format!("a body of type {other}");
            return Err(Refusal { status: StatusCode::UnsupportedMediaType, reason });
        }
    };
    match sdp::parse(text) {
        Ok(description) => Ok(Some(description)),
        Err(error) => Err(Refusal { status: StatusCode::BadRequest, reason: format!("SDP {error}") }),
    }
}

/// What an INFO brings.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Body {
    Digit(char),
    Empty,
    Unknown,
}

/// The digit of `application/dtmf-relay` (`Signal=5`) or `application/dtmf` (`5`).
pub(super) fn digit(request: &Request) -> Body {
    if request.body.is_empty() {
        return Body::Empty;
    }
    let content_type = content_type(request);
    let text = String::from_utf8_lossy(&request.body);
    let signal = match media_type(&content_type) {
        "application/dtmf" => Some(text.trim()),
        "application/dtmf-relay" => text.lines().find_map(|line| {
            let (name, value) = line.split_once('=')?;
            name.trim().eq_ignore_ascii_case("signal").then_some(value.trim())
        }),
        _ => return Body::Unknown,
    };
    // Some write the event number of RFC 4733 for what is no digit.
    let digit = match signal.unwrap_or_default() {
        "10" => Some('*'),
        "11" => Some('#'),
        text => text.chars().next().filter(|_| text.chars().count() == 1).map(|c| c.to_ascii_uppercase()),
    };
    digit.filter(|d| matches!(d, '0'..='9' | '*' | '#' | 'A'..='D')).map_or(Body::Unknown, Body::Digit)
}

/// How long a digit is said to last; what telephones write.
const DIGIT_MS: u32 = 160;
/// Between digits, where that is asked for.
const DIGIT_WAIT: Duration = Duration::from_millis(500);

/// The body of an INFO for a digit; `None`: it is none.
fn digit_body(digit: char) -> Option<Vec<u8>> {
    let digit = digit.to_ascii_uppercase();
    let known = matches!(digit, '0'..='9' | '*' | '#' | 'A'..='D');
    known.then(|| format!("Signal={digit}\r\nDuration={DIGIT_MS}\r\n").into_bytes())
}

/// Sends an INFO for each digit, when the one before is answered; `w` or `,` waits half a second.
pub(super) async fn type_digits(dialog: InviteDialog, digits: String) {
    for digit in digits.chars() {
        let Some(body) = digit_body(digit) else {
            tokio::time::sleep(DIGIT_WAIT).await;
            continue;
        };
        let headers = vec![Header::ContentType("application/dtmf-relay".into())];
        match dialog.info(Some(headers), Some(body)).await {
            Ok(Some(response)) if response.status_code.kind() == StatusCodeKind::Successful => {}
            Ok(Some(response)) => {
                tracing::info!(id = %dialog.id(), status = %response.status_code, "the peer refused a digit by INFO");
            }
            Ok(None) => return,
            Err(error) => debug!(id = %dialog.id(), %error, "a digit by INFO was lost"),
        }
    }
}

/// Headers that go with a description.
pub(super) fn sdp_headers() -> Vec<Header> {
    vec![Header::ContentType("application/sdp".into()), allow()]
}

/// Random keys and the session id of a call's descriptions.
pub(super) fn local_media(address: IpAddr, port: u16, identity: &Identity) -> sdp::LocalMedia {
    let key = || {
        let mut bytes = [0; sdp::Key::LENGTH];
        rand::fill(&mut bytes[..]);
        sdp::Key(bytes)
    };
    // 64 bits of name and 128 of password: RFC 8445 section 5.3 asks for 24 and 128.
    let (fragment, password) = (format!("{:016x}", rand::random::<u64>()), format!("{:032x}", rand::random::<u128>()));
    let dtls = sdp::LocalDtls { fingerprint: identity.fingerprint(), fragment, password };
    // As many peers keep the id in a signed number, it stays below 2^63.
    let session_id = (clock::wall().as_secs() << 16) | u64::from(rand::random::<u16>());
    sdp::LocalMedia { address, port, session_id, keys: [key(), key(), key(), key()], dtls: Some(dtls) }
}

/// Whether our answer to `request`, a description, is something that its sender reads (RFC 3261 section 20.1).
pub(super) fn takes_sdp(request: &Request) -> bool {
    let named: Vec<_> = request
        .headers
        .iter()
        .filter_map(|header| match header {
            Header::Accept(value) => Some(value.value()),
            _ => None,
        })
        .flat_map(|value| value.split(','))
        .map(|range| range.split(';').next().unwrap_or_default().trim())
        .collect();
    let fits =
        |range: &&str| ["application/sdp", "application/*", "*/*"].iter().any(|own| own.eq_ignore_ascii_case(range));
    named.is_empty() || named.iter().any(fits)
}

/// Answers with a final response.
pub(super) async fn reply(tx: &mut Transaction, status: StatusCode, headers: Vec<Header>) {
    if let Err(error) = tx.reply_with(status, headers, None).await {
        debug!(%error, "a SIP response could not be sent");
    }
}

/// What OPTIONS is answered with.
pub(super) fn capabilities() -> Vec<Header> {
    vec![
        allow(),
        Header::Accept("application/sdp, application/dtmf-relay".into()),
        Header::AcceptEncoding("identity".into()),
        super::timer::supported(),
    ]
}

pub(super) fn allow() -> Header {
    Header::Allow(ALLOW.into())
}

/// `Retry-After` in whole seconds, rounded up: who comes back too early is refused again (RFC 3261 section 20.33).
pub(super) fn retry_after(wait: Duration) -> Header {
    let seconds = wait.as_millis().div_ceil(1_000).max(1);
    Header::RetryAfter(seconds.to_string().into())
}

/// `Warning: 399`, with a text for people.
pub(super) fn warning(text: &str) -> Header {
    let text: String = text.chars().filter(|c| !matches!(c, '"' | '\\') && !c.is_control()).take(200).collect();
    Header::Warning(format!("399 antiphon \"{text}\"").into())
}

fn content_type(message: &impl Message) -> String {
    let value = message.headers().iter().find_map(|header| match header {
        Header::ContentType(value) => Some(value.value().to_owned()),
        _ => None,
    });
    value.unwrap_or_default()
}

/// The type without parameters. Lower case does not matter for those we know: compared as written by all
/// known peers, and here after lowering.
fn media_type(content_type: &str) -> &str {
    let kind = content_type.split(';').next().unwrap_or_default().trim();
    for known in ["application/sdp", "application/dtmf-relay", "application/dtmf", "multipart/mixed"] {
        if kind.eq_ignore_ascii_case(known) {
            return known;
        }
    }
    kind
}

/// The first `application/sdp` part of a multipart body (RFC 2046 section 5.1).
fn part<'a>(body: &'a [u8], content_type: &str) -> Option<&'a [u8]> {
    let boundary = content_type.split(';').find_map(|parameter| {
        let (name, value) = parameter.split_once('=')?;
        name.trim().eq_ignore_ascii_case("boundary").then_some(value.trim().trim_matches('"'))
    })?;
    let delimiter = format!("--{boundary}").into_bytes();
    if boundary.is_empty() || boundary.len() > 70 {
        return None;
    }
    let mut starts = Vec::new();
    let mut at = 0;
    while let Some(found) = find(&body[at..], &delimiter) {
        starts.push(at + found);
        at += found + delimiter.len();
    }
    starts.windows(2).find_map(|pair| {
        let part = body.get(pair[0] + delimiter.len()..pair[1])?;
        let head = find(part, b"\r\n\r\n")?;
        let headers = String::from_utf8_lossy(&part[..head]).to_ascii_lowercase();
        let sdp = headers.lines().any(|line| {
            line.split_once(':').is_some_and(|(name, value)| {
                matches!(name.trim(), "content-type" | "c") && value.trim().starts_with("application/sdp")
            })
        });
        let content = &part[head + 4..];
        sdp.then(|| content.strip_suffix(b"\r\n").unwrap_or(content))
    })
}

fn find(haystack: &[u8], needle: &[u8]) -> Option<usize> {
    haystack.windows(needle.len()).position(|window| window == needle)
}

#[cfg(test)]
mod tests {
    use rsipstack::sip::{Method, Version};

    use super::*;

    fn info(content_type: &str, body: &[u8]) -> Request {
        Request {
            method: Method::Info,
            uri: "sip:a@b".try_into().expect("valid"),
            version: Version::V2,
            headers: vec![Header::ContentType(content_type.into())].into(),
            body: body.to_vec(),
        }
    }

    #[test]
    fn digits_in_every_notation() {
        for (kind, text, digit) in [
            ("application/dtmf-relay", "Signal=5\r\nDuration=160\r\n", Body::Digit('5')),
            ("application/dtmf-relay", "Signal= *\r\nDuration=160", Body::Digit('*')),
            ("Application/DTMF-Relay", "signal=11", Body::Digit('#')),
            ("application/dtmf", "d", Body::Digit('D')),
            ("application/dtmf", "55", Body::Unknown),
            ("application/dtmf-relay", "Duration=160", Body::Unknown),
            ("text/plain", "5", Body::Unknown),
            ("text/plain", "", Body::Empty),
        ] {
            assert_eq!(self::digit(&info(kind, text.as_bytes())), digit, "{kind} {text}");
        }
    }

    #[test]
    fn digits_are_written_as_they_are_read() {
        for sent in "0123456789*#ABCDd".chars() {
            let headers = vec![Header::ContentType("application/dtmf-relay".into())];
            let request = Request {
                method: rsipstack::sip::Method::Info,
                uri: "sip:a@b".try_into().expect("valid"),
                version: rsipstack::sip::Version::V2,
                headers: headers.into(),
                body: digit_body(sent).expect("a digit"),
            };
            assert_eq!(digit(&request), Body::Digit(sent.to_ascii_uppercase()));
        }
        assert_eq!((digit_body('w'), digit_body(',')), (None, None));
    }

    #[test]
    fn description_is_found_in_multipart() {
        let sdp = "v=0\r\no=- 1 1 IN IP4 192.0.2.1\r\ns=-\r\nt=0 0\r\n";
        let body = format!(
            "--x\r\nContent-Type: application/isup\r\n\r\n\u{1}\r\n--x\r\nContent-Type: application/sdp\r\n\r\n{sdp}\r\n--x--\r\n"
        );
        let found = description(&info("multipart/mixed;boundary=\"x\"", body.as_bytes())).expect("sound");
        assert!(found.is_some());
        for kind in ["multipart/mixed", "multipart/mixed;boundary=y", "text/plain"] {
            let refusal = description(&info(kind, body.as_bytes())).expect_err("not found");
            assert_eq!(refusal.status, StatusCode::UnsupportedMediaType);
        }
        assert!(description(&info("", b"")).expect("sound").is_none());
    }
}
