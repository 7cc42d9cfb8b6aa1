//! Utterances whose text is still being written: [`Bistream`] between the text and the flow.
//!
//! A [`TextStream`] belongs to its job and holds what the language model has been fed, never a tensor.
//!
//! # Why
//! A pause of the model is 5 text ids every 15 tokens, so a burst of decoding ends by itself after a fraction of a
//! second of speech. Between bursts no state is held on the device: the next one runs the whole sequence again as
//! one prefill, a few milliseconds on a GPU, and so needs nothing of a backend that it does not have.

use std::collections::VecDeque;

use super::super::backend::{Backend, Embed, Sampling, SlotRequest};
use super::super::bistream::{Action, Bistream, Prompt};
use super::super::probe::Probe;
use super::super::prompt;
use super::super::sample;
use super::super::text;
use super::{CosyVoice, Job, Run, push};
use crate::synth::{Slot, Stages, SynthError, TextOrder};
use crate::text::without_tokens;
use crate::turn::{Markup, Utterance};

/// Marks after which a sentence goes on.
const COMMAS: [char; 3] = ['，', ',', '、'];
/// Characters without a gap after which text is cut anywhere: no word is as long.
const LONGEST_WORD: usize = 80;

/// The text of one utterance as it comes, and where the model stands in it.
pub(super) struct TextStream {
    machine: Bistream,
    /// Everything the model has been fed.
    fed: Vec<Embed>,
    /// Characters of a word that may go on.
    rest: String,
    /// Text ids so far.
    ids: u32,
    /// Speech tokens so far.
    spoken: u32,
    ended: bool,
    key: [u32; 2],
    markup: Markup,
}

impl TextStream {
    pub(super) fn is_waiting(&self) -> bool {
        self.machine.is_waiting()
    }
}

/// The length of what of `text` is whole words: up to the last gap, or up to the last mark, included, of a script
/// without gaps. A word keeps the space before it, as the tokenizer cuts.
fn whole_words(text: &str) -> usize {
    let gap = text.char_indices().rev().find(|(_, c)| c.is_whitespace()).map_or(0, |(at, _)| at);
    let is_mark = |c: char| "。？！；：、，".contains(c);
    let mark = text.char_indices().rev().find(|(_, c)| is_mark(*c)).map_or(0, |(at, c)| at + c.len_utf8());
    let cut = gap.max(mark);
    if cut == 0 && text.chars().count() > LONGEST_WORD { text.len() } else { cut }
}

impl<B: Backend + Probe> CosyVoice<B> {
    /// See [`crate::synth::Synthesizer::open_streamed`].
    pub(super) fn open_text(
        &mut self,
        slot: Slot,
        utterance: &Utterance,
        order: TextOrder,
    ) -> Result<Stages, SynthError> {
        self.jobs.remove(&slot);
        self.backend.close(slot);
        let instructions = utterance.instructions.as_deref();
        let (name, known) = self.find_voice(utterance.voice.as_deref())?;
        // The text is not known yet and so is no part of what the samples depend on.
        let key = sample::key("", instructions.unwrap_or_default(), name, utterance.seed);
        let (voice, prompt_tokens) = (known.handle, known.voice.tokens.len() as u32);
        let prompt = prompt::streamed(&self.tokenizer, &known.voice, instructions)
            .map_err(|e| SynthError::Input(e.to_string()))?;
        let parts = Prompt { system: &prompt.system, transcript: &prompt.transcript, speech: &prompt.speech };
        let machine = Bistream::new(&self.config.llm, order, &parts);
        let markup = utterance.markup;
        let (fed, rest) = (Vec::new(), String::new());
        let text = TextStream { machine, fed, rest, ids: 0, spoken: 0, ended: false, key, markup };
        self.backend.prepare_voice(voice)?;
        let sampling = Sampling { key, min_len: 0, max_len: 0, min_length: self.settings.min_length, forced: None };
        self.backend.open(slot, SlotRequest { voice, prefix: Vec::new(), sampling, speed: utterance.speed })?;
        let mut now = Run::new(&self.settings, &self.config, prompt_tokens);
        now.prefilled = true;
        let speed = utterance.speed;
        let segments = VecDeque::new();
        self.jobs.insert(slot, Job { voice, prompt_tokens, speed, segments, before: 0, now, text: Some(text) });
        self.append_text(slot, &utterance.text, false)
    }

