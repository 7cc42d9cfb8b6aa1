//! What was heard of a turn, in place: where packets were lost there is as much silence as they carried.

use std::ops::Range;
use std::time::Instant;

use super::{Clip, Heard, Packet};
use crate::wire::codec::from_i16;

/// Sound in which everything stands where the sender put it.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Spoken {
    /// The sound, silent where packets were lost.
    pub clip: Clip,
    /// Samples of which nothing is known: those that were lost, and of codecs that predict, the packet behind them, which
    /// a decoder makes less of without them.
    pub lost: Vec<Range<usize>>,
}

impl From<Clip> for Spoken {
    fn from(clip: Clip) -> Self {
        Spoken { clip, lost: Vec::new() }
    }
}

impl Spoken {
    /// Of how many samples nothing is known.
    pub fn samples_lost(&self) -> usize {
        self.lost.iter().map(Range::len).sum()
    }

    /// Whether any of `samples` is among them.
    pub fn is_lost(&self, samples: &Range<usize>) -> bool {
        self.lost.iter().any(|lost| lost.start < samples.end && samples.start < lost.end)
    }
}

impl Heard {
    /// The sound that arrived within `from..to`, packet behind packet, with silence where packets between them were lost.
    ///
    /// # Why
    /// A packet that is merely left out moves everything behind it by 20 ms. After two or three of them loudness over
    /// time no longer matches that of the same words.
    pub fn spoken_between(&self, from: Instant, to: Instant) -> Spoken {
        let mut spoken = Spoken { clip: Clip { rate: self.rate, pcm: Vec::new() }, lost: Vec::new() };
        let pcm = &mut spoken.clip.pcm;
        let mut last: Option<&Packet> = None;
        for packet in self.packets_between(from, to) {
            let lost = last.map_or(0, |last| self.lost_between(last, packet));
            if lost > 0 {
                let behind = if self.codec.predicts() { packet.samples } else { 0 };
                spoken.lost.push(pcm.len()..pcm.len() + lost + behind);
                pcm.resize(pcm.len() + lost, 0.0);
            }
            pcm.extend(self.samples(packet).iter().map(|s| from_i16(*s)));
            last = Some(packet);
        }
        spoken
    }

    /// Samples of the packets that were lost between two that came.
    fn lost_between(&self, a: &Packet, b: &Packet) -> usize {
        let missing = b.sequence - a.sequence - 1;
        if a.stream != b.stream || missing <= 0 {
            return 0;
        }
        let apart = (b.timestamp - a.timestamp).max(0) as f64 / f64::from(self.codec.clock_rate());
        let between = ((apart * f64::from(self.rate)).round() as usize).saturating_sub(a.samples);
        // The sender may have paused among them as well: that is not lost.
        between.min(missing as usize * a.samples)
    }
}
