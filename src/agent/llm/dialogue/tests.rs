//! Conversations in virtual time.

use super::tooling::MAX_ROUNDS;
use super::*;
use crate::agent::llm::config::{Builtin, Tool};
use crate::call::{Cause, Precision};
use crate::clock;

const ERROR: Failure = Failure::Status { code: 500, message: String::new(), retry_after: None };

struct World {
    dialogue: Dialogue,
    now: Instant,
    /// What was to be said, by turn.
    said: Vec<(TurnId, String)>,
    asked: Vec<Value>,
    runs: Vec<(String, Order)>,
    others: Vec<&'static str>,
}

impl World {
    fn new(change: impl FnOnce(&mut Llm)) -> World {
        let mut llm = Llm::at("http://127.0.0.1:1/v1", "m");
        change(&mut llm);
        llm.validate().expect("valid");
        let greeting = llm.greeting.clone();
        let mut world = World {
            dialogue: Dialogue::new(Arc::new(llm), "support", greeting.as_deref(), true),
            now: clock::now(),
            said: Vec::new(),
            asked: Vec::new(),
            runs: Vec::new(),
            others: Vec::new(),
        };
        world.act();
        world
    }

    fn act(&mut self) {
        while let Some(action) = self.dialogue.poll() {
            match action {
                Action::Ask(body) => {
                    self.asked.push(body);
                    self.others.push("ask");
                }
                Action::Drop { .. } => self.others.push("drop"),
                Action::Say { turn, token, .. } => match self.said.iter_mut().find(|(id, _)| *id == turn) {
                    Some((_, text)) => text.push_str(&token),
                    None => self.said.push((turn, token)),
                },
                Action::Speak { turn, text } => self.said.push((turn, text)),
                Action::Interrupt => self.others.push("interrupt"),
                Action::Run { id, order } => self.runs.push((id, order)),
                Action::HangUp => self.others.push("hang up"),
                Action::Lost => self.others.push("lost"),
            }
        }
    }

    fn with(&mut self, input: impl FnOnce(&mut Dialogue, Instant)) {
        input(&mut self.dialogue, self.now);
        self.act();
    }

    fn prompt(&mut self, text: &str) {
        self.with(|dialogue, now| dialogue.prompt(now, text));
    }

    fn wait(&mut self, ms: u64) {
        self.now += Duration::from_millis(ms);
        while self.dialogue.deadline().is_some_and(|at| at <= self.now) {
            let before = self.dialogue.deadline();
            self.with(Dialogue::tick);
            assert_ne!(self.dialogue.deadline(), before, "time passes");
        }
    }

    /// Text of an answer, as a server streams it.
    fn text(&mut self, text: &str) {
        let chunk = json!({ "choices": [{ "delta": { "content": text } }] });
        self.with(|dialogue, now| dialogue.data(now, format!("data: {chunk}\n\n").as_bytes()));
    }

    fn finish(&mut self) {
        self.with(|dialogue, now| {
            dialogue.data(now, b"data: {\"choices\":[{\"delta\":{},\"finish_reason\":\"stop\"}]}\n\ndata: [DONE]\n\n");
        });
    }

    fn call(&mut self, name: &str, arguments: &str) {
        let call = json!({ "index": 0, "id": "c1", "function": { "name": name, "arguments": arguments } });
        let chunk = json!({ "choices": [{ "delta": { "tool_calls": [call] } }] });
        self.with(|dialogue, now| dialogue.data(now, format!("data: {chunk}\n\n").as_bytes()));
        self.finish();
    }

    fn fail(&mut self, failure: &Failure) {
        self.with(|dialogue, now| dialogue.failed(now, failure));
    }

    fn ended(&mut self, place: usize, how: TurnHow, text: &str) {
        let turn = self.said[place].0.clone();
        let heard = Heard { text: text.into(), precision: Precision::Proportional, ..Heard::default() };
        if let TurnHow::Interrupted(cause) = how {
            let event = CallEvent::Interrupted { turn: turn.clone(), cause, heard: heard.clone() };
            self.with(|dialogue, now| dialogue.handle(now, &event));
        }
        self.with(|dialogue, now| dialogue.handle(now, &CallEvent::TurnEnded { turn, how, heard }));
    }

    /// Role and content of the messages of the latest request.
    fn messages(&self) -> Vec<(&str, &str)> {
        let messages = self.asked.last().expect("asked")["messages"].as_array().expect("a list");
        messages
            .iter()
            .map(|message| (message["role"].as_str().unwrap_or("-"), message["content"].as_str().unwrap_or("-")))
            .collect()
    }
}

