//! The conversation as the model gets it: what the caller said, and of the answers what the caller heard.

use std::collections::VecDeque;

use serde_json::{Value, json};

use super::answer::ToolCall;
use crate::call::TurnId;

/// What stands behind an answer that was cut off.
const CUT: &str = " …";

/// One message, or what becomes one.
#[derive(Clone, Debug)]
enum Entry {
    User(String),
    Answer(Answer),
    Tool { call: String, content: String },
}

/// What the model said in one request.
#[derive(Clone, Debug)]
struct Answer {
    turn: TurnId,
    /// As it was generated.
    text: String,
    /// How much of it was heard, once its turn is over.
    heard: Option<Heard>,
    calls: Vec<ToolCall>,
}

#[derive(Clone, Debug, PartialEq)]
enum Heard {
    All,
    Part(String),
}

/// The messages of one call, oldest first.
#[derive(Clone, Debug)]
pub struct History {
    system: String,
    entries: VecDeque<Entry>,
    /// Most characters of entries.
    limit: usize,
}

impl History {
    /// Nothing was said yet. `system`: the instructions, which are never forgotten; `limit`: characters of all else.
    pub fn new(system: String, limit: usize) -> Self {
        Self { system, entries: VecDeque::new(), limit }
    }

    /// The caller said something; what follows without an answer between is one message, as some templates demand.
    pub fn user(&mut self, text: &str) {
        match self.entries.back_mut() {
            Some(Entry::User(last)) => {
                last.push('\n');
                last.push_str(text);
            }
            _ => self.entries.push_back(Entry::User(text.to_owned())),
        }
        self.forget();
    }

    /// More of the answer that is spoken as `turn`.
    pub fn say(&mut self, turn: &TurnId, text: &str) {
        match self.answer(turn) {
            Some(answer) => answer.text.push_str(text),
            None => self.entries.push_back(Entry::Answer(Answer {
                turn: turn.clone(),
                text: text.to_owned(),
                heard: None,
                calls: Vec::new(),
            })),
        }
        self.forget();
    }

    /// The answer that is spoken as `turn` calls tools; their results follow.
    pub fn call(&mut self, turn: &TurnId, calls: Vec<ToolCall>) {
        if self.answer(turn).is_none() {
            // Nothing of it is to be heard.
            let heard = Some(Heard::All);
            self.entries.push_back(Entry::Answer(Answer {
                turn: turn.clone(),
                text: String::new(),
                heard,
                calls: Vec::new(),
            }));
        }
        if let Some(answer) = self.answer(turn) {
            answer.calls = calls;
        }
        self.forget();
    }

    /// What a tool gave.
    pub fn result(&mut self, call: &str, content: &str) {
        self.entries.push_back(Entry::Tool { call: call.to_owned(), content: content.to_owned() });
        self.forget();
    }

    /// A turn is over; `heard`: what left for the listener, `None` when that is all of it. `false`: no turn of ours.
    pub fn ended(&mut self, turn: &TurnId, heard: Option<&str>) -> bool {
        let Some(answer) = self.answer(turn) else { return false };
        answer.heard = Some(heard.map_or(Heard::All, |text| Heard::Part(text.trim().to_owned())));
        true
    }

    /// Whether an answer still sounds or waits to.
    pub fn is_sounding(&self) -> bool {
        self.entries.iter().any(|entry| matches!(entry, Entry::Answer(Answer { heard: None, .. })))
    }

    /// Whether `turn` is an answer of the model.
    pub fn has(&self, turn: &TurnId) -> bool {
        self.entries.iter().any(|entry| matches!(entry, Entry::Answer(answer) if answer.turn == *turn))
    }

    /// What was heard of answers that sound will not be told any more: they count as not heard.
    pub fn give_up(&mut self) {
        for entry in &mut self.entries {
            if let Entry::Answer(answer) = entry
                && answer.heard.is_none()
            {
                answer.heard = Some(Heard::Part(String::new()));
            }
        }
    }

    /// `messages` of a request.
    pub fn messages(&self) -> Vec<Value> {
        let mut messages = Vec::new();
        if !self.system.is_empty() {
            messages.push(json!({ "role": "system", "content": self.system }));
        }
        for entry in &self.entries {
            match entry {
                Entry::User(text) => push(&mut messages, "user", text),
                Entry::Tool { call, content } => {
                    messages.push(json!({ "role": "tool", "tool_call_id": call, "content": content }));
                }
                Entry::Answer(answer) => {
                    let text = match &answer.heard {
                        // What sounds now will be heard, as far as anybody knows.
                        None | Some(Heard::All) => answer.text.trim().to_owned(),
                        Some(Heard::Part(heard)) if heard.is_empty() => String::new(),
                        Some(Heard::Part(heard)) => format!("{heard}{CUT}"),
                    };
                    if answer.calls.is_empty() {
                        push(&mut messages, "assistant", &text);
                        continue;
                    }
                    let calls: Vec<Value> = answer
                        .calls
                        .iter()
                        .map(|call| {
                            let function = json!({ "name": call.name, "arguments": call.arguments });
                            json!({ "id": call.id, "type": "function", "function": function })
                        })
                        .collect();
                    let content = if text.is_empty() { Value::Null } else { json!(text) };
                    messages.push(json!({ "role": "assistant", "content": content, "tool_calls": calls }));
                }
            }
        }
        messages
    }

