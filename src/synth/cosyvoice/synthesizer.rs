//! The slot state machine that makes a [`Backend`] a [`Synthesizer`].
//!
//! Owns what an utterance needs besides tensors: its segments, which tokens are out, where it stands in its hop
//! plan, what each stage has left to do. Nothing of one utterance is visible to another: hop sizes, random numbers
//! and thinning belong to the job.

mod ahead;
mod fit;
mod job;
mod named;
mod sound;
mod streamed;
mod warm_up;

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

use self::fit::Prepared;
use self::job::{push, take};
use self::streamed::TextStream;
use super::backend::{
    Backend, Decoded, FlowPrompt, Flowed, MinLength, Prefilled, Sampling, SlotRequest, Vocoded, VoiceHandle,
};
use super::config::Config;
use super::probe::Probe;
use super::prompt::{self, LlmInput};
use super::sample;
use super::schedule::{HopPlan, Hops};
use super::text::{Thinner, Tokenizer};
use super::voices::{Folders, SPK2INFO, spk2info};
use crate::synth::{
    Caps, Identity, Memory, Need, Precedence, Progress, Seeds, Slot, Stage, Stages, Step, SynthError, Synthesizer,
    TextOrder, VoiceInfo,
};
use crate::turn::{Markup, Saying, Utterance, UtteranceId};
use crate::voice::copies;
use crate::voice::enrol::LOUDNESS;
use crate::voice::file::Voice;
use crate::voice::loudness::{Leveller, factor};

/// Choices that are not the checkpoint's.
#[derive(Clone, Debug, PartialEq)]
pub struct Settings {
    /// When chunks are cut.
    pub hops: HopPlan,
    /// The minimum-length quirk.
    pub min_length: MinLength,
    /// Further folders of voices, before the checkpoint's own `voices`.
    pub voice_dirs: Vec<PathBuf>,
    /// The voice of utterances that name none; else the first by name.
    pub default_voice: Option<String>,
    /// How loud all voices are to be, in LUFS, of those whose loudness was measured; `None`: as they are.
    pub loudness: Option<f32>,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            hops: HopPlan::early(),
            min_length: MinLength::default(),
            voice_dirs: Vec::new(),
            default_voice: None,
            loudness: None,
        }
    }
}

/// CosyVoice3 on one device.
pub struct CosyVoice<B> {
    backend: B,
    caps: Caps,
    config: Config,
    tokenizer: Tokenizer,
    settings: Settings,
    folders: Folders,
    voices: BTreeMap<String, Known>,
    jobs: BTreeMap<Slot, Job>,
    /// Utterances that were accepted and not opened yet.
    prepared: HashMap<UtteranceId, Prepared>,
    forced: Option<u32>,
    /// Speech tokens of a text id, where nothing is forced.
    pace: Option<f64>,
    /// Rounds of the last step.
    ran: u32,
    /// The launched step, and its rounds.
    launched: Option<(Step, u32)>,
    /// What the checkpoint's files hold and how it was loaded, where that is found out.
    content: Option<(Arc<OnceLock<String>>, String)>,
    /// What the warm-up found: it is done once, whoever asks for it again.
    warm: Option<Seeds>,
}

struct Known {
    voice: Arc<Voice>,
    /// What the voice is, whatever it is called.
    id: String,
    handle: VoiceHandle,
    /// Ids before what is spoken where there are no instructions: encoding them for each utterance took a caller 0.1 ms, and
    /// four times that after a pause.
    before: Vec<u32>,
    /// See [`VoiceInfo::starts_after`].
    starts_after: Option<u32>,
    /// Brings it to the loudness of the others.
    level: Leveller,
}

/// One utterance.
struct Job {
    voice: VoiceHandle,
    prompt_tokens: u32,
    speed: f32,
    segments: VecDeque<Segment>,
    /// Samples of segments that are done.
    before: u64,
    now: Run,
    level: Leveller,
    /// Where the text comes from while it is being written; such a job has one segment.
    text: Option<TextStream>,
}

/// A segment to come.
struct Segment {
    input: LlmInput,
    key: [u32; 2],
}

/// Where the current segment stands.
struct Run {
    prefilled: bool,
    decoded: bool,
    thinner: Thinner,
    tokens: Vec<u32>,
    hops: Hops,
    /// Euler steps left for what was pushed.
    pending: u32,
    /// The block that completes the prompt was pushed before the rest of its chunk: `pending` does not count it, and its first
    /// Euler step has not run.
    ahead: bool,
    last_pushed: bool,
    /// Mel frames so far, and of those how many the vocoder has seen.
    frames: u32,
    vocoded: u32,
    finished: bool,
}

