//! Text that is still being written on the GPU: the same ids beside others as alone, and how soon it sounds.

use std::path::Path;

use antiphon::synth::cosyvoice::backend::Options;
use antiphon::synth::cosyvoice::bistream::Order;
use antiphon::synth::cosyvoice::gpu::{GpuBackend, Precision};
use antiphon::synth::cosyvoice::selftest::Kit;

use super::rows::{Script, alone, together};
use super::{KIT, device, options};

/// Ids of 64 texts in both orders: one sequence after the other, as the kit holds against the original, and side by side.
fn compare(precision: Precision) {
    let kit = Kit::open(Path::new(KIT)).expect("the kit opens");
    let options = Options { slots: Some(64), memory: Some(4 << 30), ..options(&kit) };
    let mut backend = GpuBackend::load(&kit.checkpoint_dir(), 0, options, precision).expect("the model loads");
    let config = backend.config().clone();
    let scripts: Vec<Script> = (0..64).map(Script::new).collect();
    for order in [Order::Fixed, Order::Reference] {
        let expected: Vec<Vec<u32>> =
            scripts.iter().map(|script| alone(&mut backend, &config, script, order)).collect();
        let wide = together(&mut backend, &config, &scripts, order, 4);
        let same = wide.iter().zip(&expected).filter(|(wide, alone)| wide == alone).count();
        let ids: usize = expected.iter().map(Vec::len).sum();
        println!("{order:?}: {same} of 64 texts ({ids} ids) as one sequence alone");
        assert_eq!(wide, expected, "{order:?} at width 64");
        for n in [0, 7, 33] {
            let one = together(&mut backend, &config, &scripts[n..=n], order, 32);
            assert_eq!(one, wide[n..=n], "{order:?}, text {n} at width 1");
        }
    }
}

#[test]
fn streamed_rows_sample_in_single_precision_what_they_sample_alone() {
    if let Some(_device) = device() {
        compare(Precision::EXACT);
    }
}

#[test]
fn streamed_rows_sample_in_working_precision_what_they_sample_alone() {
    if let Some(_device) = device() {
        compare(Precision::default());
    }
}
