//! Scenarios: what a load consists of, as a TOML file. Unknown keys and impossible values are refused, with line and
//! key.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use serde::Deserialize;
use thiserror::Error;
use tokio_util::sync::CancellationToken;

use crate::caller::call::Leg;
use crate::caller::relay::Impairment;
use crate::caller::sip;
use crate::run::load::{Arrivals, Behaviour, Cycles, Load};
use crate::run::prepare::{Target, Via};
use crate::run::report::Limits;
use crate::sound::wav;
use crate::turns::corpus::{self, Length};
use crate::turns::exchange::Saying;
use crate::wire::codec::Codec;

/// A mistake in a scenario file.
#[derive(Debug, Error, PartialEq, Eq)]
#[error("{file}:{line}: {key}: {reason}")]
pub struct ScenarioError {
    /// The file.
    pub file: String,
    /// Line of the mistake, from 1.
    pub line: usize,
    /// The key it is about, `section.key`.
    pub key: String,
    /// What is wrong and what would be right.
    pub reason: String,
}

/// A scenario that can be run.
#[derive(Clone)]
pub struct Scenario {
    /// Its name.
    pub name: String,
    /// What is called.
    pub target: Target,
    /// What calls.
    pub load: Load,
    /// What passing means.
    pub limits: Limits,
    /// Texts kept in work as batch jobs meanwhile; 0: none.
    pub batch: usize,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    name: Option<String>,
    #[serde(default = "one")]
    seed: u64,
    duration_s: f64,
    #[serde(default)]
    target: TargetTable,
    arrivals: ArrivalsTable,
    #[serde(default)]
    legs: LegsTable,
    #[serde(default)]
    turns: TurnsTable,
    #[serde(default)]
    callers: CallersTable,
    #[serde(default)]
    network: Impairment,
    #[serde(default)]
    batch: BatchTable,
    #[serde(default)]
    limits: LimitsTable,
}

fn one() -> u64 {
    1
}

#[derive(Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct TargetTable {
    addresses: Vec<String>,
    token: Option<String>,
    agent: Option<String>,
    via: Via,
    agent_bind: Option<std::net::SocketAddr>,
    spawn: Option<String>,
    transport: Option<TransportName>,
    codecs: Option<Vec<Codec>>,
    srtp: bool,
    username: Option<String>,
    password: Option<String>,
    verify: Option<bool>,
}

#[derive(Clone, Copy, Deserialize)]
#[serde(rename_all = "lowercase")]
enum TransportName {
    Udp,
    Tcp,
    Tls,
}

#[derive(Deserialize)]
#[serde(tag = "kind", rename_all = "lowercase", deny_unknown_fields)]
enum ArrivalsTable {
    Closed { callers: u32 },
    Poisson { rate: f64 },
    Ramp { from: f64, to: f64 },
    Burst { size: u32, every_s: f64 },
    Trace { at_s: Option<Vec<f64>>, file: Option<PathBuf> },
}

#[derive(Deserialize)]
#[serde(default, deny_unknown_fields)]
struct LegsTable {
    sip: f64,
    webrtc: f64,
}

impl Default for LegsTable {
    fn default() -> Self {
        // None given: whatever there are addresses for.
        LegsTable { sip: 0.0, webrtc: 0.0 }
    }
}

#[derive(Deserialize)]
#[serde(default, deny_unknown_fields)]
struct TurnsTable {
    per_call: Option<[u32; 2]>,
    think_s: [f64; 2],
    languages: Vec<String>,
    lengths: Vec<Length>,
    says: Vec<PathBuf>,
}

impl Default for TurnsTable {
    fn default() -> Self {
        TurnsTable {
            per_call: None,
            think_s: [0.3, 1.0],
            languages: vec!["en".to_owned()],
            lengths: Vec::new(),
            says: Vec::new(),
        }
    }
}

