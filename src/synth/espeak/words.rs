//! When each word of an utterance sounds, found out beside its synthesis.
//!
//! The program tells word events to those who link it, and a child process tells nothing. So the text is spoken twice
//! more, unheard: with a command before each word that sets the amplitude, once to the same value everywhere and once to
//! three values in turn. Both have the same length, sample by sample, and their quotient says which word sounds. The
//! commands make short pauses; what they add to the length of the plain utterance is taken off evenly.
//!
//! # Why
//! - **Three amplitudes, not two**: a word that makes no sound (a dash) is noticed, and the count goes on behind it.
//! - **Beside, and at the lowest priority**: no speech waits for it. One utterance at a time; when more wait than
//!   [`WAITING`], the next is not looked at, and its words are estimated as those of other voices are.
//! - **Only for who asks**: a call that may be interrupted, not a file that is made.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::time::Duration;

use super::Manner;
use super::child::{Child, Length, Share};
use super::form::{Token, joined};
use crate::clock;
use crate::synth::Slot;
use crate::turn::{TurnToken, WordEnd, WordTimes};

/// Utterances that may wait.
const WAITING: usize = 64;
/// Words of an utterance: longer ones are not looked at.
const MOST_WORDS: usize = 400;
/// Amplitudes in turn, in hundredths of the voice's own.
const LEVELS: [u32; 3] = [100, 50, 25];
/// Samples whose energy is looked at together: 2.5 ms.
const HOP: usize = 60;
/// So many in a row are another word and no noise.
const CERTAIN: u32 = 2;
/// What is quieter than this share of the loudest is silence.
const SILENCE: f32 = 0.01;
/// How long a read waits.
const WAIT: Duration = Duration::from_millis(20);

/// An utterance to look at.
pub(super) struct Task {
    pub(super) manner: Manner,
    pub(super) tokens: Vec<Token>,
    /// Of the utterance itself, told while it is spoken.
    pub(super) length: Length,
    pub(super) words: WordTimes,
    pub(super) token: TurnToken,
}

/// The thread that looks, started for the first utterance.
pub(super) struct Aligner {
    program: PathBuf,
    tasks: Option<SyncSender<Task>>,
    stop: Arc<AtomicBool>,
}

impl Aligner {
    pub(super) fn new(program: PathBuf) -> Self {
        Self { program, tasks: None, stop: Arc::default() }
    }

    /// Has the words of an utterance found, unless too many wait.
    pub(super) fn ask(&mut self, task: Task) {
        if !(2..=MOST_WORDS).contains(&task.tokens.len()) {
            return;
        }
        let tasks = self.tasks.get_or_insert_with(|| {
            let (tasks, inbox) = sync_channel(WAITING);
            let (program, stop) = (self.program.clone(), self.stop.clone());
            // Without the thread the channel is closed, and nothing is found out.
            let thread = std::thread::Builder::new().name("words".into());
            if let Err(error) = thread.spawn(move || work(&program, &inbox, &stop)) {
                tracing::warn!(%error, "when words sound is estimated");
            }
            tasks
        });
        // overflow: not looked at, and estimated
        let _ = tasks.try_send(task);
    }
}

impl Drop for Aligner {
    fn drop(&mut self) {
        // The thread ends with the process it waits for, which it kills.
        self.stop.store(true, Ordering::Release);
    }
}

fn work(program: &Path, inbox: &Receiver<Task>, stop: &AtomicBool) {
    while let Ok(task) = inbox.recv() {
        if stop.load(Ordering::Acquire) {
            return;
        }
        // Cancelled, or its reader is gone.
        if task.token.is_stale() || !task.words.is_wanted() {
            continue;
        }
        if let Some(ends) = find(program, &task, stop) {
            task.words.tell(ends);
        }
    }
}

