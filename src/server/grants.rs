//! Single-use tokens for pages: `POST /v1/tokens`.
//!
//! A server that holds an API token asks for one and gives it to a page, which begins one call with it and steers
//! that call's session. The page sees no key, and a token that is read later begins nothing.
//!
//! # Why
//! Kept in memory, as digests: a token lives for minutes and one call, and a gateway that restarts has lost the call
//! too. The table is bounded, so that a client that may issue tokens cannot fill the memory.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use axum::{Extension, Json};
use serde::Deserialize;
use serde_json::json;

use super::auth::Caller;
use super::calls::may_use;
use super::config::digest;
use super::error::ApiError;
use super::extract::Body;
use super::policy::Policies;
use crate::clock;
use crate::cluster::{Owner, Peer};
use crate::gateway::Gateway;
use crate::webrtc::SessionId;

/// What every such token begins with, so that it is never taken for another kind.
pub(super) const PREFIX: &str = "antiphon-page-";
/// Most tokens that are not used up or expired.
const MAX_GRANTS: usize = 10_000;
/// How long a token waits for its call unless the request says otherwise, and at most, in seconds.
const EXPIRES_S: u64 = 300;
const MAX_EXPIRES_S: u64 = 86_400;
/// Bounds of `metadata`, which goes into one frame to the agent.
const MAX_ENTRIES: usize = 32;
const MAX_KEY: usize = 64;
const MAX_VALUE: usize = 1_024;
/// When others will have been used or have expired.
const RETRY: Duration = Duration::from_secs(30);

type Key = [u8; 32];

/// What a token allows.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Grant {
    /// The agent of the call; `None`: the default one.
    pub(super) agent: Option<String>,
    /// What the agent is told.
    pub(super) metadata: BTreeMap<String, String>,
    /// The only origin whose pages may use it.
    pub(super) origin: Option<String>,
    /// How long the call may last.
    pub(super) duration: Option<Duration>,
    /// Whose call it will be.
    pub(super) tenant: Arc<str>,
    expires: Instant,
}

#[derive(Clone, Debug, PartialEq)]
enum State {
    Fresh,
    /// A call is being set up with it.
    Claimed,
    /// For this session; where its call goes on as another, the one before stays until that has connected.
    Used(Vec<SessionId>),
}

/// The tokens that were issued. Clones mean the same.
#[derive(Clone, Debug, Default)]
pub(super) struct Grants(Arc<Mutex<Table>>);

/// By digest of the token.
type Table = HashMap<Key, (Arc<Grant>, State)>;

/// A token as a page presents it.
#[derive(Clone, Debug)]
pub(super) struct Page {
    grants: Grants,
    key: Key,
    pub(super) grant: Arc<Grant>,
}

impl PartialEq for Page {
    fn eq(&self, other: &Self) -> bool {
        self.key == other.key
    }
}

impl Eq for Page {}

/// Holds a token while its call is set up; dropped before [`Claim::used`], the token is fresh again.
pub(super) struct Claim(Option<Page>);

impl Grants {
    /// Takes `grant` up under `token`. `alive` says which sessions are still there; the rest is forgotten.
    fn issue(
        &self,
        now: Instant,
        token: &str,
        grant: Grant,
        alive: impl Fn(&SessionId) -> bool,
    ) -> Result<(), ApiError> {
        let mut table = self.lock();
        table.retain(|_, (grant, state)| match state {
            State::Fresh => now < grant.expires,
            State::Claimed => true,
            State::Used(sessions) => sessions.iter().any(&alive),
        });
        if table.len() >= MAX_GRANTS {
            let message = format!("{MAX_GRANTS} single-use tokens wait for their calls, as many as may");
            return Err(ApiError::unavailable(message, RETRY));
        }
        table.insert(digest(token), (Arc::new(grant), State::Fresh));
        Ok(())
    }

    /// The grant of a token that a page of `origin` presents, if it is known, of that origin, and either waits for its
    /// call or has it.
    pub(super) fn find(&self, now: Instant, token: &str, origin: Option<&str>) -> Option<Page> {
        let key = digest(token);
        let table = self.lock();
        let (grant, state) = table.get(&key)?;
        let bound = grant.origin.as_deref();
        let here = bound.is_none_or(|bound| origin.is_some_and(|origin| origin.eq_ignore_ascii_case(bound)));
        let lives = *state != State::Fresh || now < grant.expires;
        (here && lives).then(|| Page { grants: self.clone(), key, grant: grant.clone() })
    }

