//! The SIP endpoint on loopback sockets: against a telephone that says exactly what a test tells it to, against
//! another endpoint of ours, and against sipp, baresip, linphone and Kamailio.

mod baresip;
#[allow(dead_code, reason = "the gateway's tests use the rest")]
#[path = "../gateway/counted.rs"]
mod counted;
mod early;
mod flood;
mod half_open;
mod kamailio;
mod linphone;
mod loopback;
mod media;
mod scenarios;
mod sipp;
mod streams;
mod support;
mod telephones;
mod toll;
mod torture;
mod trunks;
mod websocket;
mod wire;
