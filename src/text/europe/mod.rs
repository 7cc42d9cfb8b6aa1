//! German, French and Spanish: one set of rules, and for each language its numbers, words and habits.
//!
//! A comma is the decimal point, a point or a narrow space sets thousands apart, the day stands before the month.

mod french;
mod german;
mod habits;
mod links;
mod millions;
mod often;
mod parts;
mod spanish;

use std::sync::LazyLock;

use regex::Captures;

use self::parts::{Measured, Part};
use super::Language;
use super::scan::{Context, End, Grammar, Rule, Say};

/// What the rules need of a language.
trait Tongue: Sized + 'static {
    /// The language, for rules that are its own.
    const WORDS: Words;

    /// A quantity by itself: "eins", "vingt et un".
    fn cardinal(n: u128) -> String;

    /// A quantity before a noun; `feminine` if that is: "ein", "eine", "veintiún".
    fn counting(n: u128, feminine: bool) -> String;

    /// Whether the word behind `n` is what is counted, so that a one takes its ending; and whether that is feminine, as
    /// far as its own ending tells.
    fn counted(n: u128, word: &str) -> Option<bool>;

    /// As a year is read.
    fn year(n: u128) -> String {
        Self::cardinal(n)
    }

    /// A day of a month; the word before it may decide its ending.
    fn day(n: u128, before: &str) -> String;

    /// Hour and minute as on a clock.
    fn clock(hour: u128, minute: u128) -> String;

    /// An ordinal behind the word before it.
    fn ordinal(n: u128, before: &str) -> String;

    /// The parts of a whole: "ein Drittel", "deux tiers".
    fn fraction(top: u128, bottom: u128) -> String;

    /// An amount of money in whole units and hundredths.
    fn money(whole: &str, part: &str, money: &Money) -> String {
        let cents = part.trim_start_matches('0');
        let main = counted::<Self>(whole, money.one, money.many, money.feminine);
        match (whole, cents) {
            (_, "") => main,
            ("0", _) => counted::<Self>(cents, money.cents.0, money.cents.1, false),
            _ => format!("{main} {}{}", Self::WORDS.before_cents, Self::cardinal(number(part))),
        }
    }

    /// A number and a part: "zweieinhalb", "deux et demi".
    fn mixed(whole: u128, top: u128, bottom: u128) -> String;

    /// A part of what is measured: "eine halbe Tasse", "deux tasses et demie"; `first`: nothing stands before it.
    fn part_of(part: Part, of: Measured<'_>, first: bool) -> String;

    /// One of what `word` says is measured, and whether it is feminine; `None` where that is no such noun.
    fn measured(word: &str) -> Option<(String, bool)>;

    /// What stands between millions and the noun behind them, with its space: "de ", "d'".
    fn link(_noun: &str) -> Option<&'static str> {
        None
    }

    /// Whether `word` behind millions is a noun.
    fn follows_millions(_word: &str) -> bool {
        false
    }

    /// "zweimal", "deux fois": how often.
    fn times(n: u128) -> String;

    /// The Roman numeral `value`, of one character if `short`, behind what is in `context`.
    fn roman(value: u128, short: bool, context: &Context<'_>) -> Option<String>;

    /// The rules that only this language has.
    fn own(_numbers: &mut Vec<Rule>, _words: &mut Vec<Rule>) {}
}

/// Words of a language.
struct Words {
    point: &'static str,
    minus: &'static str,
    plus: &'static str,
    to: &'static str,
    percent: &'static str,
    times: &'static str,
    divided: &'static str,
    equals: &'static str,
    and: &'static str,
    /// The sign of a section of a law, and two of them.
    section: [&'static str; 2],
    /// Between the sides of a score or a share.
    ratio: &'static str,
    /// The word for the sign `#`.
    number: &'static str,
    /// Words behind which digits are a code, in small letters.
    codes: &'static [&'static str],
    /// Words behind which "12/03" is a day, in small letters.
    before_days: &'static [&'static str],
    signs: Signs,
    per: &'static str,
    months: [&'static str; 12],
    /// Sign, one, several, whether the noun is feminine.
    units: &'static [(&'static str, &'static str, &'static str, bool)],
    money: &'static [Money],
    /// Between whole units of money and the hundredths, with the space behind it.
    before_cents: &'static str,
    /// In small letters and without the last full stop.
    abbreviations: &'static [(&'static str, &'static str)],
}

