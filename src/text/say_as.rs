//! What `say-as` asks for, in the words of each language.

use super::{Language, en, europe, ja, normalise, zh};

/// Kinds of things that are read otherwise than their characters tell.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SayAs {
    /// A quantity.
    Cardinal,
    /// A place in an order.
    Ordinal,
    /// Digits one by one.
    Digits,
    /// Digits one by one, in the groups that they are written in.
    Telephone,
    /// Characters one by one.
    Characters,
    /// A date whose parts stand in this order; empty: as the rules read it.
    Date(&'static str),
    /// What the rules read by its form: a time, an amount of money, a quantity with its unit.
    Form,
}

/// The orders of a date.
const ORDERS: [&str; 7] = ["mdy", "dmy", "ymd", "ym", "my", "md", "dm"];

impl SayAs {
    /// The kind of `interpret-as` and `format`.
    ///
    /// # Errors
    /// What is known in its place.
    pub fn named(name: &str, format: &str) -> Result<Self, String> {
        Ok(match name {
            "cardinal" | "number" => Self::Cardinal,
            "ordinal" => Self::Ordinal,
            "digits" => Self::Digits,
            "telephone" => Self::Telephone,
            "characters" | "spell-out" | "verbatim" => Self::Characters,
            "date" => match (format, ORDERS.into_iter().find(|order| *order == format)) {
                ("", _) => Self::Date(""),
                (_, Some(order)) => Self::Date(order),
                (other, None) => return Err(format!("format=\"{other}\": expected one of {}", ORDERS.join(", "))),
            },
            "time" | "currency" | "unit" => Self::Form,
            other => {
                return Err(format!(
                    "interpret-as=\"{other}\": expected cardinal, ordinal, digits, telephone, date, time, characters, \
                     spell-out, currency or unit"
                ));
            }
        })
    }
}

/// `text` said as `kind` in `language`; what is not of the kind is read by the rules.
pub(super) fn say_as(kind: SayAs, text: &str, language: Language) -> String {
    let text = text.trim();
    let by_rules = || normalise(text, language).text;
    match kind {
        SayAs::Cardinal => number(text).map_or_else(by_rules, |(sign, n)| {
            let said = cardinal(n, language);
            if sign { normalise("-1", language).text.replace(&cardinal(1, language), &said) } else { said }
        }),
        SayAs::Ordinal => number(text).filter(|(sign, _)| !sign).map_or_else(by_rules, |(_, n)| ordinal(n, language)),
        SayAs::Digits | SayAs::Characters => one_by_one(text, language, kind == SayAs::Characters),
        SayAs::Telephone => {
            let groups = text.split(|c: char| !c.is_alphanumeric() && c != '+').filter(|group| !group.is_empty());
            let gap = if is_dense(language) { "，" } else { ", " };
            groups.map(|group| one_by_one(group, language, true)).collect::<Vec<_>>().join(gap)
        }
        SayAs::Date(order) => date(text, order, language).unwrap_or_else(by_rules),
        SayAs::Form => by_rules(),
    }
}

/// Whether it is negative, and the number; thousands may be set apart.
fn number(text: &str) -> Option<(bool, u128)> {
    let (sign, digits) = text.strip_prefix('-').map_or((false, text), |rest| (true, rest));
    let digits = digits.trim_end_matches(['.', 'º', 'ª']).trim_end_matches(|c: char| c.is_ascii_lowercase());
    let bare: String = digits.chars().filter(|c| !matches!(c, ',' | ' ' | '\u{a0}' | '\u{202f}' | '\'')).collect();
    // A longer one has no name in any language here.
    (!bare.is_empty() && bare.len() <= 15 && bare.bytes().all(|b| b.is_ascii_digit())).then_some(())?;
    Some((sign, bare.parse().ok()?))
}

fn cardinal(n: u128, language: Language) -> String {
    match language {
        Language::English | Language::Other => en::cardinal(n),
        Language::Chinese => zh::cardinal(n),
        Language::Japanese => ja::cardinal(n),
        Language::German | Language::French | Language::Spanish => europe::cardinal(n, language),
    }
}

fn ordinal(n: u128, language: Language) -> String {
    match language {
        Language::English | Language::Other => en::ordinal(n),
        Language::Chinese => format!("第{}", zh::cardinal(n)),
        Language::Japanese => format!("{}番目", ja::cardinal(n)),
        Language::German | Language::French | Language::Spanish => europe::ordinal(n, language),
    }
}

fn is_dense(language: Language) -> bool {
    matches!(language, Language::Chinese | Language::Japanese)
}

