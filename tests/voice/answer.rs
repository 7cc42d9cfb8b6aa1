//! Who answered, judged on greetings that `espeak-ng` speaks and a telephone line carries.

use std::io::Cursor;
use std::process::{Command, Stdio};

use antiphon::media::answer::{Answerer, Detector, Finding};
use antiphon::media::vad::{Vad, VadConfig};
use antiphon::media::{decode, resample};
use audio_codec::pcmu::{PcmuDecoder, PcmuEncoder};
use audio_codec::{Decoder, Encoder};

/// What people say when they answer.
const PEOPLE: [&str; 12] = [
    "Hello?",
    "Yes?",
    "Hi.",
    "Hello, who is this?",
    "Anna speaking.",
    "Good morning.",
    "This is John.",
    "Miller.",
    "Yeah, hello?",
    "Hi, what's up?",
    "Hello, Anna here.",
    "Yes, please?",
];
/// What machines say.
const MACHINES: [&str; 12] = [
    "Hi, you have reached Anna. I can't come to the phone right now, so please leave a message after the beep.",
    "The person you are calling is not available. Please leave your message after the tone.",
    "Welcome to the voicemail of five five five, one two three four. At the tone, please record your message.",
    "You have reached the offices of Miller and sons. We are closed at the moment. Our hours are nine to five.",
    "Sorry I missed your call. Leave me your name and number and I will get back to you as soon as I can.",
    "The number you have dialled has not been recognised. Please check the number and try again.",
    "Hello. This is John. I am away until Monday the third of May. Please send me an email instead.",
    "The mailbox is full and cannot accept any messages at this time. Goodbye.",
    "Thank you for calling the city library. All of our lines are busy. Please hold for the next available person.",
    "Hi, this is Emma, I'm probably driving, so tell me what you want and I'll call you later today.",
    "You've reached the Smith family, we can't take your call right now, please leave a message.",
    "This call will be recorded for training purposes. Please stay on the line while we connect you.",
];
/// What services say that ask who calls before they ring the person.
const SCREENING: [&str; 4] = [
    "Hi. Please say your name and why you are calling, and I will see whether this person is available.",
    "The person you are calling is using a screening service. Before you are connected, state your name after the tone.",
    "Hello. Record your name and the reason for your call, then stay on the line.",
    "Thank you. May I ask who is calling, please? One moment.",
];
/// What menus of keys say.
const MENUS: [&str; 4] = [
    "Thank you for calling the city bank. For your balance, press one. For cards, press two.",
    "Welcome. For English, press one. Para continuar en español, oprima dos.",
    "If you know the extension of the person you are calling, enter it now. For sales, press 1. For support, press 2.",
    "Your call is important to us. To hear our opening hours press one, or stay on the line.",
];
const VOICES: [&str; 3] = ["en-us", "en-gb+f3", "en-us+m4"];
const SPEEDS: [&str; 3] = ["140", "165", "190"];
const FRAME: usize = 320;

/// A greeting at 16 kHz.
fn spoken(text: &str, voice: &str, speed: &str) -> Vec<f32> {
    let output = Command::new("espeak-ng")
        .args(["-v", voice, "-s", speed, "--stdout", "--", text])
        .stdin(Stdio::null())
        .stderr(Stdio::null())
        .output()
        .expect("espeak-ng runs");
    let mut wav = hound::WavReader::new(Cursor::new(output.stdout)).expect("a WAV file");
    let rate = wav.spec().sample_rate;
    let pcm: Vec<f32> = wav.samples::<i16>().map_while(Result::ok).map(|s| f32::from(s) / 32_768.0).collect();
    resample::whole(&pcm, rate, decode::RATE).expect("known rates")
}

