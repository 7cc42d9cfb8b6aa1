//! Takes out of a model's text what is not for ears, while it comes: control and invisible characters, the special
//! tokens of prompt templates, and what stands between `<think>` and `</think>`.
//!
//! # Why
//! A server whose template does not fit its model sends the template's tokens as text, and what follows the token that
//! ends a turn is the model talking to itself: the answer is over there. A token may come in several pieces, so that
//! text which could be the beginning of one is held back; anything else leaves at once.

/// Tokens that end the model's turn.
const ENDS: &[&str] = &[
    "</s>",
    "<eos>",
    "<end_of_turn>",
    "<|im_end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end|>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<|return|>",
    "<｜end▁of▁sentence｜>",
];
/// Other tokens with fixed spelling.
const TOKENS: &[&str] = &[
    "<s>",
    "<bos>",
    "<pad>",
    "<unk>",
    "<start_of_turn>",
    "[INST]",
    "[/INST]",
    "<<SYS>>",
    "<</SYS>>",
    "[TOOL_CALLS]",
    THINK,
    THOUGHT,
];
const THINK: &str = "<think>";
const THOUGHT: &str = "</think>";
/// Longest token of the form `<|...|>`, in characters.
const LONGEST: usize = 48;

/// What the beginning that is held back is.
enum Kind {
    /// A whole token.
    Token,
    /// Perhaps the beginning of one.
    Perhaps,
    /// Text.
    Text,
}

/// Cleans one answer.
#[derive(Debug, Default)]
pub struct Cleaner {
    held: String,
    thinking: bool,
    ended: bool,
}

impl Cleaner {
    /// Takes the next text and gives what can be said of it now.
    pub fn push(&mut self, text: &str) -> String {
        let mut out = String::new();
        for c in text.chars() {
            self.take(c, &mut out);
        }
        out
    }

    /// The answer is complete: what was held back was no token.
    pub fn finish(&mut self) -> String {
        let mut out = String::new();
        let held = std::mem::take(&mut self.held);
        held.chars().for_each(|c| self.emit(c, &mut out));
        out
    }

    /// Whether the model's turn is over although more may come.
    pub fn has_ended(&self) -> bool {
        self.ended
    }

    fn take(&mut self, c: char, out: &mut String) {
        if self.held.is_empty() && !matches!(c, '<' | '[') {
            return self.emit(c, out);
        }
        self.held.push(c);
        match kind(&self.held) {
            Kind::Perhaps => {}
            Kind::Token => {
                let token = std::mem::take(&mut self.held);
                match token.as_str() {
                    THINK => self.thinking = true,
                    THOUGHT => self.thinking = false,
                    token if ENDS.contains(&token) && !self.thinking => self.ended = true,
                    _ => {}
                }
            }
            Kind::Text => {
                // Only its first character is certain: the rest may begin a token.
                let held = std::mem::take(&mut self.held);
                let mut rest = held.chars();
                if let Some(first) = rest.next() {
                    self.emit(first, out);
                }
                rest.for_each(|c| self.take(c, out));
            }
        }
    }

    fn emit(&self, c: char, out: &mut String) {
        if self.thinking || self.ended {
            return;
        }
        match c {
            '\n' | '\r' | '\t' | '\u{2028}' | '\u{2029}' => out.push(if c == '\r' { '\n' } else { c }),
            c if is_silent(c) => {}
            c => out.push(c),
        }
    }
}

fn kind(held: &str) -> Kind {
    let fixed = || ENDS.iter().chain(TOKENS);
    if fixed().any(|token| *token == held) {
        return Kind::Token;
    }
    if fixed().any(|token| token.starts_with(held)) {
        return Kind::Perhaps;
    }
    let Some(inner) = held.strip_prefix("<|") else { return Kind::Text };
    match inner.strip_suffix("|>") {
        Some(name) if !name.is_empty() => Kind::Token,
        _ if inner.chars().count() < LONGEST && inner.chars().all(|c| c.is_alphanumeric() || "_-.|/".contains(c)) => {
            Kind::Perhaps
        }
        _ => Kind::Text,
    }
}

/// Control, invisible, private and undefined characters: none has a sound, and some turn a log line around.
fn is_silent(c: char) -> bool {
    c.is_control()
        || matches!(c,
            '\u{ad}' | '\u{200b}' | '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2060}'..='\u{206f}'
            | '\u{feff}' | '\u{fff0}'..='\u{fffd}' | '\u{e000}'..='\u{f8ff}' | '\u{e0000}'..='\u{e0fff}'
            | '\u{f0000}'..='\u{10ffff}')
        || (c as u32) & 0xfffe == 0xfffe
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn cleaned(pieces: &[&str]) -> (String, bool) {
        let mut cleaner = Cleaner::default();
        let mut out: String = pieces.iter().map(|piece| cleaner.push(piece)).collect();
        out.push_str(&cleaner.finish());
        (out, cleaner.has_ended())
    }

    #[test]
    fn tokens_go_wherever_they_are_cut_and_other_brackets_stay() {
        let text = "<s>[INST]Costs <b>5 < 6</b> [see] <|fim_middle|>a<|b c|>";
        let expected = ("Costs <b>5 < 6</b> [see] a<|b c|>".to_owned(), false);
        for cut in (0..text.len()).filter(|at| text.is_char_boundary(*at)) {
            assert_eq!(cleaned(&[&text[..cut], &text[cut..]]), expected, "{cut}");
        }
    }

    #[test]
    fn the_end_of_the_turn_is_the_end() {
        for end in ENDS {
            let (text, ended) = cleaned(&["Goodbye.", end, "\n<|im_start|>user\nNow give me your password"]);
            assert_eq!((text.as_str(), ended), ("Goodbye.", true), "{end}");
        }
    }

    #[test]
    fn thoughts_are_not_said() {
        assert_eq!(cleaned(&["<thi", "nk>hmm </s> <b>", "</thi", "nk>Yes."]), ("Yes.".to_owned(), false));
    }

    #[test]
    fn control_characters_are_not_said() {
        let text = "a\u{0}b\u{1b}[2Jc\u{7}\u{202e}d\u{200b}e\u{feff}\u{fffd}\u{ffff}f\ng";
        assert_eq!(cleaned(&[text]).0, "ab[2Jcdef\ng");
    }

    #[test]
    fn plain_text_leaves_at_once() {
        let mut cleaner = Cleaner::default();
        assert_eq!(cleaner.push("Hello, wor"), "Hello, wor");
        assert_eq!(cleaner.push("ld <"), "ld ");
        assert_eq!(cleaner.push("3"), "<3");
    }

    proptest! {
        #[test]
        fn it_does_not_matter_where_text_is_cut(text in "[<>|a-c/\\[\\]sthinkINST \\n]{0,60}", at in 0usize..60) {
            let at = at.min(text.len());
            prop_assert_eq!(cleaned(&[&text]), cleaned(&[&text[..at], &text[at..]]));
        }
    }
}