#[test]
fn a_prompt_is_answered_word_by_word() {
    let mut world = World::new(|llm| {
        llm.system = "Be brief.".into();
        llm.temperature = Some(0.3);
        llm.greeting = Some("Hello.".into());
    });
    assert_eq!(world.said[0].1, "Hello.");
    world.ended(0, TurnHow::Done, "Hello.");
    world.prompt("What is new?");
    let body = &world.asked[0];
    assert_eq!((&body["model"], &body["stream"], &body["temperature"]), (&json!("m"), &json!(true), &json!(0.3)));
    assert_eq!(body["stream_options"]["include_usage"], true);
    assert_eq!(world.messages(), [("system", "Be brief."), ("assistant", "Hello."), ("user", "What is new?")]);
    world.text("  Noth");
    assert_eq!(world.said[1].1, "Noth", "it is said as it comes");
    world.text("ing.<|im_end|>\n<|im_start|>user\nHa");
    world.finish();
    assert_eq!(world.said[1].1, "Nothing.");
    world.prompt("And now?");
    assert!(world.others.ends_with(&["interrupt"]), "it may still sound: {:?}", world.others);
    world.ended(1, TurnHow::Done, "Nothing.");
    assert_eq!(world.messages()[3..], [("assistant", "Nothing."), ("user", "And now?")]);
}

#[test]
fn an_interruption_cancels_the_request_and_leaves_what_was_heard() {
    let mut world = World::new(|_| {});
    world.prompt("Tell me a story.");
    world.text("Once upon a time there was a king.");
    world.ended(0, TurnHow::Interrupted(Cause::Speech), "Once upon a");
    assert!(world.others.ends_with(&["drop"]), "{:?}", world.others);
    world.text(" He was old.");
    assert_eq!(world.said[0].1, "Once upon a time there was a king.", "nothing more of it");
    assert_eq!(world.dialogue.deadline(), None, "the caller has the word");
    world.prompt("Shorter.");
    assert_eq!(world.messages(), [("user", "Tell me a story."), ("assistant", "Once upon a …"), ("user", "Shorter.")]);
}

#[test]
fn a_new_prompt_cancels_the_request_before_it() {
    let mut world = World::new(|_| {});
    world.prompt("One");
    world.prompt("no, two");
    assert_eq!(world.others, ["ask", "drop", "ask"]);
    assert_eq!(world.messages(), [("user", "One\nno, two")]);
    world.text("Two it is.");
    world.prompt("or three");
    assert_eq!(world.others[3..], ["drop", "interrupt"]);
    assert_eq!(world.asked.len(), 2, "what was heard is waited for");
    world.wait(499);
    assert_eq!(world.asked.len(), 2);
    world.wait(1);
    assert_eq!(
        world.messages(),
        [("user", "One\nno, two\nor three")],
        "a call that tells nothing is not waited for long"
    );
}

#[test]
fn where_the_caller_may_not_interrupt_the_answer_goes_on() {
    let llm = Arc::new(Llm::at("http://127.0.0.1:1/v1", "m"));
    let mut world = World::new(|_| {});
    world.dialogue = Dialogue::new(llm, "support", Some("Please listen to the end."), false);
    world.act();
    world.prompt("But");
    assert_eq!(world.others, ["ask"]);
    assert_eq!(world.messages()[0], ("assistant", "Please listen to the end."));
}

#[test]
fn failures_before_the_first_word_are_tried_again_with_longer_pauses() {
    let mut world = World::new(|llm| llm.apology = "Sorry?".into());
    world.prompt("Hello");
    world.fail(&ERROR);
    world.wait(249);
    assert_eq!(world.asked.len(), 1);
    world.wait(1);
    assert_eq!(world.asked.len(), 2);
    world.fail(&Failure::Unreachable("refused".into()));
    world.wait(499);
    assert_eq!(world.asked.len(), 2);
    world.wait(1);
    assert_eq!(world.asked.len(), 3);
    assert!(world.said.is_empty());
    world.fail(&ERROR);
    assert_eq!(world.said[0].1, "Sorry?");
    world.wait(60_000);
    assert_eq!(world.asked.len(), 3);
    world.prompt("Hello?");
    assert_eq!(world.messages(), [("user", "Hello\nHello?")], "the call goes on");
    world.text("Yes.");
    world.finish();
    assert_eq!(world.said[1].1, "Yes.");
}

