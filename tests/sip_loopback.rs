//! Calls between two endpoints of ours over loopback sockets: signalling, media, and what happens when
//! either side does the unexpected.

mod sip_support;

use std::time::Duration;

use antiphon::{
    media::leg::{Codec, LegEnd, LegEvent, MediaLeg},
    sip::{CodecName, DialError, DialRequest, Secret, SipConfig, SipError, TrunkConfig, User},
};
use sip_support::{Pair, event, loopback, pair, pair_with, speak_until_heard, within};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn audio_flows_both_ways_and_bye_ends_both() {
    let Pair { mut caller, mut called, at, .. } = pair().await;
    assert_eq!(caller.format().codec, Codec::Opus);
    assert_eq!(caller.format(), called.format());
    speak_until_heard(&mut caller, &mut called).await;
    speak_until_heard(&mut called, &mut caller).await;

    caller.hang_up().await;
    assert_eq!(event(&mut called, |e| matches!(e, LegEvent::Closed(_))).await, LegEvent::Closed(LegEnd::Remote));
    assert_eq!(event(&mut caller, |e| matches!(e, LegEvent::Closed(_))).await, LegEvent::Closed(LegEnd::Local));
    within("both calls to be forgotten", || at.0.calls() == 0 && at.1.calls() == 0).await;
}
