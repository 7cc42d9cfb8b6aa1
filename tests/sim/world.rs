//! One call in virtual time. Time moves to the earliest of: the machine's deadline, the engine's next chunk,
//! the end of the step.

use std::collections::BTreeMap;
use std::future::Future;
use std::pin::pin;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use antiphon::call::command::Command;
use antiphon::call::machine::{Action, Machine};
use antiphon::call::{
    CallConfig, CallEvent, CallHandle, CallId, CallMeta, Direction, EndReason, Refusal, SpeakError, Speech,
    StreamState, TextDelta, TurnId, TurnRequest,
};
use antiphon::clock;
use antiphon::media::leg::{Codec, InPacket, LegEvent, MediaFormat, OutPacket};
use antiphon::turn::{Saying, SpeechEvent, SpeechSink, StreamId, Utterance, UtteranceEnd, UtteranceId};
use bytes::Bytes;
use tokio::sync::mpsc;

/// Milliseconds of speech that the fake engine makes of one character.
pub(crate) const MS_PER_CHAR: u64 = 50;

pub(crate) const MS: Duration = Duration::from_millis(1);

/// An engine that takes `first` to begin and makes speech at `rtf` of real time, one utterance after the other.
#[derive(Debug)]
pub(crate) struct Fake(Mutex<State>);

#[derive(Debug)]
struct State {
    now: Instant,
    first: Duration,
    rtf: f64,
    busy_until: Instant,
    queue: Vec<(Instant, Utterance, SpeechSink, SpeechEvent)>,
    refusals: u32,
    fail: Option<String>,
    has_fallback: bool,
    submitted: Vec<String>,
    notes: Vec<StreamState>,
    cancelled: u32,
    /// At 24 kHz; empty: a tone.
    voice: Vec<f32>,
    /// After how many text ids it begins to speak what is still being written.
    starts_after: Option<u32>,
    /// Of which text is still being written, and their pieces behind the first.
    open: BTreeMap<UtteranceId, (Utterance, SpeechSink)>,
    appended: Vec<(String, bool)>,
    /// How often it was told that a text is on its way.
    roused: u32,
}

impl Fake {
    fn lock(&self) -> std::sync::MutexGuard<'_, State> {
        self.0.lock().expect("no test thread panicked in it")
    }

    pub(crate) fn roused(&self) -> u32 {
        self.lock().roused
    }

    pub(crate) fn set_speed(&self, first: Duration, rtf: f64) {
        let mut state = self.lock();
        (state.first, state.rtf) = (first, rtf);
    }

    /// Refuses the next `n` submissions.
    pub(crate) fn refuse(&self, n: u32) {
        self.lock().refusals = n;
    }

    /// Fails utterances that contain `text`.
    pub(crate) fn fail_on(&self, text: &str) {
        self.lock().fail = Some(text.to_owned());
    }

    /// Speaks with a recorded voice (8 kHz) in place of a tone.
    pub(crate) fn speak_as(&self, voice: &[i16]) {
        let wide = voice.iter().flat_map(|sample| [f32::from(*sample) / 32_768.0; 3]);
        self.lock().voice = wide.collect();
    }

    /// Lets another voice speak, which neither refuses nor fails; its texts begin with `*` in [`Fake::submitted`].
    pub(crate) fn has_fallback(&self) {
        self.lock().has_fallback = true;
    }

    /// Takes text as it is written from now on.
    pub(crate) fn take_pieces(&self, starts_after: u32) {
        self.lock().starts_after = Some(starts_after);
    }

    /// What it was given of texts behind their first words, and whether each was the last.
    pub(crate) fn appended(&self) -> Vec<(String, bool)> {
        self.lock().appended.clone()
    }

    pub(crate) fn submitted(&self) -> Vec<String> {
        self.lock().submitted.clone()
    }

    pub(crate) fn notes(&self) -> Vec<StreamState> {
        self.lock().notes.clone()
    }

    /// Utterances that the engine found cancelled.
    pub(crate) fn cancelled(&self) -> u32 {
        self.lock().cancelled
    }

    fn next(&self) -> Option<Instant> {
        self.lock().queue.iter().map(|(at, ..)| *at).min()
    }

    fn advance(&self, now: Instant) {
        let mut state = self.lock();
        state.now = now;
        state.queue.sort_by_key(|(at, ..)| *at);
        let due = state.queue.iter().take_while(|(at, ..)| *at <= now).count();
        for (_, utterance, sink, event) in state.queue.drain(..due).collect::<Vec<_>>() {
            if utterance.token.is_stale() {
                if matches!(event, SpeechEvent::End { .. }) {
                    state.cancelled += 1;
                }
                continue;
            }
            sink.try_send(event).expect("the call keeps up");
        }
    }
}

