//! English dates, times of day, and spans of both.

use regex::Captures;

use super::numbers::{cardinal, ordinal, pairs, plural, quantity, year};
use super::tables::{DAYS, MONTHS};
use super::{loose, number, rule};
use crate::text::days;
use crate::text::scan::{Context, Rule};

const MONTH: &str = "(?:jan(?:uary)?|feb(?:ruary)?|mar(?:ch)?|apr(?:il)?|may|june?|july?|aug(?:ust)?|sept?(?:ember)?|oct(?:ober)?|nov(?:ember)?|dec(?:ember)?)";
/// The stop behind "pm" ends a sentence, that behind "p.m." belongs to it.
const HALF: &str = r"(?:[ap]\. ?m\.?|[ap] ?m)";
const DECADE: &str = r"(?:(?:1[1-9]|20)\d0|[1-9]0)";
const ZONE: &str = "(?: ?([ECMP][SD]?T|GMT|UTC|CET|CEST|BST|e[sd]t|p[sd]t|c[sd]t|m[sd]t|gmt|utc))?";

/// What begins with a digit.
pub(super) fn rules(rules: &mut Vec<Rule>) {
    // 2012-01-05, and with a time behind it.
    rule(rules, r"(\d{4})([-/.])(\d{1,2})([-/.])(\d{1,2})(?:T(\d{2}):(\d{2})(?::\d{2}(?:\.\d+)?)?(Z?))?", |c, _| {
        (c[2] == c[4]).then_some(())?;
        let date = date(Some(&c[5]), number(&c[3]), Some(&c[1]))?;
        let Some(hour) = c.get(6) else { return Some(date) };
        let zone = if c[8].is_empty() { "" } else { " UTC" };
        Some(format!("{date} at {}{zone}", clock(hour.as_str(), &c[7])?))
    });
    // A year and a month, which only a zero before it tells from a span.
    rule(rules, r"((?:19|20)\d{2})-(0[1-9])", |c, _| date(None, number(&c[2]), Some(&c[1])));
    // 01/05/2020: the month first, unless it cannot be one.
    rule(rules, r"(\d{1,2})([-/.])(\d{1,2})([-/.])(\d{4})", |c, _| {
        (c[2] == c[4]).then_some(())?;
        let (first, second) = (number(&c[1]), number(&c[3]));
        if first > 12 { date(Some(&c[1]), second, Some(&c[5])) } else { date(Some(&c[3]), first, Some(&c[5])) }
    });
    rule(rules, &format!(r"(?i)(\d{{1,2}})(?:st|nd|rd|th)?(?: of)? ({MONTH})\.?,? (\d{{4}})"), |c, context| {
        // Between a day and a year "may" is no verb.
        let month = month(&c[2]).or_else(|| month(&c[2].to_uppercase()))?;
        date(Some(&c[1]), month, Some(&c[3])).map(|said| behind_article(said, context))
    });
    rule(rules, &format!(r"(?i)(\d{{1,2}})(?:st|nd|rd|th)?(?: of)? ({MONTH})(\.?)"), |c, context| {
        let said = behind_article(date(Some(&c[1]), month(&c[2])?, None)?, context);
        // The stop of a shortened month, unless it ends the sentence as well.
        let ends = !c[3].is_empty() && (c[2].len() > 4 || context.after.trim().is_empty());
        Some(if ends { format!("{said}.") } else { said })
    });
    rule(rules, &format!(r"(?i)(\d{{1,2}}) ?[-–—] ?(\d{{1,2}}) ({MONTH})(?:,? (\d{{4}}))?"), |c, _| {
        let (from, to) = (number(&c[1]), number(&c[2]));
        ((1..=31).contains(&from) && from < to && to <= 31).then_some(())?;
        let name = MONTHS.get(month(&c[3])? as usize - 1)?.0;
        let of = c.get(4).map(|of| format!(" {}", year(number(of.as_str())))).unwrap_or_default();
        Some(format!("the {} to the {} of {name}{of}", ordinal(from), ordinal(to)))
    });
    // "on 3/15": a day where a word says so. 05/2024 is a month, and so is what begins with a zero: of a card.
    rule(rules, r"(\d{1,2})/(\d{1,2})", |c, context| {
        const BEFORE: [&str; 14] = [
            "on",
            "until",
            "before",
            "after",
            "since",
            "through",
            "dated",
            "monday",
            "tuesday",
            "wednesday",
            "thursday",
            "friday",
            "saturday",
            "sunday",
        ];
        let of_days = BEFORE.contains(&context.last_word().to_lowercase().as_str());
        let share = matches!(&c[0], "1/2" | "1/3" | "2/3" | "1/4" | "3/4" | "9/11" | "24/7");
        let (first, second) = (number(&c[1]), number(&c[2]));
        (of_days && !share).then_some(())?;
        let said = if first > 12 { date(Some(&c[1]), second, None) } else { date(Some(&c[2]), first, None) };
        said.map(|said| behind_article(said, context))
    });
    // "12/05": no share is of "05".
    rule(rules, r"([1-9]|1[0-2])/(0[1-9])", |c, context| {
        date(Some(&c[2]), number(&c[1]), None).map(|said| behind_article(said, context))
    });
    rule(rules, r"(0?[1-9]|1[0-2])/(20\d{2})", |c, _| date(None, number(&c[1]), Some(&c[2])));
    rule(rules, r"(0[1-9])/(\d{2})", |c, _| Some(format!("{} {}", quantity(&c[1]), pairs(&c[2]))));
    // 11/17/05: as above, of this century or the last.
    rule(rules, r"(\d{1,2})/(\d{1,2})/(\d{2})", |c, _| {
        let (first, second) = (number(&c[1]), number(&c[2]));
        let said = if first > 12 { date(Some(&c[1]), second, None) } else { date(Some(&c[2]), first, None) };
        let of = if c[3].starts_with('0') { quantity(&c[3]) } else { pairs(&c[3]) };
        said.map(|said| format!("{said} {of}"))
    });
    rule(rules, &format!(r"(?i)(\d{{1,2}})-({MONTH})-(\d{{4}})"), |c, _| date(Some(&c[1]), month(&c[2])?, Some(&c[3])));
    // Halves and quarters of years.
    rule(rules, r"([1-4])([QH])'?(\d{4}|\d{2})", |c, context| {
        part_of_year(&c[2], &c[1], &c[3]).map(|said| behind_article(said, context))
    });
    times(rules);
    // 1960s-80s, mid-1980s
    rule(rules, &format!(r"({DECADE})'?s ?[-–—] ?({DECADE})'?s"), |c, _| {
        Some(format!("{} to {}", decade(&c[1]), decade(&c[2])))
    });
    rule(rules, &format!(r"[-–]({DECADE})'?s"), |c, context| {
        context.last().is_some_and(char::is_alphabetic).then(|| format!(" {}", decade(&c[1])))
    });
    // 1990s, 1990's, '70s
    rule(rules, r"'(\d0)'?s", |c, _| Some(plural(&cardinal(number(&c[1])))));
    rule(rules, &format!(r"({DECADE})'?s"), |c, _| Some(decade(&c[1])));
    rule(rules, r"((?:18|19|20)\d0) s", |c, _| Some(decade(&c[1])));
    rule(rules, r"'(\d{2})", |c, context| {
        let before = context.last_word().to_lowercase();
        (matches!(before.as_str(), "of" | "in" | "since" | "summer" | "class") && &c[1] >= "10")
            .then(|| cardinal(number(&c[1])))
    });
    rule(rules, r"(\d{1,4}) ?(B\.C\.E\.|B\.C\.?|A\.D\.?|C\.E\.|BCE?|AD|CE)", |c, _| {
        let era: String = c[2].chars().filter(char::is_ascii_alphabetic).collect();
        let said = if c[1].len() == 3 { pairs(&c[1]) } else { year(number(&c[1])) };
        Some(format!("{said} {era}"))
    });
    // "mid-2024"
    rule(rules, r"[-–]((?:19|20)\d{2})", |c, context| {
        let part = matches!(context.last_word().to_lowercase().as_str(), "mid" | "early" | "late" | "post" | "pre");
        part.then(|| format!(" {}", year(number(&c[1]))))
    });
    // Years that go on to another.
    rule(rules, r"((?:1[1-9]|20)\d{2}) ?[-–—] ?((?:1[1-9]|20)\d{2})", |c, context| {
        // "1980-1970 kg" are weights.
        let measured = super::measures::is_unit(context.next_word()) && context.next_word().len() > 1;
        (!measured).then(|| format!("{} to {}", year(number(&c[1])), year(number(&c[2]))))
    });
    rule(rules, r"((?:1[1-9]|20)\d{2})[-–/](\d{2})", |c, _| {
        let (from, to) = (number(&c[1]), number(&c[2]));
        (to > from % 100).then(|| format!("{} to {}", year(from), cardinal(to)))
    });
}

