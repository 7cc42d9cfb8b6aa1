//! One device for many recognitions: a thread that runs its steps.
//!
//! Each recognition runs on a thread of its own, as on the CPU, and asks for one step at a time; what is asked for while a
//! step runs is in the next one, together. So a batch needs no bookkeeping of its own, recognitions join and leave it with
//! every token, and the rules of decoding are written once. At most one request a recognition is there, which bounds all.
//!
//! A recognition may write several texts about its window side by side ([`Beams`]), as many as there are texts to spare; each of
//! them is a row of a step, as if it were another recognition's.
//!
//! Steps with tokens and shares of windows take turns: neither waits for more than one of the other. Before a step its
//! members give way to speech ([`Yielding`]).
//!
//! # Failures
//! A step that fails ends the recognitions in it. Once the device is lost all that were begun on it fail, each at its next
//! step; what becomes of them is their owner's.

use std::collections::VecDeque;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::HearError;
use super::engine::{Beams, Engine, Text};
use super::stop::Stop;
use crate::clock;
use crate::synth::Precedence;
pub(super) use crate::synth::cosyvoice::gpu::whisper::Word;
use crate::voice::features::Matrix;

/// How long a recognition gives way to first audio, all its steps together: a caller notices neither, and however many
/// turns begin it goes on.
const GIVE_WAY: Duration = Duration::from_millis(30);

/// What computes steps, each of which is bounded. One thread uses it.
pub(super) trait Machine: Send {
    /// No text is in use: whatever device is there now will do.
    fn renew(&mut self) {}

    /// Texts that can be in use.
    fn texts(&self) -> usize;

    /// Texts besides them, numbered behind them, that are about the window of another.
    fn spare(&self) -> usize;

    /// Tokens of one step.
    fn rows(&self) -> usize;

    /// Begins to listen to a window for `text`.
    fn open(&mut self, text: usize, features: &Matrix) -> Result<(), HearError>;

    /// Goes on with it; whether it has been heard.
    fn listen(&mut self) -> Result<bool, HearError>;

    /// Gives text `to` the first `length` tokens of text `from`.
    fn copy(&mut self, from: usize, to: usize, length: usize) -> Result<(), HearError>;

    /// Scores behind the scored words, in order.
    fn write(&mut self, words: &[Word]) -> Result<Vec<Vec<f32>>, HearError>;

    /// States of the window that was heard last.
    fn states(&mut self) -> Result<Vec<f32>, HearError>;

    /// Has `text` be about these states.
    fn about(&mut self, text: usize, states: &[f32]) -> Result<(), HearError>;
}

/// A text on the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Place {
    text: usize,
    /// Which device, of those that were lost one after the other.
    device: u64,
}

type Reply<T> = SyncSender<Result<T, HearError>>;

/// What a new text is about.
enum About {
    Window(Matrix, Stop),
    States(Vec<f32>),
}

struct Begin {
    about: About,
    /// Also the states are wanted.
    states: bool,
    reply: Reply<Option<(Place, Vec<f32>)>>,
}

struct Write {
    place: Place,
    /// Before that: from which text to which, and how many tokens.
    copies: Vec<(usize, usize, usize)>,
    words: Vec<Word>,
    reply: Reply<Vec<Vec<f32>>>,
}

/// What is asked for.
#[derive(Default)]
struct Queue {
    begins: VecDeque<Begin>,
    writes: VecDeque<Write>,
    /// Texts in use.
    taken: Vec<bool>,
    /// And of those besides.
    spare: Vec<bool>,
    /// Devices lost so far.
    lost: u64,
    closed: bool,
}

struct Shared {
    queue: Mutex<Queue>,
    work: Condvar,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Queue> {
        // Whole requests are put in and taken out.
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Asks, and waits for the answer.
    fn ask<T>(&self, add: impl FnOnce(&mut Queue, Reply<T>)) -> Result<T, HearError> {
        let (reply, answer): (_, Receiver<Result<T, HearError>>) = sync_channel(1);
        let mut queue = self.lock();
        if queue.closed {
            return Err(HearError::Lost("the recogniser has stopped".into()));
        }
        add(&mut queue, reply);
        drop(queue);
        self.work.notify_one();
        answer.recv().unwrap_or_else(|_| Err(HearError::Lost("the recogniser has stopped".into())))
    }
}

/// How far recognitions have given way, by their texts. All of a step wait for as long as the least patient of them may.
#[derive(Debug, Default)]
pub(super) struct Yielding(Vec<Duration>);

impl Yielding {
    /// A recognition begins with `text`.
    pub(super) fn begin(&mut self, text: usize) {
        self.0.resize(self.0.len().max(text + 1), Duration::ZERO);
        self.0[text] = Duration::ZERO;
    }

