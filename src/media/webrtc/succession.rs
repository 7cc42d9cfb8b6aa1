//! A leg that goes on by another connection of the same browser: the call notices nothing but what is agreed.
//!
//! # Why
//! An ICE restart keeps the connection and is what a browser that changes its network does. But Chromium tells a connection of a
//! new network only when nothing has changed for two seconds, while a new connection may know it at once; so a page makes
//! another, and until that has connected the old one stays in its place.

use tokio::sync::{mpsc, watch};

use super::{Progress, WebRtcLeg};
use crate::media::leg::LegEvent;

/// New connections that wait for the call's task to look at them; what comes beyond is refused.
const WAITING: usize = 2;

/// Puts the leg of a new connection in place of the one that this is of.
#[derive(Clone, Debug)]
pub struct Heir(mpsc::Sender<Box<WebRtcLeg>>);

impl Heir {
    /// Has `leg` take over once it has connected. Another one that waits for that is dropped, and its session ends.
    ///
    /// # Errors
    /// `leg` itself where the call is over or has not looked at earlier ones yet.
    pub fn put(&self, leg: WebRtcLeg) -> Result<(), Box<WebRtcLeg>> {
        // overflow: refused
        self.0.try_send(Box::new(leg)).map_err(|error| error.into_inner())
    }
}

/// What may follow a leg.
pub(super) struct Succession {
    way_in: mpsc::Sender<Box<WebRtcLeg>>,
    coming: mpsc::Receiver<Box<WebRtcLeg>>,
    next: Option<Box<WebRtcLeg>>,
}

impl Default for Succession {
    fn default() -> Self {
        let (way_in, coming) = mpsc::channel(WAITING);
        Self { way_in, coming, next: None }
    }
}

impl Succession {
    pub(super) fn heir(&self) -> Heir {
        Heir(self.way_in.clone())
    }

    /// The leg that follows, once it has connected. Cancel safe: who waits for that is kept.
    pub(super) async fn next(&mut self) -> Box<WebRtcLeg> {
        loop {
            tokio::select! {
                // This holds a sender, so there is always another to wait for.
                Some(leg) = self.coming.recv() => {
                    // Where it has ended, its progress says so.
                    let driver = leg.driver.clone();
                    tokio::spawn(async move { driver.move_here().await });
                    self.next = Some(leg);
                }
                is_connected = settled(self.next.as_mut().map(|leg| &mut leg.seen)) => {
                    if let Some(leg) = self.next.take().filter(|_| is_connected) {
                        return leg;
                    }
                }
            }
        }
    }
}

/// Whether a session connects or ends; never where there is none.
async fn settled(seen: Option<&mut watch::Receiver<Progress>>) -> bool {
    match seen {
        Some(seen) => {
            let settled = seen.wait_for(|progress| *progress != Progress::Connecting).await;
            settled.is_ok_and(|progress| *progress == Progress::Connected)
        }
        None => std::future::pending().await,
    }
}

impl WebRtcLeg {
    /// Goes on as `next`, which has connected. The session of this one ends.
    pub(super) fn succeed(&mut self, next: WebRtcLeg) {
        let mut old = std::mem::replace(self, next);
        self.asked.append(&mut old.asked);
        if self.format != old.format {
            self.asked.push_back(LegEvent::Format(self.format.clone()));
        }
        if old.rtvi.is_none() {
            for text in old.outbox.take() {
                // overflow: refused; what did not fit was waiting for a peer that read nothing.
                let _ = self.outbox.push(self.channel.as_ref(), &text);
            }
        }
        tracing::info!("a browser goes on by another connection");
    }
}
