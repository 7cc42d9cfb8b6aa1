use std::convert::Infallible;
use std::time::Duration;

use antiphon::agent::config::Agent;
use antiphon::agent::frames::print;
use antiphon::agent::relay::Relay;
use antiphon::call::command::Command;
use antiphon::call::event::{Cause, Heard, Precision, Stages};
use antiphon::call::{
    CallConfig, CallEvent, EndReason, PlayRequest, SpeakError, Style, TextDelta, TurnHow, TurnId, TurnRequest,
};
use antiphon::media::leg::Codec;
use antiphon::turn::Streaming;
use tokio::sync::oneshot;

use super::counted::Growth;
use super::world::{MS, World, format};

fn ended(events: &[CallEvent]) -> Vec<(String, TurnHow, Heard)> {
    events
        .iter()
        .filter_map(|event| match event {
            CallEvent::TurnEnded { turn, how, heard } => Some((turn.to_string(), how.clone(), heard.clone())),
            _ => None,
        })
        .collect()
}

#[test]
fn a_turn_sounds_as_soon_as_its_first_audio_is_there() {
    let mut world = World::new();
    let turn = world.say("Hello there, this is a test.");
    world.run(5_000 * MS);
    assert_eq!(world.when(|e| matches!(e, CallEvent::FirstAudio { .. })), Some(10 * MS));
    let events = world.take_events();
    assert_eq!(events[0], CallEvent::Connected);
    assert_eq!(events[1], CallEvent::TurnStarted { turn: turn.clone() });
    let stages = Stages { first_audio: 10 * MS, ..Stages::default() };
    assert_eq!(events[2], CallEvent::FirstAudio { turn: turn.clone(), after: 10 * MS, immediate: true, stages });
    let heard = Heard {
        text: "Hello there, this is a test.".into(),
        words: 6,
        sent_ms: 28 * 50,
        acked_ms: 0,
        precision: Precision::Exact,
    };
    let text = "Hello there, this is a test.";
    assert!(matches!(&events[3], CallEvent::Speaking { turn: of, text: said, .. } if *of == turn && said == text));
    assert_eq!(events[4], CallEvent::TurnEnded { turn, how: TurnHow::Done, heard });
    // 70 frames of speech and one that empties the codec's delay.
    assert_eq!(world.packets.len(), 71);
    assert!(world.packets[0].1.marker);
    let info = world.handle.info();
    assert_eq!((info.turns, info.underruns, info.packets_sent, info.backlog_bytes), (1, 0, 71, 0));
    assert_eq!(info.first_audio_ms, Some(10.0));
}

#[test]
fn an_engine_is_told_of_a_text_ahead_of_it_and_a_packet_leaves_before_anybody_is_told() {
    let mut world = World::new();
    assert_eq!(world.engine.roused(), 0);
    world.say("Hello there.");
    assert_eq!(world.engine.roused(), 1);
    world.run(5_000 * MS);
    let first = world.events.iter().position(|(_, event)| matches!(event, CallEvent::FirstAudio { .. }));
    assert_eq!(world.left[first.unwrap()], 1);
    world.push("One moment, ", false);
    assert_eq!(world.engine.roused(), 1, "most pieces of a text that goes on are of no use to it");
    world.push("please.", true);
    assert_eq!(world.engine.roused(), 2);
}

#[test]
fn every_codec_speaks() {
    for codec in [Codec::Opus, Codec::G722, Codec::Pcma, Codec::Pcmu] {
        let mut world = World::with(CallConfig::default(), format(codec, false));
        world.say("Hello there.");
        world.run(2_000 * MS);
        assert_eq!(world.packets.len(), 31, "{codec:?}");
        let ticks = world.packets[30].1.timestamp.wrapping_sub(world.packets[0].1.timestamp);
        assert_eq!(ticks, 30 * codec.frame_ticks());
    }
}

#[test]
fn sentences_and_turns_follow_one_another_without_a_gap_and_in_order() {
    let mut world = World::new();
    world.say("The first sentence is here. The second sentence follows it.");
    world.say("A second turn comes after.");
    world.run(10_000 * MS);
    assert_eq!(
        world.engine.submitted(),
        ["The first sentence is here.", "The second sentence follows it.", "A second turn comes after."]
    );
    let timestamps = world.packets.iter().map(|(_, packet)| packet.timestamp).collect::<Vec<_>>();
    assert!(timestamps.windows(2).all(|pair| pair[1].wrapping_sub(pair[0]) == 160));
    let turns = ended(&world.take_events());
    assert_eq!(turns.len(), 2);
    assert!(turns.iter().all(|(_, how, _)| *how == TurnHow::Done));
}

