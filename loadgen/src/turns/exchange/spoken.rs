//! Turns as callers have them: the caller says something, and waits for the answer.
//!
//! What is measured is mouth to ear: from the packet with the last audible sample of the caller to the first audible sample
//! of the answer. End of turn, recogniser, agent, voice and both ways through the network are in it.

use std::time::{Duration, Instant};

use super::{END, Exchange, LONGEST, Turn};
use crate::caller::call::CallError;
use crate::clock;
use crate::sound::heard::Clip;
use crate::sound::listen;
use crate::turns::judge;

/// One packet.
const PACKET: Duration = Duration::from_millis(20);

/// Words that come this long after the last ones are of another sentence.
const MORE_WORDS: Duration = Duration::from_millis(2_500);

/// A recorded sentence of a caller.
#[derive(Clone, Debug, PartialEq)]
pub struct Saying {
    name: String,
    clip: Clip,
    /// From the first sample to the packet with the last audible one.
    last: Duration,
}

impl Saying {
    /// `clip` as a saying called `name`; `None` where nothing of it is audible.
    pub fn new(name: &str, clip: Clip) -> Option<Self> {
        let spoken = judge::audible_time(&clip);
        if spoken.is_zero() {
            return None;
        }
        let end = judge::lead_in(&clip) + judge::audible_length(&clip);
        // The packet that holds the last sample leaves when the caller's device has it.
        let packets = (end.as_micros().div_ceil(PACKET.as_micros()) as u32).saturating_sub(1);
        Some(Self { name: name.to_owned(), clip, last: PACKET * packets })
    }

    /// The same with `noise` over it, `decibels` below the speech.
    #[must_use]
    pub fn over(&self, noise: &Clip, decibels: f32) -> Self {
        Self { clip: self.clip.over(noise, decibels), ..self.clone() }
    }

    /// Its sound.
    pub fn clip(&self) -> &Clip {
        &self.clip
    }

    /// What it is called in reports.
    pub fn name(&self) -> &str {
        &self.name
    }
}

/// What the gateway's recogniser made of a saying.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Dictated {
    /// Words of all the turns that it took the saying for.
    pub text: String,
    /// From the packet with the last audible sample to the words of the last of them; `None` without words.
    pub delay: Option<Duration>,
}

impl Exchange {
    /// Says `saying`, and gives the words that our agent server is told. Waits up to `patience` for the first.
    ///
    /// # Errors
    /// The call is over, or its agent is not our server.
    pub async fn dictate(&mut self, saying: &Saying, patience: Duration) -> Result<Dictated, CallError> {
        let Some(session) = &mut self.session else {
            return Err(CallError::Target(
                "words are told to the agent: calls need the built-in agent server".to_owned(),
            ));
        };
        while session.recv(Duration::ZERO).await.is_some() {}
        let began = self.call.say(&saying.clip).await?;
        let (said, end) = (began + saying.last, began + saying.clip.duration());
        let mut dictated = Dictated::default();
        let mut until = end + patience;
        while let Some((at, frame)) = session.recv(until.saturating_duration_since(clock::now())).await {
            if frame["type"] != "prompt" || frame["last"] != true {
                continue;
            }
            dictated.text.push_str(frame["voicePrompt"].as_str().unwrap_or_default());
            dictated.text.push(' ');
            dictated.delay = Some(at.saturating_duration_since(said));
            until = at.max(end) + MORE_WORDS;
        }
        if self.call.status().end.is_some() { Err(CallError::Over) } else { Ok(dictated) }
    }

    /// Says `saying` and listens to the end of the answer. One that begins before the caller has finished is a failure,
    /// `cut_off`.
    pub async fn converse(&mut self, saying: &Saying) -> Turn {
        while self.call.next_text(Duration::ZERO).await.is_some() {}
        let from = clock::now();
        let began = match self.call.say(&saying.clip).await {
            Ok(began) => began,
            Err(error) => {
                let fault = if matches!(error, CallError::Over) { "call_lost".to_owned() } else { error.cause() };
                return self.failed(&saying.name, clock::now(), fault);
            }
        };
        let said: Instant = began + saying.last;
        clock::sleep_until(said).await;
        if listen::onset(&self.call.ear().heard(), from).is_some_and(|at| at < said) {
            self.call.silence(said, END, LONGEST).await;
            return self.failed(&saying.name, said, "cut_off".to_owned());
        }
        let Some(onset) = self.call.onset(said, self.plan.patience).await else {
            let fault = if self.call.status().end.is_some() { "call_lost" } else { "silence" };
            return self.failed(&saying.name, said, fault.to_owned());
        };
        let ended = self.wait_for_end(onset, None).await;
        let heard = self.call.take_heard();
        let mut turn = self.measure(&saying.name, said, onset, ended, &heard, None, false);
        turn.mouth_to_ear = Some(onset.saturating_duration_since(said));
        // What the agent answered is not known.
        turn.chars = 0;
        turn
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sound::synthetic::babble;

    #[test]
    fn a_saying_ends_with_its_last_audible_sample() {
        let spoken = babble(3, 16_000, 1.0);
        let bare = Saying::new("bare", spoken.clone()).expect("audible");
        assert!(bare.last <= Duration::from_secs(1) && bare.last >= Duration::from_millis(800), "{bare:?}");
        let mut pcm = vec![0.0; 8_000];
        pcm.extend(&spoken.pcm);
        pcm.extend([0.0; 16_000]);
        let padded = Saying::new("padded", Clip { rate: 16_000, pcm }).expect("audible");
        assert_eq!(padded.last, bare.last + Duration::from_millis(500), "silence behind it is not said");
        assert_eq!(Saying::new("nothing", Clip { rate: 16_000, pcm: vec![0.0; 16_000] }), None);
    }
}