#[derive(Deserialize)]
#[serde(default, deny_unknown_fields)]
struct CallersTable {
    barge_in: f64,
    dtmf: f64,
    hang_up: f64,
    after_s: [f64; 2],
    speech: Option<PathBuf>,
    most: u32,
}

impl Default for CallersTable {
    fn default() -> Self {
        CallersTable { barge_in: 0.0, dtmf: 0.0, hang_up: 0.0, after_s: [0.3, 2.0], speech: None, most: 2_000 }
    }
}

#[derive(Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct BatchTable {
    texts: usize,
}

#[derive(Deserialize)]
#[serde(default, deny_unknown_fields)]
struct LimitsTable {
    first_audio_p95_s: f64,
    rtf_p95: f64,
    stalled_turns: f64,
    failures: f64,
}

impl Default for LimitsTable {
    fn default() -> Self {
        let limits = Limits::default();
        LimitsTable {
            first_audio_p95_s: limits.first_audio_p95,
            rtf_p95: limits.rtf_p95,
            stalled_turns: limits.stalled_turns,
            failures: limits.failures,
        }
    }
}

impl Scenario {
    /// Reads the scenario at `path`; files it names are found beside it.
    ///
    /// # Errors
    /// The first mistake, with its line and key.
    pub fn load(path: &Path) -> Result<Scenario, ScenarioError> {
        let name = path.display().to_string();
        let text = std::fs::read_to_string(path).map_err(|e| ScenarioError {
            file: name.clone(),
            line: 1,
            key: "file".to_owned(),
            reason: e.to_string(),
        })?;
        Scenario::parse(&name, &text, path.parent().unwrap_or(Path::new(".")))
    }

    /// Reads a scenario; `folder` is where the files it names are.
    ///
    /// # Errors
    /// The first mistake, with its line and key.
    pub fn parse(file: &str, text: &str, folder: &Path) -> Result<Scenario, ScenarioError> {
        let check = Check { file, text };
        let table: File = toml::from_str(text).map_err(|e| check.syntax(&e))?;
        check.range("duration_s", table.duration_s, 0.5, 86_400.0)?;
        let says = says(&check, &table, folder)?;
        let arrivals = arrivals(&check, table.arrivals, folder)?;
        for (key, value) in [("legs.sip", table.legs.sip), ("legs.webrtc", table.legs.webrtc)] {
            check.range(key, value, 0.0, 1e6)?;
        }
        let legs: Vec<(Leg, f64)> = [(Leg::Sip, table.legs.sip), (Leg::Webrtc, table.legs.webrtc)]
            .into_iter()
            .filter(|(_, weight)| *weight > 0.0)
            .collect();
        let turns = match table.turns.per_call {
            Some([least, most]) if least == 0 || least > most => {
                return Err(check.wrong("turns.per_call", format!("[{least}, {most}] is no range of 1 or more")));
            }
            Some([least, most]) => Some(least..=most),
            // Calls of an open loop also end by themselves.
            None if !matches!(arrivals, Arrivals::Closed(_)) => Some(1..=4),
            None => None,
        };
        let think = check.span("turns.think_s", table.turns.think_s)?;
        let known = corpus::languages();
        for language in &table.turns.languages {
            if !known.contains(&language.as_str()) {
                let reason = format!("no texts in {language:?}; there are {}", known.join(", "));
                return Err(check.wrong("turns.languages", reason));
            }
        }
        let texts = corpus::select(&table.turns.languages, &table.turns.lengths);
        if texts.is_empty() {
            return Err(check.wrong("turns.lengths", "no texts of these lengths in these languages".to_owned()));
        }
        let callers = &table.callers;
        let shares = [("barge_in", callers.barge_in), ("dtmf", callers.dtmf), ("hang_up", callers.hang_up)];
        for (key, share) in shares {
            check.range(&format!("callers.{key}"), share, 0.0, 1.0)?;
        }
        if shares.iter().map(|(_, s)| s).sum::<f64>() > 1.0 {
            return Err(
                check.wrong("callers.hang_up", "barge_in, dtmf and hang_up are together more than 1".to_owned())
            );
        }
        let after = check.span("callers.after_s", callers.after_s)?;
        let speech = callers.speech.as_ref().map(|path| wav::read(folder.join(path))).transpose();
        let speech = speech.map_err(|e| check.wrong("callers.speech", e.to_string()))?;
        if let Err((key, reason)) = table.network.check() {
            return Err(check.wrong(&format!("network.{key}"), reason));
        }
        let limits = Limits {
            first_audio_p95: check.range("limits.first_audio_p95_s", table.limits.first_audio_p95_s, 0.0, 3_600.0)?,
            rtf_p95: check.range("limits.rtf_p95", table.limits.rtf_p95, 0.0, 1_000.0)?,
            stalled_turns: check.range("limits.stalled_turns", table.limits.stalled_turns, 0.0, 1.0)?,
            failures: check.range("limits.failures", table.limits.failures, 0.0, 1.0)?,
        };
        for address in &table.target.addresses {
            if !["sip:", "sips:", "http://", "https://"].iter().any(|s| address.starts_with(s)) {
                let reason = format!("{address:?} begins with none of sip:, http://, https://");
                return Err(check.wrong("target.addresses", reason));
            }
        }
        let load = Load {
            arrivals,
            duration: Duration::from_secs_f64(table.duration_s),
            warm_up: Duration::ZERO,
            cycles: Cycles::default(),
            legs: legs.clone(),
            turns,
            think,
            texts,
            says,
            behaviour: Behaviour {
                barge_in: callers.barge_in,
                dtmf: callers.dtmf,
                hang_up: callers.hang_up,
                after,
                speech: speech.map(Arc::new),
            },
            seed: table.seed,
            most: callers.most,
            sampled: 8,
            stop: CancellationToken::new(),
        };
        Ok(Scenario {
            name: table.name.unwrap_or_else(|| file.to_owned()),
            target: target(table.target, legs, table.network),
            load,
            limits,
            batch: table.batch.texts,
        })
    }
}

