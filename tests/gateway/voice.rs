//! A caller who really speaks over a turn gets silence.
//!
//! Judged by frames: the gateway says how much of the turn had left when it decided, and the caller knows by RTP
//! timestamps how much arrived. What a busy machine adds to either end does not count.

use std::time::Duration;

use antiphon::call::{CallEvent, Cause};
use antiphon_loadgen::call::Call;
use antiphon_loadgen::codec::Codec;
use antiphon_loadgen::heard::{Clip, Heard, Packet};
use tokio::time::timeout;

use super::support::{PATIENCE, Rig, SENTENCE};

/// What the product promises between the decision and silence.
const PROMISE: Duration = Duration::from_millis(60);
/// Codecs and resamplers delay what they are given by at most this.
const CODEC_DELAY: Duration = Duration::from_millis(20);

/// A recorded voice.
pub(crate) fn voice() -> Clip {
    let mut wav = hound::WavReader::open("tests/data/speech-8k.wav").expect("the recording");
    let pcm = wav.samples::<i16>().map(|s| f32::from(s.expect("sound")) / 32_768.0).collect();
    Clip { rate: 8_000, pcm }
}

fn is_audible(heard: &Heard, packet: &Packet) -> bool {
    heard.samples(packet).iter().any(|s| s.unsigned_abs() > 150)
}

async fn speaks_over(rig: &Rig, call: &Call) {
    let text = SENTENCE.repeat(6);
    let reference = rig.reference(&text).await;
    let lead = reference.pcm.iter().position(|s| s.abs() > 150.0 / 32_768.0).expect("speech");
    let lead = Duration::from_secs_f64(lead as f64 / f64::from(reference.rate));
    let handle = rig.handle(call).await;
    let mut events = handle.events();
    let asked = rig.speak(call, &text).await;
    call.onset(asked, PATIENCE).await.expect("speech is heard");
    let spoke = call.say(&voice()).await.expect("the caller speaks");
    let interrupted = async {
        loop {
            if let CallEvent::Interrupted { cause, heard, .. } = events.recv().await.expect("the call lives") {
                return (cause, heard);
            }
        }
    };
    let (cause, told) = timeout(PATIENCE, interrupted).await.expect("the caller is noticed");
    assert_eq!(cause, Cause::Speech);
    call.silence(spoke, Duration::from_secs(1), PATIENCE).await.expect("it is silent");

    let heard = call.ear().heard();
    let audible: Vec<_> =
        heard.packets.iter().filter(|p| p.arrived >= asked).filter(|p| is_audible(&heard, p)).collect();
    let (first, last) = (audible.first().expect("speech"), audible.last().expect("speech"));
    let ticks = (last.timestamp - first.timestamp) as f64;
    let span = Duration::from_secs_f64(ticks / f64::from(heard.codec.clock_rate())) + heard.duration_of(last);
    let sent = Duration::from_millis(told.sent_ms);
    // The turn's beginning to the last sound, by the sender's clock, against what had left at the decision.
    let until = lead.saturating_sub(CODEC_DELAY) + span;
    assert!(until <= sent + PROMISE, "{:?}: sound until {until:?}, decided at {sent:?}", call.leg());
    assert!(sent > Duration::from_millis(100) && sent < reference.duration() / 2, "{told:?}");
    assert!(text.starts_with(told.text.trim_end()) && told.text.len() < text.len(), "{told:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_caller_who_speaks_over_a_turn_gets_silence_on_both_legs() {
    let rig = Rig::start().await;
    for call in [
        rig.telephone("silent", Codec::Pcmu).await,
        rig.telephone("silent", Codec::Opus).await,
        rig.browser("silent").await,
    ] {
        speaks_over(&rig, &call).await;
        call.hang_up().await;
    }
    rig.app.drain().await;
}
