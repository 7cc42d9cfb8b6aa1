//! What the session task of [`crate::sip`] and a leg say to each other.

use std::{sync::Arc, time::Duration};

use sdp::Agreed;
use tokio::sync::mpsc;

use super::{SipLeg, dtls::Identity, latch::Peer, ports::PortPair};
use crate::media::leg::{LegEnd, PeerCause};

/// From the session task to the leg.
#[derive(Debug)]
pub(crate) enum Signal {
    /// The ACK is here, or ours has left.
    Connected,
    /// Another description was agreed to.
    Media(Box<Agreed>),
    /// Another call takes this one's place: its leg, which signals for itself from then on, and with whom it is.
    Moved(Box<SipLeg>, String),
    /// A digit by INFO.
    Digit(char),
    /// The end of [`Control::Hold`].
    HoldAnswered(bool, Result<(), String>),
    /// The end of [`Control::Transfer`].
    TransferAnswered(Result<(), String>),
    /// The status by which the peer tells how far it is with a transfer.
    TransferProgress(u16),
    /// What the peer tells of a transfer it has taken on.
    TransferEnded(Result<(), String>),
    /// Why the peer ends it.
    Cause(PeerCause),
    /// The dialog is over.
    Closed(LegEnd),
}

/// From the leg to the session task.
#[derive(Debug)]
pub(crate) enum Control {
    /// BYE.
    HangUp,
    /// BYE, because nothing is heard.
    Lost,
    /// Re-INVITE with or without hold.
    Hold(bool),
    /// REFER.
    Transfer { to: String, attended: bool, limit: Option<Duration> },
    /// An INFO for each of these digits.
    Digits(String),
}

/// What a leg does before the call is answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Early {
    /// We call: what the called side sends is heard.
    Hears,
    /// And it gets silence.
    Sends,
    /// We are called: the caller is spoken to.
    Speaks,
}

/// What the session task makes a leg of.
pub(crate) struct Parts {
    pub(crate) ports: PortPair,
    pub(crate) agreed: Agreed,
    pub(crate) peer: Peer,
    pub(crate) media_timeout: Duration,
    /// What it does while the call is not answered yet.
    pub(crate) early: Option<Early>,
    /// Digits of ours go by INFO.
    pub(crate) signals_digits: bool,
    /// Name of the trunk at the other end.
    pub(crate) trunk: Option<Arc<str>>,
    /// What handshakes are made with.
    pub(crate) identity: Identity,
    pub(crate) signals: mpsc::Receiver<Signal>,
    pub(crate) controls: mpsc::Sender<Control>,
}
