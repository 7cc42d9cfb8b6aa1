//! How good a recording is, and what to do about it.
//!
//! Owns: where speech lies in a recording, how loud it and the noise are, whether a transcript can belong to it,
//! and the advice that follows. Pure functions; never changes a sample.
//!
//! # Why
//! Speech is found by loudness against the recording's own floor and ceiling. A voice detector would be wrong in
//! both directions here: it cuts soft beginnings of words, which belong to the prompt. It is only asked whether
//! what was found sounds like speech at all.

use std::ops::Range;

use serde::Serialize;

/// Frames of the analysis a second.
const FRAMES: usize = 50;
/// Speech is at most this far below its own loud parts.
const SPEECH_RANGE_DB: f64 = 35.0;
/// What is nearer to the floor than this is noise.
const ABOVE_FLOOR_DB: f64 = 6.0;
/// A floor so near to the ceiling is no noise: the recording has no pause, and all of it is speech.
const NO_PAUSE_DB: f64 = 10.0;
/// Below this nothing is speech.
const SILENCE_DBFS: f64 = -65.0;
/// Pauses up to this many frames (300 ms) belong to speech.
const PAUSE: usize = 15;
/// Bursts shorter than this many frames (60 ms) are clicks.
const BURST: usize = 3;

/// Where speech is and how loud.
#[derive(Clone, Debug, PartialEq)]
pub struct Activity {
    /// From the first to the last speech, in samples.
    pub span: Range<usize>,
    /// Seconds of speech, short pauses included.
    pub seconds: f64,
    /// Root mean square of the speech, dB of full scale.
    pub level_dbfs: f64,
    /// The same of what is not speech; `None` when there is too little of it, or it is digital silence.
    pub noise_dbfs: Option<f64>,
    /// Largest magnitude, dB of full scale.
    pub peak_dbfs: f64,
}

/// Finds speech in a recording; `None` when there is none.
pub fn activity(samples: &[f32], rate: u32) -> Option<Activity> {
    let frame = (rate as usize / FRAMES).max(1);
    let power: Vec<f64> = samples
        .chunks_exact(frame)
        .map(|f| f.iter().map(|s| f64::from(*s).powi(2)).sum::<f64>() / frame as f64)
        .collect();
    let levels: Vec<f64> = power.iter().map(|p| decibel(*p)).collect();
    let mut sorted = levels.clone();
    sorted.sort_by(f64::total_cmp);
    let percentile = |p: usize| sorted.get(sorted.len() * p / 100).copied();
    let (floor, top) = (percentile(10)?, percentile(95)?);
    let over_noise = if top - floor < NO_PAUSE_DB { f64::NEG_INFINITY } else { floor + ABOVE_FLOOR_DB };
    let threshold = over_noise.max(top - SPEECH_RANGE_DB).max(SILENCE_DBFS);

    let mut active: Vec<bool> = levels.iter().map(|l| *l > threshold).collect();
    fill_runs(&mut active, true, BURST - 1, false);
    let first = active.iter().position(|a| *a)?;
    let last = active.iter().rposition(|a| *a)?;
    fill_runs(&mut active[first..=last], false, PAUSE, true);

    let mean = |want: bool| {
        let chosen: Vec<f64> = power.iter().zip(&active).filter(|(_, a)| **a == want).map(|(p, _)| *p).collect();
        (chosen.len() >= 5).then(|| decibel(chosen.iter().sum::<f64>() / chosen.len() as f64))
    };
    let peak = samples.iter().fold(0.0_f32, |peak, s| peak.max(s.abs()));
    Some(Activity {
        // The last frame may be followed by a piece too short to be one.
        span: first * frame..if last + 1 == levels.len() { samples.len() } else { (last + 1) * frame },
        seconds: active.iter().filter(|a| **a).count() as f64 / FRAMES as f64,
        level_dbfs: mean(true)?,
        noise_dbfs: mean(false).filter(|level| *level > -100.0),
        peak_dbfs: 2.0 * decibel(f64::from(peak)),
    })
}

/// Sets every run of `value` that is at most `longest` long to `with`.
fn fill_runs(flags: &mut [bool], value: bool, longest: usize, with: bool) {
    let mut start = 0;
    while start < flags.len() {
        let length = flags[start..].iter().take_while(|f| **f == flags[start]).count();
        if flags[start] == value && length <= longest {
            flags[start..start + length].fill(with);
        }
        start += length;
    }
}

