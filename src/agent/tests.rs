//! What a call is asked to do for its agent, without a network: the call is a machine, or a queue of its commands.

use std::time::{Duration, Instant};

use tokio::sync::{broadcast, oneshot};

use super::*;
use crate::call::command::Command;
use crate::call::machine::{Machine, fixture};
use crate::clock;
use crate::media::leg::{Codec, MediaFormat};

struct Rig {
    machine: Machine,
    handle: CallHandle,
    inbox: mpsc::Receiver<Command>,
    now: Instant,
}

impl Rig {
    fn new() -> Self {
        let now = clock::now();
        let (machine, handle, inbox) = fixture::machine(now, &MediaFormat::plain(Codec::Pcmu));
        Self { machine, handle, inbox, now }
    }

    /// What is asked of the call, but for how it listens.
    fn asked(&mut self) -> Vec<Command> {
        let all = std::iter::from_fn(|| self.inbox.try_recv().ok());
        all.filter(|command| !matches!(command, Command::Listen(_))).collect()
    }

    /// `asking` to its end, while the call does what it is asked.
    async fn while_it_runs<T>(&mut self, asking: impl Future<Output = T>) -> T {
        let mut asking = std::pin::pin!(asking);
        loop {
            tokio::select! {
                biased;
                done = &mut asking => return done,
                Some(command) = self.inbox.recv() => self.machine.handle_command(self.now, command),
            }
        }
    }
}

/// What serves the call, and the ends of a link that may take over.
fn conversation(handle: &CallHandle, agent: Agent) -> (Conversation, mpsc::Sender<Link>, broadcast::Sender<CallEvent>) {
    let (happens, events) = broadcast::channel(8);
    let (attach, attached) = mpsc::channel(1);
    let relay = Relay::new(handle.clone(), &agent);
    (Conversation { relay, agent, web: None, events, shown: None, messages: None, attached }, attach, happens)
}

fn link() -> (Link, mpsc::Receiver<String>, mpsc::Sender<String>) {
    let (to, told) = mpsc::channel(relay::LINK_FRAMES);
    let (say, from) = mpsc::channel(relay::LINK_INBOX);
    (Link { to, from }, told, say)
}

#[tokio::test]
async fn an_agent_that_ends_the_call_and_leaves_is_heard_to_the_end() {
    for apology in ["Sorry.", ""] {
        let mut rig = Rig::new();
        let agent = Agent { apology: apology.into(), ..Agent::at("ws://127.0.0.1:1/") };
        let (conversation, _attach, _happens) = self::conversation(&rig.handle, agent);
        let handle = rig.handle.clone();
        rig.while_it_runs(handle.speak(TurnRequest::new("Goodbye."))).await.expect("taken");
        handle.finish(EndReason::HungUp).expect("room");
        rig.while_it_runs(conversation.apologise()).await;
        assert_eq!(fixture::asked_to_end(&handle), None, "apology `{apology}`: what is queued is cut off");
        // One that just leaves is lost.
        let mut rig = Rig::new();
        let agent = Agent { apology: apology.into(), ..Agent::at("ws://127.0.0.1:1/") };
        let (conversation, _attach, _happens) = self::conversation(&rig.handle, agent);
        rig.while_it_runs(conversation.apologise()).await;
        let at_once = apology.is_empty().then_some(EndReason::AgentLost);
        assert_eq!(fixture::asked_to_end(&rig.handle), at_once);
    }
}

#[tokio::test]
async fn a_greeting_waits_for_capacity() {
    let mut rig = Rig::new();
    let agents = Agents::new(BTreeMap::new());
    agents.serve(rig.handle.clone(), Agent { greeting: Some("Hello.".into()), ..Agent::at("builtin:silent") });
    loop {
        match rig.inbox.recv().await.expect("it greets") {
            Command::Speak { turn, .. } => {
                break assert!(turn.request.patient && turn.request.text == "Hello.");
            }
            _ => continue,
        }
    }
}

