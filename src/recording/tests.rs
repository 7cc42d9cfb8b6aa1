//! Recordings on disk, read back by foreign decoders.

use super::*;
use crate::call::MediaFrame;
use crate::telemetry::shown::Shown;

fn config(dir: &Path, format: Format) -> Config {
    Config { mode: Mode::All, dir: dir.to_owned(), format, ..Config::default() }
}

fn description(id: &str, format: Format) -> Description {
    Description {
        id: id.into(),
        tenant: "shop".into(),
        agent: "demo".into(),
        format,
        started_ms: 1,
        duration_ms: None,
        gaps: false,
        encrypted: false,
    }
}

/// 20 ms of a tone at `hertz`, the `n`th.
fn tone(n: u32, hertz: f64) -> Arc<[i16]> {
    let sample = |k: u32| {
        let at = f64::from(n * 160 + k) / f64::from(RATE);
        (8_000.0 * (std::f64::consts::TAU * hertz * at).sin()) as i16
    };
    (0..160).map(sample).collect()
}

fn frame(direction: TapDirection, n: u32, late: Duration, pcm: Arc<[i16]>) -> MediaFrame {
    let position = Duration::from_millis(20) * n;
    MediaFrame { direction, at: position + late, position, pcm, wide: None }
}

/// Power of `hertz` in `pcm`, by Goertzel.
fn power(pcm: &[f32], hertz: f64) -> f64 {
    let turn = std::f64::consts::TAU * hertz / f64::from(RATE);
    let (mut re, mut im) = (0.0, 0.0);
    for (n, sample) in pcm.iter().enumerate() {
        let angle = turn * n as f64;
        re += f64::from(*sample) * angle.cos();
        im += f64::from(*sample) * angle.sin();
    }
    (re * re + im * im).sqrt() / pcm.len() as f64
}

/// Left and right of a WAV file.
fn wav(path: &Path) -> [Vec<f32>; 2] {
    let mut reader = hound::WavReader::open(path).expect("a WAV file");
    let spec = reader.spec();
    assert_eq!((spec.channels, spec.sample_rate), (2, RATE));
    let all: Vec<f32> = reader.samples::<i16>().map(|s| f32::from(s.expect("whole")) / 32_768.0).collect();
    [0, 1].map(|channel| all.iter().skip(channel).step_by(2).copied().collect())
}

/// Left and right of an Ogg Opus file, at 8 kHz.
fn opus(path: &Path) -> [Vec<f32>; 2] {
    let mut reader = ogg::PacketReader::new(std::io::Cursor::new(std::fs::read(path).expect("readable")));
    let head = reader.read_packet_expected().expect("a head").data;
    assert!(head.starts_with(b"OpusHead") && head[9] == 2, "two channels");
    let pre_skip = usize::from(u16::from_le_bytes([head[10], head[11]])) / 6;
    reader.read_packet_expected().expect("tags");
    let mut decoder = opus::Decoder::new(RATE, opus::Channels::Stereo).expect("a decoder");
    let mut all = Vec::new();
    let mut end = 0;
    while let Some(packet) = reader.read_packet().expect("sound pages") {
        let mut pcm = [0.0; 2 * 960];
        let count = decoder.decode_float(&packet.data, &mut pcm, false).expect("decodes");
        all.extend_from_slice(&pcm[..2 * count]);
        end = packet.absgp_page();
    }
    let length = usize::try_from(end).expect("short") / 6 - pre_skip;
    [0, 1].map(|channel| all.iter().skip(2 * pre_skip + channel).step_by(2).take(length).copied().collect())
}