/// Power to decibels; silence is -120.
fn decibel(power: f64) -> f64 {
    10.0 * power.max(1e-12).log10()
}

/// How languages measure the length of a text.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Script {
    /// Chinese characters.
    Han,
    /// Japanese: kana with or without Chinese characters.
    Kana,
    /// Korean syllables.
    Hangul,
    /// Every other script, by letters.
    Letters,
}

/// What a transcript says about how long it takes to say.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Spoken {
    /// What most of it is written in.
    pub script: Script,
    /// Characters that are spoken.
    pub units: usize,
    /// Seconds that it takes at an ordinary pace.
    pub seconds: f64,
}

/// Estimates how long a transcript takes to say. Tags in `[...]` and `<...>` are not spoken.
pub fn spoken(transcript: &str) -> Spoken {
    let (mut han, mut kana, mut hangul, mut letters, mut digits) = (0_usize, 0_usize, 0_usize, 0_usize, 0_usize);
    let mut closing = None;
    for c in transcript.chars() {
        match (closing, c) {
            (Some(end), _) => closing = (c != end).then_some(end),
            (None, '[') => closing = Some(']'),
            (None, '<') => closing = Some('>'),
            (None, '\u{3040}'..='\u{30ff}' | '\u{ff66}'..='\u{ff9d}') => kana += 1,
            (None, '\u{3400}'..='\u{9fff}' | '\u{f900}'..='\u{faff}' | '\u{20000}'..='\u{3ffff}') => han += 1,
            (None, '\u{ac00}'..='\u{d7a3}') => hangul += 1,
            (None, c) if c.is_numeric() => digits += 1,
            (None, c) if c.is_alphabetic() => letters += 1,
            _ => {}
        }
    }
    let syllabic = han + kana + hangul;
    let script = match () {
        () if letters > 3 * syllabic || syllabic == 0 => Script::Letters,
        () if kana * 8 > syllabic => Script::Kana,
        () if hangul > han => Script::Hangul,
        () => Script::Han,
    };
    // Units a second in unhurried reading. A Chinese character is about two morae in Japanese. A digit is read as
    // one character where characters are syllables, and as a word of four letters elsewhere.
    let han_pace = if script == Script::Kana { 3.8 } else { 4.3 };
    let digit_pace = if script == Script::Letters { 3.2 } else { 4.3 };
    let seconds = han as f64 / han_pace
        + kana as f64 / 7.3
        + hangul as f64 / 4.6
        + letters as f64 / 13.0
        + digits as f64 / digit_pace;
    Spoken { script, units: syllabic + letters + digits, seconds }
}

/// What to think of a recording.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Quality {
    /// Seconds of speech in the recording, short pauses included.
    pub speech_seconds: f64,
    /// Seconds of the prompt that was made from it.
    pub prompt_seconds: f64,
    /// Seconds of speech that the prompt's length left out.
    pub cut_seconds: f64,
    /// Level of the speech as recorded, dB of full scale.
    pub level_dbfs: f64,
    /// Largest magnitude as recorded, dB of full scale.
    pub peak_dbfs: f64,
    /// Noise as recorded, dB of full scale, if there was a pause to measure it in.
    pub noise_dbfs: Option<f64>,
    /// Speech over noise, dB.
    pub snr_db: Option<f64>,
    /// Percent of samples that are clipped.
    pub clipped_percent: f64,
    /// Samples a second of the recording.
    pub sample_rate: u32,
    /// What the transcript is written in and how long it takes to say.
    pub transcript: Spoken,
    /// What could be better.
    pub advice: Vec<Advice>,
}

/// Something that could be better.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Advice {
    /// A fixed word for programs.
    pub code: &'static str,
    /// What is wrong and what to do, for people.
    pub message: String,
}

