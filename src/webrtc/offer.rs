//! Reads the lines of an offer that decide whether it can be answered at all, before the WebRTC stack sees it.
//!
//! Owns no state. The stack negotiates; this refuses early, with a message that says what to change.
//!
//! # Why
//! The stack's own errors name its internals, and it stops at the first candidate it cannot read. Here candidates
//! are taken out and judged one by one: a browser may offer kinds (mDNS names, TCP) that simply do not concern us.
//! The formats of the audio section are cut down to the one codec, its redundant form (RFC 2198, of Opus only) and the one kind
//! of telephone event that will be agreed: the stack tells formats apart by name and parameters but not by clock rate, so it would
//! answer a browser's telephone events at 8 and at 48 kHz with the same payload type twice. Opus is taken wherever it is offered;
//! who has none (telephony gateways, embedded clients) gets G.722 or G.711, which every WebRTC endpoint has (RFC 7874 section 3).

use std::net::{IpAddr, SocketAddr};

use super::WebRtcError;
use crate::media::leg::Codec;
use crate::reach::{self, Scope};

/// An offer that is worth trying.
#[derive(Clone, Debug)]
pub(super) struct Offer {
    /// The description without its candidates, lines ended by CR LF.
    pub(super) text: String,
    /// The candidates' attribute values: `candidate:...`.
    pub(super) candidates: Vec<String>,
    /// The peer's ICE fragment.
    pub(super) fragment: String,
    /// The peer's ICE password.
    pub(super) password: String,
    /// The best codec that it offers.
    pub(super) codec: Codec,
    /// Whether the peer asks for Opus with in-band error correction (RFC 7587 section 6.1).
    pub(super) opus_fec: bool,
    /// Whether the peer would rather be sent no silence (`usedtx`, RFC 7587 section 6.1).
    pub(super) opus_dtx: bool,
    /// Payload types of redundant packets and of the Opus in them, where the peer offers both.
    pub(super) red: Option<(u8, u8)>,
    /// Whether there is a section for data channels.
    pub(super) channels: bool,
    /// Milliseconds of audio in the packets that we send.
    pub(super) ptime: u16,
}

/// Remote candidates of one generation; a browser has a dozen.
pub(super) const MAX_CANDIDATES: usize = 64;
/// Formats of redundant audio that are looked at; browsers offer one.
const MAX_COPIES: usize = 8;
/// No offer for one audio section and one data channel comes near.
const MAX_LINES: usize = 4096;

