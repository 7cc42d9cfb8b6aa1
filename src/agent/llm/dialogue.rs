//! When the model is asked, what of its answer is said, and what happens when it fails: the decisions of one call,
//! without I/O.
//!
//! After every input [`Dialogue::poll`] until it gives nothing, and again at [`Dialogue::deadline`].
//!
//! # Why
//! *Words of the caller come first.* They cancel the request under way and cut what sounds of its answer; the next
//! request goes out when it is known how much was heard, a few milliseconds later.
//!
//! *A tool that runs is waited for*, for it may have done something already: its result stands in the history before
//! the words that came meanwhile.

mod answering;
mod failure;
mod speculation;
mod tooling;

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

pub use self::failure::Failure;
use self::speculation::Speculating;
use super::answer::Calls;
use super::clean::Cleaner;
use super::config::Llm;
use super::history::History;
use super::sse;
use super::tools::{self, Order};
use crate::call::{CallEvent, Heard, TurnHow, TurnId};

/// How long a turn that was cut off may take to tell what was heard. It takes milliseconds.
const SETTLE: Duration = Duration::from_millis(500);
/// How long usage may follow the end of an answer.
const TAIL: Duration = Duration::from_millis(500);
/// The first pause before a request is sent again; it doubles.
const BACK_OFF: Duration = Duration::from_millis(250);
/// A server that wants a longer pause is not waited for: a caller listens to silence.
const LONGEST_PAUSE: Duration = Duration::from_secs(3);

/// What the driver has to do.
#[derive(Clone, Debug, PartialEq)]
pub enum Action {
    /// Send a request, in place of the one under way.
    Ask(Value),
    /// Drop the request under way; with `unsaid`, also text that the call has not taken yet.
    Drop {
        /// What was generated is not to be said any more.
        unsaid: bool,
    },
    /// Say the next piece of a turn.
    Say {
        /// Which.
        turn: TurnId,
        /// The text.
        token: String,
        /// It is complete.
        last: bool,
        /// The eager end of the caller's turn that it answers.
        speculation: Option<u64>,
    },
    /// Say a whole turn.
    Speak {
        /// Which.
        turn: TurnId,
        /// The text.
        text: String,
    },
    /// Cut off what sounds.
    Interrupt,
    /// Run a tool; its result goes to [`Dialogue::tool_done`].
    Run {
        /// The call's id.
        id: String,
        /// What.
        order: Order,
    },
    /// End the call when everything was said.
    HangUp,
    /// The model is lost: too many answers in a row failed.
    Lost,
}

/// A request under way.
#[derive(Debug)]
struct Asking {
    turn: TurnId,
    sent: Instant,
    /// When the latest chunk came.
    heard_from: Instant,
    parser: sse::Parser,
    cleaner: Cleaner,
    calls: Calls,
    /// Bytes that came.
    bytes: usize,
    /// Chunks among them.
    chunks: usize,
    /// Characters that were said.
    said: usize,
    /// The first word or call has come.
    begun: bool,
    /// The model has ended; only its usage may follow.
    finished: Option<Instant>,
}

/// A tool that runs.
#[derive(Debug)]
struct Running {
    id: String,
    name: String,
    /// Spoken while it takes long.
    filler: Option<String>,
    /// The result comes as an event of the call, until then at the latest.
    transfer: Option<Instant>,
    result: Option<Result<String, String>>,
}

#[derive(Debug)]
enum Phase {
    /// Nothing to do until the caller says something.
    Listening,
    /// The caller has said something; what was heard of the answer before is not known yet.
    Settling { until: Instant },
    /// Waiting to send the request again.
    BackOff { until: Instant },
    /// A request is under way.
    Asking(Box<Asking>),
    /// Tools run.
    Tools { running: Vec<Running>, filler_at: Option<Instant> },
    /// The call ends.
    Over,
}

