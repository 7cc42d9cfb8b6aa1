//! Phrases of the configuration, spoken before anybody calls: greetings, apologies, consent.
//!
//! They are batch work, so that calls come first. They are looked at again after each reload, and from time to time:
//! voices are enrolled anew, and devices come back after failures.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{mpsc, watch};

use crate::agent::config::Agent;
use crate::call::segment::SegmentConfig;
use crate::call::{Style, streamed_utterances, utterances};
use crate::config::Config;
use crate::hear::config::Kind;
use crate::synth::device::Engine;
use crate::turn::{Class, SpeechEvent, Utterance, UtteranceEnd};

/// From when the engine is ready to the first phrase: a start takes what processor there is, and calls that waited for it
/// come first.
const FIRST: Duration = Duration::from_secs(1);
/// How often it is looked whether all are kept. What is kept costs nothing.
const AGAIN: Duration = Duration::from_secs(60);
/// The same while a model's files are still being read.
const SOON: Duration = Duration::from_secs(2);
/// Phrases at most: two hundred agents with greeting and apologies.
const MOST: usize = 1_000;
/// Events of one phrase on their way; a full channel delays it.
const EVENTS: usize = 16;

/// The phrases of `config`, as calls would ask for them.
pub(super) fn of(config: &Config) -> Arc<[Utterance]> {
    let segment = &config.call.segment;
    let mut all = Vec::new();
    for agent in config.agent.values() {
        all.extend(of_agent(agent, segment));
        let consent = config.recording.wanted(agent.record, agent.consent.as_deref()).filter(|text| !text.is_empty());
        let consent = consent.and_then(|text| streamed_utterances(text, agent.consent_style(), segment).ok());
        all.extend(consent.into_iter().flatten());
    }
    if !config.agent.is_empty() && config.recognizer.chosen() != Kind::Off {
        all.extend(utterances(config.recognizer.apology.trim(), Style::default(), segment).unwrap_or_default());
    }
    all.truncate(MOST);
    all.into_iter().map(|utterance| Utterance { class: Class::Batch, ..utterance }).collect()
}

fn of_agent(agent: &Agent, segment: &SegmentConfig) -> impl Iterator<Item = Utterance> {
    // A text with a mistake is told of when it is to be said.
    let said = |(text, style)| utterances(text, style, segment).unwrap_or_default();
    agent.phrases().into_iter().flat_map(said).collect::<Vec<_>>().into_iter()
}

/// Has `engine` speak what it does not keep yet, now and whenever the phrases change, until `stop`.
pub(super) async fn render(
    engine: Engine,
    mut phrases: watch::Receiver<Arc<[Utterance]>>,
    mut stop: watch::Receiver<bool>,
) {
    engine.ready().await;
    tokio::select! {
        () = tokio::time::sleep(FIRST) => {}
        _ = stop.changed() => return,
    }
    loop {
        let now = phrases.borrow_and_update().clone();
        let again = tokio::select! {
            again = render_once(&engine, &now) => again,
            // Others are wanted: those first.
            changed = phrases.changed() => match changed {
                Ok(()) => continue,
                Err(_) => return,
            },
            _ = stop.changed() => return,
        };
        tokio::select! {
            () = tokio::time::sleep(again) => {}
            changed = phrases.changed() => if changed.is_err() {
                return;
            },
            _ = stop.changed() => return,
        }
    }
}

/// Gives when to look again.
async fn render_once(engine: &Engine, phrases: &[Utterance]) -> Duration {
    let Some(missing) = engine.fix_phrases(phrases) else { return SOON };
    for phrase in missing {
        let (sink, mut events) = mpsc::channel(EVENTS);
        let phrase = Utterance { id: crate::turn::UtteranceId::next(), ..phrase };
        let stream = phrase.stream;
        if let Err(refused) = engine.submit(phrase, sink) {
            return refused.retry_after.max(SOON);
        }
        let how = loop {
            match events.recv().await {
                Some(SpeechEvent::Audio { .. }) => {}
                Some(SpeechEvent::End { how, .. }) => break how,
                None => return AGAIN,
            }
        };
        engine.note(stream, crate::synth::device::StreamNote::Closed);
        if let UtteranceEnd::Failed(reason) = how {
            // The next call fails at it, too, and its agent is told.
            tracing::debug!(reason, "a phrase of the configuration cannot be spoken");
        }
    }
    AGAIN
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::recording::Mode;
    use crate::synth::device::Loader;
    use crate::synth::device::phrases;
    use crate::synth::tone::Tone;

    #[tokio::test]
    async fn greetings_are_there_before_the_first_call_and_new_ones_after_a_reload() {
        let mut config = Config::default();
        let agent =
            Agent { greeting: Some("Good day.".into()), apology: "Sorry.".into(), ..Agent::at("builtin:silent") };
        config.agent.insert("a".into(), agent.clone());
        config.recording.mode = Mode::All;
        config.recording.consent = "This is recorded.".into();
        let texts = |all: &[Utterance]| all.iter().map(|one| one.text.clone()).collect::<Vec<_>>();
        let first = of(&config);
        assert_eq!(texts(&first), ["Good day.", "Sorry.", "This is recorded."]);
        assert!(first.iter().all(|phrase| phrase.class == Class::Batch));

        let loader: Loader = Box::new(|| Ok(Box::new(Tone::new())));
        let engine = Engine::start(vec![loader], crate::sched::Config::default()).expect("starts");
        engine.keep_phrases(&phrases::Config::default());
        let (tell, told) = watch::channel(first.clone());
        let (stop, stopped) = watch::channel(false);
        let rendering = tokio::spawn(render(engine.clone(), told, stopped));
        let kept = async |phrases: &[Utterance]| {
            let all_are = async {
                while engine.fix_phrases(phrases).is_none_or(|missing| !missing.is_empty()) {
                    tokio::time::sleep(Duration::from_millis(5)).await;
                }
            };
            tokio::time::timeout(Duration::from_secs(60), all_are).await.expect("they are kept");
        };
        kept(&first).await;
        config.agent.insert("b".into(), Agent { greeting: Some("Welcome.".into()), ..agent });
        let second = of(&config);
        tell.send_replace(second.clone());
        kept(&second).await;
        stop.send_replace(true);
        rendering.await.expect("it ends");
        engine.shutdown();
    }
}