impl Offer {
    /// Reads `sdp`.
    ///
    /// # Errors
    /// [`WebRtcError::BadOffer`]: what to change.
    pub(super) fn read(sdp: &str) -> Result<Self, WebRtcError> {
        let mut offer = Self {
            text: String::with_capacity(sdp.len() + 64),
            candidates: Vec::new(),
            fragment: String::new(),
            password: String::new(),
            codec: Codec::Opus,
            opus_fec: false,
            opus_dtx: false,
            red: None,
            channels: false,
            ptime: 20,
        };
        let mut audio: Option<Audio> = None;
        let mut in_audio = false;
        let mut fingerprint = false;
        for (number, line) in sdp.lines().map(str::trim_end).filter(|line| !line.is_empty()).enumerate() {
            if number == 0 && line != "v=0" {
                return Err(bad("not an SDP offer: the first line must be `v=0`"));
            }
            if number == MAX_LINES {
                return Err(bad("the offer has too many lines"));
            }
            if !is_line(line) {
                return Err(bad(format!("line {} of the offer is not `x=value`", number + 1)));
            }
            if let Some(section) = line.strip_prefix("m=") {
                offer.channels |= section.starts_with("application ") && !section.starts_with("application 0 ");
                in_audio = audio.is_none() && is_audio(section);
                if in_audio {
                    audio = Some(Audio::default());
                }
            } else if let Some(attribute) = line.strip_prefix("a=") {
                if attribute.starts_with("candidate:") {
                    if offer.candidates.len() < MAX_CANDIDATES {
                        offer.candidates.push(attribute.to_owned());
                    }
                    continue;
                }
                let (name, value) = attribute.split_once(':').unwrap_or((attribute, ""));
                match name {
                    "end-of-candidates" => continue,
                    "ice-ufrag" if offer.fragment.is_empty() => value.clone_into(&mut offer.fragment),
                    "ice-pwd" if offer.password.is_empty() => value.clone_into(&mut offer.password),
                    "fingerprint" => fingerprint = true,
                    _ => {}
                }
                if in_audio && let Some(audio) = &mut audio {
                    audio.attribute(name, value);
                }
            }
            offer.text.push_str(line);
            offer.text.push_str("\r\n");
        }
        if offer.text.is_empty() {
            return Err(bad("the offer is empty"));
        }
        let Some(audio) = audio else {
            return Err(bad("the offer has no audio section: add an audio transceiver (sendrecv or recvonly)"));
        };
        let Some((codec, number)) = audio.best() else {
            return Err(bad(
                "the audio section offers no codec that is spoken here: add `opus/48000/2` (Opus), `G722/8000` or \
                            `PCMU/8000`",
            ));
        };
        if audio.deaf {
            return Err(bad("the offer will not receive audio: make the audio section sendrecv or recvonly"));
        }
        check_credentials(&offer.fragment, &offer.password).map_err(bad)?;
        if !fingerprint {
            return Err(bad("the offer has no DTLS fingerprint"));
        }
        offer.codec = codec;
        offer.opus_fec = audio.fec.contains(&number);
        offer.opus_dtx = audio.dtx.contains(&number);
        offer.ptime = sdp::packet_time(audio.ptime, audio.maxptime, offer.ptime);
        // RFC 4733 section 2.4.1.1: of the clock of the sound beside them, where there are such.
        let events =
            audio.events.iter().max_by_key(|(_, clock)| *clock == codec.clock_rate()).map(|(number, _)| *number);
        // Of Opus only, whatever number its copies have: `63 111/111`.
        let copied = |parameters: &str| parameters.split('/').all(|copy| copy.trim().parse() == Ok(number));
        let copies = |red: &u8| audio.copies.iter().any(|(of, parameters)| of == red && copied(parameters));
        offer.red = audio.red.iter().find(|red| codec == Codec::Opus && copies(red)).map(|red| (*red, number));
        offer.text = reduced(&offer.text, &[Some(number), offer.red.map(|(red, _)| red), events]);
        if codec == Codec::Opus {
            offer.text = agreeable(&offer.text, number);
        }
        if let Some((red, _)) = offer.red {
            // The stack knows no such parameters and would take the format for another.
            let parameters = format!("a=fmtp:{red} ");
            let kept = offer.text.split_inclusive("\r\n").filter(|line| !line.starts_with(&parameters));
            offer.text = kept.collect();
        }
        Ok(offer)
    }

    /// The peer's ICE fragment and password.
    pub(super) fn credentials(&self) -> (&str, &str) {
        (&self.fragment, &self.password)
    }

    /// The same offer with the ICE credentials of a restart.
    pub(super) fn restarted(&self, fragment: &str, password: &str) -> Self {
        let mut text = String::with_capacity(self.text.len());
        for line in self.text.lines() {
            if line.starts_with("a=ice-ufrag:") {
                text.push_str("a=ice-ufrag:");
                text.push_str(fragment);
            } else if line.starts_with("a=ice-pwd:") {
                text.push_str("a=ice-pwd:");
                text.push_str(password);
            } else {
                text.push_str(line);
            }
            text.push_str("\r\n");
        }
        Self {
            text,
            candidates: Vec::new(),
            fragment: fragment.to_owned(),
            password: password.to_owned(),
            codec: self.codec,
            opus_fec: self.opus_fec,
            opus_dtx: self.opus_dtx,
            red: self.red,
            channels: self.channels,
            ptime: self.ptime,
        }
    }
}

/// What the first audio section says.
#[derive(Default)]
struct Audio {
    /// The first payload type of each of [`Codec::ALL`].
    codecs: [Option<u8>; Codec::ALL.len()],
    /// Payload types and clock rates of telephone events.
    events: Vec<(u8, u32)>,
    /// Payload types whose `fmtp` asks for in-band error correction.
    fec: Vec<u8>,
    /// Payload types whose `fmtp` would rather have no silence.
    dtx: Vec<u8>,
    /// Payload types of redundant audio.
    red: Vec<u8>,
    /// Parameters that may say what is copied.
    copies: Vec<(u8, String)>,
    /// Milliseconds that the peer wishes in a packet, and can take.
    ptime: Option<u16>,
    maxptime: Option<u16>,
    deaf: bool,
}

