//! Days of the week as opening hours shorten them: "Mo.-Fr.", "lun., mer. et ven.", "Mon/Wed/Fri".

/// What stands between two days, as a pattern; the words between are those of the languages that have such rules.
const JOINT: &str = r"(?: ?[-–—/&] ?|, ?| (?:bis|und|oder|au|à|et|ou|al?|y|o|to|thru|through|until|till|and|or) )";

/// A pattern of two days or more, of which `day` is the pattern of one, with what joins them.
pub(super) fn pattern(day: &str) -> String {
    format!(r"{day}(?:\.?{JOINT}{day})+\.?")
}

/// The days in `text`, which [`pattern`] has found, in words: `named` knows each, `to` stands for a dash and `and` for its
/// sign. `after`: what follows, which shows whether the last full stop ends a sentence.
///
/// `None` where nothing shows that these are days: neither a full stop nor a dash nor a word for a span.
pub(super) fn say(
    text: &str,
    after: &str,
    named: fn(&str) -> Option<&'static str>,
    to: &str,
    and: &str,
) -> Option<String> {
    // In French and Spanish "mer et" and "mar y" are the sea.
    const SHOWING: [&str; 10] = ["bis", "und", "oder", "au", "a", "al", "to", "thru", "through", "and"];
    if after.starts_with(char::is_alphanumeric) {
        return None;
    }
    let spanned = text.split(' ').any(|word| SHOWING.contains(&word));
    (spanned || text.contains(['.', '-', '–', '—', '/'])).then_some(())?;
    let mut said = String::new();
    let mut rest = text;
    while let Some(c) = rest.chars().next() {
        let end = rest.find(|c: char| !c.is_alphabetic()).unwrap_or(rest.len());
        let word = match c {
            _ if end > 0 => named(&rest[..end]).unwrap_or(&rest[..end]),
            '-' | '–' | '—' => to,
            '&' => and,
            ',' | '/' => {
                said.push(',');
                ""
            }
            _ => "",
        };
        if !word.is_empty() {
            if !said.is_empty() {
                said.push(' ');
            }
            said.push_str(word);
        }
        rest = &rest[end.max(c.len_utf8())..];
    }
    if text.ends_with('.') && after.trim().is_empty() {
        said.push('.');
    }
    Some(said)
}
