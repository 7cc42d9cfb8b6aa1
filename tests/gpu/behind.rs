//! Flow and vocoder calls that run behind others.

use antiphon::synth::Slot;
use antiphon::synth::cosyvoice::backend::{Backend, FinalChunk};
use antiphon::synth::cosyvoice::gpu::GpuBackend;

use super::device;
use super::failures::{Rig, TOKENS, rig};

const FIRST: [Slot; 3] = [Slot(0), Slot(1), Slot(2)];
const SECOND: [Slot; 3] = [Slot(8), Slot(9), Slot(10)];

/// Tokens and samples of both groups, in the order of their slots.
#[derive(Debug, Default, PartialEq)]
struct Made {
    tokens: Vec<Vec<u32>>,
    pcm: Vec<Vec<f32>>,
}

fn decode(backend: &mut GpuBackend, slots: &[Slot], rounds: u32, tokens: &mut [Vec<u32>]) {
    let mut out = Vec::new();
    backend.decode(slots, rounds, &mut out).expect("decode");
    for d in out {
        assert!(d.failed.is_none(), "{d:?}");
        tokens[d.slot.0 as usize].extend(d.tokens);
    }
}

fn prefill(backend: &mut GpuBackend, slots: &[Slot], tokens: &mut [Vec<u32>]) {
    let mut out = Vec::new();
    backend.prefill(slots, &mut out).expect("prefill");
    for p in out {
        tokens[p.slot.0 as usize].extend(p.tokens);
    }
}

/// The first group makes sound while the second decodes and flows: calls of both in turn, or those of the first behind
/// those of the second.
fn two_groups(rig: &mut Rig, behind: bool) -> Made {
    let mut made = Made { tokens: vec![Vec::new(); 16], pcm: vec![Vec::new(); 16] };
    for slot in FIRST.into_iter().chain(SECOND) {
        rig.open(slot, 1.0);
    }
    let backend = &mut rig.backend;
    prefill(backend, &FIRST, &mut made.tokens);
    decode(backend, &FIRST, TOKENS, &mut made.tokens);
    while made.tokens[0].len() < TOKENS as usize {
        decode(backend, &FIRST, 16, &mut made.tokens);
    }
    for slot in FIRST {
        backend.flow_push(slot, &made.tokens[slot.0 as usize], true).expect("a whole utterance");
    }
    let mut prefilled = false;
    loop {
        let mut out = Vec::new();
        if behind {
            assert!(backend.launch_flow(&FIRST, 3).expect("begins"));
            assert!(!backend.launch_flow(&SECOND, 3).expect("one at a time"), "one at a time");
        } else {
            backend.flow(&FIRST, 3, &mut out).expect("flow");
        }
        if prefilled {
            decode(backend, &SECOND, 5, &mut made.tokens);
        } else {
            prefill(backend, &SECOND, &mut made.tokens);
            prefilled = true;
        }
        if behind {
            backend.complete_flow(&mut out).expect("finishes");
            assert!(backend.poll().expect("works"));
        }
        assert!(out.iter().map(|f| f.slot).eq(FIRST) && out.iter().all(|f| f.failed.is_none()), "{out:?}");
        if out.iter().all(|f| f.pending == 0) {
            break;
        }
    }
    while made.tokens[8].len() < TOKENS as usize {
        decode(backend, &SECOND, 5, &mut made.tokens);
    }
    for slot in SECOND {
        backend.flow_push(slot, &made.tokens[slot.0 as usize], true).expect("a whole utterance");
    }
    loop {
        let mut out = Vec::new();
        if behind {
            assert!(backend.launch_vocode(&FIRST).expect("begins"));
        } else {
            backend.vocode(&FIRST, &mut out).expect("vocode");
        }
        backend.flow(&SECOND, 2, &mut Vec::new()).expect("flow");
        if behind {
            backend.complete_vocode(&mut out).expect("finishes");
        }
        let done = out.iter().all(|v| v.done);
        for v in out {
            assert!(v.failed.is_none(), "{v:?}");
            made.pcm[v.slot.0 as usize].extend(v.pcm);
        }
        if done {
            break;
        }
    }
    loop {
        let (mut flowed, mut out) = (Vec::new(), Vec::new());
        backend.flow(&SECOND, 2, &mut flowed).expect("flow");
        if flowed.iter().all(|f| f.pending == 0) {
            backend.vocode(&SECOND, &mut out).expect("vocode");
        }
        let done = !out.is_empty() && out.iter().all(|v| v.done);
        for v in out {
            made.pcm[v.slot.0 as usize].extend(v.pcm);
        }
        if done {
            break;
        }
    }
    FIRST.into_iter().chain(SECOND).for_each(|slot| backend.close(slot));
    made
}

