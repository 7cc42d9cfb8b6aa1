//! `paste` 1.0.15 is no longer kept up (RUSTSEC-2024-0436), and `gemm` 0.19.0, the products of matrices of
//! `candle-core` 0.11.1, still names it. `[patch.crates-io]` of the workspace puts this package in its place: the same macro
//! from `pastey`, which is. It goes with the version of `gemm` that names another.

pub use pastey::paste;
