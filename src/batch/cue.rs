//! What is spoken of a text with markup, in the form in which it is kept until then.
//!
//! # Why
//! Markup is read when a job is handed in: a mistake in it is told to the client, who can mend it, and so is what it says. A
//! database keeps one text for each utterance; how one is spoken that had markup stands in that text, behind a control
//! character, which no other has, as these are taken out of texts. So databases are as they were.

use serde::{Deserialize, Serialize};

use super::Item;
use super::store::Work;
use crate::audio::{RATE, to_i16};
use crate::call::segment::{Cut, Piece, Script, SegmentConfig};
use crate::text::{How, Lexicon, Normalise, read_given};
use crate::turn::{Class, Markup, Sound, StreamId, Utterance};
use crate::voice::loudness::Leveller;

/// Begins a text that is a [`Cue`].
const MARK: char = '\u{2}';

/// One utterance of a text with markup, or a silence.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct Cue {
    /// As it is said, with tags of the voice.
    text: String,
    /// BCP 47.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    language: Option<String>,
    /// Times the job's speed.
    rate: f32,
    /// Times the amplitude of the voice.
    gain: f32,
    /// Pieces of it in bytes, and their phonemes.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    sounds: Vec<Sound>,
    /// Silence, in place of all that.
    #[serde(default)]
    silence_ms: u64,
}

/// The utterances of an item: sentences, joined or cut to lengths that suit a voice.
///
/// # Errors
/// The first mistake in its markup.
pub(super) fn split(item: &Item, language: Option<&str>, lexicon: &Lexicon) -> Result<Vec<String>, String> {
    let cuts = Script::whole_reading(&item.input, SegmentConfig::default(), item.markup, lexicon)?;
    let apart = |cut: Cut| if language.is_none() { cut.by_language() } else { vec![cut] };
    let one = |cut| match (item.markup, cut) {
        // Read when it is spoken: the lexicon may have changed until then.
        (Markup::None, Cut::Piece(piece)) => Some(piece.text),
        (_, Cut::Piece(piece)) => read(&piece, language, lexicon).map(|cue| cue.kept()),
        (_, Cut::Break(length)) => Some(Cue::silence(length.as_millis() as u64).kept()),
    };
    let parts: Vec<String> =
        cuts.into_iter().flat_map(apart).filter_map(one).filter(|part| !part.trim().is_empty()).collect();
    let speaks = |part: &String| Cue::of(part).is_none_or(|cue| !cue.text.is_empty());
    // Silence alone is nothing to say.
    Ok(if parts.iter().any(speaks) { parts } else { Vec::new() })
}

/// `None`: nothing of it is said.
fn read(piece: &Piece, language: Option<&str>, lexicon: &Lexicon) -> Option<Cue> {
    let manner = &piece.manner;
    let language = manner.language.as_deref().or(language);
    let reading = read_given("", &piece.text, &piece.given, How { language, normalise: Normalise::On, lexicon });
    let text = reading.spoken.text;
    let said = !text.trim().is_empty();
    said.then_some(Cue {
        text,
        language: reading.language,
        rate: manner.rate,
        gain: manner.gain,
        sounds: reading.sounds,
        silence_ms: 0,
    })
}

/// Samples of silence that `work` is; `None`: it is to be spoken.
pub(super) fn silence(work: &Work) -> Option<usize> {
    let length = Cue::of(&work.text)?.silence_ms;
    (length > 0).then_some((length * u64::from(RATE) / 1_000) as usize)
}

/// What the engine gets of `work`.
pub(super) fn utterance(work: &Work, stream: StreamId, lexicon: &Lexicon) -> Utterance {
    let (spoken, speed, markup) = match Cue::of(&work.text) {
        Some(cue) => ((cue.text, cue.language, cue.sounds), work.speed * cue.rate, Markup::Tags),
        None => {
            let how = How { language: work.language.as_deref(), normalise: Normalise::On, lexicon };
            let reading = read_given("", &work.text, &[], how);
            ((reading.spoken.text, reading.language, reading.sounds), work.speed, Markup::None)
        }
    };
    let (text, language, sounds) = spoken;
    Utterance {
        voice: work.voice.clone(),
        language,
        instructions: work.instructions.clone(),
        seed: work.seed,
        speed: speed.clamp(0.25, 4.0),
        tenant: work.tenant.as_str().into(),
        sounds,
        markup,
        ..Utterance::plain(stream, Class::Batch, text)
    }
}

