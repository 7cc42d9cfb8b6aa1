//! Clocks, sizes, codes, prices and shares as bots write them, in German, French and Spanish alike.
//!
//! Asked before the rules of [`super`]: each of these would be read there as something else.

use super::{
    CURRENCY, N, Tongue, UNIT, counted, currency, date, digits, group, loose, measure, number, quantity, rule,
};
use crate::text::scan::{Context, Rule};

/// Words behind a slash that are what something is counted by.
const PER: &str = "Monat|Jahr|Tag|Woche|Stunde|Std|Minute|Nacht|Person|Stück|mois|an|jour|semaine|heure|nuit|personne|mes|año|día|semana|hora|noche|persona";

pub(super) fn rules<T: Tongue>(numbers: &mut Vec<Rule>, words: &mut Vec<Rule>) {
    clocks::<T>(numbers);
    codes::<T>(numbers);
    prices::<T>(numbers);
    prices::<T>(words);
    sizes::<T>(numbers);
    rule(numbers, "24/7", |_, _| Some(format!("{} {}", T::cardinal(24), T::cardinal(7))));
    // "le 12/03", "el lunes 12/03": the day of a month, where a word says so.
    rule(numbers, r"(\d{1,2})/(\d{1,2})", |c, context| {
        let of_days = T::WORDS.before_days.contains(&context.last_word().to_lowercase().as_str());
        // What is a share more often than a day.
        let share = matches!(&c[0], "1/2" | "1/3" | "2/3" | "1/4" | "3/4");
        (of_days && !share).then(|| date::<T>(&c[1], &c[2], None, context)).flatten()
    });
    // A score or a share; two digits behind it are minutes.
    rule(numbers, r"(\d{1,4}) : (\d{1,4})|(\d{1,4}) ?: ?(\d{3,4}|\d)", |c, _| {
        let (left, right) = (c.get(1).or(c.get(3))?, c.get(2).or(c.get(4))?);
        Some(format!("{} {} {}", quantity::<T>(left.as_str()), T::WORDS.ratio, quantity::<T>(right.as_str())))
    });
    rule(numbers, r"#(\d{1,6})", |c, _| Some(format!("{} {}", T::WORDS.number, quantity::<T>(&c[1]))));
    // "19,99 €/Monat", "3 fois/jour"
    rule(numbers, &format!("/({PER})"), |c, context| {
        let counted = context.last().is_some_and(|last| last.is_alphabetic() || last == '€' || last == '$');
        counted.then(|| format!(" {} {}", T::WORDS.per, &c[1]))
    });
}

fn clocks<T: Tongue>(rules: &mut Vec<Rule>) {
    rule(rules, r"(\d{1,2})[:h](\d{2}) ?[-–—] ?(\d{1,2})[:h](\d{2})(?: ?(?:Uhr|h|heures|horas))?", |c, _| {
        let [from, first, to, last] = [1, 2, 3, 4].map(|at| number(&c[at]));
        (from <= 24 && to <= 24 && first < 60 && last < 60)
            .then(|| format!("{} {} {}", T::clock(from, first), T::WORDS.to, T::clock(to, last)))
    });
}

fn codes<T: Tongue>(rules: &mut Vec<Rule>) {
    // 4-8-1-5: three groups are no span.
    rule(rules, r"\d{1,6}(?:-\d{1,6}){2,7}", |c, _| {
        // A date, which has its own rule.
        let dated = c[0].split('-').map(str::len).eq([4, 2, 2]);
        (!dated).then(|| c[0].split('-').map(digits::<T>).collect::<Vec<_>>().join(", "))
    });
    rule(rules, r"(\d{2,8})-(\d{2,8})", |c, context| {
        let coded = (c[2].starts_with('0') && c[2].len() > 2) || named_code::<T>(context);
        coded.then(|| format!("{}, {}", digits::<T>(&c[1]), digits::<T>(&c[2])))
    });
    // (030) 1234567
    rule(rules, r"\((\+?\d{2,6})\)((?:[ /-]?\d{2,10}){1,5})", |c, _| {
        let long = c[0].bytes().filter(u8::is_ascii_digit).count() >= 7;
        let plus = if c[1].starts_with('+') { format!("{} ", T::WORDS.plus) } else { String::new() };
        let groups: Vec<String> =
            c[2].split([' ', '/', '-']).filter(|group| !group.is_empty()).map(digits::<T>).collect();
        (long && (c[1].starts_with(['0', '+']))).then(|| format!("{plus}{}, {}", digits::<T>(&c[1]), groups.join(", ")))
    });
    // What a word before says is a code, not a quantity: one by one.
    rule(rules, r"\d{4,12}", |c, context| named_code::<T>(context).then(|| digits::<T>(&c[0])));
}