/// Digits as words, letters by their names (a capital by itself is one), signs by `signs`.
fn one_by_one(text: &str, language: Language, signs: bool) -> String {
    let said = text.chars().filter_map(|c| match c {
        c if c.is_ascii_digit() => Some(cardinal(u128::from(c as u32 - '0' as u32), language)),
        c if c.is_alphabetic() => Some(c.to_uppercase().collect()),
        c if signs && !c.is_whitespace() => Some(sign(c, language)),
        _ => None,
    });
    said.filter(|word| !word.is_empty()).collect::<Vec<_>>().join(" ")
}

/// A sign by its name, as an address would be read; one without a name is not said.
fn sign(c: char, language: Language) -> String {
    let names: [&str; 6] = match language {
        Language::English | Language::Other => ["dash", "dot", "plus", "at", "slash", "underscore"],
        Language::Chinese => ["杠", "点", "加", "艾特", "斜杠", "下划线"],
        Language::Japanese => ["ハイフン", "ドット", "プラス", "アットマーク", "スラッシュ", "アンダーバー"],
        Language::German => ["Strich", "Punkt", "plus", "at", "Schrägstrich", "Unterstrich"],
        Language::French => ["tiret", "point", "plus", "arobase", "barre oblique", "tiret bas"],
        Language::Spanish => ["guion", "punto", "más", "arroba", "barra", "guion bajo"],
    };
    "-.+@/_".find(c).map(|at| names[at].to_owned()).unwrap_or_default()
}

/// A date whose parts stand in `order`, brought into the form that the rules read without a doubt.
fn date(text: &str, order: &str, language: Language) -> Option<String> {
    let parts: Vec<&str> = text.split(|c: char| !c.is_ascii_digit()).filter(|part| !part.is_empty()).collect();
    if order.is_empty() || parts.len() != order.len() {
        return None;
    }
    let part = |of: char| order.find(of).and_then(|at| parts[at].parse::<u128>().ok());
    let (year, month, day) = (part('y'), part('m').filter(|m| (1..=12).contains(m))?, part('d'));
    if day.is_some_and(|day| !(1..=31).contains(&day)) {
        return None;
    }
    // Two digits of a year are of this century, up to fifty.
    let year = year.map(|y| {
        if y < 50 {
            2_000 + y
        } else if y < 100 {
            1_900 + y
        } else {
            y
        }
    });
    match language {
        Language::Other => None,
        Language::English => {
            let name = en::month(month)?;
            let day = day.map(|day| format!(" {}", en::ordinal(day))).unwrap_or_default();
            let year = year.map(|year| format!(" {}", en::year(year))).unwrap_or_default();
            Some(format!("{name}{day}{year}"))
        }
        Language::Chinese | Language::Japanese => {
            let year = year.map(|year| format!("{year}年")).unwrap_or_default();
            let day = day.map(|day| format!("{day}日")).unwrap_or_default();
            Some(normalise(&format!("{year}{month}月{day}"), language).text)
        }
        Language::German | Language::French | Language::Spanish => europe::parts_of_date(day, month, year, language),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn said(kind: &str, format: &str, text: &str, language: Language) -> String {
        say_as(SayAs::named(kind, format).expect("known"), text, language)
    }

    #[test]
    fn each_kind_is_said_as_it_asks() {
        for (kind, format, text, expected) in [
            ("cardinal", "", "1984", "one thousand nine hundred and eighty four"),
            ("cardinal", "", "-12", "negative twelve"),
            ("ordinal", "", "21", "twenty first"),
            ("ordinal", "", "3rd", "third"),
            ("digits", "", "1984", "one nine eight four"),
            ("telephone", "", "+1 (555) 010-99", "plus one, five five five, zero one zero, nine nine"),
            ("characters", "", "A1-b", "A one dash B"),
            ("spell-out", "", "BBC", "B B C"),
            ("date", "dmy", "3/4/2025", "april third twenty twenty five"),
            ("date", "mdy", "3/4/25", "march fourth twenty twenty five"),
            ("date", "md", "12/24", "december twenty fourth"),
            ("currency", "", "$5", "five dollars"),
            ("unit", "", "10 km", "ten kilometers"),
            ("cardinal", "", "many", "many"),
        ] {
            assert_eq!(
                said(kind, format, text, Language::English).to_lowercase(),
                expected.to_lowercase(),
                "{kind} {text}"
            );
        }
        assert_eq!(said("cardinal", "", "1984", Language::Chinese), "一千九百八十四");
        assert_eq!(said("ordinal", "", "3", Language::Chinese), "第三");
        assert_eq!(said("digits", "", "110", Language::German), "eins eins null");
        assert_eq!(said("ordinal", "", "3", Language::French), "troisième");
        assert_eq!(said("date", "dmy", "3.4.2025", Language::German), "dritter April zweitausendfünfundzwanzig");
        assert!(SayAs::named("money", "").expect_err("unknown").contains("currency"));
        assert!(SayAs::named("date", "ydm").expect_err("unknown").contains("dmy"));
    }
}
