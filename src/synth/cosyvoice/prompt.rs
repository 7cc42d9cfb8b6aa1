//! From an utterance to the language model's input: prompt modes and lengths (section 3 of the reference).

use super::backend::Embed;
use super::config::{LlmConfig, SOS, TASK};
use super::text::{END_OF_PROMPT, SYSTEM, Tokenizer, TokenizerError};
use crate::text::without_tokens;
use crate::turn::Markup;
use crate::voice::file::Voice;

/// Speech tokens per text id below which the end is masked, and at which decoding stops.
const LENGTH: (u32, u32) = (2, 20);

/// How a voice is imitated.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Mode {
    /// Transcript and speech of the recording precede: the closest likeness.
    ZeroShot,
    /// Only the sound of the voice is used; for a recording in another language, or without transcript.
    CrossLingual,
    /// As cross-lingual, with an instruction how to speak.
    Instruct,
}

impl Mode {
    /// What fits a voice and an utterance: an instruction wins, else a transcript.
    pub fn of(voice: &Voice, instructions: Option<&str>) -> Self {
        match instructions {
            Some(text) if !text.trim().is_empty() => Mode::Instruct,
            _ if voice.transcript.trim().is_empty() => Mode::CrossLingual,
            _ => Mode::ZeroShot,
        }
    }
}

/// A language model input and the lengths of what it may answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LlmInput {
    /// Positions.
    pub prefix: Vec<Embed>,
    /// Ids of the text that is heard.
    pub spoken: u32,
    /// Speech tokens before which the end is masked.
    pub min_len: u32,
    /// Speech tokens after which it ends.
    pub max_len: u32,
}

/// The ids of the texts before what is spoken: up to and including the end of the prompt's instructions, and the transcript behind
/// it. No control token gets into them from either text.
///
/// # Errors
/// The texts cannot be encoded.
pub fn before(tokenizer: &Tokenizer, voice: &Voice, instructions: Option<&str>) -> Result<Vec<u32>, TokenizerError> {
    let (system, behind) = match Mode::of(voice, instructions) {
        Mode::ZeroShot => (SYSTEM.into(), without_tokens(voice.transcript.trim())),
        Mode::CrossLingual => (SYSTEM.into(), "".into()),
        Mode::Instruct => (format!("{SYSTEM} {}", without_tokens(instructions.unwrap_or_default().trim())), "".into()),
    };
    tokenizer.encode(&format!("{system}{END_OF_PROMPT}{behind}"))
}

/// The input that speaks `text` (normalised) like `voice` behind the ids of [`before`]. No control token gets into it from the
/// text.
///
/// Lengths count the ids of what the original calls `text` (section 5). In cross-lingual use that begins with the
/// system text.
///
/// # Errors
/// The text cannot be encoded.
pub fn input(
    tokenizer: &Tokenizer,
    config: &LlmConfig,
    voice: &Voice,
    (mode, before): (Mode, &[u32]),
    (text, markup): (&str, Markup),
) -> Result<LlmInput, TokenizerError> {
    let spoken = tokenizer.encode_words(text, markup)?;
    let heard = spoken.len() as u32;
    let count = if mode == Mode::CrossLingual { before.len() as u32 + heard } else { heard };
    let mut prefix = vec![Embed::Speech(config.control(SOS))];
    prefix.extend(before.iter().copied().map(Embed::Text));
    prefix.extend(spoken.into_iter().map(Embed::Text));
    prefix.push(Embed::Speech(config.control(TASK)));
    if mode == Mode::ZeroShot {
        prefix.extend(voice.tokens.iter().copied().map(Embed::Speech));
    }
    Ok(LlmInput { prefix, spoken: heard, min_len: count * LENGTH.0, max_len: count * LENGTH.1 })
}

/// What a text that is still being written is spoken behind.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StreamPrompt {
    /// Text ids up to and including the end of the instructions.
    pub system: Vec<u32>,
    /// Text ids after them: the transcript of the recording.
    pub transcript: Vec<u32>,
    /// Speech tokens of the recording.
    pub speech: Vec<u32>,
}

/// Speech tokens of a recording that is not shortened: 1.8 s.
const SHORT: usize = 45;

impl StreamPrompt {
    /// Rounds of `round` speech tokens, each behind ids of the text, until `wanted` were sampled. The first goes on with the
    /// round that the recording ends in.
    pub fn rounds(&self, wanted: usize, round: usize) -> usize {
        rounds(self.speech.len(), wanted, round)
    }

    /// The same prompt with the model's first round long enough for `wanted` tokens where that saves a round: a recording
    /// that ends late in a round leaves it less to sample, and the rest would wait for the next ids of the text. What is
    /// missing is left out of the beginning of the recording, less than a round of it, for the language model only; as many
    /// ids of the text are waited for as before.
    pub fn sooner(mut self, wanted: usize, round: usize) -> Self {
        let count = self.speech.len();
        if count >= SHORT {
            // One token of the last round stays, or the model would begin before it has read any of the text to come.
            let spare = (count % round).saturating_sub(1);
            let least = rounds(count - spare, wanted, round);
            let out = (0..=spare).find(|out| rounds(count - out, wanted, round) == least).unwrap_or_default();
            self.speech.drain(..out);
        }
        self
    }
}

fn rounds(speech: usize, wanted: usize, round: usize) -> usize {
    1 + wanted.saturating_sub(round - speech % round).div_ceil(round)
}

/// The prompt of a streamed utterance in `voice`, with the ids of [`before`].
pub fn streamed(tokenizer: &Tokenizer, voice: &Voice, (mode, before): (Mode, &[u32])) -> StreamPrompt {
    let mut system = before.to_vec();
    let end = system.iter().position(|&id| id == tokenizer.end_of_prompt()).map_or(system.len(), |at| at + 1);
    let transcript = system.split_off(end);
    let speech = if mode == Mode::ZeroShot { voice.tokens.clone() } else { Vec::new() };
    StreamPrompt { system, transcript, speech }
}

/// Most speech tokens of so many text ids.
pub fn longest(text: u32) -> u32 {
    text.saturating_mul(LENGTH.1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_first_chunk_waits_for_no_more_rounds_than_it_must() {
        const ROUND: usize = 15;
        for count in 0..200u32 {
            let prompt = StreamPrompt { system: Vec::new(), transcript: Vec::new(), speech: (0..count).collect() };
            for wanted in 8..36 {
                let sooner = prompt.clone().sooner(wanted, ROUND);
                assert!(prompt.speech.ends_with(&sooner.speech) && prompt.speech.len() - sooner.speech.len() < ROUND);
                assert_eq!(
                    sooner.speech.len().div_ceil(ROUND),
                    prompt.speech.len().div_ceil(ROUND),
                    "as many ids are read before it speaks"
                );
                assert!(sooner.rounds(wanted, ROUND) <= prompt.rounds(wanted, ROUND));
                if sooner.rounds(wanted, ROUND) == prompt.rounds(wanted, ROUND) {
                    assert_eq!(sooner.speech, prompt.speech, "nothing is left out in vain");
                }
            }
        }
        // A voice of 65 tokens, whose first chunk is 10 and a look-ahead of 3: five ids of text in place of ten.
        let prompt = StreamPrompt { system: Vec::new(), transcript: Vec::new(), speech: (0..65).collect() };
        assert_eq!(prompt.rounds(13, ROUND), 2);
        let sooner = prompt.sooner(13, ROUND);
        assert_eq!((sooner.rounds(13, ROUND), sooner.speech.len()), (1, 62));
    }
}
