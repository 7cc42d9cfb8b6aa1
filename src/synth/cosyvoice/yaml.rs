//! The subset of YAML that hyperpyyaml model descriptions use, with their tags kept as text.
//!
//! Reads block mappings, block and flow sequences, flow mappings, plain and quoted scalars, comments and the tags
//! `!new:`, `!name:`, `!apply:`, `!ref`. Tags are names only: nothing is ever constructed or called. `!ref` is
//! resolved against the top level, with `* / + -` between references and numbers.
//!
//! # Why
//! A general YAML library resolves tags to types or drops them and knows nothing of `!ref <a> * <b>`; the file's
//! subset is small and fixed, and its reader has to be sure to run no code.

use std::collections::BTreeSet;

/// A node and the tag before it, if any (without the `!`).
#[derive(Clone, Debug, PartialEq)]
pub struct Node {
    /// `new:path.Class`, `ref`, `name:f`, `apply:f`.
    pub tag: Option<String>,
    /// What follows.
    pub value: Value,
}

/// The three kinds of node.
#[derive(Clone, Debug, PartialEq)]
pub enum Value {
    /// A scalar, unquoted; empty for nothing at all.
    Scalar(String),
    /// A sequence.
    Sequence(Vec<Node>),
    /// A mapping in file order.
    Mapping(Vec<(String, Node)>),
}

/// What is wrong with the text, with its 1-based line (0: not tied to a line).
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("line {line}: {reason}")]
pub struct YamlError {
    /// Where.
    pub line: usize,
    /// What.
    pub reason: String,
}

/// Nesting deeper than any model description has; bounds the recursion on hostile input.
const MAX_DEPTH: usize = 32;

/// Reads a document.
///
/// # Errors
/// Text outside the subset.
pub fn parse(text: &str) -> Result<Node, YamlError> {
    let lines = logical_lines(text)?;
    let mut at = 0;
    let indent = lines.first().map_or(0, |l| l.indent);
    let node = block(&lines, &mut at, indent, 0)?;
    match lines.get(at) {
        Some(line) => Err(fail(line.number, "indentation does not match any open mapping")),
        None => Ok(node),
    }
}

impl Node {
    /// The value of `key` in a mapping.
    pub fn find(&self, key: &str) -> Option<&Node> {
        match &self.value {
            Value::Mapping(entries) => entries.iter().find(|(k, _)| k == key).map(|(_, v)| v),
            _ => None,
        }
    }

    /// The scalar text, `!ref` not resolved.
    pub fn scalar(&self) -> Option<&str> {
        match &self.value {
            Value::Scalar(s) => Some(s),
            _ => None,
        }
    }

    /// A copy in which every `!ref` that can be resolved against the top level of `self` is replaced by what it
    /// refers to. A reference that names nothing stays as it is and fails where it is used.
    #[must_use]
    pub fn resolved(&self) -> Node {
        resolve(self, self, &mut BTreeSet::new(), 0)
    }
}

fn resolve(node: &Node, root: &Node, open: &mut BTreeSet<String>, depth: usize) -> Node {
    if depth > MAX_DEPTH {
        return node.clone();
    }
    if node.tag.as_deref() == Some("ref")
        && let Value::Scalar(expression) = &node.value
    {
        return reference(expression, root, open, depth).unwrap_or_else(|| node.clone());
    }
    let value = match &node.value {
        Value::Scalar(s) => Value::Scalar(s.clone()),
        Value::Sequence(items) => Value::Sequence(items.iter().map(|n| resolve(n, root, open, depth + 1)).collect()),
        Value::Mapping(entries) => {
            Value::Mapping(entries.iter().map(|(k, n)| (k.clone(), resolve(n, root, open, depth + 1))).collect())
        }
    };
    Node { tag: node.tag.clone(), value }
}

fn reference(expression: &str, root: &Node, open: &mut BTreeSet<String>, depth: usize) -> Option<Node> {
    let expression = expression.trim();
    let whole = expression.strip_prefix('<').and_then(|e| e.strip_suffix('>'));
    if let Some(name) = whole.filter(|n| !n.contains(['<', '>'])) {
        // A cycle of references resolves to nothing rather than for ever.
        if !open.insert(name.into()) {
            return None;
        }
        let found = root.find(name).map(|n| resolve(n, root, open, depth + 1));
        open.remove(name);
        return found;
    }
    let mut total: Option<f64> = None;
    let mut operator = '*';
    for word in spaced(expression).split_whitespace() {
        if let (Some(op @ ('*' | '/' | '+' | '-')), 1) = (word.chars().next(), word.len()) {
            operator = op;
            continue;
        }
        let value: f64 = if word.starts_with('<') {
            reference(word, root, open, depth + 1)?.scalar()?.parse().ok()?
        } else {
            word.parse().ok()?
        };
        total = Some(match (total, operator) {
            (None, _) => value,
            (Some(t), '*') => t * value,
            (Some(t), '/') => t / value,
            (Some(t), '+') => t + value,
            (Some(t), _) => t - value,
        });
    }
    let total = total?;
    let text = if total.fract() == 0.0 { format!("{total:.0}") } else { total.to_string() };
    Some(Node { tag: None, value: Value::Scalar(text) })
}