impl<B: Backend + Probe> CosyVoice<B> {
    /// Wraps a loaded backend; reads tokenizer and voices of the checkpoint in `dir`.
    ///
    /// # Errors
    /// The tokenizer cannot be built.
    pub fn new(backend: B, dir: &Path, config: Config, settings: Settings) -> Result<Self, SynthError> {
        let tokenizer = Tokenizer::load(dir).map_err(|e| SynthError::Device(e.to_string()))?;
        let (device, limits) = (backend.caps().device.clone(), backend.caps().limits.clone());
        let caps = Caps { name: "cosyvoice3", device, limits };
        let mut dirs = settings.voice_dirs.clone();
        dirs.push(dir.join("voices"));
        let mut this = Self {
            backend,
            caps,
            config,
            tokenizer,
            settings,
            folders: Folders::new(dirs),
            voices: BTreeMap::new(),
            jobs: BTreeMap::new(),
            prepared: HashMap::new(),
            forced: None,
            pace: None,
            ran: 1,
            launched: None,
            content: None,
            warm: None,
        };
        let saved = dir.join(SPK2INFO);
        if saved.exists() {
            match spk2info(&saved, &this.tokenizer, &this.config) {
                Ok((voices, refused)) => {
                    refused.iter().for_each(|r| tracing::warn!("{SPK2INFO}: {r}"));
                    voices.into_iter().for_each(|(name, voice)| this.take_voice(name, voice));
                }
                Err(error) => tracing::warn!("{error}"),
            }
        }
        this.refresh_voices();
        Ok(this)
    }

    /// Says what the checkpoint's files hold, once that is known, and how it was loaded: see [`Synthesizer::identity`].
    pub(super) fn identify(&mut self, content: Arc<OnceLock<String>>, loaded: String) {
        self.content = Some((content, loaded));
    }

    /// The backend, for comparing its stages.
    pub fn backend_mut(&mut self) -> &mut B {
        &mut self.backend
    }

    /// Makes every utterance `tokens` speech tokens long, whatever the model says, at the usual cost of each: for
    /// measuring with random weights.
    pub fn force_length(&mut self, tokens: Option<u32>) {
        self.forced = tokens;
    }

    /// Makes every utterance `tokens_per_id` speech tokens long for each of its text ids, as [`Self::force_length`] does:
    /// speech of the length that the text would have.
    pub fn force_pace(&mut self, tokens_per_id: Option<f64>) {
        self.pace = tokens_per_id;
    }

    /// Speech tokens that a segment of `spoken` text ids is made to have, if it is.
    fn forced_length(&self, spoken: u32) -> Option<u32> {
        self.forced.or_else(|| self.pace.map(|pace| (f64::from(spoken) * pace).ceil().max(1.0) as u32))
    }

    /// Prepares `slot` to speak given speech tokens in `voice` (voice conversion): no language model runs.
    ///
    /// # Errors
    /// An unknown voice, tokens out of range, or no memory.
    pub fn open_tokens(&mut self, slot: Slot, voice: Option<&str>, tokens: &[u32]) -> Result<Stages, SynthError> {
        let (_, known) = self.find_voice(voice)?;
        let (handle, prompt_tokens, level) = (known.handle, known.voice.tokens.len() as u32, known.level);
        let mut run = Run::new(&self.settings, &self.config, prompt_tokens);
        run.prefilled = true;
        run.decoded = true;
        run.tokens = tokens.to_vec();
        let sampling =
            Sampling { key: [0; 2], min_len: 0, max_len: 0, min_length: self.settings.min_length, forced: None };
        self.backend.prepare_voice(handle)?;
        self.backend.open(slot, SlotRequest { voice: handle, prefix: Vec::new(), sampling, speed: 1.0 })?;
        let job = Job {
            voice: handle,
            prompt_tokens,
            speed: 1.0,
            segments: VecDeque::new(),
            before: 0,
            now: run,
            level,
            text: None,
        };
        let job = self.jobs.entry(slot).insert_entry(job).into_mut();
        push(&mut self.backend, slot, &mut job.now)?;
        Ok(job.ready(self.backend.hold_back()))
    }

