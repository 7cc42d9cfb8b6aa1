//! Utterances whose text is still being written: [`Bistream`] between the text and the flow.
//!
//! A [`TextStream`] belongs to its job and holds what the language model has been fed, never a tensor.
//!
//! # Why
//! A pause of the model is 5 text ids every 15 tokens, so a burst of decoding ends by itself after a fraction of a
//! second of speech. Where the backend takes stretches ([`Backend::extends`]) a burst is one: its input is fed behind
//! what the slot's cache holds (a prefill of some five positions, together with those of other slots), its rows decode
//! among all others, and a slot that waits for text is in no step. Elsewhere nothing is held on the device between bursts:
//! each runs the whole sequence again, by itself.

use std::collections::VecDeque;

use super::super::backend::{Backend, Embed, End, Sampling, SlotRequest};
use super::super::bistream::{Action, Bistream, Prompt};
use super::super::probe::Probe;
use super::super::prompt;
use super::super::sample;
use super::super::text;
use super::{CosyVoice, Job, Run, push};
use crate::synth::{Slot, Stage, Stages, SynthError, TextOrder};
use crate::text::without_tokens;
use crate::turn::{Markup, NotBefore, Saying, Utterance, WordTimes};

/// Marks after which a sentence goes on.
const COMMAS: [char; 3] = ['，', ',', '、'];
/// Of a script that does not set words apart: ideographs, kana, and their marks.
fn is_dense(c: char) -> bool {
    matches!(c, '\u{3000}'..='\u{30ff}' | '\u{3400}'..='\u{9fff}' | '\u{f900}'..='\u{faff}' | '\u{ff00}'..='\u{ff60}'
        | '\u{20000}'..='\u{3134f}')
}

/// Characters without a gap after which text is cut anywhere: no word is as long.
const LONGEST_WORD: usize = 80;

/// The text of one utterance as it comes, and where the model stands in it.
pub(super) struct TextStream {
    machine: Bistream,
    /// Everything the model has been fed.
    fed: Vec<Embed>,
    /// A word that may go on.
    rest: Saying,
    /// Text ids so far.
    ids: u32,
    /// Speech tokens so far.
    spoken: u32,
    ended: bool,
    /// The backend takes stretches.
    batched: bool,
    /// The backend has a stretch that has not ended, and what it may sample of it yet.
    running: bool,
    left: u32,
    key: [u32; 2],
    markup: Markup,
    order: Given,
}

/// Which text the model had when: no word sounds before it.
struct Given {
    words: WordTimes,
    /// Text ids of the prompt's transcript.
    transcript: usize,
    /// Text ids that the model had when this was last looked at.
    ids: usize,
    /// Pieces of the text that the model does not have from their first id on: that id, and the characters before.
    pieces: VecDeque<(usize, usize)>,
    /// Characters of the text so far, white space left out.
    letters: usize,
}

impl Given {
    /// A piece of the text that is as long becomes text ids from `from` on.
    fn piece(&mut self, from: u32, text: &str) {
        self.pieces.push_back((from as usize, self.letters));
        self.letters += text.chars().filter(|c| !c.is_whitespace()).count();
    }

    /// The model has so many ids now, after speech of so many samples: pieces that begin behind what it had sound later.
    fn update(&mut self, given: usize, samples: u64) {
        let had = std::mem::replace(&mut self.ids, given.saturating_sub(self.transcript));
        if self.ids == had {
            return;
        }
        while self.pieces.front().is_some_and(|(from, _)| *from < had) {
            self.pieces.pop_front();
        }
        // All that it has now, whether a piece of it begins there or not, sounds from here on.
        if let Some((_, letters)) = self.pieces.front().filter(|(from, _)| *from < self.ids) {
            self.words.begin(NotBefore { letters: *letters, samples });
        }
    }
}

