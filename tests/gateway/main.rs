//! The whole gateway on loopback, called by the synthetic telephone and browser of the load generator.

mod agents;
mod calls;
mod hostile;
mod interop;
mod speech;
mod support;
