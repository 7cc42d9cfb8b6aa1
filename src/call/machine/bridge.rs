//! What is different on a call whose peer speaks with a human.
//!
//! Owns where the bridge stands and the way to the other call. What is mixed is the business of [`super::output`].

use std::ops::ControlFlow;
use std::time::Instant;

use metrics::{Gauge, counter, gauge};

use super::Action;
use super::intake::Intake;
use super::lifetime::Lifetime;
use super::outbox::Outbox;
use super::output::Mix;
use super::speaking::Speaking;
use crate::call::bridge::{BridgeMode, LinkSender, Piece, Role, Speaker, WaitTone};
use crate::call::caller::CallerInput;
use crate::call::command::Command;
use crate::call::handle::SpeakError;
use crate::call::{BridgeState, CallEvent, CallId, Cause, Dialling, EndReason};
use crate::media::relay::Relay;

/// Where the bridge of a call stands.
#[derive(Debug, Default)]
pub(super) struct Bridge(Option<Joined>);

/// A bridge that is there.
#[derive(Debug)]
struct Joined {
    role: Role,
    with: CallId,
    to: LinkSender,
    /// The agent was told that it is not heard.
    told: bool,
    /// The gateway drains: what follows the bridge is the end.
    drained: bool,
    _counted: Option<Counted>,
}

/// A bridge in `antiphon_bridges`, for as long as it is there.
struct Counted(Gauge);

impl Counted {
    fn new() -> Self {
        let gauge = gauge!("antiphon_bridges");
        gauge.increment(1.0);
        Self(gauge)
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.decrement(1.0);
    }
}

impl std::fmt::Debug for Counted {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Counted")
    }
}

impl Bridge {
    /// Whether the peer speaks with somebody.
    pub(super) fn is_up(&self) -> bool {
        matches!(self.role(), Some(Role::Caller(_) | Role::Human))
    }

    fn role(&self) -> Option<Role> {
        self.0.as_ref().map(|joined| joined.role)
    }

    /// What the agent does meanwhile, on the call that has one.
    fn mode(&self) -> Option<BridgeMode> {
        match self.role()? {
            Role::Caller(mode) => Some(mode),
            Role::Human | Role::Waiting | Role::Ringing => None,
        }
    }

    /// Whether what the agent says is refused.
    fn silences(&self) -> bool {
        self.mode().is_some_and(|mode| !mode.speaks())
    }

    /// A key of the peer is for the other side.
    pub(super) fn pass_digit(&self, digit: char) {
        if let Some(joined) = self.0.as_ref().filter(|_| self.is_up()) {
            joined.to.send(Piece::Digit(digit));
        }
    }

    /// This call is over.
    pub(super) fn over(&mut self, reason: EndReason) {
        if let Some(joined) = self.0.take() {
            joined.to.send(Piece::Over(reason));
        }
    }
}

/// The parts of its call that a bridge acts on.
pub(super) struct Around<'a> {
    pub(super) out: &'a mut Outbox,
    pub(super) speaking: &'a mut Speaking,
    pub(super) intake: &'a mut Intake,
    pub(super) caller: &'a mut CallerInput,
    pub(super) lifetime: &'a mut Lifetime,
}

impl Around<'_> {
    /// Cuts off everything that is said or waits to be.
    fn cut_all(&mut self, now: Instant) {
        let cut = self.speaking.cancel(now, Cause::Agent, |_| false, self.out);
        self.intake.cut_off(now, cut);
    }
}

