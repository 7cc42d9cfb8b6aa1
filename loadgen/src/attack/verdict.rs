//! The attacks by name, how hard they are, and what came of one.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

/// Which attack.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Row {
    /// Malformed messages and unauthenticated requests, 7,000 a second.
    Malformed,
    /// INVITEs without description or ACK, 100 a second.
    HalfOpen,
    /// RTP and digits at every media port, 10,000 packets a second.
    Rtp,
    /// Guessed passwords, 1,000 a second; replays; a trunk that asks for the password of another realm.
    Digest,
    /// Destinations that nobody may call.
    Toll,
    /// Thousands of connections that say next to nothing.
    Slow,
    /// More calls than the process may open files for.
    Descriptors,
}

impl Row {
    /// All of them.
    pub const ALL: [Row; 7] =
        [Row::Malformed, Row::HalfOpen, Row::Rtp, Row::Digest, Row::Toll, Row::Slow, Row::Descriptors];

    /// As on the command line.
    pub fn name(self) -> &'static str {
        match self {
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
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Must {
    /// It is told for what it is worth.
    Nothing,
    /// This or less.
    AtMost(f64),
    /// This or more.
    AtLeast(f64),
}

/// Something that was measured.
#[derive(Clone, Debug, PartialEq)]
pub struct Figure {
    /// What.
    pub what: String,
    /// How much.
    pub value: f64,
    /// What it must be.
    pub must: Must,
    /// Whether it is a matter of how fast this computer is.
    pub timing: bool,
}

impl Figure {
    pub(super) fn new(what: impl Into<String>, value: f64, must: Must) -> Figure {
        Figure { what: what.into(), value, must, timing: false }
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
#[derive(Clone, Debug, PartialEq)]
pub struct Verdict {
    /// Which.
    pub row: Row,
    /// What was measured.
    pub figures: Vec<Figure>,
}

impl Verdict {
    /// What is not as it must be; `timing`: figures that depend on this computer's speed count.
    pub fn broken(&self, timing: bool) -> Vec<&Figure> {
        self.figures.iter().filter(|figure| !figure.holds() && (timing || !figure.timing)).collect()
    }
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let number = |value: f64| if value.fract() == 0.0 { format!("{value:.0}") } else { format!("{value:.1}") };
        writeln!(f, "{}: {}", self.row.name(), if self.broken(true).is_empty() { "holds" } else { "BROKEN" })?;
        for figure in &self.figures {
            let must = match figure.must {
                Must::Nothing => String::new(),
                Must::AtMost(most) => format!("at most {}", number(most)),
                Must::AtLeast(least) => format!("at least {}", number(least)),
            };
            let judged = if figure.holds() { "" } else { "  BROKEN" };
            writeln!(f, "  {:<58} {:>12}  {must}{judged}", figure.what, number(figure.value))?;
        }
        Ok(())
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
        assert!(said.starts_with("malformed: BROKEN\n") && said.contains("at most 200  BROKEN"), "{said}");
        assert!(!Figure::new("places", 1.0, Must::AtLeast(2.0)).holds());
    }

    #[test]
    fn rows_are_known_by_their_names() {
        for row in Row::ALL {
            assert_eq!(row.name().parse(), Ok(row));
        }
        assert!("nothing".parse::<Row>().is_err_and(|error| error.contains("half-open")));
    }
}
