//! Two channels side by side, in order of time.

use std::collections::VecDeque;

/// A hole of so few samples is a correction of the clock: the last sample is held, where silence would click.
const HELD: i64 = 8;

/// What is not handed on yet of both channels.
#[derive(Debug)]
pub(super) struct Mixer {
    /// The sample at which both begin.
    start: i64,
    channels: [VecDeque<i16>; 2],
}

impl Mixer {
    pub(super) fn new() -> Self {
        Self { start: 0, channels: [VecDeque::new(), VecDeque::new()] }
    }

    /// Puts `pcm` at sample `index` of a channel. What lies before that which was handed on is left out.
    pub(super) fn add(&mut self, channel: usize, index: i64, pcm: &[i16]) {
        let skip = usize::try_from(self.start - index).unwrap_or(0);
        let Some(pcm) = pcm.get(skip..).filter(|pcm| !pcm.is_empty()) else { return };
        let at = usize::try_from(index - self.start).unwrap_or(0);
        let samples = &mut self.channels[channel];
        let hole = at as i64 - samples.len() as i64;
        if hole > 0 {
            let fill = samples.back().copied().filter(|_| hole <= HELD).unwrap_or(0);
            samples.resize(at, fill);
        }
        for (n, sample) in pcm.iter().enumerate() {
            match samples.get_mut(at + n) {
                Some(place) => *place = *sample,
                None => samples.push_back(*sample),
            }
        }
    }

    /// Both channels, sample by sample, up to `end`.
    pub(super) fn take(&mut self, end: i64) -> Vec<i16> {
        let count = usize::try_from(end - self.start).unwrap_or(0);
        let mut out = Vec::with_capacity(2 * count);
        for _ in 0..count {
            out.extend(self.channels.iter_mut().map(|channel| channel.pop_front().unwrap_or(0)));
        }
        self.start += count as i64;
        out
    }

    /// All that is left.
    pub(super) fn take_all(&mut self) -> Vec<i16> {
        let longest = self.channels.iter().map(VecDeque::len).max().unwrap_or(0);
        self.take(self.start + longest as i64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn channels_lie_side_by_side_and_holes_are_silence() {
        let mut mixer = Mixer::new();
        mixer.add(0, 2, &[1, 2]);
        mixer.add(1, 3, &[7]);
        mixer.add(1, 20, &[8]);
        assert_eq!(mixer.take(4), [0, 0, 0, 0, 1, 0, 2, 7]);
        assert_eq!(mixer.take(4), Vec::<i16>::new());
        // Too late, or half so.
        mixer.add(0, 0, &[9, 9]);
        mixer.add(0, 3, &[9, 5, 6]);
        assert_eq!(mixer.take(7), [5, 0, 6, 0, 0, 0]);
        let rest = mixer.take_all();
        assert_eq!((rest.len(), rest.last()), (28, Some(&8)));
    }

    #[test]
    fn small_holes_hold_and_overlaps_take_the_later() {
        let mut mixer = Mixer::new();
        mixer.add(0, 0, &[4, 4]);
        mixer.add(0, 4, &[6]);
        mixer.add(0, 3, &[1, 2]);
        let left: Vec<i16> = mixer.take_all().chunks(2).map(|pair| pair[0]).collect();
        assert_eq!(left, [4, 4, 4, 1, 2]);
    }
}
