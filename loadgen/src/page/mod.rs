//! The report as a page.

pub mod chart;
pub mod html;
