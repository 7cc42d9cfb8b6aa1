//! A voice that is watched, and that fails when it is told to: the tone behind a wrapper that keeps count.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering::SeqCst};
use std::sync::{Arc, Mutex, PoisonError};

use antiphon::synth::device::Loader;
use antiphon::synth::tone::Tone;
use antiphon::synth::{Caps, Memory, Need, Progress, Seeds, Slot, Stages, Step, SynthError, Synthesizer, VoiceInfo};
use antiphon::turn::{TurnToken, Utterance};

/// What an open utterance is taken to hold.
const BYTES: u64 = 1 << 20;

/// What is counted, and what is to go wrong.
#[derive(Default)]
pub(crate) struct Watch {
    /// Steps run.
    pub(crate) steps: AtomicU64,
    /// Most steps that an utterance got after nobody wanted it any more.
    pub(crate) for_nobody: AtomicU32,
    /// Bytes of open utterances.
    pub(crate) used: AtomicU64,
    /// The device fails after so many steps; 0: never.
    fails_after: AtomicU64,
    /// It failed, and cannot be loaded again.
    gone: AtomicBool,
    /// Steps do not come back.
    pub(crate) hangs: AtomicBool,
    /// It is loaded, and fails at the first it is to say.
    cold: AtomicBool,
    open: Mutex<HashMap<Slot, (TurnToken, u32)>>,
}

impl Watch {
    pub(crate) fn failing_after(steps: u64) -> Arc<Self> {
        let watch = Self::default();
        watch.fails_after.store(steps, SeqCst);
        Arc::new(watch)
    }

    pub(crate) fn never_warm() -> Arc<Self> {
        let watch = Self::default();
        watch.cold.store(true, SeqCst);
        Arc::new(watch)
    }

    pub(crate) fn loader(self: &Arc<Self>) -> Loader {
        let watch = self.clone();
        Box::new(move || {
            if watch.gone.load(SeqCst) {
                return Err(SynthError::Device("still gone".into()));
            }
            Ok(Box::new(Watched { tone: Tone::new(), watch: watch.clone() }))
        })
    }

    fn open(&self) -> std::sync::MutexGuard<'_, HashMap<Slot, (TurnToken, u32)>> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

struct Watched {
    tone: Tone,
    watch: Arc<Watch>,
}

impl Synthesizer for Watched {
    fn caps(&self) -> &Caps {
        self.tone.caps()
    }

    fn voices(&self) -> Vec<VoiceInfo> {
        self.tone.voices()
    }

    fn open(&mut self, slot: Slot, utterance: &Utterance) -> Result<Stages, SynthError> {
        let ready = self.tone.open(slot, utterance)?;
        self.watch.open().insert(slot, (utterance.token.clone(), 0));
        self.watch.used.fetch_add(BYTES, SeqCst);
        Ok(ready)
    }

    fn run(&mut self, step: &Step, out: &mut Vec<Progress>) -> Result<(), SynthError> {
        while self.watch.hangs.load(SeqCst) {
            std::thread::park_timeout(std::time::Duration::from_millis(5));
        }
        let steps = self.watch.steps.fetch_add(1, SeqCst) + 1;
        let limit = self.watch.fails_after.load(SeqCst);
        if limit > 0 && steps > limit {
            self.watch.gone.store(true, SeqCst);
            return Err(SynthError::Device("it fell off the bus".into()));
        }
        for slot in &step.slots {
            if let Some((token, stale)) = self.watch.open().get_mut(slot)
                && token.is_stale()
            {
                *stale += 1;
                self.watch.for_nobody.fetch_max(*stale, SeqCst);
            }
        }
        self.tone.run(step, out)
    }

    fn close(&mut self, slot: Slot) {
        if self.watch.open().remove(&slot).is_some() {
            self.watch.used.fetch_sub(BYTES, SeqCst);
        }
        self.tone.close(slot);
    }

    fn memory(&self) -> Memory {
        Memory { total: 1 << 40, used: self.watch.used.load(SeqCst) }
    }

    fn prepare(&mut self, _: &Utterance) -> Result<Need, SynthError> {
        Ok(Need::exactly(BYTES))
    }

    fn warm_up(&mut self) -> Result<Seeds, SynthError> {
        if self.watch.cold.load(SeqCst) {
            return Err(SynthError::Device("no memory for its first step".into()));
        }
        self.tone.warm_up()
    }
}