/// The conversation of one call with its model.
#[derive(Debug)]
pub struct Dialogue {
    config: Arc<Llm>,
    /// For metrics: the agent's name.
    name: String,
    /// Whether the caller's words may cut off what sounds.
    interruptible: bool,
    history: History,
    phase: Phase,
    attempt: u32,
    rounds: u32,
    failures: u32,
    /// What the caller said while tools ran.
    meanwhile: String,
    /// Keys that were pressed, and when they are complete.
    digits: Option<(String, Instant)>,
    /// The request under way answers words that may not be all.
    speculation: Option<Speculating>,
    actions: VecDeque<Action>,
}

impl Dialogue {
    /// A new conversation of the agent `name`; with `greeting` it begins at once.
    pub fn new(config: Arc<Llm>, name: &str, greeting: Option<&str>, interruptible: bool) -> Self {
        let mut this = Self {
            history: History::new(config.system.clone(), config.max_history_chars),
            config,
            name: name.to_owned(),
            interruptible,
            phase: Phase::Listening,
            attempt: 0,
            rounds: 0,
            failures: 0,
            meanwhile: String::new(),
            digits: None,
            speculation: None,
            actions: VecDeque::new(),
        };
        if let Some(greeting) = greeting.map(str::trim).filter(|text| !text.is_empty()) {
            let turn = TurnId::next();
            this.history.say(&turn, greeting);
            this.act(Action::Speak { turn, text: greeting.to_owned() });
        }
        this
    }

    /// The next thing to do.
    pub fn poll(&mut self) -> Option<Action> {
        self.actions.pop_front()
    }

    /// When to call [`Dialogue::tick`] at the latest.
    pub fn deadline(&self) -> Option<Instant> {
        let phase = match &self.phase {
            Phase::Listening | Phase::Over => None,
            Phase::Settling { until } | Phase::BackOff { until } => Some(*until),
            // What is answered on speculation is concluded when the caller's turn has ended.
            Phase::Asking(asking) if asking.finished.is_some() && self.is_speculating() => None,
            Phase::Asking(asking) => Some(match asking.finished {
                Some(at) => at + TAIL,
                None => (asking.heard_from + self.config.patience()).min(self.written_by(asking)),
            }),
            Phase::Tools { running, filler_at } => running
                .iter()
                .filter(|tool| tool.result.is_none())
                .filter_map(|tool| tool.transfer)
                .chain(*filler_at)
                .min(),
        };
        phase.into_iter().chain(self.digits.as_ref().map(|(_, at)| *at)).min()
    }

    /// Time has passed.
    pub fn tick(&mut self, now: Instant) {
        if let Some((keys, _)) = self.digits.take_if(|(_, at)| *at <= now) {
            self.prompt(now, &format!("The caller pressed {keys}"));
        }
        match &mut self.phase {
            Phase::Settling { until } if *until <= now => {
                self.history.give_up();
                self.ask(now);
            }
            Phase::BackOff { until } if *until <= now => self.ask(now),
            Phase::Tools { running, filler_at } => {
                for tool in running.iter_mut().filter(|tool| tool.transfer.is_some_and(|by| by <= now)) {
                    tool.result.get_or_insert(Err("the other side does not answer".into()));
                }
                let is_late = filler_at.take_if(|at| *at <= now).is_some();
                let filler = running.iter().find(|tool| tool.result.is_none()).and_then(|tool| tool.filler.clone());
                // What the model said before it called the tool is filler enough while it sounds.
                if let Some(text) = filler.filter(|text| is_late && !text.is_empty() && !self.history.is_sounding()) {
                    self.act(Action::Speak { turn: TurnId::next(), text });
                }
                self.tools_done(now);
            }
            Phase::Asking(asking) => match asking.finished {
                Some(at) if at + TAIL <= now => self.conclude(now),
                Some(_) => {}
                None => {
                    let (begun, said) = (asking.begun, asking.said);
                    let late = asking.heard_from + self.config.patience() <= now;
                    let endless = asking.sent + Duration::from_secs(self.config.answer_s) <= now;
                    match (late, endless, begun) {
                        (true, _, false) => self.fail(now, &Failure::FirstToken),
                        (true, _, true) => self.fail(now, &Failure::Stalled),
                        // What was said of an endless answer is an answer.
                        (false, true, _) if said > 0 => self.finish(now),
                        (false, true, _) => self.fail(now, &Failure::FirstToken),
                        (false, false, _) => {}
                    }
                }
            },
            _ => {}
        }
    }

