//! Sockets that come from another process: from the gateway whose place this one takes, or from systemd.
//!
//! An upgrade under live calls goes so (who says what when: `app/handover.rs`):
//!
//! 1. The new process loads its voices, then asks the old one, over a Unix socket in the state directory, for its place.
//!    The old one parks batch work and passes duplicates of its listening sockets (SCM_RIGHTS).
//! 2. The new process starts every part on them, reads from none yet, and says so.
//! 3. The old one stops to read and to accept, and names the calls it has. From then on the new one reads and accepts.
//! 4. What reaches the new process and belongs to the old one's calls goes on to it over the same Unix connection. The old
//!    one sends by its own duplicates, so that its callers see one address throughout, and ends with its last call. Were
//!    the new process to die before, the old one reads and accepts again.
//!
//! # Why
//! *Passed, not shared by SO_REUSEPORT.* Of two sockets on one UDP port the kernel picks one by the sender's address: a
//! carrier sends everything from one, a browser's call would change its process, and connections that wait to be accepted
//! are lost with the socket that is closed. One queue of datagrams and one of connections, that one process reads at a
//! time, lose nothing: while the place changes hands, both wait in the kernel.
//!
//! *Who owns a packet.* SIP over UDP goes by Call-ID: the old process says which are its own, also later ones, as of an
//! attended transfer. For media the new process asks its own tables: a check for a fragment, an answer to a transaction or
//! a packet from an address that no session here knows goes to the old process, which asks its own in turn. Connections
//! (SIP over TCP and TLS, WebSockets, ICE over TCP) stay with the process that accepted them. Requests over HTTP for a call
//! or session that is not known here go on to the other process, in both directions (`server/handed.rs`): a client that has
//! kept a connection asks the old process for calls of the new one until that connection ends, with its next answer.
//!
//! *One stream for datagrams.* Unix datagram sockets take ten messages by default; a stream takes what its buffer holds,
//! and tells when the other side is gone.

mod fds;
mod inherit;
mod place;
mod words;

pub use self::fds::{receive, send};
pub use self::inherit::{Name, Passed, datagrams, from_systemd, listener};
pub use self::place::{Arrived, Datagram, Kind, Place};
pub use self::words::{Word, read, write};