/// Spaces round the operators outside `<...>`.
fn spaced(expression: &str) -> String {
    let mut out = String::new();
    let mut inside = false;
    for c in expression.chars() {
        inside = (inside || c == '<') && c != '>';
        if !inside && matches!(c, '*' | '/' | '+') {
            out.extend([' ', c, ' ']);
        } else {
            out.push(c);
        }
    }
    out
}

struct Line {
    number: usize,
    indent: usize,
    text: String,
}

fn fail(line: usize, reason: &str) -> YamlError {
    YamlError { line, reason: reason.into() }
}

/// Lines without comments and blanks; a flow collection that spans lines becomes one.
fn logical_lines(text: &str) -> Result<Vec<Line>, YamlError> {
    let mut lines: Vec<Line> = Vec::new();
    let mut open = 0i64;
    for (index, raw) in text.lines().enumerate() {
        let content = without_comment(raw);
        let trimmed = content.trim();
        if trimmed.is_empty() || (open == 0 && trimmed == "---") {
            continue;
        }
        let indent = content.len() - content.trim_start().len();
        if open == 0 && content[..indent].contains('\t') {
            return Err(fail(index + 1, "a tab indents this line; use spaces"));
        }
        match lines.last_mut().filter(|_| open > 0) {
            Some(last) => {
                last.text.push(' ');
                last.text.push_str(trimmed);
            }
            None => lines.push(Line { number: index + 1, indent, text: trimmed.into() }),
        }
        open += brackets(trimmed);
        if open < 0 {
            return Err(fail(index + 1, "closing bracket without an opening one"));
        }
    }
    match lines.last() {
        Some(last) if open > 0 => Err(fail(last.number, "this bracket is never closed")),
        _ => Ok(lines),
    }
}

fn without_comment(line: &str) -> &str {
    let mut previous = ' ';
    for (at, c, quoted) in quoting(line) {
        if c == '#' && !quoted && previous.is_whitespace() {
            return &line[..at];
        }
        previous = c;
    }
    line
}

fn brackets(text: &str) -> i64 {
    quoting(text)
        .filter(|(_, _, quoted)| !quoted)
        .map(|(_, c, _)| match c {
            '[' | '{' => 1,
            ']' | '}' => -1,
            _ => 0,
        })
        .sum()
}

/// Characters with their byte position and whether they are inside quotes (the quotes themselves are).
fn quoting(text: &str) -> impl Iterator<Item = (usize, char, bool)> + '_ {
    let mut quote: Option<char> = None;
    let mut previous = ' ';
    text.char_indices().map(move |(at, c)| {
        let quoted = match quote {
            Some(q) => {
                if c == q {
                    quote = None;
                }
                true
            }
            // An apostrophe inside a word is no quote.
            None if matches!(c, '"' | '\'') && matches!(previous, ' ' | '[' | '{' | ',' | ':') => {
                quote = Some(c);
                true
            }
            None => false,
        };
        previous = c;
        (at, c, quoted)
    })
}

fn block(lines: &[Line], at: &mut usize, indent: usize, depth: usize) -> Result<Node, YamlError> {
    let Some(first) = lines.get(*at) else {
        return Ok(Node { tag: None, value: Value::Scalar(String::new()) });
    };
    if depth > MAX_DEPTH {
        return Err(fail(first.number, "nested too deeply"));
    }
    if first.text == "-" || first.text.starts_with("- ") {
        return sequence(lines, at, indent, depth);
    }
    let mut entries: Vec<(String, Node)> = Vec::new();
    while let Some(line) = lines.get(*at).filter(|l| l.indent == indent) {
        let (key, rest) = key_of(&line.text).ok_or_else(|| fail(line.number, "expected `key: value`"))?;
        if entries.iter().any(|(k, _)| *k == key) {
            return Err(fail(line.number, &format!("key `{key}` appears twice")));
        }
        *at += 1;
        entries.push((key, value_after(lines, at, rest, indent, line.number, depth)?));
    }
    Ok(Node { tag: None, value: Value::Mapping(entries) })
}

fn sequence(lines: &[Line], at: &mut usize, indent: usize, depth: usize) -> Result<Node, YamlError> {
    let mut items = Vec::new();
    while let Some(line) = lines.get(*at).filter(|l| l.indent == indent) {
        let Some(rest) = line.text.strip_prefix('-') else { break };
        *at += 1;
        items.push(value_after(lines, at, rest, indent, line.number, depth)?);
    }
    Ok(Node { tag: None, value: Value::Sequence(items) })
}

