//! What is said to Redis every second: when, on which connection, and for how long it is waited for.

use std::time::Duration;

use redis::AsyncConnectionConfig;
use redis::aio::MultiplexedConnection;
use tokio::sync::watch;
use tokio::time::{Interval, MissedTickBehavior, interval, timeout};

use crate::secret::Secret;

/// How often it is spoken with.
const ROUND: Duration = Duration::from_secs(1);
/// Longest wait for one answer.
const ANSWER: Duration = Duration::from_secs(1);
/// Longest wait for a round: a connection, a word and a few leases.
const LIMIT: Duration = Duration::from_secs(3);

/// Redis by its address, which may hold a password: what is wrong with it is told, and not what it is. Connects to nothing yet.
///
/// # Errors
/// It is no address of a Redis.
pub(super) fn client(redis: &Secret) -> Result<redis::Client, String> {
    redis::Client::open(redis.reveal()).map_err(|error| format!("redis: {error}"))
}

/// A connection to Redis that is made when it is wanted, and anew after a round that failed.
pub(super) struct Link {
    redis: redis::Client,
    connection: Option<MultiplexedConnection>,
}

impl Link {
    /// Connects to nothing yet.
    pub(super) fn new(redis: redis::Client) -> Self {
        Self { redis, connection: None }
    }

    /// One exchange, within the time of a round.
    ///
    /// # Errors
    /// What it says, or that there is no connection or no answer; the next one has a connection of its own: what was half said on
    /// this one is not waited for.
    pub(super) async fn exchange<T, F>(
        &mut self,
        exchange: impl FnOnce(MultiplexedConnection) -> F,
    ) -> Result<T, String>
    where
        F: Future<Output = Result<T, String>>,
    {
        let whole = async {
            let connection = self.connected().await?;
            exchange(connection).await
        };
        let outcome = timeout(LIMIT, whole).await.unwrap_or_else(|_| Err("no answer".to_owned()));
        if outcome.is_err() {
            self.connection = None;
        }
        outcome
    }

    async fn connected(&mut self) -> Result<MultiplexedConnection, String> {
        if let Some(connection) = &self.connection {
            return Ok(connection.clone());
        }
        let config = AsyncConnectionConfig::new();
        let config = config.set_connection_timeout(Some(ANSWER)).set_response_timeout(Some(ANSWER));
        let made = self.redis.get_multiplexed_async_connection_with_config(&config).await;
        Ok(self.connection.insert(made.map_err(|error| error.to_string())?).clone())
    }

    /// Says `leave` where there is a connection; whether it was heard. Who ends need not be waited for; who is killed expires.
    pub(super) async fn leave(mut self, leave: &redis::Cmd) -> bool {
        let Some(connection) = &mut self.connection else { return true };
        let left: Result<Result<i64, _>, _> = timeout(ANSWER, leave.query_async(connection)).await;
        matches!(left, Ok(Ok(_)))
    }
}

/// One round a second until it is stopped, the first at once.
pub(super) struct Rounds {
    tick: Interval,
    stop: watch::Receiver<bool>,
}

impl Rounds {
    /// Until `stop` changes, or its sender is gone: the application was dropped without being drained.
    pub(super) fn new(stop: watch::Receiver<bool>) -> Self {
        let mut tick = interval(ROUND);
        tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
        Self { tick, stop }
    }

    /// Waits for the next one; `false`: there is none.
    pub(super) async fn next(&mut self) -> bool {
        tokio::select! {
            _ = self.stop.changed() => false,
            _ = self.tick.tick() => true,
        }
    }
}

pub(super) fn millis(duration: Duration) -> u64 {
    duration.as_millis() as u64
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    use tokio::net::TcpListener;

    use super::*;

    #[tokio::test]
    async fn the_first_round_is_at_once_and_none_follows_the_stop() {
        let (stop, stopped) = watch::channel(false);
        let begun = tokio::time::Instant::now();
        let mut rounds = Rounds::new(stopped.clone());
        assert!(rounds.next().await);
        assert!(rounds.next().await && begun.elapsed() >= ROUND);
        stop.send_replace(true);
        assert!(!rounds.next().await);
        let mut dropped = Rounds::new(stopped);
        drop(stop);
        while dropped.next().await {}
    }

    #[tokio::test]
    async fn a_connection_is_kept_until_an_exchange_fails() {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let address = listener.local_addr().expect("bound");
        let accepted = Arc::new(AtomicUsize::new(0));
        let counted = accepted.clone();
        tokio::spawn(async move {
            while let Ok((mut stream, _)) = listener.accept().await {
                counted.fetch_add(1, Ordering::SeqCst);
                tokio::spawn(async move {
                    let mut buffer = [0; 1_024];
                    // Says yes to each command of the greeting, of which a connection sends two.
                    while let Ok(1..) = stream.read(&mut buffer).await {
                        let _ = stream.write_all(b"+OK\r\n+OK\r\n").await;
                    }
                });
            }
        });
        let mut link = Link::new(client(&Secret::new(format!("redis://{address}"))).expect("an address"));
        for _ in 0..2 {
            assert_eq!(link.exchange(async |_| Ok::<_, String>(7)).await, Ok(7));
        }
        assert_eq!(accepted.load(Ordering::SeqCst), 1);
        assert_eq!(link.exchange(async |_| Err::<(), _>("refused".to_owned())).await, Err("refused".to_owned()));
        assert!(link.exchange(async |_| Ok(())).await.is_ok());
        assert_eq!(accepted.load(Ordering::SeqCst), 2);
    }

    #[tokio::test]
    async fn an_address_with_a_password_is_not_shown() {
        let wrong = client(&Secret::new("http://u:hidden@10.0.0.1")).expect_err("no Redis");
        assert!(wrong.starts_with("redis: ") && !wrong.contains("hidden"), "{wrong}");
    }
}