    /// The same voice under another name, or enrolled again, shares the flow prefix of the first.
    fn take_voice(&mut self, name: String, voice: Voice) {
        let before = match prompt::before(&self.tokenizer, &voice, None) {
            Ok(before) => before,
            Err(error) => return tracing::warn!("voice `{name}`: {error}"),
        };
        let id = voice.content_id();
        let there = self.voices.values().find(|known| known.id == id).map(|known| known.handle);
        let added = match there {
            Some(handle) => Ok(handle),
            None => self.backend.add_voice(Arc::new(FlowPrompt {
                tokens: voice.tokens.clone(),
                mel: voice.mel.clone(),
                speaker: voice.speaker.clone(),
            })),
        };
        match added {
            Ok(handle) => {
                let starts_after = self.starts_after(&voice, &before);
                let measured = voice.notes.get(LOUDNESS).and_then(|note| note.parse().ok());
                let factor = self.settings.loudness.zip(measured).map_or(1.0, |(wanted, is)| factor(wanted, is));
                let level = Leveller::new(factor);
                let known = Known { voice: Arc::new(voice), id, handle, before, starts_after, level };
                let old = self.voices.insert(name, known);
                self.release(old);
            }
            Err(error) => tracing::warn!("voice `{name}`: {error}"),
        }
    }

    /// Gives a voice up when the last of its names is gone.
    fn release(&mut self, old: Option<Known>) {
        if let Some(old) = old.filter(|old| self.voices.values().all(|known| known.handle != old.handle)) {
            self.backend.release_voice(old.handle);
        }
    }

    /// Opens the next segment of a job on the backend; without one the job is finished.
    fn start_segment(&mut self, slot: Slot) -> Result<(), SynthError> {
        let Some(job) = self.jobs.get(&slot) else { return Ok(()) };
        let length = job.segments.front().and_then(|segment| self.forced_length(segment.input.spoken));
        let Some(job) = self.jobs.get_mut(&slot) else { return Ok(()) };
        let mut run = Run::new(&self.settings, &self.config, job.prompt_tokens);
        let Some(segment) = job.segments.pop_front() else {
            run.prefilled = true;
            run.decoded = true;
            run.finished = true;
            job.now = run;
            return Ok(());
        };
        let codebook = self.config.llm.speech_tokens as u32;
        let forced =
            length.map(|count| (0..count).map(|i| sample::philox(segment.key, [i, 1, 0, 0])[0] % codebook).collect());
        let sampling = Sampling {
            key: segment.key,
            min_len: segment.input.min_len,
            max_len: length.unwrap_or(segment.input.max_len),
            min_length: self.settings.min_length,
            forced,
        };
        self.backend
            .open(slot, SlotRequest { voice: job.voice, prefix: segment.input.prefix, sampling, speed: job.speed })?;
        job.now = run;
        Ok(())
    }

    /// Rounds of `step` that are of use. A step ends as soon as a slot of which nothing was heard yet has the tokens of its
    /// first chunk, so that this chunk does not wait for others; else when no slot needs more for its next one.
    fn useful_rounds(&self, step: &Step) -> u32 {
        let jobs = step.slots.iter().filter_map(|slot| Some((*slot, self.jobs.get(slot)?)));
        let useful = match step.stage {
            Stage::Decode => {
                let wanted = |run: &Run| run.hops.wanted().saturating_sub(run.tokens.len() as u32);
                let left = |job: &Job| job.text.as_ref().map_or(u32::MAX, TextStream::left);
                let need = |job: &Job| wanted(&job.now).min(left(job)).max(1);
                let mute = |job: &Job| job.before == 0 && job.now.frames == 0 && job.now.pending == 0;
                let silent = jobs.clone().filter(|(_, job)| mute(job));
                let first = silent.map(|(_, job)| need(job)).min();
                first.or_else(|| jobs.map(|(_, job)| need(job)).max())
            }
            Stage::Flow => jobs.map(|(slot, _)| self.backend.flow_rounds(slot).max(1)).max(),
            Stage::Prefill | Stage::Vocode => None,
        };
        step.rounds.min(useful.unwrap_or(step.rounds))
    }

