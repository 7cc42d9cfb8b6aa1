//! "deux millions de personnes", "un millón de euros": French and Spanish count with millions as with a noun.

use super::{Tongue, loose, number, quantity, rule};
use crate::text::scan::Rule;

/// A number of whole millions before a noun.
pub(super) fn rules<T: Tongue>(numbers: &mut Vec<Rule>, words: &mut Vec<Rule>) {
    loose(
        numbers,
        r"(\d{1,3}(?:[.'’\u{a0}\u{202f}]000){2,4}|\d{1,3}(?: 000){2,4}|\d{1,6}000000)[ \u{a0}]",
        |c, context| {
            let noun = context.next_word();
            let link = T::link(noun).filter(|_| T::follows_millions(noun))?;
            Some(format!("{} {link}", quantity::<T>(&number(&c[1]).to_string())))
        },
    );
    // "3 millions personnes": what the writer left out. Of the noun, for that may be cut off from its number.
    rule(words, r"\p{Ll}{3,24}", |c, context| {
        const SIZES: [&str; 5] = ["millions ", "million ", "milliards ", "millones ", "millón "];
        let amount = SIZES.iter().find_map(|size| context.before.strip_suffix(size))?;
        let link = T::link(&c[0]).filter(|_| T::follows_millions(&c[0]))?;
        amount.trim_end().ends_with(|c: char| c.is_ascii_digit()).then(|| format!("{link}{}", &c[0]))
    });
}

/// Whether `n` is said as so many millions and nothing more.
pub(super) fn is_whole(n: u128) -> bool {
    n >= 1_000_000 && n.is_multiple_of(1_000_000)
}