impl TextStream {
    /// Tells what of the text the model had not been given before `run` had so much speech.
    fn note_order(&mut self, run: &Run, token_samples: f64) {
        let samples = (run.tokens.len() as f64 * token_samples) as u64;
        self.order.update(self.machine.given(), samples);
    }

    /// What it can run of the language model; `None`: it waits for text.
    pub(super) fn next_stage(&self) -> Option<Stage> {
        match (self.running, self.machine.is_waiting()) {
            (true, _) => Some(Stage::Decode),
            (false, true) => None,
            (false, false) => Some(if self.batched { Stage::Prefill } else { Stage::Decode }),
        }
    }

    /// Samples until its next pause, at most.
    pub(super) fn left(&self) -> u32 {
        self.left
    }

    /// The backend was given its stretch; `fed`: and has run what is fed before it.
    pub(super) fn run(&mut self, fed: bool) {
        self.running = fed;
    }
}

/// The length of what of `text` is whole words: up to the last gap, or up to the last character, included, of a script
/// without gaps. A word keeps the space before it, as the tokenizer cuts.
///
/// Not inside a piece whose phonemes are given: it becomes tokens as a whole.
fn whole_words(said: &Saying) -> usize {
    let text = said.text.as_str();
    let gap = text.char_indices().rev().find(|(_, c)| c.is_whitespace()).map_or(0, |(at, _)| at);
    let dense = text.char_indices().rev().find(|(_, c)| is_dense(*c)).map_or(0, |(at, c)| at + c.len_utf8());
    let cut = gap.max(dense);
    let inside = said.sounds.iter().find(|(at, _)| at.start < cut && cut < at.end);
    // The gap before it stays with it.
    let cut = inside.map_or(cut, |(at, _)| text[..at.start].trim_end().len());
    if cut == 0 && text.chars().count() > LONGEST_WORD { text.len() } else { cut }
}

