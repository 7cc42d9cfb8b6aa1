//! A connection to PostgreSQL, for those who keep what must not be lost: jobs and records of several gateways.
//!
//! A [`Link`] owns one connection, made when it is first needed and made anew when it was lost, and a thread for its socket.
//! It knows nothing of what is asked over it but the tables ([`Setup`]), which it brings up to date. Each part has a link of
//! its own; the owner of the link owns the state of the session, too.
//!
//! # Why
//! - **Calls that block.** Jobs and records have each a thread of their own that blocks, as with SQLite. `tokio-postgres`
//!   hands requests to its connection by a channel, so that only the connection needs a runtime, which is here; the caller
//!   parks its thread until the answer is there ([`wait`]). That works on a thread that runs another runtime, too, where
//!   blocking on this one would panic.
//! - **A limit for each request**, and none for a while after a failure: a database that is gone is told of at once, not
//!   after every request has waited for it.
//! - **What was said on a lost connection may have been done.** A link never repeats a request; its users write such
//!   requests as can be repeated.

mod address;
mod tls;

use std::future::poll_fn;
use std::pin::pin;
use std::sync::mpsc::sync_channel;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, Wake, Waker};
use std::thread::Thread;
use std::time::{Duration, Instant};

use tokio::io::{AsyncRead, AsyncWrite};
use tokio::runtime::Runtime;
use tokio::sync::Notify;
use tokio::task::AbortHandle;
use tokio_postgres::{AsyncMessage, Connection, NoTls};
pub use tokio_postgres::{Client, Row, Transaction};

use self::address::Target;
pub use self::address::{Address, Database};
use self::tls::Tls;
use crate::clock;

/// Longest wait for a connection with its tables.
const CONNECT: Duration = Duration::from_secs(10);
/// Longest wait for the answer to a request. A job of five million characters takes a second or two.
const ANSWER: Duration = Duration::from_secs(15);
/// After a failure nothing is tried for so long.
const REST: Duration = if cfg!(test) { Duration::from_millis(20) } else { Duration::from_millis(500) };
/// A silent network is noticed after so long.
const KEEPALIVE: Duration = Duration::from_secs(10);
/// Of each session: what hangs in the server must not hold locks that other gateways wait for.
const SESSION: &str = "SET statement_timeout = '12s'; SET lock_timeout = '8s'; \
                       SET idle_in_transaction_session_timeout = '20s'";
/// Taken while tables are changed, so that gateways that start together do it one after the other.
const CHANGING: i64 = 0x616e_7469_7068_6f6e;

/// Why a request was not done, or not known to be done.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The connection cannot be made, was lost while the request was under way, which may have been done, or the server
    /// does nothing for now.
    #[error("PostgreSQL cannot be used: {0}")]
    Gone(String),
    /// The server refuses what was to be written, and will again; nothing was done.
    #[error("PostgreSQL: {0}")]
    Refused(String),
    /// The configuration or the tables must be changed first; the text says how.
    #[error("{0}")]
    Unusable(String),
}

impl From<tokio_postgres::Error> for Error {
    fn from(error: tokio_postgres::Error) -> Self {
        // Data exceptions and violated constraints. All else (no room, no right, a deadlock, a server that stops, or that was
        // made a copy of another) may be otherwise next time.
        let refused = error.code().is_some_and(|code| ["22", "23"].contains(&code.code().get(..2).unwrap_or_default()));
        if refused { Error::Refused(told(&error)) } else { Error::Gone(told(&error)) }
    }
}

/// What an error says, with what caused it.
fn told(error: &tokio_postgres::Error) -> String {
    match error.as_db_error() {
        Some(said) => format!("{} (SQLSTATE {})", said.message(), said.code().code()),
        None => crate::reach::cause(error),
    }
}

