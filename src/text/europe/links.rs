//! Mail and web addresses in the words of a language.

use super::{Tongue, digits, loose, number};
use crate::text::address::spell;
use crate::text::scan::Rule;

pub(super) fn rules<T: Tongue>(numbers: &mut Vec<Rule>, words: &mut Vec<Rule>) {
    for rules in [numbers, words] {
        loose(
            rules,
            r"[A-Za-z0-9._%+-]{1,64}@[A-Za-z0-9-]{1,63}(?:\.[A-Za-z0-9-]{1,63})*\.[A-Za-z]{2,12}",
            |c, context| (!context.next().is_some_and(char::is_alphanumeric)).then(|| address::<T>(&c[0])),
        );
        loose(rules, r"https?://([^\s<>()\x22\u{201d}]{2,160})", |c, _| {
            let end = c[1].trim_end_matches(['.', ',', '!', '?', ';', ':', '\'']).len();
            Some(format!("{}{}", address::<T>(c[1][..end].trim_end_matches('/')), &c[1][end..]))
        });
        loose(
            rules,
            r"(?:www\.)?(?:[A-Za-z0-9-]{1,63}\.){1,4}(?:com|org|net|edu|gov|io|ai|de|at|ch|fr|be|es|mx|ar|eu|info|uk)(?:/[A-Za-z0-9_.~%#?&=+-]*)*",
            |c, context| {
                let end = c[0].trim_end_matches(['.', '?', '/']).len();
                let name = c[0].starts_with(|c: char| c.is_ascii_lowercase());
                let carried = context.next().is_some_and(char::is_alphanumeric);
                (name && !carried)
                    .then(|| format!("{}{}", address::<T>(&c[0][..end]), c[0][end..].trim_start_matches('/')))
            },
        );
    }
}

fn address<T: Tongue>(text: &str) -> String {
    let run = |text: &str| {
        if text.len() <= 2 && !text.starts_with('0') { T::cardinal(number(text)) } else { digits::<T>(text) }
    };
    let sign = |c: char| {
        let words = &T::WORDS;
        match c {
            '.' => words.signs.dot,
            '@' => words.signs.at,
            '/' => words.signs.slash,
            '-' => words.signs.dash,
            '_' => words.signs.underscore,
            '=' => words.equals,
            '+' => words.plus,
            '&' => words.and,
            _ => "",
        }
    };
    spell(text, |word| word, run, sign)
}
