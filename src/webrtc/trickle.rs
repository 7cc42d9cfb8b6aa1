//! SDP fragments of trickle ICE (RFC 8840), as WHIP carries them (RFC 9725 section 4.3).
//!
//! Owns no state.

use std::fmt::Write as _;
use std::net::SocketAddr;

use super::WebRtcError;
use super::offer::{MAX_CANDIDATES, check_credentials, is_line};

/// What a peer sends after its offer.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Fragment {
    /// ICE fragment and password, where it names them.
    pub(super) credentials: Option<(String, String)>,
    /// Attribute values: `candidate:...`.
    pub(super) candidates: Vec<String>,
}

impl Fragment {
    /// Reads `application/trickle-ice-sdpfrag`.
    ///
    /// # Errors
    /// [`WebRtcError::BadFragment`]: what to change.
    pub(super) fn read(text: &str) -> Result<Self, WebRtcError> {
        let mut candidates = Vec::new();
        let (mut fragment, mut password) = (None, None);
        for (number, line) in text.lines().map(str::trim_end).filter(|line| !line.is_empty()).enumerate() {
            if !is_line(line) {
                return Err(bad(format!("line {} of the fragment is not `x=value`", number + 1)));
            }
            let Some(attribute) = line.strip_prefix("a=") else { continue };
            match attribute.split_once(':').unwrap_or((attribute, "")) {
                ("candidate", _) if candidates.len() == MAX_CANDIDATES => {
                    return Err(bad(format!("more than {MAX_CANDIDATES} candidates")));
                }
                ("candidate", _) => candidates.push(attribute.to_owned()),
                ("ice-ufrag", value) => fragment = fragment.or(Some(value.to_owned())),
                ("ice-pwd", value) => password = password.or(Some(value.to_owned())),
                // `mid` too: everything is bundled, so a candidate's section does not matter.
                _ => {}
            }
        }
        let credentials = match (fragment, password) {
            (Some(fragment), Some(password)) => {
                check_credentials(&fragment, &password).map_err(bad)?;
                Some((fragment, password))
            }
            (None, None) => None,
            _ => return Err(bad("`ice-ufrag` and `ice-pwd` come together or not at all")),
        };
        if credentials.is_none() && candidates.is_empty() && !text.contains("a=end-of-candidates") {
            return Err(bad("the fragment has neither candidates nor ICE credentials"));
        }
        Ok(Self { credentials, candidates })
    }
}

/// The answer to a restart: our new credentials and where to send.
pub(super) fn restart_answer(
    fragment: &str,
    password: &str,
    mid: &str,
    candidates: impl Iterator<Item = String>,
) -> String {
    let mut text =
        format!("a=ice-ufrag:{fragment}\r\na=ice-pwd:{password}\r\nm=audio 9 UDP/TLS/RTP/SAVPF 0\r\na=mid:{mid}\r\n");
    for line in candidates {
        let _ = write!(text, "{line}\r\n");
    }
    text.push_str("a=end-of-candidates\r\n");
    text
}

/// Our host candidates, best first: UDP, and passive TCP with `tcp`.
pub(super) fn candidate_lines(addresses: &[SocketAddr], tcp: bool) -> impl Iterator<Item = String> {
    let kinds = if tcp { &[Kind::Udp, Kind::Tcp][..] } else { &[Kind::Udp][..] };
    let all = kinds.iter().flat_map(move |kind| addresses.iter().enumerate().map(move |at| (kind, at)));
    all.enumerate().map(|(foundation, (kind, (index, address)))| {
        // RFC 8445 section 5.1.2.1, component 1; each address has its own local preference. TCP: RFC 6544
        // section 4.2, where passive is direction 4, in the upper three bits of the local preference.
        let index = u32::try_from(index).unwrap_or(u32::MAX);
        let (name, preference, local, end) = match kind {
            Kind::Udp => ("udp", 126, 65_535_u32.saturating_sub(index), ""),
            Kind::Tcp => ("tcp", 90, (4 << 13) + 8191_u32.saturating_sub(index), " tcptype passive"),
        };
        let priority = (preference << 24) + (local << 8) + 255;
        let (ip, port) = (address.ip(), address.port());
        format!("a=candidate:{} 1 {name} {priority} {ip} {port} typ host{end}", foundation + 1)
    })
}

enum Kind {
    Udp,
    Tcp,
}

fn bad(message: impl Into<String>) -> WebRtcError {
    WebRtcError::BadFragment(message.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn candidates_and_credentials_are_found_in_any_section() {
        let text = "a=ice-ufrag:EsAw\r\na=ice-pwd:P2uYro0UCOQ4zxjKXaWCBui1\r\nm=audio 9 RTP/AVP 0\r\na=mid:0\r\n\
            a=candidate:1387637174 1 udp 2122260223 192.0.2.1 61764 typ host generation 0\r\na=end-of-candidates\r\n";
        let fragment = Fragment::read(text).expect("good");
        assert_eq!(fragment.candidates.len(), 1);
        assert_eq!(fragment.credentials.expect("both").0, "EsAw");
    }

    #[test]
    fn each_refusal_says_what_to_change() {
        let cases = [
            ("", "neither"),
            ("hello", "line 1"),
            ("a=ice-ufrag:abcd\r\n", "together"),
            ("a=ice-ufrag:a\r\na=ice-pwd:0123456789012345678901\r\n", "ice-ufrag"),
        ];
        for (text, word) in cases {
            let error = Fragment::read(text).expect_err(word).to_string();
            assert!(error.contains(word), "{error:?} should name {word:?}");
        }
        let many = "a=candidate:1 1 udp 1 192.0.2.1 9 typ host\r\n".repeat(MAX_CANDIDATES + 1);
        assert!(Fragment::read(&many).is_err());
        assert!(Fragment::read("a=end-of-candidates\r\n").is_ok());
    }

    #[test]
    fn our_candidates_have_falling_priorities() {
        let addresses = ["192.0.2.1:5".parse().expect("address"), "192.0.2.2:5".parse().expect("address")];
        let lines: Vec<String> = candidate_lines(&addresses, true).collect();
        assert_eq!(lines[0], "a=candidate:1 1 udp 2130706431 192.0.2.1 5 typ host");
        assert_eq!(lines[1], "a=candidate:2 1 udp 2130706175 192.0.2.2 5 typ host");
        assert_eq!(lines[2], "a=candidate:3 1 tcp 1520435199 192.0.2.1 5 typ host tcptype passive");
        assert_eq!(lines.len(), 4);
    }
}