/// The signs of addresses.
struct Signs {
    at: &'static str,
    dot: &'static str,
    slash: &'static str,
    dash: &'static str,
    underscore: &'static str,
}

/// A currency.
struct Money {
    signs: &'static [&'static str],
    one: &'static str,
    many: &'static str,
    cents: (&'static str, &'static str),
    feminine: bool,
}

const fn money(
    signs: &'static [&'static str],
    one: &'static str,
    many: &'static str,
    cents: (&'static str, &'static str),
    feminine: bool,
) -> Money {
    Money { signs, one, many, cents, feminine }
}

/// A quantity by itself; in German where the language is none of these.
pub(super) fn cardinal(n: u128, language: Language) -> String {
    match language {
        Language::French => french::French::cardinal(n),
        Language::Spanish => spanish::Spanish::cardinal(n),
        _ => german::German::cardinal(n),
    }
}

/// A place in an order, as [`cardinal`].
pub(super) fn ordinal(n: u128, language: Language) -> String {
    match language {
        Language::French => french::French::ordinal(n, ""),
        Language::Spanish => spanish::Spanish::ordinal(n, ""),
        _ => german::German::ordinal(n, ""),
    }
}

/// A date of which the parts are known to be in their bounds, as [`cardinal`].
pub(super) fn parts_of_date(day: Option<u128>, month: u128, year: Option<u128>, language: Language) -> Option<String> {
    fn say<T: Tongue>(day: Option<u128>, month: u128, year: Option<u128>, of: &str) -> Option<String> {
        let name = *T::WORDS.months.get(usize::try_from(month).ok()?.checked_sub(1)?)?;
        let day = day.map(|day| format!("{} ", T::day(day, ""))).unwrap_or_default();
        let year = year.map(|year| format!(" {of}{}", T::year(year))).unwrap_or_default();
        Some(format!("{day}{name}{year}"))
    }
    match language {
        Language::French => say::<french::French>(day, month, year, ""),
        Language::Spanish => say::<spanish::Spanish>(day, month, year, "de "),
        _ => say::<german::German>(day, month, year, ""),
    }
}

pub(super) static GERMAN: LazyLock<Grammar> = LazyLock::new(grammar::<german::German>);
pub(super) static FRENCH: LazyLock<Grammar> = LazyLock::new(grammar::<french::French>);
pub(super) static SPANISH: LazyLock<Grammar> = LazyLock::new(grammar::<spanish::Spanish>);

/// A number as it is written in these languages: 1.234,5 or 1 234,5 or 12,5 or 12. Groups that a common space sets apart
/// are a number where the last is of zeros: those of a telephone number seldom are.
const N: &str = r"(?:[1-9]\d{0,2}(?: \d{3}){0,3} 000|\d{1,3}(?:[.'’\u{a0}\u{202f}]\d{3})+(?:,\d+)?|\d+(?:,\d+)?)";
const SIGN: &str = "[-−]";
const CURRENCY: &str = r"(?:US\$|[$€£¥]|EUR|USD|GBP|CHF|JPY)";
const UNIT: &str = r"(?:° ?[CF]|[℃°%‰]|[A-Za-zµμ]{1,4})";

fn rule(rules: &mut Vec<Rule>, pattern: &str, say: Say) {
    rules.push(Rule::new(pattern, End::Word, say));
}

fn loose(rules: &mut Vec<Rule>, pattern: &str, say: Say) {
    rules.push(Rule::new(pattern, End::Any, say));
}

fn number(text: &str) -> u128 {
    let bare: String = text.chars().filter(char::is_ascii_digit).collect();
    bare.parse().unwrap_or(u128::MAX)
}

fn grammar<T: Tongue>() -> Grammar {
    let (mut numbers, mut words) = (Vec::new(), Vec::new());
    links::rules::<T>(&mut numbers, &mut words);
    millions::rules::<T>(&mut numbers, &mut words);
    T::own(&mut numbers, &mut words);
    parts::rules::<T>(&mut numbers);
    habits::rules::<T>(&mut numbers, &mut words);
    often::rules::<T>(&mut numbers, &mut words);
    account::<T>(&mut words);
    dates::<T>(&mut numbers);
    telephone::<T>(&mut numbers);
    amounts::<T>(&mut numbers, &mut words);
    measures::<T>(&mut numbers);
    sums::<T>(&mut numbers);
    bare::<T>(&mut numbers);
    letters::<T>(&mut words);
    Grammar { numbers, words, dense: false, joins: false, plain: |_, _| false }
}

