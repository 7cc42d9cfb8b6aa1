use super::super::auth::Credentials;
use super::*;
use crate::clock;

fn ua(port: u16) -> Ua {
    Ua::new(Identity {
        transport: "UDP",
        host: format!("127.0.0.1:{port}"),
        user: format!("u{port}"),
        credentials: Some(Credentials { username: "u".into(), password: "p".into() }),
    })
}

/// Carries messages to and fro until both are quiet; gives what each saw.
fn exchange(now: Instant, a: &mut Ua, b: &mut Ua) -> (Vec<Event>, Vec<Event>) {
    let (mut seen_a, mut seen_b) = (Vec::new(), Vec::new());
    for _ in 0..20 {
        let mut quiet = true;
        while let Some((bytes, _)) = a.poll_transmit() {
            quiet = false;
            b.receive(now, Message::parse(&bytes).unwrap());
        }
        while let Some((bytes, _)) = b.poll_transmit() {
            quiet = false;
            a.receive(now, Message::parse(&bytes).unwrap());
        }
        seen_a.extend(std::iter::from_fn(|| a.poll_event()));
        seen_b.extend(std::iter::from_fn(|| b.poll_event()));
        if quiet {
            return (seen_a, seen_b);
        }
    }
    panic!("never quiet");
}

fn sent(ua: &mut Ua) -> Vec<Message> {
    std::iter::from_fn(|| ua.poll_transmit()).map(|(bytes, _)| Message::parse(&bytes).unwrap()).collect()
}

fn connect(now: Instant) -> (Ua, Ua) {
    let (mut a, mut b) = (ua(1), ua(2));
    a.invite(now, "sip:u2@127.0.0.1:2", &[], b"offer".to_vec());
    let (_, seen) = exchange(now, &mut a, &mut b);
    assert!(matches!(&seen[..], [Event::Incoming(m)] if m.body == b"offer"));
    b.ring();
    b.accept(now, &[("X-Id".into(), "7".into())], b"answer".to_vec());
    let (seen_a, seen_b) = exchange(now, &mut a, &mut b);
    assert!(
        matches!(&seen_a[..], [Event::Progress, Event::Answered(m)] if m.body == b"answer" && m.header("X-Id") == Some("7")),
        "{seen_a:?}"
    );
    assert!(matches!(&seen_b[..], [Event::Confirmed(_)]), "{seen_b:?}");
    (a, b)
}

#[test]
fn a_call_is_made_and_either_side_may_end_it() {
    let now = clock::now();
    let (mut a, mut b) = connect(now);
    a.leave(now);
    assert_eq!(exchange(now, &mut a, &mut b), (vec![Event::Done], vec![Event::Ended]));
    let (mut a, mut b) = connect(now);
    b.leave(now);
    assert_eq!(exchange(now, &mut a, &mut b), (vec![Event::Ended], vec![Event::Done]));
    assert_eq!(a.deadline(), None);
}

#[test]
fn an_invite_is_repeated_until_it_is_answered_and_given_up_at_last() {
    let start = clock::now();
    let mut a = ua(1);
    a.invite(start, "sip:x@y", &[], Vec::new());
    let mut times = 0;
    let mut now = start;
    while let Some(deadline) = a.deadline() {
        times += sent(&mut a).len();
        now = deadline;
        a.handle_timeout(now);
    }
    assert_eq!(times, 7, "sent at 0, 0.5, 1.5, 3.5, 7.5, 15.5 and 31.5 s");
    assert_eq!(now - start, Duration::from_secs(32));
    assert_eq!(a.poll_event(), Some(Event::TimedOut("INVITE".into())));
}

#[test]
fn a_200_is_repeated_until_it_is_acknowledged() {
    let now = clock::now();
    let (mut a, mut b) = (ua(1), ua(2));
    a.invite(now, "sip:u2@127.0.0.1:2", &[], Vec::new());
    exchange(now, &mut a, &mut b);
    b.accept(now, &[], Vec::new());
    assert_eq!(sent(&mut b).len(), 1, "and is lost");
    let later = b.deadline().unwrap();
    b.handle_timeout(later);
    let again = sent(&mut b);
    assert_eq!(again.len(), 1);
    a.receive(later, again[0].clone());
    let ack = sent(&mut a);
    assert_eq!(ack.len(), 1, "and its ACK is lost");
    a.receive(later, again[0].clone());
    assert_eq!(sent(&mut a), ack, "the same ACK again");
    b.receive(later, ack[0].clone());
    assert_eq!(b.deadline(), None);
}