/// What the advice is derived from, besides [`Activity`].
#[derive(Clone, Copy, Debug)]
pub struct Facts<'a> {
    /// Samples a second of the recording.
    pub rate: u32,
    /// Share of clipped samples.
    pub clipped: f64,
    /// Whether the channels cancel.
    pub cancels: bool,
    /// Packets left out in decoding.
    pub damaged_packets: usize,
    /// Share of the speech that a voice detector takes for speech.
    pub voiced: f64,
    /// The transcript.
    pub transcript: &'a str,
    /// Seconds of the prompt.
    pub prompt_seconds: f64,
    /// Seconds of speech that it leaves out.
    pub cut_seconds: f64,
    /// Tokens before the first sound, and the fewest that a recording with silence at its ends would give.
    pub first_hop: (usize, usize),
}

/// Judges a recording.
pub fn assess(activity: &Activity, facts: &Facts<'_>) -> Quality {
    let transcript = spoken(facts.transcript);
    let snr_db = activity.noise_dbfs.map(|noise| activity.level_dbfs - noise);
    let mut advice = Vec::new();
    let mut advise = |code, message: String| advice.push(Advice { code, message });
    let seconds = activity.seconds;
    if facts.clipped > 1e-4 {
        let percent = facts.clipped * 100.0;
        advise(
            "clipping",
            format!("{percent:.2} % of the samples are clipped; record again with the input turned down"),
        );
    }
    if facts.cancels {
        advise("opposite_channels", "the two channels cancel each other; give one of them as a mono file".into());
    }
    if activity.level_dbfs < -40.0 {
        let level = activity.level_dbfs;
        advise("quiet", format!("speech is at {level:.0} dBFS; raised to the usual level its noise comes up too"));
    }
    if let Some(snr) = snr_db.filter(|snr| *snr < 20.0) {
        advise(
            "noise",
            format!(
                "speech is only {snr:.0} dB above the noise, which the voice will imitate; record in a quieter place or nearer to the microphone"
            ),
        );
    }
    if facts.rate < 16_000 {
        let rate = facts.rate;
        advise(
            "narrow_band",
            format!("{rate} samples a second is telephone quality and the voice will sound so; 24000 or more is best"),
        );
    }
    if facts.damaged_packets > 0 {
        let packets = facts.damaged_packets;
        advise("damaged", format!("{packets} damaged packets were left out; a wav or flac file would be whole"));
    }
    if facts.voiced < 0.3 {
        let percent = facts.voiced * 100.0;
        advise("no_voice", format!("only {percent:.0} % of it sounds like speech; is there music or noise in it?"));
    }
    if seconds < 5.0 {
        advise("short", format!("{seconds:.1} s of speech is little; 8 to 15 s give a better likeness"));
    }
    let expected = transcript.seconds;
    if expected > 2.0 * seconds {
        advise(
            "transcript_long",
            format!(
                "the transcript takes about {expected:.0} s to say, the recording holds {seconds:.1} s of speech; does it contain words that are not spoken?"
            ),
        );
    } else if expected * 2.2 < seconds {
        advise(
            "transcript_short",
            format!(
                "the transcript takes about {expected:.0} s to say, the recording holds {seconds:.1} s of speech; are words missing from it?"
            ),
        );
    }
    if facts.cut_seconds > 0.0 {
        let cut = facts.cut_seconds;
        advise(
            "cut",
            format!(
                "{cut:.2} s at the end were cut off to align the prompt; check that the transcript's last word is still there, or record with a second of silence before and after"
            ),
        );
    } else if facts.first_hop.0 > facts.first_hop.1 {
        let (have, best) = facts.first_hop;
        advise(
            "alignment",
            format!(
                "the first sound takes {have} tokens instead of {best}; a second of silence before and after the speech would allow fewer"
            ),
        );
    }
    Quality {
        speech_seconds: seconds,
        prompt_seconds: facts.prompt_seconds,
        cut_seconds: facts.cut_seconds,
        level_dbfs: activity.level_dbfs,
        peak_dbfs: activity.peak_dbfs,
        noise_dbfs: activity.noise_dbfs,
        snr_db,
        clipped_percent: facts.clipped * 100.0,
        sample_rate: facts.rate,
        transcript,
        advice,
    }
}

