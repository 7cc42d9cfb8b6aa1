//! What systemd is told (sd_notify(3)): that the gateway is ready, that it is alive, that it stops.
//!
//! Without `NOTIFY_SOCKET` in the environment every message is dropped by the crate, so nothing here asks whether
//! systemd is there.

use std::time::Duration;

use sd_notify::NotifyState;

use crate::app::App;

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

/// Says that the gateway drains.
pub(super) fn stopping() {
    tell(&[NotifyState::Stopping, NotifyState::Status("draining: turns in progress end first")]);
}

fn tell(states: &[NotifyState<'_>]) {
    if let Err(error) = sd_notify::notify(states) {
        tracing::warn!(%error, "systemd was not told of the gateway's state");
    }
}
