//! Provisional responses that are repeated until they are acknowledged (RFC 3262), where we are called.
//!
//! Times and numbers of each such response, by dialog. The call that rings sends and repeats it; its PRACK comes in by the
//! endpoint's dispatch, and both meet in [`Pending`].
//!
//! # Why
//! *A 180 brings no description.* Where the INVITE had no offer the first reliable response must bring ours (section 5): who
//! demands them then gets none, and who only knows them an ordinary one.
//!
//! *A 183 that brings ours is an answer*, and the 200 waits for its PRACK (section 3).

use std::{
    collections::HashMap,
    sync::{Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use rsipstack::sip::{Header, Request, prelude::HeadersExt};
use tokio::sync::Notify;

use super::timer;

/// The first repetition (T1); each later one waits twice as long.
const FIRST: Duration = Duration::from_millis(500);
/// 64 * T1: then the caller is given up.
const LIMIT: Duration = Duration::from_secs(32);

/// Whether `invite` may be, or must be, rung reliably.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Wish {
    /// The caller does not know how.
    Unknown,
    /// It does.
    Known,
    /// It takes no other provisional responses.
    Demanded,
}

impl Wish {
    pub(super) fn of(invite: &Request) -> Wish {
        match () {
            () if invite.header_contains_token("Require", "100rel") => Wish::Demanded,
            () if invite.header_contains_token("Supported", "100rel") => Wish::Known,
            () => Wish::Unknown,
        }
    }
}

/// A reliable response that was sent.
#[derive(Debug)]
struct Sent {
    number: u32,
    /// CSeq of the INVITE.
    cseq: u32,
    began: Instant,
    wait: Duration,
    next: Instant,
    acknowledged: bool,
}

/// What is due.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Due {
    /// The same response again.
    Repeat,
    /// The end: the caller has never acknowledged it.
    GiveUp,
}

/// The reliable responses of all calls that ring, by the tag that we have given the dialog.
#[derive(Debug, Default)]
pub(super) struct Pending {
    sent: Mutex<HashMap<String, Sent>>,
    acknowledged: Notify,
}

impl Pending {
    /// A reliable response to `invite` leaves now; its headers. `random` is where its numbers begin (section 3).
    pub(super) fn begin(&self, now: Instant, tag: &str, invite: &Request, random: u32) -> Vec<Header> {
        let cseq = invite.cseq_header().ok().and_then(|cseq| cseq.seq().ok()).unwrap_or(0);
        let mut sent = lock(&self.sent);
        // 1 to 2^31 - 1, and room for what follows.
        let number = sent.get(tag).map_or(random % (1 << 30) + 1, |before| before.number + 1);
        let fresh = Sent { number, cseq, began: now, wait: FIRST, next: now + FIRST, acknowledged: false };
        sent.insert(tag.to_owned(), fresh);
        vec![Header::Require("100rel".into()), Header::Other("RSeq".to_owned(), number.to_string())]
    }

    /// When [`Pending::due`] is to be asked.
    pub(super) fn deadline(&self, tag: &str) -> Option<Instant> {
        let sent = lock(&self.sent);
        sent.get(tag).filter(|sent| !sent.acknowledged).map(|sent| sent.next.min(sent.began + LIMIT))
    }

    /// What is due now.
    pub(super) fn due(&self, now: Instant, tag: &str) -> Option<Due> {
        let mut table = lock(&self.sent);
        let sent = table.get_mut(tag).filter(|sent| !sent.acknowledged)?;
        if now >= sent.began + LIMIT {
            return Some(Due::GiveUp);
        }
        if now < sent.next {
            return None;
        }
        sent.wait *= 2;
        sent.next = now + sent.wait;
        Some(Due::Repeat)
    }

    /// A PRACK came for the dialog. `false`: it names no response of ours that still waits for one (481).
    pub(super) fn acknowledge(&self, tag: &str, prack: &Request) -> bool {
        let named = prack.header_value("RAck").and_then(|value| rack(&value));
        let mut table = lock(&self.sent);
        let Some(sent) = table.get_mut(tag) else { return false };
        let fits = !sent.acknowledged && named == Some((sent.number, sent.cseq));
        sent.acknowledged |= fits;
        if fits {
            self.acknowledged.notify_waiters();
        }
        fits
    }

    /// Waits until nothing of the dialog waits for a PRACK. Cancel safe.
    pub(super) async fn settled(&self, tag: &str) {
        loop {
            // Before the look, so that a PRACK between both is not missed.
            let told = self.acknowledged.notified();
            if self.deadline(tag).is_none() {
                return;
            }
            told.await;
        }
    }

