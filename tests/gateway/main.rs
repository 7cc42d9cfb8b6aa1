//! The whole gateway on loopback, called by the synthetic telephone and browser of the load generator.

mod agents;
mod api;
mod calls;
mod cancel;
mod hostile;
mod interop;
mod speech;
mod stand_in;
mod support;
mod watched;