/// What a telephone makes of it: 8 kHz, G.711, the noise of a line.
fn carried(pcm: &[f32], seed: u32) -> Vec<i16> {
    let mut state = seed.wrapping_mul(2_654_435_761).wrapping_add(1);
    let mut noise = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state as f32 / u32::MAX as f32 - 0.5) * 0.004
    };
    let narrow = resample::whole(pcm, decode::RATE, 8_000).expect("known rates");
    let narrow: Vec<i16> = narrow.iter().map(|s| ((s * 0.6 + noise()).clamp(-1.0, 1.0) * 32_767.0) as i16).collect();
    let heard = PcmuDecoder::new().decode(&PcmuEncoder::new().encode(&narrow));
    let heard: Vec<f32> = heard.iter().map(|s| f32::from(*s) / 32_768.0).collect();
    let wide = resample::whole(&heard, 8_000, decode::RATE).expect("known rates");
    wide.iter().map(|s| (s * 32_767.0) as i16).collect()
}

/// What is found out, each with its time in ms.
fn listen(pcm: &[i16]) -> Vec<(usize, Finding)> {
    let (mut vad, mut detector) = (Vad::new(&VadConfig::default()), Detector::default());
    let frames = pcm.chunks_exact(FRAME).enumerate();
    frames
        .filter_map(|(n, frame)| {
            vad.push(frame);
            let frame: &[i16; FRAME] = frame.try_into().expect("exact");
            Some(((n + 1) * 20, detector.push(frame, vad.is_speaking())?))
        })
        .collect()
}

/// As [`listen`], with a recogniser that has written each part of `text` 600 ms after it was said, from `start` to `end` (ms).
fn understand(pcm: &[i16], text: &str, (start, end): (usize, usize)) -> Vec<(usize, Finding)> {
    let (mut vad, mut detector) = (Vad::new(&VadConfig::default()), Detector::default());
    let mut found = Vec::new();
    for (n, frame) in pcm.chunks_exact(FRAME).enumerate() {
        let at = (n + 1) * 20;
        vad.push(frame);
        let frame: &[i16; FRAME] = frame.try_into().expect("exact");
        found.extend(detector.push(frame, vad.is_speaking()).map(|finding| (at, finding)));
        if at.is_multiple_of(200) && at > start + 600 {
            let said = text.chars().count() * (at - start - 600) / (end - start).max(1);
            let words: String = text.chars().take(said).collect();
            found.extend(detector.heard(&words).map(|finding| (at, finding)));
        }
    }
    found
}

fn silence(ms: usize) -> Vec<f32> {
    vec![0.0; ms * 16]
}

fn beep(hertz: f32, ms: usize) -> Vec<f32> {
    (0..ms * 16).map(|n| (n as f32 * hertz / 16_000.0 * std::f32::consts::TAU).sin() * 0.4).collect()
}

#[test]
fn people_and_machines_are_told_apart_and_the_beep_is_heard() {
    if antiphon_skip::find("espeak-ng").is_none() {
        antiphon_skip::skip("espeak", "the program is not installed (Debian: espeak-ng)");
        return;
    }
    let (mut calls, mut right, mut beeps, mut heard_beeps) = (0, 0, 0, 0);
    let mut wrong = Vec::new();
    let mut late = Vec::new();
    for (v, voice) in VOICES.iter().enumerate() {
        for (s, speed) in SPEEDS.iter().enumerate() {
            for (people, texts) in [(true, PEOPLE), (false, MACHINES)] {
                for (t, text) in texts.iter().enumerate() {
                    let greeting = spoken(text, voice, speed);
                    let seed = v * 1_000 + s * 100 + t;
                    let before = silence(200 + seed * 37 % 900);
                    let with_beep = !people && t % 3 != 2;
                    let after = if with_beep {
                        [silence(400), beep([425.0, 1_000.0, 1_400.0][t % 3], 250), silence(4_000)].concat()
                    } else {
                        silence(6_000)
                    };
                    let found = listen(&carried(&[before.clone(), greeting, after].concat(), seed as u32));
                    let wanted = if people { Answerer::Human } else { Answerer::Machine };
                    calls += 1;
                    match found.first() {
                        Some((at, Finding::Answered(who))) if *who == wanted => {
                            right += 1;
                            late.push(at.saturating_sub(before.len() / 16));
                        }
                        other => wrong.push(format!("{text:?} by {voice} at {speed}: {other:?}")),
                    }
                    if with_beep {
                        beeps += 1;
                        heard_beeps +=
                            usize::from(found.iter().any(|(_, f)| *f == Finding::MessageOver { beep: true }));
                    }
                }
            }
        }
    }
    late.sort_unstable();
    let p95 = late[late.len() * 95 / 100];
    println!("{right} of {calls} right, p95 {p95} ms after the answer's first sound, {heard_beeps} of {beeps} beeps");
    assert!(calls >= 200);
    assert!(right * 100 >= calls * 97, "{right} of {calls}: {wrong:#?}");
    assert!(heard_beeps * 100 >= beeps * 97, "{heard_beeps} of {beeps} beeps");
    assert!(*late.last().expect("calls") <= 4_000, "within three seconds of speech and its pauses: {late:?}");
}

