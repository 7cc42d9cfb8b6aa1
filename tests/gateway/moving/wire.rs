//! What passes on the links of the network namespace that this process is in, as anybody there may see it: handshakes of DTLS and
//! the numbers of streams (SSRCs), which no encryption hides.

use std::collections::BTreeSet;
use std::io::Read;
use std::net::Ipv4Addr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

use socket2::{Domain, Protocol, Socket, Type};

/// Every protocol (`ETH_P_ALL`), as the kernel wants it.
const ALL: u16 = 3_u16.to_be();
const UDP: u8 = 17;

/// What was seen since the beginning.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Seen {
    /// Datagrams of a handshake, of either side.
    pub(super) handshake: usize,
    /// Streams of sound to the gateway and from it.
    pub(super) there: BTreeSet<u32>,
    pub(super) back: BTreeSet<u32>,
    /// Addresses of the client that sound came from.
    pub(super) clients: BTreeSet<Ipv4Addr>,
}

impl Seen {
    /// Takes a packet from its IP header on.
    fn take(&mut self, packet: &[u8], gateway: Ipv4Addr) -> Option<()> {
        let [first, _, _, _, _, _, _, _, _, protocol, ..] = *packet else { return None };
        if first >> 4 != 4 || protocol != UDP {
            return None;
        }
        let address = |at: usize| Some(Ipv4Addr::from(*packet.get(at..)?.first_chunk::<4>()?));
        let (from, to) = (address(12)?, address(16)?);
        if from != gateway && to != gateway {
            return None;
        }
        let datagram = packet.get(usize::from(first & 0x0f) * 4 + 8..)?;
        match *datagram {
            // ChangeCipherSpec and handshake messages, encrypted or not.
            [20 | 22, ..] => self.handshake += 1,
            // RTCP has the second octet of RTP with a marker for itself (RFC 5761).
            [128..=191, kind, _, _, _, _, _, _, a, b, c, d, ..] if !(192..=223).contains(&kind) => {
                let ssrc = u32::from_be_bytes([a, b, c, d]);
                if to == gateway {
                    self.there.insert(ssrc);
                    self.clients.insert(from);
                } else {
                    self.back.insert(ssrc);
                }
            }
            _ => {}
        }
        Some(())
    }
}

/// Looks on until it is dropped.
pub(super) struct Wire {
    seen: Arc<Mutex<Seen>>,
    over: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Wire {
    pub(super) fn tap(gateway: &str) -> Wire {
        let gateway = gateway.parse().expect("an address");
        let socket = Socket::new(Domain::PACKET, Type::DGRAM, Some(Protocol::from(i32::from(ALL))));
        let socket = socket.expect("who may make namespaces may look on");
        socket.set_read_timeout(Some(Duration::from_millis(50))).expect("set");
        let (seen, over) = (Arc::<Mutex<Seen>>::default(), Arc::<AtomicBool>::default());
        let (shared, until) = (seen.clone(), over.clone());
        let thread = std::thread::spawn(move || {
            let mut packet = vec![0; 1 << 16];
            while !until.load(Ordering::Relaxed) {
                // Nothing came, or a link went down.
                let Ok(length) = (&socket).read(&mut packet) else { continue };
                shared.lock().expect("no panic").take(&packet[..length], gateway);
            }
        });
        Wire { seen, over, thread: Some(thread) }
    }

    pub(super) fn seen(&self) -> Seen {
        self.seen.lock().expect("no panic").clone()
    }
}

impl Drop for Wire {
    fn drop(&mut self) {
        self.over.store(true, Ordering::Relaxed);
        let _ = self.thread.take().map(JoinHandle::join);
    }
}