/// Digits one by one.
fn digits<T: Tongue>(text: &str) -> String {
    let said = text.chars().filter_map(|c| c.to_digit(10)).map(|d| T::cardinal(u128::from(d)));
    said.collect::<Vec<_>>().join(" ")
}

/// A whole number or one with a comma.
fn quantity<T: Tongue>(text: &str) -> String {
    let (whole, part) = text.split_once(',').map_or((text, None), |(whole, part)| (whole, Some(part)));
    let bare: String = whole.chars().filter(char::is_ascii_digit).collect();
    let coded = (bare.len() > 1 && bare.starts_with('0')) || bare.len() > 15;
    let said = if coded { digits::<T>(&bare) } else { T::cardinal(number(&bare)) };
    match part {
        None => said,
        Some(part) => format!("{said} {} {}", T::WORDS.point, fractional::<T>(part)),
    }
}

/// What stands behind the point: one by one; French and Spanish read two places as a number.
fn fractional<T: Tongue>(part: &str) -> String {
    if T::WORDS.point != "Komma" && part.len() <= 2 && !part.starts_with('0') {
        T::cardinal(number(part))
    } else {
        digits::<T>(part)
    }
}

/// So many of something.
fn counted<T: Tongue>(text: &str, one: &str, many: &str, feminine: bool) -> String {
    if text.contains(',') {
        return format!("{} {many}", quantity::<T>(text));
    }
    let n = number(text);
    let said = if text.starts_with('0') && text.len() > 1 { quantity::<T>(text) } else { T::counting(n, feminine) };
    let link = if millions::is_whole(n) { T::link(many).unwrap_or_default() } else { "" };
    format!("{said} {link}{}", if n == 1 { one } else { many })
}

fn minus<T: Tongue>(sign: &str) -> String {
    match sign {
        "" => String::new(),
        "+" => format!("{} ", T::WORDS.plus),
        _ => format!("{} ", T::WORDS.minus),
    }
}

fn date<T: Tongue>(day: &str, month: &str, year: Option<&str>, context: &Context<'_>) -> Option<String> {
    let (d, m) = (number(day), number(month));
    ((1..=31).contains(&d) && (1..=12).contains(&m)).then_some(())?;
    let mut said = format!("{} {}", T::day(d, context.last_word()), T::WORDS.months[m as usize - 1]);
    if let Some(year) = year {
        said.push_str(&of_year::<T>(year));
    }
    Some(said)
}

/// The year behind a month, with the word that Spanish puts between.
fn of_year<T: Tongue>(year: &str) -> String {
    let n = number(year);
    let said = if year.len() == 2 { T::cardinal(n) } else { T::year(n) };
    if T::WORDS.and == "y" { format!(" de {said}") } else { format!(" {said}") }
}

fn dates<T: Tongue>(rules: &mut Vec<Rule>) {
    rule(rules, r"(\d{4})-(\d{2})-(\d{2})", |c, context| date::<T>(&c[3], &c[2], Some(&c[1]), context));
    rule(rules, r"(\d{1,2})([./-])(\d{1,2})([./-])(\d{4}|\d{2})", |c, context| {
        (c[2] == c[4]).then(|| date::<T>(&c[1], &c[3], Some(&c[5]), context)).flatten()
    });
    rule(rules, r"(\d{1,2})[:h](\d{2})(?::(\d{2}))?(?: ?(?:Uhr|h|heures|horas))?", |c, _| {
        let (h, m) = (number(&c[1]), number(&c[2]));
        (h <= 24 && m < 60).then(|| match c.get(3) {
            None => T::clock(h, m),
            Some(s) => format!("{} {} {}", T::clock(h, m), T::WORDS.and, T::cardinal(number(s.as_str()))),
        })
    });
}