/// The first bytes of what is said, and what is given of them; the rest stays.
fn take_front(said: &mut Saying, bytes: usize) -> Saying {
    let rest = said.text.split_off(bytes);
    let behind = said.sounds.iter().position(|(at, _)| at.start >= bytes).unwrap_or(said.sounds.len());
    let sounds = said.sounds.split_off(behind);
    let sounds = sounds.into_iter().map(|(at, sound)| (at.start - bytes..at.end - bytes, sound)).collect();
    std::mem::replace(said, Saying { text: rest, sounds })
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
        let (voice, prompt_tokens, level) = (known.handle, known.voice.tokens.len() as u32, known.level);
        let (mode, before) = self.before(known, instructions)?;
        let prompt = prompt::streamed(&self.tokenizer, &known.voice, (mode, &*before));
        // The reference's order is compared to the id: with the whole recording.
        let prompt = match order {
            TextOrder::Fixed => prompt.sooner(self.first_chunk(prompt_tokens), self.config.llm.mix_ratio[1]),
            TextOrder::Reference => prompt,
        };
        let parts = Prompt { system: &prompt.system, transcript: &prompt.transcript, speech: &prompt.speech };
        let machine = Bistream::new(&self.config.llm, order, &parts);
        let markup = utterance.markup;
        let (words, transcript) = (utterance.words.clone(), prompt.transcript.len());
        let order = Given { words, transcript, ids: 0, pieces: VecDeque::new(), letters: 0 };
        let (fed, rest) = (Vec::new(), Saying::default());
        let text = TextStream {
            machine,
            fed,
            rest,
            ids: 0,
            spoken: 0,
            ended: false,
            batched: self.backend.extends(),
            running: false,
            left: u32::MAX,
            key,
            markup,
            order,
        };
        if !text.batched {
            // There is no prefill to do it in.
            self.backend.prepare_voice(voice)?;
        }
        let sampling = Sampling { key, min_len: 0, max_len: 0, min_length: self.settings.min_length, forced: None };
        self.backend.open(slot, SlotRequest { voice, prefix: Vec::new(), sampling, speed: utterance.speed })?;
        let mut now = Run::new(&self.settings, &self.config, prompt_tokens);
        now.prefilled = true;
        let speed = utterance.speed;
        let segments = VecDeque::new();
        let text = Some(text);
        self.jobs.insert(slot, Job { voice, prompt_tokens, speed, segments, before: 0, now, level, text });
        self.append_text(slot, &utterance.said(), false)
    }

    /// See [`crate::synth::Synthesizer::append`].
    pub(super) fn append_text(&mut self, slot: Slot, piece: &Saying, last: bool) -> Result<Stages, SynthError> {
        let hold_back = self.backend.hold_back();
        let token_samples = self.token_samples(slot);
        let refuse = |reason: &str| SynthError::Input(reason.into());
        let job = self.jobs.get_mut(&slot).ok_or_else(|| refuse("the slot is not open"))?;
        let Some(stream) = &mut job.text else { return Err(refuse("the slot speaks a whole text")) };
        if stream.ended {
            return Err(refuse("the text has ended"));
        }
        stream.rest.push(&piece.text, piece.sounds.iter().cloned());
        let cut = if last { stream.rest.text.len() } else { whole_words(&stream.rest) };
        let words = take_front(&mut stream.rest, cut);
        stream.order.piece(stream.ids, &words.text);
        // Before anything else that is done to it: places in it are no longer known afterwards.
        let words = text::inlined(&words.text, &words.sounds);
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
        }
        stream.note_order(&job.now, token_samples);
        if last && stream.ids == 0 {
            // Nothing to say: the flow gets its end, and what comes of it is silence of no length.
            job.now.decoded = true;
            job.now.finished = true;
            return Ok(Stages::NONE.with(crate::synth::Stage::Vocode));
        }
        Ok(job.ready(hold_back))
    }

    /// Before the prefill of `slot`: hands the backend the next stretch where its text is still being written. Whether there
    /// is anything to prefill.
    ///
    /// Not earlier, when the text comes: the slot may be in a launched step then.
    pub(super) fn start_stretch(&mut self, slot: Slot) -> Result<bool, SynthError> {
        let length = self.jobs.get(&slot).and_then(|job| self.forced_length(job.text.as_ref()?.ids));
        let Some(job) = self.jobs.get_mut(&slot) else { return Ok(false) };
        let Some(stream) = &mut job.text else { return Ok(true) };
        if stream.running || job.now.decoded {
            return Ok(false);
        }
        // A text that is complete is not spoken for ever.
        let longest = length.unwrap_or_else(|| prompt::longest(stream.ids));
        let limit = if stream.ended { longest.saturating_sub(stream.spoken) } else { u32::MAX };
        let Some(stretch) = stream.machine.stretch(self.settings.min_length, limit) else { return Ok(false) };
        if stretch.most == 0 {
            job.now.decoded = true;
            push(&mut self.backend, slot, &mut job.now)?;
            return Ok(false);
        }
        stream.left = stretch.most;
        match self.backend.extend(slot, stretch) {
            Err(SynthError::Input(reason)) if stream.spoken > 0 => {
                tracing::warn!(slot = slot.0, reason, "a text that was written on and on is not spoken to its end");
                job.now.decoded = true;
                push(&mut self.backend, slot, &mut job.now)?;
                Ok(false)
            }
            result => result.map(|()| true),
        }
    }

    /// Takes what the backend drew of a stretch.
    pub(super) fn take_stretch(&mut self, slot: Slot, tokens: &[u32], ended: Option<End>) -> Result<(), SynthError> {
        let token_samples = self.token_samples(slot);
        let Some(job) = self.jobs.get_mut(&slot) else { return Ok(()) };
        let Some(stream) = &mut job.text else { return Ok(()) };
        stream.machine.absorb(tokens, ended)?;
        stream.spoken += tokens.len() as u32;
        stream.left = stream.left.saturating_sub(tokens.len() as u32);
        let run = &mut job.now;
        run.tokens.extend(tokens.iter().copied().filter(|&token| run.thinner.keeps(token)));
        stream.note_order(run, token_samples);
        if let Some(ended) = ended {
            stream.running = false;
            // At its limit a text that is complete is over, whatever the model has left to say; and where the backend has
            // no more room than that, any is.
            let cut = ended == End::Length && (stream.machine.is_finishing() || stream.left > 0);
            run.decoded |= stream.machine.poll() == Action::Done || cut;
        }
        push(&mut self.backend, slot, run)
    }

    /// Samples of a speech token of `slot`, at the speed that it is played at.
    fn token_samples(&self, slot: Slot) -> f64 {
        let speed = self.jobs.get(&slot).map_or(1.0, |job| f64::from(job.speed));
        (self.config.token_mel_ratio * self.config.hift.frame_samples()) as f64 / speed
    }

    /// Whether the backend decodes the streamed slot among others.
    pub(super) fn is_batched(&self, slot: Slot) -> bool {
        self.backend.extends() || self.jobs.get(&slot).is_none_or(|job| job.text.is_none())
    }

    /// Decodes to the next pause, or as many tokens as lie between two. Returns why the utterance cannot go on.
    pub(super) fn decode_streamed(&mut self, slot: Slot) -> Result<Option<SynthError>, SynthError> {
        let limit = self.backend.caps().positions as usize;
        let token_samples = self.token_samples(slot);
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
                let sampled = stream.machine.decide(&mut scores, min_length, |scores, items| {
                    sample::next_id(scores, items, &ras, key, items.len() as u32)
                });
                match sampled {
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
        stream.note_order(run, token_samples);
        let over = stream.ended && stream.spoken >= longest || stream.fed.len() > limit;
        run.decoded |= over || stream.machine.poll() == Action::Done;
        Ok(failed.or_else(|| push(&mut self.backend, slot, run).err()))
    }
}

