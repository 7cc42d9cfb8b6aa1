//! Digits as RTP events (RFC 4733): the packets that say one, and the digits a stream of them says.

/// Every digit, in the order of its event code.
const DIGITS: &[u8; 16] = b"0123456789*#ABCD";

/// The event code of a digit.
pub fn event_of(digit: char) -> Option<u8> {
    DIGITS.iter().position(|d| char::from(*d) == digit.to_ascii_uppercase()).map(|n| n as u8)
}

/// One event payload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Event {
    /// What is pressed.
    pub digit: char,
    /// Released.
    pub end: bool,
    /// Since its start, in timestamp units.
    pub duration: u16,
}

impl Event {
    /// Reads a payload; `None` for events that are no digit.
    pub fn parse(payload: &[u8]) -> Option<Event> {
        let (head, _) = payload.split_first_chunk::<4>()?;
        let digit = char::from(*DIGITS.get(usize::from(head[0]))?);
        Some(Event { digit, end: head[1] & 0x80 != 0, duration: u16::from_be_bytes([head[2], head[3]]) })
    }

    /// The payload, at -10 dBm0; `None` when the digit has no code.
    pub fn to_bytes(self) -> Option<[u8; 4]> {
        let [high, low] = self.duration.to_be_bytes();
        Some([event_of(self.digit)?, 10 | if self.end { 0x80 } else { 0 }, high, low])
    }
}

/// The digits of one stream, each told once however many packets repeat it.
#[derive(Clone, Debug, Default)]
pub struct Receiver {
    last: Option<u32>,
}

impl Receiver {
    /// Takes one event packet; gives the digit when it is a new one. All packets of one event share a timestamp
    /// (RFC 4733 section 2.2.1), so a lost start or end does not lose or double the digit.
    pub fn push(&mut self, timestamp: u32, payload: &[u8]) -> Option<char> {
        let event = Event::parse(payload)?;
        if self.last == Some(timestamp) {
            return None;
        }
        self.last = Some(timestamp);
        Some(event.digit)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_digit_is_told_once_whatever_is_lost() {
        let mut receiver = Receiver::default();
        let payload = |end| Event { digit: '#', end, duration: 160 }.to_bytes().unwrap();
        assert_eq!(receiver.push(100, &payload(false)), Some('#'));
        assert_eq!(receiver.push(100, &payload(true)), None);
        assert_eq!(receiver.push(900, &payload(true)), Some('#'), "only the end arrived");
        assert_eq!(receiver.push(1_700, &[99, 0, 0, 0]), None, "no digit");
        assert_eq!(receiver.push(1_700, &[]), None);
    }
}
