//! What the agent is told that a caller heard, against what his recording holds.
//!
//! The truth is a forced alignment of the recording, by sound alone: the same sentences are spoken by espeak-ng with a pause
//! after each word, which shows where each word is without asking the voice; the recording, without its pauses, is laid on
//! these words by dynamic time warping of mel spectra, with its end free. Word events, which the gateway goes by, are in
//! none of it.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use antiphon::agent::config::Agent;
use antiphon::voice::features::{Matrix, whisper_log_mel};
use antiphon_loadgen::agent::{Server, Session, text_frame};
use antiphon_loadgen::call::{Call, now};
use antiphon_loadgen::codec::{Codec, resample};
use antiphon_loadgen::heard::Clip;
use serde_json::json;

use super::support::{PATIENCE, Rig};

/// Samples a second of the spectra.
const RATE: u32 = 16_000;
/// Samples of a frame of them.
const HOP: usize = RATE as usize / 100;
/// Bands of a spectrum, of which a telephone carries the lower ones.
const BANDS: usize = 80;
const CARRIED: usize = 56;
/// Frames of silence that are a pause: the closure of a consonant is shorter.
const PAUSE: usize = 8;
/// Frames of silence between two words that are spoken apart.
const APART: usize = 15;
/// Frames by which the end of a word may be missed.
const SLACK: usize = 4;
/// What it costs to stay in a frame of one side, in shares of the distance.
const STAY: f32 = 1.2;

/// Of words that espeak-ng does not join ("of the"): each has a pause behind it when they are spoken apart.
const SENTENCES: [&str; 16] = [
    "Please tell me whether the evening would suit you better.",
    "Your parcel left our warehouse yesterday morning around seven.",
    "Nobody answered when our driver called your number twice.",
    "Every visitor receives a yellow badge before entering.",
    "Our mechanic found two broken parts behind that panel.",
    "My colleague will call you back before lunch tomorrow.",
    "Several customers reported similar trouble after Sunday.",
    "Green apples cost less than red ones this season.",
    "Both meetings happen upstairs, because our large room floods.",
    "Rain is expected later, so bring an umbrella with you.",
    "Thank you very much for waiting so patiently.",
    "Doctor visits take about forty minutes on average.",
    "Perhaps another branch still keeps some spare batteries.",
    "Children under seven travel free every single weekend.",
    "Old invoices disappear after ten years, new ones remain.",
    "Nothing else needs your signature today, my friend.",
];

/// A sentence spoken apart: its spectra without pauses, and where each word ends in them.
struct Words {
    frames: Vec<Vec<f32>>,
    ends: Vec<usize>,
}

/// Sound as spectra, without pauses of at least `longest` frames; and the frames before each pause that was left out, but
/// for those at both ends.
fn spectra(pcm: &[f32], rate: u32, longest: usize) -> (Vec<Vec<f32>>, Vec<usize>) {
    let pcm = resample(&resample(pcm, rate, 8_000).expect("a rate"), 8_000, RATE).expect("a rate");
    let peak = |part: &[f32]| part.iter().fold(0.0f32, |peak, sample| peak.max(sample.abs()));
    let quiet = peak(&pcm) * 0.02;
    let silent: Vec<bool> = pcm.chunks_exact(HOP).map(|part| peak(part) < quiet).collect();
    let mel: Matrix = whisper_log_mel(&pcm, BANDS).expect("long enough").transposed();
    let (mut frames, mut cuts, mut at) = (Vec::new(), Vec::new(), 0);
    while at < silent.len().min(mel.rows) {
        let run = silent[at..].iter().take_while(|silent| **silent).count();
        if run >= longest || (run > 0 && (at == 0 || at + run == silent.len())) {
            if !frames.is_empty() && at + run < silent.len() {
                cuts.push(frames.len());
            }
            at += run;
            continue;
        }
        for row in at..(at + run.max(1)).min(mel.rows) {
            let row = &mel.row(row)[..CARRIED];
            let mean = row.iter().sum::<f32>() / row.len() as f32;
            // How loud it is counts less than how it sounds.
            frames.push(row.iter().map(|value| value - 0.7 * mean).collect());
        }
        at += run.max(1);
    }
    (frames, cuts)
}

