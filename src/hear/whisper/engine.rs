//! Where a recognition computes: on the CPU ([`super::network`]) or on a GPU ([`super::steps`]). What is decoded, and by
//! which rules, is the same for both.

use candle_core::Tensor;

use super::HearError;
use super::stop::Stop;
use crate::voice::features::Matrix;

/// Hears windows. Threads may share it.
pub(super) trait Engine: Send + Sync {
    /// Listens to a window of features `[frames, bands]`, so that a text can be written about it; `None` when stopped.
    fn hear<'a>(&'a self, features: Matrix, stop: &Stop) -> Result<Option<Box<dyn Text + 'a>>, HearError>;

    /// States `[positions, width]` of a window; `None` when stopped. For comparing with the reference.
    fn states(&self, features: Matrix, stop: &Stop) -> Result<Option<Vec<f32>>, HearError>;

    /// A text about given states. For comparing with the reference.
    fn about<'a>(&'a self, states: &[f32]) -> Result<Box<dyn Text + 'a>, HearError>;
}

/// A text that is being written about a window.
pub(super) trait Text: Send {
    /// Tokens that it has, its prompt included.
    fn len(&self) -> usize;

    /// Forgets what lies behind the first `length` tokens.
    fn rewind(&mut self, length: usize) -> Result<(), HearError>;

    /// Goes on with `tokens`, at least one; scores over the vocabulary of what follows the last of them.
    fn next(&mut self, tokens: &[u32]) -> Result<Vec<f32>, HearError>;

    /// The same, with the scores behind each of them, one after the other.
    fn each(&mut self, tokens: &[u32]) -> Result<Vec<f32>, HearError>;

    /// The same, with the weights of every layer over what was heard; `None` where they cannot be seen.
    fn watched(&mut self, tokens: &[u32]) -> Result<(Vec<f32>, Option<Vec<Tensor>>), HearError> {
        Ok((self.each(tokens)?, None))
    }

    /// Up to `width` texts side by side that go on from this one, which stays as it is and is not written meanwhile; `None`
    /// where there is no room for so many.
    fn beams(&self, width: usize) -> Option<Box<dyn Beams + '_>>;
}

/// Texts of one length about the same window. At first there is one: what is written already.
pub(super) trait Beams {
    /// Puts texts in place of those before, each given by the one that it goes on from and its next token; at least one, and
    /// no more than there is room for.
    /// Scores over the vocabulary of what follows each.
    fn next(&mut self, from: &[(usize, u32)]) -> Result<Vec<Vec<f32>>, HearError>;
}
