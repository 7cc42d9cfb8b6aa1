//! Whisper on the GPU: the kit's numbers, the same text alone and in company, and what its steps cost.

use std::path::Path;
use std::sync::Mutex;

use antiphon::clock;
use antiphon::hear::whisper::gpu::{Elt, GpuError, Own, seat};
use antiphon::hear::whisper::rehearsal::{Random, TINY};
use antiphon::hear::whisper::selftest::{self, Tolerances};
use antiphon::hear::whisper::{BEAMS, Options, Stop, Whisper};
use antiphon::synth::cosyvoice::gpu::whisper::{self as network, Place, ROWS, Sizes, Stack, Word};

use super::{device, hardware, variable};

const KIT: &str = "tests/data/whisper";

fn whisper(elt: Elt) -> Whisper {
    let dir = Path::new(KIT);
    let own = Own { ordinal: 0, hardware: hardware() };
    Whisper::on_gpu(dir, seat(dir, elt).expect("a checkpoint"), Some(own)).expect("it loads")
}

fn kit(elt: Elt, tolerances: Tolerances) {
    let report = selftest::run_on(&whisper(elt), Path::new(KIT), tolerances).expect("the kit runs");
    println!("{report}");
    assert!(report.passed(), "{report}");
    let compared = report.rows.iter().filter(|row| row.pass == Some(true)).count();
    assert!(compared >= 10, "{report}");
}

#[test]
fn whisper_in_single_precision_is_within_the_kits_tolerances() {
    if let Some(_device) = device() {
        kit(Elt::F32, Tolerances::EXACT);
    }
}

#[test]
fn whisper_in_working_precision_writes_the_kits_tokens() {
    if let Some(_device) = device() {
        kit(Elt::F16, Tolerances::WORKING);
    }
}

/// A second of the kit's sound each, from different places.
fn sounds() -> Vec<Vec<f32>> {
    let reader = hound::WavReader::open(Path::new(KIT).join("audio.wav")).expect("there");
    let all: Vec<f32> =
        reader.into_samples::<i16>().map(|sample| f32::from(sample.expect("whole")) / 32_768.0).collect();
    (0..16).map(|n| all[n * 4_000..n * 4_000 + 16_000].to_vec()).collect()
}

#[test]
fn a_text_is_the_same_alone_and_in_company_and_one_that_is_given_up_harms_no_other() {
    let Some(_device) = device() else { return };
    let (whisper, sounds) = (whisper(Elt::F16), sounds());
    let hear = |sound: &[f32], stop: &Stop| whisper.transcribe(sound, &Options::default(), stop).expect("it works");
    let alone: Vec<_> = sounds.iter().map(|sound| hear(sound, &Stop::default()).expect("not stopped")).collect();
    let together = Mutex::new(vec![None; sounds.len()]);
    let given_up = Stop::default();
    std::thread::scope(|scope| {
        for (n, sound) in sounds.iter().enumerate() {
            let (together, hear) = (&together, &hear);
            scope.spawn(move || {
                let text = hear(sound, &Stop::default());
                together.lock().expect("unpoisoned")[n] = text;
            });
        }
        for _ in 0..4 {
            scope.spawn(|| hear(&sounds[0].repeat(20), &given_up));
        }
        given_up.set();
    });
    let together: Vec<_> = together.into_inner().expect("unpoisoned").into_iter().flatten().collect();
    assert_eq!(alone, together);
}

#[test]
fn five_texts_side_by_side_are_the_choice_of_the_cpu_alone_and_in_company() {
    let Some(_device) = device() else { return };
    let (gpu, cpu, sounds) = (whisper(Elt::F32), Whisper::load(Path::new(KIT)).expect("the kit loads"), sounds());
    let hear = |whisper: &Whisper, sound: &[f32], beams: usize| {
        let options = Options { beams, temperatures: vec![0.0], ..Options::default() };
        whisper.transcribe(sound, &options, &Stop::default()).expect("it works").expect("not stopped").text
    };
    let of = |beams: usize| sounds.iter().map(|sound| hear(&cpu, sound, beams)).collect::<Vec<_>>();
    let (beside, likeliest) = (of(BEAMS), of(1));
    assert!(beside != likeliest, "it makes a difference");
    let alone: Vec<_> = sounds.iter().map(|sound| hear(&gpu, sound, BEAMS)).collect();
    assert_eq!(alone, beside);
    // Half of as many as there are windows for have room for five texts each: here all have.
    let together: Vec<_> = std::thread::scope(|scope| {
        let hear = &hear;
        let all: Vec<_> = sounds[..8].iter().map(|sound| scope.spawn(|| hear(&gpu, sound, BEAMS))).collect();
        all.into_iter().map(|one| one.join().expect("it ends")).collect()
    });
    assert_eq!(together, beside[..8]);
}