    fn lock(&self) -> MutexGuard<'_, Table> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Page {
    /// Begins to use the token up.
    ///
    /// # Errors
    /// 401: it was used before.
    pub(super) fn claim(&self) -> Result<Claim, ApiError> {
        match self.grants.lock().get_mut(&self.key) {
            Some((_, state @ State::Fresh)) => {
                *state = State::Claimed;
                Ok(Claim(Some(self.clone())))
            }
            _ => {
                let message = "this token was used for a call already; ask for another";
                Err(ApiError::new(StatusCode::UNAUTHORIZED, "token_used", message))
            }
        }
    }

    /// Whether `session` was begun with it.
    pub(super) fn began(&self, session: &SessionId) -> bool {
        matches!(self.grants.lock().get(&self.key), Some((_, State::Used(used))) if used.contains(session))
    }
}

impl Page {
    /// The call that was begun with it goes on as `session`.
    pub(super) fn goes_on(&self, session: &SessionId) {
        if let Some((_, State::Used(sessions))) = self.grants.lock().get_mut(&self.key) {
            sessions.drain(..sessions.len().saturating_sub(1));
            sessions.push(session.clone());
        }
    }
}

impl Claim {
    /// The call is there: nothing else can be begun with the token.
    pub(super) fn used(mut self, session: &SessionId) {
        if let Some(page) = self.0.take() {
            page.set(State::Used(vec![session.clone()]));
        }
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        if let Some(page) = self.0.take() {
            page.set(State::Fresh);
        }
    }
}

impl Page {
    fn set(&self, to: State) {
        if let Some((_, state)) = self.grants.lock().get_mut(&self.key) {
            *state = to;
        }
    }
}

/// The other gateway that issued `token`, if it did not do so itself.
pub(super) fn issuer(policies: &Policies, token: &str) -> Option<Peer> {
    match policies.nodes.as_ref()?.owner(token.strip_prefix(PREFIX)?) {
        Owner::There(peer) => Some(*peer),
        Owner::Here | Owner::Gone(_) => None,
    }
}

/// The body of `POST /v1/tokens`.
#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
pub(super) struct Issue {
    agent: Option<String>,
    expires_in: Option<u64>,
    #[serde(default)]
    metadata: BTreeMap<String, String>,
    origin: Option<String>,
    #[serde(default)]
    limits: Limits,
}

#[derive(Default, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
struct Limits {
    duration_seconds: Option<u64>,
}

impl Issue {
    fn check(&self) -> Result<(), ApiError> {
        let wrong = |param, message: String| Err(ApiError::bad_request("invalid_token_request", message).param(param));
        if !(1..=MAX_EXPIRES_S).contains(&self.expires_in.unwrap_or(EXPIRES_S)) {
            return wrong("expiresIn", format!("`expiresIn` is 1 to {MAX_EXPIRES_S} seconds"));
        }
        if self.limits.duration_seconds == Some(0) {
            return wrong("limits", "`limits.durationSeconds` is at least 1".into());
        }
        let fits = |(key, value): (&String, &String)| key.len() <= MAX_KEY && value.len() <= MAX_VALUE;
        if self.metadata.len() > MAX_ENTRIES || !self.metadata.iter().all(fits) {
            let message = format!(
                "`metadata` has at most {MAX_ENTRIES} entries, names of {MAX_KEY} bytes and values of {MAX_VALUE}"
            );
            return wrong("metadata", message);
        }
        match &self.origin {
            Some(origin) if !origin.contains("://") || origin.ends_with('/') => {
                wrong("origin", format!("`{origin}` is no origin; write it like https://app.example.com"))
            }
            _ => Ok(()),
        }
    }
}