fn times(rules: &mut Vec<Rule>) {
    // How long it took: "3h 20m", "5m30s". By itself an "m" is metres.
    rule(rules, r"(\d{1,3})h ?(\d{1,2})m(?:in)?(?: ?(\d{1,2})s)?", |c, _| {
        let seconds = c.get(3).map(|s| format!(" {}", lasts(s.as_str(), "second"))).unwrap_or_default();
        Some(format!("{} {}{seconds}", lasts(&c[1], "hour"), lasts(&c[2], "minute")))
    });
    rule(rules, r"(\d{1,3})m ?(\d{1,2})s", |c, _| {
        Some(format!("{} {}", lasts(&c[1], "minute"), lasts(&c[2], "second")))
    });
    rule(
        rules,
        &format!(
            r"(\d{{1,2}})(?:[:.](\d{{2}}))? ?(?i:({HALF}))? ?[-–—] ?(\d{{1,2}})(?:[:.](\d{{2}}))? ?(?i:({HALF})){ZONE}"
        ),
        |c, _| {
            let (from, to) = (time(c, [1, 2, 3])?, time(c, [4, 5, 6])?);
            Some(format!("{from} to {to}{}", zone(c.get(7).map(|zone| zone.as_str()))))
        },
    );
    rule(rules, r"(\d{1,2}):(\d{2}) ?[-–—] ?(\d{1,2}):(\d{2})", |c, _| {
        Some(format!("{} to {}", clock(&c[1], &c[2])?, clock(&c[3], &c[4])?))
    });
    rule(rules, &format!(r"(\d{{1,3}}):([0-5]\d):([0-5]\d)(?: ?(?i:({HALF})))?"), |c, _| {
        let half = c.get(4).map(|half| half_of_day(half.as_str())).unwrap_or_default();
        let [h, m, s] = [(1, "hour"), (2, "minute"), (3, "second")].map(|(at, unit)| lasts(&c[at], unit));
        Some(format!("{h} {m} and {s}{half}"))
    });
    rule(rules, &format!(r"(\d{{1,2}})(?:[:.](\d{{2}}))? ?(?i:({HALF})){ZONE}"), |c, _| {
        Some(format!("{}{}", time(c, [1, 2, 3])?, zone(c.get(4).map(|zone| zone.as_str()))))
    });
    rule(rules, &format!(r"(\d{{1,2}}):(\d{{2}}){ZONE}"), |c, context| {
        // A share or a score is no time of day.
        let score = ["score", "scored", "ratio", "won", "lost", "by"].contains(&context.last_word());
        let said = if score { None } else { clock(&c[1], &c[2]) };
        let said = said.unwrap_or_else(|| format!("{} to {}", quantity(&c[1]), quantity(&c[2])));
        Some(format!("{said}{}", zone(c.get(3).map(|zone| zone.as_str()))))
    });
}