    fn written_by(&self, asking: &Asking) -> Instant {
        asking.sent + Duration::from_secs(self.config.answer_s)
    }

    /// The caller said or wrote something.
    pub fn prompt(&mut self, now: Instant, text: &str) {
        if matches!(self.phase, Phase::Over) {
            return;
        }
        self.abandon(true, "abandoned");
        if let Phase::Tools { .. } = &self.phase {
            // The results come first; see the head.
            self.meanwhile.push_str(text);
            return self.meanwhile.push('\n');
        }
        self.history.user(text);
        self.rounds = 0;
        match &self.phase {
            Phase::Tools { .. } | Phase::Settling { .. } | Phase::Over => {}
            Phase::Asking(_) => {
                self.cancel("interrupted");
                self.settle(now);
            }
            Phase::Listening | Phase::BackOff { .. } => self.settle(now),
        }
    }

    /// Something happened on the call.
    pub fn handle(&mut self, now: Instant, event: &CallEvent) {
        match event {
            CallEvent::Heard(turn) => self.heard(now, turn),
            CallEvent::Prompt { text, last: true, eager, .. } => self.ended_turn(now, text, *eager),
            CallEvent::Digit(digit) => {
                let mut keys = self.digits.take().map_or_else(String::new, |(keys, _)| keys);
                // More than any number has: what comes then is a cat on the telephone.
                if keys.len() < 64 {
                    keys.push(*digit);
                }
                let pause = if *digit == '#' { 0 } else { self.config.dtmf_pause_ms };
                self.digits = Some((keys, now + Duration::from_millis(pause)));
            }
            CallEvent::Interrupted { turn, heard, .. } if self.history.has(turn) => {
                self.history.ended(turn, Some(&heard.text));
                if let Phase::Asking(_) = &self.phase {
                    self.cancel("interrupted");
                }
            }
            CallEvent::TurnEnded { turn, how, heard } => self.turn_ended(now, turn, how, heard),
            CallEvent::TransferAccepted => self.transferred(now, Ok("the transfer is under way".to_owned())),
            CallEvent::Transferred(Err(reason)) => self.transferred(now, Err(reason.clone())),
            CallEvent::HandedOver(with) => {
                self.prompt(now, &format!("(The caller handed the call over to {with}, who is here now.)"));
            }
            CallEvent::TransferFailed(reason) => {
                self.prompt(now, &format!("(The transfer failed: {reason}. The caller is still here.)"));
            }
            _ => {}
        }
    }

    fn turn_ended(&mut self, now: Instant, turn: &TurnId, how: &TurnHow, heard: &Heard) {
        let part = if *how == TurnHow::Done { None } else { Some(heard.text.as_str()) };
        if !self.history.ended(turn, part) {
            return;
        }
        match &self.phase {
            Phase::Settling { .. } if !self.history.is_sounding() => self.ask(now),
            // It cannot be spoken, so that its rest need not be written.
            Phase::Asking(asking) if asking.turn == *turn && *how != TurnHow::Done && asking.finished.is_none() => {
                self.cancel("interrupted");
                self.phase = Phase::Listening;
            }
            _ => {}
        }
    }

    /// Asks, after what sounds was cut off and has told what was heard.
    fn settle(&mut self, now: Instant) {
        self.attempt = 0;
        if self.interruptible && self.history.is_sounding() {
            self.act(Action::Interrupt);
            self.phase = Phase::Settling { until: now + SETTLE };
        } else {
            self.ask(now);
        }
    }