    /// Until when a step of these may wait.
    pub(super) fn until(&self, now: Instant, texts: impl Iterator<Item = usize>) -> Instant {
        let given = texts.filter_map(|text| self.0.get(text)).max().copied();
        now + GIVE_WAY.saturating_sub(given.unwrap_or_default())
    }

    /// They have waited so long.
    pub(super) fn waited(&mut self, waited: Duration, texts: impl Iterator<Item = usize>) {
        for text in texts {
            if let Some(given) = self.0.get_mut(text) {
                *given += waited;
            }
        }
    }
}

/// A device's steps, for any number of threads.
pub(super) struct Steps {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

impl Steps {
    /// Starts the thread.
    pub(super) fn start(machine: Box<dyn Machine>, precedence: Option<Arc<Precedence>>) -> std::io::Result<Self> {
        let shared = Arc::new(Shared { queue: Mutex::default(), work: Condvar::new() });
        let server =
            Server { shared: shared.clone(), machine, precedence, yielding: Yielding::default(), window: None };
        let thread = std::thread::Builder::new().name("hear-steps".into()).spawn(move || server.run())?;
        Ok(Self { shared, thread: Some(thread) })
    }

    fn begin(&self, about: About, states: bool) -> Result<Option<(Written<'_>, Vec<f32>)>, HearError> {
        let begun = self.shared.ask(|queue, reply| queue.begins.push_back(Begin { about, states, reply }))?;
        Ok(begun.map(|(place, states)| (Written { shared: &self.shared, place, length: 0 }, states)))
    }
}

impl Drop for Steps {
    fn drop(&mut self) {
        self.shared.lock().closed = true;
        self.shared.work.notify_all();
        if let Some(thread) = self.thread.take() {
            // A panic in it was reported when it happened, and there are no more requests.
            let _ = thread.join();
        }
    }
}

impl Engine for Steps {
    fn hear<'a>(&'a self, features: Matrix, stop: &Stop) -> Result<Option<Box<dyn Text + 'a>>, HearError> {
        let begun = self.begin(About::Window(features, stop.clone()), false)?;
        Ok(begun.map(|(text, _)| -> Box<dyn Text + 'a> { Box::new(text) }))
    }

    fn states(&self, features: Matrix, stop: &Stop) -> Result<Option<Vec<f32>>, HearError> {
        Ok(self.begin(About::Window(features, stop.clone()), true)?.map(|(_, states)| states))
    }

    fn about<'a>(&'a self, states: &[f32]) -> Result<Box<dyn Text + 'a>, HearError> {
        match self.begin(About::States(states.to_vec()), false)? {
            Some((text, _)) => Ok(Box::new(text)),
            None => Err(HearError::Lost("it was stopped".into())),
        }
    }
}

/// A text, freed when dropped.
struct Written<'a> {
    shared: &'a Shared,
    place: Place,
    length: usize,
}

impl Written<'_> {
    fn write(&mut self, tokens: &[u32], all: bool) -> Result<Vec<Vec<f32>>, HearError> {
        let (place, from) = (self.place, self.length);
        let word = |(n, token): (usize, &u32)| {
            let scored = all || n + 1 == tokens.len();
            Word { text: place.text, window: place.text, position: from + n, token: *token, scored }
        };
        let (words, copies) = (tokens.iter().enumerate().map(word).collect(), Vec::new());
        let scores = self.shared.ask(|queue, reply| queue.writes.push_back(Write { place, copies, words, reply }))?;
        self.length += tokens.len();
        Ok(scores)
    }
}

impl Drop for Written<'_> {
    fn drop(&mut self) {
        let mut queue = self.shared.lock();
        if queue.lost == self.place.device
            && let Some(taken) = queue.taken.get_mut(self.place.text)
        {
            *taken = false;
        }
        drop(queue);
        self.shared.work.notify_one();
    }
}

