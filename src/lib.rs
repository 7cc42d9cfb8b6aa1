//! Antiphon: a real-time media gateway that gives text agents a voice on live phone and browser calls.
//!
//! Text goes in at one end and packets come out at the other; nothing on the way asks a question back.
//! Modules, lower layers first; each names only those of lower layers (`tests/rules/layers.rs` holds the order, and that all
//! are named here):
//!
//! - [`file`]: files that are there whole or not at all; [`weights_file`]: those of weights, which are not mapped
//! - [`clock`], [`audio`], [`secret`]: time, units of sound, values that never show in logs; [`seats`]: limits that may change; [`node`]: ids that carry a
//!   machine; [`reach`]: which addresses a peer may name; [`host`]: hosts as operators write them; [`pem`]: certificates and
//!   keys from files; [`fault`]: panics for
//!   tests; [`supervise`]: parts that are started again after one
//! - [`turn`]: the vocabulary of speech work; [`audio_file`]: files and downloads of sound; [`socket`]: WebSockets that the
//!   gateway opens; [`certificate`]: the one of a listener, and its changes; [`handover`]: sockets that come from another
//!   process; [`sqlite`]: databases that are damaged; [`telemetry`]: metrics, logs, traces
//! - [`text`]: how a text is said; [`sched`]: what the device runs next: it decides and never computes; [`voice`]: voice files
//!   and enrolment; [`postgres`]: a database that gateways share; [`webhook`]: signed requests to servers of others;
//!   [`acme`]: certificates from an authority
//! - [`synth`]: voices: they compute and never decide; [`media`]: packets, codecs, pacing and legs
//! - [`hear`]: recognisers and turn taking; [`sip`], [`webrtc`]: the two kinds of session; [`cluster`]: the other gateways
//!   behind the same number
//! - [`call`]: one call, from leg to agent
//! - [`agent`]: who supplies the text; [`batch`]: durable work that no listener waits for; [`records`]: what happened on each
//!   call; [`recording`]: its sound
//! - [`gateway`]: the parts as one; every call is set up here
//! - [`server`]: HTTP and WebSocket
//! - [`config`]: every key, from files and the environment
//! - [`app`]: the parts put together, started and drained
//! - [`cli`]: the command line

pub mod acme;
pub mod agent;
pub mod app;
pub mod audio;
pub mod audio_file;
pub mod batch;
pub mod call;
pub mod certificate;
pub mod cli;
pub mod clock;
pub mod cluster;
pub mod config;
pub mod fault;
pub mod file;
pub mod gateway;
pub mod handover;
pub mod hear;
pub mod host;
pub mod media;
pub mod node;
pub mod pem;
pub mod postgres;
pub mod reach;
pub mod recording;
pub mod records;
pub mod sched;
pub mod seats;
pub mod secret;
pub mod server;
pub mod sip;
pub mod socket;
pub mod sqlite;
pub mod supervise;
pub mod synth;
pub mod telemetry;
pub mod text;
pub mod turn;
pub mod voice;
pub mod webhook;
pub mod webrtc;
pub mod weights_file;