#[test]
fn both_formats_carry_the_caller_left_and_the_gateway_right() {
    for format in [Format::Wav, Format::Opus] {
        let dir = tempfile::tempdir().expect("a folder");
        let recordings = Recordings::start(config(dir.path(), format)).expect("a thread");
        let (_state, state) = watch::channel(State::Recording);
        let mut recorder = Recorder::new(description("a-1", format), state);
        let now = clock::now();
        for n in 0..200 {
            // The caller speaks in the first half and the gateway in the second.
            let at = now + Duration::from_millis(20) * n;
            match n < 100 {
                true => recorder.frame(at, &frame(TapDirection::Inbound, n, Duration::from_millis(7), tone(n, 500.0))),
                false => recorder.frame(at, &frame(TapDirection::Outbound, n, Duration::ZERO, tone(n, 1_000.0))),
            }
            if n % 50 == 49 {
                recorder.block(at, &recordings.0.queue);
            }
        }
        assert!(matches!(recordings.find("a-1"), Err(RecordingError::NotFound | RecordingError::Open)));
        recorder.finish(&recordings.0.queue);
        recordings.shutdown();
        let (found, path) = recordings.find("a-1").expect("complete");
        assert_eq!((found.tenant.as_str(), found.duration_ms, found.gaps), ("shop", Some(4_000), false));
        let [left, right] = if format == Format::Wav { wav(&path) } else { opus(&path) };
        assert_eq!((left.len(), right.len()), (32_000, 32_000), "{format:?}");
        let half = |pcm: &[f32], n: usize| pcm[n * 16_000 + 400..(n + 1) * 16_000 - 400].to_vec();
        for (channel, n, hertz) in [(&left, 0, 500.0), (&right, 1, 1_000.0)] {
            let (spoken, silent) = (power(&half(channel, n), hertz), power(&half(channel, 1 - n), hertz));
            assert!(spoken > 0.08 && silent < 0.004, "{format:?}, {hertz} Hz: {spoken} and {silent}");
        }
    }
}

#[test]
fn a_pause_is_silence_and_what_follows_stays_where_it_was_said() {
    let dir = tempfile::tempdir().expect("a folder");
    let recordings = Recordings::start(config(dir.path(), Format::Wav)).expect("a thread");
    let (sender, state) = watch::channel(State::Recording);
    let mut recorder = Recorder::new(description("b", Format::Wav), state);
    let now = clock::now();
    for n in 0..150 {
        match n {
            50 => drop(sender.send_replace(State::Paused)),
            100 => drop(sender.send_replace(State::Recording)),
            _ => {}
        }
        recorder.frame(now, &frame(TapDirection::Inbound, n, Duration::ZERO, [1_000; 160].into()));
    }
    recorder.finish(&recordings.0.queue);
    recordings.shutdown();
    let [left, right] = wav(&recordings.find("b").expect("complete").1);
    let loud = |sample: &&f32| **sample != 0.0;
    assert_eq!([0, 1, 2].map(|n| left[n * 8_000..(n + 1) * 8_000].iter().filter(loud).count()), [8_000, 0, 8_000]);
    assert_eq!(right.iter().filter(loud).count(), 0);
}

#[test]
fn a_disk_that_does_not_keep_up_costs_sound_and_no_order() {
    let (sender, receiver) = std::sync::mpsc::sync_channel(1);
    let (_state, state) = watch::channel(State::Recording);
    let shown = Shown::here();
    let mut recorder = Recorder::new(description("c", Format::Wav), state);
    let now = clock::now();
    for second in 0..40_u32 {
        for n in second * 50..(second + 1) * 50 {
            recorder.frame(now, &frame(TapDirection::Inbound, n, Duration::ZERO, [1; 160].into()));
        }
        // Only the first message is ever taken.
        recorder.block(now, &sender);
    }
    assert!(recorder.description.gaps && recorder.waiting.len() <= KEPT);
    assert!(shown.sum("antiphon_recording_dropped_seconds_total") >= 1.0);
    assert!(shown.sum("antiphon_recording_dropped_seconds") >= 1.0, "the old name");
    assert!(matches!(receiver.recv(), Ok(Message::Open(_))));
    // What the thread gets in the end is as long as the call.
    let all = std::thread::spawn(move || recorder.finish(&sender));
    let mut total = 0;
    for message in receiver {
        if let Message::Samples { skipped, pcm, .. } = message {
            total += skipped + pcm.len();
        }
    }
    all.join().expect("ends");
    assert_eq!(total, 2 * 40 * RATE as usize);
}

