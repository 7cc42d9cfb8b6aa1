//! An agent without code: a language model behind any OpenAI-compatible chat-completions stream (vLLM, Ollama,
//! llama.cpp, OpenAI), configured by `[agent.NAME] llm = { base_url, model, ... }`.
//!
//! What the caller says, writes or presses becomes a user message; the model's text flows into the call as it comes;
//! a new prompt or an interruption cancels the request. The parts, none but the last with I/O:
//!
//! - [`sse`]: bytes to server-sent events; [`answer`]: events to text, tool calls and usage
//! - [`clean`]: takes out what is not for ears: control characters, prompt tokens, thoughts
//! - [`history`]: what was heard, bounded
//! - [`tools`]: what the model may call, and the check of its arguments; [`web`]: the HTTP ones, screened
//! - [`dialogue`]: decides when to ask, what to say, what to retry, when to apologise
//! - [`driver`]: sockets, timers and the call
//!
//! # Why
//! *The history is what the caller heard.* A model that is told its whole answer was said refers to sentences that an
//! interruption cut off. The call knows what left for the listener, so every turn is entered by its end.
//!
//! *Trouble costs one answer.* A request that fails before anything was said is tried again; after that the caller
//! hears an apology and the call goes on. Only several failures in a row end it, as a lost agent does.

pub mod answer;
pub mod clean;
pub mod config;
pub mod dialogue;
pub mod driver;
pub mod history;
pub mod sse;
pub mod tools;
pub mod web;