#[test]
fn a_server_is_given_the_pause_that_it_asks_for_unless_that_is_long() {
    let busy = |seconds| Failure::Status {
        code: 429,
        message: String::new(),
        retry_after: Some(Duration::from_secs(seconds)),
    };
    let mut world = World::new(|_| {});
    world.prompt("Hello");
    world.fail(&busy(2));
    world.wait(1_999);
    assert_eq!(world.asked.len(), 1);
    world.wait(1);
    assert_eq!(world.asked.len(), 2);
    world.fail(&busy(60));
    assert_eq!(world.said.len(), 1, "the caller is not kept waiting");
    world.prompt("Hello");
    world.fail(&Failure::Status { code: 401, message: "no key".into(), retry_after: None });
    assert_eq!(world.said.len(), 2, "asking again would not help");
}

#[test]
fn failures_in_a_row_end_it() {
    let mut world = World::new(|llm| llm.retries = 0);
    for _ in 0..2 {
        world.prompt("Hello");
        world.fail(&ERROR);
        assert!(!world.others.contains(&"lost"));
    }
    world.prompt("Hello");
    world.fail(&ERROR);
    assert_eq!(world.others.last(), Some(&"lost"));
    assert_eq!(world.said.len(), 2, "the agent's own apology follows");
}

#[test]
fn silence_before_the_first_word_and_after_it_has_a_limit() {
    let mut world = World::new(|llm| (llm.first_token_ms, llm.retries) = (1_000, 0));
    world.prompt("Hello");
    world.wait(999);
    assert!(world.said.is_empty());
    world.wait(1);
    assert_eq!(world.said.len(), 1, "an apology");
    world.prompt("Hello");
    for _ in 0..3 {
        world.wait(900);
        world.text("Well, ");
    }
    world.with(|dialogue, now| dialogue.data(now, b": keep-alive\n\n"));
    world.wait(1_000);
    assert_eq!(world.said.len(), 3);
    assert_eq!((world.said[1].1.as_str(), &world.said[2].1), ("Well, Well, Well, ", &world.dialogue.config.apology));
    // Text that the call cannot take yet is no silence of the model.
    world.prompt("Hello");
    world.wait(500);
    world.text("Well, ");
    for _ in 0..10 {
        world.wait(900);
        world.with(Dialogue::waits);
    }
    assert_eq!(world.said.len(), 4);
}

#[test]
fn an_endless_answer_ends() {
    let mut world = World::new(|llm| llm.max_answer_chars = 20);
    world.prompt("Hello");
    for _ in 0..100 {
        world.text("abcdefg ");
    }
    assert_eq!(world.said[0].1, "abcdefg abcdefg abcd");
    world.wait(500);
    assert_eq!(world.others, ["ask", "drop"], "and it is not read on");
    // One without words ends, too: by its time and by its bytes.
    let mut world = World::new(|llm| (llm.answer_s, llm.first_token_ms, llm.retries) = (2, 60_000, 0));
    world.prompt("Hello");
    world.text("\u{0}\u{1b}\u{7}");
    world.wait(2_000);
    assert_eq!(world.said.len(), 1);
    world.prompt("Hello");
    for _ in 0..5 {
        world.with(|dialogue, now| dialogue.data(now, &vec![b'\n'; 1 << 20]));
    }
    assert_eq!(world.said.len(), 2);
}

#[test]
fn garbage_and_a_cut_stream_are_failures_and_what_was_said_stays() {
    let mut world = World::new(|llm| llm.retries = 0);
    world.prompt("Hello");
    world.with(|dialogue, now| dialogue.data(now, b"<html><body>502</body></html>"));
    world.with(Dialogue::closed);
    assert_eq!(world.said.len(), 1);
    world.prompt("Hello");
    world.text("I think that");
    world.with(Dialogue::closed);
    assert_eq!(world.said.len(), 3);
    assert_eq!(world.said[1].1, "I think that");
    world.ended(1, TurnHow::Done, "");
    world.prompt("What?");
    assert_eq!(world.messages()[1], ("assistant", "I think that"));
    // Bytes that come after the end mean nothing.
    world.text("Yes.");
    world.finish();
    world.with(|dialogue, now| dialogue.data(now, b"data: garbage\n\n"));
    world.with(Dialogue::closed);
    assert_eq!(world.said.len(), 4);
}

#[test]
fn keys_become_one_message() {
    let mut world = World::new(|_| {});
    for digit in ['4', '2'] {
        world.with(|dialogue, now| dialogue.handle(now, &CallEvent::Digit(digit)));
        world.wait(1_000);
    }
    assert!(world.asked.is_empty());
    world.wait(500);
    assert_eq!(world.messages(), [("user", "The caller pressed 42")]);
    world.with(|dialogue, now| dialogue.handle(now, &CallEvent::Digit('7')));
    world.with(|dialogue, now| dialogue.handle(now, &CallEvent::Digit('#')));
    world.wait(0);
    assert_eq!(world.messages()[0].1, "The caller pressed 42\nThe caller pressed 7#", "`#` ends it at once");
}