/// What begins with a letter.
pub(super) fn words(rules: &mut Vec<Rule>) {
    // Two digits of a year are set apart: "H264" is none.
    rule(rules, r"([QH])([1-4])(?: ?'?(\d{4})|(?: |'| ')(\d{2}))", |c, context| {
        let of = c.get(3).or(c.get(4))?.as_str();
        part_of_year(&c[1], &c[2], of).map(|said| behind_article(said, context))
    });
    rule(rules, r"Q([1-4])", |c, context| {
        Some(behind_article(format!("the {} quarter", ordinal(number(&c[1]))), context))
    });
    rule(
        rules,
        &format!(
            r"(?i)({MONTH})\.? (\d{{1,2}})(?:st|nd|rd|th)? ?[-–—] ?(\d{{1,2}})(?:st|nd|rd|th)?(?:(,?) (\d{{4}}))?"
        ),
        |c, _| {
            let (month, from, to) = (month(&c[1])?, number(&c[2]), number(&c[3]));
            ((1..=31).contains(&from) && from < to && to <= 31).then_some(())?;
            let name = MONTHS.get(month as usize - 1)?.0;
            let mut said = format!("the {} to the {} of {name}", ordinal(from), ordinal(to));
            if let Some(of) = c.get(5) {
                said.push_str(&format!("{} {}", &c[4], year(number(of.as_str()))));
            }
            Some(said)
        },
    );
    rule(rules, &format!(r"(?i)({MONTH})-(\d{{1,2}})(?:-(\d{{4}}))?"), |c, _| {
        date(Some(&c[2]), month(&c[1])?, c.get(3).map(|of| of.as_str()))
    });
    rule(rules, &format!(r"(?i)({MONTH})\.? (\d{{1,2}})(?:st|nd|rd|th)?(,?) (\d{{4}})"), |c, _| {
        let date = date(Some(&c[2]), month(&c[1])?, None)?;
        Some(format!("{date}{} {}", &c[3], year(number(&c[4]))))
    });
    rule(rules, &format!(r"(?i)({MONTH})\.? (\d{{1,2}})(?:st|nd|rd|th)?"), |c, _| {
        date(Some(&c[2]), month(&c[1])?, None)
    });
    rule(rules, &format!(r"(?i)({MONTH})\.? ((?:1[1-9]|20)\d{{2}})"), |c, _| {
        Some(format!("{} {}", MONTHS.get(month(&c[1])? as usize - 1)?.0, year(number(&c[2]))))
    });
    // Shortened months only with a full stop or where a number made them one above.
    rule(rules, r"(Jan|Feb|Apr|Aug|Sept?|Oct|Nov|Dec)\.", |c, _| {
        Some(MONTHS.get(month(&c[1])? as usize - 1)?.0.to_owned())
    });
    loose(rules, &days::pattern("(?:Mon|Tues?|Wed|Thu(?:rs?)?|Fri|Sat|Sun)"), |c, context| {
        days::say(&c[0], context.after, day, "to", "and")
    });
    // Hours of shops.
    loose(rules, "M[-–]F(:? )", |c, context| {
        context.next().is_some_and(|next| next.is_ascii_digit()).then(|| format!("Monday to Friday{}", &c[1]))
    });
    rule(rules, r"(Mon|Tues?|Wed|Thu(?:rs?)?|Fri|Sat|Sun)\.", |c, _| Some(day(&c[1])?.to_owned()));
    rule(rules, r"(Mon|Tues?|Wed|Thu(?:rs?)?|Fri)", |c, context| {
        let numbered =
            context.after.strip_prefix(' ').is_some_and(|next| next.starts_with(|c: char| c.is_ascii_digit()));
        (numbered || context.after.starts_with(", ")).then(|| day(&c[1])).flatten().map(str::to_owned)
    });
}