/// What a part needs of its database.
#[derive(Clone)]
pub struct Setup {
    /// Its name, in the table of versions and in `antiphon_database_up`.
    pub part: &'static str,
    /// What makes its tables: one step for each version, never changed once it was released.
    pub steps: &'static [&'static str],
    /// Whether its health is shown: of a part's links one speaks for all.
    pub shown: bool,
    /// The channel of `NOTIFY` that wakes it.
    pub listen: Option<&'static str>,
    /// What is woken: by `NOTIFY`, by a new connection (what was said before it was missed), and by the loss of one.
    pub woken: Arc<Notify>,
    /// Another channel, of which what is said matters, too.
    pub feed: Option<Feed>,
}

/// A channel of `NOTIFY` whose messages are passed on.
#[derive(Clone)]
pub struct Feed {
    /// Its name.
    pub channel: &'static str,
    /// Told each message; `None`: the connection is new, and what was said before it was missed. Must not block.
    pub told: Arc<Told>,
}

/// What is done with a message.
pub type Told = dyn Fn(Option<&str>) + Send + Sync;

/// Whether a database can be used, for people.
#[derive(Debug)]
pub struct Health {
    part: &'static str,
    shown: bool,
    /// Why not; the outer `None`: not tried yet.
    fault: Mutex<Option<Option<String>>>,
}

impl Health {
    /// Why it cannot be used, as far as is known.
    pub fn fault(&self) -> Option<String> {
        self.fault.lock().unwrap_or_else(PoisonError::into_inner).clone().flatten()
    }

    /// It can be used, or not.
    pub fn set(&self, fault: Option<String>) {
        let mut known = self.fault.lock().unwrap_or_else(PoisonError::into_inner);
        let was_up = matches!(*known, Some(None));
        match &fault {
            _ if !self.shown => {}
            Some(reason) if !matches!(&*known, Some(Some(_))) => {
                tracing::error!(part = self.part, reason, "the database cannot be used; calls go on");
            }
            None if !was_up => tracing::info!(part = self.part, "the database can be used"),
            _ => {}
        }
        if self.shown {
            metrics::gauge!("antiphon_database_up", "part" => self.part).set(f64::from(u8::from(fault.is_none())));
        }
        *known = Some(fault);
    }
}

/// A connection. Its methods block.
pub struct Link {
    target: Target,
    setup: Setup,
    health: Arc<Health>,
    /// Of the socket. `None` only while this is dropped.
    runtime: Option<Runtime>,
    open: Option<Open>,
    /// Nothing is tried before then.
    rests: Option<Instant>,
}

struct Open {
    client: Client,
    driver: AbortHandle,
}

impl Drop for Open {
    fn drop(&mut self) {
        // A server that is silent would keep it for ever.
        self.driver.abort();
    }
}

impl Link {
    /// A link that connects when it is first used.
    ///
    /// # Errors
    /// The address cannot be used as it is, or there is no thread.
    pub fn new(address: &Address, setup: Setup) -> Result<Self, Error> {
        let mut target = address.target().map_err(Error::Unusable)?;
        target.config.application_name(format!("antiphon {}", setup.part));
        target.config.connect_timeout(CONNECT / 2).keepalives_idle(KEEPALIVE).tcp_user_timeout(KEEPALIVE);
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .thread_name(format!("pg-{}", setup.part))
            .enable_all()
            .build()
            .map_err(|error| Error::Gone(error.to_string()))?;
        let health = Arc::new(Health { part: setup.part, shown: setup.shown, fault: Mutex::default() });
        Ok(Self { target, setup, health, runtime: Some(runtime), open: None, rests: None })
    }

    /// Whether the database can be used.
    pub fn health(&self) -> &Arc<Health> {
        &self.health
    }

