//! Speech at another speed: a mel stretched in time, before it becomes sound.
//!
//! # Why
//! The original interpolates the whole mel at once, so a listener waits for the last frame before the first is heard; it
//! refuses another speed where it streams. [`Respeed`] gives out every frame as soon as both of its neighbours are known.
//! It steps by the speed itself, the original by frames over wanted frames, which is the same wherever that division has no
//! rest (then both give the same bits) and else differs by less than one wanted frame over the whole utterance. The number
//! of frames is the original's in every case. The vocoder is causal and exact however its input is cut
//! ([`super::cpu`], [`super::gpu`]), so pieces join without a click.
//!
//! PCM is not stretched: overlap-and-add repeats and drops periods of the voice, which is heard at any speed; a
//! mel has no phase that could break.

/// A speed as it was written: 0.8 is not 0.800000012, and lengths are rounded down.
fn written(speed: f32) -> f64 {
    speed.to_string().parse().unwrap_or(f64::from(speed))
}

/// How many frames `frames` become: at least one.
fn wanted(frames: usize, speed: f64) -> usize {
    ((frames as f64 / speed) as usize).max(1)
}

/// Where frame `n` lies in the mel it is made of: linear interpolation with half-pixel centres.
fn place(n: usize, scale: f32) -> f32 {
    scale.mul_add(n as f32 + 0.5, -0.5).max(0.0)
}

/// A whole mel `[frames, channels]`, row-major, played `speed` times as fast, as the original does it.
pub(super) fn whole(mel: &[f32], channels: usize, speed: f32) -> Vec<f32> {
    let frames = mel.len() / channels.max(1);
    if frames == 0 {
        return Vec::new();
    }
    let wanted = wanted(frames, written(speed));
    let scale = frames as f32 / wanted as f32;
    let mut out = Vec::with_capacity(wanted * channels);
    for n in 0..wanted {
        let at = place(n, scale);
        let low = (at as usize).min(frames - 1);
        let high = (low + 1).min(frames - 1);
        between(&mel[low * channels..][..channels], &mel[high * channels..][..channels], at - low as f32, &mut out);
    }
    out
}

fn between(a: &[f32], b: &[f32], part: f32, out: &mut Vec<f32>) {
    out.extend(a.iter().zip(b).map(|(a, b)| a * (1.0 - part) + b * part));
}

/// A mel that comes in pieces, played at another speed.
#[derive(Clone, Debug)]
pub(super) struct Respeed {
    speed: f32,
    written: f64,
    channels: usize,
    /// Frames that came.
    received: usize,
    /// Frames that were given out.
    made: usize,
    /// The frames from `first` on, which are still needed.
    kept: Vec<f32>,
    first: usize,
}

impl Respeed {
    /// For frames of `channels` values; `None` at the speed of the mel itself.
    pub(super) fn new(channels: usize, speed: f32) -> Option<Self> {
        ((speed - 1.0).abs() > f32::EPSILON).then(|| Self {
            speed,
            written: written(speed),
            channels,
            received: 0,
            made: 0,
            kept: Vec::new(),
            first: 0,
        })
    }

    /// Frames that came so far.
    pub(super) fn received(&self) -> usize {
        self.received
    }

    /// Takes the next frames, row-major; gives every frame that they make certain. With `last` nothing follows.
    pub(super) fn push(&mut self, mel: &[f32], last: bool) -> Vec<f32> {
        self.kept.extend_from_slice(mel);
        self.received += mel.len() / self.channels;
        let mut out = Vec::new();
        if self.received == 0 {
            return out;
        }
        let end = self.received - 1;
        // Not more than there will be if nothing follows.
        let most =
            if last { wanted(self.received, self.written) } else { (self.received as f64 / self.written) as usize };
        while self.made < most {
            let at = place(self.made, self.speed);
            let low = (at as usize).min(end);
            if !last && low + 1 > end {
                break;
            }
            let row = |frame: usize| &self.kept[(frame.min(end) - self.first) * self.channels..][..self.channels];
            between(row(low), row(low + 1), at - low as f32, &mut out);
            self.made += 1;
        }
        let next = (place(self.made, self.speed) as usize).min(end);
        self.kept.drain(..(next - self.first) * self.channels);
        self.first = next;
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const CHANNELS: usize = 3;

    fn mel(frames: usize) -> Vec<f32> {
        (0..frames * CHANNELS).map(|n| (n as f32 * 0.37).sin() * 4.0 - 2.0).collect()
    }

    fn streamed(mel: &[f32], speed: f32, pieces: impl Fn(usize) -> usize) -> Vec<f32> {
        let mut respeed = Respeed::new(CHANNELS, speed).expect("another speed");
        let (mut out, mut at, mut n) = (Vec::new(), 0, 0);
        while at < mel.len() {
            let end = (at + pieces(n) * CHANNELS).min(mel.len());
            out.extend(respeed.push(&mel[at..end], end == mel.len()));
            (at, n) = (end, n + 1);
        }
        assert!(respeed.push(&[], true).is_empty(), "nothing is owed");
        out
    }

    const SPEEDS: [f32; 9] = [0.25, 0.5, 0.7, 0.8, 0.9, 1.1, 1.25, 2.0, 4.0];

    #[test]
    fn pieces_give_the_bits_and_the_length_of_the_whole_however_they_are_cut() {
        for speed in SPEEDS {
            for frames in 1..130 {
                let mel = mel(frames);
                let reference = whole(&mel, CHANNELS, speed);
                let once = streamed(&mel, speed, |_| frames);
                assert_eq!(once.len(), reference.len(), "{frames} frames at {speed}");
                for cut in [1, 2, 7, 50] {
                    assert_eq!(streamed(&mel, speed, |_| cut), once, "{frames} frames at {speed} by {cut}");
                }
                assert_eq!(streamed(&mel, speed, |n| n % 5), once, "also where nothing comes");
                let ratio = frames as f64 / written(speed);
                if ratio.fract() == 0.0 {
                    assert_eq!(once, reference, "{frames} frames at {speed}");
                }
            }
        }
    }

    /// On a ramp a value says where in the mel a frame was taken.
    #[test]
    fn where_a_division_has_a_rest_frames_lie_less_than_one_from_those_of_the_original() {
        for speed in SPEEDS {
            for frames in 2..400usize {
                let ramp: Vec<f32> = (0..frames).flat_map(|n| [n as f32; CHANNELS]).collect();
                let reference = whole(&ramp, CHANNELS, speed);
                let made = streamed(&ramp, speed, |_| 50);
                for (a, b) in made.iter().zip(&reference) {
                    assert!((a - b).abs() <= speed.max(1.0), "{frames} frames at {speed}: {a} for {b}");
                }
            }
        }
    }

    #[test]
    fn frames_come_while_others_are_still_to_be_made() {
        let mut respeed = Respeed::new(CHANNELS, 0.5).expect("another speed");
        let first = respeed.push(&mel(50), false).len() / CHANNELS;
        assert!((98..=100).contains(&first), "{first} of 100");
        assert!(respeed.kept.len() <= 2 * CHANNELS, "what is done with is forgotten");
        assert!(Respeed::new(CHANNELS, 1.0).is_none());
    }
}