impl Bridge {
    /// Takes commands about bridges, and those that a bridge refuses, with why the call is over if it is; gives back the
    /// others.
    pub(super) fn command(
        &mut self,
        now: Instant,
        command: Command,
        around: &mut Around<'_>,
    ) -> ControlFlow<Option<EndReason>, Command> {
        match command {
            Command::Bridge(request) => around.out.push(Action::Bridge(request)),
            Command::BridgeRefused(reason) => {
                count("failed");
                let state = BridgeState::Dialling(Dialling::Failed { reason });
                around.out.event(CallEvent::Bridge { with: None, state });
            }
            Command::Bridging { with, state, wait } => self.dialled(now, with, state, wait, around),
            Command::Join(link) => self.join(now, link.role, link.with, link.to, around),
            Command::BridgeMode(mode) => self.set_mode(now, mode, around),
            Command::EndBridge => match self.role() {
                Some(Role::Caller(_)) => self.end(now, None, around),
                Some(Role::Human | Role::Ringing) => return ControlFlow::Break(Some(EndReason::HungUp)),
                // The task that dials has been told.
                Some(Role::Waiting) | None => {}
            },
            // A drain lets what is queued be said: people who speak with each other have a grace of their own.
            Command::Finish(EndReason::Drained) if self.is_up() => {
                self.0.iter_mut().for_each(|joined| joined.drained = true);
            }
            Command::Speak { turn, reply } if self.silences() => {
                around.out.shared.backlog.give_back(turn.request.text.len());
                // A requester that is gone needs no answer.
                let _ = reply.send(Err(SpeakError::Bridged));
            }
            Command::Room { reply } if self.silences() => {
                let _ = reply.send(Err(SpeakError::Bridged));
            }
            Command::Play { reply, .. } | Command::Await { reply, .. } if self.silences() => {
                let _ = reply.send(Err(SpeakError::Bridged));
            }
            Command::Text(delta) if self.silences() => {
                around.out.shared.backlog.give_back(delta.token.len());
                self.tell_silenced(around.out);
            }
            Command::Audio { .. } if self.silences() => self.tell_silenced(around.out),
            other => return ControlFlow::Continue(other),
        }
        ControlFlow::Break(None)
    }

    /// Takes what the other call sends; `None`: it is gone. Why this call is over, if it is.
    pub(super) fn take(&mut self, now: Instant, piece: Option<Piece>, around: &mut Around<'_>) -> Option<EndReason> {
        let role = self.role()?;
        around.lifetime.active(now);
        let reason = match piece {
            Some(Piece::Over(reason)) => Some(reason),
            None => None,
            Some(piece) => {
                self.take_piece(now, piece, around);
                return None;
            }
        };
        match role {
            Role::Caller(_) => self.end(now, reason, around),
            // The caller for whom it was called is gone, or the bridge was ended.
            Role::Human => return Some(EndReason::HungUp),
            Role::Waiting => self.stop_waiting(now, around.speaking),
            // The task that dials ends it, or joins it.
            Role::Ringing => {}
        }
        None
    }

    /// Nothing more comes of the call that rings: it is over, or its two ends are exchanged for those of a bridge.
    fn stop_waiting(&mut self, now: Instant, speaking: &mut Speaking) {
        if self.role() == Some(Role::Waiting) {
            self.0 = None;
            speaking.output.ring(now, false);
        }
    }

    fn take_piece(&self, now: Instant, piece: Piece, around: &mut Around<'_>) {
        match piece {
            Piece::Digit(_) | Piece::Said { .. } if !self.is_up() => return,
            Piece::Digit(digit) => return around.speaking.dial(now, digit.encode_utf8(&mut [0; 4]), around.out),
            Piece::Said { text, lang } => {
                if self.mode().is_some_and(BridgeMode::hears) {
                    around.out.event(CallEvent::Overheard { speaker: Speaker::Human, text, lang });
                }
                return;
            }
            _ => {}
        }
        if let Some(ahead) = around.speaking.output.ahead() {
            match piece {
                Piece::Heard(frame) => ahead.push_heard(&frame),
                Piece::Silence(_) => ahead.silence(),
                _ => {}
            }
            return;
        }
        let Some(mix) = around.speaking.output.mix() else { return };
        match piece {
            Piece::Heard(frame) => mix.voice.push_heard(&frame),
            Piece::Silence(_) => mix.voice.silence(),
            Piece::Whisper(sound) => mix.whisper.push(*sound),
            Piece::Digit(_) | Piece::Said { .. } | Piece::Over(_) => {}
        }
    }