/// Share of 16 ms frames of sound at 16 kHz that a voice detector takes for speech.
pub fn voiced_share(samples: &[f32]) -> f64 {
    let mut detector = earshot::Detector::default();
    let frames = samples.chunks_exact(256);
    let count = frames.len().max(1);
    frames.filter(|frame| detector.predict_f32(frame) >= 0.5).count() as f64 / count as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    const RATE: u32 = 16_000;

    /// Pieces of (seconds, amplitude) of a tone.
    fn tone(pieces: &[(f64, f32)]) -> Vec<f32> {
        pieces
            .iter()
            .flat_map(|(seconds, amplitude)| {
                (0..(seconds * f64::from(RATE)) as usize).map(move |i| amplitude * (i as f32 * 0.3).sin())
            })
            .collect()
    }

    #[test]
    fn speech_is_found_between_silences() {
        let found = activity(&tone(&[(1.0, 0.0), (2.0, 0.2), (0.2, 0.0), (1.0, 0.1), (2.0, 0.0)]), RATE);
        let found = found.expect("there is speech");
        assert_eq!(found.span, 16_000..67_200);
        assert!((found.seconds - 3.2).abs() < 0.05, "{}", found.seconds);
        assert_eq!(found.noise_dbfs, None, "digital silence is no noise");
    }

    #[test]
    fn long_pauses_are_not_speech() {
        let found = activity(&tone(&[(1.0, 0.2), (3.0, 0.0), (1.0, 0.2)]), RATE).expect("there is speech");
        assert!((found.seconds - 2.0).abs() < 0.05, "{}", found.seconds);
        assert_eq!(found.span, 0..80_000);
    }

    #[test]
    fn noise_is_measured_and_a_click_is_no_speech() {
        let found = activity(&tone(&[(0.5, 0.002), (0.03, 0.5), (1.0, 0.002), (2.0, 0.2), (1.0, 0.002)]), RATE)
            .expect("speech");
        assert!(found.span.start >= 24_000, "{:?}", found.span);
        assert!(
            activity(&tone(&[(1.0, 0.002), (3.0, 0.2), (1.0, 0.002)]), RATE)
                .and_then(|a| a.noise_dbfs)
                .is_some_and(|n| (n + 57.0).abs() < 1.0)
        );
    }

    #[test]
    fn a_recording_without_pause_is_all_speech_and_silence_is_none() {
        assert_eq!(activity(&tone(&[(3.0, 0.1)]), RATE).expect("speech").span, 0..48_000);
        assert_eq!(activity(&tone(&[(3.0, 0.0)]), RATE), None);
        assert_eq!(activity(&tone(&[(3.0, 1e-4)]), RATE), None);
        assert_eq!(activity(&[], RATE), None);
        assert_eq!(activity(&[0.1; 10], RATE), None);
    }

    #[test]
    fn texts_take_as_long_as_they_are_read() {
        // Text, script, seconds at an ordinary pace (own reading).
        let cases = [
            ("The quick brown fox jumps over the lazy dog, and then it sleeps.", Script::Letters, 3.9),
            ("希望你以后能够做的比我还好呦。", Script::Han, 3.3),
            ("きょうはとてもいいてんきですね", Script::Kana, 2.1),
            ("안녕하세요 만나서 반갑습니다", Script::Hangul, 2.8),
            ("Съешь же ещё этих мягких французских булок", Script::Letters, 2.8),
            ("", Script::Letters, 0.0),
            ("[breath]<strong>yes</strong>", Script::Letters, 0.2),
        ];
        for (text, script, seconds) in cases {
            let result = spoken(text);
            assert_eq!(result.script, script, "{text}");
            assert!((result.seconds - seconds).abs() <= 0.3 * seconds + 0.05, "{text}: {}", result.seconds);
        }
    }

    #[test]
    fn wrong_transcripts_are_noticed() {
        let speech = activity(&tone(&[(0.5, 0.001), (9.0, 0.2), (0.5, 0.001)]), RATE).expect("speech");
        let codes = |transcript: &str| {
            let facts = Facts {
                rate: 24_000,
                clipped: 0.0,
                cancels: false,
                damaged_packets: 0,
                voiced: 1.0,
                transcript,
                prompt_seconds: 9.0,
                cut_seconds: 0.0,
                first_hop: (8, 8),
            };
            assess(&speech, &facts).advice.into_iter().map(|a| a.code).collect::<Vec<_>>()
        };
        assert_eq!(codes("Only four words here."), ["transcript_short"]);
        assert_eq!(codes(&"Many more words than anybody could say. ".repeat(12)), ["transcript_long"]);
        assert!(codes(&"This could be right. ".repeat(6)).is_empty());
    }
}