impl Speech for Fake {
    fn submit(&self, utterance: Utterance, sink: SpeechSink) -> Result<(), Refusal> {
        let mut state = self.lock();
        if state.refusals > 0 {
            state.refusals -= 1;
            return Err(Refusal { retry_after: 100 * MS, reason: "full".into() });
        }
        state.submitted.push(utterance.text.clone());
        if state.fail.as_ref().is_some_and(|text| utterance.text.contains(text)) {
            let how = UtteranceEnd::Failed("cannot say that".into());
            let (at, end) = (state.begins(), SpeechEvent::End { utterance: utterance.id, how });
            state.queue.push((at, utterance, sink, end));
            return Ok(());
        }
        state.make(utterance, sink);
        Ok(())
    }

    fn fallback(&self, utterance: Utterance, sink: SpeechSink) -> Result<(), Refusal> {
        let mut state = self.lock();
        if !state.has_fallback {
            return Err(Refusal { retry_after: 100 * MS, reason: "there is no fallback voice".into() });
        }
        state.submitted.push(format!("*{}", utterance.text));
        state.make(utterance, sink);
        Ok(())
    }

    fn starts_after(&self, _voice: Option<&str>) -> Option<u32> {
        self.lock().starts_after
    }

    fn append(&self, _stream: StreamId, utterance: UtteranceId, said: &Saying, last: bool) {
        let mut state = self.lock();
        state.appended.push((said.text.clone(), last));
        let Some((utterance, sink)) = state.open.remove(&utterance) else { return };
        state.make(Utterance { text: said.text.clone(), streamed: !last, ..utterance }, sink);
    }

    fn rouse(&self) {
        self.lock().roused += 1;
    }

    fn note(&self, _line: StreamId, note: StreamState) {
        self.lock().notes.push(note);
    }
}

impl State {
    /// When something comes of an utterance that is submitted now.
    fn begins(&self) -> Instant {
        self.now.max(self.busy_until) + self.first
    }

    fn make(&mut self, utterance: Utterance, sink: SpeechSink) {
        let (id, mut at) = (utterance.id, self.begins());
        let samples = utterance.text.chars().count() as u64 * MS_PER_CHAR * 24;
        let pcm = match self.voice.len() {
            0 => (0..samples).map(|n| 0.5 * (n as f32 * 0.1).sin()).collect::<Vec<_>>(),
            length => (0..samples).map(|n| self.voice[n as usize % length]).collect(),
        };
        // Chunks of 200 ms.
        for chunk in pcm.chunks(4_800) {
            let event = SpeechEvent::Audio { utterance: id, pcm: chunk.to_vec() };
            self.queue.push((at, utterance.clone(), sink.clone(), event));
            at += Duration::from_secs_f64(chunk.len() as f64 / 24_000.0 * self.rtf);
        }
        self.busy_until = at;
        if utterance.streamed {
            self.open.insert(id, (utterance, sink));
            return;
        }
        self.queue.push((at, utterance, sink, SpeechEvent::End { utterance: id, how: UtteranceEnd::Done }));
    }
}

pub(crate) struct World {
    pub(crate) now: Instant,
    pub(crate) start: Instant,
    pub(crate) machine: Machine,
    pub(crate) handle: CallHandle,
    pub(crate) engine: Arc<Fake>,
    pub(crate) packets: Vec<(Instant, OutPacket)>,
    pub(crate) events: Vec<(Instant, CallEvent)>,
    /// How many packets had left when each of these was told.
    pub(crate) left: Vec<usize>,
    pub(crate) asked: Vec<Action>,
    commands: mpsc::Receiver<Command>,
    speech: mpsc::Receiver<SpeechEvent>,
    sent: u16,
}

pub(crate) fn format(codec: Codec, continuous: bool) -> MediaFormat {
    let telephone_event = Some((101, 8_000));
    MediaFormat { telephone_event, opus_fec: true, continuous, ..MediaFormat::plain(codec) }
}

impl World {
    /// A browser-like call: quiet between turns, connected at once.
    pub(crate) fn new() -> Self {
        Self::with(CallConfig::default(), format(Codec::Pcmu, false))
    }

    pub(crate) fn with(config: CallConfig, format: MediaFormat) -> Self {
        let mut world = Self::unconnected(config, format);
        world.leg(LegEvent::Connected);
        world
    }

    pub(crate) fn unconnected(config: CallConfig, format: MediaFormat) -> Self {
        let now = clock::now();
        let state = State {
            now,
            first: 10 * MS,
            rtf: 0.1,
            busy_until: now,
            queue: Vec::new(),
            refusals: 0,
            fail: None,
            has_fallback: false,
            submitted: Vec::new(),
            notes: Vec::new(),
            cancelled: 0,
            voice: Vec::new(),
            starts_after: None,
            open: BTreeMap::new(),
            appended: Vec::new(),
            roused: 0,
        };
        let engine = Arc::new(Fake(Mutex::new(state)));
        let meta = CallMeta {
            id: CallId::random(),
            direction: Direction::Inbound,
            from: "sip:a@example.com".into(),
            to: "sip:b@example.com".into(),
            agent: "demo".into(),
            headers: BTreeMap::new(),
            tenant: "".into(),
            trace: None,
        };
        let (machine, handle, commands, speech) =
            Machine::detached(meta, config, ("test", &format), engine.clone(), now).expect("codecs");
        Self {
            now,
            start: now,
            machine,
            handle,
            engine,
            packets: Vec::new(),
            events: Vec::new(),
            left: Vec::new(),
            asked: Vec::new(),
            commands,
            speech,
            sent: 0,
        }
    }

