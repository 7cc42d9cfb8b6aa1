use super::*;
use crate::synth::cosyvoice::config::Config;
use crate::synth::cosyvoice::random;

const BLOCK: usize = 50;

/// Slabs without memory.
struct Numbers {
    free: Vec<Slab>,
    most: usize,
}

impl Numbers {
    fn new(most: usize) -> Self {
        Self { free: (0..most as Slab).rev().collect(), most }
    }

    fn used(&self) -> usize {
        self.most - self.free.len()
    }
}

impl Pool for Numbers {
    fn take(&mut self) -> Result<Slab, SynthError> {
        self.free.pop().ok_or(SynthError::Memory { needed: 1, free: 0 })
    }

    fn put(&mut self, slab: Slab) {
        self.free.push(slab);
    }
}

/// Blocks are as long in the small model as in the large one.
fn config() -> FlowConfig {
    let dir = tempfile::tempdir().expect("temp dir");
    random::write_texts(dir.path(), random::Size::Tiny).expect("written");
    Config::load(dir.path()).expect("sizes").flow
}

fn stream(end: FinalChunk) -> Stream {
    Stream::new(Vec::new(), &[], &config(), 2, end)
}

/// Runs everything that was pushed, at most `most` chunks a round; says how many rounds that took, and checks that
/// each chunk finds what it depends on.
fn run(stream: &mut Stream, most: usize, slabs: &mut Numbers) -> usize {
    // Euler steps that each block has made, by its first frame.
    let mut made: std::collections::BTreeMap<usize, usize> = (0..stream.done).step_by(BLOCK).map(|b| (b, 10)).collect();
    let mut rounds = 0;
    while stream.pending() > 0 {
        let promised = stream.pending();
        let round = stream.next(usize::MAX, most, slabs).expect("there is memory");
        assert!(!round.is_empty() && round.len() <= most);
        let before = made.clone();
        for chunk in &round {
            if chunk.whole.is_some() {
                assert_eq!(round.len(), 1, "a full solve runs alone");
                continue;
            }
            assert_eq!(before.get(&chunk.start).copied().unwrap_or(0), chunk.step, "its steps come one by one");
            for (start, steps) in before.range(..chunk.start) {
                assert!(*steps > chunk.step, "block {start} has not made step {} before this round", chunk.step);
            }
            assert!((0..chunk.start).step_by(BLOCK).all(|b| before.contains_key(&b)), "every earlier block has begun");
            assert!(stream.slabs.len() * BLOCK >= chunk.start + chunk.frames, "its slab is there");
            *made.entry(chunk.start).or_default() += 1;
        }
        rounds += 1;
        assert!(stream.pending() + 1 >= promised, "no round makes more than one round's progress on the longest chain");
        assert!(rounds < 1_000);
    }
    rounds
}

#[test]
fn blocks_of_one_push_run_a_step_behind_each_other() {
    let mut slabs = Numbers::new(8);
    let mut s = stream(FinalChunk::Causal);
    s.push(&[1; 103], false);
    assert_eq!(s.pending(), 13);
    assert_eq!(run(&mut s, 16, &mut slabs), 13);
    assert_eq!((s.done, slabs.used()), (200, 4));
    s.push(&[1; 30], true);
    assert_eq!(run(&mut s, 16, &mut slabs), 11, "a whole block and the rest at the end");
    assert!(s.complete());
    assert_eq!(s.done, 266);
    s.free(&mut slabs);
    assert_eq!(slabs.used(), 0);
}

#[test]
fn a_narrow_round_takes_the_earliest_blocks() {
    let mut slabs = Numbers::new(8);
    let mut s = stream(FinalChunk::Causal);
    s.push(&[1; 53], false);
    assert_eq!(run(&mut s, 1, &mut slabs), 20);
    s.push(&[1; 100], false);
    // It becomes crowded while four windows are under way: the first goes on, the others wait.
    for most in [4, 4, 4, 4, 1, 1] {
        let _ = s.next(usize::MAX, most, &mut slabs).expect("there is memory");
    }
    assert_eq!(s.windows.iter().map(|w| w.step).collect::<Vec<_>>(), [6, 3, 2, 1]);
    while s.pending() > 0 {
        let _ = s.next(usize::MAX, 2, &mut slabs).expect("there is memory");
    }
    assert_eq!(s.done, 300);
}

#[test]
fn want_of_memory_delays_what_is_not_first() {
    let mut slabs = Numbers::new(2);
    let mut s = stream(FinalChunk::Causal);
    s.push(&[1; 78], false);
    let mut failed = 0;
    for _ in 0..40 {
        failed += usize::from(s.next(usize::MAX, 4, &mut slabs).is_err());
    }
    assert_eq!(s.done, 100, "what had memory was finished");
    assert!(failed > 0, "the rest says that there is none");
    s.free(&mut slabs);
    assert_eq!(slabs.used(), 0);
}

#[test]
fn a_full_solve_waits_for_the_blocks_before_it() {
    let mut slabs = Numbers::new(16);
    let mut s = stream(FinalChunk::Reference);
    s.push(&[1; 53], false);
    s.push(&[1; 10], true);
    run(&mut s, 16, &mut slabs);
    assert!(s.complete());
    assert_eq!(s.done, 126);
    s.free(&mut slabs);
    assert_eq!(slabs.used(), 0);
}