/// An account as banks write it (ISO 13616): letters and digits one by one, in groups of four.
fn account<T: Tongue>(rules: &mut Vec<Rule>) {
    rule(rules, r"[A-Z]{2}\d{2}(?: ?[A-Z0-9]{4}){2,7}(?: ?[A-Z0-9]{1,3})?", |c, _| {
        let plain: Vec<char> = c[0].chars().filter(|c| *c != ' ').collect();
        let account = plain.iter().filter(|c| c.is_ascii_digit()).count() >= 10 && plain.len() >= 15;
        let one = |c: &char| c.to_digit(10).map_or_else(|| c.to_string(), |digit| T::cardinal(u128::from(digit)));
        let groups = plain.chunks(4).map(|group| group.iter().map(one).collect::<Vec<_>>().join(" "));
        account.then(|| groups.collect::<Vec<_>>().join(", "))
    });
}

fn telephone<T: Tongue>(rules: &mut Vec<Rule>) {
    rule(rules, r"(\+\d{1,3}|0\d{1,4})((?:[ /-]+\d{2,8}){1,6})", |c, _| {
        let plus = if c[1].starts_with('+') { format!("{} ", T::WORDS.plus) } else { String::new() };
        let groups: Vec<_> = c[2].split([' ', '/', '-']).filter(|group| !group.is_empty()).collect();
        // French numbers are read in pairs.
        let group = |text: &str| {
            if T::WORDS.point == "virgule" && text.len() == 2 && !text.starts_with('0') {
                T::cardinal(number(text))
            } else {
                digits::<T>(text)
            }
        };
        let rest: Vec<_> = groups.iter().map(|text| group(text)).collect();
        (c[0].len() >= 8).then(|| format!("{plus}{}, {}", digits::<T>(&c[1]), rest.join(", ")))
    });
}

fn currency<T: Tongue>(sign: &str) -> Option<&'static Money> {
    T::WORDS.money.iter().find(|money| money.signs.contains(&sign))
}

fn amounts<T: Tongue>(numbers: &mut Vec<Rule>, words: &mut Vec<Rule>) {
    fn say<T: Tongue>(sign: &str, amount: &str, money: &Money) -> String {
        let (whole, part) = amount.split_once(',').unwrap_or((amount, ""));
        let said = match part.len() {
            0 => counted::<T>(whole, money.one, money.many, money.feminine),
            2 => T::money(whole, part, money),
            _ => format!("{} {}", quantity::<T>(amount), money.many),
        };
        format!("{}{said}", minus::<T>(sign))
    }
    rule(numbers, &format!(r"({N}) ?[-–] ?({N})[ \u{{a0}}]?({CURRENCY})"), |c, _| {
        let money = currency::<T>(&c[3])?;
        Some(format!("{} {} {} {}", quantity::<T>(&c[1]), T::WORDS.to, quantity::<T>(&c[2]), money.many))
    });
    rule(numbers, &format!(r"({SIGN}?)({N})[ \u{{a0}}\u{{202f}}]?({CURRENCY})"), |c, _| {
        Some(say::<T>(&c[1], &c[2], currency::<T>(&c[3])?))
    });
    for rules in [numbers, words] {
        rule(rules, &format!(r"({CURRENCY}) ?({SIGN}?)({N})"), |c, _| {
            Some(say::<T>(&c[2], &c[3], currency::<T>(&c[1])?))
        });
    }
}

fn unit<T: Tongue>(sign: &str) -> Option<(&'static str, &'static str, bool)> {
    let bare = sign.replace(' ', "");
    T::WORDS.units.iter().find(|(known, ..)| *known == bare).map(|(_, one, many, feminine)| (*one, *many, *feminine))
}

fn measures<T: Tongue>(rules: &mut Vec<Rule>) {
    rule(
        rules,
        &format!(r"({N}) ?[-–] ?({N})[ \u{{a0}}\u{{202f}}]?({UNIT}[²³]?)(?:/([a-z]{{1,3}}[²³]?))?"),
        |c, _| {
            let said = measure::<T>(&c[2], &c[3], c.get(4).map(|per| per.as_str()))?;
            Some(format!("{} {} {said}", quantity::<T>(&c[1]), T::WORDS.to))
        },
    );
    rule(
        rules,
        &format!(r"([-−+]?)({N})[ \u{{a0}}\u{{202f}}]?({UNIT}[²³]?)(?:/([a-z]{{1,3}}[²³]?))?"),
        |c, _| Some(format!("{}{}", minus::<T>(&c[1]), measure::<T>(&c[2], &c[3], c.get(4).map(|per| per.as_str()))?)),
    );
}

