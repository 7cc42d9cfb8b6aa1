//! `antiphon serve`: the gateway until a signal.

use std::path::Path;

use tokio::signal::unix::{SignalKind, signal};

use super::{Failure, notify};
use crate::app::{App, StartError};
use crate::telemetry;

/// Serves until SIGTERM or SIGINT, drains, and exits; a second signal exits at once.
pub(super) fn run(file: Option<&Path>) -> Result<(), Failure> {
    let config = super::load(file)?;
    config.check_exposure()?;
    let traces = telemetry::init(&config.log).map_err(|message| Failure { code: super::BAD_CONFIG, message })?;
    super::block_on(async {
        let mut terminate = signal(SignalKind::terminate()).map_err(Failure::failed)?;
        let mut interrupt = signal(SignalKind::interrupt()).map_err(Failure::failed)?;
        let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
        let exporting = traces.map(|traces| {
            tokio::spawn(traces.run(async {
                // An error says that the sender is gone, which means the same.
                let _ = stopped.await;
            }))
        });
        let app = App::start(config).await.map_err(failure)?;
        announce(&app);
        notify::ready(&app);
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
        tracing::info!("draining; a second signal exits at once");
        notify::stopping();
        let ended = async {
            app.drain().await;
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
        }
        Ok(())
    })
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
