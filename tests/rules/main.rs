//! Rules of the source tree that no compiler checks. Each test is one rule and says what to change.
//!
//! A rule that the tree does not keep yet has an allow-list beside it: today's offenders, by name. An entry that
//! offends no more fails its test too, so the lists only shrink.

mod circles;
mod faults;
mod fixtures;
mod layers;
mod size;
mod supply;
mod text;
mod tree;

/// Compares what offends with what is allowed to; panics with what to change.
fn assert_only(allowed: &[&str], offenders: Vec<(String, String)>, rule: &str) {
    let new: Vec<&str> =
        offenders.iter().filter(|(name, _)| !allowed.contains(&name.as_str())).map(|(_, why)| why.as_str()).collect();
    assert!(new.is_empty(), "{rule}:\n{}", new.join("\n"));
    let mended: Vec<_> = allowed.iter().filter(|name| !offenders.iter().any(|(n, _)| n == *name)).collect();
    assert!(mended.is_empty(), "kept by now, so take it off the allow-list of this test: {mended:?}");
}
