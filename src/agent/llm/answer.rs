//! One chunk of a chat completion (`chat.completion.chunk` of the OpenAI API), and the tool calls that chunks add up to.

use serde::Deserialize;

/// Most tools that a model may call at once.
pub const MAX_CALLS: usize = 8;
/// Longest arguments of one call, in bytes.
pub const MAX_ARGUMENTS: usize = 16 << 10;

/// What a chunk says.
#[derive(Clone, Debug, PartialEq)]
pub enum Piece {
    /// More of the answer.
    Text(String),
    /// More of a tool call.
    Call(CallPiece),
    /// The model has ended, and why: `stop`, `length`, `tool_calls`, `content_filter`.
    Finish(String),
    /// What it cost, in tokens.
    Usage {
        /// Of the prompt.
        input: u64,
        /// Of the answer.
        output: u64,
    },
}

/// More of a tool call.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct CallPiece {
    /// Which call of the answer.
    pub index: usize,
    /// Its name for the result, in the first piece.
    pub id: String,
    /// The tool, in the first piece.
    pub name: String,
    /// More of the arguments, JSON.
    pub arguments: String,
}

/// A complete tool call.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ToolCall {
    /// What the result refers to.
    pub id: String,
    /// The tool.
    pub name: String,
    /// Arguments as the model wrote them: JSON, if it did well.
    pub arguments: String,
}

#[derive(Deserialize)]
struct Chunk {
    #[serde(default)]
    choices: Vec<Choice>,
    usage: Option<Usage>,
    error: Option<serde_json::Value>,
}

#[derive(Deserialize)]
struct Choice {
    delta: Option<Delta>,
    /// In place of `delta` where a server does not stream.
    message: Option<Delta>,
    finish_reason: Option<String>,
}

#[derive(Deserialize)]
struct Delta {
    content: Option<String>,
    refusal: Option<String>,
    tool_calls: Option<Vec<CallDelta>>,
}

#[derive(Deserialize)]
struct CallDelta {
    index: Option<usize>,
    id: Option<String>,
    function: Option<Function>,
}

#[derive(Deserialize)]
struct Function {
    name: Option<String>,
    arguments: Option<serde_json::Value>,
}

#[derive(Deserialize)]
struct Usage {
    #[serde(default)]
    prompt_tokens: u64,
    #[serde(default)]
    completion_tokens: u64,
}

/// Reads one chunk.
///
/// # Errors
/// It is no chunk, or an error that the server reports inside the stream; the text is for the log.
pub fn read(data: &str) -> Result<Vec<Piece>, String> {
    let chunk: Chunk = serde_json::from_str(data).map_err(|error| format!("not a chunk of a completion: {error}"))?;
    if let Some(error) = chunk.error.filter(|error| !error.is_null()) {
        let message = error["message"].as_str().map_or_else(|| error.to_string(), str::to_owned);
        return Err(format!("the server reports: {message}"));
    }
    let mut pieces = Vec::new();
    if let Some(choice) = chunk.choices.into_iter().next() {
        if let Some(delta) = choice.delta.or(choice.message) {
            pieces.extend(
                [delta.content, delta.refusal].into_iter().flatten().filter(|t| !t.is_empty()).map(Piece::Text),
            );
            for (place, call) in delta.tool_calls.into_iter().flatten().enumerate() {
                let function = call.function.unwrap_or(Function { name: None, arguments: None });
                pieces.push(Piece::Call(CallPiece {
                    index: call.index.unwrap_or(place),
                    id: call.id.unwrap_or_default(),
                    name: function.name.unwrap_or_default(),
                    arguments: match function.arguments {
                        None | Some(serde_json::Value::Null) => String::new(),
                        Some(serde_json::Value::String(text)) => text,
                        // Some servers give the object itself.
                        Some(object) => object.to_string(),
                    },
                }));
            }
        }
        pieces.extend(choice.finish_reason.filter(|reason| !reason.is_empty()).map(Piece::Finish));
    }
    pieces
        .extend(chunk.usage.map(|usage| Piece::Usage { input: usage.prompt_tokens, output: usage.completion_tokens }));
    Ok(pieces)
}

/// The tool calls of one answer while they come.
#[derive(Debug, Default)]
pub struct Calls {
    /// With the index that the server gave.
    calls: Vec<(usize, ToolCall)>,
}