fn with_tools(llm: &mut Llm) {
    llm.tools = vec![
        Tool::Builtin(Builtin::HangUp),
        Tool::Builtin(Builtin::Transfer),
        serde_json::from_value(json!({
            "name": "track", "description": "Where a parcel is.", "url": "https://api.example.com/{id}",
            "parameters": { "type": "object", "properties": { "id": { "type": "string" } }, "required": ["id"] },
        }))
        .expect("a tool"),
    ];
    llm.transfer_to.insert("desk".into(), "sip:desk@pbx.example.com".into());
}

#[test]
fn a_tool_runs_with_a_filler_and_its_result_is_asked_about() {
    let mut world = World::new(with_tools);
    world.prompt("Where is parcel 7?");
    assert_eq!(world.asked[0]["tools"].as_array().map(Vec::len), Some(3));
    world.call("track", "{\"id\":\"7\"}");
    assert!(matches!(&world.runs[0].1, Order::Http { tool, .. } if tool.name == "track"));
    world.wait(699);
    assert!(world.said.is_empty());
    world.wait(1);
    assert_eq!(world.said[0].1, "One moment, please.");
    // What the caller says meanwhile stands behind the result.
    world.prompt("Quick.");
    assert_eq!(world.asked.len(), 1);
    world.with(|dialogue, now| dialogue.tool_done(now, "c1", Ok("in Basel".into())));
    assert_eq!(
        world.messages(),
        [("user", "Where is parcel 7?"), ("assistant", "-"), ("tool", "in Basel"), ("user", "Quick."),]
    );
    assert_eq!(world.asked[1]["messages"][1]["tool_calls"][0]["id"], "c1");
    world.text("In Basel.");
    world.finish();
    assert_eq!(world.said[1].1, "In Basel.");
}

#[test]
fn a_wrong_call_is_told_to_the_model_and_an_endless_series_ends() {
    let mut world = World::new(with_tools);
    world.prompt("Hello");
    for round in 1..=MAX_ROUNDS as usize {
        world.call("fly", "{}");
        assert_eq!(world.asked.len(), round + 1);
        assert_eq!(world.messages().last(), Some(&("tool", "error: there is no tool `fly`")));
    }
    world.call("fly", "{}");
    assert_eq!(world.said.len(), 1, "an apology");
    assert_eq!(world.runs, []);
}

#[test]
fn a_transfer_is_answered_by_the_peer_and_a_hang_up_waits_for_nothing() {
    let mut world = World::new(with_tools);
    world.prompt("A human, please.");
    world.call("transfer", "{\"to\":\"desk\"}");
    assert_eq!(world.runs[0].1, Order::Transfer("sip:desk@pbx.example.com".into()));
    world.with(|dialogue, now| dialogue.tool_done(now, "c1", Ok("done".into())));
    assert_eq!(world.asked.len(), 1, "the peer has not answered");
    world.with(|dialogue, now| dialogue.handle(now, &CallEvent::Transferred(Err("declined".into()))));
    assert_eq!(world.messages().last(), Some(&("tool", "error: declined")));
    world.text("They are busy. Goodbye.");
    world.call("hang_up", "{}");
    assert_eq!(world.others.last(), Some(&"hang up"));
    world.prompt("Wait");
    assert_eq!(world.asked.len(), 2, "it is over");
    assert_eq!(world.dialogue.deadline(), None);
}

fn heard(phase: crate::hear::Phase, text: &str, eager: u64) -> CallEvent {
    let (start, end) = (Duration::from_secs(1), Duration::from_secs(2));
    let (text, language) = (text.into(), "en".into());
    CallEvent::Heard(crate::hear::TurnEvent { phase, text, language, start, end, confidence: 0.9, eager })
}

fn last(text: &str, eager: Option<u64>) -> CallEvent {
    CallEvent::Prompt { text: text.into(), lang: "en".into(), last: true, eager }
}

impl World {
    fn event(&mut self, event: &CallEvent) {
        self.with(|dialogue, now| dialogue.handle(now, event));
    }
}