#[test]
fn old_recordings_go_and_other_files_stay() {
    let dir = tempfile::tempdir().expect("a folder");
    let id = CallId::random();
    let names = [format!("{id}.opus"), format!("{id}.json"), format!("{id}.txt"), "music.wav".to_owned()];
    for name in &names {
        std::fs::write(dir.path().join(name), b"x").expect("written");
    }
    let day = Duration::from_secs(86_400);
    let later = std::time::SystemTime::UNIX_EPOCH + clock::wall() + 3 * day;
    assert_eq!(writer::forget(dir.path(), later, 4 * day).expect("readable"), 0);
    assert_eq!(writer::forget(dir.path(), later, 2 * day).expect("readable"), 2);
    assert!(names[2..].iter().all(|name| dir.path().join(name).exists()));
    assert_eq!(writer::forget(&dir.path().join("none"), later, day).expect("no folder is no fault"), 0);
}

#[test]
fn a_panic_in_a_recording_costs_the_rest_of_that_one() {
    let dir = tempfile::tempdir().expect("a folder");
    let recordings = Recordings::start(config(dir.path(), Format::Wav)).expect("a thread");
    let second = |id: &str, n: u32| {
        let pcm =
            (0..50).flat_map(|frame| tone(50 * n + frame, 500.0).iter().flat_map(|s| [*s, 0]).collect::<Vec<_>>());
        Message::Samples { id: id.into(), skipped: 0, pcm: pcm.collect() }
    };
    let send = |message| recordings.0.queue.send(message).expect("the thread lives");
    let lengths = || ["unlucky", "other"].map(|id| recordings.find(id).ok().and_then(|(found, _)| found.duration_ms));
    for id in ["unlucky", "other"] {
        send(Message::Open(Box::new(description(id, Format::Wav))));
        send(second(id, 0));
    }
    // The second second of one of them comes to nothing. It is closed there, once the thread has come to that.
    crate::fault::arm("recording", "unlucky");
    send(second("unlucky", 1));
    send(second("other", 1));
    for id in ["unlucky", "other"] {
        send(Message::Close { id: id.into(), gaps: false });
    }
    recordings.shutdown();
    assert!(!recordings.are_down());
    assert_eq!(lengths()[1], Some(2_000), "the other one goes on");
    assert!(recordings.find("unlucky").expect("what was written is kept").0.gaps);
    assert!(wav(&dir.path().join("other.wav"))[0].len() >= 15_900);
}

#[test]
fn an_id_cannot_lead_out_of_the_folder() {
    let dir = tempfile::tempdir().expect("a folder");
    let recordings = Recordings::start(config(&dir.path().join("in"), Format::Wav)).expect("a thread");
    std::fs::write(dir.path().join("secret.json"), b"{}").expect("written");
    for id in ["../secret", "", ".", "a/b", "a\\b", "%2e%2e", "a\0"] {
        assert!(matches!(recordings.find(id), Err(RecordingError::NotFound)), "{id}");
    }
    recordings.shutdown();
}

#[test]
fn agents_decide_within_what_the_mode_allows() {
    let dir = tempfile::tempdir().expect("a folder");
    for (mode, wanted) in
        [(Mode::Off, [false, false, false]), (Mode::Agents, [false, true, false]), (Mode::All, [true, true, false])]
    {
        let recordings = Recordings::start(Config { mode, ..config(dir.path(), Format::Wav) }).expect("a thread");
        let found = [None, Some(true), Some(false)].map(|record| recordings.wanted(record, None).is_some());
        assert_eq!(found, wanted, "{mode:?}");
        if mode == Mode::All {
            assert_eq!(recordings.wanted(None, None).as_deref(), Some("This call is recorded."));
            assert_eq!(recordings.wanted(None, Some(" Wir zeichnen auf. ")).as_deref(), Some("Wir zeichnen auf."));
        }
        recordings.shutdown();
    }
}

