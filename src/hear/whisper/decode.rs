//! From sound to text: windows, languages, temperatures, and texts that were not said.
//!
//! # Why
//! As the reference: the likeliest text first, and where its probability or its repetitions make it doubtful, again
//! at higher temperatures. Unlike the reference a text that runs into a loop is stopped there and then, and no text
//! is longer than speech of its length can be: on a call a second of noise must not cost the time of a minute.

use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use super::beams;
use super::engine::Text;
use super::quality::{self, Limits, Suppressed};
use super::rules::{Rules, likeliest, log_sum_exp, sampled};
use super::stop::Stop;
use super::{HearError, RATE, Whisper};

/// More tokens than anybody says in a second, in scripts with several tokens a letter too.
const TOKENS_A_SECOND: usize = 24;
/// On top of them: control tokens and short words.
const SPARE_TOKENS: usize = 16;

/// How to recognise.
#[derive(Clone, Debug, PartialEq)]
pub struct Options {
    /// BCP 47 tag; `None`: the model finds out, where it knows several.
    pub language: Option<String>,
    /// Whether segments have times. Sound longer than a window always gets them.
    pub timestamps: bool,
    /// Tried one after the other while the text is doubtful; 0 takes the likeliest token.
    pub temperatures: Vec<f32>,
    /// What is doubtful.
    pub limits: Limits,
    /// Same sound and seed: same text, at every temperature.
    pub seed: u64,
    /// Texts that are written side by side at temperature 0, of which the likeliest counts, where the device can
    /// ([`super::BEAMS`] is the reference's number); up to 1: the likeliest token counts.
    pub beams: usize,
}

impl Default for Options {
    fn default() -> Self {
        // Fewer steps than the reference's six: somebody waits.
        Self {
            language: None,
            timestamps: false,
            temperatures: vec![0.0, 0.4, 0.8],
            limits: Limits::default(),
            seed: 0,
            beams: 1,
        }
    }
}

/// What was said.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Transcript {
    /// All of it, without white space around it; empty where there was no speech.
    pub text: String,
    /// ISO 639 code, given or found.
    pub language: String,
    /// Its parts.
    pub segments: Vec<Segment>,
    /// Geometric mean probability of the tokens, 0 to 1.
    pub confidence: f32,
    /// Probability that there was no speech, 0 to 1.
    pub no_speech: f32,
    /// The last reason for which text was dropped.
    pub suppressed: Option<Suppressed>,
}

/// A part of what was said. Seconds from the beginning of the sound.
#[derive(Clone, Debug, PartialEq)]
pub struct Segment {
    /// Where it begins.
    pub start: f64,
    /// Where it ends.
    pub end: f64,
    /// Its text.
    pub text: String,
}

/// One text about one window.
struct Draft {
    tokens: Vec<u32>,
    text: String,
    /// Mean log probability.
    probability: f32,
    repeats: bool,
}

/// The beginning of a window's texts: behind the prompt.
struct Opening<'a> {
    text: Box<dyn Text + 'a>,
    /// Tokens of the prompt.
    length: usize,
    scores: Vec<f32>,
    no_speech: f32,
    language: Option<(String, u32)>,
}

impl Whisper {
    /// What was said in `samples` (16 kHz, mono, -1..=1); `None` when `stop` was set meanwhile. Any length.
    ///
    /// # Errors
    /// The model does not know the language of the options, or the device fails.
    pub fn transcribe(&self, samples: &[f32], options: &Options, stop: &Stop) -> Result<Option<Transcript>, HearError> {
        let mut language = match &options.language {
            Some(tag) if !self.knows(tag) => return Err(HearError::Language(tag.clone())),
            Some(tag) => self.tokens.language(tag),
            None => None,
        };
        let mut whole =
            Transcript { language: self.only_language().unwrap_or_default().into(), ..Transcript::default() };
        let (mut at, mut weights) = (0, 0.0);
        let (mut probability, window) = (0.0, self.config.window);
        while at < samples.len() {
            let piece = &samples[at..samples.len().min(at + window)];
            let Some(text) = self.listen(piece, stop)? else { return Ok(None) };
            // Only times tell where the next window has to begin.
            let timestamps = options.timestamps || at + window < samples.len();
            let Some(mut opening) = self.open(text, language.take(), timestamps, stop)? else { return Ok(None) };
            let Some(draft) = self.settle(&mut opening, piece.len(), timestamps, options, stop)? else {
                return Ok(None);
            };
            let offset = at as f64 / RATE as f64;
            let (mut segments, step) = self.segments(&draft.tokens, piece.len(), offset);
            whole.no_speech = opening.no_speech;
            whole.suppressed = doubt(&draft, opening.no_speech, &options.limits).or(whole.suppressed);
            if doubt(&draft, opening.no_speech, &options.limits).is_none() {
                let weight = draft.tokens.len() as f32 + 1.0;
                (probability, weights) = (probability + draft.probability * weight, weights + weight);
                whole.segments.append(&mut segments);
            }
            if let Some((code, _)) = &opening.language {
                whole.language.clone_from(code);
            }
            language = opening.language;
            at += if timestamps { step } else { piece.len() };
        }
        whole.segments.retain(|segment| !segment.text.is_empty());
        whole.text = whole.segments.iter().map(|s| s.text.as_str()).collect::<Vec<_>>().join(" ");
        whole.confidence = if whole.text.is_empty() { 0.0 } else { (probability / weights).exp() };
        Ok(Some(whole))
    }

