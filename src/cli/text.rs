//! `antiphon text`: how a text will be said, without saying it.

use std::io::{BufRead, Read, Write};

use serde_json::{Value, json};

use super::Failure;
use crate::call::segment::{SegmentConfig, Segmenter, clean};
use crate::text::{Language, Normalise, Spoken, detect, normalise};

/// Longest line of standard input in bytes.
const LONGEST_LINE: u64 = 16 << 20;

#[derive(clap::Args)]
pub(super) struct Args {
    /// The text; `-` or nothing reads standard input, a line in, a line out.
    text: Option<String>,
    /// Its language as a BCP 47 tag; by default what it shows, else English.
    #[arg(long, value_name = "TAG")]
    lang: Option<String>,
    /// How numbers and signs become words: on, reference (as the original CosyVoice3), off.
    #[arg(long, default_value = "on", value_name = "HOW")]
    normalise: Normalise,
    /// Print an object with the spoken form, its segments and where each word was written.
    #[arg(long)]
    json: bool,
}

/// Prints the spoken form.
pub(super) fn run(args: &Args) -> Result<(), Failure> {
    let mut out = std::io::stdout().lock();
    match args.text.as_deref().filter(|text| *text != "-") {
        Some(text) => super::unless_closed(writeln!(out, "{}", args.line(text))),
        None => args.lines(std::io::stdin().lock(), &mut out),
    }
}

impl Args {
    fn lines(&self, mut input: impl BufRead, out: &mut impl Write) -> Result<(), Failure> {
        for number in 1.. {
            let mut line = Vec::new();
            let length = input.by_ref().take(LONGEST_LINE).read_until(b'\n', &mut line).map_err(Failure::failed)?;
            if length == 0 {
                break;
            }
            if length as u64 == LONGEST_LINE {
                return Err(Failure::failed(format!("line {number} is longer than {LONGEST_LINE} bytes: split it")));
            }
            let line = String::from_utf8_lossy(&line);
            super::unless_closed(writeln!(out, "{}", self.line(line.trim_end_matches(['\r', '\n']))))?;
        }
        Ok(())
    }

    /// What is printed for one text.
    fn line(&self, text: &str) -> String {
        let written = clean(text);
        let tag = self.lang.as_deref().or_else(|| detect(&written)).unwrap_or("en");
        let language = Language::of_tag(tag);
        let say = |text: &str| match self.normalise {
            Normalise::On => normalise(text, language),
            Normalise::Reference => Spoken::verbatim(&crate::synth::cosyvoice::text::normalize(text)),
            Normalise::Off => Spoken::verbatim(text),
        };
        let spoken = say(&written);
        if !self.json {
            return spoken.text;
        }
        let mut parts = Vec::new();
        Segmenter::new(SegmentConfig::default()).whole(text, &mut parts);
        let segments: Vec<Value> =
            parts.iter().map(|part| json!({ "written": part, "spoken": say(part).text })).collect();
        let changes = spoken.spans.iter().filter(|span| !span.copied).map(|span| {
            let written = written.get(span.written.clone()).unwrap_or_default();
            json!({ "written": written, "spoken": &spoken.text[span.spoken.clone()] })
        });
        let changes: Vec<Value> = if self.normalise == Normalise::On { changes.collect() } else { Vec::new() };
        json!({
            "written": text,
            "spoken": spoken.text,
            "language": tag,
            "changes": changes,
            "segments": segments,
        })
        .to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn args(json: bool) -> Args {
        Args { text: None, lang: None, normalise: Normalise::On, json }
    }

    #[test]
    fn a_line_in_is_a_line_out() {
        let mut out = Vec::new();
        let input = "It costs **$5**.\n\n- 10 km\n共12个人\r\nlast 2";
        assert!(args(false).lines(input.as_bytes(), &mut out).is_ok());
        let out = String::from_utf8(out).expect("text");
        assert_eq!(out, "It costs five dollars.\n\nten kilometers\n共十二个人\nlast two\n");
    }

    #[test]
    fn the_object_tells_segments_and_changes() {
        let printed: Value = serde_json::from_str(&args(true).line("Pay $5. Then go home now.")).expect("an object");
        assert_eq!(printed["spoken"], "Pay five dollars. Then go home now.");
        assert_eq!(printed["language"], "en");
        assert_eq!(printed["changes"], json!([{ "written": "$5", "spoken": "five dollars" }]));
        assert_eq!(printed["segments"][0], json!({ "written": "Pay $5.", "spoken": "Pay five dollars." }));
    }

    #[test]
    fn the_reference_and_nothing_can_be_compared() {
        let by = |normalise| Args { normalise, ..args(false) }.line("It is 3.5 now");
        assert_eq!(by(Normalise::Off), "It is 3.5 now");
        assert_eq!(by(Normalise::Reference), "It is three.five now");
    }
}
