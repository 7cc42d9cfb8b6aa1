//! `antiphon serve`: the gateway until a signal.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use tokio::signal::unix::{Signal, SignalKind, signal};

use super::{Failure, notify};
use crate::app::{App, Reloader, StartError, Succession, descriptors};
use crate::gateway::{Fault, Gateway};
use crate::telemetry;

/// How often it is looked whether a part is gone.
const LOOK: Duration = Duration::from_millis(500);
/// SIGXFSZ of Linux.
const TOO_LARGE: i32 = 25;

/// Serves until SIGTERM, SIGINT or SIGQUIT, drains, and exits; a second signal exits at once.
pub(super) fn run(file: Option<&Path>, takeover: bool) -> Result<(), Failure> {
    let mut config = super::load(file)?;
    config.check_exposure()?;
    let traces = telemetry::init(&config.log).map_err(|message| Failure { code: super::BAD_CONFIG, message })?;
    if let Some(files) = descriptors::raise() {
        descriptors::fit(&mut config, files).iter().for_each(|line| tracing::warn!("{line}"));
    }
    super::block_on(async {
        let mut terminate = signal(SignalKind::terminate()).map_err(Failure::failed)?;
        let mut interrupt = signal(SignalKind::interrupt()).map_err(Failure::failed)?;
        let mut quit = signal(SignalKind::quit()).map_err(Failure::failed)?;
        // Before anything starts: the default of these is to end the process.
        let asked = Asked::listen().map_err(Failure::failed)?;
        // A file that may not grow any more (`LimitFSIZE`, `ulimit -f`) fails that write, as a full disk does, and no call.
        let _too_large = signal(SignalKind::from_raw(TOO_LARGE)).map_err(Failure::failed)?;
        let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
        let exporting = traces.map(|traces| {
            tokio::spawn(traces.run(async {
                // An error says that the sender is gone, which means the same.
                let _ = stopped.await;
            }))
        });
        let app = App::start_in_place(config, Succession::Serve { takeover }).await.map_err(failure)?;
        telemetry::gpu::watch();
        announce(&app);
        notify::ready(&app);
        let asked = tokio::spawn(asked.obey(app.gateway().clone(), app.reloader().clone()));
        let (mut lost, mut notice) = (None, false);
        tokio::select! {
            // A supervisor's. Somebody at a terminal has no balancer in front.
            _ = terminate.recv() => notice = true,
            _ = interrupt.recv() => {}
            _ = quit.recv() => {}
            () = app.left() => {}
            fault = fatal(app.gateway().clone()) => lost = Some(fault),
        }
        asked.abort();
        if let Some(fault) = &lost {
            tracing::error!(
                part = fault.part,
                reason = fault.reason,
                "a part that the gateway cannot do without is gone"
            );
        }
        tracing::info!("draining; a second signal exits at once");
        notify::stopping(&app.gateway().drain);
        let ended = async {
            if notice {
                app.drain().await
            } else {
                app.drain_at_once().await
            }
            drop(stop);
            if let Some(exporting) = exporting {
                // Bounded by the exporter; the last turns are worth the wait.
                let _ = exporting.await;
            }
        };
        tokio::select! {
            () = ended => {}
            _ = terminate.recv() => tracing::warn!("exiting before all calls and traces have ended"),
            _ = interrupt.recv() => tracing::warn!("exiting before all calls and traces have ended"),
            _ = quit.recv() => tracing::warn!("exiting before all calls and traces have ended"),
        }
        match lost {
            // The supervisor (systemd, Kubernetes) starts it anew.
            Some(fault) => Err(Failure::failed(format!("{} is gone: {}", fault.part, fault.reason))),
            None => Ok(()),
        }
    })
}

/// Waits until a part is gone that only a new process brings back.
async fn fatal(gateway: Gateway) -> Fault {
    let mut look = tokio::time::interval(LOOK);
    loop {
        look.tick().await;
        if let Some(fault) = gateway.faults().into_iter().find(|fault| fault.fatal && !fault.mends) {
            return fault;
        }
    }
}

/// The signals that do not end the gateway: HUP takes up the configuration, USR1 logs the state, USR2 turns debug
/// lines on and off.
struct Asked {
    hang_up: Signal,
    user1: Signal,
    user2: Signal,
}

impl Asked {
    fn listen() -> std::io::Result<Self> {
        Ok(Self {
            hang_up: signal(SignalKind::hangup())?,
            user1: signal(SignalKind::user_defined1())?,
            user2: signal(SignalKind::user_defined2())?,
        })
    }

    async fn obey(mut self, gateway: Gateway, reloader: Arc<Reloader>) {
        let mut detailed = false;
        loop {
            tokio::select! {
                _ = self.hang_up.recv() => {
                    let reloader = reloader.clone();
                    // Reads files.
                    let done = tokio::task::spawn_blocking(move || reloader.reload()).await;
                    if let Ok(Err(error)) = done {
                        tracing::error!(%error, "nothing was reloaded");
                    }
                }
                _ = self.user1.recv() => state(&gateway),
                _ = self.user2.recv() => {
                    detailed = !detailed;
                    let level = reloader.log_level();
                    telemetry::set_level(if detailed { "debug" } else { &level });
                    tracing::info!(detailed, "log level changed");
                }
            }
        }
    }
}

/// What the gateway does now, as log lines.
fn state(gateway: &Gateway) {
    let (calls, sessions, draining) = (gateway.calls.count(), gateway.webrtc.count(), gateway.calls.is_leaving());
    tracing::info!(calls, sessions, draining, ready = gateway.is_ready(), "state");
    for (device, status) in gateway.engine.status().iter().enumerate() {
        tracing::info!(device, phase = ?status.phase, live = status.load.live, batch = status.load.batch, "state of a device");
    }
    for fault in gateway.faults() {
        tracing::warn!(part = fault.part, reason = fault.reason, "state of a part");
    }
}

/// What did not start, with its exit code.
pub(super) fn failure(error: StartError) -> Failure {
    match error {
        StartError::Engine(_) => Failure::unavailable(error),
        _ => Failure::failed(error),
    }
}

fn announce(app: &App) {
    let gateway = app.gateway();
    tracing::info!("console and API: {}/", app.url());
    tracing::info!("WebRTC: UDP {}", gateway.webrtc.local_addr());
    if let Some(sip) = &gateway.sip {
        for (name, address) in [("UDP", sip.local_udp()), ("TCP", sip.local_tcp()), ("TLS", sip.local_tls())] {
            if let Some(address) = address {
                tracing::info!("SIP: {name} {address}");
            }
        }
    }
    let engine = gateway.engine.clone();
    tokio::spawn(async move {
        engine.ready().await;
        for device in engine.status() {
            match (device.phase, device.caps) {
                (crate::synth::device::Phase::Failed(reason), _) => tracing::error!("a device failed: {reason}"),
                (_, Some(caps)) => tracing::info!("ready: {} on {}", caps.name, caps.device),
                _ => {}
            }
        }
    });
}
