//! Text that is still being written, decoded among other rows: the same ids as the reference's order gives alone.

use std::path::Path;

use antiphon::synth::cosyvoice::backend::Options;
use antiphon::synth::cosyvoice::bistream::Order;
use antiphon::synth::cosyvoice::config::Config;
use antiphon::synth::cosyvoice::cpu::CpuBackend;

use super::rows::{Script, alone, together};

/// With the golden kit's weights; that the orders alone are the original's is what [`super::golden`] shows.
#[test]
fn streamed_rows_sample_beside_others_what_the_reference_order_samples_alone() {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/golden/cosyvoice3/checkpoint");
    let config = Config::load(&dir).expect("sizes");
    let mut backend = CpuBackend::load(&dir, Options { slots: Some(64), ..Options::default() }).expect("loads");
    let scripts: Vec<Script> = (0..64).map(Script::new).collect();
    for order in [Order::Fixed, Order::Reference] {
        let expected: Vec<Vec<u32>> =
            scripts.iter().map(|script| alone(&mut backend, &config, script, order)).collect();
        assert!(expected.iter().filter(|tokens| tokens.len() > 15).count() > 32, "pauses are in most");
        assert_eq!(together(&mut backend, &config, &scripts, order, 4), expected, "{order:?} at width 64");
        let one = together(&mut backend, &config, &scripts[..1], order, 32);
        assert_eq!(one, expected[..1], "{order:?} at width 1");
    }
}
