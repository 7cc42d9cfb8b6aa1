//! Synthesis on another machine: a gateway without a GPU speaks through workers that have one.
//!
//! A worker ([`serve`]) is an [`crate::synth::device::Engine`] behind a socket; many gateways share its scheduler, which
//! knows one kind of deadline, whichever gateway asks. To a gateway a worker is one more device ([`link`]): placement, refusals,
//! cancelling and usage are the same.
//!
//! ```text
//! gateway: Engine -> Link ==TCP, mutual TLS==> worker: Session -> Engine -> devices
//!          text, deadlines, cancels -->            <-- audio, words, load, ends
//! ```
//!
//! # Why
//! - **Frames of our own on one TCP connection** ([`wire`]): what crosses is text one way and samples the other. A broker
//!   or a call per utterance would put its queue and its handshake into first audio.
//! - **Samples as they were made**: 32-bit floats, so that a voice sounds to the bit as in process; 0.77 Mbit/s a stream
//!   in real time.
//! - **The worker decides, the gateway guesses**: `submit` must answer at once, so a link refuses by the load that the
//!   worker told last ([`wire::STATUS`]) and passes a later refusal on as the utterance's end.
//! - **Credit instead of a queue**: a worker sends at most [`wire::CREDIT`] pieces of an utterance that the gateway has
//!   not handed on, so that a slow reader of a file delays that file and no call.
//! - **Text crosses as it is written, and words come back**: pieces of a text that somebody still writes are sent to voices that
//!   take them so, one by one, for the same pieces make the same audio; when words sound is told before the audio that they
//!   are in, and behind the end by voices that find them later.
//! - **A lost worker costs no word**: what it had not finished is spoken again by a device of the same kind, with the same
//!   seed, and what was delivered before is left out; equal text, voice and seed make equal audio. Where there is none,
//!   the utterance fails, and the call does what it does for a failed device.

pub mod config;
pub mod link;
pub mod serve;
mod wire;

/// Reads `bytes` as what a gateway and what a worker sends; for fuzzing.
pub fn fuzz(bytes: &[u8]) {
    wire::fuzz(bytes);
}

#[cfg(test)]
mod tests;
