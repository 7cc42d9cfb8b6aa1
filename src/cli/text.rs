//! `antiphon text`: how a text will be said, without saying it.

use std::io::{BufRead, Read, Write};
use std::path::PathBuf;

use serde_json::{Value, json};

use super::Failure;
use crate::call::segment::{Cut, Piece, Script, SegmentConfig, clean};
use crate::text::{How, Lexicon, Normalise, Reading, detect, read_given};
use crate::turn::Markup;

/// Longest line of standard input in bytes.
const LONGEST_LINE: u64 = 16 << 20;

#[derive(clap::Args)]
pub(super) struct Args {
    /// The text; `-` or nothing reads standard input, a line in, a line out.
    text: Option<String>,
    /// Its language as a BCP 47 tag; by default what it shows, else English.
    #[arg(long, value_name = "TAG", value_parser = super::language)]
    lang: Option<String>,
    /// How numbers and signs become words: on, reference (as the original CosyVoice3), off.
    #[arg(long, default_value = "on", value_name = "HOW")]
    normalise: Normalise,
    /// Print an object with the spoken form, its segments and where each word was written.
    #[arg(long)]
    json: bool,
    /// The text is SSML: a subset of it.
    #[arg(long)]
    ssml: bool,
    /// Whose lexicon it is read with, besides that for all.
    #[arg(long, value_name = "NAME")]
    agent: Option<String>,
    /// Configuration file, which has the lexicons.
    #[arg(short, long, value_name = "FILE")]
    config: Option<PathBuf>,
    #[arg(skip)]
    lexicon: Lexicon,
}