#[test]
fn sizes_that_the_kernels_do_not_run_are_refused_and_wrong_words_harm_no_call() {
    let Some(_device) = device() else { return };
    let place = Place::open(0, &hardware()).expect("a device");
    let mut sizes = TINY;
    sizes.encoder.heads = 16;
    let refused = network::Whisper::load(&place, &sizes, &mut Random(1), Elt::F16, 1).err().expect("refused");
    assert!(refused.to_string().contains("heads"), "{refused}");
    let small = Sizes { frames: 300, vocabulary: 1_000, ..TINY };
    let mut whisper = network::Whisper::load(&place, &small, &mut Random(1), Elt::F16, 2).expect("it loads");
    let word = Word { text: 0, window: 0, position: 0, token: 5, scored: true };
    assert_eq!((whisper.texts(), whisper.written()), (2, 6));
    assert!(whisper.copy(0, 6, 1).is_err() && whisper.copy(0, 5, 449).is_err());
    for wrong in [
        Word { text: 6, ..word },
        Word { window: 2, ..word },
        Word { position: 448, ..word },
        Word { token: 1_000, ..word },
    ] {
        assert!(matches!(whisper.write(&[wrong]), Err(GpuError::Model(_))));
    }
    assert!(whisper.write(&[word; ROWS + 1]).is_err() && whisper.open(0, &[0.0; 7]).is_err());
    assert!(whisper.listen().is_err(), "no window is open");
    let scores = whisper.write(&[word]).expect("it works");
    assert!(scores[0].len() == 1_000 && scores[0].iter().all(|score| score.is_finite()));
}

/// Sizes of `openai/whisper-large-v3-turbo`.
const TURBO: Sizes = Sizes {
    width: 1_280,
    bands: 128,
    vocabulary: 51_866,
    encoder: Stack { layers: 32, heads: 20, inner: 5_120 },
    decoder: Stack { layers: 4, heads: 20, inner: 5_120 },
    ..TINY
};

/// Milliseconds of the fastest of some runs.
fn best(mut run: impl FnMut()) -> f64 {
    let mut time = || {
        let from = clock::now();
        run();
        clock::now().duration_since(from).as_secs_f64() * 1e3
    };
    (0..10).map(|_| time()).fold(f64::INFINITY, f64::min)
}

/// What a window costs, its longest step, and a token of so many texts at once.
#[test]
#[ignore = "measures; run it on a quiet device"]
fn whisper_costs() {
    let Some(_device) = device() else { return };
    let only = variable("ANTIPHON_TEST_WHISPER");
    for (name, sizes) in [("tiny.en", TINY), ("large-v3-turbo", TURBO)] {
        if only.as_deref().is_some_and(|only| !name.starts_with(only)) {
            continue;
        }
        let place = Place::open(0, &hardware()).expect("a device");
        let from = clock::now();
        let mut whisper = network::Whisper::load(&place, &sizes, &mut Random(7), Elt::F16, ROWS).expect("it loads");
        let load = clock::now().duration_since(from).as_secs_f64();
        println!("{name} on {}: loaded in {load:.1} s, {} texts", place.name(), whisper.texts());
        let features = vec![0.1; sizes.frames * sizes.bands];
        let mut longest = 0f64;
        let window = best(|| {
            whisper.open(0, &features).expect("it works");
            loop {
                let from = clock::now();
                let heard = whisper.listen().expect("it works");
                longest = longest.max(clock::now().duration_since(from).as_secs_f64() * 1e3);
                if heard {
                    break;
                }
            }
        });
        println!("  window {window:.2} ms, its longest step {longest:.2} ms");
        for rows in [1, 2, 4, 8, 16, ROWS] {
            let texts = whisper.texts();
            let word =
                |text: usize| Word { text: text % texts, window: text % texts, position: 20, token: 7, scored: true };
            let words: Vec<Word> = (0..rows).map(word).collect();
            let step = best(|| drop(whisper.write(&words).expect("it works")));
            println!("  token of {rows:>2} texts {step:.3} ms");
        }
    }
}
