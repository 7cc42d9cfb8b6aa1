//! What systemd is told (sd_notify(3)): that the gateway is ready, that it is alive, that it stops.
//!
//! Without `NOTIFY_SOCKET` in the environment every message is dropped by the crate, so nothing here asks whether
//! systemd is there.

use std::time::Duration;

use sd_notify::NotifyState;

use crate::app::App;
use crate::gateway::Drain;

/// What stopping takes beside the drain: last words to registrars and receivers of events, threads that are joined.
const MARGIN: Duration = Duration::from_secs(30);

/// Says that the gateway is ready once speech can be made, and from then on, as often as the unit's `WatchdogSec` wants
/// it, that the control runtime still turns. The task ends with the process.
pub(super) fn ready(app: &App) {
    let gateway = app.gateway().clone();
    tokio::spawn(async move {
        gateway.ready().await;
        tell(&[NotifyState::Ready, NotifyState::Status("accepting calls")]);
        let Some(period) = sd_notify::watchdog_enabled() else { return };
        // Half the limit, as sd_watchdog_enabled(3) advises.
        let mut beat = tokio::time::interval((period / 2).max(Duration::from_millis(100)));
        loop {
            beat.tick().await;
            tell(&[NotifyState::Watchdog]);
        }
    });
}

/// Says that the gateway drains, and by when it will have ended: `TimeoutStopSec` need not be as long as the longest drain.
pub(super) fn stopping(drain: &Drain) {
    let longest = drain.notice + drain.grace.turns.max(drain.grace.bridged) + MARGIN;
    let longest = u32::try_from(longest.as_micros()).unwrap_or(u32::MAX);
    let status = NotifyState::Status("draining: turns in progress end first");
    tell(&[NotifyState::Stopping, NotifyState::ExtendTimeoutUsec(longest), status]);
}

fn tell(states: &[NotifyState<'_>]) {
    if let Err(error) = sd_notify::notify(states) {
        tracing::warn!(%error, "systemd was not told of the gateway's state");
    }
}