    fn ask(&mut self, now: Instant) {
        let config = &self.config;
        let mut body = config.extra.clone();
        body.insert("model".into(), json!(config.model));
        body.insert("stream".into(), json!(true));
        body.insert("messages".into(), json!(self.history.messages()));
        if let Some(temperature) = config.temperature {
            // Through its decimal form: 0.3 as f64 would be 0.30000001192.
            let value = temperature.to_string().parse::<f64>().unwrap_or(f64::from(temperature));
            body.insert("temperature".into(), json!(value));
        }
        if let Some(most) = config.max_tokens {
            body.insert("max_tokens".into(), json!(most));
        }
        if config.usage {
            body.insert("stream_options".into(), json!({ "include_usage": true }));
        }
        let tools = tools::describe(config);
        if !tools.is_empty() {
            body.insert("tools".into(), json!(tools));
        }
        self.phase = Phase::Asking(Box::new(Asking {
            turn: TurnId::next(),
            sent: now,
            heard_from: now,
            parser: sse::Parser::default(),
            cleaner: Cleaner::default(),
            calls: Calls::default(),
            bytes: 0,
            chunks: 0,
            said: 0,
            begun: false,
            finished: None,
        }));
        self.act(Action::Ask(Value::Object(body)));
    }

    /// The request gave no answer: once more, or an apology.
    fn fail(&mut self, now: Instant, failure: &Failure) {
        let Phase::Asking(asking) = &self.phase else { return };
        let (said, turn) = (asking.said, asking.turn.clone());
        if self.is_speculating() {
            // The caller does not wait for it yet: it is asked again when the caller's turn has ended.
            return self.abandon(true, failure.label());
        }
        tracing::warn!(agent = self.name, attempt = self.attempt, %failure, "the model gave no answer");
        self.count(failure.label());
        self.act(Action::Drop { unsaid: false });
        self.phase = Phase::Listening;
        let pause = failure.retry_after().unwrap_or(BACK_OFF * 2u32.saturating_pow(self.attempt.min(8)));
        if said == 0 && self.attempt < self.config.retries && failure.may_pass() && pause <= LONGEST_PAUSE {
            self.attempt += 1;
            self.phase = Phase::BackOff { until: now + pause };
            return;
        }
        if said > 0 {
            self.act(Action::Say { turn, token: String::new(), last: true, speculation: None });
        }
        self.apologise(failure);
    }

    fn apologise(&mut self, failure: &Failure) {
        (self.attempt, self.rounds) = (0, 0);
        self.failures += 1;
        if self.failures >= self.config.max_failures {
            tracing::warn!(agent = self.name, %failure, failures = self.failures, "the model is given up on this call");
            self.phase = Phase::Over;
            return self.act(Action::Lost);
        }
        self.phase = Phase::Listening;
        let text = self.config.apology.trim().to_owned();
        if !text.is_empty() {
            self.act(Action::Speak { turn: TurnId::next(), text });
        }
    }

    /// Ends the request under way, whose answer is not wanted any more.
    fn cancel(&mut self, outcome: &'static str) {
        if self.is_speculating() {
            // The call has told that it holds nothing of it. The end of the caller's turn asks again.
            return self.abandon(false, "abandoned");
        }
        let Phase::Asking(asking) = &self.phase else { return };
        if asking.finished.is_none() {
            self.count(outcome);
        }
        let turn = asking.turn.clone();
        let open = asking.said > 0 && asking.finished.is_none();
        self.act(Action::Drop { unsaid: true });
        if open {
            self.act(Action::Say { turn, token: String::new(), last: true, speculation: None });
        }
        self.phase = Phase::Listening;
    }

    fn act(&mut self, action: Action) {
        self.actions.push_back(action);
    }

    fn count(&self, outcome: &'static str) {
        metrics::counter!("antiphon_llm_requests_total", "agent" => self.name.clone(), "outcome" => outcome)
            .increment(1);
    }

    fn count_usage(&self, input: u64, output: u64) {
        for (kind, tokens) in [("input", input), ("output", output)] {
            let agent = self.name.clone();
            metrics::counter!("antiphon_llm_tokens_total", "agent" => agent, "kind" => kind).increment(tokens);
        }
        // So much a million tokens is so many millionths a token.
        let prices = self.config.prices;
        let cost = input as f64 * prices.input + output as f64 * prices.output;
        metrics::counter!("antiphon_llm_cost_micros_total", "agent" => self.name.clone())
            .increment(cost.round() as u64);
    }
}

#[cfg(test)]
mod tests;