fn measure<T: Tongue>(amount: &str, sign: &str, per: Option<&str>) -> Option<String> {
    let said = if sign == "%" {
        format!("{} {}", quantity::<T>(amount), T::WORDS.percent)
    } else {
        let (one, many, feminine) = unit::<T>(sign)?;
        counted::<T>(amount, one, many, feminine)
    };
    let Some(per) = per else { return Some(said) };
    Some(format!("{said} {} {}", T::WORDS.per, unit::<T>(per)?.0))
}

fn sums<T: Tongue>(rules: &mut Vec<Rule>) {
    rule(rules, r"(\d{1,6}) ?([½¼¾⅓⅔])|([½¼¾⅓⅔])", |c, _| {
        let sign = c.get(2).or(c.get(3))?.as_str();
        let (top, bottom) = match sign {
            "½" => (1, 2),
            "¼" => (1, 4),
            "¾" => (3, 4),
            "⅓" => (1, 3),
            _ => (2, 3),
        };
        let part = T::fraction(top, bottom);
        Some(match c.get(1) {
            Some(whole) => format!("{} {} {part}", quantity::<T>(whole.as_str()), T::WORDS.and),
            None => part,
        })
    });
    rule(rules, r"(\d{1,4})/(\d{1,4})", |c, _| {
        let (top, bottom) = (number(&c[1]), number(&c[2]));
        (bottom > 1).then(|| T::fraction(top, bottom))
    });
    loose(rules, &format!(r"({N})(?: ?[-+*×x÷:/=−] ?{N})+"), |c, context| {
        let text = &c[0];
        let certain = text.contains(['+', '×', '÷', '=', '*']) || text.contains(" x ") || text.contains(" / ");
        let carried = context.next().is_some_and(char::is_alphanumeric);
        (certain && !carried).then(|| sum::<T>(text))
    });
    rule(rules, &format!(r"({N}) ?[-–] ?({N})"), |c, _| {
        Some(format!("{} {} {}", quantity::<T>(&c[1]), T::WORDS.to, quantity::<T>(&c[2])))
    });
    rule(rules, &format!(r"\+({N})"), |c, _| Some(format!("{} {}", T::WORDS.plus, quantity::<T>(&c[1]))));
}

fn sum<T: Tongue>(text: &str) -> String {
    let words = &T::WORDS;
    let mut said: Vec<String> = Vec::new();
    let mut rest = text;
    while let Some(c) = rest.chars().next() {
        let end = rest.find(|c: char| !(c.is_ascii_digit() || c == '.' || c == ',')).unwrap_or(rest.len());
        let (word, length) = match c {
            c if c.is_ascii_digit() => (quantity::<T>(&rest[..end]), end),
            '+' => (words.plus.into(), 1),
            '-' | '−' => (words.minus.into(), c.len_utf8()),
            '*' | '×' | 'x' => (words.times.into(), c.len_utf8()),
            '÷' | ':' | '/' => (words.divided.into(), c.len_utf8()),
            '=' => (words.equals.into(), 1),
            _ => (String::new(), c.len_utf8()),
        };
        if !word.is_empty() {
            said.push(word);
        }
        rest = &rest[length.max(1)..];
    }
    said.join(" ")
}

