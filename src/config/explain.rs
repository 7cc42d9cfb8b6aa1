//! What mistakes in a configuration are told as: where they stand, which name was meant, what a value looks like.

use super::ConfigError;

/// An error of the parser, with the line and column of `text`.
pub(super) fn located(origin: &str, text: &str, error: &toml::de::Error) -> ConfigError {
    let message = explain(error.message());
    let Some(span) = error.span() else { return ConfigError { origin: origin.to_owned(), message } };
    let before = &text[..span.start.min(text.len())];
    let line = before.matches('\n').count() + 1;
    let column = before.rsplit('\n').next().unwrap_or_default().chars().count() + 1;
    ConfigError { origin: format!("{origin}:{line}:{column}"), message: with_example(message, text, span.start) }
}

/// Where the key of a mistake across keys (`[section] key ...`) stands in the file, else only the file.
pub(super) fn place(origin: &str, text: &str, message: &str) -> String {
    let found = message.strip_prefix('[').and_then(|rest| rest.split_once(']')).and_then(|(section, rest)| {
        let rest = rest.trim_start_matches([' ', ':']);
        let end = rest.find(|c: char| !(c.is_ascii_alphanumeric() || c == '_')).unwrap_or(rest.len());
        let key = &rest[..end];
        let mut inside = false;
        let mut header = None;
        for (number, line) in text.lines().enumerate() {
            let line = line.trim();
            if line.starts_with('[') {
                let name = line.trim_start_matches('[').split(']').next().unwrap_or_default();
                inside = name.trim() == section;
                if inside && header.is_none() {
                    header = Some(number);
                }
            } else if inside && line.split('=').next().is_some_and(|name| !key.is_empty() && name.trim() == key) {
                return Some(number);
            }
        }
        header
    });
    found.map_or_else(|| origin.to_owned(), |number| format!("{origin}:{}", number + 1))
}

/// Names that are at least so alike (Jaro-Winkler) are taken for a slip of the pen; then no other name is listed.
const ALIKE: f64 = 0.8;

/// Every key with its default, as it is shipped.
const SHIPPED: &str = include_str!("../../config/gateway.toml");

/// Names of Rust's types in serde's messages, and what they are called by those who write configurations.
const TYPES: [(&str, &str); 9] = [
    ("expected usize", "expected a whole number"),
    ("expected u64", "expected a whole number"),
    ("expected u32", "expected a whole number"),
    ("expected u16", "expected a whole number up to 65535"),
    ("expected u8", "expected a whole number up to 255"),
    ("expected i32", "expected a whole number"),
    ("expected f64", "expected a number"),
    ("expected f32", "expected a number"),
    ("expected a sequence", "expected a list"),
];

/// Adds to a message about a value at byte `at` of `text` what the key is by default.
fn with_example(message: String, text: &str, at: usize) -> String {
    if !message.starts_with("invalid ") {
        return message;
    }
    let message = TYPES.iter().fold(message, |message, (rust, plain)| message.replace(rust, plain));
    let before = &text[..at.min(text.len())];
    let line = text[before.rfind('\n').map_or(0, |end| end + 1)..].lines().next().unwrap_or_default();
    let Some((key, _)) = line.split_once('=') else { return message };
    let header = before.lines().rev().map(str::trim).find(|line| line.starts_with('['));
    match header.and_then(|header| shipped(header.trim_matches(['[', ']', ' ']), key.trim())) {
        Some(example) => format!("{message}, for example `{example}`"),
        None => message,
    }
}

/// The line of the shipped configuration that sets `key` of `section`, without its comment.
fn shipped(section: &str, key: &str) -> Option<&'static str> {
    let name = |line: &'static str| line.trim_start_matches(['#', '[', ' ']).split(']').next().unwrap_or_default();
    let is_header = |line: &str| line.trim_start_matches(['#', ' ']).starts_with('[');
    let inside = SHIPPED.lines().skip_while(|line| !(is_header(line) && name(line) == section)).skip(1);
    let mut keys = inside.take_while(|line| !is_header(line)).map(|line| line.trim_start_matches(['#', ' ']));
    let found = keys.find(|line| line.split_once('=').is_some_and(|(name, _)| name.trim() == key))?;
    Some(found.split("  ").next().unwrap_or(found).trim_end())
}

/// Known names that are all listed where none is so near; of more, as many of the nearest.
pub(super) const LISTED: usize = 8;

/// Says of serde's message about an unknown name which known ones are the nearest.
pub(super) fn explain(message: &str) -> String {
    let mut quoted = message.split('`').skip(1).step_by(2);
    let is_name = message.starts_with("unknown field") || message.starts_with("unknown variant");
    let (true, Some(found)) = (is_name, quoted.next()) else { return message.to_owned() };
    let mut known: Vec<_> = quoted.map(|known| (strsim::jaro_winkler(found, known), known)).collect();
    known.sort_by(|a, b| b.0.total_cmp(&a.0));
    let what = message.split('`').next().unwrap_or_default();
    match known.first() {
        None => message.to_owned(),
        Some((alike, nearest)) if *alike >= ALIKE => format!("{what}`{found}`; did you mean `{nearest}`?"),
        Some((_, nearest)) if known.len() <= LISTED => format!("{message}; did you mean `{nearest}`?"),
        Some(_) => {
            let nearest: Vec<String> = known.iter().take(LISTED).map(|(_, name)| format!("`{name}`")).collect();
            format!("{what}`{found}`; the nearest of {} names: {}", known.len(), nearest.join(", "))
        }
    }
}
