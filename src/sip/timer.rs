//! Session timers (RFC 4028): who refreshes a dialog when, and when one that is not refreshed is over.
//!
//! Owns the numbers of one dialog; sends nothing. We ask for a timer where `session_expires_s` says so: media that stops
//! is noticed without one, but not that of a call on hold. We take part in whatever the peer or a proxy between us asks
//! for, in either role.

use std::{
    future::pending,
    time::{Duration, Instant},
};

use rsipstack::sip::{Header, Request, Response, StatusCode, prelude::HeadersExt};
use tokio::time::sleep_until;

/// Shortest interval we take part in, seconds: the least that RFC 4028 section 5 allows.
const MIN_SE: u64 = 90;
/// Longest interval counted with; more is as good as none.
const MAX_SE: u64 = 7 * 86_400;
/// How long before the end who does not refresh gives up at most (section 10).
const MARGIN: Duration = Duration::from_secs(32);
/// Shortest wait before a refresh that failed is tried again.
const RETRY: Duration = Duration::from_secs(10);

/// Waits until `deadline`; `None`: for ever.
pub(super) async fn until(deadline: Option<Instant>) {
    match deadline {
        Some(deadline) => sleep_until(deadline.into()).await,
        None => pending().await,
    }
}

/// The extensions of ours that requests and responses name.
pub(super) fn supported() -> Header {
    Header::Supported("timer, 100rel, replaces".into())
}

/// The timer of one dialog.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct SessionTimer {
    interval: Duration,
    /// Whether refreshing is our task.
    ours: bool,
    refreshed: Instant,
    /// When the next refresh is due, where it is ours.
    next: Instant,
}

/// What is due.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Due {
    /// Our refresh.
    Refresh,
    /// Neither side has refreshed the session: it is over.
    Expired,
}

impl SessionTimer {
    fn new(seconds: u64, ours: bool, now: Instant) -> Self {
        let interval = Duration::from_secs(seconds.min(MAX_SE));
        Self { interval, ours, refreshed: now, next: now + interval / 2 }
    }

    /// What our answer to a request with `Session-Expires` settles, `None` where it names none. Theirs is the task
    /// unless they give it to us, or do not know timers themselves (a proxy has asked). `wish`: the interval, in seconds,
    /// that we ask for where they know timers and name none (section 9); refreshing is ours then.
    ///
    /// # Errors
    /// The interval is too short; the response to send with its headers.
    pub(super) fn asked(
        request: &Request,
        wish: Option<u64>,
        now: Instant,
    ) -> Result<Option<Self>, (StatusCode, Vec<Header>)> {
        let theirs = request.header_contains_token("Supported", "timer");
        let Some((seconds, refresher)) = read(request.header_value("Session-Expires").as_deref()) else {
            let least = read(request.header_value("Min-SE").as_deref()).map_or(MIN_SE, |(least, _)| least.max(MIN_SE));
            return Ok(wish.filter(|_| theirs).map(|wish| Self::new(wish.max(least), true, now)));
        };
        if seconds < MIN_SE && theirs {
            let least = Header::MinSE(MIN_SE.to_string().into());
            return Err((StatusCode::from(422), vec![least, supported()]));
        }
        let ours = refresher == Some(Role::Uas) || !theirs;
        Ok(Some(Self::new(seconds.max(MIN_SE), ours, now)))
    }

    /// What the peer's answer to our request settles, `None` where it names no interval: then there is no timer.
    pub(super) fn answered(response: &Response, now: Instant) -> Option<Self> {
        let (seconds, refresher) = read(response.header_value("Session-Expires").as_deref())?;
        // No interval is no timer, and not a session that is over at once.
        if seconds == 0 {
            return None;
        }
        // Left out by mistake, it is ours: refreshing without need does no harm.
        Some(Self::new(seconds, refresher != Some(Role::Uas), now))
    }

