//! An engine that has said it all before.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};
use std::sync::{Mutex, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use crate::audio::RATE;
use crate::call::speech::{Refusal, Speech, StreamState};
use crate::clock;
use crate::media::bench;
use crate::turn::{SpeechEvent, SpeechSink, StreamId, Utterance, UtteranceEnd};

/// How far ahead of the listener it speaks.
const LEAD: Duration = Duration::from_secs(2);
/// Samples of one piece: 200 ms.
const CHUNK: usize = RATE as usize / 5;
/// Pieces of one utterance.
const CHUNKS: usize = 5;

/// Plays one second of canned speech for every utterance, paced like a scheduler with a lead limit.
pub(super) struct Canned {
    inbox: Mutex<mpsc::SyncSender<(Utterance, SpeechSink)>>,
}

struct Job {
    utterance: Utterance,
    sink: SpeechSink,
    chunk: usize,
}

impl Canned {
    pub(super) fn start() -> std::io::Result<Self> {
        let (inbox, work) = mpsc::sync_channel(4_096);
        // Ends when the handle is dropped.
        thread::Builder::new().name("canned".into()).spawn(move || run(&work))?;
        Ok(Self { inbox: Mutex::new(inbox) })
    }
}

impl Speech for Canned {
    fn submit(&self, utterance: Utterance, sink: SpeechSink) -> Result<(), Refusal> {
        let inbox = self.inbox.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        // overflow: refused
        inbox
            .try_send((utterance, sink))
            .map_err(|_| Refusal { retry_after: Duration::from_millis(100), reason: "full".into() })
    }

    fn note(&self, _stream: StreamId, _note: StreamState) {}
}

fn run(work: &mpsc::Receiver<(Utterance, SpeechSink)>) {
    let speech = bench::speech(CHUNK * CHUNKS / crate::audio::FRAME_SAMPLES);
    let mut jobs: HashMap<u64, Job> = HashMap::new();
    let mut due: BinaryHeap<Reverse<(Instant, u64)>> = BinaryHeap::new();
    // When the listener of each stream will have heard what was made so far.
    let mut heard: HashMap<StreamId, Instant> = HashMap::new();
    let mut number = 0;
    loop {
        let now = clock::now();
        while let Some(Reverse((at, id))) = due.peek().copied().filter(|Reverse((at, _))| *at <= now) {
            due.pop();
            let Some(mut job) = jobs.remove(&id) else { continue };
            if job.utterance.token.is_stale() {
                continue;
            }
            let pcm = speech[job.chunk * CHUNK..(job.chunk + 1) * CHUNK].to_vec();
            let utterance = job.utterance.id;
            // overflow: drops (the call counts the gap): a call that does not read is over
            let _ = job.sink.try_send(SpeechEvent::Audio { utterance, pcm });
            job.chunk += 1;
            let end = heard.entry(job.utterance.stream).or_insert(at);
            *end = (*end).max(now) + Duration::from_millis(200);
            if job.chunk == CHUNKS {
                // overflow: drops: as above
                let _ = job.sink.try_send(SpeechEvent::End { utterance, how: UtteranceEnd::Done });
                continue;
            }
            due.push(Reverse(((*end - LEAD).max(at), id)));
            jobs.insert(id, job);
        }
        let wait = due.peek().map_or(Duration::from_secs(1), |Reverse((at, _))| at.saturating_duration_since(now));
        match work.recv_timeout(wait) {
            Ok((utterance, sink)) => {
                let at = heard.get(&utterance.stream).map_or(now, |end| (*end - LEAD).max(now));
                number += 1;
                due.push(Reverse((at, number)));
                jobs.insert(number, Job { utterance, sink, chunk: 0 });
            }
            Err(mpsc::RecvTimeoutError::Timeout) => {}
            Err(mpsc::RecvTimeoutError::Disconnected) => return,
        }
    }
}