#[tokio::test]
async fn what_an_agent_sent_before_it_closed_its_link_is_carried_out() {
    let mut rig = Rig::new();
    let (link, told, say) = link();
    // It has sent this and is gone before anything reached it.
    drop(told);
    for name in ["a", "b", "c"] {
        say.send(format!(r#"{{"type":"mark","name":"{name}"}}"#)).await.expect("room");
    }
    drop(say);
    let (happens, mut events) = broadcast::channel(8);
    happens.send(CallEvent::Connected).expect("heard");
    happens.send(CallEvent::Vad { speaking: true }).expect("heard");
    let (_attach, mut attached) = mpsc::channel(1);
    let mut relay = Relay::new(rig.handle.clone(), &Agent::at("ws://127.0.0.1:1/"));
    let end = relay.run(link, &mut events, &mut attached).await;
    assert!(matches!(end, RelayEnd::LinkClosed), "{end:?}");
    let marks: Vec<_> = rig
        .asked()
        .into_iter()
        .filter_map(|command| match command {
            Command::Mark(name) => Some(name),
            _ => None,
        })
        .collect();
    assert_eq!(marks, ["a", "b", "c"]);
}

#[tokio::test]
async fn what_a_media_agent_sent_before_it_closed_its_link_is_carried_out() {
    let mut rig = Rig::new();
    let (link, told, say) = link();
    drop(told);
    say.send(r#"{"event":"clear","streamSid":"MZ"}"#.into()).await.expect("room");
    drop(say);
    let (tell, closing) = oneshot::channel();
    tell.send(client::Closing::Peer).expect("asked");
    let (_happens, mut events) = broadcast::channel(8);
    let (_attach, mut attached) = mpsc::channel(1);
    media::serve_once(&rig.handle, client::Dialled { link, closing }, &mut events, &mut attached).await;
    assert!(matches!(rig.asked()[..], [Command::Clear]));
}

#[tokio::test]
async fn data_is_handed_on_once_however_often_the_end_is_offered() {
    let mut rig = Rig::new();
    let mut relay = Relay::new(rig.handle.clone(), &Agent::at("ws://127.0.0.1:1/"));
    rig.asked();
    // Room for one more command.
    let room = rig.handle.clone();
    let mut filled = 0;
    while room.mark("m").is_ok() {
        filled += 1;
    }
    assert!(rig.inbox.try_recv().is_ok());
    let end = || frames::parse(r#"{"type":"end","handoffData":"7"}"#).expect("a frame");
    assert_eq!(relay.apply(end()).await, Err(SpeakError::Busy));
    assert_eq!(rig.asked().len(), filled - 1, "nothing was handed on");
    assert_eq!(relay.apply(end()).await, Ok(()));
    assert!(matches!(&rig.asked()[..], [Command::Handoff(data), Command::Finish(EndReason::HungUp)] if data == "7"));
}

/// Whether the agent is told of a turn that has not ended, and what the call was asked about listening.
fn hearing(rig: &mut Rig, relay: &Relay) -> (bool, Vec<crate::hear::ear::Listen>) {
    let turn = crate::hear::TurnEvent {
        phase: crate::hear::Phase::Partial,
        text: "I would".into(),
        language: "en".into(),
        start: Duration::ZERO,
        end: Duration::ZERO,
        confidence: 1.0,
        eager: 0,
    };
    let asked = std::iter::from_fn(|| rig.inbox.try_recv().ok()).filter_map(|command| match command {
        Command::Listen(listen) => Some(listen),
        _ => None,
    });
    (relay.frame(&CallEvent::Heard(turn)).is_some(), asked.collect())
}

#[tokio::test]
async fn an_agent_says_in_answer_to_setup_how_it_wants_to_hear_and_the_next_one_does_not_inherit_it() {
    let mut rig = Rig::new();
    let mut relay = Relay::new(rig.handle.clone(), &Agent::at("ws://127.0.0.1:1/"));
    let (told, asked) = hearing(&mut rig, &relay);
    assert!(!told && asked[0].partials == Some(false), "as configured: {asked:?}");
    let answer = r#"{"type":"setup","partials":true,"transcriptionLanguage":"de-DE","expect":"digits"}"#;
    relay.apply(frames::parse(answer).expect("a frame")).await.expect("room");
    let (told, asked) = hearing(&mut rig, &relay);
    assert!(told);
    let listen = crate::hear::ear::Listen {
        partials: Some(true),
        language: Some("de-DE".into()),
        expect: Some(crate::hear::Expect::Digits),
    };
    assert_eq!(asked, [listen]);
    // An answer that says nothing of it, as one that comes from a bot which repeats what it is sent.
    relay.apply(frames::parse(r#"{"type":"setup","callSid":"CA"}"#).expect("a frame")).await.expect("room");
    assert!(hearing(&mut rig, &relay).0);
    // Another takes its place.
    let (link, _told, say) = link();
    drop(say);
    let (_happens, mut events) = broadcast::channel(8);
    let (_attach, mut attached) = mpsc::channel(1);
    relay.run(link, &mut events, &mut attached).await;
    let (told, asked) = hearing(&mut rig, &relay);
    assert!(!told && asked.last().is_some_and(|listen| listen.partials == Some(false)), "{asked:?}");
}

#[tokio::test]
async fn an_agent_that_attaches_does_not_wait_for_the_one_that_is_dialled() {
    let rig = Rig::new();
    // It takes the connection and never answers the handshake.
    let deaf = std::net::TcpListener::bind("127.0.0.1:0").expect("a free port");
    let url = format!("ws://{}/", deaf.local_addr().expect("bound"));
    let (mut conversation, attach, _happens) = conversation(&rig.handle, Agent::at(&url));
    let (link, _told, _say) = link();
    attach.send(link).await.expect("room");
    let end = conversation.serve_configured().await;
    assert!(matches!(end, RelayEnd::Replaced(_)), "{end:?}");
}

#[tokio::test]
async fn an_agent_sets_its_speed_for_all_its_turns_and_for_one() {
    let mut rig = Rig::new();
    let agent = Agent { speed: 1.5, ..Agent::at("ws://127.0.0.1:1/") };
    let mut relay = Relay::new(rig.handle.clone(), &agent);
    rig.asked();
    for (more, speed) in [("", 1.5), (r#","speed":0.8"#, 0.8), (r#","speed":99"#, 4.0)] {
        let frame = format!(r#"{{"type":"text","token":"Hello.","last":true{more}}}"#);
        assert_eq!(relay.apply(frames::parse(&frame).expect("a frame")).await, Ok(()));
        assert!(matches!(&rig.asked()[..], [Command::Text(delta)] if delta.style.speed == speed), "{more}");
    }
}
