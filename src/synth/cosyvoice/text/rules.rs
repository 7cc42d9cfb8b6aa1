//! The built-in text rules: what the original does when no external normaliser is installed.

use super::numbers::words;
use super::phonemes::is_phone;
use super::tokenizer::Tokenizer;

/// A joined segment longer than this is cut when what came before is longer than [`LEAST`].
const MOST: usize = 80;
/// See [`MOST`].
const LEAST: usize = 60;
/// A last segment shorter than this is joined to its predecessor.
const SHORT: usize = 20;

const CHINESE_STOPS: [char; 10] = ['。', '？', '！', '；', '：', '、', '.', '?', '!', ';'];
const OTHER_STOPS: [char; 5] = ['.', '?', '!', ';', ':'];

/// Text as it is spoken, in one piece. Text with `<|...|>` tokens in it is left alone.
pub fn normalize(text: &str) -> String {
    if text.is_empty() || has_tokens(text) {
        return text.into();
    }
    let text = text.trim();
    if is_chinese(text) { chinese(text) } else { spell_out(text) }
}

/// Normalised text in pieces of a length the model speaks well, each an utterance of its own; none where there is
/// nothing to say.
pub fn segments(text: &str, tokenizer: &Tokenizer) -> Vec<String> {
    if text.is_empty() || has_tokens(text) {
        return if text.is_empty() { Vec::new() } else { vec![text.into()] };
    }
    let chinese = is_chinese(text);
    let normal = normalize(text);
    let length = |piece: &str| if chinese { piece.chars().count() } else { tokenizer.count(piece) };
    // An id is a byte at least, and the normal form of ASCII is itself: a short text, which a caller waits for, need not be counted.
    let exceeds = |piece: &str, most: usize| !(piece.is_ascii() && piece.len() <= most) && length(piece) > most;
    let mut pieces = join(sentences(&normal, chinese), exceeds);
    pieces.retain(|p| p.chars().any(|c| c.is_alphanumeric() || is_phone(c)));
    pieces
}

fn has_tokens(text: &str) -> bool {
    text.contains("<|") && text.contains("|>")
}

fn is_chinese(text: &str) -> bool {
    text.chars().any(|c| ('\u{4e00}'..='\u{9fff}').contains(&c))
}

fn chinese(text: &str) -> String {
    let text: Vec<char> = text.chars().filter(|&c| c != '\n').collect();
    let solid = |c: Option<&char>| c.is_some_and(|c| c.is_ascii() && *c != ' ');
    let kept = |&(i, c): &(usize, &char)| *c != ' ' || (i > 0 && solid(text.get(i - 1)) && solid(text.get(i + 1)));
    let text: String = text.iter().enumerate().filter(kept).map(|(_, c)| *c).collect();
    let text = text.replace('²', "平方").replace('³', "立方").replace('.', "。").replace(" - ", "，");
    let text: String = text.chars().filter(|c| !"（）【】`".contains(*c)).collect();
    let text = text.replace("——", " ");
    let bare = text.trim_end_matches(['，', ',', '、']);
    if bare.len() < text.len() { format!("{bare}。") } else { text }
}

/// Each run of digits in words.
fn spell_out(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(start) = rest.find(|c: char| c.is_ascii_digit()) {
        let (before, from) = rest.split_at(start);
        let end = from.find(|c: char| !c.is_ascii_digit()).unwrap_or(from.len());
        out.push_str(before);
        out.push_str(&words(&from[..end]));
        rest = &from[end..];
    }
    out.push_str(rest);
    out
}

/// Cut after every stop; a closing quote stays with its sentence.
fn sentences(text: &str, chinese: bool) -> Vec<String> {
    let stops: &[char] = if chinese { &CHINESE_STOPS } else { &OTHER_STOPS };
    let mut text: Vec<char> = text.chars().collect();
    if text.last().is_some_and(|c| !stops.contains(c)) {
        text.push(if chinese { '。' } else { '.' });
    }
    let mut found: Vec<String> = Vec::new();
    let mut start = 0;
    for (i, c) in text.iter().enumerate() {
        if !stops.contains(c) {
            continue;
        }
        if start < i {
            found.push(text[start..=i].iter().collect());
        }
        start = i + 1;
        if let Some(&quote) = text.get(i + 1).filter(|q| matches!(q, '"' | '”')) {
            if let Some(last) = found.last_mut() {
                last.push(quote);
            }
            start = i + 2;
        }
    }
    found
}

/// Sentences joined to pieces. `exceeds`: whether a piece is longer than that.
fn join(sentences: Vec<String>, exceeds: impl Fn(&str, usize) -> bool) -> Vec<String> {
    let mut pieces: Vec<String> = Vec::new();
    let mut current = String::new();
    for sentence in sentences {
        // What is there first: of a short one nothing has to be counted, whatever comes behind it.
        if exceeds(&current, LEAST) && exceeds(&format!("{current}{sentence}"), MOST) {
            pieces.push(std::mem::take(&mut current));
        }
        current.push_str(&sentence);
    }
    match pieces.last_mut() {
        Some(last) if !current.is_empty() && !exceeds(&current, SHORT - 1) => last.push_str(&current),
        _ if !current.is_empty() => pieces.push(current),
        _ => {}
    }
    pieces
}