impl Text for Written<'_> {
    fn len(&self) -> usize {
        self.length
    }

    fn rewind(&mut self, length: usize) -> Result<(), HearError> {
        // What lies behind is written over before it is read.
        self.length = self.length.min(length);
        Ok(())
    }

    fn next(&mut self, tokens: &[u32]) -> Result<Vec<f32>, HearError> {
        let scores = self.write(tokens, false)?.pop();
        scores.ok_or_else(|| HearError::Lost("a step gave no scores".into()))
    }

    fn each(&mut self, tokens: &[u32]) -> Result<Vec<f32>, HearError> {
        Ok(self.write(tokens, true)?.concat())
    }

    fn beams(&self, width: usize) -> Option<Box<dyn Beams + '_>> {
        let mut queue = self.shared.lock();
        // What lies behind the text's own tokens is free: it is one of them.
        let (besides, first) = (width.saturating_sub(1), queue.taken.len());
        let free: Vec<usize> = (0..queue.spare.len()).filter(|n| !queue.spare[*n]).take(besides).collect();
        if queue.lost != self.place.device || free.len() < besides {
            return None;
        }
        free.iter().for_each(|n| queue.spare[*n] = true);
        let slots = std::iter::once(self.place.text).chain(free.iter().map(|n| first + n)).collect();
        Some(Box::new(Side { of: self, slots, texts: vec![self.place.text], length: self.length, first }))
    }
}

/// Texts side by side about one window, given back when dropped.
struct Side<'a> {
    of: &'a Written<'a>,
    /// Where they may be.
    slots: Vec<usize>,
    /// Where they are.
    texts: Vec<usize>,
    /// Tokens of each.
    length: usize,
    /// The first text of those besides.
    first: usize,
}

impl Beams for Side<'_> {
    fn next(&mut self, from: &[(usize, u32)]) -> Result<Vec<Vec<f32>>, HearError> {
        let (places, copies) = succeed(&self.texts, &self.slots, from.iter().map(|(parent, _)| *parent));
        let copies = copies.into_iter().map(|(from, to)| (from, to, self.length)).collect();
        let place = self.of.place;
        let word = |(text, (_, token)): (&usize, &(usize, u32))| Word {
            text: *text,
            window: place.text,
            position: self.length,
            token: *token,
            scored: true,
        };
        let words = places.iter().zip(from).map(word).collect();
        let scores =
            self.of.shared.ask(|queue, reply| queue.writes.push_back(Write { place, copies, words, reply }))?;
        self.texts = places;
        self.length += 1;
        Ok(scores)
    }
}

impl Drop for Side<'_> {
    fn drop(&mut self) {
        let mut queue = self.of.shared.lock();
        if queue.lost == self.of.place.device {
            for slot in self.slots.iter().filter(|slot| **slot >= self.first) {
                if let Some(taken) = queue.spare.get_mut(slot - self.first) {
                    *taken = false;
                }
            }
        }
    }
}

/// Where the successors of `texts` are to be, each given by the one that it goes on from, and what is to be copied for it, all before
/// anything is written: the first of a text's successors stays in its place, the others take places that no successor needs.
fn succeed(
    texts: &[usize],
    slots: &[usize],
    parents: impl Iterator<Item = usize>,
) -> (Vec<usize>, Vec<(usize, usize)>) {
    let parents: Vec<usize> = parents.map(|parent| texts[parent]).collect();
    let mut free = slots.iter().filter(|slot| !parents.contains(slot));
    let mut copies = Vec::new();
    let places = parents.iter().enumerate().map(|(n, parent)| {
        if !parents[..n].contains(parent) {
            return *parent;
        }
        let to = *free.next().expect("as many places as texts");
        copies.push((*parent, to));
        to
    });
    (places.collect(), copies)
}

/// A window that is being listened to.
struct Window {
    begin: Begin,
    place: Place,
}

/// The thread's.
struct Server {
    shared: Arc<Shared>,
    machine: Box<dyn Machine>,
    precedence: Option<Arc<Precedence>>,
    yielding: Yielding,
    window: Option<Window>,
}

impl Server {
    fn run(mut self) {
        while self.wait() {
            let writes = self.writes();
            if !writes.is_empty() {
                self.write(writes);
            }
            if self.window.is_none() {
                self.open();
            }
            if self.window.is_some() {
                self.listen();
            }
        }
    }