    fn answer(&mut self, turn: &TurnId) -> Option<&mut Answer> {
        self.entries.iter_mut().rev().find_map(|entry| match entry {
            Entry::Answer(answer) if answer.turn == *turn => Some(answer),
            _ => None,
        })
    }

    /// Drops the oldest exchanges past the limit: up to the next words of the caller, so that no result of a tool
    /// stands without its call. The latest exchange stays, whatever its length.
    fn forget(&mut self) {
        let mut total: usize = self.entries.iter().map(size).sum();
        while total > self.limit {
            let next = self.entries.iter().skip(1).position(|entry| matches!(entry, Entry::User(_)));
            let Some(count) = next else { return };
            total -= self.entries.drain(..=count).map(|entry| size(&entry)).sum::<usize>();
        }
    }
}

/// Adds to the last message where it has the same role and is plain text.
fn push(messages: &mut Vec<Value>, role: &str, text: &str) {
    if text.is_empty() {
        return;
    }
    let last = messages.last_mut().filter(|last| last["role"] == role && last["tool_calls"].is_null());
    match last {
        Some(last) => {
            let joined = format!("{}\n{text}", last["content"].as_str().unwrap_or_default());
            last["content"] = json!(joined);
        }
        None => messages.push(json!({ "role": role, "content": text })),
    }
}

fn size(entry: &Entry) -> usize {
    match entry {
        Entry::User(text) => text.len(),
        Entry::Answer(answer) => {
            answer.text.len() + answer.calls.iter().map(|call| call.name.len() + call.arguments.len()).sum::<usize>()
        }
        Entry::Tool { content, .. } => content.len(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn turn(name: &str) -> TurnId {
        TurnId::from(name)
    }

    fn shown(history: &History) -> Vec<(String, String)> {
        let text = |value: &Value| value.as_str().unwrap_or("-").to_owned();
        history.messages().iter().map(|message| (text(&message["role"]), text(&message["content"]))).collect()
    }

    fn lines(expected: &[(&str, &str)]) -> Vec<(String, String)> {
        expected.iter().map(|(role, content)| ((*role).to_owned(), (*content).to_owned())).collect()
    }

    #[test]
    fn an_answer_is_what_was_heard_of_it() {
        let mut history = History::new("Be brief.".into(), 1_000);
        history.user("What do you sell?");
        history.say(&turn("a"), "We sell apples, ");
        history.say(&turn("a"), "pears and plums.");
        assert!(history.is_sounding());
        assert_eq!(shown(&history)[2].1, "We sell apples, pears and plums.", "until it is known");
        assert!(history.ended(&turn("a"), Some("We sell apples,")));
        history.user("Stop.");
        history.say(&turn("b"), "All right.");
        assert!(history.ended(&turn("b"), None));
        history.say(&turn("c"), "Never heard.");
        assert!(history.ended(&turn("c"), Some("")));
        assert!(!history.ended(&turn("x"), None), "a turn of somebody else");
        assert!(!history.is_sounding());
        assert_eq!(
            shown(&history),
            lines(&[
                ("system", "Be brief."),
                ("user", "What do you sell?"),
                ("assistant", "We sell apples, …"),
                ("user", "Stop."),
                ("assistant", "All right."),
            ])
        );
    }

    #[test]
    fn roles_alternate() {
        let mut history = History::new(String::new(), 1_000);
        history.say(&turn("greeting"), "Hello.");
        history.ended(&turn("greeting"), None);
        history.user("One");
        history.say(&turn("a"), "Cut before it sounded.");
        history.ended(&turn("a"), Some(""));
        history.user("two");
        assert_eq!(shown(&history), lines(&[("assistant", "Hello."), ("user", "One\ntwo")]));
    }

    #[test]
    fn calls_stand_before_their_results() {
        let mut history = History::new(String::new(), 1_000);
        history.user("Where is it?");
        let call = ToolCall { id: "1".into(), name: "track".into(), arguments: "{}".into() };
        history.call(&turn("a"), vec![call]);
        history.result("1", "in Basel");
        let messages = history.messages();
        assert_eq!(messages[1]["tool_calls"][0]["function"]["name"], "track");
        assert!(messages[1]["content"].is_null());
        assert_eq!((&messages[2]["role"], &messages[2]["tool_call_id"]), (&json!("tool"), &json!("1")));
        assert!(!history.is_sounding(), "nothing of it is spoken");
    }

    #[test]
    fn the_oldest_exchanges_are_forgotten_whole() {
        let mut history = History::new("s".repeat(500), 100);
        history.user("first");
        let call = ToolCall { id: "1".into(), name: "look".into(), arguments: "{}".into() };
        history.call(&turn("a"), vec![call]);
        history.result("1", &"r".repeat(60));
        history.user(&"u".repeat(60));
        history.say(&turn("b"), "answer");
        let roles: Vec<String> = shown(&history).into_iter().map(|(role, _)| role).collect();
        assert_eq!(roles, ["system", "user", "assistant"], "no result without its call");
        history.user(&"v".repeat(300));
        assert_eq!(shown(&history)[1].1.len(), 300, "the latest stays, whatever its length");
        assert_eq!(history.entries.len(), 1);
    }
}