/// What callers say, where they do not send text.
fn says(check: &Check<'_>, table: &File, folder: &Path) -> Result<Vec<Arc<Saying>>, ScenarioError> {
    let (files, via) = (&table.turns.says, table.target.via);
    if files.is_empty() == (via == Via::Speech) {
        let reason = "target.via = \"speech\" and the recordings that callers say belong together".to_owned();
        return Err(check.wrong("turns.says", reason));
    }
    let callers = &table.callers;
    if !files.is_empty() && callers.barge_in + callers.dtmf + callers.hang_up > 0.0 {
        let reason = "callers who speak listen to the answer: barge_in, dtmf and hang_up must be 0".to_owned();
        return Err(check.wrong("turns.says", reason));
    }
    let read = |file: &PathBuf| {
        let wrong = |why: String| check.wrong("turns.says", format!("{}: {why}", file.display()));
        let clip = wav::read(folder.join(file)).map_err(|error| wrong(error.to_string()))?;
        let name = file.file_stem().map_or_else(String::new, |name| name.to_string_lossy().into_owned());
        Saying::new(&name, clip).map(Arc::new).ok_or_else(|| wrong("nothing in it is audible".to_owned()))
    };
    files.iter().map(read).collect()
}

fn arrivals(check: &Check<'_>, table: ArrivalsTable, folder: &Path) -> Result<Arrivals, ScenarioError> {
    let rate = |key: &str, rate| check.range(key, rate, 0.0, 10_000.0);
    Ok(match table {
        ArrivalsTable::Closed { callers } => {
            check.range("arrivals.callers", f64::from(callers), 1.0, 100_000.0)?;
            Arrivals::Closed(callers)
        }
        ArrivalsTable::Poisson { rate: r } => Arrivals::Poisson(rate("arrivals.rate", r)?),
        ArrivalsTable::Ramp { from, to } => {
            if from.max(to) <= 0.0 {
                return Err(check.wrong("arrivals.to", "a ramp from nothing to nothing".to_owned()));
            }
            Arrivals::Ramp(rate("arrivals.from", from)?, rate("arrivals.to", to)?)
        }
        ArrivalsTable::Burst { size, every_s } => {
            check.range("arrivals.size", f64::from(size), 1.0, 100_000.0)?;
            check.range("arrivals.every_s", every_s, 0.1, 86_400.0)?;
            Arrivals::Burst(size, Duration::from_secs_f64(every_s))
        }
        ArrivalsTable::Trace { at_s, file } => {
            let (key, mut seconds) = match (at_s, file) {
                (Some(at), None) => ("arrivals.at_s", at),
                (None, Some(file)) => ("arrivals.file", trace(check, &folder.join(file))?),
                _ => return Err(check.wrong("arrivals.kind", "a trace has either at_s or file".to_owned())),
            };
            for at in &seconds {
                check.range(key, *at, 0.0, 86_400.0)?;
            }
            seconds.sort_by(f64::total_cmp);
            Arrivals::Trace(seconds.into_iter().map(Duration::from_secs_f64).collect())
        }
    })
}

