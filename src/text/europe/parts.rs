//! Parts of what is measured or counted, as recipes write them: "1 1/2 Tassen", "½ l", "2 c. à soupe".

use regex::Captures;

use super::{N, Tongue, UNIT, counted, loose, number, rule, unit};
use crate::text::scan::Rule;

/// Signs of fractions, and what they are.
const SIGNS: [(&str, u128, u128); 9] = [
    ("½", 1, 2),
    ("⅓", 1, 3),
    ("⅔", 2, 3),
    ("¼", 1, 4),
    ("¾", 3, 4),
    ("⅕", 1, 5),
    ("⅛", 1, 8),
    ("⅜", 3, 8),
    ("⅝", 5, 8),
];

/// A fraction with or without a whole number before it: groups 1 to 7.
const PART: &str = r"(?:(\d{1,3})(?: (\d{1,2})[/⁄](\d{1,2})| ?([½⅓⅔¼¾⅕⅛⅜⅝]))|(\d{1,2})[/⁄](\d{1,2})|([½⅓⅔¼¾⅕⅛⅜⅝]))";

/// What spoons are shortened to, whose full stops are their own.
const SPOON: &str = r"(?:c\. ?à ?(?:soupe|café|thé|s\.|c\.)|cd(?:t|it)?as?\.)";

/// An amount that is not whole.
#[derive(Clone, Copy, Debug)]
pub(super) struct Part {
    pub(super) whole: Option<u128>,
    pub(super) top: u128,
    pub(super) bottom: u128,
}

/// What an amount is of.
#[derive(Clone, Copy, Debug)]
pub(super) struct Measured<'a> {
    pub(super) one: &'a str,
    pub(super) many: &'a str,
    pub(super) feminine: bool,
}

impl Part {
    fn of(c: &Captures<'_>) -> Option<Self> {
        let whole = c.get(1).map(|whole| number(whole.as_str()));
        let (top, bottom) = match (c.get(4).or(c.get(7)), c.get(2).or(c.get(5)), c.get(3).or(c.get(6))) {
            (Some(sign), ..) => SIGNS.iter().find(|(known, ..)| *known == sign.as_str()).map(|(_, t, b)| (*t, *b))?,
            (_, Some(top), Some(bottom)) => (number(top.as_str()), number(bottom.as_str())),
            _ => return None,
        };
        // "7/5" with a whole number before it is none, and a date or a share of more is not for these rules.
        (0 < top && top < bottom && !c[0].starts_with('0')).then_some(Self { whole, top, bottom })
    }

    fn bare<T: Tongue>(self) -> String {
        match self.whole {
            Some(whole) => T::mixed(whole, self.top, self.bottom),
            None => T::fraction(self.top, self.bottom),
        }
    }
}

pub(super) fn rules<T: Tongue>(numbers: &mut Vec<Rule>) {
    // "1/2-3/4 Stunde": from one part to another.
    rule(numbers, r"(\d{1,2})[/⁄](\d{1,2}) ?[-–] ?(\d{1,2})[/⁄](\d{1,2})", |c, _| {
        let [a, b, c, d] = [1, 2, 3, 4].map(|at| number(&c[at]));
        (0 < a && a < b && 0 < c && c < d)
            .then(|| format!("{} {} {}", T::fraction(a, b), T::WORDS.to, T::fraction(c, d)))
    });
    loose(numbers, &format!("(?:{PART}|({N})) ?({SPOON})"), |c, context| {
        let key: String = c[9].chars().filter(|c| !matches!(c, ' ' | '.')).collect();
        let (one, many, feminine) = unit::<T>(&key)?;
        let end = if c[9].ends_with('.') && context.after.trim().is_empty() { "." } else { "" };
        let said = match c.get(8) {
            Some(whole) => counted::<T>(whole.as_str(), one, many, feminine),
            None => T::part_of(Part::of(c)?, Measured { one, many, feminine }, context.before.trim().is_empty()),
        };
        Some(format!("{said}{end}"))
    });
    rule(numbers, &format!(r"{PART}[ \u{{a0}}\u{{202f}}]?({UNIT})"), |c, context| {
        let (one, many, feminine) = unit::<T>(&c[8]).filter(|_| &c[8] != "%")?;
        Some(T::part_of(Part::of(c)?, Measured { one, many, feminine }, context.before.trim().is_empty()))
    });
    rule(numbers, &format!(r"{PART} (\p{{L}}{{2,24}})"), |c, context| {
        // "12/5 und": a day, where its word says so.
        if T::WORDS.before_days.contains(&context.last_word().to_lowercase().as_str()) && c.get(1).is_none() {
            return None;
        }
        let (one, feminine) = T::measured(&c[8])?;
        let of = Measured { one: &one, many: &c[8], feminine };
        Some(T::part_of(Part::of(c)?, of, context.before.trim().is_empty()))
    });
    rule(numbers, PART, |c, context| {
        // A share without a whole number before it has its own rules, which know days and codes.
        let signed = c.get(5).is_none() || c[0].contains('⁄');
        let half = signed.then(|| Part::of(c)).flatten()?;
        Some(match context.last() {
            Some(last) if last.is_alphanumeric() => format!(" {}", half.bare::<T>()),
            _ => half.bare::<T>(),
        })
    });
}