    /// Lets everything happen that is due now.
    pub(crate) fn settle(&mut self) {
        loop {
            self.engine.advance(self.now);
            let mut busy = false;
            while let Ok(command) = self.commands.try_recv() {
                self.machine.handle_command(self.now, command);
                busy = true;
            }
            while let Ok(event) = self.speech.try_recv() {
                self.machine.handle_speech(self.now, event);
                busy = true;
            }
            while let Some(action) = self.machine.poll(self.now) {
                busy = true;
                match action {
                    Action::Send(packet) => self.packets.push((self.now, packet)),
                    Action::Event(event) => {
                        self.events.push((self.now, event));
                        self.left.push(self.packets.len());
                    }
                    other => self.asked.push(other),
                }
            }
            if !busy {
                return;
            }
        }
    }

    /// Lets `time` pass.
    pub(crate) fn run(&mut self, time: Duration) {
        let until = self.now + time;
        loop {
            self.settle();
            let next = self.machine.deadline().into_iter().chain(self.engine.next()).min();
            match next.filter(|next| *next <= until) {
                Some(next) => self.now = self.now.max(next),
                None => break,
            }
        }
        self.now = until;
        self.settle();
    }

    pub(crate) fn leg(&mut self, event: LegEvent) {
        self.machine.handle_leg(self.now, event);
        self.settle();
    }

    /// Drives a question to its answer.
    pub(crate) fn ask<T>(&mut self, question: impl Future<Output = T>) -> T {
        let mut question = pin!(question);
        for _ in 0..4 {
            if let Poll::Ready(answer) = question.as_mut().poll(&mut Context::from_waker(Waker::noop())) {
                self.settle();
                return answer;
            }
            self.settle();
        }
        panic!("no answer");
    }

    pub(crate) fn speak(&mut self, turn: TurnRequest) -> Result<TurnId, SpeakError> {
        let handle = self.handle.clone();
        self.ask(handle.speak(turn))
    }

    pub(crate) fn say(&mut self, text: &str) -> TurnId {
        self.speak(TurnRequest::new(text)).expect("a turn that is taken")
    }

    pub(crate) fn push(&mut self, token: &str, last: bool) {
        let delta = TextDelta { id: None, token: token.into(), last, style: Default::default() };
        self.handle.push_text(delta).expect("a piece that is taken");
        self.settle();
    }

    /// The caller sends 20 ms of sound.
    pub(crate) fn hear(&mut self, payload: Vec<u8>) {
        let packet = InPacket {
            payload_type: 0,
            marker: false,
            sequence: self.sent,
            timestamp: u32::from(self.sent) * 160,
            ssrc: 9,
            arrived: self.now,
            payload: Bytes::from(payload),
        };
        self.sent += 1;
        self.leg(LegEvent::Rtp(packet));
    }

    /// The caller speaks (a recorded voice) or is silent for `time`, in real pace.
    pub(crate) fn caller(&mut self, speaks: bool, time: Duration) {
        let mut voice = hound::WavReader::open("tests/data/speech-8k.wav").expect("the recording");
        let pcm = voice.samples::<i16>().map(Result::unwrap).collect::<Vec<_>>();
        for frame in pcm.chunks_exact(160).cycle().take((time.as_millis() / 20) as usize) {
            let mut payload = vec![0xff; 160];
            if speaks {
                antiphon::media::encode::mu_law_into(frame, &mut payload);
            }
            self.hear(payload);
            self.run(20 * MS);
        }
    }

    pub(crate) fn take_events(&mut self) -> Vec<CallEvent> {
        self.left.clear();
        std::mem::take(&mut self.events).into_iter().map(|(_, event)| event).collect()
    }

    /// When the first event that `wanted` accepts came, since the beginning.
    pub(crate) fn when(&self, wanted: impl Fn(&CallEvent) -> bool) -> Option<Duration> {
        self.events.iter().find(|(_, event)| wanted(event)).map(|(at, _)| *at - self.start)
    }

    /// Packets of speech that are not silence, with their times since the beginning.
    pub(crate) fn audible(&self) -> Vec<(Duration, &OutPacket)> {
        let audible =
            |packet: &OutPacket| packet.payload_type == 0 && packet.payload.iter().any(|byte| byte & 0x7f < 0x70);
        self.packets
            .iter()
            .filter(|(_, packet)| audible(packet))
            .map(|(at, packet)| (*at - self.start, packet))
            .collect()
    }

    pub(crate) fn ended(&self) -> Option<EndReason> {
        self.events.iter().find_map(|(_, event)| match event {
            CallEvent::Ended(reason) => Some(*reason),
            _ => None,
        })
    }
}