    /// Reads the prompt, finding out the language where it is not given and there are several.
    fn open<'a>(
        &self,
        mut text: Box<dyn Text + 'a>,
        language: Option<(String, u32)>,
        timestamps: bool,
        stop: &Stop,
    ) -> Result<Option<Opening<'a>>, HearError> {
        let scores = text.next(&[self.tokens.start])?;
        if stop.is_set() {
            return Ok(None);
        }
        let id = self.tokens.no_speech as usize;
        let no_speech = (scores.get(id).copied().unwrap_or(f32::NEG_INFINITY) - log_sum_exp(&scores)).exp();
        let score = |id: u32| scores.get(id as usize).copied().unwrap_or(f32::NEG_INFINITY);
        let language = language.or_else(|| {
            let all = self.tokens.languages.iter();
            let likeliest = all.max_by(|a, b| score(*a.1).total_cmp(&score(*b.1)));
            likeliest.map(|(code, id)| (code.clone(), *id))
        });
        let prompt = self.tokens.prompt(language.as_ref().map(|(_, id)| *id), timestamps);
        let scores = if prompt.is_empty() { scores } else { text.next(&prompt)? };
        Ok(Some(Opening { length: text.len(), text, scores, no_speech, language }))
    }

    /// The first text that is not doubtful, else the last; `None` when stopped.
    fn settle(
        &self,
        opening: &mut Opening<'_>,
        samples: usize,
        timestamps: bool,
        options: &Options,
        stop: &Stop,
    ) -> Result<Option<Draft>, HearError> {
        let room = self.config.sizes.max_target_positions.saturating_sub(opening.length);
        // The reference's limit, and what can be said in the time.
        let most =
            (self.config.sizes.max_target_positions / 2).min(SPARE_TOKENS + samples * TOKENS_A_SECOND / RATE).min(room);
        let rules = Rules { tokens: &self.tokens, timestamps };
        let mut random = StdRng::seed_from_u64(options.seed);
        let mut last = None;
        for temperature in options.temperatures.iter().copied().chain(options.temperatures.is_empty().then_some(0.0)) {
            let mut choose = |scores: &[f32]| match temperature > 0.0 {
                true => sampled(scores, temperature, random.random()),
                false => likeliest(scores),
            };
            let draft = match options.beams {
                width @ 2.. if temperature == 0.0 && most > 0 => self.search(opening, &rules, (width, most), stop)?,
                _ => None,
            };
            let draft = match draft {
                Some(draft) => draft,
                None if stop.is_set() => return Ok(None),
                None => match self.write(opening, &rules, most, &mut choose, stop)? {
                    Some(draft) => draft,
                    None => return Ok(None),
                },
            };
            let limits = &options.limits;
            let unlikely = draft.probability < limits.log_probability;
            // Where there is no speech every text is unlikely: another try would only find another one.
            let silent = unlikely && opening.no_speech > limits.no_speech;
            let again = (unlikely || repeats(&draft, limits)) && !silent;
            last = Some(draft);
            if !again {
                break;
            }
        }
        Ok(last)
    }

    /// The likeliest of several texts; `None` when stopped, or where the device writes one at a time.
    fn search(
        &self,
        opening: &mut Opening<'_>,
        rules: &Rules<'_>,
        sizes: (usize, usize),
        stop: &Stop,
    ) -> Result<Option<Draft>, HearError> {
        opening.text.rewind(opening.length)?;
        let Some(mut beams) = opening.text.beams(sizes.0) else { return Ok(None) };
        let Some(found) = beams::search(beams.as_mut(), &opening.scores, rules, sizes, stop)? else { return Ok(None) };
        let (probability, tokens) = (found.probability(), found.tokens);
        let text = self.tokens.text(&tokens).trim().to_owned();
        Ok(Some(Draft { repeats: quality::loops(&tokens), tokens, text, probability }))
    }

    /// Writes one text; `None` when stopped.
    fn write(
        &self,
        opening: &mut Opening<'_>,
        rules: &Rules<'_>,
        most: usize,
        choose: &mut dyn FnMut(&[f32]) -> (u32, f32),
        stop: &Stop,
    ) -> Result<Option<Draft>, HearError> {
        let mut scores = opening.scores.clone();
        opening.text.rewind(opening.length)?;
        let (mut tokens, mut sum, mut repeats) = (Vec::new(), 0.0, false);
        while tokens.len() < most && !repeats {
            rules.apply(&mut scores, &tokens);
            let (token, probability) = choose(&scores);
            sum += probability;
            if token == self.tokens.end {
                break;
            }
            tokens.push(token);
            repeats = quality::loops(&tokens);
            if stop.is_set() {
                return Ok(None);
            }
            if tokens.len() < most {
                scores = opening.text.next(&[token])?;
            }
        }
        let probability = sum / (tokens.len() as f32 + 1.0);
        let text = self.tokens.text(&tokens).trim().to_owned();
        Ok(Some(Draft { tokens, text, probability, repeats }))
    }

    /// The parts of a text about a piece of so many samples, and how many of them it is about: what follows the last
    /// complete part is heard again with the next window.
    fn segments(&self, tokens: &[u32], samples: usize, offset: f64) -> (Vec<Segment>, usize) {
        let time = |id: u32| self.tokens.seconds(id);
        let length = samples as f64 / RATE as f64;
        let part = |ids: &[u32], start: f64, end: f64| Segment {
            start: offset + start.min(length),
            end: offset + end.min(length),
            text: self.tokens.text(ids).trim().to_owned(),
        };
        let is_time = |at: usize| tokens.get(at).is_some_and(|id| time(*id).is_some());
        let pairs: Vec<usize> = (1..tokens.len()).filter(|at| is_time(at - 1) && is_time(*at)).collect();
        let ends_alone = tokens.len() >= 2 && is_time(tokens.len() - 1) && !is_time(tokens.len() - 2);
        if pairs.is_empty() {
            let end = tokens.iter().rev().find_map(|id| time(*id)).filter(|end| *end > 0.0).unwrap_or(length);
            return (vec![part(tokens, tokens.first().and_then(|id| time(*id)).unwrap_or(0.0), end)], samples);
        }
        let mut segments = Vec::new();
        let mut from = 0;
        for to in pairs.iter().copied().chain(ends_alone.then_some(tokens.len())) {
            let ids = &tokens[from..to];
            let start = ids.first().and_then(|id| time(*id)).unwrap_or(0.0);
            let end = ids.last().and_then(|id| time(*id)).unwrap_or(length);
            segments.push(part(ids, start, end));
            from = to;
        }
        if ends_alone {
            return (segments, samples);
        }
        let reached = tokens[..from].last().and_then(|id| time(*id)).unwrap_or(0.0);
        let step = (reached * RATE as f64) as usize;
        // Less than a second would be no progress worth a window.
        (segments, if step < RATE { samples } else { step.min(samples) })
    }
}

