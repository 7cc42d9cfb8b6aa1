//! One utterance on its way back to the gateway: audio, its end, and when its words sound.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{Semaphore, mpsc};
use tokio::time::timeout;

use super::super::wire::{self, How, ToGateway};
use crate::synth::device::Refused;
use crate::turn::{SpeechEvent, StageTimes, UtteranceEnd, WordTimes};

/// How often it is looked whether a voice still looks for the words of what it has said, and for how long at most.
const LOOK: Duration = Duration::from_millis(100);
const LONGEST: Duration = Duration::from_secs(30);

/// Sends the audio of one utterance as there is credit, and its end; `words`: and when they sound; `stages`: and before its
/// first audio, where the time went.
pub(super) async fn forward(
    id: u64,
    refused: Option<Refused>,
    mut events: mpsc::Receiver<SpeechEvent>,
    words: Option<WordTimes>,
    mut stages: Option<StageTimes>,
    credit: Arc<Semaphore>,
    out: mpsc::Sender<Vec<u8>>,
) {
    let mut words = words.map(|times| Words { id, times, begins: 0, ended: false });
    let mut how = refused.map(|refused| How::Refused { retry_after_ms: refused.retry_after.as_millis() as u64 });
    while how.is_none() {
        let frame = match events.recv().await {
            Some(SpeechEvent::Audio { pcm, .. }) => {
                let Ok(permit) = credit.acquire().await else { continue };
                permit.forget();
                let mut frame = words.as_mut().and_then(Words::news).unwrap_or_default();
                if let Some(stages) = stages.take().and_then(|stages| stages.known()) {
                    frame.append(&mut wire::message(&ToGateway::Stages { id, stages: stages.into() }));
                }
                frame.append(&mut wire::audio(id, &pcm));
                frame
            }
            Some(SpeechEvent::End { how: ended, .. }) => {
                how = Some(ended.into());
                continue;
            }
            None => {
                how = Some(UtteranceEnd::Failed("the worker is going down".into()).into());
                continue;
            }
        };
        // overflow: awaited, the socket empties it
        if out.send(frame).await.is_err() {
            return;
        }
    }
    let Some(how) = how else { return };
    let words = words.filter(|_| how == How::Done);
    // A gateway that is gone needs no answer.
    let _ = out.send(wire::message(&ToGateway::End { id, how })).await;
    if let Some(words) = words.filter(|words| !words.ended) {
        // Not a part of what has to be over before the worker may go.
        tokio::spawn(words.late(out.downgrade()));
    }
}

/// When the words of an utterance sound, for its gateway.
struct Words {
    id: u64,
    times: WordTimes,
    /// How many of [`WordTimes::begins`] were told, and whether the ends were.
    begins: usize,
    ended: bool,
}

impl Words {
    /// A frame with what was not told yet.
    fn news(&mut self) -> Option<Vec<u8>> {
        let begins: Vec<_> =
            self.times.begins_after(self.begins).iter().map(|bound| (bound.letters, bound.samples)).collect();
        let ends = self.times.known().filter(|_| !self.ended);
        if begins.is_empty() && ends.is_none() {
            return None;
        }
        let ends = ends.map(|ends| ends.iter().map(|end| (end.text, end.samples)).collect::<Vec<_>>());
        self.begins += begins.len();
        self.ended |= ends.is_some();
        Some(wire::message(&ToGateway::Words { id: self.id, begins, ends }))
    }

