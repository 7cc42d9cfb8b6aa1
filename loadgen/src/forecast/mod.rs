//! What follows from the figures: queueing formulas, the predicted knee, users to gateways, and their price.

pub mod cost;
pub mod erlang;
pub mod predict;
pub mod size;