impl Audio {
    /// The best codec that is offered, and its payload type.
    fn best(&self) -> Option<(Codec, u8)> {
        let offered = Codec::ALL.into_iter().zip(self.codecs);
        offered.filter_map(|(codec, number)| Some((codec, number?))).next()
    }

    fn attribute(&mut self, name: &str, value: &str) {
        match name {
            "rtpmap" => {
                let Some((payload_type, encoding)) = payload_type(value) else { return };
                let encoding = encoding.trim().to_ascii_lowercase();
                let encoding = encoding.strip_suffix("/1").unwrap_or(&encoding);
                if let Some(place) = Codec::ALL.iter().position(|codec| codec.encoding() == encoding) {
                    self.codecs[place].get_or_insert(payload_type);
                }
                match encoding.split_once('/') {
                    Some(("red", "48000/2")) => self.red.push(payload_type),
                    Some(("telephone-event", clock)) => self.events.extend(clock.parse().map(|at| (payload_type, at))),
                    _ => {}
                }
            }
            "fmtp" => {
                let Some((payload_type, parameters)) = payload_type(value) else { return };
                let asks = |wish: &str| parameters.split(';').any(|parameter| parameter.trim() == wish);
                if asks("useinbandfec=1") {
                    self.fec.push(payload_type);
                }
                if asks("usedtx=1") {
                    self.dtx.push(payload_type);
                }
                if parameters.contains('/') && self.copies.len() < MAX_COPIES {
                    self.copies.push((payload_type, parameters.to_owned()));
                }
            }
            "ptime" => self.ptime = value.trim().parse().ok(),
            "maxptime" => self.maxptime = value.trim().parse().ok(),
            "sendonly" | "inactive" => self.deaf = true,
            _ => {}
        }
    }
}

/// Whether `line` has the shape of SDP: one letter, `=`, text (RFC 8866 section 5).
pub(super) fn is_line(line: &str) -> bool {
    line.get(1..2) == Some("=") && !line.contains('\0')
}

fn payload_type(value: &str) -> Option<(u8, &str)> {
    let (number, rest) = value.split_once(' ')?;
    Some((number.parse().ok()?, rest))
}

/// `text` with only `kept` of the formats in its first audio section.
fn reduced(text: &str, kept: &[Option<u8>]) -> String {
    let keeps = |number: &str| number.parse().is_ok_and(|number| kept.contains(&Some(number)));
    let mut result = String::with_capacity(text.len());
    let (mut found, mut inside) = (false, false);
    for line in text.lines() {
        if let Some(section) = line.strip_prefix("m=") {
            inside = !found && is_audio(section);
            found |= inside;
            if inside {
                // Media, port and protocol; then the formats.
                for (index, word) in line.split_ascii_whitespace().enumerate() {
                    if index < 3 || keeps(word) {
                        result.push_str(if index == 0 { "" } else { " " });
                        result.push_str(word);
                    }
                }
                result.push_str("\r\n");
                continue;
            }
        }
        let attribute = line.strip_prefix("a=").and_then(|attribute| attribute.split_once(':'));
        if let Some(("rtpmap" | "fmtp" | "rtcp-fb", value)) = attribute {
            let number = value.split(' ').next().unwrap_or_default();
            if inside && number != "*" && !keeps(number) {
                continue;
            }
        }
        result.push_str(line);
        result.push_str("\r\n");
    }
    result
}

/// An `m=` line's value that offers audio; port 0 declines.
fn is_audio(section: &str) -> bool {
    section.starts_with("audio ") && !section.starts_with("audio 0 ")
}

/// RFC 8839 section 5.4.
///
/// # Errors
/// What is wrong with them.
pub(super) fn check_credentials(fragment: &str, password: &str) -> Result<(), &'static str> {
    // Wider than the grammar, as some stacks are; what could break our lines is not let through.
    let harmless = |text: &str| text.bytes().all(|byte| byte.is_ascii_graphic());
    if !(4..=256).contains(&fragment.len()) || !harmless(fragment) {
        return Err("`ice-ufrag` must be there and have 4 to 256 characters");
    }
    if !(22..=256).contains(&password.len()) || !harmless(password) {
        return Err("`ice-pwd` must be there and have 22 to 256 characters");
    }
    Ok(())
}

