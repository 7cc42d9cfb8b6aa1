//! What a caller says and does: a telephone, a browser, and the network between it and the gateway.

pub mod call;
pub mod relay;
pub mod rtc;
pub mod sip;
pub mod speak;