/// `POST /v1/tokens`.
///
/// # Errors
/// 400, 404 where there is no such agent, 503 where there are too many.
pub(super) async fn issue(
    axum::extract::State(gateway): axum::extract::State<Gateway>,
    Extension(grants): Extension<Grants>,
    caller: Caller,
    Body(body): Body<Issue>,
) -> Result<Response, ApiError> {
    body.check()?;
    may_use(&gateway, &caller, body.agent.as_deref())?;
    if let Some(name) = body.agent.as_ref().filter(|name| gateway.agents.find(name).is_none()) {
        return Err(ApiError::not_found("agent", name).param("agent"));
    }
    let expires_in = body.expires_in.unwrap_or(EXPIRES_S);
    let now = clock::now();
    let grant = Grant {
        agent: body.agent,
        metadata: body.metadata,
        origin: body.origin,
        duration: body.limits.duration_seconds.map(Duration::from_secs),
        tenant: caller.tenant,
        expires: now + Duration::from_secs(expires_in),
    };
    let random: [u8; 24] = rand::random();
    let random: String = random.iter().map(|byte| format!("{byte:02x}")).collect();
    let token = match &gateway.nodes {
        Some(nodes) => format!("{PREFIX}{}.{random}", nodes.name()),
        None => format!("{PREFIX}{random}"),
    };
    grants.issue(now, &token, grant, |session| gateway.webrtc.owner(session).is_some())?;
    Ok((StatusCode::CREATED, Json(json!({ "token": token, "expiresIn": expires_in }))).into_response())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn grant(now: Instant, origin: Option<&str>) -> Grant {
        Grant {
            agent: Some("demo".into()),
            metadata: BTreeMap::new(),
            origin: origin.map(str::to_owned),
            duration: None,
            tenant: "crm".into(),
            expires: now + Duration::from_secs(60),
        }
    }

    #[test]
    fn a_token_begins_one_call_and_steers_it() {
        let (grants, now) = (Grants::default(), clock::now());
        grants.issue(now, "t", grant(now, None), |_| true).expect("room");
        assert!(grants.find(now, "x", None).is_none());
        let page = grants.find(now, "t", None).expect("known");
        let (session, other) = (SessionId::from("s"), SessionId::from("o"));
        assert!(!page.began(&session));
        // An offer that could not be answered leaves it fresh.
        drop(page.claim().expect("fresh"));
        let claim = page.claim().expect("fresh again");
        assert!(page.claim().is_err(), "two calls at a time");
        claim.used(&session);
        assert!(page.claim().is_err());
        // It outlives its time, for its own session.
        let page = grants.find(now + Duration::from_secs(3_600), "t", None).expect("known");
        assert!(page.began(&session) && !page.began(&other));
        // It goes on by another connection, and by a third: the one before each counts until it has connected.
        page.goes_on(&other);
        assert!(page.began(&session) && page.began(&other));
        page.goes_on(&"third".into());
        assert!(!page.began(&session) && page.began(&other) && page.began(&"third".into()));
    }

    #[test]
    fn a_token_expires_and_is_bound_to_its_origin() {
        let (grants, now) = (Grants::default(), clock::now());
        grants.issue(now, "t", grant(now, Some("https://app.example")), |_| true).expect("room");
        assert!(grants.find(now, "t", Some("https://APP.example")).is_some());
        for origin in [None, Some("https://evil.example"), Some("null")] {
            assert!(grants.find(now, "t", origin).is_none(), "{origin:?}");
        }
        assert!(grants.find(now + Duration::from_secs(60), "t", Some("https://app.example")).is_none());
    }

    #[test]
    fn the_table_is_bounded_and_forgets_what_is_over() {
        let (grants, now) = (Grants::default(), clock::now());
        for n in 0..MAX_GRANTS {
            grants.issue(now, &n.to_string(), grant(now, None), |_| true).expect("room");
        }
        assert!(grants.issue(now, "more", grant(now, None), |_| true).is_err());
        grants.find(now, "0", None).expect("known").claim().expect("fresh").used(&"gone".into());
        assert!(grants.issue(now, "more", grant(now, None), |session| session.as_str() != "gone").is_ok());
        let later = now + Duration::from_secs(61);
        assert!(grants.issue(later, "later", grant(later, None), |_| true).is_ok());
        assert_eq!(grants.lock().len(), 1, "the rest has expired");
    }
}