    /// Does `work` on the connection, made anew if need be.
    ///
    /// # Errors
    /// See [`Error`].
    pub fn run<T>(&mut self, work: impl AsyncFnOnce(&mut Client) -> Result<T, Error>) -> Result<T, Error> {
        let now = clock::now();
        if self.rests.is_some_and(|until| now < until) {
            return Err(Error::Gone(self.health.fault().unwrap_or_else(|| "the last request failed".into())));
        }
        self.rests = None;
        let outcome = self.connected().and_then(|client| {
            wait(ANSWER, work(client))
                .unwrap_or_else(|| Err(Error::Gone(format!("no answer within {} s", ANSWER.as_secs()))))
        });
        match &outcome {
            Ok(_) => {}
            // The next request may be a right one.
            Err(Error::Refused(_)) => {}
            Err(error @ (Error::Gone(_) | Error::Unusable(_))) => {
                self.open = None;
                self.rests = Some(now + REST);
                let reason = match error {
                    Error::Gone(reason) => reason.clone(),
                    other => other.to_string(),
                };
                self.health.set(Some(reason));
            }
        }
        outcome
    }

    fn connected(&mut self) -> Result<&mut Client, Error> {
        let closed = self.open.as_ref().is_none_or(|open| open.client.is_closed());
        if closed {
            self.open = None;
            let (done, made) = sync_channel(1);
            let (target, setup, health) = (self.target.clone(), self.setup.clone(), self.health.clone());
            if let Some(runtime) = &self.runtime {
                runtime.spawn(async move {
                    // overflow: it has room for the one answer; where it is closed, the asker has gone
                    let _ = done.try_send(connect(&target, &setup, &health).await);
                });
            }
            let made = made.recv_timeout(CONNECT);
            let late = |_| Err(Error::Gone(format!("no connection within {} s", CONNECT.as_secs())));
            let made = made.unwrap_or_else(late).map_err(|error| match error {
                // Who is not let in may be later; nothing can be asked until then.
                Error::Refused(reason) => Error::Gone(reason),
                other => other,
            });
            self.open = Some(made?);
            self.health.set(None);
        }
        match &mut self.open {
            Some(open) => Ok(&mut open.client),
            None => Err(Error::Gone("no connection".into())),
        }
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        self.open = None;
        if let Some(runtime) = self.runtime.take() {
            // Waiting for it is forbidden where this may be dropped.
            runtime.shutdown_background();
        }
    }
}

/// A connection with its tables brought up to date.
async fn connect(target: &Target, setup: &Setup, health: &Arc<Health>) -> Result<Open, Error> {
    let mut open = match &target.tls {
        None => driven(target.config.connect(NoTls).await?, setup, health),
        Some(tls) => driven(target.config.connect(Tls(tls.clone())).await?, setup, health),
    };
    open.client.batch_execute(SESSION).await?;
    bring_up_to_date(&mut open.client, setup).await?;
    if let Some(channel) = setup.listen {
        open.client.batch_execute(&format!("LISTEN {channel}")).await?;
        setup.woken.notify_one();
    }
    if let Some(feed) = &setup.feed {
        open.client.batch_execute(&format!("LISTEN {}", feed.channel)).await?;
        (feed.told)(None);
    }
    Ok(open)
}

fn driven<S, T>((client, mut connection): (Client, Connection<S, T>), setup: &Setup, health: &Arc<Health>) -> Open
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    T: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let (woken, feed, health) = (setup.woken.clone(), setup.feed.clone(), health.clone());
    let driver = tokio::spawn(async move {
        loop {
            match poll_fn(|context| connection.poll_message(context)).await {
                Some(Ok(AsyncMessage::Notification(said))) => match &feed {
                    Some(feed) if said.channel() == feed.channel => (feed.told)(Some(said.payload())),
                    _ => woken.notify_one(),
                },
                Some(Ok(_)) => {}
                Some(Err(error)) => {
                    health.set(Some(told(&error)));
                    break;
                }
                None => break,
            }
        }
        woken.notify_one();
    });
    Open { client, driver: driver.abort_handle() }
}

