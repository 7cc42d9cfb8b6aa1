//! Agents without code: a language model behind an imitation of its server, which also fails in every way.

use std::sync::{Arc, Mutex};

use antiphon::agent::config::Agent;
use antiphon::agent::llm::config::{Builtin, Llm, Tool};
use antiphon::call::{CallEvent, CallHandle, EndReason, TurnHow};
use antiphon_loadgen::call::{Call, End, now};
use antiphon_loadgen::codec::Codec;
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{broadcast, mpsc};

use super::counted::Growth;
use super::support::{PATIENCE, Rig, SENTENCE};

/// How the server answers the next request.
#[derive(Clone, Debug)]
enum Script {
    /// These pieces of text, with an end and usage.
    Text(Vec<String>),
    /// One call of a tool.
    Call(&'static str, Value),
    /// A status and nothing else.
    Status(u16),
    /// These bytes, and the connection closes.
    Raw(String),
    /// These bytes, and nothing more ever.
    Hang(String),
    /// Text without end.
    Endless,
}

fn text(text: &str) -> Script {
    Script::Text(text.split_inclusive(' ').map(str::to_owned).collect())
}

fn chunk(delta: &Value) -> String {
    format!("data: {}\n\n", json!({ "choices": [{ "index": 0, "delta": delta }] }))
}

/// A server of the API: it answers by a script and keeps what it was asked.
struct Model {
    llm: Llm,
    requests: mpsc::Receiver<Value>,
    script: Arc<Mutex<Vec<Script>>>,
}

impl Model {
    async fn start() -> Model {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let llm = Llm::at(&format!("http://{}/v1", listener.local_addr().expect("bound")), "imitation");
        let (told, requests) = mpsc::channel(64);
        let script = Arc::new(Mutex::new(Vec::new()));
        let served = script.clone();
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                tokio::spawn(serve(stream, told.clone(), served.clone()));
            }
        });
        Model { llm, requests, script }
    }

    /// What the next requests get, in order; the last one stays.
    fn play(&self, scripts: impl IntoIterator<Item = Script>) {
        *self.script.lock().expect("whole") = scripts.into_iter().collect();
    }

    async fn asked(&mut self) -> Value {
        tokio::time::timeout(PATIENCE, self.requests.recv()).await.expect("it is asked").expect("it serves")
    }

    /// Role and content of the messages of the next request.
    async fn messages(&mut self) -> Vec<(String, String)> {
        let body = self.asked().await;
        let text = |value: &Value| value.as_str().unwrap_or("-").to_owned();
        let messages = body["messages"].as_array().expect("a list").clone();
        messages.iter().map(|message| (text(&message["role"]), text(&message["content"]))).collect()
    }
}