#[test]
fn calls_behind_others_give_the_same_bits() {
    let Some(_device) = device() else { return };
    let mut rig = rig(FinalChunk::Causal);
    let memory = rig.backend.memory();
    let in_turn = two_groups(&mut rig, false);
    assert!(in_turn.pcm.iter().filter(|pcm| pcm.len() > 24_000).count() == 6);
    for _ in 0..5 {
        assert_eq!(two_groups(&mut rig, true), in_turn);
        assert_eq!(rig.backend.memory(), memory);
    }
}

/// A front call of the same network takes what was found out behind it, and a slot that is closed meanwhile is told so
/// and gives its memory back; the others lose nothing.
#[test]
fn a_slot_may_be_closed_and_its_network_used_while_its_call_runs_behind() {
    let Some(_device) = device() else { return };
    let mut rig = rig(FinalChunk::Causal);
    let memory = rig.backend.memory();
    let speak = |rig: &mut Rig, closed: bool| -> Vec<Vec<f32>> {
        let mut made = vec![Vec::new(); 16];
        let mut tokens = vec![Vec::new(); 16];
        for slot in FIRST.into_iter().chain(SECOND) {
            rig.open(slot, 1.0);
        }
        let all: Vec<Slot> = FIRST.into_iter().chain(SECOND).collect();
        let backend = &mut rig.backend;
        prefill(backend, &all, &mut tokens);
        while tokens[0].len() < TOKENS as usize {
            decode(backend, &all, 16, &mut tokens);
        }
        for slot in &all {
            backend.flow_push(*slot, &tokens[slot.0 as usize], true).expect("a whole utterance");
        }
        let mut out = Vec::new();
        assert!(backend.launch_flow(&FIRST, 4).expect("begins"));
        backend.flow(&SECOND, 4, &mut Vec::new()).expect("flow");
        if closed {
            backend.close(FIRST[0]);
        }
        backend.complete_flow(&mut out).expect("finishes");
        assert_eq!(out.iter().map(|f| f.failed.is_some()).collect::<Vec<_>>(), [closed, false, false]);
        let left: Vec<Slot> = all.into_iter().filter(|slot| !closed || *slot != FIRST[0]).collect();
        // Nothing is as wide as before from here on, which would show in the last bits: one after the other.
        for slot in left {
            loop {
                let mut flowed = Vec::new();
                backend.flow(&[slot], 4, &mut flowed).expect("flow");
                if flowed[0].pending == 0 {
                    break;
                }
            }
            loop {
                let mut out = Vec::new();
                backend.vocode(&[slot], &mut out).expect("vocode");
                let last = out.pop().expect("one");
                assert!(last.failed.is_none(), "{last:?}");
                made[slot.0 as usize].extend(last.pcm);
                if last.done {
                    break;
                }
            }
            backend.close(slot);
        }
        made
    };
    let (whole, closed) = (speak(&mut rig, false), speak(&mut rig, true));
    assert!(closed[0].is_empty() && !whole[0].is_empty());
    assert_eq!(whole[1..], closed[1..]);
    assert_eq!(rig.backend.memory(), memory);
}
