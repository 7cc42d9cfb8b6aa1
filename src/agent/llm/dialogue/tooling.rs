//! The tools that an answer calls: they run, are waited for, and their results are asked about.

use std::time::{Duration, Instant};

use super::{Action, Dialogue, Failure, Phase, Running};
use crate::agent::llm::answer::ToolCall;
use crate::agent::llm::config::Tool;
use crate::agent::llm::tools::{self, Order};
use crate::call::TurnId;

/// Longest wait for the peer's answer to a transfer.
const TRANSFER: Duration = Duration::from_secs(40);
/// Requests in a row that call tools before the caller hears of it.
pub(super) const MAX_ROUNDS: u32 = 6;

impl Dialogue {
    pub(super) fn run_tools(&mut self, now: Instant, turn: &TurnId, calls: Vec<ToolCall>) {
        self.rounds += 1;
        if self.rounds > MAX_ROUNDS {
            return self.apologise(&Failure::TooManyRounds);
        }
        self.history.call(turn, calls.clone());
        let mut running = Vec::new();
        let mut hangs_up = false;
        for call in calls {
            let order = tools::order(&self.config, &call);
            let mut tool = Running { id: call.id, name: call.name, filler: None, transfer: None, result: None };
            match order {
                Err(why) => tool.result = Some(Err(why)),
                Ok(Order::HangUp) => {
                    hangs_up = true;
                    tool.result = Some(Ok("the call ends".into()));
                }
                Ok(order) => {
                    if let Order::Http { tool: http, .. } = &order {
                        tool.filler = http.filler.clone().or_else(|| Some(self.config.filler.clone()));
                    }
                    tool.transfer = matches!(order, Order::Transfer(_)).then(|| now + TRANSFER);
                    self.act(Action::Run { id: tool.id.clone(), order });
                }
            }
            running.push(tool);
        }
        let slow = running.iter().any(|tool| tool.filler.is_some());
        let filler_at = slow.then(|| now + Duration::from_millis(self.config.filler_after_ms));
        self.phase = Phase::Tools { running, filler_at };
        if hangs_up {
            self.count_tools();
            self.phase = Phase::Over;
            return self.act(Action::HangUp);
        }
        self.tools_done(now);
    }

    /// A tool has ended; `result` is for the model either way.
    pub fn tool_done(&mut self, now: Instant, id: &str, result: Result<String, String>) {
        let Phase::Tools { running, .. } = &mut self.phase else { return };
        if let Some(tool) = running.iter_mut().find(|tool| tool.id == id && tool.result.is_none()) {
            // A transfer that was asked for is answered by the peer.
            if tool.transfer.is_none() || result.is_err() {
                tool.result = Some(result);
            }
            self.tools_done(now);
        }
    }

    /// Goes on once every tool has ended.
    pub(super) fn tools_done(&mut self, now: Instant) {
        let Phase::Tools { running, .. } = &self.phase else { return };
        if running.iter().any(|tool| tool.result.is_none()) {
            return;
        }
        self.count_tools();
        let Phase::Tools { running, .. } = std::mem::replace(&mut self.phase, Phase::Listening) else { return };
        for tool in running {
            let text = match tool.result.unwrap_or(Err("nothing".into())) {
                Ok(text) => text,
                Err(why) => format!("error: {why}"),
            };
            self.history.result(&tool.id, &text);
        }
        let meanwhile = std::mem::take(&mut self.meanwhile);
        if !meanwhile.is_empty() {
            self.history.user(meanwhile.trim_end());
            self.rounds = 0;
        }
        self.attempt = 0;
        self.ask(now);
    }

    pub(super) fn transferred(&mut self, now: Instant, result: Result<String, String>) {
        if let Phase::Tools { running, .. } = &mut self.phase
            && let Some(tool) = running.iter_mut().find(|tool| tool.transfer.is_some() && tool.result.is_none())
        {
            tool.result = Some(result);
            self.tools_done(now);
        }
    }

    fn count_tools(&self) {
        let Phase::Tools { running, .. } = &self.phase else { return };
        for tool in running {
            let outcome = if matches!(tool.result, Some(Ok(_))) { "ok" } else { "failed" };
            // The name is the model's: only those that are configured become a label.
            let known = self.config.tools.iter().any(|known| match known {
                Tool::Builtin(builtin) => builtin.name() == tool.name,
                Tool::Http(http) => http.name == tool.name,
            });
            let name = if known { tool.name.clone() } else { "unknown".to_owned() };
            let agent = self.name.clone();
            metrics::counter!("antiphon_llm_tools_total", "agent" => agent, "tool" => name, "outcome" => outcome)
                .increment(1);
        }
    }
}
