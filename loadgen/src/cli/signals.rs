//! A measurement that is ended by a signal stops the gateway that it started, and writes what it has.

use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio_util::sync::CancellationToken;

use super::{FAILED, Failure};

/// What shells report of a program that SIGINT ended.
pub(crate) const INTERRUPTED: u8 = 130;

/// Is cancelled by the first SIGINT, SIGTERM or SIGHUP. A second one ends the program at once.
pub(crate) fn stop() -> Result<CancellationToken, Failure> {
    let listen = |kind| signal(kind).map_err(|e| Failure::new(FAILED, format!("no signal handler: {e}")));
    let mut signals =
        [listen(SignalKind::interrupt())?, listen(SignalKind::terminate())?, listen(SignalKind::hangup())?];
    let stop = CancellationToken::new();
    let token = stop.clone();
    tokio::spawn(async move {
        any(&mut signals).await;
        eprintln!("antiphon-loadgen: stopping; what was measured is written (again to stop at once)");
        token.cancel();
        any(&mut signals).await;
        std::process::exit(i32::from(INTERRUPTED));
    });
    Ok(stop)
}

async fn any([interrupt, terminate, hangup]: &mut [Signal; 3]) {
    tokio::select! {
        _ = interrupt.recv() => {}
        _ = terminate.recv() => {}
        _ = hangup.recv() => {}
    }
}

/// What `preparing` gives, unless it is stopped before.
pub(crate) async fn unless_stopped<T>(
    stop: &CancellationToken,
    preparing: impl Future<Output = Result<T, Failure>>,
) -> Result<T, Failure> {
    tokio::select! {
        prepared = preparing => prepared,
        () = stop.cancelled() => Err(Failure::new(INTERRUPTED, "stopped before anything was measured")),
    }
}