/// One request: the body goes to the test, the answer is the next script. Also serves the tools of the tests.
async fn serve(mut stream: TcpStream, told: mpsc::Sender<Value>, script: Arc<Mutex<Vec<Script>>>) {
    let mut bytes = Vec::new();
    let (head, body) = loop {
        let mut piece = [0; 4_096];
        let Ok(read @ 1..) = stream.read(&mut piece).await else { return };
        bytes.extend_from_slice(&piece[..read]);
        let text = String::from_utf8_lossy(&bytes).into_owned();
        let Some((head, body)) = text.split_once("\r\n\r\n") else { continue };
        let length = head.lines().find_map(|line| {
            let (name, value) = line.split_once(':')?;
            name.eq_ignore_ascii_case("content-length").then(|| value.trim().parse::<usize>().ok())?
        });
        if body.len() >= length.unwrap_or(0) {
            break (head.to_owned(), body.to_owned());
        }
    };
    if !head.starts_with("POST /v1/chat/completions ") {
        let path = head.split(' ').nth(1).unwrap_or_default();
        let body = format!("{{\"path\":\"{path}\"}}");
        let answer = format!("HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: {}\r\n\r\n{body}", body.len());
        let _ = stream.write_all(answer.as_bytes()).await;
        return;
    }
    let next = {
        let mut script = script.lock().expect("whole");
        if script.len() > 1 { script.remove(0) } else { script.first().cloned().expect("a script") }
    };
    let _ = told.send(serde_json::from_str(&body).expect("JSON")).await;
    let head = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n";
    let end = |reason: &str| {
        let finish = json!({ "choices": [{ "index": 0, "delta": {}, "finish_reason": reason }] });
        let usage = json!({ "choices": [], "usage": { "prompt_tokens": 20, "completion_tokens": 5 } });
        format!("data: {finish}\n\ndata: {usage}\n\ndata: [DONE]\n\n")
    };
    let answer = match next {
        Script::Text(pieces) => {
            let pieces: String = pieces.iter().map(|piece| chunk(&json!({ "content": piece }))).collect();
            format!("{head}{pieces}{}", end("stop"))
        }
        Script::Call(name, arguments) => {
            let function = json!({ "name": name, "arguments": arguments.to_string() });
            let call = json!({ "tool_calls": [{ "index": 0, "id": "call_1", "function": function }] });
            format!("{head}{}{}", chunk(&call), end("tool_calls"))
        }
        Script::Status(status) => {
            format!("HTTP/1.1 {status} No\r\nconnection: close\r\ncontent-length: 2\r\n\r\nno")
        }
        Script::Raw(text) => format!("{head}{text}"),
        Script::Hang(text) => {
            let _ = stream.write_all(format!("{head}{text}").as_bytes()).await;
            // Until the gateway gives it up.
            let _ = stream.read(&mut [0; 1]).await;
            return;
        }
        Script::Endless => {
            let _ = stream.write_all(head.as_bytes()).await;
            let piece = chunk(&json!({ "content": "and so on and on, " }));
            while stream.write_all(piece.as_bytes()).await.is_ok() {}
            return;
        }
    };
    let _ = stream.write_all(answer.as_bytes()).await;
    let _ = stream.shutdown().await;
}

async fn rig_with(model: &Model, change: impl FnOnce(&mut Llm)) -> Rig {
    let mut llm = model.llm.clone();
    change(&mut llm);
    llm.validate().expect("valid");
    Rig::with(|config| {
        config.agent.insert("bot".into(), Agent { apology: "Goodbye.".into(), ..Agent::of(llm) });
        // A busy machine is late, and refuses nothing here.
        config.scheduler.first_audio_target_ms = 60_000;
    })
    .await
}

async fn prompt(rig: &Rig, call: &Call, text: &str) {
    let path = format!("/v1/calls/{}/prompt", call.id().expect("named"));
    assert_eq!(rig.post(&path, json!({ "text": text })).await.0, 202);
}

/// The end of the next turn.
async fn turn_ended(events: &mut broadcast::Receiver<CallEvent>) -> (TurnHow, String) {
    loop {
        let event = tokio::time::timeout(PATIENCE, events.recv()).await.expect("a turn ends").expect("the call lives");
        if let CallEvent::TurnEnded { how, heard, .. } = event {
            return (how, heard.text);
        }
    }
}

