//! The attacks by name, how hard they are, and what came of one.

use std::fmt;
use std::str::FromStr;
use std::time::{Duration, Instant};

use serde::Serialize;

use crate::under_test::process::Host;

/// Which attack.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Row {
    /// Nothing: the same gateway and calls, and what the computer itself costs them.
    Control,
    /// Malformed messages and unauthenticated requests, 7,000 a second.
    Malformed,
    /// INVITEs without description or ACK, 100 a second.
    HalfOpen,
    /// RTP and digits at every media port, 10,000 packets a second.
    Rtp,
    /// Guessed passwords, 1,000 a second; replays; a trunk that asks for the password of another realm.
    Digest,
    /// Destinations that no caller may reach.
    Toll,
    /// Thousands of connections that say next to nothing.
    Slow,
    /// More calls than the process may open files for.
    Descriptors,
}

impl Row {
    /// All of them.
    pub const ALL: [Row; 8] =
        [Row::Control, Row::Malformed, Row::HalfOpen, Row::Rtp, Row::Digest, Row::Toll, Row::Slow, Row::Descriptors];

    /// As on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Row::Control => "control",
            Row::Malformed => "malformed",
            Row::HalfOpen => "half-open",
            Row::Rtp => "rtp",
            Row::Digest => "digest",
            Row::Toll => "toll",
            Row::Slow => "slow",
            Row::Descriptors => "descriptors",
        }
    }
}

impl FromStr for Row {
    type Err = String;

    fn from_str(name: &str) -> Result<Row, String> {
        let names = || Row::ALL.map(Row::name).join(", ");
        Row::ALL.into_iter().find(|row| row.name() == name).ok_or_else(|| format!("expected one of {}", names()))
    }
}

/// The figure that tells how many turns were heard.
pub(super) const TURNS: &str = "turns heard on the calls that were up";
/// Late packets of two rows within this are of one pause of the computer.
const TOGETHER: Duration = Duration::from_millis(250);

/// The figure that tells how much larger the gateway's process became.
pub(super) const MEMORY: &str = "memory grown at most, MiB";

/// The figure that tells how many packets came too late for a listener: those of the gateway and those of a computer that stood
/// still, its telephones included.
pub(super) const LATE: &str = "packets late behind a buffer of 60 ms";

/// How hard, and for how long.
#[derive(Clone, Debug)]
pub struct Options {
    /// Command that starts the gateway, without its configuration: `antiphon serve`.
    pub spawn: String,
    /// Which voice speaks: `tone`, or another kind of `[engine]`.
    pub engine: String,
    /// Calls that are up and spoken on meanwhile.
    pub calls: usize,
    /// How long the attack lasts.
    pub lasts: Duration,
    /// Share of the attack's full rate and number, up to 1.
    pub scale: f64,
}

/// What a figure must be.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub enum Must {
    /// It is told for what it is worth.
    Nothing,
    /// This or less.
    AtMost(f64),
    /// This or more.
    AtLeast(f64),
}

impl fmt::Display for Must {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Must::Nothing => Ok(()),
            Must::AtMost(most) => f.pad(&format!("at most {}", number(*most))),
            Must::AtLeast(least) => f.pad(&format!("at least {}", number(*least))),
        }
    }
}

/// A figure as it is read: no digits behind the point of what is counted.
fn number(value: f64) -> String {
    if value.fract() == 0.0 { format!("{value:.0}") } else { format!("{value:.1}") }
}

/// Something that was measured.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Figure {
    /// What.
    pub what: String,
    /// How much.
    #[serde(rename = "measured")]
    pub value: f64,
    /// What it must be.
    pub must: Must,
    /// Whether it is a matter of how fast this computer is.
    pub timing: bool,
    /// When each of what is counted was, where that is known.
    #[serde(skip)]
    pub at: Vec<Instant>,
}

impl Figure {
    pub(super) fn new(what: impl Into<String>, value: f64, must: Must) -> Figure {
        Figure { what: what.into(), value, must, timing: false, at: Vec::new() }
    }

    pub(super) fn timed(what: impl Into<String>, value: f64, must: Must) -> Figure {
        Figure { timing: true, ..Figure::new(what, value, must) }
    }

    /// Whether it is what it must be.
    pub fn holds(&self) -> bool {
        match self.must {
            Must::Nothing => true,
            Must::AtMost(most) => self.value <= most,
            Must::AtLeast(least) => self.value >= least,
        }
    }
}

/// What came of an attack.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Verdict {
    /// Which.
    pub row: Row,
    /// What was measured.
    pub figures: Vec<Figure>,
}

/// All attacks of one command, as JSON.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Findings {
    /// Seconds since the Unix epoch.
    pub when: u64,
    /// The command line.
    pub command: String,
    /// Where attacker, telephones and gateway ran.
    pub host: Host,
    /// Calls that were up and spoken on.
    pub calls: usize,
    /// How long an attack lasted, seconds.
    pub seconds: f64,
    /// Share of the full rates and numbers.
    pub scale: f64,
    /// What came of each.
    pub rows: Vec<Verdict>,
    /// Those that could not be made, with the reason.
    pub failed: Vec<(Row, String)>,
}