/// Brings what was spoken to the loudness that its markup asks for.
pub(super) fn level(work: &Work, pcm: &mut [i16]) {
    let Some(cue) = Cue::of(&work.text).filter(|cue| cue.gain != 1.0) else { return };
    let mut sound: Vec<f32> = pcm.iter().map(|sample| f32::from(*sample) / 32_768.0).collect();
    Leveller::new(cue.gain).process(&mut sound);
    for (sample, levelled) in pcm.iter_mut().zip(sound) {
        *sample = to_i16(levelled);
    }
}

impl Cue {
    fn silence(silence_ms: u64) -> Self {
        Self { text: String::new(), language: None, rate: 1.0, gain: 1.0, sounds: Vec::new(), silence_ms }
    }

    /// `None`: a text without markup, or one that only a later version can read, which is then spoken as it is.
    fn of(text: &str) -> Option<Self> {
        let kept = text.strip_prefix(MARK)?;
        serde_json::from_str(kept).ok()
    }

    fn kept(&self) -> String {
        // What is in it has a form in JSON, always.
        let json = serde_json::to_string(self).unwrap_or_default();
        format!("{MARK}{json}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn item(input: &str, markup: Markup) -> Item {
        Item { markup, ..input.into() }
    }

    fn cues(input: &str, markup: Markup) -> Vec<Cue> {
        let parts = split(&item(input, markup), Some("en"), &Lexicon::default()).expect("no mistake");
        parts.iter().map(|part| Cue::of(part).expect("a cue")).collect()
    }

    #[test]
    fn what_markup_says_is_kept_with_the_text_and_spoken_so() {
        let text = "<speak>It costs <sub alias='much'>$5</sub>.<break time='700ms'/><prosody rate='200%' volume='+6dB'>Say \
                    <phoneme alphabet='x-espeak' ph=\"t@m'A:t@U\">tomato</phoneme> now.</prosody></speak>";
        let cues = cues(text, Markup::Ssml);
        let texts: Vec<(&str, u64)> = cues.iter().map(|cue| (cue.text.as_str(), cue.silence_ms)).collect();
        assert_eq!(texts, [("It costs much.", 0), ("", 700), ("Say tomato now.", 0)]);
        assert!((cues[2].rate - 2.0).abs() < 1e-6 && (cues[2].gain - 1.995).abs() < 0.01, "{:?}", cues[2]);
        assert_eq!(&cues[2].text[cues[2].sounds[0].0.clone()], "tomato");
        let work = |text: String| Work {
            id: super::super::store::PartId { seq: 0, item: 0, part: 0 },
            fence: 0,
            job: String::new(),
            tenant: String::new(),
            text,
            voice: None,
            language: None,
            instructions: None,
            speed: 1.5,
            seed: 7,
        };
        let spoken = work(cues[2].kept());
        let utterance = utterance(&spoken, StreamId::next(), &Lexicon::default());
        assert_eq!(
            (utterance.text.as_str(), utterance.speed, utterance.markup),
            ("Say tomato now.", 3.0, Markup::Tags)
        );
        let mut pcm = [1_000i16; 480];
        level(&spoken, &mut pcm);
        assert!((1_985..2_005).contains(&pcm[479]), "{}", pcm[479]);
        assert_eq!((silence(&spoken), silence(&work(cues[1].kept()))), (None, Some(16_800)));
        let plain = self::utterance(&work("It is 5.".into()), StreamId::next(), &Lexicon::default());
        assert_eq!((plain.text.as_str(), plain.markup, plain.speed), ("It is five.", Markup::None, 1.5));
    }

    #[test]
    fn text_is_no_markup_unless_the_item_says_so_and_a_mistake_is_told() {
        let lexicon = Lexicon::default();
        let plain = split(&item("Say <break/> [breath] now.\u{2}{}", Markup::None), None, &lexicon).expect("text");
        assert_eq!(plain, ["Say <break/> [breath] now.{}"], "a control character is no way in");
        assert_eq!(cues("Say [breath] now.", Markup::Tags)[0].text, "Say [breath] now.");
        let mistake = split(&item("<speak>Say <brake/> now.</speak>", Markup::Ssml), None, &lexicon);
        assert!(mistake.expect_err("a mistake").contains("brake"));
        let silent = split(&item("<speak><break time='1s'/></speak>", Markup::Ssml), None, &lexicon);
        assert!(silent.expect("no mistake").is_empty(), "silence alone is nothing to say");
    }
}
