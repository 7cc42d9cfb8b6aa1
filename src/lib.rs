//! Antiphon: a real-time media gateway that gives text agents a voice on live phone and browser calls.
//!
//! Text goes in at one end and packets come out at the other; nothing on the way asks a question back.
//! Modules, in reading order; each may use only those above it:
//!
//! - [`clock`], [`audio`], [`secret`]: time, units of sound, values that never show in logs;
//!   [`audio_file`]: files and downloads of sound; [`socket`]: WebSockets that the gateway opens;
//!   [`postgres`]: a database that gateways share; [`webhook`]: signed requests to servers of others
//! - [`turn`]: the vocabulary of speech work
//! - [`sched`]: what the device runs next; decides, never computes
//! - [`synth`]: voices; compute, never decide
//! - [`voice`]: voice files and enrolment
//! - [`media`]: packets, codecs, pacing and legs
//! - [`hear`]: recognisers and turn taking
//! - [`sip`], [`webrtc`]: the two kinds of session
//! - [`cluster`]: the other gateways behind the same number
//! - [`agent`]: who supplies the text
//! - [`call`]: one call, from leg to agent
//! - [`batch`]: durable work that no listener waits for; [`records`]: what happened on each call; [`recording`]: its sound
//! - [`gateway`]: the parts as one; every call is set up here
//! - [`server`]: HTTP and WebSocket
//! - [`config`], [`telemetry`]
//! - [`app`], [`cli`]: the parts put together, and the command line

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
pub mod media;
pub mod node;
pub mod pem;
pub mod postgres;
pub mod reach;
pub mod recording;
pub mod records;
pub mod sched;
pub mod secret;
pub mod server;
pub mod sip;
pub mod socket;
pub mod synth;
pub mod telemetry;
pub mod text;
pub mod turn;
pub mod voice;
pub mod webhook;
pub mod webrtc;