    /// Tells the ends of the words once the voice has found them, which may be after the speech was made.
    async fn late(mut self, out: mpsc::WeakSender<Vec<u8>>) {
        let times = self.times.clone();
        let found = async {
            tokio::select! {
                () = times.told() => {}
                // The gateway is gone, or the voice has given it up: nothing but these two holds them.
                () = async {
                    while times.holders() > 2 && out.upgrade().is_some() {
                        tokio::time::sleep(LOOK).await;
                    }
                } => {}
            }
        };
        // Longer than a voice takes that finds them at all; who listens has heard it all by then.
        let _ = timeout(LONGEST, found).await;
        if let (Some(frame), Some(out)) = (self.news(), out.upgrade()) {
            // overflow: awaited; a gateway that is gone needs none
            let _ = out.send(frame).await;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::turn::{NotBefore, UtteranceId, VoiceStages, WordEnd};

    #[tokio::test]
    async fn what_is_cancelled_ends_without_the_credit_of_who_listens_no_more() {
        let (sink, events) = mpsc::channel(8);
        let (out, mut frames) = mpsc::channel(8);
        let credit = Arc::new(Semaphore::new(1));
        let forwarding = tokio::spawn(forward(7, None, events, None, None, credit.clone(), out));
        let utterance = UtteranceId::next();
        for _ in 0..3 {
            sink.send(SpeechEvent::Audio { utterance, pcm: vec![0.5] }).await.expect("room");
        }
        assert_eq!(frames.recv().await.expect("a frame"), wire::audio(7, &[0.5]));
        // As its cancelling does.
        credit.close();
        sink.send(SpeechEvent::End { utterance, how: UtteranceEnd::Cancelled }).await.expect("room");
        let end = wire::message(&ToGateway::End { id: 7, how: How::Cancelled });
        assert_eq!(frames.recv().await.expect("the end, and no more audio"), end);
        forwarding.await.expect("over");
    }

    #[tokio::test]
    async fn a_gateway_that_is_gone_leaves_nothing_waiting() {
        let (sink, events) = mpsc::channel(8);
        let (out, frames) = mpsc::channel(8);
        let credit = Arc::new(Semaphore::new(0));
        let forwarding = tokio::spawn(forward(7, None, events, None, None, credit.clone(), out));
        let pcm = vec![0.5];
        sink.send(SpeechEvent::Audio { utterance: UtteranceId::next(), pcm }).await.expect("room");
        drop(frames);
        // As the session does when it is dropped.
        credit.close();
        drop(sink);
        timeout(Duration::from_secs(30), forwarding).await.expect("in time").expect("over");
    }

    #[tokio::test]
    async fn words_are_told_before_the_audio_that_they_are_in_and_also_behind_the_end() {
        let (sink, events) = mpsc::channel(8);
        let (out, mut frames) = mpsc::channel(8);
        let (times, utterance, credit) = (WordTimes::default(), UtteranceId::next(), Arc::new(Semaphore::new(8)));
        let forwarding = tokio::spawn(forward(7, None, events, Some(times.clone()), None, credit, out.clone()));
        let words = |begins: &[(usize, u64)], ends: Option<&[(usize, u64)]>| {
            wire::message(&ToGateway::Words { id: 7, begins: begins.to_vec(), ends: ends.map(<[_]>::to_vec) })
        };
        times.begin(NotBefore { letters: 4, samples: 960 });
        sink.send(SpeechEvent::Audio { utterance, pcm: vec![0.5] }).await.expect("room");
        let told = [words(&[(4, 960)], None), wire::audio(7, &[0.5])].concat();
        assert_eq!(frames.recv().await.expect("a frame"), told);
        times.begin(NotBefore { letters: 9, samples: 1_920 });
        sink.send(SpeechEvent::Audio { utterance, pcm: vec![0.5] }).await.expect("room");
        let told = [words(&[(9, 1_920)], None), wire::audio(7, &[0.5])].concat();
        assert_eq!(frames.recv().await.expect("a frame"), told, "each once");
        sink.send(SpeechEvent::End { utterance, how: UtteranceEnd::Done }).await.expect("room");
        let end = wire::message(&ToGateway::End { id: 7, how: How::Done });
        assert_eq!(frames.recv().await.expect("its end"), end);
        forwarding.await.expect("over, also before the words are known");
        times.tell(vec![WordEnd { text: 3, samples: 480 }]);
        assert_eq!(frames.recv().await.expect("its words"), words(&[], Some(&[(3, 480)])));
        drop(out);
        assert!(frames.recv().await.is_none(), "nothing more");
    }

    #[tokio::test]
    async fn the_stages_are_told_once_before_the_first_audio() {
        let (sink, events) = mpsc::channel(8);
        let (out, mut frames) = mpsc::channel(8);
        let (times, utterance, credit) = (StageTimes::default(), UtteranceId::next(), Arc::new(Semaphore::new(8)));
        let stages = VoiceStages { first_pcm: Duration::from_millis(3), ..VoiceStages::default() };
        times.tell(stages);
        let forwarding = tokio::spawn(forward(7, None, events, None, Some(times), credit, out));
        for _ in 0..2 {
            sink.send(SpeechEvent::Audio { utterance, pcm: vec![0.5] }).await.expect("room");
        }
        let told = wire::message(&ToGateway::Stages { id: 7, stages: stages.into() });
        assert_eq!(frames.recv().await.expect("a frame"), [told, wire::audio(7, &[0.5])].concat());
        assert_eq!(frames.recv().await.expect("a frame"), wire::audio(7, &[0.5]));
        sink.send(SpeechEvent::End { utterance, how: UtteranceEnd::Done }).await.expect("room");
        forwarding.await.expect("over");
    }
}
