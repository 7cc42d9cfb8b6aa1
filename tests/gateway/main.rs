//! The whole gateway on loopback, called by the synthetic telephone and browser of the load generator.

mod agents;
mod api;
mod calls;
mod hostile;
mod interop;
mod loadgen;
mod speech;
mod support;
mod voices;
