//! Words said against words recognised: the errors between them, as recognisers are measured.

use std::fmt;

use serde::{Deserialize, Serialize};

/// How what was recognised differs from what was said, in words.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Errors {
    /// Words said.
    pub said: usize,
    /// Other words in their place.
    pub substituted: usize,
    /// Words that are missing.
    pub deleted: usize,
    /// Words that were not said.
    pub inserted: usize,
}

impl Errors {
    /// The fewest errors by which `said` becomes `recognised`, both as [`words`] takes them.
    pub fn between(said: &str, recognised: &str) -> Errors {
        let (said, recognised) = (words(said), words(recognised));
        // The best way to each number of words recognised, row by row of those said.
        let mut row: Vec<Errors> =
            (0..=recognised.len()).map(|inserted| Errors { inserted, ..Errors::default() }).collect();
        for word in &said {
            let mut before = row[0];
            row[0].deleted += 1;
            row[0].said += 1;
            for (n, other) in recognised.iter().enumerate() {
                let mut replaced = before;
                replaced.substituted += usize::from(word != other);
                replaced.said += 1;
                let mut dropped = row[n + 1];
                dropped.deleted += 1;
                dropped.said += 1;
                let mut added = row[n];
                added.inserted += 1;
                before = row[n + 1];
                row[n + 1] = [replaced, dropped, added].into_iter().min_by_key(Errors::all).unwrap_or(replaced);
            }
        }
        row.pop().unwrap_or_default()
    }

    /// All errors.
    pub fn all(&self) -> usize {
        self.substituted + self.deleted + self.inserted
    }

    /// Errors for each word said: the word error rate. Above 1 where more was recognised than said.
    pub fn rate(&self) -> f64 {
        self.all() as f64 / self.said.max(1) as f64
    }
}

impl std::ops::AddAssign for Errors {
    fn add_assign(&mut self, other: Errors) {
        self.said += other.said;
        self.substituted += other.substituted;
        self.deleted += other.deleted;
        self.inserted += other.inserted;
    }
}

impl fmt::Display for Errors {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Errors { said, substituted, deleted, inserted } = self;
        write!(
            f,
            "{:.1} % of {said} words ({substituted} others, {deleted} missing, {inserted} too many)",
            self.rate() * 1e2
        )
    }
}

/// The words of a text, for comparison: lower case, without punctuation but apostrophes, which all are `'`.
pub fn words(text: &str) -> Vec<String> {
    let text = text.to_lowercase().replace(['\u{2019}', '\u{2018}'], "'");
    text.split(|c: char| !c.is_alphanumeric() && c != '\'')
        .map(|word| word.trim_matches('\''))
        .filter(|word| !word.is_empty())
        .map(str::to_owned)
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn errors(said: usize, substituted: usize, deleted: usize, inserted: usize) -> Errors {
        Errors { said, substituted, deleted, inserted }
    }

    #[test]
    fn words_are_compared_without_case_and_punctuation() {
        assert_eq!(
            words("\u{2018}It\u{2019}s well-known\u{2019}, he said: 7 p.m."),
            ["it's", "well", "known", "he", "said", "7", "p", "m"]
        );
        assert_eq!(Errors::between("Yes, please!", "yes please"), errors(2, 0, 0, 0));
    }

    #[test]
    fn the_fewest_errors_count() {
        assert_eq!(Errors::between("one two three four", "one two tree four"), errors(4, 1, 0, 0));
        assert_eq!(Errors::between("one two three four", "two three four"), errors(4, 0, 1, 0));
        assert_eq!(Errors::between("one two three four", "one two and three four"), errors(4, 0, 0, 1));
        assert_eq!(Errors::between("one two three", ""), errors(3, 0, 3, 0));
        assert_eq!(Errors::between("", "thank you"), errors(0, 0, 0, 2));
        assert_eq!(Errors::between("a b c d e f", "b c x e f g"), errors(6, 1, 1, 1));
        let mut all = errors(6, 1, 1, 1);
        all += errors(4, 0, 0, 1);
        assert_eq!(all, errors(10, 1, 1, 2));
        assert_eq!(all.rate(), 0.4);
        assert_eq!(all.to_string(), "40.0 % of 10 words (1 others, 1 missing, 2 too many)");
    }
}