/// Whether the word before is of a code, or is what may stand between: "lautet", "est le", letters of a flight.
fn named_code<T: Tongue>(context: &Context<'_>) -> bool {
    const BETWEEN: [&str; 16] = [
        "ist", "lautet", "endet", "auf", "die", "der", "est", "le", "la", "se", "termine", "par", "es", "el",
        "termina", "en",
    ];
    for word in context.before.split_whitespace().rev().take(4) {
        let bare: String = word.chars().filter(|c| c.is_alphanumeric()).collect();
        if T::WORDS.codes.contains(&bare.to_lowercase().as_str()) {
            return true;
        }
        let letters = bare.len() <= 3 && bare.chars().all(|c| c.is_ascii_uppercase());
        if !letters && !BETWEEN.contains(&bare.as_str()) {
            return false;
        }
    }
    false
}

/// Prices with the point before the hundredths, as in Switzerland and in Latin America.
fn prices<T: Tongue>(rules: &mut Vec<Rule>) {
    const AMOUNT: &str = r"(\d{1,3}(?:[,'’]\d{3})+|\d{1,9})\.(\d{2})";
    rule(rules, &format!("({CURRENCY}) ?{AMOUNT}"), |c, _| Some(T::money(&whole(&c[2]), &c[3], currency::<T>(&c[1])?)));
    // "$1,000,000": three digits behind a comma are no hundredths.
    rule(rules, &format!(r"({CURRENCY}) ?(\d{{1,3}}(?:,\d{{3}})+)"), |c, _| {
        let money = currency::<T>(&c[1])?;
        Some(counted::<T>(&whole(&c[2]), money.one, money.many, money.feminine))
    });
    rule(rules, &format!("{AMOUNT} ?({CURRENCY})"), |c, _| Some(T::money(&whole(&c[1]), &c[2], currency::<T>(&c[3])?)));
}

fn whole(text: &str) -> String {
    text.chars().filter(char::is_ascii_digit).collect()
}

fn sizes<T: Tongue>(rules: &mut Vec<Rule>) {
    // 10 x 20 cm, 10x20x5 cm
    rule(rules, &format!(r"({N}) ?[x×] ?({N})(?: ?[x×] ?({N}))? ?({UNIT}[²³]?)"), |c, _| {
        let times = T::WORDS.times;
        let first = quantity::<T>(&c[1]);
        Some(match group(c, 3) {
            "" => format!("{first} {times} {}", measure::<T>(&c[2], &c[4], None)?),
            last => format!("{first} {times} {} {times} {}", quantity::<T>(&c[2]), measure::<T>(last, &c[4], None)?),
        })
    });
    rule(rules, &format!(r"({N}) ?({UNIT}) ?[x×] ?({N}) ?({UNIT})"), |c, _| {
        Some(format!("{} {} {}", measure::<T>(&c[1], &c[2], None)?, T::WORDS.times, measure::<T>(&c[3], &c[4], None)?))
    });
    loose(rules, r"(\d{1,4})[x×](\d{1,4})", |c, context| {
        let carried = context.next().is_some_and(char::is_alphanumeric);
        (!carried && !c[1].starts_with('0'))
            .then(|| format!("{} {} {}", quantity::<T>(&c[1]), T::WORDS.times, quantity::<T>(&c[2])))
    });
}