/// Prints the spoken form.
pub(super) fn run(mut args: Args) -> Result<(), Failure> {
    let config = super::load(args.config.as_deref())?;
    args.lexicon = match &args.agent {
        None => config.lexicon.said,
        Some(name) => {
            let agent = config.agent.get(name).ok_or_else(|| {
                let known: Vec<&str> = config.agent.keys().map(String::as_str).collect();
                let known = if known.is_empty() { "none".to_owned() } else { known.join(", ") };
                Failure::failed(format!("no agent is called `{name}`; the configuration has {known}"))
            })?;
            agent.lexicon.said.clone()
        }
    };
    let mut out = std::io::stdout().lock();
    match args.text.as_deref().filter(|text| *text != "-") {
        Some(text) => super::unless_closed(writeln!(out, "{}", args.line(text)?)),
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
            super::unless_closed(writeln!(out, "{}", self.line(line.trim_end_matches(['\r', '\n']))?))?;
        }
        Ok(())
    }

    /// What is printed for one text.
    fn line(&self, text: &str) -> Result<String, Failure> {
        let segments = SegmentConfig::default();
        let markup = if self.ssml { Markup::Ssml } else { Markup::None };
        let apart = |cut: Cut| if self.lang.is_none() { cut.by_language() } else { vec![cut] };
        let cuts = Script::whole(text, segments, markup).map_err(Failure::failed)?;
        let cuts: Vec<Cut> = cuts.into_iter().flat_map(apart).collect();
        let whole = match self.ssml {
            true => cuts.clone(),
            // What the sentences are cut from, as one.
            false => apart(Cut::from(clean(text))),
        };
        let shown: String =
            whole.iter().map(|cut| if let Cut::Piece(piece) = cut { &piece.text } else { " " }).collect();
        let tag = self.lang.as_deref().or_else(|| detect(&shown)).unwrap_or("en");
        let read = |piece: &Piece| self.read(piece, tag);
        let pieces = || whole.iter().filter_map(|cut| if let Cut::Piece(piece) = cut { Some(piece) } else { None });
        let spoken = pieces().map(|piece| read(piece).spoken.text).filter(|said| !said.trim().is_empty());
        let spoken = spoken.collect::<Vec<_>>().join(" ");
        if !self.json {
            return Ok(spoken);
        }
        let changes = pieces().flat_map(|piece| {
            let reading = read(piece);
            let changed = reading.spoken.spans.into_iter().filter(|span| !span.copied).map(move |span| {
                let written = piece.text.get(span.written).unwrap_or_default();
                json!({ "written": written, "spoken": reading.spoken.text[span.spoken] })
            });
            changed.filter(|change| change["written"] != "" || change["spoken"] != "").collect::<Vec<_>>()
        });
        let changes: Vec<Value> = if self.normalise == Normalise::On { changes.collect() } else { Vec::new() };
        let segments: Vec<Value> = cuts.iter().map(|cut| self.segment(cut, tag)).collect();
        let shown = json!({
            "written": text,
            "spoken": spoken,
            "language": tag,
            "changes": changes,
            "segments": segments,
        });
        Ok(shown.to_string())
    }

    fn read(&self, piece: &Piece, tag: &str) -> Reading {
        let language = piece.manner.language.as_deref().or(Some(tag));
        let reference = matches!(self.normalise, Normalise::Reference);
        let text = if reference { crate::synth::cosyvoice::text::normalize(&piece.text) } else { piece.text.clone() };
        // Its own rules move what is given: it is compared without.
        let given = if reference { &[][..] } else { &piece.given };
        read_given("", &text, given, How { language, normalise: self.normalise, lexicon: &self.lexicon })
    }

    fn segment(&self, cut: &Cut, tag: &str) -> Value {
        let piece = match cut {
            Cut::Break(length) => return json!({ "breakMs": length.as_millis() as u64 }),
            Cut::Piece(piece) => piece,
        };
        let reading = self.read(piece, tag);
        let mut shown = json!({ "written": piece.text, "spoken": reading.spoken.text });
        let manner = &piece.manner;
        let phonemes = reading.sounds.iter().map(|(at, phonemes)| {
            json!({ "spoken": reading.spoken.text.get(at.clone()).unwrap_or_default(), "phonemes": phonemes })
        });
        let marks = reading.marks.iter().map(|(at, name)| json!({ "name": name, "after": reading.spoken.text[..*at] }));
        for (key, value, told) in [
            ("language", json!(manner.language), manner.language.is_some()),
            ("rate", json!(manner.rate), manner.rate != 1.0),
            ("volume", json!(manner.gain), manner.gain != 1.0),
            ("phonemes", phonemes.collect(), !reading.sounds.is_empty()),
            ("marks", marks.collect(), !reading.marks.is_empty()),
        ] {
            if told {
                shown[key] = value;
            }
        }
        shown
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn args(json: bool) -> Args {
        let (ssml, agent, config, lexicon) = (false, None, None, Lexicon::default());
        Args { text: None, lang: None, normalise: Normalise::On, json, ssml, agent, config, lexicon }
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
        let printed: Value =
            serde_json::from_str(&args(true).line("Pay $5. Then go home now.").unwrap_or_default()).expect("an object");
        assert_eq!(printed["spoken"], "Pay five dollars. Then go home now.");
        assert_eq!(printed["language"], "en");
        assert_eq!(printed["changes"], json!([{ "written": "$5", "spoken": "five dollars" }]));
        assert_eq!(printed["segments"][0], json!({ "written": "Pay $5.", "spoken": "Pay five dollars." }));
    }

    #[test]
    fn each_clause_is_read_in_its_own_language_unless_one_is_named() {
        let text = "Guten Tag, how are you? We have 5.";
        let printed: Value = serde_json::from_str(&args(true).line(text).unwrap_or_default()).expect("an object");
        assert_eq!(printed["spoken"], "Guten Tag, how are you? We have five.");
        assert_eq!(
            (&printed["segments"][0]["language"], &printed["segments"][1]["language"]),
            (&json!("de"), &json!("en"))
        );
        let german = Args { lang: Some("de".into()), ..args(false) }.line(text).unwrap_or_default();
        assert_eq!(german, "Guten Tag, how are you? We have fünf.");
    }

    #[test]
    fn the_reference_and_nothing_can_be_compared() {
        let by = |normalise| Args { normalise, ..args(false) }.line("It is 3.5 now").unwrap_or_default();
        assert_eq!(by(Normalise::Off), "It is 3.5 now");
        assert_eq!(by(Normalise::Reference), "It is three.five now");
    }

    #[test]
    fn markup_and_lexicon_are_shown() {
        let entries = toml::from_str("nginx = 'engine x'").expect("entries");
        let lexicon = Lexicon::new(&entries, &Default::default()).expect("a lexicon");
        let args = Args { ssml: true, lexicon, ..args(true) };
        let text = "<speak>Use nginx <sub alias='now'>n</sub><mark name='m'/>.<break time='1s'/>\
                    <prosody rate='slow'>Slowly 5.</prosody></speak>";
        let printed: Value = serde_json::from_str(&args.line(text).unwrap_or_default()).expect("an object");
        assert_eq!(printed["spoken"], "Use engine x now. Slowly five.");
        assert_eq!(printed["segments"][0]["written"], "Use nginx n.");
        assert_eq!(printed["segments"][0]["marks"], json!([{ "name": "m", "after": "Use engine x now" }]));
        assert_eq!(printed["segments"][1], json!({ "breakMs": 1_000 }));
        assert_eq!(printed["segments"][2]["rate"], 0.75);
        assert!(args.line("<break time='x'/>").is_err());
    }
}
