//! `[engine] invariant`: the same bits whatever else is in a step.

use antiphon::synth::Slot;
use antiphon::synth::cosyvoice::backend::FinalChunk;

use super::device;
use super::failures::rig_of;

/// Utterances together at most: as many as a step takes, which has not two rows for each.
const MOST: u32 = 66;

#[test]
fn audio_does_not_depend_on_the_company_where_that_is_asked_for() {
    let Some(_device) = device() else { return };
    let mut rig = rig_of(FinalChunk::Causal, MOST, true);
    let slots: Vec<(Slot, f32)> = (0..MOST).map(|n| (Slot(n), 1.0)).collect();
    let together = rig.speak(&slots, &mut |_, _, _| {});
    assert!(together.iter().all(|s| s.failed.is_none() && s.pcm.len() > 24_000), "all speak");
    for group in [3..4, 0..2, 5..17, 30..40] {
        let few = rig.speak(&slots[group.clone()], &mut |_, _, _| {});
        for (n, (alone, among)) in group.clone().zip(few.iter().zip(&together[group])) {
            assert_eq!(alone.tokens, among.tokens, "tokens of {n}");
            let differs = alone.pcm.iter().zip(&among.pcm).position(|(a, b)| a.to_bits() != b.to_bits());
            assert!(alone.pcm.len() == among.pcm.len() && differs.is_none(), "samples of {n} from {differs:?} on");
        }
    }
}