#[test]
fn what_a_killed_gateway_left_can_be_had_once_it_is_not_written_to() {
    let dir = tempfile::tempdir().expect("a folder");
    let recordings = Recordings::start(config(dir.path(), Format::Wav)).expect("a thread");
    let text = serde_json::to_vec(&description("d", Format::Wav)).expect("plain");
    std::fs::write(dir.path().join("d.json"), text).expect("written");
    std::fs::write(dir.path().join("d.wav"), b"RIFF").expect("written");
    assert!(matches!(recordings.find("d"), Err(RecordingError::Open)), "it may still be written");
    let before = std::time::SystemTime::UNIX_EPOCH + clock::wall() - 2 * ABANDONED;
    let file = std::fs::File::options().write(true).open(dir.path().join("d.wav")).expect("there");
    file.set_modified(before).expect("set");
    let (found, _) = recordings.find("d").expect("abandoned");
    assert_eq!((found.gaps, found.duration_ms), (true, None));
    recordings.shutdown();
}

#[test]
fn a_recording_begins_with_its_first_sound_whatever_went_before() {
    let (_state, state) = watch::channel(State::Recording);
    let mut recorder = Recorder::new(description("e", Format::Wav), state);
    // The consent took three seconds.
    recorder.begin(Duration::from_secs(100), Duration::from_secs(3));
    recorder.frame(clock::now(), &frame(TapDirection::Inbound, 150, Duration::ZERO, [1; 160].into()));
    recorder.begin(Duration::from_secs(200), Duration::from_secs(4));
    assert_eq!(recorder.description.started_ms, 100_000);
    assert_eq!(recorder.mixer.take_all().len(), 2 * 160);
}

#[test]
fn an_encrypted_recording_is_heard_with_its_key_only() {
    for format in [Format::Wav, Format::Opus] {
        let dir = tempfile::tempdir().expect("a folder");
        let key = Some(Secret::new("5a".repeat(32)));
        let recordings = Recordings::start(Config { key, ..config(dir.path(), format) }).expect("a thread");
        let (_state, state) = watch::channel(State::Recording);
        let id = CallId::random();
        let described = Description { encrypted: true, ..description(id.as_str(), format) };
        let mut recorder = Recorder::new(described, state);
        let now = clock::now();
        for n in 0..100 {
            recorder.frame(now, &frame(TapDirection::Inbound, n, Duration::ZERO, tone(n, 500.0)));
        }
        recorder.finish(&recordings.0.queue);
        recordings.shutdown();
        let (found, path) = recordings.find(id.as_str()).expect("complete");
        let sealed = std::fs::read(&path).expect("readable");
        assert!(path.to_string_lossy().ends_with(SEALED) && sealed.starts_with(b"ANTRECS1"), "{path:?}");
        let mut plain = Vec::new();
        recordings.open(&found, &path).expect("its key").read_to_end(&mut plain).expect("whole");
        complete(&mut plain);
        let clear = dir.path().join("clear");
        std::fs::write(&clear, plain).expect("written");
        let [left, _] = if format == Format::Wav { wav(&clear) } else { opus(&clear) };
        assert!(left.len() >= 15_900 && power(&left[400..15_600], 500.0) > 0.08, "{format:?}");
        // With it goes what is old.
        let later = SystemTime::UNIX_EPOCH + clock::wall() + Duration::from_secs(90_000);
        assert_eq!(writer::forget(dir.path(), later, Duration::from_secs(80_000)).expect("readable"), 2);
        let other = Config { key: Some(Secret::new("00".repeat(32))), ..config(dir.path(), format) };
        std::fs::write(&path, &sealed).expect("written");
        let other = Recordings::start(other).expect("a thread");
        let read = other.open(&found, &path).expect("a recording").read_to_end(&mut Vec::new());
        assert!(read.is_err(), "another key");
        other.shutdown();
    }
    assert!(Config { key: Some(Secret::new("short")), ..Config::default() }.validate().is_err());
}