#[test]
fn an_answer_is_asked_for_before_the_turn_has_ended_and_once() {
    use crate::hear::Phase::{EagerEndOfTurn, EndOfTurn};
    let mut world = World::new(|_| {});
    world.event(&heard(EagerEndOfTurn, "Are you open", 1));
    assert_eq!(world.messages(), [("user", "Are you open")]);
    world.text("Yes, ");
    assert_eq!(world.said.len(), 1, "it goes to the call, which holds it");
    world.event(&heard(EndOfTurn, "Are you open?", 1));
    world.event(&last("Are you open?", Some(1)));
    world.text("until nine.");
    world.finish();
    world.ended(0, TurnHow::Done, "Yes, until nine.");
    assert_eq!(world.asked.len(), 1, "one request for one turn");
    assert_eq!(world.said[0].1, "Yes, until nine.");
    world.prompt("Thanks.");
    assert_eq!(world.messages(), [("user", "Are you open"), ("assistant", "Yes, until nine."), ("user", "Thanks.")]);
}

#[test]
fn a_caller_who_goes_on_leaves_no_trace_of_the_guess() {
    use crate::hear::Phase::{EagerEndOfTurn, TurnResumed};
    let mut world = World::new(|_| {});
    world.event(&heard(EagerEndOfTurn, "I would like a table", 1));
    world.text("For how many?");
    world.event(&heard(TurnResumed, "I would like a table", 1));
    assert_eq!(world.others, ["ask", "drop"], "the call drops what it holds by itself");
    world.ended(0, TurnHow::Cancelled, "");
    world.event(&last("I would like a table for two", None));
    assert_eq!(world.messages(), [("user", "I would like a table for two")]);
    // The words changed at the end: the guess is as wrong.
    world.finish();
    world.ended(0, TurnHow::Done, "");
    let mut world = World::new(|_| {});
    world.event(&heard(EagerEndOfTurn, "a table for two", 4));
    world.event(&last("a table for ten", None));
    assert_eq!((world.asked.len(), world.messages()), (2, vec![("user", "a table for ten")]));
}

#[test]
fn nothing_is_guessed_while_something_sounds_or_where_it_is_off() {
    use crate::hear::Phase::EagerEndOfTurn;
    let mut world = World::new(|llm| llm.speculate = false);
    world.event(&heard(EagerEndOfTurn, "Are you open?", 1));
    assert!(world.asked.is_empty());
    let mut world = World::new(|llm| llm.greeting = Some("Hello.".into()));
    world.event(&heard(EagerEndOfTurn, "Are you open?", 1));
    assert!(world.asked.is_empty(), "the greeting sounds");
    world.ended(0, TurnHow::Done, "Hello.");
    world.event(&heard(EagerEndOfTurn, "Are you open?", 2));
    assert_eq!(world.asked.len(), 1);
}

#[test]
fn a_guess_runs_no_tools_and_its_failure_is_not_told() {
    use crate::hear::Phase::EagerEndOfTurn;
    let mut world = World::new(|llm| llm.tools = vec![Tool::Builtin(Builtin::SendDigits)]);
    world.event(&heard(EagerEndOfTurn, "Press one", 1));
    world.call("send_digits", r#"{"digits":"1"}"#);
    world.wait(5_000);
    assert!(world.runs.is_empty(), "the caller may go on");
    world.event(&last("Press one", Some(1)));
    assert_eq!(world.runs.len(), 1);
    let mut world = World::new(|_| {});
    world.event(&heard(EagerEndOfTurn, "Hello", 1));
    world.fail(&ERROR);
    assert!(world.said.is_empty());
    world.event(&last("Hello", Some(1)));
    assert_eq!(world.asked.len(), 2, "now it counts");
}

#[test]
fn what_is_written_meanwhile_takes_the_place_of_a_guess() {
    use crate::hear::Phase::EagerEndOfTurn;
    let mut world = World::new(|_| {});
    world.event(&heard(EagerEndOfTurn, "Are you", 1));
    world.text("Yes.");
    world.prompt("No, wait.");
    assert_eq!(world.others, ["ask", "drop", "interrupt", "ask"], "the call still holds the guess");
    assert_eq!(world.messages(), [("user", "No, wait.")]);
}

#[test]
fn a_guess_that_the_call_refuses_is_asked_for_again_when_the_turn_has_ended() {
    use crate::hear::Phase::EagerEndOfTurn;
    for how in [TurnHow::Refused { retry_after: Duration::ZERO }, TurnHow::Failed("no device".into())] {
        let mut world = World::new(|_| {});
        world.event(&heard(EagerEndOfTurn, "Are you open?", 1));
        world.text("Yes.");
        world.ended(0, how, "");
        world.event(&last("Are you open?", Some(1)));
        assert_eq!(world.asked.len(), 2, "nothing of the guess will be heard");
        assert_eq!(world.messages(), [("user", "Are you open?")]);
        assert_eq!(world.others, ["ask", "drop", "ask"]);
    }
}