/// Seconds after the start, the first field of each line; lines with `#` are remarks.
fn trace(check: &Check<'_>, path: &Path) -> Result<Vec<f64>, ScenarioError> {
    let text =
        std::fs::read_to_string(path).map_err(|e| check.wrong("arrivals.file", format!("{}: {e}", path.display())))?;
    let lines = text.lines().enumerate().filter(|(_, l)| !l.trim().is_empty() && !l.starts_with('#'));
    lines
        .map(|(n, line)| {
            let field = line.split([',', ';', '\t', ' ']).next().unwrap_or_default();
            let reason = || format!("{} line {}: {field:?} is no number of seconds", path.display(), n + 1);
            field.trim().parse().map_err(|_| check.wrong("arrivals.file", reason()))
        })
        .collect()
}

fn target(table: TargetTable, legs: Vec<(Leg, f64)>, network: Impairment) -> Target {
    let usual = Target::default();
    Target {
        addresses: table.addresses,
        token: table.token,
        agent: table.agent,
        legs,
        via: table.via,
        agent_bind: table.agent_bind,
        spawn: table.spawn,
        transport: match table.transport {
            None | Some(TransportName::Udp) => sip::Transport::Udp,
            Some(TransportName::Tcp) => sip::Transport::Tcp,
            Some(TransportName::Tls) => sip::Transport::Tls,
        },
        codecs: table.codecs.unwrap_or(usual.codecs.clone()),
        srtp: table.srtp,
        credentials: table
            .username
            .map(|username| sip::Credentials { username, password: table.password.unwrap_or_default() }),
        impairment: (!network.is_none()).then_some(network),
        verify: table.verify.unwrap_or(true),
        ..usual
    }
}

/// Says where in the file a mistake is.
struct Check<'a> {
    file: &'a str,
    text: &'a str,
}

