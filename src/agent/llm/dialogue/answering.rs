//! How a response becomes what is said: chunks, their end, their limits.

use std::time::Instant;

use super::{Action, Asking, Dialogue, Failure, Phase};
use crate::agent::llm::answer::{self, Piece};

/// Bytes of one response, of which what is said is a small part.
const MAX_RESPONSE: usize = 4 << 20;

impl Dialogue {
    /// Bytes of the response's body.
    pub fn data(&mut self, now: Instant, bytes: &[u8]) {
        let Phase::Asking(asking) = &mut self.phase else { return };
        asking.bytes += bytes.len();
        let mut events = Vec::new();
        if asking.parser.push(bytes, &mut events).is_err() || asking.bytes > MAX_RESPONSE {
            return self.failed(now, &Failure::Garbage("more than an answer can be".into()));
        }
        for event in events {
            match event.trim() {
                "" => {}
                "[DONE]" => return self.done(now),
                text => self.document(now, text),
            }
        }
    }

    /// A whole answer of a server that does not stream.
    pub fn whole(&mut self, now: Instant, text: &str) {
        self.document(now, text);
        self.done(now);
    }

    fn done(&mut self, now: Instant) {
        self.finish(now);
        self.conclude(now);
    }

    fn document(&mut self, now: Instant, text: &str) {
        let pieces = match answer::read(text) {
            Ok(pieces) => pieces,
            Err(why) => return self.failed(now, &Failure::Garbage(why)),
        };
        if let Phase::Asking(asking) = &mut self.phase {
            asking.chunks += 1;
        }
        for piece in pieces {
            // A piece may end the request.
            let Phase::Asking(asking) = &mut self.phase else { return };
            match piece {
                Piece::Usage { input, output } => self.count_usage(input, output),
                _ if asking.finished.is_some() => {}
                Piece::Text(text) => self.text(now, &text),
                Piece::Call(piece) => {
                    asking.heard_from = now;
                    begin(&self.name, asking, now);
                    if let Err(why) = asking.calls.add(piece) {
                        return self.fail(now, &Failure::Garbage(why));
                    }
                }
                Piece::Finish(_) => self.finish(now),
            }
        }
    }

    fn text(&mut self, now: Instant, text: &str) {
        let Phase::Asking(asking) = &mut self.phase else { return };
        let mut clean = asking.cleaner.push(text);
        let has_ended = asking.cleaner.has_ended();
        // White space before the first word is no word.
        if asking.said == 0 {
            clean = clean.trim_start().to_owned();
        }
        self.say(now, clean);
        if has_ended {
            self.finish(now);
        }
    }

    /// Says text of the answer under way.
    fn say(&mut self, now: Instant, mut text: String) {
        let Phase::Asking(asking) = &mut self.phase else { return };
        if text.is_empty() {
            return;
        }
        asking.heard_from = now;
        begin(&self.name, asking, now);
        let room = self.config.max_answer_chars.saturating_sub(asking.said);
        let length = text.chars().count();
        let is_full = length >= room;
        if length > room {
            text = text.chars().take(room).collect();
        }
        asking.said += length.min(room);
        let turn = asking.turn.clone();
        if !text.is_empty() {
            self.history.say(&turn, &text);
            let speculation = self.answers();
            self.act(Action::Say { turn, token: text, last: false, speculation });
        }
        if is_full {
            tracing::info!(agent = self.name, "an answer was cut at max_answer_chars");
            self.finish(now);
        }
    }

    /// The model has ended its answer, or it is long enough.
    pub(super) fn finish(&mut self, now: Instant) {
        let Phase::Asking(asking) = &mut self.phase else { return };
        if asking.finished.is_some() {
            return;
        }
        let rest = asking.cleaner.finish();
        // Set before the rest is said: that may find the answer long enough, too.
        asking.finished = Some(now);
        self.say(now, rest);
        let Phase::Asking(asking) = &self.phase else { return };
        if asking.said > 0 {
            let turn = asking.turn.clone();
            let speculation = self.answers();
            self.act(Action::Say { turn, token: String::new(), last: true, speculation });
        }
    }

    /// The call cannot take more text yet, so that nothing is read: the model is not to blame for the silence.
    pub fn waits(&mut self, now: Instant) {
        if let Phase::Asking(asking) = &mut self.phase {
            asking.heard_from = now;
        }
    }

    /// The response ended, well or not.
    pub fn closed(&mut self, now: Instant) {
        let Phase::Asking(asking) = &self.phase else { return };
        let failure = match (asking.said > 0 || !asking.calls.is_empty(), asking.chunks) {
            _ if asking.finished.is_some() => return self.conclude(now),
            (true, _) => Failure::Cut,
            (false, 0) if asking.bytes > 0 => Failure::Garbage("no chunk of a completion in it".into()),
            (false, _) => Failure::Empty,
        };
        self.fail(now, &failure);
    }

    /// The request failed.
    pub fn failed(&mut self, now: Instant, failure: &Failure) {
        match &self.phase {
            // Only the usage is missing.
            Phase::Asking(asking) if asking.finished.is_some() => self.conclude(now),
            Phase::Asking(_) => self.fail(now, failure),
            _ => {}
        }
    }

    /// The answer is complete: tools run, or the caller is listened to.
    pub(super) fn conclude(&mut self, now: Instant) {
        // Tools are not run for words that may not be all.
        if self.is_speculating() {
            return;
        }
        let Phase::Asking(asking) = &mut self.phase else { return };
        let (turn, said, calls) = (asking.turn.clone(), asking.said, asking.calls.take());
        // After a tool there may be nothing to say, as when the caller is being handed over.
        if said == 0 && calls.is_empty() && self.rounds == 0 {
            return self.fail(now, &Failure::Empty);
        }
        self.count("ok");
        self.act(Action::Drop { unsaid: false });
        (self.attempt, self.failures) = (0, 0);
        self.phase = Phase::Listening;
        if !calls.is_empty() {
            self.run_tools(now, &turn, calls);
        }
    }
}

/// Marks the first word or call of an answer.
fn begin(name: &str, asking: &mut Asking, now: Instant) {
    if !std::mem::replace(&mut asking.begun, true) {
        let took = now.saturating_duration_since(asking.sent);
        metrics::histogram!("antiphon_llm_first_token_seconds", "agent" => name.to_owned()).record(took);
    }
}