impl Calls {
    /// Adds a piece.
    ///
    /// # Errors
    /// The model calls more than may be, or writes more.
    pub fn add(&mut self, piece: CallPiece) -> Result<(), String> {
        // Some servers number every call 0 and give each an id of its own.
        let known = |(index, call): &(usize, ToolCall)| {
            *index == piece.index && (piece.id.is_empty() || call.id.is_empty() || call.id == piece.id)
        };
        let place = match self.calls.iter().rposition(known) {
            Some(place) => place,
            None if self.calls.len() >= MAX_CALLS => return Err(format!("more than {MAX_CALLS} tools called at once")),
            None => {
                self.calls.push((piece.index, ToolCall::default()));
                self.calls.len() - 1
            }
        };
        let call = &mut self.calls[place].1;
        if call.arguments.len() + piece.arguments.len() > MAX_ARGUMENTS || piece.name.len() + piece.id.len() > 512 {
            return Err(format!("arguments of more than {MAX_ARGUMENTS} bytes"));
        }
        if call.id.is_empty() {
            call.id = piece.id;
        }
        if call.name.is_empty() {
            call.name = piece.name;
        }
        call.arguments.push_str(&piece.arguments);
        Ok(())
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.calls.is_empty()
    }

    /// All of them; every one has an id, made here where the server gave none.
    pub fn take(&mut self) -> Vec<ToolCall> {
        let calls = std::mem::take(&mut self.calls).into_iter().enumerate();
        calls
            .map(|(place, (_, call))| match call.id.is_empty() {
                true => ToolCall { id: format!("call_{place}"), ..call },
                false => call,
            })
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_calls_finish_and_usage_are_read() {
        let pieces = read(r#"{"id":"x","choices":[{"index":0,"delta":{"role":"assistant","content":"Hi"}}]}"#);
        assert_eq!(pieces.expect("a chunk"), [Piece::Text("Hi".into())]);
        let pieces = read(r#"{"choices":[{"delta":{"content":null},"finish_reason":"stop"}],"usage":null}"#);
        assert_eq!(pieces.expect("a chunk"), [Piece::Finish("stop".into())]);
        let pieces = read(r#"{"choices":[],"usage":{"prompt_tokens":12,"completion_tokens":3,"total_tokens":15}}"#);
        assert_eq!(pieces.expect("a chunk"), [Piece::Usage { input: 12, output: 3 }]);
    }

    #[test]
    fn a_document_of_a_server_that_does_not_stream_is_read_alike() {
        let whole = r#"{"choices":[{"message":{"content":"Hi"},"finish_reason":"stop"}]}"#;
        assert_eq!(read(whole).expect("a document"), [Piece::Text("Hi".into()), Piece::Finish("stop".into())]);
    }

    #[test]
    fn garbage_and_reported_errors_are_errors() {
        for bad in ["", "<html>", "[1]", "\u{0}", r#"{"error":{"message":"overloaded"}}"#, r#"{"choices":7}"#] {
            assert!(read(bad).is_err(), "{bad}");
        }
        assert_eq!(read("{}").expect("nothing said"), []);
    }

    fn calls(chunks: &[&str]) -> Vec<ToolCall> {
        let mut calls = Calls::default();
        for chunk in chunks {
            for piece in read(chunk).expect("a chunk") {
                if let Piece::Call(piece) = piece {
                    calls.add(piece).expect("small");
                }
            }
        }
        calls.take()
    }

    #[test]
    fn pieces_of_calls_add_up_as_openai_and_as_ollama_send_them() {
        let streamed = calls(&[
            r#"{"choices":[{"delta":{"tool_calls":[{"index":0,"id":"a","function":{"name":"look","arguments":""}}]}}]}"#,
            r#"{"choices":[{"delta":{"tool_calls":[{"index":0,"function":{"arguments":"{\"x\":"}}]}}]}"#,
            r#"{"choices":[{"delta":{"tool_calls":[{"index":1,"id":"b","function":{"name":"say","arguments":"{}"}}]}}]}"#,
            r#"{"choices":[{"delta":{"tool_calls":[{"index":0,"function":{"arguments":"1}"}}]}}]}"#,
        ]);
        let call = |id: &str, name: &str, arguments: &str| ToolCall {
            id: id.into(),
            name: name.into(),
            arguments: arguments.into(),
        };
        assert_eq!(streamed, [call("a", "look", "{\"x\":1}"), call("b", "say", "{}")]);
        let whole = calls(&[
            r#"{"choices":[{"delta":{"tool_calls":[{"index":0,"id":"p","function":{"name":"look","arguments":"{}"}}]}}]}"#,
            r#"{"choices":[{"delta":{"tool_calls":[{"index":0,"id":"q","function":{"name":"say","arguments":{"y":2}}}]}}]}"#,
        ]);
        assert_eq!(whole, [call("p", "look", "{}"), call("q", "say", "{\"y\":2}")]);
    }

    #[test]
    fn a_flood_of_calls_is_refused() {
        let mut calls = Calls::default();
        let piece = |index| CallPiece { index, id: format!("c{index}"), ..CallPiece::default() };
        assert!((0..MAX_CALLS).all(|index| calls.add(piece(index)).is_ok()));
        assert!(calls.add(piece(MAX_CALLS)).is_err());
        let long = CallPiece { id: "c0".into(), arguments: "x".repeat(MAX_ARGUMENTS + 1), ..CallPiece::default() };
        assert!(calls.add(long).is_err());
    }
}
