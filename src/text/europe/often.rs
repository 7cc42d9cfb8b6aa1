//! Roman numerals, how often and items of lists: what German, French and Spanish write alike.

use super::{Tongue, loose, number, quantity, rule};
use crate::text::en::roman;
use crate::text::scan::{Context, Rule};

/// What stands behind "2x" where that is how often and no name.
const OFTEN: &str = "täglich|wöchentlich|monatlich|jährlich|am|im|pro|so|mehr|par|plus|moins|al|a la|por|más|menos";

pub(super) fn rules<T: Tongue>(numbers: &mut Vec<Rule>, words: &mut Vec<Rule>) {
    rule(numbers, &format!(r"(\d{{1,3}}) ?[x×] ({OFTEN})"), |c, _| {
        Some(format!("{} {}", T::times(number(&c[1])), &c[2]))
    });
    item(numbers, |c, context| is_item(context).then(|| format!("{},", quantity::<T>(&c[1]))));
    // "Kapitel C": by itself the sign of fifty or a hundred is a letter.
    rule(words, "[IVXLC]{1,9}", |c, context| {
        (!matches!(&c[0], "L" | "C")).then(|| T::roman(roman(&c[0])?, c[0].len() == 1, context)).flatten()
    });
}

/// "1) ", which begins an item of a list.
fn item(rules: &mut Vec<Rule>, say: crate::text::scan::Say) {
    loose(rules, r"(\d{1,2})\)", say);
}

fn is_item(context: &Context<'_>) -> bool {
    let bracket = |c: char| context.before.matches(c).count();
    let begins = context.last().is_none_or(char::is_whitespace);
    begins && context.next() == Some(' ') && bracket('(') <= bracket(')')
}

/// Whether `context` ends in a name: a capital and small letters.
pub(super) fn is_named(context: &Context<'_>) -> bool {
    let word = context.last_word();
    word.chars().count() > 1 && word.starts_with(char::is_uppercase) && word.chars().skip(1).all(char::is_lowercase)
}