    /// What the peer of a bridged call does is not told to its agent; what it says is, where the agent listens.
    pub(super) fn overhear(&self, event: &CallEvent, out: &mut Outbox) {
        let CallEvent::Prompt { text, lang, last: true, .. } = event else { return };
        let Some(joined) = &self.0 else { return };
        let (text, lang) = (text.clone(), lang.clone());
        match joined.role {
            Role::Human => joined.to.send(Piece::Said { text, lang }),
            Role::Caller(mode) if mode.hears() => {
                out.event(CallEvent::Overheard { speaker: Speaker::Caller, text, lang });
            }
            Role::Caller(_) | Role::Waiting | Role::Ringing => {}
        }
    }

    /// The human's telephone rings, or will not be picked up.
    fn dialled(
        &mut self,
        now: Instant,
        with: Option<CallId>,
        state: Dialling,
        wait: WaitTone,
        around: &mut Around<'_>,
    ) {
        if self.is_up() {
            return;
        }
        if state.is_over() {
            self.stop_waiting(now, around.speaking);
            // Before the agent hears of it: it may ask for another at once.
            around.out.shared.bridging.give_back();
            count(match &state {
                Dialling::NoAnswer { .. } => "no_answer",
                other => other.label(),
            });
        }
        around.speaking.output.ring(now, wait == WaitTone::Ringback && !state.is_over());
        around.out.event(CallEvent::Bridge { with, state: BridgeState::Dialling(state) });
    }

    fn join(&mut self, now: Instant, role: Role, with: CallId, to: LinkSender, around: &mut Around<'_>) {
        let caller = matches!(role, Role::Caller(_));
        if around.lifetime.has_ended() {
            return;
        }
        // Given up at the moment of the answer: who gave it up has been told so. Dropping the way to the other call ends it.
        if caller && around.out.shared.bridging.is_cancelled() {
            self.dialled(now, Some(with), Dialling::Cancelled, WaitTone::None, around);
            return around.out.push(Action::Unlink);
        }
        if matches!(role, Role::Waiting | Role::Ringing) {
            return self.join_ahead(now, role, with, to, around);
        }
        if !set_mix(now, role, &to, around) {
            // Dropping the way to the other call ends the bridge.
            return around.out.push(Action::Unlink);
        }
        around.caller.join(Some(to.clone()));
        let counted = caller.then(Counted::new);
        self.0 = Some(Joined { role, with: with.clone(), to, told: false, drained: false, _counted: counted });
        if caller {
            count("connected");
        }
        tell_mode(with, role, around.out);
    }

    /// The one call is not answered, and the other waits for it. Its agent goes on speaking with its peer.
    fn join_ahead(&mut self, now: Instant, role: Role, with: CallId, to: LinkSender, around: &mut Around<'_>) {
        if role == Role::Ringing {
            around.caller.join(Some(to.clone()));
        } else {
            match Relay::new() {
                Ok(sound) => around.speaking.output.ring_as(now, sound),
                // The tone goes on.
                Err(_) => return around.out.push(Action::Unlink),
            }
        }
        self.0 = Some(Joined { role, with, to, told: false, drained: false, _counted: None });
    }

    fn set_mode(&mut self, now: Instant, mode: BridgeMode, around: &mut Around<'_>) {
        let Some(joined) = self.0.as_mut().filter(|joined| joined.role != Role::Waiting) else {
            return around.out.error("the call is not bridged: there is no mode to change".into());
        };
        if matches!(joined.role, Role::Human | Role::Ringing) {
            return around.out.error("the mode of a bridge is set on the caller's call".into());
        }
        (joined.role, joined.told) = (Role::Caller(mode), false);
        if set_mix(now, joined.role, &joined.to, around) {
            tell_mode(joined.with.clone(), joined.role, around.out);
        }
    }