impl Words {
    /// `sentence` with 200 ms behind each word.
    fn spoken_apart(sentence: &str, folder: &Path) -> Self {
        let file = folder.join("apart.wav");
        let mut command = Command::new("espeak-ng");
        command.args(["-v", "en-us", "-s", "175", "-g", "20", "-w"]).arg(&file).arg(sentence);
        assert!(command.status().expect("espeak-ng is there").success());
        let mut wav = hound::WavReader::open(&file).expect("a recording");
        let rate = wav.spec().sample_rate;
        let pcm: Vec<f32> =
            wav.samples::<i16>().map(|sample| f32::from(sample.expect("a sample")) / 32_768.0).collect();
        let (frames, mut ends) = spectra(&pcm, rate, APART);
        ends.push(frames.len());
        assert_eq!(ends.len(), sentence.split_whitespace().count(), "{sentence}: words are not apart");
        Self { frames, ends }
    }
}

/// How many words of `text` the recording holds whole.
fn held(recording: &[Vec<f32>], text: &[&Words]) -> usize {
    let frames: Vec<&Vec<f32>> = text.iter().flat_map(|words| &words.frames).collect();
    let mut from = 0;
    let mut ends = Vec::new();
    for words in text {
        ends.extend(words.ends.iter().map(|end| end + from));
        from += words.frames.len();
    }
    // Row by row; a path begins where both do.
    let mut before = vec![f32::INFINITY; frames.len() + 1];
    before[0] = 0.0;
    for heard in recording {
        let mut row = vec![f32::INFINITY; frames.len() + 1];
        for (at, frame) in frames.iter().enumerate() {
            let distance = heard.iter().zip(frame.iter()).map(|(a, b)| (a - b) * (a - b)).sum::<f32>().sqrt();
            let ways = [before[at] + distance, before[at + 1] + STAY * distance, row[at] + STAY * distance];
            row[at + 1] = ways.into_iter().fold(f32::INFINITY, f32::min);
        }
        before = row;
    }
    let cost = |at: &usize| before[*at] / (recording.len() + at) as f32;
    let end = (1..before.len()).min_by(|a, b| cost(a).total_cmp(&cost(b))).unwrap_or(0);
    ends.iter().filter(|word| **word <= end + SLACK).count()
}

/// Numbers from a seed.
struct Dice(u64);

impl Dice {
    fn roll(&mut self) -> f64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 11) as f64 / (1u64 << 53) as f64
    }
}

/// One interruption: which sentences were said, what the agent was told, and what the caller heard.
struct Cut {
    said: [usize; 2],
    told: String,
    exact: bool,
    clip: Clip,
}

/// The same, laid on the words.
struct Case {
    text: String,
    told: String,
    held: usize,
    exact: bool,
}

impl Cut {
    fn judge(self, words: &[Words]) -> Case {
        let Self { said, told, exact, clip } = self;
        let (frames, _) = spectra(&clip.pcm, clip.rate, PAUSE);
        let text = said.map(|at| SENTENCES[at]).join(" ");
        Case { held: held(&frames, &said.map(|at| &words[at])), text, told, exact }
    }
}

impl std::fmt::Display for Case {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "told {:?} of {:?}, {} words are held", self.told, self.text, self.held)
    }
}

impl Case {
    fn off(&self) -> usize {
        self.told.split_whitespace().count().abs_diff(self.held)
    }
}

