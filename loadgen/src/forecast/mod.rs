//! What follows from the figures: queueing formulas, the predicted knee, users to gateways, their price, and what others
//! published.

pub mod beside;
pub mod cost;
pub mod erlang;
pub mod predict;
pub mod size;
