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
    let mut made: std::collections::BTreeMap<usize, usize> =
        (0..stream.done).step_by(BLOCK).map(|b| (b, stream.steps)).collect();
    // Whose keys and values of which step lie in each step of each slab.
    let mut memory = std::collections::BTreeMap::new();
    for (n, place) in stream.places.iter().enumerate().take(stream.done / BLOCK) {
        memory.extend((0..stream.steps).map(|step| ((place.slab, step), (n, step))));
    }
    for window in &stream.windows {
        let (n, place) = (window.start / BLOCK, stream.places[window.start / BLOCK]);
        made.insert(window.start, window.step);
        memory.extend((0..window.step).map(|step| ((place.slab, place.step(step)), (n, step))));
    }
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
            let own = stream.places[chunk.start / BLOCK];
            let (n, step) = (chunk.start / BLOCK, chunk.step);
            memory.insert((own.slab, own.step(step)), (n, step));
            *made.entry(chunk.start).or_default() += 1;
        }
        // What the round reads was neither written over before nor is in it.
        for chunk in round.iter().filter(|chunk| chunk.whole.is_none()) {
            for (n, place) in stream.places.iter().enumerate().take(chunk.start / BLOCK) {
                assert_eq!(memory[&(place.slab, place.step(chunk.step))], (n, chunk.step), "for {chunk:?}");
            }
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
    assert_eq!(s.slabs_in_the_end(), 5);
    assert_eq!(run(&mut s, 16, &mut slabs), 11, "a whole block and the rest at the end");
    assert!(s.complete());
    assert_eq!((s.done, slabs.used()), (266, 5), "they share a slab");
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
    // It becomes crowded while four windows are in flight: the first goes on, the others wait.
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

/// However few of them a round has room for, and however many Euler steps there are.
#[test]
fn the_last_blocks_share_slabs_and_read_only_what_is_still_there() {
    for (steps, most) in [(10, 16), (10, 3), (10, 2), (10, 1), (4, 2), (2, 5), (1, 3)] {
        for tokens in [20, 60, 130, 200, 300, 500] {
            let mut slabs = Numbers::new(32);
            let mut s = Stream { steps, ..stream(FinalChunk::Causal) };
            s.push(&[1; 28], false);
            // One block is in flight when the others come.
            let _ = s.next(usize::MAX, most, &mut slabs).expect("there is memory");
            s.push(&vec![1; tokens], true);
            let promised = s.slabs_in_the_end();
            let blocks = ((tokens + 3) * 2).div_ceil(BLOCK);
            let rounds = run(&mut s, most, &mut slabs);
            assert!(s.complete());
            assert_eq!((s.done, slabs.used()), ((tokens + 28) * 2, promised));
            assert!(
                promised <= blocks + 1 && (steps < 10 || blocks < 4 || promised < blocks),
                "{promised} of {blocks}"
            );
            assert!(most < 16 || rounds == steps - 1 + blocks, "{rounds} rounds for {blocks} blocks after one");
            s.free(&mut slabs);
            assert_eq!(slabs.used(), 0);
        }
    }
}