/// The ends of all words; `None` where they cannot be told for certain.
pub(super) fn find(program: &Path, task: &Task, stop: &AtomicBool) -> Option<Vec<WordEnd>> {
    let speak = |marker: &dyn Fn(usize) -> String| {
        if task.token.is_stale() {
            None
        } else {
            speak(program, &task.manner, &joined(&task.tokens, marker), Share::Batch, stop)
        }
    };
    // A control character, a value and the letter of what it sets.
    let amplitude = |level: u32| format!("\u{1}{level}A");
    let even = speak(&|_| amplitude(LEVELS[0]))?;
    let turns = speak(&|n| amplitude(LEVELS[n % LEVELS.len()]))?;
    // By now the utterance itself has been computed, unless the machine is busy.
    let plain = match task.length.get() {
        Some(length) => *length,
        None => speak(&|_| String::new())?.len() as u64,
    };
    let ends = ends(&energy(&even), &energy(&turns), task.tokens.len())?;
    let count = task.tokens.len() as f64;
    let added = even.len() as f64 - plain as f64;
    let mut before = 0;
    let told = ends.into_iter().zip(&task.tokens).enumerate().map(|(n, (end, token))| {
        let at = (end * HOP) as f64 - added * (n + 1) as f64 / count;
        before = (at.max(0.0) as u64).clamp(before, plain.max(before));
        WordEnd { text: token.end, samples: before }
    });
    Some(told.collect())
}

/// The speech of `text`, all of it.
pub(super) fn speak(program: &Path, manner: &Manner, text: &str, share: Share, stop: &AtomicBool) -> Option<Vec<f32>> {
    let mut child = Child::start(program, manner, share).ok()?;
    let mut pcm = Vec::new();
    let mut whole = child.say(text).is_ok();
    while whole {
        let progress = child.read(Slot(0), clock::now(), Some(WAIT));
        pcm.extend(progress.pcm);
        if progress.outcome.done {
            break;
        }
        // A read that brings nothing for too long fails.
        whole = progress.outcome.failed.is_none() && !stop.load(Ordering::Acquire);
    }
    child.kill();
    child.wait();
    whole.then_some(pcm)
}

fn energy(pcm: &[f32]) -> Vec<f32> {
    pcm.chunks(HOP).map(|hop| hop.iter().map(|sample| sample.abs()).sum()).collect()
}

/// The hop behind the last sound of each of `count` words. A word without sound ends with the one before it.
fn ends(even: &[f32], turns: &[f32], count: usize) -> Option<Vec<usize>> {
    if even.len() != turns.len() {
        return None;
    }
    let floor = even.iter().copied().fold(0.0, f32::max) * SILENCE;
    let (mut ends, mut word, mut other) = (vec![0; count], 0, (0, 0));
    for (hop, (all, part)) in even.iter().zip(turns).enumerate().filter(|(_, (all, _))| **all > floor) {
        let distance = |level: u32| ((part / all).max(1e-3) * 100.0 / level as f32).ln().abs();
        let nearest = |a: &usize, b: &usize| distance(LEVELS[*a]).total_cmp(&distance(LEVELS[*b]));
        let level = (0..LEVELS.len()).min_by(nearest)?;
        let steps = (level + LEVELS.len() - word % LEVELS.len()) % LEVELS.len();
        if steps > 0 {
            other = if other.0 == steps { (steps, other.1 + 1) } else { (steps, 1) };
            if other.1 < CERTAIN {
                continue;
            }
            let end = ends.get(word).copied()?;
            ends.get_mut(word + 1..word + steps)?.fill(end);
            word += steps;
        }
        other = (0, 0);
        *ends.get_mut(word)? = hop + 1;
    }
    // Signs at the end make no sound; two words that do not are a mistake in the count.
    let last = *ends.get(word).filter(|end| **end > 0)?;
    (count - word <= 2).then(|| ends[word..].fill(last))?;
    Some(ends)
}

#[cfg(test)]
mod tests {
    use super::super::tests::{speak as speech, utterance};
    use super::super::{Config, Espeak, form};
    use super::*;