    /// Waits for something to do; `false`: there will be nothing more.
    fn wait(&self) -> bool {
        let mut queue = self.shared.lock();
        loop {
            if queue.closed {
                // Requests that still wait learn of it as their channels close.
                queue.begins.clear();
                queue.writes.clear();
                return false;
            }
            let room = queue.taken.iter().any(|taken| !taken) || queue.taken.len() < self.machine.texts().max(1);
            if self.window.is_some() || !queue.writes.is_empty() || (room && !queue.begins.is_empty()) {
                return true;
            }
            queue = self.shared.work.wait(queue).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Gives way to speech before a step of these texts.
    fn give_way(&mut self, texts: &[usize]) {
        let Some(precedence) = &self.precedence else { return };
        let from = clock::now();
        precedence.give_way(self.yielding.until(from, texts.iter().copied()));
        self.yielding.waited(clock::now().saturating_duration_since(from), texts.iter().copied());
    }

    /// The requests of the next step with tokens: as many as it has room for, in their order.
    fn writes(&mut self) -> Vec<Write> {
        let texts: Vec<usize> = self.shared.lock().writes.iter().map(|write| write.place.text).collect();
        if texts.is_empty() {
            return Vec::new();
        }
        self.give_way(&texts);
        let mut queue = self.shared.lock();
        let (mut all, mut room) = (Vec::new(), self.machine.rows());
        // One that has more than a step's room goes alone, in pieces.
        while let Some(write) = queue.writes.pop_front_if(|write| write.words.len() <= room || all.is_empty()) {
            room = room.saturating_sub(write.words.len());
            all.push(write);
        }
        all
    }

    fn write(&mut self, writes: Vec<Write>) {
        let current = self.shared.lock().lost;
        let (writes, stale): (Vec<_>, Vec<_>) = writes.into_iter().partition(|w| w.place.device == current);
        for write in stale {
            answer(&write.reply, Err(HearError::Lost("the device was lost".into())));
        }
        let mut scores = match self.step(&writes) {
            Ok(scores) => scores.into_iter(),
            Err(error) => {
                let reason = error.to_string();
                self.failed(&error);
                for write in writes {
                    answer(&write.reply, Err(HearError::Lost(reason.clone())));
                }
                return;
            }
        };
        for write in writes {
            let count = write.words.iter().filter(|word| word.scored).count();
            answer(&write.reply, Ok(scores.by_ref().take(count).collect()));
        }
    }

    /// What these ask for, together; scores in their order.
    fn step(&mut self, writes: &[Write]) -> Result<Vec<Vec<f32>>, HearError> {
        for (from, to, length) in writes.iter().flat_map(|write| write.copies.iter().copied()) {
            self.machine.copy(from, to, length)?;
        }
        let words: Vec<Word> = writes.iter().flat_map(|write| write.words.iter().copied()).collect();
        let mut scores = Vec::new();
        for piece in words.chunks(self.machine.rows().max(1)) {
            scores.extend(self.machine.write(piece)?);
        }
        Ok(scores)
    }

    /// Begins with the next window, if there is one and a text for it.
    fn open(&mut self) {
        let mut queue = self.shared.lock();
        if !queue.taken.contains(&true) {
            self.machine.renew();
        }
        let texts = self.machine.texts();
        queue.taken.resize(texts, false);
        queue.spare.resize(self.machine.spare(), false);
        let Some(begin) = queue.begins.pop_front() else { return };
        if texts == 0 {
            drop(queue);
            answer(&begin.reply, Err(HearError::Lost("the GPU is not there now".into())));
            return;
        }
        let Some(text) = queue.taken.iter().position(|taken| !taken) else {
            return queue.begins.push_front(begin);
        };
        if matches!(&begin.about, About::Window(_, stop) if stop.is_set()) {
            drop(queue);
            answer(&begin.reply, Ok(None));
            return;
        }
        queue.taken[text] = true;
        let place = Place { text, device: queue.lost };
        drop(queue);
        self.yielding.begin(text);
        self.give_way(&[text]);
        let opened = match &begin.about {
            About::Window(features, _) => self.machine.open(text, features),
            About::States(states) => self.machine.about(text, states),
        };
        match opened {
            Err(error) => self.end(&Window { begin, place }, Err(error)),
            Ok(()) if matches!(begin.about, About::States(_)) => {
                answer(&begin.reply, Ok(Some((place, Vec::new()))));
            }
            Ok(()) => self.window = Some(Window { begin, place }),
        }
    }

    /// Goes on with the window by one share.
    fn listen(&mut self) {
        let Some(window) = self.window.take() else { return };
        if matches!(&window.begin.about, About::Window(_, stop) if stop.is_set()) {
            return self.end(&window, Ok(None));
        }
        self.give_way(&[window.place.text]);
        match self.machine.listen() {
            Err(error) => self.end(&window, Err(error)),
            Ok(false) => self.window = Some(window),
            Ok(true) => {
                let states = if window.begin.states { self.machine.states() } else { Ok(Vec::new()) };
                let result = states.map(|states| Some((window.place, states)));
                self.end(&window, result);
            }
        }
    }

    /// Answers for a window; its text is given back unless it was begun.
    fn end(&mut self, window: &Window, result: Result<Option<(Place, Vec<f32>)>, HearError>) {
        if let Err(error) = &result {
            self.failed(error);
        }
        let begun = matches!(result, Ok(Some(_)));
        let told = answer(&window.begin.reply, result);
        if !(begun && told) {
            let mut queue = self.shared.lock();
            if queue.lost == window.place.device
                && let Some(taken) = queue.taken.get_mut(window.place.text)
            {
                *taken = false;
            }
        }
    }

    /// After an error: whether it is the device's, on which no text is of any use then.
    fn failed(&mut self, error: &HearError) {
        if matches!(error, HearError::Lost(_)) {
            let mut queue = self.shared.lock();
            queue.lost += 1;
            queue.taken.clear();
            queue.spare.clear();
            self.window = None;
        }
    }
}

/// Whether somebody took the answer.
fn answer<T>(reply: &Reply<T>, result: Result<T, HearError>) -> bool {
    // overflow: one answer in a channel of one; an error means that the request was given up.
    reply.try_send(result).is_ok()
}

#[cfg(test)]
mod tests {
    use std::path::{Path, PathBuf};

    use super::super::{Options, Whisper};
    use super::*;

    fn folder() -> PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/whisper")
    }

    /// A device that is this CPU, and what happens to it.
    struct OnCpu {
        engine: &'static dyn Engine,
        texts: Vec<Option<Box<dyn Text>>>,
        /// Tokens of every text, those besides too.
        tokens: Vec<Vec<u32>>,
        /// Of each window, the text that was written last.
        last: Vec<usize>,
        window: Option<(usize, Matrix)>,
        /// Steps with tokens so far.
        writes: Arc<Mutex<Vec<usize>>>,
        /// Is set in the step with that number.
        stop: Option<(usize, Stop)>,
        /// Is lost in that step.
        lost: Option<usize>,
    }

    impl OnCpu {
        fn new(count: usize) -> Self {
            let whisper: &'static Whisper = Box::leak(Box::new(Whisper::load(&folder()).expect("the kit loads")));
            let texts = (0..count).map(|_| None).collect();
            let (tokens, last, writes) = (vec![Vec::new(); count], (0..count).collect(), Arc::default());
            Self { engine: &*whisper.engine, texts, tokens, last, window: None, writes, stop: None, lost: None }
        }

        /// The same with so many texts besides.
        fn beside(mut self, spare: usize) -> Self {
            self.tokens.resize(self.texts.len() + spare, Vec::new());
            self
        }

        fn whisper(self) -> Whisper {
            let mut whisper = Whisper::load(&folder()).expect("the kit loads");
            whisper.engine = Box::new(Steps::start(Box::new(self), None).expect("a thread"));
            whisper
        }
    }

    impl Machine for OnCpu {
        fn texts(&self) -> usize {
            self.texts.len()
        }

        fn spare(&self) -> usize {
            self.tokens.len() - self.texts.len()
        }

        fn rows(&self) -> usize {
            3
        }

        fn open(&mut self, text: usize, features: &Matrix) -> Result<(), HearError> {
            self.texts[text] = None;
            self.window = Some((text, features.clone()));
            Ok(())
        }

        fn listen(&mut self) -> Result<bool, HearError> {
            let (text, features) = self.window.take().expect("a window is open");
            self.texts[text] = self.engine.hear(features, &Stop::default())?;
            (self.tokens[text], self.last[text]) = (Vec::new(), text);
            Ok(true)
        }

        fn copy(&mut self, from: usize, to: usize, length: usize) -> Result<(), HearError> {
            self.tokens[to] = self.tokens[from][..length].to_vec();
            Ok(())
        }

        fn write(&mut self, words: &[Word]) -> Result<Vec<Vec<f32>>, HearError> {
            assert!(words.len() <= self.rows());
            let step = {
                let mut writes = self.writes.lock().expect("unpoisoned");
                writes.push(words.len());
                writes.len()
            };
            if let Some((_, stop)) = self.stop.as_ref().filter(|(at, _)| *at == step) {
                stop.set();
            }
            if self.lost == Some(step) {
                return Err(HearError::Lost("it fell off the bus".into()));
            }
            let mut scores = Vec::new();
            for word in words {
                let text = self.texts[word.window].as_mut().expect("its window was heard");
                let tokens = &mut self.tokens[word.text];
                assert!(tokens.len() >= word.position, "nothing is left out");
                tokens.truncate(word.position);
                tokens.push(word.token);
                let after = if std::mem::replace(&mut self.last[word.window], word.text) == word.text {
                    text.rewind(word.position)?;
                    text.next(&[word.token])?
                } else {
                    text.rewind(0)?;
                    text.next(tokens)?
                };
                if word.scored {
                    scores.push(after);
                }
            }
            Ok(scores)
        }

        fn states(&mut self) -> Result<Vec<f32>, HearError> {
            Ok(Vec::new())
        }

        fn about(&mut self, text: usize, states: &[f32]) -> Result<(), HearError> {
            self.texts[text] = Some(self.engine.about(states)?);
            (self.tokens[text], self.last[text]) = (Vec::new(), text);
            Ok(())
        }
    }

    /// Half a second each.
    fn sounds(count: usize) -> Vec<Vec<f32>> {
        let reader = hound::WavReader::open(folder().join("audio.wav")).expect("there");
        let all: Vec<f32> = reader.into_samples::<i16>().map(|s| crate::audio::from_i16(s.expect("whole"))).collect();
        (0..count).map(|n| all[n * 9_000..n * 9_000 + 8_000].to_vec()).collect()
    }

    #[test]
    fn many_at_once_get_what_each_gets_alone_and_more_than_there_are_texts_wait() {
        let sounds = sounds(5);
        let alone = Whisper::load(&folder()).expect("the kit loads");
        let hear = |whisper: &Whisper, sound: &[f32]| {
            whisper.transcribe(sound, &Options::default(), &Stop::default()).expect("it works").expect("not stopped")
        };
        let expected: Vec<_> = sounds.iter().map(|sound| hear(&alone, sound)).collect();
        let shared = OnCpu::new(3).whisper();
        let heard: Vec<_> = std::thread::scope(|scope| {
            let all: Vec<_> = sounds.iter().map(|sound| scope.spawn(|| hear(&shared, sound))).collect();
            all.into_iter().map(|one| one.join().expect("it ends")).collect()
        });
        assert_eq!(heard, expected);
    }

    #[test]
    fn several_texts_side_by_side_are_what_they_are_on_the_cpu_and_without_room_the_likeliest_token_counts() {
        let sounds = sounds(5);
        let alone = Whisper::load(&folder()).expect("the kit loads");
        let hear = |whisper: &Whisper, sound: &[f32], beams: usize| {
            let options = Options { beams, ..Options::default() };
            let heard = whisper.transcribe(sound, &options, &Stop::default()).expect("it works");
            heard.expect("not stopped").text
        };
        let of = |beams: usize| sounds.iter().map(|sound| hear(&alone, sound, beams)).collect::<Vec<_>>();
        let (beside, likeliest) = (of(4), of(1));
        assert!(beside != likeliest, "it makes a difference");
        // At most two of them have room at a time, and what one has had it gives back.
        let shared = OnCpu::new(3).beside(6).whisper();
        for sound in 0..5 {
            assert_eq!(hear(&shared, &sounds[sound], 4), beside[sound], "{sound}");
        }
        let heard: Vec<_> = std::thread::scope(|scope| {
            let all: Vec<_> = sounds.iter().map(|sound| scope.spawn(|| hear(&shared, sound, 4))).collect();
            all.into_iter().map(|one| one.join().expect("it ends")).collect()
        });
        for ((heard, beside), likeliest) in heard.iter().zip(&beside).zip(&likeliest) {
            assert!(heard == beside || heard == likeliest, "{heard:?}");
        }
        let none = OnCpu::new(1).beside(2).whisper();
        assert_eq!(hear(&none, &sounds[0], 4), likeliest[0]);
    }

    #[test]
    fn a_successor_takes_a_place_whose_text_has_none() {
        let slots = [7, 20, 21, 22];
        assert_eq!(succeed(&[7], &slots, [0, 0, 0].into_iter()), (vec![7, 20, 21], vec![(7, 20), (7, 21)]));
        // The second of the first, twice the third: where the first was is free.
        let (places, copies) = succeed(&[7, 20, 21], &slots, [2, 1, 2, 2].into_iter());
        assert_eq!((places, copies), (vec![21, 20, 7, 22], vec![(21, 7), (21, 22)]));
    }

    #[test]
    fn one_that_is_stopped_in_the_middle_gives_its_text_back() {
        let stop = Stop::default();
        let machine = OnCpu { stop: Some((4, stop.clone())), ..OnCpu::new(1) };
        let writes = machine.writes.clone();
        let whisper = machine.whisper();
        let sound = &sounds(1)[0];
        assert_eq!(whisper.transcribe(sound, &Options::default(), &stop).expect("it works"), None);
        assert_eq!(writes.lock().expect("unpoisoned").len(), 4, "no step after the one in which it was stopped");
        // The only text: a recognition that comes next would wait for ever.
        assert!(whisper.transcribe(sound, &Options::default(), &Stop::default()).expect("it works").is_some());
    }

    #[test]
    fn what_was_begun_on_a_device_that_is_lost_fails_and_what_comes_next_does_not() {
        let whisper = OnCpu { lost: Some(3), ..OnCpu::new(1) }.whisper();
        let sound = &sounds(1)[0];
        let hear = || whisper.transcribe(sound, &Options::default(), &Stop::default());
        let lost = hear().expect_err("lost").to_string();
        assert!(lost.contains("fell off the bus"), "{lost}");
        assert!(hear().expect("it works").is_some());
    }

    /// First audio of 17 ms again and again, 3 ms apart; recognitions of twenty steps of a millisecond come all the time.
    #[test]
    fn recognition_gives_way_to_first_audio_and_is_not_held_up_for_long() {
        let start = clock::now();
        let ms = |n: u64| Duration::from_millis(n);
        let busy_until = |now: Instant| {
            let into = now.duration_since(start).as_millis() as u64 % 20;
            (into < 17).then(|| now + ms(17 - into))
        };
        let (mut yielding, mut now, mut beside, mut steps) = (Yielding::default(), start, 0, 0);
        for recognition in 0..50 {
            yielding.begin(0);
            let (began, mut given) = (now, Duration::ZERO);
            for _ in 0..20 {
                let until = yielding.until(now, [0].into_iter());
                let waited = busy_until(now).map_or(now, |free| free.min(until)) - now;
                yielding.waited(waited, [0].into_iter());
                (now, given) = (now + waited, given + waited);
                beside += u32::from(busy_until(now).is_some());
                steps += 1;
                now += ms(1);
            }
            assert!(given <= GIVE_WAY && now - began <= GIVE_WAY + ms(20), "{recognition}: {given:?}");
        }
        // Alone it would have been beside first audio for 17 of 20 steps.
        assert!(beside * 20 < steps * 17, "{beside} of {steps}");
    }

    #[test]
    fn the_least_patient_of_a_step_decides() {
        let (mut yielding, now) = (Yielding::default(), clock::now());
        yielding.begin(0);
        yielding.begin(1);
        yielding.waited(Duration::from_millis(20), [1].into_iter());
        assert_eq!(yielding.until(now, [0].into_iter()), now + GIVE_WAY);
        assert_eq!(yielding.until(now, [0, 1].into_iter()), now + GIVE_WAY - Duration::from_millis(20));
        yielding.waited(GIVE_WAY, [0, 1].into_iter());
        assert_eq!(yielding.until(now, [1].into_iter()), now);
        yielding.begin(1);
        assert_eq!(yielding.until(now, [1].into_iter()), now + GIVE_WAY);
    }
}