impl Verdict {
    /// Judges late packets by those of `control`, the same calls without an attack: at most as many a turn, and what chance
    /// adds to a count (three standard deviations of a Poisson count, and of the control's own), beside those that were late
    /// when the control's were: the computer stood still for both. Without a late packet there, none is allowed here either.
    pub fn beside(&mut self, control: &Verdict) {
        let of =
            |verdict: &Verdict, what: &str| verdict.figures.iter().find(|figure| figure.what == what).map(|f| f.value);
        let counted = |verdict: &Verdict| Some((of(verdict, LATE)?, of(verdict, TURNS).filter(|turns| *turns > 0.0)?));
        let (Some((_, turns)), Some((late, without))) = (counted(self), counted(control)) else { return };
        let share = turns / without;
        let expected = late * share;
        let chance = 3.0 * (expected + late * share * share).sqrt();
        let Some(at) = self.figures.iter().position(|figure| figure.what == LATE) else { return };
        let theirs = control.figures.iter().filter(|figure| figure.what == LATE).flat_map(|figure| &figure.at);
        let theirs: Vec<Instant> = theirs.copied().collect();
        let together =
            |one: &&Instant| theirs.iter().any(|other| one.max(&other).duration_since(**one.min(&other)) < TOGETHER);
        let together = self.figures[at].at.iter().filter(together).count() as f64;
        self.figures[at].must = Must::AtMost((expected + chance).floor() + together);
        self.figures.insert(at + 1, Figure::new("  when those of the control row were late", together, Must::Nothing));
        self.figures.insert(at + 1, Figure::new("  in as many turns of the control row", expected, Must::Nothing));
    }

    /// What is not as it must be; `timing`: figures that depend on this computer's speed count.
    pub fn broken(&self, timing: bool) -> Vec<&Figure> {
        self.figures.iter().filter(|figure| !figure.holds() && (timing || !figure.timing)).collect()
    }
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let holds = self.broken(true).is_empty();
        writeln!(f, "{:<58} {:>12}  {:<16}", self.row.name(), "measured", "must")?;
        for figure in &self.figures {
            let judged = if figure.holds() { "" } else { "BROKEN" };
            let line = format!("  {:<56} {:>12}  {:<16}{judged}", figure.what, number(figure.value), figure.must);
            writeln!(f, "{}", line.trim_end())?;
        }
        writeln!(f, "  {}", if holds { "holds" } else { "BROKEN" })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_verdict_names_what_is_broken_and_a_slow_computer_breaks_only_what_is_timed() {
        let figures = vec![
            Figure::new("gaps", 0.0, Must::AtMost(0.0)),
            Figure::timed("p99, ms", 250.0, Must::AtMost(200.0)),
            Figure::new("sent", 7_000.0, Must::Nothing),
        ];
        let verdict = Verdict { row: Row::Malformed, figures };
        assert!(verdict.broken(false).is_empty());
        assert_eq!(verdict.broken(true)[0].what, "p99, ms");
        let said = verdict.to_string();
        let line = said.lines().find(|line| line.contains("p99, ms")).expect("a line of each figure");
        assert!(said.starts_with("malformed ") && line.ends_with("BROKEN"), "{said}");
        assert!(line.contains("250") && line.contains("at most 200"), "{said}");
        let json = serde_json::to_value(&verdict).expect("numbers and names");
        assert_eq!(json["row"], "malformed");
        let figure = serde_json::json!({ "what": "gaps", "measured": 0.0, "must": { "atMost": 0.0 }, "timing": false });
        assert_eq!((&json["figures"][0], &json["figures"][2]["must"]), (&figure, &"nothing".into()));
        assert!(!Figure::new("places", 1.0, Must::AtLeast(2.0)).holds());
    }

    /// What the telephones of a row heard.
    fn heard(row: Row, turns: f64, late: f64) -> Verdict {
        let figures = vec![
            Figure::new(TURNS, turns, Must::AtLeast(1.0)),
            Figure::timed(LATE, late, Must::AtMost(0.0)),
            Figure::timed("gaps", 0.0, Must::AtMost(0.0)),
        ];
        Verdict { row, figures }
    }

    #[test]
    fn late_packets_are_judged_by_those_of_the_same_calls_without_an_attack() {
        // Turns and late packets of the attack, of the control; what is allowed, and whether it holds.
        for ((turns, late), (without, idle), most, holds) in [
            ((1_000.0, 40.0), (1_000.0, 36.0), 61.0, true),
            ((1_000.0, 62.0), (1_000.0, 36.0), 61.0, false),
            // A tenth of the turns: 3.6 late, and a little chance.
            ((100.0, 9.0), (1_000.0, 36.0), 9.0, true),
            ((100.0, 20.0), (1_000.0, 36.0), 9.0, false),
            // A computer that was never late makes no excuse.
            ((1_000.0, 1.0), (1_000.0, 0.0), 0.0, false),
            ((1_000.0, 0.0), (1_000.0, 0.0), 0.0, true),
        ] {
            let mut verdict = heard(Row::Rtp, turns, late);
            verdict.beside(&heard(Row::Control, without, idle));
            let figure = &verdict.figures[1];
            assert_eq!((figure.must, figure.holds()), (Must::AtMost(most), holds), "{turns} {late} {without} {idle}");
            assert!((verdict.figures[2].value - idle * turns / without).abs() < 1e-9, "it is told beside");
        }
        // Without a control, or where it heard nothing, no late packet is allowed.
        let mut alone = heard(Row::Rtp, 1_000.0, 1.0);
        alone.beside(&heard(Row::Control, 0.0, 9.0));
        assert_eq!(alone.broken(true).len(), 1);
    }

    #[test]
    fn rows_are_known_by_their_names() {
        for row in Row::ALL {
            assert_eq!(row.name().parse(), Ok(row));
        }
        assert!("nothing".parse::<Row>().is_err_and(|error| error.contains("half-open")));
    }
}
