//! Server-sent events out of a byte stream (WHATWG HTML, section 9.2.6), as far as chat completions use them: `data`.

/// Largest event: a chunk of an answer has some hundred bytes, a whole answer in one document some ten thousand.
pub const MAX_EVENT: usize = 1 << 20;

/// The state between two reads.
#[derive(Debug, Default)]
pub struct Parser {
    /// The line under way.
    line: Vec<u8>,
    /// The data of the event under way, lines joined by newlines.
    data: Option<String>,
    /// The last byte was a carriage return, which a newline may follow.
    after_return: bool,
    /// A byte order mark may only come first.
    begun: bool,
}

/// An event is larger than [`MAX_EVENT`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("an event of the stream is larger than {MAX_EVENT} bytes")]
pub struct TooLarge;

impl Parser {
    /// Takes the next bytes, cut anywhere; adds the data of every event that is complete.
    ///
    /// # Errors
    /// An event grows past [`MAX_EVENT`]; the stream is of no use any more.
    pub fn push(&mut self, bytes: &[u8], events: &mut Vec<String>) -> Result<(), TooLarge> {
        for &byte in bytes {
            let after_return = std::mem::take(&mut self.after_return);
            match byte {
                b'\n' if after_return => {}
                b'\n' | b'\r' => {
                    self.after_return = byte == b'\r';
                    self.end_line(events);
                }
                _ => {
                    let held = self.line.len() + self.data.as_ref().map_or(0, String::len);
                    if held >= MAX_EVENT {
                        return Err(TooLarge);
                    }
                    self.line.push(byte);
                }
            }
        }
        Ok(())
    }

    fn end_line(&mut self, events: &mut Vec<String>) {
        let line = std::mem::take(&mut self.line);
        let line = match (std::mem::replace(&mut self.begun, true), line.strip_prefix(b"\xef\xbb\xbf")) {
            (false, Some(rest)) => rest,
            _ => &line,
        };
        if line.is_empty() {
            events.extend(self.data.take());
            return;
        }
        let (field, value) = match line.iter().position(|byte| *byte == b':') {
            // A line that begins with a colon is a comment: servers keep connections open with them.
            Some(at) => (&line[..at], &line[at + 1..]),
            None => (line, &line[line.len()..]),
        };
        if field == b"data" {
            let value = String::from_utf8_lossy(value.strip_prefix(b" ").unwrap_or(value));
            match &mut self.data {
                Some(data) => {
                    data.push('\n');
                    data.push_str(&value);
                }
                None => self.data = Some(value.into_owned()),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn parse(pieces: &[&[u8]]) -> Vec<String> {
        let (mut parser, mut events) = (Parser::default(), Vec::new());
        for piece in pieces {
            parser.push(piece, &mut events).expect("small");
        }
        events
    }

    #[test]
    fn events_come_out_whole_wherever_the_bytes_are_cut() {
        let text =
            "\u{feff}data: {\"a\":1}\r\n\r\n: keep-alive\n\nevent: x\nid: 7\ndata:one\ndata: two\r\rdata: Zürich\n\n";
        let expected = ["{\"a\":1}", "one\ntwo", "Zürich"];
        assert_eq!(parse(&[text.as_bytes()]), expected);
        for cut in 0..text.len() {
            assert_eq!(parse(&[&text.as_bytes()[..cut], &text.as_bytes()[cut..]]), expected, "{cut}");
        }
    }

    #[test]
    fn what_is_unfinished_or_no_event_gives_nothing() {
        assert!(parse(&[b"data: half"]).is_empty());
        assert!(parse(&[b"<html>\n\n<body>garbage</body>\n\n"]).is_empty());
        assert_eq!(parse(&[b"data\n\n"]), [""]);
    }

    #[test]
    fn an_endless_event_is_refused() {
        let (mut parser, mut events) = (Parser::default(), Vec::new());
        let line = [b'a'; 4_096];
        let refused = (0..1_000).any(|_| parser.push(&line, &mut events).is_err());
        assert!(refused && parser.line.len() <= MAX_EVENT);
    }

    proptest! {
        #[test]
        fn any_bytes_are_taken(bytes in prop::collection::vec(any::<u8>(), 0..400), cut in 0usize..400) {
            let cut = cut.min(bytes.len());
            prop_assert_eq!(parse(&[&bytes]), parse(&[&bytes[..cut], &bytes[cut..]]));
        }
    }
}