async fn call_with_events(rig: &Rig) -> (Call, CallHandle, broadcast::Receiver<CallEvent>) {
    let call = rig.telephone("bot", Codec::Pcmu).await;
    let handle = rig.handle(&call).await;
    let events = handle.events();
    (call, handle, events)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_caller_talks_with_a_model_and_what_was_heard_is_its_history() {
    let mut model = Model::start().await;
    model.play([text(&SENTENCE.repeat(6)), text("Yes. <|im_end|>And you?")]);
    let rig = rig_with(&model, |llm| {
        llm.system = "Be brief.".into();
        llm.greeting = Some("Hello.".into());
        llm.api_key = Some(antiphon::secret::Secret::new("sk-test"));
        llm.prices = antiphon::agent::llm::config::Prices { input: 1.0, output: 2.0 };
    })
    .await;
    let (call, _handle, mut events) = call_with_events(&rig).await;
    assert_eq!(turn_ended(&mut events).await, (TurnHow::Done, "Hello.".into()));
    let asked = now();
    prompt(&rig, &call, "Tell me of the fox.").await;
    let body = model.asked().await;
    assert_eq!((&body["model"], &body["stream"]), (&json!("imitation"), &json!(true)));
    call.onset(asked, PATIENCE).await.expect("the answer is heard");
    // The caller writes on while it sounds.
    prompt(&rig, &call, "Is that all?").await;
    let (how, heard) = turn_ended(&mut events).await;
    assert!(matches!(how, TurnHow::Interrupted(_)), "{how:?}");
    assert!(SENTENCE.repeat(6).starts_with(&heard), "{heard}");
    let messages = model.messages().await;
    let heard = if heard.is_empty() { Vec::new() } else { vec![("assistant".to_owned(), format!("{heard} …"))] };
    let pair = |role: &str, text: &str| (role.to_owned(), text.to_owned());
    let mut expected =
        vec![pair("system", "Be brief."), pair("assistant", "Hello."), pair("user", "Tell me of the fox.")];
    if heard.is_empty() {
        expected[2].1.push_str("\nIs that all?");
    } else {
        expected.extend(heard);
        expected.push(pair("user", "Is that all?"));
    }
    assert_eq!(messages, expected);
    assert_eq!(turn_ended(&mut events).await, (TurnHow::Done, "Yes.".into()), "no token of the template is spoken");
    // Keys are a message, too.
    call.press("1").await.expect("keys go out");
    call.press("#").await.expect("keys go out");
    let messages = model.messages().await;
    assert!(messages.last().expect("some").1.starts_with("The caller pressed 1"), "{messages:?}");
    call.hang_up().await;
    let metrics =
        rig.client.get(format!("{}/metrics", rig.http)).send().await.expect("HTTP").text().await.expect("text");
    for line in [
        "antiphon_llm_requests_total{agent=\"bot\",outcome=\"ok\"}",
        "antiphon_llm_tokens_total{agent=\"bot\",kind=\"output\"}",
        "antiphon_llm_cost_micros_total{agent=\"bot\"}",
        "antiphon_llm_first_token_seconds_count{agent=\"bot\"}",
    ] {
        assert!(metrics.contains(line), "{line}");
    }
    rig.app.drain().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_model_that_fails_costs_its_call_an_apology_and_others_nothing() {
    let mut model = Model::start().await;
    let begun = || chunk(&json!({ "content": "I believe that, " }));
    let faults = [
        Script::Status(500),
        Script::Status(429),
        Script::Raw(String::new()),
        Script::Raw("<html>garbage\u{0}\n\n</html>\n\n".into()),
        Script::Raw("data: {\"error\":{\"message\":\"out of memory\"}}\n\n".into()),
        Script::Raw(begun()),
        Script::Hang(String::new()),
        Script::Hang(begun()),
        Script::Raw(format!("{}{}", chunk(&json!({ "content": "\u{7}\u{1b}\u{0}" })), "data: [DONE]\n\n")),
    ];
    let rig = rig_with(&model, |llm| {
        (llm.retries, llm.first_token_ms, llm.max_failures) = (1, 1_500, 100);
        llm.apology = "Sorry?".into();
    })
    .await;
    let other = rig.telephone("silent", Codec::Pcma).await;
    let mut others = rig.handle(&other).await.events();
    let (call, handle, mut events) = call_with_events(&rig).await;
    rig.speak(&other, &SENTENCE.repeat(6)).await;
    for fault in faults {
        let has_text = matches!(&fault, Script::Raw(text) | Script::Hang(text) if text.contains("believe"));
        model.play([fault.clone()]);
        prompt(&rig, &call, "Hello?").await;
        if has_text {
            let (how, heard) = turn_ended(&mut events).await;
            assert_eq!((how, heard.trim_end_matches([',', ' '])), (TurnHow::Done, "I believe that"), "{fault:?}");
        }
        assert_eq!(turn_ended(&mut events).await, (TurnHow::Done, "Sorry?".into()), "{fault:?}");
        // Asked again only where nothing was said.
        model.asked().await;
        if !has_text {
            model.asked().await;
        }
        assert!(model.requests.try_recv().is_err(), "{fault:?}: asked too often");
    }
    // Its text is bounded, whatever it does.
    model.play([Script::Endless]);
    prompt(&rig, &call, "Hello?").await;
    model.asked().await;
    let endless = now();
    call.onset(endless, PATIENCE).await.expect("it is spoken");
    assert!(handle.info().backlog_bytes <= 4_200, "{}", handle.info().backlog_bytes);
    model.play([text("Here I am.")]);
    prompt(&rig, &call, "Stop!").await;
    assert!(matches!(turn_ended(&mut events).await.0, TurnHow::Interrupted(_)));
    assert_eq!(turn_ended(&mut events).await, (TurnHow::Done, "Here I am.".into()), "the call goes on");
    // The other call was spoken to its end meanwhile.
    assert_eq!(turn_ended(&mut others).await.0, TurnHow::Done);
    call.hang_up().await;
    rig.app.drain().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_model_that_is_not_there_ends_the_call_after_some_answers() {
    let mut model = Model::start().await;
    // Port 9 is discard; nobody listens there.
    model.llm.base_url = "http://127.0.0.1:9/v1".into();
    let rig = rig_with(&model, |llm| (llm.retries, llm.max_failures) = (0, 2)).await;
    let (call, handle, mut events) = call_with_events(&rig).await;
    prompt(&rig, &call, "Hello?").await;
    assert_eq!(turn_ended(&mut events).await.0, TurnHow::Done, "an apology");
    prompt(&rig, &call, "Hello?").await;
    assert_eq!(turn_ended(&mut events).await, (TurnHow::Done, "Goodbye.".into()));
    assert_eq!(call.ended(PATIENCE).await, Some(End::Remote));
    assert_eq!(handle.ended().await, EndReason::AgentLost);
    rig.app.drain().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_model_looks_something_up_presses_keys_and_hangs_up() {
    let mut model = Model::start().await;
    let lookup = json!({
        "name": "track", "description": "Where a parcel is.", "allow_private": true,
        "url": format!("{}/parcels/{{id}}", model.llm.base_url.replace("/v1", "")),
        "parameters": { "type": "object", "properties": { "id": { "type": "string" } }, "required": ["id"] },
    });
    let mut screened = lookup.clone();
    screened["name"] = json!("inside");
    screened["allow_private"] = json!(false);
    screened["url"] = json!(lookup["url"].as_str().expect("a URL").replace("127.0.0.1", "localhost"));
    model.play([
        Script::Call("track", json!({ "id": "7/../8" })),
        Script::Call("inside", json!({ "id": "7" })),
        Script::Call("send_digits", json!({ "digits": "5" })),
        Script::Call("hang_up", json!({})),
    ]);
    let rig = rig_with(&model, |llm| {
        let of = |tool: Value| serde_json::from_value::<Tool>(tool).expect("a tool");
        llm.tools = vec![Tool::Builtin(Builtin::SendDigits), Tool::Builtin(Builtin::HangUp), of(lookup), of(screened)];
    })
    .await;
    let counts = Growth::of(&[
        "antiphon_llm_tools_total{agent=\"bot\",tool=\"track\"",
        "antiphon_llm_tools_total{agent=\"bot\",tool=\"inside\"",
        "antiphon_llm_tools_total{agent=\"bot\",tool=\"send_digits\"",
    ]);
    let (call, handle, _events) = call_with_events(&rig).await;
    prompt(&rig, &call, "Where is my parcel?").await;
    assert_eq!(model.asked().await["tools"].as_array().map(Vec::len), Some(4));
    let result = |messages: Vec<(String, String)>| messages.last().expect("a result").clone();
    let (role, text) = result(model.messages().await);
    assert_eq!((role.as_str(), text.as_str()), ("tool", "{\"path\":\"/parcels/7%2F..%2F8\"}"));
    let (_, text) = result(model.messages().await);
    assert!(text.starts_with("error: ") && text.contains("no public address"), "{text}");
    assert_eq!(result(model.messages().await).1, "done");
    assert_eq!(call.ended(PATIENCE).await, Some(End::Remote));
    assert_eq!(handle.ended().await, EndReason::HungUp);
    counts.assert();
    rig.app.drain().await;
}