    /// The call rings no longer.
    pub(super) fn forget(&self, tag: &str) {
        lock(&self.sent).remove(tag);
    }
}

fn lock(table: &Mutex<HashMap<String, Sent>>) -> MutexGuard<'_, HashMap<String, Sent>> {
    // Nothing here panics while it holds one.
    table.lock().unwrap_or_else(PoisonError::into_inner)
}

/// `776656 1 INVITE`: the numbers of the response and of the request that it answers.
fn rack(value: &str) -> Option<(u32, u32)> {
    let mut words = value.split_whitespace();
    let (number, cseq) = (words.next()?.parse().ok()?, words.next()?.parse().ok()?);
    words.next()?.eq_ignore_ascii_case("INVITE").then_some((number, cseq))
}

/// Waits until [`Pending::due`] is to be asked.
pub(super) async fn due(pending: &Pending, tag: &str) {
    timer::until(pending.deadline(tag)).await;
}

#[cfg(test)]
mod tests {
    use rsipstack::sip::SipMessage;

    use super::*;
    use crate::clock;

    fn request(method: &str, headers: &str) -> Request {
        let text = format!(
            "{method} sip:x@192.0.2.9 SIP/2.0\r\nVia: SIP/2.0/UDP h;branch=z9hG4bK1\r\nFrom: <sip:a@b>;tag=1\r\n\
             To: <sip:x@y>\r\nCall-ID: 1\r\nCSeq: 7 {method}\r\n{headers}Content-Length: 0\r\n\r\n"
        );
        match SipMessage::try_from(text.as_bytes()).expect("parses") {
            SipMessage::Request(request) => request,
            SipMessage::Response(_) => panic!("a request"),
        }
    }

    #[test]
    fn a_response_is_repeated_ever_less_often_until_it_is_acknowledged() {
        let (pending, now) = (Pending::default(), clock::now());
        let at = |ms| now + Duration::from_millis(ms);
        let headers = pending.begin(now, "tag", &request("INVITE", ""), 99);
        assert_eq!(headers[1].to_string(), "RSeq: 100");
        assert_eq!((pending.due(at(499), "tag"), pending.due(at(500), "tag")), (None, Some(Due::Repeat)));
        assert_eq!(pending.deadline("tag"), Some(at(1_500)));
        assert_eq!((pending.due(at(1_499), "tag"), pending.due(at(1_500), "tag")), (None, Some(Due::Repeat)));
        for wrong in ["", "RAck: 101 7 INVITE\r\n", "RAck: 100 8 INVITE\r\n", "RAck: 100 7 BYE\r\n", "RAck: x\r\n"] {
            assert!(!pending.acknowledge("tag", &request("PRACK", wrong)), "{wrong}");
        }
        let right = request("PRACK", "RAck: 100 7 INVITE\r\n");
        assert!(!pending.acknowledge("other", &right));
        assert!(pending.acknowledge("tag", &right));
        assert!(!pending.acknowledge("tag", &right), "once");
        assert_eq!((pending.deadline("tag"), pending.due(at(40_000), "tag")), (None, None));
        // The next one of the same dialog has the next number.
        assert_eq!(pending.begin(at(2_000), "tag", &request("INVITE", ""), 5)[1].to_string(), "RSeq: 101");
        pending.forget("tag");
        assert_eq!(pending.deadline("tag"), None);
    }

    #[test]
    fn who_never_acknowledges_is_given_up() {
        let (pending, now) = (Pending::default(), clock::now());
        pending.begin(now, "tag", &request("INVITE", ""), u32::MAX);
        let mut repeated = 0;
        let over = loop {
            let at = pending.deadline("tag").expect("it waits");
            match pending.due(at, "tag") {
                Some(Due::Repeat) => repeated += 1,
                Some(Due::GiveUp) => break at,
                None => panic!("due at its deadline"),
            }
        };
        assert_eq!((over - now, repeated), (LIMIT, 6));
    }

    #[test]
    fn what_the_caller_can_take_stands_in_its_invite() {
        for (headers, wish) in [
            ("", Wish::Unknown),
            ("Supported: timer\r\n", Wish::Unknown),
            ("Supported: timer, 100rel\r\n", Wish::Known),
            ("Supported: 100rel\r\nRequire: 100rel\r\n", Wish::Demanded),
        ] {
            assert_eq!(Wish::of(&request("INVITE", headers)), wish, "{headers}");
        }
    }
}