#[cfg(test)]
mod tests {
    use super::{Saying, take_front, text};
    use crate::turn::Phonemes;

    fn whole_words(text: &str) -> usize {
        super::whole_words(&text.into())
    }

    #[test]
    fn what_sounds_as_it_is_given_is_never_cut() {
        let york = (6..14, Phonemes::Espeak("nu:'jo@k".into()));
        let mut said = Saying { text: "I saw New York".into(), sounds: vec![york.clone()] };
        assert_eq!(super::whole_words(&said), 5, "the gap within it is no end of a word");
        said.push(" and 重庆", [(5..11, Phonemes::Pinyin { pinyin: "chong2 qing4".into() })]);
        let whole = super::whole_words(&said);
        assert_eq!(whole, said.text.len(), "nothing follows on an ideograph");
        let front = take_front(&mut said, 14);
        assert_eq!((front.text.as_str(), front.sounds), ("I saw New York", vec![york]));
        assert_eq!((said.text.as_str(), said.sounds[0].0.clone()), (" and 重庆", 5..11));
        assert_eq!(take_front(&mut said, 5).sounds, []);
        assert_eq!(text::inlined(&said.text, &said.sounds).chars().count(), 4, "an initial and a final each");
        // A piece that is longer than a word may be does not hold the text up for ever.
        let long = Saying { text: "x".repeat(90), sounds: vec![(0..90, Phonemes::Espeak("a".into()))] };
        assert_eq!(super::whole_words(&long), 90);
    }

    #[test]
    fn a_word_that_may_go_on_is_kept_back() {
        assert_eq!(whole_words("Hello wor"), 5);
        assert_eq!(whole_words("Hello"), 0);
        assert_eq!(whole_words("Hello "), 5);
        assert_eq!(whole_words("你好，世"), "你好，世".len(), "a character of such a script is not gone on with");
        assert_eq!(whole_words("你好wor"), "你好".len());
        assert_eq!(whole_words(&"x".repeat(90)), 90);
    }
}