#[test]
fn cancel_waits_for_a_provisional_response() {
    let now = clock::now();
    let (mut a, mut b) = (ua(1), ua(2));
    a.invite(now, "sip:u2@127.0.0.1:2", &[], Vec::new());
    a.leave(now);
    let (seen_a, seen_b) = exchange(now, &mut a, &mut b);
    assert!(matches!(&seen_b[..], [Event::Incoming(_), Event::Ended]), "{seen_b:?}");
    assert!(matches!(&seen_a[..], [Event::Progress, Event::Refused { code: 487, .. }]), "{seen_a:?}");
    assert_eq!((a.deadline(), b.deadline()), (None, None));
}

#[test]
fn a_challenge_is_answered_once() {
    let now = clock::now();
    let mut a = ua(1);
    a.invite(now, "sip:x@y", &[("X-A".into(), "b".into())], b"offer".to_vec());
    let invite = sent(&mut a).remove(0);
    let challenge = |request: &Message| {
        let mut response = Message::response(401, "Unauthorized");
        for name in ["Via", "From", "To", "Call-ID", "CSeq"] {
            response = response.with(name, request.header(name).unwrap());
        }
        response.with("WWW-Authenticate", "Digest realm=\"r\", nonce=\"n\", qop=\"auth\"")
    };
    a.receive(now, challenge(&invite));
    let [ack, second] = &sent(&mut a)[..] else { panic!() };
    assert_eq!((ack.branch(), ack.cseq()), (invite.branch(), Some((1, "ACK"))));
    assert_eq!(second.cseq(), Some((2, "INVITE")));
    assert_eq!((second.header("X-A"), &second.body[..]), (Some("b"), &b"offer"[..]));
    assert!(second.header("Authorization").unwrap().contains("qop=auth"));
    a.receive(now, challenge(second));
    assert_eq!(sent(&mut a).len(), 1, "only the ACK");
    assert!(matches!(a.poll_event(), Some(Event::Refused { code: 401, .. })));
}

#[test]
fn offers_within_the_call_go_both_ways() {
    let now = clock::now();
    let (mut a, mut b) = connect(now);
    for _ in 0..2 {
        b.offer(now, b"hold".to_vec());
        let (seen, _) = exchange(now, &mut a, &mut b);
        assert!(matches!(&seen[..], [Event::Offered(m)] if m.body == b"hold"), "{seen:?}");
        a.accept(now, &[], b"held".to_vec());
        let (seen_a, seen_b) = exchange(now, &mut a, &mut b);
        assert!(matches!(&seen_a[..], [Event::Confirmed(_)]), "{seen_a:?}");
        assert!(matches!(&seen_b[..], [Event::Answered(_)]), "{seen_b:?}");
        std::mem::swap(&mut a, &mut b);
    }
    a.leave(now);
    assert_eq!(exchange(now, &mut a, &mut b), (vec![Event::Done], vec![Event::Ended]));
}

#[test]
fn strangers_are_told_so() {
    let now = clock::now();
    let (mut a, mut b) = connect(now);
    let (mut stranger, _) = connect(now);
    stranger.leave(now);
    let bye = sent(&mut stranger).remove(0);
    b.receive(now, bye);
    assert!(matches!(sent(&mut b)[0].start, Start::Response { code: 481, .. }));
    let mut caller = ua(9);
    caller.invite(now, "sip:u2@127.0.0.1:2", &[], Vec::new());
    b.receive(now, sent(&mut caller).remove(0));
    assert!(matches!(sent(&mut b)[0].start, Start::Response { code: 486, .. }));
    a.leave(now);
    assert_eq!(exchange(now, &mut a, &mut b).1, [Event::Ended]);
}

#[test]
fn a_repeated_bye_gets_the_same_answer_and_no_second_event() {
    let now = clock::now();
    let (mut a, mut b) = connect(now);
    a.leave(now);
    let bye = sent(&mut a).remove(0);
    b.receive(now, bye.clone());
    b.receive(now, bye);
    let answers = sent(&mut b);
    assert_eq!(answers.len(), 2);
    assert_eq!(answers[0], answers[1]);
    assert_eq!(b.poll_event(), Some(Event::Ended));
    assert_eq!(b.poll_event(), None);
}
