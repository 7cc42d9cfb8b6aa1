//! From an utterance to segments that fit: the language model's positions, and the memory there is.
//!
//! Nothing that was accepted is refused for its length. Where the longest speech that a segment may become has no
//! room, it is bounded by the room; where its usual speech has none, the segment is cut, at a clause if there is one.

use std::borrow::Cow;
use std::collections::VecDeque;

use super::super::backend::{Backend, Extent};
use super::super::probe::Probe;
use super::super::prompt::Mode;
use super::super::schedule::Hops;
use super::super::{prompt, sample, text};
use super::{CosyVoice, Known, Segment};
use crate::synth::{Need, SynthError};
use crate::text::without_tokens;
use crate::turn::Utterance;
use crate::voice::file::Voice;

/// Speech tokens that a text id usually becomes, with room: what admission counts.
const USUAL_TOKENS: u32 = 10;
/// Text ids of a sentence.
const SENTENCE_IDS: u32 = 24;
/// Marks at which a clause ends.
const CLAUSES: [char; 9] = [',', ';', ':', '，', '；', '：', '、', '—', '–'];

/// What was made of the text of an utterance before it is opened.
pub(super) struct Prepared {
    /// Which voice it was made for: another recording has other prompts.
    pub(super) voice: String,
    pub(super) segments: VecDeque<Segment>,
}

impl<B: Backend + Probe> CosyVoice<B> {
    /// The segments of an utterance, ready to run.
    pub(super) fn segments(&self, utterance: &Utterance) -> Result<VecDeque<Segment>, SynthError> {
        let (name, known) = self.find_voice(utterance.voice.as_deref())?;
        let mut segments = VecDeque::new();
        // Before the rules as well: they leave a text alone that looks as if it held control tokens.
        let text = text::inlined(&utterance.text, &utterance.sounds);
        let text = without_tokens(&text);
        for text in text::segments(&text, &self.tokenizer) {
            self.fit(utterance, name, known, &text, &mut segments)?;
        }
        Ok(segments)
    }

    /// Appends `text` in as many segments as it takes.
    fn fit(
        &self,
        utterance: &Utterance,
        name: &str,
        known: &Known,
        text: &str,
        out: &mut VecDeque<Segment>,
    ) -> Result<(), SynthError> {
        let instructions = utterance.instructions.as_deref();
        let words = (text, utterance.markup);
        let (mode, before) = self.before(known, instructions)?;
        let mut input = prompt::input(&self.tokenizer, &self.config.llm, &known.voice, (mode, &*before), words)
            .map_err(|e| SynthError::Input(e.to_string()))?;
        let key = sample::key(text, instructions.unwrap_or_default(), name, utterance.seed);
        let room = self.backend.caps().positions.saturating_sub(input.prefix.len() as u32);
        let usual = (input.spoken * USUAL_TOKENS).min(input.max_len);
        let memory = self.backend.memory().total;
        let fits = usual <= room && (memory == 0 || self.memory_of(input.prefix.len(), usual) <= memory);
        if fits || self.forced.is_some() {
            input.max_len = input.max_len.min(room);
            input.min_len = input.min_len.min(input.max_len);
            out.push_back(Segment { input, key });
            return Ok(());
        }
        let Some(cut) = cut(text) else {
            return Err(SynthError::Input(format!(
                "voice `{name}` leaves no room to speak: enrol it with a shorter recording, or give the engine more \
                 memory ({room} positions and {memory} bytes are left)"
            )));
        };
        let (left, right) = text.split_at(cut);
        self.fit(utterance, name, known, left.trim_end(), out)?;
        self.fit(utterance, name, known, right.trim_start(), out)
    }

    /// How a voice speaks by these instructions, and the ids before what is spoken.
    pub(super) fn before<'a>(
        &self,
        known: &'a Known,
        instructions: Option<&str>,
    ) -> Result<(Mode, Cow<'a, [u32]>), SynthError> {
        let mode = Mode::of(&known.voice, instructions);
        if mode != Mode::Instruct {
            return Ok((mode, Cow::Borrowed(&known.before)));
        }
        let ids = prompt::before(&self.tokenizer, &known.voice, instructions);
        ids.map(|ids| (mode, Cow::Owned(ids))).map_err(|e| SynthError::Input(e.to_string()))
    }

    fn memory_of(&self, prefix: usize, tokens: u32) -> u64 {
        let frames = tokens * self.config.token_mel_ratio as u32;
        self.backend.memory_needed(Extent { positions: prefix as u32 + tokens, frames })
    }

    /// What the longest of `segments` will hold: they follow one another.
    pub(super) fn need(&self, segments: &VecDeque<Segment>) -> Need {
        let need = |tokens: fn(&Segment) -> u32| {
            let each = |s: &Segment| {
                self.memory_of(s.input.prefix.len(), self.forced_length(s.input.spoken).unwrap_or_else(|| tokens(s)))
            };
            segments.iter().map(each).max().unwrap_or_default()
        };
        Need {
            expected: need(|s| (s.input.spoken * USUAL_TOKENS).min(s.input.max_len)),
            most: need(|s| s.input.max_len),
        }
    }
}