    #[test]
    fn words_are_told_apart_by_their_levels_and_one_without_sound_is_skipped() {
        let levels = [1.0, 0.5, 0.25];
        let spoken = [0usize, 1, 3, 4];
        let (mut even, mut turns) = (vec![0.0; 3], vec![0.0; 3]);
        for word in spoken {
            even.extend([1.0, 1.0, 0.0, 1.0, 0.001]);
            turns.extend([1.0, 1.0, 0.0, 1.0, 0.001].map(|energy: f32| energy * levels[word % 3]));
        }
        assert_eq!(ends(&even, &turns, 5), Some(vec![7, 12, 12, 17, 22]));
        assert_eq!(ends(&even, &turns, 4), None, "more words than there are");
        assert_eq!(ends(&even, &turns, 9), None, "fewer than there are");
        assert_eq!(ends(&even[1..], &turns, 5), None);
        let silent = vec![0.0; 20];
        assert_eq!(ends(&silent, &silent, 2), None);
    }

    /// Another word in the place of one changes the speech from where that word begins, and nothing before it: where two
    /// recordings part is the truth that the found times are held against, at 500 instants.
    #[test]
    fn heard_words_are_right_to_the_word() {
        let Ok(mut voice) = Espeak::new(Config::default()) else {
            return antiphon_skip::skip("espeak", "espeak-ng is not installed");
        };
        let words = ["Ten", "big", "dogs", "chase", "five", "small", "cats", "past", "three", "tall", "trees"];
        let whole = speech(&mut voice, utterance(&words.join(" ")));
        let begins = (1..words.len()).map(|changed| {
            let mut other = words;
            other[changed] = if changed % 2 == 0 { "bird" } else { "green" };
            let other = speech(&mut voice, utterance(&other.join(" ")));
            whole.iter().zip(&other).position(|(a, b)| (a - b).abs() > 0.005).expect("another word") as u64
        });
        let mut truth: Vec<u64> = begins.collect();
        let last = whole.iter().rposition(|sample| sample.abs() > 0.005).expect("sound");
        truth.push(last as u64);
        let told = utterance(&words.join(" "));
        let task = Task {
            manner: voice.manner(None, None, 1.0).expect("the default"),
            tokens: form::tokens(&told),
            length: Length::default(),
            words: WordTimes::default(),
            token: TurnToken::forever(),
        };
        let spoken_again = find(Path::new("espeak-ng"), &task, &AtomicBool::new(false));
        task.length.set(whole.len() as u64).expect("not told yet");
        let found = find(Path::new("espeak-ng"), &task, &AtomicBool::new(false)).expect("found");
        assert_eq!(spoken_again.as_ref(), Some(&found), "its own length says the same");
        assert_eq!(found.len(), words.len());
        let (mut exact, mut near, mut random) = (0, 0, 1u64);
        for _ in 0..500 {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let at = (random >> 33) % whole.len() as u64;
            let heard = found.iter().filter(|word| word.samples <= at).count();
            let really = truth.iter().filter(|end| **end <= at).count();
            exact += u32::from(heard == really);
            near += u32::from(heard.abs_diff(really) <= 1);
        }
        println!("{exact} of 500 exact, {near} within a word; found {found:?}, truth {truth:?}");
        assert!(near >= 495 && exact >= 350, "{exact} exact, {near} within a word: {found:?} / {truth:?}");
    }

    #[test]
    fn a_call_is_told_and_no_other_is() {
        let Ok(mut voice) = Espeak::new(Config::default()) else {
            return antiphon_skip::skip("espeak", "espeak-ng is not installed");
        };
        let told = utterance("Please hold the line.");
        let words = told.words.clone();
        assert!(!speech(&mut voice, told).is_empty());
        let (_open, never) = sync_channel::<()>(1);
        let mut waited = 0;
        while words.known().is_none() {
            waited += 1;
            assert!(waited < 6_000, "nothing was found in a minute");
            // Nothing comes: it waits.
            let _ = never.recv_timeout(Duration::from_millis(10));
        }
        let ends: Vec<usize> = words.known().into_iter().flatten().map(|word| word.text).collect();
        assert_eq!(ends, [6, 11, 15, 21]);
        voice.aligner.tasks = None;
        speech(&mut voice, utterance("Nobody reads the times of this."));
        assert!(voice.aligner.tasks.is_none(), "it was not asked for");
    }
}