    /// The same timer with the interval that a refusal (422) demands. `None`: it demands nothing more.
    pub(super) fn longer(&self, refusal: &Response) -> Option<Self> {
        let least = demanded(refusal).filter(|least| Duration::from_secs(*least) > self.interval)?;
        Some(Self { interval: Duration::from_secs(least.min(MAX_SE)), ..*self })
    }

    /// The same timer, from `now` on.
    pub(super) fn restarted(&self, now: Instant) -> Self {
        Self { refreshed: now, next: now + self.interval / 2, ..*self }
    }

    /// Headers of our 2xx to `request`, which settled this.
    pub(super) fn answer_headers(&self, request: &Request) -> Vec<Header> {
        let mut headers = vec![self.session_expires(if self.ours { "uas" } else { "uac" }), supported()];
        if request.header_contains_token("Supported", "timer") {
            headers.push(Header::Require("timer".into()));
        }
        headers
    }

    /// Headers of a request of ours that refreshes. It leaves the task with whom it is.
    pub(super) fn request_headers(&self) -> Vec<Header> {
        vec![self.session_expires(if self.ours { "uac" } else { "uas" }), supported()]
    }

    fn session_expires(&self, refresher: &str) -> Header {
        Header::SessionExpires(format!("{};refresher={refresher}", self.interval.as_secs()).into())
    }

    /// When to look at [`SessionTimer::due`] next.
    pub(super) fn deadline(&self) -> Instant {
        if self.ours { self.next.min(self.expires()) } else { self.expires() }
    }

    /// What is due now.
    pub(super) fn due(&self, now: Instant) -> Option<Due> {
        if now >= self.expires() { Some(Due::Expired) } else { (self.ours && now >= self.next).then_some(Due::Refresh) }
    }

    /// A refresh was begun: what it brings is waited for before another.
    pub(super) fn begun(&mut self, now: Instant) {
        self.next = now + (self.interval / 8).max(RETRY.min(self.interval / 4));
    }

    fn expires(&self) -> Instant {
        // Section 10: the smaller of 32 s and a third of the interval before it ends.
        self.refreshed + self.interval - MARGIN.min(self.interval / 3)
    }
}

/// Headers of an INVITE of ours that asks for a session of `seconds`. Who refreshes is for the called side to say.
pub(super) fn wish_headers(seconds: u64) -> Vec<Header> {
    let least = Header::MinSE(MIN_SE.to_string().into());
    vec![Header::SessionExpires(seconds.max(MIN_SE).to_string().into()), least]
}

