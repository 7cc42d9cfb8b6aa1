//! Mail and web addresses in languages that set words apart by spaces.

/// Runs of letters are said by `word`, runs of digits by `number`, other characters by `sign`; what `sign` leaves empty
/// is not said.
pub(super) fn spell(
    text: &str,
    word: fn(&str) -> &str,
    number: fn(&str) -> String,
    sign: fn(char) -> &'static str,
) -> String {
    let mut said: Vec<String> = Vec::new();
    let mut rest = text;
    while let Some(c) = rest.chars().next() {
        let run = |same: fn(char) -> bool| rest.find(|c: char| !same(c)).unwrap_or(rest.len());
        let (piece, length) = match c {
            c if c.is_ascii_digit() => {
                let end = run(|c| c.is_ascii_digit());
                (number(&rest[..end]), end)
            }
            c if c.is_alphabetic() => {
                let end = run(char::is_alphabetic);
                (word(&rest[..end]).to_owned(), end)
            }
            c => (sign(c).to_owned(), c.len_utf8()),
        };
        if !piece.is_empty() {
            said.push(piece);
        }
        rest = &rest[length..];
    }
    said.join(" ")
}
