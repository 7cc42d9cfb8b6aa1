//! Answers that are made before it is certain that the caller has finished.
//!
//! Owns which eager end of turn may be answered now. The turns that answer it wait in the queue, marked
//! [`super::turn::Turn::held`]; nothing of them leaves before [`Speculation::close`] says that the words were the same.
//!
//! # Why
//! An agent that speculates names the eager end that it answers ([`crate::call::Style::speculation`]), with every piece
//! of text. So text that is still on its way when the caller goes on is known to be stale, whatever the order in which
//! agent and caller are heard.

/// What becomes of text that answers an eager end of turn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Standing {
    /// The caller may not have finished: it waits.
    Waits,
    /// The caller had finished: it is an answer like any other.
    Stands,
    /// The caller went on: it is not wanted.
    Stale,
}

/// Which eager end of turn may be answered.
#[derive(Debug, Default)]
pub(super) struct Speculation {
    open: Option<(u64, String)>,
    /// The latest one that was right: the rest of its answer may come while the next is open.
    stands: Option<u64>,
}

impl Speculation {
    /// The caller has probably finished with these words; `number` names that.
    pub(super) fn open(&mut self, number: u64, words: &str) {
        self.open = Some((number, plain(words)));
    }

    /// The caller's turn has ended with `words`, or goes on (`None`); gives the eager end whose answers are right.
    pub(super) fn close(&mut self, words: Option<&str>) -> Option<u64> {
        let (number, before) = self.open.take()?;
        words.filter(|words| plain(words) == before)?;
        self.stands = Some(number);
        self.stands
    }

    pub(super) fn standing(&self, number: u64) -> Standing {
        match &self.open {
            Some((open, _)) if *open == number => Standing::Waits,
            _ if self.stands == Some(number) => Standing::Stands,
            _ => Standing::Stale,
        }
    }
}

/// Words without what a recogniser adds or changes when it hears the end: signs and capitals.
fn plain(text: &str) -> String {
    let words = text
        .split_whitespace()
        .map(|word| word.chars().filter(|c| c.is_alphanumeric()).flat_map(char::to_lowercase).collect::<String>());
    words.filter(|word| !word.is_empty()).collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_stands_where_the_words_were_the_same_and_signs_do_not_count() {
        let mut speculation = Speculation::default();
        assert_eq!(speculation.standing(1), Standing::Stale, "nobody asked");
        speculation.open(1, "two tickets to Bonn");
        assert_eq!(speculation.standing(1), Standing::Waits);
        assert_eq!(speculation.close(Some("Two tickets, to Bonn.")), Some(1));
        assert_eq!(speculation.standing(1), Standing::Stands, "the rest of it may still come");
        assert_eq!(speculation.close(Some("Two tickets, to Bonn.")), None, "once");
        speculation.open(2, "uh");
        assert_eq!(speculation.standing(1), Standing::Stands, "an answer goes on while the caller says something");
    }

    #[test]
    fn an_answer_is_stale_once_the_caller_goes_on_or_said_something_else() {
        let mut speculation = Speculation::default();
        speculation.open(1, "two tickets");
        assert_eq!(speculation.close(None), None);
        assert_eq!(speculation.standing(1), Standing::Stale);
        speculation.open(2, "two tickets");
        assert_eq!(speculation.close(Some("two tickets, please")), None);
        assert_eq!(speculation.standing(2), Standing::Stale);
        speculation.open(3, "a");
        speculation.open(4, "b");
        assert_eq!((speculation.standing(3), speculation.standing(4)), (Standing::Stale, Standing::Waits));
    }
}