/// Makes and changes the tables of a part, one gateway at a time and each change once.
async fn bring_up_to_date(client: &mut Client, setup: &Setup) -> Result<(), Error> {
    let known = setup.steps.len() as i32;
    let transaction = client.transaction().await?;
    transaction.execute("SELECT pg_advisory_xact_lock($1)", &[&CHANGING]).await?;
    let there = |what: &str| format!("SELECT {what} IS NOT NULL");
    let has: bool = transaction.query_one(&there("to_regnamespace('antiphon')"), &[]).await?.get(0);
    if !has {
        // Needs a right on the database that a gateway need not have once the schema is there.
        transaction.batch_execute("CREATE SCHEMA antiphon").await?;
    }
    let has: bool = transaction.query_one(&there("to_regclass('antiphon.version')"), &[]).await?.get(0);
    if !has {
        let table = "CREATE TABLE antiphon.version (part text PRIMARY KEY, version integer NOT NULL)";
        transaction.batch_execute(table).await?;
    }
    let query = "SELECT version FROM antiphon.version WHERE part = $1";
    let found = transaction.query_opt(query, &[&setup.part]).await?.map_or(0, |row| row.get::<_, i32>(0));
    if found > known {
        return Err(Error::Unusable(format!(
            "the tables of {} are of version {found}, this program knows {known}: use the newer program",
            setup.part
        )));
    }
    for step in setup.steps.iter().skip(found.max(0) as usize) {
        transaction.batch_execute(step).await?;
    }
    if found < known {
        let query = "INSERT INTO antiphon.version (part, version) VALUES ($1, $2)
                     ON CONFLICT (part) DO UPDATE SET version = $2";
        transaction.execute(query, &[&setup.part, &known]).await?;
    }
    Ok(transaction.commit().await?)
}

struct Parked(Thread);

impl Wake for Parked {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

/// Parks the thread until `future` is ready; `None`: it was not within `limit`, and is dropped.
fn wait<T>(limit: Duration, future: impl Future<Output = T>) -> Option<T> {
    let mut future = pin!(future);
    let waker = Waker::from(Arc::new(Parked(std::thread::current())));
    let mut context = Context::from_waker(&waker);
    let deadline = clock::now() + limit;
    loop {
        if let Poll::Ready(value) = future.as_mut().poll(&mut context) {
            return Some(value);
        }
        let left = deadline.saturating_duration_since(clock::now());
        if left.is_zero() {
            return None;
        }
        // Woken for another reason, it looks again.
        std::thread::park_timeout(left);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::secret::Secret;

    #[tokio::test]
    async fn a_request_is_waited_for_inside_another_runtime_and_not_for_ever() {
        let (told, heard) = tokio::sync::oneshot::channel();
        let thread = std::thread::spawn(move || {
            std::thread::park_timeout(Duration::from_millis(10));
            told.send(7)
        });
        assert_eq!(wait(Duration::from_secs(60), heard), Some(Ok(7)));
        thread.join().expect("no panic").expect("heard");
        assert_eq!(wait(Duration::from_millis(1), std::future::pending::<()>()), None);
    }

    #[tokio::test]
    async fn a_database_that_is_not_there_is_told_of_and_asked_again_after_a_rest() {
        let folder = tempfile::tempdir().expect("a folder");
        let url = format!("postgres://nobody@/none?host={}", folder.path().display());
        let address = Address::new(Secret::new(url)).expect("an address");
        let setup = Setup { part: "test", steps: &[], shown: false, listen: None, woken: Arc::default(), feed: None };
        let mut link = Link::new(&address, setup).expect("a link");
        assert_eq!(link.health().fault(), None, "not tried yet");
        let asked = link.run(async |_| Ok(()));
        assert!(matches!(asked, Err(Error::Gone(_))), "{asked:?}");
        assert!(link.health().fault().is_some());
        link.rests = Some(clock::now() + Duration::from_secs(60));
        assert!(matches!(link.run(async |_| Ok(())), Err(Error::Gone(_))), "at once");
    }
}