#[test]
fn streamed_text_sounds_before_it_is_complete() {
    let mut world = World::new();
    for word in "Well, let me see what I can find for you, ".split_inclusive(' ') {
        world.push(word, false);
        world.run(20 * MS);
    }
    world.run(20 * MS);
    assert_eq!(world.engine.submitted()[0], "Well, let me see what I can");
    assert!(world.when(|e| matches!(e, CallEvent::FirstAudio { .. })).is_some_and(|at| at <= 170 * MS));
    world.push("and here is the rest", false);
    world.push(".", true);
    world.run(5_000 * MS);
    let turns = ended(&world.take_events());
    assert_eq!(turns.len(), 1);
    assert_eq!(turns[0].2.text, "Well, let me see what I can find for you, and here is the rest.");
}

#[test]
fn what_an_agent_says_before_it_looks_something_up_sounds_after_a_pause() {
    let mut world = World::new();
    for token in ["Let", " me", " check", " that", " for", " you"] {
        world.push(token, false);
        world.run(15 * MS);
    }
    world.run(6_000 * MS);
    assert_eq!(world.engine.submitted(), ["Let me check that for you"]);
    assert_eq!(
        world.when(|e| matches!(e, CallEvent::FirstAudio { .. })),
        Some(285 * MS),
        "200 ms, and the engine's 10"
    );
    // Its agent is told that the caller hears nothing now, once.
    let turn = world.events.iter().find_map(|(_, e)| match e {
        CallEvent::TurnStarted { turn } => Some(turn.clone()),
        _ => None,
    });
    let starved = CallEvent::Starved { turn: turn.expect("one") };
    assert_eq!(world.events.iter().filter(|(_, e)| *e == starved).count(), 1);
    let relay = Relay::new(world.handle.clone(), &Agent::at("builtin:silent"));
    let frame = relay.frame(&starved).map(|frame| print(&frame));
    assert_eq!(frame.as_deref(), Some(r#"{"type":"flow","state":"starved"}"#));
    world.push(" and this is it.", true);
    world.run(6_000 * MS);
    assert_eq!(ended(&world.take_events())[0].2.text, "Let me check that for you and this is it.");
}

/// Writes `text` word by word, so far apart.
fn write(world: &mut World, text: &str, stream: Streaming, gap: Duration) {
    let style = Style { stream, ..Style::default() };
    for word in text.split_inclusive(' ') {
        let delta = TextDelta { id: None, token: word.into(), last: false, style: style.clone() };
        world.handle.push_text(delta).expect("room");
        world.run(gap);
    }
}

#[test]
fn a_voice_that_takes_text_as_it_is_written_gets_each_word_once_and_speaks_one_utterance() {
    let text = "We have been looking at the numbers that you sent us. ";
    let mut world = World::new();
    world.engine.take_pieces(5);
    write(&mut world, text, Streaming::Auto, 100 * MS);
    let submitted = world.engine.submitted();
    assert_eq!(submitted.len(), 1, "{submitted:?}");
    assert!(submitted[0].split_whitespace().count() <= 2, "it does not wait for a phrase: {submitted:?}");
    assert!(world.when(|e| matches!(e, CallEvent::FirstAudio { .. })).is_some_and(|at| at <= 220 * MS));
    // Something sounds: of a sentence that is there as a whole nothing is gained by giving it in pieces.
    world.push("All of them are in order.", true);
    world.run(9_000 * MS);
    assert_eq!(world.engine.submitted()[1..], ["All of them are in order."]);
    let spoken: String = world.engine.appended().into_iter().map(|(piece, _)| piece).collect();
    assert_eq!(format!("{}{spoken}", submitted[0]).trim(), text.trim());
    let ends: Vec<bool> = world.engine.appended().into_iter().map(|(_, last)| last).collect();
    assert_eq!(ends.iter().filter(|last| **last).count(), 1);
    assert_eq!(ends.last(), Some(&true));
    let events = world.take_events();
    let said: Vec<&str> = events
        .iter()
        .filter_map(|e| if let CallEvent::Speaking { text, .. } = e { Some(text.as_str()) } else { None })
        .collect();
    assert_eq!(said.join(" "), format!("{text}All of them are in order."), "each word is told of once");
    let turns = ended(&events);
    assert_eq!((turns.len(), &turns[0].1), (1, &TurnHow::Done));
    assert_eq!(turns[0].2.text, format!("{text}All of them are in order."));
}

#[test]
fn a_voice_that_waits_for_its_writer_hears_of_the_end_of_his_patience() {
    let mut world = World::new();
    world.engine.take_pieces(5);
    write(&mut world, "Let me see what ", Streaming::Auto, 50 * MS);
    world.run(6_000 * MS);
    assert_eq!(world.engine.appended().last().map(|(_, last)| *last), Some(true), "its slot is free again");
    assert_eq!(world.events.iter().filter(|(_, e)| matches!(e, CallEvent::Starved { .. })).count(), 1);
    world.push("we have here.", true);
    world.run(6_000 * MS);
    let submitted = world.engine.submitted();
    assert_eq!(submitted[1..], ["we have here."], "what he writes later is an utterance of its own");
    assert_eq!(ended(&world.take_events())[0].2.text, "Let me see what we have here.");
    assert_eq!(world.handle.info().underruns, 0, "the gap is the writer's");
}

#[test]
fn a_voice_that_waits_for_more_than_a_phrase_gets_phrases_unless_tokens_are_asked_for() {
    let text = "We have been looking at the numbers that you sent us.";
    for (stream, pieces) in [(Streaming::Auto, false), (Streaming::Token, true), (Streaming::Sentence, false)] {
        let mut world = World::new();
        world.engine.take_pieces(18);
        write(&mut world, text, stream, 100 * MS);
        assert_eq!(!world.engine.appended().is_empty(), pieces, "{stream:?}");
    }
}

#[test]
fn text_is_given_as_it_is_written_at_another_speed_too() {
    let mut world = World::new();
    world.engine.take_pieces(5);
    let style = Style { speed: 1.25, ..Style::default() };
    for word in "We have been looking at the numbers that you sent us.".split_inclusive(' ') {
        let delta = TextDelta { id: None, token: word.into(), last: false, style: style.clone() };
        world.handle.push_text(delta).expect("room");
        world.run(100 * MS);
    }
    assert_eq!(world.engine.submitted().len(), 1);
    assert!(!world.engine.appended().is_empty());
}

#[test]
fn an_agent_that_asks_for_sentences_gets_sentences() {
    let mut world = World::new();
    let style = Style { stream: Streaming::Sentence, ..Style::default() };
    for word in "Well, let me see what I can find for you, ".split_inclusive(' ') {
        let delta = TextDelta { id: None, token: word.into(), last: false, style: style.clone() };
        world.handle.push_text(delta).expect("room");
        world.run(300 * MS);
    }
    assert_eq!(world.engine.submitted(), ["Well, let me see what I can find for you,"]);
}

#[test]
fn silence_because_nothing_was_written_is_no_underrun_on_a_stream_without_pauses_either() {
    let mut world = World::with(CallConfig::default(), format(Codec::Pcma, true));
    world.engine.set_speed(80 * MS, 0.1);
    world.push("This is the first sentence of a turn. ", false);
    world.run(6_000 * MS);
    world.push("And this comes much later. ", true);
    world.run(6_000 * MS);
    assert_eq!(world.handle.info().underruns, 0);
    assert_eq!(world.events.iter().filter(|(_, e)| matches!(e, CallEvent::Starved { .. })).count(), 1);
}

#[test]
fn a_slow_writer_causes_no_underrun_but_a_slow_engine_does() {
    let starved = Growth::of(&["antiphon_text_starved_seconds_count"]);
    let underruns = Growth::of(&["antiphon_underruns_total", "antiphon_underrun_seconds_count"]);
    let mut world = World::new();
    world.push("This is the first sentence of a turn. Then", false);
    world.run(6_000 * MS);
    world.push(" comes another one, much later.", true);
    world.run(6_000 * MS);
    assert_eq!(world.handle.info().underruns, 0);
    starved.assert();
    let mut world = World::new();
    world.engine.set_speed(10 * MS, 1.5);
    world.say("This is spoken too slowly.");
    world.run(6_000 * MS);
    let info = world.handle.info();
    assert!(info.underruns >= 4, "{}", info.underruns);
    underruns.assert();
    let gaps = world.events.iter().filter_map(|(_, event)| match event {
        CallEvent::Underrun { gap, .. } => Some(*gap),
        _ => None,
    });
    assert!(gaps.clone().all(|gap| gap == 100 * MS), "{:?}", gaps.collect::<Vec<_>>());
}

#[test]
fn marks_fire_when_what_is_before_them_was_sent() {
    let mut world = World::new();
    world.handle.mark("start").unwrap();
    world.settle();
    assert_eq!(world.when(|e| *e == CallEvent::Mark { name: "start".into(), played: true }), Some(Duration::ZERO));
    world.say("Exactly forty characters are said here..");
    world.handle.mark("end").unwrap();
    world.run(5_000 * MS);
    // 2 s of speech: the last frame leaves 1.98 s after the first.
    assert_eq!(world.when(|e| matches!(e, CallEvent::Mark { name, .. } if name == "end")), Some(1_990 * MS));
}

#[test]
fn a_turn_ahead_goes_before_those_that_wait_and_loses_none() {
    let mut world = World::new();
    world.say("The turn that is sounding now.");
    world.say("The turn that was waiting.");
    world.run(500 * MS);
    world.speak(TurnRequest { ahead: true, ..TurnRequest::new("The urgent turn.") }).unwrap();
    world.run(10_000 * MS);
    let heard = ended(&world.take_events()).into_iter().map(|(_, _, heard)| heard.text).collect::<Vec<_>>();
    assert_eq!(heard, ["The turn that is sounding now.", "The urgent turn.", "The turn that was waiting."]);
    assert_eq!(world.handle.info().underruns, 0);
}

#[test]
fn a_preemptible_turn_gives_way_to_the_next() {
    let mut world = World::new();
    let style = Style { preemptible: true, ..Style::default() };
    world.speak(TurnRequest { style, ..TurnRequest::new("Please hold while I look this up for you.") }).unwrap();
    world.run(500 * MS);
    world.say("Found it.");
    world.run(5_000 * MS);
    let turns = ended(&world.take_events());
    assert_eq!(turns[0].1, TurnHow::Interrupted(Cause::Preempted));
    assert_eq!(turns[1].2.text, "Found it.");
}

#[test]
fn a_refusal_is_told_at_once_or_tried_again() {
    let mut world = World::new();
    world.engine.refuse(1);
    let refused = world.speak(TurnRequest::new("Nobody will hear this."));
    assert!(matches!(refused, Err(SpeakError::Refused { .. })), "{refused:?}");
    assert_eq!(world.handle.info().backlog_bytes, 0);
    // Accepted work is not lost: the second sentence is refused twice and spoken all the same.
    world.say("This sentence is taken by the engine. This one is refused at first. And a third one.");
    world.run(10_000 * MS);
    world.say("One. Two. Three. Four. Five sentences fill the window. Six are too many for it. Seven too.");
    world.engine.refuse(2);
    world.run(20_000 * MS);
    let turns = ended(&world.take_events());
    assert!(turns.iter().all(|(_, how, _)| *how == TurnHow::Done), "{turns:?}");
    assert!(turns[1].2.text.ends_with("Seven too."));
    // Refused for good: the turn ends and says so.
    world.engine.refuse(1_000);
    world.push("A stream that is refused for ever. And more", false);
    world.run(20_000 * MS);
    let events = world.take_events();
    let turns = ended(&events);
    assert!(matches!(turns[..], [(_, TurnHow::Refused { .. }, _)]), "{turns:?}");
    // Its agent, too, learns when to come again.
    let relay = Relay::new(world.handle.clone(), &Agent::at("builtin:silent"));
    let frames: Vec<String> = events.iter().filter_map(|event| relay.frame(event)).map(|f| print(&f)).collect();
    let told = |frame: &String| frame.contains(r#""how":"refused""#) && frame.contains(r#""retryAfterMs":100"#);
    assert!(frames.iter().any(told), "{frames:?}");
}

#[test]
fn one_bad_sentence_costs_only_itself() {
    let mut world = World::new();
    world.engine.fail_on("unspeakable");
    world.say("This can be spoken well. This is unspeakable for some reason. This can be spoken, too.");
    world.run(10_000 * MS);
    let events = world.take_events();
    let turns = ended(&events);
    assert_eq!(turns[0].1, TurnHow::Failed("cannot say that".into()));
    assert_eq!(turns[0].2.text, "This can be spoken well. This can be spoken, too.");
    // Its agent gets an error, before the end of the turn.
    let relay = Relay::new(world.handle.clone(), &Agent::at("builtin:silent"));
    let frames: Vec<String> = events.iter().filter_map(|event| relay.frame(event)).map(|f| print(&f)).collect();
    let error = frames.iter().position(|f| f.contains(r#""type":"error""#) && f.contains("cannot say that"));
    let end = frames.iter().position(|f| f.contains(r#""how":"failed""#));
    assert!(error.is_some() && error < end, "{frames:?}");
}

#[test]
fn every_sentence_that_was_with_a_failed_engine_is_rescued_and_the_rest_stays_with_the_other_voice() {
    let mut world = World::new();
    world.engine.has_fallback();
    world.engine.fail_on("sentence");
    let text = "One sentence is here. One more sentence is there. The last sentence is a third one. And an end.";
    world.say(text);
    world.run(20_000 * MS);
    let turns = ended(&world.take_events());
    assert_eq!((&turns[0].1, turns[0].2.text.as_str()), (&TurnHow::Done, text));
    let submitted = world.engine.submitted();
    assert!(submitted.iter().filter(|text| !text.starts_with('*')).count() > 1, "{submitted:?}");
    let spoken: Vec<&str> = submitted.iter().filter_map(|text| text.strip_prefix('*')).collect();
    assert_eq!(spoken.join(" "), text);
    // The next turn is the engine's again.
    world.say("This is fine.");
    world.run(5_000 * MS);
    assert_eq!(world.engine.submitted().last().map(String::as_str), Some("This is fine."));
}

#[test]
fn nothing_to_say_is_refused() {
    let mut world = World::new();
    assert_eq!(world.speak(TurnRequest::new(" ... ")), Err(SpeakError::Empty));
    let style = Style { speed: f32::NAN, ..Style::default() };
    assert!(matches!(world.speak(TurnRequest { style, ..TurnRequest::new("Hi.") }), Err(SpeakError::Invalid(_))));
    assert_eq!(world.handle.info().backlog_bytes, 0);
}

#[test]
fn finish_ends_the_call_behind_its_last_words() {
    let mut world = World::new();
    world.say("Goodbye and thank you.");
    world.handle.finish(EndReason::HungUp).unwrap();
    world.settle();
    assert_eq!(world.speak(TurnRequest::new("Too late.")), Err(SpeakError::Draining));
    world.run(5_000 * MS);
    assert_eq!(world.ended(), Some(EndReason::HungUp));
    let last = world.packets.last().unwrap().0;
    let end = world.when(|e| matches!(e, CallEvent::Ended(_))).unwrap();
    assert!(end >= last - world.start + 100 * MS && end < last - world.start + 200 * MS);
    assert_eq!(ended(&world.take_events())[0].1, TurnHow::Done);
    assert_eq!(world.machine.deadline(), None);
}

#[test]
fn clips_and_streamed_audio_sound_in_their_turn() {
    let mut world = World::new();
    let mut wav = std::io::Cursor::new(Vec::new());
    let spec = hound::WavSpec {
        channels: 1,
        sample_rate: 24_000,
        bits_per_sample: 16,
        sample_format: hound::SampleFormat::Int,
    };
    let mut writer = hound::WavWriter::new(&mut wav, spec).unwrap();
    (0..24_000).for_each(|n| writer.write_sample(if n / 12 % 2 == 0 { 9_000i16 } else { -9_000 }).unwrap());
    writer.finalize().unwrap();
    use base64::Engine as _;
    let source =
        format!("data:audio/wav;base64,{}", base64::engine::general_purpose::STANDARD.encode(wav.into_inner()));
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    let handle = world.handle.clone();
    let request = PlayRequest { id: None, source, times: 2, interruptible: None, preemptible: false };
    // Loading needs a runtime's blocking thread; the answer needs the world.
    let (answer, ()) = runtime.block_on(async {
        let mut play = Box::pin(handle.play(request));
        loop {
            tokio::select! {
                biased;
                answer = &mut play => break (answer, ()),
                () = tokio::task::yield_now() => world.settle(),
            }
        }
    });
    answer.unwrap();
    world.handle.inject_audio(vec![5_000; 8_000], 8_000, None).unwrap();
    world.handle.inject_audio(vec![5_000; 4_000], 8_000, None).unwrap();
    world.handle.mark("all").unwrap();
    world.run(5_000 * MS);
    // 2 x 1 s of clip, 1.5 s of stream.
    assert_eq!(world.when(|e| matches!(e, CallEvent::Mark { .. })), Some(3_480 * MS));
    assert!(world.handle.inject_audio(vec![0; 10], 11_025, None).is_err());
}

/// What a handle does with a recording of the web: its place is kept, and it comes later.
fn await_clip(world: &mut World) -> Result<(TurnId, oneshot::Receiver<Infallible>), SpeakError> {
    let (wanted, dropped) = oneshot::channel();
    let (reply, mut answer) = oneshot::channel();
    let source = "https://media.example/a.mp3".to_owned();
    let request = PlayRequest { id: None, source, times: 1, interruptible: None, preemptible: false };
    world.machine.handle_command(world.now, Command::Await { request, wanted, reply });
    world.settle();
    answer.try_recv().expect("an answer").map(|turn| (turn, dropped))
}

#[test]
fn a_recording_that_is_fetched_sounds_in_its_turn() {
    let mut world = World::new();
    let first = world.say("Hold the line.");
    let (clip, _dropped) = await_clip(&mut world).unwrap();
    let last = world.say("There we are.");
    world.run(5_000 * MS);
    let told: Vec<_> = ended(&world.take_events()).into_iter().map(|(id, ..)| id).collect();
    assert_eq!(told, [first.to_string()], "what comes later waits for it");
    let silent = world.packets.len();
    world
        .machine
        .handle_command(world.now, Command::Arrived { turn: clip.clone(), clip: Ok(vec![0.5; 24_000].into()) });
    world.run(5_000 * MS);
    let told: Vec<_> = ended(&world.take_events()).into_iter().map(|(id, how, _)| (id, how)).collect();
    assert_eq!(told, [(clip.to_string(), TurnHow::Done), (last.to_string(), TurnHow::Done)]);
    assert!(world.packets.len() >= silent + 50, "a second of it");
}

#[test]
fn a_recording_that_cannot_be_fetched_is_a_turn_that_failed() {
    let mut world = World::new();
    let (clip, _dropped) = await_clip(&mut world).unwrap();
    let last = world.say("There we are.");
    let reason = "the recording of media.example: its server answered 404".to_owned();
    world.machine.handle_command(world.now, Command::Arrived { turn: clip.clone(), clip: Err(reason.clone()) });
    world.run(5_000 * MS);
    let events = world.take_events();
    let told = events.iter().any(|e| matches!(e, CallEvent::Error(text) if text.contains(&reason)));
    assert!(told, "the agent is told: {events:?}");
    let ends: Vec<_> = ended(&events).into_iter().map(|(id, how, _)| (id, how)).collect();
    assert_eq!(ends, [(clip.to_string(), TurnHow::Failed(reason)), (last.to_string(), TurnHow::Done)]);
}

#[test]
fn an_interruption_ends_a_download_and_what_comes_of_it_is_not_played() {
    let mut world = World::new();
    let (clip, mut dropped) = await_clip(&mut world).unwrap();
    assert!(matches!(dropped.try_recv(), Err(oneshot::error::TryRecvError::Empty)));
    world.handle.interrupt().unwrap();
    world.settle();
    assert!(matches!(dropped.try_recv(), Err(oneshot::error::TryRecvError::Closed)), "nobody waits for it");
    world.machine.handle_command(world.now, Command::Arrived { turn: clip, clip: Ok(vec![0.5; 24_000].into()) });
    world.run(3_000 * MS);
    assert!(world.audible().is_empty());
}

#[test]
fn no_more_recordings_are_fetched_at_a_time_than_may_be() {
    let mut world = World::new();
    let mut kept = Vec::new();
    for _ in 0..4 {
        kept.push(await_clip(&mut world).unwrap());
    }
    assert_eq!(await_clip(&mut world).unwrap_err(), SpeakError::Busy, "it is offered again later");
    let (turn, _) = kept.remove(0);
    world.machine.handle_command(world.now, Command::Arrived { turn, clip: Ok(vec![0.5; 480].into()) });
    world.settle();
    assert!(await_clip(&mut world).is_ok());
}

#[test]
fn naming_another_turn_closes_the_open_one() {
    let mut world = World::new();
    let delta = |id: &str, token: &str| TextDelta {
        id: Some(id.into()),
        token: token.into(),
        last: false,
        style: Style::default(),
    };
    world.handle.push_text(delta("one", "An unfinished sentence")).unwrap();
    world.handle.push_text(delta("two", "Another unfinished sentence")).unwrap();
    world.run(5_000 * MS);
    let turns = ended(&world.take_events());
    assert_eq!(turns.len(), 1);
    assert_eq!((turns[0].0.as_str(), turns[0].2.text.as_str()), ("one", "An unfinished sentence"));
}
