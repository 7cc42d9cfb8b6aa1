//! Text of the peer (the data channel) on its way to the agent: bounded, in order, and never lost in silence.
//!
//! # Why
//! A browser that is its own agent writes what is to be said. Events are broadcast and a listener that falls behind
//! loses the oldest, which is right for monitoring and wrong for text. So text has a queue of its own with one
//! reader. The reader stops reading while the call holds as much text as it may; a message that finds the queue full
//! is refused, and the reader learns how many were, so that the peer can be told.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use tokio::sync::mpsc;

/// Messages that may wait for the agent. The data channel takes at most 64 kB each.
pub const MESSAGES: usize = 64;

/// One thing that the reader gets.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PeerMessage {
    /// A message, as it came.
    Text(String),
    /// So many messages were refused since this was last told, because [`MESSAGES`] waited.
    Refused(u64),
}

/// The call's side.
#[derive(Debug)]
pub(super) struct Sender {
    queue: mpsc::Sender<String>,
    refused: Arc<AtomicU64>,
}

/// The agent's side.
#[derive(Debug)]
pub struct Messages {
    queue: mpsc::Receiver<String>,
    refused: Arc<AtomicU64>,
}

pub(super) fn channel() -> (Sender, Messages) {
    let (to, from) = mpsc::channel(MESSAGES);
    let refused = Arc::new(AtomicU64::new(0));
    (Sender { queue: to, refused: refused.clone() }, Messages { queue: from, refused })
}

impl Sender {
    /// Hands a message over, or counts it as refused.
    pub(super) fn deliver(&self, text: String) {
        // overflow: refused and counted; the reader tells the peer
        if let Err(mpsc::error::TrySendError::Full(_)) = self.queue.try_send(text) {
            self.refused.fetch_add(1, Relaxed);
        }
    }
}

impl Messages {
    /// The next message; `None` when the call is over and everything was read. Cancel safe.
    pub async fn recv(&mut self) -> Option<PeerMessage> {
        // Messages are refused only while others wait, so that the reader passes here again.
        match self.refused.swap(0, Relaxed) {
            0 => self.queue.recv().await.map(PeerMessage::Text),
            refused => Some(PeerMessage::Refused(refused)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn every_message_is_read_in_order_or_counted_as_refused() {
        let (sender, mut messages) = channel();
        let sent = 1_000;
        for n in 0..sent {
            sender.deliver(n.to_string());
        }
        drop(sender);
        let (mut read, mut refused) = (Vec::new(), 0);
        while let Some(message) = messages.recv().await {
            match message {
                PeerMessage::Text(text) => read.push(text),
                PeerMessage::Refused(count) => refused += count,
            }
        }
        let expected: Vec<String> = (0..MESSAGES).map(|n| n.to_string()).collect();
        assert_eq!(read, expected);
        assert_eq!(read.len() as u64 + refused, sent);
    }
}
