//! Texts that come in pieces, decoded one after the other and side by side: by any backend.

use antiphon::synth::Slot;
use antiphon::synth::cosyvoice::backend::{
    Backend, Decoded, FlowPrompt, MinLength, Sampling, SlotRequest, VoiceHandle,
};
use antiphon::synth::cosyvoice::bistream::{Bistream, Order, Prompt, Sampler, sampled, speak};
use antiphon::synth::cosyvoice::config::Config;
use antiphon::synth::cosyvoice::probe::Probe;

/// One text and how it comes: pieces of so many ids.
pub(crate) struct Script {
    system: Vec<u32>,
    transcript: Vec<u32>,
    speech: Vec<u32>,
    text: Vec<u32>,
    piece: usize,
    key: [u32; 2],
}

impl Script {
    pub(crate) fn new(n: u32) -> Self {
        let ids = |count: u32, by: u32| (0..count).map(|i| (i * by + n * 7) % 700).collect::<Vec<_>>();
        Self {
            system: ids(6, 11),
            transcript: ids(5 + n % 4, 13),
            speech: ids(if n % 5 == 4 { 0 } else { 12 + n % 9 }, 17),
            text: ids(14 + n % 11, 19),
            piece: 1 + n as usize % 6,
            key: [n, 77],
        }
    }

    fn prompt(&self) -> Prompt<'_> {
        Prompt { system: &self.system, transcript: &self.transcript, speech: &self.speech }
    }
}

/// Tokens at which a text is cut off: random weights hardly ever end by themselves.
const LIMIT: usize = 60;

/// By the machine that feeds one sequence and looks at its scores, which the golden kit holds against the original.
pub(crate) fn alone<B: Probe>(backend: &mut B, config: &Config, script: &Script, order: Order) -> Vec<u32> {
    let llm = &config.llm;
    let mut machine = Bistream::new(llm, order, &script.prompt());
    let mut pieces = script.text.chunks(script.piece);
    let mut tokens = Vec::new();
    let mut choose = sampled(llm, script.key);
    let mut limited = |scores: &[f32], items: &[u32]| if items.len() < LIMIT { choose(scores, items) } else { None };
    let mut sampler = Sampler { min_length: MinLength::Intended, choose: &mut limited };
    let mut text = || pieces.next().map(<[u32]>::to_vec).unwrap_or_default();
    // The limit ends it as scores that are no numbers would, and in the reference's order a control id does.
    let _ = speak(backend, &mut machine, &mut sampler, &mut text, &mut |token| tokens.push(token));
    tokens
}

/// One text on its way.
struct Row<'a> {
    machine: Bistream,
    text: std::slice::Chunks<'a, u32>,
    tokens: Vec<u32>,
    running: bool,
    over: bool,
}

/// All of them side by side, `rounds` at a time; one that waits gets its next piece when the others have moved on.
pub(crate) fn together<B: Backend>(
    backend: &mut B,
    config: &Config,
    scripts: &[Script],
    order: Order,
    rounds: u32,
) -> Vec<Vec<u32>> {
    let (llm, voice) = (&config.llm, voice(backend, config));
    let start = |script| Row {
        machine: Bistream::new(llm, order, &Script::prompt(script)),
        text: script.text.chunks(script.piece),
        tokens: Vec::new(),
        running: false,
        over: false,
    };
    let mut rows: Vec<Row<'_>> = scripts.iter().map(start).collect();
    for (n, script) in scripts.iter().enumerate() {
        let sampling =
            Sampling { key: script.key, min_len: 0, max_len: 0, min_length: MinLength::Intended, forced: None };
        let request = SlotRequest { voice, prefix: Vec::new(), sampling, speed: 1.0 };
        backend.open(Slot(n as u32), request).expect("opens");
    }
    for _ in 0..10_000 {
        if rows.iter().all(|row| row.over) {
            break;
        }
        let mut fresh = Vec::new();
        for (n, Row { machine, text, running, over, .. }) in rows.iter_mut().enumerate() {
            if *running || *over {
                continue;
            }
            if machine.is_waiting() {
                match text.next() {
                    Some(ids) => machine.arrive(ids),
                    None => machine.finish(),
                }
            }
            let limit = (LIMIT - machine.items().len().min(LIMIT)) as u32;
            match machine.stretch(MinLength::Intended, limit) {
                Some(stretch) if stretch.most > 0 => {
                    backend.extend(Slot(n as u32), stretch).expect("room");
                    *running = true;
                    fresh.push(Slot(n as u32));
                }
                Some(_) => *over = true,
                None => {}
            }
        }
        let mut out = Vec::new();
        backend.prefill(&fresh, &mut out).expect("the device works");
        let slots: Vec<Slot> = (0..rows.len()).filter(|n| rows[*n].running).map(|n| Slot(n as u32)).collect();
        let mut sampled: Vec<Decoded> = Vec::new();
        backend.decode(&slots, rounds, &mut sampled).expect("the device works");
        for result in sampled {
            let Row { machine, tokens, running, over, .. } = &mut rows[result.slot.0 as usize];
            assert!(result.failed.is_none(), "{:?}", result.failed);
            tokens.extend(&result.tokens);
            let ended = machine.absorb(&result.tokens, result.ended);
            *running = result.ended.is_none();
            *over = ended.is_err()
                || machine.items().len() >= LIMIT
                || machine.stretch(MinLength::Intended, 1).is_none() && !machine.is_waiting();
        }
    }
    (0..scripts.len()).for_each(|n| backend.close(Slot(n as u32)));
    rows.into_iter().map(|row| row.tokens).collect()
}

fn voice<B: Backend>(backend: &mut B, config: &Config) -> VoiceHandle {
    let tokens: Vec<u32> = (0..40).collect();
    let mel = vec![0.1; tokens.len() * config.token_mel_ratio * config.flow.mel];
    let prompt = FlowPrompt { tokens, mel, speaker: vec![0.5; config.flow.speaker] };
    backend.add_voice(prompt.into()).expect("a voice")
}
