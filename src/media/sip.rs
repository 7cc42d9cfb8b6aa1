//! x
use super::leg::{LegEnd, LegEvent, MediaFormat, MediaLeg, OutPacket};

/// The media side of a SIP call: RTP and RTCP over UDP.
pub struct SipLeg {
    format: MediaFormat,
}

impl MediaLeg for SipLeg {
    fn kind(&self) -> &'static str {
        "sip"
    }

    fn format(&self) -> &MediaFormat {
        &self.format
    }

    async fn attach(&mut self) -> std::io::Result<()> {
        Ok(())
    }

    async fn send(&mut self, _packet: OutPacket) -> Result<(), LegEnd> {
        Err(LegEnd::Failed)
    }

    fn send_message(&mut self, _text: &str) -> bool {
        false
    }

    async fn recv(&mut self) -> LegEvent {
        LegEvent::Closed(LegEnd::Failed)
    }

    async fn hang_up(&mut self) {}

    async fn hold(&mut self, _hold: bool) -> Result<(), String> {
        Err("not up".into())
    }

    async fn transfer(&mut self, _to: &str, _attended: bool) -> Result<(), String> {
        Err("not up".into())
    }
}