/// Speaks `count` turns and cuts each off at an instant of its own.
async fn interrupt(call: Call, mut session: Session, words: &[Words], seed: u64, count: usize) -> Vec<Cut> {
    let mut dice = Dice(0x9e37_79b9_7f4a_7c15 ^ (seed + 1).wrapping_mul(0x2545_f491_4f6c_dd1d));
    let mut cuts = Vec::new();
    while cuts.len() < count {
        let said = [0, 1].map(|_| (dice.roll() * SENTENCES.len() as f64) as usize);
        let text = said.map(|at| SENTENCES[at]).join(" ");
        // As long as the words are; the voice's pauses come on top.
        let length: usize = said.iter().map(|at| words[*at].frames.len()).sum();
        let asked = session.send(&text_frame(&text, true)).await.expect("sent");
        let onset = call.onset(asked, PATIENCE).await.expect("speech is heard");
        let instant = dice.roll();
        if cuts.len() % 6 == 5 {
            // In a pause: behind a sentence, or a comma. No closure of a consonant is as long.
            call.silence(onset, Duration::from_millis(90), PATIENCE).await.expect("a pause");
        } else {
            tokio::time::sleep(Duration::from_secs_f64((0.03 + 0.97 * instant) * length as f64 / 100.0)).await;
        }
        session.send(&json!({ "type": "clear" })).await.expect("sent");
        let Some((_, frame)) = session.recv_type("interrupt", Duration::from_secs(3)).await else {
            // On a slow machine the turn was over.
            continue;
        };
        let told = frame["utteranceUntilInterrupt"].as_str().expect("a text").trim().to_owned();
        assert!(text.starts_with(&told), "{told:?} of {text:?}");
        let end = call.silence(onset, Duration::from_millis(400), PATIENCE).await.expect("it is silent");
        let clip = call.ear().heard().clip_between(onset - Duration::from_millis(100), end.max(now()));
        cuts.push(Cut { said, told, exact: frame["precision"] == json!("exact"), clip });
    }
    call.hang_up().await;
    cuts
}

/// `ANTIPHON_INTERRUPTIONS=500` for the figure of `tests/README.md`.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[allow(clippy::disallowed_methods, reason = "this variable belongs to the test, not to the gateway")]
async fn an_agent_is_told_the_words_that_the_callers_recording_holds() {
    let espeak = Command::new("espeak-ng").arg("--version").output();
    if !espeak.is_ok_and(|output| output.status.success()) {
        return antiphon_skip::skip("espeak", "espeak-ng is not installed");
    }
    let folder = tempfile::tempdir().expect("a folder");
    let words: Vec<Words> = SENTENCES.iter().map(|sentence| Words::spoken_apart(sentence, folder.path())).collect();
    let server = Server::bind("127.0.0.1:0".parse().expect("an address")).await.expect("a free port");
    let url = server.url();
    let mut server = server;
    let rig = Rig::with(|config| {
        config.agent.insert("remote".into(), Agent { language: Some("en-US".into()), ..Agent::at(&url) });
    })
    .await;
    // That the alignment itself is right: all of a turn that nobody cuts off is held.
    let whole = rig.reference(SENTENCES[0]).await;
    let (frames, _) = spectra(&whole.pcm, whole.rate, PAUSE);
    assert_eq!(held(&frames, &[&words[0], &words[1]]), words[0].ends.len());
    let count = std::env::var("ANTIPHON_INTERRUPTIONS").ok().and_then(|count| count.parse().ok()).unwrap_or(40usize);
    let at_once = 8;
    let mut calls = Vec::new();
    for seed in 0..at_once {
        let call = rig.telephone("remote", Codec::Pcmu).await;
        let session = server.next_session(PATIENCE).await.expect("the gateway dials");
        calls.push(interrupt(call, session, &words, seed as u64, count.div_ceil(at_once)));
    }
    let cuts: Vec<Cut> = futures_util::future::join_all(calls).await.into_iter().flatten().collect();
    let cases: Vec<Case> = cuts.into_iter().map(|cut| cut.judge(&words)).collect();
    let by = |off: usize| cases.iter().filter(|case| case.off() == off).count();
    let worse: Vec<String> = cases.iter().filter(|case| case.off() > 1).map(Case::to_string).collect();
    let ends: Vec<&Case> = cases.iter().filter(|case| case.exact).collect();
    eprintln!(
        "{} interruptions: {} right, {} off by a word, {} by more; {} at the end of an utterance",
        cases.len(),
        by(0),
        by(1),
        worse.len(),
        ends.len()
    );
    assert!(worse.len() * 100 <= cases.len(), "{} of {}: {worse:#?}", worse.len(), cases.len());
    let wrong: Vec<String> = ends.into_iter().filter(|case| case.off() > 0).map(Case::to_string).collect();
    assert!(wrong.is_empty(), "at ends of utterances: {wrong:#?}");
    rig.app.drain().await;
}