/// What follows `key:` or `-`: a tag, then something on the line or a deeper block.
fn value_after(
    lines: &[Line],
    at: &mut usize,
    rest: &str,
    indent: usize,
    number: usize,
    depth: usize,
) -> Result<Node, YamlError> {
    let (tag, rest) = tag_of(rest.trim());
    if !rest.is_empty() {
        let mut node = inline(rest, number, depth)?;
        node.tag = tag.or(node.tag);
        return Ok(node);
    }
    // A sequence may stand at its key's own indentation.
    let deeper = lines.get(*at).filter(|l| l.indent > indent || (l.indent == indent && l.text.starts_with("- ")));
    let value = match deeper.map(|l| l.indent) {
        Some(inner) => block(lines, at, inner, depth + 1)?.value,
        None => Value::Scalar(String::new()),
    };
    Ok(Node { tag, value })
}

fn tag_of(text: &str) -> (Option<String>, &str) {
    match text.strip_prefix('!') {
        Some(tagged) => {
            let end = tagged.find(char::is_whitespace).unwrap_or(tagged.len());
            (Some(tagged[..end].to_string()), tagged[end..].trim())
        }
        None => (None, text),
    }
}

fn key_of(text: &str) -> Option<(String, &str)> {
    let (at, _, _) = quoting(text).find(|&(at, c, quoted)| {
        c == ':' && !quoted && text[at + 1..].chars().next().is_none_or(char::is_whitespace)
    })?;
    let key = unquote(text[..at].trim());
    (!key.is_empty()).then(|| (key, &text[at + 1..]))
}

fn unquote(text: &str) -> String {
    for quote in ['"', '\''] {
        if let Some(inner) = text.strip_prefix(quote).and_then(|t| t.strip_suffix(quote)) {
            return inner.to_string();
        }
    }
    text.to_string()
}

fn inline(text: &str, number: usize, depth: usize) -> Result<Node, YamlError> {
    if depth > MAX_DEPTH {
        return Err(fail(number, "nested too deeply"));
    }
    let text = text.trim();
    let (tag, text) = tag_of(text);
    let value = if let Some(body) = text.strip_prefix('[') {
        let body = body.strip_suffix(']').ok_or_else(|| fail(number, "text after a closing bracket"))?;
        let items: Result<_, _> = split_flow(body).into_iter().map(|i| inline(i, number, depth + 1)).collect();
        Value::Sequence(items?)
    } else if let Some(body) = text.strip_prefix('{') {
        let body = body.strip_suffix('}').ok_or_else(|| fail(number, "text after a closing bracket"))?;
        let mut entries = Vec::new();
        for item in split_flow(body) {
            let (key, rest) = key_of(item.trim()).ok_or_else(|| fail(number, "expected `key: value`"))?;
            entries.push((key, inline(rest, number, depth + 1)?));
        }
        Value::Mapping(entries)
    } else {
        Value::Scalar(unquote(text))
    };
    Ok(Node { tag, value })
}

/// Cuts at commas outside brackets and quotes.
fn split_flow(body: &str) -> Vec<&str> {
    let mut parts = Vec::new();
    let (mut depth, mut start) = (0i32, 0);
    for (at, c, quoted) in quoting(body) {
        match c {
            '[' | '{' if !quoted => depth += 1,
            ']' | '}' if !quoted => depth -= 1,
            ',' if !quoted && depth == 0 => {
                parts.push(&body[start..at]);
                start = at + 1;
            }
            _ => {}
        }
    }
    parts.push(&body[start..]);
    parts.retain(|p| !p.trim().is_empty());
    parts
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_what_model_descriptions_use() {
        let text = "a: 25 # rate\nb: !ref <a> * 2\nc: !new:x.Y\n    d: [1, [2, 3]]\n    e: 'q # r'\n    f: !ref <b>\n\
                    list: [\n    !ref <a>,\n    !ref <c>\n]\nseq:\n- 1\n- k: v\n";
        let node = parse(text);
        // A mapping as a sequence item on the dash's own line is outside the subset but harmless: a scalar.
        let node = node.expect("parse").resolved();
        assert_eq!(node.find("b").and_then(Node::scalar), Some("50"));
        let c = node.find("c").expect("c");
        assert_eq!(c.tag.as_deref(), Some("new:x.Y"));
        assert_eq!(c.find("e").and_then(Node::scalar), Some("q # r"));
        assert_eq!(c.find("f").and_then(Node::scalar), Some("50"));
        let Value::Sequence(items) = &node.find("list").expect("list").value else { panic!("no sequence") };
        assert_eq!(items.len(), 2);
        assert_eq!(items[1].tag.as_deref(), Some("new:x.Y"));
    }

    #[test]
    fn reference_cycles_end() {
        let node = parse("a: !ref <b>\nb: !ref <a>\n").expect("parse").resolved();
        assert_eq!(node.find("a").and_then(|n| n.tag.as_deref()), Some("ref"));
    }

    proptest::proptest! {
        #[test]
        fn any_text_parses_or_is_refused(text in "[a-c:\\[\\]{}!<>'\" \n,#-]{0,80}") {
            if let Ok(node) = parse(&text) {
                let _ = node.resolved();
            }
        }
    }
}
