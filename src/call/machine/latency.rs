//! How long the caller waited for an answer, and where that time went.
//!
//! Owns when the caller's last sound was and when the turn was taken as ended; the turn that answers knows the rest.

use std::time::{Duration, Instant};

use crate::call::event::Stages;
use crate::turn::VoiceStages;

/// What is said later than this after the caller has finished is no answer, but something new.
const ANSWER: Duration = Duration::from_secs(30);

/// When things happened to the first part of a turn.
#[derive(Clone, Copy, Debug)]
pub(super) struct Milestones {
    /// Its first text came.
    pub(super) accepted: Instant,
    /// The engine took it; `None`: recorded sound.
    pub(super) submitted: Option<Instant>,
    /// Its first PCM came.
    pub(super) made: Option<Instant>,
    /// What the device told of how that came about.
    pub(super) voice: Option<VoiceStages>,
    /// Half of the last round trip that the peer's reports gave.
    pub(super) network: Option<Duration>,
}

impl Milestones {
    /// Where the time from its first text to `now` went, when its first packet leaves.
    pub(super) fn own(&self, now: Instant) -> Stages {
        self.since(now, Asked { spoke: self.accepted, decided: self.accepted })
    }

    /// The same from the caller's last sound.
    fn since(&self, now: Instant, asked: Asked) -> Stages {
        // What was done before its time cost nothing: each milestone is no earlier than the one before.
        let decided = asked.decided.max(asked.spoke);
        let text = self.accepted.max(decided);
        let submitted = self.submitted.unwrap_or(text).max(text);
        let made = self.made.unwrap_or(submitted).max(submitted);
        let first_audio = made.saturating_duration_since(submitted);
        Stages {
            end_of_turn: decided.saturating_duration_since(asked.spoke),
            agent: text.saturating_duration_since(decided),
            queue: submitted.saturating_duration_since(text),
            first_audio,
            egress: now.saturating_duration_since(made),
            voice: self.voice.map(|voice| voice.within(first_audio)),
            network: self.network,
        }
    }
}

/// A caller who has finished and waits.
#[derive(Clone, Copy, Debug)]
pub(super) struct Asked {
    /// Last sound of the caller.
    pub(super) spoke: Instant,
    /// The turn was taken as ended.
    pub(super) decided: Instant,
}

/// The wait of one caller.
#[derive(Debug, Default)]
pub(super) struct Latency(Option<Asked>);

impl Latency {
    /// The caller's turn has ended; the last sound of it was at `spoke`.
    pub(super) fn asked(&mut self, now: Instant, spoke: Instant) {
        self.0 = Some(Asked { spoke: spoke.min(now), decided: now });
    }

    /// The first packet of a turn leaves. Gives when the caller asked and how long it took, where that turn is the
    /// answer: the first one whose text came behind the end of the caller's turn. `early`: its text came before, on
    /// speculation.
    pub(super) fn answered(&mut self, now: Instant, turn: Milestones, early: bool) -> Option<(Asked, Stages)> {
        let asked = self.0?;
        if turn.accepted < asked.decided && !early {
            return None;
        }
        self.0 = None;
        if turn.accepted.saturating_duration_since(asked.decided) > ANSWER {
            return None;
        }
        Some((asked, turn.since(now, asked)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::clock;

    fn ms(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    #[test]
    fn the_parts_add_up_and_belong_to_the_first_answer() {
        let start = clock::now();
        let mut latency = Latency::default();
        let turn = |accepted: u64| Milestones {
            accepted: start + ms(accepted),
            submitted: Some(start + ms(accepted + 30)),
            made: Some(start + ms(accepted + 90)),
            voice: Some(VoiceStages { prefill: Some(ms(15)), first_pcm: ms(40), ..VoiceStages::default() }),
            network: Some(ms(25)),
        };
        assert!(latency.answered(start + ms(10), turn(0), false).is_none(), "a greeting answers nobody");
        latency.asked(start + ms(400), start);
        assert!(latency.answered(start + ms(450), turn(100), false).is_none(), "it was on its way before");
        let (_, stages) = latency.answered(start + ms(700), turn(500), false).expect("the answer");
        assert_eq!(
            stages,
            Stages {
                end_of_turn: ms(400),
                agent: ms(100),
                queue: ms(30),
                first_audio: ms(60),
                egress: ms(110),
                // On the way to the device and back it waited, too.
                voice: Some(VoiceStages {
                    wait: ms(5),
                    prefill: Some(ms(15)),
                    first_pcm: ms(40),
                    ..VoiceStages::default()
                }),
                network: Some(ms(25)),
            }
        );
        let own = turn(500).own(start + ms(700));
        assert_eq!((own.end_of_turn, own.agent, own.mouth_to_ear()), (ms(0), ms(0), ms(200)), "by itself");
        assert_eq!(stages.mouth_to_ear(), ms(700));
        assert!(latency.answered(start + ms(900), turn(800), false).is_none(), "once");
        latency.asked(start + ms(1_000), start + ms(900));
        assert!(latency.answered(start + ms(60_000), turn(59_000), false).is_none(), "that is no answer any more");
    }

    #[test]
    fn what_was_made_on_speculation_costs_no_time() {
        let start = clock::now();
        let mut latency = Latency::default();
        latency.asked(start + ms(400), start);
        let at = |time: u64| Some(start + ms(time));
        let voice = VoiceStages { wait: ms(20), first_pcm: ms(60), ..VoiceStages::default() };
        let turn = Milestones {
            accepted: start + ms(210),
            submitted: at(220),
            made: at(300),
            voice: Some(voice),
            network: None,
        };
        let (_, stages) = latency.answered(start + ms(405), turn, true).expect("the answer");
        assert_eq!((stages.end_of_turn, stages.egress), (ms(400), ms(5)));
        assert_eq!(stages.mouth_to_ear(), ms(405));
        assert_eq!(stages.voice, Some(VoiceStages::default()));
    }
}