    /// The bridge is over and the peer with its agent again.
    fn end(&mut self, now: Instant, reason: Option<EndReason>, around: &mut Around<'_>) {
        let Some(joined) = self.0.take() else { return };
        around.cut_all(now);
        around.caller.join(None);
        around.speaking.output.bridge(now, None);
        around.out.push(Action::Unlink);
        around.out.shared.bridging.set(None);
        // Before the agent hears of it: it may ask for another at once.
        around.out.shared.bridging.give_back();
        around.out.event(CallEvent::Bridge { with: Some(joined.with), state: BridgeState::Ended(reason) });
        if joined.drained {
            around.intake.end(EndReason::Drained, around.speaking, around.out);
        }
    }

    /// Tells once that what is streamed into a bridged call is not heard.
    fn tell_silenced(&mut self, out: &mut Outbox) {
        if let Some(joined) = &mut self.0
            && !std::mem::replace(&mut joined.told, true)
        {
            out.error(SpeakError::Bridged.to_string());
        }
    }
}

/// Cuts off what the call says, and mixes from now on as `role` has it; `false`: it cannot be done.
fn set_mix(now: Instant, role: Role, to: &LinkSender, around: &mut Around<'_>) -> bool {
    let (to_peer, to_other) = match role {
        Role::Human | Role::Waiting | Role::Ringing => (true, None),
        Role::Caller(mode) => (mode == BridgeMode::Join, mode.speaks().then(|| to.clone())),
    };
    around.cut_all(now);
    if let Some(mix) = around.speaking.output.mix() {
        // What has come of the other call stays.
        (mix.to_peer, mix.to_other) = (to_peer, to_other);
        return true;
    }
    match Mix::new(to_peer, to_other) {
        Ok(mix) => around.speaking.output.bridge(now, Some(mix)),
        Err(error) => {
            around.out.error(format!("the calls cannot be joined: {error}"));
            return false;
        }
    }
    true
}

fn tell_mode(with: CallId, role: Role, out: &mut Outbox) {
    let mode = match role {
        Role::Caller(mode) => mode,
        Role::Human | Role::Waiting | Role::Ringing => BridgeMode::Leave,
    };
    out.shared.bridging.set(Some((with.clone(), mode)));
    out.event(CallEvent::Bridge { with: Some(with), state: BridgeState::Connected(mode) });
}