impl<B: Backend + Probe> CosyVoice<B> {
    /// What a text that is still being written will hold, by the usual length of a sentence.
    pub(super) fn need_streamed(&self, utterance: &Utterance) -> Result<Need, SynthError> {
        let (_, known) = self.find_voice(utterance.voice.as_deref())?;
        let memory = |ids: u32| self.memory_of(known.voice.tokens.len() * 2, ids * USUAL_TOKENS);
        let (expected, total) = (memory(SENTENCE_IDS), self.backend.memory().total);
        let most = if self.caps.limits.grows { memory(2 * SENTENCE_IDS) } else { expected };
        let within = |bytes: u64| if total == 0 { bytes } else { bytes.min(total) };
        Ok(Need { expected: within(expected), most: within(most) })
    }

    /// Speech tokens of the first chunk behind a recording of `prompt` tokens, and those that it is sampled with.
    pub(super) fn first_chunk(&self, prompt: u32) -> usize {
        Hops::new(self.settings.hops, &self.config, prompt).wanted() as usize
    }

    /// Text ids that a text which is still being written has to have before it sounds in `voice`: the recording's speech is
    /// fed behind so many, of which its transcript has some, or all; and each round that the first chunk takes behind the
    /// first one waits for as many again.
    pub(super) fn starts_after(&self, voice: &Voice, before: &[u32]) -> Option<u32> {
        if !self.backend.extends() {
            return None;
        }
        let prompt = prompt::streamed(&self.tokenizer, voice, (Mode::of(voice, None), before));
        let [text, speech] = self.config.llm.mix_ratio;
        let wanted = self.first_chunk(voice.tokens.len() as u32);
        let prompt = prompt.sooner(wanted, speech);
        let heard = if prompt.speech.is_empty() { text } else { prompt.speech.len().div_ceil(speech) * text };
        let more = (prompt.rounds(wanted, speech) - 1) * text;
        Some((heard + more).saturating_sub(prompt.transcript.len()).max(1) as u32)
    }
}

/// Where a text that is too long is cut: behind the clause nearest to its middle, if one ends in its middle half; else
/// at the gap nearest to the middle, else at the middle. Never inside a tag (`<|...|>`). `None`: it is one character.
fn cut(text: &str) -> Option<usize> {
    let middle = text.len() / 2;
    // Byte offset, whether a clause ends there, whether a gap begins there.
    let mut places = Vec::new();
    let mut tag = false;
    for (at, c) in text.char_indices() {
        let (before, from) = text.split_at(at);
        tag &= !before.ends_with("|>");
        if at > 0 && !tag {
            places.push((at, before.ends_with(CLAUSES), c.is_whitespace()));
        }
        tag |= from.starts_with("<|") && from.contains("|>");
    }
    let nearest = |wanted: &dyn Fn(&&(usize, bool, bool)) -> bool| {
        places.iter().filter(wanted).map(|(at, ..)| *at).min_by_key(|at| at.abs_diff(middle))
    };
    let clause = nearest(&|(_, clause, _)| *clause).filter(|at| at.abs_diff(middle) <= text.len() / 4);
    clause.or_else(|| nearest(&|(_, _, gap)| *gap)).or_else(|| nearest(&|_| true))
}

#[cfg(test)]
mod tests {
    use super::cut;

    fn halves(text: &str) -> (&str, &str) {
        text.split_at(cut(text).expect("it can be cut"))
    }

    #[test]
    fn long_text_is_cut_at_a_clause_a_gap_or_anywhere() {
        assert_eq!(halves("one two, three four five"), ("one two,", " three four five"));
        assert_eq!(halves("a, b c d e f g h"), ("a, b c d", " e f g h"), "the clause is too far from the middle");
        assert_eq!(halves("你好世界"), ("你好", "世界"));
        assert_eq!(halves("aaaaaaaa<|x y|>b"), ("aaaaaaaa", "<|x y|>b"));
        assert_eq!(cut("a"), None);
    }
}
