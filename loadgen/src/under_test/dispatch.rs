//! Gives each call the agent session that the gateway opened for it.

use std::net::SocketAddr;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use tokio::sync::watch;
use tokio_util::task::AbortOnDropHandle;

use crate::caller::call::CallError;
use crate::clock;
use crate::under_test::agent::{Server, Session};

/// Sessions that no call has asked for yet.
pub struct Dispatch {
    url: String,
    shared: std::sync::Arc<Shared>,
    _accepting: AbortOnDropHandle<()>,
}

struct Shared {
    waiting: Mutex<Vec<Session>>,
    count: watch::Sender<u64>,
}

/// Sessions kept that no call asks for.
const STRAYS: usize = 1_024;

impl Dispatch {
    /// Serves agents on `address`.
    ///
    /// # Errors
    /// The address is taken or not there.
    pub async fn bind(address: SocketAddr) -> Result<Dispatch, CallError> {
        let mut server = Server::bind(address).await?;
        let url = server.url();
        let shared = std::sync::Arc::new(Shared { waiting: Mutex::default(), count: watch::Sender::new(0) });
        let into = shared.clone();
        let accepting = AbortOnDropHandle::new(tokio::spawn(async move {
            loop {
                let Some(session) = server.next_session(Duration::from_secs(3600)).await else { continue };
                let mut waiting = into.waiting.lock().unwrap_or_else(PoisonError::into_inner);
                if waiting.len() >= STRAYS {
                    // overflow: drops the oldest; its call has ended or never was ours.
                    waiting.remove(0);
                }
                waiting.push(session);
                drop(waiting);
                into.count.send_modify(|n| *n += 1);
            }
        }));
        Ok(Dispatch { url, shared, _accepting: accepting })
    }

    /// Where the gateway is to dial.
    pub fn url(&self) -> &str {
        &self.url
    }

    /// The session whose `setup` mentions one of `names`; `None` when none comes within `within`.
    pub async fn session(&self, names: &[String], within: Duration) -> Option<Session> {
        let deadline = clock::now() + within;
        loop {
            let mut count = self.shared.count.subscribe();
            count.borrow_and_update();
            {
                let mut waiting = self.shared.waiting.lock().unwrap_or_else(PoisonError::into_inner);
                let mine = waiting.iter().position(|s| {
                    let setup = s.setup().to_string();
                    names.iter().any(|n| !n.is_empty() && setup.contains(n.as_str()))
                });
                if let Some(n) = mine {
                    return Some(waiting.remove(n));
                }
            }
            tokio::select! {
                // The sender lives in `self`.
                _ = count.changed() => {}
                () = clock::sleep_until(deadline) => return None,
            }
        }
    }
}