/// "nineteen eighties", "eighties".
fn decade(digits: &str) -> String {
    let n = number(digits);
    plural(&if digits.len() == 4 { year(n) } else { cardinal(n) })
}

fn day(name: &str) -> Option<&'static str> {
    let name = name.to_lowercase();
    DAYS.iter().find(|(short, _)| *short == name).map(|(_, long)| *long)
}

/// What begins with an article, without it where one was written.
fn behind_article(said: String, context: &Context<'_>) -> String {
    match said.strip_prefix("the ") {
        Some(rest) if context.last_word().eq_ignore_ascii_case("the") => rest.to_owned(),
        _ => said,
    }
}

/// 1 for January. "may", "mar" and "march" in small letters are words as well and are no month.
fn month(name: &str) -> Option<u128> {
    let name = name.trim_end_matches('.');
    if matches!(name, "may" | "mar" | "march" | "dec") {
        return None;
    }
    let name = name.to_lowercase();
    let place = MONTHS.iter().position(|(long, short)| name == *long || name.starts_with(short))?;
    Some(place as u128 + 1)
}

/// "the fifth of january twenty twelve".
fn date(day: Option<&str>, month: u128, of: Option<&str>) -> Option<String> {
    let month = MONTHS.get(usize::try_from(month).ok()?.checked_sub(1)?)?.0;
    let mut said = match day.map(number) {
        Some(day) if (1..=31).contains(&day) => format!("the {} of {month}", ordinal(day)),
        Some(_) => return None,
        None => month.to_owned(),
    };
    if let Some(of) = of {
        said.push(' ');
        said.push_str(&year(number(of)));
    }
    Some(said)
}

fn part_of_year(kind: &str, part: &str, of: &str) -> Option<String> {
    let n = number(part);
    let kind = match kind {
        "Q" => "quarter",
        _ if n <= 2 => "half",
        _ => return None,
    };
    let of = if of.len() == 2 { pairs(of) } else { year(number(of)) };
    Some(format!("the {} {kind} of {of}", ordinal(n)))
}

/// So many of a unit of time.
fn lasts(count: &str, unit: &str) -> String {
    let n = number(count);
    format!("{} {unit}{}", cardinal(n), if n == 1 { "" } else { "s" })
}

/// Hour and minutes as on a clock.
fn clock(hour: &str, minute: &str) -> Option<String> {
    let (h, m) = (number(hour), number(minute));
    (h <= 24 && m < 60).then_some(())?;
    Some(match m {
        0 => format!("{} o'clock", cardinal(h)),
        1..10 => format!("{} oh {}", cardinal(h), cardinal(m)),
        _ => format!("{} {}", cardinal(h), cardinal(m)),
    })
}

/// The groups of a time: hour, minutes, half of the day.
fn time(c: &Captures<'_>, [hour, minute, half]: [usize; 3]) -> Option<String> {
    let half = c.get(half).map(|half| half_of_day(half.as_str())).unwrap_or_default();
    let hour = c.get(hour)?.as_str();
    (number(hour) <= 24).then_some(())?;
    let said = match c.get(minute).map(|minute| minute.as_str()) {
        None | Some("00") => cardinal(number(hour)),
        Some(minute) => clock(hour, minute)?,
    };
    Some(format!("{said}{half}"))
}

fn half_of_day(text: &str) -> &'static str {
    if text.starts_with(['a', 'A']) { " AM" } else { " PM" }
}

fn zone(name: Option<&str>) -> String {
    name.map(|name| format!(" {}", name.to_uppercase())).unwrap_or_default()
}