fn count(outcome: &'static str) {
    counter!("antiphon_bridges_total", "outcome" => outcome).increment(1);
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use bytes::Bytes;
    use tokio::sync::mpsc;

    use super::*;
    use crate::audio::FRAME;
    use crate::call::CallHandle;
    use crate::call::bridge::Link;
    use crate::call::machine::{Machine, fixture};
    use crate::clock;
    use crate::hear::{HearEvent, Phase, TurnEvent};
    use crate::media::decode;
    use crate::media::leg::{Codec, InPacket, LegEvent, MediaFormat};

    /// One call of two, and what leaves of it.
    struct Party {
        machine: Machine,
        handle: CallHandle,
        inbox: mpsc::Receiver<Command>,
        link: Option<mpsc::Receiver<Piece>>,
        events: Vec<CallEvent>,
        watched: Vec<CallEvent>,
        /// Loudest sample of each packet of sound, and telephone events.
        sent: Vec<i16>,
        keys: usize,
        ended: Option<EndReason>,
        sequence: u16,
    }

    impl Party {
        fn new(now: Instant) -> Self {
            let telephone_event = Some((101, 8_000));
            let format = MediaFormat { telephone_event, continuous: true, ..MediaFormat::plain(Codec::Pcmu) };
            let (mut machine, handle, inbox) = fixture::machine(now, &format);
            machine.handle_leg(now, LegEvent::Connected);
            Self {
                machine,
                handle,
                inbox,
                link: None,
                events: Vec::new(),
                watched: Vec::new(),
                sent: Vec::new(),
                keys: 0,
                ended: None,
                sequence: 0,
            }
        }

        fn join(&mut self, now: Instant, mut link: Link) {
            let (_, none) = mpsc::channel(1);
            self.link = Some(std::mem::replace(&mut link.from, none));
            self.machine.handle_command(now, Command::Join(Box::new(link)));
        }

        /// 20 ms of sound (`byte` in mu-law) from the peer.
        fn hears(&mut self, now: Instant, byte: u8) {
            let timestamp = u32::from(self.sequence) * 160;
            let (sequence, payload) = (self.sequence, Bytes::from(vec![byte; 160]));
            self.sequence += 1;
            let packet =
                InPacket { payload_type: 0, marker: false, sequence, timestamp, ssrc: 1, arrived: now, payload };
            self.machine.handle_leg(now, LegEvent::Rtp(packet));
        }

        fn step(&mut self, now: Instant) {
            while let Ok(command) = self.inbox.try_recv() {
                self.machine.handle_command(now, command);
            }
            while let Some(link) = &mut self.link {
                let piece = match link.try_recv() {
                    Ok(piece) => Some(piece),
                    Err(mpsc::error::TryRecvError::Empty) => break,
                    Err(mpsc::error::TryRecvError::Disconnected) => {
                        self.link = None;
                        None
                    }
                };
                self.machine.handle_piece(now, piece);
            }
            while let Some(action) = self.machine.poll(now) {
                match action {
                    Action::Send(packet) if packet.payload_type == 101 => self.keys += 1,
                    Action::Send(packet) => {
                        let loudest = packet.payload.iter().map(|byte| decode::mu_law(*byte).saturating_abs()).max();
                        self.sent.push(loudest.unwrap_or(0));
                    }
                    Action::Event(event) => self.events.push(event),
                    Action::Watched(event) => self.watched.push(event),
                    Action::Unlink => self.link = None,
                    Action::End(reason) => self.ended = Some(reason),
                    _ => {}
                }
            }
        }
    }

    /// A caller and a human who have been joined, and the time.
    fn joined(mode: BridgeMode) -> (Party, Party, Instant) {
        let now = clock::now();
        let (mut caller, mut human) = (Party::new(now), Party::new(now));
        let (one, other) = Link::pair(caller.handle.id().clone(), human.handle.id().clone(), mode);
        human.join(now, other);
        caller.join(now, one);
        (caller, human, now)
    }

    /// 20 ms at a time, `each` before both.
    fn run(
        (caller, human): (&mut Party, &mut Party),
        now: &mut Instant,
        frames: usize,
        mut each: impl FnMut(&mut Party, &mut Party, Instant),
    ) {
        for _ in 0..frames {
            *now += FRAME;
            each(caller, human, *now);
            caller.step(*now);
            human.step(*now);
        }
    }

    fn connected(events: &[CallEvent]) -> Vec<BridgeMode> {
        let mode = |event: &CallEvent| match event {
            CallEvent::Bridge { state: BridgeState::Connected(mode), .. } => Some(*mode),
            _ => None,
        };
        events.iter().filter_map(mode).collect()
    }

    fn states(events: &[CallEvent]) -> Vec<&'static str> {
        let state = |event: &CallEvent| match event {
            CallEvent::Bridge { state, .. } => Some(state.label()),
            _ => None,
        };
        events.iter().filter_map(state).collect()
    }

    #[test]
    fn each_hears_the_other_and_keys_pass() {
        let (mut caller, mut human, mut now) = joined(BridgeMode::Leave);
        // Loud from the caller, softer from the human.
        run((&mut caller, &mut human), &mut now, 100, |caller, human, now| {
            caller.hears(now, 0x90);
            human.hears(now, 0xb0);
        });
        assert_eq!(connected(&caller.events), [BridgeMode::Leave]);
        assert_eq!(caller.handle.info().bridged_with.as_ref(), Some(human.handle.id()));
        for (sent, byte) in [(&human.sent, 0x90), (&caller.sent, 0xb0)] {
            assert!(sent.len() >= 100);
            let (settled, level) = (&sent[20..], decode::mu_law(byte).saturating_abs());
            let near = |loudest: &i16| (level / 10 * 8..level / 10 * 12).contains(loudest);
            assert!(settled.iter().all(near), "{level}: {settled:?}");
        }
        caller.machine.handle_leg(now, LegEvent::Digit('7'));
        run((&mut caller, &mut human), &mut now, 20, |_, _, _| {});
        assert!(human.keys >= 3, "packets of the key: {}", human.keys);
        assert!(!caller.events.contains(&CallEvent::Digit('7')), "it is none of the agent's business");
        assert!(caller.watched.contains(&CallEvent::Digit('7')));
    }

    #[test]
    fn a_bridge_that_is_given_up_as_it_is_answered_is_none() {
        let mut now = clock::now();
        let (mut caller, mut human) = (Party::new(now), Party::new(now));
        caller.handle.shared.bridging.take().expect("the only one");
        caller.handle.end_bridge().expect("it is dialled");
        let (one, other) = Link::pair(caller.handle.id().clone(), human.handle.id().clone(), BridgeMode::Leave);
        human.join(now, other);
        caller.join(now, one);
        run((&mut caller, &mut human), &mut now, 5, |_, _, _| {});
        assert_eq!(
            (states(&caller.events), human.ended, caller.ended),
            (vec!["cancelled"], Some(EndReason::HungUp), None)
        );
        assert!(caller.handle.claim_bridge().is_some(), "there may be another");
    }

    #[test]
    fn an_agent_that_has_left_is_silent_and_its_text_is_refused() {
        let (mut caller, mut human, mut now) = joined(BridgeMode::Leave);
        caller.step(now);
        for _ in 0..3 {
            caller
                .handle
                .push_text(crate::call::TextDelta {
                    id: None,
                    token: "Hello. ".into(),
                    last: false,
                    style: Default::default(),
                })
                .expect("taken");
        }
        run((&mut caller, &mut human), &mut now, 5, |_, _, _| {});
        let errors = caller.events.iter().filter(|event| matches!(event, CallEvent::Error(_))).count();
        assert_eq!((errors, caller.handle.info().backlog_bytes), (1, 0), "told once, and forgotten");
        assert!(!caller.events.iter().any(|event| matches!(event, CallEvent::TurnStarted { .. })));
    }

    #[test]
    fn streamed_sound_is_whispered_to_the_human_or_heard_by_both() {
        for (mode, caller_hears) in [(BridgeMode::Whisper, false), (BridgeMode::Join, true)] {
            let (mut caller, mut human, mut now) = joined(mode);
            caller.step(now);
            run((&mut caller, &mut human), &mut now, 1, |_, _, _| {});
            let (from, to) = (caller.sent.len(), human.sent.len());
            caller.handle.inject_audio(vec![8_000; 24_000], 24_000, None).expect("taken");
            run((&mut caller, &mut human), &mut now, 60, |_, _, _| {});
            let loud = |sent: &[i16]| sent.iter().filter(|loudest| **loudest > 5_000).count();
            assert!(loud(&human.sent[to..]) >= 48, "{mode:?}: {:?}", &human.sent[to..]);
            let heard = loud(&caller.sent[from..]);
            assert_eq!(heard >= 48, caller_hears, "{mode:?}: {heard}");
            assert!(caller_hears || heard == 0, "{mode:?}: {heard}");
        }
    }

    #[test]
    fn what_is_said_is_told_to_an_agent_that_listens_and_to_no_other() {
        let said = |words: &str| {
            let (start, end) = (Duration::from_secs(1), Duration::from_secs(2));
            let (text, language) = (words.to_owned(), "en".to_owned());
            HearEvent::Turn(TurnEvent {
                phase: Phase::EndOfTurn,
                text,
                language,
                start,
                end,
                confidence: 0.9,
                eager: 0,
            })
        };
        for (mode, hears) in [(BridgeMode::Leave, false), (BridgeMode::Listen, true)] {
            let (mut caller, mut human, mut now) = joined(mode);
            caller.step(now);
            human.step(now);
            caller.machine.handle_heard(now, said("My name is Ada."));
            human.machine.handle_heard(now, said("Hello Ada."));
            run((&mut caller, &mut human), &mut now, 3, |_, _, _| {});
            // The human's words come by way of its own call.
            run((&mut caller, &mut human), &mut now, 3, |_, _, _| {});
            let overheard: Vec<_> = caller
                .events
                .iter()
                .filter_map(|event| match event {
                    CallEvent::Overheard { speaker, text, .. } => Some((*speaker, text.as_str())),
                    _ => None,
                })
                .collect();
            let all = [(Speaker::Caller, "My name is Ada."), (Speaker::Human, "Hello Ada.")];
            assert_eq!(overheard, if hears { &all[..] } else { &[] }, "{mode:?}");
            assert!(!caller.events.iter().any(|event| matches!(event, CallEvent::Prompt { .. })), "nobody asks it");
            let kept = |event: &&CallEvent| matches!(event, CallEvent::Prompt { .. });
            assert_eq!(caller.watched.iter().filter(kept).count(), 1, "the record has it");
        }
    }

    #[test]
    fn the_caller_is_back_with_the_agent_when_the_human_goes_and_the_human_goes_with_the_bridge() {
        // The human hangs up.
        let (mut caller, mut human, mut now) = joined(BridgeMode::Whisper);
        run((&mut caller, &mut human), &mut now, 5, |_, _, _| {});
        human.machine.handle_leg(now, LegEvent::Closed(crate::media::leg::LegEnd::Remote));
        run((&mut caller, &mut human), &mut now, 5, |_, _, _| {});
        assert_eq!((human.ended, caller.ended), (Some(EndReason::Remote), None));
        let last = caller.events.iter().rev().find(|event| matches!(event, CallEvent::Bridge { .. }));
        assert!(
            matches!(last, Some(CallEvent::Bridge { state: BridgeState::Ended(Some(EndReason::Remote)), .. })),
            "{last:?}"
        );
        assert_eq!(caller.handle.info().bridged_with, None);
        caller.handle.inject_audio(vec![8_000; 12_000], 24_000, None).expect("taken");
        let from = caller.sent.len();
        run((&mut caller, &mut human), &mut now, 30, |_, _, _| {});
        assert!(caller.sent[from..].iter().filter(|loudest| **loudest > 5_000).count() >= 24, "it is heard again");
        // The agent ends it.
        let (mut caller, mut human, mut now) = joined(BridgeMode::Leave);
        run((&mut caller, &mut human), &mut now, 5, |_, _, _| {});
        caller.handle.end_bridge().expect("there is one");
        run((&mut caller, &mut human), &mut now, 5, |_, _, _| {});
        assert_eq!((human.ended, caller.ended), (Some(EndReason::HungUp), None));
        // The caller hangs up.
        let (mut caller, mut human, mut now) = joined(BridgeMode::Leave);
        run((&mut caller, &mut human), &mut now, 5, |_, _, _| {});
        caller.machine.handle_leg(now, LegEvent::Closed(crate::media::leg::LegEnd::Remote));
        run((&mut caller, &mut human), &mut now, 5, |_, _, _| {});
        assert_eq!((human.ended, caller.ended), (Some(EndReason::HungUp), Some(EndReason::Remote)));
    }

    #[test]
    fn what_the_humans_network_plays_is_heard_in_place_of_the_tone_until_the_answer() {
        let mut now = clock::now();
        let (mut caller, mut human) = (Party::new(now), Party::new(now));
        let news = |state| Command::Bridging { with: None, state, wait: WaitTone::Ringback };
        caller.machine.handle_command(now, news(Dialling::EarlyMedia { status: 183 }));
        let ids = (caller.handle.id().clone(), human.handle.id().clone());
        let (one, other) = Link::ahead(ids.0.clone(), ids.1.clone());
        human.join(now, other);
        caller.join(now, one);
        let level = decode::mu_law(0xb0).saturating_abs();
        let near = |loudest: &i16| (level / 10 * 8..level / 10 * 12).contains(loudest);
        run((&mut caller, &mut human), &mut now, 60, |caller, human, now| {
            caller.hears(now, 0x90);
            human.hears(now, 0xb0);
        });
        assert!(caller.sent[20..].iter().all(near), "{:?}", caller.sent);
        assert!(human.sent.iter().all(|loudest| *loudest < 20), "nobody has picked up: {:?}", human.sent);
        assert!(!caller.machine.bridge.is_up() && connected(&caller.events).is_empty());
        // The agent still has its caller.
        let from = caller.sent.len();
        caller.handle.inject_audio(vec![8_000; 24_000], 24_000, None).expect("taken");
        run((&mut caller, &mut human), &mut now, 60, |_, human, now| human.hears(now, 0xb0));
        assert!(caller.sent[from..].iter().filter(|loudest| **loudest > 5_000).count() >= 48, "{:?}", caller.sent);
        // Picked up, in whichever order the two hear of it.
        for caller_first in [true, false] {
            let (one, other) = Link::pair(ids.0.clone(), ids.1.clone(), BridgeMode::Leave);
            if caller_first {
                caller.join(now, one);
                run((&mut caller, &mut human), &mut now, 2, |_, _, _| {});
                human.join(now, other);
            } else {
                human.join(now, other);
                run((&mut caller, &mut human), &mut now, 2, |_, _, _| {});
                caller.join(now, one);
            }
            let (from, to) = (caller.sent.len(), human.sent.len());
            run((&mut caller, &mut human), &mut now, 60, |caller, human, now| {
                caller.hears(now, 0xb0);
                human.hears(now, 0xb0);
            });
            assert!(caller.sent[from + 20..].iter().all(near) && human.sent[to + 20..].iter().all(near));
            assert_eq!((caller.ended, human.ended), (None, None));
            if caller_first {
                // As before the answer, once more.
                caller.machine.handle_command(now, Command::EndBridge);
                caller.step(now);
                let (one, other) = Link::ahead(ids.0.clone(), ids.1.clone());
                human.join(now, other);
                caller.join(now, one);
                run((&mut caller, &mut human), &mut now, 2, |_, _, _| {});
            }
        }
        // Declined after an announcement.
        caller.machine.handle_command(now, Command::EndBridge);
        caller.step(now);
        let (one, other) = Link::ahead(ids.0, ids.1);
        human.join(now, other);
        caller.join(now, one);
        caller.machine.handle_command(now, news(Dialling::Busy { status: 486 }));
        let from = caller.sent.len();
        run((&mut caller, &mut human), &mut now, 10, |_, human, now| human.hears(now, 0xb0));
        assert!(caller.sent[from + 1..].iter().all(|loudest| *loudest < 20), "{:?}", &caller.sent[from..]);
    }

    #[test]
    fn while_it_rings_the_caller_hears_the_tone_or_the_agent_and_busy_ends_it() {
        let now = clock::now();
        let mut caller = Party::new(now);
        let news = |state| Command::Bridging { with: None, state, wait: WaitTone::Ringback };
        caller.machine.handle_command(now, news(Dialling::Ringing { status: 180 }));
        let mut at = now;
        for _ in 0..40 {
            at += FRAME;
            caller.step(at);
        }
        assert!(caller.sent[5..].iter().all(|loudest| *loudest > 1_000), "{:?}", caller.sent);
        caller.machine.handle_command(at, news(Dialling::Busy { status: 486 }));
        let from = caller.sent.len();
        for _ in 0..10 {
            at += FRAME;
            caller.step(at);
        }
        assert!(caller.sent[from + 1..].iter().all(|loudest| *loudest < 20), "{:?}", &caller.sent[from..]);
        assert_eq!(states(&caller.events), ["ringing", "busy"]);
    }
}
