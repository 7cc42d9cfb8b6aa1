//! What follows from the figures: queueing formulas, the predicted knee, users to gateways.

pub mod erlang;
pub mod predict;
pub mod size;
