//! What a worker tells of itself: all of its devices as one.

use super::super::wire::{Status, Voice};
use crate::synth::VoiceInfo;
use crate::synth::device::{DeviceStatus, Engine, Phase};

/// All devices together, as one.
pub(super) fn status(engine: &Engine) -> Status {
    let devices: Vec<DeviceStatus> = engine.status();
    let ready: Vec<&DeviceStatus> = devices.iter().filter(|device| device.phase == Phase::Ready).collect();
    let Some(first) = ready.first().and_then(|device| device.caps.as_ref()) else { return Status::default() };
    let mut load = ready[0].load;
    for device in &ready[1..] {
        let other = &device.load;
        load.live += other.live;
        load.batch += other.batch;
        load.live_open += other.live_open;
        load.batch_open += other.batch_open;
        load.capacity += other.capacity;
        load.sustainable += other.sustainable;
        load.holding += other.holding;
        load.load += other.load;
        load.recent += other.recent;
        load.memory += other.memory;
        load.preemptions += other.preemptions;
        let least = |a: Option<f64>, b: Option<f64>| [a, b].into_iter().flatten().reduce(f64::min);
        load.first_audio = least(load.first_audio, other.first_audio);
        load.slack = least(load.slack, other.slack);
    }
    // Shares of one device each. JSON knows no infinity: what is not known yet is nothing.
    for (value, of) in [
        (&mut load.load, ready.len() as f64),
        (&mut load.recent, ready.len() as f64),
        (&mut load.sustainable, 1.0),
        (&mut load.holding, 1.0),
    ] {
        *value = if value.is_finite() { *value / of } else { 0.0 };
    }
    load.first_audio = load.first_audio.filter(|seconds| seconds.is_finite());
    Status {
        engine: Some(first.name.to_owned()),
        slots: ready.iter().filter_map(|device| Some(device.caps.as_ref()?.limits.slots)).sum(),
        voices: None,
        load,
        memory_total: ready.iter().map(|device| device.memory.total).sum(),
        memory_used: ready.iter().map(|device| device.memory.used).sum(),
        refusal: engine.has_room().err().map(Into::into),
        draining: false,
        model: engine.model(),
        copies: false,
        contents: None,
    }
}

/// As gateways are told of a voice.
pub(super) fn told_of(voice: &VoiceInfo) -> Voice {
    Voice { name: voice.name.clone(), languages: voice.languages.clone(), starts_after: voice.starts_after }
}