/// What a fax that is called answers with: 2,100 Hz whose phase turns every 450 ms (ITU-T V.8), and a calling one's 1,100 Hz.
fn fax(hertz: f32, turns: bool) -> Vec<f32> {
    let tone = |n: usize| (n as f32 * hertz / 16_000.0 * std::f32::consts::TAU).sin() * 0.3;
    let turned = |n: usize| turns && n / (450 * 16) % 2 == 1;
    (0..2_000 * 16).map(|n| if turned(n) { -tone(n) } else { tone(n) }).collect()
}

#[test]
fn services_menus_and_faxes_are_told_from_machines() {
    if antiphon_skip::find("espeak-ng").is_none() {
        antiphon_skip::skip("espeak", "the program is not installed (Debian: espeak-ng)");
        return;
    }
    let (mut calls, mut right, mut wrong, mut late) = (0, 0, Vec::new(), Vec::new());
    for (v, voice) in VOICES.iter().enumerate() {
        for (s, speed) in SPEEDS.iter().enumerate() {
            for (wanted, texts) in [(Answerer::Screening, SCREENING), (Answerer::Menu, MENUS)] {
                for (t, text) in texts.iter().enumerate() {
                    let greeting = spoken(text, voice, speed);
                    let seed = v * 1_000 + s * 100 + t;
                    let before = silence(200 + seed * 37 % 900);
                    let (start, end) = (before.len() / 16, (before.len() + greeting.len()) / 16);
                    let line = carried(&[before, greeting, silence(3_000)].concat(), seed as u32);
                    let found = understand(&line, text, (start, end));
                    let answered = found.iter().rev().find_map(|(at, finding)| match finding {
                        Finding::Answered(who) => Some((*at, *who)),
                        Finding::MessageOver { .. } => None,
                    });
                    calls += 1;
                    match answered {
                        Some((at, who)) if who == wanted => {
                            right += 1;
                            late.push(at.saturating_sub(start));
                        }
                        other => wrong.push(format!("{text:?} by {voice} at {speed}: {other:?}")),
                    }
                }
            }
        }
    }
    for (hertz, turns, seed) in [(2_100.0, true, 1), (2_100.0, false, 2), (1_100.0, false, 3)] {
        let line = carried(&[silence(400), fax(hertz, turns), silence(1_000)].concat(), seed);
        calls += 1;
        match listen(&line).first() {
            Some((_, Finding::Answered(Answerer::Fax))) => right += 1,
            other => wrong.push(format!("{hertz} Hz: {other:?}")),
        }
    }
    late.sort_unstable();
    let p95 = late[late.len() * 95 / 100];
    println!("{right} of {calls} services, menus and faxes right, p95 {p95} ms after the first word");
    assert!(right * 100 >= calls * 97, "{right} of {calls}: {wrong:#?}");
}
