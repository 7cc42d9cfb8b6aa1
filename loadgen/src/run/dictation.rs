//! How well a gateway hears: callers say sentences, and the words that its agent is told are compared with them.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use serde::{Deserialize, Serialize};
use tokio::task::JoinSet;

use crate::caller::call::{CallError, Leg};
use crate::caller::relay::Impairment;
use crate::sound::heard::Clip;
use crate::sound::synthetic;
use crate::turns::exchange::{Exchange, Plan, Saying};
use crate::turns::stats::{Spread, Summary};
use crate::turns::words::Errors;
use crate::wire::codec::Codec;

/// Silence around a sentence: a recogniser needs the end of what was before, and end of turn the pause behind it.
const BEFORE: f32 = 0.4;
const BEHIND: f32 = 1.6;
/// One round of the noise of a street, seconds.
const STREET: f32 = 77.0;
/// A recogniser that has said nothing after this long will not.
const PATIENCE: Duration = Duration::from_secs(20);

/// What stands between caller and recogniser.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Condition {
    /// Opus calls are WebRTC calls, all others telephone calls.
    pub codec: Codec,
    /// Share of packets that are lost, 0 to 1.
    pub loss: f64,
    /// Noise of a street that many decibels below the speech.
    pub noise: Option<f32>,
}

impl fmt::Display for Condition {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.codec.label())?;
        if self.loss > 0.0 {
            write!(f, ", {:.0} % lost", self.loss * 1e2)?;
        }
        if let Some(decibels) = self.noise {
            write!(f, ", a street at {decibels:.0} dB")?;
        }
        Ok(())
    }
}

/// A sentence and what was made of it.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Recognised {
    /// What was said.
    pub said: String,
    /// What the agent was told.
    pub recognised: String,
    /// The difference.
    pub errors: Errors,
}

/// What came out of one condition.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Outcome {
    /// Which.
    pub condition: String,
    /// Of all sentences together.
    pub errors: Errors,
    /// Sentences without a word.
    pub unheard: usize,
    /// From the last audible sample said to the words, seconds.
    pub delay: Summary,
    /// Each sentence.
    pub sentences: Vec<Recognised>,
}

impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Outcome { condition, errors, unheard, delay, sentences } = self;
        let (p50, p95) = (delay.p50 * 1e3, delay.p95 * 1e3);
        let count = sentences.len();
        write!(
            f,
            "{condition}: {errors}; {unheard} of {count} sentences unheard; words after {p50:.0} ms (p95 {p95:.0})"
        )
    }
}

/// `clip` of the words `text` as a caller says them, with pauses around; `None` where nothing of it is audible.
pub fn sentence(text: &str, clip: &Clip) -> Option<Saying> {
    let pause = |seconds: f32| std::iter::repeat_n(0.0, (clip.rate as f32 * seconds) as usize);
    let pcm = pause(BEFORE).chain(clip.pcm.iter().copied()).chain(pause(BEHIND)).collect();
    Saying::new(text, Clip { rate: clip.rate, pcm })
}

/// What is said of `sentences` under this noise. Sentences have the noise of different seconds of a street.
pub fn in_noise(sentences: &[Saying], noise: Option<f32>) -> Vec<Saying> {
    let Some(decibels) = noise else { return sentences.to_vec() };
    let said = |(n, saying): (usize, &Saying)| {
        let rate = saying.clip().rate;
        let mut street = synthetic::street(1, rate, STREET);
        let at = (n * 5 * rate as usize) % street.pcm.len().max(1);
        street.pcm.rotate_left(at);
        saying.over(&street, decibels)
    };
    sentences.iter().enumerate().map(said).collect()
}

/// Has `sentences`, whose names are their words, said in `condition` on `calls` calls at a time.
///
/// # Errors
/// A call does not come about or is lost, or `plan` has no agent server.
pub async fn run(plan: &Plan, sentences: &[Saying], condition: Condition, calls: usize) -> Result<Outcome, CallError> {
    let mut plan = plan.clone();
    let impairment = Some(Impairment { loss: condition.loss, burst: 1.0, ..Impairment::default() });
    let impairment = impairment.filter(|what| !what.is_none());
    plan.sip.codecs = vec![condition.codec];
    plan.sip.impairment = impairment;
    if let Some(browser) = &mut plan.webrtc {
        browser.impairment = impairment;
    }
    let leg = if condition.codec == Codec::Opus { Leg::Webrtc } else { Leg::Sip };
    let (plan, next) = (Arc::new(plan), Arc::new(AtomicUsize::new(0)));
    let sentences: Arc<[Saying]> = in_noise(sentences, condition.noise).into();
    let mut callers = JoinSet::new();
    for _ in 0..calls.clamp(1, sentences.len().max(1)) {
        let (plan, sentences, next) = (plan.clone(), sentences.clone(), next.clone());
        callers.spawn(async move {
            let (mut exchange, _) = Exchange::open(plan, leg).await?;
            let mut all = Vec::new();
            loop {
                let n = next.fetch_add(1, Ordering::Relaxed);
                let Some(saying) = sentences.get(n) else { break };
                all.push((n, exchange.dictate(saying, PATIENCE).await?));
            }
            exchange.close().await;
            Ok::<_, CallError>(all)
        });
    }
    let mut all = Vec::new();
    while let Some(ended) = callers.join_next().await {
        all.extend(ended.map_err(|panic| CallError::BadAnswer(panic.to_string()))??);
    }
    all.sort_by_key(|(n, _)| *n);
    let (mut errors, mut delay, mut unheard) = (Errors::default(), Spread::default(), 0);
    let mut recognised = Vec::new();
    for (saying, (_, dictated)) in sentences.iter().zip(all) {
        let of = Errors::between(saying.name(), &dictated.text);
        errors += of;
        match dictated.delay {
            Some(after) => delay.add(after),
            None => unheard += 1,
        }
        let text = dictated.text.trim().to_owned();
        recognised.push(Recognised { said: saying.name().to_owned(), recognised: text, errors: of });
    }
    Ok(Outcome { condition: condition.to_string(), errors, unheard, delay: delay.summary(), sentences: recognised })
}
