//! The whole gateway on loopback, called by the synthetic telephone and browser of the load generator.

mod acme;
mod agents;
mod api;
mod attacked;
mod bridges;
mod browser;
mod browsers;
mod calls;
mod cancel;
mod chromium;
mod client;
mod commands;
mod configuration;
mod console;
mod converted;
#[allow(dead_code, reason = "the tests of the WebRTC leg use the rest")]
#[path = "../webrtc/coturn.rs"]
mod coturn;
mod counted;
mod database;
mod doors;
mod drains;
mod fallback;
mod faults;
mod firefox;
mod fronts;
mod full_disk;
mod handover;
mod heard;
mod hears;
mod hostile;
mod idle;
mod interop;
mod keyboard;
mod killed;
mod kills;
mod late;
mod llm;
mod loadgen;
mod metrics;
mod mouth_to_ear;
mod moving;
mod newcomer;
mod nodes;
mod packaging;
mod pages;
mod partitions;
mod phrases;
mod pipecat;
mod program;
mod provoked;
#[allow(dead_code, reason = "shared with the tests of the SIP endpoint, which use the rest")]
#[path = "../sip/support/raw.rs"]
mod raw;
mod relayed;
mod reloads;
mod ringing;
mod setups;
mod signals;
mod soak;
mod speech;
mod state;
mod streams;
mod supervised;
mod support;
mod tour;
mod traces;
mod voice;
mod voices;
mod watch;
mod watched;
mod whip;
mod workers;

/// How long the raw telephone waits for a message.
const LIMIT: std::time::Duration = support::PATIENCE;