/// The least interval, in seconds, that a 422 demands.
pub(super) fn demanded(refusal: &Response) -> Option<u64> {
    read(refusal.header_value("Min-SE").as_deref()).map(|(seconds, _)| seconds).filter(|seconds| *seconds <= MAX_SE)
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Role {
    Uac,
    Uas,
}

/// `1800;refresher=uac`. What cannot be read is as if it were not there.
fn read(value: Option<&str>) -> Option<(u64, Option<Role>)> {
    let mut parts = value?.split(';').map(str::trim);
    let seconds = parts.next()?.parse().ok()?;
    let refresher = parts.find_map(|part| {
        let (name, value) = part.split_once('=')?;
        let value = value.trim();
        match name.trim().eq_ignore_ascii_case("refresher") {
            true if value.eq_ignore_ascii_case("uac") => Some(Role::Uac),
            true if value.eq_ignore_ascii_case("uas") => Some(Role::Uas),
            _ => None,
        }
    });
    Some((seconds, refresher))
}

#[cfg(test)]
mod tests {
    use rsipstack::sip::{Method, Version};

    use super::*;
    use crate::clock;

    fn request(headers: Vec<Header>) -> Request {
        Request {
            method: Method::Invite,
            uri: "sip:a@b".try_into().expect("valid"),
            version: Version::V2,
            headers: headers.into(),
            body: Vec::new(),
        }
    }

    fn expires(value: &str) -> Header {
        Header::SessionExpires(value.into())
    }

    #[test]
    fn the_peer_refreshes_unless_it_gives_that_to_us_or_cannot() {
        let now = clock::now();
        for (value, knows, ours) in [
            ("1800", true, false),
            ("1800;refresher=uac", true, false),
            ("1800 ; Refresher=UAS", true, true),
            ("1800;refresher=uac", false, true),
        ] {
            let mut headers = vec![expires(value)];
            headers.extend(knows.then(|| Header::Supported("100rel, timer".into())));
            let request = request(headers);
            let timer = SessionTimer::asked(&request, None, now).expect("long enough").expect("a timer");
            assert_eq!(timer.ours, ours, "{value}");
            let told: Vec<String> = timer.answer_headers(&request).iter().map(ToString::to_string).collect();
            let role = if ours { "uas" } else { "uac" };
            assert!(told[0].contains(&format!("1800;refresher={role}")), "{told:?}");
            assert_eq!(told.iter().any(|header| header.starts_with("Require")), knows);
        }
        assert_eq!(SessionTimer::asked(&request(vec![]), None, now), Ok(None));
        assert_eq!(SessionTimer::asked(&request(vec![expires("soon")]), None, now), Ok(None));
    }

    #[test]
    fn an_interval_that_is_too_short_is_refused_with_the_least() {
        let short = request(vec![expires("30"), Header::Supported("timer".into())]);
        let (status, headers) = SessionTimer::asked(&short, None, clock::now()).expect_err("too short");
        assert_eq!(status.code(), 422);
        assert!(headers.iter().any(|header| matches!(header, Header::MinSE(least) if least.value() == "90")));
        // Who does not know timers would not understand the refusal.
        let timer = SessionTimer::asked(&request(vec![expires("30")]), None, clock::now());
        assert_eq!(timer.expect("taken").map(|timer| timer.interval), Some(Duration::from_secs(90)));
    }

    #[test]
    fn we_ask_who_knows_timers_and_take_the_task() {
        let now = clock::now();
        let knows = || Header::Supported("timer".into());
        let asked = |headers, wish| SessionTimer::asked(&request(headers), wish, now).expect("nothing to refuse");
        assert_eq!(asked(vec![], Some(1_800)), None);
        assert_eq!(asked(vec![knows()], None), None);
        assert_eq!(asked(vec![knows()], Some(1_800)), Some(SessionTimer::new(1_800, true, now)));
        let least = Header::MinSE("2400;x".into());
        assert_eq!(asked(vec![knows(), least], Some(1_800)), Some(SessionTimer::new(2_400, true, now)));
        let timer = asked(vec![knows()], Some(10)).expect("asked for");
        let told: Vec<String> = timer.answer_headers(&request(vec![knows()])).iter().map(ToString::to_string).collect();
        assert!(told[0].contains("90;refresher=uas"), "{told:?}");
        // Theirs goes first.
        let theirs = asked(vec![knows(), expires("600")], Some(1_800));
        assert_eq!(theirs, Some(SessionTimer::new(600, false, now)));
    }

    #[test]
    fn we_refresh_at_half_and_give_up_before_the_end() {
        let now = clock::now();
        let at = |seconds| now + Duration::from_secs(seconds);
        let mut timer = SessionTimer::new(1_800, true, now);
        assert_eq!((timer.deadline(), timer.due(at(899)), timer.due(at(900))), (at(900), None, Some(Due::Refresh)));
        timer.begun(at(900));
        assert_eq!((timer.due(at(901)), timer.due(at(1_125))), (None, Some(Due::Refresh)));
        assert_eq!((timer.due(at(1_767)), timer.due(at(1_768))), (Some(Due::Refresh), Some(Due::Expired)));
        let theirs = SessionTimer::new(90, false, now);
        assert_eq!((theirs.deadline(), theirs.due(at(59)), theirs.due(at(60))), (at(60), None, Some(Due::Expired)));
    }
}
