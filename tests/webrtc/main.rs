//! Browser calls over real ICE, DTLS, SRTP and SCTP on loopback: our peer, aiortc, Chromium, and hostile ones.

mod calls;
#[path = "../gateway/chromium.rs"]
#[allow(dead_code, reason = "the console's tests use the rest")]
mod chromium;
mod coturn;
#[allow(dead_code, reason = "the gateway's tests use the rest")]
#[path = "../gateway/counted.rs"]
mod counted;
mod feedback;
mod hostile;
mod interop;
mod loss;
mod lossy;
mod moving;
mod neteq;
mod relayed;
mod succession;
mod support;
mod whip;