fn bare<T: Tongue>(rules: &mut Vec<Rule>) {
    // A version: points that set no thousands apart.
    rule(rules, r"\d+(?:\.\d+)+", |c, _| {
        let thousands = c[0].split('.').skip(1).all(|group| group.len() == 3) && !c[0].starts_with('0');
        (!thousands)
            .then(|| c[0].split('.').map(quantity::<T>).collect::<Vec<_>>().join(&format!(" {} ", T::WORDS.signs.dot)))
    });
    rule(rules, &format!(r"{SIGN}({N})"), |c, context| {
        let joined = context.last().is_some_and(char::is_alphanumeric);
        Some(if joined {
            format!(" {}", quantity::<T>(&c[1]))
        } else {
            format!("{} {}", T::WORDS.minus, quantity::<T>(&c[1]))
        })
    });
    rule(rules, &format!("({N})"), |c, context| {
        let text = &c[1];
        let n = number(text);
        let year = text.len() == 4 && (1_100..2_100).contains(&n);
        if context.last().is_some_and(char::is_alphanumeric) {
            return None;
        }
        let whole = !text.contains(',') && !text.starts_with('0') && context.next() == Some(' ');
        let noun = if whole { T::counted(n, context.next_word()) } else { None };
        Some(match noun {
            _ if year => T::year(n),
            Some(feminine) => T::counting(n, feminine),
            None => quantity::<T>(text),
        })
    });
    loose(rules, r"(\d+)", |c, context| {
        let joined = |c: Option<char>| c.is_some_and(char::is_alphanumeric);
        let before = if joined(context.last()) { " " } else { "" };
        let behind = if joined(context.next()) { " " } else { "" };
        let said = if c[1].len() > 3 { digits::<T>(&c[1]) } else { quantity::<T>(&c[1]) };
        Some(format!("{before}{said}{behind}"))
    });
    loose(rules, "§§|[&%€$£=+°@§]", |c, context| {
        let word = match &c[0] {
            "&" => T::WORDS.and,
            "%" => T::WORDS.percent,
            "=" => T::WORDS.equals,
            "+" => T::WORDS.plus,
            "@" => T::WORDS.signs.at,
            "§" => T::WORDS.section[0],
            "§§" => T::WORDS.section[1],
            sign => currency::<T>(sign)?.one,
        };
        let before = if context.last().is_none_or(char::is_whitespace) { "" } else { " " };
        let behind = if context.next().is_some_and(char::is_alphanumeric) { " " } else { "" };
        Some(format!("{before}{word}{behind}"))
    });
}

fn letters<T: Tongue>(rules: &mut Vec<Rule>) {
    // With stops between ("z. B.", "p. ej.", "EE. UU.") and one behind.
    loose(rules, r"(\p{L}{1,6}(?:\. ?\p{L}{1,4}){0,2})\.", |c, context| abbreviation::<T>(&c[1], context));
    loose(rules, r"(\p{L}{1,6})\.", |c, context| abbreviation::<T>(&c[1], context));
    rule(rules, r"(\p{L}{1,24})(\d{1,3})", |c, _| Some(format!("{} {}", &c[1], quantity::<T>(&c[2]))));
    rule(rules, r"(\p{L}{2,24})-(\d{1,3})", |c, _| Some(format!("{} {}", &c[1], quantity::<T>(&c[2]))));
}

fn abbreviation<T: Tongue>(text: &str, context: &Context<'_>) -> Option<String> {
    let low = text.to_lowercase().replace(' ', "");
    let long = T::WORDS.abbreviations.iter().find(|(short, _)| *short == low)?.1;
    // "min." and "art." at the end of a sentence may be words.
    let ends = context.after.trim().is_empty() && !context.before.trim().is_empty();
    let word = matches!(
        low.as_str(),
        "min"
            | "max"
            | "art"
            | "st"
            | "av"
            | "ex"
            | "mm"
            | "fr"
            | "abs"
            | "s.a"
            | "sta"
            | "vol"
            | "mind"
            | "ca"
            | "geb"
    );
    if word && ends {
        return None;
    }
    let mut chars = long.chars();
    let first = chars.next()?;
    let capital = text.starts_with(char::is_uppercase);
    Some(if capital { format!("{}{}", first.to_uppercase(), chars.as_str()) } else { long.to_owned() })
}

/// The year that a rule of one language may have found at `at`.
fn year_at<T: Tongue>(c: &Captures<'_>, at: usize) -> String {
    c.get(at).map_or_else(String::new, |year| of_year::<T>(year.as_str()))
}

/// The minute that a rule of one language may have found at `at`; a full hour has none.
fn minute_at(c: &Captures<'_>, at: usize) -> u128 {
    c.get(at).map_or(0, |minute| number(minute.as_str()))
}

/// Whether `word` ends in one of these.
fn ends_in(word: &str, endings: &[&str]) -> bool {
    endings.iter().any(|ending| word.ends_with(ending))
}

/// What a rule of one language gives to a group that may be absent.
fn group<'a>(c: &'a Captures<'_>, at: usize) -> &'a str {
    c.get(at).map_or("", |group| group.as_str())
}