fn repeats(draft: &Draft, limits: &Limits) -> bool {
    draft.repeats || quality::compression(&draft.text) > limits.compression
}

/// Why a text is not to be believed.
fn doubt(draft: &Draft, no_speech: f32, limits: &Limits) -> Option<Suppressed> {
    if no_speech > limits.no_speech && draft.probability < limits.log_probability {
        return Some(Suppressed::NoSpeech);
    }
    repeats(draft, limits).then_some(Suppressed::Repetition)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn draft(text: &str, probability: f32, repeats: bool) -> Draft {
        Draft { tokens: Vec::new(), text: text.into(), probability, repeats }
    }

    #[test]
    fn a_text_is_dropped_where_there_is_no_speech_or_it_repeats_itself() {
        let limits = Limits::default();
        assert_eq!(doubt(&draft("Thank you.", -1.2, false), 0.9, &limits), Some(Suppressed::NoSpeech));
        assert_eq!(doubt(&draft("Thank you.", -0.3, false), 0.9, &limits), None, "a likely text was said");
        assert_eq!(
            doubt(&draft("Thank you.", -1.2, false), 0.1, &limits),
            None,
            "an unlikely one is the best there is"
        );
        assert_eq!(doubt(&draft("yes", -0.1, true), 0.0, &limits), Some(Suppressed::Repetition));
        let chorus = "and then and then ".repeat(30);
        assert_eq!(doubt(&draft(&chorus, -0.1, false), 0.0, &limits), Some(Suppressed::Repetition));
    }
}
