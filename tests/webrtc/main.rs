//! Browser calls over real ICE, DTLS, SRTP and SCTP on loopback: our peer, aiortc, Chromium, and hostile ones.

mod calls;
mod hostile;
mod interop;
mod loss;
mod lossy;
mod moving;
mod relayed;
mod succession;
mod support;
mod whip;