    /// See [`crate::synth::Synthesizer::append`].
    pub(super) fn append_text(&mut self, slot: Slot, piece: &str, last: bool) -> Result<Stages, SynthError> {
        let hold_back = self.backend.hold_back();
        let refuse = |reason: &str| SynthError::Input(reason.into());
        let job = self.jobs.get_mut(&slot).ok_or_else(|| refuse("the slot is not open"))?;
        let Some(stream) = &mut job.text else { return Err(refuse("the slot speaks a whole text")) };
        if stream.ended {
            return Err(refuse("the text has ended"));
        }
        stream.rest.push_str(piece);
        let cut = if last { stream.rest.len() } else { whole_words(&stream.rest) };
        let words: String = stream.rest.drain(..cut).collect();
        let words = without_tokens(&words);
        if !words.trim().is_empty() {
            // What is joined to words before keeps its gap, and a comma that text follows stays one: the rules make
            // a stop of it at the end of a text.
            let gap = if words.starts_with(char::is_whitespace) && stream.ids > 0 { " " } else { "" };
            let bare = if last { &*words } else { words.trim_end_matches(COMMAS) };
            let normal = format!("{gap}{}{}", text::normalize(bare), &words[bare.len()..]);
            let ids =
                self.tokenizer.encode_words(&normal, stream.markup).map_err(|e| SynthError::Input(e.to_string()))?;
            stream.ids += ids.len() as u32;
            stream.machine.arrive(&ids);
        }
        if last {
            stream.ended = true;
            stream.machine.finish();
            if stream.ids == 0 {
                // Nothing to say: the flow gets its end, and what comes of it is silence of no length.
                job.now.decoded = true;
                job.now.finished = true;
                return Ok(Stages::NONE.with(crate::synth::Stage::Vocode));
            }
        }
        Ok(job.ready(hold_back))
    }

    /// Decodes to the next pause, or as many tokens as lie between two. Returns why the utterance cannot go on.
    pub(super) fn decode_streamed(&mut self, slot: Slot) -> Result<Option<SynthError>, SynthError> {
        let limit = self.backend.caps().positions as usize;
        let Some(job) = self.jobs.get_mut(&slot) else { return Ok(None) };
        let Some(stream) = &mut job.text else { return Ok(None) };
        let burst = self.config.llm.mix_ratio[1] + 1;
        let longest = prompt::longest(stream.ids);
        let (ras, key, min_length) = (self.config.llm.sampling, stream.key, self.settings.min_length);
        let run = &mut job.now;
        let mut left = burst;
        let mut failed = None;
        self.backend.llm_feed(&mut |scores| {
            if let Some(scores) = scores {
                let mut scores = scores.to_vec();
                let drawn = stream.machine.decide(&mut scores, min_length, |scores, items| {
                    sample::draw(scores, items, &ras, key, items.len() as u32)
                });
                match drawn {
                    Ok(Some(token)) => {
                        stream.spoken += 1;
                        run.tokens.extend(Some(token).filter(|&t| run.thinner.keeps(t)));
                    }
                    Ok(None) => {}
                    Err(error) => {
                        failed = Some(error);
                        return None;
                    }
                }
                left -= 1;
            }
            match stream.machine.poll() {
                Action::Feed(ids) if left > 0 => {
                    // The first of a burst brings back everything before it.
                    let again = if left == burst { stream.fed.clone() } else { Vec::new() };
                    stream.fed.extend(&ids);
                    (stream.fed.len() <= limit).then(|| [again, ids].concat())
                }
                _ => None,
            }
        })?;
        let over = stream.ended && stream.spoken >= longest || stream.fed.len() > limit;
        run.decoded |= over || stream.machine.poll() == Action::Done;
        Ok(failed.or_else(|| push(&mut self.backend, slot, run).err()))
    }
}

#[cfg(test)]
mod tests {
    use super::whole_words;

    #[test]
    fn a_word_that_may_go_on_is_kept_back() {
        assert_eq!(whole_words("Hello wor"), 5);
        assert_eq!(whole_words("Hello"), 0);
        assert_eq!(whole_words("Hello "), 5);
        assert_eq!(whole_words("你好，世"), "你好，".len());
        assert_eq!(whole_words(&"x".repeat(90)), 90);
    }
}