impl Check<'_> {
    fn wrong(&self, key: &str, reason: String) -> ScenarioError {
        ScenarioError { file: self.file.to_owned(), line: self.line_of(key), key: key.to_owned(), reason }
    }

    fn range(&self, key: &str, value: f64, least: f64, most: f64) -> Result<f64, ScenarioError> {
        match value.is_finite() && (least..=most).contains(&value) {
            true => Ok(value),
            false => Err(self.wrong(key, format!("{value} is not between {least} and {most}"))),
        }
    }

    fn span(&self, key: &str, [from, to]: [f64; 2]) -> Result<(f64, f64), ScenarioError> {
        self.range(key, from, 0.0, 3_600.0)?;
        self.range(key, to, from, 3_600.0)?;
        Ok((from, to))
    }

    /// A mistake that the TOML reader found: it knows the place, and the key is what stands there.
    fn syntax(&self, error: &toml::de::Error) -> ScenarioError {
        let start = error.span().map_or(0, |span| span.start.min(self.text.len()));
        let line = self.text.get(..start).unwrap_or(self.text).lines().count().max(1);
        // A span that begins a line lies behind the newline that `lines` does not count.
        let line = line + usize::from(start > 0 && self.text.as_bytes().get(start - 1) == Some(&b'\n'));
        let words = self.text.lines().nth(line - 1).unwrap_or_default();
        let own = words.split('=').next().unwrap_or_default().trim().trim_matches(['[', ']']).to_owned();
        let section = self.text.lines().take(line).filter_map(|l| l.trim().strip_prefix('[')).last();
        let section = section.map(|s| s.split(']').next().unwrap_or(s)).filter(|s| *s != own);
        let key = match (section, words.contains('=')) {
            (Some(section), true) => format!("{section}.{own}"),
            _ if own.is_empty() => "file".to_owned(),
            _ => own,
        };
        let reason = error.message().lines().collect::<Vec<_>>().join(" ");
        ScenarioError { file: self.file.to_owned(), line, key, reason }
    }

    /// The line of `section.key`: that of the key, else of the section, else the first.
    fn line_of(&self, key: &str) -> usize {
        let (section, key) = key.rsplit_once('.').map_or((None, key), |(s, k)| (Some(s), k));
        let mut within = None;
        let mut of_section = 1;
        for (n, line) in self.text.lines().enumerate() {
            let line = line.trim();
            if let Some(name) = line.strip_prefix('[').and_then(|l| l.split(']').next()) {
                within = Some(name);
                if Some(name) == section {
                    of_section = n + 1;
                }
            } else if let Some((name, _)) = line.split_once('=') {
                let name = name.trim();
                if within == section && name == key {
                    return n + 1;
                }
                // `section.key = ...` or `section = { key = ... }` at the top.
                if within.is_none() && section.is_some_and(|s| name == s || name == format!("{s}.{key}")) {
                    return n + 1;
                }
            }
        }
        of_section
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GOOD: &str = r#"
name = "afternoon"
seed = 7
duration_s = 30

[target]
addresses = ["sip:demo@127.0.0.1:5060", "http://127.0.0.1:8080"]
codecs = ["opus", "pcmu"]

[arrivals]
kind = "ramp"
from = 0.5
to = 4

[legs]
sip = 3
webrtc = 1

[turns]
per_call = [1, 3]
think_s = [0.2, 0.8]
languages = ["en", "de"]
lengths = ["short", "medium"]

[callers]
barge_in = 0.2
after_s = [0.5, 1.5]

[network]
loss = 0.01
jitter_ms = 15

[limits]
first_audio_p95_s = 0.5
"#;

    fn parse(text: &str) -> Result<Scenario, ScenarioError> {
        Scenario::parse("s.toml", text, Path::new("."))
    }

    #[test]
    fn a_scenario_is_read() {
        let scenario = parse(GOOD).unwrap();
        assert_eq!(scenario.load.arrivals, Arrivals::Ramp(0.5, 4.0));
        assert_eq!(scenario.load.legs, [(Leg::Sip, 3.0), (Leg::Webrtc, 1.0)]);
        assert_eq!(scenario.load.turns, Some(1..=3));
        assert_eq!(scenario.target.impairment.unwrap().loss, 0.01);
        assert_eq!(scenario.limits.first_audio_p95, 0.5);
        assert!(scenario.load.texts.iter().all(|t| ["en", "de"].contains(&t.language) && t.length != Length::Long));
    }

    #[test]
    fn every_mistake_is_told_with_line_and_key() {
        let cases = [
            ("seed = 7", "sed = 7", 3, "sed"),
            ("duration_s = 30", "duration_s = -1", 4, "duration_s"),
            ("duration_s = 30", "duration_s = \"long\"", 4, "duration_s"),
            ("codecs = [\"opus\", \"pcmu\"]", "codecs = [\"mp3\"]", 8, "target.codecs"),
            ("\"http://127.0.0.1:8080\"", "\"ftp://x\"", 7, "target.addresses"),
            ("kind = \"ramp\"", "kind = \"flood\"", 11, "arrivals.kind"),
            ("to = 4", "to = -4", 13, "arrivals.to"),
            ("webrtc = 1", "webrtc = -1", 17, "legs.webrtc"),
            ("per_call = [1, 3]", "per_call = [3, 1]", 20, "turns.per_call"),
            ("think_s = [0.2, 0.8]", "think_s = [2, 1]", 21, "turns.think_s"),
            ("\"de\"]", "\"xx\"]", 22, "turns.languages"),
            ("barge_in = 0.2", "barge_in = 1.2", 26, "callers.barge_in"),
            ("barge_in = 0.2", "barge_inn = 0.2", 26, "callers.barge_inn"),
            ("loss = 0.01", "loss = 2", 30, "network.loss"),
            ("loss = 0.01", "los = 0.01", 30, "network.los"),
            ("first_audio_p95_s = 0.5", "first_audio_p95_s = -5", 34, "limits.first_audio_p95_s"),
        ];
        for (good, bad, line, key) in cases {
            assert!(GOOD.contains(good), "{good}");
            let error = parse(&GOOD.replacen(good, bad, 1)).err().unwrap_or_else(|| panic!("{bad} is taken"));
            assert_eq!((error.line, error.key.as_str()), (line, key), "{error}");
            assert!(!error.reason.is_empty());
        }
        let error = parse("duration_s = 3\n[arrivals]\nkind = \"closed\"\n").err().unwrap();
        assert!(error.reason.contains("callers"), "{error}");
        assert!(parse("duration_s = 3").is_err());
        assert!(parse("").is_err());
    }

    #[test]
    fn traces_are_read_from_files() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("t.csv"), "# seconds\n3.5,x\n1\n\n").unwrap();
        let text = "duration_s = 9\n[arrivals]\nkind = \"trace\"\nfile = \"t.csv\"\n";
        let scenario = Scenario::parse("s.toml", text, folder.path()).unwrap();
        assert_eq!(scenario.load.arrivals, Arrivals::Trace([1.0, 3.5].map(Duration::from_secs_f64).to_vec()));
        std::fs::write(folder.path().join("t.csv"), "soon\n").unwrap();
        let error = Scenario::parse("s.toml", text, folder.path()).err().unwrap();
        assert_eq!((error.line, error.key.as_str()), (4, "arrivals.file"));
    }

    #[test]
    fn callers_who_speak_need_recordings_and_do_not_interrupt() {
        let spoken = GOOD
            .replace("[arrivals]", "via = \"speech\"\n\n[arrivals]")
            .replace("[turns]", "[turns]\nsays = [\"../tests/data/speech-8k.wav\"]");
        let calm = spoken.replace("barge_in = 0.2", "barge_in = 0.0");
        let scenario = parse(&calm).expect("valid");
        let names: Vec<&str> = scenario.load.says.iter().map(|saying| saying.name()).collect();
        assert_eq!((names.as_slice(), scenario.target.via), (["speech-8k"].as_slice(), Via::Speech));
        let nowhere = calm.replace("speech-8k.wav", "nothing.wav");
        for wrong in [
            spoken,
            calm.replace("via = \"speech\"", ""),
            GOOD.replace("[arrivals]", "via = \"speech\"\n[arrivals]"),
            nowhere,
        ] {
            assert_eq!(parse(&wrong).err().expect("refused").key, "turns.says");
        }
    }
}