/// What to do with a peer's candidate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Candidate {
    /// Reachable, perhaps: check it.
    Usable,
    /// Well formed, but not for this gateway: another transport, component or family, or an mDNS name.
    Foreign,
    /// Not a candidate.
    Malformed,
}

/// Judges `candidate:...` for a gateway whose port is bound at `local` and that peers reach at addresses of scope `own`.
/// Nearer ones are not checked: a page from elsewhere would have us knock at the doors of our own network.
pub(super) fn judge(candidate: &str, local: SocketAddr, own: Scope) -> Candidate {
    let mut words = candidate.strip_prefix("candidate:").unwrap_or(candidate).split_ascii_whitespace();
    let (Some(foundation), Some(component), Some(transport), Some(priority)) =
        (words.next(), words.next(), words.next(), words.next())
    else {
        return Candidate::Malformed;
    };
    let (Some(address), Some(port), Some("typ"), Some(_)) = (words.next(), words.next(), words.next(), words.next())
    else {
        return Candidate::Malformed;
    };
    let (Ok(component), Ok(_), Ok(port)) = (component.parse::<u16>(), priority.parse::<u32>(), port.parse::<u16>())
    else {
        return Candidate::Malformed;
    };
    if foundation.is_empty() || foundation.len() > 32 || candidate.len() > 512 {
        return Candidate::Malformed;
    }
    let Ok(ip) = address.parse::<IpAddr>() else {
        // A name: an mDNS one stands for a host that will show itself by its own checks.
        return Candidate::Foreign;
    };
    let near = reach::scope(ip).is_some_and(|scope| scope >= own);
    let reachable = ip.is_ipv4() == local.is_ipv4() || (ip.is_ipv4() && local.ip().is_unspecified());
    if component == 1 && transport.eq_ignore_ascii_case("udp") && port != 0 && near && reachable {
        Candidate::Usable
    } else {
        Candidate::Foreign
    }
}

/// `text` with the parameters of Opus, whose number is `number`, as the stack has its own: it takes a format with other values for
/// another format. Of Opus they are what each side wishes to receive (RFC 7587 section 7), and have been read.
fn agreeable(text: &str, number: u8) -> String {
    let head = format!("a=fmtp:{number} ");
    let ours = |parameter: &str| match parameter.trim().split_once('=') {
        Some(("minptime", _)) => "minptime=10".to_owned(),
        Some(("useinbandfec", _)) => "useinbandfec=1".to_owned(),
        _ => parameter.trim().to_owned(),
    };
    let line = |line: &str| match line.strip_prefix(&head) {
        Some(wishes) => {
            let wishes: Vec<String> = wishes.trim_end().split(';').map(ours).collect();
            format!("{head}{}\r\n", wishes.join(";"))
        }
        None => line.to_owned(),
    };
    text.split_inclusive("\r\n").map(line).collect()
}