    fn run_stage(&mut self, step: &Step, results: &mut BTreeMap<Slot, Made>) -> Result<(), SynthError> {
        let slots = &step.slots;
        let rounds = self.useful_rounds(step);
        self.ran = rounds;
        match step.stage {
            Stage::Prefill => {
                let mut able = Vec::with_capacity(slots.len());
                for &slot in slots {
                    let Some(job) = self.jobs.get(&slot) else { continue };
                    let ready = self.backend.prepare_voice(job.voice).and_then(|()| self.start_stretch(slot));
                    match ready {
                        Ok(true) => able.push(slot),
                        Ok(false) => {}
                        Err(error @ SynthError::Device(_)) => return Err(error),
                        // No memory for this voice, or it cannot be spoken with: others can.
                        Err(error) => results.entry(slot).or_default().failed = Some(error),
                    }
                }
                let mut out: Vec<Prefilled> = Vec::with_capacity(able.len());
                if !able.is_empty() {
                    self.backend.prefill(&able, &mut out)?;
                }
                for result in out {
                    let made = results.entry(result.slot).or_default();
                    made.failed = result.failed;
                    let Some(job) = self.jobs.get_mut(&result.slot) else { continue };
                    job.now.prefilled = made.failed.is_none();
                    job.text.iter_mut().for_each(|text| text.run(made.failed.is_none()));
                    if job.text.is_none() && made.failed.is_none() {
                        made.failed =
                            take(&mut self.backend, result.slot, &mut job.now, &result.tokens, result.ended).err();
                    }
                }
            }
            Stage::Decode => {
                let (together, alone): (Vec<Slot>, Vec<Slot>) = slots.iter().partition(|slot| self.is_batched(**slot));
                for slot in alone {
                    results.entry(slot).or_default().failed = self.decode_streamed(slot)?;
                }
                let mut out: Vec<Decoded> = Vec::with_capacity(together.len());
                if let Some(slot) = self.ahead(&together) {
                    self.decode_ahead(slot, rounds, &mut out, results)?;
                } else if !together.is_empty() {
                    self.backend.decode(&together, rounds, &mut out)?;
                }
                for result in out {
                    let made = results.entry(result.slot).or_default();
                    made.failed = result.failed.or(made.failed.take());
                    let Some(job) = self.jobs.get_mut(&result.slot) else { continue };
                    if job.text.is_some() {
                        if made.failed.is_none() {
                            made.failed = self.take_stretch(result.slot, &result.tokens, result.ended).err();
                        }
                        continue;
                    }
                    if made.failed.is_none() {
                        made.failed =
                            take(&mut self.backend, result.slot, &mut job.now, &result.tokens, result.ended).err();
                    }
                }
            }
            Stage::Flow => {
                let mut out: Vec<Flowed> = Vec::with_capacity(slots.len());
                self.backend.flow(slots, rounds, &mut out)?;
                self.take_mel(out, results);
            }
            Stage::Vocode => {
                let open = self.unfinished(slots);
                let mut out: Vec<Vocoded> = Vec::with_capacity(open.len());
                self.backend.vocode(&open, &mut out)?;
                self.take_pcm(out, results);
            }
        }
        Ok(())
    }
}

/// What a stage made for a slot.
#[derive(Default)]
struct Made {
    pcm: Vec<f32>,
    chunk_rounds: Option<u32>,
    failed: Option<SynthError>,
}

impl<B: Backend + Probe> Synthesizer for CosyVoice<B> {
    fn caps(&self) -> &Caps {
        &self.caps
    }

    fn precedence(&self) -> Option<Arc<Precedence>> {
        self.backend.precedence()
    }

    fn voices(&self) -> Vec<VoiceInfo> {
        let first = self.settings.default_voice.as_deref();
        let mut names: Vec<&String> = self.voices.keys().collect();
        names.sort_by_key(|n| (copies::is_content(n), Some(n.as_str()) != first));
        let languages = |name: &String| {
            let tags = self.voices.get(name).and_then(|k| k.voice.notes.get("languages"));
            tags.map(|t| t.split(',').map(|t| t.trim().to_string()).collect()).unwrap_or_default()
        };
        let info = |name: &String| VoiceInfo {
            name: name.clone(),
            languages: languages(name),
            starts_after: self.voices.get(name).and_then(|known| known.starts_after),
        };
        names.into_iter().map(info).collect()
    }

    fn identity(&self) -> Option<Identity> {
        let (content, loaded) = self.content.clone()?;
        let Settings { hops, min_length, .. } = &self.settings;
        let settings = format!(
            "cosyvoice3 {} {loaded} {hops:?} {min_length:?} {:?} {:?}",
            self.backend.product(),
            self.forced,
            self.pace
        );
        let content_of = |info: VoiceInfo| {
            let known = self.voices.get(&info.name)?;
            Some((info.name, format!("{} {:?}", known.id, known.level)))
        };
        let voices: Vec<_> = self.voices().into_iter().filter_map(content_of).collect();
        // Without a voice nothing can be said; names would say nothing.
        (!voices.is_empty()).then(|| Identity::of_model(settings, content, voices))
    }

