//! What a client says without a pause, and how much of that the gateway's recording of the call has.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use antiphon_loadgen::heard::Clip;
use antiphon_loadgen::rtc::peer::Microphone;
use antiphon_loadgen::{rtp, wav};
use opus::{Application, Channels, Encoder};
use tokio::time::interval;
use tokio_util::task::AbortOnDropHandle;

const RATE: u32 = 16_000;
/// Samples of 20 ms.
const FRAME: usize = RATE as usize / 50;
/// Power of 20 ms that are a voice: 40 dB below full scale. The sentences have pauses of less than half a second.
const LOUD: f32 = 1e-4;

/// Three sentences, again and again.
fn sentences() -> Vec<f32> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/smart_turn");
    let names = ["blue_whole.wav", "card_whole.wav", "office_whole.wav"];
    let clips = names.map(|name| wav::read(folder.join(name)).expect("recorded words"));
    assert!(clips.iter().all(|clip| clip.rate == RATE));
    clips.into_iter().flat_map(|clip| clip.pcm).collect()
}

/// Somebody who speaks until this is dropped.
pub(super) struct Mouth {
    packets: Arc<AtomicUsize>,
    _task: AbortOnDropHandle<()>,
}

impl Mouth {
    pub(super) fn open(microphone: Microphone) -> Mouth {
        let packets = Arc::<AtomicUsize>::default();
        let count = packets.clone();
        let task = tokio::spawn(async move {
            let words = sentences();
            let mut words = words.iter().copied().cycle();
            let mut encoder = Encoder::new(RATE, Channels::Mono, Application::Voip).expect("an encoder");
            let mut tick = interval(Duration::from_millis(20));
            for number in 0_u32.. {
                tick.tick().await;
                let frame: Vec<f32> = words.by_ref().take(FRAME).collect();
                let payload = encoder.encode_vec_float(&frame, 1_275).expect("a frame").into();
                let (timestamp, sequence) = (number * 960, number as u16);
                let packet = rtp::Packet { payload_type: 111, marker: false, sequence, timestamp, ssrc: 0, payload };
                // A network that is gone takes nothing.
                let _ = microphone.send(packet).await;
                count.fetch_add(1, Ordering::Relaxed);
            }
        });
        Mouth { packets, _task: AbortOnDropHandle::new(task) }
    }

    /// What was said up to now.
    pub(super) fn said(&self) -> Clip {
        let samples = self.packets.load(Ordering::Relaxed) * FRAME;
        Clip { rate: RATE, pcm: sentences().into_iter().cycle().take(samples).collect() }
    }
}

/// The side of the caller, of a recording in a WAV file.
pub(super) fn caller(file: &[u8]) -> Clip {
    let mut reader = hound::WavReader::new(file).expect("a recording");
    let spec = reader.spec();
    assert_eq!((spec.channels, spec.bits_per_sample), (2, 16));
    let samples = reader.samples::<i16>().step_by(2).map(|sample| f32::from(sample.expect("whole")) / 32_768.0);
    Clip { rate: spec.sample_rate, pcm: samples.collect() }
}

/// The longest time, in seconds of sound, for which nothing is heard of somebody who spoke for as long as `said` is. The recording
/// keeps the clock of the call: what did not come is silence in it.
pub(super) fn gap(said: &Clip, heard: &Clip) -> f64 {
    let seconds = |samples: usize, rate: u32| samples as f64 / f64::from(rate);
    let frame = heard.rate as usize / 50;
    let power = |pcm: &[f32]| pcm.iter().map(|sample| sample * sample).sum::<f32>() / pcm.len() as f32;
    let frames = heard.pcm.chunks_exact(frame).enumerate();
    let loud: Vec<usize> = frames.filter(|(_, pcm)| power(pcm) > LOUD).map(|(at, _)| at).collect();
    let (Some(first), Some(last)) = (loud.first(), loud.last()) else { return f64::INFINITY };
    let longest = loud.windows(2).map(|pair| pair[1] - pair[0]).max().unwrap_or(0);
    let missing = seconds(said.pcm.len(), said.rate) - seconds((last - first) * frame, heard.rate);
    seconds(longest * frame, heard.rate).max(missing)
}
