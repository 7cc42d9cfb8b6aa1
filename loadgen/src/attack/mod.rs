//! Attacks on a gateway beside calls that speak: what a public address gets within minutes, and what must come of it.
//!
//! Each attack starts a gateway of its own on loopback, has telephones listen to it, does its worst from other loopback
//! addresses (each is a source of its own to the gateway) and judges by what the telephones heard, by the answers that the
//! attacker got, and by the memory of the gateway's process. What the computer itself costs the calls shows in a row without an
//! attack, the control: packets that came late are judged beside its own.
//!
//! - `bed`: the gateway, the telephones that listen and the one that keeps calling
//! - `noise`: what is sent; `flood`: how fast, from where, and what came back
//! - `rows`: the attacks; `verdict`: their names, and what came of them

mod bed;
mod flood;
mod noise;
mod rows;
mod verdict;

pub use verdict::{Figure, Findings, Must, Options, Row, Verdict};

use crate::caller::call::CallError;

/// Does it.
///
/// # Errors
/// The gateway does not start, or no call gets through before the attack begins.
pub async fn run(row: Row, options: &Options) -> Result<Verdict, CallError> {
    let figures = match row {
        Row::Control => rows::control(options).await?,
        Row::Malformed => rows::malformed(options).await?,
        Row::HalfOpen => rows::half_open(options).await?,
        Row::Rtp => rows::rtp(options).await?,
        Row::Digest => rows::digest(options).await?,
        Row::Toll => rows::toll(options).await?,
        Row::Slow => rows::slow(options).await?,
        Row::Descriptors => rows::descriptors(options).await?,
    };
    Ok(Verdict { row, figures })
}