    fn open(&mut self, slot: Slot, utterance: &Utterance) -> Result<Stages, SynthError> {
        self.close(slot);
        let prepared = self.prepared.remove(&utterance.id);
        let (_, known) = self.find_voice(utterance.voice.as_deref())?;
        let segments = match prepared.filter(|prepared| prepared.voice == known.id) {
            Some(prepared) => prepared.segments,
            None => self.segments(utterance)?,
        };
        let (voice, prompt_tokens, level) = (known.handle, known.voice.tokens.len() as u32, known.level);
        let now = Run::new(&self.settings, &self.config, prompt_tokens);
        let silent = segments.is_empty();
        let job = Job { voice, prompt_tokens, speed: utterance.speed, segments, before: 0, now, level, text: None };
        self.jobs.insert(slot, job);
        if let Err(error) = self.start_segment(slot) {
            self.close(slot);
            return Err(error);
        }
        Ok(if silent { Stages::NONE.with(Stage::Vocode) } else { Stages::NONE.with(Stage::Prefill) })
    }

    fn open_streamed(&mut self, slot: Slot, utterance: &Utterance, order: TextOrder) -> Result<Stages, SynthError> {
        self.open_text(slot, utterance, order)
    }

    fn append(&mut self, slot: Slot, said: &Saying, last: bool) -> Result<Stages, SynthError> {
        self.append_text(slot, said, last)
    }

    fn run(&mut self, step: &Step, out: &mut Vec<Progress>) -> Result<(), SynthError> {
        let mut results = BTreeMap::new();
        self.run_stage(step, &mut results)?;
        self.report(step, results, out);
        Ok(())
    }

    fn launch(&mut self, step: &Step) -> Result<bool, SynthError> {
        self.launch_sound(step)
    }

    fn poll(&mut self) -> Result<bool, SynthError> {
        self.backend.poll()
    }

    fn complete(&mut self, out: &mut Vec<Progress>) -> Result<(), SynthError> {
        self.complete_sound(out)
    }

    fn rounds_run(&self) -> Option<u32> {
        Some(self.ran)
    }

    fn close(&mut self, slot: Slot) {
        self.jobs.remove(&slot);
        self.backend.close(slot);
    }

    fn park(&mut self, slot: Slot) {
        self.backend.park(slot);
    }

    fn memory(&self) -> Memory {
        self.backend.memory()
    }

    fn memory_parts(&self) -> Vec<(&'static str, u64)> {
        self.backend.memory_parts()
    }

    fn rehearse(&mut self) -> Result<(), SynthError> {
        // The 8 ids of a short sentence take 124 us where the processor did other things meanwhile, and 25 us behind this.
        let _ = self.tokenizer.encode_words("Of course, it is open on Monday.", Markup::None);
        self.backend.rehearse()
    }

    fn prepare(&mut self, utterance: &Utterance) -> Result<Need, SynthError> {
        if utterance.streamed {
            return self.need_streamed(utterance);
        }
        let segments = self.segments(utterance)?;
        let need = self.need(&segments);
        let voice = self.find_voice(utterance.voice.as_deref())?.1.id.clone();
        self.prepared.insert(utterance.id, Prepared { voice, segments });
        Ok(need)
    }

    fn forget(&mut self, utterance: UtteranceId) {
        self.prepared.remove(&utterance);
    }

    fn warm_up(&mut self) -> Result<Seeds, SynthError> {
        if let Some(seeds) = &self.warm {
            return Ok(seeds.clone());
        }
        let handles: Vec<(String, VoiceHandle)> = self.voices.iter().map(|(n, k)| (n.clone(), k.handle)).collect();
        for (name, handle) in handles {
            match self.backend.prepare_voice(handle) {
                Ok(()) => {}
                Err(error @ SynthError::Device(_)) => return Err(error),
                Err(error) => tracing::warn!("voice `{name}` cannot be prepared: {error}"),
            }
        }
        let seeds = self.speak_at_every_width()?;
        self.warm = Some(seeds.clone());
        Ok(seeds)
    }

    fn refresh_voices(&mut self) {
        let scan = self.folders.scan(&self.config);
        scan.refused.iter().for_each(|r| tracing::warn!("{r}"));
        for name in scan.removed {
            let known = self.voices.remove(&name);
            self.release(known);
        }
        for (name, voice) in scan.changed {
            self.take_voice(name, voice);
        }
    }
}
