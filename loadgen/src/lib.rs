//! Synthetic callers that listen: real SIP/RTP and WebRTC endpoints, and what can be said of what they heard.
//!
//! Folders, lower layers first; a folder uses only those above it in this list (`tests/rules/layers.rs`). Users of the
//! crate name the modules from its root:
//!
//! - `clock.rs`: time
//! - `wire/`: [`codec`], [`rtp`], [`dtmf`] and the [`http`] client: sound and packets on the wire
//! - `sound/`: what arrived and when ([`heard`], shared by [`ear`]), what that means to a listener ([`listen`],
//!   [`mod@correlate`]), and recordings, read and made ([`wav`], [`synthetic`])
//! - `caller/`: what a caller says and does on either kind of call ([`speak`], [`call`]), a bad network ([`relay`]), a
//!   telephone ([`sip`]) and a browser ([`mod@rtc`])
//! - `under_test/`: the gateway as its HTTP interface and its process show it ([`gateway`], [`process`], [`stages`]), and an agent
//!   server for a gateway that dials one ([`agent`], [`dispatch`]), and who says which words were heard ([`recognizer`])
//! - `turns/`: what is spoken ([`corpus`], [`sentences`]), one call with its turns ([`exchange`]), whether it passed
//!   ([`judge`]), what a recogniser got wrong ([`words`]), and the figures of it ([`stats`])
//! - `run/`: from words to a test ([`prepare`], [`scenario`]), many calls ([`load`], [`snapshot`]), how far a gateway
//!   goes ([`ladder`]), how well it hears ([`dictation`]), and the [`report`]
//! - `attack/`: [`attack`]s beside calls that speak
//! - `forecast/`: what follows from the figures ([`erlang`], [`predict`], [`size`], [`mod@cost`]), also [`beside`] what
//!   was published
//! - `page/`: how it is shown ([`chart`], [`html`])

pub mod attack;
pub mod clock;

mod caller;
mod forecast;
mod page;
mod run;
mod sound;
mod turns;
mod under_test;
mod wire;

pub use caller::{call, relay, rtc, sip, speak};
pub use forecast::{beside, cost, erlang, predict, size};
pub use page::{chart, html};
pub use run::{dictation, ladder, load, prepare, report, scenario, snapshot};
pub use sound::{correlate, ear, heard, listen, synthetic, wav};
pub use turns::{corpus, exchange, judge, sentences, stats, words};
pub use under_test::{agent, dispatch, gateway, process, recognizer, stages};
pub use wire::{codec, dtmf, http, rtp};