fn bad(message: impl Into<String>) -> WebRtcError {
    WebRtcError::BadOffer(message.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    const OFFER: &str = "v=0\r\no=- 1 2 IN IP4 127.0.0.1\r\ns=-\r\nt=0 0\r\na=fingerprint:sha-256 AA\r\n\
        m=audio 9 UDP/TLS/RTP/SAVPF 111 0\r\nc=IN IP4 0.0.0.0\r\na=ice-ufrag:abcd\r\n\
        a=ice-pwd:0123456789012345678901\r\na=sendrecv\r\na=rtpmap:111 opus/48000/2\r\n\
        a=fmtp:111 minptime=10;useinbandfec=1\r\na=candidate:1 1 udp 1 127.0.0.1 9 typ host\r\n";

    #[test]
    fn candidates_are_taken_out() {
        let offer = Offer::read(OFFER).expect("good");
        assert_eq!(offer.candidates, ["candidate:1 1 udp 1 127.0.0.1 9 typ host"]);
        assert!(!offer.text.contains("candidate"));
        assert_eq!((offer.opus_fec, offer.opus_dtx), (true, false));
        let silent = Offer::read(&OFFER.replace("useinbandfec=1", "usedtx=1")).expect("good");
        assert_eq!((silent.opus_fec, silent.opus_dtx), (false, true));
        // What a peer wishes to receive is no other format.
        let other = OFFER.replace("minptime=10;useinbandfec=1", "minptime=3; useinbandfec=0;usedtx=1");
        let other = Offer::read(&other).expect("good");
        assert_eq!((other.opus_fec, other.opus_dtx), (false, true));
        assert!(other.text.contains("a=fmtp:111 minptime=10;useinbandfec=1;usedtx=1\r\n"), "{}", other.text);
        assert_eq!(offer.fragment, "abcd");
    }

    #[test]
    fn one_opus_and_the_telephone_events_of_its_clock_are_left() {
        let formats = "a=rtpmap:111 opus/48000/2\r\na=rtpmap:8 PCMA/8000\r\na=rtpmap:126 telephone-event/8000\r\n\
            a=rtpmap:110 telephone-event/48000\r\na=fmtp:126 0-15\r\na=rtcp-fb:* nack\r\na=rtcp-fb:8 nack\r\n";
        let sdp = OFFER.replace("SAVPF 111 0", "SAVPF 126 111 8 110").replace("a=rtpmap:111 opus/48000/2\r\n", formats);
        let text = Offer::read(&sdp).expect("good").text;
        assert!(text.contains("m=audio 9 UDP/TLS/RTP/SAVPF 111 110\r\n"), "{text}");
        assert!(!text.contains("126") && !text.contains("PCMA") && !text.contains("fb:8"), "{text}");
        assert!(text.contains("a=rtcp-fb:* nack\r\n") && text.contains("a=rtpmap:110 "), "{text}");
    }

    #[test]
    fn who_has_no_opus_is_answered_in_the_best_codec_that_it_has() {
        let events = "a=rtpmap:110 telephone-event/48000\r\na=rtpmap:126 telephone-event/8000\r\n";
        let read = |formats: &str, maps: &str| {
            let sdp = OFFER.replace("SAVPF 111 0", &format!("SAVPF {formats} 110 126"));
            let sdp = sdp.replace("a=fmtp:111 minptime=10;useinbandfec=1\r\n", "");
            Offer::read(&sdp.replace("a=rtpmap:111 opus/48000/2\r\n", &format!("{maps}{events}"))).expect("good")
        };
        for (formats, maps, codec, kept) in [
            ("0 9", "a=rtpmap:0 PCMU/8000\r\na=rtpmap:9 G722/8000\r\n", Codec::G722, "SAVPF 9 126\r\n"),
            ("8 0", "a=rtpmap:8 PCMA/8000\r\na=rtpmap:0 PCMU/8000/1\r\n", Codec::Pcmu, "SAVPF 0 126\r\n"),
            ("8", "a=rtpmap:8 PCMA/8000\r\n", Codec::Pcma, "SAVPF 8 126\r\n"),
            ("0 111", "a=rtpmap:0 PCMU/8000\r\na=rtpmap:111 opus/48000/2\r\n", Codec::Opus, "SAVPF 111 110\r\n"),
            (
                "63 0",
                "a=rtpmap:63 red/48000/2\r\na=fmtp:63 0/0\r\na=rtpmap:0 PCMU/8000\r\n",
                Codec::Pcmu,
                "SAVPF 0 126\r\n",
            ),
        ] {
            let offer = read(formats, maps);
            assert_eq!((offer.codec, offer.red, offer.opus_fec), (codec, None, false), "{maps}");
            assert!(offer.text.contains(kept), "{}", offer.text);
        }
    }

    #[test]
    fn redundant_audio_is_taken_where_it_is_of_the_same_opus() {
        let with = |parameters: &str| {
            let formats = format!("a=rtpmap:111 opus/48000/2\r\na=rtpmap:63 red/48000/2\r\na=fmtp:63 {parameters}\r\n");
            let sdp = OFFER.replace("SAVPF 111 0", "SAVPF 111 63").replace("a=rtpmap:111 opus/48000/2\r\n", &formats);
            Offer::read(&sdp).expect("good")
        };
        let offer = with("111/111");
        assert_eq!(offer.red, Some((63, 111)));
        assert!(offer.text.contains("SAVPF 111 63\r\n") && offer.text.contains("a=rtpmap:63 red"), "{}", offer.text);
        assert!(!offer.text.contains("a=fmtp:63"), "{}", offer.text);
        for other in ["111/0", "8/8", "111/", "x", ""] {
            let offer = with(other);
            assert_eq!(offer.red, None, "{other}");
            assert!(!offer.text.contains(":63 ") && offer.text.contains("SAVPF 111\r\n"), "{}", offer.text);
        }
    }

    #[test]
    fn packets_are_as_long_as_the_audio_section_wants_them() {
        for (lines, ms) in [
            ("", 20),
            ("a=ptime:10\r\n", 10),
            ("a=ptime:30\r\na=maxptime:60\r\n", 30),
            ("a=maxptime:60\r\n", 20),
            ("a=ptime:60\r\na=maxptime:50\r\n", 40),
            ("a=ptime:x\r\na=maxptime:\r\n", 20),
            ("m=video 9 UDP/TLS/RTP/SAVPF 96\r\na=ptime:60\r\n", 20),
        ] {
            let offer = Offer::read(&format!("{OFFER}{lines}")).expect("good");
            assert_eq!(offer.ptime, ms, "{lines}");
            assert_eq!(offer.restarted("wxyz", "abcdefghijklmnopqrstuv").ptime, ms);
        }
    }

    #[test]
    fn each_refusal_says_what_to_change() {
        let cases = [
            ("", "empty"),
            ("hello", "v=0"),
            ("v=0\r\nnonsense", "line 2"),
            (&OFFER.replace("m=audio", "m=video"), "audio section"),
            (&OFFER.replace("m=audio 9", "m=audio 0"), "audio section"),
            (&OFFER.replace("opus/48000/2", "iLBC/8000"), "Opus"),
            (&OFFER.replace("a=sendrecv", "a=sendonly"), "recvonly"),
            (&OFFER.replace("a=ice-ufrag:abcd", "a=ice-ufrag:a"), "ice-ufrag"),
            (&OFFER.replace("a=ice-pwd:", "a=ice-pw:"), "ice-pwd"),
            (&OFFER.replace("a=fingerprint", "a=fingerprin"), "fingerprint"),
        ];
        for (sdp, word) in cases {
            let error = Offer::read(sdp).expect_err(word).to_string();
            assert!(error.contains(word), "{error:?} should name {word:?}");
        }
    }

    #[test]
    fn candidates_are_judged_one_by_one() {
        let v4 = "127.0.0.1:1".parse().expect("address");
        let cases = [
            ("candidate:1 1 udp 1 10.0.0.1 9 typ host", Candidate::Usable),
            ("1 1 UDP 1 10.0.0.1 9 typ srflx raddr 0.0.0.0 rport 0", Candidate::Usable),
            ("candidate:1 2 udp 1 10.0.0.1 9 typ host", Candidate::Foreign),
            ("candidate:1 1 tcp 1 10.0.0.1 9 typ host tcptype active", Candidate::Foreign),
            ("candidate:1 1 udp 1 f00.local 9 typ host", Candidate::Foreign),
            ("candidate:1 1 udp 1 ::1 9 typ host", Candidate::Foreign),
            ("candidate:1 1 udp x 10.0.0.1 9 typ host", Candidate::Malformed),
            ("candidate:1 1 udp 1 10.0.0.1 70000 typ host", Candidate::Malformed),
            ("candidate:", Candidate::Malformed),
        ];
        for (candidate, expected) in cases {
            assert_eq!(judge(candidate, v4, Scope::Host), expected, "{candidate}");
        }
        // Who is reached from everywhere checks nothing nearer.
        for (ip, expected) in [
            ("203.0.113.9", Candidate::Usable),
            ("10.0.0.1", Candidate::Foreign),
            ("169.254.169.254", Candidate::Foreign),
            ("127.0.0.1", Candidate::Foreign),
        ] {
            let candidate = format!("candidate:1 1 udp 1 {ip} 9 typ host");
            assert_eq!(judge(&candidate, v4, Scope::Global), expected, "{ip}");
        }
    }

    #[test]
    fn a_restart_changes_only_the_credentials() {
        let offer = Offer::read(OFFER).expect("good");
        let restarted = offer.restarted("wxyz", "abcdefghijklmnopqrstuv");
        assert!(restarted.text.contains("a=ice-ufrag:wxyz\r\n"));
        assert_eq!(restarted.text.lines().count(), offer.text.lines().count());
        assert!(Offer::read(&restarted.text).is_ok());
    }
}
